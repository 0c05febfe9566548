// RemoveModel: an adapter that nobody wants any more is taken out of every
// engine that has it. It is journalled before anybody is told; from then on the
// model has no version, and what its replicas shall have is nothing: one that
// is there is paused, its workers drop what they hold, and it is resumed
// without the model; one that is away is told so when it comes back. The commit
// of the next update ends that.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/coordinator/core.h"
#include "daemon/coordinator/queries.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

void CoordinatorCore::Remove(AdminWait wait,
                             const v1::RemoveModelRequest& call) {
  const auto shown = Queries(*this).GetModel(call.name());
  if (!shown.ok()) return Answer(wait, shown.status());
  wait.model = call.name();
  wait.deadline = now_ + Patience(call.has_timeout(), call.timeout(),
                                  options_.operation_timeout);
  ModelRun* model = Model(wait.model);
  if (!model->updates.empty()) {
    return Answer(wait,
                  ErrorStatus(StatusCode::kFailedPrecondition, "MODEL_UPDATING",
                              absl::StrCat(model->updates[0]->record.name(),
                                           " is under way; remove ", wait.model,
                                           " when it has ended")));
  }
  if (now_ < adopting_until_) {
    return Answer(
        wait,
        ErrorStatus(StatusCode::kFailedPrecondition, "MODEL_UPDATING",
                    absl::StrCat("nodes of the adopted cluster are "
                                 "still telling what there is of ",
                                 wait.model, "; remove it when they have")));
  }
  // Those that are away count as well: they would come back with it.
  std::vector<std::string> required;
  for (const auto& replica : model->replicas) {
    if (!replica.second.machine.removable) {
      required.push_back(replica.second.machine.name);
    }
  }
  if (!required.empty()) {
    return Answer(
        wait,
        ErrorStatus(StatusCode::kFailedPrecondition, "MODEL_REQUIRED",
                    absl::StrCat(absl::StrJoin(required, ", "),
                                 " did not register ", wait.model,
                                 " as removable: end or delete what cannot go "
                                 "on without it first")));
  }
  if (!model->removed) {
    auto* removed = Write()->mutable_model_removed();
    removed->set_model(wait.model);
    *removed->mutable_time() = ToProto(now_);
    model->removed = true;
    LOG(INFO) << wait.model << " is removed";
    if (model->fetch != nullptr) EndFetch(model);
    model->held_update_id.clear();
    std::set<std::string> forgotten;
    for (const CommittedUpdate& commit : model->commits) {
      forgotten.insert(commit.update_id);
    }
    for (const v1::Version& version : model->ended) {
      NoteForgotten(version, model);
    }
    model->commits.clear();
    model->ended.clear();
    for (auto& node : nodes_) {
      const auto held = node.second.held;
      for (const auto& update : held) {
        if (update.first == wait.model || forgotten.count(update.second) != 0) {
          // One that nobody knows to have ended: a rank may wait for it.
          if (forgotten.count(update.second) == 0) {
            SayUnknown(node.second.name, wait.model, update.second);
          }
          DropHeld(&node.second, wait.model, update.second);
        }
      }
    }
  }
  // Said again, it is tried again with those that failed.
  ResetPatience(model);
  SettleAll(model);
  Unpin(model);
  waits_.push_back(std::move(wait));
}

void CoordinatorCore::NoteForgotten(const v1::Version& version,
                                    ModelRun* model) {
  v1::EndUpdate& end = model->forgotten.emplace_back();
  end.set_model(model->name);
  end.set_update_id(version.update_id());
  end.set_committed(model->FindCommit(version.update_id()) != nullptr);
  if (!end.committed()) *end.mutable_failure() = version.failure();
  while (static_cast<int>(model->forgotten.size()) > kEndsTold) {
    model->forgotten.pop_front();
  }
}

void CoordinatorCore::SayUnknown(const std::string& node,
                                 const std::string& model,
                                 const std::string& update_id) {
  v1::EndUpdate* end = SendTo(node)->mutable_end_update();
  end->set_model(model);
  end->set_update_id(update_id);
  *end->mutable_failure() =
      ToProto(Fault(StatusCode::kAborted, "UPDATE_ABORTED",
                    absl::StrCat("update ", update_id, " of ", model,
                                 " is not known to be committed")));
}

void CoordinatorCore::StartRemoval(ReplicaRun* replica) {
  replica->installing = kRemoval;
  const Holder holder{Holder::kInstall, kRemoval};
  if (!replica->machine.HeldBy(holder)) {
    ReplicaEvent hold;
    hold.kind = ReplicaEvent::kHold;
    hold.holder = holder;
    for (const Holder& other : replica->machine.holders) {
      if (other.kind == Holder::kInstall) hold.replaces = other;
    }
    Step(replica, hold);
  }
  if (replica->installing == kRemoval && replica->machine.PausedForAll() &&
      replica->machine.target != kRemoval) {
    ReplicaEvent install;
    install.kind = ReplicaEvent::kInstall;
    install.update = kRemoval;
    Step(replica, install);
  }
}

void CoordinatorCore::SendRemove(ReplicaRun* replica,
                                 const ReplicaAction& action) {
  const ReplicaEntry* entry =
      registry_.FindReplica(replica->model, replica->name);
  v1::RemoveWorker* remove =
      SendTo(entry->workers[action.worker].node)->mutable_remove_worker();
  remove->set_model(replica->model);
  remove->set_replica(replica->name);
  remove->set_worker_index(action.worker);
  remove->set_incarnation(replica->incarnation);
  remove->mutable_remove()->set_command_id(CommandId(action.command));
  *remove->mutable_remove()->mutable_timeout() =
      ToProto(options_.apply_timeout);
}

bool CoordinatorCore::FinishRemove(ModelRun* model, const AdminWait& wait) {
  std::vector<std::string> names;
  for (const auto& entry : model->replicas) {
    const ReplicaState& machine = entry.second.machine;
    // An update that was published since has brought it back.
    if (!model->removed || !machine.Complete()) continue;
    if (machine.DoneWith(kRemoval)) continue;
    names.push_back(machine.fenced
                        ? absl::StrCat(machine.name,
                                       " (fenced: ", machine.fault.reason, ")")
                        : machine.name);
  }
  if (names.empty()) {
    Answer(wait, *Queries(*this).GetModel(wait.model));
    return true;
  }
  if (now_ < wait.deadline) return false;
  Answer(wait, ErrorStatus(StatusCode::kDeadlineExceeded, "REMOVE_TIMEOUT",
                           absl::StrCat("it goes on; still with the model: ",
                                        absl::StrJoin(names, ", "))));
  return true;
}

}  // namespace daemon
}  // namespace weightsync
