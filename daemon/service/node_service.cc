#include "daemon/service/node_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/service/answer.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

grpc::ServerBidiReactor<v1::NodeReport, v1::NodeCommand>*
NodeServiceImpl::Connect(grpc::CallbackServerContext* context) {
  std::shared_ptr<Stream> stream = Stream::Open(context);
  auto* reactor = stream->reactor();
  bool down;
  {
    absl::MutexLock lock(&mutex_);
    down = down_;
    if (!down) streams_.insert(stream);
  }
  if (loop_ == nullptr || down) {
    stream->Start([](const v1::NodeReport&) {}, [] {},
                  [this, stream] {
                    absl::MutexLock lock(&mutex_);
                    streams_.erase(stream);
                  });
    stream->Finish(
        down ? ShuttingDown()
             : ErrorStatus(
                   absl::StatusCode::kFailedPrecondition, "NOT_COORDINATOR",
                   absl::StrCat("this daemon follows the coordinator at ",
                                coordinator_, "; dial that one")));
    return reactor;
  }
  // The loop knows the stream before its first report.
  const std::string name = loop_->Connected(
      {[stream](v1::NodeCommand command) { stream->Write(std::move(command)); },
       [stream](const absl::Status& status) { stream->Finish(status); }});
  stream->Start(
      [this, name](v1::NodeReport report) {
        loop_->Report(name, std::move(report));
      },
      [stream] { stream->Finish(absl::OkStatus()); },
      [this, name, stream] {
        loop_->Disconnected(name);
        absl::MutexLock lock(&mutex_);
        streams_.erase(stream);
      });
  return reactor;
}

void NodeServiceImpl::Shutdown() {
  absl::flat_hash_set<std::shared_ptr<Stream>> streams;
  {
    absl::MutexLock lock(&mutex_);
    down_ = true;
    streams = streams_;
  }
  for (const std::shared_ptr<Stream>& stream : streams)
    stream->Finish(ShuttingDown());
}

}  // namespace daemon
}  // namespace weightsync
