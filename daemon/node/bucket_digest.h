// The digest of any stretch of a bucket, from the layout alone.

#ifndef WEIGHTSYNC_DAEMON_NODE_BUCKET_DIGEST_H_
#define WEIGHTSYNC_DAEMON_NODE_BUCKET_DIGEST_H_

#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "daemon/node/layouts.h"
#include "transport/copy.h"
#include "transport/digest.h"
#include "transport/digest_map.h"
#include "transport/landing.h"
#include "transport/memory.h"

namespace weightsync {
namespace daemon {

// By the catalog's ordinal.
using TensorDigests = std::map<uint32_t, transport::Digest>;

// Reads a piece of a bucket that begins at `bucket`, and writes nothing: for
// its digest.
transport::CopyTask ReadPiece(const NodeLayout& layout,
                              const schedule::Piece& piece, const char* bucket);

// Adds the digests of a bucket that lies complete in `landing`, parameter by
// parameter. Only frames in which two parameters meet are read again; on a GPU,
// by the GPU (`memory`; null: none lies there). Errors of Memory::DigestFrames.
absl::Status AddTensorDigests(const NodeLayout& layout,
                              const transport::Landing& landing,
                              transport::Memory* memory,
                              TensorDigests* digests);

// Finds the runs of a stretch in the boxes of the pieces when it is asked. A
// list of them could take more memory than the daemon may: a tensor that is cut
// along its last dimension has one for each row.
class BucketDigestMap final : public transport::DigestMap {
 public:
  // REQUIRES: 0 <= bucket < layout->bucket_count().
  BucketDigestMap(std::shared_ptr<const NodeLayout> layout, int32_t bucket);

  transport::Digest Of(int64_t offset,
                       absl::Span<const char> bytes) const override;

 private:
  const std::shared_ptr<const NodeLayout> layout_;
  const absl::Span<const schedule::Piece> pieces_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_BUCKET_DIGEST_H_
