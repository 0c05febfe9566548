#include "transport/host/socket_claim.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

absl::Status InUse(const std::string& path) {
  return MakeError(absl::StatusCode::kAlreadyExists, "SOCKET_IN_USE",
                   absl::StrCat("another process listens at ", path,
                                "; stop it, or use another path"));
}

// True when somebody listens there. A stream or a packet socket: the kernel
// tells apart "wrong type" from "nobody".
bool Answers(const sockaddr_un& address) {
  const UniqueFd fd(
      socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return false;
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
              sizeof(address)) == 0)
    return true;
  // EAGAIN: its queue is full. EPROTOTYPE: it listens for another type.
  return errno == EAGAIN || errno == EPROTOTYPE || errno == EINPROGRESS;
}

}  // namespace

SocketClaim::SocketClaim(std::string path, UniqueFd lock)
    : path_(std::move(path)), lock_(std::move(lock)) {}

SocketClaim::~SocketClaim() {
  unlink(path_.c_str());
  unlink((path_ + ".lock").c_str());
}

absl::StatusOr<std::unique_ptr<SocketClaim>> SocketClaim::Take(
    const std::string& path) {
  sockaddr_un address;
  std::memset(&address, 0, sizeof(address));
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "SOCKET_PATH_TOO_LONG",
        absl::StrCat("a unix socket's path has 1 to ",
                     sizeof(address.sun_path) - 1, " bytes, and \"", path,
                     "\" has ", path.size()));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  const std::string lock_path = path + ".lock";
  UniqueFd lock;
  while (true) {
    lock = UniqueFd(open(lock_path.c_str(),
                         O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!lock.valid()) {
      const absl::StatusCode code = errno == ENOENT
                                        ? absl::StatusCode::kNotFound
                                        : absl::StatusCode::kPermissionDenied;
      return MakeErrnoError(code, "SOCKET_DIRECTORY",
                            absl::StrCat("cannot make ", lock_path), errno);
    }
    if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) return InUse(path);
    // The owner before may have removed the file between our open and our lock:
    // then what is locked is not what others will find.
    struct stat locked, found;
    if (fstat(lock.get(), &locked) == 0 &&
        stat(lock_path.c_str(), &found) == 0 && locked.st_ino == found.st_ino &&
        locked.st_dev == found.st_dev) {
      break;
    }
  }
  struct stat found;
  if (lstat(path.c_str(), &found) == 0) {
    absl::Status refused;
    if (!S_ISSOCK(found.st_mode)) {
      refused = MakeError(
          absl::StatusCode::kFailedPrecondition, "NOT_A_SOCKET",
          absl::StrCat(
              path,
              " is there and is not a socket; remove it, or use another path"));
    } else if (Answers(address)) {
      // A server that makes no claim.
      refused = InUse(path);
    }
    if (!refused.ok()) {
      unlink(lock_path.c_str());
      return refused;
    }
    unlink(path.c_str());
  }
  return std::unique_ptr<SocketClaim>(new SocketClaim(path, std::move(lock)));
}

}  // namespace transport
}  // namespace weightsync
