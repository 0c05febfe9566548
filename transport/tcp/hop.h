#ifndef WEIGHTSYNC_TRANSPORT_TCP_HOP_H_
#define WEIGHTSYNC_TRANSPORT_TCP_HOP_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "transport/fault/fault_policy.h"
#include "transport/tcp/payload_channel.h"

namespace weightsync {
namespace transport {
namespace tcp {

// What both ends of one edge of the chain share.
struct HopOptions {
  std::string cluster_id;
  std::string from;  // node names, in the direction of the payload
  std::string to;
  absl::Duration heartbeat = absl::Seconds(1);
  absl::Duration peer_deadline = absl::Seconds(10);
  int max_damaged =
      3;  // arrivals of one frame damaged: then the edge is given up
  FaultPolicy* faults = nullptr;  // not owned; may be null
  PayloadChannelFactory payload;  // null: over the connection
  bool payload_optional = false;  // as in EndpointOptions
};

// How the threads of a hop are to end.
enum class StopMode {
  kRun,
  kLeave,  // say BYE, wait a moment for the peer to see it
  kAbort,  // say FAIL if that is possible at once
};

// `node` as payload channels know it.
std::string PayloadPeer(const HopOptions& options, const std::string& node);

// Gives what went wrong on a connection the edge's name and a reason, if it has
// none yet.
absl::Status BlameEdge(const HopOptions& options, const absl::Status& status);

// What a FAIL message from the peer means on this side of the edge.
absl::Status PeerFailure(const HopOptions& options, const std::string& peer,
                         const absl::Status& told);

// The error for a peer that was silent too long.
absl::Status PeerSilent(const HopOptions& options, const std::string& peer,
                        int64_t silent_nanos);

// What a payload channel said, as an error of the edge.
absl::Status ChannelFailure(const HopOptions& options,
                            const absl::Status& status);

// Whether the peer has closed its end, or is gone.
bool HungUp(int fd);

// Sends `bytes` if the socket takes them now; for last words.
void SendNow(int fd, const std::string& bytes);

// Closes this direction and reads on until the peer has closed too, at most
// `limit`, so that what was sent last is not lost in a reset.
void CloseGently(int fd, absl::Duration limit);

// Bytes per second over the last second or so. Not thread-safe.
class RateMeter {
 public:
  void Update(int64_t now_nanos, int64_t total_bytes);
  double bytes_per_second() const { return rate_; }

 private:
  int64_t since_ = 0;
  int64_t bytes_ = 0;
  double rate_ = 0;
};

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_HOP_H_
