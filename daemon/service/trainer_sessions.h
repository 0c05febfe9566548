// The trainer ranks of this node: their leases, the memory that they keep their
// tensors in, what they registered, and what they publish.
//
//   Open -> (first message: identity) -> ClaimRank -> accepted: SessionOpened
//   RegisterShards: checked here, room in the store, RankShards -> accepted
//   PublishVersion: PublishArrived -> PublishOpened -> the copy -> answered
//
// When the coordinator comes back, each rank is claimed again with all that it
// has registered.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_TRAINER_SESSIONS_H_
#define WEIGHTSYNC_DAEMON_SERVICE_TRAINER_SESSIONS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/node/snapshot.h"
#include "daemon/service/answer.h"
#include "daemon/service/device_memory.h"
#include "daemon/service/lease.h"
#include "daemon/service/node_context.h"
#include "transport/cuda/handle.h"
#include "transport/host/unique_fd.h"
#include "transport/memory.h"
#include "weightsync/v1/node.pb.h"
#include "weightsync/v1/trainer.pb.h"

namespace weightsync {
namespace daemon {

// All on the node's loop.
class TrainerSessions {
 public:
  using Stream = ServerStream<v1::TrainerHeartbeat, v1::TrainerEvent>;

  // `node` outlives the sessions.
  explicit TrainerSessions(const NodeContext* node) : node_(*node) {}

  // ---- Streams: what the service passes on ----
  void Open(std::shared_ptr<Stream> stream);
  void Heard(const Stream* stream, const v1::TrainerHeartbeat& heartbeat);
  // The client has said its last word, or is gone.
  void Closed(const Stream* stream);

  // ---- Calls ----
  void AllocateArena(const v1::AllocateArenaRequest& request,
                     std::shared_ptr<Answer<v1::AllocateArenaResponse>> answer);
  // `request` lives until the answer is finished.
  void RegisterShards(
      const v1::RegisterShardsRequest* request,
      std::shared_ptr<Answer<v1::RegisterShardsResponse>> answer);
  void PublishVersion(
      const v1::PublishVersionRequest& request,
      std::shared_ptr<Answer<v1::PublishVersionResponse>> answer);

  // ---- The coordinator ----
  // It has welcomed us: claim everything again.
  void Announce();

  // ---- Time, and the end ----
  void CheckLeases(absl::Time now);
  // After this node stood still itself.
  void ForgiveSilence(absl::Time now);
  // And whoever opens a stream later.
  void EndAll(const absl::Status& why);

  int64_t arena_bytes() const { return arena_bytes_; }

  // Told when an arena of a trainer goes, or an allocation on a GPU, that
  // workers may have open.
  void OnArenaGone(std::function<void(const std::string& arena_id)> gone) {
    arena_gone_ = std::move(gone);
  }

 private:
  // What RegisterShards registered. Immutable, and shared with copies that run.
  struct Registration {
    // Keeps the regions mapped.
    std::vector<std::shared_ptr<const void>> memory;
    std::vector<SourceRegion> regions;
    google::protobuf::RepeatedPtrField<v1::TensorShard> shards;
    int64_t bytes = 0;
    // Those of `memory` that device agents have open; and how workers may.
    std::vector<std::weak_ptr<const DeviceRegion>> devices;
    std::vector<std::shared_ptr<const DeviceShare>> shares;
  };

  struct Session : Lease<v1::TrainerHeartbeat, v1::TrainerEvent> {
    std::string session;
    v1::TrainerIdentity identity;
    // The process of `identity`, as it was when it came.
    transport::cuda::ProcessIdentity exporter;
    std::map<std::string, std::shared_ptr<transport::Segment>> arenas;
    ArenaOffers offers;
    std::shared_ptr<const Registration> registration;
    int64_t publish_index = 0;
    // Calls that wait for a copy, by the update that it is for. A call that is
    // repeated while its copy runs waits for the same one.
    std::map<std::string,
             std::vector<std::shared_ptr<Answer<v1::PublishVersionResponse>>>>
        copying;
    // Ends copies that run.
    std::shared_ptr<CancelFlag> cancel = std::make_shared<CancelFlag>();

    std::string Name() const;
  };

  Session* Find(uint64_t id);
  // NOT_FOUND (SESSION_UNKNOWN).
  absl::StatusOr<Session*> FindByName(const std::string& session);
  void Name(Session* session, const v1::TrainerIdentity& identity);
  void Claim(Session* session);
  // Tells the coordinator again what is registered.
  void AnnounceShards(Session* session);
  void End(uint64_t id, const absl::Status& why);

  // Maps memory that `process` owns as one more region.
  static absl::Status AddForeign(pid_t process,
                                 absl::StatusOr<transport::UniqueFd> fd,
                                 const std::string& name, int64_t bytes,
                                 Registration* registration);
  // Allocations on GPUs, by region; nulls for regions of other kinds.
  using DeviceRegions = std::vector<OpenedRegion>;
  absl::StatusOr<std::shared_ptr<Registration>> Resolve(
      const Session& session, const v1::RegisterShardsRequest& request,
      const DeviceRegions& devices);
  // Who has exported what it registers of GPUs.
  static transport::cuda::ProcessIdentity ExporterOf(
      const v1::TrainerIdentity& identity);
  // What the coordinator is told of it.
  static void ReportShards(const Session& session,
                           const Registration& registration,
                           v1::RankShards* report);
  void Register(Session* session, const v1::RegisterShardsRequest& request,
                const DeviceRegions& devices,
                std::shared_ptr<Answer<v1::RegisterShardsResponse>> answer);
  // Has workers close what they opened by these, and nobody open it again.
  void Retire(const std::vector<std::shared_ptr<const DeviceShare>>& shares);
  // Says where buckets of the rank shall lie; null: it has no shards any more.
  void Place(const Session& session, const Registration* registration);
  // The coordinator's answer to RegisterShards.
  void Registered(uint64_t id, std::shared_ptr<const Registration> registration,
                  const absl::Status& status, const v1::Reply& reply,
                  std::shared_ptr<Answer<v1::RegisterShardsResponse>> answer);
  void Copied(uint64_t id, const std::string& update_id,
              const absl::StatusOr<SnapshotResult>& result);
  void Copy(Session* session, const v1::PublishOpened& opened,
            const v1::UpdateOptions& options,
            std::shared_ptr<Answer<v1::PublishVersionResponse>> answer);

  const NodeContext& node_;
  // Not OK: nobody new is let in.
  absl::Status down_;
  uint64_t next_id_ = 1;
  std::map<uint64_t, std::unique_ptr<Session>> sessions_;
  absl::flat_hash_map<const Stream*, uint64_t> by_stream_;
  absl::flat_hash_map<std::string, uint64_t> by_name_;
  int64_t arena_bytes_ = 0;
  std::function<void(const std::string&)> arena_gone_ = [](const std::string&) {
  };
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_TRAINER_SESSIONS_H_
