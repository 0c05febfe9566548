// The header of a safetensors file: which tensor lies where.
//
//   | 8 bytes: N, little-endian | N bytes: JSON, padded with spaces | data |
//
// Everything that the header says is checked before it is believed: a file may
// come from anywhere. What is refused, and why, follows the format's own list
// of attacks: a length beyond the file, a header of 100 MB, offsets that
// overlap, leave a hole, run backwards or end elsewhere than the file does,
// sizes that do not fit shape and type, shapes that overflow, names that occur
// twice.
//
// Whole checkpoints (several files, an index) are checkpoint.h's matter.
#ifndef WEIGHTSYNC_TRANSPORT_FILE_SAFETENSORS_H_
#define WEIGHTSYNC_TRANSPORT_FILE_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace weightsync {
namespace transport {

struct SafetensorsTensor {
  std::string name;
  // As the format writes it: "BF16", "F8_E4M3", ...
  std::string dtype;
  // Elements; empty for a scalar. A dimension may be zero.
  std::vector<int64_t> shape;
  // Bytes from the start of the file.
  int64_t begin = 0;
  int64_t end = 0;
};

struct SafetensorsHeader {
  // In the order of their bytes.
  std::vector<SafetensorsTensor> tensors;
  std::map<std::string, std::string> metadata;
  // Where the data begin: 8 + N.
  int64_t data_begin = 0;
};

// Longer headers are refused, as by the reference reader.
constexpr int64_t kMaxSafetensorsHeaderBytes = 100000000;

// Bits of one element; 0 for a name that the format does not have.
int SafetensorsDTypeBits(absl::string_view dtype);

// The header at the start of a file of `file_bytes` bytes, of which `start` has
// the first ones: all of the header, at least.
//   INVALID_ARGUMENT  SAFETENSORS_INVALID; the sentence says what is wrong with
//   which
//     tensor.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(
    absl::string_view start, int64_t file_bytes);

// Opens the file and reads its header.
//   NOT_FOUND (FILE_UNKNOWN), PERMISSION_DENIED (FILE_DENIED), INVALID_ARGUMENT
//   (SAFETENSORS_INVALID), UNAVAILABLE (FILE_UNREADABLE).
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(
    const std::string& path);
// The same of a file that is open; `path` for sentences.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(
    int fd, const std::string& path);

// What a file of these tensors begins with, padded to a multiple of 8 bytes.
// Only name, dtype and shape of `tensors` are read; their data follow densely
// in this order. Types of less than a byte are not written.
//   INVALID_ARGUMENT  SAFETENSORS_INVALID: a name twice, an unknown type, a
//   shape that
//     overflows.
absl::StatusOr<std::string> MakeSafetensorsHeader(
    absl::Span<const SafetensorsTensor> tensors,
    const std::map<std::string, std::string>& metadata);

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_FILE_SAFETENSORS_H_
