// An engine of one worker, for tests over the simulated GPU.
#ifndef WEIGHTSYNC_TESTS_GPU_ONE_WORKER_H_
#define WEIGHTSYNC_TESTS_GPU_ONE_WORKER_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/gpu_cluster.h"

namespace weightsync {
namespace e2e {

// An engine of one worker, with the whole model in host memory; or on a GPU,
// with a pause that takes as long as the test wants.
class OneWorker {
 public:
  OneWorker(Cluster* cluster, const std::string& node, const std::string& name,
            int device, std::function<void()> on_pause = nullptr) {
    std::vector<client::Tensor> tensors = Parameters();
    if (device < 0) {
      for (client::Tensor& tensor : tensors) {
        host_.emplace_back(static_cast<size_t>(client::PartBytes(tensor)),
                           '\0');
      }
      for (size_t i = 0; i < tensors.size(); ++i)
        tensors[i].data = &host_[i][0];
    } else {
      gpu_ = std::make_unique<GpuTensors>(tensors, device);
      tensors = gpu_->tensors();
    }
    client::WorkerOptions worker;
    worker.address = cluster->address(node);
    worker.model = kModel;
    worker.replica = name;
    worker.incarnation = client::RandomId();
    auto started = client::Worker::Start(worker, tensors);
    EXPECT_TRUE(started.ok()) << started.status();
    if (started.ok()) worker_ = *std::move(started);
    client::ReplicaOptions options;
    options.address = worker.address;
    options.model = kModel;
    options.replica = name;
    options.incarnation = worker.incarnation;
    client::ReplicaHooks hooks;
    hooks.on_pause = [on_pause](const client::PauseRequest&) {
      if (on_pause != nullptr) on_pause();
      return absl::StatusOr<std::string>("");
    };
    hooks.on_resume = [](const client::ResumeInfo&) {
      return absl::OkStatus();
    };
    auto replica = client::Replica::Start(options, hooks);
    EXPECT_TRUE(replica.ok()) << replica.status();
    if (replica.ok()) replica_ = *std::move(replica);
    EXPECT_TRUE(worker_->WaitRegistered(kPatience).ok());
    // A publish goes on without a replica that is not all there.
    EXPECT_TRUE(replica_->WaitRegistered(kPatience).ok());
  }
  bool Holds(int version) const {
    const std::vector<std::string> got = gpu_ != nullptr ? gpu_->Read() : host_;
    for (size_t i = 0; i < got.size(); ++i) {
      if (got[i] != Content(Parameters()[i], version)) return false;
    }
    return true;
  }

 private:
  std::vector<std::string> host_;
  std::unique_ptr<GpuTensors> gpu_;
  std::unique_ptr<client::Worker> worker_;
  std::unique_ptr<client::Replica> replica_;
};

}  // namespace e2e
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_GPU_ONE_WORKER_H_
