#include "transport/tcp/endpoint.h"

#include <poll.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace tcp {
namespace {

EndpointOptions Options() {
  EndpointOptions options;
  options.cluster_id = "cluster";
  options.handshake_deadline = absl::Milliseconds(300);
  options.early_peer_wait = absl::Milliseconds(300);
  return options;
}

std::unique_ptr<Endpoint> NewEndpoint(const EndpointOptions& options) {
  auto endpoint = Endpoint::Create(options);
  EXPECT_TRUE(endpoint.ok()) << endpoint.status();
  return *std::move(endpoint);
}

// A stranger's connection.
class Stranger {
 public:
  explicit Stranger(const std::string& address) {
    absl::StatusOr<Fd> fd = StartConnect(address);
    EXPECT_TRUE(fd.ok()) << fd.status();
    fd_ = *std::move(fd);
    pollfd wait{fd_.get(), POLLOUT, 0};
    poll(&wait, 1, 5000);
    EXPECT_EQ(ConnectResult(fd_.get()), 0);
  }
  void Say(const std::string& bytes) {
    EXPECT_EQ(send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  // Everything until the endpoint closes; "still open" after 5 seconds.
  std::string Hear() {
    std::string heard;
    while (true) {
      pollfd wait{fd_.get(), POLLIN, 0};
      if (poll(&wait, 1, 5000) <= 0) return "still open";
      char buffer[4096];
      const ssize_t n = recv(fd_.get(), buffer, sizeof(buffer), 0);
      if (n <= 0) return heard;
      heard.append(buffer, static_cast<size_t>(n));
    }
  }

 private:
  Fd fd_;
};

Hello HelloFor(const GroupSpec& spec) {
  Hello hello;
  hello.cluster_id = spec.cluster_id;
  hello.group_id = spec.group_id;
  hello.epoch = spec.epoch;
  hello.secret = spec.secret;
  hello.from = spec.members[0].node;
  hello.to = spec.members[1].node;
  return hello;
}

class EndpointTest : public testing::Test {
 protected:
  EndpointTest() : endpoint_(NewEndpoint(Options())) {
    spec_.cluster_id = "cluster";
    spec_.group_id = "group";
    spec_.epoch = Epoch{2, 5};
    spec_.secret = "secret";
    spec_.members = {{"a", ""}, {"b", endpoint_->address()}};
    spec_.self = 1;
  }

  // What is answered to a hello; "" if the connection is just closed.
  std::string Answer(const Hello& hello) {
    Stranger stranger(endpoint_->address());
    stranger.Say(EncodeHello(hello));
    const std::string heard = stranger.Hear();
    return heard.empty() ? "" : ReasonOf(DecodeWelcome(heard));
  }

  std::unique_ptr<Endpoint> endpoint_;
  GroupSpec spec_;
};

TEST_F(EndpointTest, GarbageIsClosedWithoutAnAnswer) {
  Stranger http(endpoint_->address());
  http.Say("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_EQ(http.Hear(), "");
  std::string damaged = EncodeHello(HelloFor(spec_));
  damaged.back() ^= 1;
  Stranger bits(endpoint_->address());
  bits.Say(damaged);
  EXPECT_EQ(bits.Hear(), "");
}

TEST_F(EndpointTest, AnotherReleaseIsTold) {
  std::string hello = EncodeHello(HelloFor(spec_));
  hello[4] = 9;
  Stranger stranger(endpoint_->address());
  stranger.Say(hello.substr(0, kEnvelopeHeaderBytes));
  EXPECT_EQ(ReasonOf(DecodeWelcome(stranger.Hear())), "PROTOCOL_VERSION");
}

TEST_F(EndpointTest, WhoSaysNothingIsSentAway) {
  Stranger stranger(endpoint_->address());
  Stranger half(endpoint_->address());
  half.Say(EncodeHello(HelloFor(spec_)).substr(0, 20));
  EXPECT_EQ(stranger.Hear(), "");
  EXPECT_EQ(half.Hear(), "");
}

TEST_F(EndpointTest, AGroupThatNeverComesIsUnknown) {
  EXPECT_EQ(Answer(HelloFor(spec_)), "UNKNOWN_GROUP");
}

// The coordinator has lost its journal, was started anew and adopts the cluster
// that its nodes belong to: its own node is of another one from then on.
TEST_F(EndpointTest, AClusterThatIsAdoptedTakesTheOldOnesPlace) {
  {
    auto group = endpoint_->NewGroup(spec_, GroupOptions());
    ASSERT_TRUE(group.ok()) << group.status();
  }
  GroupSpec adopted = spec_;
  adopted.cluster_id = "adopted";
  EXPECT_EQ(ReasonOf(endpoint_->NewGroup(adopted, GroupOptions()).status()),
            "WRONG_CLUSTER");
  endpoint_->SetClusterId("adopted");
  EXPECT_TRUE(endpoint_->NewGroup(adopted, GroupOptions()).ok());
  EXPECT_EQ(ReasonOf(endpoint_->NewGroup(spec_, GroupOptions()).status()),
            "WRONG_CLUSTER");
}

TEST_F(EndpointTest, WhoIsNotThePredecessorIsRefusedByReason) {
  auto group = endpoint_->NewGroup(spec_, GroupOptions());
  ASSERT_TRUE(group.ok());
  std::thread joiner([&] { (*group)->Join(absl::Seconds(20)).IgnoreError(); });
  Hello hello = HelloFor(spec_);
  hello.cluster_id = "other";
  EXPECT_EQ(Answer(hello), "WRONG_CLUSTER");
  hello = HelloFor(spec_);
  hello.secret = "guess";
  // Until the group is registered the answer is another.
  std::string answer;
  do {
    answer = Answer(hello);
  } while (answer == "UNKNOWN_GROUP");
  EXPECT_EQ(answer, "BAD_SECRET");
  hello = HelloFor(spec_);
  hello.from = "z";
  EXPECT_EQ(Answer(hello), "WRONG_PEER");
  hello = HelloFor(spec_);
  hello.to = "a";
  EXPECT_EQ(Answer(hello), "WRONG_PEER");
  hello = HelloFor(spec_);
  hello.epoch = Epoch{2, 4};
  EXPECT_EQ(Answer(hello), "STALE_EPOCH");
  hello = HelloFor(spec_);
  hello.stream = 7;
  EXPECT_EQ(Answer(hello), "NOT_A_PEER");
  hello = HelloFor(spec_);
  hello.stream_count = 1000;
  EXPECT_EQ(Answer(hello), "NOT_A_PEER");
  (*group)->Abort(absl::CancelledError("done"));
  joiner.join();
}

TEST_F(EndpointTest, AnOlderTermIsRefusedForEveryGroup) {
  endpoint_->RaiseTerm(3);
  EXPECT_EQ(Answer(HelloFor(spec_)), "STALE_EPOCH");
  auto group = endpoint_->NewGroup(spec_, GroupOptions());
  ASSERT_TRUE(group.ok());
  EXPECT_EQ(ReasonOf((*group)->Join(absl::Seconds(5))), "STALE_EPOCH");
}

TEST_F(EndpointTest, ManyStrangersDoNotKeepAPeerOut) {
  EndpointOptions options = Options();
  options.max_pending = 4;
  auto endpoint = NewEndpoint(options);
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < 10; ++i) {
    strangers.push_back(std::make_unique<Stranger>(endpoint->address()));
  }
  auto sender = NewEndpoint(Options());
  spec_.members = {{"a", sender->address()}, {"b", endpoint->address()}};
  auto receiving = endpoint->NewGroup(spec_, GroupOptions());
  spec_.self = 0;
  auto sending = sender->NewGroup(spec_, GroupOptions());
  ASSERT_TRUE(receiving.ok() && sending.ok());
  absl::Status joined;
  std::thread joiner([&] { joined = (*sending)->Join(absl::Seconds(20)); });
  EXPECT_TRUE((*receiving)->Join(absl::Seconds(20)).ok());
  joiner.join();
  EXPECT_TRUE(joined.ok()) << joined;
}

TEST(EndpointPortTest, APortOfARangeIsHeldAndAFullRangeIsSaid) {
  auto any = NewEndpoint(Options());
  std::string host, port;
  ASSERT_TRUE(SplitAddress(any->address(), &host, &port).ok());
  EndpointOptions options = Options();
  options.first_port = options.last_port = std::stoi(port);
  EXPECT_EQ(ReasonOf(Endpoint::Create(options).status()), "NO_PORT");
  // A range that has room: the taken port is passed over.
  options.last_port = options.first_port + 50;
  auto next = Endpoint::Create(options);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_NE((*next)->address(), any->address());
}

TEST(EndpointPortTest, AnAdvertisedHostIsTold) {
  EndpointOptions options = Options();
  options.advertise_host = "node-1.example";
  EXPECT_EQ(NewEndpoint(options)->address().substr(0, 15), "node-1.example:");
}

}  // namespace
}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
