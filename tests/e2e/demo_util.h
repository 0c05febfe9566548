// What both programs of the demo need beside the model.
#ifndef WEIGHTSYNC_TESTS_E2E_DEMO_UTIL_H_
#define WEIGHTSYNC_TESTS_E2E_DEMO_UTIL_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "weightsync/v1/admin.pb.h"

namespace weightsync {
namespace demo {

// Ends the program, with a sentence on stderr, unless `status` is OK. At once:
// nothing is destroyed.
void ExitUnless(const absl::Status& status);

// "paired,auto" as policies, at least one.
absl::StatusOr<std::vector<v1::TransferPolicy>> ParsePolicies(
    const std::string& text);

// Waits until `replicas` replicas of "models/{model}" serve. The admin service
// is asked, as anybody would.
absl::Status WaitForReplicas(const std::string& address,
                             const std::string& model, int replicas,
                             absl::Duration timeout);

// Appends to a file, which appears whole (it is written beside and renamed). An
// empty path does nothing.
absl::Status AppendTo(const std::string& path, const std::string& text);

// From now on SIGTERM and SIGINT end the program at once; or, while it is in
// WaitForSignal, let that return, so that it ends in good order.
// REQUIRES: no thread was started yet.
void HandleSignals();
void WaitForSignal();

double MonotonicSeconds();

// "version=3 bytes=... stall_ns=... ": what the quickstart makes its table of.
std::string ResultLine(const v1::Version& version, absl::Duration stall);

}  // namespace demo
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_E2E_DEMO_UTIL_H_
