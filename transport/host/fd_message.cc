#include "transport/host/fd_message.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

namespace weightsync {
namespace transport {

bool SendFdMessage(int socket, absl::string_view bytes, int fd) {
  iovec part = {const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message;
  std::memset(&message, 0, sizeof(message));
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes.size());
}

ssize_t ReceiveFdMessage(int socket, std::string* bytes, UniqueFd* fd) {
  bytes->resize(kMaxFdMessageBytes);
  iovec part = {&(*bytes)[0], bytes->size()};
  msghdr message;
  std::memset(&message, 0, sizeof(message));
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  // Room for a few more than are expected: those that come are closed, and not
  // left to fill the table.
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received;
  do {
    received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0) return received;
  bytes->resize(received);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
      continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int received_fd;
      std::memcpy(&received_fd, CMSG_DATA(header) + i * sizeof(int),
                  sizeof(int));
      UniqueFd owned(received_fd);
      if (!fd->valid()) *fd = std::move(owned);
    }
  }
  return received;
}

}  // namespace transport
}  // namespace weightsync
