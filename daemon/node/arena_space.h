// Who has which part of one store arena.

#ifndef WEIGHTSYNC_DAEMON_NODE_ARENA_SPACE_H_
#define WEIGHTSYNC_DAEMON_NODE_ARENA_SPACE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/optional.h"
#include "transport/memory.h"

namespace weightsync {
namespace daemon {

// First-fit extents and generation slots of one arena. Not thread-safe.
class ArenaSpace {
 public:
  // Extents begin and end at multiples of this: no two updates share a cache
  // line.
  static constexpr int64_t kAlignment = 256;
  // An update takes one slot of an arena, so this many updates fit into one.
  static constexpr int kGenerationSlots = 256;

  static constexpr int64_t Aligned(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  ArenaSpace(std::string id, std::shared_ptr<transport::Segment> segment);

  const std::string& id() const { return id_; }
  const std::shared_ptr<transport::Segment>& segment() const {
    return segment_;
  }
  // The GPU whose memory it is; empty: host memory.
  const std::string& device() const { return device_; }
  int64_t capacity() const { return segment_->bytes(); }
  int64_t used() const { return used_; }

  // Offset of Aligned(bytes) free bytes. REQUIRES: bytes > 0.
  absl::optional<int64_t> Allocate(int64_t bytes);
  // REQUIRES: Allocate(bytes) answered `offset`.
  void Free(int64_t offset, int64_t bytes);

  // The memory is gone: nothing is given out any more, and whoever reads it
  // will notice.
  void Lose();
  bool lost() const { return lost_; }

  // A slot that nobody has, with a generation that nobody was ever told.
  absl::optional<int> TakeSlot();
  // Advances the generation: whoever still reads under the old one will notice.
  void ReturnSlot(int slot);

 private:
  const std::string id_;
  const std::shared_ptr<transport::Segment> segment_;
  const std::string device_;
  bool lost_ = false;
  int64_t used_ = 0;
  // Offset -> bytes; neighbours are merged.
  std::map<int64_t, int64_t> free_;
  std::vector<int> free_slots_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_ARENA_SPACE_H_
