// What a simulated machine is, and what its processes share.
//
//   GPU_SIM_DIR             the folder; short, it holds sockets. Required
//   GPU_SIM_DEVICES         how many GPUs (default 1; 0: none)
//   GPU_SIM_MEMORY_MB       memory of each (default 256)
//   GPU_SIM_MIG             device indices that are MIG instances, "0,2"
//   GPU_SIM_VISIBLE         CUDA_VISIBLE_DEVICES of the simulation: device
//                           indices of the machine in this process's order.
//                           Memory of others cannot be opened, as where a
//                           container was not given them (where only the
//                           variable hides them, CUDA opens it)
//   GPU_SIM_DRIVER_VERSION  e.g. 12040: older than the runtime
//   GPU_SIM_NCCL_VERSION    what ncclGetVersion says (default: the headers')
//   GPU_SIM_NCCL_EAGER_BYTES  sends of at most so many bytes end before they
//                           are received (default 0)
//   GPU_SIM_KERNELS         libraries of host twins, separated by ':'
//   GPU_SIM_EXECUTOR        the executor's program (default: beside the
//                           library)
//   GPU_SIM_DELAY_US        before every operation, up to this long (default
//                           50)
//   GPU_SIM_ROLE            the name by which a fault picks this process
//   GPU_SIM_CC              compute capability, 10 x major + minor (default 90)
//   GPU_SIM_PTX             0: only code of that generation runs, and no PTX
//
// $GPU_SIM_DIR/faults says what is to go wrong (faults.h);
// $GPU_SIM_DIR/findings collects misuse, one line each: a test that leaves any
// has failed (run_simulated.sh).
#ifndef WEIGHTSYNC_TESTS_GPU_SIM_MACHINE_H_
#define WEIGHTSYNC_TESTS_GPU_SIM_MACHINE_H_

#include <pthread.h>
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/gpu/sim/protocol.h"

namespace gpu_sim {

// One allocation, from cudaMalloc until its memory is given back.
struct Buffer {
  uint64_t id;  // 0: this entry is free
  int32_t device;
  pid_t client;
  pid_t executor;
  int32_t memfd;  // in the executor
  int64_t bytes;
  pid_t openers[16];  // other processes that have it open; 0: none
  int32_t exportable;
};

constexpr int kMaxBuffers = 8192;
// Of one device: processes that have a context there.
constexpr int kMaxContexts = 256;

struct MachineState {
  uint64_t ready;
  pthread_mutex_t mutex;
  uint64_t next_buffer_id;
  uint64_t next_region;
  int64_t used[kMaxDevices];
  pid_t contexts[kMaxDevices][kMaxContexts];  // 0: none
  Buffer buffers[kMaxBuffers];
};

// The state, locked while this lives.
class LockedState {
 public:
  LockedState();
  ~LockedState();
  LockedState(const LockedState&) = delete;
  LockedState& operator=(const LockedState&) = delete;
  MachineState* operator->() { return state_; }

  Buffer* Find(uint64_t id);
  // Gives back what dead executors have left.
  void Reap();
  void Release(Buffer* buffer);

 private:
  MachineState* const state_;
};

struct Device {
  int index;  // in the machine
  unsigned char uuid[16];
  bool mig;
  int64_t memory_bytes;
};

// An environment variable or its default.
std::string Env(const char* name, const char* otherwise);
int64_t EnvNumber(const char* name, int64_t otherwise);

// $GPU_SIM_DIR; says what is wrong and aborts where it is not set.
const std::string& Dir();

// The GPUs that this process sees, in its order.
const std::vector<Device>& Devices();
Device MachineDevice(int index);

// Notes misuse: in the findings, and on stderr.
void Finding(const std::string& what);

// Says what is wrong with the simulation itself, and aborts.
[[noreturn]] void Die(const std::string& what);

bool Alive(pid_t pid);
// Alive, and not waiting for its parent only: what has ended touches no memory
// any more, however long its executor takes to notice.
bool Runs(pid_t pid);

}  // namespace gpu_sim

#endif  // WEIGHTSYNC_TESTS_GPU_SIM_MACHINE_H_
