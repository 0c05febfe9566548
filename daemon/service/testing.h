// Daemons, trainers, replicas and workers for tests, in one process: the
// clients speak to the daemons' sockets with bare stubs, so that what they see
// is what any client would see.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_TESTING_H_
#define WEIGHTSYNC_DAEMON_SERVICE_TESTING_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "daemon/daemon.h"
#include "grpcpp/grpcpp.h"
#include "transport/eventually.h"
#include "transport/host/copy_pool.h"
#include "transport/host/host_memory.h"
#include "weightsync/v1/admin.grpc.pb.h"
#include "weightsync/v1/replica.grpc.pb.h"
#include "weightsync/v1/trainer.grpc.pb.h"

namespace weightsync {
namespace daemon {
namespace testing {

// Long enough for a loaded machine; a test that works never waits for it.
constexpr absl::Duration kDeadline = absl::Seconds(60);

using transport::Eventually;

// Short deadlines for what shall time out are a test's own business; these are
// long.
Options TestOptions(const std::string& directory, const std::string& node,
                    const std::string& coordinator_address = "");

// A directory of its own, removed with all that is in it. Short: socket paths
// may not be long.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address);
void SetDeadline(grpc::ClientContext* context,
                 absl::Duration timeout = kDeadline);

// A model whose every byte is known: parameters of several types and shapes.
std::vector<v1::Parameter> TestModel();
int64_t BytesOfParameter(const v1::Parameter& parameter);
// Its bytes in version `seed`; no two seeds share many.
std::string ParameterBytesOf(const v1::Parameter& parameter, uint64_t seed);

// One trainer rank that holds rows [begin, end) of each parameter, as FSDP
// shards them; a scalar belongs to rank 0.
class RawTrainer {
 public:
  RawTrainer(std::shared_ptr<grpc::Channel> channel, int rank, int world_size,
             const std::string& model = "models/m");
  ~RawTrainer();

  // Instead of this process. Before Open.
  void set_pid(int pid, uint64_t pid_namespace = 0) {
    pid_ = pid;
    pid_namespace_ = pid_namespace;
  }
  // The first event, or how the stream ended.
  absl::Status Open();
  absl::StatusOr<v1::ArenaOffer> Allocate(int64_t bytes,
                                          absl::Duration timeout = kDeadline);
  // Maps the offer.
  absl::Status Map(const v1::ArenaOffer& offer);
  // Allocates, maps and says what lies where: what Register sends.
  absl::StatusOr<v1::RegisterShardsRequest> MakeShards(
      const std::vector<v1::Parameter>& model);
  absl::StatusOr<v1::RegisterShardsResponse> Register(
      const v1::RegisterShardsRequest& request);
  // All of the above.
  absl::Status SetUp(const std::vector<v1::Parameter>& model);
  // Writes version `seed` into the arena.
  void Fill(uint64_t seed);
  absl::StatusOr<v1::PublishVersionResponse> Publish(
      const v1::PublishVersionRequest& request,
      absl::Duration timeout = kDeadline);
  absl::StatusOr<v1::PublishVersionResponse> Publish(int64_t version = 0);
  absl::StatusOr<v1::Version> Wait(const std::string& name,
                                   const std::string& update_id = "",
                                   absl::Duration timeout = kDeadline);

  const std::string& session() const { return session_; }
  void set_session(const std::string& session) { session_ = session; }
  // From now on the rank is silent, as a stopped process is.
  void StopHeartbeats();
  // Ends the stream; how it ended.
  absl::Status Close();
  // Waits until the server ends the stream.
  absl::Status WaitClosed();

 private:
  struct Placed {
    v1::Parameter parameter;
    int64_t begin_byte = 0, end_byte = 0;  // of the parameter
    int64_t offset = 0;                    // in the arena
  };

  void Beat();

  const int rank_, world_size_;
  const std::string model_;
  int pid_;
  uint64_t pid_namespace_ = 0;
  std::unique_ptr<v1::TrainerService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<
      grpc::ClientReaderWriter<v1::TrainerHeartbeat, v1::TrainerEvent>>
      stream_;
  std::string session_;
  transport::CopyPool pool_{1};
  transport::HostMemory memory_{&pool_, nullptr, {}};
  std::unique_ptr<transport::Segment> segment_;
  v1::RegisterShardsRequest shards_;
  std::vector<Placed> placed_;
  std::thread reader_, heart_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool silent_ ABSL_GUARDED_BY(mutex_) = false;
  absl::optional<absl::Status> closed_ ABSL_GUARDED_BY(mutex_);
};

// The control stream of one replica, with an engine that pauses and resumes at
// once.
class RawReplica {
 public:
  RawReplica(std::shared_ptr<grpc::Channel> channel,
             v1::RegisterReplica registration);
  ~RawReplica();

  // OK when it is registered, or how the stream ended.
  absl::Status Open();
  absl::Status WaitClosed();
  void Close();

  bool paused();
  int pauses();
  v1::ResumeReplica last_resume();
  // The next pauses fail, with this.
  void FailPauses(const absl::Status& why);

 private:
  void Run();

  const v1::RegisterReplica registration_;
  std::unique_ptr<v1::ReplicaService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<
      grpc::ClientReaderWriter<v1::ReplicaReport, v1::ReplicaCommand>>
      stream_;
  std::thread reader_, heart_;
  absl::Mutex mutex_;
  bool registered_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool paused_ ABSL_GUARDED_BY(mutex_) = false;
  int pauses_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::ResumeReplica last_resume_ ABSL_GUARDED_BY(mutex_);
  absl::Status pause_failure_ ABSL_GUARDED_BY(mutex_);
  absl::optional<absl::Status> closed_ ABSL_GUARDED_BY(mutex_);
};

// One worker, with live memory for what it wants, each tensor dense over its
// box.
class RawWorker {
 public:
  RawWorker(std::shared_ptr<grpc::Channel> channel,
            v1::RegisterWorker registration);
  ~RawWorker();

  absl::Status Open();
  absl::Status WaitClosed();
  void Close();

  // The live bytes of a tensor.
  std::string Live(int tensor);
  v1::InstalledState installed();
  int applies();
  // Applies are not answered any more.
  void IgnoreApplies();

 private:
  void Run();
  void Apply(const v1::ApplyUpdate& apply);
  void Write(const v1::WorkerReport& report);

  v1::RegisterWorker registration_;
  std::unique_ptr<v1::ReplicaService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::WorkerReport, v1::WorkerCommand>>
      stream_;
  transport::CopyPool pool_{1};
  transport::HostMemory memory_{&pool_, nullptr, {}};
  std::map<std::string, std::unique_ptr<transport::Segment>> arenas_;
  std::map<std::string, v1::CopyPlan> plans_;
  std::thread reader_, heart_;
  absl::Mutex write_mutex_;
  absl::Mutex mutex_;
  std::vector<std::string> live_ ABSL_GUARDED_BY(mutex_);
  v1::InstalledState installed_ ABSL_GUARDED_BY(mutex_);
  int applies_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ignore_applies_ ABSL_GUARDED_BY(mutex_) = false;
  bool registered_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::optional<absl::Status> closed_ ABSL_GUARDED_BY(mutex_);
};

v1::RegisterReplica ReplicaOf(const std::string& replica, int worker_count = 1,
                              const std::string& model = "models/m");
// Wants everything; with count > 1 part `index` of the rows of each parameter
// whose rows divide.
v1::RegisterWorker WorkerOf(const std::string& replica,
                            const std::vector<v1::Parameter>& wanted,
                            int index = 0, int count = 1,
                            const std::string& model = "models/m");

// What `worker` must have live after version `seed`: its wanted tensors, cut
// from the parameters.
std::string Expected(const v1::WantedTensor& wanted, uint64_t seed);

}  // namespace testing
}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_TESTING_H_
