// The buckets that workers need, kept: that takes a pass over all pieces of a
// layout, and is asked for whenever anything happens to an install.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_NEED_BOOK_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_NEED_BOOK_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/optional.h"
#include "daemon/coordinator/known_layout.h"
#include "daemon/coordinator/registry.h"

namespace weightsync {
namespace daemon {

class NeedBook {
 public:
  // As NeededBuckets.
  const absl::optional<std::vector<uint32_t>>& Of(const KnownLayout& layout,
                                                  const WorkerEntry& worker);
  // Forgets all but these layouts, by id, and these registrations.
  void Keep(const std::set<std::string>& layouts,
            const std::set<int64_t>& registrations);

  size_t size() const { return known_.size(); }
  // How often it had to be computed.
  int64_t computed() const { return computed_; }

 private:
  // By layout_id and WorkerEntry::registration_number.
  std::map<std::pair<std::string, int64_t>,
           absl::optional<std::vector<uint32_t>>>
      known_;
  int64_t computed_ = 0;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_NEED_BOOK_H_
