#include "daemon/node/checkpoint_note.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "transport/error.h"
#include "transport/file/checkpoint.h"

namespace weightsync {
namespace daemon {

namespace {

using transport::MakeError;
using transport::RootedDirectory;
using transport::UniqueFd;

constexpr int64_t kMaxNoteBytes = int64_t{16} << 20;
constexpr size_t kMaxFiles = 20000;
constexpr int kMaxDepth = 16;

// What a Hugging Face model has beside its weights. Nothing that a training
// program leaves there (optimizer.pt, trainer_state.json) is among it.
bool IsModelFile(absl::string_view name) {
  if (absl::StrContains(name, "/")) return false;
  for (const char* begin : {"model", "pytorch_model", "adapter_model",
                            "consolidated", "diffusion_pytorch_model"}) {
    if (!absl::StartsWith(name, begin)) continue;
    for (const char* end : {".safetensors", ".bin", ".index.json"}) {
      if (absl::EndsWith(name, end)) return true;
    }
  }
  for (const char* known : {"config.json",
                            "generation_config.json",
                            "adapter_config.json",
                            "tokenizer.json",
                            "tokenizer_config.json",
                            "tokenizer.model",
                            "spiece.model",
                            "sentencepiece.bpe.model",
                            "special_tokens_map.json",
                            "added_tokens.json",
                            "vocab.json",
                            "vocab.txt",
                            "merges.txt",
                            "preprocessor_config.json",
                            "processor_config.json",
                            "chat_template.json",
                            "chat_template.jinja",
                            "README.md",
                            "LICENSE",
                            "LICENSE.txt",
                            "LICENSE.md",
                            "NOTICE",
                            "USE_POLICY.md",
                            ".gitattributes"}) {
    if (name == known) return true;
  }
  return false;
}

bool IsWeight(absl::string_view name) {
  return name == kCheckpointNote || name == transport::kCheckpointIndexName ||
         absl::EndsWith(name, ".safetensors");
}

absl::Status Taken(const std::string& message) {
  return MakeError(absl::StatusCode::kFailedPrecondition,
                   "CHECKPOINT_PATH_TAKEN", message);
}

const char* Called(RootedDirectory::Kind kind) {
  switch (kind) {
    case RootedDirectory::Kind::kFile:
      return "a file";
    case RootedDirectory::Kind::kDirectory:
      return "a directory";
    case RootedDirectory::Kind::kLink:
      return "a symbolic link";
    default:
      return "no regular file";
  }
}

absl::Status Walk(const RootedDirectory& root, const std::string& directory,
                  const std::string& prefix, int depth,
                  std::map<std::string, int64_t>* files) {
  const std::string path =
      prefix.empty()
          ? directory
          : absl::StrCat(directory, "/", prefix.substr(0, prefix.size() - 1));
  auto names = root.List(path);
  if (!names.ok()) return names.status();
  if (names->empty() && !prefix.empty()) (*files)[prefix] = 0;
  for (const std::string& name : *names) {
    if (files->size() > kMaxFiles || depth > kMaxDepth) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "CHECKPOINT_PATH_INVALID",
          absl::StrCat(directory, " has more in it than a checkpoint has"));
    }
    const std::string inside = absl::StrCat(prefix, name);
    const std::string below = absl::StrCat(directory, "/", inside);
    if (root.OpenDirectory(below).ok()) {
      absl::Status status =
          Walk(root, directory, inside + "/", depth + 1, files);
      if (!status.ok()) return status;
      continue;
    }
    // Without waiting for whoever would write into a pipe.
    auto fd = root.OpenFile(below, O_RDONLY | O_NONBLOCK);
    struct stat info;
    (*files)[inside] =
        fd.ok() && fstat(fd->get(), &info) == 0 && S_ISREG(info.st_mode)
            ? info.st_size
            : -1;
  }
  return absl::OkStatus();
}

}  // namespace

namespace {

// When it was last written to; nullopt: it cannot be looked at.
absl::optional<absl::Time> WriteTime(const RootedDirectory& root,
                                     const std::string& path) {
  auto fd = root.OpenFile(path, O_RDONLY | O_NONBLOCK);
  struct stat info;
  if (!fd.ok() || fstat(fd->get(), &info) != 0) return absl::nullopt;
  return absl::TimeFromTimespec(info.st_mtim);
}

}  // namespace

std::string CheckpointNote::ToJson() const {
  nlohmann::ordered_json json;
  json["model"] = model;
  if (!update_id.empty()) {
    json["version"] = version;
    json["update_id"] = update_id;
  }
  json["files"] = nlohmann::ordered_json::object();
  for (const auto& file : files) json["files"][file.first] = file.second;
  return json.dump(-1, ' ', false,
                   nlohmann::ordered_json::error_handler_t::replace) +
         "\n";
}

absl::optional<CheckpointNote> ReadCheckpointNote(
    const RootedDirectory& root, const std::string& directory) {
  auto text = root.ReadFile(absl::StrCat(directory, "/", kCheckpointNote),
                            kMaxNoteBytes);
  if (!text.ok()) return absl::nullopt;
  const auto json = nlohmann::json::parse(*text, nullptr, false);
  if (!json.is_object()) return absl::nullopt;
  CheckpointNote note;
  const auto model = json.find("model");
  const auto update = json.find("update_id");
  const auto version = json.find("version");
  const auto files = json.find("files");
  if (model == json.end() || !model->is_string() || files == json.end() ||
      !files->is_object()) {
    return absl::nullopt;
  }
  note.model = model->get<std::string>();
  if (update != json.end() || version != json.end()) {
    if (update == json.end() || !update->is_string() || version == json.end() ||
        !version->is_number_integer()) {
      return absl::nullopt;
    }
    note.update_id = update->get<std::string>();
    note.version = version->get<int64_t>();
  }
  for (const auto& file : files->items()) {
    if (!file.value().is_number_integer()) return absl::nullopt;
    note.files[file.key()] = file.value().get<int64_t>();
  }
  return note;
}

absl::StatusOr<std::map<std::string, int64_t>> FilesOf(
    const RootedDirectory& root, const std::string& directory) {
  std::map<std::string, int64_t> files;
  absl::Status status = Walk(root, directory, "", 0, &files);
  if (!status.ok()) return status;
  return files;
}

absl::Status CheckWritten(const RootedDirectory& root,
                          const std::string& directory,
                          const CheckpointNote& note) {
  auto files = FilesOf(root, directory);
  if (!files.ok()) return files.status();
  // Written after all others.
  const auto end =
      WriteTime(root, absl::StrCat(directory, "/", kCheckpointNote));
  for (const auto& file : *files) {
    if (file.first == kCheckpointNote) continue;
    auto written = note.files.find(file.first);
    const bool directory_only = absl::EndsWith(file.first, "/");
    const auto time =
        directory_only
            ? absl::nullopt
            : WriteTime(root, absl::StrCat(directory, "/", file.first));
    // Also of the same size.
    const bool later = !directory_only &&
                       (!end.has_value() || !time.has_value() || *time > *end);
    if (written != note.files.end() && written->second == file.second &&
        !later) {
      continue;
    }
    return Taken(absl::StrCat(directory, " has ", file.first,
                              written == note.files.end()
                                  ? ", which weightsync did not write"
                                  : ", which was changed since it was "
                                    "written",
                              ": it is left as it is"));
  }
  return absl::OkStatus();
}

absl::Status CheckReplaceable(const RootedDirectory& root,
                              const std::string& directory) {
  const RootedDirectory::Kind kind = root.KindOf(directory);
  if (kind == RootedDirectory::Kind::kNothing) return absl::OkStatus();
  if (kind != RootedDirectory::Kind::kDirectory) {
    return Taken(absl::StrCat(
        directory, " is ", Called(kind),
        " and no checkpoint, which would be a directory: it is not replaced; "
        "give another path, or move or remove it first"));
  }
  auto files = FilesOf(root, directory);
  if (!files.ok()) return files.status();
  if (files->empty()) return absl::OkStatus();
  const bool weights =
      std::any_of(files->begin(), files->end(),
                  [](const std::pair<const std::string, int64_t>& file) {
                    return !absl::StrContains(file.first, "/") &&
                           transport::IsWeightFile(file.first);
                  });
  if (!weights) {
    return MakeError(
        absl::StatusCode::kAlreadyExists, "CHECKPOINT_EXISTS",
        absl::StrCat(directory, " is a directory without weights (it has ",
                     files->begin()->first,
                     "): it is not replaced; give another path, or move or "
                     "remove it first"));
  }
  const auto note = ReadCheckpointNote(root, directory);
  for (const auto& file : *files) {
    if (file.first == kCheckpointNote) continue;
    if (note.has_value() && note->files.count(file.first) != 0) continue;
    if (file.second >= 0 && IsModelFile(file.first)) continue;
    const std::string odd =
        file.second >= 0 || absl::EndsWith(file.first, "/")
            ? ""
            : absl::StrCat(
                  " (",
                  Called(root.KindOf(absl::StrCat(directory, "/", file.first))),
                  ")");
    return Taken(absl::StrCat(
        directory, " has ", file.first, odd,
        ", which no checkpoint writes and which would be lost with it: give "
        "another path, or move or remove that first"));
  }
  return absl::OkStatus();
}

absl::Status CheckNotInside(const RootedDirectory& root,
                            const std::string& path) {
  for (size_t slash = path.find('/'); slash != std::string::npos;
       slash = path.find('/', slash + 1)) {
    const std::string above = path.substr(0, slash);
    const RootedDirectory::Kind kind = root.KindOf(above);
    if (kind == RootedDirectory::Kind::kNothing) return absl::OkStatus();
    if (kind == RootedDirectory::Kind::kFile) {
      return Taken(
          absl::StrCat(above, " is a file, so that nothing can be saved at ",
                       path, ": move or remove it, or give another path"));
    }
    auto names = root.List(above);
    if (!names.ok()) return names.status();
    if (std::any_of(names->begin(), names->end(), IsWeight)) {
      return Taken(absl::StrCat(
          above, " is a checkpoint, and ", path,
          " would be lost with it when that is replaced: give a path beside "
          "it"));
    }
  }
  return absl::OkStatus();
}

}  // namespace daemon
}  // namespace weightsync
