#include "transport/host/copy_pool.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "transport/error.h"
#include "transport/host/cast_run.h"
#include "transport/host/copy_range.h"
#include "transport/host/sigbus_guard.h"

namespace weightsync {
namespace transport {
namespace {

// What one thread takes at a time: big enough to forget the cost of taking it,
// small enough that threads end together.
constexpr int64_t kPartBytes = 1 << 20;
// Cuts inside a task fall on multiples of this, which every element size
// divides.
constexpr int64_t kCutBytes = 64;

// CopyRange behind the SIGBUS guard where that is asked for. *digest grows only
// when all bytes were read.
absl::Status CopyRangeGuarded(const CopyTask& task, int64_t begin, int64_t end,
                              bool guard_source, Digest* digest) {
  if (!guard_source) {
    CopyRange(task, begin, end, digest);
    return absl::OkStatus();
  }
  Digest sum;
  const absl::Status status = RunGuarded(
      task.src, task.src_extent(), [&task, begin, end, digest, &sum] {
        CopyRange(task, begin, end, digest != nullptr ? &sum : nullptr);
      });
  if (status.ok() && digest != nullptr) *digest += sum;
  return status;
}

absl::Status CheckPack(const PackRequest& request) {
  const auto bad = [](absl::string_view what) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY", what);
  };
  if (request.bucket == nullptr || request.bucket_bytes < 0)
    return bad("no bucket");
  if (request.frame_bytes <= 0 || request.frame_bytes % kCutBytes != 0) {
    return bad(absl::StrCat("frames of ", request.frame_bytes, " bytes"));
  }
  int64_t end = 0;
  for (const PackPiece& piece : request.pieces) {
    const absl::Status status = piece.copy.Validate();
    if (!status.ok()) return status;
    if (piece.offset < end)
      return bad("pieces of a bucket overlap, or are not in order");
    // Otherwise a frame could end inside an element.
    if (piece.offset % std::max(16, piece.copy.element_bytes) != 0) {
      return bad(
          absl::StrCat("a piece at offset ", piece.offset, " of a bucket"));
    }
    if (piece.copy.bytes() > request.bucket_bytes - piece.offset)
      return bad("a piece goes beyond its bucket");
    end = piece.offset + piece.copy.bytes();
  }
  return absl::OkStatus();
}

// Pieces of a bucket as tasks with a dense destination.
std::vector<CopyTask> PlacePieces(const PackRequest& request) {
  std::vector<CopyTask> tasks;
  tasks.reserve(request.pieces.size());
  for (const PackPiece& piece : request.pieces) {
    CopyTask task = piece.copy;
    task.dst = request.bucket + piece.offset;
    int64_t stride = task.run_bytes;
    for (size_t i = task.dims.size(); i-- > 0;) {
      task.dims[i].dst_stride = stride;
      stride *= task.dims[i].extent;
    }
    tasks.push_back(std::move(task));
  }
  return tasks;
}

}  // namespace

CopyPool::CopyPool(int threads) {
  for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { Help(); });
}

CopyPool::~CopyPool() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void CopyPool::Help() {
  while (true) {
    Job* job;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &CopyPool::HasWork));
      if (stopping_) return;
      // Turns go round, so that a long job does not keep all helpers from a
      // second one.
      job = jobs_.front();
      jobs_.pop_front();
      jobs_.push_back(job);
      ++job->helpers;
    }
    Work(job);
    absl::MutexLock lock(&mutex_);
    --job->helpers;
  }
}

void CopyPool::Work(Job* job) {
  while (true) {
    const int64_t part = job->next.fetch_add(1, std::memory_order_relaxed);
    if (part >= job->count) break;
    const absl::Status status = job->body(part);
    if (!status.ok()) {
      job->next.store(job->count, std::memory_order_relaxed);
      absl::MutexLock lock(&mutex_);
      if (job->status.ok()) job->status = status;
    }
  }
  absl::MutexLock lock(&mutex_);
  const auto it = std::find(jobs_.begin(), jobs_.end(), job);
  if (it != jobs_.end()) jobs_.erase(it);
}

absl::Status CopyPool::ParallelFor(
    int64_t count, absl::FunctionRef<absl::Status(int64_t)> body) {
  Job job(count, body);
  if (count > 1 && !threads_.empty()) {
    absl::MutexLock lock(&mutex_);
    jobs_.push_back(&job);
  }
  Work(&job);
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](Job* job) { return job->helpers == 0; }, &job));
  return job.status;
}

absl::Status CopyPool::MakeScales(absl::Span<CopyTask> tasks, bool guard_source,
                                  std::vector<std::vector<float>>* tables) {
  // A tensor and its scales often stand in one bucket.
  using Key = std::tuple<const char*, int64_t, int64_t, int64_t, int64_t>;
  std::map<Key, size_t> known;
  struct BlockRow {
    const CopyBlocks* blocks;
    int64_t row;
    float* scales;
  };
  std::vector<BlockRow> rows;
  for (CopyTask& task : tasks) {
    if (!task.has_blocks() || task.bytes() == 0) continue;
    CopyBlocks& blocks = task.blocks;
    const auto found =
        known.emplace(Key{blocks.src, blocks.row_stride, blocks.column_stride,
                          blocks.rows, blocks.columns},
                      tables->size());
    if (found.second) {
      tables->emplace_back(
          static_cast<size_t>(blocks.block_rows() * blocks.block_columns()));
      for (int64_t row = 0; row < blocks.block_rows(); ++row) {
        rows.push_back({&blocks, row,
                        tables->back().data() + row * blocks.block_columns()});
      }
    }
    blocks.scales = (*tables)[found.first->second].data();
    if (task.cast == CopyCast::kBF16BlockScale) {
      task.src = reinterpret_cast<const char*>(blocks.scales) +
                 (task.src - blocks.src);
      task.cast = CopyCast::kNone;
    }
  }
  if (rows.empty()) return absl::OkStatus();
  return ParallelFor(
      static_cast<int64_t>(rows.size()), [&](int64_t i) -> absl::Status {
        const BlockRow& row = rows[static_cast<size_t>(i)];
        if (!guard_source) {
          ScalesOfBlockRow(*row.blocks, row.row, row.scales);
          return absl::OkStatus();
        }
        return RunGuarded(row.blocks->src, row.blocks->extent(), [&row] {
          ScalesOfBlockRow(*row.blocks, row.row, row.scales);
        });
      });
}

absl::Status CopyPool::Copy(absl::Span<const CopyTask> tasks,
                            const CopyOptions& options, Digest* digest) {
  std::vector<std::vector<float>> scales;
  std::vector<CopyTask> with_scales;
  if (std::any_of(tasks.begin(), tasks.end(),
                  [](const CopyTask& task) { return task.has_blocks(); })) {
    for (const CopyTask& task : tasks) {
      const absl::Status status = task.Validate();
      if (!status.ok()) return status;
    }
    with_scales.assign(tasks.begin(), tasks.end());
    const absl::Status status =
        MakeScales(absl::MakeSpan(with_scales), options.guard_source, &scales);
    if (!status.ok()) return status;
    tasks = with_scales;
  }
  // starts[i]: bytes before task i, when all are laid end to end. Parts are cut
  // from that line.
  std::vector<int64_t> starts;
  starts.reserve(tasks.size() + 1);
  int64_t total = 0;
  for (const CopyTask& task : tasks) {
    const absl::Status status = task.Validate();
    if (!status.ok()) return status;
    starts.push_back(total);
    if (__builtin_add_overflow(total, task.bytes(), &total)) {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY",
                       "more bytes than 63 bits can count");
    }
  }
  starts.push_back(total);
  if (total == 0) return absl::OkStatus();
  const int64_t parts = (total + kPartBytes - 1) / kPartBytes;
  absl::Mutex mutex;
  Digest sum;  // under mutex
  const absl::Status status =
      ParallelFor(parts, [&](int64_t part) -> absl::Status {
        // Where on the line this part begins and ends, moved back to where a
        // task may be cut.
        const auto cut = [&](int64_t at, size_t* task) {
          *task = std::upper_bound(starts.begin(), starts.end(), at) -
                  starts.begin() - 1;
          return *task == tasks.size()
                     ? 0
                     : (at - starts[*task]) / kCutBytes * kCutBytes;
        };
        size_t task, last_task;
        int64_t from = cut(part * kPartBytes, &task);
        const int64_t last =
            cut(std::min(total, (part + 1) * kPartBytes), &last_task);
        Digest part_sum;
        for (; task <= last_task && task < tasks.size(); ++task, from = 0) {
          const int64_t to = task == last_task ? last : tasks[task].bytes();
          if (from >= to) continue;
          absl::Status status =
              CopyRangeGuarded(tasks[task], from, to, options.guard_source,
                               digest ? &part_sum : nullptr);
          if (!status.ok()) return status;
        }
        // In the thread that stored.
        NonTemporalFence();
        if (digest != nullptr) {
          absl::MutexLock lock(&mutex);
          sum += part_sum;
        }
        return absl::OkStatus();
      });
  if (status.ok() && digest != nullptr) *digest += sum;
  return status;
}

absl::Status CopyPool::Pack(const PackRequest& request, PackResult* result) {
  absl::Status status = CheckPack(request);
  if (!status.ok()) return status;
  std::vector<CopyTask> tasks = PlacePieces(request);
  std::vector<std::vector<float>> scales;
  status = MakeScales(absl::MakeSpan(tasks), request.guard_source, &scales);
  if (!status.ok()) return status;
  const int64_t frame_bytes = request.frame_bytes;
  const int64_t frames = (request.bucket_bytes + frame_bytes - 1) / frame_bytes;
  const int64_t part_frames = std::max<int64_t>(1, kPartBytes / frame_bytes);
  const int64_t parts = (frames + part_frames - 1) / part_frames;
  std::vector<Digest> digests(frames);

  // A frame is one thread's from its first byte to its last, so its digest
  // needs no one else's.
  const auto pack_frame = [&](int64_t begin, int64_t end,
                              Digest* digest) -> absl::Status {
    size_t piece =
        std::upper_bound(request.pieces.begin(), request.pieces.end(), begin,
                         [](int64_t at, const PackPiece& piece) {
                           return at < piece.offset;
                         }) -
        request.pieces.begin();
    if (piece > 0) --piece;
    int64_t at = begin;
    for (; piece < tasks.size() && request.pieces[piece].offset < end;
         ++piece) {
      const int64_t offset = request.pieces[piece].offset;
      const int64_t from = std::max(begin, offset);
      const int64_t to = std::min(end, offset + tasks[piece].bytes());
      if (from >= to) continue;
      std::memset(request.bucket + at, 0, from - at);
      absl::Status status =
          CopyRangeGuarded(tasks[piece], from - offset, to - offset,
                           request.guard_source, digest);
      if (!status.ok()) return status;
      at = to;
    }
    std::memset(request.bucket + at, 0, end - at);
    return absl::OkStatus();
  };

  absl::Mutex mutex;
  std::vector<bool> landed(parts);  // under mutex
  int64_t told = 0;                 // parts; under mutex
  status = ParallelFor(parts, [&](int64_t part) -> absl::Status {
    const int64_t last = std::min(frames, (part + 1) * part_frames);
    for (int64_t frame = part * part_frames; frame < last; ++frame) {
      const int64_t begin = frame * frame_bytes;
      absl::Status status =
          pack_frame(begin, std::min(request.bucket_bytes, begin + frame_bytes),
                     &digests[frame]);
      if (!status.ok()) return status;
    }
    NonTemporalFence();
    if (request.on_frames == nullptr) return absl::OkStatus();
    absl::MutexLock lock(&mutex);
    landed[part] = true;
    const int64_t first = told;
    while (told < parts && landed[told]) ++told;
    if (told > first) {
      const int64_t from = first * part_frames;
      const int64_t to = std::min(frames, told * part_frames);
      request.on_frames(from, to,
                        absl::MakeConstSpan(digests).subspan(from, to - from));
    }
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  if (result != nullptr) {
    result->bucket = Digest();
    for (const Digest& digest : digests) result->bucket += digest;
    result->frames = std::move(digests);
  }
  return absl::OkStatus();
}

}  // namespace transport
}  // namespace weightsync
