#include "transport/cuda/nvml.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {

// As nvml.h declares them, which comes with a toolkit and not with a driver.
// The versions in the names fix the layouts.
struct Nvml::Calls {
  struct DeviceMemory {
    unsigned long long total, free, used;  // NOLINT: NVML's type
  };
  struct ProcessInfo {  // nvmlProcessInfo_v2_t
    unsigned int pid;
    unsigned long long used;  // NOLINT: NVML's type
    unsigned int gpu_instance, compute_instance;
  };
  static constexpr int kSuccess = 0, kTooShort = 7;

  void* library = nullptr;
  bool started = false;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*handle)(const char* uuid, void** device) = nullptr;
  int (*memory)(void* device, DeviceMemory* memory) = nullptr;
  int (*processes)(void* device, unsigned int* count,
                   ProcessInfo* infos) = nullptr;

  ~Calls() {
    if (started) shutdown();
    if (library != nullptr) dlclose(library);
  }
};

namespace {

absl::Status NvmlError(absl::string_view call, int error) {
  return MakeError(absl::StatusCode::kUnavailable, "NVML_ERROR",
                   absl::StrCat(call, " gives error ", error));
}

}  // namespace

Nvml::Nvml(std::unique_ptr<Calls> calls) : calls_(std::move(calls)) {}
Nvml::~Nvml() = default;

absl::StatusOr<std::unique_ptr<Nvml>> Nvml::Open(const char* library) {
  auto calls = std::make_unique<Calls>();
  calls->library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  bool all = calls->library != nullptr;
  const auto find = [&](const char* name, auto* function) {
    if (!all) return;
    *reinterpret_cast<void**>(function) = dlsym(calls->library, name);
    all = *function != nullptr;
  };
  find("nvmlInit_v2", &calls->init);
  find("nvmlShutdown", &calls->shutdown);
  find("nvmlDeviceGetHandleByUUID", &calls->handle);
  find("nvmlDeviceGetMemoryInfo", &calls->memory);
  find("nvmlDeviceGetComputeRunningProcesses_v3", &calls->processes);
  if (!all) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "NVML_MISSING",
                     absl::StrCat("the loader finds no ", library,
                                  " with what is called, so that nobody says "
                                  "what a context takes"));
  }
  const int error = calls->init();
  if (error != Calls::kSuccess) return NvmlError("nvmlInit_v2", error);
  calls->started = true;
  return std::unique_ptr<Nvml>(new Nvml(std::move(calls)));
}

absl::StatusOr<Nvml::Memory> Nvml::MemoryOf(const std::string& uuid) const {
  void* device = nullptr;
  int error = calls_->handle(uuid.c_str(), &device);
  if (error != Calls::kSuccess)
    return NvmlError("nvmlDeviceGetHandleByUUID", error);
  Calls::DeviceMemory memory = {};
  error = calls_->memory(device, &memory);
  if (error != Calls::kSuccess)
    return NvmlError("nvmlDeviceGetMemoryInfo", error);
  Memory told;
  told.used_bytes = static_cast<int64_t>(memory.used);
  std::vector<Calls::ProcessInfo> infos(64);
  unsigned int count = 0;
  do {
    // More may come between two calls.
    infos.resize(std::max<size_t>(infos.size(), count + 16));
    count = static_cast<unsigned int>(infos.size());
    error = calls_->processes(device, &count, infos.data());
  } while (error == Calls::kTooShort && infos.size() < 4096);
  // That nobody is told of processes is no reason to tell nothing.
  if (error != Calls::kSuccess) return told;
  for (unsigned int i = 0; i < count; ++i) {
    if (static_cast<pid_t>(infos[i].pid) != getpid()) continue;
    // All ones: not known (Windows).
    if (infos[i].used == ~0ULL) continue;
    told.own_bytes =
        told.own_bytes.value_or(0) + static_cast<int64_t>(infos[i].used);
  }
  return told;
}

int64_t ContextBytes(const Nvml::Memory& before, const Nvml::Memory& after) {
  if (!before.own_bytes.has_value() && after.own_bytes.has_value())
    return std::max<int64_t>(0, *after.own_bytes);
  return std::max<int64_t>(0, after.used_bytes - before.used_bytes);
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
