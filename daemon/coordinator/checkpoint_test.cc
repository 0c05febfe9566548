// Checkpoints: saving a version, loading one, updates by way of disk.

#include <string>
#include <vector>

#include "daemon/coordinator/checkpoint_machine.h"
#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/fake_cluster.h"
#include "daemon/coordinator/fake_expect.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Command = v1::NodeCommand;

// ---- The machine ----

class Machine {
 public:
  explicit Machine(int writers) { state.writers.resize(writers); }
  // What it does, as "see1", "write0", ...
  std::string Step(CheckpointEvent::Kind kind, int writer = 0,
                   Fault fault = Fault()) {
    CheckpointEvent event;
    event.kind = kind;
    event.writer = writer;
    event.fault = std::move(fault);
    std::string text;
    for (const CheckpointAction& action : StepCheckpoint(event, now, &state)) {
      const char* names[] = {"see", "write", "complete", "give_up", "end"};
      absl::StrAppend(&text, text.empty() ? "" : " ", names[action.kind],
                      action.writer);
    }
    return text;
  }
  std::string Answer(int writer) {
    return Step(CheckpointEvent::kAnswered, writer);
  }
  CheckpointState state;
  absl::Time now = absl::FromUnixSeconds(10);
};

TEST(CheckpointMachineTest, NobodyWritesBeforeAllSeeIt) {
  Machine m(3);
  m.state.go = true;
  for (auto& writer : m.state.writers) writer.ready = true;
  EXPECT_EQ(m.Answer(1), "") << "only the lead begins";
  EXPECT_EQ(m.Answer(0), "see1 see2");
  EXPECT_EQ(m.Answer(2), "");
  EXPECT_EQ(m.Answer(1), "write0 write1 write2");
  EXPECT_EQ(m.Answer(2), "");
  EXPECT_EQ(m.Answer(0), "");
  EXPECT_EQ(m.Answer(1), "complete0");
  EXPECT_EQ(m.Answer(1), "");
  EXPECT_EQ(m.Answer(0), "end0");
  EXPECT_EQ(m.state.stage, CheckpointStage::kDone);
  EXPECT_EQ(m.Step(CheckpointEvent::kCancel, 0,
                   Fault(absl::StatusCode::kAborted, "X", "x")),
            "");
}

TEST(CheckpointMachineTest, AWriterIsToldWhenItsBytesAreWhole) {
  Machine m(2);
  m.state.owner_sees = true;
  EXPECT_EQ(m.Answer(0), "");
  EXPECT_EQ(m.Step(CheckpointEvent::kReady, 1), "");
  EXPECT_EQ(m.Step(CheckpointEvent::kGo), "write1");
  EXPECT_EQ(m.Answer(0), "") << "it was not told to write anything";
  EXPECT_EQ(m.Answer(1), "");
  EXPECT_EQ(m.Step(CheckpointEvent::kReady, 0), "write0");
  EXPECT_EQ(m.Answer(0), "complete0");
}

TEST(CheckpointMachineTest, EveryStageCanFail) {
  const Fault full(absl::StatusCode::kResourceExhausted, "DISK_FULL", "full");
  for (int answers = 0; answers < 4; ++answers) {
    Machine m(1);
    m.state.go = true;
    m.state.writers[0].ready = true;
    for (int i = 0; i < answers; ++i) m.Answer(0);
    if (m.state.Ended()) continue;
    EXPECT_EQ(m.Step(CheckpointEvent::kAnswered, 0, full), "give_up0 end0");
    EXPECT_EQ(m.state.fault.reason, "DISK_FULL");
  }
  Machine late(2);
  late.state.deadline = late.now + absl::Seconds(1);
  late.state.late =
      Fault(absl::StatusCode::kDeadlineExceeded, "SAVE_TIMEOUT", "late");
  EXPECT_EQ(late.Step(CheckpointEvent::kTick), "");
  late.now += absl::Seconds(1);
  EXPECT_EQ(late.Step(CheckpointEvent::kTick), "give_up0 give_up1 end0");
  EXPECT_EQ(late.state.fault.reason, "SAVE_TIMEOUT");
}

// ---- Saving ----

v1::SaveVersionRequest SaveCall(const std::string& path,
                                const std::string& version = "latest") {
  v1::SaveVersionRequest call;
  call.set_name(absl::StrCat(kModel, "/versions/", version));
  call.set_path(path);
  return call;
}

std::string ReasonOf(const FakeCluster& c, int64_t request) {
  const AdminDone* done = c.Answered(request);
  return done == nullptr ? "(not answered)" : done->failure.reason();
}

// The commands about checkpoints, as "n0:begin".
std::vector<std::string> Steps(const FakeCluster& c) {
  std::vector<std::string> steps;
  for (const auto& entry : c.commands) {
    const Command& command = entry.second;
    if (command.has_write_checkpoint()) {
      const char* names[] = {"?", "begin", "see", "write"};
      steps.push_back(absl::StrCat(entry.first, ":",
                                   names[command.write_checkpoint().step()]));
    } else if (command.has_complete_checkpoint()) {
      steps.push_back(absl::StrCat(
          entry.first,
          command.complete_checkpoint().give_up() ? ":give_up" : ":complete"));
    }
  }
  return steps;
}

// Answers with a failure what `is` is true for.
void FailAt(
    FakeCluster* c,
    std::function<bool(const std::string&, const v1::WriteCheckpoint&)> is,
    const v1::Failure& failure) {
  c->intercept = [c, is, failure](const std::string& node,
                                  const Command& command) {
    if (!command.has_write_checkpoint() ||
        !is(node, command.write_checkpoint())) {
      return false;
    }
    v1::NodeReport report;
    v1::CheckpointWritten* written = report.mutable_checkpoint_written();
    written->set_command_id(command.write_checkpoint().command_id());
    *written->mutable_failure() = failure;
    c->Report(node, report);
    return true;
  };
}

// Two nodes of which each holds half of what is committed.
void AddHalves(FakeCluster* c) {
  c->AddNode("n0");
  c->AddNode("n1");
  c->AddRank(0, 2, "n0");
  c->AddRank(1, 2, "n1");
  c->Run();
  c->PublishAll(2);
  c->Run();
  ASSERT_EQ(c->Version().state(), v1::Version::STATE_ACTIVE);
}

TEST(SaveTest, OneNodeThatHasAllWritesAlone) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const int64_t call = c.Ask(SaveCall("runs//7/"));
  c.Run();
  ASSERT_EQ(ReasonOf(c, call), "");
  const auto& saved =
      absl::get<v1::SaveVersionResponse>(c.Answered(call)->response);
  EXPECT_EQ(saved.path(), "runs/7");
  EXPECT_EQ(saved.version(), 1);
  EXPECT_EQ(saved.shard_count(), 1);
  EXPECT_THAT(saved.nodes(), ElementsAre("nodes/n0"));
  EXPECT_THAT(Steps(c), ElementsAre("n0:begin", "n0:write", "n0:complete"));
  for (const auto& entry : c.commands) {
    if (!entry.second.has_write_checkpoint()) continue;
    const v1::Checkpoint& at = entry.second.write_checkpoint().checkpoint();
    EXPECT_THAT(at.path(), HasSubstr("runs/.7.weightsync-"));
    EXPECT_NE(at.marker(), "");
  }
}

// A checkpoint there would be in the way of every update that comes by disk.
TEST(SaveTest, NotWhereThoseOfUpdatesLie) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  for (const char* path : {"updates", "updates/m", "updates//m/"}) {
    const int64_t call = c.Ask(SaveCall(path));
    ASSERT_NE(c.Answered(call), nullptr) << path;
    EXPECT_EQ(c.Answered(call)->failure.reason(), "CHECKPOINT_PATH_TAKEN")
        << path;
  }
  const int64_t call = c.Ask(SaveCall("updates-of-mine"));
  c.Run();
  ASSERT_NE(c.Answered(call), nullptr);
  EXPECT_EQ(c.Answered(call)->failure.reason(), "");
}

TEST(SaveTest, SeveralNodesWriteOneAndAllSeeItFirst) {
  FakeCluster c;
  AddHalves(&c);
  const int64_t call = c.Ask(SaveCall("a"));
  c.Run();
  ASSERT_EQ(ReasonOf(c, call), "");
  EXPECT_THAT(Steps(c), ElementsAre("n0:begin", "n1:see", "n0:write",
                                    "n1:write", "n0:complete"));
  std::set<int> buckets;
  for (const auto& entry : c.commands) {
    for (const int bucket : entry.second.write_checkpoint().buckets()) {
      EXPECT_TRUE(buckets.insert(bucket).second) << bucket << " twice";
    }
  }
  EXPECT_EQ(buckets.size(), 2u);
}

TEST(SaveTest, ANodeThatDoesNotSeeItEndsItBeforeAnybodyWrites) {
  FakeCluster c;
  AddHalves(&c);
  FailAt(
      &c,
      [](const std::string& node, const v1::WriteCheckpoint&) {
        return node == "n1";
      },
      MakeFailure(9, "CHECKPOINT_NOT_SHARED", "node n1 does not see it"));
  const int64_t call = c.Ask(SaveCall("a"));
  c.Run();
  EXPECT_EQ(ReasonOf(c, call), "CHECKPOINT_NOT_SHARED");
  EXPECT_THAT(Steps(c),
              ElementsAre("n0:begin", "n1:see", "n0:give_up", "n1:give_up"));
  // The next one is none the worse.
  c.intercept = nullptr;
  const int64_t again = c.Ask(SaveCall("a"));
  c.Run();
  EXPECT_EQ(ReasonOf(c, again), "");
}

TEST(SaveTest, AFullDiskIsGivenUp) {
  FakeCluster c;
  AddHalves(&c);
  FailAt(
      &c,
      [](const std::string& node, const v1::WriteCheckpoint& write) {
        return node == "n1" && write.step() == v1::WriteCheckpoint::STEP_WRITE;
      },
      MakeFailure(8, "DISK_FULL", "full"));
  const int64_t call = c.Ask(SaveCall("a"));
  c.Run();
  EXPECT_EQ(ReasonOf(c, call), "DISK_FULL");
  EXPECT_EQ(c.Answered(call)->failure.code(), 8);
  EXPECT_EQ(First(c, "complete_checkpoint"), Last(c, "complete_checkpoint") - 1)
      << "both were told to give it up, and nobody to complete it";
}

TEST(SaveTest, WhatIsNotAnsweredEnds) {
  FakeCluster c;
  AddHalves(&c);
  c.intercept = [](const std::string&, const Command& command) {
    return command.has_write_checkpoint();
  };
  v1::SaveVersionRequest call = SaveCall("a");
  call.mutable_timeout()->set_seconds(20);
  const int64_t slow = c.Ask(call);
  c.Pass(absl::Seconds(15));
  EXPECT_EQ(ReasonOf(c, slow), "(not answered)");
  c.Pass(absl::Seconds(6));
  EXPECT_EQ(ReasonOf(c, slow), "SAVE_TIMEOUT");
  EXPECT_EQ(Steps(c).back(), "n1:give_up");
  const int64_t lost = c.Ask(SaveCall("b"));
  c.Run();
  c.Disconnect("n1");
  c.Pass(absl::Seconds(10));
  EXPECT_EQ(ReasonOf(c, lost), "NODE_LOST");
}

TEST(SaveTest, ANodeThatComesBackIsToldAgain) {
  FakeCluster c;
  AddHalves(&c);
  c.intercept = [](const std::string&, const Command& command) {
    return command.has_write_checkpoint();
  };
  const int64_t call = c.Ask(SaveCall("a"));
  c.Run();
  c.intercept = nullptr;
  c.Disconnect("n0");
  c.Reconnect("n0");
  c.Run();
  EXPECT_EQ(ReasonOf(c, call), "");
  EXPECT_THAT(Steps(c), ElementsAre("n0:begin", "n0:begin", "n1:see",
                                    "n0:write", "n1:write", "n0:complete"));
}

TEST(SaveTest, BadRequests) {
  FakeCluster c;
  c.AddStandard();
  EXPECT_EQ(ReasonOf(c, c.Ask(SaveCall("a"))), "VERSION_NOT_COMMITTED");
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(ReasonOf(c, c.Ask(SaveCall("a", "7"))), "VERSION_UNKNOWN");
  EXPECT_EQ(ReasonOf(c, c.Ask(SaveCall("../a"))), "CHECKPOINT_PATH_INVALID");
  EXPECT_EQ(ReasonOf(c, c.Ask(SaveCall("/a"))), "CHECKPOINT_PATH_INVALID");
  v1::SaveVersionRequest call = SaveCall("a");
  call.set_template_path("b/../c");
  EXPECT_EQ(ReasonOf(c, c.Ask(call)), "CHECKPOINT_PATH_INVALID");
  call = SaveCall("a");
  call.set_max_shard_bytes(7);
  EXPECT_EQ(ReasonOf(c, c.Ask(call)), "SHARD_BYTES_INVALID");
  EXPECT_EQ(Steps(c).size(), 0u);
  for (const char* node : {"n0", "n1", "n2"}) c.RestartNode(node);
  c.Run();
  EXPECT_EQ(ReasonOf(c, c.Ask(SaveCall("a", "1"))), "NO_HOLDER");
}

// ---- Updates by way of disk ----

v1::UpdateOptions By(v1::TransferMedium medium) {
  v1::UpdateOptions options;
  options.set_transfer_medium(medium);
  return options;
}

void PublishBoth(FakeCluster* c, const v1::UpdateOptions& options) {
  c->Publish(0, 0, "", options);
  c->Publish(1, 0, "", options);
  c->Run();
}

TEST(DiskTest, TheCheckpointIsSeenWrittenAndRead) {
  FakeCluster c;
  c.AddStandard();
  PublishBoth(&c, By(v1::TRANSFER_MEDIUM_DISK));
  const v1::Version version = c.Version();
  ASSERT_EQ(version.state(), v1::Version::STATE_ACTIVE)
      << version.ShortDebugString();
  ExpectAllServe(c, version.update_id());
  EXPECT_EQ(version.transfer_medium(), v1::TRANSFER_MEDIUM_DISK);
  EXPECT_THAT(version.checkpoint_path(), HasSubstr("updates/m/1-"));
  EXPECT_GT(version.wire_bytes(), 0);
  EXPECT_THAT(Steps(c), ElementsAre("n0:begin", "n0:write", "n0:complete"));
  // Begun before it can be seen, complete before it is read.
  EXPECT_LT(First(c, "write_checkpoint"), First(c, "prepare_update"));
  EXPECT_LT(Last(c, "prepare_update"), Last(c, "write_checkpoint"));
  for (const char* node : {"n0", "n1", "n2"}) {
    // A manifest of what is not prepared yet would be lost.
    EXPECT_LT(First(c, absl::StrCat("send:", node, ":prepare_update")),
              First(c, absl::StrCat("send:", node, ":update_manifest")));
  }
  EXPECT_LT(First(c, "complete_checkpoint"), First(c, "move_update"));
  EXPECT_LT(First(c, "move_update"), First(c, "pause_replica"));
  for (const auto& entry : c.commands) {
    const v1::PrepareUpdate& prepare = entry.second.prepare_update();
    if (!entry.second.has_prepare_update()) continue;
    EXPECT_EQ(prepare.flows_size(), 0);
    EXPECT_NE(prepare.checkpoint().marker(), "");
  }
  EXPECT_EQ(c.CountCommands(Command::kPruneCheckpoints), 1);
  ExpectNextPublishWorks(&c);
  EXPECT_EQ(c.Version().transfer_medium(), v1::TRANSFER_MEDIUM_NETWORK);
}

TEST(DiskTest, TheCoordinatorsDefault) {
  CoordinatorOptions options;
  options.transfer_medium = v1::TRANSFER_MEDIUM_DISK;
  FakeCluster c(options);
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.Version().transfer_medium(), v1::TRANSFER_MEDIUM_DISK);
}

TEST(DiskTest, APathThatANodeDoesNotSeeIsFoundOutBeforeAnyPause) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [&c](const std::string& node, const Command& command) {
    if (node != "n1" || !command.has_prepare_update()) return false;
    v1::NodeReport report;
    v1::UpdatePrepared* prepared = report.mutable_update_prepared();
    prepared->set_model(kModel);
    prepared->set_update_id(command.prepare_update().update_id());
    *prepared->mutable_epoch() = command.prepare_update().epoch();
    *prepared->mutable_failure() =
        MakeFailure(9, "CHECKPOINT_NOT_SHARED", "it does not see it");
    c.Report(node, report);
    return true;
  };
  PublishBoth(&c, By(v1::TRANSFER_MEDIUM_DISK));
  const v1::Version version = c.Version();
  EXPECT_EQ(version.state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(version.failure().reason(), "CHECKPOINT_NOT_SHARED");
  EXPECT_THAT(version.failure().message(), HasSubstr("n1"));
  EXPECT_EQ(c.CountCommands(Command::kPauseReplica), 0);
  EXPECT_THAT(Steps(c), ElementsAre("n0:begin", "n0:give_up"));
  ExpectNextPublishWorks(&c);
}

TEST(DiskTest, TheDeadlineOfReadingStartsWhenTheWritingHasEnded) {
  FakeCluster c;
  c.AddStandard();
  std::vector<std::pair<std::string, Command>> held;
  c.intercept = [&held](const std::string& node, const Command& command) {
    if (command.write_checkpoint().step() != v1::WriteCheckpoint::STEP_WRITE) {
      return false;
    }
    held.emplace_back(node, command);
    return true;
  };
  PublishBoth(&c, By(v1::TRANSFER_MEDIUM_DISK));
  ASSERT_EQ(held.size(), 1u);
  // Far beyond progress_timeout.
  c.Pass(absl::Minutes(5));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_MOVING);
  c.intercept = nullptr;
  c.Deliver(held[0].first, held[0].second);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  // But not for ever.
  held.clear();
  c.intercept = [](const std::string&, const Command& command) {
    return command.write_checkpoint().step() == v1::WriteCheckpoint::STEP_WRITE;
  };
  PublishBoth(&c, By(v1::TRANSFER_MEDIUM_DISK));
  c.Pass(absl::Minutes(11));
  EXPECT_EQ(c.Version().failure().reason(), "SAVE_TIMEOUT");
  EXPECT_THAT(c.Version().failure().message(),
              ::testing::HasSubstr("was not written within 10m by node n0"));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(Steps(c).back(), "n0:give_up");
  ExpectNextPublishWorks(&c);
}

TEST(DiskTest, FallsBackWhenNoGroupCanBeMade) {
  FakeCluster c;
  c.AddStandard();
  int refused = 0;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (node != "n1" || !command.has_prepare_update() ||
        command.prepare_update().has_checkpoint()) {
      return false;
    }
    ++refused;
    v1::NodeReport report;
    v1::UpdatePrepared* prepared = report.mutable_update_prepared();
    prepared->set_model(kModel);
    prepared->set_update_id(command.prepare_update().update_id());
    *prepared->mutable_epoch() = command.prepare_update().epoch();
    *prepared->mutable_failure() =
        MakeFailure(14, "PEER_LOST", "connection refused");
    c.Report(node, report);
    return true;
  };
  PublishBoth(&c, By(v1::TRANSFER_MEDIUM_NETWORK_OR_DISK));
  EXPECT_EQ(refused, 2) << "one other route is tried";
  v1::Version version = c.Version();
  EXPECT_EQ(version.state(), v1::Version::STATE_ACTIVE)
      << version.ShortDebugString();
  EXPECT_EQ(version.transfer_medium(), v1::TRANSFER_MEDIUM_DISK);
  ExpectAllServe(c, version.update_id());
  // With NETWORK alone it is given up.
  PublishBoth(&c, By(v1::TRANSFER_MEDIUM_NETWORK));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  // Where it can be had the network is taken.
  c.intercept = nullptr;
  PublishBoth(&c, By(v1::TRANSFER_MEDIUM_NETWORK_OR_DISK));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.Version().transfer_medium(), v1::TRANSFER_MEDIUM_NETWORK);
}

TEST(DiskTest, WhereTheDiskFailsTooBothReasonsAreNamed) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [&](const std::string& node, const Command& command) {
    v1::NodeReport report;
    if (command.write_checkpoint().step() == v1::WriteCheckpoint::STEP_BEGIN) {
      v1::CheckpointWritten* written = report.mutable_checkpoint_written();
      written->set_command_id(command.write_checkpoint().command_id());
      *written->mutable_failure() =
          MakeFailure(9, "CHECKPOINT_ROOT_MISSING", "no root");
    } else if (node == "n1" && command.has_prepare_update()) {
      v1::UpdatePrepared* prepared = report.mutable_update_prepared();
      prepared->set_model(kModel);
      prepared->set_update_id(command.prepare_update().update_id());
      *prepared->mutable_epoch() = command.prepare_update().epoch();
      *prepared->mutable_failure() =
          MakeFailure(14, "PEER_LOST", "connection refused");
    } else {
      return false;
    }
    c.Report(node, report);
    return true;
  };
  PublishBoth(&c, By(v1::TRANSFER_MEDIUM_NETWORK_OR_DISK));
  const v1::Version version = c.Version();
  EXPECT_EQ(version.state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(version.failure().reason(), "CHECKPOINT_ROOT_MISSING");
  EXPECT_THAT(version.failure().message(), HasSubstr("node n0: no root"));
  EXPECT_THAT(version.failure().message(),
              HasSubstr("PEER_LOST: node n1: connection refused"));
  // By disk alone there is one reason.
  PublishBoth(&c, By(v1::TRANSFER_MEDIUM_DISK));
  EXPECT_THAT(c.Version().failure().message(),
              ::testing::Not(HasSubstr("PEER_LOST")));
}

TEST(DiskTest, AVersionDoesNotNameACheckpointThatWasPruned) {
  CoordinatorOptions options;
  options.checkpoints_kept = 2;
  FakeCluster c(options);
  c.AddStandard();
  for (int i = 0; i < 4; ++i) PublishBoth(&c, By(v1::TRANSFER_MEDIUM_DISK));
  EXPECT_EQ(c.CountCommands(Command::kPruneCheckpoints), 4);
  EXPECT_EQ(c.Version("1").checkpoint_path(), "");
  EXPECT_EQ(c.Version("2").checkpoint_path(), "");
  EXPECT_THAT(c.Version("3").checkpoint_path(), HasSubstr("updates/m/3-"));
  EXPECT_THAT(c.Version("4").checkpoint_path(), HasSubstr("updates/m/4-"));
  EXPECT_EQ(c.Version("1").transfer_medium(), v1::TRANSFER_MEDIUM_DISK);
}

TEST(DiskTest, ANodeThatDoesNotAnswerIsNotWaitedForTwice) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n1" && command.has_prepare_update() &&
           !command.prepare_update().has_checkpoint();
  };
  PublishBoth(&c, By(v1::TRANSFER_MEDIUM_NETWORK_OR_DISK));
  c.Pass(absl::Seconds(31));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE)
      << c.Version().ShortDebugString();
  EXPECT_EQ(c.Version().transfer_medium(), v1::TRANSFER_MEDIUM_DISK);
}

TEST(DiskTest, AnUpdateThatIsAbortedLeavesNoCheckpoint) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [&c](const std::string& node, const Command& command) {
    if (node != "n1" || !command.has_pause_replica()) return false;
    v1::NodeReport report;
    v1::ReplicaPausedReport* paused = report.mutable_replica_paused();
    paused->set_model(kModel);
    paused->set_replica("r1");
    paused->set_incarnation(command.pause_replica().incarnation());
    paused->set_command_id(command.pause_replica().pause().command_id());
    *paused->mutable_failure() = MakeFailure(13, "HOOK_FAILED", "no");
    c.Report(node, report);
    return true;
  };
  PublishBoth(&c, By(v1::TRANSFER_MEDIUM_DISK));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.Version().checkpoint_path(), "");
  EXPECT_THAT(Steps(c),
              ElementsAre("n0:begin", "n0:write", "n0:complete", "n0:give_up"));
  for (const auto& entry : c.commands) {
    const v1::CompleteCheckpoint& end = entry.second.complete_checkpoint();
    EXPECT_TRUE(!end.give_up() || !end.update_id().empty());
  }
}

TEST(DiskTest, WhatCannotGoByDisk) {
  FakeCluster c;
  c.AddStandard();
  const auto refused = [&](v1::TransferMedium medium, bool stream) {
    v1::UpdateOptions options = By(medium);
    if (stream) {
      options.set_update_mode(v1::UPDATE_MODE_STREAM);
    } else {
      options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
    }
    const int64_t call = c.Publish(0, 0, "", options);
    c.Run();
    return c.FindReply(call)->failure().reason();
  };
  EXPECT_EQ(refused(v1::TRANSFER_MEDIUM_DISK, true),
            "UPDATE_MODE_UNIMPLEMENTED");
  EXPECT_EQ(refused(v1::TRANSFER_MEDIUM_NETWORK_OR_DISK, true),
            "UPDATE_MODE_UNIMPLEMENTED");
  EXPECT_EQ(refused(v1::TRANSFER_MEDIUM_DISK, false),
            "PUBLISH_MODE_UNIMPLEMENTED");
  const int64_t call =
      c.Publish(0, 0, "", By(static_cast<v1::TransferMedium>(9)));
  c.Run();
  EXPECT_EQ(c.FindReply(call)->failure().reason(), "OPTION_UNKNOWN");
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
