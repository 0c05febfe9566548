#include "client/cc/trainer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/cc/gpu_regions.h"
#include "client/cc/lease.h"
#include "client/cc/rpc.h"
#include "client/cc/store_map.h"
#include "client/cc/wire_time.h"
#include "glog/logging.h"
#include "transport/host/arena.h"
#include "transport/host/foreign_memory.h"
#include "transport/host/host_memory.h"
#include "transport/host/pid_namespace.h"
#include "transport/host/unique_fd.h"
#include "weightsync/v1/admin.grpc.pb.h"
#include "weightsync/v1/trainer.grpc.pb.h"

namespace weightsync {
namespace client {

class Trainer::Impl {
 public:
  Impl(TrainerOptions options, std::shared_ptr<grpc::Channel> channel)
      : options_(std::move(options)),
        stub_(v1::TrainerService::NewStub(channel)),
        admin_(v1::AdminService::NewStub(std::move(channel))),
        memory_(/*pool=*/nullptr, /*fds=*/nullptr,
                transport::HostMemory::Options()),
        lease_(MakeLeaseOptions(), MakeCallbacks()) {
    lease_.Start();
  }

  ~Impl() { Close(); }

  void Close() {
    lease_.Stop();
    // Their probes are memory of the GPUs.
    absl::MutexLock lock(&mutex_);
    gpus_ = GpuRegions();
  }

  absl::Status WaitOpened(absl::Time deadline) {
    return lease_.WaitRegistered(deadline);
  }

  absl::StatusOr<TrainerArena> AllocateArena(int64_t size_bytes,
                                             absl::Time deadline) {
    absl::MutexLock calls(&recover_mutex_);
    auto session = Recovered(deadline);
    if (!session.ok()) return session.status();
    auto made = NewArena(*session, size_bytes, deadline);
    if (!made.ok()) return made.status();
    absl::MutexLock lock(&mutex_);
    arenas_.push_back(*made);
    return made->arena;
  }

  absl::Status UseSharedMemory(const SharedMemory& memory) {
    if (memory.name.empty() ? memory.fd < 0 : memory.name[0] != '/') {
      return ErrorStatus(absl::StatusCode::kInvalidArgument,
                         "MEMORY_NAME_INVALID",
                         absl::StrCat("\"", memory.name,
                                      "\" is no name of shared memory: give "
                                      "the one of shm_open, with its slash, "
                                      "or a descriptor."));
    }
    if (memory.data == nullptr || memory.size_bytes <= 0) {
      return ErrorStatus(absl::StatusCode::kInvalidArgument,
                         "MEMORY_SIZE_INVALID",
                         absl::StrCat(memory.name,
                                      ": say where it is mapped, and how many "
                                      "bytes of it (",
                                      memory.size_bytes, ")."));
    }
    KnownMemory added;
    added.memory = memory;
    if (memory.name.empty()) {
      const absl::Status status = Keep(memory.fd, &added);
      if (!status.ok()) return status;
    }
    absl::MutexLock lock(&mutex_);
    const char* data = static_cast<const char*>(memory.data);
    ForgetLocked([&](const SharedMemory& known) {
      const char* begin = static_cast<const char*>(known.data);
      return begin < data + memory.size_bytes &&
             data < begin + known.size_bytes;
    });
    shared_.push_back(std::move(added));
    return absl::OkStatus();
  }

  void ForgetSharedMemory(const void* data) {
    absl::MutexLock lock(&mutex_);
    ForgetLocked([&](const SharedMemory& known) { return known.data == data; });
  }

  absl::StatusOr<v1::RegisterShardsResponse> RegisterShards(
      const std::vector<Tensor>& shards, absl::Time deadline) {
    // A rank may hold several parts of one parameter.
    absl::Status status = CheckTensors(shards, /*unique_names=*/false);
    if (!status.ok()) return status;
    absl::MutexLock calls(&recover_mutex_);
    auto session = Recovered(deadline);
    if (!session.ok()) return session.status();
    auto response = Register(*session, shards, deadline);
    if (response.ok()) shards_ = shards;
    return response;
  }

  absl::StatusOr<PublishResult> Publish(const PublishOptions& options) {
    const absl::Time start = absl::Now();
    const absl::Time deadline = start + options.timeout;
    v1::PublishVersionRequest request;
    request.set_request_id(options.request_id.empty() ? RandomId()
                                                      : options.request_id);
    request.set_version(options.version);
    request.set_step(options.step);
    *request.mutable_options() = options.update;
    v1::PublishVersionResponse response;
    const absl::Status ready = GpusReady();
    if (!ready.ok()) return ready;
    while (true) {
      absl::StatusOr<std::string> session;
      {
        absl::MutexLock calls(&recover_mutex_);
        session = Recovered(deadline);
      }
      if (!session.ok()) return session.status();
      request.set_session(*session);
      const absl::Status status =
          Call("PublishVersion", deadline, [&](grpc::ClientContext* context) {
            return stub_->PublishVersion(context, request, &response);
          });
      if (status.ok()) break;
      // Of a session that was lost under it: the same request again, in a new
      // one.
      if (!options_.reconnect || !IsLost(status) || absl::Now() >= deadline) {
        return status;
      }
    }
    PublishResult result;
    result.version_name = response.version_name();
    result.version = response.version();
    result.update_id = response.update_id();
    result.copied_bytes = response.copied_bytes();
    result.copy_duration = FromProto(response.copy_duration());
    result.stall = absl::Now() - start;
    return result;
  }

  absl::StatusOr<v1::Version> Wait(const PublishResult& published,
                                   absl::Time deadline) {
    v1::WaitVersionRequest request;
    request.set_name(published.version_name);
    request.set_update_id(published.update_id);
    v1::Version version;
    while (true) {
      // The daemon's answer "it goes on" must come before the call's deadline.
      const absl::Duration left = deadline - absl::Now();
      *request.mutable_timeout() =
          ToProto(std::max(left, absl::ZeroDuration()));
      const absl::Status status =
          Call("WaitVersion", deadline + absl::Seconds(5),
               [&](grpc::ClientContext* context) {
                 return stub_->WaitVersion(context, request, &version);
               });
      if (status.ok()) return version;
      // A server's limit may be shorter than the caller's.
      if (!absl::IsDeadlineExceeded(status) || absl::Now() >= deadline) {
        return status;
      }
    }
  }

  absl::StatusOr<v1::Version> Progress(const PublishResult& published,
                                       absl::Time deadline) {
    v1::GetVersionRequest request;
    request.set_name(published.version_name);
    v1::Version version;
    const absl::Status status =
        Call("GetVersion", deadline, [&](grpc::ClientContext* context) {
          return admin_->GetVersion(context, request, &version);
        });
    if (!status.ok()) return status;
    if (!published.update_id.empty() &&
        version.update_id() != published.update_id) {
      return ErrorStatus(
          absl::StatusCode::kNotFound, "VERSION_UNKNOWN",
          absl::StrCat(published.version_name, " is another update by now (",
                       version.update_id(), ")."));
    }
    return version;
  }

  absl::StatusOr<v1::PrepareResponse> Prepare(absl::Time deadline) {
    absl::Duration backoff = absl::Milliseconds(20);
    while (true) {
      v1::PrepareRequest request;
      request.set_model(options_.model);
      *request.mutable_timeout() =
          ToProto(std::max(deadline - absl::Now(), absl::ZeroDuration()));
      v1::PrepareResponse response;
      const absl::Status status =
          Call("Prepare", deadline + absl::Seconds(5),
               [&](grpc::ClientContext* context) {
                 return admin_->Prepare(context, request, &response);
               });
      if (status.ok()) return response;
      if (ErrorReason(status) != "WORLD_INCOMPLETE" ||
          absl::Now() + backoff > deadline) {
        return status;
      }
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(
                                  +[](Impl* i) ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                                       i->mutex_) { return !i->ended_.ok(); },
                                  this),
                              backoff);
      backoff = std::min(backoff * 2, absl::Seconds(1));
    }
  }

  absl::Status status() const { return LeaseStatus(); }

  std::string node() const { return lease_.terms().node; }

 private:
  using TrainerLease = Lease<v1::TrainerHeartbeat, v1::TrainerEvent>;

  struct MappedArena {
    TrainerArena arena;
    std::shared_ptr<transport::Segment> segment;
    std::string session;
  };

  struct KnownMemory {
    SharedMemory memory;
    // Memory without a name: ours as long as it may be registered.
    transport::UniqueFd fd;
    v1::OpenFileMemory file;
  };

  static absl::Status Keep(int fd, KnownMemory* memory) {
    absl::Status status =
        transport::CheckIsMemory(fd, absl::StrCat("descriptor ", fd));
    if (!status.ok()) return status;
    memory->fd = transport::UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    struct stat held;
    if (!memory->fd.valid() || fstat(memory->fd.get(), &held) != 0) {
      return ErrorStatus(absl::StatusCode::kResourceExhausted,
                         "TOO_MANY_DESCRIPTORS",
                         absl::StrCat("Descriptor ", fd,
                                      " cannot be duplicated: this process "
                                      "has too many open (ulimit -n)."));
    }
    memory->file.set_fd(memory->fd.get());
    memory->file.set_device(held.st_dev);
    memory->file.set_inode(held.st_ino);
    return absl::OkStatus();
  }

  std::string Name() const {
    return absl::StrCat("rank ", options_.rank, " of ", options_.model);
  }

  LeaseOptions MakeLeaseOptions() const {
    LeaseOptions lease;
    lease.what = Name();
    lease.register_timeout = options_.connect_timeout;
    lease.max_backoff = options_.max_backoff;
    lease.reconnect = options_.reconnect;
    return lease;
  }

  TrainerLease::Callbacks MakeCallbacks() {
    TrainerLease::Callbacks callbacks;
    callbacks.start = [this](grpc::ClientContext* context, auto* reactor) {
      context->set_wait_for_ready(true);
      stub_->async()->OpenSession(context, reactor);
    };
    callbacks.registration = [this] {
      v1::TrainerHeartbeat first;
      v1::TrainerIdentity* identity = first.mutable_identity();
      identity->set_model(options_.model);
      identity->set_rank(options_.rank);
      identity->set_world_size(options_.world_size);
      identity->set_pid(getpid());
      identity->set_pid_namespace(transport::PidNamespace());
      identity->set_protocol_version(kProtocolVersion);
      identity->set_client(ClientName(options_.client));
      return first;
    };
    callbacks.heartbeat = [] { return v1::TrainerHeartbeat(); };
    callbacks.accepted = [this](const v1::TrainerEvent& event,
                                LeaseTerms* terms) {
      if (!event.has_opened()) return false;
      terms->heartbeat_interval =
          FromProto(event.opened().heartbeat_interval());
      terms->heartbeat_timeout = FromProto(event.opened().heartbeat_timeout());
      terms->node = event.opened().node();
      absl::MutexLock lock(&mutex_);
      session_ = event.opened().session();
      return true;
    };
    callbacks.message = [](const v1::TrainerEvent&,
                           TrainerLease::StreamNumber) {};
    callbacks.lost = [this](const absl::Status& status) {
      absl::MutexLock lock(&mutex_);
      if (!session_.empty()) {
        LOG(WARNING) << Name() << " lost its session: " << status;
      }
      session_.clear();
      // Nobody answers them any more.
      for (grpc::ClientContext* context : running_) context->TryCancel();
    };
    callbacks.ended = [this](const absl::Status& status) {
      absl::MutexLock lock(&mutex_);
      ended_ = status;
      for (grpc::ClientContext* context : running_) context->TryCancel();
    };
    return callbacks;
  }

  static bool IsLost(const absl::Status& status) {
    const std::string reason = ErrorReason(status);
    return reason == "LEASE_LOST" || reason == "SESSION_UNKNOWN";
  }

  absl::StatusOr<MappedArena> NewArena(const std::string& session,
                                       int64_t size_bytes,
                                       absl::Time deadline) {
    v1::AllocateArenaRequest request;
    request.set_size_bytes(size_bytes);
    request.set_session(session);
    v1::AllocateArenaResponse response;
    absl::Status status =
        Call("AllocateArena", deadline, [&](grpc::ClientContext* context) {
          return stub_->AllocateArena(context, request, &response);
        });
    if (!status.ok()) return status;
    auto segment = MapOffer(&memory_, response.arena());
    if (!segment.ok()) return segment.status();
    MappedArena mapped;
    mapped.arena.arena_id = response.arena().arena_id();
    mapped.arena.data = (*segment)->data();
    mapped.arena.size_bytes = size_bytes;
    mapped.arena.warm_up = FromProto(response.warm_up());
    mapped.segment = *std::move(segment);
    mapped.session = session;
    return mapped;
  }

  absl::StatusOr<v1::RegisterShardsResponse> Register(
      const std::string& session, const std::vector<Tensor>& shards,
      absl::Time deadline) {
    v1::RegisterShardsRequest request;
    request.set_session(session);
    {
      absl::MutexLock lock(&mutex_);
      for (const MappedArena& mapped : arenas_) {
        v1::MemoryRegion* region = request.add_regions();
        region->mutable_memory()->mutable_arena()->set_arena_id(
            mapped.arena.arena_id);
        region->set_size_bytes(mapped.arena.size_bytes);
      }
      GpuRegions gpus;
      for (const Tensor& shard : shards) {
        const absl::Status status = shard.on_gpu ? gpus.Add(shard, &request)
                                                 : AddShard(shard, &request);
        if (!status.ok()) return status;
      }
      gpus_ = std::move(gpus);
    }
    v1::RegisterShardsResponse response;
    const absl::Status status =
        Call("RegisterShards", deadline, [&](grpc::ClientContext* context) {
          return stub_->RegisterShards(context, request, &response);
        });
    if (!status.ok()) return status;
    return response;
  }

  // The session, once everything that the one before it had is registered in
  // it. On the caller's thread, which writes to no tensor meanwhile.
  absl::StatusOr<std::string> Recovered(absl::Time deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(recover_mutex_) {
    while (true) {
      absl::Status status = lease_.WaitRegistered(deadline);
      if (!status.ok()) {
        const absl::Status lost = LeaseStatus();
        return lost.ok() ? status : lost;
      }
      const std::string session = this->session();
      if (session.empty()) {
        // It was lost between the two.
        if (absl::Now() >= deadline) return LeaseStatus();
        absl::SleepFor(absl::Milliseconds(5));
        continue;
      }
      if (session == recovered_) return session;
      if (!recovered_.empty()) {
        status = Recover(session, deadline);
        if (!status.ok()) {
          if (IsLost(status) && absl::Now() < deadline) continue;
          return status;
        }
        LOG(INFO) << Name() << " is registered again, in a new session";
      }
      recovered_ = session;
      return session;
    }
  }

  absl::Status Recover(const std::string& session, absl::Time deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(recover_mutex_) {
    size_t count = 0;
    {
      absl::MutexLock lock(&mutex_);
      count = arenas_.size();
    }
    for (size_t i = 0; i < count; ++i) {
      MappedArena old;
      {
        absl::MutexLock lock(&mutex_);
        old = arenas_[i];
      }
      // By an attempt before.
      if (old.session == session) continue;
      auto fresh = NewArena(session, old.arena.size_bytes, deadline);
      if (!fresh.ok()) return fresh.status();
      auto* to = dynamic_cast<transport::Arena*>(fresh->segment.get());
      auto* from = dynamic_cast<transport::Arena*>(old.segment.get());
      if (to == nullptr || from == nullptr) {
        return ErrorStatus(absl::StatusCode::kFailedPrecondition, "LEASE_LOST",
                           absl::StrCat("The memory of ", Name(),
                                        " cannot be moved into a new session; "
                                        "make a new Trainer."));
      }
      absl::Status status = to->TakePlaceOf(from);
      if (!status.ok()) return status;
      fresh->arena.data = old.arena.data;
      absl::MutexLock lock(&mutex_);
      arenas_[i] = *std::move(fresh);
    }
    if (shards_.empty()) return absl::OkStatus();
    return Register(session, shards_, deadline).status();
  }

  absl::Status GpusReady() {
    GpuRegions gpus;
    {
      absl::MutexLock lock(&mutex_);
      gpus = gpus_;
    }
    return gpus.AwaitReady();
  }

  std::string session() const {
    absl::MutexLock lock(&mutex_);
    return session_;
  }

  static bool IsSame(const v1::MemoryHandle& a, const v1::MemoryHandle& b) {
    // Two duplicates of one descriptor may be mapped at two places.
    return a.kind_case() == b.kind_case() &&
           a.posix_shm().name() == b.posix_shm().name() &&
           a.open_file().fd() == b.open_file().fd();
  }

  // The first regions of `request` are arenas_; shared memory that no shard
  // lies in is not named.
  absl::Status AddShard(const Tensor& shard,
                        v1::RegisterShardsRequest* request) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    const char* data = static_cast<const char*>(shard.data);
    const int64_t span = SpanBytes(shard);
    const auto holds = [&](const void* begin, int64_t bytes) {
      const int64_t offset = data - static_cast<const char*>(begin);
      return offset >= 0 && span <= bytes && offset <= bytes - span;
    };
    for (size_t i = 0; i < arenas_.size(); ++i) {
      const TrainerArena& arena = arenas_[i].arena;
      if (!holds(arena.data, arena.size_bytes)) continue;
      *request->add_shards() =
          ToTensorShard(shard, static_cast<int>(i), data - arena.data);
      return absl::OkStatus();
    }
    for (const KnownMemory& known : shared_) {
      const SharedMemory& memory = known.memory;
      if (!holds(memory.data, memory.size_bytes)) continue;
      v1::MemoryHandle handle;
      if (known.fd.valid()) {
        *handle.mutable_open_file() = known.file;
      } else {
        handle.mutable_posix_shm()->set_name(memory.name);
      }
      int region = static_cast<int>(arenas_.size());
      while (region < request->regions_size() &&
             !IsSame(request->regions(region).memory(), handle)) {
        ++region;
      }
      if (region == request->regions_size()) {
        v1::MemoryRegion* added = request->add_regions();
        *added->mutable_memory() = std::move(handle);
        added->set_size_bytes(memory.size_bytes);
      }
      *request->add_shards() = ToTensorShard(
          shard, region, data - static_cast<const char*>(memory.data));
      return absl::OkStatus();
    }
    return ErrorStatus(
        absl::StatusCode::kInvalidArgument, "MEMORY_OUT_OF_RANGE",
        absl::StrCat(shard.name,
                     ": its memory is none that the daemon can open; place "
                     "tensors in AllocateArena's memory, or name the shared "
                     "memory that they lie in (UseSharedMemory)."));
  }

  template <typename Fn>
  void ForgetLocked(Fn which) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    shared_.erase(std::remove_if(shared_.begin(), shared_.end(),
                                 [&](const KnownMemory& known) {
                                   return which(known.memory);
                                 }),
                  shared_.end());
  }

  absl::Status LeaseStatus() const {
    absl::MutexLock lock(&mutex_);
    return LeaseStatusLocked();
  }
  absl::Status LeaseStatusLocked() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    if (ErrorReason(ended_) == "CLOSED") return ended_;
    if (!ended_.ok()) {
      return ErrorStatus(
          absl::StatusCode::kUnavailable, "LEASE_LOST",
          absl::StrCat("The lease of ", Name(),
                       " is lost; make a new Trainer. ", ended_.message()));
    }
    if (session_.empty()) {
      return ErrorStatus(absl::StatusCode::kUnavailable, "LEASE_LOST",
                         absl::StrCat("The lease of ", Name(),
                                      " is lost; another session is being "
                                      "opened."));
    }
    return absl::OkStatus();
  }

  // Makes the call; again while the daemon is unavailable and the lease lives.
  template <typename Fn>
  absl::Status Call(absl::string_view what, absl::Time deadline, Fn call) {
    absl::Duration backoff = absl::Milliseconds(50);
    while (true) {
      absl::Status status = LeaseStatus();
      if (!status.ok()) return status;
      grpc::ClientContext context;
      PrepareContext(deadline, &context);
      {
        absl::MutexLock lock(&mutex_);
        running_.insert(&context);
        // The end of the lease may have come between the two.
        if (!LeaseStatusLocked().ok()) context.TryCancel();
      }
      status = CallStatus(what, call(&context));
      absl::MutexLock lock(&mutex_);
      running_.erase(&context);
      if (status.ok()) return status;
      if (absl::IsUnavailable(status) || absl::IsCancelled(status)) {
        // Only the lease's end, the time or the daemon ends this loop.
        mutex_.AwaitWithDeadline(
            absl::Condition(
                +[](Impl* i) ABSL_EXCLUSIVE_LOCKS_REQUIRED(i->mutex_) {
                  return !i->LeaseStatusLocked().ok();
                },
                this),
            std::min(deadline, absl::Now() + backoff));
        backoff = std::min(backoff * 2, absl::Seconds(1));
        if (!LeaseStatusLocked().ok() || absl::Now() < deadline) continue;
      }
      return status;
    }
  }

  const TrainerOptions options_;
  const std::unique_ptr<v1::TrainerService::Stub> stub_;
  const std::unique_ptr<v1::AdminService::Stub> admin_;
  // Only to map arenas.
  transport::HostMemory memory_;

  // Held while a session is brought up to what the one before it had.
  absl::Mutex recover_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  // The session in which everything is registered; empty before the first.
  std::string recovered_ ABSL_GUARDED_BY(recover_mutex_);
  std::vector<Tensor> shards_ ABSL_GUARDED_BY(recover_mutex_);

  mutable absl::Mutex mutex_;
  std::string session_ ABSL_GUARDED_BY(mutex_);
  std::vector<MappedArena> arenas_ ABSL_GUARDED_BY(mutex_);
  std::vector<KnownMemory> shared_ ABSL_GUARDED_BY(mutex_);
  // Of what is registered.
  GpuRegions gpus_ ABSL_GUARDED_BY(mutex_);
  // Not OK once the lease has ended.
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<grpc::ClientContext*> running_ ABSL_GUARDED_BY(mutex_);

  TrainerLease lease_;
};

absl::StatusOr<std::string> SharedMemoryName(int fd) {
  constexpr absl::string_view kFolder = "/dev/shm/";
  const auto unnamed = [](absl::string_view why) {
    return ErrorStatus(absl::StatusCode::kInvalidArgument, "MEMORY_UNNAMED",
                       absl::StrCat("The descriptor ", why,
                                    ": give the descriptor itself, or place "
                                    "the tensors in an arena."));
  };
  struct stat held;
  if (fstat(fd, &held) != 0) return unnamed("is not open");
  char path[PATH_MAX];
  const ssize_t length =
      readlink(absl::StrCat("/proc/self/fd/", fd).c_str(), path, sizeof(path));
  const absl::string_view link(path, std::max<ssize_t>(length, 0));
  if (!absl::StartsWith(link, kFolder) || held.st_nlink == 0) {
    return unnamed(held.st_nlink == 0 ? "is of memory without a name"
                                      : "is of no shared memory of POSIX");
  }
  const std::string name = absl::StrCat("/", absl::StripPrefix(link, kFolder));
  struct stat named;
  // Another may have taken its place.
  if (name.find('/', 1) != std::string::npos ||
      stat(std::string(link).c_str(), &named) != 0 ||
      named.st_dev != held.st_dev || named.st_ino != held.st_ino) {
    return unnamed("is of memory whose name is gone");
  }
  return name;
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Connect(
    TrainerOptions options) {
  if (options.model.empty()) {
    return ErrorStatus(absl::StatusCode::kInvalidArgument, "NAME_INVALID",
                       "A trainer needs a model.");
  }
  options.model = ModelName(options.model);
  auto channel = MakeChannel(options.address);
  if (!channel.ok()) return channel.status();
  const absl::Time deadline = absl::Now() + options.connect_timeout;
  auto impl = std::make_unique<Impl>(std::move(options), *std::move(channel));
  const absl::Status status = impl->WaitOpened(deadline + absl::Seconds(1));
  if (!status.ok()) return status;
  return std::unique_ptr<Trainer>(new Trainer(std::move(impl)));
}

Trainer::Trainer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Trainer::~Trainer() = default;

absl::StatusOr<TrainerArena> Trainer::AllocateArena(int64_t size_bytes,
                                                    absl::Duration timeout) {
  return impl_->AllocateArena(size_bytes, absl::Now() + timeout);
}
absl::StatusOr<v1::RegisterShardsResponse> Trainer::RegisterShards(
    const std::vector<Tensor>& shards, absl::Duration timeout) {
  return impl_->RegisterShards(shards, absl::Now() + timeout);
}
absl::StatusOr<PublishResult> Trainer::Publish(const PublishOptions& options) {
  return impl_->Publish(options);
}
absl::StatusOr<v1::Version> Trainer::Wait(const PublishResult& published,
                                          absl::Duration timeout) {
  return impl_->Wait(published, absl::Now() + timeout);
}
absl::StatusOr<v1::Version> Trainer::Progress(const PublishResult& published,
                                              absl::Duration timeout) {
  return impl_->Progress(published, absl::Now() + timeout);
}
absl::Status Trainer::UseSharedMemory(const SharedMemory& memory) {
  return impl_->UseSharedMemory(memory);
}
void Trainer::ForgetSharedMemory(const void* data) {
  impl_->ForgetSharedMemory(data);
}
absl::StatusOr<v1::PrepareResponse> Trainer::Prepare(absl::Duration timeout) {
  return impl_->Prepare(absl::Now() + timeout);
}
absl::Status Trainer::status() const { return impl_->status(); }
std::string Trainer::node() const { return impl_->node(); }
void Trainer::Close() { impl_->Close(); }

}  // namespace client
}  // namespace weightsync
