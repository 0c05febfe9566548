#include "schedule/simulate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <queue>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

// A byte is nothing beside the sizes at hand; it hides rounding.
constexpr double kEpsilonBytes = 1.0;
constexpr double kNever = std::numeric_limits<double>::infinity();

// One hop of one flow.
struct Stream {
  int32_t flow = 0;
  int32_t from = 0;
  int32_t to = 0;
  int32_t upstream = -1;  // the stream that feeds `from`; -1: the source
  int32_t downstream = -1;
  double arrived = 0;
  double total = 0;
  double rate = 0;
  double latency = 0;  // from the source to `to`, of the last frame
  double stalled_until = 0;
  bool done = false;
  bool dead = false;
};

class Simulator {
 public:
  Simulator(absl::Span<const Flow> flows, absl::Span<const NodeLabels> nodes,
            const Rates& rates, const SimulationOptions& options)
      : flows_(flows), nodes_(nodes), rates_(rates), options_(options) {}

  SimulationResult Run();

 private:
  void BuildResources();
  void BuildStreams();
  std::vector<int32_t> ResourcesOf(const Stream& stream) const;
  bool Active(const Stream& stream) const;
  // Bytes that the stream may send before it has to wait for its upstream.
  double Backlog(const Stream& stream) const;
  void ComputeRates();
  double NextEvent() const;
  void Advance(double seconds);
  void Apply(const SimulatedEvent& event);
  void Kill(int32_t node);
  void Bypass(int32_t stream_id);

  const absl::Span<const Flow> flows_;
  const absl::Span<const NodeLabels> nodes_;
  const Rates& rates_;
  const SimulationOptions& options_;

  // Rates of: nodes' ways out, nodes' ways in, then uplinks and hosts.
  std::vector<double> capacity_;
  std::map<std::string, int32_t> named_;
  std::vector<Stream> streams_;
  std::vector<std::vector<int32_t>> stream_resources_;
  std::vector<std::vector<int32_t>> resource_streams_;
  std::vector<double> slow_;
  std::vector<bool> dead_;
  double now_ = 0;
  int32_t wave_ = 0;
  SimulationResult result_;
};

void Simulator::BuildResources() {
  const size_t n = nodes_.size();
  slow_.assign(n, 1);
  dead_.assign(n, false);
  capacity_.resize(2 * n);
  for (size_t i = 0; i < n; ++i) {
    capacity_[i] = capacity_[n + i] = LinkOf(rates_, static_cast<int32_t>(i));
  }
  auto add = [&](const std::string& name, double rate) {
    if (rate > 0 &&
        named_.emplace(name, static_cast<int32_t>(capacity_.size())).second) {
      capacity_.push_back(rate);
    }
  };
  for (size_t i = 0; i < n; ++i) {
    const NodeLabels& node = nodes_[i];
    for (const char* way : {"out", "in"}) {
      add(absl::StrCat("rack ", way, " ", node.zone, "/", node.rack),
          rates_.rack_uplink);
      add(absl::StrCat("zone ", way, " ", node.zone), rates_.zone_uplink);
    }
    // Half a hop for each end: a rate of twice the hops, one share an end.
    add(absl::StrCat("host ",
                     node.host.empty() ? absl::StrCat("#", i) : node.host),
        2 * rates_.host_hops);
  }
}

std::vector<int32_t> Simulator::ResourcesOf(const Stream& stream) const {
  std::vector<int32_t> out = {stream.from,
                              static_cast<int32_t>(nodes_.size()) + stream.to};
  auto use = [&](const std::string& name) {
    auto it = named_.find(name);
    if (it != named_.end()) out.push_back(it->second);
  };
  const NodeLabels& a = nodes_[stream.from];
  const NodeLabels& b = nodes_[stream.to];
  if (a.zone != b.zone || a.rack != b.rack) {
    use(absl::StrCat("rack out ", a.zone, "/", a.rack));
    use(absl::StrCat("rack in ", b.zone, "/", b.rack));
  }
  if (a.zone != b.zone) {
    use(absl::StrCat("zone out ", a.zone));
    use(absl::StrCat("zone in ", b.zone));
  }
  if (rates_.host_hops > 0) {
    use(absl::StrCat("host ",
                     a.host.empty() ? absl::StrCat("#", stream.from) : a.host));
    use(absl::StrCat("host ",
                     b.host.empty() ? absl::StrCat("#", stream.to) : b.host));
  }
  return out;
}

void Simulator::BuildStreams() {
  resource_streams_.resize(capacity_.size());
  for (size_t f = 0; f < flows_.size(); ++f) {
    int32_t from = flows_[f].source_node;
    int32_t upstream = -1;
    double latency = 0;
    const double frame =
        static_cast<double>(std::min(rates_.frame_bytes, flows_[f].bytes));
    for (int32_t to : flows_[f].chain) {
      Stream stream;
      stream.flow = static_cast<int32_t>(f);
      stream.from = from;
      stream.to = to;
      stream.upstream = upstream;
      stream.total = static_cast<double>(flows_[f].bytes);
      if (upstream >= 0) {
        latency += frame / std::min(LinkOf(rates_, from), LinkOf(rates_, to));
      }
      latency += rates_.hop_latency;
      stream.latency = latency;
      const auto id = static_cast<int32_t>(streams_.size());
      if (upstream >= 0) streams_[upstream].downstream = id;
      stream_resources_.push_back(ResourcesOf(stream));
      for (int32_t r : stream_resources_.back()) {
        resource_streams_[r].push_back(id);
      }
      streams_.push_back(stream);
      upstream = id;
      from = to;
    }
  }
}

double Simulator::Backlog(const Stream& stream) const {
  const double have =
      stream.upstream < 0 ? stream.total : streams_[stream.upstream].arrived;
  return have - stream.arrived;
}

bool Simulator::Active(const Stream& stream) const {
  return !stream.done && !stream.dead && stream.stalled_until <= now_ &&
         (!options_.by_wave || flows_[stream.flow].wave <= wave_);
}

// Progressive filling: the rates of all streams rise together. A stream stops
// when one of its links is full, or with its upstream when it has no backlog.
void Simulator::ComputeRates() {
  std::vector<double> left = capacity_;
  std::vector<int32_t> rising(capacity_.size(), 0);
  std::vector<bool> fixed(streams_.size(), true);
  size_t open = 0;
  for (size_t s = 0; s < streams_.size(); ++s) {
    Stream& stream = streams_[s];
    stream.rate = 0;
    if (!Active(stream)) continue;
    fixed[s] = false;
    ++open;
    for (int32_t r : stream_resources_[s]) ++rising[r];
  }
  // Level at which a resource is full; entries go stale and are made anew.
  using Entry = std::pair<double, int32_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue;
  auto level_of = [&](int32_t r) {
    return rising[r] == 0 ? kNever : std::max(0.0, left[r]) / rising[r];
  };
  for (size_t r = 0; r < capacity_.size(); ++r) {
    if (rising[r] > 0) {
      queue.emplace(level_of(static_cast<int32_t>(r)), static_cast<int32_t>(r));
    }
  }
  // `left` counts what fixed streams leave over.
  std::vector<int32_t> stack;
  auto fix = [&](int32_t first, double level) {
    stack.push_back(first);
    while (!stack.empty()) {
      const int32_t s = stack.back();
      stack.pop_back();
      if (fixed[s]) continue;
      fixed[s] = true;
      --open;
      streams_[s].rate = level;
      for (int32_t r : stream_resources_[s]) {
        left[r] -= level;
        --rising[r];
        if (rising[r] > 0) queue.emplace(level_of(r), r);
      }
      const int32_t next = streams_[s].downstream;
      if (next >= 0 && !fixed[next] &&
          Backlog(streams_[next]) <= kEpsilonBytes) {
        stack.push_back(next);
      }
    }
  };
  // What waits for an upstream that stands still cannot move at all.
  for (size_t s = 0; s < streams_.size(); ++s) {
    const Stream& stream = streams_[s];
    if (fixed[s] || stream.upstream < 0) continue;
    const Stream& up = streams_[stream.upstream];
    if (!up.done && fixed[stream.upstream] && up.rate == 0 &&
        Backlog(stream) <= kEpsilonBytes) {
      fix(static_cast<int32_t>(s), 0);
    }
  }
  while (open > 0 && !queue.empty()) {
    const Entry entry = queue.top();
    queue.pop();
    const int32_t r = entry.second;
    if (rising[r] == 0) continue;
    const double level = level_of(r);
    if (level > entry.first * (1 + 1e-12)) {
      queue.emplace(level, r);
      continue;
    }
    for (int32_t s : resource_streams_[r]) {
      if (!fixed[s]) fix(s, level);
    }
  }
}

double Simulator::NextEvent() const {
  double next = kNever;
  for (const Stream& stream : streams_) {
    if (stream.done || stream.dead) continue;
    if (stream.stalled_until > now_) {
      next = std::min(next, stream.stalled_until - now_);
      continue;
    }
    if (stream.rate <= 0) continue;
    next = std::min(next, (stream.total - stream.arrived) / stream.rate);
    if (stream.upstream >= 0) {
      const double gain = stream.rate - streams_[stream.upstream].rate;
      const double backlog = Backlog(stream);
      if (gain > 1e-9 * stream.rate && backlog > kEpsilonBytes) {
        next = std::min(next, backlog / gain);
      }
    }
  }
  return next;
}

void Simulator::Advance(double seconds) {
  now_ += seconds;
  for (Stream& stream : streams_) {
    if (stream.rate <= 0 || stream.done || stream.dead) continue;
    stream.arrived += stream.rate * seconds;
    if (stream.total - stream.arrived <= kEpsilonBytes) {
      stream.arrived = stream.total;
      stream.done = true;
      double& end = result_.node_seconds[stream.to];
      if (end >= 0) end = std::max(end, now_ + stream.latency);
    }
  }
}

void Simulator::Bypass(int32_t stream_id) {
  // The node at the end of this stream is dead: its successor is fed by its
  // predecessor, from where it stands.
  Stream& lost = streams_[stream_id];
  lost.dead = true;
  const int32_t next = lost.downstream;
  if (lost.upstream >= 0) streams_[lost.upstream].downstream = next;
  if (next < 0) return;
  Stream& successor = streams_[next];
  successor.upstream = lost.upstream;
  successor.from = lost.from;
  if (successor.done) return;
  if (lost.upstream < 0 && dead_[lost.from]) result_.aborted = true;
  successor.stalled_until = now_ + options_.rebuild_seconds;
  for (int32_t r : stream_resources_[next]) {
    std::vector<int32_t>& users = resource_streams_[r];
    users.erase(std::remove(users.begin(), users.end(), next), users.end());
  }
  stream_resources_[next] = ResourcesOf(successor);
  for (int32_t r : stream_resources_[next]) {
    resource_streams_[r].push_back(next);
  }
}

void Simulator::Kill(int32_t node) {
  if (dead_[node]) return;
  dead_[node] = true;
  result_.node_seconds[node] = -1;
  for (size_t s = 0; s < streams_.size(); ++s) {
    Stream& stream = streams_[s];
    if (stream.dead) continue;
    if (stream.to == node) {
      Bypass(static_cast<int32_t>(s));
    } else if (stream.upstream < 0 && stream.from == node && !stream.done) {
      // Nobody else can have what the first of the chain still lacks.
      result_.aborted = true;
    }
  }
}

void Simulator::Apply(const SimulatedEvent& event) {
  const size_t n = nodes_.size();
  if (event.kind == SimulatedEvent::Kind::kFail) {
    Kill(event.node);
    return;
  }
  slow_[event.node] = std::max(1e-9, event.factor);
  const double rate = LinkOf(rates_, event.node) * slow_[event.node];
  capacity_[event.node] = rate;
  capacity_[n + event.node] = rate;
}

SimulationResult Simulator::Run() {
  result_.node_seconds.assign(nodes_.size(), 0);
  BuildResources();
  BuildStreams();
  std::vector<SimulatedEvent> script = options_.events;
  std::stable_sort(script.begin(), script.end(),
                   [](const SimulatedEvent& a, const SimulatedEvent& b) {
                     return a.time < b.time;
                   });
  size_t scripted = 0;
  while (!result_.aborted) {
    ++result_.event_count;
    if (options_.by_wave) {
      bool busy = false;
      int32_t next_wave = std::numeric_limits<int32_t>::max();
      for (const Stream& stream : streams_) {
        if (stream.done || stream.dead) continue;
        const int32_t wave = flows_[stream.flow].wave;
        if (wave <= wave_) busy = true;
        next_wave = std::min(next_wave, wave);
      }
      if (!busy && next_wave != std::numeric_limits<int32_t>::max()) {
        wave_ = next_wave;
      }
    }
    ComputeRates();
    double step = NextEvent();
    bool apply = false;
    if (scripted < script.size()) {
      const double until = std::max(0.0, script[scripted].time - now_);
      if (until <= step && step != kNever) {
        step = until;
        apply = true;
      }
    }
    if (step == kNever) break;
    Advance(step);
    if (apply) Apply(script[scripted++]);
  }
  for (const Stream& stream : streams_) {
    result_.wire_bytes += static_cast<int64_t>(std::llround(stream.arrived));
  }
  for (double seconds : result_.node_seconds) {
    result_.seconds = std::max(result_.seconds, seconds);
  }
  return std::move(result_);
}

}  // namespace

absl::StatusOr<SimulationResult> SimulateTransfer(
    absl::Span<const Flow> flows, absl::Span<const NodeLabels> nodes,
    const Rates& rates, const SimulationOptions& options) {
  absl::Status ok = CheckRates(rates, nodes.size());
  if (!ok.ok()) return ok;
  for (const SimulatedEvent& event : options.events) {
    if (event.node < 0 || event.node >= static_cast<int32_t>(nodes.size())) {
      return InvalidPlan(kInvalidTopology,
                         absl::StrCat("an event names node number ", event.node,
                                      ", which is not among the ", nodes.size(),
                                      " nodes given"));
    }
  }
  return Simulator(flows, nodes, rates, options).Run();
}

}  // namespace schedule
}  // namespace weightsync
