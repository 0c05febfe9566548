// Events for the replica machines, and what their actions mean; late joins and
// repairs.

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/coordinator/core.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

constexpr size_t kHistory = 32;

}  // namespace

std::string CoordinatorCore::CommandId(int64_t number) const {
  return absl::StrCat(term_, ".", number);
}

int64_t CoordinatorCore::CommandNumber(const std::string& command_id) const {
  if (command_id.empty()) return 0;
  const std::string prefix = absl::StrCat(term_, ".");
  int64_t number = 0;
  if (command_id.substr(0, prefix.size()) != prefix ||
      !absl::SimpleAtoi(command_id.substr(prefix.size()), &number)) {
    return -1;  // of an earlier term
  }
  return number;
}

WorkerContent CoordinatorCore::ContentOf(const v1::InstalledState& installed) {
  WorkerContent content;
  switch (installed.state()) {
    case v1::InstalledState::STATE_INSTALLED:
      content.kind =
          installed.update_id().empty() ? Content::kOwn : Content::kInstalled;
      break;
    case v1::InstalledState::STATE_WRITING:
      content.kind = Content::kWriting;
      break;
    case v1::InstalledState::STATE_NOTHING:
      content.kind = Content::kNothing;
      return content;
    default:
      return content;
  }
  content.update = KeyOf(installed.update_id());
  if (content.update != 0 && installed.version() > 0) {
    told_versions_[content.update] = installed.version();
  }
  return content;
}

CommittedUpdate CoordinatorCore::Describe(const std::string& name,
                                          UpdateKey update) {
  ModelRun* model = Model(name);
  const std::string& update_id = IdOf(update);
  if (model->committed.update_id == update_id) return model->committed;
  CommittedUpdate described;
  described.update_id = update_id;
  const v1::Version* record = FindRecord(model, update_id);
  if (record != nullptr && update != 0) {
    described.version = record->version();
    described.step = record->step();
    described.layout_id = record->layout_id();
    // This term vouches for what an earlier one committed.
    if (record->has_commit_time()) described.term = term_;
  } else if (auto told = told_versions_.find(update);
             told != told_versions_.end()) {
    // Older than what is kept: its number is the worker's own word.
    described.version = told->second;
  }
  return described;
}

// ---- Answers ----

void CoordinatorCore::ReplicaPaused(const v1::ReplicaPausedReport& report) {
  ReplicaRun* replica =
      FindReplica(report.model(), report.replica(), report.incarnation());
  if (replica == nullptr) return;
  ReplicaEvent event;
  event.kind = ReplicaEvent::kPaused;
  event.command = CommandNumber(report.command_id());
  event.fault = FromProto(report.failure());
  if (!event.fault.ok()) {
    event.fault.message = absl::StrCat(replica->machine.name,
                                       " cannot pause: ", event.fault.message);
  }
  Step(replica, event);
}

void CoordinatorCore::ReplicaResumed(const v1::ReplicaResumedReport& report) {
  ReplicaRun* replica =
      FindReplica(report.model(), report.replica(), report.incarnation());
  if (replica == nullptr) return;
  ReplicaEvent event;
  event.kind = ReplicaEvent::kResumed;
  event.command = CommandNumber(report.command_id());
  event.fault = FromProto(report.failure());
  if (!event.fault.ok()) {
    event.fault.message = absl::StrCat(replica->machine.name,
                                       " cannot resume: ", event.fault.message);
  }
  Step(replica, event);
}

void CoordinatorCore::WorkerApplied(const v1::WorkerAppliedReport& report) {
  ReplicaRun* replica =
      FindReplica(report.model(), report.replica(), report.incarnation());
  const int worker = report.worker_index();
  if (replica == nullptr || worker < 0 ||
      worker >= static_cast<int>(replica->machine.workers.size())) {
    return;
  }
  ReplicaEvent event;
  event.kind = ReplicaEvent::kApplied;
  event.worker = worker;
  event.command = CommandNumber(report.command_id());
  event.update = KeyOf(report.update_id());
  event.fault = FromProto(report.failure());
  const WorkerContent wanted{Content::kInstalled, event.update};
  if (report.has_installed()) {
    event.content = ContentOf(report.installed());
    if (event.fault.ok() && !(event.content == wanted)) {
      event.fault = Fault(StatusCode::kInternal, "APPLY_INCOMPLETE",
                          "it said done and holds something else");
    }
  } else {
    event.content = event.fault.ok()
                        ? wanted
                        : WorkerContent{Content::kWriting, event.update};
  }
  if (!event.fault.ok()) {
    event.fault.message =
        absl::StrCat("worker ", worker, " of ", replica->machine.name, ": ",
                     event.fault.message);
  }
  Step(replica, event);
}

// ---- What the machine wants ----

void CoordinatorCore::Step(ReplicaRun* replica, const ReplicaEvent& event) {
  const std::vector<ReplicaAction> actions =
      StepReplica(replica_timeouts_, event, now_, &replica->machine);
  for (const ReplicaAction& action : actions) {
    UpdateEvent news;
    news.fault = action.fault;
    if (!action.fault.ok()) replica->last_failure = ToProto(action.fault);
    switch (action.kind) {
      case ReplicaAction::kSendPause: {
        const ReplicaEntry* entry =
            registry_.FindReplica(replica->model, replica->name);
        v1::PauseReplicaCommand* out =
            SendTo(entry->node)->mutable_pause_replica();
        out->set_model(replica->model);
        out->set_replica(replica->name);
        out->set_incarnation(replica->incarnation);
        v1::PauseReplica* pause = out->mutable_pause();
        const CommittedUpdate update = Describe(replica->model, action.update);
        pause->set_command_id(CommandId(action.command));
        pause->set_update_id(update.update_id);
        pause->set_version(update.version);
        pause->set_mode(v1::PAUSE_MODE_DRAIN);
        *pause->mutable_timeout() = ToProto(options_.pause_timeout);
        break;
      }
      case ReplicaAction::kSendResume: {
        const ReplicaEntry* entry =
            registry_.FindReplica(replica->model, replica->name);
        v1::ResumeReplicaCommand* out =
            SendTo(entry->node)->mutable_resume_replica();
        out->set_model(replica->model);
        out->set_replica(replica->name);
        out->set_incarnation(replica->incarnation);
        v1::ResumeReplica* resume = out->mutable_resume();
        const CommittedUpdate update = Describe(replica->model, action.update);
        resume->set_command_id(CommandId(action.command));
        resume->set_update_id(update.update_id);
        resume->set_version(update.version);
        resume->set_step(update.step);
        resume->set_weights_changed(action.weights_changed);
        break;
      }
      case ReplicaAction::kSendApply:
        SendApply(replica, action);
        break;

      case ReplicaAction::kComplete: {
        replica->lost = false;
        replica->given_up = 0;
        const Fault fault =
            registry_.CheckReplica(replica->model, replica->name);
        if (!fault.ok()) {
          const ReplicaEntry* entry =
              registry_.FindReplica(replica->model, replica->name);
          Refuse(replica->model, {{entry->node, replica->name,
                                   replica->incarnation, -1, fault}});
          break;
        }
        Settle(replica);
        Step(replica, ReplicaEvent());  // what it waited with
        break;
      }
      case ReplicaAction::kLeft:
        replica->lost = true;
        replica->lost_time = now_;
        DropInstall(replica);
        news.kind = UpdateEvent::kReplicaLeft;
        PostReplica(*replica, std::move(news));
        break;
      case ReplicaAction::kPausedNow: {
        if (!replica->history.empty() &&
            !replica->history.back().has_resumed_time() &&
            !replica->history.back().has_paused_time()) {
          *replica->history.back().mutable_paused_time() = ToProto(now_);
          ShowTimes(replica);
        }
        news.kind = UpdateEvent::kReplicaPaused;
        PostReplica(*replica, std::move(news));
        if (replica->installing != 0) {
          ReplicaEvent install;
          install.kind = ReplicaEvent::kInstall;
          install.update = replica->installing;
          Step(replica, install);
        }
        break;
      }
      case ReplicaAction::kPauseFailed:
        news.kind = UpdateEvent::kReplicaPauseFailed;
        PostReplica(*replica, std::move(news));
        break;
      case ReplicaAction::kInstalledNow:
        *Times(replica, action.update)->mutable_applied_time() = ToProto(now_);
        ShowTimes(replica);
        replica->last_failure.Clear();
        news.kind = UpdateEvent::kReplicaInstalled;
        PostReplica(*replica, std::move(news));
        if (replica->installing == action.update) DropInstall(replica);
        break;
      case ReplicaAction::kApplyFailed:
        LOG(WARNING) << action.fault.message << "; it is tried again";
        break;
      case ReplicaAction::kFenced: {
        LOG(ERROR) << replica->machine.name
                   << " is fenced: " << action.fault.reason << ": "
                   << action.fault.message;
        news.kind = UpdateEvent::kReplicaFenced;
        PostReplica(*replica, std::move(news));
        if (action.update != 0) replica->given_up = action.update;
        if (replica->installing != 0) {
          *Times(replica, replica->installing)->mutable_failure() =
              ToProto(action.fault);
          ShowTimes(replica);
          if (replica->machine.Servable()) {
            // Nothing was written: it goes on with what it had, behind.
            DropInstall(replica);
          } else {
            const Holder holder{Holder::kInstall, replica->installing};
            replica->installing = 0;
            ReplicaEvent release;
            release.kind = ReplicaEvent::kRelease;
            release.holder = holder;
            Step(replica, release);
          }
        }
        break;
      }
      case ReplicaAction::kResumedNow:
        if (!replica->history.empty() &&
            !replica->history.back().has_resumed_time()) {
          *replica->history.back().mutable_resumed_time() = ToProto(now_);
          ShowTimes(replica);
        }
        news.kind = UpdateEvent::kReplicaResumed;
        PostReplica(*replica, std::move(news));
        break;
      case ReplicaAction::kResumeFailed:
      case ReplicaAction::kStillHeld:
        news.kind = UpdateEvent::kReplicaResumed;
        PostReplica(*replica, std::move(news));
        break;
    }
  }
}

void CoordinatorCore::SendApply(ReplicaRun* replica,
                                const ReplicaAction& action) {
  const ReplicaEntry* entry =
      registry_.FindReplica(replica->model, replica->name);
  const std::string& node = entry->workers[action.worker].node;
  const CommittedUpdate update = Describe(replica->model, action.update);
  auto layout = layouts_.find(update.layout_id);
  if (layout != layouts_.end()) SendLayout(*layout->second, node);
  v1::ApplyWorker* apply = SendTo(node)->mutable_apply_worker();
  apply->set_model(replica->model);
  apply->set_replica(replica->name);
  apply->set_worker_index(action.worker);
  apply->set_incarnation(replica->incarnation);
  apply->set_update_id(update.update_id);
  apply->set_version(update.version);
  apply->set_step(update.step);
  apply->set_layout_id(update.layout_id);
  apply->set_commit_term(update.term);
  apply->set_command_id(CommandId(action.command));
  *apply->mutable_timeout() = ToProto(options_.apply_timeout);
}

// ---- Late joins and repairs ----

bool CoordinatorCore::CanInstall(const ReplicaRun& replica,
                                 const CommittedUpdate& update) {
  auto layout = layouts_.find(update.layout_id);
  if (layout == layouts_.end()) return false;
  const ReplicaEntry* entry =
      registry_.FindReplica(replica.model, replica.name);
  for (const WorkerEntry& worker : entry->workers) {
    const NodeRun* node = ConnectedNode(worker.node);
    if (node == nullptr || !node->Holds(update.update_id) ||
        !HoldsFor(*layout->second, worker.node, worker.registration)) {
      return false;
    }
  }
  return true;
}

void CoordinatorCore::Settle(ReplicaRun* replica) {
  if (!replica->machine.Complete()) return;
  ModelRun* model = Model(replica->model);
  const CommittedUpdate& committed = model->committed;
  const UpdateKey key = KeyOf(committed.update_id);
  if (model->running != nullptr) {
    const UpdateRun& running = *model->running;
    auto index = running.replica_index.find(replica->name);
    if (index != running.replica_index.end()) {
      const UpdateReplica::Stage stage =
          running.machine.replicas[index->second].stage;
      if (stage == UpdateReplica::kAwaited) {
        UpdateEvent back;
        back.kind = UpdateEvent::kReplicaBack;
        back.installed = replica->machine.InstalledEverywhere(key);
        if (back.installed || CanInstall(*replica, committed)) {
          PostReplica(*replica, std::move(back));
          return;
        }
      } else if (stage != UpdateReplica::kLeft &&
                 stage != UpdateReplica::kResumed) {
        return;  // the update takes care of it
      }
    }
  }
  if (key != 0) {
    if (replica->machine.InstalledEverywhere(key)) return;
    if (replica->installing == key) return;
    if (replica->given_up != key && CanInstall(*replica, committed)) {
      DropInstall(replica);
      replica->installing = key;
      *Times(replica, key)->mutable_pause_request_time() = ToProto(now_);
      ShowTimes(replica);
      ReplicaEvent hold;
      hold.kind = ReplicaEvent::kHold;
      hold.holder = Holder{Holder::kInstall, key};
      Step(replica, hold);
      return;
    }
  }
  if (replica->machine.Servable() || replica->installing != 0 ||
      replica->machine.fenced) {
    return;
  }
  ReplicaEvent fence;
  fence.kind = ReplicaEvent::kFence;
  for (size_t i = 0; i < replica->machine.workers.size(); ++i) {
    const WorkerContent& content = replica->machine.workers[i].content;
    const char* what = content.kind == Content::kNothing   ? "nothing"
                       : content.kind == Content::kOwn     ? "its own weights"
                       : content.kind == Content::kWriting ? "a mix"
                                                           : "update ";
    absl::StrAppend(&fence.fault.message, i == 0 ? "" : ", ", "worker ", i,
                    " holds ", what,
                    content.kind == Content::kInstalled ? IdOf(content.update)
                                                        : std::string());
  }
  fence.fault.code = StatusCode::kFailedPrecondition;
  fence.fault.reason = "WORKER_TAINTED";
  fence.fault.message = absl::StrCat(
      replica->machine.name, " cannot serve: ", fence.fault.message,
      ", and no committed update is on its nodes; the next "
      "publish mends it");
  Step(replica, fence);
}

void CoordinatorCore::SettleAll(ModelRun* model) {
  for (auto& entry : model->replicas) Settle(&entry.second);
}

void CoordinatorCore::DropInstall(ReplicaRun* replica) {
  if (replica->installing == 0) return;
  ReplicaEvent event;
  event.holder = Holder{Holder::kInstall, replica->installing};
  replica->installing = 0;
  event.kind = ReplicaEvent::kForget;
  Step(replica, event);
  event.kind = ReplicaEvent::kRelease;
  Step(replica, event);
}

// ---- Times ----

v1::ReplicaTimes* CoordinatorCore::Times(ReplicaRun* replica,
                                         UpdateKey update) {
  const std::string& update_id = IdOf(update);
  if (!replica->history.empty() &&
      replica->history.back().update_id() == update_id) {
    return &replica->history.back();
  }
  v1::ReplicaTimes times;
  times.set_replica(replica->machine.name);
  times.set_update_id(update_id);
  times.set_version(Describe(replica->model, update).version);
  replica->history.push_back(std::move(times));
  if (replica->history.size() > kHistory) replica->history.pop_front();
  return &replica->history.back();
}

void CoordinatorCore::ShowTimes(ReplicaRun* replica) {
  const v1::ReplicaTimes& times = replica->history.back();
  v1::Version* record = FindRecord(Model(replica->model), times.update_id());
  if (record == nullptr) return;
  v1::ReplicaTimes* shown = nullptr;
  for (v1::ReplicaTimes& known : *record->mutable_replicas()) {
    if (known.replica() == times.replica()) shown = &known;
  }
  if (shown == nullptr) shown = record->add_replicas();
  *shown = times;
  Changed(*record);
}

}  // namespace daemon
}  // namespace weightsync
