// Updates whose buckets come one by one.

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

class WorkerStreamTest : public WorkerTest {};

TEST_F(WorkerStreamTest, AStreamedUpdateIsInstalledAtItsEndAndNotBefore) {
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Begin(1));
  v1::WorkerReport report;
  ASSERT_TRUE(stream->Receive(&report));
  ASSERT_TRUE(report.has_writing()) << report.DebugString();
  stream->Send(Bucket(1));
  const v1::StreamBucketTaken taken = Taken(stream.get());
  EXPECT_FALSE(taken.has_failure()) << taken.DebugString();
  EXPECT_EQ(taken.update_id(), "u1");
  EXPECT_TRUE(LiveIs(1));
  EXPECT_EQ(worker_->installed().state(), v1::InstalledState::STATE_WRITING)
      << "it is not committed";
  stream->Send(End(1, /*complete=*/true));
  const v1::WorkerApplied applied = Answer(stream.get(), false);
  EXPECT_FALSE(applied.has_failure()) << applied.DebugString();
  EXPECT_EQ(applied.command_id(), "commit");
  EXPECT_EQ(applied.copied_bytes(), kBytes);
  EXPECT_EQ(applied.installed().state(), v1::InstalledState::STATE_INSTALLED);
  EXPECT_EQ(applied.installed().update_id(), "u1");
  EXPECT_EQ(applied.installed().version(), 1);
}

TEST_F(WorkerStreamTest, AStreamThatIsGivenUpLeavesAMix) {
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Begin(1));
  v1::WorkerReport report;
  ASSERT_TRUE(stream->Receive(&report));
  stream->Send(Bucket(1));
  Taken(stream.get());
  stream->Send(End(1, /*complete=*/false));
  v1::WorkerApplied applied = Answer(stream.get(), false);
  EXPECT_EQ(applied.failure().reason(), "UPDATE_ABORTED");
  EXPECT_FALSE(applied.untouched());
  EXPECT_EQ(applied.installed().state(), v1::InstalledState::STATE_WRITING);
  // Another one, in the usual way, mends it.
  stream->Send(Apply(2));
  applied = Answer(stream.get(), true);
  EXPECT_EQ(applied.installed().state(), v1::InstalledState::STATE_INSTALLED);
  EXPECT_TRUE(LiveIs(2));
}

// The daemon counts it as written to until it hears otherwise.
TEST_F(WorkerStreamTest, TheEndOfAStreamThatHadNotBegunIsAnswered) {
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(End(1, /*complete=*/false));
  const v1::WorkerApplied answer = Answer(stream.get(), false);
  EXPECT_EQ(answer.update_id(), "u1");
  EXPECT_EQ(answer.failure().reason(), "UPDATE_ABORTED");
  EXPECT_TRUE(answer.untouched());
  EXPECT_NE(answer.installed().state(), v1::InstalledState::STATE_WRITING);
}

TEST_F(WorkerStreamTest, AStreamThatLacksABucketIsNotInstalled) {
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Begin(1));
  v1::WorkerReport report;
  ASSERT_TRUE(stream->Receive(&report));
  stream->Send(End(1, /*complete=*/true));
  const v1::WorkerApplied applied = Answer(stream.get(), false);
  EXPECT_EQ(applied.failure().reason(), "STREAM_INCOMPLETE");
  EXPECT_EQ(applied.installed().state(), v1::InstalledState::STATE_WRITING);
}

TEST_F(WorkerStreamTest, ASlotThatIsUsedAgainUnderAStreamIsNoticed) {
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Begin(1));
  v1::WorkerReport report;
  ASSERT_TRUE(stream->Receive(&report));
  const v1::WorkerCommand bucket = Bucket(1);
  store_->AdvanceGeneration(0);
  stream->Send(bucket);
  EXPECT_EQ(Taken(stream.get()).failure().reason(), "STORE_SLOT_RECYCLED");
}

TEST_F(WorkerStreamTest, ABucketOfNoStreamIsRefusedAndNothingIsWritten) {
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Bucket(1));
  EXPECT_EQ(Taken(stream.get()).failure().reason(), "STREAM_UNKNOWN");
  EXPECT_TRUE(LiveIs(0));
}

TEST_F(WorkerStreamTest, TheTrainersMemoryIsReadDirectlyWithItsDigest) {
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  v1::WorkerCommand begin = Begin(1);
  // The store's arena stands for a trainer's: one bucket from two places of it.
  begin.mutable_apply()->add_ordinals(4);
  for (int part = 0; part < 2; ++part) {
    v1::DirectCopies* direct = begin.mutable_apply()->add_direct();
    direct->mutable_memory()->mutable_arena()->set_arena_id("store-1");
    direct->set_size_bytes(2 * kBytes);
    v1::TensorCopy* copy = direct->add_copies();
    copy->set_bucket_offset_bytes(part * kBytes);
    copy->set_tensor_offset_bytes(part * kBytes / 2);
    copy->set_run_bytes(kBytes / 2);
  }
  stream->Send(begin);
  v1::WorkerReport report;
  ASSERT_TRUE(stream->Receive(&report));
  ASSERT_TRUE(report.has_writing());
  // One answer for each part.
  transport::Digest sum;
  for (int part = 0; part < 2; ++part) {
    const v1::StreamBucketTaken taken = Taken(stream.get());
    EXPECT_FALSE(taken.has_failure()) << taken.DebugString();
    sum.lanes[0] += taken.digest().lane0();
    sum.lanes[1] += taken.digest().lane1();
  }
  EXPECT_EQ(live_[0], 1);
  EXPECT_EQ(live_[kBytes - 1], 2);
  transport::Digest expected;
  transport::DigestRun run;
  run.ordinal = 4;
  run.element_count = kBytes;
  run.element_bytes = 1;
  transport::DigestAccumulate(live_.data(), run, &expected);
  EXPECT_TRUE(sum == expected);
  // One that would read outside the memory is refused.
  v1::WorkerCommand outside = Begin(2);
  outside.mutable_apply()->add_ordinals(4);
  *outside.mutable_apply()->add_direct() = begin.apply().direct(1);
  outside.mutable_apply()->mutable_direct(0)->set_size_bytes(kBytes);
  stream->Send(outside);
  ASSERT_TRUE(stream->Receive(&report));
  EXPECT_EQ(Taken(stream.get()).failure().reason(), "COPY_PLAN_INVALID");
}

// `load` is a part of it: until the engine has the weights they are not there.
TEST_F(WorkerStreamTest, NobodySleepsOrDropsWhileItsEndIsWritten) {
  absl::Notification loading, go;
  options_.load = [&](const std::string&, int64_t) {
    loading.Notify();
    go.WaitForNotification();
    return absl::OkStatus();
  };
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Begin(1));
  v1::WorkerReport report;
  ASSERT_TRUE(stream->Receive(&report));
  stream->Send(Bucket(1));
  Taken(stream.get());
  stream->Send(End(1, /*complete=*/true));
  ASSERT_TRUE(loading.WaitForNotificationWithTimeout(kSoon));
  EXPECT_EQ(ErrorReason(worker_->Sleep(absl::Milliseconds(50))),
            "APPLY_RUNNING");
  EXPECT_EQ(ErrorReason(worker_->MarkDropped()), "APPLY_RUNNING");
  go.Notify();
  const v1::WorkerApplied applied = Answer(stream.get(), false);
  EXPECT_EQ(applied.installed().state(), v1::InstalledState::STATE_INSTALLED);
}

// What was dropped is not made whole by the end of the update whose buckets
// came before. When the end comes is chance, so it is tried often.
TEST_F(WorkerStreamTest, WhatIsDroppedMeanwhileIsNotInstalledAtItsEnd) {
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  for (int i = 0; i < 30; ++i) {
    stream->Send(Begin(1));
    v1::WorkerReport report;
    ASSERT_TRUE(stream->Receive(&report));
    stream->Send(Bucket(1));
    EXPECT_FALSE(Taken(stream.get()).has_failure());
    stream->Send(End(1, /*complete=*/true));
    while (!worker_->MarkDropped().ok()) {
    }
    v1::RegisterWorker registration;
    stream = Accept(&registration);
    ASSERT_NE(stream, nullptr);
    ASSERT_EQ(registration.installed().state(),
              v1::InstalledState::STATE_NOTHING);
    ASSERT_EQ(worker_->installed().state(), v1::InstalledState::STATE_NOTHING);
  }
}

}  // namespace
}  // namespace client
}  // namespace weightsync
