// Runs random histories of a whole cluster against the real coordinator.
//
//   simulate --histories 1000 --seed 1     seeds 1 to 1000
//   simulate --seed 4711 --trace           one of them, told event by event
//   simulate --planted CommitForgotten --histories 4000
//                                          with a fault that must be found
//
// Exit code: 0 when every promise held, 1 otherwise.

#include <chrono>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <map>
#include <string>

#include "gflags/gflags.h"
#include "glog/logging.h"
#include "tests/chaos/simulation/plants.h"
#include "tests/chaos/simulation/small_objects.h"
#include "tests/chaos/simulation/world.h"

DEFINE_uint64(seed, 1, "the first history");
DEFINE_int64(histories, 1, "how many, with consecutive seeds");
DEFINE_bool(trace, false, "print what happens");
DEFINE_string(planted, "",
              "a fault in the harness that must be found: the name of one of "
              "plants.h");
DEFINE_int32(failures, 5, "stop after so many histories that fail");

namespace weightsync {
namespace simulation {
namespace {

int Main() {
  Planted planted = Planted::kNone;
  for (const Plant& plant : kPlants) {
    if (FLAGS_planted == plant.name) planted = plant.planted;
  }
  if (!FLAGS_planted.empty() && planted == Planted::kNone) {
    std::fprintf(stderr, "--planted: there is no %s; there are",
                 FLAGS_planted.c_str());
    for (const Plant& plant : kPlants) std::fprintf(stderr, " %s", plant.name);
    std::fprintf(stderr, "\n");
    return 2;
  }
  const auto begin = std::chrono::steady_clock::now();
  const std::clock_t cpu_begin = std::clock();
  int failed = 0;
  int64_t histories = 0, events = 0, commits = 0, aborts = 0;
  Time worst = 0;
  uint64_t worst_seed = 0;
  std::map<std::string, std::map<std::string, int>> faults;
  std::map<std::string, int> states;
  for (int64_t i = 0; i < FLAGS_histories && failed < FLAGS_failures; ++i) {
    EndHistory();
    const uint64_t seed = FLAGS_seed + static_cast<uint64_t>(i);
    World world(seed, Odds(), planted, FLAGS_trace ? &std::cout : nullptr);
    const Outcome outcome = world.Run();
    ++histories;
    events += outcome.events;
    commits += outcome.commits;
    aborts += outcome.aborts;
    if (outcome.recovery > worst) {
      worst = outcome.recovery;
      worst_seed = seed;
    }
    for (const auto& fault : outcome.faults) {
      for (const auto& state : fault.second) {
        faults[fault.first][state.first] += state.second;
        states[state.first] += state.second;
      }
    }
    if (outcome.violations.empty()) continue;
    ++failed;
    std::printf("seed %llu:\n", static_cast<unsigned long long>(seed));
    for (const std::string& violation : outcome.violations) {
      std::printf("  %s\n", violation.c_str());
    }
    std::fflush(stdout);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
          .count();
  const double cpu =
      static_cast<double>(std::clock() - cpu_begin) / CLOCKS_PER_SEC;
  std::printf(
      "%lld histories, %lld events, %lld updates committed, %lld aborted, "
      "longest recovery %.1f s (seed %llu), %.1f s, %.3f ms of CPU each, %d "
      "failed\n",
      static_cast<long long>(histories), static_cast<long long>(events),
      static_cast<long long>(commits), static_cast<long long>(aborts),
      static_cast<double>(worst) / kSecond,
      static_cast<unsigned long long>(worst_seed), seconds,
      1000 * cpu / static_cast<double>(histories), failed);
  // What each kind of fault hit: the state of the newest update.
  std::printf("%-28s", "");
  for (const auto& state : states) std::printf(" %s", state.first.c_str());
  std::printf("\n");
  for (auto& fault : faults) {
    std::printf("%-28s", fault.first.c_str());
    for (const auto& state : states) {
      std::printf(" %*d", static_cast<int>(state.first.size()),
                  fault.second[state.first]);
    }
    std::printf("\n");
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace simulation
}  // namespace weightsync

int main(int argc, char** argv) {
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  // What the coordinator says of each loss is for people, not for millions.
  FLAGS_logtostderr = true;
  if (!FLAGS_trace) FLAGS_minloglevel = 4;
  google::InitGoogleLogging(argv[0]);
  return weightsync::simulation::Main();
}
