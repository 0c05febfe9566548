#include "client/cc/trainer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cc/fake_daemon.h"
#include "client/cc/rpc.h"
#include "transport/host/host_memory.h"

namespace weightsync {
namespace client {
namespace {

class TrainerTest : public ::testing::Test {
 protected:
  TrainerTest()
      : directory_(MakeDirectory()),
        fds_(*transport::FdServer::Start(directory_ + "/fd",
                                         transport::FdServer::Options())),
        memory_(&pool_, fds_.get(), transport::HostMemory::Options()) {}

  static std::string MakeDirectory() {
    std::string directory = "/tmp/trainer_test.XXXXXX";
    EXPECT_NE(mkdtemp(&directory[0]), nullptr);
    return directory;
  }

  ~TrainerTest() override {
    trainer_ = nullptr;
    fds_ = nullptr;
    rmdir(directory_.c_str());
  }

  void Connect(absl::Duration heartbeat_timeout = absl::Seconds(20),
               bool reconnect = false) {
    TrainerOptions options;
    options.reconnect = reconnect;
    options.max_backoff = absl::Milliseconds(50);
    options.address = daemon_.address();
    options.model = "m";
    options.rank = 1;
    options.world_size = 3;
    std::thread accept([&] {
      stream_ = daemon_.AcceptTrainer(&identity_, heartbeat_timeout / 4,
                                      heartbeat_timeout);
    });
    auto trainer = Trainer::Connect(options);
    accept.join();
    ASSERT_TRUE(trainer.ok()) << trainer.status();
    trainer_ = *std::move(trainer);
  }

  // Has the daemon make arenas for this process.
  void ServeArenas() {
    daemon_.on_allocate = [this](const v1::AllocateArenaRequest& request,
                                 v1::AllocateArenaResponse* response) {
      EXPECT_EQ(request.session().substr(0, 8), "session-");
      auto segment =
          memory_.Allocate(request.size_bytes(), transport::AllocateOptions());
      EXPECT_TRUE(segment.ok()) << segment.status();
      const auto ticket = memory_.Export(**segment, transport::ExportOptions());
      EXPECT_TRUE(ticket.ok()) << ticket.status();
      v1::ArenaOffer* offer = response->mutable_arena();
      offer->set_arena_id("a" + std::to_string(segments_.size()));
      offer->set_size_bytes((*segment)->bytes());
      offer->set_descriptor_socket(ticket->address);
      offer->set_token(ticket->token);
      segments_.push_back(*std::move(segment));
      return grpc::Status::OK;
    };
  }

  const std::string directory_;
  transport::CopyPool pool_{1};
  std::unique_ptr<transport::FdServer> fds_;
  transport::HostMemory memory_;
  std::vector<std::unique_ptr<transport::Segment>> segments_;
  FakeDaemon daemon_;
  v1::TrainerIdentity identity_;
  std::shared_ptr<FakeTrainerStream> stream_;
  std::unique_ptr<Trainer> trainer_;
};

Tensor Shard(void* data) {
  Tensor shard;
  shard.name = "w";
  shard.dtype = v1::DTYPE_BF16;
  shard.shape = {9, 10};
  shard.box = Box{{3, 0}, {3, 10}};
  shard.data = data;
  return shard;
}

TEST_F(TrainerTest, OpensASessionAndSharesMemory) {
  ServeArenas();
  Connect();
  EXPECT_EQ(identity_.rank(), 1);
  EXPECT_EQ(identity_.world_size(), 3);
  EXPECT_EQ(identity_.pid(), getpid());
  EXPECT_EQ(trainer_->node(), "nodes/fake");
  const auto arena = trainer_->AllocateArena(10000);
  ASSERT_TRUE(arena.ok()) << arena.status();
  memset(arena->data, 7, 10000);
  EXPECT_EQ(segments_[0]->data()[9999], 7) << "the daemon sees the bytes";
}

TEST_F(TrainerTest, RegistersShardsByWhereTheyLie) {
  ServeArenas();
  Connect();
  const auto first = trainer_->AllocateArena(1000);
  const auto second = trainer_->AllocateArena(1000);
  ASSERT_TRUE(first.ok() && second.ok());
  v1::RegisterShardsRequest seen;
  daemon_.on_register = [&](const v1::RegisterShardsRequest& request,
                            v1::RegisterShardsResponse* response) {
    seen = request;
    response->set_registered_rank_count(1);
    return grpc::Status::OK;
  };
  const auto response =
      trainer_->RegisterShards({Shard(second->data + 128), Shard(first->data)});
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->registered_rank_count(), 1);
  ASSERT_EQ(seen.regions_size(), 2);
  EXPECT_EQ(seen.regions(1).memory().arena().arena_id(), "a1");
  EXPECT_EQ(seen.shards(0).region(), 1);
  EXPECT_EQ(seen.shards(0).offset_bytes(), 128);
  EXPECT_EQ(seen.shards(1).region(), 0);
  // 60 bytes do not fit at 941.
  char elsewhere[60];
  EXPECT_TRUE(trainer_->RegisterShards({Shard(first->data + 940)}).ok());
  EXPECT_EQ(ErrorReason(
                trainer_->RegisterShards({Shard(first->data + 941)}).status()),
            "MEMORY_OUT_OF_RANGE");
  EXPECT_EQ(ErrorReason(trainer_->RegisterShards({Shard(elsewhere)}).status()),
            "MEMORY_OUT_OF_RANGE");
}

TEST_F(TrainerTest, PublishRepeatsWithTheSameRequestId) {
  Connect();
  absl::Mutex mutex;
  std::vector<std::string> ids;
  daemon_.on_publish = [&](const v1::PublishVersionRequest& request,
                           v1::PublishVersionResponse* response) {
    absl::MutexLock lock(&mutex);
    ids.push_back(request.request_id());
    if (ids.size() < 3) {
      return ToGrpcStatus(ErrorStatus(absl::StatusCode::kUnavailable,
                                      "COORDINATOR_UNREACHABLE", "Repeat."));
    }
    response->set_version(5);
    response->set_version_name("models/m/versions/5");
    return grpc::Status::OK;
  };
  const auto published = trainer_->Publish(PublishOptions());
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->version, 5);
  EXPECT_GT(published->stall, absl::ZeroDuration());
  ASSERT_EQ(ids.size(), 3u);
  EXPECT_EQ(ids[0].size(), 32u);
  EXPECT_EQ(ids[0], ids[2]);
  ASSERT_TRUE(trainer_->Publish(PublishOptions()).ok());
  EXPECT_NE(ids[3], ids[0]);
}

TEST_F(TrainerTest, AnswersOfTheDaemonArriveWithTheirReasons) {
  Connect();
  daemon_.on_publish = [](const v1::PublishVersionRequest&,
                          v1::PublishVersionResponse*) {
    return ToGrpcStatus(ErrorStatus(absl::StatusCode::kFailedPrecondition,
                                    "VERSION_NOT_NEWER", "Publish 6."));
  };
  EXPECT_EQ(ErrorReason(trainer_->Publish(PublishOptions()).status()),
            "VERSION_NOT_NEWER");
  EXPECT_EQ(ErrorReason(trainer_->AllocateArena(1).status()), "METHOD_UNKNOWN");
}

TEST_F(TrainerTest, PublishEndsAtItsDeadline) {
  Connect();
  daemon_.on_publish = [](const v1::PublishVersionRequest&,
                          v1::PublishVersionResponse*) {
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "later");
  };
  PublishOptions options;
  options.timeout = absl::Milliseconds(200);
  const auto published = trainer_->Publish(options);
  EXPECT_FALSE(published.ok());
  EXPECT_EQ(ErrorReason(published.status()), "DAEMON_UNREACHABLE");
}

TEST_F(TrainerTest, WaitGoesOnBeyondTheServersLimit) {
  Connect();
  std::atomic<int> calls{0};
  daemon_.on_wait = [&](const v1::WaitVersionRequest& request,
                        v1::Version* version) {
    EXPECT_EQ(request.update_id(), "u");
    if (++calls < 3) {
      return ToGrpcStatus(ErrorStatus(absl::StatusCode::kDeadlineExceeded,
                                      "WAIT_TIMEOUT", "It moves."));
    }
    version->set_state(v1::Version::STATE_ACTIVE);
    return grpc::Status::OK;
  };
  PublishResult published;
  published.version_name = "models/m/versions/1";
  published.update_id = "u";
  const auto version = trainer_->Wait(published, absl::Seconds(20));
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(version->state(), v1::Version::STATE_ACTIVE);
  calls = -1000000;
  EXPECT_EQ(
      ErrorReason(trainer_->Wait(published, absl::Milliseconds(50)).status()),
      "WAIT_TIMEOUT");
}

TEST_F(TrainerTest, PrepareWaitsForTheOtherRanks) {
  Connect();
  std::atomic<int> calls{0};
  daemon_.on_prepare = [&](const v1::PrepareRequest& request,
                           v1::PrepareResponse* response) {
    EXPECT_EQ(request.model(), "models/m");
    if (++calls < 3) {
      return ToGrpcStatus(ErrorStatus(absl::StatusCode::kFailedPrecondition,
                                      "WORLD_INCOMPLETE", "Rank 2."));
    }
    response->set_bucket_count(4);
    return grpc::Status::OK;
  };
  const auto prepared = trainer_->Prepare(absl::Seconds(20));
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_EQ(prepared->bucket_count(), 4);
  calls = -1000000;
  EXPECT_EQ(ErrorReason(trainer_->Prepare(absl::Milliseconds(100)).status()),
            "WORLD_INCOMPLETE");
  daemon_.on_prepare = [](const v1::PrepareRequest&, v1::PrepareResponse*) {
    return ToGrpcStatus(ErrorStatus(absl::StatusCode::kFailedPrecondition,
                                    "NO_WORKERS", "Nobody."));
  };
  EXPECT_EQ(ErrorReason(trainer_->Prepare(absl::Seconds(20)).status()),
            "NO_WORKERS");
}

TEST_F(TrainerTest, ALostLeaseEndsEveryCall) {
  Connect();
  std::atomic<bool> called{false};
  daemon_.on_publish = [&](const v1::PublishVersionRequest&,
                           v1::PublishVersionResponse*) {
    called = true;
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "later");
  };
  absl::Status status;
  std::thread publish(
      [&] { status = trainer_->Publish(PublishOptions()).status(); });
  while (!called) absl::SleepFor(absl::Milliseconds(1));
  stream_->End(ToGrpcStatus(ErrorStatus(absl::StatusCode::kDeadlineExceeded,
                                        "HEARTBEAT_LOST", "Open a new one.")));
  publish.join();
  EXPECT_EQ(ErrorReason(status), "LEASE_LOST") << status;
  EXPECT_EQ(ErrorReason(trainer_->status()), "LEASE_LOST");
  EXPECT_EQ(ErrorReason(trainer_->AllocateArena(1).status()), "LEASE_LOST");
}

TEST_F(TrainerTest, ADaemonThatStandsStillLosesTheLease) {
  Connect(/*heartbeat_timeout=*/absl::Milliseconds(200));
  EXPECT_TRUE(trainer_->status().ok());
  stream_->Mute();
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (trainer_->status().ok() && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(ErrorReason(trainer_->status()), "LEASE_LOST");
}

// The daemon is started again in the middle of a publish: everything is
// registered in a new session, with the bytes and addresses that the tensors
// have, and the same request goes out again.
TEST_F(TrainerTest, ALostLeaseIsMendedAndThePublishRepeated) {
  ServeArenas();
  Connect(absl::Seconds(20), /*reconnect=*/true);
  const auto arena = trainer_->AllocateArena(10000);
  ASSERT_TRUE(arena.ok()) << arena.status();
  memset(arena->data, 7, 10000);
  std::vector<v1::RegisterShardsRequest> registered;
  daemon_.on_register = [&](const v1::RegisterShardsRequest& request,
                            v1::RegisterShardsResponse*) {
    registered.push_back(request);
    return grpc::Status::OK;
  };
  ASSERT_TRUE(trainer_->RegisterShards({Shard(arena->data + 128)}).ok());

  std::vector<v1::PublishVersionRequest> published;
  std::atomic<bool> called{false};
  absl::Notification over;
  daemon_.on_publish = [&](const v1::PublishVersionRequest& request,
                           v1::PublishVersionResponse* response) {
    published.push_back(request);
    if (published.size() == 1) {
      called = true;
      over.WaitForNotification();
      return ToGrpcStatus(ErrorStatus(absl::StatusCode::kUnavailable,
                                      "SHUTTING_DOWN", "Later."));
    }
    response->set_version(5);
    return grpc::Status::OK;
  };
  absl::StatusOr<PublishResult> result;
  std::thread publish([&] { result = trainer_->Publish(PublishOptions()); });
  while (!called) absl::SleepFor(absl::Milliseconds(1));
  daemon_.SetSession("session-2");
  stream_->End(ToGrpcStatus(
      ErrorStatus(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "Later.")));
  stream_ = daemon_.AcceptTrainer();
  over.Notify();
  publish.join();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->version, 5);
  ASSERT_GE(published.size(), 2u);
  EXPECT_EQ(published.back().session(), "session-2");
  EXPECT_EQ(published.back().request_id(), published[0].request_id());
  ASSERT_EQ(registered.size(), 2u);
  EXPECT_EQ(registered[1].session(), "session-2");
  EXPECT_EQ(registered[1].shards(0).offset_bytes(), 128);
  // The second arena lies where the first one did, with its bytes.
  ASSERT_EQ(segments_.size(), 2u);
  EXPECT_EQ(registered[1].regions(0).memory().arena().arena_id(), "a1");
  EXPECT_EQ(arena->data[9999], 7);
  EXPECT_EQ(segments_[1]->data()[9999], 7);
  arena->data[5] = 9;
  EXPECT_EQ(segments_[1]->data()[5], 9);
  EXPECT_EQ(segments_[0]->data()[5], 7);
  EXPECT_TRUE(trainer_->status().ok());
}

TEST_F(TrainerTest, NobodyAnswers) {
  daemon_.Stop();
  TrainerOptions options;
  options.address = daemon_.address();
  options.model = "m";
  options.connect_timeout = absl::Milliseconds(200);
  EXPECT_EQ(ErrorReason(Trainer::Connect(options).status()),
            "REGISTER_TIMEOUT");
}

TEST_F(TrainerTest, CloseDeregisters) {
  Connect();
  trainer_->Close();
  EXPECT_TRUE(stream_->WaitClientDone());
  EXPECT_EQ(ErrorReason(trainer_->Publish(PublishOptions()).status()),
            "CLOSED");
}

}  // namespace
}  // namespace client
}  // namespace weightsync
