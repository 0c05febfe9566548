// Host twins: kernels that a simulated GPU runs on the CPU.
//
// A .cu file is compiled twice: by nvcc as always, and by the host compiler
// into a shared library, with this header included first. There `__global__`
// functions are ordinary functions, and the file's GPU_SIM_TWIN(Kernel) lines
// tell how each is called. Nothing in the product knows of it: a simulated
// launch brings the kernel's mangled name, and the twin is found by that.
//
// Threads run one after another, so kernels must be free of barriers.
#ifndef WEIGHTSYNC_TESTS_GPU_SIM_TWIN_H_
#define WEIGHTSYNC_TESTS_GPU_SIM_TWIN_H_

#include <cstdint>
#include <string>
#include <vector>

namespace gpu_sim {

struct TwinEntry {
  const void* kernel;
  void (*run)(const void* kernel, const uint32_t grid[3],
              const uint32_t block[3], void** arguments);
  int argument_count;
  const uint32_t* argument_bytes;
};

// In libgpu_sim_twins.so, which every twin library and everybody who looks for
// twins is linked with.
void RegisterTwin(const TwinEntry& entry);
const TwinEntry* FindTwin(const std::string& mangled_name);
// The paths in GPU_SIM_KERNELS.
std::vector<std::string> TwinLibraries();

}  // namespace gpu_sim

#endif  // WEIGHTSYNC_TESTS_GPU_SIM_TWIN_H_
