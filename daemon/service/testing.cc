#include "daemon/service/testing.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/service/validate.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace testing {
namespace {

constexpr absl::Duration kBeat = absl::Milliseconds(100);

bool Closed(absl::optional<absl::Status>* closed) {
  return closed->has_value();
}

int64_t Rows(const v1::Parameter& parameter) {
  return parameter.shape_size() == 0 ? 1 : parameter.shape(0);
}

}  // namespace

Options TestOptions(const std::string& directory, const std::string& node,
                    const std::string& coordinator_address) {
  Options options;
  options.node = node;
  options.listen = {"127.0.0.1:0"};
  options.unix_socket = absl::StrCat(directory, "/", node, "/d.sock");
  options.state_dir = absl::StrCat(directory, "/", node, "/state");
  options.coordinator_address = coordinator_address;
  options.store_budget_bytes = 256 << 20;
  options.bucket_bytes = 16 << 10;
  options.copy_threads = 2;
  options.deadlines.heartbeat_interval = absl::Milliseconds(200);
  // A loaded machine may hold any thread up for seconds.
  options.deadlines.heartbeat = absl::Seconds(20);
  options.deadlines.shutdown = absl::Seconds(2);
  return options;
}

TempDir::TempDir() {
  char path[] = "/tmp/wsXXXXXX";
  CHECK(mkdtemp(path) != nullptr);
  path_ = path;
}

TempDir::~TempDir() { std::filesystem::remove_all(path_); }

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(),
                                   arguments);
}

void SetDeadline(grpc::ClientContext* context, absl::Duration timeout) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
}

std::vector<v1::Parameter> TestModel() {
  struct Entry {
    const char* name;
    v1::DType dtype;
    std::vector<int64_t> shape;
  };
  const Entry entries[] = {
      {"embed.weight", v1::DTYPE_BF16, {64, 48}},
      {"layers.0.up.weight", v1::DTYPE_F32, {130, 20}},
      {"layers.0.up.scale", v1::DTYPE_F8_E4M3, {37}},
      {"layers.0.count", v1::DTYPE_I64, {}},
      {"layers.1.up.weight", v1::DTYPE_BF16, {3, 100, 4}},
  };
  std::vector<v1::Parameter> model;
  for (const Entry& entry : entries) {
    v1::Parameter parameter;
    parameter.set_name(entry.name);
    parameter.set_dtype(entry.dtype);
    for (int64_t dimension : entry.shape) parameter.add_shape(dimension);
    model.push_back(parameter);
  }
  return model;
}

int64_t BytesOfParameter(const v1::Parameter& parameter) {
  return ParameterBytes(parameter);
}

std::string ParameterBytesOf(const v1::Parameter& parameter, uint64_t seed) {
  uint64_t state = seed * 0x9E3779B97F4A7C15u;
  for (char c : parameter.name())
    state = (state ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  std::string bytes(BytesOfParameter(parameter), '\0');
  for (char& byte : bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<char>(state >> 56);
  }
  return bytes;
}

// ---- RawTrainer ----

RawTrainer::RawTrainer(std::shared_ptr<grpc::Channel> channel, int rank,
                       int world_size, const std::string& model)
    : rank_(rank),
      world_size_(world_size),
      model_(model),
      pid_(getpid()),
      stub_(v1::TrainerService::NewStub(std::move(channel))) {}

RawTrainer::~RawTrainer() { Close().IgnoreError(); }

absl::Status RawTrainer::Open() {
  stream_ = stub_->OpenSession(&context_);
  v1::TrainerHeartbeat first;
  v1::TrainerIdentity* identity = first.mutable_identity();
  identity->set_model(model_);
  identity->set_rank(rank_);
  identity->set_world_size(world_size_);
  identity->set_pid(pid_);
  identity->set_pid_namespace(pid_namespace_);
  identity->set_protocol_version(1);
  identity->set_client("raw trainer");
  v1::TrainerEvent event;
  if (!stream_->Write(first) || !stream_->Read(&event)) {
    absl::MutexLock lock(&mutex_);
    closed_ = FromGrpcStatus(stream_->Finish());
    return *closed_;
  }
  session_ = event.opened().session();
  heart_ = std::thread([this] { Beat(); });
  reader_ = std::thread([this] {
    v1::TrainerEvent next;
    while (stream_->Read(&next)) {
    }
    const absl::Status status = FromGrpcStatus(stream_->Finish());
    absl::MutexLock lock(&mutex_);
    closed_ = status;
  });
  return absl::OkStatus();
}

void RawTrainer::Beat() {
  absl::MutexLock lock(&mutex_);
  while (!mutex_.AwaitWithTimeout(absl::Condition(&stopping_), kBeat)) {
    if (silent_ || closed_.has_value()) continue;
    mutex_.Unlock();
    const bool ok = stream_->Write(v1::TrainerHeartbeat());
    mutex_.Lock();
    if (!ok) return;
  }
}

absl::StatusOr<v1::ArenaOffer> RawTrainer::Allocate(int64_t bytes,
                                                    absl::Duration timeout) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  v1::AllocateArenaRequest request;
  request.set_session(session_);
  request.set_size_bytes(bytes);
  v1::AllocateArenaResponse response;
  const grpc::Status status =
      stub_->AllocateArena(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response.arena();
}

absl::Status RawTrainer::Map(const v1::ArenaOffer& offer) {
  transport::MemoryTicket ticket;
  ticket.bytes = offer.size_bytes() - offer.data_offset_bytes();
  ticket.read_only = offer.read_only();
  ticket.address = offer.descriptor_socket();
  ticket.token = offer.token();
  auto segment = memory_.Import(ticket, kDeadline);
  if (!segment.ok()) return segment.status();
  segment_ = *std::move(segment);
  return absl::OkStatus();
}

absl::StatusOr<v1::RegisterShardsRequest> RawTrainer::MakeShards(
    const std::vector<v1::Parameter>& model) {
  v1::RegisterShardsRequest request;
  request.set_session(session_);
  placed_.clear();
  int64_t end = 0;
  for (const v1::Parameter& parameter : model) {
    const int64_t rows = Rows(parameter);
    const int64_t each = (rows + world_size_ - 1) / world_size_;
    const int64_t first = std::min(rows, rank_ * each);
    const int64_t last = std::min(rows, first + each);
    if (first == last) continue;
    const int64_t row_bytes = BytesOfParameter(parameter) / rows;
    end = (end + 63) / 64 * 64;
    placed_.push_back({parameter, first * row_bytes, last * row_bytes, end});
    v1::TensorShard* shard = request.add_shards();
    *shard->mutable_parameter() = parameter;
    shard->set_offset_bytes(end);
    if (parameter.shape_size() > 0 && last - first < rows) {
      v1::Box* box = shard->mutable_box();
      for (int d = 0; d < parameter.shape_size(); ++d) {
        box->add_offset(d == 0 ? first : 0);
        box->add_extent(d == 0 ? last - first : parameter.shape(d));
      }
    }
    end += (last - first) * row_bytes;
  }
  const absl::StatusOr<v1::ArenaOffer> offer =
      Allocate(std::max<int64_t>(end, 1));
  if (!offer.ok()) return offer.status();
  const absl::Status mapped = Map(*offer);
  if (!mapped.ok()) return mapped;
  v1::MemoryRegion* region = request.add_regions();
  region->mutable_memory()->mutable_arena()->set_arena_id(offer->arena_id());
  region->set_size_bytes(std::max<int64_t>(end, 1));
  return request;
}

absl::StatusOr<v1::RegisterShardsResponse> RawTrainer::Register(
    const v1::RegisterShardsRequest& request) {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::RegisterShardsResponse response;
  const grpc::Status status =
      stub_->RegisterShards(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response;
}

absl::Status RawTrainer::SetUp(const std::vector<v1::Parameter>& model) {
  const absl::Status opened = Open();
  if (!opened.ok()) return opened;
  const absl::StatusOr<v1::RegisterShardsRequest> shards = MakeShards(model);
  if (!shards.ok()) return shards.status();
  return Register(*shards).status();
}

void RawTrainer::Fill(uint64_t seed) {
  for (const Placed& placed : placed_) {
    const std::string bytes = ParameterBytesOf(placed.parameter, seed);
    memcpy(segment_->data() + placed.offset, bytes.data() + placed.begin_byte,
           placed.end_byte - placed.begin_byte);
  }
}

absl::StatusOr<v1::PublishVersionResponse> RawTrainer::Publish(
    const v1::PublishVersionRequest& request, absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(&context, timeout);
  v1::PublishVersionResponse response;
  const grpc::Status status =
      stub_->PublishVersion(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response;
}

absl::StatusOr<v1::PublishVersionResponse> RawTrainer::Publish(
    int64_t version) {
  v1::PublishVersionRequest request;
  request.set_session(session_);
  request.set_version(version);
  return Publish(request);
}

absl::StatusOr<v1::Version> RawTrainer::Wait(const std::string& name,
                                             const std::string& update_id,
                                             absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::WaitVersionRequest request;
  request.set_name(name);
  request.set_update_id(update_id);
  request.mutable_timeout()->set_seconds(absl::ToInt64Seconds(timeout));
  request.mutable_timeout()->set_nanos(absl::ToInt64Nanoseconds(
      timeout - absl::Seconds(absl::ToInt64Seconds(timeout))));
  v1::Version version;
  const grpc::Status status = stub_->WaitVersion(&context, request, &version);
  if (!status.ok()) return FromGrpcStatus(status);
  return version;
}

void RawTrainer::StopHeartbeats() {
  absl::MutexLock lock(&mutex_);
  silent_ = true;
}

absl::Status RawTrainer::WaitClosed() {
  absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithTimeout(absl::Condition(&Closed, &closed_), kDeadline)) {
    return absl::DeadlineExceededError("the stream did not end");
  }
  return *closed_;
}

absl::Status RawTrainer::Close() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (heart_.joinable()) heart_.join();
  if (reader_.joinable()) {
    stream_->WritesDone();
    const absl::Status status = WaitClosed();
    context_.TryCancel();
    reader_.join();
    return status;
  }
  absl::MutexLock lock(&mutex_);
  return closed_.value_or(absl::OkStatus());
}

// ---- RawReplica ----

RawReplica::RawReplica(std::shared_ptr<grpc::Channel> channel,
                       v1::RegisterReplica registration)
    : registration_(std::move(registration)),
      stub_(v1::ReplicaService::NewStub(std::move(channel))) {}

RawReplica::~RawReplica() { Close(); }

absl::Status RawReplica::Open() {
  stream_ = stub_->ControlReplica(&context_);
  v1::ReplicaReport first;
  *first.mutable_register_() = registration_;
  stream_->Write(first);
  reader_ = std::thread([this] { Run(); });
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(
      absl::Condition(
          +[](RawReplica* self) ABSL_EXCLUSIVE_LOCKS_REQUIRED(self->mutex_) {
            return self->registered_ || self->closed_.has_value();
          },
          this),
      kDeadline);
  if (registered_) return absl::OkStatus();
  return closed_.value_or(absl::DeadlineExceededError("no answer"));
}

void RawReplica::Run() {
  v1::ReplicaCommand command;
  while (stream_->Read(&command)) {
    v1::ReplicaReport report;
    if (command.has_registered()) {
      absl::MutexLock lock(&mutex_);
      registered_ = true;
      heart_ = std::thread([this] {
        absl::MutexLock beat(&mutex_);
        while (!mutex_.AwaitWithTimeout(absl::Condition(&stopping_), kBeat)) {
          v1::ReplicaReport heartbeat;
          heartbeat.mutable_heartbeat();
          if (!stream_->Write(heartbeat)) return;
        }
      });
    } else if (command.has_pause()) {
      absl::MutexLock lock(&mutex_);
      ++pauses_;
      report.mutable_paused()->set_command_id(command.pause().command_id());
      if (pause_failure_.ok()) {
        paused_ = true;
      } else {
        *report.mutable_paused()->mutable_failure() = ToFailure(pause_failure_);
      }
      stream_->Write(report);
    } else if (command.has_resume()) {
      absl::MutexLock lock(&mutex_);
      paused_ = false;
      last_resume_ = command.resume();
      report.mutable_resumed()->set_command_id(command.resume().command_id());
      stream_->Write(report);
    }
  }
  const absl::Status status = FromGrpcStatus(stream_->Finish());
  absl::MutexLock lock(&mutex_);
  closed_ = status;
}

absl::Status RawReplica::WaitClosed() {
  absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithTimeout(absl::Condition(&Closed, &closed_), kDeadline)) {
    return absl::DeadlineExceededError("the stream did not end");
  }
  return *closed_;
}

void RawReplica::Close() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  context_.TryCancel();
  if (reader_.joinable()) reader_.join();
  if (heart_.joinable()) heart_.join();
}

bool RawReplica::paused() {
  absl::MutexLock lock(&mutex_);
  return paused_;
}

int RawReplica::pauses() {
  absl::MutexLock lock(&mutex_);
  return pauses_;
}

v1::ResumeReplica RawReplica::last_resume() {
  absl::MutexLock lock(&mutex_);
  return last_resume_;
}

void RawReplica::FailPauses(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  pause_failure_ = why;
}

// ---- RawWorker ----

RawWorker::RawWorker(std::shared_ptr<grpc::Channel> channel,
                     v1::RegisterWorker registration)
    : registration_(std::move(registration)),
      stub_(v1::ReplicaService::NewStub(std::move(channel))),
      installed_(registration_.installed()) {
  for (const v1::WantedTensor& tensor : registration_.tensors()) {
    int64_t bytes = BytesOf(tensor.dtype());
    for (int64_t extent :
         tensor.has_box() ? tensor.box().extent() : tensor.shape()) {
      bytes *= extent;
    }
    live_.push_back(std::string(std::max<int64_t>(bytes, 0), '\xEE'));
  }
}

RawWorker::~RawWorker() { Close(); }

void RawWorker::Write(const v1::WorkerReport& report) {
  absl::MutexLock lock(&write_mutex_);
  stream_->Write(report);
}

absl::Status RawWorker::Open() {
  stream_ = stub_->RunWorker(&context_);
  v1::WorkerReport first;
  *first.mutable_register_() = registration_;
  Write(first);
  reader_ = std::thread([this] { Run(); });
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(
      absl::Condition(
          +[](RawWorker* self) ABSL_EXCLUSIVE_LOCKS_REQUIRED(self->mutex_) {
            return self->registered_ || self->closed_.has_value();
          },
          this),
      kDeadline);
  if (registered_) return absl::OkStatus();
  return closed_.value_or(absl::DeadlineExceededError("no answer"));
}

void RawWorker::Run() {
  v1::WorkerCommand command;
  while (stream_->Read(&command)) {
    switch (command.command_case()) {
      case v1::WorkerCommand::kRegistered: {
        absl::MutexLock lock(&mutex_);
        registered_ = true;
        heart_ = std::thread([this] {
          absl::MutexLock beat(&mutex_);
          while (!mutex_.AwaitWithTimeout(absl::Condition(&stopping_), kBeat)) {
            v1::WorkerReport heartbeat;
            heartbeat.mutable_heartbeat();
            mutex_.Unlock();
            Write(heartbeat);
            mutex_.Lock();
          }
        });
        break;
      }
      case v1::WorkerCommand::kArena: {
        const v1::ArenaOffer& offer = command.arena();
        transport::MemoryTicket ticket;
        ticket.bytes = offer.size_bytes() - offer.data_offset_bytes();
        ticket.read_only = offer.read_only();
        ticket.address = offer.descriptor_socket();
        ticket.token = offer.token();
        auto segment = memory_.Import(ticket, kDeadline);
        CHECK(segment.ok()) << segment.status();
        arenas_[offer.arena_id()] = *std::move(segment);
        break;
      }
      case v1::WorkerCommand::kCopyPlan:
        plans_[command.copy_plan().layout_id()] = command.copy_plan();
        break;
      case v1::WorkerCommand::kApply:
        Apply(command.apply());
        break;
      case v1::WorkerCommand::kDropArenaId:
        arenas_.erase(command.drop_arena_id());
        break;
      default:
        break;
    }
  }
  const absl::Status status = FromGrpcStatus(stream_->Finish());
  absl::MutexLock lock(&mutex_);
  closed_ = status;
}

void RawWorker::Apply(const v1::ApplyUpdate& apply) {
  v1::WorkerReport writing;
  writing.mutable_writing()->set_update_id(apply.update_id());
  {
    absl::MutexLock lock(&mutex_);
    ++applies_;
    if (ignore_applies_) return;
    installed_.set_state(v1::InstalledState::STATE_WRITING);
    installed_.set_update_id(apply.update_id());
  }
  Write(writing);
  std::map<int, const v1::SlotLocation*> slots;
  for (const v1::BucketLocation& bucket : apply.buckets())
    slots[bucket.bucket()] = &bucket.slot();
  v1::WorkerReport report;
  {
    absl::MutexLock lock(&mutex_);
    int64_t copied = 0;
    for (const v1::BucketCopies& bucket :
         plans_.at(apply.layout_id()).buckets()) {
      const v1::SlotLocation& slot = *slots.at(bucket.bucket());
      const transport::Segment& arena = *arenas_.at(slot.arena_id());
      CHECK_EQ(arena.Generation(slot.generation_slot()), slot.generation());
      for (const v1::TensorCopy& copy : bucket.copies()) {
        std::vector<int64_t> index(copy.extents_size(), 0);
        for (bool more = true; more;) {
          int64_t from = copy.bucket_offset_bytes(),
                  to = copy.tensor_offset_bytes();
          for (size_t d = 0; d < index.size(); ++d) {
            from += index[d] * copy.bucket_strides_bytes(d);
            to += index[d] * copy.tensor_strides_bytes(d);
          }
          CHECK_LE(from + copy.run_bytes(), slot.size_bytes());
          CHECK_LE(to + copy.run_bytes(),
                   static_cast<int64_t>(live_[copy.tensor()].size()));
          memcpy(&live_[copy.tensor()][to],
                 arena.data() + slot.offset_bytes() + from, copy.run_bytes());
          copied += copy.run_bytes();
          more = false;
          for (int d = static_cast<int>(index.size()) - 1; d >= 0 && !more;
               --d) {
            more = ++index[d] < copy.extents(d);
            if (!more) index[d] = 0;
          }
        }
      }
    }
    installed_.set_state(v1::InstalledState::STATE_INSTALLED);
    installed_.set_version(apply.version());
    v1::WorkerApplied* applied = report.mutable_applied();
    applied->set_update_id(apply.update_id());
    applied->set_command_id(apply.command_id());
    applied->set_copied_bytes(copied);
    *applied->mutable_installed() = installed_;
  }
  Write(report);
}

absl::Status RawWorker::WaitClosed() {
  absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithTimeout(absl::Condition(&Closed, &closed_), kDeadline)) {
    return absl::DeadlineExceededError("the stream did not end");
  }
  return *closed_;
}

void RawWorker::Close() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  context_.TryCancel();
  if (reader_.joinable()) reader_.join();
  if (heart_.joinable()) heart_.join();
}

std::string RawWorker::Live(int tensor) {
  absl::MutexLock lock(&mutex_);
  return live_[tensor];
}

v1::InstalledState RawWorker::installed() {
  absl::MutexLock lock(&mutex_);
  return installed_;
}

int RawWorker::applies() {
  absl::MutexLock lock(&mutex_);
  return applies_;
}

void RawWorker::IgnoreApplies() {
  absl::MutexLock lock(&mutex_);
  ignore_applies_ = true;
}

// ---- Registrations ----

v1::RegisterReplica ReplicaOf(const std::string& replica, int worker_count,
                              const std::string& model) {
  v1::RegisterReplica registration;
  registration.set_model(model);
  registration.set_replica(replica);
  registration.set_worker_count(worker_count);
  registration.set_pid(getpid());
  registration.set_protocol_version(1);
  registration.set_client("raw replica");
  registration.set_incarnation("incarnation-" + replica);
  return registration;
}

v1::RegisterWorker WorkerOf(const std::string& replica,
                            const std::vector<v1::Parameter>& wanted, int index,
                            int count, const std::string& model) {
  v1::RegisterWorker registration;
  registration.set_model(model);
  registration.set_replica(replica);
  registration.set_worker_index(index);
  registration.set_worker_count(count);
  registration.set_pid(getpid());
  registration.set_protocol_version(1);
  registration.set_client("raw worker");
  registration.set_incarnation("incarnation-" + replica);
  for (const v1::Parameter& parameter : wanted) {
    v1::WantedTensor* tensor = registration.add_tensors();
    tensor->set_name(parameter.name());
    tensor->set_dtype(parameter.dtype());
    *tensor->mutable_shape() = parameter.shape();
    if (count > 1 && Rows(parameter) % count == 0) {
      const int64_t rows = Rows(parameter) / count;
      for (int d = 0; d < parameter.shape_size(); ++d) {
        tensor->mutable_box()->add_offset(d == 0 ? index * rows : 0);
        tensor->mutable_box()->add_extent(d == 0 ? rows : parameter.shape(d));
      }
    }
  }
  return registration;
}

std::string Expected(const v1::WantedTensor& wanted, uint64_t seed) {
  v1::Parameter parameter;
  parameter.set_name(wanted.name());
  parameter.set_dtype(wanted.dtype());
  *parameter.mutable_shape() = wanted.shape();
  const std::string bytes = ParameterBytesOf(parameter, seed);
  if (!wanted.has_box()) return bytes;
  // Boxes of rows only.
  const int64_t row_bytes =
      static_cast<int64_t>(bytes.size()) / wanted.shape(0);
  return bytes.substr(wanted.box().offset(0) * row_bytes,
                      wanted.box().extent(0) * row_bytes);
}

}  // namespace testing
}  // namespace daemon
}  // namespace weightsync
