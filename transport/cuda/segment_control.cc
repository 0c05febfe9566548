#include "transport/cuda/segment_control.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "glog/logging.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr char kMagic[8] = {'W', 'S', 'C', 'T', 'L', '0', '0', '1'};

}  // namespace

void WriteSegmentControl(const DeviceHandle& handle, int64_t bytes,
                         Segment* control) {
  auto* const written = reinterpret_cast<SegmentControl*>(control->data());
  const std::string encoded = handle.Encode();
  CHECK_LE(encoded.size(), sizeof(written->handle));
  memcpy(written->handle, encoded.data(), encoded.size());
  written->handle_bytes = static_cast<uint32_t>(encoded.size());
  written->bytes = bytes;
  memcpy(written->magic, kMagic, sizeof(kMagic));
}

absl::StatusOr<DeviceHandle> ReadSegmentControl(const Segment& control,
                                                int64_t bytes) {
  const auto* const read =
      reinterpret_cast<const SegmentControl*>(control.data());
  if (control.bytes() < static_cast<int64_t>(sizeof(SegmentControl)) ||
      memcmp(read->magic, kMagic, sizeof(kMagic)) != 0 ||
      read->handle_bytes > sizeof(read->handle) || read->bytes < bytes) {
    return MakeError(absl::StatusCode::kInvalidArgument, "NOT_AN_ARENA",
                     "the ticket does not lead to GPU memory of that size");
  }
  return DeviceHandle::Decode(
      absl::string_view(read->handle, read->handle_bytes));
}

UniqueFd OpenSegmentControl(const Segment& control) {
  int64_t offset;
  const int fd = control.file(&offset);
  return UniqueFd(
      open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_RDONLY | O_CLOEXEC));
}

absl::StatusOr<UniqueFd> LockSegmentControl(const Segment& control) {
  UniqueFd fd = OpenSegmentControl(control);
  // In this order: whoever sees the lock does not free, whoever is retired was
  // freed or is about to be.
  if (fd.get() < 0 || flock(fd.get(), LOCK_SH | LOCK_NB) != 0 ||
      reinterpret_cast<const SegmentControl*>(control.data())->retired != 0) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "SEGMENT_GONE",
                     "the process that made this segment has given it back");
  }
  return fd;
}

void RetireSegmentControl(Segment* control) {
  reinterpret_cast<SegmentControl*>(control->data())->retired = 1;
}

bool SegmentControlIsRetired(const Segment& control) {
  return reinterpret_cast<const SegmentControl*>(control.data())->retired != 0;
}

bool SegmentControlIsClosed(const Segment& control) {
  const UniqueFd fd = OpenSegmentControl(control);
  return fd.get() >= 0 && flock(fd.get(), LOCK_EX | LOCK_NB) == 0;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
