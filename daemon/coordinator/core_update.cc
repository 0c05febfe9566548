// Events for the update machine, and what its actions mean.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/core.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

// For the machine, of what a node reports.
Fault OnNode(const v1::Failure& failure, const std::string& node) {
  Fault fault = FromProto(failure);
  if (!fault.ok()) {
    fault.message = absl::StrCat("node ", node, ": ", fault.message);
  }
  return fault;
}

}  // namespace

UpdateRun* CoordinatorCore::Running(const std::string& model,
                                    const std::string& update_id) {
  auto it = models_.find(model);
  if (it == models_.end() || it->second.running == nullptr ||
      it->second.running->update_id != update_id ||
      it->second.running->recovered) {
    return nullptr;
  }
  return it->second.running.get();
}

v1::Version* CoordinatorCore::FindRecord(ModelRun* model,
                                         const std::string& update_id) {
  if (model->running != nullptr && model->running->update_id == update_id) {
    return &model->running->record;
  }
  for (auto it = model->ended.rbegin(); it != model->ended.rend(); ++it) {
    if (it->update_id() == update_id) return &*it;
  }
  return nullptr;
}

// ---- Events ----

void CoordinatorCore::Post(const std::string& model, UpdateEvent event) {
  const UpdateRun* running = Model(model)->running.get();
  if (running == nullptr) return;
  queue_.push_back({model, running->key, std::move(event)});
}

void CoordinatorCore::PostNode(const std::string& node, UpdateEvent event) {
  for (const auto& entry : models_) {
    const UpdateRun* running = entry.second.running.get();
    if (running == nullptr || running->layout == nullptr) continue;
    auto it = running->layout->node_index.find(node);
    if (it == running->layout->node_index.end() ||
        static_cast<size_t>(it->second) >= running->machine.nodes.size()) {
      continue;
    }
    event.node = it->second;
    Post(entry.first, event);
  }
}

void CoordinatorCore::PostReplica(const ReplicaRun& replica,
                                  UpdateEvent event) {
  auto it = models_.find(replica.model);
  if (it == models_.end() || it->second.running == nullptr) return;
  auto index = it->second.running->replica_index.find(replica.name);
  if (index == it->second.running->replica_index.end()) return;
  event.replica = index->second;
  Post(replica.model, std::move(event));
}

void CoordinatorCore::Drain() {
  while (!queue_.empty()) {
    const Posted next = std::move(queue_.front());
    queue_.pop_front();
    ModelRun* model = Model(next.model);
    if (model->running == nullptr || model->running->key != next.update) {
      continue;
    }
    UpdateRun& run = *model->running;
    Carry(model, StepUpdate(run.config, next.event, now_, &run.machine));
  }
}

void CoordinatorCore::RankSnapshotted(const v1::RankSnapshotted& report) {
  UpdateRun* update = Running(report.model(), report.update_id());
  if (update == nullptr) return;
  auto index = update->rank_index.find(report.rank());
  if (index == update->rank_index.end()) return;
  UpdateRank& rank = update->machine.ranks[index->second];
  UpdateEvent event;
  event.kind = UpdateEvent::kRankCopied;
  event.rank = index->second;
  event.fault = FromProto(report.failure());
  if (!event.fault.ok()) {
    event.fault.message = absl::StrCat("rank ", report.rank(), " on node ",
                                       update->machine.nodes[rank.node].name,
                                       ": ", event.fault.message);
  } else if (!rank.copied) {
    for (const v1::BucketDigest& bucket : report.buckets()) {
      update->manifest.push_back(bucket);
    }
    for (v1::RankProgress& progress : *update->record.mutable_ranks()) {
      if (progress.rank() != report.rank()) continue;
      *progress.mutable_snapshot_time() = ToProto(now_);
      *progress.mutable_copy_duration() = report.copy_duration();
      progress.set_copied_bytes(report.copied_bytes());
    }
    bool journalled = false;
    for (auto& entry : journal_.requests) {
      JournalRequest& request = entry.second;
      if (request.opened.update_id() != report.update_id() ||
          request.opened.rank() != report.rank()) {
        continue;
      }
      request.copied = true;
      request.copied_bytes = report.copied_bytes();
      request.copy_duration = FromProto(report.copy_duration());
      journalled = true;
    }
    if (journalled) {
      auto* copied = Write()->mutable_rank_copied();
      copied->set_model(report.model());
      copied->set_rank(report.rank());
      copied->set_update_id(report.update_id());
      copied->set_copied_bytes(report.copied_bytes());
      *copied->mutable_copy_duration() = report.copy_duration();
    }
    Changed(update->record);
  }
  Post(report.model(), std::move(event));
}

void CoordinatorCore::UpdatePrepared(const std::string& node,
                                     const v1::UpdatePrepared& report) {
  if (report.epoch().term() != term_) return;
  UpdateRun* update = Running(report.model(), report.update_id());
  if (update == nullptr) {
    auto it = models_.find(report.model());
    if (it != models_.end()) DryPrepared(&it->second, node, report);
    return;
  }
  auto index = update->layout->node_index.find(node);
  if (index == update->layout->node_index.end()) return;
  UpdateEvent event;
  event.kind = UpdateEvent::kNodePrepared;
  event.node = index->second;
  event.epoch = report.epoch().counter();
  event.fault = OnNode(report.failure(), node);
  Post(report.model(), std::move(event));
}

void CoordinatorCore::UpdateProgress(const std::string& node,
                                     const v1::UpdateProgress& report) {
  UpdateRun* update = Running(report.model(), report.update_id());
  if (update == nullptr) return;
  auto index = update->layout->node_index.find(node);
  if (index == update->layout->node_index.end()) return;
  int64_t moved = 0;
  for (v1::NodeProgress& progress : *update->record.mutable_nodes()) {
    if (progress.node() == node) {
      progress.set_received_bytes(
          std::max(progress.received_bytes(), report.received_bytes()));
      progress.set_repaired_frames(
          std::max(progress.repaired_frames(), report.repaired_frames()));
    }
    moved += progress.received_bytes();
  }
  update->record.set_moved_bytes(moved);
  Changed(update->record);
  UpdateEvent event;
  event.kind = UpdateEvent::kNodeProgress;
  event.node = index->second;
  event.bytes = report.received_bytes();
  Post(report.model(), std::move(event));
}

void CoordinatorCore::UpdateVerified(const std::string& node,
                                     const v1::UpdateVerified& report) {
  if (report.epoch().term() != term_) return;
  UpdateRun* update = Running(report.model(), report.update_id());
  if (update == nullptr) return;
  const auto& indices = update->layout->node_index;
  auto index = indices.find(node);
  if (index == indices.end()) return;
  UpdateEvent event;
  event.kind = UpdateEvent::kNodeVerified;
  event.node = index->second;
  event.epoch = report.epoch().counter();
  event.fault = OnNode(report.failure(), node);
  auto from = indices.find(report.edge_from());
  auto to = indices.find(report.edge_to());
  if (from != indices.end() && to != indices.end()) {
    event.from = from->second;
    event.to = to->second;
    if (!event.fault.ok()) {
      event.fault.message =
          absl::StrCat("edge ", report.edge_from(), " -> ", report.edge_to(),
                       ": ", event.fault.message);
    }
  }
  if (event.fault.ok()) {
    int64_t moved = 0;
    for (v1::NodeProgress& progress : *update->record.mutable_nodes()) {
      if (progress.node() == node) {
        progress.set_verified(true);
        progress.set_received_bytes(progress.needed_bytes());
        progress.set_repaired_frames(
            std::max(progress.repaired_frames(), report.repaired_frames()));
      }
      moved += progress.received_bytes();
    }
    update->record.set_moved_bytes(moved);
    Changed(update->record);
  } else {
    LOG(WARNING) << report.model() << " update " << report.update_id() << ": "
                 << event.fault.message;
  }
  Post(report.model(), std::move(event));
}

// ---- Actions ----

void CoordinatorCore::Carry(ModelRun* model,
                            const std::vector<UpdateAction>& actions) {
  UpdateRun& run = *model->running;
  const auto replica_of = [&](int index) -> ReplicaRun* {
    for (const auto& entry : run.replica_index) {
      if (entry.second != index) continue;
      auto it = model->replicas.find(entry.first);
      return it == model->replicas.end() ? nullptr : &it->second;
    }
    return nullptr;
  };
  model->epoch = std::max(model->epoch, run.machine.epoch);
  for (const UpdateAction& action : actions) {
    ReplicaEvent event;
    event.holder = Holder{Holder::kUpdate, run.key};
    switch (action.kind) {
      case UpdateAction::kPhase:
        EnterPhase(model, action.phase);
        break;
      case UpdateAction::kPrepare:
        SendPrepare(model, action.node);
        break;
      case UpdateAction::kMove: {
        v1::MoveUpdate* move =
            SendTo(run.machine.nodes[action.node].name)->mutable_move_update();
        move->set_model(model->name);
        move->set_update_id(run.update_id);
        move->mutable_epoch()->set_term(term_);
        move->mutable_epoch()->set_counter(run.machine.epoch);
        *move->mutable_progress_timeout() = ToProto(options_.progress_timeout);
        break;
      }
      case UpdateAction::kManifest: {
        v1::UpdateManifest* manifest =
            SendTo(run.machine.nodes[action.node].name)
                ->mutable_update_manifest();
        manifest->set_model(model->name);
        manifest->set_update_id(run.update_id);
        for (const v1::BucketDigest& bucket : run.manifest) {
          *manifest->add_buckets() = bucket;
        }
        break;
      }
      case UpdateAction::kHold: {
        ReplicaRun* replica = replica_of(action.replica);
        if (replica == nullptr) break;
        *Times(replica, run.key)->mutable_pause_request_time() = ToProto(now_);
        ShowTimes(replica);
        DropInstall(replica);
        event.kind = ReplicaEvent::kHold;
        Step(replica, event);
        break;
      }
      case UpdateAction::kCommit:
        Commit(model);
        break;
      case UpdateAction::kInstall: {
        ReplicaRun* replica = replica_of(action.replica);
        if (replica == nullptr) break;
        event.kind = ReplicaEvent::kInstall;
        event.update = run.key;
        Step(replica, event);
        break;
      }
      case UpdateAction::kRelease: {
        ReplicaRun* replica = replica_of(action.replica);
        if (replica == nullptr) break;
        const UpdateReplica& member = run.machine.replicas[action.replica];
        const Fault& fault =
            member.fault.ok() ? run.machine.fault : member.fault;
        if (!fault.ok()) {
          *Times(replica, run.key)->mutable_failure() = ToProto(fault);
          ShowTimes(replica);
        }
        event.kind = ReplicaEvent::kRelease;
        Step(replica, event);
        break;
      }
      case UpdateAction::kEnd:
        Finish(model);  // `run` is gone; it is the last action
        return;
    }
  }
}

void CoordinatorCore::EndPhase(UpdateRun* update, const std::string& next) {
  if (!update->phase_name.empty()) {
    v1::PhaseTime* phase = nullptr;
    for (v1::PhaseTime& known : *update->record.mutable_phases()) {
      if (known.phase() == update->phase_name) phase = &known;
    }
    if (phase == nullptr) {
      phase = update->record.add_phases();
      phase->set_phase(update->phase_name);
      ShowPrediction(*update, phase);
    }
    *phase->mutable_measured() =
        ToProto(FromProto(phase->measured()) + now_ - update->phase_begin);
  }
  update->phase_name = next;
  update->phase_begin = now_;
}

void CoordinatorCore::EnterPhase(ModelRun* model, UpdatePhase phase) {
  UpdateRun* update = model->running.get();
  v1::Version& record = update->record;
  switch (phase) {
    case UpdatePhase::kGathering:
      break;
    case UpdatePhase::kPreparing:
      EndPhase(update, "prepare");
      record.set_state(v1::Version::STATE_PREPARING);
      if (!record.has_accept_time()) {
        *record.mutable_accept_time() = ToProto(now_);
      }
      break;
    case UpdatePhase::kMoving:
      EndPhase(update, "transfer");
      record.set_state(v1::Version::STATE_MOVING);
      break;
    case UpdatePhase::kPausing:
      EndPhase(update, "pause");
      *record.mutable_verify_time() = ToProto(now_);
      record.set_state(v1::Version::STATE_PAUSING);
      break;
    case UpdatePhase::kApplying:
      EndPhase(update, "apply");
      record.set_state(v1::Version::STATE_APPLYING);
      break;
    case UpdatePhase::kResuming:
      EndPhase(update, "resume");
      record.set_state(v1::Version::STATE_RESUMING);
      break;
    case UpdatePhase::kActive:
    case UpdatePhase::kAborted:
      EndPhase(update, "");
      record.set_state(phase == UpdatePhase::kActive
                           ? v1::Version::STATE_ACTIVE
                           : v1::Version::STATE_ABORTED);
      break;
  }
  if (phase < UpdatePhase::kActive) Changed(record);
}

void CoordinatorCore::SendPrepare(ModelRun* model, int index) {
  UpdateRun& run = *model->running;
  if (run.flows_epoch != run.machine.epoch) {
    FlowOptions options;
    for (const UpdateNode& node : run.machine.nodes) {
      options.excluded.push_back(node.excluded);
    }
    options.bad_edges = run.machine.bad_edges;
    if (run.plan == nullptr) return;  // it is being cancelled
    run.flows = FlowsOfPlan(*run.layout, *run.plan, options);
    run.flows_epoch = run.machine.epoch;
    for (v1::Flow& flow : run.flows) {
      for (v1::FlowMember& member : *flow.mutable_members()) {
        const NodeRun* node = FindNode(member.node());
        if (node != nullptr) {
          member.set_data_address(node->hello.data_address());
        }
      }
    }
    run.record.set_wire_bytes(WireBytes(*run.layout, run.flows));
    std::map<std::string, v1::NodeProgress> before;
    for (const v1::NodeProgress& progress : run.record.nodes()) {
      before[progress.node()] = progress;
    }
    run.record.clear_nodes();
    for (const auto& needed : NeededBytes(*run.layout, run.flows)) {
      v1::NodeProgress* progress = run.record.add_nodes();
      *progress = before[needed.first];
      progress->set_node(needed.first);
      progress->set_needed_bytes(needed.second);
    }
  }
  const std::string& name = run.machine.nodes[index].name;
  SendLayout(*run.layout, name);
  v1::PrepareUpdate* prepare = SendTo(name)->mutable_prepare_update();
  prepare->set_model(model->name);
  prepare->set_update_id(run.update_id);
  prepare->set_version(run.record.version());
  prepare->set_step(run.record.step());
  prepare->set_layout_id(run.layout->id());
  prepare->mutable_epoch()->set_term(term_);
  prepare->mutable_epoch()->set_counter(run.machine.epoch);
  prepare->set_group_secret(run.group_secret);
  *prepare->mutable_timeout() = ToProto(options_.prepare_timeout);
  for (const v1::Flow& flow : run.flows) {
    const bool member =
        std::any_of(flow.members().begin(), flow.members().end(),
                    [&](const v1::FlowMember& m) { return m.node() == name; });
    if (member) *prepare->add_flows() = flow;
  }
}

void CoordinatorCore::Commit(ModelRun* model) {
  UpdateRun& run = *model->running;
  EndPhase(&run, "commit");
  if (journalled_layouts_.insert(run.layout->id()).second) {
    *Write()->mutable_layout_defined()->mutable_layout() = run.layout->define;
  }
  auto* committed = Write()->mutable_update_committed();
  committed->set_model(model->name);
  committed->set_update_id(run.update_id);
  committed->set_version(run.record.version());
  committed->set_step(run.record.step());
  committed->set_layout_id(run.layout->id());
  committed->set_term(term_);
  *committed->mutable_time() = ToProto(now_);
  for (const auto& entry : run.replica_index) {
    if (run.machine.replicas[entry.second].stage == UpdateReplica::kLeft) {
      continue;
    }
    auto* replica = committed->add_replicas();
    replica->set_replica(entry.first);
    replica->set_incarnation(model->replicas.at(entry.first).incarnation);
    const ReplicaEntry* known = registry_.FindReplica(model->name, entry.first);
    for (size_t i = 0; i < known->workers.size(); ++i) {
      auto* worker = replica->add_workers();
      worker->set_worker_index(static_cast<int32_t>(i));
      worker->set_node(known->workers[i].node);
    }
  }
  model->committed = {run.update_id, run.record.version(), run.record.step(),
                      run.layout->id(), term_};
  for (const UpdateNode& node : run.machine.nodes) {
    NodeRun* holder = FindNode(node.name);
    if (node.In() && node.verified && holder != nullptr && !holder->lost &&
        !holder->Holds(run.update_id)) {
      holder->held.insert(holder->held.begin(),
                          std::make_pair(model->name, run.update_id));
    }
  }
  *run.record.mutable_commit_time() = ToProto(now_);
  run.record.set_state(v1::Version::STATE_COMMITTED);
  Changed(run.record);
}

void CoordinatorCore::Finish(ModelRun* model) {
  const std::unique_ptr<UpdateRun> run = std::move(model->running);
  const bool active = run->machine.phase == UpdatePhase::kActive;
  v1::Version& record = run->record;
  *record.mutable_end_time() = ToProto(now_);
  if (!active) *record.mutable_failure() = ToProto(run->machine.fault);
  ShowSnapshotPhase(run.get());
  v1::PhaseTime* total = record.add_phases();
  total->set_phase("total");
  ShowPrediction(*run, total);
  *total->mutable_measured() = ToProto(now_ - run->begin);
  if (active) LearnRates(*run);
  if (!run->manifest.empty()) {
    uint64_t lane0 = 0;
    uint64_t lane1 = 0;
    for (const v1::BucketDigest& bucket : run->manifest) {
      lane0 += bucket.digest().lane0();
      lane1 += bucket.digest().lane1();
    }
    record.mutable_digest()->set_lane0(lane0);
    record.mutable_digest()->set_lane1(lane1);
  }

  auto* ended = Write()->mutable_update_ended();
  ended->set_model(model->name);
  ended->set_update_id(run->update_id);
  ended->set_version(record.version());
  ended->set_active(active);
  if (!active) *ended->mutable_failure() = record.failure();
  *ended->mutable_time() = ToProto(now_);
  if (!active) {
    LOG(WARNING) << record.name() << " (update " << run->update_id
                 << ") aborted: " << record.failure().reason() << ": "
                 << record.failure().message();
    for (auto& entry : journal_.requests) {
      if (entry.second.opened.update_id() == run->update_id) {
        entry.second.failure = record.failure();
      }
    }
  }
  model->book.End(run->update_id, run->machine.fault);
  if (run->layout != nullptr) {
    for (const auto& node : run->layout->node_index) {
      v1::EndUpdate* end = SendTo(node.first)->mutable_end_update();
      end->set_model(model->name);
      end->set_update_id(run->update_id);
      end->set_committed(active);
      if (!active) *end->mutable_failure() = record.failure();
    }
  }
  model->ended.push_back(record);
  while (static_cast<int>(model->ended.size()) > options_.kept_versions) {
    model->ended.pop_front();
  }
  Changed(record);
  SettleAll(model);
  TryOpen(model);
}

}  // namespace daemon
}  // namespace weightsync
