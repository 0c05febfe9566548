// AdminService.Plan.

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/coordinator/update_plan.h"
#include "daemon/service/admin_service.h"
#include "daemon/service/forward.h"
#include "proto/plan.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

constexpr int kPlansAtOnce = 2;
// Callers take messages of 4 MiB unless they say otherwise.
constexpr size_t kLargestAnswer = size_t{3} << 20;

absl::Status Answered(absl::StatusOr<schedule::PlanReport> report,
                      absl::Duration duration, v1::PlanResponse* response) {
  if (!report.ok()) return report.status();
  *response = ToPlanResponse(*report, duration);
  if (response->ByteSizeLong() <= kLargestAnswer) return absl::OkStatus();
  response->clear_json();
  if (response->ByteSizeLong() <= kLargestAnswer) return absl::OkStatus();
  const int groups = response->groups_size();
  response->Clear();
  return ErrorStatus(
      absl::StatusCode::kResourceExhausted, "PLAN_TOO_LARGE",
      absl::StrCat("this plan has ", groups,
                   " groups, more than one answer holds; `weightsyncctl plan` "
                   "makes it without a daemon"));
}

}  // namespace

template <typename Make>
void AdminServiceImpl::MakePlan(
    std::shared_ptr<Answer<v1::PlanResponse>> answer, Make make) {
  if (planning_.fetch_add(1) >= kPlansAtOnce) {
    planning_.fetch_sub(1);
    answer->Finish(
        ErrorStatus(absl::StatusCode::kResourceExhausted, "PLAN_BUSY",
                    absl::StrCat(kPlansAtOnce,
                                 " plans are being made here already; try "
                                 "again, or describe the cluster to "
                                 "`weightsyncctl plan`, which asks no "
                                 "daemon")));
    return;
  }
  // Neither on a thread of gRPC's nor on the coordinator's loop.
  plans_.Run([this, answer = std::move(answer), make = std::move(make)] {
    const absl::Time begin = absl::Now();
    absl::StatusOr<schedule::PlanReport> report = make();
    answer->Finish(
        Answered(std::move(report), absl::Now() - begin, answer->response()));
    planning_.fetch_sub(1);
  });
}

grpc::ServerUnaryReactor* AdminServiceImpl::Plan(
    grpc::CallbackServerContext* context, const v1::PlanRequest* request,
    v1::PlanResponse* response) {
  auto answer = std::make_shared<Answer<v1::PlanResponse>>(context, response,
                                                           deadlines_.call);
  grpc::ServerUnaryReactor* reactor = answer->reactor();
  if (request->subject_case() == v1::PlanRequest::SUBJECT_NOT_SET) {
    answer->Finish(ErrorStatus(absl::StatusCode::kInvalidArgument,
                               "PLAN_SUBJECT_MISSING",
                               "nothing is named to be planned: name a "
                               "registered model or describe a cluster"));
  } else if (request->has_spec()) {
    MakePlan(answer, [spec = request->spec()] { return PlanOfSpec(spec); });
  } else if (access_.local != nullptr) {
    // The loop, which updates need, only hands out what it knows.
    access_.local->Ask([this, answer, asked = *request](
                           const Coordinator& coordinator, absl::Time) {
      absl::StatusOr<PlanInputs> inputs = coordinator.InputsOfPlan(asked);
      if (!inputs.ok()) {
        answer->Finish(inputs.status());
        return;
      }
      MakePlan(answer,
               [inputs = *std::move(inputs)] { return PlanOf(inputs); });
    });
  } else if (const absl::Status status = CheckNotForwarded(*context);
             !status.ok()) {
    answer->Finish(status);
  } else {
    Forward(
        answer, *request, access_.name, absl::ZeroDuration(),
        [this](grpc::ClientContext* client, const v1::PlanRequest* asked,
               v1::PlanResponse* into, std::function<void(grpc::Status)> done) {
          stub_->async()->Plan(client, asked, into, std::move(done));
        });
  }
  return reactor;
}

}  // namespace daemon
}  // namespace weightsync
