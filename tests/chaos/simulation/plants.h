// The faults that can be planted, by the names that people call them.

#ifndef WEIGHTSYNC_TESTS_CHAOS_SIMULATION_PLANTS_H_
#define WEIGHTSYNC_TESTS_CHAOS_SIMULATION_PLANTS_H_

#include "tests/chaos/simulation/odds.h"

namespace weightsync {
namespace simulation {

struct Plant {
  const char* name;
  Planted planted;
  // In the sentence of some history.
  const char* sentence;
};

inline constexpr Plant kPlants[] = {
    {"CommitAfterTelling", Planted::kCommitAfterTelling,
     "which is not committed"},
    {"CommitForgotten", Planted::kCommitForgotten,
     "was aborted after its commit"},
    {"MixedReplica", Planted::kMixedReplica, "generates with a mix"},
    {"PauseNotDone", Planted::kPauseNotDone, "while the engine generates"},
    {"NoDeadlines", Planted::kNoDeadlines, "stuck after"},
    {"AnswerLost", Planted::kAnswerLost, "stuck after"},
    {"TwoOutcomes", Planted::kTwoOutcomes, "two outcomes"},
    {"OlderWeights", Planted::kOlderWeights,
     "older than what it served before"},
    {"HoldForgotten", Planted::kHoldForgotten,
     "although an operator holds it paused"},
    {"ReleaseForgotten", Planted::kReleaseForgotten,
     "older than what it served before"},
};

}  // namespace simulation
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_CHAOS_SIMULATION_PLANTS_H_
