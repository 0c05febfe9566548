#ifndef WEIGHTSYNC_TRANSPORT_TCP_OUTBOUND_H_
#define WEIGHTSYNC_TRANSPORT_TCP_OUTBOUND_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "transport/group.h"
#include "transport/landing.h"
#include "transport/tcp/hop.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/wire.h"

namespace weightsync {
namespace transport {
namespace tcp {

class OutStream;

// The sending end of one edge: what is ready in this node's landings and the
// successor lacks, shared out over a few streams, each with a thread of its
// own.
//
//   StartMove and the peer's HAVE, in whichever order -> frames are queued as
//   they become ready, streams take them
//   -> the peer's COMPLETE, then CHAIN
//   Fail, from any side: the streams end. GiveUp: what is queued is sent first,
//   then GIVE_UP.
//
// Thread-safe. Locks: taps_mutex_, then a landing's, then mutex_.
class Outbound {
 public:
  // Called on the streams' threads (or on StartMove's), without locks.
  class Observer {
   public:
    virtual ~Observer() = default;
    virtual void OnSentSome() = 0;
    virtual void OnPeerComplete(uint64_t move) = 0;
    virtual void OnPeerChain(uint64_t move, const absl::Status& status) = 0;
    virtual void OnGaveUp(const absl::Status& why) = 0;
    virtual void OnOutboundFailed(const absl::Status& status) = 0;
    // Which way the bytes of frames go, once that is known.
    virtual void OnSendsOver(bool channel) = 0;
  };

  Outbound(HopOptions options, Observer* observer);
  ~Outbound();

  // Takes over connections that have shaken hands. Once.
  void Start(std::vector<Fd> streams);
  void StartMove(uint64_t move, std::vector<std::shared_ptr<Landing>> landings);
  // No more frames will become ready, because of `why`.
  void GiveUp(const absl::Status& why);
  // Ends the threads and waits for them; bounded time. Afterwards no landing is
  // touched.
  void Stop(StopMode mode, const absl::Status& why);

  PeerProgress Progress() const;

  // ---- For OutStream ----

  struct FrameRef {
    Landing* landing = nullptr;
    uint32_t frame = 0;
  };
  struct Work {
    uint64_t move = 0;
    std::vector<FrameRef> frames;
    bool give_up = false;  // nothing is left: say so
    absl::Status give_up_why;
  };

  const HopOptions& options() const { return options_; }
  StopMode stop_mode() const {
    return stop_mode_.load(std::memory_order_acquire);
  }
  absl::Status stop_why() const;
  // Fills *work with up to `limit` frames, repairs first. When there is
  // nothing, marks the stream as sleeping: whatever comes next wakes it.
  void Take(OutStream* stream, size_t limit, Work* work);
  void Sent(int64_t bytes, size_t frames);
  void SendsOver(bool channel) { observer_->OnSendsOver(channel); }
  void GaveUp(const absl::Status& why);
  // `talks`: on the stream that carries what the peer says about moves.
  void PeerLeft(bool talks);
  void Fail(const absl::Status& status);
  // A message of the peer. An error ends the hop.
  absl::Status OnMessage(const Header& header, absl::string_view payload);
  void Heard(int64_t now);

 private:
  class Tap;

  // What the peer said of its newest move; it may be one ahead of ours.
  struct PeerMove {
    uint64_t number = 0;
    absl::optional<std::vector<HaveEntry>> have;
    bool complete = false;
    absl::optional<absl::Status> chain;
  };

  // The peer's state for the move of `header`; null when it is over.
  PeerMove* NotePeer(const Header& header)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Begin(uint64_t move, const std::vector<HaveEntry>& have);
  absl::Status Repair(const Header& header);
  void FramesReady(uint64_t move, size_t index,
                   absl::Span<const uint32_t> frames);
  void WakeSleepersLocked(size_t wanted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemoveTaps();

  const HopOptions options_;
  Observer* const observer_;

  absl::Mutex stop_mutex_;                           // one Stop at a time
  std::vector<std::unique_ptr<OutStream>> streams_;  // constant after Start

  absl::Mutex taps_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  std::vector<std::pair<std::shared_ptr<Landing>, std::unique_ptr<Tap>>> taps_
      ABSL_GUARDED_BY(taps_mutex_);
  bool taps_closed_ ABSL_GUARDED_BY(taps_mutex_) = false;

  mutable absl::Mutex mutex_;
  uint64_t move_ ABSL_GUARDED_BY(mutex_) = 0;
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::shared_ptr<Landing>> landings_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::vector<uint8_t>> peer_have_
      ABSL_GUARDED_BY(mutex_);  // as landings_
  PeerMove peer_ ABSL_GUARDED_BY(mutex_);
  std::deque<FrameRef> queue_ ABSL_GUARDED_BY(mutex_);
  std::deque<FrameRef> repairs_ ABSL_GUARDED_BY(mutex_);
  std::vector<OutStream*> sleeping_ ABSL_GUARDED_BY(mutex_);
  bool giving_up_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status give_up_why_ ABSL_GUARDED_BY(mutex_);
  size_t gave_up_streams_ ABSL_GUARDED_BY(mutex_) = 0;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  absl::Status stop_why_ ABSL_GUARDED_BY(mutex_);
  RateMeter rate_ ABSL_GUARDED_BY(mutex_);
  int64_t repaired_ ABSL_GUARDED_BY(mutex_) = 0;

  std::atomic<StopMode> stop_mode_{StopMode::kRun};
  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> frames_{0};
  std::atomic<int64_t> taken_frames_{0};  // by streams, and not sent yet
  std::atomic<int64_t> heard_nanos_{0};
};

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_OUTBOUND_H_
