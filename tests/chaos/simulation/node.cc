// Nodes: the link to the coordinator, the store, and what daemon/service does
// with commands.

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "daemon/node/layouts.h"
#include "tests/chaos/simulation/world.h"

namespace weightsync {
namespace simulation {

namespace {

// As Store::keep_updates has it by default.
constexpr int kKeepUpdates = 2;

}  // namespace

void World::StartNode(int index) {
  Node& node = nodes_[index];
  ++node.life;
  node.up = true;
  node.stopped_until = 0;
  node.incarnation = absl::StrCat(node.name, "-", next_id_++);
  node.updates.clear();
  node.layouts.clear();
  node.ended.clear();
  node.snapshots.clear();
  node.pinned.clear();
  node.asks.clear();
  node.away_since = now_;
  node.newest_term = 0;
  node.link = nullptr;
  RemoveLeftovers(index);
  Trace(node.name, " starts");
  Dial(index);
  const int life = node.life;
  By(&node, kSecond, [this, index, life] { NodeBeat(index, life); });
}

void World::CrashNode(int index) {
  Node& node = nodes_[index];
  Trace(node.name, " dies");
  ++node.life;
  node.up = false;
  if (node.link != nullptr) Break(node.link);
  node.link = nullptr;
  for (size_t i = 0; i < engines_.size(); ++i) {
    Engine& engine = engines_[i];
    const int e = static_cast<int>(i);
    if (engine.node == index) EndControl(e, /*client_sees=*/true);
    for (size_t w = 0; w < engine.workers.size(); ++w) {
      if (engine.workers[w].node == index) {
        EndWorker(e, static_cast<int>(w), /*client_sees=*/true);
      }
    }
  }
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i].node == index) EndSession(static_cast<int>(i));
  }
}

// ---- The link ----

void World::Dial(int index) {
  Node& node = nodes_[index];
  if (!node.up || node.link != nullptr) return;
  const int64_t dial = ++node.dials;
  const auto again = [this, index, dial] {
    By(&nodes_[index], random_.Between(100 * kMillisecond, kSecond),
       [this, index, dial] {
         if (nodes_[index].dials == dial) Dial(index);
       });
  };
  if (coordinator_ == nullptr || now_ < node.cut_until) return again();
  auto link = std::make_shared<Link>();
  link->id = static_cast<int>(next_link_++);
  link->name = absl::StrCat(node.name, "#", link->id);
  link->node = index;
  link->node_open = true;
  link->coordinator_open = true;
  link->last_heard = now_;
  links_[link->name] = link;
  node.link = link;
  node.asks.clear();

  v1::NodeReport report;
  v1::Hello* hello = report.mutable_hello();
  hello->set_node(node.name);
  hello->set_incarnation(node.incarnation);
  hello->set_protocol_version(1);
  hello->set_cluster_id(node.cluster_id);
  hello->set_newest_term(node.newest_term);
  hello->set_data_address(absl::StrCat(node.name, ":1"));
  std::vector<std::pair<int64_t, std::string>> whole;
  for (const auto& update : node.updates) {
    if (update.second.whole) {
      whole.emplace_back(-update.second.order, update.first);
    }
  }
  std::sort(whole.begin(), whole.end());
  for (const auto& update : whole) {
    v1::HeldUpdate* held = hello->add_held_updates();
    held->set_model("models/m");
    held->set_update_id(update.second);
    held->set_version(nodes_[index].updates[update.second].version);
  }
  Report(index, std::move(report));
}

void World::Break(std::shared_ptr<Link> link) {
  if (link->cut) return;
  link->cut = true;
  // What is on its way arrives or does not, each way for itself.
  link->drop_up = random_.Chance(500);
  link->drop_down = random_.Chance(500);
  By(&host_, Delay(), [this, link] {
    if (!link->coordinator_open) return;
    link->coordinator_open = false;
    links_.erase(link->name);
    if (coordinator_ != nullptr) {
      Execute(coordinator_->OnDisconnected(Clock(), link->name));
    }
  });
  By(&nodes_[link->node], Delay(),
     [this, link] { LinkClosed(link->node, link); });
}

void World::LinkClosed(int index, std::shared_ptr<Link> link) {
  if (!link->node_open) return;
  link->node_open = false;
  if (!link->cut) Break(link);
  Node& node = nodes_[index];
  if (node.link != link) return;
  node.link = nullptr;
  if (node.away_since == kNever) node.away_since = now_;
  if (link->welcomed) {
    // The coordinator waits as long; after that it has given up on us.
    const int64_t loss = ++node.losses;
    By(&node, absl::ToInt64Microseconds(options_.node_reconnect_grace),
       [this, index, loss] {
         if (nodes_[index].losses == loss) Abandon(index);
       });
  }
  std::map<int64_t, Ask> asks;
  asks.swap(node.asks);
  for (const auto& ask : asks) {
    if (ask.second.kind == Ask::kPublish &&
        ranks_[ask.second.who].call == ask.second.generation) {
      Answer(ask.second.who, "", "COORDINATOR_UNREACHABLE");
    }
  }
  const int64_t dial = ++node.dials;
  By(&node, random_.Between(50 * kMillisecond, 700 * kMillisecond),
     [this, index, dial] {
       if (nodes_[index].dials == dial) Dial(index);
     });
}

void World::Report(int index, v1::NodeReport report, bool once) {
  Node& node = nodes_[index];
  const std::shared_ptr<Link> link = node.link;
  if (link == nullptr || link->cut) return;
  if (!link->welcomed && !report.has_hello()) return;
  const bool twice = !once && report.correlation_id() == 0 &&
                     !report.has_hello() && !report.has_hello_done() &&
                     random_.Chance(odds_.report_twice);
  link->last_up = std::max(link->last_up + 1, now_ + Delay());
  By(&host_, link->last_up - now_,
     [this, link, twice, report = std::move(report)] {
       if (!link->coordinator_open || link->drop_up ||
           coordinator_ == nullptr) {
         return;
       }
       if (trace_ != nullptr && !report.has_heartbeat()) {
         Trace("<- ", link->name, "  ", report.ShortDebugString());
       }
       const int life = host_.life;
       Execute(coordinator_->OnReport(Clock(), link->name, report));
       if (twice && host_.life == life && coordinator_ != nullptr &&
           link->coordinator_open) {
         Execute(coordinator_->OnReport(Clock(), link->name, report));
       }
     });
}

int64_t World::AskCoordinator(int index, v1::NodeReport report, Ask ask) {
  Node& node = nodes_[index];
  if (node.link == nullptr || !node.link->welcomed) return 0;
  const int64_t correlation = next_correlation_++;
  report.set_correlation_id(correlation);
  node.asks[correlation] = ask;
  Report(index, std::move(report));
  return correlation;
}

void World::NodeBeat(int index, int life) {
  Node& node = nodes_[index];
  if (node.life != life) return;
  if (node.link != nullptr) {
    if (now_ - node.link->last_heard >
        absl::ToInt64Microseconds(options_.heartbeat_timeout)) {
      LinkClosed(index, node.link);
    } else if (node.link->welcomed) {
      v1::NodeReport report;
      report.mutable_heartbeat();
      Report(index, std::move(report), /*once=*/true);
    }
  }
  CheckAway(index);
  By(&node, kSecond, [this, index, life] { NodeBeat(index, life); });
}

// ---- Commands ----

void World::OnCommand(int index, const std::shared_ptr<Link>& link,
                      const v1::NodeCommand& command) {
  Node& node = nodes_[index];
  link->last_heard = now_;
  const auto unknown_layout = [&](const std::string& layout) {
    for (const auto& kept : node.layouts) {
      if (absl::c_linear_search(kept.second, layout)) return false;
    }
    checker_.Violation(absl::StrCat("node ", node.name, " knows no layout ",
                                    layout, " any more"));
    return true;
  };
  switch (command.command_case()) {
    case v1::NodeCommand::kWelcome:
      link->welcomed = true;
      return OnWelcome(index, command.welcome());
    case v1::NodeCommand::kReply:
      return OnReply(index, command.reply());
    case v1::NodeCommand::kDefineLayout: {
      const v1::DefineLayout& layout = command.define_layout();
      std::deque<std::string>& kept = node.layouts[layout.model()];
      kept.erase(std::remove(kept.begin(), kept.end(), layout.layout_id()),
                 kept.end());
      kept.push_back(layout.layout_id());
      if (kept.size() > daemon::LayoutBook::kKeptPerModel) kept.pop_front();
      unsigned& receivers = receivers_[layout.layout_id()];
      for (const v1::LayoutWorker& worker : layout.workers()) {
        receivers |= 1u << (layout.nodes(worker.node()).node().back() - '0');
      }
      return;
    }
    case v1::NodeCommand::kPrepareUpdate:
      if (unknown_layout(command.prepare_update().layout_id())) return;
      return OnPrepare(index, command.prepare_update());
    case v1::NodeCommand::kMoveUpdate: {
      const v1::MoveUpdate& move = command.move_update();
      auto update = node.updates.find(move.update_id());
      if (update == node.updates.end() ||
          move.epoch().counter() != update->second.epoch.counter() ||
          move.epoch().term() != update->second.epoch.term()) {
        return;
      }
      update->second.moving = true;
      update->second.checkpoint = move.checkpoint().path();
      if (update->second.stream) BeginStream(index, move);
      return TryMove(index, move.update_id());
    }
    case v1::NodeCommand::kUpdateManifest: {
      auto update = node.updates.find(command.update_manifest().update_id());
      if (update == node.updates.end()) return;
      update->second.manifest = true;
      return TryMove(index, update->first);
    }
    case v1::NodeCommand::kEndUpdate:
      return OnEnd(index, command.end_update());
    case v1::NodeCommand::kApplyWorker:
      if (unknown_layout(command.apply_worker().layout_id())) return;
      return OnApply(index, std::make_shared<const v1::ApplyWorker>(
                                command.apply_worker()));
    case v1::NodeCommand::kRemoveWorker:
      return OnRemove(index, command.remove_worker());
    case v1::NodeCommand::kWriteCheckpoint:
      if (unknown_layout(command.write_checkpoint().layout_id())) return;
      return OnWriteCheckpoint(index, command.write_checkpoint());
    case v1::NodeCommand::kCompleteCheckpoint:
      return OnCompleteCheckpoint(index, command.complete_checkpoint());
    case v1::NodeCommand::kPruneCheckpoints:
      return OnPrune(index, command.prune_checkpoints());
    case v1::NodeCommand::kReadCheckpoint:
      return OnReadCheckpoint(index, command.read_checkpoint());
    case v1::NodeCommand::kPauseReplica:
    case v1::NodeCommand::kResumeReplica: {
      const bool pause = command.has_pause_replica();
      const bool none =
          command.pause_replica().pause().mode() == v1::PAUSE_MODE_NONE;
      const std::string& name = pause ? command.pause_replica().replica()
                                      : command.resume_replica().replica();
      const std::string& incarnation =
          pause ? command.pause_replica().incarnation()
                : command.resume_replica().incarnation();
      EngineCommand relayed;
      relayed.pause = pause;
      relayed.none = none;
      relayed.removed = command.resume_replica().resume().removed();
      relayed.command_id = pause
                               ? command.pause_replica().pause().command_id()
                               : command.resume_replica().resume().command_id();
      relayed.update_id = pause ? command.pause_replica().pause().update_id()
                                : command.resume_replica().resume().update_id();
      const int e = name.back() - '0';
      Engine& engine = engines_[e];
      if (engine.node != index || !engine.open || !engine.accepted ||
          engine.incarnation != incarnation) {
        v1::NodeReport report;
        v1::Failure failure;
        failure.set_code(14);
        failure.set_reason("REPLICA_LOST");
        failure.set_message("it is not here");
        if (pause) {
          v1::ReplicaPausedReport* paused = report.mutable_replica_paused();
          paused->set_model("models/m");
          paused->set_replica(name);
          paused->set_incarnation(incarnation);
          paused->set_command_id(relayed.command_id);
          *paused->mutable_failure() = failure;
        } else {
          v1::ReplicaResumedReport* resumed = report.mutable_replica_resumed();
          resumed->set_model("models/m");
          resumed->set_replica(name);
          resumed->set_incarnation(incarnation);
          resumed->set_command_id(relayed.command_id);
          *resumed->mutable_failure() = failure;
        }
        Report(index, std::move(report));
        return;
      }
      if (!pause || (!relayed.update_id.empty() && engine.commit != nullptr &&
                     engine.commit->update_id() != relayed.update_id)) {
        engine.commit = nullptr;
      }
      if (pause) {
        engine.offer = command.pause_replica();
      } else {
        engine.offer.Clear();
        engine.isolation_hold = false;
      }
      return Relay(e, relayed);
    }
    case v1::NodeCommand::kPinUpdate: {
      const v1::PinUpdate& pin = command.pin_update();
      if (pin.pin()) {
        node.pinned.insert(pin.update_id());
      } else {
        node.pinned.erase(pin.update_id());
      }
      return;
    }
    case v1::NodeCommand::kDropUpdate:
      node.updates.erase(command.drop_update().update_id());
      return;
    case v1::NodeCommand::kReleaseSources:
      return Release(index, command.release_sources().update_id(), "");
    case v1::NodeCommand::kRefuseReplica:
      return EndControl(command.refuse_replica().replica().back() - '0',
                        /*client_sees=*/true);
    case v1::NodeCommand::kRefuseWorker:
      return EndWorker(command.refuse_worker().replica().back() - '0',
                       command.refuse_worker().worker_index(),
                       /*client_sees=*/true);
    default:
      return;
  }
}

void World::OnWelcome(int index, const v1::Welcome& welcome) {
  Node& node = nodes_[index];
  ++node.losses;
  node.away_since = kNever;
  node.cluster_id = welcome.cluster_id();
  if (welcome.term() > node.newest_term) {
    if (node.newest_term > 0) Abandon(index);
    node.newest_term = welcome.term();
    node.snapshots.clear();
  }
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i].node == index && !ranks_[i].session.empty()) {
      ClaimRank(static_cast<int>(i));
    }
  }
  for (size_t i = 0; i < engines_.size(); ++i) {
    const int e = static_cast<int>(i);
    Engine& engine = engines_[i];
    if (engine.node == index && engine.open) JoinControl(e);
    for (size_t w = 0; w < engine.workers.size(); ++w) {
      if (engine.workers[w].node == index && engine.workers[w].open) {
        JoinWorker(e, static_cast<int>(w));
      }
    }
  }
  for (const auto& snapshot : node.snapshots) {
    v1::NodeReport report;
    *report.mutable_rank_snapshotted() = snapshot.second;
    Report(index, std::move(report));
  }
  v1::NodeReport done;
  done.mutable_hello_done();
  Report(index, std::move(done));
}

void World::OnReply(int index, const v1::Reply& reply) {
  Node& node = nodes_[index];
  auto found = node.asks.find(reply.correlation_id());
  if (found == node.asks.end()) return;
  const Ask ask = found->second;
  node.asks.erase(found);
  const bool failed = reply.failure().code() != 0;
  switch (ask.kind) {
    case Ask::kClaim:
    case Ask::kShards: {
      Rank& rank = ranks_[ask.who];
      if (rank.session.empty() || rank.life != ask.generation) return;
      if (failed) return EndSession(ask.who);
      (ask.kind == Ask::kClaim ? rank.claimed : rank.registered) = true;
      return;
    }
    case Ask::kControl: {
      Engine& engine = engines_[ask.who];
      if (!engine.open || engine.generation != ask.generation) return;
      if (failed) return EndControl(ask.who, /*client_sees=*/true);
      engine.accepted = true;
      return;
    }
    case Ask::kWorker: {
      Worker& worker = engines_[ask.who].workers[ask.worker];
      if (!worker.open || worker.generation != ask.generation) return;
      if (failed) return EndWorker(ask.who, ask.worker, /*client_sees=*/true);
      if (!worker.accepted) {
        worker.accepted = true;
        JoinWorker(ask.who, ask.worker);
      }
      return;
    }
    case Ask::kPublish: {
      Rank& rank = ranks_[ask.who];
      if (reply.publish_opened().publish_index() > 0 && !rank.session.empty() &&
          rank.node == index) {
        rank.publish_index = reply.publish_opened().publish_index();
      }
      if (rank.call != ask.generation) return;
      OnOpened(ask.who, reply);
      return;
    }
  }
}

// ---- The store ----

void World::OnPrepare(int index, const v1::PrepareUpdate& prepare) {
  Node& node = nodes_[index];
  const std::string id = prepare.update_id();
  // A fetch brings an update that has ended.
  if (node.ended.count(id) != 0 && !prepare.fetch()) return;
  NodeUpdate& update = node.updates[id];
  const auto older = [](const v1::Epoch& a, const v1::Epoch& b) {
    return a.term() != b.term() ? a.term() < b.term()
                                : a.counter() < b.counter();
  };
  if (update.order == 0) update.order = next_order_++;
  update.version = prepare.version();
  if (older(prepare.epoch(), update.epoch)) return;
  update.epoch = prepare.epoch();
  update.prepared = true;
  update.stream = prepare.update_mode() == v1::UPDATE_MODE_STREAM;
  update.in_place = prepare.publish_mode() == v1::PUBLISH_MODE_IN_PLACE;
  update.receiver =
      prepare.fetch() || (receivers_[prepare.layout_id()] >> index & 1u) != 0;
  update.fetched = update.fetched || prepare.fetch();
  update.disk = prepare.has_checkpoint();
  update.load = prepare.load();
  update.moving = false;
  update.peers.clear();
  for (const v1::Flow& flow : prepare.flows()) {
    for (const v1::FlowMember& member : flow.members()) {
      if (member.node() != node.name) update.peers.push_back(member.node());
    }
  }
  const Time takes = random_.Chance(odds_.move_fails)
                         ? random_.Below(4 * kSecond)
                         : random_.Below(30 * kMillisecond);
  By(&node, takes,
     [this, index, id, epoch = prepare.epoch(),
      checkpoint =
          std::make_shared<const v1::Checkpoint>(prepare.checkpoint())] {
       Node& node = nodes_[index];
       auto update = node.updates.find(id);
       if (update == node.updates.end() ||
           update->second.epoch.counter() != epoch.counter()) {
         return;
       }
       v1::NodeReport report;
       v1::UpdatePrepared* prepared = report.mutable_update_prepared();
       prepared->set_model("models/m");
       prepared->set_update_id(id);
       *prepared->mutable_epoch() = epoch;
       if (update->second.disk && !Sees(index, *checkpoint)) {
         prepared->mutable_failure()->set_code(9);
         prepared->mutable_failure()->set_reason("CHECKPOINT_NOT_SHARED");
         prepared->mutable_failure()->set_message("simulated");
       } else if (random_.Chance(odds_.move_fails)) {
         const bool room = random_.Chance(300);
         prepared->mutable_failure()->set_code(room ? 8 : 14);
         prepared->mutable_failure()->set_reason(room ? "NO_STORE_ROOM"
                                                      : "GROUP_FAILED");
         prepared->mutable_failure()->set_message("simulated");
       }
       Report(index, std::move(report));
     });
}

void World::TryMove(int index, const std::string& id) {
  Node& node = nodes_[index];
  NodeUpdate& update = node.updates.at(id);
  if (!update.moving || (!update.manifest && (!update.load || update.loaded))) {
    return;
  }
  const Time takes = random_.Between(kMillisecond, 400 * kMillisecond);
  By(&node, takes, [this, index, id, epoch = update.epoch] {
    Node& node = nodes_[index];
    auto found = node.updates.find(id);
    if (found == node.updates.end() ||
        found->second.epoch.counter() != epoch.counter() ||
        found->second.epoch.term() != epoch.term()) {
      return;
    }
    NodeUpdate& update = found->second;
    if (update.stream && !StreamTaken(index, &update)) {
      // Somebody has yet to take a bucket.
      return By(&nodes_[index], 20 * kMillisecond,
                [this, index, id, epoch = update.epoch] {
                  auto found = nodes_[index].updates.find(id);
                  if (found != nodes_[index].updates.end() &&
                      found->second.epoch.counter() == epoch.counter()) {
                    TryMove(index, id);
                  }
                });
    }
    if (update.disk && !update.whole && !update.loaded && update.receiver) {
      const std::string reason = ReadDisk(index, update, id);
      if (!reason.empty()) {
        v1::NodeReport report;
        v1::UpdateVerified* verified = report.mutable_update_verified();
        verified->set_model("models/m");
        verified->set_update_id(id);
        *verified->mutable_epoch() = epoch;
        verified->mutable_failure()->set_code(9);
        verified->mutable_failure()->set_reason(reason);
        verified->mutable_failure()->set_message("simulated");
        return Report(index, std::move(report));
      }
    }
    if (update.load && !update.loaded) {
      update.loaded = true;
      v1::NodeReport report;
      v1::RankSnapshotted* loaded = report.mutable_rank_snapshotted();
      loaded->set_model("models/m");
      loaded->set_update_id(id);
      loaded->set_rank(-1);
      Report(index, std::move(report));
      if (!update.manifest) return;
    }
    std::string missing;
    if (!update.whole) {
      for (const std::string& peer : update.peers) {
        const Node& other = nodes_[peer.back() - '0'];
        if (!other.up || now_ < other.stopped_until ||
            other.updates.count(id) == 0) {
          missing = peer;
        }
      }
      if (missing.empty() && !update.peers.empty() &&
          random_.Chance(odds_.move_fails)) {
        missing = update.peers[static_cast<size_t>(
            random_.Below(static_cast<int64_t>(update.peers.size())))];
      }
    }
    v1::NodeReport report;
    v1::UpdateVerified* verified = report.mutable_update_verified();
    verified->set_model("models/m");
    verified->set_update_id(id);
    *verified->mutable_epoch() = epoch;
    if (!missing.empty()) {
      verified->mutable_failure()->set_code(14);
      verified->mutable_failure()->set_reason("EDGE_FAILED");
      verified->mutable_failure()->set_message("simulated");
      verified->set_edge_from(missing);
      verified->set_edge_to(node.name);
    } else {
      // What it keeps, if it is committed.
      update.whole = update.snapshot || (update.receiver && !update.stream);
    }
    Report(index, std::move(report));
  });
}

void World::OnEnd(int index, const v1::EndUpdate& end) {
  Node& node = nodes_[index];
  const std::string& id = end.update_id();
  // A fetch that is given up ends so too: the pieces that came may go. And
  // who has evicted it has nothing to lose.
  const auto held = node.updates.find(id);
  if (end.committed() ||
      (held != node.updates.end() && !held->second.fetched)) {
    checker_.ToldEnd(id, end.committed());
  }
  node.ended.insert(id);
  Release(index, id, end.committed() ? "" : "UPDATE_ABORTED");
  if (!end.committed()) AbortStream(index, id);
  for (auto it = node.snapshots.begin(); it != node.snapshots.end();) {
    it =
        it->second.update_id() == id ? node.snapshots.erase(it) : std::next(it);
  }
  auto update = node.updates.find(id);
  if (update == node.updates.end()) return;
  if (!end.committed() || !update->second.whole) {
    node.updates.erase(update);
    return;
  }
  update->second.kept = true;
  while (true) {
    int kept = 0;
    std::string oldest;
    for (const auto& each : node.updates) {
      if (!each.second.kept || node.pinned.count(each.first) != 0) continue;
      ++kept;
      if (oldest.empty() || each.second.order < node.updates[oldest].order) {
        oldest = each.first;
      }
    }
    if (kept <= kKeepUpdates) return;
    Evict(index, oldest);
  }
}

void World::Evict(int index, const std::string& id) {
  if (nodes_[index].updates.erase(id) == 0) return;
  Trace(nodes_[index].name, " gives up ", id);
  v1::NodeReport report;
  report.mutable_update_evicted()->set_model("models/m");
  report.mutable_update_evicted()->set_update_id(id);
  Report(index, std::move(report));
}

void World::Abandon(int index) {
  Node& node = nodes_[index];
  for (auto it = node.updates.begin(); it != node.updates.end();) {
    if (it->second.whole) {
      ++it;
    } else {
      node.ended.insert(it->first);
      Release(index, it->first, "UPDATE_ABORTED");
      AbortStream(index, it->first);
      it = node.updates.erase(it);
    }
  }
  GiveUpJobs(index);
}

void World::OnApply(int index, const Apply& apply) {
  const int e = apply->replica().back() - '0';
  const int w = apply->worker_index();
  Engine& engine = engines_[e];
  Worker& worker = engine.workers[w];
  if (worker.node != index || !worker.open ||
      engine.incarnation != apply->incarnation()) {
    return ApplyRefused(*apply, "WORKER_LOST", nullptr);
  }
  if (engine.node == index && engine.open &&
      engine.offer.pause().update_id() == apply->update_id()) {
    engine.commit = apply;
  }
  const auto streamed = nodes_[index].updates.find(apply->update_id());
  if (streamed != nodes_[index].updates.end()) {
    for (const Member& member : streamed->second.members) {
      if (member.engine != e || member.worker != w ||
          member.generation != worker.generation) {
        continue;
      }
      // It has every byte already.
      StartApply(e, w, apply);
      return Send(e, w, worker.generation,
                  Job{Job::kEndStream, apply, /*complete=*/true});
    }
  }
  // An engine that generates is not written to, where the node itself has let
  // it go.
  if (engine.node == index && engine.resumed_itself && !engine.told_paused &&
      !atomic_swap_) {
    return ApplyRefused(*apply, "REPLICA_RUNNING", &worker.told);
  }
  // From here on it may begin to write at any moment.
  StartApply(e, w, apply);
  // The plan is made and the bytes are looked up behind other commands.
  By(&nodes_[index], LocalDelay(&nodes_[index].last_data),
     [this, index, e, w, apply, generation = worker.generation] {
       Worker& worker = engines_[e].workers[w];
       if (!worker.open || worker.generation != generation ||
           worker.command_id != apply->command_id()) {
         return;
       }
       auto update = nodes_[index].updates.find(apply->update_id());
       if (update == nodes_[index].updates.end() || !update->second.whole) {
         worker.command_id.clear();
         return ApplyRefused(*apply, "UPDATE_UNKNOWN", &worker.told);
       }
       Send(e, w, generation, Job{Job::kApply, apply});
     });
}

void World::StartApply(int e, int w, const Apply& apply) {
  Worker& worker = engines_[e].workers[w];
  worker.command_id = apply->command_id();
  worker.command_update = apply->update_id();
  By(&nodes_[worker.node], absl::ToInt64Microseconds(options_.apply_timeout),
     [this, e, w, apply, generation = worker.generation] {
       Worker& worker = engines_[e].workers[w];
       if (!worker.open || worker.generation != generation ||
           worker.command_id != apply->command_id()) {
         return;
       }
       const Memory believed = Believed(worker);
       ApplyRefused(*apply, "APPLY_TIMEOUT", &believed);
       EndWorker(e, w, /*client_sees=*/true);
     });
}

// As an apply of nothing.
void World::OnRemove(int index, const v1::RemoveWorker& remove) {
  const int e = remove.replica().back() - '0';
  const int w = remove.worker_index();
  auto apply = std::make_shared<v1::ApplyWorker>();
  apply->set_model(remove.model());
  apply->set_replica(remove.replica());
  apply->set_worker_index(w);
  apply->set_incarnation(remove.incarnation());
  apply->set_command_id(remove.remove().command_id());
  Engine& engine = engines_[e];
  Worker& worker = engine.workers[w];
  if (worker.node != index || !worker.open || !worker.accepted ||
      engine.incarnation != remove.incarnation()) {
    return ApplyRefused(*apply, "WORKER_LOST", nullptr);
  }
  if (engine.node == index && engine.open && !engine.told_paused) {
    return ApplyRefused(*apply, "REPLICA_RUNNING", &worker.told);
  }
  StartApply(e, w, apply);
  Send(e, w, worker.generation, Job{Job::kRemove, std::move(apply)});
}

void World::ApplyRefused(const v1::ApplyWorker& apply,
                         const std::string& reason, const Memory* told) {
  const Engine& engine = engines_[apply.replica().back() - '0'];
  v1::NodeReport report;
  v1::WorkerAppliedReport* applied = report.mutable_worker_applied();
  applied->set_model("models/m");
  applied->set_replica(apply.replica());
  applied->set_worker_index(apply.worker_index());
  applied->set_incarnation(apply.incarnation());
  applied->set_update_id(apply.update_id());
  applied->set_command_id(apply.command_id());
  applied->mutable_failure()->set_code(5);
  applied->mutable_failure()->set_reason(reason);
  applied->mutable_failure()->set_message("simulated");
  applied->set_not_held(reason == "UPDATE_UNKNOWN");
  if (told != nullptr) *applied->mutable_installed() = ToProto(*told);
  Report(engine.workers[apply.worker_index()].node, std::move(report));
}

}  // namespace simulation
}  // namespace weightsync
