// Whose a directory of a checkpoint is: what may be replaced or removed, for
// this daemon and its like wrote it, and what must stay.
//
// Every checkpoint has a note that lists what was written into it, with sizes.
// A directory without one may be somebody's model as Hugging Face lays it out.
#ifndef WEIGHTSYNC_DAEMON_NODE_CHECKPOINT_NOTE_H_
#define WEIGHTSYNC_DAEMON_NODE_CHECKPOINT_NOTE_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "transport/file/rooted_directory.h"

namespace weightsync {
namespace daemon {

inline constexpr char kCheckpointNote[] = ".weightsync.json";

struct CheckpointNote {
  // "models/{model}".
  std::string model;
  // Of the update that came by it; no update_id: an operator saved it.
  std::string update_id;
  int64_t version = 0;
  // Paths in it, with their bytes.
  std::map<std::string, int64_t> files;

  std::string ToJson() const;
};

// nullopt: there is none, or it cannot be read.
absl::optional<CheckpointNote> ReadCheckpointNote(
    const transport::RootedDirectory& root, const std::string& directory);

// The files in it and below, by their paths in it; a directory that holds none
// is "name/" with 0 bytes, and what is no plain file (a link, a socket) has -1.
//   Errors of RootedDirectory; INVALID_ARGUMENT (CHECKPOINT_PATH_INVALID): too
//   many, or too deep.
absl::StatusOr<std::map<std::string, int64_t>> FilesOf(
    const transport::RootedDirectory& root, const std::string& directory);

// Whether the directory has nothing but what the note says was written.
//   FAILED_PRECONDITION (CHECKPOINT_PATH_TAKEN): names what else there is.
absl::Status CheckWritten(const transport::RootedDirectory& root,
                          const std::string& directory,
                          const CheckpointNote& note);

// Whether a checkpoint may be put in place of the directory: it is empty, or
// has weights and otherwise only what was written there, or what a Hugging Face
// model has beside its weights.
//   ALREADY_EXISTS (CHECKPOINT_EXISTS): it has no weights.
//   FAILED_PRECONDITION (CHECKPOINT_PATH_TAKEN): names what would be lost.
absl::Status CheckReplaceable(const transport::RootedDirectory& root,
                              const std::string& directory);

// Whether no directory above `path` is a checkpoint, with which it would be
// lost.
//   FAILED_PRECONDITION (CHECKPOINT_PATH_TAKEN): names that one.
absl::Status CheckNotInside(const transport::RootedDirectory& root,
                            const std::string& path);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_CHECKPOINT_NOTE_H_
