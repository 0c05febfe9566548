#include "daemon/service/node_link.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/service/fault_point.h"
#include "daemon/service/proto_time.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
NodeLink::NodeLink(Options options, Loop* loop, Handler* handler)
    : options_(std::move(options)),
      loop_(loop),
      handler_(handler),
      heard_(absl::Now()),
      heartbeat_interval_(options_.heartbeat_interval),
      heartbeat_timeout_(options_.heartbeat_timeout),
      backoff_(options_.first_backoff),
      last_error_(absl::UnavailableError("it was not tried yet")) {}

void NodeLink::Start(std::shared_ptr<grpc::Channel> channel) {
  loop_->Post([this, channel = std::move(channel)] {
    stub_ = v1::NodeService::NewStub(channel);
    Dial();
  });
}

void NodeLink::Stop() {
  loop_->Post([this] {
    stopping_ = true;
    if (stream_ != nullptr) {
      stream_->Cancel();
    } else if (!stopped_.HasBeenNotified()) {
      stopped_.Notify();
    }
  });
  stopped_.WaitForNotification();
}

absl::Status NodeLink::DownStatus() const {
  return ErrorStatus(
      absl::StatusCode::kUnavailable, "COORDINATOR_UNREACHABLE",
      absl::StrCat("the coordinator (", options_.coordinator,
                   ") cannot be reached now: ", last_error_.message(),
                   "; try again with a back-off"));
}

void NodeLink::Report(v1::NodeReport report) {
  ReachFaultPoint(options_.fault_point, "node:report:", report);
  if (welcomed_) stream_->Write(std::move(report));
}

void NodeLink::Ask(v1::NodeReport report, Answered answered) {
  if (!welcomed_) {
    answered(DownStatus(), v1::Reply());
    return;
  }
  ReachFaultPoint(options_.fault_point, "node:report:", report);
  const int64_t id = next_correlation_++;
  report.set_correlation_id(id);
  asked_.emplace(id, std::move(answered));
  stream_->Write(std::move(report));
}

void NodeLink::Dial() {
  if (stopping_ || stream_ != nullptr) return;
  const uint64_t attempt = ++attempt_;
  last_heard_ = last_beat_ = absl::Now();
  stream_ = Stream::Open(
      [this](grpc::ClientContext* context, auto* reactor) {
        stub_->async()->Connect(context, reactor);
      },
      [this, attempt](v1::NodeCommand command) {
        loop_->Post([this, attempt, command = std::move(command)]() mutable {
          OnMessage(attempt, std::move(command));
        });
      },
      [this, attempt](const absl::Status& status) {
        loop_->Post([this, attempt, status] { OnClosed(attempt, status); });
      });
  v1::NodeReport report;
  *report.mutable_hello() = handler_->MakeHello();
  stream_->Write(std::move(report));
  Heartbeat(attempt);
}

void NodeLink::OnMessage(uint64_t attempt, v1::NodeCommand command) {
  if (attempt != attempt_ || stream_ == nullptr) return;
  last_heard_ = absl::Now();
  // A welcome that cannot be followed is no news of a coordinator that this
  // node follows.
  if (welcomed_) heard_ = last_heard_;
  ReachFaultPoint(options_.fault_point, "node:command:", command);
  switch (command.command_case()) {
    case v1::NodeCommand::kWelcome: {
      if (welcomed_) return;
      const v1::Welcome& welcome = command.welcome();
      if (welcome.has_heartbeat_interval()) {
        heartbeat_interval_ =
            std::max(absl::Milliseconds(10),
                     DecodeDuration(welcome.heartbeat_interval()));
      }
      if (welcome.has_heartbeat_timeout()) {
        heartbeat_timeout_ =
            std::max(2 * heartbeat_interval_,
                     DecodeDuration(welcome.heartbeat_timeout()));
      }
      welcomed_ = true;
      const absl::Status status = handler_->OnWelcome(welcome);
      if (!status.ok()) {
        LOG(ERROR) << "cannot follow the coordinator now: " << status;
        stream_->Cancel();
        return;
      }
      backoff_ = options_.first_backoff;
      heard_ = absl::Now();
      v1::NodeReport done;
      done.mutable_hello_done();
      Report(std::move(done));
      up_ = true;
      return;
    }
    case v1::NodeCommand::kReply: {
      auto asked = asked_.find(command.reply().correlation_id());
      if (asked == asked_.end()) return;
      Answered answered = std::move(asked->second);
      asked_.erase(asked);
      answered(FromFailure(command.reply().failure()), command.reply());
      return;
    }
    case v1::NodeCommand::kHeartbeat:
      return;
    default:
      handler_->OnCommand(std::move(command));
  }
}

void NodeLink::OnClosed(uint64_t attempt, const absl::Status& status) {
  if (attempt != attempt_ || stream_ == nullptr) return;
  stream_ = nullptr;
  const bool was_up = up_;
  up_ = false;
  welcomed_ = false;
  last_error_ =
      status.ok() ? absl::UnavailableError("it ended the stream") : status;
  if (!stopping_) {
    LOG_IF(WARNING, was_up) << "lost the coordinator (" << options_.coordinator
                            << "): " << last_error_;
    // Said once for each reason would be better than every few seconds; these
    // need somebody.
    LOG_IF(ERROR, !was_up && !absl::IsUnavailable(status) &&
                      !absl::IsCancelled(status))
        << "the coordinator (" << options_.coordinator
        << ") refuses this node: " << last_error_;
  }
  std::map<int64_t, Answered> asked;
  asked.swap(asked_);
  const absl::Status down = DownStatus();
  for (auto& entry : asked) entry.second(down, v1::Reply());
  if (was_up) handler_->OnLost(last_error_);
  if (stopping_) {
    if (!stopped_.HasBeenNotified()) stopped_.Notify();
    return;
  }
  // Jitter, so that the nodes of a restarted coordinator do not come at once.
  loop_->PostAfter(backoff_ * absl::Uniform(random_, 0.5, 1.0),
                   [this] { Dial(); });
  backoff_ = std::min(backoff_ * 2, options_.max_backoff);
}

void NodeLink::Heartbeat(uint64_t attempt) {
  if (attempt != attempt_ || stream_ == nullptr) return;
  const absl::Time now = absl::Now();
  // When this process itself stood still, the peer's words may still lie in the
  // socket.
  const bool stood_still = now - last_beat_ > heartbeat_timeout_ / 2;
  last_beat_ = now;
  if (stood_still) last_heard_ = now;
  if (now - last_heard_ > heartbeat_timeout_) {
    LOG(WARNING) << "the coordinator (" << options_.coordinator
                 << ") has been silent for "
                 << absl::FormatDuration(now - last_heard_)
                 << "; dialing again";
    stream_->Cancel();
    return;
  }
  if (up_) {
    v1::NodeReport report;
    *report.mutable_heartbeat() = handler_->MakeHeartbeat();
    Report(std::move(report));
  }
  loop_->PostAfter(heartbeat_interval_,
                   [this, attempt] { Heartbeat(attempt); });
}

}  // namespace daemon
}  // namespace weightsync
