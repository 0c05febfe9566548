// Buckets on GPUs, their copies in host memory, and what ends with a GPU's
// device agent.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/node/store.h"
#include "glog/logging.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

namespace {

using transport::MakeError;

absl::Status UpdateUnknown(const std::string& update_id) {
  return MakeError(
      absl::StatusCode::kNotFound, "UPDATE_UNKNOWN",
      absl::StrCat("the store has no update ", update_id, " any more"));
}

}  // namespace

absl::StatusOr<std::vector<BucketRoom>> Store::ReserveCopies(
    const std::string& update_id, const std::vector<int32_t>& buckets) {
  absl::StatusOr<std::vector<BucketRoom>> rooms;
  {
    absl::MutexLock lock(&mutex_);
    const Entry* entry = Find(update_id);
    if (entry == nullptr) return UpdateUnknown(update_id);
    std::vector<Want> wants;
    for (int32_t bucket : buckets) {
      auto it = entry->buckets.find(bucket);
      if (it == entry->buckets.end()) {
        return MakeError(absl::StatusCode::kNotFound, "BUCKET_UNKNOWN",
                         absl::StrCat("this node's store has no bucket ",
                                      bucket, " of update ", update_id));
      }
      const ArenaSpace* arena = it->second.arena;
      wants.push_back(
          {bucket, "", arena != nullptr && !arena->device().empty()});
    }
    const std::string layout_id =
        entry->layout == nullptr ? "" : entry->layout->id;
    rooms = ReserveLocked(update_id, layout_id, wants);
  }
  RunDeferred();
  return rooms;
}

absl::Status Store::MarkCopies(const std::string& update_id,
                               const std::vector<int32_t>& buckets) {
  absl::MutexLock lock(&mutex_);
  Entry* entry = Find(update_id);
  if (entry == nullptr) return UpdateUnknown(update_id);
  for (int32_t bucket : buckets) {
    auto copy = entry->copies.find(bucket);
    if (copy != entry->copies.end()) copy->second.whole = true;
  }
  return absl::OkStatus();
}

std::vector<int32_t> Store::OutOfReach(
    const std::string& update_id, const std::vector<int32_t>& buckets,
    const std::vector<std::string>& reachable) const {
  std::vector<int32_t> out;
  absl::MutexLock lock(&mutex_);
  const Entry* entry = Find(update_id);
  if (entry == nullptr) return out;
  for (int32_t bucket : buckets) {
    auto it = entry->buckets.find(bucket);
    if (it == entry->buckets.end() || Reaches(it->second, reachable)) continue;
    auto copy = entry->copies.find(bucket);
    if (copy == entry->copies.end() || !copy->second.whole) {
      out.push_back(bucket);
    }
  }
  return out;
}

absl::optional<transport::Digest> Store::DigestOf(const std::string& update_id,
                                                  int32_t bucket) const {
  absl::MutexLock lock(&mutex_);
  const Entry* entry = Find(update_id);
  if (entry == nullptr) return absl::nullopt;
  auto it = entry->buckets.find(bucket);
  return it == entry->buckets.end() ? absl::nullopt : it->second.digest;
}

bool Store::Has(const std::string& update_id) const {
  absl::MutexLock lock(&mutex_);
  return Find(update_id) != nullptr;
}

void Store::TrimCopies(Entry* entry) {
  if (entry->copies.empty()) return;
  // Their readers are gone; one that was given up notices.
  std::map<ArenaSpace*, bool> arenas;  // whether the entry has more there
  for (const auto& copy : entry->copies) {
    if (copy.second.arena != nullptr) arenas[copy.second.arena] = false;
  }
  for (const auto& bucket : entry->buckets) {
    auto arena = arenas.find(bucket.second.arena);
    if (arena != arenas.end()) arena->second = true;
  }
  for (const auto& arena : arenas) {
    const int slot = entry->slots.at(arena.first);
    if (arena.second) {
      arena.first->segment()->AdvanceGeneration(slot);
    } else {
      // The arena may go when it is empty.
      arena.first->ReturnSlot(slot);
      entry->slots.erase(arena.first);
    }
  }
  for (const auto& copy : entry->copies) FreeExtent(copy.second);
  entry->copies.clear();
}

void Store::LoseDevice(const std::string& device) {
  {
    absl::MutexLock lock(&mutex_);
    ++losses_[device];
    for (const auto& arena : arenas_) {
      if (arena->device() != device || arena->lost()) continue;
      arena->Lose();
      Reserved(device) -= arena->capacity();
      Deferred::Event event;
      event.kind = Deferred::Event::Kind::kDropped;
      event.arena_id = arena->id();
      deferred_.events.push_back(std::move(event));
    }
    std::vector<std::string> gone;
    for (auto& item : entries_) {
      Entry& entry = item.second;
      if (entry.dropped) continue;
      std::vector<int32_t> lost;
      bool copied = true;
      for (const auto& bucket : entry.buckets) {
        const ArenaSpace* arena = bucket.second.arena;
        if (arena == nullptr || !arena->lost()) continue;
        lost.push_back(bucket.first);
        auto copy = entry.copies.find(bucket.first);
        copied = copied && copy != entry.copies.end() && copy->second.whole;
      }
      if (lost.empty()) continue;
      if (!copied || entry.state == Entry::State::kIncoming) {
        gone.push_back(item.first);
        continue;
      }
      // From now on they lie in host memory.
      for (int32_t bucket : lost) {
        const Extent old = entry.buckets.at(bucket);
        Extent& copy = entry.copies.at(bucket);
        copy.digest = old.digest;
        entry.buckets[bucket] = copy;
        entry.copies.erase(bucket);
        FreeExtent(old);
      }
    }
    for (const std::string& update_id : gone) {
      const Entry& entry = entries_.at(update_id);
      LOG(WARNING) << entry.Name() << " was in memory of " << device
                   << ", whose device agent has ended, and is lost here";
      if (entry.layout != nullptr) {
        Deferred::Event event;
        event.kind = Deferred::Event::Kind::kEvicted;
        event.model = entry.model;
        event.update_id = update_id;
        deferred_.events.push_back(std::move(event));
      }
      DropLocked(update_id);
    }
    ReapLostArenas();
  }
  RunDeferred();
}

void Store::ReapLostArenas() {
  for (size_t i = arenas_.size(); i-- > 0;) {
    if (!arenas_[i]->lost() || arenas_[i]->used() > 0) continue;
    bool named = false;
    for (const auto& entry : entries_) {
      named = named || entry.second.slots.count(arenas_[i].get()) > 0;
    }
    if (named) continue;
    deferred_.arenas.push_back(std::move(arenas_[i]));
    arenas_.erase(arenas_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

}  // namespace daemon
}  // namespace weightsync
