#include "daemon/node/checkpoint_note.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "transport/error.h"

namespace weightsync {
namespace daemon {
namespace {

namespace fs = std::filesystem;
using transport::ReasonOf;

class CheckpointNoteTest : public ::testing::Test {
 protected:
  CheckpointNoteTest() {
    std::string pattern = ::testing::TempDir() + "/noteXXXXXX";
    directory_ = mkdtemp(&pattern[0]);
    auto root = transport::RootedDirectory::Open(directory_);
    EXPECT_TRUE(root.ok());
    root_ = *root;
  }
  ~CheckpointNoteTest() override { fs::remove_all(directory_); }

  void Put(const std::string& path, const std::string& bytes = "x") {
    fs::create_directories((directory_ / path).parent_path());
    std::ofstream(directory_ / path) << bytes;
  }
  // "" when it may be replaced.
  std::string Replaceable() {
    return std::string(ReasonOf(CheckReplaceable(*root_, "m")));
  }

  fs::path directory_;
  std::shared_ptr<const transport::RootedDirectory> root_;
};

TEST_F(CheckpointNoteTest, ComesBackAsItWasWritten) {
  CheckpointNote note;
  note.model = "models/m";
  note.files = {{"model.safetensors", 12}, {"sub/a \"b\"", 0}};
  Put("m/.weightsync.json", note.ToJson());
  auto read = ReadCheckpointNote(*root_, "m");
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->files, note.files);
  EXPECT_EQ(read->update_id, "");
  note.update_id = "u";
  note.version = 7;
  Put("m/.weightsync.json", note.ToJson());
  read = ReadCheckpointNote(*root_, "m");
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->update_id, "u");
  EXPECT_EQ(read->version, 7);
  for (const char* bad :
       {"", "[]", "{}", "{\"model\":\"m\",\"files\":[]}",
        "{\"model\":\"m\",\"files\":{\"a\":\"b\"}}",
        "{\"model\":\"m\",\"update_id\":\"u\",\"files\":{}}"}) {
    Put("m/.weightsync.json", bad);
    EXPECT_FALSE(ReadCheckpointNote(*root_, "m").has_value()) << bad;
  }
}

TEST_F(CheckpointNoteTest, AHuggingFaceModelMayBeReplaced) {
  fs::create_directory(directory_ / "m");
  EXPECT_EQ(Replaceable(), "") << "it is empty";
  for (const char* name :
       {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "pytorch_model.bin", "config.json",
        "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "merges.txt", "vocab.json", "README.md", ".gitattributes"}) {
    Put(std::string("m/") + name);
    if (fs::exists(directory_ / "m/config.json")) {
      EXPECT_EQ(Replaceable(), "") << name;
    }
  }
}

TEST_F(CheckpointNoteTest, WhatWouldBeLostIsNotReplaced) {
  Put("m/config.json");
  EXPECT_EQ(Replaceable(), "CHECKPOINT_EXISTS") << "it has no weights";
  Put("m/model.safetensors");
  EXPECT_EQ(Replaceable(), "");
  for (const char* name :
       {"optimizer.pt", "trainer_state.json", "rng_state.pth", "notes.txt",
        "my_lora.safetensors", "model_notes.txt", "runs/events",
        "models/model.safetensors", ".git/HEAD"}) {
    Put(std::string("m/") + name);
    EXPECT_EQ(Replaceable(), "CHECKPOINT_PATH_TAKEN") << name;
    const std::string top(name);
    fs::remove_all(directory_ / "m" / top.substr(0, top.find('/')));
  }
  fs::create_directory(directory_ / "m/empty");
  EXPECT_EQ(Replaceable(), "CHECKPOINT_PATH_TAKEN");
  fs::remove(directory_ / "m/empty");
  fs::create_symlink("elsewhere", directory_ / "m/tokenizer.json");
  EXPECT_EQ(Replaceable(), "CHECKPOINT_PATH_TAKEN");
  fs::remove(directory_ / "m/tokenizer.json");
  ASSERT_EQ(mkfifo((directory_ / "m/vocab.txt").c_str(), 0600), 0);
  EXPECT_EQ(Replaceable(), "CHECKPOINT_PATH_TAKEN");
}

TEST_F(CheckpointNoteTest, NothingInsideOfACheckpoint) {
  EXPECT_TRUE(CheckNotInside(*root_, "a/b/c").ok()) << "there is nothing yet";
  Put("a/notes.txt");
  EXPECT_TRUE(CheckNotInside(*root_, "a/b/c").ok());
  Put("a/b/.weightsync.json");
  EXPECT_EQ(ReasonOf(CheckNotInside(*root_, "a/b/c/d")),
            "CHECKPOINT_PATH_TAKEN");
  EXPECT_TRUE(CheckNotInside(*root_, "a/b").ok()) << "itself it is not above";
  EXPECT_TRUE(CheckNotInside(*root_, "a/bb/c").ok());
  Put("x/pretrained.safetensors");
  EXPECT_EQ(ReasonOf(CheckNotInside(*root_, "x/y")), "CHECKPOINT_PATH_TAKEN");
}

// Also one that is as large as what it took the place of.
TEST_F(CheckpointNoteTest, WhatWasWrittenToSinceIsNotAsItWasWritten) {
  CheckpointNote note;
  note.model = "models/m";
  note.files = {{"model.safetensors", 1}};
  Put("m/model.safetensors");
  Put("m/.weightsync.json", note.ToJson());
  EXPECT_TRUE(CheckWritten(*root_, "m", note).ok());
  const auto end = fs::last_write_time(directory_ / "m/.weightsync.json");
  fs::last_write_time(directory_ / "m/model.safetensors",
                      end + std::chrono::milliseconds(50));
  EXPECT_EQ(ReasonOf(CheckWritten(*root_, "m", note)), "CHECKPOINT_PATH_TAKEN");
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
