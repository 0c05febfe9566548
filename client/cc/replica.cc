#include "client/cc/replica.h"

#include <unistd.h>

#include <deque>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/cc/lease.h"
#include "client/cc/registered_stream.h"
#include "client/cc/rpc.h"
#include "client/cc/wire_time.h"
#include "client/cc/work_queue.h"
#include "glog/logging.h"
#include "transport/host/pid_namespace.h"
#include "weightsync/v1/replica.grpc.pb.h"

namespace weightsync {
namespace client {
namespace {

// Answers that are remembered. The daemon has one command at a time under way
// for a replica; the rest is margin.
constexpr size_t kRememberedAnswers = 64;

}  // namespace

// Commands reach the lease's thread, which hands them to the queue's thread:
// hooks run there, one at a time, while the lease keeps its heartbeats.
class Replica::Impl {
 public:
  Impl(ReplicaOptions options, ReplicaHooks hooks,
       std::shared_ptr<grpc::Channel> channel)
      : options_(std::move(options)),
        hooks_(std::move(hooks)),
        stub_(v1::ReplicaService::NewStub(std::move(channel))),
        engine_(options_.paused ? Engine::kPaused : Engine::kRunning),
        lease_(RegisteredLeaseOptions(Name(), options_), MakeCallbacks()) {
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

  bool paused() const {
    absl::MutexLock lock(&mutex_);
    return engine_ != Engine::kRunning;
  }

 private:
  using ReplicaLease = Lease<v1::ReplicaReport, v1::ReplicaCommand>;

  // kUnsure: a hook runs, or on_pause failed.
  enum class Engine { kRunning, kPaused, kUnsure };

  std::string Name() const {
    return absl::StrCat(options_.model, "/replicas/", options_.replica);
  }

  ReplicaLease::Callbacks MakeCallbacks() {
    auto callbacks =
        RegisteredCallbacks<v1::ReplicaReport, v1::ReplicaCommand>(Name());
    callbacks.start = [this](grpc::ClientContext* context, auto* reactor) {
      stub_->async()->ControlReplica(context, reactor);
    };
    callbacks.before_attempt = [this] { queue_.Clear(); };
    callbacks.registration = [this] { return Registration(); };
    callbacks.message = [this](v1::ReplicaCommand command,
                               ReplicaLease::StreamNumber stream) {
      if (!command.has_pause() && !command.has_resume()) return;
      const absl::Time now = absl::Now();
      queue_.Post([this, stream, now, command = std::move(command)] {
        lease_.Write(stream, Execute(command, now));
      });
    };
    return callbacks;
  }

  v1::ReplicaReport Registration() const {
    v1::ReplicaReport report;
    v1::RegisterReplica* replica = report.mutable_register_();
    replica->set_model(options_.model);
    replica->set_replica(options_.replica);
    replica->set_worker_count(options_.worker_count);
    replica->set_pid(getpid());
    replica->set_pid_namespace(transport::PidNamespace());
    replica->set_protocol_version(kProtocolVersion);
    replica->set_client(ClientName(options_.client));
    replica->set_incarnation(options_.incarnation);
    replica->set_partial(options_.partial);
    replica->set_atomic_swap(options_.atomic_swap);
    replica->set_removable(options_.removable);
    replica->set_paused(paused());
    return report;
  }

  // On the queue's thread, as everything below.
  v1::ReplicaReport Execute(const v1::ReplicaCommand& command,
                            absl::Time arrived) {
    // Said again by a coordinator that did not hear the answer. The id alone
    // does not show that: it is another's word, and a pause that is answered
    // from memory is an engine that is written to while it generates.
    const std::string said = command.SerializeAsString();
    for (const auto& [answered, report] : answers_) {
      if (answered == said) return report;
    }
    v1::ReplicaReport report = command.has_pause()
                                   ? Pause(command.pause(), arrived)
                                   : Resume(command.resume());
    answers_.emplace_back(said, report);
    if (answers_.size() > kRememberedAnswers) answers_.pop_front();
    return report;
  }

  v1::ReplicaReport Pause(const v1::PauseReplica& pause, absl::Time arrived) {
    v1::ReplicaReport report;
    v1::ReplicaPaused* answer = report.mutable_paused();
    answer->set_command_id(pause.command_id());
    if (pause.mode() == v1::PAUSE_MODE_NONE) {
      if (options_.atomic_swap) {
        answer->set_detail("not paused: it swaps its weights");
      } else {
        *answer->mutable_failure() = ToFailure(ErrorStatus(
            absl::StatusCode::kFailedPrecondition, "ATOMIC_SWAP_REQUIRED",
            absl::StrCat("The engine of ", Name(),
                         " does not swap its weights and cannot take an update "
                         "without a pause.")));
      }
      return report;
    }
    if (GetEngine() == Engine::kPaused) {
      answer->set_detail("was paused already");
      return report;
    }
    PauseRequest request;
    request.update_id = pause.update_id();
    request.version = pause.version();
    request.mode = pause.mode() == v1::PAUSE_MODE_UNSPECIFIED
                       ? v1::PAUSE_MODE_DRAIN
                       : pause.mode();
    request.deadline = arrived + FromProto(pause.timeout());
    SetEngine(Engine::kUnsure);
    absl::StatusOr<std::string> done = hooks_.on_pause(request);
    if (done.ok()) {
      SetEngine(Engine::kPaused);
      answer->set_detail(*std::move(done));
    } else {
      LOG(ERROR) << Name() << " could not pause: " << done.status();
      *answer->mutable_failure() = ToFailure(HookError("pause", done.status()));
    }
    return report;
  }

  v1::ReplicaReport Resume(const v1::ResumeReplica& resume) {
    v1::ReplicaReport report;
    v1::ReplicaResumed* answer = report.mutable_resumed();
    answer->set_command_id(resume.command_id());
    if (GetEngine() == Engine::kRunning &&
        resume.update_id() == running_update_ &&
        resume.removed() == running_removed_) {
      return report;
    }
    ResumeInfo info;
    info.update_id = resume.update_id();
    info.version = resume.version();
    info.step = resume.step();
    info.weights_changed = resume.weights_changed();
    info.removed = resume.removed();
    info.mode = resume.mode() == v1::PAUSE_MODE_UNSPECIFIED
                    ? v1::PAUSE_MODE_DRAIN
                    : resume.mode();
    const absl::Status status = hooks_.on_resume(info);
    if (status.ok()) {
      running_update_ = resume.update_id();
      running_removed_ = resume.removed();
      SetEngine(Engine::kRunning);
    } else {
      LOG(ERROR) << Name() << " could not resume: " << status;
      // It may generate: a pause hook that failed may have come before, or this
      // one got half way. The next pause asks it.
      SetEngine(Engine::kUnsure);
      *answer->mutable_failure() = ToFailure(HookError("resume", status));
    }
    return report;
  }

  absl::Status HookError(absl::string_view what,
                         const absl::Status& status) const {
    const bool has_reason = status.GetPayload(kReasonPayload).has_value();
    return ErrorStatus(status.code(),
                       has_reason ? ErrorReason(status) : "HOOK_FAILED",
                       absl::StrCat("The engine of ", Name(), " could not ",
                                    what, ": ", status.message()));
  }

  Engine GetEngine() const {
    absl::MutexLock lock(&mutex_);
    return engine_;
  }
  void SetEngine(Engine engine) {
    absl::MutexLock lock(&mutex_);
    engine_ = engine;
  }

  const ReplicaOptions options_;
  const ReplicaHooks hooks_;
  const std::unique_ptr<v1::ReplicaService::Stub> stub_;

  mutable absl::Mutex mutex_;
  Engine engine_ ABSL_GUARDED_BY(mutex_);

  // Of the queue's thread alone. By the whole command.
  std::deque<std::pair<std::string, v1::ReplicaReport>> answers_;
  // What the engine was last told to run on.
  std::string running_update_;
  bool running_removed_ = false;

  WorkQueue queue_;
  ReplicaLease lease_;
};

absl::StatusOr<std::unique_ptr<Replica>> Replica::Start(ReplicaOptions options,
                                                        ReplicaHooks hooks) {
  if (options.model.empty() || options.replica.empty() ||
      options.incarnation.empty()) {
    return ErrorStatus(absl::StatusCode::kInvalidArgument, "NAME_INVALID",
                       "A replica needs a model, a name and an incarnation.");
  }
  if (options.worker_count < 1) {
    return ErrorStatus(absl::StatusCode::kInvalidArgument,
                       "WORKER_COUNT_INVALID",
                       "A replica has at least one worker.");
  }
  if (!hooks.on_pause || !hooks.on_resume) {
    return ErrorStatus(absl::StatusCode::kInvalidArgument, "HOOK_MISSING",
                       "A replica needs both hooks, on_pause and on_resume.");
  }
  options.model = ModelName(options.model);
  auto channel = MakeChannel(options.address);
  if (!channel.ok()) return channel.status();
  return std::unique_ptr<Replica>(new Replica(std::make_unique<Impl>(
      std::move(options), std::move(hooks), *std::move(channel))));
}

Replica::Replica(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Replica::~Replica() = default;

absl::Status Replica::WaitRegistered(absl::Duration timeout) {
  return impl_->WaitRegistered(absl::Now() + timeout);
}
bool Replica::paused() const { return impl_->paused(); }
absl::Status Replica::status() const { return impl_->status(); }
bool Replica::ended() const { return impl_->ended(); }
void Replica::Close() { impl_->Close(); }

}  // namespace client
}  // namespace weightsync
