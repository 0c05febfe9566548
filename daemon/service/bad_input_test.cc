// Everything a client can get wrong: a clear code and reason, nothing else
// disturbed. Each test ends with a whole update on the same cluster.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <limits>
#include <thread>

#include "daemon/service/cluster_fixture.h"
#include "gmock/gmock.h"
#include "transport/host/fd_socket.h"

namespace weightsync {
namespace daemon {
namespace testing {
namespace {

using ::testing::HasSubstr;

class BadInputTest : public ClusterTest {
 protected:
  // One node, two ranks, two replicas.
  void StartCluster(const std::function<void(Options*)>& change = nullptr) {
    StartNode("a", change);
    StartTrainers({"a"}, 2);
    StartReplica("a", "r0");
    StartReplica("a", "r1", 2);
  }

  v1::RegisterShardsRequest Shards(int rank) {
    auto shards = trainers_[rank]->MakeShards(model_);
    EXPECT_TRUE(shards.ok()) << shards.status();
    return *shards;
  }

  static void ExpectError(const absl::Status& status, absl::StatusCode code,
                          const std::string& reason) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(ErrorReason(status), reason) << status;
    EXPECT_GT(status.message().size(), 10u)
        << "a sentence that helps: " << status;
  }

  std::string Shard(
      const std::function<void(v1::RegisterShardsRequest*)>& change,
      absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    v1::RegisterShardsRequest request = Shards(0);
    change(&request);
    const absl::Status status = trainers_[0]->Register(request).status();
    EXPECT_EQ(status.code(), code) << status;
    return ErrorReason(status);
  }

  // After Shard, which allocated other memory: what the rank publishes from is
  // what it registered.
  void RegisterAgain() { ASSERT_TRUE(trainers_[0]->Register(Shards(0)).ok()); }

  std::string Worker(
      const std::function<void(v1::RegisterWorker*)>& change,
      absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    v1::RegisterWorker registration = WorkerOf("bad", model_);
    change(&registration);
    RawWorker worker(Channel("a"), registration);
    const absl::Status status = worker.Open();
    EXPECT_EQ(status.code(), code) << status;
    return ErrorReason(status);
  }
};

TEST_F(BadInputTest, ShardsThatCannotBe) {
  StartCluster();
  EXPECT_EQ(Shard([](auto* r) {
              r->mutable_shards(0)->mutable_parameter()->set_dtype(
                  static_cast<v1::DType>(99));
            }),
            "DTYPE_UNKNOWN");
  for (int64_t dimension : {int64_t{-1}, int64_t{0}, (int64_t{1} << 31) + 1}) {
    EXPECT_EQ(Shard([&](auto* r) {
                r->mutable_shards(0)->mutable_parameter()->set_shape(0,
                                                                     dimension);
              }),
              "SHAPE_INVALID");
  }
  EXPECT_EQ(Shard([](auto* r) {
              auto* shape =
                  r->mutable_shards(0)->mutable_parameter()->mutable_shape();
              shape->Clear();
              for (int d = 0; d < 3; ++d) shape->Add(int64_t{1} << 31);
            }),
            "SHAPE_INVALID");
  EXPECT_EQ(Shard([](auto* r) {
              r->mutable_shards(0)->mutable_box()->set_offset(0, 64);
            }),
            "BOX_OUT_OF_RANGE");
  EXPECT_EQ(
      Shard([](auto* r) { r->mutable_shards(0)->set_offset_bytes(1 << 30); }),
      "MEMORY_OUT_OF_RANGE");
  EXPECT_EQ(
      Shard([](auto* r) { r->mutable_shards(0)->set_offset_bytes(INT64_MAX); }),
      "MEMORY_OUT_OF_RANGE");
  EXPECT_EQ(
      Shard([](auto* r) { r->mutable_regions(0)->set_size_bytes(1 << 30); }),
      "MEMORY_OUT_OF_RANGE");
  EXPECT_EQ(Shard([](auto* r) { *r->add_shards() = r->shards(0); }),
            "DUPLICATE_NAME");
  RegisterAgain();
  UpdateWorks(1);
}

TEST_F(BadInputTest, NamesAndCountsThatCannotBe) {
  StartCluster();
  const auto named = [&](const std::string& name) {
    return Shard([&](auto* r) {
      r->mutable_shards(0)->mutable_parameter()->set_name(name);
    });
  };
  for (const std::string& name :
       {std::string(), std::string(1025, 'x'), std::string("a\nb"),
        std::string("a\0b", 3), std::string("\x7f")}) {
    EXPECT_EQ(named(name), "PARAMETER_NAME_INVALID");
  }
  EXPECT_EQ(Worker([](auto* r) { r->mutable_tensors(0)->set_name("a\tb"); }),
            "PARAMETER_NAME_INVALID");
  EXPECT_EQ(Shard([](auto* r) {
              auto* shape =
                  r->mutable_shards(0)->mutable_parameter()->mutable_shape();
              shape->Clear();
              for (int d = 0; d < 9; ++d) shape->Add(1);
            }),
            "SHAPE_INVALID");
  EXPECT_EQ(Shard([](auto* r) {
              const v1::TensorShard shard = r->shards(0);
              while (r->shards_size() <= 1 << 20) *r->add_shards() = shard;
            }),
            "TOO_MANY_PARAMETERS");
  EXPECT_EQ(
      Shard([](auto* r) { r->mutable_shards(0)->mutable_strides()->Add(-1); }),
      "STRIDES_INVALID");
  RegisterAgain();
  UpdateWorks(1);
}

TEST_F(BadInputTest, VersionsThatAreNotNewer) {
  StartCluster();
  UpdateWorks(1);  // version 1
  const auto high = PublishAll(2, 7);
  ASSERT_TRUE(high.ok()) << high.status();
  ASSERT_TRUE(trainers_[0]->Wait((*high)[0].version_name()).ok());
  for (int64_t version : {1, 6, 7}) {
    for (auto& trainer : trainers_) {
      const absl::Status status = trainer->Publish(version).status();
      ExpectError(status, absl::StatusCode::kFailedPrecondition,
                  "VERSION_NOT_NEWER");
      EXPECT_THAT(std::string(status.message()), HasSubstr("version 7"));
    }
  }
  // The very same model goes on, with the number after the highest.
  UpdateWorks(3);
  const auto model = GetModel("a");
  ASSERT_TRUE(model.ok());
  EXPECT_EQ(model->floor_version(), 8);
}

TEST_F(BadInputTest, ARequestThatIsRepeated) {
  StartCluster();
  v1::PublishVersionRequest requests[2];
  absl::StatusOr<v1::PublishVersionResponse> first[2];
  for (int round = 0; round < 2; ++round) {
    std::vector<std::thread> ranks;
    for (int i = 0; i < 2; ++i) {
      if (round == 0) trainers_[i]->Fill(1);
      requests[i].set_session(trainers_[i]->session());
      requests[i].set_request_id(absl::StrCat("step 1 of rank ", i));
      ranks.emplace_back([&, i] {
        const auto answer = trainers_[i]->Publish(requests[i]);
        ASSERT_TRUE(answer.ok()) << answer.status();
        if (round == 0) {
          first[i] = answer;
        } else {
          EXPECT_EQ(answer->update_id(), first[i]->update_id());
          EXPECT_EQ(answer->version(), first[i]->version());
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
    ASSERT_TRUE(trainers_[0]->Wait("models/m/versions/1").ok());
  }
  EXPECT_EQ(workers_["r0"][0]->applies(), 1) << "there was no second update";
  UpdateWorks(2);
  EXPECT_EQ(GetModel("a")->floor_version(), 2);
}

TEST_F(BadInputTest, TimesThatCannotBe) {
  StartCluster();
  auto trainer = v1::TrainerService::NewStub(Channel("a"));
  grpc::ClientContext wait_context;
  SetDeadline(&wait_context);
  v1::WaitVersionRequest wait;
  wait.set_name("models/m/versions/1");
  wait.mutable_timeout()->set_seconds(-1);
  v1::Version version;
  ExpectError(
      FromGrpcStatus(trainer->WaitVersion(&wait_context, wait, &version)),
      absl::StatusCode::kInvalidArgument, "TIMEOUT_INVALID");
  grpc::ClientContext prepare_context;
  SetDeadline(&prepare_context);
  v1::PrepareRequest prepare;
  prepare.set_model("models/m");
  prepare.mutable_timeout()->set_seconds(-1);
  v1::PrepareResponse prepared;
  ExpectError(
      FromGrpcStatus(Admin("a")->Prepare(&prepare_context, prepare, &prepared)),
      absl::StatusCode::kInvalidArgument, "TIMEOUT_INVALID");
  UpdateWorks(1);
}

// The caller's own deadline, not the server's.
TEST_F(BadInputTest, APublishWithoutPatience) {
  StartNode("a");
  for (int rank = 0; rank < 2; ++rank) {
    trainers_.push_back(std::make_unique<RawTrainer>(Channel("a"), rank, 2));
    ASSERT_TRUE(trainers_.back()->Open().ok());
  }
  ASSERT_TRUE(trainers_[0]->Register(Shards(0)).ok());
  v1::PublishVersionRequest request;
  request.set_session(trainers_[0]->session());
  request.set_request_id("once");
  trainers_[0]->Fill(1);
  const absl::Status status =
      trainers_[0]->Publish(request, absl::Seconds(1)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  ASSERT_TRUE(trainers_[1]->Register(Shards(1)).ok());
  StartReplica("a", "r0");
  // As it was told: once more, with the same request_id.
  trainers_[1]->Fill(1);
  std::thread other([&] { EXPECT_TRUE(trainers_[1]->Publish().ok()); });
  const auto again = trainers_[0]->Publish(request);
  other.join();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->version(), 1);
  ASSERT_TRUE(trainers_[0]->Wait(again->version_name()).ok());
  UpdateWorks(2);
}

TEST_F(BadInputTest, OffersThatNobodyTookEndWithTheirSession) {
  StartCluster();
  const std::string socket = daemons_["a"]->addresses().descriptor_socket;
  const auto offer = trainers_[0]->Allocate(1 << 20);
  ASSERT_TRUE(offer.ok()) << offer.status();
  ASSERT_TRUE(trainers_[0]->Close().ok());
  ExpectError(transport::RedeemFd(socket, offer->token(), kDeadline).status(),
              absl::StatusCode::kNotFound, "TOKEN_UNKNOWN");
  trainers_[0] = std::make_unique<RawTrainer>(Channel("a"), 0, 2);
  const absl::Status again = trainers_[0]->SetUp(model_);
  ASSERT_TRUE(again.ok()) << again;
  UpdateWorks(1);
}

TEST_F(BadInputTest, MemoryThatIsNotTheRanks) {
  StartCluster();
  const std::string others = Shards(1).regions(0).memory().arena().arena_id();
  EXPECT_EQ(Shard(
                [&](auto* r) {
                  r->mutable_regions(0)
                      ->mutable_memory()
                      ->mutable_arena()
                      ->set_arena_id(others);
                },
                absl::StatusCode::kNotFound),
            "ARENA_UNKNOWN");
  EXPECT_EQ(Shard(
                [](auto* r) {
                  r->mutable_regions(0)
                      ->mutable_memory()
                      ->mutable_cuda_ipc()
                      ->set_handle("x");
                },
                absl::StatusCode::kUnimplemented),
            "MEMORY_KIND_DISABLED");
  EXPECT_EQ(Shard(
                [](auto* r) {
                  r->mutable_regions(0)
                      ->mutable_memory()
                      ->mutable_posix_shm()
                      ->set_name("/weightsync-no-such-segment");
                },
                absl::StatusCode::kNotFound),
            "MEMORY_UNKNOWN");
  EXPECT_EQ(Shard([](auto* r) {
              r->mutable_regions(0)->mutable_memory()->mutable_posix_shm();
            }),
            "MEMORY_NAME_INVALID");
  EXPECT_EQ(
      Shard([](auto* r) {
        r->mutable_regions(0)->mutable_memory()->mutable_posix_shm()->set_name(
            "/../etc/passwd");
      }),
      "MEMORY_NAME_INVALID");
  // Files that this process, the trainer's, has open.
  const auto file = [](int fd, int inode_shift) {
    struct stat found = {};
    EXPECT_EQ(fstat(fd, &found), 0);
    return [fd, inode_shift, found](v1::RegisterShardsRequest* r) {
      v1::OpenFileMemory* file =
          r->mutable_regions(0)->mutable_memory()->mutable_open_file();
      file->set_fd(fd);
      file->set_device(found.st_dev);
      file->set_inode(found.st_ino + inode_shift);
    };
  };
  const int memfd = memfd_create("weights", MFD_CLOEXEC);
  EXPECT_EQ(Shard(file(memfd, 0)), "MEMORY_OUT_OF_RANGE");
  EXPECT_EQ(Shard(file(memfd, 1), absl::StatusCode::kNotFound),
            "MEMORY_UNKNOWN");
  const int disk = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(Shard(file(disk, 0)), "NOT_MEMORY");
  close(disk);
  // Its number may be another file's by now.
  const auto closed = file(memfd, 0);
  close(memfd);
  EXPECT_EQ(Shard(closed, absl::StatusCode::kNotFound), "MEMORY_UNKNOWN");
  EXPECT_EQ(Shard([](auto* r) { r->mutable_regions(0)->clear_memory(); }),
            "MEMORY_KIND_MISSING");
  for (int64_t bytes : {int64_t{0}, int64_t{-1}}) {
    EXPECT_EQ(
        Shard([&](auto* r) { r->mutable_regions(0)->set_size_bytes(bytes); }),
        "MEMORY_SIZE_INVALID");
  }
  RegisterAgain();
  ASSERT_TRUE(trainers_[1]->Register(Shards(1)).ok());
  UpdateWorks(1);
}

TEST_F(BadInputTest, RanksThatDisagree) {
  StartNode("a");
  for (int rank = 0; rank < 2; ++rank) {
    trainers_.push_back(std::make_unique<RawTrainer>(Channel("a"), rank, 2));
    ASSERT_TRUE(trainers_.back()->Open().ok());
  }
  const v1::RegisterShardsRequest other = Shards(1);
  ASSERT_TRUE(trainers_[1]->Register(other).ok());
  EXPECT_EQ(
      Shard([](auto* r) {
        r->mutable_shards(0)->mutable_parameter()->set_dtype(v1::DTYPE_F16);
      }),
      "CATALOG_MISMATCH");
  // One row that rank 1 has too.
  EXPECT_EQ(Shard([](auto* r) {
              r->mutable_shards(0)->mutable_box()->set_extent(0, 33);
            }),
            "SHARDS_OVERLAP");
  // One that nobody has.
  EXPECT_EQ(Shard([](auto* r) {
              r->mutable_shards(0)->mutable_box()->set_extent(0, 31);
            }),
            "SHARDS_HOLE");
  RegisterAgain();
  StartReplica("a", "r0");
  UpdateWorks(1);
}

TEST_F(BadInputTest, WorkersThatWantWhatCannotBe) {
  StartCluster();
  EXPECT_EQ(Worker([](auto* r) {
              r->mutable_tensors(0)->set_dtype(static_cast<v1::DType>(99));
            }),
            "DTYPE_UNKNOWN");
  EXPECT_EQ(Worker([](auto* r) { r->mutable_tensors(0)->set_shape(0, 0); }),
            "SHAPE_INVALID");
  EXPECT_EQ(Worker([](auto* r) {
              r->mutable_tensors(0)->mutable_box()->add_offset(0);
              r->mutable_tensors(0)->mutable_box()->add_extent(1);
            }),
            "BOX_OUT_OF_RANGE");
  EXPECT_EQ(Worker([](auto* r) { *r->add_tensors() = r->tensors(0); }),
            "DUPLICATE_NAME");
  EXPECT_EQ(Worker([](auto* r) { r->set_worker_index(1); }),
            "WORKER_INDEX_INVALID");
  EXPECT_EQ(Worker([](auto* r) { r->set_model("m"); }), "MODEL_NAME_INVALID");
  EXPECT_EQ(Worker([](auto* r) { r->set_replica("Bad"); }),
            "REPLICA_NAME_INVALID");
  for (const size_t size : {size_t{0}, size_t{129}}) {
    EXPECT_EQ(
        Worker([size](auto* r) { r->set_incarnation(std::string(size, 'i')); }),
        "INCARNATION_INVALID");
  }
  const absl::StatusCode precondition = absl::StatusCode::kFailedPrecondition;
  EXPECT_EQ(Worker([](auto* r) { r->mutable_tensors(0)->set_name("unknown"); },
                   precondition),
            "PARAMETER_UNKNOWN");
  EXPECT_EQ(
      Worker([](auto* r) { r->mutable_tensors(0)->set_dtype(v1::DTYPE_F16); },
             precondition),
      "DTYPE_MISMATCH");
  EXPECT_EQ(Worker([](auto* r) { r->mutable_tensors(0)->set_shape(0, 65); },
                   precondition),
            "SHAPE_MISMATCH");
  EXPECT_EQ(Worker([](auto* r) { r->set_protocol_version(99); }, precondition),
            "PROTOCOL_UNSUPPORTED");
  UpdateWorks(1);
}

TEST_F(BadInputTest,
       WorkersThatWereThereBeforeTheTrainersAreRefusedWhenTheseCome) {
  StartNode("a");
  v1::RegisterWorker registration = WorkerOf("bad", model_);
  registration.mutable_tensors(1)->set_name("unknown");
  RawReplica control(Channel("a"), ReplicaOf("bad"));
  ASSERT_TRUE(control.Open().ok());
  RawWorker worker(Channel("a"), registration);
  ASSERT_TRUE(worker.Open().ok());
  StartTrainers({"a"}, 2);
  ExpectError(worker.WaitClosed(), absl::StatusCode::kFailedPrecondition,
              "PARAMETER_UNKNOWN");
  StartReplica("a", "r0");
  UpdateWorks(1);
}

TEST_F(BadInputTest, Tokens) {
  StartCluster();
  const std::string socket = daemons_["a"]->addresses().descriptor_socket;
  ExpectError(
      transport::RedeemFd(socket, std::string(32, '0'), kDeadline).status(),
      absl::StatusCode::kNotFound, "TOKEN_UNKNOWN");
  const auto offer = trainers_[0]->Allocate(4096);
  ASSERT_TRUE(offer.ok()) << offer.status();
  // Somebody else, with the same rights: it reads the token, but it is not the
  // process.
  const pid_t child = fork();
  if (child == 0) {
    const auto stolen = transport::RedeemFd(socket, offer->token(), kDeadline);
    _exit(ErrorReason(stolen.status()) == "TOKEN_OTHER_PROCESS" ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(transport::RedeemFd(socket, offer->token(), kDeadline).ok());
  ExpectError(transport::RedeemFd(socket, offer->token(), kDeadline).status(),
              absl::StatusCode::kFailedPrecondition, "TOKEN_REDEEMED");
  UpdateWorks(1);
}

TEST_F(BadInputTest, MemoryThatThereIsNot) {
  StartCluster();
  for (int64_t bytes : {int64_t{0}, int64_t{-5}, int64_t{INT64_MAX}}) {
    ExpectError(trainers_[0]->Allocate(bytes).status(),
                absl::StatusCode::kInvalidArgument, "ARENA_SIZE_INVALID");
  }
  const absl::Status status = trainers_[0]->Allocate(int64_t{1} << 50).status();
  ExpectError(status, absl::StatusCode::kResourceExhausted, "MEMORY_EXHAUSTED");
  EXPECT_THAT(std::string(status.message()), HasSubstr("bytes available"));
  UpdateWorks(1);
}

// Nobody would know its name, nor could give it back.
TEST_F(BadInputTest, AnArenaThatComesTooLateIsNotKept) {
  StartCluster();
  constexpr int64_t kBig = 512 << 20;
  EXPECT_EQ(trainers_[0]->Allocate(kBig, absl::Milliseconds(5)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  // One is made after another.
  ASSERT_TRUE(trainers_[0]->Allocate(1 << 20).ok());
  const auto admin = v1::AdminService::NewStub(Channel("a"));
  v1::Node node;
  // It comes with its heartbeats.
  ASSERT_TRUE(Eventually([&] {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::GetNodeRequest request;
    request.set_name("nodes/a");
    return admin->GetNode(&context, request, &node).ok() &&
           node.memory().trainer_arena_bytes() >= 1 << 20;
  }));
  EXPECT_LT(node.memory().trainer_arena_bytes(), kBig);
  UpdateWorks(1);
}

TEST_F(BadInputTest, AModelThatTheStoreHasNoRoomFor) {
  StartCluster([](Options* options) { options->store_budget_bytes = 8 << 20; });
  std::vector<v1::Parameter> big = {model_[0]};
  big[0].set_shape(
      0, 64 << 10);  // 6 MiB, and an update stands beside the one before
  RawTrainer trainer(Channel("a"), 0, 1, "models/big");
  ASSERT_TRUE(trainer.Open().ok());
  const auto shards = trainer.MakeShards(big);
  ASSERT_TRUE(shards.ok()) << shards.status();
  ExpectError(trainer.Register(*shards).status(),
              absl::StatusCode::kResourceExhausted, "NO_STORE_ROOM");
  UpdateWorks(1);
}

TEST_F(BadInputTest, CallsOutOfPlace) {
  StartCluster();
  RawTrainer stranger(Channel("a"), 0, 1, "models/other");
  stranger.set_session("no such session");
  ExpectError(stranger.Allocate(1).status(), absl::StatusCode::kNotFound,
              "SESSION_UNKNOWN");
  ExpectError(stranger.Publish().status(), absl::StatusCode::kNotFound,
              "SESSION_UNKNOWN");
  ASSERT_TRUE(stranger.Open().ok());
  ExpectError(stranger.Publish().status(),
              absl::StatusCode::kFailedPrecondition, "NOT_REGISTERED");
  ExpectError(trainers_[0]->Publish(-1).status(),
              absl::StatusCode::kInvalidArgument, "VERSION_INVALID");
  // After it there would be no number left to count on with.
  ExpectError(
      trainers_[0]->Publish(std::numeric_limits<int64_t>::max()).status(),
      absl::StatusCode::kInvalidArgument, "VERSION_INVALID");
  v1::PublishVersionRequest request;
  request.set_session(trainers_[0]->session());
  request.set_request_id(std::string(129, 'x'));
  ExpectError(trainers_[0]->Publish(request).status(),
              absl::StatusCode::kInvalidArgument, "REQUEST_ID_INVALID");
  request.clear_request_id();
  v1::UpdateOptions* options = request.mutable_options();
  options->mutable_commit_policy()->mutable_rolling();
  ExpectError(trainers_[0]->Publish(request).status(),
              absl::StatusCode::kInvalidArgument, "MAX_UNAVAILABLE_INVALID");
  options->mutable_commit_policy()->mutable_rolling()->set_max_unavailable(1);
  options->set_update_mode(v1::UPDATE_MODE_STREAM);
  ExpectError(trainers_[0]->Publish(request).status(),
              absl::StatusCode::kUnimplemented, "COMMIT_POLICY_UNIMPLEMENTED");
  ExpectError(trainers_[0]->Wait("models/m/versions/5").status(),
              absl::StatusCode::kNotFound, "VERSION_UNKNOWN");
  UpdateWorks(1);
}

TEST_F(BadInputTest, PlacesThatAreTaken) {
  StartCluster();
  RawTrainer rank(Channel("a"), 1, 2);
  ExpectError(rank.Open(), absl::StatusCode::kAlreadyExists, "RANK_TAKEN");
  RawTrainer outside(Channel("a"), 2, 2);
  ExpectError(outside.Open(), absl::StatusCode::kInvalidArgument,
              "RANK_OUT_OF_RANGE");
  RawTrainer world(Channel("a"), 2, 3);
  EXPECT_FALSE(world.Open().ok() && world.Register({}).ok());
  RawReplica replica(Channel("a"), [] {
    v1::RegisterReplica registration = ReplicaOf("r0");
    registration.set_incarnation("another");
    return registration;
  }());
  ExpectError(replica.Open(), absl::StatusCode::kAlreadyExists,
              "REPLICA_TAKEN");
  RawWorker worker(Channel("a"), WorkerOf("r1", model_, 1, 2));
  ExpectError(worker.Open(), absl::StatusCode::kAlreadyExists, "WORKER_TAKEN");
  UpdateWorks(1);
}

TEST_F(BadInputTest, AFirstMessageThatIsNone) {
  StartCluster();
  auto stub = v1::ReplicaService::NewStub(Channel("a"));
  grpc::ClientContext context;
  SetDeadline(&context);
  auto stream = stub->RunWorker(&context);
  v1::WorkerReport report;
  report.mutable_heartbeat();
  stream->Write(report);
  v1::WorkerCommand command;
  EXPECT_FALSE(stream->Read(&command));
  ExpectError(FromGrpcStatus(stream->Finish()),
              absl::StatusCode::kInvalidArgument, "REGISTRATION_MISSING");
  UpdateWorks(1);
}

TEST_F(BadInputTest, AWorkerThatNeverAcknowledges) {
  StartCluster([](Options* options) {
    options->deadlines.apply = absl::Seconds(3);
    options->apply_attempts = 1;
  });
  UpdateWorks(1);
  workers_["r0"][0]->IgnoreApplies();
  const auto published = PublishAll(2);
  ASSERT_TRUE(published.ok()) << published.status();
  ExpectError(workers_["r0"][0]->WaitClosed(),
              absl::StatusCode::kDeadlineExceeded, "APPLY_TIMEOUT");
  // The decision stands: the others serve it.
  const auto version = trainers_[0]->Wait((*published)[0].version_name());
  ASSERT_TRUE(version.ok()) << version.status();
  ExpectServes("r1", 2, *version);
  EXPECT_TRUE(replicas_["r0"]->paused()) << "it may hold a mix";
  // The engine is started again.
  workers_["r0"].clear();
  replicas_["r0"].reset();
  wanted_["r0"].clear();
  StartReplica("a", "r0");
  ASSERT_TRUE(ReplicaReaches("a", "r0", v1::Replica::STATE_SERVING));
  UpdateWorks(3);
}

TEST_F(BadInputTest, ARankThatNeverArrives) {
  StartCluster(
      [](Options* options) { options->deadlines.gather = absl::Seconds(2); });
  UpdateWorks(1);
  trainers_[0]->Fill(2);
  const auto published = trainers_[0]->Publish();
  ASSERT_TRUE(published.ok()) << published.status();
  const absl::Status status =
      trainers_[0]->Wait(published->version_name()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_EQ(ErrorReason(status), "GATHER_TIMEOUT");
  EXPECT_THAT(std::string(status.message()), HasSubstr("1"));
  EXPECT_EQ(replicas_["r0"]->pauses(), 1) << "nobody was disturbed";
  // When it arrives after all, it is told so, and opens nothing alone.
  trainers_[1]->Fill(2);
  ExpectError(trainers_[1]->Publish().status(), absl::StatusCode::kAborted,
              "GATHER_TIMEOUT");
  UpdateWorks(3);
}

TEST_F(BadInputTest, ARankThatIsNotThere) {
  StartNode("a", [](Options* options) {
    options->deadlines.publish = absl::Seconds(2);
  });
  RawTrainer lonely(Channel("a"), 0, 2);
  ASSERT_TRUE(lonely.SetUp(model_).ok());
  const absl::Status status = lonely.Publish().status();
  ExpectError(status, absl::StatusCode::kDeadlineExceeded, "WORLD_INCOMPLETE");
  EXPECT_THAT(std::string(status.message()), HasSubstr("1"));
  lonely.Close().IgnoreError();
  StartTrainers({"a"}, 2);
  StartReplica("a", "r0");
  UpdateWorks(1);
}

TEST_F(BadInputTest, AReplicaThatCannotPause) {
  StartCluster();
  UpdateWorks(1);
  replicas_["r1"]->FailPauses(
      ErrorStatus(absl::StatusCode::kInternal, "ENGINE_STUCK", "no"));
  const auto published = PublishAll(2);
  ASSERT_TRUE(published.ok()) << published.status();
  const absl::Status status =
      trainers_[0]->Wait((*published)[0].version_name()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("r1"));
  replicas_["r1"]->FailPauses(absl::OkStatus());
  ASSERT_TRUE(ReplicaReaches("a", "r0", v1::Replica::STATE_SERVING));
  ASSERT_TRUE(ReplicaReaches("a", "r1", v1::Replica::STATE_SERVING));
  EXPECT_FALSE(replicas_["r0"]->paused());
  UpdateWorks(3);
}

TEST_F(BadInputTest, AClientThatFallsSilent) {
  StartCluster([](Options* options) {
    options->deadlines.heartbeat = absl::Seconds(3);
  });
  trainers_[1]->StopHeartbeats();
  ExpectError(trainers_[1]->WaitClosed(), absl::StatusCode::kDeadlineExceeded,
              "HEARTBEAT_LOST");
  trainers_[1] = std::make_unique<RawTrainer>(Channel("a"), 1, 2);
  const absl::Status again = trainers_[1]->SetUp(model_);
  ASSERT_TRUE(again.ok()) << again;
  UpdateWorks(1);
}

TEST_F(BadInputTest, ASecondDaemonInTheSamePlace) {
  StartCluster();
  const auto start = [](const Options& options) {
    return Daemon::Start(options).status();
  };
  Options second = TestOptions(directory_.path(), "b");
  second.unix_socket = options_["a"].unix_socket;
  ExpectError(start(second), absl::StatusCode::kAlreadyExists, "SOCKET_IN_USE");
  second = TestOptions(directory_.path(), "b");
  second.listen = {daemons_["a"]->addresses().listen[0]};
  ExpectError(start(second), absl::StatusCode::kAlreadyExists, "SOCKET_IN_USE");
  second = TestOptions(directory_.path(), "b");
  second.state_dir = options_["a"].state_dir;
  ExpectError(start(second), absl::StatusCode::kAlreadyExists,
              "STATE_DIR_IN_USE");
  UpdateWorks(1);
}

TEST_F(BadInputTest, OptionsThatCannotBe) {
  StartCluster();
  const auto start = [this](const std::function<void(Options*)>& change) {
    Options options = TestOptions(directory_.path(), "b");
    change(&options);
    return Daemon::Start(options).status();
  };
  const absl::StatusCode invalid = absl::StatusCode::kInvalidArgument;
  for (int64_t bytes :
       {int64_t{0}, int64_t{-1}, int64_t{1}, int64_t{1} << 60}) {
    ExpectError(start([&](Options* o) { o->bucket_bytes = bytes; }), invalid,
                "BUCKET_BYTES_INVALID");
  }
  ExpectError(
      start([](Options* o) { o->store_budget_bytes = int64_t{1} << 60; }),
      invalid, "STORE_BUDGET_INVALID");
  ExpectError(start([](Options* o) { o->coordinator_address = "nonsense"; }),
              invalid, "ADDRESS_INVALID");
  // TEST-NET-1: no machine has it.
  ExpectError(start([](Options* o) {
                o->data_address = "192.0.2.1";
                o->insecure = true;
              }),
              invalid, "ADDRESS_INVALID");
  ExpectError(start([](Options* o) { o->node = "B"; }), invalid,
              "NODE_NAME_INVALID");
  ExpectError(start([](Options* o) { o->listen = {"example.org:1"}; }), invalid,
              "ADDRESS_INVALID");
  ExpectError(start([](Options* o) {
                o->unix_socket = "/tmp/" + std::string(200, 'x');
              }),
              invalid, "SOCKET_PATH_TOO_LONG");
  ExpectError(start([](Options* o) { o->listen = {"0.0.0.0:0"}; }),
              absl::StatusCode::kFailedPrecondition, "INSECURE_REQUIRED");
  ExpectError(start([](Options* o) { o->data_address = "10.0.0.1"; }),
              absl::StatusCode::kFailedPrecondition, "INSECURE_REQUIRED");
  UpdateWorks(1);
}

}  // namespace
}  // namespace testing
}  // namespace daemon
}  // namespace weightsync
