#include "client/ctl/mapping.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/optional.h"
#include "nlohmann/json.hpp"
#include "proto/status.h"
#include "re2/re2.h"

namespace weightsync {
namespace ctl {
namespace {

using Json = nlohmann::ordered_json;

// What a dimension can have, and more groups than any model's heads.
constexpr int64_t kMaxRows = int64_t{1} << 31;
constexpr int64_t kMaxGroups = 1 << 20;

absl::Status Invalid(absl::string_view reason, absl::string_view message) {
  return ErrorStatus(absl::StatusCode::kInvalidArgument, reason, message);
}

// ---- Expressions ----

absl::Status Compile(NameRule* rule) {
  re2::RE2::Options options;
  options.set_log_errors(false);
  auto compiled = std::make_shared<re2::RE2>(rule->pattern, options);
  if (!compiled->ok()) {
    return Invalid("PATTERN_INVALID", absl::StrCat("'", rule->pattern, "': ",
                                                   compiled->error()));
  }
  rule->compiled = std::move(compiled);
  return absl::OkStatus();
}

// \1 to \9 are groups, \\ is a backslash, and nothing else stands behind one.
absl::Status CheckTemplate(const NameRule& rule, const std::string& text) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\') continue;
    const char next = ++i < text.size() ? text[i] : '\0';
    if (next == '\\') continue;
    if (next < '1' || next > '9') {
      return Invalid("PATTERN_INVALID",
                     absl::StrCat("'", text, "': a backslash stands before a "
                                  "group, 1 to 9, or another one"));
    }
    if (next - '0' > rule.compiled->NumberOfCapturingGroups()) {
      return Invalid("PATTERN_INVALID",
                     absl::StrCat("'", text, "': '", rule.pattern,
                                  "' has no group ", std::string(1, next)));
    }
  }
  return absl::OkStatus();
}

struct Match {
  size_t begin = 0;
  size_t end = 0;
  std::vector<absl::optional<std::string>> groups;  // 0: all of it
};

absl::optional<Match> Search(const re2::RE2& pattern, const std::string& name,
                             size_t from) {
  std::vector<re2::StringPiece> found(pattern.NumberOfCapturingGroups() + 1);
  if (!pattern.Match(name, from, name.size(), re2::RE2::UNANCHORED,
                     found.data(), static_cast<int>(found.size()))) {
    return absl::nullopt;
  }
  Match match;
  match.begin = static_cast<size_t>(found[0].data() - name.data());
  match.end = match.begin + found[0].size();
  for (const re2::StringPiece& group : found) {
    match.groups.emplace_back();
    if (group.data() != nullptr) {
      match.groups.back() = std::string(group.data(), group.size());
    }
  }
  return match;
}

// REQUIRES: CheckTemplate.
std::string Expand(const std::string& text, const Match& match) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && text[++i] != '\\') {
      out += match.groups[text[i] - '0'].value_or("");
    } else {
      out += text[i];
    }
  }
  return out;
}

// Every match. Written out, so that both languages agree about empty ones.
std::string Substitute(const re2::RE2& pattern, const std::string& text,
                       const std::string& name) {
  std::string out;
  size_t at = 0;
  while (at <= name.size()) {
    const absl::optional<Match> match = Search(pattern, name, at);
    if (!match.has_value()) break;
    out.append(name, at, match->begin - at);
    out += Expand(text, *match);
    at = match->end;
    if (match->begin != match->end) continue;
    // One character on: the bytes after the first of one are 10xxxxxx.
    do {
      if (at < name.size()) out += name[at];
      ++at;
    } while (at < name.size() && (name[at] & 0xC0) == 0x80);
  }
  if (at < name.size()) out.append(name, at, std::string::npos);
  return out;
}

// ---- Rules of their JSON ----

absl::Status NoRule(const Json& entry, absl::string_view why) {
  return Invalid("PATTERN_INVALID",
                 absl::StrCat(entry.dump(-1, ' ', true,
                                         Json::error_handler_t::replace),
                              " is no rule: ", why));
}

// Fields of a rule by name, whichever way they were given.
class Fields {
 public:
  Fields(const Json& entry, const Json& given,
         const std::vector<std::string>& names)
      : entry_(entry) {
    if (given.is_object()) {
      for (auto it = given.begin(); it != given.end(); ++it) {
        if (std::find(names.begin(), names.end(), it.key()) == names.end()) {
          Fail(absl::StrCat("it takes no ", it.key()));
        }
        values_[it.key()] = it.value();
      }
      return;
    }
    const Json list = given.is_array() ? given : Json::array({given});
    if (list.size() > names.size()) Fail("it takes less");
    for (size_t i = 0; i < list.size() && i < names.size(); ++i) {
      values_[names[i]] = list[i];
    }
  }

  std::string Text(const std::string& name, bool needed = true,
                   const char* otherwise = "") {
    const Json* value = Find(name, needed);
    if (value == nullptr) return otherwise;
    if (!value->is_string()) {
      Fail(absl::StrCat(name, " is no text"));
      return "";
    }
    return value->get<std::string>();
  }
  std::vector<std::string> Texts(const std::string& name, bool needed,
                                 std::vector<std::string> otherwise = {}) {
    const Json* value = Find(name, needed);
    if (value == nullptr) return otherwise;
    std::vector<std::string> out;
    if (!value->is_array()) Fail(absl::StrCat(name, " is no list"));
    for (const Json& item : *value) {
      if (!item.is_string()) {
        Fail(absl::StrCat(name, " is no list of texts"));
        break;
      }
      out.push_back(item.get<std::string>());
    }
    return out;
  }
  int64_t Number(const std::string& name, int64_t otherwise, int64_t most) {
    const Json* value = Find(name, false);
    return value == nullptr ? otherwise : ToNumber(name, *value, most);
  }
  std::vector<int64_t> Numbers(const std::string& name) {
    const Json* value = Find(name, false);
    std::vector<int64_t> out;
    if (value == nullptr) return out;
    if (!value->is_array()) Fail(absl::StrCat(name, " is no list"));
    for (const Json& item : *value) {
      out.push_back(ToNumber(name, item, kMaxRows));
      if (!status_.ok()) break;
    }
    return out;
  }
  bool Flag(const std::string& name) {
    const Json* value = Find(name, false);
    if (value == nullptr) return false;
    if (!value->is_boolean()) Fail(absl::StrCat(name, " is not true or false"));
    return value->is_boolean() && value->get<bool>();
  }

  const absl::Status& status() const { return status_; }

 private:
  void Fail(const std::string& why) {
    if (status_.ok()) status_ = NoRule(entry_, why);
  }
  const Json* Find(const std::string& name, bool needed) {
    auto it = values_.find(name);
    if (it != values_.end()) return &it->second;
    if (needed) Fail(absl::StrCat("it needs ", name));
    return nullptr;
  }
  int64_t ToNumber(const std::string& name, const Json& value, int64_t most) {
    if (!value.is_number_integer() ||
        (value.is_number_unsigned() &&
         value.get<uint64_t>() > static_cast<uint64_t>(most)) ||
        value.get<int64_t>() > most || value.get<int64_t>() < -most) {
      Fail(absl::StrCat(name, " is no number that it can be"));
      return 0;
    }
    return value.get<int64_t>();
  }

  const Json& entry_;
  std::map<std::string, Json> values_;
  absl::Status status_;
};

absl::Status CheckRule(NameRule* rule) {
  absl::Status status = Compile(rule);
  if (!status.ok()) return status;
  switch (rule->kind) {
    case NameRule::kDrop:
      return absl::OkStatus();
    case NameRule::kRename:
      return CheckTemplate(*rule, rule->replacement);
    case NameRule::kSplit:
      for (const std::string& name : rule->names) {
        status = CheckTemplate(*rule, name);
        if (!status.ok()) return status;
      }
      if (rule->groups < 1 || rule->names.empty() ||
          (!rule->sizes.empty() && rule->sizes.size() != rule->names.size())) {
        return Invalid("SPLIT_INVALID",
                       absl::StrCat("'", rule->pattern, "': give each of ",
                                    absl::StrJoin(rule->names, ", "),
                                    " its rows"));
      }
      break;
    case NameRule::kFuse:
      if (rule->compiled->NumberOfCapturingGroups() < 1) {
        return Invalid("PATTERN_INVALID",
                       absl::StrCat("'", rule->pattern, "': its first group "
                                    "says which part a tensor is"));
      }
      status = CheckTemplate(*rule, rule->replacement);
      if (!status.ok()) return status;
      if (rule->groups < 1 || rule->sizes.size() != rule->names.size() ||
          rule->names.empty()) {
        return Invalid("SPLIT_INVALID",
                       absl::StrCat("'", rule->pattern, "': give each of ",
                                    absl::StrJoin(rule->names, ", "),
                                    " its rows"));
      }
      break;
  }
  for (const int64_t size : rule->sizes) {
    if (size < 1) {
      return Invalid("SPLIT_INVALID", absl::StrCat("'", rule->pattern,
                                                   "': sizes are at least 1"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<NameRule> ParseRule(const Json& entry) {
  if (!entry.is_object() || entry.size() != 1) {
    return NoRule(entry, "it is an object with one of rename, drop, split, "
                         "split_qkv, split_gate_up, fuse");
  }
  const std::string kind = entry.begin().key();
  const Json& given = entry.begin().value();
  NameRule rule;
  absl::Status status;
  if (kind == "rename") {
    Fields fields(entry, given, {"pattern", "replacement"});
    rule.pattern = fields.Text("pattern");
    rule.replacement = fields.Text("replacement");
    status = fields.status();
  } else if (kind == "drop") {
    Fields fields(entry, given, {"pattern"});
    rule.kind = NameRule::kDrop;
    rule.pattern = fields.Text("pattern");
    status = fields.status();
  } else if (kind == "split") {
    Fields fields(entry, given,
                  {"pattern", "names", "sizes", "groups", "dim"});
    rule.kind = NameRule::kSplit;
    rule.pattern = fields.Text("pattern");
    rule.names = fields.Texts("names", /*needed=*/true);
    rule.sizes = fields.Numbers("sizes");
    rule.groups = fields.Number("groups", 1, kMaxGroups);
    rule.dim = fields.Number("dim", 0, 8);
    status = fields.status();
  } else if (kind == "fuse") {
    Fields fields(entry, given,
                  {"pattern", "parts", "name", "sizes", "groups", "dim"});
    rule.kind = NameRule::kFuse;
    rule.pattern = fields.Text("pattern");
    rule.names = fields.Texts("parts", /*needed=*/true);
    rule.replacement = fields.Text("name");
    rule.sizes = fields.Numbers("sizes");
    rule.groups = fields.Number("groups", 1, kMaxGroups);
    rule.dim = fields.Number("dim", 0, 8);
    status = fields.status();
  } else if (kind == "split_gate_up") {
    Fields fields(entry, given, {"pattern", "names"});
    rule.kind = NameRule::kSplit;
    rule.pattern = fields.Text("pattern", false, "gate_up_proj");
    rule.names = fields.Texts("names", false, {"gate_proj", "up_proj"});
    status = fields.status();
  } else if (kind == "split_qkv") {
    Fields fields(entry, given, {"pattern", "heads", "kv_heads", "head_dim",
                                 "names", "interleaved"});
    rule.kind = NameRule::kSplit;
    rule.pattern = fields.Text("pattern", false, "qkv_proj");
    const int64_t heads = fields.Number("heads", 0, kMaxGroups);
    int64_t kv_heads = fields.Number("kv_heads", 0, kMaxGroups);
    const int64_t head_dim = fields.Number("head_dim", 0, kMaxGroups);
    rule.names =
        fields.Texts("names", false, {"q_proj", "k_proj", "v_proj"});
    const bool interleaved = fields.Flag("interleaved");
    status = fields.status();
    if (kv_heads == 0) kv_heads = heads;
    if (status.ok() && (heads < 1 || head_dim < 1 || kv_heads < 1 ||
                        heads % kv_heads != 0)) {
      status = Invalid("SPLIT_INVALID",
                       absl::StrCat("'", rule.pattern, "': ", heads,
                                    " heads of ", head_dim, " with ", kv_heads,
                                    " key/value heads"));
    }
    if (status.ok() && interleaved) {
      // Megatron's order: each key/value head follows its query heads.
      rule.sizes = {heads / kv_heads * head_dim, head_dim, head_dim};
      rule.groups = kv_heads;
    } else {
      rule.sizes = {heads * head_dim, kv_heads * head_dim,
                    kv_heads * head_dim};
    }
  } else {
    return NoRule(entry, absl::StrCat("there is no ", kind));
  }
  if (status.ok()) status = CheckRule(&rule);
  if (!status.ok()) return status;
  return rule;
}

// ---- Applying them ----

// A box of a tensor, on its way through the rules.
struct Part {
  std::string from;  // the trainer's name
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  absl::optional<std::vector<int64_t>> offset;  // none: all of it
  std::vector<int64_t> extent;

  std::vector<int64_t> Box() const {
    return offset.value_or(std::vector<int64_t>(shape.size(), 0));
  }
};

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

void Add(Part part, std::vector<Part>* out) {
  if (part.extent == part.shape) part.offset.reset();
  out->push_back(std::move(part));
}

absl::Status Split(const NameRule& rule, const Part& part,
                   std::vector<Part>* out) {
  const int64_t dims = static_cast<int64_t>(part.shape.size());
  if (rule.dim < -dims || rule.dim >= dims) {
    return Invalid("SPLIT_INVALID",
                   absl::StrCat(part.name, " has no dimension ", rule.dim));
  }
  const size_t dim = static_cast<size_t>((rule.dim + dims) % dims);
  const int64_t rows = part.shape[dim];
  const int64_t count = static_cast<int64_t>(rule.names.size());
  std::vector<int64_t> sizes = rule.sizes;
  if (sizes.empty()) {
    sizes.assign(rule.names.size(), rows / (count * rule.groups));
  }
  int64_t total = 0;
  for (const int64_t size : sizes) total += size;
  if (rows % rule.groups != 0 || total != rows / rule.groups) {
    return Invalid("SPLIT_INVALID",
                   absl::StrCat(part.name, " has ", rows, " rows, and ",
                                rule.groups, " groups of ",
                                absl::StrJoin(sizes, " + "),
                                " rows are something else"));
  }
  const std::vector<int64_t> box = part.Box();
  int64_t start = 0;
  for (int64_t group = 0; group < rule.groups; ++group) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      const int64_t first = std::max(start, box[dim]);
      const int64_t last =
          std::min(start + sizes[i], box[dim] + part.extent[dim]);
      if (first < last) {
        Part piece = part;
        piece.name = Substitute(*rule.compiled, rule.names[i], part.name);
        piece.shape[dim] = sizes[i] * rule.groups;
        piece.offset = box;
        (*piece.offset)[dim] = group * sizes[i] + first - start;
        piece.extent[dim] = last - first;
        Add(std::move(piece), out);
      }
      start += sizes[i];
    }
  }
  return absl::OkStatus();
}

absl::Status Fuse(const NameRule& rule, const Part& part,
                  std::vector<Part>* out) {
  const Match match = *Search(*rule.compiled, part.name, 0);
  const auto which = std::find(rule.names.begin(), rule.names.end(),
                               match.groups[1].value_or(""));
  if (!match.groups[1].has_value() || which == rule.names.end()) {
    return Invalid("SPLIT_INVALID",
                   absl::StrCat(part.name, ": '", match.groups[1].value_or(""),
                                "' is none of ",
                                absl::StrJoin(rule.names, ", ")));
  }
  const size_t index = static_cast<size_t>(which - rule.names.begin());
  const int64_t dims = static_cast<int64_t>(part.shape.size());
  const size_t dim =
      dims == 0 ? 0 : static_cast<size_t>((rule.dim % dims + dims) % dims);
  const int64_t size = rule.sizes[index];
  if (dims == 0 || part.shape[dim] != size * rule.groups) {
    return Invalid("SPLIT_INVALID",
                   absl::StrCat(part.name, " is ", ShapeText(part.shape),
                                ", and ", rule.groups, " groups of ", size,
                                " rows are meant"));
  }
  int64_t total = 0;
  int64_t before = 0;
  for (size_t i = 0; i < rule.sizes.size(); ++i) {
    total += rule.sizes[i];
    if (i < index) before += rule.sizes[i];
  }
  const std::vector<int64_t> box = part.Box();
  for (int64_t group = 0; group < rule.groups; ++group) {
    const int64_t first = std::max(group * size, box[dim]);
    const int64_t last =
        std::min((group + 1) * size, box[dim] + part.extent[dim]);
    if (first >= last) continue;
    Part piece = part;
    piece.name = absl::StrCat(part.name.substr(0, match.begin),
                              Expand(rule.replacement, match),
                              part.name.substr(match.end));
    piece.shape[dim] = total * rule.groups;
    piece.offset = box;
    (*piece.offset)[dim] = group * total + before + first - group * size;
    piece.extent[dim] = last - first;
    Add(std::move(piece), out);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Part>> Apply(const std::vector<NameRule>& rules,
                                        std::vector<Part> parts) {
  for (const NameRule& rule : rules) {
    bool used = false;
    std::vector<Part> after;
    for (Part& part : parts) {
      if (!Search(*rule.compiled, part.name, 0).has_value()) {
        after.push_back(std::move(part));
        continue;
      }
      used = true;
      absl::Status status;
      switch (rule.kind) {
        case NameRule::kDrop:
          break;
        case NameRule::kRename:
          part.name = Substitute(*rule.compiled, rule.replacement, part.name);
          after.push_back(std::move(part));
          break;
        case NameRule::kSplit:
          status = Split(rule, part, &after);
          break;
        case NameRule::kFuse:
          status = Fuse(rule, part, &after);
          break;
      }
      if (!status.ok()) return status;
    }
    if (!used && !parts.empty()) {
      return Invalid("RULE_UNUSED",
                     absl::StrCat("'", rule.pattern,
                                  "': no name matches; they are like ",
                                  after[0].name,
                                  ". Mend the pattern or leave it out"));
    }
    parts = std::move(after);
  }
  // Parts of one name are different boxes of one tensor.
  std::map<std::string, const Part*> known;
  std::set<std::pair<std::string, absl::optional<std::vector<int64_t>>>> boxes;
  for (const Part& part : parts) {
    const Part& first = *known.emplace(part.name, &part).first->second;
    if (first.shape != part.shape || first.dtype != part.dtype ||
        !boxes.emplace(part.name, part.offset).second) {
      return Invalid("DUPLICATE_NAME",
                     absl::StrCat(part.name,
                                  ": two tensors end with this name"));
    }
  }
  return parts;
}

std::vector<std::string> Missing(
    const std::map<std::string, const Part*>& ours,
    const std::map<std::string, const NamedTensor*>& theirs) {
  std::vector<std::string> out;
  for (const auto& entry : ours) {
    if (theirs.count(entry.first) == 0) out.push_back(entry.first);
  }
  return out;
}

size_t Characters(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(),
                    [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

absl::StatusOr<std::vector<NameRule>> ParseNameRules(absl::string_view json) {
  const Json parsed = Json::parse(json.begin(), json.end(), nullptr,
                                  /*allow_exceptions=*/false);
  if (!parsed.is_array()) {
    return Invalid("PATTERN_INVALID", "the rules are no JSON list of objects");
  }
  std::vector<NameRule> rules;
  for (const Json& entry : parsed) {
    absl::StatusOr<NameRule> rule = ParseRule(entry);
    if (!rule.ok()) return rule.status();
    rules.push_back(*std::move(rule));
  }
  return rules;
}

absl::StatusOr<NameMapping> MapNames(const std::vector<NamedTensor>& trainer,
                                     const std::vector<NamedTensor>& engine,
                                     const std::vector<NameRule>& rules) {
  std::vector<Part> parts;
  for (const NamedTensor& tensor : trainer) {
    parts.push_back({tensor.name, tensor.name, tensor.dtype, tensor.shape,
                     absl::nullopt, tensor.shape});
  }
  absl::StatusOr<std::vector<Part>> applied = Apply(rules, std::move(parts));
  if (!applied.ok()) return applied.status();
  NameMapping out;
  std::set<std::pair<std::string, std::string>> shown;
  std::set<std::string> kept;
  std::map<std::string, const Part*> ours;
  for (const Part& part : *applied) {
    if (shown.emplace(part.from, part.name).second) {
      out.mapping.emplace_back(part.from, part.name);
    }
    kept.insert(part.from);
    ours[part.name] = &part;
  }
  for (const NamedTensor& tensor : trainer) {
    if (kept.count(tensor.name) == 0) out.dropped.push_back(tensor.name);
  }
  std::map<std::string, const NamedTensor*> theirs;
  for (const NamedTensor& tensor : engine) theirs[tensor.name] = &tensor;
  out.only_trainer = Missing(ours, theirs);
  for (const auto& entry : theirs) {
    const auto found = ours.find(entry.first);
    if (found == ours.end()) {
      out.only_engine.push_back(entry.first);
      continue;
    }
    const Part& a = *found->second;
    const NamedTensor& b = *entry.second;
    if (a.shape == b.shape && a.dtype == b.dtype) continue;
    out.differ.push_back(absl::StrCat(entry.first, ": ", a.dtype, " ",
                                      ShapeText(a.shape), " and ", b.dtype,
                                      " ", ShapeText(b.shape)));
  }
  return out;
}

std::string RenderMapping(const NameMapping& mapping) {
  size_t width = 0;
  for (const auto& entry : mapping.mapping) {
    width = std::max(width, Characters(entry.first));
  }
  std::string out;
  for (const auto& entry : mapping.mapping) {
    absl::StrAppend(
        &out, entry.first,
        std::string(width - Characters(entry.first) + 2, ' '),
        entry.second == entry.first ? "=" : entry.second, "\n");
  }
  const struct {
    const char* title;
    const std::vector<std::string>& lines;
  } sections[] = {
      {"dropped by a rule", mapping.dropped},
      {"only the trainer has", mapping.only_trainer},
      {"only the engine has", mapping.only_engine},
      {"differ in shape or type (trainer and engine)", mapping.differ},
  };
  for (const auto& section : sections) {
    if (section.lines.empty()) continue;
    absl::StrAppend(&out, "\n", section.title, ": ", section.lines.size(),
                    "\n");
    for (const std::string& line : section.lines) {
      absl::StrAppend(&out, "  ", line, "\n");
    }
  }
  return out;
}

std::string MappingJson(const NameMapping& mapping) {
  Json json;
  json["mapping"] = Json::array();
  for (const auto& entry : mapping.mapping) {
    json["mapping"].push_back(Json::array({entry.first, entry.second}));
  }
  json["dropped"] = mapping.dropped;
  json["only_trainer"] = mapping.only_trainer;
  json["only_engine"] = mapping.only_engine;
  json["differ"] = mapping.differ;
  return absl::StrCat(
      json.dump(2, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace),
      "\n");
}

}  // namespace ctl
}  // namespace weightsync
