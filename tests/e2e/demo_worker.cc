// One replica of the demo: an engine of one worker, or of several that share
// the model by tensor parallelism. It knows the model's shapes, and nothing of
// its values but what arrives.
#include <gflags/gflags.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "client/cc/replica.h"
#include "client/cc/rpc.h"
#include "client/cc/worker.h"
#include "glog/logging.h"
#include "tests/e2e/demo_engine.h"
#include "tests/e2e/demo_model.h"
#include "tests/e2e/demo_util.h"
#include "tests/gpu/gpu_buffer.h"

DEFINE_string(address, "", "The daemon of this node; empty: the usual place.");
DEFINE_string(name, "demo", "What the model is called in the cluster.");
DEFINE_string(model, "qwen2.5-0.5b",
              "A published model; see schedule/models.h.");
DEFINE_string(safetensors, "",
              "Take the shapes of this file's tensors instead.");
DEFINE_string(replica, "replica-0", "What this replica is called.");
DEFINE_int32(workers, 1, "Tensor-parallel workers, all in this process.");
DEFINE_int32(versions, 3, "End after so many versions.");
DEFINE_int32(hash_parts, 1, "Hash each parameter in so many parts.");
DEFINE_string(hashes, "", "Write hashes of live memory to this file.");
DEFINE_string(dump_safetensors, "",
              "At the end write live memory to this file (.0, .1, ... for "
              "several workers).");
DEFINE_int32(timeout_s, 300, "Give up when no version comes for so long.");
DEFINE_bool(flip_bit, false, "Damage one bit before the last hash.");
DEFINE_bool(linger, false, "Go on serving until SIGTERM.");
DEFINE_string(memory, "host", "Where live memory is: host or cuda.");
DEFINE_int32(gpus, 1, "How many GPUs there are.");
DEFINE_int32(gpu, 0,
             "With --memory=cuda: the GPU of the first worker, as this process "
             "counts; others have the next ones.");

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;  // no files of its own
  google::InitGoogleLogging(argv[0]);
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  namespace demo = weightsync::demo;
  namespace client = weightsync::client;
  demo::HandleSignals();
  const auto model = demo::LoadModel(FLAGS_model, FLAGS_safetensors);
  demo::ExitUnless(model.status());

  // The workers, each with live memory for its boxes ...
  const std::string incarnation = client::RandomId();
  std::vector<std::vector<client::Tensor>> live;
  // With --memory=cuda `live` is a copy of what is on the GPUs, for hashing.
  std::vector<std::unique_ptr<demo::GpuBuffer>> gpus;
  std::vector<std::unique_ptr<client::Worker>> workers;
  for (int i = 0; i < FLAGS_workers; ++i) {
    live.push_back(demo::LiveTensors(*model, i, FLAGS_workers));
    client::WorkerOptions options;
    options.address = FLAGS_address;
    options.model = FLAGS_name;
    options.replica = FLAGS_replica;
    options.incarnation = incarnation;
    options.worker_index = i;
    options.worker_count = FLAGS_workers;
    options.client = "demo_worker";
    std::vector<client::Tensor> tensors = live.back();
    if (FLAGS_memory == "cuda") {
      std::vector<client::Tensor> sized = tensors;
      auto gpu = demo::GpuBuffer::Allocate((FLAGS_gpu + i) % FLAGS_gpus,
                                           demo::PlaceTensors(&sized, nullptr));
      demo::ExitUnless(gpu.status());
      gpus.push_back(*std::move(gpu));
      tensors = demo::OnGpu(tensors, static_cast<char*>(tensors[0].data),
                            gpus.back()->data());
    }
    auto worker = client::Worker::Start(options, tensors);
    demo::ExitUnless(worker.status());
    workers.push_back(*std::move(worker));
  }
  // ... and the engine that they make together.
  demo::Engine engine;
  client::ReplicaHooks hooks;
  hooks.on_pause = [&](const client::PauseRequest& pause) {
    return engine.Pause(pause.deadline);
  };
  hooks.on_resume = [&](const client::ResumeInfo& info) {
    return engine.Resume(info.version);
  };
  client::ReplicaOptions options;
  options.address = FLAGS_address;
  options.model = FLAGS_name;
  options.replica = FLAGS_replica;
  options.incarnation = incarnation;
  options.worker_count = FLAGS_workers;
  options.client = "demo_worker";
  auto replica = client::Replica::Start(options, hooks);
  demo::ExitUnless(replica.status());
  for (auto& worker : workers) {
    demo::ExitUnless(worker->WaitRegistered(absl::Minutes(5)));
  }
  std::puts("ready");
  std::fflush(stdout);

  for (int64_t version = 0; version < FLAGS_versions;) {
    version = engine.NextRequest(absl::Now() + absl::Seconds(FLAGS_timeout_s));
    if (version == 0)
      demo::ExitUnless(absl::DeadlineExceededError("no version came"));
    // Who wants to see nothing waits for no copy of it.
    const bool looks = !FLAGS_hashes.empty() || !FLAGS_dump_safetensors.empty();
    for (int i = 0; looks && i < FLAGS_workers; ++i) {
      char* const memory = static_cast<char*>(live[i][0].data);
      if (!gpus.empty()) demo::ExitUnless(gpus[i]->Read(memory));
      if (FLAGS_flip_bit && version == FLAGS_versions && i == 0) {
        demo::FlipBit(live[i]);
      }
      demo::ExitUnless(demo::AppendTo(
          FLAGS_hashes, demo::WorkerHashLines(*model, version, i, FLAGS_workers,
                                              FLAGS_hash_parts, live[i])));
    }
    engine.Done();
  }
  demo::ExitUnless(demo::DumpAll(FLAGS_dump_safetensors, *model, live));
  std::puts("done");
  std::fflush(stdout);
  if (FLAGS_linger) demo::WaitForSignal();
  return 0;
}
