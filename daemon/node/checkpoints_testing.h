// Nodes with real directories below which they write checkpoints, and the
// commands of a coordinator, for tests.

#ifndef WEIGHTSYNC_DAEMON_NODE_CHECKPOINTS_TESTING_H_
#define WEIGHTSYNC_DAEMON_NODE_CHECKPOINTS_TESTING_H_

#include <sys/mount.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/node/checkpoints.h"
#include "daemon/node/testing.h"
#include "gtest/gtest.h"
#include "transport/file/checkpoint.h"

namespace weightsync {
namespace daemon {
namespace testing {

inline std::string ReadAll(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

class CheckpointsTest : public ::testing::Test {
 protected:
  CheckpointsTest() {
    std::string pattern = ::testing::TempDir() + "/checkpointsXXXXXX";
    directory_ = mkdtemp(&pattern[0]);
    std::filesystem::create_directory(directory_ / "root");
    std::filesystem::create_directory(directory_ / "state");
  }
  ~CheckpointsTest() override {
    umount2(root().c_str(), MNT_DETACH);
    std::filesystem::remove_all(directory_);
  }

  std::filesystem::path root() const { return directory_ / "root"; }
  TestNode::Options Options(const std::string& state = "") const {
    TestNode::Options options;
    options.checkpoint_root = root();
    options.state_dir = state.empty() ? "" : (directory_ / state).string();
    return options;
  }
  v1::WriteCheckpoint WriteCommand(const v1::DefineLayout& define,
                                   v1::WriteCheckpoint::Step step) {
    v1::WriteCheckpoint command;
    command.set_command_id(absl::StrCat("c", ++commands_));
    command.set_step(step);
    command.set_model(define.model());
    command.set_update_id("u");
    command.set_layout_id(define.layout_id());
    command.mutable_checkpoint()->set_path("runs/.7.tmp");
    command.mutable_checkpoint()->set_marker(".marker");
    command.set_max_shard_bytes(400000);
    command.set_path("runs/7");
    return command;
  }
  v1::CompleteCheckpoint CompleteCommand(const v1::DefineLayout& define) {
    v1::CompleteCheckpoint command;
    command.set_command_id(absl::StrCat("c", ++commands_));
    command.set_model(define.model());
    command.set_layout_id(define.layout_id());
    command.mutable_checkpoint()->set_path("runs/.7.tmp");
    command.mutable_checkpoint()->set_marker(".marker");
    command.set_max_shard_bytes(400000);
    command.set_path("runs/7");
    return command;
  }
  // What it answers.
  v1::CheckpointWritten Do(TestNode* node, const v1::WriteCheckpoint& command) {
    node->checkpoints().WriteCheckpoint(command);
    return Wait(node, command.command_id());
  }
  v1::CheckpointWritten Do(TestNode* node,
                           const v1::CompleteCheckpoint& command) {
    node->checkpoints().CompleteCheckpoint(command);
    return Wait(node, command.command_id());
  }
  v1::CheckpointWritten Wait(TestNode* node, const std::string& id) {
    return node
        ->WaitFor([&id](const v1::NodeReport& report) {
          return report.checkpoint_written().command_id() == id;
        })
        .checkpoint_written();
  }
  // The buckets that the node's ranks send.
  static std::vector<int32_t> BucketsOf(const v1::DefineLayout& define,
                                        const std::string& node) {
    auto layout = ComputeNodeLayout(define, node);
    EXPECT_TRUE(layout.ok());
    return layout->LocalSourceBuckets();
  }
  // Whether the files at `path` have exactly the model's tensors.
  void ExpectHolds(const std::string& path, const v1::DefineLayout& define,
                   const ModelBytes& model) {
    auto root = transport::RootedDirectory::Open(this->root());
    ASSERT_TRUE(root.ok());
    auto read = transport::ReadCheckpointHeaders(**root, path);
    ASSERT_TRUE(read.ok()) << read.status();
    int tensors = 0;
    for (const transport::CheckpointFile& file : read->files) {
      const std::string bytes = ReadAll(this->root() / file.path);
      for (const transport::SafetensorsTensor& tensor : file.tensors) {
        for (int i = 0; i < define.catalog_size(); ++i) {
          if (define.catalog(i).name() != tensor.name) continue;
          ++tensors;
          EXPECT_TRUE(
              bytes.substr(static_cast<size_t>(tensor.begin),
                           static_cast<size_t>(tensor.end - tensor.begin)) ==
              model.tensor(i))
              << tensor.name;
        }
      }
    }
    EXPECT_EQ(tensors, define.catalog_size());
  }

  std::filesystem::path directory_;
  int commands_ = 0;
};

// All ranks on one node, two workers on another.
inline v1::DefineLayout OneSource() {
  return ModelBuilder()
      .SmallModel(4)
      .FsdpRanks("a", 3)
      .TensorParallelWorker("b", 0, 2)
      .TensorParallelWorker("b", 1, 2)
      .Build();
}

class OneWriterTest : public CheckpointsTest {
 protected:
  // An update that is committed on node `a`.
  void Start(const std::string& state = "") {
    a_ = std::make_unique<TestNode>("a", Options(state));
    TestNode b("b", Options());
    TestUpdate update(define_, "u", 1, {a_.get(), &b});
    ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model_));
    update.End(true);
    buckets_ = BucketsOf(define_, "a");
  }
  v1::CheckpointWritten WriteAll() {
    auto write = WriteCommand(define_, v1::WriteCheckpoint::STEP_WRITE);
    for (const int32_t bucket : buckets_) write.add_buckets(bucket);
    return Do(a_.get(), write);
  }
  v1::CheckpointWritten Begin(bool overwrite = false) {
    auto begin = WriteCommand(define_, v1::WriteCheckpoint::STEP_BEGIN);
    begin.set_overwrite(overwrite);
    return Do(a_.get(), begin);
  }

  const v1::DefineLayout define_ = OneSource();
  const ModelBytes model_{define_, 3};
  std::unique_ptr<TestNode> a_;
  std::vector<int32_t> buckets_;
};

}  // namespace testing
}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_CHECKPOINTS_TESTING_H_
