// A checkpoint as Hugging Face lays it out: which tensor lies where in which
// file.
//
//   model.safetensors                   where one file has all of it; else
//   model-00001-of-00003.safetensors    files of up to max_shard_bytes, and
//   model.safetensors.index.json        which tensor is in which of them
//
// Both ways end in the same CheckpointFiles: planned from a list of tensors,
// equal on every machine, so that several can write their parts of one
// checkpoint; or read from what is there, of which nothing is believed that was
// not checked (safetensors.h). The bytes of the tensors are the caller's.
#ifndef WEIGHTSYNC_TRANSPORT_FILE_CHECKPOINT_H_
#define WEIGHTSYNC_TRANSPORT_FILE_CHECKPOINT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "transport/file/rooted_directory.h"
#include "transport/file/safetensors.h"

namespace weightsync {
namespace transport {

constexpr int64_t kDefaultShardBytes = 5000000000;
constexpr int64_t kMinShardBytes = 4096;
constexpr char kCheckpointIndexName[] = "model.safetensors.index.json";

struct CheckpointFile {
  // As the index names it.
  std::string name;
  // Below the root; of one that was read.
  std::string path;
  int64_t bytes = 0;
  // With their places in the file, in that order.
  std::vector<SafetensorsTensor> tensors;
  // What the file begins with; of one that was planned.
  std::string header;
};

struct CheckpointFiles {
  std::vector<CheckpointFile> files;
  // JSON; empty where one file has all.
  std::string index;
  // Of the tensors.
  int64_t tensor_bytes = 0;
};

// Tensors go into files in the order given, and in a file those of larger
// elements come first, as the format's own writer has it: every tensor is
// aligned. Only name, dtype and shape are read.
//   INVALID_ARGUMENT  SHARD_BYTES_INVALID; SAFETENSORS_INVALID.
absl::StatusOr<CheckpointFiles> PlanCheckpoint(
    absl::Span<const SafetensorsTensor> tensors, int64_t max_shard_bytes);

// `path`: a directory, or one file.
//   NOT_FOUND (CHECKPOINT_NOT_FOUND), INVALID_ARGUMENT
//   (CHECKPOINT_PATH_INVALID), INTERNAL (CHECKPOINT_IO), FAILED_PRECONDITION
//   (CHECKPOINT_DAMAGED): the sentence names the file and the tensor.
absl::StatusOr<CheckpointFiles> ReadCheckpointHeaders(
    const RootedDirectory& root, const std::string& path);

// Whether a file of this name holds weights, or says where they are: not one
// that a checkpoint takes over from a template.
bool IsWeightFile(absl::string_view name);

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_FILE_CHECKPOINT_H_
