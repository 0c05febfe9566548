// What the nodes need, factored: nodes whose workers need the same box lists
// form a need group, and every parameter is cut into cells that a fixed set of
// groups (a class) needs. Internal to schedule/.

#ifndef WEIGHTSYNC_SCHEDULE_NEED_H_
#define WEIGHTSYNC_SCHEDULE_NEED_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "schedule/catalog.h"
#include "schedule/layout.h"

namespace weightsync {
namespace schedule {

// Nodes grouped by what they need, in an order that depends on the needs alone.
struct NeedGroups {
  std::vector<const BoxList*> lists;              // different ones
  std::vector<std::vector<int32_t>> group_lists;  // per group, into lists
  std::vector<std::vector<uint64_t>> signature;   // per group, list digests
  std::vector<std::vector<int32_t>> group_nodes;  // per group, sorted nodes

  // INVALID_TOPOLOGY: a negative node.
  static absl::StatusOr<NeedGroups> Create(
      absl::Span<const WorkerNeed> workers);

  // Sorted nodes of a set of groups.
  std::vector<int32_t> Nodes(absl::Span<const int32_t> groups) const;
};

// Cuts parameters into cells of one class each. Keep for all parameters of a
// catalog: equal patterns of needs are cut once.
class NeedMap {
 public:
  struct Cell {
    Box box;
    int32_t need_class;
  };

  // UNKNOWN_ORDINAL, BOX_OUTSIDE_TENSOR, DTYPE_MISMATCH, as for shards.
  static absl::StatusOr<NeedMap> Create(const Catalog& catalog,
                                        const NeedGroups& groups);

  // Disjoint cells that cover the parameter, sorted, none of which could be
  // joined with a neighbour of the same class along one dimension. Valid as
  // long as the map.
  absl::Span<const Cell> Cells(uint32_t ordinal);

  // Sorted groups per class; class 0 is empty.
  const std::vector<std::vector<int32_t>>& classes() const { return classes_; }

 private:
  struct Need {
    const Box* box;
    int32_t need_class;  // class of the list's groups
    int32_t list;
    uint32_t box_id;  // BoxList::box_ids
  };

  // Needs that some parameter has, and their cells. Needs are (list, box_id).
  struct Pattern {
    Dims shape;
    std::vector<std::pair<int32_t, uint32_t>> needs;
    std::vector<Cell> cells;
  };

  static bool Matches(const Pattern& pattern, const Dims& shape,
                      absl::Span<const Need> needs);
  int32_t InternClass(std::vector<int32_t> groups);
  int32_t Union(int32_t a, int32_t b);
  std::vector<Cell> Cut(absl::Span<const int64_t> shape,
                        absl::Span<const Need> needs);

  const Catalog* catalog_ = nullptr;
  std::vector<size_t> begin_;
  std::vector<Need> needs_;
  std::vector<std::vector<int32_t>> classes_;
  absl::flat_hash_map<std::vector<int32_t>, int32_t> class_ids_;
  absl::flat_hash_map<std::pair<int32_t, int32_t>, int32_t> unions_;
  // By shape and number of needs.
  absl::flat_hash_map<std::pair<Dims, size_t>,
                      std::vector<std::unique_ptr<Pattern>>>
      patterns_;
};

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_NEED_H_
