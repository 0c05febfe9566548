#include "client/cc/apply.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/status.h"

namespace weightsync {
namespace client {
namespace {

absl::Status Invalid(absl::string_view message) {
  return ErrorStatus(
      absl::StatusCode::kInvalidArgument, "COPY_PLAN_INVALID",
      absl::StrCat("The daemon's copy plan ", message,
                   "; nothing was written. Restart the worker, and report it "
                   "if it happens again."));
}

using Strides = google::protobuf::RepeatedField<int64_t>;

// Bytes from the first to behind the last one that the loops touch; -1 when
// that is no number.
int64_t Reach(const v1::TensorCopy& copy, const Strides& strides) {
  int64_t reach = copy.run_bytes();
  for (int d = 0; d < copy.extents_size(); ++d) {
    int64_t step;
    if (strides[d] < 0 || copy.extents(d) <= 0 ||
        __builtin_mul_overflow(copy.extents(d) - 1, strides[d], &step) ||
        __builtin_add_overflow(reach, step, &reach)) {
      return -1;
    }
  }
  return reach;
}

bool Inside(int64_t offset, int64_t reach, int64_t size) {
  return offset >= 0 && reach >= 0 && offset <= size && reach <= size - offset;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const ApplyPlan>> ApplyPlan::Compile(
    const v1::CopyPlan& plan, absl::Span<const Tensor> tensors) {
  std::vector<int64_t> spans;
  spans.reserve(tensors.size());
  for (const Tensor& tensor : tensors) spans.push_back(SpanBytes(tensor));

  auto compiled = std::make_shared<ApplyPlan>();
  compiled->copies_of_.resize(tensors.size());
  compiled->tensor_bytes_.resize(tensors.size());
  for (const Tensor& tensor : tensors) {
    compiled->memory_.push_back(static_cast<char*>(tensor.data));
  }
  for (const v1::BucketCopies& bucket : plan.buckets()) {
    if (!compiled->buckets_.empty() &&
        compiled->buckets_.back() >= bucket.bucket()) {
      return Invalid("does not have its buckets in order");
    }
    const int32_t source = static_cast<int32_t>(compiled->buckets_.size());
    compiled->buckets_.push_back(bucket.bucket());
    compiled->reach_.push_back(0);
    for (const v1::TensorCopy& copy : bucket.copies()) {
      if (copy.tensor() < 0 ||
          copy.tensor() >= static_cast<int>(tensors.size())) {
        return Invalid("names a tensor that was not registered");
      }
      const Tensor& tensor = tensors[copy.tensor()];
      if (copy.run_bytes() <= 0 ||
          copy.extents_size() > transport::kMaxCopyDims ||
          copy.bucket_strides_bytes_size() != copy.extents_size() ||
          copy.tensor_strides_bytes_size() != copy.extents_size()) {
        return Invalid(absl::StrCat("has a malformed copy for ", tensor.name));
      }
      const int64_t from = Reach(copy, copy.bucket_strides_bytes());
      const int64_t to = Reach(copy, copy.tensor_strides_bytes());
      int64_t end;
      if (from < 0 || copy.bucket_offset_bytes() < 0 ||
          __builtin_add_overflow(copy.bucket_offset_bytes(), from, &end)) {
        return Invalid(
            absl::StrCat("reads outside the store for ", tensor.name));
      }
      if (!Inside(copy.tensor_offset_bytes(), to, spans[copy.tensor()])) {
        return Invalid(absl::StrCat("would write outside ", tensor.name));
      }
      compiled->reach_[source] = std::max(compiled->reach_[source], end);

      Copy out;
      out.source = source;
      out.offset = copy.bucket_offset_bytes();
      out.tensor = copy.tensor();
      out.target = copy.tensor_offset_bytes();
      out.task.run_bytes = copy.run_bytes();
      for (int d = 0; d < copy.extents_size(); ++d) {
        transport::CopyDim dim;
        dim.extent = copy.extents(d);
        dim.dst_stride = copy.tensor_strides_bytes(d);
        dim.src_stride = copy.bucket_strides_bytes(d);
        out.task.dims.push_back(dim);
      }
      compiled->bytes_ += out.task.bytes();
      compiled->tensor_bytes_[out.tensor] += out.task.bytes();
      compiled->copies_of_[out.tensor].push_back(
          static_cast<int32_t>(compiled->copies_.size()));
      compiled->copies_.push_back(std::move(out));
    }
  }
  return std::shared_ptr<const ApplyPlan>(std::move(compiled));
}

absl::Status ApplyPlan::CheckSources(absl::Span<const Source> sources) const {
  if (sources.size() != buckets_.size()) {
    return Invalid("names other buckets than the update");
  }
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i].size_bytes < reach_[i]) {
      return Invalid(absl::StrCat("reads ", reach_[i], " bytes of bucket ",
                                  buckets_[i], ", which has ",
                                  sources[i].size_bytes));
    }
  }
  return absl::OkStatus();
}

int32_t ApplyPlan::Find(int32_t bucket) const {
  const auto found = std::lower_bound(buckets_.begin(), buckets_.end(), bucket);
  if (found == buckets_.end() || *found != bucket) return -1;
  return static_cast<int32_t>(found - buckets_.begin());
}

transport::CopyTask ApplyPlan::Task(const Copy& copy, const Source& source,
                                    char* target) {
  transport::CopyTask task = copy.task;
  task.src = source.data + copy.offset;
  task.dst = target + copy.target;
  return task;
}

absl::StatusOr<std::vector<transport::CopyTask>> ApplyPlan::Tasks(
    absl::Span<const Source> sources) const {
  const absl::Status status = CheckSources(sources);
  if (!status.ok()) return status;
  std::vector<transport::CopyTask> tasks;
  tasks.reserve(copies_.size());
  for (const Copy& copy : copies_) {
    tasks.push_back(Task(copy, sources[copy.source], memory_[copy.tensor]));
  }
  return tasks;
}

absl::StatusOr<std::vector<transport::CopyTask>> ApplyPlan::TasksOf(
    int32_t bucket, const Source& source) const {
  return TasksOfInto(bucket, source, memory_);
}

absl::StatusOr<std::vector<transport::CopyTask>> ApplyPlan::TasksOfInto(
    int32_t bucket, const Source& source,
    absl::Span<char* const> targets) const {
  std::vector<transport::CopyTask> tasks;
  const int32_t index = Find(bucket);
  if (index < 0) return tasks;
  if (source.size_bytes < reach_[index]) {
    return Invalid(absl::StrCat("reads ", reach_[index], " bytes of bucket ",
                                bucket, ", which has ", source.size_bytes));
  }
  for (const Copy& copy : copies_) {
    if (copy.source != index) continue;
    tasks.push_back(Task(copy, source, targets[copy.tensor]));
  }
  return tasks;
}

absl::StatusOr<std::vector<transport::CopyTask>> ApplyPlan::TasksInto(
    int tensor, absl::Span<const Source> sources, char* target) const {
  const absl::Status status = CheckSources(sources);
  if (!status.ok()) return status;
  std::vector<transport::CopyTask> tasks;
  for (const int32_t index : copies_of_[tensor]) {
    const Copy& copy = copies_[index];
    tasks.push_back(Task(copy, sources[copy.source], target));
  }
  return tasks;
}

std::map<int32_t, int64_t> ApplyPlan::TensorsOf(int32_t bucket) const {
  std::map<int32_t, int64_t> tensors;
  const int32_t index = Find(bucket);
  for (const Copy& copy : copies_) {
    if (copy.source == index) tensors[copy.tensor] += copy.task.bytes();
  }
  return tensors;
}

absl::StatusOr<std::vector<transport::CopyTask>> DirectTasks(
    const v1::DirectCopies& copies, absl::Span<const Tensor> tensors,
    absl::Span<const int32_t> ordinals, const char* data, int64_t bytes) {
  std::vector<transport::CopyTask> tasks;
  for (const v1::TensorCopy& copy : copies.copies()) {
    if (copy.tensor() < 0 ||
        copy.tensor() >= static_cast<int>(tensors.size()) ||
        copy.tensor() >= static_cast<int>(ordinals.size())) {
      return Invalid("names a tensor that was not registered");
    }
    const Tensor& tensor = tensors[copy.tensor()];
    const int64_t element = DTypeBytes(tensor.dtype);
    if (copy.run_bytes() <= 0 || copy.run_bytes() % element != 0 ||
        copy.tensor_offset_bytes() % element != 0 ||
        copy.extents_size() > transport::kMaxCopyDims ||
        copy.bucket_strides_bytes_size() != copy.extents_size() ||
        copy.tensor_strides_bytes_size() != copy.extents_size()) {
      return Invalid(absl::StrCat("has a malformed copy for ", tensor.name));
    }
    if (!Inside(copy.bucket_offset_bytes(),
                Reach(copy, copy.bucket_strides_bytes()), bytes)) {
      return Invalid(
          absl::StrCat("reads outside the trainer's memory for ", tensor.name));
    }
    if (!Inside(copy.tensor_offset_bytes(),
                Reach(copy, copy.tensor_strides_bytes()), SpanBytes(tensor))) {
      return Invalid(absl::StrCat("would write outside ", tensor.name));
    }
    // Elements follow one another here as they do in the parameter.
    int64_t first = 0;
    int64_t dense = 1;
    const std::vector<int64_t> strides = PartStrides(tensor);
    const absl::Span<const int64_t> extent = PartExtent(tensor);
    for (size_t d = extent.size(); d-- > 0;) {
      if ((extent[d] > 1 && strides[d] != dense) ||
          (d > 0 && extent[d] != tensor.shape[d])) {
        return Invalid(absl::StrCat(tensor.name,
                                    " cannot be read from a trainer's memory"));
      }
      if (d == 0 && tensor.box.has_value()) {
        first = tensor.box->offset[0] * dense;
      }
      dense *= extent[d];
    }
    transport::CopyTask task;
    task.dst = static_cast<char*>(tensor.data) + copy.tensor_offset_bytes();
    task.src = data + copy.bucket_offset_bytes();
    task.run_bytes = copy.run_bytes();
    task.ordinal = static_cast<uint32_t>(ordinals[copy.tensor()]);
    task.element_bytes = static_cast<int32_t>(element);
    task.first_element = first + copy.tensor_offset_bytes() / element;
    for (int d = 0; d < copy.extents_size(); ++d) {
      if (copy.tensor_strides_bytes(d) % element != 0) {
        return Invalid(absl::StrCat("has a malformed copy for ", tensor.name));
      }
      transport::CopyDim dim;
      dim.extent = copy.extents(d);
      dim.dst_stride = copy.tensor_strides_bytes(d);
      dim.src_stride = copy.bucket_strides_bytes(d);
      dim.element_stride = copy.tensor_strides_bytes(d) / element;
      task.dims.push_back(dim);
    }
    tasks.push_back(std::move(task));
  }
  return tasks;
}

}  // namespace client
}  // namespace weightsync
