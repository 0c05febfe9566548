#include "daemon/coordinator/fake_cluster.h"

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
  hello->set_cluster_id(coordinator->cluster_id());
  hello->set_data_address(absl::StrCat(name, ":1"));
  for (const auto& update : node.updates) {
    if (!update.second.whole) continue;
    v1::HeldUpdate* held = hello->add_held_updates();
    held->set_model(kModel);
    held->set_update_id(update.first);
  }
  Report(name, report);
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
  ranks_[rank] = Rank{node, world, 0};
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
  claim->set_session(absl::StrCat("s", index));
  claim->set_publish_index(rank.publish_index);
  Report(rank.node, report);
  report.Clear();
  report.set_correlation_id(next_correlation_++);
  v1::RankShards* shards = report.mutable_rank_shards();
  shards->set_model(kModel);
  shards->set_rank(index);
  shards->set_session(absl::StrCat("s", index));
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

void FakeCluster::Register(const std::string& name) {
  RegisterReplica(name, engines[name].node);
  for (size_t i = 0; i < engines[name].workers.size(); ++i) {
    RegisterWorker(name, static_cast<int>(i));
  }
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
  r->set_paused(engine.paused);
  Report(node, report);
}

void FakeCluster::RegisterWorker(const std::string& name, int worker) {
  const FakeEngine& engine = engines[name];
  v1::NodeReport report;
  report.set_correlation_id(next_correlation_++);
  v1::RegisterWorker* r =
      report.mutable_worker_joined()->mutable_registration();
  r->set_model(kModel);
  r->set_replica(name);
  r->set_worker_index(worker);
  r->set_worker_count(static_cast<int>(engine.workers.size()));
  r->set_incarnation(engine.incarnation);
  *r->mutable_installed() = engine.workers[worker];
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
  arrived->set_session(absl::StrCat("s", rank));
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
      Report(name, report);
      return;
    }
    case v1::NodeCommand::kPrepareUpdate: {
      const v1::PrepareUpdate& prepare = command.prepare_update();
      Node::Update& update = node.updates[prepare.update_id()];
      update.epoch = prepare.epoch();
      update.layout_id = prepare.layout_id();
      update.prepared = true;
      update.moving = false;
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
      if (!update.moving || !update.manifest) return;
      update.whole = true;
      v1::UpdateVerified* verified = report.mutable_update_verified();
      verified->set_model(kModel);
      verified->set_update_id(id);
      *verified->mutable_epoch() = update.epoch;
      Report(name, report);
      return;
    }
    case v1::NodeCommand::kEndUpdate:
      if (!command.end_update().committed()) {
        node.updates.erase(command.end_update().update_id());
      }
      return;
    case v1::NodeCommand::kPauseReplica: {
      const v1::PauseReplicaCommand& pause = command.pause_replica();
      FakeEngine& engine = engines[pause.replica()];
      engine.paused = true;
      ++engine.pauses;
      v1::ReplicaPausedReport* paused = report.mutable_replica_paused();
      paused->set_model(kModel);
      paused->set_replica(pause.replica());
      paused->set_incarnation(pause.incarnation());
      paused->set_command_id(pause.pause().command_id());
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
      if (update == node.updates.end() || !update->second.whole) {
        applied->mutable_failure()->set_code(5);
        applied->mutable_failure()->set_reason("UPDATE_UNKNOWN");
      } else if (installed.update_id() != apply.update_id()) {
        if (!engine.paused) ++violations;
        installed.set_state(v1::InstalledState::STATE_INSTALLED);
        installed.set_update_id(apply.update_id());
        ++engine.applies;
      }
      *applied->mutable_installed() = installed;
      Report(name, report);
      return;
    }
    case v1::NodeCommand::kResumeReplica: {
      const v1::ResumeReplicaCommand& resume = command.resume_replica();
      FakeEngine& engine = engines[resume.replica()];
      for (const v1::InstalledState& worker : engine.workers) {
        if (worker.update_id() != engine.workers[0].update_id() ||
            worker.state() == v1::InstalledState::STATE_WRITING) {
          ++violations;
        }
      }
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
