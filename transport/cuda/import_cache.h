// Allocations of other processes, each opened once.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_IMPORT_CACHE_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_IMPORT_CACHE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "transport/cuda/device_core.h"
#include "transport/cuda/handle.h"
#include "transport/cuda/ipc_imports.h"

namespace weightsync {
namespace transport {
namespace cuda {

// Those of an agent's GPU. Whoever holds one may touch it, as far as its owner
// agrees; when nobody does any more it is closed, on a thread of the
// DeviceCore. Thread-safe. Outlived by what it has opened.
class ImportCache {
 public:
  explicit ImportCache(std::shared_ptr<DeviceCore> core);

  // As IpcImports::Acquire. `writable`: from now on copies may write to it.
  // Besides its errors NOT_FOUND (DEVICE_NOT_VISIBLE): of another GPU, and says
  // which is here; FAILED_PRECONDITION (MIG_NO_IPC).
  absl::StatusOr<std::shared_ptr<const ImportedAllocation>> Acquire(
      const DeviceHandle& handle, bool writable);

  // Allocations that are open.
  int size() const { return imports_.size(); }

 private:
  const std::shared_ptr<DeviceCore> core_;
  IpcImports imports_;
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_IMPORT_CACHE_H_
