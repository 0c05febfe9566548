#include "client/cc/worker.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/cc/apply.h"
#include "client/cc/client_memory.h"
#include "client/cc/lease.h"
#include "client/cc/rpc.h"
#include "client/cc/store_map.h"
#include "client/cc/wire_time.h"
#include "client/cc/work_queue.h"
#include "glog/logging.h"
#include "weightsync/v1/replica.grpc.pb.h"

namespace weightsync {
namespace client {
namespace {

// More layouts than a daemon remembers for a model.
constexpr size_t kMaxPlans = 16;

v1::InstalledState MakeState(v1::InstalledState::State state,
                             const v1::ApplyUpdate& apply) {
  v1::InstalledState installed;
  installed.set_state(state);
  installed.set_update_id(apply.update_id());
  installed.set_version(apply.version());
  return installed;
}

}  // namespace

// Commands of the daemon reach the lease's thread, which hands them to the
// queue's thread: maps, plans and copies happen there, in the order of the
// commands, while the lease keeps its heartbeats.
class Worker::Impl {
 public:
  Impl(WorkerOptions options, std::vector<Tensor> tensors,
       std::shared_ptr<grpc::Channel> channel)
      : options_(std::move(options)),
        tensors_(std::move(tensors)),
        memory_(options_.copy_threads),
        stub_(v1::ReplicaService::NewStub(std::move(channel))),
        installed_(options_.installed),
        store_(memory_.get()),
        lease_(MakeLeaseOptions(), MakeCallbacks()) {
    lease_.Start();
  }

  ~Impl() { Close(); }

  void Close() {
    lease_.Stop();
    queue_.Stop();
  }

  absl::Status WaitRegistered(absl::Time deadline) {
    return lease_.WaitRegistered(deadline);
  }
  absl::Status status() const { return lease_.status(); }
  bool ended() const { return lease_.ended(); }

  v1::InstalledState installed() const {
    absl::MutexLock lock(&mutex_);
    return installed_;
  }

  absl::Status WaitInstalled(int64_t version, absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    const auto there = [this, version]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return installed_.state() == v1::InstalledState::STATE_INSTALLED &&
             installed_.version() >= version;
    };
    const auto over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return there() || !ended_.ok();
    };
    mutex_.AwaitWithDeadline(absl::Condition(&over), deadline);
    if (there()) return absl::OkStatus();
    if (!ended_.ok()) return ended_;
    return ErrorStatus(
        absl::StatusCode::kDeadlineExceeded, "INSTALL_TIMEOUT",
        absl::StrCat(Name(), " has not installed ",
                     version == 0 ? std::string("an update")
                                  : absl::StrCat("version ", version),
                     " yet; it holds ",
                     installed_.update_id().empty()
                         ? std::string("none")
                         : absl::StrCat("version ", installed_.version()),
                     "."));
  }

  absl::Status MarkDropped() {
    {
      absl::MutexLock lock(&mutex_);
      if (applying_) {
        return ErrorStatus(absl::StatusCode::kFailedPrecondition,
                           "APPLY_RUNNING",
                           absl::StrCat(Name(),
                                        " is writing an update; drop weights "
                                        "after it."));
      }
      installed_.Clear();
      installed_.set_state(v1::InstalledState::STATE_NOTHING);
    }
    lease_.Restart();
    return absl::OkStatus();
  }

 private:
  using WorkerLease = Lease<v1::WorkerReport, v1::WorkerCommand>;

  std::string Name() const {
    return absl::StrCat("worker ", options_.worker_index, " of ",
                        options_.model, "/replicas/", options_.replica);
  }

  LeaseOptions MakeLeaseOptions() const {
    LeaseOptions lease;
    lease.what = Name();
    lease.register_timeout = options_.register_timeout;
    lease.max_backoff = options_.max_backoff;
    return lease;
  }

  WorkerLease::Callbacks MakeCallbacks() {
    WorkerLease::Callbacks callbacks;
    callbacks.start = [this](grpc::ClientContext* context, auto* reactor) {
      stub_->async()->RunWorker(context, reactor);
    };
    callbacks.before_attempt = [this] { ForgetStream(); };
    callbacks.registration = [this] { return Registration(); };
    callbacks.heartbeat = [] {
      v1::WorkerReport report;
      report.mutable_heartbeat();
      return report;
    };
    callbacks.accepted = [](const v1::WorkerCommand& command,
                            LeaseTerms* terms) {
      if (!command.has_registered()) return false;
      terms->heartbeat_interval =
          FromProto(command.registered().heartbeat_interval());
      terms->heartbeat_timeout =
          FromProto(command.registered().heartbeat_timeout());
      terms->node = command.registered().node();
      return true;
    };
    callbacks.message = [this](v1::WorkerCommand command,
                               WorkerLease::StreamNumber stream) {
      if (command.has_heartbeat()) return;
      queue_.Post([this, stream, command = std::move(command)] {
        Execute(command, stream);
      });
    };
    callbacks.lost = [this](const absl::Status& status) {
      LOG(WARNING) << Name() << " lost its stream: " << status;
    };
    callbacks.ended = [this](const absl::Status& status) {
      absl::MutexLock lock(&mutex_);
      ended_ = status;
    };
    return callbacks;
  }

  // What the daemon said on a stream ends with it: arenas and plans come again
  // after the registration. A copy that runs ends first, so that the worker
  // registers with what it will hold.
  void ForgetStream() {
    queue_.Clear();
    absl::Time deadline;
    {
      absl::MutexLock lock(&mutex_);
      deadline = std::max(apply_deadline_, absl::Now() + absl::Seconds(5));
    }
    if (!queue_.WaitIdle(deadline)) {
      LOG(WARNING) << Name() << " registers while a copy still runs";
    }
    queue_.Post([this] {
      store_.Clear();
      plans_.clear();
    });
  }

  v1::WorkerReport Registration() const {
    v1::WorkerReport report;
    v1::RegisterWorker* worker = report.mutable_register_();
    worker->set_model(options_.model);
    worker->set_replica(options_.replica);
    worker->set_worker_index(options_.worker_index);
    worker->set_worker_count(options_.worker_count);
    worker->set_pid(getpid());
    worker->set_protocol_version(kProtocolVersion);
    worker->set_client(ClientName(options_.client));
    worker->set_incarnation(options_.incarnation);
    for (const Tensor& tensor : tensors_) {
      *worker->add_tensors() = ToWantedTensor(tensor);
    }
    *worker->mutable_installed() = installed();
    return report;
  }

  // On the queue's thread, as everything below.
  void Execute(const v1::WorkerCommand& command,
               WorkerLease::StreamNumber stream) {
    switch (command.command_case()) {
      case v1::WorkerCommand::kArena: {
        const absl::Status status = store_.Map(command.arena());
        // An apply that needs it will name it.
        if (!status.ok()) {
          LOG(ERROR) << Name() << " cannot map the store's arena "
                     << command.arena().arena_id() << ": " << status;
        }
        break;
      }
      case v1::WorkerCommand::kDropArenaId:
        store_.Drop(command.drop_arena_id());
        break;
      case v1::WorkerCommand::kCopyPlan:
        AddPlan(command.copy_plan());
        break;
      case v1::WorkerCommand::kApply:
        Apply(command.apply(), stream);
        break;
      default:
        // Of a newer protocol, and so nothing that this side must know.
        break;
    }
  }

  void AddPlan(const v1::CopyPlan& plan) {
    const std::string& id = plan.layout_id();
    if (plans_.size() >= kMaxPlans) plans_.clear();
    auto compiled = ApplyPlan::Compile(plan, tensors_);
    if (!compiled.ok()) {
      LOG(ERROR) << Name() << ": " << compiled.status();
    }
    plans_.insert_or_assign(id, std::move(compiled));
  }

  void Apply(const v1::ApplyUpdate& apply, WorkerLease::StreamNumber stream) {
    v1::WorkerReport report;
    v1::WorkerApplied* answer = report.mutable_applied();
    answer->set_update_id(apply.update_id());
    answer->set_command_id(apply.command_id());
    {
      absl::MutexLock lock(&mutex_);
      applying_ = true;
      apply_deadline_ = absl::Now() + FromProto(apply.timeout());
    }
    const absl::Time start = absl::Now();
    bool untouched = true;
    const absl::Status status = Install(apply, stream, &untouched, answer);
    const absl::Duration duration = absl::Now() - start;
    *answer->mutable_copy_duration() = ToProto(duration);
    if (!status.ok()) *answer->mutable_failure() = ToFailure(status);
    answer->set_untouched(untouched);
    {
      absl::MutexLock lock(&mutex_);
      applying_ = false;
      *answer->mutable_installed() = installed_;
    }
    if (!status.ok()) {
      LOG(ERROR) << Name() << " could not install version " << apply.version()
                 << " (" << apply.update_id() << "): " << status;
    }
    if (options_.on_applied) {
      AppliedInfo info;
      info.update_id = apply.update_id();
      info.version = apply.version();
      info.step = apply.step();
      info.status = status;
      info.copied_bytes = answer->copied_bytes();
      info.copy_duration = duration;
      options_.on_applied(info);
    }
    // Where the stream has ended, the next registration says it.
    lease_.Write(stream, std::move(report));
  }

  absl::Status Install(const v1::ApplyUpdate& apply,
                       WorkerLease::StreamNumber stream, bool* untouched,
                       v1::WorkerApplied* answer) {
    const v1::InstalledState before = installed();
    if (before.state() == v1::InstalledState::STATE_INSTALLED &&
        before.update_id() == apply.update_id()) {
      return absl::OkStatus();
    }
    if (apply.commit_term() <= 0) {
      return ErrorStatus(
          absl::StatusCode::kFailedPrecondition, "NOT_COMMITTED",
          absl::StrCat("The command to apply ", apply.update_id(),
                       " does not say that it is committed."));
    }
    const auto found = plans_.find(apply.layout_id());
    if (found == plans_.end()) {
      return ErrorStatus(absl::StatusCode::kFailedPrecondition,
                         "COPY_PLAN_UNKNOWN",
                         absl::StrCat("No copy plan came for layout ",
                                      apply.layout_id(), "; send it first."));
    }
    if (!found->second.ok()) return found->second.status();
    const std::shared_ptr<const ApplyPlan> plan = *found->second;
    const auto buckets = store_.Locate(apply, plan->buckets());
    if (!buckets.ok()) return buckets.status();
    std::vector<ApplyPlan::Source> sources;
    sources.reserve(buckets->size());
    for (const StoreMap::Bucket& bucket : *buckets) {
      sources.push_back({bucket.data, bucket.size_bytes});
    }
    const auto tasks = plan->Tasks(sources);
    if (!tasks.ok()) return tasks.status();

    SetInstalled(MakeState(v1::InstalledState::STATE_WRITING, apply));
    v1::WorkerReport writing;
    writing.mutable_writing()->set_update_id(apply.update_id());
    if (!lease_.Write(stream, std::move(writing)) ||
        !lease_.Flush(stream, absl::Now() + absl::Seconds(5))) {
      SetInstalled(before);
      return ErrorStatus(absl::StatusCode::kUnavailable, "STREAM_ENDED",
                         "The daemon could not be told of the first byte; "
                         "nothing was written.");
    }
    if (options_.on_writing) options_.on_writing(apply.update_id());
    *untouched = false;
    const absl::Status copied = memory_.get()->Copy(
        *tasks, transport::CopyOptions(), /*digest=*/nullptr);
    if (!copied.ok()) return copied;
    answer->set_copied_bytes(plan->bytes());

    // The copies' loads come before the counters' second reading.
#if !defined(__SANITIZE_THREAD__)  // gcc refuses fences there
    std::atomic_thread_fence(std::memory_order_acquire);
#endif
    for (const StoreMap::Bucket& bucket : *buckets) {
      if (!bucket.StillThere()) {
        return ErrorStatus(
            absl::StatusCode::kAborted, "STORE_SLOT_RECYCLED",
            absl::StrCat("The store gave bytes of ", apply.update_id(),
                         " away while they were copied: the tensors hold a "
                         "mix; apply the update again."));
      }
    }
    SetInstalled(MakeState(v1::InstalledState::STATE_INSTALLED, apply));
    return absl::OkStatus();
  }

  void SetInstalled(v1::InstalledState state) {
    absl::MutexLock lock(&mutex_);
    installed_ = std::move(state);
  }

  const WorkerOptions options_;
  const std::vector<Tensor> tensors_;
  ClientMemory memory_;
  const std::unique_ptr<v1::ReplicaService::Stub> stub_;

  mutable absl::Mutex mutex_;
  v1::InstalledState installed_ ABSL_GUARDED_BY(mutex_);
  bool applying_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time apply_deadline_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  // Not OK once the lease has ended.
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);

  // Of the queue's thread alone.
  StoreMap store_;
  absl::flat_hash_map<std::string,
                      absl::StatusOr<std::shared_ptr<const ApplyPlan>>>
      plans_;

  WorkQueue queue_;
  WorkerLease lease_;
};

absl::StatusOr<std::unique_ptr<Worker>> Worker::Start(
    WorkerOptions options, std::vector<Tensor> tensors) {
  absl::Status status = CheckTensors(tensors, /*unique_names=*/true);
  if (!status.ok()) return status;
  if (options.model.empty() || options.replica.empty() ||
      options.incarnation.empty()) {
    return ErrorStatus(absl::StatusCode::kInvalidArgument, "NAME_INVALID",
                       "A worker needs a model, a replica and the replica's "
                       "incarnation.");
  }
  if (options.worker_count < 1 || options.worker_index < 0 ||
      options.worker_index >= options.worker_count) {
    return ErrorStatus(
        absl::StatusCode::kInvalidArgument, "WORKER_INDEX_INVALID",
        absl::StrCat("worker_index ", options.worker_index,
                     " is not one of 0 to worker_count - 1, with worker_count ",
                     options.worker_count, "."));
  }
  options.model = ModelName(options.model);
  auto channel = MakeChannel(options.address);
  if (!channel.ok()) return channel.status();
  return std::unique_ptr<Worker>(new Worker(std::make_unique<Impl>(
      std::move(options), std::move(tensors), *std::move(channel))));
}

Worker::Worker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Worker::~Worker() = default;

absl::Status Worker::WaitRegistered(absl::Duration timeout) {
  return impl_->WaitRegistered(absl::Now() + timeout);
}
v1::InstalledState Worker::installed() const { return impl_->installed(); }
absl::Status Worker::WaitInstalled(int64_t version, absl::Duration timeout) {
  return impl_->WaitInstalled(version, absl::Now() + timeout);
}
absl::Status Worker::MarkDropped() { return impl_->MarkDropped(); }
absl::Status Worker::status() const { return impl_->status(); }
bool Worker::ended() const { return impl_->ended(); }
void Worker::Close() { impl_->Close(); }

}  // namespace client
}  // namespace weightsync
