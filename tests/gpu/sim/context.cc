#include "tests/gpu/sim/context.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

extern char** environ;

namespace gpu_sim {
namespace {

std::string ExecutorPath() {
  const std::string path = Env("GPU_SIM_EXECUTOR", "");
  if (!path.empty()) return path;
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&ExecutorPath), &info) == 0)
    Die("dladdr");
  const std::string library = info.dli_fname;
  return library.substr(0, library.rfind('/') + 1) + "gpu_sim_executor";
}

// Duplicates, so that dup2 in the child cannot collide with its targets.
int High(int fd) {
  const int high = fcntl(fd, F_DUPFD_CLOEXEC, 64);
  if (high < 0) Die("F_DUPFD");
  close(fd);
  return high;
}

}  // namespace

Context::Context(int ordinal) : ordinal_(ordinal) {
  {
    LockedState state;
    region_ = kFirstAddress + state->next_region++ % kRegions * kRegionBytes;
  }
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0)
    Die("socketpair");
  int memfd = memfd_create("gpu_sim_control", MFD_CLOEXEC);
  if (memfd < 0 || ftruncate(memfd, sizeof(Control)) != 0) Die("memfd");
  control_ = static_cast<Control*>(mmap(
      nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0));
  if (control_ == MAP_FAILED) Die("mmap of the control page");
  socket_ = High(sockets[0]);
  const int other = High(sockets[1]);
  memfd = High(memfd);
  // Where only descendants may be debugged, the executor reads host memory all
  // the same.
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, other, kSocketFd);
  posix_spawn_file_actions_adddup2(&actions, memfd, kControlFd);
  std::string path = ExecutorPath();
  std::string device = std::to_string(Devices()[ordinal].index);
  std::string pid = std::to_string(getpid());
  std::string region = std::to_string(region_);
  char* argv[] = {&path[0], &device[0], &pid[0], &region[0], nullptr};
  pid_t child;
  const int error =
      posix_spawn(&child, path.c_str(), &actions, nullptr, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) Die(path + ": " + strerror(error));
  while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  close(other);
  close(memfd);
  char ready = 0;
  if (recv(socket_, &ready, 1, 0) != 1)
    Die("the executor of device " + device + " did not start");
}

cudaError_t Context::fault() const {
  return static_cast<cudaError_t>(control_->fault.load());
}

bool Context::Dead() {
  pollfd ready = {socket_, 0, 0};
  return poll(&ready, 1, 0) > 0 && (ready.revents & POLLHUP) != 0;
}

Reply Context::Call(Op op, std::initializer_list<uint64_t> args,
                    const void* payload, size_t payload_bytes,
                    std::string* out) {
  if (payload_bytes > static_cast<size_t>(kMaxPayload)) Die("payload too big");
  Request request = {};
  request.op = op;
  request.payload_bytes = payload_bytes;
  int i = 0;
  for (const uint64_t arg : args) request.arg[i++] = arg;
  std::string message(reinterpret_cast<const char*>(&request), sizeof(request));
  if (payload_bytes > 0)
    message.append(static_cast<const char*>(payload), payload_bytes);
  char buffer[sizeof(Reply) + 4096];
  std::lock_guard<std::mutex> lock(call_mutex_);
  Reply reply = {};
  reply.error = cudaErrorUnknown;
  if (send(socket_, message.data(), message.size(), MSG_NOSIGNAL) < 0)
    return reply;
  ssize_t got;
  while ((got = recv(socket_, buffer, sizeof(buffer), 0)) < 0 &&
         errno == EINTR) {
  }
  if (got < static_cast<ssize_t>(sizeof(Reply))) return reply;
  memcpy(&reply, buffer, sizeof(reply));
  if (out != nullptr) out->assign(buffer + sizeof(Reply), reply.payload_bytes);
  return reply;
}

cudaError_t Context::Wait(const std::function<bool()>& done) {
  while (true) {
    const uint32_t seen = control_->wake;
    if (control_->fault != 0) return fault();
    if (done()) return cudaSuccess;
    if (Dead()) return cudaErrorUnknown;
    const timespec wait = {0, 20000000};
    syscall(SYS_futex, &control_->wake, FUTEX_WAIT, seen, &wait, nullptr, 0);
  }
}

void Context::Observed(int slot, uint64_t count) {
  Call(Op::kObserved, {static_cast<uint64_t>(slot), count});
}

cudaError_t Context::WaitStream(int slot) {
  const uint64_t count = submitted[slot];
  const cudaError_t error =
      Wait([&] { return control_->streams[slot] >= count; });
  if (error == cudaSuccess && count > 0) Observed(slot, count);
  return error;
}

cudaError_t Context::WaitAll() {
  for (int slot = 0; slot < kMaxStreams; ++slot) {
    if (control_->streams[slot] >= submitted[slot] && submitted[slot] == 0)
      continue;
    if (const cudaError_t error = WaitStream(slot)) return error;
  }
  return fault();
}

void Context::Goodbye() {
  if (!Dead()) Call(Op::kGoodbye, {});
}

void Context::AddRange(const Range& range) {
  void* const map = mmap(
      reinterpret_cast<void*>(range.address), range.room, PROT_NONE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (map == MAP_FAILED) Die("the address of an allocation is taken");
  static std::atomic<uint64_t> next_id{1};
  Range noted = range;
  noted.buffer_id = next_id++;
  std::lock_guard<std::mutex> lock(range_mutex_);
  ranges_[range.address] = noted;
}

void Context::RemoveRange(uint64_t address) {
  std::lock_guard<std::mutex> lock(range_mutex_);
  const auto at = ranges_.find(address);
  if (at == ranges_.end()) return;
  munmap(reinterpret_cast<void*>(address), at->second.room);
  ranges_.erase(at);
}

bool Context::FindRange(uint64_t address, Range* range) {
  std::lock_guard<std::mutex> lock(range_mutex_);
  auto at = ranges_.upper_bound(address);
  if (at == ranges_.begin()) return false;
  --at;
  if (address >= at->second.address + at->second.bytes) return false;
  *range = at->second;
  return true;
}

}  // namespace gpu_sim
