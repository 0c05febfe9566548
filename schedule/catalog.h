// The catalog of a model: the ordered list of its parameters. A parameter's
// place in it, its ordinal, is how plans, digests and buckets name it.

#ifndef WEIGHTSYNC_SCHEDULE_CATALOG_H_
#define WEIGHTSYNC_SCHEDULE_CATALOG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "schedule/box.h"
#include "schedule/dtype.h"

namespace weightsync {
namespace schedule {

// The largest extent of a dimension, in elements: 2^31.
inline constexpr int64_t kMaxDimension = int64_t{1} << 31;

struct Param {
  std::string name;
  DType dtype = DType::kUnspecified;
  Dims shape;             // elements; empty for a scalar
  std::string component;  // "main", "draft", ...; empty means "main"

  int64_t Elements() const {
    int64_t n = 1;
    for (int64_t extent : shape) n *= extent;
    return n;
  }
  int64_t Bytes() const { return Elements() * DTypeSize(dtype); }
};

// Whether a catalog could have it: the errors of Catalog::Create, but for
// DUPLICATE_PARAMETER.
absl::Status CheckParam(const Param& param);

// Immutable after Create; safe to share between threads. Moves keep it valid;
// plans that were made from it refer to it only by ordinal and digest.
class Catalog {
 public:
  // An empty catalog.
  Catalog() = default;
  Catalog(Catalog&&) = default;
  Catalog& operator=(Catalog&&) = default;

  // INVALID_ARGUMENT, with the parameter's name first:
  //   INVALID_PARAMETER    no name, or more than kMaxDims dimensions
  //   DUPLICATE_PARAMETER  the name occurs twice
  //   UNKNOWN_DTYPE        dtype unspecified
  //   EMPTY_DIMENSION      an extent of zero or less: nothing could be sent
  //   DIMENSION_TOO_LARGE  an extent of more than 2^31 elements
  //   BYTES_OVERFLOW       the parameter, or the sum so far, exceeds int64
  static absl::StatusOr<Catalog> Create(std::vector<Param> params);

  uint32_t size() const { return static_cast<uint32_t>(params_.size()); }
  // REQUIRES: ordinal < size().
  const Param& param(uint32_t ordinal) const { return params_[ordinal]; }
  const std::vector<Param>& params() const { return params_; }
  absl::optional<uint32_t> Find(absl::string_view name) const;

  int64_t total_bytes() const { return total_bytes_; }
  int64_t total_elements() const { return total_elements_; }
  // Equal for equal names, dtypes, shapes and components in equal order.
  uint64_t digest() const { return digest_; }

 private:
  std::vector<Param> params_;
  // Names are those of params_, whose elements stay where they are when the
  // vector is moved.
  absl::flat_hash_map<absl::string_view, uint32_t> by_name_;
  int64_t total_bytes_ = 0;
  int64_t total_elements_ = 0;
  uint64_t digest_ = 0;
};

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_CATALOG_H_
