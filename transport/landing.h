#ifndef WEIGHTSYNC_TRANSPORT_LANDING_H_
#define WEIGHTSYNC_TRANSPORT_LANDING_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "transport/digest.h"
#include "transport/digest_map.h"

namespace weightsync {
namespace transport {

// Where some bytes also stand as a part of a file, for who can send from a file
// without a copy of its own. fd < 0: nowhere. Does not own the descriptor.
struct FileRange {
  int fd = -1;
  int64_t offset = 0;
};

// Digests frames of one bucket that this process cannot read: those of a GPU's
// memory. Thread-safe; it blocks, in bounded time.
class FrameDigester {
 public:
  virtual ~FrameDigester() = default;
  // Of what stands in these frames now, one for each. The errors of whoever has
  // the memory.
  virtual absl::StatusOr<std::vector<Digest>> DigestFrames(
      absl::Span<const uint32_t> frames) const = 0;
};

// One bucket's bytes on this node while they are filled and sent on, in frames
// of 64 KiB (the last one may be shorter). At the source, the snapshot fills
// frames and marks them; at a receiver, the group does so after it has verified
// them. Whoever sends watches for ready frames and passes them on at once.
//
// A frame goes EMPTY -> FILLING (Claim) -> READY (MarkReady), or back to EMPTY
// (Unclaim). A READY frame is never written again: it may be on the wire, and
// it is what a rebuilt route is told that this node already has.
//
// The bytes may lie in memory of a GPU: then its addresses are names, which
// nobody follows here; groups move such a landing whose frames go by a way that
// knows them (Group::PayloadDevice), and the GPU digests them.
//
// Thread-safe. Does not own the memory, which must outlive every group that
// moves the landing (until its Abort or destructor has returned).
class Landing {
 public:
  static constexpr int64_t kFrameBytes = 64 << 10;
  // As many frames as are digested at once: 16 MiB.
  static constexpr size_t kDigestFrames = 256;

  // Told of frames as they become ready. Called with the landing's lock held: a
  // watcher takes only locks under which nobody calls a Landing, does not
  // block, and does not call back.
  class Watcher {
   public:
    virtual ~Watcher() = default;
    virtual void OnFramesReady(absl::Span<const uint32_t> frames) = 0;
    virtual void OnFailed(const absl::Status& status) = 0;
  };

  // `digests` is shared by all landings of the same bucket layout. `file`: the
  // same bytes as `data`, as a shared mapping of it.
  Landing(uint64_t bucket_id, absl::Span<char> data,
          std::shared_ptr<const DigestMap> digests, FileRange file = {});
  // In memory of a GPU, which `digester` asks.
  Landing(uint64_t bucket_id, absl::Span<char> data,
          std::shared_ptr<const FrameDigester> digester);
  Landing(const Landing&) = delete;
  Landing& operator=(const Landing&) = delete;

  uint64_t bucket_id() const { return bucket_id_; }
  int64_t size() const { return static_cast<int64_t>(data_.size()); }
  uint32_t frame_count() const { return frame_count_; }
  // Its addresses are names.
  bool on_device() const { return digester_ != nullptr; }
  // The memory of one frame. REQUIRES: frame < frame_count().
  absl::Span<char> frame(uint32_t frame) const;
  // The same bytes in a file; fd < 0 when they are in none.
  FileRange frame_file(uint32_t frame) const;
  // Computes the digest of what stands in the frame's memory now. REQUIRES:
  // !on_device().
  Digest ComputeDigest(uint32_t frame) const;
  // The same of several, wherever they are. Errors: of a GPU's memory alone.
  absl::StatusOr<std::vector<Digest>> ComputeDigests(
      absl::Span<const uint32_t> frames) const;

  // EMPTY -> FILLING. False when somebody else fills the frame or it is ready:
  // then its memory is not the caller's to write.
  bool Claim(uint32_t frame);
  // FILLING -> EMPTY: what was written is no good.
  void Unclaim(uint32_t frame);
  // EMPTY or FILLING -> READY with the digest of the frame's bytes. True when
  // this completed the bucket. A frame that is ready stays as it is.
  bool MarkReady(uint32_t frame, const Digest& digest);
  // For a holder that knows its bytes to be whole: computes and marks every
  // frame that is not ready. Errors of ComputeDigests.
  absl::Status MarkAllReady();
  // The bytes will never be complete (the first status stays). Watchers are
  // told; waiting ends.
  void Fail(const absl::Status& status);

  bool IsReady(uint32_t frame) const;
  // REQUIRES: IsReady(frame).
  Digest frame_digest(uint32_t frame) const;
  uint32_t ready_frames() const;
  bool complete() const;
  absl::Status status() const;
  // The sum over the ready frames: the bucket's digest when complete().
  Digest bucket_digest() const;
  // One bit a frame, frame i at bit i % 8 of byte i / 8.
  std::vector<uint8_t> ReadyBitmap() const;

  // Blocks until complete (OK), failed (its status), or no frame became ready
  // for `no_progress` (DEADLINE_EXCEEDED, NO_PROGRESS).
  absl::Status WaitComplete(absl::Duration no_progress) const;

  // Tells `watcher` of the frames that are ready, in the order in which they
  // became so, and of all later ones. After RemoveWatcher has returned it is
  // not called again.
  void AddWatcher(Watcher* watcher);
  void RemoveWatcher(Watcher* watcher);

  // Only one group at a time may receive into a landing: two could overwrite
  // each other. False if taken.
  bool AcquireReceiver(const void* owner);
  void ReleaseReceiver(const void* owner);

 private:
  enum class FrameState : uint8_t { kEmpty, kFilling, kReady };

  absl::Status MarkReadyAsTheyAre(absl::Span<const uint32_t> frames);

  // Constant after construction.
  const uint64_t bucket_id_;
  const absl::Span<char> data_;
  const std::shared_ptr<const DigestMap> digests_;
  const std::shared_ptr<const FrameDigester> digester_;
  const FileRange file_;
  const uint32_t frame_count_;

  mutable absl::Mutex mutex_;
  std::vector<FrameState> states_ ABSL_GUARDED_BY(mutex_);
  std::vector<Digest> frame_digests_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint32_t> ready_order_ ABSL_GUARDED_BY(mutex_);
  Digest sum_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::vector<Watcher*> watchers_ ABSL_GUARDED_BY(mutex_);
  const void* receiver_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_LANDING_H_
