#include "daemon/coordinator/journal.h"

#include <unistd.h>

#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

using internal::v1::JournalRecord;
using ::testing::HasSubstr;

const absl::Time kNow = absl::FromUnixSeconds(5000);

JournalRecord Started(int64_t term) {
  JournalRecord record;
  record.mutable_started()->set_cluster_id("c");
  record.mutable_started()->set_term(term);
  return record;
}

JournalRecord Opened(int64_t version) {
  JournalRecord record;
  record.mutable_update_opened()->set_model("models/m");
  record.mutable_update_opened()->set_update_id(absl::StrCat("u", version));
  record.mutable_update_opened()->set_version(version);
  record.mutable_update_opened()->set_publish_index(version);
  return record;
}

class JournalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "/journalXXXXXX";
    ASSERT_NE(mkdtemp(&name[0]), nullptr);
    dir_ = name;
    path_ = dir_ + "/coordinator.journal";
  }

  absl::StatusOr<std::unique_ptr<Journal>> Open() {
    return Journal::Open(dir_, kNow, absl::Hours(1));
  }
  void Fill(int versions) {
    auto journal = Open();
    ASSERT_TRUE(journal.ok()) << journal.status();
    ASSERT_TRUE((*journal)->Append(Started(1)).ok());
    for (int v = 1; v <= versions; ++v) {
      ASSERT_TRUE((*journal)->Append(Opened(v)).ok());
    }
  }
  std::string Load() {
    std::ifstream in(path_, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  void Store(const std::string& data) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << data;
  }

  std::string dir_;
  std::string path_;
};

TEST_F(JournalTest, RemembersWhatWasAppended) {
  Fill(3);
  auto journal = Open();
  ASSERT_TRUE(journal.ok());
  const JournalState& state = (*journal)->state();
  EXPECT_EQ(state.cluster_id, "c");
  EXPECT_EQ(state.term, 1);
  EXPECT_EQ(state.models.at("models/m").floor, 3);
  EXPECT_EQ(state.models.at("models/m").newest.update_id(), "u3");
}

TEST_F(JournalTest, OpeningCompacts) {
  Fill(200);
  const size_t before = Load().size();
  ASSERT_TRUE(Open().ok());
  EXPECT_LT(Load().size(), before / 10);
  auto journal = Open();
  ASSERT_TRUE(journal.ok());
  EXPECT_EQ((*journal)->state().models.at("models/m").floor, 200);
}

TEST_F(JournalTest, ATornTailIsCutAtEveryLength) {
  Fill(2);
  ASSERT_TRUE(Open().ok());
  const size_t whole = Load().size();
  {
    auto journal = Open();
    ASSERT_TRUE(journal.ok());
    ASSERT_TRUE((*journal)->Append(Opened(3)).ok());
  }
  const std::string longer = Load();
  for (size_t size = 0; size < longer.size(); ++size) {
    Store(longer.substr(0, size));
    auto torn = Open();
    ASSERT_TRUE(torn.ok()) << size << ": " << torn.status();
    if (size < whole) continue;
    EXPECT_EQ((*torn)->state().models.at("models/m").floor, 2) << size;
  }
}

TEST_F(JournalTest, ATailOfZerosIsCut) {
  Fill(2);
  Store(Load() + std::string(100, '\0'));
  auto journal = Open();
  ASSERT_TRUE(journal.ok()) << journal.status();
  EXPECT_EQ((*journal)->state().models.at("models/m").floor, 2);
}

TEST_F(JournalTest, ADamagedMiddleIsRefusedWithItsOffset) {
  Fill(3);
  const std::string whole = Load();
  // Any bit of the first record (it begins behind the 8 bytes of the magic).
  for (size_t at = 8; at < 20; ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 4);
    Store(damaged);
    auto journal = Open();
    ASSERT_FALSE(journal.ok()) << at;
    EXPECT_EQ(ErrorReason(journal.status()), "JOURNAL_DAMAGED");
    EXPECT_THAT(std::string(journal.status().message()),
                HasSubstr("offset 8:"));
    // It is left as it was found.
    EXPECT_EQ(Load(), damaged);
  }
}

TEST_F(JournalTest, OtherFilesAndNewerFormatsAreRefused) {
  Store("something else entirely");
  EXPECT_EQ(ErrorReason(Open().status()), "JOURNAL_DAMAGED");
  Store("WSJRNL03xxxx");
  EXPECT_EQ(ErrorReason(Open().status()), "JOURNAL_FORMAT_UNSUPPORTED");
}

TEST_F(JournalTest, OneProcessAtATime) {
  auto first = Open();
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(ErrorReason(Open().status()), "JOURNAL_LOCKED");
  first->reset();
  EXPECT_TRUE(Open().ok());
}

TEST_F(JournalTest, OldRequestsAreForgottenAndOutcomesKept) {
  {
    auto journal = Open();
    ASSERT_TRUE(journal.ok());
    ASSERT_TRUE((*journal)->Append(Started(1)).ok());
    for (int i = 0; i < 2; ++i) {
      JournalRecord record;
      auto* request = record.mutable_request_opened();
      request->set_model("models/m");
      request->set_request_id(absl::StrCat("q", i));
      request->set_update_id("u1");
      request->set_version(1);
      request->mutable_time()->set_seconds(i == 0 ? 100 : 4999);
      ASSERT_TRUE((*journal)->Append(record).ok());
    }
    JournalRecord record;
    record.mutable_update_ended()->set_model("models/m");
    record.mutable_update_ended()->set_update_id("u1");
    record.mutable_update_ended()->mutable_failure()->set_reason("R");
    ASSERT_TRUE((*journal)->Append(record).ok());
  }
  for (int i = 0; i < 2; ++i) {  // also after a compaction
    auto journal = Open();
    ASSERT_TRUE(journal.ok());
    const auto& requests = (*journal)->state().requests;
    ASSERT_EQ(requests.size(), 1u);
    EXPECT_EQ(requests.begin()->second.opened.request_id(), "q1");
    EXPECT_EQ(requests.begin()->second.failure.reason(), "R");
  }
}

// Fails the n-th operation of a kind.
class FailingFiles : public JournalFiles {
 public:
  int sync_in = -1;
  int append_in = -1;
  int rename_in = -1;
  int sync_directory_in = -1;

  static absl::Status Count(int* left) {
    if (*left < 0 || (*left)-- > 0) return absl::OkStatus();
    return absl::InternalError("injected");
  }

  absl::StatusOr<std::string> Read(const std::string& path, int64_t offset,
                                   int64_t size) override {
    return SystemJournalFiles()->Read(path, offset, size);
  }
  absl::StatusOr<std::unique_ptr<JournalFile>> Create(
      const std::string& path) override {
    auto file = SystemJournalFiles()->Create(path);
    if (!file.ok()) return file.status();
    return std::unique_ptr<JournalFile>(new File(this, *std::move(file)));
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    absl::Status status = Count(&rename_in);
    return status.ok() ? SystemJournalFiles()->Rename(from, to) : status;
  }
  absl::Status SyncDirectory(const std::string& dir) override {
    absl::Status status = Count(&sync_directory_in);
    return status.ok() ? SystemJournalFiles()->SyncDirectory(dir) : status;
  }
  absl::StatusOr<std::shared_ptr<void>> Lock(const std::string& path) override {
    return SystemJournalFiles()->Lock(path);
  }

 private:
  class File : public JournalFile {
   public:
    File(FailingFiles* files, std::unique_ptr<JournalFile> file)
        : files_(files), file_(std::move(file)) {}
    absl::Status Append(absl::string_view data) override {
      absl::Status status = Count(&files_->append_in);
      return status.ok() ? file_->Append(data) : status;
    }
    absl::Status Sync() override {
      absl::Status status = Count(&files_->sync_in);
      return status.ok() ? file_->Sync() : status;
    }

   private:
    FailingFiles* const files_;
    const std::unique_ptr<JournalFile> file_;
  };
};

TEST_F(JournalTest, AFailedSyncIsAnErrorAndNothingIsAppendedAfterIt) {
  FailingFiles files;
  auto journal = Journal::Open(dir_, kNow, absl::Hours(1), &files);
  ASSERT_TRUE(journal.ok());
  ASSERT_TRUE((*journal)->Append(Started(1)).ok());
  files.sync_in = 0;
  EXPECT_FALSE((*journal)->Append(Opened(1)).ok());
  files.sync_in = -1;
  EXPECT_FALSE((*journal)->Append(Opened(2)).ok());
}

TEST_F(JournalTest, AFailedCompactionLeavesTheOldJournal) {
  Fill(3);
  for (int FailingFiles::*what :
       {&FailingFiles::sync_in, &FailingFiles::append_in,
        &FailingFiles::rename_in}) {
    const std::string before = Load();
    FailingFiles files;
    files.*what = 0;
    EXPECT_FALSE(Journal::Open(dir_, kNow, absl::Hours(1), &files).ok());
    EXPECT_EQ(Load(), before);
  }
  FailingFiles files;
  files.sync_directory_in = 0;
  EXPECT_FALSE(Journal::Open(dir_, kNow, absl::Hours(1), &files).ok());
  auto journal = Open();
  ASSERT_TRUE(journal.ok());
  EXPECT_EQ((*journal)->state().models.at("models/m").floor, 3);
}

TEST(Crc32cTest, KnownValues) {
  // RFC 3720, B.4.
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(Crc32c(std::string(32, '\xff')), 0x62A8AB43u);
  EXPECT_EQ(Crc32c("56789", Crc32c("1234")), Crc32c("123456789"));
  EXPECT_EQ(Crc32c("123456789"), 0xE3069283u);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
