#include "transport/memory.h"

#include <atomic>

#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

absl::Status CheckGeneration(const Segment& source, int slot, uint64_t expected,
                             absl::string_view what_now) {
  const uint64_t found = source.Generation(slot);
  if (found == expected) return absl::OkStatus();
  return MakeError(absl::StatusCode::kAborted, "SLOT_REUSED",
                   absl::StrCat("slot ", slot, " is at generation ", found,
                                ", not ", expected, ": ", what_now));
}

}  // namespace

absl::Status Memory::DigestEach(absl::Span<const CopyTask> tasks,
                                const CopyOptions& options,
                                absl::Span<Digest> digests) {
  for (size_t i = 0; i < tasks.size(); ++i) {
    const absl::Status status = Copy({tasks[i]}, options, &digests[i]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status GuardedApply(Memory* memory, const Segment& source, int slot,
                          uint64_t generation, absl::Span<const CopyTask> tasks,
                          const CopyOptions& options) {
  if (slot < 0 || slot >= source.generation_slots()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SLOT",
                     absl::StrCat("slot ", slot, " of a segment with ",
                                  source.generation_slots()));
  }
  absl::Status status =
      CheckGeneration(source, slot, generation, "nothing was copied");
  if (!status.ok()) return status;
  status = memory->Copy(tasks, options, nullptr);
  if (!status.ok()) return status;
    // The loads of the copy come before the second look at the counter.
#if !defined(__SANITIZE_THREAD__)  // gcc refuses fences there
  std::atomic_thread_fence(std::memory_order_acq_rel);
#endif
  return CheckGeneration(source, slot, generation,
                         "what was copied may be a mixture");
}

}  // namespace transport
}  // namespace weightsync
