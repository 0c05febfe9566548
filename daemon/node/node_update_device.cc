// Buckets that lie on GPUs of this node: where they are packed or land, how
// they come to be sent, and how those that came get there.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/node/bucket_digest.h"
#include "daemon/node/node_update.h"
#include "glog/logging.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

using transport::Landing;
using transport::MakeError;

absl::StatusOr<std::vector<std::shared_ptr<Landing>>> NodeUpdate::Landings(
    const std::vector<int32_t>& buckets, Use use) {
  absl::Status pinned = PinInStore();
  if (!pinned.ok()) return pinned;
  std::map<int32_t, std::string> devices;
  if (context_.placement != nullptr && use == Use::kPack) {
    devices = context_.placement->ForPacked(*layout_, buckets);
  } else if (context_.placement != nullptr && use == Use::kReceive) {
    devices = context_.placement->ForReceived(*layout_, buckets);
  }
  auto rooms =
      context_.store->Reserve(update_id_, version_, layout_, buckets, devices);
  if (!rooms.ok()) return rooms.status();
  // What the CPU is to write or read lands beside the GPU.
  std::vector<int32_t> beside;
  std::map<int32_t, std::string> on_device;
  for (const BucketRoom& room : *rooms) {
    if (room.device.empty()) continue;
    on_device[room.bucket] = room.device;
    if (use != Use::kPack) beside.push_back(room.bucket);
  }
  if (!beside.empty()) {
    rooms = context_.store->ReserveCopies(update_id_, buckets);
    if (!rooms.ok()) return rooms.status();
  }
  std::vector<std::shared_ptr<Landing>> landings;
  std::vector<FrameCount*> fresh;
  {
    absl::MutexLock lock(&mutex_);
    for (const BucketRoom& room : *rooms) {
      std::shared_ptr<Landing>& landing = landings_[room.bucket];
      if (landing == nullptr) {
        landing = std::make_shared<Landing>(
            static_cast<uint64_t>(room.bucket), room.data,
            std::make_shared<BucketDigestMap>(layout_, room.bucket), room.file);
        auto& count = counts_[room.bucket];
        count = std::make_unique<FrameCount>(this, landing);
        fresh.push_back(count.get());
        auto device = on_device.find(room.bucket);
        if (device != on_device.end() && use == Use::kPack) {
          packed_on_device_.insert(room.bucket);
          // For workers elsewhere on this node.
          if (std::binary_search(layout_->needed_buckets.begin(),
                                 layout_->needed_buckets.end(), room.bucket) &&
              !context_.placement->AllReach(model(), device->second)) {
            to_place_.insert(room.bucket);
          }
        } else if (device != on_device.end() && use == Use::kReceive) {
          to_place_.insert(room.bucket);
        }
      }
      landings.push_back(landing);
    }
  }
  // Not under our lock: watchers take it.
  for (FrameCount* count : fresh) count->Start();
  return landings;
}

// ---- What is sent ----

absl::Status NodeUpdate::StageForSending(const std::vector<int32_t>& buckets) {
  std::vector<int32_t> packed;
  {
    absl::MutexLock lock(&mutex_);
    for (int32_t bucket : buckets) {
      if (packed_on_device_.count(bucket) > 0 && staged_.count(bucket) == 0) {
        packed.push_back(bucket);
      }
    }
  }
  if (packed.empty()) return absl::OkStatus();
  auto rooms = context_.store->ReserveCopies(update_id_, packed);
  if (!rooms.ok()) return rooms.status();
  absl::MutexLock lock(&mutex_);
  for (const BucketRoom& room : *rooms) {
    staged_[room.bucket] = std::make_shared<Landing>(
        static_cast<uint64_t>(room.bucket), room.data,
        std::make_shared<BucketDigestMap>(layout_, room.bucket), room.file);
  }
  return absl::OkStatus();
}

std::shared_ptr<Landing> NodeUpdate::Staged(int32_t bucket) {
  absl::MutexLock lock(&mutex_);
  auto found = staged_.find(bucket);
  return found == staged_.end() ? nullptr : found->second;
}

absl::Status NodeUpdate::FillStaged(int32_t bucket, Landing* staged,
                                    absl::Duration patience) {
  if (staged->complete()) return absl::OkStatus();
  std::shared_ptr<Landing> packed;
  {
    absl::MutexLock lock(&mutex_);
    packed = landings_.at(bucket);
  }
  absl::Status status = packed->WaitComplete(patience);
  if (!status.ok() || packed->size() == 0) return status;
  uint32_t next = 0;
  status = context_.device_copies->Copy(
      absl::MakeConstSpan(packed->frame(0).data(),
                          static_cast<size_t>(packed->size())),
      absl::MakeSpan(staged->frame(0).data(),
                     static_cast<size_t>(staged->size())),
      [&](int64_t bytes) {
        // What they are digested as is what was packed: whoever gets them sees
        // whether these are the same.
        while (next < staged->frame_count() &&
               (bytes == staged->size() ||
                (next + 1) * Landing::kFrameBytes <= bytes)) {
          if (staged->Claim(next)) {
            staged->MarkReady(next, packed->frame_digest(next));
          }
          ++next;
        }
      });
  if (!status.ok()) return status;
  return context_.store->MarkCopies(update_id_, {bucket});
}

absl::Status NodeUpdate::FillFromStore(Landing* landing) {
  const int32_t bucket = static_cast<int32_t>(landing->bucket_id());
  if (context_.device_copies != nullptr) {
    absl::Status status =
        context_.device_copies->ToHost(layout_, update_id_, {bucket});
    if (!status.ok()) return status;
  }
  landing->MarkAllReady();
  return absl::OkStatus();
}

// ---- What is to lie elsewhere ----

bool NodeUpdate::AllPlaced() const {
  return std::includes(placed_.begin(), placed_.end(), to_place_.begin(),
                       to_place_.end());
}

absl::Status NodeUpdate::CheckNotLost() {
  if (context_.placement == nullptr) return absl::OkStatus();
  {
    absl::MutexLock lock(&mutex_);
    if (!place_status_.ok()) return place_status_;
    if (landings_.empty()) return absl::OkStatus();
  }
  if (context_.store->Has(update_id_)) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kDataLoss, "DEVICE_STORE_LOST",
      absl::StrCat("node ", context_.node, " had update ", update_id_,
                   " in memory of a GPU whose device agent has "
                   "ended"));
}

void NodeUpdate::StartPlacing() {
  if (context_.placement == nullptr || placer_.joinable()) return;
  placer_ = std::thread([this] { PlaceBuckets(); });
}

void NodeUpdate::PlaceBuckets() {
  while (true) {
    std::shared_ptr<Landing> landing;
    int32_t bucket = -1;
    bool packed = false;
    {
      absl::MutexLock lock(&mutex_);
      const auto find = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        for (int32_t candidate : to_place_) {
          if (placed_.count(candidate) > 0) continue;
          auto count = counts_.find(candidate);
          if (count != counts_.end() && count->second->complete()) {
            return candidate;
          }
        }
        return -1;
      };
      const auto due = [this, &find]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return ended_ || find() >= 0;
      };
      mutex_.Await(absl::Condition(&due));
      if (ended_) return;
      bucket = find();
      landing = landings_.at(bucket);
      packed = packed_on_device_.count(bucket) > 0;
    }
    absl::Status status;
    if (packed) {
      status = context_.device_copies->ToHost(layout_, update_id_, {bucket},
                                              /*reachable=*/{},
                                              landing->bucket_digest());
    } else if (landing->size() > 0) {
      status = PlaceOnDevice(bucket, landing.get());
    }
    absl::MutexLock lock(&mutex_);
    woken_ = true;
    if (!status.ok()) {
      place_status_ = status;
      return;
    }
    placed_.insert(bucket);
  }
}

absl::Status NodeUpdate::PlaceOnDevice(int32_t bucket, Landing* landing) {
  // Where it is to be; its copy is not known to be whole yet.
  const auto room =
      context_.store->Rooms(update_id_, {bucket}, /*incoming=*/true);
  if (!room.ok()) return room.status();
  const absl::Span<char> to = (*room)[0].data;
  absl::Status status = context_.device_copies->Copy(
      absl::MakeConstSpan(landing->frame(0).data(),
                          static_cast<size_t>(landing->size())),
      to);
  if (!status.ok()) return status;
  const auto digest =
      context_.device_copies->DigestOnDevice(*layout_, bucket, to.data());
  if (!digest.ok()) return digest.status();
  status = DeviceCopies::Compare(update_id_, bucket, *digest,
                                 landing->bucket_digest());
  if (!status.ok()) return status;
  return context_.store->MarkCopies(update_id_, {bucket});
}

}  // namespace daemon
}  // namespace weightsync
