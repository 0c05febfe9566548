// The node's stream to its coordinator: dials, says Hello, keeps it alive, and
// dials again with a back-off when it breaks. It goes over the network, or
// inside the process when the coordinator is embedded: one way for both.
//
//   down -> Hello -> Welcome: Handler::OnWelcome announces what the node holds
//   -> up
//
// While it is down nothing is kept for later: who holds something announces it
// when it comes up.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_NODE_LINK_H_
#define WEIGHTSYNC_DAEMON_SERVICE_NODE_LINK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "daemon/options.h"
#include "daemon/service/loop.h"
#include "daemon/service/stream.h"
#include "grpcpp/channel.h"
#include "weightsync/v1/node.grpc.pb.h"
#include "weightsync/v1/node.pb.h"

namespace weightsync {
namespace daemon {

// All methods and callbacks run on one loop, unless said otherwise.
class NodeLink {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual v1::Hello MakeHello() = 0;
    virtual v1::NodeHeartbeat MakeHeartbeat() = 0;
    // Report what the node holds; HelloDone follows by itself. After an error
    // nothing was reported: the stream ends, and another attempt is made later.
    virtual absl::Status OnWelcome(const v1::Welcome& welcome) = 0;
    virtual void OnCommand(v1::NodeCommand command) = 0;
    // It was up and is not any more.
    virtual void OnLost(const absl::Status& why) = 0;
  };
  // With the coordinator's answer: its failure as a status, and all of it.
  using Answered =
      std::function<void(const absl::Status& status, const v1::Reply& reply)>;

  struct Options {
    // For sentences.
    std::string coordinator;
    absl::Duration heartbeat_interval = absl::Seconds(1);
    absl::Duration heartbeat_timeout = absl::Seconds(5);
    absl::Duration first_backoff = absl::Milliseconds(100);
    absl::Duration max_backoff = absl::Seconds(3);
    FaultPoint fault_point;
  };

  // `loop` and `handler` outlive the link.
  NodeLink(Options options, Loop* loop, Handler* handler);
  // REQUIRES: stopped, if it was started.
  ~NodeLink() = default;
  NodeLink(const NodeLink&) = delete;
  NodeLink& operator=(const NodeLink&) = delete;

  // From any thread, once. `channel`: to the coordinator.
  void Start(std::shared_ptr<grpc::Channel> channel);
  // From any thread but the loop's, after Start. Returns when no callback comes
  // any more.
  void Stop();

  // Whether the coordinator has welcomed us and knows what we hold.
  bool up() const { return up_; }
  // When the coordinator last said something; until it has: when this was made.
  absl::Time heard() const { return heard_; }
  // What calls are told while it is down: UNAVAILABLE
  // (COORDINATOR_UNREACHABLE), with the reason that the last attempt gave.
  absl::Status DownStatus() const;

  // Dropped while the link is down. In OnWelcome it is taken.
  void Report(v1::NodeReport report);

  // Reports, and calls `answered` once. With DownStatus() when the link is
  // down, or breaks before the answer: nobody knows then whether the
  // coordinator heard it.
  void Ask(v1::NodeReport report, Answered answered);

 private:
  using Stream = ClientStream<v1::NodeReport, v1::NodeCommand>;

  void Dial();
  void OnMessage(uint64_t attempt, v1::NodeCommand command);
  void OnClosed(uint64_t attempt, const absl::Status& status);
  void Heartbeat(uint64_t attempt);

  const Options options_;
  Loop* const loop_;
  Handler* const handler_;

  std::unique_ptr<v1::NodeService::Stub> stub_;
  std::shared_ptr<Stream> stream_;
  // Counts dials: what comes from an older one is not for us any more.
  uint64_t attempt_ = 0;
  bool welcomed_ = false;
  bool up_ = false;
  bool stopping_ = false;
  absl::Notification stopped_;
  absl::Time heard_;
  // The same for the lease of this stream: its dialling counts too, and time in
  // which this process stood still does not.
  absl::Time last_heard_;
  absl::Time last_beat_;
  absl::Duration heartbeat_interval_;
  absl::Duration heartbeat_timeout_;
  absl::Duration backoff_;
  absl::Status last_error_;
  std::map<int64_t, Answered> asked_;
  int64_t next_correlation_ = 1;
  absl::BitGen random_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_NODE_LINK_H_
