// What an update's copy plan means for a worker's live tensors.
#ifndef WEIGHTSYNC_CLIENT_CC_APPLY_H_
#define WEIGHTSYNC_CLIENT_CC_APPLY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cc/tensor.h"
#include "transport/copy.h"
#include "weightsync/v1/replica.pb.h"

namespace weightsync {
namespace client {

// A CopyPlan that was checked against the tensors, once. Immutable; valid as
// long as the tensors' memory is.
class ApplyPlan {
 public:
  // Where the bytes of one bucket lie now.
  struct Source {
    const char* data = nullptr;
    int64_t size_bytes = 0;
  };

  // No copy may write outside the tensor that it names, whatever the daemon
  // says: INVALID_ARGUMENT (COPY_PLAN_INVALID), with the tensor's name.
  static absl::StatusOr<std::shared_ptr<const ApplyPlan>> Compile(
      const v1::CopyPlan& plan, absl::Span<const Tensor> tensors);

  // The buckets that it reads, ascending.
  const std::vector<int32_t>& buckets() const { return buckets_; }
  // Bytes that the tasks write.
  int64_t bytes() const { return bytes_; }

  // The copies. `sources` are in the order of buckets().
  //   INVALID_ARGUMENT (COPY_PLAN_INVALID) when one would read outside its
  //   bucket.
  absl::StatusOr<std::vector<transport::CopyTask>> Tasks(
      absl::Span<const Source> sources) const;
  // Those of one bucket; none when nothing of it is read.
  absl::StatusOr<std::vector<transport::CopyTask>> TasksOf(
      int32_t bucket, const Source& source) const;
  // For tensors without memory of their own. Those of one tensor, to `target`;
  // and those of one bucket, to `targets`, one for each tensor: null where
  // nothing of it is read.
  absl::StatusOr<std::vector<transport::CopyTask>> TasksInto(
      int tensor, absl::Span<const Source> sources, char* target) const;
  absl::StatusOr<std::vector<transport::CopyTask>> TasksOfInto(
      int32_t bucket, const Source& source,
      absl::Span<char* const> targets) const;
  // The tensors of which something lies in the bucket, and the bytes of each.
  std::map<int32_t, int64_t> TensorsOf(int32_t bucket) const;
  // Bytes of each tensor that the tasks write.
  const std::vector<int64_t>& tensor_bytes() const { return tensor_bytes_; }

 private:
  struct Copy {
    int32_t source = 0;  // index into buckets_
    int64_t offset = 0;  // in the bucket
    int32_t tensor = 0;
    int64_t target = 0;        // in the tensor
    transport::CopyTask task;  // without src and dst
  };

  absl::Status CheckSources(absl::Span<const Source> sources) const;
  // Index into buckets_; -1: nothing of it is read.
  int32_t Find(int32_t bucket) const;
  static transport::CopyTask Task(const Copy& copy, const Source& source,
                                  char* target);

  std::vector<int32_t> buckets_;
  // By index into buckets_: bytes of it that are read.
  std::vector<int64_t> reach_;
  std::vector<Copy> copies_;
  // By tensor: indices into copies_.
  std::vector<std::vector<int32_t>> copies_of_;
  std::vector<int64_t> tensor_bytes_;
  // Null for one without memory.
  std::vector<char*> memory_;
  int64_t bytes_ = 0;
};

// Copies straight from a trainer's memory of `bytes` bytes at `data`, each with
// its place in the parameter, so that their digest can be taken on the way.
// `ordinals`: of each tensor.
//   INVALID_ARGUMENT (COPY_PLAN_INVALID): reads or writes outside, or a tensor
//   that is not one stretch of its parameter.
absl::StatusOr<std::vector<transport::CopyTask>> DirectTasks(
    const v1::DirectCopies& copies, absl::Span<const Tensor> tensors,
    absl::Span<const int32_t> ordinals, const char* data, int64_t bytes);

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_APPLY_H_
