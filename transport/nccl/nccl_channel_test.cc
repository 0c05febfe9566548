#include "transport/nccl/nccl_channel.h"

#include <cuda_runtime_api.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/cuda/sim_control.h"
#include "transport/error.h"
#include "transport/nccl/test_edge.h"

namespace weightsync {
namespace transport {
namespace nccl {
namespace {

TEST_F(NcclEdgeTest, MovesPartsThatAreCutElsewhereAtEachEnd) {
  Connect();
  std::string bytes(54321, '\0');
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<char>(i * 7919 >> 3);
  std::string got(bytes.size(), '\0');
  const auto moved =
      Move({absl::MakeConstSpan(bytes.data(), 1),
            absl::MakeConstSpan(bytes.data() + 1, 30000),
            absl::MakeConstSpan(bytes.data() + 30001, 24320)},
           {absl::MakeSpan(&got[0], 54000), absl::MakeSpan(&got[54000], 321)});
  EXPECT_TRUE(moved.first.ok()) << moved.first;
  EXPECT_TRUE(moved.second.ok()) << moved.second;
  EXPECT_TRUE(got == bytes);
  EXPECT_EQ(a_device_->communicators(), 1);
  a_.reset();
  EXPECT_EQ(a_device_->communicators(), 0);
}

// Bytes of parts that are not beside each other, uneven and many.
class Scattered {
 public:
  explicit Scattered(const std::vector<size_t>& sizes) {
    for (const size_t size : sizes) parts_.emplace_back(size, 'x');
  }
  void Fill() {
    uint32_t state = 4711;
    for (std::string& part : parts_) {
      for (char& byte : part) {
        state = state * 1664525 + 1013904223;
        byte = static_cast<char>(state >> 24);
      }
    }
  }
  std::vector<absl::Span<const char>> ConstSpans() const {
    std::vector<absl::Span<const char>> spans;
    for (const std::string& part : parts_)
      spans.push_back(absl::MakeConstSpan(part));
    return spans;
  }
  std::vector<absl::Span<char>> Spans() {
    std::vector<absl::Span<char>> spans;
    for (std::string& part : parts_) spans.push_back(absl::MakeSpan(part));
    return spans;
  }
  std::string bytes() const {
    std::string all;
    for (const std::string& part : parts_) all += part;
    return all;
  }

 private:
  std::vector<std::string> parts_;
};

// The staging buffer's halves have 5 KiB each: some parts are many pieces, and
// some pieces many parts.
TEST_F(NcclEdgeTest, ManyPiecesOfUnevenParts) {
  Connect();
  for (const std::vector<size_t>& sizes :
       std::vector<std::vector<size_t>>{{1},
                                        {5120},
                                        {5120, 5120},
                                        {5119, 2, 5119},
                                        {40000, 1, 3, 5120, 700},
                                        std::vector<size_t>(300, 137)}) {
    Scattered from(sizes);
    from.Fill();
    const std::string want = from.bytes();
    Scattered to({want.size() / 3, want.size() - want.size() / 3});
    const auto moved = Move(from.ConstSpans(), to.Spans());
    ASSERT_TRUE(moved.first.ok()) << moved.first;
    ASSERT_TRUE(moved.second.ok()) << moved.second;
    EXPECT_TRUE(to.bytes() == want) << sizes.size();
  }
}

// How many bytes from the beginning are as they were sent; the rest was not
// touched.
size_t Came(const std::string& got, const std::string& want) {
  size_t same = 0;
  while (same < got.size() && got[same] == want[same]) ++same;
  EXPECT_EQ(got.substr(same), std::string(got.size() - same, 'x'));
  return same;
}

TEST_F(NcclEdgeTest, AfterAnErrorInTheMiddleOnlyWholePiecesHaveCome) {
  Connect();
  Scattered from({30000}), to({30000});
  from.Fill();
  // Two of each piece.
  gpu_sim::Plant("call=ncclGroupEnd async=6 after=7");
  const auto moved = Move(from.ConstSpans(), to.Spans(), absl::Seconds(2));
  EXPECT_FALSE(moved.first.ok());
  EXPECT_FALSE(moved.second.ok());
  const size_t came = Came(to.bytes(), from.bytes());
  EXPECT_EQ(came % 5120, 0u) << came;
  EXPECT_LT(came, 30000u);
  // And of no use from then on.
  EXPECT_FALSE(a_->Send(from.ConstSpans(), kTimeout, Runs).ok());
  EXPECT_EQ(a_device_->communicators(), 0);
  gpu_sim::Plant("");
  // What was under way in the buffers has ended before others have them.
  a_ = nullptr;
  b_ = nullptr;
  a_ = *NewNcclChannel(a_device_.get(), "c/b");
  b_ = *NewNcclChannel(b_device_.get(), "c/a");
  EXPECT_EQ(a_device_->staging_bytes(), 10 << 10);
  Connect();
  Scattered again({30000});
  EXPECT_TRUE(Move(from.ConstSpans(), again.Spans()).second.ok());
  EXPECT_TRUE(again.bytes() == from.bytes());
}

TEST_F(NcclEdgeTest, AStopInTheMiddleEndsBothAndTouchesNothingMore) {
  Connect();
  // The sender has only a part of what the receiver waits for.
  Scattered from({3 * 5120}), to({30000});
  from.Fill();
  std::atomic<bool> stop{false};
  absl::Status received;
  std::thread receiving([&] {
    received =
        b_->Receive(to.Spans(), kTimeout, [&stop] { return stop.load(); });
  });
  ASSERT_TRUE(a_->Send(from.ConstSpans(), kTimeout, Runs).ok());
  const absl::Time start = absl::Now();
  stop = true;
  receiving.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
  EXPECT_EQ(ReasonOf(received), "GROUP_CLOSED");
  const size_t came = Came(to.bytes(), from.bytes() + std::string(20000, '-'));
  EXPECT_EQ(came % 5120, 0u) << came;
  EXPECT_LE(came, 3 * 5120u);
}

// The copy of a piece does not wait for the one before to be on the other side.
TEST_F(NcclEdgeTest, ThePieceAfterIsCopiedWhileOneIsOnItsWay) {
  Connect();
  gpu_sim::TakeNotes();
  Scattered from({4 * 5120}), to({4 * 5120});
  from.Fill();
  gpu_sim::Plant("call=cudaMemcpyAsync note=1 count=0");
  std::atomic<bool> stop{false};
  absl::Status sent;
  // Nobody receives.
  std::thread sending([&] {
    sent =
        a_->Send(from.ConstSpans(), kTimeout, [&stop] { return stop.load(); });
  });
  std::string notes;
  for (const absl::Time until = absl::Now() + absl::Seconds(10);
       absl::Now() < until && notes.size() < 2 * 16;) {
    notes += gpu_sim::TakeNotes();
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(notes, "cudaMemcpyAsync\ncudaMemcpyAsync\n");
  stop = true;
  sending.join();
  EXPECT_EQ(ReasonOf(sent), "GROUP_CLOSED");
  // No third: there are two halves.
  EXPECT_EQ(gpu_sim::TakeNotes(), "");
}

// An edge in each direction between the same two GPUs, both full of bytes: if
// one waited for the other at one end, and the other for the one at the other,
// neither would ever end.
TEST_F(NcclEdgeTest, TwoEdgesInOppositeDirectionsRunAtOnce) {
  Connect();
  const auto back_from = *NewNcclChannel(b_device_.get(), "c/a");
  const auto back_to = *NewNcclChannel(a_device_.get(), "c/b");
  ASSERT_TRUE(back_to->Accept(*back_from->Offer()).ok());
  std::thread connecting(
      [&] { EXPECT_TRUE(back_to->Connect(kTimeout, Runs).ok()); });
  ASSERT_TRUE(back_from->Connect(kTimeout, Runs).ok());
  connecting.join();
  Scattered there({60000}), back({60001}), got_there({60000}),
      got_back({60001});
  there.Fill();
  back.Fill();
  // Both operations of each device are under way before any can end: the ends
  // that come later are those of different edges.
  std::vector<std::thread> ends;
  ends.emplace_back(
      [&] { EXPECT_TRUE(a_->Send(there.ConstSpans(), kTimeout, Runs).ok()); });
  ends.emplace_back([&] {
    EXPECT_TRUE(back_from->Send(back.ConstSpans(), kTimeout, Runs).ok());
  });
  absl::SleepFor(absl::Milliseconds(100));
  ends.emplace_back([&] {
    EXPECT_TRUE(back_to->Receive(got_back.Spans(), kTimeout, Runs).ok());
  });
  ends.emplace_back([&] {
    EXPECT_TRUE(b_->Receive(got_there.Spans(), kTimeout, Runs).ok());
  });
  for (std::thread& end : ends) end.join();
  EXPECT_TRUE(got_there.bytes() == there.bytes());
  EXPECT_TRUE(got_back.bytes() == back.bytes());
}

TEST_F(NcclEdgeTest, VersionsMustBeTheSame) {
  std::string offer = *a_->Offer();
  // The number after the magic.
  offer[8] = static_cast<char>(offer[8] - 1);
  const absl::Status status = b_->Accept(offer).status();
  EXPECT_EQ(ReasonOf(status), "NCCL_VERSION_MISMATCH");
  EXPECT_TRUE(absl::StrContains(
      status.message(), NcclVersionText(b_device_->library().version())));
  EXPECT_EQ(ReasonOf(b_->Accept("something").status()), "NOT_A_PEER");
  offer = *a_->Offer();
  offer[12] = static_cast<char>(offer[12] + 1);
  EXPECT_EQ(ReasonOf(b_->Accept(offer).status()), "NCCL_OPTIONS_MISMATCH");
}

TEST_F(NcclEdgeTest, TwoEndsOnOneGpuAreNeverTried) {
  const auto same = NewNcclChannel(a_device_.get(), "c/a");
  EXPECT_EQ(ReasonOf((*same)->Accept(*a_->Offer()).status()), "SAME_GPU");
}

TEST_F(NcclEdgeTest, APeerThatNeverComesIsADeadline) {
  ASSERT_TRUE(a_->Offer().ok());
  absl::Time start = absl::Now();
  EXPECT_TRUE(absl::IsUnavailable(a_->Connect(absl::Milliseconds(200), Runs)));
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
  ASSERT_TRUE(b_->Accept(*a_->Offer()).ok());
  std::atomic<bool> stop{false};
  std::thread stopper([&] {
    absl::SleepFor(absl::Milliseconds(50));
    stop = true;
  });
  start = absl::Now();
  EXPECT_EQ(ReasonOf(b_->Connect(kTimeout, [&] { return stop.load(); })),
            "GROUP_CLOSED");
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
  stopper.join();
}

TEST_F(NcclEdgeTest, APeerThatNeverSendsIsADeadlineAndNothingIsTouched) {
  Connect();
  std::string got(100, 'x');
  EXPECT_TRUE(absl::IsUnavailable(
      b_->Receive({absl::MakeSpan(got)}, absl::Milliseconds(200), Runs)));
  EXPECT_EQ(got, std::string(100, 'x'));
  // And of no use from then on.
  EXPECT_FALSE(
      b_->Receive({absl::MakeSpan(got)}, absl::Milliseconds(200), Runs).ok());
}

TEST_F(NcclEdgeTest, AnErrorInTheMiddleIsNoticedAtBothEnds) {
  Connect();
  const std::string bytes(100, 'b');
  std::string got(100, 'x');
  gpu_sim::Plant("call=ncclGroupEnd async=6");
  const auto moved = Move({absl::MakeConstSpan(bytes)}, {absl::MakeSpan(got)},
                          absl::Seconds(2));
  EXPECT_FALSE(moved.first.ok());
  EXPECT_FALSE(moved.second.ok());
  EXPECT_TRUE(ReasonOf(moved.first) == "NCCL_ERROR" ||
              ReasonOf(moved.second) == "NCCL_ERROR");
  EXPECT_EQ(got, std::string(100, 'x'));
}

TEST_F(NcclEdgeTest, AnErrorOfTheStartIsNamed) {
  ASSERT_TRUE(a_->Offer().ok());
  gpu_sim::Plant("call=ncclCommInitRankConfig error=2");
  const absl::Status status = a_->Connect(kTimeout, Runs);
  EXPECT_EQ(ReasonOf(status), "NCCL_ERROR");
  EXPECT_TRUE(absl::StrContains(status.message(), "ncclCommInitRankConfig"));
}

// Nothing is left to be made when bytes move.
TEST_F(NcclEdgeTest, WhatIsConnectedHasMovedSomething) {
  ASSERT_TRUE(b_->Accept(*a_->Offer()).ok());
  gpu_sim::Plant("call=ncclRecv error=2");
  absl::Status b;
  std::thread other([&] { b = b_->Connect(kTimeout, Runs); });
  const absl::Time start = absl::Now();
  EXPECT_TRUE(absl::IsUnavailable(a_->Connect(absl::Seconds(1), Runs)));
  EXPECT_LT(absl::Now() - start, absl::Seconds(4));
  other.join();
  EXPECT_EQ(ReasonOf(b), "NCCL_ERROR");
  EXPECT_TRUE(absl::StrContains(b.message(), "ncclRecv")) << b;
}

// Which calls ended communicators.
class NcclEndTest : public NcclEdgeTest {
 protected:
  void SetUp() override { gpu_sim::TakeNotes(); }
  static void NoteEnds(const std::string& rules = "") {
    gpu_sim::Plant(rules +
                   "call=ncclCommFinalize note=1 count=0;"
                   "call=ncclCommDestroy note=1 count=0;"
                   "call=ncclCommAbort note=1 count=0");
  }
};

TEST_F(NcclEndTest, OneThatIsWellIsFinalizedAndDestroyed) {
  Connect();
  NoteEnds();
  a_.reset();
  EXPECT_EQ(gpu_sim::TakeNotes(), "ncclCommFinalize\nncclCommDestroy\n");
  b_.reset();
  EXPECT_EQ(gpu_sim::TakeNotes(), "ncclCommFinalize\nncclCommDestroy\n");
  EXPECT_EQ(a_device_->communicators(), 0);
}

TEST_F(NcclEndTest, OneThatWasInErrorIsAborted) {
  Connect();
  NoteEnds();
  std::string got(100, 'x');
  EXPECT_FALSE(
      b_->Receive({absl::MakeSpan(got)}, absl::Milliseconds(100), Runs).ok());
  EXPECT_EQ(gpu_sim::TakeNotes(), "ncclCommAbort\n");
  b_.reset();
  EXPECT_EQ(gpu_sim::TakeNotes(), "");
}

TEST_F(NcclEndTest, OneThatDoesNotComeToItsEndIsAborted) {
  Connect();
  NoteEnds("call=ncclCommFinalize stall=1;");
  const absl::Time start = absl::Now();
  a_.reset();
  EXPECT_LT(absl::Now() - start, absl::Seconds(4));
  EXPECT_EQ(gpu_sim::TakeNotes(), "ncclCommAbort\n");
  NoteEnds("call=ncclCommFinalize error=3;");
  b_.reset();
  EXPECT_EQ(gpu_sim::TakeNotes(), "ncclCommAbort\n");
}

// Bytes that may still come are no matter of this edge alone. In a process of
// its own, whose stream never ends.
int StalledCopy() {
  const std::unique_ptr<NcclDevice> a_device = NewDevice(0),
                                    b_device = NewDevice(1);
  const auto a = *NewNcclChannel(a_device.get(), "c/b");
  const auto b = *NewNcclChannel(b_device.get(), "c/a");
  if (!b->Accept(*a->Offer()).ok()) _exit(2);
  std::thread connecting([&] {
    if (!b->Connect(kTimeout, Runs).ok()) _exit(3);
  });
  if (!a->Connect(kTimeout, Runs).ok()) _exit(4);
  connecting.join();
  const std::string bytes(100, 'b');
  std::string got(100, 'x');
  // The first is the sender's.
  gpu_sim::Plant("call=cudaMemcpyAsync stall=1 after=1");
  std::thread sending([&] {
    if (!a->Send({absl::MakeConstSpan(bytes)}, kTimeout, Runs).ok()) _exit(5);
  });
  cudaHostRegister(&got[0], got.size(), 0);
  const absl::Time start = absl::Now();
  const absl::Status status =
      b->Receive({absl::MakeSpan(got)}, absl::Milliseconds(500), Runs);
  if (absl::Now() - start > absl::Seconds(5)) _exit(6);
  if (ReasonOf(status) != "DEVICE_STALLED") {
    LOG(ERROR) << status;
    _exit(7);
  }
  sending.join();
  _exit(0);
}

// In a process of its own, which the hanging call never lets end in good order.
int HangingAbort() {
  NcclOptions options;
  options.abort_deadline = absl::Milliseconds(200);
  std::atomic<int> told{0};
  options.on_hung = [&told](const absl::Status& status) {
    if (ReasonOf(status) == "NCCL_HUNG") ++told;
  };
  std::unique_ptr<NcclDevice> device = NewDevice(0, options);
  auto channel = *NewNcclChannel(device.get(), "c/b");
  if (!channel->Offer().ok()) _exit(2);
  gpu_sim::Plant("call=ncclCommAbort hang=1");
  const absl::Time start = absl::Now();
  (void)channel->Connect(absl::Milliseconds(100), Runs);
  if (absl::Now() - start > absl::Seconds(5)) _exit(3);
  if (told != 1) _exit(4);
  if (ReasonOf(NewNcclChannel(device.get(), "c/b").status()) != "NCCL_HUNG")
    _exit(5);
  _exit(0);
}

// Its exit code.
int RunChild(const char* part) {
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "child", part, nullptr);
    _exit(1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -status;
}

TEST(NcclDevice, AnAbortThatNeverReturnsIsTold) {
  EXPECT_EQ(RunChild("--hanging_abort"), 0);
}

TEST(NcclDevice, ACopyOfWhatCameThatDoesNotEndIsAStalledDevice) {
  EXPECT_EQ(RunChild("--stalled_copy"), 0);
  gpu_sim::Plant("");
}

TEST(NcclDevice, CommunicatorsTakeWhatTheyWereGiven) {
  gpu_sim::TakeNotes();
  NcclOptions options;
  options.max_ctas = 7;
  options.cta_policy = NCCL_CTA_POLICY_DEFAULT;
  const std::unique_ptr<NcclDevice> device = NewDevice(0, options);
  const auto channel = *NewNcclChannel(device.get(), "c/b");
  ASSERT_TRUE(channel->Offer().ok());
  gpu_sim::Plant("call=ncclCommInitRankConfig note=1 count=0");
  EXPECT_FALSE(channel->Connect(absl::Milliseconds(100), Runs).ok());
  gpu_sim::Plant("");
  EXPECT_EQ(gpu_sim::TakeNotes(),
            "ncclCommInitRankConfig blocking=0 minCTAs=1 maxCTAs=7 "
            "CTAPolicy=0 connections=8\n");
}

// What is logged.
class Lines : public google::LogSink {
 public:
  Lines() { google::AddLogSink(this); }
  ~Lines() override { google::RemoveLogSink(this); }
  void send(google::LogSeverity, const char*, const char*, int,
            const google::LogMessageTime&, const char* message,
            size_t size) override {
    absl::MutexLock lock(&mutex_);
    text_.append(message, size).append("\n");
  }
  std::string text() {
    absl::MutexLock lock(&mutex_);
    return text_;
  }

 private:
  absl::Mutex mutex_;
  std::string text_;
};

TEST(NcclDevice, SettingsThatAreInForceAreLogged) {
  setenv("NCCL_SOCKET_IFNAME", "eth7", 1);
  Lines lines;
  const std::unique_ptr<NcclDevice> device = NewDevice(0);
  unsetenv("NCCL_SOCKET_IFNAME");
  EXPECT_TRUE(absl::StrContains(lines.text(), "NCCL_SOCKET_IFNAME=eth7"))
      << lines.text();
  EXPECT_TRUE(absl::StrContains(lines.text(), "maxCTAs 4, CTAPolicy 1"))
      << lines.text();
}

// NCCL reads files of its own, and what stands there goes before what a program
// configures.
TEST(NcclDevice, SettingsInFilesOfNcclAreSeen) {
  const std::string file = absl::StrCat(getenv("GPU_SIM_DIR"), "/nccl.conf");
  const std::unique_ptr<NcclDevice> device = NewDevice(0);
  std::ofstream(file) << "# of the operator\nNCCL_IB_HCA=mlx5_9\n";
  Lines lines;
  auto channel = *NewNcclChannel(device.get(), "c/b");
  EXPECT_TRUE(channel->Offer().ok());
  EXPECT_TRUE(absl::StrContains(lines.text(), "NCCL_IB_HCA=mlx5_9"))
      << lines.text();
  std::ofstream(file) << "NCCL_COMM_ID=10.0.0.1:5000\n";
  EXPECT_EQ(ReasonOf(channel->Offer().status()), "NCCL_SETTING");
  // Who receives makes no id.
  unsetenv("NCCL_COMM_ID");
  unlink(file.c_str());
  const std::string offer = *channel->Offer();
  std::ofstream(file) << "NCCL_COMM_ID=10.0.0.1:5000\n";
  const std::unique_ptr<NcclDevice> other = NewDevice(1);
  auto receiver = *NewNcclChannel(other.get(), "c/b");
  ASSERT_TRUE(receiver->Accept(offer).ok());
  EXPECT_EQ(ReasonOf(receiver->Connect(kTimeout, Runs)), "NCCL_SETTING");
  unlink(file.c_str());
  unsetenv("NCCL_COMM_ID");
  unsetenv("NCCL_IB_HCA");
}

TEST(NcclLibrary, WhatIsMissingIsNamed) {
  absl::Status status = NcclLibrary::Load("/nonexistent/libnccl.so.2").status();
  EXPECT_EQ(ReasonOf(status), "NCCL_MISSING");
  EXPECT_TRUE(absl::StrContains(status.message(), "/nonexistent"));
  status = NcclLibrary::Load("libm.so.6").status();
  EXPECT_EQ(ReasonOf(status), "NCCL_TOO_OLD");
  EXPECT_TRUE(absl::StrContains(status.message(), "ncclCommAbort"));
}

TEST(NcclLibrary, AnotherMajorVersionIsRefused) {
  setenv("GPU_SIM_NCCL_VERSION", "31000", 1);
  EXPECT_EQ(ReasonOf(NcclLibrary::Load().status()), "NCCL_TOO_OLD");
  unsetenv("GPU_SIM_NCCL_VERSION");
  EXPECT_EQ(NcclVersionText(22809), "2.28.9");
}

TEST(NcclEnvironment, OnlyKnownSettingsAreTaken) {
  const char* const fine[] = {"PATH=/bin", "NCCL_SOCKET_IFNAME=eth0",
                              "NCCL_DEBUG=WARN", nullptr};
  EXPECT_EQ(*CheckNcclEnvironment(fine),
            "NCCL_DEBUG=WARN NCCL_SOCKET_IFNAME=eth0");
  const char* const hijack[] = {"NCCL_COMM_ID=10.0.0.1:5000", nullptr};
  const absl::Status status = CheckNcclEnvironment(hijack).status();
  EXPECT_EQ(ReasonOf(status), "NCCL_SETTING");
  EXPECT_TRUE(absl::StrContains(status.message(), "NCCL_COMM_ID"));
}

}  // namespace
}  // namespace nccl
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;
  const std::string part = argc == 2 ? argv[1] : "";
  if (part == "--hanging_abort")
    return weightsync::transport::nccl::HangingAbort();
  if (part == "--stalled_copy")
    return weightsync::transport::nccl::StalledCopy();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
