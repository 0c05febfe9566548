// How often each thing happens in a history: the one table to change when the
// machines learn something new. Chances are in thousandths.

#ifndef WEIGHTSYNC_TESTS_CHAOS_SIMULATION_ODDS_H_
#define WEIGHTSYNC_TESTS_CHAOS_SIMULATION_ODDS_H_

namespace weightsync {
namespace simulation {

// A fault that the harness plants to see itself report it. The histories of a
// good coordinator have none.
enum class Planted {
  kNone,
  // The record of the commit reaches the disk after those who are told of it.
  kCommitAfterTelling,
  // The newest commit is missing from the journal that a coordinator finds.
  kCommitForgotten,
  // One worker of a replica with two never hears of an Apply, and somebody
  // answers for it.
  kMixedReplica,
  // A Pause is answered by somebody who did not pause the engine.
  kPauseNotDone,
  // Nobody looks at deadlines.
  kNoDeadlines,
  // The answer to one PublishVersion is thrown away.
  kAnswerLost,
  // One rank hears another outcome than the others.
  kTwoOutcomes,
  // Resumes are carried out with the weights of the update before.
  kOlderWeights,
  // What an operator holds paused is missing from the journal that a
  // coordinator finds.
  kHoldForgotten,
  // The end of a rollback is missing from it.
  kReleaseForgotten,
};

struct Odds {
  // ---- The cluster ----
  int second_replica = 800;
  int replica_over_two_nodes = 500;
  int two_workers = 700;
  int second_rank = 700;
  int trainer_beside_engines = 300;

  int atomic_swap = 150;
  int removable = 400;
  int own_disk = 100;  // one node does not see the disk of the others
  int pause_on_isolation = 200;

  // ---- What is published ----
  // Of all histories, those in which each version has options of its own; the
  // others take the defaults.
  int options = 600;
  // Then of each version:
  int rolling = 300;
  int stream = 200;
  int in_place = 250;
  int allow_no_recovery = 600;
  int latest = 300;
  int disk = 120;
  int network_or_disk = 200;
  int pause_none = 700;  // where engines can
  // The next version is published when this one was taken, not when it ended.
  int pipelined = 250;
  int named_versions = 300;  // else 0: the server gives the number
  int evict_stragglers = 400;
  int no_request_id = 100;

  // ---- Small troubles, each time ----
  int message_delayed = 15;  // up to two seconds instead of milliseconds
  int report_twice = 20;
  int command_twice = 20;
  int hook_slow = 20;  // up to half again of its deadline
  int hook_fails = 15;
  int apply_slow = 20;
  int apply_fails = 15;
  int move_fails = 20;
  int copy_fails = 8;
  int late_publish = 50;  // one rank comes seconds later
  int disk_slow = 20;
  int disk_fails = 15;

  // ---- Faults at a random moment; weights among each other ----
  int coordinator_crash = 30;
  // At one of its actions: between a record and the message after it, too.
  int coordinator_crash_at_action = 80;
  int coordinator_stop = 8;
  int journal_lost = 8;
  int node_crash = 30;
  int node_stop = 15;
  int engine_crash = 25;
  int engine_stop = 15;
  int worker_crash = 15;
  int worker_stop = 15;
  int rank_crash = 15;
  int rank_stop = 8;
  int link_break = 35;
  int link_cut = 15;
  int control_break = 15;
  int worker_break = 15;
  int evict = 10;
  int weights_dropped = 8;
  // Operators: each takes back what was done, after a while.
  int hold = 25;
  int rollback = 25;
  int drain = 10;
  int delete_version = 8;
  int remove_model = 15;
  int save_version = 10;
  int load_version = 10;

  // Whether an empty journal is adopted, or the lost one comes back.
  int adopt = 400;
  // What a coordinator that crashes inside a write leaves: half a record.
  int torn_tail = 300;
  // Its journal passes through the real file format on the way back.
  int journal_file = 200;
};

}  // namespace simulation
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_CHAOS_SIMULATION_ODDS_H_
