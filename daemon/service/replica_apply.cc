// What workers of this node are told to install, to drop or to digest, and what
// they say of it.

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/service/replica_errors.h"
#include "daemon/service/replica_sessions.h"
#include "daemon/service/validate.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {
namespace {

absl::Status Running(const std::string& model, const std::string& replica) {
  return ErrorStatus(
      absl::StatusCode::kFailedPrecondition, "REPLICA_RUNNING",
      absl::StrCat(ReplicaName(model, replica),
                   " is not paused: it has resumed by itself, or was never "
                   "asked; pause it first"));
}

}  // namespace

// What one apply needs, found on the data loop.
struct ReplicaSessions::Located {
  absl::Status status;
  std::shared_ptr<const v1::CopyPlan> plan;
  LocatedUpdate update;
};

// ---- Applying ----

void ReplicaSessions::Apply(const v1::ApplyWorker& command) {
  Worker* worker = FindWorker(command.model(), command.replica(),
                              command.worker_index(), command.incarnation());
  if (worker == nullptr) {
    ReportApplyFailure(
        command,
        NotHere("WORKER_LOST",
                absl::StrCat("worker ", command.worker_index(), " of ",
                             ReplicaName(command.model(), command.replica()))),
        nullptr);
    return;
  }
  if (!worker->accepted) {
    worker->early = std::make_unique<v1::ApplyWorker>(command);
    return;
  }
  Control* control =
      FindControl(command.model(), command.replica(), command.incarnation());
  if (control != nullptr &&
      control->offer.pause().update_id() == command.update_id()) {
    control->commit = command;
  }
  const absl::StatusOr<bool> streamed =
      streams_.Complete(worker->id, command.update_id());
  if (!streamed.ok()) {
    ReportApplyFailure(command, streamed.status(),
                       &worker->registration.installed());
    return;
  }
  if (*streamed) {
    // It has every byte already.
    StartApply(worker, command);
    v1::WorkerCommand end;
    end.mutable_end_stream()->set_update_id(command.update_id());
    end.mutable_end_stream()->set_command_id(command.command_id());
    end.mutable_end_stream()->set_complete(true);
    worker->stream->Write(std::move(end));
    return;
  }
  const v1::InstalledState& installed = worker->registration.installed();
  if (installed.state() == v1::InstalledState::STATE_INSTALLED &&
      installed.update_id() == command.update_id()) {
    // It writes nothing and says so, wherever the bytes are now.
    StartApply(worker, command);
    v1::WorkerCommand relayed;
    *relayed.mutable_apply() = MakeApply(command);
    worker->stream->Write(std::move(relayed));
    return;
  }
  // Whatever it was told before, an engine that generates is not written to.
  if (control != nullptr && !control->registration.paused() &&
      !control->registration.atomic_swap()) {
    ReportApplyFailure(command, Running(command.model(), command.replica()),
                       &installed);
    return;
  }
  // From here on it may begin to write at any moment.
  StartApply(worker, command);
  // Plans take their time, and the layout may still be computed: both on the
  // data loop, behind the commands that came before.
  node_.data->Post([this, id = worker->id, command,
                    reachable = ReachableFrom(*worker),
                    tensors = worker->registration.tensors()] {
    auto located = std::make_shared<Located>();
    std::vector<int32_t> buckets;
    located->status = [&] {
      const absl::StatusOr<std::shared_ptr<const NodeLayout>> layout =
          node_.layouts->Find(command.layout_id());
      if (!layout.ok()) return layout.status();
      absl::StatusOr<std::shared_ptr<const v1::CopyPlan>> plan =
          plans_.PlanFor(**layout, tensors);
      if (!plan.ok()) return plan.status();
      located->plan = *std::move(plan);
      buckets = BucketsOf(*located->plan);
      absl::StatusOr<LocatedUpdate> update =
          node_.store->Locate(command.update_id(), buckets, reachable);
      if (!update.ok()) return update.status();
      located->update = *std::move(update);
      return absl::OkStatus();
    }();
    if (node_.device_copies != nullptr &&
        ErrorReason(located->status) == "OUT_OF_REACH") {
      // Other commands do not wait for a GPU.
      node_.copies->Run([this, id, command, located, buckets, reachable] {
        located->status =
            BringInReach(command, buckets, reachable, &located->update);
        node_.loop->Post(
            [this, id, command, located] { Send(id, command, located); });
      });
      return;
    }
    node_.loop->Post(
        [this, id, command, located] { Send(id, command, located); });
  });
}

std::vector<std::string> ReplicaSessions::ReachableFrom(const Worker& worker) {
  return std::vector<std::string>(worker.registration.device_uuids().begin(),
                                  worker.registration.device_uuids().end());
}

absl::Status ReplicaSessions::BringInReach(
    const v1::ApplyWorker& command, const std::vector<int32_t>& buckets,
    const std::vector<std::string>& reachable, LocatedUpdate* update) {
  absl::StatusOr<StorePin> pin = node_.store->Pin(command.update_id());
  if (!pin.ok()) return pin.status();
  const absl::StatusOr<std::shared_ptr<const NodeLayout>> layout =
      node_.layouts->Find(command.layout_id());
  if (!layout.ok()) return layout.status();
  const absl::Status copied = node_.device_copies->ToHost(
      *layout, command.update_id(), buckets, reachable);
  // With its agent the GPU's part of the store is gone, or about to be.
  if (absl::IsUnavailable(copied)) {
    return ErrorStatus(absl::StatusCode::kNotFound, "DEVICE_STORE_LOST",
                       copied.message());
  }
  if (!copied.ok()) return copied;
  absl::StatusOr<LocatedUpdate> located =
      node_.store->Locate(command.update_id(), buckets, reachable);
  if (!located.ok()) return located.status();
  *update = *std::move(located);
  return absl::OkStatus();
}

void ReplicaSessions::Remove(const v1::RemoveWorker& command) {
  // As an apply of nothing.
  v1::ApplyWorker apply;
  apply.set_model(command.model());
  apply.set_replica(command.replica());
  apply.set_worker_index(command.worker_index());
  apply.set_incarnation(command.incarnation());
  apply.set_command_id(command.remove().command_id());
  *apply.mutable_timeout() = command.remove().timeout();
  Worker* worker = FindWorker(command.model(), command.replica(),
                              command.worker_index(), command.incarnation());
  if (worker == nullptr || !worker->accepted) {
    ReportApplyFailure(
        apply,
        NotHere("WORKER_LOST",
                absl::StrCat("worker ", command.worker_index(), " of ",
                             ReplicaName(command.model(), command.replica()))),
        nullptr);
    return;
  }
  Control* control =
      FindControl(command.model(), command.replica(), command.incarnation());
  if (control != nullptr && !control->registration.paused()) {
    ReportApplyFailure(apply, Running(command.model(), command.replica()),
                       &worker->registration.installed());
    return;
  }
  StartApply(worker, apply);
  v1::WorkerCommand relayed;
  *relayed.mutable_remove_weights() = command.remove();
  worker->stream->Write(std::move(relayed));
}

void ReplicaSessions::Send(uint64_t id, const v1::ApplyWorker& command,
                           const std::shared_ptr<Located>& located) {
  Worker* worker = FindWorker(id);
  // It has left, and the coordinator was told; or it was given another command
  // meanwhile, or this one's time is over.
  if (worker == nullptr || worker->command_id != command.command_id()) return;
  absl::Status status = located->status;
  for (const v1::BucketLocation& bucket : located->update.buckets) {
    if (!status.ok()) break;
    // An empty bucket lies nowhere.
    if (bucket.slot().arena_id().empty()) continue;
    status = Offer(worker, bucket.slot().arena_id());
  }
  if (!status.ok()) {
    LOG(WARNING) << worker->Name() << " cannot apply update "
                 << command.update_id() << ": " << status;
    EndApply(worker);
    // What the store says NOT_FOUND to.
    ReportApplyFailure(command, status, &worker->registration.installed(),
                       absl::IsNotFound(located->status));
    return;
  }
  SendPlan(id, *located->plan);
  worker->pin = std::move(located->update.pin);
  v1::WorkerCommand relayed;
  *relayed.mutable_apply() = MakeApply(command);
  for (v1::BucketLocation& bucket : located->update.buckets) {
    *relayed.mutable_apply()->add_buckets() = std::move(bucket);
  }
  worker->stream->Write(std::move(relayed));
}

v1::ApplyUpdate ReplicaSessions::MakeApply(
    const v1::ApplyWorker& command) const {
  v1::ApplyUpdate apply;
  apply.set_update_id(command.update_id());
  apply.set_version(command.version());
  apply.set_step(command.step());
  apply.set_layout_id(command.layout_id());
  apply.set_commit_term(command.commit_term());
  apply.set_command_id(command.command_id());
  *apply.mutable_timeout() = command.timeout();
  return apply;
}

void ReplicaSessions::StartApply(Worker* worker,
                                 const v1::ApplyWorker& command) {
  EndApply(worker);
  worker->command = command;
  worker->command_id = command.command_id();
  const absl::Duration timeout = command.has_timeout()
                                     ? DecodeDuration(command.timeout())
                                     : node_.options->deadlines.apply;
  worker->timer =
      node_.loop->PostAfter(timeout, [this, id = worker->id, command, timeout] {
        Worker* worker = FindWorker(id);
        if (worker == nullptr || worker->command_id != command.command_id())
          return;
        const absl::Status late = ErrorStatus(
            absl::StatusCode::kDeadlineExceeded, "APPLY_TIMEOUT",
            absl::StrCat(worker->Name(), " did not report ",
                         command.update_id().empty()
                             ? std::string("its weights as dropped")
                             : absl::StrCat("update ", command.update_id(),
                                            " as applied"),
                         " within ", absl::FormatDuration(timeout),
                         "; register again and say what is in its memory"));
        const v1::InstalledState believed = BelievedContent(*worker);
        ReportApplyFailure(command, late, &believed);
        EndWorker(id, late);
      });
}

void ReplicaSessions::Applied(Worker* worker,
                              const v1::WorkerApplied& applied) {
  const v1::RegisterWorker& registration = worker->registration;
  if (applied.has_installed())
    *worker->registration.mutable_installed() = applied.installed();
  // One that has an update whole takes no part of any stream any more.
  if (applied.update_id() == worker->streamed ||
      applied.installed().state() == v1::InstalledState::STATE_INSTALLED) {
    worker->streamed.clear();
  }
  v1::NodeReport report;
  v1::WorkerAppliedReport* up = report.mutable_worker_applied();
  up->set_model(registration.model());
  up->set_replica(registration.replica());
  up->set_worker_index(registration.worker_index());
  up->set_incarnation(registration.incarnation());
  up->set_update_id(applied.update_id());
  if (applied.has_failure()) {
    *up->mutable_failure() = CutFailure(applied.failure());
  }
  *up->mutable_installed() = registration.installed();
  *up->mutable_copy_duration() = applied.copy_duration();
  up->set_copied_bytes(applied.copied_bytes());
  // A client that does not echo it can only mean the one that it was given.
  const std::string& command_id =
      applied.command_id().empty() &&
              applied.update_id() == worker->command.update_id()
          ? worker->command_id
          : applied.command_id();
  // A stream that was given up answers no ApplyWorker.
  if (command_id != WorkerStreams::CommandOf(applied.update_id())) {
    up->set_command_id(command_id);
  }
  if (command_id == worker->command_id) EndApply(worker);
  node_.link->Report(std::move(report));
}

void ReplicaSessions::EndApply(Worker* worker) {
  node_.loop->Cancel(worker->timer);
  worker->timer = 0;
  worker->command_id.clear();
  worker->pin.Release();
}

void ReplicaSessions::ReportApplyFailure(const v1::ApplyWorker& command,
                                         const absl::Status& why,
                                         const v1::InstalledState* installed,
                                         bool not_held) {
  v1::NodeReport report;
  v1::WorkerAppliedReport* up = report.mutable_worker_applied();
  up->set_model(command.model());
  up->set_replica(command.replica());
  up->set_worker_index(command.worker_index());
  up->set_incarnation(command.incarnation());
  up->set_update_id(command.update_id());
  up->set_command_id(command.command_id());
  *up->mutable_failure() = ToFailure(why);
  up->set_not_held(not_held);
  if (installed != nullptr) *up->mutable_installed() = *installed;
  node_.link->Report(std::move(report));
}

// ---- Verifying ----

void ReplicaSessions::Digest(const v1::DigestWorker& command) {
  Worker* worker = FindWorker(command.model(), command.replica(),
                              command.worker_index(), command.incarnation());
  if (worker == nullptr || !worker->accepted) {
    v1::NodeReport report;
    v1::WorkerDigests* up = report.mutable_worker_digests();
    up->set_model(command.model());
    up->set_replica(command.replica());
    up->set_worker_index(command.worker_index());
    up->set_incarnation(command.incarnation());
    up->mutable_digests()->set_command_id(command.digest().command_id());
    *up->mutable_digests()->mutable_failure() = ToFailure(
        NotHere("WORKER_LOST",
                absl::StrCat("worker ", command.worker_index(), " of ",
                             ReplicaName(command.model(), command.replica()))));
    node_.link->Report(std::move(report));
    return;
  }
  v1::WorkerCommand relayed;
  *relayed.mutable_digest_tensors() = command.digest();
  worker->stream->Write(std::move(relayed));
}

void ReplicaSessions::Digested(Worker* worker,
                               const v1::TensorDigests& digests) {
  v1::NodeReport report;
  v1::WorkerDigests* up = report.mutable_worker_digests();
  up->set_model(worker->registration.model());
  up->set_replica(worker->registration.replica());
  up->set_worker_index(worker->registration.worker_index());
  up->set_incarnation(worker->registration.incarnation());
  *up->mutable_digests() = digests;
  node_.link->Report(std::move(report));
}

}  // namespace daemon
}  // namespace weightsync
