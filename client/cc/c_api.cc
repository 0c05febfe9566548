#include "client/cc/c_api.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cc/replica.h"
#include "client/cc/rpc.h"
#include "client/cc/served.h"
#include "client/cc/tensor.h"
#include "client/cc/trainer.h"
#include "client/cc/wire_time.h"
#include "client/cc/worker.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace client = weightsync::client;
namespace v1 = weightsync::v1;

struct weightsync_error {
  int32_t code;
  std::string reason;
  std::string message;
  std::vector<std::pair<std::string, std::string>> metadata;
};

struct weightsync_answer {
  absl::Status status;
  std::string detail;
};

struct weightsync_trainer {
  std::string name;
  std::unique_ptr<client::Trainer> object;
};
struct weightsync_worker {
  std::string name;
  std::unique_ptr<client::Worker> object;
};
struct weightsync_reader {
  client::TensorReader* object;
};
struct weightsync_replica {
  std::string name;
  std::unique_ptr<client::Replica> object;
};

namespace {

// A library in somebody else's process does not talk unless it is asked to; a
// program that has set glog up by itself keeps what it set.
void Quieten(bool asked) {
  static std::once_flag once;
  std::call_once(once, [asked] {
    if (asked || google::IsGoogleLoggingInitialized()) return;
    FLAGS_logtostderr = true;
    FLAGS_minloglevel = google::GLOG_ERROR;
  });
}

// Above any wait that somebody means, below what absl::Duration holds.
constexpr double kLongestSeconds = 1e9;

std::string Text(const char* text) { return text == nullptr ? "" : text; }

absl::Duration Seconds(double seconds, double otherwise = 0) {
  if (!(seconds > 0)) seconds = otherwise;  // NaN as well
  return absl::Seconds(std::min(seconds, kLongestSeconds));
}

// Cut at a whole character.
template <size_t size>
void Put(const std::string& text, char (&out)[size]) {
  size_t length = std::min(text.size(), size - 1);
  while (length > 0 && length < text.size() &&
         (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) {
    --length;
  }
  memcpy(out, text.data(), length);
  out[length] = '\0';
}

weightsync_error* Error(const char* call, const std::string& object,
                        const absl::Status& status) {
  if (status.ok()) return nullptr;
  auto* error = new weightsync_error;
  error->code = static_cast<int32_t>(status.code());
  error->reason = weightsync::ErrorReason(status);
  error->message = std::string(status.message());
  error->metadata.emplace_back("call", call);
  if (!object.empty()) error->metadata.emplace_back("object", object);
  return error;
}

weightsync_error* Missing(const char* call, const char* what) {
  return Error(call, "",
               weightsync::ErrorStatus(
                   absl::StatusCode::kInvalidArgument, "ARGUMENT_MISSING",
                   absl::StrCat(call, ": ", what, " must not be NULL.")));
}

// What a program of another release passed, as this one's struct.
template <typename T>
absl::Status Take(const T* given, T* taken) {
  memset(taken, 0, sizeof(T));
  if (given == nullptr) return absl::OkStatus();
  if (given->struct_size < sizeof(size_t)) {
    return weightsync::ErrorStatus(
        absl::StatusCode::kInvalidArgument, "STRUCT_SIZE_INVALID",
        "The first member of a struct of options is its size "
        "(WEIGHTSYNC_INIT).");
  }
  memcpy(static_cast<void*>(taken), given,
         std::min(given->struct_size, sizeof(T)));
  return absl::OkStatus();
}

absl::Status ToTensors(const weightsync_tensor* from, size_t count,
                       std::vector<client::Tensor>* to, bool memory = true) {
  to->reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const weightsync_tensor& tensor = from[i];
    client::Tensor made;
    made.name = Text(tensor.name);
    const auto invalid = [&](const char* reason, const char* what) {
      return weightsync::ErrorStatus(
          absl::StatusCode::kInvalidArgument, reason,
          absl::StrCat(
              made.name.empty() ? absl::StrCat("tensor ", i) : made.name, ": ",
              what));
    };
    const int dimensions = tensor.dimensions;
    if (dimensions < 0 || (dimensions > 0 && tensor.shape == nullptr)) {
      return invalid("SHAPE_INVALID", "it needs a shape.");
    }
    if (memory && tensor.data == nullptr) {
      return invalid("ARGUMENT_MISSING", "it needs memory.");
    }
    made.on_gpu = (tensor.dtype & WEIGHTSYNC_ON_GPU) != 0;
    constexpr int32_t kStored = WEIGHTSYNC_STORED_AS(0xff);
    const int32_t stored = (tensor.dtype & kStored) >> 8;
    if (!v1::DType_IsValid(stored)) {
      return invalid("DTYPE_UNKNOWN", "it is stored as no type that is known.");
    }
    made.stored_dtype = static_cast<v1::DType>(stored);
    const int32_t dtype = tensor.dtype & ~WEIGHTSYNC_ON_GPU & ~kStored;
    made.dtype = v1::DType_IsValid(dtype) ? static_cast<v1::DType>(dtype)
                                          : v1::DTYPE_UNSPECIFIED;
    made.shape.assign(tensor.shape, tensor.shape + dimensions);
    if ((tensor.offset == nullptr) != (tensor.extent == nullptr)) {
      return invalid("BOX_OUT_OF_RANGE", "a box has both offset and extent.");
    }
    if (tensor.offset != nullptr) {
      made.box.emplace();
      made.box->offset.assign(tensor.offset, tensor.offset + dimensions);
      made.box->extent.assign(tensor.extent, tensor.extent + dimensions);
    }
    if (tensor.strides != nullptr) {
      made.strides.assign(tensor.strides, tensor.strides + dimensions);
    }
    made.data = tensor.data;
    made.component = Text(tensor.component);
    to->push_back(std::move(made));
  }
  return absl::OkStatus();
}

// The daemon refuses values that it does not know, by their name.
v1::UpdateOptions ToUpdate(const weightsync_publish_options& options) {
  v1::UpdateOptions update;
  update.set_publish_mode(static_cast<v1::PublishMode>(options.publish_mode));
  update.set_update_mode(static_cast<v1::UpdateMode>(options.update_mode));
  update.set_pause_mode(static_cast<v1::PauseMode>(options.pause_mode));
  update.set_transfer_policy(
      static_cast<v1::TransferPolicy>(options.transfer_policy));
  update.set_delivery_policy(
      static_cast<v1::DeliveryPolicy>(options.delivery_policy));
  update.set_transfer_medium(
      static_cast<v1::TransferMedium>(options.transfer_medium));
  if (options.rolling_max_unavailable != 0) {
    update.mutable_commit_policy()->mutable_rolling()->set_max_unavailable(
        options.rolling_max_unavailable);
  } else if (options.on_straggler != 0) {
    update.mutable_commit_policy()->mutable_lockstep()->set_on_straggler(
        static_cast<v1::LockstepPolicy::OnStraggler>(options.on_straggler));
  }
  update.set_allow_no_recovery(options.allow_no_recovery != 0);
  update.set_verify_source(options.verify_source != 0);
  return update;
}

client::PublishResult ToResult(const weightsync_published& published) {
  client::PublishResult result;
  result.version_name = published.version_name;
  result.update_id = published.update_id;
  result.version = published.version;
  return result;
}

void Fill(const v1::Version& from, weightsync_version* to) {
  if (to == nullptr) return;
  memset(to, 0, sizeof(*to));
  Put(from.name(), to->version_name);
  Put(from.update_id(), to->update_id);
  to->version = from.version();
  to->step = from.step();
  to->state = from.state();
  to->bucket_count = from.bucket_count();
  to->total_bytes = from.total_bytes();
  to->wire_bytes = from.wire_bytes();
  to->moved_bytes = from.moved_bytes();
  to->replica_count = from.replicas_size();
  to->transfer_policy = from.transfer_policy();
  const std::pair<const char*, double*> phases[] = {
      {"gather", &to->gather},   {"snapshot", &to->snapshot},
      {"prepare", &to->prepare}, {"transfer", &to->transfer},
      {"pause", &to->pause},     {"commit", &to->commit},
      {"apply", &to->apply},     {"resume", &to->resume},
      {"total", &to->total},
  };
  for (const auto& phase : phases) {
    *phase.second = -1;
    for (const v1::PhaseTime& time : from.phases()) {
      if (time.phase() != phase.first || !time.has_measured()) continue;
      *phase.second = absl::ToDoubleSeconds(client::FromProto(time.measured()));
    }
  }
  to->failure_code = from.failure().code();
  Put(from.failure().reason(), to->failure_reason);
  Put(from.failure().message(), to->failure_message);
  to->serving_count = client::ServingCount(from);
  to->absent_count = from.absent_replicas_size();
  std::string absent;
  for (const std::string& name : from.absent_replicas()) {
    if (absent.size() + name.size() + 2 > sizeof(to->absent_replicas)) break;
    absl::StrAppend(&absent, absent.empty() ? "" : " ", name);
  }
  Put(absent, to->absent_replicas);
  Put(client::ServedText(from), to->summary);
}

}  // namespace

extern "C" {

int32_t weightsync_abi_version(void) { return WEIGHTSYNC_ABI_VERSION; }

int32_t weightsync_error_code(const weightsync_error* error) {
  return error == nullptr ? 0 : error->code;
}
const char* weightsync_error_reason(const weightsync_error* error) {
  return error == nullptr ? "" : error->reason.c_str();
}
const char* weightsync_error_message(const weightsync_error* error) {
  return error == nullptr ? "" : error->message.c_str();
}
size_t weightsync_error_metadata_count(const weightsync_error* error) {
  return error == nullptr ? 0 : error->metadata.size();
}
const char* weightsync_error_metadata_key(const weightsync_error* error,
                                          size_t index) {
  return index < weightsync_error_metadata_count(error)
             ? error->metadata[index].first.c_str()
             : "";
}
const char* weightsync_error_metadata_value(const weightsync_error* error,
                                            size_t index) {
  return index < weightsync_error_metadata_count(error)
             ? error->metadata[index].second.c_str()
             : "";
}
void weightsync_error_free(weightsync_error* error) { delete error; }

void weightsync_answer_fail(weightsync_answer* answer, int32_t code,
                            const char* reason, const char* message) {
  if (answer == nullptr) return;
  const bool known =
      code > 0 && code <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  answer->status = weightsync::ErrorStatus(
      known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
      reason == nullptr ? "HOOK_FAILED" : reason, Text(message));
}
void weightsync_answer_detail(weightsync_answer* answer, const char* detail) {
  if (answer != nullptr) answer->detail = Text(detail);
}

void weightsync_set_log_level(int32_t level) {
  Quieten(/*asked=*/true);
  FLAGS_logtostderr = true;
  FLAGS_minloglevel = std::max(0, std::min<int32_t>(level, 3));
}

void weightsync_random_id(char id[33]) {
  snprintf(id, 33, "%s", client::RandomId().c_str());
}
void weightsync_default_address(char address[256]) {
  snprintf(address, 256, "%s", client::DefaultAddress().c_str());
}

// ---- Trainers ----

weightsync_error* weightsync_trainer_open(
    const weightsync_trainer_options* options, weightsync_trainer** trainer) {
  if (options == nullptr) return Missing(__func__, "options");
  if (trainer == nullptr) return Missing(__func__, "trainer");
  weightsync_trainer_options given;
  const absl::Status status = Take(options, &given);
  if (!status.ok()) return Error(__func__, "", status);
  client::TrainerOptions made;
  made.address = Text(given.address);
  made.model = Text(given.model);
  made.rank = given.rank;
  made.world_size = given.world_size == 0 ? 1 : given.world_size;
  made.client = Text(given.client);
  made.connect_timeout = Seconds(given.connect_timeout, 20);
  made.reconnect = given.no_reconnect == 0;
  const std::string name = absl::StrCat("rank ", made.rank, " of ", made.model);
  Quieten(/*asked=*/false);
  auto opened = client::Trainer::Connect(std::move(made));
  if (!opened.ok()) return Error(__func__, name, opened.status());
  *trainer = new weightsync_trainer{name, *std::move(opened)};
  return nullptr;
}

weightsync_error* weightsync_trainer_allocate(weightsync_trainer* trainer,
                                              int64_t size_bytes,
                                              double timeout,
                                              weightsync_arena* arena) {
  if (trainer == nullptr) return Missing(__func__, "trainer");
  if (arena == nullptr) return Missing(__func__, "arena");
  const auto made =
      trainer->object->AllocateArena(size_bytes, Seconds(timeout, 120));
  if (!made.ok()) return Error(__func__, trainer->name, made.status());
  Put(made->arena_id, arena->arena_id);
  arena->data = made->data;
  arena->size_bytes = made->size_bytes;
  arena->warm_up = absl::ToDoubleSeconds(made->warm_up);
  return nullptr;
}

weightsync_error* weightsync_trainer_use_shared_memory(
    weightsync_trainer* trainer, const weightsync_shared_memory* memory) {
  if (trainer == nullptr) return Missing(__func__, "trainer");
  if (memory == nullptr) return Missing(__func__, "memory");
  weightsync_shared_memory given;
  absl::Status status = Take(memory, &given);
  if (!status.ok()) return Error(__func__, trainer->name, status);
  client::SharedMemory shared;
  shared.name = Text(given.name);
  if (given.name == nullptr) {
    // By its name where it has one: the daemon can open that from another pid
    // namespace, too.
    auto name = client::SharedMemoryName(given.fd);
    if (name.ok()) {
      shared.name = *std::move(name);
    } else {
      shared.fd = given.fd;
    }
  }
  shared.data = given.data;
  shared.size_bytes = given.size_bytes;
  return Error(__func__, trainer->name,
               trainer->object->UseSharedMemory(shared));
}

void weightsync_trainer_forget_shared_memory(weightsync_trainer* trainer,
                                             const void* data) {
  if (trainer != nullptr) trainer->object->ForgetSharedMemory(data);
}

weightsync_error* weightsync_trainer_register(
    weightsync_trainer* trainer, const weightsync_tensor* shards, size_t count,
    double timeout, weightsync_registered* registered) {
  if (trainer == nullptr) return Missing(__func__, "trainer");
  if (shards == nullptr && count > 0) return Missing(__func__, "shards");
  std::vector<client::Tensor> tensors;
  const absl::Status status = ToTensors(shards, count, &tensors);
  if (!status.ok()) return Error(__func__, trainer->name, status);
  const auto response =
      trainer->object->RegisterShards(tensors, Seconds(timeout, 60));
  if (!response.ok()) return Error(__func__, trainer->name, response.status());
  if (registered != nullptr) {
    registered->registered_rank_count = response->registered_rank_count();
    registered->world_size = response->world_size();
    registered->shard_bytes = response->shard_bytes();
  }
  return nullptr;
}

weightsync_error* weightsync_trainer_publish(
    weightsync_trainer* trainer, const weightsync_publish_options* options,
    weightsync_published* published) {
  if (trainer == nullptr) return Missing(__func__, "trainer");
  if (published == nullptr) return Missing(__func__, "published");
  weightsync_publish_options given;
  const absl::Status status = Take(options, &given);
  if (!status.ok()) return Error(__func__, trainer->name, status);
  client::PublishOptions made;
  made.version = given.version;
  made.step = given.step;
  made.request_id = Text(given.request_id);
  made.timeout = Seconds(given.timeout, 150);
  made.update = ToUpdate(given);
  const auto result = trainer->object->Publish(made);
  if (!result.ok()) return Error(__func__, trainer->name, result.status());
  Put(result->version_name, published->version_name);
  Put(result->update_id, published->update_id);
  published->version = result->version;
  published->copied_bytes = result->copied_bytes;
  published->copy_duration = absl::ToDoubleSeconds(result->copy_duration);
  published->stall = absl::ToDoubleSeconds(result->stall);
  return nullptr;
}

weightsync_error* weightsync_trainer_wait(weightsync_trainer* trainer,
                                          const weightsync_published* published,
                                          double timeout,
                                          weightsync_version* version) {
  if (trainer == nullptr) return Missing(__func__, "trainer");
  if (published == nullptr) return Missing(__func__, "published");
  const auto found =
      trainer->object->Wait(ToResult(*published), Seconds(timeout));
  if (!found.ok()) return Error(__func__, trainer->name, found.status());
  Fill(*found, version);
  return nullptr;
}

weightsync_error* weightsync_trainer_progress(
    weightsync_trainer* trainer, const weightsync_published* published,
    double timeout, weightsync_version* version) {
  if (trainer == nullptr) return Missing(__func__, "trainer");
  if (published == nullptr) return Missing(__func__, "published");
  if (version == nullptr) return Missing(__func__, "version");
  const auto found =
      trainer->object->Progress(ToResult(*published), Seconds(timeout, 10));
  if (!found.ok()) return Error(__func__, trainer->name, found.status());
  Fill(*found, version);
  return nullptr;
}

weightsync_error* weightsync_trainer_prepare(weightsync_trainer* trainer,
                                             double timeout,
                                             weightsync_prepared* prepared) {
  if (trainer == nullptr) return Missing(__func__, "trainer");
  const auto response = trainer->object->Prepare(Seconds(timeout, 60));
  if (!response.ok()) return Error(__func__, trainer->name, response.status());
  if (prepared != nullptr) {
    Put(response->layout_id(), prepared->layout_id);
    prepared->bucket_count = response->bucket_count();
    prepared->wire_bytes = response->wire_bytes();
    prepared->prepare_duration =
        absl::ToDoubleSeconds(client::FromProto(response->prepare_duration()));
  }
  return nullptr;
}

weightsync_error* weightsync_trainer_status(const weightsync_trainer* trainer) {
  if (trainer == nullptr) return Missing(__func__, "trainer");
  return Error(__func__, trainer->name, trainer->object->status());
}

void weightsync_trainer_node(const weightsync_trainer* trainer,
                             char node[128]) {
  snprintf(node, 128, "%s",
           trainer == nullptr ? "" : trainer->object->node().c_str());
}

void weightsync_trainer_close(weightsync_trainer* trainer) {
  if (trainer != nullptr) trainer->object->Close();
}
void weightsync_trainer_free(weightsync_trainer* trainer) { delete trainer; }

// ---- Workers ----

weightsync_error* weightsync_reader_read(weightsync_reader* reader,
                                         int32_t tensor, void* data,
                                         int64_t size_bytes) {
  if (reader == nullptr) return Missing(__func__, "reader");
  return Error(__func__, "", reader->object->Read(tensor, data, size_bytes));
}

weightsync_error* weightsync_worker_start(
    const weightsync_worker_options* options, const weightsync_tensor* tensors,
    const weightsync_tensor* spare, size_t count, weightsync_worker** worker) {
  if (options == nullptr) return Missing(__func__, "options");
  if (tensors == nullptr && count > 0) return Missing(__func__, "tensors");
  if (worker == nullptr) return Missing(__func__, "worker");
  weightsync_worker_options given;
  absl::Status status = Take(options, &given);
  std::vector<client::Tensor> sets[2];
  if (status.ok()) {
    status = ToTensors(tensors, count, &sets[0],
                       /*memory=*/given.take == nullptr);
  }
  if (status.ok() && spare != nullptr) {
    status = ToTensors(spare, count, &sets[1]);
  }
  if (!status.ok()) return Error(__func__, "", status);
  client::WorkerOptions made;
  made.address = Text(given.address);
  made.model = Text(given.model);
  made.replica = Text(given.replica);
  made.incarnation = Text(given.incarnation);
  made.worker_index = given.worker_index;
  made.worker_count = given.worker_count == 0 ? 1 : given.worker_count;
  made.client = Text(given.client);
  made.copy_threads = given.copy_threads;
  if (given.installed != nullptr) {
    made.installed.set_state(
        static_cast<v1::InstalledState::State>(given.installed->state));
    made.installed.set_update_id(given.installed->update_id);
    made.installed.set_version(given.installed->version);
  }
  void* const user = given.user;
  if (given.may_write != nullptr) {
    made.may_write = [user, call = given.may_write] {
      weightsync_answer answer;
      call(user, &answer);
      return answer.status;
    };
  }
  if (given.load != nullptr) {
    made.load = [user, call = given.load](const std::string& update_id,
                                          int64_t version) {
      weightsync_answer answer;
      call(user, update_id.c_str(), version, &answer);
      return answer.status;
    };
  }
  if (given.take != nullptr) {
    made.take = [user, call = given.take](client::TensorReader* reader) {
      weightsync_reader handle{reader};
      weightsync_take take;
      take.update_id = reader->update_id().c_str();
      take.version = reader->version();
      take.first = reader->first();
      take.last = reader->last();
      take.tensors = reader->tensors().data();
      take.tensor_count = reader->tensors().size();
      take.reader = &handle;
      weightsync_answer answer;
      call(user, &take, &answer);
      return answer.status;
    };
  }
  if (given.on_remove != nullptr) {
    made.on_remove = [user, call = given.on_remove] {
      weightsync_answer answer;
      call(user, &answer);
      return answer.status;
    };
  }
  if (given.swap != nullptr) {
    made.swap = [user, call = given.swap](int set,
                                          const std::string& update_id) {
      weightsync_answer answer;
      call(user, set, update_id.c_str(), &answer);
      return answer.status;
    };
  }
  if (given.on_writing != nullptr) {
    made.on_writing = [user,
                       call = given.on_writing](const std::string& update_id) {
      call(user, update_id.c_str());
    };
  }
  if (given.on_applied != nullptr) {
    made.on_applied =
        [user, call = given.on_applied](const client::AppliedInfo& info) {
          const std::string reason = weightsync::ErrorReason(info.status);
          const std::string message(info.status.message());
          weightsync_applied applied;
          applied.update_id = info.update_id.c_str();
          applied.version = info.version;
          applied.step = info.step;
          applied.copied_bytes = info.copied_bytes;
          applied.copy_duration = absl::ToDoubleSeconds(info.copy_duration);
          applied.code = static_cast<int32_t>(info.status.code());
          applied.reason = reason.c_str();
          applied.message = message.c_str();
          call(user, &applied);
        };
  }
  made.register_timeout = Seconds(given.register_timeout, 20);
  made.max_backoff = Seconds(given.max_backoff, 5);
  const std::string name =
      absl::StrCat("worker ", made.worker_index, " of replica ", made.replica,
                   " of ", made.model);
  Quieten(/*asked=*/false);
  auto started = client::Worker::Start(std::move(made), std::move(sets[0]),
                                       std::move(sets[1]));
  if (!started.ok()) return Error(__func__, name, started.status());
  *worker = new weightsync_worker{name, *std::move(started)};
  return nullptr;
}

weightsync_error* weightsync_worker_wait_registered(weightsync_worker* worker,
                                                    double timeout) {
  if (worker == nullptr) return Missing(__func__, "worker");
  return Error(__func__, worker->name,
               worker->object->WaitRegistered(Seconds(timeout)));
}

void weightsync_worker_installed(const weightsync_worker* worker,
                                 weightsync_installed* installed) {
  if (installed == nullptr) return;
  memset(installed, 0, sizeof(*installed));
  if (worker == nullptr) return;
  const v1::InstalledState state = worker->object->installed();
  installed->state = state.state();
  Put(state.update_id(), installed->update_id);
  installed->version = state.version();
}

weightsync_error* weightsync_worker_wait_installed(weightsync_worker* worker,
                                                   int64_t version,
                                                   double timeout) {
  if (worker == nullptr) return Missing(__func__, "worker");
  return Error(__func__, worker->name,
               worker->object->WaitInstalled(version, Seconds(timeout)));
}

weightsync_error* weightsync_worker_mark_dropped(weightsync_worker* worker) {
  if (worker == nullptr) return Missing(__func__, "worker");
  return Error(__func__, worker->name, worker->object->MarkDropped());
}
weightsync_error* weightsync_worker_sleep(weightsync_worker* worker,
                                          double timeout) {
  if (worker == nullptr) return Missing(__func__, "worker");
  return Error(__func__, worker->name, worker->object->Sleep(Seconds(timeout)));
}
weightsync_error* weightsync_worker_wake(weightsync_worker* worker) {
  if (worker == nullptr) return Missing(__func__, "worker");
  return Error(__func__, worker->name, worker->object->Wake());
}
weightsync_error* weightsync_worker_status(const weightsync_worker* worker) {
  if (worker == nullptr) return Missing(__func__, "worker");
  return Error(__func__, worker->name, worker->object->status());
}
int32_t weightsync_worker_ended(const weightsync_worker* worker) {
  return worker == nullptr || worker->object->ended();
}
void weightsync_worker_close(weightsync_worker* worker) {
  if (worker != nullptr) worker->object->Close();
}
void weightsync_worker_free(weightsync_worker* worker) { delete worker; }

// ---- Replicas ----

weightsync_error* weightsync_replica_start(
    const weightsync_replica_options* options, weightsync_replica** replica) {
  if (options == nullptr) return Missing(__func__, "options");
  if (replica == nullptr) return Missing(__func__, "replica");
  weightsync_replica_options given;
  const absl::Status status = Take(options, &given);
  if (!status.ok()) return Error(__func__, "", status);
  client::ReplicaOptions made;
  made.address = Text(given.address);
  made.model = Text(given.model);
  made.replica = Text(given.replica);
  made.incarnation = Text(given.incarnation);
  made.worker_count = given.worker_count == 0 ? 1 : given.worker_count;
  made.client = Text(given.client);
  made.partial = given.partial != 0;
  made.atomic_swap = given.atomic_swap != 0;
  made.paused = given.paused != 0;
  made.removable = given.removable != 0;
  made.register_timeout = Seconds(given.register_timeout, 20);
  made.max_backoff = Seconds(given.max_backoff, 5);
  void* const user = given.user;
  client::ReplicaHooks hooks;
  if (given.on_pause != nullptr) {
    hooks.on_pause =
        [user, call = given.on_pause](const client::PauseRequest& request)
        -> absl::StatusOr<std::string> {
      weightsync_pause pause;
      pause.update_id = request.update_id.c_str();
      pause.version = request.version;
      pause.mode = request.mode;
      pause.timeout =
          std::max(0.0, absl::ToDoubleSeconds(request.deadline - absl::Now()));
      weightsync_answer answer;
      call(user, &pause, &answer);
      if (!answer.status.ok()) return answer.status;
      return answer.detail;
    };
  }
  if (given.on_resume != nullptr) {
    hooks.on_resume = [user, call = given.on_resume](
                          const client::ResumeInfo& info) -> absl::Status {
      weightsync_resume resume;
      resume.update_id = info.update_id.c_str();
      resume.version = info.version;
      resume.step = info.step;
      resume.weights_changed = info.weights_changed;
      resume.mode = info.mode;
      resume.removed = info.removed;
      weightsync_answer answer;
      call(user, &resume, &answer);
      return answer.status;
    };
  }
  const std::string name =
      absl::StrCat("replica ", made.replica, " of ", made.model);
  Quieten(/*asked=*/false);
  auto started = client::Replica::Start(std::move(made), std::move(hooks));
  if (!started.ok()) return Error(__func__, name, started.status());
  *replica = new weightsync_replica{name, *std::move(started)};
  return nullptr;
}

weightsync_error* weightsync_replica_wait_registered(
    weightsync_replica* replica, double timeout) {
  if (replica == nullptr) return Missing(__func__, "replica");
  return Error(__func__, replica->name,
               replica->object->WaitRegistered(Seconds(timeout)));
}
int32_t weightsync_replica_paused(const weightsync_replica* replica) {
  return replica != nullptr && replica->object->paused();
}
weightsync_error* weightsync_replica_status(const weightsync_replica* replica) {
  if (replica == nullptr) return Missing(__func__, "replica");
  return Error(__func__, replica->name, replica->object->status());
}
int32_t weightsync_replica_ended(const weightsync_replica* replica) {
  return replica == nullptr || replica->object->ended();
}
void weightsync_replica_close(weightsync_replica* replica) {
  if (replica != nullptr) replica->object->Close();
}
void weightsync_replica_free(weightsync_replica* replica) { delete replica; }

}  // extern "C"
