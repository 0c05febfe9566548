#include "tests/chaos/model.h"

#include <string.h>
#include <xxhash.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace weightsync {
namespace chaos {
namespace {

constexpr int kParameters = 36;

uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

int64_t BoxElements(const client::Box& box) {
  int64_t elements = 1;
  for (int64_t extent : box.extent) elements *= extent;
  return elements;
}

}  // namespace

std::vector<client::Tensor> Parameters(uint64_t seed, int64_t bytes) {
  std::vector<client::Tensor> parameters;
  uint64_t random = Mix(seed);
  const auto next = [&random](int64_t from, int64_t to) {
    random = Mix(random);
    return from + static_cast<int64_t>(random % (to - from + 1));
  };
  const int64_t each = bytes / (kParameters * 3 / 4);
  for (int i = 0; i < kParameters; ++i) {
    client::Tensor tensor;
    tensor.name = absl::StrCat("layers.", i / 4, ".weight_", i % 4);
    const v1::DType dtypes[] = {v1::DTYPE_BF16, v1::DTYPE_F32, v1::DTYPE_U8,
                                v1::DTYPE_BF16};
    tensor.dtype = dtypes[next(0, 3)];
    if (i % 4 == 3) {
      tensor.shape = {next(2, 5000)};
    } else {
      // Neither rows nor columns are multiples of anything.
      const int64_t rows = next(3, 301);
      const int64_t elements = each / client::DTypeBytes(tensor.dtype);
      tensor.shape = {
          rows, std::max<int64_t>(2, elements * next(50, 150) / 100 / rows)};
    }
    parameters.push_back(tensor);
  }
  return parameters;
}

client::Box WorkerBox(const client::Tensor& parameter, int parameter_index,
                      int index, int count) {
  client::Box box;
  box.offset.assign(parameter.shape.size(), 0);
  box.extent = parameter.shape;
  if (parameter.shape.size() > 1) {
    const int dim = parameter_index % 2;
    const int64_t size = parameter.shape[dim];
    box.offset[dim] = size * index / count;
    box.extent[dim] = size * (index + 1) / count - box.offset[dim];
  }
  return box;
}

bool RankBox(const client::Tensor& parameter, int rank, int world_size,
             client::Box* box) {
  box->offset.assign(parameter.shape.size(), 0);
  box->extent = parameter.shape;
  // As FSDP: equal parts of rows, the last ones short or missing.
  const int64_t rows = parameter.shape[0];
  const int64_t part = (rows + world_size - 1) / world_size;
  box->offset[0] = std::min(rows, part * rank);
  box->extent[0] = std::min(rows, part * (rank + 1)) - box->offset[0];
  return box->extent[0] > 0;
}

void Fill(uint64_t seed, int64_t content, int parameter_index,
          std::vector<char>* bytes) {
  const uint64_t key =
      Mix(Mix(seed) ^ Mix(content * 1000003u + parameter_index));
  for (size_t i = 0; i < bytes->size(); i += 8) {
    const uint64_t word = Mix(key + i);
    memcpy(bytes->data() + i, &word, std::min<size_t>(8, bytes->size() - i));
  }
}

std::vector<char> Cut(const client::Tensor& parameter, const client::Box& box,
                      const std::vector<char>& whole) {
  const int64_t element = client::DTypeBytes(parameter.dtype);
  std::vector<char> part(BoxElements(box) * element);
  // One or two dimensions.
  const int64_t columns = parameter.shape.size() > 1 ? parameter.shape[1] : 1;
  const int64_t first = box.offset.size() > 1 ? box.offset[1] : 0;
  const int64_t width = box.extent.size() > 1 ? box.extent[1] : 1;
  for (int64_t row = 0; row < box.extent[0]; ++row) {
    memcpy(part.data() + row * width * element,
           whole.data() + ((box.offset[0] + row) * columns + first) * element,
           width * element);
  }
  return part;
}

void Hasher::Add(const void* data, int64_t bytes) {
  state_ = Mix(state_ ^ XXH3_64bits(data, bytes));
}

std::string Hasher::Text() const { return absl::StrFormat("%016x", state_); }

std::vector<std::string> ExpectedHashes(
    const std::vector<client::Tensor>& parameters, uint64_t seed,
    int64_t content, int count) {
  std::vector<Hasher> hashers(count);
  for (size_t i = 0; i < parameters.size(); ++i) {
    client::Tensor parameter = parameters[i];
    std::vector<char> whole(client::PartBytes(parameter));
    Fill(seed, content, i, &whole);
    for (int index = 0; index < count; ++index) {
      const std::vector<char> part =
          Cut(parameter, WorkerBox(parameter, i, index, count), whole);
      hashers[index].Add(part.data(), part.size());
    }
  }
  std::vector<std::string> hashes;
  for (const Hasher& hasher : hashers) hashes.push_back(hasher.Text());
  return hashes;
}

absl::Status OnGpu::Place(int device, std::vector<client::Tensor>* tensors) {
  int64_t bytes = 0;
  offsets_.clear();
  for (const client::Tensor& tensor : *tensors) {
    offsets_.push_back(bytes);
    bytes += (client::PartBytes(tensor) + 63) / 64 * 64;
  }
  // One that lies there already is used again: the shapes are the same.
  if (buffer_ == nullptr) {
    auto made = demo::GpuBuffer::Allocate(device, bytes);
    if (!made.ok()) return made.status();
    buffer_ = *std::move(made);
    mirror_.resize(static_cast<size_t>(bytes));
  }
  for (size_t i = 0; i < tensors->size(); ++i) {
    (*tensors)[i].data = buffer_->data() + offsets_[i];
    (*tensors)[i].on_gpu = true;
  }
  return absl::OkStatus();
}

absl::Status LiveModel::MoveToGpu(int device) {
  const absl::Status status = gpu.Place(device, &tensors);
  return status.ok() ? Push() : status;
}

absl::Status LiveModel::Pull() {
  if (!gpu.there()) return absl::OkStatus();
  const absl::Status status = gpu.Pull();
  if (!status.ok()) return status;
  for (size_t i = 0; i < storage.size(); ++i)
    memcpy(storage[i].data(), gpu.copy(i), storage[i].size());
  return absl::OkStatus();
}

absl::Status LiveModel::Push() {
  if (!gpu.there()) return absl::OkStatus();
  for (size_t i = 0; i < storage.size(); ++i)
    memcpy(gpu.copy(i), storage[i].data(), storage[i].size());
  return gpu.Push();
}

std::string LiveModel::Hash() const {
  Hasher hasher;
  for (const std::vector<char>& bytes : storage) {
    hasher.Add(bytes.data(), bytes.size());
  }
  return hasher.Text();
}

LiveModel MakeLive(const std::vector<client::Tensor>& parameters, int index,
                   int count) {
  LiveModel live;
  for (size_t i = 0; i < parameters.size(); ++i) {
    client::Tensor tensor = parameters[i];
    tensor.box = WorkerBox(tensor, i, index, count);
    live.storage.emplace_back(client::PartBytes(tensor), '\x5a');
    tensor.data = live.storage.back().data();
    live.tensors.push_back(tensor);
  }
  return live;
}

}  // namespace chaos
}  // namespace weightsync
