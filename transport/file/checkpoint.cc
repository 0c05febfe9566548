#include "transport/file/checkpoint.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

constexpr int64_t kMaxIndexBytes = 100000000;
constexpr size_t kMaxFiles = 100000;

absl::Status Damaged(absl::string_view message) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "CHECKPOINT_DAMAGED",
                   message);
}

// Of a tensor whose type and shape were checked.
int64_t BytesOf(const SafetensorsTensor& tensor) {
  int64_t elements = 1;
  for (const int64_t extent : tensor.shape) elements *= extent;
  return elements * SafetensorsDTypeBits(tensor.dtype) / 8;
}

std::string Join(const std::string& directory, const std::string& name) {
  return absl::StrCat(directory, "/", name);
}

// Tensor -> file, of an index.
class IndexHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  const std::map<std::string, std::string>& files() const { return files_; }
  const std::string& error() const { return error_; }
  bool seen() const { return seen_; }

  bool null() override { return Other(); }
  bool boolean(bool) override { return Other(); }
  bool number_integer(number_integer_t) override { return Other(); }
  bool number_unsigned(number_unsigned_t) override { return Other(); }
  bool number_float(number_float_t, const string_t&) override {
    return Other();
  }
  bool binary(binary_t&) override { return Other(); }
  bool string(string_t& value) override {
    if (!InMap()) return Other();
    if (!files_.emplace(key_, value).second) {
      return Error(absl::StrCat("it has \"", key_.substr(0, 200), "\" twice"));
    }
    return true;
  }
  bool start_object(size_t) override {
    if (InMap()) return Error("its weight_map is not of names alone");
    if (++depth_ > 16) return Error("it is nested too deeply");
    if (depth_ == 2 && top_key_ == "weight_map") {
      if (seen_) return Error("it has two weight_maps");
      map_ = seen_ = true;
    }
    return true;
  }
  bool end_object() override {
    if (depth_ == 2) map_ = false;
    --depth_;
    return true;
  }
  bool start_array(size_t) override {
    if (InMap() || depth_ == 0) {
      return Error("its weight_map is not of names alone");
    }
    return ++depth_ <= 16 || Error("it is nested too deeply");
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(string_t& value) override {
    if (depth_ == 1) top_key_ = value;
    key_ = value;
    return true;
  }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return Error(absl::StrCat("it is no JSON, at byte ", position));
  }

 private:
  bool InMap() const { return map_ && depth_ == 2; }
  bool Other() {
    return !InMap() || Error("its weight_map is not of names alone");
  }
  bool Error(std::string message) {
    if (error_.empty()) error_ = std::move(message);
    return false;
  }

  std::map<std::string, std::string> files_;
  std::string error_;
  std::string top_key_;
  std::string key_;
  int depth_ = 0;
  bool map_ = false;
  bool seen_ = false;
};

absl::StatusOr<std::map<std::string, std::string>> ReadIndex(
    const RootedDirectory& root, const std::string& path) {
  auto text = root.ReadFile(path, kMaxIndexBytes);
  if (!text.ok()) return text.status();
  IndexHandler handler;
  if (text->find('\0') != std::string::npos ||
      !nlohmann::json::sax_parse(text->begin(), text->end(), &handler)) {
    return Damaged(absl::StrCat(
        path, ": ",
        handler.error().empty() ? "it is no JSON" : handler.error()));
  }
  if (!handler.seen() || handler.files().empty()) {
    return Damaged(absl::StrCat(path, ": it has no weight_map"));
  }
  for (const auto& entry : handler.files()) {
    const std::string& name = entry.second;
    if (name.empty() || name[0] == '.' || absl::StrContains(name, '/') ||
        !absl::EndsWith(name, ".safetensors")) {
      return Damaged(absl::StrCat(
          path, ": \"", entry.first.substr(0, 200), "\" is said to be in \"",
          name.substr(0, 200), "\", which is no name of a safetensors file"));
    }
  }
  return handler.files();
}

absl::StatusOr<CheckpointFile> ReadFileHeader(const RootedDirectory& root,
                                              const std::string& path) {
  auto fd = root.OpenFile(path, O_RDONLY);
  if (!fd.ok()) return fd.status();
  struct stat info;
  if (fstat(fd->get(), &info) != 0) return FileError("read", path, errno);
  CheckpointFile file;
  file.path = path;
  file.name = path.substr(path.rfind('/') + 1);
  file.bytes = info.st_size;
  auto header = ReadSafetensorsHeader(fd->get(), path);
  if (!header.ok()) {
    if (ReasonOf(header.status()) != "SAFETENSORS_INVALID") {
      return header.status();
    }
    return Damaged(absl::StrCat(path, ": ", header.status().message()));
  }
  file.tensors = std::move(header->tensors);
  return file;
}

}  // namespace

absl::StatusOr<CheckpointFiles> PlanCheckpoint(
    absl::Span<const SafetensorsTensor> tensors, int64_t max_shard_bytes) {
  if (max_shard_bytes == 0) max_shard_bytes = kDefaultShardBytes;
  if (max_shard_bytes < kMinShardBytes) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "SHARD_BYTES_INVALID",
        absl::StrCat("max_shard_bytes of ", max_shard_bytes, ": give at least ",
                     kMinShardBytes, ", or 0 for ", kDefaultShardBytes));
  }
  CheckpointFiles checkpoint;
  int64_t room = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    const int64_t bytes = BytesOf(tensor);
    if (checkpoint.files.empty() || bytes > room) {
      checkpoint.files.emplace_back();
      room = max_shard_bytes;
    }
    room -= std::min(room, bytes);
    checkpoint.files.back().tensors.push_back(tensor);
    checkpoint.tensor_bytes += bytes;
  }
  if (checkpoint.files.empty()) checkpoint.files.emplace_back();
  const size_t count = checkpoint.files.size();
  nlohmann::json weight_map = nlohmann::json::object();
  for (size_t i = 0; i < count; ++i) {
    CheckpointFile& file = checkpoint.files[i];
    file.name = count == 1 ? "model.safetensors"
                           : absl::StrFormat("model-%05d-of-%05d.safetensors",
                                             i + 1, count);
    std::stable_sort(
        file.tensors.begin(), file.tensors.end(),
        [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
          return SafetensorsDTypeBits(a.dtype) > SafetensorsDTypeBits(b.dtype);
        });
    auto header = MakeSafetensorsHeader(file.tensors, {{"format", "pt"}});
    if (!header.ok()) return header.status();
    file.header = *std::move(header);
    file.bytes = static_cast<int64_t>(file.header.size());
    if (file.bytes > kMaxSafetensorsHeaderBytes) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "SHARD_BYTES_INVALID",
          absl::StrCat("the header of a shard would have ", file.bytes,
                       " bytes, which no reader takes; give a "
                       "smaller max_shard_bytes"));
    }
    for (SafetensorsTensor& tensor : file.tensors) {
      tensor.begin = file.bytes;
      file.bytes += BytesOf(tensor);
      tensor.end = file.bytes;
      weight_map[tensor.name] = file.name;
    }
  }
  if (count > 1) {
    nlohmann::ordered_json index;
    index["metadata"] = {{"total_size", checkpoint.tensor_bytes}};
    index["weight_map"] = weight_map;
    checkpoint.index =
        index.dump(2, ' ', false,
                   nlohmann::ordered_json::error_handler_t::replace) +
        "\n";
  }
  return checkpoint;
}

absl::StatusOr<CheckpointFiles> ReadCheckpointHeaders(
    const RootedDirectory& root, const std::string& path) {
  std::set<std::string> paths;
  std::map<std::string, std::string> index;
  std::string index_path;
  if (absl::EndsWith(path, ".safetensors")) {
    paths.insert(path);
  } else {
    if (root.KindOf(path) == RootedDirectory::Kind::kFile) {
      return MakeError(
          absl::StatusCode::kNotFound, "CHECKPOINT_NOT_FOUND",
          absl::StrCat(path,
                       " is a file that does not end in .safetensors: name the "
                       "directory of a checkpoint, or a safetensors file"));
    }
    auto names = root.List(path);
    if (!names.ok()) return names.status();
    const auto has = [&](const std::string& name) {
      return std::binary_search(names->begin(), names->end(), name);
    };
    if (has(kCheckpointIndexName)) {
      index_path = Join(path, kCheckpointIndexName);
      auto read = ReadIndex(root, index_path);
      if (!read.ok()) return read.status();
      index = *std::move(read);
      for (const auto& entry : index) paths.insert(Join(path, entry.second));
    } else if (has("model.safetensors")) {
      paths.insert(Join(path, "model.safetensors"));
    } else {
      for (const std::string& name : *names) {
        if (absl::EndsWith(name, ".safetensors")) {
          paths.insert(Join(path, name));
        }
      }
      if (paths.size() != 1) {
        return MakeError(
            absl::StatusCode::kNotFound, "CHECKPOINT_NOT_FOUND",
            absl::StrCat(path, " has neither ", kCheckpointIndexName,
                         " nor model.safetensors, and ", paths.size(),
                         " other safetensors files; name the file"));
      }
    }
  }
  if (paths.size() > kMaxFiles) {
    return Damaged(
        absl::StrCat(index_path, ": it names ", paths.size(), " files"));
  }
  CheckpointFiles checkpoint;
  std::map<std::string, std::string> where;
  for (const std::string& file_path : paths) {
    auto file = ReadFileHeader(root, file_path);
    if (!file.ok()) {
      if (absl::IsNotFound(file.status()) && !index_path.empty()) {
        return Damaged(absl::StrCat(index_path, " names ", file_path,
                                    ", which is not there"));
      }
      return file.status();
    }
    for (const SafetensorsTensor& tensor : file->tensors) {
      const auto entered = where.emplace(tensor.name, file->name);
      if (!entered.second) {
        return Damaged(absl::StrCat("\"", tensor.name, "\" is in ",
                                    entered.first->second, " and in ",
                                    file->name, " of ", path));
      }
      checkpoint.tensor_bytes += tensor.end - tensor.begin;
    }
    checkpoint.files.push_back(*std::move(file));
  }
  if (!index_path.empty()) {
    for (const auto& entry : index) {
      auto found = where.find(entry.first);
      if (found == where.end() || found->second != entry.second) {
        return Damaged(absl::StrCat(index_path, " has \"", entry.first,
                                    "\" in ", entry.second,
                                    ", where it is not"));
      }
    }
    for (const auto& entry : where) {
      if (index.count(entry.first) != 0) continue;
      return Damaged(absl::StrCat(index_path, " lacks \"", entry.first,
                                  "\", which ", entry.second, " has"));
    }
  }
  return checkpoint;
}

bool IsWeightFile(absl::string_view name) {
  for (const char* suffix :
       {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5",
        ".msgpack", ".onnx", ".onnx_data", ".index.json"}) {
    if (absl::EndsWith(name, suffix)) return true;
  }
  return false;
}

}  // namespace transport
}  // namespace weightsync
