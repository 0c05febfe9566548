// How this library reaches a daemon.
#ifndef WEIGHTSYNC_CLIENT_CC_RPC_H_
#define WEIGHTSYNC_CLIENT_CC_RPC_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/status.h"

namespace weightsync {
namespace client {

// The protocol that this library speaks.
constexpr int kProtocolVersion = 1;

// The unix socket on which a node's daemon listens unless it is told otherwise.
inline constexpr char kDefaultSocket[] = "/run/weightsync/weightsyncd.sock";
// The loopback address on which it listens unless it is told otherwise.
inline constexpr char kDefaultAddress[] = "127.0.0.1:7670";

// Where the daemon of this machine is when nobody says it: kDefaultSocket when
// a socket of that name exists, kDefaultAddress otherwise. The library reads
// neither flags nor the environment: programs do, and pass the address.
std::string DefaultAddress();

// "host:port", "unix:/path" or "/path"; empty means DefaultAddress().
//   INVALID_ARGUMENT  ADDRESS_INVALID.
absl::StatusOr<std::string> NormalizeAddress(absl::string_view address);

// A channel of its own (no connection is shared with other channels of the
// process). Connects lazily.
//   INVALID_ARGUMENT  ADDRESS_INVALID.
absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(
    absl::string_view address);

// True when trying again cannot help before something is mended: a wrong
// argument, a call that does not exist, a failed precondition.
bool IsPermanent(const absl::Status& status);

// Sets the deadline and makes the call wait until the daemon can be reached.
void PrepareContext(absl::Time deadline, grpc::ClientContext* context);

// FromGrpcStatus; errors without a reason get one ("DAEMON_UNREACHABLE",
// "CALL_TIMEOUT", …) and the name of what was tried.
absl::Status CallStatus(absl::string_view what, const grpc::Status& status);

// 32 hexadecimal digits that nobody can guess.
std::string RandomId();

// "weightsync-cc/0.1" and what the program calls itself.
std::string ClientName(absl::string_view program);

// "models/{model}"; a name that already has the prefix is kept.
std::string ModelName(absl::string_view model);

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_RPC_H_
