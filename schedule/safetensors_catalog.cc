#include "schedule/safetensors_catalog.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

using Json = nlohmann::json;

absl::Status Bad(absl::string_view message) {
  return InvalidPlan(kInvalidSafetensors, message);
}

absl::Status BadTensor(absl::string_view name, absl::string_view message) {
  return Bad(absl::StrCat("parameter '", name, "' ", message));
}

// An error of one file.
absl::Status In(absl::string_view file, const absl::Status& status) {
  return PlanError(status.code(), ReasonOf(status),
                   absl::StrCat(file, ": ", status.message()));
}

enum class Number { kWhole, kTooLarge, kOther };

// Non-negative integers only; kTooLarge: one that int64 cannot hold.
Number ReadInt(const Json& value, int64_t* out) {
  if (value.is_number_float()) {
    const double number = value.get<double>();
    return number >= 9.2e18 ? Number::kTooLarge : Number::kOther;
  }
  if (!value.is_number_unsigned()) return Number::kOther;
  const auto raw = value.get<uint64_t>();
  if (raw > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return Number::kTooLarge;
  }
  *out = static_cast<int64_t>(raw);
  return Number::kWhole;
}

absl::Status Overflow(absl::string_view name, absl::string_view message) {
  return InvalidPlan(kBytesOverflow,
                     absl::StrCat("parameter '", name, "' ", message,
                                  " more bytes than an int64 can count"));
}

absl::StatusOr<SafetensorsEntry> ParseEntry(const std::string& name,
                                            const Json& value) {
  if (!value.is_object() || !value.contains("dtype") ||
      !value.contains("shape") || !value.contains("data_offsets") ||
      !value["dtype"].is_string() || !value["shape"].is_array() ||
      !value["data_offsets"].is_array() || value["data_offsets"].size() != 2) {
    return BadTensor(name, "lacks a dtype, a shape or two data_offsets");
  }
  SafetensorsEntry entry;
  entry.param.name = name;
  absl::StatusOr<DType> dtype =
      ParseDType(value["dtype"].get_ref<const std::string&>());
  if (!dtype.ok()) {
    return InvalidPlan(
        kUnknownDType,
        absl::StrCat("parameter '", name, "': ", dtype.status().message()));
  }
  entry.param.dtype = *dtype;
  int64_t bytes = DTypeSize(*dtype);
  for (const Json& extent : value["shape"]) {
    int64_t n = 0;
    switch (ReadInt(extent, &n)) {
      case Number::kWhole:
        break;
      case Number::kTooLarge:
        return InvalidPlan(kDimensionTooLarge,
                           absl::StrCat("parameter '", name,
                                        "' has a dimension of more than 2^31 "
                                        "elements"));
      case Number::kOther:
        return BadTensor(name, "has a shape that is not of whole numbers");
    }
    if (n > 0 && bytes > std::numeric_limits<int64_t>::max() / n) {
      return Overflow(name, "has");
    }
    bytes *= n;
    entry.param.shape.push_back(n);
  }
  const Number begin = ReadInt(value["data_offsets"][0], &entry.begin);
  const Number end = ReadInt(value["data_offsets"][1], &entry.end);
  if (begin != Number::kOther && end != Number::kOther &&
      (begin == Number::kTooLarge || end == Number::kTooLarge)) {
    return Overflow(name, "ends after");
  }
  if (begin != Number::kWhole || end != Number::kWhole ||
      entry.end < entry.begin || entry.end - entry.begin != bytes) {
    return BadTensor(name, absl::StrCat("has data_offsets that do not hold ",
                                        bytes, " bytes"));
  }
  return entry;
}

}  // namespace

absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(
    absl::string_view header_json) {
  const Json header =
      Json::parse(header_json.begin(), header_json.end(), nullptr,
                  /*allow_exceptions=*/false);
  if (!header.is_object()) {
    return Bad("the header is not a JSON object; is this a safetensors file?");
  }
  std::vector<SafetensorsEntry> entries;
  for (auto it = header.begin(); it != header.end(); ++it) {
    if (it.key() == "__metadata__") continue;
    absl::StatusOr<SafetensorsEntry> entry = ParseEntry(it.key(), it.value());
    if (!entry.ok()) return entry.status();
    entries.push_back(*std::move(entry));
  }
  std::sort(entries.begin(), entries.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
              if (a.begin != b.begin) return a.begin < b.begin;
              if (a.end != b.end) return a.end < b.end;
              return a.param.name < b.param.name;
            });
  int64_t at = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != at) {
      return BadTensor(entry.param.name,
                       "overlaps its neighbour or leaves a gap before it");
    }
    at = entry.end;
  }
  return entries;
}

std::vector<std::string> SafetensorsIndex::Files() const {
  std::set<std::string> files;
  for (const auto& entry : file_of) files.insert(entry.second);
  return std::vector<std::string>(files.begin(), files.end());
}

absl::StatusOr<SafetensorsIndex> ParseSafetensorsIndex(
    absl::string_view index_json) {
  const Json json = Json::parse(index_json.begin(), index_json.end(), nullptr,
                                /*allow_exceptions=*/false);
  if (json.is_discarded()) {
    return Bad("it is not JSON, so no model.safetensors.index.json");
  }
  if (!json.is_object() || !json.contains("weight_map") ||
      !json["weight_map"].is_object()) {
    return Bad(
        "it has no weight_map; name a model.safetensors.index.json or a "
        ".safetensors file");
  }
  SafetensorsIndex index;
  for (const auto& entry : json["weight_map"].items()) {
    if (!entry.value().is_string()) {
      return BadTensor(entry.key(), "has no file name in the weight_map");
    }
    const auto& file = entry.value().get_ref<const std::string&>();
    if (file.empty() || file == "." || file == ".." ||
        file.find('/') != std::string::npos) {
      return BadTensor(entry.key(),
                       absl::StrCat("is said to be in '", file,
                                    "', which is no file beside the index"));
    }
    index.file_of[entry.key()] = file;
  }
  if (index.file_of.empty()) {
    return Bad("its weight_map is empty; it names no tensor");
  }
  return index;
}

absl::StatusOr<Catalog> CatalogFromSafetensors(
    absl::Span<const SafetensorsFile> files, const SafetensorsIndex* index) {
  std::vector<Param> params;
  std::map<std::string, const SafetensorsFile*> found;
  std::vector<int64_t> data_bytes;
  for (const SafetensorsFile& file : files) {
    absl::StatusOr<std::vector<SafetensorsEntry>> entries =
        ParseSafetensorsHeader(file.header);
    if (!entries.ok()) return In(file.name, entries.status());
    data_bytes.push_back(entries->empty() ? 0 : entries->back().end);
    for (SafetensorsEntry& entry : *entries) {
      const std::string& name = entry.param.name;
      const auto inserted = found.try_emplace(name, &file);
      if (!inserted.second) {
        return InvalidPlan(
            kDuplicateParameter,
            absl::StrCat(file.name, ": parameter '", name, "' is in ",
                         inserted.first->second->name, ", too"));
      }
      if (index != nullptr) {
        const auto said = index->file_of.find(name);
        if (said == index->file_of.end() || said->second != file.name) {
          return In(file.name,
                    BadTensor(name, said == index->file_of.end()
                                        ? std::string("is not in the index")
                                        : absl::StrCat("is in ", said->second,
                                                       " by the index")));
        }
      }
      if (entry.end > entry.begin) params.push_back(std::move(entry.param));
    }
  }
  if (index != nullptr) {
    for (const auto& said : index->file_of) {
      if (found.count(said.first) == 0) {
        return In(said.second, BadTensor(said.first,
                                         "is not in it, where the index says "
                                         "that it is"));
      }
    }
  }
  if (params.empty()) {
    return Bad(absl::StrCat(files.empty() ? "the checkpoint" : files[0].name,
                            ": there is no tensor with an element in it"));
  }
  absl::StatusOr<Catalog> catalog = Catalog::Create(std::move(params));
  if (!catalog.ok()) {
    return files.size() == 1 ? In(files[0].name, catalog.status())
                             : catalog.status();
  }
  for (size_t i = 0; i < files.size(); ++i) {
    if (files[i].data_bytes < 0 || files[i].data_bytes == data_bytes[i]) {
      continue;
    }
    return Bad(absl::StrCat(
        files[i].name, ": ",
        files[i].data_bytes < data_bytes[i] ? "it is cut short"
                                            : "it is too "
                                              "long",
        ": its tensors take ", data_bytes[i], " bytes, and it has ",
        files[i].data_bytes, " behind its header"));
  }
  return catalog;
}

}  // namespace schedule
}  // namespace weightsync
