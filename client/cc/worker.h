// The inference side, one per GPU: receives versions of a model's weights into
// live tensors whose addresses never change.
//
//   WorkerOptions options;
//   options.model = "qwen";
//   options.replica = "replica-0";
//   options.incarnation = incarnation;   // the same as the Replica's
//   auto worker = Worker::Start(options, tensors);
//   if (!worker.ok()) ...
//   (*worker)->WaitRegistered(absl::Seconds(30));
//
// From then on updates arrive by themselves: the daemon commands them only
// while the replica is paused (client/cc/replica.h), so the engine sees no byte
// change while it generates.
//
// What lies in the tensors is INSTALLED(u), or WRITING(u) from just before the
// first byte of u is written until the last one was and the store's generations
// still hold: a mix. The daemon is told of WRITING before the first byte; where
// it cannot be told, nothing is written. WRITING stands until a whole update
// was applied, across broken streams and restarts of the daemon: at every
// registration the worker says what is in its memory.
//
// STREAM: buckets come one after the other while the replica is paused; the
// tensors hold a mix until the daemon says that the update is committed and
// complete. An update that is given up leaves WRITING behind.
//
// A worker with a spare set of tensors (WorkerOptions::swap) writes into the
// set that does not serve and swaps the two: it never holds a mix, whatever
// fails, and updates may be published with PAUSE_MODE_NONE.
//
// No byte is written while the engine's memory is not there: asleep (Sleep), or
// where WorkerOptions::may_write says no.
//
// Tensors may be on GPUs of this process (Tensor::on_gpu): an update is copied
// to them by copy engines, from memory of the daemon that is pinned once; where
// it waits on the same GPU, also by a kernel, in as few launches as there are
// buckets. A worker that swaps has copy engines alone: its engine computes.
// When WorkerApplied is told, and on_resume called, the bytes are there for
// every stream.
//
// Broken streams are mended by the library: it registers again after a
// back-off, for as long as the object lives, unless the daemon's answer is one
// that trying again cannot change (see ended()).
//
// Thread-safe. Two threads: one for the daemon, one for copies; more while a
// copy runs.
#ifndef WEIGHTSYNC_CLIENT_CC_WORKER_H_
#define WEIGHTSYNC_CLIENT_CC_WORKER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cc/tensor.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace client {

// One apply, when it has ended.
struct AppliedInfo {
  std::string update_id;
  int64_t version = 0;
  int64_t step = 0;
  // OK: the tensors hold the update. Otherwise see Worker::installed().
  absl::Status status;
  int64_t copied_bytes = 0;
  absl::Duration copy_duration;
};

// Tensors of an update that are there to be read, in WorkerOptions::take. Not
// thread-safe; valid as long as that call runs.
class TensorReader {
 public:
  virtual ~TensorReader() = default;

  const std::string& update_id() const { return update_id_; }
  int64_t version() const { return version_; }
  // Of the calls for one update. One that is streamed may be given up before
  // the last.
  bool first() const { return first_; }
  bool last() const { return last_; }
  // Which tensors can be read now, by their place in the registration. Of an
  // update that is streamed, those that the bucket which has just come has
  // completed; otherwise all, in one call.
  const std::vector<int32_t>& tensors() const { return tensors_; }

  // Copies one of them to `data`, laid out as it was registered: `bytes` is at
  // least SpanBytes of it. Any number of times.
  //   INVALID_ARGUMENT  TENSOR_UNKNOWN: it cannot be read now.
  //     MEMORY_SIZE_INVALID. And the errors of copying.
  virtual absl::Status Read(int tensor, void* data, int64_t bytes) = 0;

 protected:
  std::string update_id_;
  int64_t version_ = 0;
  bool first_ = true;
  bool last_ = true;
  std::vector<int32_t> tensors_;
};

struct WorkerOptions {
  // See NormalizeAddress in client/cc/rpc.h; empty: DefaultAddress().
  std::string address;
  // With or without "models/".
  std::string model;
  std::string replica;
  // The same for the replica and all of its workers, another after every
  // restart of the engine (RandomId() of client/cc/rpc.h).
  std::string incarnation;
  int worker_index = 0;
  int worker_count = 1;
  // For people; the library's name is put before it.
  std::string client;
  // Threads that copy; 0: as many as the machine has CPUs, at most 4.
  int copy_threads = 0;
  // What the tensors hold at the start; default: what the engine loaded.
  v1::InstalledState installed;
  // Asked on the copying thread before the daemon is told and anything is
  // written. Not OK: the memory is not there now (starting, asleep); the update
  // is refused with that status, untouched. May be empty.
  std::function<absl::Status()> may_write;
  // Of a worker that was started with a spare set of tensors: called on the
  // copying thread when set `set` (0: the first one) holds an update whole. The
  // engine serves from it from its on_resume (ReplicaHooks) for that update on,
  // all of its workers from the same step; an engine of one worker may do so at
  // once. Nothing is written into the other set before that on_resume has
  // succeeded. Not OK: the other one still serves.
  std::function<absl::Status(int set, const std::string& update_id)> swap;
  // Called on the copying thread when the tensors hold the update whole, before
  // it counts as installed and the daemon is told: an engine that takes its
  // weights over from them (a loader) does so here, and waits until it has. Not
  // OK: what it holds is a mix; WRITING stands and the update is applied again.
  // Not of a worker that swaps.
  std::function<absl::Status(const std::string& update_id, int64_t version)>
      load;
  // Of a worker whose tensors have no memory of their own (`data` is null in
  // all of them): called on the copying thread, instead of copies into them,
  // with what is there to be read: once for an update, or as its buckets come
  // where it is streamed. When the call for the last of them has returned OK
  // the update counts as installed; not OK: what the engine holds is a mix, as
  // with `load`. Nothing is kept here but what a bucket has left incomplete.
  std::function<absl::Status(TensorReader* reader)> take;
  // Called on the copying thread when the model was removed (an adapter that is
  // not wanted any more): the engine drops what it made of the weights; the
  // replica is paused. The tensors' memory stays, for the next publish writes
  // there again. Not OK: what it holds is neither; it is asked again. May be
  // empty.
  std::function<absl::Status()> on_remove;
  // Called on the copying thread when the tensors are about to become a mix:
  // after the daemon was told, before the first byte.
  std::function<void(const std::string& update_id)> on_writing;
  // Called on the copying thread after every apply, before the daemon is told.
  // Must return soon: the replica is paused.
  std::function<void(const AppliedInfo&)> on_applied;
  // Of registering, and of the back-off between attempts.
  absl::Duration register_timeout = absl::Seconds(20);
  absl::Duration max_backoff = absl::Seconds(5);
};

class Worker {
 public:
  // Checks the tensors and starts to register. Memory that `tensors` point to
  // must stay valid until Close.
  //   INVALID_ARGUMENT: those of CheckTensors; WORKER_INDEX_INVALID,
  //     NAME_INVALID (no model, replica or incarnation), ADDRESS_INVALID;
  //     NOT_DEVICE_MEMORY: `on_gpu`, and on no GPU of this process.
  //   FAILED_PRECONDITION  CUDA_RUNTIME_MISSING, CUDA_NOT_BUILT,
  //   DRIVER_TOO_OLD,
  //     NO_DEVICE.
  static absl::StatusOr<std::unique_ptr<Worker>> Start(
      WorkerOptions options, std::vector<Tensor> tensors);
  // With a second set of tensors of the same names, types, shapes and boxes;
  // `tensors` are those that serve now. Also SWAP_INVALID: options.swap is
  // missing, or the sets are not the same.
  static absl::StatusOr<std::unique_ptr<Worker>> Start(
      WorkerOptions options, std::vector<Tensor> tensors,
      std::vector<Tensor> spare);

  // As Close.
  ~Worker();

  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Waits until the daemon knows the worker. The daemon's own error when it has
  // refused for good (PARAMETER_UNKNOWN, SHAPE_MISMATCH, WORKER_TAKEN, ...);
  // DEADLINE_EXCEEDED (REGISTER_TIMEOUT) otherwise: it goes on trying.
  absl::Status WaitRegistered(absl::Duration timeout);

  // What is in the tensors now.
  v1::InstalledState installed() const;

  // Waits until a version of at least `version` is installed, or any update
  // when `version` is 0. DEADLINE_EXCEEDED (INSTALL_TIMEOUT); the daemon's
  // error when it has refused the worker for good; CANCELLED (CLOSED).
  absl::Status WaitInstalled(int64_t version, absl::Duration timeout);

  // The engine has dropped its weights (deep sleep): what was installed is
  // gone. Registers anew with that, so that the newest version is applied
  // again. FAILED_PRECONDITION (APPLY_RUNNING) while a copy runs.
  absl::Status MarkDropped();

  // The engine sleeps and its memory goes: nothing is written until Wake, which
  // then does what MarkDropped does. Waits for a copy that runs, up to
  // `timeout`: FAILED_PRECONDITION (APPLY_RUNNING) if it is still there.
  absl::Status Sleep(absl::Duration timeout);
  absl::Status Wake();

  // OK while registered; why not, otherwise.
  absl::Status status() const;
  // No further attempt to register will be made: closed, or refused for good.
  bool ended() const;

  // Ends the registration and joins the threads; waits for a copy that runs.
  // Idempotent. The tensors are not touched after it.
  void Close();

 private:
  class Impl;
  explicit Worker(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_WORKER_H_
