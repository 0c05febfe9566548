#ifndef WEIGHTSYNC_TRANSPORT_DIGEST_MAP_H_
#define WEIGHTSYNC_TRANSPORT_DIGEST_MAP_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "transport/digest.h"

namespace weightsync {
namespace transport {

// Says which elements of which tensors stand where in one bucket, so that the
// digest of any stretch of the bucket can be computed. Every node derives the
// same map from the update's layout. Immutable and thread-safe once made: all
// landings of one layout share it.
class DigestMap {
 public:
  virtual ~DigestMap() = default;

  // The digest of `bytes`, which stand at `offset` (bytes) in the bucket.
  // Neither end may split an element. Padding between pieces belongs to no
  // tensor and adds nothing.
  virtual Digest Of(int64_t offset, absl::Span<const char> bytes) const = 0;
};

// A run of elements and the place (bytes from the start of the bucket) of its
// first.
struct PlacedRun {
  int64_t offset = 0;
  DigestRun run;
};

// A DigestMap of explicit runs, sorted by offset and not overlapping.
class RunDigestMap final : public DigestMap {
 public:
  explicit RunDigestMap(std::vector<PlacedRun> runs);

  Digest Of(int64_t offset, absl::Span<const char> bytes) const override;

 private:
  const std::vector<PlacedRun> runs_;
};

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_DIGEST_MAP_H_
