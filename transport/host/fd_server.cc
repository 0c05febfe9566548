#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "transport/error.h"
#include "transport/host/fd_message.h"
#include "transport/host/fd_socket.h"

namespace weightsync {
namespace transport {
namespace {

constexpr size_t kMaxRemembered = 4096;
// For whoever deposited a descriptor to say what it is.
constexpr absl::Duration kDepositTtl = absl::Seconds(60);

absl::Status SocketFailed(absl::string_view what) {
  return MakeErrnoError(absl::StatusCode::kUnavailable, "FD_SOCKET_FAILED",
                        what, errno);
}

std::string ErrorReply(const absl::Status& status) {
  std::string reply(kFdMessageMagic, kFdMessageMagicBytes);
  reply.push_back(static_cast<char>(status.code()));
  reply.append(ReasonOf(status));
  reply.push_back('\0');
  reply.append(status.message().data(), status.message().size());
  reply.resize(std::min(reply.size(), kMaxFdMessageBytes));
  return reply;
}

}  // namespace

FdServer::FdServer(std::unique_ptr<SocketClaim> claim, const Options& options)
    : claim_(std::move(claim)), options_(options) {}

absl::StatusOr<std::unique_ptr<FdServer>> FdServer::Start(
    const std::string& path, const Options& options) {
  absl::StatusOr<std::unique_ptr<SocketClaim>> claim = SocketClaim::Take(path);
  if (!claim.ok()) return claim.status();
  std::unique_ptr<FdServer> server(new FdServer(*std::move(claim), options));
  const absl::Status status = server->Listen();
  if (!status.ok()) return status;
  server->thread_ = std::thread([raw = server.get()] { raw->Serve(); });
  return server;
}

absl::Status FdServer::Listen() {
  stop_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_.valid()) return SocketFailed("cannot make an eventfd");
  listener_ = UniqueFd(
      socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_.valid()) return SocketFailed("cannot make a unix socket");
  sockaddr_un address;
  std::memset(&address, 0, sizeof(address));
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path().data(), path().size());
  if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&address),
           sizeof(address)) != 0) {
    return SocketFailed(absl::StrCat("cannot bind ", path()));
  }
  // Nobody can connect before listen(), so there is no moment at which the
  // wrong ones could.
  if (options_.group.has_value() &&
      chown(path().c_str(), static_cast<uid_t>(-1), *options_.group) != 0) {
    return SocketFailed(
        absl::StrCat("cannot give ", path(), " to group ", *options_.group));
  }
  if (chmod(path().c_str(), options_.group.has_value() ? 0660 : 0600) != 0) {
    return SocketFailed(absl::StrCat("cannot set the mode of ", path()));
  }
  if (listen(listener_.get(), 128) != 0)
    return SocketFailed(absl::StrCat("cannot listen at ", path()));
  return absl::OkStatus();
}

FdServer::~FdServer() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    // An eventfd that is not full takes it.
    [[maybe_unused]] const ssize_t written =
        write(stop_.get(), &one, sizeof(one));
    thread_.join();
  }
}

void FdServer::Serve() {
  std::vector<Connection> connections;
  std::vector<pollfd> polled;
  bool accepting = true;
  while (true) {
    absl::Time wake =
        absl::Now() + absl::Seconds(1);  // tokens expire even when nobody calls
    polled.assign({{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}});
    if (static_cast<int>(connections.size()) >= options_.max_connections)
      polled[1].events = 0;
    if (!accepting) {
      // No descriptor was free: the listener stays readable, and asking it
      // again at once would only burn time.
      polled[1].events = 0;
      wake = std::min(wake, absl::Now() + absl::Milliseconds(50));
    }
    for (const Connection& connection : connections) {
      polled.push_back({connection.fd.get(), POLLIN, 0});
      wake = std::min(wake, connection.deadline);
    }
    const int64_t timeout = absl::ToInt64Milliseconds(
        absl::Ceil(wake - absl::Now(), absl::Milliseconds(1)));
    poll(polled.data(), polled.size(),
         static_cast<int>(std::max<int64_t>(0, timeout)));
    if ((polled[0].revents & POLLIN) != 0) return;
    const absl::Time now = absl::Now();
    size_t kept = 0;
    for (size_t i = 0; i < connections.size(); ++i) {
      const bool done = polled[i + 2].revents != 0
                            ? Answer(connections[i].fd)
                            : now >= connections[i].deadline;
      if (done) continue;
      if (kept != i) connections[kept] = std::move(connections[i]);
      ++kept;
    }
    connections.erase(connections.begin() + kept, connections.end());
    if (!accepting || polled[1].revents != 0)
      accepting = AcceptAll(&connections);
    absl::MutexLock lock(&mutex_);
    Expire(now);
  }
}

bool FdServer::AcceptAll(std::vector<Connection>* connections) {
  while (static_cast<int>(connections->size()) < options_.max_connections) {
    UniqueFd fd(accept4(listener_.get(), nullptr, nullptr,
                        SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) return errno != EMFILE && errno != ENFILE;
    connections->push_back(
        {std::move(fd), absl::Now() + options_.client_deadline});
  }
  return true;
}

bool FdServer::Answer(const UniqueFd& connection) {
  std::string request;
  UniqueFd fd;
  const ssize_t received = ReceiveFdMessage(connection.get(), &request, &fd);
  if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  if (received <= 0) return true;
  ucred peer = {};
  socklen_t peer_bytes = sizeof(peer);
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer,
                 &peer_bytes) != 0)
    return true;

  absl::Status status;
  std::string reply(kFdMessageMagic, kFdMessageMagicBytes);
  reply.push_back('\0');
  UniqueFd answer;
  const bool ours = request.compare(0, kFdMessageMagicBytes, kFdMessageMagic,
                                    kFdMessageMagicBytes) == 0;
  const char operation = ours && request.size() > kFdMessageMagicBytes
                             ? request[kFdMessageMagicBytes]
                             : '\0';
  const std::string token =
      operation == '\0' ? "" : request.substr(kFdMessageMagicBytes + 1);
  if (operation == kRedeemOperation && token.size() == kTokenBytes) {
    absl::StatusOr<Entry> entry =
        Take(token, /*deposit=*/false, peer.pid, peer.uid, Recipient());
    status = entry.status();
    if (entry.ok()) answer = std::move(entry->fd);
  } else if (operation == kDepositOperation && token.empty() && fd.valid()) {
    Entry entry;
    entry.fd = std::move(fd);
    entry.deposit = true;
    entry.pid = peer.pid;
    entry.uid = peer.uid;
    const absl::StatusOr<std::string> added =
        Add(std::move(entry), kDepositTtl);
    status = added.status();
    if (added.ok()) reply.append(*added);
  } else {
    status = MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_REQUEST",
        "not a request of this protocol, or of another version of it");
  }
  if (!status.ok()) reply = ErrorReply(status);
  // A client that does not read has room for this in its queue; one that is
  // gone does not matter.
  SendFdMessage(connection.get(), reply, answer.get());
  return true;
}

absl::StatusOr<std::string> FdServer::Offer(UniqueFd fd,
                                            const Recipient& recipient,
                                            absl::Duration ttl) {
  Entry entry;
  entry.fd = std::move(fd);
  entry.recipient = recipient;
  return Add(std::move(entry), ttl);
}

absl::StatusOr<std::string> FdServer::Add(Entry entry, absl::Duration ttl) {
  char random[kTokenBytes / 2];
  if (getrandom(random, sizeof(random), 0) !=
      static_cast<ssize_t>(sizeof(random))) {
    return SocketFailed("no random numbers for a token");
  }
  std::string token =
      absl::BytesToHexString(absl::string_view(random, sizeof(random)));
  const absl::Time now = absl::Now();
  entry.expires = now + ttl;
  absl::MutexLock lock(&mutex_);
  if (static_cast<int>(entries_.size()) >= options_.max_tokens) Expire(now);
  if (static_cast<int>(entries_.size()) >= options_.max_tokens) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "TOO_MANY_TOKENS",
        absl::StrCat(entries_.size(),
                     " tokens wait to be redeemed; try again later"));
  }
  entries_.emplace(token, std::move(entry));
  return token;
}

void FdServer::Withdraw(const std::string& token) {
  absl::MutexLock lock(&mutex_);
  entries_.erase(token);
}

absl::StatusOr<FdServer::Entry> FdServer::Take(const std::string& token,
                                               bool deposit, pid_t pid,
                                               uid_t uid,
                                               const Recipient& depositor) {
  absl::MutexLock lock(&mutex_);
  Expire(absl::Now());
  const auto it = entries_.find(token);
  if (it == entries_.end() || it->second.deposit != deposit) {
    const auto gone = gone_.find(token);
    if (gone == gone_.end()) {
      return MakeError(absl::StatusCode::kNotFound, "TOKEN_UNKNOWN",
                       "no such token here; register again to get a new one");
    }
    if (gone->second) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "TOKEN_REDEEMED",
                       "this token was redeemed already; a token is good for "
                       "one time, register again");
    }
    return MakeError(absl::StatusCode::kFailedPrecondition, "TOKEN_EXPIRED",
                     "this token was not redeemed in time; register again");
  }
  const Entry& entry = it->second;
  // An offer names who may take it. A deposit knows who made it, and the taker
  // says who should have.
  const Recipient& wanted = deposit ? depositor : entry.recipient;
  const pid_t found_pid = deposit ? entry.pid : pid;
  const uid_t found_uid = deposit ? entry.uid : uid;
  if ((wanted.pid.has_value() && *wanted.pid != found_pid) ||
      (wanted.uid.has_value() && *wanted.uid != found_uid)) {
    return MakeError(absl::StatusCode::kPermissionDenied, "TOKEN_OTHER_PROCESS",
                     absl::StrCat("this token belongs to another process than ",
                                  found_pid, " of user ", found_uid));
  }
  Entry taken = std::move(it->second);
  entries_.erase(it);
  Remember(token, /*redeemed=*/true);
  return taken;
}

absl::StatusOr<FdServer::Deposit> FdServer::TakeDeposit(
    const std::string& token, const Recipient& depositor) {
  absl::StatusOr<Entry> entry = Take(token, /*deposit=*/true, 0, 0, depositor);
  if (!entry.ok()) return entry.status();
  Deposit deposit;
  deposit.fd = std::move(entry->fd);
  deposit.pid = entry->pid;
  deposit.uid = entry->uid;
  return deposit;
}

void FdServer::Expire(absl::Time now) {
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (it->second.expires > now) {
      ++it;
      continue;
    }
    Remember(it->first, /*redeemed=*/false);
    entries_.erase(it++);
  }
}

void FdServer::Remember(const std::string& token, bool redeemed) {
  gone_[token] = redeemed;
  gone_order_.push_back(token);
  while (gone_order_.size() > kMaxRemembered) {
    gone_.erase(gone_order_.front());
    gone_order_.pop_front();
  }
}

}  // namespace transport
}  // namespace weightsync
