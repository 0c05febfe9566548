#ifndef WEIGHTSYNC_TRANSPORT_TCP_ENDPOINT_H_
#define WEIGHTSYNC_TRANSPORT_TCP_ENDPOINT_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "transport/fault/fault_policy.h"
#include "transport/group.h"
#include "transport/tcp/payload_channel.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/wire.h"

namespace weightsync {
namespace transport {
namespace tcp {

struct EndpointOptions {
  // Empty while the daemon has not met its coordinator: then it becomes that of
  // the first group that is made here, and peers wait until there is one.
  std::string cluster_id;
  std::string bind_host = "127.0.0.1";
  // What others are told instead of bind_host; needed when that is a wildcard.
  std::string advertise_host;
  // The first free port of this range is taken and held until the end; 0: the
  // kernel chooses.
  int first_port = 0;
  int last_port = 0;
  int streams = 2;  // per edge, towards the successor
  absl::Duration heartbeat = absl::Seconds(1);
  // A stranger who says nothing is sent away after this.
  absl::Duration handshake_deadline = absl::Seconds(5);
  // A peer may come this long before its group is made here; it asks again
  // after that.
  absl::Duration early_peer_wait = absl::Seconds(10);
  int max_pending = 256;          // connections without a group
  FaultPolicy* faults = nullptr;  // not owned; for tests and chaos runs
  // Another way for the bytes of frames. Both ends of an edge have it or
  // neither; each edge then has one connection.
  PayloadChannelFactory payload;
  // Where one end has it not, or cannot be met that way, the bytes go over the
  // connection, and the log says why.
  bool payload_optional = false;
  // The GPU in whose memory `payload` takes and leaves bytes, by addresses that
  // are names. Empty: host memory alone.
  std::string payload_device;
};

// Takes the connections of one group's predecessor.
class StreamAcceptor {
 public:
  virtual ~StreamAcceptor() = default;
  virtual absl::Status Check(const Hello& hello) = 0;
  // After Check was OK and the peer was welcomed.
  virtual void Take(Fd fd, const Hello& hello) = 0;
};

// The one data listener of a daemon. It reads handshakes on a thread of its own
// and hands each connection to the group that it names; what is not a peer of
// this cluster, or comes with an older epoch or the wrong secret, is refused
// with a reason, or closed if it does not speak the protocol at all.
// Thread-safe.
class Endpoint final : public GroupFactory {
 public:
  // RESOURCE_EXHAUSTED (NO_PORT), INVALID_ARGUMENT (BAD_ADDRESS), UNAVAILABLE.
  static absl::StatusOr<std::unique_ptr<Endpoint>> Create(
      EndpointOptions options);
  ~Endpoint() override;

  std::string address() const override { return address_; }
  absl::StatusOr<std::unique_ptr<Group>> NewGroup(
      GroupSpec spec, GroupOptions options) override;

  // Peers with a lower term are refused from now on.
  void RaiseTerm(uint64_t term);
  // Of a cluster that is known by now, or was adopted by another's coordinator:
  // groups and peers of others are refused. Empty: the first group says it.
  void SetClusterId(const std::string& cluster_id);

  // ---- For groups ----

  const EndpointOptions& options() const { return options_; }
  // REQUIRES: the spec is not registered. FAILED_PRECONDITION (STALE_EPOCH)
  // when a newer epoch of the group was here.
  absl::Status Register(const GroupSpec& spec, StreamAcceptor* acceptor);
  // Afterwards the acceptor is not called again.
  void Unregister(const GroupSpec& spec);

 private:
  using Key = std::pair<std::string, Epoch>;
  struct Registration {
    std::string secret, from, to;
    StreamAcceptor* acceptor;
  };
  struct Pending {
    Fd fd;
    std::string bytes;
    size_t wanted = kEnvelopeHeaderBytes;
    int64_t deadline = 0;
    bool parked = false;  // hello is whole, and its group is not here yet
    Hello hello;
  };

  Endpoint(EndpointOptions options, Fd listener, int port);

  void Run();
  void Accept();
  // True when the connection is done with: handed over, refused or closed.
  bool Step(Pending* pending, bool readable, int64_t now);
  bool ReadHello(Pending* pending, bool* whole);
  bool Match(Pending* pending, int64_t now);
  void Refuse(Pending* pending, const absl::Status& why);
  absl::Status CheckEpoch(const Hello& hello)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RememberEpoch(const std::string& group_id, const Epoch& epoch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const EndpointOptions options_;
  const std::string address_;
  Fd listener_;
  WakeFd wake_;

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::string cluster_id_ ABSL_GUARDED_BY(mutex_);
  uint64_t term_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<Key, Registration> groups_ ABSL_GUARDED_BY(mutex_);
  // The newest epoch of groups that were here, the oldest forgotten first.
  std::map<std::string, Epoch> newest_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> newest_order_ ABSL_GUARDED_BY(mutex_);

  // Only the thread touches these.
  std::vector<std::unique_ptr<Pending>> pending_;
  int64_t accept_again_ = 0;

  std::thread thread_;
};

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_ENDPOINT_H_
