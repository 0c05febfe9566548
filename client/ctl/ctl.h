// The commands of weightsyncctl: one class, whose member functions lie in
// several files.
//   ctl.cc        what several of them do
//   looking.cc    status, watch, models, versions, replicas, nodes
//   operating.cc  prepare, pause, resume, rollback, release, remove, verify,
//                 drain, delete, adopt
//   saving.cc     save, load
//   planning.cc   plan, names
#ifndef WEIGHTSYNC_CLIENT_CTL_CTL_H_
#define WEIGHTSYNC_CLIENT_CTL_CTL_H_

#include <google/protobuf/message.h>
#include <google/protobuf/repeated_field.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "client/cc/rpc.h"
#include "client/cc/wire_time.h"
#include "client/ctl/arguments.h"
#include "client/ctl/commands.h"
#include "client/ctl/help.h"
#include "client/ctl/mapping.h"
#include "client/ctl/plan.h"
#include "proto/status.h"
#include "weightsync/v1/admin.grpc.pb.h"

namespace weightsync {
namespace ctl {

constexpr absl::Duration kDefaultTimeout = absl::Seconds(10);
constexpr absl::Duration kOperationTimeout = absl::Minutes(2);
// What moves a model to or from a disk.
constexpr absl::Duration kDiskTimeout = absl::Minutes(10);

absl::StatusOr<std::string> ToJson(const google::protobuf::Message& message,
                                   bool pretty);

// With --json an error is one object on one line, on the same screen as the
// sentence for people would be.
void PrintError(const Screen& screen, bool json, const absl::Status& status,
                const std::string& help);

int ExitOf(const absl::Status& status);

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

}  // namespace ctl
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CTL_CTL_H_
