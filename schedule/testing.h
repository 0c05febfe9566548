// Helpers of schedule/'s own tests. Not for production code.

#ifndef WEIGHTSYNC_SCHEDULE_TESTING_H_
#define WEIGHTSYNC_SCHEDULE_TESTING_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "schedule/catalog.h"
#include "schedule/layout.h"
#include "schedule/route.h"

namespace weightsync {
namespace schedule {
namespace testing {

// Box of {begin, end} per dimension.
inline Box MakeBox(std::initializer_list<std::pair<int64_t, int64_t>> ranges) {
  Box box;
  for (const auto& range : ranges) {
    box.offset.push_back(range.first);
    box.extent.push_back(range.second - range.first);
  }
  return box;
}

inline Param MakeParam(std::string name, Dims shape,
                       DType dtype = DType::kBF16) {
  Param param;
  param.name = std::move(name);
  param.shape = std::move(shape);
  param.dtype = dtype;
  return param;
}

inline OrdinalBox On(uint32_t ordinal, Box box,
                     DType dtype = DType::kUnspecified) {
  OrdinalBox on;
  on.ordinal = ordinal;
  on.dtype = dtype;
  on.box = std::move(box);
  return on;
}

// Every parameter whole.
inline BoxListRef Everything(const Catalog& catalog) {
  std::vector<OrdinalBox> boxes;
  for (uint32_t o = 0; o < catalog.size(); ++o) {
    boxes.push_back(On(o, WholeBox(catalog.param(o).shape)));
  }
  return MakeBoxList(std::move(boxes));
}

inline std::vector<NodeLabels> PlainNodes(int count) {
  std::vector<NodeLabels> nodes(count);
  for (int n = 0; n < count; ++n) {
    nodes[n].name = absl::StrCat(n < 10 ? "n0" : "n", n);
  }
  return nodes;
}

}  // namespace testing
}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_TESTING_H_
