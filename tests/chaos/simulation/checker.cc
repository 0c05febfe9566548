#include "tests/chaos/simulation/checker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace simulation {

using internal::v1::JournalRecord;

std::string Describe(const Memory& memory) {
  switch (memory.kind) {
    case Memory::kOwn:
      return "its own";
    case Memory::kInstalled:
      return memory.update_id;
    case Memory::kWriting:
      return absl::StrCat("a mix with ", memory.update_id);
    case Memory::kNothing:
      return "nothing";
  }
  return "?";
}

namespace {

bool IsNumber(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isdigit(c);
  });
}

// Whether it says who is to blame: a node or a replica by the names that they
// have here (n0, r1), a rank or a worker by its number, or the update that was
// in the way.
bool NamesAParty(const v1::Failure& failure) {
  absl::string_view before;
  const std::string& text = failure.message();
  for (size_t i = 0; i < text.size();) {
    size_t end = i;
    while (end < text.size() && absl::ascii_isalnum(text[end])) ++end;
    const absl::string_view word(text.data() + i, end - i);
    const bool named =
        (word.size() > 1 && (word[0] == 'n' || word[0] == 'r') &&
         IsNumber(word.substr(1))) ||
        (IsNumber(word) &&
         (before == "rank" || before == "worker" ||
          (before == "version" && failure.reason() == "QUEUE_TIMEOUT")));
    if (named) return true;
    if (!word.empty()) before = word;
    i = end + 1;
  }
  return false;
}

}  // namespace

void Checker::Violation(std::string sentence) {
  if (violations_.size() < 16) violations_.push_back(std::move(sentence));
}

void Checker::Journalled(const JournalRecord& record) {
  switch (record.record_case()) {
    case JournalRecord::kUpdateOpened: {
      const auto& opened = record.update_opened();
      const std::string& model = opened.model();
      if (adopted_ && std::find(opened_.begin(), opened_.end(),
                                opened.update_id()) != opened_.end()) {
        // Learnt from a node that has it.
        floors_[model] = std::max(floors_[model], opened.version());
        aborted_floor_[model] = false;
        return;
      }
      if (opened.version() < floors_[model] ||
          (opened.version() == floors_[model] && !aborted_floor_[model])) {
        Violation(absl::StrCat("version ", opened.version(),
                               " was given out again, the floor is ",
                               floors_[model]));
      }
      if (std::find(opened_.begin(), opened_.end(), opened.update_id()) !=
          opened_.end()) {
        Violation(absl::StrCat(opened.update_id(), " was opened twice"));
      }
      floors_[model] = opened.version();
      aborted_floor_[model] = false;
      opened_.push_back(opened.update_id());
      return;
    }
    case JournalRecord::kUpdateCommitted: {
      const std::string& id = record.update_committed().update_id();
      auto ended = ends_.find(id);
      if (ended != ends_.end() && !ended->second) {
        Violation(absl::StrCat(id, " was committed after it was aborted"));
      }
      // One that waits behind another is open beside it; commits keep the
      // order.
      const auto after = std::find(opened_.begin(), opened_.end(), id);
      for (auto newer = after; newer != opened_.end(); ++newer) {
        if (*newer != id && Committed(*newer) && !Committed(id)) {
          Violation(absl::StrCat(id, " was committed after a newer update, ",
                                 *newer, ", was"));
        }
      }
      commits_.emplace(id, static_cast<int>(commits_.size()) + 1);
      lost_.erase(id);
      return;
    }
    case JournalRecord::kUpdateEnded: {
      const auto& end = record.update_ended();
      const std::string& id = end.update_id();
      const bool active = end.active() || end.lost();
      if (!active && Committed(id)) {
        Violation(absl::StrCat(
            id, end.superseded() ? " was superseded" : " was aborted",
            " after its commit: ", end.failure().message()));
      }
      if (!active && !end.superseded() && !NamesAParty(end.failure())) {
        Violation(absl::StrCat(
            id, " was aborted and nobody is named: ", end.failure().reason(),
            ": ", end.failure().message()));
      }
      if (end.active() && !Committed(id)) {
        Violation(absl::StrCat(id, " ended well and was never committed"));
      }
      ends_.emplace(id, active);
      if (!active && !opened_.empty() && opened_.back() == id) {
        aborted_floor_[end.model()] = true;
      }
      return;
    }
    case JournalRecord::kVersionDeleted:
      // Nodes that were away are told so when they come back with it.
      lost_.insert(record.version_deleted().update_id());
      return;
    case JournalRecord::kModelRemoved:
      // As if nothing had been committed; what nodes have of it is dropped.
      for (const auto& commit : commits_) lost_.insert(commit.first);
      removal_ = static_cast<int>(commits_.size()) + 1;
      commits_.emplace(absl::StrCat("removal ", removal_), removal_);
      rolled_back_to_.clear();
      return;
    case JournalRecord::kStreamBegun:
      streamed_.insert(record.stream_begun().update_id());
      return;
    case JournalRecord::kHoldPlaced:
      if (!record.hold_placed().update_id().empty()) {
        rolled_back_to_ = record.hold_placed().update_id();
      }
      return;
    case JournalRecord::kHoldReleased:
      if (record.hold_released().replica().empty()) rolled_back_to_.clear();
      return;
    default:
      return;
  }
}

void Checker::Adopted() {
  adopted_ = true;
  for (const auto& commit : commits_) lost_.insert(commit.first);
  floors_.clear();
  aborted_floor_.clear();
  held_.clear();
  rolled_back_to_.clear();
  // What nodes have is right again, also of what was removed.
  if (removal_ != 0) {
    for (auto& served : served_) {
      if (served.second >= removal_) served.second = 0;
    }
  }
  // What they served may be lost.
  for (const std::string& replica : fresh_) served_[replica] = 0;
}

void Checker::Held(const std::string& replica, bool held) {
  if (held) {
    held_.insert(replica);
  } else {
    held_.erase(replica);
  }
}

void Checker::Restarted(const std::string& replica) {
  fresh_.insert(replica);
  if (adopted_) served_[replica] = 0;
  without_.erase(replica);
  // It comes up running, and is asked to pause.
  held_.erase(replica);
}

void Checker::Serves(const std::string& replica,
                     const std::vector<Memory>& workers, bool removed) {
  for (const Memory& worker : workers) {
    if (worker.kind == Memory::kWriting ||
        (worker.kind == Memory::kNothing) != removed ||
        !(worker == workers[0])) {
      std::string sentence = absl::StrCat(replica, " generates with a mix:");
      for (const Memory& each : workers) {
        absl::StrAppend(&sentence, " [", Describe(each), "]");
      }
      return Violation(std::move(sentence));
    }
  }
  if (held_.count(replica) != 0) {
    Violation(absl::StrCat(replica,
                           " generates although an operator holds it paused"));
  }
  int order = 0;
  if (workers[0].kind == Memory::kInstalled) {
    auto commit = commits_.find(workers[0].update_id);
    if (commit == commits_.end()) {
      return Violation(absl::StrCat(replica, " generates with ",
                                    workers[0].update_id,
                                    ", which was never committed"));
    }
    order = commit->second;
  }
  if (removed) {
    // It may when nobody has ever committed anything, too.
    if (removal_ == 0 && !commits_.empty() && without_.count(replica) == 0) {
      return Violation(absl::StrCat(
          replica, " generates without the model, which nobody removed"));
    }
    order = removal_;
    without_.insert(replica);
  } else {
    without_.erase(replica);
  }
  if (workers[0].kind == Memory::kOwn && fresh_.count(replica) != 0) return;
  fresh_.erase(replica);
  int& before = served_[replica];
  const bool rolled_back =
      !rolled_back_to_.empty() && order >= commits_[rolled_back_to_];
  const auto back = taken_back_.find(replica);
  const bool taken_back = back != taken_back_.end() &&
                          back->second.update_id == workers[0].update_id;
  if (order < before && !rolled_back && !taken_back) {
    Violation(absl::StrCat(replica, " generates with ", Describe(workers[0]),
                           ", older than what it served before"));
  }
  if (taken_back) {
    back->second.served = true;
  } else if (back != taken_back_.end() &&
             order > commits_[back->second.update_id] &&
             (back->second.served || order != before)) {
    taken_back_.erase(back);
  }
  before = order;
}

void Checker::Writes(const std::string& replica, int worker, bool engine_runs,
                     const std::string& update_id) {
  if (engine_runs) {
    Violation(absl::StrCat("worker ", worker, " of ", replica, " writes ",
                           update_id, " while the engine generates"));
  }
  if (!Committed(update_id) && streamed_.count(update_id) == 0) {
    Violation(absl::StrCat("worker ", worker, " of ", replica, " writes ",
                           update_id, ", which is not committed"));
  }
}

void Checker::TakenBack(const std::string& replica,
                        const std::string& update_id) {
  if (!rolled_back_to_.empty() && Committed(update_id) &&
      commits_[update_id] >= commits_[rolled_back_to_]) {
    taken_back_[replica] = Taken{update_id, false};
  }
}

void Checker::ToldEnd(const std::string& update_id, bool committed) {
  // What only a lost journal knew to be committed, and no replica had when the
  // cluster was adopted, is given up.
  if (!committed && lost_.count(update_id) != 0) return;
  if (committed != Committed(update_id)) {
    Violation(absl::StrCat(
        "a node was told that ", update_id,
        committed ? " is committed, and it is not in the journal"
                  : " was given up, and it is committed in the journal"));
  }
}

void Checker::Outcome(const std::string& update_id, bool active) {
  if (active && !Committed(update_id)) {
    Violation(absl::StrCat("a rank was told that ", update_id,
                           " is active; it was never committed"));
  }
  const auto told = outcomes_.emplace(update_id, active);
  if (told.first->second != active) {
    Violation(absl::StrCat("ranks were told two outcomes of ", update_id));
  }
}

void Checker::Answered(int rank, int64_t call, const std::string& update_id,
                       const std::string& reason) {
  if (update_id.empty() && reason.empty()) {
    Violation(absl::StrCat("call ", call, " of rank ", rank,
                           " failed without a reason"));
  }
}

}  // namespace simulation
}  // namespace weightsync
