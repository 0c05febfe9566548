// What must hold in every history, whatever happens. It knows nothing of the
// coordinator's insides: it sees what lies in the journal, what engines
// generate with, and what trainers were told.

#ifndef WEIGHTSYNC_TESTS_CHAOS_SIMULATION_CHECKER_H_
#define WEIGHTSYNC_TESTS_CHAOS_SIMULATION_CHECKER_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "daemon/coordinator/journal_state.h"
#include "weightsync/internal/v1/journal.pb.h"

namespace weightsync {
namespace simulation {

// What a worker's live memory holds.
struct Memory {
  enum Kind { kOwn, kInstalled, kWriting, kNothing };
  Kind kind = kOwn;
  // INSTALLED: all of it. WRITING: what it is becoming.
  std::string update_id;
  int64_t version = 0;

  friend bool operator==(const Memory& a, const Memory& b) {
    return a.kind == b.kind && a.update_id == b.update_id;
  }
};
std::string Describe(const Memory& memory);

class Checker {
 public:
  // ---- The journal ----

  // `record` is on the disk now.
  void Journalled(const internal::v1::JournalRecord& record);
  bool Committed(const std::string& update_id) const {
    return commits_.count(update_id) != 0;
  }
  bool Ended(const std::string& update_id) const {
    return ends_.count(update_id) != 0;
  }
  // Updates that were accepted, oldest first.
  const std::vector<std::string>& opened() const { return opened_; }

  // ---- Engines ----

  // An operator was told that it stands still, or asked for its resume.
  void Held(const std::string& replica, bool held);
  // The cluster was adopted on another journal: what only the old one knew is
  // lost, and what was committed is what replicas have.
  void Adopted();
  // Another process: it may serve what it came with, and nothing older than
  // what the one before served.
  void Restarted(const std::string& replica);
  // The engine takes a step with these.
  // `removed`: it was resumed without the model.
  void Serves(const std::string& replica, const std::vector<Memory>& workers,
              bool removed);
  // A worker's process is about to write.
  void Writes(const std::string& replica, int worker, bool engine_runs,
              const std::string& update_id);

  // ---- What nodes and trainers are told ----

  void ToldEnd(const std::string& update_id, bool committed);
  // An Apply or a Resume is on its way to the replica.
  void TakenBack(const std::string& replica, const std::string& update_id);
  // WaitVersion's answer to somebody.
  void Outcome(const std::string& update_id, bool active);
  // PublishVersion's answer: taken, or the reason why not.
  void Answered(int rank, int64_t call, const std::string& update_id,
                const std::string& reason);

  // Anything else that was found.
  void Violation(std::string sentence);
  bool ok() const { return violations_.empty(); }
  const std::vector<std::string>& violations() const { return violations_; }

 private:
  std::vector<std::string> opened_;
  // When each was committed: 1 for the first.
  std::map<std::string, int> commits_;
  // The last removal of the model, in the same order; 0: there was none.
  int removal_ = 0;
  // Replicas that generate without the model, and might begin to.
  std::set<std::string> without_;
  std::map<std::string, bool> ends_;
  std::map<std::string, bool> outcomes_;
  std::map<std::string, int> served_;
  // Replicas that were started again and have served no update since.
  std::set<std::string> fresh_;
  std::set<std::string> held_;
  // STREAM: written before their commit.
  std::set<std::string> streamed_;
  // The update that a rollback holds; empty: none does.
  std::string rolled_back_to_;
  // What each replica was given under a rollback. It may serve that until it
  // has something newer: the release comes before the bytes. One that swaps
  // goes on with what it had until it flips.
  struct Taken {
    std::string update_id;
    bool served = false;
  };
  std::map<std::string, Taken> taken_back_;
  bool adopted_ = false;
  // Commits that an adopted journal does not know, and deleted ones.
  std::set<std::string> lost_;
  std::map<std::string, int64_t> floors_;
  std::map<std::string, bool> aborted_floor_;
  std::vector<std::string> violations_;
};

}  // namespace simulation
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_CHAOS_SIMULATION_CHECKER_H_
