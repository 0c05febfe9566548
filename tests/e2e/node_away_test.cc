// What a node does by itself while its coordinator is away
// (daemon/node/away.h): see node_fixture.h.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/e2e/node_fixture.h"
#include "tests/e2e/processes.h"

namespace weightsync {
namespace e2e {
namespace {

class NodeAwayTest : public NodeTest {
 protected:
  // What /metrics says; -1: not there.
  double Metric(const std::string& name) {
    const std::vector<std::string> address =
        absl::StrSplit(daemon_->addresses().http, ':');
    int port = 0;
    if (address.size() != 2 || !absl::SimpleAtoi(address[1], &port)) return -1;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const timeval patience = {20, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(port));
    inet_pton(AF_INET, address[0].c_str(), &to.sin_addr);
    const std::string request =
        "GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n";
    std::string answer;
    if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0 &&
        send(fd, request.data(), request.size(), MSG_NOSIGNAL) > 0) {
      char buffer[4096];
      ssize_t size;
      while ((size = recv(fd, buffer, sizeof(buffer), 0)) > 0) {
        answer.append(buffer, static_cast<size_t>(size));
      }
    }
    close(fd);
    for (absl::string_view line : absl::StrSplit(answer, '\n')) {
      double value = 0;
      if (absl::ConsumePrefix(&line, name + " ") &&
          absl::SimpleAtod(line, &value)) {
        return value;
      }
    }
    return -1;
  }
};

TEST_F(NodeAwayTest, AnOfferWhoseCommitNeverComesIsRefusedForGood) {
  StartDaemon();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 2);
  Fill(1);
  const v1::DefineLayout define = Stage("u1", 1);
  Pause("u1", /*may_refuse=*/true, /*barrier_seconds=*/1);
  EXPECT_TRUE(engine_->replica().paused());
  coordinator_.Leave();
  EXPECT_TRUE(Eventually([&] { return !engine_->replica().paused(); }));
  ASSERT_EQ(engine_->resumes().size(), 1u);
  EXPECT_EQ(engine_->resumes()[0].update_id, "") << "on what it came with";
  EXPECT_FALSE(engine_->resumes()[0].weights_changed);
  // Also by a daemon that was started again meanwhile: it is on the disk.
  daemon_->Shutdown();
  daemon_ = nullptr;
  publisher_.join();
  StartDaemon();
  coordinator_.Return();
  const auto joined = coordinator_.WaitFor("a", [](const v1::NodeReport& r) {
    return r.has_replica_joined() &&
           r.replica_joined().refused_command_ids_size() > 0;
  });
  EXPECT_EQ(joined.replica_joined().refused_command_ids(0), "pause/u1");
  EXPECT_FALSE(joined.replica_joined().registration().paused());
  // And what was committed after all is not written into an engine that runs.
  coordinator_.Define("models/m", 64 << 10, {"a"});
  ASSERT_TRUE(Eventually([&] {
    return engine_->worker(0).status().ok() && engine_->worker(1).status().ok();
  }));
  coordinator_.Send("a", coordinator_.ApplyOf(define, "r", 0, "u1", 1, "late"));
  EXPECT_EQ(WaitApplied("late").failure().reason(), "REPLICA_RUNNING");
  EXPECT_EQ(engine_->live(0)[0], '\xA5');
}

// A refusal that may not be on the disk is acted on by nobody: the daemon ends
// without a word to the engine, and its successor knows of no refusal.
TEST_F(NodeAwayTest, ARefusalThatCannotBeWrittenEndsTheDaemon) {
  const std::string state = directory_ + "/state";
  const std::string ready = directory_ + "/ready";
  const auto start = [&](const std::string& log) {
    std::filesystem::remove(ready);
    auto process = std::make_unique<Process>(
        std::vector<std::string>{
            DataPath("daemon/weightsyncd"), "--node=a", "--listen=",
            "--unix_socket=" + directory_ + "/d.sock", "--state_dir=" + state,
            "--coordinator_address=" + coordinator_.address(),
            "--store_budget_bytes=64000000", "--heartbeat_interval=200ms",
            "--heartbeat_timeout=20s", "--node_reconnect_grace=300ms",
            "--ready_file=" + ready},
        directory_ + "/" + log);
    EXPECT_TRUE(WaitUntil([&] {
      return std::filesystem::exists(ready) || !process->Running();
    })) << process->Log();
    return process;
  };
  std::unique_ptr<Process> process = start("first.log");
  ASSERT_TRUE(process->Running()) << process->Log();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 1);
  Fill(1);
  Stage("u1", 1);
  publisher_.join();
  // Where its journal is written before it takes the old one's place.
  const std::string obstacle = state + "/node_journal.new";
  std::filesystem::create_directory(obstacle);
  Pause("u1", /*may_refuse=*/true, /*barrier_seconds=*/1);
  coordinator_.Leave();
  const auto exit = process->Wait(absl::Seconds(60));
  ASSERT_TRUE(exit.has_value()) << process->Log();
  EXPECT_EQ(*exit, 128 + SIGABRT) << process->Log();
  EXPECT_NE(process->Log().find("the node's journal: "), std::string::npos)
      << process->Log();
  EXPECT_TRUE(engine_->replica().paused());
  EXPECT_TRUE(engine_->resumes().empty());

  std::filesystem::remove(obstacle);
  process = start("second.log");
  coordinator_.Return();
  const auto joined = coordinator_.WaitFor("a", [](const v1::NodeReport& r) {
    return r.has_replica_joined() && r.replica_joined().registration().paused();
  });
  EXPECT_EQ(joined.replica_joined().refused_command_ids_size(), 0);
  EXPECT_TRUE(engine_->resumes().empty());
  engine_ = nullptr;
  trainer_ = nullptr;
}

TEST_F(NodeAwayTest, WithoutLeaveToRefuseItStaysPausedWithAnAlarm) {
  StartDaemon(
      [](daemon::Options* options) { options->http_address = "127.0.0.1:0"; });
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 1);
  Fill(1);
  Stage("u1", 1);
  Pause("u1", /*may_refuse=*/false, /*barrier_seconds=*/1);
  EXPECT_EQ(Metric("weightsync_replica_alarms"), 0);
  EXPECT_LT(Metric("weightsync_coordinator_silence_seconds"), 5);
  EXPECT_GE(Metric("weightsync_coordinator_silence_seconds"), 0);
  coordinator_.Leave();
  EXPECT_TRUE(
      Eventually([&] { return Metric("weightsync_replica_alarms") == 1; }));
  EXPECT_TRUE(engine_->replica().paused());
  EXPECT_GE(Metric("weightsync_coordinator_silence_seconds"), 1);
  absl::SleepFor(absl::Seconds(2));
  EXPECT_TRUE(engine_->replica().paused());
  EXPECT_EQ(Metric("weightsync_replica_alarms"), 1);
  coordinator_.Return();
  EXPECT_TRUE(
      Eventually([&] { return Metric("weightsync_replica_alarms") == 0; }));
  const auto joined = coordinator_.WaitFor("a", [](const v1::NodeReport& r) {
    return r.has_replica_joined() && r.replica_joined().registration().paused();
  });
  EXPECT_EQ(joined.replica_joined().refused_command_ids_size(), 0);
}

TEST_F(NodeAwayTest, PastTheCommitAReplicaFinishesByItself) {
  StartDaemon();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 2);
  Fill(1);
  const v1::DefineLayout define = Stage("u1", 1);
  Pause("u1", /*may_refuse=*/true, /*barrier_seconds=*/1);
  // The word came for one worker of two.
  Apply(define, 0, "u1", 1);
  coordinator_.Leave();
  EXPECT_TRUE(Eventually([&] { return !engine_->replica().paused(); }));
  for (int w = 0; w < 2; ++w) {
    EXPECT_EQ(engine_->worker(w).installed().update_id(), "u1");
    EXPECT_TRUE(engine_->live(w) == Published());
  }
  ASSERT_EQ(engine_->resumes().size(), 1u);
  EXPECT_EQ(engine_->resumes()[0].update_id, "u1");
  EXPECT_TRUE(engine_->resumes()[0].weights_changed);
}

// Its engine's hook fails: it is asked again, and the alarm says so meanwhile.
TEST_F(NodeAwayTest, AnEngineThatCannotResumeIsAskedAgain) {
  StartDaemon(
      [](daemon::Options* options) { options->http_address = "127.0.0.1:0"; });
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 1);
  engine_->RefuseResumes(2);
  Fill(1);
  const v1::DefineLayout define = Stage("u1", 1);
  Pause("u1", /*may_refuse=*/true, /*barrier_seconds=*/1);
  Apply(define, 0, "u1", 1);
  coordinator_.Leave();
  EXPECT_TRUE(
      Eventually([&] { return Metric("weightsync_replica_alarms") == 1; }));
  EXPECT_TRUE(Eventually([&] { return !engine_->replica().paused(); }));
  ASSERT_EQ(engine_->resumes().size(), 1u);
  EXPECT_EQ(engine_->resumes()[0].update_id, "u1");
  EXPECT_TRUE(
      Eventually([&] { return Metric("weightsync_replica_alarms") == 0; }));
}

// The coordinator says so when an operator holds a replica beside an update:
// what the update needs does not end the operator's pause, also where no
// coordinator is there to remember it.
TEST_F(NodeAwayTest, PastTheCommitAnOperatorsHoldStays) {
  StartDaemon();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 1);
  Fill(1);
  const v1::DefineLayout define = Stage("u1", 1);
  Pause("u1", /*may_refuse=*/true, /*barrier_seconds=*/1);
  Apply(define, 0, "u1", 1);
  Pause("");
  coordinator_.Leave();
  absl::SleepFor(absl::Seconds(2));
  EXPECT_TRUE(engine_->replica().paused());
  coordinator_.Return();
  coordinator_.Define("models/m", 64 << 10, {"a"});
  // The operator's hold ends, the update's is still there.
  Pause("u1");
  coordinator_.Leave();
  EXPECT_TRUE(Eventually([&] { return !engine_->replica().paused(); }));
  ASSERT_EQ(engine_->resumes().size(), 1u);
  EXPECT_EQ(engine_->resumes()[0].update_id, "u1");
  EXPECT_EQ(engine_->resumes()[0].version, 1);
}

TEST_F(NodeAwayTest, AnIsolatedReplicaIsPausedWhereItWasToldSo) {
  StartDaemon([](daemon::Options* options) {
    options->pause_on_isolation = true;
    options->deadlines.max_staleness = absl::Seconds(1);
  });
  engine_ = std::make_unique<Engine>(address(), 1);
  coordinator_.Leave();
  EXPECT_TRUE(Eventually([&] { return engine_->replica().paused(); }));
  coordinator_.Return();
  const auto joined = coordinator_.WaitFor("a", [](const v1::NodeReport& r) {
    return r.has_replica_joined() && r.replica_joined().isolation_hold();
  });
  EXPECT_TRUE(joined.replica_joined().registration().paused());
  Resume("");
  EXPECT_TRUE(Eventually([&] { return !engine_->replica().paused(); }));
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
