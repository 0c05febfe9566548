// Both ends of an edge in one process, on the first two simulated GPUs.
#ifndef WEIGHTSYNC_TRANSPORT_NCCL_TEST_EDGE_H_
#define WEIGHTSYNC_TRANSPORT_NCCL_TEST_EDGE_H_

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "transport/cuda/device.h"
#include "transport/cuda/sim_control.h"
#include "transport/nccl/nccl_channel.h"

namespace weightsync {
namespace transport {
namespace nccl {

using tcp::PayloadChannel;

inline constexpr absl::Duration kTimeout = absl::Seconds(20);
inline bool Runs() { return false; }

inline std::unique_ptr<NcclDevice> NewDevice(
    int ordinal, NcclOptions options = NcclOptions()) {
  options.device_uuid = (*cuda::ListDevices())[ordinal].uuid;
  options.staging_bytes = 10 << 10;
  auto device = NcclDevice::Create(options);
  EXPECT_TRUE(device.ok()) << device.status();
  return *std::move(device);
}

class NcclEdgeTest : public ::testing::Test {
 protected:
  NcclEdgeTest()
      : a_device_(NewDevice(0)),
        b_device_(NewDevice(1)),
        a_(*NewNcclChannel(a_device_.get(), "c/b")),
        b_(*NewNcclChannel(b_device_.get(), "c/a")) {}
  ~NcclEdgeTest() override { gpu_sim::Plant(""); }

  void Connect() {
    bool agreed = false;
    while (!agreed) {
      const auto offer = a_->Offer();
      ASSERT_TRUE(offer.ok()) << offer.status();
      const auto accepted = b_->Accept(*offer);
      ASSERT_TRUE(accepted.ok()) << accepted.status();
      const auto answered = a_->Answered(accepted->answer);
      ASSERT_TRUE(answered.ok()) << answered.status();
      ASSERT_EQ(*answered, accepted->agreed);
      agreed = *answered;
    }
    absl::Status a, b;
    std::thread other([&] { b = b_->Connect(kTimeout, Runs); });
    a = a_->Connect(kTimeout, Runs);
    other.join();
    ASSERT_TRUE(a.ok()) << a;
    ASSERT_TRUE(b.ok()) << b;
  }
  // What both ends say.
  std::pair<absl::Status, absl::Status> Move(
      const std::vector<absl::Span<const char>>& from,
      const std::vector<absl::Span<char>>& to,
      absl::Duration timeout = kTimeout) {
    std::pair<absl::Status, absl::Status> result;
    std::thread other([&] { result.second = b_->Receive(to, timeout, Runs); });
    result.first = a_->Send(from, timeout, Runs);
    other.join();
    return result;
  }

  std::unique_ptr<NcclDevice> a_device_, b_device_;
  std::unique_ptr<PayloadChannel> a_, b_;
};

}  // namespace nccl
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_NCCL_TEST_EDGE_H_
