#include "client/ctl/commands.h"

#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "client/cc/rpc.h"
#include "client/cc/wire_time.h"
#include "client/ctl/format.h"
#include "client/ctl/help.h"
#include "client/ctl/mapping.h"
#include "client/ctl/names.h"
#include "client/ctl/plan.h"
#include "client/ctl/render.h"
#include "nlohmann/json.hpp"
#include "proto/plan.h"
#include "proto/status.h"
#include "schedule/catalog.h"
#include "schedule/describe.h"
#include "weightsync/v1/admin.grpc.pb.h"

namespace weightsync {
namespace ctl {
namespace {

constexpr absl::Duration kDefaultTimeout = absl::Seconds(10);
constexpr absl::Duration kOperationTimeout = absl::Minutes(2);
// What moves a model to or from a disk.
constexpr absl::Duration kDiskTimeout = absl::Minutes(10);

// Options with a value, and whose they are.
constexpr struct {
  const char* name;
  const char* command;
} kCommandOptions[] = {
    {"--mode", "pause"},           {"--template", "save"},
    {"--max_shard_bytes", "save"}, {"--version", "load"},
    {"--pause_mode", "load"},      {"--rules", "names"},
};

struct Arguments {
  std::string command;
  std::vector<std::string> positional;
  std::string address;
  absl::optional<absl::Duration> timeout;
  // By kCommandOptions.
  std::map<std::string, std::string> values;
  bool undo = false;
  bool overwrite = false;
  bool json = false;
  bool help = false;
  // Those of `plan`.
  Options options;
};

// Takes "--name value" and "--name=value".
absl::StatusOr<Arguments> Parse(const std::vector<std::string>& args,
                                const std::string& default_address) {
  Arguments parsed;
  parsed.address = default_address;
  const auto usage = [](const std::string& message) {
    return absl::InvalidArgumentError(message);
  };
  for (size_t i = 0; i < args.size(); ++i) {
    std::string name = args[i];
    if (!absl::StartsWith(name, "-") || name == "-") {
      if (parsed.command.empty()) {
        parsed.command = name;
      } else {
        parsed.positional.push_back(name);
      }
      continue;
    }
    if (name == "--json") {
      parsed.json = true;
      continue;
    }
    if (name == "--undo") {
      parsed.undo = true;
      continue;
    }
    if (name == "--overwrite") {
      parsed.overwrite = true;
      continue;
    }
    if (name == "--help" || name == "-h") {
      parsed.help = true;
      continue;
    }
    std::string value;
    const size_t equals = name.find('=');
    if (equals != std::string::npos) {
      value = name.substr(equals + 1);
      name.resize(equals);
    }
    const bool of_plan =
        absl::StartsWith(name, "--") && IsPlanOption(name.substr(2));
    const bool of_command = std::any_of(
        std::begin(kCommandOptions), std::end(kCommandOptions),
        [&name](const auto& option) { return name == option.name; });
    if (name != "--address" && name != "--timeout" && !of_command && !of_plan) {
      return usage(absl::StrCat("unknown option ", name));
    }
    if (equals == std::string::npos) {
      if (i + 1 == args.size()) {
        return usage(absl::StrCat(name, " needs a value"));
      }
      value = args[++i];
    }
    if (of_plan) {
      parsed.options.emplace_back(name.substr(2), value);
      continue;
    }
    if (name == "--address") {
      parsed.address = value;
      continue;
    }
    if (of_command) {
      parsed.values[name] = value;
      continue;
    }
    absl::Duration timeout;
    if (!absl::ParseDuration(value, &timeout) ||
        timeout <= absl::ZeroDuration()) {
      return usage(absl::StrCat("--timeout ", value,
                                " is no time: write 500ms, 10s or 2m"));
    }
    parsed.timeout = timeout;
  }
  // What a command does not know it must not seem to have heeded.
  if (parsed.undo && parsed.command != "drain") {
    return usage("--undo is an option of drain only");
  }
  if (parsed.overwrite && parsed.command != "save") {
    return usage("--overwrite is an option of save only");
  }
  for (const auto& option : kCommandOptions) {
    if (parsed.values.count(option.name) != 0 &&
        parsed.command != option.command) {
      return usage(absl::StrCat(option.name, " is an option of ",
                                option.command, " only"));
    }
  }
  if (!parsed.options.empty() && parsed.command != "plan") {
    return usage(absl::StrCat("--", parsed.options[0].first,
                              " is an option of plan only"));
  }
  return parsed;
}

absl::StatusOr<std::string> ToJson(const google::protobuf::Message& message,
                                   bool pretty) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = pretty;
  options.always_print_primitive_fields = true;
  std::string text;
  const auto status =
      google::protobuf::util::MessageToJsonString(message, &text, options);
  if (!status.ok()) return absl::InternalError(status.ToString());
  return text;
}

// With --json an error is one object on one line, on the same screen as the
// sentence for people would be.
void PrintError(const Screen& screen, bool json, const absl::Status& status,
                const std::string& help) {
  const bool usage = !help.empty();
  if (!json) {
    *screen.err << "weightsyncctl: ";
    if (!usage) *screen.err << ErrorReason(status) << ": ";
    *screen.err << status.message() << "\n";
    if (usage) *screen.err << "\n" << help;
    return;
  }
  nlohmann::ordered_json error;
  error["code"] = absl::StatusCodeToString(status.code());
  error["reason"] = usage ? "USAGE" : ErrorReason(status);
  error["message"] = std::string(status.message());
  // What comes from a command line need not be UTF-8.
  *screen.err << error.dump(-1, ' ', false,
                            nlohmann::ordered_json::error_handler_t::replace)
              << "\n";
}

int ExitOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kUnavailable:
      return kExitUnreachable;
    case absl::StatusCode::kNotFound:
      return kExitNotFound;
    case absl::StatusCode::kDeadlineExceeded:
      // A daemon that does not answer, not one that says that time is up.
      return ErrorReason(status) == "CALL_TIMEOUT" ? kExitUnreachable
                                                   : kExitError;
    default:
      return kExitError;
  }
}

class Ctl {
 public:
  Ctl(const Arguments& arguments, std::shared_ptr<grpc::Channel> channel,
      const Screen& screen)
      : arguments_(arguments),
        stub_(v1::AdminService::NewStub(std::move(channel))),
        screen_(screen) {}

  int Status();
  int Watch();
  int Models();
  int Versions();
  int Replicas();
  int Nodes();
  int Prepare();
  int Pause();
  int Resume();
  int Rollback();
  int Release();
  int Verify();
  int Drain();
  int Delete();
  int Adopt();
  int Remove();
  int Names();
  int Plan();
  int Save();
  int Load();

 private:
  // Of a registered model: its daemon makes the plan.
  absl::StatusOr<v1::PlanResponse> AskPlan(const PlanOrder& order);

  absl::Duration timeout() const {
    return arguments_.timeout.value_or(disk_    ? kDiskTimeout
                                       : waits_ ? kOperationTimeout
                                                : kDefaultTimeout);
  }
  // What an operator asks for takes its time; the daemon's own answer, which
  // names who is missing, comes before the call's deadline.
  template <typename Request>
  void SayTimeout(Request* request) {
    waits_ = true;
    *request->mutable_timeout() = client::ToProto(
        std::max(timeout() * 0.5,
                 std::min(timeout() * 0.9, timeout() - absl::Seconds(1))));
  }
  // The replica that the only argument names; prints why not.
  absl::optional<std::string> OneName(const char* collection,
                                      const char* usage);

  int Fail(const absl::Status& status) {
    PrintError(screen_, arguments_.json, status, "");
    return ExitOf(status);
  }
  int Usage(const std::string& message) {
    PrintError(screen_, arguments_.json, absl::InvalidArgumentError(message),
               CommandHelp(arguments_.command));
    return kExitUsage;
  }
  int UsageOf(const absl::Status& status) {
    return Usage(std::string(status.message()));
  }

  int Print(const google::protobuf::Message& message,
            const std::function<std::string()>& text) {
    if (!arguments_.json) {
      *screen_.out << text();
      return kExitOk;
    }
    const absl::StatusOr<std::string> json = ToJson(message, /*pretty=*/true);
    if (!json.ok()) return Fail(json.status());
    *screen_.out << *json;
    if (!absl::EndsWith(*json, "\n")) *screen_.out << "\n";
    return kExitOk;
  }

  template <typename Fn>
  absl::Status Call(const char* what, Fn call) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + timeout()));
    return client::CallStatus(what, call(&context));
  }

  // All pages. `merged` is the response with every item in it.
  template <typename Request, typename Response, typename Fn>
  absl::Status ListAll(const char* what, Request request, Response* merged,
                       Fn call) {
    request.set_page_size(1000);
    do {
      Response page;
      const absl::Status status = Call(what, [&](grpc::ClientContext* context) {
        return call(context, request, &page);
      });
      if (!status.ok()) return status;
      request.set_page_token(page.next_page_token());
      page.clear_next_page_token();
      merged->MergeFrom(page);
    } while (!request.page_token().empty());
    return absl::OkStatus();
  }

  absl::Status GetCluster(v1::Cluster* cluster) {
    return Call("GetCluster", [&](grpc::ClientContext* context) {
      return stub_->GetCluster(context, v1::GetClusterRequest(), cluster);
    });
  }

  // Prints a list. One that is empty because the coordinator has lost its
  // journal, and knows of nothing, says so instead.
  int PrintList(const google::protobuf::Message& list, int size,
                const std::function<std::string()>& text) {
    v1::Cluster cluster;
    if (size == 0 && GetCluster(&cluster).ok() && cluster.has_blocked()) {
      return Fail(FromFailure(cluster.blocked()));
    }
    return Print(list, text);
  }

  absl::Status ListNodes(v1::ListNodesResponse* response) {
    return ListAll("ListNodes", v1::ListNodesRequest(), response,
                   [this](auto* c, const auto& q, auto* r) {
                     return stub_->ListNodes(c, q, r);
                   });
  }
  absl::Status ListModels(v1::ListModelsResponse* response) {
    return ListAll("ListModels", v1::ListModelsRequest(), response,
                   [this](auto* c, const auto& q, auto* r) {
                     return stub_->ListModels(c, q, r);
                   });
  }
  absl::Status ListReplicas(const std::string& parent,
                            v1::ListReplicasResponse* response) {
    v1::ListReplicasRequest request;
    request.set_parent(parent);
    return ListAll("ListReplicas", request, response,
                   [this](auto* c, const auto& q, auto* r) {
                     return stub_->ListReplicas(c, q, r);
                   });
  }
  absl::Status ListVersions(const std::string& parent,
                            v1::ListVersionsResponse* response) {
    v1::ListVersionsRequest request;
    request.set_parent(parent);
    return ListAll("ListVersions", request, response,
                   [this](auto* c, const auto& q, auto* r) {
                     return stub_->ListVersions(c, q, r);
                   });
  }

  // "" where it was not given.
  std::string Value(const std::string& option) const {
    auto it = arguments_.values.find(option);
    return it == arguments_.values.end() ? std::string() : it->second;
  }
  absl::StatusOr<v1::PauseMode> PauseModeOf(const std::string& option) const {
    const std::string value = Value(option);
    v1::PauseMode mode = v1::PAUSE_MODE_UNSPECIFIED;
    if (!value.empty() &&
        !v1::PauseMode_Parse(
            absl::StrCat("PAUSE_MODE_", absl::AsciiStrToUpper(value)), &mode)) {
      return absl::InvalidArgumentError(
          absl::StrCat(option, " ", value, " is none of abort, drain, keep"));
    }
    return mode;
  }
  absl::StatusOr<int64_t> NumberOf(const std::string& option) const {
    const std::string value = Value(option);
    int64_t number = 0;
    if (!value.empty() && (!absl::SimpleAtoi(value, &number) || number < 1)) {
      return absl::InvalidArgumentError(
          absl::StrCat(option, " ", value, " is no positive number"));
    }
    return number;
  }
  // One side of `names`: a file, a model, or what a replica's workers take.
  absl::StatusOr<std::vector<NamedTensor>> ReadNames(const std::string& source);

  // The version that `watch` follows.
  absl::StatusOr<std::string> WatchedName();

  template <typename T>
  static std::vector<T> ToVector(
      const google::protobuf::RepeatedPtrField<T>& items) {
    return std::vector<T>(items.begin(), items.end());
  }

  const Arguments& arguments_;
  const std::unique_ptr<v1::AdminService::Stub> stub_;
  const Screen& screen_;
  bool waits_ = false;
  bool disk_ = false;
};

int Ctl::Status() {
  if (!arguments_.positional.empty()) return Usage("status takes no argument");
  v1::Cluster cluster;
  v1::ListNodesResponse nodes;
  v1::ListModelsResponse models;
  v1::ListReplicasResponse replicas;
  absl::Status status = GetCluster(&cluster);
  if (status.ok()) status = ListNodes(&nodes);
  if (status.ok()) status = ListModels(&models);
  if (status.ok()) status = ListReplicas("models/-", &replicas);
  if (!status.ok()) return Fail(status);
  // The newest of each model, and the one that runs.
  v1::ListVersionsResponse versions;
  for (const v1::Model& model : models.models()) {
    std::vector<std::string> names = {
        absl::StrCat(model.name(), "/versions/latest")};
    if (!model.updating_version().empty()) {
      names.push_back(model.updating_version());
    }
    for (const std::string& name : names) {
      v1::GetVersionRequest request;
      request.set_name(name);
      v1::Version version;
      status = Call("GetVersion", [&](grpc::ClientContext* context) {
        return stub_->GetVersion(context, request, &version);
      });
      // There is none before the first publish, and old ones are forgotten.
      if (absl::IsNotFound(status)) continue;
      if (!status.ok()) return Fail(status);
      const bool known =
          std::any_of(versions.versions().begin(), versions.versions().end(),
                      [&](const v1::Version& v) {
                        return v.update_id() == version.update_id();
                      });
      if (!known) *versions.add_versions() = version;
    }
  }
  if (!arguments_.json) {
    Snapshot snapshot;
    snapshot.cluster = cluster;
    snapshot.nodes = ToVector(nodes.nodes());
    snapshot.models = ToVector(models.models());
    snapshot.replicas = ToVector(replicas.replicas());
    snapshot.versions = ToVector(versions.versions());
    *screen_.out << RenderStatus(snapshot, absl::Now());
    return cluster.has_blocked() ? kExitError : kExitOk;
  }
  const auto list = [](const auto& items) {
    return absl::StrJoin(items, ",", [](std::string* out, const auto& item) {
      out->append(ToJson(item, /*pretty=*/false).value_or("{}"));
    });
  };
  *screen_.out << "{\"cluster\":"
               << ToJson(cluster, /*pretty=*/false).value_or("{}")
               << ",\"nodes\":[" << list(nodes.nodes()) << "],\"models\":["
               << list(models.models()) << "],\"replicas\":["
               << list(replicas.replicas()) << "],\"versions\":["
               << list(versions.versions()) << "]}\n";
  return cluster.has_blocked() ? kExitError : kExitOk;
}

absl::StatusOr<std::string> Ctl::WatchedName() {
  if (arguments_.positional.empty()) {
    v1::ListModelsResponse models;
    const absl::Status status = ListModels(&models);
    if (!status.ok()) return status;
    if (models.models().empty()) {
      return ErrorStatus(absl::StatusCode::kNotFound, "MODEL_UNKNOWN",
                         "There is no model yet.");
    }
    if (models.models_size() > 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "there are several models, name one: ",
          absl::StrJoin(models.models(), ", ",
                        [](std::string* out, const v1::Model& model) {
                          out->append(LastPart(model.name()));
                        })));
    }
    return absl::StrCat(models.models(0).name(), "/versions/latest");
  }
  const absl::StatusOr<Name> name =
      ParseName(arguments_.positional[0], "versions");
  if (!name.ok()) return name.status();
  return name->resource.empty() ? absl::StrCat(name->model, "/versions/latest")
                                : name->resource;
}

int Ctl::Watch() {
  if (arguments_.positional.size() > 1) return Usage("watch takes one VERSION");
  const absl::StatusOr<std::string> name = WatchedName();
  if (!name.ok()) {
    return absl::IsInvalidArgument(name.status()) ? UsageOf(name.status())
                                                  : Fail(name.status());
  }
  const bool latest = absl::EndsWith(*name, "/latest");
  v1::WatchVersionRequest request;
  request.set_name(*name);
  grpc::ClientContext context;
  if (arguments_.timeout.has_value()) {
    context.set_deadline(absl::ToChronoTime(absl::Now() + *arguments_.timeout));
  }
  const std::unique_ptr<grpc::ClientReader<v1::Version>> reader =
      stub_->WatchVersion(&context, request);
  v1::Version version;
  std::string shown_update;
  v1::Version::State shown_state = v1::Version::STATE_UNSPECIFIED;
  int shown_tenth = -1;
  bool line_open = false;
  while (reader->Read(&version)) {
    const bool ended = HasEnded(version);
    const absl::Time now = absl::Now();
    if (arguments_.json) {
      *screen_.out << ToJson(version, /*pretty=*/false).value_or("{}") << "\n";
    } else if (screen_.terminal) {
      if (line_open && shown_update != version.update_id()) {
        *screen_.out << "\n";
      }
      *screen_.out << "\r\033[K" << ProgressBar(version, now, screen_.columns);
      if (ended) *screen_.out << "\n";
      line_open = !ended;
    } else {
      // A line for each state, and for each tenth of a state that takes long.
      const int tenth = static_cast<int>(Fraction(version) * 10);
      if (shown_update != version.update_id() ||
          shown_state != version.state() || tenth > shown_tenth) {
        *screen_.out << ProgressLine(version, now) << "\n";
        shown_tenth = tenth;
      }
    }
    screen_.out->flush();
    shown_update = version.update_id();
    shown_state = version.state();
  }
  if (line_open) *screen_.out << "\n";
  const absl::Status status =
      client::CallStatus("WatchVersion", reader->Finish());
  if (status.ok()) {
    if (shown_state == v1::Version::STATE_ACTIVE) return kExitOk;
    if (HasEnded(version)) return kExitAborted;
    return Fail(ErrorStatus(absl::StatusCode::kUnavailable, "STREAM_ENDED",
                            "The daemon ended the watch before the version "
                            "had ended."));
  }
  if (absl::IsDeadlineExceeded(status) && arguments_.timeout.has_value()) {
    // Asked for; the newest version is followed until then. But silence may be
    // that of a coordinator which does not answer.
    if (latest) {
      v1::Cluster cluster;
      const absl::Status alive = GetCluster(&cluster);
      return alive.ok() ? kExitOk : Fail(alive);
    }
    return Fail(ErrorStatus(
        absl::StatusCode::kDeadlineExceeded, "WATCH_TIMEOUT",
        absl::StrCat(*name, " goes on after ",
                     absl::FormatDuration(*arguments_.timeout), ".")));
  }
  return Fail(status);
}

int Ctl::Models() {
  if (arguments_.positional.empty()) {
    v1::ListModelsResponse response;
    const absl::Status status = ListModels(&response);
    if (!status.ok()) return Fail(status);
    return PrintList(response, response.models_size(),
                     [&] { return RenderModels(ToVector(response.models())); });
  }
  if (arguments_.positional.size() > 1) return Usage("models takes one MODEL");
  const auto name = ParseTopName(arguments_.positional[0], "models");
  if (!name.ok()) return UsageOf(name.status());
  v1::GetModelRequest request;
  request.set_name(*name);
  v1::Model model;
  const absl::Status status =
      Call("GetModel", [&](grpc::ClientContext* context) {
        return stub_->GetModel(context, request, &model);
      });
  if (!status.ok()) return Fail(status);
  return Print(model, [&] { return RenderModel(model); });
}

int Ctl::Versions() {
  if (arguments_.positional.size() > 1) {
    return Usage("versions takes one MODEL or VERSION");
  }
  Name name;
  name.model = "models/-";
  if (!arguments_.positional.empty()) {
    const auto parsed = ParseName(arguments_.positional[0], "versions");
    if (!parsed.ok()) return UsageOf(parsed.status());
    name = *parsed;
  }
  if (name.resource.empty()) {
    v1::ListVersionsResponse response;
    const absl::Status status = ListVersions(name.model, &response);
    if (!status.ok()) return Fail(status);
    return PrintList(response, response.versions_size(), [&] {
      return RenderVersions(ToVector(response.versions()), absl::Now());
    });
  }
  v1::GetVersionRequest request;
  request.set_name(name.resource);
  v1::Version version;
  const absl::Status status =
      Call("GetVersion", [&](grpc::ClientContext* context) {
        return stub_->GetVersion(context, request, &version);
      });
  if (!status.ok()) return Fail(status);
  return Print(version, [&] { return RenderVersion(version, absl::Now()); });
}

int Ctl::Replicas() {
  if (arguments_.positional.size() > 1) {
    return Usage("replicas takes one MODEL or REPLICA");
  }
  Name name;
  name.model = "models/-";
  if (!arguments_.positional.empty()) {
    const auto parsed = ParseName(arguments_.positional[0], "replicas");
    if (!parsed.ok()) return UsageOf(parsed.status());
    name = *parsed;
  }
  if (name.resource.empty()) {
    v1::ListReplicasResponse response;
    const absl::Status status = ListReplicas(name.model, &response);
    if (!status.ok()) return Fail(status);
    return PrintList(response, response.replicas_size(), [&] {
      return RenderReplicas(ToVector(response.replicas()));
    });
  }
  v1::GetReplicaRequest request;
  request.set_name(name.resource);
  v1::Replica replica;
  const absl::Status status =
      Call("GetReplica", [&](grpc::ClientContext* context) {
        return stub_->GetReplica(context, request, &replica);
      });
  if (!status.ok()) return Fail(status);
  return Print(replica, [&] { return RenderReplica(replica); });
}

int Ctl::Nodes() {
  if (arguments_.positional.empty()) {
    v1::ListNodesResponse response;
    const absl::Status status = ListNodes(&response);
    if (!status.ok()) return Fail(status);
    return PrintList(response, response.nodes_size(), [&] {
      return RenderNodes(ToVector(response.nodes()), absl::Now());
    });
  }
  if (arguments_.positional.size() > 1) return Usage("nodes takes one NODE");
  const auto name = ParseTopName(arguments_.positional[0], "nodes");
  if (!name.ok()) return UsageOf(name.status());
  v1::GetNodeRequest request;
  request.set_name(*name);
  v1::Node node;
  const absl::Status status =
      Call("GetNode", [&](grpc::ClientContext* context) {
        return stub_->GetNode(context, request, &node);
      });
  if (!status.ok()) return Fail(status);
  return Print(node, [&] { return RenderNode(node, absl::Now()); });
}

int Ctl::Prepare() {
  if (arguments_.positional.size() != 1) return Usage("prepare needs a MODEL");
  const auto name = ParseTopName(arguments_.positional[0], "models");
  if (!name.ok()) return UsageOf(name.status());
  v1::PrepareRequest request;
  request.set_model(*name);
  // The daemon's own answer comes before the call's deadline.
  *request.mutable_timeout() = client::ToProto(timeout() * 0.9);
  v1::PrepareResponse response;
  const absl::Status status =
      Call("Prepare", [&](grpc::ClientContext* context) {
        return stub_->Prepare(context, request, &response);
      });
  if (!status.ok()) return Fail(status);
  return Print(response, [&] {
    return absl::StrCat(
        *name, " is ready: layout ", response.layout_id(), ", ",
        response.bucket_count(), " buckets, ",
        HumanBytes(response.wire_bytes()), " over the network, prepared in ",
        HumanDuration(client::FromProto(response.prepare_duration())), "\n");
  });
}

// ---- What changes something ----

absl::optional<std::string> Ctl::OneName(const char* collection,
                                         const char* usage) {
  if (arguments_.positional.size() != 1) {
    Usage(usage);
    return absl::nullopt;
  }
  const absl::StatusOr<Name> name =
      ParseName(arguments_.positional[0], collection);
  if (!name.ok()) {
    UsageOf(name.status());
    return absl::nullopt;
  }
  if (name->resource.empty()) {
    Usage(usage);
    return absl::nullopt;
  }
  return name->resource;
}

int Ctl::Pause() {
  const auto name = OneName("replicas", "pause needs a REPLICA");
  if (!name.has_value()) return kExitUsage;
  v1::PauseReplicaRequest request;
  request.set_name(*name);
  const absl::StatusOr<v1::PauseMode> mode = PauseModeOf("--mode");
  if (!mode.ok()) return UsageOf(mode.status());
  request.set_mode(*mode);
  SayTimeout(&request);
  v1::Replica replica;
  const absl::Status status =
      Call("PauseReplica", [&](grpc::ClientContext* context) {
        return stub_->PauseReplica(context, request, &replica);
      });
  if (!status.ok()) return Fail(status);
  return Print(replica, [&] { return RenderReplica(replica); });
}

int Ctl::Resume() {
  const auto name = OneName("replicas", "resume needs a REPLICA");
  if (!name.has_value()) return kExitUsage;
  v1::ResumeReplicaRequest request;
  request.set_name(*name);
  waits_ = true;
  v1::Replica replica;
  const absl::Status status =
      Call("ResumeReplica", [&](grpc::ClientContext* context) {
        return stub_->ResumeReplica(context, request, &replica);
      });
  if (!status.ok()) return Fail(status);
  return Print(replica, [&] { return RenderReplica(replica); });
}

int Ctl::Rollback() {
  const auto name = OneName("versions", "rollback needs a VERSION");
  if (!name.has_value()) return kExitUsage;
  v1::RollbackModelRequest request;
  request.set_version(*name);
  SayTimeout(&request);
  v1::Model model;
  const absl::Status status =
      Call("RollbackModel", [&](grpc::ClientContext* context) {
        return stub_->RollbackModel(context, request, &model);
      });
  if (!status.ok()) return Fail(status);
  return Print(model, [&] {
    return absl::StrCat(model.name(), " serves ", model.held_version(),
                        " until `weightsyncctl release ",
                        LastPart(model.name()), "`\n");
  });
}

int Ctl::Release() {
  if (arguments_.positional.size() != 1) return Usage("release needs a MODEL");
  const auto name = ParseTopName(arguments_.positional[0], "models");
  if (!name.ok()) return UsageOf(name.status());
  v1::ReleaseModelRequest request;
  request.set_name(*name);
  SayTimeout(&request);
  v1::Model model;
  const absl::Status status =
      Call("ReleaseModel", [&](grpc::ClientContext* context) {
        return stub_->ReleaseModel(context, request, &model);
      });
  if (!status.ok()) return Fail(status);
  return Print(model, [&] {
    return absl::StrCat(model.name(), " serves ",
                        model.active_version().empty() ? "no version yet"
                                                       : model.active_version(),
                        " and follows new ones\n");
  });
}

int Ctl::Remove() {
  if (arguments_.positional.size() != 1) return Usage("remove needs a MODEL");
  const auto name = ParseTopName(arguments_.positional[0], "models");
  if (!name.ok()) return UsageOf(name.status());
  v1::RemoveModelRequest request;
  request.set_name(*name);
  SayTimeout(&request);
  v1::Model model;
  const absl::Status status =
      Call("RemoveModel", [&](grpc::ClientContext* context) {
        return stub_->RemoveModel(context, request, &model);
      });
  if (!status.ok()) return Fail(status);
  return Print(model, [&] {
    return model.removed()
               ? absl::StrCat(model.name(),
                              " is removed: no engine has it, until it is "
                              "published again\n")
               : absl::StrCat(model.name(),
                              " was removed, and published again "
                              "meanwhile: ",
                              model.active_version(), "\n");
  });
}

int Ctl::Verify() {
  const auto name = OneName("replicas", "verify needs a REPLICA");
  if (!name.has_value()) return kExitUsage;
  v1::VerifyReplicaRequest request;
  request.set_name(*name);
  SayTimeout(&request);
  v1::VerifyReplicaResponse response;
  const absl::Status status =
      Call("VerifyReplica", [&](grpc::ClientContext* context) {
        return stub_->VerifyReplica(context, request, &response);
      });
  if (!status.ok()) return Fail(status);
  const int printed = Print(response, [&] {
    std::string out = absl::StrCat(
        *name, response.equal() ? " holds version " : " DIFFERS from version ",
        response.version(), " (update ", response.update_id(), ")\n");
    for (const auto& worker : response.workers()) {
      absl::StrAppend(&out, "  worker ", worker.worker_index(), " on ",
                      LastPart(worker.node()), ": ");
      if (worker.has_failure()) {
        absl::StrAppend(&out, worker.failure().reason(), ": ",
                        worker.failure().message(), "\n");
        continue;
      }
      absl::StrAppend(&out, worker.tensor_count(), " tensors compared, ",
                      worker.different_tensors_size(), " different\n");
      for (const std::string& tensor : worker.different_tensors()) {
        absl::StrAppend(&out, "    ", tensor, "\n");
      }
    }
    return out;
  });
  return printed == kExitOk && !response.equal() ? kExitError : printed;
}

absl::StatusOr<std::vector<NamedTensor>> Ctl::ReadNames(
    const std::string& source) {
  std::vector<NamedTensor> tensors;
  if (!absl::StartsWith(source, "models/")) {
    const absl::StatusOr<schedule::Catalog> catalog = ReadCatalog(source);
    if (!catalog.ok()) return catalog.status();
    for (const schedule::Param& param : catalog->params()) {
      tensors.push_back({param.name,
                         std::string(schedule::DTypeName(param.dtype)),
                         {param.shape.begin(), param.shape.end()}});
    }
    return tensors;
  }
  const auto add = [&tensors](const auto& tensor) {
    tensors.push_back({tensor.name(),
                       std::string(absl::StripPrefix(
                           v1::DType_Name(tensor.dtype()), "DTYPE_")),
                       {tensor.shape().begin(), tensor.shape().end()}});
  };
  if (absl::StrContains(source, "/replicas/")) {
    v1::GetReplicaRequest request;
    request.set_name(source);
    v1::Replica replica;
    const absl::Status status =
        Call("GetReplica", [&](grpc::ClientContext* context) {
          return stub_->GetReplica(context, request, &replica);
        });
    if (!status.ok()) return status;
    // Each worker has its part of most of them.
    std::set<std::string> seen;
    for (const v1::Worker& worker : replica.workers()) {
      for (const v1::WantedTensor& tensor : worker.tensors()) {
        if (seen.insert(tensor.name()).second) add(tensor);
      }
    }
    return tensors;
  }
  v1::GetModelRequest request;
  request.set_name(source);
  v1::Model model;
  const absl::Status status =
      Call("GetModel", [&](grpc::ClientContext* context) {
        return stub_->GetModel(context, request, &model);
      });
  if (!status.ok()) return status;
  for (const v1::Parameter& parameter : model.parameters()) add(parameter);
  return tensors;
}

int Ctl::Names() {
  if (arguments_.positional.size() != 2) {
    return Usage("names needs a TRAINER and an ENGINE");
  }
  std::vector<NameRule> rules;
  if (!Value("--rules").empty()) {
    const absl::StatusOr<std::string> text = ReadTextFile(Value("--rules"));
    if (!text.ok()) return Fail(text.status());
    absl::StatusOr<std::vector<NameRule>> parsed = ParseNameRules(*text);
    if (!parsed.ok()) return Fail(parsed.status());
    rules = *std::move(parsed);
  }
  std::vector<NamedTensor> sides[2];
  for (int side = 0; side < 2; ++side) {
    auto read = ReadNames(arguments_.positional[side]);
    if (!read.ok()) return Fail(read.status());
    sides[side] = *std::move(read);
  }
  const absl::StatusOr<NameMapping> mapping =
      MapNames(sides[0], sides[1], rules);
  if (!mapping.ok()) return Fail(mapping.status());
  *screen_.out << (arguments_.json ? MappingJson(*mapping)
                                   : RenderMapping(*mapping));
  return mapping->Fits() ? kExitOk : kExitError;
}

int Ctl::Drain() {
  if (arguments_.positional.size() != 1) return Usage("drain needs a NODE");
  const auto name = ParseTopName(arguments_.positional[0], "nodes");
  if (!name.ok()) return UsageOf(name.status());
  v1::DrainNodeRequest request;
  request.set_name(*name);
  request.set_undo(arguments_.undo);
  v1::Node node;
  const absl::Status status =
      Call("DrainNode", [&](grpc::ClientContext* context) {
        return stub_->DrainNode(context, request, &node);
      });
  if (!status.ok()) return Fail(status);
  return Print(node, [&] { return RenderNode(node, absl::Now()); });
}

int Ctl::Delete() {
  if (arguments_.positional.size() != 1) {
    return Usage("delete needs a VERSION or a REPLICA");
  }
  // MODEL/3 is a version, MODEL/NAME a replica; full names say it themselves.
  const std::string& text = arguments_.positional[0];
  const std::string last = LastPart(text);
  const bool version =
      absl::StrContains(text, "/versions/") ||
      (!absl::StrContains(text, "/replicas/") && !last.empty() &&
       last.find_first_not_of("0123456789") == std::string::npos);
  const auto name = OneName(version ? "versions" : "replicas",
                            "delete needs a VERSION or a REPLICA");
  if (!name.has_value()) return kExitUsage;
  const auto forgotten = [&] { return absl::StrCat(*name, " is forgotten\n"); };
  if (version) {
    v1::DeleteVersionRequest request;
    request.set_name(*name);
    v1::DeleteVersionResponse response;
    const absl::Status status =
        Call("DeleteVersion", [&](grpc::ClientContext* context) {
          return stub_->DeleteVersion(context, request, &response);
        });
    return status.ok() ? Print(response, forgotten) : Fail(status);
  }
  v1::DeleteReplicaRequest request;
  request.set_name(*name);
  v1::DeleteReplicaResponse response;
  const absl::Status status =
      Call("DeleteReplica", [&](grpc::ClientContext* context) {
        return stub_->DeleteReplica(context, request, &response);
      });
  return status.ok() ? Print(response, forgotten) : Fail(status);
}

int Ctl::Save() {
  std::vector<std::string> names = arguments_.positional;
  if (names.size() == 3) {
    names = {absl::StrCat(names[0], "/", names[1]), names[2]};
  }
  if (names.size() != 2) return Usage("save needs a VERSION and a PATH");
  const absl::StatusOr<Name> version = ParseName(names[0], "versions");
  if (!version.ok()) return UsageOf(version.status());
  const absl::StatusOr<int64_t> shard_bytes = NumberOf("--max_shard_bytes");
  if (!shard_bytes.ok()) return UsageOf(shard_bytes.status());
  v1::SaveVersionRequest request;
  request.set_name(version->resource.empty()
                       ? absl::StrCat(version->model, "/versions/latest")
                       : version->resource);
  request.set_path(names[1]);
  request.set_template_path(Value("--template"));
  request.set_max_shard_bytes(*shard_bytes);
  request.set_overwrite(arguments_.overwrite);
  disk_ = true;
  SayTimeout(&request);
  v1::SaveVersionResponse response;
  const absl::Status status =
      Call("SaveVersion", [&](grpc::ClientContext* context) {
        return stub_->SaveVersion(context, request, &response);
      });
  if (!status.ok()) return Fail(status);
  return Print(response, [&] {
    return absl::StrCat(
        "version ", response.version(), " is at ", response.path(), ": ",
        response.tensor_count(), " tensors, ",
        HumanBytes(response.written_bytes()), " in ", response.shard_count(),
        response.shard_count() == 1 ? " file" : " files", ", written in ",
        HumanDuration(client::FromProto(response.save_duration())), " by ",
        absl::StrJoin(response.nodes(), ", "), "\n");
  });
}

int Ctl::Load() {
  if (arguments_.positional.size() != 2) {
    return Usage("load needs a MODEL and a PATH");
  }
  const auto name = ParseTopName(arguments_.positional[0], "models");
  if (!name.ok()) return UsageOf(name.status());
  const absl::StatusOr<int64_t> number = NumberOf("--version");
  if (!number.ok()) return UsageOf(number.status());
  const absl::StatusOr<v1::PauseMode> mode = PauseModeOf("--pause_mode");
  if (!mode.ok()) return UsageOf(mode.status());
  v1::LoadVersionRequest request;
  request.set_name(*name);
  request.set_path(arguments_.positional[1]);
  request.set_version(*number);
  request.mutable_options()->set_pause_mode(*mode);
  disk_ = true;
  SayTimeout(&request);
  v1::Version version;
  const absl::Status status =
      Call("LoadVersion", [&](grpc::ClientContext* context) {
        return stub_->LoadVersion(context, request, &version);
      });
  if (!status.ok()) return Fail(status);
  return Print(version, [&] { return RenderVersion(version, absl::Now()); });
}

int Ctl::Adopt() {
  if (arguments_.positional.size() > 1) return Usage("adopt takes one CLUSTER");
  v1::AdoptClusterRequest request;
  if (!arguments_.positional.empty()) {
    request.set_cluster_id(arguments_.positional[0]);
  }
  v1::Cluster cluster;
  const absl::Status status =
      Call("AdoptCluster", [&](grpc::ClientContext* context) {
        return stub_->AdoptCluster(context, request, &cluster);
      });
  if (!status.ok()) return Fail(status);
  return Print(cluster, [&] {
    return absl::StrCat("cluster ", cluster.cluster_id(),
                        " is adopted, in term ", cluster.term(), "\n");
  });
}

absl::StatusOr<v1::PlanResponse> Ctl::AskPlan(const PlanOrder& order) {
  v1::PlanRequest request;
  request.set_model(order.registered);
  // Without one it is the model's own, as it would run now.
  if (!order.spec.policy().empty()) {
    const absl::StatusOr<schedule::Policy> policy =
        schedule::ParsePolicy(order.spec.policy());
    if (!policy.ok()) return policy.status();
    request.set_policy(PolicyToProto(*policy));
  }
  v1::PlanResponse response;
  const absl::Status status = Call("Plan", [&](grpc::ClientContext* context) {
    return stub_->Plan(context, request, &response);
  });
  if (!status.ok()) return status;
  return response;
}

int Ctl::Plan() {
  if (!arguments_.positional.empty()) {
    return Usage(
        "plan takes options only: --registered MODEL for one that is "
        "registered, --model NAME for a known one");
  }
  const absl::StatusOr<PlanOrder> order = ReadPlanOrder(arguments_.options);
  if (!order.ok()) {
    const bool usage = !order.status().GetPayload(kReasonPayload).has_value();
    return usage ? UsageOf(order.status()) : Fail(order.status());
  }
  v1::PlanResponse response;
  std::string copies;
  if (!order->registered.empty()) {
    absl::StatusOr<v1::PlanResponse> asked = AskPlan(*order);
    if (!asked.ok()) return Fail(asked.status());
    response = *std::move(asked);
  } else {
    const absl::Time start = absl::Now();
    const absl::StatusOr<schedule::PlanReport> report =
        PlanOfSpec(order->spec, order->catalog.get(), order->workers);
    if (!report.ok()) return Fail(report.status());
    response = ToPlanResponse(*report, absl::Now() - start);
    if (!arguments_.json) copies = RenderCopies(*report);
  }
  if (arguments_.json && response.json().empty()) {
    return Fail(ErrorStatus(
        absl::StatusCode::kResourceExhausted, "PLAN_TOO_LARGE",
        "the daemon left the JSON of this plan out, for one answer does not "
        "hold it; the table, without --json, is there"));
  }
  if (arguments_.json) {
    *screen_.out << response.json() << "\n";
  } else {
    *screen_.out << RenderPlan(PlanTitle(*order), response) << copies;
  }
  return kExitOk;
}

}  // namespace

int Run(const std::vector<std::string>& args,
        const std::string& default_address, const Screen& screen) {
  const absl::StatusOr<Arguments> parsed = Parse(args, default_address);
  // Also when what stands beside it cannot be read.
  const bool json = std::find(args.begin(), args.end(), "--json") != args.end();
  const auto usage = [&](const std::string& message) {
    PrintError(screen, json, absl::InvalidArgumentError(message),
               GeneralHelp());
    return kExitUsage;
  };
  if (!parsed.ok()) return usage(std::string(parsed.status().message()));
  const Arguments& arguments = *parsed;
  if (arguments.command.empty() || arguments.command == "help" ||
      arguments.help) {
    std::string topic = arguments.command;
    if (topic == "help") {
      topic = arguments.positional.empty() ? "" : arguments.positional[0];
    }
    const std::string text = topic.empty() ? GeneralHelp() : CommandHelp(topic);
    if (text.empty()) {
      return usage(absl::StrCat("there is no command ", topic));
    }
    if (json && arguments.command.empty() && !arguments.help) {
      return usage("a command is missing");
    }
    if (args.empty()) {
      *screen.err << text;
      return kExitUsage;
    }
    *screen.out << text;
    return kExitOk;
  }
  static const struct {
    const char* name;
    int (Ctl::*run)();
  } kCommands[] = {
      {"status", &Ctl::Status},     {"watch", &Ctl::Watch},
      {"models", &Ctl::Models},     {"versions", &Ctl::Versions},
      {"replicas", &Ctl::Replicas}, {"nodes", &Ctl::Nodes},
      {"prepare", &Ctl::Prepare},   {"plan", &Ctl::Plan},
      {"pause", &Ctl::Pause},       {"resume", &Ctl::Resume},
      {"rollback", &Ctl::Rollback}, {"release", &Ctl::Release},
      {"verify", &Ctl::Verify},     {"drain", &Ctl::Drain},
      {"delete", &Ctl::Delete},     {"adopt", &Ctl::Adopt},
      {"save", &Ctl::Save},         {"load", &Ctl::Load},
      {"remove", &Ctl::Remove},     {"names", &Ctl::Names},
  };
  for (const auto& command : kCommands) {
    if (arguments.command != command.name) continue;
    auto channel = client::MakeChannel(arguments.address);
    if (!channel.ok()) {
      if (json) return usage(std::string(channel.status().message()));
      *screen.err << "weightsyncctl: " << channel.status().message() << "\n";
      return kExitUsage;
    }
    return (Ctl(arguments, *std::move(channel), screen).*command.run)();
  }
  return usage(absl::StrCat("there is no command ", arguments.command));
}

}  // namespace ctl
}  // namespace weightsync
