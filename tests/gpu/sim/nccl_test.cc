// The simulated NCCL: two ranks are two simulated GPUs of this process, or two
// processes.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "transport/cuda/sim_control.h"
#include "transport/nccl/nccl_library.h"

namespace gpu_sim {
namespace {

using weightsync::transport::nccl::NcclLibrary;

const weightsync::transport::nccl::NcclApi& Api() {
  static NcclLibrary* const library = NcclLibrary::Load()->release();
  return library->api();
}

// One rank on the simulated GPU `device`.
struct Rank {
  Rank(const ncclUniqueId& id, int ranks, int rank, int device)
      : device(device) {
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
              cudaSuccess);
    EXPECT_EQ(cudaMalloc(&buffer, 1 << 20), cudaSuccess);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    EXPECT_EQ(Api().CommInitRankConfig(&comm, ranks, id, rank, &config),
              ncclInProgress);
  }
  ~Rank() {
    if (comm != nullptr) {
      EXPECT_EQ(Api().CommAbort(comm), ncclSuccess);
    }
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaFree(buffer), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
  ncclResult_t Settle() {
    for (int i = 0; i < 1000; ++i) {
      ncclResult_t state = ncclSuccess;
      EXPECT_EQ(Api().CommGetAsyncError(comm, &state), ncclSuccess);
      if (state != ncclInProgress) return state;
      usleep(1000);
    }
    return ncclInProgress;
  }
  void Fill(int value) {
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(buffer, value, 1 << 20, stream), cudaSuccess);
  }
  int Last() {
    char value = 0;
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(&value, static_cast<char*>(buffer) + (1 << 20) - 1, 1,
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
    return value;
  }
  bool Done() { return cudaStreamQuery(stream) == cudaSuccess; }

  const int device;
  cudaStream_t stream = nullptr;
  void* buffer = nullptr;
  ncclComm_t comm = nullptr;
};

ncclUniqueId NewId() {
  ncclUniqueId id;
  EXPECT_EQ(Api().GetUniqueId(&id), ncclSuccess);
  return id;
}

TEST(Nccl, BroadcastAndPairs) {
  const ncclUniqueId id = NewId();
  Rank a(id, 2, 0, 0), b(id, 2, 1, 1);
  ASSERT_EQ(a.Settle(), ncclSuccess);
  ASSERT_EQ(b.Settle(), ncclSuccess);
  a.Fill(7);
  b.Fill(9);
  EXPECT_EQ(Api().Broadcast(a.buffer, a.buffer, 1 << 20, ncclUint8, 0, a.comm,
                            a.stream),
            ncclInProgress);
  // Nothing ends before the other rank has come to it.
  usleep(20000);
  EXPECT_FALSE(a.Done());
  EXPECT_EQ(Api().Broadcast(b.buffer, b.buffer, 1 << 20, ncclUint8, 0, b.comm,
                            b.stream),
            ncclInProgress);
  EXPECT_EQ(a.Settle(), ncclSuccess);
  EXPECT_EQ(b.Settle(), ncclSuccess);
  EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(b.Last(), 7);
  b.Fill(5);
  EXPECT_EQ(Api().Send(b.buffer, 1 << 18, ncclFloat32, 0, b.comm, b.stream),
            ncclInProgress);
  EXPECT_EQ(Api().Recv(a.buffer, 1 << 18, ncclFloat32, 1, a.comm, a.stream),
            ncclInProgress);
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(a.Last(), 5);
}

// As a real one: what fits into its own buffers is sent when it lies there.
TEST(Nccl, AnEagerSendWaitsForNobodyAndItsBytesForWhoeverReceivesNext) {
  setenv("GPU_SIM_NCCL_EAGER_BYTES", "1000", 1);
  const ncclUniqueId id = NewId();
  Rank a(id, 2, 0, 0), b(id, 2, 1, 1);
  unsetenv("GPU_SIM_NCCL_EAGER_BYTES");
  ASSERT_EQ(a.Settle(), ncclSuccess);
  ASSERT_EQ(b.Settle(), ncclSuccess);
  const auto receive = [&](size_t bytes) {
    char* const last = static_cast<char*>(b.buffer) + (1 << 20) - bytes;
    EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
    EXPECT_EQ(Api().Recv(last, bytes, ncclUint8, 0, b.comm, b.stream),
              ncclInProgress);
    EXPECT_EQ(b.Settle(), ncclSuccess);
    return b.Last();
  };
  b.Fill(9);
  for (const int value : {1, 2}) {
    a.Fill(value);
    EXPECT_EQ(Api().Send(a.buffer, 1000, ncclUint8, 1, a.comm, a.stream),
              ncclInProgress);
    EXPECT_EQ(a.Settle(), ncclSuccess);
    EXPECT_EQ(cudaStreamSynchronize(a.stream), cudaSuccess);
  }
  EXPECT_EQ(receive(1000), 1);
  EXPECT_EQ(receive(1000), 2);
  // A longer one waits, as ever, and not for less.
  a.Fill(3);
  EXPECT_EQ(Api().Send(a.buffer, 1001, ncclUint8, 1, a.comm, a.stream),
            ncclInProgress);
  usleep(20000);
  EXPECT_FALSE(a.Done());
  EXPECT_EQ(receive(1001), 3);
}

TEST(Nccl, APeerThatNeverJoinsIsWaitedForUntilAbort) {
  Rank a(NewId(), 2, 0, 0);
  usleep(50000);
  ncclResult_t state;
  EXPECT_EQ(Api().CommGetAsyncError(a.comm, &state), ncclSuccess);
  EXPECT_EQ(state, ncclInProgress);
}

TEST(Nccl, AnOperationBeforeTheCommunicatorIsReadyIsFound) {
  Rank a(NewId(), 2, 0, 0);
  EXPECT_EQ(Api().Send(a.buffer, 1, ncclUint8, 1, a.comm, a.stream),
            ncclInvalidUsage);
  EXPECT_NE(TakeFindings().find("not ready"), std::string::npos);
}

TEST(Nccl, TwoRanksOnOneGpuAreRefused) {
  const ncclUniqueId id = NewId();
  Rank a(id, 2, 0, 0), b(id, 2, 1, 0);
  EXPECT_EQ(a.Settle(), ncclInvalidUsage);
  EXPECT_EQ(b.Settle(), ncclInvalidUsage);
}

TEST(Nccl, DifferentVersionsAreRefused) {
  const ncclUniqueId id = NewId();
  setenv("GPU_SIM_NCCL_VERSION", "22703", 1);
  Rank a(id, 2, 0, 0);
  unsetenv("GPU_SIM_NCCL_VERSION");
  Rank b(id, 2, 1, 1);
  EXPECT_EQ(a.Settle(), ncclInvalidUsage);
  EXPECT_EQ(b.Settle(), ncclInvalidUsage);
}

TEST(Nccl, AnErrorInTheMiddleHoldsTheStreamUntilAbort) {
  const ncclUniqueId id = NewId();
  Rank a(id, 2, 0, 0), b(id, 2, 1, 1);
  ASSERT_EQ(a.Settle(), ncclSuccess);
  ASSERT_EQ(b.Settle(), ncclSuccess);
  Plant("call=ncclGroupEnd async=6");
  EXPECT_EQ(Api().Send(a.buffer, 100, ncclUint8, 1, a.comm, a.stream),
            ncclInProgress);
  Plant("");
  EXPECT_EQ(Api().Recv(b.buffer, 100, ncclUint8, 0, b.comm, b.stream),
            ncclInProgress);
  EXPECT_EQ(a.Settle(), ncclRemoteError);
  EXPECT_FALSE(a.Done());
  EXPECT_EQ(Api().CommAbort(a.comm), ncclSuccess);
  a.comm = nullptr;
  EXPECT_TRUE(a.Done());
  // The other rank sees that its peer is gone.
  usleep(50000);
  EXPECT_EQ(b.Settle(), ncclRemoteError);
}

TEST(Nccl, SizesThatDoNotMatchAreFound) {
  const ncclUniqueId id = NewId();
  Rank a(id, 2, 0, 0), b(id, 2, 1, 1);
  ASSERT_EQ(a.Settle(), ncclSuccess);
  ASSERT_EQ(b.Settle(), ncclSuccess);
  Api().Send(a.buffer, 100, ncclUint8, 1, a.comm, a.stream);
  Api().Recv(b.buffer, 101, ncclUint8, 0, b.comm, b.stream);
  EXPECT_NE(TakeFindings().find("sends 100 bytes where rank 1 receives 101"),
            std::string::npos);
}

TEST(Nccl, AnAbortMayNeverReturn) {
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "child", "--hang", nullptr);
    _exit(1);
  }
  int status = 0;
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(waitpid(child, &status, WNOHANG), 0);
    usleep(20000);
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
}

int Hang() {
  Plant("call=ncclCommAbort hang=1");
  Rank a(NewId(), 2, 0, 0);
  Api().CommAbort(a.comm);
  return 0;
}

}  // namespace
}  // namespace gpu_sim

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--hang") return gpu_sim::Hang();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
