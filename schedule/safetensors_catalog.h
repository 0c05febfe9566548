// Catalogs from the headers of safetensors files. Reading files is the caller's
// business; this takes the header's JSON text (what follows the 8-byte length).

#ifndef WEIGHTSYNC_SCHEDULE_SAFETENSORS_CATALOG_H_
#define WEIGHTSYNC_SCHEDULE_SAFETENSORS_CATALOG_H_

#include <cstdint>
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

// The tensors of one header in order of their data. INVALID_SAFETENSORS: not
// JSON, an entry without dtype, shape or data_offsets, offsets that do not fit
// the shape, gaps or overlaps; UNKNOWN_DTYPE.
absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(
    absl::string_view header_json);

// One catalog of all files of a checkpoint, in order of the files and of their
// data. Tensors without elements are left out: there is nothing to send. The
// errors of Catalog::Create for the rest.
absl::StatusOr<Catalog> CatalogFromSafetensors(
    absl::Span<const absl::string_view> header_jsons);

// The files that a model.safetensors.index.json names, each once, sorted.
absl::StatusOr<std::vector<std::string>> FilesOfSafetensorsIndex(
    absl::string_view index_json);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_SAFETENSORS_CATALOG_H_
