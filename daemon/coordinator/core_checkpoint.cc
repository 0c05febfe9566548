// Checkpoints that nodes write together: for SaveVersion, and for updates that
// come by way of one. What is decided is checkpoint_machine.h's; here it is put
// into commands, which are said again to a node that comes back.

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "daemon/coordinator/core.h"
#include "daemon/coordinator/queries.h"
#include "glog/logging.h"
#include "proto/status.h"
#include "transport/file/checkpoint.h"
#include "transport/file/rooted_directory.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

// Below --checkpoint_root; a directory for each model.
constexpr char kUpdatesDirectory[] = "updates";

std::string LastPart(const std::string& name) {
  return name.substr(name.rfind('/') + 1);
}

std::string UpdatesOf(const std::string& model) {
  return absl::StrCat(kUpdatesDirectory, "/", LastPart(model));
}

// Where those of all models lie, or of one: as a checkpoint itself it would be
// in the way of every update.
bool HoldsUpdates(const std::string& path) {
  if (path == kUpdatesDirectory) return true;
  const std::string below = absl::StrCat(kUpdatesDirectory, "/");
  return absl::StartsWith(path, below) &&
         path.find('/', below.size()) == std::string::npos;
}

// Beside it, hidden, and of a name that nobody else has.
std::string TemporaryName(const std::string& path, const std::string& id) {
  const std::string leaf = LastPart(path);
  return absl::StrCat(path.substr(0, path.size() - leaf.size()), ".",
                      leaf.substr(0, 200), ".weightsync-", id);
}

}  // namespace

// ---- SaveVersion ----

void CoordinatorCore::Save(AdminWait wait, const v1::SaveVersionRequest& call) {
  const auto fail = [&](StatusCode code, const char* reason,
                        const std::string& message) {
    Answer(wait, ErrorStatus(code, reason, message));
  };
  const auto path = transport::CheckRootedPath(call.path());
  if (!path.ok()) return Answer(wait, path.status());
  if (HoldsUpdates(*path)) {
    return fail(StatusCode::kFailedPrecondition, "CHECKPOINT_PATH_TAKEN",
                absl::StrCat(*path,
                             " is where the checkpoints lie by which updates "
                             "come: give a path that is not below ",
                             kUpdatesDirectory));
  }
  std::string template_path;
  if (!call.template_path().empty()) {
    auto checked = transport::CheckRootedPath(call.template_path());
    if (!checked.ok()) return Answer(wait, checked.status());
    template_path = *checked;
  }
  if (call.max_shard_bytes() != 0 &&
      call.max_shard_bytes() < transport::kMinShardBytes) {
    return fail(StatusCode::kInvalidArgument, "SHARD_BYTES_INVALID",
                absl::StrCat("max_shard_bytes of ", call.max_shard_bytes(),
                             ": give at least ", transport::kMinShardBytes,
                             ", or none for ", transport::kDefaultShardBytes));
  }
  const size_t versions = call.name().find("/versions/");
  const std::string model_name = call.name().substr(0, versions);
  const CommittedUpdate* target = nullptr;
  const bool latest = absl::EndsWith(call.name(), "/versions/latest");
  if (latest) {
    const auto shown = Queries(*this).GetModel(model_name);
    if (!shown.ok()) return Answer(wait, shown.status());
    const ModelRun* model = Model(model_name);
    if (!model->commits.empty()) target = &model->commits.back();
  } else {
    const auto shown = Queries(*this).GetVersion(call.name(), "", now_);
    if (!shown.ok()) return Answer(wait, shown.status());
    for (const CommittedUpdate& commit : Model(model_name)->commits) {
      if (commit.version == shown->version()) target = &commit;
    }
  }
  if (target == nullptr) {
    return fail(StatusCode::kFailedPrecondition, "VERSION_NOT_COMMITTED",
                latest ? absl::StrCat(model_name, " has no committed version")
                       : absl::StrCat(call.name(),
                                      " was never committed, or too long ago: "
                                      "the newest ",
                                      kOlderCommits + 1, " are known"));
  }
  Fault fault;
  auto run = std::make_unique<CheckpointRun>();
  run->writers = WritersOf(*target, &fault);
  if (!fault.ok()) return Answer(wait, ToStatus(fault));
  run->model = model_name;
  run->update_id = target->update_id;
  run->version = target->version;
  run->layout = target->layout;
  run->path = *path;
  run->template_path = template_path;
  run->overwrite = call.overwrite();
  run->max_shard_bytes = call.max_shard_bytes();
  wait.model = model_name;
  wait.update = KeyOf(target->update_id);
  wait.deadline = now_ + Patience(call.has_timeout(), call.timeout(),
                                  options_.operation_timeout);
  run->machine.deadline = wait.deadline;
  run->machine.late =
      Fault(StatusCode::kDeadlineExceeded, "SAVE_TIMEOUT",
            absl::StrCat(*path, " was not written within ",
                         absl::FormatDuration(wait.deadline - now_),
                         "; nothing is left of it: give it more time"));
  run->machine.writers.resize(run->writers.size());
  for (CheckpointWriter& writer : run->machine.writers) writer.ready = true;
  run->machine.go = true;
  run->id = options_.random_id();
  wait.job = run->id;
  waits_.push_back(wait);
  BeginCheckpoint(std::move(run));
}

std::vector<CheckpointRun::Writer> CoordinatorCore::WritersOf(
    const CommittedUpdate& update, Fault* fault) {
  std::vector<CheckpointRun::Writer> writers;
  const auto none = [&](const std::string& what) {
    *fault = Fault(
        StatusCode::kFailedPrecondition, "NO_HOLDER",
        absl::StrCat("version ", update.version, " cannot be saved: ", what));
    return std::vector<CheckpointRun::Writer>();
  };
  if (update.layout == nullptr) return none("how it is laid out is not known");
  std::set<uint32_t> left;
  for (uint32_t b = 0; b < update.layout->layout.plan.bucket_count(); ++b) {
    left.insert(b);
  }
  // Whoever has most of what is left: one node alone, where there is one.
  while (!left.empty()) {
    const NodeRun* best = nullptr;
    std::vector<int32_t> has;
    for (const auto& entry : nodes_) {
      const NodeRun& node = entry.second;
      if (node.stream.empty() || node.draining) continue;
      const Holdings holdings(node, update);
      std::vector<int32_t> held;
      for (const uint32_t bucket : left) {
        if (holdings.Has(bucket)) {
          held.push_back(static_cast<int32_t>(bucket));
        }
      }
      if (held.size() <= has.size()) continue;
      best = &node;
      has = std::move(held);
    }
    if (best == nullptr) {
      return none(absl::StrCat("no node that can be reached holds bucket ",
                               *left.begin(), " any more"));
    }
    for (const int32_t bucket : has) left.erase(static_cast<uint32_t>(bucket));
    CheckpointRun::Writer writer;
    writer.node = best->name;
    writer.buckets = std::move(has);
    writers.push_back(std::move(writer));
  }
  if (writers.empty()) return none("it has no buckets");
  return writers;
}

// ---- Any checkpoint ----

void CoordinatorCore::BeginCheckpoint(std::unique_ptr<CheckpointRun> fresh) {
  CheckpointRun* run = fresh.get();
  run->temporary = TemporaryName(run->path, run->id);
  run->marker = absl::StrCat(".marker-", options_.random_id());
  run->begin = now_;
  checkpoints_[run->id] = std::move(fresh);
  for (const CheckpointRun::Writer& writer : run->writers) {
    SendLayout(*run->layout, writer.node);
  }
  v1::NodeCommand command;
  v1::WriteCheckpoint* begin = command.mutable_write_checkpoint();
  FillWrite(*run, begin);
  begin->set_step(v1::WriteCheckpoint::STEP_BEGIN);
  begin->set_template_path(run->template_path);
  begin->set_overwrite(run->overwrite);
  Command(run, 0, std::move(command));
}

void CoordinatorCore::FillWrite(const CheckpointRun& run,
                                v1::WriteCheckpoint* write) {
  write->set_model(run.model);
  write->set_update_id(run.update_id);
  write->set_layout_id(run.layout->id());
  write->mutable_checkpoint()->set_path(run.temporary);
  write->mutable_checkpoint()->set_marker(run.marker);
  write->set_max_shard_bytes(run.max_shard_bytes);
  write->set_path(run.path);
  const absl::Duration left = run.machine.deadline - now_;
  if (left < absl::Hours(24)) *write->mutable_timeout() = ToProto(left);
}

void CoordinatorCore::FillComplete(const CheckpointRun& run,
                                   v1::CompleteCheckpoint* complete) {
  complete->set_model(run.model);
  complete->set_layout_id(run.layout->id());
  complete->mutable_checkpoint()->set_path(run.temporary);
  complete->mutable_checkpoint()->set_marker(run.marker);
  complete->set_path(run.path);
  complete->set_template_path(run.template_path);
  complete->set_overwrite(run.overwrite);
  complete->set_max_shard_bytes(run.max_shard_bytes);
  if (run.of_update) {
    complete->set_update_id(run.update_id);
    complete->set_version(run.version);
  }
}

void CoordinatorCore::Command(CheckpointRun* run, int index,
                              v1::NodeCommand command) {
  CheckpointRun::Writer& writer = run->writers[static_cast<size_t>(index)];
  // One for each step of each writer: a node does nothing twice.
  writer.command_id = absl::StrCat(
      run->id, "/", index, "/",
      command.has_write_checkpoint() ? command.write_checkpoint().step() : 9);
  if (command.has_write_checkpoint()) {
    command.mutable_write_checkpoint()->set_command_id(writer.command_id);
  } else {
    command.mutable_complete_checkpoint()->set_command_id(writer.command_id);
  }
  *SendTo(writer.node) = command;
  writer.command = std::move(command);
}

void CoordinatorCore::GiveUpCheckpoint(CheckpointRun* run, int index) {
  v1::CompleteCheckpoint* give_up =
      SendTo(run->writers[static_cast<size_t>(index)].node)
          ->mutable_complete_checkpoint();
  FillComplete(*run, give_up);
  give_up->set_command_id(absl::StrCat(run->id, "/", index, "/0"));
  give_up->set_give_up(true);
}

void CoordinatorCore::PostCheckpoint(const std::string& id,
                                     CheckpointEvent event) {
  auto it = checkpoints_.find(id);
  if (it == checkpoints_.end()) return;
  CheckpointRun* run = it->second.get();
  const bool began = run->machine.stage == CheckpointStage::kBeginning;
  for (const CheckpointAction& action :
       StepCheckpoint(event, now_, &run->machine)) {
    v1::NodeCommand command;
    switch (action.kind) {
      case CheckpointAction::kSee:
        FillWrite(*run, command.mutable_write_checkpoint());
        command.mutable_write_checkpoint()->set_step(
            v1::WriteCheckpoint::STEP_SEE);
        Command(run, action.writer, std::move(command));
        break;
      case CheckpointAction::kWrite: {
        v1::WriteCheckpoint* write = command.mutable_write_checkpoint();
        FillWrite(*run, write);
        write->set_step(v1::WriteCheckpoint::STEP_WRITE);
        for (const int32_t bucket :
             run->writers[static_cast<size_t>(action.writer)].buckets) {
          write->add_buckets(bucket);
        }
        Command(run, action.writer, std::move(command));
        break;
      }
      case CheckpointAction::kComplete:
        FillComplete(*run, command.mutable_complete_checkpoint());
        Command(run, action.writer, std::move(command));
        break;
      case CheckpointAction::kGiveUp:
        GiveUpCheckpoint(run, action.writer);
        break;
      case CheckpointAction::kEnd:
        EndCheckpoint(run);  // `run` may be gone; it is the last action
        return;
    }
  }
  if (!began || run->machine.stage == CheckpointStage::kBeginning ||
      !run->of_update) {
    return;
  }
  // Now there is something to be seen.
  ModelRun* model = Model(run->model);
  UpdateRun* update = model->FindUpdate(run->update_id);
  if (update == nullptr) return;
  const std::set<int> waiting = std::move(update->disk_preparing);
  update->disk_preparing.clear();
  for (const int node : waiting) {
    SendDiskPrepare(model, update, node);
    if (update->machine.all_copied) SendManifest(*update, node);
  }
}

void CoordinatorCore::EndCheckpoint(CheckpointRun* run) {
  for (CheckpointRun::Writer& writer : run->writers) writer.command_id.clear();
  const Fault& fault = run->machine.fault;
  if (run->of_update) {
    // Kept until the update ends: it may be aborted after all.
    ModelRun* model = Model(run->model);
    UpdateRun* update = model->FindUpdate(run->update_id);
    if (update == nullptr) return;
    UpdateEvent event;
    event.kind = UpdateEvent::kCheckpointWritten;
    event.fault = fault;
    Post(*update, std::move(event));
    if (!fault.ok()) return;
    const std::set<int> waiting = std::move(update->disk_moving);
    update->disk_moving.clear();
    for (const int node : waiting) SendDiskMove(model, update, node);
    return;
  }
  auto wait = std::find_if(
      waits_.begin(), waits_.end(),
      [run](const AdminWait& other) { return other.job == run->id; });
  if (wait != waits_.end()) {
    if (fault.ok()) {
      v1::SaveVersionResponse response;
      response.set_path(run->path);
      response.set_update_id(run->update_id);
      response.set_version(run->version);
      response.set_tensor_count(
          static_cast<int32_t>(run->layout->layout.catalog.size()));
      response.set_shard_count(run->shard_count);
      response.set_written_bytes(run->layout->total_bytes);
      *response.mutable_save_duration() = ToProto(now_ - run->begin);
      for (const CheckpointRun::Writer& writer : run->writers) {
        response.add_nodes(absl::StrCat("nodes/", writer.node));
      }
      Answer(*wait, std::move(response));
    } else {
      Answer(*wait, ToStatus(fault));
    }
  }
  // CheckWaits finds that it has ended.
  checkpoints_.erase(std::string(run->id));
}

void CoordinatorCore::CheckpointWritten(const v1::CheckpointWritten& report) {
  const std::string id =
      report.command_id().substr(0, report.command_id().find('/'));
  auto it = checkpoints_.find(id);
  if (it == checkpoints_.end()) return;
  CheckpointRun* run = it->second.get();
  for (size_t i = 0; i < run->writers.size(); ++i) {
    CheckpointRun::Writer& writer = run->writers[i];
    if (writer.command_id != report.command_id()) continue;
    writer.command_id.clear();
    run->written_bytes += report.written_bytes();
    if (report.shard_count() > 0) run->shard_count = report.shard_count();
    CheckpointEvent event;
    event.kind = CheckpointEvent::kAnswered;
    event.writer = static_cast<int>(i);
    event.fault = FromProto(report.failure());
    const std::string who = absl::StrCat("node ", writer.node);
    if (!event.fault.ok() && !absl::StrContains(event.fault.message, who)) {
      event.fault.message = absl::StrCat(who, ": ", event.fault.message);
    }
    PostCheckpoint(id, std::move(event));
    return;
  }
}

void CoordinatorCore::TickCheckpoints() {
  std::vector<std::string> ids;
  for (const auto& entry : checkpoints_) ids.push_back(entry.first);
  for (const std::string& id : ids) PostCheckpoint(id, CheckpointEvent());
}

void CoordinatorCore::SayCheckpointsAgain(const std::string& node) {
  for (const auto& entry : checkpoints_) {
    for (const CheckpointRun::Writer& writer : entry.second->writers) {
      if (writer.node != node || writer.command_id.empty()) continue;
      SendLayout(*entry.second->layout, node);
      *SendTo(node) = writer.command;
    }
  }
  for (const auto& model : models_) {
    for (const auto& load : model.second.loads) {
      if (load->node == node && !load->read) SendRead(*load);
    }
  }
}

void CoordinatorCore::LoseCheckpoints(const std::string& node,
                                      const Fault& fault) {
  std::vector<std::pair<std::string, int>> lost;
  for (const auto& entry : checkpoints_) {
    const auto& writers = entry.second->writers;
    for (size_t i = 0; i < writers.size(); ++i) {
      if (writers[i].node == node) {
        lost.emplace_back(entry.first, static_cast<int>(i));
      }
    }
  }
  for (const auto& writer : lost) {
    CheckpointEvent event;
    event.kind = CheckpointEvent::kWriterLost;
    event.writer = writer.second;
    event.fault = fault;
    PostCheckpoint(writer.first, std::move(event));
  }
  std::vector<std::pair<std::string, std::string>> loads;
  for (const auto& model : models_) {
    for (const auto& load : model.second.loads) {
      if (load->node == node && !load->read) {
        loads.emplace_back(model.first, load->id);
      }
    }
  }
  for (const auto& load : loads) {
    FailLoad(Model(load.first), load.second, fault);
  }
}

// ---- An update by way of one ----

void CoordinatorCore::GoByDisk(ModelRun* model, UpdateRun* update) {
  LOG(WARNING) << update->record.name() << " (update " << update->update_id
               << "): its groups cannot be made ("
               << update->machine.network_fault.reason << ": "
               << update->machine.network_fault.message
               << "); it goes by way of disk";
  update->record.set_transfer_medium(v1::TRANSFER_MEDIUM_DISK);
  Changed(update->record);
  (void)model;
}

void CoordinatorCore::SendDiskPrepare(ModelRun* model, UpdateRun* update,
                                      int index) {
  UpdateRun& run = *update;
  const NodeLayout& layout = run.layout->layout;
  const bool load = run.config.from_checkpoint;
  // What the network was expected to take says nothing now.
  run.predicted.erase("transfer");
  run.predicted.erase("total");
  if (run.flows_epoch != run.machine.epoch) {
    run.flows_epoch = run.machine.epoch;
    int64_t read_bytes = 0;
    std::map<std::string, v1::NodeProgress> before;
    for (const v1::NodeProgress& progress : run.record.nodes()) {
      before[progress.node()] = progress;
    }
    run.record.clear_nodes();
    for (size_t i = 0; i < run.machine.nodes.size(); ++i) {
      const UpdateNode& node = run.machine.nodes[i];
      if (!node.In() || !node.receiver) continue;
      int64_t needed = 0;
      for (uint32_t b = 0; b < layout.plan.bucket_count(); ++b) {
        const auto& nodes = layout.plan.need_nodes(b);
        if (layout.plan.bucket(b).source_node != static_cast<int32_t>(i) &&
            std::binary_search(nodes.begin(), nodes.end(),
                               static_cast<int32_t>(i))) {
          needed += layout.plan.bucket(b).bytes;
        }
      }
      v1::NodeProgress* progress = run.record.add_nodes();
      *progress = before[node.name];
      progress->set_node(node.name);
      progress->set_needed_bytes(needed);
      read_bytes += needed;
    }
    run.record.set_wire_bytes(read_bytes);
  }
  if (!load && run.checkpoint.empty()) {
    auto checkpoint = std::make_unique<CheckpointRun>();
    checkpoint->id = options_.random_id();
    checkpoint->of_update = true;
    checkpoint->model = model->name;
    checkpoint->update_id = run.update_id;
    checkpoint->version = run.record.version();
    checkpoint->layout = run.layout;
    checkpoint->path =
        absl::StrCat(UpdatesOf(model->name), "/", run.record.version(), "-",
                     run.update_id.substr(0, 8));
    checkpoint->machine.owner_sees = true;
    for (size_t i = 0; i < run.machine.nodes.size(); ++i) {
      if (!run.machine.nodes[i].source) continue;
      CheckpointRun::Writer writer;
      writer.node = run.machine.nodes[i].name;
      for (uint32_t b = 0; b < layout.plan.bucket_count(); ++b) {
        if (layout.plan.bucket(b).source_node == static_cast<int32_t>(i)) {
          writer.buckets.push_back(static_cast<int32_t>(b));
        }
      }
      checkpoint->writers.push_back(std::move(writer));
    }
    checkpoint->machine.writers.resize(checkpoint->writers.size());
    run.checkpoint = checkpoint->id;
    run.record.set_checkpoint_path(checkpoint->path);
    BeginCheckpoint(std::move(checkpoint));
    NoteCopied(run);
  }
  auto written = checkpoints_.find(run.checkpoint);
  if (!load &&
      (written == checkpoints_.end() ||
       written->second->machine.stage == CheckpointStage::kBeginning)) {
    run.disk_preparing.insert(index);
    return;
  }
  const std::string& name = run.machine.nodes[static_cast<size_t>(index)].name;
  SendLayout(*run.layout, name);
  v1::PrepareUpdate* prepare = SendTo(name)->mutable_prepare_update();
  prepare->set_model(model->name);
  prepare->set_update_id(run.update_id);
  prepare->set_version(run.record.version());
  prepare->set_step(run.record.step());
  prepare->set_layout_id(run.layout->id());
  prepare->mutable_epoch()->set_term(term_);
  prepare->mutable_epoch()->set_counter(run.machine.epoch);
  *prepare->mutable_timeout() = ToProto(options_.prepare_timeout);
  prepare->set_update_mode(run.options.update_mode());
  prepare->set_publish_mode(run.options.publish_mode());
  prepare->set_load(load);
  v1::Checkpoint* checkpoint = prepare->mutable_checkpoint();
  if (load || written->second->machine.stage == CheckpointStage::kDone) {
    checkpoint->set_path(run.record.checkpoint_path());
  } else {
    checkpoint->set_path(written->second->temporary);
    checkpoint->set_marker(written->second->marker);
  }
}

void CoordinatorCore::SendDiskMove(ModelRun* model, UpdateRun* update,
                                   int index) {
  const UpdateRun& run = *update;
  auto written = checkpoints_.find(run.checkpoint);
  if (!run.config.from_checkpoint) {
    if (written == checkpoints_.end()) return;  // it is being cancelled
    if (written->second->machine.stage != CheckpointStage::kDone) {
      update->disk_moving.insert(index);
      CheckpointEvent go;
      go.kind = CheckpointEvent::kGo;
      PostCheckpoint(run.checkpoint, go);
      return;
    }
  }
  v1::MoveUpdate* move =
      SendTo(run.machine.nodes[static_cast<size_t>(index)].name)
          ->mutable_move_update();
  move->set_model(model->name);
  move->set_update_id(run.update_id);
  move->mutable_epoch()->set_term(term_);
  move->mutable_epoch()->set_counter(run.machine.epoch);
  *move->mutable_progress_timeout() = ToProto(options_.progress_timeout);
  move->mutable_checkpoint()->set_path(run.record.checkpoint_path());
}

void CoordinatorCore::NoteCopied(const UpdateRun& update) {
  auto it = checkpoints_.find(update.checkpoint);
  if (it == checkpoints_.end()) return;
  for (size_t i = 0; i < it->second->writers.size(); ++i) {
    const std::string& node = it->second->writers[i].node;
    const bool copied = std::all_of(
        update.machine.ranks.begin(), update.machine.ranks.end(),
        [&](const UpdateRank& rank) {
          const size_t at = static_cast<size_t>(rank.node);
          return update.machine.nodes[at].name != node || rank.copied;
        });
    if (!copied) continue;
    CheckpointEvent ready;
    ready.kind = CheckpointEvent::kReady;
    ready.writer = static_cast<int>(i);
    PostCheckpoint(update.checkpoint, ready);
  }
}

void CoordinatorCore::ForgetPruned(ModelRun* model,
                                   const std::set<std::string>& busy) {
  // By number, as the node goes by; a version that was loaded from one of them
  // names it too.
  const std::string directory = absl::StrCat(UpdatesOf(model->name), "/");
  std::map<int64_t, std::string> known;
  for (const v1::Version& version : model->ended) {
    absl::string_view leaf = version.checkpoint_path();
    int64_t number = 0;
    if (absl::ConsumePrefix(&leaf, directory) &&
        absl::SimpleAtoi(leaf.substr(0, leaf.find('-')), &number)) {
      known[number] = version.checkpoint_path();
    }
  }
  // That of the update which ends now is the first.
  int kept = 1;
  for (auto it = known.rbegin(); it != known.rend(); ++it) {
    if (kept++ < options_.checkpoints_kept || busy.count(it->second) != 0) {
      continue;
    }
    for (v1::Version& version : model->ended) {
      if (version.checkpoint_path() != it->second) continue;
      version.clear_checkpoint_path();
      Changed(version);
    }
  }
}

void CoordinatorCore::EndDisk(ModelRun* model, UpdateRun* update, bool active) {
  auto it = checkpoints_.find(update->checkpoint);
  if (it == checkpoints_.end()) return;
  CheckpointRun* run = it->second.get();
  if (!active) {
    // Also one that is complete: nobody shall take it for a version.
    for (size_t i = 0; i < run->writers.size(); ++i) {
      if (run->machine.stage == CheckpointStage::kFailed) break;
      GiveUpCheckpoint(run, static_cast<int>(i));
    }
    update->record.clear_checkpoint_path();
  } else if (options_.checkpoints_kept > 0) {
    std::set<std::string> busy;
    v1::PruneCheckpoints* prune =
        SendTo(run->writers[0].node)->mutable_prune_checkpoints();
    prune->set_path(UpdatesOf(model->name));
    prune->set_kept(options_.checkpoints_kept);
    for (const auto& other : models_) {
      for (const auto& load : other.second.loads) busy.insert(load->path);
      for (const auto& running : other.second.updates) {
        busy.insert(running->record.checkpoint_path());
      }
    }
    for (const std::string& path : busy) prune->add_busy_paths(path);
    ForgetPruned(model, busy);
  }
  checkpoints_.erase(it);
}

}  // namespace daemon
}  // namespace weightsync
