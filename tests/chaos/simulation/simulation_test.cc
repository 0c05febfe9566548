// Random histories of a whole cluster, and faults planted in the harness to see
// that it would report them. A seed that fails is replayed, event by event, by
//   bazel run //tests/chaos/simulation:simulate -- --seed=N --trace

#include <cstdint>
#include <cstdlib>
#include <ostream>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "tests/chaos/simulation/checker.h"
#include "tests/chaos/simulation/plants.h"
#include "tests/chaos/simulation/small_objects.h"
#include "tests/chaos/simulation/world.h"

namespace weightsync {
namespace simulation {
namespace {

constexpr int64_t kHistories = 200000;
constexpr int64_t kParts = 16;

void BeQuiet() {
  FLAGS_logtostderr = true;
  FLAGS_minloglevel = 4;
  // Else each line of a log, printed or not, looks for /etc/localtime.
  setenv("TZ", "UTC0", 1);
}

class HistoriesTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(HistoriesTest, KeepEveryPromise) {
  BeQuiet();
  constexpr int64_t kEach = kHistories / kParts;
  int64_t commits = 0;
  int64_t faults = 0;
  int failed = 0;
  for (int64_t i = 0; i < kEach && failed < 3; ++i) {
    EndHistory();
    const uint64_t seed = static_cast<uint64_t>(GetParam() * kEach + i + 1);
    const Outcome outcome = World(seed, Odds(), Planted::kNone, nullptr).Run();
    commits += outcome.commits;
    for (const auto& fault : outcome.faults) {
      for (const auto& state : fault.second) faults += state.second;
    }
    if (outcome.violations.empty()) continue;
    ++failed;
    ADD_FAILURE() << "seed " << seed << ": "
                  << absl::StrJoin(outcome.violations, "\n  ");
  }
  // Histories in which nothing happens prove nothing.
  EXPECT_GT(commits, kEach);
  EXPECT_GT(faults, kEach);
}

INSTANTIATE_TEST_SUITE_P(Parts, HistoriesTest,
                         ::testing::Range(int64_t{0}, kParts));

TEST(SimulationTest, ASeedReplaysExactly) {
  BeQuiet();
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    std::ostringstream first;
    std::ostringstream second;
    World(seed, Odds(), Planted::kNone, &first).Run();
    World(seed, Odds(), Planted::kNone, &second).Run();
    EXPECT_EQ(first.str(), second.str()) << "seed " << seed;
    EXPECT_GT(first.str().size(), 1000u);
  }
}

class CheckerTest : public ::testing::TestWithParam<Plant> {};

TEST_P(CheckerTest, ReportsIt) {
  BeQuiet();
  for (uint64_t seed = 1; seed <= 4000; ++seed) {
    const Outcome outcome =
        World(seed, Odds(), GetParam().planted, nullptr).Run();
    for (const std::string& violation : outcome.violations) {
      if (absl::StrContains(violation, GetParam().sentence)) return;
    }
  }
  FAIL() << "nobody noticed";
}

INSTANTIATE_TEST_SUITE_P(Planted, CheckerTest, ::testing::ValuesIn(kPlants),
                         [](const auto& test) {
                           return std::string(test.param.name);
                         });

// The sentences themselves: what names nobody helps nobody.
TEST(CheckerSentencesTest, AnAbortThatNamesNobodyIsReported) {
  const auto ok = [](const std::string& reason, const std::string& message) {
    Checker checker;
    internal::v1::JournalRecord record;
    record.mutable_update_ended()->set_update_id("u1");
    record.mutable_update_ended()->mutable_failure()->set_reason(reason);
    record.mutable_update_ended()->mutable_failure()->set_message(message);
    checker.Journalled(record);
    return checker.ok();
  };
  EXPECT_TRUE(ok("GATHER_TIMEOUT", "rank 1, 2 did not publish within 1m"));
  EXPECT_TRUE(ok("NODE_LOST", "node n2 did not come back within 5s"));
  EXPECT_TRUE(ok("HOOK_FAILED", "models/m/replicas/r1 cannot pause: no"));
  EXPECT_TRUE(ok("X", "worker 0 of something"));
  EXPECT_TRUE(ok("QUEUE_TIMEOUT", "version 3 of models/m is MOVING"));
  EXPECT_FALSE(ok("X", "version 3 of models/m failed"));
  EXPECT_FALSE(ok("SAVE_TIMEOUT", "it was not written within 10m"));
  EXPECT_FALSE(ok("X", "rank and node and 3 new routes"));
}

}  // namespace
}  // namespace simulation
}  // namespace weightsync
