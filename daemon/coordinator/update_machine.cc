#include "daemon/coordinator/update_machine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace weightsync {
namespace daemon {

absl::string_view UpdatePhaseName(UpdatePhase phase) {
  switch (phase) {
    case UpdatePhase::kGathering:
      return "GATHERING";
    case UpdatePhase::kPreparing:
      return "PREPARING";
    case UpdatePhase::kMoving:
      return "MOVING";
    case UpdatePhase::kPausing:
      return "PAUSING";
    case UpdatePhase::kApplying:
      return "APPLYING";
    case UpdatePhase::kResuming:
      return "RESUMING";
    case UpdatePhase::kActive:
      return "ACTIVE";
    case UpdatePhase::kAborted:
      return "ABORTED";
  }
  return "?";
}

bool UpdateState::AllVerified() const {
  for (const UpdateNode& node : nodes) {
    if (node.In() && !node.verified) return false;
  }
  return all_copied;
}

namespace {

// A failure that another try may not meet. DATA_LOSS is damage on the way, when
// an edge is named with it.
bool WorthRetrying(const UpdateEvent& event) {
  switch (event.fault.code) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kCancelled:
      return true;
    case absl::StatusCode::kDataLoss:
      return event.from >= 0;
    default:
      return false;
  }
}

class Stepper {
 public:
  Stepper(const UpdateConfig& config, absl::Time now, UpdateState* state)
      : config_(config), now_(now), s_(*state) {}

  std::vector<UpdateAction> Run(const UpdateEvent& event) {
    if (s_.Ended() || !Known(event)) return {};
    Take(event);
    while (Advance()) {
    }
    return std::move(actions_);
  }

 private:
  bool Moving() const {
    return s_.phase == UpdatePhase::kPreparing ||
           s_.phase == UpdatePhase::kMoving;
  }
  bool BeforeCommit() const { return s_.phase < UpdatePhase::kApplying; }
  // Nodes have been told, and have not all verified yet.
  bool InTransfer() const {
    return Moving() || (config_.stream && !s_.stream_begun &&
                        s_.phase == UpdatePhase::kPausing);
  }
  // Whether all of the rank's bytes are where its end does no harm.
  bool Secured(const UpdateRank& rank) const {
    return config_.in_place ? s_.sources_released : rank.copied;
  }

  // A recovered update has replicas alone.
  bool Known(const UpdateEvent& event) const {
    return (event.kind < UpdateEvent::kRankArrived ||
            event.kind > UpdateEvent::kRankLost ||
            event.rank < static_cast<int>(s_.ranks.size())) &&
           (event.kind < UpdateEvent::kNodePrepared ||
            event.kind > UpdateEvent::kNodeBack ||
            event.node < static_cast<int>(s_.nodes.size())) &&
           (event.kind < UpdateEvent::kReplicaPaused ||
            event.kind > UpdateEvent::kReplicaBack ||
            event.replica < static_cast<int>(s_.replicas.size()));
  }

  // ---- What each event says ----

  void Take(const UpdateEvent& event) {
    switch (event.kind) {
      case UpdateEvent::kTick:
        return Tick(event.behind);
      case UpdateEvent::kRankArrived:
        s_.ranks[event.rank].arrived = true;
        return;
      case UpdateEvent::kRankCopied:
        return RankCopied(event);
      case UpdateEvent::kRankLost:
        // Once its bytes are in its node's store nobody needs the rank.
        if (BeforeCommit() && !Secured(s_.ranks[event.rank])) {
          Abort(event.fault);
        }
        return;
      case UpdateEvent::kUnblocked:
        s_.blocked = false;
        return;
      case UpdateEvent::kNodePrepared:
        return NodePrepared(event);
      case UpdateEvent::kNodeVerified:
        return NodeVerified(event);
      case UpdateEvent::kNodeProgress: {
        UpdateNode& node = s_.nodes[event.node];
        if (event.bytes <= node.received_bytes) return;
        node.received_bytes = event.bytes;
        Progress();
        return;
      }
      case UpdateEvent::kNodeLost:
        return NodeLost(event);
      case UpdateEvent::kNodeBack:
        return NodeBack(event.node);
      case UpdateEvent::kCancel:
        if (BeforeCommit()) Abort(event.fault);
        return;
      case UpdateEvent::kCheckpointWritten:
        if (!BeforeCommit() || s_.checkpoint_written) return;
        if (!event.fault.ok()) return Abort(event.fault);
        s_.checkpoint_written = true;
        Progress();
        return;
      default:
        return TakeReplica(event);
    }
  }

  void RankCopied(const UpdateEvent& event) {
    UpdateRank& rank = s_.ranks[event.rank];
    if (!event.fault.ok()) {
      if (BeforeCommit() && !rank.copied) Abort(event.fault);
      return;
    }
    if (rank.copied) return;
    rank.copied = true;
    Progress();
    NoteAllCopied();
    if (s_.all_copied && InTransfer()) TellAll(UpdateAction::kManifest);
  }

  void NoteAllCopied() {
    for (const UpdateRank& rank : s_.ranks) {
      if (!rank.copied) return;
    }
    s_.all_copied = true;
  }

  void NodePrepared(const UpdateEvent& event) {
    UpdateNode& node = s_.nodes[event.node];
    if (!InTransfer() || event.epoch != s_.epoch || !node.In()) return;
    if (event.fault.ok()) {
      node.prepared_epoch = event.epoch;
    } else if (WorthRetrying(event)) {
      Reconfigure(event.fault);
    } else if (CanGoByDisk() &&
               event.fault.code != absl::StatusCode::kResourceExhausted &&
               event.fault.code != absl::StatusCode::kInvalidArgument) {
      GoByDisk(event.fault);
    } else {
      Abort(event.fault);
    }
  }

  void NodeVerified(const UpdateEvent& event) {
    UpdateNode& node = s_.nodes[event.node];
    if (!node.In()) return;
    if (event.fault.ok()) {
      // Bytes that agree with the manifest do so in every epoch.
      if (event.epoch <= s_.epoch && Moving()) node.verified = true;
      return;
    }
    if (!InTransfer() || event.epoch != s_.epoch) return;
    if (!WorthRetrying(event)) return Abort(event.fault);
    if (event.from >= 0 && event.to >= 0) {
      const std::pair<int, int> edge(event.from, event.to);
      if (std::find(s_.bad_edges.begin(), s_.bad_edges.end(), edge) ==
          s_.bad_edges.end()) {
        s_.bad_edges.push_back(edge);
      }
    }
    Reconfigure(event.fault);
  }

  void NodeLost(const UpdateEvent& event) {
    UpdateNode& node = s_.nodes[event.node];
    if (!BeforeCommit() || !node.In()) return;
    if (s_.AllVerified()) {
      node.excluded = true;
      return;
    }
    for (UpdateRank& rank : s_.ranks) {
      if (rank.node != event.node) continue;
      if (!config_.from_checkpoint) return Abort(event.fault);
      // What it alone has read nobody else needs.
      rank.copied = true;
    }
    node.excluded = true;
    if (config_.from_checkpoint) {
      if (std::none_of(s_.nodes.begin(), s_.nodes.end(),
                       [](const UpdateNode& other) { return other.In(); })) {
        return Abort(event.fault);
      }
      NoteAllCopied();
    }
    // One that is gone says nothing about the network.
    if (InTransfer()) Reconfigure(event.fault, /*of_route=*/false);
  }

  void NodeBack(int index) {
    const UpdateNode& node = s_.nodes[index];
    // Its ranks' publishes wait for this, however long the update goes on.
    if (s_.sources_released && node.source) {
      Do(UpdateAction::kReleaseSources, index);
    }
    if (!InTransfer() || !node.In()) return;
    Do(UpdateAction::kPrepare, index);
    if (s_.phase == UpdatePhase::kMoving) Do(UpdateAction::kMove, index);
    if (s_.all_copied) Do(UpdateAction::kManifest, index);
  }

  void TakeReplica(const UpdateEvent& event) {
    UpdateReplica& replica = s_.replicas[event.replica];
    switch (event.kind) {
      case UpdateEvent::kReplicaPaused:
        if (replica.stage == UpdateReplica::kHeld) {
          replica.stage = UpdateReplica::kPaused;
        }
        return;
      case UpdateEvent::kReplicaPauseFailed:
        if (replica.stage != UpdateReplica::kHeld) return;
        // After the commit (recovery) nothing is undone for the sake of one.
        if (config_.evict_stragglers || !BeforeCommit()) {
          Leave(event.replica, event.fault);
        } else {
          replica.fault = event.fault;
          Abort(event.fault);
        }
        return;
      case UpdateEvent::kReplicaUnpaused:
        if (replica.stage == UpdateReplica::kPaused) {
          replica.stage = UpdateReplica::kHeld;
        }
        return;
      case UpdateEvent::kReplicaInstalled:
        if (replica.stage == UpdateReplica::kInstalling) {
          replica.stage = UpdateReplica::kInstalled;
        }
        return;
      case UpdateEvent::kReplicaFenced:
        if (replica.stage == UpdateReplica::kInstalling) {
          Leave(event.replica, event.fault);
        }
        return;
      case UpdateEvent::kReplicaResumed:
        if (replica.stage == UpdateReplica::kReleased) {
          replica.stage = UpdateReplica::kResumed;
          replica.fault = event.fault;
        }
        return;
      case UpdateEvent::kReplicaLeft:
        if (replica.stage == UpdateReplica::kAwaited) return;
        if (replica.stage != UpdateReplica::kResumed) {
          Leave(event.replica, event.fault);
        }
        return;
      case UpdateEvent::kReplicaBack:
        if (s_.phase != UpdatePhase::kApplying ||
            replica.stage != UpdateReplica::kAwaited) {
          return;
        }
        if (event.installed) {
          replica.stage = UpdateReplica::kResumed;
        } else if (config_.max_unavailable > 0) {
          replica.stage = UpdateReplica::kIn;  // held when it is its turn
        } else {
          Hold(event.replica);
        }
        return;
      default:
        return;
    }
  }

  void Tick(const std::string& behind) {
    if (BeforeCommit() && !s_.all_copied && now_ >= s_.gather_deadline) {
      return GatherExpired();
    }
    if (now_ < s_.deadline) return;
    if (s_.blocked && (s_.phase == UpdatePhase::kGathering || s_.at_barrier)) {
      Abort(Fault(
          absl::StatusCode::kDeadlineExceeded, "QUEUE_TIMEOUT",
          absl::StrCat("the update before it did not end within ",
                       absl::FormatDuration(config_.queue_timeout),
                       behind.empty() ? "" : ": ", behind, "; publish again")));
    } else if (s_.phase == UpdatePhase::kMoving && Writing()) {
      std::vector<std::string> writers;
      for (const UpdateNode& node : s_.nodes) {
        if (node.In() && node.source) writers.push_back(node.name);
      }
      Abort(Fault(absl::StatusCode::kDeadlineExceeded, "SAVE_TIMEOUT",
                  absl::StrCat("the checkpoint by which it comes was not "
                               "written within ",
                               absl::FormatDuration(config_.checkpoint_timeout),
                               " by node ", absl::StrJoin(writers, ", "))));
    } else if (s_.phase == UpdatePhase::kPreparing) {
      std::vector<std::string> late;
      for (const UpdateNode& node : s_.nodes) {
        if (node.In() && node.prepared_epoch != s_.epoch) {
          late.push_back(node.name);
        }
      }
      const Fault fault(
          absl::StatusCode::kDeadlineExceeded, "PREPARE_TIMEOUT",
          absl::StrCat("not ready to receive within ",
                       absl::FormatDuration(config_.prepare_timeout), ": node ",
                       absl::StrJoin(late, ", ")));
      if (CanGoByDisk()) return GoByDisk(fault);
      Abort(fault);
    } else if (s_.phase == UpdatePhase::kMoving) {
      std::vector<std::string> late;
      for (const UpdateNode& node : s_.nodes) {
        if (node.In() && !node.verified) late.push_back(node.name);
      }
      Reconfigure(
          Fault(absl::StatusCode::kDeadlineExceeded, "PROGRESS_TIMEOUT",
                absl::StrCat("no bytes came in for ",
                             absl::FormatDuration(2 * config_.progress_timeout),
                             ", still lacking some: node ",
                             absl::StrJoin(late, ", "))));
    } else if (s_.phase == UpdatePhase::kApplying) {
      for (size_t i = 0; i < s_.replicas.size(); ++i) {
        UpdateReplica& replica = s_.replicas[i];
        if (replica.stage != UpdateReplica::kAwaited) continue;
        Leave(static_cast<int>(i),
              Fault(absl::StatusCode::kUnavailable, "REPLICA_LOST",
                    absl::StrCat(replica.name,
                                 " did not come back after the coordinator's "
                                 "restart")));
      }
    }
  }

  void GatherExpired() {
    std::vector<std::string> missing;
    std::vector<std::string> uncopied;
    for (const UpdateRank& rank : s_.ranks) {
      if (!rank.arrived) {
        missing.push_back(absl::StrCat(rank.rank));
      } else if (!rank.copied) {
        uncopied.push_back(absl::StrCat(rank.rank));
      }
    }
    const std::string within = absl::FormatDuration(config_.gather_timeout);
    if (!missing.empty()) {
      Abort(Fault(absl::StatusCode::kDeadlineExceeded, "GATHER_TIMEOUT",
                  absl::StrCat("rank ", absl::StrJoin(missing, ", "),
                               " did not publish within ", within,
                               " of the first one")));
    } else {
      Abort(Fault(
          absl::StatusCode::kDeadlineExceeded, "SNAPSHOT_TIMEOUT",
          absl::StrCat("the tensors of rank ", absl::StrJoin(uncopied, ", "),
                       " were not copied out within ", within)));
    }
  }

  // ---- Transitions: the table in the header ----

  bool Advance() {
    switch (s_.phase) {
      case UpdatePhase::kGathering:
        for (const UpdateRank& rank : s_.ranks) {
          if (!rank.arrived) return false;
        }
        if (s_.blocked && (!config_.latest || config_.stream)) {
          Wait();
          return false;
        }
        Enter(UpdatePhase::kPreparing);
        Prepare();
        return true;

      case UpdatePhase::kPreparing:
        for (const UpdateNode& node : s_.nodes) {
          if (node.In() && node.prepared_epoch != s_.epoch) return false;
        }
        if (config_.stream && !s_.stream_begun) {
          s_.deadline = absl::InfiniteFuture();
          Enter(UpdatePhase::kPausing);
          HoldAll();
          return true;
        }
        Enter(UpdatePhase::kMoving);
        if (Writing()) s_.deadline = now_ + config_.checkpoint_timeout;
        Progress();
        TellAll(UpdateAction::kMove);
        return true;

      case UpdatePhase::kMoving:
        if (!s_.AllVerified() || Writing()) return false;
        if (!config_.stream) ReleaseSources();
        if (s_.blocked) {
          if (!s_.at_barrier) {
            s_.at_barrier = true;
            s_.deadline = absl::InfiniteFuture();
            Do(UpdateAction::kAtBarrier, 0);
          }
          Wait();
          return false;
        }
        s_.deadline = absl::InfiniteFuture();
        if (config_.stream || config_.max_unavailable > 0) {
          Commit();
          return true;
        }
        Enter(UpdatePhase::kPausing);
        HoldAll();
        return true;

      case UpdatePhase::kPausing:
        if (Any(UpdateReplica::kIn, UpdateReplica::kHeld)) return false;
        if (config_.stream && !s_.stream_begun) {
          s_.stream_begun = true;
          Do(UpdateAction::kStreamBegin, 0);
          Enter(UpdatePhase::kMoving);
          Progress();
          TellAll(UpdateAction::kMove);
          return true;
        }
        Commit();
        return true;

      case UpdatePhase::kApplying: {
        const bool rolling = config_.max_unavailable > 0;
        bool released = false;
        for (size_t i = 0; i < s_.replicas.size(); ++i) {
          UpdateReplica& replica = s_.replicas[i];
          if (rolling && replica.stage == UpdateReplica::kIn &&
              Away() < config_.max_unavailable) {
            Hold(static_cast<int>(i));
          } else if (replica.stage == UpdateReplica::kPaused) {
            replica.stage = UpdateReplica::kInstalling;
            DoReplica(UpdateAction::kInstall, static_cast<int>(i));
          } else if (rolling && replica.stage == UpdateReplica::kInstalled) {
            replica.stage = UpdateReplica::kReleased;
            Release(static_cast<int>(i));
            released = true;
          }
        }
        if (released) return true;
        if (Any(UpdateReplica::kAwaited, rolling
                                             ? UpdateReplica::kReleased
                                             : UpdateReplica::kInstalling)) {
          return false;
        }
        Enter(UpdatePhase::kResuming);
        for (size_t i = 0; i < s_.replicas.size(); ++i) {
          if (s_.replicas[i].stage == UpdateReplica::kInstalled) {
            s_.replicas[i].stage = UpdateReplica::kReleased;
            Release(static_cast<int>(i));
          }
        }
        return true;
      }

      case UpdatePhase::kResuming:
        if (Any(UpdateReplica::kReleased, UpdateReplica::kReleased)) {
          return false;
        }
        End(UpdatePhase::kActive);
        return false;

      case UpdatePhase::kActive:
      case UpdatePhase::kAborted:
        return false;
    }
    return false;
  }

  // The decision. From here on it is never undone.
  void Commit() {
    s_.committed = true;
    s_.deadline = absl::InfiniteFuture();
    Do(UpdateAction::kCommit, 0);
    ReleaseSources();
    Enter(UpdatePhase::kApplying);
  }

  // Behind an older update.
  void Wait() {
    if (s_.deadline == absl::InfiniteFuture()) {
      s_.deadline = now_ + config_.queue_timeout;
    }
  }

  void ReleaseSources() {
    if (!config_.in_place || s_.sources_released) return;
    s_.sources_released = true;
    for (size_t i = 0; i < s_.nodes.size(); ++i) {
      for (const UpdateRank& rank : s_.ranks) {
        if (rank.node != static_cast<int>(i)) continue;
        Do(UpdateAction::kReleaseSources, static_cast<int>(i));
        break;
      }
    }
  }

  // Away because of this update.
  int Away() const {
    int away = 0;
    for (const UpdateReplica& replica : s_.replicas) {
      away += replica.stage >= UpdateReplica::kHeld &&
              replica.stage <= UpdateReplica::kReleased;
    }
    return away;
  }

  void HoldAll() {
    for (size_t i = 0; i < s_.replicas.size(); ++i) {
      if (s_.replicas[i].stage == UpdateReplica::kIn) {
        Hold(static_cast<int>(i));
      }
    }
  }

  void Prepare() {
    ++s_.epoch;
    s_.deadline = now_ + config_.prepare_timeout;
    TellAll(UpdateAction::kPrepare);
    if (s_.all_copied) TellAll(UpdateAction::kManifest);
  }

  // Half of the way by disk: nobody reads yet.
  bool Writing() const { return s_.disk && !s_.checkpoint_written; }

  bool CanGoByDisk() const {
    return config_.disk_fallback && !s_.disk && Moving();
  }

  void GoByDisk(const Fault& why) {
    s_.disk = true;
    s_.network_fault = why;
    s_.reconfigurations = 0;
    s_.bad_edges.clear();
    Do(UpdateAction::kByDisk, 0);
    Enter(UpdatePhase::kPreparing);
    Prepare();
  }

  void Reconfigure(const Fault& fault, bool of_route = true) {
    // One other route is tried.
    if (CanGoByDisk() && (s_.reconfigurations >= config_.max_reconfigurations ||
                          (of_route && s_.reconfigurations > 0))) {
      return GoByDisk(fault);
    }
    if (s_.reconfigurations >= config_.max_reconfigurations) {
      return Abort(Fault(fault.code, fault.reason,
                         absl::StrCat(fault.message, " (given up after ",
                                      s_.reconfigurations, " new routes)")));
    }
    ++s_.reconfigurations;
    Enter(UpdatePhase::kPreparing);
    Prepare();
  }

  void Abort(const Fault& fault) {
    s_.fault = fault;
    if (!s_.network_fault.ok() && Moving()) {
      absl::StrAppend(&s_.fault.message, "; it went by way of disk because of ",
                      s_.network_fault.reason, ": ", s_.network_fault.message);
    }
    for (size_t i = 0; i < s_.replicas.size(); ++i) {
      if (s_.replicas[i].held) Release(static_cast<int>(i));
    }
    End(UpdatePhase::kAborted);
  }

  void End(UpdatePhase phase) {
    Enter(phase);
    UpdateAction action;
    action.kind = UpdateAction::kEnd;
    action.phase = phase;
    actions_.push_back(action);
  }

  void Hold(int index) {
    s_.replicas[index].stage = UpdateReplica::kHeld;
    s_.replicas[index].held = true;
    DoReplica(UpdateAction::kHold, index);
  }

  void Release(int index) {
    s_.replicas[index].held = false;
    DoReplica(UpdateAction::kRelease, index);
  }

  void Leave(int index, const Fault& fault) {
    UpdateReplica& replica = s_.replicas[index];
    if (replica.stage == UpdateReplica::kLeft) return;
    replica.stage = UpdateReplica::kLeft;
    replica.fault = fault;
    if (replica.held) Release(index);
  }

  // Whether a replica's stage lies in [from, to].
  bool Any(UpdateReplica::Stage from, UpdateReplica::Stage to) const {
    for (const UpdateReplica& replica : s_.replicas) {
      if (replica.stage >= from && replica.stage <= to) return true;
    }
    return false;
  }

  void Progress() {
    if (s_.phase == UpdatePhase::kMoving && !s_.at_barrier && !Writing()) {
      s_.deadline = now_ + 2 * config_.progress_timeout;
    }
  }

  void Enter(UpdatePhase phase) {
    s_.phase = phase;
    UpdateAction action;
    action.kind = UpdateAction::kPhase;
    action.phase = phase;
    actions_.push_back(action);
  }

  void TellAll(UpdateAction::Kind kind) {
    for (size_t i = 0; i < s_.nodes.size(); ++i) {
      if (s_.nodes[i].In()) Do(kind, static_cast<int>(i));
    }
  }

  void Do(UpdateAction::Kind kind, int node) {
    UpdateAction action;
    action.kind = kind;
    action.phase = s_.phase;
    action.node = node;
    actions_.push_back(action);
  }

  void DoReplica(UpdateAction::Kind kind, int replica) {
    UpdateAction action;
    action.kind = kind;
    action.phase = s_.phase;
    action.replica = replica;
    actions_.push_back(action);
  }

  const UpdateConfig& config_;
  const absl::Time now_;
  UpdateState& s_;
  std::vector<UpdateAction> actions_;
};

}  // namespace

std::string WaitsFor(const UpdateState& state) {
  std::vector<std::string> names;
  const auto ranks = [&](bool UpdateRank::*done) {
    for (const UpdateRank& rank : state.ranks) {
      if (!(rank.*done)) names.push_back(absl::StrCat(rank.rank));
    }
    return names.empty() ? ""
                         : absl::StrCat("rank ", absl::StrJoin(names, ", "));
  };
  const auto nodes = [&](const auto& done) {
    for (const UpdateNode& node : state.nodes) {
      if (node.In() && !done(node)) names.push_back(node.name);
    }
    return names.empty() ? ""
                         : absl::StrCat("node ", absl::StrJoin(names, ", "));
  };
  const auto replicas = [&](UpdateReplica::Stage from,
                            UpdateReplica::Stage to) {
    for (const UpdateReplica& replica : state.replicas) {
      if (replica.stage >= from && replica.stage <= to) {
        names.push_back(replica.name);
      }
    }
    return absl::StrJoin(names, ", ");
  };
  switch (state.phase) {
    case UpdatePhase::kGathering:
      return ranks(&UpdateRank::arrived);
    case UpdatePhase::kPreparing:
      return nodes([&state](const UpdateNode& node) {
        return node.prepared_epoch == state.epoch;
      });
    case UpdatePhase::kMoving: {
      const std::string uncopied = ranks(&UpdateRank::copied);
      if (!uncopied.empty()) return uncopied;
      return nodes([](const UpdateNode& node) { return node.verified; });
    }
    case UpdatePhase::kPausing:
      return replicas(UpdateReplica::kIn, UpdateReplica::kHeld);
    case UpdatePhase::kApplying:
      return replicas(UpdateReplica::kAwaited, UpdateReplica::kInstalling);
    case UpdatePhase::kResuming:
      return replicas(UpdateReplica::kReleased, UpdateReplica::kReleased);
    case UpdatePhase::kActive:
    case UpdatePhase::kAborted:
      return "";
  }
  return "";
}

void BeginUpdate(const UpdateConfig& config, absl::Time now,
                 UpdateState* state) {
  state->phase = UpdatePhase::kGathering;
  // What is read of a checkpoint is watched like any other transfer.
  state->gather_deadline = config.from_checkpoint ? absl::InfiniteFuture()
                                                  : now + config.gather_timeout;
  state->deadline = absl::InfiniteFuture();
}

void RecoverUpdate(const UpdateConfig& config, absl::Time now,
                   UpdateState* state) {
  state->phase = UpdatePhase::kApplying;
  state->committed = true;
  state->all_copied = true;
  state->gather_deadline = absl::InfiniteFuture();
  state->deadline = now + config.recovery_timeout;
  for (UpdateReplica& replica : state->replicas) {
    replica.stage = UpdateReplica::kAwaited;
  }
}

std::vector<UpdateAction> StepUpdate(const UpdateConfig& config,
                                     const UpdateEvent& event, absl::Time now,
                                     UpdateState* state) {
  return Stepper(config, now, state).Run(event);
}

}  // namespace daemon
}  // namespace weightsync
