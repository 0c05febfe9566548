// Modules and kernels as the driver has them (cuModuleLoadData and its like),
// and what of the simulated cudart they are made of.
#ifndef WEIGHTSYNC_TESTS_GPU_SIM_MODULES_H_
#define WEIGHTSYNC_TESTS_GPU_SIM_MODULES_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "tests/gpu/sim/context.h"
#include "tests/gpu/sim/faults.h"
#include "tests/gpu/sim/twin.h"

namespace gpu_sim {

// The driver's function of that name, or null: none of modules.
void* ModuleFunction(const std::string& name);
// That were not unloaded.
size_t LoadedModules();

// ---- Of cudart.cc ----

// What comes first in every call: whether there is a device, and what is
// planted for the call.
cudaError_t Enter(const char* name, Fault* fault = nullptr);
// Of this thread; null where it has called nothing yet that makes one current.
Context* BoundContext();
// Dies where there is none: the simulation lacks it.
const TwinEntry* Twin(const std::string& mangled_name);
// Runs the twin on a stream of `current`.
cudaError_t LaunchTwin(Context* current, const std::string& mangled_name,
                       dim3 grid, dim3 block, void** arguments, size_t shared,
                       cudaStream_t stream, const Fault& fault);

}  // namespace gpu_sim

#endif  // WEIGHTSYNC_TESTS_GPU_SIM_MODULES_H_
