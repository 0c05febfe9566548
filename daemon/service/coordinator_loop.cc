#include "daemon/service/coordinator_loop.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/types/variant.h"
#include "daemon/service/fault_point.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(100);

}  // namespace

absl::StatusOr<std::unique_ptr<CoordinatorLoop>> CoordinatorLoop::Start(
    CoordinatorOptions options, const std::string& state_dir,
    FaultPoint fault_point, JournalFiles* files) {
  absl::StatusOr<std::unique_ptr<Journal>> journal =
      Journal::Open(state_dir, absl::Now(), options.request_ttl, files);
  if (!journal.ok()) return journal.status();
  auto loop = absl::WrapUnique(new CoordinatorLoop(
      std::move(options), *std::move(journal), std::move(fault_point)));
  // Before anybody else can reach it, so that term and cluster_id are constant
  // from here on.
  absl::Notification started;
  CoordinatorLoop* self = loop.get();
  self->loop_.Post([self, &started] {
    self->Do(self->coordinator_.Start(self->Now()));
    self->cluster_id_ = self->coordinator_.cluster_id();
    self->term_ = self->coordinator_.term();
    self->loop_.PostAfter(kTick, [self] { self->Tick(); });
    started.Notify();
  });
  started.WaitForNotification();
  return loop;
}

CoordinatorLoop::CoordinatorLoop(CoordinatorOptions options,
                                 std::unique_ptr<Journal> journal,
                                 FaultPoint fault_point)
    : journal_(std::move(journal)),
      coordinator_(std::move(options), journal_->state()),
      fault_point_(std::move(fault_point)) {}

CoordinatorLoop::~CoordinatorLoop() { Stop(); }

std::string CoordinatorLoop::Connected(NodePeer peer) {
  std::string stream = absl::StrCat("s", next_stream_.fetch_add(1));
  loop_.Post(
      [this, stream, peer = std::move(peer)] { peers_.emplace(stream, peer); });
  return stream;
}

void CoordinatorLoop::Report(const std::string& stream, v1::NodeReport report) {
  loop_.Post([this, stream, report = std::move(report)] {
    // What a stream said after it was closed is not heard any more.
    if (peers_.count(stream) == 0) return;
    Do(coordinator_.OnReport(Now(), stream, report));
  });
}

void CoordinatorLoop::Disconnected(const std::string& stream) {
  loop_.Post([this, stream] {
    if (peers_.erase(stream) == 0) return;
    Do(coordinator_.OnDisconnected(Now(), stream));
  });
}

void CoordinatorLoop::Ask(Query query) {
  loop_.Post([this, query = std::move(query)] { query(coordinator_, Now()); });
}

void CoordinatorLoop::Prepare(
    v1::PrepareRequest request, absl::Time deadline,
    std::function<void(absl::StatusOr<v1::PrepareResponse>)> done) {
  loop_.Post([this, request = std::move(request), deadline,
              done = std::move(done)] {
    const int64_t id = next_prepare_++;
    PendingPrepare pending;
    pending.done = done;
    pending.timer = loop_.PostAt(deadline, [this, id] {
      FinishPrepare(
          id, ErrorStatus(
                  absl::StatusCode::kDeadlineExceeded, "PREPARE_TIMEOUT",
                  "the nodes were not ready before the deadline; look at their "
                  "states and call again"));
    });
    prepares_.emplace(id, std::move(pending));
    Do(coordinator_.OnPrepareRequest(Now(), id, request));
  });
}

void CoordinatorLoop::Change(
    AdminRequest request, absl::Time deadline,
    std::function<void(absl::StatusOr<AdminResponse>)> done) {
  loop_.Post([this, request = std::move(request), deadline,
              done = std::move(done)] {
    const int64_t id = next_change_++;
    PendingChange pending;
    pending.done = done;
    pending.timer = loop_.PostAt(deadline, [this, id] {
      FinishChange(
          id, ErrorStatus(absl::StatusCode::kDeadlineExceeded, "CALL_TIMEOUT",
                          "the coordinator did not come to an end with "
                          "this before the deadline; what was asked for "
                          "goes on"));
    });
    changes_.emplace(id, std::move(pending));
    Do(coordinator_.OnAdminRequest(Now(), id, request));
  });
}

CoordinatorLoop::WatcherId CoordinatorLoop::Watch(Watcher watcher) {
  const WatcherId id = next_watcher_.fetch_add(1);
  loop_.Post([this, id, watcher = std::move(watcher)] {
    watchers_.emplace(id, watcher);
  });
  return id;
}

void CoordinatorLoop::Unwatch(WatcherId id) {
  loop_.Post([this, id] { watchers_.erase(id); });
}

void CoordinatorLoop::Stop() {
  // What they hold (calls that wait) must not wait for this object's end.
  loop_.Post([this] {
    watchers_.clear();
    prepares_.clear();
    changes_.clear();
    peers_.clear();
  });
  loop_.Stop();
}

absl::Time CoordinatorLoop::Now() {
  // The coordinator's time never goes back, the wall clock may.
  now_ = std::max(now_, absl::Now());
  return now_;
}

void CoordinatorLoop::Tick() {
  // Timers run after what was queued before: a report that has arrived is never
  // missed here.
  Do(coordinator_.OnTick(Now()));
  Written(journal_->Tend(Now()));
  loop_.PostAfter(kTick, [this] { Tick(); });
}

void CoordinatorLoop::FinishPrepare(
    int64_t request, absl::StatusOr<v1::PrepareResponse> result) {
  auto it = prepares_.find(request);
  if (it == prepares_.end()) return;
  PendingPrepare pending = std::move(it->second);
  prepares_.erase(it);
  loop_.Cancel(pending.timer);
  pending.done(std::move(result));
}

void CoordinatorLoop::FinishChange(int64_t request,
                                   absl::StatusOr<AdminResponse> result) {
  auto it = changes_.find(request);
  if (it == changes_.end()) return;
  PendingChange pending = std::move(it->second);
  changes_.erase(it);
  loop_.Cancel(pending.timer);
  pending.done(std::move(result));
}

void CoordinatorLoop::Written(const absl::Status& status) {
  // Nobody may hear of what is not on the disk, and nothing is known about what
  // is: the next start finds out.
  if (!status.ok()) LOG(FATAL) << "the journal cannot be written: " << status;
}

void CoordinatorLoop::Do(Actions actions) {
  // All records of the batch at once: each sync takes milliseconds, and the
  // ranks of a publish bring one or two each. That one is on the disk before
  // what comes ahead of it was told harms nobody: who was to be told may have
  // been cut off as well.
  std::vector<const internal::v1::JournalRecord*> records;
  for (const Action& action : actions) {
    const auto* append = absl::get_if<JournalAppend>(&action);
    if (append == nullptr) continue;
    ReachFaultPoint(fault_point_, "coordinator:journal:", append->record);
    records.push_back(&append->record);
  }
  if (!records.empty()) Written(journal_->Append(records));
  for (Action& action : actions) {
    if (auto* send = absl::get_if<SendCommand>(&action)) {
      ReachFaultPoint(fault_point_, "coordinator:command:", send->command);
      auto peer = peers_.find(send->node_stream);
      if (peer != peers_.end()) peer->second.send(std::move(send->command));
    } else if (auto* close = absl::get_if<CloseNode>(&action)) {
      auto peer = peers_.find(close->node_stream);
      if (peer == peers_.end()) continue;
      NodePeer closing = std::move(peer->second);
      peers_.erase(peer);
      closing.close(FromFailure(close->failure));
    } else if (auto* append = absl::get_if<JournalAppend>(&action)) {
      ReachFaultPoint(fault_point_, "coordinator:journalled:", append->record);
    } else if (auto* change = absl::get_if<VersionChanged>(&action)) {
      // A watcher may end itself.
      std::vector<Watcher> watchers;
      for (const auto& watcher : watchers_) watchers.push_back(watcher.second);
      for (const Watcher& watcher : watchers) watcher(*change);
    } else if (auto* done = absl::get_if<PrepareDone>(&action)) {
      const absl::Status status = FromFailure(done->failure);
      if (status.ok()) {
        FinishPrepare(done->request, std::move(done->response));
      } else {
        FinishPrepare(done->request, status);
      }
    } else if (auto* call = absl::get_if<AdminDone>(&action)) {
      const absl::Status status = FromFailure(call->failure);
      if (status.ok()) {
        FinishChange(call->request, std::move(call->response));
      } else {
        FinishChange(call->request, status);
      }
    }
  }
}

}  // namespace daemon
}  // namespace weightsync
