// Who is there: models, their trainer ranks, their replicas and workers, and
// whether what they hold and want fits together. Knows nothing of updates and
// of streams; a node is its name.
//
// The catalog of a model is the parameters of its ranks, those of rank 0 first,
// then what rank 1 adds, and so on; and behind a parameter that is cast in
// blocks that of its scales. It is known once every rank has registered
// and their shards cover it; from then on workers are bound to it, and those
// that were there before are checked against it.
//
// Checks give a Fault with the reasons of the protos' comments; after one,
// nothing has changed.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_REGISTRY_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_REGISTRY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "daemon/coordinator/fault.h"
#include "schedule/catalog.h"
#include "weightsync/v1/node.pb.h"

namespace weightsync {
namespace daemon {

struct RankEntry {
  int32_t rank = 0;
  std::string node;
  std::string session;
  int32_t pid = 0;
  std::string client;
  bool registered = false;
  // As the rank said them; boxes are filled in and lie inside.
  v1::RankShards shards;
  int64_t shard_bytes = 0;
};

struct WorkerEntry {
  bool present = false;
  // Its node has room for what it wants.
  bool ready = false;
  std::string node;
  v1::RegisterWorker registration;
  // Of this registration alone, in all of the registry.
  int64_t registration_number = 0;
  int64_t tensor_bytes = 0;
};

struct ReplicaEntry {
  std::string name;  // without "models/{model}/replicas/"
  std::string incarnation;
  // The control stream is there.
  bool control = false;
  std::string node;
  v1::RegisterReplica registration;
  std::vector<WorkerEntry> workers;

  bool Complete() const;
  bool Empty() const;
};

struct ModelEntry {
  std::string name;  // "models/{model}"
  int32_t world_size = 0;
  std::map<int32_t, RankEntry> ranks;
  // What the registered ranks say of each parameter, and how many of them.
  struct Said {
    v1::Parameter parameter;
    int ranks = 0;
  };
  absl::flat_hash_map<std::string, Said> said;
  // The newest whole one, also after its ranks have gone. Null: none yet.
  std::shared_ptr<const schedule::Catalog> catalog;
  std::vector<v1::Parameter> parameters;
  std::map<std::string, ReplicaEntry> replicas;
  // Every rank is there, but their shards do not fit together.
  Fault misfit;

  // Can be published: every rank has registered, and they fit.
  bool Publishable() const;
  // Why not: WORLD_INCOMPLETE naming the ranks, or the misfit.
  Fault Unpublishable() const;
};

// Somebody who had been accepted and does not fit any more.
struct Refusal {
  std::string node;
  std::string replica;
  std::string incarnation;
  int worker = -1;  // -1: the replica's control stream
  Fault fault;
};

class Registry {
 public:
  // `model` must be "models/{model}".
  Fault ClaimRank(const std::string& node, const v1::ClaimRank& claim);
  // `refusals`: workers and replicas that the new catalog leaves out.
  Fault RegisterShards(const v1::RankShards& shards,
                       std::vector<Refusal>* refusals);
  // False when the session is not the rank's.
  bool RemoveRank(const std::string& model, int32_t rank,
                  const std::string& session);

  // `is_new`: another incarnation than the one before, or the first.
  Fault JoinReplica(const std::string& node,
                    const v1::RegisterReplica& registration, bool* is_new);
  Fault JoinWorker(const std::string& node,
                   const v1::RegisterWorker& registration, bool ready,
                   bool* is_new);
  // REPLICA_INCOMPLETE, when it is complete and leaves parameters out.
  Fault CheckReplica(const std::string& model,
                     const std::string& replica) const;
  // False when that incarnation is not there.
  bool RemoveControl(const std::string& model, const std::string& replica,
                     const std::string& incarnation);
  bool RemoveWorker(const std::string& model, const std::string& replica,
                    int worker, const std::string& incarnation);
  void ForgetReplica(const std::string& model, const std::string& replica);

  // What a node has a part in, of one model: its ranks, and the replicas with
  // something there. By name, so that it may be acted upon.
  struct Parts {
    struct Rank {
      int32_t rank = 0;
      std::string session;
    };
    struct Replica {
      std::string name;
      std::string incarnation;
      bool control = false;
      std::vector<int> workers;
    };
    std::vector<Rank> ranks;
    std::vector<Replica> replicas;
  };
  Parts PartsOf(const std::string& model, const std::string& node) const;
  // Nodes that some rank or replica names, gone or not.
  std::set<std::string> NamedNodes() const;
  // Of all workers that are known.
  std::set<int64_t> RegistrationNumbers() const;
  // How often a catalog was made of the shards of all ranks.
  int64_t fits() const { return fits_; }

  // Null: unknown.
  const ModelEntry* FindModel(absl::string_view model) const;
  const ReplicaEntry* FindReplica(absl::string_view model,
                                  absl::string_view replica) const;
  const std::map<std::string, ModelEntry, std::less<>>& models() const {
    return models_;
  }
  // Makes the model known by name alone.
  void AddModel(const std::string& model);

  // Bytes of the workers of `node` for one update of the model: of each
  // parameter every box once, and never more than all of it, so that whole and
  // tensor-parallel replicas beside each other need no more than the model.
  // Known before any trainer is there.
  int64_t StoreBytes(const std::string& model, const std::string& node) const;

  // The inputs of a layout, without its id: all ranks, and the workers of
  // `replicas`. REQUIRES: Publishable().
  v1::DefineLayout LayoutInput(
      const std::string& model, const std::set<std::string>& replicas,
      const std::map<std::string, std::map<std::string, std::string>>& labels,
      int64_t bucket_bytes) const;

  // Whether the tensors of a checkpoint are the model's: CHECKPOINT_MISMATCH,
  // naming the tensor, or REPLICA_INCOMPLETE. `parameters` are put into the
  // order of the catalog that there is.
  Fault FitCheckpoint(const std::string& model,
                      const std::set<std::string>& replicas,
                      std::vector<v1::Parameter>* parameters) const;
  // As LayoutInput, of a checkpoint's parameters: what would be rank 0 holds
  // all of them, on a node of the name kCheckpointSource. REQUIRES:
  // FitCheckpoint.
  v1::DefineLayout LoadInput(
      const std::string& model, const std::set<std::string>& replicas,
      const std::vector<v1::Parameter>& parameters,
      const std::map<std::string, std::map<std::string, std::string>>& labels,
      int64_t bucket_bytes) const;
  // Of a model that has no catalog yet.
  void SetCatalog(const std::string& model,
                  const std::vector<v1::Parameter>& parameters);

 private:
  ModelEntry* MutableModel(absl::string_view model);
  ReplicaEntry* MutableReplica(absl::string_view model,
                               absl::string_view replica);
  Fault EnterReplica(const std::string& model, const std::string& replica,
                     const std::string& incarnation, int32_t worker_count,
                     absl::string_view taken_reason, ReplicaEntry** entry,
                     bool* is_new);
  // Whether what `fresh` says of parameters is what other ranks say.
  Fault CheckSaid(const ModelEntry& model, const v1::RankShards& fresh) const;
  // Builds the catalog when every rank is there.
  Fault Fit(ModelEntry* model, std::vector<Refusal>* refusals);

  std::map<std::string, ModelEntry, std::less<>> models_;
  int64_t next_registration_ = 1;
  int64_t fits_ = 0;
};

// What a layout names where the bytes come from a checkpoint; no node is called
// so.
inline constexpr char kCheckpointSource[] = "checkpoint:";

// "models/{model}" with a good {model}; `kind` "models" or "nodes".
bool IsResourceName(absl::string_view kind, absl::string_view name);
// 1 to 63 of [a-z0-9._-]; `strict`: beginning with a letter or a digit.
bool IsShortName(absl::string_view name, bool strict);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_REGISTRY_H_
