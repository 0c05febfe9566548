// Included before a .cu file that the host compiler turns into host twins: see
// twin.h.
#ifndef WEIGHTSYNC_TESTS_GPU_SIM_TWIN_PRELUDE_H_
#define WEIGHTSYNC_TESTS_GPU_SIM_TWIN_PRELUDE_H_

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "tests/gpu/sim/twin.h"

#define __global__ __attribute__((visibility("default"), noinline, used))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict

namespace gpu_sim {
struct Index {
  uint32_t x, y, z;
};
}  // namespace gpu_sim

static thread_local gpu_sim::Index threadIdx, blockIdx, blockDim, gridDim;

static inline unsigned long long atomicAdd(unsigned long long* to,
                                           unsigned long long value) {
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
static inline unsigned int atomicAdd(unsigned int* to, unsigned int value) {
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
static inline unsigned int atomicMax(unsigned int* to, unsigned int value) {
  unsigned int now = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (now < value &&
         !__atomic_compare_exchange_n(to, &now, value, true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return now;
}

namespace gpu_sim {
// Of each .cu file its own, as threadIdx and the others are: two kernels that
// take the same arguments would share one otherwise, with the indices of one.
namespace {

template <typename... Args>
struct Twin {
  static constexpr uint32_t kBytes[] = {sizeof(Args)..., 0};

  template <size_t... I>
  static void Call(const void* kernel, void** arguments,
                   std::index_sequence<I...>) {
    reinterpret_cast<void (*)(Args...)>(const_cast<void*>(kernel))(
        *static_cast<std::remove_reference_t<Args>*>(arguments[I])...);
  }
  static void Run(const void* kernel, const uint32_t grid[3],
                  const uint32_t block[3], void** arguments) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
      for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
          for (threadIdx.z = 0; threadIdx.z < block[2]; ++threadIdx.z)
            for (threadIdx.y = 0; threadIdx.y < block[1]; ++threadIdx.y)
              for (threadIdx.x = 0; threadIdx.x < block[0]; ++threadIdx.x)
                Call(kernel, arguments, std::index_sequence_for<Args...>());
  }
};

template <typename... Args>
TwinEntry MakeTwin(void (*kernel)(Args...)) {
  return {reinterpret_cast<const void*>(kernel), &Twin<Args...>::Run,
          static_cast<int>(sizeof...(Args)), Twin<Args...>::kBytes};
}

struct TwinRegistrar {
  explicit TwinRegistrar(const TwinEntry& entry) { RegisterTwin(entry); }
};

}  // namespace
}  // namespace gpu_sim

#define GPU_SIM_TWIN_JOIN2(a, b) a##b
#define GPU_SIM_TWIN_JOIN(a, b) GPU_SIM_TWIN_JOIN2(a, b)
#define GPU_SIM_TWIN(...)                                  \
  static const ::gpu_sim::TwinRegistrar GPU_SIM_TWIN_JOIN( \
      gpu_sim_twin_, __COUNTER__)(::gpu_sim::MakeTwin(__VA_ARGS__))

#endif  // WEIGHTSYNC_TESTS_GPU_SIM_TWIN_PRELUDE_H_
