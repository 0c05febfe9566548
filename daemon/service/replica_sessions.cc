#include "daemon/service/replica_sessions.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/service/replica_errors.h"
#include "daemon/service/validate.h"
#include "glog/logging.h"
#include "proto/status.h"
#include "transport/cuda/segment_control.h"

namespace weightsync {
namespace daemon {
namespace {

// Whoever is sent one more forgets those that it has (kMaxPlans of
// client/cc/worker.cc).
constexpr size_t kPlansOfAWorker = 16;

absl::Status Taken(absl::string_view reason, const std::string& who) {
  return ErrorStatus(
      absl::StatusCode::kAlreadyExists, reason,
      absl::StrCat(who,
                   " has a live stream to this node; end that one, or "
                   "register again when its lease is over"));
}

// Why a lease that the coordinator knew is over.
absl::Status LeftStatus(const std::string& who, const absl::Status& why) {
  if (why.ok()) {
    return ErrorStatus(absl::StatusCode::kUnavailable, "CLIENT_LEFT",
                       absl::StrCat(who, " has closed its stream"));
  }
  return ErrorStatus(absl::StatusCode::kUnavailable, ErrorReason(why),
                     absl::StrCat(who, " is lost: ", why.message()));
}

// The pause that it was asked for last is none: PAUSE_MODE_NONE.
template <typename Control>
bool IsNoPause(const Control& control) {
  return control.offer.pause().mode() == v1::PAUSE_MODE_NONE;
}

bool IsUnreachable(const absl::Status& status) {
  return ErrorReason(status) == "COORDINATOR_UNREACHABLE";
}

}  // namespace

std::string ReplicaSessions::Worker::Name() const {
  return absl::StrCat(
      "worker ", registration.worker_index(), " of ",
      ReplicaName(registration.model(), registration.replica()));
}

// ---- Finding ----

ReplicaSessions::Control* ReplicaSessions::FindControl(uint64_t id) {
  auto it = controls_.find(id);
  return it == controls_.end() ? nullptr : it->second.get();
}

ReplicaSessions::Worker* ReplicaSessions::FindWorker(uint64_t id) {
  auto it = workers_.find(id);
  return it == workers_.end() ? nullptr : it->second.get();
}

ReplicaSessions::Control* ReplicaSessions::FindControl(
    const std::string& model, const std::string& replica,
    const std::string& incarnation) {
  for (const auto& entry : controls_) {
    const v1::RegisterReplica& registration = entry.second->registration;
    if (entry.second->named && registration.model() == model &&
        registration.replica() == replica &&
        registration.incarnation() == incarnation) {
      return entry.second.get();
    }
  }
  return nullptr;
}

ReplicaSessions::Worker* ReplicaSessions::FindWorker(
    const std::string& model, const std::string& replica, int index,
    const std::string& incarnation) {
  for (const auto& entry : workers_) {
    const v1::RegisterWorker& registration = entry.second->registration;
    if (entry.second->named && registration.model() == model &&
        registration.replica() == replica &&
        registration.worker_index() == index &&
        registration.incarnation() == incarnation) {
      return entry.second.get();
    }
  }
  return nullptr;
}

// ---- Control streams ----

void ReplicaSessions::Open(std::shared_ptr<ControlStream> stream) {
  auto control = std::make_unique<Control>();
  control->id = next_id_++;
  control_streams_[stream.get()] = control->id;
  control->stream = std::move(stream);
  const uint64_t id = control->id;
  controls_.emplace(id, std::move(control));
  if (!down_.ok()) EndControl(id, down_);
}

void ReplicaSessions::Closed(const ControlStream* stream) {
  auto it = control_streams_.find(stream);
  if (it != control_streams_.end()) EndControl(it->second, absl::OkStatus());
}

void ReplicaSessions::Heard(const ControlStream* stream,
                            const v1::ReplicaReport& report) {
  auto it = control_streams_.find(stream);
  if (it == control_streams_.end()) return;
  Control* control = FindControl(it->second);
  const uint64_t id = control->id;
  control->last_heard = absl::Now();
  if (!control->named) {
    const absl::Status status =
        report.has_register_()
            ? CheckReplica(report.register_())
            : ErrorStatus(absl::StatusCode::kInvalidArgument,
                          "REGISTRATION_MISSING",
                          "the first report must be a registration");
    if (!status.ok()) {
      EndControl(id, status);
      return;
    }
    // Another incarnation is the coordinator's business, who may know it on
    // another node; the same one twice is this node's.
    const v1::RegisterReplica& said = report.register_();
    if (FindControl(said.model(), said.replica(), said.incarnation()) !=
        nullptr) {
      EndControl(id, Taken("REPLICA_TAKEN",
                           ReplicaName(said.model(), said.replica())));
      return;
    }
    control->named = true;
    control->registration = report.register_();
    Cut(kLongestClient, control->registration.mutable_client());
    WatchProcess(node_, control->registration.pid(),
                 control->registration.pid_namespace(), control,
                 [this, id](const absl::Status& why) { EndControl(id, why); });
    if (node_.link->up()) Join(control);
    return;
  }
  v1::NodeReport up;
  switch (report.report_case()) {
    case v1::ReplicaReport::kHeartbeat: {
      v1::ReplicaCommand command;
      command.mutable_heartbeat();
      if (control->accepted) control->stream->Write(std::move(command));
      return;
    }
    case v1::ReplicaReport::kPaused: {
      if (!report.paused().has_failure() && !IsNoPause(*control))
        control->registration.set_paused(true);
      if (!control->own_command_id.empty() &&
          report.paused().command_id() == control->own_command_id) {
        control->own_command_id.clear();
        return;
      }
      v1::ReplicaPausedReport* paused = up.mutable_replica_paused();
      paused->set_model(control->registration.model());
      paused->set_replica(control->registration.replica());
      paused->set_incarnation(control->registration.incarnation());
      paused->set_command_id(report.paused().command_id());
      if (report.paused().has_failure())
        *paused->mutable_failure() = CutFailure(report.paused().failure());
      paused->set_detail(report.paused().detail());
      Cut(kLongestWords, paused->mutable_detail());
      node_.link->Report(std::move(up));
      return;
    }
    case v1::ReplicaReport::kResumed: {
      if (!report.resumed().has_failure())
        control->registration.set_paused(false);
      if (!control->own_command_id.empty() &&
          report.resumed().command_id() == control->own_command_id) {
        OwnResumeAnswered(control, report.resumed());
        return;
      }
      v1::ReplicaResumedReport* resumed = up.mutable_replica_resumed();
      resumed->set_model(control->registration.model());
      resumed->set_replica(control->registration.replica());
      resumed->set_incarnation(control->registration.incarnation());
      resumed->set_command_id(report.resumed().command_id());
      if (report.resumed().has_failure())
        *resumed->mutable_failure() = CutFailure(report.resumed().failure());
      node_.link->Report(std::move(up));
      return;
    }
    default:
      // A registration twice, or a report of a newer client: nothing to do.
      return;
  }
}

void ReplicaSessions::Join(Control* control) {
  v1::NodeReport report;
  v1::ReplicaJoined* joined = report.mutable_replica_joined();
  *joined->mutable_registration() = control->registration;
  for (std::string& command_id : node_.journal->RefusedBy(
           control->registration.model(), control->registration.replica(),
           control->registration.incarnation())) {
    *joined->add_refused_command_ids() = std::move(command_id);
  }
  joined->set_isolation_hold(control->isolation_hold);
  node_.link->Ask(
      std::move(report),
      [this, id = control->id](const absl::Status& status, const v1::Reply&) {
        Control* control = FindControl(id);
        if (control == nullptr || IsUnreachable(status)) return;
        if (!status.ok()) {
          EndControl(id, status);
          return;
        }
        if (control->accepted) return;
        control->accepted = true;
        control->last_heard = absl::Now();
        v1::ReplicaCommand command;
        v1::ReplicaRegistered* registered = command.mutable_registered();
        *registered->mutable_heartbeat_interval() =
            EncodeDuration(node_.options->deadlines.heartbeat_interval);
        *registered->mutable_heartbeat_timeout() =
            EncodeDuration(node_.options->deadlines.heartbeat);
        registered->set_node("nodes/" + node_.options->node);
        control->stream->Write(std::move(command));
        LOG(INFO) << ReplicaName(control->registration.model(),
                                 control->registration.replica())
                  << " is here (process " << control->registration.pid() << ")";
      });
}

void ReplicaSessions::EndControl(uint64_t id, const absl::Status& why) {
  auto it = controls_.find(id);
  if (it == controls_.end()) return;
  std::unique_ptr<Control> control = std::move(it->second);
  controls_.erase(it);
  control_streams_.erase(control->stream.get());
  if (control->named) {
    const v1::RegisterReplica& registration = control->registration;
    const absl::Status left = LeftStatus(
        ReplicaName(registration.model(), registration.replica()), why);
    LOG(INFO) << left.message();
    v1::NodeReport report;
    v1::ReplicaLeft* gone = report.mutable_replica_left();
    gone->set_model(registration.model());
    gone->set_replica(registration.replica());
    gone->set_incarnation(registration.incarnation());
    *gone->mutable_failure() = ToFailure(left);
    node_.link->Report(std::move(report));
  }
  EndStream(node_, *control, why);
}

void ReplicaSessions::Pause(const v1::PauseReplicaCommand& command) {
  Control* control =
      FindControl(command.model(), command.replica(), command.incarnation());
  if (control == nullptr || !control->accepted) {
    v1::NodeReport report;
    v1::ReplicaPausedReport* paused = report.mutable_replica_paused();
    paused->set_model(command.model());
    paused->set_replica(command.replica());
    paused->set_incarnation(command.incarnation());
    paused->set_command_id(command.pause().command_id());
    *paused->mutable_failure() = ToFailure(NotHere(
        "REPLICA_LOST", ReplicaName(command.model(), command.replica())));
    node_.link->Report(std::move(report));
    return;
  }
  control->offer = command;
  // It may come again, for the same update, when somebody else's hold of the
  // replica has ended.
  if (!command.pause().update_id().empty() &&
      command.pause().update_id() != control->commit.update_id()) {
    control->commit.Clear();
  }
  v1::ReplicaCommand relayed;
  *relayed.mutable_pause() = command.pause();
  control->stream->Write(std::move(relayed));
}

void ReplicaSessions::Resume(const v1::ResumeReplicaCommand& command) {
  Control* control =
      FindControl(command.model(), command.replica(), command.incarnation());
  if (control == nullptr || !control->accepted) {
    v1::NodeReport report;
    v1::ReplicaResumedReport* resumed = report.mutable_replica_resumed();
    resumed->set_model(command.model());
    resumed->set_replica(command.replica());
    resumed->set_incarnation(command.incarnation());
    resumed->set_command_id(command.resume().command_id());
    *resumed->mutable_failure() = ToFailure(NotHere(
        "REPLICA_LOST", ReplicaName(command.model(), command.replica())));
    node_.link->Report(std::move(report));
    return;
  }
  control->offer.Clear();
  control->commit.Clear();
  control->isolation_hold = false;
  v1::ReplicaCommand relayed;
  *relayed.mutable_resume() = command.resume();
  control->stream->Write(std::move(relayed));
}

void ReplicaSessions::Refuse(const v1::RefuseReplica& command) {
  Control* control =
      FindControl(command.model(), command.replica(), command.incarnation());
  if (control != nullptr)
    EndControl(control->id, FromFailure(command.failure()));
}

// ---- Worker streams ----

void ReplicaSessions::Open(std::shared_ptr<WorkerStream> stream) {
  auto worker = std::make_unique<Worker>();
  worker->id = next_id_++;
  worker_streams_[stream.get()] = worker->id;
  worker->stream = std::move(stream);
  const uint64_t id = worker->id;
  workers_.emplace(id, std::move(worker));
  if (!down_.ok()) EndWorker(id, down_);
}

void ReplicaSessions::Closed(const WorkerStream* stream) {
  auto it = worker_streams_.find(stream);
  if (it != worker_streams_.end()) EndWorker(it->second, absl::OkStatus());
}

void ReplicaSessions::Heard(const WorkerStream* stream,
                            const v1::WorkerReport& report) {
  auto it = worker_streams_.find(stream);
  if (it == worker_streams_.end()) return;
  Worker* worker = FindWorker(it->second);
  const uint64_t id = worker->id;
  worker->last_heard = absl::Now();
  if (!worker->named) {
    const absl::Status status =
        report.has_register_()
            ? CheckWorker(report.register_())
            : ErrorStatus(absl::StatusCode::kInvalidArgument,
                          "REGISTRATION_MISSING",
                          "the first report must be a registration");
    if (!status.ok()) {
      EndWorker(id, status);
      return;
    }
    const v1::RegisterWorker& said = report.register_();
    if (FindWorker(said.model(), said.replica(), said.worker_index(),
                   said.incarnation()) != nullptr) {
      EndWorker(id,
                Taken("WORKER_TAKEN",
                      absl::StrCat("worker ", said.worker_index(), " of ",
                                   ReplicaName(said.model(), said.replica()))));
      return;
    }
    worker->named = true;
    worker->registration = report.register_();
    Cut(kLongestClient, worker->registration.mutable_client());
    WatchProcess(node_, worker->registration.pid(),
                 worker->registration.pid_namespace(), worker,
                 [this, id](const absl::Status& why) { EndWorker(id, why); });
    if (node_.link->up()) Join(worker);
    return;
  }
  switch (report.report_case()) {
    case v1::WorkerReport::kHeartbeat: {
      // Also before it is accepted: it is on its way.
      v1::WorkerCommand command;
      command.mutable_heartbeat();
      worker->stream->Write(std::move(command));
      return;
    }
    case v1::WorkerReport::kWriting: {
      // Whoever asks from now on is told so, first of all a coordinator that
      // comes back.
      v1::InstalledState* installed = worker->registration.mutable_installed();
      installed->set_state(v1::InstalledState::STATE_WRITING);
      installed->set_update_id(report.writing().update_id());
      installed->clear_version();
      if (worker->command.update_id() == report.writing().update_id()) {
        installed->set_version(worker->command.version());
      } else {
        installed->set_version(
            streams_.VersionOf(id, report.writing().update_id()));
      }
      return;
    }
    case v1::WorkerReport::kStreamBucketTaken:
      streams_.Taken(id, report.stream_bucket_taken());
      return;
    case v1::WorkerReport::kTensorDigests:
      Digested(worker, report.tensor_digests());
      return;
    case v1::WorkerReport::kApplied:
      Applied(worker, report.applied());
      return;
    default:
      return;
  }
}

void ReplicaSessions::Join(Worker* worker) {
  v1::NodeReport report;
  *report.mutable_worker_joined()->mutable_registration() =
      worker->registration;
  *report.mutable_worker_joined()->mutable_registration()->mutable_installed() =
      BelievedContent(*worker);
  // It counts for nothing before there is room for what it wants: a replica
  // that was paused for an update would wait, paused, for pages to be made.
  report.mutable_worker_joined()->set_ready(worker->accepted);
  node_.link->Ask(
      std::move(report), [this, id = worker->id](const absl::Status& status,
                                                 const v1::Reply& reply) {
        Worker* worker = FindWorker(id);
        if (worker == nullptr || IsUnreachable(status)) return;
        if (!status.ok()) {
          EndWorker(id, status);
          return;
        }
        if (worker->accepted) return;
        worker->taken = true;
        const int64_t tensor_bytes = reply.worker_accepted().tensor_bytes();
        node_.room->Need(
            worker->registration.model(), "workers",
            reply.worker_accepted().store_bytes(), 0,
            [this, id, tensor_bytes](const absl::Status& status) {
              Worker* worker = FindWorker(id);
              if (worker == nullptr || worker->accepted) return;
              // STREAM is for nodes with no room; a STAGE update
              // is refused when it is prepared.
              const bool no_room = ErrorReason(status) == "NO_STORE_ROOM";
              LOG_IF(WARNING, no_room)
                  << worker->Name()
                  << " can only be reached by STREAM: " << status.message();
              if (status.ok() || no_room) {
                Accept(worker, tensor_bytes);
              } else {
                EndWorker(id, ApiStatus(status));
              }
            });
      });
}

v1::InstalledState ReplicaSessions::BelievedContent(
    const Worker& worker) const {
  const v1::InstalledState& said = worker.registration.installed();
  v1::InstalledState writing;
  writing.set_state(v1::InstalledState::STATE_WRITING);
  if (!worker.streamed.empty()) {
    writing.set_update_id(worker.streamed);
    writing.set_version(streams_.VersionOf(worker.id, worker.streamed));
    return writing;
  }
  const bool writes_nothing =
      worker.command.update_id().empty()
          ? said.state() == v1::InstalledState::STATE_NOTHING
          : said.state() == v1::InstalledState::STATE_INSTALLED &&
                said.update_id() == worker.command.update_id();
  if (worker.command_id.empty() || writes_nothing) return said;
  writing.set_update_id(worker.command.update_id());
  writing.set_version(worker.command.version());
  return writing;
}

void ReplicaSessions::Accept(Worker* worker, int64_t tensor_bytes) {
  worker->accepted = true;
  worker->last_heard = absl::Now();
  v1::WorkerCommand command;
  v1::WorkerRegistered* registered = command.mutable_registered();
  *registered->mutable_heartbeat_interval() =
      EncodeDuration(node_.options->deadlines.heartbeat_interval);
  *registered->mutable_heartbeat_timeout() =
      EncodeDuration(node_.options->deadlines.heartbeat);
  registered->set_node("nodes/" + node_.options->node);
  registered->set_tensor_bytes(tensor_bytes);
  worker->stream->Write(std::move(command));
  LOG(INFO) << worker->Name() << " is here (process "
            << worker->registration.pid() << ", "
            << worker->registration.tensors_size() << " tensors)";
  const uint64_t id = worker->id;
  if (node_.placement != nullptr) {
    node_.placement->SetWorker(worker->registration.model(), absl::StrCat(id),
                               ReachableFrom(*worker));
  }
  for (const std::string& arena_id : node_.store->ArenaIds()) {
    const absl::Status status = Offer(worker, arena_id);
    if (!status.ok()) {
      EndWorker(id, status);
      return;
    }
  }
  Join(worker);
  if (worker->early != nullptr) {
    const std::unique_ptr<v1::ApplyWorker> early = std::move(worker->early);
    Apply(*early);
  }
}

void ReplicaSessions::EndWorker(uint64_t id, const absl::Status& why) {
  auto it = workers_.find(id);
  if (it == workers_.end()) return;
  std::unique_ptr<Worker> worker = std::move(it->second);
  workers_.erase(it);
  worker_streams_.erase(worker->stream.get());
  EndApply(worker.get());
  streams_.Left(id);
  if (node_.placement != nullptr) {
    node_.placement->RemoveWorker(worker->registration.model(),
                                  absl::StrCat(id));
  }
  if (worker->named) {
    const v1::RegisterWorker& registration = worker->registration;
    const absl::Status left = LeftStatus(worker->Name(), why);
    LOG(INFO) << left.message();
    v1::NodeReport report;
    v1::WorkerLeft* gone = report.mutable_worker_left();
    gone->set_model(registration.model());
    gone->set_replica(registration.replica());
    gone->set_worker_index(registration.worker_index());
    gone->set_incarnation(registration.incarnation());
    *gone->mutable_failure() = ToFailure(left);
    node_.link->Report(std::move(report));
    bool last = true;
    for (const auto& other : workers_) {
      last =
          last && (!other.second->named ||
                   other.second->registration.model() != registration.model());
    }
    if (last) node_.room->Leave(registration.model(), "workers");
  }
  worker->offers.TakeBackAll();
  EndStream(node_, *worker, why);
}

void ReplicaSessions::Refuse(const v1::RefuseWorker& command) {
  Worker* worker = FindWorker(command.model(), command.replica(),
                              command.worker_index(), command.incarnation());
  if (worker != nullptr) EndWorker(worker->id, FromFailure(command.failure()));
}

// ---- Arenas ----

absl::Status ReplicaSessions::Offer(Worker* worker,
                                    const std::string& arena_id) {
  if (worker->offers.Has(arena_id)) return absl::OkStatus();
  const std::shared_ptr<const transport::Segment> arena =
      node_.store->FindArena(arena_id);
  if (arena == nullptr) {
    return ErrorStatus(
        absl::StatusCode::kInternal, "ARENA_UNKNOWN",
        absl::StrCat("the store has no arena ", arena_id, " any more"));
  }
  // It could not open it, and is given nothing there.
  if (!arena->device_uuid().empty()) {
    const auto& reachable = worker->registration.device_uuids();
    if (std::find(reachable.begin(), reachable.end(), arena->device_uuid()) ==
        reachable.end()) {
      return absl::OkStatus();
    }
  }
  absl::StatusOr<v1::ArenaOffer> offer = worker->offers.Make(
      node_.memory, arena_id, *arena, worker->process, /*read_only=*/true);
  if (!offer.ok()) return offer.status();
  v1::WorkerCommand command;
  *command.mutable_arena() = *std::move(offer);
  worker->stream->Write(std::move(command));
  return absl::OkStatus();
}

void ReplicaSessions::ArenaAdded(const std::string& arena_id) {
  for (const auto& entry : workers_) {
    if (!entry.second->accepted) continue;
    const absl::Status status = Offer(entry.second.get(), arena_id);
    // An apply that needs it tries again, and reports.
    LOG_IF(WARNING, !status.ok()) << "cannot offer arena " << arena_id << " to "
                                  << entry.second->Name() << ": " << status;
  }
}

void ReplicaSessions::ArenaDropped(const std::string& arena_id) {
  for (const auto& entry : workers_) {
    if (!entry.second->offers.TakeBack(arena_id)) continue;
    v1::WorkerCommand command;
    command.set_drop_arena_id(arena_id);
    entry.second->stream->Write(std::move(command));
  }
}

// ---- What streams need of a worker ----

uint64_t ReplicaSessions::FindStreamWorker(const std::string& model,
                                           const v1::StreamWorker& worker) {
  const Worker* found = FindWorker(model, worker.replica(),
                                   worker.worker_index(), worker.incarnation());
  return found == nullptr || !found->accepted ? 0 : found->id;
}

const WantedTensors* ReplicaSessions::TensorsOf(uint64_t worker) {
  return &FindWorker(worker)->registration.tensors();
}

std::vector<std::string> ReplicaSessions::ReachableBy(uint64_t worker) {
  return ReachableFrom(*FindWorker(worker));
}

std::string ReplicaSessions::NameOf(uint64_t worker) {
  const Worker* found = FindWorker(worker);
  return found == nullptr ? "a worker that has left" : found->Name();
}

void ReplicaSessions::Send(uint64_t worker, v1::WorkerCommand command) {
  Worker* found = FindWorker(worker);
  if (found == nullptr) return;
  if (command.apply().stream()) found->streamed = command.apply().update_id();
  found->stream->Write(std::move(command));
}

void ReplicaSessions::SendPlan(uint64_t worker, const v1::CopyPlan& plan) {
  Worker* found = FindWorker(worker);
  if (found == nullptr || found->layouts.count(plan.layout_id()) != 0) return;
  // As the client does it when the next one comes.
  if (found->layouts.size() >= kPlansOfAWorker) found->layouts.clear();
  found->layouts.insert(plan.layout_id());
  v1::WorkerCommand command;
  *command.mutable_copy_plan() = plan;
  found->stream->Write(std::move(command));
}

absl::Status ReplicaSessions::OfferStore(uint64_t worker,
                                         const std::string& arena_id) {
  Worker* found = FindWorker(worker);
  if (found == nullptr) return NotHere("WORKER_LOST", "the worker");
  return Offer(found, arena_id);
}

absl::Status ReplicaSessions::OfferMemory(uint64_t worker,
                                          const SourceRegion& region) {
  Worker* found = FindWorker(worker);
  if (found == nullptr) return NotHere("WORKER_LOST", "the worker");
  if (found->offers.Has(region.arena_id)) return absl::OkStatus();
  const bool on_device = !region.device_uuid.empty();
  // Nobody would tell it to close this again; it is passed what lies there.
  if (on_device && transport::cuda::SegmentControlIsRetired(*region.arena))
    return absl::OkStatus();
  absl::StatusOr<v1::ArenaOffer> offer =
      found->offers.Make(node_.memory, region.arena_id, *region.arena,
                         found->process, /*read_only=*/true);
  if (!offer.ok()) return offer.status();
  if (on_device) {
    offer->set_device_uuid(region.device_uuid);
    offer->set_data_offset_bytes(0);
    offer->set_size_bytes(region.size_bytes);
  }
  v1::WorkerCommand command;
  *command.mutable_arena() = *std::move(offer);
  found->stream->Write(std::move(command));
  return absl::OkStatus();
}

void ReplicaSessions::GiveUp(uint64_t worker, const absl::Status& why) {
  EndWorker(worker, why);
}

// ---- The coordinator, time, and the end ----

void ReplicaSessions::Announce() {
  away_since_ = absl::InfiniteFuture();
  for (const auto& entry : controls_) {
    entry.second->alarmed = false;
    // The coordinator says what becomes of it.
    entry.second->own_retry = absl::InfiniteFuture();
    if (entry.second->named) Join(entry.second.get());
  }
  for (const auto& entry : workers_) {
    if (entry.second->named) Join(entry.second.get());
  }
}

void ReplicaSessions::CoordinatorLost(absl::Time now) {
  if (now < away_since_) away_since_ = now;
}

void ReplicaSessions::CheckLeases(absl::Time now) {
  CheckAway(now);
  std::vector<std::pair<uint64_t, absl::Status>> controls, workers;
  for (const auto& entry : controls_) {
    absl::Status status = entry.second->CheckTime(now, node_);
    if (!status.ok()) controls.emplace_back(entry.first, std::move(status));
  }
  for (const auto& entry : workers_) {
    absl::Status status = entry.second->CheckTime(now, node_);
    if (!status.ok()) workers.emplace_back(entry.first, std::move(status));
  }
  for (const auto& entry : controls) EndControl(entry.first, entry.second);
  for (const auto& entry : workers) EndWorker(entry.first, entry.second);
}

void ReplicaSessions::ForgiveSilence(absl::Time now) {
  for (const auto& entry : controls_) entry.second->last_heard = now;
  for (const auto& entry : workers_) entry.second->last_heard = now;
}

void ReplicaSessions::EndAll(const absl::Status& why) {
  down_ = why;
  std::vector<uint64_t> controls, workers;
  for (const auto& entry : controls_) controls.push_back(entry.first);
  for (const auto& entry : workers_) workers.push_back(entry.first);
  for (uint64_t id : controls) EndControl(id, why);
  for (uint64_t id : workers) EndWorker(id, why);
}

}  // namespace daemon
}  // namespace weightsync
