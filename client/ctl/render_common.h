// What the texts about all resources have in common.
#ifndef WEIGHTSYNC_CLIENT_CTL_RENDER_COMMON_H_
#define WEIGHTSYNC_CLIENT_CTL_RENDER_COMMON_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "weightsync/v1/admin.pb.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace ctl {

inline std::string Dash(const std::string& text) {
  return text.empty() ? "-" : text;
}

// update_ids are random: the first part is enough for people.
inline std::string ShortId(const std::string& id) {
  return Dash(id.substr(0, 8));
}

// "MOVING" of "STATE_MOVING".
inline std::string WithoutPrefix(const std::string& name) {
  return absl::StartsWith(name, "STATE_") ? name.substr(6) : name;
}

// "-" for 0, which is unknown.
inline std::string Number(int64_t number) {
  return number == 0 ? "-" : absl::StrCat(number);
}

inline std::string FailureText(const v1::Failure& failure) {
  return absl::StrCat(failure.reason(), ": ", failure.message());
}

// How long a replica took for an update, and was away for it: the same columns
// wherever that is shown.
inline std::vector<std::string> TimesColumns() {
  return {"TO PAUSE", "TO WRITE", "TO RESUME", "AWAY", "FAILURE"};
}
std::vector<std::string> TimesCells(const v1::ReplicaTimes& times);

// A row of a table that ends in those.
inline std::vector<std::string> WithTimes(
    std::vector<std::string> row, const std::vector<std::string>& times) {
  row.insert(row.end(), times.begin(), times.end());
  return row;
}

// "label  value" lines, values aligned.
class Fields {
 public:
  void Add(const std::string& label, const std::string& value) {
    fields_.emplace_back(label, value);
    width_ = std::max(width_, label.size());
  }
  std::string ToString() const {
    std::string out;
    for (const auto& [label, value] : fields_) {
      absl::StrAppend(&out, label, std::string(width_ - label.size() + 2, ' '),
                      value, "\n");
    }
    return out;
  }

 private:
  std::vector<std::pair<std::string, std::string>> fields_;
  size_t width_ = 0;
};

}  // namespace ctl
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CTL_RENDER_COMMON_H_
