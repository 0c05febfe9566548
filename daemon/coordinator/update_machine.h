// One update, from the first rank's arrival to its end, as a pure state
// machine: StepUpdate(config, event, now, state) changes the state and answers
// with a few actions, to be carried out in order. No clock, no protos, no I/O:
// members are numbers, so that a simulation runs it by the million.
//
//   phase      is left when                         to          and does
//   GATHERING  every rank has arrived, and no older PREPARING   kPrepare each
//              update of the model is in the way                node
//   PREPARING  every node has prepared this epoch   MOVING      kMove each node
//                                       STREAM:     PAUSING     kHold each
//   MOVING     every node has verified, and no      PAUSING     kHold each
//              older update is in the way                       replica
//                                       STREAM:     APPLYING    kCommit
//                                       ROLLING:    APPLYING    kCommit
//   PAUSING    every replica has paused             APPLYING    kCommit
//                                       STREAM:     MOVING      kStreamBegin,
//                                                               kMove each node
//   APPLYING   every replica has installed, or is   RESUMING    kRelease each
//              fenced or gone; kInstall on each
//                      ROLLING: each is held, told to install and released by
//                      itself, at most max_unavailable at a time
//   RESUMING   every replica has resumed, or is     ACTIVE      kEnd
//              gone, or its resume has failed
//   before APPLYING, and only then:
//     PREPARING,  a transfer failed, a receiving    PREPARING   next epoch:
//     MOVING      node was lost                                 kPrepare each
//     any         a rank is lost before its bytes   ABORTED     kRelease each
//                 are elsewhere, its node before                held replica,
//                 all is verified; a copy or a node             kEnd
//                 refuses, a deadline passes, too
//                 many epochs, a replica does not
//                 pause (ON_STRAGGLER_ABORT), a
//                 newer update is complete (LATEST)
//   ACTIVE and ABORTED are final: events change nothing any more.
// "every" means: of those that are still in it. The transition is taken as
// often as its condition holds, so that an update without replicas goes from
// MOVING to ACTIVE in one step.
//
// In the way is an older update of the model that has not ended (`blocked`).
// Behind it an update gathers; with `latest` it also moves, says kAtBarrier
// when every node has verified, and whoever runs both ends the older one if
// that is not committed. STREAM touches live memory and so never overtakes.
//
// From kStreamBegin until the end live memory may be a mix; what its workers
// hold is theirs to say.
//
// kReleaseSources (IN_PLACE) goes to each source node once its ranks' bytes are
// whole elsewhere: all verified (STAGE), committed (STREAM).
//
// By way of disk (`disk`; with disk_fallback once the groups have failed) nodes
// prepare for a checkpoint, and MOVING has two halves: its writing, which
// checkpoint_timeout bounds, until kCheckpointWritten; then its reading. An
// update from a checkpoint that is there (from_checkpoint) has no ranks of
// trainers: each receiving node stands for one, copied once it has read.
//
// kManifest goes to each node once all ranks are copied and the node was told
// to prepare. What an event says twice, of an older epoch, or of somebody who
// is not in it any more, changes nothing.
//
// What one replica does between kHold and its end is replica_machine.h's
// business; here it is only counted.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_UPDATE_MACHINE_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_UPDATE_MACHINE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/coordinator/fault.h"

namespace weightsync {
namespace daemon {

enum class UpdatePhase : uint8_t {
  kGathering,
  kPreparing,
  kMoving,
  kPausing,
  kApplying,
  kResuming,
  kActive,
  kAborted,
};
absl::string_view UpdatePhaseName(UpdatePhase phase);

struct UpdateConfig {
  absl::Duration gather_timeout = absl::Seconds(60);
  absl::Duration prepare_timeout = absl::Seconds(30);
  // Nodes watch each flow with progress_timeout; here all of them together are
  // watched with twice that, in case a node does not say anything at all.
  absl::Duration progress_timeout = absl::Seconds(15);
  absl::Duration recovery_timeout = absl::Seconds(30);
  int max_reconfigurations = 3;
  // Behind an older update of the model, in either place.
  absl::Duration queue_timeout = absl::Seconds(120);
  // LockstepPolicy.on_straggler = EVICT.
  bool evict_stragglers = false;
  // UpdateMode STREAM, PublishMode IN_PLACE.
  bool stream = false;
  bool in_place = false;
  // RollingPolicy; 0: LOCKSTEP.
  int max_unavailable = 0;
  // DeliveryPolicy LATEST.
  bool latest = false;
  // TransferMedium NETWORK_OR_DISK.
  bool disk_fallback = false;
  // For the nodes of the ranks to write the checkpoint by which it comes.
  absl::Duration checkpoint_timeout = absl::Minutes(10);
  // LoadVersion.
  bool from_checkpoint = false;
};

struct UpdateRank {
  int32_t rank = 0;
  int node = 0;  // index into UpdateState::nodes
  bool arrived = false;
  // IN_PLACE: its digests are known.
  bool copied = false;
};

struct UpdateNode {
  std::string name;
  bool source = false;    // some rank of it owns a bucket
  bool receiver = false;  // some worker of it needs a bucket
  // Excluded: lost before it had verified. It has no more part in the movement.
  bool excluded = false;
  int64_t prepared_epoch = 0;
  bool verified = false;
  int64_t received_bytes = 0;

  bool In() const { return (source || receiver) && !excluded; }
};

struct UpdateReplica {
  enum Stage : uint8_t {
    kAwaited,  // recovery: has not come back yet
    kIn,
    kHeld,  // asked to pause
    kPaused,
    kInstalling,
    kInstalled,
    kReleased,  // asked to resume
    kResumed,
    kLeft,  // lost, evicted or fenced: see `fault`
  };
  std::string name;
  Stage stage = kIn;
  // Its pause is held on behalf of this update.
  bool held = false;
  Fault fault;
};

struct UpdateState {
  UpdatePhase phase = UpdatePhase::kGathering;
  std::vector<UpdateNode> nodes;
  std::vector<UpdateRank> ranks;
  std::vector<UpdateReplica> replicas;

  // The counter of Epoch; grows with every reconfiguration. Starts where the
  // model's last update left it.
  int64_t epoch = 0;
  int reconfigurations = 0;
  // Edges (from, to; indices of nodes) that failed: flows avoid them.
  std::vector<std::pair<int, int>> bad_edges;

  bool all_copied = false;
  bool committed = false;
  // It comes by way of a checkpoint, and that is complete.
  bool disk = false;
  bool checkpoint_written = false;
  // Why, where the network was tried first.
  Fault network_fault;
  // An older update of the model has not ended.
  bool blocked = false;
  // LATEST: all is verified behind that one, and kAtBarrier was said.
  bool at_barrier = false;
  bool stream_begun = false;
  bool sources_released = false;
  absl::Time gather_deadline;
  // Of PREPARING, of MOVING's silence, of waiting behind an older update, and
  // of a recovered APPLYING.
  absl::Time deadline;
  // Why it was aborted.
  Fault fault;

  bool Ended() const {
    return phase == UpdatePhase::kActive || phase == UpdatePhase::kAborted;
  }
  bool AllVerified() const;
};

struct UpdateEvent {
  enum Kind : uint8_t {
    kTick,
    kRankArrived,  // `rank`: index into ranks, as in all of these
    kRankCopied,   // `fault`: the copy failed
    kRankLost,
    kNodePrepared,  // `epoch`, `fault`
    kNodeVerified,  // `epoch`, `fault`; `from`, `to`: the edge, or -1
    kNodeProgress,  // `bytes` received so far
    kNodeLost,      // with its store
    kNodeBack,      // its stream had broken: it is told everything again
    kReplicaPaused,
    kReplicaPauseFailed,
    // Its node gave up the pause by itself: it runs, and is asked again.
    kReplicaUnpaused,
    kReplicaInstalled,
    kReplicaFenced,
    // It generates again, cannot be made to, or is held by others too
    // (`fault`).
    kReplicaResumed,
    kReplicaLeft,
    // Recovery: a participant of the committed update is here. `installed`: it
    // has it already.
    kReplicaBack,
    kUnblocked,          // the older update has ended
    kCancel,             // `fault`
    kCheckpointWritten,  // by way of disk; `fault`
  };
  Kind kind = kTick;
  int rank = 0;
  int node = 0;
  int replica = 0;
  int64_t epoch = 0;
  int64_t bytes = 0;
  int from = -1;
  int to = -1;
  bool installed = false;
  // kTick of one that is behind an older update: that one, and who it waits
  // for, as the subject of a sentence.
  std::string behind;
  Fault fault;
};

struct UpdateAction {
  enum Kind : uint8_t {
    kPhase,     // the phase is now `phase`
    kByDisk,    // from now on it comes by way of a checkpoint
    kPrepare,   // `node`, at state.epoch; flows are those of the nodes in it
    kMove,      // `node`, at state.epoch
    kManifest,  // `node`
    kHold,      // `replica`
    // STREAM: on the disk before the next action; the replicas that are paused
    // take part.
    kStreamBegin,
    kAtBarrier,       // LATEST: complete, but for the older update
    kCommit,          // on the disk before the next action
    kReleaseSources,  // `node`
    kInstall,         // `replica`
    kRelease,         // `replica`
    kEnd,             // state.phase says how
  };
  Kind kind = kPhase;
  UpdatePhase phase = UpdatePhase::kGathering;
  int node = 0;
  int replica = 0;
};

// Who it waits for in its phase, for sentences: "rank 1, 2", "node n2", names
// of replicas. Empty: for nobody.
std::string WaitsFor(const UpdateState& state);

// Sets the deadlines of a fresh state (nodes, ranks, replicas and epoch
// filled).
void BeginUpdate(const UpdateConfig& config, absl::Time now,
                 UpdateState* state);
// The same for an update that an earlier term committed: APPLYING, its replicas
// kAwaited; those that do not come back in time are left out.
void RecoverUpdate(const UpdateConfig& config, absl::Time now,
                   UpdateState* state);

std::vector<UpdateAction> StepUpdate(const UpdateConfig& config,
                                     const UpdateEvent& event, absl::Time now,
                                     UpdateState* state);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_UPDATE_MACHINE_H_
