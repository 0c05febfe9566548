#include "client/cc/c_api.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cc/fake_daemon.h"
#include "client/cc/rpc.h"
#include "proto/status.h"
#include "transport/host/fd_socket.h"
#include "transport/host/host_memory.h"

extern "C" size_t weightsync_test_size_of_options(void);

namespace weightsync {
namespace client {
namespace {

constexpr int64_t kBytes = 1000;

// Takes the error.
std::string ReasonOf(weightsync_error* error) {
  const std::string reason = weightsync_error_reason(error);
  weightsync_error_free(error);
  return reason;
}

std::string Describe(weightsync_error* error) {
  const std::string text = absl::StrCat(weightsync_error_reason(error), ": ",
                                        weightsync_error_message(error));
  weightsync_error_free(error);
  return text;
}

#define ASSERT_NO_ERROR(call)                       \
  do {                                              \
    weightsync_error* error_ = (call);              \
    ASSERT_EQ(error_, nullptr) << Describe(error_); \
  } while (false)

class CApiTest : public ::testing::Test {
 protected:
  CApiTest()
      : directory_(MakeDirectory()),
        fds_(*transport::FdServer::Start(directory_ + "/fd",
                                         transport::FdServer::Options())),
        memory_(&pool_, fds_.get(), transport::HostMemory::Options()),
        address_(daemon_.address()) {}

  static std::string MakeDirectory() {
    std::string directory = "/tmp/c_api_test.XXXXXX";
    EXPECT_NE(mkdtemp(&directory[0]), nullptr);
    return directory;
  }

  ~CApiTest() override {
    weightsync_trainer_free(trainer_);
    weightsync_worker_free(worker_);
    weightsync_replica_free(replica_);
    fds_ = nullptr;
    rmdir(directory_.c_str());
  }

  void OpenTrainer() {
    weightsync_trainer_options options;
    WEIGHTSYNC_INIT(options);
    options.address = address_.c_str();
    options.model = "m";
    options.rank = 1;
    options.world_size = 3;
    std::thread accept(
        [&] { trainer_stream_ = daemon_.AcceptTrainer(&identity_); });
    weightsync_error* error = weightsync_trainer_open(&options, &trainer_);
    accept.join();
    ASSERT_EQ(error, nullptr) << Describe(error);
  }

  void ServeArenas() {
    daemon_.on_allocate = [this](const v1::AllocateArenaRequest& request,
                                 v1::AllocateArenaResponse* response) {
      segment_ =
          *memory_.Allocate(request.size_bytes(), transport::AllocateOptions());
      const auto ticket = memory_.Export(*segment_, transport::ExportOptions());
      v1::ArenaOffer* offer = response->mutable_arena();
      offer->set_arena_id("a0");
      offer->set_size_bytes(segment_->bytes());
      offer->set_descriptor_socket(ticket->address);
      offer->set_token(ticket->token);
      return grpc::Status::OK;
    };
  }

  static weightsync_tensor Tensor(const int64_t* shape, void* data) {
    weightsync_tensor tensor = {};
    tensor.name = "w";
    tensor.dtype = v1::DTYPE_U8;
    tensor.dimensions = 1;
    tensor.shape = shape;
    tensor.data = data;
    return tensor;
  }

  transport::CopyPool pool_{1};
  const std::string directory_;
  std::unique_ptr<transport::FdServer> fds_;
  transport::HostMemory memory_;
  std::unique_ptr<transport::Segment> segment_;
  FakeDaemon daemon_;
  const std::string address_;
  v1::TrainerIdentity identity_;
  std::shared_ptr<FakeTrainerStream> trainer_stream_;
  weightsync_trainer* trainer_ = nullptr;
  weightsync_worker* worker_ = nullptr;
  weightsync_replica* replica_ = nullptr;
};

TEST_F(CApiTest, TheHeaderIsC) {
  EXPECT_EQ(weightsync_test_size_of_options(),
            sizeof(weightsync_publish_options));
  EXPECT_EQ(weightsync_abi_version(), WEIGHTSYNC_ABI_VERSION);
  char id[33];
  weightsync_random_id(id);
  EXPECT_EQ(strlen(id), 32u);
}

TEST_F(CApiTest, WrongArgumentsAreErrorsAndNotCrashes) {
  EXPECT_EQ(ReasonOf(weightsync_trainer_open(nullptr, &trainer_)),
            "ARGUMENT_MISSING");
  EXPECT_EQ(ReasonOf(weightsync_trainer_publish(nullptr, nullptr, nullptr)),
            "ARGUMENT_MISSING");
  EXPECT_EQ(
      ReasonOf(weightsync_worker_start(nullptr, nullptr, nullptr, 0, &worker_)),
      "ARGUMENT_MISSING");
  weightsync_trainer_options options = {};
  EXPECT_EQ(ReasonOf(weightsync_trainer_open(&options, &trainer_)),
            "STRUCT_SIZE_INVALID");
  options.struct_size = sizeof(options);
  EXPECT_EQ(ReasonOf(weightsync_trainer_open(&options, &trainer_)),
            "NAME_INVALID");
  options.model = "m";
  options.address = "nowhere";
  weightsync_error* error = weightsync_trainer_open(&options, &trainer_);
  ASSERT_NE(error, nullptr);
  EXPECT_EQ(weightsync_error_code(error), 3);
  EXPECT_STREQ(weightsync_error_reason(error), "ADDRESS_INVALID");
  ASSERT_EQ(weightsync_error_metadata_count(error), 2u);
  EXPECT_STREQ(weightsync_error_metadata_value(error, 0),
               "weightsync_trainer_open");
  EXPECT_STREQ(weightsync_error_metadata_key(error, 1), "object");
  EXPECT_STREQ(weightsync_error_metadata_value(error, 1), "rank 0 of m");
  EXPECT_STREQ(weightsync_error_metadata_value(error, 2), "");
  weightsync_error_free(error);
  EXPECT_EQ(trainer_, nullptr);
}

// A program that was compiled before the last members were added.
TEST_F(CApiTest, AShorterStructHasDefaults) {
  struct {
    size_t struct_size;
    const char* address;
    const char* model;
    char behind[64];
  } options;
  memset(&options, 0x7f, sizeof(options));
  options.struct_size = offsetof(weightsync_trainer_options, rank);
  options.address = address_.c_str();
  options.model = "m";
  std::thread accept(
      [&] { trainer_stream_ = daemon_.AcceptTrainer(&identity_); });
  weightsync_error* error = weightsync_trainer_open(
      reinterpret_cast<weightsync_trainer_options*>(&options), &trainer_);
  accept.join();
  ASSERT_EQ(error, nullptr) << Describe(error);
  EXPECT_EQ(identity_.rank(), 0);
  EXPECT_EQ(identity_.world_size(), 1);
}

TEST_F(CApiTest, ATrainersLife) {
  ServeArenas();
  OpenTrainer();
  EXPECT_EQ(identity_.rank(), 1);
  EXPECT_EQ(identity_.world_size(), 3);
  char node[128];
  weightsync_trainer_node(trainer_, node);
  EXPECT_STREQ(node, "nodes/fake");

  weightsync_arena arena;
  ASSERT_NO_ERROR(weightsync_trainer_allocate(trainer_, 4096, 10, &arena));
  memset(arena.data, 7, 4096);
  EXPECT_EQ(segment_->data()[4095], 7);

  v1::RegisterShardsRequest seen;
  daemon_.on_register = [&](const v1::RegisterShardsRequest& request,
                            v1::RegisterShardsResponse* response) {
    seen = request;
    response->set_registered_rank_count(2);
    response->set_shard_bytes(6);
    return grpc::Status::OK;
  };
  const int64_t shape[] = {8, 6}, offset[] = {4, 0}, extent[] = {2, 3},
                strides[] = {1, 2};
  weightsync_tensor tensor = {};
  tensor.name = "w";
  tensor.dtype = v1::DTYPE_U8;
  tensor.dimensions = 2;
  tensor.shape = shape;
  tensor.offset = offset;
  tensor.extent = extent;
  tensor.strides = strides;
  tensor.data = static_cast<char*>(arena.data) + 64;
  tensor.component = "draft";
  weightsync_registered registered;
  ASSERT_NO_ERROR(
      weightsync_trainer_register(trainer_, &tensor, 1, 10, &registered));
  EXPECT_EQ(registered.registered_rank_count, 2);
  EXPECT_EQ(registered.shard_bytes, 6);
  ASSERT_EQ(seen.shards_size(), 1);
  EXPECT_EQ(seen.shards(0).parameter().component(), "draft");
  EXPECT_EQ(seen.shards(0).box().offset(0), 4);
  EXPECT_EQ(seen.shards(0).box().extent(1), 3);
  EXPECT_EQ(seen.shards(0).strides(1), 2);
  EXPECT_EQ(seen.shards(0).offset_bytes(), 64);

  v1::PublishVersionRequest publish;
  daemon_.on_publish = [&](const v1::PublishVersionRequest& request,
                           v1::PublishVersionResponse* response) {
    publish = request;
    response->set_version_name("models/m/versions/5");
    response->set_version(5);
    response->set_update_id("u5");
    response->set_copied_bytes(6);
    return grpc::Status::OK;
  };
  weightsync_publish_options options;
  WEIGHTSYNC_INIT(options);
  options.version = 5;
  options.step = -3;
  options.request_id = "q";
  options.publish_mode = v1::PUBLISH_MODE_IN_PLACE;
  options.update_mode = v1::UPDATE_MODE_STREAM;
  options.pause_mode = v1::PAUSE_MODE_KEEP;
  options.transfer_policy = v1::TRANSFER_POLICY_PAIRED;
  options.delivery_policy = v1::DELIVERY_POLICY_LATEST;
  options.rolling_max_unavailable = 2;
  options.allow_no_recovery = 1;
  options.verify_source = 1;
  weightsync_published published;
  ASSERT_NO_ERROR(weightsync_trainer_publish(trainer_, &options, &published));
  EXPECT_EQ(published.version, 5);
  EXPECT_STREQ(published.update_id, "u5");
  EXPECT_STREQ(published.version_name, "models/m/versions/5");
  EXPECT_GT(published.stall, 0);
  EXPECT_EQ(publish.version(), 5);
  EXPECT_EQ(publish.step(), -3);
  EXPECT_EQ(publish.request_id(), "q");
  EXPECT_EQ(publish.options().publish_mode(), v1::PUBLISH_MODE_IN_PLACE);
  EXPECT_EQ(publish.options().update_mode(), v1::UPDATE_MODE_STREAM);
  EXPECT_EQ(publish.options().pause_mode(), v1::PAUSE_MODE_KEEP);
  EXPECT_EQ(publish.options().transfer_policy(), v1::TRANSFER_POLICY_PAIRED);
  EXPECT_EQ(publish.options().delivery_policy(), v1::DELIVERY_POLICY_LATEST);
  EXPECT_EQ(publish.options().commit_policy().rolling().max_unavailable(), 2);
  EXPECT_TRUE(publish.options().allow_no_recovery());
  EXPECT_TRUE(publish.options().verify_source());
  options.rolling_max_unavailable = 0;
  options.on_straggler = v1::LockstepPolicy::ON_STRAGGLER_EVICT;
  ASSERT_NO_ERROR(weightsync_trainer_publish(trainer_, &options, &published));
  EXPECT_EQ(publish.options().commit_policy().lockstep().on_straggler(),
            v1::LockstepPolicy::ON_STRAGGLER_EVICT);

  daemon_.on_get_version = [&](const v1::GetVersionRequest& request,
                               v1::Version* version) {
    version->set_name(request.name());
    version->set_update_id("u5");
    version->set_state(v1::Version::STATE_ABORTED);
    version->set_wire_bytes(99);
    v1::PhaseTime* phase = version->add_phases();
    phase->set_phase("transfer");
    phase->mutable_measured()->set_seconds(3);
    version->mutable_failure()->set_reason("PAUSE_TIMEOUT");
    // Cut in the middle of a character it would be no UTF-8.
    version->mutable_failure()->set_message(std::string(1022, 'x') +
                                            "\u00e4\u00e4");
    return grpc::Status::OK;
  };
  weightsync_version version;
  ASSERT_NO_ERROR(
      weightsync_trainer_progress(trainer_, &published, 10, &version));
  EXPECT_EQ(version.state, v1::Version::STATE_ABORTED);
  EXPECT_EQ(version.wire_bytes, 99);
  EXPECT_EQ(version.transfer, 3);
  EXPECT_LT(version.apply, 0);
  EXPECT_STREQ(version.failure_reason, "PAUSE_TIMEOUT");
  EXPECT_EQ(strlen(version.failure_message), 1022u);
  snprintf(published.update_id, sizeof(published.update_id), "u6");
  EXPECT_EQ(
      ReasonOf(weightsync_trainer_progress(trainer_, &published, 10, &version)),
      "VERSION_UNKNOWN");

  daemon_.on_wait = [](const v1::WaitVersionRequest& request, v1::Version*) {
    return ToGrpcStatus(ErrorStatus(absl::StatusCode::kAborted, "NODE_LOST",
                                    request.update_id()));
  };
  EXPECT_EQ(
      Describe(weightsync_trainer_wait(trainer_, &published, 10, nullptr)),
      "NODE_LOST: u6");

  weightsync_trainer_close(trainer_);
  EXPECT_TRUE(trainer_stream_->WaitClientDone());
  EXPECT_EQ(ReasonOf(weightsync_trainer_status(trainer_)), "CLOSED");
}

TEST_F(CApiTest, MemoryThatTheCallerOwns) {
  ServeArenas();
  OpenTrainer();
  weightsync_arena arena;
  ASSERT_NO_ERROR(weightsync_trainer_allocate(trainer_, 4096, 10, &arena));
  const std::string name = absl::StrCat("/weightsync_c_api_test.", getpid());
  const int fd = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(ftruncate(fd, 8192), 0);
  char* data = static_cast<char*>(
      mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  v1::RegisterShardsRequest seen;
  daemon_.on_register = [&](const v1::RegisterShardsRequest& request,
                            v1::RegisterShardsResponse*) {
    seen = request;
    return grpc::Status::OK;
  };
  const int64_t shape[] = {kBytes};
  const weightsync_tensor tensors[] = {Tensor(shape, data + 128),
                                       Tensor(shape, arena.data),
                                       Tensor(shape, data + 4096)};
  EXPECT_EQ(
      ReasonOf(weightsync_trainer_register(trainer_, tensors, 3, 10, nullptr)),
      "MEMORY_OUT_OF_RANGE");
  weightsync_shared_memory memory;
  WEIGHTSYNC_INIT(memory);
  memory.fd = fd;
  memory.data = data;
  memory.size_bytes = 8192;
  ASSERT_NO_ERROR(weightsync_trainer_use_shared_memory(trainer_, &memory));
  ASSERT_NO_ERROR(
      weightsync_trainer_register(trainer_, tensors, 3, 10, nullptr));
  ASSERT_EQ(seen.regions_size(), 2);
  EXPECT_EQ(seen.regions(1).memory().posix_shm().name(), name);
  EXPECT_EQ(seen.regions(1).size_bytes(), 8192);
  EXPECT_EQ(seen.shards(0).region(), 1);
  EXPECT_EQ(seen.shards(0).offset_bytes(), 128);
  EXPECT_EQ(seen.shards(1).region(), 0);
  EXPECT_EQ(seen.shards(2).region(), 1);

  // fp32 masters of fp16: the daemon is told how they lie there.
  weightsync_tensor cast = tensors[1];
  const int64_t few[] = {4096 / 4};
  cast.shape = few;
  cast.dtype = v1::DTYPE_F16 | WEIGHTSYNC_STORED_AS(v1::DTYPE_F32);
  ASSERT_NO_ERROR(weightsync_trainer_register(trainer_, &cast, 1, 10, nullptr));
  EXPECT_EQ(seen.shards(0).parameter().dtype(), v1::DTYPE_F16);
  EXPECT_EQ(seen.shards(0).dtype(), v1::DTYPE_F32);
  const int64_t more[] = {4096 / 4 + 1};
  cast.shape = more;
  EXPECT_EQ(
      ReasonOf(weightsync_trainer_register(trainer_, &cast, 1, 10, nullptr)),
      "MEMORY_OUT_OF_RANGE");
  cast.dtype = v1::DTYPE_F16 | WEIGHTSYNC_STORED_AS(99);
  EXPECT_EQ(
      ReasonOf(weightsync_trainer_register(trainer_, &cast, 1, 10, nullptr)),
      "DTYPE_UNKNOWN");

  weightsync_trainer_forget_shared_memory(trainer_, data);
  EXPECT_EQ(
      ReasonOf(weightsync_trainer_register(trainer_, tensors, 3, 10, nullptr)),
      "MEMORY_OUT_OF_RANGE");
  // Without a name it is opened as a file of this process; the descriptor may
  // be closed.
  shm_unlink(name.c_str());
  ASSERT_NO_ERROR(weightsync_trainer_use_shared_memory(trainer_, &memory));
  struct stat held;
  ASSERT_EQ(fstat(fd, &held), 0);
  close(fd);
  ASSERT_NO_ERROR(
      weightsync_trainer_register(trainer_, tensors, 3, 10, nullptr));
  ASSERT_EQ(seen.regions_size(), 2);
  const v1::OpenFileMemory& file = seen.regions(1).memory().open_file();
  EXPECT_EQ(file.device(), held.st_dev);
  EXPECT_EQ(file.inode(), held.st_ino);
  struct stat kept;
  ASSERT_EQ(fstat(file.fd(), &kept), 0);
  EXPECT_EQ(kept.st_ino, held.st_ino);
  EXPECT_EQ(seen.shards(0).region(), 1);
  EXPECT_EQ(seen.shards(2).region(), 1);
  weightsync_trainer_forget_shared_memory(trainer_, data);
  EXPECT_NE(fstat(file.fd(), &kept), 0) << "it is still kept";

  memory.fd = memfd_create("anonymous", 0);
  EXPECT_EQ(ReasonOf(weightsync_trainer_use_shared_memory(trainer_, &memory)),
            "");
  close(memory.fd);
  // Closed, a device, and a file on a disk.
  EXPECT_EQ(ReasonOf(weightsync_trainer_use_shared_memory(trainer_, &memory)),
            "NOT_MEMORY");
  for (const char* path : {"/dev/null", "/proc/self/exe"}) {
    memory.fd = open(path, O_RDONLY);
    EXPECT_EQ(ReasonOf(weightsync_trainer_use_shared_memory(trainer_, &memory)),
              "NOT_MEMORY")
        << path;
    close(memory.fd);
  }
  memory.name = "no-slash";
  EXPECT_EQ(ReasonOf(weightsync_trainer_use_shared_memory(trainer_, &memory)),
            "MEMORY_NAME_INVALID");
  memory.name = "/name";
  memory.size_bytes = 0;
  EXPECT_EQ(ReasonOf(weightsync_trainer_use_shared_memory(trainer_, &memory)),
            "MEMORY_SIZE_INVALID");
  munmap(data, 8192);
}

// What the callbacks of a worker saw and answer.
struct Engine {
  std::string fail_load;
  std::vector<std::string> calls;
  const char* live = nullptr;
};

TEST_F(CApiTest, AWorkerIsInstalledWhenItsEngineHasLoaded) {
  Engine engine;
  std::vector<char> live(kBytes, 0);
  engine.live = live.data();
  weightsync_worker_options options;
  WEIGHTSYNC_INIT(options);
  options.address = address_.c_str();
  options.model = "m";
  options.replica = "r";
  options.incarnation = "i";
  options.user = &engine;
  options.load = [](void* user, const char* update_id, int64_t version,
                    weightsync_answer* answer) {
    Engine* engine = static_cast<Engine*>(user);
    engine->calls.push_back(absl::StrCat("load ", update_id, " ", version, " ",
                                         static_cast<int>(engine->live[0])));
    if (!engine->fail_load.empty()) {
      weightsync_answer_fail(answer, 0, nullptr, engine->fail_load.c_str());
    }
  };
  options.on_writing = [](void* user, const char* update_id) {
    static_cast<Engine*>(user)->calls.push_back(
        absl::StrCat("writing ", update_id));
  };
  options.on_applied = [](void* user, const weightsync_applied* applied) {
    static_cast<Engine*>(user)->calls.push_back(
        absl::StrCat("applied ", applied->version, " ", applied->code, " ",
                     applied->reason));
  };
  const int64_t shape[] = {kBytes};
  const weightsync_tensor tensor = Tensor(shape, live.data());
  ASSERT_NO_ERROR(
      weightsync_worker_start(&options, &tensor, nullptr, 1, &worker_));
  v1::RegisterWorker registration;
  auto stream = daemon_.AcceptWorker(&registration);
  ASSERT_NE(stream, nullptr);
  ASSERT_NO_ERROR(weightsync_worker_wait_registered(worker_, 20));
  EXPECT_EQ(registration.worker_count(), 1);
  EXPECT_EQ(registration.tensors(0).name(), "w");

  transport::AllocateOptions allocate;
  allocate.generation_slots = 1;
  segment_ = *memory_.Allocate(kBytes, allocate);
  memset(segment_->data(), 9, kBytes);
  transport::ExportOptions shared;
  shared.read_only = true;
  const auto ticket = memory_.Export(*segment_, shared);
  v1::WorkerCommand command;
  command.mutable_arena()->set_arena_id("s");
  command.mutable_arena()->set_size_bytes(segment_->bytes() + 4096);
  command.mutable_arena()->set_data_offset_bytes(4096);
  command.mutable_arena()->set_descriptor_socket(ticket->address);
  command.mutable_arena()->set_token(ticket->token);
  command.mutable_arena()->set_read_only(true);
  stream->Send(command);
  command.mutable_copy_plan()->set_layout_id("l");
  command.mutable_copy_plan()->add_buckets()->add_copies()->set_run_bytes(
      kBytes);
  stream->Send(command);
  v1::ApplyUpdate* apply = command.mutable_apply();
  apply->set_command_id("c");
  apply->set_update_id("u1");
  apply->set_version(1);
  apply->set_layout_id("l");
  apply->set_commit_term(1);
  apply->mutable_timeout()->set_seconds(20);
  v1::SlotLocation* slot = apply->add_buckets()->mutable_slot();
  slot->set_arena_id("s");
  slot->set_size_bytes(kBytes);

  // The engine does not take it: a mix, by the worker's own word.
  engine.fail_load = "no such layer";
  stream->Send(command);
  v1::WorkerReport report;
  ASSERT_TRUE(stream->Receive(&report) && report.has_writing());
  ASSERT_TRUE(stream->Receive(&report) && report.has_applied());
  EXPECT_EQ(report.applied().failure().reason(), "HOOK_FAILED");
  EXPECT_EQ(report.applied().failure().message(), "no such layer");
  EXPECT_FALSE(report.applied().untouched());
  EXPECT_EQ(report.applied().installed().state(),
            v1::InstalledState::STATE_WRITING);
  weightsync_installed installed;
  weightsync_worker_installed(worker_, &installed);
  EXPECT_EQ(installed.state, v1::InstalledState::STATE_WRITING);
  EXPECT_EQ(ReasonOf(weightsync_worker_wait_installed(worker_, 1, 0.01)),
            "INSTALL_TIMEOUT");

  engine.fail_load.clear();
  stream->Send(command);
  ASSERT_TRUE(stream->Receive(&report) && report.has_writing());
  ASSERT_TRUE(stream->Receive(&report) && report.has_applied());
  EXPECT_FALSE(report.applied().has_failure());
  ASSERT_NO_ERROR(weightsync_worker_wait_installed(worker_, 1, 20));
  weightsync_worker_installed(worker_, &installed);
  EXPECT_EQ(installed.state, v1::InstalledState::STATE_INSTALLED);
  EXPECT_STREQ(installed.update_id, "u1");
  EXPECT_EQ(installed.version, 1);
  weightsync_worker_close(worker_);
  EXPECT_EQ(engine.calls,
            (std::vector<std::string>{"writing u1", "load u1 1 9",
                                      "applied 1 2 HOOK_FAILED", "writing u1",
                                      "load u1 1 9", "applied 1 0 "}));
  EXPECT_NE(weightsync_worker_ended(worker_), 0);
}

TEST_F(CApiTest, AReplicasHooks) {
  Engine engine;
  weightsync_replica_options options;
  WEIGHTSYNC_INIT(options);
  options.address = address_.c_str();
  options.model = "m";
  options.replica = "r";
  options.incarnation = "i";
  EXPECT_EQ(ReasonOf(weightsync_replica_start(&options, &replica_)),
            "HOOK_MISSING");
  options.user = &engine;
  options.partial = 1;
  options.on_pause = [](void* user, const weightsync_pause* pause,
                        weightsync_answer* answer) {
    Engine* engine = static_cast<Engine*>(user);
    engine->calls.push_back(absl::StrCat("pause ", pause->update_id, " ",
                                         pause->version, " ", pause->mode));
    EXPECT_GT(pause->timeout, 1);
    EXPECT_LE(pause->timeout, 20);
    weightsync_answer_detail(answer, "drained 3 requests");
  };
  options.on_resume = [](void* user, const weightsync_resume* resume,
                         weightsync_answer* answer) {
    static_cast<Engine*>(user)->calls.push_back(
        absl::StrCat("resume ", resume->version, " ", resume->step, " ",
                     resume->weights_changed));
    weightsync_answer_fail(answer, 9, "NO_MEMORY", "free some");
  };
  ASSERT_NO_ERROR(weightsync_replica_start(&options, &replica_));
  v1::RegisterReplica registration;
  auto stream = daemon_.AcceptReplica(&registration);
  ASSERT_NE(stream, nullptr);
  ASSERT_NO_ERROR(weightsync_replica_wait_registered(replica_, 20));
  EXPECT_TRUE(registration.partial());
  EXPECT_EQ(weightsync_replica_paused(replica_), 0);
  v1::ReplicaCommand command;
  command.mutable_pause()->set_command_id("1");
  command.mutable_pause()->set_update_id("u");
  command.mutable_pause()->set_version(4);
  command.mutable_pause()->set_mode(v1::PAUSE_MODE_ABORT);
  command.mutable_pause()->mutable_timeout()->set_seconds(20);
  stream->Send(command);
  v1::ReplicaReport report;
  ASSERT_TRUE(stream->Receive(&report) && report.has_paused());
  EXPECT_EQ(report.paused().detail(), "drained 3 requests");
  EXPECT_NE(weightsync_replica_paused(replica_), 0);
  command.mutable_resume()->set_command_id("2");
  command.mutable_resume()->set_version(4);
  command.mutable_resume()->set_step(40);
  command.mutable_resume()->set_weights_changed(true);
  stream->Send(command);
  ASSERT_TRUE(stream->Receive(&report) && report.has_resumed());
  EXPECT_EQ(report.resumed().failure().reason(), "NO_MEMORY");
  EXPECT_EQ(report.resumed().failure().code(), 9);
  EXPECT_NE(weightsync_replica_paused(replica_), 0);
  weightsync_replica_close(replica_);
  EXPECT_EQ(engine.calls,
            (std::vector<std::string>{"pause u 4 1", "resume 4 40 1"}));
}

}  // namespace
}  // namespace client
}  // namespace weightsync
