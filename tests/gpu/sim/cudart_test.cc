// The simulated GPU is as strict as a real one: what a test of the product
// relies on is tested here.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/gpu/sim/test_kernels.h"
#include "transport/cuda/sim_control.h"

namespace gpu_sim {
namespace {

constexpr char kChild[] = "--child=";

class CudartTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Plant("");
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
              cudaSuccess);
  }
  void TearDown() override {
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    cudaGetLastError();
    Plant("");
  }
  void* Malloc(size_t bytes) {
    void* pointer = nullptr;
    EXPECT_EQ(cudaMalloc(&pointer, bytes), cudaSuccess);
    return pointer;
  }
  static std::vector<int32_t> Counting(int count) {
    std::vector<int32_t> values(count);
    std::iota(values.begin(), values.end(), 1);
    return values;
  }
  static uint64_t BufferId(const void* pointer) {
    using GetAttribute = CUresult (*)(void*, CUpointer_attribute, CUdeviceptr);
    void* function = nullptr;
    EXPECT_EQ(
        cudaGetDriverEntryPointByVersion("cuPointerGetAttribute", &function,
                                         12000, cudaEnableDefault, nullptr),
        cudaSuccess);
    unsigned long long id = 0;  // NOLINT: CUDA's type
    EXPECT_EQ(reinterpret_cast<GetAttribute>(function)(
                  &id, CU_POINTER_ATTRIBUTE_BUFFER_ID,
                  reinterpret_cast<CUdeviceptr>(pointer)),
              CUDA_SUCCESS);
    return id;
  }
  cudaStream_t stream_ = nullptr;
};

// Another process: this program with a part to play.
class Child {
 public:
  explicit Child(const std::string& part) {
    int to[2], from[2];
    if (pipe(to) != 0 || pipe(from) != 0) abort();
    pid_ = fork();
    if (pid_ == 0) {
      dup2(to[0], 0);
      dup2(from[1], 1);
      for (const int fd : {to[0], to[1], from[0], from[1]}) close(fd);
      execl("/proc/self/exe", "child", (kChild + part).c_str(), nullptr);
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    to_ = to[1];
    from_ = from[0];
  }
  ~Child() {
    close(to_);
    close(from_);
    if (pid_ > 0) Wait();
  }
  template <typename T>
  void Send(const T& value) {
    EXPECT_EQ(write(to_, &value, sizeof(value)), ssize_t{sizeof(value)});
  }
  template <typename T>
  T Receive() {
    T value = {};
    EXPECT_EQ(read(from_, &value, sizeof(value)), ssize_t{sizeof(value)});
    return value;
  }
  void Kill() { kill(pid_, SIGKILL); }
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return status;
  }

 private:
  pid_t pid_;
  int to_, from_;
};

template <typename T>
T FromParent() {
  T value = {};
  if (read(0, &value, sizeof(value)) != sizeof(value)) _exit(3);
  return value;
}
template <typename T>
void ToParent(const T& value) {
  if (write(1, &value, sizeof(value)) != sizeof(value)) _exit(3);
}

struct Opened {
  int error;
  int32_t first;
  uint64_t address;
};

// Opens what it is given, tells the first value, adds one to it, closes.
int Importer() {
  const auto handle = FromParent<cudaIpcMemHandle_t>();
  Opened opened = {};
  void* pointer = nullptr;
  opened.error =
      cudaIpcOpenMemHandle(&pointer, handle, cudaIpcMemLazyEnablePeerAccess);
  opened.address = reinterpret_cast<uint64_t>(pointer);
  if (opened.error == 0) {
    cudaMemcpy(&opened.first, pointer, 4, cudaMemcpyDeviceToHost);
    const int32_t next = opened.first + 1;
    cudaMemcpy(pointer, &next, 4, cudaMemcpyHostToDevice);
  }
  ToParent(opened);
  FromParent<char>();
  if (opened.error == 0) opened.error = cudaIpcCloseMemHandle(pointer);
  return opened.error == 0 ? 0 : 1;
}

// The same on the last GPU that it sees.
int PeerImporter() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess ||
      cudaSetDevice(count - 1) != cudaSuccess)
    return 2;
  return Importer();
}

// Makes an allocation, hands it out, and waits.
int Exporter() {
  void* pointer = nullptr;
  cudaIpcMemHandle_t handle;
  const int32_t value = 77;
  if (cudaMalloc(&pointer, 4096) != cudaSuccess ||
      cudaIpcGetMemHandle(&handle, pointer) != cudaSuccess ||
      cudaMemcpy(pointer, &value, 4, cudaMemcpyHostToDevice) != cudaSuccess)
    return 1;
  ToParent(handle);
  FromParent<char>();
  return cudaFree(pointer);
}

// Uses memory after it has freed it.
int Wild() {
  void* pointer = nullptr;
  void* other = nullptr;
  cudaMalloc(&pointer, 4 << 20);
  cudaMalloc(&other, 4096);
  cudaFree(pointer);
  LaunchScale(static_cast<int32_t*>(pointer), static_cast<int32_t*>(pointer),
              100, 1, 1, nullptr);
  const int first = cudaDeviceSynchronize();
  // The context is lost for good.
  const int second = cudaFree(other);
  const int third = cudaMalloc(&pointer, 4096);
  ToParent(first);
  ToParent(second);
  ToParent(third);
  return 0;
}

int Leaker() {
  void* pointer = nullptr;
  cudaStream_t stream;
  cudaMalloc(&pointer, 12345);
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return 0;
}

TEST_F(CudartTest, ARealKernelComputes) {
  const std::vector<int32_t> values = Counting(1000);
  auto* from = static_cast<int32_t*>(Malloc(4000));
  auto* to = static_cast<int32_t*>(Malloc(4000));
  auto* sum = static_cast<unsigned long long*>(Malloc(8));
  ASSERT_EQ(cudaMemsetAsync(sum, 0, 8, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(from, values.data(), 4000, cudaMemcpyHostToDevice,
                            stream_),
            cudaSuccess);
  ASSERT_EQ(LaunchScale(from, to, 1000, 3, -2, stream_), cudaSuccess);
  ASSERT_EQ(LaunchSum(to, 1000, sum, stream_), cudaSuccess);
  std::vector<int32_t> result(1000);
  unsigned long long total = 0;
  ASSERT_EQ(
      cudaMemcpyAsync(result.data(), to, 4000, cudaMemcpyDeviceToHost, stream_),
      cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(&total, sum, 8, cudaMemcpyDeviceToHost, stream_),
            cudaSuccess);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(result[i], 3 * (i + 1) - 2);
  EXPECT_EQ(total, 3ull * 500500 - 2000);
  for (void* pointer : {static_cast<void*>(from), static_cast<void*>(to),
                        static_cast<void*>(sum)})
    EXPECT_EQ(cudaFree(pointer), cudaSuccess);
}

TEST_F(CudartTest, TheHostCannotTouchDeviceMemory) {
  auto* pointer = static_cast<volatile int32_t*>(Malloc(4096));
  EXPECT_EXIT(*pointer = 1, ::testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EQ(cudaFree(const_cast<int32_t*>(pointer)), cudaSuccess);
}

// The address that was given back last is the next that is given: to a thread
// that allocates while another has not returned from cudaFree.
TEST_F(CudartTest, WhatOneThreadFreesAnotherGets) {
  const auto work = [](size_t bytes) {
    for (int i = 0; i < 500; ++i) {
      void* pointer = nullptr;
      ASSERT_EQ(cudaMalloc(&pointer, bytes), cudaSuccess);
      cudaPointerAttributes last = {};
      ASSERT_EQ(cudaPointerGetAttributes(
                    &last, static_cast<char*>(pointer) + bytes - 1),
                cudaSuccess);
      EXPECT_EQ(last.type, cudaMemoryTypeDevice);
      ASSERT_EQ(cudaFree(pointer), cudaSuccess);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i <= 8; ++i)
    threads.emplace_back([&work, i] { work(i * 1000); });
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CudartTest, FreshMemoryIsNotZero) {
  void* pointer = Malloc(64);
  unsigned char byte = 0;
  ASSERT_EQ(cudaMemcpy(&byte, pointer, 1, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_NE(byte, 0);
  EXPECT_EQ(cudaFree(pointer), cudaSuccess);
}

TEST_F(CudartTest, StreamsAreAsynchronousAndFreeWaitsForThem) {
  // Through pinned memory nothing but the stream's order is waited for.
  int32_t* host = nullptr;
  ASSERT_EQ(cudaMallocHost(reinterpret_cast<void**>(&host), 4 << 20),
            cudaSuccess);
  void* pointer = Malloc(4 << 20);
  *host = 0;
  int pending = 0;
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(cudaMemsetAsync(pointer, i, 4 << 20, stream_), cudaSuccess);
    ASSERT_EQ(cudaMemcpyAsync(host, pointer, 4 << 20, cudaMemcpyDeviceToHost,
                              stream_),
              cudaSuccess);
    if (cudaStreamQuery(stream_) == cudaErrorNotReady) ++pending;
  }
  EXPECT_GT(pending, 25);
  ASSERT_EQ(cudaFree(pointer), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaSuccess);
  EXPECT_EQ(*host, 49 * 0x01010101);
  EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
}

TEST_F(CudartTest, EventsOrderStreams) {
  cudaStream_t other;
  cudaEvent_t event;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking),
            cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
            cudaSuccess);
  char* pointer = static_cast<char*>(Malloc(8 << 20));
  char* copy = static_cast<char*>(Malloc(8 << 20));
  for (int i = 1; i < 20; ++i) {
    ASSERT_EQ(cudaMemsetAsync(pointer, i, 8 << 20, stream_), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);
    ASSERT_EQ(cudaMemcpyAsync(copy, pointer, 8 << 20, cudaMemcpyDeviceToDevice,
                              other),
              cudaSuccess);
    char last = 0;
    ASSERT_EQ(cudaMemcpyAsync(&last, copy + (8 << 20) - 1, 1,
                              cudaMemcpyDeviceToHost, other),
              cudaSuccess);
    EXPECT_EQ(last, i);
  }
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
  EXPECT_EQ(cudaFree(pointer), cudaSuccess);
  EXPECT_EQ(cudaFree(copy), cudaSuccess);
}

TEST_F(CudartTest, TwoStreamsThatDoNotWaitForEachOtherAreFound) {
  cudaStream_t other;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking),
            cudaSuccess);
  void* pointer = Malloc(1 << 20);
  ASSERT_EQ(cudaMemsetAsync(pointer, 1, 1 << 20, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(pointer, 2, 100, other), cudaSuccess);
  EXPECT_NE(TakeFindings().find("neither waits for the other"),
            std::string::npos);
  // The host waits for both: nothing to find.
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(pointer, 1, 1 << 20, stream_), cudaSuccess);
  EXPECT_EQ(TakeFindings(), "");
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
  EXPECT_EQ(cudaFree(pointer), cudaSuccess);
}

TEST_F(CudartTest, MemoryOfAnotherGpuIsOpenedWhereThereIsPeerAccess) {
  int can = -1;
  EXPECT_EQ(cudaDeviceCanAccessPeer(&can, 1, 0), cudaSuccess);
  EXPECT_EQ(can, 1);
  EXPECT_EQ(cudaDeviceCanAccessPeer(&can, 1, 1), cudaSuccess);
  EXPECT_EQ(can, 0);
  EXPECT_EQ(cudaDeviceCanAccessPeer(&can, 0, 2), cudaErrorInvalidDevice);
  auto* pointer = static_cast<int32_t*>(Malloc(4096));
  const int32_t value = 41;
  ASSERT_EQ(cudaMemcpy(pointer, &value, 4, cudaMemcpyHostToDevice),
            cudaSuccess);
  cudaIpcMemHandle_t handle;
  ASSERT_EQ(cudaIpcGetMemHandle(&handle, pointer), cudaSuccess);
  const auto open = [&] {
    Child importer("peer_importer");
    importer.Send(handle);
    const auto opened = importer.Receive<Opened>();
    importer.Send('x');
    importer.Wait();
    if (opened.error == 0) {
      EXPECT_EQ(opened.first, 41);
    }
    return opened.error;
  };
  EXPECT_EQ(open(), cudaSuccess);
  int32_t now = 0;
  ASSERT_EQ(cudaMemcpy(&now, pointer, 4, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(now, 42) << "it is the same memory";
  // The only GPU that it sees is the other one.
  setenv("GPU_SIM_VISIBLE", "1", 1);
  EXPECT_EQ(open(), cudaErrorInvalidDevice);
  unsetenv("GPU_SIM_VISIBLE");
  setenv("GPU_SIM_MIG", "1", 1);
  EXPECT_EQ(open(), cudaErrorMapBufferObjectFailed);
  unsetenv("GPU_SIM_MIG");
  Plant("call=peerAccess no=1 count=0");
  EXPECT_EQ(open(), cudaErrorPeerAccessUnsupported);
  EXPECT_EQ(cudaDeviceCanAccessPeer(&can, 1, 0), cudaSuccess);
  EXPECT_EQ(can, 0);
  EXPECT_EQ(cudaFree(pointer), cudaSuccess);
}

// Within a process, too, an address is good on the GPU that it was made or
// opened for.
TEST_F(CudartTest, AnAddressOfAnotherGpuOfTheProcessIsFound) {
  void* here = Malloc(4096);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  void* there = Malloc(4096);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(
      cudaMemcpyAsync(here, there, 4096, cudaMemcpyDeviceToDevice, stream_),
      cudaErrorInvalidValue);
  EXPECT_NE(TakeFindings().find("of another device than the stream"),
            std::string::npos);
  EXPECT_EQ(cudaFree(here), cudaSuccess);
  EXPECT_EQ(cudaFree(there), cudaSuccess);
}

TEST_F(CudartTest, IpcBetweenProcesses) {
  auto* pointer = static_cast<int32_t*>(Malloc(4096));
  const int32_t value = 41;
  ASSERT_EQ(cudaMemcpy(pointer, &value, 4, cudaMemcpyHostToDevice),
            cudaSuccess);
  cudaIpcMemHandle_t handle;
  ASSERT_EQ(cudaIpcGetMemHandle(&handle, pointer), cudaSuccess);
  // Not in the process that exports it.
  void* own = nullptr;
  EXPECT_EQ(cudaIpcOpenMemHandle(&own, handle, cudaIpcMemLazyEnablePeerAccess),
            cudaErrorDeviceUninitialized);
  {
    Child importer("importer");
    importer.Send(handle);
    const auto opened = importer.Receive<Opened>();
    EXPECT_EQ(opened.error, 0);
    EXPECT_EQ(opened.first, 41);
    EXPECT_NE(opened.address, reinterpret_cast<uint64_t>(pointer));
    importer.Send('x');
    EXPECT_EQ(importer.Wait(), 0);
  }
  int32_t now = 0;
  ASSERT_EQ(cudaMemcpy(&now, pointer, 4, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(now, 42);

  Child importer("importer");
  importer.Send(handle);
  EXPECT_EQ(importer.Receive<Opened>().error, 0);
  EXPECT_EQ(cudaFree(pointer), cudaSuccess);
  EXPECT_NE(TakeFindings().find("freed that another process has open"),
            std::string::npos);
  importer.Send('x');
  importer.Wait();
}

TEST_F(CudartTest, AnOpenMappingIsCountedAndOutlivesItsExporter) {
  Child exporter("exporter");
  const auto handle = exporter.Receive<cudaIpcMemHandle_t>();
  void* one = nullptr;
  void* two = nullptr;
  ASSERT_EQ(cudaIpcOpenMemHandle(&one, handle, cudaIpcMemLazyEnablePeerAccess),
            cudaSuccess);
  ASSERT_EQ(cudaIpcOpenMemHandle(&two, handle, cudaIpcMemLazyEnablePeerAccess),
            cudaSuccess);
  EXPECT_EQ(one, two);
  EXPECT_EQ(cudaIpcCloseMemHandle(two), cudaSuccess);
  exporter.Kill();
  exporter.Wait();
  int32_t value = 0;
  ASSERT_EQ(cudaMemcpy(&value, one, 4, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(value, 77);
  EXPECT_EQ(cudaIpcCloseMemHandle(one), cudaSuccess);
  EXPECT_NE(cudaMemcpy(&value, one, 4, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_NE(TakeFindings().find("no longer"), std::string::npos);
  // The dead exporter's handle opens nothing, from the moment when it is dead.
  EXPECT_EQ(cudaIpcOpenMemHandle(&one, handle, cudaIpcMemLazyEnablePeerAccess),
            cudaErrorMapBufferObjectFailed);
  for (int i = 0; i < 10; ++i) {
    Child another("exporter");
    const auto of_another = another.Receive<cudaIpcMemHandle_t>();
    another.Kill();
    another.Wait();
    EXPECT_EQ(
        cudaIpcOpenMemHandle(&one, of_another, cudaIpcMemLazyEnablePeerAccess),
        cudaErrorMapBufferObjectFailed);
  }
}

TEST_F(CudartTest, AnAddressComesBackWithANewBufferId) {
  void* first = Malloc(100000);
  const uint64_t id = BufferId(first);
  EXPECT_EQ(BufferId(static_cast<char*>(first) + 50000), id);
  ASSERT_EQ(cudaFree(first), cudaSuccess);
  void* second = Malloc(100000);
  EXPECT_EQ(first, second);
  EXPECT_NE(BufferId(second), id);
  EXPECT_EQ(cudaFree(second), cudaSuccess);
}

TEST_F(CudartTest, AWildKernelLosesItsContextAndNoOther) {
  Child wild("wild");
  EXPECT_EQ(wild.Receive<int>(), cudaErrorIllegalAddress);
  EXPECT_EQ(wild.Receive<int>(), cudaErrorIllegalAddress);
  EXPECT_EQ(wild.Receive<int>(), cudaErrorIllegalAddress);
  EXPECT_EQ(wild.Wait(), 0);
  EXPECT_NE(TakeFindings().find("touched the address"), std::string::npos);
  void* pointer = Malloc(100);
  EXPECT_EQ(cudaFree(pointer), cudaSuccess);
}

TEST_F(CudartTest, LeaksAreFoundAtTheEnd) {
  Child leaker("leaker");
  EXPECT_EQ(leaker.Wait(), 0);
  const std::string findings = TakeFindings();
  EXPECT_NE(findings.find("leak: 12345 bytes not freed"), std::string::npos);
  EXPECT_NE(findings.find("leak: 1 streams"), std::string::npos);
}

TEST_F(CudartTest, MisuseIsFound) {
  void* pointer = Malloc(1000);
  char host[16] = {};
  EXPECT_NE(cudaMemcpy(static_cast<char*>(pointer) + 990, host, 16,
                       cudaMemcpyHostToDevice),
            cudaSuccess);
  EXPECT_NE(TakeFindings().find("not (or no longer) there"), std::string::npos);
  EXPECT_NE(cudaMemcpy(pointer, host, 16, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_NE(TakeFindings().find("direction"), std::string::npos);
  ASSERT_EQ(cudaFree(pointer), cudaSuccess);
  EXPECT_NE(cudaFree(pointer), cudaSuccess);
  EXPECT_NE(TakeFindings().find("cudaFree of what is not"), std::string::npos);
  cudaStream_t gone;
  ASSERT_EQ(cudaStreamCreateWithFlags(&gone, cudaStreamNonBlocking),
            cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(gone), cudaSuccess);
  EXPECT_NE(cudaStreamSynchronize(gone), cudaSuccess);
  EXPECT_NE(TakeFindings().find("a stream that is not"), std::string::npos);
}

TEST_F(CudartTest, AnotherDevicesMemoryIsFound) {
  void* pointer = Malloc(1000);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  cudaStream_t other;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking),
            cudaSuccess);
  EXPECT_NE(cudaMemsetAsync(pointer, 0, 10, other), cudaSuccess);
  EXPECT_NE(TakeFindings().find("of another device"), std::string::npos);
  EXPECT_EQ(LaunchScale(nullptr, nullptr, 0, 0, 0, stream_),
            cudaErrorInvalidResourceHandle);
  EXPECT_NE(TakeFindings().find("not current"), std::string::npos);
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(cudaFree(pointer), cudaSuccess);
}

TEST_F(CudartTest, MemoryIsAsMuchAsThereIs) {
  size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(total, size_t{64} << 20);
  void* pointer = nullptr;
  EXPECT_EQ(cudaMalloc(&pointer, free + 512), cudaErrorMemoryAllocation);
  ASSERT_EQ(cudaMalloc(&pointer, free), cudaSuccess);
  size_t left = 1;
  ASSERT_EQ(cudaMemGetInfo(&left, &total), cudaSuccess);
  EXPECT_LT(left, 512u);
  EXPECT_EQ(cudaFree(pointer), cudaSuccess);
}

TEST_F(CudartTest, PlantedErrors) {
  Plant("call=cudaMalloc error=2 after=1");
  void* pointer = Malloc(100);
  void* other = nullptr;
  EXPECT_EQ(cudaMalloc(&other, 100), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMalloc(&other, 100), cudaSuccess);
  EXPECT_EQ(cudaFree(pointer), cudaSuccess);
  EXPECT_EQ(cudaFree(other), cudaSuccess);

  Plant("call=cudaMalloc unexportable=1");
  pointer = Malloc(100);
  cudaIpcMemHandle_t handle;
  EXPECT_EQ(cudaIpcGetMemHandle(&handle, pointer), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(pointer), cudaSuccess);
}

TEST_F(CudartTest, AForkedChildHasNoContext) {
  EXPECT_EXIT(
      {
        void* pointer;
        _exit(cudaMalloc(&pointer, 10) == cudaErrorInitializationError ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST_F(CudartTest, WhatIsNotSimulatedIsNamed) {
  // Linked with the real library's names, found in this one.
  EXPECT_DEATH(
      {
        void* pointer;
        cudaMallocManaged(&pointer, 10, cudaMemAttachGlobal);
      },
      "cudaMallocManaged is not simulated");
}

}  // namespace
}  // namespace gpu_sim

int main(int argc, char** argv) {
  using namespace gpu_sim;  // NOLINT
  if (argc == 2) {
    const std::string part = argv[1];
    if (part == std::string(kChild) + "importer") return Importer();
    if (part == std::string(kChild) + "peer_importer") return PeerImporter();
    if (part == std::string(kChild) + "exporter") return Exporter();
    if (part == std::string(kChild) + "wild") return Wild();
    if (part == std::string(kChild) + "leaker") return Leaker();
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
