#include "schedule/catalog.h"

#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "schedule/error.h"
#include "schedule/stable_hash.h"

namespace weightsync {
namespace schedule {
namespace {

absl::Status CheckBytes(const Param& param, int64_t* bytes) {
  if (param.name.empty()) {
    return InvalidPlan(kInvalidParameter,
                       "a parameter has an empty name; give every one a name");
  }
  if (param.dtype == DType::kUnspecified || DTypeSize(param.dtype) == 0) {
    return InvalidPlan(kUnknownDType, absl::StrCat("parameter '", param.name,
                                                   "' has no dtype; name one"));
  }
  if (param.shape.size() > kMaxDims) {
    return InvalidPlan(
        kInvalidParameter,
        absl::StrCat("parameter '", param.name, "' has ", param.shape.size(),
                     " dimensions; at most ", kMaxDims, " are supported"));
  }
  int64_t total = DTypeSize(param.dtype);
  for (int64_t extent : param.shape) {
    if (extent <= 0) {
      return InvalidPlan(
          kEmptyDimension,
          absl::StrCat("parameter '", param.name, "' of shape ",
                       DimsString(param.shape),
                       " has a dimension without elements; leave it out of "
                       "the catalog"));
    }
    if (extent > kMaxDimension) {
      return InvalidPlan(
          kDimensionTooLarge,
          absl::StrCat("parameter '", param.name, "' of shape ",
                       DimsString(param.shape),
                       " has a dimension of more than 2^31 elements"));
    }
    if (total > std::numeric_limits<int64_t>::max() / extent) {
      return InvalidPlan(
          kBytesOverflow,
          absl::StrCat("parameter '", param.name, "' of shape ",
                       DimsString(param.shape),
                       " has more bytes than an int64 can count"));
    }
    total *= extent;
  }
  *bytes = total;
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckParam(const Param& param) {
  int64_t bytes = 0;
  return CheckBytes(param, &bytes);
}

absl::StatusOr<Catalog> Catalog::Create(std::vector<Param> params) {
  Catalog catalog;
  if (params.size() > std::numeric_limits<uint32_t>::max() - 1) {
    return InvalidPlan(kInvalidParameter,
                       "the catalog has too many parameters");
  }
  catalog.by_name_.reserve(params.size());
  catalog.params_ = std::move(params);
  StableHash hash;
  hash.Add(static_cast<uint64_t>(catalog.params_.size()));
  for (size_t i = 0; i < catalog.params_.size(); ++i) {
    const Param& param = catalog.params_[i];
    int64_t bytes = 0;
    absl::Status ok = CheckBytes(param, &bytes);
    if (!ok.ok()) return ok;
    if (bytes > std::numeric_limits<int64_t>::max() - catalog.total_bytes_) {
      return InvalidPlan(
          kBytesOverflow,
          absl::StrCat("parameter '", param.name,
                       "' takes the catalog past the bytes that an int64 can "
                       "count"));
    }
    if (!catalog.by_name_.emplace(param.name, static_cast<uint32_t>(i))
             .second) {
      return InvalidPlan(kDuplicateParameter,
                         absl::StrCat("parameter '", param.name,
                                      "' occurs twice in the catalog"));
    }
    catalog.total_bytes_ += bytes;
    catalog.total_elements_ += bytes / DTypeSize(param.dtype);
    hash.Add(absl::string_view(param.name));
    hash.Add(static_cast<uint64_t>(param.dtype));
    hash.Add(static_cast<uint64_t>(param.shape.size()));
    for (int64_t extent : param.shape) hash.Add(extent);
    hash.Add(
        absl::string_view(param.component.empty() ? "main" : param.component));
  }
  catalog.digest_ = hash.Finish();
  return catalog;
}

absl::optional<uint32_t> Catalog::Find(absl::string_view name) const {
  auto it = by_name_.find(name);
  if (it == by_name_.end()) return absl::nullopt;
  return it->second;
}

}  // namespace schedule
}  // namespace weightsync
