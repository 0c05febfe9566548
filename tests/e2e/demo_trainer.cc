// One rank of the demo's trainer: holds its FSDP shard of a model and publishes
// version after version.
#include <gflags/gflags.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/cc/trainer.h"
#include "glog/logging.h"
#include "tests/e2e/demo_model.h"
#include "tests/e2e/demo_util.h"
#include "tests/gpu/gpu_buffer.h"

DEFINE_string(address, "", "The daemon of this node; empty: the usual place.");
DEFINE_string(name, "demo", "What the model is called in the cluster.");
DEFINE_string(model, "qwen2.5-0.5b",
              "A published model; see schedule/models.h.");
DEFINE_string(safetensors, "", "Publish this file's tensors instead.");
DEFINE_int32(rank, 0, "This rank.");
DEFINE_int32(world_size, 1, "How many ranks there are.");
DEFINE_int32(versions, 3, "How many versions to publish.");
DEFINE_int32(first_version, 0,
             "The number of the first one, the others follow; 0: the server "
             "counts, from 1 in a new cluster.");
DEFINE_string(times, "",
              "Append when each update began and ended, in seconds of the "
              "monotonic clock, to this file.");
DEFINE_int32(wait_replicas, 0, "Begin when so many replicas serve.");
DEFINE_string(hashes, "", "Write hashes of what was published to this file.");
DEFINE_string(worker_counts, "1,2",
              "The replicas' sizes: whose boxes are hashed.");
DEFINE_string(policies, "auto",
              "The transfer policy of each version in turn: auto, sharded, "
              "paired, broadcast.");
DEFINE_string(update_mode, "stage",
              "stage; or stream: in place, and with no second copy.");
DEFINE_bool(linger, false, "Stay registered until SIGTERM.");
DEFINE_string(memory, "host", "Where the tensors are: host or cuda.");
DEFINE_int32(gpu, 0, "With --memory=cuda: the GPU, as this process counts.");

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;  // no files of its own
  google::InitGoogleLogging(argv[0]);
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  namespace demo = weightsync::demo;
  namespace client = weightsync::client;
  namespace v1 = weightsync::v1;
  demo::HandleSignals();
  const auto policies = demo::ParsePolicies(FLAGS_policies);
  demo::ExitUnless(policies.status());
  const auto model = demo::LoadModel(FLAGS_model, FLAGS_safetensors);
  demo::ExitUnless(model.status());
  if (FLAGS_update_mode != "stage" && FLAGS_update_mode != "stream") {
    demo::ExitUnless(absl::InvalidArgumentError(
        "--update_mode is stage or stream, not " + FLAGS_update_mode));
  }

  // On a GPU the tensors are filled by way of a copy in host memory.
  std::unique_ptr<demo::GpuBuffer> gpu;
  std::vector<char> mirror;

  // The rank's lease, and memory for its shard.
  client::TrainerOptions options;
  options.address = FLAGS_address;
  options.model = FLAGS_name;
  options.rank = FLAGS_rank;
  options.world_size = FLAGS_world_size;
  options.client = "demo_trainer";
  auto trainer = client::Trainer::Connect(options);
  demo::ExitUnless(trainer.status());
  std::vector<client::Tensor> all =
      demo::FsdpShards(*model, FLAGS_rank, FLAGS_world_size);
  const int64_t bytes = demo::PlaceTensors(&all, nullptr);
  std::vector<client::Tensor> shards;
  if (bytes > 0 && FLAGS_memory == "cuda") {
    auto made = demo::GpuBuffer::Allocate(FLAGS_gpu, bytes);
    demo::ExitUnless(made.status());
    gpu = *std::move(made);
    mirror.resize(static_cast<size_t>(bytes));
    demo::PlaceTensors(&all, mirror.data());
    shards = demo::OnGpu(demo::Held(all), mirror.data(), gpu->data());
  } else if (bytes > 0) {
    auto arena = (*trainer)->AllocateArena(bytes);
    demo::ExitUnless(arena.status());
    demo::PlaceTensors(&all, arena->data);
    shards = demo::Held(all);
  }
  const double registering = demo::MonotonicSeconds();
  demo::ExitUnless((*trainer)->RegisterShards(shards).status());
  std::fputs(
      absl::StrFormat("registered tensors=%d seconds=%.6f\n", shards.size(),
                      demo::MonotonicSeconds() - registering)
          .c_str(),
      stdout);
  std::fflush(stdout);
  demo::ExitUnless(demo::WaitForReplicas(
      FLAGS_address, FLAGS_name, FLAGS_wait_replicas, absl::Minutes(2)));

  // Optional: groups and memory are there when the first version comes.
  if (FLAGS_wait_replicas > 0) {
    demo::ExitUnless((*trainer)->Prepare(absl::Minutes(2)).status());
  }

  const int first = std::max(1, FLAGS_first_version);
  const int last = first + FLAGS_versions - 1;
  for (int step = first; step <= last; ++step) {
    demo::ExitUnless(demo::FillAll(*model, step, last, all));
    if (gpu != nullptr) demo::ExitUnless(gpu->Write(mirror.data()));
    if (!FLAGS_hashes.empty()) {
      demo::ExitUnless(demo::AppendTo(
          FLAGS_hashes,
          demo::AllRankHashLines(*model, step, FLAGS_worker_counts, FLAGS_rank,
                                 all)));
    }
    client::PublishOptions publish;
    publish.step = step;
    if (FLAGS_first_version > 0) publish.version = step;
    if (FLAGS_update_mode == "stream") {
      publish.update.set_update_mode(v1::UPDATE_MODE_STREAM);
      publish.update.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
      publish.update.set_allow_no_recovery(true);
    }
    publish.update.set_transfer_policy(
        (*policies)[(step - first) % policies->size()]);
    const double began = demo::MonotonicSeconds();
    const auto published = (*trainer)->Publish(publish);
    demo::ExitUnless(published.status());
    // A real trainer would go on training here: the tensors are its own again.
    const auto version = (*trainer)->Wait(*published, absl::Minutes(5));
    demo::ExitUnless(version.status());
    demo::ExitUnless(demo::AppendTo(
        FLAGS_times,
        absl::StrFormat("%.6f %.6f\n", began, demo::MonotonicSeconds())));
    std::fputs(demo::ResultLine(*version, published->stall).c_str(), stdout);
    std::fflush(stdout);
  }
  std::puts("done");
  std::fflush(stdout);
  if (FLAGS_linger) demo::WaitForSignal();
  return 0;
}
