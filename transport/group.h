#ifndef WEIGHTSYNC_TRANSPORT_GROUP_H_
#define WEIGHTSYNC_TRANSPORT_GROUP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "transport/landing.h"

namespace weightsync {
namespace transport {

// How buckets move between nodes.
//
//   1. The coordinator names the members of a flow, [source, receiver,
//   receiver, ...], an epoch and a secret.
//   2. Each member makes a Group of that spec and calls Join: it returns when
//   its neighbours are there.
//   3. Each member calls Move with landings for the same buckets. The source's
//   fill as the snapshot goes on, a
//      receiver's may hold frames already (from an earlier, failed group): only
//      what lacks is sent.
//   4. Each member calls Wait. OK means: all buckets are complete and verified
//   here and in every member after this
//      one. An error names the edge "a->b" that failed; frames that are ready
//      stay ready.
//   5. After an error the group is aborted, and the coordinator makes a new
//   one, with a higher epoch and another
//      route, over the same landings.
// Steps 3 and 4 may be repeated in a group that has not failed.
//
// A member that loses the edge to its successor goes on receiving. One that
// loses the edge from its predecessor hands on what it has, then tells those
// after it, so that they name the same edge.

// Grows with every change of membership, and with every coordinator.
struct Epoch {
  uint64_t term = 0;
  uint64_t counter = 0;

  friend bool operator==(const Epoch& a, const Epoch& b) {
    return std::tie(a.term, a.counter) == std::tie(b.term, b.counter);
  }
  friend bool operator<(const Epoch& a, const Epoch& b) {
    return std::tie(a.term, a.counter) < std::tie(b.term, b.counter);
  }
};

struct GroupMember {
  std::string node;     // the name by which edges are blamed
  std::string address;  // what that node's GroupFactory::address() said
};

struct GroupSpec {
  std::string cluster_id;
  std::string group_id;  // the same for every epoch of one flow, e.g. update id
                         // and flow id
  Epoch epoch;
  std::string secret;  // made by the coordinator for this group; who lacks it
                       // cannot join
  std::vector<GroupMember>
      members;   // [0] is the source, then in the order of the chain
  int self = 0;  // index in members
};

struct GroupOptions {
  // A peer of which nothing was heard for this long, not even a heartbeat, is
  // lost.
  absl::Duration peer_deadline = absl::Seconds(10);
  // Tells at once of an edge of this member that failed, before Wait does, so
  // that a new route can be made early. Called on a thread of the group: it
  // must not block and not call the group. May be null.
  std::function<void(const absl::Status&)> on_edge_failed;
};

// The movement to or from one neighbour.
struct PeerProgress {
  std::string node;
  bool upstream = false;  // it sends to us
  int64_t bytes = 0;      // of frames, repairs included
  int64_t frames = 0;
  int64_t repaired_frames = 0;  // arrived damaged and were asked for again
  int64_t queued_frames = 0;    // downstream only: ready here and not sent yet.
                                // Rising: this peer is the slow one
  double bytes_per_second = 0;  // over the last second or so
  absl::Duration silence;       // since anything was heard of it
  absl::Status status;          // why the edge is gone, or OK
};

struct GroupProgress {
  int64_t bucket_count = 0;
  int64_t frame_count = 0;  // of all buckets of the current move
  int64_t ready_frames = 0;
  int64_t bytes = 0;  // of all buckets
  int64_t ready_bytes = 0;
  absl::Duration
      since_progress;  // since a frame last became ready here or was sent on
  std::vector<PeerProgress> peers;
};

// One member's end of a group. Thread-safe; Abort may be called at any time,
// but not from a callback.
class Group {
 public:
  // Aborts if the group is not at rest; leaves quietly if it is. Bounded time;
  // afterwards no landing is touched.
  virtual ~Group() = default;

  // Meets the neighbours. Once per group. DEADLINE_EXCEEDED (JOIN_TIMEOUT,
  // names the edge) when one does not come, FAILED_PRECONDITION (STALE_EPOCH,
  // WRONG_CLUSTER, WRONG_PEER), PERMISSION_DENIED (BAD_SECRET), UNAVAILABLE
  // (EDGE_LOST). After an error only Abort and destruction are left.
  virtual absl::Status Join(absl::Duration timeout) = 0;

  // The GPU in whose memory landings of this member's moves may lie, because no
  // frame of it goes any other way than through memory of that GPU (over NCCL).
  // Empty: in none; bytes go through host memory, on one side at least. Blocks
  // until all neighbours have met in that way or not: the errors of edges of
  // Join. REQUIRES: joined.
  virtual absl::StatusOr<std::string> PayloadDevice(
      absl::Duration /*timeout*/) {
    return std::string();
  }

  // Starts to move; returns at once. REQUIRES: joined, and the move before has
  // ended with OK. INVALID_ARGUMENT for a bucket given twice;
  // FAILED_PRECONDITION when another group receives into a landing, or one lies
  // in memory of a GPU that the group does not reach (DEVICE_LANDING).
  virtual absl::Status Move(std::vector<std::shared_ptr<Landing>> landings) = 0;

  // Until the move has ended here and downstream. Errors: UNAVAILABLE
  // (EDGE_LOST), DATA_LOSS (EDGE_DAMAGED: a frame arrived damaged three times;
  // HOLDER_DAMAGED: the sender's own bytes no longer match their digest),
  // FAILED_PRECONDITION (MOVE_MISMATCH), the status of a source landing that
  // failed, the status of Abort, and DEADLINE_EXCEEDED (NO_PROGRESS) when
  // nothing moved for `no_progress` although the peers live: the group is then
  // as it was, and Wait may be called again.
  virtual absl::Status Wait(absl::Duration no_progress) = 0;

  // Ends everything in bounded time; Wait and Join return `why`, the peers are
  // told. The first call counts.
  virtual void Abort(const absl::Status& why) = 0;

  virtual GroupProgress Progress() const = 0;
};

// One node's way into groups of one kind. Outlives its groups.
class GroupFactory {
 public:
  virtual ~GroupFactory() = default;
  // What other members need to reach this node.
  virtual std::string address() const = 0;
  // INVALID_ARGUMENT for a spec that cannot be (self out of range, a node
  // twice).
  virtual absl::StatusOr<std::unique_ptr<Group>> NewGroup(
      GroupSpec spec, GroupOptions options) = 0;
};

// An error of the edge from one node to another: "<from>-><to>: <sentence>",
// with the edge kept beside the text.
absl::Status EdgeError(absl::StatusCode code, absl::string_view reason,
                       absl::string_view from, absl::string_view to,
                       absl::string_view sentence);

// The edge "a->b" that a status blames, if any.
absl::optional<std::string> EdgeOf(const absl::Status& status);

// Marks a status that came from elsewhere as being about `edge`.
void SetEdge(absl::Status* status, absl::string_view edge);

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_GROUP_H_
