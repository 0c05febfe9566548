// Putting an update into a worker's live tensors: strided copies from the
// node's store, by several threads.
#ifndef WEIGHTSYNC_CLIENT_CC_APPLY_H_
#define WEIGHTSYNC_CLIENT_CC_APPLY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cc/tensor.h"
#include "weightsync/v1/replica.pb.h"

namespace weightsync {
namespace client {

// A CopyPlan that was checked against the tensors once and cut into pieces of
// equal work. Immutable; valid as long as the tensors' memory is.
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
  // Bytes that Run writes.
  int64_t bytes() const { return bytes_; }

  // Whether every read lies inside the bucket's memory; sources are in the order
  // of buckets(). INVALID_ARGUMENT (COPY_PLAN_INVALID).
  absl::Status CheckSources(absl::Span<const Source> sources) const;

  // Copies, with `threads` threads, the caller's included. Stores go round the
  // cache and are visible to all threads of the process at return.
  // REQUIRES: CheckSources(sources) is OK.
  void Run(absl::Span<const Source> sources, int threads) const;

 private:
  // At most 3 nested loops of runs; deeper copies are unrolled by Compile.
  struct Piece {
    int32_t source = 0;  // index into buckets_
    char* to = nullptr;
    int64_t from = 0;
    int64_t run_bytes = 0;
    int64_t outer = 1, inner = 1;
    int64_t from_outer = 0, from_inner = 0;
    int64_t to_outer = 0, to_inner = 0;
  };

  void AddCopy(int32_t source, const v1::TensorCopy& copy, char* data);
  void AddPiece(Piece piece);

  std::vector<int32_t> buckets_;
  // By index into buckets_: bytes of it that are read.
  std::vector<int64_t> reach_;
  std::vector<Piece> pieces_;
  int64_t bytes_ = 0;
};

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_APPLY_H_
