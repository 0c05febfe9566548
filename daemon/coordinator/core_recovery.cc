// What a new term makes of the journal: an update that was not committed is
// aborted, one that was is rolled forward as its replicas come back.

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/core.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

void CoordinatorCore::Recover(const std::string& name,
                              const JournalModel& journal) {
  registry_.AddModel(name);
  ModelRun* model = Model(name);
  const auto record_of = [&](const std::string& update_id, int64_t version,
                             int64_t step) {
    v1::Version record;
    record.set_name(absl::StrCat(name, "/versions/", version));
    record.set_version(version);
    record.set_update_id(update_id);
    record.set_step(step);
    return record;
  };

  const auto& committed = journal.committed;
  v1::Version committed_record;
  if (!committed.update_id().empty()) {
    model->committed = {committed.update_id(), committed.version(),
                        committed.step(), committed.layout_id(),
                        committed.term()};
    committed_record =
        record_of(committed.update_id(), committed.version(), committed.step());
    committed_record.set_layout_id(committed.layout_id());
    *committed_record.mutable_commit_time() = committed.time();
    auto layout = layouts_.find(committed.layout_id());
    if (layout != layouts_.end()) {
      committed_record.set_total_bytes(layout->second->total_bytes);
      committed_record.set_bucket_count(
          static_cast<int32_t>(layout->second->layout.plan.bucket_count()));
    }
    if (journal.committed_ended) {
      committed_record.set_state(v1::Version::STATE_ACTIVE);
      model->ended.push_back(committed_record);
    }
  }

  Fault newest_fault;
  const auto& newest = journal.newest;
  if (!newest.update_id().empty() &&
      newest.update_id() != committed.update_id()) {
    if (journal.newest_ended) {
      newest_fault = FromProto(journal.newest_end.failure());
    } else {
      newest_fault = Fault(
          StatusCode::kAborted, "COORDINATOR_RESTARTED",
          absl::StrCat("version ", newest.version(), " of ", name,
                       " was not committed when coordinator ",
                       options_.coordinator_node, " ended; publish it again"));
      auto* ended = Write()->mutable_update_ended();
      ended->set_model(name);
      ended->set_update_id(newest.update_id());
      ended->set_version(newest.version());
      *ended->mutable_failure() = ToProto(newest_fault);
      *ended->mutable_time() = ToProto(now_);
      for (auto& entry : journal_.requests) {
        if (entry.second.opened.update_id() == newest.update_id()) {
          entry.second.failure = ended->failure();
        }
      }
    }
    v1::Version record =
        record_of(newest.update_id(), newest.version(), newest.step());
    record.set_state(v1::Version::STATE_ABORTED);
    *record.mutable_failure() = ToProto(newest_fault);
    *record.mutable_create_time() = newest.time();
    model->ended.push_back(record);
  }
  model->book.Recover(journal.floor, journal.publish_index, newest.update_id(),
                      newest_fault);

  if (committed.update_id().empty() || journal.committed_ended) return;
  LOG(INFO) << committed_record.name() << " (update " << committed.update_id()
            << ") was committed in term " << committed.term()
            << " and is rolled forward";
  auto update = std::make_unique<UpdateRun>();
  update->model = name;
  update->update_id = committed.update_id();
  update->key = KeyOf(update->update_id);
  update->recovered = true;
  update->record = committed_record;
  update->record.set_state(v1::Version::STATE_APPLYING);
  update->phase_name = "apply";
  update->phase_begin = now_;
  update->begin = now_;
  update->config.recovery_timeout = options_.recovery_timeout;
  auto layout = layouts_.find(committed.layout_id());
  if (layout != layouts_.end()) update->layout = layout->second;
  for (const auto& replica : committed.replicas()) {
    UpdateReplica out;
    out.name = absl::StrCat(name, "/replicas/", replica.replica());
    update->replica_index[replica.replica()] =
        static_cast<int>(update->machine.replicas.size());
    update->machine.replicas.push_back(std::move(out));
  }
  RecoverUpdate(update->config, now_, &update->machine);
  model->running = std::move(update);
  Post(name, UpdateEvent());  // nobody took part: it ends at once
}

}  // namespace daemon
}  // namespace weightsync
