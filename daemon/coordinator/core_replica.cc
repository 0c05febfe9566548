// Events for the replica machines, and what their actions mean.

#include <algorithm>

#include "absl/strings/match.h"
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
  return absl::StrCat(command_prefix_, number);
}

int64_t CoordinatorCore::CommandNumber(const std::string& command_id) const {
  if (command_id.empty()) return 0;
  int64_t number = 0;
  if (!absl::StartsWith(command_id, command_prefix_) ||
      !absl::SimpleAtoi(command_id.substr(command_prefix_.size()), &number)) {
    return -1;  // of an earlier coordinator
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
                                          UpdateKey update) const {
  CommittedUpdate described;
  described.update_id = IdOf(update);
  auto it = models_.find(name);
  if (update == 0 || it == models_.end()) return described;
  const ModelRun& model = it->second;
  const CommittedUpdate* commit = model.FindCommit(described.update_id);
  if (commit != nullptr) {
    // Without the digests, of which there may be thousands.
    described.version = commit->version;
    described.step = commit->step;
    described.layout_id = commit->layout_id;
    described.term = commit->term;
    described.layout = commit->layout;
    described.options = commit->options;
    described.lost = commit->lost;
    return described;
  }
  const UpdateRun* running = model.FindUpdate(described.update_id);
  const v1::Version* record = running == nullptr ? nullptr : &running->record;
  for (const v1::Version& ended : model.ended) {
    if (ended.update_id() == described.update_id) record = &ended;
  }
  const auto told = told_versions_.find(update);
  if (record != nullptr) {
    described.version = record->version();
    described.step = record->step();
    described.layout_id = record->layout_id();
    // This term vouches for what an earlier one committed.
    if (record->has_commit_time()) described.term = term_;
  } else if (told != told_versions_.end()) {
    // Older than what is kept: its number is the worker's own word.
    described.version = told->second;
  }
  return described;
}

// ---- Answers ----

namespace {

// The client library names the engine of a hook that failed.
std::string CannotText(const std::string& replica, const char* what,
                       const std::string& message) {
  return absl::StrContains(message, absl::StrCat(replica, " "))
             ? message
             : absl::StrCat(replica, " cannot ", what, ": ", message);
}

}  // namespace

void CoordinatorCore::ReplicaPaused(const v1::ReplicaPausedReport& report) {
  ReplicaRun* replica =
      FindReplica(report.model(), report.replica(), report.incarnation());
  if (replica == nullptr) return;
  ReplicaEvent event;
  event.kind = ReplicaEvent::kPaused;
  event.command = CommandNumber(report.command_id());
  event.fault = FromProto(report.failure());
  if (!event.fault.ok()) {
    event.fault.message =
        CannotText(replica->machine.name, "pause", event.fault.message);
  }
  // Asked once more, it only says that it was paused already.
  if (replica->pause_detail.empty()) replica->pause_detail = report.detail();
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
    event.fault.message =
        CannotText(replica->machine.name, "resume", event.fault.message);
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
  if (report.command_id().empty() && report.has_installed() &&
      !IsFailure(report.failure())) {
    // Unasked: after a STREAM that broke off, or an engine that dropped its
    // weights.
    event.kind = ReplicaEvent::kContent;
    event.worker = worker;
    event.content = ContentOf(report.installed());
    Step(replica, event);
    Settle(replica);
    return;
  }
  event.kind = ReplicaEvent::kApplied;
  event.worker = worker;
  event.command = CommandNumber(report.command_id());
  // The answer to a RemoveWeights names no update.
  event.update =
      report.update_id().empty() ? kRemoval : KeyOf(report.update_id());
  event.fault = FromProto(report.failure());
  const WorkerContent wanted =
      event.update == kRemoval
          ? WorkerContent{Content::kNothing, 0}
          : WorkerContent{Content::kInstalled, event.update};
  if (report.has_installed()) {
    event.content = ContentOf(report.installed());
    if (event.fault.ok() && !(event.content == wanted)) {
      event.fault = Fault(StatusCode::kInternal, "APPLY_INCOMPLETE",
                          "it said done and holds something else");
    }
  } else {
    event.content = event.fault.ok()
                        ? wanted
                        : WorkerContent{Content::kWriting,
                                        std::max<UpdateKey>(event.update, 0)};
  }
  if (!event.fault.ok()) {
    event.fault.message =
        SaidBy(absl::StrCat("worker ", worker, " of ", replica->machine.name),
               event.fault.message);
  }
  if (report.not_held()) {
    // Its node has not got what we thought. Asking again would not help; the
    // bytes are fetched, and then it is asked again.
    const ReplicaEntry* entry =
        registry_.FindReplica(replica->model, replica->name);
    NodeRun* node = FindNode(entry->workers[worker].node);
    if (node != nullptr) {
      ForgetHeld(node, replica->model, report.update_id());
    }
    if (replica->installing != 0 && replica->installing == event.update) {
      InstallFailed(replica, event.fault);
    }
  }
  Step(replica, event);
}

// ---- What the machine wants ----

namespace {

// Whether the replica's node may give a pause up by itself: all workers are its
// own, and none of them can have been written to.
bool AllOnItsNode(const ReplicaEntry& entry) {
  for (const WorkerEntry& worker : entry.workers) {
    if (worker.node != entry.node) return false;
  }
  return true;
}

}  // namespace

bool CoordinatorCore::MayRefuse(const ReplicaRun& replica,
                                const ReplicaEntry& entry) const {
  if (!AllOnItsNode(entry) || !replica.machine.Servable()) return false;
  const auto model = models_.find(replica.model);
  for (const Holder& holder : replica.machine.holders) {
    // Only what waits for a barrier may be refused: an operator's word holds
    // whether we are here or not.
    if (holder.kind != Holder::kUpdate) return false;
    const UpdateRun* update = model->second.FindUpdate(IdOf(holder.update));
    if (update == nullptr || update->config.stream) return false;
  }
  return true;
}

void CoordinatorCore::Step(ReplicaRun* replica, const ReplicaEvent& event) {
  const ModelRun* model = Model(replica->model);
  // An adopted cluster may have committed what nobody has told of yet.
  replica->machine.may_lack =
      model->removed || (model->commits.empty() && model->book.floor() == 0);
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
        pause->set_mode(ToProto(action.pause));
        *pause->mutable_timeout() = ToProto(options_.pause_timeout);
        out->set_may_refuse(MayRefuse(*replica, *entry));
        *out->mutable_barrier_timeout() = ToProto(options_.barrier_timeout);
        if (!action.again) replica->pause_detail.clear();
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
        resume->set_mode(ToProto(action.pause));
        resume->set_weights_changed(action.weights_changed);
        resume->set_removed(action.removed);
        break;
      }
      case ReplicaAction::kSendApply:
        SendApply(replica, action);
        break;
      case ReplicaAction::kSendRemove:
        SendRemove(replica, action);
        break;

      case ReplicaAction::kComplete: {
        replica->lost = false;
        replica->given_up = 0;
        replica->fetch_failures = 0;
        replica->not_before = absl::InfinitePast();
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
        complete_.emplace_back(replica->model, replica->name);
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
          v1::ReplicaTimes& times = replica->history.back();
          *times.mutable_paused_time() = ToProto(now_);
          times.set_pause_mode(ToProto(replica->machine.pause));
          times.set_pause_detail(replica->pause_detail);
          ShowTimes(replica);
        }
        news.kind = UpdateEvent::kReplicaPaused;
        PostReplica(*replica, std::move(news));
        if (replica->installing != 0) Settle(replica);
        break;
      }
      case ReplicaAction::kPauseFailed:
        news.kind = UpdateEvent::kReplicaPauseFailed;
        PostReplica(*replica, std::move(news));
        break;
      case ReplicaAction::kInstalledNow:
        if (action.update == kRemoval) {
          replica->last_failure.Clear();
          if (replica->installing == kRemoval) DropInstall(replica);
          Settle(replica);
          break;
        }
        *Times(replica, action.update)->mutable_applied_time() = ToProto(now_);
        ShowTimes(replica);
        replica->last_failure.Clear();
        news.kind = UpdateEvent::kReplicaInstalled;
        PostReplica(*replica, std::move(news));
        if (replica->installing == action.update) {
          DropInstall(replica);
          Settle(replica);
        }
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
          if (replica->installing != kRemoval) {
            *Times(replica, replica->installing)->mutable_failure() =
                ToProto(action.fault);
            ShowTimes(replica);
          }
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
          v1::ReplicaTimes& times = replica->history.back();
          *times.mutable_resumed_time() = ToProto(now_);
          // It would not, before.
          if (times.has_applied_time()) times.clear_failure();
          ShowTimes(replica);
        }
        news.kind = UpdateEvent::kReplicaResumed;
        PostReplica(*replica, std::move(news));
        break;
      case ReplicaAction::kResumeFailed:
        // It is tried again; until then the update's sentence says why it does
        // not serve it.
        if (!replica->history.empty() &&
            !replica->history.back().has_resumed_time()) {
          *replica->history.back().mutable_failure() = ToProto(action.fault);
          ShowTimes(replica);
        }
        news.kind = UpdateEvent::kReplicaResumed;
        PostReplica(*replica, std::move(news));
        break;
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
  if (update.layout != nullptr) SendLayout(*update.layout, node);
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

// ---- Times ----

v1::ReplicaTimes* CoordinatorCore::Times(ReplicaRun* replica,
                                         UpdateKey update) {
  const std::string& update_id = IdOf(update);
  // The same update a second time (a repair) is another absence.
  if (!replica->history.empty() &&
      replica->history.back().update_id() == update_id &&
      !replica->history.back().has_resumed_time()) {
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
