// Events for the update machine, and what its actions mean.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/core.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

constexpr char kSuperseded[] = "SUPERSEDED";

// For the machine, of what a node reports.
Fault OnNode(const v1::Failure& failure, const std::string& node) {
  Fault fault = FromProto(failure);
  if (!fault.ok()) {
    fault.message = SaidBy(absl::StrCat("node ", node), fault.message);
  }
  return fault;
}

}  // namespace

UpdateRun* CoordinatorCore::Running(const std::string& model,
                                    const std::string& update_id) {
  auto it = models_.find(model);
  if (it == models_.end()) return nullptr;
  UpdateRun* update = it->second.FindUpdate(update_id);
  return update == nullptr || update->recovered ? nullptr : update;
}

v1::Version* CoordinatorCore::FindRecord(ModelRun* model,
                                         const std::string& update_id) {
  UpdateRun* update = model->FindUpdate(update_id);
  if (update != nullptr) return &update->record;
  for (auto it = model->ended.rbegin(); it != model->ended.rend(); ++it) {
    if (it->update_id() == update_id) return &*it;
  }
  return nullptr;
}

// ---- Events ----

void CoordinatorCore::Post(const UpdateRun& update, UpdateEvent event) {
  queue_.push_back({update.model, update.key, std::move(event)});
}

void CoordinatorCore::PostNode(const std::string& node, UpdateEvent event) {
  for (const auto& entry : models_) {
    for (const auto& update : entry.second.updates) {
      if (update->layout == nullptr) continue;
      auto it = update->layout->node_index.find(node);
      if (it == update->layout->node_index.end() ||
          static_cast<size_t>(it->second) >= update->machine.nodes.size()) {
        continue;
      }
      event.node = it->second;
      Post(*update, event);
    }
  }
}

void CoordinatorCore::PostReplica(const ReplicaRun& replica,
                                  UpdateEvent event) {
  auto it = models_.find(replica.model);
  if (it == models_.end()) return;
  for (const auto& update : it->second.updates) {
    auto index = update->replica_index.find(replica.name);
    if (index == update->replica_index.end()) continue;
    event.replica = index->second;
    Post(*update, event);
  }
}

void CoordinatorCore::DrainQueue() {
  while (!queue_.empty() || !complete_.empty()) {
    if (queue_.empty()) {
      const auto name = std::move(complete_.front());
      complete_.pop_front();
      auto& replicas = Model(name.first)->replicas;
      auto replica = replicas.find(name.second);
      if (replica != replicas.end()) Step(&replica->second, ReplicaEvent());
      continue;
    }
    const Posted next = std::move(queue_.front());
    queue_.pop_front();
    ModelRun* model = Model(next.model);
    UpdateRun* update = model->FindUpdate(IdOf(next.update));
    if (update == nullptr) continue;
    Carry(model, update,
          StepUpdate(update->config, next.event, now_, &update->machine));
  }
}

void CoordinatorCore::RankSnapshotted(const std::string& node,
                                      const v1::RankSnapshotted& report) {
  UpdateRun* update = Running(report.model(), report.update_id());
  if (update == nullptr) return;
  if (update->config.from_checkpoint) {
    return LoadDigests(node, update, report);
  }
  auto index = update->rank_index.find(report.rank());
  if (index == update->rank_index.end()) return;
  UpdateRank& rank = update->machine.ranks[index->second];
  UpdateEvent event;
  event.kind = UpdateEvent::kRankCopied;
  event.rank = index->second;
  event.fault = FromProto(report.failure());
  if (!event.fault.ok()) {
    event.fault.message = absl::StrCat(
        "rank ", report.rank(), " on ",
        SaidBy(absl::StrCat("node ", update->machine.nodes[rank.node].name),
               event.fault.message));
  } else if (!rank.copied) {
    for (const v1::BucketDigest& bucket : report.buckets()) {
      update->manifest.push_back(bucket);
    }
    for (const v1::TensorDigest& tensor : report.tensors()) {
      v1::Digest& sum = update->tensors[tensor.ordinal()];
      sum.set_lane0(sum.lane0() + tensor.digest().lane0());
      sum.set_lane1(sum.lane1() + tensor.digest().lane1());
    }
    for (v1::RankProgress& progress : *update->record.mutable_ranks()) {
      if (progress.rank() != report.rank()) continue;
      *progress.mutable_snapshot_time() = ToProto(now_);
      *progress.mutable_copy_duration() = report.copy_duration();
      progress.set_copied_bytes(report.copied_bytes());
    }
    // IN_PLACE: the rank is told when its bytes are elsewhere.
    if (!update->config.in_place) RankMayChange(update, report.rank());
    Changed(update->record);
  }
  Post(*update, std::move(event));
  DrainQueue();
  update = Running(report.model(), report.update_id());
  if (update != nullptr) NoteCopied(*update);
}

void CoordinatorCore::RankMayChange(UpdateRun* update, int32_t rank) {
  int64_t copied_bytes = 0;
  google::protobuf::Duration copy_duration;
  for (const v1::RankProgress& progress : update->record.ranks()) {
    if (progress.rank() != rank) continue;
    copied_bytes = progress.copied_bytes();
    copy_duration = progress.copy_duration();
  }
  internal::v1::RankCopied copied;
  copied.set_model(update->model);
  copied.set_rank(rank);
  copied.set_update_id(update->update_id);
  copied.set_copied_bytes(copied_bytes);
  *copied.mutable_copy_duration() = copy_duration;
  if (journal_.requests.Copied(copied)) {
    *Write()->mutable_rank_copied() = std::move(copied);
  }
}

void CoordinatorCore::UpdatePrepared(const std::string& node,
                                     const v1::UpdatePrepared& report) {
  if (report.epoch().term() != term_) return;
  UpdateRun* update = Running(report.model(), report.update_id());
  if (update == nullptr) {
    auto it = models_.find(report.model());
    if (it != models_.end() && !FetchPrepared(&it->second, node, report)) {
      DryPrepared(&it->second, node, report);
    }
    return;
  }
  auto index = update->layout->node_index.find(node);
  if (index == update->layout->node_index.end()) return;
  UpdateEvent event;
  event.kind = UpdateEvent::kNodePrepared;
  event.node = index->second;
  event.epoch = report.epoch().counter();
  event.fault = OnNode(report.failure(), node);
  Post(*update, std::move(event));
}

void CoordinatorCore::UpdateProgress(const std::string& node,
                                     const v1::UpdateProgress& report) {
  UpdateRun* update = Running(report.model(), report.update_id());
  if (update == nullptr) {
    auto it = models_.find(report.model());
    if (it != models_.end()) FetchProgress(&it->second, node, report);
    return;
  }
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
  Post(*update, std::move(event));
}

void CoordinatorCore::UpdateVerified(const std::string& node,
                                     const v1::UpdateVerified& report) {
  if (report.epoch().term() != term_) return;
  UpdateRun* update = Running(report.model(), report.update_id());
  if (update == nullptr) {
    auto it = models_.find(report.model());
    if (it != models_.end()) FetchVerified(&it->second, node, report);
    return;
  }
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
  Post(*update, std::move(event));
}

// ---- Actions ----

void CoordinatorCore::Carry(ModelRun* model, UpdateRun* update,
                            const std::vector<UpdateAction>& actions) {
  UpdateRun& run = *update;
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
    event.holder =
        Holder{Holder::kUpdate, run.key, PauseOf(run.options.pause_mode())};
    switch (action.kind) {
      case UpdateAction::kPhase:
        EnterPhase(update, action.phase);
        break;
      case UpdateAction::kByDisk:
        GoByDisk(model, update);
        break;
      case UpdateAction::kPrepare:
        if (run.machine.disk) {
          SendDiskPrepare(model, update, action.node);
        } else {
          SendPrepare(model, update, action.node);
        }
        break;
      case UpdateAction::kMove:
        if (run.machine.disk) {
          SendDiskMove(model, update, action.node);
        } else {
          SendMove(model, update, action.node);
        }
        break;
      case UpdateAction::kStreamBegin:
        BeginStream(model, update);
        break;
      case UpdateAction::kAtBarrier:
        Supersede(model, run);
        break;
      case UpdateAction::kReleaseSources: {
        for (const UpdateRank& rank : run.machine.ranks) {
          if (rank.node == action.node) RankMayChange(update, rank.rank);
        }
        v1::ReleaseSources* release =
            SendTo(run.machine.nodes[action.node].name)
                ->mutable_release_sources();
        release->set_model(model->name);
        release->set_update_id(run.update_id);
        break;
      }
      case UpdateAction::kManifest:
        SendManifest(run, action.node);
        break;
      case UpdateAction::kHold: {
        ReplicaRun* replica = replica_of(action.replica);
        if (replica == nullptr) break;
        *Times(replica, run.key)->mutable_pause_request_time() = ToProto(now_);
        ShowTimes(replica);
        event.kind = ReplicaEvent::kHold;
        Step(replica, event);
        // After the hold: it shall not run in between.
        DropInstall(replica);
        break;
      }
      case UpdateAction::kCommit:
        Commit(model, update);
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
        Finish(model, update);  // `run` is gone; it is the last action
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

void CoordinatorCore::EnterPhase(UpdateRun* update, UpdatePhase phase) {
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
      record.set_state(phase == UpdatePhase::kActive ? v1::Version::STATE_ACTIVE
                       : update->machine.fault.reason == kSuperseded
                           ? v1::Version::STATE_SUPERSEDED
                           : v1::Version::STATE_ABORTED);
      break;
  }
  if (phase < UpdatePhase::kActive) Changed(record);
}

void CoordinatorCore::SendPrepare(ModelRun* model, UpdateRun* update,
                                  int index) {
  UpdateRun& run = *update;
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
  prepare->set_update_mode(run.options.update_mode());
  prepare->set_publish_mode(run.options.publish_mode());
  prepare->set_stream_slots(options_.stream_slots);
  for (const v1::Flow& flow : run.flows) {
    const bool member =
        std::any_of(flow.members().begin(), flow.members().end(),
                    [&](const v1::FlowMember& m) { return m.node() == name; });
    if (member) *prepare->add_flows() = flow;
  }
}

void CoordinatorCore::SendManifest(const UpdateRun& run, int index) {
  // Its PrepareUpdate waits for the checkpoint, and this comes after it.
  if (run.disk_preparing.count(index) != 0) return;
  v1::UpdateManifest* manifest =
      SendTo(run.machine.nodes[index].name)->mutable_update_manifest();
  manifest->set_model(run.model);
  manifest->set_update_id(run.update_id);
  for (const v1::BucketDigest& bucket : run.manifest) {
    *manifest->add_buckets() = bucket;
  }
}

void CoordinatorCore::SendMove(ModelRun* model, UpdateRun* update, int index) {
  const UpdateRun& run = *update;
  const std::string name = run.machine.nodes[index].name;
  // With every Move, not once when the stream begins: a worker that joined anew
  // since then has said that it holds what it held.
  for (const auto& entry : run.replica_index) {
    if (!run.config.stream ||
        run.machine.replicas[entry.second].stage != UpdateReplica::kPaused) {
      continue;
    }
    ReplicaEvent event;
    event.kind = ReplicaEvent::kStreaming;
    event.update = run.key;
    Step(&model->replicas.at(entry.first), event);
  }
  v1::MoveUpdate* move = SendTo(name)->mutable_move_update();
  move->set_model(model->name);
  move->set_update_id(run.update_id);
  move->mutable_epoch()->set_term(term_);
  move->mutable_epoch()->set_counter(run.machine.epoch);
  *move->mutable_progress_timeout() = ToProto(options_.progress_timeout);
  if (!run.config.stream) return;
  for (const auto& entry : run.replica_index) {
    if (run.machine.replicas[entry.second].stage != UpdateReplica::kPaused) {
      continue;
    }
    const ReplicaEntry* replica =
        registry_.FindReplica(model->name, entry.first);
    for (size_t i = 0; i < replica->workers.size(); ++i) {
      if (replica->workers[i].node != name) continue;
      v1::StreamWorker* worker = move->add_stream_workers();
      worker->set_replica(entry.first);
      worker->set_worker_index(static_cast<int32_t>(i));
      worker->set_incarnation(replica->incarnation);
    }
  }
}

namespace {

void FillParticipants(
    const ModelRun& model, const UpdateRun& run, const Registry& registry,
    google::protobuf::RepeatedPtrField<internal::v1::CommittedReplica>* out) {
  for (const auto& entry : run.replica_index) {
    if (run.machine.replicas[entry.second].stage == UpdateReplica::kLeft) {
      continue;
    }
    internal::v1::CommittedReplica* replica = out->Add();
    replica->set_replica(entry.first);
    replica->set_incarnation(model.replicas.at(entry.first).incarnation);
    const ReplicaEntry* known = registry.FindReplica(model.name, entry.first);
    for (size_t i = 0; i < known->workers.size(); ++i) {
      auto* worker = replica->add_workers();
      worker->set_worker_index(static_cast<int32_t>(i));
      worker->set_node(known->workers[i].node);
    }
  }
}

}  // namespace

void CoordinatorCore::BeginStream(ModelRun* model, UpdateRun* update) {
  UpdateRun& run = *update;
  auto* begun = Write()->mutable_stream_begun();
  begun->set_model(model->name);
  begun->set_update_id(run.update_id);
  begun->set_version(run.record.version());
  begun->set_term(term_);
  *begun->mutable_time() = ToProto(now_);
  FillParticipants(*model, run, registry_, begun->mutable_replicas());
}

void CoordinatorCore::Supersede(ModelRun* model, const UpdateRun& update) {
  for (const auto& older : model->updates) {
    if (older.get() == &update) return;
    UpdateEvent cancel;
    cancel.kind = UpdateEvent::kCancel;
    cancel.fault = Fault(
        StatusCode::kAborted, kSuperseded,
        absl::StrCat("version ", update.record.version(), " of ", model->name,
                     " was complete before this one was committed"));
    Post(*older, std::move(cancel));
  }
}

void CoordinatorCore::Commit(ModelRun* model, UpdateRun* update) {
  UpdateRun& run = *update;
  EndPhase(&run, "commit");
  // The journal keeps the layouts of the commits that it keeps, which are those
  // that are kept here: one that comes back later is written again.
  const bool written = std::any_of(
      model->commits.begin(), model->commits.end(),
      [&run](const CommittedUpdate& commit) {
        return commit.layout != nullptr && commit.layout_id == run.layout->id();
      });
  if (!written) {
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
  FillParticipants(*model, run, registry_, committed->mutable_replicas());
  *committed->mutable_options() = run.options;
  CommittedUpdate known;
  known.update_id = run.update_id;
  known.version = run.record.version();
  known.step = run.record.step();
  known.layout_id = run.layout->id();
  known.layout = run.layout;
  known.term = term_;
  known.options = run.options;
  known.manifest = run.manifest;
  for (const auto& tensor : run.tensors) {
    v1::TensorDigest digest;
    digest.set_ordinal(tensor.first);
    *digest.mutable_digest() = tensor.second;
    known.tensors.push_back(std::move(digest));
  }
  for (const v1::BucketDigest& bucket : known.manifest) {
    *committed->add_manifest() = bucket;
  }
  for (const v1::TensorDigest& tensor : known.tensors) {
    *committed->add_tensors() = tensor;
  }
  for (const UpdateNode& node : run.machine.nodes) {
    NodeRun* holder = FindNode(node.name);
    const bool holds = (node.source && known.SourcesHold()) ||
                       (node.receiver && known.ReceiversHold());
    if (holds && node.In() && node.verified && holder != nullptr &&
        !holder->lost && !holder->Holds(run.update_id)) {
      holder->held.insert(holder->held.begin(),
                          std::make_pair(model->name, run.update_id));
    }
  }
  model->commits.push_back(std::move(known));
  model->removed = false;
  // From here on whoever comes with another cluster's id is the stranger.
  const auto connected = std::count_if(
      nodes_.begin(), nodes_.end(),
      [](const auto& entry) { return !entry.second.stream.empty(); });
  if (connected > 1) fresh_ = false;
  while (model->commits.size() > kOlderCommits + 1) {
    // What a rollback holds the model on is not forgotten.
    const bool held = model->commits.front().update_id == model->held_update_id;
    model->commits.erase(model->commits.begin() + (held ? 1 : 0));
  }
  *run.record.mutable_commit_time() = ToProto(now_);
  run.record.set_state(v1::Version::STATE_COMMITTED);
  Changed(run.record);
}

void CoordinatorCore::Finish(ModelRun* model, UpdateRun* update) {
  std::unique_ptr<UpdateRun> run;
  for (auto it = model->updates.begin(); it != model->updates.end(); ++it) {
    if (it->get() != update) continue;
    run = std::move(*it);
    model->updates.erase(it);
    break;
  }
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
  const CommittedUpdate* commit = model->FindCommit(run->update_id);
  const bool lost = commit != nullptr && commit->lost;
  if (lost) record.set_state(v1::Version::STATE_LOST);
  ended->set_active(active && !lost);
  ended->set_lost(lost);
  const bool superseded = record.state() == v1::Version::STATE_SUPERSEDED;
  ended->set_superseded(superseded);
  if (!active) *ended->mutable_failure() = record.failure();
  *ended->mutable_time() = ToProto(now_);
  if (!active) {
    LOG(WARNING) << record.name() << " (update " << run->update_id
                 << (superseded ? ") superseded: " : ") aborted: ")
                 << record.failure().reason() << ": "
                 << record.failure().message();
    journal_.requests.Failed(run->update_id, record.failure());
  }
  if (run->config.from_checkpoint) {
    model->book.EndAside(record.version(), run->machine.fault);
  } else {
    model->book.End(run->update_id, run->machine.fault);
  }
  EndDisk(model, run.get(), active);
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
  if (!model->updates.empty()) {
    UpdateEvent unblocked;
    unblocked.kind = UpdateEvent::kUnblocked;
    Post(*model->updates[0], unblocked);
  }
  SettleAll(model);
  TryOpen(model);
}

}  // namespace daemon
}  // namespace weightsync
