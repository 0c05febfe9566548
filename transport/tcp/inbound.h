#ifndef WEIGHTSYNC_TRANSPORT_TCP_INBOUND_H_
#define WEIGHTSYNC_TRANSPORT_TCP_INBOUND_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "transport/group.h"
#include "transport/landing.h"
#include "transport/tcp/hop.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/wire.h"

namespace weightsync {
namespace transport {
namespace tcp {

class InStream;

// The receiving end of one edge: frames go from the socket into the landings'
// memory, are verified there and marked ready, which is what makes the next hop
// send them.
//
//   StartMove: HAVE -> frames -> all complete: COMPLETE -> SendChain, when the
//   members after this one have ended a damaged frame: NAK; the third time:
//   FAIL
//
// Thread-safe.
class Inbound {
 public:
  // Called on the streams' threads (or on StartMove's), without locks.
  class Observer {
   public:
    virtual ~Observer() = default;
    virtual void OnAllStreams() = 0;
    virtual void OnReceivedSome() = 0;
    virtual void OnFilled(uint64_t move) = 0;
    // `own_edge` is false when the failure lies further up and the predecessor
    // only told of it.
    virtual void OnInboundFailed(const absl::Status& status, bool own_edge) = 0;
    // Which way the bytes of frames come, once that is known.
    virtual void OnReceivesOver(bool channel) = 0;
  };

  Inbound(HopOptions options, Observer* observer);
  ~Inbound();

  // Whether a stream of that number may come. The first one fixes the count.
  absl::Status Check(uint32_t stream, uint32_t stream_count);
  // REQUIRES: Check was OK.
  void AddStream(Fd fd, uint32_t stream, uint32_t stream_count);
  bool has_all_streams() const;

  void StartMove(uint64_t move, std::vector<std::shared_ptr<Landing>> landings);
  void SendChain(uint64_t move, const absl::Status& status);
  // Ends the threads and waits for them; bounded time. Afterwards no landing is
  // touched.
  void Stop(StopMode mode, const absl::Status& why);

  PeerProgress Progress() const;

  // ---- For InStream ----

  const HopOptions& options() const { return options_; }
  StopMode stop_mode() const {
    return stop_mode_.load(std::memory_order_acquire);
  }
  absl::Status stop_why() const;
  // What waits to be sent back; only one stream at a time asks.
  bool has_messages() const {
    return has_messages_.load(std::memory_order_acquire);
  }
  std::string TakeMessages();
  // The landing of a frame; null when it belongs to a move that is over.
  // DATA_LOSS if it fits nowhere.
  absl::StatusOr<std::shared_ptr<Landing>> Find(uint64_t move,
                                                const FrameHeader& frame);
  void Completed(uint64_t move);
  // OK: ask for it again.
  absl::Status Damaged(const FrameHeader& frame);
  void Received(int64_t bytes, int64_t frames);
  void ReceivesOver(bool channel) { observer_->OnReceivesOver(channel); }
  absl::Status OnMessage(const Header& header, absl::string_view payload);
  void PeerLeft();
  void Fail(const absl::Status& status);
  // The stream's thread touches no landing any more.
  void StreamEnded();
  // `moves`: in the middle of a frame, which on a slow link is progress too.
  void Heard(int64_t now, bool moves);

 private:
  void Send(std::string message);
  // Tells of the failure when the last stream has ended: until then frames may
  // still become ready.
  void MaybeReportFailure();

  const HopOptions options_;
  Observer* const observer_;

  absl::Mutex stop_mutex_;  // one Stop at a time

  mutable absl::Mutex mutex_;
  std::vector<std::unique_ptr<InStream>> streams_
      ABSL_GUARDED_BY(mutex_);  // by number; null: not there yet
  uint64_t move_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<uint64_t, std::shared_ptr<Landing>> landings_
      ABSL_GUARDED_BY(mutex_);
  size_t incomplete_ ABSL_GUARDED_BY(mutex_) = 0;  // landings
  std::map<std::pair<uint64_t, uint32_t>, int> damaged_ ABSL_GUARDED_BY(mutex_);
  int64_t repaired_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string messages_ ABSL_GUARDED_BY(mutex_);
  size_t gave_up_streams_ ABSL_GUARDED_BY(mutex_) = 0;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  bool failure_told_ ABSL_GUARDED_BY(mutex_) = false;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;  // streams
  absl::Status stop_why_ ABSL_GUARDED_BY(mutex_);
  RateMeter rate_ ABSL_GUARDED_BY(mutex_);

  std::atomic<bool> has_messages_{false};
  std::atomic<StopMode> stop_mode_{StopMode::kRun};
  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> frames_{0};
  std::atomic<int64_t> heard_nanos_{0};
};

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_INBOUND_H_
