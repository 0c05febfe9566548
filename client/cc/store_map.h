// A worker's view of its node's store: arenas mapped once, read-only.
#ifndef WEIGHTSYNC_CLIENT_CC_STORE_MAP_H_
#define WEIGHTSYNC_CLIENT_CC_STORE_MAP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/memory.h"
#include "weightsync/v1/replica.pb.h"

namespace weightsync {
namespace client {

// Maps the arena that `offer` describes; redeems its token, once. The errors
// are those of transport::Memory::Import.
absl::StatusOr<std::shared_ptr<transport::Segment>> MapOffer(
    transport::Memory* memory, const v1::ArenaOffer& offer);

// Not thread-safe.
class StoreMap {
 public:
  // One bucket, found in the arenas. Holds its arena mapped.
  struct Bucket {
    std::shared_ptr<transport::Segment> arena;
    const char* data = nullptr;
    int64_t size_bytes = 0;
    int generation_slot = 0;
    uint64_t generation = 0;

    // False when the store has given the bytes to something else.
    bool StillThere() const {
      return arena->Generation(generation_slot) == generation;
    }
  };

  // `memory` outlives the map.
  explicit StoreMap(transport::Memory* memory) : memory_(memory) {}

  // Idempotent for one arena_id: an arena that is mapped is not mapped again.
  absl::Status Map(const v1::ArenaOffer& offer);
  void Drop(const std::string& arena_id) { arenas_.erase(arena_id); }
  void Clear() { arenas_.clear(); }

  // Where the buckets lie, in the order of `buckets`.
  //   FAILED_PRECONDITION  ARENA_UNKNOWN, BUCKET_MISSING, SLOT_OUT_OF_RANGE.
  //   ABORTED  STORE_SLOT_RECYCLED: a generation is not the one that was said.
  absl::StatusOr<std::vector<Bucket>> Locate(
      const v1::ApplyUpdate& apply, absl::Span<const int32_t> buckets) const;
  // One of them. `update_id` is for sentences.
  absl::StatusOr<Bucket> LocateOne(const std::string& update_id, int32_t bucket,
                                   const v1::SlotLocation& slot) const;
  // Another arena that was offered: the memory of a trainer. Null when it was
  // not, or could not be mapped.
  std::shared_ptr<transport::Segment> Find(const std::string& arena_id) const;

 private:
  transport::Memory* const memory_;
  absl::flat_hash_map<std::string, std::shared_ptr<transport::Segment>> arenas_;
};

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_STORE_MAP_H_
