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

// Non-negative integers only, and none that int64 cannot hold.
bool ReadInt(const Json& value, int64_t* out) {
  if (!value.is_number_unsigned()) return false;
  const auto raw = value.get<uint64_t>();
  if (raw > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return false;
  }
  *out = static_cast<int64_t>(raw);
  return true;
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
    if (!ReadInt(extent, &n)) {
      return BadTensor(name, "has a shape that is not of whole numbers");
    }
    if (n > 0 && bytes > std::numeric_limits<int64_t>::max() / n) {
      return InvalidPlan(
          kBytesOverflow,
          absl::StrCat("parameter '", name,
                       "' has more bytes than an int64 can count"));
    }
    bytes *= n;
    entry.param.shape.push_back(n);
  }
  if (!ReadInt(value["data_offsets"][0], &entry.begin) ||
      !ReadInt(value["data_offsets"][1], &entry.end) ||
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

absl::StatusOr<Catalog> CatalogFromSafetensors(
    absl::Span<const absl::string_view> header_jsons) {
  std::vector<Param> params;
  for (absl::string_view header : header_jsons) {
    absl::StatusOr<std::vector<SafetensorsEntry>> entries =
        ParseSafetensorsHeader(header);
    if (!entries.ok()) return entries.status();
    for (SafetensorsEntry& entry : *entries) {
      if (entry.end > entry.begin) params.push_back(std::move(entry.param));
    }
  }
  return Catalog::Create(std::move(params));
}

absl::StatusOr<std::vector<std::string>> FilesOfSafetensorsIndex(
    absl::string_view index_json) {
  const Json index = Json::parse(index_json.begin(), index_json.end(), nullptr,
                                 /*allow_exceptions=*/false);
  if (!index.is_object() || !index.contains("weight_map") ||
      !index["weight_map"].is_object()) {
    return Bad("the index has no weight_map");
  }
  std::set<std::string> files;
  for (const auto& entry : index["weight_map"].items()) {
    if (!entry.value().is_string()) {
      return BadTensor(entry.key(), "has no file name in the weight_map");
    }
    files.insert(entry.value().get<std::string>());
  }
  return std::vector<std::string>(files.begin(), files.end());
}

}  // namespace schedule
}  // namespace weightsync
