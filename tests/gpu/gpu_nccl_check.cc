// Whether NCCL starts, moves bytes and ends on this machine, with one GPU: two
// processes that are different hosts to NCCL (NCCL_HOSTID) meet over sockets on
// the same one. For correctness alone: a daemon never does that.
//
//   gpu_nccl_check           exit code 0 when all of it went well
#include <cuda_runtime_api.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "transport/nccl/nccl_library.h"

namespace weightsync {
namespace transport {
namespace nccl {
namespace {

constexpr size_t kBytes = 1 << 20;
constexpr double kDeadline = 60;

double Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * now.tv_nsec;
}

[[noreturn]] void Fail(int rank, const std::string& what) {
  fprintf(stderr, "gpu_nccl_check: rank %d: %s\n", rank, what.c_str());
  _exit(1);
}

class Rank {
 public:
  explicit Rank(int rank) : rank_(rank) {
    auto library = NcclLibrary::Load();
    if (!library.ok()) Fail(rank, std::string(library.status().message()));
    library_ = *std::move(library);
  }

  // The first makes the id, and the other reads it.
  void Join(int from, int to) {
    ncclUniqueId id;
    if (rank_ == 0) {
      Check(library_->api().GetUniqueId(&id), "ncclGetUniqueId");
      if (write(to, &id, sizeof(id)) != sizeof(id)) Fail(rank_, "the pipe");
    } else if (read(from, &id, sizeof(id)) != sizeof(id)) {
      Fail(rank_, "the pipe");
    }
    Cuda(cudaSetDevice(0), "cudaSetDevice");
    Cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
         "cudaStreamCreateWithFlags");
    Cuda(cudaMalloc(&memory_, kBytes), "cudaMalloc");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = 1;
    const double began = Now();
    Check(library_->api().CommInitRankConfig(&comm_, 2, id, rank_, &config),
          "ncclCommInitRankConfig");
    Settle("ncclCommInitRankConfig");
    joined_ = Now() - began;
  }

  // The first sends what the other compares.
  void Move() {
    std::vector<unsigned char> bytes(kBytes);
    for (size_t i = 0; i < kBytes; ++i)
      bytes[i] = static_cast<unsigned char>(i * 2654435761u >> 11);
    if (rank_ == 0) {
      Cuda(cudaMemcpy(memory_, bytes.data(), kBytes, cudaMemcpyHostToDevice),
           "cudaMemcpy");
      Check(library_->api().Send(memory_, kBytes, ncclUint8, 1, comm_, stream_),
            "ncclSend");
    } else {
      Check(library_->api().Recv(memory_, kBytes, ncclUint8, 0, comm_, stream_),
            "ncclRecv");
    }
    Settle("a send and a receive");
    const double end = Now() + kDeadline;
    cudaError_t state;
    while ((state = cudaStreamQuery(stream_)) == cudaErrorNotReady) {
      if (Now() > end) Fail(rank_, "1 MiB did not arrive in a minute");
      usleep(100);
    }
    Cuda(state, "cudaStreamQuery");
    if (rank_ == 0) return;
    std::vector<unsigned char> found(kBytes);
    Cuda(cudaMemcpy(found.data(), memory_, kBytes, cudaMemcpyDeviceToHost),
         "cudaMemcpy");
    if (found != bytes) Fail(rank_, "other bytes arrived than were sent");
  }

  // In the middle of a receive for which nobody sends.
  void Abort() {
    if (rank_ == 1) {
      // It may be told already that the other one is gone; it is asked for
      // nothing but to return.
      library_->api().Recv(memory_, kBytes, ncclUint8, 0, comm_, stream_);
      usleep(100000);
    }
    const double began = Now();
    Check(library_->api().CommAbort(comm_), "ncclCommAbort");
    printf("rank %d: joined in %.3f s, aborted in %.3f s\n", rank_, joined_,
           Now() - began);
    fflush(stdout);
    Cuda(cudaFree(memory_), "cudaFree");
    Cuda(cudaStreamDestroy(stream_), "cudaStreamDestroy");
  }

 private:
  void Check(ncclResult_t result, const char* call) {
    const absl::Status status = library_->Check(result, call);
    if (!status.ok()) Fail(rank_, std::string(status.message()));
  }
  void Cuda(cudaError_t error, const char* call) {
    if (error != cudaSuccess)
      Fail(rank_, std::string(call) + ": " + cudaGetErrorString(error));
  }
  void Settle(const char* call) {
    const double end = Now() + kDeadline;
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
      Check(library_->api().CommGetAsyncError(comm_, &state), call);
      if (Now() > end) Fail(rank_, std::string(call) + " took over a minute");
      usleep(100);
    }
    Check(state, call);
  }

  const int rank_;
  std::unique_ptr<NcclLibrary> library_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  void* memory_ = nullptr;
  double joined_ = 0;
};

int Run() {
  setenv("NCCL_P2P_DISABLE", "1", 1);
  setenv("NCCL_SHM_DISABLE", "1", 1);
  setenv("NCCL_IB_DISABLE", "1", 1);
  setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  int pipes[2];
  if (pipe(pipes) != 0) return 1;
  // Before either has a context: one does not survive a fork.
  pid_t ranks[2];
  for (int rank = 0; rank < 2; ++rank) {
    ranks[rank] = fork();
    if (ranks[rank] != 0) continue;
    setenv("NCCL_HOSTID", rank == 0 ? "one" : "two", 1);
    Rank self(rank);
    self.Join(pipes[0], pipes[1]);
    self.Move();
    self.Abort();
    exit(0);
  }
  close(pipes[0]);
  close(pipes[1]);
  int left = 2;
  bool failed = false;
  for (const double end = Now() + 2 * kDeadline; left > 0 && Now() < end;) {
    int status = 0;
    if (waitpid(-1, &status, WNOHANG) <= 0) {
      usleep(10000);
      continue;
    }
    --left;
    if (status == 0) continue;
    failed = true;
    break;  // the other one waits for it
  }
  if (left > 0 && !failed)
    fprintf(stderr, "gpu_nccl_check: time is up: a rank hangs\n");
  for (const pid_t rank : ranks) kill(rank, SIGKILL);
  return failed || left > 0 ? 1 : 0;
}

}  // namespace
}  // namespace nccl
}  // namespace transport
}  // namespace weightsync

int main() { return weightsync::transport::nccl::Run(); }
