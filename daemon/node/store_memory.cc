// The memory that a store has: taken ahead of time, grown, and given back.

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "daemon/node/store.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

using transport::MakeError;

namespace {

// For memory that is given back to be there for who asks next.
constexpr absl::Duration kUnmapPatience = absl::Seconds(60);

// Room for the rounding of buckets and pieces, which those who count tensor
// bytes leave out.
int64_t Slack(int64_t bytes) { return bytes / 256 + (int64_t{256} << 10); }

}  // namespace

// ---- Room, ahead of time ----

absl::Status Store::ReserveFor(const std::string& model, int64_t update_bytes) {
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    status = ReserveForLocked(model, update_bytes);
  }
  RunDeferred();
  return status;
}

absl::Status Store::ReserveForLocked(const std::string& model,
                                     int64_t update_bytes) {
  if (update_bytes <= 0) return absl::OkStatus();
  auto found = update_bytes_.find(model);
  const int64_t before = found == update_bytes_.end() ? 0 : found->second;
  if (update_bytes > before && options_.device_budget_bytes > 0) {
    update_bytes_[model] = update_bytes;
  } else if (update_bytes > before) {
    const int64_t others = PromisedBytes(kLeastCopies) - kLeastCopies * before;
    if (update_bytes > (options_.budget_bytes - others) / kLeastCopies) {
      return NoStoreRoom(
          absl::StrCat("one update of ", model, " takes ", update_bytes,
                       " bytes on this node, and two must fit into the store; "
                       "its budget is ",
                       options_.budget_bytes, " bytes, of which ", others,
                       " are promised to other models; raise "
                       "--store_budget_bytes to at least ",
                       others + kLeastCopies * update_bytes));
    }
    update_bytes_[model] = update_bytes;
  }
  if (options_.device_budget_bytes > 0) return absl::OkStatus();

  const int copies = std::max(kLeastCopies, options_.keep_updates);
  while (true) {
    const int64_t goal = std::min(PromisedBytes(copies), options_.budget_bytes);
    if (reserved_bytes_ >= goal) return absl::OkStatus();
    if (growing_) {
      auto grown = [this]()
                       ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !growing_; };
      mutex_.Await(absl::Condition(&grown));
      continue;
    }
    // One arena for each update: it then lies in one piece. Slack comes out of
    // what nobody was promised.
    const int64_t spare =
        std::max(int64_t{0}, options_.budget_bytes - PromisedBytes(copies)) /
        (copies * static_cast<int64_t>(update_bytes_.size()));
    const int64_t wanted = update_bytes_[model];
    const int64_t bytes =
        std::min(ArenaSpace::Aligned(wanted) + std::min(Slack(wanted), spare),
                 options_.budget_bytes - reserved_bytes_);
    absl::Status status = Grow(bytes);
    if (!status.ok()) {
      if (before == 0) {
        update_bytes_.erase(model);
      } else {
        update_bytes_[model] = before;
      }
      DropFreeArenas(PromisedBytes(copies));
      return status;
    }
  }
}

void Store::Forget(const std::string& model) {
  {
    absl::MutexLock lock(&mutex_);
    update_bytes_.erase(model);
    std::vector<std::string> ids;
    for (const auto& entry : entries_) {
      // Slots go with the flow that has them.
      if (entry.second.model == model && entry.second.layout != nullptr) {
        ids.push_back(entry.first);
      }
    }
    for (const std::string& id : ids) DropLocked(id);
    newest_.erase(model);
    DropFreeArenas(
        PromisedBytes(std::max(kLeastCopies, options_.keep_updates)));
  }
  RunDeferred();
}

absl::Status Store::Grow(int64_t bytes, const std::string& device) {
  growing_ = true;
  Reserved(device) += bytes;
  const int losses = losses_[device];
  const std::string id = absl::StrCat(arena_prefix_, next_arena_++);
  mutex_.Unlock();

  AwaitUnmapped();
  transport::AllocateOptions options;
  options.name = id;
  options.generation_slots = ArenaSpace::kGenerationSlots;
  options.others_read_only = true;
  options.device_uuid = device;
  auto segment = memory_->Allocate(bytes, options);

  mutex_.Lock();
  growing_ = false;
  Reserved(device) -= bytes;
  if (!segment.ok()) return segment.status();
  auto arena = std::make_unique<ArenaSpace>(id, *std::move(segment));
  if (losses_[device] != losses) {
    // Perhaps of the agent that has ended.
    deferred_.arenas.push_back(std::move(arena));
    return MakeError(absl::StatusCode::kUnavailable, "DEVICE_AGENT_LOST",
                     absl::StrCat("the device agent of ", device,
                                  " has ended while the store grew there"));
  }
  arenas_.push_back(std::move(arena));
  Reserved(device) += arenas_.back()->capacity();
  Deferred::Event event;
  event.kind = Deferred::Event::Kind::kAdded;
  event.arena_id = id;
  deferred_.events.push_back(std::move(event));
  return absl::OkStatus();
}

void Store::DropFreeArenas(int64_t keep_bytes) {
  DropFreeArenas(keep_bytes, "");
  std::vector<std::string> devices;
  for (const auto& device : device_reserved_bytes_) {
    devices.push_back(device.first);
  }
  for (const std::string& device : devices) DropFreeArenas(0, device);
}

void Store::DropFreeArenas(int64_t keep_bytes, const std::string& device) {
  const auto named = [this](ArenaSpace* arena)
                         ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
                           for (const auto& entry : entries_) {
                             if (entry.second.slots.count(arena) > 0)
                               return true;
                           }
                           return false;
                         };
  for (size_t i = arenas_.size(); i-- > 0;) {
    // One whose bytes went to a share of another arena still has its slot.
    if (named(arenas_[i].get())) continue;
    if (arenas_[i]->used() > 0 || arenas_[i]->lost() ||
        arenas_[i]->device() != device ||
        Reserved(device) - arenas_[i]->capacity() < keep_bytes) {
      continue;
    }
    Reserved(device) -= arenas_[i]->capacity();
    Deferred::Event event;
    event.kind = Deferred::Event::Kind::kDropped;
    event.arena_id = arenas_[i]->id();
    deferred_.events.push_back(std::move(event));
    deferred_.arenas.push_back(std::move(arenas_[i]));
    arenas_.erase(arenas_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

int64_t Store::PromisedBytes(int copies) const {
  if (options_.device_budget_bytes > 0) return 0;
  int64_t sum = 0;
  for (const auto& model : update_bytes_) sum += copies * model.second;
  return sum;
}

void Store::RunDeferred() {
  // notify_mutex_ first: a caller returns only after the events of everybody
  // before it were told, so that an arena is known before anything names it.
  absl::MutexLock notify(&notify_mutex_);
  Deferred todo;
  {
    absl::MutexLock lock(&mutex_);
    std::swap(todo, deferred_);
  }
  if (!todo.arenas.empty()) {
    absl::MutexLock lock(&unmap_mutex_);
    std::move(todo.arenas.begin(), todo.arenas.end(),
              std::back_inserter(unmapping_));
  }
  if (observer_ == nullptr) return;
  for (const Deferred::Event& event : todo.events) {
    switch (event.kind) {
      case Deferred::Event::Kind::kAdded:
        observer_->OnArenaAdded(event.arena_id);
        break;
      case Deferred::Event::Kind::kDropped:
        observer_->OnArenaDropped(event.arena_id);
        break;
      case Deferred::Event::Kind::kEvicted:
        observer_->OnUpdateEvicted(event.model, event.update_id);
        break;
    }
  }
}

// ---- What is given back ----

void Store::UnmapArenas() {
  while (true) {
    std::unique_ptr<ArenaSpace> arena;
    {
      absl::MutexLock lock(&unmap_mutex_);
      const auto due = [this]() ABSL_SHARED_LOCKS_REQUIRED(unmap_mutex_) {
        return unmap_stopping_ || !unmapping_.empty();
      };
      unmap_mutex_.Await(absl::Condition(&due));
      if (unmapping_.empty()) return;
      arena = std::move(unmapping_.front());
      unmapping_.pop_front();
      unmap_busy_ = true;
    }
    arena = nullptr;
    absl::MutexLock lock(&unmap_mutex_);
    unmap_busy_ = false;
  }
}

void Store::AwaitUnmapped() {
  absl::MutexLock lock(&unmap_mutex_);
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(unmap_mutex_) {
    return unmapping_.empty() && !unmap_busy_;
  };
  unmap_mutex_.AwaitWithTimeout(absl::Condition(&idle), kUnmapPatience);
}

}  // namespace daemon
}  // namespace weightsync
