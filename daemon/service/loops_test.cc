#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "daemon/service/asker.h"
#include "daemon/service/loop.h"
#include "daemon/service/process_watcher.h"
#include "daemon/service/task_threads.h"
#include "gtest/gtest.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

constexpr absl::Duration kLong = absl::Seconds(20);

TEST(LoopTest, TasksRunInOrderAndTimersAfterThem) {
  Loop loop("test");
  std::vector<int> order;
  absl::Notification done;
  loop.Post([&] {
    // Long due, and yet behind what was posted before it comes up.
    loop.PostAt(absl::Now() - absl::Seconds(1), [&] {
      order.push_back(3);
      done.Notify();
    });
    loop.Post([&] { order.push_back(2); });
    order.push_back(1);
  });
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(kLong));
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
}

TEST(LoopTest, TimersRunInTheOrderOfTheirTimesUnlessCancelled) {
  Loop loop("test");
  std::string order;
  absl::Notification done;
  const absl::Time now = absl::Now();
  loop.PostAt(now + absl::Milliseconds(30), [&] {
    order += "c";
    done.Notify();
  });
  loop.PostAt(now + absl::Milliseconds(10), [&] { order += "a"; });
  const Loop::TimerId cancelled =
      loop.PostAt(now + absl::Milliseconds(20), [&] { order += "b"; });
  loop.Cancel(cancelled);
  loop.Cancel(cancelled);
  loop.Cancel(0);
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(kLong));
  EXPECT_EQ(order, "ac");
}

TEST(LoopTest, StopRunsWhatWasPostedAndDestroysWhatComesLater) {
  Loop loop("test");
  int ran = 0;
  auto alive = std::make_shared<int>(0);
  loop.PostAfter(absl::Hours(1), [alive] {});
  for (int i = 0; i < 100; ++i) loop.Post([&] { ++ran; });
  loop.Stop();
  EXPECT_EQ(ran, 100);
  loop.Post([alive, &ran] { ++ran; });
  EXPECT_EQ(ran, 100);
  EXPECT_EQ(alive.use_count(), 1);
}

TEST(AskerTest, WaitsForTheAnswerAndNoLonger) {
  Loop loop("test");
  Asker asker(&loop);
  bool ran = false;
  EXPECT_EQ(asker.Ask([&] { ran = true; }, kLong), Asker::Outcome::kDone);
  EXPECT_TRUE(ran);
  absl::Notification release;
  loop.Post([&] { release.WaitForNotification(); });
  EXPECT_EQ(asker.Ask([] {}, absl::Milliseconds(1)), Asker::Outcome::kLate);
  release.Notify();
  loop.Stop();
}

// Whoever looks at a page of a daemon whose loop is busy has --call_timeout;
// the daemon ends within --shutdown_timeout all the same.
TEST(AskerTest, NobodyWaitsBeyondTheEnd) {
  Loop loop("test");
  Asker asker(&loop);
  absl::Notification release, asked, answered;
  loop.Post([&] { release.WaitForNotification(); });
  Asker::Outcome outcome = Asker::Outcome::kDone;
  std::thread who([&] {
    asked.Notify();
    outcome = asker.Ask([] {}, absl::Hours(1));
    answered.Notify();
  });
  asked.WaitForNotification();
  EXPECT_FALSE(answered.WaitForNotificationWithTimeout(absl::Milliseconds(20)));
  asker.EndBy(absl::Now() + absl::Milliseconds(20));
  EXPECT_TRUE(answered.WaitForNotificationWithTimeout(kLong));
  EXPECT_EQ(outcome, Asker::Outcome::kEnding);
  // Nor one who comes now.
  EXPECT_EQ(asker.Ask([] {}, absl::Hours(1)), Asker::Outcome::kEnding);
  release.Notify();
  who.join();
  loop.Stop();
}

TEST(TaskThreadsTest, TasksThatBlockDoNotHoldOthersUp) {
  TaskThreads threads("test");
  absl::Notification release, done;
  for (int i = 0; i < 5; ++i)
    threads.Run([&] { release.WaitForNotification(); });
  threads.Run([&] { done.Notify(); });
  EXPECT_TRUE(done.WaitForNotificationWithTimeout(kLong));
  release.Notify();
  threads.Stop();
}

TEST(ProcessWatcherTest, SaysThatAProcessHasEnded) {
  auto watcher = ProcessWatcher::Start();
  ASSERT_TRUE(watcher.ok()) << watcher.status();
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  absl::Notification ended;
  ASSERT_TRUE((*watcher)->Watch(child, [&] { ended.Notify(); }).ok());
  EXPECT_FALSE(ended.WaitForNotificationWithTimeout(absl::Milliseconds(20)));
  kill(child, SIGKILL);
  EXPECT_TRUE(ended.WaitForNotificationWithTimeout(kLong));
  waitpid(child, nullptr, 0);
  EXPECT_EQ(ErrorReason((*watcher)->Watch(child, [] {}).status()),
            "PROCESS_UNKNOWN");
}

TEST(ProcessWatcherTest, UnwatchedProcessesAreNotSpokenOf) {
  auto watcher = ProcessWatcher::Start();
  ASSERT_TRUE(watcher.ok()) << watcher.status();
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  bool unwatched = false;
  absl::Notification ended;
  const auto id = (*watcher)->Watch(child, [&] { unwatched = true; });
  ASSERT_TRUE(id.ok());
  ASSERT_TRUE((*watcher)->Watch(child, [&] { ended.Notify(); }).ok());
  (*watcher)->Unwatch(*id);
  kill(child, SIGKILL);
  EXPECT_TRUE(ended.WaitForNotificationWithTimeout(kLong));
  EXPECT_FALSE(unwatched);
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
