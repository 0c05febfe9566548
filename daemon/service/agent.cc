#include "daemon/service/agent.h"

#include <fstream>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "daemon/service/answer.h"
#include "daemon/service/device_memory.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

// A model whose last client has left keeps its place in the store for so long.
constexpr absl::Duration kStoreLinger = absl::Minutes(10);

Checkpoints::Options CheckpointOptions(
    const Options& options, std::function<void(v1::NodeReport)> report) {
  Checkpoints::Options checkpoints;
  checkpoints.node = options.node;
  checkpoints.root = options.checkpoint_root;
  checkpoints.state_dir = options.state_dir;
  checkpoints.report = std::move(report);
  return checkpoints;
}

Store::Options StoreOptions(const Options& options) {
  Store::Options store;
  store.budget_bytes = options.store_budget_bytes;
  store.keep_updates = options.keep_updates;
  if (options.device_store) {
    store.device_budget_bytes = options.device_store_bytes > 0
                                    ? options.device_store_bytes
                                    : std::numeric_limits<int64_t>::max() / 2;
  }
  return store;
}

NodeLink::Options LinkOptions(const Options& options,
                              const std::string& coordinator) {
  NodeLink::Options link;
  link.coordinator = coordinator;
  link.heartbeat_interval = options.deadlines.heartbeat_interval;
  link.heartbeat_timeout = options.deadlines.heartbeat;
  link.fault_point = options.fault_point;
  return link;
}

// Resident bytes that are not shared memory: arenas are.
int64_t ResidentBytes() {
  std::ifstream status("/proc/self/status");
  std::string line;
  int64_t kib = 0;
  while (std::getline(status, line)) {
    absl::string_view rest = line;
    int64_t value;
    if ((absl::ConsumePrefix(&rest, "RssAnon:") ||
         absl::ConsumePrefix(&rest, "RssFile:")) &&
        absl::SimpleAtoi(
            absl::StripSuffix(absl::StripAsciiWhitespace(rest), " kB"),
            &value)) {
      kib += value;
    }
  }
  return kib * 1024;
}

}  // namespace

Mover::Options MoverOptions(const Options& options,
                            std::function<void(v1::NodeReport)> report) {
  Mover::Options mover;
  mover.node = options.node;
  mover.report = std::move(report);
  mover.progress_timeout = options.deadlines.progress;
  mover.prepare_timeout = options.deadlines.prepare;
  mover.peer_deadline = options.deadlines.peer;
  return mover;
}

Agent::Agent(const Options& options, Parts parts)
    : options_(options),
      parts_(std::move(parts)),
      incarnation_(RandomId()),
      layouts_(options_.node),
      store_(StoreOptions(options_), parts_.memory, this),
      device_copies_(&store_, parts_.memory),
      checkpoints_(
          CheckpointOptions(options_,
                            [this](v1::NodeReport report) {
                              loop_.Post(
                                  [this, report = std::move(report)]() mutable {
                                    link_.Report(std::move(report));
                                  });
                            }),
          &layouts_, &store_),
      mover_(MoverOptions(options_,
                          [this](v1::NodeReport report) {
                            loop_.Post(
                                [this, report = std::move(report)]() mutable {
                                  MoverReport(std::move(report));
                                });
                          }),
             &layouts_, &store_, parts_.memory, parts_.groups),
      link_(LinkOptions(options_, parts_.coordinator), &loop_, this),
      room_(&store_, &loop_, &reserving_, kStoreLinger),
      context_{&options_,
               &loop_,
               &data_,
               &reserving_,
               &copies_,
               &link_,
               &layouts_,
               &store_,
               &room_,
               &mover_,
               parts_.memory,
               parts_.devices,
               options_.device_store ? &placement_ : nullptr,
               options_.device_store ? &device_copies_ : nullptr,
               parts_.processes,
               parts_.journal,
               &newest_term_},
      trainers_(&context_),
      replicas_(&context_),
      cluster_id_(parts_.cluster_id),
      newest_term_(parts_.newest_term),
      last_check_(absl::Now()) {
  mover_.SetSink(replicas_.stream_sink());
  mover_.SetCheckpoints(&checkpoints_);
  if (options_.device_store) {
    mover_.SetDeviceStore(&placement_, &device_copies_);
    checkpoints_.SetDeviceCopies(&device_copies_);
    parts_.device_agents->OnLost(
        [this](const std::string& device) { store_.LoseDevice(device); });
  }
  trainers_.OnArenaGone([this](const std::string& arena_id) {
    replicas_.ArenaDropped(arena_id);
  });
}

Agent::~Agent() {
  Shutdown();
  StopLoops();
}

void Agent::Start(std::shared_ptr<grpc::Channel> coordinator) {
  started_ = true;
  link_.Start(std::move(coordinator));
  loop_.Post([this] { CheckLeases(); });
}

void Agent::Shutdown() {
  if (shut_down_) return;
  shut_down_ = true;
  absl::Notification ended;
  loop_.Post([this, &ended] {
    trainers_.EndAll(ShuttingDown());
    replicas_.EndAll(ShuttingDown());
    ended.Notify();
  });
  ended.WaitForNotification();
  if (started_) link_.Stop();
  if (options_.device_store) parts_.device_agents->OnLost(nullptr);
  mover_.Shutdown();
  checkpoints_.Shutdown();
  data_.Stop();
  copies_.Stop();
  // Frees the memory of the sessions that were ended.
  reserving_.Stop();
}

void Agent::StopLoops() { loop_.Stop(); }

v1::Hello Agent::MakeHello() {
  v1::Hello hello;
  hello.set_node(options_.node);
  hello.set_incarnation(incarnation_);
  hello.set_protocol_version(kNewestProtocolVersion);
  hello.set_software_version(kSoftwareVersion);
  hello.set_cluster_id(cluster_id_);
  hello.set_newest_term(newest_term_);
  hello.set_data_address(parts_.groups->address());
  for (const auto& label : options_.labels)
    (*hello.mutable_labels())[label.first] = label.second;
  *hello.mutable_memory() = MemoryUse();
  for (v1::HeldUpdate& held : store_.HeldUpdates())
    *hello.add_held_updates() = std::move(held);
  return hello;
}

v1::NodeHeartbeat Agent::MakeHeartbeat() {
  v1::NodeHeartbeat heartbeat;
  *heartbeat.mutable_memory() = MemoryUse();
  return heartbeat;
}

absl::StatusOr<NodeFigures> Agent::AskFigures(absl::Duration timeout) {
  auto figures = std::make_shared<NodeFigures>();
  const auto look = [this, figures] {
    figures->memory = MemoryUse();
    if (parts_.device_agents != nullptr) {
      for (const auto& report : parts_.device_agents->Reports()) {
        figures->nccl_communicators[report.device.uuid] =
            report.usage.nccl_communicators;
      }
    }
    figures->coordinator_silence = absl::Now() - link_.heard();
    figures->replica_alarms = replicas_.alarms();
  };
  switch (asker_.Ask(look, timeout)) {
    case Asker::Outcome::kDone:
      return std::move(*figures);
    case Asker::Outcome::kEnding:
      return ShuttingDown();
    case Asker::Outcome::kLate:
      break;
  }
  return ErrorStatus(
      absl::StatusCode::kUnavailable, "NODE_BUSY",
      absl::StrCat("node ", options_.node, " has not answered itself within ",
                   absl::FormatDuration(timeout), ": see its log"));
}

v1::MemoryUse Agent::MemoryUse() {
  v1::MemoryUse use;
  store_.FillMemoryUse(&use);
  use.set_trainer_arena_bytes(trainers_.arena_bytes());
  use.set_resident_bytes(ResidentBytes());
  if (parts_.device_agents != nullptr) {
    for (const auto& report : parts_.device_agents->Reports())
      *use.add_gpus() = ToProto(report);
  }
  return use;
}

absl::Status Agent::OnWelcome(const v1::Welcome& welcome) {
  const absl::Status status = parts_.welcomed(welcome);
  if (!status.ok()) return status;
  // Not before: one that ends here has not been heard of.
  ++losses_;
  cluster_id_ = welcome.cluster_id();
  mover_.SetClusterId(cluster_id_);
  if (welcome.term() > newest_term_) {
    if (newest_term_ > 0) {
      // What the coordinator before it had begun and not decided is over.
      const absl::Status why =
          ErrorStatus(absl::StatusCode::kAborted, "COORDINATOR_RESTARTED",
                      "the coordinator was started again while the update "
                      "moved; publish again");
      mover_.AbandonUpdates(why);
      checkpoints_.AbandonAll(why);
    }
    newest_term_ = welcome.term();
    snapshots_.clear();
  }
  LOG(INFO) << "node " << options_.node << " is in cluster " << cluster_id_
            << ", coordinator " << welcome.coordinator() << ", term "
            << welcome.term();
  trainers_.Announce();
  replicas_.Announce();
  for (const auto& snapshot : snapshots_) {
    v1::NodeReport report;
    *report.mutable_rank_snapshotted() = snapshot.second;
    link_.Report(std::move(report));
  }
  return absl::OkStatus();
}

void Agent::MoverReport(v1::NodeReport report) {
  if (report.has_rank_snapshotted()) {
    const v1::RankSnapshotted& snapshot = report.rank_snapshotted();
    snapshots_[{snapshot.model(), snapshot.rank()}] = snapshot;
  }
  link_.Report(std::move(report));
}

void Agent::ForgetSnapshots(const std::string& update_id) {
  for (auto it = snapshots_.begin(); it != snapshots_.end();) {
    it = it->second.update_id() == update_id ? snapshots_.erase(it)
                                             : std::next(it);
  }
}

void Agent::OnLost(const absl::Status& why) {
  // The coordinator waits for us as long; after that it has given up what we
  // were in.
  const uint64_t loss = ++losses_;
  replicas_.CoordinatorLost(absl::Now());
  loop_.PostAfter(options_.deadlines.node_reconnect_grace, [this, loss, why] {
    if (loss != losses_) return;
    const absl::Status lost =
        ErrorStatus(absl::StatusCode::kUnavailable, "COORDINATOR_UNREACHABLE",
                    absl::StrCat("node ", options_.node,
                                 " has lost the coordinator: ", why.message()));
    mover_.AbandonUpdates(lost);
    checkpoints_.AbandonAll(lost);
  });
}

void Agent::OnCommand(v1::NodeCommand command) {
  switch (command.command_case()) {
    case v1::NodeCommand::kDefineLayout:
      data_.Post([this, command = std::move(command)] {
        const absl::Status status = layouts_.Define(command.define_layout());
        LOG_IF(ERROR, !status.ok())
            << "layout " << command.define_layout().layout_id() << ": "
            << status;
      });
      return;
    case v1::NodeCommand::kPrepareUpdate:
      data_.Post([this, command = std::move(command)] {
        mover_.PrepareUpdate(command.prepare_update());
      });
      return;
    case v1::NodeCommand::kMoveUpdate:
      data_.Post([this, command = std::move(command)] {
        mover_.MoveUpdate(command.move_update());
      });
      return;
    case v1::NodeCommand::kUpdateManifest:
      data_.Post([this, command = std::move(command)] {
        mover_.UpdateManifest(command.update_manifest());
      });
      return;
    case v1::NodeCommand::kEndUpdate:
      ForgetSnapshots(command.end_update().update_id());
      data_.Post([this, command = std::move(command)] {
        mover_.EndUpdate(command.end_update());
      });
      return;
    case v1::NodeCommand::kPinUpdate:
      data_.Post([this, command = std::move(command)] {
        mover_.PinUpdate(command.pin_update());
      });
      return;
    case v1::NodeCommand::kDropUpdate:
      data_.Post([this, command = std::move(command)] {
        mover_.DropUpdate(command.drop_update());
      });
      return;
    case v1::NodeCommand::kReleaseSources:
      data_.Post([this, command = std::move(command)] {
        mover_.ReleaseSources(command.release_sources());
      });
      return;
    // Behind the layouts that they name.
    case v1::NodeCommand::kWriteCheckpoint:
      data_.Post([this, command = std::move(command)] {
        checkpoints_.WriteCheckpoint(command.write_checkpoint());
      });
      return;
    case v1::NodeCommand::kCompleteCheckpoint:
      data_.Post([this, command = std::move(command)] {
        checkpoints_.CompleteCheckpoint(command.complete_checkpoint());
      });
      return;
    case v1::NodeCommand::kReadCheckpoint:
      data_.Post([this, command = std::move(command)] {
        checkpoints_.ReadCheckpoint(command.read_checkpoint());
      });
      return;
    case v1::NodeCommand::kPruneCheckpoints:
      data_.Post([this, command = std::move(command)] {
        checkpoints_.PruneCheckpoints(command.prune_checkpoints());
      });
      return;
    case v1::NodeCommand::kDigestWorker:
      replicas_.Digest(command.digest_worker());
      return;
    case v1::NodeCommand::kPauseReplica:
      replicas_.Pause(command.pause_replica());
      return;
    case v1::NodeCommand::kApplyWorker:
      replicas_.Apply(command.apply_worker());
      return;
    case v1::NodeCommand::kRemoveWorker:
      replicas_.Remove(command.remove_worker());
      return;
    case v1::NodeCommand::kResumeReplica:
      replicas_.Resume(command.resume_replica());
      return;
    case v1::NodeCommand::kRefuseWorker:
      replicas_.Refuse(command.refuse_worker());
      return;
    case v1::NodeCommand::kRefuseReplica:
      replicas_.Refuse(command.refuse_replica());
      return;
    default:
      // Of a newer coordinator that speaks our version: it can do without us.
      LOG(WARNING) << "a command that this node does not know: "
                   << command.ShortDebugString();
  }
}

void Agent::OnArenaAdded(const std::string& arena_id) {
  loop_.Post([this, arena_id] { replicas_.ArenaAdded(arena_id); });
}

void Agent::OnArenaDropped(const std::string& arena_id) {
  loop_.Post([this, arena_id] { replicas_.ArenaDropped(arena_id); });
}

void Agent::OnUpdateEvicted(const std::string& model,
                            const std::string& update_id) {
  loop_.Post([this, model, update_id] {
    v1::NodeReport report;
    report.mutable_update_evicted()->set_model(model);
    report.mutable_update_evicted()->set_update_id(update_id);
    link_.Report(std::move(report));
  });
}

void Agent::CheckLeases() {
  const absl::Time now = absl::Now();
  const Deadlines& deadlines = options_.deadlines;
  // When this process stood still itself, its clients' words still lie in the
  // sockets.
  if (now - last_check_ > deadlines.heartbeat / 2) {
    trainers_.ForgiveSilence(now);
    replicas_.ForgiveSilence(now);
  }
  last_check_ = now;
  trainers_.CheckLeases(now);
  replicas_.CheckLeases(now);
  loop_.PostAfter(
      std::min(deadlines.heartbeat_interval, deadlines.heartbeat / 8),
      [this] { CheckLeases(); });
}

}  // namespace daemon
}  // namespace weightsync
