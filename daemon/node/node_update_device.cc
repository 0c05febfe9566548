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

std::shared_ptr<Landing> NodeUpdate::NewLanding(const BucketRoom& room) const {
  const auto bucket = static_cast<uint64_t>(room.bucket);
  if (!room.device.empty()) {
    return std::make_shared<Landing>(
        bucket, room.data,
        std::make_shared<DeviceFrameDigester>(
            layout_, room.bucket, room.data.data(), context_.memory));
  }
  return std::make_shared<Landing>(
      bucket, room.data,
      std::make_shared<BucketDigestMap>(layout_, room.bucket), room.file);
}

NodeUpdate::FrameCount* NodeUpdate::AddLanding(const BucketRoom& room) {
  const std::shared_ptr<Landing> landing = NewLanding(room);
  landings_[room.bucket] = landing;
  if (room.device.empty()) {
    on_device_.erase(room.bucket);
  } else {
    on_device_[room.bucket] = room.device;
  }
  auto& count = counts_[room.bucket];
  count = std::make_unique<FrameCount>(this, landing);
  return count.get();
}

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
  std::vector<std::shared_ptr<Landing>> landings;
  std::vector<FrameCount*> fresh;
  {
    absl::MutexLock lock(&mutex_);
    for (const BucketRoom& room : *rooms) {
      if (landings_.count(room.bucket) == 0) {
        if (!room.device.empty() && use != Use::kPack) {
          undecided_[room.bucket] = room;
          continue;
        }
        fresh.push_back(AddLanding(room));
        // For workers elsewhere on this node.
        if (!room.device.empty() &&
            std::binary_search(layout_->needed_buckets.begin(),
                               layout_->needed_buckets.end(), room.bucket) &&
            !context_.placement->AllReach(model(), room.device)) {
          to_place_.insert(room.bucket);
        }
      }
      landings.push_back(landings_.at(room.bucket));
    }
  }
  // Not under our lock: watchers take it.
  for (FrameCount* count : fresh) count->Start();
  return landings;
}

// ---- Where a flow's buckets land ----

absl::Status NodeUpdate::Land(const Round& round, FlowRun* flow,
                              const std::string& device) {
  absl::MutexLock landing(&land_mutex_);
  std::vector<int32_t> beside, staged;
  std::vector<FrameCount*> fresh;
  {
    absl::MutexLock lock(&mutex_);
    if (round.closed) return RoundClosed();
    for (int32_t bucket : flow->buckets) {
      auto room = undecided_.find(bucket);
      if (room != undecided_.end()) {
        if (room->second.device == device) {
          fresh.push_back(AddLanding(room->second));
          undecided_.erase(room);
        } else {
          beside.push_back(bucket);
        }
        continue;
      }
      auto on = on_device_.find(bucket);
      if (on == on_device_.end()) continue;
      const bool carried = flow->group == nullptr || on->second == device;
      if (!carried && flow->self > 0 && !counts_.at(bucket)->complete()) {
        beside.push_back(bucket);
      } else if (!carried ||
                 (PassesOn(round, bucket) &&
                  !context_.placement->AllReach(model(), on->second))) {
        staged.push_back(bucket);
      }
    }
  }
  for (FrameCount* count : fresh) count->Start();
  absl::Status status = LandBeside(beside, flow->self > 0);
  if (status.ok()) status = StageForSending(staged);
  if (!status.ok()) return status;
  flow->staged.insert(staged.begin(), staged.end());
  if (flow->lane) {
    // Without GPUs it was taken when the round was made.
    return context_.placement == nullptr ? absl::OkStatus()
                                         : TakeLaneSlot(round, flow, device);
  }
  absl::MutexLock lock(&mutex_);
  for (int32_t bucket : flow->buckets) {
    flow->landings.push_back(flow->staged.count(bucket) > 0
                                 ? staged_.at(bucket)
                                 : landings_.at(bucket));
  }
  return absl::OkStatus();
}

absl::Status NodeUpdate::LandBeside(const std::vector<int32_t>& buckets,
                                    bool received) {
  if (buckets.empty()) return absl::OkStatus();
  const auto rooms = context_.store->ReserveCopies(update_id_, buckets);
  if (!rooms.ok()) return rooms.status();
  std::vector<FrameCount*> fresh;
  std::vector<std::unique_ptr<FrameCount>> before;
  {
    absl::MutexLock lock(&mutex_);
    for (const BucketRoom& room : *rooms) {
      undecided_.erase(room.bucket);
      auto count = counts_.find(room.bucket);
      if (count != counts_.end()) before.push_back(std::move(count->second));
      fresh.push_back(AddLanding(room));
      if (received) to_place_.insert(room.bucket);
    }
  }
  for (const auto& count : before) count->Stop();
  for (FrameCount* count : fresh) count->Start();
  return absl::OkStatus();
}

absl::Status NodeUpdate::LandFromDisk(const std::vector<int32_t>& buckets) {
  std::vector<int32_t> beside;
  {
    absl::MutexLock lock(&mutex_);
    for (int32_t bucket : buckets) {
      if (undecided_.count(bucket) > 0 ||
          (on_device_.count(bucket) > 0 && !counts_.at(bucket)->complete())) {
        beside.push_back(bucket);
      }
    }
  }
  return LandBeside(beside, /*received=*/true);
}

std::string NodeUpdate::SlotDevice(const Round& round, const FlowRun& flow,
                                   const std::vector<int32_t>& buckets,
                                   const std::string& device) const {
  if (context_.placement == nullptr) return "";
  std::string on = device;
  if (flow.self == 0) {
    // Packed straight from the ranks' memory: on the GPU that has it.
    const std::map<int32_t, std::string> packed =
        context_.placement->ForPacked(*layout_, buckets);
    if (flow.group == nullptr && !packed.empty()) on = packed.begin()->second;
    for (int32_t bucket : buckets) {
      auto found = packed.find(bucket);
      if (found == packed.end() || found->second != on) return "";
    }
  }
  if (on.empty()) return "";
  for (int32_t bucket : buckets) {
    if (PassesOn(round, bucket) && !context_.placement->AllReach(model(), on)) {
      return "";
    }
  }
  return on;
}

// ---- What is sent ----

absl::Status NodeUpdate::StageForSending(const std::vector<int32_t>& buckets) {
  std::vector<int32_t> fresh;
  {
    absl::MutexLock lock(&mutex_);
    for (int32_t bucket : buckets) {
      if (staged_.count(bucket) == 0) fresh.push_back(bucket);
    }
  }
  if (fresh.empty()) return absl::OkStatus();
  auto rooms = context_.store->ReserveCopies(update_id_, fresh);
  if (!rooms.ok()) return rooms.status();
  absl::MutexLock lock(&mutex_);
  for (const BucketRoom& room : *rooms) {
    // Of another flow, meanwhile, perhaps.
    std::shared_ptr<Landing>& staged = staged_[room.bucket];
    if (staged == nullptr) staged = NewLanding(room);
  }
  return absl::OkStatus();
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
  if (landing->on_device()) return landing->MarkAllReady();
  const int32_t bucket = static_cast<int32_t>(landing->bucket_id());
  if (context_.device_copies != nullptr) {
    absl::Status status =
        context_.device_copies->ToHost(layout_, update_id_, {bucket});
    if (!status.ok()) return status;
  }
  return landing->MarkAllReady();
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
      packed = on_device_.count(bucket) > 0;
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
