#include "client/ctl/format.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace weightsync {
namespace ctl {
namespace {

// Columns on the screen: code points, not bytes.
size_t Width(absl::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (c & 0xc0) != 0x80; });
}

// Three digits: "1.23", "12.3", "123", "1234".
std::string ThreeDigits(double value) {
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return absl::StrFormat("%.*f", decimals, value);
}

}  // namespace

std::string HumanBytes(int64_t bytes) {
  if (bytes < 0) return absl::StrCat("-", HumanBytes(-bytes));
  if (bytes < 1000) return absl::StrCat(bytes, " B");
  static constexpr const char* kUnits[] = {"kB", "MB", "GB", "TB", "PB", "EB"};
  double value = static_cast<double>(bytes) / 1000;
  int unit = 0;
  while (value >= 999.95 && unit < 5) {
    value /= 1000;
    ++unit;
  }
  return absl::StrFormat("%.*f %s", value < 9.995 ? 2 : 1, value, kUnits[unit]);
}

std::string HumanDuration(absl::Duration duration) {
  if (duration == absl::InfiniteDuration()) return "forever";
  if (duration < absl::ZeroDuration()) {
    return absl::StrCat("-", HumanDuration(-duration));
  }
  const double seconds = absl::ToDoubleSeconds(duration);
  if (seconds == 0) return "0 s";
  if (seconds < 0.9995e-3) {
    return absl::StrCat(ThreeDigits(seconds * 1e6), " us");
  }
  if (seconds < 0.9995) return absl::StrCat(ThreeDigits(seconds * 1e3), " ms");
  if (seconds < 59.95) return absl::StrCat(ThreeDigits(seconds), " s");
  const int64_t whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) {
    return absl::StrFormat("%d m %02d s", whole / 60, whole % 60);
  }
  if (whole < 86400) {
    return absl::StrFormat("%d h %02d m", whole / 3600, whole / 60 % 60);
  }
  return absl::StrFormat("%d d %02d h", whole / 86400, whole / 3600 % 24);
}

std::string HumanRate(int64_t bytes, absl::Duration duration) {
  const double seconds = absl::ToDoubleSeconds(duration);
  if (!(seconds > 0)) return "-";
  return absl::StrCat(
      HumanBytes(static_cast<int64_t>(static_cast<double>(bytes) / seconds)),
      "/s");
}

std::string Ago(absl::Time now, absl::Time then) {
  if (then <= absl::UnixEpoch()) return "-";
  // Clocks of two machines may differ by a little.
  const absl::Duration passed = std::max(now - then, absl::ZeroDuration());
  if (passed < absl::Minutes(1)) {
    return absl::StrCat(absl::ToInt64Seconds(passed), " s ago");
  }
  return absl::StrCat(HumanDuration(passed), " ago");
}

std::string WithCommas(int64_t number) {
  std::string digits = absl::StrCat(number);
  for (int i = static_cast<int>(digits.size()) - 3; i > (number < 0 ? 1 : 0);
       i -= 3) {
    digits.insert(i, ",");
  }
  return digits;
}

std::string Counted(int64_t count, absl::string_view what) {
  if (count == 1) return absl::StrCat("1 ", what);
  if (absl::EndsWith(what, "y")) {
    return absl::StrCat(WithCommas(count), " ", what.substr(0, what.size() - 1),
                        "ies");
  }
  return absl::StrCat(WithCommas(count), " ", what, "s");
}

std::string LastPart(absl::string_view name) {
  const size_t slash = name.rfind('/');
  return std::string(slash == absl::string_view::npos ? name
                                                      : name.substr(slash + 1));
}

Table::Table(std::vector<std::string> header) {
  rows_.push_back(std::move(header));
}

void Table::Add(std::vector<std::string> row) {
  row.resize(rows_[0].size());
  rows_.push_back(std::move(row));
}

std::string Table::ToString() const {
  const size_t columns = rows_[0].size();
  std::vector<size_t> width(columns);
  std::vector<bool> right(columns, true);
  for (size_t r = 0; r < rows_.size(); ++r) {
    for (size_t c = 0; c < columns; ++c) {
      const std::string& cell = rows_[r][c];
      width[c] = std::max(width[c], Width(cell));
      // Text, or an address.
      if (r > 0 && cell != "-" && !cell.empty() &&
          (!absl::ascii_isdigit(cell[0]) || absl::StrContains(cell, ":"))) {
        right[c] = false;
      }
    }
  }
  std::string out;
  for (const std::vector<std::string>& row : rows_) {
    std::string line;
    for (size_t c = 0; c < columns; ++c) {
      if (c > 0) line += "  ";
      const std::string space(width[c] - Width(row[c]), ' ');
      if (right[c]) {
        absl::StrAppend(&line, space, row[c]);
      } else {
        absl::StrAppend(&line, row[c], space);
      }
    }
    absl::StripTrailingAsciiWhitespace(&line);
    absl::StrAppend(&out, line, "\n");
  }
  return out;
}

}  // namespace ctl
}  // namespace weightsync
