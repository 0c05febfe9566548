#include "tests/chaos/simulation/world.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace weightsync {
namespace simulation {

namespace {

// From a version's end until every engine generates with it.
constexpr Time kSettle = 15 * kSecond;

}  // namespace

World::World(uint64_t seed, const Odds& odds, Planted planted,
             std::ostream* trace)
    : odds_(odds), planted_(planted), trace_(trace), random_(seed) {
  events_.reserve(256);
}

World::~World() = default;

absl::Time World::Clock() const {
  return absl::FromUnixSeconds(1000000) + absl::Microseconds(now_);
}

void World::TraceTime() {
  std::string text = absl::StrCat(now_ / kSecond, ".");
  const std::string rest = absl::StrCat(now_ % kSecond);
  text.append(6 - rest.size(), '0');
  text.append(rest);
  *trace_ << std::string(text.size() < 11 ? 11 - text.size() : 0, ' ') << text
          << "  ";
}

void World::PushEvent(Time at, int64_t number, int slot) {
  events_.push_back({std::max(at, now_), number, slot});
  std::push_heap(events_.begin(), events_.end(), Later);
}

void World::DoNext() {
  const int index = events_.front().slot;
  const int64_t number = events_.front().number;
  Slot& slot = slots_[static_cast<size_t>(index)];
  std::pop_heap(events_.begin(), events_.end(), Later);
  events_.pop_back();
  ++outcome_.events;
  if (slot.process == nullptr || slot.process->life == slot.life) {
    if (slot.process != nullptr && now_ < slot.process->stopped_until) {
      // Its place in the line it keeps, however often it is put off.
      return PushEvent(slot.process->stopped_until, number, index);
    }
    slot.task.Run();
  }
  slot.task.Clear();
  free_slots_.push_back(index);
}

Time World::Delay() {
  if (random_.Chance(odds_.message_delayed)) {
    return random_.Between(50 * kMillisecond, 2 * kSecond);
  }
  return random_.Between(200, 20 * kMillisecond);
}

Time World::LocalDelay(Time* last) {
  *last = std::max(*last + 1, now_ + random_.Between(50, 2000));
  return *last - now_;
}

void World::Build() {
  options_.coordinator_node = "n0";
  options_.random_id = [this] { return absl::StrCat("u", next_id_++); };
  options_.gather_timeout = absl::Seconds(6);
  options_.prepare_timeout = absl::Seconds(3);
  options_.progress_timeout = absl::Seconds(2);
  options_.pause_timeout = absl::Seconds(4);
  options_.apply_timeout = absl::Seconds(4);
  options_.resume_timeout = absl::Seconds(3);
  options_.publish_timeout = absl::Seconds(9);
  options_.heartbeat_interval = absl::Seconds(1);
  options_.heartbeat_timeout = absl::Seconds(3);
  options_.node_reconnect_grace = absl::Seconds(2);
  options_.recovery_timeout = absl::Seconds(6);
  options_.barrier_timeout = absl::Seconds(3);
  options_.operation_timeout = absl::Seconds(8);

  named_versions_ = random_.Chance(odds_.named_versions);
  evict_stragglers_ = random_.Chance(odds_.evict_stragglers);
  request_ids_ = !random_.Chance(odds_.no_request_id);

  draw_options_ = random_.Chance(odds_.options);
  pipelined_ = random_.Chance(odds_.pipelined);
  atomic_swap_ = random_.Chance(odds_.atomic_swap);
  pause_on_isolation_ = random_.Chance(odds_.pause_on_isolation);
  removable_ = random_.Chance(odds_.removable);

  nodes_.resize(3);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    nodes_[i].name = absl::StrCat("n", i);
  }
  if (random_.Chance(odds_.own_disk)) {
    nodes_[static_cast<size_t>(random_.Below(3))].own_disk = true;
  }
  const bool beside = random_.Chance(odds_.trainer_beside_engines);
  ranks_.resize(random_.Chance(odds_.second_rank) ? 2 : 1);
  for (size_t i = 0; i < ranks_.size(); ++i) {
    ranks_[i].node = beside ? static_cast<int>(i) : 0;
  }
  const int first = beside ? 0 : 1;
  engines_.resize(random_.Chance(odds_.second_replica) ? 2 : 1);
  for (size_t i = 0; i < engines_.size(); ++i) {
    Engine& engine = engines_[i];
    engine.name = absl::StrCat("r", i);
    engine.node = i == 0 ? first : 2;
    engine.workers.resize(random_.Chance(odds_.two_workers) ? 2 : 1);
    for (Worker& worker : engine.workers) worker.node = engine.node;
    if (engine.workers.size() == 2 &&
        random_.Chance(odds_.replica_over_two_nodes)) {
      engine.workers[1].node = i == 0 ? 2 : first;
    }
  }
}

Outcome World::Run() {
  Build();
  StartCoordinator(/*impostor=*/false);
  for (size_t i = 0; i < nodes_.size(); ++i) StartNode(static_cast<int>(i));
  for (size_t i = 0; i < engines_.size(); ++i) {
    StartEngine(static_cast<int>(i));
  }
  for (size_t i = 0; i < ranks_.size(); ++i) StartRank(static_cast<int>(i));
  PlanFaults();
  After(random_.Between(300 * kMillisecond, kSecond), [this] { Round(); });

  while (!over_ && checker_.ok()) {
    if (events_.empty()) {
      checker_.Violation("nothing happens any more");
      break;
    }
    now_ = events_.front().at;
    if (now_ > give_up_) {
      SayWhatWaits();
      break;
    }
    DoNext();
  }
  outcome_.violations = checker_.violations();
  for (const std::string& violation : outcome_.violations) {
    Trace("VIOLATION ", violation);
  }
  for (const std::string& update : checker_.opened()) {
    if (checker_.Committed(update)) {
      ++outcome_.commits;
    } else {
      ++outcome_.aborts;
    }
  }
  outcome_.recovery = now_ - quiet_;
  return outcome_;
}

// ---- The job: all ranks publish, learn what came of it, and go on ----

void World::DrawOptions() {
  v1::UpdateOptions& options = round_options_;
  options.Clear();
  v1::CommitPolicy* commit = options.mutable_commit_policy();
  if (draw_options_ && random_.Chance(odds_.rolling)) {
    commit->mutable_rolling()->set_max_unavailable(
        static_cast<int>(random_.Between(1, 2)));
  } else if (evict_stragglers_) {
    commit->mutable_lockstep()->set_on_straggler(
        v1::LockstepPolicy::ON_STRAGGLER_EVICT);
  }
  if (!draw_options_) return;
  if (!commit->has_rolling() && random_.Chance(odds_.stream)) {
    options.set_update_mode(v1::UPDATE_MODE_STREAM);
    // After the last fault every round must be able to come to something.
    options.set_allow_no_recovery(random_.Chance(odds_.allow_no_recovery) ||
                                  now_ >= quiet_);
  } else if (atomic_swap_ && random_.Chance(odds_.pause_none)) {
    options.set_pause_mode(v1::PAUSE_MODE_NONE);
  } else {
    options.set_pause_mode(
        static_cast<v1::PauseMode>(random_.Below(v1::PAUSE_MODE_NONE)));
  }
  if (random_.Chance(odds_.in_place)) {
    options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
  } else if (options.update_mode() != v1::UPDATE_MODE_STREAM) {
    // After the last fault every round must be able to come to something.
    if (random_.Chance(odds_.disk) && now_ < quiet_) {
      options.set_transfer_medium(v1::TRANSFER_MEDIUM_DISK);
    } else if (random_.Chance(odds_.network_or_disk)) {
      options.set_transfer_medium(v1::TRANSFER_MEDIUM_NETWORK_OR_DISK);
    }
  }
  if (random_.Chance(odds_.latest)) {
    options.set_delivery_policy(v1::DELIVERY_POLICY_LATEST);
  }
}

void World::Round() {
  ++round_;
  DrawOptions();
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    rank.state = Rank::kIdle;
    rank.active = false;
    rank.taken = false;
    rank.tries = 0;
    rank.request_id = request_ids_ ? absl::StrCat("q", round_, ".", i) : "";
    Time delay = random_.Between(0, 50 * kMillisecond);
    if (random_.Chance(odds_.late_publish)) delay += random_.Below(6 * kSecond);
    After(delay, [this, i, round = round_] {
      if (round == round_) Call(static_cast<int>(i));
    });
  }
}

void World::CheckRound() {
  for (const Rank& rank : ranks_) {
    if (rank.state != Rank::kDone) return;
  }
  const bool active = ranks_[0].active;
  const std::string update = ranks_[0].update_id;
  Trace("job: round ", round_, active ? " has made " : " has come to nothing ",
        update);
  // An aborted number may be tried again, or left behind.
  if (active || random_.Chance(500)) round_version_ = 0;
  if (now_ >= quiet_ && active && Healed()) {
    bool same = true;
    for (const Rank& rank : ranks_) {
      same = same && rank.active && rank.update_id == update;
    }
    if (same) {
      final_update_ = update;
      settle_by_ = now_ + kSettle;
      // Looked at until it holds.
      struct Look {
        static void At(World* world) {
          if (world->Everywhere(world->final_update_)) {
            world->over_ = true;
          } else if (world->now_ > world->settle_by_) {
            // Somebody came too late for it, and gets the next one.
            world->Round();
          } else {
            world->After(200 * kMillisecond, [world] { At(world); });
          }
        }
      };
      Look::At(this);
      return;
    }
  }
  After(random_.Between(10 * kMillisecond, 1500 * kMillisecond),
        [this] { Round(); });
}

bool World::Healed() const {
  if (now_ < quiet_ || coordinator_ == nullptr || impostor_ ||
      operators_ != 0) {
    return false;
  }
  for (const Node& node : nodes_) {
    if (!node.up) return false;
  }
  for (const Engine& engine : engines_) {
    if (!engine.up) return false;
    for (const Worker& worker : engine.workers) {
      if (!worker.up) return false;
    }
  }
  return true;
}

bool World::Everywhere(const std::string& update_id) const {
  for (const Engine& engine : engines_) {
    if (!engine.up || !engine.running) return false;
    for (const Worker& worker : engine.workers) {
      if (!(Served(worker) == Memory{Memory::kInstalled, update_id, 0})) {
        return false;
      }
    }
  }
  return true;
}

void World::SayWhatWaits() {
  std::string what = "stuck after the last fault:";
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    static const char* const kStates[] = {"idle", "calling", "waiting", "done"};
    absl::StrAppend(&what, " rank ", i, " ", kStates[rank.state], " ",
                    rank.update_id, ";");
  }
  for (const Engine& engine : engines_) {
    absl::StrAppend(&what, " ", engine.name,
                    engine.running ? " generates with" : " stands still with");
    for (const Worker& worker : engine.workers) {
      absl::StrAppend(&what, " [", Describe(worker.memory), "]");
    }
    absl::StrAppend(&what, ";");
  }
  if (!final_update_.empty()) {
    absl::StrAppend(&what, " all should have ", final_update_);
  }
  if (coordinator_ != nullptr) {
    v1::ListReplicasRequest list;
    list.set_parent("models/m");
    const auto replicas = coordinator_->ListReplicas(list);
    if (replicas.ok()) {
      for (v1::Replica replica : replicas->replicas()) {
        replica.clear_history();
        absl::StrAppend(&what, "\n    {", replica.ShortDebugString(), "}");
      }
    }
  }
  checker_.Violation(what);
}

}  // namespace simulation
}  // namespace weightsync
