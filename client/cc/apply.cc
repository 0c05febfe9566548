#include "client/cc/apply.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/status.h"
#include "transport/digest.h"

namespace weightsync {
namespace client {
namespace {

// Work for one thread at a time: small enough to share out evenly, large enough
// that taking the next one costs nothing.
constexpr int64_t kPieceBytes = int64_t{2} << 20;
constexpr int kMaxLoops = 8;

absl::Status Invalid(absl::string_view message) {
  return ErrorStatus(
      absl::StatusCode::kInvalidArgument, "COPY_PLAN_INVALID",
      absl::StrCat("The daemon's copy plan ", message,
                   "; nothing was written. Restart the worker, and report it "
                   "if it happens again."));
}

// Bytes from the first to behind the last one that the loops touch; -1 when that
// is no number.
int64_t Reach(const v1::TensorCopy& copy,
              const google::protobuf::RepeatedField<int64_t>& strides) {
  int64_t reach = copy.run_bytes();
  for (int d = 0; d < copy.extents_size(); ++d) {
    int64_t step;
    if (strides[d] < 0 || copy.extents(d) <= 0 ||
        __builtin_mul_overflow(copy.extents(d) - 1, strides[d], &step) ||
        __builtin_add_overflow(reach, step, &reach)) {
      return -1;
    }
  }
  return reach;
}

bool Inside(int64_t offset, int64_t reach, int64_t size) {
  return offset >= 0 && reach >= 0 && offset <= size && reach <= size - offset;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const ApplyPlan>> ApplyPlan::Compile(
    const v1::CopyPlan& plan, absl::Span<const Tensor> tensors) {
  std::vector<int64_t> spans;
  spans.reserve(tensors.size());
  for (const Tensor& tensor : tensors) spans.push_back(SpanBytes(tensor));

  auto compiled = std::make_shared<ApplyPlan>();
  for (const v1::BucketCopies& bucket : plan.buckets()) {
    if (!compiled->buckets_.empty() &&
        compiled->buckets_.back() >= bucket.bucket()) {
      return Invalid("does not have its buckets in order");
    }
    const int32_t source = static_cast<int32_t>(compiled->buckets_.size());
    compiled->buckets_.push_back(bucket.bucket());
    compiled->reach_.push_back(0);
    for (const v1::TensorCopy& copy : bucket.copies()) {
      if (copy.tensor() < 0 ||
          copy.tensor() >= static_cast<int>(tensors.size())) {
        return Invalid("names a tensor that was not registered");
      }
      const Tensor& tensor = tensors[copy.tensor()];
      if (copy.run_bytes() <= 0 || copy.extents_size() > kMaxLoops ||
          copy.bucket_strides_bytes_size() != copy.extents_size() ||
          copy.tensor_strides_bytes_size() != copy.extents_size()) {
        return Invalid(absl::StrCat("has a malformed copy for ", tensor.name));
      }
      const int64_t from = Reach(copy, copy.bucket_strides_bytes());
      const int64_t to = Reach(copy, copy.tensor_strides_bytes());
      int64_t end;
      if (from < 0 || copy.bucket_offset_bytes() < 0 ||
          __builtin_add_overflow(copy.bucket_offset_bytes(), from, &end) ||
          !Inside(copy.tensor_offset_bytes(), to, spans[copy.tensor()])) {
        return Invalid(absl::StrCat("would write outside ", tensor.name));
      }
      compiled->reach_[source] = std::max(compiled->reach_[source], end);
      compiled->AddCopy(
          source, copy,
          static_cast<char*>(tensor.data) + copy.tensor_offset_bytes());
    }
  }
  return std::shared_ptr<const ApplyPlan>(std::move(compiled));
}

void ApplyPlan::AddCopy(int32_t source, const v1::TensorCopy& copy,
                        char* data) {
  const int loops = copy.extents_size();
  Piece piece;
  piece.source = source;
  piece.run_bytes = copy.run_bytes();
  if (loops >= 1) {
    piece.inner = copy.extents(loops - 1);
    piece.from_inner = copy.bucket_strides_bytes(loops - 1);
    piece.to_inner = copy.tensor_strides_bytes(loops - 1);
  }
  if (loops >= 2) {
    piece.outer = copy.extents(loops - 2);
    piece.from_outer = copy.bucket_strides_bytes(loops - 2);
    piece.to_outer = copy.tensor_strides_bytes(loops - 2);
  }
  // The loops further out, one piece for each of their iterations.
  const int unrolled = std::max(loops - 2, 0);
  int64_t index[kMaxLoops] = {};
  int64_t from = copy.bucket_offset_bytes();
  int64_t to = 0;
  while (true) {
    piece.from = from;
    piece.to = data + to;
    AddPiece(piece);
    int d = unrolled - 1;
    for (; d >= 0; --d) {
      from += copy.bucket_strides_bytes(d);
      to += copy.tensor_strides_bytes(d);
      if (++index[d] < copy.extents(d)) break;
      from -= copy.bucket_strides_bytes(d) * copy.extents(d);
      to -= copy.tensor_strides_bytes(d) * copy.extents(d);
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

void ApplyPlan::AddPiece(Piece piece) {
  bytes_ += piece.run_bytes * piece.inner * piece.outer;
  if (piece.inner == 1 && piece.outer == 1) {
    // A long run is cut; at multiples of kPieceBytes, which keeps alignment.
    while (piece.run_bytes > kPieceBytes) {
      Piece head = piece;
      head.run_bytes = kPieceBytes;
      pieces_.push_back(head);
      piece.from += kPieceBytes;
      piece.to += kPieceBytes;
      piece.run_bytes -= kPieceBytes;
    }
    pieces_.push_back(piece);
    return;
  }
  if (piece.outer == 1) {
    // Only the outer loop is cut: make the one loop that there is the outer one.
    std::swap(piece.outer, piece.inner);
    std::swap(piece.from_outer, piece.from_inner);
    std::swap(piece.to_outer, piece.to_inner);
  }
  const int64_t rows = std::max<int64_t>(
      1, kPieceBytes / std::max<int64_t>(1, piece.run_bytes * piece.inner));
  while (piece.outer > 0) {
    Piece head = piece;
    head.outer = std::min(rows, piece.outer);
    pieces_.push_back(head);
    piece.from += head.outer * piece.from_outer;
    piece.to += head.outer * piece.to_outer;
    piece.outer -= head.outer;
  }
}

absl::Status ApplyPlan::CheckSources(absl::Span<const Source> sources) const {
  if (sources.size() != buckets_.size()) {
    return Invalid("names other buckets than the update");
  }
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i].size_bytes < reach_[i]) {
      return Invalid(absl::StrCat("reads ", reach_[i], " bytes of bucket ",
                                  buckets_[i], ", which has ",
                                  sources[i].size_bytes));
    }
  }
  return absl::OkStatus();
}

void ApplyPlan::Run(absl::Span<const Source> sources, int threads) const {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    while (true) {
      const size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= pieces_.size()) break;
      const Piece& piece = pieces_[i];
      const char* from = sources[piece.source].data + piece.from;
      for (int64_t o = 0; o < piece.outer; ++o) {
        for (int64_t n = 0; n < piece.inner; ++n) {
          transport::CopyNonTemporalUnfenced(
              piece.to + o * piece.to_outer + n * piece.to_inner,
              from + o * piece.from_outer + n * piece.from_inner,
              static_cast<size_t>(piece.run_bytes));
        }
      }
    }
    transport::NonTemporalFence();
  };
  std::vector<std::thread> others;
  const int helpers = static_cast<int>(std::min<size_t>(
      std::max(threads, 1) - 1, pieces_.empty() ? 0 : pieces_.size() - 1));
  others.reserve(helpers);
  for (int i = 0; i < helpers; ++i) others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
}

}  // namespace client
}  // namespace weightsync
