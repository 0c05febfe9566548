// Measures whole updates, from a trainer's publish to a worker's memory,
// through daemons that run already; beside each update it measures, in the same
// minute, what the machine does without weightsync. tests/bench/run.sh starts
// the daemons, in network namespaces where the network is measured, and calls
// this program once per process:
//
//   product_bench --role=worker --address=… --replica=r1 [--sink_port=7000]
//     One replica with one worker that wants the whole model. With --sink_port
//     it is also the receiving end of plain sockets. Prints "ready" and stays
//     until its standard input ends.
//
//   product_bench --role=trainer --address=… --replicas=N --value=… --floor=…
//     One rank that holds the whole model. Waits for the replicas, publishes
//     --warm_up + --runs versions, and prints one JSON object a line.
//
// Values: what is taken of each update.
//   applied   GB/s from the call of publish to the last worker's apply
//   transfer  GB/s of the phase from the first byte to VERIFIED
//   seconds   of that phase
//   pause     seconds from the first replica's pause to the last one's resume
//   stall     seconds that the trainer's publish took
// Floors: what is measured beside it, in the same unit.
//   memcpy    of as many bytes, by two threads, one call each
//   memcpy_tensors  the same, one call for each tensor: where the C library
//             streams round the cache only in large calls, this is slower
//   sockets   of as many bytes to --sink, by the best of 1, 2 and 4 streams
// With --predict two more lines, of the seconds of the transfer beside those
// that were predicted:
//   predict_…          by the cost model, for links as fast as the plain
//   sockets
//                      were just before, and copies as fast as the last ones;
//                      the nodes share one machine's processors, so that
//                      copying out takes its time from sending
//   predict_…_learned  by the daemon, from the updates before
#include <gflags/gflags.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cc/replica.h"
#include "client/cc/rpc.h"
#include "client/cc/trainer.h"
#include "client/cc/worker.h"
#include "glog/logging.h"
#include "schedule/cost.h"
#include "tests/bench/floor.h"
#include "weightsync/v1/admin.grpc.pb.h"

DEFINE_string(role, "", "\"trainer\" or \"worker\".");
DEFINE_string(address, "", "Of the daemon of this node.");
DEFINE_string(model, "bench", "Name of the model.");
DEFINE_int64(bytes, int64_t{1} << 30, "Size of the model; bf16 elements.");
DEFINE_int64(tensor_bytes, int64_t{32} << 20, "Size of its tensors.");

// Worker.
DEFINE_string(replica, "r1", "Name of the replica.");
DEFINE_bool(stay, false,
            "Stay until SIGTERM instead of the end of the standard input.");
DEFINE_int32(copy_threads, 0, "Of the worker; 0: the library's choice.");
DEFINE_int32(sink_port, 0, "Port of the sink of plain sockets; 0: none.");

// Trainer.
DEFINE_string(bench, "", "Name of the benchmark in what is printed.");
DEFINE_int32(replicas, 1, "How many replicas to wait for.");
DEFINE_int32(warm_up, 2, "Updates that are not counted.");
DEFINE_int32(runs, 5, "Updates that are counted.");
DEFINE_string(
    value, "applied",
    "\"applied\", \"transfer\", \"seconds\", \"pause\" or \"stall\".");
DEFINE_bool(stream, false,
            "UPDATE_MODE_STREAM and PUBLISH_MODE_IN_PLACE, with "
            "allow_no_recovery.");
DEFINE_string(floor, "memcpy",
              "\"memcpy\", \"memcpy_tensors\" or \"sockets\".");
DEFINE_string(sink, "", "\"host:port\" of the sink of plain sockets.");
DEFINE_bool(predict, false, "Compares predictions, too.");
DEFINE_bool(verbose, false, "Prints every update to stderr.");

namespace weightsync {
namespace bench {
namespace {

constexpr absl::Duration kPatience = absl::Minutes(2);

// The model: equal matrices, the last one shorter.
std::vector<client::Tensor> MakeTensors(char* data) {
  std::vector<client::Tensor> tensors;
  for (int64_t begin = 0; begin < FLAGS_bytes; begin += FLAGS_tensor_bytes) {
    const int64_t bytes = std::min(FLAGS_tensor_bytes, FLAGS_bytes - begin);
    client::Tensor tensor;
    tensor.name = absl::StrCat("layers.", tensors.size(), ".weight");
    tensor.dtype = v1::DTYPE_BF16;
    tensor.shape = {bytes / 2048, 1024};
    tensor.data = data + begin;
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

absl::Time FromProto(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) +
         absl::Nanoseconds(time.nanos());
}

absl::Duration FromProto(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) +
         absl::Nanoseconds(duration.nanos());
}

absl::Status RunWorker() {
  if (FLAGS_sink_port > 0) StartSink("0.0.0.0", FLAGS_sink_port, FLAGS_bytes);
  WarmMemory memory(FLAGS_bytes);
  const std::string incarnation = client::RandomId();

  client::WorkerOptions worker_options;
  worker_options.address = FLAGS_address;
  worker_options.model = FLAGS_model;
  worker_options.replica = FLAGS_replica;
  worker_options.incarnation = incarnation;
  worker_options.client = "product_bench";
  worker_options.copy_threads = FLAGS_copy_threads;
  absl::StatusOr<std::unique_ptr<client::Worker>> worker =
      client::Worker::Start(worker_options, MakeTensors(memory.data()));
  if (!worker.ok()) return worker.status();

  client::ReplicaOptions replica_options;
  replica_options.address = FLAGS_address;
  replica_options.model = FLAGS_model;
  replica_options.replica = FLAGS_replica;
  replica_options.incarnation = incarnation;
  replica_options.client = "product_bench";
  client::ReplicaHooks hooks;
  hooks.on_pause =
      [](const client::PauseRequest&) -> absl::StatusOr<std::string> {
    return std::string("nothing ran");
  };
  hooks.on_resume = [](const client::ResumeInfo&) { return absl::OkStatus(); };
  absl::StatusOr<std::unique_ptr<client::Replica>> replica =
      client::Replica::Start(replica_options, hooks);
  if (!replica.ok()) return replica.status();

  absl::Status status = (*worker)->WaitRegistered(kPatience);
  if (status.ok()) status = (*replica)->WaitRegistered(kPatience);
  if (!status.ok()) return status;
  std::printf("ready\n");
  std::fflush(stdout);
  char ignored;
  while (FLAGS_stay ? pause() != 0 : read(STDIN_FILENO, &ignored, 1) > 0) {
  }
  (*replica)->Close();
  (*worker)->Close();
  return absl::OkStatus();
}

// Waits until that many replicas of the model serve, or could.
absl::Status WaitForReplicas(v1::AdminService::Stub* admin) {
  const absl::Time deadline = absl::Now() + kPatience;
  int serving = 0;
  while (absl::Now() < deadline) {
    grpc::ClientContext context;
    client::PrepareContext(deadline, &context);
    v1::ListReplicasRequest request;
    request.set_parent(client::ModelName(FLAGS_model));
    v1::ListReplicasResponse response;
    const grpc::Status status =
        admin->ListReplicas(&context, request, &response);
    if (!status.ok()) return client::CallStatus("ListReplicas", status);
    serving = 0;
    for (const v1::Replica& replica : response.replicas()) {
      serving += replica.state() == v1::Replica::STATE_SERVING;
    }
    if (serving >= FLAGS_replicas) return absl::OkStatus();
    absl::SleepFor(absl::Milliseconds(50));
  }
  return absl::DeadlineExceededError(absl::StrCat(
      serving, " of ", FLAGS_replicas, " replicas serve the model"));
}

bool InSeconds() {
  return FLAGS_value == "seconds" || FLAGS_value == "pause" ||
         FLAGS_value == "stall";
}

struct Update {
  double value = 0;  // in the unit of the benchmark
  double transfer_seconds = 0;
  double predicted_seconds = 0;  // by the daemon
  double copy_seconds = 0;       // out of the trainer
};

// One update, and what was taken of it.
absl::StatusOr<Update> MeasureUpdate(client::Trainer* trainer) {
  const absl::Time start = absl::Now();
  client::PublishOptions options;
  if (FLAGS_stream) {
    options.update.set_update_mode(v1::UPDATE_MODE_STREAM);
    options.update.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
    options.update.set_allow_no_recovery(true);
  }
  absl::StatusOr<client::PublishResult> published = trainer->Publish(options);
  if (!published.ok()) return published.status();
  absl::StatusOr<v1::Version> version = trainer->Wait(*published, kPatience);
  if (!version.ok()) return version.status();
  if (version->replicas_size() < FLAGS_replicas) {
    return absl::InternalError(absl::StrCat(
        version->name(), " reached ", version->replicas_size(), " replicas"));
  }
  absl::Duration transfer;
  absl::Duration predicted;
  for (const v1::PhaseTime& phase : version->phases()) {
    if (phase.phase() != "transfer") continue;
    transfer = FromProto(phase.measured());
    predicted = FromProto(phase.predicted());
  }
  absl::Time applied = start;
  absl::Time paused = absl::InfiniteFuture();
  absl::Time resumed = start;
  for (const v1::ReplicaTimes& replica : version->replicas()) {
    applied = std::max(applied, FromProto(replica.applied_time()));
    paused = std::min(paused, FromProto(replica.paused_time()));
    resumed = std::max(resumed, FromProto(replica.resumed_time()));
  }
  if (FLAGS_verbose) {
    std::fprintf(stderr, "%s: stall %.3f s, copy %.3f s, applied %.3f s",
                 version->name().c_str(),
                 absl::ToDoubleSeconds(published->stall),
                 absl::ToDoubleSeconds(published->copy_duration),
                 absl::ToDoubleSeconds(applied - start));
    for (const v1::PhaseTime& phase : version->phases()) {
      std::fprintf(stderr, ", %s %.3f", phase.phase().c_str(),
                   absl::ToDoubleSeconds(FromProto(phase.measured())));
    }
    std::fprintf(stderr, "\n");
  }
  absl::Duration time = transfer;
  if (FLAGS_value == "applied") time = applied - start;
  if (FLAGS_value == "pause") time = resumed - paused;
  if (FLAGS_value == "stall") time = published->stall;
  if (time <= absl::ZeroDuration()) {
    return absl::InternalError(
        absl::StrCat(version->name(), " says nothing of its times"));
  }
  const double seconds = absl::ToDoubleSeconds(time);
  Update update;
  update.value = InSeconds() ? seconds : FLAGS_bytes / seconds / 1e9;
  update.transfer_seconds = absl::ToDoubleSeconds(transfer);
  update.predicted_seconds = absl::ToDoubleSeconds(predicted);
  update.copy_seconds = absl::ToDoubleSeconds(published->copy_duration);
  return update;
}

// What the cost model expects of this model's way along a chain of all
// replicas' nodes, over links of `rate` bytes a second, while copying it out
// takes `copy_seconds`.
double PredictTransfer(double rate, double copy_seconds) {
  schedule::Flow flow;
  flow.bytes = FLAGS_bytes;
  for (int node = 1; node <= FLAGS_replicas; ++node) flow.chain.push_back(node);
  std::vector<schedule::NodeLabels> nodes(FLAGS_replicas + 1);
  schedule::CostEstimate cost;
  cost.nodes.resize(nodes.size());
  schedule::Rates rates;
  rates.link = rate;
  schedule::EstimateTransfer({flow}, nodes, rates, &cost);
  return cost.transfer_seconds + copy_seconds;
}

absl::StatusOr<double> MeasureFloor(const WarmMemory& source,
                                    const WarmMemory* target) {
  absl::Duration best = absl::InfiniteDuration();
  if (FLAGS_floor == "memcpy") {
    best = TimeMemcpy(source, *target, 2);
  } else if (FLAGS_floor == "memcpy_tensors") {
    best = TimeMemcpy(source, *target, 2, FLAGS_tensor_bytes);
  } else {
    const std::pair<std::string, std::string> sink =
        absl::StrSplit(FLAGS_sink, absl::MaxSplits(':', 1));
    int port = 0;
    if (!absl::SimpleAtoi(sink.second, &port)) {
      return absl::InvalidArgumentError("--sink is not host:port");
    }
    for (int streams : {1, 2, 4}) {
      best = std::min(best, TimeSockets(source, sink.first, port, streams));
    }
  }
  const double seconds = absl::ToDoubleSeconds(best);
  return InSeconds() ? seconds : FLAGS_bytes / seconds / 1e9;
}

double Median(std::vector<double> values) {
  CHECK(!values.empty());
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle]
                                : (values[middle - 1] + values[middle]) / 2;
}

absl::Status RunTrainer() {
  client::TrainerOptions options;
  options.address = FLAGS_address;
  options.model = FLAGS_model;
  options.client = "product_bench";
  absl::StatusOr<std::unique_ptr<client::Trainer>> trainer =
      client::Trainer::Connect(options);
  if (!trainer.ok()) return trainer.status();
  absl::StatusOr<client::TrainerArena> arena =
      (*trainer)->AllocateArena(FLAGS_bytes);
  if (!arena.ok()) return arena.status();
  std::mt19937_64 random(1);
  for (int64_t i = 0; i + 8 <= FLAGS_bytes; i += 8) {
    const uint64_t word = random();
    std::copy_n(reinterpret_cast<const char*>(&word), 8, arena->data + i);
  }
  absl::StatusOr<v1::RegisterShardsResponse> registered =
      (*trainer)->RegisterShards(MakeTensors(arena->data));
  if (!registered.ok()) return registered.status();

  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel =
      client::MakeChannel(FLAGS_address);
  if (!channel.ok()) return channel.status();
  std::unique_ptr<v1::AdminService::Stub> admin =
      v1::AdminService::NewStub(*channel);
  absl::Status status = WaitForReplicas(admin.get());
  if (!status.ok()) return status;

  WarmMemory source(FLAGS_bytes);
  std::unique_ptr<WarmMemory> target;
  if (FLAGS_floor != "sockets") target.reset(new WarmMemory(FLAGS_bytes));

  std::vector<double> values, floors, ratios;
  std::vector<double> transfers, predicted, predicted_ratios;
  std::vector<double> learned, learned_ratios;
  double copy_seconds = 0;
  for (int run = -FLAGS_warm_up; run < FLAGS_runs; ++run) {
    // What changes between versions must not be a whole model: it is the
    // trainer's own work, and not what is measured.
    for (int64_t i = 0; i < FLAGS_bytes; i += 4096) ++arena->data[i];
    absl::StatusOr<double> floor = MeasureFloor(source, target.get());
    if (!floor.ok()) return floor.status();
    absl::StatusOr<Update> update = MeasureUpdate(trainer->get());
    if (!update.ok()) return update.status();
    const double expected = PredictTransfer(
        FLAGS_value == "seconds" ? FLAGS_bytes / *floor : *floor * 1e9,
        copy_seconds);
    copy_seconds = update->copy_seconds;
    if (FLAGS_verbose) {
      std::fprintf(stderr,
                   "run %d: value %.4f floor %.4f, transfer %.4f s, predicted "
                   "%.4f s, learned %.4f s\n",
                   run, update->value, *floor, update->transfer_seconds,
                   expected, update->predicted_seconds);
    }
    if (run < 0) continue;
    values.push_back(update->value);
    floors.push_back(*floor);
    ratios.push_back(update->value / *floor);
    transfers.push_back(update->transfer_seconds);
    predicted.push_back(expected);
    predicted_ratios.push_back(update->transfer_seconds / expected);
    learned.push_back(update->predicted_seconds);
    learned_ratios.push_back(update->transfer_seconds /
                             std::max(1e-9, update->predicted_seconds));
  }
  const char* unit = InSeconds() ? "s" : "GB/s";
  std::printf(
      "{\"bench\": \"%s\", \"value\": %.4f, \"unit\": \"%s\", \"floor\": %.4f, "
      "\"floor_unit\": \"%s %s\", \"ratio\": %.4f, \"runs\": %zu}\n",
      FLAGS_bench.c_str(), Median(values), unit, Median(floors), unit,
      FLAGS_floor == "memcpy" ? "memcpy, 2 threads"
      : FLAGS_floor == "memcpy_tensors"
          ? "memcpy by tensor, 2 threads"
          : "plain sockets, best of 1, 2, 4 streams",
      Median(ratios), values.size());
  if (FLAGS_predict) {
    const auto print = [&](const char* suffix, const char* by,
                           const std::vector<double>& expected,
                           const std::vector<double>& compared) {
      std::printf(
          "{\"bench\": \"predict_%s%s\", \"value\": %.4f, \"unit\": \"s\", "
          "\"floor\": %.4f, \"floor_unit\": \"s predicted %s\", \"ratio\": "
          "%.4f, \"runs\": %zu}\n",
          FLAGS_bench.c_str(), suffix, Median(transfers), Median(expected), by,
          Median(compared), transfers.size());
    };
    print("", "from plain sockets", predicted, predicted_ratios);
    print("_learned", "by the daemon", learned, learned_ratios);
  }
  std::fflush(stdout);
  return absl::OkStatus();
}

}  // namespace
}  // namespace bench
}  // namespace weightsync

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;
  google::InitGoogleLogging(argv[0]);
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  absl::Status status;
  if (FLAGS_role == "worker") {
    status = weightsync::bench::RunWorker();
  } else if (FLAGS_role == "trainer") {
    status = weightsync::bench::RunTrainer();
  } else {
    status = absl::InvalidArgumentError("--role is trainer or worker");
  }
  if (!status.ok()) {
    std::fprintf(stderr, "product_bench: %s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}
