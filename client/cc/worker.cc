#include "client/cc/worker.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/types/optional.h"
#include "client/cc/apply.h"
#include "client/cc/client_memory.h"
#include "client/cc/lease.h"
#include "client/cc/registered_stream.h"
#include "client/cc/rpc.h"
#include "client/cc/store_map.h"
#include "client/cc/wire_time.h"
#include "client/cc/work_queue.h"
#include "glog/logging.h"
#include "transport/copy.h"
#include "transport/cuda/segment_control.h"
#include "transport/host/pid_namespace.h"
#include "weightsync/v1/replica.grpc.pb.h"

namespace weightsync {
namespace client {
namespace {

// The daemon counts along (kPlansOfAWorker of
// daemon/service/replica_sessions.cc) and sends again what has gone.
constexpr size_t kMaxPlans = 16;

v1::InstalledState MakeState(v1::InstalledState::State state,
                             const v1::ApplyUpdate& apply) {
  v1::InstalledState installed;
  installed.set_state(state);
  installed.set_update_id(apply.update_id());
  installed.set_version(apply.version());
  return installed;
}

absl::Status CheckMemory(const WorkerOptions& options,
                         const std::vector<Tensor>& tensors,
                         const std::vector<Tensor>& spare) {
  for (const Tensor& tensor : tensors) {
    if ((tensor.data == nullptr) == (options.take != nullptr)) continue;
    return ErrorStatus(
        absl::StatusCode::kInvalidArgument, "MEMORY_OUT_OF_RANGE",
        absl::StrCat(tensor.name,
                     options.take
                         ? " has memory: a worker that takes its tensors over "
                           "by `take` registers them without."
                         : " has no memory to be written to."));
  }
  if (options.take && (options.load || options.swap || !spare.empty())) {
    return ErrorStatus(absl::StatusCode::kInvalidArgument,
                       "TENSOR_MEMORY_INVALID",
                       "A worker that takes its tensors over by `take` neither "
                       "loads nor swaps them.");
  }
  return absl::OkStatus();
}

absl::Status CheckSpare(const WorkerOptions& options,
                        const std::vector<Tensor>& tensors,
                        const std::vector<Tensor>& spare) {
  if (spare.empty() && !options.swap) return absl::OkStatus();
  if (options.load) {
    return ErrorStatus(absl::StatusCode::kInvalidArgument, "SWAP_INVALID",
                       "A worker swaps its weights or loads them, not both.");
  }
  const auto invalid = [](absl::string_view why) {
    return ErrorStatus(absl::StatusCode::kInvalidArgument, "SWAP_INVALID",
                       absl::StrCat("A worker that swaps its weights ", why));
  };
  if (spare.empty() || !options.swap) {
    return invalid("needs both a spare set of tensors and options.swap.");
  }
  if (spare.size() != tensors.size()) {
    return invalid("has as many tensors in both sets.");
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const v1::WantedTensor a = ToWantedTensor(tensors[i]);
    const v1::WantedTensor b = ToWantedTensor(spare[i]);
    if (a.SerializeAsString() != b.SerializeAsString()) {
      return invalid(absl::StrCat("has the same tensors in both sets; ",
                                  tensors[i].name, " differs."));
    }
  }
  return absl::OkStatus();
}

// What is read from, and how.
class Reader : public TensorReader {
 public:
  using ReadFn = std::function<absl::Status(int tensor, char* data)>;

  Reader(const v1::ApplyUpdate& apply, bool first, bool last,
         std::vector<int32_t> tensors, const std::vector<Tensor>& registered,
         ReadFn read)
      : registered_(registered), read_(std::move(read)) {
    update_id_ = apply.update_id();
    version_ = apply.version();
    first_ = first;
    last_ = last;
    tensors_ = std::move(tensors);
  }

  absl::Status Read(int tensor, void* data, int64_t bytes) override {
    if (std::find(tensors_.begin(), tensors_.end(), tensor) == tensors_.end()) {
      return ErrorStatus(
          absl::StatusCode::kInvalidArgument, "TENSOR_UNKNOWN",
          absl::StrCat("Tensor ", tensor, " is none that can be read now."));
    }
    if (data == nullptr || bytes < SpanBytes(registered_[tensor])) {
      return ErrorStatus(absl::StatusCode::kInvalidArgument,
                         "MEMORY_SIZE_INVALID",
                         absl::StrCat(registered_[tensor].name, " takes ",
                                      SpanBytes(registered_[tensor]),
                                      " bytes, not ", bytes, "."));
    }
    return read_(tensor, static_cast<char*>(data));
  }

 private:
  const std::vector<Tensor>& registered_;
  const ReadFn read_;
};

// Reads all of a tensor for its digest.
transport::CopyTask DigestTask(const Tensor& tensor, uint32_t ordinal) {
  const absl::Span<const int64_t> extent = PartExtent(tensor);
  const std::vector<int64_t> strides = PartStrides(tensor);
  const std::vector<int64_t> whole(tensor.shape.size(), 0);
  transport::GlobalBox global;
  global.ordinal = ordinal;
  global.shape = tensor.shape;
  global.offset = tensor.box.has_value()
                      ? absl::MakeConstSpan(tensor.box->offset)
                      : absl::MakeConstSpan(whole);
  return transport::MakeBoxCopy(
      extent, static_cast<int32_t>(DTypeBytes(tensor.dtype)), /*dst=*/nullptr,
      transport::DenseStrides(extent), static_cast<const char*>(tensor.data),
      strides, global);
}

}  // namespace

// Commands of the daemon reach the lease's thread, which hands them to the
// queue's thread: maps, plans and copies happen there, in the order of the
// commands, while the lease keeps its heartbeats.
class Worker::Impl {
 public:
  Impl(WorkerOptions options, std::vector<Tensor> tensors,
       std::vector<Tensor> spare, std::unique_ptr<ClientMemory> memory,
       std::shared_ptr<grpc::Channel> channel)
      : options_(std::move(options)),
        sets_{std::move(tensors), std::move(spare)},
        memory_(std::move(memory)),
        stub_(v1::ReplicaService::NewStub(std::move(channel))),
        installed_(options_.installed),
        store_(memory_->get()),
        lease_(RegisteredLeaseOptions(Name(), options_), MakeCallbacks()) {
    lease_.Start();
  }

  ~Impl() { Close(); }

  void Close() {
    lease_.Stop();
    // What this has taken of GPUs goes now, and not with the object, which an
    // interpreter may keep for long: pinned arenas, streams, a buffer.
    queue_.Clear();
    Post([this] {
      streaming_ = nullptr;
      plans_.clear();
      store_.Clear();
      memory_ = nullptr;
    });
    queue_.WaitIdle(absl::InfiniteFuture());
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
      Drop();
    }
    lease_.Restart();
    return absl::OkStatus();
  }

  absl::Status Sleep(absl::Time deadline) {
    {
      absl::MutexLock lock(&mutex_);
      asleep_ = true;
      const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return !applying_;
      };
      if (!mutex_.AwaitWithDeadline(absl::Condition(&idle), deadline)) {
        asleep_ = false;
        return ErrorStatus(absl::StatusCode::kFailedPrecondition,
                           "APPLY_RUNNING",
                           absl::StrCat(Name(),
                                        " is writing an update; sleep after "
                                        "it."));
      }
      installed_.Clear();
      installed_.set_state(v1::InstalledState::STATE_NOTHING);
    }
    lease_.Restart();
    return absl::OkStatus();
  }

  absl::Status Wake() {
    {
      absl::MutexLock lock(&mutex_);
      if (!asleep_) return absl::OkStatus();
      asleep_ = false;
    }
    lease_.Restart();
    return absl::OkStatus();
  }

 private:
  using WorkerLease = Lease<v1::WorkerReport, v1::WorkerCommand>;

  void Post(std::function<void()> work) {
    queue_.Post([work = std::move(work)] {
      // Else a context would be made on the first GPU of every engine.
      transport::cuda::ProcessGpu::KeepDevice();
      work();
    });
  }

  std::string Name() const {
    return absl::StrCat("worker ", options_.worker_index, " of ",
                        options_.model, "/replicas/", options_.replica);
  }

  WorkerLease::Callbacks MakeCallbacks() {
    auto callbacks =
        RegisteredCallbacks<v1::WorkerReport, v1::WorkerCommand>(Name());
    callbacks.start = [this](grpc::ClientContext* context, auto* reactor) {
      stub_->async()->RunWorker(context, reactor);
    };
    callbacks.before_attempt = [this] { ForgetStream(); };
    callbacks.registration = [this] { return Registration(); };
    callbacks.message = [this](v1::WorkerCommand command,
                               WorkerLease::StreamNumber stream) {
      if (command.has_heartbeat()) return;
      Post([this, stream, command = std::move(command)] {
        Execute(command, stream);
      });
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
    Post([this] {
      store_.Clear();
      plans_.clear();
      // What was streamed so far stays what it is: WRITING.
      streaming_ = nullptr;
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
    worker->set_pid_namespace(transport::PidNamespace());
    worker->set_protocol_version(kProtocolVersion);
    worker->set_client(ClientName(options_.client));
    worker->set_incarnation(options_.incarnation);
    for (const Tensor& tensor : sets_[0]) {
      *worker->add_tensors() = ToWantedTensor(tensor);
    }
    for (const std::string& uuid : Reachable()) worker->add_device_uuids(uuid);
    *worker->mutable_installed() = installed();
    return report;
  }

  // The GPUs whose memory can be opened here, as far as is known: the first is
  // one that the tensors are on. Where not even memory of their own can be
  // opened, that of others cannot.
  std::vector<std::string> Reachable() const {
    std::vector<std::string> uuids = memory_->device_uuids();
    absl::MutexLock lock(&mutex_);
    if (!uuids.empty() && closed_devices_.count(uuids[0]) > 0) return {};
    uuids.erase(std::remove_if(uuids.begin(), uuids.end(),
                               [this](const std::string& uuid)
                                   ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
                                     return closed_devices_.count(uuid) > 0;
                                   }),
                uuids.end());
    return uuids;
  }

  // Memory of the daemon on a GPU that cannot be opened here: the daemon is
  // told not to count on it, and brings copies in host memory. Whatever the
  // reason: tried again it would be for ever.
  void CloseDevice(const std::string& uuid, const absl::Status& why) {
    const std::string reason = ErrorReason(why);
    // What has gone with its agent or was given back is offered no more, this
    // process's own context is lost to other copies too, and of tokens the next
    // stream has fresh ones.
    if (uuid.empty() || reason == "EXPORTER_DEAD" || reason == "SEGMENT_GONE" ||
        reason == "DEVICE_FAULT" || absl::StartsWith(reason, "TOKEN_") ||
        absl::StartsWith(reason, "FD_SOCKET_")) {
      return;
    }
    {
      absl::MutexLock lock(&mutex_);
      if (!closed_devices_.insert(uuid).second) return;
    }
    LOG(WARNING) << Name() << " takes its weights by way of host memory, as "
                 << "those on " << uuid << " cannot be opened: " << why;
    lease_.Restart();
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
          if (!absl::StartsWith(command.arena().arena_id(),
                                transport::cuda::kClientArena))
            CloseDevice(command.arena().device_uuid(), status);
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
        if (command.apply().stream()) {
          BeginStream(command.apply(), stream);
        } else {
          Apply(command.apply(), stream);
        }
        break;
      case v1::WorkerCommand::kStreamBucket:
        TakeBucket(command.stream_bucket(), stream);
        break;
      case v1::WorkerCommand::kEndStream:
        EndStream(command.end_stream(), stream);
        break;
      case v1::WorkerCommand::kRemoveWeights:
        Remove(command.remove_weights(), stream);
        break;
      case v1::WorkerCommand::kDigestTensors:
        DigestTensors(command.digest_tensors(), stream);
        break;
      default:
        // Of a newer protocol, and so nothing that this side must know.
        break;
    }
  }

  // The set of tensors that the next update is written to.
  int WriteSet() const { return sets_[1].empty() ? 0 : 1 - serving_; }
  bool swaps() const { return !sets_[1].empty(); }

  void AddPlan(const v1::CopyPlan& plan) {
    const std::string& id = plan.layout_id();
    if (plans_.size() >= kMaxPlans) plans_.clear();
    Plans compiled;
    for (int set = 0; set < (swaps() ? 2 : 1) && compiled.status.ok(); ++set) {
      auto made = ApplyPlan::Compile(plan, sets_[set]);
      compiled.status = made.status();
      if (made.ok()) compiled.sets[set] = *std::move(made);
    }
    if (!compiled.status.ok()) {
      LOG(ERROR) << Name() << ": " << compiled.status;
    }
    plans_.insert_or_assign(id, std::move(compiled));
  }

  absl::StatusOr<std::shared_ptr<const ApplyPlan>> PlanOf(
      const std::string& layout_id) const {
    const auto found = plans_.find(layout_id);
    if (found == plans_.end()) {
      return ErrorStatus(absl::StatusCode::kFailedPrecondition,
                         "COPY_PLAN_UNKNOWN",
                         absl::StrCat("No copy plan came for layout ",
                                      layout_id, "; send it first."));
    }
    if (!found->second.status.ok()) return found->second.status;
    return found->second.sets[WriteSet()];
  }

  // From here to EndWrite nobody may take the memory away.
  absl::Status BeginWrite(const v1::ApplyUpdate& apply) {
    absl::MutexLock lock(&mutex_);
    if (asleep_) {
      return ErrorStatus(absl::StatusCode::kFailedPrecondition, "WORKER_ASLEEP",
                         absl::StrCat(Name(),
                                      " sleeps and has no memory to write to; "
                                      "it registers anew when it wakes."));
    }
    applying_ = true;
    apply_deadline_ = absl::Now() + FromProto(apply.timeout());
    return absl::OkStatus();
  }
  void EndWrite() {
    absl::MutexLock lock(&mutex_);
    applying_ = false;
  }
  // As BeginWrite, for a part of the update that is streamed: not where its
  // parts before were dropped.
  absl::Status BeginStreamed() {
    absl::Status status = BeginWrite(streaming_->apply);
    if (!status.ok()) return status;
    absl::MutexLock lock(&mutex_);
    if (drops_ == streaming_->drops) return absl::OkStatus();
    applying_ = false;
    return ErrorStatus(
        absl::StatusCode::kAborted, "WEIGHTS_DROPPED",
        absl::StrCat(Name(), " has dropped what had come of update ",
                     streaming_->apply.update_id(),
                     "; it is given an update anew after it has registered."));
  }
  void Drop() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    installed_.Clear();
    installed_.set_state(v1::InstalledState::STATE_NOTHING);
    ++drops_;
  }

  // Tells the daemon, and the engine, that the tensors are about to become a
  // mix. After an error they are what they were.
  absl::Status AnnounceWriting(const v1::ApplyUpdate& apply,
                               WorkerLease::StreamNumber stream) {
    if (options_.may_write) {
      const absl::Status status = options_.may_write();
      if (!status.ok()) return status;
    }
    // The other set serves, and stays whole.
    if (swaps()) return absl::OkStatus();
    const v1::InstalledState before = installed();
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
    return absl::OkStatus();
  }

  // The write set holds the update whole.
  absl::Status Installed(const v1::ApplyUpdate& apply) {
    if (swaps()) {
      const int set = WriteSet();
      const absl::Status status = options_.swap(set, apply.update_id());
      if (!status.ok()) return status;
      serving_ = set;
    } else if (options_.load) {
      const absl::Status status =
          options_.load(apply.update_id(), apply.version());
      if (!status.ok()) return status;
    }
    SetInstalled(MakeState(v1::InstalledState::STATE_INSTALLED, apply));
    return absl::OkStatus();
  }

  bool Has(const std::string& update_id) const {
    const v1::InstalledState now = installed();
    return now.state() == v1::InstalledState::STATE_INSTALLED &&
           now.update_id() == update_id;
  }

  void Apply(const v1::ApplyUpdate& apply, WorkerLease::StreamNumber stream) {
    v1::WorkerReport report;
    v1::WorkerApplied* answer = report.mutable_applied();
    answer->set_command_id(apply.command_id());
    const absl::Time start = absl::Now();
    bool untouched = true;
    absl::Status status = BeginWrite(apply);
    if (status.ok()) {
      // An update that was streamed and never completed is written over.
      streaming_ = nullptr;
      status = Install(apply, stream, &untouched, answer);
      EndWrite();
    }
    answer->set_untouched(untouched || swaps());
    Answer(apply, status, absl::Now() - start, std::move(report), stream);
  }

  void Answer(const v1::ApplyUpdate& apply, const absl::Status& status,
              absl::Duration duration, v1::WorkerReport report,
              WorkerLease::StreamNumber stream) {
    v1::WorkerApplied* answer = report.mutable_applied();
    answer->set_update_id(apply.update_id());
    *answer->mutable_copy_duration() = ToProto(duration);
    if (!status.ok()) *answer->mutable_failure() = ToFailure(status);
    *answer->mutable_installed() = installed();
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
    if (Has(apply.update_id())) return absl::OkStatus();
    if (apply.commit_term() <= 0) {
      return ErrorStatus(
          absl::StatusCode::kFailedPrecondition, "NOT_COMMITTED",
          absl::StrCat("The command to apply ", apply.update_id(),
                       " does not say that it is committed."));
    }
    const auto plan = PlanOf(apply.layout_id());
    if (!plan.ok()) return plan.status();
    const auto buckets = store_.Locate(apply, (*plan)->buckets());
    if (!buckets.ok()) return buckets.status();
    std::vector<ApplyPlan::Source> sources;
    sources.reserve(buckets->size());
    for (const StoreMap::Bucket& bucket : *buckets) {
      sources.push_back({bucket.data, bucket.size_bytes});
    }
    std::vector<transport::CopyTask> tasks;
    if (!options_.take) {
      auto made = (*plan)->Tasks(sources);
      if (!made.ok()) return made.status();
      tasks = *std::move(made);
    }

    absl::Status status = AnnounceWriting(apply, stream);
    if (!status.ok()) return status;
    *untouched = false;
    if (options_.take) {
      std::vector<int32_t> all(sets_[0].size());
      for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
      Reader reader(apply, /*first=*/true, /*last=*/true, std::move(all),
                    sets_[0], [&](int tensor, char* data) -> absl::Status {
                      auto made = (*plan)->TasksInto(tensor, sources, data);
                      if (!made.ok()) return made.status();
                      return memory_->get()->Copy(*made,
                                                  transport::CopyOptions(),
                                                  /*digest=*/nullptr);
                    });
      status = options_.take(&reader);
    } else {
      status = memory_->get()->Copy(tasks, transport::CopyOptions(),
                                    /*digest=*/nullptr);
    }
    if (!status.ok()) return status;
    answer->set_copied_bytes((*plan)->bytes());
    FenceCopies();
    for (const StoreMap::Bucket& bucket : *buckets) {
      if (!bucket.StillThere()) return Recycled(apply.update_id());
    }
    return Installed(apply);
  }

  // The copies' loads come before the counters' second reading.
  static void FenceCopies() {
#if !defined(__SANITIZE_THREAD__)  // gcc refuses fences there
    std::atomic_thread_fence(std::memory_order_acquire);
#endif
  }

  static absl::Status Recycled(const std::string& update_id) {
    return ErrorStatus(
        absl::StatusCode::kAborted, "STORE_SLOT_RECYCLED",
        absl::StrCat("The store gave bytes of ", update_id,
                     " away while they were copied: the tensors hold a "
                     "mix; apply the update again."));
  }

  // ---- STREAM ----

  // An update whose buckets come one by one.
  struct Streaming {
    v1::ApplyUpdate apply;
    std::shared_ptr<const ApplyPlan> plan;
    std::set<int32_t> taken;
    int64_t bytes = 0;
    absl::Duration copying;
    // Of tensors without memory: what has come of those that are not complete,
    // and the bytes that each still lacks. Whether `take` was called yet.
    std::vector<std::unique_ptr<char[]>> partial;
    std::vector<int64_t> lacking;
    bool begun = false;
    // Of before.
    int64_t drops = 0;

    // Memory for tensors of which something comes now.
    std::vector<char*> Targets(const std::vector<Tensor>& tensors,
                               const std::map<int32_t, int64_t>& coming) {
      std::vector<char*> targets(tensors.size());
      for (const auto& tensor : coming) {
        std::unique_ptr<char[]>& memory = partial[tensor.first];
        if (memory == nullptr) {
          memory.reset(new char[SpanBytes(tensors[tensor.first])]);
        }
        targets[tensor.first] = memory.get();
      }
      return targets;
    }
  };

  // Something of these tensors has come: those that are complete now are handed
  // over, and their memory is given back.
  absl::Status HandOver(const std::map<int32_t, int64_t>& come, bool last) {
    std::vector<int32_t> ready;
    for (const auto& tensor : come) {
      int64_t& lacking = streaming_->lacking[tensor.first];
      lacking -= tensor.second;
      if (lacking == 0) ready.push_back(tensor.first);
    }
    if (ready.empty() && !last) return absl::OkStatus();
    Reader reader(streaming_->apply, !streaming_->begun, last, ready, sets_[0],
                  [this](int tensor, char* data) {
                    memcpy(data, streaming_->partial[tensor].get(),
                           SpanBytes(sets_[0][tensor]));
                    return absl::OkStatus();
                  });
    streaming_->begun = true;
    const absl::Status status = options_.take(&reader);
    for (const int32_t tensor : ready) streaming_->partial[tensor].reset();
    return status;
  }

  void BeginStream(const v1::ApplyUpdate& apply,
                   WorkerLease::StreamNumber stream) {
    if (Has(apply.update_id())) return;
    if (streaming_ != nullptr &&
        streaming_->apply.update_id() == apply.update_id()) {
      return;
    }
    streaming_ = nullptr;
    absl::Status status = BeginWrite(apply);
    if (status.ok()) {
      auto plan = PlanOf(apply.layout_id());
      status = plan.status();
      if (status.ok()) status = AnnounceWriting(apply, stream);
      if (status.ok()) {
        streaming_ = std::make_unique<Streaming>();
        streaming_->apply = apply;
        streaming_->apply.clear_direct();
        streaming_->plan = *std::move(plan);
        streaming_->partial.resize(sets_[0].size());
        streaming_->lacking = streaming_->plan->tensor_bytes();
        absl::MutexLock lock(&mutex_);
        streaming_->drops = drops_;
      }
      EndWrite();
    }
    if (!status.ok()) {
      // Whoever passes the first bucket learns it.
      refused_ = status;
      refused_update_ = apply.update_id();
      LOG(ERROR) << Name() << " cannot take part in " << apply.update_id()
                 << ": " << status;
    }
    for (int i = 0; i < apply.direct_size();) {
      int end = i + 1;
      // Parts on GPUs are copied at once: an engine waits, and each would be
      // waited for by itself. What is handed over part by part is not.
      while (!options_.take && LiesOnGpu(apply.direct(i)) &&
             end < apply.direct_size() &&
             apply.direct(end).bucket() == apply.direct(i).bucket() &&
             LiesOnGpu(apply.direct(end))) {
        ++end;
      }
      ReadDirectly(apply, i, end, stream);
      i = end;
    }
  }

  bool LiesOnGpu(const v1::DirectCopies& copies) const {
    const auto memory = store_.Find(copies.memory().arena().arena_id());
    return memory != nullptr && memory->kind() == transport::MemoryKind::kCuda;
  }

  // Parts `first` to before `end` of one bucket, each answered with its digest:
  // one, or several on GPUs.
  void ReadDirectly(const v1::ApplyUpdate& apply, int first, int end,
                    WorkerLease::StreamNumber stream) {
    const int32_t bucket = apply.direct(first).bucket();
    absl::optional<transport::Digest> digest;
    const absl::Status status = WriteStreamed(apply.update_id(), [&] {
      std::vector<transport::CopyTask> tasks;
      std::map<int32_t, int64_t> come;
      for (int i = first; i < end; ++i) {
        const absl::Status added =
            AddDirect(apply, apply.direct(i), &tasks, &come);
        if (!added.ok()) return added;
      }
      // Within and between GPUs nothing here computes a digest: the daemon's
      // agent has it.
      if (!LiesOnGpu(apply.direct(first))) digest.emplace();
      const absl::Status copied =
          memory_->get()->Copy(tasks, transport::CopyOptions(),
                               digest.has_value() ? &*digest : nullptr);
      if (!copied.ok()) return copied;
      for (const transport::CopyTask& task : tasks) {
        streaming_->bytes += task.bytes();
      }
      return options_.take ? HandOver(come, /*last=*/false) : absl::OkStatus();
    });
    const bool last =
        end == apply.direct_size() || apply.direct(end).bucket() != bucket;
    if (status.ok() && last) streaming_->taken.insert(bucket);
    for (int i = first; i < end; ++i) {
      v1::WorkerReport report;
      v1::StreamBucketTaken* taken = report.mutable_stream_bucket_taken();
      taken->set_update_id(apply.update_id());
      taken->set_command_id(apply.command_id());
      taken->set_bucket(bucket);
      if (!status.ok()) {
        *taken->mutable_failure() = ToFailure(status);
      } else if (digest.has_value()) {
        taken->mutable_digest()->set_lane0(digest->lanes[0]);
        taken->mutable_digest()->set_lane1(digest->lanes[1]);
      }
      lease_.Write(stream, std::move(report));
    }
  }

  // The copies of one part, and the bytes of each tensor that come with it.
  absl::Status AddDirect(const v1::ApplyUpdate& apply,
                         const v1::DirectCopies& copies,
                         std::vector<transport::CopyTask>* tasks,
                         std::map<int32_t, int64_t>* come) {
    const std::string& arena_id = copies.memory().arena().arena_id();
    const auto memory = store_.Find(arena_id);
    if (memory == nullptr || copies.size_bytes() > memory->bytes()) {
      return ErrorStatus(
          absl::StatusCode::kFailedPrecondition, "ARENA_UNKNOWN",
          absl::StrCat("The trainer's memory ", arena_id,
                       " could not be mapped or was never offered."));
    }
    std::vector<Tensor> targets;
    if (options_.take) {
      targets = sets_[0];
      for (const v1::TensorCopy& copy : copies.copies()) {
        if (copy.tensor() >= 0 &&
            copy.tensor() < static_cast<int>(targets.size())) {
          (*come)[copy.tensor()] = 0;
        }
      }
      const auto memories = streaming_->Targets(sets_[0], *come);
      for (const auto& tensor : *come) {
        targets[tensor.first].data = memories[tensor.first];
      }
    }
    auto added =
        DirectTasks(copies, options_.take ? targets : sets_[WriteSet()],
                    apply.ordinals(), memory->data(), copies.size_bytes());
    if (!added.ok()) return added.status();
    if (memory->kind() == transport::MemoryKind::kCuda) {
      const absl::Status here = CheckDevice(*memory, *added);
      if (!here.ok()) return here;
    }
    for (size_t i = 0; i < added->size(); ++i) {
      // One for each copy, in their order.
      if (options_.take) {
        (*come)[copies.copies(static_cast<int>(i)).tensor()] +=
            (*added)[i].bytes();
      }
      tasks->push_back(std::move((*added)[i]));
    }
    return absl::OkStatus();
  }

  // Nothing is copied by way of host memory in the time that an engine stands
  // still: the daemon does that chunk by chunk.
  absl::Status CheckDevice(const transport::Segment& memory,
                           const std::vector<transport::CopyTask>& tasks) {
    for (const transport::CopyTask& task : tasks) {
      if (memory_->CopiesStraight(memory.data(), task.dst)) continue;
      return ErrorStatus(
          absl::StatusCode::kFailedPrecondition, "OTHER_DEVICE",
          absl::StrCat("The trainer's memory is on ", memory.device_uuid(),
                       ", to which not all of the tensors of ", Name(),
                       " have a way; nothing was written."));
    }
    return absl::OkStatus();
  }

  void TakeBucket(const v1::StreamBucket& pass,
                  WorkerLease::StreamNumber stream) {
    const int32_t id = pass.location().bucket();
    v1::WorkerReport report;
    v1::StreamBucketTaken* taken = report.mutable_stream_bucket_taken();
    taken->set_update_id(pass.update_id());
    taken->set_command_id(pass.command_id());
    taken->set_bucket(id);
    const absl::Status status = WriteStreamed(pass.update_id(), [&] {
      const auto bucket =
          store_.LocateOne(pass.update_id(), id, pass.location().slot());
      if (!bucket.ok()) return bucket.status();
      const ApplyPlan& plan = *streaming_->plan;
      const ApplyPlan::Source source{bucket->data, bucket->size_bytes};
      // Sent again: what it completed was handed over.
      if (options_.take && streaming_->taken.count(id) > 0) {
        return absl::OkStatus();
      }
      std::map<int32_t, int64_t> come;
      if (options_.take) come = plan.TensorsOf(id);
      const auto tasks =
          options_.take ? plan.TasksOfInto(id, source,
                                           streaming_->Targets(sets_[0], come))
                        : plan.TasksOf(id, source);
      if (!tasks.ok()) return tasks.status();
      const absl::Status copied = memory_->get()->Copy(
          *tasks, transport::CopyOptions(), /*digest=*/nullptr);
      if (!copied.ok()) return copied;
      FenceCopies();
      if (!bucket->StillThere()) return Recycled(pass.update_id());
      for (const auto& task : *tasks) streaming_->bytes += task.bytes();
      return options_.take ? HandOver(come, /*last=*/false) : absl::OkStatus();
    });
    if (status.ok()) streaming_->taken.insert(id);
    if (!status.ok()) {
      LOG(ERROR) << Name() << " could not take bucket " << id << " of "
                 << pass.update_id() << ": " << status;
      *taken->mutable_failure() = ToFailure(status);
    }
    lease_.Write(stream, std::move(report));
  }

  // Writes a part of the update that is streamed.
  template <typename Fn>
  absl::Status WriteStreamed(const std::string& update_id, Fn write) {
    if (streaming_ == nullptr || streaming_->apply.update_id() != update_id) {
      if (update_id == refused_update_) return refused_;
      return ErrorStatus(
          absl::StatusCode::kFailedPrecondition, "STREAM_UNKNOWN",
          absl::StrCat(Name(), " takes no part in update ", update_id, "."));
    }
    absl::Status status = BeginStreamed();
    if (!status.ok()) return status;
    const absl::Time start = absl::Now();
    status = write();
    streaming_->copying += absl::Now() - start;
    EndWrite();
    return status;
  }

  void EndStream(const v1::EndStream& end, WorkerLease::StreamNumber stream) {
    v1::WorkerReport report;
    v1::WorkerApplied* answer = report.mutable_applied();
    answer->set_command_id(end.command_id());
    if (streaming_ == nullptr ||
        streaming_->apply.update_id() != end.update_id()) {
      // Aborted before it had begun here: nothing is left of it. The daemon
      // counts us as WRITING until it hears so.
      v1::ApplyUpdate apply;
      apply.set_update_id(end.update_id());
      answer->set_untouched(true);
      const absl::Status status =
          !end.complete()
              ? ErrorStatus(absl::StatusCode::kAborted, "UPDATE_ABORTED",
                            absl::StrCat("Update ", end.update_id(),
                                         " was given up before it was "
                                         "streamed; nothing was written."))
          : Has(end.update_id())
              ? absl::OkStatus()
              : ErrorStatus(absl::StatusCode::kFailedPrecondition,
                            "STREAM_UNKNOWN",
                            absl::StrCat(Name(), " has not been given update ",
                                         end.update_id(), "."));
      Answer(apply, status, absl::ZeroDuration(), std::move(report), stream);
      return;
    }
    absl::Status status = BeginStreamed();
    const bool writes = status.ok();
    const bool all =
        writes && end.complete() &&
        std::all_of(streaming_->plan->buckets().begin(),
                    streaming_->plan->buckets().end(), [this](int32_t bucket) {
                      return streaming_->taken.count(bucket) > 0;
                    });
    if (options_.take && all) status = HandOver({}, /*last=*/true);
    const std::unique_ptr<Streaming> streamed = std::move(streaming_);
    answer->set_copied_bytes(streamed->bytes);
    if (!end.complete()) {
      status = ErrorStatus(
          absl::StatusCode::kAborted, "UPDATE_ABORTED",
          absl::StrCat("Update ", end.update_id(),
                       " was given up while it was streamed; the tensors hold "
                       "a mix until another one is applied."));
    }
    for (const int32_t bucket : streamed->plan->buckets()) {
      if (!status.ok()) break;
      if (streamed->taken.count(bucket) > 0) continue;
      status = ErrorStatus(absl::StatusCode::kFailedPrecondition,
                           "STREAM_INCOMPLETE",
                           absl::StrCat(Name(), " has not got bucket ", bucket,
                                        " of ", end.update_id(), "."));
    }
    if (status.ok()) status = Installed(streamed->apply);
    if (writes) EndWrite();
    answer->set_untouched(swaps());
    Answer(streamed->apply, status, streamed->copying, std::move(report),
           stream);
  }

  // ---- Removing ----

  void Remove(const v1::RemoveWeights& command,
              WorkerLease::StreamNumber stream) {
    // What was streamed so far is a mix that nobody completes any more.
    streaming_ = nullptr;
    absl::Status status;
    if (installed().state() != v1::InstalledState::STATE_NOTHING) {
      if (options_.on_remove) {
        // Neither there nor gone, until the engine has said so.
        v1::InstalledState between = installed();
        between.set_state(v1::InstalledState::STATE_WRITING);
        SetInstalled(std::move(between));
        status = options_.on_remove();
      }
      if (status.ok()) {
        v1::InstalledState nothing;
        nothing.set_state(v1::InstalledState::STATE_NOTHING);
        SetInstalled(std::move(nothing));
      }
    }
    v1::WorkerReport report;
    v1::WorkerApplied* answer = report.mutable_applied();
    answer->set_command_id(command.command_id());
    if (!status.ok()) {
      LOG(ERROR) << Name() << " could not drop its weights: " << status;
      *answer->mutable_failure() = ToFailure(status);
    }
    *answer->mutable_installed() = installed();
    lease_.Write(stream, std::move(report));
  }

  // ---- Verifying ----

  void DigestTensors(const v1::DigestTensors& command,
                     WorkerLease::StreamNumber stream) {
    v1::WorkerReport report;
    v1::TensorDigests* answer = report.mutable_tensor_digests();
    answer->set_command_id(command.command_id());
    const absl::Time start = absl::Now();
    // Reads the memory: it must be there.
    absl::Status status =
        options_.take
            ? ErrorStatus(
                  absl::StatusCode::kFailedPrecondition, "DIGESTS_UNKNOWN",
                  absl::StrCat(Name(),
                               " has a loader: this library hands each tensor "
                               "over to the engine and holds none of them "
                               "itself, so it has nothing to digest; ask the "
                               "engine, or register tensors that are filled "
                               "in place."))
            : BeginWrite(v1::ApplyUpdate());
    if (status.ok()) {
      const std::vector<Tensor>& tensors = sets_[serving_];
      if (command.ordinals_size() != static_cast<int>(tensors.size())) {
        status = ErrorStatus(
            absl::StatusCode::kInvalidArgument, "TENSOR_COUNT_MISMATCH",
            absl::StrCat("The daemon names ", command.ordinals_size(),
                         " tensors, and ", Name(), " has ", tensors.size(),
                         "."));
      }
      for (size_t i = 0; status.ok() && i < tensors.size(); ++i) {
        transport::Digest digest;
        const transport::CopyTask task = DigestTask(
            tensors[i],
            static_cast<uint32_t>(command.ordinals(static_cast<int>(i))));
        status =
            memory_->get()->Copy({task}, transport::CopyOptions(), &digest);
        v1::Digest* out = answer->add_digests();
        out->set_lane0(digest.lanes[0]);
        out->set_lane1(digest.lanes[1]);
      }
      EndWrite();
    }
    if (!status.ok()) {
      answer->clear_digests();
      *answer->mutable_failure() = ToFailure(status);
    }
    *answer->mutable_installed() = installed();
    *answer->mutable_digest_duration() = ToProto(absl::Now() - start);
    lease_.Write(stream, std::move(report));
  }

  void SetInstalled(v1::InstalledState state) {
    absl::MutexLock lock(&mutex_);
    installed_ = std::move(state);
  }

  const WorkerOptions options_;
  // The second is empty where nothing is swapped.
  const std::vector<Tensor> sets_[2];
  // Until Close.
  std::unique_ptr<ClientMemory> memory_;
  const std::unique_ptr<v1::ReplicaService::Stub> stub_;
  mutable absl::Mutex mutex_;
  v1::InstalledState installed_ ABSL_GUARDED_BY(mutex_);
  bool applying_ ABSL_GUARDED_BY(mutex_) = false;
  // How often the weights were.
  int64_t drops_ ABSL_GUARDED_BY(mutex_) = 0;
  // GPUs of which memory of the daemon cannot be opened here.
  std::set<std::string> closed_devices_ ABSL_GUARDED_BY(mutex_);
  bool asleep_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time apply_deadline_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  // Not OK once the lease has ended.
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);

  // Of the queue's thread alone.
  StoreMap store_;
  // By layout; for each set of tensors.
  struct Plans {
    absl::Status status;
    std::shared_ptr<const ApplyPlan> sets[2];
  };
  absl::flat_hash_map<std::string, Plans> plans_;
  int serving_ = 0;
  std::unique_ptr<Streaming> streaming_;
  // The stream that this worker could not begin, and why.
  std::string refused_update_;
  absl::Status refused_;

  WorkQueue queue_;
  WorkerLease lease_;
};

absl::StatusOr<std::unique_ptr<Worker>> Worker::Start(
    WorkerOptions options, std::vector<Tensor> tensors) {
  return Start(std::move(options), std::move(tensors), {});
}

absl::StatusOr<std::unique_ptr<Worker>> Worker::Start(
    WorkerOptions options, std::vector<Tensor> tensors,
    std::vector<Tensor> spare) {
  absl::Status status = CheckTensors(tensors, /*unique_names=*/true);
  if (status.ok()) status = CheckTensors(spare, /*unique_names=*/true);
  if (status.ok()) status = CheckMemory(options, tensors, spare);
  if (status.ok()) status = CheckSpare(options, tensors, spare);
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
  // One that swaps is not asked to pause.
  auto memory = std::make_unique<ClientMemory>(
      options.copy_threads, options.swap ? ClientMemory::Engine::kRuns
                                         : ClientMemory::Engine::kStands);
  for (const auto* set : {&tensors, &spare}) {
    for (const Tensor& tensor : *set) {
      if (!tensor.on_gpu) continue;
      status = memory->AddGpuRange(tensor.data, SpanBytes(tensor));
      if (!status.ok()) {
        return ErrorStatus(status.code(), ErrorReason(status),
                           absl::StrCat(tensor.name, ": ", status.message()));
      }
    }
  }
  options.model = ModelName(options.model);
  auto channel = MakeChannel(options.address);
  if (!channel.ok()) return channel.status();
  return std::unique_ptr<Worker>(new Worker(std::make_unique<Impl>(
      std::move(options), std::move(tensors), std::move(spare),
      std::move(memory), *std::move(channel))));
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
absl::Status Worker::Sleep(absl::Duration timeout) {
  return impl_->Sleep(absl::Now() + timeout);
}
absl::Status Worker::Wake() { return impl_->Wake(); }
absl::Status Worker::status() const { return impl_->status(); }
bool Worker::ended() const { return impl_->ended(); }
void Worker::Close() { impl_->Close(); }

}  // namespace client
}  // namespace weightsync
