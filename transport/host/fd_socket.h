// File descriptors between processes of one node. gRPC cannot carry them, so
// there is a small unix socket beside it: gRPC carries a token, and the token
// is redeemed for the descriptor here (SCM_RIGHTS). No names in a shared
// directory, nothing left behind by a crash, no shared pid namespace needed.
//
// The protocol, one exchange a connection, on SOCK_SEQPACKET:
//   request   "WSFD" version=1 operation ('R' or 'D') token (32 hex digits; for
//   'R'), with 'D' one descriptor reply     "WSFD" version=1 status code (0:
//   OK), then for 'R' nothing, with the descriptor; for 'D' the token;
//             and for errors the reason, a zero byte, a sentence
#ifndef WEIGHTSYNC_TRANSPORT_HOST_FD_SOCKET_H_
#define WEIGHTSYNC_TRANSPORT_HOST_FD_SOCKET_H_

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "transport/host/socket_claim.h"
#include "transport/host/unique_fd.h"

namespace weightsync {
namespace transport {

// Hands out descriptors for tokens, and takes descriptors in. One thread serves
// all connections without ever waiting for one of them: a client that connects
// and stops is closed at its deadline and disturbs nobody. Thread-safe.
class FdServer {
 public:
  struct Options {
    // Only this process's user may connect. With a group, its members too.
    absl::optional<gid_t> group;
    absl::Duration client_deadline = absl::Seconds(5);
    int max_connections = 256;  // further ones wait in the kernel's queue
    int max_tokens =
        65536;  // offers and deposits that are alive; the descriptors they hold
                // count against RLIMIT_NOFILE
  };
  // Whom a token is for. A process whose id this one cannot see (another pid
  // namespace) fits no `pid`.
  struct Recipient {
    absl::optional<pid_t> pid;
    absl::optional<uid_t> uid;
  };
  // What a client gave, and who it was when it did.
  struct Deposit {
    UniqueFd fd;
    pid_t pid = 0;
    uid_t uid = 0;
  };

  // Errors of SocketClaim::Take, and UNAVAILABLE (FD_SOCKET_FAILED).
  static absl::StatusOr<std::unique_ptr<FdServer>> Start(
      const std::string& path, const Options& options);

  // Closes all connections, descriptors and the socket, and removes its file.
  ~FdServer();
  FdServer(const FdServer&) = delete;
  FdServer& operator=(const FdServer&) = delete;

  const std::string& path() const { return claim_->path(); }

  // A token for `fd`, good for one redemption within `ttl`. RESOURCE_EXHAUSTED
  // (TOO_MANY_TOKENS).
  absl::StatusOr<std::string> Offer(UniqueFd fd, const Recipient& recipient,
                                    absl::Duration ttl);
  // Takes an offer back; nothing happens if it is gone.
  void Withdraw(const std::string& token);

  // The descriptor that a client deposited for this token. NOT_FOUND
  // (TOKEN_UNKNOWN), FAILED_PRECONDITION (TOKEN_REDEEMED, TOKEN_EXPIRED),
  // PERMISSION_DENIED (TOKEN_OTHER_PROCESS).
  absl::StatusOr<Deposit> TakeDeposit(const std::string& token,
                                      const Recipient& depositor);

 private:
  struct Entry {
    UniqueFd fd;
    Recipient recipient;  // of an offer
    bool deposit = false;
    pid_t pid = 0;  // who made a deposit
    uid_t uid = 0;
    absl::Time expires;
  };
  struct Connection {
    UniqueFd fd;
    absl::Time deadline;
  };

  FdServer(std::unique_ptr<SocketClaim> claim, const Options& options);

  absl::Status Listen();
  void Serve();
  // False when the process has no descriptors left.
  bool AcceptAll(std::vector<Connection>* connections);
  // Reads the request, acts, replies. False while there is nothing to read.
  bool Answer(const UniqueFd& connection);
  absl::StatusOr<std::string> Add(Entry entry, absl::Duration ttl)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes the entry of this token if `pid` and `uid` may have it.
  absl::StatusOr<Entry> Take(const std::string& token, bool deposit, pid_t pid,
                             uid_t uid, const Recipient& depositor)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Expire(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // So that a second redemption is told what happened, for a while.
  void Remember(const std::string& token, bool redeemed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after Start.
  const std::unique_ptr<SocketClaim> claim_;
  const Options options_;
  UniqueFd listener_;
  UniqueFd stop_;  // an eventfd
  std::thread thread_;

  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, bool> gone_
      ABSL_GUARDED_BY(mutex_);  // true: redeemed, false: expired
  std::deque<std::string> gone_order_ ABSL_GUARDED_BY(mutex_);
};

// The client's side. Each connects to the socket at `path`, and ends within
// `timeout`. UNAVAILABLE (FD_SOCKET_UNREACHABLE), DEADLINE_EXCEEDED
// (FD_SOCKET_TIMEOUT), and the server's errors: NOT_FOUND (TOKEN_UNKNOWN),
// FAILED_PRECONDITION (TOKEN_REDEEMED, TOKEN_EXPIRED), PERMISSION_DENIED
// (TOKEN_OTHER_PROCESS), RESOURCE_EXHAUSTED (TOO_MANY_TOKENS), INVALID_ARGUMENT
// (BAD_REQUEST).
absl::StatusOr<UniqueFd> RedeemFd(const std::string& path,
                                  const std::string& token,
                                  absl::Duration timeout);
// Gives a duplicate of `fd` to the server; the token names it to
// FdServer::TakeDeposit.
absl::StatusOr<std::string> DepositFd(const std::string& path, int fd,
                                      absl::Duration timeout);

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_HOST_FD_SOCKET_H_
