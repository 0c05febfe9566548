#include "transport/cuda/handle.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "transport/error.h"
#include "transport/host/pid_namespace.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

// On the wire, little-endian. Read by processes of other builds: only a new
// magic changes it.
struct Encoded {
  char magic[8];
  char ipc[64];
  char probe_ipc[64];
  char nonce[16];
  char device_uuid[48];
  uint64_t base;
  int64_t bytes;
  uint64_t buffer_id;
  int64_t pid;
  uint64_t start_time;
  uint64_t pid_namespace;
};
constexpr char kMagic[8] = {'W', 'S', 'D', 'E', 'V', '0', '0', '1'};

// 0 when there is no such process, or only what is left of it until its parent
// looks.
uint64_t StartTimeOf(int64_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return 0;
  // The second field is a name in parentheses that may hold anything.
  const size_t end = line.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream fields(line.substr(end + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) {
    fields >> field;
    if (i == 3 && (field == "Z" || field == "X")) return 0;
  }
  return std::strtoull(field.c_str(), nullptr, 10);
}

// Also where its parent has not noticed yet: the driver has taken everything
// from it.
bool HasEnded(int64_t pid) {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0) return errno == ESRCH;
  pollfd ended = {fd, POLLIN, 0};
  const bool has = poll(&ended, 1, 0) > 0;
  close(fd);
  return has;
}

}  // namespace

ProcessIdentity ThisProcess() {
  ProcessIdentity process;
  process.pid = getpid();
  process.start_time = StartTimeOf(process.pid);
  process.pid_namespace = PidNamespace();
  return process;
}

ProcessIdentity IdentityOf(int64_t pid) {
  ProcessIdentity process;
  process.pid = pid;
  process.start_time = StartTimeOf(pid);
  if (process.start_time == 0) return process;
  process.pid_namespace = PidNamespace(absl::StrCat(pid));
  // Another user's, perhaps; it has this number here all the same.
  if (process.pid_namespace == 0) process.pid_namespace = PidNamespace();
  return process;
}

ProcessState StateOf(const ProcessIdentity& process) {
  if (process.pid_namespace != PidNamespace())
    return ProcessState::kOtherNamespace;
  if (HasEnded(process.pid)) return ProcessState::kDead;
  return StartTimeOf(process.pid) == process.start_time ? ProcessState::kAlive
                                                        : ProcessState::kDead;
}

std::string DeviceHandle::Encode() const {
  Encoded encoded = {};
  memcpy(encoded.magic, kMagic, sizeof(kMagic));
  memcpy(encoded.ipc, ipc.data(), ipc.size());
  memcpy(encoded.probe_ipc, probe_ipc.data(), probe_ipc.size());
  memcpy(encoded.nonce, nonce.data(), nonce.size());
  memcpy(encoded.device_uuid, device_uuid.data(),
         std::min(device_uuid.size(), sizeof(encoded.device_uuid) - 1));
  encoded.base = base;
  encoded.bytes = bytes;
  encoded.buffer_id = buffer_id;
  encoded.pid = exporter.pid;
  encoded.start_time = exporter.start_time;
  encoded.pid_namespace = exporter.pid_namespace;
  return std::string(reinterpret_cast<const char*>(&encoded), sizeof(encoded));
}

absl::StatusOr<DeviceHandle> DeviceHandle::Decode(absl::string_view bytes) {
  Encoded encoded;
  if (bytes.size() != sizeof(encoded)) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "HANDLE_MALFORMED",
        absl::StrCat("a device handle has ", sizeof(encoded),
                     " bytes; this one has ", bytes.size(),
                     " (is the client library of another release?)"));
  }
  memcpy(&encoded, bytes.data(), sizeof(encoded));
  if (memcmp(encoded.magic, kMagic, sizeof(kMagic)) != 0 ||
      encoded.bytes <= 0 ||
      encoded.device_uuid[sizeof(encoded.device_uuid) - 1] != '\0') {
    return MakeError(absl::StatusCode::kInvalidArgument, "HANDLE_MALFORMED",
                     "what was sent as a device handle is none");
  }
  DeviceHandle handle;
  memcpy(handle.ipc.data(), encoded.ipc, sizeof(encoded.ipc));
  memcpy(handle.probe_ipc.data(), encoded.probe_ipc, sizeof(encoded.probe_ipc));
  memcpy(handle.nonce.data(), encoded.nonce, sizeof(encoded.nonce));
  handle.device_uuid = encoded.device_uuid;
  handle.base = encoded.base;
  handle.bytes = encoded.bytes;
  handle.buffer_id = encoded.buffer_id;
  handle.exporter.pid = encoded.pid;
  handle.exporter.start_time = encoded.start_time;
  handle.exporter.pid_namespace = encoded.pid_namespace;
  return handle;
}

absl::Status CheckPlace(const DeviceHandle& handle, int64_t offset,
                        int64_t bytes) {
  if (offset >= 0 && bytes >= 0 && offset <= handle.bytes &&
      bytes <= handle.bytes - offset)
    return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, "PAST_ALLOCATION",
      absl::StrCat(bytes, " bytes at offset ", offset,
                   " do not lie in an allocation of ", handle.bytes));
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
