#include "tests/gpu/sim/machine.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

namespace gpu_sim {
namespace {

constexpr uint64_t kReady = 0x6770755f73696d32;  // changes with the layout

MachineState* MapState() {
  const std::string path = Dir() + "/state";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) Die(path + ": " + strerror(errno));
  flock(fd, LOCK_EX);
  struct stat stat;
  if (fstat(fd, &stat) != 0) Die("fstat");
  if (stat.st_size < static_cast<off_t>(sizeof(MachineState)) &&
      ftruncate(fd, sizeof(MachineState)) != 0) {
    Die("ftruncate");
  }
  auto* state = static_cast<MachineState*>(mmap(nullptr, sizeof(MachineState),
                                                PROT_READ | PROT_WRITE,
                                                MAP_SHARED, fd, 0));
  if (state == MAP_FAILED) Die("mmap of the state");
  if (state->ready != kReady) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&state->mutex, &attributes);
    state->next_buffer_id = 1000;
    state->ready = kReady;
  }
  flock(fd, LOCK_UN);
  close(fd);
  return state;
}

MachineState* State() {
  static MachineState* const state = MapState();
  return state;
}

std::vector<int> Indices(const std::string& text) {
  std::vector<int> indices;
  for (size_t at = 0; at < text.size();) {
    size_t end = text.find(',', at);
    if (end == std::string::npos) end = text.size();
    indices.push_back(std::atoi(text.substr(at, end - at).c_str()));
    at = end + 1;
  }
  return indices;
}

}  // namespace

LockedState::LockedState() : state_(State()) {
  if (pthread_mutex_lock(&state_->mutex) == EOWNERDEAD)
    pthread_mutex_consistent(&state_->mutex);
}

LockedState::~LockedState() { pthread_mutex_unlock(&state_->mutex); }

Buffer* LockedState::Find(uint64_t id) {
  for (Buffer& buffer : state_->buffers) {
    if (id != 0 && buffer.id == id) return &buffer;
  }
  return nullptr;
}

void LockedState::Release(Buffer* buffer) {
  state_->used[buffer->device] -= buffer->bytes;
  *buffer = Buffer();
}

void LockedState::Reap() {
  for (Buffer& buffer : state_->buffers) {
    if (buffer.id != 0 && !Alive(buffer.executor)) Release(&buffer);
  }
}

std::string Env(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

int64_t EnvNumber(const char* name, int64_t otherwise) {
  const std::string value = Env(name, "");
  return value.empty() ? otherwise : std::atoll(value.c_str());
}

const std::string& Dir() {
  static const std::string* const dir = [] {
    auto* dir = new std::string(Env("GPU_SIM_DIR", ""));
    if (dir->empty()) {
      fprintf(stderr,
              "gpu_sim: GPU_SIM_DIR is not set: name a folder for the "
              "simulated machine, or take the simulator out of the library "
              "path\n");
      abort();
    }
    mkdir(dir->c_str(), 0700);
    return dir;
  }();
  return *dir;
}

Device MachineDevice(int index) {
  Device device;
  device.index = index;
  for (int i = 0; i < 16; ++i)
    device.uuid[i] = static_cast<unsigned char>(0xa0 + 17 * i + index);
  device.mig = false;
  for (const int mig : Indices(Env("GPU_SIM_MIG", ""))) {
    if (mig == index) device.mig = true;
  }
  device.memory_bytes = EnvNumber("GPU_SIM_MEMORY_MB", 256) << 20;
  return device;
}

const std::vector<Device>& Devices() {
  static const std::vector<Device>* const devices = [] {
    auto* devices = new std::vector<Device>;
    const int count = static_cast<int>(EnvNumber("GPU_SIM_DEVICES", 1));
    if (count < 0 || count > kMaxDevices) Die("GPU_SIM_DEVICES");
    const char* visible = getenv("GPU_SIM_VISIBLE");
    if (visible != nullptr) {
      for (const int index : Indices(visible)) {
        // As CUDA_VISIBLE_DEVICES: the first that is not there ends the list.
        if (index < 0 || index >= count) break;
        devices->push_back(MachineDevice(index));
      }
    } else {
      for (int i = 0; i < count; ++i) devices->push_back(MachineDevice(i));
    }
    return devices;
  }();
  return *devices;
}

void Finding(const std::string& what) {
  const std::string line = what + " (pid " + std::to_string(getpid()) + ")\n";
  const std::string path = Dir() + "/findings";
  const int fd =
      open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd >= 0) {
    (void)!write(fd, line.data(), line.size());
    close(fd);
  }
  fprintf(stderr, "gpu_sim: MISUSE: %s", line.c_str());
}

void Die(const std::string& what) {
  fprintf(stderr, "gpu_sim: %s\n", what.c_str());
  abort();
}

bool Alive(pid_t pid) { return kill(pid, 0) == 0 || errno != ESRCH; }

bool Runs(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  if (!std::getline(file, stat)) return false;
  // "pid (name) state": a name may have anything in it.
  const size_t name = stat.rfind(')');
  return name != std::string::npos && name + 2 < stat.size() &&
         stat[name + 2] != 'Z' && stat[name + 2] != 'X';
}

}  // namespace gpu_sim
