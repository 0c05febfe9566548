#include "tests/gpu/sim/modules.h"

#include <cuda.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "tests/gpu/sim/fat_binary.h"

namespace gpu_sim {
namespace {

// Of one context, as real ones are.
struct Module {
  Context* context;
  const unsigned char* image;
  std::map<std::string, struct Kernel*> kernels;
};
struct Kernel {
  Module* module;
  std::string name;
};

struct All {
  std::mutex mutex;
  std::set<const Module*> modules;
  std::set<const Kernel*> kernels;
};
All& Known() {
  static auto* const known = new All;
  return *known;
}

CUresult Driver(cudaError_t error) { return static_cast<CUresult>(error); }

// The current context, where the call may go on.
CUresult Begin(const char* call, Fault* fault, Context** context) {
  if (const cudaError_t error = Enter(call, fault)) return Driver(error);
  *context = BoundContext();
  if (*context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return Driver((*context)->fault());
}

CUresult ModuleLoadData(CUmodule* module, const void* image) {
  Fault fault;
  Context* context;
  if (const CUresult result = Begin("cuModuleLoadData", &fault, &context))
    return result;
  if (module == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto* data = static_cast<const unsigned char*>(image);
  // Cubins and PTX by themselves are taken by real ones, and not simulated.
  if (!IsFatBinary(data)) return CUDA_ERROR_INVALID_IMAGE;
  if (!HasCode(data)) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  auto* const made = new Module{context, data, {}};
  std::lock_guard<std::mutex> lock(Known().mutex);
  Known().modules.insert(made);
  *module = reinterpret_cast<CUmodule>(made);
  return CUDA_SUCCESS;
}

CUresult ModuleGetFunction(CUfunction* function, CUmodule module,
                           const char* name) {
  Fault fault;
  Context* context;
  if (const CUresult result = Begin("cuModuleGetFunction", &fault, &context))
    return result;
  if (function == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto* const found = reinterpret_cast<Module*>(module);
  std::lock_guard<std::mutex> lock(Known().mutex);
  if (Known().modules.count(found) == 0) {
    Finding("cuModuleGetFunction: a module that is not (or no longer) there");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (!HasKernel(found->image, name)) return CUDA_ERROR_NOT_FOUND;
  Twin(name);
  Kernel*& kernel = found->kernels[name];
  if (kernel == nullptr) kernel = new Kernel{found, name};
  Known().kernels.insert(kernel);
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

CUresult ModuleUnload(CUmodule module) {
  Fault fault;
  Context* context;
  if (const CUresult result = Begin("cuModuleUnload", &fault, &context))
    return result;
  auto* const found = reinterpret_cast<Module*>(module);
  {
    std::lock_guard<std::mutex> lock(Known().mutex);
    if (Known().modules.erase(found) == 0) {
      Finding("cuModuleUnload: a module that is not (or no longer) there");
      return CUDA_ERROR_INVALID_HANDLE;
    }
    for (const auto& [name, kernel] : found->kernels)
      Known().kernels.erase(kernel);
  }
  // Its code may be at work.
  const cudaError_t lost = found->context->WaitAll();
  for (const auto& [name, kernel] : found->kernels) delete kernel;
  delete found;
  return Driver(lost);
}

CUresult LaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                      unsigned grid_z, unsigned block_x, unsigned block_y,
                      unsigned block_z, unsigned shared, CUstream stream,
                      void** arguments, void** extra) {
  Fault fault;
  Context* context;
  if (const CUresult result = Begin("cuLaunchKernel", &fault, &context))
    return result;
  if (extra != nullptr) Die("cuLaunchKernel with `extra` is not simulated");
  std::string name;
  {
    std::lock_guard<std::mutex> lock(Known().mutex);
    const auto* const found = reinterpret_cast<const Kernel*>(function);
    if (Known().kernels.count(found) == 0) {
      Finding("cuLaunchKernel: a kernel that is not (or no longer) there");
      return CUDA_ERROR_INVALID_HANDLE;
    }
    if (found->module->context != context) {
      Finding("cuLaunchKernel: a kernel of a device that is not current");
      return CUDA_ERROR_INVALID_HANDLE;
    }
    name = found->name;
  }
  for (int i = 0; i < Twin(name)->argument_count; ++i) {
    if (arguments != nullptr && arguments[i] != nullptr) continue;
    Finding("cuLaunchKernel: an argument is missing");
    return CUDA_ERROR_INVALID_VALUE;
  }
  const cudaError_t error = LaunchTwin(
      context, name, dim3(grid_x, grid_y, grid_z),
      dim3(block_x, block_y, block_z), arguments, shared, stream, fault);
  // The driver has no number of its own for it.
  return error == cudaErrorInvalidConfiguration ? CUDA_ERROR_INVALID_VALUE
                                                : Driver(error);
}

}  // namespace

void* ModuleFunction(const std::string& name) {
  if (name == "cuModuleLoadData")
    return reinterpret_cast<void*>(&ModuleLoadData);
  if (name == "cuModuleGetFunction")
    return reinterpret_cast<void*>(&ModuleGetFunction);
  if (name == "cuModuleUnload") return reinterpret_cast<void*>(&ModuleUnload);
  if (name == "cuLaunchKernel") return reinterpret_cast<void*>(&LaunchKernel);
  return nullptr;
}

size_t LoadedModules() {
  std::lock_guard<std::mutex> lock(Known().mutex);
  return Known().modules.size();
}

}  // namespace gpu_sim
