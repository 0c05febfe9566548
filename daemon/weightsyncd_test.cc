// The program itself: exit codes, signals, and what it leaves behind.

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

extern char** environ;

namespace weightsync {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kDeadline = absl::Seconds(60);

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

class WeightsyncdTest : public ::testing::Test {
 protected:
  WeightsyncdTest() {
    char path[] = "/tmp/wsXXXXXX";
    directory_ = mkdtemp(path);
  }
  ~WeightsyncdTest() override {
    for (pid_t pid : running_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    std::filesystem::remove_all(directory_);
  }

  std::string Path(const std::string& name) { return directory_ + "/" + name; }

  // With places of its own under `name`, unless `flags` say otherwise.
  pid_t Start(const std::string& name,
              const std::vector<std::string>& flags = {}) {
    std::vector<std::string> arguments = {
        "weightsyncd",
        "--node=" + name,
        "--listen=127.0.0.1:0",
        absl::StrCat("--unix_socket=", Path(name), ".sock"),
        absl::StrCat("--state_dir=", Path(name), ".state"),
        absl::StrCat("--ready_file=", Path(name), ".ready"),
        "--store_budget_bytes=1048576",
    };
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(&argument[0]);
    pointers.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, Path(name + ".out").c_str(),
                                     O_CREAT | O_WRONLY | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    pid_t pid = 0;
    EXPECT_EQ(posix_spawn(&pid, "daemon/weightsyncd", &actions, nullptr,
                          pointers.data(), environ),
              0);
    posix_spawn_file_actions_destroy(&actions);
    running_.push_back(pid);
    return pid;
  }

  // Its addresses, when it serves; null when it does not come up.
  nlohmann::json WaitReady(const std::string& name) {
    for (const absl::Time end = absl::Now() + kDeadline; absl::Now() < end;) {
      const std::string text = ReadFile(Path(name + ".ready"));
      if (!text.empty()) return nlohmann::json::parse(text);
      absl::SleepFor(absl::Milliseconds(10));
    }
    ADD_FAILURE() << ReadFile(Path(name + ".out"));
    return nullptr;
  }

  // The exit code, or minus the signal.
  int WaitExit(pid_t pid) {
    for (const absl::Time end = absl::Now() + kDeadline; absl::Now() < end;) {
      int status = 0;
      if (waitpid(pid, &status, WNOHANG) == pid) {
        running_.erase(std::find(running_.begin(), running_.end(), pid));
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
      }
      absl::SleepFor(absl::Milliseconds(10));
    }
    ADD_FAILURE() << "it does not end";
    return -1;
  }

  std::string directory_;
  std::vector<pid_t> running_;
};

TEST_F(WeightsyncdTest, EndsCleanlyAndLeavesNothing) {
  for (int signal : {SIGTERM, SIGINT, SIGHUP}) {
    const pid_t pid = Start("a");
    const nlohmann::json ready = WaitReady("a");
    EXPECT_EQ(ready["pid"], pid);
    kill(pid, signal);
    EXPECT_EQ(WaitExit(pid), 0) << ReadFile(Path("a.out"));
    for (const char* file :
         {"a.sock", "a.sock.fd", "a.sock.lock", "a.sock.fd.lock", "a.ready"}) {
      EXPECT_FALSE(std::filesystem::exists(Path(file))) << file;
    }
  }
}

TEST_F(WeightsyncdTest, ASecondOneSaysWhyItDoesNotStartAndDisturbsNobody) {
  const pid_t first = Start("a");
  const nlohmann::json ready = WaitReady("a");
  const std::string listen = ready["listen"][0];
  for (const std::string& flag :
       {absl::StrCat("--unix_socket=", Path("a.sock")),
        absl::StrCat("--listen=", listen),
        absl::StrCat("--http_address=", listen)}) {
    EXPECT_EQ(WaitExit(Start("b", {flag})), 3) << flag;
    EXPECT_THAT(ReadFile(Path("b.out")), HasSubstr("SOCKET_IN_USE")) << flag;
  }
  EXPECT_THAT(ReadFile(Path("b.out")),
              HasSubstr("give this daemon another --http_address"));
  EXPECT_EQ(
      WaitExit(Start("b", {absl::StrCat("--state_dir=", Path("a.state"))})), 3);
  EXPECT_THAT(ReadFile(Path("b.out")), HasSubstr("STATE_DIR_IN_USE"));
  EXPECT_TRUE(std::filesystem::exists(Path("a.sock")));
  kill(first, SIGTERM);
  EXPECT_EQ(WaitExit(first), 0);
}

TEST_F(WeightsyncdTest, StartsOverWhatAKilledOneLeft) {
  const pid_t first = Start("a");
  ASSERT_NE(WaitReady("a"), nullptr);
  kill(first, SIGKILL);
  EXPECT_EQ(WaitExit(first), -SIGKILL);
  EXPECT_TRUE(std::filesystem::exists(Path("a.sock")));
  std::filesystem::remove(Path("a.ready"));
  const pid_t second = Start("a");
  ASSERT_NE(WaitReady("a"), nullptr);
  kill(second, SIGTERM);
  EXPECT_EQ(WaitExit(second), 0);
}

TEST_F(WeightsyncdTest, WrongFlagsAreNamed) {
  struct Case {
    std::string flag, text;
  };
  const Case cases[] = {
      {"--bucket_bytes=0", "BUCKET_BYTES_INVALID"},
      {"--bucket_bytes=1152921504606846976", "BUCKET_BYTES_INVALID"},
      {"--pause_timeout=never", "--pause_timeout"},
      {"--node=NO", "NODE_NAME_INVALID"},
      {"--no_such_flag", "no_such_flag"},
      {"argument", "argument"},
  };
  for (const Case& wrong : cases) {
    EXPECT_EQ(WaitExit(Start("a", {wrong.flag})), 1) << wrong.flag;
    EXPECT_THAT(ReadFile(Path("a.out")), HasSubstr(wrong.text)) << wrong.flag;
  }
  for (const char* flag : {"--listen=0.0.0.0:0", "--http_address=0.0.0.0:0"}) {
    EXPECT_EQ(WaitExit(Start("a", {flag})), 1) << flag;
    EXPECT_THAT(ReadFile(Path("a.out")), HasSubstr("INSECURE_REQUIRED"));
  }
  // Nobody else is there.
  EXPECT_EQ(WaitExit(Start(
                "a", {"--listen=127.0.0.1:7", "--http_address=127.0.0.1:7"})),
            1);
  EXPECT_THAT(ReadFile(Path("a.out")),
              HasSubstr("--listen and --http_address both name 127.0.0.1:7"));
}

TEST_F(WeightsyncdTest, HelpAndVersion) {
  EXPECT_EQ(WaitExit(Start("a", {"--help"})), 0);
  EXPECT_THAT(ReadFile(Path("a.out")), HasSubstr("-unix_socket"));
  EXPECT_EQ(WaitExit(Start("a", {"--version"})), 0);
  EXPECT_THAT(ReadFile(Path("a.out")), HasSubstr("0.1.0"));
}

}  // namespace
}  // namespace weightsync
