// Memory of one kind (host, or the GPUs of one vendor): where weights are
// stored, handed between processes, and copied.
//
//   1. The daemon allocates a segment: one big piece, reserved and warmed up at
//   once, never grown, never replaced.
//   2. It exports the segment to a worker: the ticket goes to the worker over
//   gRPC; the worker imports it, once, and keeps
//      the mapping for as long as it lives.
//   3. For every update, parts of the segment are used again. Whoever reuses a
//   part advances its generation first;
//      whoever reads a part names the generation that it means, before and
//      after (GuardedApply).
//   4. Snapshots are packed into a segment, workers copy out of it; no memory
//   is made or mapped for an update.
//
// transport/host implements it with sealed memfds and CPU threads.
// transport/conformance has the tests that every implementation passes;
// transport/fault makes any of them fail on demand.
#ifndef WEIGHTSYNC_TRANSPORT_MEMORY_H_
#define WEIGHTSYNC_TRANSPORT_MEMORY_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "transport/copy.h"
#include "transport/digest.h"

namespace weightsync {
namespace transport {

enum class MemoryKind { kHost, kCuda };

// A piece of memory as this process sees it. The bytes live while any process
// has them; the destructor takes away this process's view. Thread-safe, as far
// as the bytes are: who writes them, and when, is the callers' agreement.
class Segment {
 public:
  virtual ~Segment() = default;

  virtual MemoryKind kind() const = 0;
  // The address in this process: for kCuda one that only the device may follow.
  // Does not change.
  virtual char* data() const = 0;
  virtual int64_t bytes() const = 0;
  // kCuda: of which GPU.
  virtual std::string device_uuid() const { return ""; }
  // False in a process that got the segment read-only: a store by the CPU is a
  // SIGSEGV there.
  virtual bool writable() const = 0;
  // A file whose bytes, from *offset on, are those of data(): for sending
  // without a copy. Lives as long as the segment. Negative: there is none.
  virtual int file(int64_t* /*offset*/) const { return -1; }

  // Reuse counters, which start at 0. What a slot of the table stands for is
  // the callers' agreement.
  virtual int generation_slots() const = 0;
  // REQUIRES for both: 0 <= slot < generation_slots().
  virtual uint64_t Generation(int slot) const = 0;
  // Returns the new value. Everyone sees it before any byte that this thread
  // writes afterwards. REQUIRES: writable().
  virtual uint64_t AdvanceGeneration(int slot) = 0;
};

struct AllocateOptions {
  std::string name;  // for people: it shows in /proc/PID/maps and in messages
  int generation_slots = 0;
  // No process but this one can ever write to it, whatever it was exported as.
  bool others_read_only = false;
  // Memory of this GPU, in a process that has others look after its GPUs
  // (cuda::AgentMemory). Empty: of the kind of the Memory.
  std::string device_uuid;
};

struct ExportOptions {
  bool read_only = false;
  // Who may import it; anyone who has the ticket, where not given.
  absl::optional<pid_t> pid;
  absl::optional<uid_t> uid;
  absl::Duration ttl = absl::Seconds(60);
};

// What the importer needs, small enough for a message. Good for one import.
struct MemoryTicket {
  MemoryKind kind = MemoryKind::kHost;
  int64_t bytes = 0;
  bool read_only = false;
  std::string address;  // kHost: the path of the exporter's fd socket
  std::string token;    // kHost: a token of that socket; kCuda: an IPC handle
  int64_t offset =
      0;  // kCuda: from the start of the allocation that the handle names
};

// Thread-safe.
class Memory {
 public:
  virtual ~Memory() = default;

  virtual MemoryKind kind() const = 0;

  // RESOURCE_EXHAUSTED (NO_MEMORY_FOR_ARENA) with both sums when there is not
  // enough; INVALID_ARGUMENT (BAD_SIZE).
  virtual absl::StatusOr<std::unique_ptr<Segment>> Allocate(
      int64_t bytes, const AllocateOptions& options) = 0;

  // `segment` is of this Memory. FAILED_PRECONDITION (READ_ONLY) when a view
  // that is read-only, or memory that others may only read, is to be exported
  // for writing.
  virtual absl::StatusOr<MemoryTicket> Export(const Segment& segment,
                                              const ExportOptions& options) = 0;

  // Takes an export back, if nobody has imported it yet: what holds the bytes
  // for its importer is let go now and not at the end of its ttl.
  virtual void Withdraw(const MemoryTicket& ticket) = 0;

  // NOT_FOUND (TOKEN_UNKNOWN), FAILED_PRECONDITION (TOKEN_REDEEMED,
  // TOKEN_EXPIRED), PERMISSION_DENIED (TOKEN_OTHER_PROCESS), UNAVAILABLE
  // (FD_SOCKET_UNREACHABLE), DEADLINE_EXCEEDED (FD_SOCKET_TIMEOUT),
  // INVALID_ARGUMENT (NOT_AN_ARENA, ARENA_NOT_SEALED, ARENA_DAMAGED,
  // ARENA_TOO_SMALL).
  virtual absl::StatusOr<std::unique_ptr<Segment>> Import(
      const MemoryTicket& ticket, absl::Duration timeout) = 0;

  // Does all of the tasks, in any order, and returns when their bytes are in
  // place for every thread and process. With `digest`, adds the digest of all
  // of them. INVALID_ARGUMENT (BAD_COPY) before the first byte; DATA_LOSS
  // (SOURCE_MEMORY_LOST) with some bytes copied, and *digest as it was.
  virtual absl::Status Copy(absl::Span<const CopyTask> tasks,
                            const CopyOptions& options, Digest* digest) = 0;

  // The GPU in whose memory an address of this process names bytes that nobody
  // can follow here: Copy, Pack, Read and Write take it. Empty: it is an
  // address as any other.
  virtual std::string DeviceOf(const char* /*address*/) const { return ""; }

  // Errors as those of Copy; on_frames may have been called for some frames
  // before one.
  virtual absl::Status Pack(const PackRequest& request, PackResult* result) = 0;

  // The digests of frames where they lie, one for each. Of memory of a GPU:
  // UNIMPLEMENTED for any other, which its owner can read. Errors as those of
  // Copy.
  virtual absl::StatusOr<std::vector<Digest>> DigestFrames(
      const FrameDigestRequest& /*request*/) {
    return absl::UnimplementedError("this memory is read by who has it");
  }

  // Small transfers between this memory and plain host memory. Slow where there
  // is a device between.
  virtual absl::Status Read(const char* from, absl::Span<char> to) = 0;
  virtual absl::Status Write(absl::Span<const char> from, char* to) = 0;
};

// Copies out of a part of `source` that may be used again for something else at
// any time: ABORTED (SLOT_REUSED) when the generation of `slot` is not
// `generation` before (nothing was written) or after (what was written is a
// mixture). The status of Copy otherwise. INVALID_ARGUMENT (BAD_SLOT).
absl::Status GuardedApply(Memory* memory, const Segment& source, int slot,
                          uint64_t generation, absl::Span<const CopyTask> tasks,
                          const CopyOptions& options = {});

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_MEMORY_H_
