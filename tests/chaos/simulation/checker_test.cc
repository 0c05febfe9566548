// The checker of random histories finds what that of chaos runs finds
// (tests/python/chaos_test.py reads the same cases).

#include "tests/chaos/simulation/checker.h"

#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace weightsync {
namespace simulation {
namespace {

using internal::v1::JournalRecord;
using nlohmann::json;

const char kModel[] = "models/m";

json Cases() {
  std::ifstream file("tests/chaos/checker_cases.json");
  return json::parse(file);
}

// What each kind's sentences say.
const std::map<std::string, std::string>& Sentences() {
  static const auto* sentences = new std::map<std::string, std::string>{
      {"MIXED", "generates with a mix"},
      {"UNCOMMITTED", "which was never committed"},
      {"EARLY", "which is not committed"},
      {"OLDER", "older than what it served before"},
      {"HELD", "although an operator holds it paused"},
      {"WROTE_WHILE_SERVING", "while the engine generates"},
      {"UNDONE", "was aborted after its commit"},
  };
  return *sentences;
}

Memory MemoryOf(const std::string& word) {
  if (word == "own") return Memory{Memory::kOwn, "", 0};
  if (word == "torn") return Memory{Memory::kWriting, "u", 0};
  return Memory{Memory::kInstalled, word, 0};
}

std::vector<std::string> Found(const json& events) {
  Checker checker;
  // The engine begins paused, as one that registers does.
  bool runs = false;
  std::string rolled_back_to;
  for (const json& event : events) {
    const std::string what = event[0];
    JournalRecord record;
    if (what == "open") {
      auto* opened = record.mutable_update_opened();
      opened->set_model(kModel);
      opened->set_update_id(event[1].get<std::string>());
      opened->set_version(event[2].get<int64_t>());
      checker.Journalled(record);
    } else if (what == "commit") {
      auto* committed = record.mutable_update_committed();
      committed->set_model(kModel);
      committed->set_update_id(event[1].get<std::string>());
      checker.Journalled(record);
    } else if (what == "abort") {
      auto* ended = record.mutable_update_ended();
      ended->set_model(kModel);
      ended->set_update_id(event[1].get<std::string>());
      ended->mutable_failure()->set_message("rank 0 has gone");
      checker.Journalled(record);
    } else if (what == "rollback") {
      rolled_back_to = event[1].get<std::string>();
      auto* hold = record.mutable_hold_placed();
      hold->set_model(kModel);
      hold->set_update_id(rolled_back_to);
      checker.Journalled(record);
      checker.TakenBack("r", rolled_back_to);
    } else if (what == "release") {
      record.mutable_hold_released()->set_model(kModel);
      checker.Journalled(record);
    } else if (what == "write") {
      checker.Writes("r", event[1].get<int>(), runs,
                     event[2].get<std::string>());
    } else if (what == "serve") {
      checker.Serves("r",
                     {MemoryOf(event[1].get<std::string>()),
                      MemoryOf(event[2].get<std::string>())},
                     /*removed=*/false);
    } else if (what == "pause" || what == "resume") {
      runs = what == "resume";
    } else if (what == "hold" || what == "unhold") {
      checker.Held("r", what == "hold");
    } else if (what == "restart") {
      checker.Restarted("r");
      runs = true;
    } else {
      ADD_FAILURE() << what;
    }
  }
  std::vector<std::string> found;
  for (const std::string& violation : checker.violations()) {
    std::string kind = violation;
    for (const auto& sentence : Sentences()) {
      if (absl::StrContains(violation, sentence.second)) kind = sentence.first;
    }
    found.push_back(kind);
  }
  return found;
}

TEST(CheckerCases, AreJudgedAlike) {
  const json cases = Cases();
  ASSERT_GT(cases.size(), 15u);
  for (const json& entry : cases) {
    EXPECT_EQ(Found(entry["events"]),
              entry["finds"].get<std::vector<std::string>>())
        << entry["name"];
  }
}

}  // namespace
}  // namespace simulation
}  // namespace weightsync
