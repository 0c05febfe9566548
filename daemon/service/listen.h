// Where a daemon may listen, and why it cannot.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_LISTEN_H_
#define WEIGHTSYNC_DAEMON_SERVICE_LISTEN_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace weightsync {
namespace daemon {

struct HostPort {
  // Numeric: "127.0.0.1" or "::1".
  std::string host;
  int port = 0;
  bool loopback = false;
  // 0.0.0.0 or ::.
  bool wildcard = false;

  // "127.0.0.1:7670", "[::1]:7670".
  std::string text() const;
};

// `flag` of all of these, "listen": what the address was given with, for the
// sentence.

// "host:port" or "[host]:port" with a numeric host, or "localhost:port".
//   INVALID_ARGUMENT (ADDRESS_INVALID).
absl::StatusOr<HostPort> ParseHostPort(absl::string_view text,
                                       absl::string_view flag);

// A numeric host without a port.
absl::StatusOr<HostPort> ParseHost(absl::string_view text,
                                   absl::string_view flag);

// An address that somebody shall listen at.
struct ListenFlag {
  std::string flag;
  HostPort address;
};
// INVALID_ARGUMENT (ADDRESS_INVALID) where two of them are the same place, or
// one is all of the machine's addresses and has the port of another.
absl::Status CheckApart(absl::Span<const ListenFlag> places);

// INVALID_ARGUMENT (ADDRESS_INVALID) unless a daemon could be dialled at
// `address`: HOST:PORT, the host by name or number, or unix:PATH. Nothing is
// looked up.
absl::Status CheckDialled(absl::string_view address);

// Whether such an address is certainly one of another machine: a number that
// none of this one's has. Names are not looked up.
bool IsElsewhere(absl::string_view dialled);

// FAILED_PRECONDITION (INSECURE_REQUIRED) for an address that other machines
// can reach, unless it was allowed.
absl::Status CheckReach(const HostPort& address, bool insecure,
                        absl::string_view flag);

// Why nothing can listen at `address`, when it was found that nothing can:
//   ALREADY_EXISTS (SOCKET_IN_USE), or UNAVAILABLE (LISTEN_FAILED) with what
//   the system says.
// OK when it can now.
absl::Status WhyNotListen(const HostPort& address, absl::string_view flag);

// Makes `directory` and those above it. UNAVAILABLE (DIRECTORY_FAILED).
absl::Status MakeDirectories(const std::string& directory, int mode);

// The right of this process to a directory; ends with the object or the
// process.
class DirectoryClaim {
 public:
  // ALREADY_EXISTS (STATE_DIR_IN_USE), UNAVAILABLE (DIRECTORY_FAILED).
  static absl::StatusOr<std::unique_ptr<DirectoryClaim>> Take(
      const std::string& directory);
  ~DirectoryClaim();
  DirectoryClaim(const DirectoryClaim&) = delete;
  DirectoryClaim& operator=(const DirectoryClaim&) = delete;

 private:
  explicit DirectoryClaim(int fd) : fd_(fd) {}
  const int fd_;
};

// The whole file, or nothing, is at `path` afterwards, also after a power cut.
// UNAVAILABLE (FILE_FAILED).
absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view contents);
// Empty where there is none. UNAVAILABLE (FILE_FAILED) when it is there and
// cannot be read.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_LISTEN_H_
