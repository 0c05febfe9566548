#include "daemon/coordinator/fake_cluster.h"

#include <functional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {
namespace {

v1::Parameter TheParameter(int world) {
  v1::Parameter parameter;
  parameter.set_name("w");
  parameter.set_dtype(v1::DTYPE_BF16);
  parameter.add_shape(4 * world);
  parameter.add_shape(8);
  return parameter;
}

std::string CommandName(const v1::NodeCommand& command) {
  const auto* field = v1::NodeCommand::descriptor()->FindFieldByNumber(
      static_cast<int>(command.command_case()));
  return field == nullptr ? "none" : field->name();
}

std::string RecordName(const internal::v1::JournalRecord& record) {
  const auto* field =
      internal::v1::JournalRecord::descriptor()->FindFieldByNumber(
          static_cast<int>(record.record_case()));
  return field == nullptr ? "none" : field->name();
}

// What one rank's part of "w" adds up to in an update.
v1::Digest PartDigest(const std::string& update_id, int rank) {
  v1::Digest digest;
  digest.set_lane0(std::hash<std::string>()(update_id) + 3 * rank);
  digest.set_lane1(7 * rank + 1);
  return digest;
}

}  // namespace

FakeCluster::FakeCluster(CoordinatorOptions options)
    : options_(std::move(options)) {
  options_.coordinator_node = "n0";
  options_.random_id = [this] { return absl::StrCat("id", next_id_++); };
  coordinator = std::make_unique<Coordinator>(options_, journal);
  Do(coordinator->Start(now));
}

// ---- The world ----

void FakeCluster::AddNode(const std::string& name) {
  nodes_[name].incarnation = absl::StrCat(name, "-", next_id_++);
  Hello(name);
}

void FakeCluster::Hello(const std::string& name) {
  Node& node = nodes_[name];
  node.stream = absl::StrCat(name, "#", next_stream_++);
  node.inbox.clear();
  v1::NodeReport report;
  v1::Hello* hello = report.mutable_hello();
  hello->set_node(name);
  hello->set_incarnation(node.incarnation);
  hello->set_protocol_version(1);
  hello->set_cluster_id(remembered_cluster.empty() ? coordinator->cluster_id()
                                                   : remembered_cluster);
  hello->set_newest_term(node.term);
  hello->set_data_address(absl::StrCat(name, ":1"));
  for (const auto& update : node.updates) {
    if (!update.second.whole) continue;
    v1::HeldUpdate* held = hello->add_held_updates();
    held->set_model(kModel);
    held->set_update_id(update.first);
    held->set_version(update.second.version);
  }
  Report(name, report);
  if (after_hello) after_hello(name);
  for (const auto& rank : ranks_) {
    if (rank.second.node == name) ClaimRank(rank.first);
  }
  for (const auto& engine : engines) {
    if (engine.second.node == name) RegisterReplica(engine.first, name);
    for (size_t i = 0; i < engine.second.workers.size(); ++i) {
      if (engine.second.worker_nodes[i] == name) {
        RegisterWorker(engine.first, static_cast<int>(i));
      }
    }
  }
  v1::NodeReport done;
  done.mutable_hello_done();
  Report(name, done);
}

void FakeCluster::AddRank(int rank, int world, const std::string& node) {
  ranks_[rank] = Rank{node, absl::StrCat("s", rank, "-", next_id_++), world, 0};
  ClaimRank(rank);
}

void FakeCluster::ClaimRank(int index) {
  const Rank& rank = ranks_[index];
  v1::NodeReport report;
  report.set_correlation_id(next_correlation_++);
  v1::ClaimRank* claim = report.mutable_claim_rank();
  claim->set_model(kModel);
  claim->set_rank(index);
  claim->set_world_size(rank.world);
  claim->set_session(rank.session);
  claim->set_publish_index(rank.publish_index);
  Report(rank.node, report);
  report.Clear();
  report.set_correlation_id(next_correlation_++);
  v1::RankShards* shards = report.mutable_rank_shards();
  shards->set_model(kModel);
  shards->set_rank(index);
  shards->set_session(rank.session);
  *shards->add_parameters() = TheParameter(rank.world);
  v1::Box* box = shards->add_shards()->mutable_box();
  box->add_offset(4 * index);
  box->add_offset(0);
  box->add_extent(4);
  box->add_extent(8);
  Report(rank.node, report);
}

void FakeCluster::AddReplica(const std::string& name,
                             const std::vector<std::string>& worker_nodes) {
  FakeEngine& engine = engines[name];
  engine.node = worker_nodes[0];
  engine.incarnation = absl::StrCat(name, "-", next_id_++);
  engine.worker_nodes = worker_nodes;
  engine.workers.resize(worker_nodes.size());
  Register(name);
}

void FakeCluster::Register(const std::string& name, bool ready) {
  RegisterReplica(name, engines[name].node);
  for (size_t i = 0; i < engines[name].workers.size(); ++i) {
    RegisterWorker(name, static_cast<int>(i), ready);
  }
}

void FakeCluster::LoseRank(int rank) {
  v1::NodeReport report;
  v1::RankLost* lost = report.mutable_rank_lost();
  lost->set_model(kModel);
  lost->set_rank(rank);
  lost->set_session(ranks_[rank].session);
  const std::string node = ranks_[rank].node;
  ranks_.erase(rank);
  Report(node, report);
}

int64_t FakeCluster::Ask(AdminRequest call) {
  const int64_t request = next_request_++;
  Do(coordinator->OnAdminRequest(now, request, call));
  return request;
}

const AdminDone* FakeCluster::Answered(int64_t request) const {
  for (const AdminDone& done : answered) {
    if (done.request == request) return &done;
  }
  return nullptr;
}

void FakeCluster::RegisterReplica(const std::string& name,
                                  const std::string& node) {
  const FakeEngine& engine = engines[name];
  v1::NodeReport report;
  report.set_correlation_id(next_correlation_++);
  v1::RegisterReplica* r =
      report.mutable_replica_joined()->mutable_registration();
  r->set_model(kModel);
  r->set_replica(name);
  r->set_worker_count(static_cast<int>(engine.workers.size()));
  r->set_incarnation(engine.incarnation);
  r->set_paused(engine.paused &&
                engine.last_pause.pause().mode() != v1::PAUSE_MODE_NONE);
  r->set_atomic_swap(engine.atomic_swap);
  r->set_removable(engine.removable);
  for (const std::string& command : engine.refused_command_ids) {
    report.mutable_replica_joined()->add_refused_command_ids(command);
  }
  report.mutable_replica_joined()->set_isolation_hold(engine.isolation_hold);
  Report(node, report);
}

void FakeCluster::RegisterWorker(const std::string& name, int worker,
                                 bool ready) {
  const FakeEngine& engine = engines[name];
  v1::NodeReport report;
  report.set_correlation_id(next_correlation_++);
  v1::RegisterWorker* r =
      report.mutable_worker_joined()->mutable_registration();
  report.mutable_worker_joined()->set_ready(ready);
  r->set_model(kModel);
  r->set_replica(name);
  r->set_worker_index(worker);
  r->set_worker_count(static_cast<int>(engine.workers.size()));
  r->set_incarnation(engine.incarnation);
  *r->mutable_installed() = engine.workers[worker];
  for (const std::string& uuid : engine.device_uuids) r->add_device_uuids(uuid);
  v1::WantedTensor* tensor = r->add_tensors();
  const int world = ranks_.empty() ? 2 : ranks_.begin()->second.world;
  tensor->set_name("w");
  tensor->set_dtype(v1::DTYPE_BF16);
  tensor->add_shape(4 * world);
  tensor->add_shape(8);
  Report(engine.worker_nodes[worker], report);
}

void FakeCluster::AddStandard() {
  for (const char* node : {"n0", "n1", "n2"}) AddNode(node);
  AddRank(0, 2, "n0");
  AddRank(1, 2, "n0");
  AddReplica("r1", {"n1"});
  AddReplica("r2", {"n2", "n2"});
  Run();
}

void FakeCluster::AddStandardAdapter() {
  engines["r1"].removable = true;
  engines["r2"].removable = true;
  AddStandard();
}

// ---- What happens ----

int64_t FakeCluster::Publish(int rank, int64_t version,
                             const std::string& request_id,
                             const v1::UpdateOptions& options, int64_t step) {
  const int64_t correlation = next_correlation_++;
  calls_[correlation] = rank;
  v1::NodeReport report;
  report.set_correlation_id(correlation);
  v1::PublishArrived* arrived = report.mutable_publish_arrived();
  arrived->set_model(kModel);
  arrived->set_rank(rank);
  arrived->set_session(ranks_[rank].session);
  arrived->set_request_id(request_id);
  arrived->set_version(version);
  arrived->set_step(step);
  *arrived->mutable_options() = options;
  const bool before = twice;
  twice = false;  // a call is made once; its stream is ordered
  Report(ranks_[rank].node, report);
  twice = before;
  return correlation;
}

void FakeCluster::PublishAll(int world, int64_t version) {
  for (int rank = 0; rank < world; ++rank) Publish(rank, version);
}

void FakeCluster::Report(const std::string& node, v1::NodeReport report) {
  if (nodes_[node].stream.empty() || crashed) return;
  Do(coordinator->OnReport(now, nodes_[node].stream, report));
  if (twice && report.report_case() != v1::NodeReport::kHello && !crashed) {
    Do(coordinator->OnReport(now, nodes_[node].stream, report));
  }
}

void FakeCluster::Do(Actions actions) {
  for (Action& action : actions) {
    if (crashed) return;
    std::string name;
    if (auto* send = absl::get_if<SendCommand>(&action)) {
      std::string to;
      for (const auto& node : nodes_) {
        if (node.second.stream == send->node_stream) to = node.first;
      }
      name = absl::StrCat("send:", to, ":", CommandName(send->command));
      if (!crash_before.empty() && absl::StrContains(name, crash_before)) {
        crashed = true;
        return;
      }
      commands.emplace_back(to, send->command);
      if (!to.empty()) nodes_[to].inbox.push_back(send->command);
    } else if (auto* append = absl::get_if<JournalAppend>(&action)) {
      name = absl::StrCat("journal:", RecordName(append->record));
      if (!crash_before.empty() && absl::StrContains(name, crash_before)) {
        crashed = true;
        return;
      }
      ApplyRecord(append->record, &journal);
    } else if (auto* close = absl::get_if<CloseNode>(&action)) {
      closed.push_back(*close);
      for (auto& node : nodes_) {
        if (node.second.stream == close->node_stream)
          node.second.stream.clear();
      }
    } else if (auto* done = absl::get_if<PrepareDone>(&action)) {
      prepared.push_back(*done);
    } else if (auto* call = absl::get_if<AdminDone>(&action)) {
      answered.push_back(*call);
    }
    if (!name.empty()) trace.push_back(name);
  }
}

void FakeCluster::Run() {
  for (bool any = true; any;) {
    any = false;
    for (auto& entry : nodes_) {
      if (crashed || entry.second.stream.empty() ||
          entry.second.inbox.empty()) {
        continue;
      }
      any = true;
      const v1::NodeCommand command = entry.second.inbox.front();
      entry.second.inbox.pop_front();
      if (intercept != nullptr && intercept(entry.first, command)) continue;
      Answer(entry.first, command);
    }
  }
}

void FakeCluster::Pass(absl::Duration time, absl::Duration tick) {
  const absl::Time end = now + time;
  while (now < end && !crashed) {
    now += tick;
    for (const auto& node : nodes_) {
      v1::NodeReport report;
      report.mutable_heartbeat();
      Report(node.first, report);
    }
    if (!crashed) Do(coordinator->OnTick(now));
    Run();
  }
}

void FakeCluster::Answer(const std::string& name,
                         const v1::NodeCommand& command) {
  Node& node = nodes_[name];
  v1::NodeReport report;
  switch (command.command_case()) {
    case v1::NodeCommand::kReply: {
      const v1::Reply& reply = command.reply();
      replies_[reply.correlation_id()] = reply;
      auto call = calls_.find(reply.correlation_id());
      if (call == calls_.end()) return;
      Rank& rank = ranks_[call->second];
      const v1::PublishOpened& opened = reply.publish_opened();
      if (opened.publish_index() != 0) {
        rank.publish_index = opened.publish_index();
      }
      if (reply.failure().code() != 0 || opened.repeated_request()) return;
      v1::RankSnapshotted* snapshotted = report.mutable_rank_snapshotted();
      snapshotted->set_model(kModel);
      snapshotted->set_update_id(opened.update_id());
      snapshotted->set_rank(call->second);
      snapshotted->set_copied_bytes(64);
      v1::BucketDigest* bucket = snapshotted->add_buckets();
      bucket->set_bucket(call->second);
      *bucket->mutable_digest() = PartDigest(opened.update_id(), call->second);
      v1::TensorDigest* tensor = snapshotted->add_tensors();
      tensor->set_ordinal(0);
      *tensor->mutable_digest() = PartDigest(opened.update_id(), call->second);
      Report(name, report);
      return;
    }
    case v1::NodeCommand::kWelcome:
      node.term = command.welcome().term();
      return;
    case v1::NodeCommand::kPrepareUpdate: {
      const v1::PrepareUpdate& prepare = command.prepare_update();
      Node::Update& update = node.updates[prepare.update_id()];
      update.epoch = prepare.epoch();
      update.layout_id = prepare.layout_id();
      update.version = prepare.version();
      update.prepared = true;
      update.moving = false;
      update.stream = prepare.update_mode() == v1::UPDATE_MODE_STREAM;
      update.fetch = prepare.fetch();
      update.load = prepare.load();
      if (prepare.fetch()) {
        update.manifest = false;
        for (const v1::Flow& flow : prepare.flows()) {
          // Who sends must have it, and may not lose it meanwhile.
          if (flow.members(0).node() == name &&
              (!update.whole ||
               pinned.count({name, prepare.update_id()}) == 0)) {
            ++violations;
          }
        }
      }
      v1::UpdatePrepared* prepared_report = report.mutable_update_prepared();
      prepared_report->set_model(prepare.model());
      prepared_report->set_update_id(prepare.update_id());
      *prepared_report->mutable_epoch() = prepare.epoch();
      Report(name, report);
      return;
    }
    case v1::NodeCommand::kMoveUpdate:
    case v1::NodeCommand::kUpdateManifest: {
      const bool move = command.has_move_update();
      const std::string& id = move ? command.move_update().update_id()
                                   : command.update_manifest().update_id();
      Node::Update& update = node.updates[id];
      (move ? update.moving : update.manifest) = true;
      if (move) {
        update.stream_workers.assign(
            command.move_update().stream_workers().begin(),
            command.move_update().stream_workers().end());
        for (const v1::StreamWorker& worker : update.stream_workers) {
          FakeEngine& engine = engines[worker.replica()];
          if (!engine.paused) ++violations;
          v1::InstalledState& installed = engine.workers[worker.worker_index()];
          installed.set_state(v1::InstalledState::STATE_WRITING);
          installed.set_update_id(id);
        }
        if (update.load) {
          v1::RankSnapshotted* read = report.mutable_rank_snapshotted();
          read->set_model(kModel);
          read->set_update_id(id);
          read->set_rank(-1);
          *read->add_buckets()->mutable_digest() =
              PartDigest(absl::StrCat(command.move_update().checkpoint().path(),
                                      damaged_reader == name ? "x" : ""),
                         0);
          Report(name, report);
          report.Clear();
        }
      } else {
        update.digests = command.update_manifest();
      }
      if (!update.moving || !update.manifest) return;
      // STREAM leaves nothing in the store but what a snapshot put there.
      bool source = false;
      for (const auto& rank : ranks_) {
        source = source || rank.second.node == name;
      }
      update.whole = update.whole || !update.stream || source;
      v1::UpdateVerified* verified = report.mutable_update_verified();
      verified->set_model(kModel);
      verified->set_update_id(id);
      *verified->mutable_epoch() = update.epoch;
      Report(name, report);
      return;
    }
    case v1::NodeCommand::kWriteCheckpoint: {
      const v1::WriteCheckpoint& write = command.write_checkpoint();
      v1::CheckpointWritten* written = report.mutable_checkpoint_written();
      written->set_command_id(write.command_id());
      if (write.step() == v1::WriteCheckpoint::STEP_WRITE) {
        written->set_written_bytes(64 * write.buckets_size());
      }
      Report(name, report);
      return;
    }
    case v1::NodeCommand::kCompleteCheckpoint: {
      v1::CheckpointWritten* written = report.mutable_checkpoint_written();
      written->set_command_id(command.complete_checkpoint().command_id());
      written->set_shard_count(1);
      Report(name, report);
      return;
    }
    case v1::NodeCommand::kReadCheckpoint: {
      v1::CheckpointRead* read = report.mutable_checkpoint_read();
      read->set_command_id(command.read_checkpoint().command_id());
      *read->add_parameters() = TheParameter(2);
      Report(name, report);
      return;
    }
    case v1::NodeCommand::kEndUpdate: {
      const v1::EndUpdate& end = command.end_update();
      auto update = node.updates.find(end.update_id());
      if (end.committed() || update == node.updates.end()) return;
      const std::vector<v1::StreamWorker> streamed =
          update->second.stream_workers;
      node.updates.erase(update);
      // Workers that were written to say what they hold.
      for (const v1::StreamWorker& worker : streamed) {
        report.Clear();
        v1::WorkerAppliedReport* said = report.mutable_worker_applied();
        said->set_model(kModel);
        said->set_replica(worker.replica());
        said->set_worker_index(worker.worker_index());
        said->set_incarnation(worker.incarnation());
        said->set_update_id(end.update_id());
        *said->mutable_installed() =
            engines[worker.replica()].workers[worker.worker_index()];
        Report(name, report);
      }
      return;
    }
    case v1::NodeCommand::kPinUpdate: {
      const v1::PinUpdate& pin = command.pin_update();
      if (pin.pin()) {
        pinned.insert({name, pin.update_id()});
      } else {
        pinned.erase({name, pin.update_id()});
      }
      return;
    }
    case v1::NodeCommand::kDropUpdate:
      pinned.erase({name, command.drop_update().update_id()});
      node.updates.erase(command.drop_update().update_id());
      return;
    case v1::NodeCommand::kDigestWorker: {
      const v1::DigestWorker& digest = command.digest_worker();
      const FakeEngine& engine = engines[digest.replica()];
      const int index = digest.worker_index();
      v1::WorkerDigests* out = report.mutable_worker_digests();
      out->set_model(kModel);
      out->set_replica(digest.replica());
      out->set_worker_index(index);
      out->set_incarnation(digest.incarnation());
      v1::TensorDigests* digests = out->mutable_digests();
      digests->set_command_id(digest.digest().command_id());
      *digests->mutable_installed() = engine.workers[index];
      v1::Digest sum;
      for (int rank = 0; rank < 2; ++rank) {
        const v1::Digest part =
            PartDigest(engine.workers[index].update_id(), rank);
        sum.set_lane0(sum.lane0() + part.lane0());
        sum.set_lane1(sum.lane1() + part.lane1());
      }
      if (engine.damaged_worker == index) sum.set_lane1(sum.lane1() + 4);
      *digests->add_digests() = sum;
      Report(name, report);
      return;
    }
    case v1::NodeCommand::kPauseReplica: {
      const v1::PauseReplicaCommand& pause = command.pause_replica();
      FakeEngine& engine = engines[pause.replica()];
      Tell(&engine, pause.pause().command_id(),
           absl::StrCat("pause ", pause.pause().update_id()));
      engine.paused = true;
      engine.last_pause = pause;
      ++engine.pauses;
      v1::ReplicaPausedReport* paused = report.mutable_replica_paused();
      paused->set_model(kModel);
      paused->set_replica(pause.replica());
      paused->set_incarnation(pause.incarnation());
      paused->set_command_id(pause.pause().command_id());
      paused->set_detail("drained 3 requests");
      Report(name, report);
      return;
    }
    case v1::NodeCommand::kApplyWorker: {
      const v1::ApplyWorker& apply = command.apply_worker();
      FakeEngine& engine = engines[apply.replica()];
      v1::InstalledState& installed = engine.workers[apply.worker_index()];
      v1::WorkerAppliedReport* applied = report.mutable_worker_applied();
      applied->set_model(kModel);
      applied->set_replica(apply.replica());
      applied->set_worker_index(apply.worker_index());
      applied->set_incarnation(apply.incarnation());
      applied->set_update_id(apply.update_id());
      applied->set_command_id(apply.command_id());
      const auto update = node.updates.find(apply.update_id());
      const bool streamed = update != node.updates.end() &&
                            update->second.stream &&
                            !update->second.stream_workers.empty();
      if (streamed && installed.update_id() == apply.update_id()) {
        // All of it is there already.
        installed.set_state(v1::InstalledState::STATE_INSTALLED);
        installed.set_version(apply.version());
      } else if (update == node.updates.end() || !update->second.whole) {
        applied->mutable_failure()->set_code(5);
        applied->mutable_failure()->set_reason("UPDATE_UNKNOWN");
        applied->set_not_held(true);
      } else if (installed.update_id() != apply.update_id() ||
                 installed.state() != v1::InstalledState::STATE_INSTALLED) {
        if (!engine.paused) ++violations;
        installed.set_state(v1::InstalledState::STATE_INSTALLED);
        installed.set_update_id(apply.update_id());
        installed.set_version(apply.version());
        ++engine.applies;
      }
      *applied->mutable_installed() = installed;
      Report(name, report);
      return;
    }
    case v1::NodeCommand::kRemoveWorker: {
      const v1::RemoveWorker& remove = command.remove_worker();
      FakeEngine& engine = engines[remove.replica()];
      v1::InstalledState& installed = engine.workers[remove.worker_index()];
      v1::WorkerAppliedReport* applied = report.mutable_worker_applied();
      applied->set_model(kModel);
      applied->set_replica(remove.replica());
      applied->set_worker_index(remove.worker_index());
      applied->set_incarnation(remove.incarnation());
      applied->set_command_id(remove.remove().command_id());
      if (!engine.paused) ++violations;
      ++engine.removes;
      if (engine.fail_remove) {
        installed.set_state(v1::InstalledState::STATE_WRITING);
        applied->mutable_failure()->set_code(2);
        applied->mutable_failure()->set_reason("HOOK_FAILED");
      } else {
        installed.Clear();
        installed.set_state(v1::InstalledState::STATE_NOTHING);
      }
      *applied->mutable_installed() = installed;
      Report(name, report);
      return;
    }
    case v1::NodeCommand::kResumeReplica: {
      const v1::ResumeReplicaCommand& resume = command.resume_replica();
      FakeEngine& engine = engines[resume.replica()];
      for (const v1::InstalledState& worker : engine.workers) {
        const bool nothing =
            worker.state() == v1::InstalledState::STATE_NOTHING;
        if (worker.update_id() != engine.workers[0].update_id() ||
            worker.state() == v1::InstalledState::STATE_WRITING ||
            nothing != resume.resume().removed()) {
          ++violations;
        }
      }
      Tell(&engine, resume.resume().command_id(),
           absl::StrCat("resume ", resume.resume().update_id()));
      engine.paused = false;
      ++engine.resumes;
      engine.last_resume = resume.resume();
      v1::ReplicaResumedReport* resumed = report.mutable_replica_resumed();
      resumed->set_model(kModel);
      resumed->set_replica(resume.replica());
      resumed->set_incarnation(resume.incarnation());
      resumed->set_command_id(resume.resume().command_id());
      Report(name, report);
      return;
    }
    default:
      return;
  }
}

void FakeCluster::Tell(FakeEngine* engine, const std::string& command_id,
                       const std::string& what) {
  const auto told = engine->told.emplace(command_id, what);
  if (!told.second && told.first->second != what) ++violations;
}

void FakeCluster::Disconnect(const std::string& node) {
  const std::string stream = nodes_[node].stream;
  nodes_[node].stream.clear();
  Do(coordinator->OnDisconnected(now, stream));
}

void FakeCluster::Reconnect(const std::string& node) { Hello(node); }

void FakeCluster::RestartNode(const std::string& node) {
  Disconnect(node);
  nodes_[node].incarnation = absl::StrCat(node, "-", next_id_++);
  nodes_[node].updates.clear();
  Hello(node);
}

void FakeCluster::RestartCoordinator() {
  crashed = false;
  crash_before.clear();
  // As it is read again: compacted.
  JournalState read;
  for (const internal::v1::JournalRecord& record : RecordsOf(journal)) {
    ApplyRecord(record, &read);
  }
  journal = std::move(read);
  coordinator = std::make_unique<Coordinator>(options_, journal);
  Do(coordinator->Start(now));
  for (auto& node : nodes_) node.second.stream.clear();
  for (auto& node : nodes_) Hello(node.first);
  Run();
}

void FakeCluster::LoseWorker(const std::string& replica, int worker) {
  const FakeEngine& engine = engines[replica];
  v1::NodeReport report;
  v1::WorkerLeft* left = report.mutable_worker_left();
  left->set_model(kModel);
  left->set_replica(replica);
  left->set_worker_index(worker);
  left->set_incarnation(engine.incarnation);
  Report(engine.worker_nodes[worker], report);
}

// ---- What came of it ----

const v1::Reply* FakeCluster::FindReply(int64_t correlation) const {
  auto it = replies_.find(correlation);
  return it == replies_.end() ? nullptr : &it->second;
}

v1::Version FakeCluster::Version(const std::string& name) const {
  auto version = coordinator->GetVersion(
      absl::StrCat(kModel, "/versions/", name), "", now);
  return version.ok() ? *version : v1::Version();
}

v1::Replica FakeCluster::Replica(const std::string& name) const {
  auto replica =
      coordinator->GetReplica(absl::StrCat(kModel, "/replicas/", name));
  return replica.ok() ? *replica : v1::Replica();
}

int FakeCluster::CountCommands(v1::NodeCommand::CommandCase kind) const {
  int count = 0;
  for (const auto& command : commands) {
    count += command.second.command_case() == kind;
  }
  return count;
}

}  // namespace daemon
}  // namespace weightsync
