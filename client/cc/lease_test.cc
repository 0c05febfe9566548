#include "client/cc/lease.h"

#include <gtest/gtest.h>

#include "client/cc/fake_daemon.h"
#include "client/cc/rpc.h"

namespace weightsync {
namespace client {
namespace {

using TestLease = Lease<v1::WorkerReport, v1::WorkerCommand>;

class LeaseTest : public ::testing::Test {
 protected:
  TestLease::Callbacks Callbacks() {
    auto channel = MakeChannel(daemon_.address());
    stub_ = v1::ReplicaService::NewStub(*channel);
    TestLease::Callbacks callbacks;
    callbacks.start = [this](grpc::ClientContext* context, auto* reactor) {
      stub_->async()->RunWorker(context, reactor);
    };
    callbacks.registration = [] {
      v1::WorkerReport report;
      report.mutable_register_()->set_model("models/m");
      return report;
    };
    callbacks.heartbeat = [] {
      v1::WorkerReport report;
      report.mutable_heartbeat();
      return report;
    };
    callbacks.accepted = [](const v1::WorkerCommand& command,
                            LeaseTerms* terms) {
      terms->heartbeat_interval =
          absl::Nanoseconds(command.registered().heartbeat_interval().nanos()) +
          absl::Seconds(command.registered().heartbeat_interval().seconds());
      terms->heartbeat_timeout =
          absl::Nanoseconds(command.registered().heartbeat_timeout().nanos()) +
          absl::Seconds(command.registered().heartbeat_timeout().seconds());
      return command.has_registered();
    };
    callbacks.message = [](const v1::WorkerCommand&, uint64_t) {};
    return callbacks;
  }

  static LeaseOptions Options() {
    LeaseOptions options;
    options.what = "worker";
    options.first_backoff = absl::Milliseconds(10);
    options.max_backoff = absl::Milliseconds(50);
    return options;
  }

  static absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

  FakeDaemon daemon_;
  std::unique_ptr<v1::ReplicaService::Stub> stub_;
};

TEST_F(LeaseTest, RegistersBeatsAndDeregisters) {
  TestLease lease(Options(), Callbacks());
  lease.Start();
  auto stream = daemon_.AcceptWorker(nullptr, absl::Milliseconds(5));
  ASSERT_NE(stream, nullptr);
  EXPECT_TRUE(lease.WaitRegistered(Soon()).ok());
  EXPECT_TRUE(stream->WaitHeartbeats(5));
  lease.Stop();
  EXPECT_TRUE(stream->WaitClientDone());
  EXPECT_TRUE(lease.ended());
  EXPECT_EQ(ErrorReason(lease.status()), "CLOSED");
}

TEST_F(LeaseTest, RegistersAgainAfterABrokenStream) {
  TestLease lease(Options(), Callbacks());
  lease.Start();
  for (int i = 0; i < 3; ++i) {
    auto stream = daemon_.AcceptWorker();
    ASSERT_NE(stream, nullptr);
    stream->End(ToGrpcStatus(ErrorStatus(absl::StatusCode::kUnavailable,
                                         "SHUTTING_DOWN", "Come back.")));
  }
  auto stream = daemon_.AcceptWorker();
  ASSERT_NE(stream, nullptr);
  EXPECT_TRUE(lease.WaitRegistered(Soon()).ok());
}

TEST_F(LeaseTest, ADaemonThatStandsStillIsLeft) {
  TestLease lease(Options(), Callbacks());
  lease.Start();
  auto silent = daemon_.AcceptWorker(nullptr, absl::Milliseconds(20),
                                     absl::Milliseconds(100));
  ASSERT_NE(silent, nullptr);
  silent->Mute();
  auto next = daemon_.AcceptWorker();
  ASSERT_NE(next, nullptr) << "the lease did not notice the silence";
  EXPECT_TRUE(silent->WaitClientDone());
}

TEST_F(LeaseTest, AnAnswerThatCannotChangeEndsIt) {
  TestLease lease(Options(), Callbacks());
  lease.Start();
  auto stream = daemon_.workers().Next();
  ASSERT_NE(stream, nullptr);
  stream->End(
      ToGrpcStatus(ErrorStatus(absl::StatusCode::kFailedPrecondition,
                               "PARAMETER_UNKNOWN", "No such parameter: x.")));
  const absl::Status status = lease.WaitRegistered(Soon());
  EXPECT_EQ(ErrorReason(status), "PARAMETER_UNKNOWN");
  EXPECT_TRUE(lease.WaitEnded(Soon()));
}

// A trainer with another catalog came, and goes again: what served before it
// does not have to be started anew.
TEST_F(LeaseTest, WhatFittedOnceIsAskedForAgain) {
  LeaseOptions options = Options();
  options.outlives_misfit = true;
  TestLease lease(options, Callbacks());
  lease.Start();
  auto stream = daemon_.AcceptWorker();
  ASSERT_NE(stream, nullptr);
  ASSERT_TRUE(lease.WaitRegistered(Soon()).ok());
  const grpc::Status misfit =
      ToGrpcStatus(ErrorStatus(absl::StatusCode::kFailedPrecondition,
                               "PARAMETER_UNKNOWN", "No such parameter: x."));
  stream->End(misfit);
  for (int i = 0; i < 3; ++i) {
    stream = daemon_.workers().Next();
    ASSERT_NE(stream, nullptr) << i;
    EXPECT_FALSE(lease.ended());
    stream->End(misfit);
  }
  ASSERT_NE(daemon_.AcceptWorker(), nullptr);
  EXPECT_TRUE(lease.WaitRegistered(Soon()).ok());
}

TEST_F(LeaseTest, ANameThatAPredecessorHoldsIsAskedForAgainForAWhile) {
  LeaseOptions options = Options();
  options.taken_grace = absl::Milliseconds(100);
  TestLease lease(options, Callbacks());
  lease.Start();
  const auto refuse = [&] {
    auto stream = daemon_.workers().Next();
    if (stream == nullptr) return false;
    stream->End(ToGrpcStatus(ErrorStatus(absl::StatusCode::kAlreadyExists,
                                         "WORKER_TAKEN", "It is taken.")));
    return true;
  };
  ASSERT_TRUE(refuse());
  ASSERT_TRUE(refuse());
  // And in the end it gives up.
  while (!lease.ended()) {
    auto stream = daemon_.workers().Next(absl::Milliseconds(20));
    if (stream != nullptr) {
      stream->End(ToGrpcStatus(ErrorStatus(absl::StatusCode::kAlreadyExists,
                                           "WORKER_TAKEN", "It is taken.")));
    }
  }
  EXPECT_EQ(ErrorReason(lease.status()), "WORKER_TAKEN");
}

TEST_F(LeaseTest, ADaemonThatMakesRoomIsWaitedFor) {
  LeaseOptions options = Options();
  options.register_timeout = absl::Milliseconds(1500);
  TestLease lease(options, Callbacks());
  lease.Start();
  auto stream = daemon_.workers().Next();
  ASSERT_NE(stream, nullptr);
  v1::WorkerReport report;
  ASSERT_TRUE(stream->Receive(&report));
  // It answers heartbeats, for longer than the timeout.
  EXPECT_TRUE(stream->WaitHeartbeats(3));
  v1::WorkerCommand command;
  command.mutable_registered();
  stream->Send(command);
  EXPECT_TRUE(lease.WaitRegistered(Soon()).ok());
}

TEST_F(LeaseTest, NobodyAnswersAndTheCallerIsToldWhy) {
  LeaseOptions options = Options();
  options.register_timeout = absl::Milliseconds(100);
  daemon_.Stop();
  TestLease lease(options, Callbacks());
  lease.Start();
  const absl::Status status =
      lease.WaitRegistered(absl::Now() + absl::Milliseconds(300));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status));
  EXPECT_EQ(ErrorReason(status), "REGISTER_TIMEOUT");
  EXPECT_FALSE(lease.ended());
}

TEST_F(LeaseTest, StopDoesNotWaitForADaemonThatStandsStill) {
  LeaseOptions options = Options();
  options.stop_timeout = absl::Milliseconds(50);
  TestLease lease(options, Callbacks());
  lease.Start();
  auto stream = daemon_.workers().Next();  // never accepted
  ASSERT_NE(stream, nullptr);
  const absl::Time start = absl::Now();
  lease.Stop();
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST_F(LeaseTest, WritesGoToTheStreamTheyAreFor) {
  absl::Mutex mutex;
  uint64_t number = 0;
  auto callbacks = Callbacks();
  callbacks.message = [&](const v1::WorkerCommand& command, uint64_t stream) {
    if (!command.has_copy_plan()) return;
    absl::MutexLock lock(&mutex);
    number = stream;
  };
  TestLease lease(Options(), callbacks);
  lease.Start();
  v1::WorkerCommand plan;
  plan.mutable_copy_plan();
  const auto number_of = [&](uint64_t than) {
    absl::MutexLock lock(&mutex);
    const auto newer = [&] { return number > than; };
    mutex.Await(absl::Condition(&newer));
    return number;
  };
  auto first = daemon_.AcceptWorker();
  ASSERT_NE(first, nullptr);
  first->Send(plan);
  const uint64_t one = number_of(0);
  v1::WorkerReport report;
  report.mutable_applied()->set_update_id("u");
  EXPECT_TRUE(lease.Write(one, report));
  EXPECT_TRUE(lease.Flush(one, Soon()));
  ASSERT_TRUE(first->Receive(&report));
  EXPECT_EQ(report.applied().update_id(), "u");
  first->End(grpc::Status::OK);
  auto second = daemon_.AcceptWorker();
  ASSERT_NE(second, nullptr);
  second->Send(plan);
  const uint64_t two = number_of(one);
  EXPECT_FALSE(lease.Write(one, report));
  EXPECT_FALSE(lease.Flush(one, Soon()));
  EXPECT_TRUE(lease.Write(two, report));
}

}  // namespace
}  // namespace client
}  // namespace weightsync
