#include "daemon/node/copy_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/node/convert.h"
#include "schedule/reshard.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

using transport::MakeError;

absl::StatusOr<v1::CopyPlan> MakeCopyPlan(const NodeLayout& layout,
                                          const WantedTensors& tensors) {
  std::vector<schedule::MemoryBox> boxes;
  boxes.reserve(tensors.size());
  for (int i = 0; i < tensors.size(); ++i) {
    const v1::WantedTensor& tensor = tensors.Get(i);
    absl::optional<uint32_t> ordinal = layout.catalog.Find(tensor.name());
    if (!ordinal.has_value()) {
      return MakeError(absl::StatusCode::kNotFound, "PARAMETER_UNKNOWN",
                       absl::StrCat(tensor.name(), ": the trainers of ",
                                    layout.model, " hold no such parameter"));
    }
    const schedule::Param& param = layout.catalog.param(*ordinal);
    if (FromProto(tensor.dtype()) != param.dtype) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "DTYPE_MISMATCH",
          absl::StrCat(tensor.name(), ": the worker wants ",
                       schedule::DTypeName(FromProto(tensor.dtype())),
                       ", the trainers hold ",
                       schedule::DTypeName(param.dtype)));
    }
    if (!std::equal(tensor.shape().begin(), tensor.shape().end(),
                    param.shape.begin(), param.shape.end())) {
      schedule::Dims shape(tensor.shape().begin(), tensor.shape().end());
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "SHAPE_MISMATCH",
          absl::StrCat(tensor.name(), ": the worker says shape ",
                       schedule::DimsString(shape), ", the trainers ",
                       schedule::DimsString(param.shape)));
    }
    auto box =
        BoxFromProto(tensor.has_box(), tensor.box(), param.shape, param.name);
    if (!box.ok()) return box.status();
    const int64_t element_bytes = schedule::DTypeSize(param.dtype);
    int64_t span = 0;
    auto strides = StridesFromProto(tensor.strides(), box->extent,
                                    element_bytes, param.name, &span);
    if (!strides.ok()) return strides.status();
    schedule::MemoryBox memory;
    memory.ordinal = *ordinal;
    memory.box = *std::move(box);
    memory.memory = i;
    memory.strides = *std::move(strides);
    boxes.push_back(std::move(memory));
  }

  auto copies = schedule::ApplyCopies(layout.catalog, layout.plan, boxes);
  if (!copies.ok()) return copies.status();
  std::stable_sort(
      copies->begin(), copies->end(),
      [](const schedule::BucketCopy& a, const schedule::BucketCopy& b) {
        if (a.bucket != b.bucket) return a.bucket < b.bucket;
        return a.copy.src_offset < b.copy.src_offset;
      });

  v1::CopyPlan plan;
  plan.set_layout_id(layout.id);
  v1::BucketCopies* bucket = nullptr;
  for (const schedule::BucketCopy& from : *copies) {
    const int32_t id = static_cast<int32_t>(from.bucket);
    if (bucket == nullptr || bucket->bucket() != id) {
      bucket = plan.add_buckets();
      bucket->set_bucket(id);
    }
    v1::TensorCopy* to = bucket->add_copies();
    to->set_tensor(from.memory);
    to->set_bucket_offset_bytes(from.copy.src_offset);
    to->set_tensor_offset_bytes(from.copy.dst_offset);
    to->set_run_bytes(from.copy.run_bytes);
    for (size_t d = 0; d < from.copy.extents.size(); ++d) {
      to->add_extents(from.copy.extents[d]);
      to->add_bucket_strides_bytes(from.copy.src_strides[d]);
      to->add_tensor_strides_bytes(from.copy.dst_strides[d]);
    }
  }
  return plan;
}

std::vector<int32_t> BucketsOf(const v1::CopyPlan& plan) {
  std::vector<int32_t> buckets;
  buckets.reserve(plan.buckets_size());
  for (const v1::BucketCopies& bucket : plan.buckets()) {
    buckets.push_back(bucket.bucket());
  }
  return buckets;
}

int64_t BytesOf(const v1::CopyPlan& plan) {
  int64_t sum = 0;
  for (const v1::BucketCopies& bucket : plan.buckets()) {
    for (const v1::TensorCopy& copy : bucket.copies()) {
      int64_t bytes = copy.run_bytes();
      for (int64_t extent : copy.extents()) bytes *= extent;
      sum += bytes;
    }
  }
  return sum;
}

absl::StatusOr<std::shared_ptr<const v1::CopyPlan>> CopyPlanCache::PlanFor(
    const NodeLayout& layout, const WantedTensors& tensors) {
  // Layout and tensors in full: a hash might confuse two workers.
  std::string key = absl::StrCat(layout.id, "\n");
  for (const v1::WantedTensor& tensor : tensors) {
    const std::string bytes = tensor.SerializeAsString();
    absl::StrAppend(&key, bytes.size(), ":", bytes);
  }
  {
    absl::MutexLock lock(&mutex_);
    for (auto it = entries_.begin(); it != entries_.end(); ++it) {
      if (it->first != key) continue;
      entries_.splice(entries_.begin(), entries_, it);
      return it->second;
    }
  }
  auto made = MakeCopyPlan(layout, tensors);
  if (!made.ok()) return made.status();
  auto plan = std::make_shared<const v1::CopyPlan>(*std::move(made));
  absl::MutexLock lock(&mutex_);
  entries_.emplace_front(std::move(key), plan);
  if (entries_.size() > capacity_) entries_.pop_back();
  return plan;
}

}  // namespace daemon
}  // namespace weightsync
