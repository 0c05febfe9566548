// What nobody names any more is forgotten: replicas and nodes that left long
// ago, layouts, keys of updates, requests, edges that failed. A pass over all
// of it takes long where there is much, and is made now and then.

#include <algorithm>
#include <set>
#include <string>

#include "daemon/coordinator/core.h"

namespace weightsync {
namespace daemon {

namespace {

constexpr absl::Duration kInterval = absl::Seconds(10);

}  // namespace

void CoordinatorCore::Forget() {
  if (now_ < forget_time_) return;
  forget_time_ = now_ + kInterval;
  ++collections_;
  for (auto& entry : models_) ForgetReplicas(&entry.second);
  ForgetNodes();
  ForgetUnnamed();
  journal_.requests.ForgetUntil(now_ - options_.request_ttl);
}

void CoordinatorCore::ForgetReplicas(ModelRun* model) {
  if (now_ - start_time_ >= options_.lost_replica_ttl) {
    model->unseen_replicas.clear();
  }
  for (auto it = model->replicas.begin(); it != model->replicas.end();) {
    ReplicaRun& run = it->second;
    const ReplicaEntry* replica = registry_.FindReplica(model->name, it->first);
    if (replica != nullptr && !replica->Empty()) {
      run.empty_since = absl::InfiniteFuture();
      ++it;
      continue;
    }
    const absl::Time since = run.lost ? run.lost_time : now_;
    run.empty_since = std::min(run.empty_since, since);
    if (now_ - run.empty_since < options_.lost_replica_ttl) {
      ++it;
      continue;
    }
    registry_.ForgetReplica(model->name, it->first);
    it = model->replicas.erase(it);
  }
}

void CoordinatorCore::ForgetNodes() {
  std::set<std::string> named = registry_.NamedNodes();
  named.insert(journal_.drained.begin(), journal_.drained.end());
  for (const auto& entry : models_) {
    const ModelRun& model = entry.second;
    for (const auto& update : model.updates) {
      for (const UpdateNode& node : update->machine.nodes) {
        named.insert(node.name);
      }
    }
    if (model.fetch != nullptr) {
      for (const v1::Flow& flow : model.fetch->flows) {
        for (const auto& member : flow.members()) named.insert(member.node());
      }
    }
    for (const auto& pin : model.pins) named.insert(pin.first);
    for (const auto& replica : model.replicas) {
      for (const auto& away : replica.second.away) named.insert(away.first);
    }
    if (model.prepare != nullptr) {
      named.insert(model.prepare->waiting.begin(),
                   model.prepare->waiting.end());
    }
    for (const auto& load : model.loads) named.insert(load->node);
  }
  for (const auto& checkpoint : checkpoints_) {
    for (const CheckpointRun::Writer& writer : checkpoint.second->writers) {
      named.insert(writer.node);
    }
  }
  for (auto it = nodes_.begin(); it != nodes_.end();) {
    const NodeRun& node = it->second;
    const bool old =
        node.lost && now_ - node.lost_time >= options_.lost_replica_ttl;
    it = old && named.count(it->first) == 0 ? nodes_.erase(it) : std::next(it);
  }
  for (auto it = failed_edges_.begin(); it != failed_edges_.end();) {
    it = EdgeFailed(it->first) ? std::next(it) : failed_edges_.erase(it);
  }
}

void CoordinatorCore::ForgetUnnamed() {
  std::set<std::string> named;
  std::set<UpdateKey> used = {0};
  const auto use = [&](const std::string& update_id) {
    used.insert(FindKey(update_id));
  };
  for (const auto& entry : models_) {
    const ModelRun& model = entry.second;
    for (const CommittedUpdate& commit : model.commits) {
      named.insert(commit.layout_id);
      use(commit.update_id);
    }
    for (const auto& update : model.updates) {
      named.insert(update->record.layout_id());
      used.insert(update->key);
    }
    for (std::string& id : model.layouts.ids()) named.insert(std::move(id));
    if (model.fetch != nullptr) used.insert(model.fetch->update);
    for (const v1::Version& version : model.ended) use(version.update_id());
    for (const auto& replica : model.replicas) {
      const ReplicaState& machine = replica.second.machine;
      used.insert({machine.target, machine.served.update,
                   replica.second.installing, replica.second.given_up});
      for (const ReplicaWorker& worker : machine.workers) {
        used.insert(worker.content.update);
      }
      for (const Holder& holder : machine.holders) used.insert(holder.update);
      for (const v1::ReplicaTimes& times : replica.second.history) {
        use(times.update_id());
      }
    }
  }
  for (const AdminWait& wait : waits_) used.insert(wait.update);
  for (auto it = layouts_.begin(); it != layouts_.end();) {
    it = named.count(it->first) == 0 ? layouts_.erase(it) : std::next(it);
  }
  needs_.Keep(named, registry_.RegistrationNumbers());
  for (auto it = ids_.begin(); it != ids_.end();) {
    if (used.count(it->first) != 0) {
      ++it;
      continue;
    }
    told_versions_.erase(it->first);
    keys_.erase(it->second);
    it = ids_.erase(it);
  }
}

}  // namespace daemon
}  // namespace weightsync
