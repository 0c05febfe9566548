#include "transport/host/limits.h"

#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

using ::testing::HasSubstr;

class LimitsTest : public ::testing::Test {
 protected:
  LimitsTest() {
    std::string pattern = ::testing::TempDir() + "/limitsXXXXXX";
    root_ = mkdtemp(&pattern[0]);
    Write("proc/meminfo",
          "MemTotal:       16000 kB\nMemAvailable:   8000 kB\nBuffers: 1 kB\n");
  }

  void Write(const std::string& path, const std::string& text) {
    for (size_t slash = path.find('/'); slash != std::string::npos;
         slash = path.find('/', slash + 1)) {
      mkdir((root_ + "/" + path.substr(0, slash)).c_str(), 0700);
    }
    std::ofstream(root_ + "/" + path) << text;
  }
  MemoryLimits Look() {
    return LookAtMemory(root_ + "/proc", root_ + "/cgroup");
  }

  std::string root_;
};

TEST_F(LimitsTest, NoControlGroup) {
  const MemoryLimits limits = Look();
  EXPECT_EQ(limits.machine_available_bytes, 8000 * 1024);
  EXPECT_EQ(limits.group_limit_bytes, INT64_MAX);
  EXPECT_EQ(limits.available_bytes(), 8000 * 1024);
}

TEST_F(LimitsTest, Version2TakesTheTightestGroupOnTheWayUp) {
  Write("proc/self/cgroup", "0::/pod/box\n");
  Write("cgroup/pod/box/memory.max", "max\n");
  Write("cgroup/pod/box/memory.current", "1000\n");
  Write("cgroup/pod/memory.max", "5000\n");
  Write("cgroup/pod/memory.current", "3000\n");
  Write("cgroup/pod/memory.stat", "anon 1\ninactive_file 500\n");
  const MemoryLimits limits = Look();
  EXPECT_EQ(limits.group_limit_bytes, 5000);
  EXPECT_EQ(limits.group_available_bytes, 2500);
  EXPECT_EQ(limits.available_bytes(), 2500);
  EXPECT_THAT(limits.group, HasSubstr("/pod"));
}

TEST_F(LimitsTest, Version1) {
  Write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x\n");
  Write("cgroup/memory/x/memory.limit_in_bytes", "7000\n");
  Write("cgroup/memory/x/memory.usage_in_bytes", "6000\n");
  Write("cgroup/memory/x/memory.stat",
        "inactive_file 1\ntotal_inactive_file 400\n");
  Write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("cgroup/memory/memory.usage_in_bytes", "6000\n");
  EXPECT_EQ(Look().group_available_bytes, 1400);
}

TEST_F(LimitsTest, InAContainerOnlyTheRootIsThere) {
  Write("proc/self/cgroup", "0::/../host/path\n");
  Write("cgroup/memory.max", "4096\n");
  Write("cgroup/memory.current", "96\n");
  EXPECT_EQ(Look().group_available_bytes, 4000);
}

TEST_F(LimitsTest, RefusalNamesBothSums) {
  MemoryLimits limits;
  limits.machine_available_bytes = 1000;
  limits.group_limit_bytes = 900;
  limits.group_available_bytes = 800;
  EXPECT_TRUE(CheckMemory("arena", 700, 100, limits).ok());
  const absl::Status status = CheckMemory("arena", 701, 100, limits);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "NO_MEMORY_FOR_ARENA");
  EXPECT_THAT(std::string(status.message()), HasSubstr("701"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("1000"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("800"));
}

TEST(Limits, ThisMachine) {
  const MemoryLimits limits = LookAtMemory();
  EXPECT_GT(limits.available_bytes(), 0);
  EXPECT_LT(limits.available_bytes(), int64_t{1} << 50);
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
