// Replicas of this node while the coordinator is away (daemon/node/away.h).

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/service/replica_errors.h"
#include "daemon/service/replica_sessions.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {
namespace {

// Before an engine that could not resume is asked again by its node.
constexpr absl::Duration kOwnRetry = absl::Seconds(1);

}  // namespace

int ReplicaSessions::alarms() const {
  int alarms = 0;
  for (const auto& control : controls_) alarms += control.second->alarmed;
  return alarms;
}

std::vector<ReplicaSessions::Worker*> ReplicaSessions::WorkersOf(
    const Control& control) const {
  std::vector<Worker*> workers;
  for (const auto& entry : workers_) {
    const v1::RegisterWorker& registration = entry.second->registration;
    if (entry.second->named && entry.second->accepted &&
        registration.model() == control.registration.model() &&
        registration.replica() == control.registration.replica() &&
        registration.incarnation() == control.registration.incarnation()) {
      workers.push_back(entry.second.get());
    }
  }
  return workers;
}

AwayReplica ReplicaSessions::LookAt(const Control& control,
                                    absl::Time now) const {
  AwayReplica replica;
  replica.away = now - away_since_;
  replica.paused = control.registration.paused();
  replica.busy = !control.own_command_id.empty();
  replica.worker_count = control.registration.worker_count();
  for (const Worker* worker : WorkersOf(control)) {
    AwayWorker w;
    const v1::InstalledState installed = BelievedContent(*worker);
    w.update_id = installed.update_id();
    w.busy = !worker->command_id.empty();
    if (installed.state() == v1::InstalledState::STATE_INSTALLED) {
      w.state = AwayWorker::State::kInstalled;
    } else if (installed.state() == v1::InstalledState::STATE_WRITING) {
      w.state = AwayWorker::State::kWriting;
    } else if (installed.state() == v1::InstalledState::STATE_NOTHING) {
      w.state = AwayWorker::State::kNothing;
    }
    replica.workers.push_back(std::move(w));
  }
  replica.offered = control.offer.pause().update_id();
  replica.committed = !control.commit.update_id().empty() &&
                      control.commit.update_id() == replica.offered;
  replica.may_refuse = control.offer.may_refuse();
  replica.barrier_timeout =
      control.offer.has_barrier_timeout()
          ? DecodeDuration(control.offer.barrier_timeout())
          : absl::InfiniteDuration();
  replica.grace = node_.options->deadlines.node_reconnect_grace;
  replica.pause_on_isolation = node_.options->pause_on_isolation;
  replica.max_staleness = node_.options->deadlines.max_staleness;
  return replica;
}

void ReplicaSessions::CheckAway(absl::Time now) {
  if (now < away_since_) return;
  for (const auto& entry : controls_) {
    Control* control = entry.second.get();
    if (!control->accepted) continue;
    if (now >= control->own_retry) SendOwnResume(control);
    Act(control, DecideAway(LookAt(*control, now)));
  }
}

void ReplicaSessions::Act(Control* control, AwayAction action) {
  const std::string name = ReplicaName(control->registration.model(),
                                       control->registration.replica());
  const std::string& update_id = control->offer.pause().update_id();
  if (action != AwayAction::kNothing && action != AwayAction::kAlarm) {
    control->alarmed = false;
  }
  switch (action) {
    case AwayAction::kNothing:
      return;
    case AwayAction::kAlarm:
      if (!control->alarmed) {
        LOG(ERROR) << name << " stays paused for update " << update_id
                   << ": the coordinator does not come back, and this node "
                      "cannot know what became of the update elsewhere. "
                      "Start the coordinator again";
      }
      control->alarmed = true;
      return;
    case AwayAction::kRefuse: {
      RefusedOffer offer;
      offer.model = control->registration.model();
      offer.replica = control->registration.replica();
      offer.incarnation = control->registration.incarnation();
      offer.command_id = control->offer.pause().command_id();
      offer.update_id = update_id;
      offer.term = *node_.term;
      const absl::Status status = node_.journal->Refuse(offer);
      // Whether it is on the disk is not known: nobody may act on it.
      LOG_IF(FATAL, !status.ok()) << "the node's journal: " << status;
      LOG(WARNING) << name << " refuses update " << update_id
                   << ", whose coordinator is away, and resumes what it has";
      v1::InstalledState old;
      const std::vector<Worker*> workers = WorkersOf(*control);
      if (!workers.empty()) old = workers[0]->registration.installed();
      ResumeOwn(control, absl::StrCat("refused/", offer.command_id), old,
                /*weights_changed=*/false);
      return;
    }
    case AwayAction::kResume: {
      LOG(WARNING) << name << " has update " << update_id
                   << " whole and resumes on it while the coordinator is away";
      v1::InstalledState now;
      now.set_state(v1::InstalledState::STATE_INSTALLED);
      now.set_update_id(update_id);
      now.set_version(
          WorkersOf(*control)[0]->registration.installed().version());
      ResumeOwn(control, absl::StrCat("finished/", update_id), now,
                /*weights_changed=*/true);
      return;
    }
    case AwayAction::kApply:
      for (Worker* worker : WorkersOf(*control)) {
        const v1::InstalledState& installed = worker->registration.installed();
        if (installed.state() == v1::InstalledState::STATE_INSTALLED &&
            installed.update_id() == update_id) {
          continue;
        }
        v1::ApplyWorker command = control->commit;
        command.set_worker_index(worker->registration.worker_index());
        command.set_command_id(absl::StrCat(
            "finish/", update_id, "/", worker->registration.worker_index()));
        Apply(command);
      }
      return;
    case AwayAction::kHold: {
      LOG(ERROR) << name << " is paused: the coordinator has been away for "
                 << "longer than --max_staleness";
      control->isolation_hold = true;
      control->own_command_id = absl::StrCat("isolation/", RandomId());
      v1::ReplicaCommand command;
      v1::PauseReplica* pause = command.mutable_pause();
      pause->set_command_id(control->own_command_id);
      pause->set_mode(v1::PAUSE_MODE_DRAIN);
      *pause->mutable_timeout() =
          EncodeDuration(node_.options->deadlines.pause);
      control->stream->Write(std::move(command));
      return;
    }
  }
}

void ReplicaSessions::ResumeOwn(Control* control, const std::string& command_id,
                                const v1::InstalledState& installed,
                                bool weights_changed) {
  v1::ResumeReplica* resume = &control->own_resume;
  resume->Clear();
  resume->set_command_id(command_id);
  if (installed.state() == v1::InstalledState::STATE_INSTALLED) {
    resume->set_update_id(installed.update_id());
    resume->set_version(installed.version());
  }
  resume->set_removed(installed.state() == v1::InstalledState::STATE_NOTHING);
  resume->set_step(weights_changed ? control->commit.step() : 0);
  resume->set_mode(control->offer.pause().mode());
  resume->set_weights_changed(weights_changed);
  control->offer.Clear();
  control->commit.Clear();
  SendOwnResume(control);
}

void ReplicaSessions::SendOwnResume(Control* control) {
  control->own_retry = absl::InfiniteFuture();
  // Never one that it has answered before: a client repeats that answer.
  control->own_command_id =
      absl::StrCat(control->own_resume.command_id(), "/", RandomId());
  v1::ReplicaCommand command;
  *command.mutable_resume() = control->own_resume;
  command.mutable_resume()->set_command_id(control->own_command_id);
  control->stream->Write(std::move(command));
}

void ReplicaSessions::OwnResumeAnswered(Control* control,
                                        const v1::ReplicaResumed& resumed) {
  control->own_command_id.clear();
  control->alarmed = resumed.has_failure();
  if (!resumed.has_failure()) return;
  LOG(ERROR) << ReplicaName(control->registration.model(),
                            control->registration.replica())
             << " could not be resumed while the coordinator is away, and is "
                "asked again: "
             << FromFailure(resumed.failure());
  control->own_retry = absl::Now() + kOwnRetry;
}

}  // namespace daemon
}  // namespace weightsync
