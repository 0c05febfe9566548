#include "daemon/node/arena_space.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "glog/logging.h"

namespace weightsync {
namespace daemon {

constexpr int64_t ArenaSpace::kAlignment;
constexpr int ArenaSpace::kGenerationSlots;

ArenaSpace::ArenaSpace(std::string id,
                       std::shared_ptr<transport::Segment> segment)
    : id_(std::move(id)),
      segment_(std::move(segment)),
      device_(segment_->device_uuid()) {
  const int64_t usable = segment_->bytes() / kAlignment * kAlignment;
  if (usable > 0) free_[0] = usable;
  for (int slot = segment_->generation_slots(); slot-- > 0;) {
    free_slots_.push_back(slot);
  }
}

absl::optional<int64_t> ArenaSpace::Allocate(int64_t bytes) {
  if (lost_) return absl::nullopt;
  bytes = Aligned(bytes);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < bytes) continue;
    const int64_t offset = it->first;
    const int64_t left = it->second - bytes;
    free_.erase(it);
    if (left > 0) free_[offset + bytes] = left;
    used_ += bytes;
    return offset;
  }
  return absl::nullopt;
}

void ArenaSpace::Free(int64_t offset, int64_t bytes) {
  bytes = Aligned(bytes);
  used_ -= bytes;
  DCHECK_GE(used_, 0);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

void ArenaSpace::Lose() {
  lost_ = true;
  for (int slot = segment_->generation_slots(); slot-- > 0;) {
    segment_->AdvanceGeneration(slot);
  }
}

absl::optional<int> ArenaSpace::TakeSlot() {
  if (lost_ || free_slots_.empty()) return absl::nullopt;
  const int slot = free_slots_.back();
  free_slots_.pop_back();
  segment_->AdvanceGeneration(slot);
  return slot;
}

void ArenaSpace::ReturnSlot(int slot) {
  segment_->AdvanceGeneration(slot);
  free_slots_.push_back(slot);
}

}  // namespace daemon
}  // namespace weightsync
