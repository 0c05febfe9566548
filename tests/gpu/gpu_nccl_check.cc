// Whether NCCL starts, moves bytes and ends on this machine, with one GPU: two
// processes that are different hosts to NCCL (NCCL_HOSTID) meet over sockets on
// the same one. For correctness alone: a daemon never does that.
//
// Then the same two as ends of edges (transport/nccl): three updates over one
// communicator that is kept between them, and an edge in each direction at
// once.
//
//   gpu_nccl_check           exit code 0 when all of it went well
#include <cuda_runtime_api.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "glog/logging.h"
#include "transport/cuda/device.h"
#include "transport/nccl/nccl_channel.h"
#include "transport/nccl/nccl_library.h"

namespace weightsync {
namespace transport {
namespace nccl {
namespace {

constexpr size_t kBytes = 1 << 20;
constexpr double kDeadline = 60;

double Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * now.tv_nsec;
}

[[noreturn]] void Fail(int rank, const std::string& what) {
  fprintf(stderr, "gpu_nccl_check: rank %d: %s\n", rank, what.c_str());
  _exit(1);
}

class Rank {
 public:
  explicit Rank(int rank) : rank_(rank) {
    auto library = NcclLibrary::Load();
    if (!library.ok()) Fail(rank, std::string(library.status().message()));
    library_ = *std::move(library);
  }

  // The first makes the id, and the other reads it.
  void Join(int from, int to) {
    ncclUniqueId id;
    if (rank_ == 0) {
      Check(library_->api().GetUniqueId(&id), "ncclGetUniqueId");
      if (write(to, &id, sizeof(id)) != sizeof(id)) Fail(rank_, "the pipe");
    } else if (read(from, &id, sizeof(id)) != sizeof(id)) {
      Fail(rank_, "the pipe");
    }
    Cuda(cudaSetDevice(0), "cudaSetDevice");
    Cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
         "cudaStreamCreateWithFlags");
    Cuda(cudaMalloc(&memory_, kBytes), "cudaMalloc");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = 1;
    const double began = Now();
    Check(library_->api().CommInitRankConfig(&comm_, 2, id, rank_, &config),
          "ncclCommInitRankConfig");
    Settle("ncclCommInitRankConfig");
    joined_ = Now() - began;
  }

  // The first sends what the other compares.
  void Move() {
    std::vector<unsigned char> bytes(kBytes);
    for (size_t i = 0; i < kBytes; ++i)
      bytes[i] = static_cast<unsigned char>(i * 2654435761u >> 11);
    if (rank_ == 0) {
      Cuda(cudaMemcpy(memory_, bytes.data(), kBytes, cudaMemcpyHostToDevice),
           "cudaMemcpy");
      Check(library_->api().Send(memory_, kBytes, ncclUint8, 1, comm_, stream_),
            "ncclSend");
    } else {
      Check(library_->api().Recv(memory_, kBytes, ncclUint8, 0, comm_, stream_),
            "ncclRecv");
    }
    Settle("a send and a receive");
    const double end = Now() + kDeadline;
    cudaError_t state;
    while ((state = cudaStreamQuery(stream_)) == cudaErrorNotReady) {
      if (Now() > end) Fail(rank_, "1 MiB did not arrive in a minute");
      usleep(100);
    }
    Cuda(state, "cudaStreamQuery");
    if (rank_ == 0) return;
    std::vector<unsigned char> found(kBytes);
    Cuda(cudaMemcpy(found.data(), memory_, kBytes, cudaMemcpyDeviceToHost),
         "cudaMemcpy");
    if (found != bytes) Fail(rank_, "other bytes arrived than were sent");
  }

  // In the middle of a receive for which nobody sends.
  void Abort() {
    if (rank_ == 1) {
      // It may be told already that the other one is gone; it is asked for
      // nothing but to return.
      library_->api().Recv(memory_, kBytes, ncclUint8, 0, comm_, stream_);
      usleep(100000);
    }
    const double began = Now();
    Check(library_->api().CommAbort(comm_), "ncclCommAbort");
    printf("rank %d: joined in %.3f s, aborted in %.3f s\n", rank_, joined_,
           Now() - began);
    fflush(stdout);
    Cuda(cudaFree(memory_), "cudaFree");
    Cuda(cudaStreamDestroy(stream_), "cudaStreamDestroy");
  }

 private:
  void Check(ncclResult_t result, const char* call) {
    const absl::Status status = library_->Check(result, call);
    if (!status.ok()) Fail(rank_, std::string(status.message()));
  }
  void Cuda(cudaError_t error, const char* call) {
    if (error != cudaSuccess)
      Fail(rank_, std::string(call) + ": " + cudaGetErrorString(error));
  }
  void Settle(const char* call) {
    const double end = Now() + kDeadline;
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
      Check(library_->api().CommGetAsyncError(comm_, &state), call);
      if (Now() > end) Fail(rank_, std::string(call) + " took over a minute");
      usleep(100);
    }
    Check(state, call);
  }

  const int rank_;
  std::unique_ptr<NcclLibrary> library_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  void* memory_ = nullptr;
  double joined_ = 0;
};

// The ends that one of the two processes has of edges between them.
class Edges {
 public:
  Edges(int rank, int from, int to) : rank_(rank), from_(from), to_(to) {
    const auto devices = cuda::ListDevices();
    if (!devices.ok() || devices->empty()) Fail(rank, "no device");
    NcclOptions options;
    options.device_uuid = (*devices)[0].uuid;
    options.max_ctas = 1;
    options.staging_bytes = kBytes;
    auto device = NcclDevice::Create(options);
    if (!device.ok()) Fail(rank, std::string(device.status().message()));
    device_ = *std::move(device);
  }

  void Check() {
    for (unsigned update = 1; update <= 3; ++update) {
      const double began = Now();
      std::unique_ptr<tcp::PayloadChannel> end = Agree(/*sender=*/0);
      Connect(end.get());
      const double connected = Now() - began;
      Move(end.get(), /*sender=*/0, update);
      if (device_->communicators() != 1)
        Fail(rank_, "a communicator was made that was there");
      printf("rank %d: update %u connected in %.3f s\n", rank_, update,
             connected);
      end->Finish();
      end = nullptr;
      if (device_->idle_communicators() != 1)
        Fail(rank_, "a communicator was not kept");
    }
    // Each waits for its peer on a thread and streams of its own.
    std::unique_ptr<tcp::PayloadChannel> there = Agree(0), back = Agree(1);
    const double began = Now();
    std::thread other([&] {
      Connect(there.get());
      Move(there.get(), 0, 4);
    });
    Connect(back.get());
    Move(back.get(), 1, 5);
    other.join();
    printf("rank %d: both directions at once in %.3f s\n", rank_,
           Now() - began);
    fflush(stdout);
    there->Finish();
    back->Finish();
  }

 private:
  // Several staging buffers, and a rest.
  static constexpr size_t kMoved = 5 * kBytes + 12345;
  static bool Runs() { return false; }

  void Say(const std::string& bytes) {
    const uint32_t size = static_cast<uint32_t>(bytes.size());
    if (write(to_, &size, sizeof(size)) != sizeof(size) ||
        write(to_, bytes.data(), size) != static_cast<ssize_t>(size))
      Fail(rank_, "the pipe");
  }
  std::string Hear() {
    uint32_t size = 0;
    std::string bytes(4096, '\0');
    if (read(from_, &size, sizeof(size)) != sizeof(size) ||
        size > bytes.size() ||
        read(from_, &bytes[0], size) != static_cast<ssize_t>(size))
      Fail(rank_, "the pipe");
    bytes.resize(size);
    return bytes;
  }

  // What daemons say over their connection.
  std::unique_ptr<tcp::PayloadChannel> Agree(int sender) {
    auto made = NewNcclChannel(device_.get(), rank_ == 0 ? "c/one" : "c/zero");
    if (!made.ok()) Fail(rank_, std::string(made.status().message()));
    while (true) {
      if (rank_ == sender) {
        auto offer = (*made)->Offer();
        if (!offer.ok()) Fail(rank_, std::string(offer.status().message()));
        // Two ends on one GPU are refused: it pretends to be on another.
        const size_t uuid = offer->find("GPU-");
        if (uuid != std::string::npos) (*offer)[uuid] = 'x';
        Say(*offer);
        const auto agreed = (*made)->Answered(Hear());
        if (!agreed.ok()) Fail(rank_, std::string(agreed.status().message()));
        if (*agreed) return *std::move(made);
      } else {
        const auto accepted = (*made)->Accept(Hear());
        if (!accepted.ok())
          Fail(rank_, std::string(accepted.status().message()));
        Say(accepted->answer);
        if (accepted->agreed) return *std::move(made);
      }
    }
  }

  void Connect(tcp::PayloadChannel* end) {
    const absl::Status status = end->Connect(absl::Seconds(kDeadline), Runs);
    if (!status.ok()) Fail(rank_, std::string(status.message()));
  }

  void Move(tcp::PayloadChannel* end, int sender, unsigned update) {
    std::string bytes(kMoved, '\0');
    for (size_t i = 0; i < kMoved; ++i)
      bytes[i] = static_cast<char>((i + update) * 2654435761u >> 11);
    std::string got(kMoved, '\0');
    const absl::Status status =
        rank_ == sender ? end->Send({absl::MakeConstSpan(bytes.data(), 1000),
                                     absl::MakeConstSpan(bytes).subspan(1000)},
                                    absl::Seconds(kDeadline), Runs)
                        : end->Receive({absl::MakeSpan(got)},
                                       absl::Seconds(kDeadline), Runs);
    if (!status.ok()) Fail(rank_, std::string(status.message()));
    if (rank_ != sender && got != bytes)
      Fail(rank_, "other bytes arrived over an edge than were sent");
  }

  const int rank_, from_, to_;
  std::unique_ptr<NcclDevice> device_;
};

int Run() {
  setenv("NCCL_P2P_DISABLE", "1", 1);
  setenv("NCCL_SHM_DISABLE", "1", 1);
  setenv("NCCL_IB_DISABLE", "1", 1);
  setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  int pipes[2], back[2];
  if (pipe(pipes) != 0 || pipe(back) != 0) return 1;
  // Before either has a context: one does not survive a fork.
  pid_t ranks[2];
  for (int rank = 0; rank < 2; ++rank) {
    ranks[rank] = fork();
    if (ranks[rank] != 0) continue;
    setenv("NCCL_HOSTID", rank == 0 ? "one" : "two", 1);
    Rank self(rank);
    self.Join(pipes[0], pipes[1]);
    self.Move();
    self.Abort();
    Edges(rank, rank == 0 ? back[0] : pipes[0], rank == 0 ? pipes[1] : back[1])
        .Check();
    exit(0);
  }
  for (const int end : {pipes[0], pipes[1], back[0], back[1]}) close(end);
  int left = 2;
  bool failed = false;
  for (const double end = Now() + 2 * kDeadline; left > 0 && Now() < end;) {
    int status = 0;
    if (waitpid(-1, &status, WNOHANG) <= 0) {
      usleep(10000);
      continue;
    }
    --left;
    if (status == 0) continue;
    failed = true;
    break;  // the other one waits for it
  }
  if (left > 0 && !failed)
    fprintf(stderr, "gpu_nccl_check: time is up: a rank hangs\n");
  for (const pid_t rank : ranks) kill(rank, SIGKILL);
  return failed || left > 0 ? 1 : 0;
}

}  // namespace
}  // namespace nccl
}  // namespace transport
}  // namespace weightsync

int main() {
  FLAGS_logtostderr = true;
  return weightsync::transport::nccl::Run();
}
