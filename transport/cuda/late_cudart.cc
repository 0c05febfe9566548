#include "transport/cuda/late_cudart.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "absl/base/call_once.h"
#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

void* library = nullptr;

void Open() {
  for (const int mode : {RTLD_NOLOAD | RTLD_LAZY, RTLD_LAZY | RTLD_LOCAL}) {
    for (const char* name :
         {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"}) {
      library = dlopen(name, mode);
      if (library != nullptr) return;
    }
  }
}

void* Symbol(const char* name) {
  return library == nullptr ? nullptr : dlsym(library, name);
}

}  // namespace

absl::Status FindCudart() {
  static absl::once_flag once;
  absl::call_once(once, Open);
  if (library != nullptr) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "CUDA_RUNTIME_MISSING",
      "tensors on a GPU need CUDA's runtime, and the loader finds no "
      "libcudart.so.13, .12 or .11.0: install it, or add its directory to "
      "LD_LIBRARY_PATH (PyTorch brings one)");
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

// What is called of cudart. Declared by its header, and so checked against it.
#define LATE(name, parameters, ...)                                   \
  extern "C" __attribute__((visibility("hidden")))                    \
  cudaError_t name parameters {                                       \
    static const auto function = reinterpret_cast<decltype(&::name)>( \
        weightsync::transport::cuda::Symbol(#name));                  \
    return function == nullptr ? cudaErrorSharedObjectInitFailed      \
                               : function(__VA_ARGS__);               \
  }
#define LATE_NAME(name, otherwise)                                    \
  extern "C" __attribute__((visibility("hidden"))) const char* name(  \
      cudaError_t error) {                                            \
    static const auto function = reinterpret_cast<decltype(&::name)>( \
        weightsync::transport::cuda::Symbol(#name));                  \
    return function == nullptr ? otherwise : function(error);         \
  }

LATE(cudaDeviceCanAccessPeer, (int* can, int device, int peer), can, device,
     peer)
LATE(cudaDeviceSynchronize, (void))
LATE(cudaDriverGetVersion, (int* version), version)
LATE(cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned int flags), event,
     flags)
LATE(cudaEventDestroy, (cudaEvent_t event), event)
LATE(cudaEventQuery, (cudaEvent_t event), event)
LATE(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), event, stream)
LATE(cudaFree, (void* pointer), pointer)
LATE(cudaFreeHost, (void* pointer), pointer)
LATE(cudaGetDevice, (int* device), device)
LATE(cudaGetDeviceCount, (int* count), count)
LATE(cudaGetDeviceProperties, (cudaDeviceProp * properties, int device),
     properties, device)
LATE(cudaGetLastError, (void))
LATE(cudaHostAlloc, (void** pointer, size_t bytes, unsigned int flags), pointer,
     bytes, flags)
LATE(cudaHostRegister, (void* pointer, size_t bytes, unsigned int flags),
     pointer, bytes, flags)
LATE(cudaHostUnregister, (void* pointer), pointer)
LATE(cudaIpcCloseMemHandle, (void* pointer), pointer)
LATE(cudaIpcGetMemHandle, (cudaIpcMemHandle_t * handle, void* pointer), handle,
     pointer)
LATE(cudaIpcOpenMemHandle,
     (void** pointer, cudaIpcMemHandle_t handle, unsigned int flags), pointer,
     handle, flags)
LATE(cudaMalloc, (void** pointer, size_t bytes), pointer, bytes)
LATE(cudaMemcpy,
     (void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind), to,
     from, bytes, kind)
LATE(cudaMemcpy2DAsync,
     (void* to, size_t to_pitch, const void* from, size_t from_pitch,
      size_t width, size_t height, enum cudaMemcpyKind kind,
      cudaStream_t stream),
     to, to_pitch, from, from_pitch, width, height, kind, stream)
LATE(cudaMemcpyAsync,
     (void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind,
      cudaStream_t stream),
     to, from, bytes, kind, stream)
LATE(cudaPointerGetAttributes,
     (cudaPointerAttributes * attributes, const void* pointer), attributes,
     pointer)
LATE(cudaRuntimeGetVersion, (int* version), version)
LATE(cudaSetDevice, (int device), device)
LATE(cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned int flags),
     stream, flags)
LATE(cudaStreamDestroy, (cudaStream_t stream), stream)
LATE(cudaStreamQuery, (cudaStream_t stream), stream)
LATE_NAME(cudaGetErrorName, "cudaErrorSharedObjectInitFailed")
LATE_NAME(cudaGetErrorString, "CUDA's runtime library lacks this function")

// New in 12.5; before, the version was that of the runtime.
extern "C" __attribute__((visibility("hidden"))) cudaError_t
cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                 unsigned int version,
                                 unsigned long long flags,  // NOLINT
                                 cudaDriverEntryPointQueryResult* result) {
  static const auto by_version =
      reinterpret_cast<decltype(&::cudaGetDriverEntryPointByVersion)>(
          weightsync::transport::cuda::Symbol(
              "cudaGetDriverEntryPointByVersion"));
  if (by_version != nullptr)
    return by_version(symbol, function, version, flags, result);
  using Older = cudaError_t (*)(const char*, void**,
                                unsigned long long,  // NOLINT
                                cudaDriverEntryPointQueryResult*);
  static const auto older = reinterpret_cast<Older>(
      weightsync::transport::cuda::Symbol("cudaGetDriverEntryPoint"));
  return older == nullptr ? cudaErrorSharedObjectInitFailed
                          : older(symbol, function, flags, result);
}
