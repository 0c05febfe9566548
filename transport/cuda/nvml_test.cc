#include "transport/cuda/nvml.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>

#include "transport/cuda/device.h"
#include "transport/cuda/sim_control.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

// Makes no context either.
std::string UuidOf(size_t device) {
  const auto devices = ListDevices();
  EXPECT_TRUE(devices.ok()) << devices.status();
  return devices.ok() ? devices->at(device).uuid : "";
}

TEST(NvmlTest, TellsWhatAContextTakes) {
  const auto nvml = Nvml::Open();
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  const auto before = (*nvml)->MemoryOf(UuidOf(1));
  ASSERT_TRUE(before.ok()) << before.status();
  // Looking makes none.
  EXPECT_FALSE(before->own_bytes.has_value());
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const auto after = (*nvml)->MemoryOf(UuidOf(1));
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(ContextBytes(*before, *after), 8 << 20);
  void* more = nullptr;
  ASSERT_EQ(cudaMalloc(&more, 4 << 20), cudaSuccess);
  const auto with_more = (*nvml)->MemoryOf(UuidOf(1));
  ASSERT_TRUE(with_more.ok());
  EXPECT_EQ(*with_more->own_bytes - *after->own_bytes, 4 << 20);
  EXPECT_EQ(with_more->used_bytes - after->used_bytes, 4 << 20);
  EXPECT_EQ(cudaFree(more), cudaSuccess);
  // Of the other one nothing is taken.
  const auto other = (*nvml)->MemoryOf(UuidOf(0));
  ASSERT_TRUE(other.ok());
  EXPECT_FALSE(other->own_bytes.has_value());
}

TEST(NvmlTest, WhereThisProcessIsNotListedTheWholeGpuSays) {
  Nvml::Memory before, after;
  before.used_bytes = 1000;
  after.used_bytes = 1400;
  EXPECT_EQ(ContextBytes(before, after), 400);
  // Somebody else's pid of another namespace.
  before.own_bytes = 700;
  after.own_bytes = 700;
  EXPECT_EQ(ContextBytes(before, after), 400);
  // Others have freed more than was taken.
  after.used_bytes = 900;
  EXPECT_EQ(ContextBytes(before, after), 0);
  before.own_bytes.reset();
  EXPECT_EQ(ContextBytes(before, after), 700);
}

TEST(NvmlTest, SaysWhatIsMissing) {
  const auto none = Nvml::Open("libnvidia-ml-of-no-driver.so.1");
  EXPECT_EQ(ReasonOf(none.status()), "NVML_MISSING") << none.status();
  // A library that is another one.
  const auto other = Nvml::Open("libm.so.6");
  EXPECT_EQ(ReasonOf(other.status()), "NVML_MISSING") << other.status();
  gpu_sim::Plant("call=nvmlInit_v2 error=9");
  const auto broken = Nvml::Open();
  EXPECT_EQ(ReasonOf(broken.status()), "NVML_ERROR") << broken.status();
  gpu_sim::Plant("");
  const auto nvml = Nvml::Open();
  ASSERT_TRUE(nvml.ok());
  const auto unknown = (*nvml)->MemoryOf("GPU-of-another-machine");
  EXPECT_EQ(ReasonOf(unknown.status()), "NVML_ERROR") << unknown.status();
}

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
