#ifndef WEIGHTSYNC_TRANSPORT_HOST_FD_MESSAGE_H_
#define WEIGHTSYNC_TRANSPORT_HOST_FD_MESSAGE_H_

#include <sys/types.h>

#include <string>

#include "absl/strings/string_view.h"
#include "transport/host/unique_fd.h"

namespace weightsync {
namespace transport {

// The wire format of fd_socket.h.
constexpr char kFdMessageMagic[] = "WSFD\x01";
constexpr size_t kFdMessageMagicBytes = 5;
constexpr char kRedeemOperation = 'R';
constexpr char kDepositOperation = 'D';
constexpr size_t kTokenBytes = 32;
constexpr size_t kMaxFdMessageBytes = 1024;

// Sends one message, with a descriptor if fd >= 0. False, and errno, if it did
// not go. Does not block on a non-blocking socket.
bool SendFdMessage(int socket, absl::string_view bytes, int fd);

// Receives one message and at most one descriptor. The count of bytes, 0 at the
// end, -1 and errno.
ssize_t ReceiveFdMessage(int socket, std::string* bytes, UniqueFd* fd);

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_HOST_FD_MESSAGE_H_
