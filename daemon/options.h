// What a daemon is told at its start. Flags fill it (daemon/flags); tests fill
// it by hand.

#ifndef WEIGHTSYNC_DAEMON_OPTIONS_H_
#define WEIGHTSYNC_DAEMON_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace weightsync {
namespace transport {
class FaultPolicy;
}  // namespace transport

namespace daemon {

inline constexpr char kSoftwareVersion[] = "0.1.0";
// Of the services for clients and of the stream between daemons.
inline constexpr int kOldestProtocolVersion = 1;
inline constexpr int kNewestProtocolVersion = 1;

struct Deadlines {
  // Of an update; see daemon/coordinator/options.h.
  absl::Duration gather = absl::Seconds(60);
  absl::Duration prepare = absl::Seconds(30);
  absl::Duration progress = absl::Seconds(15);
  absl::Duration pause = absl::Seconds(60);
  absl::Duration apply = absl::Seconds(120);
  absl::Duration resume = absl::Seconds(30);
  absl::Duration publish = absl::Seconds(120);
  absl::Duration checkpoint = absl::Minutes(10);
  absl::Duration barrier = absl::Seconds(30);
  // Of what operators ask for.
  absl::Duration operation = absl::Minutes(10);

  // Between nodes whose bytes are on the way: silence, and strangers.
  absl::Duration peer = absl::Seconds(10);
  absl::Duration handshake = absl::Seconds(5);

  // Of leases.
  absl::Duration heartbeat_interval = absl::Seconds(1);
  absl::Duration heartbeat = absl::Seconds(5);
  absl::Duration node_reconnect_grace = absl::Seconds(5);
  absl::Duration recovery = absl::Seconds(30);
  absl::Duration max_staleness = absl::Minutes(10);

  // Of calls: how long a registration waits for the coordinator, a call that
  // reads waits for anything, WaitVersion at most.
  absl::Duration registration = absl::Seconds(15);
  absl::Duration call = absl::Seconds(10);
  absl::Duration wait = absl::Minutes(10);
  // Of what a device agent is asked for.
  absl::Duration device = absl::Seconds(30);
  // At the end: until what hangs is cut off.
  absl::Duration shutdown = absl::Seconds(3);
};

// Smaller buckets would be all bookkeeping.
inline constexpr int64_t kMinBucketBytes = 4096;

// See daemon/service/fault_point.h. Called on the daemon's loops; may block
// them, and may not return.
using FaultPoint =
    std::function<void(absl::string_view point, absl::string_view update_id)>;

struct Options {
  // 1 to 63 of [a-z0-9._-].
  std::string node;
  // "host:port", numeric or "localhost"; port 0 takes a free one. May be empty.
  std::vector<std::string> listen;
  // As one of `listen`: pages over HTTP. Empty: none.
  std::string http_address;
  // Path. Its descriptors are handed over at the path + ".fd".
  std::string unix_socket;
  // Allows addresses that other machines can reach, without TLS.
  bool insecure = false;

  // "host:port" or "unix:path" of the coordinator; empty: this daemon is its
  // own.
  std::string coordinator_address;

  // Where other nodes send weights to: a numeric address of this machine.
  std::string data_address = "127.0.0.1";
  // Ports for it; 0 and 0: the kernel chooses.
  int data_port_first = 0;
  int data_port_last = 0;

  // --group=nccl: the bytes between nodes go over NCCL, from a device agent.
  bool nccl = false;
  // --group=auto: the same, between nodes that can; over TCP between others.
  bool nccl_optional = false;
  // --memory=cuda: trainers may have their tensors on GPUs of this node.
  bool cuda_memory = false;
  // The GPUs that are served; empty: all. NCCL is on the first, or the only
  // one.
  std::vector<std::string> device_uuids;
  // Of bucket_bytes each, on each GPU that trainers use.
  int gpu_slots = 3;
  // --store=device: buckets lie in memory of these GPUs, where they can.
  bool device_store = false;
  // Of each GPU; 0: what it has free.
  int64_t device_store_bytes = 0;
  // Of its SMs, for each operation.
  int nccl_max_ctas = 4;
  int nccl_cta_policy = 1;  // as nccl.h numbers them: efficiency

  // Journal and identity; made when missing.
  std::string state_dir;
  // Written when the daemon serves, removed at its end; empty: none.
  std::string ready_file;

  // 0: half of the memory that is there at the start.
  int64_t store_budget_bytes = 0;
  int64_t bucket_bytes = int64_t{256} << 20;
  int keep_updates = 2;
  // 0: as many as there are processors, at most 8.
  int copy_threads = 0;

  // For the topology: zone=…, rack=….
  std::map<std::string, std::string> labels;

  // --on_isolation: pause replicas when the coordinator has been away for
  // Deadlines::max_staleness.
  bool pause_on_isolation = false;

  // STREAM and IN_PLACE: slots of a bucket for each flow on each member.
  int stream_slots = 3;

  // Below which checkpoints are written and read; empty: none are.
  std::string checkpoint_root;
  // Of updates by way of disk: how many stay; 0: all.
  int checkpoints_kept = 2;
  // --update: how updates travel that do not say it.
  enum class Update { kNetwork, kDisk, kNetworkOrDisk };
  Update update = Update::kNetwork;

  int apply_attempts = 3;
  int max_reconfigurations = 3;

  Deadlines deadlines;

  // For tests and chaos runs alone: the product sets neither.
  FaultPoint fault_point;
  // Not owned. Faults on the path of the bytes.
  transport::FaultPolicy* faults = nullptr;
};

// Where a daemon serves, once it does.
struct Addresses {
  // "host:port" with the ports that were taken, in the order of
  // Options::listen.
  std::vector<std::string> listen;
  std::string unix_socket;
  std::string descriptor_socket;
  std::string data_address;
  // Empty: none.
  std::string http;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_OPTIONS_H_
