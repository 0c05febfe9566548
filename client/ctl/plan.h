// `weightsyncctl plan`, without the command line and without a daemon: what its
// options say, and plans as text for people.
#ifndef WEIGHTSYNC_CLIENT_CTL_PLAN_H_
#define WEIGHTSYNC_CLIENT_CTL_PLAN_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "schedule/catalog.h"
#include "schedule/describe.h"
#include "weightsync/v1/admin.pb.h"

namespace weightsync {
namespace ctl {

// ("training_gpus", "8"): an option without its dashes, and its value.
using Options = std::vector<std::pair<std::string, std::string>>;

// Whether `plan` takes an option of that name: every field of PlanSpec, and
// config, catalog, registered and worker.
bool IsPlanOption(absl::string_view name);

struct PlanOrder {
  v1::PlanSpec spec;
  // From --catalog; null: spec.model says it.
  std::unique_ptr<schedule::Catalog> catalog;
  std::string catalog_path;
  // "models/{model}": of a registered model, by its daemon.
  std::string registered;
  // Whose copies are listed.
  std::vector<std::pair<int, int>> workers;
};

// Reads what the options name: the configuration file first, which the other
// options override, and the catalog.
//   INVALID_ARGUMENT without a reason: the command line is wrong.
//   NOT_FOUND         FILE_UNKNOWN
//   INVALID_ARGUMENT  CONFIG_INVALID: where in the file, and what is wrong.
//     FILE_UNREADABLE, INVALID_SAFETENSORS and the other reasons of catalogs.
absl::StatusOr<PlanOrder> ReadPlanOrder(const Options& options);

// The catalog of a .safetensors file, or of all files that a
// model.safetensors.index.json names. Only headers are read.
absl::StatusOr<schedule::Catalog> ReadCatalog(const std::string& path);

// All of a file that people write. NOT_FOUND (FILE_UNKNOWN), INVALID_ARGUMENT
// (FILE_UNREADABLE).
absl::StatusOr<std::string> ReadTextFile(const std::string& path);

// "qwen2.5-0.5b, 16 trainer GPUs (fsdp) to 8 replicas x tp 2".
std::string PlanTitle(const PlanOrder& order);
std::string RenderPlan(const std::string& title,
                       const v1::PlanResponse& response);
// Every copy of the workers that were asked for.
std::string RenderCopies(const schedule::PlanReport& report);

// "0-7, 12": whole numbers in ascending order.
std::string RangesText(const std::vector<int>& numbers);

}  // namespace ctl
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CTL_PLAN_H_
