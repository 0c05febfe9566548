#include "daemon/node/mover.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/node/convert.h"
#include "daemon/node/node_update.h"
#include "glog/logging.h"
#include "proto/status.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

namespace {

using transport::MakeError;

// Ended updates that late ranks are still told about.
constexpr size_t kRememberedUpdates = 64;

std::string FetchKey(const std::string& update_id, const v1::Epoch& epoch) {
  return absl::StrCat(update_id, "#", epoch.term(), ".", epoch.counter());
}

// What a rank is told whose update was given up: ABORTED, whatever the update
// failed of, with the update's own reason.
absl::Status AsAborted(const absl::Status& why) {
  return ErrorStatus(absl::StatusCode::kAborted, ErrorReason(why),
                     why.message());
}

}  // namespace

Mover::Mover(Options options, LayoutBook* layouts, Store* store,
             transport::Memory* memory, transport::GroupFactory* groups)
    : options_(std::move(options)),
      layouts_(layouts),
      store_(store),
      memory_(memory),
      groups_(groups) {}

Mover::~Mover() { Shutdown(); }

void Mover::SetSink(StreamSink* sink) {
  absl::MutexLock lock(&mutex_);
  sink_ = sink;
}

void Mover::SetCheckpoints(Checkpoints* checkpoints) {
  absl::MutexLock lock(&mutex_);
  checkpoints_ = checkpoints;
}

void Mover::SetDeviceStore(const Placement* placement, DeviceCopies* copies) {
  absl::MutexLock lock(&mutex_);
  placement_ = placement;
  device_copies_ = copies;
}

void Mover::SetClusterId(const std::string& cluster_id) {
  absl::MutexLock lock(&mutex_);
  cluster_id_ = cluster_id;
}

// ---- Runs ----

std::shared_ptr<NodeUpdate> Mover::Find(const std::string& update_id) {
  absl::MutexLock lock(&mutex_);
  auto it = runs_.find(update_id);
  return it == runs_.end() ? nullptr : it->second;
}

std::vector<std::shared_ptr<NodeUpdate>> Mover::RunsOf(
    const std::string& update_id) {
  absl::MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<NodeUpdate>> runs;
  for (const auto& run : runs_) {
    if (run.second->update_id() == update_id) runs.push_back(run.second);
  }
  return runs;
}

std::string Mover::KeyOf(const v1::PrepareUpdate& command) const {
  bool receives = !command.fetch();
  for (const v1::Flow& flow : command.flows()) {
    receives = receives || flow.members_size() == 0 ||
               flow.members(0).node() != options_.node;
  }
  return receives ? command.update_id()
                  : FetchKey(command.update_id(), command.epoch());
}

std::shared_ptr<NodeUpdate> Mover::FindOrMake(
    const std::string& key, const std::string& update_id, int64_t version,
    const std::string& layout_id, bool again, absl::Status* status) {
  absl::MutexLock lock(&mutex_);
  if (shut_down_) {
    *status = MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN",
                        "the daemon is shutting down");
    return nullptr;
  }
  auto it = runs_.find(key);
  if (it != runs_.end() && !it->second->finished()) {
    if (it->second->layout()->id == layout_id) return it->second;
    *status = MakeError(
        absl::StatusCode::kFailedPrecondition, "UPDATE_LAYOUT_MISMATCH",
        absl::StrCat("update ", update_id, " has layout ",
                     it->second->layout()->id, ", not ", layout_id));
    return nullptr;
  }
  for (const auto& ended : ended_) {
    if (again || ended.first != update_id) continue;
    *status = ended.second;
    return nullptr;
  }
  auto layout = layouts_->Find(layout_id);
  if (!layout.ok()) {
    *status = layout.status();
    return nullptr;
  }
  NodeUpdate::Context context;
  context.node = options_.node;
  context.cluster_id = cluster_id_;
  context.report = options_.report;
  context.progress_timeout = options_.progress_timeout;
  context.prepare_timeout = options_.prepare_timeout;
  context.peer_deadline = options_.peer_deadline;
  context.report_interval = options_.report_interval;
  context.store = store_;
  context.memory = memory_;
  context.groups = groups_;
  context.sink = sink_;
  context.checkpoints = checkpoints_;
  context.placement = placement_;
  context.device_copies = device_copies_;
  std::shared_ptr<NodeUpdate>& run = runs_[key];
  // A dry run or a fetch that nobody ended has finished by itself.
  if (run != nullptr) ending_.push_back(std::move(run));
  for (const auto& ending : ending_) {
    if (ending->update_id() == update_id && !ending->finished()) {
      context.predecessors.push_back(ending);
    }
  }
  run = std::make_shared<NodeUpdate>(std::move(context), update_id, version,
                                     *std::move(layout));
  return run;
}

void Mover::Remember(const std::string& update_id, const absl::Status& why) {
  ended_.emplace_back(update_id, why);
  if (ended_.size() > kRememberedUpdates) ended_.pop_front();
}

void Mover::EndRun(std::shared_ptr<NodeUpdate> run, bool committed,
                   const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    auto it =
        std::find_if(runs_.begin(), runs_.end(),
                     [&run](const auto& entry) { return entry.second == run; });
    if (it == runs_.end()) return;
    runs_.erase(it);
    Remember(run->update_id(), why);
    ending_.push_back(run);
  }
  run->End(committed, why);
}

void Mover::Reap() {
  std::vector<std::shared_ptr<NodeUpdate>> done;
  absl::MutexLock lock(&mutex_);
  auto first_done = std::stable_partition(
      ending_.begin(), ending_.end(),
      [](const std::shared_ptr<NodeUpdate>& run) { return !run->finished(); });
  std::move(first_done, ending_.end(), std::back_inserter(done));
  ending_.erase(first_done, ending_.end());
  // What ends by itself: fetches and dry runs.
  for (auto it = runs_.begin(); it != runs_.end();) {
    if (it->second->finished()) {
      done.push_back(it->second);
      runs_.erase(it++);
    } else {
      ++it;
    }
  }
}

// ---- Commands ----

void Mover::ReportPrepareFailure(const v1::PrepareUpdate& command,
                                 const absl::Status& status) {
  v1::NodeReport report;
  v1::UpdatePrepared* prepared = report.mutable_update_prepared();
  prepared->set_model(command.model());
  prepared->set_update_id(command.update_id());
  *prepared->mutable_epoch() = command.epoch();
  *prepared->mutable_failure() = ToFailure(status);
  options_.report(std::move(report));
}

void Mover::PrepareUpdate(const v1::PrepareUpdate& command) {
  Reap();
  const transport::Epoch epoch = FromProto(command.epoch());
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    transport::Epoch& newest = newest_epochs_[command.model()];
    if (epoch < newest) {
      status =
          MakeError(absl::StatusCode::kFailedPrecondition, "STALE_EPOCH",
                    absl::StrCat("node ", options_.node, " has seen epoch ",
                                 newest.term, ".", newest.counter, " of ",
                                 command.model(), ", which is newer than ",
                                 epoch.term, ".", epoch.counter));
    } else {
      newest = epoch;
    }
  }
  if (!status.ok()) {
    ReportPrepareFailure(command, status);
    return;
  }
  auto run = FindOrMake(KeyOf(command), command.update_id(), command.version(),
                        command.layout_id(), command.fetch(), &status);
  if (run == nullptr) {
    ReportPrepareFailure(command, status);
    return;
  }
  run->Prepare(command);
}

void Mover::MoveUpdate(const v1::MoveUpdate& command) {
  auto run = Find(FetchKey(command.update_id(), command.epoch()));
  if (run == nullptr) run = Find(command.update_id());
  if (run == nullptr) {
    LOG(WARNING) << "MoveUpdate of " << command.update_id()
                 << ", which does not run here, is ignored";
    return;
  }
  run->Move(command);
}

void Mover::UpdateManifest(const v1::UpdateManifest& command) {
  for (const auto& run : RunsOf(command.update_id())) run->Manifest(command);
}

void Mover::EndUpdate(const v1::EndUpdate& command) {
  Reap();
  absl::Status why = FromFailure(command.failure());
  if (why.ok()) {
    why = MakeError(absl::StatusCode::kAborted, "UPDATE_ENDED",
                    absl::StrCat("update ", command.update_id(), " of ",
                                 command.model(), " has ended"));
  }
  if (!command.committed()) {
    // Nor is it kept for anybody: an entry that is dropped and pinned takes no
    // bytes any more, and would refuse the next fetch of the update.
    Unpin(command.update_id());
    for (auto& run : RunsOf(command.update_id())) {
      if (run != Find(command.update_id())) {
        EndRun(std::move(run), /*committed=*/false, why);
      }
    }
  }
  auto run = Find(command.update_id());
  if (run != nullptr) {
    EndRun(std::move(run), command.committed(), why);
    return;
  }
  {
    absl::MutexLock lock(&mutex_);
    if (shut_down_) return;
    Remember(command.update_id(), why);
  }
  // Not of this mover, or given up: what the store has of it is settled.
  if (command.committed()) {
    absl::Status status = store_->Commit(command.update_id());
    LOG_IF(WARNING, !status.ok() && !absl::IsNotFound(status))
        << "Update " << command.update_id() << " is not kept: " << status;
  } else {
    store_->Drop(command.update_id());
  }
}

void Mover::Unpin(const std::string& update_id) {
  StorePin pin;
  absl::MutexLock lock(&mutex_);
  auto it = pins_.find(update_id);
  if (it == pins_.end()) return;
  pin = std::move(it->second);
  pins_.erase(it);
}

void Mover::PinUpdate(const v1::PinUpdate& command) {
  if (!command.pin()) return Unpin(command.update_id());
  {
    absl::MutexLock lock(&mutex_);
    if (shut_down_ || pins_.contains(command.update_id())) return;
  }
  auto pin = store_->Pin(command.update_id());
  if (!pin.ok()) {
    LOG(WARNING) << "Update " << command.update_id() << " of "
                 << command.model() << " cannot be kept: " << pin.status();
    // Who wants it kept believes that it is here.
    v1::NodeReport report;
    report.mutable_update_evicted()->set_model(command.model());
    report.mutable_update_evicted()->set_update_id(command.update_id());
    options_.report(std::move(report));
    return;
  }
  absl::MutexLock lock(&mutex_);
  pins_[command.update_id()] = *std::move(pin);
}

void Mover::DropUpdate(const v1::DropUpdate& command) {
  Unpin(command.update_id());
  store_->Drop(command.update_id(), /*committed_too=*/true);
}

void Mover::ReleaseSources(const v1::ReleaseSources& command) {
  auto run = Find(command.update_id());
  if (run != nullptr) run->Release();
}

absl::StatusOr<SnapshotResult> Mover::SnapshotRank(const RankSource& source) {
  absl::Status status;
  auto run = FindOrMake(source.update_id, source.update_id, source.version,
                        source.layout_id, /*again=*/false, &status);
  auto as_ended = [this, &source](const absl::Status& otherwise) {
    absl::MutexLock lock(&mutex_);
    for (const auto& ended : ended_) {
      if (ended.first == source.update_id) return AsAborted(ended.second);
    }
    return otherwise;
  };
  absl::StatusOr<SnapshotResult> result = [&] {
    using Result = absl::StatusOr<SnapshotResult>;
    if (run == nullptr) return Result(as_ended(status));
    auto shards = ResolveShards(*run->layout(), source.regions, source.shards);
    if (!shards.ok()) return Result(shards.status());
    Result taken = absl::UnknownError("not taken");
    if (source.in_place) {
      auto in_place = std::make_shared<InPlaceSource>();
      in_place->rank = source.rank;
      in_place->regions = source.regions;
      in_place->shards = *std::move(shards);
      in_place->keep_alive = source.keep_alive;
      in_place->cancel = source.cancel;
      taken = run->ReadInPlace(std::move(in_place), source.verify_source);
    } else {
      taken = run->Snapshot(source.rank, *shards, source.verify_source,
                            source.cancel.get());
    }
    if (taken.ok() || ErrorReason(taken.status()) == "SOURCE_CHANGED") {
      return taken;
    }
    return Result(as_ended(taken.status()));
  }();

  v1::NodeReport report;
  v1::RankSnapshotted* snapshotted = report.mutable_rank_snapshotted();
  snapshotted->set_model(source.model);
  snapshotted->set_update_id(source.update_id);
  snapshotted->set_rank(source.rank);
  if (result.ok()) {
    for (const v1::BucketDigest& bucket : result->buckets) {
      *snapshotted->add_buckets() = bucket;
    }
    for (const auto& tensor : result->tensors) {
      v1::TensorDigest* digest = snapshotted->add_tensors();
      digest->set_ordinal(static_cast<int32_t>(tensor.first));
      ToProto(tensor.second, digest->mutable_digest());
    }
    snapshotted->set_copied_bytes(result->copied_bytes);
    const int64_t nanos = absl::ToInt64Nanoseconds(result->copy_duration);
    snapshotted->mutable_copy_duration()->set_seconds(nanos / 1000000000);
    snapshotted->mutable_copy_duration()->set_nanos(
        static_cast<int32_t>(nanos % 1000000000));
  } else {
    *snapshotted->mutable_failure() = ToFailure(result.status());
  }
  options_.report(std::move(report));
  if (result.ok() && source.in_place) {
    absl::Status released = run->WaitReleased(source.cancel.get());
    if (!released.ok()) return as_ended(released);
  }
  return result;
}

void Mover::AbandonUpdates(const absl::Status& why) {
  std::vector<std::shared_ptr<NodeUpdate>> runs;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& run : runs_) {
      if (!run.second->whole()) runs.push_back(run.second);
    }
  }
  std::set<std::string> held;
  for (const v1::HeldUpdate& update : store_->HeldUpdates()) {
    held.insert(update.update_id());
  }
  for (auto& run : runs) {
    // An entry that is dropped and pinned would refuse the next fetch. What is
    // whole here, and sent from here or added to, stays as it is pinned.
    if (held.count(run->update_id()) == 0) Unpin(run->update_id());
    EndRun(std::move(run), /*committed=*/false, why);
  }
}

void Mover::Shutdown() {
  const absl::Status why =
      MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN",
                absl::StrCat("node ", options_.node, " is shutting down"));
  std::vector<std::shared_ptr<NodeUpdate>> runs;
  {
    absl::MutexLock lock(&mutex_);
    shut_down_ = true;
    for (const auto& run : runs_) runs.push_back(run.second);
  }
  for (auto& run : runs) EndRun(std::move(run), /*committed=*/false, why);
  runs.clear();
  {
    absl::MutexLock lock(&mutex_);
    runs.swap(ending_);
    pins_.clear();
  }
  // Their destructors wait for the drivers.
  runs.clear();
}

}  // namespace daemon
}  // namespace weightsync
