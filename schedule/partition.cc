// SourcePartition: checks the shards of all trainer ranks against the catalog
// and gives every element one owning rank.

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "schedule/block_scale.h"
#include "schedule/error.h"
#include "schedule/layout.h"

namespace weightsync {
namespace schedule {

class PartitionBuilder {
 public:
  PartitionBuilder(const Catalog& catalog, absl::Span<const SourceRank> sources)
      : catalog_(catalog), input_(sources) {}

  absl::StatusOr<std::shared_ptr<const SourcePartition>> Build();

 private:
  // A shard as the lists give it: equal lists are looked at once.
  struct Entry {
    const Box* box;
    int32_t list;
  };
  // Boxes that are held by the same set of ranks, in catalog order.
  struct ReplicaSet {
    std::vector<int32_t> sources;  // sorted indices into input_
    std::vector<std::pair<uint32_t, const Box*>> items;
    int64_t bytes = 0;
  };
  struct Owned {
    uint32_t ordinal;
    SourcePartition::Region region;
  };

  absl::Status CollectLists();
  absl::Status CheckShard(const OrdinalBox& shard, int32_t list) const;
  absl::Status CollectEntries();
  absl::Status CheckParam(uint32_t ordinal, absl::Span<const Entry> entries);
  absl::Status CheckOverlaps(uint32_t ordinal,
                             absl::Span<const Entry> distinct) const;
  absl::Status HoleError(uint32_t ordinal,
                         absl::Span<const Entry> distinct) const;
  void Assign(uint32_t ordinal, absl::Span<const Entry> same_box);
  void ShareReplicas();
  void ShareSet(ReplicaSet* set);
  void Own(uint32_t ordinal, Box box, int32_t source);
  std::shared_ptr<const SourcePartition> Finish();

  std::string RanksOf(int32_t list) const;
  std::string Named(uint32_t ordinal) const {
    return absl::StrCat("parameter '", catalog_.param(ordinal).name, "'");
  }

  const Catalog& catalog_;
  const absl::Span<const SourceRank> input_;
  std::vector<const BoxList*> lists_;
  // Those of lists_ that had scales added.
  std::vector<BoxListRef> with_scales_;
  std::vector<std::vector<int32_t>> list_sources_;  // sorted
  std::vector<size_t> entry_begin_;
  std::vector<Entry> entries_;
  std::vector<int64_t> load_;
  std::vector<int64_t> exclusive_;
  std::vector<ReplicaSet> sets_;
  absl::flat_hash_map<std::vector<int32_t>, size_t> set_of_lists_;
  std::vector<Owned> owned_;
};

absl::StatusOr<std::shared_ptr<const SourcePartition>>
PartitionBuilder::Build() {
  load_.assign(input_.size(), 0);
  absl::Status ok = CollectLists();
  if (!ok.ok()) return ok;
  ok = CollectEntries();
  if (!ok.ok()) return ok;
  owned_.reserve(entries_.size());
  for (uint32_t o = 0; o < catalog_.size(); ++o) {
    Entry* begin = entries_.data() + entry_begin_[o];
    Entry* end = entries_.data() + entry_begin_[o + 1];
    auto less = [](const Entry& a, const Entry& b) {
      if (*a.box != *b.box) return *a.box < *b.box;
      return a.list < b.list;
    };
    if (!std::is_sorted(begin, end, less)) std::sort(begin, end, less);
    ok = CheckParam(o, absl::MakeConstSpan(begin, end - begin));
    if (!ok.ok()) return ok;
  }
  exclusive_ = load_;  // so far only what has a single holder
  ShareReplicas();
  return Finish();
}

absl::Status PartitionBuilder::CollectLists() {
  absl::flat_hash_map<const BoxList*, int32_t> by_pointer;
  absl::flat_hash_map<uint64_t, std::vector<int32_t>> by_digest;
  absl::flat_hash_set<int32_t> ranks;
  for (size_t i = 0; i < input_.size(); ++i) {
    const SourceRank& source = input_[i];
    if (source.node < 0) {
      return InvalidPlan(
          kInvalidTopology,
          absl::StrCat("trainer rank ", source.rank, " is on no node"));
    }
    if (!ranks.insert(source.rank).second) {
      return InvalidPlan(
          kInvalidTopology,
          absl::StrCat("trainer rank ", source.rank, " is given twice"));
    }
    if (source.shards == nullptr) continue;
    auto found = by_pointer.find(source.shards.get());
    int32_t list = -1;
    if (found != by_pointer.end()) {
      list = found->second;
    } else {
      std::vector<int32_t>& candidates = by_digest[source.shards->digest()];
      for (int32_t candidate : candidates) {
        if (lists_[candidate]->boxes() == source.shards->boxes()) {
          list = candidate;
        }
      }
      if (list < 0) {
        list = static_cast<int32_t>(lists_.size());
        lists_.push_back(source.shards.get());
        list_sources_.emplace_back();
        candidates.push_back(list);
      }
      by_pointer.emplace(source.shards.get(), list);
    }
    list_sources_[list].push_back(static_cast<int32_t>(i));
  }
  for (const BoxList*& list : lists_) {
    absl::StatusOr<std::vector<OrdinalBox>> scales =
        ScalesFor(catalog_, list->boxes());
    if (!scales.ok()) return scales.status();
    if (scales->empty()) continue;
    scales->insert(scales->begin(), list->boxes().begin(), list->boxes().end());
    with_scales_.push_back(MakeBoxList(*std::move(scales)));
    list = with_scales_.back().get();
  }
  return absl::OkStatus();
}

absl::Status PartitionBuilder::CheckShard(const OrdinalBox& shard,
                                          int32_t list) const {
  if (shard.ordinal >= catalog_.size()) {
    return InvalidPlan(
        kUnknownOrdinal,
        absl::StrCat("parameter number ", shard.ordinal,
                     " is not in the catalog of ", catalog_.size(),
                     "; it comes from ", RanksOf(list)));
  }
  const Param& param = catalog_.param(shard.ordinal);
  if (!InsideShape(shard.box, param.shape)) {
    return InvalidPlan(
        kBoxOutsideTensor,
        absl::StrCat(Named(shard.ordinal), " of shape ",
                     DimsString(param.shape), " cannot hold the box ",
                     BoxString(shard.box), " of ", RanksOf(list)));
  }
  if (shard.dtype != DType::kUnspecified && shard.dtype != param.dtype) {
    absl::StatusOr<Cast> cast = CastBetween(shard.dtype, param.dtype);
    if (!cast.ok()) {
      return InvalidPlan(
          kDTypeMismatch,
          absl::StrCat(Named(shard.ordinal), " is ", DTypeName(param.dtype),
                       " in the catalog and ", DTypeName(shard.dtype), " on ",
                       RanksOf(list), ": ", cast.status().message()));
    }
  }
  return absl::OkStatus();
}

absl::Status PartitionBuilder::CollectEntries() {
  std::vector<size_t>& begin = entry_begin_;
  begin.assign(catalog_.size() + 1, 0);
  for (size_t l = 0; l < lists_.size(); ++l) {
    for (const OrdinalBox& shard : lists_[l]->boxes()) {
      absl::Status ok = CheckShard(shard, static_cast<int32_t>(l));
      if (!ok.ok()) return ok;
      ++begin[shard.ordinal + 1];
    }
  }
  for (size_t o = 1; o < begin.size(); ++o) begin[o] += begin[o - 1];
  entries_.resize(begin.back());
  std::vector<size_t> next(begin.begin(), begin.end() - 1);
  for (size_t l = 0; l < lists_.size(); ++l) {
    for (const OrdinalBox& shard : lists_[l]->boxes()) {
      entries_[next[shard.ordinal]++] =
          Entry{&shard.box, static_cast<int32_t>(l)};
    }
  }
  return absl::OkStatus();
}

absl::Status PartitionBuilder::CheckParam(uint32_t ordinal,
                                          absl::Span<const Entry> entries) {
  // Distinct boxes first; replicas need no check among themselves.
  std::vector<Entry> distinct_storage;
  absl::Span<const Entry> distinct = entries;
  for (size_t i = 1; i < entries.size(); ++i) {
    if (*entries[i].box == *entries[i - 1].box) {
      for (size_t j = 0; j < entries.size(); ++j) {
        if (j == 0 || *entries[j].box != *entries[j - 1].box) {
          distinct_storage.push_back(entries[j]);
        }
      }
      distinct = distinct_storage;
      break;
    }
  }
  if (distinct.size() > 1) {
    absl::Status ok = CheckOverlaps(ordinal, distinct);
    if (!ok.ok()) return ok;
  }
  int64_t covered = 0;
  for (const Entry& entry : distinct) covered += entry.box->Volume();
  if (covered != catalog_.param(ordinal).Elements()) {
    return HoleError(ordinal, distinct);
  }
  for (size_t i = 0; i < entries.size();) {
    size_t j = i + 1;
    while (j < entries.size() && *entries[j].box == *entries[i].box) ++j;
    Assign(ordinal, entries.subspan(i, j - i));
    i = j;
  }
  return absl::OkStatus();
}

absl::Status PartitionBuilder::CheckOverlaps(
    uint32_t ordinal, absl::Span<const Entry> distinct) const {
  // A sweep along the first dimension that is cut at all. The entries are
  // sorted by it, because they agree on the dimensions before.
  const int n = distinct[0].box->dims();
  int sweep = 0;
  while (sweep < n && distinct.front().box->offset[sweep] ==
                          distinct.back().box->offset[sweep]) {
    ++sweep;
  }
  if (sweep == n) sweep = std::max(0, n - 1);
  std::vector<const Entry*> active;
  for (const Entry& entry : distinct) {
    size_t kept = 0;
    for (const Entry* other : active) {
      if (n > 0 && other->box->end(sweep) <= entry.box->offset[sweep]) continue;
      if (Intersects(*other->box, *entry.box)) {
        return InvalidPlan(
            kOverlappingShards,
            absl::StrCat(Named(ordinal), " has shards that overlap without ",
                         "being replicas: ", BoxString(*other->box), " of ",
                         RanksOf(other->list), " and ", BoxString(*entry.box),
                         " of ", RanksOf(entry.list)));
      }
      active[kept++] = other;
    }
    active.resize(kept);
    active.push_back(&entry);
  }
  return absl::OkStatus();
}

absl::Status PartitionBuilder::HoleError(
    uint32_t ordinal, absl::Span<const Entry> distinct) const {
  const Param& param = catalog_.param(ordinal);
  std::vector<Box> holes = {WholeBox(param.shape)};
  for (const Entry& entry : distinct) {
    std::vector<Box> left;
    for (const Box& hole : holes) Subtract(hole, *entry.box, &left);
    holes.swap(left);
  }
  std::sort(holes.begin(), holes.end());
  int64_t missing = 0;
  for (const Box& hole : holes) missing += hole.Volume();
  return InvalidPlan(
      kHoleInParameter,
      absl::StrCat(Named(ordinal), " of shape ", DimsString(param.shape),
                   " is not held whole: no trainer rank has ",
                   BoxString(holes.front()), " (", missing,
                   " elements are missing in all)"));
}

void PartitionBuilder::Own(uint32_t ordinal, Box box, int32_t source) {
  load_[source] += box.Volume() * DTypeSize(catalog_.param(ordinal).dtype);
  owned_.push_back(
      Owned{ordinal, SourcePartition::Region{std::move(box), source}});
}

void PartitionBuilder::Assign(uint32_t ordinal,
                              absl::Span<const Entry> same_box) {
  if (same_box.size() == 1 && list_sources_[same_box[0].list].size() == 1) {
    Own(ordinal, *same_box[0].box, list_sources_[same_box[0].list][0]);
    return;
  }
  std::vector<int32_t> lists;
  lists.reserve(same_box.size());
  for (const Entry& entry : same_box) lists.push_back(entry.list);
  auto inserted = set_of_lists_.try_emplace(lists, sets_.size());
  if (inserted.second) {
    ReplicaSet set;
    for (int32_t list : lists) {
      set.sources.insert(set.sources.end(), list_sources_[list].begin(),
                         list_sources_[list].end());
    }
    std::sort(set.sources.begin(), set.sources.end());
    set.sources.erase(std::unique(set.sources.begin(), set.sources.end()),
                      set.sources.end());
    sets_.push_back(std::move(set));
  }
  ReplicaSet& set = sets_[inserted.first->second];
  set.items.emplace_back(ordinal, same_box[0].box);
  set.bytes +=
      same_box[0].box->Volume() * DTypeSize(catalog_.param(ordinal).dtype);
}

void PartitionBuilder::ShareReplicas() {
  // Those with the least choice first: the others fill up around them.
  std::vector<ReplicaSet*> order;
  for (ReplicaSet& set : sets_) order.push_back(&set);
  std::stable_sort(order.begin(), order.end(),
                   [](const ReplicaSet* a, const ReplicaSet* b) {
                     return a->sources.size() < b->sources.size();
                   });
  for (ReplicaSet* set : order) ShareSet(set);
}

void PartitionBuilder::ShareSet(ReplicaSet* set) {
  // The level L with sum over ranks of max(0, L - load) = bytes.
  std::vector<int64_t> loads;
  for (int32_t s : set->sources) loads.push_back(load_[s]);
  std::sort(loads.begin(), loads.end());
  double level = 0;
  double sum = 0;
  for (size_t k = 0; k < loads.size(); ++k) {
    sum += static_cast<double>(loads[k]);
    level = (static_cast<double>(set->bytes) + sum) / (k + 1);
    if (k + 1 == loads.size() || level <= static_cast<double>(loads[k + 1])) {
      break;
    }
  }
  // Rank after rank takes the next span of the set's bytes, until the span's
  // end `until`, counted from the set's first byte: errors do not add up.
  size_t at = 0;
  auto quota = [&](size_t i) {
    return std::max(0.0, level - static_cast<double>(load_[set->sources[i]]));
  };
  double until = quota(0);
  const double slack = 0.002 * static_cast<double>(set->bytes) /
                       static_cast<double>(set->sources.size());
  double done = 0;
  for (const auto& item : set->items) {
    const int64_t size = DTypeSize(catalog_.param(item.first).dtype);
    Box rest = *item.second;
    while (true) {
      const double bytes = static_cast<double>(rest.Volume() * size);
      const bool last = at + 1 == set->sources.size();
      if (last || done + bytes <= until + slack) {
        done += bytes;
        Own(item.first, std::move(rest), set->sources[at]);
        break;
      }
      int dim = 0;
      while (dim + 1 < rest.dims() && rest.extent[dim] == 1) ++dim;
      int64_t rows = 0;
      if (rest.dims() > 0 && until - done > slack) {
        const double row = bytes / static_cast<double>(rest.extent[dim]);
        rows = std::min(static_cast<int64_t>((until - done) / row),
                        rest.extent[dim] - 1);
      }
      // The quota of a rank is taken before its load grows by this span.
      const size_t owner = at++;
      until += quota(at);
      if (rows > 0) {
        Box head = rest;
        head.extent[dim] = rows;
        rest.offset[dim] += rows;
        rest.extent[dim] -= rows;
        done += static_cast<double>(head.Volume() * size);
        Own(item.first, std::move(head), set->sources[owner]);
      }
    }
  }
}

std::shared_ptr<const SourcePartition> PartitionBuilder::Finish() {
  auto partition = std::make_shared<SourcePartition>();
  partition->catalog_digest_ = catalog_.digest();
  for (size_t i = 0; i < input_.size(); ++i) {
    partition->sources_.push_back(SourcePartition::Source{
        input_[i].rank, input_[i].node, load_[i], exclusive_[i]});
  }
  std::vector<size_t>& begin = partition->begin_;
  begin.assign(catalog_.size() + 1, 0);
  for (const Owned& owned : owned_) ++begin[owned.ordinal + 1];
  for (size_t o = 1; o < begin.size(); ++o) begin[o] += begin[o - 1];
  partition->regions_.resize(owned_.size());
  std::vector<size_t> next(begin.begin(), begin.end() - 1);
  for (Owned& owned : owned_) {
    partition->regions_[next[owned.ordinal]++] = std::move(owned.region);
  }
  auto less = [](const SourcePartition::Region& a,
                 const SourcePartition::Region& b) { return a.box < b.box; };
  for (uint32_t o = 0; o < catalog_.size(); ++o) {
    auto first = partition->regions_.begin() + begin[o];
    auto last = partition->regions_.begin() + begin[o + 1];
    if (!std::is_sorted(first, last, less)) std::sort(first, last, less);
  }
  return partition;
}

std::string PartitionBuilder::RanksOf(int32_t list) const {
  const std::vector<int32_t>& sources = list_sources_[list];
  std::string text = absl::StrCat("trainer rank ", input_[sources[0]].rank);
  if (sources.size() > 1) {
    absl::StrAppend(&text, " (and ", sources.size() - 1,
                    " more with equal shards)");
  }
  return text;
}

absl::StatusOr<std::shared_ptr<const SourcePartition>> SourcePartition::Create(
    const Catalog& catalog, absl::Span<const SourceRank> sources) {
  return PartitionBuilder(catalog, sources).Build();
}

}  // namespace schedule
}  // namespace weightsync
