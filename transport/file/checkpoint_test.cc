#include "transport/file/checkpoint.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

namespace fs = std::filesystem;

// Both ways of opening a path.
class RootedTest : public ::testing::TestWithParam<bool> {
 protected:
  RootedTest() {
    std::string pattern = ::testing::TempDir() + "/rootedXXXXXX";
    directory_ = mkdtemp(&pattern[0]);
    fs::create_directory(path("root"));
    auto root = RootedDirectory::Open(path("root"), GetParam());
    EXPECT_TRUE(root.ok()) << root.status();
    root_ = *root;
  }
  ~RootedTest() override { fs::remove_all(directory_); }

  std::string path(const std::string& name) const {
    return directory_ + "/" + name;
  }
  void Write(const std::string& name, const std::string& bytes) {
    fs::create_directories(fs::path(path("root/" + name)).parent_path());
    std::ofstream(path("root/" + name)) << bytes;
  }
  static std::string Header(const std::string& json) {
    std::string bytes(8, '\0');
    for (int i = 0; i < 8; ++i)
      bytes[i] = static_cast<char>(json.size() >> 8 * i);
    return bytes + json;
  }
  static std::string Bytes(const std::string& name, int64_t bytes) {
    return Header(absl::StrCat("{\"", name, "\":{\"dtype\":\"U8\",\"shape\":[",
                               bytes, "],\"data_offsets\":[0,", bytes, "]}}")) +
           std::string(static_cast<size_t>(bytes), 'x');
  }
  // Reason and sentence of what reading "c" says; "" when it is read.
  std::string Refusal(const std::string& what = "c") {
    auto read = ReadCheckpointHeaders(*root_, what);
    return read.ok() ? ""
                     : absl::StrCat(ReasonOf(read.status()), ": ",
                                    read.status().message());
  }

  std::string directory_;
  std::shared_ptr<const RootedDirectory> root_;
};
INSTANTIATE_TEST_SUITE_P(Openat2, RootedTest, ::testing::Bool());

TEST_P(RootedTest, PathsThatLeadOut) {
  Write("a/b", "1");
  std::ofstream(path("secret")) << "no";
  for (const char* bad :
       {"", "/etc/passwd", "..", "../secret", "a/../../secret", "a/./b", "."}) {
    auto file = root_->OpenFile(bad, O_RDONLY);
    EXPECT_EQ(ReasonOf(file.status()), "CHECKPOINT_PATH_INVALID") << bad;
    EXPECT_FALSE(root_->Exists(bad)) << bad;
  }
  EXPECT_EQ(
      ReasonOf(root_->OpenFile(std::string("a\0/b", 4), O_RDONLY).status()),
      "CHECKPOINT_PATH_INVALID");
  for (const char* bad : {"a\nb", "a/\tb", "a/b\x7f", "\x1b[2J"}) {
    const absl::Status refused = root_->OpenFile(bad, O_RDONLY).status();
    EXPECT_EQ(ReasonOf(refused), "CHECKPOINT_PATH_INVALID");
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr("has a control character"));
    EXPECT_EQ(refused.message().find(bad), absl::string_view::npos)
        << "a sentence is one line, whatever it quotes";
  }
  EXPECT_TRUE(root_->OpenFile("a/\xc3\xa4", O_RDONLY | O_CREAT, 0600).ok());
  EXPECT_TRUE(root_->OpenFile("a//b/", O_RDONLY).ok());
  EXPECT_EQ(ReasonOf(root_->OpenFile("a/none", O_RDONLY).status()),
            "CHECKPOINT_NOT_FOUND");
}

TEST_P(RootedTest, LinksAreNotFollowed) {
  Write("real/file", "1");
  fs::create_directory(path("outside"));
  std::ofstream(path("outside/file")) << "no";
  fs::create_directory_symlink(path("outside"), path("root/out"));
  fs::create_directory_symlink("real", path("root/in"));
  fs::create_symlink("file", path("root/real/link"));
  for (const char* bad : {"out/file", "in/file", "real/link", "out", "in"}) {
    auto file = root_->OpenFile(bad, O_RDONLY);
    EXPECT_EQ(ReasonOf(file.status()), "CHECKPOINT_PATH_INVALID") << bad;
    const std::string link = absl::StartsWith(bad, "out")  ? "out"
                             : absl::StartsWith(bad, "in") ? "in"
                                                           : "real/link";
    EXPECT_THAT(std::string(file.status().message()),
                StartsWith(link + " is a symbolic link"));
  }
  for (const char* bad : {"out", "in"}) {
    const absl::Status refused = root_->OpenDirectory(bad).status();
    EXPECT_EQ(ReasonOf(refused), "CHECKPOINT_PATH_INVALID") << bad;
    EXPECT_THAT(std::string(refused.message()),
                StartsWith(absl::StrCat(bad, " is a symbolic link")));
  }
  // Nor is one said to be there that is not.
  EXPECT_THAT(
      std::string(root_->OpenFile("real/none", O_RDONLY).status().message()),
      StartsWith("there is no real/none below --checkpoint_root="));
  const absl::Status file = root_->List("real/file/x").status();
  EXPECT_EQ(ReasonOf(file), "CHECKPOINT_NOT_FOUND");
  EXPECT_THAT(std::string(file.message()),
              StartsWith("real/file is a file, and a directory "
                         "is looked for at real/file/x"));
  using Kind = RootedDirectory::Kind;
  EXPECT_EQ(root_->KindOf("real/file"), Kind::kFile);
  EXPECT_EQ(root_->KindOf("real"), Kind::kDirectory);
  EXPECT_EQ(root_->KindOf("real/link"), Kind::kLink);
  EXPECT_EQ(root_->KindOf("real/none"), Kind::kNothing);
  EXPECT_EQ(root_->KindOf("in/file"), Kind::kNothing) << "not looked at";
  EXPECT_EQ(ReasonOf(root_->MakeDirectory("out/new", true)),
            "CHECKPOINT_PATH_INVALID");
  EXPECT_FALSE(root_->WriteNewFile("out/new", "1").ok());
  EXPECT_FALSE(fs::exists(path("outside/new")));
  // What is removed is the link.
  ASSERT_TRUE(root_->RemoveTree("out").ok());
  EXPECT_TRUE(fs::exists(path("outside/file")));
  Write("tree/x/y", "1");
  fs::create_directory_symlink(path("outside"), path("root/tree/x/out"));
  ASSERT_TRUE(root_->RemoveTree("tree").ok());
  EXPECT_FALSE(fs::exists(path("root/tree")));
  EXPECT_TRUE(fs::exists(path("outside/file")));
}

TEST_P(RootedTest, OnlyWhatIsEmptyIsRemoved) {
  Write("a/b/file", "1");
  fs::create_directory(path("root/a/c"));
  fs::create_directory_symlink("c", path("root/a/link"));
  EXPECT_FALSE(root_->RemoveIfEmpty("a/b"));
  EXPECT_FALSE(root_->RemoveIfEmpty("a/b/file"));
  EXPECT_FALSE(root_->RemoveIfEmpty("a/link"));
  EXPECT_TRUE(root_->RemoveIfEmpty("a/c"));
  EXPECT_TRUE(root_->RemoveIfEmpty("a/c")) << "it is gone";
  EXPECT_TRUE(fs::exists(path("root/a/b/file")));
}

TEST_P(RootedTest, APipeIsNoFile) {
  ASSERT_EQ(mkfifo(path("root/pipe").c_str(), 0600), 0);
  EXPECT_EQ(ReasonOf(root_->OpenFile("pipe", O_RDONLY).status()),
            "CHECKPOINT_DAMAGED");
}

TEST_P(RootedTest, PutsADirectoryInPlace) {
  for (const bool exchange : {true, false}) {
    if (!exchange) root_->PretendNoExchange();
    const std::string to = absl::StrCat("p/to", exchange);
    Write("p/new1/v", "1");
    Write("p/new2/v", "2");
    ASSERT_TRUE(root_->Put("p/new1", to, false).ok());
    EXPECT_FALSE(fs::exists(path("root/p/new1")));
    const absl::Status taken = root_->Put("p/new2", to, false);
    EXPECT_EQ(ReasonOf(taken), "CHECKPOINT_EXISTS") << taken;
    EXPECT_EQ(*root_->ReadFile(to + "/v", 10), "1");
    ASSERT_TRUE(root_->Put("p/new2", to, true).ok());
    EXPECT_EQ(*root_->ReadFile(to + "/v", 10), "2");
    EXPECT_FALSE(fs::exists(path("root/" + RootedDirectory::AsideName(to))));
    ASSERT_TRUE(root_->RemoveTree("p/new2").ok());
  }
}

TEST_P(RootedTest, APutThatWasCutShortIsUndone) {
  const std::string aside = RootedDirectory::AsideName("p/to");
  EXPECT_EQ(aside, "p/.to.weightsync-aside");
  // Between the two renames.
  Write(aside + "/v", "old");
  ASSERT_TRUE(root_->RecoverPut("p/to").ok());
  EXPECT_EQ(*root_->ReadFile("p/to/v", 10), "old");
  // After both.
  Write(aside + "/v", "older");
  ASSERT_TRUE(root_->RecoverPut("p/to").ok());
  EXPECT_EQ(*root_->ReadFile("p/to/v", 10), "old");
  EXPECT_FALSE(root_->Exists(aside));
}

TEST_P(RootedTest, AFullDiskIsSaid) {
  // As a full disk does, but for this process alone.
  signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 1000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status =
      root_->WriteNewFile("big", std::string(5000, 'x'));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(ReasonOf(status), "DISK_FULL") << status;
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
}

// ---- Reading ----

TEST_P(RootedTest, OneFile) {
  Write("c/model.safetensors", Bytes("a", 5));
  Write("c/config.json", "{}");
  auto read = ReadCheckpointHeaders(*root_, "c");
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->files.size(), 1u);
  EXPECT_EQ(read->files[0].path, "c/model.safetensors");
  EXPECT_EQ(read->files[0].tensors[0].name, "a");
  EXPECT_EQ(read->tensor_bytes, 5);
  EXPECT_EQ(Refusal("c/model.safetensors"), "");
  // One of another name.
  fs::rename(path("root/c/model.safetensors"), path("root/c/x.safetensors"));
  EXPECT_EQ(Refusal(), "");
  Write("c/y.safetensors", Bytes("b", 5));
  EXPECT_THAT(Refusal(), HasSubstr("CHECKPOINT_NOT_FOUND"));
  EXPECT_THAT(Refusal("none"), HasSubstr("CHECKPOINT_NOT_FOUND"));
  Write("notes.txt", "1");
  EXPECT_THAT(Refusal("notes.txt"),
              StartsWith("CHECKPOINT_NOT_FOUND: notes.txt is a file that does "
                         "not end in .safetensors: name the directory"));
}

TEST_P(RootedTest, AnIndex) {
  Write("c/m1.safetensors", Bytes("a", 5));
  Write("c/m2.safetensors", Bytes("b", 6));
  const auto index = [&](const std::string& map) {
    Write("c/model.safetensors.index.json",
          "{\"metadata\":{\"total_size\":11,\"x\":[1,{\"weight_map\":{}}]},"
          "\"weight_map\":" +
              map + "}");
    return Refusal();
  };
  EXPECT_EQ(index("{\"a\":\"m1.safetensors\",\"b\":\"m2.safetensors\"}"), "");
  for (const char* bad : {
           "{}",
           "[]",
           "3",
           "{\"a\":1}",
           "{\"a\":{\"b\":\"c\"}}",
           "{\"a\":[\"m1.safetensors\"]}",
           // Elsewhere.
           "{\"a\":\"../m1.safetensors\"}",
           "{\"a\":\"/m1.safetensors\"}",
           "{\"a\":\"m1.bin\"}",
           "{\"a\":\"\"}",
           "{\"a\":\".safetensors\"}",
           // Twice.
           "{\"a\":\"m1.safetensors\",\"a\":\"m1.safetensors\"}",
           // What the files do not say.
           "{\"a\":\"m1.safetensors\"",
           "{\"a\":\"m2.safetensors\",\"b\":\"m2.safetensors\"}",
           "{\"a\":\"m1.safetensors\",\"b\":\"m3.safetensors\"}",
           "{\"a\":\"m1.safetensors\",\"c\":\"m2.safetensors\"}",
       }) {
    EXPECT_THAT(index(bad), HasSubstr("CHECKPOINT_DAMAGED")) << bad;
  }
  // A tensor of two files.
  Write("c/m2.safetensors", Bytes("a", 6));
  EXPECT_THAT(index("{\"a\":\"m1.safetensors\",\"b\":\"m2.safetensors\"}"),
              HasSubstr("\"a\" is in m1.safetensors and in m2.safetensors"));
  // One that the index does not know.
  Write(
      "c/m2.safetensors",
      Header("{\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
             "\"c\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}") +
          "xx");
  EXPECT_THAT(index("{\"a\":\"m1.safetensors\",\"b\":\"m2.safetensors\"}"),
              HasSubstr("lacks \"c\""));
}

TEST_P(RootedTest, AFileOfAnIndexMayBeNoLink) {
  Write("c/m1.safetensors", Bytes("a", 5));
  fs::create_symlink("m1.safetensors", path("root/c/m2.safetensors"));
  Write("c/model.safetensors.index.json",
        "{\"weight_map\":{\"a\":\"m2.safetensors\"}}");
  EXPECT_THAT(Refusal(),
              StartsWith("CHECKPOINT_PATH_INVALID: c/m2.safetensors is a "
                         "symbolic link"));
}

TEST_P(RootedTest, DamagedFiles) {
  const std::string good = Bytes("a", 5);
  const auto refused = [&](const std::string& bytes) {
    Write("c/model.safetensors", bytes);
    return Refusal();
  };
  EXPECT_EQ(refused(good), "");
  for (const std::string& bad :
       {std::string(), good.substr(0, 7), good.substr(0, 20),
        good.substr(0, good.size() - 1), good + "x",
        std::string("\xff\xff\xff\xff\xff\xff\xff\x7f", 8) + good.substr(8)}) {
    EXPECT_THAT(refused(bad), HasSubstr("CHECKPOINT_DAMAGED"));
  }
  // It says so, and is not read: the file has holes instead of 100 MB.
  Write("c/model.safetensors", std::string("\x01\xe1\xf5\x05\0\0\0\0", 8));
  fs::resize_file(path("root/c/model.safetensors"), 200000000);
  EXPECT_THAT(Refusal(), HasSubstr("more than 100 MB"));
  // A hundred million zeros are no JSON.
  Write("c/model.safetensors", std::string("\0\xe1\xf5\x05\0\0\0\0", 8));
  fs::resize_file(path("root/c/model.safetensors"), 200000000);
  EXPECT_THAT(Refusal(), HasSubstr("no JSON"));
}

// ---- Planning ----

SafetensorsTensor Tensor(const std::string& name, const std::string& dtype,
                         std::vector<int64_t> shape) {
  SafetensorsTensor tensor;
  tensor.name = name;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  return tensor;
}

TEST(PlanCheckpointTest, WhatIsPlannedIsWhatIsRead) {
  std::string pattern = ::testing::TempDir() + "/planXXXXXX";
  const std::string directory = mkdtemp(&pattern[0]);
  auto root = RootedDirectory::Open(directory);
  ASSERT_TRUE(root.ok());
  const std::vector<SafetensorsTensor> tensors = {
      Tensor("odd", "U8", {3}),      Tensor("a", "BF16", {1000}),
      Tensor("b", "F32", {50, 20}),  Tensor("s", "I64", {}),
      Tensor("c", "F8_E4M3", {7}),   Tensor("big", "F32", {5000}),
      Tensor("last", "BF16", {1, 1})};
  for (const int64_t most : {int64_t{0}, int64_t{4096}, int64_t{8192}}) {
    auto plan = PlanCheckpoint(tensors, most);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const std::string name = absl::StrCat("m", most);
    ASSERT_TRUE((*root)->MakeDirectory(name, true).ok());
    int64_t tensor_count = 0;
    for (const CheckpointFile& file : plan->files) {
      std::string bytes = file.header;
      bytes.resize(static_cast<size_t>(file.bytes), 'x');
      ASSERT_TRUE((*root)->WriteNewFile(name + "/" + file.name, bytes).ok());
      for (const SafetensorsTensor& tensor : file.tensors) {
        ++tensor_count;
        EXPECT_EQ(tensor.begin * 8 % SafetensorsDTypeBits(tensor.dtype), 0)
            << tensor.name << " is not aligned";
      }
      // Only one that is too long by itself makes a longer file.
      if (most > 0 && file.tensors.size() > 1) {
        EXPECT_LE(file.bytes - static_cast<int64_t>(file.header.size()), most);
      }
    }
    EXPECT_EQ(tensor_count, 7);
    EXPECT_EQ(plan->files.size() == 1, plan->index.empty());
    if (!plan->index.empty()) {
      ASSERT_TRUE(
          (*root)
              ->WriteNewFile(name + "/" + kCheckpointIndexName, plan->index)
              .ok());
    }
    auto read = ReadCheckpointHeaders(**root, name);
    ASSERT_TRUE(read.ok()) << read.status();
    ASSERT_EQ(read->files.size(), plan->files.size());
    EXPECT_EQ(read->tensor_bytes, plan->tensor_bytes);
    for (size_t i = 0; i < read->files.size(); ++i) {
      ASSERT_EQ(read->files[i].tensors.size(), plan->files[i].tensors.size());
      for (size_t j = 0; j < read->files[i].tensors.size(); ++j) {
        EXPECT_EQ(read->files[i].tensors[j].name,
                  plan->files[i].tensors[j].name);
        EXPECT_EQ(read->files[i].tensors[j].begin,
                  plan->files[i].tensors[j].begin);
        EXPECT_EQ(read->files[i].tensors[j].end, plan->files[i].tensors[j].end);
      }
    }
  }
  fs::remove_all(directory);
}

TEST(PlanCheckpointTest, FilesAreNamedAsTheFieldNamesThem) {
  auto one = PlanCheckpoint({Tensor("a", "U8", {5000})}, 0);
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(one->files[0].name, "model.safetensors");
  auto two = PlanCheckpoint(
      {Tensor("a", "U8", {5000}), Tensor("b", "U8", {5000})}, 5000);
  ASSERT_TRUE(two.ok());
  ASSERT_EQ(two->files.size(), 2u);
  EXPECT_EQ(two->files[1].name, "model-00002-of-00002.safetensors");
  EXPECT_THAT(two->index, HasSubstr("\"total_size\": 10000"));
  EXPECT_EQ(ReasonOf(PlanCheckpoint({}, 100).status()), "SHARD_BYTES_INVALID");
  EXPECT_EQ(ReasonOf(PlanCheckpoint({}, -1).status()), "SHARD_BYTES_INVALID");
}

// Headers only: nothing of that size is made.
TEST(PlanCheckpointTest, FilesAreOfUpToFiveGigabytes) {
  EXPECT_EQ(kDefaultShardBytes, 5'000'000'000);
  const std::vector<SafetensorsTensor> tensors = {
      Tensor("a", "BF16", {1'500'000'000}),
      Tensor("b", "BF16", {1'500'000'000})};
  auto plan = PlanCheckpoint(tensors, 0);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->files.size(), 2u);
  for (const CheckpointFile& file : plan->files) {
    EXPECT_LE(file.bytes, 5'000'000'000);
    EXPECT_EQ(file.tensors.size(), 1u);
  }
  // What fits is not cut.
  plan = PlanCheckpoint({Tensor("a", "BF16", {1'500'000'000}),
                         Tensor("b", "BF16", {900'000'000})},
                        0);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->files.size(), 1u);
}

TEST(PlanCheckpointTest, WhatATemplateHasBesideWeights) {
  std::vector<std::string> taken;
  for (const char* name : {"config.json", "tokenizer.json", "tokenizer.model",
                           "merges.txt", "model.safetensors",
                           "pytorch_model.bin", "pytorch_model.bin.index.json",
                           "model.safetensors.index.json", "model.gguf"}) {
    if (!IsWeightFile(name)) taken.push_back(name);
  }
  EXPECT_THAT(taken, ElementsAre("config.json", "tokenizer.json",
                                 "tokenizer.model", "merges.txt"));
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
