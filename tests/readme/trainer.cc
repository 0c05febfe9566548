// A trainer: one rank that holds one matrix and publishes it after each step.
#include "client/cc/trainer.h"

#include <algorithm>
#include <cstdio>

#include "client/cc/served.h"

namespace ws = weightsync::client;

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

int main(int argc, char** argv) {
  ws::TrainerOptions options;
  options.address = argc > 1 ? argv[1] : "";  // empty: this machine's daemon
  options.model = "first";
  auto trainer = ws::Trainer::Connect(options);
  if (!trainer.ok()) return Fail(trainer.status());

  // Tensors live in shared memory that the daemon made.
  const int64_t n = 1024;
  auto arena = (*trainer)->AllocateArena(n * n * sizeof(float));
  if (!arena.ok()) return Fail(arena.status());
  float* weights = reinterpret_cast<float*>(arena->data);

  ws::Tensor tensor;
  tensor.name = "linear.weight";
  tensor.dtype = weightsync::v1::DTYPE_F32;
  tensor.shape = {n, n};
  tensor.data = weights;
  auto registered = (*trainer)->RegisterShards({tensor});
  if (!registered.ok()) return Fail(registered.status());

  for (int step = 1; step <= 3; ++step) {
    std::fill_n(weights, n * n, step);  // a step of training

    ws::PublishOptions publish;
    publish.step = step;
    auto published = (*trainer)->Publish(publish);
    if (!published.ok()) return Fail(published.status());
    // From here on the weights may be changed: the next step could begin.

    auto version = (*trainer)->Wait(*published, absl::Minutes(1));
    if (!version.ok()) return Fail(version.status());
    std::printf("step %d: %s\n", step, ws::ServedText(*version).c_str());
  }
  return 0;
}
