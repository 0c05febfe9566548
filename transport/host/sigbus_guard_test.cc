#include "transport/host/sigbus_guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "transport/error.h"
#include "transport/host/unique_fd.h"

namespace weightsync {
namespace transport {
namespace {

constexpr size_t kBytes = 1 << 20;

// Memory of another owner, who may take its bytes away.
class Truncatable {
 public:
  Truncatable() : fd_(memfd_create("test", MFD_CLOEXEC)) {
    EXPECT_EQ(ftruncate(fd_.get(), kBytes), 0);
    data_ = static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                                    MAP_SHARED, fd_.get(), 0));
    std::memset(data_, 1, kBytes);
  }
  ~Truncatable() { munmap(data_, kBytes); }
  void Truncate(size_t bytes) { EXPECT_EQ(ftruncate(fd_.get(), bytes), 0); }
  char* data() { return data_; }

 private:
  UniqueFd fd_;
  char* data_;
};

TEST(SigbusGuard, LetsGoodCopiesThrough) {
  Truncatable source;
  std::vector<char> target(kBytes);
  EXPECT_TRUE(RunGuarded(source.data(), kBytes, [&] {
                std::memcpy(target.data(), source.data(), kBytes);
              }).ok());
  EXPECT_EQ(target[kBytes - 1], 1);
}

TEST(SigbusGuard, TurnsALostPageIntoAStatusAgainAndAgain) {
  Truncatable source;
  std::vector<char> target(kBytes);
  source.Truncate(kBytes / 2);
  for (int i = 0; i < 3; ++i) {
    const absl::Status status = RunGuarded(source.data(), kBytes, [&] {
      std::memcpy(target.data(), source.data(), kBytes);
    });
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(ReasonOf(status), "SOURCE_MEMORY_LOST");
  }
}

TEST(SigbusGuard, OfTheRightThread) {
  Truncatable source;
  source.Truncate(0);
  std::vector<std::thread> threads;
  std::atomic<int> lost{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        char byte;
        if (!RunGuarded(source.data(), kBytes, [&] {
               std::memcpy(&byte, source.data() + 5000, 1);
             }).ok())
          ++lost;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(lost, 800);
}

TEST(SigbusGuard, TheOuterGuardOfTwoMayBeMeant) {
  Truncatable outer;
  Truncatable inner;
  outer.Truncate(0);
  bool after = false;
  const absl::Status status = RunGuarded(outer.data(), kBytes, [&] {
    [[maybe_unused]] const absl::Status ignored =
        RunGuarded(inner.data(), kBytes, [&] {
          char byte;
          std::memcpy(&byte, outer.data(), 1);
          asm volatile("" : : "r"(byte));
        });
    after = true;
  });
  EXPECT_EQ(ReasonOf(status), "SOURCE_MEMORY_LOST");
  EXPECT_FALSE(after);
  // And the guard stack is as before.
  EXPECT_TRUE(RunGuarded(inner.data(), kBytes, [] {}).ok());
}

TEST(SigbusGuardDeathTest, OtherAddressesEndTheProcessAsBefore) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  Truncatable guarded;
  Truncatable other;
  other.Truncate(0);
  EXPECT_EXIT(
      {
        signal(SIGBUS, SIG_DFL);
        [[maybe_unused]] const absl::Status ignored =
            RunGuarded(guarded.data(), kBytes, [&] {
              char byte;
              std::memcpy(&byte, other.data(), 1);
              asm volatile("" : : "r"(byte));
            });
        _exit(0);
      },
      ::testing::KilledBySignal(SIGBUS), "");
}

TEST(SigbusGuardDeathTest, OtherAddressesGoToTheHandlerBefore) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  Truncatable guarded;
  Truncatable other;
  other.Truncate(0);
  EXPECT_EXIT(
      {
        signal(
            SIGBUS, +[](int) { _exit(77); });
        [[maybe_unused]] const absl::Status ignored =
            RunGuarded(guarded.data(), kBytes, [&] {
              char byte;
              std::memcpy(&byte, other.data(), 1);
              asm volatile("" : : "r"(byte));
            });
        _exit(0);
      },
      ::testing::ExitedWithCode(77), "");
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
