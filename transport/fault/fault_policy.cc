#include "transport/fault/fault_policy.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace weightsync {
namespace transport {
namespace {

bool Matches(const std::string& pattern, absl::string_view node) {
  return pattern == "*" || pattern == node;
}

absl::StatusOr<FaultRules::Rule::Kind> ParseKind(absl::string_view text) {
  using Kind = FaultRules::Rule::Kind;
  if (text == "damage") return Kind::kDamage;
  if (text == "damage_header") return Kind::kDamageHeader;
  if (text == "drop") return Kind::kDrop;
  if (text == "silence") return Kind::kSilence;
  if (text == "cut") return Kind::kCut;
  if (text == "delay") return Kind::kDelay;
  return absl::InvalidArgumentError(
      absl::StrCat("fault rule: unknown kind '", text, "'"));
}

absl::Status ParseWord(absl::string_view word, FaultRules::Rule* rule) {
  const std::pair<absl::string_view, absl::string_view> pair =
      absl::StrSplit(word, absl::MaxSplits('=', 1));
  if (pair.first == "kind") {
    absl::StatusOr<FaultRules::Rule::Kind> kind = ParseKind(pair.second);
    if (!kind.ok()) return kind.status();
    rule->kind = *kind;
    return absl::OkStatus();
  }
  if (pair.first == "edge") {
    const std::vector<std::string> ends =
        absl::StrSplit(pair.second, absl::ByString("->"));
    if (ends.size() != 2)
      return absl::InvalidArgumentError(
          absl::StrCat("fault rule: edge '", pair.second, "'"));
    rule->from = ends[0];
    rule->to = ends[1];
    return absl::OkStatus();
  }
  int64_t number = 0;
  if (!absl::SimpleAtoi(pair.second, &number) || number < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("fault rule: '", word, "' is not name=number"));
  }
  if (pair.first == "after") {
    rule->after = number;
  } else if (pair.first == "count") {
    rule->count = number;
  } else if (pair.first == "ms") {
    rule->delay = absl::Milliseconds(number);
  } else if (pair.first == "bucket") {
    rule->bucket = number;
  } else if (pair.first == "frame") {
    rule->frame = number;
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("fault rule: unknown word '", word, "'"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<FaultRules::Rule>> FaultRules::Parse(
    absl::string_view text) {
  std::vector<Rule> rules;
  for (absl::string_view line :
       absl::StrSplit(text, ';', absl::SkipWhitespace())) {
    Rule rule;
    bool has_kind = false;
    for (absl::string_view word :
         absl::StrSplit(line, ' ', absl::SkipWhitespace())) {
      if (absl::Status status = ParseWord(word, &rule); !status.ok())
        return status;
      has_kind |= word.substr(0, 5) == "kind=";
    }
    if (!has_kind)
      return absl::InvalidArgumentError(
          absl::StrCat("fault rule without kind: '", line, "'"));
    rules.push_back(std::move(rule));
  }
  return rules;
}

void FaultRules::Set(std::vector<Rule> rules) {
  absl::MutexLock lock(&mutex_);
  rules_.clear();
  strikes_ = 0;
  for (Rule& rule : rules) rules_.push_back({std::move(rule), 0, 0});
}

int64_t FaultRules::strikes() const {
  absl::MutexLock lock(&mutex_);
  return strikes_;
}

absl::Status FaultRules::OnConnect(absl::string_view from,
                                   absl::string_view to) {
  absl::MutexLock lock(&mutex_);
  for (const Armed& armed : rules_) {
    const Rule& rule = armed.rule;
    // A cut that waits for frames lets the first connection through.
    if (rule.kind == Rule::Kind::kCut && Matches(rule.from, from) &&
        Matches(rule.to, to) && armed.seen >= rule.after) {
      return absl::UnavailableError("cut by a fault rule");
    }
  }
  return absl::OkStatus();
}

FrameFault FaultRules::OnSend(absl::string_view from, absl::string_view to,
                              uint64_t bucket, uint32_t frame) {
  absl::MutexLock lock(&mutex_);
  for (Armed& armed : rules_) {
    const Rule& rule = armed.rule;
    if (!Matches(rule.from, from) || !Matches(rule.to, to)) continue;
    if (rule.bucket >= 0 && static_cast<uint64_t>(rule.bucket) != bucket)
      continue;
    if (rule.frame >= 0 && static_cast<uint64_t>(rule.frame) != frame) continue;
    if (armed.seen < rule.after) {
      ++armed.seen;
      continue;
    }
    const bool forever = rule.count == 0 || rule.kind == Rule::Kind::kCut;
    if (!forever && armed.struck >= rule.count) continue;
    ++armed.struck;
    ++strikes_;
    FrameFault fault;
    switch (rule.kind) {
      case Rule::Kind::kDamage:
        fault.kind = FrameFault::Kind::kDamagePayload;
        break;
      case Rule::Kind::kDamageHeader:
        fault.kind = FrameFault::Kind::kDamageHeader;
        break;
      case Rule::Kind::kDrop:
      case Rule::Kind::kCut:
        fault.kind = FrameFault::Kind::kDrop;
        break;
      case Rule::Kind::kSilence:
        fault.kind = FrameFault::Kind::kSilence;
        break;
      case Rule::Kind::kDelay:
        fault.delay = rule.delay;
        break;
    }
    return fault;
  }
  return FrameFault();
}

}  // namespace transport
}  // namespace weightsync
