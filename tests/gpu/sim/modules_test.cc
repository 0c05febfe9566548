// Kernels that a program loads by the driver: as strict as a real one.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "transport/cuda/sim_control.h"

// Of test_kernels.cu.
extern "C" const char gpu_sim_test_image[];

namespace gpu_sim {
namespace {

constexpr char kScale[] = "_ZN7gpu_sim5ScaleENS_11ScaleParamsEii";
struct ScaleParams {
  const int32_t* from;
  int32_t* to;
  int64_t count;
};

template <typename Function>
Function* Find(const char* name) {
  void* function = nullptr;
  EXPECT_EQ(cudaGetDriverEntryPointByVersion(name, &function, 12000,
                                             cudaEnableDefault, nullptr),
            cudaSuccess);
  return reinterpret_cast<Function*>(function);
}

struct Driver {
  CUresult (*load)(CUmodule*, const void*) =
      Find<CUresult(CUmodule*, const void*)>("cuModuleLoadData");
  CUresult (*unload)(CUmodule) = Find<CUresult(CUmodule)>("cuModuleUnload");
  CUresult (*get)(CUfunction*, CUmodule, const char*) =
      Find<CUresult(CUfunction*, CUmodule, const char*)>("cuModuleGetFunction");
  CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned,
                     unsigned, unsigned, unsigned, CUstream, void**, void**) =
      Find<CUresult(CUfunction, unsigned, unsigned, unsigned, unsigned,
                    unsigned, unsigned, unsigned, CUstream, void**, void**)>(
          "cuLaunchKernel");

  // Scale on blocks and threads of one dimension.
  CUresult Scale(CUfunction function, unsigned blocks, unsigned threads,
                 ScaleParams params, cudaStream_t stream) const {
    int32_t factor = 3, offset = -2;
    void* arguments[] = {&params, &factor, &offset};
    return launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments,
                  nullptr);
  }
};

class ModulesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Plant("");
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
              cudaSuccess);
    ASSERT_EQ(driver_.load(&module_, gpu_sim_test_image), CUDA_SUCCESS);
    ASSERT_EQ(driver_.get(&scale_, module_, kScale), CUDA_SUCCESS);
  }
  void TearDown() override {
    Plant("");
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    if (module_ != nullptr) {
      EXPECT_EQ(driver_.unload(module_), CUDA_SUCCESS);
    }
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    cudaGetLastError();
  }
  const Driver driver_;
  cudaStream_t stream_ = nullptr;
  CUmodule module_ = nullptr;
  CUfunction scale_ = nullptr;
};

TEST_F(ModulesTest, ALoadedKernelComputes) {
  std::vector<int32_t> values(1000);
  std::iota(values.begin(), values.end(), 1);
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 8000), cudaSuccess);
  auto* const from = static_cast<int32_t*>(memory);
  ASSERT_EQ(cudaMemcpyAsync(from, values.data(), 4000, cudaMemcpyHostToDevice,
                            stream_),
            cudaSuccess);
  ASSERT_EQ(driver_.Scale(scale_, 3, 64, {from, from + 1000, 1000}, stream_),
            CUDA_SUCCESS);
  ASSERT_EQ(cudaMemcpyAsync(values.data(), from + 1000, 4000,
                            cudaMemcpyDeviceToHost, stream_),
            cudaSuccess);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(values[i], 3 * (i + 1) - 2);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

TEST_F(ModulesTest, WhatIsNoFatBinaryIsRefused) {
  CUmodule module = nullptr;
  const std::vector<char> garbage(1000, 'x');
  EXPECT_EQ(driver_.load(&module, garbage.data()), CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(driver_.load(&module, nullptr), CUDA_ERROR_INVALID_VALUE);
  Plant("call=cuModuleLoadData error=222");
  EXPECT_EQ(driver_.load(&module, gpu_sim_test_image),
            CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
}

TEST_F(ModulesTest, KernelsThatAreNotThereAreNotFound) {
  CUfunction function = nullptr;
  EXPECT_EQ(driver_.get(&function, module_, "Scale"), CUDA_ERROR_NOT_FOUND);
  // A twin that is there makes no kernel of the module.
  EXPECT_EQ(driver_.get(&function, module_, "_ZN7gpu_sim5ScaleENS_11Scale"),
            CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(function, nullptr);
}

TEST_F(ModulesTest, ALaunchHasLimitsAndArguments) {
  const ScaleParams nothing = {nullptr, nullptr, 0};
  EXPECT_EQ(driver_.Scale(scale_, 0, 64, nothing, stream_),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver_.Scale(scale_, 1, 1025, nothing, stream_),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver_.Scale(scale_, 1, 1024, nothing, stream_), CUDA_SUCCESS);
  EXPECT_EQ(
      driver_.launch(scale_, 1, 1, 1, 1, 1, 1, 0, stream_, nullptr, nullptr),
      CUDA_ERROR_INVALID_VALUE);
  EXPECT_NE(TakeFindings().find("an argument is missing"), std::string::npos);
}

// A thread that has called nothing of the runtime has no context, and a kernel
// belongs to the one that it was loaded in.
TEST_F(ModulesTest, ContextsAreAsTheyAreCurrent) {
  CUresult result = CUDA_SUCCESS;
  CUmodule module = nullptr;
  std::thread([&] {
    result = driver_.load(&module, gpu_sim_test_image);
  }).join();
  EXPECT_EQ(result, CUDA_ERROR_INVALID_CONTEXT);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(driver_.Scale(scale_, 1, 1, {nullptr, nullptr, 0}, stream_),
            CUDA_ERROR_INVALID_HANDLE);
  EXPECT_NE(TakeFindings().find("not current"), std::string::npos);
}

TEST_F(ModulesTest, WhatWasUnloadedIsGone) {
  ASSERT_EQ(driver_.unload(module_), CUDA_SUCCESS);
  EXPECT_EQ(driver_.Scale(scale_, 1, 1, {nullptr, nullptr, 0}, stream_),
            CUDA_ERROR_INVALID_HANDLE);
  EXPECT_NE(TakeFindings().find("a kernel that is not"), std::string::npos);
  EXPECT_EQ(driver_.unload(module_), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_NE(TakeFindings().find("a module that is not"), std::string::npos);
  module_ = nullptr;
}

// ---- In processes of their own ----

int Leaker() {
  const Driver driver;
  CUmodule module = nullptr;
  return cudaSetDevice(0) != cudaSuccess ||
         driver.load(&module, gpu_sim_test_image) != CUDA_SUCCESS;
}

// Touches memory that is not there.
int Wild() {
  const Driver driver;
  CUmodule module = nullptr;
  CUfunction scale = nullptr;
  if (cudaSetDevice(0) != cudaSuccess ||
      driver.load(&module, gpu_sim_test_image) != CUDA_SUCCESS ||
      driver.get(&scale, module, kScale) != CUDA_SUCCESS)
    return 1;
  auto* const nowhere = reinterpret_cast<int32_t*>(uint64_t{1} << 44);
  if (driver.Scale(scale, 1, 1, {nowhere, nowhere, 1}, nullptr) != CUDA_SUCCESS)
    return 2;
  return cudaDeviceSynchronize() == cudaErrorIllegalAddress ? 0 : 3;
}

// Of a generation that the image has no code for.
int Foreign() {
  const Driver driver;
  CUmodule module = nullptr;
  if (cudaSetDevice(0) != cudaSuccess) return 1;
  return driver.load(&module, gpu_sim_test_image) ==
                 CUDA_ERROR_NO_BINARY_FOR_GPU
             ? 0
             : 2;
}

int RunPart(const std::string& part) {
  const pid_t child = fork();
  if (child == 0) {
    if (part == "--foreign") {
      setenv("GPU_SIM_CC", "110", 1);
      setenv("GPU_SIM_PTX", "0", 1);
    }
    execl("/proc/self/exe", "child", part.c_str(), nullptr);
    _exit(127);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

TEST(ModulesEndTest, AModuleThatIsLeftIsALeak) {
  EXPECT_EQ(RunPart("--leaker"), 0);
  EXPECT_NE(TakeFindings().find("leak: 1 modules"), std::string::npos);
}

TEST(ModulesEndTest, AWildKernelIsFound) {
  EXPECT_EQ(RunPart("--wild"), 0);
  EXPECT_NE(TakeFindings().find("touched the address"), std::string::npos);
}

TEST(ModulesEndTest, CodeForOtherGpusIsRefused) {
  EXPECT_EQ(RunPart("--foreign"), 0);
}

}  // namespace
}  // namespace gpu_sim

int main(int argc, char** argv) {
  using namespace gpu_sim;  // NOLINT
  const std::string part = argc == 2 ? argv[1] : "";
  if (part == "--leaker") return Leaker();
  if (part == "--wild") return Wild();
  if (part == "--foreign") return Foreign();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
