#include "client/cc/served.h"

#include <algorithm>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace weightsync {
namespace client {

namespace {

// Of a sentence; more are a number.
constexpr size_t kNamed = 8;
// With why, which is cut at so many bytes; of more the reason alone.
constexpr int kExplained = 4;
constexpr size_t kLongestWhy = 120;

std::string LastPart(const std::string& name) {
  return name.substr(name.rfind('/') + 1);
}

// What a load callback or a hook has raised is known to nobody but the engine
// otherwise.
std::string FailureText(const v1::Failure& failure) {
  std::string why = failure.message();
  if (why.empty()) return failure.reason();
  for (char& c : why) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) c = ' ';
  }
  if (why.size() > kLongestWhy) {
    size_t end = kLongestWhy;
    // Not within a character.
    while (end > 0 && (static_cast<unsigned char>(why[end]) & 0xc0) == 0x80) {
      --end;
    }
    why = absl::StrCat(why.substr(0, end), "...");
  }
  return absl::StrCat(failure.reason(), ": ", why);
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

bool ServersKnown(const v1::Version& version) {
  return version.has_create_time() || version.replicas_size() > 0;
}

std::string ServingReplicas(const v1::Version& version) {
  const int count = ServingCount(version);
  return count == 0   ? "no replica"
         : count == 1 ? "1 replica"
                      : absl::StrCat(count, " replicas");
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
  const auto failed = std::count_if(
      version.replicas().begin(), version.replicas().end(),
      [](const v1::ReplicaTimes& t) { return !t.failure().reason().empty(); });
  for (const v1::ReplicaTimes& times : version.replicas()) {
    if (times.failure().reason().empty()) continue;
    left.push_back(absl::StrCat(LastPart(times.replica()), " (",
                                failed > kExplained
                                    ? times.failure().reason()
                                    : FailureText(times.failure()),
                                ")"));
  }
  if (!left.empty()) absl::StrAppend(&text, "; left out: ", List(left));
  // It has it, and somebody else keeps it paused.
  std::vector<std::string> held;
  for (const v1::ReplicaTimes& times : version.replicas()) {
    if (times.failure().reason().empty() && times.has_applied_time() &&
        !times.has_resumed_time()) {
      held.push_back(LastPart(times.replica()));
    }
  }
  if (version.state() == v1::Version::STATE_ACTIVE && !held.empty()) {
    absl::StrAppend(&text, "; kept paused: ", List(held));
  }
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
  if (!ServersKnown(version)) {
    return absl::StrCat(version.name(),
                        " is ACTIVE; the coordinator was started again since, "
                        "and `weightsyncctl replicas` says who serves it");
  }
  return absl::StrCat(ServingReplicas(version),
                      ServingCount(version) > 1 ? " serve " : " serves ",
                      version.name(), NotServedText(version));
}

}  // namespace client
}  // namespace weightsync
