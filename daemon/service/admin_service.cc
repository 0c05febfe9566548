#include "daemon/service/admin_service.h"

#include <utility>

#include "daemon/service/forward.h"
#include "daemon/service/proto_time.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

// A StatusOr of the coordinator, as the answer.
template <typename Response>
absl::Status Fill(absl::StatusOr<Response> result, Response* response) {
  if (!result.ok()) return result.status();
  *response = *std::move(result);
  return absl::OkStatus();
}

// How long the caller wants to wait; `otherwise` when he does not say.
template <typename Request>
absl::Duration Wish(const Request& request, absl::Duration otherwise) {
  return request.has_timeout() ? DecodeDuration(request.timeout()) : otherwise;
}

// Hands the coordinator's stream on, one message at a time, so that a caller
// that reads slowly slows the coordinator's stream down and fills no queue
// here.
class WatchRelay : public grpc::ClientReadReactor<v1::Version> {
 public:
  static void Start(v1::AdminService::Stub* stub,
                    const v1::WatchVersionRequest& request,
                    absl::optional<absl::Time> deadline,
                    const std::string& coordinator,
                    std::shared_ptr<VersionStream> stream,
                    std::function<void()> on_closed) {
    auto* relay = new WatchRelay(request, coordinator, stream);
    relay->context_.AddMetadata(kForwardedKey, "1");
    if (deadline.has_value())
      relay->context_.set_deadline(absl::ToChronoTime(*deadline));
    // Two users: this call, and the stream to the caller, which outlives it or
    // ends it.
    std::shared_ptr<WatchRelay> shared(relay);
    relay->self_ = shared;
    stream->Start([shared] { shared->StartRead(&shared->version_); },
                  [shared, on_closed = std::move(on_closed)] {
                    shared->context_.TryCancel();
                    shared->Release();
                    on_closed();
                  });
    stub->async()->WatchVersion(&relay->context_, &relay->request_, relay);
    // Reads begin outside of this call's own reactions.
    relay->AddHold();
    relay->StartRead(&relay->version_);
    relay->StartCall();
  }

 private:
  WatchRelay(const v1::WatchVersionRequest& request, std::string coordinator,
             std::shared_ptr<VersionStream> stream)
      : request_(request),
        coordinator_(std::move(coordinator)),
        stream_(std::move(stream)) {}

  void Release() {
    if (!released_.exchange(true)) RemoveHold();
  }

  void OnReadDone(bool ok) override {
    if (ok) {
      stream_->Write(std::move(version_));
      version_ = v1::Version();
    } else {
      // Nothing is written any more, so that nothing is read any more.
      Release();
    }
  }

  void OnDone(const grpc::Status& status) override {
    stream_->FinishAs(ForwardedStatus(status, coordinator_));
    std::shared_ptr<WatchRelay> self = std::move(self_);
  }

  const v1::WatchVersionRequest request_;
  const std::string coordinator_;
  const std::shared_ptr<VersionStream> stream_;
  grpc::ClientContext context_;
  v1::Version version_;
  std::atomic<bool> released_{false};
  // gRPC's own share.
  std::shared_ptr<WatchRelay> self_;
};

}  // namespace

AdminServiceImpl::AdminServiceImpl(CoordinatorAccess access, std::string node,
                                   Deadlines deadlines)
    : access_(std::move(access)),
      node_(std::move(node)),
      deadlines_(deadlines),
      stub_(access_.remote == nullptr
                ? nullptr
                : v1::AdminService::NewStub(access_.remote)) {}

template <typename Request, typename Response, typename Local, typename Method>
grpc::ServerUnaryReactor* AdminServiceImpl::Handle(
    grpc::CallbackServerContext* context, const Request* request,
    Response* response, absl::Duration timeout, Local local, Method method) {
  auto answer = std::make_shared<Answer<Response>>(context, response, timeout);
  grpc::ServerUnaryReactor* reactor = answer->reactor();
  if (access_.local != nullptr) {
    access_.local->Ask([answer = std::move(answer), request = *request, local](
                           const Coordinator& coordinator, absl::Time now) {
      answer->Finish(local(coordinator, now, request, answer->response()));
    });
    return reactor;
  }
  const absl::Status status = CheckNotForwarded(*context);
  if (!status.ok()) {
    answer->Finish(status);
    return reactor;
  }
  Forward(
      std::move(answer), *request, access_.name, absl::ZeroDuration(),
      [this, method](grpc::ClientContext* client, const Request* forwarded,
                     Response* into, std::function<void(grpc::Status)> done) {
        (stub_->async()->*method)(client, forwarded, into, std::move(done));
      });
  return reactor;
}

template <typename Request, typename Response, typename Method>
grpc::ServerUnaryReactor* AdminServiceImpl::Change(
    grpc::CallbackServerContext* context, const Request* request,
    Response* response, absl::Duration timeout, Method method) {
  // The coordinator's own deadline comes first, and has the better sentence.
  constexpr absl::Duration kGrace = absl::Seconds(2);
  auto answer = std::make_shared<Answer<Response>>(
      context, response, std::min(timeout, deadlines_.operation) + kGrace);
  grpc::ServerUnaryReactor* reactor = answer->reactor();
  if (timeout <= absl::ZeroDuration()) {
    answer->Finish(ErrorStatus(absl::StatusCode::kInvalidArgument,
                               "TIMEOUT_INVALID",
                               "give a positive timeout, or none"));
  } else if (access_.local != nullptr) {
    access_.local->Change(*request, answer->deadline(),
                          [answer](absl::StatusOr<AdminResponse> result) {
                            if (result.ok()) {
                              *answer->response() =
                                  absl::get<Response>(*std::move(result));
                            }
                            answer->Finish(result.status());
                          });
  } else if (const absl::Status status = CheckNotForwarded(*context);
             !status.ok()) {
    answer->Finish(status);
  } else {
    Forward(
        answer, *request, access_.name, absl::ZeroDuration(),
        [this, method](grpc::ClientContext* client, const Request* asked,
                       Response* into, std::function<void(grpc::Status)> done) {
          (stub_->async()->*method)(client, asked, into, std::move(done));
        });
  }
  return reactor;
}

// The stub's asynchronous method, of its two overloads the one with a callback.
#define WEIGHTSYNC_METHOD(name, Request, Response)                        \
  static_cast<void (v1::AdminService::StubInterface::async_interface::*)( \
      grpc::ClientContext*, const Request*, Response*,                    \
      std::function<void(grpc::Status)>)>(                                \
      &v1::AdminService::StubInterface::async_interface::name)

grpc::ServerUnaryReactor* AdminServiceImpl::GetCluster(
    grpc::CallbackServerContext* context, const v1::GetClusterRequest* request,
    v1::Cluster* response) {
  auto answer =
      std::make_shared<Answer<v1::Cluster>>(context, response, deadlines_.call);
  grpc::ServerUnaryReactor* reactor = answer->reactor();
  // The daemon that was asked, not the one that knows.
  const bool forwarded = context->client_metadata().count(kForwardedKey) > 0;
  const auto finish = [node = node_, forwarded](v1::Cluster* cluster) {
    if (!forwarded) cluster->set_answered_by("nodes/" + node);
    cluster->set_oldest_protocol_version(kOldestProtocolVersion);
    cluster->set_newest_protocol_version(kNewestProtocolVersion);
    cluster->set_software_version(kSoftwareVersion);
  };
  if (access_.local != nullptr) {
    access_.local->Ask(
        [answer, finish](const Coordinator& coordinator, absl::Time) {
          coordinator.FillCluster(answer->response());
          finish(answer->response());
          answer->Finish(absl::OkStatus());
        });
    return reactor;
  }
  const absl::Status status = CheckNotForwarded(*context);
  if (!status.ok()) {
    answer->Finish(status);
    return reactor;
  }
  Forward(answer, *request, access_.name, absl::ZeroDuration(),
          [this, finish](grpc::ClientContext* client,
                         const v1::GetClusterRequest* asked, v1::Cluster* into,
                         std::function<void(grpc::Status)> done) {
            stub_->async()->GetCluster(
                client, asked, into,
                [into, finish, done = std::move(done)](grpc::Status got) {
                  if (got.ok()) finish(into);
                  done(std::move(got));
                });
          });
  return reactor;
}

grpc::ServerUnaryReactor* AdminServiceImpl::ListNodes(
    grpc::CallbackServerContext* context, const v1::ListNodesRequest* request,
    v1::ListNodesResponse* response) {
  return Handle(
      context, request, response, deadlines_.call,
      [](const Coordinator& coordinator, absl::Time,
         const v1::ListNodesRequest& asked, v1::ListNodesResponse* into) {
        return Fill(coordinator.ListNodes(asked), into);
      },
      WEIGHTSYNC_METHOD(ListNodes, v1::ListNodesRequest,
                        v1::ListNodesResponse));
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetNode(
    grpc::CallbackServerContext* context, const v1::GetNodeRequest* request,
    v1::Node* response) {
  return Handle(
      context, request, response, deadlines_.call,
      [](const Coordinator& coordinator, absl::Time,
         const v1::GetNodeRequest& asked, v1::Node* into) {
        return Fill(coordinator.GetNode(asked.name()), into);
      },
      WEIGHTSYNC_METHOD(GetNode, v1::GetNodeRequest, v1::Node));
}

grpc::ServerUnaryReactor* AdminServiceImpl::ListModels(
    grpc::CallbackServerContext* context, const v1::ListModelsRequest* request,
    v1::ListModelsResponse* response) {
  return Handle(
      context, request, response, deadlines_.call,
      [](const Coordinator& coordinator, absl::Time,
         const v1::ListModelsRequest& asked, v1::ListModelsResponse* into) {
        return Fill(coordinator.ListModels(asked), into);
      },
      WEIGHTSYNC_METHOD(ListModels, v1::ListModelsRequest,
                        v1::ListModelsResponse));
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetModel(
    grpc::CallbackServerContext* context, const v1::GetModelRequest* request,
    v1::Model* response) {
  return Handle(
      context, request, response, deadlines_.call,
      [](const Coordinator& coordinator, absl::Time,
         const v1::GetModelRequest& asked, v1::Model* into) {
        return Fill(coordinator.GetModel(asked.name()), into);
      },
      WEIGHTSYNC_METHOD(GetModel, v1::GetModelRequest, v1::Model));
}

grpc::ServerUnaryReactor* AdminServiceImpl::ListReplicas(
    grpc::CallbackServerContext* context,
    const v1::ListReplicasRequest* request,
    v1::ListReplicasResponse* response) {
  return Handle(
      context, request, response, deadlines_.call,
      [](const Coordinator& coordinator, absl::Time,
         const v1::ListReplicasRequest& asked, v1::ListReplicasResponse* into) {
        return Fill(coordinator.ListReplicas(asked), into);
      },
      WEIGHTSYNC_METHOD(ListReplicas, v1::ListReplicasRequest,
                        v1::ListReplicasResponse));
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetReplica(
    grpc::CallbackServerContext* context, const v1::GetReplicaRequest* request,
    v1::Replica* response) {
  return Handle(
      context, request, response, deadlines_.call,
      [](const Coordinator& coordinator, absl::Time,
         const v1::GetReplicaRequest& asked, v1::Replica* into) {
        return Fill(coordinator.GetReplica(asked.name()), into);
      },
      WEIGHTSYNC_METHOD(GetReplica, v1::GetReplicaRequest, v1::Replica));
}

grpc::ServerUnaryReactor* AdminServiceImpl::ListVersions(
    grpc::CallbackServerContext* context,
    const v1::ListVersionsRequest* request,
    v1::ListVersionsResponse* response) {
  return Handle(
      context, request, response, deadlines_.call,
      [](const Coordinator& coordinator, absl::Time now,
         const v1::ListVersionsRequest& asked, v1::ListVersionsResponse* into) {
        return Fill(coordinator.ListVersions(asked, now), into);
      },
      WEIGHTSYNC_METHOD(ListVersions, v1::ListVersionsRequest,
                        v1::ListVersionsResponse));
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetVersion(
    grpc::CallbackServerContext* context, const v1::GetVersionRequest* request,
    v1::Version* response) {
  return Handle(
      context, request, response, deadlines_.call,
      [](const Coordinator& coordinator, absl::Time now,
         const v1::GetVersionRequest& asked, v1::Version* into) {
        return Fill(coordinator.GetVersion(asked.name(), "", now), into);
      },
      WEIGHTSYNC_METHOD(GetVersion, v1::GetVersionRequest, v1::Version));
}

grpc::ServerUnaryReactor* AdminServiceImpl::Prepare(
    grpc::CallbackServerContext* context, const v1::PrepareRequest* request,
    v1::PrepareResponse* response) {
  absl::Duration timeout = deadlines_.prepare;
  if (request->has_timeout())
    timeout = std::min(timeout, DecodeDuration(request->timeout()));
  auto answer =
      std::make_shared<Answer<v1::PrepareResponse>>(context, response, timeout);
  grpc::ServerUnaryReactor* reactor = answer->reactor();
  if (timeout <= absl::ZeroDuration()) {
    answer->Finish(ErrorStatus(absl::StatusCode::kInvalidArgument,
                               "TIMEOUT_INVALID",
                               "give a positive timeout, or none"));
  } else if (access_.local != nullptr) {
    access_.local->Prepare(
        *request, answer->deadline(),
        [answer](absl::StatusOr<v1::PrepareResponse> result) {
          const absl::Status status =
              Fill(std::move(result), answer->response());
          answer->Finish(status);
        });
  } else if (const absl::Status status = CheckNotForwarded(*context);
             !status.ok()) {
    answer->Finish(status);
  } else {
    Forward(answer, *request, access_.name, absl::ZeroDuration(),
            [this](grpc::ClientContext* client, const v1::PrepareRequest* asked,
                   v1::PrepareResponse* into,
                   std::function<void(grpc::Status)> done) {
              stub_->async()->Prepare(client, asked, into, std::move(done));
            });
  }
  return reactor;
}

grpc::ServerUnaryReactor* AdminServiceImpl::PauseReplica(
    grpc::CallbackServerContext* context,
    const v1::PauseReplicaRequest* request, v1::Replica* response) {
  return Change(
      context, request, response, Wish(*request, deadlines_.operation),
      WEIGHTSYNC_METHOD(PauseReplica, v1::PauseReplicaRequest, v1::Replica));
}

grpc::ServerUnaryReactor* AdminServiceImpl::ResumeReplica(
    grpc::CallbackServerContext* context,
    const v1::ResumeReplicaRequest* request, v1::Replica* response) {
  return Change(
      context, request, response, deadlines_.operation,
      WEIGHTSYNC_METHOD(ResumeReplica, v1::ResumeReplicaRequest, v1::Replica));
}

grpc::ServerUnaryReactor* AdminServiceImpl::RollbackModel(
    grpc::CallbackServerContext* context,
    const v1::RollbackModelRequest* request, v1::Model* response) {
  return Change(
      context, request, response, Wish(*request, deadlines_.operation),
      WEIGHTSYNC_METHOD(RollbackModel, v1::RollbackModelRequest, v1::Model));
}

grpc::ServerUnaryReactor* AdminServiceImpl::ReleaseModel(
    grpc::CallbackServerContext* context,
    const v1::ReleaseModelRequest* request, v1::Model* response) {
  return Change(
      context, request, response, Wish(*request, deadlines_.operation),
      WEIGHTSYNC_METHOD(ReleaseModel, v1::ReleaseModelRequest, v1::Model));
}

grpc::ServerUnaryReactor* AdminServiceImpl::VerifyReplica(
    grpc::CallbackServerContext* context,
    const v1::VerifyReplicaRequest* request,
    v1::VerifyReplicaResponse* response) {
  return Change(context, request, response,
                Wish(*request, deadlines_.operation),
                WEIGHTSYNC_METHOD(VerifyReplica, v1::VerifyReplicaRequest,
                                  v1::VerifyReplicaResponse));
}

grpc::ServerUnaryReactor* AdminServiceImpl::DrainNode(
    grpc::CallbackServerContext* context, const v1::DrainNodeRequest* request,
    v1::Node* response) {
  return Change(context, request, response, deadlines_.call,
                WEIGHTSYNC_METHOD(DrainNode, v1::DrainNodeRequest, v1::Node));
}

grpc::ServerUnaryReactor* AdminServiceImpl::DeleteVersion(
    grpc::CallbackServerContext* context,
    const v1::DeleteVersionRequest* request,
    v1::DeleteVersionResponse* response) {
  return Change(context, request, response, deadlines_.call,
                WEIGHTSYNC_METHOD(DeleteVersion, v1::DeleteVersionRequest,
                                  v1::DeleteVersionResponse));
}

grpc::ServerUnaryReactor* AdminServiceImpl::DeleteReplica(
    grpc::CallbackServerContext* context,
    const v1::DeleteReplicaRequest* request,
    v1::DeleteReplicaResponse* response) {
  return Change(context, request, response, deadlines_.call,
                WEIGHTSYNC_METHOD(DeleteReplica, v1::DeleteReplicaRequest,
                                  v1::DeleteReplicaResponse));
}

grpc::ServerUnaryReactor* AdminServiceImpl::RemoveModel(
    grpc::CallbackServerContext* context, const v1::RemoveModelRequest* request,
    v1::Model* response) {
  return Change(
      context, request, response, Wish(*request, deadlines_.operation),
      WEIGHTSYNC_METHOD(RemoveModel, v1::RemoveModelRequest, v1::Model));
}

grpc::ServerUnaryReactor* AdminServiceImpl::AdoptCluster(
    grpc::CallbackServerContext* context,
    const v1::AdoptClusterRequest* request, v1::Cluster* response) {
  return Change(
      context, request, response, deadlines_.call,
      WEIGHTSYNC_METHOD(AdoptCluster, v1::AdoptClusterRequest, v1::Cluster));
}

grpc::ServerUnaryReactor* AdminServiceImpl::SaveVersion(
    grpc::CallbackServerContext* context, const v1::SaveVersionRequest* request,
    v1::SaveVersionResponse* response) {
  return Change(context, request, response,
                Wish(*request, deadlines_.operation),
                WEIGHTSYNC_METHOD(SaveVersion, v1::SaveVersionRequest,
                                  v1::SaveVersionResponse));
}

grpc::ServerUnaryReactor* AdminServiceImpl::LoadVersion(
    grpc::CallbackServerContext* context, const v1::LoadVersionRequest* request,
    v1::Version* response) {
  return Change(
      context, request, response, Wish(*request, deadlines_.operation),
      WEIGHTSYNC_METHOD(LoadVersion, v1::LoadVersionRequest, v1::Version));
}

grpc::ServerWriteReactor<v1::Version>* AdminServiceImpl::WatchVersion(
    grpc::CallbackServerContext* context,
    const v1::WatchVersionRequest* request) {
  std::shared_ptr<VersionStream> stream = VersionStream::Open();
  grpc::ServerWriteReactor<v1::Version>* reactor = stream->reactor();
  const auto on_closed = [watches = watches_, stream] {
    absl::MutexLock lock(&watches->mutex);
    watches->open.erase(stream);
  };
  bool down;
  {
    absl::MutexLock lock(&watches_->mutex);
    down = watches_->down;
    if (!down) watches_->open.insert(stream);
  }
  absl::Status refused = absl::OkStatus();
  if (down) {
    refused = ShuttingDown();
  } else if (access_.local == nullptr) {
    refused = CheckNotForwarded(*context);
  }
  if (!refused.ok()) {
    stream->Start([] {}, on_closed);
    stream->Finish(refused);
  } else if (access_.local != nullptr) {
    FollowVersion(access_.local, request->name(), stream, on_closed);
  } else {
    // A watch may go on for as long as the caller likes.
    absl::optional<absl::Time> deadline;
    const absl::Time said = absl::FromChrono(std::min(
        context->deadline(),
        std::chrono::system_clock::now() + std::chrono::hours(24 * 365)));
    if (said < absl::Now() + absl::Hours(24 * 364)) deadline = said;
    WatchRelay::Start(stub_.get(), *request, deadline, access_.name, stream,
                      on_closed);
  }
  return reactor;
}

void AdminServiceImpl::Shutdown() {
  absl::flat_hash_set<std::shared_ptr<VersionStream>> open;
  {
    absl::MutexLock lock(&watches_->mutex);
    watches_->down = true;
    open = watches_->open;
  }
  for (const std::shared_ptr<VersionStream>& stream : open)
    stream->Finish(ShuttingDown());
}

}  // namespace daemon
}  // namespace weightsync
