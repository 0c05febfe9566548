// What Prometheus is told of a node.

#ifndef WEIGHTSYNC_DAEMON_HTTP_METRICS_H_
#define WEIGHTSYNC_DAEMON_HTTP_METRICS_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/time/time.h"
#include "weightsync/v1/admin.pb.h"

namespace weightsync {
namespace daemon {

// The content type that goes with it.
inline constexpr char kMetricsType[] =
    "text/plain; version=0.0.4; charset=utf-8";

struct NodeFigures {
  // As GetNode shows it.
  v1::MemoryUse memory;
  // NCCL's communicators that device agents keep, by the UUID of their GPU.
  std::map<std::string, int64_t> nccl_communicators;
  // Since the coordinator was last heard of; since the start when it never was.
  absl::Duration coordinator_silence;
  // Replicas that stay paused because this node cannot know, while the
  // coordinator is away, what became of their update.
  int replica_alarms = 0;
};

// In the text format, all names beginning with weightsync_, sizes in bytes. The
// figures are those of MemoryUse in GetNode: of the store, of trainers' arenas,
// of the process, and of each GPU apart (weightsync_gpu_*, labelled with its
// device_uuid and device_name; and how many communicators its agent keeps); and
// how it is cut off, where it is.
std::string RenderMetrics(const std::string& node, const std::string& version,
                          const NodeFigures& figures);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_HTTP_METRICS_H_
