// The command line of weightsyncctl.
#ifndef WEIGHTSYNC_CLIENT_CTL_ARGUMENTS_H_
#define WEIGHTSYNC_CLIENT_CTL_ARGUMENTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "client/ctl/plan.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace ctl {

struct Arguments {
  std::string command;
  std::vector<std::string> positional;
  std::string address;
  absl::optional<absl::Duration> timeout;
  // Options with a value, by name: "--mode".
  std::map<std::string, std::string> values;
  bool undo = false;
  bool overwrite = false;
  bool json = false;
  bool help = false;
  // Those of `plan`.
  Options options;
};

// Takes "--name value" and "--name=value".
// INVALID_ARGUMENT, with a sentence: an unknown option, one of another command,
// one without its value.
absl::StatusOr<Arguments> ParseArguments(const std::vector<std::string>& args,
                                         const std::string& default_address);

}  // namespace ctl
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CTL_ARGUMENTS_H_
