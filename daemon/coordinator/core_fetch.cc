// Bytes of a committed update come to nodes that lack them, from the nearest
// nodes that hold them, pinned there meanwhile.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/coordinator/core.h"
#include "schedule/stable_hash.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

// For so long other holders are tried before one that a fetch has failed from:
// what was wrong with the way may be mended.
constexpr absl::Duration kEdgeMemory = absl::Minutes(5);

std::string LabelOf(const NodeRun& node, const char* key) {
  auto it = node.hello.labels().find(key);
  return it == node.hello.labels().end() ? std::string() : it->second;
}

// Greater is nearer.
int Nearness(const NodeRun& a, const NodeRun& b) {
  int nearness = 3;
  for (const char* key : {"host", "rack", "zone"}) {
    const std::string label = LabelOf(a, key);
    if (!label.empty() && label == LabelOf(b, key)) return nearness;
    --nearness;
  }
  return 0;
}

}  // namespace

bool CoordinatorCore::EdgeFailed(
    const std::pair<std::string, std::string>& edge) const {
  const auto failed = failed_edges_.find(edge);
  return failed != failed_edges_.end() && now_ < failed->second + kEdgeMemory;
}

void CoordinatorCore::ForgetFailedEdges(const std::string& node) {
  for (auto it = failed_edges_.begin(); it != failed_edges_.end();) {
    const bool of_it = it->first.first == node || it->first.second == node;
    it = of_it ? failed_edges_.erase(it) : std::next(it);
  }
}

std::vector<Holdings> CoordinatorCore::HoldersFor(
    const CommittedUpdate& update, const std::string& target) const {
  const NodeRun& to = nodes_.at(target);
  struct Scored {
    int nearness;
    uint64_t lot;
    Holdings holdings;
  };
  std::vector<Scored> scored;
  for (const auto& entry : nodes_) {
    const NodeRun& node = entry.second;
    if (node.stream.empty() || node.draining || node.name == target) continue;
    const Holdings holdings(node, update);
    if (!holdings.any()) continue;
    // One that has just failed this node comes last.
    const bool failed = EdgeFailed({node.name, target});
    // Of those that are equally near each target has another first: many that
    // come at once (a cluster of engines that was started again) shall not all
    // be sent it by one.
    schedule::StableHash lot;
    lot.Add(absl::string_view(node.name));
    lot.Add(absl::string_view(target));
    scored.push_back(
        {Nearness(node, to) + (failed ? 0 : 10), lot.Finish(), holdings});
  }
  std::stable_sort(scored.begin(), scored.end(),
                   [](const Scored& a, const Scored& b) {
                     return a.nearness != b.nearness ? a.nearness > b.nearness
                                                     : a.lot < b.lot;
                   });
  std::vector<Holdings> holders;
  holders.reserve(scored.size());
  for (const Scored& holder : scored) holders.push_back(holder.holdings);
  return holders;
}

const NodeRun* CoordinatorCore::HolderOf(const std::vector<Holdings>& holders,
                                         uint32_t bucket) {
  for (const Holdings& holder : holders) {
    if (holder.Has(bucket)) return &holder.node();
  }
  return nullptr;
}

absl::optional<std::pair<std::string, uint32_t>> CoordinatorCore::Unheld(
    const CommittedUpdate& update,
    const std::map<std::string, std::set<uint32_t>>& missing) const {
  for (const auto& node : missing) {
    const std::vector<Holdings> holders = HoldersFor(update, node.first);
    for (const uint32_t bucket : node.second) {
      if (HolderOf(holders, bucket) == nullptr) {
        return std::make_pair(node.first, bucket);
      }
    }
  }
  return absl::nullopt;
}

void CoordinatorCore::TryFetch(ModelRun* model) {
  const CommittedUpdate* wanted = model->Wanted();
  if (wanted == nullptr || model->fetch != nullptr) return;
  const UpdateKey key = KeyOf(wanted->update_id);
  std::map<std::string, std::set<uint32_t>> lacking;
  for (auto& entry : model->replicas) {
    ReplicaRun& replica = entry.second;
    std::map<std::string, std::set<uint32_t>> missing;
    if (replica.installing != key || !replica.machine.Complete() ||
        !Missing(replica, *wanted, &missing)) {
      continue;
    }
    for (const auto& node : missing) {
      lacking[node.first].insert(node.second.begin(), node.second.end());
    }
  }
  auto fetch = std::make_unique<FetchRun>();
  fetch->update = key;
  fetch->of = *wanted;
  fetch->epoch = ++model->epoch;
  fetch->secret = options_.random_id();
  fetch->deadline = now_ + options_.prepare_timeout;
  for (const auto& node : lacking) {
    std::map<std::string, std::vector<uint32_t>> from;
    bool complete = true;
    const std::vector<Holdings> holders = HoldersFor(*wanted, node.first);
    for (const uint32_t bucket : node.second) {
      const NodeRun* holder = HolderOf(holders, bucket);
      complete = complete && holder != nullptr;
      if (holder != nullptr) from[holder->name].push_back(bucket);
    }
    if (!complete) continue;
    for (const auto& holder : from) {
      v1::Flow flow;
      flow.set_flow_id(absl::StrCat("fetch/", holder.first, "/", node.first));
      for (const std::string& name : {holder.first, node.first}) {
        v1::FlowMember* member = flow.add_members();
        member->set_node(name);
        member->set_data_address(nodes_.at(name).hello.data_address());
      }
      for (const uint32_t bucket : holder.second) {
        flow.add_buckets(static_cast<int32_t>(bucket));
      }
      fetch->flows.push_back(std::move(flow));
      fetch->holders.insert(holder.first);
      fetch->preparing.insert(holder.first);
    }
    fetch->targets.insert(node.first);
    fetch->preparing.insert(node.first);
  }
  if (fetch->targets.empty()) return;
  model->fetch = std::move(fetch);
  for (const std::string& holder : model->fetch->holders) {
    Pin(model, holder, wanted->update_id, true);
  }
  const std::set<std::string> told = model->fetch->preparing;
  for (const std::string& node : told) SendFetchPrepare(model, node);
}

void CoordinatorCore::SendFetchPrepare(ModelRun* model,
                                       const std::string& name) {
  const FetchRun& fetch = *model->fetch;
  SendLayout(*fetch.of.layout, name);
  v1::PrepareUpdate* prepare = SendTo(name)->mutable_prepare_update();
  prepare->set_model(model->name);
  prepare->set_update_id(fetch.of.update_id);
  prepare->set_version(fetch.of.version);
  prepare->set_step(fetch.of.step);
  prepare->set_layout_id(fetch.of.layout_id);
  prepare->mutable_epoch()->set_term(term_);
  prepare->mutable_epoch()->set_counter(fetch.epoch);
  prepare->set_group_secret(fetch.secret);
  *prepare->mutable_timeout() = ToProto(options_.prepare_timeout);
  prepare->set_fetch(true);
  prepare->set_update_mode(v1::UPDATE_MODE_STAGE);
  prepare->set_publish_mode(v1::PUBLISH_MODE_SNAPSHOT);
  for (const v1::Flow& flow : fetch.flows) {
    if (flow.members(0).node() == name || flow.members(1).node() == name) {
      *prepare->add_flows() = flow;
    }
  }
}

bool CoordinatorCore::FetchPrepared(ModelRun* model, const std::string& node,
                                    const v1::UpdatePrepared& report) {
  FetchRun* fetch = model->fetch.get();
  if (fetch == nullptr || report.update_id() != fetch->of.update_id ||
      report.epoch().counter() != fetch->epoch) {
    return false;
  }
  Fault fault = FromProto(report.failure());
  if (!fault.ok()) {
    fault.message = SaidBy(absl::StrCat("node ", node), fault.message);
    FetchFailed(model, node, fault);
    return true;
  }
  fetch->preparing.erase(node);
  // It has room for it now. Once whole it is one of the older ones in its
  // store, and would be the first to be evicted.
  if (fetch->targets.count(node) != 0) {
    Pin(model, node, fetch->of.update_id, true);
  }
  MoveFetch(model);
  return true;
}

void CoordinatorCore::MoveFetch(ModelRun* model) {
  FetchRun* fetch = model->fetch.get();
  if (fetch->moving || !fetch->preparing.empty()) return;
  fetch->moving = true;
  fetch->deadline = now_ + 2 * options_.progress_timeout;
  std::set<std::string> members = fetch->holders;
  members.insert(fetch->targets.begin(), fetch->targets.end());
  for (const std::string& member : members) {
    v1::MoveUpdate* move = SendTo(member)->mutable_move_update();
    move->set_model(model->name);
    move->set_update_id(fetch->of.update_id);
    move->mutable_epoch()->set_term(term_);
    move->mutable_epoch()->set_counter(fetch->epoch);
    *move->mutable_progress_timeout() = ToProto(options_.progress_timeout);
    v1::UpdateManifest* manifest = SendTo(member)->mutable_update_manifest();
    manifest->set_model(model->name);
    manifest->set_update_id(fetch->of.update_id);
    for (const v1::BucketDigest& bucket : fetch->of.manifest) {
      *manifest->add_buckets() = bucket;
    }
  }
}

bool CoordinatorCore::FetchProgress(ModelRun* model, const std::string& node,
                                    const v1::UpdateProgress& report) {
  FetchRun* fetch = model->fetch.get();
  if (fetch == nullptr || report.update_id() != fetch->of.update_id) {
    return false;
  }
  int64_t& received = fetch->received_bytes[node];
  if (report.received_bytes() > received) {
    received = report.received_bytes();
    fetch->deadline = now_ + 2 * options_.progress_timeout;
  }
  return true;
}

bool CoordinatorCore::FetchVerified(ModelRun* model, const std::string& name,
                                    const v1::UpdateVerified& report) {
  FetchRun* fetch = model->fetch.get();
  if (fetch == nullptr || report.update_id() != fetch->of.update_id ||
      report.epoch().counter() != fetch->epoch) {
    return false;
  }
  Fault fault = FromProto(report.failure());
  if (!fault.ok()) {
    fault.message = SaidBy(absl::StrCat("node ", name), fault.message);
    if (!report.edge_from().empty()) {
      failed_edges_[{report.edge_from(), report.edge_to()}] = now_;
      fault.message = absl::StrCat("edge ", report.edge_from(), " -> ",
                                   report.edge_to(), ": ", fault.message);
    }
    // A holder tells of the edge; the target at its end is who lacks bytes.
    const bool of_target = fetch->targets.count(report.edge_to()) != 0;
    FetchFailed(model, of_target ? report.edge_to() : name, fault);
    return true;
  }
  if (fetch->targets.erase(name) == 0) return true;  // a holder's, or again
  NodeRun* node = FindNode(name);
  const std::string update_id = fetch->of.update_id;
  if (!node->Holds(update_id)) {
    node->held.emplace_back(model->name, update_id);
  }
  for (const v1::Flow& flow : fetch->flows) {
    if (flow.members(1).node() != name) continue;
    failed_edges_.erase({flow.members(0).node(), name});
    for (const int32_t bucket : flow.buckets()) {
      node->fetched[update_id].insert(static_cast<uint32_t>(bucket));
    }
  }
  fetch->done.insert(name);
  Pin(model, name, update_id, true);
  NodeHasNews(name);
  // The others lack what they lacked, unless another fetch can begin.
  if (fetch->targets.empty()) {
    EndFetch(model);
    SettleAll(model);
  } else {
    for (ReplicaRun* replica : ReplicasOn(model, name)) Settle(replica);
  }
  return true;
}

void CoordinatorCore::FetchFailed(ModelRun* model, const std::string& name,
                                  const Fault& fault) {
  FetchRun* fetch = model->fetch.get();
  if (fetch == nullptr) return;
  std::set<std::string> failed;
  if (fetch->holders.count(name) != 0) {
    for (const v1::Flow& flow : fetch->flows) {
      const std::string& target = flow.members(1).node();
      if (flow.members(0).node() != name || fetch->targets.count(target) == 0) {
        continue;
      }
      failed_edges_[{name, target}] = now_;
      failed.insert(target);
    }
    fetch->preparing.erase(name);
  }
  if (fetch->targets.count(name) != 0) {
    for (const v1::Flow& flow : fetch->flows) {
      if (flow.members(1).node() == name) {
        failed_edges_[{flow.members(0).node(), name}] = now_;
      }
    }
    failed.insert(name);
  }
  for (const std::string& target : failed) {
    fetch->targets.erase(target);
    fetch->preparing.erase(target);
    EndFetchOn(model, *fetch, target, fault);
  }
  const UpdateKey key = fetch->update;
  if (fetch->targets.empty()) {
    EndFetch(model);
  } else {
    MoveFetch(model);
  }
  for (auto& entry : model->replicas) {
    ReplicaRun& replica = entry.second;
    const ReplicaEntry* known =
        registry_.FindReplica(model->name, replica.name);
    if (replica.installing != key || known == nullptr) continue;
    const bool on_it = std::any_of(
        known->workers.begin(), known->workers.end(),
        [&](const WorkerEntry& w) { return failed.count(w.node) != 0; });
    if (on_it) InstallFailed(&replica, fault);
  }
  if (model->fetch == nullptr) SettleAll(model);
}

void CoordinatorCore::EndFetchOn(ModelRun* model, const FetchRun& fetch,
                                 const std::string& name, const Fault& fault) {
  const NodeRun* node = FindNode(name);
  // What it had before stays.
  const bool holds = node != nullptr && node->Holds(fetch.of.update_id);
  v1::EndUpdate* end = SendTo(name)->mutable_end_update();
  end->set_model(model->name);
  end->set_update_id(fetch.of.update_id);
  end->set_committed(holds);
  if (!fault.ok()) *end->mutable_failure() = ToProto(fault);
  // With what it had of it the node gives up the pin: the next fetch has it
  // pinned anew.
  if (!holds) model->pins.erase({name, fetch.of.update_id});
}

void CoordinatorCore::EndFetch(ModelRun* model) {
  const std::unique_ptr<FetchRun> fetch = std::move(model->fetch);
  std::set<std::string> members = fetch->holders;
  members.insert(fetch->targets.begin(), fetch->targets.end());
  members.insert(fetch->done.begin(), fetch->done.end());
  for (const std::string& member : members) {
    EndFetchOn(model, *fetch, member, Fault());
  }
  Unpin(model);
}

void CoordinatorCore::TickFetch(ModelRun* model) {
  FetchRun* fetch = model->fetch.get();
  if (fetch == nullptr) return;
  const UpdateKey key = fetch->update;
  const bool wanted =
      std::any_of(model->replicas.begin(), model->replicas.end(),
                  [key](const auto& r) { return r.second.installing == key; });
  if (!wanted) {
    EndFetch(model);
    SettleAll(model);
    return;
  }
  if (now_ < fetch->deadline) return;
  const bool preparing = !fetch->moving;
  const std::set<std::string> late =
      preparing ? fetch->preparing : fetch->targets;
  const Fault fault(
      StatusCode::kDeadlineExceeded,
      preparing ? "PREPARE_TIMEOUT" : "PROGRESS_TIMEOUT",
      absl::StrCat(preparing ? "not ready to send or receive version "
                             : "no bytes came in of version ",
                   fetch->of.version, " of ", model->name, ": node ",
                   absl::StrJoin(late, ", ")));
  for (const std::string& node : late) FetchFailed(model, node, fault);
}

void CoordinatorCore::Pin(ModelRun* model, const std::string& node,
                          const std::string& update_id, bool pin) {
  const std::pair<std::string, std::string> key(node, update_id);
  if (pin ? !model->pins.insert(key).second : model->pins.erase(key) == 0) {
    return;
  }
  SendPin(model->name, node, update_id, pin);
}

void CoordinatorCore::SendPin(const std::string& model, const std::string& node,
                              const std::string& update_id, bool pin) {
  v1::PinUpdate* out = SendTo(node)->mutable_pin_update();
  out->set_model(model);
  out->set_update_id(update_id);
  out->set_pin(pin);
}

void CoordinatorCore::ForgetHeld(NodeRun* node, const std::string& name,
                                 const std::string& update_id) {
  node->fetched.erase(update_id);
  node->held.erase(std::remove(node->held.begin(), node->held.end(),
                               std::make_pair(name, update_id)),
                   node->held.end());
  // A pin that came too late holds nothing.
  auto model = models_.find(name);
  if (model != models_.end()) model->second.pins.erase({node->name, update_id});
}

void CoordinatorCore::Unpin(ModelRun* model) {
  std::set<std::pair<std::string, std::string>> needed;
  for (const auto& entry : model->replicas) {
    if (entry.second.installing <= 0) continue;
    const ReplicaEntry* replica =
        registry_.FindReplica(model->name, entry.first);
    if (replica == nullptr) continue;
    for (const WorkerEntry& worker : replica->workers) {
      needed.insert({worker.node, IdOf(entry.second.installing)});
    }
  }
  if (model->fetch != nullptr) {
    for (const auto* nodes : {&model->fetch->holders, &model->fetch->targets,
                              &model->fetch->done}) {
      for (const std::string& node : *nodes) {
        needed.insert({node, model->fetch->of.update_id});
      }
    }
  }
  const auto pins = model->pins;
  for (const auto& pin : pins) {
    if (needed.count(pin) != 0 || pin.second == model->held_update_id) continue;
    Pin(model, pin.first, pin.second, false);
  }
}

}  // namespace daemon
}  // namespace weightsync
