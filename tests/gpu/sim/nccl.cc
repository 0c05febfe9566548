// The replacement of libnccl.so.2. Its communicators live in the executors of
// the simulated cudart (executor_nccl.h).
#include <fcntl.h>
#include <nccl.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/gpu/sim/context.h"
#include "tests/gpu/sim/faults.h"
#include "tests/gpu/sim/machine.h"

#define GPU_SIM_API extern "C" __attribute__((visibility("default")))

struct ncclComm {
  gpu_sim::Context* context;
  uint64_t id;
  int ranks, rank;
  bool blocking;
  // A non-blocking communicator is in progress for a moment after each call.
  std::atomic<int> in_progress{0};
  std::atomic<bool> stalled{false};
};

namespace gpu_sim {
namespace {

std::mutex comms_mutex;
std::set<ncclComm*>& Comms() {
  static auto* const comms = new std::set<ncclComm*>;
  return *comms;
}

bool Known(ncclComm* comm, const char* call) {
  std::lock_guard<std::mutex> lock(comms_mutex);
  if (Comms().count(comm) > 0) return true;
  Finding(std::string(call) +
          ": a communicator that is not (or no longer) there");
  return false;
}

ncclResult_t Planned(const char* name, Fault* fault = nullptr,
                     const std::string& given = "") {
  if (!UsableProcess()) return ncclUnhandledCudaError;
  const Fault planted = Planted(name, given);
  if (fault != nullptr) *fault = planted;
  return static_cast<ncclResult_t>(planted.error);
}

#define ENTER(name) \
  if (const ncclResult_t planned = Planned(#name)) return planned

// What stands in the machine's file (the real one has /etc/nccl.conf, and one
// of the user's): set where the environment does not say otherwise.
void ReadSettings() {
  std::ifstream file(Dir() + "/nccl.conf");
  std::string line;
  while (std::getline(file, line)) {
    const size_t equals = line.find('=');
    if (line.empty() || line[0] == '#' || equals == std::string::npos) continue;
    setenv(line.substr(0, equals).c_str(), line.substr(equals + 1).c_str(), 0);
  }
}

ncclResult_t State(ncclComm* comm) {
  const Reply reply = comm->context->Call(Op::kNcclQuery, {comm->id});
  if (reply.error != 0 || comm->context->fault() != cudaSuccess)
    return ncclUnhandledCudaError;
  return static_cast<ncclResult_t>(reply.arg[0]);
}

size_t BytesOf(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

struct Operation {
  ncclComm* comm;
  cudaStream_t stream;
  NcclItem item;
};
thread_local int group_depth = 0;
thread_local std::vector<Operation> group;

ncclResult_t Issue() {
  std::vector<Operation> operations;
  operations.swap(group);
  Fault fault;
  if (const ncclResult_t planned = Planned("ncclGroupEnd", &fault))
    return planned;
  if (operations.empty()) return ncclSuccess;
  ncclComm* const comm = operations[0].comm;
  std::vector<NcclItem> items;
  for (const Operation& operation : operations) {
    if (operation.comm != comm || operation.stream != operations[0].stream)
      Die("a group of several communicators or streams is not simulated");
    items.push_back(operation.item);
  }
  const ncclResult_t state = State(comm);
  if (state == ncclInProgress) {
    Finding("NCCL: an operation on a communicator that is not ready yet");
    return ncclInvalidUsage;
  }
  if (state != ncclSuccess) return state;
  if (fault.async != 0) {
    comm->context->Call(Op::kNcclFail,
                        {comm->id, static_cast<uint64_t>(fault.async)});
  }
  Context* context;
  int slot;
  if (!ResolveStream(operations[0].stream, "NCCL", &context, &slot))
    return ncclInvalidArgument;
  if (context != comm->context) {
    Finding("NCCL: the stream is of another device than the communicator");
    return ncclInvalidUsage;
  }
  constexpr size_t kMost = kMaxPayload / sizeof(NcclItem);
  if (items.size() > kMost) Die("too many operations in one group");
  const Reply reply =
      context->Call(Op::kNcclGroup, {static_cast<uint64_t>(slot), comm->id},
                    items.data(), items.size() * sizeof(NcclItem));
  if (reply.error != 0) return ncclUnhandledCudaError;
  context->submitted[slot] = reply.arg[0];
  if (comm->blocking) return ncclSuccess;
  comm->in_progress = 1;
  return ncclInProgress;
}

ncclResult_t Add(ncclComm* comm, cudaStream_t stream, const void* pointer,
                 size_t bytes, int peer, bool send) {
  if (peer < 0 || peer >= comm->ranks) return ncclInvalidArgument;
  Operation operation = {comm, stream, {}};
  operation.item.address = reinterpret_cast<uint64_t>(pointer);
  operation.item.bytes = bytes;
  operation.item.peer = peer;
  operation.item.send = send;
  group.push_back(operation);
  return ncclSuccess;
}

ncclResult_t EndOf(ncclComm* comm, bool abort) {
  if (!Known(comm, abort ? "ncclCommAbort" : "ncclCommDestroy"))
    return ncclInvalidArgument;
  if (abort) comm->context->Call(Op::kNcclAbort, {comm->id});
  while (comm->context->fault() == cudaSuccess) {
    const Reply reply = comm->context->Call(Op::kNcclDestroy, {comm->id});
    if (reply.error != 0 || reply.arg[0] == 1) break;
    usleep(1000);
  }
  std::lock_guard<std::mutex> lock(comms_mutex);
  Comms().erase(comm);
  delete comm;
  return ncclSuccess;
}

}  // namespace
}  // namespace gpu_sim

using namespace gpu_sim;  // NOLINT: everything below is of NCCL's names

GPU_SIM_API ncclResult_t ncclGetVersion(int* version) {
  *version =
      static_cast<int>(EnvNumber("GPU_SIM_NCCL_VERSION", NCCL_VERSION_CODE));
  return ncclSuccess;
}

GPU_SIM_API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}
GPU_SIM_API const char* ncclGetLastError(ncclComm_t) { return ""; }

GPU_SIM_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  ENTER(ncclGetUniqueId);
  ReadSettings();
  memset(id, 0, sizeof(*id));
  const int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  if (fd < 0 || read(fd, id->internal, kNcclKeyBytes) != kNcclKeyBytes)
    Die("/dev/urandom");
  close(fd);
  return ncclSuccess;
}

GPU_SIM_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int ranks,
                                                ncclUniqueId id, int rank,
                                                ncclConfig_t* config) {
  *out = nullptr;
  std::string given;
  if (config != nullptr) {
    given = "blocking=" + std::to_string(config->blocking) +
            " minCTAs=" + std::to_string(config->minCTAs) +
            " maxCTAs=" + std::to_string(config->maxCTAs) +
            " CTAPolicy=" + std::to_string(config->CTAPolicy) +
            " connections=" + Env("CUDA_DEVICE_MAX_CONNECTIONS", "8");
  }
  if (const ncclResult_t planned =
          Planned("ncclCommInitRankConfig", nullptr, given))
    return planned;
  ReadSettings();
  if (rank < 0 || rank >= ranks) return ncclInvalidArgument;
  if (config != nullptr && config->magic != 0xcafebeef)
    return ncclInvalidArgument;
  cudaError_t error;
  Context* const context = CurrentContext(&error);
  if (context == nullptr || context->fault() != cudaSuccess)
    return ncclUnhandledCudaError;
  int version;
  ncclGetVersion(&version);
  std::string payload(id.internal, kNcclKeyBytes);
  payload += Env("NCCL_HOSTID", "").substr(0, kHostIdBytes - 1);
  payload += '\0';
  const Reply reply = context->Call(
      Op::kNcclInit,
      {static_cast<uint64_t>(ranks), static_cast<uint64_t>(rank),
       static_cast<uint64_t>(version),
       static_cast<uint64_t>(EnvNumber("GPU_SIM_NCCL_EAGER_BYTES", 0))},
      payload.data(), payload.size());
  if (reply.error != 0) return ncclUnhandledCudaError;
  auto* comm = new ncclComm;
  comm->context = context;
  comm->id = reply.arg[0];
  comm->ranks = ranks;
  comm->rank = rank;
  comm->blocking = config == nullptr || config->blocking != 0;
  {
    std::lock_guard<std::mutex> lock(comms_mutex);
    Comms().insert(comm);
  }
  *out = comm;
  if (!comm->blocking) return ncclInProgress;
  while (true) {
    const ncclResult_t state = State(comm);
    if (state != ncclInProgress) return state;
    usleep(1000);
  }
}
GPU_SIM_API ncclResult_t ncclCommInitRank(ncclComm_t* out, int ranks,
                                          ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, ranks, id, rank, nullptr);
}

GPU_SIM_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm,
                                               ncclResult_t* result) {
  ENTER(ncclCommGetAsyncError);
  if (!Known(comm, "ncclCommGetAsyncError")) return ncclInvalidArgument;
  *result = State(comm);
  if (*result == ncclSuccess &&
      (comm->in_progress.exchange(0) > 0 || comm->stalled))
    *result = ncclInProgress;
  return ncclSuccess;
}

GPU_SIM_API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  Fault fault;
  if (const ncclResult_t planned = Planned("ncclCommFinalize", &fault))
    return planned;
  if (!Known(comm, "ncclCommFinalize")) return ncclInvalidArgument;
  comm->stalled = fault.stall;
  if (!comm->blocking) {
    comm->in_progress = 1;
    return ncclInProgress;
  }
  return ncclSuccess;
}
GPU_SIM_API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  ENTER(ncclCommDestroy);
  return EndOf(comm, false);
}
GPU_SIM_API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  ENTER(ncclCommAbort);
  return EndOf(comm, true);
}

GPU_SIM_API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->ranks;
  return ncclSuccess;
}
GPU_SIM_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

GPU_SIM_API ncclResult_t ncclGroupStart() {
  ENTER(ncclGroupStart);
  ++group_depth;
  return ncclSuccess;
}
GPU_SIM_API ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) {
    Finding("ncclGroupEnd without ncclGroupStart");
    return ncclInvalidUsage;
  }
  return --group_depth > 0 ? ncclSuccess : Issue();
}

GPU_SIM_API ncclResult_t ncclSend(const void* buffer, size_t count,
                                  ncclDataType_t type, int peer,
                                  ncclComm_t comm, cudaStream_t stream) {
  ENTER(ncclSend);
  if (!Known(comm, "ncclSend")) return ncclInvalidArgument;
  const ncclResult_t added =
      Add(comm, stream, buffer, count * BytesOf(type), peer, true);
  return added != ncclSuccess || group_depth > 0 ? added : Issue();
}
GPU_SIM_API ncclResult_t ncclRecv(void* buffer, size_t count,
                                  ncclDataType_t type, int peer,
                                  ncclComm_t comm, cudaStream_t stream) {
  ENTER(ncclRecv);
  if (!Known(comm, "ncclRecv")) return ncclInvalidArgument;
  const ncclResult_t added =
      Add(comm, stream, buffer, count * BytesOf(type), peer, false);
  return added != ncclSuccess || group_depth > 0 ? added : Issue();
}
GPU_SIM_API ncclResult_t ncclBroadcast(const void* send, void* receive,
                                       size_t count, ncclDataType_t type,
                                       int root, ncclComm_t comm,
                                       cudaStream_t stream) {
  ENTER(ncclBroadcast);
  if (!Known(comm, "ncclBroadcast")) return ncclInvalidArgument;
  if (root < 0 || root >= comm->ranks) return ncclInvalidArgument;
  const size_t bytes = count * BytesOf(type);
  if (comm->rank != root) {
    Add(comm, stream, receive, bytes, root, false);
  } else {
    for (int peer = 0; peer < comm->ranks; ++peer) {
      if (peer != root) Add(comm, stream, send, bytes, peer, true);
    }
    if (send != receive) {
      Add(comm, stream, send, bytes, root, true);
      Add(comm, stream, receive, bytes, root, false);
    }
  }
  return group_depth > 0 ? ncclSuccess : Issue();
}
GPU_SIM_API ncclResult_t ncclBcast(void* buffer, size_t count,
                                   ncclDataType_t type, int root,
                                   ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
