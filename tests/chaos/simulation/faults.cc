// What goes wrong, and when.

#include <algorithm>
#include <cctype>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/chaos/simulation/world.h"

namespace weightsync {
namespace simulation {
namespace {

// Late messages and calls are over after it.
constexpr Time kAftermath = kSecond;
// Histories that come to nothing for this long after the last fault are stuck.
constexpr Time kPatience = 120 * kSecond;

}  // namespace

Time World::Downtime() {
  const Time downtime = random_.Chance(500)
                            ? random_.Between(10 * kMillisecond, kSecond)
                            : random_.Between(kSecond, 6 * kSecond);
  Disturbed(downtime);
  return downtime;
}

void World::Disturbed(Time duration) {
  quiet_ = std::max(quiet_, now_ + duration + kAftermath);
  give_up_ = quiet_ + kPatience;
}

void World::PlanFaults() {
  const std::vector<std::pair<const char*, int>> kinds = {
      {"coordinator_crash", odds_.coordinator_crash},
      {"coordinator_crash_at_action", odds_.coordinator_crash_at_action},
      {"coordinator_stop", odds_.coordinator_stop},
      {"journal_lost", odds_.journal_lost},
      {"node_crash", odds_.node_crash},
      {"node_stop", odds_.node_stop},
      {"engine_crash", odds_.engine_crash},
      {"engine_stop", odds_.engine_stop},
      {"worker_crash", odds_.worker_crash},
      {"worker_stop", odds_.worker_stop},
      {"rank_crash", odds_.rank_crash},
      {"rank_stop", odds_.rank_stop},
      {"link_break", odds_.link_break},
      {"link_cut", odds_.link_cut},
      {"control_break", odds_.control_break},
      {"worker_break", odds_.worker_break},
      {"evict", odds_.evict},
      {"weights_dropped", odds_.weights_dropped},
      {"hold", odds_.hold},
      {"rollback", odds_.rollback},
      {"drain", odds_.drain},
      {"delete_version", odds_.delete_version},
      {"remove_model", odds_.remove_model},
      {"save_version", odds_.save_version},
      {"load_version", odds_.load_version},
  };
  int sum = 0;
  for (const auto& kind : kinds) sum += kind.second;
  const int64_t count = random_.Between(1, 4);
  Time last = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t draw = random_.Below(sum);
    std::string name;
    for (const auto& kind : kinds) {
      if (draw < kind.second) {
        name = kind.first;
        break;
      }
      draw -= kind.second;
    }
    // Faults that come together find holes that single ones do not.
    const Time at = i > 0 && random_.Chance(500)
                        ? last + random_.Below(300 * kMillisecond)
                        : kSecond + random_.Below(3 * kSecond);
    last = at;
    Disturbed(at - now_);
    At(at, [this, name] { Inject(name); });
  }
}

void World::Stop(Process* process, Time duration) {
  Disturbed(duration);
  process->stopped_until = std::max(process->stopped_until, now_ + duration);
}

std::string World::StateNow() const {
  if (coordinator_ == nullptr || impostor_) return "no coordinator";
  const auto version =
      coordinator_->GetVersion("models/m/versions/latest", "", Clock());
  if (!version.ok()) return "none";
  std::string name = v1::Version::State_Name(version->state()).substr(6);
  for (char& c : name) c = static_cast<char>(std::tolower(c));
  return name;
}

void World::Inject(const std::string& kind) {
  Trace("FAULT ", kind);
  ++outcome_.faults[kind][StateNow()];
  const auto pick = [this](size_t count) {
    return static_cast<int>(random_.Below(static_cast<int64_t>(count)));
  };
  const int n = pick(nodes_.size());
  const int e = pick(engines_.size());
  const int w = pick(engines_[e].workers.size());
  const int r = pick(ranks_.size());
  const Time silence = absl::ToInt64Microseconds(options_.heartbeat_timeout);
  // How long something stands still.
  const Time pause = random_.Between(500 * kMillisecond, 6 * kSecond);

  if (kind == "coordinator_crash") {
    if (coordinator_ != nullptr) CrashCoordinator(Downtime());
  } else if (kind == "coordinator_crash_at_action") {
    crash_at_action_ = random_.Below(60);
  } else if (kind == "coordinator_stop") {
    Stop(&host_, pause);
  } else if (kind == "journal_lost") {
    // It comes up on an empty disk; somebody brings the journal back later.
    if (coordinator_ == nullptr || now_ < 2 * kSecond) return;
    for (const Node& node : nodes_) {
      if (node.cluster_id.empty()) return;
    }
    CrashCoordinator(10 * kSecond);
    Disturbed(4 * kSecond);
    const int life = host_.life;
    After(random_.Between(kMillisecond, 1500 * kMillisecond), [this, life] {
      if (host_.life == life) StartCoordinator(/*impostor=*/true);
    });
    if (random_.Chance(odds_.adopt)) {
      After(3 * kSecond, [this] { Adopt(); });
    } else {
      After(3 * kSecond, [this] {
        if (impostor_) CrashCoordinator(random_.Below(kSecond));
      });
    }
  } else if (kind == "node_crash") {
    if (!nodes_[n].up) return;
    CrashNode(n);
    const int life = nodes_[n].life;
    After(Downtime(), [this, n, life] {
      if (nodes_[n].life == life) StartNode(n);
    });
  } else if (kind == "node_stop") {
    Stop(&nodes_[n], pause);
    if (pause < silence) return;
    // Its clients hear nothing and dial again; it learns of that later.
    for (size_t i = 0; i < engines_.size(); ++i) {
      const int index = static_cast<int>(i);
      if (engines_[i].node == n) {
        By(&engines_[i], silence, [this, n, index] {
          if (now_ < nodes_[n].stopped_until) EndControl(index, true);
        });
      }
      for (size_t k = 0; k < engines_[i].workers.size(); ++k) {
        if (engines_[i].workers[k].node != n) continue;
        By(&engines_[i].workers[k], silence,
           [this, n, index, k = static_cast<int>(k)] {
             if (now_ < nodes_[n].stopped_until) EndWorker(index, k, true);
           });
      }
    }
  } else if (kind == "engine_crash" || kind == "worker_crash") {
    if (!engines_[e].up) return;
    if (kind == "worker_crash") {
      // The engine notices, and is started again as a whole.
      Worker& worker = engines_[e].workers[w];
      if (!worker.up) return;
      ++worker.life;
      worker.up = false;
      Trace(engines_[e].name, " worker ", w, " dies");
      EndWorker(e, w, /*client_sees=*/false);
      worker.generation = next_generation_++;
      const int life = engines_[e].life;
      After(random_.Between(50 * kMillisecond, 3 * kSecond), [this, e, life] {
        if (engines_[e].life == life) CrashEngine(e);
      });
      const Time back = random_.Between(3 * kSecond, 6 * kSecond);
      Disturbed(back);
      After(back, [this, e] {
        if (!engines_[e].up) StartEngine(e);
      });
      return;
    }
    CrashEngine(e);
    const int life = engines_[e].life;
    After(Downtime(), [this, e, life] {
      if (engines_[e].life == life) StartEngine(e);
    });
  } else if (kind == "engine_stop") {
    Engine& engine = engines_[e];
    Stop(&engine, pause);
    By(&engine, pause, [this, e] { Serve(e); });
    if (pause < silence) return;
    const int64_t generation = engine.generation;
    By(&nodes_[engine.node], silence, [this, e, generation] {
      if (engines_[e].generation == generation) EndControl(e, true);
    });
  } else if (kind == "worker_stop") {
    Worker& worker = engines_[e].workers[w];
    Stop(&worker, pause);
    By(&worker, pause, [this, e] { Serve(e); });
    if (pause < silence) return;
    const int64_t generation = worker.generation;
    By(&nodes_[worker.node], silence, [this, e, w, generation] {
      if (engines_[e].workers[w].generation == generation) {
        EndWorker(e, w, true);
      }
    });
  } else if (kind == "rank_crash") {
    if (!ranks_[r].up) return;
    CrashRank(r);
    const int life = ranks_[r].life;
    After(Downtime(), [this, r, life] {
      if (ranks_[r].life == life) StartRank(r);
    });
  } else if (kind == "rank_stop") {
    Stop(&ranks_[r], pause);
    if (pause < silence) return;
    By(&nodes_[ranks_[r].node], silence,
       [this, r, session = ranks_[r].session] {
         if (ranks_[r].session == session) EndSession(r);
       });
  } else if (kind == "link_break") {
    if (nodes_[n].link != nullptr) Break(nodes_[n].link);
  } else if (kind == "link_cut") {
    nodes_[n].cut_until = now_ + pause;
    Disturbed(pause);
    if (nodes_[n].link != nullptr) Break(nodes_[n].link);
  } else if (kind == "control_break") {
    EndControl(e, /*client_sees=*/true);
  } else if (kind == "worker_break") {
    EndWorker(e, w, /*client_sees=*/true);
  } else if (kind == "evict") {
    // Somebody else's memory was needed: what is not the newest may go.
    std::string oldest;
    for (const auto& update : nodes_[n].updates) {
      if (update.second.kept && nodes_[n].pinned.count(update.first) == 0 &&
          (oldest.empty() ||
           update.second.order < nodes_[n].updates[oldest].order)) {
        oldest = update.first;
      }
    }
    if (!oldest.empty()) Evict(n, oldest);
  } else if (kind == "hold") {
    HoldByHand();
  } else if (kind == "rollback") {
    RollBack();
  } else if (kind == "drain") {
    DrainNode();
  } else if (kind == "delete_version") {
    DeleteVersion();
  } else if (kind == "remove_model") {
    if (removable_) RemoveModel(/*tries=*/40);
  } else if (kind == "save_version") {
    SaveVersion();
  } else if (kind == "load_version") {
    LoadVersion();
  } else if (kind == "weights_dropped") {
    // Deep sleep: the engine stands still and has nothing.
    Engine& engine = engines_[e];
    if (!engine.up || engine.running || engine.busy || !engine.queue.empty() ||
        engine.workers[w].busy) {
      return;
    }
    engine.workers[w].memory = Memory{Memory::kNothing, "", 0};
    engine.workers[w].served = engine.workers[w].memory;
    engine.workers[w].served_set = engine.workers[w].set;
    EndWorker(e, w, /*client_sees=*/true);
  }
}

}  // namespace simulation
}  // namespace weightsync
