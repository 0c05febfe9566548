#include "client/cc/worker.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cc/worker_testing.h"

namespace weightsync {
namespace client {
namespace {

TEST_F(WorkerTest, ATensorWithoutMemoryIsNamed) {
  StartWorker();
  Tensor tensor;
  tensor.name = "nowhere";
  tensor.dtype = v1::DTYPE_F32;
  tensor.shape = {2};
  const auto worker = Worker::Start(options_, {tensor});
  EXPECT_EQ(ErrorReason(worker.status()), "MEMORY_OUT_OF_RANGE");
  EXPECT_NE(std::string(worker.status().message()).find("nowhere"),
            std::string::npos);
}

TEST_F(WorkerTest, InstallsOneUpdateAfterAnother) {
  StartWorker();
  v1::RegisterWorker registration;
  auto stream = Accept(&registration);
  ASSERT_NE(stream, nullptr);
  EXPECT_EQ(registration.model(), "models/m");
  EXPECT_EQ(registration.tensors(0).name(), "w");
  EXPECT_EQ(registration.installed().state(),
            v1::InstalledState::STATE_UNSPECIFIED);
  EXPECT_TRUE(worker_->WaitRegistered(kSoon).ok());

  stream->Send(Apply(1));
  v1::WorkerApplied answer = Answer(stream.get(), true);
  EXPECT_FALSE(answer.has_failure()) << answer.DebugString();
  EXPECT_EQ(answer.command_id(), "c1");
  EXPECT_EQ(answer.copied_bytes(), kBytes);
  EXPECT_EQ(answer.installed().update_id(), "u1");
  EXPECT_TRUE(LiveIs(1));
  EXPECT_TRUE(worker_->WaitInstalled(1, kSoon).ok());
  EXPECT_EQ(ErrorReason(worker_->WaitInstalled(2, absl::ZeroDuration())),
            "INSTALL_TIMEOUT");

  stream->Send(Apply(2));
  answer = Answer(stream.get(), true);
  EXPECT_EQ(answer.installed().version(), 2);
  EXPECT_TRUE(LiveIs(2));
}

TEST_F(WorkerTest, ARepeatedApplyWritesNothing) {
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Apply(1));
  Answer(stream.get(), true);
  memset(live_.data(), 9, kBytes);
  stream->Send(Apply(1));
  const v1::WorkerApplied answer = Answer(stream.get(), false);
  EXPECT_FALSE(answer.has_failure());
  EXPECT_TRUE(answer.untouched());
  EXPECT_EQ(answer.command_id(), "c2");
  EXPECT_EQ(answer.installed().update_id(), "u1");
  EXPECT_TRUE(LiveIs(9));
}

TEST_F(WorkerTest, WhatCannotBeInstalledLeavesTheTensorsAlone) {
  StartWorker();
  auto stream = daemon_.AcceptWorker();
  ASSERT_NE(stream, nullptr);
  const auto refused = [&](const v1::WorkerCommand& apply) {
    stream->Send(apply);
    const v1::WorkerApplied answer = Answer(stream.get(), false);
    EXPECT_TRUE(answer.untouched());
    EXPECT_TRUE(LiveIs(0));
    return answer.failure().reason();
  };
  EXPECT_EQ(refused(Apply(1)), "COPY_PLAN_UNKNOWN");
  stream->Send(Plan());
  EXPECT_EQ(refused(Apply(1)), "ARENA_UNKNOWN");
  stream->Send(Offer());
  v1::WorkerCommand apply = Apply(1);
  apply.mutable_apply()->set_commit_term(0);
  EXPECT_EQ(refused(apply), "NOT_COMMITTED");
  apply = Apply(1);
  apply.mutable_apply()->clear_buckets();
  EXPECT_EQ(refused(apply), "BUCKET_MISSING");
  apply = Apply(1);
  apply.mutable_apply()->mutable_buckets(0)->mutable_slot()->set_offset_bytes(
      int64_t{1} << 40);
  EXPECT_EQ(refused(apply), "SLOT_OUT_OF_RANGE");
  apply = Apply(1);
  apply.mutable_apply()->mutable_buckets(0)->mutable_slot()->set_size_bytes(
      kBytes - 1);
  EXPECT_EQ(refused(apply), "COPY_PLAN_INVALID");
  apply = Apply(1);
  store_->AdvanceGeneration(0);
  EXPECT_EQ(refused(apply), "STORE_SLOT_RECYCLED");
  v1::WorkerCommand drop;
  drop.set_drop_arena_id("store-1");
  stream->Send(drop);
  EXPECT_EQ(refused(Apply(1)), "ARENA_UNKNOWN");
}

TEST_F(WorkerTest, AWrongTokenIsNamedWhenTheArenaIsNeeded) {
  StartWorker();
  auto stream = daemon_.AcceptWorker();
  ASSERT_NE(stream, nullptr);
  v1::WorkerCommand offer = Offer();
  offer.mutable_arena()->set_token("00000000000000000000000000000000");
  stream->Send(offer);
  stream->Send(Plan());
  stream->Send(Apply(1));
  EXPECT_EQ(Answer(stream.get(), false).failure().reason(), "ARENA_UNKNOWN");
  // A good offer mends it; the same offer again does no harm.
  offer = Offer();
  stream->Send(offer);
  stream->Send(offer);
  stream->Send(Apply(1));
  EXPECT_FALSE(Answer(stream.get(), true).has_failure());
  EXPECT_TRUE(LiveIs(1));
}

TEST_F(WorkerTest, BytesThatAreReusedWhileTheyAreCopiedLeaveAMix) {
  bool reuse = true;
  options_.on_writing = [&](const std::string&) {
    if (reuse) store_->AdvanceGeneration(1);
  };
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Apply(2));
  v1::WorkerApplied answer = Answer(stream.get(), true);
  EXPECT_EQ(answer.failure().reason(), "STORE_SLOT_RECYCLED");
  EXPECT_FALSE(answer.untouched());
  EXPECT_EQ(answer.installed().state(), v1::InstalledState::STATE_WRITING);
  EXPECT_EQ(worker_->installed().update_id(), "u2");
  // A failure that touches nothing does not make it whole.
  v1::WorkerCommand apply = Apply(1);
  apply.mutable_apply()->set_layout_id("other");
  stream->Send(apply);
  answer = Answer(stream.get(), false);
  EXPECT_EQ(answer.installed().state(), v1::InstalledState::STATE_WRITING);
  EXPECT_EQ(answer.installed().update_id(), "u2");
  // Applied again, whole.
  reuse = false;
  stream->Send(Apply(2));
  answer = Answer(stream.get(), true);
  EXPECT_EQ(answer.installed().state(), v1::InstalledState::STATE_INSTALLED);
  EXPECT_TRUE(LiveIs(2));
}

TEST_F(WorkerTest, AStreamThatBreaksInTheMiddleOfWriting) {
  absl::Notification writing;
  absl::Notification go_on;
  options_.on_writing = [&](const std::string&) {
    if (writing.HasBeenNotified()) return;
    writing.Notify();
    go_on.WaitForNotificationWithTimeout(kSoon);
  };
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Apply(1));
  ASSERT_TRUE(writing.WaitForNotificationWithTimeout(kSoon));
  EXPECT_EQ(worker_->installed().state(), v1::InstalledState::STATE_WRITING);
  stream->End(grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone"));
  // It does not register while it writes ...
  EXPECT_EQ(daemon_.workers().Next(absl::Milliseconds(200)), nullptr);
  go_on.Notify();
  // ... and says what it holds when it does.
  v1::RegisterWorker registration;
  stream = Accept(&registration);
  ASSERT_NE(stream, nullptr);
  EXPECT_EQ(registration.installed().state(),
            v1::InstalledState::STATE_INSTALLED);
  EXPECT_EQ(registration.installed().update_id(), "u1");
  EXPECT_TRUE(LiveIs(1));
  // The command comes again: nothing happens twice.
  stream->Send(Apply(1));
  EXPECT_TRUE(Answer(stream.get(), false).untouched());
}

TEST_F(WorkerTest, AMixIsSaidAtEveryRegistrationUntilItIsMended) {
  bool reuse = true;
  options_.on_writing = [&](const std::string&) {
    if (reuse) store_->AdvanceGeneration(0);
  };
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Apply(1));
  EXPECT_TRUE(Answer(stream.get(), true).has_failure());
  for (int i = 0; i < 2; ++i) {
    stream->End(grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone"));
    v1::RegisterWorker registration;
    stream = Accept(&registration);
    ASSERT_NE(stream, nullptr);
    EXPECT_EQ(registration.installed().state(),
              v1::InstalledState::STATE_WRITING);
    EXPECT_EQ(registration.installed().update_id(), "u1");
  }
  reuse = false;
  stream->Send(Apply(1));
  EXPECT_FALSE(Answer(stream.get(), true).has_failure());
}

TEST_F(WorkerTest, DroppedWeightsAreSaidAndComeAgain) {
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Apply(1));
  Answer(stream.get(), true);
  EXPECT_TRUE(worker_->MarkDropped().ok());
  v1::RegisterWorker registration;
  stream = Accept(&registration);
  ASSERT_NE(stream, nullptr);
  EXPECT_EQ(registration.installed().state(),
            v1::InstalledState::STATE_NOTHING);
  memset(live_.data(), 0, kBytes);
  stream->Send(Apply(1));
  EXPECT_FALSE(Answer(stream.get(), true).has_failure());
  EXPECT_TRUE(LiveIs(1));
}

TEST_F(WorkerTest, ARefusalForGoodIsTheAnswerToEveryWait) {
  StartWorker();
  auto stream = daemon_.workers().Next();
  ASSERT_NE(stream, nullptr);
  stream->End(ToGrpcStatus(ErrorStatus(absl::StatusCode::kFailedPrecondition,
                                       "SHAPE_MISMATCH", "w has 999.")));
  EXPECT_EQ(ErrorReason(worker_->WaitRegistered(kSoon)), "SHAPE_MISMATCH");
  EXPECT_EQ(ErrorReason(worker_->WaitInstalled(0, kSoon)), "SHAPE_MISMATCH");
  EXPECT_TRUE(worker_->ended());
}

TEST_F(WorkerTest, CloseWaitsForACopyAndTouchesNothingAfterwards) {
  absl::Notification writing;
  options_.on_writing = [&](const std::string&) {
    writing.Notify();
    absl::SleepFor(absl::Milliseconds(50));
  };
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Apply(1));
  ASSERT_TRUE(writing.WaitForNotificationWithTimeout(kSoon));
  worker_->Close();
  EXPECT_TRUE(LiveIs(1));
  EXPECT_TRUE(worker_->ended());
  EXPECT_EQ(ErrorReason(worker_->WaitInstalled(7, kSoon)), "CLOSED");
}

TEST_F(WorkerTest, LiveTensorsAreDigested) {
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Apply(1));
  Answer(stream.get(), true);
  live_[17] = 99;
  v1::WorkerCommand command;
  command.mutable_digest_tensors()->set_command_id("d1");
  command.mutable_digest_tensors()->add_ordinals(3);
  stream->Send(command);
  v1::WorkerReport report;
  ASSERT_TRUE(stream->Receive(&report));
  ASSERT_TRUE(report.has_tensor_digests()) << report.DebugString();
  const v1::TensorDigests& digests = report.tensor_digests();
  EXPECT_EQ(digests.command_id(), "d1");
  EXPECT_EQ(digests.installed().update_id(), "u1");
  transport::Digest expected;
  transport::DigestRun run;
  run.ordinal = 3;
  run.element_count = kBytes;
  run.element_bytes = 1;
  transport::DigestAccumulate(live_.data(), run, &expected);
  ASSERT_EQ(digests.digests_size(), 1);
  EXPECT_EQ(digests.digests(0).lane0(), expected.lanes[0]);
  command.mutable_digest_tensors()->clear_ordinals();
  stream->Send(command);
  ASSERT_TRUE(stream->Receive(&report));
  EXPECT_EQ(report.tensor_digests().failure().reason(),
            "TENSOR_COUNT_MISMATCH");
}

// An update must not be written into an engine whose memory is not there.
TEST_F(WorkerTest, NothingIsWrittenWhileTheEngineSleeps) {
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Apply(1));
  Answer(stream.get(), true);
  ASSERT_TRUE(worker_->Sleep(kSoon).ok());
  v1::RegisterWorker registration;
  stream = Accept(&registration);
  ASSERT_NE(stream, nullptr);
  EXPECT_EQ(registration.installed().state(),
            v1::InstalledState::STATE_NOTHING);
  stream->Send(Apply(2));
  v1::WorkerApplied applied = Answer(stream.get(), false);
  EXPECT_EQ(applied.failure().reason(), "WORKER_ASLEEP");
  EXPECT_TRUE(applied.untouched());
  EXPECT_TRUE(LiveIs(1));
  stream->Send(Begin(2));
  stream->Send(Bucket(2));
  EXPECT_EQ(Taken(stream.get()).failure().reason(), "WORKER_ASLEEP");
  EXPECT_TRUE(LiveIs(1));
  ASSERT_TRUE(worker_->Wake().ok());
  stream = Accept(&registration);
  ASSERT_NE(stream, nullptr);
  stream->Send(Apply(2));
  applied = Answer(stream.get(), true);
  EXPECT_FALSE(applied.has_failure()) << applied.DebugString();
  EXPECT_TRUE(LiveIs(2));
}

TEST_F(WorkerTest, AnEngineThatIsStartingIsAskedFirst) {
  bool ready = false;
  options_.may_write = [&ready]() -> absl::Status {
    if (ready) return absl::OkStatus();
    return ErrorStatus(absl::StatusCode::kFailedPrecondition, "STARTING",
                       "The weights are not allocated yet.");
  };
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Apply(1));
  const v1::WorkerApplied applied = Answer(stream.get(), false);
  EXPECT_EQ(applied.failure().reason(), "STARTING");
  EXPECT_TRUE(applied.untouched());
  EXPECT_TRUE(LiveIs(0));
  ready = true;
  stream->Send(Apply(1));
  EXPECT_FALSE(Answer(stream.get(), true).has_failure());
}

TEST_F(WorkerTest, AWorkerThatSwapsIsNeverAMix) {
  std::vector<char> spare(kBytes, 0);
  int serving = 0;
  bool fail = false;
  options_.swap = [&](int set, const std::string&) -> absl::Status {
    if (fail) return absl::InternalError("the engine is busy");
    serving = set;
    return absl::OkStatus();
  };
  options_.address = daemon_.address();
  options_.model = "m";
  options_.replica = "r";
  options_.incarnation = "i";
  Tensor tensor;
  tensor.name = "w";
  tensor.dtype = v1::DTYPE_U8;
  tensor.shape = {kBytes};
  tensor.data = live_.data();
  Tensor second = tensor;
  second.data = spare.data();
  auto worker = Worker::Start(options_, {tensor}, {second});
  ASSERT_TRUE(worker.ok()) << worker.status();
  worker_ = *std::move(worker);
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  // No word of WRITING: what serves stays whole.
  stream->Send(Apply(1));
  EXPECT_FALSE(Answer(stream.get(), false).has_failure());
  EXPECT_EQ(serving, 1);
  EXPECT_TRUE(LiveIs(0));
  EXPECT_EQ(spare[5], 1);
  stream->Send(Apply(2));
  EXPECT_FALSE(Answer(stream.get(), false).has_failure());
  EXPECT_EQ(serving, 0);
  EXPECT_TRUE(LiveIs(2));
  EXPECT_EQ(spare[5], 1);
  // An engine that does not swap keeps what it has.
  fail = true;
  stream->Send(Apply(1));
  const v1::WorkerApplied applied = Answer(stream.get(), false);
  EXPECT_TRUE(applied.has_failure());
  EXPECT_TRUE(applied.untouched());
  EXPECT_EQ(applied.installed().update_id(), "u2");
  EXPECT_EQ(applied.installed().state(), v1::InstalledState::STATE_INSTALLED);
  second.name = "v";
  EXPECT_EQ(ErrorReason(Worker::Start(options_, {tensor}, {second}).status()),
            "SWAP_INVALID");
}

TEST_F(WorkerTest, WrongArgumentsAreFoundBeforeAnyCall) {
  WorkerOptions options;
  options.model = "m";
  options.replica = "r";
  EXPECT_EQ(ErrorReason(Worker::Start(options, {}).status()), "NAME_INVALID");
  options.incarnation = "i";
  options.worker_index = 1;
  EXPECT_EQ(ErrorReason(Worker::Start(options, {}).status()),
            "WORKER_INDEX_INVALID");
  options.worker_index = 0;
  options.address = "nowhere";
  EXPECT_EQ(ErrorReason(Worker::Start(options, {}).status()),
            "ADDRESS_INVALID");
}

}  // namespace
}  // namespace client
}  // namespace weightsync
