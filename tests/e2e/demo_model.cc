#include "tests/e2e/demo_model.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "schedule/models.h"
#include "transport/file/safetensors.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace demo {
namespace {

uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

uint64_t Seed(int64_t version, int ordinal) {
  return Mix(static_cast<uint64_t>(version) * 1000003 +
             static_cast<uint64_t>(ordinal));
}

// bf16 of 65536 quantiles of a normal distribution: 16 random bits choose one.
const std::array<uint16_t, 65536>& NormalTable() {
  static const auto* const table = [] {
    auto* out = new std::array<uint16_t, 65536>;
    // The distribution function, inverted by walking along it.
    double x = -6;
    for (int i = 0; i < 65536; ++i) {
      const double target = (i + 0.5) / 65536;
      while (0.5 * std::erfc(-x * M_SQRT1_2) < target) x += 1e-4;
      const float value = static_cast<float>(0.02 * x);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      (*out)[i] =
          static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    return out;
  }();
  return *table;
}

client::Box WholeBox(const Parameter& parameter) {
  client::Box box;
  box.offset.assign(parameter.shape.size(), 0);
  box.extent = parameter.shape;
  return box;
}

int64_t Elements(const std::vector<int64_t>& extents) {
  int64_t elements = 1;
  for (const int64_t extent : extents) elements *= extent;
  return elements;
}

bool AnyOf(const std::string& name, std::initializer_list<const char*> parts) {
  return std::any_of(parts.begin(), parts.end(), [&](const char* part) {
    return absl::StrContains(name, part);
  });
}

// The dimension along which tensor parallelism cuts; -1: none.
int ParallelDimension(const Parameter& parameter) {
  const std::string& name = parameter.name;
  const int dims = static_cast<int>(parameter.shape.size());
  if (dims == 0) return -1;
  if (AnyOf(name, {"q_proj.", "k_proj.", "v_proj.", "gate_proj.", "up_proj.",
                   "embed_tokens.", "lm_head.", "query.", "key.", "value.",
                   "intermediate.dense.", "word_embeddings."})) {
    return 0;
  }
  if (dims == 2 && AnyOf(name, {"o_proj.", "down_proj.", "output.dense."})) {
    return 1;
  }
  return -1;
}

std::string HashOf(const XXH128_hash_t& hash) {
  return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
}

}  // namespace

int64_t Parameter::elements() const { return Elements(shape); }
int Parameter::element_bytes() const {
  return transport::SafetensorsDTypeBits(dtype) / 8;
}
int64_t Parameter::bytes() const { return elements() * element_bytes(); }

int64_t Model::bytes() const {
  int64_t sum = 0;
  for (const Parameter& parameter : parameters) sum += parameter.bytes();
  return sum;
}

absl::StatusOr<Model> LoadModel(const std::string& name,
                                const std::string& file) {
  Model model;
  model.file = file;
  if (file.empty()) {
    const auto catalog = schedule::ModelCatalog(name);
    if (!catalog.ok()) return catalog.status();
    for (const schedule::Param& param : catalog->params()) {
      Parameter parameter;
      parameter.name = param.name;
      parameter.dtype = std::string(schedule::DTypeName(param.dtype));
      parameter.shape.assign(param.shape.begin(), param.shape.end());
      model.parameters.push_back(std::move(parameter));
    }
    return model;
  }
  const auto header = transport::ReadSafetensorsHeader(file);
  if (!header.ok()) return header.status();
  for (const transport::SafetensorsTensor& tensor : header->tensors) {
    v1::DType dtype;
    if (!v1::DType_Parse("DTYPE_" + tensor.dtype, &dtype)) {
      return absl::InvalidArgumentError(absl::StrCat(
          tensor.name, " is of type ", tensor.dtype, ", which is not sent."));
    }
    // There is nothing to send.
    if (tensor.begin == tensor.end) continue;
    Parameter parameter;
    parameter.name = tensor.name;
    parameter.dtype = tensor.dtype;
    parameter.shape = tensor.shape;
    parameter.begin = tensor.begin;
    model.parameters.push_back(std::move(parameter));
  }
  return model;
}

absl::optional<client::Box> FsdpBox(const Parameter& parameter, int rank,
                                    int ranks) {
  client::Box box = WholeBox(parameter);
  if (box.extent.empty()) {
    if (rank != 0) return absl::nullopt;
    return box;
  }
  const int64_t rows = box.extent[0];
  const int64_t chunk = (rows + ranks - 1) / ranks;
  const int64_t begin = std::min(chunk * rank, rows);
  const int64_t end = std::min(begin + chunk, rows);
  if (begin == end) return absl::nullopt;
  box.offset[0] = begin;
  box.extent[0] = end - begin;
  return box;
}

client::Box TensorParallelBox(const Parameter& parameter, int worker,
                              int workers) {
  client::Box box = WholeBox(parameter);
  const int d = ParallelDimension(parameter);
  if (workers > 1 && d >= 0 && box.extent[d] % workers == 0) {
    box.extent[d] /= workers;
    box.offset[d] = worker * box.extent[d];
  }
  return box;
}

absl::optional<client::Box> Intersect(const client::Box& a,
                                      const client::Box& b) {
  client::Box box = a;
  for (size_t d = 0; d < a.offset.size(); ++d) {
    const int64_t begin = std::max(a.offset[d], b.offset[d]);
    const int64_t end =
        std::min(a.offset[d] + a.extent[d], b.offset[d] + b.extent[d]);
    if (begin >= end) return absl::nullopt;
    box.offset[d] = begin;
    box.extent[d] = end - begin;
  }
  return box;
}

client::Tensor TensorOf(const Parameter& parameter, const client::Box& box,
                        void* data) {
  client::Tensor tensor;
  tensor.name = parameter.name;
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
  v1::DType_Parse("DTYPE_" + parameter.dtype, &dtype);
  tensor.dtype = dtype;
  tensor.shape = parameter.shape;
  tensor.box = box;
  tensor.data = data;
  return tensor;
}

absl::Status Fill(const Model& model, int ordinal, const client::Box& box,
                  int64_t version, int64_t last_version, char* data) {
  const Parameter& parameter = model.parameters[ordinal];
  const int64_t row = parameter.shape.empty()
                          ? 1
                          : Elements(parameter.shape) /
                                std::max<int64_t>(parameter.shape[0], 1);
  const int64_t first = box.offset.empty() ? 0 : box.offset[0] * row;
  const int64_t count = Elements(box.extent);
  const uint64_t seed = Seed(version, ordinal);
  const int element = parameter.element_bytes();

  if (!model.file.empty()) {
    const int fd = open(model.file.c_str(), O_RDONLY | O_CLOEXEC);
    int64_t done = 0;
    while (fd >= 0 && done < count * element) {
      const ssize_t got = pread(fd, data + done, count * element - done,
                                parameter.begin + first * element + done);
      if (got <= 0) break;
      done += got;
    }
    if (fd >= 0) close(fd);
    if (done < count * element) {
      return absl::UnavailableError(
          absl::StrCat("cannot read ", parameter.name, " of ", model.file));
    }
    if (version == last_version || parameter.dtype == "BOOL") {
      return absl::OkStatus();
    }
    for (int64_t i = 0; i < count; ++i) {
      data[i * element] = static_cast<char>(data[i * element] ^
                                            (1 + (Mix(seed + first + i) & 6)));
    }
    return absl::OkStatus();
  }

  if (parameter.dtype != "BF16") {
    for (int64_t i = 0; i < count * element; ++i) {
      data[i] = static_cast<char>(Mix(seed + first * element + i));
    }
    return absl::OkStatus();
  }
  const std::array<uint16_t, 65536>& normal = NormalTable();
  uint16_t* out = reinterpret_cast<uint16_t*>(data);
  // Four elements from one random number.
  int64_t i = 0;
  while (i < count) {
    const int64_t e = first + i;
    uint64_t random =
        Mix(seed + static_cast<uint64_t>(e / 4)) >> (16 * (e % 4));
    const int64_t end = std::min(count, i + 4 - e % 4);
    for (; i < end; ++i) {
      out[i] = normal[random & 0xffff];
      random >>= 16;
    }
  }
  return absl::OkStatus();
}

std::string HashPart(const Parameter& parameter, const client::Box& box,
                     const char* data, const client::Box& part) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(
      XXH3_createState(), &XXH3_freeState);
  XXH3_128bits_reset(state.get());
  const size_t dims = box.extent.size();
  const int64_t element = parameter.element_bytes();
  std::vector<int64_t> strides(dims);  // bytes
  int64_t stride = element;
  for (size_t d = dims; d-- > 0;) {
    strides[d] = stride;
    stride *= box.extent[d];
  }
  // Inner dimensions that are whole make one run with the one outside of them.
  size_t tail = dims;
  int64_t run = element;
  while (tail > 0) {
    --tail;
    run *= part.extent[tail];
    if (part.extent[tail] != box.extent[tail]) break;
  }
  std::vector<int64_t> index(dims, 0);
  int64_t at = 0;
  for (size_t d = 0; d < dims; ++d) {
    at += (part.offset[d] - box.offset[d]) * strides[d];
  }
  while (true) {
    XXH3_128bits_update(state.get(), data + at, static_cast<size_t>(run));
    int d = static_cast<int>(tail) - 1;
    for (; d >= 0; --d) {
      at += strides[d];
      if (++index[d] < part.extent[d]) break;
      at -= strides[d] * part.extent[d];
      index[d] = 0;
    }
    if (d < 0) return HashOf(XXH3_128bits_digest(state.get()));
  }
}

namespace {

void AppendLine(const Model& model, int ordinal, int64_t version, int worker,
                int workers, int part_index, const client::Tensor& tensor,
                const client::Box& part, std::string* out) {
  const Parameter& parameter = model.parameters[ordinal];
  absl::StrAppend(out, version, " ", worker, "/", workers, " ", parameter.name,
                  " ", part_index, " ",
                  HashPart(parameter, *tensor.box,
                           static_cast<const char*>(tensor.data), part),
                  "\n");
}

}  // namespace

std::string WorkerHashLines(const Model& model, int64_t version, int worker,
                            int workers, int parts,
                            const std::vector<client::Tensor>& tensors) {
  std::string out;
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (int p = 0; p < parts; ++p) {
      const auto held = FsdpBox(model.parameters[i], p, parts);
      if (!held.has_value()) continue;
      const auto part = Intersect(*tensors[i].box, *held);
      if (!part.has_value()) continue;
      AppendLine(model, static_cast<int>(i), version, worker, workers, p,
                 tensors[i], *part, &out);
    }
  }
  return out;
}

std::string RankHashLines(const Model& model, int64_t version, int worker,
                          int workers, int rank,
                          const std::vector<client::Tensor>& shards) {
  std::string out;
  for (size_t i = 0; i < shards.size(); ++i) {
    if (shards[i].data == nullptr) continue;
    const auto part =
        Intersect(*shards[i].box,
                  TensorParallelBox(model.parameters[i], worker, workers));
    if (!part.has_value()) continue;
    AppendLine(model, static_cast<int>(i), version, worker, workers, rank,
               shards[i], *part, &out);
  }
  return out;
}

absl::Status DumpSafetensors(const std::string& path, const Model& model,
                             const std::vector<client::Tensor>& tensors) {
  std::vector<transport::SafetensorsTensor> entries;
  std::map<std::string, std::string> metadata;
  for (size_t i = 0; i < tensors.size(); ++i) {
    transport::SafetensorsTensor entry;
    entry.name = tensors[i].name;
    entry.dtype = model.parameters[i].dtype;
    entry.shape = tensors[i].box->extent;
    entries.push_back(entry);
    metadata[entry.name] = absl::StrCat(
        "offset [", absl::StrJoin(tensors[i].box->offset, ", "), "] of shape [",
        absl::StrJoin(tensors[i].shape, ", "), "]");
  }
  const auto header = transport::MakeSafetensorsHeader(entries, metadata);
  if (!header.ok()) return header.status();
  FILE* file = std::fopen(path.c_str(), "wb");
  bool good = file != nullptr && std::fwrite(header->data(), 1, header->size(),
                                             file) == header->size();
  for (const client::Tensor& tensor : tensors) {
    const size_t bytes = static_cast<size_t>(client::PartBytes(tensor));
    good = good && std::fwrite(tensor.data, 1, bytes, file) == bytes;
  }
  good = (file == nullptr || std::fclose(file) == 0) && good;
  return good ? absl::OkStatus()
              : absl::UnavailableError(absl::StrCat("cannot write ", path));
}

absl::Status DumpAll(const std::string& path, const Model& model,
                     const std::vector<std::vector<client::Tensor>>& live) {
  for (size_t i = 0; i < live.size() && !path.empty(); ++i) {
    const absl::Status status = DumpSafetensors(
        live.size() == 1 ? path : absl::StrCat(path, ".", i), model, live[i]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::vector<client::Tensor> FsdpShards(const Model& model, int rank,
                                       int ranks) {
  std::vector<client::Tensor> shards;
  for (const Parameter& parameter : model.parameters) {
    const auto box = FsdpBox(parameter, rank, ranks);
    shards.push_back(TensorOf(parameter, box.value_or(client::Box()), nullptr));
    if (!box.has_value()) shards.back().box = absl::nullopt;
  }
  return shards;
}

std::vector<client::Tensor> Held(const std::vector<client::Tensor>& shards) {
  std::vector<client::Tensor> held;
  for (const client::Tensor& shard : shards) {
    if (shard.data != nullptr) held.push_back(shard);
  }
  return held;
}

int64_t PlaceTensors(std::vector<client::Tensor>* tensors, char* base) {
  int64_t offset = 0;
  for (client::Tensor& tensor : *tensors) {
    if (!tensor.box.has_value()) continue;
    if (base != nullptr) tensor.data = base + offset;
    offset += (client::PartBytes(tensor) + 63) / 64 * 64;
  }
  return offset;
}

std::vector<client::Tensor> LiveTensors(const Model& model, int worker,
                                        int workers) {
  std::vector<client::Tensor> tensors;
  for (const Parameter& parameter : model.parameters) {
    tensors.push_back(TensorOf(
        parameter, TensorParallelBox(parameter, worker, workers), nullptr));
  }
  const size_t bytes = static_cast<size_t>(
      std::max<int64_t>(PlaceTensors(&tensors, nullptr), 1));
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("live memory");
    std::exit(1);
  }
  PlaceTensors(&tensors, static_cast<char*>(memory));
  return tensors;
}

std::vector<client::Tensor> OnGpu(std::vector<client::Tensor> tensors,
                                  const char* from, char* gpu) {
  for (client::Tensor& tensor : tensors) {
    tensor.data = gpu + (static_cast<const char*>(tensor.data) - from);
    tensor.on_gpu = true;
  }
  return tensors;
}

absl::Status FillAll(const Model& model, int64_t version, int64_t last_version,
                     const std::vector<client::Tensor>& shards) {
  for (size_t i = 0; i < shards.size(); ++i) {
    if (shards[i].data == nullptr) continue;
    const absl::Status status =
        Fill(model, static_cast<int>(i), *shards[i].box, version, last_version,
             static_cast<char*>(shards[i].data));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::string AllRankHashLines(const Model& model, int64_t version,
                             const std::string& worker_counts, int rank,
                             const std::vector<client::Tensor>& shards) {
  std::string out;
  for (const absl::string_view text : absl::StrSplit(worker_counts, ',')) {
    int workers = 0;
    if (!absl::SimpleAtoi(text, &workers)) continue;
    for (int worker = 0; worker < workers; ++worker) {
      out += RankHashLines(model, version, worker, workers, rank, shards);
    }
  }
  return out;
}

void FlipBit(const std::vector<client::Tensor>& tensors) {
  const client::Tensor& tensor = tensors[tensors.size() / 2];
  static_cast<char*>(tensor.data)[client::PartBytes(tensor) / 2] ^= 0x10;
}

}  // namespace demo
}  // namespace weightsync
