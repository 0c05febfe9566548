#include "daemon/node/store.h"

#include <algorithm>
#include <cstring>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "glog/logging.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

namespace {

using transport::MakeError;

absl::Status UpdateUnknown(const std::string& update_id) {
  return MakeError(
      absl::StatusCode::kNotFound, "UPDATE_UNKNOWN",
      absl::StrCat("the store has no update ", update_id,
                   "; it never came here, was given up or evicted"));
}

absl::Status UpdateIncomplete(const std::string& update_id) {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "UPDATE_INCOMPLETE",
      absl::StrCat("update ", update_id, " is not whole in this node's store"));
}

absl::Status BucketUnknown(const std::string& update_id, int32_t bucket) {
  return MakeError(absl::StatusCode::kNotFound, "BUCKET_UNKNOWN",
                   absl::StrCat("this node's store has no bucket ", bucket,
                                " of update ", update_id));
}

}  // namespace

absl::Status Store::NoStoreRoom(absl::string_view sentence) {
  return MakeError(absl::StatusCode::kResourceExhausted, "NO_STORE_ROOM",
                   sentence);
}

bool Store::Reaches(const Extent& extent,
                    const std::vector<std::string>& reachable) {
  if (extent.arena == nullptr || extent.arena->device().empty()) return true;
  return std::find(reachable.begin(), reachable.end(),
                   extent.arena->device()) != reachable.end();
}

StorePin& StorePin::operator=(StorePin&& other) noexcept {
  if (this != &other) {
    Release();
    store_ = std::exchange(other.store_, nullptr);
    update_id_ = std::move(other.update_id_);
  }
  return *this;
}

void StorePin::Release() {
  if (store_ != nullptr) std::exchange(store_, nullptr)->Unpin(update_id_);
}

int64_t Store::Entry::bytes(const std::string* device) const {
  int64_t sum = 0;
  for (const auto* extents : {&buckets, &copies}) {
    for (const auto& bucket : *extents) {
      const Extent& extent = bucket.second;
      if (extent.borrowed || extent.arena == nullptr) continue;
      if (device != nullptr && extent.arena->device() != *device) continue;
      sum += ArenaSpace::Aligned(extent.bytes);
    }
  }
  return sum;
}

std::string Store::Entry::Name() const {
  if (layout == nullptr) return absl::StrCat("a slot of ", model);
  return absl::StrCat("update ", update_id, " (version ", version, " of ",
                      model, ")");
}

StoreSlot::~StoreSlot() { store_->Drop(id_); }

v1::SlotLocation StoreSlot::Location(int64_t bytes) const {
  absl::MutexLock lock(&store_->mutex_);
  const Store::Entry& entry = store_->entries_.at(id_);
  v1::SlotLocation location = Store::LocationOf(entry, entry.buckets.at(0));
  location.set_size_bytes(bytes);
  return location;
}

bool StoreSlot::lost() const {
  absl::MutexLock lock(&store_->mutex_);
  return store_->entries_.at(id_).dropped;
}

void StoreSlot::Recycle() {
  absl::MutexLock lock(&store_->mutex_);
  const Store::Entry& entry = store_->entries_.at(id_);
  for (const auto& slot : entry.slots) {
    slot.first->segment()->AdvanceGeneration(slot.second);
  }
}

Store::Store(Options options, transport::Memory* memory, Observer* observer)
    : options_(options),
      arena_prefix_(absl::StrCat(
          "store-",
          absl::Hex(absl::Uniform<uint64_t>(absl::BitGen()), absl::kZeroPad16),
          "-")),
      memory_(memory),
      observer_(observer),
      unmapper_([this] { UnmapArenas(); }) {}

Store::~Store() {
  {
    absl::MutexLock lock(&unmap_mutex_);
    unmap_stopping_ = true;
  }
  unmapper_.join();
  absl::MutexLock lock(&mutex_);
  for (const auto& entry : entries_) {
    LOG_IF(DFATAL, entry.second.pins > 0)
        << "update " << entry.first << " is pinned while the store ends";
  }
}

// ---- Updates ----

absl::StatusOr<std::vector<BucketRoom>> Store::Reserve(
    const std::string& update_id, int64_t version,
    std::shared_ptr<const NodeLayout> layout,
    const std::vector<int32_t>& buckets,
    const std::map<int32_t, std::string>& devices) {
  std::vector<Want> wants;
  wants.reserve(buckets.size());
  for (int32_t bucket : buckets) {
    auto device = devices.find(bucket);
    wants.push_back(
        {bucket, device == devices.end() ? "" : device->second, false});
  }
  absl::StatusOr<std::vector<BucketRoom>> rooms;
  {
    absl::MutexLock lock(&mutex_);
    if (entries_.count(update_id) == 0) {
      Entry& entry = entries_[update_id];
      entry.update_id = update_id;
      entry.model = layout->model;
      entry.version = version;
      entry.layout = layout;
      entry.order = next_order_++;
    }
    rooms = ReserveLocked(update_id, layout->id, wants);
    // Do not remember an update that got nothing.
    auto it = entries_.find(update_id);
    if (!rooms.ok() && it != entries_.end() && it->second.buckets.empty() &&
        it->second.pins == 0) {
      entries_.erase(it);
    }
  }
  RunDeferred();
  return rooms;
}

absl::StatusOr<std::unique_ptr<StoreSlot>> Store::TakeSlot(
    const std::string& model, int64_t bytes, const std::string& device) {
  std::unique_ptr<StoreSlot> slot;
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    const std::string id = absl::StrCat("slot/", next_slot_++);
    Entry& entry = entries_[id];
    entry.update_id = id;
    entry.model = model;
    entry.slot_bytes = bytes;
    entry.order = next_order_++;
    Want want;
    want.device = device;
    auto rooms = ReserveLocked(id, "", {want});
    if (rooms.ok()) {
      ++entry.pins;
      slot.reset(new StoreSlot(this, id, (*rooms)[0], StorePin(this, id)));
    } else {
      status = rooms.status();
      entries_.erase(id);
    }
  }
  RunDeferred();
  if (!status.ok()) return status;
  return slot;
}

BucketRoom Store::RoomOf(int32_t bucket, const Extent& extent) {
  BucketRoom room;
  room.bucket = bucket;
  if (extent.bytes > 0) {
    room.data = absl::MakeSpan(extent.arena->segment()->data() + extent.offset,
                               static_cast<size_t>(extent.bytes));
    room.device = extent.arena->device();
    room.file.fd = extent.arena->segment()->file(&room.file.offset);
    room.file.offset += extent.offset;
  }
  return room;
}

absl::StatusOr<std::vector<BucketRoom>> Store::ReserveLocked(
    const std::string& update_id, const std::string& layout_id,
    const std::vector<Want>& wants) {
  bool evicting = false;
  bool waited = false;
  while (true) {
    // Looked up again each time: Grow lets go of the lock.
    Entry* entry = Find(update_id);
    if (entry == nullptr) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "UPDATE_ENDED",
                       absl::StrCat("update ", update_id, " was given up"));
    }
    if (entry->layout != nullptr && entry->layout->id != layout_id) {
      return MakeError(absl::StatusCode::kFailedPrecondition,
                       "UPDATE_LAYOUT_MISMATCH",
                       absl::StrCat("update ", update_id, " has layout ",
                                    entry->layout->id, ", not ", layout_id));
    }
    std::vector<Want> missing;
    for (const Want& want : wants) {
      const auto& extents = want.copy ? entry->copies : entry->buckets;
      if (extents.count(want.bucket) == 0) missing.push_back(want);
    }
    const std::map<std::string, int64_t> lacks = Carve(entry, missing);
    if (lacks.empty()) {
      std::vector<BucketRoom> rooms;
      rooms.reserve(wants.size());
      for (const Want& want : wants) {
        auto& extents = want.copy ? entry->copies : entry->buckets;
        rooms.push_back(RoomOf(want.bucket, extents[want.bucket]));
      }
      return rooms;
    }

    // One place after the other.
    const std::string device = lacks.begin()->first;
    const int64_t lacking = lacks.begin()->second;
    const int64_t budget = Budget(device);
    const std::string place =
        device.empty() ? "the store" : absl::StrCat("the store on ", device);
    const char* const flag =
        device.empty() ? "--store_budget_bytes" : "--device_store_bytes";
    int64_t needed = 0;
    for (const Want& want : missing) {
      if (want.device != device) continue;
      needed += ArenaSpace::Aligned(entry->bucket_bytes(want.bucket));
    }
    const int64_t pinned = PinnedBytes(device);
    if (needed > budget - pinned && sharing_ > 0 && !waited) {
      // What is compared with another is not in use: it makes way.
      room_wanted_ = true;
      const auto shared = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return sharing_ == 0;
      };
      mutex_.AwaitWithTimeout(absl::Condition(&shared), kSharePatience);
      waited = true;
      continue;
    }
    if (needed > budget - pinned) {
      return NoStoreRoom(
          absl::StrCat(entry->Name(), " needs ", needed, " bytes; ", place,
                       " has a budget "
                       "of ",
                       budget, " bytes, of which ", pinned, " are pinned (",
                       PinnedNames(device), "); raise ", flag, " to at least ",
                       pinned + needed));
    }
    if (growing_) {
      // Perhaps for us.
      auto grown = [this]()
                       ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !growing_; };
      mutex_.Await(absl::Condition(&grown));
      continue;
    }
    // Host memory that was not taken ahead is, before anything is given up.
    const bool spare = device.empty() && options_.device_budget_bytes > 0 &&
                       Reserved(device) + lacking <= budget;
    if (!spare && EvictOldest("", &device)) {
      evicting = true;
      continue;
    }
    if (Reserved(device) + lacking > budget) {
      // Enough bytes, in pieces too small: empty arenas make room for one of
      // the right size.
      DropFreeArenas(std::max(int64_t{0}, budget - lacking), device);
    }
    if (Reserved(device) + lacking > budget) {
      return NoStoreRoom(absl::StrCat(
          entry->Name(), " needs ", needed, " bytes, of which ", lacking,
          " do not fit between what is pinned (", PinnedNames(device),
          ") although ", place, " has a budget of ", budget, " bytes; raise ",
          flag, " by ", lacking));
    }
    LOG(INFO) << place << " grows by " << lacking << " bytes for "
              << entry->Name() << (evicting ? ", after evicting others" : "");
    absl::Status status = Grow(ArenaSpace::Aligned(lacking), device);
    if (!status.ok()) return status;
  }
}

std::map<std::string, int64_t> Store::Carve(Entry* entry,
                                            const std::vector<Want>& wants) {
  std::map<std::string, int64_t> lacking;
  std::vector<std::pair<const Want*, Extent>> got;
  std::map<ArenaSpace*, int> slots;
  for (const Want& want : wants) {
    Extent extent;
    extent.bytes = entry->bucket_bytes(want.bucket);
    if (extent.bytes == 0) {
      got.emplace_back(&want, extent);
      continue;
    }
    for (const auto& arena : arenas_) {
      ArenaSpace* space = arena.get();
      if (space->device() != want.device) continue;
      if (entry->slots.count(space) == 0 && slots.count(space) == 0) {
        if (space->used() + ArenaSpace::Aligned(extent.bytes) >
            space->capacity()) {
          continue;
        }
        absl::optional<int> slot = space->TakeSlot();
        if (!slot.has_value()) continue;
        slots[space] = *slot;
      }
      absl::optional<int64_t> offset = space->Allocate(extent.bytes);
      if (!offset.has_value()) continue;
      extent.arena = space;
      extent.offset = *offset;
      break;
    }
    if (extent.arena == nullptr) {
      lacking[want.device] += ArenaSpace::Aligned(extent.bytes);
    } else {
      got.emplace_back(&want, extent);
    }
  }
  if (!lacking.empty()) {
    for (const auto& bucket : got) {
      const Extent& extent = bucket.second;
      if (extent.arena != nullptr) {
        extent.arena->Free(extent.offset, extent.bytes);
      }
    }
    for (const auto& slot : slots) slot.first->ReturnSlot(slot.second);
    return lacking;
  }
  for (const auto& bucket : got) {
    auto& extents = bucket.first->copy ? entry->copies : entry->buckets;
    extents[bucket.first->bucket] = bucket.second;
  }
  entry->slots.insert(slots.begin(), slots.end());
  return lacking;
}

absl::Status Store::MarkWhole(
    const std::string& update_id,
    const std::map<int32_t, transport::Digest>* digests) {
  absl::MutexLock lock(&mutex_);
  Entry* entry = Find(update_id);
  if (entry == nullptr) return UpdateUnknown(update_id);
  if (entry->state == Entry::State::kIncoming) {
    entry->state = Entry::State::kWhole;
  }
  for (auto& bucket : entry->buckets) {
    if (digests != nullptr) {
      const auto digest = digests->find(bucket.first);
      // Another run of the update is filling it.
      if (digest == digests->end()) continue;
      bucket.second.digest = digest->second;
    }
    bucket.second.whole = true;
  }
  return absl::OkStatus();
}

absl::Status Store::CommitLocked(const std::string& update_id, bool newest) {
  Entry* entry = Find(update_id);
  if (entry == nullptr) return UpdateUnknown(update_id);
  if (entry->state == Entry::State::kIncoming) {
    return UpdateIncomplete(update_id);
  }
  if (entry->state == Entry::State::kCommitted) return absl::OkStatus();
  entry->state = Entry::State::kCommitted;
  entry->order = next_order_++;
  if (newest) newest_[entry->model] = update_id;
  EnforceKeep(entry->model);
  return absl::OkStatus();
}

absl::Status Store::Commit(const std::string& update_id) {
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    status = CommitLocked(update_id, /*newest=*/true);
  }
  RunDeferred();
  return status;
}

absl::Status Store::Adopt(const std::string& update_id) {
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    const Entry* entry = Find(update_id);
    if (entry == nullptr) return UpdateUnknown(update_id);
    auto newest = newest_.find(entry->model);
    const Entry* best =
        newest == newest_.end() ? nullptr : Find(newest->second);
    status = CommitLocked(update_id,
                          best == nullptr || best->version < entry->version);
  }
  RunDeferred();
  return status;
}

void Store::Drop(const std::string& update_id, bool committed_too) {
  {
    absl::MutexLock lock(&mutex_);
    Entry* entry = Find(update_id);
    if (entry == nullptr) return;
    if (entry->state == Entry::State::kCommitted && !committed_too) return;
    DropLocked(update_id);
  }
  RunDeferred();
}

void Store::DropLocked(const std::string& update_id) {
  auto it = entries_.find(update_id);
  if (it == entries_.end()) return;
  Entry& entry = it->second;
  entry.dropped = true;
  auto newest = newest_.find(entry.model);
  if (newest != newest_.end() && newest->second == update_id) {
    newest_.erase(newest);
  }
  if (entry.pins == 0) FreeEntry(update_id);
}

void Store::DropIncoming(const std::string& update_id) {
  {
    absl::MutexLock lock(&mutex_);
    DropIncomingLocked(update_id);
  }
  RunDeferred();
}

void Store::DropIncomingLocked(const std::string& update_id) {
  auto it = entries_.find(update_id);
  if (it == entries_.end()) return;
  Entry& entry = it->second;
  for (auto bucket = entry.buckets.begin(); bucket != entry.buckets.end();) {
    if (bucket->second.whole) {
      ++bucket;
      continue;
    }
    FreeExtent(bucket->second);
    auto copy = entry.copies.find(bucket->first);
    if (copy != entry.copies.end()) {
      FreeExtent(copy->second);
      entry.copies.erase(copy);
    }
    bucket = entry.buckets.erase(bucket);
  }
  if (entry.buckets.empty() && entry.state == Entry::State::kIncoming) {
    DropLocked(update_id);
  }
}

absl::StatusOr<StorePin> Store::Pin(const std::string& update_id) {
  absl::MutexLock lock(&mutex_);
  Entry* entry = Find(update_id);
  if (entry == nullptr) return UpdateUnknown(update_id);
  ++entry->pins;
  return StorePin(this, update_id);
}

void Store::Unpin(const std::string& update_id) {
  {
    absl::MutexLock lock(&mutex_);
    auto it = entries_.find(update_id);
    if (it == entries_.end()) return;
    const std::string model = it->second.model;
    if (--it->second.pins > 0) return;
    if (it->second.dropped) {
      FreeEntry(update_id);
    } else {
      TrimCopies(&it->second);
      EnforceKeep(model);
    }
  }
  RunDeferred();
}

absl::StatusOr<LocatedUpdate> Store::Locate(
    const std::string& update_id, const std::vector<int32_t>& buckets,
    const std::vector<std::string>& reachable) {
  absl::MutexLock lock(&mutex_);
  Entry* entry = Find(update_id);
  if (entry == nullptr) return UpdateUnknown(update_id);
  if (entry->state == Entry::State::kIncoming) {
    return UpdateIncomplete(update_id);
  }
  LocatedUpdate located;
  located.layout = entry->layout;
  located.buckets.reserve(buckets.size());
  for (int32_t bucket : buckets) {
    auto it = entry->buckets.find(bucket);
    if (it == entry->buckets.end() || !it->second.whole) {
      return BucketUnknown(update_id, bucket);
    }
    const Extent* extent = &it->second;
    if (!Reaches(*extent, reachable)) {
      auto copy = entry->copies.find(bucket);
      if (copy == entry->copies.end() || !copy->second.whole) {
        return MakeError(
            absl::StatusCode::kFailedPrecondition, "OUT_OF_REACH",
            absl::StrCat("bucket ", bucket, " of update ", update_id,
                         " lies on ", extent->arena->device(), " alone"));
      }
      extent = &copy->second;
    }
    v1::BucketLocation location;
    location.set_bucket(bucket);
    *location.mutable_slot() = LocationOf(*entry, *extent);
    located.buckets.push_back(std::move(location));
  }
  ++entry->pins;
  located.pin = StorePin(this, update_id);
  return located;
}

v1::SlotLocation Store::LocationOf(const Entry& entry, const Extent& extent) {
  v1::SlotLocation slot;
  slot.set_size_bytes(extent.bytes);
  if (extent.arena != nullptr) {
    const int index = extent.by_share ? extent.share->generation_slot
                                      : entry.slots.at(extent.arena);
    slot.set_arena_id(extent.arena->id());
    slot.set_offset_bytes(extent.offset);
    slot.set_generation_slot(index);
    slot.set_generation(extent.arena->segment()->Generation(index));
  }
  return slot;
}

absl::StatusOr<v1::SlotLocation> Store::LocationOf(const std::string& update_id,
                                                   int32_t bucket) const {
  absl::MutexLock lock(&mutex_);
  const Entry* entry = Find(update_id);
  if (entry == nullptr) return UpdateUnknown(update_id);
  auto copy = entry->copies.find(bucket);
  if (copy != entry->copies.end() && copy->second.whole)
    return LocationOf(*entry, copy->second);
  auto it = entry->buckets.find(bucket);
  if (it == entry->buckets.end()) return BucketUnknown(update_id, bucket);
  return LocationOf(*entry, it->second);
}

absl::StatusOr<std::vector<BucketRoom>> Store::Rooms(
    const std::string& update_id, const std::vector<int32_t>& buckets,
    bool incoming) {
  absl::MutexLock lock(&mutex_);
  const Entry* entry = Find(update_id);
  if (entry == nullptr) return UpdateUnknown(update_id);
  std::vector<BucketRoom> rooms;
  rooms.reserve(buckets.size());
  for (int32_t bucket : buckets) {
    auto it = entry->buckets.find(bucket);
    if (it == entry->buckets.end() || (!it->second.whole && !incoming)) {
      return BucketUnknown(update_id, bucket);
    }
    auto copy = entry->copies.find(bucket);
    const bool copied = copy != entry->copies.end() && copy->second.whole;
    rooms.push_back(RoomOf(bucket, copied ? copy->second : it->second));
  }
  return rooms;
}

bool Store::Holds(const std::string& update_id,
                  const std::vector<int32_t>& buckets) const {
  absl::MutexLock lock(&mutex_);
  const Entry* entry = Find(update_id);
  if (entry == nullptr || entry->state == Entry::State::kIncoming) return false;
  for (int32_t bucket : buckets) {
    auto it = entry->buckets.find(bucket);
    if (it == entry->buckets.end() || !it->second.whole) return false;
  }
  return true;
}

Store::Entry* Store::Find(const std::string& update_id) {
  auto it = entries_.find(update_id);
  return it == entries_.end() || it->second.dropped ? nullptr : &it->second;
}

const Store::Entry* Store::Find(const std::string& update_id) const {
  auto it = entries_.find(update_id);
  return it == entries_.end() || it->second.dropped ? nullptr : &it->second;
}

bool Store::Evictable(const Entry& entry) const {
  if (entry.state != Entry::State::kCommitted || entry.pins > 0) return false;
  auto newest = newest_.find(entry.model);
  return newest == newest_.end() || newest->second != entry.update_id;
}

bool Store::EvictOldest(const std::string& model, const std::string* device) {
  const Entry* oldest = nullptr;
  for (const auto& entry : entries_) {
    if (!Evictable(entry.second)) continue;
    if (!model.empty() && entry.second.model != model) continue;
    if (device != nullptr && entry.second.bytes(device) == 0) continue;
    if (oldest == nullptr || entry.second.order < oldest->order) {
      oldest = &entry.second;
    }
  }
  if (oldest == nullptr) return false;
  Deferred::Event event;
  event.kind = Deferred::Event::Kind::kEvicted;
  event.model = oldest->model;
  event.update_id = oldest->update_id;
  deferred_.events.push_back(event);
  FreeEntry(event.update_id);
  return true;
}

void Store::EnforceKeep(const std::string& model) {
  int committed = 0;
  for (const auto& entry : entries_) {
    if (entry.second.model == model && !entry.second.dropped &&
        entry.second.state == Entry::State::kCommitted) {
      ++committed;
    }
  }
  while (committed > std::max(1, options_.keep_updates) && EvictOldest(model)) {
    --committed;
  }
}

void Store::FreeExtent(const Extent& extent) {
  if (extent.arena == nullptr) return;
  if (extent.share != nullptr) {
    if (--extent.share->updates > 0) return;
    extent.arena->ReturnSlot(extent.share->generation_slot);
  }
  extent.arena->Free(extent.offset, extent.bytes);
}

void Store::FreeEntry(const std::string& update_id) {
  auto it = entries_.find(update_id);
  Entry& entry = it->second;
  // The generation moves on before the bytes can be given to anybody else.
  for (const auto& slot : entry.slots) {
    slot.first->ReturnSlot(slot.second);
  }
  for (const auto& bucket : entry.buckets) {
    const Extent& extent = bucket.second;
    if (!extent.borrowed && extent.share != nullptr &&
        extent.share->updates > 1) {
      // Somebody else pays for the bytes from now on.
      for (auto& other : entries_) {
        auto theirs = other.second.buckets.find(bucket.first);
        if (other.first == update_id || theirs == other.second.buckets.end() ||
            theirs->second.share != extent.share) {
          continue;
        }
        theirs->second.borrowed = false;
        break;
      }
    }
    FreeExtent(extent);
  }
  for (const auto& copy : entry.copies) FreeExtent(copy.second);
  const bool forgotten = update_bytes_.count(entry.model) == 0;
  entries_.erase(it);
  ReapLostArenas();
  if (forgotten) {
    DropFreeArenas(
        PromisedBytes(std::max(kLeastCopies, options_.keep_updates)));
  }
}

int64_t Store::PinnedBytes(const std::string& device) const {
  int64_t sum = 0;
  for (const auto& entry : entries_) {
    if (!Evictable(entry.second)) sum += entry.second.bytes(&device);
  }
  return sum;
}

std::string Store::PinnedNames(const std::string& device) const {
  std::vector<std::string> names;
  for (const auto& item : entries_) {
    const Entry& entry = item.second;
    const int64_t bytes = entry.bytes(&device);
    if (Evictable(entry) || entry.buckets.empty()) continue;
    if (!device.empty() && bytes == 0) continue;
    const char* why = entry.dropped ? "ended, in use"
                      : entry.state != Entry::State::kCommitted ? "incoming"
                      : entry.pins > 0                          ? "in use"
                                                                : "newest";
    names.push_back(absl::StrCat(entry.model, " update ", entry.update_id, ", ",
                                 why, ", ", bytes));
  }
  return names.empty() ? "by nothing" : absl::StrJoin(names, "; ");
}

std::vector<v1::HeldUpdate> Store::HeldUpdates() const {
  absl::MutexLock lock(&mutex_);
  std::vector<const Entry*> whole;
  for (const auto& entry : entries_) {
    if (!entry.second.dropped && entry.second.layout != nullptr &&
        entry.second.state != Entry::State::kIncoming) {
      whole.push_back(&entry.second);
    }
  }
  std::sort(whole.begin(), whole.end(),
            [](const Entry* a, const Entry* b) { return a->order > b->order; });
  std::vector<v1::HeldUpdate> held;
  held.reserve(whole.size());
  for (const Entry* entry : whole) {
    v1::HeldUpdate update;
    update.set_model(entry->model);
    update.set_update_id(entry->update_id);
    update.set_version(entry->version);
    update.set_layout_id(entry->layout->id);
    held.push_back(std::move(update));
  }
  return held;
}

// ---- Arenas and accounting ----

std::vector<std::string> Store::ArenaIds() const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::string> ids;
  ids.reserve(arenas_.size());
  for (const auto& arena : arenas_) ids.push_back(arena->id());
  return ids;
}

std::shared_ptr<const transport::Segment> Store::FindArena(
    const std::string& arena_id) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& arena : arenas_) {
    if (arena->id() == arena_id) return arena->segment();
  }
  return nullptr;
}

void Store::FillMemoryUse(v1::MemoryUse* use) const {
  absl::MutexLock lock(&mutex_);
  int64_t used = 0;
  for (const auto& arena : arenas_) {
    if (arena->device().empty()) used += arena->used();
  }
  use->set_store_budget_bytes(options_.budget_bytes);
  use->set_store_reserved_bytes(reserved_bytes_);
  use->set_store_used_bytes(used);
}

}  // namespace daemon
}  // namespace weightsync
