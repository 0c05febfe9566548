// Resource names as people type them.
#ifndef WEIGHTSYNC_CLIENT_CTL_NAMES_H_
#define WEIGHTSYNC_CLIENT_CTL_NAMES_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace ctl {

// What an argument names: a whole resource, or the collection under a model.
struct Name {
  // "models/{model}".
  std::string model;
  // Resource name of the thing in it; empty when the model alone was named.
  std::string resource;
};

// "m", "models/m", "m/3", "models/m/versions/3" with `collection` "versions".
// INVALID_ARGUMENT (RESOURCE_NAME_INVALID).
absl::StatusOr<Name> ParseName(absl::string_view text,
                               absl::string_view collection);

// "n" or "nodes/n" with `collection` "nodes".
absl::StatusOr<std::string> ParseTopName(absl::string_view text,
                                         absl::string_view collection);

}  // namespace ctl
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CTL_NAMES_H_
