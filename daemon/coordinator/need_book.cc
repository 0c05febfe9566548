#include "daemon/coordinator/need_book.h"

namespace weightsync {
namespace daemon {

const absl::optional<std::vector<uint32_t>>& NeedBook::Of(
    const KnownLayout& layout, const WorkerEntry& worker) {
  const auto key = std::make_pair(layout.id(), worker.registration_number);
  const auto it = known_.find(key);
  if (it != known_.end()) return it->second;
  ++computed_;
  return known_.emplace(key, NeededBuckets(layout, worker.registration))
      .first->second;
}

void NeedBook::Keep(const std::set<std::string>& layouts,
                    const std::set<int64_t>& registrations) {
  for (auto it = known_.begin(); it != known_.end();) {
    const bool kept = layouts.count(it->first.first) != 0 &&
                      registrations.count(it->first.second) != 0;
    it = kept ? std::next(it) : known_.erase(it);
  }
}

}  // namespace daemon
}  // namespace weightsync
