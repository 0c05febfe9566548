// What a process tells another so that it can open an allocation of GPU memory,
// and find out why it cannot. Needs no CUDA: whoever passes it on has none.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_HANDLE_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_HANDLE_H_

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace transport {
namespace cuda {

// Who has exported something. Two are equal only for the same life of a
// process.
struct ProcessIdentity {
  int64_t pid = 0;
  uint64_t start_time = 0;     // of /proc/PID/stat; told from a reused pid
  uint64_t pid_namespace = 0;  // inode

  friend bool operator==(const ProcessIdentity& a, const ProcessIdentity& b) {
    return a.pid == b.pid && a.start_time == b.start_time &&
           a.pid_namespace == b.pid_namespace;
  }
};

ProcessIdentity ThisProcess();
// Of who has this pid here. Of no namespace (0) where nobody has.
ProcessIdentity IdentityOf(int64_t pid);

// A process that has ended and was not waited for yet is dead: its memory has
// gone.
enum class ProcessState { kAlive, kDead, kOtherNamespace };
ProcessState StateOf(const ProcessIdentity& process);

// A handle of CUDA names a whole allocation: tensors are (handle, offset,
// size).
struct DeviceHandle {
  std::array<char, 64> ipc = {};  // cudaIpcMemHandle_t
  std::string device_uuid;
  // Of the allocation, as the exporter knows it; its address there is only a
  // part of its name.
  uint64_t base = 0;
  int64_t bytes = 0;
  uint64_t buffer_id = 0;
  ProcessIdentity exporter;
  // A small allocation of the exporter and what stands in it: whoever opens it
  // and reads the same has the exporter's memory before it.
  std::array<char, 64> probe_ipc = {};
  std::array<char, 16> nonce = {};

  // A few hundred bytes, for a message.
  std::string Encode() const;
  // INVALID_ARGUMENT (HANDLE_MALFORMED) with both sizes.
  static absl::StatusOr<DeviceHandle> Decode(absl::string_view bytes);
};

// What a handle opens, as the process that has opened it sees it.
struct ImportedAllocation {
  char* data = nullptr;
  int64_t bytes = 0;
};

// Where an address of the exporting process lies.
struct DevicePlace {
  DeviceHandle handle;
  int64_t offset = 0;  // of the address in the allocation
};

// [offset, offset + bytes) in the allocation. INVALID_ARGUMENT
// (PAST_ALLOCATION).
absl::Status CheckPlace(const DeviceHandle& handle, int64_t offset,
                        int64_t bytes);

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_HANDLE_H_
