// An edge with another way for its bytes: what is said over the connection, and
// when the bytes go.
#include "transport/tcp/payload_channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "transport/digest_map.h"
#include "transport/error.h"
#include "transport/landing.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/wire.h"

namespace weightsync {
namespace transport {
namespace tcp {
namespace {

constexpr int64_t kBytes = 3 * Landing::kFrameBytes + 100;

// What both ends have.
class Wire {
 public:
  void Send(const std::string& bytes) {
    absl::MutexLock lock(&mutex_);
    ++sends_;
    bytes_ += bytes;
  }
  void Note(const std::string& what) {
    absl::MutexLock lock(&mutex_);
    log_.push_back(what);
  }
  int sends() {
    absl::MutexLock lock(&mutex_);
    return sends_;
  }
  std::string bytes() {
    absl::MutexLock lock(&mutex_);
    return bytes_;
  }
  int Count(const std::string& what) {
    absl::MutexLock lock(&mutex_);
    return static_cast<int>(std::count(log_.begin(), log_.end(), what));
  }
  std::vector<std::string> log() {
    absl::MutexLock lock(&mutex_);
    return log_;
  }

 private:
  absl::Mutex mutex_;
  int sends_ = 0;
  std::string bytes_;
  std::vector<std::string> log_;
};

class FakeChannel final : public PayloadChannel {
 public:
  explicit FakeChannel(Wire* wire) : wire_(wire) {}

  absl::StatusOr<std::string> Offer() override {
    wire_->Note("offer");
    return std::string("meet me");
  }
  // Not the first.
  absl::StatusOr<Acceptance> Accept(absl::string_view offer) override {
    wire_->Note(absl::StrCat("accept ", offer));
    Acceptance acceptance;
    acceptance.agreed = wire_->Count("accept meet me") > 1;
    acceptance.answer = acceptance.agreed ? "yes" : "no";
    return acceptance;
  }
  absl::StatusOr<bool> Answered(absl::string_view answer) override {
    wire_->Note(absl::StrCat("answered ", answer));
    return answer == "yes";
  }
  absl::Status Connect(absl::Duration, const Stopped&) override {
    wire_->Note("connect");
    return absl::OkStatus();
  }
  absl::Status Send(absl::Span<const absl::Span<const char>> parts,
                    absl::Duration, const Stopped&) override {
    std::string bytes;
    for (const absl::Span<const char> part : parts)
      bytes.append(part.data(), part.size());
    wire_->Send(bytes);
    return absl::OkStatus();
  }
  absl::Status Receive(absl::Span<const absl::Span<char>>, absl::Duration,
                       const Stopped&) override {
    wire_->Note("receive");
    return absl::UnimplementedError("not of this test");
  }
  void Finish() override { wire_->Note("finish"); }

 private:
  Wire* const wire_;
};

// The receiving node, played by hand.
class Receiver {
 public:
  Receiver() {
    int port = 0;
    absl::StatusOr<Fd> listener = Listen("127.0.0.1", 0, 0, &port);
    EXPECT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
    address_ = JoinAddress("127.0.0.1", port);
  }
  const std::string& address() const { return address_; }

  // Takes the one connection, and welcomes it.
  void Welcome() {
    pollfd wait{listener_.get(), POLLIN, 0};
    ASSERT_EQ(poll(&wait, 1, 10000), 1);
    fd_ = Fd(accept(listener_.get(), nullptr, nullptr));
    ASSERT_GE(fd_.get(), 0);
    const std::string header = Read(kEnvelopeHeaderBytes);
    const absl::StatusOr<uint32_t> length = DecodeEnvelopeHeader(header, true);
    ASSERT_TRUE(length.ok()) << length.status();
    ASSERT_TRUE(DecodeHello(header + Read(*length)).ok());
    Say(EncodeWelcome(absl::OkStatus()));
  }
  // The next message but heartbeats; its payload too.
  MessageType Hear(std::string* payload) {
    while (true) {
      const std::string bytes = Read(kHeaderBytes);
      if (bytes.empty()) return MessageType::kBye;
      const absl::StatusOr<Header> header = DecodeHeader(bytes.data());
      EXPECT_TRUE(header.ok()) << header.status();
      if (!header.ok()) return MessageType::kBye;
      *payload = Read(header->length);
      if (header->type != MessageType::kHeartbeat) return header->type;
    }
  }
  void Say(const std::string& bytes) {
    EXPECT_EQ(send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }

 private:
  std::string Read(size_t count) {
    std::string bytes(count, '\0');
    for (size_t done = 0; done < count;) {
      pollfd wait{fd_.get(), POLLIN, 0};
      if (poll(&wait, 1, 10000) <= 0) return "";
      const ssize_t n = recv(fd_.get(), &bytes[done], count - done, 0);
      if (n <= 0) return "";
      done += static_cast<size_t>(n);
    }
    return bytes;
  }

  Fd listener_, fd_;
  std::string address_;
};

// A kernel that waits for its peer keeps a GPU from those who compute on it: so
// nothing is sent before who receives has said that it is about to.
TEST(PayloadChannelTest, NothingIsSentBeforeTheReceiverIsReady) {
  Wire wire;
  EndpointOptions options;
  options.cluster_id = "cluster";
  options.payload = [&wire](const std::string& peer)
      -> absl::StatusOr<std::unique_ptr<PayloadChannel>> {
    EXPECT_EQ(peer, "cluster/b");
    return std::unique_ptr<PayloadChannel>(new FakeChannel(&wire));
  };
  absl::StatusOr<std::unique_ptr<Endpoint>> endpoint =
      Endpoint::Create(options);
  ASSERT_TRUE(endpoint.ok()) << endpoint.status();
  Receiver receiver;
  GroupSpec spec;
  spec.cluster_id = "cluster";
  spec.group_id = "group";
  spec.epoch = Epoch{1, 1};
  spec.secret = "secret";
  spec.members = {{"a", (*endpoint)->address()}, {"b", receiver.address()}};
  spec.self = 0;
  absl::StatusOr<std::unique_ptr<Group>> group =
      (*endpoint)->NewGroup(spec, GroupOptions());
  ASSERT_TRUE(group.ok()) << group.status();
  absl::Status joined;
  std::thread joiner([&] { joined = (*group)->Join(absl::Seconds(20)); });
  receiver.Welcome();
  joiner.join();
  ASSERT_TRUE(joined.ok()) << joined;

  std::string bytes(kBytes, '\0');
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<char>(i * 7 >> 3);
  const auto landing = std::make_shared<Landing>(
      9, absl::MakeSpan(bytes),
      std::make_shared<RunDigestMap>(
          std::vector<PlacedRun>{{0, DigestRun{1, 0, kBytes / 2, 2}}}));
  ASSERT_TRUE(landing->MarkAllReady().ok());
  // Nobody has said that the channel reaches a GPU.
  class Nobody final : public FrameDigester {
    absl::StatusOr<std::vector<Digest>> DigestFrames(
        absl::Span<const uint32_t>) const override {
      return absl::InternalError("nobody asks");
    }
  };
  EXPECT_EQ(*(*group)->PayloadDevice(absl::ZeroDuration()), "");
  const auto on_gpu = std::make_shared<Landing>(9, absl::MakeSpan(bytes),
                                                std::make_shared<Nobody>());
  EXPECT_EQ(ReasonOf((*group)->Move({on_gpu})), "DEVICE_LANDING");
  ASSERT_TRUE((*group)->Move({landing}).ok());

  std::string payload;
  ASSERT_EQ(receiver.Hear(&payload), MessageType::kPayloadOffer);
  EXPECT_EQ(payload, "meet me");
  // Not this one; and the next.
  for (const char* answer : {"no", "yes"}) {
    receiver.Say(EncodeMessage(MessageType::kPayloadAnswer,
                               EncodePayloadAnswer(absl::OkStatus(), answer)));
    if (std::string(answer) == "yes") break;
    ASSERT_EQ(receiver.Hear(&payload), MessageType::kPayloadOffer);
  }
  HaveEntry have;
  have.bucket = 9;
  have.size = kBytes;
  have.bitmap.assign((landing->frame_count() + 7) / 8, 0);
  Header header;
  header.type = MessageType::kHave;
  header.move = 1;
  receiver.Say(EncodeMessage(header, EncodeHave({have})));

  std::string sent;
  size_t frames = 0;
  for (int batch = 0; frames < landing->frame_count(); ++batch) {
    ASSERT_EQ(receiver.Hear(&payload), MessageType::kFrames);
    const absl::StatusOr<std::vector<FrameHeader>> listed =
        DecodeFrames(payload);
    ASSERT_TRUE(listed.ok()) << listed.status();
    frames += listed->size();
    for (const FrameHeader& frame : *listed) {
      const absl::Span<char> of = landing->frame(frame.frame);
      sent.append(of.data(), of.size());
    }
    // It has been told what comes, and is not ready.
    absl::SleepFor(absl::Milliseconds(300));
    EXPECT_EQ(wire.sends(), batch);
    receiver.Say(EncodeMessage(MessageType::kPayloadReady, ""));
    for (int i = 0; i < 1000 && wire.sends() == batch; ++i)
      absl::SleepFor(absl::Milliseconds(5));
    ASSERT_EQ(wire.sends(), batch + 1);
  }
  EXPECT_TRUE(wire.bytes() == sent);
  EXPECT_EQ(sent.size(), bytes.size());
  EXPECT_EQ(wire.log(),
            (std::vector<std::string>{"offer", "answered no", "offer",
                                      "answered yes", "connect"}));
  (*group)->Abort(absl::CancelledError("done"));
  *group = nullptr;
  EXPECT_EQ(wire.Count("finish"), 0);
}

// What a channel has may serve the next edge where both ends leave in good
// order, and only there.
TEST(PayloadChannelTest, ItIsFinishedWhereBothEndsLeaveInGoodOrder) {
  for (const bool aborted : {false, true}) {
    SCOPED_TRACE(aborted);
    Wire wire;
    std::atomic<bool> failed{false};
    std::vector<std::unique_ptr<Endpoint>> endpoints;
    GroupSpec spec;
    spec.cluster_id = "cluster";
    spec.group_id = "group";
    spec.epoch = Epoch{1, 1};
    spec.secret = "secret";
    for (const char* node : {"a", "b"}) {
      EndpointOptions options;
      options.cluster_id = "cluster";
      options.payload = [&wire](const std::string& peer)
          -> absl::StatusOr<std::unique_ptr<PayloadChannel>> {
        wire.Note(absl::StrCat("to ", peer));
        return std::unique_ptr<PayloadChannel>(new FakeChannel(&wire));
      };
      auto endpoint = Endpoint::Create(options);
      ASSERT_TRUE(endpoint.ok()) << endpoint.status();
      spec.members.push_back({node, (*endpoint)->address()});
      endpoints.push_back(*std::move(endpoint));
    }
    std::vector<std::unique_ptr<Group>> groups;
    for (int self = 0; self < 2; ++self) {
      spec.self = self;
      GroupOptions options;
      options.on_edge_failed = [&failed](const absl::Status&) {
        failed = true;
      };
      auto group = endpoints[self]->NewGroup(spec, options);
      ASSERT_TRUE(group.ok()) << group.status();
      groups.push_back(*std::move(group));
    }
    std::vector<std::thread> threads;
    for (auto& group : groups) {
      threads.emplace_back(
          [&group] { EXPECT_TRUE(group->Join(absl::Seconds(20)).ok()); });
    }
    for (std::thread& thread : threads) thread.join();
    threads.clear();
    for (int i = 0; i < 2000 && wire.Count("connect") < 2; ++i)
      absl::SleepFor(absl::Milliseconds(5));
    EXPECT_EQ(wire.Count("connect"), 2);
    EXPECT_EQ(wire.Count("answered no"), 1);
    EXPECT_EQ(wire.Count("answered yes"), 1);
    // One channel at each end, whatever was refused.
    EXPECT_EQ(wire.Count("to cluster/a"), 1);
    EXPECT_EQ(wire.Count("to cluster/b"), 1);
    if (aborted) {
      groups[0]->Abort(absl::CancelledError("called off"));
      for (int i = 0; i < 2000 && !failed; ++i)
        absl::SleepFor(absl::Milliseconds(5));
      EXPECT_TRUE(failed);
    }
    for (auto& group : groups)
      threads.emplace_back([&group] { group = nullptr; });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wire.Count("finish"), aborted ? 0 : 2);
  }
}

}  // namespace
}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
