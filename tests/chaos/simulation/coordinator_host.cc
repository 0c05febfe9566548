// The process around the coordinator: it carries actions out, in order, and can
// die between any two of them.

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/journal.h"
#include "tests/chaos/simulation/world.h"

namespace weightsync {
namespace simulation {

using daemon::JournalState;
using internal::v1::JournalRecord;

namespace {

std::string NameOf(const v1::NodeCommand& command) {
  const auto* field = v1::NodeCommand::descriptor()->FindFieldByNumber(
      static_cast<int>(command.command_case()));
  return field == nullptr ? "none" : field->name();
}

// Some updates: it is written anew while it is used.
constexpr int64_t kGrownJournal = 4096;

// A disk with the files that Journal writes.
class Disk : public daemon::JournalFiles {
 public:
  std::map<std::string, std::shared_ptr<std::string>> files;

  absl::StatusOr<std::string> Read(const std::string& path, int64_t offset,
                                   int64_t size) override {
    auto it = files.find(path);
    if (it == files.end()) return absl::NotFoundError(path);
    const auto at = std::min(static_cast<size_t>(offset), it->second->size());
    return it->second->substr(at, static_cast<size_t>(size));
  }
  absl::StatusOr<std::unique_ptr<daemon::JournalFile>> Create(
      const std::string& path) override {
    class File : public daemon::JournalFile {
     public:
      explicit File(std::shared_ptr<std::string> content)
          : content_(std::move(content)) {}
      absl::Status Append(absl::string_view data) override {
        content_->append(data.data(), data.size());
        return absl::OkStatus();
      }
      absl::Status Sync() override { return absl::OkStatus(); }

     private:
      const std::shared_ptr<std::string> content_;
    };
    auto content = std::make_shared<std::string>();
    files[path] = content;
    return std::unique_ptr<daemon::JournalFile>(new File(std::move(content)));
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    files[to] = files[from];
    files.erase(from);
    return absl::OkStatus();
  }
  absl::Status SyncDirectory(const std::string&) override {
    return absl::OkStatus();
  }
  absl::StatusOr<std::shared_ptr<void>> Lock(const std::string&) override {
    return std::shared_ptr<void>(std::make_shared<int>(0));
  }
};

}  // namespace

JournalState World::FoundJournal() {
  if (planted_ == Planted::kCommitForgotten && records_.size() > 1) {
    JournalState state;
    for (const JournalRecord& record : records_) {
      if (record.record_case() != JournalRecord::kUpdateCommitted &&
          !(record.record_case() == JournalRecord::kUpdateEnded &&
            record.update_ended().active())) {
        daemon::ApplyRecord(record, &state);
      }
    }
    return state;
  }
  if ((planted_ == Planted::kHoldForgotten ||
       planted_ == Planted::kReleaseForgotten) &&
      records_.size() > 1) {
    JournalState state;
    for (const JournalRecord& record : records_) {
      const bool forgotten = planted_ == Planted::kHoldForgotten
                                 ? !record.hold_placed().replica().empty()
                                 : record.has_hold_released() &&
                                       record.hold_released().replica().empty();
      if (!forgotten) daemon::ApplyRecord(record, &state);
    }
    return state;
  }
  if (!random_.Chance(odds_.journal_file)) {
    // What compaction leaves.
    JournalState state;
    for (const JournalRecord& record : daemon::RecordsOf(durable_)) {
      daemon::ApplyRecord(record, &state);
    }
    return state;
  }
  Disk disk;
  {
    // As the process before left it.
    auto journal = daemon::Journal::Open("d", Clock(), options_.request_ttl,
                                         &disk, kGrownJournal);
    absl::Status status = journal.status();
    for (const JournalRecord& record : records_) {
      if (status.ok()) status = (*journal)->Append(record);
      if (status.ok() && record.has_update_ended()) {
        status = (*journal)->Tend(Clock());
      }
    }
    if (!status.ok()) {
      checker_.Violation(
          absl::StrCat("the journal cannot be written: ", status.ToString()));
      return durable_;
    }
  }
  if (torn_) {
    // Half a frame, as a crash inside write() leaves it.
    std::string* content = disk.files.begin()->second.get();
    content->push_back('\x40');
    content->append(3, '\0');
    content->append(static_cast<size_t>(random_.Below(40)), '\x17');
  }
  auto found = daemon::Journal::Open("d", Clock(), options_.request_ttl, &disk);
  if (!found.ok()) {
    checker_.Violation(absl::StrCat("the journal cannot be read back: ",
                                    found.status().ToString()));
    return durable_;
  }
  return (*found)->state();
}

void World::StartCoordinator(bool impostor) {
  ++host_.life;
  host_.up = true;
  host_.stopped_until = 0;
  impostor_ = impostor;
  JournalState found = impostor ? JournalState() : FoundJournal();
  if (impostor) {
    impostor_durable_ = JournalState();
    impostor_records_.clear();
  }
  torn_ = false;
  coordinator_ =
      std::make_unique<daemon::Coordinator>(options_, std::move(found));
  Trace("coordinator starts", impostor ? " on an empty journal" : "");
  Execute(coordinator_->Start(Clock()));
  const int life = host_.life;
  By(&host_, kSecond, [this, life] { CoordinatorTick(life); });
}

void World::CoordinatorTick(int life) {
  if (host_.life != life || coordinator_ == nullptr) return;
  if (planted_ != Planted::kNoDeadlines || now_ < 2 * kSecond) {
    Execute(coordinator_->OnTick(Clock()));
  }
  if (host_.life != life) return;
  By(&host_, kSecond, [this, life] { CoordinatorTick(life); });
}

void World::CrashCoordinator(Time restart_after) {
  Trace("coordinator dies");
  ++host_.life;
  host_.up = false;
  crash_at_action_ = -1;
  coordinator_.reset();
  for (auto& link : links_) {
    link.second->coordinator_open = false;
    link.second->cut = true;
    const std::shared_ptr<Link> gone = link.second;
    By(&nodes_[gone->node], Delay(),
       [this, gone] { LinkClosed(gone->node, gone); });
  }
  links_.clear();
  const auto callers = std::move(admin_);
  admin_.clear();
  for (const auto& caller : callers) caller.second(false);
  const int life = host_.life;
  After(restart_after, [this, life] {
    if (host_.life == life) StartCoordinator(/*impostor=*/false);
  });
}

void World::Append(JournalRecord record) {
  if (trace_ != nullptr) {
    const auto* field = JournalRecord::descriptor()->FindFieldByNumber(
        static_cast<int>(record.record_case()));
    Trace("journal  ", field->name(), "  ", record.ShortDebugString());
  }
  if (impostor_) {
    daemon::ApplyRecord(record, &impostor_durable_);
    impostor_records_.push_back(record);
    if (!record.has_adopted()) return;
    // It is the journal from now on.
    impostor_ = false;
    durable_ = std::move(impostor_durable_);
    records_ = std::move(impostor_records_);
    checker_.Adopted();
    return;
  }
  daemon::ApplyRecord(record, &durable_);
  checker_.Journalled(record);
  records_.push_back(std::move(record));
}

void World::Execute(daemon::Actions actions) {
  if (planted_ == Planted::kCommitAfterTelling) {
    // Behind everything that is told in the same breath.
    for (size_t i = 0; i + 1 < actions.size(); ++i) {
      const auto* append = absl::get_if<daemon::JournalAppend>(&actions[i]);
      if (append == nullptr || !append->record.has_update_committed()) continue;
      std::rotate(actions.begin() + static_cast<std::ptrdiff_t>(i),
                  actions.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                  actions.end());
      break;
    }
  }
  const int life = host_.life;
  for (daemon::Action& action : actions) {
    auto* append = absl::get_if<daemon::JournalAppend>(&action);
    if (crash_at_action_ >= 0 && crash_at_action_-- == 0) {
      // Before it, within it, or right after it.
      const int64_t where = random_.Below(3);
      if (append != nullptr && where == 1)
        torn_ = random_.Chance(odds_.torn_tail);
      if (append != nullptr && where == 2) Append(std::move(append->record));
      Trace("coordinator dies at an action of its own");
      CrashCoordinator(Downtime());
      return;
    }
    if (append != nullptr) {
      Append(std::move(append->record));
    } else if (auto* send = absl::get_if<daemon::SendCommand>(&action)) {
      auto link = links_.find(send->node_stream);
      if (link == links_.end()) continue;
      if (planted_ != Planted::kNone && Forge(*send)) continue;
      if (send->command.has_resume_replica()) {
        const v1::ResumeReplicaCommand& resume = send->command.resume_replica();
        checker_.TakenBack(resume.replica(), resume.resume().update_id());
      } else if (send->command.has_apply_worker()) {
        const v1::ApplyWorker& apply = send->command.apply_worker();
        checker_.TakenBack(apply.replica(), apply.update_id());
      }
      Deliver(link->second, std::move(send->command));
    } else if (const auto* done = absl::get_if<daemon::AdminDone>(&action)) {
      AdminDone(done->request, done->failure.code() == 0);
    } else if (const auto* close = absl::get_if<daemon::CloseNode>(&action)) {
      auto found = links_.find(close->node_stream);
      if (found == links_.end()) continue;
      const std::shared_ptr<Link> link = found->second;
      Trace("coordinator closes ", link->name, ": ", close->failure.reason());
      link->coordinator_open = false;
      links_.erase(found);
      link->last_down = std::max(link->last_down + 1, now_ + Delay());
      By(&nodes_[link->node], link->last_down - now_,
         [this, link] { LinkClosed(link->node, link); });
    }
    if (host_.life != life) return;
  }
}

void World::Deliver(const std::shared_ptr<Link>& link,
                    v1::NodeCommand command) {
  if (impostor_) {
    checker_.Violation(absl::StrCat(
        "a coordinator with an empty journal commands: ", NameOf(command)));
  }
  if (link->cut) return;
  if (trace_ != nullptr && !command.has_heartbeat()) {
    Trace("-> ", link->name, "  ", NameOf(command), "  ",
          command.has_define_layout() ? "" : command.ShortDebugString());
  }
  // Answers are awaited by their number, and go with it.
  const bool twice = !command.has_welcome() && !command.has_reply() &&
                     random_.Chance(odds_.command_twice);
  link->last_down = std::max(link->last_down + 1, now_ + Delay());
  By(&nodes_[link->node], link->last_down - now_,
     [this, link, twice, command = std::move(command)] {
       if (!link->node_open || link->drop_down) return;
       OnCommand(link->node, link, command);
       if (twice && link->node_open) OnCommand(link->node, link, command);
     });
}

bool World::Forge(const daemon::SendCommand& send) {
  const v1::NodeCommand& command = send.command;
  const auto report = [this, &send](v1::NodeReport answer) {
    By(&host_, Delay(), [this, stream = send.node_stream, answer] {
      if (coordinator_ != nullptr) {
        Execute(coordinator_->OnReport(Clock(), stream, answer));
      }
    });
    return true;
  };
  if (planted_ == Planted::kMixedReplica && command.has_apply_worker() &&
      command.apply_worker().worker_index() == 1) {
    const v1::ApplyWorker& apply = command.apply_worker();
    v1::NodeReport answer;
    v1::WorkerAppliedReport* applied = answer.mutable_worker_applied();
    applied->set_model(apply.model());
    applied->set_replica(apply.replica());
    applied->set_worker_index(1);
    applied->set_incarnation(apply.incarnation());
    applied->set_update_id(apply.update_id());
    applied->set_command_id(apply.command_id());
    return report(std::move(answer));
  }
  if (planted_ == Planted::kPauseNotDone && command.has_pause_replica()) {
    const v1::PauseReplicaCommand& pause = command.pause_replica();
    v1::NodeReport answer;
    v1::ReplicaPausedReport* paused = answer.mutable_replica_paused();
    paused->set_model(pause.model());
    paused->set_replica(pause.replica());
    paused->set_incarnation(pause.incarnation());
    paused->set_command_id(pause.pause().command_id());
    return report(std::move(answer));
  }
  if (planted_ == Planted::kAnswerLost && !planted_once_ &&
      command.reply().has_publish_opened()) {
    planted_once_ = true;
    return true;
  }
  return false;
}

}  // namespace simulation
}  // namespace weightsync
