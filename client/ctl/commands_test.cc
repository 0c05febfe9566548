#include "client/ctl/commands.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "client/ctl/help.h"
#include "client/ctl/names.h"
#include "proto/status.h"
#include "weightsync/v1/admin.grpc.pb.h"

namespace weightsync {
namespace ctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class FakeAdmin : public v1::AdminService::Service {
 public:
  grpc::Status GetCluster(grpc::ServerContext*, const v1::GetClusterRequest*,
                          v1::Cluster* cluster) override {
    cluster->set_cluster_id("c0ffee00");
    cluster->set_coordinator("nodes/a");
    if (blocked) {
      cluster->mutable_blocked()->set_code(9);
      cluster->mutable_blocked()->set_reason("JOURNAL_LOST");
      cluster->mutable_blocked()->set_message("Say `weightsyncctl adopt`.");
    }
    while (silent) absl::SleepFor(absl::Milliseconds(5));
    return failure;
  }
  grpc::Status ListNodes(grpc::ServerContext*, const v1::ListNodesRequest* q,
                         v1::ListNodesResponse* r) override {
    // Two pages.
    r->add_nodes()->set_name(q->page_token().empty() ? "nodes/a" : "nodes/b");
    if (q->page_token().empty()) r->set_next_page_token("2");
    return failure;
  }
  grpc::Status ListModels(grpc::ServerContext*, const v1::ListModelsRequest*,
                          v1::ListModelsResponse* r) override {
    for (const std::string& model : models) r->add_models()->set_name(model);
    return failure;
  }
  grpc::Status ListReplicas(grpc::ServerContext*,
                            const v1::ListReplicasRequest* q,
                            v1::ListReplicasResponse* r) override {
    parents.push_back(q->parent());
    r->add_replicas()->set_name("models/m/replicas/r0");
    return failure;
  }
  grpc::Status ListVersions(grpc::ServerContext*,
                            const v1::ListVersionsRequest* q,
                            v1::ListVersionsResponse*) override {
    parents.push_back(q->parent());
    return failure;
  }
  grpc::Status GetVersion(grpc::ServerContext*, const v1::GetVersionRequest* q,
                          v1::Version*) override {
    parents.push_back(q->name());
    return ToGrpcStatus(ErrorStatus(absl::StatusCode::kNotFound,
                                    "VERSION_UNKNOWN", "No such version."));
  }
  grpc::Status WatchVersion(grpc::ServerContext* context,
                            const v1::WatchVersionRequest* q,
                            grpc::ServerWriter<v1::Version>* writer) override {
    parents.push_back(q->name());
    for (const v1::Version& version : watched) writer->Write(version);
    while (hang && !context->IsCancelled()) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    return failure;
  }
  grpc::Status Prepare(grpc::ServerContext*, const v1::PrepareRequest* q,
                       v1::PrepareResponse* r) override {
    parents.push_back(q->model());
    r->set_layout_id("ab");
    r->set_bucket_count(4);
    r->set_wire_bytes(1000000);
    return failure;
  }

  grpc::Status RemoveModel(grpc::ServerContext*,
                           const v1::RemoveModelRequest* q,
                           v1::Model* model) override {
    *model = removed;
    model->set_name(q->name());
    return failure;
  }
  grpc::Status LoadVersion(grpc::ServerContext*, const v1::LoadVersionRequest*,
                           v1::Version* version) override {
    *version = loaded;
    return failure;
  }
  grpc::Status SaveVersion(grpc::ServerContext*, const v1::SaveVersionRequest*,
                           v1::SaveVersionResponse* r) override {
    r->set_path("run/1");
    r->set_version(1);
    r->set_tensor_count(1);
    r->set_shard_count(1);
    r->add_nodes("nodes/a");
    return failure;
  }
  grpc::Status VerifyReplica(grpc::ServerContext*,
                             const v1::VerifyReplicaRequest*,
                             v1::VerifyReplicaResponse* r) override {
    r->set_equal(true);
    r->set_version(1);
    r->add_workers()->set_tensor_count(1);
    if (uncompared || different) r->set_equal(false);
    if (different) r->mutable_workers(0)->add_different_tensors("w");
    if (uncompared) {
      auto* failed = r->add_workers()->mutable_failure();
      failed->set_reason("DIGESTS_UNKNOWN");
      failed->set_message("It holds none.");
    }
    return failure;
  }

  bool uncompared = false;
  bool different = false;
  v1::Model removed;
  v1::Version loaded;
  grpc::Status failure;
  std::vector<std::string> models = {"models/m"};
  std::vector<v1::Version> watched;
  bool hang = false;
  std::atomic<bool> silent{false};
  bool blocked = false;
  // What the calls asked for.
  std::vector<std::string> parents;
};

class CommandsTest : public ::testing::Test {
 protected:
  CommandsTest() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(),
                             &port);
    builder.RegisterService(&admin_);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
  }

  int Ctl(std::vector<std::string> args) {
    out_.str("");
    err_.str("");
    Screen screen;
    screen.out = &out_;
    screen.err = &err_;
    screen.terminal = terminal_;
    screen.columns = 120;
    return ctl::Run(args, address_, screen);
  }

  static v1::Version Version(v1::Version::State state, int64_t moved = 0) {
    v1::Version version;
    version.set_name("models/m/versions/1");
    version.set_version(1);
    version.set_update_id("u1");
    version.set_state(state);
    version.set_wire_bytes(100);
    version.set_total_bytes(100);
    version.set_moved_bytes(moved);
    return version;
  }

  FakeAdmin admin_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  bool terminal_ = false;
  std::ostringstream out_;
  std::ostringstream err_;
};

TEST_F(CommandsTest, ListsTakeAllPages) {
  EXPECT_EQ(Ctl({"nodes"}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("\na "));
  EXPECT_THAT(out_.str(), HasSubstr("\nb "));
}

TEST_F(CommandsTest, JsonIsProtobufJson) {
  EXPECT_EQ(Ctl({"nodes", "--json"}), kExitOk);
  EXPECT_THAT(out_.str(), StartsWith("{\n \"nodes\": [\n  {\n   \"name\": "
                                     "\"nodes/a\",\n"));
  EXPECT_EQ(Ctl({"status", "--json"}), kExitOk);
  EXPECT_THAT(out_.str(),
              StartsWith("{\"cluster\":{\"clusterId\":\"c0ffee00\""));
  EXPECT_THAT(out_.str(), HasSubstr("\"versions\":[]}\n"));
}

TEST_F(CommandsTest, StatusShowsEverything) {
  EXPECT_EQ(Ctl({"status"}), kExitOk);
  EXPECT_THAT(out_.str(), StartsWith("cluster c0ffee00, coordinator a"));
  EXPECT_THAT(admin_.parents,
              ElementsAre("models/-", "models/m/versions/latest"));
}

TEST_F(CommandsTest, OptionsOfOtherCommandsAreNotSwallowed) {
  for (const char* command : {"pause", "resume", "rollback", "release",
                              "verify", "delete", "adopt"}) {
    EXPECT_EQ(Ctl({command, "m/1", "--undo"}), kExitUsage) << command;
    EXPECT_THAT(err_.str(), HasSubstr("--undo is an option of drain only"));
  }
  EXPECT_EQ(Ctl({"drain", "a", "--mode", "keep"}), kExitUsage);
  EXPECT_EQ(Ctl({"nodes", "--mode=keep"}), kExitUsage);
}

TEST_F(CommandsTest, NamesMayBeShort) {
  EXPECT_EQ(Ctl({"replicas"}), kExitOk);
  EXPECT_EQ(Ctl({"replicas", "m"}), kExitOk);
  EXPECT_EQ(Ctl({"versions", "models/m"}), kExitOk);
  EXPECT_EQ(Ctl({"versions", "m/3"}), kExitNotFound);
  EXPECT_EQ(Ctl({"prepare", "m"}), kExitOk);
  EXPECT_EQ(out_.str(),
            "models/m is ready: layout ab, 4 buckets, 1.00 MB over the "
            "network, prepared in 0 s\n");
  EXPECT_THAT(admin_.parents, ElementsAre("models/-", "models/m", "models/m",
                                          "models/m/versions/3", "models/m"));
  EXPECT_EQ(Ctl({"versions", "a/b/c"}), kExitUsage);
}

TEST_F(CommandsTest, WatchPrintsALineForEachStepAndAnswersWithTheEnd) {
  admin_.watched = {Version(v1::Version::STATE_GATHERING),
                    Version(v1::Version::STATE_MOVING, 1),
                    Version(v1::Version::STATE_MOVING, 2),
                    Version(v1::Version::STATE_MOVING, 55),
                    Version(v1::Version::STATE_ACTIVE, 100)};
  EXPECT_EQ(Ctl({"watch", "m/1"}), kExitOk);
  EXPECT_EQ(out_.str(),
            "models/m/versions/1 GATHERING 0% 0 of 0 ranks copied out\n"
            "models/m/versions/1 MOVING 1% 1 B of 100 B\n"
            "models/m/versions/1 MOVING 55% 55 B of 100 B\n"
            "models/m/versions/1 ACTIVE 100 B\n");
  EXPECT_THAT(admin_.parents, ElementsAre("models/m/versions/1"));
  EXPECT_EQ(Ctl({"watch", "m/1", "--json"}), kExitOk);
  const std::string lines = out_.str();
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 5);
}

TEST_F(CommandsTest, WatchDrawsOverOneLineOnATerminal) {
  terminal_ = true;
  admin_.watched = {Version(v1::Version::STATE_MOVING, 50),
                    Version(v1::Version::STATE_ACTIVE, 100)};
  EXPECT_EQ(Ctl({"watch", "m/1"}), kExitOk);
  EXPECT_EQ(out_.str(),
            "\r\033[Kmodels/m/versions/1  MOVING     "
            "[############------------]  50%  50 B of 100 B  -"
            "\r\033[Kmodels/m/versions/1  ACTIVE     100 B\n");
}

TEST_F(CommandsTest, AnAbortedVersionHasItsOwnExitCode) {
  v1::Version aborted = Version(v1::Version::STATE_ABORTED);
  aborted.mutable_failure()->set_reason("PAUSE_TIMEOUT");
  aborted.mutable_failure()->set_message("Too late.");
  admin_.watched = {aborted};
  EXPECT_EQ(Ctl({"watch", "m/1"}), kExitAborted);
  EXPECT_THAT(out_.str(), HasSubstr("ABORTED PAUSE_TIMEOUT: Too late."));
}

TEST_F(CommandsTest, WatchEndsAtItsTimeout) {
  admin_.hang = true;
  admin_.watched = {Version(v1::Version::STATE_MOVING, 50)};
  EXPECT_EQ(Ctl({"watch", "m/1", "--timeout", "300ms"}), kExitError);
  EXPECT_THAT(err_.str(), HasSubstr("WATCH_TIMEOUT"));
  // The newest version is followed until one stops it.
  EXPECT_EQ(Ctl({"watch", "--timeout=300ms"}), kExitOk);
  // Nothing was heard, of a coordinator that does not answer either.
  admin_.silent = true;
  EXPECT_EQ(Ctl({"watch", "m/latest", "--timeout=300ms"}), kExitUnreachable);
  admin_.silent = false;
  EXPECT_EQ(admin_.parents.back(), "models/m/versions/latest");
}

TEST_F(CommandsTest, AListIsNotEmptyBecauseTheJournalIsLost) {
  EXPECT_EQ(Ctl({"versions"}), kExitOk);
  EXPECT_EQ(out_.str(), "No versions.\n");
  admin_.blocked = true;
  EXPECT_EQ(Ctl({"versions"}), kExitError);
  EXPECT_EQ(out_.str(), "");
  EXPECT_THAT(err_.str(), HasSubstr("JOURNAL_LOST"));
  EXPECT_EQ(Ctl({"replicas"}), kExitOk);  // there are some
}

TEST_F(CommandsTest, WatchWithoutANameNeedsOneModel) {
  admin_.models = {"models/a", "models/b"};
  EXPECT_EQ(Ctl({"watch"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("name one: a, b"));
  admin_.models.clear();
  EXPECT_EQ(Ctl({"watch"}), kExitNotFound);
}

TEST_F(CommandsTest, FailuresHaveExitCodesAndReasons) {
  admin_.failure = ToGrpcStatus(ErrorStatus(absl::StatusCode::kInvalidArgument,
                                            "PAGE_TOKEN_INVALID", "Mend it."));
  EXPECT_EQ(Ctl({"nodes"}), kExitError);
  EXPECT_EQ(err_.str(), "weightsyncctl: PAGE_TOKEN_INVALID: Mend it.\n");
  admin_.failure = ToGrpcStatus(ErrorStatus(
      absl::StatusCode::kUnavailable, "COORDINATOR_UNREACHABLE", "Wait."));
  EXPECT_EQ(Ctl({"models"}), kExitUnreachable);
  server_->Shutdown();
  EXPECT_EQ(Ctl({"status"}), kExitUnreachable);
  EXPECT_THAT(err_.str(), HasSubstr("DAEMON_UNREACHABLE"));
}

TEST_F(CommandsTest, ARemovalSaysWhoMayStillHoldIt) {
  admin_.removed.set_removed(true);
  EXPECT_EQ(Ctl({"remove", "m"}), kExitOk);
  EXPECT_EQ(out_.str(),
            "models/m is removed: no engine has it, until it is published "
            "again\n");
  admin_.removed.add_absent_replicas("models/m/replicas/r1");
  EXPECT_EQ(Ctl({"remove", "m"}), kExitOk);
  EXPECT_EQ(out_.str(),
            "models/m is removed from every engine that is here; 1 replica may "
            "still hold it and drops it when it comes: r1\n");
  admin_.removed.add_absent_replicas("models/m/replicas/r2");
  EXPECT_EQ(Ctl({"remove", "m"}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("drop it when they come: r1, r2\n"));
}

TEST_F(CommandsTest, ALoadEndsWithWhoServesIt) {
  admin_.loaded = Version(v1::Version::STATE_ACTIVE);
  v1::ReplicaTimes* times = admin_.loaded.add_replicas();
  times->set_replica("models/m/replicas/r0");
  times->mutable_resumed_time()->set_seconds(1);
  EXPECT_EQ(Ctl({"load", "m", "run/1"}), kExitOk);
  EXPECT_THAT(out_.str(),
              ::testing::EndsWith("\nrun/1 is loaded: 1 replica serves "
                                  "models/m/versions/1\n"));
}

TEST_F(CommandsTest, OneOfAKindIsNotMany) {
  EXPECT_EQ(Ctl({"save", "m/1", "run/1"}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr(": 1 tensor, 0 B in 1 file, written in"));
  EXPECT_EQ(Ctl({"verify", "m/r0"}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("1 tensor compared, 0 different"));
}

TEST_F(CommandsTest, WhoCannotBeComparedDoesNotDiffer) {
  EXPECT_EQ(Ctl({"verify", "m/r0"}), kExitOk);
  EXPECT_THAT(out_.str(), StartsWith("models/m/replicas/r0 holds version 1"));
  admin_.uncompared = true;
  EXPECT_EQ(Ctl({"verify", "m/r0"}), kExitError);
  EXPECT_THAT(out_.str(),
              StartsWith("models/m/replicas/r0 could not be compared with "));
  EXPECT_THAT(out_.str(), HasSubstr("DIGESTS_UNKNOWN: It holds none.\n"));
  admin_.different = true;
  EXPECT_EQ(Ctl({"verify", "m/r0"}), kExitError);
  EXPECT_THAT(out_.str(), StartsWith("models/m/replicas/r0 DIFFERS from "));
}

TEST_F(CommandsTest, HelpIsText) {
  std::istringstream lines(GeneralHelp());
  std::string line;
  int commands = 0;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    const std::string text = CommandHelp(name);
    if (line.rfind("  ", 0) != 0 || text.empty()) continue;
    ++commands;
    for (const char c : text) {
      EXPECT_TRUE(c == '\n' || (c >= ' ' && c <= '~'))
          << name << ": byte " << static_cast<int>(c);
    }
  }
  EXPECT_GE(commands, 20);
  EXPECT_THAT(CommandHelp("names"), HasSubstr("RE2, \\1 to \\9 are"));
}

TEST_F(CommandsTest, UsageErrors) {
  EXPECT_EQ(Ctl({}), kExitUsage);
  EXPECT_EQ(Ctl({"dance"}), kExitUsage);
  EXPECT_EQ(Ctl({"nodes", "--color"}), kExitUsage);
  EXPECT_EQ(Ctl({"nodes", "--timeout", "soon"}), kExitUsage);
  EXPECT_EQ(Ctl({"nodes", "--timeout"}), kExitUsage);
  EXPECT_EQ(Ctl({"nodes", "--address", "nowhere"}), kExitUsage);
  EXPECT_EQ(Ctl({"nodes", "a", "b"}), kExitUsage);
  EXPECT_EQ(Ctl({"prepare"}), kExitUsage);
  EXPECT_EQ(Ctl({"help", "dance"}), kExitUsage);
}

// Not two screens of everything else.
TEST_F(CommandsTest, ACommandThatThereIsNot) {
  for (const std::vector<std::string>& line :
       {std::vector<std::string>{"help", "stauts"}, {"stauts"}}) {
    EXPECT_EQ(Ctl(line), kExitUsage);
    EXPECT_EQ(err_.str(),
              "weightsyncctl: no such command: stauts; did you mean status?\n"
              "\n`weightsyncctl help` lists what there is.\n");
    EXPECT_EQ(out_.str(), "");
  }
  EXPECT_EQ(Ctl({"help", "dance"}), kExitUsage);
  EXPECT_THAT(err_.str(),
              StartsWith("weightsyncctl: no such command: dance\n"));
  EXPECT_EQ(Ctl({"help", "stauts", "--json"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("\"reason\":\"USAGE\""));
  EXPECT_THAT(err_.str(), HasSubstr("did you mean status?"));
  EXPECT_EQ(NoSuchCommand("vers"),
            "no such command: vers; did you mean versions?");
  EXPECT_EQ(NoSuchCommand("replica"),
            "no such command: replica; did you mean replicas?");
  EXPECT_EQ(NoSuchCommand("rollbcak"),
            "no such command: rollbcak; did you mean rollback?");
  EXPECT_EQ(NoSuchCommand("x"), "no such command: x");
}

TEST_F(CommandsTest, HelpForEach) {
  EXPECT_EQ(Ctl({"help"}), kExitOk);
  EXPECT_EQ(Ctl({"--help"}), kExitOk);
  for (const char* command : {"status", "watch", "models", "versions",
                              "replicas", "nodes", "prepare"}) {
    EXPECT_EQ(Ctl({"help", command}), kExitOk);
    EXPECT_THAT(out_.str(),
                StartsWith(std::string("weightsyncctl ") + command));
    EXPECT_EQ(Ctl({command, "--help"}), kExitOk);
    EXPECT_THAT(GeneralHelp(), HasSubstr(command));
  }
}

}  // namespace
}  // namespace ctl
}  // namespace weightsync
