#include "client/cc/store_map.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "proto/status.h"

namespace weightsync {
namespace client {

absl::StatusOr<std::shared_ptr<transport::Segment>> MapOffer(
    transport::Memory* memory, const v1::ArenaOffer& offer) {
  transport::MemoryTicket ticket;
  ticket.kind = offer.device_uuid().empty() ? transport::MemoryKind::kHost
                                            : transport::MemoryKind::kCuda;
  ticket.bytes = offer.size_bytes() - offer.data_offset_bytes();
  ticket.read_only = offer.read_only();
  ticket.address = offer.descriptor_socket();
  ticket.token = offer.token();
  auto segment = memory->Import(ticket, absl::Seconds(10));
  if (!segment.ok()) return segment.status();
  return std::shared_ptr<transport::Segment>(*std::move(segment));
}

absl::Status StoreMap::Map(const v1::ArenaOffer& offer) {
  if (arenas_.contains(offer.arena_id())) return absl::OkStatus();
  auto segment = MapOffer(memory_, offer);
  if (!segment.ok()) return segment.status();
  arenas_.emplace(offer.arena_id(), *std::move(segment));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<StoreMap::Bucket>> StoreMap::Locate(
    const v1::ApplyUpdate& apply, absl::Span<const int32_t> buckets) const {
  absl::flat_hash_map<int32_t, const v1::SlotLocation*> slots;
  for (const v1::BucketLocation& location : apply.buckets()) {
    slots[location.bucket()] = &location.slot();
  }
  std::vector<Bucket> located;
  located.reserve(buckets.size());
  for (const int32_t id : buckets) {
    const auto slot_found = slots.find(id);
    if (slot_found == slots.end()) {
      return ErrorStatus(
          absl::StatusCode::kFailedPrecondition, "BUCKET_MISSING",
          absl::StrCat("The command to apply ", apply.update_id(),
                       " does not say where bucket ", id,
                       " is, which the copy plan reads."));
    }
    auto bucket = LocateOne(apply.update_id(), id, *slot_found->second);
    if (!bucket.ok()) return bucket.status();
    located.push_back(*std::move(bucket));
  }
  return located;
}

absl::StatusOr<StoreMap::Bucket> StoreMap::LocateOne(
    const std::string& update_id, int32_t id,
    const v1::SlotLocation& slot) const {
  const auto arena_found = arenas_.find(slot.arena_id());
  if (arena_found == arenas_.end()) {
    return ErrorStatus(
        absl::StatusCode::kFailedPrecondition, "ARENA_UNKNOWN",
        absl::StrCat("Bucket ", id, " is in arena ", slot.arena_id(),
                     ", which could not be mapped or was never offered."));
  }
  Bucket bucket;
  bucket.arena = arena_found->second;
  if (slot.offset_bytes() < 0 || slot.size_bytes() < 0 ||
      slot.offset_bytes() > bucket.arena->bytes() ||
      slot.size_bytes() > bucket.arena->bytes() - slot.offset_bytes() ||
      slot.generation_slot() < 0 ||
      slot.generation_slot() >= bucket.arena->generation_slots()) {
    return ErrorStatus(absl::StatusCode::kFailedPrecondition,
                       "SLOT_OUT_OF_RANGE",
                       absl::StrCat("Bucket ", id, " does not lie in arena ",
                                    slot.arena_id(), "."));
  }
  bucket.data = bucket.arena->data() + slot.offset_bytes();
  bucket.size_bytes = slot.size_bytes();
  bucket.generation_slot = slot.generation_slot();
  bucket.generation = slot.generation();
  if (!bucket.StillThere()) {
    return ErrorStatus(
        absl::StatusCode::kAborted, "STORE_SLOT_RECYCLED",
        absl::StrCat("The store has given the bytes of bucket ", id, " of ",
                     update_id, " away; nothing was written."));
  }
  return bucket;
}

std::shared_ptr<transport::Segment> StoreMap::Find(
    const std::string& arena_id) const {
  const auto found = arenas_.find(arena_id);
  return found == arenas_.end() ? nullptr : found->second;
}

}  // namespace client
}  // namespace weightsync
