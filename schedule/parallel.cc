#include "schedule/parallel.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

// The number after `marker`, or -1: 12 for ("model.layers.12.mlp", "layers.").
int NumberAfter(absl::string_view name, absl::string_view marker) {
  const size_t at = name.find(marker);
  if (at == absl::string_view::npos) return -1;
  absl::string_view rest = name.substr(at + marker.size());
  rest = rest.substr(0, rest.find('.'));
  int number = -1;
  return absl::SimpleAtoi(rest, &number) ? number : -1;
}

absl::Status CheckCount(absl::string_view what, int count) {
  if (count >= 1) return absl::OkStatus();
  return InvalidPlan(kInvalidCount, absl::StrCat(what, " is ", count,
                                                 "; it must be at "
                                                 "least one"));
}

// The stage of a layer when `layers` are dealt over `stages` in order.
int StageOf(const ParamRole& role, int layers, int stages) {
  if (role.head) return stages - 1;
  if (role.layer < 0) return 0;
  return static_cast<int>(static_cast<int64_t>(role.layer) * stages /
                          std::max(1, layers));
}

int CountLayers(const std::vector<ParamRole>& roles) {
  int layers = 0;
  for (const ParamRole& role : roles) layers = std::max(layers, role.layer + 1);
  return layers;
}

int CountExperts(const std::vector<ParamRole>& roles) {
  int experts = 0;
  for (const ParamRole& role : roles) {
    experts = std::max(experts, role.expert + 1);
  }
  return experts;
}

std::vector<ParamRole> RolesOf(const Catalog& catalog,
                               const ModelConfig& config) {
  std::vector<ParamRole> roles;
  roles.reserve(catalog.size());
  for (const Param& param : catalog.params()) {
    roles.push_back(RoleOf(param, config));
  }
  return roles;
}

// A tensor-parallel part of a parameter; false when it is empty.
bool TpBox(const Param& param, const ParamRole& role, int tp, int t,
           int64_t vocab_pad, Box* box) {
  *box = WholeBox(param.shape);
  if (tp == 1 || role.tp_dim < 0) return true;
  const int64_t extent = param.shape[role.tp_dim];
  const Range range = role.vocab ? VocabChunk(extent, vocab_pad, tp, t)
                                 : UnitChunk(extent, role.tp_unit, tp, t);
  if (range.empty()) return false;
  box->offset[role.tp_dim] = range.begin;
  box->extent[role.tp_dim] = range.end - range.begin;
  return true;
}

OrdinalBox Held(uint32_t ordinal, Box box) {
  OrdinalBox held;
  held.ordinal = ordinal;
  held.box = std::move(box);
  return held;
}

// Part i of n of what one tensor-parallel rank holds, along dimension 0.
void AddChunk(uint32_t ordinal, const Box& box, int n, int i,
              std::vector<OrdinalBox>* out) {
  if (box.dims() == 0) {
    if (i == 0) out->push_back(Held(ordinal, box));
    return;
  }
  const Range range = CeilChunk(box.extent[0], n, i);
  if (range.empty()) return;
  Box part = box;
  part.offset[0] += range.begin;
  part.extent[0] = range.end - range.begin;
  out->push_back(Held(ordinal, std::move(part)));
}

// Flat part i of n of a box, in the box's own row-major order.
void AddFlat(uint32_t ordinal, const Box& box, int64_t begin, int64_t end,
             std::vector<OrdinalBox>* out) {
  std::vector<Box> parts;
  BoxesOfFlatRange(box.extent, begin, end, &parts);
  for (Box& part : parts) {
    for (int d = 0; d < box.dims(); ++d) part.offset[d] += box.offset[d];
    out->push_back(Held(ordinal, std::move(part)));
  }
}

}  // namespace

Range CeilChunk(int64_t extent, int n, int i) {
  const int64_t step = (extent + n - 1) / n;
  Range range;
  range.begin = std::min(extent, step * i);
  range.end = std::min(extent, step * (i + 1));
  return range;
}

Range UnitChunk(int64_t extent, int64_t unit, int n, int i) {
  if (unit < 1 || extent % unit != 0) unit = 1;
  const int64_t units = extent / unit;
  Range range;
  if (units < n && n % units == 0) {
    range.begin = i / (n / units) * unit;
    range.end = range.begin + unit;
    return range;
  }
  range.begin = units * i / n * unit;
  range.end = units * (i + 1) / n * unit;
  return range;
}

Range VocabChunk(int64_t vocab, int64_t pad, int n, int i) {
  const int64_t multiple = std::max<int64_t>(1, pad) * n;
  const int64_t padded = (vocab + multiple - 1) / multiple * multiple;
  const int64_t rows = padded / n;
  Range range;
  range.begin = std::min(vocab, rows * i);
  range.end = std::min(vocab, rows * (i + 1));
  return range;
}

void FlatShard(const Catalog& catalog, absl::Span<const uint32_t> ordinals,
               int n, int i, std::vector<OrdinalBox>* out) {
  int64_t total = 0;
  for (uint32_t o : ordinals) total += catalog.param(o).Elements();
  const Range shard = CeilChunk(total, n, i);
  int64_t at = 0;
  for (uint32_t o : ordinals) {
    const int64_t elements = catalog.param(o).Elements();
    const int64_t begin = std::max<int64_t>(0, shard.begin - at);
    const int64_t end = std::min(elements, shard.end - at);
    if (begin < end) {
      AddFlat(o, WholeBox(catalog.param(o).shape), begin, end, out);
    }
    at += elements;
  }
}

ParamRole RoleOf(const Param& param, const ModelConfig& config) {
  ParamRole role;
  const absl::string_view name = param.name;
  role.layer = NumberAfter(name, "layers.");
  role.expert = NumberAfter(name, ".experts.");
  role.head = role.layer < 0 && !absl::StrContains(name, "embed_tokens");
  auto has = [&](absl::string_view part) {
    return absl::StrContains(name, part);
  };
  auto unit = [](int64_t rows) { return rows > 0 ? rows : int64_t{1}; };
  if (has("embed_tokens") || has("lm_head")) {
    role.tp_dim = 0;
    role.vocab = true;
  } else if (has(".q_proj.") || has(".k_proj.") || has(".v_proj.")) {
    role.tp_dim = 0;
    role.tp_unit = unit(config.head_dim);
  } else if (has(".q_b_proj.")) {
    role.tp_dim = 0;
    role.tp_unit = unit(config.qk_nope + config.qk_rope);
  } else if (has(".kv_b_proj.")) {
    role.tp_dim = 0;
    role.tp_unit = unit(config.qk_nope + config.v_dim);
  } else if (has(".gate_proj.") || has(".up_proj.")) {
    role.tp_dim = 0;
  } else if (has(".o_proj.")) {
    role.tp_dim = 1;
    role.tp_unit = unit(config.v_dim > 0 ? config.v_dim : config.head_dim);
  } else if (has(".down_proj.")) {
    role.tp_dim = 1;
  }
  if (role.tp_dim >= static_cast<int>(param.shape.size())) role.tp_dim = -1;
  return role;
}

absl::StatusOr<std::vector<BoxListRef>> TrainerLists(const Catalog& catalog,
                                                     const ModelConfig& config,
                                                     const TrainerSpec& spec) {
  for (const auto& count :
       {std::make_pair("ranks", spec.ranks), std::make_pair("pp", spec.pp),
        std::make_pair("tp", spec.tp),
        std::make_pair("replicas", spec.replicas),
        std::make_pair("ep", spec.ep)}) {
    absl::Status ok = CheckCount(count.first, count.second);
    if (!ok.ok()) return ok;
  }
  const int64_t divisor =
      static_cast<int64_t>(spec.pp) * spec.tp * spec.replicas;
  if (spec.ranks % divisor != 0 ||
      (spec.ranks / spec.pp / spec.replicas) % spec.ep != 0) {
    return InvalidPlan(kInvalidCount,
                       absl::StrCat(spec.ranks, " trainer ranks cannot be pp ",
                                    spec.pp, " x tp ", spec.tp, " x replicas ",
                                    spec.replicas, " with ep ", spec.ep));
  }
  const std::vector<ParamRole> roles = RolesOf(catalog, config);
  const int layers = CountLayers(roles);
  const int experts = CountExperts(roles);
  const int shards = static_cast<int>(spec.ranks / divisor);
  const int columns = spec.ep;
  const int column_ranks = shards * spec.tp / columns;

  // Ranks of the replicas of a stage hold the same lists.
  std::vector<BoxListRef> lists(spec.ranks);
  for (int stage = 0; stage < spec.pp; ++stage) {
    // What every column has, and what each has alone, in catalog order.
    std::vector<uint32_t> common;
    std::map<int, std::vector<uint32_t>> of_column;
    for (uint32_t o = 0; o < catalog.size(); ++o) {
      if (StageOf(roles[o], layers, spec.pp) != stage) continue;
      if (roles[o].expert >= 0 && spec.ep > 1) {
        of_column[static_cast<int>(static_cast<int64_t>(roles[o].expert) *
                                   columns / experts)]
            .push_back(o);
      } else {
        common.push_back(o);
      }
    }
    std::vector<uint32_t> members;
    BoxListRef whole;  // of a rank without any sharding
    for (int g = 0; g < shards * spec.tp; ++g) {
      const int shard = g / spec.tp;
      const int t = g % spec.tp;
      BoxListRef list;
      if (spec.sharding == DataSharding::kReplicated && spec.tp == 1 &&
          spec.ep == 1 && whole != nullptr) {
        list = whole;
      } else {
        std::vector<OrdinalBox> boxes;
        std::vector<std::pair<uint32_t, Box>> flat;  // of one layer
        int flat_layer = -2;
        auto flush = [&] {
          int64_t total = 0;
          for (const auto& item : flat) total += item.second.Volume();
          const Range range = CeilChunk(total, shards, shard);
          int64_t at = 0;
          for (const auto& item : flat) {
            const int64_t volume = item.second.Volume();
            const int64_t begin = std::max<int64_t>(0, range.begin - at);
            const int64_t end = std::min(volume, range.end - at);
            if (begin < end) {
              AddFlat(item.first, item.second, begin, end, &boxes);
            }
            at += volume;
          }
          flat.clear();
        };
        const std::vector<uint32_t>& own = of_column[g % columns];
        members.clear();
        std::merge(common.begin(), common.end(), own.begin(), own.end(),
                   std::back_inserter(members));
        boxes.reserve(members.size());
        for (uint32_t o : members) {
          const Param& param = catalog.param(o);
          const ParamRole& role = roles[o];
          if (role.expert >= 0 && spec.ep > 1) {
            AddChunk(o, WholeBox(param.shape), column_ranks, g / columns,
                     &boxes);
            continue;
          }
          Box box;
          if (!TpBox(param, role, spec.tp, t, 1, &box)) continue;
          switch (spec.sharding) {
            case DataSharding::kReplicated:
              boxes.push_back(Held(o, std::move(box)));
              break;
            case DataSharding::kDim0:
              AddChunk(o, box, shards, shard, &boxes);
              break;
            case DataSharding::kFlatTensor: {
              const Range range = CeilChunk(box.Volume(), shards, shard);
              if (!range.empty()) {
                AddFlat(o, box, range.begin, range.end, &boxes);
              }
              break;
            }
            case DataSharding::kFlatLayer:
              if (role.layer != flat_layer) flush();
              flat_layer = role.layer;
              flat.emplace_back(o, std::move(box));
              break;
          }
        }
        flush();
        list = MakeBoxList(std::move(boxes));
        if (whole == nullptr) whole = list;
      }
      for (int replica = 0; replica < spec.replicas; ++replica) {
        lists[(static_cast<size_t>(stage) * spec.replicas + replica) * shards *
                  spec.tp +
              g] = list;
      }
    }
  }
  return lists;
}

absl::StatusOr<std::vector<BoxListRef>> WorkerLists(const Catalog& catalog,
                                                    const ModelConfig& config,
                                                    const WorkerSpec& spec) {
  for (const auto& count :
       {std::make_pair("tp", spec.tp), std::make_pair("pp", spec.pp),
        std::make_pair("ep", spec.ep)}) {
    absl::Status ok = CheckCount(count.first, count.second);
    if (!ok.ok()) return ok;
  }
  const std::vector<ParamRole> roles = RolesOf(catalog, config);
  const int layers = CountLayers(roles);
  const int experts = std::max(1, CountExperts(roles));
  const int width = std::max(spec.tp, spec.ep);
  std::vector<BoxListRef> lists;
  lists.reserve(static_cast<size_t>(width) * spec.pp);
  for (int stage = 0; stage < spec.pp; ++stage) {
    for (int w = 0; w < width; ++w) {
      std::vector<OrdinalBox> boxes;
      for (uint32_t o = 0; o < catalog.size(); ++o) {
        const ParamRole& role = roles[o];
        if (StageOf(role, layers, spec.pp) != stage) continue;
        const Param& param = catalog.param(o);
        if (role.expert >= 0 && spec.ep > 1) {
          if (static_cast<int64_t>(role.expert) * spec.ep / experts ==
              w % spec.ep) {
            boxes.push_back(Held(o, WholeBox(param.shape)));
          }
          continue;
        }
        Box box;
        if (TpBox(param, role, spec.tp, w % spec.tp, spec.vocab_pad, &box)) {
          boxes.push_back(Held(o, std::move(box)));
        }
      }
      lists.push_back(MakeBoxList(std::move(boxes)));
    }
  }
  return lists;
}

namespace {

// Appends rows [range) of `ordinal` as the next rows of a fused memory.
void AppendRows(const Catalog& catalog, uint32_t ordinal, Range range,
                int32_t memory, int64_t* row, std::vector<MemoryBox>* out) {
  if (range.empty()) return;
  const Param& param = catalog.param(ordinal);
  MemoryBox box;
  box.ordinal = ordinal;
  box.box = SliceBox(param.shape, 0, range.begin, range.end);
  box.memory = memory;
  box.strides = DenseStrides(param.shape, DTypeSize(param.dtype));
  box.offset = *row * box.strides[0];
  *row += range.end - range.begin;
  out->push_back(std::move(box));
}

absl::Status CheckFusable(const Catalog& catalog, uint32_t a, uint32_t b) {
  const Param& x = catalog.param(a);
  const Param& y = catalog.param(b);
  bool ok = x.dtype == y.dtype && !x.shape.empty() &&
            x.shape.size() == y.shape.size();
  for (size_t d = 1; ok && d < x.shape.size(); ++d) {
    ok = x.shape[d] == y.shape[d];
  }
  if (ok) return absl::OkStatus();
  return InvalidPlan(
      kInvalidLayout,
      absl::StrCat("parameter '", x.name, "' of shape ", DimsString(x.shape),
                   " cannot be fused with '", y.name, "' of shape ",
                   DimsString(y.shape)));
}

}  // namespace

absl::Status FusedQkv(const Catalog& catalog, uint32_t q, uint32_t k,
                      uint32_t v, int64_t head_dim, int tp, int t,
                      QkvOrder order, int32_t memory,
                      std::vector<MemoryBox>* out) {
  for (uint32_t other : {k, v}) {
    absl::Status ok = CheckFusable(catalog, q, other);
    if (!ok.ok()) return ok;
  }
  const int64_t q_rows = catalog.param(q).shape[0];
  const int64_t k_rows = catalog.param(k).shape[0];
  if (head_dim < 1 || q_rows % head_dim != 0 || k_rows % head_dim != 0 ||
      q_rows % k_rows != 0 || k_rows != catalog.param(v).shape[0]) {
    return InvalidPlan(
        kInvalidLayout,
        absl::StrCat("parameter '", catalog.param(q).name, "' with ", q_rows,
                     " rows and its k and v with ", k_rows,
                     " are not heads of ", head_dim));
  }
  const Range kv = UnitChunk(k_rows, head_dim, tp, t);
  int64_t row = 0;
  if (order == QkvOrder::kConcatenated) {
    AppendRows(catalog, q, UnitChunk(q_rows, head_dim, tp, t), memory, &row,
               out);
    AppendRows(catalog, k, kv, memory, &row, out);
    AppendRows(catalog, v, kv, memory, &row, out);
    return absl::OkStatus();
  }
  if (k_rows / head_dim % tp != 0) {
    return InvalidPlan(
        kInvalidLayout,
        absl::StrCat("parameter '", catalog.param(k).name, "' has ",
                     k_rows / head_dim, " heads, which tp ", tp,
                     " does not divide; grouped qkv tensors "
                     "cannot be cut so"));
  }
  const int64_t ratio = q_rows / k_rows;
  for (int64_t at = kv.begin; at < kv.end; at += head_dim) {
    AppendRows(catalog, q, Range{at * ratio, (at + head_dim) * ratio}, memory,
               &row, out);
    AppendRows(catalog, k, Range{at, at + head_dim}, memory, &row, out);
    AppendRows(catalog, v, Range{at, at + head_dim}, memory, &row, out);
  }
  return absl::OkStatus();
}

absl::Status FusedGateUp(const Catalog& catalog, uint32_t gate, uint32_t up,
                         int tp, int t, int32_t memory,
                         std::vector<MemoryBox>* out) {
  absl::Status ok = CheckFusable(catalog, gate, up);
  if (!ok.ok()) return ok;
  int64_t row = 0;
  for (uint32_t part : {gate, up}) {
    AppendRows(catalog, part, UnitChunk(catalog.param(part).shape[0], 1, tp, t),
               memory, &row, out);
  }
  return absl::OkStatus();
}

}  // namespace schedule
}  // namespace weightsync
