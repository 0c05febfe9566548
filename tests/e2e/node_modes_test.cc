// What a node does in each mode of an update: see node_fixture.h.

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/e2e/node_fixture.h"
#include "transport/digest.h"

namespace weightsync {
namespace e2e {
namespace {

using NodeModesTest = NodeTest;

TEST_F(NodeModesTest, StreamInPlaceGoesFromTheTrainersMemoryToTheLiveTensors) {
  StartDaemon();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 2);
  for (int version = 1; version <= 2; ++version) {
    const std::string update_id = absl::StrCat("u", version);
    Fill(version);
    const v1::DefineLayout define = Prepare(
        update_id, version, v1::UPDATE_MODE_STREAM, v1::PUBLISH_MODE_IN_PLACE);
    EXPECT_NE(engine_->live(0), Published());
    Pause(update_id);
    Move(define, update_id, version, 2);
    Verify(define, update_id);
    for (int w = 0; w < 2; ++w) {
      EXPECT_EQ(engine_->worker(w).installed().state(),
                v1::InstalledState::STATE_WRITING)
          << "there is no commit yet";
      EXPECT_TRUE(engine_->live(w) == Published());
    }
    EXPECT_FALSE(returned_) << "the source is not released";
    v1::NodeCommand release;
    release.mutable_release_sources()->set_model("models/m");
    release.mutable_release_sources()->set_update_id(update_id);
    coordinator_.Send("a", release);
    EXPECT_TRUE(Eventually([&] { return returned_.load(); }));
    EXPECT_TRUE(published_.ok()) << published_;
    for (int w = 0; w < 2; ++w) Apply(define, w, update_id, version);
    Resume(update_id);
    End(update_id, true);
  }
}

TEST_F(NodeModesTest, AStreamThatIsGivenUpIsReportedAsAMix) {
  StartDaemon();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 1);
  Fill(1);
  const v1::DefineLayout define =
      Prepare("u1", 1, v1::UPDATE_MODE_STREAM, v1::PUBLISH_MODE_SNAPSHOT);
  Pause("u1");
  Move(define, "u1", 1, 1);
  Verify(define, "u1");
  End("u1", false);
  const v1::WorkerAppliedReport applied = WaitApplied("");
  EXPECT_EQ(applied.installed().state(), v1::InstalledState::STATE_WRITING);
  EXPECT_EQ(applied.installed().update_id(), "u1");
  EXPECT_TRUE(applied.has_failure());
  // The next one mends it.
  Fill(2);
  const v1::DefineLayout next = Stage("u2", 2);
  Apply(next, 0, "u2", 2);
  EXPECT_TRUE(engine_->live(0) == Published());
  End("u2", true);
}

TEST_F(NodeModesTest, LiveMemoryIsDigestedForTheCoordinator) {
  StartDaemon();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 1);
  Fill(1);
  const v1::DefineLayout define = Stage("u1", 1);
  Pause("u1");
  Apply(define, 0, "u1", 1);
  const v1::NodeCommand apply =
      coordinator_.ApplyOf(define, "r", 0, "u1", 1, "");
  v1::NodeCommand command;
  v1::DigestWorker* digest = command.mutable_digest_worker();
  digest->set_model("models/m");
  digest->set_replica("r");
  digest->set_incarnation(apply.apply_worker().incarnation());
  digest->mutable_digest()->set_command_id("d1");
  for (int i = 0; i < kTensors; ++i) digest->mutable_digest()->add_ordinals(i);
  coordinator_.Send("a", command);
  const v1::WorkerDigests digests =
      coordinator_
          .WaitFor(
              "a",
              [](const v1::NodeReport& r) { return r.has_worker_digests(); })
          .worker_digests();
  ASSERT_EQ(digests.digests().digests_size(), kTensors);
  for (int i = 0; i < kTensors; ++i) {
    transport::DigestRun run;
    run.ordinal = static_cast<uint32_t>(i);
    run.element_count = kRows * kColumns;
    run.element_bytes = 2;
    transport::Digest expected;
    transport::DigestAccumulate(memory_ + i * kTensorBytes, run, &expected);
    EXPECT_EQ(digests.digests().digests(i).lane0(), expected.lanes[0]);
    EXPECT_EQ(digests.digests().digests(i).lane1(), expected.lanes[1]);
  }
  // One that is not here is said to be lost.
  digest->set_worker_index(7);
  coordinator_.Send("a", command);
  EXPECT_EQ(coordinator_
                .WaitFor("a",
                         [](const v1::NodeReport& r) {
                           return r.has_worker_digests();
                         })
                .worker_digests()
                .digests()
                .failure()
                .reason(),
            "WORKER_LOST");
  End("u1", true);
}

// A command that the coordinator of the term before gave may still wait in the
// worker's queue. Its successor, who may not know of it, must not take the
// memory for what it was: it could resume the engine just before it is written.
TEST_F(NodeModesTest, AnApplyThatWasRelayedCountsAsWritingUntilItIsAnswered) {
  StartDaemon();
  StartTrainer();
  absl::Notification asked, go_on;
  engine_ = std::make_unique<Engine>(address(), 1, [&] {
    if (!asked.HasBeenNotified()) asked.Notify();
    EXPECT_TRUE(go_on.WaitForNotificationWithTimeout(absl::Seconds(60)));
    return absl::OkStatus();
  });
  Fill(1);
  const v1::DefineLayout define = Stage("u1", 1);
  Pause("u1");
  coordinator_.Send("a",
                    coordinator_.ApplyOf(define, "r", 0, "u1", 1, "first"));
  ASSERT_TRUE(asked.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_NE(engine_->worker(0).installed().state(),
            v1::InstalledState::STATE_WRITING);
  coordinator_.Leave();
  coordinator_.Return();
  const v1::NodeReport joined =
      coordinator_.WaitFor("a", [](const v1::NodeReport& r) {
        return r.has_worker_joined() &&
               r.worker_joined().registration().installed().state() ==
                   v1::InstalledState::STATE_WRITING;
      });
  EXPECT_EQ(joined.worker_joined().registration().installed().update_id(),
            "u1");
  go_on.Notify();
  EXPECT_EQ(WaitApplied("first").installed().state(),
            v1::InstalledState::STATE_INSTALLED);
  // Answered: its own word counts again.
  coordinator_.Leave();
  coordinator_.Return();
  coordinator_.WaitFor("a", [](const v1::NodeReport& r) {
    return r.has_worker_joined() &&
           r.worker_joined().registration().installed().state() ==
               v1::InstalledState::STATE_INSTALLED;
  });
}

// Found by tests/chaos/simulation (seed 160790): the same for buckets of a
// STREAM that nobody goes on with; they may still lie in the worker's queue.
TEST_F(NodeModesTest, AStreamCountsAsWritingUntilItsEndIsAnswered) {
  StartDaemon();
  StartTrainer();
  absl::Notification asked, go_on;
  engine_ = std::make_unique<Engine>(address(), 1, [&] {
    if (!asked.HasBeenNotified()) asked.Notify();
    EXPECT_TRUE(go_on.WaitForNotificationWithTimeout(absl::Seconds(60)));
    return absl::OkStatus();
  });
  Fill(1);
  const v1::DefineLayout define =
      Prepare("u1", 1, v1::UPDATE_MODE_STREAM, v1::PUBLISH_MODE_SNAPSHOT);
  Pause("u1");
  Move(define, "u1", 1, 1);
  ASSERT_TRUE(asked.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_NE(engine_->worker(0).installed().state(),
            v1::InstalledState::STATE_WRITING);
  const auto joined_with = [this](v1::InstalledState::State state) {
    coordinator_.Leave();
    coordinator_.Return();
    return coordinator_
        .WaitFor(
            "a",
            [state](const v1::NodeReport& r) {
              return r.has_worker_joined() &&
                     r.worker_joined().registration().installed().state() ==
                         state;
            })
        .worker_joined()
        .registration()
        .installed()
        .update_id();
  };
  EXPECT_EQ(joined_with(v1::InstalledState::STATE_WRITING), "u1");
  go_on.Notify();
  engine_ = nullptr;  // it asks those of this test
}

// Found by tests/model: a daemon that was started again followed a coordinator
// which had been replaced and still ran, for it did not remember the newer
// term.
TEST_F(NodeModesTest, TheNewestTermOutlivesTheDaemon) {
  StartDaemon();
  const auto term_of = [](const v1::NodeReport& r) {
    return r.hello().newest_term();
  };
  const auto is_hello = [](const v1::NodeReport& r) { return r.has_hello(); };
  const auto is_done = [](const v1::NodeReport& r) {
    return r.has_hello_done();
  };
  EXPECT_EQ(term_of(coordinator_.WaitFor("a", is_hello)), 0);
  coordinator_.WaitFor("a", is_done);
  coordinator_.Leave();
  coordinator_.Return();
  EXPECT_EQ(term_of(coordinator_.WaitFor("a", is_hello)), 1);
  ASSERT_EQ(coordinator_.term(), 2);
  coordinator_.WaitFor("a", is_done);
  daemon_->Shutdown();
  daemon_ = nullptr;
  StartDaemon();
  EXPECT_EQ(term_of(coordinator_.WaitFor("a", is_hello)), 2);
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
