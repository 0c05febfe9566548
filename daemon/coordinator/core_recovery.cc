// What a new term makes of the journal: an update that was not committed is
// aborted, one that was is rolled forward as its replicas come back.

#include <algorithm>

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

  // What ended without a commit, also before others that were committed: who
  // waits for it shall hear how.
  const auto& newest = journal.newest;
  Fault newest_fault;
  const auto aborted = [&](const internal::v1::UpdateOpened& opened,
                           const internal::v1::UpdateEnded& ended) {
    v1::Version record =
        record_of(opened.update_id(), opened.version(), opened.step());
    record.set_state(ended.superseded() ? v1::Version::STATE_SUPERSEDED
                                        : v1::Version::STATE_ABORTED);
    *record.mutable_failure() = ended.failure();
    *record.mutable_create_time() = opened.time();
    *record.mutable_end_time() = ended.time();
    model->ended.push_back(std::move(record));
    if (opened.update_id() == newest.update_id()) {
      newest_fault = FromProto(ended.failure());
    }
  };
  for (const JournalModel::Failed& failed : journal.failed) {
    aborted(failed.opened, failed.ended);
  }

  const auto& committed = journal.committed;
  const auto commit_of = [&](const internal::v1::UpdateCommitted& record) {
    CommittedUpdate commit;
    commit.update_id = record.update_id();
    commit.version = record.version();
    commit.step = record.step();
    commit.layout_id = record.layout_id();
    commit.term = record.term();
    commit.options = record.options();
    commit.manifest.assign(record.manifest().begin(), record.manifest().end());
    commit.tensors.assign(record.tensors().begin(), record.tensors().end());
    auto layout = layouts_.find(record.layout_id());
    if (layout != layouts_.end()) commit.layout = layout->second;
    return commit;
  };
  for (const auto& older : journal.older) {
    model->commits.push_back(commit_of(older));
    v1::Version record =
        record_of(older.update_id(), older.version(), older.step());
    record.set_layout_id(older.layout_id());
    *record.mutable_options() = older.options();
    *record.mutable_commit_time() = older.time();
    record.set_state(v1::Version::STATE_ACTIVE);
    model->ended.push_back(std::move(record));
  }
  model->held_update_id = journal.held.update_id();
  model->held_replicas = journal.held_replicas;
  model->removed = journal.removed;
  // One that was published when nobody was there says nothing about who is.
  const auto* last = &committed;
  for (auto it = journal.older.rbegin();
       last->replicas().empty() && it != journal.older.rend(); ++it) {
    last = &*it;
  }
  for (const auto& replica : last->replicas()) {
    model->unseen_replicas.insert(replica.replica());
  }
  v1::Version committed_record;
  if (!committed.update_id().empty()) {
    model->commits.push_back(commit_of(committed));
    model->commits.back().lost = journal.committed_lost;
    committed_record =
        record_of(committed.update_id(), committed.version(), committed.step());
    committed_record.set_layout_id(committed.layout_id());
    *committed_record.mutable_options() = committed.options();
    *committed_record.mutable_commit_time() = committed.time();
    if (model->commits.back().layout != nullptr) {
      const KnownLayout& layout = *model->commits.back().layout;
      committed_record.set_total_bytes(layout.total_bytes);
      committed_record.set_bucket_count(
          static_cast<int32_t>(layout.layout.plan.bucket_count()));
    }
    if (journal.committed_ended) {
      committed_record.set_state(journal.committed_lost
                                     ? v1::Version::STATE_LOST
                                     : v1::Version::STATE_ACTIVE);
      model->ended.push_back(committed_record);
    }
  }

  // What was not decided is aborted: nobody can have been told otherwise.
  for (const auto& opened : journal.unended) {
    if (opened.update_id() == committed.update_id()) continue;
    std::string streamed;
    if (journal.stream_begun.update_id() == opened.update_id()) {
      streamed =
          "; it was being written into live memory, and workers that "
          "hold a mix are mended from the update before it";
    }
    const Fault fault(StatusCode::kAborted, "COORDINATOR_RESTARTED",
                      absl::StrCat("version ", opened.version(), " of ", name,
                                   " was not committed when coordinator ",
                                   options_.coordinator_node,
                                   " ended; publish it again", streamed));
    auto* ended = Write()->mutable_update_ended();
    ended->set_model(name);
    ended->set_update_id(opened.update_id());
    ended->set_version(opened.version());
    *ended->mutable_failure() = ToProto(fault);
    *ended->mutable_time() = ToProto(now_);
    journal_.requests.Failed(opened.update_id(), ended->failure());
    aborted(opened, *ended);
  }
  std::stable_sort(model->ended.begin(), model->ended.end(),
                   [](const v1::Version& a, const v1::Version& b) {
                     return a.version() < b.version();
                   });
  model->book.Recover(journal.floor, journal.publish_index, newest.update_id(),
                      newest.step(), newest_fault);

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
  update->options = committed.options();
  SetPolicies(update->options, &update->config);
  update->layout = model->commits.back().layout;
  for (const auto& replica : committed.replicas()) {
    UpdateReplica out;
    out.name = absl::StrCat(name, "/replicas/", replica.replica());
    update->replica_index[replica.replica()] =
        static_cast<int>(update->machine.replicas.size());
    update->machine.replicas.push_back(std::move(out));
  }
  RecoverUpdate(update->config, now_, &update->machine);
  model->updates.push_back(std::move(update));
  // Nobody took part: it ends at once.
  Post(*model->updates.back(), UpdateEvent());
}

}  // namespace daemon
}  // namespace weightsync
