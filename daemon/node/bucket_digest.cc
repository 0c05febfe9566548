#include "daemon/node/bucket_digest.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "schedule/box.h"
#include "schedule/catalog.h"

namespace weightsync {
namespace daemon {

namespace {

// Adds elements [begin, end) of a piece, counted in its own row-major order.
void AddPiece(const schedule::Piece& piece, const schedule::Param& param,
              int64_t begin, int64_t end, const char* data,
              transport::Digest* digest) {
  const schedule::Box& box = piece.box;
  const int dims = box.dims();
  const int64_t element_bytes = schedule::DTypeSize(param.dtype);
  // Dimensions [tail, dims) make one contiguous run of the global tensor.
  int tail = dims;
  int64_t run = 1;
  while (tail > 0) {
    --tail;
    run *= box.extent[tail];
    if (box.extent[tail] != param.shape[tail]) break;
  }
  int64_t stride[schedule::kMaxDims];
  int64_t step = 1;
  int64_t first = 0;
  for (int d = dims; d-- > 0;) {
    stride[d] = step;
    step *= param.shape[d];
    first += box.offset[d] * stride[d];
  }

  for (int64_t element = begin; element < end;) {
    const int64_t within = element % run;
    int64_t row = element / run;
    int64_t global = first + within;
    for (int d = tail; d-- > 0;) {
      global += row % box.extent[d] * stride[d];
      row /= box.extent[d];
    }
    transport::DigestRun stretch;
    stretch.ordinal = piece.ordinal;
    stretch.first_element = global;
    stretch.element_count = std::min(run - within, end - element);
    stretch.element_bytes = static_cast<int32_t>(element_bytes);
    transport::DigestAccumulate(data + (element - begin) * element_bytes,
                                stretch, digest);
    element += stretch.element_count;
  }
}

// Calls `add` for each part of a piece that lies in bytes [offset, offset +
// size) of the bucket, with the part's elements [begin, end).
template <typename Fn>
void ForPieces(const NodeLayout& layout,
               absl::Span<const schedule::Piece> pieces, int64_t offset,
               int64_t size, Fn add) {
  const int64_t limit = offset + size;
  // The last piece that begins at or before `offset`, or the first one.
  auto it = std::upper_bound(pieces.begin(), pieces.end(), offset,
                             [](int64_t value, const schedule::Piece& piece) {
                               return value < piece.offset;
                             });
  if (it != pieces.begin()) --it;
  for (; it != pieces.end() && it->offset < limit; ++it) {
    const schedule::Param& param = layout.catalog.param(it->ordinal);
    const int64_t element_bytes = schedule::DTypeSize(param.dtype);
    const int64_t begin =
        std::max(int64_t{0}, offset - it->offset) / element_bytes;
    const int64_t end =
        std::min(it->box.Volume(), (limit - it->offset) / element_bytes);
    if (begin < end) {
      add(*it, param, begin, end, it->offset + begin * element_bytes - offset);
    }
  }
}

// Parts of pieces in some frames of a bucket that lies on a GPU, one digest for
// each.
class PartsOnDevice {
 public:
  PartsOnDevice(const NodeLayout& layout, const char* bucket)
      : layout_(layout), bucket_(bucket) {}

  // In the order of the pieces, then of the frames.
  void Add(const schedule::Piece& piece, int64_t frame) {
    constexpr int64_t kFrame = transport::Landing::kFrameBytes;
    if (pieces_.empty() || last_ != &piece) {
      // Each gets frames of its own, cut where those of the bucket are: what
      // shares a frame there does not share one here.
      if (last_ != nullptr) next_ += FramesOf(*last_);
      last_ = &piece;
      transport::PackPiece read;
      read.offset = next_ * kFrame + piece.offset % kFrame;
      read.copy = ReadPiece(layout_, piece, bucket_);
      pieces_.push_back(std::move(read));
    }
    frames_.push_back(
        static_cast<uint32_t>(next_ + frame - piece.offset / kFrame));
    ordinals_.push_back(piece.ordinal);
  }

  absl::Status Digest(transport::Memory* memory, TensorDigests* digests) const {
    if (frames_.empty()) return absl::OkStatus();
    transport::FrameDigestRequest request;
    request.pieces = pieces_;
    request.frame_bytes = transport::Landing::kFrameBytes;
    request.frames = frames_;
    const auto parts = memory->DigestFrames(request);
    if (!parts.ok()) return parts.status();
    for (size_t i = 0; i < parts->size(); ++i)
      (*digests)[ordinals_[i]] += (*parts)[i];
    return absl::OkStatus();
  }

 private:
  int64_t FramesOf(const schedule::Piece& piece) const {
    constexpr int64_t kFrame = transport::Landing::kFrameBytes;
    const int64_t bytes =
        piece.box.Volume() *
        schedule::DTypeSize(layout_.catalog.param(piece.ordinal).dtype);
    return (piece.offset % kFrame + bytes + kFrame - 1) / kFrame;
  }

  const NodeLayout& layout_;
  const char* const bucket_;
  const schedule::Piece* last_ = nullptr;
  int64_t next_ = 0;
  std::vector<transport::PackPiece> pieces_;
  std::vector<uint32_t> frames_;
  std::vector<uint32_t> ordinals_;
};

}  // namespace

transport::CopyTask ReadPiece(const NodeLayout& layout,
                              const schedule::Piece& piece,
                              const char* bucket) {
  const schedule::Param& param = layout.catalog.param(piece.ordinal);
  transport::GlobalBox global;
  global.ordinal = piece.ordinal;
  global.shape = param.shape;
  global.offset = piece.box.offset;
  const schedule::Dims dense = schedule::DenseStrides(piece.box.extent, 1);
  return transport::MakeBoxCopy(
      piece.box.extent, static_cast<int32_t>(schedule::DTypeSize(param.dtype)),
      /*dst=*/nullptr, dense, bucket + piece.offset, dense, global);
}

absl::Status AddTensorDigests(const NodeLayout& layout,
                              const transport::Landing& landing,
                              transport::Memory* memory,
                              TensorDigests* digests) {
  if (landing.size() == 0) return absl::OkStatus();
  const absl::Span<const schedule::Piece> pieces =
      layout.plan.pieces(static_cast<uint32_t>(landing.bucket_id()));
  // Of a GPU.
  std::vector<std::pair<const schedule::Piece*, int64_t>> parts;
  for (uint32_t f = 0; f < landing.frame_count(); ++f) {
    const absl::Span<const char> bytes = landing.frame(f);
    const int64_t offset =
        static_cast<int64_t>(f) * transport::Landing::kFrameBytes;
    const int64_t size = static_cast<int64_t>(bytes.size());
    bool one = true;
    int64_t ordinal = -1;
    ForPieces(layout, pieces, offset, size,
              [&](const schedule::Piece& piece, const schedule::Param&, int64_t,
                  int64_t, int64_t) {
                one = one && (ordinal < 0 ||
                              ordinal == static_cast<int64_t>(piece.ordinal));
                ordinal = piece.ordinal;
              });
    if (ordinal < 0) continue;
    if (one) {
      (*digests)[static_cast<uint32_t>(ordinal)] += landing.frame_digest(f);
      continue;
    }
    ForPieces(layout, pieces, offset, size,
              [&](const schedule::Piece& piece, const schedule::Param& param,
                  int64_t begin, int64_t end, int64_t at) {
                if (landing.on_device()) {
                  parts.emplace_back(&piece, f);
                } else {
                  AddPiece(piece, param, begin, end, bytes.data() + at,
                           &(*digests)[piece.ordinal]);
                }
              });
  }
  if (parts.empty()) return absl::OkStatus();
  // All frames of one piece follow one another.
  std::stable_sort(parts.begin(), parts.end(),
                   [](const auto& a, const auto& b) {
                     return a.first->offset < b.first->offset;
                   });
  PartsOnDevice asked(layout, landing.frame(0).data());
  for (const auto& part : parts) asked.Add(*part.first, part.second);
  return asked.Digest(memory, digests);
}

BucketDigestMap::BucketDigestMap(std::shared_ptr<const NodeLayout> layout,
                                 int32_t bucket)
    : layout_(std::move(layout)),
      pieces_(layout_->plan.pieces(static_cast<uint32_t>(bucket))) {}

transport::Digest BucketDigestMap::Of(int64_t offset,
                                      absl::Span<const char> bytes) const {
  transport::Digest digest;
  ForPieces(*layout_, pieces_, offset, static_cast<int64_t>(bytes.size()),
            [&](const schedule::Piece& piece, const schedule::Param& param,
                int64_t begin, int64_t end, int64_t at) {
              AddPiece(piece, param, begin, end, bytes.data() + at, &digest);
            });
  return digest;
}

}  // namespace daemon
}  // namespace weightsync
