// Checkpoints that nodes write together and read, with real files.

#include "daemon/node/checkpoints.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/node/checkpoints_testing.h"
#include "daemon/node/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "transport/error.h"
#include "transport/file/checkpoint.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::AllOf;
using testing::CheckpointsTest;
using ::testing::HasSubstr;
using testing::ModelBuilder;
using testing::ModelBytes;
using ::testing::Not;
using testing::OneSource;
using testing::OneWriterTest;
using testing::ReadAll;
using testing::TestNode;
using testing::TestUpdate;

namespace fs = std::filesystem;

TEST_F(CheckpointsTest, NodesWriteTheirPartsOfOneCheckpoint) {
  // Both halves of every matrix along its last dimension are on another node:
  // strided pieces of the same files.
  const v1::DefineLayout define = ModelBuilder()
                                      .SmallModel(4)
                                      .FsdpRanks("a", 3)
                                      .TensorParallelWorker("b", 0, 2)
                                      .TensorParallelWorker("c", 1, 2)
                                      .Build();
  const ModelBytes model(define, 5);
  TestNode a("a", Options()), b("b", Options()), c("c", Options());
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model));
  update.End(true);
  fs::create_directories(root() / "template/sub");
  std::ofstream(root() / "template/config.json") << "{}";
  std::ofstream(root() / "template/sub/more.txt") << "more";
  std::ofstream(root() / "template/old.safetensors") << "weights";
  std::ofstream(root() / "template/model.safetensors.index.json") << "{}";

  auto begin = WriteCommand(define, v1::WriteCheckpoint::STEP_BEGIN);
  begin.set_template_path("template");
  ASSERT_EQ(Do(&b, begin).failure().message(), "");
  // What each of the three writes: a bucket goes to one that holds it.
  auto layout = ComputeNodeLayout(define, "a");
  ASSERT_TRUE(layout.ok());
  std::map<TestNode*, v1::WriteCheckpoint> parts;
  for (TestNode* node : {&a, &b, &c}) {
    ASSERT_EQ(Do(node, WriteCommand(define, v1::WriteCheckpoint::STEP_SEE))
                  .failure()
                  .message(),
              "");
    parts[node] = WriteCommand(define, v1::WriteCheckpoint::STEP_WRITE);
  }
  for (int32_t bucket = 0; bucket < layout->bucket_count(); ++bucket) {
    const auto& needs = layout->plan.need_nodes(static_cast<uint32_t>(bucket));
    const std::string holder =
        needs.empty() ? "a" : layout->nodes[static_cast<size_t>(needs[0])];
    parts[holder == "a" ? &a : holder == "b" ? &b : &c].add_buckets(bucket);
  }
  int64_t bytes = 0;
  for (auto& part : parts) {
    const v1::CheckpointWritten written = Do(part.first, part.second);
    ASSERT_EQ(written.failure().message(), "");
    bytes += written.written_bytes();
  }
  EXPECT_GT(bytes, 0);
  EXPECT_FALSE(fs::exists(root() / "runs/7"));
  auto complete = CompleteCommand(define);
  complete.set_template_path("template");
  const v1::CheckpointWritten done = Do(&b, complete);
  ASSERT_EQ(done.failure().message(), "");
  EXPECT_GT(done.shard_count(), 1);
  ExpectHolds("runs/7", define, model);
  EXPECT_EQ(ReadAll(root() / "runs/7/config.json"), "{}");
  EXPECT_EQ(ReadAll(root() / "runs/7/sub/more.txt"), "more");
  EXPECT_FALSE(fs::exists(root() / "runs/7/old.safetensors"));
  EXPECT_FALSE(fs::exists(root() / "runs/7/.marker"));
  EXPECT_FALSE(fs::exists(root() / "runs/.7.tmp"));
  EXPECT_THAT(ReadAll(root() / "runs/7/model.safetensors.index.json"),
              HasSubstr("weight_map"));
}

TEST_F(OneWriterTest, OverwritesAtOnceAndOnlyACheckpoint) {
  ASSERT_NO_FATAL_FAILURE(Start());
  for (const bool overwrite : {false, true}) {
    ASSERT_EQ(Begin(overwrite).failure().message(), "");
    ASSERT_EQ(WriteAll().failure().message(), "");
    auto complete = CompleteCommand(define_);
    complete.set_overwrite(overwrite);
    ASSERT_EQ(Do(a_.get(), complete).failure().message(), "");
    ExpectHolds("runs/7", define_, model_);
    EXPECT_FALSE(fs::exists(root() / "runs/.7.tmp"));
    EXPECT_EQ(fs::exists(root() / "runs/7/config.json"), false);
    std::ofstream(root() / "runs/7/config.json") << "{}";
  }
  EXPECT_EQ(Begin().failure().reason(), "CHECKPOINT_EXISTS");
  EXPECT_THAT(Begin().failure().message(), HasSubstr("or say overwrite"));
  // Nothing goes that no checkpoint writes, and nobody is told that it would.
  std::ofstream(root() / "runs/7/optimizer.pt") << "weeks of training";
  EXPECT_EQ(Begin().failure().reason(), "CHECKPOINT_EXISTS");
  EXPECT_THAT(Begin().failure().message(),
              AllOf(HasSubstr("overwrite would not replace it: runs/7 has "
                              "optimizer.pt"),
                    Not(HasSubstr("say overwrite"))));
  const v1::Failure mine = Begin(true).failure();
  EXPECT_EQ(mine.reason(), "CHECKPOINT_PATH_TAKEN");
  EXPECT_THAT(mine.message(), HasSubstr("runs/7 has optimizer.pt"));
  fs::remove_all(root() / "runs/7");
  fs::create_directories(root() / "runs/7");
  std::ofstream(root() / "runs/7/thesis.tex") << "years of work";
  EXPECT_EQ(Begin(true).failure().reason(), "CHECKPOINT_EXISTS");
  EXPECT_TRUE(fs::exists(root() / "runs/7/thesis.tex"));
  EXPECT_FALSE(fs::exists(root() / "runs/.7.tmp"));
}

TEST_F(OneWriterTest, WhatIsNoDirectoryIsCalledWhatItIs) {
  ASSERT_NO_FATAL_FAILURE(Start());
  fs::create_directories(root() / "runs");
  std::ofstream(root() / "runs/7") << "notes";
  EXPECT_EQ(Begin().failure().reason(), "CHECKPOINT_EXISTS");
  EXPECT_THAT(Begin().failure().message(),
              AllOf(HasSubstr("runs/7 is a file and no checkpoint"),
                    Not(HasSubstr("say overwrite"))));
  EXPECT_EQ(Begin(true).failure().reason(), "CHECKPOINT_PATH_TAKEN");
  EXPECT_THAT(Begin(true).failure().message(),
              HasSubstr("runs/7 is a file and no checkpoint"));
  fs::remove(root() / "runs/7");
  fs::create_directory_symlink("/tmp", root() / "runs/7");
  EXPECT_THAT(Begin(true).failure().message(),
              HasSubstr("runs/7 is a symbolic link and no checkpoint"));
  fs::remove(root() / "runs/7");
  // A file on the way there.
  std::ofstream(root() / "file") << "notes";
  auto begin = WriteCommand(define_, v1::WriteCheckpoint::STEP_BEGIN);
  begin.set_path("file/7");
  begin.mutable_checkpoint()->set_path("file/.7.tmp");
  const v1::Failure below = Do(a_.get(), begin).failure();
  EXPECT_EQ(below.reason(), "CHECKPOINT_PATH_TAKEN");
  EXPECT_THAT(below.message(), HasSubstr("file is a file, so that nothing can "
                                         "be saved at file/7"));
  // Beside weights of ours.
  ASSERT_EQ(Begin().failure().message(), "");
  ASSERT_EQ(WriteAll().failure().message(), "");
  ASSERT_EQ(Do(a_.get(), CompleteCommand(define_)).failure().message(), "");
  fs::create_symlink("/etc/passwd", root() / "runs/7/config.json");
  EXPECT_THAT(Begin(true).failure().message(),
              HasSubstr("runs/7 has config.json (a symbolic link)"));
}

// Neither a save nor an update that came to nothing leaves anything behind.
TEST_F(OneWriterTest, DirectoriesThatWereMadeForNothingAreRemoved) {
  ASSERT_NO_FATAL_FAILURE(Start());
  fs::create_directories(root() / "mine");
  auto begin = WriteCommand(define_, v1::WriteCheckpoint::STEP_BEGIN);
  begin.set_path("mine/updates/m/7");
  begin.mutable_checkpoint()->set_path("mine/updates/m/.7.tmp");
  auto complete = CompleteCommand(define_);
  complete.set_path(begin.path());
  complete.mutable_checkpoint()->set_path(begin.checkpoint().path());
  complete.set_update_id("u");
  complete.set_version(7);
  for (const bool written : {false, true}) {
    begin.set_command_id(absl::StrCat("begin", written));
    ASSERT_EQ(Do(a_.get(), begin).failure().message(), "");
    EXPECT_TRUE(fs::exists(root() / "mine/updates/m/.7.tmp"));
    if (written) {
      auto write = WriteCommand(define_, v1::WriteCheckpoint::STEP_WRITE);
      *write.mutable_checkpoint() = begin.checkpoint();
      write.set_path(begin.path());
      for (const int32_t bucket : buckets_) write.add_buckets(bucket);
      ASSERT_EQ(Do(a_.get(), write).failure().message(), "");
      complete.set_command_id("complete");
      ASSERT_EQ(Do(a_.get(), complete).failure().message(), "");
      EXPECT_TRUE(fs::exists(root() / "mine/updates/m/7"));
    }
    auto give_up = complete;
    give_up.set_give_up(true);
    give_up.set_command_id(absl::StrCat("give_up", written));
    ASSERT_EQ(Do(a_.get(), give_up).failure().message(), "");
    EXPECT_FALSE(fs::exists(root() / "mine/updates")) << written;
    EXPECT_TRUE(fs::exists(root() / "mine")) << "it was there before";
  }
  // What somebody has put there meanwhile stays.
  begin.set_command_id("begin3");
  ASSERT_EQ(Do(a_.get(), begin).failure().message(), "");
  std::ofstream(root() / "mine/updates/notes") << "kept";
  complete.set_give_up(true);
  complete.set_command_id("give_up3");
  ASSERT_EQ(Do(a_.get(), complete).failure().message(), "");
  EXPECT_FALSE(fs::exists(root() / "mine/updates/m"));
  EXPECT_TRUE(fs::exists(root() / "mine/updates/notes"));
}

TEST_F(OneWriterTest, ACheckpointInsideOfAnotherIsNeitherMadeNorLost) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_EQ(Begin().failure().message(), "");
  ASSERT_EQ(WriteAll().failure().message(), "");
  ASSERT_EQ(Do(a_.get(), CompleteCommand(define_)).failure().message(), "");
  auto inside = WriteCommand(define_, v1::WriteCheckpoint::STEP_BEGIN);
  inside.set_path("runs/7/sub/deep");
  inside.mutable_checkpoint()->set_path("runs/7/sub/.deep.tmp");
  const v1::Failure failure = Do(a_.get(), inside).failure();
  EXPECT_EQ(failure.reason(), "CHECKPOINT_PATH_TAKEN");
  EXPECT_THAT(failure.message(), HasSubstr("runs/7 is a checkpoint"));
  EXPECT_FALSE(fs::exists(root() / "runs/7/sub"));
  // One that lies there all the same.
  fs::create_directories(root() / "runs/7/sub");
  std::ofstream(root() / "runs/7/sub/model.safetensors") << "precious";
  EXPECT_EQ(Begin(true).failure().reason(), "CHECKPOINT_PATH_TAKEN");
  // Also when it came while the new one was being written.
  fs::rename(root() / "runs/7/sub", root() / "aside");
  ASSERT_EQ(Begin(true).failure().message(), "");
  ASSERT_EQ(WriteAll().failure().message(), "");
  fs::rename(root() / "aside", root() / "runs/7/sub");
  auto complete = CompleteCommand(define_);
  complete.set_overwrite(true);
  EXPECT_EQ(Do(a_.get(), complete).failure().reason(), "CHECKPOINT_PATH_TAKEN");
  EXPECT_EQ(ReadAll(root() / "runs/7/sub/model.safetensors"), "precious");
}

// Directories that it copied from a template are its own.
TEST_F(OneWriterTest, ReplacesAllThatItWrote) {
  ASSERT_NO_FATAL_FAILURE(Start());
  fs::create_directories(root() / "template/1_Pooling");
  std::ofstream(root() / "template/1_Pooling/config.json") << "{}";
  std::ofstream(root() / "template/modeling_mine.py") << "pass";
  for (const bool with_template : {true, false}) {
    auto begin = WriteCommand(define_, v1::WriteCheckpoint::STEP_BEGIN);
    begin.set_overwrite(true);
    ASSERT_EQ(Do(a_.get(), begin).failure().message(), "");
    ASSERT_EQ(WriteAll().failure().message(), "");
    auto complete = CompleteCommand(define_);
    complete.set_overwrite(true);
    if (with_template) complete.set_template_path("template");
    ASSERT_EQ(Do(a_.get(), complete).failure().message(), "");
    EXPECT_EQ(fs::exists(root() / "runs/7/1_Pooling/config.json"),
              with_template);
  }
}

TEST_F(OneWriterTest, GivenUpNothingIsLeft) {
  ASSERT_NO_FATAL_FAILURE(Start("state"));
  ASSERT_EQ(Begin().failure().message(), "");
  EXPECT_TRUE(fs::exists(root() / "runs/.7.tmp"));
  EXPECT_THAT(ReadAll(directory_ / "state/checkpoints"), HasSubstr(".7.tmp"));
  auto give_up = CompleteCommand(define_);
  give_up.set_give_up(true);
  EXPECT_EQ(Do(a_.get(), give_up).failure().message(), "");
  EXPECT_FALSE(fs::exists(root() / "runs/.7.tmp"));
  EXPECT_EQ(ReadAll(directory_ / "state/checkpoints"), "");
  // Another coordinator: the same.
  ASSERT_EQ(Begin().failure().message(), "");
  a_->checkpoints().AbandonAll(absl::AbortedError("gone"));
  for (int i = 0; i < 500 && fs::exists(root() / "runs/.7.tmp"); ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_FALSE(fs::exists(root() / "runs/.7.tmp"));
}

TEST_F(OneWriterTest, WhatAKilledDaemonHasLeftIsRemovedAtItsNextStart) {
  fs::create_directories(root() / "runs/.7.tmp/sub");
  fs::create_directories(root() / "runs/.8.tmp");
  fs::create_directories(root() / "runs/.8.weightsync-aside");
  std::ofstream(root() / "runs/.7.tmp/sub/file") << "half";
  std::ofstream(root() / "runs/.8.weightsync-aside/model.safetensors") << "old";
  std::ofstream(directory_ / "state/checkpoints")
      << "runs/.7.tmp\truns/7\nruns/.8.tmp\truns/8\n../../x\ty\n";
  ASSERT_NO_FATAL_FAILURE(Start("state"));
  EXPECT_FALSE(fs::exists(root() / "runs/.7.tmp"));
  EXPECT_FALSE(fs::exists(root() / "runs/.8.tmp"));
  // It was killed while it put the new one in place of the old one.
  EXPECT_EQ(ReadAll(root() / "runs/8/model.safetensors"), "old");
}

TEST_F(OneWriterTest, BadPaths) {
  ASSERT_NO_FATAL_FAILURE(Start());
  fs::create_directory(directory_ / "outside");
  fs::create_directory_symlink(directory_ / "outside", root() / "out");
  const auto begin = [&](const std::string& path,
                         const std::string& template_path = "") {
    auto command = WriteCommand(define_, v1::WriteCheckpoint::STEP_BEGIN);
    command.set_path(path);
    command.mutable_checkpoint()->set_path(path + ".tmp");
    command.set_template_path(template_path);
    return Do(a_.get(), command).failure().reason();
  };
  EXPECT_EQ(begin("../x"), "CHECKPOINT_PATH_INVALID");
  EXPECT_EQ(begin("/tmp/x"), "CHECKPOINT_PATH_INVALID");
  EXPECT_EQ(begin("out/x"), "CHECKPOINT_PATH_INVALID");
  EXPECT_EQ(begin("x", "none"), "CHECKPOINT_NOT_FOUND");
  EXPECT_EQ(begin("x", "../x"), "CHECKPOINT_PATH_INVALID");
  EXPECT_TRUE(fs::is_empty(directory_ / "outside"));
  // A template's links are not followed either.
  fs::create_directory(root() / "template");
  fs::create_symlink("/etc/passwd", root() / "template/config.json");
  ASSERT_EQ(Begin().failure().message(), "");
  ASSERT_EQ(WriteAll().failure().message(), "");
  auto complete = CompleteCommand(define_);
  complete.set_template_path("template");
  EXPECT_EQ(Do(a_.get(), complete).failure().reason(),
            "CHECKPOINT_PATH_INVALID");
  EXPECT_FALSE(fs::exists(root() / "runs/7"));
  auto give_up = CompleteCommand(define_);
  give_up.set_give_up(true);
  Do(a_.get(), give_up);
  EXPECT_FALSE(fs::exists(root() / "runs/.7.tmp"));
}

TEST_F(OneWriterTest, WhatIsSaidTwiceIsDoneOnce) {
  ASSERT_NO_FATAL_FAILURE(Start());
  auto begin = WriteCommand(define_, v1::WriteCheckpoint::STEP_BEGIN);
  EXPECT_EQ(Do(a_.get(), begin).failure().message(), "");
  EXPECT_EQ(Do(a_.get(), begin).failure().message(), "")
      << "a second time it would be there already";
}

TEST_F(OneWriterTest, NodesWithoutTheBytesTheRootOrTheSameDisk) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_EQ(Begin().failure().message(), "");
  TestNode other("other", Options());
  ASSERT_TRUE(other.layouts().Define(define_).ok());
  auto write = WriteCommand(define_, v1::WriteCheckpoint::STEP_WRITE);
  write.add_buckets(0);
  EXPECT_EQ(Do(&other, write).failure().reason(), "NO_HOLDER");
  TestNode bare("bare");
  auto see = WriteCommand(define_, v1::WriteCheckpoint::STEP_SEE);
  EXPECT_EQ(Do(&bare, see).failure().reason(), "CHECKPOINT_ROOT_MISSING");
  TestNode::Options elsewhere;
  elsewhere.checkpoint_root = (directory_ / "state").string();
  TestNode away("away", elsewhere);
  see = WriteCommand(define_, v1::WriteCheckpoint::STEP_SEE);
  const v1::Failure failure = Do(&away, see).failure();
  EXPECT_EQ(failure.reason(), "CHECKPOINT_NOT_SHARED");
  EXPECT_THAT(failure.message(), HasSubstr("node away"));
}

// ---- Keeping the newest ----

TEST_F(OneWriterTest, KeepsTheNewestOfThoseThatUpdatesCameBy) {
  ASSERT_NO_FATAL_FAILURE(Start());
  // Of what it was written with, the note says the sizes.
  const auto make = [&](const std::string& name, int version) {
    const fs::path path = root() / "updates/m" / name;
    fs::create_directories(path);
    std::ofstream(path / "model.safetensors") << "x";
    if (version == 0) return;
    std::ofstream(path / kCheckpointNote)
        << "{\"model\":\"models/m\",\"version\":" << version
        << ",\"update_id\":\"u" << version
        << "\",\"files\":{\"model.safetensors\":1}}";
  };
  make("9-u9", 9);
  make("10-u10", 10);
  make("11-u11", 11);
  make("8-u8", 8);
  make("saved", 0);
  // What somebody did with older ones is his.
  make("copy-of-7", 7);
  make("6-u6", 6);
  std::ofstream(root() / "updates/m/6-u6/config.json") << "{}";
  make("5-u5", 5);
  std::ofstream(root() / "updates/m/5-u5/model.safetensors") << "another";
  make("4-u4", 4);
  fs::create_directories(root() / "updates/m/4-u4/sub");
  make("3-u3", 3);
  fs::create_symlink("/etc/hostname", root() / "updates/m/3-u3/link");
  v1::PruneCheckpoints prune;
  prune.set_path("updates/m");
  prune.set_kept(2);
  prune.add_busy_paths("updates/m/8-u8");
  a_->checkpoints().PruneCheckpoints(prune);
  for (int i = 0; i < 500 && fs::exists(root() / "updates/m/9-u9"); ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  a_->checkpoints().Shutdown();
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(root() / "updates/m")) {
    left.push_back(entry.path().filename());
  }
  EXPECT_THAT(left, ::testing::UnorderedElementsAre(
                        "10-u10", "11-u11", "8-u8", "saved", "copy-of-7",
                        "6-u6", "5-u5", "4-u4", "3-u3"));
}

// ---- By way of disk ----

class ByDiskTest : public CheckpointsTest {
 protected:
  // What `b` is told of a checkpoint.
  v1::PrepareUpdate Prepare(const TestUpdate& update, TestNode* node,
                            const std::string& path, const std::string& marker,
                            bool load) {
    v1::PrepareUpdate prepare = update.PrepareCommand(node);
    prepare.clear_flows();
    prepare.mutable_epoch()->set_counter(1);
    prepare.mutable_checkpoint()->set_path(path);
    prepare.mutable_checkpoint()->set_marker(marker);
    prepare.set_load(load);
    return prepare;
  }
  v1::MoveUpdate Move(const TestUpdate& update, TestNode* node,
                      const std::string& path) {
    v1::MoveUpdate move = update.MoveCommand(node);
    move.mutable_epoch()->set_counter(1);
    move.mutable_checkpoint()->set_path(path);
    return move;
  }
};

TEST_F(ByDiskTest, AnUpdateWithoutGroups) {
  const v1::DefineLayout define = OneSource();
  const ModelBytes model(define, 4);
  TestNode a("a", Options()), b("b", Options());
  TestUpdate update(define, "u", 1, {&a, &b});
  update.Define();
  ASSERT_EQ(Do(&a, WriteCommand(define, v1::WriteCheckpoint::STEP_BEGIN))
                .failure()
                .message(),
            "");
  for (TestNode* node : {&a, &b}) {
    node->mover().PrepareUpdate(
        Prepare(update, node, "runs/.7.tmp", ".marker", false));
    EXPECT_EQ(node->WaitPrepared().failure().message(), "");
  }
  ASSERT_TRUE(update.Snapshot(&a, model).ok());
  auto write = WriteCommand(define, v1::WriteCheckpoint::STEP_WRITE);
  for (const int32_t bucket : BucketsOf(define, "a")) write.add_buckets(bucket);
  ASSERT_EQ(Do(&a, write).failure().message(), "");
  ASSERT_EQ(Do(&a, CompleteCommand(define)).failure().message(), "");
  for (TestNode* node : {&a, &b}) {
    node->mover().MoveUpdate(Move(update, node, "runs/7"));
  }
  update.Manifest();
  for (TestNode* node : {&a, &b}) {
    EXPECT_EQ(node->WaitVerified().failure().message(), "");
  }
  update.ExpectWorkersEqual(model);
  update.End(true);
}

TEST_F(ByDiskTest, BytesThatAreNotTheTrainersAreNotVerified) {
  const v1::DefineLayout define = OneSource();
  const ModelBytes model(define, 4);
  TestNode a("a", Options()), b("b", Options());
  TestUpdate update(define, "u", 1, {&a, &b});
  update.Define();
  Do(&a, WriteCommand(define, v1::WriteCheckpoint::STEP_BEGIN));
  b.mover().PrepareUpdate(Prepare(update, &b, "runs/.7.tmp", ".marker", false));
  EXPECT_EQ(b.WaitPrepared().failure().message(), "");
  ASSERT_TRUE(update.Snapshot(&a, model).ok());
  // Nobody has written: the files are zeros.
  ASSERT_EQ(Do(&a, CompleteCommand(define)).failure().message(), "");
  b.mover().MoveUpdate(Move(update, &b, "runs/7"));
  update.Manifest();
  EXPECT_EQ(b.WaitVerified().failure().reason(), "MANIFEST_MISMATCH");
  update.End(false);
}

TEST_F(ByDiskTest, WhatIsNotSeenIsSaidWhenItIsPrepared) {
  const v1::DefineLayout define = OneSource();
  TestNode::Options elsewhere;
  elsewhere.checkpoint_root = (directory_ / "state").string();
  TestNode b("b", elsewhere);
  TestUpdate update(define, "u", 1, {&b});
  update.Define();
  fs::create_directories(root() / "runs/.7.tmp");
  b.mover().PrepareUpdate(Prepare(update, &b, "runs/.7.tmp", ".marker", false));
  EXPECT_EQ(b.WaitPrepared().failure().reason(), "CHECKPOINT_NOT_SHARED");
  update.End(false);
}

// A checkpoint as the source: as the coordinator makes it of a LoadVersion.
TEST_F(ByDiskTest, ALoadReportsWhatItHasRead) {
  const v1::DefineLayout saved = OneSource();
  const ModelBytes model(saved, 6);
  {
    TestNode a("a", Options()), b("b", Options());
    TestUpdate update(saved, "u", 1, {&a, &b});
    ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model));
    update.End(true);
    Do(&a, WriteCommand(saved, v1::WriteCheckpoint::STEP_BEGIN));
    auto write = WriteCommand(saved, v1::WriteCheckpoint::STEP_WRITE);
    for (const int32_t bucket : BucketsOf(saved, "a")) {
      write.add_buckets(bucket);
    }
    ASSERT_EQ(Do(&a, write).failure().message(), "");
    ASSERT_EQ(Do(&a, CompleteCommand(saved)).failure().message(), "");
  }
  const v1::DefineLayout define = ModelBuilder()
                                      .SmallModel(4)
                                      .FsdpRanks("checkpoint:", 1)
                                      .TensorParallelWorker("b", 0, 2)
                                      .TensorParallelWorker("c", 1, 2)
                                      .Build();
  TestNode b("b", Options()), c("c", Options());
  TestUpdate update(define, "v", 2, {&b, &c});
  update.Define();
  std::map<int32_t, std::string> digests;
  for (TestNode* node : {&b, &c}) {
    v1::ReadCheckpoint read;
    read.set_command_id("read");
    read.set_path("runs/7");
    node->checkpoints().ReadCheckpoint(read);
    const v1::NodeReport headers = node->WaitFor(
        [](const v1::NodeReport& r) { return r.has_checkpoint_read(); });
    EXPECT_EQ(headers.checkpoint_read().failure().message(), "");
    EXPECT_EQ(headers.checkpoint_read().parameters_size(),
              define.catalog_size());
    node->mover().PrepareUpdate(Prepare(update, node, "runs/7", "", true));
    EXPECT_EQ(node->WaitPrepared().failure().message(), "");
    node->mover().MoveUpdate(Move(update, node, "runs/7"));
    const v1::NodeReport loaded = node->WaitFor(
        [](const v1::NodeReport& r) { return r.has_rank_snapshotted(); });
    EXPECT_EQ(loaded.rank_snapshotted().rank(), -1);
    for (const auto& bucket : loaded.rank_snapshotted().buckets()) {
      auto entered =
          digests.emplace(bucket.bucket(), bucket.digest().SerializeAsString());
      EXPECT_EQ(entered.first->second, bucket.digest().SerializeAsString());
      if (entered.second) *update.manifest().add_buckets() = bucket;
    }
  }
  update.Manifest();
  for (TestNode* node : {&b, &c}) {
    EXPECT_EQ(node->WaitVerified().failure().message(), "");
  }
  update.ExpectWorkersEqual(model);
  update.End(true);
}

TEST_F(ByDiskTest, AnotherModelsCheckpointNamesTheTensor) {
  fs::create_directories(root() / "c");
  const std::string json =
      "{\"x\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,1]}}";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(json.size());
  std::ofstream(root() / "c/model.safetensors") << bytes << json << "x";
  TestNode b("b", Options());
  v1::ReadCheckpoint read;
  read.set_command_id("read");
  read.set_path("c");
  b.checkpoints().ReadCheckpoint(read);
  const v1::NodeReport headers = b.WaitFor(
      [](const v1::NodeReport& r) { return r.has_checkpoint_read(); });
  EXPECT_EQ(headers.checkpoint_read().failure().reason(),
            "CHECKPOINT_MISMATCH");
  EXPECT_THAT(headers.checkpoint_read().failure().message(),
              HasSubstr("\"x\""));
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
