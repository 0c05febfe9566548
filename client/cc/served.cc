#include "client/cc/served.h"

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace weightsync {
namespace client {

namespace {

// Of a sentence; more are a number.
constexpr size_t kNamed = 8;

std::string LastPart(const std::string& name) {
  return name.substr(name.rfind('/') + 1);
}

std::string List(std::vector<std::string> names) {
  const size_t more = names.size() > kNamed ? names.size() - kNamed : 0;
  if (more > 0) names.resize(kNamed);
  return absl::StrCat(absl::StrJoin(names, ", "),
                      more > 0 ? absl::StrCat(" and ", more, " more") : "");
}

}  // namespace

int ServingCount(const v1::Version& version) {
  int count = 0;
  for (const v1::ReplicaTimes& times : version.replicas()) {
    count += times.has_resumed_time() && times.failure().reason().empty();
  }
  return count;
}

std::string NotServedText(const v1::Version& version) {
  std::string text;
  if (!version.absent_replicas().empty()) {
    std::vector<std::string> names;
    for (const std::string& name : version.absent_replicas()) {
      names.push_back(LastPart(name));
    }
    absl::StrAppend(&text, "; not yet: ", List(names),
                    names.size() == 1
                        ? " (not whole when it began, gets it when it comes)"
                        : " (not whole when it began, get it when they come)");
  }
  std::vector<std::string> left;
  for (const v1::ReplicaTimes& times : version.replicas()) {
    if (times.failure().reason().empty()) continue;
    left.push_back(absl::StrCat(LastPart(times.replica()), " (",
                                times.failure().reason(), ")"));
  }
  if (!left.empty()) absl::StrAppend(&text, "; left out: ", List(left));
  return text;
}

std::string ServedText(const v1::Version& version) {
  if (version.state() != v1::Version::STATE_ACTIVE) {
    std::string text = absl::StrCat(
        version.name(), " is ",
        absl::StripPrefix(v1::Version::State_Name(version.state()), "STATE_"));
    if (!version.failure().reason().empty()) {
      absl::StrAppend(&text, ": ", version.failure().reason(), ": ",
                      version.failure().message());
    }
    return text;
  }
  const int count = ServingCount(version);
  return absl::StrCat(count == 0   ? "no replica serves "
                      : count == 1 ? "1 replica serves "
                                   : absl::StrCat(count, " replicas serve "),
                      version.name(), NotServedText(version));
}

}  // namespace client
}  // namespace weightsync
