#ifndef WEIGHTSYNC_TRANSPORT_TCP_CONNECTOR_H_
#define WEIGHTSYNC_TRANSPORT_TCP_CONNECTOR_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "transport/tcp/hop.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/wire.h"

namespace weightsync {
namespace transport {
namespace tcp {

// Connects to the successor's listener and shakes hands. A peer that does not
// know the group yet is asked again until `deadline_nanos` (NowNanos' clock);
// one that refuses connections only for a moment, because its daemon is most
// likely dead. Gives up when *cancelled turns true and `wake` is woken.
absl::StatusOr<Fd> ConnectStream(const std::string& address, const Hello& hello,
                                 const HopOptions& options,
                                 int64_t deadline_nanos,
                                 const std::atomic<bool>& cancelled,
                                 WakeFd* wake);

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_CONNECTOR_H_
