// What weightsyncctl says about itself.
#ifndef WEIGHTSYNC_CLIENT_CTL_HELP_H_
#define WEIGHTSYNC_CLIENT_CTL_HELP_H_

#include <string>

#include "absl/strings/string_view.h"

namespace weightsync {
namespace ctl {

std::string GeneralHelp();
// Empty for an unknown command.
std::string CommandHelp(absl::string_view command);
// "no such command: stauts; did you mean status?"
std::string NoSuchCommand(absl::string_view command);
// Where what there is can be read.
extern const char kHelpHint[];

}  // namespace ctl
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CTL_HELP_H_
