#include "transport/cuda/agent/agent_wire.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

struct Header {
  uint32_t type;
  uint32_t has_fd;
  uint64_t id;
  uint64_t bytes;
};
// A job of 10^6 pieces is a tenth of it.
constexpr uint64_t kMaxPayload = uint64_t{2} << 30;

absl::Status Gone(absl::string_view what) {
  return absl::UnavailableError(what);
}

absl::Status SendBytes(int socket, const char* data, size_t bytes, int fd,
                       absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (bytes > 0) {
    iovec part = {const_cast<char*>(data), bytes};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (fd >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* head = CMSG_FIRSTHDR(&message);
      head->cmsg_level = SOL_SOCKET;
      head->cmsg_type = SCM_RIGHTS;
      head->cmsg_len = CMSG_LEN(sizeof(int));
      memcpy(CMSG_DATA(head), &fd, sizeof(int));
    }
    const ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      data += sent;
      bytes -= static_cast<size_t>(sent);
      fd = -1;
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return Gone("the socket");
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration())
      return absl::DeadlineExceededError("the other end reads nothing");
    pollfd wait = {socket, POLLOUT, 0};
    poll(&wait, 1,
         static_cast<int>(
             absl::ToInt64Milliseconds(std::min(left, absl::Seconds(1)))) +
             1);
  }
  return absl::OkStatus();
}

absl::Status ReceiveBytes(int socket, char* data, size_t bytes, UniqueFd* fd) {
  while (bytes > 0) {
    iovec part = {data, bytes};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    if (fd != nullptr) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
    }
    const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return Gone("the other end is gone");
    if (fd != nullptr) {
      cmsghdr* head = CMSG_FIRSTHDR(&message);
      if (head != nullptr && head->cmsg_type == SCM_RIGHTS) {
        int received;
        memcpy(&received, CMSG_DATA(head), sizeof(int));
        *fd = UniqueFd(received);
      }
    }
    data += got;
    bytes -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

}  // namespace

AgentWriter& AgentWriter::PutStatus(const absl::Status& status) {
  Put(static_cast<int32_t>(status.code()));
  PutString(ReasonOf(status));
  return PutString(
      absl::string_view(status.message().data(), status.message().size()));
}

std::string AgentReader::GetString() {
  const uint64_t size = Get<uint64_t>();
  if (!ok_ || size > left_.size()) {
    ok_ = false;
    left_ = {};
    return "";
  }
  std::string text(left_.substr(0, size));
  left_.remove_prefix(size);
  return text;
}

absl::Status AgentReader::GetStatus() {
  const auto code = static_cast<absl::StatusCode>(Get<int32_t>());
  const std::string reason = GetString();
  const std::string message = GetString();
  if (!ok_) return absl::InternalError("a status that is none");
  if (code == absl::StatusCode::kOk) return absl::OkStatus();
  return reason.empty() ? absl::Status(code, message)
                        : MakeError(code, reason, message);
}

absl::Status SendPacket(int socket, AgentMessage type, uint64_t id,
                        absl::string_view payload, int fd,
                        absl::Duration timeout) {
  Header header = {static_cast<uint32_t>(type), fd >= 0, id, payload.size()};
  const absl::Status status =
      SendBytes(socket, reinterpret_cast<const char*>(&header), sizeof(header),
                fd, timeout);
  if (!status.ok()) return status;
  return SendBytes(socket, payload.data(), payload.size(), -1, timeout);
}

absl::StatusOr<AgentPacket> ReceivePacket(int socket) {
  Header header;
  AgentPacket packet;
  absl::Status status = ReceiveBytes(socket, reinterpret_cast<char*>(&header),
                                     sizeof(header), &packet.fd);
  if (!status.ok()) return status;
  if (header.bytes > kMaxPayload) return Gone("a message that is none");
  packet.type = static_cast<AgentMessage>(header.type);
  packet.id = header.id;
  packet.payload.resize(header.bytes);
  if (header.bytes > 0)
    status = ReceiveBytes(socket, &packet.payload[0], header.bytes, nullptr);
  if (!status.ok()) return status;
  return packet;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
