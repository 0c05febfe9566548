// A process's side of a simulated context: what the replacements of libcudart
// and libnccl are made of. Thread-safe.
#ifndef WEIGHTSYNC_TESTS_GPU_SIM_CONTEXT_H_
#define WEIGHTSYNC_TESTS_GPU_SIM_CONTEXT_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/gpu/sim/machine.h"
#include "tests/gpu/sim/protocol.h"

namespace gpu_sim {

// A range of device addresses that this process knows.
struct Range {
  uint64_t address = 0;
  uint64_t bytes = 0;
  uint64_t room = 0;
  uint64_t buffer_id = 0;  // unique in this process
  bool imported = false;
  bool exportable = true;
  int home = 0;  // the device that it lies on, as an ordinal of this process
};

class Context {
 public:
  // `ordinal` is the device's place in Devices(). Starts the executor.
  explicit Context(int ordinal);

  int ordinal() const { return ordinal_; }
  Control* control() { return control_; }
  // The error that stays, or cudaSuccess.
  cudaError_t fault() const;
  bool owns(uint64_t address) const {
    return address >= region_ && address < region_ + kRegionBytes;
  }

  // Asks the executor. `out` gets the payload of its answer.
  Reply Call(Op op, std::initializer_list<uint64_t> args,
             const void* payload = nullptr, size_t payload_bytes = 0,
             std::string* out = nullptr);
  // Until `done`, or the context is lost.
  cudaError_t Wait(const std::function<bool()>& done);
  // Until everything that was submitted to the stream has ended.
  cudaError_t WaitStream(int slot);
  cudaError_t WaitAll();
  void Observed(int slot, uint64_t count);
  void Goodbye();

  // Held by who asks for a range or gives one back, until this side has noted
  // it: the address that was given back last is the next that is given.
  std::mutex* placing() { return &placing_mutex_; }
  // Notes a new or a vanished range, and keeps the host away from it.
  void AddRange(const Range& range);
  void RemoveRange(uint64_t address);
  bool FindRange(uint64_t address, Range* range);

  std::atomic<uint64_t> submitted[kMaxStreams] = {};

 private:
  bool Dead();

  const int ordinal_;
  uint64_t region_ = 0;
  int socket_ = -1;
  Control* control_ = nullptr;
  std::mutex call_mutex_;
  std::mutex placing_mutex_;
  std::mutex range_mutex_;
  std::map<uint64_t, Range> ranges_;
};

struct SimStream {
  Context* context;
  int slot;
};
struct SimEvent {
  Context* context;
  uint64_t slot;
  std::atomic<uint64_t> record;
  bool timing;
};

// Exported by the simulated libcudart for the simulated libnccl.
Context* CurrentContext(cudaError_t* error);
// The stream's context and slot; finds misuse. NULL is slot 0 of the current
// device.
bool ResolveStream(cudaStream_t stream, const char* call, Context** context,
                   int* slot);
// Of this process at all: false in a forked child.
bool UsableProcess();

}  // namespace gpu_sim

#endif  // WEIGHTSYNC_TESTS_GPU_SIM_CONTEXT_H_
