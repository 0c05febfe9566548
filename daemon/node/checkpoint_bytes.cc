#include "daemon/node/checkpoint_bytes.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "schedule/box.h"
#include "schedule/dtype.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

namespace {

using transport::MakeError;
using transport::SafetensorsTensor;

absl::Status Mismatch(absl::string_view message) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "CHECKPOINT_MISMATCH",
                   message);
}

std::string Show(absl::string_view dtype, absl::Span<const int64_t> shape) {
  return absl::StrCat(dtype, " [", absl::StrJoin(shape, ", "), "]");
}

// Elements [begin, end) of a piece, counted in its own row-major order.
absl::Status ForPieceRuns(const schedule::Piece& piece,
                          const schedule::Param& param, int64_t begin,
                          int64_t end,
                          const std::function<absl::Status(BucketRun)>& fn) {
  const schedule::Box& box = piece.box;
  const int dims = box.dims();
  const int64_t element_bytes = schedule::DTypeSize(param.dtype);
  // Dimensions [tail, dims) make one contiguous run of the tensor.
  int tail = dims;
  int64_t run = 1;
  while (tail > 0) {
    --tail;
    run *= box.extent[tail];
    if (box.extent[tail] != param.shape[tail]) break;
  }
  int64_t stride[schedule::kMaxDims];
  int64_t step = 1;
  int64_t first = 0;
  for (int d = dims; d-- > 0;) {
    stride[d] = step;
    step *= param.shape[d];
    first += box.offset[d] * stride[d];
  }
  for (int64_t element = begin; element < end;) {
    const int64_t within = element % run;
    int64_t row = element / run;
    int64_t global = first + within;
    for (int d = tail; d-- > 0;) {
      global += row % box.extent[d] * stride[d];
      row /= box.extent[d];
    }
    const int64_t count = std::min(run - within, end - element);
    BucketRun out;
    out.ordinal = piece.ordinal;
    out.tensor_offset = global * element_bytes;
    out.bucket_offset = piece.offset + element * element_bytes;
    out.bytes = count * element_bytes;
    absl::Status status = fn(out);
    if (!status.ok()) return status;
    element += count;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ForBucketRuns(const NodeLayout& layout, int32_t bucket,
                           int64_t begin, int64_t end,
                           const std::function<absl::Status(BucketRun)>& fn) {
  const absl::Span<const schedule::Piece> pieces =
      layout.plan.pieces(static_cast<uint32_t>(bucket));
  // The last piece that begins at or before `begin`, or the first one.
  auto it = std::upper_bound(pieces.begin(), pieces.end(), begin,
                             [](int64_t value, const schedule::Piece& piece) {
                               return value < piece.offset;
                             });
  if (it != pieces.begin()) --it;
  for (; it != pieces.end() && it->offset < end; ++it) {
    const schedule::Param& param = layout.catalog.param(it->ordinal);
    const int64_t element_bytes = schedule::DTypeSize(param.dtype);
    const int64_t from =
        std::max(int64_t{0}, begin - it->offset) / element_bytes;
    const int64_t to =
        std::min(it->box.Volume(), (end - it->offset) / element_bytes);
    if (from >= to) continue;
    absl::Status status = ForPieceRuns(*it, param, from, to, fn);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::vector<SafetensorsTensor> TensorsOf(const schedule::Catalog& catalog) {
  std::vector<SafetensorsTensor> tensors;
  tensors.reserve(catalog.size());
  for (const schedule::Param& param : catalog.params()) {
    SafetensorsTensor tensor;
    tensor.name = param.name;
    tensor.dtype = std::string(schedule::DTypeName(param.dtype));
    tensor.shape.assign(param.shape.begin(), param.shape.end());
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

absl::StatusOr<std::vector<v1::Parameter>> ParametersOf(
    const transport::CheckpointFiles& files) {
  std::vector<v1::Parameter> parameters;
  for (const transport::CheckpointFile& file : files.files) {
    for (const SafetensorsTensor& tensor : file.tensors) {
      auto dtype = schedule::ParseDType(tensor.dtype);
      if (!dtype.ok()) {
        return Mismatch(absl::StrCat("\"", tensor.name, "\" of ", file.path,
                                     " is of type ", tensor.dtype,
                                     ", which weightsync does not move"));
      }
      v1::Parameter parameter;
      parameter.set_name(tensor.name);
      // The values of the two enums are the same.
      parameter.set_dtype(static_cast<v1::DType>(*dtype));
      for (const int64_t extent : tensor.shape) parameter.add_shape(extent);
      if (!tensor.shape.empty() &&
          *std::min_element(tensor.shape.begin(), tensor.shape.end()) == 0) {
        return Mismatch(
            absl::StrCat("\"", tensor.name, "\" of ", file.path,
                         " is empty: ", Show(tensor.dtype, tensor.shape)));
      }
      parameters.push_back(std::move(parameter));
    }
  }
  if (parameters.empty()) {
    return Mismatch("the checkpoint has no tensors");
  }
  return parameters;
}

absl::StatusOr<std::unique_ptr<CheckpointData>> CheckpointData::OpenToRead(
    const transport::RootedDirectory& root, const std::string& path,
    std::shared_ptr<const NodeLayout> layout) {
  auto headers = transport::ReadCheckpointHeaders(root, path);
  if (!headers.ok()) return headers.status();
  std::unique_ptr<CheckpointData> data(new CheckpointData(std::move(layout)));
  const schedule::Catalog& catalog = data->layout_->catalog;
  for (const transport::CheckpointFile& file : headers->files) {
    auto fd = root.OpenFile(file.path, O_RDONLY);
    if (!fd.ok()) return fd.status();
    for (const SafetensorsTensor& tensor : file.tensors) {
      const auto ordinal = catalog.Find(tensor.name);
      if (!ordinal.has_value()) continue;
      const schedule::Param& param = catalog.param(*ordinal);
      const absl::string_view dtype = schedule::DTypeName(param.dtype);
      if (tensor.dtype != dtype ||
          !std::equal(tensor.shape.begin(), tensor.shape.end(),
                      param.shape.begin(), param.shape.end())) {
        return Mismatch(absl::StrCat(
            "\"", tensor.name, "\" is ", Show(tensor.dtype, tensor.shape),
            " in ", file.path, " and ", Show(dtype, param.shape), " in ",
            data->layout_->model));
      }
      data->places_[*ordinal] = {static_cast<int>(data->files_.size()),
                                 tensor.begin};
    }
    data->files_.push_back({file.path, *std::move(fd)});
  }
  for (uint32_t ordinal = 0; ordinal < catalog.size(); ++ordinal) {
    if (data->places_[ordinal].file >= 0) continue;
    return Mismatch(absl::StrCat("\"", catalog.param(ordinal).name, "\" of ",
                                 data->layout_->model, " is not in ", path));
  }
  return data;
}

absl::StatusOr<std::unique_ptr<CheckpointData>> CheckpointData::OpenToWrite(
    const transport::RootedDirectory& root, const std::string& directory,
    const transport::CheckpointFiles& plan,
    std::shared_ptr<const NodeLayout> layout) {
  std::unique_ptr<CheckpointData> data(new CheckpointData(std::move(layout)));
  for (const transport::CheckpointFile& file : plan.files) {
    const std::string path = absl::StrCat(directory, "/", file.name);
    auto fd = root.OpenFile(path, O_WRONLY);
    if (!fd.ok()) return fd.status();
    for (const SafetensorsTensor& tensor : file.tensors) {
      const auto ordinal = data->layout_->catalog.Find(tensor.name);
      if (ordinal.has_value()) {
        data->places_[*ordinal] = {static_cast<int>(data->files_.size()),
                                   tensor.begin};
      }
    }
    data->files_.push_back({path, *std::move(fd)});
  }
  return data;
}

absl::Status CheckpointData::Read(int32_t bucket, int64_t begin, int64_t end,
                                  char* data) const {
  return ForBucketRuns(
      *layout_, bucket, begin, end, [this, data](BucketRun run) {
        const Place& place = places_[run.ordinal];
        const File& file = files_[static_cast<size_t>(place.file)];
        return transport::ReadAt(file.fd.get(), file.path,
                                 data + run.bucket_offset, run.bytes,
                                 place.offset + run.tensor_offset);
      });
}

absl::Status CheckpointData::Write(int32_t bucket, int64_t begin, int64_t end,
                                   const char* data) const {
  return ForBucketRuns(
      *layout_, bucket, begin, end, [this, data](BucketRun run) {
        const Place& place = places_[run.ordinal];
        const File& file = files_[static_cast<size_t>(place.file)];
        return transport::WriteAt(file.fd.get(), file.path,
                                  data + run.bucket_offset, run.bytes,
                                  place.offset + run.tensor_offset);
      });
}

absl::Status CheckpointData::Sync() const {
  for (const File& file : files_) {
    if (fsync(file.fd.get()) != 0) {
      return transport::FileError("sync", file.path, errno);
    }
  }
  return absl::OkStatus();
}

}  // namespace daemon
}  // namespace weightsync
