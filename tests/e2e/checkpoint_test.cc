// Checkpoints with real daemons: weightsyncctl save and load, updates by way of
// disk, the fallback to it, and what a kill leaves.

#include "transport/file/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/daemon.h"
#include "nlohmann/json.hpp"
#include "proto/status.h"
#include "tests/e2e/cluster.h"
#include "transport/fault/fault_policy.h"

namespace weightsync {
namespace e2e {
namespace {

using ::testing::HasSubstr;

namespace fs = std::filesystem;

class CheckpointTest : public ::testing::Test {
 protected:
  fs::path root() const { return fs::path(cluster_.directory().path()) / "cp"; }

  // a coordinates; every node sees the same root.
  void StartNodes(const std::vector<std::string>& nodes,
                  std::vector<std::string> flags = {}) {
    fs::create_directory(root());
    flags.push_back("--checkpoint_root=" + root().string());
    for (const std::string& node : nodes) {
      ASSERT_TRUE(cluster_.StartNode(node, flags));
    }
  }
  void StartReplicas() {
    b_ = std::make_unique<TestReplica>(&cluster_, "b", "rb", 2);
    c_ = std::make_unique<TestReplica>(&cluster_, "c", "rc", 1);
    ASSERT_TRUE(cluster_.WaitReplicaState("rb", v1::Replica::STATE_SERVING));
    ASSERT_TRUE(cluster_.WaitReplicaState("rc", v1::Replica::STATE_SERVING));
  }
  void ExpectServed(char value) {
    EXPECT_TRUE(b_->WaitServes(value));
    EXPECT_TRUE(c_->WaitServes(value));
  }
  void TearDown() override {
    for (const auto* replica : {&b_, &c_}) {
      if (*replica == nullptr) continue;
      EXPECT_FALSE((*replica)->SawMix());
      EXPECT_FALSE((*replica)->SawWriteWhileServing());
    }
  }
  int Ctl(std::vector<std::string> arguments, const std::string& at = "a") {
    arguments.insert(arguments.begin(), "client/ctl/weightsyncctl");
    arguments.push_back("--address=" + cluster_.address(at));
    arguments.push_back("--timeout=40s");
    const std::string name = absl::StrCat("ctl", ++runs_);
    const auto process = cluster_.Start(name, arguments);
    const auto code = process->Wait(kPatience);
    std::ifstream log(cluster_.directory().path() + "/" + name + ".log");
    printed_.assign(std::istreambuf_iterator<char>(log), {});
    return code.value_or(-1);
  }
  // Every tensor of the model, each byte of this value.
  void ExpectHolds(const std::string& path, char value) {
    auto opened = transport::RootedDirectory::Open(root());
    ASSERT_TRUE(opened.ok());
    auto read = transport::ReadCheckpointHeaders(**opened, path);
    ASSERT_TRUE(read.ok()) << read.status();
    size_t tensors = 0;
    for (const transport::CheckpointFile& file : read->files) {
      std::ifstream stream(root() / file.path, std::ios::binary);
      const std::string bytes(std::istreambuf_iterator<char>(stream), {});
      const size_t begin = static_cast<size_t>(file.tensors[0].begin);
      EXPECT_EQ(bytes.find_first_not_of(value, begin), std::string::npos)
          << file.path;
      tensors += file.tensors.size();
    }
    EXPECT_EQ(tensors, TestParameters().size());
  }
  // Names below the root, but for those of nodes that keep none.
  std::vector<std::string> Below(const std::string& path) {
    std::vector<std::string> names;
    if (!fs::exists(root() / path)) return names;
    for (const auto& entry : fs::directory_iterator(root() / path)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  Cluster cluster_;
  std::unique_ptr<TestReplica> b_;
  std::unique_ptr<TestReplica> c_;
  std::string printed_;
  int runs_ = 0;
};

TEST_F(CheckpointTest, SavesAndLoads) {
  StartNodes({"a", "b", "c"});
  StartReplicas();
  TestTrainer trainer(&cluster_, "a", 2);
  ASSERT_TRUE(trainer.Publish(1).ok());
  fs::create_directory(root() / "hf");
  std::ofstream(root() / "hf/config.json") << "{\"model_type\":\"x\"}";
  ASSERT_EQ(Ctl({"save", "test", "1", "runs/one", "--template=hf",
                 "--max_shard_bytes=20000", "--json"}),
            0)
      << printed_;
  const auto saved = nlohmann::json::parse(printed_, nullptr, false);
  ASSERT_FALSE(saved.is_discarded()) << printed_;
  EXPECT_EQ(saved["path"], "runs/one");
  EXPECT_EQ(saved["shardCount"], 2);
  ExpectHolds("runs/one", 1);
  EXPECT_TRUE(fs::exists(root() / "runs/one/config.json"));
  EXPECT_THAT(Below("runs"), ::testing::ElementsAre("one"));

  ASSERT_TRUE(trainer.Publish(2).ok());
  // By way of another daemon, the newest, in place of the old one.
  EXPECT_EQ(Ctl({"save", "test", "runs/one"}, "c"), 1);
  EXPECT_THAT(printed_, HasSubstr("CHECKPOINT_EXISTS"));
  ExpectHolds("runs/one", 1);
  ASSERT_EQ(Ctl({"save", "test", "runs/one", "--overwrite"}, "c"), 0)
      << printed_;
  EXPECT_THAT(printed_, HasSubstr("version 2 is at runs/one"));
  ExpectHolds("runs/one", 2);
  EXPECT_THAT(Below("runs"), ::testing::ElementsAre("one"));
  ASSERT_EQ(Ctl({"save", "test/1", "runs/old"}), 0) << printed_;
  ExpectHolds("runs/old", 1);

  ASSERT_EQ(Ctl({"load", "test", "runs/old", "--version=9"}), 0) << printed_;
  ExpectServed(1);
  EXPECT_EQ(Ctl({"verify", "test/rb"}), 0) << printed_;
  EXPECT_EQ(Ctl({"verify", "test/rc"}), 0) << printed_;
  // Trainers go on above it.
  const auto next = trainer.Publish(3);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->version(), 10);
  ExpectServed(3);

  EXPECT_EQ(Ctl({"load", "test", "runs/none"}), 4);
  EXPECT_THAT(printed_, HasSubstr("CHECKPOINT_NOT_FOUND"));
  EXPECT_EQ(Ctl({"load", "test", "../x"}), 1);
  EXPECT_THAT(printed_, HasSubstr("CHECKPOINT_PATH_INVALID"));
  fs::resize_file(root() / "runs/one/model.safetensors",
                  fs::file_size(root() / "runs/one/model.safetensors") - 1);
  const int pauses = b_->pauses();
  EXPECT_EQ(Ctl({"load", "test", "runs/one"}), 1);
  EXPECT_THAT(printed_, HasSubstr("CHECKPOINT_DAMAGED"));
  EXPECT_EQ(b_->pauses(), pauses);
  EXPECT_EQ(Ctl({"load", "test"}), 2);
  EXPECT_EQ(Ctl({"save", "test/1"}), 2);
  EXPECT_EQ(Ctl({"status", "--overwrite"}), 2);
}

TEST_F(CheckpointTest, LoadsWithoutATrainer) {
  StartNodes({"a", "b", "c"});
  StartReplicas();
  {
    TestTrainer trainer(&cluster_, "a", 1);
    ASSERT_TRUE(trainer.Publish(5).ok());
    ASSERT_EQ(Ctl({"save", "test", "five"}), 0) << printed_;
    ASSERT_TRUE(trainer.Publish(6).ok());
    ExpectServed(6);
  }
  // Nothing of the one who made it is left: neither trainer nor store.
  cluster_.KillNode("a");
  b_.reset();
  c_.reset();
  for (const char* node : {"b", "c"}) cluster_.KillNode(node);
  fs::remove_all(cluster_.directory().path() + "/a.state");
  for (const char* node : {"a", "b", "c"}) {
    fs::remove_all(cluster_.directory().path() + "/" + node + ".state");
  }
  for (const char* node : {"a", "b", "c"}) {
    ASSERT_TRUE(cluster_.RestartNode(node));
  }
  StartReplicas();
  ASSERT_EQ(Ctl({"load", "test", "five", "--pause_mode=keep"}), 0) << printed_;
  EXPECT_THAT(printed_, HasSubstr("ACTIVE"));
  ExpectServed(5);
  EXPECT_EQ(b_->last_pause_mode(), v1::PAUSE_MODE_KEEP);
  TestTrainer trainer(&cluster_, "a", 2);
  ASSERT_TRUE(trainer.Publish(7).ok());
  ExpectServed(7);
}

TEST_F(CheckpointTest, ByWayOfDiskWithSourcesOnTwoNodes) {
  StartNodes({"a", "b", "c"}, {"--update=disk", "--checkpoints_kept=1"});
  StartReplicas();
  // b has a rank and workers, a has a rank alone, c workers alone.
  TestTrainer trainer(&cluster_, std::vector<std::string>{"a", "b"});
  for (char value = 1; value <= 3; ++value) {
    const auto version = trainer.Publish(value);
    ASSERT_TRUE(version.ok()) << version.status();
    EXPECT_EQ(version->transfer_medium(), v1::TRANSFER_MEDIUM_DISK);
    ExpectServed(value);
    ExpectHolds(version->checkpoint_path(), value);
  }
  // Of the three, one is kept.
  EXPECT_TRUE(WaitUntil([&] { return Below("updates/test").size() == 1; }));
  // One that says otherwise goes by the network.
  v1::UpdateOptions options;
  options.set_transfer_medium(v1::TRANSFER_MEDIUM_NETWORK);
  trainer.SetOptions(options);
  const auto version = trainer.Publish(4);
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(version->transfer_medium(), v1::TRANSFER_MEDIUM_NETWORK);
  ExpectServed(4);
}

TEST_F(CheckpointTest, APathThatANodeDoesNotSeePausesNobody) {
  fs::create_directory(root());
  const std::string flag = "--checkpoint_root=" + root().string();
  ASSERT_TRUE(cluster_.StartNode("a", {flag, "--update=disk"}));
  ASSERT_TRUE(cluster_.StartNode("b", {flag}));
  const std::string other = cluster_.directory().path() + "/elsewhere";
  fs::create_directory(other);
  ASSERT_TRUE(cluster_.StartNode("c", {"--checkpoint_root=" + other}));
  StartReplicas();
  TestTrainer trainer(&cluster_, "a", 2);
  const auto version = trainer.Publish(1);
  EXPECT_EQ(ErrorReason(version.status()), "CHECKPOINT_NOT_SHARED")
      << version.status();
  EXPECT_THAT(std::string(version.status().message()), HasSubstr("node c"));
  EXPECT_EQ(b_->pauses(), 0);
  EXPECT_EQ(c_->pauses(), 0);
  EXPECT_TRUE(WaitUntil([&] { return Below("updates/test").empty(); }))
      << "what was begun is removed";
  v1::UpdateOptions options;
  options.set_transfer_medium(v1::TRANSFER_MEDIUM_NETWORK);
  trainer.SetOptions(options);
  EXPECT_TRUE(trainer.Publish(2).ok());
  ExpectServed(2);
}

TEST_F(CheckpointTest, AKillWhileSavingLeavesTheOldOneWhole) {
  StartNodes({"a", "b", "c"});
  StartReplicas();
  TestTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Publish(1).ok());
  ASSERT_EQ(Ctl({"save", "test", "runs/x"}), 0) << printed_;
  ASSERT_TRUE(trainer.Publish(2).ok());
  // A template that cannot be read to its end holds the save up.
  fs::create_directory(root() / "slow");
  for (int i = 0; i < 4000; ++i) {
    std::ofstream(root() / "slow" / absl::StrCat("file", i)) << "1";
  }
  std::thread saving([&] {
    Ctl({"save", "test", "runs/x", "--overwrite", "--template=slow"});
  });
  ASSERT_TRUE(WaitUntil([&] { return Below("runs").size() > 1; }));
  cluster_.KillNode("a");
  saving.join();
  ExpectHolds("runs/x", 1);
  ASSERT_TRUE(cluster_.RestartNode("a"));
  EXPECT_THAT(Below("runs"), ::testing::ElementsAre("x"))
      << "what was left is removed when the daemon starts";
  ASSERT_TRUE(WaitUntil([&] {
    return Ctl({"save", "test/2", "runs/x", "--overwrite"}) == 0;
  })) << printed_;
  ExpectHolds("runs/x", 2);
}

// The node that writes is another one than the coordinator, which lives on.
TEST_F(CheckpointTest, AWriterThatIsKilledFailsTheSaveByName) {
  StartNodes({"a", "b", "c"});
  StartReplicas();
  TestTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Publish(1).ok());
  ASSERT_EQ(Ctl({"save", "test", "runs/x"}), 0) << printed_;
  ASSERT_TRUE(trainer.Publish(2).ok());
  // Neither a nor c is a holder any more.
  ASSERT_EQ(Ctl({"drain", "a"}), 0) << printed_;
  ASSERT_EQ(Ctl({"drain", "c"}), 0) << printed_;
  fs::create_directory(root() / "slow");
  for (int i = 0; i < 4000; ++i) {
    std::ofstream(root() / "slow" / absl::StrCat("file", i)) << "1";
  }
  int code = 0;
  std::thread saving([&] {
    code = Ctl({"save", "test", "runs/x", "--overwrite", "--template=slow"});
  });
  ASSERT_TRUE(WaitUntil([&] { return Below("runs").size() > 1; }));
  cluster_.KillNode("b");
  saving.join();
  EXPECT_NE(code, 0);
  EXPECT_THAT(printed_, HasSubstr("node b"));
  ExpectHolds("runs/x", 1);
  b_ = nullptr;
  ASSERT_TRUE(cluster_.RestartNode("b"));
  EXPECT_TRUE(WaitUntil([&] { return Below("runs").size() == 1; }))
      << "what was left is removed when the daemon starts";
  ExpectHolds("runs/x", 1);
}

TEST_F(CheckpointTest, NodesWithoutASharedRootDoNotSaveTogether) {
  fs::create_directory(root());
  const std::string other = cluster_.directory().path() + "/elsewhere";
  fs::create_directory(other);
  ASSERT_TRUE(
      cluster_.StartNode("a", {"--checkpoint_root=" + root().string()}));
  ASSERT_TRUE(cluster_.StartNode("b", {"--checkpoint_root=" + other}));
  // Each has a rank, and nobody has both halves.
  TestTrainer trainer(&cluster_, std::vector<std::string>{"a", "b"});
  ASSERT_TRUE(trainer.Publish(1).ok());
  EXPECT_EQ(Ctl({"save", "test", "runs/x"}), 1);
  EXPECT_THAT(printed_, HasSubstr("CHECKPOINT_NOT_SHARED"));
  EXPECT_THAT(printed_, HasSubstr("--checkpoint_root=" + other));
  EXPECT_TRUE(WaitUntil([&] { return Below("runs").empty(); }))
      << "what was begun is removed";
  EXPECT_TRUE(fs::is_empty(other));
}

TEST_F(CheckpointTest, NothingIsLostToASave) {
  StartNodes({"a", "b", "c"});
  StartReplicas();
  TestTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Publish(1).ok());
  ASSERT_EQ(Ctl({"save", "test", "n/1"}), 0) << printed_;
  EXPECT_EQ(Ctl({"save", "test", "n/1/sub"}), 1);
  EXPECT_THAT(printed_, HasSubstr("CHECKPOINT_PATH_TAKEN"));
  EXPECT_THAT(printed_, HasSubstr("n/1 is a checkpoint"));
  fs::create_directories(root() / "n/1/sub");
  std::ofstream(root() / "n/1/sub/notes") << "weeks of work";
  EXPECT_EQ(Ctl({"save", "test", "n/1", "--overwrite"}), 1);
  EXPECT_THAT(printed_, HasSubstr("n/1 has sub/notes"));
  EXPECT_TRUE(fs::exists(root() / "n/1/sub/notes"));
  ExpectHolds("n/1", 1);
}

TEST_F(CheckpointTest, NetworkOrDiskTakesTheNetworkWhereItCanBeHad) {
  StartNodes({"a", "b", "c"}, {"--update=network_or_disk"});
  StartReplicas();
  TestTrainer trainer(&cluster_, "a", 1);
  auto version = trainer.Publish(1);
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(version->transfer_medium(), v1::TRANSFER_MEDIUM_NETWORK);
  // What could not go by disk is not refused, as --update=disk refuses it.
  v1::UpdateOptions options;
  options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
  trainer.SetOptions(options);
  version = trainer.Publish(2);
  ASSERT_TRUE(version.ok()) << version.status();
  ExpectServed(2);
  EXPECT_TRUE(Below("updates").empty());
}

// Data never finds its way to another node.
class NoNetwork final : public transport::FaultPolicy {
 public:
  absl::Status OnConnect(absl::string_view, absl::string_view) override {
    return absl::UnavailableError("no route to host");
  }
  transport::FrameFault OnSend(absl::string_view, absl::string_view, uint64_t,
                               uint32_t) override {
    return {};
  }
};

TEST_F(CheckpointTest, FallsBackToDiskWhenNoGroupCanBeMade) {
  fs::create_directory(root());
  NoNetwork no_network;
  std::vector<std::unique_ptr<daemon::Daemon>> daemons;
  for (const char* node : {"a", "b", "c"}) {
    daemon::Options options;
    options.node = node;
    const std::string base = cluster_.directory().path() + "/" + node;
    options.unix_socket = base + ".sock";
    options.state_dir = base + ".state";
    options.store_budget_bytes = 200 << 20;
    options.checkpoint_root = root();
    options.update = daemon::Options::Update::kNetworkOrDisk;
    options.deadlines.prepare = absl::Seconds(3);
    options.deadlines.progress = absl::Seconds(3);
    options.faults = &no_network;
    if (!daemons.empty()) options.coordinator_address = cluster_.address("a");
    auto daemon = daemon::Daemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemons.push_back(*std::move(daemon));
  }
  {
    TestReplica b(&cluster_, "b", "rb");
    TestReplica c(&cluster_, "c", "rc");
    TestTrainer trainer(&cluster_, "a", 2);
    ASSERT_TRUE(WaitUntil([&] {
      const auto version = trainer.Publish(1);
      return version.ok() && version->replicas_size() == 2;
    }));
    for (char value = 2; value <= 3; ++value) {
      const auto version = trainer.Publish(value);
      ASSERT_TRUE(version.ok()) << version.status();
      EXPECT_EQ(version->transfer_medium(), v1::TRANSFER_MEDIUM_DISK);
      EXPECT_TRUE(b.WaitServes(value));
      EXPECT_TRUE(c.WaitServes(value));
    }
    EXPECT_FALSE(b.SawMix());
    // Where the disk fails too, both are named.
    fs::rename(root(), cluster_.directory().path() + "/gone");
    const auto both = trainer.Publish(9);
    EXPECT_EQ(ErrorReason(both.status()), "CHECKPOINT_ROOT_MISSING")
        << both.status();
    EXPECT_THAT(std::string(both.status().message()),
                HasSubstr("no route to host"));
    fs::rename(cluster_.directory().path() + "/gone", root());
    // Without the policy it is given up.
    v1::UpdateOptions options;
    options.set_transfer_medium(v1::TRANSFER_MEDIUM_NETWORK);
    trainer.SetOptions(options);
    EXPECT_FALSE(trainer.Publish(4).ok());
    EXPECT_TRUE(b.WaitServes(3));
  }
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
