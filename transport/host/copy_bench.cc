// How fast this machine copies and digests. Rounds of all variants are
// interleaved, so that a disturbance hits all of them, and the best round of
// each counts; ratios compare with memcpy with the same number of threads.
//
//   copy_bench [GiB] [rounds]
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "transport/copy.h"
#include "transport/digest.h"
#include "transport/host/arena.h"
#include "transport/host/copy_pool.h"

namespace weightsync {
namespace transport {
namespace {

struct Variant {
  std::string name;
  int threads;
  std::function<void()> run;
  double best_seconds = 1e9;
};

// Each thread its own half, in one call: memcpy at its best.
void MemcpyAll(CopyPool* pool, char* to, const char* from, int64_t bytes) {
  const int64_t part = bytes / pool->threads();
  const absl::Status status =
      pool->ParallelFor(pool->threads(), [&](int64_t i) {
        std::memcpy(to + i * part, from + i * part, part);
        return absl::OkStatus();
      });
  if (!status.ok()) std::abort();
}

int Main(int argc, char** argv) {
  const int64_t bytes =
      static_cast<int64_t>((argc > 1 ? std::atof(argv[1]) : 1) * (1 << 30));
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 9;
  Arena::CreateOptions options;
  options.name = "bench";
  absl::StatusOr<std::unique_ptr<Arena>> source = Arena::Create(bytes, options);
  absl::StatusOr<std::unique_ptr<Arena>> target = Arena::Create(bytes, options);
  if (!source.ok() || !target.ok()) {
    std::fprintf(stderr, "%s\n",
                 (source.ok() ? target : source).status().ToString().c_str());
    return 1;
  }
  std::printf("warm-up of %.2f GiB: %s, %s\n", bytes / double{1 << 30},
              absl::FormatDuration((*source)->warm_up_time()).c_str(),
              absl::FormatDuration((*target)->warm_up_time()).c_str());
  char* from = (*source)->data();
  char* to = (*target)->data();
  // Weights of the usual sizes, as bf16 and as fp32: others (denormal numbers)
  // take a CPU longer to divide.
  for (int64_t i = 0; i + 2 <= bytes; i += 2) {
    const uint16_t word = static_cast<uint16_t>(
        0x3c00u | (static_cast<uint32_t>(i * 2654435761u >> 13) & 0x83ffu));
    std::memcpy(from + i, &word, sizeof(word));
  }
  // Private memory, as a worker's live parameters are.
  char* live = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  std::memset(live, 1, bytes);

  CopyTask task;
  task.src = from;
  task.dst = to;
  task.run_bytes = bytes;
  task.element_bytes = 2;
  CopyTask look = task;
  look.dst = nullptr;
  CopyTask apply = task;
  apply.src = to;
  apply.dst = live;
  PackPiece piece;
  piece.copy = task;
  PackRequest pack;
  pack.bucket = to;
  pack.bucket_bytes = bytes;
  pack.pieces = absl::MakeConstSpan(&piece, 1);

  // Casts: all of `from` as a matrix of so many columns.
  constexpr int64_t kColumns = 7168;
  const auto cast_of = [&](CopyCast cast, int64_t source_bytes,
                           int32_t element_bytes) {
    const int64_t rows = bytes / source_bytes / kColumns;
    CopyTask made = MakeBoxCopy({rows, kColumns}, element_bytes, to,
                                {kColumns, 1}, from, {kColumns, 1},
                                GlobalBox{0, {rows, kColumns}, {0, 0}}, cast);
    made.blocks.src = from;
    made.blocks.row_stride = kColumns * source_bytes;
    made.blocks.column_stride = source_bytes;
    made.blocks.rows = rows;
    made.blocks.columns = made.blocks.matrix_columns = kColumns;
    return made;
  };
  const CopyTask masters = cast_of(CopyCast::kF32ToBF16, 4, 2);
  const CopyTask halves = cast_of(CopyCast::kF32ToF16, 4, 2);
  const CopyTask quantised = cast_of(CopyCast::kBF16ToF8E4M3, 2, 1);

  CopyPool one(1), two(2);
  std::vector<Variant> variants;
  for (CopyPool* pool : {&one, &two}) {
    const int threads = pool->threads();
    const auto add = [&](const char* name, std::function<void()> run) {
      variants.push_back({name, threads, run});
    };
    add("memcpy", [=] { MemcpyAll(pool, to, from, bytes); });
    add("memcpy to private", [=] { MemcpyAll(pool, live, from, bytes); });
    add("copy", [=] { (void)pool->Copy({task}); });
    add("copy + digest", [=] {
      Digest digest;
      (void)pool->Copy({task}, CopyOptions(), &digest);
    });
    add("copy + digest, guarded", [=] {
      Digest digest;
      CopyOptions guarded;
      guarded.guard_source = true;
      (void)pool->Copy({task}, guarded, &digest);
    });
    add("pack (digest per 64 KiB)", [=] { (void)pool->Pack(pack, nullptr); });
    // Of the bytes that are read.
    for (const auto& [name, task_of] :
         {std::make_pair("fp32 to bf16 + digest", &masters),
          std::make_pair("fp32 to fp16 + digest", &halves),
          std::make_pair("bf16 to fp8 + digest", &quantised)}) {
      add(name, [pool, task_of = task_of] {
        Digest digest;
        if (!pool->Copy({*task_of}, CopyOptions(), &digest).ok()) std::abort();
      });
    }
    add("apply to private", [=] { (void)pool->Copy({apply}); });
    add("digest", [=] {
      Digest digest;
      (void)pool->Copy({look}, CopyOptions(), &digest);
    });
    add("digest of 64 KiB in cache", [=] {
      (void)pool->ParallelFor(threads, [&](int64_t i) {
        Digest digest;
        for (int64_t at = 0; at < bytes / threads; at += kFrameBytes) {
          DigestAccumulate(from + i * kFrameBytes,
                           {0, at / 2, kFrameBytes / 2, 2}, &digest);
        }
        return absl::OkStatus();
      });
    });
  }
  for (int round = 0; round < rounds; ++round) {
    for (Variant& variant : variants) {
      const absl::Time start = absl::Now();
      variant.run();
      variant.best_seconds = std::min(
          variant.best_seconds, absl::ToDoubleSeconds(absl::Now() - start));
    }
  }
  double memcpy_seconds = 0;
  for (const Variant& variant : variants) {
    if (variant.name == "memcpy") memcpy_seconds = variant.best_seconds;
    std::printf("%d threads  %-28s %6.2f GB/s  %4.2f of memcpy\n",
                variant.threads, variant.name.c_str(),
                bytes / 1e9 / variant.best_seconds,
                memcpy_seconds / variant.best_seconds);
  }
  munmap(live, bytes);
  return 0;
}

}  // namespace
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  return weightsync::transport::Main(argc, argv);
}
