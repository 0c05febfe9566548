// The command line of weightsyncd. This is the one place that reads flags and
// the environment.

#ifndef WEIGHTSYNC_DAEMON_FLAGS_FLAGS_H_
#define WEIGHTSYNC_DAEMON_FLAGS_FLAGS_H_

#include <string>

#include "absl/status/statusor.h"
#include "daemon/options.h"

namespace weightsync {
namespace daemon {

// Parses and removes the flags. Ends the process after --help and --version,
// and, as gflags does, after a flag that does not exist or cannot be parsed.
void ParseCommandLine(int* argc, char*** argv);

// What the flags say, with their defaults filled in.
//   INVALID_ARGUMENT (FLAG_INVALID): names the flag.
absl::StatusOr<Options> OptionsFromFlags();

// Where a daemon listens when --unix_socket does not say it, and where it keeps
// its state. root: /run/weightsync/weightsyncd.sock and /var/lib/weightsync.
// Others: $XDG_RUNTIME_DIR/weightsync/weightsyncd.sock
// (/tmp/weightsync-UID/weightsyncd.sock where that is not set) and
// $XDG_STATE_HOME/weightsync ($HOME/.local/state/weightsync).
std::string DefaultUnixSocket();
std::string DefaultStateDir();

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_FLAGS_FLAGS_H_
