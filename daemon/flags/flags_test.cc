#include "daemon/flags/flags.h"

#include <gflags/gflags.h>

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

class FlagsTest : public ::testing::Test {
 protected:
  absl::StatusOr<Options> Parse(std::vector<std::string> args) {
    args.insert(args.begin(), "weightsyncd");
    std::vector<char*> pointers;
    for (std::string& arg : args) pointers.push_back(&arg[0]);
    int argc = static_cast<int>(pointers.size());
    char** argv = pointers.data();
    ParseCommandLine(&argc, &argv);
    return OptionsFromFlags();
  }

  gflags::FlagSaver saver_;
};

TEST_F(FlagsTest, DefaultsAreLoopbackAndOneUnixSocket) {
  const absl::StatusOr<Options> options = Parse({});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->listen, ElementsAre("127.0.0.1:7670"));
  EXPECT_THAT(options->unix_socket, HasSubstr("weightsyncd.sock"));
  EXPECT_FALSE(options->insecure);
  EXPECT_EQ(options->bucket_bytes, 268435456);
  EXPECT_NE(options->node, "");
}

TEST_F(FlagsTest, ListenMayBeRepeated) {
  const absl::StatusOr<Options> options = Parse(
      {"--listen=127.0.0.1:1", "--node=a", "--listen", "[::1]:2,127.0.0.1:3"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->listen,
              ElementsAre("127.0.0.1:1", "[::1]:2", "127.0.0.1:3"));
  EXPECT_EQ(options->node, "a");
}

TEST_F(FlagsTest, EmptyListenMeansNone) {
  const absl::StatusOr<Options> options = Parse({"--listen="});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->listen, IsEmpty());
}

TEST_F(FlagsTest, LabelsAndPortRange) {
  const absl::StatusOr<Options> options = Parse(
      {"--labels=zone=a", "--labels=rack=r7", "--data_port_range=7000-7010"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->labels,
              ElementsAre(Pair("rack", "r7"), Pair("zone", "a")));
  EXPECT_EQ(options->data_port_first, 7000);
  EXPECT_EQ(options->data_port_last, 7010);
}

TEST_F(FlagsTest, DeadlinesAreTakenOver) {
  const absl::StatusOr<Options> options =
      Parse({"--peer_timeout=3s", "--handshake_timeout=300ms",
             "--max_staleness=2m", "--shutdown_timeout=1s"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->deadlines.peer, absl::Seconds(3));
  EXPECT_EQ(options->deadlines.handshake, absl::Milliseconds(300));
  EXPECT_EQ(options->deadlines.max_staleness, absl::Minutes(2));
  EXPECT_EQ(options->deadlines.shutdown, absl::Seconds(1));
}

TEST_F(FlagsTest, PoliciesOfNcclHaveItsNumbers) {
  EXPECT_EQ(Parse({})->nccl_cta_policy, 1);
  for (const auto& [name, number] : std::vector<std::pair<const char*, int>>{
           {"default", 0}, {"efficiency", 1}, {"zero", 2}}) {
    gflags::FlagSaver saver;
    const absl::StatusOr<Options> options =
        Parse({std::string("--nccl_cta_policy=") + name});
    ASSERT_TRUE(options.ok()) << options.status();
    EXPECT_EQ(options->nccl_cta_policy, number);
  }
}

TEST_F(FlagsTest, WrongValuesNameTheirFlag) {
  for (const char* flag : {"--group=ucx",
                           "--memory=vram",
                           "--gpu_slots=0",
                           "--gpu_slots=65",
                           "--nccl_max_ctas=0",
                           "--nccl_max_ctas=33",
                           "--nccl_cta_policy=all",
                           "--pause_timeout=0s",
                           "--pause_timeout=soon",
                           "--data_port_range=9-8",
                           "--data_port_range=65530-65536",
                           "--data_port_range=0-5",
                           "--data_port_range=7000",
                           "--labels=zone",
                           "--keep_updates=0",
                           "--store_budget_bytes=-1",
                           "--apply_attempts=0",
                           "--heartbeat_timeout=1s",
                           "--peer_timeout=0s",
                           "--handshake_timeout=never"}) {
    gflags::FlagSaver saver;
    const absl::StatusOr<Options> options = Parse({flag});
    ASSERT_FALSE(options.ok()) << flag;
    EXPECT_EQ(ErrorReason(options.status()), "FLAG_INVALID");
    const std::string name =
        std::string(flag).substr(0, std::string(flag).find('='));
    EXPECT_THAT(std::string(options.status().message()), HasSubstr(name));
  }
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
