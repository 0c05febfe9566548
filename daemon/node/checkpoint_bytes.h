// Where the bytes of buckets lie in the files of a checkpoint: a piece of a
// bucket is a box of a tensor, and a tensor lies in its file row by row.

#ifndef WEIGHTSYNC_DAEMON_NODE_CHECKPOINT_BYTES_H_
#define WEIGHTSYNC_DAEMON_NODE_CHECKPOINT_BYTES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "daemon/node/layouts.h"
#include "transport/file/checkpoint.h"
#include "transport/file/rooted_directory.h"
#include "transport/host/unique_fd.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace daemon {

// Bytes that are neighbours in a bucket and in a tensor.
struct BucketRun {
  uint32_t ordinal = 0;
  // From the start of the tensor, and of the bucket.
  int64_t tensor_offset = 0;
  int64_t bucket_offset = 0;
  int64_t bytes = 0;
};

// Calls `fn` for the runs of bytes [begin, end) of the bucket, in order, until
// it fails. REQUIRES: both are multiples of 8, or the ends of the bucket.
absl::Status ForBucketRuns(const NodeLayout& layout, int32_t bucket,
                           int64_t begin, int64_t end,
                           const std::function<absl::Status(BucketRun)>& fn);

// The catalog as the files of a checkpoint name it.
std::vector<transport::SafetensorsTensor> TensorsOf(
    const schedule::Catalog& catalog);

// What the headers say, in the order of the files. FAILED_PRECONDITION
// (CHECKPOINT_MISMATCH): a type or shape that no model here can have.
absl::StatusOr<std::vector<v1::Parameter>> ParametersOf(
    const transport::CheckpointFiles& files);

// The open files of a checkpoint with all tensors of a layout. Thread-safe.
class CheckpointData {
 public:
  // To read from; closes what it opened when it goes.
  //   Errors of ReadCheckpointHeaders; FAILED_PRECONDITION
  //   (CHECKPOINT_MISMATCH): a tensor of the catalog is not there, or has
  //   another type or shape.
  static absl::StatusOr<std::unique_ptr<CheckpointData>> OpenToRead(
      const transport::RootedDirectory& root, const std::string& path,
      std::shared_ptr<const NodeLayout> layout);
  // Files that somebody has made in `directory`, as planned. NOT_FOUND.
  static absl::StatusOr<std::unique_ptr<CheckpointData>> OpenToWrite(
      const transport::RootedDirectory& root, const std::string& directory,
      const transport::CheckpointFiles& plan,
      std::shared_ptr<const NodeLayout> layout);

  // Bytes [begin, end) of the bucket; as of ForBucketRuns. `data` is the
  // bucket's first byte.
  absl::Status Read(int32_t bucket, int64_t begin, int64_t end,
                    char* data) const;
  absl::Status Write(int32_t bucket, int64_t begin, int64_t end,
                     const char* data) const;
  // Of what was written.
  absl::Status Sync() const;

 private:
  struct Place {
    int file = -1;
    int64_t offset = 0;
  };
  struct File {
    std::string path;
    transport::UniqueFd fd;
  };

  explicit CheckpointData(std::shared_ptr<const NodeLayout> layout)
      : layout_(std::move(layout)), places_(layout_->catalog.size()) {}

  const std::shared_ptr<const NodeLayout> layout_;
  std::vector<File> files_;
  // By ordinal.
  std::vector<Place> places_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_CHECKPOINT_BYTES_H_
