// Trainer ranks: their session on a node, and the program that publishes.

#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/chaos/simulation/world.h"

namespace weightsync {
namespace simulation {

namespace {

// Calls that a program makes for one round before it goes on to the next.
constexpr int kTries = 12;

}  // namespace

void World::StartRank(int index) {
  Rank& rank = ranks_[index];
  ++rank.life;
  rank.up = true;
  rank.stopped_until = 0;
  OpenSession(index);
}

void World::CrashRank(int index) {
  Rank& rank = ranks_[index];
  Trace("rank ", index, " dies");
  ++rank.life;
  rank.up = false;
  EndSession(index);
  if (rank.state != Rank::kDone) Done(index, false);
}

void World::OpenSession(int index) {
  Rank& rank = ranks_[index];
  By(&rank, random_.Between(kMillisecond, 100 * kMillisecond), [this, index] {
    Rank& rank = ranks_[index];
    if (!rank.session.empty()) return;
    if (!nodes_[rank.node].up || now_ < nodes_[rank.node].stopped_until) {
      return OpenSession(index);
    }
    rank.session = absl::StrCat("s", next_id_++);
    rank.claimed = false;
    rank.registered = false;
    rank.publish_index = 0;
    ClaimRank(index);
  });
}

// The daemon has lost the rank, or the rank its daemon.
void World::EndSession(int index) {
  Rank& rank = ranks_[index];
  if (rank.session.empty()) return;
  if (nodes_[rank.node].up) {
    v1::NodeReport report;
    v1::RankLost* lost = report.mutable_rank_lost();
    lost->set_model("models/m");
    lost->set_rank(index);
    lost->set_session(rank.session);
    Report(rank.node, std::move(report));
  }
  rank.session.clear();
  if (rank.state == Rank::kCalling) {
    Answer(index, "", "SESSION_UNKNOWN");
  }
  if (rank.up) OpenSession(index);
}

void World::ClaimRank(int index) {
  Rank& rank = ranks_[index];
  Ask ask;
  ask.kind = Ask::kClaim;
  ask.who = index;
  ask.generation = rank.life;
  v1::NodeReport report;
  v1::ClaimRank* claim = report.mutable_claim_rank();
  claim->set_model("models/m");
  claim->set_rank(index);
  claim->set_world_size(static_cast<int>(ranks_.size()));
  claim->set_session(rank.session);
  claim->set_publish_index(rank.publish_index);
  AskCoordinator(rank.node, std::move(report), ask);

  report.Clear();
  ask.kind = Ask::kShards;
  v1::RankShards* shards = report.mutable_rank_shards();
  shards->set_model("models/m");
  shards->set_rank(index);
  shards->set_session(rank.session);
  v1::Parameter* parameter = shards->add_parameters();
  parameter->set_name("w");
  parameter->set_dtype(v1::DTYPE_BF16);
  parameter->add_shape(4 * static_cast<int64_t>(ranks_.size()));
  parameter->add_shape(8);
  v1::Box* box = shards->add_shards()->mutable_box();
  box->add_offset(4 * index);
  box->add_offset(0);
  box->add_extent(4);
  box->add_extent(8);
  AskCoordinator(rank.node, std::move(report), ask);
}

// ---- The program ----

void World::Call(int index) {
  Rank& rank = ranks_[index];
  if (rank.state != Rank::kIdle) return;
  rank.state = Rank::kCalling;
  rank.call = next_call_++;
  rank.called = now_;
  rank.update_id.clear();
  SendCall(index);
}

void World::SendCall(int index) {
  Rank& rank = ranks_[index];
  if (rank.state != Rank::kCalling) return;
  const int64_t call = rank.call;
  const auto again = [this, index, call] {
    After(random_.Between(50 * kMillisecond, 500 * kMillisecond),
          [this, index, call] {
            if (ranks_[index].call == call) SendCall(index);
          });
  };
  if (!rank.up || rank.session.empty() || !rank.registered) return again();
  By(&nodes_[rank.node], random_.Between(50, 2000), [this, index, call] {
    Rank& rank = ranks_[index];
    if (rank.call != call || rank.state != Rank::kCalling) return;
    v1::NodeReport report;
    v1::PublishArrived* arrived = report.mutable_publish_arrived();
    arrived->set_model("models/m");
    arrived->set_rank(index);
    arrived->set_session(rank.session);
    arrived->set_request_id(rank.request_id);
    if (named_versions_) {
      // All ranks of a round give the same number.
      if (round_version_ == 0) round_version_ = 1000000 + round_;
      arrived->set_version(round_version_);
    }
    arrived->set_step(round_);
    *arrived->mutable_options() = round_options_;
    Ask ask;
    ask.kind = Ask::kPublish;
    ask.who = index;
    ask.generation = call;
    if (rank.session.empty()) {
      return Answer(index, "", "SESSION_UNKNOWN");
    }
    if (AskCoordinator(rank.node, std::move(report), ask) == 0) {
      Answer(index, "", "COORDINATOR_UNREACHABLE");
    }
  });
}

void World::OnOpened(int index, const v1::Reply& reply) {
  Rank& rank = ranks_[index];
  if (reply.failure().code() != 0) {
    return Answer(index, "", reply.failure().reason());
  }
  const v1::PublishOpened& opened = reply.publish_opened();
  const std::string id = opened.update_id();
  if (opened.repeated_request()) return Answer(index, id, "");
  const bool fails = random_.Chance(odds_.copy_fails);
  By(&nodes_[rank.node], random_.Between(kMillisecond, 60 * kMillisecond),
     [this, index, id, fails, version = opened.version(), call = rank.call,
      session = rank.session,
      in_place = round_options_.publish_mode() == v1::PUBLISH_MODE_IN_PLACE] {
       Rank& rank = ranks_[index];
       Node& node = nodes_[rank.node];
       if (rank.session != session) return;
       v1::RankSnapshotted snapshotted;
       snapshotted.set_model("models/m");
       snapshotted.set_update_id(id);
       snapshotted.set_rank(index);
       if (fails || node.ended.count(id) != 0) {
         snapshotted.mutable_failure()->set_code(13);
         snapshotted.mutable_failure()->set_reason("SOURCE_LOST");
         snapshotted.mutable_failure()->set_message("simulated");
       } else {
         snapshotted.set_copied_bytes(64);
         NodeUpdate& update = node.updates[id];
         if (update.order == 0) update.order = next_order_++;
         update.version = version;
         if (in_place) {
           update.unreleased.emplace_back(index, call);
         } else {
           update.snapshot = true;
         }
       }
       node.snapshots[index] = snapshotted;
       v1::NodeReport report;
       *report.mutable_rank_snapshotted() = snapshotted;
       Report(rank.node, std::move(report));
       if (rank.call != call || rank.state != Rank::kCalling) return;
       // Its memory is read where it is: the call returns later.
       if (in_place && !snapshotted.has_failure()) return;
       Answer(index, snapshotted.has_failure() ? "" : id,
              snapshotted.failure().reason());
     });
}

void World::Answer(int index, const std::string& update_id,
                   const std::string& reason) {
  Rank& rank = ranks_[index];
  if (rank.state != Rank::kCalling) return;
  checker_.Answered(index, rank.call, update_id, reason);
  Trace("rank ", index, " round ", round_, " is answered ",
        update_id.empty() ? reason : update_id);
  const int64_t call = rank.call = next_call_++;
  if (!update_id.empty()) {
    rank.state = Rank::kWaiting;
    rank.update_id = update_id;
    rank.taken = true;
    if (pipelined_ && now_ < quiet_) {
      PollAside(index, update_id);
      return Done(index, false);
    }
    By(&rank, random_.Between(10 * kMillisecond, kSecond),
       [this, index, call] { Poll(index, call); });
    return;
  }
  // What the API tells it to do: call again, with a back-off. The same request
  // where nobody has said what became of it, a new one where it was given up.
  if (reason == "VERSION_NOT_NEWER") round_version_ = 0;
  // IN_PLACE: that is what became of the round, as WaitVersion would say.
  if (++rank.tries > kTries || !rank.up || reason == "VERSION_NOT_NEWER" ||
      reason == "UPDATE_ABORTED") {
    return Done(index, false);
  }
  if (reason != "COORDINATOR_UNREACHABLE" &&
      reason != "COORDINATOR_RESTARTED" && reason != "SESSION_UNKNOWN" &&
      !rank.request_id.empty()) {
    absl::StrAppend(&rank.request_id, "+");
  }
  By(&rank, random_.Between(10 * kMillisecond, 400 * kMillisecond),
     [this, index, call] {
       if (ranks_[index].call == call) SendCall(index);
     });
}

// WaitVersion.
void World::Poll(int index, int64_t call) {
  Rank& rank = ranks_[index];
  if (rank.call != call || rank.state != Rank::kWaiting) return;
  const auto active = OutcomeOf(index, rank.update_id);
  if (active.ok()) return Done(index, *active);
  By(&rank, 500 * kMillisecond, [this, index, call] { Poll(index, call); });
}

void World::PollAside(int index, const std::string& update_id) {
  if (OutcomeOf(index, update_id).ok()) return;
  By(&ranks_[index], 500 * kMillisecond,
     [this, index, update_id] { PollAside(index, update_id); });
}

absl::StatusOr<bool> World::OutcomeOf(int index, const std::string& update_id) {
  const std::shared_ptr<Link>& link = nodes_[ranks_[index].node].link;
  if (coordinator_ == nullptr || impostor_ || now_ < host_.stopped_until ||
      link == nullptr || !link->welcomed || !link->coordinator_open) {
    return absl::UnavailableError("");
  }
  // It ends in the journal first. That nobody is told before that is looked at
  // now and then: the question costs.
  if (!checker_.Ended(update_id) && !random_.Chance(200)) {
    return absl::UnavailableError("");
  }
  const auto version =
      coordinator_->GetVersion("models/m/versions/latest", update_id, Clock());
  // Forgotten: newer ones have come and gone meanwhile.
  if (!version.ok()) return checker_.Committed(update_id);
  switch (version->state()) {
    case v1::Version::STATE_LOST:
      // Committed, and no store has it any more: what comes next supersedes it.
      return false;
    case v1::Version::STATE_ACTIVE:
    case v1::Version::STATE_ABORTED:
    case v1::Version::STATE_SUPERSEDED: {
      bool active = version->state() == v1::Version::STATE_ACTIVE;
      if (planted_ == Planted::kTwoOutcomes && index == 1) active = !active;
      checker_.Outcome(update_id, active);
      return active;
    }
    default:
      return absl::UnavailableError("");
  }
}

void World::Done(int index, bool active) {
  Rank& rank = ranks_[index];
  rank.state = Rank::kDone;
  rank.active = active;
  ++rank.call;
  rank.call = next_call_++;
  CheckRound();
}

}  // namespace simulation
}  // namespace weightsync
