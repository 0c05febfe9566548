#include "daemon/service/trainer_sessions.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/service/validate.h"
#include "glog/logging.h"
#include "proto/status.h"
#include "transport/cuda/segment_control.h"

namespace weightsync {
namespace daemon {
namespace {

// For device agents and workers to close GPU memory that a trainer wants to
// free.
constexpr absl::Duration kCloseDeadline = absl::Seconds(5);

absl::Status SessionUnknown() {
  return ErrorStatus(absl::StatusCode::kNotFound, "SESSION_UNKNOWN",
                     "no such session: it has ended, or was opened at another "
                     "daemon; open a new "
                     "one and register again");
}

// Nobody has its name, so nobody could give it back.
absl::Status ArenaLate() {
  return ErrorStatus(absl::StatusCode::kDeadlineExceeded, "CALL_TIMEOUT",
                     "the arena was not made before the call's deadline, and "
                     "is not kept; ask again with more time");
}

// Not on the loop.
void AwaitClosed(
    const NodeContext& node,
    std::vector<std::weak_ptr<const DeviceRegion>> devices,
    const std::vector<std::shared_ptr<const DeviceShare>>& shares) {
  absl::Status status = AwaitSharesClosed(shares, kCloseDeadline);
  LOG_IF(WARNING, !status.ok()) << status;
  status = node.devices->AwaitClosed(std::move(devices), kCloseDeadline);
  LOG_IF(WARNING, !status.ok()) << status;
}

std::string RoomOf(const v1::TrainerIdentity& identity) {
  return absl::StrCat("rank ", identity.rank());
}

}  // namespace

std::string TrainerSessions::Session::Name() const {
  return named
             ? absl::StrCat("rank ", identity.rank(), " of ", identity.model())
             : "a trainer";
}

TrainerSessions::Session* TrainerSessions::Find(uint64_t id) {
  auto it = sessions_.find(id);
  return it == sessions_.end() ? nullptr : it->second.get();
}

absl::StatusOr<TrainerSessions::Session*> TrainerSessions::FindByName(
    const std::string& session) {
  auto it = by_name_.find(session);
  if (!down_.ok()) return down_;
  Session* found = it == by_name_.end() ? nullptr : Find(it->second);
  if (found == nullptr || !found->accepted) return SessionUnknown();
  return found;
}

void TrainerSessions::Open(std::shared_ptr<Stream> stream) {
  auto session = std::make_unique<Session>();
  session->id = next_id_++;
  by_stream_[stream.get()] = session->id;
  session->stream = std::move(stream);
  const uint64_t id = session->id;
  sessions_.emplace(id, std::move(session));
  if (!down_.ok()) End(id, down_);
}

void TrainerSessions::Heard(const Stream* stream,
                            const v1::TrainerHeartbeat& heartbeat) {
  auto it = by_stream_.find(stream);
  if (it == by_stream_.end()) return;
  Session* session = Find(it->second);
  session->last_heard = absl::Now();
  if (!session->named) {
    Name(session, heartbeat.identity());
    return;
  }
  if (!session->accepted) return;
  v1::TrainerEvent event;
  *event.mutable_heartbeat_interval() =
      EncodeDuration(node_.options->deadlines.heartbeat_interval);
  session->stream->Write(std::move(event));
}

void TrainerSessions::Closed(const Stream* stream) {
  auto it = by_stream_.find(stream);
  if (it != by_stream_.end()) End(it->second, absl::OkStatus());
}

void TrainerSessions::Name(Session* session,
                           const v1::TrainerIdentity& identity) {
  const uint64_t id = session->id;
  const absl::Status status = CheckIdentity(identity);
  if (!status.ok()) {
    End(id, status);
    return;
  }
  session->named = true;
  session->identity = identity;
  Cut(kLongestClient, session->identity.mutable_client());
  session->session = RandomId();
  by_name_[session->session] = id;
  WatchProcess(node_, identity.pid(), identity.pid_namespace(), session,
               [this, id](const absl::Status& why) { End(id, why); });
  session->exporter = ExporterOf(identity);
  // While the coordinator is away, Announce claims it when it is back.
  if (node_.link->up()) Claim(session);
}

void TrainerSessions::Claim(Session* session) {
  v1::NodeReport report;
  v1::ClaimRank* claim = report.mutable_claim_rank();
  claim->set_model(session->identity.model());
  claim->set_rank(session->identity.rank());
  claim->set_world_size(session->identity.world_size());
  claim->set_session(session->session);
  claim->set_pid(session->identity.pid());
  claim->set_client(session->identity.client());
  claim->set_publish_index(session->publish_index);
  node_.link->Ask(
      std::move(report),
      [this, id = session->id](const absl::Status& status, const v1::Reply&) {
        Session* session = Find(id);
        if (session == nullptr) return;
        if (ErrorReason(status) == "COORDINATOR_UNREACHABLE") return;
        if (!status.ok()) {
          End(id, status);
          return;
        }
        if (session->accepted) return;
        session->accepted = true;
        session->last_heard = absl::Now();
        v1::TrainerEvent event;
        v1::SessionOpened* opened = event.mutable_opened();
        opened->set_session(session->session);
        *opened->mutable_heartbeat_interval() =
            EncodeDuration(node_.options->deadlines.heartbeat_interval);
        *opened->mutable_heartbeat_timeout() =
            EncodeDuration(node_.options->deadlines.heartbeat);
        opened->set_node("nodes/" + node_.options->node);
        session->stream->Write(std::move(event));
        LOG(INFO) << session->Name() << " is here (process "
                  << session->identity.pid() << ")";
      });
}

void TrainerSessions::Announce() {
  for (const auto& entry : sessions_) {
    if (!entry.second->named) continue;
    Claim(entry.second.get());
    AnnounceShards(entry.second.get());
  }
}

void TrainerSessions::AnnounceShards(Session* session) {
  if (session->registration == nullptr) return;
  v1::NodeReport report;
  ReportShards(*session, *session->registration, report.mutable_rank_shards());
  node_.link->Ask(
      std::move(report),
      [this, id = session->id](const absl::Status& status, const v1::Reply&) {
        Session* session = Find(id);
        if (session == nullptr || status.ok()) return;
        if (ErrorReason(status) == "COORDINATOR_UNREACHABLE") return;
        // Somebody else's shards are there now: this rank must register anew.
        LOG(WARNING) << "the coordinator does not take the shards of "
                     << session->Name() << " any more: " << status;
        End(id, status);
      });
}

void TrainerSessions::End(uint64_t id, const absl::Status& why) {
  auto it = sessions_.find(id);
  if (it == sessions_.end()) return;
  std::unique_ptr<Session> session = std::move(it->second);
  sessions_.erase(it);
  by_stream_.erase(session->stream.get());
  by_name_.erase(session->session);
  if (session->named) {
    const absl::Status lost =
        why.ok() ? ErrorStatus(
                       absl::StatusCode::kAborted, "RANK_LEFT",
                       absl::StrCat(session->Name(), " has closed its session"))
                 : ErrorStatus(absl::StatusCode::kAborted, ErrorReason(why),
                               absl::StrCat(session->Name(),
                                            " is lost: ", why.message()));
    LOG(INFO) << lost.message();
    session->cancel->Cancel(lost);
    for (const auto& copy : session->copying) {
      for (const auto& answer : copy.second)
        answer->Finish(why.ok() ? SessionUnknown() : why);
    }
    session->copying.clear();
    v1::NodeReport report;
    v1::RankLost* rank = report.mutable_rank_lost();
    rank->set_model(session->identity.model());
    rank->set_rank(session->identity.rank());
    rank->set_session(session->session);
    *rank->mutable_failure() = ToFailure(lost);
    node_.link->Report(std::move(report));
    node_.room->Leave(session->identity.model(), RoomOf(session->identity));
    Place(*session, nullptr);
  }
  for (const auto& arena : session->arenas) {
    arena_bytes_ -= arena.second->bytes();
    arena_gone_(arena.first);
  }
  // Giving gigabytes back takes its time; the client hears that it is over when
  // they are free.
  std::vector<std::weak_ptr<const DeviceRegion>> devices;
  std::vector<std::shared_ptr<const DeviceShare>> shares;
  if (session->registration != nullptr) {
    devices = session->registration->devices;
    shares = session->registration->shares;
  }
  Retire(shares);
  const bool on_devices = !devices.empty();
  auto give_back = [loop = node_.loop, node = &node_,
                    session = std::move(session), devices, shares,
                    why]() mutable {
    // Before the client is told: nothing of it is left to be taken then.
    session->offers.TakeBackAll();
    session->arenas.clear();
    session->registration = nullptr;
    // GPU memory must not be freed while somebody has it open.
    if (!devices.empty()) AwaitClosed(*node, std::move(devices), shares);
    loop->Post([node, session = std::move(session), why] {
      EndStream(*node, *session, why);
    });
  };
  // A GPU may not answer; others have arenas to take and to give back.
  if (on_devices) {
    node_.copies->Run(std::move(give_back));
  } else {
    node_.reserving->Post(std::move(give_back));
  }
}

void TrainerSessions::AllocateArena(
    const v1::AllocateArenaRequest& request,
    std::shared_ptr<Answer<v1::AllocateArenaResponse>> answer) {
  const absl::StatusOr<Session*> session = FindByName(request.session());
  if (!session.ok()) {
    answer->Finish(session.status());
    return;
  }
  if (request.size_bytes() <= 0) {
    answer->Finish(
        ErrorStatus(absl::StatusCode::kInvalidArgument, "ARENA_SIZE_INVALID",
                    absl::StrCat("an arena of ", request.size_bytes(),
                                 " bytes; ask for a positive size")));
    return;
  }
  // Whole pages, so that the end of the data is the end of the mapping.
  constexpr int64_t kPage = 4096;
  if (request.size_bytes() > INT64_MAX - kPage) {
    answer->Finish(ErrorStatus(absl::StatusCode::kInvalidArgument,
                               "ARENA_SIZE_INVALID",
                               "no machine has so much memory; ask for less"));
    return;
  }
  const int64_t bytes = (request.size_bytes() + kPage - 1) / kPage * kPage;
  node_.reserving->Post(
      [this, id = (*session)->id, bytes, answer, name = (*session)->Name()] {
        const absl::Time begin = absl::Now();
        if (begin >= answer->deadline()) {
          answer->Finish(ArenaLate());
          return;
        }
        transport::AllocateOptions allocate;
        allocate.name = name;
        absl::StatusOr<std::unique_ptr<transport::Segment>> made =
            node_.memory->Allocate(bytes, allocate);
        if (!made.ok()) {
          answer->Finish(ApiStatus(made.status()));
          return;
        }
        std::shared_ptr<transport::Segment> segment = *std::move(made);
        const absl::Duration warm_up = absl::Now() - begin;
        if (absl::Now() >= answer->deadline()) {
          answer->Finish(ArenaLate());
          return;
        }
        node_.loop->Post([this, id, segment, warm_up, answer] {
          Session* session = Find(id);
          if (session == nullptr) {
            answer->Finish(SessionUnknown());
            return;
          }
          absl::StatusOr<v1::ArenaOffer> offer =
              session->offers.Make(node_.memory, RandomId(), *segment,
                                   session->process, /*read_only=*/false);
          if (!offer.ok()) {
            answer->Finish(offer.status());
            return;
          }
          session->arenas.emplace(offer->arena_id(), segment);
          arena_bytes_ += segment->bytes();
          *answer->response()->mutable_arena() = *std::move(offer);
          *answer->response()->mutable_warm_up() = EncodeDuration(warm_up);
          answer->Finish(absl::OkStatus());
        });
      });
}

transport::cuda::ProcessIdentity TrainerSessions::ExporterOf(
    const v1::TrainerIdentity& identity) {
  if (identity.pid_namespace() == 0 ||
      identity.pid_namespace() == transport::PidNamespace()) {
    return transport::cuda::IdentityOf(identity.pid());
  }
  transport::cuda::ProcessIdentity exporter;
  exporter.pid = identity.pid();
  exporter.pid_namespace = identity.pid_namespace();
  return exporter;
}

void TrainerSessions::RegisterShards(
    const v1::RegisterShardsRequest* request,
    std::shared_ptr<Answer<v1::RegisterShardsResponse>> answer) {
  const absl::StatusOr<Session*> found = FindByName(request->session());
  if (!found.ok()) {
    answer->Finish(found.status());
    return;
  }
  const absl::Status status = CheckShards(*request);
  if (!status.ok()) {
    answer->Finish(status);
    return;
  }
  if (!HasDeviceMemory(*request)) {
    Register(*found, *request, {}, std::move(answer));
    return;
  }
  // A GPU's agent may have to start first.
  node_.copies->Run([this, id = (*found)->id, exporter = (*found)->exporter,
                     request, answer = std::move(answer)]() mutable {
    absl::StatusOr<DeviceRegions> devices =
        OpenDeviceMemory(node_.devices, exporter, *request);
    node_.loop->Post([this, id, request, devices = std::move(devices),
                      answer = std::move(answer)] {
      Session* session = Find(id);
      if (session == nullptr || !devices.ok()) {
        answer->Finish(devices.ok() ? SessionUnknown() : devices.status());
        return;
      }
      Register(session, *request, *devices, answer);
    });
  });
}

void TrainerSessions::Register(
    Session* session, const v1::RegisterShardsRequest& request,
    const DeviceRegions& devices,
    std::shared_ptr<Answer<v1::RegisterShardsResponse>> answer) {
  absl::StatusOr<std::shared_ptr<Registration>> resolved =
      Resolve(*session, request, devices);
  if (!resolved.ok()) {
    answer->Finish(resolved.status());
    return;
  }
  std::shared_ptr<Registration> registration = *std::move(resolved);
  const int64_t model_bytes = ModelBytes(registration->shards);
  // Before anybody can want its buckets.
  Place(*session, registration.get());
  // Room first: once the coordinator has taken the shards, other ranks count on
  // this one.
  node_.room->Need(
      session->identity.model(), RoomOf(session->identity), registration->bytes,
      model_bytes,
      [this, id = session->id, registration,
       answer](const absl::Status& status) {
        Session* session = Find(id);
        if (session == nullptr || !status.ok()) {
          if (session != nullptr) Place(*session, session->registration.get());
          answer->Finish(status.ok() ? SessionUnknown() : ApiStatus(status));
          return;
        }
        v1::NodeReport report;
        ReportShards(*session, *registration, report.mutable_rank_shards());
        node_.link->Ask(std::move(report), [this, id, registration, answer](
                                               const absl::Status& status,
                                               const v1::Reply& reply) {
          Registered(id, registration, status, reply, answer);
        });
      });
}

void TrainerSessions::Retire(
    const std::vector<std::shared_ptr<const DeviceShare>>& shares) {
  for (const auto& share : shares) {
    transport::cuda::RetireSegmentControl(share->control.get());
    arena_gone_(share->arena_id);
  }
}

void TrainerSessions::Place(const Session& session,
                            const Registration* registration) {
  if (node_.placement == nullptr) return;
  node_.placement->SetRank(
      session.identity.model(), session.identity.rank(),
      registration == nullptr
          ? ""
          : Placement::DeviceOfShards(*node_.memory, registration->regions,
                                      registration->shards));
}

void TrainerSessions::Registered(
    uint64_t id, std::shared_ptr<const Registration> registration,
    const absl::Status& status, const v1::Reply& reply,
    std::shared_ptr<Answer<v1::RegisterShardsResponse>> answer) {
  Session* session = Find(id);
  if (session == nullptr) {
    answer->Finish(SessionUnknown());
    return;
  }
  if (!status.ok()) {
    // What was registered before still is, and needs no more room than that.
    Place(*session, session->registration.get());
    if (session->registration == nullptr) {
      node_.room->Leave(session->identity.model(), RoomOf(session->identity));
    } else {
      node_.room->Need(session->identity.model(), RoomOf(session->identity),
                       session->registration->bytes, 0,
                       [](const absl::Status&) {});
    }
    answer->Finish(status);
    return;
  }
  std::vector<std::weak_ptr<const DeviceRegion>> before;
  std::vector<std::shared_ptr<const DeviceShare>> gone;
  if (session->registration != nullptr) {
    before = session->registration->devices;
    for (const auto& share : session->registration->shares) {
      if (std::find(registration->shares.begin(), registration->shares.end(),
                    share) == registration->shares.end())
        gone.push_back(share);
    }
  }
  session->registration = std::move(registration);
  Retire(gone);
  answer->response()->set_registered_rank_count(
      reply.rank_accepted().registered_rank_count());
  answer->response()->set_world_size(reply.rank_accepted().world_size());
  answer->response()->set_shard_bytes(session->registration->bytes);
  if (before.empty()) {
    answer->Finish(absl::OkStatus());
    return;
  }
  // The trainer may free what it had registered before when it hears of this.
  node_.copies->Run([this, before, gone, answer] {
    AwaitClosed(node_, before, gone);
    node_.loop->Post([answer] { answer->Finish(absl::OkStatus()); });
  });
}

void TrainerSessions::PublishVersion(
    const v1::PublishVersionRequest& request,
    std::shared_ptr<Answer<v1::PublishVersionResponse>> answer) {
  absl::Status status = CheckPublish(request);
  const absl::StatusOr<Session*> found = FindByName(request.session());
  if (status.ok()) status = found.status();
  if (status.ok() && (*found)->registration == nullptr) {
    status = ErrorStatus(
        absl::StatusCode::kFailedPrecondition, "NOT_REGISTERED",
        absl::StrCat(
            (*found)->Name(),
            " has not registered any shards; call RegisterShards first"));
  }
  if (!status.ok()) {
    answer->Finish(status);
    return;
  }
  Session* session = *found;
  v1::NodeReport report;
  v1::PublishArrived* arrived = report.mutable_publish_arrived();
  arrived->set_model(session->identity.model());
  arrived->set_rank(session->identity.rank());
  arrived->set_session(session->session);
  arrived->set_request_id(request.request_id());
  arrived->set_version(request.version());
  arrived->set_step(request.step());
  *arrived->mutable_options() = request.options();
  // The coordinator gives up by itself after publish_timeout, with names; a
  // caller with less patience is answered here.
  const Loop::TimerId timer =
      node_.loop->PostAt(answer->deadline(), [answer, name = session->Name()] {
        answer->Finish(ErrorStatus(
            absl::StatusCode::kDeadlineExceeded, "PUBLISH_TIMEOUT",
            absl::StrCat("the publish of ", name,
                         " was not taken before the deadline: other "
                         "ranks are missing, or the update before it still "
                         "runs; repeat it with "
                         "the same request_id")));
      });
  node_.link->Ask(
      std::move(report),
      [this, id = session->id, answer, timer, options = request.options()](
          const absl::Status& status, const v1::Reply& reply) {
        Session* session = Find(id);
        const v1::PublishOpened& opened = reply.publish_opened();
        if (session != nullptr && opened.publish_index() > 0) {
          session->publish_index = opened.publish_index();
        }
        node_.loop->Cancel(timer);
        if (session == nullptr || !status.ok()) {
          answer->Finish(status.ok() ? SessionUnknown() : status);
          return;
        }
        v1::PublishVersionResponse* response = answer->response();
        if (!answer->finished()) {
          response->set_version(opened.version());
          response->set_version_name(absl::StrCat(
              session->identity.model(), "/versions/", opened.version()));
          response->set_update_id(opened.update_id());
        }
        if (opened.repeated_request()) {
          if (!answer->finished()) {
            response->set_copied_bytes(opened.copied_bytes());
            *response->mutable_copy_duration() = opened.copy_duration();
          }
          answer->Finish(absl::OkStatus());
          return;
        }
        // Copied even if the caller has given up: the update waits for this
        // rank's bytes.
        Copy(session, opened, options, answer);
      });
}

void TrainerSessions::Copy(
    Session* session, const v1::PublishOpened& opened,
    const v1::UpdateOptions& options,
    std::shared_ptr<Answer<v1::PublishVersionResponse>> answer) {
  auto& waiting = session->copying[opened.update_id()];
  waiting.push_back(std::move(answer));
  if (waiting.size() > 1) return;
  RankSource source;
  source.model = session->identity.model();
  source.update_id = opened.update_id();
  source.version = opened.version();
  source.layout_id = opened.layout_id();
  source.rank = session->identity.rank();
  source.regions = session->registration->regions;
  source.shards = session->registration->shards;
  source.keep_alive = session->registration;
  source.cancel = session->cancel;
  source.in_place = options.publish_mode() == v1::PUBLISH_MODE_IN_PLACE;
  source.verify_source = options.verify_source();
  // Through `data`, so that the layout that came before it is known.
  node_.data->Post([this, id = session->id,
                    source = std::move(source)]() mutable {
    node_.copies->Run([this, id, source = std::move(source)]() mutable {
      absl::StatusOr<SnapshotResult> result = node_.mover->SnapshotRank(source);
      const std::string update_id = source.update_id;
      source = RankSource();
      node_.loop->Post([this, id, update_id, result = std::move(result)] {
        Copied(id, update_id, result);
      });
    });
  });
}

void TrainerSessions::Copied(uint64_t id, const std::string& update_id,
                             const absl::StatusOr<SnapshotResult>& result) {
  // Of a session that has ended, the calls have ended.
  Session* session = Find(id);
  if (session == nullptr) return;
  auto it = session->copying.find(update_id);
  if (it == session->copying.end()) return;
  for (const auto& answer : it->second) {
    if (answer->finished()) continue;
    if (result.ok()) {
      answer->response()->set_copied_bytes(result->copied_bytes);
      *answer->response()->mutable_copy_duration() =
          EncodeDuration(result->copy_duration);
    }
    answer->Finish(ApiStatus(result.status()));
  }
  session->copying.erase(it);
}

void TrainerSessions::CheckLeases(absl::Time now) {
  std::vector<std::pair<uint64_t, absl::Status>> over;
  for (const auto& entry : sessions_) {
    absl::Status status = entry.second->CheckTime(now, node_);
    if (!status.ok()) over.emplace_back(entry.first, std::move(status));
  }
  for (const auto& entry : over) End(entry.first, entry.second);
}

void TrainerSessions::ForgiveSilence(absl::Time now) {
  for (const auto& entry : sessions_) entry.second->last_heard = now;
}

void TrainerSessions::EndAll(const absl::Status& why) {
  down_ = why;
  std::vector<uint64_t> ids;
  for (const auto& entry : sessions_) ids.push_back(entry.first);
  for (uint64_t id : ids) End(id, why);
}

}  // namespace daemon
}  // namespace weightsync
