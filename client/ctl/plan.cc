#include "client/ctl/plan.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cc/wire_time.h"
#include "client/ctl/format.h"
#include "client/ctl/names.h"
#include "proto/status.h"
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

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) return CannotOpen(path);
  std::string text((std::istreambuf_iterator<char>(file)),
                   std::istreambuf_iterator<char>());
  if (file.bad()) return CannotOpen(path);
  return text;
}

// The JSON of a safetensors file's header.
absl::StatusOr<std::string> ReadHeader(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) return CannotOpen(path);
  unsigned char length[8];
  uint64_t bytes = 0;
  bool ok = !!file.read(reinterpret_cast<char*>(length), sizeof(length));
  for (int i = 7; i >= 0; --i) bytes = bytes << 8 | length[i];
  std::string header;
  ok = ok && bytes <= kMaxHeaderBytes;
  if (ok) {
    header.resize(bytes);
    ok = !!file.read(&header[0], static_cast<std::streamsize>(bytes));
  }
  if (ok) return header;
  return ErrorStatus(absl::StatusCode::kInvalidArgument, "INVALID_SAFETENSORS",
                     absl::StrCat(path,
                                  " does not begin with the header of a "
                                  "safetensors file"));
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

absl::Status ReadConfig(const std::string& path, v1::PlanSpec* spec) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  google::protobuf::TextFormat::Parser parser;
  FirstError error;
  parser.RecordErrorsTo(&error);
  if (parser.ParseFromString(*text, spec)) return absl::OkStatus();
  std::vector<std::string> names;
  for (int i = 0; i < v1::PlanSpec::descriptor()->field_count(); ++i) {
    names.push_back(v1::PlanSpec::descriptor()->field(i)->name());
  }
  return ErrorStatus(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
                     absl::StrCat(path, error.text(),
                                  " A configuration is lines of \"name: "
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
  std::vector<std::string> headers;
  if (absl::EndsWith(path, ".json")) {
    absl::StatusOr<std::string> index = ReadFile(path);
    if (!index.ok()) return index.status();
    absl::StatusOr<std::vector<std::string>> files =
        schedule::FilesOfSafetensorsIndex(*index);
    if (!files.ok()) return files.status();
    const size_t slash = path.rfind('/');
    const std::string folder =
        slash == std::string::npos ? "" : path.substr(0, slash + 1);
    for (const std::string& file : *files) {
      absl::StatusOr<std::string> header =
          ReadHeader(absl::StrCat(folder, file));
      if (!header.ok()) return header.status();
      headers.push_back(*std::move(header));
    }
  } else {
    absl::StatusOr<std::string> header = ReadHeader(path);
    if (!header.ok()) return header.status();
    headers.push_back(*std::move(header));
  }
  const std::vector<absl::string_view> views(headers.begin(), headers.end());
  return schedule::CatalogFromSafetensors(views);
}

absl::StatusOr<PlanOrder> ReadPlanOrder(const Options& options) {
  PlanOrder order;
  std::set<std::string> given;
  for (const auto& option : options) {
    given.insert(option.first);
    if (option.first != "config") continue;
    const absl::Status read = ReadConfig(option.second, &order.spec);
    if (!read.ok()) return read;
  }
  // One thing under two names: the option is meant, not the file.
  if (given.count("bucket_size") > 0) order.spec.clear_weight_chunked_mem_mb();
  if (given.count("weight_chunked_mem_mb") > 0) order.spec.clear_bucket_size();
  if (given.count("catalog") > 0) order.spec.clear_model();
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
    }
  }
  if (!order.registered.empty()) {
    for (const std::string& name : given) {
      if (name != "registered" && name != "policy") {
        return Usage(absl::StrCat("--registered says by itself what --", name,
                                  " says; only --policy goes with it"));
      }
    }
  }
  if (!order.catalog_path.empty()) {
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
      ", ", spec.training_gpus(), " trainer GPUs (", spec.training_sharding());
  for (const auto& ways : {std::make_pair("pp", spec.training_pp()),
                           std::make_pair("tp", spec.training_tp()),
                           std::make_pair("ep", spec.training_ep())}) {
    if (ways.second > 1) {
      absl::StrAppend(&title, ", ", ways.first, " ", ways.second);
    }
  }
  absl::StrAppend(&title, ") to ", spec.inference_replicas(), " replicas x tp ",
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
                    WithCommas(response.bucket_count()), " buckets")},
      {"over the network", HumanBytes(response.wire_bytes())},
      {"sent by",
       senders.empty()
           ? std::string("nobody")
           : absl::StrCat(senders.size(), " ranks: ", RangesText(senders))},
      {"most staging on a node", HumanBytes(response.staging_bytes_per_node())},
      {"bound by", response.bound_by()},
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
  absl::StrAppend(&out, "\npolicies weighed: ", response.explanation(),
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
                    WithCommas(static_cast<int64_t>(worker.copies.size())),
                    " copies, ", HumanBytes(bytes), "\n", table.ToString());
  }
  return out;
}

}  // namespace ctl
}  // namespace weightsync
