// What the simulated runtime libraries and the executor of a context say to
// each other, and what they share.
//
// A simulated machine is a folder, $GPU_SIM_DIR. For every pair of a process
// and a simulated GPU that it uses there is one executor process: the context.
// It alone has the bytes of device memory, mapped at the addresses that its
// process knows; the process itself has these addresses reserved without any
// access, so that a host dereference is a SIGSEGV. The executor ends with its
// process. What belongs to the machine (how much memory is used, buffer ids,
// who has exported what) lies in $GPU_SIM_DIR/state (machine.h).
#ifndef WEIGHTSYNC_TESTS_GPU_SIM_PROTOCOL_H_
#define WEIGHTSYNC_TESTS_GPU_SIM_PROTOCOL_H_

#include <atomic>
#include <cstdint>

namespace gpu_sim {

constexpr int kMaxDevices = 8;
constexpr int kMaxStreams = 128;
constexpr int kMaxEvents = 4096;
// Addresses of all contexts. Each context has a region of its own, so that no
// two processes know an allocation by the same address.
constexpr uint64_t kFirstAddress = uint64_t{1} << 44;
constexpr uint64_t kRegionBytes = uint64_t{1} << 36;
constexpr uint64_t kRegions = 1024;
constexpr uint64_t kLastAddress = kFirstAddress + kRegions * kRegionBytes;
// Device memory is mapped in units of this, as on a real GPU.
constexpr uint64_t kGranularity = uint64_t{2} << 20;
// What a context and a communicator cost, before anything is allocated.
constexpr int64_t kContextBytes = int64_t{8} << 20;
constexpr int64_t kCommBytes = int64_t{4} << 20;

// Shared between a process and one executor: how far it is. A futex.
struct Control {
  std::atomic<uint32_t> wake;  // counts changes of anything below
  std::atomic<int32_t> fault;  // a cudaError that stays, or 0
  std::atomic<uint64_t> streams[kMaxStreams];    // operations that have ended
  std::atomic<uint64_t> events[kMaxEvents];      // records that have ended
  std::atomic<int64_t> event_times[kMaxEvents];  // nanoseconds
};

enum class Op : uint32_t {
  kMalloc,         // bytes, flags (1: not exportable) -> address, buffer id
  kFree,           // address
  kIpcGet,         // address -> payload: the handle
  kIpcOpen,        // GPUs of the machine that the process sees, those of them
                   // that this one has peer access to (bits); payload: the
                   // handle -> address, bytes, buffer id, room, GPU
  kIpcClose,       // address
  kMemInfo,        // -> free, total
  kStreamCreate,   // -> slot
  kStreamDestroy,  // slot
  kEventCreate,    // -> slot
  kEventDestroy,   // slot
  kCopy,           // stream; payload: CopyItem[] -> sequence
  kMemset,         // stream, address, value, bytes -> sequence
  kLaunch,         // stream, payload: LaunchHeader, arguments -> sequence
  kEventRecord,    // stream, event -> sequence, record
  kEventWait,      // stream, event, record -> sequence
  kObserved,       // stream (or event + kMaxStreams), count: the host waited
  kNcclInit,       // ranks, rank, version, eager bytes; payload: key and host
                   // id -> comm
  kNcclQuery,      // comm -> async error
  kNcclGroup,      // stream, comm; payload: NcclItem[] -> sequence
  kNcclFail,       // comm, error: an asynchronous error from now on
  kNcclAbort,      // comm
  kNcclDestroy,    // comm -> 1 when gone, 0 while operations are in flight
  kStall,          // stream: an operation that never ends -> sequence
  kFault,          // error: the context is lost
  kGoodbye,        // the process ends in good order: leaks are findings
};

struct CopyItem {
  uint64_t dst, src, bytes;
  uint32_t dst_device, src_device;  // 1: device memory; 0: the host's
};

struct LaunchHeader {
  uint32_t grid[3], block[3];
  uint32_t argument_count;
  uint32_t name_bytes;
  uint32_t argument_bytes[32];
};

struct NcclItem {
  uint64_t address, bytes;
  uint32_t peer;
  uint32_t send;
};

constexpr int kNcclKeyBytes = 16;
constexpr int kHostIdBytes = 48;

struct Request {
  Op op;
  uint32_t payload_bytes;
  uint64_t arg[6];
};

struct Reply {
  int32_t error;  // a cudaError (kNccl*: a ncclResult)
  uint32_t payload_bytes;
  uint64_t arg[6];
};

constexpr int kMaxPayload = 96 << 10;
constexpr int kHandleBytes = 64;

// File descriptors that an executor starts with.
constexpr int kSocketFd = 3;
constexpr int kControlFd = 4;

}  // namespace gpu_sim

#endif  // WEIGHTSYNC_TESTS_GPU_SIM_PROTOCOL_H_
