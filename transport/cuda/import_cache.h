// Allocations of other processes, each opened once.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_IMPORT_CACHE_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_IMPORT_CACHE_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "transport/cuda/device_core.h"
#include "transport/cuda/device_handle.h"

namespace weightsync {
namespace transport {
namespace cuda {

// Another process's allocation, as this process sees it. Whoever holds it may
// touch it, as far as its owner agrees; when nobody does any more it is closed,
// on a thread of the DeviceCore.
struct ImportedAllocation {
  char* data = nullptr;
  int64_t bytes = 0;
};

// Thread-safe. Outlived by what it has opened.
class ImportCache {
 public:
  explicit ImportCache(std::shared_ptr<DeviceCore> core)
      : core_(std::move(core)) {}

  // The same for equal handles, as long as somebody holds it. The first of an
  // exporter is opened after its probe has been read. `writable`: from now
  // on copies may write to it.
  //   NOT_FOUND            DEVICE_NOT_VISIBLE: of another GPU; says which is
  //                        here
  //   FAILED_PRECONDITION  EXPORTER_DEAD, ALLOCATION_FREED, MIG_NO_IPC,
  //                        FOREIGN_NAMESPACE (another pid namespace, and it
  //                        cannot be opened from here), OWN_EXPORT
  //   INVALID_ARGUMENT     PAST_ALLOCATION: it is shorter than was said
  //   UNAVAILABLE          PROBE_FAILED: opened, and it is other memory
  absl::StatusOr<std::shared_ptr<const ImportedAllocation>> Acquire(
      const DeviceHandle& handle, bool writable);

  // Allocations that are open.
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

  absl::Status Probe(const DeviceHandle& handle);
  absl::Status Open(const std::array<char, 64>& ipc, const DeviceHandle& handle,
                    void** pointer);

  const std::shared_ptr<DeviceCore> core_;
  mutable absl::Mutex mutex_;
  std::map<Key, std::weak_ptr<const ImportedAllocation>> open_
      ABSL_GUARDED_BY(mutex_);
  std::vector<Probed> probed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_IMPORT_CACHE_H_
