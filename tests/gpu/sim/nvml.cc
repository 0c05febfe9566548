// libnvidia-ml.so.1 of the simulated machine: what its driver says of memory.
// It needs no context and makes none; nobody but the machine's own state says
// how much is used.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "tests/gpu/sim/faults.h"
#include "tests/gpu/sim/machine.h"
#include "tests/gpu/sim/protocol.h"

namespace gpu_sim {
namespace {

// nvmlReturn_t.
enum : int {
  kNvmlSuccess = 0,
  kNvmlUninitialized = 1,
  kNvmlInvalidArgument = 2,
  kNvmlNotFound = 6,
  kNvmlInsufficientSize = 7,
};

struct NvmlMemory {
  unsigned long long total, free, used;  // NOLINT: NVML's type
};
struct NvmlProcess {
  unsigned int pid;
  unsigned long long used;  // NOLINT: NVML's type
  unsigned int gpu_instance, compute_instance;
};

std::atomic<int> users{0};

int Enter(const char* name) {
  if (const Fault fault = Planted(name); fault.error) return fault.error;
  return users > 0 ? kNvmlSuccess : kNvmlUninitialized;
}

std::string UuidOf(const Device& device) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char hex[3];
    snprintf(hex, sizeof(hex), "%02x", device.uuid[i]);
    text += hex;
  }
  return text;
}

// A handle is a device's index in the machine, and 1.
bool IndexOf(void* device, int* index) {
  *index = static_cast<int>(reinterpret_cast<intptr_t>(device)) - 1;
  return *index >= 0 && *index < EnvNumber("GPU_SIM_DEVICES", 1);
}

}  // namespace
}  // namespace gpu_sim

#define NVML_API extern "C" __attribute__((visibility("default"))) int

NVML_API nvmlInit_v2() {
  using namespace gpu_sim;
  if (const Fault fault = Planted("nvmlInit_v2"); fault.error)
    return fault.error;
  ++users;
  return kNvmlSuccess;
}

NVML_API nvmlShutdown() {
  using namespace gpu_sim;
  if (const int error = Enter("nvmlShutdown")) return error;
  --users;
  return kNvmlSuccess;
}

// Of all GPUs of the machine: NVML knows nothing of CUDA_VISIBLE_DEVICES.
NVML_API nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  using namespace gpu_sim;
  if (const int error = Enter("nvmlDeviceGetHandleByUUID")) return error;
  if (uuid == nullptr || device == nullptr) return kNvmlInvalidArgument;
  for (int i = 0; i < EnvNumber("GPU_SIM_DEVICES", 1); ++i) {
    if (UuidOf(MachineDevice(i)) != uuid) continue;
    *device = reinterpret_cast<void*>(static_cast<intptr_t>(i + 1));
    return kNvmlSuccess;
  }
  return kNvmlNotFound;
}

NVML_API nvmlDeviceGetMemoryInfo(void* device, gpu_sim::NvmlMemory* memory) {
  using namespace gpu_sim;
  if (const int error = Enter("nvmlDeviceGetMemoryInfo")) return error;
  int index;
  if (!IndexOf(device, &index) || memory == nullptr)
    return kNvmlInvalidArgument;
  LockedState state;
  state.Reap();
  memory->total = static_cast<uint64_t>(MachineDevice(index).memory_bytes);
  memory->used = static_cast<uint64_t>(state->used[index]);
  memory->free = memory->total - memory->used;
  return kNvmlSuccess;
}

NVML_API nvmlDeviceGetComputeRunningProcesses_v3(void* device,
                                                 unsigned int* count,
                                                 gpu_sim::NvmlProcess* infos) {
  using namespace gpu_sim;
  if (const int error = Enter("nvmlDeviceGetComputeRunningProcesses_v3"))
    return error;
  int index;
  if (!IndexOf(device, &index) || count == nullptr) return kNvmlInvalidArgument;
  // Who has a context, and what it has allocated. What is only open there
  // counts at who has made it.
  std::map<pid_t, int64_t> used;
  {
    LockedState state;
    state.Reap();
    for (const pid_t client : state->contexts[index]) {
      if (client != 0 && Runs(client)) used[client] += kContextBytes;
    }
    for (const Buffer& buffer : state->buffers) {
      if (buffer.id != 0 && buffer.device == index &&
          used.count(buffer.client) > 0)
        used[buffer.client] += buffer.bytes;
    }
  }
  const unsigned int room = *count;
  *count = static_cast<unsigned int>(used.size());
  if (room < used.size()) return kNvmlInsufficientSize;
  if (infos == nullptr)
    return used.empty() ? kNvmlSuccess : kNvmlInvalidArgument;
  for (const auto& [pid, bytes] : used) {
    infos->pid = static_cast<unsigned int>(pid);
    infos->used = static_cast<uint64_t>(bytes);
    infos->gpu_instance = infos->compute_instance = ~0u;
    ++infos;
  }
  return kNvmlSuccess;
}
