#include "daemon/http/metrics.h"

#include <utility>
#include <vector>

#include "prometheus/client_metric.h"
#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"

namespace weightsync {
namespace daemon {

namespace {

using Labels = std::vector<prometheus::ClientMetric::Label>;

prometheus::MetricFamily Family(const std::string& name,
                                const std::string& help,
                                prometheus::MetricType type) {
  prometheus::MetricFamily family;
  family.name = "weightsync_" + name;
  family.help = help;
  family.type = type;
  return family;
}

void Add(prometheus::MetricFamily* family, Labels labels, double value) {
  prometheus::ClientMetric metric;
  metric.label = std::move(labels);
  metric.gauge.value = value;
  metric.counter.value = value;
  family->metric.push_back(std::move(metric));
}

Labels LabelsOf(const v1::GpuUse& gpu) {
  return {{"device_uuid", gpu.device_uuid()},
          {"device_name", gpu.device_name()}};
}

struct GpuFigure {
  const char* name;
  const char* help;
  prometheus::MetricType type;
  double (*value)(const v1::GpuUse& gpu);
};

constexpr prometheus::MetricType kGauge = prometheus::MetricType::Gauge;

const GpuFigure kGpuFigures[] = {
    {"gpu_up", "1: its device agent is ready.", kGauge,
     [](const v1::GpuUse& gpu) {
       return gpu.state() == v1::GpuUse::STATE_READY ? 1.0 : 0.0;
     }},
    {"gpu_agent_restarts_total",
     "How often its device agent was started again.",
     prometheus::MetricType::Counter,
     [](const v1::GpuUse& gpu) {
       return static_cast<double>(gpu.restart_count());
     }},
    {"gpu_memory_total_bytes", "The GPU's memory.", kGauge,
     [](const v1::GpuUse& gpu) {
       return static_cast<double>(gpu.total_bytes());
     }},
    {"gpu_memory_free_bytes", "Of it, what nobody has.", kGauge,
     [](const v1::GpuUse& gpu) {
       return static_cast<double>(gpu.free_bytes());
     }},
    {"gpu_context_bytes",
     "Context (as NVML says), tables and scratch of the device agent.", kGauge,
     [](const v1::GpuUse& gpu) {
       return static_cast<double>(gpu.context_bytes());
     }},
    {"gpu_nccl_bytes",
     "NCCL's staging memory, and an estimate of its communicators: by how much "
     "less of the GPU was free once they were made, other processes' "
     "allocations of that time included.",
     kGauge,
     [](const v1::GpuUse& gpu) {
       return static_cast<double>(gpu.nccl_bytes());
     }},
    {"gpu_slot_bytes", "Staging slots: gpu_slots x bucket_bytes.", kGauge,
     [](const v1::GpuUse& gpu) {
       return static_cast<double>(gpu.slot_bytes());
     }},
    {"gpu_slots", "How many staging slots.", kGauge,
     [](const v1::GpuUse& gpu) {
       return static_cast<double>(gpu.slot_count());
     }},
    {"gpu_device_store_bytes", "What the store has reserved on it.", kGauge,
     [](const v1::GpuUse& gpu) {
       return static_cast<double>(gpu.device_store_bytes());
     }},
};

}  // namespace

std::string RenderMetrics(const std::string& node, const std::string& version,
                          const NodeFigures& figures) {
  const v1::MemoryUse& memory = figures.memory;
  std::vector<prometheus::MetricFamily> families;
  const auto one = [&families](const std::string& name, const std::string& help,
                               Labels labels, double value) {
    families.push_back(Family(name, help, kGauge));
    Add(&families.back(), std::move(labels), value);
  };
  one("build_info", "Always 1; which node and which software.",
      {{"node", node}, {"version", version}}, 1);
  one("coordinator_silence_seconds",
      "Since the coordinator was last heard of. More than --max_staleness: "
      "what "
      "this node's replicas serve may be old.",
      {}, absl::ToDoubleSeconds(figures.coordinator_silence));
  one("replica_alarms",
      "Replicas that stay paused until the coordinator is back: this node "
      "cannot know what became of their update.",
      {}, figures.replica_alarms);
  const std::pair<const char*, int64_t> sizes[] = {
      {"store_budget_bytes", memory.store_budget_bytes()},
      {"store_reserved_bytes", memory.store_reserved_bytes()},
      {"store_used_bytes", memory.store_used_bytes()},
      {"trainer_arena_bytes", memory.trainer_arena_bytes()},
      {"resident_bytes", memory.resident_bytes()},
  };
  const char* const help[] = {
      "What received and outgoing weights may take of host memory.",
      "Reserved of that, in arenas.",
      "Used of that, by buckets.",
      "Host memory that trainers keep their tensors in.",
      "Of the daemon itself, beyond its arenas.",
  };
  for (size_t i = 0; i < 5; ++i) {
    one(sizes[i].first, help[i], {}, static_cast<double>(sizes[i].second));
  }
  if (memory.gpus_size() > 0) {
    for (const GpuFigure& figure : kGpuFigures) {
      families.push_back(Family(figure.name, figure.help, figure.type));
      for (const v1::GpuUse& gpu : memory.gpus()) {
        Add(&families.back(), LabelsOf(gpu), figure.value(gpu));
      }
    }
    families.push_back(Family(
        "gpu_nccl_communicators",
        "NCCL's communicators, in use and kept for the next edge.", kGauge));
    for (const v1::GpuUse& gpu : memory.gpus()) {
      const auto of_gpu = figures.nccl_communicators.find(gpu.device_uuid());
      Add(&families.back(), LabelsOf(gpu),
          of_gpu == figures.nccl_communicators.end()
              ? 0
              : static_cast<double>(of_gpu->second));
    }
  }
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace daemon
}  // namespace weightsync
