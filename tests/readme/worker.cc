// An inference replica of one worker: its weights change only while it is
// paused.
#include "client/cc/worker.h"

#include <unistd.h>

#include <cstdio>
#include <vector>

#include "client/cc/replica.h"
#include "client/cc/rpc.h"

namespace ws = weightsync::client;

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

int main(int argc, char** argv) {
  const std::string address = argc > 1 ? argv[1] : "";
  const std::string incarnation = ws::RandomId();  // another at every start

  const int64_t n = 1024;
  std::vector<float> weights(n * n);  // where the engine's weights stay

  ws::Tensor tensor;
  tensor.name = "linear.weight";
  tensor.dtype = weightsync::v1::DTYPE_F32;
  tensor.shape = {n, n};
  tensor.data = weights.data();

  ws::WorkerOptions options;
  options.address = address;
  options.model = "first";
  options.replica = "replica-0";
  options.incarnation = incarnation;
  auto worker = ws::Worker::Start(options, {tensor});
  if (!worker.ok()) return Fail(worker.status());

  ws::ReplicaOptions replica_options;
  replica_options.address = address;
  replica_options.model = "first";
  replica_options.replica = "replica-0";
  replica_options.incarnation = incarnation;
  ws::ReplicaHooks hooks;
  hooks.on_pause = [](const ws::PauseRequest&) -> absl::StatusOr<std::string> {
    return "drained 0 requests";  // stop the engine here
  };
  hooks.on_resume = [&](const ws::ResumeInfo& info) {
    std::printf("version %lld: weights are %g\n",
                static_cast<long long>(info.version), weights[0]);
    std::fflush(stdout);
    return absl::OkStatus();  // let the engine go on here
  };
  auto replica = ws::Replica::Start(replica_options, hooks);
  if (!replica.ok()) return Fail(replica.status());

  // The engine serves for as long as this process lives; updates come by
  // themselves.
  while (true) pause();
}
