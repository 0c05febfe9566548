// The trainer's side, one per rank: offers a model's weights as versions.
//
//   TrainerOptions options;
//   options.model = "qwen";
//   options.rank = rank;
//   options.world_size = world_size;
//   auto trainer = Trainer::Connect(options);
//   auto arena = (*trainer)->AllocateArena(bytes);   // the tensors live in it
//   ... place the tensors at arena->data ...
//   (*trainer)->RegisterShards(shards);
//   while (training) {
//     ... a step ...
//     auto published = (*trainer)->Publish(PublishOptions());
//     // From here on the tensors may be changed.
//   }
//   (*trainer)->Wait(*published, absl::Minutes(5));   // when the outcome
//   matters
//
// Every rank does so; the i-th calls of Publish of all ranks make one version.
// A call returns as soon as this rank's tensors are copied out, and waits
// neither for other ranks nor for the transfer.
//
// The connection is the rank's lease. When it is lost (the daemon was
// restarted, or this process stood still for longer than the daemon's
// heartbeat_timeout) the library opens another session by itself. The next
// Publish, or the one that was running, brings everything back before it
// publishes, with the same request_id: new arenas take the place of the old
// ones, at the same addresses and with the same bytes, and the shards are
// registered again. That takes as long as a copy of the tensors into fresh
// memory. With TrainerOptions::reconnect = false every call answers
// UNAVAILABLE (LEASE_LOST) instead. Arenas stay mapped, with their bytes, until
// this object is destroyed.
//
// Thread-safe, but the order of concurrent Publish calls is nobody's. One
// thread.
#ifndef WEIGHTSYNC_CLIENT_CC_TRAINER_H_
#define WEIGHTSYNC_CLIENT_CC_TRAINER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cc/tensor.h"
#include "weightsync/v1/admin.pb.h"
#include "weightsync/v1/trainer.pb.h"

namespace weightsync {
namespace client {

struct TrainerOptions {
  // See NormalizeAddress in client/cc/rpc.h; empty: DefaultAddress().
  std::string address;
  // With or without "models/".
  std::string model;
  int rank = 0;
  int world_size = 1;
  // For people; the library's name is put before it.
  std::string client;
  // Of Connect.
  absl::Duration connect_timeout = absl::Seconds(20);
  // Open another session when the lease is lost.
  bool reconnect = true;
  absl::Duration max_backoff = absl::Seconds(5);
};

// Shared memory, mapped for reading and writing. 64-byte aligned at least.
struct TrainerArena {
  std::string arena_id;
  char* data = nullptr;
  int64_t size_bytes = 0;
  // How long the daemon took to fault it in.
  absl::Duration warm_up;
};

// Memory that the caller made and owns, and that the daemon can open: by its
// name, shared memory of POSIX (shm_open; torch's file_system strategy); by a
// descriptor, what has none (memfd_create, or unlinked; torch's file_descriptor
// strategy).
struct SharedMemory {
  // As given to shm_open, with its leading slash. It must stay until the shards
  // in it are registered no more. Empty: `fd` says it.
  std::string name;
  // The library keeps a duplicate, and with it the memory, until it is
  // forgotten. The daemon opens it by way of /proc: both in one pid namespace,
  // and the daemon root's or of the same user.
  int fd = -1;
  // Where this process has it mapped, from its beginning.
  void* data = nullptr;
  int64_t size_bytes = 0;
};

// The name of the shared memory that a descriptor is of.
//   INVALID_ARGUMENT  MEMORY_UNNAMED: it has none (a memfd, or unlinked
//   already), or is no shared memory of POSIX: give the descriptor itself.
absl::StatusOr<std::string> SharedMemoryName(int fd);

struct PublishOptions {
  // Above every version before, or 0: the server counts on.
  int64_t version = 0;
  // The trainer's own label.
  int64_t step = 0;
  // Repeating a request_id publishes nothing and answers the same. Empty: the
  // library makes one up, and uses it when it has to repeat the call.
  std::string request_id;
  // Modes and policies; the same on all ranks.
  v1::UpdateOptions update;
  absl::Duration timeout = absl::Seconds(150);
};

struct PublishResult {
  // "models/{model}/versions/{version}".
  std::string version_name;
  int64_t version = 0;
  std::string update_id;
  // What was copied out for this rank, and how long the copying took.
  int64_t copied_bytes = 0;
  absl::Duration copy_duration;
  // How long the call took: what the trainer was kept from its work.
  absl::Duration stall;
};

class Trainer {
 public:
  // Opens the rank's session.
  //   INVALID_ARGUMENT  ADDRESS_INVALID, NAME_INVALID, and those of
  //   OpenSession. DEADLINE_EXCEEDED  REGISTER_TIMEOUT: no daemon answered.
  //   Everything that TrainerService.OpenSession answers.
  static absl::StatusOr<std::unique_ptr<Trainer>> Connect(
      TrainerOptions options);

  // Closes, and unmaps the arenas: no pointer into them may be used any more.
  ~Trainer();

  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Memory for this rank's tensors. It is faulted in before the call returns,
  // which takes about a second per GB.
  //   Everything that AllocateArena answers (MEMORY_EXHAUSTED, ...), and the
  //   errors of mapping it.
  absl::StatusOr<TrainerArena> AllocateArena(
      int64_t size_bytes, absl::Duration timeout = absl::Minutes(2));

  // Says that tensors may lie in this memory, too. They are read behind a
  // guard: when it shrinks or goes away under a copy, that publish fails
  // (SOURCE_MEMORY_LOST). Nothing is checked before RegisterShards, which
  // answers MEMORY_UNKNOWN, MEMORY_DENIED (another user's) or
  // MEMORY_OUT_OF_RANGE. Where it overlaps memory that was named before, this
  // takes its place.
  //   INVALID_ARGUMENT  MEMORY_SIZE_INVALID, MEMORY_NAME_INVALID, NOT_MEMORY:
  //   the descriptor is of a file on a disk, of no file, or not open.
  absl::Status UseSharedMemory(const SharedMemory& memory);
  // Takes it back; shards in it stay registered until RegisterShards.
  void ForgetSharedMemory(const void* data);

  // Says which part of which parameter lies where. `data` of each must lie in
  // one of the arenas or in shared memory that was named, whole, or be GPU
  // memory of this process (Tensor::on_gpu). Replaces what was registered
  // before, and returns when GPU memory of that may be freed. A rank may hold
  // none.
  //   INVALID_ARGUMENT  those of CheckTensors; MEMORY_OUT_OF_RANGE: a shard
  //   does not lie in memory of this trainer. NOT_DEVICE_MEMORY,
  //   PAST_ALLOCATION.
  //   FAILED_PRECONDITION  NOT_EXPORTABLE: made by cuMemCreate (PyTorch's
  //   expandable_segments), or another process's; MIG_NO_IPC;
  //   CUDA_RUNTIME_MISSING, CUDA_NOT_BUILT, DRIVER_TOO_OLD, NO_DEVICE.
  //   Everything that RegisterShards answers.
  absl::StatusOr<v1::RegisterShardsResponse> RegisterShards(
      const std::vector<Tensor>& shards,
      absl::Duration timeout = absl::Seconds(60));

  // Offers the tensors as they are now. When it returns OK they may be changed;
  // the caller leaves them alone until then. A broken connection is tried
  // again, with the same request_id, until `options.timeout`. Where tensors are
  // on GPUs it waits for what this process has given these to do, on all
  // streams, before they are read.
  //   Everything that PublishVersion answers. FAILED_PRECONDITION
  //   ALLOCATION_FREED: GPU memory of a shard was freed; register it again.
  absl::StatusOr<PublishResult> Publish(const PublishOptions& options);

  // Waits for the outcome: the version when every replica that had a part in it
  // serves it. Others may be known (absent_replicas): ServedText (served.h)
  // says it in a sentence.
  //   ABORTED, with the update's own reason and sentence.
  //   DEADLINE_EXCEEDED  WAIT_TIMEOUT: it goes on; the sentence says where it
  //   is.
  absl::StatusOr<v1::Version> Wait(const PublishResult& published,
                                   absl::Duration timeout);

  // Where the update stands now, whatever its state.
  //   NOT_FOUND  VERSION_UNKNOWN: forgotten, or its number was taken by another
  //   update.
  absl::StatusOr<v1::Version> Progress(
      const PublishResult& published,
      absl::Duration timeout = absl::Seconds(10));

  // Joins groups and reserves memory ahead of the first publish, once all ranks
  // have registered: it waits for them. Idempotent; every rank may call it.
  //   Everything that AdminService.Prepare answers. WORLD_INCOMPLETE: some rank
  //   had
  //     not registered when time was up.
  absl::StatusOr<v1::PrepareResponse> Prepare(absl::Duration timeout);

  // OK while the lease lives; LEASE_LOST or CLOSED, with the reason, otherwise.
  absl::Status status() const;
  // "nodes/{node}" of the daemon.
  std::string node() const;

  // Ends the session: the rank is deregistered. Calls that run are cancelled.
  // Arenas stay mapped. Idempotent.
  void Close();

 private:
  class Impl;
  explicit Trainer(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_TRAINER_H_
