#include "daemon/service/store_room.h"

#include <algorithm>
#include <utility>

namespace weightsync {
namespace daemon {
namespace {

// Pieces of a bucket are aligned: a little more than the tensors' own bytes is
// needed.
int64_t WithPadding(int64_t bytes) { return bytes + bytes / 256 + (64 << 10); }

}  // namespace

void StoreRoom::Need(const std::string& model, const std::string& who,
                     int64_t bytes, int64_t model_bytes,
                     std::function<void(const absl::Status&)> done) {
  Entry& entry = models_[model];
  ++entry.generation;
  entry.model_bytes = std::max(entry.model_bytes, model_bytes);
  const auto before = entry.needs.find(who);
  const int64_t bytes_before =
      before == entry.needs.end() ? -1 : before->second;
  entry.needs[who] = bytes;
  int64_t sum = 0;
  for (const auto& need : entry.needs) sum += need.second;
  // Ranks that hold copies of one tensor share the work: each element is stored
  // once.
  if (entry.model_bytes > 0) sum = std::min(sum, entry.model_bytes);
  if (sum == 0) {
    done(absl::OkStatus());
    return;
  }
  reserving_->Post([this, model, who, bytes_before, sum = WithPadding(sum),
                    done = std::move(done)] {
    const absl::Status status = store_->ReserveFor(model, sum);
    loop_->Post([this, model, who, bytes_before, status, done] {
      if (!status.ok()) {
        if (bytes_before >= 0) {
          models_[model].needs[who] = bytes_before;
        } else {
          Leave(model, who);
        }
      }
      done(status);
    });
  });
}

void StoreRoom::Leave(const std::string& model, const std::string& who) {
  auto it = models_.find(model);
  if (it == models_.end()) return;
  Entry& entry = it->second;
  entry.needs.erase(who);
  if (!entry.needs.empty()) return;
  loop_->PostAfter(linger_, [this, model, generation = entry.generation] {
    auto again = models_.find(model);
    if (again == models_.end() || again->second.generation != generation)
      return;
    models_.erase(again);
    reserving_->Post([store = store_, model] { store->Forget(model); });
  });
}

}  // namespace daemon
}  // namespace weightsync
