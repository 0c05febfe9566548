// Numbers for people.
#ifndef WEIGHTSYNC_CLIENT_CTL_FORMAT_H_
#define WEIGHTSYNC_CLIENT_CTL_FORMAT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace weightsync {
namespace ctl {

// "0 B", "999 B", "1.00 kB", "988.1 MB", "12.3 GB": decimal units, three or
// four digits.
std::string HumanBytes(int64_t bytes);

// "0 s", "350 us", "12.3 ms", "1.23 s", "2 m 05 s", "3 h 20 m", "4 d 03 h".
std::string HumanDuration(absl::Duration duration);

// "1.23 GB/s"; "-" when the duration is not positive.
std::string HumanRate(int64_t bytes, absl::Duration duration);

// "5 s ago"; "-" for a time that is not set.
std::string Ago(absl::Time now, absl::Time then);

// "494,032,768".
std::string WithCommas(int64_t number);

// "1 rank", "3 ranks", "2 copies".
std::string Counted(int64_t count, absl::string_view what);

// The last part of a resource name: "models/m/replicas/r" -> "r".
std::string LastPart(absl::string_view name);

// Columns as wide as their widest cell, two spaces apart, no spaces at the ends
// of lines. A cell that begins with a digit in a column whose cells all do (or
// are
// "-") is set to the right; one with a colon in it is an address and is not.
class Table {
 public:
  explicit Table(std::vector<std::string> header);
  // Shorter rows are filled up with empty cells.
  void Add(std::vector<std::string> row);
  std::string ToString() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace ctl
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CTL_FORMAT_H_
