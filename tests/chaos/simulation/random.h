// A small fast generator whose sequence is the same on every machine: what a
// failing seed replays by.

#ifndef WEIGHTSYNC_TESTS_CHAOS_SIMULATION_RANDOM_H_
#define WEIGHTSYNC_TESTS_CHAOS_SIMULATION_RANDOM_H_

#include <cstdint>

namespace weightsync {
namespace simulation {

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
// generators, 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}

  uint64_t Next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  // In [0, n). REQUIRES: n > 0.
  int64_t Below(int64_t n) {
    return static_cast<int64_t>(Next() % static_cast<uint64_t>(n));
  }
  // In [from, to].
  int64_t Between(int64_t from, int64_t to) {
    return from + Below(to - from + 1);
  }
  // True `per_mille` times out of a thousand.
  bool Chance(int per_mille) { return Below(1000) < per_mille; }

 private:
  uint64_t state_;
};

}  // namespace simulation
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_CHAOS_SIMULATION_RANDOM_H_
