// Plans on their way: what a PlanSpec describes, made into a plan by schedule/,
// and the plan as PlanResponse. `weightsyncctl plan` and AdminService.Plan
// answer through the same functions.

#ifndef WEIGHTSYNC_PROTO_PLAN_H_
#define WEIGHTSYNC_PROTO_PLAN_H_

#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "schedule/catalog.h"
#include "schedule/describe.h"
#include "schedule/transfer_schedule.h"
#include "weightsync/v1/admin.pb.h"

namespace weightsync {

// UNSPECIFIED and values of newer releases are AUTO.
schedule::Policy PolicyFromProto(v1::TransferPolicy policy);
v1::TransferPolicy PolicyToProto(schedule::Policy policy);

// The plan of the described cluster. `catalog` stands for spec.model where it
// is not null. The copies of `workers` (replica, tp) are listed in the report.
// INVALID_ARGUMENT:
//   PLAN_SUBJECT_MISSING  neither a model nor a catalog, or both
//   and the reasons of schedule/error.h; the sentence names the option.
absl::StatusOr<schedule::PlanReport> PlanOfSpec(
    const v1::PlanSpec& spec, const schedule::Catalog* catalog = nullptr,
    absl::Span<const std::pair<int, int>> workers = {});

// With its JSON. `duration`: how long planning took.
v1::PlanResponse ToPlanResponse(const schedule::PlanReport& report,
                                absl::Duration duration);

}  // namespace weightsync

#endif  // WEIGHTSYNC_PROTO_PLAN_H_
