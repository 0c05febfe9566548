#include "transport/cuda/kernel_body.h"
#include "transport/cuda/kernels.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

// Adds a warp's sums before they are added to what all share: on the host,
// where threads come one after another, every thread adds its own.
__device__ inline void AddToShared(uint64_t value, unsigned long long* shared) {
#if defined(__CUDA_ARCH__)
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_down_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 != 0) return;
#endif
  if (value != 0) atomicAdd(shared, static_cast<unsigned long long>(value));
}

}  // namespace

// A block of threads for each unit. Every thread stays to the end.
__global__ void __launch_bounds__(kBlockThreads, 3)
    CopyKernel(const CopyLaunch launch) {
  for (int64_t unit = blockIdx.x; unit < launch.unit_count; unit += gridDim.x) {
    DigestSum sum;
    sum.inner_keys = launch.inner_keys;
    const int64_t frame =
        CopyUnit<false>(launch, unit, threadIdx.x, blockDim.x, &sum);
    if (launch.digests != nullptr) {
      AddToShared(sum.lanes[0], launch.digests + 2 * frame);
      AddToShared(sum.lanes[1], launch.digests + 2 * frame + 1);
    }
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    BlockLargestKernel(const ScaleLaunch launch) {
  for (int64_t unit = blockIdx.x; unit < launch.unit_count; unit += gridDim.x) {
    float* scale;
    uint32_t largest =
        BlockLargest(launch, unit, threadIdx.x, blockDim.x, &scale);
#if defined(__CUDA_ARCH__)
    for (int offset = 16; offset > 0; offset /= 2) {
      const uint32_t other = __shfl_down_sync(0xffffffffu, largest, offset);
      largest = other > largest ? other : largest;
    }
    if (threadIdx.x % 32 != 0) continue;
#endif
    // Magnitudes are in the order of their bits.
    atomicMax(reinterpret_cast<unsigned int*>(scale), largest);
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    BlockScaleKernel(const ScaleLaunch launch) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < launch.unit_count; i += stride) {
    const ScaleUnit unit = launch.units[i];
    const DeviceScale& box = launch.scales[unit.scale];
    float* scale = box.scales + unit.row * box.scale_stride + unit.column;
    *scale = BlockScale(FloatBits(*scale));
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    ScanKernel(const ScanLaunch launch) {
  const int64_t words = (launch.element_count + kScanWord - 1) / kScanWord;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t word = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       word < words; word += stride) {
    const uint64_t changed = ChangedWord(launch, word);
    launch.changed[word] = changed;
    if (changed != 0) {
      atomicAdd(launch.counts + word / (kScanGroup / kScanWord),
                PopCount(changed));
    }
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    CompactKernel(const CompactLaunch launch) {
  const int64_t words = (launch.scan.element_count + kScanWord - 1) / kScanWord;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t word = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       word < words; word += stride) {
    CompactWord(launch, word);
  }
}

#if defined(__CUDACC__)

namespace {

unsigned Blocks(int64_t wanted) {
  return static_cast<unsigned>(wanted < kMaxBlocks ? wanted : kMaxBlocks);
}

unsigned BlocksOfThreads(int64_t threads) {
  return Blocks((threads + kBlockThreads - 1) / kBlockThreads);
}

}  // namespace

int LaunchCopy(const CopyLaunch& launch, void* stream) {
  if (launch.unit_count == 0) return cudaSuccess;
  CopyKernel<<<Blocks(launch.unit_count), kBlockThreads, 0,
               static_cast<cudaStream_t>(stream)>>>(launch);
  return cudaGetLastError();
}

int LaunchBlockLargest(const ScaleLaunch& launch, void* stream) {
  if (launch.unit_count == 0) return cudaSuccess;
  BlockLargestKernel<<<Blocks(launch.unit_count), kBlockThreads, 0,
                       static_cast<cudaStream_t>(stream)>>>(launch);
  return cudaGetLastError();
}

int LaunchBlockScale(const ScaleLaunch& launch, void* stream) {
  if (launch.unit_count == 0) return cudaSuccess;
  BlockScaleKernel<<<BlocksOfThreads(launch.unit_count), kBlockThreads, 0,
                     static_cast<cudaStream_t>(stream)>>>(launch);
  return cudaGetLastError();
}

int LaunchScan(const ScanLaunch& launch, void* stream) {
  if (launch.element_count == 0) return cudaSuccess;
  ScanKernel<<<BlocksOfThreads((launch.element_count + 63) / 64), kBlockThreads,
               0, static_cast<cudaStream_t>(stream)>>>(launch);
  return cudaGetLastError();
}

int LaunchCompact(const CompactLaunch& launch, void* stream) {
  if (launch.scan.element_count == 0) return cudaSuccess;
  CompactKernel<<<BlocksOfThreads((launch.scan.element_count + 63) / 64),
                  kBlockThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      launch);
  return cudaGetLastError();
}

#else

GPU_SIM_TWIN(CopyKernel);
GPU_SIM_TWIN(BlockLargestKernel);
GPU_SIM_TWIN(BlockScaleKernel);
GPU_SIM_TWIN(ScanKernel);
GPU_SIM_TWIN(CompactKernel);

#endif

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
