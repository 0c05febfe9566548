#include "transport/tcp/wire.h"

#include <sys/socket.h>

#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "transport/error.h"
#include "transport/tcp/frame_reader.h"
#include "transport/tcp/socket.h"

namespace weightsync {
namespace transport {
namespace tcp {
namespace {

Hello SomeHello() {
  Hello hello;
  hello.cluster_id = "cluster";
  hello.group_id = "update/flow";
  hello.epoch = Epoch{3, 4};
  hello.secret = std::string("\0binary\xff", 8);
  hello.from = "a";
  hello.to = "b";
  hello.stream = 1;
  hello.stream_count = 2;
  return hello;
}

TEST(WireTest, Crc32cIsTheStandardOne) {
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283u);
}

TEST(WireTest, AHelloComesBackAsItWas) {
  absl::StatusOr<Hello> hello = DecodeHello(EncodeHello(SomeHello()));
  ASSERT_TRUE(hello.ok()) << hello.status();
  EXPECT_EQ(hello->cluster_id, "cluster");
  EXPECT_EQ(hello->group_id, "update/flow");
  EXPECT_TRUE(hello->epoch == (Epoch{3, 4}));
  EXPECT_EQ(hello->secret, SomeHello().secret);
  EXPECT_EQ(hello->from, "a");
  EXPECT_EQ(hello->to, "b");
  EXPECT_EQ(hello->stream, 1u);
  EXPECT_EQ(hello->stream_count, 2u);
}

TEST(WireTest, AnyFlippedBitOrLostByteOfAHelloIsNoticed) {
  const std::string whole = EncodeHello(SomeHello());
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    EXPECT_FALSE(DecodeHello(damaged).ok()) << bit;
  }
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(DecodeHello(whole.substr(0, length)).ok()) << length;
  }
}

TEST(WireTest, AnotherVersionIsNamed) {
  std::string hello = EncodeHello(SomeHello());
  hello[4] = 9;
  EXPECT_EQ(ReasonOf(DecodeHello(hello).status()), "PROTOCOL_VERSION");
}

TEST(WireTest, AStatusKeepsItsReasonAndEdge) {
  absl::Status status;
  ASSERT_TRUE(DecodeStatus(
      EncodeStatus(EdgeError(absl::StatusCode::kDataLoss, "EDGE_DAMAGED", "a",
                             "b", "three times")),
      &status));
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_EQ(ReasonOf(status), "EDGE_DAMAGED");
  EXPECT_EQ(EdgeOf(status).value_or(""), "a->b");
  EXPECT_EQ(status.message(), "edge a->b: three times");
  EXPECT_TRUE(DecodeWelcome(EncodeWelcome(absl::OkStatus())).ok());
}

TEST(WireTest, AnAnswerToAnOfferSaysMoreWhereItIsNoRefusal) {
  absl::Status status = absl::UnknownError("not read");
  std::string answer;
  ASSERT_TRUE(DecodePayloadAnswer(
      EncodePayloadAnswer(absl::OkStatus(), std::string("a\0b", 3)), &status,
      &answer));
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(answer, std::string("a\0b", 3));
  // Those who only know of a status can read a refusal.
  const std::string refusal = EncodePayloadAnswer(
      MakeError(absl::StatusCode::kFailedPrecondition, "SAME_GPU", "one GPU"),
      "ignored");
  ASSERT_TRUE(DecodeStatus(refusal, &status));
  EXPECT_EQ(ReasonOf(status), "SAME_GPU");
  ASSERT_TRUE(DecodePayloadAnswer(refusal, &status, &answer));
  EXPECT_EQ(ReasonOf(status), "SAME_GPU");
  EXPECT_EQ(answer, "");
  EXPECT_FALSE(DecodePayloadAnswer(refusal + "more", &status, &answer));
}

TEST(WireTest, AWelcomeIsNeverTooLong) {
  const absl::Status refused =
      DecodeWelcome(EncodeWelcome(absl::NotFoundError(std::string(9999, 'x'))));
  EXPECT_TRUE(absl::IsNotFound(refused));
}

TEST(WireTest, GarbageNeverDecodes) {
  std::mt19937 random(5);
  for (int i = 0; i < 20000; ++i) {
    std::string bytes(random() % 300, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    EXPECT_FALSE(DecodeHello(bytes).ok());
    absl::Status status;
    DecodeStatus(bytes, &status);
    std::string answer;
    DecodePayloadAnswer(bytes, &status, &answer);
    DecodeHave(bytes).status().IgnoreError();
    DecodeFrames(bytes).status().IgnoreError();
  }
}

class Collector : public MessageSink {
 public:
  absl::Status OnFrames(const Header&, const std::vector<FrameHeader>& frames,
                        std::vector<char*>* places) override {
    for (const FrameHeader& frame : frames) {
      bytes.emplace_back(frame.length, '\0');
    }
    for (size_t i = bytes.size() - frames.size(); i < bytes.size(); ++i) {
      places->push_back(&bytes[i][0]);
    }
    return absl::OkStatus();
  }
  absl::Status OnFrame(size_t) override {
    ++whole;
    return absl::OkStatus();
  }
  absl::Status OnMessage(const Header& header, absl::string_view) override {
    messages.push_back(header.type);
    return absl::OkStatus();
  }
  std::vector<std::string> bytes;
  size_t whole = 0;
  std::vector<MessageType> messages;
};

TEST(FrameReaderTest, MessagesArriveInAnyPieces) {
  std::vector<FrameHeader> frames(3);
  for (size_t i = 0; i < 3; ++i) frames[i].length = 10 + 20 * i;
  const std::string stream = EncodeMessage(MessageType::kHeartbeat, "") +
                             EncodeFrames(1, frames) + std::string(10, 'a') +
                             std::string(30, 'b') + std::string(50, 'c') +
                             EncodeMessage(MessageType::kChain, "payload");
  for (size_t piece = 1; piece <= stream.size(); ++piece) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    Fd in(ends[0]), out(ends[1]);
    Collector collector;
    FrameReader reader(in.get(), &collector);
    for (size_t at = 0; at < stream.size(); at += piece) {
      const std::string part = stream.substr(at, piece);
      ASSERT_EQ(send(out.get(), part.data(), part.size(), 0),
                static_cast<ssize_t>(part.size()));
      while (true) {
        absl::StatusOr<int64_t> n = reader.ReadSome();
        ASSERT_TRUE(n.ok()) << n.status();
        if (*n == 0) break;
      }
    }
    EXPECT_EQ(collector.whole, 3u);
    EXPECT_EQ(collector.bytes[1], std::string(30, 'b'));
    EXPECT_EQ(collector.bytes[2], std::string(50, 'c'));
    EXPECT_EQ(collector.messages,
              (std::vector<MessageType>{MessageType::kHeartbeat,
                                        MessageType::kChain}));
    out.reset();
    EXPECT_TRUE(absl::IsOutOfRange(reader.ReadSome().status()));
  }
}

TEST(FrameReaderTest, DamageToWhatIsNotAFrameEndsTheStream) {
  std::vector<FrameHeader> frames(2);
  frames[0].length = frames[1].length = 4;
  const std::string whole = EncodeFrames(1, frames);
  for (size_t at = 0; at < whole.size(); ++at) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    Fd in(ends[0]), out(ends[1]);
    std::string damaged = whole;
    damaged[at] ^= 16;
    ASSERT_GT(send(out.get(), damaged.data(), damaged.size(), 0), 0);
    Collector collector;
    FrameReader reader(in.get(), &collector);
    absl::StatusOr<int64_t> n = reader.ReadSome();
    while (n.ok() && *n > 0) n = reader.ReadSome();
    EXPECT_TRUE(absl::IsDataLoss(n.status())) << at;
    EXPECT_TRUE(collector.bytes.empty());
  }
}

TEST(SocketTest, AddressesAreSplitAndJoined) {
  std::string host, port;
  ASSERT_TRUE(SplitAddress("[::1]:80", &host, &port).ok());
  EXPECT_EQ(host, "::1");
  EXPECT_EQ(port, "80");
  EXPECT_EQ(JoinAddress("::1", 80), "[::1]:80");
  ASSERT_TRUE(SplitAddress("node-3:7000", &host, &port).ok());
  EXPECT_EQ(host, "node-3");
  for (const char* bad : {"", "node", "node:", "node:x", "node:70000"}) {
    EXPECT_EQ(ReasonOf(SplitAddress(bad, &host, &port)), "BAD_ADDRESS") << bad;
  }
}

}  // namespace
}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
