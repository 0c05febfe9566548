// The process around a Daemon: signals, exit codes, the end by SIGTERM.

#ifndef WEIGHTSYNC_DAEMON_RUN_H_
#define WEIGHTSYNC_DAEMON_RUN_H_

#include <functional>

#include "daemon/options.h"

namespace weightsync {
namespace daemon {

// Reads the command line, serves until SIGTERM, SIGINT or SIGHUP, and returns
// the exit code: 0 ended by a signal; 1 wrong flags; 2 could not start; 3 could
// not start because another daemon has the socket, port or state directory.
//
// `prepare`, where there is one, may change what the flags said and start
// threads: those signals are blocked already.
int RunDaemon(int argc, char** argv,
              const std::function<void(Options*)>& prepare = nullptr);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_RUN_H_
