// Host memory of the daemon, as its device agent has it.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_AGENT_HOST_MAP_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_AGENT_HOST_MAP_H_

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "transport/cuda/cuda_memory.h"
#include "transport/error.h"
#include "transport/host/unique_fd.h"

namespace weightsync {
namespace transport {
namespace cuda {

// Of a request that cannot be done.
inline absl::Status BadJob(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_JOB", what);
}

// Memory of the daemon's store, mapped and pinned.
class HostMap {
 public:
  static absl::StatusOr<std::shared_ptr<HostMap>> Make(CudaMemory* memory,
                                                       UniqueFd fd,
                                                       int64_t offset,
                                                       int64_t bytes) {
    const int64_t page = 4096;
    struct stat stat;
    if (fd.get() < 0 || fstat(fd.get(), &stat) != 0 || offset < 0 ||
        bytes <= 0 || offset % page != 0 || stat.st_size < offset + bytes) {
      return BadJob("host memory that does not lie in its file");
    }
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                            fd.get(), offset);
    if (data == MAP_FAILED) {
      return MakeErrnoError(absl::StatusCode::kResourceExhausted,
                            "HOST_MAP_FAILED", "the store", errno);
    }
    // Unmapped when nothing can reach it any more.
    const std::shared_ptr<const void> mapped(
        data, [bytes](void* gone) { munmap(gone, bytes); });
    std::shared_ptr<HostMap> map(new HostMap);
    map->data_ = static_cast<char*>(data);
    map->bytes_ = bytes;
    auto pinned = memory->PinHost(map->data_, bytes, true, mapped);
    if (!pinned.ok()) return pinned.status();
    map->pinned_ = *std::move(pinned);
    return map;
  }
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  HostMap() = default;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
  std::unique_ptr<CudaMemory::PinnedHost> pinned_;
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_AGENT_HOST_MAP_H_
