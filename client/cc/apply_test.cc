#include "client/cc/apply.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "client/cc/client_memory.h"
#include "proto/status.h"

namespace weightsync {
namespace client {
namespace {

class ApplyTest : public ::testing::Test {
 protected:
  ApplyTest() : live_(64, 0), bucket_(64) {
    std::iota(bucket_.begin(), bucket_.end(), 100);
    tensor_.name = "w";
    tensor_.dtype = v1::DTYPE_U8;
    tensor_.shape = {4, 8};
    tensor_.data = live_.data();
  }

  // One copy of `rows` rows of 4 bytes: dense in the bucket, 8 bytes apart in
  // the tensor.
  static v1::CopyPlan Plan(int rows) {
    v1::CopyPlan plan;
    v1::BucketCopies* bucket = plan.add_buckets();
    bucket->set_bucket(5);
    v1::TensorCopy* copy = bucket->add_copies();
    copy->set_bucket_offset_bytes(16);
    copy->set_tensor_offset_bytes(2);
    copy->set_run_bytes(4);
    copy->add_extents(rows);
    copy->add_bucket_strides_bytes(4);
    copy->add_tensor_strides_bytes(8);
    return plan;
  }

  static std::string Why(const v1::CopyPlan& plan, const Tensor& tensor) {
    return ErrorReason(ApplyPlan::Compile(plan, {tensor}).status());
  }

  std::vector<unsigned char> live_;
  std::vector<unsigned char> bucket_;
  Tensor tensor_;
};

TEST_F(ApplyTest, CopiesStridedRows) {
  const auto plan = ApplyPlan::Compile(Plan(3), {tensor_});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ((*plan)->buckets(), std::vector<int32_t>{5});
  EXPECT_EQ((*plan)->bytes(), 12);
  const ApplyPlan::Source source = {
      reinterpret_cast<const char*>(bucket_.data()), 64};
  const auto tasks = (*plan)->Tasks({source});
  ASSERT_TRUE(tasks.ok());
  ClientMemory memory(2);
  ASSERT_TRUE(memory.get()->Copy(*tasks, {}, nullptr).ok());
  for (int row = 0; row < 4; ++row) {
    for (int column = 0; column < 8; ++column) {
      const bool written = row < 3 && column >= 2 && column < 6;
      EXPECT_EQ(live_[row * 8 + column],
                written ? 116 + row * 4 + column - 2 : 0)
          << row << ", " << column;
    }
  }
}

TEST_F(ApplyTest, APlanCannotWriteOutsideATensor) {
  EXPECT_EQ(Why(Plan(4), tensor_), "");
  EXPECT_EQ(Why(Plan(5), tensor_), "COPY_PLAN_INVALID");
  const auto broken = [&](auto change) {
    v1::CopyPlan plan = Plan(1);
    change(plan.mutable_buckets(0)->mutable_copies(0));
    return Why(plan, tensor_) == "COPY_PLAN_INVALID";
  };
  EXPECT_TRUE(broken([](v1::TensorCopy* c) { c->set_tensor(1); }));
  EXPECT_TRUE(broken([](v1::TensorCopy* c) { c->set_tensor(-1); }));
  EXPECT_TRUE(broken([](v1::TensorCopy* c) { c->set_run_bytes(0); }));
  EXPECT_TRUE(broken([](v1::TensorCopy* c) { c->set_run_bytes(INT64_MAX); }));
  EXPECT_TRUE(
      broken([](v1::TensorCopy* c) { c->set_tensor_offset_bytes(-1); }));
  EXPECT_TRUE(
      broken([](v1::TensorCopy* c) { c->set_tensor_offset_bytes(29); }));
  EXPECT_TRUE(
      broken([](v1::TensorCopy* c) { c->set_bucket_offset_bytes(-1); }));
  EXPECT_TRUE(broken([](v1::TensorCopy* c) { c->set_extents(0, INT64_MAX); }));
  EXPECT_TRUE(
      broken([](v1::TensorCopy* c) { c->set_tensor_strides_bytes(0, -8); }));
  EXPECT_TRUE(broken([](v1::TensorCopy* c) { c->add_extents(1); }));
}

TEST_F(ApplyTest, APlanCannotReadOutsideItsBuckets) {
  const auto plan = ApplyPlan::Compile(Plan(3), {tensor_});
  ASSERT_TRUE(plan.ok());
  const char* data = reinterpret_cast<const char*>(bucket_.data());
  EXPECT_TRUE((*plan)->Tasks({ApplyPlan::Source{data, 28}}).ok());
  EXPECT_FALSE((*plan)->Tasks({ApplyPlan::Source{data, 27}}).ok());
  EXPECT_FALSE((*plan)->Tasks({}).ok());
}

TEST_F(ApplyTest, BucketsComeInOrder) {
  v1::CopyPlan plan = Plan(1);
  *plan.add_buckets() = plan.buckets(0);
  EXPECT_EQ(Why(plan, tensor_), "COPY_PLAN_INVALID");
}

}  // namespace
}  // namespace client
}  // namespace weightsync
