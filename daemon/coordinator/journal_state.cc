#include "daemon/coordinator/journal_state.h"

#include <algorithm>
#include <set>
#include <utility>

#include "daemon/coordinator/convert.h"

namespace weightsync {
namespace daemon {

using internal::v1::JournalRecord;

void ApplyRecord(const JournalRecord& record, JournalState* state) {
  switch (record.record_case()) {
    case JournalRecord::kStarted:
      state->cluster_id = record.started().cluster_id();
      state->term = std::max(state->term, record.started().term());
      return;

    case JournalRecord::kUpdateOpened: {
      const auto& opened = record.update_opened();
      JournalModel& model = state->models[opened.model()];
      model.floor = std::max(model.floor, opened.version());
      model.publish_index =
          std::max(model.publish_index, opened.publish_index());
      if (model.newest.update_id() == opened.update_id()) return;
      model.newest = opened;
      model.newest_ended = opened.learned();
      if (opened.learned()) {
        model.newest_end.Clear();
        model.newest_end.set_model(opened.model());
        model.newest_end.set_update_id(opened.update_id());
        model.newest_end.set_version(opened.version());
        model.newest_end.set_active(true);
        return;
      }
      model.unended.push_back(opened);
      // At most two run at a time: older ones ended without a word.
      if (model.unended.size() > 2) model.unended.erase(model.unended.begin());
      return;
    }

    case JournalRecord::kRequestOpened:
      state->requests.Open(record.request_opened());
      return;

    case JournalRecord::kRankCopied:
      state->requests.Copied(record.rank_copied());
      return;

    case JournalRecord::kLayoutDefined: {
      const auto& layout = record.layout_defined().layout();
      state->layouts[layout.layout_id()] = layout;
      return;
    }

    case JournalRecord::kUpdateCommitted: {
      const auto& committed = record.update_committed();
      JournalModel& model = state->models[committed.model()];
      if (model.committed.update_id() == committed.update_id()) return;
      if (!model.committed.update_id().empty()) {
        model.older.push_back(model.committed);
        if (model.older.size() > kOlderCommits) {
          // What a rollback holds the model on is not forgotten.
          const bool held =
              model.older.front().update_id() == model.held.update_id();
          model.older.erase(model.older.begin() + (held ? 1 : 0));
        }
      }
      model.committed = committed;
      model.removed = false;
      model.committed_ended = committed.learned();
      model.committed_lost = false;
      return;
    }

    case JournalRecord::kUpdateEnded: {
      const auto& ended = record.update_ended();
      JournalModel& model = state->models[ended.model()];
      if (model.newest.update_id() == ended.update_id() &&
          !model.newest_ended) {
        model.newest_ended = true;
        model.newest_end = ended;
      }
      const auto same = [&ended](const auto& opened) {
        return opened.update_id() == ended.update_id();
      };
      const auto opened =
          std::find_if(model.unended.begin(), model.unended.end(), same);
      if (opened != model.unended.end() && !ended.active() &&
          !same(model.committed)) {
        model.failed.push_back({*opened, ended});
        if (model.failed.size() > kOlderFailures) {
          model.failed.erase(model.failed.begin());
        }
      }
      model.unended.erase(
          std::remove_if(model.unended.begin(), model.unended.end(), same),
          model.unended.end());
      if (same(model.stream_begun)) model.stream_begun.Clear();
      if (same(model.committed)) {
        model.committed_ended = true;
        model.committed_lost = model.committed_lost || ended.lost();
        return;
      }
      if (ended.active()) return;
      state->requests.Failed(ended.update_id(), ended.failure());
      return;
    }

    case JournalRecord::kLost:
      state->lost_evidence = record.lost().evidence();
      return;

    case JournalRecord::kStreamBegun:
      state->models[record.stream_begun().model()].stream_begun =
          record.stream_begun();
      return;

    case JournalRecord::kHoldPlaced: {
      const auto& hold = record.hold_placed();
      JournalModel& model = state->models[hold.model()];
      if (hold.replica().empty()) {
        model.held = hold;
      } else {
        model.held_replicas.insert(hold.replica());
      }
      return;
    }

    case JournalRecord::kHoldReleased: {
      const auto& hold = record.hold_released();
      JournalModel& model = state->models[hold.model()];
      if (hold.replica().empty()) {
        model.held.Clear();
      } else {
        model.held_replicas.erase(hold.replica());
      }
      return;
    }

    case JournalRecord::kNodeDrained:
      if (record.node_drained().drained()) {
        state->drained.insert(record.node_drained().node());
      } else {
        state->drained.erase(record.node_drained().node());
      }
      return;

    case JournalRecord::kVersionDeleted: {
      const auto& deleted = record.version_deleted();
      JournalModel& model = state->models[deleted.model()];
      model.older.erase(
          std::remove_if(model.older.begin(), model.older.end(),
                         [&](const internal::v1::UpdateCommitted& older) {
                           return older.update_id() == deleted.update_id();
                         }),
          model.older.end());
      model.failed.erase(
          std::remove_if(model.failed.begin(), model.failed.end(),
                         [&](const JournalModel::Failed& failed) {
                           return failed.opened.update_id() ==
                                  deleted.update_id();
                         }),
          model.failed.end());
      return;
    }

    case JournalRecord::kModelRemoved: {
      // What a replica was paused for by hand stays; the numbers, too.
      JournalModel& model = state->models[record.model_removed().model()];
      model.committed.Clear();
      model.committed_ended = false;
      model.committed_lost = false;
      model.older.clear();
      model.failed.clear();
      model.held.Clear();
      model.removed = true;
      return;
    }

    case JournalRecord::kAdopted:
      state->former_clusters.insert(state->cluster_id);
      state->cluster_id = record.adopted().cluster_id();
      state->former_clusters.erase(state->cluster_id);
      state->term = std::max(state->term, record.adopted().term());
      state->adopted_term = record.adopted().term();
      state->lost_evidence.clear();
      return;

    case JournalRecord::RECORD_NOT_SET:
      // Of a later release: what it does not change here it may ignore.
      return;
  }
}

void ForgetOld(absl::Time oldest, JournalState* state) {
  state->requests.ForgetUntil(oldest);
  std::set<std::string> named;
  for (const auto& entry : state->models) {
    named.insert(entry.second.committed.layout_id());
    for (const auto& older : entry.second.older) {
      named.insert(older.layout_id());
    }
  }
  for (auto it = state->layouts.begin(); it != state->layouts.end();) {
    it = named.count(it->first) == 0 ? state->layouts.erase(it) : std::next(it);
  }
}

std::vector<JournalRecord> RecordsOf(const JournalState& state) {
  std::vector<JournalRecord> records;
  if (state.cluster_id.empty()) return records;
  const auto add = [&records]() -> JournalRecord& {
    records.emplace_back();
    return records.back();
  };
  for (const std::string& former : state.former_clusters) {
    auto* started = add().mutable_started();
    started->set_cluster_id(former);
    started->set_term(state.term);
    auto* adopted = add().mutable_adopted();
    adopted->set_cluster_id(state.cluster_id);
    adopted->set_term(state.term);
  }
  auto* started = add().mutable_started();
  started->set_cluster_id(state.cluster_id);
  started->set_term(state.term);
  if (state.adopted_term > 0) {
    auto* adopted = add().mutable_adopted();
    adopted->set_cluster_id(state.cluster_id);
    adopted->set_term(state.adopted_term);
  }
  for (const std::string& node : state.drained) {
    auto* drained = add().mutable_node_drained();
    drained->set_node(node);
    drained->set_drained(true);
  }
  if (!state.lost_evidence.empty()) {
    add().mutable_lost()->set_evidence(state.lost_evidence);
  }
  for (const auto& entry : state.layouts) {
    *add().mutable_layout_defined()->mutable_layout() = entry.second;
  }
  for (const auto& entry : state.models) {
    const JournalModel& model = entry.second;
    if (model.removed) {
      add().mutable_model_removed()->set_model(entry.first);
    }
    for (const auto& older : model.older) {
      *add().mutable_update_committed() = older;
    }
    if (!model.committed.update_id().empty()) {
      *add().mutable_update_committed() = model.committed;
      if (model.committed_ended) {
        auto* ended = add().mutable_update_ended();
        ended->set_model(entry.first);
        ended->set_update_id(model.committed.update_id());
        ended->set_version(model.committed.version());
        ended->set_active(!model.committed_lost);
        ended->set_lost(model.committed_lost);
      }
    }
    for (const JournalModel::Failed& failed : model.failed) {
      if (failed.opened.update_id() == model.newest.update_id()) continue;
      *add().mutable_update_opened() = failed.opened;
      *add().mutable_update_ended() = failed.ended;
    }
    for (const auto& opened : model.unended) {
      if (opened.update_id() == model.newest.update_id()) continue;
      *add().mutable_update_opened() = opened;
    }
    if (!model.newest.update_id().empty()) {
      *add().mutable_update_opened() = model.newest;
      if (model.newest_ended) *add().mutable_update_ended() = model.newest_end;
    }
    if (!model.stream_begun.update_id().empty()) {
      *add().mutable_stream_begun() = model.stream_begun;
    }
    if (!model.held.update_id().empty()) {
      *add().mutable_hold_placed() = model.held;
    }
    for (const std::string& replica : model.held_replicas) {
      auto* hold = add().mutable_hold_placed();
      hold->set_model(entry.first);
      hold->set_replica(replica);
    }
  }
  for (const auto& entry : state.requests) {
    const JournalRequest& request = entry.second;
    *add().mutable_request_opened() = request.opened;
    if (request.copied) {
      auto* copied = add().mutable_rank_copied();
      copied->set_model(request.opened.model());
      copied->set_rank(request.opened.rank());
      copied->set_update_id(request.opened.update_id());
      copied->set_copied_bytes(request.copied_bytes);
      *copied->mutable_copy_duration() = ToProto(request.copy_duration);
    }
    if (!request.failure.reason().empty()) {
      auto* ended = add().mutable_update_ended();
      ended->set_model(request.opened.model());
      ended->set_update_id(request.opened.update_id());
      ended->set_version(request.opened.version());
      *ended->mutable_failure() = request.failure;
    }
  }
  return records;
}

}  // namespace daemon
}  // namespace weightsync
