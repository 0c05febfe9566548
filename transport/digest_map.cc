#include "transport/digest_map.h"

#include <algorithm>
#include <utility>

namespace weightsync {
namespace transport {

RunDigestMap::RunDigestMap(std::vector<PlacedRun> runs)
    : runs_(std::move(runs)) {}

Digest RunDigestMap::Of(int64_t offset, absl::Span<const char> bytes) const {
  const int64_t end = offset + static_cast<int64_t>(bytes.size());
  auto it = std::upper_bound(runs_.begin(), runs_.end(), offset,
                             [](int64_t at, const PlacedRun& placed) {
                               return at < placed.offset + placed.run.bytes();
                             });
  Digest sum;
  for (; it != runs_.end() && it->offset < end; ++it) {
    const int64_t from = std::max(offset, it->offset);
    const int64_t to = std::min(end, it->offset + it->run.bytes());
    DigestRun part = it->run;
    part.first_element += (from - it->offset) / part.element_bytes;
    part.element_count = (to - from) / part.element_bytes;
    DigestAccumulate(bytes.data() + (from - offset), part, &sum);
  }
  return sum;
}

}  // namespace transport
}  // namespace weightsync
