// The node's store: buckets of updates, once for all workers of the node, in
// shared memory that the workers map read-only.
//
// Memory comes in arenas that are reserved and faulted in when a trainer or a
// worker registers (ReserveFor), mapped once by everybody and used again for
// update after update: a fresh page costs ten times as much as a warm one.
//
// An update in the store:
//   Reserve        room for buckets; the update is INCOMING and pinned
//   MarkWhole      its bytes are complete and verified; workers may be pointed
//                  at them
//   Commit         it is the model's newest; the one before may be evicted
//   Drop / evicted its extents are free; their generation is bumped before
//                  anybody else may write there, so that a late reader notices
//                  (all extents of an update in one arena share a generation
//                  slot)
//
// Buckets of a committed update may be incoming, too: those that are fetched
// from another holder for a worker that the update was not made for. They are
// given out once they are whole.
//
// Two updates of one layout whose bytes of a bucket are equal share them
// (ShareEqual): the bytes go with the last of the two.
//
// With a device store (Options::device_budget_bytes), buckets may lie in memory
// of a GPU of this node, as whoever reserves them says: in arenas of their own
// kind, with a budget for each GPU, under the same rules. Nobody follows
// addresses there (transport::Memory::DeviceOf). A bucket of a GPU may have a
// copy in host memory as well, for those who cannot reach the GPU: a connection
// to another node, a worker elsewhere, a checkpoint. It lasts as long as
// somebody has the update pinned. What lies on a GPU ends with its device agent
// (LoseDevice): updates that have bytes there and no copy of them go whole.
// Buckets on a GPU are never shared. Host memory is then taken when a bucket
// needs it, and not ahead of time.
//
// Room is made by evicting, oldest first, committed updates that are not
// pinned. Pinned are: INCOMING updates, the newest committed update of each
// model, and what a StorePin holds (an update that a worker is copying from),
// and slots (TakeSlot). If that does not suffice, Reserve refuses with the
// sums.

#ifndef WEIGHTSYNC_DAEMON_NODE_STORE_H_
#define WEIGHTSYNC_DAEMON_NODE_STORE_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "daemon/node/arena_space.h"
#include "daemon/node/layouts.h"
#include "transport/digest.h"
#include "transport/landing.h"
#include "transport/memory.h"
#include "weightsync/v1/admin.pb.h"
#include "weightsync/v1/node.pb.h"
#include "weightsync/v1/replica.pb.h"

namespace weightsync {
namespace daemon {

class Store;

// Keeps an update's extents where they are. Movable; the store outlives it.
// Releasing may free the update, when it was dropped meanwhile.
class StorePin {
 public:
  StorePin() = default;
  StorePin(StorePin&& other) noexcept { *this = std::move(other); }
  StorePin& operator=(StorePin&& other) noexcept;
  ~StorePin() { Release(); }

  bool held() const { return store_ != nullptr; }
  void Release();

 private:
  friend class Store;
  StorePin(Store* store, std::string update_id)
      : store_(store), update_id_(std::move(update_id)) {}

  Store* store_ = nullptr;
  std::string update_id_;
};

// Where the buckets of an update lie, for one apply. Offsets count from the
// first usable byte of the arena (Segment::data()).
struct LocatedUpdate {
  std::shared_ptr<const NodeLayout> layout;
  std::vector<v1::BucketLocation> buckets;
  // Hold it until the worker has answered or is gone.
  StorePin pin;
};

// A bucket's memory, valid while its update is pinned.
struct BucketRoom {
  int32_t bucket = 0;
  absl::Span<char> data;
  transport::FileRange file;
  // Where `data` only names bytes: the GPU that has them.
  std::string device;
};

// Memory through which one bucket after the other passes, for updates that have
// no whole copy on this node. It has a generation of its own. The store
// outlives it.
class StoreSlot {
 public:
  ~StoreSlot();
  StoreSlot(const StoreSlot&) = delete;
  StoreSlot& operator=(const StoreSlot&) = delete;

  absl::Span<char> data() const { return data_; }
  // The same bytes as a part of a file.
  transport::FileRange file() const { return file_; }
  // Where data() only names bytes: the GPU that has them.
  const std::string& device() const { return device_; }
  // Of the first `bytes` of what stands in it now.
  v1::SlotLocation Location(int64_t bytes) const;
  // The bytes are about to be something else: a late reader will notice.
  void Recycle();
  // They have ended with their GPU's device agent.
  bool lost() const;

 private:
  friend class Store;
  StoreSlot(Store* store, std::string id, const BucketRoom& room, StorePin pin)
      : store_(store),
        id_(std::move(id)),
        data_(room.data),
        file_(room.file),
        device_(room.device),
        pin_(std::move(pin)) {}

  Store* const store_;
  const std::string id_;
  const absl::Span<char> data_;
  const transport::FileRange file_;
  const std::string device_;
  // What its GPU has lost is not given up under its hands.
  StorePin pin_;
};

class Store {
 public:
  struct Options {
    // Usable bytes of all arenas together.
    int64_t budget_bytes = 0;
    // Committed updates of one model that stay while there is room; at least 1.
    int keep_updates = 2;
    // Of each GPU. 0: there is no device store.
    int64_t device_budget_bytes = 0;
  };

  // Told of what the service must pass on. Called without the store's lock, one
  // call at a time, on whatever thread caused it; must not call the store's
  // methods that change it.
  class Observer {
   public:
    virtual ~Observer() = default;
    // Offer it to the workers (Memory::Export, read-only) before an update
    // names it.
    virtual void OnArenaAdded(const std::string& arena_id) = 0;
    // It is unmapped here; workers shall unmap it too.
    virtual void OnArenaDropped(const std::string& arena_id) = 0;
    // A committed update was given up to make room, or any was lost with a
    // GPU.
    virtual void OnUpdateEvicted(const std::string& model,
                                 const std::string& update_id) = 0;
  };

  // `memory` makes the arenas. `observer` may be null. Both outlive the store.
  Store(Options options, transport::Memory* memory, Observer* observer);
  // REQUIRES: no StorePin is held and nobody uses a BucketRoom.
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // ---- Room, ahead of time ----

  // Says that one update of `model` takes up to `update_bytes` on this node
  // (all its ranks and workers together), and faults in what is missing for
  // max(2, keep_updates) of them, or for as many as the budget allows: the
  // incoming update stands beside the installed one. Blocks while it does so.
  // A smaller figure than an earlier one changes nothing.
  //   RESOURCE_EXHAUSTED (NO_STORE_ROOM): the budget does not allow two updates
  //   beside what other models have reserved. (NO_MEMORY_FOR_ARENA): the
  //   machine has not got the memory. Both have the sums; nothing is reserved
  //   then.
  absl::Status ReserveFor(const std::string& model, int64_t update_bytes);

  // Nobody on this node has anything to do with `model` any more: its updates
  // go as soon as their pins allow, and so do arenas that nothing else needs.
  void Forget(const std::string& model);

  // ---- Updates ----

  // Makes room for those of `buckets` that the update has not got yet, and
  // answers where all of them are. Evicts, and grows arenas within the budget
  // (which is slow: ReserveFor should have been called). All or nothing.
  //   RESOURCE_EXHAUSTED NO_STORE_ROOM (needed, budget, pinned by whom),
  //   NO_MEMORY_FOR_ARENA; FAILED_PRECONDITION (UPDATE_LAYOUT_MISMATCH): the
  //   update is there in another layout, or has ended (UPDATE_ENDED).
  // `devices`: the GPUs of buckets that shall not lie in host memory; a bucket
  // that is there already stays where it is. UNAVAILABLE (DEVICE_AGENT_LOST).
  absl::StatusOr<std::vector<BucketRoom>> Reserve(
      const std::string& update_id, int64_t version,
      std::shared_ptr<const NodeLayout> layout,
      const std::vector<int32_t>& buckets,
      const std::map<int32_t, std::string>& devices = {});

  // Those buckets of which the digests are given are whole; null: all that it
  // has room for, which are never shared then. Idempotent. NOT_FOUND
  // (UPDATE_UNKNOWN).
  absl::Status MarkWhole(
      const std::string& update_id,
      const std::map<int32_t, transport::Digest>* digests = nullptr);

  // The model's newest from now on. The one before is unpinned, and more than
  // keep_updates are evicted. NOT_FOUND (UPDATE_UNKNOWN), FAILED_PRECONDITION
  // (UPDATE_INCOMPLETE) when it was not marked whole.
  absl::Status Commit(const std::string& update_id);
  // Of an update that was committed long ago and has been fetched: the model's
  // newest only if its version is.
  absl::Status Adopt(const std::string& update_id);

  // Gives up the bytes of buckets that an older update of the same layout has
  // as well, byte by byte the same; the two share them from now on. Answers the
  // bytes that became free. Does nothing while the update is pinned, and moves
  // its generations on where it does something: a reader that was given up may
  // still read. REQUIRES: the mover is through with the update.
  int64_t ShareEqual(const std::string& update_id);

  // The bytes of `bucket` in another update of the same model and layout, whole
  // and with this digest, kept where they are by *pin. Empty where there are
  // none.
  absl::Span<const char> FindEqual(const std::string& update_id,
                                   const NodeLayout& layout, int32_t bucket,
                                   const transport::Digest& digest,
                                   StorePin* pin);
  // Whether the newest update of the layout shares bytes with the one before:
  // then the next one may well, too.
  bool ExpectsEqual(const NodeLayout& layout) const;

  // Frees an update that is not committed (or, with `committed_too`, any), now
  // or when the last pin is released. Unknown ids are fine.
  void Drop(const std::string& update_id, bool committed_too = false);

  // Frees the buckets of an update that never became whole; those that are
  // stay. Unknown ids are fine. REQUIRES: nobody uses their rooms any more.
  void DropIncoming(const std::string& update_id);

  // Keeps whatever state it is in. NOT_FOUND (UPDATE_UNKNOWN).
  absl::StatusOr<StorePin> Pin(const std::string& update_id);

  // ---- Buckets on GPUs: store_device.cc ----

  // Room in host memory for copies of buckets that lie on GPUs; of those that
  // do not, where they are. Errors of Reserve. REQUIRES: the update is pinned.
  absl::StatusOr<std::vector<BucketRoom>> ReserveCopies(
      const std::string& update_id, const std::vector<int32_t>& buckets);
  // The copies are complete. NOT_FOUND (UPDATE_UNKNOWN).
  absl::Status MarkCopies(const std::string& update_id,
                          const std::vector<int32_t>& buckets);
  // Of `buckets`, those that lie on a GPU, with no copy and not on one of
  // `reachable`.
  std::vector<int32_t> OutOfReach(
      const std::string& update_id, const std::vector<int32_t>& buckets,
      const std::vector<std::string>& reachable) const;
  // What is known of a bucket's bytes. Empty: nothing.
  absl::optional<transport::Digest> DigestOf(const std::string& update_id,
                                             int32_t bucket) const;
  // The device agent of the GPU has ended. Thread-safe, as all of this, and
  // short.
  void LoseDevice(const std::string& device);

  // Where a bucket lies, whole or not, for those who know which bytes of it are
  // there; its copy, where it has a whole one. Errors of Locate. REQUIRES: the
  // update is pinned.
  absl::StatusOr<v1::SlotLocation> LocationOf(const std::string& update_id,
                                              int32_t bucket) const;
  // Where whole buckets lie in this process, for sending them. Errors of
  // Locate. REQUIRES: the update is pinned.
  // `incoming`: also those that are not known to be whole, for who knows it. Of
  // a bucket on a GPU, its copy, where it has a whole one.
  absl::StatusOr<std::vector<BucketRoom>> Rooms(
      const std::string& update_id, const std::vector<int32_t>& buckets,
      bool incoming = false);

  // Memory of `bytes` for a flow of `model` through this node; of the GPU
  // `device`, where one is given. Errors of Reserve.
  absl::StatusOr<std::unique_ptr<StoreSlot>> TakeSlot(
      const std::string& model, int64_t bytes, const std::string& device = "");

  // Where `buckets` of a whole update lie, pinned for an apply, for who reaches
  // the memory of the GPUs `reachable`; FAILED_PRECONDITION (OUT_OF_REACH) of
  // other buckets that lie on a GPU alone.
  //   NOT_FOUND (UPDATE_UNKNOWN: never here, dropped or evicted;
  //   BUCKET_UNKNOWN: the node did not need this bucket when the update moved),
  //   FAILED_PRECONDITION (UPDATE_INCOMPLETE).
  absl::StatusOr<LocatedUpdate> Locate(
      const std::string& update_id, const std::vector<int32_t>& buckets,
      const std::vector<std::string>& reachable = {});

  // Whether it is there, in whatever state.
  bool Has(const std::string& update_id) const;
  // Whether Locate would succeed, for who reaches every GPU.
  bool Holds(const std::string& update_id,
             const std::vector<int32_t>& buckets) const;

  // Whole updates, committed or not, newest first.
  std::vector<v1::HeldUpdate> HeldUpdates() const;

  // ---- Arenas and accounting ----

  // Arenas to offer to a worker that has just come, oldest first.
  std::vector<std::string> ArenaIds() const;
  // Shared: the arena stays mapped while somebody exports it. Null if unknown.
  std::shared_ptr<const transport::Segment> FindArena(
      const std::string& arena_id) const;

  // Fills store_budget_bytes, store_reserved_bytes and store_used_bytes: of
  // host memory.
  void FillMemoryUse(v1::MemoryUse* use) const;

 private:
  friend class StorePin;
  friend class StoreSlot;

  // Bytes that several updates have. Their generation slot is theirs alone: it
  // moves on when the last of the updates goes.
  struct Share {
    int generation_slot = 0;
    int updates = 0;
  };

  struct Extent {
    ArenaSpace* arena = nullptr;
    int64_t offset = 0;
    int64_t bytes = 0;
    bool whole = false;
    absl::optional<transport::Digest> digest;
    // Null: of one update alone.
    std::shared_ptr<Share> share;
    // Locations name the share's generation slot, not the update's.
    bool by_share = false;
    // Another update is charged for the bytes.
    bool borrowed = false;
  };

  struct Entry {
    enum class State { kIncoming, kWhole, kCommitted };

    std::string update_id;
    std::string model;
    int64_t version = 0;
    // Null for a slot, which is one bucket of slot_bytes.
    std::shared_ptr<const NodeLayout> layout;
    int64_t slot_bytes = 0;
    State state = State::kIncoming;
    // Given up; goes with the last pin.
    bool dropped = false;
    int pins = 0;
    // Of the commit, or before it of the first Reserve: grows.
    uint64_t order = 0;
    std::map<int32_t, Extent> buckets;
    // In host memory, of buckets that lie on GPUs.
    std::map<int32_t, Extent> copies;
    std::map<ArenaSpace*, int> slots;

    // Of extents that this entry alone pays for: on `device`, or (null)
    // anywhere.
    int64_t bytes(const std::string* device = nullptr) const;
    int64_t bucket_bytes(int32_t bucket) const {
      return layout == nullptr ? slot_bytes : layout->bucket_bytes(bucket);
    }
    std::string Name() const;
  };

  // The incoming update beside the installed one.
  static constexpr int kLeastCopies = 2;
  // For a bucket to be compared with that of another update.
  static constexpr absl::Duration kSharePatience = absl::Seconds(10);
  static absl::Status NoStoreRoom(absl::string_view sentence);

  // What is to be done once the lock is free: observers may take locks of their
  // own, and to destroy a mapping takes seconds (unmapper_ does that).
  struct Deferred {
    struct Event {
      enum class Kind { kAdded, kDropped, kEvicted };
      Kind kind;
      std::string arena_id;
      std::string model;
      std::string update_id;
    };
    std::vector<Event> events;
    std::vector<std::unique_ptr<ArenaSpace>> arenas;
  };

  void RunDeferred() ABSL_LOCKS_EXCLUDED(mutex_, notify_mutex_);
  void Unpin(const std::string& update_id);
  // On unmapper_.
  void UnmapArenas() ABSL_LOCKS_EXCLUDED(unmap_mutex_);
  // Until what was given back before is.
  void AwaitUnmapped() ABSL_LOCKS_EXCLUDED(unmap_mutex_);

  absl::Status ReserveForLocked(const std::string& model, int64_t update_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Where a bucket is to lie.
  struct Want {
    int32_t bucket = 0;
    std::string device;
    bool copy = false;
  };
  absl::StatusOr<std::vector<BucketRoom>> ReserveLocked(
      const std::string& update_id, const std::string& layout_id,
      const std::vector<Want>& wants) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static v1::SlotLocation LocationOf(const Entry& entry, const Extent& extent);
  static BucketRoom RoomOf(int32_t bucket, const Extent& extent);
  static bool Reaches(const Extent& extent,
                      const std::vector<std::string>& reachable);
  void FreeExtent(const Extent& extent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CommitLocked(const std::string& update_id, bool newest)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Null when unknown or dropped.
  Entry* Find(const std::string& update_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const Entry* Find(const std::string& update_id) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Gives the entry extents for `wants`, all or none. Answers the bytes that do
  // not fit, by device; nothing when all do.
  std::map<std::string, int64_t> Carve(Entry* entry,
                                       const std::vector<Want>& wants)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // One more arena. Lets go of the lock while memory is faulted in; one at a
  // time.
  absl::Status Grow(int64_t bytes, const std::string& device = "")
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t Budget(const std::string& device) const {
    return device.empty() ? options_.budget_bytes
                          : options_.device_budget_bytes;
  }
  int64_t& Reserved(const std::string& device)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return device.empty() ? reserved_bytes_ : device_reserved_bytes_[device];
  }
  // Copies of an update that nobody has pinned.
  void TrimCopies(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Lost arenas in which nothing lies any more.
  void ReapLostArenas() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Evictable(const Entry& entry) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // The oldest one that is evictable, of `model` or (when empty) of any; with
  // bytes on `device`, where given. False when there is none.
  bool EvictOldest(const std::string& model,
                   const std::string* device = nullptr)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EnforceKeep(const std::string& model)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives the entry's extents back. REQUIRES: no pins.
  void FreeEntry(const std::string& update_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropIncomingLocked(const std::string& update_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropLocked(const std::string& update_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops arenas of `device` in which nothing lies, down to `keep_bytes` in
  // all; all of GPUs, where none is given.
  void DropFreeArenas(int64_t keep_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropFreeArenas(int64_t keep_bytes, const std::string& device)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What ReserveFor promised for `copies` updates of every model.
  int64_t PromisedBytes(int copies) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  int64_t PinnedBytes(const std::string& device) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // "models/a update 1f… (newest committed) 1024, …"
  std::string PinnedNames(const std::string& device) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const Options options_;
  // Workers may outlive a daemon: no arena of this store is called as one of
  // another.
  const std::string arena_prefix_;
  transport::Memory* const memory_;
  Observer* const observer_;

  // Held while the observer is called; taken before mutex_.
  absl::Mutex notify_mutex_;
  mutable absl::Mutex mutex_ ABSL_ACQUIRED_AFTER(notify_mutex_);
  std::vector<std::unique_ptr<ArenaSpace>> arenas_ ABSL_GUARDED_BY(mutex_);
  // Sum of the capacities of arenas_ and of the one that is being made.
  int64_t reserved_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, int64_t> device_reserved_bytes_ ABSL_GUARDED_BY(mutex_);
  // How often each GPU's agent has ended.
  std::map<std::string, int> losses_ ABSL_GUARDED_BY(mutex_);
  bool growing_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t next_arena_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_order_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  // By model.
  std::map<std::string, std::string> newest_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int64_t> update_bytes_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_slot_ ABSL_GUARDED_BY(mutex_) = 0;
  Deferred deferred_ ABSL_GUARDED_BY(mutex_);
  // Calls of ShareEqual that have updates pinned; and whether they are to end.
  int sharing_ ABSL_GUARDED_BY(mutex_) = 0;
  bool room_wanted_ ABSL_GUARDED_BY(mutex_) = false;

  // Taken by itself, or under notify_mutex_.
  absl::Mutex unmap_mutex_;
  std::deque<std::unique_ptr<ArenaSpace>> unmapping_
      ABSL_GUARDED_BY(unmap_mutex_);
  bool unmap_busy_ ABSL_GUARDED_BY(unmap_mutex_) = false;
  bool unmap_stopping_ ABSL_GUARDED_BY(unmap_mutex_) = false;
  std::thread unmapper_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_STORE_H_
