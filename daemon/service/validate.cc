#include "daemon/service/validate.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "daemon/node/convert.h"
#include "daemon/options.h"
#include "proto/status.h"
#include "schedule/block_scale.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {
namespace {

absl::Status Invalid(absl::string_view reason, absl::string_view message) {
  return ErrorStatus(absl::StatusCode::kInvalidArgument, reason, message);
}

// For sentences: a name may be anything, and long.
std::string Quote(absl::string_view name) {
  return name.size() <= 200 ? absl::StrCat("\"", name, "\"")
                            : absl::StrCat("\"", name.substr(0, 200), "...\"");
}

template <typename Numbers>
std::string List(const Numbers& numbers) {
  return absl::StrCat("[", absl::StrJoin(numbers, ", "), "]");
}

absl::Status CheckTensor(
    absl::string_view name, v1::DType dtype,
    const google::protobuf::RepeatedField<int64_t>& shape) {
  if (name.empty() || name.size() > 1024) {
    return Invalid("PARAMETER_NAME_INVALID",
                   absl::StrCat("a parameter's name has 1 to 1024 bytes, not ",
                                name.size()));
  }
  for (const char c : name) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) {
      return Invalid(
          "PARAMETER_NAME_INVALID",
          absl::StrCat("parameter \"", absl::CHexEscape(name.substr(0, 200)),
                       "\" has a control character in its name"));
    }
  }
  const int element_bytes = BytesOf(dtype);
  if (element_bytes == 0) {
    return Invalid("DTYPE_UNKNOWN",
                   absl::StrCat("parameter ", Quote(name), " has type ",
                                static_cast<int>(dtype),
                                ", which is none of DType; name one"));
  }
  if (shape.size() > kMaxDimensions) {
    return Invalid(
        "SHAPE_INVALID",
        absl::StrCat("parameter ", Quote(name), " has ", shape.size(),
                     " dimensions; at most ", kMaxDimensions));
  }
  int64_t bytes = element_bytes;
  for (int64_t dimension : shape) {
    if (dimension <= 0 || dimension > kMaxDimension) {
      return Invalid(
          "SHAPE_INVALID",
          absl::StrCat("parameter ", Quote(name), " has shape ", List(shape),
                       "; every dimension must be from 1 to 2^31"));
    }
    if (__builtin_mul_overflow(bytes, dimension, &bytes)) {
      return Invalid(
          "SHAPE_INVALID",
          absl::StrCat("parameter ", Quote(name), " has shape ", List(shape),
                       ", which is more than 2^63 bytes"));
    }
  }
  return absl::OkStatus();
}

// `box` null: all of the tensor. `shape` was checked.
absl::Status CheckBox(absl::string_view name,
                      const google::protobuf::RepeatedField<int64_t>& shape,
                      const v1::Box* box) {
  if (box == nullptr) return absl::OkStatus();
  bool inside =
      box->offset_size() == shape.size() && box->extent_size() == shape.size();
  for (int d = 0; inside && d < shape.size(); ++d) {
    const int64_t offset = box->offset(d);
    const int64_t extent = box->extent(d);
    inside = offset >= 0 && extent > 0 && offset < shape.Get(d) &&
             extent <= shape.Get(d) - offset;
  }
  if (inside) return absl::OkStatus();
  return Invalid(
      "BOX_OUT_OF_RANGE",
      absl::StrCat("parameter ", Quote(name), ": the box of offset ",
                   List(box->offset()), " and extent ", List(box->extent()),
                   " is not a part of shape ", List(shape)));
}

// Of a box with extents `extent`; empty strides are fine.
absl::Status CheckStrides(
    absl::string_view name,
    const google::protobuf::RepeatedField<int64_t>& strides,
    const google::protobuf::RepeatedField<int64_t>& extent) {
  if (strides.empty()) return absl::OkStatus();
  if (strides.size() != extent.size()) {
    return Invalid(
        "STRIDES_INVALID",
        absl::StrCat("parameter ", Quote(name), " has ", extent.size(),
                     " dimensions and strides ", List(strides)));
  }
  for (int64_t stride : strides) {
    if (stride < 0) {
      return Invalid("STRIDES_INVALID",
                     absl::StrCat("parameter ", Quote(name), " has strides ",
                                  List(strides), "; none may be negative"));
    }
  }
  return absl::OkStatus();
}

// Bytes from the first to behind the last element, or -1 where that overflows.
int64_t ReachBytes(int element_bytes,
                   const google::protobuf::RepeatedField<int64_t>& strides,
                   const google::protobuf::RepeatedField<int64_t>& extent) {
  int64_t last = 0;
  int64_t dense = 1;
  for (int d = extent.size() - 1; d >= 0; --d) {
    const int64_t stride = strides.empty() ? dense : strides.Get(d);
    int64_t step;
    if (__builtin_mul_overflow(extent.Get(d) - 1, stride, &step) ||
        __builtin_add_overflow(last, step, &last) ||
        __builtin_mul_overflow(dense, extent.Get(d), &dense)) {
      return -1;
    }
  }
  int64_t bytes;
  if (__builtin_add_overflow(last, 1, &last) ||
      __builtin_mul_overflow(last, element_bytes, &bytes)) {
    return -1;
  }
  return bytes;
}

const google::protobuf::RepeatedField<int64_t>& ExtentOf(
    const v1::TensorShard& shard) {
  return shard.has_box() ? shard.box().extent() : shard.parameter().shape();
}

// Of the scales of elements of `extent` alone: 0 where a shard has none.
int64_t ScaleBytes(const v1::TensorShard& shard,
                   const google::protobuf::RepeatedField<int64_t>& extent) {
  if (shard.parameter().dtype() != v1::DTYPE_F8_E4M3 ||
      shard.dtype() != v1::DTYPE_BF16) {
    return 0;
  }
  int64_t bytes = BytesOf(v1::DTYPE_F32);
  for (int64_t elements : extent) {
    bytes *= (elements + schedule::kScaleBlock - 1) / schedule::kScaleBlock;
  }
  return bytes;
}

bool Equal(const google::protobuf::RepeatedField<int64_t>& a,
           const google::protobuf::RepeatedField<int64_t>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// A part of a parameter, as a client says it: null for all of it. Refers to the
// message.
struct NamedBox {
  absl::string_view name;
  const v1::Box* box;

  friend bool operator==(const NamedBox& a, const NamedBox& b) {
    if (a.name != b.name) return false;
    if (a.box == nullptr || b.box == nullptr) return a.box == b.box;
    return Equal(a.box->offset(), b.box->offset()) &&
           Equal(a.box->extent(), b.box->extent());
  }
  template <typename H>
  friend H AbslHashValue(H h, const NamedBox& box) {
    h = H::combine(std::move(h), box.name, box.box != nullptr);
    if (box.box == nullptr) return h;
    for (const auto* list : {&box.box->offset(), &box.box->extent()}) {
      h = H::combine(H::combine_contiguous(std::move(h), list->data(),
                                           static_cast<size_t>(list->size())),
                     list->size());
    }
    return h;
  }
};

// The type in which the trainer holds a shard that was checked but for this.
absl::StatusOr<v1::DType> HeldDType(const v1::TensorShard& shard,
                                    const v1::Parameter& parameter,
                                    const v1::Box* box) {
  if (shard.dtype() == v1::DTYPE_UNSPECIFIED ||
      shard.dtype() == parameter.dtype()) {
    return parameter.dtype();
  }
  const schedule::Param param = ParamFromProto(parameter);
  const auto held = ShardDType(
      shard.dtype(), param,
      *BoxFromProto(box != nullptr, shard.box(), param.shape, param.name));
  if (!held.ok()) {
    return Invalid(transport::ReasonOf(held.status()), held.status().message());
  }
  return shard.dtype();
}

absl::Status CheckReplicaNames(absl::string_view model,
                               absl::string_view replica,
                               absl::string_view incarnation, int worker_count,
                               int protocol_version) {
  absl::Status status = CheckModelName(model);
  if (!status.ok()) return status;
  if (!IsName(replica)) {
    return Invalid(
        "REPLICA_NAME_INVALID",
        absl::StrCat(
            "replica ", Quote(replica),
            ": a name is 1 to 63 of [a-z0-9._-], beginning with a letter or "
            "digit"));
  }
  // By this alone a process that took another's name is told from it.
  if (incarnation.empty() || incarnation.size() > kMaxIncarnation) {
    return Invalid(
        "INCARNATION_INVALID",
        absl::StrCat("replica ", Quote(replica), " has an incarnation of ",
                     incarnation.size(), " bytes; give 1 to ", kMaxIncarnation,
                     ", others each time that the engine starts"));
  }
  if (worker_count < 1 || worker_count > kMaxWorkers) {
    return Invalid(
        "WORKER_COUNT_INVALID",
        absl::StrCat("replica ", Quote(replica), " has ", worker_count,
                     " workers; give 1 to ", kMaxWorkers));
  }
  return CheckProtocol(protocol_version);
}

}  // namespace

bool IsName(absl::string_view name) {
  if (name.empty() || name.size() > 63) return false;
  for (char c : name) {
    if (!absl::ascii_islower(c) && !absl::ascii_isdigit(c) && c != '.' &&
        c != '_' && c != '-') {
      return false;
    }
  }
  return absl::ascii_isalnum(name[0]);
}

absl::Status CheckModelName(absl::string_view model) {
  absl::string_view name = model;
  if (!absl::ConsumePrefix(&name, "models/") || !IsName(name)) {
    return Invalid(
        "MODEL_NAME_INVALID",
        absl::StrCat(
            "model ", Quote(model),
            ": say models/{model}, with 1 to 63 of [a-z0-9._-], beginning "
            "with a letter or digit"));
  }
  return absl::OkStatus();
}

absl::Status CheckProtocol(int version) {
  if (version == 0 || (version >= kOldestProtocolVersion &&
                       version <= kNewestProtocolVersion)) {
    return absl::OkStatus();
  }
  return ErrorStatus(
      absl::StatusCode::kFailedPrecondition, "PROTOCOL_UNSUPPORTED",
      absl::StrCat("protocol version ", version,
                   " was asked for; this weightsyncd ", kSoftwareVersion,
                   " speaks ", kOldestProtocolVersion, " to ",
                   kNewestProtocolVersion, "; install matching releases"));
}

int BytesOf(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_BOOL:
    case v1::DTYPE_U8:
    case v1::DTYPE_I8:
    case v1::DTYPE_F8_E5M2:
    case v1::DTYPE_F8_E4M3:
      return 1;
    case v1::DTYPE_I16:
    case v1::DTYPE_U16:
    case v1::DTYPE_F16:
    case v1::DTYPE_BF16:
      return 2;
    case v1::DTYPE_I32:
    case v1::DTYPE_U32:
    case v1::DTYPE_F32:
      return 4;
    case v1::DTYPE_I64:
    case v1::DTYPE_U64:
    case v1::DTYPE_F64:
      return 8;
    default:
      return 0;
  }
}

int64_t ParameterBytes(const v1::Parameter& parameter) {
  int64_t bytes = BytesOf(parameter.dtype());
  for (int64_t dimension : parameter.shape()) bytes *= dimension;
  return bytes;
}

absl::Status CheckIdentity(const v1::TrainerIdentity& identity) {
  absl::Status status = CheckModelName(identity.model());
  if (!status.ok()) return status;
  if (identity.world_size() < 1 || identity.world_size() > kMaxWorldSize) {
    return Invalid("RANK_OUT_OF_RANGE",
                   absl::StrCat("world_size is ", identity.world_size(),
                                "; give 1 to ", kMaxWorldSize));
  }
  if (identity.rank() < 0 || identity.rank() >= identity.world_size()) {
    return Invalid("RANK_OUT_OF_RANGE",
                   absl::StrCat("rank ", identity.rank(), " of world_size ",
                                identity.world_size(), "; give 0 to ",
                                identity.world_size() - 1));
  }
  return CheckProtocol(identity.protocol_version());
}

absl::Status CheckReplica(const v1::RegisterReplica& registration) {
  return CheckReplicaNames(
      registration.model(), registration.replica(), registration.incarnation(),
      registration.worker_count(), registration.protocol_version());
}

absl::Status CheckWorker(const v1::RegisterWorker& registration) {
  absl::Status status = CheckReplicaNames(
      registration.model(), registration.replica(), registration.incarnation(),
      registration.worker_count(), registration.protocol_version());
  if (!status.ok()) return status;
  if (registration.worker_index() < 0 ||
      registration.worker_index() >= registration.worker_count()) {
    return Invalid("WORKER_INDEX_INVALID",
                   absl::StrCat("worker ", registration.worker_index(), " of ",
                                registration.worker_count(), "; give 0 to ",
                                registration.worker_count() - 1));
  }
  if (registration.tensors_size() > kMaxParameters) {
    return Invalid("TOO_MANY_PARAMETERS",
                   absl::StrCat(registration.tensors_size(),
                                " tensors; at most ", kMaxParameters));
  }
  absl::flat_hash_set<absl::string_view> names;
  for (const v1::WantedTensor& tensor : registration.tensors()) {
    status = CheckTensor(tensor.name(), tensor.dtype(), tensor.shape());
    if (!status.ok()) return status;
    status = CheckBox(tensor.name(), tensor.shape(),
                      tensor.has_box() ? &tensor.box() : nullptr);
    if (!status.ok()) return status;
    status =
        CheckStrides(tensor.name(), tensor.strides(),
                     tensor.has_box() ? tensor.box().extent() : tensor.shape());
    if (!status.ok()) return status;
    if (!names.insert(tensor.name()).second) {
      return Invalid("DUPLICATE_NAME",
                     absl::StrCat("tensor ", Quote(tensor.name()),
                                  " is wanted twice by one worker"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckShards(const v1::RegisterShardsRequest& request) {
  if (request.shards_size() > kMaxParameters) {
    return Invalid("TOO_MANY_PARAMETERS",
                   absl::StrCat(request.shards_size(), " shards; at most ",
                                kMaxParameters));
  }
  for (const v1::MemoryRegion& region : request.regions()) {
    if (region.size_bytes() <= 0) {
      return Invalid("MEMORY_SIZE_INVALID",
                     absl::StrCat("a region has ", region.size_bytes(),
                                  " bytes; give a positive number"));
    }
  }
  absl::flat_hash_map<absl::string_view, const v1::Parameter*> parameters;
  absl::flat_hash_set<NamedBox> boxes;
  parameters.reserve(static_cast<size_t>(request.shards_size()));
  boxes.reserve(static_cast<size_t>(request.shards_size()));
  for (const v1::TensorShard& shard : request.shards()) {
    const v1::Parameter& parameter = shard.parameter();
    absl::Status status =
        CheckTensor(parameter.name(), parameter.dtype(), parameter.shape());
    if (!status.ok()) return status;
    const v1::Box* box = shard.has_box() ? &shard.box() : nullptr;
    status = CheckBox(parameter.name(), parameter.shape(), box);
    if (!status.ok()) return status;
    status = CheckStrides(parameter.name(), shard.strides(), ExtentOf(shard));
    if (!status.ok()) return status;

    const v1::Parameter* known =
        parameters.emplace(parameter.name(), &parameter).first->second;
    if (known != &parameter && (known->dtype() != parameter.dtype() ||
                                !Equal(known->shape(), parameter.shape()) ||
                                known->component() != parameter.component())) {
      return Invalid(
          "CATALOG_MISMATCH",
          absl::StrCat(
              "parameter ", Quote(parameter.name()),
              " comes twice, with different types, shapes or components"));
    }
    if (!boxes.insert(NamedBox{parameter.name(), box}).second) {
      return Invalid(
          "DUPLICATE_NAME",
          absl::StrCat(
              "parameter ", Quote(parameter.name()),
              " comes twice with the same box; register each part once"));
    }

    if (shard.region() < 0 || shard.region() >= request.regions_size()) {
      return Invalid("MEMORY_OUT_OF_RANGE",
                     absl::StrCat("parameter ", Quote(parameter.name()),
                                  " lies in region ", shard.region(), " of ",
                                  request.regions_size()));
    }
    const int64_t size = request.regions(shard.region()).size_bytes();
    const absl::StatusOr<v1::DType> held = HeldDType(shard, parameter, box);
    if (!held.ok()) return held.status();
    const int64_t reach =
        ReachBytes(BytesOf(*held), shard.strides(), ExtentOf(shard));
    if (shard.offset_bytes() < 0 || reach < 0 || shard.offset_bytes() > size ||
        reach > size - shard.offset_bytes()) {
      return Invalid(
          "MEMORY_OUT_OF_RANGE",
          absl::StrCat(
              "parameter ", Quote(parameter.name()), " reaches from byte ",
              shard.offset_bytes(), " over ",
              reach < 0 ? std::string("more than 2^63") : absl::StrCat(reach),
              " bytes, beyond its region of ", size, " bytes"));
    }
  }
  return absl::OkStatus();
}

int64_t ShardBytes(const v1::RegisterShardsRequest& request) {
  int64_t bytes = 0;
  for (const v1::TensorShard& shard : request.shards()) {
    int64_t shard_bytes = BytesOf(shard.parameter().dtype());
    for (int64_t extent : ExtentOf(shard)) shard_bytes *= extent;
    bytes += shard_bytes;
  }
  for (const v1::TensorShard& shard : request.shards())
    bytes += ScaleBytes(shard, ExtentOf(shard));
  return bytes;
}

int64_t ModelBytes(
    const google::protobuf::RepeatedPtrField<v1::TensorShard>& shards) {
  int64_t bytes = 0;
  absl::flat_hash_set<absl::string_view> seen;
  for (const v1::TensorShard& shard : shards) {
    const v1::Parameter& parameter = shard.parameter();
    if (!seen.insert(parameter.name()).second) continue;
    bytes += ParameterBytes(parameter) + ScaleBytes(shard, parameter.shape());
  }
  return bytes;
}

absl::Status CheckPublish(const v1::PublishVersionRequest& request) {
  if (request.version() < 0) {
    return Invalid("VERSION_INVALID",
                   absl::StrCat("version ", request.version(),
                                "; give a positive one, or 0 to have the "
                                "server count"));
  }
  if (request.version() > kNewestVersion) {
    return Invalid("VERSION_INVALID",
                   absl::StrCat("version ", request.version(), " is above ",
                                kNewestVersion,
                                ", which leaves no numbers to count on with; "
                                "give a smaller one"));
  }
  if (request.request_id().size() > 128) {
    return Invalid("REQUEST_ID_INVALID",
                   absl::StrCat("request_id has ", request.request_id().size(),
                                " bytes; at most 128"));
  }
  // The options are the coordinator's to judge: they are one thing for all
  // ranks.
  return absl::OkStatus();
}

void Cut(size_t longest, std::string* words) {
  if (words->size() <= longest) return;
  size_t end = longest - 3;
  while (end > 0 &&
         (static_cast<unsigned char>((*words)[end]) & 0xc0) == 0x80) {
    --end;
  }
  words->resize(end);
  words->append("...");
}

v1::Failure CutFailure(const v1::Failure& failure) {
  v1::Failure cut;
  cut.set_code(failure.code());
  cut.set_reason(failure.reason());
  Cut(kLongestClient, cut.mutable_reason());
  // Not the whole of a message of megabytes.
  cut.set_message(failure.message().substr(0, 2 * kLongestWords));
  Cut(kLongestWords, cut.mutable_message());
  return cut;
}

}  // namespace daemon
}  // namespace weightsync
