#include "client/cc/replica.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cc/fake_daemon.h"
#include "client/cc/rpc.h"

namespace weightsync {
namespace client {
namespace {

constexpr absl::Duration kSoon = absl::Seconds(20);

class ReplicaTest : public ::testing::Test {
 protected:
  ~ReplicaTest() override { replica_ = nullptr; }

  void StartReplica(bool paused = false, bool atomic_swap = false) {
    ReplicaOptions options;
    options.atomic_swap = atomic_swap;
    options.address = daemon_.address();
    options.model = "m";
    options.replica = "r";
    options.incarnation = "i";
    options.paused = paused;
    options.max_backoff = absl::Milliseconds(100);
    ReplicaHooks hooks;
    hooks.on_pause =
        [this](const PauseRequest& pause) -> absl::StatusOr<std::string> {
      Add("pause " + pause.update_id);
      {
        absl::MutexLock lock(&mutex_);
        modes_.push_back(pause.mode);
      }
      if (pause_hook_) pause_hook_();
      absl::MutexLock lock(&mutex_);
      if (!pause_status_.ok()) return pause_status_;
      return std::string("drained 3 requests");
    };
    hooks.on_resume = [this](const ResumeInfo& info) {
      Add("resume " + info.update_id + (info.weights_changed ? " new" : ""));
      absl::MutexLock lock(&mutex_);
      modes_.push_back(info.mode);
      return resume_status_;
    };
    auto replica = Replica::Start(options, hooks);
    ASSERT_TRUE(replica.ok()) << replica.status();
    replica_ = *std::move(replica);
  }

  void Add(const std::string& call) {
    absl::MutexLock lock(&mutex_);
    calls_.push_back(call);
  }
  std::vector<std::string> Calls() {
    absl::MutexLock lock(&mutex_);
    return calls_;
  }
  void FailPause(absl::Status status) {
    absl::MutexLock lock(&mutex_);
    pause_status_ = std::move(status);
  }
  void FailResume(absl::Status status) {
    absl::MutexLock lock(&mutex_);
    resume_status_ = std::move(status);
  }

  static void SendPause(FakeReplicaStream* stream, const std::string& command,
                        const std::string& update) {
    v1::ReplicaCommand message;
    message.mutable_pause()->set_command_id(command);
    message.mutable_pause()->set_update_id(update);
    message.mutable_pause()->mutable_timeout()->set_seconds(20);
    stream->Send(message);
  }
  static void SendResume(FakeReplicaStream* stream, const std::string& command,
                         const std::string& update, bool changed) {
    v1::ReplicaCommand message;
    message.mutable_resume()->set_command_id(command);
    message.mutable_resume()->set_update_id(update);
    message.mutable_resume()->set_weights_changed(changed);
    stream->Send(message);
  }
  static v1::ReplicaReport Answer(FakeReplicaStream* stream) {
    v1::ReplicaReport report;
    EXPECT_TRUE(stream->Receive(&report));
    return report;
  }

  FakeDaemon daemon_;
  std::function<void()> pause_hook_;
  absl::Mutex mutex_;
  std::vector<std::string> calls_;
  std::vector<v1::PauseMode> modes_;
  absl::Status pause_status_;
  absl::Status resume_status_;
  std::unique_ptr<Replica> replica_;
};

using Strings = std::vector<std::string>;

TEST_F(ReplicaTest, PausesAndResumes) {
  StartReplica();
  v1::RegisterReplica registration;
  auto stream = daemon_.AcceptReplica(&registration);
  ASSERT_NE(stream, nullptr);
  EXPECT_EQ(registration.replica(), "r");
  EXPECT_FALSE(registration.paused());
  EXPECT_TRUE(replica_->WaitRegistered(kSoon).ok());
  SendPause(stream.get(), "1", "u1");
  v1::ReplicaReport report = Answer(stream.get());
  EXPECT_EQ(report.paused().command_id(), "1");
  EXPECT_EQ(report.paused().detail(), "drained 3 requests");
  EXPECT_TRUE(replica_->paused());
  SendResume(stream.get(), "2", "u1", true);
  report = Answer(stream.get());
  EXPECT_EQ(report.resumed().command_id(), "2");
  EXPECT_FALSE(report.resumed().has_failure());
  EXPECT_FALSE(replica_->paused());
  EXPECT_EQ(Calls(), Strings({"pause u1", "resume u1 new"}));
}

TEST_F(ReplicaTest, TheEngineIsToldHowToPauseAndWhatItGoesOnWith) {
  StartReplica();
  auto stream = daemon_.AcceptReplica();
  ASSERT_NE(stream, nullptr);
  int command = 0;
  for (const v1::PauseMode mode :
       {v1::PAUSE_MODE_ABORT, v1::PAUSE_MODE_DRAIN, v1::PAUSE_MODE_KEEP}) {
    v1::ReplicaCommand message;
    message.mutable_pause()->set_command_id(std::to_string(++command));
    message.mutable_pause()->set_mode(mode);
    message.mutable_pause()->mutable_timeout()->set_seconds(20);
    stream->Send(message);
    EXPECT_FALSE(Answer(stream.get()).paused().has_failure());
    message.Clear();
    message.mutable_resume()->set_command_id(std::to_string(++command));
    message.mutable_resume()->set_update_id("u");
    message.mutable_resume()->set_mode(mode);
    stream->Send(message);
    EXPECT_FALSE(Answer(stream.get()).resumed().has_failure());
  }
  absl::MutexLock lock(&mutex_);
  EXPECT_EQ(modes_, (std::vector<v1::PauseMode>{
                        v1::PAUSE_MODE_ABORT, v1::PAUSE_MODE_ABORT,
                        v1::PAUSE_MODE_DRAIN, v1::PAUSE_MODE_DRAIN,
                        v1::PAUSE_MODE_KEEP, v1::PAUSE_MODE_KEEP}));
}

TEST_F(ReplicaTest, OnlyAnEngineThatSwapsTakesAnUpdateWithoutAPause) {
  StartReplica(/*paused=*/false, /*atomic_swap=*/true);
  v1::RegisterReplica registration;
  auto stream = daemon_.AcceptReplica(&registration);
  ASSERT_NE(stream, nullptr);
  EXPECT_TRUE(registration.atomic_swap());
  v1::ReplicaCommand none;
  none.mutable_pause()->set_command_id("1");
  none.mutable_pause()->set_mode(v1::PAUSE_MODE_NONE);
  stream->Send(none);
  EXPECT_FALSE(Answer(stream.get()).paused().has_failure());
  EXPECT_FALSE(replica_->paused());
  // What it serves now is told all the same.
  SendResume(stream.get(), "2", "u1", true);
  EXPECT_FALSE(Answer(stream.get()).resumed().has_failure());
  EXPECT_EQ(Calls(), Strings({"resume u1 new"}));

  replica_ = nullptr;
  StartReplica();
  stream = daemon_.AcceptReplica();
  ASSERT_NE(stream, nullptr);
  stream->Send(none);
  EXPECT_EQ(Answer(stream.get()).paused().failure().reason(),
            "ATOMIC_SWAP_REQUIRED");
}

TEST_F(ReplicaTest, ARepeatedCommandDoesNothingTwice) {
  StartReplica();
  auto stream = daemon_.AcceptReplica();
  ASSERT_NE(stream, nullptr);
  SendPause(stream.get(), "1", "u1");
  SendPause(stream.get(), "1", "u1");
  EXPECT_EQ(Answer(stream.get()).paused().detail(), "drained 3 requests");
  EXPECT_EQ(Answer(stream.get()).paused().detail(), "drained 3 requests");
  // Another command for an engine that is paused already.
  SendPause(stream.get(), "1b", "u2");
  EXPECT_EQ(Answer(stream.get()).paused().detail(), "was paused already");
  SendResume(stream.get(), "2", "u1", true);
  SendResume(stream.get(), "2", "u1", true);
  SendResume(stream.get(), "3", "u1", true);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Answer(stream.get()).has_resumed());
  EXPECT_EQ(Calls(), Strings({"pause u1", "resume u1 new"}));
}

// A daemon that was started anew counts from the beginning. What it says is
// not what the one before has said, and a pause that is answered from memory
// would be an engine that is written to while it generates.
TEST_F(ReplicaTest, AnotherCommandOfAKnownIdIsDone) {
  StartReplica();
  auto stream = daemon_.AcceptReplica();
  ASSERT_NE(stream, nullptr);
  for (const std::string update : {"u1", "u2"}) {
    SendPause(stream.get(), "1", update);
    EXPECT_EQ(Answer(stream.get()).paused().detail(), "drained 3 requests");
    EXPECT_TRUE(replica_->paused());
    SendResume(stream.get(), "2", update, true);
    EXPECT_FALSE(Answer(stream.get()).resumed().has_failure());
    EXPECT_FALSE(replica_->paused());
  }
  EXPECT_EQ(Calls(), Strings({"pause u1", "resume u1 new", "pause u2",
                              "resume u2 new"}));
}

TEST_F(ReplicaTest, AfterABrokenStreamItSaysThatItStandsPaused) {
  StartReplica();
  auto stream = daemon_.AcceptReplica();
  ASSERT_NE(stream, nullptr);
  SendPause(stream.get(), "1", "u1");
  Answer(stream.get());
  stream->End(grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone"));
  v1::RegisterReplica registration;
  stream = daemon_.AcceptReplica(&registration);
  ASSERT_NE(stream, nullptr);
  EXPECT_TRUE(registration.paused());
  EXPECT_EQ(registration.incarnation(), "i");
  // The command that was answered on the old stream.
  SendPause(stream.get(), "1", "u1");
  EXPECT_EQ(Answer(stream.get()).paused().detail(), "drained 3 requests");
  SendResume(stream.get(), "2", "", false);
  Answer(stream.get());
  EXPECT_EQ(Calls(), Strings({"pause u1", "resume "}));
}

TEST_F(ReplicaTest, AStreamThatBreaksInsideAHookIsNotWaitedFor) {
  absl::Notification inside;
  absl::Notification go_on;
  pause_hook_ = [&] {
    inside.Notify();
    go_on.WaitForNotificationWithTimeout(kSoon);
  };
  StartReplica();
  auto stream = daemon_.AcceptReplica();
  ASSERT_NE(stream, nullptr);
  SendPause(stream.get(), "1", "u1");
  ASSERT_TRUE(inside.WaitForNotificationWithTimeout(kSoon));
  stream->End(grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone"));
  v1::RegisterReplica registration;
  stream = daemon_.AcceptReplica(&registration);
  ASSERT_NE(stream, nullptr);
  EXPECT_TRUE(registration.paused()) << "it may be paused at any moment";
  SendResume(stream.get(), "2", "", false);
  go_on.Notify();
  EXPECT_TRUE(Answer(stream.get()).has_resumed());
  EXPECT_FALSE(replica_->paused());
  EXPECT_EQ(Calls(), Strings({"pause u1", "resume "}));
}

TEST_F(ReplicaTest, FailuresOfHooksAreReported) {
  StartReplica();
  auto stream = daemon_.AcceptReplica();
  ASSERT_NE(stream, nullptr);
  FailPause(absl::InternalError("stuck"));
  SendPause(stream.get(), "1", "u1");
  v1::ReplicaReport report = Answer(stream.get());
  EXPECT_EQ(report.paused().failure().reason(), "HOOK_FAILED");
  EXPECT_TRUE(replica_->paused()) << "nobody knows";
  FailPause(absl::OkStatus());
  SendPause(stream.get(), "2", "u1");
  EXPECT_FALSE(Answer(stream.get()).paused().has_failure());
  FailResume(ErrorStatus(absl::StatusCode::kInternal, "CACHE_LOCKED", "no"));
  SendResume(stream.get(), "3", "u1", true);
  report = Answer(stream.get());
  EXPECT_EQ(report.resumed().failure().reason(), "CACHE_LOCKED");
  EXPECT_TRUE(replica_->paused());
  FailResume(absl::OkStatus());
  SendResume(stream.get(), "4", "u1", true);
  EXPECT_FALSE(Answer(stream.get()).resumed().has_failure());
  EXPECT_EQ(Calls(), Strings({"pause u1", "pause u1", "resume u1 new",
                              "resume u1 new"}));
}

// Found by tests/chaos/simulation: a pause failed and left the engine running,
// the resume after it failed too, and then the engine counted as paused: the
// next pause was answered "was paused already" while it generated.
TEST_F(ReplicaTest, AfterAResumeThatFailedTheEngineIsAskedToPause) {
  StartReplica();
  auto stream = daemon_.AcceptReplica();
  ASSERT_NE(stream, nullptr);
  FailPause(absl::InternalError("stuck"));
  SendPause(stream.get(), "1", "u1");
  EXPECT_TRUE(Answer(stream.get()).paused().has_failure());
  FailResume(absl::InternalError("stuck"));
  SendResume(stream.get(), "2", "u0", false);
  EXPECT_TRUE(Answer(stream.get()).resumed().has_failure());
  FailPause(absl::OkStatus());
  SendPause(stream.get(), "3", "u1");
  const v1::ReplicaReport report = Answer(stream.get());
  EXPECT_FALSE(report.paused().has_failure());
  EXPECT_EQ(report.paused().detail(), "drained 3 requests");
  EXPECT_EQ(Calls(), Strings({"pause u1", "resume u0", "pause u1"}));
}

TEST_F(ReplicaTest, AnEngineThatStartsPausedWaits) {
  StartReplica(/*paused=*/true);
  v1::RegisterReplica registration;
  auto stream = daemon_.AcceptReplica(&registration);
  ASSERT_NE(stream, nullptr);
  EXPECT_TRUE(registration.paused());
  SendResume(stream.get(), "1", "u5", true);
  Answer(stream.get());
  EXPECT_EQ(Calls(), Strings({"resume u5 new"}));
}

TEST_F(ReplicaTest, NewWeightsUnderARunningEngineAreSaid) {
  StartReplica();
  auto stream = daemon_.AcceptReplica();
  ASSERT_NE(stream, nullptr);
  SendResume(stream.get(), "1", "", false);
  Answer(stream.get());
  SendResume(stream.get(), "2", "u1", true);
  Answer(stream.get());
  EXPECT_EQ(Calls(), Strings({"resume u1 new"}));
}

TEST_F(ReplicaTest, WrongArgumentsAreFoundBeforeAnyCall) {
  ReplicaOptions options;
  ReplicaHooks hooks;
  EXPECT_EQ(ErrorReason(Replica::Start(options, hooks).status()),
            "NAME_INVALID");
  options.model = options.replica = options.incarnation = "x";
  EXPECT_EQ(ErrorReason(Replica::Start(options, hooks).status()),
            "HOOK_MISSING");
  options.worker_count = 0;
  EXPECT_EQ(ErrorReason(Replica::Start(options, hooks).status()),
            "WORKER_COUNT_INVALID");
}

}  // namespace
}  // namespace client
}  // namespace weightsync
