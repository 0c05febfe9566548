// Benchmarks of schedule/: how long plans take, how good and how large they
// are. One thread. Prints one JSON object per line:
//   {"bench", "value", "unit", "floor", "floor_unit", "ratio", "runs"}
// where `floor` is what the value is held against and ratio is value / floor.
//
//   plan_bench plan_deepseek | plan_growth | replan | simulate [--runs=N]
//
// plan_deepseek: DeepSeek-V3 (45,395 tensors) from 2,048 trainer ranks (4
//   pipeline stages of 512 ranks; 64 expert columns of 8 ranks each, the rest
//   sharded over all 512) to 1,024 workers: TP8 x 128 replicas, and EP32 x 32.
//   _auto: the first of them as `weightsyncctl plan` makes it, under AUTO, with
//   the catalog, the shards and the report.
// plan_growth: plan time against the number of shards, and its exponent.
// replan: a replica leaves; one of another shape joins.
// simulate: the plan's transfer, event by event, beside the cost model.

#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "schedule/describe.h"
#include "schedule/models.h"
#include "schedule/parallel.h"
#include "schedule/plan.h"
#include "schedule/simulate.h"

namespace weightsync {
namespace schedule {
namespace {

constexpr int kGpusPerNode = 8;

double Now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Of this process, which has one thread: what a core of its own would take.
double CpuNow() {
  struct timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * time.tv_nsec;
}

double PeakMib() {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

void Report(const std::string& bench, double value, const char* unit,
            double floor, const char* floor_unit, int runs) {
  std::printf(
      "{\"bench\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"floor\": %.6g, "
      "\"floor_unit\": \"%s\", \"ratio\": %.4f, \"runs\": %d}\n",
      bench.c_str(), value, unit, floor, floor_unit, value / floor, runs);
  std::fflush(stdout);
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) {
    std::fprintf(stderr, "%s\n", value.status().ToString().c_str());
    std::exit(1);
  }
  return *std::move(value);
}

struct Inputs {
  ModelConfig config;
  Catalog catalog;
  std::vector<SourceRank> sources;
  std::vector<WorkerNeed> workers;
  std::vector<NodeLabels> nodes;
  int64_t shards = 0;
};

void AddReplicas(const WorkerSpec& spec, int replicas, Inputs* in) {
  const std::vector<BoxListRef> needs =
      Must(WorkerLists(in->catalog, in->config, spec));
  for (int r = 0; r < replicas; ++r) {
    for (size_t w = 0; w < needs.size(); ++w) {
      if (w % kGpusPerNode == 0) {
        NodeLabels label;
        label.name = absl::StrFormat("inference-%04d", in->nodes.size());
        label.rack = absl::StrCat("i", in->nodes.size() / 8);
        in->nodes.push_back(std::move(label));
      }
      in->workers.push_back(
          WorkerNeed{static_cast<int32_t>(in->workers.size()),
                     static_cast<int32_t>(in->nodes.size()) - 1, needs[w]});
    }
  }
}

Inputs MakeInputs(const ModelConfig& config, const TrainerSpec& trainer,
                  const WorkerSpec& worker, int replicas) {
  Inputs in;
  in.config = config;
  in.catalog = Must(ModelCatalog(config));
  const std::vector<BoxListRef> shards =
      Must(TrainerLists(in.catalog, config, trainer));
  for (int r = 0; r < trainer.ranks; ++r) {
    in.sources.push_back(SourceRank{r, r / kGpusPerNode, shards[r]});
    in.shards += static_cast<int64_t>(shards[r]->boxes().size());
  }
  for (int n = 0; n < (trainer.ranks + kGpusPerNode - 1) / kGpusPerNode; ++n) {
    NodeLabels label;
    label.name = absl::StrFormat("trainer-%04d", n);
    label.rack = absl::StrCat("t", n / 8);
    in.nodes.push_back(std::move(label));
  }
  AddReplicas(worker, replicas, &in);
  return in;
}

TrainerSpec DeepSeekTrainer(int ranks) {
  TrainerSpec trainer;
  trainer.sharding = DataSharding::kDim0;
  trainer.ranks = ranks;
  trainer.pp = 4;
  trainer.ep = std::min(64, ranks / 4);
  return trainer;
}

UpdatePlan FullPlan(const Inputs& in) {
  return Must(PlanUpdate(Must(BuildLayout(in.catalog, in.sources, in.workers,
                                          kDefaultBucketBytes)),
                         in.nodes));
}

struct Times {
  double wall = 1e9;
  double cpu = 1e9;
};

// The best of `runs`, by the clock and by the processor: others may share the
// core.
template <typename Fn>
Times Best(int runs, Fn fn) {
  Times best;
  for (int i = 0; i < runs; ++i) {
    const double start = Now();
    const double cpu = CpuNow();
    fn();
    best.wall = std::min(best.wall, Now() - start);
    best.cpu = std::min(best.cpu, CpuNow() - cpu);
  }
  return best;
}

void ReportTimes(const std::string& bench, const Times& times, double allowed,
                 int runs) {
  Report(bench, times.wall, "s", allowed, "s allowed", runs);
  Report(bench + "_cpu", times.cpu, "s of one core", allowed, "s allowed",
         runs);
}

// In a process of its own, for the peak memory to be its own.
void PlanDeepSeek(const char* name, const WorkerSpec& worker, int replicas,
                  int runs) {
  const pid_t child = fork();
  if (child != 0) {
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) std::exit(1);
    return;
  }
  const double start = Now();
  const Inputs in = MakeInputs(*FindModel("deepseek-v3"), DeepSeekTrainer(2048),
                               worker, replicas);
  const double inputs = Now() - start;
  double ratio = 0;
  const Times times = Best(runs, [&] {
    const UpdatePlan plan = FullPlan(in);
    ratio = plan.cost.transfer_seconds / plan.cost.lower_bound_seconds;
    if (plan.layout.table->pieces.empty()) std::exit(1);
  });
  const std::string prefix = absl::StrCat("plan_deepseek_", name);
  ReportTimes(prefix, times, 2, runs);
  Report(prefix + "_inputs", inputs, "s", times.wall, "s plan", 1);
  Report(prefix + "_makespan", ratio, "of lower bound", 1.05, "allowed", 1);
  Report(prefix + "_memory", PeakMib(), "MiB peak", 1024, "MiB allowed", 1);
  Report(prefix + "_shards", static_cast<double>(in.shards), "shards",
         static_cast<double>(in.catalog.size()), "tensors", 1);
  std::fflush(stdout);
  _exit(0);
}

void PlanDescribed(int runs) {
  const Times times = Best(runs, [] {
    const ModelConfig model = *FindModel("deepseek-v3");
    const Catalog catalog = Must(ModelCatalog(model));
    PlanRequest request;
    request.catalog = &catalog;
    request.model = model;
    request.config.training_sharding = "fsdp";
    request.config.training_gpus = 2048;
    request.config.inference_replicas = 128;
    request.config.inference_tp = 8;
    request.training_pp = 4;
    request.training_ep = 64;
    const PlanReport report = Must(DescribePlan(request));
    if (report.policies.size() != 3) std::exit(1);
  });
  ReportTimes("plan_deepseek_auto", times, 2, runs);
}

void PlanGrowth(int runs) {
  std::vector<std::pair<double, double>> points;  // log shards, log seconds
  for (int layers : {15, 30, 61}) {
    for (int ranks : {256, 512, 1024, 2048}) {
      ModelConfig config = *FindModel("deepseek-v3");
      config.layers = layers;
      WorkerSpec worker;
      worker.tp = 8;
      const Inputs in =
          MakeInputs(config, DeepSeekTrainer(ranks), worker, ranks / 16);
      const double seconds = Best(runs, [&] { FullPlan(in); }).cpu;
      const auto size = static_cast<double>(in.shards);
      points.emplace_back(std::log(size), std::log(seconds));
      Report(absl::StrCat("plan_growth_", in.catalog.size(), "x", ranks),
             seconds, "s of one core", size, "shards", runs);
    }
  }
  double mx = 0, my = 0, xy = 0, xx = 0;
  for (const auto& p : points) {
    mx += p.first / points.size();
    my += p.second / points.size();
  }
  for (const auto& p : points) {
    xy += (p.first - mx) * (p.second - my);
    xx += (p.first - mx) * (p.first - mx);
  }
  Report("plan_growth_exponent", xy / xx, "power of shards", 1, "linear", runs);
}

void Replan(int runs) {
  WorkerSpec tp8;
  tp8.tp = 8;
  Inputs in =
      MakeInputs(*FindModel("deepseek-v3"), DeepSeekTrainer(2048), tp8, 128);
  const auto partition = Must(SourcePartition::Create(in.catalog, in.sources));
  const UpdateLayout before = Must(
      BuildLayout(in.catalog, *partition, in.workers, kDefaultBucketBytes));
  auto replan = [&](const std::vector<WorkerNeed>& workers) {
    Must(
        PlanUpdate(Must(RebuildLayout(before, in.catalog, *partition, workers)),
                   in.nodes));
  };
  const std::vector<WorkerNeed> fewer(in.workers.begin(),
                                      in.workers.end() - kGpusPerNode);
  ReportTimes("replan_replica_leaves", Best(runs, [&] { replan(fewer); }), 0.3,
              runs);
  WorkerSpec tp16;
  tp16.tp = 16;
  AddReplicas(tp16, 1, &in);
  ReportTimes("replan_other_shape_joins",
              Best(runs, [&] { replan(in.workers); }), 0.3, runs);
}

void Simulate(int runs) {
  WorkerSpec ep32;
  ep32.ep = 32;
  const Inputs in =
      MakeInputs(*FindModel("deepseek-v3"), DeepSeekTrainer(256), ep32, 4);
  const UpdatePlan plan = FullPlan(in);
  SimulationResult result;
  const Times times = Best(runs, [&] {
    result = Must(SimulateTransfer(plan.flows, in.nodes, Rates()));
  });
  Report("simulate_transfer", result.seconds, "s simulated",
         plan.cost.transfer_seconds, "s predicted", 1);
  Report("simulate_events", static_cast<double>(result.event_count), "events",
         times.cpu, "s of one core", runs);
}

int Main(int argc, char** argv) {
  int runs = 3;
  std::string bench;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--runs=", 7) == 0) {
      runs = std::max(1, std::atoi(argv[i] + 7));
    } else {
      bench = argv[i];
    }
  }
  if (bench == "plan_deepseek") {
    WorkerSpec tp8;
    tp8.tp = 8;
    PlanDeepSeek("tp8", tp8, 128, runs);
    WorkerSpec ep32;
    ep32.ep = 32;
    PlanDeepSeek("ep32", ep32, 32, runs);
    PlanDescribed(runs);
  } else if (bench == "plan_growth") {
    PlanGrowth(runs);
  } else if (bench == "replan") {
    Replan(runs);
  } else if (bench == "simulate") {
    Simulate(runs);
  } else {
    std::fprintf(stderr,
                 "usage: %s plan_deepseek|plan_growth|replan|simulate "
                 "[--runs=N]\n",
                 argv[0]);
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync

int main(int argc, char** argv) {
  return weightsync::schedule::Main(argc, argv);
}
