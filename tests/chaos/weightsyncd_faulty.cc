// weightsyncd with a hand inside: the same daemon, whose frames go by a fault
// policy (transport/fault) and which stops at named points of an update's life
// (daemon/service/fault_point.h) when it is told so. For chaos runs alone; the
// product's binary has none of it.
//
//   --chaos_socket, --chaos_run_socket, --chaos_log   see tests/chaos/control.h
//
// Command: rules {text}: transport::FaultRules::Parse.
#include <gflags/gflags.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/run.h"
#include "tests/chaos/control.h"
#include "transport/fault/fault_policy.h"

DEFINE_string(chaos_socket, "", "Where the run says what to do.");
DEFINE_string(chaos_run_socket, "", "Where the run hears of points reached.");
DEFINE_string(chaos_log, "", "Appended to.");

namespace weightsync {
namespace chaos {
namespace {

// Rules, and a point for each hundredth frame: in the middle of a transfer.
class Policy final : public transport::FaultPolicy {
 public:
  void Set(absl::string_view text) {
    auto rules = transport::FaultRules::Parse(text);
    if (rules.ok()) rules_.Set(*std::move(rules));
  }
  void SetControl(Control* control) { control_ = control; }

  absl::Status OnConnect(absl::string_view from,
                         absl::string_view to) override {
    control_->Reach("node:connect", "");
    return rules_.OnConnect(from, to);
  }
  transport::FrameFault OnSend(absl::string_view from, absl::string_view to,
                               uint64_t bucket, uint32_t frame) override {
    if (frame == 3) control_->Reach("node:frame", "");
    return rules_.OnSend(from, to, bucket, frame);
  }

 private:
  transport::FaultRules rules_;
  Control* control_ = nullptr;
};

}  // namespace
}  // namespace chaos
}  // namespace weightsync

int main(int argc, char** argv) {
  using weightsync::chaos::Control;
  using weightsync::chaos::Policy;
  // Both live as long as the process.
  static auto* const policy = new Policy;
  static Control* control = nullptr;
  return weightsync::daemon::RunDaemon(
      argc, argv, [](weightsync::daemon::Options* options) {
        control = new Control(options->node, FLAGS_chaos_socket,
                              FLAGS_chaos_run_socket, FLAGS_chaos_log,
                              [](const nlohmann::json& command) {
                                if (command.value("cmd", "") == "rules") {
                                  policy->Set(command.value("text", ""));
                                }
                              });
        policy->SetControl(control);
        control->Log({{"ev", "daemon"},
                      {"coordinator", options->coordinator_address.empty()}});
        options->faults = policy;
        options->fault_point = [](absl::string_view point,
                                  absl::string_view update) {
          // Too many, and no transitions.
          if (point == "node:report:update_progress") return;
          control->Reach(point, update);
        };
      });
}
