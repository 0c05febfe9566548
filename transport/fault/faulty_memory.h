#ifndef WEIGHTSYNC_TRANSPORT_FAULT_FAULTY_MEMORY_H_
#define WEIGHTSYNC_TRANSPORT_FAULT_FAULTY_MEMORY_H_

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "transport/memory.h"

namespace weightsync {
namespace transport {

// What goes wrong, and when: from the call number `after` (the first is 0) of
// `operation`, for `count` calls.
struct MemoryFault {
  enum class Operation { kAllocate, kExport, kImport, kCopy, kPack };
  enum class Kind {
    kFail,      // answers `status`, having done nothing
    kDelay,     // waits `delay` first
    kDamage,    // flips the lowest bit of byte `byte` of what was written, and
                // says OK (kCopy, kPack)
    kTruncate,  // leaves out all bytes from `byte` on, and says OK (kCopy,
                // kPack)
  };

  Operation operation = Operation::kCopy;
  Kind kind = Kind::kFail;
  int64_t after = 0;
  int64_t count = 1;  // negative: from then on
  absl::Status status = absl::UnavailableError("made to fail");
  absl::Duration delay;
  int64_t byte = 0;  // of the first task of a copy, counted in its destination;
                     // of the bucket of a pack
};

// Any Memory, with faults at will, for tests and chaos runs. Thread-safe.
class FaultyMemory final : public Memory {
 public:
  // `base` outlives this.
  explicit FaultyMemory(Memory* base) : base_(base) {}

  // Adds to the faults there are; `after` counts from now.
  void Inject(const MemoryFault& fault);
  void Clear();
  // Calls that a fault has hit so far.
  int64_t hits() const;

  MemoryKind kind() const override { return base_->kind(); }
  absl::StatusOr<std::unique_ptr<Segment>> Allocate(
      int64_t bytes, const AllocateOptions& options) override;
  absl::StatusOr<MemoryTicket> Export(const Segment& segment,
                                      const ExportOptions& options) override;
  void Withdraw(const MemoryTicket& ticket) override {
    base_->Withdraw(ticket);
  }
  absl::StatusOr<std::unique_ptr<Segment>> Import(
      const MemoryTicket& ticket, absl::Duration timeout) override;
  absl::Status Copy(absl::Span<const CopyTask> tasks,
                    const CopyOptions& options, Digest* digest) override;
  absl::Status Pack(const PackRequest& request, PackResult* result) override;
  std::string DeviceOf(const char* address) const override {
    return base_->DeviceOf(address);
  }
  absl::StatusOr<std::vector<Digest>> DigestFrames(
      const FrameDigestRequest& request) override {
    return base_->DigestFrames(request);
  }
  absl::Status Read(const char* from, absl::Span<char> to) override {
    return base_->Read(from, to);
  }
  absl::Status Write(absl::Span<const char> from, char* to) override {
    return base_->Write(from, to);
  }

 private:
  // Counts a call; waits where a fault says so. What is left to do: to fail,
  // damage or truncate.
  absl::optional<MemoryFault> Next(MemoryFault::Operation operation)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status FlipBit(char* byte);

  Memory* const base_;
  mutable absl::Mutex mutex_;
  std::vector<MemoryFault> faults_ ABSL_GUARDED_BY(mutex_);
  int64_t hits_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_FAULT_FAULTY_MEMORY_H_
