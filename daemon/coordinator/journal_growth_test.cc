// The journal of a cluster that runs for long: it does not grow without end, is
// read back quickly, and loses nothing that was promised, wherever the power
// goes.

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/coordinator/journal.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

using internal::v1::JournalRecord;

constexpr char kDir[] = "d";
constexpr char kPath[] = "d/coordinator.journal";
const absl::Time kNow = absl::FromUnixSeconds(5000);

JournalRecord Started() {
  JournalRecord record;
  record.mutable_started()->set_cluster_id("c");
  record.mutable_started()->set_term(1);
  return record;
}

JournalRecord Opened(int64_t version) {
  JournalRecord record;
  auto* opened = record.mutable_update_opened();
  opened->set_model("models/m");
  opened->set_update_id(absl::StrCat("u", version));
  opened->set_version(version);
  return record;
}

JournalRecord RequestOpened(int number, absl::Time time) {
  JournalRecord record;
  auto* opened = record.mutable_request_opened();
  opened->set_model("models/m");
  opened->set_rank(number % 64);
  opened->set_request_id(absl::StrCat("request-", number));
  opened->set_update_id(absl::StrCat("update-", number / 64));
  opened->set_version(number / 64);
  opened->mutable_time()->set_seconds(absl::ToUnixSeconds(time));
  return record;
}

JournalRecord RankCopied(int number) {
  JournalRecord record;
  auto* copied = record.mutable_rank_copied();
  copied->set_model("models/m");
  copied->set_rank(number % 64);
  copied->set_update_id(absl::StrCat("update-", number / 64));
  copied->set_copied_bytes(number + 1);
  return record;
}

// `bytes` of a manifest in it.
JournalRecord Committed(int64_t version, const std::string& layout, int bytes) {
  JournalRecord record;
  auto* committed = record.mutable_update_committed();
  committed->set_model("models/m");
  committed->set_update_id(absl::StrCat("u", version));
  committed->set_version(version);
  committed->set_layout_id(layout);
  for (int i = 0; i < bytes / 24; ++i) {
    v1::BucketDigest* bucket = committed->add_manifest();
    bucket->set_bucket(i);
    bucket->mutable_digest()->set_lane0(~uint64_t{0} - i);
    bucket->mutable_digest()->set_lane1(i);
  }
  return record;
}

JournalRecord LayoutDefined(const std::string& id) {
  JournalRecord record;
  auto* layout = record.mutable_layout_defined()->mutable_layout();
  layout->set_layout_id(id);
  layout->set_model("models/m");
  return record;
}

// A disk that knows what a power cut leaves of it, and may die at any of its
// operations.
class Disk : public JournalFiles {
 public:
  struct Inode {
    std::string content;
    size_t synced = 0;
  };
  using Names = std::map<std::string, std::shared_ptr<Inode>>;

  Names names;
  Names durable;  // what SyncDirectory has made of them
  int syncs = 0;
  int64_t largest_read = 0;
  // Fails what begins with this, "Rename".
  std::string failing;
  // So many operations go well; -1: all.
  int lives = -1;
  // The one that does not go well is done (an append: half of it) all the same.
  bool dies_after = false;
  int operations = 0;

  // What is found after a power cut: of names and of bytes that were not synced
  // none, or all (of bytes: half of them where `bytes` is 1).
  void Cut(bool newest_names, int bytes) {
    if (!newest_names) names = durable;
    for (auto& name : names) {
      Inode& inode = *name.second;
      const size_t lost = inode.content.size() - inode.synced;
      if (bytes == 0) inode.content.resize(inode.synced);
      if (bytes == 1) inode.content.resize(inode.synced + lost / 2);
      inode.synced = inode.content.size();
    }
    durable = names;
    lives = -1;
  }

  absl::StatusOr<std::string> Read(const std::string& path, int64_t offset,
                                   int64_t size) override {
    const auto it = names.find(path);
    if (it == names.end()) return absl::NotFoundError(path);
    largest_read = std::max(largest_read, size);
    const std::string& content = it->second->content;
    if (offset >= static_cast<int64_t>(content.size())) return std::string();
    return content.substr(static_cast<size_t>(offset),
                          static_cast<size_t>(size));
  }
  absl::StatusOr<std::unique_ptr<JournalFile>> Create(
      const std::string& path) override {
    auto inode = std::make_shared<Inode>();
    const absl::Status status = Do("Create", [&] { names[path] = inode; });
    if (!status.ok()) return status;
    return std::unique_ptr<JournalFile>(new File(this, std::move(inode)));
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return Do("Rename", [&] {
      names[to] = names[from];
      names.erase(from);
    });
  }
  absl::Status SyncDirectory(const std::string&) override {
    return Do("SyncDirectory", [&] { durable = names; });
  }
  absl::StatusOr<std::shared_ptr<void>> Lock(const std::string&) override {
    return std::shared_ptr<void>(std::make_shared<int>(0));
  }

 private:
  class File : public JournalFile {
   public:
    File(Disk* disk, std::shared_ptr<Inode> inode)
        : disk_(disk), inode_(std::move(inode)) {}
    absl::Status Append(absl::string_view data) override {
      const bool dies = disk_->lives == 0;
      return disk_->Do("Append", [&] {
        const absl::string_view written =
            dies ? data.substr(0, data.size() / 2) : data;
        inode_->content.append(written.data(), written.size());
      });
    }
    absl::Status Sync() override {
      ++disk_->syncs;
      return disk_->Do("Sync",
                       [&] { inode_->synced = inode_->content.size(); });
    }

   private:
    Disk* const disk_;
    const std::shared_ptr<Inode> inode_;
  };

  template <typename Effect>
  absl::Status Do(absl::string_view what, const Effect& effect) {
    if (!failing.empty() && absl::StartsWith(what, failing)) {
      return absl::InternalError("injected");
    }
    ++operations;
    if (lives < 0 || lives-- > 0) {
      effect();
      return absl::OkStatus();
    }
    if (dies_after) effect();
    dies_after = false;
    lives = 0;
    return absl::InternalError("the power is gone");
  }
};

absl::StatusOr<std::unique_ptr<Journal>> Open(
    Disk* disk, int64_t grown_bytes = kJournalBytes) {
  return Journal::Open(kDir, kNow, absl::Hours(1), disk, grown_bytes);
}

TEST(JournalGrowthTest, ADayOfRequestsIsReadBackInSecondsAndInPieces) {
  constexpr int kRequests = 200000;
  Disk disk;
  {
    auto journal = Open(&disk);
    ASSERT_TRUE(journal.ok());
    ASSERT_TRUE((*journal)->Append(Started()).ok());
    for (int i = 0; i < kRequests; ++i) {
      ASSERT_TRUE((*journal)->Append(RequestOpened(i, kNow)).ok());
      ASSERT_TRUE((*journal)->Append(RankCopied(i)).ok());
    }
  }
  const absl::Time begin = absl::Now();
  auto journal = Open(&disk);
  ASSERT_TRUE(journal.ok()) << journal.status();
  // With a scan of all requests for each rank that was copied: half an hour.
  EXPECT_LT(absl::Now() - begin, absl::Minutes(2));
  RecordProperty(
      "open_ms",
      static_cast<int>(absl::ToInt64Milliseconds(absl::Now() - begin)));
  EXPECT_LE(disk.largest_read, 4 << 20);
  const RequestBook& requests = (*journal)->state().requests;
  ASSERT_EQ(requests.size(), static_cast<size_t>(kRequests));
  for (int i : {0, 63, 64, kRequests - 1}) {
    const JournalRequest* request =
        requests.Find("models/m", i % 64, absl::StrCat("request-", i));
    ASSERT_NE(request, nullptr);
    EXPECT_TRUE(request->copied);
    EXPECT_EQ(request->copied_bytes, i + 1);
  }
}

TEST(JournalGrowthTest, ItStaysBoundedWhileItIsUsed) {
  constexpr int kCommits = 10000;
  Disk disk;
  auto journal = Open(&disk);
  ASSERT_TRUE(journal.ok());
  ASSERT_TRUE((*journal)->Append(Started()).ok());
  int64_t largest = 0;
  absl::Time now = kNow;
  for (int v = 1; v <= kCommits; ++v) {
    now += absl::Minutes(1);
    ASSERT_TRUE((*journal)->Append(RequestOpened(v, now)).ok());
    ASSERT_TRUE((*journal)->Append(Opened(v)).ok());
    // Each with a layout of its own.
    ASSERT_TRUE((*journal)->Append(LayoutDefined(absl::StrCat("l", v))).ok());
    ASSERT_TRUE(
        (*journal)->Append(Committed(v, absl::StrCat("l", v), 12000)).ok());
    ASSERT_TRUE((*journal)->Tend(now).ok());
    largest = std::max(largest, (*journal)->size_bytes());
    // An hour of them.
    ASSERT_LE((*journal)->state().requests.size(), 62u);
  }
  EXPECT_LE(largest, kJournalBytes + (1 << 20));
  EXPECT_GT(largest, kJournalBytes / 2);  // and not at every record
  EXPECT_EQ(static_cast<int64_t>(disk.names[kPath]->content.size()),
            (*journal)->size_bytes());
  journal->reset();
  auto again = Journal::Open(kDir, now, absl::Hours(1), &disk);
  ASSERT_TRUE(again.ok()) << again.status();
  const JournalModel& model = (*again)->state().models.at("models/m");
  EXPECT_EQ(model.floor, kCommits);
  EXPECT_EQ(model.committed.version(), kCommits);
  ASSERT_EQ(model.older.size(), kOlderCommits);
  EXPECT_EQ(model.older.front().version(),
            kCommits - static_cast<int>(kOlderCommits));
  EXPECT_EQ(model.older.front().manifest_size(), 12000 / 24);
  EXPECT_EQ((*again)->state().layouts.size(), kOlderCommits + 1);
}

// Every operation of the disk may be its last, also while the journal is
// written anew.
TEST(JournalGrowthTest, APowerCutAtAnyPointLosesNothingThatWasPromised) {
  constexpr int kVersions = 40;
  constexpr int64_t kGrown = 400;
  const auto run = [](Disk* disk) {
    int64_t promised = 0;
    auto journal = Open(disk, kGrown);
    if (!journal.ok() || !(*journal)->Append(Started()).ok()) return promised;
    for (int v = 1; v <= kVersions; ++v) {
      if (!(*journal)->Append(Opened(v)).ok()) break;
      promised = v;
      if (!(*journal)->Tend(kNow).ok()) break;
    }
    return promised;
  };
  Disk whole;
  ASSERT_EQ(run(&whole), kVersions);
  EXPECT_GT(whole.operations, 2 * kVersions + 3 * 4);  // with files made anew
  for (int lives = 0; lives < whole.operations; ++lives) {
    for (const bool after : {false, true}) {
      for (const bool names : {false, true}) {
        for (const int bytes : {0, 1, 2}) {
          Disk disk;
          disk.lives = lives;
          disk.dies_after = after;
          const int64_t promised = run(&disk);
          disk.Cut(names, bytes);
          auto journal = Open(&disk, kGrown);
          ASSERT_TRUE(journal.ok())
              << lives << after << names << bytes << ": " << journal.status();
          const auto& models = (*journal)->state().models;
          const auto model = models.find("models/m");
          const int64_t floor = model == models.end() ? 0 : model->second.floor;
          EXPECT_GE(floor, promised) << lives << after << names << bytes;
          EXPECT_LE(floor, promised + 1) << lives << after << names << bytes;
        }
      }
    }
  }
}

TEST(JournalGrowthTest, WhereThereIsNoRoomForANewFileTheOldOneServesOn) {
  for (const char* failing : {"Create", "Append", "Sync"}) {
    Disk disk;
    auto journal = Open(&disk, 400);
    ASSERT_TRUE(journal.ok());
    ASSERT_TRUE((*journal)->Append(Started()).ok());
    int64_t version = 0;
    const auto grow = [&] {
      for (int i = 0; i < 30; ++i) {
        ASSERT_TRUE((*journal)->Append(Opened(++version)).ok());
      }
    };
    grow();
    const int64_t before = (*journal)->size_bytes();
    ASSERT_GT(before, 400);
    disk.failing = failing;
    EXPECT_TRUE((*journal)->Tend(kNow).ok()) << failing;
    EXPECT_EQ((*journal)->size_bytes(), before);
    // Not at every tick again.
    const int syncs = disk.syncs;
    const int operations = disk.operations;
    EXPECT_TRUE((*journal)->Tend(kNow).ok());
    EXPECT_EQ(disk.syncs, syncs);
    EXPECT_EQ(disk.operations, operations);
    disk.failing.clear();
    grow();
    EXPECT_TRUE((*journal)->Tend(kNow).ok());
    EXPECT_LT((*journal)->size_bytes(), before);
    grow();
    journal->reset();
    auto again = Open(&disk);
    ASSERT_TRUE(again.ok());
    EXPECT_EQ((*again)->state().models.at("models/m").floor, version);
  }
}

// Which of the two files there is then is not known.
TEST(JournalGrowthTest, AFailureOfTheRenameIsTheEnd) {
  for (const char* failing : {"Rename", "SyncDirectory"}) {
    Disk disk;
    auto journal = Open(&disk, 400);
    ASSERT_TRUE(journal.ok());
    ASSERT_TRUE((*journal)->Append(Started()).ok());
    for (int v = 1; v <= 30; ++v) {
      ASSERT_TRUE((*journal)->Append(Opened(v)).ok());
    }
    disk.failing = failing;
    EXPECT_FALSE((*journal)->Tend(kNow).ok()) << failing;
    disk.failing.clear();
    EXPECT_FALSE((*journal)->Append(Opened(31)).ok()) << failing;
    EXPECT_FALSE((*journal)->Tend(kNow).ok()) << failing;
  }
}

// ---- Batches ----

class BatchTest : public ::testing::Test {
 protected:
  // Two versions by themselves, then three in one batch.
  void SetUp() override {
    auto journal = Open(&disk_);
    ASSERT_TRUE(journal.ok());
    ASSERT_TRUE((*journal)->Append(Started()).ok());
    for (int v = 1; v <= 2; ++v) {
      ASSERT_TRUE((*journal)->Append(Opened(v)).ok());
    }
    single_ = Content().size();
    const int before = disk_.syncs;
    const std::vector<JournalRecord> batch = {Opened(3), Opened(4), Opened(5)};
    ASSERT_TRUE((*journal)->Append({&batch[0], &batch[1], &batch[2]}).ok());
    EXPECT_EQ(disk_.syncs, before + 1);
    EXPECT_EQ((*journal)->state().models.at("models/m").floor, 5);
    frame_ = (Content().size() - single_) / 3;
  }

  std::string& Content() { return disk_.names[kPath]->content; }
  // -1: it cannot be opened.
  int64_t Floor(const std::string& content) {
    Disk disk;
    disk.names[kPath] = std::make_shared<Disk::Inode>();
    disk.names[kPath]->content = content;
    auto journal = Open(&disk);
    if (journal.ok()) return (*journal)->state().models.at("models/m").floor;
    EXPECT_EQ(ErrorReason(journal.status()), "JOURNAL_DAMAGED");
    return -1;
  }

  Disk disk_;
  size_t single_ = 0;
  size_t frame_ = 0;
};

TEST_F(BatchTest, ItIsReadBack) { EXPECT_EQ(Floor(Content()), 5); }

TEST_F(BatchTest, ATornOneIsCutAtEveryLength) {
  for (size_t size = single_; size < Content().size(); ++size) {
    EXPECT_EQ(Floor(Content().substr(0, size)),
              2 + static_cast<int64_t>((size - single_) / frame_))
        << size;
  }
}

// The blocks of a file reach the disk in any order.
TEST_F(BatchTest, HolesInATornOneAreCut) {
  for (int hole = 0; hole < 3; ++hole) {
    std::string content = Content();
    std::fill_n(content.begin() + static_cast<int64_t>(single_ + hole * frame_),
                frame_, '\0');
    EXPECT_EQ(Floor(content), 2 + hole) << hole;
    content = Content();
    content[single_ + hole * frame_ + frame_ - 1] ^= 1;
    EXPECT_EQ(Floor(content), 2 + hole) << hole;
  }
}

TEST_F(BatchTest, DamageInOneWithAnotherBehindItIsRefused) {
  // Another behind it.
  std::string content = Content();
  Disk other;
  other.names[kPath] = std::make_shared<Disk::Inode>();
  {
    auto journal = Open(&other);
    ASSERT_TRUE(journal.ok());
    const size_t head = other.names[kPath]->content.size();
    ASSERT_TRUE((*journal)->Append(Opened(6)).ok());
    content += other.names[kPath]->content.substr(head);
  }
  EXPECT_EQ(Floor(content), 6);
  for (int frame = 0; frame < 3; ++frame) {
    std::string damaged = content;
    damaged[single_ + frame * frame_ + frame_ - 1] ^= 1;
    EXPECT_EQ(Floor(damaged), -1) << frame;
    damaged = content;
    std::fill_n(
        damaged.begin() + static_cast<int64_t>(single_ + frame * frame_),
        frame_, '\0');
    EXPECT_EQ(Floor(damaged), -1) << frame;
  }
}

TEST_F(BatchTest, TheFormatBeforeIsRead) {
  std::string content = Content().substr(0, single_);
  EXPECT_EQ(content.substr(0, 8), "WSJRNL02");
  content[7] = '1';
  EXPECT_EQ(Floor(content), 2);
  // It knows no batches: whatever follows was begun later.
  content[single_ - frame_ - 1] ^= 1;
  EXPECT_EQ(Floor(content), -1);
}

// A length that is damaged has all of the file looked through.
TEST(JournalGrowthTest, DamageInALargeFileIsJudgedInSeconds) {
  constexpr int kBytes = 200000;
  Disk disk;
  {
    auto journal = Open(&disk);
    ASSERT_TRUE(journal.ok());
    ASSERT_TRUE((*journal)->Append(Started()).ok());
    for (int v = 200; v < 300; ++v) {
      ASSERT_TRUE((*journal)->Append(Committed(v, "l", kBytes)).ok());
    }
  }
  // The first record's. The next one that is intact is the last; all others
  // are damaged at their ends.
  std::string& content = disk.names[kPath]->content;
  const size_t size = 8 + Committed(200, "l", kBytes).ByteSizeLong();
  content[8 + 8 + Started().ByteSizeLong() + 3] = '\x1f';
  for (size_t end = content.size() - size; end > size; end -= size) {
    content[end - 1] ^= 1;
  }
  const absl::Time begin = absl::Now();
  EXPECT_EQ(ErrorReason(Open(&disk).status()), "JOURNAL_DAMAGED");
  EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
