// The replacement of libcudart.so.13: see protocol.h for what stands behind it.
//
// Every function that the real library exports and that is not here aborts the
// program with its name (stubs.sh).
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/gpu/sim/context.h"
#include "tests/gpu/sim/fat_binary.h"
#include "tests/gpu/sim/faults.h"
#include "tests/gpu/sim/machine.h"
#include "tests/gpu/sim/modules.h"
#include "tests/gpu/sim/twin.h"

#define GPU_SIM_API extern "C" __attribute__((visibility("default")))

namespace gpu_sim {
namespace {

constexpr int kRuntimeVersion = CUDART_VERSION;

struct Process {
  std::mutex mutex;
  pid_t pid = 0;
  Context* contexts[kMaxDevices] = {};
  std::set<const void*> streams, events;
  std::map<uint64_t, uint64_t> pinned;  // allocated or registered
  std::set<uint64_t> registered;        // the latter
  std::map<const void*, std::string> kernels;
};

Process& Here() {
  static Process* const process = new Process;
  return *process;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
// What the driver's functions work on: of the device for which this thread
// called the runtime last.
thread_local Context* bound_context = nullptr;

cudaError_t Record(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

bool OldDriver() {
  const int64_t version = EnvNumber("GPU_SIM_DRIVER_VERSION", kRuntimeVersion);
  return version / 1000 < kRuntimeVersion / 1000;
}

}  // namespace

cudaError_t Enter(const char* name, Fault* fault) {
  if (!UsableProcess()) return cudaErrorInitializationError;
  if (OldDriver()) return cudaErrorInsufficientDriver;
  const Fault planted = Planted(name);
  if (fault != nullptr) *fault = planted;
  if (planted.sticky != 0) {
    cudaError_t error;
    if (Context* context = CurrentContext(&error))
      context->Call(Op::kFault, {static_cast<uint64_t>(planted.sticky)});
    return static_cast<cudaError_t>(planted.sticky);
  }
  if (planted.error != 0) return static_cast<cudaError_t>(planted.error);
  if (Devices().empty()) return cudaErrorNoDevice;
  return cudaSuccess;
}

namespace {

#define ENTER(name) \
  if (const cudaError_t entered = Enter(#name)) return Record(entered)

#define CONTEXT(context)                                   \
  cudaError_t context_error;                               \
  Context* const context = CurrentContext(&context_error); \
  if (context == nullptr) return Record(context_error);    \
  if (const cudaError_t lost = context->fault()) return Record(lost)

std::string Hex(uint64_t value) {
  char text[32];
  snprintf(text, sizeof(text), "%#llx", static_cast<unsigned long long>(value));
  return text;
}

bool IsDeviceAddress(const void* pointer) {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  return address >= kFirstAddress && address < kLastAddress;
}

bool IsPinned(const void* pointer, size_t bytes) {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  std::lock_guard<std::mutex> lock(Here().mutex);
  auto at = Here().pinned.upper_bound(address);
  if (at == Here().pinned.begin()) return false;
  --at;
  return address + bytes <= at->first + at->second;
}

Context* ContextOf(uint64_t address) {
  std::lock_guard<std::mutex> lock(Here().mutex);
  for (Context* context : Here().contexts) {
    if (context != nullptr && context->owns(address)) return context;
  }
  return nullptr;
}

// Whether the GPU `ordinal` of this process reads memory of `other`.
bool PeerAccess(int ordinal, int other) {
  return ordinal != other && !Devices()[ordinal].mig && !Devices()[other].mig &&
         !Planted("peerAccess").no;
}

// Whether it is open in `context` and lies on another GPU.
bool OfPeer(Context* context, const void* pointer) {
  Range range;
  return context->FindRange(reinterpret_cast<uint64_t>(pointer), &range) &&
         range.home != context->ordinal();
}

// Whether device memory at `pointer` is `context`'s to touch.
bool CheckDevice(const void* pointer, Context* context, const char* call) {
  Context* const owner = ContextOf(reinterpret_cast<uint64_t>(pointer));
  if (owner == context) return true;
  Finding(std::string(call) + ": the address " +
          Hex(reinterpret_cast<uint64_t>(pointer)) +
          (owner != nullptr ? " is of another device than the stream"
                            : " is a device address of another process"));
  return false;
}

// One or several copies on a stream; `pageable` where the host must wait.
cudaError_t Copies(std::vector<CopyItem> items, cudaMemcpyKind kind,
                   cudaStream_t stream, const char* call, bool host_waits,
                   bool stall = false) {
  Context* context;
  int slot;
  if (!ResolveStream(stream, call, &context, &slot))
    return cudaErrorInvalidResourceHandle;
  if (const cudaError_t lost = context->fault()) return lost;
  bool wait = false;
  for (CopyItem& item : items) {
    const void* dst = reinterpret_cast<const void*>(item.dst);
    const void* src = reinterpret_cast<const void*>(item.src);
    item.dst_device = IsDeviceAddress(dst);
    item.src_device = IsDeviceAddress(src);
    const bool fits = kind == cudaMemcpyDefault ||
                      (kind == cudaMemcpyHostToDevice && item.dst_device &&
                       !item.src_device) ||
                      (kind == cudaMemcpyDeviceToHost && !item.dst_device &&
                       item.src_device) ||
                      (kind == cudaMemcpyDeviceToDevice && item.dst_device &&
                       item.src_device);
    if (!fits || (!item.dst_device && !item.src_device)) {
      Finding(std::string(call) + ": the addresses do not fit the direction");
      return cudaErrorInvalidMemcpyDirection;
    }
    if ((item.dst_device && !CheckDevice(dst, context, call)) ||
        (item.src_device && !CheckDevice(src, context, call)))
      return cudaErrorInvalidValue;
    Planted(!item.dst_device                               ? "copyToHost"
            : !item.src_device                             ? "copyToDevice"
            : OfPeer(context, src) || OfPeer(context, dst) ? "copyBetween"
                                                           : "copyWithin",
            std::string(call) + " " + std::to_string(item.bytes));
    if (!item.dst_device && (host_waits || !IsPinned(dst, item.bytes)))
      wait = true;
    if (!item.src_device && (host_waits || !IsPinned(src, item.bytes)))
      wait = true;
  }
  for (const CopyItem& item : items) {
    if (item.dst_device == item.src_device) continue;
    // Only ever noted.
    Planted(item.dst_device ? "hostToDevice" : "deviceToHost",
            std::to_string(item.bytes));
  }
  if (stall) {
    context->submitted[slot] =
        context->Call(Op::kStall, {static_cast<uint64_t>(slot)}).arg[0];
  }
  constexpr size_t kMost = kMaxPayload / sizeof(CopyItem);
  for (size_t at = 0; at < items.size(); at += kMost) {
    const size_t count = std::min(kMost, items.size() - at);
    const Reply reply = context->Call(Op::kCopy, {static_cast<uint64_t>(slot)},
                                      &items[at], count * sizeof(CopyItem));
    if (reply.error != 0) return static_cast<cudaError_t>(reply.error);
    context->submitted[slot] = reply.arg[0];
  }
  return wait ? context->WaitStream(slot) : cudaSuccess;
}

cudaError_t Memset(void* pointer, int value, size_t bytes, cudaStream_t stream,
                   const char* call) {
  Context* context;
  int slot;
  if (!ResolveStream(stream, call, &context, &slot))
    return cudaErrorInvalidResourceHandle;
  if (!CheckDevice(pointer, context, call)) return cudaErrorInvalidValue;
  const Reply reply = context->Call(
      Op::kMemset,
      {static_cast<uint64_t>(slot), reinterpret_cast<uint64_t>(pointer),
       static_cast<uint64_t>(static_cast<unsigned char>(value)), bytes});
  if (reply.error == 0) context->submitted[slot] = reply.arg[0];
  return static_cast<cudaError_t>(reply.error);
}

SimEvent* ResolveEvent(cudaEvent_t event, const char* call) {
  {
    std::lock_guard<std::mutex> lock(Here().mutex);
    if (Here().events.count(event) > 0)
      return reinterpret_cast<SimEvent*>(event);
  }
  Finding(std::string(call) + ": an event that is not (or no longer) there");
  return nullptr;
}

struct FatBinaryWrapper {
  uint32_t magic, version;
  const unsigned char* data;
  void* unused;
};

struct CallConfiguration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<CallConfiguration> configurations;

cudaError_t Launch(const void* function, dim3 grid, dim3 block, void** args,
                   size_t shared, cudaStream_t stream) {
  Fault fault;
  if (const cudaError_t error = Enter("cudaLaunchKernel", &fault))
    return Record(error);
  std::string name;
  {
    std::lock_guard<std::mutex> lock(Here().mutex);
    const auto at = Here().kernels.find(function);
    if (at == Here().kernels.end())
      return Record(cudaErrorInvalidDeviceFunction);
    name = at->second;
  }
  if (name.empty()) return Record(cudaErrorNoKernelImageForDevice);
  CONTEXT(current);
  return Record(
      LaunchTwin(current, name, grid, block, args, shared, stream, fault));
}

// The process ends in good order: what it has left is leaked.
__attribute__((destructor)) void Goodbye() {
  if (Here().pid != getpid()) return;
  bool lost = false;
  for (Context* context : Here().contexts) {
    if (context == nullptr) continue;
    lost |= context->fault() != cudaSuccess;
    context->Goodbye();
  }
  // Nothing can be given back to a context that is lost.
  if (lost) return;
  if (!Here().registered.empty()) {
    Finding("leak: " + std::to_string(Here().registered.size()) +
            " ranges of host memory are still registered");
  }
  if (Here().pinned.size() > Here().registered.size())
    Finding("leak: pinned host memory was not freed");
  if (const size_t modules = LoadedModules()) {
    Finding("leak: " + std::to_string(modules) + " modules were not unloaded");
  }
}

}  // namespace

const TwinEntry* Twin(const std::string& name) {
  static const bool loaded = [] {
    // Twins find RegisterTwin in this library, also where the program has it
    // for itself alone (dlopen).
    Dl_info here;
    if (dladdr(reinterpret_cast<const void*>(&RegisterTwin), &here) == 0 ||
        dlopen(here.dli_fname, RTLD_NOLOAD | RTLD_NOW | RTLD_GLOBAL) == nullptr)
      Die("the simulated cudart does not find itself");
    for (const std::string& path : TwinLibraries()) {
      if (dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr)
        Die(std::string("GPU_SIM_KERNELS: ") + dlerror());
    }
    return true;
  }();
  (void)loaded;
  const TwinEntry* twin = FindTwin(name);
  if (twin == nullptr) {
    Die("no host twin of the kernel " + name +
        " in the libraries of GPU_SIM_KERNELS");
  }
  return twin;
}

cudaError_t LaunchTwin(Context* current, const std::string& name, dim3 grid,
                       dim3 block, void** args, size_t shared,
                       cudaStream_t stream, const Fault& fault) {
  Context* context;
  int slot;
  if (!ResolveStream(stream, "a kernel launch", &context, &slot))
    return cudaErrorInvalidResourceHandle;
  if (context != current) {
    Finding("a kernel is launched on a stream of a device that is not current");
    return cudaErrorInvalidResourceHandle;
  }
  if (fault.stall) {
    context->submitted[slot] =
        context->Call(Op::kStall, {static_cast<uint64_t>(slot)}).arg[0];
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 ||
      block.y == 0 || block.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 ||
      grid.z > 65535 || uint64_t{block.x} * block.y * block.z > 1024 ||
      shared > (48 << 10))
    return cudaErrorInvalidConfiguration;
  const TwinEntry* twin = Twin(name);
  LaunchHeader header = {};
  const uint32_t dims[6] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
  memcpy(header.grid, dims, sizeof(dims));
  header.argument_count = twin->argument_count;
  header.name_bytes = name.size();
  std::string payload = name;
  for (int i = 0; i < twin->argument_count; ++i) {
    header.argument_bytes[i] = twin->argument_bytes[i];
    payload.append(static_cast<const char*>(args[i]), twin->argument_bytes[i]);
  }
  payload.insert(0, reinterpret_cast<const char*>(&header), sizeof(header));
  const Reply reply = context->Call(Op::kLaunch, {static_cast<uint64_t>(slot)},
                                    payload.data(), payload.size());
  if (reply.error == 0) context->submitted[slot] = reply.arg[0];
  return static_cast<cudaError_t>(reply.error);
}

bool UsableProcess() {
  static const pid_t first = getpid();
  return Here().pid == 0 || first == getpid();
}

Context* CurrentContext(cudaError_t* error) {
  if (current_device >= static_cast<int>(Devices().size())) {
    *error = Devices().empty() ? cudaErrorNoDevice : cudaErrorInvalidDevice;
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(Here().mutex);
  Context*& context = Here().contexts[current_device];
  if (context == nullptr) {
    Here().pid = getpid();
    context = new Context(current_device);
  }
  *error = cudaSuccess;
  bound_context = context;
  return context;
}

Context* BoundContext() { return bound_context; }

bool ResolveStream(cudaStream_t stream, const char* call, Context** context,
                   int* slot) {
  if (stream == nullptr || stream == cudaStreamLegacy) {
    cudaError_t error;
    *context = CurrentContext(&error);
    *slot = 0;
    return *context != nullptr;
  }
  if (stream == cudaStreamPerThread)
    Die("cudaStreamPerThread is not simulated");
  std::lock_guard<std::mutex> lock(Here().mutex);
  if (Here().streams.count(stream) == 0) {
    Finding(std::string(call) + ": a stream that is not (or no longer) there");
    return false;
  }
  const auto* found = reinterpret_cast<const SimStream*>(stream);
  *context = found->context;
  *slot = found->slot;
  return true;
}

}  // namespace gpu_sim

using namespace gpu_sim;  // NOLINT: everything below is of CUDA's names

GPU_SIM_API void gpu_sim_not_simulated(const char* name) {
  Die(std::string(name) + " is not simulated");
}

// ---- Devices and errors ----

GPU_SIM_API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
GPU_SIM_API cudaError_t cudaPeekAtLastError() { return last_error; }

GPU_SIM_API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define NAME(name) \
  case name:       \
    return #name
    NAME(cudaSuccess);
    NAME(cudaErrorInvalidValue);
    NAME(cudaErrorMemoryAllocation);
    NAME(cudaErrorInitializationError);
    NAME(cudaErrorInvalidConfiguration);
    NAME(cudaErrorInvalidMemcpyDirection);
    NAME(cudaErrorInsufficientDriver);
    NAME(cudaErrorInvalidDeviceFunction);
    NAME(cudaErrorNoDevice);
    NAME(cudaErrorInvalidDevice);
    NAME(cudaErrorDeviceUninitialized);
    NAME(cudaErrorMapBufferObjectFailed);
    NAME(cudaErrorPeerAccessUnsupported);
    NAME(cudaErrorNoKernelImageForDevice);
    NAME(cudaErrorInvalidKernelImage);
    NAME(cudaErrorInvalidPtx);
    NAME(cudaErrorUnsupportedPtxVersion);
    NAME(cudaErrorSymbolNotFound);
    NAME(cudaErrorECCUncorrectable);
    NAME(cudaErrorInvalidResourceHandle);
    NAME(cudaErrorNotReady);
    NAME(cudaErrorIllegalAddress);
    NAME(cudaErrorHostMemoryAlreadyRegistered);
    NAME(cudaErrorHostMemoryNotRegistered);
    NAME(cudaErrorLaunchFailure);
    NAME(cudaErrorUnknown);
#undef NAME
    default:
      return "unrecognized error code";
  }
}
GPU_SIM_API const char* cudaGetErrorString(cudaError_t error) {
  return cudaGetErrorName(error);
}

GPU_SIM_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kRuntimeVersion;
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaDriverGetVersion(int* version) {
  *version =
      static_cast<int>(EnvNumber("GPU_SIM_DRIVER_VERSION", kRuntimeVersion));
  return cudaSuccess;
}

GPU_SIM_API cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  ENTER(cudaGetDeviceCount);
  *count = static_cast<int>(Devices().size());
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaSetDevice(int device) {
  ENTER(cudaSetDevice);
  if (device < 0 || device >= static_cast<int>(Devices().size()))
    return Record(cudaErrorInvalidDevice);
  current_device = device;
  CONTEXT(context);
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaGetDevice(int* device) {
  ENTER(cudaGetDevice);
  *device = current_device;
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaDeviceSynchronize() {
  ENTER(cudaDeviceSynchronize);
  CONTEXT(context);
  return Record(context->WaitAll());
}

GPU_SIM_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties,
                                                int device) {
  ENTER(cudaGetDeviceProperties);
  if (device < 0 || device >= static_cast<int>(Devices().size()))
    return Record(cudaErrorInvalidDevice);
  const Device& found = Devices()[device];
  memset(properties, 0, sizeof(*properties));
  snprintf(properties->name, sizeof(properties->name), "Simulated GPU%s",
           found.mig ? " MIG 1g.10gb" : "");
  memcpy(properties->uuid.bytes, found.uuid, 16);
  // A MIG instance has a UUID of its own.
  if (found.mig) properties->uuid.bytes[15] ^= 0x55;
  properties->totalGlobalMem = found.memory_bytes;
  properties->major = static_cast<int>(EnvNumber("GPU_SIM_CC", 90) / 10);
  properties->minor = static_cast<int>(EnvNumber("GPU_SIM_CC", 90) % 10);
  properties->multiProcessorCount = 4;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->asyncEngineCount = 3;
  properties->unifiedAddressing = 1;
  properties->pciBusID = 16 + found.index;
  return cudaSuccess;
}

GPU_SIM_API cudaError_t cudaDeviceCanAccessPeer(int* can, int device,
                                                int peer) {
  ENTER(cudaDeviceCanAccessPeer);
  const int count = static_cast<int>(Devices().size());
  if (device < 0 || device >= count || peer < 0 || peer >= count)
    return Record(cudaErrorInvalidDevice);
  *can = PeerAccess(device, peer) ? 1 : 0;
  return cudaSuccess;
}

GPU_SIM_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attr,
                                               int device) {
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device))
    return error;
  switch (attr) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      return cudaSuccess;
    case cudaDevAttrAsyncEngineCount:
      *value = properties.asyncEngineCount;
      return cudaSuccess;
    default:
      Die("cudaDeviceGetAttribute " + std::to_string(attr) +
          " is not simulated");
  }
}

// ---- Memory ----

GPU_SIM_API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  Fault fault;
  if (const cudaError_t error = Enter("cudaMalloc", &fault))
    return Record(error);
  CONTEXT(context);
  if (bytes == 0) {
    *pointer = nullptr;
    return cudaSuccess;
  }
  const Reply reply = context->Call(
      Op::kMalloc, {bytes, static_cast<uint64_t>(fault.unexportable)});
  if (reply.error != 0) return Record(static_cast<cudaError_t>(reply.error));
  Range range;
  range.address = reply.arg[0];
  range.bytes = bytes;
  range.room = reply.arg[2];
  range.exportable = !fault.unexportable;
  range.home = context->ordinal();
  context->AddRange(range);
  *pointer = reinterpret_cast<void*>(range.address);
  return cudaSuccess;
}

namespace {

// Free and close wait for all work of the device.
cudaError_t GiveBack(Context* context, Op op, uint64_t address) {
  while (true) {
    if (const cudaError_t error = context->WaitAll()) return error;
    const Reply reply = context->Call(op, {address});
    if (reply.error == -1) continue;
    if (reply.error == 0 && reply.arg[0] == 0) context->RemoveRange(address);
    return static_cast<cudaError_t>(reply.error);
  }
}

}  // namespace

GPU_SIM_API cudaError_t cudaFree(void* pointer) {
  ENTER(cudaFree);
  if (pointer == nullptr) return cudaSuccess;
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  Context* const context = ContextOf(address);
  if (context == nullptr) {
    Finding("cudaFree of the address " + Hex(address) +
            ", which is not of this process");
    return Record(cudaErrorInvalidValue);
  }
  if (const cudaError_t lost = context->fault()) return Record(lost);
  return Record(GiveBack(context, Op::kFree, address));
}

GPU_SIM_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ENTER(cudaMemGetInfo);
  CONTEXT(context);
  const Reply reply = context->Call(Op::kMemInfo, {});
  *free = reply.arg[0];
  *total = reply.arg[1];
  return Record(static_cast<cudaError_t>(reply.error));
}

GPU_SIM_API cudaError_t cudaHostAlloc(void** pointer, size_t bytes,
                                      unsigned int) {
  ENTER(cudaHostAlloc);
  CONTEXT(context);
  void* const map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return Record(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> lock(Here().mutex);
  Here().pinned[reinterpret_cast<uint64_t>(map)] = bytes;
  *pointer = map;
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return cudaHostAlloc(pointer, bytes, 0);
}
GPU_SIM_API cudaError_t cudaFreeHost(void* pointer) {
  ENTER(cudaFreeHost);
  if (pointer == nullptr) return cudaSuccess;
  for (Context* context : Here().contexts) {
    if (context != nullptr) context->WaitAll();
  }
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  std::lock_guard<std::mutex> lock(Here().mutex);
  const auto at = Here().pinned.find(address);
  if (at == Here().pinned.end() || Here().registered.count(address) > 0) {
    Finding("cudaFreeHost of what cudaHostAlloc did not give");
    return Record(cudaErrorInvalidValue);
  }
  munmap(pointer, at->second);
  Here().pinned.erase(at);
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaHostRegister(void* pointer, size_t bytes,
                                         unsigned int) {
  ENTER(cudaHostRegister);
  CONTEXT(context);
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  std::lock_guard<std::mutex> lock(Here().mutex);
  const auto next = Here().pinned.lower_bound(address);
  if (next != Here().pinned.end() && next->first < address + bytes)
    return Record(cudaErrorHostMemoryAlreadyRegistered);
  if (next != Here().pinned.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second > address)
      return Record(cudaErrorHostMemoryAlreadyRegistered);
  }
  // Pinning touches every page: memory that is not there is noticed here.
  std::vector<unsigned char> resident((bytes + 4095) / 4096 + 1);
  const uint64_t page = address / 4096 * 4096;
  if (mincore(reinterpret_cast<void*>(page), address + bytes - page,
              resident.data()) != 0)
    return Record(cudaErrorInvalidValue);
  Here().pinned[address] = bytes;
  Here().registered.insert(address);
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaHostUnregister(void* pointer) {
  ENTER(cudaHostUnregister);
  for (Context* context : Here().contexts) {
    if (context != nullptr) context->WaitAll();
  }
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  std::lock_guard<std::mutex> lock(Here().mutex);
  if (Here().registered.erase(address) == 0)
    return Record(cudaErrorHostMemoryNotRegistered);
  Here().pinned.erase(address);
  return cudaSuccess;
}

GPU_SIM_API cudaError_t cudaPointerGetAttributes(
    cudaPointerAttributes* attributes, const void* pointer) {
  ENTER(cudaPointerGetAttributes);
  memset(attributes, 0, sizeof(*attributes));
  attributes->device = -1;
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  Range range;
  Context* const context = ContextOf(address);
  if (context != nullptr && context->FindRange(address, &range)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = range.home;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (IsPinned(pointer, 1)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->hostPointer = const_cast<void*>(pointer);
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
  }
  return cudaSuccess;
}

// ---- Copies ----

GPU_SIM_API cudaError_t cudaMemcpyAsync(void* dst, const void* src,
                                        size_t bytes, cudaMemcpyKind kind,
                                        cudaStream_t stream) {
  Fault fault;
  if (const cudaError_t error = Enter("cudaMemcpyAsync", &fault))
    return Record(error);
  if (bytes == 0) return cudaSuccess;
  return Record(Copies({{reinterpret_cast<uint64_t>(dst),
                         reinterpret_cast<uint64_t>(src), bytes, 0, 0}},
                       kind, stream, "cudaMemcpyAsync", false, fault.stall));
}
GPU_SIM_API cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes,
                                   cudaMemcpyKind kind) {
  ENTER(cudaMemcpy);
  if (bytes == 0) return cudaSuccess;
  return Record(Copies({{reinterpret_cast<uint64_t>(dst),
                         reinterpret_cast<uint64_t>(src), bytes, 0, 0}},
                       kind, nullptr, "cudaMemcpy", true));
}
GPU_SIM_API cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch,
                                          const void* src, size_t src_pitch,
                                          size_t width, size_t height,
                                          cudaMemcpyKind kind,
                                          cudaStream_t stream) {
  ENTER(cudaMemcpy2DAsync);
  if (width > dst_pitch || width > src_pitch)
    return Record(cudaErrorInvalidValue);
  std::vector<CopyItem> items;
  for (size_t row = 0; row < height; ++row) {
    items.push_back({reinterpret_cast<uint64_t>(dst) + row * dst_pitch,
                     reinterpret_cast<uint64_t>(src) + row * src_pitch, width,
                     0, 0});
  }
  if (width == 0) return cudaSuccess;
  return Record(
      Copies(std::move(items), kind, stream, "cudaMemcpy2DAsync", false));
}
GPU_SIM_API cudaError_t cudaMemcpyBatchAsync(
    void* const* dsts, const void* const* srcs, const size_t* sizes,
    size_t count, cudaMemcpyAttributes* attributes, size_t* attribute_indices,
    size_t attribute_count, cudaStream_t stream) {
  ENTER(cudaMemcpyBatchAsync);
  if (stream == nullptr || stream == cudaStreamLegacy) {
    Finding("cudaMemcpyBatchAsync on the NULL stream");
    return Record(cudaErrorInvalidValue);
  }
  if (count == 0 || attribute_count == 0 || attribute_indices[0] != 0 ||
      attribute_count > count)
    return Record(cudaErrorInvalidValue);
  for (size_t i = 0; i < attribute_count; ++i) {
    if (attributes[i].srcAccessOrder == cudaMemcpySrcAccessOrderInvalid)
      return Record(cudaErrorInvalidValue);
  }
  std::vector<CopyItem> items;
  for (size_t i = 0; i < count; ++i) {
    if (sizes[i] == 0) return Record(cudaErrorInvalidValue);
    items.push_back({reinterpret_cast<uint64_t>(dsts[i]),
                     reinterpret_cast<uint64_t>(srcs[i]), sizes[i], 0, 0});
  }
  return Record(Copies(std::move(items), cudaMemcpyDefault, stream,
                       "cudaMemcpyBatchAsync", false));
}
GPU_SIM_API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes,
                                        cudaStream_t stream) {
  ENTER(cudaMemsetAsync);
  if (bytes == 0) return cudaSuccess;
  return Record(Memset(pointer, value, bytes, stream, "cudaMemsetAsync"));
}
GPU_SIM_API cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  ENTER(cudaMemset);
  if (bytes == 0) return cudaSuccess;
  // Of device memory: the host does not wait, as with the real one.
  return Record(Memset(pointer, value, bytes, nullptr, "cudaMemset"));
}

// ---- IPC ----

GPU_SIM_API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle,
                                            void* pointer) {
  ENTER(cudaIpcGetMemHandle);
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  Context* const context = ContextOf(address);
  Range range;
  if (context == nullptr || !context->FindRange(address, &range))
    return Record(cudaErrorInvalidValue);
  if (const cudaError_t lost = context->fault()) return Record(lost);
  std::string bytes;
  const Reply reply =
      context->Call(Op::kIpcGet, {range.address}, nullptr, 0, &bytes);
  if (reply.error != 0) return Record(static_cast<cudaError_t>(reply.error));
  memcpy(handle, bytes.data(), sizeof(*handle));
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaIpcOpenMemHandle(void** pointer,
                                             cudaIpcMemHandle_t handle,
                                             unsigned int flags) {
  ENTER(cudaIpcOpenMemHandle);
  CONTEXT(context);
  if (flags != cudaIpcMemLazyEnablePeerAccess)
    return Record(cudaErrorInvalidValue);
  uint64_t visible = 0, peers = 0;
  for (size_t i = 0; i < Devices().size(); ++i) {
    const uint64_t bit = uint64_t{1} << Devices()[i].index;
    visible |= bit;
    if (PeerAccess(context->ordinal(), static_cast<int>(i))) peers |= bit;
  }
  const Reply reply =
      context->Call(Op::kIpcOpen, {visible, peers}, &handle, sizeof(handle));
  if (reply.error != 0) return Record(static_cast<cudaError_t>(reply.error));
  Range range;
  if (!context->FindRange(reply.arg[0], &range)) {
    range.address = reply.arg[0];
    range.bytes = reply.arg[1];
    range.room = reply.arg[3];
    range.imported = true;
    for (size_t i = 0; i < Devices().size(); ++i) {
      if (Devices()[i].index == static_cast<int>(reply.arg[4]))
        range.home = static_cast<int>(i);
    }
    context->AddRange(range);
  }
  *pointer = reinterpret_cast<void*>(reply.arg[0]);
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  ENTER(cudaIpcCloseMemHandle);
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  Context* const context = ContextOf(address);
  if (context == nullptr) {
    Finding("cudaIpcCloseMemHandle of an address that is not of this process");
    return Record(cudaErrorInvalidValue);
  }
  if (const cudaError_t lost = context->fault()) return Record(lost);
  return Record(GiveBack(context, Op::kIpcClose, address));
}

// ---- Streams and events ----

GPU_SIM_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream,
                                                     unsigned int flags, int) {
  ENTER(cudaStreamCreateWithFlags);
  CONTEXT(context);
  if (flags != cudaStreamNonBlocking) {
    Die("a blocking stream is not simulated: take cudaStreamCreateWithFlags "
        "and cudaStreamNonBlocking");
  }
  const Reply reply = context->Call(Op::kStreamCreate, {});
  if (reply.error != 0) return Record(static_cast<cudaError_t>(reply.error));
  auto* made = new SimStream{context, static_cast<int>(reply.arg[0])};
  context->submitted[made->slot] =
      context->control()->streams[made->slot].load();
  std::lock_guard<std::mutex> lock(Here().mutex);
  Here().streams.insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream,
                                                  unsigned int flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
GPU_SIM_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least,
                                                         int* greatest) {
  ENTER(cudaDeviceGetStreamPriorityRange);
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ENTER(cudaStreamDestroy);
  Context* context;
  int slot;
  if (stream == nullptr ||
      !ResolveStream(stream, "cudaStreamDestroy", &context, &slot))
    return Record(cudaErrorInvalidResourceHandle);
  {
    std::lock_guard<std::mutex> lock(Here().mutex);
    Here().streams.erase(stream);
  }
  // The address may come back for another stream; a use of this one is found
  // only until then.
  delete reinterpret_cast<SimStream*>(stream);
  while (true) {
    if (const cudaError_t error = context->WaitStream(slot))
      return Record(error);
    const Reply reply =
        context->Call(Op::kStreamDestroy, {static_cast<uint64_t>(slot)});
    if (reply.error != -1) return Record(static_cast<cudaError_t>(reply.error));
  }
}
GPU_SIM_API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER(cudaStreamSynchronize);
  Context* context;
  int slot;
  if (!ResolveStream(stream, "cudaStreamSynchronize", &context, &slot))
    return Record(cudaErrorInvalidResourceHandle);
  return Record(context->WaitStream(slot));
}
GPU_SIM_API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ENTER(cudaStreamQuery);
  Context* context;
  int slot;
  if (!ResolveStream(stream, "cudaStreamQuery", &context, &slot))
    return Record(cudaErrorInvalidResourceHandle);
  if (const cudaError_t lost = context->fault()) return Record(lost);
  const uint64_t count = context->submitted[slot];
  if (context->control()->streams[slot] < count) return cudaErrorNotReady;
  context->Observed(slot, count);
  return cudaSuccess;
}

GPU_SIM_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event,
                                                 unsigned int flags) {
  ENTER(cudaEventCreateWithFlags);
  CONTEXT(context);
  const Reply reply = context->Call(Op::kEventCreate, {});
  if (reply.error != 0) return Record(static_cast<cudaError_t>(reply.error));
  auto* made = new SimEvent{context,
                            reply.arg[0],
                            {reply.arg[1]},
                            (flags & cudaEventDisableTiming) == 0};
  std::lock_guard<std::mutex> lock(Here().mutex);
  Here().events.insert(made);
  *event = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
GPU_SIM_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER(cudaEventDestroy);
  SimEvent* const found = ResolveEvent(event, "cudaEventDestroy");
  if (found == nullptr) return Record(cudaErrorInvalidResourceHandle);
  found->context->Call(Op::kEventDestroy, {found->slot});
  std::lock_guard<std::mutex> lock(Here().mutex);
  Here().events.erase(event);
  delete found;
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaEventRecord(cudaEvent_t event,
                                        cudaStream_t stream) {
  ENTER(cudaEventRecord);
  SimEvent* const found = ResolveEvent(event, "cudaEventRecord");
  Context* context;
  int slot;
  if (found == nullptr ||
      !ResolveStream(stream, "cudaEventRecord", &context, &slot))
    return Record(cudaErrorInvalidResourceHandle);
  if (found->context != context) {
    Finding("an event is recorded on a stream of another device");
    return Record(cudaErrorInvalidResourceHandle);
  }
  const Reply reply = context->Call(Op::kEventRecord,
                                    {static_cast<uint64_t>(slot), found->slot});
  if (reply.error == 0) {
    context->submitted[slot] = reply.arg[0];
    found->record = reply.arg[1];
  }
  return Record(static_cast<cudaError_t>(reply.error));
}
GPU_SIM_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream,
                                            cudaEvent_t event, unsigned int) {
  ENTER(cudaStreamWaitEvent);
  SimEvent* const found = ResolveEvent(event, "cudaStreamWaitEvent");
  Context* context;
  int slot;
  if (found == nullptr ||
      !ResolveStream(stream, "cudaStreamWaitEvent", &context, &slot))
    return Record(cudaErrorInvalidResourceHandle);
  if (found->context != context)
    Die("waiting for an event of another device is not simulated");
  const Reply reply = context->Call(
      Op::kEventWait,
      {static_cast<uint64_t>(slot), found->slot, found->record.load()});
  if (reply.error == 0) context->submitted[slot] = reply.arg[0];
  return Record(static_cast<cudaError_t>(reply.error));
}
GPU_SIM_API cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER(cudaEventQuery);
  SimEvent* const found = ResolveEvent(event, "cudaEventQuery");
  if (found == nullptr) return Record(cudaErrorInvalidResourceHandle);
  if (const cudaError_t lost = found->context->fault()) return Record(lost);
  if (found->context->control()->events[found->slot] < found->record)
    return cudaErrorNotReady;
  found->context->Observed(kMaxStreams + found->slot, 0);
  return cudaSuccess;
}
GPU_SIM_API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER(cudaEventSynchronize);
  SimEvent* const found = ResolveEvent(event, "cudaEventSynchronize");
  if (found == nullptr) return Record(cudaErrorInvalidResourceHandle);
  const uint64_t record = found->record;
  const cudaError_t error = found->context->Wait(
      [&] { return found->context->control()->events[found->slot] >= record; });
  if (error == cudaSuccess)
    found->context->Observed(kMaxStreams + found->slot, 0);
  return Record(error);
}
GPU_SIM_API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start,
                                             cudaEvent_t end) {
  ENTER(cudaEventElapsedTime);
  SimEvent* const a = ResolveEvent(start, "cudaEventElapsedTime");
  SimEvent* const b = ResolveEvent(end, "cudaEventElapsedTime");
  if (a == nullptr || b == nullptr || !a->timing || !b->timing)
    return Record(cudaErrorInvalidResourceHandle);
  *ms = 1e-6f *
        static_cast<float>(b->context->control()->event_times[b->slot].load() -
                           a->context->control()->event_times[a->slot].load());
  return cudaSuccess;
}

// ---- Kernels, as nvcc's host code calls them ----

GPU_SIM_API void** __cudaRegisterFatBinary(void* fat_binary) {
  return reinterpret_cast<void**>(fat_binary);
}
GPU_SIM_API void __cudaRegisterFatBinaryEnd(void**) {}
GPU_SIM_API void __cudaUnregisterFatBinary(void**) {}
GPU_SIM_API char __cudaInitModule(void**) { return 0; }
GPU_SIM_API void __cudaRegisterFunction(void** fat_binary,
                                        const char* host_function, char*,
                                        const char* device_name, int, uint3*,
                                        uint3*, dim3*, dim3*, int*) {
  std::lock_guard<std::mutex> lock(Here().mutex);
  const auto* wrapper = static_cast<const FatBinaryWrapper*>(
      static_cast<const void*>(fat_binary));
  const bool runs = wrapper->magic == 0x466243b1 &&
                    IsFatBinary(wrapper->data) && HasCode(wrapper->data);
  Here().kernels[host_function] = runs ? device_name : "";
}
GPU_SIM_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block,
                                                 size_t shared,
                                                 struct CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
GPU_SIM_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block,
                                                   size_t* shared,
                                                   void* stream) {
  if (configurations.empty()) return cudaErrorUnknown;
  const CallConfiguration configuration = configurations.back();
  configurations.pop_back();
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}
GPU_SIM_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel,
                                        const void* host_function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host_function));
  return cudaSuccess;
}
GPU_SIM_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid,
                                           dim3 block, void** args,
                                           size_t shared, cudaStream_t stream) {
  return Launch(reinterpret_cast<const void*>(kernel), grid, block, args,
                shared, stream);
}
GPU_SIM_API cudaError_t cudaLaunchKernel(const void* function, dim3 grid,
                                         dim3 block, void** args, size_t shared,
                                         cudaStream_t stream) {
  return Launch(function, grid, block, args, shared, stream);
}

// ---- The driver's functions, by name ----

namespace {

CUresult MemGetAddressRange(CUdeviceptr* base, size_t* bytes,
                            CUdeviceptr pointer) {
  if (const Fault fault = Planted("cuMemGetAddressRange"); fault.error)
    return static_cast<CUresult>(fault.error);
  Context* const context = ContextOf(pointer);
  Range range;
  if (context == nullptr || !context->FindRange(pointer, &range))
    return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = range.address;
  if (bytes != nullptr) *bytes = range.bytes;
  return CUDA_SUCCESS;
}

CUresult PointerGetAttribute(void* data, CUpointer_attribute attribute,
                             CUdeviceptr pointer) {
  if (const Fault fault = Planted("cuPointerGetAttribute"); fault.error)
    return static_cast<CUresult>(fault.error);
  Context* const context = ContextOf(pointer);
  Range range;
  if (context == nullptr || !context->FindRange(pointer, &range))
    return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *static_cast<unsigned long long*>(data) = range.buffer_id;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *static_cast<int*>(data) = range.exportable && !range.imported;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(data) = range.home;
      return CUDA_SUCCESS;
    default:
      Die("cuPointerGetAttribute " + std::to_string(attribute) +
          " is not simulated");
  }
}

CUresult DeviceGetUuid(CUuuid* uuid, CUdevice device) {
  if (device < 0 || device >= static_cast<int>(Devices().size()))
    return CUDA_ERROR_INVALID_DEVICE;
  memcpy(uuid->bytes, Devices()[device].uuid, 16);
  return CUDA_SUCCESS;
}

}  // namespace

GPU_SIM_API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** function, unsigned int version,
    unsigned long long,  // NOLINT: CUDA's type
    cudaDriverEntryPointQueryResult* result) {
  ENTER(cudaGetDriverEntryPointByVersion);
  const std::string name = symbol;
  *function = nullptr;
  if (name == "cuMemGetAddressRange") {
    *function = reinterpret_cast<void*>(&MemGetAddressRange);
  } else if (name == "cuPointerGetAttribute") {
    *function = reinterpret_cast<void*>(&PointerGetAttribute);
  } else if (name == "cuDeviceGetUuid") {
    // From 11.4 on the UUID of a MIG instance; before, that of its GPU.
    if (version >= 11040) Die("cuDeviceGetUuid_v2 is not simulated");
    *function = reinterpret_cast<void*>(&DeviceGetUuid);
  } else if (void* const of_modules = ModuleFunction(name)) {
    *function = of_modules;
  } else {
    Die("the driver's " + name + " is not simulated");
  }
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
