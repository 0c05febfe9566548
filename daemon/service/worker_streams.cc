#include "daemon/service/worker_streams.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "daemon/node/convert.h"
#include "daemon/node/direct_plan.h"
#include "daemon/node/snapshot.h"
#include "daemon/service/proto_time.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

struct WorkerStreams::Plans {
  struct Worker {
    std::shared_ptr<const v1::CopyPlan> plan;
    std::vector<v1::DirectCopies> direct;
    std::vector<int32_t> ordinals;
  };
  absl::Status status;
  std::map<uint64_t, WantedTensors> tensors;
  std::map<uint64_t, std::vector<std::string>> reachable;
  std::map<uint64_t, std::set<std::string>> unreadable;
  std::map<uint64_t, Worker> workers;
  std::set<int32_t> direct;
  std::set<int32_t> on_device;
  std::map<int32_t, TensorDigests> device_digests;
};

// ---- The sink ----

void WorkerStreams::Begin(
    StreamStart start,
    std::function<void(absl::Status, std::set<int32_t>)> started,
    std::function<void(int32_t, TensorDigests)> read,
    std::function<void()> direct_done) {
  node_.loop->Post([this, start = std::move(start),
                    started = std::move(started), read = std::move(read),
                    direct_done = std::move(direct_done)]() mutable {
    const std::string update_id = start.update_id;
    auto found = streams_.find(update_id);
    if (found != streams_.end() && found->second.begun) {
      // Another way for the same bytes: the workers know.
      Stream& stream = found->second;
      stream.read = std::move(read);
      stream.direct_done = std::move(direct_done);
      started(absl::OkStatus(), stream.direct);
      for (const auto& digest : stream.read_digests) {
        stream.read(digest.first, digest.second);
      }
      for (const auto& member : stream.members) {
        for (int32_t bucket : member.second.returned) {
          if (member.second.taken.count(bucket) == 0)
            stream.read(bucket, TensorDigests());
        }
      }
      Settle(&stream);
      return;
    }
    Stream& stream = streams_[update_id];
    stream.read = std::move(read);
    stream.direct_done = std::move(direct_done);
    auto plans = std::make_shared<Plans>();
    for (const v1::StreamWorker& worker : start.workers) {
      const uint64_t id = host_.FindStreamWorker(start.model, worker);
      if (id == 0) {
        LOG(WARNING) << "worker " << worker.worker_index() << " of "
                     << start.model << "/replicas/" << worker.replica()
                     << " is not here to take update " << update_id;
        continue;
      }
      plans->tensors[id] = *host_.TensorsOf(id);
      plans->reachable[id] = host_.ReachableBy(id);
      auto unreadable = unreadable_.find(id);
      if (unreadable != unreadable_.end())
        plans->unreadable[id] = unreadable->second;
      stream.members[id];
    }
    stream.start = std::move(start);
    node_.data->Post([this, start = stream.start, plans,
                      started = std::move(started)]() mutable {
      for (const auto& worker : plans->tensors) {
        auto plan = plans_.PlanFor(*start.layout, worker.second);
        if (!plan.ok()) {
          plans->status = plan.status();
          break;
        }
        Plans::Worker& to = plans->workers[worker.first];
        to.plan = *std::move(plan);
        to.ordinals = OrdinalsOf(*start.layout, worker.second);
      }
      if (plans->status.ok()) PlanDirect(start, plans.get());
      auto told = [this, update_id = start.update_id, plans,
                   started = std::move(started)]() mutable {
        Told(update_id, plans, std::move(started));
      };
      if (plans->on_device.empty()) {
        node_.loop->Post(std::move(told));
        return;
      }
      // A GPU is not waited for here.
      node_.copies->Run([this, start, plans, told = std::move(told)]() mutable {
        DigestDevices(start, plans.get());
        node_.loop->Post(std::move(told));
      });
    });
  });
}

void WorkerStreams::PlanDirect(const StreamStart& start, Plans* plans) {
  struct Reader {
    std::set<int32_t> wants;
    std::map<int32_t, std::vector<DirectPlanner>> planners;  // by rank
  };
  std::map<uint64_t, Reader> readers;
  for (const auto& worker : plans->tensors) {
    Reader& reader = readers[worker.first];
    const Plans::Worker& plan = plans->workers[worker.first];
    const std::vector<int32_t> buckets = BucketsOf(*plan.plan);
    reader.wants.insert(buckets.begin(), buckets.end());
    for (const auto& source : start.sources) {
      reader.planners[source->rank].emplace_back(
          *start.layout, *source, worker.second, plan.ordinals,
          plans->reachable[worker.first]);
    }
  }
  for (int32_t bucket : start.direct_candidates) {
    const int32_t rank =
        start.layout->plan.bucket(static_cast<uint32_t>(bucket)).source_rank;
    std::map<uint64_t, std::vector<v1::DirectCopies>> copies;
    bool all = true;
    bool on_device = false;
    for (auto& worker : readers) {
      if (worker.second.wants.count(bucket) == 0) continue;
      const auto& not_from = plans->unreadable[worker.first];
      for (const DirectPlanner& planner : worker.second.planners[rank]) {
        auto made = planner.Copies(bucket);
        if (!made.has_value() ||
            std::any_of(made->begin(), made->end(),
                        [&not_from](const v1::DirectCopies& part) {
                          return not_from.count(
                                     part.memory().arena().arena_id()) > 0;
                        })) {
          continue;
        }
        on_device = on_device || planner.ReadsDevice(*made);
        copies[worker.first] = *std::move(made);
      }
      all = all && copies.count(worker.first) > 0;
    }
    if (!all || copies.empty()) continue;
    plans->direct.insert(bucket);
    if (on_device) plans->on_device.insert(bucket);
    for (auto& worker : copies) {
      auto& to = plans->workers[worker.first].direct;
      std::move(worker.second.begin(), worker.second.end(),
                std::back_inserter(to));
    }
  }
}

void WorkerStreams::DigestDevices(const StreamStart& start, Plans* plans) {
  for (int32_t bucket : plans->on_device) {
    const int32_t rank =
        start.layout->plan.bucket(static_cast<uint32_t>(bucket)).source_rank;
    absl::Status status;
    TensorDigests tensors;
    for (const auto& source : start.sources) {
      if (source->rank != rank) continue;
      status = source->cancel->cancelled()
                   ? source->cancel->status()
                   : DigestSourceBucket(*start.layout, rank, source->shards,
                                        bucket, node_.memory, &tensors)
                         .status();
    }
    if (status.ok()) {
      plans->device_digests[bucket] = std::move(tensors);
      continue;
    }
    // Who packs it, then, says what becomes of the update.
    LOG(WARNING) << "bucket " << bucket << " of update " << start.update_id
                 << " goes by way of a slot: " << status;
    plans->direct.erase(bucket);
    for (auto& worker : plans->workers) {
      auto& direct = worker.second.direct;
      direct.erase(std::remove_if(direct.begin(), direct.end(),
                                  [bucket](const v1::DirectCopies& copies) {
                                    return copies.bucket() == bucket;
                                  }),
                   direct.end());
    }
  }
}

void WorkerStreams::Told(
    const std::string& update_id, const std::shared_ptr<Plans>& plans,
    std::function<void(absl::Status, std::set<int32_t>)> started) {
  auto found = streams_.find(update_id);
  if (found == streams_.end()) {
    started(ErrorStatus(absl::StatusCode::kAborted, "UPDATE_ENDED",
                        absl::StrCat("update ", update_id, " has ended")),
            {});
    return;
  }
  Stream& stream = found->second;
  stream.begun = true;
  stream.direct = plans->direct;
  stream.device_digests = plans->device_digests;
  LOG_IF(INFO, !stream.direct.empty())
      << "workers here copy " << stream.direct.size() << " buckets of update "
      << update_id << " straight out of trainers' memory, "
      << stream.device_digests.size() << " of them out of GPUs";
  std::vector<std::pair<uint64_t, absl::Status>> failed;
  for (auto& member : stream.members) {
    if (!plans->status.ok()) break;
    const Plans::Worker& worker = plans->workers[member.first];
    for (int32_t bucket : BucketsOf(*worker.plan)) {
      member.second.wants.insert(bucket);
    }
    for (const v1::DirectCopies& copies : worker.direct) {
      member.second.parts[copies.bucket()].push_back(
          {worker.ordinals[static_cast<size_t>(copies.copies(0).tensor())],
           copies.memory().arena().arena_id()});
    }
    const absl::Status status = Tell(member.first, stream, *plans);
    if (!status.ok()) failed.emplace_back(member.first, status);
  }
  // A trainer that was released waits until nobody has its memory open, however
  // long this stream's workers are remembered.
  stream.start.sources.clear();
  started(plans->status, stream.direct);
  for (const auto& worker : failed) host_.GiveUp(worker.first, worker.second);
  found = streams_.find(update_id);
  if (found == streams_.end()) return;
  Settle(&found->second);
  WatchDirect(update_id);
}

absl::Status WorkerStreams::Tell(uint64_t worker, const Stream& stream,
                                 const Plans& plans) {
  const Plans::Worker& what = plans.workers.at(worker);
  host_.SendPlan(worker, *what.plan);
  v1::WorkerCommand command;
  v1::ApplyUpdate* apply = command.mutable_apply();
  apply->set_update_id(stream.start.update_id);
  apply->set_version(stream.start.version);
  apply->set_step(stream.start.step);
  apply->set_layout_id(stream.start.layout->id);
  apply->set_command_id(CommandOf(stream.start.update_id));
  apply->set_stream(true);
  *apply->mutable_timeout() = EncodeDuration(stream.start.bucket_timeout);
  absl::flat_hash_set<std::string> arenas;
  for (const v1::DirectCopies& copies : what.direct) {
    arenas.insert(copies.memory().arena().arena_id());
    *apply->add_direct() = copies;
  }
  for (const auto& source : stream.start.sources) {
    for (const SourceRegion& region : source->regions) {
      if (region.arena == nullptr || !arenas.contains(region.arena_id)) {
        continue;
      }
      const absl::Status status = host_.OfferMemory(worker, region);
      if (!status.ok()) return status;
    }
  }
  if (!what.direct.empty()) {
    for (int32_t ordinal : what.ordinals) apply->add_ordinals(ordinal);
  }
  host_.Send(worker, std::move(command));
  return absl::OkStatus();
}

void WorkerStreams::Pass(const std::string& update_id, int32_t bucket,
                         const v1::SlotLocation& where,
                         std::function<void()> taken) {
  node_.loop->Post(
      [this, update_id, bucket, where, taken = std::move(taken)]() mutable {
        PassNow(update_id, bucket, where, std::move(taken));
      });
}

void WorkerStreams::PassNow(const std::string& update_id, int32_t bucket,
                            const v1::SlotLocation& where,
                            std::function<void()> taken) {
  auto found = streams_.find(update_id);
  std::set<uint64_t> waiting;
  std::vector<std::pair<uint64_t, absl::Status>> failed;
  if (found != streams_.end()) {
    for (const auto& member : found->second.members) {
      if (member.second.wants.count(bucket) == 0 ||
          member.second.taken.count(bucket) > 0) {
        continue;
      }
      const absl::Status status =
          host_.OfferStore(member.first, where.arena_id());
      if (!status.ok()) {
        failed.emplace_back(member.first, status);
        continue;
      }
      v1::WorkerCommand command;
      v1::StreamBucket* pass = command.mutable_stream_bucket();
      pass->set_update_id(update_id);
      pass->set_command_id(CommandOf(update_id));
      pass->mutable_location()->set_bucket(bucket);
      *pass->mutable_location()->mutable_slot() = where;
      host_.Send(member.first, std::move(command));
      waiting.insert(member.first);
    }
  }
  if (waiting.empty()) {
    taken();
  } else {
    Stream& stream = found->second;
    Passing& passing = stream.passing[bucket];
    passing.waiting = std::move(waiting);
    passing.taken = std::move(taken);
    passing.timer = node_.loop->PostAfter(
        stream.start.bucket_timeout,
        [this, update_id, bucket, patience = stream.start.bucket_timeout] {
          auto found = streams_.find(update_id);
          if (found == streams_.end()) return;
          auto passing = found->second.passing.find(bucket);
          if (passing == found->second.passing.end()) return;
          passing->second.timer = 0;
          const std::set<uint64_t> late = passing->second.waiting;
          for (uint64_t worker : late) {
            host_.GiveUp(
                worker,
                ErrorStatus(
                    absl::StatusCode::kDeadlineExceeded, "APPLY_TIMEOUT",
                    absl::StrCat(host_.NameOf(worker), " did not take bucket ",
                                 bucket, " of update ", update_id, " within ",
                                 absl::FormatDuration(patience),
                                 "; register again and say what is in "
                                 "its memory")));
          }
        });
  }
  for (const auto& worker : failed) host_.GiveUp(worker.first, worker.second);
}

void WorkerStreams::Abort(const std::string& update_id) {
  node_.loop->Post([this, update_id] {
    auto found = streams_.find(update_id);
    if (found == streams_.end()) return;
    Stream stream = std::move(found->second);
    streams_.erase(found);
    node_.loop->Cancel(stream.direct_timer);
    for (const auto& member : stream.members) {
      v1::WorkerCommand command;
      v1::EndStream* end = command.mutable_end_stream();
      end->set_update_id(update_id);
      end->set_command_id(CommandOf(update_id));
      host_.Send(member.first, std::move(command));
    }
    for (const auto& passing : stream.passing) {
      node_.loop->Cancel(passing.second.timer);
      passing.second.taken();
    }
    if (stream.direct_done) stream.direct_done();
  });
}

void WorkerStreams::Close(const std::string& update_id) {
  node_.loop->Post([this, update_id] {
    auto found = streams_.find(update_id);
    if (found == streams_.end()) return;
    // A worker that has not said what became of it keeps its part in this, but
    // not the memory of those who trained.
    found->second.start.sources.clear();
    found->second.read = nullptr;
    found->second.direct_done = nullptr;
    if (found->second.members.empty()) streams_.erase(found);
  });
}

// ---- What workers say ----

void WorkerStreams::Taken(uint64_t worker, const v1::StreamBucketTaken& taken) {
  auto found = streams_.find(taken.update_id());
  if (found == streams_.end()) return;
  Stream& stream = found->second;
  auto member = stream.members.find(worker);
  if (member == stream.members.end()) return;
  const auto give_up = [&] {
    const absl::Status why = FromFailure(taken.failure());
    LOG(WARNING) << host_.NameOf(worker) << " could not take bucket "
                 << taken.bucket() << " of update " << taken.update_id() << ": "
                 << why;
    host_.GiveUp(worker, why);
  };
  Member& reader = member->second;
  auto parts = reader.parts.find(taken.bucket());
  // One answer for each part, in their order; what comes behind them is of a
  // slot.
  if (parts != reader.parts.end() &&
      reader.parts_taken[taken.bucket()] < parts->second.size()) {
    const auto device = stream.device_digests.find(taken.bucket());
    const bool on_device = device != stream.device_digests.end();
    if (taken.has_failure() && !on_device) {
      give_up();
      return;
    }
    WatchDirect(taken.update_id());
    if (taken.has_failure() && reader.returned.insert(taken.bucket()).second) {
      LOG(WARNING) << host_.NameOf(worker) << " is passed bucket "
                   << taken.bucket() << " of update " << taken.update_id()
                   << ", which it cannot copy out of the trainer's GPU memory: "
                   << FromFailure(taken.failure());
    }
    size_t& count = reader.parts_taken[taken.bucket()];
    TensorDigests& digests = reader.digests[taken.bucket()];
    const Member::Part& part = parts->second[count];
    digests[static_cast<uint32_t>(part.ordinal)] += FromProto(taken.digest());
    if (taken.has_failure()) unreadable_[worker].insert(part.arena_id);
    if (++count < parts->second.size()) return;
    if (reader.returned.count(taken.bucket()) > 0) {
      if (stream.read) stream.read(taken.bucket(), TensorDigests());
      Settle(&stream);
      return;
    }
    const TensorDigests& read = on_device ? device->second : digests;
    stream.read_digests[taken.bucket()] = read;
    if (stream.read) stream.read(taken.bucket(), read);
  } else if (taken.has_failure()) {
    give_up();
    return;
  }
  member->second.taken.insert(taken.bucket());
  auto passing = stream.passing.find(taken.bucket());
  if (passing != stream.passing.end()) passing->second.waiting.erase(worker);
  Settle(&stream);
}

void WorkerStreams::Left(uint64_t worker) {
  unreadable_.erase(worker);
  for (auto& stream : streams_) {
    stream.second.members.erase(worker);
    for (auto& passing : stream.second.passing) {
      passing.second.waiting.erase(worker);
    }
    Settle(&stream.second);
  }
}

absl::StatusOr<bool> WorkerStreams::Complete(uint64_t worker,
                                             const std::string& update_id) {
  auto found = streams_.find(update_id);
  if (found == streams_.end()) return false;
  auto member = found->second.members.find(worker);
  if (member == found->second.members.end()) return false;
  for (int32_t bucket : member->second.wants) {
    if (member->second.taken.count(bucket) > 0) continue;
    return ErrorStatus(
        absl::StatusCode::kFailedPrecondition, "STREAM_INCOMPLETE",
        absl::StrCat(host_.NameOf(worker), " has not been given bucket ",
                     bucket, " of update ", update_id, " yet"));
  }
  found->second.members.erase(member);
  if (found->second.members.empty()) {
    node_.loop->Cancel(found->second.direct_timer);
    streams_.erase(found);
  }
  return true;
}

int64_t WorkerStreams::VersionOf(uint64_t worker,
                                 const std::string& update_id) const {
  auto found = streams_.find(update_id);
  if (found == streams_.end() || found->second.members.count(worker) == 0) {
    return 0;
  }
  return found->second.start.version;
}

bool WorkerStreams::DirectWaits(const Stream& stream, uint64_t worker) const {
  const Member& member = stream.members.at(worker);
  for (int32_t bucket : stream.direct) {
    if (member.wants.count(bucket) > 0 && member.taken.count(bucket) == 0 &&
        member.returned.count(bucket) == 0) {
      return true;
    }
  }
  return false;
}

// Calls what nobody waits for any more.
void WorkerStreams::Settle(Stream* stream) {
  for (auto it = stream->passing.begin(); it != stream->passing.end();) {
    if (!it->second.waiting.empty()) {
      ++it;
      continue;
    }
    node_.loop->Cancel(it->second.timer);
    it->second.taken();
    it = stream->passing.erase(it);
  }
  if (!stream->begun || !stream->direct_done) return;
  for (const auto& member : stream->members) {
    if (DirectWaits(*stream, member.first)) return;
  }
  node_.loop->Cancel(stream->direct_timer);
  stream->direct_timer = 0;
  std::exchange(stream->direct_done, nullptr)();
}

// Those who read directly must get on, too.
void WorkerStreams::WatchDirect(const std::string& update_id) {
  Stream& stream = streams_.at(update_id);
  node_.loop->Cancel(stream.direct_timer);
  stream.direct_timer = 0;
  if (!stream.direct_done || stream.direct.empty()) return;
  const absl::Duration patience = stream.start.bucket_timeout;
  stream.direct_timer = node_.loop->PostAfter(patience, [this, update_id,
                                                         patience] {
    auto found = streams_.find(update_id);
    if (found == streams_.end()) return;
    found->second.direct_timer = 0;
    std::vector<uint64_t> late;
    for (const auto& member : found->second.members) {
      if (DirectWaits(found->second, member.first)) {
        late.push_back(member.first);
      }
    }
    for (uint64_t worker : late) {
      host_.GiveUp(
          worker,
          ErrorStatus(
              absl::StatusCode::kDeadlineExceeded, "APPLY_TIMEOUT",
              absl::StrCat(host_.NameOf(worker), " has read nothing of update ",
                           update_id, " for ", absl::FormatDuration(patience),
                           "; register again and say what is in "
                           "its memory")));
    }
  });
}

}  // namespace daemon
}  // namespace weightsync
