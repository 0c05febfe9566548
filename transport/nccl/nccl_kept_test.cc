// Communicators that serve one edge after another, and when they do not.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/cuda/sim_control.h"
#include "transport/error.h"
#include "transport/nccl/nccl_channel.h"
#include "transport/nccl/test_edge.h"

namespace weightsync {
namespace transport {
namespace nccl {
namespace {

// Half of those that were made since the last call: each has two ends.
int Made() {
  const std::string notes = gpu_sim::TakeNotes();
  int lines = 0;
  for (const absl::string_view line : absl::StrSplit(notes, '\n'))
    lines += line.substr(0, 22) == "ncclCommInitRankConfig";
  EXPECT_EQ(lines % 2, 0);
  return lines / 2;
}

pid_t StartChild(const std::string& part) {
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "child", part.c_str(), nullptr);
    _exit(1);
  }
  return child;
}

// Its exit code.
int RunChild(const std::string& part) {
  const pid_t child = StartChild(part);
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -status;
}

class NcclKeptTest : public NcclEdgeTest {
 protected:
  void SetUp() override {
    gpu_sim::TakeNotes();
    gpu_sim::Plant(kNoted);
  }
  void TearDown() override { unsetenv("GPU_SIM_NCCL_EAGER_BYTES"); }

  static constexpr char kNoted[] = "call=ncclCommInitRankConfig note=1 count=0";

  // The edge of the next update.
  void NewEnds() {
    a_ = *NewNcclChannel(a_device_.get(), "c/b");
    b_ = *NewNcclChannel(b_device_.get(), "c/a");
  }
  void Finish() {
    a_->Finish();
    b_->Finish();
    a_.reset();
    b_.reset();
  }
  void MoveOne(char value, size_t size = 20000) {
    const std::string bytes(size, value);
    std::string got(size, 'x');
    const auto moved =
        Move({absl::MakeConstSpan(bytes)}, {absl::MakeSpan(got)});
    ASSERT_TRUE(moved.first.ok()) << moved.first;
    ASSERT_TRUE(moved.second.ok()) << moved.second;
    EXPECT_TRUE(got == bytes);
  }
  bool Settles(const NcclDevice& device, int communicators) {
    for (const absl::Time until = absl::Now() + absl::Seconds(10);
         absl::Now() < until; absl::SleepFor(absl::Milliseconds(5))) {
      if (device.communicators() == communicators) return true;
    }
    return false;
  }
};

constexpr char NcclKeptTest::kNoted[];

TEST_F(NcclKeptTest, ThePairsNextEdgeHasIt) {
  for (char value = 'a'; value < 'e'; ++value) {
    if (a_ == nullptr) NewEnds();
    Connect();
    MoveOne(value);
    EXPECT_EQ(Made(), value == 'a' ? 1 : 0);
    const int64_t bytes = a_device_->communicator_bytes();
    EXPECT_GT(bytes, 0);
    Finish();
    EXPECT_EQ(a_device_->communicators(), 1);
    EXPECT_EQ(a_device_->idle_communicators(), 1);
    EXPECT_EQ(b_device_->idle_communicators(), 1);
    // It is counted also while nobody has it.
    EXPECT_EQ(a_device_->communicator_bytes(), bytes);
  }
}

TEST_F(NcclKeptTest, EdgesAtOnceHaveOneEach) {
  for (int update = 0; update < 3; ++update) {
    if (a_ == nullptr) NewEnds();
    Connect();
    const auto first_a = std::move(a_), first_b = std::move(b_);
    NewEnds();
    Connect();
    MoveOne('s');
    EXPECT_EQ(Made(), update == 0 ? 2 : 0);
    for (const auto* end : {&first_a, &first_b}) (*end)->Finish();
    Finish();
  }
  EXPECT_EQ(a_device_->communicators(), 2);
}

TEST_F(NcclKeptTest, TheOtherDirectionHasItsOwn) {
  Connect();
  Finish();
  a_ = *NewNcclChannel(b_device_.get(), "c/a");
  b_ = *NewNcclChannel(a_device_.get(), "c/b");
  Connect();
  MoveOne('o');
  EXPECT_EQ(Made(), 2);
}

TEST_F(NcclKeptTest, WithoutAGoodEndThereIsNothingToKeep) {
  Connect();
  a_.reset();
  b_.reset();
  EXPECT_EQ(a_device_->communicators(), 0);
  // After an error, too, whatever comes then.
  NewEnds();
  Connect();
  std::string got(100, 'x');
  EXPECT_FALSE(
      b_->Receive({absl::MakeSpan(got)}, absl::Milliseconds(100), Runs).ok());
  Finish();
  EXPECT_EQ(b_device_->communicators(), 0);
  NewEnds();
  Connect();
  MoveOne('n');
  EXPECT_EQ(Made(), 3);
  EXPECT_TRUE(Settles(*a_device_, 1));
}

// A short send ends when NCCL has its bytes, received or not. Those of an
// update that was called off would be the first of the next one.
TEST_F(NcclKeptTest, BytesThatNobodyReceivedAreNotThoseOfTheNextEdge) {
  setenv("GPU_SIM_NCCL_EAGER_BYTES", "4096", 1);
  Connect();
  MoveOne('1', 1000);
  const std::string lost(1000, '2');
  ASSERT_TRUE(a_->Send({absl::MakeConstSpan(lost)}, kTimeout, Runs).ok());
  Finish();
  EXPECT_EQ(Made(), 1);
  EXPECT_EQ(a_device_->idle_communicators(), 1);
  EXPECT_EQ(b_device_->idle_communicators(), 1);
  NewEnds();
  Connect();
  MoveOne('3', 1000);
  EXPECT_EQ(Made(), 1);
  EXPECT_TRUE(Settles(*a_device_, 1));
  EXPECT_TRUE(Settles(*b_device_, 1));
}

TEST_F(NcclKeptTest, AProcessThatWasStartedAgainHasNone) {
  Connect();
  Finish();
  b_device_ = NewDevice(1);
  NewEnds();
  Connect();
  MoveOne('p');
  EXPECT_EQ(Made(), 2);
  // What the other one remembers of it has gone.
  EXPECT_TRUE(Settles(*a_device_, 1));
  Finish();
  // And the same of a sender.
  a_device_ = NewDevice(0);
  NewEnds();
  Connect();
  MoveOne('q');
  EXPECT_EQ(Made(), 1);
  EXPECT_TRUE(Settles(*b_device_, 1));
}

TEST_F(NcclKeptTest, OneThatIsInErrorIsNotOffered) {
  Connect();
  MoveOne('1');
  Finish();
  EXPECT_EQ(Made(), 1);
  NewEnds();
  gpu_sim::Plant(absl::StrCat("call=ncclCommGetAsyncError error=6;", kNoted));
  Connect();
  MoveOne('2');
  EXPECT_EQ(Made(), 1);
  EXPECT_TRUE(Settles(*a_device_, 1));
}

TEST_F(NcclKeptTest, NoMoreThanSoMany) {
  a_.reset();
  b_.reset();
  NcclOptions options;
  options.most_kept = 2;
  a_device_ = NewDevice(0, options);
  for (const char* peer : {"c/1", "c/2", "c/3", "c/4"}) {
    a_ = *NewNcclChannel(a_device_.get(), peer);
    b_ = *NewNcclChannel(b_device_.get(), "c/a");
    Connect();
    Finish();
  }
  EXPECT_EQ(Made(), 4);
  EXPECT_TRUE(Settles(*a_device_, 2));
  EXPECT_EQ(a_device_->idle_communicators(), 2);
  // The last two: not the first, which the other end has still.
  for (const char* peer : {"c/4", "c/3"}) {
    a_ = *NewNcclChannel(a_device_.get(), peer);
    b_ = *NewNcclChannel(b_device_.get(), "c/a");
    Connect();
    Finish();
  }
  EXPECT_EQ(Made(), 0);
}

TEST_F(NcclKeptTest, NotForLongerThanThat) {
  a_.reset();
  b_.reset();
  NcclOptions options;
  options.keep_limit = absl::Milliseconds(300);
  a_device_ = NewDevice(0, options);
  NewEnds();
  Connect();
  Finish();
  EXPECT_EQ(a_device_->idle_communicators(), 1);
  EXPECT_TRUE(Settles(*a_device_, 0));
  EXPECT_EQ(a_device_->communicator_bytes(), 0);
}

// The receiver's end comes back a moment after the sender's.
TEST_F(NcclKeptTest, OneThatIsJustComingBackIsWaitedFor) {
  Connect();
  MoveOne('1');
  std::unique_ptr<PayloadChannel> late = std::move(b_);
  a_->Finish();
  NewEnds();
  std::thread ending([&late] {
    absl::SleepFor(absl::Milliseconds(50));
    late->Finish();
    late.reset();
  });
  Connect();
  ending.join();
  MoveOne('2');
  EXPECT_EQ(Made(), 1);
}

// In a process of its own, whose GPU is lost.
int LostDevice() {
  const std::unique_ptr<NcclDevice> a_device = NewDevice(0);
  std::unique_ptr<NcclDevice> b_device = NewDevice(1);
  auto a = *NewNcclChannel(a_device.get(), "c/b");
  auto b = *NewNcclChannel(b_device.get(), "c/a");
  if (!b->Accept(*a->Offer()).ok()) _exit(2);
  std::thread connecting([&] {
    if (!b->Connect(kTimeout, Runs).ok()) _exit(3);
  });
  if (!a->Connect(kTimeout, Runs).ok()) _exit(4);
  connecting.join();
  a->Finish();
  a.reset();
  if (a_device->idle_communicators() != 1) _exit(5);
  a = *NewNcclChannel(a_device.get(), "c/b");
  gpu_sim::Plant("call=cudaStreamQuery sticky=700");
  const auto offer = a->Offer();
  // Not this one, whatever becomes of the edge.
  if (a_device->idle_communicators() != 0) _exit(6);
  if (offer.ok()) {
    const auto accepted = b->Accept(*offer);
    if (!accepted.ok() || !accepted->agreed) _exit(7);
    const absl::Status status = a->Connect(absl::Milliseconds(500), Runs);
    if (status.ok()) _exit(8);
  }
  _exit(0);
}

TEST(NcclDevice, OneThatIsLostHandsOutNothing) {
  EXPECT_EQ(RunChild("--lost_device"), 0);
  gpu_sim::Plant("");
}

// A peer that dies while nothing is between the two: in a process of its own,
// which waits for its end as rank 1.
int IdlePeer(int from, int to) {
  const std::unique_ptr<NcclDevice> device = NewDevice(1);
  auto channel = *NewNcclChannel(device.get(), "c/a");
  std::string offer(1 << 10, '\0');
  const ssize_t size = read(from, &offer[0], offer.size());
  if (size <= 0) _exit(2);
  offer.resize(static_cast<size_t>(size));
  const auto accepted = channel->Accept(offer);
  if (!accepted.ok()) _exit(3);
  if (write(to, accepted->answer.data(), accepted->answer.size()) <= 0)
    _exit(4);
  if (!channel->Connect(kTimeout, Runs).ok()) _exit(5);
  channel->Finish();
  channel.reset();
  if (write(to, "k", 1) != 1) _exit(6);
  while (true) pause();
}

TEST_F(NcclKeptTest, APeerThatVanishesWhileIdleHoldsUpNoEnd) {
  a_.reset();
  b_.reset();
  int there[2], back[2];
  ASSERT_EQ(pipe(there), 0);
  ASSERT_EQ(pipe(back), 0);
  const pid_t child =
      StartChild(absl::StrCat("--idle_peer=", there[0], ",", back[1]));
  a_ = *NewNcclChannel(a_device_.get(), "c/b");
  const std::string offer = *a_->Offer();
  ASSERT_EQ(write(there[1], offer.data(), offer.size()),
            static_cast<ssize_t>(offer.size()));
  std::string answer(1 << 10, '\0');
  const ssize_t size = read(back[0], &answer[0], answer.size());
  ASSERT_GT(size, 0);
  ASSERT_TRUE(*a_->Answered(answer.substr(0, static_cast<size_t>(size))));
  ASSERT_TRUE(a_->Connect(kTimeout, Runs).ok());
  char kept = 0;
  ASSERT_EQ(read(back[0], &kept, 1), 1);
  a_->Finish();
  a_.reset();
  ASSERT_EQ(a_device_->idle_communicators(), 1);
  ASSERT_EQ(kill(child, SIGKILL), 0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  const absl::Time start = absl::Now();
  a_device_.reset();
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));
  for (const int fd : {there[0], there[1], back[0], back[1]}) close(fd);
}

}  // namespace
}  // namespace nccl
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;
  if (argc == 2 && std::string(argv[1]) == "--lost_device")
    return weightsync::transport::nccl::LostDevice();
  int from = 0, to = 0;
  if (argc == 2 && sscanf(argv[1], "--idle_peer=%d,%d", &from, &to) == 2)
    return weightsync::transport::nccl::IdlePeer(from, to);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
