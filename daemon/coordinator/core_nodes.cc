// The daemons of the cluster: who may join, what it says that it has, and what
// becomes of those who wait for it when it is lost.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/core.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

constexpr int kProtocolVersion = 1;

}  // namespace

Fault CoordinatorCore::CheckHello(const v1::Hello& hello) {
  if (!IsShortName(hello.node(), false)) {
    return Fault(StatusCode::kInvalidArgument, "NODE_NAME_INVALID",
                 absl::StrCat("\"", hello.node(),
                              "\" is not 1 to 63 of [a-z0-9._-]; give another "
                              "--node"));
  }
  if (hello.protocol_version() != kProtocolVersion) {
    return Fault(StatusCode::kFailedPrecondition, "PROTOCOL_UNSUPPORTED",
                 absl::StrCat("node ", hello.node(), " speaks protocol ",
                              hello.protocol_version(), ", this coordinator ",
                              kProtocolVersion));
  }
  if (!hello.cluster_id().empty() && hello.cluster_id() != cluster_id_ &&
      journal_.former_clusters.count(hello.cluster_id()) == 0) {
    if (fresh_ || !lost_evidence_.empty()) {
      JournalLost(absl::StrCat("node ", hello.node(), " belongs to cluster ",
                               hello.cluster_id(),
                               ", of which this coordinator's journal knows "
                               "nothing"));
      seen_clusters_.insert(hello.cluster_id());
      seen_term_ = std::max(seen_term_, hello.newest_term());
      return LostFault();
    }
    return Fault(StatusCode::kFailedPrecondition, "CLUSTER_MISMATCH",
                 absl::StrCat("node ", hello.node(), " belongs to cluster ",
                              hello.cluster_id(), ", this coordinator to ",
                              cluster_id_));
  }
  if (hello.newest_term() > term_) {
    JournalLost(absl::StrCat(
        "node ", hello.node(), " has seen term ", hello.newest_term(),
        " of this cluster, this journal only term ", term_));
    seen_clusters_.insert(hello.cluster_id().empty() ? cluster_id_
                                                     : hello.cluster_id());
    seen_term_ = std::max(seen_term_, hello.newest_term());
    return LostFault();
  }
  const NodeRun* known = FindNode(hello.node());
  if (known != nullptr && !known->stream.empty() &&
      known->hello.incarnation() != hello.incarnation()) {
    return Fault(StatusCode::kAlreadyExists, "NODE_TAKEN",
                 absl::StrCat("a live daemon calls itself node ", hello.node(),
                              "; give one of the two another --node"));
  }
  return Fault();
}

void CoordinatorCore::Hello(const std::string& stream, const v1::Hello& hello) {
  const Fault fault = CheckHello(hello);
  if (!fault.ok()) return Close(stream, fault);
  NodeRun& node = nodes_[hello.node()];
  if (!node.name.empty() && !node.lost &&
      node.hello.incarnation() != hello.incarnation()) {
    LoseNode(&node, Fault(StatusCode::kUnavailable, "NODE_LOST",
                          absl::StrCat("the daemon of node ", node.name,
                                       " was started again")));
  }
  if (!node.stream.empty() && node.stream != stream) {
    // The same daemon dials again before the old stream was seen to break.
    const std::string old = node.stream;
    streams_.erase(old);
    Close(old, Fault(StatusCode::kAborted, "STREAM_REPLACED",
                     absl::StrCat("node ", node.name, " opened another")));
  }
  node.name = hello.node();
  node.hello = hello;
  node.stream = stream;
  node.ready = false;
  node.lost = false;
  node.connect_time = now_;
  node.last_report = now_;
  node.last_heartbeat = now_;
  node.memory = hello.memory();
  node.held.clear();
  node.draining = journal_.drained.count(node.name) != 0;
  for (const v1::HeldUpdate& held : hello.held_updates()) {
    node.held.emplace_back(held.model(), held.update_id());
    LearnFrom(held);
  }
  for (auto it = node.fetched.begin(); it != node.fetched.end();) {
    it = node.Holds(it->first) ? std::next(it) : node.fetched.erase(it);
  }
  node.layouts.clear();
  node.said.clear();
  streams_[stream] = node.name;
  NoteNamed(node.name);
  NodeHasNews(node.name);
  ForgetFailedEdges(node.name);

  v1::Welcome* welcome = SendTo(node.name)->mutable_welcome();
  welcome->set_cluster_id(cluster_id_);
  welcome->set_term(term_);
  welcome->set_coordinator(absl::StrCat("nodes/", options_.coordinator_node));
  *welcome->mutable_heartbeat_interval() = ToProto(options_.heartbeat_interval);
  *welcome->mutable_heartbeat_timeout() = ToProto(options_.heartbeat_timeout);
  SendEnds(&node);
  SendPins(node);
}

void CoordinatorCore::SendPins(const NodeRun& node) {
  // Also what is not pinned any more: the word of it may have been lost, or was
  // never given, by a coordinator that has begun anew or had lost the node.
  for (const auto& held : node.held) {
    auto model = models_.find(held.first);
    bool pinned = false;
    if (model != models_.end()) {
      if (model->second.held_update_id == held.second) {
        model->second.pins.insert({node.name, held.second});
      }
      pinned = model->second.pins.count({node.name, held.second}) != 0;
    }
    SendPin(held.first, node.name, held.second, pinned);
  }
}

void CoordinatorCore::SendEnds(NodeRun* node) {
  for (const auto& entry : models_) {
    const ModelRun& model = entry.second;
    for (const v1::EndUpdate& forgotten : model.forgotten) {
      *SendTo(node->name)->mutable_end_update() = forgotten;
    }
    std::set<std::string> told;
    const auto end = [&](const std::string& update_id, bool committed,
                         const v1::Failure& failure) {
      told.insert(update_id);
      v1::EndUpdate* out = SendTo(node->name)->mutable_end_update();
      out->set_model(model.name);
      out->set_update_id(update_id);
      out->set_committed(committed);
      if (!committed) *out->mutable_failure() = failure;
    };
    const int from =
        std::max(0, static_cast<int>(model.ended.size()) - kEndsTold);
    for (size_t i = from; i < model.ended.size(); ++i) {
      const v1::Version& version = model.ended[i];
      end(version.update_id(), model.FindCommit(version.update_id()) != nullptr,
          version.failure());
    }
    for (const auto& update : model.updates) {
      if (update->recovered) end(update->update_id, true, v1::Failure());
    }
    if (now_ < adopting_until_) continue;
    if (model.removed) {
      for (const v1::HeldUpdate& held : node->hello.held_updates()) {
        if (held.model() == model.name && node->Holds(held.update_id()) &&
            model.FindUpdate(held.update_id()) == nullptr) {
          const bool told =
              std::any_of(model.forgotten.begin(), model.forgotten.end(),
                          [&held](const v1::EndUpdate& forgotten) {
                            return forgotten.update_id() == held.update_id();
                          });
          if (!told) SayUnknown(node->name, model.name, held.update_id());
          DropHeld(node, model.name, held.update_id());
        }
      }
      continue;
    }
    // What else it holds: it may have been away when it ended, long ago, or
    // under the journal before an adopted one. An update of which a node is
    // told nothing is kept there for ever, and where there is room for two, no
    // other finds any. What the node knows to be committed it does not drop.
    for (const v1::HeldUpdate& held : node->hello.held_updates()) {
      const std::string& id = held.update_id();
      if (held.model() != model.name || !node->Holds(id) ||
          told.count(id) != 0 || model.FindUpdate(id) != nullptr) {
        continue;
      }
      if (model.FindCommit(id) != nullptr) {
        end(id, true, v1::Failure());
        continue;
      }
      end(id, false,
          ToProto(
              Fault(StatusCode::kAborted, "UPDATE_ABORTED",
                    absl::StrCat("version ", held.version(), " of ", model.name,
                                 " is not known to be committed"))));
    }
  }
}

bool CoordinatorCore::Named(const ReplicaRun& replica) {
  const ReplicaEntry* entry =
      registry_.FindReplica(replica.model, replica.name);
  if (entry == nullptr) return true;
  const auto speaks = [this](const std::string& name) {
    const NodeRun* node = ConnectedNode(name);
    return node != nullptr && !node->ready;
  };
  return !speaks(entry->node) &&
         std::none_of(entry->workers.begin(), entry->workers.end(),
                      [&speaks](const WorkerEntry& worker) {
                        return speaks(worker.node);
                      });
}

void CoordinatorCore::NoteNamed(const std::string& node) {
  for (auto& model : models_) {
    for (auto& replica : model.second.replicas) {
      const ReplicaEntry* entry =
          registry_.FindReplica(model.first, replica.first);
      if (entry == nullptr) continue;
      const bool on_it =
          entry->node == node ||
          std::any_of(entry->workers.begin(), entry->workers.end(),
                      [&node](const WorkerEntry& w) { return w.node == node; });
      if (on_it) replica.second.machine.named = Named(replica.second);
    }
  }
}

void CoordinatorCore::HelloDone(NodeRun* node) {
  node->ready = true;
  NoteNamed(node->name);
  // What it did not name has ended while the stream was down.
  for (auto& entry : models_) {
    LoseParts(*node, entry.first, /*unsaid=*/true,
              Fault(StatusCode::kUnavailable, "NODE_LOST",
                    absl::StrCat("it ended while node ", node->name,
                                 " was not connected")));
    for (auto& replica : entry.second.replicas) {
      replica.second.not_before = absl::InfinitePast();
      Settle(&replica.second);
      // What has waited for this is sent now.
      Step(&replica.second, ReplicaEvent());
    }
  }
  NoteBack(node->name);
  SayCheckpointsAgain(node->name);
  UpdateEvent back;
  back.kind = UpdateEvent::kNodeBack;
  PostNode(node->name, back);
}

void CoordinatorCore::Disconnected(NodeRun* node) {
  NoteAway(*node);
  streams_.erase(node->stream);
  node->stream.clear();
  node->ready = false;
  NoteNamed(node->name);
  node->lost_time = now_ + options_.node_reconnect_grace;
}

void CoordinatorCore::LoseParts(const NodeRun& node, const std::string& model,
                                bool unsaid, const Fault& fault) {
  const auto stays = [&](const std::string& what) {
    return unsaid && node.said.count(what) != 0;
  };
  // What is lost here is lost in the registry: names, and no pointers.
  const Registry::Parts parts = registry_.PartsOf(model, node.name);
  for (const Registry::Parts::Rank& rank : parts.ranks) {
    if (stays(absl::StrCat("rank/", model, "/", rank.rank))) continue;
    LoseRank(
        model, rank.rank, rank.session,
        Fault(StatusCode::kAborted, "RANK_LOST",
              absl::StrCat("rank ", rank.rank, " has gone: ", fault.message)));
  }
  for (const Registry::Parts::Replica& replica : parts.replicas) {
    const std::string key = absl::StrCat(model, "/", replica.name);
    if (replica.control && !stays(absl::StrCat("replica/", key))) {
      LoseControl(model, replica.name, replica.incarnation, fault);
    }
    for (const int worker : replica.workers) {
      if (stays(absl::StrCat("worker/", key, "/", worker))) continue;
      LoseWorker(model, replica.name, worker, replica.incarnation, fault);
    }
  }
}

void CoordinatorCore::LoseNode(NodeRun* node, const Fault& fault) {
  if (node->lost) return;
  node->lost = true;
  node->held.clear();
  node->fetched.clear();
  LOG(WARNING) << fault.message;
  LoseCheckpoints(node->name, fault);
  UpdateEvent lost;
  lost.kind = UpdateEvent::kNodeLost;
  lost.fault = fault;
  PostNode(node->name, lost);
  for (auto& entry : models_) {
    FetchFailed(&entry.second, node->name, fault);
    for (auto it = entry.second.pins.begin(); it != entry.second.pins.end();) {
      it =
          it->first == node->name ? entry.second.pins.erase(it) : std::next(it);
    }
    LoseParts(*node, entry.first, /*unsaid=*/false, fault);
    if (entry.second.prepare != nullptr &&
        entry.second.prepare->waiting.count(node->name) != 0) {
      EndPrepare(&entry.second, fault);
    }
  }
}

}  // namespace daemon
}  // namespace weightsync
