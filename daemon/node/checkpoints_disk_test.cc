// What reaches the disk, and when: a checkpoint is there whole or not at all,
// also after the machine has lost its power or its disk is full.

#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <cerrno>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "daemon/node/checkpoints.h"
#include "daemon/node/checkpoints_testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

namespace fs = std::filesystem;

using ::testing::Contains;
using ::testing::IsSupersetOf;
using testing::OneWriterTest;
using testing::ReadAll;

// Every fsync of this program passes here.
class Syncs {
 public:
  struct Sync {
    std::string path;
    // Whether the checkpoint was in its place by then.
    bool after;
  };

  void Watch(const fs::path& root, const fs::path& target,
             const std::string& fail = "") ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    // As the kernel names it.
    root_ = root.empty() ? "" : fs::canonical(root).string();
    target_ = target.string();
    fail_ = fail;
    failed_ = 0;
    seen_.clear();
  }
  std::vector<Sync> seen() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return seen_;
  }
  int failed() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return failed_;
  }

  int OnSync(int fd) ABSL_LOCKS_EXCLUDED(mutex_) {
    std::string path(4096, '\0');
    const std::string link = absl::StrCat("/proc/self/fd/", fd);
    const ssize_t size = readlink(link.c_str(), &path[0], path.size());
    path.resize(size < 0 ? 0 : static_cast<size_t>(size));
    {
      absl::MutexLock lock(&mutex_);
      if (!root_.empty() && absl::StartsWith(path, root_)) {
        const std::string name =
            path.size() > root_.size() ? path.substr(root_.size() + 1) : "";
        const bool after = access(target_.c_str(), F_OK) == 0;
        seen_.push_back({name, after});
        // "=runs": once the checkpoint is in its place.
        if (!fail_.empty() &&
            (fail_ == name || (after && fail_ == "=" + name))) {
          ++failed_;
          errno = EIO;
          return -1;
        }
      }
    }
    return static_cast<int>(syscall(SYS_fsync, fd));
  }

 private:
  absl::Mutex mutex_;
  std::string root_ ABSL_GUARDED_BY(mutex_);
  std::string target_ ABSL_GUARDED_BY(mutex_);
  std::string fail_ ABSL_GUARDED_BY(mutex_);
  int failed_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Sync> seen_ ABSL_GUARDED_BY(mutex_);
};

Syncs& TheSyncs() {
  static Syncs* const syncs = new Syncs;
  return *syncs;
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync

// Takes the place of libc's.
extern "C" int fsync(int fd) {
  return weightsync::daemon::TheSyncs().OnSync(fd);
}

namespace weightsync {
namespace daemon {
namespace {

class CheckpointsDiskTest : public OneWriterTest {
 protected:
  CheckpointsDiskTest() {
    fs::create_directories(root() / "template/sub");
    std::ofstream(root() / "template/config.json") << "{}";
    std::ofstream(root() / "template/sub/more.txt") << "more";
  }
  ~CheckpointsDiskTest() override { TheSyncs().Watch("", ""); }

  v1::CheckpointWritten Complete(bool overwrite,
                                 const std::string& template_path) {
    auto complete = CompleteCommand(define_);
    complete.set_overwrite(overwrite);
    complete.set_template_path(template_path);
    return Do(a_.get(), complete);
  }
  void GiveUp() {
    auto give_up = CompleteCommand(define_);
    give_up.set_give_up(true);
    EXPECT_EQ(Do(a_.get(), give_up).failure().message(), "");
    EXPECT_FALSE(fs::exists(root() / "runs/.7.tmp"));
  }
  std::set<std::string> Synced(bool after) {
    std::set<std::string> names;
    for (const auto& sync : TheSyncs().seen()) {
      if (sync.after == after) names.insert(sync.path);
    }
    return names;
  }
  // Of the checkpoint that is written, or is there.
  std::set<std::string> ShardsIn(const std::string& directory) {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(root() / directory)) {
      if (entry.path().extension() == ".safetensors") {
        names.insert(entry.path().filename());
      }
    }
    return names;
  }
};

TEST_F(CheckpointsDiskTest, EverythingIsSyncedBeforeItIsInItsPlace) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const fs::path target = root() / "runs/7";
  TheSyncs().Watch(root(), target);
  ASSERT_EQ(Begin().failure().message(), "");
  EXPECT_THAT(Synced(false), Contains("")) << "runs is new in the root";
  std::set<std::string> shards;
  for (const std::string& name : ShardsIn("runs/.7.tmp")) {
    shards.insert("runs/.7.tmp/" + name);
  }
  ASSERT_GT(shards.size(), 1u);
  // What was synced before its bytes were written does not count.
  TheSyncs().Watch(root(), target);
  ASSERT_EQ(WriteAll().failure().message(), "");
  EXPECT_THAT(Synced(false), IsSupersetOf(shards));
  TheSyncs().Watch(root(), target);
  ASSERT_EQ(Complete(false, "template").failure().message(), "");
  EXPECT_THAT(Synced(false),
              IsSupersetOf({std::string("runs/.7.tmp"),
                            std::string("runs/.7.tmp/config.json"),
                            std::string("runs/.7.tmp/sub"),
                            std::string("runs/.7.tmp/sub/more.txt"),
                            "runs/.7.tmp/" + std::string(kCheckpointNote),
                            std::string("runs/.7.tmp/"
                                        "model.safetensors.index.json")}));
  // The directory last: the names of all of them are in it.
  std::string last;
  for (const auto& sync : TheSyncs().seen()) {
    if (!sync.after) last = sync.path;
  }
  EXPECT_EQ(last, "runs/.7.tmp");
  EXPECT_THAT(Synced(true), Contains("runs"));
}

TEST_F(CheckpointsDiskTest, ADiskThatCannotSyncLeavesTheOldOne) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_EQ(Begin().failure().message(), "");
  ASSERT_EQ(WriteAll().failure().message(), "");
  ASSERT_EQ(Complete(false, "template").failure().message(), "");
  const std::string shard = *ShardsIn("runs/7").begin();
  std::ofstream(root() / "template/config.json") << "{\"new\": 1}";
  const std::vector<std::string> wrong = {shard,
                                          "model.safetensors.index.json",
                                          "config.json",
                                          "sub/more.txt",
                                          "sub",
                                          std::string(kCheckpointNote),
                                          ""};
  for (const std::string& name : wrong) {
    SCOPED_TRACE(name);
    const std::string path = "runs/.7.tmp" + (name.empty() ? "" : "/" + name);
    ASSERT_EQ(Begin(true).failure().message(), "");
    TheSyncs().Watch(root(), root() / "nowhere", path);
    v1::CheckpointWritten written = WriteAll();
    EXPECT_EQ(written.has_failure(), name == shard);
    if (!written.has_failure()) written = Complete(true, "template");
    EXPECT_EQ(TheSyncs().failed(), 1);
    EXPECT_EQ(written.failure().reason(), "CHECKPOINT_IO");
    EXPECT_THAT(written.failure().message(), ::testing::HasSubstr(path));
    TheSyncs().Watch("", "");
    GiveUp();
    ExpectHolds("runs/7", define_, model_);
    EXPECT_EQ(ReadAll(root() / "runs/7/config.json"), "{}");
  }
}

// The new one was in its place already.
TEST_F(CheckpointsDiskTest, ADirectoryThatCannotBeSyncedPutsTheOldOneBack) {
  ASSERT_NO_FATAL_FAILURE(Start());
  for (const bool there : {false, true}) {
    ASSERT_EQ(Begin(there).failure().message(), "");
    ASSERT_EQ(WriteAll().failure().message(), "");
    // Once the old one was there, "after" is always so: the first sync of the
    // directory of both is the one after the exchange.
    TheSyncs().Watch(root(), root() / "runs/7", "=runs");
    const v1::CheckpointWritten written = Complete(there, "template");
    TheSyncs().Watch("", "");
    EXPECT_EQ(written.failure().reason(), "CHECKPOINT_IO") << there;
    EXPECT_EQ(fs::exists(root() / "runs/7"), there);
    GiveUp();
    EXPECT_EQ(fs::exists(root() / "runs/7"), there);
    if (there) {
      ExpectHolds("runs/7", define_, model_);
      EXPECT_FALSE(fs::exists(root() / "runs/7/config.json"))
          << "it is the new one";
      break;
    }
    ASSERT_EQ(Begin().failure().message(), "");
    ASSERT_EQ(WriteAll().failure().message(), "");
    ASSERT_EQ(Complete(false, "").failure().message(), "");
  }
}

TEST_F(CheckpointsDiskTest, AFullDiskLeavesTheOldOneWhole) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_EQ(Begin().failure().message(), "");
  ASSERT_EQ(WriteAll().failure().message(), "");
  ASSERT_EQ(Do(a_.get(), CompleteCommand(define_)).failure().message(), "");
  // As a full disk does, but for this process alone.
  signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 100000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const v1::CheckpointWritten full = Begin(true);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(full.failure().reason(), "DISK_FULL");
  EXPECT_EQ(full.failure().code(), 8);
  EXPECT_FALSE(fs::exists(root() / "runs/.7.tmp"));
  ExpectHolds("runs/7", define_, model_);
}

TEST_F(CheckpointsDiskTest, ADiskThatIsReallyFull) {
  if (mount("none", root().c_str(), "tmpfs", 0, "size=64k") != 0) {
    GTEST_SKIP() << "needs root";
  }
  ASSERT_NO_FATAL_FAILURE(Start());
  EXPECT_EQ(Begin().failure().reason(), "DISK_FULL");
  EXPECT_FALSE(fs::exists(root() / "runs/.7.tmp"));
}

// Room for the shards alone: what is written last finds none.
TEST_F(CheckpointsDiskTest, ADiskThatIsFullOnceTheShardsAreThere) {
  if (mount("none", root().c_str(), "tmpfs", 0, "size=16m") != 0) {
    GTEST_SKIP() << "needs root";
  }
  fs::create_directories(root() / "template");
  std::ofstream(root() / "template/config.json") << "{}";
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_EQ(Begin().failure().message(), "");
  ASSERT_EQ(WriteAll().failure().message(), "");
  ASSERT_EQ(Complete(false, "template").failure().message(), "");
  for (const std::string template_path : {"template", ""}) {
    SCOPED_TRACE(template_path);
    ASSERT_EQ(Begin(true).failure().message(), "");
    ASSERT_EQ(WriteAll().failure().message(), "");
    {
      std::ofstream filler(root() / "filler");
      const std::string block(4096, 'x');
      while (filler.write(block.data(), 4096).flush()) {
      }
    }
    const v1::CheckpointWritten full = Complete(true, template_path);
    EXPECT_EQ(full.failure().reason(), "DISK_FULL");
    EXPECT_THAT(full.failure().message(),
                ::testing::HasSubstr(template_path.empty()
                                         ? "model.safetensors.index.json"
                                         : "config.json"));
    fs::remove(root() / "filler");
    GiveUp();
    ExpectHolds("runs/7", define_, model_);
    EXPECT_EQ(ReadAll(root() / "runs/7/config.json"), "{}");
  }
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
