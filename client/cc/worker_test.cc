#include "client/cc/worker.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cc/client_memory.h"
#include "client/cc/fake_daemon.h"
#include "client/cc/rpc.h"
#include "transport/host/fd_socket.h"

namespace weightsync {
namespace client {
namespace {

constexpr absl::Duration kSoon = absl::Seconds(20);

// A worker with one tensor of 1000 bytes, and a store with two slots of 1000
// bytes of which either can be its next update.
class WorkerTest : public ::testing::Test {
 protected:
  static constexpr int64_t kBytes = 1000;

  WorkerTest()
      : pool_(1),
        directory_(MakeDirectory()),
        fds_(*transport::FdServer::Start(directory_ + "/fd",
                                         transport::FdServer::Options())),
        memory_(&pool_, fds_.get(), transport::HostMemory::Options()) {
    transport::AllocateOptions options;
    options.name = "store";
    options.generation_slots = 2;
    store_ = *memory_.Allocate(2 * kBytes, options);
    memset(store_->data(), 1, kBytes);
    memset(store_->data() + kBytes, 2, kBytes);
    live_.assign(kBytes, 0);
  }

  static std::string MakeDirectory() {
    std::string directory = "/tmp/worker_test.XXXXXX";
    EXPECT_NE(mkdtemp(&directory[0]), nullptr);
    return directory;
  }

  ~WorkerTest() override {
    worker_ = nullptr;
    fds_ = nullptr;
    rmdir(directory_.c_str());
  }

  void StartWorker() {
    options_.address = daemon_.address();
    options_.model = "m";
    options_.replica = "r";
    options_.incarnation = "i";
    options_.max_backoff = absl::Milliseconds(100);
    Tensor tensor;
    tensor.name = "w";
    tensor.dtype = v1::DTYPE_U8;
    tensor.shape = {kBytes};
    tensor.data = live_.data();
    auto worker = Worker::Start(options_, {tensor});
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
  }

  v1::WorkerCommand Offer() {
    transport::ExportOptions options;
    options.read_only = true;
    options.pid = getpid();
    const auto ticket = memory_.Export(*store_, options);
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    v1::WorkerCommand command;
    v1::ArenaOffer* offer = command.mutable_arena();
    offer->set_arena_id("store-1");
    offer->set_size_bytes(store_->bytes() + 4096);
    offer->set_data_offset_bytes(4096);
    offer->set_descriptor_socket(ticket->address);
    offer->set_token(ticket->token);
    offer->set_read_only(true);
    return command;
  }

  static v1::WorkerCommand Plan() {
    v1::WorkerCommand command;
    v1::CopyPlan* plan = command.mutable_copy_plan();
    plan->set_layout_id("layout");
    v1::BucketCopies* bucket = plan->add_buckets();
    v1::TensorCopy* copy = bucket->add_copies();
    copy->set_run_bytes(kBytes);
    return command;
  }

  // Update u1 lies in slot 0, u2 in slot 1.
  v1::WorkerCommand Apply(int update) {
    v1::WorkerCommand command;
    v1::ApplyUpdate* apply = command.mutable_apply();
    apply->set_command_id(absl::StrCat("c", ++commands_));
    apply->set_update_id(absl::StrCat("u", update));
    apply->set_version(update);
    apply->set_layout_id("layout");
    apply->set_commit_term(1);
    apply->mutable_timeout()->set_seconds(20);
    v1::SlotLocation* slot = apply->add_buckets()->mutable_slot();
    slot->set_arena_id("store-1");
    slot->set_offset_bytes((update - 1) * kBytes);
    slot->set_size_bytes(kBytes);
    slot->set_generation_slot(update - 1);
    slot->set_generation(store_->Generation(update - 1));
    return command;
  }

  // Registered, with arena and plan.
  std::shared_ptr<FakeWorkerStream> Accept(
      v1::RegisterWorker* registration = nullptr) {
    auto stream = daemon_.AcceptWorker(registration);
    if (stream == nullptr) return nullptr;
    stream->Send(Offer());
    stream->Send(Plan());
    return stream;
  }

  // The answer to an apply, with or without WorkerWriting before it.
  static v1::WorkerApplied Answer(FakeWorkerStream* stream,
                                  bool writing_expected) {
    v1::WorkerReport report;
    if (writing_expected) {
      EXPECT_TRUE(stream->Receive(&report));
      EXPECT_TRUE(report.has_writing()) << report.DebugString();
    }
    EXPECT_TRUE(stream->Receive(&report));
    EXPECT_TRUE(report.has_applied()) << report.DebugString();
    return report.applied();
  }

  // Update `update` streamed: the beginning, its one bucket, its end.
  static v1::WorkerCommand Begin(int update) {
    v1::WorkerCommand command;
    v1::ApplyUpdate* apply = command.mutable_apply();
    apply->set_command_id(absl::StrCat("stream/u", update));
    apply->set_update_id(absl::StrCat("u", update));
    apply->set_version(update);
    apply->set_layout_id("layout");
    apply->set_stream(true);
    apply->mutable_timeout()->set_seconds(20);
    return command;
  }
  v1::WorkerCommand Bucket(int update) {
    v1::WorkerCommand command;
    v1::StreamBucket* bucket = command.mutable_stream_bucket();
    bucket->set_update_id(absl::StrCat("u", update));
    bucket->set_command_id(absl::StrCat("stream/u", update));
    *bucket->mutable_location()->mutable_slot() =
        Apply(update).apply().buckets(0).slot();
    return command;
  }
  static v1::WorkerCommand End(int update, bool complete) {
    v1::WorkerCommand command;
    v1::EndStream* end = command.mutable_end_stream();
    end->set_update_id(absl::StrCat("u", update));
    end->set_command_id("commit");
    end->set_complete(complete);
    return command;
  }
  static v1::StreamBucketTaken Taken(FakeWorkerStream* stream) {
    v1::WorkerReport report;
    EXPECT_TRUE(stream->Receive(&report));
    EXPECT_TRUE(report.has_stream_bucket_taken()) << report.DebugString();
    return report.stream_bucket_taken();
  }

  bool LiveIs(char value) const {
    return live_ == std::vector<char>(kBytes, value);
  }

  transport::CopyPool pool_;
  const std::string directory_;
  std::unique_ptr<transport::FdServer> fds_;
  transport::HostMemory memory_;
  std::unique_ptr<transport::Segment> store_;
  std::vector<char> live_;
  FakeDaemon daemon_;
  WorkerOptions options_;
  std::unique_ptr<Worker> worker_;
  int commands_ = 0;
};

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

TEST_F(WorkerTest, AStreamedUpdateIsInstalledAtItsEndAndNotBefore) {
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

TEST_F(WorkerTest, AStreamThatIsGivenUpLeavesAMix) {
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
TEST_F(WorkerTest, TheEndOfAStreamThatHadNotBegunIsAnswered) {
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

TEST_F(WorkerTest, AStreamThatLacksABucketIsNotInstalled) {
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

TEST_F(WorkerTest, ASlotThatIsUsedAgainUnderAStreamIsNoticed) {
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

TEST_F(WorkerTest, ABucketOfNoStreamIsRefusedAndNothingIsWritten) {
  StartWorker();
  auto stream = Accept();
  ASSERT_NE(stream, nullptr);
  stream->Send(Bucket(1));
  EXPECT_EQ(Taken(stream.get()).failure().reason(), "STREAM_UNKNOWN");
  EXPECT_TRUE(LiveIs(0));
}

TEST_F(WorkerTest, TheTrainersMemoryIsReadDirectlyWithItsDigest) {
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
