// Allocations of other processes that this one has open on one GPU, each once.
//
// What opens them is the same in a device agent and in an engine's process: a
// probe first, a reason for what cannot be opened, one opening for all who ask,
// and closing where it holds up nobody.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_IPC_IMPORTS_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_IPC_IMPORTS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "transport/cuda/handle.h"

namespace weightsync {
namespace transport {
namespace cuda {

// Thread-safe. Outlived by what it has opened.
class IpcImports {
 public:
  struct Options {
    // Reads the first bytes of what was opened. Not used after this has gone.
    std::function<absl::Status(const char* at, absl::Span<char> found)> look;
    // Calls what waits for the whole GPU, which closing does, with that GPU
    // current, on another thread; in the order in which it was given.
    std::function<void(std::function<void()> close)> later;
    // May be empty: called with what was opened before anybody has it, and when
    // nobody has it any more, before it is closed.
    std::function<void(const std::shared_ptr<const ImportedAllocation>&)>
        opened;
    std::function<void(const ImportedAllocation&)> let_go;
    // For people: how to do without CUDA IPC, e.g. "use --memory=host".
    std::string otherwise;
  };
  explicit IpcImports(Options options) : options_(std::move(options)) {}

  // REQUIRES: the GPU that it is opened on is the current one. The same for
  // equal handles, as long as somebody has it; its bytes are those of the whole
  // allocation. The first of an exporter is opened after its probe was read.
  //   FAILED_PRECONDITION  EXPORTER_DEAD, ALLOCATION_FREED,
  //                        FOREIGN_NAMESPACE (another pid namespace, and it
  //                        cannot be opened from here), OWN_EXPORT,
  //                        NO_PEER_ACCESS: it is of another GPU, and there is
  //                        no way between the two
  //   INVALID_ARGUMENT     PAST_ALLOCATION: it is shorter than was said
  //   UNAVAILABLE          PROBE_FAILED: opened, and it is other memory
  // and DEVICE_FAULT of CheckCuda, and the errors of Options::look.
  absl::StatusOr<std::shared_ptr<const ImportedAllocation>> Acquire(
      const DeviceHandle& handle);

  // Allocations that somebody has.
  int size() const;

 private:
  // What CUDA calls it first of all, because only that cannot be another's: in
  // two containers two processes may have one pid, and allocations at one
  // address. Then process, address and buffer: another allocation at an
  // address that had one before is another.
  using Key = std::tuple<std::array<char, 64>, int64_t, uint64_t, uint64_t,
                         uint64_t, uint64_t>;
  // Who was probed, and with what: a pid alone is a client's word.
  struct Probed {
    ProcessIdentity exporter;
    std::array<char, 64> ipc;
    std::array<char, 16> nonce;

    friend bool operator==(const Probed& a, const Probed& b) {
      return a.exporter == b.exporter && a.ipc == b.ipc && a.nonce == b.nonce;
    }
  };

  absl::StatusOr<void*> Open(const std::array<char, 64>& ipc,
                             const DeviceHandle& handle) const;
  absl::Status Probe(const DeviceHandle& handle) const;
  absl::StatusOr<std::shared_ptr<const ImportedAllocation>> OpenWhole(
      const DeviceHandle& handle) const;

  const Options options_;
  mutable absl::Mutex mutex_;
  std::map<Key, std::weak_ptr<const ImportedAllocation>> open_
      ABSL_GUARDED_BY(mutex_);
  std::vector<Probed> probed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_IPC_IMPORTS_H_
