// weightsyncctl, without main: everything that it does, for main and for tests.
#ifndef WEIGHTSYNC_CLIENT_CTL_COMMANDS_H_
#define WEIGHTSYNC_CLIENT_CTL_COMMANDS_H_

#include <ostream>
#include <string>
#include <vector>

namespace weightsync {
namespace ctl {

// What the process answers; scripts may count on them.
enum ExitCode {
  kExitOk = 0,
  kExitError = 1,
  kExitUsage = 2,
  // No daemon answered, or the daemon cannot reach its coordinator.
  kExitUnreachable = 3,
  kExitNotFound = 4,
  // The watched version was aborted.
  kExitAborted = 5,
};

// Where it writes to.
struct Screen {
  std::ostream* out = nullptr;
  std::ostream* err = nullptr;
  // `out` is a terminal: progress is drawn over and over on one line.
  bool terminal = false;
  int columns = 80;
};

// `args` as on the command line, without the program's name. `default_address`
// serves where --address is not given; it may be empty.
int Run(const std::vector<std::string>& args,
        const std::string& default_address, const Screen& screen);

}  // namespace ctl
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CTL_COMMANDS_H_
