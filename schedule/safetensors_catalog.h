// Catalogs from the headers of safetensors files. Reading files is the caller's
// business; this takes the header's JSON text (what follows the 8-byte length).

#ifndef WEIGHTSYNC_SCHEDULE_SAFETENSORS_CATALOG_H_
#define WEIGHTSYNC_SCHEDULE_SAFETENSORS_CATALOG_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "schedule/catalog.h"

namespace weightsync {
namespace schedule {

// A tensor as a header names it. Offsets count from the end of the header.
struct SafetensorsEntry {
  Param param;
  int64_t begin = 0;
  int64_t end = 0;
};

// The tensors of one header in order of their data. INVALID_ARGUMENT, the
// parameter named first:
//   INVALID_SAFETENSORS  not JSON, an entry without dtype, shape or
//                        data_offsets, offsets that do not fit the shape, gaps
//                        or overlaps
//   UNKNOWN_DTYPE, DIMENSION_TOO_LARGE
//   BYTES_OVERFLOW       a tensor, or all up to it, of more bytes than an int64
//                        counts
absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(
    absl::string_view header_json);

// Which file of a checkpoint has which tensor.
struct SafetensorsIndex {
  std::map<std::string, std::string> file_of;  // by tensor

  // Each once, sorted.
  std::vector<std::string> Files() const;
};

// A model.safetensors.index.json. INVALID_SAFETENSORS: not JSON, without a
// weight_map or with an empty one, an entry that is no name of a file beside
// the index.
absl::StatusOr<SafetensorsIndex> ParseSafetensorsIndex(
    absl::string_view index_json);

struct SafetensorsFile {
  std::string name;    // as in the index; for messages
  std::string header;  // JSON
  // Bytes behind the header; negative: not known, and not checked.
  int64_t data_bytes = -1;
};

// One catalog of all files of a checkpoint, in order of the files and of their
// data. Tensors without elements are left out: there is nothing to send.
// Sentences begin with the file's name. The errors of ParseSafetensorsHeader
// and Catalog::Create, DUPLICATE_PARAMETER for a tensor of two files, and
// INVALID_SAFETENSORS where the index (which may be null) and the files
// disagree about a tensor, where a file has fewer or more bytes than its header
// says, or where there is no tensor at all.
absl::StatusOr<Catalog> CatalogFromSafetensors(
    absl::Span<const SafetensorsFile> files,
    const SafetensorsIndex* index = nullptr);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_SAFETENSORS_CATALOG_H_
