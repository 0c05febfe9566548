// What the driver's management library tells of a GPU's memory, and the CUDA
// runtime does not: how much each process has, and how much is used before
// there is a context to ask in.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_NVML_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_NVML_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"

namespace weightsync {
namespace transport {
namespace cuda {

// The library is part of the driver; it is loaded by its soname, and a machine
// may lack it (containers without the capability "utility"). Makes no context.
class Nvml {
 public:
  static constexpr char kLibrary[] = "libnvidia-ml.so.1";

  // FAILED_PRECONDITION (NVML_MISSING): there is no such library, or it does
  // not have what is called. UNAVAILABLE (NVML_ERROR): it does not work.
  static absl::StatusOr<std::unique_ptr<Nvml>> Open(
      const char* library = kLibrary);
  ~Nvml();

  struct Memory {
    int64_t used_bytes = 0;  // of the GPU, by all
    // By this process. Absent where it is not listed: it has no context there,
    // or the library counts pids in another namespace.
    absl::optional<int64_t> own_bytes;
  };
  // Of a GPU by its UUID, "GPU-...". UNAVAILABLE (NVML_ERROR).
  absl::StatusOr<Memory> MemoryOf(const std::string& uuid) const;

 private:
  struct Calls;
  explicit Nvml(std::unique_ptr<Calls> calls);
  const std::unique_ptr<Calls> calls_;
};

// What making a context took, by what was seen before and after. This process's
// own figure where it is listed after and was not before (a stranger's pid may
// be the same as this one's here); otherwise by how much more of the GPU was
// used, to which others contribute what they take or free meanwhile. Not below
// zero.
int64_t ContextBytes(const Nvml::Memory& before, const Nvml::Memory& after);

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_NVML_H_
