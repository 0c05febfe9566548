// The context of one process on one simulated GPU: see protocol.h.
//
//   gpu_sim_executor DEVICE CLIENT_PID REGION
//
// Started by the simulated libcudart with a socket and the control page as file
// descriptors. One thread answers requests; each stream has a thread that does
// its operations in order.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/sim/executor_nccl.h"
#include "tests/gpu/sim/machine.h"
#include "tests/gpu/sim/protocol.h"
#include "tests/gpu/sim/twin.h"

namespace gpu_sim {
namespace {

// cudaError_t, as driver_types.h has it.
enum CudaError {
  kSuccess = 0,
  kInvalidValue = 1,
  kMemoryAllocation = 2,
  kInvalidDevice = 101,
  kDeviceUninitialized = 201,
  kMapBufferObjectFailed = 205,
  kPeerAccessUnsupported = 217,
  kInvalidResourceHandle = 400,
  kIllegalAddress = 700,
  kLaunchFailure = 719,
  kBusy = -1,  // not of CUDA: there is work in flight, ask again
};

struct Handle {
  uint64_t magic;
  uint64_t buffer;
  int64_t bytes;
  int32_t device;
  int32_t client;
  unsigned char uuid[16];
  unsigned char rest[16];
};
static_assert(sizeof(Handle) == kHandleBytes, "cudaIpcMemHandle_t");
constexpr uint64_t kHandleMagic = 0x53494d48414e444c;

Control* control;
Device device;
pid_t client;

int64_t Nanos() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

void Wake() {
  control->wake.fetch_add(1);
  syscall(SYS_futex, &control->wake, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// The context is lost for good. Safe in a signal handler.
void Fault(int error) {
  int32_t none = 0;
  control->fault.compare_exchange_strong(none, error);
  Wake();
}

void OnFault(int signal, siginfo_t* info, void*) {
  char line[128];
  const int length = snprintf(
      line, sizeof(line), "an operation touched the address %p (signal %d)\n",
      info->si_addr, signal);
  const std::string& dir = Dir();
  char path[256];
  snprintf(path, sizeof(path), "%s/findings", dir.c_str());
  const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  (void)!write(fd, line, length);
  close(fd);
  (void)!write(2, "gpu_sim: MISUSE: ", 17);
  (void)!write(2, line, length);
  Fault(kIllegalAddress);
  // What this thread was doing is never done.
  while (true) pause();
}

// Logical clocks: what an operation is certain to come after.
using Clock = std::array<uint64_t, kMaxStreams>;

void Merge(const Clock& from, Clock* to) {
  for (int i = 0; i < kMaxStreams; ++i) (*to)[i] = std::max((*to)[i], from[i]);
}

struct Access {
  int stream;
  uint64_t sequence;
  uint64_t begin, end;
  bool write;
};

struct Mapping {
  uint64_t id = 0;
  uint64_t address = 0;
  uint64_t bytes = 0;
  uint64_t room = 0;  // of addresses
  bool imported = false;
  int opens = 0;
  std::vector<Access> accesses;
};

class Stream {
 public:
  explicit Stream(int slot) : slot_(slot) {
    submitted_ = control->streams[slot].load();
    thread_ = std::thread([this] { Run(); });
  }
  ~Stream() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  uint64_t Add(std::function<void()> operation) {
    std::lock_guard<std::mutex> lock(mutex_);
    operations_.push_back(std::move(operation));
    changed_.notify_all();
    return ++submitted_;
  }
  uint64_t submitted() const { return submitted_; }
  bool idle() const { return control->streams[slot_] == submitted_; }

 private:
  void Run() {
    static const int64_t delay = EnvNumber("GPU_SIM_DELAY_US", 50);
    std::mt19937 random(slot_ * 7919 + getpid());
    while (true) {
      std::function<void()> operation;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock,
                      [this] { return stopping_ || !operations_.empty(); });
        if (operations_.empty()) return;
        operation = std::move(operations_.front());
        operations_.pop_front();
      }
      if (control->fault != 0) {
        while (true) pause();
      }
      if (delay > 0) usleep(random() % (delay + 1));
      operation();
      control->streams[slot_].fetch_add(1);
      Wake();
    }
  }

  const int slot_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> operations_;
  std::atomic<uint64_t> submitted_{0};
  bool stopping_ = false;
  std::thread thread_;
};

// Between the memory of this process and that of the client.
bool CopyHost(uint64_t device_address, uint64_t host_address, uint64_t bytes,
              bool to_host) {
  while (bytes > 0) {
    iovec own = {reinterpret_cast<void*>(device_address), bytes};
    iovec other = {reinterpret_cast<void*>(host_address), bytes};
    const ssize_t moved = to_host
                              ? process_vm_writev(client, &own, 1, &other, 1, 0)
                              : process_vm_readv(client, &own, 1, &other, 1, 0);
    if (moved <= 0) {
      // A process that dies under a copy is no misuse.
      if (moved < 0 && errno == ESRCH) return false;
      char text[160];
      snprintf(text, sizeof(text),
               "a copy touches %llu bytes of host memory at %#llx that is not "
               "there: %s",
               static_cast<unsigned long long>(bytes),
               static_cast<unsigned long long>(host_address), strerror(errno));
      Finding(text);
      return false;
    }
    bytes -= moved;
    device_address += moved;
    host_address += moved;
  }
  return true;
}

// In the list of who has it open, `from` becomes `to`; 0 is a free place.
void NoteOpen(Buffer* buffer, pid_t from, pid_t to) {
  for (pid_t& opener : buffer->openers) {
    if (opener != from) continue;
    opener = to;
    return;
  }
  if (to != 0) Die("an allocation is open in too many processes");
}

class Executor {
 public:
  explicit Executor(uint64_t region)
      : next_address_(region), end_(region + kRegionBytes) {
    streams_[0] = std::make_unique<Stream>(0);
    clocks_.resize(kMaxStreams);
    for (const std::string& path : TwinLibraries()) {
      if (dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr)
        Die(std::string("GPU_SIM_KERNELS: ") + dlerror());
    }
  }

  void Serve() {
    std::vector<char> payload(kMaxPayload + sizeof(Request));
    while (true) {
      const ssize_t got = recv(kSocketFd, payload.data(), payload.size(), 0);
      if (got < static_cast<ssize_t>(sizeof(Request))) break;
      Request request;
      memcpy(&request, payload.data(), sizeof(request));
      reply_ = Reply();
      out_.clear();
      if (control->fault != 0 && request.op != Op::kGoodbye &&
          request.op != Op::kNcclAbort && request.op != Op::kNcclQuery) {
        reply_.error = control->fault;
      } else {
        Answer(request, payload.data() + sizeof(Request));
      }
      reply_.payload_bytes = out_.size();
      std::string message(reinterpret_cast<const char*>(&reply_),
                          sizeof(reply_));
      message += out_;
      if (send(kSocketFd, message.data(), message.size(), MSG_NOSIGNAL) < 0)
        break;
      if (request.op == Op::kGoodbye) break;
    }
    Leave();
  }

 private:
  // Gives back what the process has left, as the driver does.
  void Leave() {
    LockedState state;
    for (const auto& [address, mapping] : mappings_) {
      Buffer* buffer = state.Find(mapping.id);
      if (buffer == nullptr) continue;
      if (mapping.imported) {
        NoteOpen(buffer, client, 0);
      } else {
        state.Release(buffer);
      }
    }
    state->used[device.index] -= kContextBytes + kCommBytes * comms_.size();
    for (pid_t& entry : state->contexts[device.index]) {
      if (entry == client) entry = 0;
    }
  }

  void Answer(const Request& request, const char* payload);
  int Malloc(uint64_t bytes, bool exportable);
  int Free(uint64_t address);
  int IpcOpen(uint64_t visible, uint64_t peers, const char* payload);
  int IpcClose(uint64_t address);
  int Launch(Stream* stream, const Request& request, const char* payload);
  int Goodbye();

  uint64_t Place(uint64_t room) {
    auto& spare = spare_[room];
    if (!spare.empty()) {
      // As a real allocator, the address that was freed last.
      const uint64_t address = spare.back();
      spare.pop_back();
      return address;
    }
    // A gap after each, so that an overrun is seen.
    if (next_address_ + room + kGranularity > end_) return 0;
    const uint64_t address = next_address_;
    next_address_ += room + kGranularity;
    return address;
  }

  Mapping* FindRange(uint64_t address, uint64_t bytes) {
    auto at = mappings_.upper_bound(address);
    if (at == mappings_.begin()) return nullptr;
    --at;
    Mapping& mapping = at->second;
    return address + bytes <= mapping.address + mapping.bytes ? &mapping
                                                              : nullptr;
  }

  bool Idle() {
    for (const auto& stream : streams_) {
      if (stream != nullptr && !stream->idle()) return false;
    }
    return true;
  }

  Stream* FindStream(uint64_t slot) {
    return slot < kMaxStreams ? streams_[slot].get() : nullptr;
  }

  // Notes that the next operation of `slot` touches a range; a conflict with an
  // operation that need not have ended is a race.
  bool Touch(int slot, uint64_t address, uint64_t bytes, bool write,
             const char* what) {
    if (bytes == 0) return true;
    Mapping* mapping = FindRange(address, bytes);
    if (mapping == nullptr) {
      char text[200];
      snprintf(text, sizeof(text),
               "%s touches %llu bytes of device memory at %#llx that are not "
               "(or no longer) there",
               what, static_cast<unsigned long long>(bytes),
               static_cast<unsigned long long>(address));
      Finding(text);
      return false;
    }
    if (!races_) return true;
    Merge(host_clock_, &clocks_[slot]);
    const Clock& clock = clocks_[slot];
    std::vector<Access>& accesses = mapping->accesses;
    accesses.erase(std::remove_if(accesses.begin(), accesses.end(),
                                  [this](const Access& access) {
                                    return access.sequence <=
                                           host_clock_[access.stream];
                                  }),
                   accesses.end());
    for (const Access& access : accesses) {
      if ((access.write || write) && access.stream != slot &&
          address < access.end && access.begin < address + bytes &&
          clock[access.stream] < access.sequence) {
        char text[200];
        snprintf(text, sizeof(text),
                 "%s: streams %d and %d touch the same bytes and neither waits "
                 "for the other",
                 what, access.stream, slot);
        Finding(text);
        break;
      }
    }
    accesses.push_back({slot, streams_[slot]->submitted() + 1, address,
                        address + bytes, write});
    return true;
  }

  uint64_t Submit(uint64_t slot, std::function<void()> operation) {
    Merge(host_clock_, &clocks_[slot]);
    const uint64_t sequence = streams_[slot]->Add(std::move(operation));
    clocks_[slot][slot] = sequence;
    reply_.arg[0] = sequence;
    return sequence;
  }

  const bool races_ = EnvNumber("GPU_SIM_RACES", 1) != 0;
  std::map<uint64_t, Mapping> mappings_;             // by address
  std::map<uint64_t, std::vector<uint64_t>> spare_;  // by room
  uint64_t next_address_;
  const uint64_t end_;
  std::array<std::unique_ptr<Stream>, kMaxStreams> streams_;
  std::vector<Clock> clocks_;
  Clock host_clock_ = {};
  struct Event {
    bool used = false;
    uint64_t records = 0;
    Clock clock = {};
  };
  std::map<uint64_t, Event> events_;
  struct Comm {
    std::unique_ptr<NcclComm> comm;
    std::map<int, uint64_t> last;  // its last operation on each stream
  };
  bool IdleComm(const Comm& comm) {
    for (const auto& [slot, sequence] : comm.last) {
      if (control->streams[slot] < sequence) return false;
    }
    return true;
  }

  std::map<uint64_t, Comm> comms_;
  uint64_t next_comm_ = 1;
  Reply reply_;
  std::string out_;
};

void Executor::Answer(const Request& request, const char* payload) {
  const uint64_t* arg = request.arg;
  switch (request.op) {
    case Op::kMalloc:
      reply_.error = Malloc(arg[0], arg[1] == 0);
      return;
    case Op::kFree:
      reply_.error = Free(arg[0]);
      return;
    case Op::kIpcGet: {
      const auto at = mappings_.find(arg[0]);
      if (at == mappings_.end() || at->second.imported) {
        reply_.error = kInvalidValue;
        return;
      }
      LockedState state;
      const Buffer* buffer = state.Find(at->second.id);
      if (buffer == nullptr || !buffer->exportable || device.mig) {
        reply_.error = kInvalidValue;
        return;
      }
      Handle handle = {};
      handle.magic = kHandleMagic;
      handle.buffer = buffer->id;
      handle.bytes = buffer->bytes;
      handle.device = device.index;
      handle.client = client;
      memcpy(handle.uuid, device.uuid, sizeof(handle.uuid));
      out_.assign(reinterpret_cast<const char*>(&handle), sizeof(handle));
      return;
    }
    case Op::kIpcOpen:
      reply_.error = IpcOpen(arg[0], arg[1], payload);
      return;
    case Op::kIpcClose:
      reply_.error = IpcClose(arg[0]);
      return;
    case Op::kMemInfo: {
      LockedState state;
      state.Reap();
      reply_.arg[0] = device.memory_bytes - state->used[device.index];
      reply_.arg[1] = device.memory_bytes;
      return;
    }
    case Op::kStreamCreate:
      for (int slot = 1; slot < kMaxStreams; ++slot) {
        if (streams_[slot] != nullptr) continue;
        streams_[slot] = std::make_unique<Stream>(slot);
        reply_.arg[0] = slot;
        return;
      }
      Die("too many streams");
    case Op::kStreamDestroy: {
      Stream* stream = FindStream(arg[0]);
      if (stream == nullptr || arg[0] == 0) {
        reply_.error = kInvalidResourceHandle;
      } else if (!stream->idle()) {
        // The real one destroys it later; the client waits for that here.
        reply_.error = kBusy;
      } else {
        streams_[arg[0]].reset();
      }
      return;
    }
    case Op::kEventCreate:
      for (uint64_t slot = 0; slot < kMaxEvents; ++slot) {
        Event& event = events_[slot];
        if (event.used) continue;
        event.used = true;
        event.records = control->events[slot];
        reply_.arg[0] = slot;
        reply_.arg[1] = event.records;
        return;
      }
      Die("too many events");
    case Op::kEventDestroy:
      events_[arg[0]].used = false;
      return;
    case Op::kCopy: {
      Stream* stream = FindStream(arg[0]);
      const int count = request.payload_bytes / sizeof(CopyItem);
      std::vector<CopyItem> items(count);
      memcpy(items.data(), payload, request.payload_bytes);
      if (stream == nullptr) {
        reply_.error = kInvalidResourceHandle;
        return;
      }
      for (const CopyItem& item : items) {
        if ((item.dst_device &&
             !Touch(arg[0], item.dst, item.bytes, true, "a copy")) ||
            (item.src_device &&
             !Touch(arg[0], item.src, item.bytes, false, "a copy"))) {
          reply_.error = kInvalidValue;
          return;
        }
      }
      Submit(arg[0], [items] {
        for (const CopyItem& item : items) {
          bool done = true;
          if (item.dst_device && item.src_device) {
            memmove(reinterpret_cast<void*>(item.dst),
                    reinterpret_cast<const void*>(item.src), item.bytes);
          } else if (item.dst_device) {
            done = CopyHost(item.dst, item.src, item.bytes, false);
          } else {
            done = CopyHost(item.src, item.dst, item.bytes, true);
          }
          if (!done) {
            Fault(kIllegalAddress);
            while (true) pause();
          }
        }
      });
      return;
    }
    case Op::kMemset: {
      if (FindStream(arg[0]) == nullptr) {
        reply_.error = kInvalidResourceHandle;
      } else if (!Touch(arg[0], arg[1], arg[3], true, "a memset")) {
        reply_.error = kInvalidValue;
      } else {
        const uint64_t address = arg[1], value = arg[2], bytes = arg[3];
        Submit(arg[0], [=] {
          memset(reinterpret_cast<void*>(address), static_cast<int>(value),
                 bytes);
        });
      }
      return;
    }
    case Op::kLaunch:
      reply_.error = Launch(FindStream(arg[0]), request, payload);
      return;
    case Op::kEventRecord: {
      if (FindStream(arg[0]) == nullptr || !events_[arg[1]].used) {
        reply_.error = kInvalidResourceHandle;
        return;
      }
      const uint64_t slot = arg[1];
      Event& event = events_[slot];
      const uint64_t record = ++event.records;
      Submit(arg[0], [=] {
        control->event_times[slot] = Nanos();
        control->events[slot] = record;
        Wake();
      });
      event.clock = clocks_[arg[0]];
      reply_.arg[1] = record;
      return;
    }
    case Op::kEventWait: {
      if (FindStream(arg[0]) == nullptr || !events_[arg[1]].used) {
        reply_.error = kInvalidResourceHandle;
        return;
      }
      const uint64_t slot = arg[1], record = arg[2];
      Merge(events_[slot].clock, &clocks_[arg[0]]);
      Submit(arg[0], [=] {
        while (control->events[slot] < record) {
          const uint32_t seen = control->wake;
          if (control->events[slot] >= record) break;
          const timespec wait = {0, 20000000};
          syscall(SYS_futex, &control->wake, FUTEX_WAIT, seen, &wait, nullptr,
                  0);
        }
      });
      return;
    }
    case Op::kObserved:
      if (arg[0] >= kMaxStreams) {
        Merge(events_[arg[0] - kMaxStreams].clock, &host_clock_);
      } else if (streams_[arg[0]] != nullptr) {
        if (arg[1] == streams_[arg[0]]->submitted())
          Merge(clocks_[arg[0]], &host_clock_);
        host_clock_[arg[0]] = std::max(host_clock_[arg[0]], arg[1]);
      }
      return;
    case Op::kNcclInit: {
      NcclComm::Options options;
      options.ranks = arg[0];
      options.rank = arg[1];
      options.version = arg[2];
      options.eager_bytes = arg[3];
      memcpy(options.uuid, device.uuid, sizeof(options.uuid));
      for (int i = 0; i < kNcclKeyBytes; ++i) {
        char hex[3];
        snprintf(hex, sizeof(hex), "%02x",
                 static_cast<unsigned char>(payload[i]));
        options.key += hex;
      }
      options.host_id = std::string(payload + kNcclKeyBytes);
      {
        LockedState state;
        state->used[device.index] += kCommBytes;
      }
      const uint64_t id = next_comm_++;
      comms_[id].comm = std::make_unique<NcclComm>(options);
      reply_.arg[0] = id;
      return;
    }
    case Op::kNcclQuery:
      reply_.arg[0] = comms_.count(arg[0]) ? comms_[arg[0]].comm->async_error()
                                           : kNcclInvalidUsage;
      return;
    case Op::kNcclGroup: {
      NcclComm* comm =
          comms_.count(arg[1]) ? comms_[arg[1]].comm.get() : nullptr;
      if (comm == nullptr || FindStream(arg[0]) == nullptr) {
        Finding("NCCL: a communicator or stream that is not there");
        reply_.error = kInvalidResourceHandle;
        return;
      }
      std::vector<NcclItem> items(request.payload_bytes / sizeof(NcclItem));
      memcpy(items.data(), payload, request.payload_bytes);
      for (const NcclItem& item : items) {
        if (!Touch(arg[0], item.address, item.bytes, item.send == 0, "NCCL")) {
          reply_.error = kInvalidValue;
          return;
        }
      }
      comms_[arg[1]].last[arg[0]] =
          Submit(arg[0], [comm, items] { comm->Run(items); });
      return;
    }
    case Op::kNcclFail:
      if (comms_.count(arg[0])) comms_[arg[0]].comm->Fail(arg[1]);
      return;
    case Op::kNcclAbort:
      if (comms_.count(arg[0])) comms_[arg[0]].comm->Abort();
      return;
    case Op::kNcclDestroy:
      if (!comms_.count(arg[0])) {
        reply_.error = kInvalidResourceHandle;
      } else if (!IdleComm(comms_[arg[0]])) {
        reply_.arg[0] = 0;
      } else {
        comms_.erase(arg[0]);
        LockedState state;
        state->used[device.index] -= kCommBytes;
        reply_.arg[0] = 1;
      }
      return;
    case Op::kStall:
      if (FindStream(arg[0]) == nullptr) {
        reply_.error = kInvalidResourceHandle;
        return;
      }
      Submit(arg[0], [] {
        while (true) pause();
      });
      return;
    case Op::kFault:
      Fault(arg[0]);
      return;
    case Op::kGoodbye:
      reply_.error = Goodbye();
      return;
  }
  Die("a request that is none");
}

int Executor::Malloc(uint64_t bytes, bool exportable) {
  const uint64_t room =
      (bytes + kGranularity - 1) / kGranularity * kGranularity;
  const int64_t counted = (bytes + 511) / 512 * 512;
  LockedState state;
  if (state->used[device.index] + counted > device.memory_bytes) state.Reap();
  if (bytes > uint64_t(device.memory_bytes) ||
      state->used[device.index] + counted > device.memory_bytes)
    return kMemoryAllocation;
  const int memfd = memfd_create("gpu_sim", MFD_CLOEXEC);
  if (memfd < 0 || ftruncate(memfd, (bytes + 4095) / 4096 * 4096) != 0)
    Die("memfd");
  Mapping mapping;
  mapping.room = room;
  mapping.bytes = bytes;
  mapping.address = Place(room);
  if (mapping.address == 0) return kMemoryAllocation;
  void* const map = mmap(reinterpret_cast<void*>(mapping.address),
                         (bytes + 4095) / 4096 * 4096, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_FIXED_NOREPLACE, memfd, 0);
  if (map == MAP_FAILED) Die("mmap of device memory");
  // Fresh device memory holds whatever was there before.
  memset(map, 0xd5, bytes);
  for (Buffer& buffer : state->buffers) {
    if (buffer.id != 0) continue;
    buffer.id = state->next_buffer_id++;
    buffer.device = device.index;
    buffer.client = client;
    buffer.executor = getpid();
    buffer.memfd = memfd;
    buffer.bytes = counted;
    std::fill(std::begin(buffer.openers), std::end(buffer.openers), 0);
    buffer.exportable = exportable;
    state->used[device.index] += counted;
    mapping.id = buffer.id;
    reply_.arg[0] = mapping.address;
    reply_.arg[1] = mapping.id;
    reply_.arg[2] = mapping.room;
    mappings_[mapping.address] = mapping;
    return kSuccess;
  }
  Die("too many allocations");
}

int Executor::Free(uint64_t address) {
  if (!Idle()) return kBusy;
  const auto at = mappings_.find(address);
  if (at == mappings_.end() || at->second.imported) {
    Finding("cudaFree of what is not an allocation of this process");
    return kInvalidValue;
  }
  const Mapping mapping = at->second;
  mappings_.erase(at);
  LockedState state;
  Buffer* buffer = state.Find(mapping.id);
  for (const pid_t opener : buffer->openers) {
    if (opener == 0 || !Runs(opener)) continue;
    Finding("memory was freed that another process has open");
    break;
  }
  munmap(reinterpret_cast<void*>(mapping.address), mapping.room);
  close(buffer->memfd);
  state.Release(buffer);
  spare_[mapping.room].push_back(mapping.address);
  return kSuccess;
}

int Executor::IpcOpen(uint64_t visible, uint64_t peers, const char* payload) {
  Handle handle;
  memcpy(&handle, payload, sizeof(handle));
  if (handle.magic != kHandleMagic) return kInvalidValue;
  if (handle.client == client) return kDeviceUninitialized;
  if (device.mig) return kMapBufferObjectFailed;
  if (handle.device != device.index) {
    if ((visible >> handle.device & 1) == 0) return kInvalidDevice;
    if ((peers >> handle.device & 1) == 0) return kPeerAccessUnsupported;
  }
  for (auto& [address, mapping] : mappings_) {
    if (mapping.id == handle.buffer) {
      ++mapping.opens;
      reply_.arg[0] = address;
      reply_.arg[1] = mapping.bytes;
      reply_.arg[2] = mapping.id;
      reply_.arg[3] = mapping.room;
      reply_.arg[4] = static_cast<uint64_t>(handle.device);
      return kSuccess;
    }
  }
  LockedState state;
  Buffer* buffer = state.Find(handle.buffer);
  // What a process had goes with it, and not when its executor has noticed.
  if (buffer == nullptr || !Alive(buffer->executor) || !Runs(buffer->client))
    return kMapBufferObjectFailed;
  const std::string path = "/proc/" + std::to_string(buffer->executor) +
                           "/fd/" + std::to_string(buffer->memfd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return kMapBufferObjectFailed;
  Mapping mapping;
  mapping.id = buffer->id;
  mapping.bytes = buffer->bytes;
  mapping.room =
      (mapping.bytes + kGranularity - 1) / kGranularity * kGranularity;
  mapping.imported = true;
  mapping.opens = 1;
  mapping.address = Place(mapping.room);
  if (mapping.address == 0) return kMapBufferObjectFailed;
  void* const map =
      mmap(reinterpret_cast<void*>(mapping.address),
           (mapping.bytes + 4095) / 4096 * 4096, PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0);
  close(fd);
  if (map == MAP_FAILED) return kMapBufferObjectFailed;
  NoteOpen(buffer, 0, client);
  mappings_[mapping.address] = mapping;
  reply_.arg[0] = mapping.address;
  reply_.arg[1] = mapping.bytes;
  reply_.arg[2] = mapping.id;
  reply_.arg[3] = mapping.room;
  reply_.arg[4] = static_cast<uint64_t>(handle.device);
  return kSuccess;
}

int Executor::IpcClose(uint64_t address) {
  if (!Idle()) return kBusy;
  const auto at = mappings_.find(address);
  if (at == mappings_.end() || !at->second.imported) {
    Finding("cudaIpcCloseMemHandle of what was not opened");
    return kInvalidValue;
  }
  Mapping& mapping = at->second;
  reply_.arg[0] = --mapping.opens;
  if (mapping.opens > 0) return kSuccess;
  munmap(reinterpret_cast<void*>(mapping.address), mapping.room);
  spare_[mapping.room].push_back(mapping.address);
  LockedState state;
  if (Buffer* buffer = state.Find(mapping.id)) NoteOpen(buffer, client, 0);
  mappings_.erase(at);
  return kSuccess;
}

int Executor::Launch(Stream* stream, const Request& request,
                     const char* payload) {
  if (stream == nullptr) return kInvalidResourceHandle;
  LaunchHeader header;
  memcpy(&header, payload, sizeof(header));
  const std::string name(payload + sizeof(header), header.name_bytes);
  const TwinEntry* twin = FindTwin(name);
  if (twin == nullptr) Die("no host twin of the kernel " + name);
  auto arguments = std::make_shared<std::vector<std::vector<char>>>();
  const char* at = payload + sizeof(header) + header.name_bytes;
  for (uint32_t i = 0; i < header.argument_count; ++i) {
    arguments->emplace_back(at, at + header.argument_bytes[i]);
    at += header.argument_bytes[i];
  }
  Submit(request.arg[0], [twin, arguments, header] {
    std::vector<void*> pointers;
    for (std::vector<char>& argument : *arguments)
      pointers.push_back(argument.data());
    twin->run(twin->kernel, header.grid, header.block, pointers.data());
  });
  return kSuccess;
}

int Executor::Goodbye() {
  // A lost context is gone with its process, whatever it held.
  if (control->fault != 0) return kSuccess;
  for (const auto& [address, mapping] : mappings_) {
    Finding(std::string("leak: ") + std::to_string(mapping.bytes) +
            (mapping.imported ? " bytes are still open" : " bytes not freed"));
  }
  int streams = 0, events = 0;
  for (int slot = 1; slot < kMaxStreams; ++slot) {
    if (streams_[slot] != nullptr) ++streams;
  }
  for (const auto& [slot, event] : events_) events += event.used ? 1 : 0;
  if (streams > 0)
    Finding("leak: " + std::to_string(streams) + " streams not destroyed");
  if (events > 0)
    Finding("leak: " + std::to_string(events) + " events not destroyed");
  if (!comms_.empty())
    Finding("leak: " + std::to_string(comms_.size()) +
            " communicators neither destroyed nor aborted");
  return kSuccess;
}

}  // namespace
}  // namespace gpu_sim

int main(int argc, char** argv) {
  using namespace gpu_sim;
  if (argc != 4) Die("not a program to start by hand");
  close_range(kControlFd + 1, ~0U, 0);
  // Not a child of the process: it may wait for its children.
  if (fork() != 0) _exit(0);
  setsid();
  signal(SIGPIPE, SIG_IGN);
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, SIG_IGN);
  const int index = std::atoi(argv[1]);
  client = std::atoi(argv[2]);
  prctl(PR_SET_NAME, ("gpu" + std::to_string(index)).c_str());
  control = static_cast<Control*>(mmap(nullptr, sizeof(Control),
                                       PROT_READ | PROT_WRITE, MAP_SHARED,
                                       kControlFd, 0));
  if (control == MAP_FAILED) Die("the control page");
  device = MachineDevice(index);
  struct sigaction action = {};
  action.sa_sigaction = OnFault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
  {
    LockedState state;
    state.Reap();
    state->used[index] += kContextBytes;
    for (pid_t& entry : state->contexts[index]) {
      if (entry != 0 && Alive(entry)) continue;
      entry = client;
      break;
    }
  }
  Executor executor(strtoull(argv[3], nullptr, 10));
  const char ready = 1;
  if (send(kSocketFd, &ready, 1, MSG_NOSIGNAL) != 1) return 1;
  executor.Serve();
  // Streams may be held by peers; nothing here is worth waiting for.
  _exit(0);
}
