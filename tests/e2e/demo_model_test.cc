#include "tests/e2e/demo_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <sstream>

namespace weightsync {
namespace demo {
namespace {

Model SmallModel() {
  Model model;
  model.parameters = {{"embed_tokens.weight", "BF16", {10, 4}, 0},
                      {"layers.0.self_attn.o_proj.weight", "BF16", {7, 8}, 0},
                      {"layers.0.mlp.up_proj.weight", "BF16", {6, 5}, 0},
                      {"norm.weight", "BF16", {2}, 0},
                      {"scale", "F32", {}, 0}};
  return model;
}

std::vector<client::Tensor> Shards(const Model& model, int rank, int ranks,
                                   std::vector<char>* memory) {
  std::vector<client::Tensor> shards = FsdpShards(model, rank, ranks);
  memory->resize(PlaceTensors(&shards, nullptr) + 64);
  PlaceTensors(&shards, memory->data());
  return shards;
}

std::multiset<std::string> Lines(const std::string& text) {
  std::multiset<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.insert(line);
  return lines;
}

TEST(DemoModelTest, TheCatalogIsThatOfTheRealModel) {
  const auto model = LoadModel("qwen2.5-0.5b", "");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->parameters.size(), 290u);
  EXPECT_EQ(model->bytes(), 988065536);
  EXPECT_FALSE(LoadModel("gpt-99", "").ok());
}

TEST(DemoModelTest, ShardsAreCutByCeilDivision) {
  const Parameter parameter = {"w", "BF16", {10, 4}, 0};
  EXPECT_EQ(FsdpBox(parameter, 0, 3)->extent[0], 4);
  EXPECT_EQ(FsdpBox(parameter, 2, 3)->extent[0], 2);
  EXPECT_EQ(FsdpBox(parameter, 2, 3)->offset[0], 8);
  const Parameter norm = {"n", "BF16", {2}, 0};
  EXPECT_FALSE(FsdpBox(norm, 2, 3).has_value());
}

TEST(DemoModelTest, TensorParallelPartsAreRowsOrColumns) {
  const Model model = SmallModel();
  EXPECT_EQ(TensorParallelBox(model.parameters[0], 1, 2).offset,
            (std::vector<int64_t>{5, 0}));
  EXPECT_EQ(TensorParallelBox(model.parameters[1], 1, 2).offset,
            (std::vector<int64_t>{0, 4}));
  EXPECT_EQ(TensorParallelBox(model.parameters[1], 1, 2).extent,
            (std::vector<int64_t>{7, 4}));
  EXPECT_EQ(TensorParallelBox(model.parameters[3], 1, 2).extent[0], 2);
}

// What ranks say together equals what a worker with the right bytes says.
TEST(DemoModelTest, RanksAndWorkersHashTheSameParts) {
  const Model model = SmallModel();
  for (int workers = 1; workers <= 2; ++workers) {
    for (int worker = 0; worker < workers; ++worker) {
      std::vector<client::Tensor> live = LiveTensors(model, worker, workers);
      std::multiset<std::string> expected;
      // The whole model in one rank's memory, to take the worker's part from.
      std::vector<char> whole_memory;
      const auto whole = Shards(model, 0, 1, &whole_memory);
      ASSERT_TRUE(FillAll(model, 1, 3, whole).ok());
      for (size_t i = 0; i < live.size(); ++i) {
        const int64_t element = model.parameters[i].element_bytes();
        const client::Box& box = *live[i].box;
        const bool matrix = box.extent.size() == 2;
        const int64_t rows = box.extent.empty() ? 1 : box.extent[0];
        const int64_t columns = matrix ? box.extent[1] : 1;
        const int64_t pitch = matrix ? live[i].shape[1] : 1;
        const int64_t row0 = box.offset.empty() ? 0 : box.offset[0];
        const int64_t column0 = matrix ? box.offset[1] : 0;
        for (int64_t r = 0; r < rows; ++r) {
          memcpy(static_cast<char*>(live[i].data) + r * columns * element,
                 static_cast<char*>(whole[i].data) +
                     ((row0 + r) * pitch + column0) * element,
                 columns * element);
        }
      }
      for (int rank = 0; rank < 3; ++rank) {
        std::vector<char> memory;
        const auto shards = Shards(model, rank, 3, &memory);
        ASSERT_TRUE(FillAll(model, 1, 3, shards).ok());
        for (const std::string& line :
             Lines(RankHashLines(model, 1, worker, workers, rank, shards))) {
          expected.insert(line);
        }
      }
      EXPECT_EQ(Lines(WorkerHashLines(model, 1, worker, workers, 3, live)),
                expected);
      FlipBit(live);
      EXPECT_NE(Lines(WorkerHashLines(model, 1, worker, workers, 3, live)),
                expected);
    }
  }
}

TEST(DemoModelTest, ValuesAreNormalAndOfTheirVersion) {
  Model model;
  model.parameters = {{"w", "BF16", {1000, 100}, 0}};
  std::vector<char> memory;
  const auto shards = Shards(model, 0, 1, &memory);
  ASSERT_TRUE(FillAll(model, 1, 3, shards).ok());
  std::vector<uint16_t> one(100000);
  memcpy(one.data(), shards[0].data, 200000);
  double sum = 0;
  double squares = 0;
  for (const uint16_t bits : one) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    sum += value;
    squares += value * value;
  }
  EXPECT_NEAR(sum / 1e5, 0, 5e-4);
  EXPECT_NEAR(std::sqrt(squares / 1e5), 0.02, 5e-4);
  ASSERT_TRUE(FillAll(model, 2, 3, shards).ok());
  EXPECT_NE(memcmp(one.data(), shards[0].data, 200000), 0);
  ASSERT_TRUE(FillAll(model, 1, 3, shards).ok());
  EXPECT_EQ(memcmp(one.data(), shards[0].data, 200000), 0);
}

TEST(DemoModelTest, AFileComesBackExactlyInTheLastVersion) {
  const Model model = SmallModel();
  const std::vector<client::Tensor> live = LiveTensors(model, 0, 1);
  ASSERT_TRUE(FillAll(model, 1, 1, live).ok());
  const std::string path = "/tmp/demo_model_test.safetensors";
  ASSERT_TRUE(DumpSafetensors(path, model, live).ok());
  const auto file = LoadModel("", path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->parameters.size(), model.parameters.size());
  std::vector<char> memory;
  const auto shards = Shards(*file, 0, 1, &memory);
  ASSERT_TRUE(FillAll(*file, 3, 3, shards).ok());
  EXPECT_EQ(WorkerHashLines(*file, 0, 0, 1, 1, shards),
            WorkerHashLines(model, 0, 0, 1, 1, live));
  ASSERT_TRUE(FillAll(*file, 2, 3, shards).ok());
  EXPECT_NE(WorkerHashLines(*file, 0, 0, 1, 1, shards),
            WorkerHashLines(model, 0, 0, 1, 1, live));
  remove(path.c_str());
}

}  // namespace
}  // namespace demo
}  // namespace weightsync
