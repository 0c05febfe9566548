// A cluster that exists in this process alone: the real Coordinator, and beside
// it nodes, engines, workers, trainer ranks, a network, disks and a clock that
// are simulated, all of them from one seed.
//
// What is simulated does what the real parts do, where it matters for who may
// believe what:
//   - a stream is ordered and breaks: both ends notice on their own, what was
//     on its way is lost or not; streams do not wait for each other;
//   - a node (daemon/service) forwards commands, remembers the last word of its
//     replicas and workers, claims everything anew after each Welcome, and ends
//     leases of those who are silent;
//   - a replica and a worker (client/) work on a queue of their own that
//     outlives nothing but the stream it came from: what runs when a stream
//     ends runs on. A worker is WRITING before its first byte;
//   - a process dies (nothing of it is left), or stops and goes on later.
// The journal is what was appended before the coordinator died.
//
// Time is in microseconds from the beginning of the history.

#ifndef WEIGHTSYNC_TESTS_CHAOS_SIMULATION_WORLD_H_
#define WEIGHTSYNC_TESTS_CHAOS_SIMULATION_WORLD_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/journal_state.h"
#include "daemon/node/away.h"
#include "tests/chaos/simulation/checker.h"
#include "tests/chaos/simulation/odds.h"
#include "tests/chaos/simulation/random.h"
#include "tests/chaos/simulation/task.h"

namespace weightsync {
namespace simulation {

using Time = int64_t;
inline constexpr Time kNever = INT64_MAX;
inline constexpr Time kMillisecond = 1000;
inline constexpr Time kSecond = 1000000;

struct Outcome {
  // Empty: everything held.
  std::vector<std::string> violations;
  int64_t events = 0;
  int commits = 0;
  int aborts = 0;
  // After the last fault was over, until a new version was everywhere.
  Time recovery = 0;
  // By name, and by the state of the newest update at that moment.
  std::map<std::string, std::map<std::string, int>> faults;
};

class World {
 public:
  // `trace`: null for silence.
  World(uint64_t seed, const Odds& odds, Planted planted, std::ostream* trace);
  ~World();

  // From the first registration to the end of the history.
  Outcome Run();

 private:
  struct Process {
    bool up = false;
    // Grows with each death: what was meant for an earlier life is dropped.
    int life = 0;
    Time stopped_until = 0;
  };

  // Between a node and the coordinator.
  struct Link {
    int id = 0;
    std::string name;
    int node = 0;
    bool node_open = false;
    bool coordinator_open = false;
    // Nothing more gets through, in either direction.
    bool cut = false;
    bool drop_up = false;
    bool drop_down = false;
    bool welcomed = false;
    Time last_up = 0;
    Time last_down = 0;
    Time last_heard = 0;
  };

  // A worker of a node, in one of its registrations.
  struct Member {
    int engine = 0;
    int worker = 0;
    int64_t generation = 0;
  };

  struct NodeUpdate {
    v1::Epoch epoch;
    int64_t version = 0;
    bool stream = false;
    bool in_place = false;
    bool snapshot = false;  // a rank's bytes are in the store
    bool receiver = false;
    // STREAM: who takes part.
    std::vector<Member> members;
    bool begun = false;
    // IN_PLACE: calls that return when the bytes are elsewhere.
    std::vector<std::pair<int, int64_t>> unreleased;
    std::vector<std::string> peers;
    bool prepared = false;
    bool moving = false;
    bool manifest = false;
    bool whole = false;
    bool kept = false;
    bool fetched = false;  // it was asked for after its end
    // By way of disk.
    bool disk = false;
    bool load = false;  // no rank has it
    bool loaded = false;
    std::string checkpoint;
    int64_t order = 0;
  };

  // A checkpoint, under its temporary name or complete.
  struct Directory {
    std::string marker;
    std::string update_id;
    // Written so far.
    std::set<int> buckets;
    bool complete = false;
    bool of_update = false;
    int64_t version = 0;
  };

  // What a node does with one, by its temporary name.
  struct CheckpointJob {
    int64_t number = 0;
    bool made = false;
  };

  struct Ask {
    enum Kind { kClaim, kShards, kControl, kWorker, kPublish };
    Kind kind = kClaim;
    int who = 0;  // rank or engine
    int worker = 0;
    int64_t generation = 0;
  };

  struct Node : Process {
    std::string name;
    std::string incarnation;
    std::string cluster_id;
    int64_t newest_term = 0;
    std::shared_ptr<Link> link;
    int64_t dials = 0;
    Time cut_until = 0;
    std::map<int64_t, Ask> asks;
    std::map<std::string, NodeUpdate> updates;
    std::set<std::string> ended;
    // By model, as LayoutBook keeps them: oldest first.
    std::map<std::string, std::deque<std::string>> layouts;
    std::set<std::string> pinned;
    // Since when the coordinator is away; kNever: it is not.
    Time away_since = 0;
    std::map<int, v1::RankSnapshotted> snapshots;
    // Of the loop that works on layouts and bytes, in order.
    Time last_data = 0;
    // It does not see the disk that the others share.
    bool own_disk = false;
    std::map<std::string, CheckpointJob> checkpoint_jobs;
    std::set<std::string> checkpoint_commands;
    std::map<std::string, v1::CheckpointWritten> checkpoint_answers;
    // On its disk: what it had begun to write.
    std::set<std::string> leftovers;
    int64_t losses = 0;
  };

  // As it was sent; who has it keeps it.
  using Apply = std::shared_ptr<const v1::ApplyWorker>;

  // What a worker's library does one after the other.
  struct Job {
    enum Kind { kApply, kStream, kEndStream, kRemove };
    Kind kind = kApply;
    Apply apply;
    bool complete = false;
  };

  struct Worker : Process {
    int node = 0;
    Memory memory;
    // What the engine generates with: the same, or what it was at the last
    // resume where the worker swaps.
    Memory served;
    // Where it swaps: which of its two sets of tensors holds `memory`, and
    // which one the engine generates with. The other than the first is written
    // next.
    int set = 0;
    int served_set = 0;
    bool busy = false;
    std::deque<Job> queue;
    // The update that it takes bucket by bucket, and whether it has them all.
    std::string streaming;
    bool streamed = false;
    // Of the stream between it and its node's daemon.
    int64_t generation = 0;
    bool open = false;
    Time last_down = 0;
    Time last_up = 0;
    // What the daemon knows.
    bool accepted = false;
    Memory told;
    std::string command_id;
    std::string command_update;
    // The stream that it was told of and has not answered.
    std::string stream_told;
  };

  struct EngineCommand {
    bool pause = false;
    // PAUSE_MODE_NONE: it goes on.
    bool none = false;
    // Go on without the model.
    bool removed = false;
    std::string command_id;
    std::string update_id;
  };

  struct Engine : Process {
    std::string name;
    std::string incarnation;
    int node = 0;
    std::vector<Worker> workers;
    // The truth.
    bool running = false;
    // The client library's.
    enum Word { kRunning, kPaused, kUnsure };
    Word word = kRunning;
    std::string running_update;
    bool running_removed = false;
    // Answers by command, and whether they were failures.
    std::map<std::string, bool> answers;
    std::deque<EngineCommand> queue;
    bool busy = false;
    int64_t generation = 0;
    bool open = false;
    Time last_down = 0;
    Time last_up = 0;
    // The daemon's.
    bool accepted = false;
    bool told_paused = false;
    v1::PauseReplicaCommand offer;
    Apply commit;
    std::string own_command;
    bool isolation_hold = false;
    bool resumed_itself = false;
    // On the node's disk.
    std::vector<std::string> refused;
    // kOlderWeights.
    Memory older;
  };

  struct Rank : Process {
    int node = 0;
    // Of the daemon: empty, or the session that it holds.
    std::string session;
    bool claimed = false;
    bool registered = false;
    int64_t publish_index = 0;
    // The program's.
    enum State { kIdle, kCalling, kWaiting, kDone };
    State state = kIdle;
    int64_t call = 0;
    std::string request_id;
    Time called = 0;
    std::string update_id;
    bool active = false;
    // Its call was answered with an update, whatever becomes of that.
    bool taken = false;
    int tries = 0;  // in this round
  };

  // ---- world.cc: time, the network, the job ----
  template <typename F>
  void At(Time at, F&& what) {
    Enter(at, nullptr, std::forward<F>(what));
  }
  template <typename F>
  void After(Time delay, F&& what) {
    Enter(now_ + delay, nullptr, std::forward<F>(what));
  }
  // Done by a process: not if it has died meanwhile, later if it stands still.
  template <typename F>
  void By(Process* process, Time delay, F&& what) {
    Enter(now_ + delay, process, std::forward<F>(what));
  }
  absl::Time Clock() const;
  Time Delay();
  // Within one machine: from now until the next message on an ordered stream
  // arrives. `last`: when the one before does.
  Time LocalDelay(Time* last);
  void Build();
  void Round();
  void DrawOptions();
  void CheckRound();
  // Nothing is wrong with anything any more.
  bool Healed() const;
  // All that should serve serves this.
  bool Everywhere(const std::string& update_id) const;
  void SayWhatWaits();

  // ---- coordinator_host.cc ----
  void StartCoordinator(bool impostor);
  void CrashCoordinator(Time restart_after);
  void Execute(daemon::Actions actions);
  void Append(internal::v1::JournalRecord record);
  void Deliver(const std::shared_ptr<Link>& link, v1::NodeCommand command);
  void CoordinatorTick(int life);
  daemon::JournalState FoundJournal();
  // kMixedReplica, kPauseNotDone: true when it was taken care of.
  bool Forge(const daemon::SendCommand& send);

  // ---- node.cc ----
  void Dial(int node);
  void Break(std::shared_ptr<Link> link);
  void LinkClosed(int node, std::shared_ptr<Link> link);
  void Report(int node, v1::NodeReport report, bool once = false);
  int64_t AskCoordinator(int node, v1::NodeReport report, Ask ask);
  void NodeBeat(int node, int life);
  void OnCommand(int node, const std::shared_ptr<Link>& link,
                 const v1::NodeCommand& command);
  void OnWelcome(int node, const v1::Welcome& welcome);
  void OnReply(int node, const v1::Reply& reply);
  void OnPrepare(int node, const v1::PrepareUpdate& prepare);
  void TryMove(int node, const std::string& update_id);
  void OnEnd(int node, const v1::EndUpdate& end);
  void OnApply(int node, const Apply& apply);
  void OnRemove(int node, const v1::RemoveWorker& remove);
  // It is to be done from now on, and given up after a while.
  void StartApply(int engine, int worker, const Apply& apply);
  void Abandon(int node);
  void Evict(int node, const std::string& update_id);
  void StartNode(int node);
  void CrashNode(int node);

  // ---- engine.cc ----
  void StartEngine(int engine);
  void CrashEngine(int engine);
  void ConnectControl(int engine);
  void EndControl(int engine, bool client_sees);
  void JoinControl(int engine);
  void EngineWork(int engine);
  void AnswerEngine(int engine, int64_t generation,
                    const EngineCommand& command, bool failed);
  void ConnectWorker(int engine, int worker);
  void EndWorker(int engine, int worker, bool client_sees);
  void JoinWorker(int engine, int worker);
  void WorkerWork(int engine, int worker);
  void ReportApplied(int engine, int worker, const Apply& apply,
                     const std::string& reason, int64_t generation);
  void ApplyRefused(const v1::ApplyWorker& apply, const std::string& reason,
                    const Memory* told);
  const Memory& Served(const Worker& worker) const {
    return atomic_swap_ ? worker.served : worker.memory;
  }
  // It is about to write live memory, or the set that is its turn.
  void Writes(const Engine& engine, int worker, const std::string& update_id);
  // What it has written is whole.
  void Installs(Worker* worker, Memory memory);
  // The engine may take a step: it is looked at.
  void Serve(int engine);
  static v1::InstalledState ToProto(const Memory& memory);
  // A node's word for a worker: its own, but WRITING while an Apply that it has
  // not answered may be about to write.
  static Memory Believed(const Worker& worker);

  // ---- streams.cc: STREAM and IN_PLACE on nodes and workers ----
  void BeginStream(int node, const v1::MoveUpdate& move);
  // Whether all who take part have all; those who have gone take no part.
  bool StreamTaken(int node, NodeUpdate* update);
  void AbortStream(int node, const std::string& update_id);
  void Send(int engine, int worker, int64_t generation, Job job);
  void StreamWork(int engine, int worker, const Job& job);
  void RemoveWork(int engine, int worker, const Job& job);
  void Release(int node, const std::string& update_id,
               const std::string& reason);

  // ---- disk.cc ----
  std::map<std::string, Directory>& DiskOf(int node);
  bool Sees(int node, const v1::Checkpoint& checkpoint);
  void AnswerCheckpoint(int node, const std::string& command_id,
                        const std::string& reason);
  // True: it is being done, or the answer has been given again.
  bool AnsweredBefore(int node, const std::string& command_id);
  Time DiskTime();
  void OnWriteCheckpoint(int node, const v1::WriteCheckpoint& command);
  bool HasJob(int node, const std::string& temporary, int64_t number);
  // Why not; empty: it is done.
  std::string WriteCheckpoint(int node, const v1::WriteCheckpoint& command);
  std::string CompleteCheckpoint(int node,
                                 const v1::CompleteCheckpoint& command);
  void OnCompleteCheckpoint(int node, const v1::CompleteCheckpoint& command);
  void OnPrune(int node, const v1::PruneCheckpoints& command);
  void OnReadCheckpoint(int node, const v1::ReadCheckpoint& command);
  void GiveUpJob(int node, const std::string& temporary);
  void GiveUpJobs(int node);
  // Of the process before.
  void RemoveLeftovers(int node);
  // Why it cannot be read; empty: it was.
  std::string ReadDisk(int node, const NodeUpdate& update,
                       const std::string& update_id);

  // ---- away.cc: what a node does while the coordinator is away ----
  void CheckAway(int node);
  void ResumeItself(int engine, const std::string& command_id,
                    const Memory& memory);
  void Relay(int engine, const EngineCommand& command);

  // ---- operators.cc ----
  // `done` is told the answer, or that the coordinator could not be reached.
  void Admin(daemon::AdminRequest call, std::function<void(bool)> done);
  void AdminDone(int64_t request, bool ok);
  // Until it is done.
  void Insist(daemon::AdminRequest call, std::function<void()> done);
  void HoldByHand();
  void RollBack();
  void DrainNode();
  void DeleteVersion();
  void RemoveModel(int tries);
  void SaveVersion();
  void LoadVersion();
  void Adopt();

  // ---- trainer.cc ----
  void StartRank(int rank);
  void CrashRank(int rank);
  void OpenSession(int rank);
  void ClaimRank(int rank);
  void EndSession(int rank);
  void Call(int rank);
  void SendCall(int rank);
  void OnOpened(int rank, const v1::Reply& reply);
  void Answer(int rank, const std::string& update_id,
              const std::string& reason);
  void Poll(int rank, int64_t call);
  // Of somebody who does not wait for it to go on.
  void PollAside(int rank, const std::string& update_id);
  // The outcome of an update, where there is one yet.
  absl::StatusOr<bool> OutcomeOf(int rank, const std::string& update_id);
  void Done(int rank, bool active);

  // ---- faults.cc ----
  void PlanFaults();
  void Inject(const std::string& kind);
  // What a fault hits: the state of the newest update, as people call it.
  std::string StateNow() const;
  void Stop(Process* process, Time duration);
  // How long something that died is away. Disturbs for as long.
  Time Downtime();
  // Something will not be as it should be for so long from now.
  void Disturbed(Time duration);

  template <typename... Args>
  void Trace(const Args&... args) {
    if (trace_ == nullptr) return;
    TraceTime();
    (void)std::initializer_list<int>{((*trace_ << args), 0)...};
    *trace_ << "\n";
  }
  void TraceTime();

  const Odds odds_;
  const Planted planted_;
  std::ostream* const trace_;
  Random random_;
  Checker checker_;
  Outcome outcome_;

  // What is to happen lies still in `tasks_`; the heap has only where.
  struct Event {
    Time at;
    int64_t number;
    int slot;
  };
  struct Slot {
    // Whose doing it is, in which of its lives; null: nobody's.
    Process* process = nullptr;
    int life = 0;
    Task task;
  };
  static bool Later(const Event& a, const Event& b) {
    return a.at != b.at ? a.at > b.at : a.number > b.number;
  }
  template <typename F>
  void Enter(Time at, Process* process, F&& what) {
    if (free_slots_.empty()) {
      free_slots_.push_back(static_cast<int>(slots_.size()));
      slots_.emplace_back();
    }
    const int index = free_slots_.back();
    free_slots_.pop_back();
    Slot& slot = slots_[static_cast<size_t>(index)];
    slot.process = process;
    slot.life = process == nullptr ? 0 : process->life;
    slot.task.Set(std::forward<F>(what));
    PushEvent(at, event_number_++, index);
  }
  void PushEvent(Time at, int64_t number, int slot);
  // The next event, at its time.
  void DoNext();
  std::vector<Event> events_;
  std::deque<Slot> slots_;
  std::vector<int> free_slots_;
  int64_t event_number_ = 0;
  Time now_ = 0;
  bool over_ = false;

  daemon::CoordinatorOptions options_;
  Process host_;
  std::unique_ptr<daemon::Coordinator> coordinator_;
  bool impostor_ = false;
  daemon::JournalState durable_;
  std::vector<internal::v1::JournalRecord> records_;
  // The same of an impostor: what counts from its adoption on.
  daemon::JournalState impostor_durable_;
  std::vector<internal::v1::JournalRecord> impostor_records_;
  std::map<int64_t, std::function<void(bool)>> admin_;
  // Operators who have not taken back yet what they did.
  int operators_ = 0;
  std::set<std::string> held_by_hand_;
  // An operator's calls come in order.
  Time last_admin_ = 0;
  int64_t crash_at_action_ = -1;
  bool torn_ = false;
  bool planted_once_ = false;

  std::vector<Node> nodes_;
  // By path. The first is the one that nodes share.
  std::map<int, std::map<std::string, Directory>> disks_;
  std::vector<Engine> engines_;
  std::vector<Rank> ranks_;
  std::map<std::string, std::shared_ptr<Link>> links_;
  int64_t next_id_ = 1;
  int64_t next_link_ = 1;
  int64_t next_correlation_ = 1;
  int64_t next_generation_ = 1;
  int64_t next_call_ = 1;
  int64_t next_order_ = 1;
  int64_t next_admin_ = 1;

  // Faults, and what they began, are over from here on.
  Time quiet_ = 0;
  // When every replica that can serve must.
  Time give_up_ = 0;
  int round_ = 0;
  int64_t round_version_ = 0;
  bool named_versions_ = false;
  bool evict_stragglers_ = false;
  bool draw_options_ = false;
  bool pipelined_ = false;
  bool atomic_swap_ = false;
  bool pause_on_isolation_ = false;
  bool removable_ = false;
  v1::UpdateOptions round_options_;
  // Which nodes receive under a layout, as bits.
  std::map<std::string, unsigned> receivers_;
  // How many buckets a layout has, as far as anybody was told to write them.
  std::map<std::string, size_t> buckets_;
  bool request_ids_ = true;
  // The update that has to be everywhere by `settle_by_`.
  std::string final_update_;
  Time settle_by_ = 0;
};

}  // namespace simulation
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_CHAOS_SIMULATION_WORLD_H_
