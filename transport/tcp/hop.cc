#include "transport/tcp/hop.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "transport/error.h"
#include "transport/group.h"
#include "transport/tcp/socket.h"

namespace weightsync {
namespace transport {
namespace tcp {

std::string PayloadPeer(const HopOptions& options, const std::string& node) {
  return absl::StrCat(options.cluster_id, "/", node);
}

absl::Status BlameEdge(const HopOptions& options, const absl::Status& status) {
  if (!ReasonOf(status).empty()) return status;
  if (absl::IsDataLoss(status)) {
    return EdgeError(absl::StatusCode::kDataLoss, "EDGE_DAMAGED", options.from,
                     options.to, status.message());
  }
  return EdgeError(absl::StatusCode::kUnavailable, "EDGE_LOST", options.from,
                   options.to, status.message());
}

absl::Status PeerFailure(const HopOptions& options, const std::string& peer,
                         const absl::Status& told) {
  if (EdgeOf(told)) return told;
  return EdgeError(absl::StatusCode::kAborted, "PEER_ABORTED", options.from,
                   options.to,
                   absl::StrCat(peer, " left the group: ", told.message()));
}

absl::Status PeerSilent(const HopOptions& options, const std::string& peer,
                        int64_t silent_nanos) {
  return EdgeError(
      absl::StatusCode::kUnavailable, "EDGE_LOST", options.from, options.to,
      absl::StrCat(
          "nothing heard of ", peer, " for ",
          absl::FormatDuration(absl::Milliseconds(silent_nanos / 1000000))));
}

absl::Status ChannelFailure(const HopOptions& options,
                            const absl::Status& status) {
  if (status.ok() || EdgeOf(status).has_value()) return status;
  // Whatever the library behind it says of a peer that it has lost.
  const std::string reason = ReasonOf(status);
  return EdgeError(
      status.code(),
      absl::IsUnavailable(status) || reason.empty() ? "EDGE_LOST" : reason,
      options.from, options.to, status.message());
}

bool HungUp(int fd) {
  pollfd state{fd, POLLRDHUP, 0};
  return poll(&state, 1, 0) > 0 && state.revents != 0;
}

void SendNow(int fd, const std::string& bytes) {
  (void)!send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

void CloseGently(int fd, absl::Duration limit) {
  shutdown(fd, SHUT_WR);
  const int64_t until = NowNanos() + absl::ToInt64Nanoseconds(limit);
  char sink[4096];
  while (true) {
    const ssize_t n = recv(fd, sink, sizeof(sink), MSG_DONTWAIT);
    if (n == 0) return;
    if (n > 0 || errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return;
    const int64_t left = until - NowNanos();
    if (left <= 0) return;
    pollfd wait{fd, POLLIN, 0};
    poll(&wait, 1, static_cast<int>(left / 1000000) + 1);
  }
}

void RateMeter::Update(int64_t now_nanos, int64_t total_bytes) {
  if (since_ == 0) {
    since_ = now_nanos;
    bytes_ = total_bytes;
    return;
  }
  const int64_t span = now_nanos - since_;
  if (span < 500000000) return;
  rate_ = static_cast<double>(total_bytes - bytes_) * 1e9 /
          static_cast<double>(span);
  since_ = now_nanos;
  bytes_ = total_bytes;
}

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
