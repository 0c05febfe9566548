// Calls that a daemon which is not the coordinator hands on to it, with the
// caller's deadline.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_FORWARD_H_
#define WEIGHTSYNC_DAEMON_SERVICE_FORWARD_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "daemon/service/answer.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/server_callback.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

// Marks a call that was handed on once: two daemons that take each other for
// the coordinator would hand it to and fro.
inline constexpr char kForwardedKey[] = "weightsync-forwarded";

// FAILED_PRECONDITION (NOT_COORDINATOR) for a call that another daemon handed
// to this one, which is no coordinator either.
inline absl::Status CheckNotForwarded(
    const grpc::CallbackServerContext& context) {
  if (context.client_metadata().count(kForwardedKey) == 0)
    return absl::OkStatus();
  return ErrorStatus(
      absl::StatusCode::kFailedPrecondition, "NOT_COORDINATOR",
      "a daemon takes this one for the coordinator, which it is not; mend its "
      "--coordinator_address");
}

inline void PrepareForward(absl::Time deadline, grpc::ClientContext* context) {
  context->set_deadline(absl::ToChronoTime(deadline));
  context->AddMetadata(kForwardedKey, "1");
}

// What a weightsync server said stays as it is; what gRPC says about the way to
// it becomes COORDINATOR_UNREACHABLE.
inline grpc::Status ForwardedStatus(const grpc::Status& status,
                                    const std::string& coordinator) {
  if (status.ok() || !status.error_details().empty() ||
      status.error_code() == grpc::StatusCode::CANCELLED) {
    return status;
  }
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return ToGrpcStatus(
        ErrorStatus(absl::StatusCode::kDeadlineExceeded, "CALL_TIMEOUT",
                    absl::StrCat("the coordinator (", coordinator,
                                 ") did not answer before the deadline")));
  }
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return ToGrpcStatus(ErrorStatus(
        absl::StatusCode::kUnavailable, "COORDINATOR_UNREACHABLE",
        absl::StrCat("the coordinator (", coordinator,
                     ") cannot be reached now: ", status.error_message(),
                     "; try again with a back-off")));
  }
  return status;
}

// `call` makes the call on a stub: (context, request, response, callback).
// `grace`: how much longer than the answer's deadline to wait, where the
// coordinator keeps to a time in the request.
template <typename Request, typename Response, typename Call>
void Forward(std::shared_ptr<Answer<Response>> answer, const Request& request,
             const std::string& coordinator, absl::Duration grace, Call call) {
  // Lives until the callback; the response goes straight into the answer's.
  struct State {
    grpc::ClientContext context;
    Request request;
    std::shared_ptr<Answer<Response>> answer;
  };
  auto state = std::make_shared<State>();
  state->request = request;
  state->answer = std::move(answer);
  PrepareForward(state->answer->deadline() + grace, &state->context);
  // Who has gone asks the coordinator for nothing any more, and a daemon that
  // ends does not wait for its answer.
  state->answer->OnCancel([weak = std::weak_ptr<State>(state)] {
    if (const auto running = weak.lock()) running->context.TryCancel();
  });
  call(&state->context, &state->request, state->answer->response(),
       [state, coordinator](grpc::Status status) {
         state->answer->FinishAs(ForwardedStatus(status, coordinator));
         state->answer = nullptr;
       });
}

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_FORWARD_H_
