// Buckets that several updates have, kept once.

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/node/store.h"

namespace weightsync {
namespace daemon {

int64_t Store::ShareEqual(const std::string& update_id) {
  // Compared without the lock: both updates are pinned meanwhile.
  struct Pair {
    int32_t bucket = 0;
    std::string other;
    const char* mine = nullptr;
    const char* theirs = nullptr;
    int64_t bytes = 0;
  };
  std::vector<Pair> pairs;
  std::vector<StorePin> pins;
  {
    absl::MutexLock lock(&mutex_);
    Entry* entry = Find(update_id);
    if (entry == nullptr || entry->layout == nullptr || entry->pins > 0) {
      return 0;
    }
    std::map<std::string, int> pinned;
    for (const auto& mine : entry->buckets) {
      const Extent& extent = mine.second;
      if (!extent.whole || !extent.digest.has_value() ||
          extent.arena == nullptr || !extent.arena->device().empty() ||
          extent.share != nullptr) {
        continue;
      }
      for (auto& other : entries_) {
        Entry& base = other.second;
        if (other.first == update_id || base.dropped ||
            base.layout == nullptr || base.state != Entry::State::kCommitted ||
            base.model != entry->model ||
            base.layout->id != entry->layout->id) {
          continue;
        }
        auto theirs = base.buckets.find(mine.first);
        if (theirs == base.buckets.end() || !theirs->second.whole ||
            theirs->second.arena == nullptr ||
            !theirs->second.arena->device().empty() ||
            !theirs->second.digest.has_value() ||
            !(*theirs->second.digest == *extent.digest)) {
          continue;
        }
        if (pinned[other.first]++ == 0) {
          ++base.pins;
          pins.push_back(StorePin(this, other.first));
        }
        pairs.push_back({mine.first, other.first, RoomOf(0, extent).data.data(),
                         RoomOf(0, theirs->second).data.data(), extent.bytes});
        break;
      }
    }
    if (pairs.empty()) return 0;
    ++entry->pins;
    pins.push_back(StorePin(this, update_id));
    ++sharing_;
  }
  int64_t freed = 0;
  for (const Pair& pair : pairs) {
    // A digest is no proof.
    if (memcmp(pair.mine, pair.theirs, static_cast<size_t>(pair.bytes)) != 0) {
      continue;
    }
    absl::MutexLock lock(&mutex_);
    Entry& entry = entries_.at(update_id);
    // Somebody reads it again, or wants the room that is pinned here.
    if (entry.pins > 1 || room_wanted_) break;
    Extent& mine = entry.buckets.at(pair.bucket);
    Extent& theirs = entries_.at(pair.other).buckets.at(pair.bucket);
    if (theirs.share == nullptr) {
      absl::optional<int> slot = theirs.arena->TakeSlot();
      // Out of slots: it stays twice.
      if (!slot.has_value()) continue;
      theirs.share = std::make_shared<Share>();
      theirs.share->generation_slot = *slot;
      theirs.share->updates = 1;
    }
    mine.arena->segment()->AdvanceGeneration(entry.slots.at(mine.arena));
    FreeExtent(mine);
    freed += ArenaSpace::Aligned(mine.bytes);
    mine.arena = theirs.arena;
    mine.offset = theirs.offset;
    mine.share = theirs.share;
    mine.by_share = true;
    mine.borrowed = true;
    ++mine.share->updates;
  }
  pins.clear();
  absl::MutexLock lock(&mutex_);
  if (--sharing_ == 0) room_wanted_ = false;
  return freed;
}

absl::Span<const char> Store::FindEqual(const std::string& update_id,
                                        const NodeLayout& layout,
                                        int32_t bucket,
                                        const transport::Digest& digest,
                                        StorePin* pin) {
  absl::MutexLock lock(&mutex_);
  for (auto& other : entries_) {
    Entry& base = other.second;
    if (other.first == update_id || base.dropped || base.layout == nullptr ||
        base.state == Entry::State::kIncoming || base.model != layout.model ||
        base.layout->id != layout.id) {
      continue;
    }
    auto theirs = base.buckets.find(bucket);
    if (theirs == base.buckets.end() || !theirs->second.whole ||
        (theirs->second.arena != nullptr &&
         !theirs->second.arena->device().empty()) ||
        !theirs->second.digest.has_value() ||
        !(*theirs->second.digest == digest)) {
      continue;
    }
    ++base.pins;
    *pin = StorePin(this, other.first);
    return RoomOf(bucket, theirs->second).data;
  }
  return {};
}

bool Store::ExpectsEqual(const NodeLayout& layout) const {
  absl::MutexLock lock(&mutex_);
  auto newest = newest_.find(layout.model);
  if (newest == newest_.end()) return false;
  const Entry* entry = Find(newest->second);
  if (entry == nullptr || entry->layout->id != layout.id) return false;
  for (const auto& bucket : entry->buckets) {
    if (bucket.second.by_share) return true;
  }
  return false;
}

}  // namespace daemon
}  // namespace weightsync
