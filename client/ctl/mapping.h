// `weightsyncctl names`: what rules make of a trainer's names, and what is left
// over on either side. The rules are those of the Python package
// (client/python/weightsync/names.py), in the file format of
// `python -m weightsync names`; testdata/names_cases.json holds the two
// implementations together. Pure.
#ifndef WEIGHTSYNC_CLIENT_CTL_MAPPING_H_
#define WEIGHTSYNC_CLIENT_CTL_MAPPING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace re2 {
class RE2;
}  // namespace re2

namespace weightsync {
namespace ctl {

// A tensor, whole. `dtype` as safetensors names it.
struct NamedTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
};

// One rule; fields that its kind does not have are left alone.
struct NameRule {
  enum Kind { kRename, kDrop, kSplit, kFuse };
  Kind kind = kRename;
  std::string pattern;
  // kRename; kFuse: of the tensor that comes out.
  std::string replacement;
  // kSplit: of the tensors that come out; kFuse: which part the pattern's first
  // group says.
  std::vector<std::string> names;
  // Rows of each in a group; kSplit: empty for equal ones.
  std::vector<int64_t> sizes;
  int64_t groups = 1;
  int64_t dim = 0;
  std::shared_ptr<const re2::RE2> compiled;
};

// A JSON list of rules, in their order:
//   [{"rename": ["^transformer\\.h\\.", "model.layers."]},
//    {"drop": "inv_freq$"},
//    {"split": {"pattern": "qkv", "names": ["q", "k", "v"],
//               "sizes": [4096, 1024, 1024]}},
//    {"split_qkv": {"pattern": "qkv", "heads": 32, "kv_heads": 8,
//                   "head_dim": 128}},
//    {"split_gate_up": "gate_up_proj"},
//    {"fuse": {"pattern": "(gate|up)_proj", "parts": ["gate", "up"],
//              "name": "gate_up_proj", "sizes": [8, 8]}}]
//   INVALID_ARGUMENT  PATTERN_INVALID: no JSON, no rule, or no expression of
//     RE2. SPLIT_INVALID: rows or heads that cannot be.
absl::StatusOr<std::vector<NameRule>> ParseNameRules(absl::string_view json);

struct NameMapping {
  // Old and new name of every tensor and of what it was split into.
  std::vector<std::pair<std::string, std::string>> mapping;
  std::vector<std::string> dropped;
  std::vector<std::string> only_trainer;
  std::vector<std::string> only_engine;
  // Sentences.
  std::vector<std::string> differ;

  bool Fits() const {
    return only_trainer.empty() && only_engine.empty() && differ.empty();
  }
};

//   INVALID_ARGUMENT  RULE_UNUSED: a rule matches nothing. DUPLICATE_NAME: two
//     tensors end with one name. SPLIT_INVALID: a tensor cannot be split or
//     fused as it says.
absl::StatusOr<NameMapping> MapNames(const std::vector<NamedTensor>& trainer,
                                     const std::vector<NamedTensor>& engine,
                                     const std::vector<NameRule>& rules);

// For people, and for programs.
std::string RenderMapping(const NameMapping& mapping);
std::string MappingJson(const NameMapping& mapping);

}  // namespace ctl
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CTL_MAPPING_H_
