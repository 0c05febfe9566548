#include "transport/tcp/tcp_group.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "transport/error.h"
#include "transport/tcp/connector.h"

namespace weightsync {
namespace transport {
namespace tcp {

TcpGroup::TcpGroup(Endpoint* endpoint, GroupSpec spec, GroupOptions options)
    : endpoint_(endpoint),
      spec_(std::move(spec)),
      options_(std::move(options)) {
  if (spec_.self > 0)
    inbound_ = std::make_unique<Inbound>(Hop(spec_.self - 1),
                                         static_cast<Inbound::Observer*>(this));
  if (spec_.self + 1 < static_cast<int>(spec_.members.size())) {
    outbound_ = std::make_unique<Outbound>(
        Hop(spec_.self), static_cast<Outbound::Observer*>(this));
  }
}

TcpGroup::~TcpGroup() {
  bool at_rest;
  {
    absl::MutexLock lock(&mutex_);
    at_rest =
        joined_ && (move_.number == 0 || (MoveEnded() && MoveResult().ok()));
  }
  Stop(at_rest ? StopMode::kLeave : StopMode::kAbort,
       MakeError(absl::StatusCode::kCancelled, "GROUP_CLOSED",
                 "the group was closed before its move ended"));
}

HopOptions TcpGroup::Hop(int from) const {
  HopOptions hop;
  hop.cluster_id = spec_.cluster_id;
  hop.from = spec_.members[from].node;
  hop.to = spec_.members[from + 1].node;
  hop.heartbeat =
      std::min(endpoint_->options().heartbeat, options_.peer_deadline / 4);
  hop.peer_deadline = options_.peer_deadline;
  hop.faults = endpoint_->options().faults;
  hop.payload = endpoint_->options().payload;
  hop.payload_optional = endpoint_->options().payload_optional;
  return hop;
}

absl::Status TcpGroup::Join(absl::Duration timeout) {
  const int64_t deadline = NowNanos() + absl::ToInt64Nanoseconds(timeout);
  {
    absl::MutexLock lock(&mutex_);
    if (!abort_why_.ok()) return abort_why_;
    if (joining_)
      return absl::FailedPreconditionError("Join was called before");
    joining_ = true;
  }
  if (has_inbound()) {
    if (absl::Status status = endpoint_->Register(spec_, this); !status.ok())
      return status;
    // Abort may have come in between, and unregistered too early.
    if (aborted_.load()) endpoint_->Unregister(spec_);
  }
  if (has_outbound()) {
    if (absl::Status status = ConnectSuccessor(deadline); !status.ok()) {
      absl::MutexLock lock(&mutex_);
      return abort_why_.ok() ? status : abort_why_;
    }
  }
  absl::MutexLock lock(&mutex_);
  auto settled = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !has_inbound() || all_streams_ || !abort_why_.ok() ||
           !receive_status_.ok() || !send_status_.ok();
  };
  mutex_.AwaitWithTimeout(absl::Condition(&settled),
                          absl::Nanoseconds(deadline - NowNanos()));
  if (!abort_why_.ok()) return abort_why_;
  if (!receive_status_.ok()) return receive_status_;
  if (!send_status_.ok()) return send_status_;
  if (has_inbound() && !all_streams_) {
    const HopOptions hop = Hop(spec_.self - 1);
    return EdgeError(absl::StatusCode::kDeadlineExceeded, "JOIN_TIMEOUT",
                     hop.from, hop.to,
                     absl::StrCat(hop.from, " did not join in time"));
  }
  joined_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::string> TcpGroup::PayloadDevice(absl::Duration timeout) {
  const std::string& device = endpoint_->options().payload_device;
  if (endpoint_->options().payload == nullptr || device.empty())
    return std::string();
  absl::MutexLock lock(&mutex_);
  auto known = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return WayKnown() || !abort_why_.ok() || !receive_status_.ok() ||
           !send_status_.ok();
  };
  mutex_.AwaitWithTimeout(absl::Condition(&known), timeout);
  if (!abort_why_.ok()) return abort_why_;
  if (!receive_status_.ok()) return receive_status_;
  if (!send_status_.ok()) return send_status_;
  if (!WayKnown()) {
    const HopOptions hop = Hop(
        has_inbound() && !receives_over_channel_.has_value() ? spec_.self - 1
                                                             : spec_.self);
    return EdgeError(absl::StatusCode::kDeadlineExceeded, "JOIN_TIMEOUT",
                     hop.from, hop.to,
                     "the ends did not agree in time on the way that bytes go");
  }
  return AllOverChannel() ? device : std::string();
}

absl::Status TcpGroup::ConnectSuccessor(int64_t deadline_nanos) {
  Hello hello;
  hello.cluster_id = spec_.cluster_id;
  hello.group_id = spec_.group_id;
  hello.epoch = spec_.epoch;
  hello.secret = spec_.secret;
  hello.from = spec_.members[spec_.self].node;
  hello.to = spec_.members[spec_.self + 1].node;
  hello.stream_count = static_cast<uint32_t>(
      endpoint_->options().payload != nullptr
          ? 1
          : std::max(1, std::min(endpoint_->options().streams, 16)));
  std::vector<Fd> streams;
  for (hello.stream = 0; hello.stream < hello.stream_count; ++hello.stream) {
    absl::StatusOr<Fd> fd =
        ConnectStream(spec_.members[spec_.self + 1].address, hello,
                      Hop(spec_.self), deadline_nanos, aborted_, &join_wake_);
    if (!fd.ok()) return fd.status();
    streams.push_back(*std::move(fd));
  }
  outbound_->Start(std::move(streams));
  return absl::OkStatus();
}

absl::Status TcpGroup::Move(std::vector<std::shared_ptr<Landing>> landings) {
  std::set<uint64_t> ids;
  for (const auto& landing : landings) {
    if (!ids.insert(landing->bucket_id()).second) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "BUCKET_TWICE",
          absl::StrCat("bucket ", landing->bucket_id(), " is given twice"));
    }
  }
  uint64_t number;
  {
    absl::MutexLock lock(&mutex_);
    if (!abort_why_.ok()) return abort_why_;
    if (!joined_) return absl::FailedPreconditionError("Move before Join");
    if (move_.number != 0 && !(MoveEnded() && MoveResult().ok())) {
      return absl::FailedPreconditionError(
          "Move before the last move has ended well");
    }
    for (const auto& landing : landings) {
      if (!landing->on_device() ||
          (AllOverChannel() && !endpoint_->options().payload_device.empty())) {
        continue;
      }
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "DEVICE_LANDING",
          absl::StrCat("bucket ", landing->bucket_id(),
                       " lies in memory of a GPU, which group ", spec_.group_id,
                       " does not reach: land it in host memory"));
    }
  }
  ReleaseLandings();
  if (has_inbound()) {
    for (const auto& landing : landings) {
      if (landing->AcquireReceiver(this)) continue;
      for (const auto& taken : landings) taken->ReleaseReceiver(this);
      return MakeError(absl::StatusCode::kFailedPrecondition, "LANDING_BUSY",
                       absl::StrCat("another group receives into bucket ",
                                    landing->bucket_id()));
    }
  }
  {
    absl::MutexLock lock(&mutex_);
    number = move_.number + 1;
    move_ = MoveState();
    move_.number = number;
    move_.landings = landings;
    progress_nanos_ = NowNanos();
  }
  // Out first: what is here already goes on at once.
  if (has_outbound()) outbound_->StartMove(number, landings);
  if (has_inbound()) inbound_->StartMove(number, std::move(landings));
  // The edge may have failed before there was a move to tell of.
  TellChain();
  return absl::OkStatus();
}

bool TcpGroup::MoveEnded() const {
  const bool received = !has_inbound() || move_.filled || !receive_status_.ok();
  const bool sent = !has_outbound() ||
                    (move_.peer_complete && move_.chain_known) ||
                    move_.gave_up || !send_status_.ok();
  if (!received || !sent) return false;
  // Whoever moves again at once must not be faster than the predecessor's word
  // of this move.
  return !has_inbound() || move_.chain_sent || !MoveResult().ok();
}

absl::Status TcpGroup::MoveResult() const {
  // A member that holds everything has no quarrel with its predecessor any
  // more.
  if (!receive_status_.ok() && !move_.filled) return receive_status_;
  if (move_.peer_complete && move_.chain_known) return move_.chain;
  if (!receive_status_.ok())
    return send_status_.ok() ? receive_status_ : send_status_;
  return send_status_;
}

absl::Status TcpGroup::Wait(absl::Duration no_progress) {
  absl::MutexLock lock(&mutex_);
  progress_nanos_ = NowNanos();
  while (true) {
    if (!abort_why_.ok()) return abort_why_;
    if (move_.number == 0)
      return absl::FailedPreconditionError("Wait before Move");
    if (MoveEnded()) return MoveResult();
    const absl::Duration idle = absl::Nanoseconds(
        NowNanos() - progress_nanos_.load(std::memory_order_relaxed));
    if (idle >= no_progress) {
      return MakeError(
          absl::StatusCode::kDeadlineExceeded, "NO_PROGRESS",
          absl::StrCat("group ", spec_.group_id, " moved nothing for ",
                       absl::FormatDuration(idle)));
    }
    auto ended = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return !abort_why_.ok() || MoveEnded();
    };
    mutex_.AwaitWithTimeout(absl::Condition(&ended), no_progress - idle);
  }
}

void TcpGroup::Abort(const absl::Status& why) {
  Stop(StopMode::kAbort,
       why.ok() ? MakeError(absl::StatusCode::kCancelled, "GROUP_CLOSED",
                            "the group was aborted")
                : why);
}

void TcpGroup::Stop(StopMode mode, const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    if (abort_why_.ok()) abort_why_ = why;
  }
  aborted_ = true;
  join_wake_.Wake();
  if (has_inbound()) endpoint_->Unregister(spec_);
  // Leaving waits a moment for the successor, then for the predecessor.
  if (has_outbound()) outbound_->Stop(mode, why);
  if (has_inbound()) inbound_->Stop(mode, why);
  ReleaseLandings();
}

void TcpGroup::ReleaseLandings() {
  std::vector<std::shared_ptr<Landing>> landings;
  {
    absl::MutexLock lock(&mutex_);
    landings = move_.landings;
  }
  for (const auto& landing : landings) landing->ReleaseReceiver(this);
}

GroupProgress TcpGroup::Progress() const {
  GroupProgress progress;
  std::vector<std::shared_ptr<Landing>> landings;
  {
    absl::MutexLock lock(&mutex_);
    landings = move_.landings;
  }
  for (const auto& landing : landings) {
    const int64_t frames = landing->frame_count();
    const int64_t ready = landing->ready_frames();
    ++progress.bucket_count;
    progress.frame_count += frames;
    progress.ready_frames += ready;
    progress.bytes += landing->size();
    // The last frame may be short: right when complete, and never too much.
    progress.ready_bytes +=
        ready == frames
            ? landing->size()
            : std::min(ready * Landing::kFrameBytes, landing->size());
  }
  progress.since_progress = absl::Nanoseconds(
      NowNanos() - progress_nanos_.load(std::memory_order_relaxed));
  if (has_inbound()) progress.peers.push_back(inbound_->Progress());
  if (has_outbound()) progress.peers.push_back(outbound_->Progress());
  return progress;
}

void TcpGroup::Progressed() {
  progress_nanos_.store(NowNanos(), std::memory_order_relaxed);
}

absl::Status TcpGroup::Check(const Hello& hello) {
  return inbound_->Check(hello.stream, hello.stream_count);
}

void TcpGroup::Take(Fd fd, const Hello& hello) {
  inbound_->AddStream(std::move(fd), hello.stream, hello.stream_count);
}

void TcpGroup::OnAllStreams() {
  absl::MutexLock lock(&mutex_);
  all_streams_ = true;
}

void TcpGroup::OnFilled(uint64_t move) {
  {
    absl::MutexLock lock(&mutex_);
    if (move != move_.number) return;
    move_.filled = true;
  }
  Progressed();
  TellChain();
}

void TcpGroup::OnInboundFailed(const absl::Status& status, bool own_edge) {
  bool lacking;
  {
    absl::MutexLock lock(&mutex_);
    if (!receive_status_.ok()) return;
    receive_status_ = status;
    lacking = !move_.filled;
  }
  LOG(WARNING) << "group " << spec_.group_id << ": " << status.message();
  if (has_outbound() && lacking) outbound_->GiveUp(status);
  if (own_edge && options_.on_edge_failed) options_.on_edge_failed(status);
}

void TcpGroup::OnReceivesOver(bool channel) {
  absl::MutexLock lock(&mutex_);
  if (!receives_over_channel_.has_value()) receives_over_channel_ = channel;
}

void TcpGroup::OnSendsOver(bool channel) {
  absl::MutexLock lock(&mutex_);
  if (!sends_over_channel_.has_value()) sends_over_channel_ = channel;
}

void TcpGroup::OnPeerComplete(uint64_t move) {
  absl::MutexLock lock(&mutex_);
  if (move == move_.number) move_.peer_complete = true;
}

void TcpGroup::OnPeerChain(uint64_t move, const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (move != move_.number) return;
    move_.chain_known = true;
    move_.chain = status;
  }
  TellChain();
}

void TcpGroup::OnGaveUp(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  move_.gave_up = true;
  // At the source nothing else says what became of its landings.
  if (send_status_.ok()) send_status_ = why;
}

void TcpGroup::OnOutboundFailed(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (send_status_.ok()) send_status_ = status;
  }
  LOG(WARNING) << "group " << spec_.group_id << ": " << status.message();
  TellChain();
  if (options_.on_edge_failed) options_.on_edge_failed(status);
}

void TcpGroup::TellChain() {
  if (!has_inbound()) return;
  absl::Status chain;
  uint64_t number;
  {
    absl::MutexLock lock(&mutex_);
    if (move_.number == 0 || move_.told_chain) return;
    if (!has_outbound()) {
      if (!move_.filled) return;
    } else if (move_.chain_known) {
      chain = move_.chain;
      if (chain.ok() && !move_.filled) return;
    } else if (!send_status_.ok()) {
      chain = send_status_;
    } else {
      return;
    }
    move_.told_chain = true;
    number = move_.number;
  }
  inbound_->SendChain(number, chain);
  absl::MutexLock lock(&mutex_);
  if (move_.number == number) move_.chain_sent = true;
}

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
