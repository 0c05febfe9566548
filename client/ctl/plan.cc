#include "client/ctl/plan.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cc/wire_time.h"
#include "client/ctl/format.h"
#include "client/ctl/names.h"
#include "proto/status.h"
#include "schedule/error.h"
#include "schedule/safetensors_catalog.h"

namespace weightsync {
namespace ctl {
namespace {

using ::google::protobuf::FieldDescriptor;
using ::weightsync::client::FromProto;

constexpr int kBarColumns = 40;
constexpr int kShownGroups = 16;
constexpr int kShownTargets = 12;
constexpr uint64_t kMaxHeaderBytes = 100000000;

absl::Status Usage(const std::string& message) {
  return absl::InvalidArgumentError(message);
}

// Sets one field from its text.
absl::Status SetField(const std::string& name, const std::string& value,
                      v1::PlanSpec* spec) {
  const FieldDescriptor* field =
      v1::PlanSpec::descriptor()->FindFieldByName(name);
  const google::protobuf::Reflection* reflection = spec->GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      reflection->SetString(spec, field, value);
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      double number = 0;
      if (!absl::SimpleAtod(value, &number)) {
        return Usage(absl::StrCat("--", name, " ", value, " is no number"));
      }
      reflection->SetDouble(spec, field, number);
      return absl::OkStatus();
    }
    default:
      break;
  }
  int64_t number = 0;
  const bool narrow = field->cpp_type() == FieldDescriptor::CPPTYPE_INT32;
  if (!absl::SimpleAtoi(value, &number) ||
      (narrow && number != static_cast<int32_t>(number))) {
    return Usage(absl::StrCat("--", name, " ", value, " is no whole number of ",
                              narrow ? 32 : 64, " bits"));
  }
  if (narrow) {
    reflection->SetInt32(spec, field, static_cast<int32_t>(number));
  } else {
    reflection->SetInt64(spec, field, number);
  }
  return absl::OkStatus();
}

absl::Status CannotOpen(const std::string& path) {
  const int error = errno;
  return ErrorStatus(
      error == ENOENT ? absl::StatusCode::kNotFound
                      : absl::StatusCode::kInvalidArgument,
      error == ENOENT ? "FILE_UNKNOWN" : "FILE_UNREADABLE",
      absl::StrCat("cannot read ", path, ": ", std::strerror(error)));
}

// Opens a regular file; `bytes` is its size. What `--catalog` and `--config`
// take may also be a pipe or /dev/stdin, of which the size is not known: -1.
absl::StatusOr<std::ifstream> OpenFile(const std::string& path,
                                       int64_t* bytes) {
  struct stat info;
  errno = 0;
  if (stat(path.c_str(), &info) != 0) return CannotOpen(path);
  if (S_ISDIR(info.st_mode)) {
    return ErrorStatus(
        absl::StatusCode::kInvalidArgument, "FILE_UNREADABLE",
        absl::StrCat(path,
                     " is a directory; name a file in it, such as its "
                     "model.safetensors.index.json"));
  }
  *bytes = S_ISREG(info.st_mode) ? static_cast<int64_t>(info.st_size) : -1;
  std::ifstream file(path, std::ios::binary);
  if (!file) return CannotOpen(path);
  return file;
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  int64_t bytes = 0;
  absl::StatusOr<std::ifstream> file = OpenFile(path, &bytes);
  if (!file.ok()) return file.status();
  std::string text;
  char block[65536];
  do {
    file->read(block, sizeof(block));
    text.append(block, static_cast<size_t>(file->gcount()));
    if (text.size() > kMaxHeaderBytes) {
      return ErrorStatus(absl::StatusCode::kInvalidArgument, "FILE_UNREADABLE",
                         absl::StrCat(path, " has more than ", kMaxHeaderBytes,
                                      " bytes, which no such file has"));
    }
  } while (*file);
  if (file->bad()) return CannotOpen(path);
  return text;
}

absl::Status NoSafetensors(const std::string& path, const std::string& why) {
  return ErrorStatus(absl::StatusCode::kInvalidArgument, "INVALID_SAFETENSORS",
                     absl::StrCat(path, ": ", why));
}

// The header of a safetensors file, and how much the file has behind it.
absl::StatusOr<schedule::SafetensorsFile> ReadHeader(const std::string& folder,
                                                     const std::string& name) {
  const std::string path = folder + name;
  int64_t file_bytes = 0;
  absl::StatusOr<std::ifstream> file = OpenFile(path, &file_bytes);
  if (!file.ok()) return file.status();
  unsigned char length[8];
  uint64_t bytes = 0;
  if (!file->read(reinterpret_cast<char*>(length), sizeof(length))) {
    return NoSafetensors(path,
                         "it is shorter than the 8 bytes that a safetensors "
                         "file begins with");
  }
  for (int i = 7; i >= 0; --i) bytes = bytes << 8 | length[i];
  if (bytes > kMaxHeaderBytes ||
      (file_bytes >= 0 && bytes > static_cast<uint64_t>(file_bytes) - 8)) {
    return NoSafetensors(
        path, absl::StrCat("it is no safetensors file, or it is cut short: "
                           "its first 8 bytes announce a header of ",
                           bytes, " bytes",
                           file_bytes < 0 ? std::string()
                                          : absl::StrCat(", and the file has ",
                                                         file_bytes)));
  }
  schedule::SafetensorsFile out;
  out.name = name;
  out.header.resize(bytes);
  if (!file->read(&out.header[0], static_cast<std::streamsize>(bytes))) {
    return NoSafetensors(path, "it ends inside of its header");
  }
  if (file_bytes >= 0) {
    out.data_bytes = file_bytes - 8 - static_cast<int64_t>(bytes);
  }
  return out;
}

class FirstError : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, int column, const std::string& message) override {
    if (!text_.empty()) return;
    text_ = absl::StrCat(":", line + 1, ":", column + 1, ": ", message);
  }
  void AddWarning(int, int, const std::string&) override {}
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// The reason under which a field's value is refused.
const char* ReasonFor(const FieldDescriptor& field) {
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) {
    return schedule::kInvalidRate;
  }
  if (field.name() == "base_port") return schedule::kPortOverflow;
  return field.name() == "bucket_size" ||
                 field.name() == "weight_chunked_mem_mb"
             ? schedule::kInvalidBucketBytes
             : schedule::kInvalidCount;
}

// In a PlanSpec a zero cannot be told from a field that was left out, and means
// its default. Who writes it down means zero, which nothing can be.
absl::Status RefuseNothing(const v1::PlanSpec& spec, const std::string& name) {
  const FieldDescriptor& field =
      *v1::PlanSpec::descriptor()->FindFieldByName(name);
  const google::protobuf::Reflection& reflection = *spec.GetReflection();
  bool empty = false;
  // Those without a default are missed later, and by name.
  for (const char* required : {"training_sharding", "training_gpus",
                               "inference_replicas", "inference_tp"}) {
    if (name == required) return absl::OkStatus();
  }
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      if (!reflection.GetString(spec, &field).empty()) return absl::OkStatus();
      return ErrorStatus(absl::StatusCode::kInvalidArgument, "OPTION_EMPTY",
                         absl::StrCat(name,
                                      " is empty; name one or leave it "
                                      "out"));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      empty = reflection.GetDouble(spec, &field) == 0;
      break;
    case FieldDescriptor::CPPTYPE_INT64:
      empty = reflection.GetInt64(spec, &field) == 0;
      break;
    default:
      empty = reflection.GetInt32(spec, &field) == 0;
      break;
  }
  if (!empty) return absl::OkStatus();
  return ErrorStatus(absl::StatusCode::kInvalidArgument, ReasonFor(field),
                     absl::StrCat(name,
                                  " is 0; it must be positive, or be "
                                  "left out for its default"));
}

// `given`: the names of the fields that the file sets.
absl::Status ReadConfig(const std::string& path, v1::PlanSpec* spec,
                        std::set<std::string>* given) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  google::protobuf::TextFormat::Parser parser;
  FirstError error;
  parser.RecordErrorsTo(&error);
  google::protobuf::TextFormat::ParseInfoTree places;
  parser.WriteLocationsTo(&places);
  if (parser.ParseFromString(*text, spec)) {
    for (int i = 0; i < v1::PlanSpec::descriptor()->field_count(); ++i) {
      const FieldDescriptor* field = v1::PlanSpec::descriptor()->field(i);
      if (places.GetLocation(field, -1).line >= 0) given->insert(field->name());
    }
    return absl::OkStatus();
  }
  std::vector<std::string> names;
  for (int i = 0; i < v1::PlanSpec::descriptor()->field_count(); ++i) {
    names.push_back(v1::PlanSpec::descriptor()->field(i)->name());
  }
  return ErrorStatus(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
                     absl::StrCat(path, absl::StripSuffix(error.text(), "."),
                                  ". A configuration is lines of \"name: "
                                  "value\"; names are ",
                                  absl::StrJoin(names, ", ")));
}

std::string Bar(double part) {
  const int filled = static_cast<int>(part * kBarColumns + 0.5);
  return std::string(std::max(0, std::min(filled, kBarColumns)), '#');
}

std::string TargetsText(const v1::PlanGroup& group) {
  std::vector<std::string> targets;
  for (const v1::PlanGroup::Target& target : group.targets()) {
    if (static_cast<int>(targets.size()) == kShownTargets) {
      targets.push_back(absl::StrCat("... ", group.targets_size(), " in all"));
      break;
    }
    targets.push_back(absl::StrCat(
        target.replica(), ":", target.tp(),
        target.port() > 0 ? absl::StrCat(" at ", target.port()) : ""));
  }
  return targets.empty() ? "nobody" : absl::StrJoin(targets, ", ");
}

std::string ChainText(const v1::PlanGroup& group) {
  std::vector<std::string> nodes(group.nodes().begin(), group.nodes().end());
  if (static_cast<int>(nodes.size()) > kShownTargets) {
    const std::string last = nodes.back();
    nodes.resize(kShownTargets / 2);
    nodes.push_back("...");
    nodes.push_back(absl::StrCat(last, " (", group.nodes_size(), " in all)"));
  }
  return absl::StrJoin(nodes, " > ");
}

std::string PolicyText(v1::TransferPolicy policy) {
  std::string name = v1::TransferPolicy_Name(policy);
  const std::string prefix = "TRANSFER_POLICY_";
  return absl::StartsWith(name, prefix) ? name.substr(prefix.size()) : name;
}

}  // namespace

bool IsPlanOption(absl::string_view name) {
  return name == "config" || name == "catalog" || name == "registered" ||
         name == "worker" ||
         v1::PlanSpec::descriptor()->FindFieldByName(std::string(name)) !=
             nullptr;
}

absl::StatusOr<schedule::Catalog> ReadCatalog(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder =
      slash == std::string::npos ? "" : path.substr(0, slash + 1);
  std::vector<schedule::SafetensorsFile> files;
  if (!absl::EndsWith(path, ".json")) {
    absl::StatusOr<schedule::SafetensorsFile> file = ReadHeader("", path);
    if (!file.ok()) return file.status();
    files.push_back(*std::move(file));
    return schedule::CatalogFromSafetensors(files);
  }
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  const absl::StatusOr<schedule::SafetensorsIndex> index =
      schedule::ParseSafetensorsIndex(*text);
  if (!index.ok()) {
    return NoSafetensors(path, std::string(index.status().message()));
  }
  for (const std::string& name : index->Files()) {
    absl::StatusOr<schedule::SafetensorsFile> file = ReadHeader(folder, name);
    if (!file.ok()) return file.status();
    files.push_back(*std::move(file));
  }
  return schedule::CatalogFromSafetensors(files, &*index);
}

absl::StatusOr<std::string> ReadTextFile(const std::string& path) {
  return ReadFile(path);
}

absl::StatusOr<PlanOrder> ReadPlanOrder(const Options& options) {
  PlanOrder order;
  std::set<std::string> given;
  // Fields of the spec, by option or in the file.
  std::set<std::string> written;
  for (const auto& option : options) {
    const bool again = !given.insert(option.first).second;
    if (option.first != "config") continue;  // of others the last one counts
    if (again) return Usage("--config is given twice; it names one file");
    const absl::Status read = ReadConfig(option.second, &order.spec, &written);
    if (!read.ok()) return read;
  }
  // One thing under two names: the option is meant, not the file.
  for (const auto& names :
       {std::make_pair("bucket_size", "weight_chunked_mem_mb"),
        std::make_pair("weight_chunked_mem_mb", "bucket_size"),
        std::make_pair("catalog", "model")}) {
    if (given.count(names.first) == 0) continue;
    order.spec.GetReflection()->ClearField(
        &order.spec, v1::PlanSpec::descriptor()->FindFieldByName(names.second));
    written.erase(names.second);
  }
  for (const auto& option : options) {
    const std::string& name = option.first;
    const std::string& value = option.second;
    if (name == "config") continue;
    if (name == "catalog") {
      order.catalog_path = value;
    } else if (name == "registered") {
      const absl::StatusOr<std::string> model = ParseTopName(value, "models");
      if (!model.ok()) return Usage(std::string(model.status().message()));
      order.registered = *model;
    } else if (name == "worker") {
      const std::vector<std::string> parts = absl::StrSplit(value, ':');
      std::pair<int, int> worker;
      if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &worker.first) ||
          !absl::SimpleAtoi(parts[1], &worker.second)) {
        return Usage(
            absl::StrCat("--worker ", value, " is no REPLICA:TP, such as 0:1"));
      }
      order.workers.push_back(worker);
    } else {
      const absl::Status set = SetField(name, value, &order.spec);
      if (!set.ok()) return set;
      written.insert(name);
    }
  }
  if (given.count("catalog") > 0 && given.count("model") > 0) {
    return Usage("--model and --catalog both say what is to be sent; give one");
  }
  if (!order.registered.empty()) {
    for (const std::string& name : given) {
      if (name != "registered" && name != "policy") {
        return Usage(absl::StrCat("--registered says by itself what --", name,
                                  " says; only --policy goes with it"));
      }
    }
  }
  for (const std::string& name : written) {
    const absl::Status something = RefuseNothing(order.spec, name);
    if (!something.ok()) return something;
  }
  if (given.count("catalog") > 0) {
    absl::StatusOr<schedule::Catalog> catalog = ReadCatalog(order.catalog_path);
    if (!catalog.ok()) return catalog.status();
    order.catalog = std::make_unique<schedule::Catalog>(*std::move(catalog));
  }
  return order;
}

std::string PlanTitle(const PlanOrder& order) {
  if (!order.registered.empty()) {
    return absl::StrCat(order.registered, " as it would run now");
  }
  const v1::PlanSpec& spec = order.spec;
  std::string title = absl::StrCat(
      order.catalog == nullptr ? spec.model() : LastPart(order.catalog_path),
      ", ", Counted(spec.training_gpus(), "trainer GPU"), " (",
      spec.training_sharding());
  for (const auto& ways : {std::make_pair("pp", spec.training_pp()),
                           std::make_pair("tp", spec.training_tp()),
                           std::make_pair("ep", spec.training_ep())}) {
    if (ways.second > 1) {
      absl::StrAppend(&title, ", ", ways.first, " ", ways.second);
    }
  }
  absl::StrAppend(&title, ") to ",
                  Counted(spec.inference_replicas(), "replica"), " x tp ",
                  spec.inference_tp());
  if (spec.inference_ep() > 1) {
    absl::StrAppend(&title, " ep ", spec.inference_ep());
  }
  return title;
}

std::string RangesText(const std::vector<int>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() &&
           numbers[last + 1] == numbers[last] + 1) {
      ++last;
    }
    absl::StrAppend(&text, i == 0 ? "" : ", ", numbers[i]);
    if (last > i) absl::StrAppend(&text, "-", numbers[last]);
    i = last + 1;
  }
  return text;
}

std::string RenderPlan(const std::string& title,
                       const v1::PlanResponse& response) {
  std::string out =
      absl::StrCat(PolicyText(response.policy()), ": ", title, "\n\n");
  const std::vector<int> senders(response.sender_ranks().begin(),
                                 response.sender_ranks().end());
  const std::pair<const char*, std::string> facts[] = {
      {"bytes of the model",
       absl::StrCat(HumanBytes(response.total_bytes()), " in ",
                    Counted(response.bucket_count(), "bucket"))},
      {"over the network", HumanBytes(response.wire_bytes())},
      {"sent by", senders.empty()
                      ? std::string("nobody")
                      : absl::StrCat(Counted(senders.size(), "rank"), ": ",
                                     RangesText(senders))},
      {"most staging on a node", HumanBytes(response.staging_bytes_per_node())},
      {"transfer bound by", response.bound_by()},
      {"no transfer is faster than",
       HumanDuration(FromProto(response.lower_bound()))}};
  for (const auto& fact : facts) {
    absl::StrAppendFormat(&out, "%-26s  %s\n", fact.first, fact.second);
  }
  out += "\n";

  double longest = 0;
  for (const v1::PhaseTime& phase : response.phases()) {
    longest =
        std::max(longest, absl::ToDoubleSeconds(FromProto(phase.predicted())));
  }
  Table phases({"phase", "predicted", ""});
  for (const v1::PhaseTime& phase : response.phases()) {
    const absl::Duration predicted = FromProto(phase.predicted());
    phases.Add(
        {phase.phase(), HumanDuration(predicted),
         longest > 0 ? Bar(absl::ToDoubleSeconds(predicted) / longest) : ""});
  }
  absl::StrAppend(&out, phases.ToString(), "\n");

  const bool chains = response.policy() == v1::TRANSFER_POLICY_SHARDED;
  Table groups(chains ? std::vector<std::string>{"group", "bytes",
                                                 "from node "
                                                 "to node"}
                      : std::vector<std::string>{"group", "sender", "on node",
                                                 "replica:tp"});
  for (int i = 0; i < std::min(kShownGroups, response.groups_size()); ++i) {
    const v1::PlanGroup& group = response.groups(i);
    const std::string id = absl::StrCat(group.group_id());
    if (chains) {
      groups.Add({id, HumanBytes(group.bytes()), ChainText(group)});
    } else {
      groups.Add({id, absl::StrCat("rank ", group.sender_rank()),
                  group.nodes_size() > 0 ? group.nodes(0) : "-",
                  TargetsText(group)});
    }
  }
  if (response.groups_size() > 0) absl::StrAppend(&out, groups.ToString());
  if (response.groups_size() > kShownGroups) {
    absl::StrAppend(&out, "... ", WithCommas(response.groups_size()),
                    " groups in all; --json lists them\n");
  }
  absl::StrAppend(&out, "\nsnapshot, gather and transfer run at once; ",
                  "pauses follow\npolicies weighed: ", response.explanation(),
                  "\nplan ", response.plan_digest(), ", made in ",
                  HumanDuration(FromProto(response.plan_duration())), "\n");
  return out;
}

std::string RenderCopies(const schedule::PlanReport& report) {
  std::string out;
  for (const schedule::WorkerReport& worker : report.workers) {
    int64_t bytes = 0;
    Table table(
        {"bucket", "rank", "handed on by", "bytes", "parameter", "box"});
    for (const schedule::CopyReport& copy : worker.copies) {
      bytes += copy.bytes;
      table.Add({absl::StrCat(copy.bucket), absl::StrCat(copy.source_rank),
                 report.nodes[copy.from_node], WithCommas(copy.bytes),
                 copy.parameter, schedule::BoxString(copy.box)});
    }
    absl::StrAppend(&out, "\nworker ", worker.replica, ":", worker.tp, " on ",
                    report.nodes[worker.node], ": ",
                    Counted(static_cast<int64_t>(worker.copies.size()), "copy"),
                    ", ", HumanBytes(bytes), "\n", table.ToString());
  }
  return out;
}

}  // namespace ctl
}  // namespace weightsync
