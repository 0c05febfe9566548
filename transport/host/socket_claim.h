#ifndef WEIGHTSYNC_TRANSPORT_HOST_SOCKET_CLAIM_H_
#define WEIGHTSYNC_TRANSPORT_HOST_SOCKET_CLAIM_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/host/unique_fd.h"

namespace weightsync {
namespace transport {

// The right to listen at a unix socket's path. While it lives no other process
// that asks gets it; a socket that a dead process left behind is removed. The
// lock is a file "<path>.lock", held with flock, so that two daemons which
// start at one time cannot both think the other one's socket stale.
//
// Works for sockets that are bound by others too (gRPC's): take the claim, then
// start the server.
class SocketClaim {
 public:
  // After OK nothing is at `path`. ALREADY_EXISTS (SOCKET_IN_USE): a live
  // server is there, or starts. FAILED_PRECONDITION (NOT_A_SOCKET): something
  // else is there, and stays. INVALID_ARGUMENT (SOCKET_PATH_TOO_LONG).
  // PERMISSION_DENIED or NOT_FOUND (SOCKET_DIRECTORY): no lock can be made in
  // the directory.
  static absl::StatusOr<std::unique_ptr<SocketClaim>> Take(
      const std::string& path);

  // Removes the socket and the lock. The server should have closed by then.
  ~SocketClaim();
  SocketClaim(const SocketClaim&) = delete;
  SocketClaim& operator=(const SocketClaim&) = delete;

  const std::string& path() const { return path_; }

 private:
  SocketClaim(std::string path, UniqueFd lock);

  const std::string path_;
  const UniqueFd lock_;
};

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_HOST_SOCKET_CLAIM_H_
