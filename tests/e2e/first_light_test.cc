// Real daemons, real processes: weights go from three ranks to four workers and
// arrive as they were.
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"
#include "transport/file/safetensors.h"

namespace weightsync {
namespace e2e {
namespace {

// A small model that has everything: embeddings, projections of both kinds, a
// bias, a norm that is shorter than there are ranks, a scalar of another type.
std::string WriteModel(const std::string& directory) {
  std::vector<transport::SafetensorsTensor> tensors = {
      {"model.embed_tokens.weight", "BF16", {1001, 64}, 0, 0},
      {"model.layers.0.self_attn.q_proj.weight", "BF16", {64, 64}, 0, 0},
      {"model.layers.0.self_attn.q_proj.bias", "BF16", {64}, 0, 0},
      {"model.layers.0.self_attn.o_proj.weight", "BF16", {64, 64}, 0, 0},
      {"model.layers.0.mlp.up_proj.weight", "F32", {130, 64}, 0, 0},
      {"model.layers.0.mlp.down_proj.weight", "F8_E4M3", {64, 130}, 0, 0},
      {"model.norm.weight", "BF16", {2}, 0, 0},
      {"scale", "F32", {}, 0, 0},
  };
  const auto header = transport::MakeSafetensorsHeader(tensors, {});
  EXPECT_TRUE(header.ok()) << header.status();
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    int64_t elements = 1;
    for (const int64_t extent : tensor.shape) elements *= extent;
    bytes += elements * transport::SafetensorsDTypeBits(tensor.dtype) / 8;
  }
  const std::string path = directory + "/model.safetensors";
  std::ofstream file(path, std::ios::binary);
  file << *header;
  uint32_t x = 12345;
  for (int64_t i = 0; i < bytes; ++i) {
    x = x * 1664525 + 1013904223;
    file.put(static_cast<char>(x >> 24));
  }
  return path;
}

std::multiset<std::string> Lines(const std::string& path,
                                 const std::string& with) {
  std::multiset<std::string> lines;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    if (line.find(with) != std::string::npos) lines.insert(line);
  }
  return lines;
}

TEST(FirstLightTest, EveryWorkerHoldsWhatWasPublished) {
  Cluster cluster;
  ASSERT_TRUE(cluster.StartNode("a", {"--bucket_bytes=20000"}));
  ASSERT_TRUE(cluster.StartNode("b"));
  ASSERT_TRUE(cluster.StartNode("c"));
  const std::string& directory = cluster.directory().path();
  const std::string file = WriteModel(directory);
  const std::vector<std::string> common = {"--safetensors=" + file,
                                           "--name=test", "--versions=3"};
  const auto start = [&](const std::string& name, const std::string& program,
                         const std::string& node,
                         std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), program);
    arguments.push_back("--address=" + cluster.address(node));
    arguments.push_back("--hashes=" + directory + "/" + name + ".hashes");
    arguments.insert(arguments.end(), common.begin(), common.end());
    return cluster.Start(name, arguments);
  };
  std::vector<std::unique_ptr<Process>> all;
  const auto replica = [&](const std::string& name, const std::string& node,
                           int workers, bool flip) {
    all.push_back(
        start(name, "tests/e2e/demo_worker", node,
              {"--replica=" + name, absl::StrCat("--workers=", workers),
               "--hash_parts=3", absl::StrCat("--flip_bit=", flip)}));
  };
  replica("r0", "b", 1, false);
  replica("r1", "b", 2, false);
  replica("r2", "c", 1, true);
  for (int rank = 0; rank < 3; ++rank) {
    all.push_back(start(absl::StrCat("rank", rank), "tests/e2e/demo_trainer",
                        "a",
                        {absl::StrCat("--rank=", rank), "--world_size=3",
                         "--wait_replicas=3"}));
  }
  for (const auto& process : all) {
    ASSERT_EQ(process->Wait(absl::Minutes(2)), 0) << process->Log();
  }
  const auto expected = [&](const std::string& with) {
    std::multiset<std::string> lines;
    for (int rank = 0; rank < 3; ++rank) {
      lines.merge(
          Lines(absl::StrCat(directory, "/rank", rank, ".hashes"), with));
    }
    return lines;
  };
  const auto one = expected(" 0/1 ");
  EXPECT_EQ(one.size(), 3u * (7 * 3 - 1 + 1));
  EXPECT_EQ(Lines(directory + "/r0.hashes", " "), one);
  std::multiset<std::string> two = expected(" 0/2 ");
  two.merge(expected(" 1/2 "));
  EXPECT_EQ(Lines(directory + "/r1.hashes", " "), two);
  // One bit of one worker was flipped: it is found, and nothing else differs.
  std::multiset<std::string> flipped = Lines(directory + "/r2.hashes", " ");
  EXPECT_NE(flipped, one);
  int differ = 0;
  for (const std::string& line : one) differ += flipped.count(line) == 0;
  EXPECT_EQ(differ, 1);
}

TEST(FirstLightTest, TheEndLeavesNothingBehind) {
  Cluster cluster;
  ASSERT_TRUE(cluster.StartNode("a"));
  ASSERT_TRUE(cluster.StartNode("b"));
  {
    TestReplica replica(&cluster, "b", "r");
    TestTrainer trainer(&cluster, "a", 2);
    ASSERT_TRUE(cluster.WaitReplicaState("r", v1::Replica::STATE_SERVING));
    const auto version = trainer.Publish(7);
    ASSERT_TRUE(version.ok()) << version.status();
    EXPECT_TRUE(replica.WaitServes(7));
    // While clients are there.
    EXPECT_EQ(cluster.EndNode("b"), 0);
    EXPECT_EQ(cluster.EndNode("a"), 0);
  }
  EXPECT_EQ(cluster.directory().List(),
            (std::vector<std::string>{"a.log", "a.state", "b.log", "b.state"}));
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
