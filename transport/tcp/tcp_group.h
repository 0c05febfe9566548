#ifndef WEIGHTSYNC_TRANSPORT_TCP_TCP_GROUP_H_
#define WEIGHTSYNC_TRANSPORT_TCP_TCP_GROUP_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "transport/group.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/inbound.h"
#include "transport/tcp/outbound.h"

namespace weightsync {
namespace transport {
namespace tcp {

// One member of a cut-through chain: an Inbound from the predecessor, an
// Outbound to the successor, and between them the landings. What comes in is
// marked ready, and what is ready goes out; the group only keeps count of how
// the two ends fare, and tells each of the other's failure.
class TcpGroup final : public Group,
                       private StreamAcceptor,
                       private Inbound::Observer,
                       private Outbound::Observer {
 public:
  // `endpoint` outlives the group. The spec was checked.
  TcpGroup(Endpoint* endpoint, GroupSpec spec, GroupOptions options);
  ~TcpGroup() override;

  absl::Status Join(absl::Duration timeout) override;
  absl::StatusOr<std::string> PayloadDevice(absl::Duration timeout) override;
  absl::Status Move(std::vector<std::shared_ptr<Landing>> landings) override;
  absl::Status Wait(absl::Duration no_progress) override;
  void Abort(const absl::Status& why) override;
  GroupProgress Progress() const override;

 private:
  // How far the current move is.
  struct MoveState {
    uint64_t number = 0;  // 0: none yet
    std::vector<std::shared_ptr<Landing>> landings;
    bool filled = false;  // everything is here (at the source: it is not asked)
    bool peer_complete = false;  // the successor has everything
    bool chain_known = false;    // and has told how it went after it
    bool gave_up = false;        // the successor was told that no more comes
    absl::Status chain;
    bool told_chain = false;  // the predecessor is being told
    bool chain_sent = false;  // and nothing of the next move goes before it
  };

  HopOptions Hop(int from) const;
  bool has_inbound() const { return inbound_ != nullptr; }
  bool has_outbound() const { return outbound_ != nullptr; }
  absl::Status ConnectSuccessor(int64_t deadline_nanos);

  bool WayKnown() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return (!has_inbound() || receives_over_channel_.has_value()) &&
           (!has_outbound() || sends_over_channel_.has_value());
  }
  bool AllOverChannel() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return WayKnown() && receives_over_channel_.value_or(true) &&
           sends_over_channel_.value_or(true);
  }
  bool MoveEnded() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::Status MoveResult() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void Progressed();
  // Tells the predecessor how the members after this one fared, once that is
  // known.
  void TellChain();
  void Stop(StopMode mode, const absl::Status& why);
  void ReleaseLandings();

  // StreamAcceptor, on the endpoint's thread.
  absl::Status Check(const Hello& hello) override;
  void Take(Fd fd, const Hello& hello) override;
  // Inbound::Observer.
  void OnAllStreams() override;
  void OnReceivedSome() override { Progressed(); }
  void OnFilled(uint64_t move) override;
  void OnInboundFailed(const absl::Status& status, bool own_edge) override;
  void OnReceivesOver(bool channel) override;
  // Outbound::Observer.
  void OnSentSome() override { Progressed(); }
  void OnPeerComplete(uint64_t move) override;
  void OnPeerChain(uint64_t move, const absl::Status& status) override;
  void OnGaveUp(const absl::Status& why) override;
  void OnOutboundFailed(const absl::Status& status) override;
  void OnSendsOver(bool channel) override;

  // Constant after construction.
  Endpoint* const endpoint_;
  const GroupSpec spec_;
  const GroupOptions options_;

  WakeFd join_wake_;
  std::atomic<bool> aborted_{false};
  std::atomic<int64_t> progress_nanos_{0};

  mutable absl::Mutex mutex_;
  bool joining_ ABSL_GUARDED_BY(mutex_) = false;
  bool joined_ ABSL_GUARDED_BY(mutex_) = false;
  bool all_streams_ ABSL_GUARDED_BY(mutex_) = false;
  // Whether frames come and go over the payload channel, once that is known.
  absl::optional<bool> receives_over_channel_ ABSL_GUARDED_BY(mutex_);
  absl::optional<bool> sends_over_channel_ ABSL_GUARDED_BY(mutex_);
  absl::Status abort_why_ ABSL_GUARDED_BY(mutex_);
  absl::Status receive_status_ ABSL_GUARDED_BY(mutex_);
  absl::Status send_status_ ABSL_GUARDED_BY(mutex_);
  MoveState move_ ABSL_GUARDED_BY(mutex_);

  // Last, so that their threads end first. Null where there is no such
  // neighbour.
  std::unique_ptr<Inbound> inbound_;
  std::unique_ptr<Outbound> outbound_;
};

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_TCP_GROUP_H_
