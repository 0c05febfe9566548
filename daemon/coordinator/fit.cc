#include "daemon/coordinator/fit.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "daemon/node/convert.h"
#include "schedule/block_scale.h"
#include "schedule/error.h"
#include "schedule/layout.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

// The reasons of schedule/ in the words of the API.
Fault FromPlan(const absl::Status& status) {
  static const auto* const kReasons = new std::map<std::string, std::string>{
      {schedule::kDuplicateParameter, "DUPLICATE_NAME"},
      {schedule::kInvalidParameter, "SHAPE_INVALID"},
      {schedule::kEmptyDimension, "SHAPE_INVALID"},
      {schedule::kDimensionTooLarge, "SHAPE_INVALID"},
      {schedule::kBytesOverflow, "SHAPE_INVALID"},
      {schedule::kUnknownDType, "DTYPE_UNKNOWN"},
      {schedule::kBoxOutsideTensor, "BOX_OUT_OF_RANGE"},
      {schedule::kOverlappingShards, "SHARDS_OVERLAP"},
      {schedule::kHoleInParameter, "SHARDS_HOLE"},
  };
  const std::string reason = schedule::ReasonOf(status);
  auto it = kReasons->find(reason);
  return Fault(status.code(), it == kReasons->end() ? reason : it->second,
               std::string(status.message()));
}

absl::string_view ComponentOf(const v1::Parameter& parameter) {
  return parameter.component().empty()
             ? absl::string_view("main")
             : absl::string_view(parameter.component());
}

// How trainers hold a parameter. Unset: as it is.
struct Holding {
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
  int32_t rank = 0;  // who says so
};

// DTYPE_MISMATCH where one rank has its scales made and another brings its own:
// each would send a part of the tensor, and the scales of the one are not those
// of the other. What is cast without scales may come from any types.
Fault FindHoldings(const std::vector<const v1::RankShards*>& ranks,
                   absl::flat_hash_map<absl::string_view, Holding>* holdings) {
  for (const v1::RankShards* rank : ranks) {
    for (const v1::ShardBox& shard : rank->shards()) {
      const v1::Parameter& parameter = rank->parameters(shard.parameter());
      const v1::DType dtype = HeldOtherwise(shard, parameter);
      const auto found =
          holdings->emplace(parameter.name(), Holding{dtype, rank->rank()});
      const Holding& first = found.first->second;
      if (parameter.dtype() != v1::DTYPE_F8_E4M3 || first.dtype == dtype) {
        continue;
      }
      const bool cast_first = first.dtype != v1::DTYPE_UNSPECIFIED;
      return Fault(
          StatusCode::kInvalidArgument, "DTYPE_MISMATCH",
          absl::StrCat(parameter.name(), ": rank ", first.rank, " holds it as ",
                       cast_first ? "BF16" : "F8_E4M3", ", rank ", rank->rank(),
                       " as ", cast_first ? "F8_E4M3" : "BF16",
                       ", and they would not have the same scales; register "
                       "it from one type on all ranks"));
    }
  }
  return Fault();
}

bool AnyHeldOtherwise(const std::vector<const v1::RankShards*>& ranks) {
  return std::any_of(
      ranks.begin(), ranks.end(), [](const v1::RankShards* rank) {
        return std::any_of(rank->shards().begin(), rank->shards().end(),
                           [rank](const v1::ShardBox& shard) {
                             return HeldOtherwise(
                                        shard,
                                        rank->parameters(shard.parameter())) !=
                                    v1::DTYPE_UNSPECIFIED;
                           });
      });
}

std::string Describe(const v1::Parameter& parameter) {
  const schedule::Param param = ParamFromProto(parameter);
  return absl::StrCat(schedule::DTypeName(param.dtype), " ",
                      schedule::DimsString(param.shape));
}

}  // namespace

Fault CheckShards(const v1::RankShards& shards, int64_t* bytes) {
  std::vector<schedule::Param> params;
  params.reserve(static_cast<size_t>(shards.parameters_size()));
  for (const v1::Parameter& parameter : shards.parameters()) {
    params.push_back(ParamFromProto(parameter));
  }
  const auto catalog = schedule::Catalog::Create(std::move(params));
  if (!catalog.ok()) return FromPlan(catalog.status());
  *bytes = 0;
  for (const v1::ShardBox& shard : shards.shards()) {
    if (shard.parameter() < 0 ||
        shard.parameter() >= shards.parameters_size()) {
      return Fault(
          StatusCode::kInvalidArgument, "BOX_OUT_OF_RANGE",
          absl::StrCat("rank ", shards.rank(), " names parameter number ",
                       shard.parameter(), " of ", shards.parameters_size()));
    }
    const schedule::Param& param =
        catalog->param(static_cast<uint32_t>(shard.parameter()));
    const auto box =
        BoxFromProto(shard.has_box(), shard.box(), param.shape, param.name);
    if (!box.ok()) return FromPlan(box.status());
    const auto held = ShardDType(shard.dtype(), param, *box);
    if (!held.ok()) {
      Fault fault = FromPlan(held.status());
      absl::StrAppend(&fault.message, " (rank ", shards.rank(), ")");
      return fault;
    }
    *bytes += box->Volume() * schedule::DTypeSize(param.dtype);
    if (*held != param.dtype && param.dtype == schedule::DType::kF8E4M3) {
      *bytes += schedule::ScaleBoxOf(param, *box)->Volume() *
                schedule::DTypeSize(schedule::DType::kF32);
    }
  }
  return Fault();
}

v1::DType HeldOtherwise(const v1::ShardBox& shard,
                        const v1::Parameter& parameter) {
  return shard.dtype() == parameter.dtype() ? v1::DTYPE_UNSPECIFIED
                                            : shard.dtype();
}

bool SameParameter(const v1::Parameter& a, const v1::Parameter& b) {
  return a.dtype() == b.dtype() && ComponentOf(a) == ComponentOf(b) &&
         std::equal(a.shape().begin(), a.shape().end(), b.shape().begin(),
                    b.shape().end());
}

Fault CheckAgreement(const v1::RankShards& known, const v1::RankShards& fresh) {
  absl::flat_hash_map<absl::string_view, const v1::Parameter*> by_name;
  for (const v1::Parameter& parameter : known.parameters()) {
    by_name[parameter.name()] = &parameter;
  }
  for (const v1::Parameter& parameter : fresh.parameters()) {
    auto it = by_name.find(parameter.name());
    if (it == by_name.end()) continue;
    const v1::Parameter& other = *it->second;
    if (SameParameter(other, parameter)) continue;
    return Fault(
        StatusCode::kInvalidArgument, "CATALOG_MISMATCH",
        absl::StrCat(parameter.name(), ": rank ", fresh.rank(), " says ",
                     Describe(parameter), " in component ",
                     ComponentOf(parameter), ", rank ", known.rank(), " says ",
                     Describe(other), " in component ", ComponentOf(other)));
  }
  return Fault();
}

Fault FitCatalog(const std::vector<const v1::RankShards*>& ranks,
                 std::shared_ptr<const schedule::Catalog>* fitted) {
  absl::flat_hash_map<absl::string_view, Holding> holdings;
  if (AnyHeldOtherwise(ranks)) {
    Fault fault = FindHoldings(ranks, &holdings);
    if (!fault.ok()) return fault;
  }
  std::vector<schedule::Param> params;
  // Of each parameter that a rank says; names refer to what ranks said.
  absl::flat_hash_map<absl::string_view, uint32_t> ordinals;
  std::vector<std::vector<uint32_t>> of_rank(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    const auto count = static_cast<size_t>(ranks[r]->parameters_size());
    of_rank[r].reserve(count);
    if (r == 0) {
      params.reserve(count);
      ordinals.reserve(count);
    }
    for (const v1::Parameter& parameter : ranks[r]->parameters()) {
      const auto known = ordinals.emplace(parameter.name(),
                                          static_cast<uint32_t>(params.size()));
      of_rank[r].push_back(known.first->second);
      if (!known.second) continue;
      params.push_back(ParamFromProto(parameter));
      if (params.back().dtype != schedule::DType::kF8E4M3) continue;
      const auto holding = holdings.find(parameter.name());
      if (holding == holdings.end() ||
          holding->second.dtype == v1::DTYPE_UNSPECIFIED) {
        continue;
      }
      auto scale = schedule::ScaleParam(params.back());
      if (!scale.ok()) return FromPlan(scale.status());
      if (holdings.contains(scale->name)) continue;
      params.push_back(*std::move(scale));
    }
  }
  auto catalog = schedule::Catalog::Create(std::move(params));
  if (!catalog.ok()) return FromPlan(catalog.status());

  std::vector<schedule::SourceRank> sources;
  sources.reserve(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    const v1::RankShards& rank = *ranks[r];
    std::vector<schedule::OrdinalBox> boxes;
    boxes.reserve(static_cast<size_t>(rank.shards_size()));
    for (const v1::ShardBox& shard : rank.shards()) {
      const v1::Parameter& parameter = rank.parameters(shard.parameter());
      schedule::OrdinalBox box;
      box.ordinal = of_rank[r][static_cast<size_t>(shard.parameter())];
      box.box =
          *BoxFromProto(shard.has_box(), shard.box(),
                        catalog->param(box.ordinal).shape, parameter.name());
      box.dtype = FromProto(HeldOtherwise(shard, parameter));
      boxes.push_back(std::move(box));
    }
    schedule::SourceRank source;
    source.rank = rank.rank();
    source.shards = schedule::MakeBoxList(std::move(boxes));
    sources.push_back(std::move(source));
  }
  const auto partition = schedule::SourcePartition::Create(*catalog, sources);
  if (!partition.ok()) return FromPlan(partition.status());
  *fitted = std::make_shared<const schedule::Catalog>(*std::move(catalog));
  return Fault();
}

Fault CheckTensors(const v1::RegisterWorker& registration, int64_t* bytes) {
  std::vector<schedule::Param> params;
  for (const v1::WantedTensor& tensor : registration.tensors()) {
    schedule::Param param;
    param.name = tensor.name();
    param.dtype = FromProto(tensor.dtype());
    param.shape.assign(tensor.shape().begin(), tensor.shape().end());
    params.push_back(std::move(param));
  }
  const auto catalog = schedule::Catalog::Create(params);
  if (!catalog.ok()) return FromPlan(catalog.status());
  *bytes = 0;
  for (int i = 0; i < registration.tensors_size(); ++i) {
    const v1::WantedTensor& tensor = registration.tensors(i);
    const auto box = BoxFromProto(tensor.has_box(), tensor.box(),
                                  params[i].shape, tensor.name());
    if (!box.ok()) return FromPlan(box.status());
    *bytes += box->Volume() * schedule::DTypeSize(params[i].dtype);
  }
  return Fault();
}

Fault CheckWanted(const schedule::Catalog& catalog,
                  const v1::RegisterWorker& registration) {
  for (const v1::WantedTensor& tensor : registration.tensors()) {
    const absl::optional<uint32_t> ordinal = catalog.Find(tensor.name());
    if (!ordinal.has_value()) {
      return Fault(StatusCode::kFailedPrecondition, "PARAMETER_UNKNOWN",
                   absl::StrCat(tensor.name(),
                                ": the trainers hold no such parameter, but "
                                "worker ",
                                registration.worker_index(), " of replica ",
                                registration.replica(), " wants it"));
    }
    const schedule::Param& param = catalog.param(*ordinal);
    if (FromProto(tensor.dtype()) != param.dtype) {
      return Fault(
          StatusCode::kFailedPrecondition, "DTYPE_MISMATCH",
          absl::StrCat(tensor.name(), ": the trainers have ",
                       schedule::DTypeName(param.dtype), ", worker ",
                       registration.worker_index(), " of replica ",
                       registration.replica(), " wants ",
                       schedule::DTypeName(FromProto(tensor.dtype())),
                       "; weights are cast where trainers copy them out, and "
                       "nowhere else: register the tensor in the trainers' "
                       "type, or have the trainers register it in the "
                       "worker's"));
    }
    if (!std::equal(param.shape.begin(), param.shape.end(),
                    tensor.shape().begin(), tensor.shape().end())) {
      return Fault(
          StatusCode::kFailedPrecondition, "SHAPE_MISMATCH",
          absl::StrCat(tensor.name(), ": the trainers have shape ",
                       schedule::DimsString(param.shape), ", worker ",
                       registration.worker_index(), " of replica ",
                       registration.replica(), " wants ",
                       schedule::DimsString(schedule::Dims(
                           tensor.shape().begin(), tensor.shape().end()))));
    }
  }
  return Fault();
}

bool Covered(const schedule::Box& wanted,
             const std::vector<schedule::Box>& held) {
  std::vector<schedule::Box> left = {wanted};
  for (const schedule::Box& box : held) {
    std::vector<schedule::Box> next;
    for (const schedule::Box& part : left) {
      schedule::Subtract(part, box, &next);
    }
    left = std::move(next);
    if (left.empty()) return true;
  }
  return left.empty();
}

Fault CheckCoverage(const schedule::Catalog& catalog,
                    const std::vector<const v1::RegisterWorker*>& workers,
                    absl::string_view replica) {
  std::vector<std::vector<schedule::Box>> held(catalog.size());
  for (const v1::RegisterWorker* worker : workers) {
    for (const v1::WantedTensor& tensor : worker->tensors()) {
      const absl::optional<uint32_t> ordinal = catalog.Find(tensor.name());
      if (!ordinal.has_value()) continue;
      auto box = BoxFromProto(tensor.has_box(), tensor.box(),
                              catalog.param(*ordinal).shape, tensor.name());
      if (box.ok()) held[*ordinal].push_back(*std::move(box));
    }
  }
  for (uint32_t ordinal = 0; ordinal < catalog.size(); ++ordinal) {
    const schedule::Param& param = catalog.param(ordinal);
    if (Covered(schedule::WholeBox(param.shape), held[ordinal])) continue;
    return Fault(
        StatusCode::kFailedPrecondition, "REPLICA_INCOMPLETE",
        absl::StrCat(replica,
                     ": its workers together do not take all "
                     "of ",
                     param.name, "; register it as partial if that is meant"));
  }
  return Fault();
}

}  // namespace daemon
}  // namespace weightsync
