#include "transport/host/foreign_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "transport/error.h"
#include "transport/host/copy_pool.h"

namespace weightsync {
namespace transport {
namespace {

class ForeignMemoryTest : public ::testing::Test {
 protected:
  ForeignMemoryTest() : name_("/ws_foreign_test_" + std::to_string(getpid())) {
    owner_ = UniqueFd(shm_open(name_.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600));
    EXPECT_EQ(ftruncate(owner_.get(), 20000), 0);
    EXPECT_EQ(pwrite(owner_.get(), "weights", 7, 5000), 7);
  }
  ~ForeignMemoryTest() override { shm_unlink(name_.c_str()); }

  std::string MapReason(int64_t offset, int64_t bytes) {
    return ReasonOf(ForeignMemory::Map(owner_, offset, bytes, false).status());
  }

  const std::string name_;
  UniqueFd owner_;
};

TEST_F(ForeignMemoryTest, MapsAnyOffset) {
  absl::StatusOr<UniqueFd> fd = OpenPosixShm(name_, /*writable=*/false);
  ASSERT_TRUE(fd.ok()) << fd.status();
  absl::StatusOr<std::unique_ptr<ForeignMemory>> memory =
      ForeignMemory::Map(*fd, 5000, 15000, false);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(std::string((*memory)->data(), 7), "weights");
  EXPECT_EQ((*memory)->bytes(), 15000);
  EXPECT_FALSE((*memory)->sealed());
  EXPECT_EQ(
      ReasonOf(ForeignMemory::Map(*fd, 0, 100, /*writable=*/true).status()),
      "READ_ONLY");
}

TEST_F(ForeignMemoryTest, RefusesWhatGoesBeyondTheSegment) {
  EXPECT_EQ(MapReason(0, 20000), "");
  EXPECT_EQ(MapReason(0, 20001), "SEGMENT_TOO_SMALL");
  EXPECT_EQ(MapReason(19999, 2), "SEGMENT_TOO_SMALL");
  EXPECT_EQ(MapReason(20001, 1), "SEGMENT_TOO_SMALL");
  EXPECT_EQ(MapReason(INT64_MAX, INT64_MAX), "SEGMENT_TOO_SMALL");
  EXPECT_EQ(MapReason(-1, 10), "BAD_SIZE");
  EXPECT_EQ(MapReason(0, 0), "BAD_SIZE");
  EXPECT_EQ(MapReason(0, -1), "BAD_SIZE");
  EXPECT_EQ(ReasonOf(ForeignMemory::Map(UniqueFd(), 0, 1, false).status()),
            "NOT_MEMORY");
}

TEST_F(ForeignMemoryTest, Names) {
  EXPECT_EQ(ReasonOf(OpenPosixShm(name_ + "_not_there", false).status()),
            "SEGMENT_UNKNOWN");
  for (const std::string& name :
       {std::string(), std::string("/"), std::string("/../etc/passwd"),
        std::string("/.."), std::string("no_slash"), std::string("/a\0b", 4)}) {
    EXPECT_EQ(ReasonOf(OpenPosixShm(name, false).status()), "BAD_SEGMENT_NAME")
        << name;
  }
}

std::string OpenReason(pid_t process, const UniqueFd& fd, int inode_shift = 0) {
  struct stat found = {};
  fstat(fd.get(), &found);
  return ReasonOf(OpenProcessFile(process, fd.get(), found.st_dev,
                                  found.st_ino + inode_shift)
                      .status());
}

TEST_F(ForeignMemoryTest, FilesThatAProcessHasOpen) {
  // Of a child: what it has open is not ours by accident.
  UniqueFd mine(memfd_create("weights", 0));
  ASSERT_EQ(ftruncate(mine.get(), 8192), 0);
  ASSERT_EQ(pwrite(mine.get(), "weights", 7, 4096), 7);
  int hold[2];
  ASSERT_EQ(pipe(hold), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(hold[1]);
    char byte;
    _exit(read(hold[0], &byte, 1) == 0 ? 0 : 1);
  }
  close(hold[0]);
  struct stat found;
  ASSERT_EQ(fstat(mine.get(), &found), 0);
  const int number = mine.get();
  mine.reset();
  const auto opened =
      OpenProcessFile(child, number, found.st_dev, found.st_ino);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const auto memory = ForeignMemory::Map(*opened, 0, 8192, /*writable=*/false);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(std::string((*memory)->data() + 4096, 7), "weights");

  // Unlinked shared memory.
  shm_unlink(name_.c_str());
  EXPECT_EQ(OpenReason(child, owner_), "");
  // Another file under that number: this process is another one there.
  EXPECT_EQ(OpenReason(child, owner_, 1), "SEGMENT_UNKNOWN");
  EXPECT_EQ(ReasonOf(OpenProcessFile(child, 9999, 1, 1).status()),
            "SEGMENT_UNKNOWN");
  EXPECT_EQ(ReasonOf(OpenProcessFile(child, -1, 1, 1).status()),
            "SEGMENT_UNKNOWN");
  EXPECT_EQ(ReasonOf(OpenProcessFile(0, number, 1, 1).status()),
            "SEGMENT_UNKNOWN");
  close(hold[1]);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(
      ReasonOf(
          OpenProcessFile(child, number, found.st_dev, found.st_ino).status()),
      "SEGMENT_UNKNOWN");
}

TEST_F(ForeignMemoryTest, FilesThatAreNoMemory) {
  UniqueFd disk(open("/proc/self/exe", O_RDONLY));
  EXPECT_EQ(OpenReason(getpid(), disk), "NOT_MEMORY");
  UniqueFd device(open("/dev/null", O_RDONLY));
  EXPECT_EQ(OpenReason(getpid(), device), "NOT_MEMORY");
  // Opening one to look at it would wait for a writer, or wake one.
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_EQ(OpenReason(getpid(), UniqueFd(ends[0])), "NOT_MEMORY");
  EXPECT_EQ(OpenReason(getpid(), UniqueFd(ends[1])), "NOT_MEMORY");
}

// What the kernel would let a process of that user do, whoever asks.
TEST_F(ForeignMemoryTest, AnotherUsersSegmentIsRefused) {
  struct stat found;
  ASSERT_EQ(fstat(owner_.get(), &found), 0);
  const uid_t uid = found.st_uid;
  const gid_t gid = found.st_gid;
  const auto reason = [&](uid_t who, gid_t group) {
    return ReasonOf(CheckOwner(owner_, name_, who, group));
  };
  EXPECT_EQ(reason(uid, gid), "");
  EXPECT_EQ(reason(0, 0), "");
  EXPECT_EQ(reason(uid + 1, gid), "SEGMENT_DENIED");
  EXPECT_EQ(reason(uid + 1, gid + 1), "SEGMENT_DENIED");
  ASSERT_EQ(fchmod(owner_.get(), 0640), 0);
  EXPECT_EQ(reason(uid + 1, gid), "");
  EXPECT_EQ(reason(uid + 1, gid + 1), "SEGMENT_DENIED");
  ASSERT_EQ(fchmod(owner_.get(), 0604), 0);
  EXPECT_EQ(reason(uid + 1, gid + 1), "");
  EXPECT_EQ(reason(uid + 1, gid), "SEGMENT_DENIED");
}

TEST_F(ForeignMemoryTest, ATruncatedSegmentFailsTheCopy) {
  absl::StatusOr<std::unique_ptr<ForeignMemory>> memory =
      ForeignMemory::Map(owner_, 0, 20000, false);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ(ftruncate(owner_.get(), 4096), 0);
  CopyPool pool(2);
  std::vector<char> target(20000);
  CopyTask task;
  task.src = (*memory)->data();
  task.dst = target.data();
  task.run_bytes = 20000;
  CopyOptions options;
  options.guard_source = true;
  EXPECT_EQ(ReasonOf(pool.Copy({task}, options)), "SOURCE_MEMORY_LOST");
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
