// LoadVersion: a checkpoint as a new version, with and without trainers.

#include <string>
#include <vector>

#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/fake_cluster.h"
#include "daemon/coordinator/fake_expect.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::HasSubstr;
using Command = v1::NodeCommand;

std::string ReasonOf(const FakeCluster& c, int64_t request) {
  const AdminDone* done = c.Answered(request);
  return done == nullptr ? "(not answered)" : done->failure.reason();
}

v1::LoadVersionRequest LoadCall(const std::string& path, int64_t version = 0,
                                const std::string& request_id = "") {
  v1::LoadVersionRequest call;
  call.set_name(kModel);
  call.set_path(path);
  call.set_version(version);
  call.set_request_id(request_id);
  return call;
}

TEST(LoadTest, WithoutAnyTrainer) {
  FakeCluster c;
  for (const char* node : {"n0", "n1", "n2"}) c.AddNode(node);
  c.AddReplica("r1", {"n1"});
  c.AddReplica("r2", {"n2", "n2"});
  c.Run();
  const int64_t call = c.Ask(LoadCall("a/b"));
  c.Run();
  ASSERT_EQ(ReasonOf(c, call), "");
  const auto& loaded = absl::get<v1::Version>(c.Answered(call)->response);
  EXPECT_EQ(loaded.state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(loaded.version(), 1);
  EXPECT_EQ(loaded.checkpoint_path(), "a/b");
  EXPECT_EQ(loaded.transfer_medium(), v1::TRANSFER_MEDIUM_DISK);
  EXPECT_EQ(loaded.ranks_size(), 0);
  ASSERT_EQ(loaded.nodes_size(), 2);
  EXPECT_EQ(loaded.nodes(0).node(), "n1");
  ExpectAllServe(c, loaded.update_id());
  EXPECT_EQ(c.CountCommands(Command::kWriteCheckpoint), 0);
  // Trainers come, and go on from there.
  c.AddRank(0, 2, "n0");
  c.AddRank(1, 2, "n0");
  ExpectNextPublishWorks(&c);
  EXPECT_EQ(c.Version().version(), 2);
}

TEST(LoadTest, BesideTrainersAndTheirNumbers) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(ReasonOf(c, c.Ask(LoadCall("a", 1))), "VERSION_NOT_NEWER");
  const int64_t call = c.Ask(LoadCall("a", 7));
  c.Run();
  ASSERT_EQ(ReasonOf(c, call), "");
  EXPECT_EQ(c.Version().version(), 7);
  ExpectAllServe(c, c.Version().update_id());
  // One rank calls, and waits for the other; the load does not count as theirs.
  c.Publish(0);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_GATHERING);
  const int64_t behind = c.Ask(LoadCall("b"));
  c.Run();
  EXPECT_EQ(ReasonOf(c, behind), "(not answered)");
  c.Publish(1);
  c.Run();
  ASSERT_EQ(ReasonOf(c, behind), "");
  EXPECT_EQ(absl::get<v1::Version>(c.Answered(behind)->response).version(), 9);
  ExpectAllServe(c, c.Version().update_id());
  ExpectNextPublishWorks(&c);
  EXPECT_EQ(c.Version().version(), 10);
}

TEST(LoadTest, AVersionThatIsLoadedOutlivesTheCoordinator) {
  FakeCluster c;
  for (const char* node : {"n0", "n1"}) c.AddNode(node);
  c.AddReplica("r1", {"n1"});
  c.Run();
  const int64_t call = c.Ask(LoadCall("a", 0, "once"));
  c.Run();
  ASSERT_EQ(ReasonOf(c, call), "");
  const std::string update_id = c.Version().update_id();
  c.RestartCoordinator();
  c.Run();
  c.Pass(absl::Seconds(2));
  EXPECT_EQ(c.Version().update_id(), update_id);
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, update_id);
  // Said again.
  const int applies = c.engines["r1"].applies;
  const int64_t again = c.Ask(LoadCall("a", 0, "once"));
  c.Run();
  ASSERT_EQ(ReasonOf(c, again), "");
  EXPECT_EQ(absl::get<v1::Version>(c.Answered(again)->response).update_id(),
            update_id);
  EXPECT_EQ(c.engines["r1"].applies, applies);
  // A late joiner gets it from the nodes that have read it.
  c.AddNode("n2");
  c.AddReplica("r2", {"n2"});
  c.Run();
  c.Pass(absl::Seconds(40));
  ExpectAllServe(c, update_id);
}

TEST(LoadTest, NodesThatReadDifferentBytes) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const std::string before = c.Version().update_id();
  const int pauses = c.engines["r1"].pauses;
  c.damaged_reader = "n2";
  const int64_t call = c.Ask(LoadCall("a"));
  c.Run();
  EXPECT_EQ(ReasonOf(c, call), "CHECKPOINT_NOT_SHARED");
  EXPECT_EQ(c.engines["r1"].pauses, pauses);
  ExpectAllServe(c, before);
  ExpectNextPublishWorks(&c);
}

TEST(LoadTest, ANodeThatIsLostLeavesTheOthers) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_move_update();
  };
  const int64_t call = c.Ask(LoadCall("a"));
  c.Run();
  EXPECT_EQ(ReasonOf(c, call), "(not answered)");
  c.Disconnect("n2");
  c.Pass(absl::Seconds(10));
  ASSERT_EQ(ReasonOf(c, call), "");
  EXPECT_EQ(c.engines["r1"].workers[0].update_id(), c.Version().update_id());
  EXPECT_EQ(c.violations, 0);
}

TEST(LoadTest, RefusedBeforeAnybodyPauses) {
  FakeCluster c;
  c.AddStandard();
  v1::Failure failure;
  std::string lacks;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (!command.has_read_checkpoint()) return false;
    v1::NodeReport report;
    v1::CheckpointRead* read = report.mutable_checkpoint_read();
    read->set_command_id(command.read_checkpoint().command_id());
    *read->mutable_failure() = failure;
    for (const char* name : {"w", "x"}) {
      if (name == lacks) continue;
      v1::Parameter* parameter = read->add_parameters();
      parameter->set_name(name);
      parameter->set_dtype(v1::DTYPE_BF16);
      parameter->add_shape(8);
      parameter->add_shape(lacks == "shape" ? 9 : 8);
    }
    c.Report(node, report);
    return true;
  };
  const auto load = [&](const std::string& what) {
    lacks = what;
    const int64_t call = c.Ask(LoadCall("a"));
    c.Run();
    const AdminDone* done = c.Answered(call);
    return done == nullptr ? "(not answered)"
                           : absl::StrCat(done->failure.reason(), ": ",
                                          done->failure.message());
  };
  EXPECT_THAT(load("w"), HasSubstr("CHECKPOINT_MISMATCH: a: the checkpoint "
                                   "lacks \"w\""));
  EXPECT_THAT(load("shape"), HasSubstr("\"w\" is BF16 [8, 9]"));
  EXPECT_THAT(load(""), HasSubstr("has \"x\", which models/m has not"));
  failure = MakeFailure(9, "CHECKPOINT_DAMAGED", "model.safetensors: no");
  EXPECT_THAT(load(""), HasSubstr("CHECKPOINT_DAMAGED: node n2"));
  EXPECT_EQ(c.CountCommands(Command::kPauseReplica), 0);
  c.intercept = nullptr;
  EXPECT_EQ(ReasonOf(c, c.Ask(LoadCall("/a"))), "CHECKPOINT_PATH_INVALID");
  v1::LoadVersionRequest call = LoadCall("a");
  call.mutable_options()->set_update_mode(v1::UPDATE_MODE_STREAM);
  EXPECT_EQ(ReasonOf(c, c.Ask(call)), "UPDATE_MODE_UNIMPLEMENTED");
  EXPECT_EQ(ReasonOf(c, c.Ask(LoadCall("a", -1))), "VERSION_INVALID");
  call = LoadCall("a");
  call.set_name("models/none");
  EXPECT_EQ(ReasonOf(c, c.Ask(call)), "MODEL_UNKNOWN");
  ExpectNextPublishWorks(&c);
  EXPECT_EQ(c.Version().version(), 1) << "no number was used up";
}

TEST(LoadTest, NobodyWantsIt) {
  FakeCluster c;
  c.AddNode("n0");
  c.AddRank(0, 1, "n0");
  c.Run();
  EXPECT_EQ(ReasonOf(c, c.Ask(LoadCall("a"))), "NO_WORKERS");
}

TEST(LoadTest, AReaderThatDoesNotAnswer) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string&, const Command& command) {
    return command.has_read_checkpoint();
  };
  const int64_t call = c.Ask(LoadCall("a"));
  c.Pass(absl::Seconds(31));
  EXPECT_EQ(ReasonOf(c, call), "PREPARE_TIMEOUT");
  ExpectNextPublishWorks(&c);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
