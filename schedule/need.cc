#include "schedule/need.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

// Joins neighbours of one class along dimension d.
void MergeAlong(int d, std::vector<NeedMap::Cell>* cells) {
  auto less = [d](const NeedMap::Cell& a, const NeedMap::Cell& b) {
    if (a.need_class != b.need_class) return a.need_class < b.need_class;
    for (int i = 0; i < a.box.dims(); ++i) {
      if (i == d) continue;
      if (a.box.offset[i] != b.box.offset[i]) {
        return a.box.offset[i] < b.box.offset[i];
      }
      if (a.box.extent[i] != b.box.extent[i]) {
        return a.box.extent[i] < b.box.extent[i];
      }
    }
    return a.box.offset[d] < b.box.offset[d];
  };
  std::sort(cells->begin(), cells->end(), less);
  size_t kept = 0;
  for (size_t i = 1; i < cells->size(); ++i) {
    NeedMap::Cell& a = (*cells)[kept];
    NeedMap::Cell& b = (*cells)[i];
    bool join = a.need_class == b.need_class && a.box.end(d) == b.box.offset[d];
    for (int k = 0; join && k < a.box.dims(); ++k) {
      join = k == d || (a.box.offset[k] == b.box.offset[k] &&
                        a.box.extent[k] == b.box.extent[k]);
    }
    if (join) {
      a.box.extent[d] += b.box.extent[d];
    } else if (++kept != i) {
      (*cells)[kept] = std::move(b);
    }
  }
  cells->resize(kept + 1);
}

}  // namespace

absl::StatusOr<NeedGroups> NeedGroups::Create(
    absl::Span<const WorkerNeed> workers) {
  NeedGroups groups;
  absl::flat_hash_map<const BoxList*, int32_t> by_pointer;
  absl::flat_hash_map<uint64_t, std::vector<int32_t>> by_digest;
  std::map<int32_t, std::vector<int32_t>> node_lists;
  for (const WorkerNeed& worker : workers) {
    if (worker.node < 0) {
      return InvalidPlan(
          kInvalidTopology,
          absl::StrCat("worker ", worker.worker, " is on no node"));
    }
    if (worker.boxes == nullptr || worker.boxes->boxes().empty()) continue;
    int32_t list = -1;
    auto found = by_pointer.find(worker.boxes.get());
    if (found != by_pointer.end()) {
      list = found->second;
    } else {
      std::vector<int32_t>& candidates = by_digest[worker.boxes->digest()];
      for (int32_t candidate : candidates) {
        if (groups.lists[candidate]->boxes() == worker.boxes->boxes()) {
          list = candidate;
        }
      }
      if (list < 0) {
        list = static_cast<int32_t>(groups.lists.size());
        groups.lists.push_back(worker.boxes.get());
        candidates.push_back(list);
      }
      by_pointer.emplace(worker.boxes.get(), list);
    }
    node_lists[worker.node].push_back(list);
  }
  // Keyed by digests, so that the order of groups depends neither on the order
  // of workers nor on the numbers of nodes.
  std::map<std::vector<int32_t>, std::vector<int32_t>> by_lists;
  for (auto& node : node_lists) {
    std::vector<int32_t>& lists = node.second;
    std::sort(lists.begin(), lists.end());
    lists.erase(std::unique(lists.begin(), lists.end()), lists.end());
    by_lists[lists].push_back(node.first);
  }
  struct Group {
    std::vector<uint64_t> signature;
    const std::vector<int32_t>* lists;
    const std::vector<int32_t>* nodes;
  };
  std::vector<Group> order;
  for (const auto& entry : by_lists) {
    Group group{{}, &entry.first, &entry.second};
    for (int32_t list : entry.first) {
      group.signature.push_back(groups.lists[list]->digest());
    }
    std::sort(group.signature.begin(), group.signature.end());
    order.push_back(std::move(group));
  }
  std::sort(order.begin(), order.end(), [](const Group& a, const Group& b) {
    return a.signature < b.signature;
  });
  for (Group& group : order) {
    groups.group_lists.push_back(*group.lists);
    groups.group_nodes.push_back(*group.nodes);
    groups.signature.push_back(std::move(group.signature));
  }
  return groups;
}

std::vector<int32_t> NeedGroups::Nodes(absl::Span<const int32_t> groups) const {
  std::vector<int32_t> nodes;
  for (int32_t group : groups) {
    nodes.insert(nodes.end(), group_nodes[group].begin(),
                 group_nodes[group].end());
  }
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

absl::StatusOr<NeedMap> NeedMap::Create(const Catalog& catalog,
                                        const NeedGroups& groups) {
  NeedMap map;
  map.catalog_ = &catalog;
  map.InternClass({});
  std::vector<std::vector<int32_t>> list_groups(groups.lists.size());
  for (size_t g = 0; g < groups.group_lists.size(); ++g) {
    for (int32_t list : groups.group_lists[g]) {
      list_groups[list].push_back(static_cast<int32_t>(g));
    }
  }
  // The lists in an order of their own, for classes to be numbered alike.
  std::vector<int32_t> order(groups.lists.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return groups.lists[a]->digest() < groups.lists[b]->digest();
  });
  std::vector<int32_t> list_class(groups.lists.size());
  for (int32_t l : order) list_class[l] = map.InternClass(list_groups[l]);

  map.begin_.assign(catalog.size() + 1, 0);
  for (const BoxList* list : groups.lists) {
    for (const OrdinalBox& need : list->boxes()) {
      if (need.ordinal >= catalog.size()) {
        return InvalidPlan(kUnknownOrdinal,
                           absl::StrCat("parameter number ", need.ordinal,
                                        ", needed by a worker, is not in the "
                                        "catalog of ",
                                        catalog.size()));
      }
      const Param& param = catalog.param(need.ordinal);
      if (!InsideShape(need.box, param.shape)) {
        return InvalidPlan(
            kBoxOutsideTensor,
            absl::StrCat("parameter '", param.name, "' of shape ",
                         DimsString(param.shape), " cannot fill the box ",
                         BoxString(need.box), " that a worker needs"));
      }
      if (need.dtype != DType::kUnspecified && need.dtype != param.dtype) {
        return InvalidPlan(
            kDTypeMismatch,
            absl::StrCat("parameter '", param.name, "' is ",
                         DTypeName(param.dtype), " in the catalog and ",
                         DTypeName(need.dtype), " on a worker"));
      }
      ++map.begin_[need.ordinal + 1];
    }
  }
  for (size_t o = 1; o < map.begin_.size(); ++o) {
    map.begin_[o] += map.begin_[o - 1];
  }
  map.needs_.resize(map.begin_.back());
  std::vector<size_t> next(map.begin_.begin(), map.begin_.end() - 1);
  for (int32_t l : order) {
    const BoxList& list = *groups.lists[l];
    for (size_t i = 0; i < list.boxes().size(); ++i) {
      const OrdinalBox& need = list.boxes()[i];
      map.needs_[next[need.ordinal]++] =
          Need{&need.box, list_class[l], l, list.box_ids()[i]};
    }
  }
  return map;
}

int32_t NeedMap::InternClass(std::vector<int32_t> groups) {
  auto inserted =
      class_ids_.try_emplace(groups, static_cast<int32_t>(classes_.size()));
  if (inserted.second) classes_.push_back(std::move(groups));
  return inserted.first->second;
}

int32_t NeedMap::Union(int32_t a, int32_t b) {
  if (a == b || b == 0) return a;
  if (a == 0) return b;
  auto inserted = unions_.try_emplace(std::make_pair(a, b), 0);
  if (inserted.second) {
    std::vector<int32_t> groups;
    std::set_union(classes_[a].begin(), classes_[a].end(), classes_[b].begin(),
                   classes_[b].end(), std::back_inserter(groups));
    const int32_t id = InternClass(std::move(groups));
    unions_[std::make_pair(a, b)] = id;
    return id;
  }
  return inserted.first->second;
}

absl::Span<const NeedMap::Cell> NeedMap::Cells(uint32_t ordinal) {
  const Param& param = catalog_->param(ordinal);
  const absl::Span<const Need> needs = absl::MakeConstSpan(
      needs_.data() + begin_[ordinal], begin_[ordinal + 1] - begin_[ordinal]);
  std::vector<std::unique_ptr<Pattern>>& candidates =
      patterns_[std::make_pair(param.shape, needs.size())];
  // Experts of one worker follow each other: the latest is the likeliest.
  for (size_t i = candidates.size(); i > 0; --i) {
    if (Matches(*candidates[i - 1], param.shape, needs)) {
      if (i < candidates.size()) {
        std::swap(candidates[i - 1], candidates.back());
      }
      return candidates.back()->cells;
    }
  }
  auto pattern = std::make_unique<Pattern>();
  pattern->shape = param.shape;
  for (const Need& need : needs) {
    pattern->needs.emplace_back(need.list, need.box_id);
  }
  pattern->cells = Cut(param.shape, needs);
  candidates.push_back(std::move(pattern));
  return candidates.back()->cells;
}

bool NeedMap::Matches(const Pattern& pattern, const Dims& shape,
                      absl::Span<const Need> needs) {
  if (pattern.shape != shape || pattern.needs.size() != needs.size()) {
    return false;
  }
  for (size_t i = 0; i < needs.size(); ++i) {
    if (pattern.needs[i].first != needs[i].list ||
        pattern.needs[i].second != needs[i].box_id) {
      return false;
    }
  }
  return true;
}

std::vector<NeedMap::Cell> NeedMap::Cut(absl::Span<const int64_t> shape,
                                        absl::Span<const Need> needs) {
  std::vector<Cell> cells = {Cell{WholeBox(shape), 0}};
  std::vector<Cell> next;
  std::vector<Box> rest;
  for (const Need& need : needs) {
    next.clear();
    for (Cell& cell : cells) {
      Box shared;
      const int32_t both = Union(cell.need_class, need.need_class);
      if (both == cell.need_class || !Intersect(cell.box, *need.box, &shared)) {
        next.push_back(std::move(cell));
        continue;
      }
      rest.clear();
      Subtract(cell.box, *need.box, &rest);
      for (Box& box : rest) {
        next.push_back(Cell{std::move(box), cell.need_class});
      }
      next.push_back(Cell{std::move(shared), both});
    }
    cells.swap(next);
  }
  while (cells.size() > 1 && !shape.empty()) {
    const size_t before = cells.size();
    for (int d = static_cast<int>(shape.size()) - 1; d >= 0; --d) {
      MergeAlong(d, &cells);
    }
    if (cells.size() == before) break;
  }
  std::sort(cells.begin(), cells.end(),
            [](const Cell& a, const Cell& b) { return a.box < b.box; });
  return cells;
}

}  // namespace schedule
}  // namespace weightsync
