// A 64-bit hash that is the same on every machine, build and release: plan,
// layout and catalog digests are compared between processes. Not for
// untrusted input; not a cryptographic hash.

#ifndef WEIGHTSYNC_SCHEDULE_STABLE_HASH_H_
#define WEIGHTSYNC_SCHEDULE_STABLE_HASH_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace weightsync {
namespace schedule {

// Feed integers and strings in a fixed order. Strings are framed by their
// length, so that ("ab", "c") and ("a", "bc") differ; frame lists by theirs.
class StableHash {
 public:
  StableHash() = default;

  void Add(uint64_t value) {
    state_ = Mix(state_ ^ (value * 0x9E3779B97F4A7C15u)) + 0x632BE59BD9B4E019u;
  }
  void Add(int64_t value) { Add(static_cast<uint64_t>(value)); }
  void Add(int32_t value) {
    Add(static_cast<uint64_t>(static_cast<int64_t>(value)));
  }
  void Add(uint32_t value) { Add(static_cast<uint64_t>(value)); }

  void Add(absl::string_view text) {
    Add(static_cast<uint64_t>(text.size()));
    uint64_t word = 0;
    int filled = 0;
    for (unsigned char c : text) {
      word |= static_cast<uint64_t>(c) << (8 * filled);
      if (++filled == 8) {
        Add(word);
        word = 0;
        filled = 0;
      }
    }
    if (filled > 0) Add(word);
  }

  uint64_t Finish() const { return Mix(state_); }

 private:
  static uint64_t Mix(uint64_t x) {
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93u;
    x ^= x >> 32;
    return x;
  }

  uint64_t state_ = 0x243F6A8885A308D3u;
};

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_STABLE_HASH_H_
