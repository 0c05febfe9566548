// Daemons come, go, and come back.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/service/agent.h"
#include "daemon/service/cluster_fixture.h"
#include "google/protobuf/unknown_field_set.h"
#include "grpcpp/generic/generic_stub.h"
#include "transport/error.h"
#include "transport/host/pid_namespace.h"

namespace weightsync {
namespace daemon {
namespace testing {
namespace {

bool Exists(const std::string& path) {
  struct stat info;
  return lstat(path.c_str(), &info) == 0;
}

// A unary call of a service whose stubs are not here; the response's bytes.
std::string RawCall(const std::shared_ptr<grpc::Channel>& channel,
                    const std::string& method, const std::string& request) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  SetDeadline(&context);
  const grpc::Slice slice(request);
  auto call = stub.PrepareUnaryCall(&context, method,
                                    grpc::ByteBuffer(&slice, 1), &queue);
  call->StartCall();
  grpc::ByteBuffer response;
  grpc::Status status;
  call->Finish(&response, &status, &queue);
  void* tag;
  bool ok;
  queue.Next(&tag, &ok);
  if (!status.ok()) return status.error_message();
  std::vector<grpc::Slice> slices;
  response.Dump(&slices);
  std::string bytes;
  for (const grpc::Slice& part : slices) {
    bytes.append(reinterpret_cast<const char*>(part.begin()), part.size());
  }
  return bytes;
}

// The field of that number, or nothing: of a message whose type is not here.
std::string Field(const std::string& bytes, int number) {
  google::protobuf::UnknownFieldSet fields;
  if (!fields.ParseFromString(bytes)) return "";
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    if (field.number() != number) continue;
    if (field.type() == google::protobuf::UnknownField::TYPE_VARINT) {
      return absl::StrCat(field.varint());
    }
    if (field.type() == google::protobuf::UnknownField::TYPE_LENGTH_DELIMITED) {
      return field.length_delimited();
    }
  }
  return "";
}

// How many calls a daemon's server is busy with, by channelz.
int64_t CallsUnderWay(const std::shared_ptr<grpc::Channel>& channel) {
  // GetServersResponse.server.data: started 2, succeeded 3, failed 4.
  const std::string data = Field(
      Field(RawCall(channel, "/grpc.channelz.v1.Channelz/GetServers", ""), 1),
      2);
  const auto count = [&data](int number) {
    int64_t value = 0;
    return absl::SimpleAtoi(Field(data, number), &value) ? value : 0;
  };
  return count(2) - count(3) - count(4);
}

class LifecycleTest : public ClusterTest {
 protected:
  // Ends the daemon and starts it again with the same options and address.
  void Restart(const std::string& node) {
    Options options = options_[node];
    options.listen = daemons_[node]->addresses().listen;
    daemons_[node]->Shutdown();
    auto daemon = Daemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemons_[node] = *std::move(daemon);
  }
};

// --handshake_timeout, which is 5 s otherwise.
TEST_F(LifecycleTest, AStrangerAtTheDataPortIsSentAwayInTime) {
  StartNode("a", [](Options* options) {
    options->deadlines.handshake = absl::Milliseconds(200);
  });
  const std::vector<std::string> address =
      absl::StrSplit(daemons_["a"]->addresses().data_address, ':');
  int port = 0;
  ASSERT_EQ(address.size(), 2u);
  ASSERT_TRUE(absl::SimpleAtoi(address[1], &port));
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval patience = {4, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, address[0].c_str(), &to.sin_addr);
  ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  char byte;
  const ssize_t got = recv(fd, &byte, 1, 0);
  const int error = errno;
  close(fd);
  // Ended by the daemon, one way or the other, and not by our patience.
  EXPECT_TRUE(got == 0 || (got < 0 && error == ECONNRESET)) << got << error;
}

TEST(MoverOptionsTest, DeadlinesOfMovingBytesAreTheFlags) {
  Options options;
  options.deadlines.peer = absl::Seconds(3);
  options.deadlines.progress = absl::Seconds(4);
  options.deadlines.prepare = absl::Seconds(6);
  const Mover::Options mover = MoverOptions(options, nullptr);
  EXPECT_EQ(mover.peer_deadline, absl::Seconds(3));
  EXPECT_EQ(mover.progress_timeout, absl::Seconds(4));
  EXPECT_EQ(mover.prepare_timeout, absl::Seconds(6));
}

TEST_F(LifecycleTest, ShutdownTellsEverybodyAndLeavesNothing) {
  StartNode("a");
  StartTrainers({"a"}, 2);
  StartReplica("a", "r0");
  UpdateWorks(1);
  const Addresses addresses = daemons_["a"]->addresses();
  EXPECT_TRUE(Exists(addresses.unix_socket));
  EXPECT_TRUE(Exists(addresses.descriptor_socket));
  daemons_["a"]->Shutdown();
  const absl::Status trainer = trainers_[0]->WaitClosed();
  EXPECT_EQ(trainer.code(), absl::StatusCode::kUnavailable) << trainer;
  EXPECT_EQ(ErrorReason(trainer), "SHUTTING_DOWN");
  EXPECT_EQ(ErrorReason(replicas_["r0"]->WaitClosed()), "SHUTTING_DOWN");
  EXPECT_EQ(ErrorReason(workers_["r0"][0]->WaitClosed()), "SHUTTING_DOWN");
  for (const auto& entry : std::filesystem::recursive_directory_iterator(
           directory_.path() + "/a")) {
    // The state remains, and nothing else.
    EXPECT_EQ(entry.path().string().find(directory_.path() + "/a/state"), 0u)
        << entry.path();
  }
}

TEST_F(LifecycleTest, AWaitingCallIsAnsweredAtShutdown) {
  StartNode("a");
  StartTrainers({"a"}, 2);
  trainers_[0]->Fill(1);
  const auto published = trainers_[0]->Publish();
  ASSERT_TRUE(published.ok()) << published.status();
  // One that waits for the end of the update, and one that waits for it to
  // publish the next version.
  absl::Status waited, publishing;
  const int64_t before = CallsUnderWay(Channel("a"));
  ASSERT_GT(before, 0);
  std::thread waiter(
      [&] { waited = trainers_[0]->Wait(published->version_name()).status(); });
  // The next publish waits for the update before it.
  std::thread publisher([&] { publishing = trainers_[0]->Publish().status(); });
  const absl::Time deadline = absl::Now() + kDeadline;
  while (CallsUnderWay(Channel("a")) < before + 2 && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(CallsUnderWay(Channel("a")), before + 2);
  daemons_["a"]->Shutdown();
  waiter.join();
  publisher.join();
  // By the daemon: gRPC alone says UNAVAILABLE without a reason.
  EXPECT_EQ(ErrorReason(waited), "SHUTTING_DOWN") << waited;
  // As the coordinator told its node.
  EXPECT_NE(ErrorReason(publishing), "") << publishing;
  EXPECT_NE(publishing.message().find("this weightsyncd is going down"),
            absl::string_view::npos)
      << publishing;
}

TEST_F(LifecycleTest, HealthAndSecondStart) {
  StartNode("a");
  // HealthCheckResponse{status: SERVING}.
  EXPECT_EQ(RawCall(Channel("a"), "/grpc.health.v1.Health/Check", ""),
            "\x08\x01");
  EXPECT_NE(
      RawCall(Channel("a"), "/grpc.channelz.v1.Channelz/GetServers", "").size(),
      0u);
  const std::string cluster = daemons_["a"]->cluster_id();
  Restart("a");
  EXPECT_EQ(daemons_["a"]->cluster_id(), cluster);
}

TEST_F(LifecycleTest, TheCoordinatorComesBack) {
  StartNode("c");
  StartNode("n");
  StartTrainers({"n"}, 2);
  StartReplica("n", "r0", 2);
  UpdateWorks(1);
  Restart("c");
  // Clients of the other node stay; it says again what it holds.
  ASSERT_TRUE(Eventually([&] {
    const auto model = GetModel("n");
    return model.ok() && model->trainer_ranks_size() == 2 &&
           model->worker_count() == 2;
  }));
  ASSERT_TRUE(ReplicaReaches("n", "r0", v1::Replica::STATE_SERVING));
  const auto version = GetVersion("n", "models/m/versions/latest");
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(version->version(), 1);
  UpdateWorks(2);
}

TEST_F(LifecycleTest, WithoutACoordinatorCallsSaySo) {
  StartNode("c");
  StartNode("n", [](Options* options) {
    options->deadlines.registration = absl::Seconds(1);
  });
  daemons_["c"]->Shutdown();
  const absl::Status admin = GetModel("n").status();
  EXPECT_EQ(admin.code(), absl::StatusCode::kUnavailable) << admin;
  EXPECT_EQ(ErrorReason(admin), "COORDINATOR_UNREACHABLE");
  RawTrainer trainer(Channel("n"), 0, 1);
  const absl::Status opened = trainer.Open();
  EXPECT_EQ(opened.code(), absl::StatusCode::kUnavailable) << opened;
  EXPECT_EQ(ErrorReason(opened), "COORDINATOR_UNREACHABLE");
}

TEST_F(LifecycleTest, ANodeThatIsStartedAgainIsThereAgain) {
  StartNode("c");
  StartNode("n");
  StartTrainers({"c"}, 1);
  StartReplica("n", "r0");
  UpdateWorks(1);
  Restart("n");
  workers_.clear();
  replicas_.clear();
  wanted_.clear();
  StartReplica("n", "r0");
  UpdateWorks(2);
}

TEST_F(LifecycleTest, ALeaseEndsWithItsProcess) {
  // The stream stays open, as when a child has inherited it.
  StartNode("a");
  pid_t process = 0;
  char name[] = "sleep", time[] = "1000";
  char* arguments[] = {name, time, nullptr};
  ASSERT_EQ(
      posix_spawnp(&process, "sleep", nullptr, nullptr, arguments, environ), 0);
  RawTrainer trainer(Channel("a"), 0, 1);
  trainer.set_pid(process);
  ASSERT_TRUE(trainer.Open().ok());
  kill(process, SIGKILL);
  const absl::Status status = trainer.WaitClosed();
  waitpid(process, nullptr, 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_EQ(ErrorReason(status), "PROCESS_ENDED");
  StartTrainers({"a"}, 1);
  UpdateWorks(1);
}

// The main process of every container is number 1: here that is somebody else.
TEST_F(LifecycleTest, APidOfAnotherNamespaceIsNobodysHere) {
  StartNode("a");
  pid_t process = 0;
  char name[] = "sleep", time[] = "1000";
  char* arguments[] = {name, time, nullptr};
  ASSERT_EQ(
      posix_spawnp(&process, "sleep", nullptr, nullptr, arguments, environ), 0);
  RawTrainer here(Channel("a"), 0, 2);
  here.set_pid(process, transport::PidNamespace());
  ASSERT_TRUE(here.Open().ok());
  auto offer = here.Allocate(4096);
  ASSERT_TRUE(offer.ok()) << offer.status();
  EXPECT_EQ(transport::ReasonOf(here.Map(*offer)), "TOKEN_OTHER_PROCESS");

  RawTrainer elsewhere(Channel("a"), 1, 2);
  elsewhere.set_pid(process, transport::PidNamespace() + 1);
  ASSERT_TRUE(elsewhere.Open().ok());
  offer = elsewhere.Allocate(4096);
  ASSERT_TRUE(offer.ok()) << offer.status();
  EXPECT_TRUE(elsewhere.Map(*offer).ok());

  kill(process, SIGKILL);
  waitpid(process, nullptr, 0);
  EXPECT_EQ(ErrorReason(here.WaitClosed()), "PROCESS_ENDED");
  EXPECT_TRUE(elsewhere.Allocate(4096).ok());
}

TEST_F(LifecycleTest, ATakenNodeNameIsRefusedAndTheFirstStays) {
  StartNode("c");
  StartNode("n");
  StartTrainers({"n"}, 1);
  Options twin = TestOptions(directory_.path() + "/twin", "n", coordinator_);
  twin.deadlines.registration = absl::Seconds(1);
  auto daemon = Daemon::Start(twin);
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  RawTrainer trainer(ChannelTo("unix:" + (*daemon)->addresses().unix_socket), 0,
                     1, "models/x");
  const absl::Status status = trainer.Open();
  EXPECT_EQ(ErrorReason(status), "COORDINATOR_UNREACHABLE") << status;
  EXPECT_NE(status.message().find("node n"), std::string::npos) << status;
  UpdateWorks(1);
  (*daemon)->Shutdown();
}

}  // namespace
}  // namespace testing
}  // namespace daemon
}  // namespace weightsync
