#include "client/cc/tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/status.h"

namespace weightsync {
namespace client {
namespace {

using ::testing::ElementsAre;

Tensor Matrix(void* data) {
  Tensor tensor;
  tensor.name = "w";
  tensor.dtype = v1::DTYPE_BF16;
  tensor.shape = {4, 6};
  tensor.data = data;
  return tensor;
}

TEST(TensorTest, DensePartsHaveRowMajorStridesOverTheirBox) {
  char memory[48];
  Tensor tensor = Matrix(memory);
  EXPECT_EQ(PartBytes(tensor), 48);
  EXPECT_THAT(PartStrides(tensor), ElementsAre(6, 1));
  tensor.box = Box{{1, 2}, {2, 3}};
  EXPECT_TRUE(CheckTensor(tensor).ok());
  EXPECT_EQ(PartBytes(tensor), 12);
  EXPECT_EQ(SpanBytes(tensor), 12);
  EXPECT_THAT(PartStrides(tensor), ElementsAre(3, 1));
}

TEST(TensorTest, StridesLeaveGapsThatCountInTheSpan) {
  char memory[100];
  Tensor tensor = Matrix(memory);
  tensor.box = Box{{0, 0}, {2, 6}};
  tensor.strides = {20, 1};
  EXPECT_TRUE(CheckTensor(tensor).ok());
  EXPECT_EQ(PartBytes(tensor), 24);
  EXPECT_EQ(SpanBytes(tensor), (20 + 5 + 1) * 2);
  tensor.strides = {1, 2};  // transposed
  EXPECT_EQ(SpanBytes(tensor), (1 + 10 + 1) * 2);
}

TEST(TensorTest, AScalarHasOneElement) {
  float value = 0;
  Tensor tensor;
  tensor.name = "s";
  tensor.dtype = v1::DTYPE_F32;
  tensor.data = &value;
  EXPECT_TRUE(CheckTensor(tensor).ok());
  EXPECT_EQ(PartBytes(tensor), 4);
  EXPECT_EQ(SpanBytes(tensor), 4);
}

TEST(TensorTest, WrongOnesAreNamed) {
  char memory[48];
  const auto reason = [&](auto change) {
    Tensor tensor = Matrix(memory);
    change(&tensor);
    return ErrorReason(CheckTensor(tensor));
  };
  EXPECT_EQ(reason([](Tensor* t) { t->name = ""; }), "NAME_INVALID");
  EXPECT_EQ(reason([](Tensor* t) { t->dtype = v1::DTYPE_UNSPECIFIED; }),
            "DTYPE_UNKNOWN");
  EXPECT_EQ(reason([](Tensor* t) { t->dtype = static_cast<v1::DType>(99); }),
            "DTYPE_UNKNOWN");
  EXPECT_EQ(reason([](Tensor* t) { t->shape = {4, 0}; }), "SHAPE_INVALID");
  EXPECT_EQ(reason([](Tensor* t) { t->shape = {-4, 6}; }), "SHAPE_INVALID");
  EXPECT_EQ(reason([](Tensor* t) {
              t->shape = {int64_t{1} << 31, int64_t{1} << 31, 4};
            }),
            "SHAPE_INVALID");
  EXPECT_EQ(reason([](Tensor* t) {
              t->box = Box{{1, 0}, {4, 6}};
            }),
            "BOX_OUT_OF_RANGE");
  EXPECT_EQ(reason([](Tensor* t) {
              t->box = Box{{0}, {4}};
            }),
            "BOX_OUT_OF_RANGE");
  EXPECT_EQ(reason([](Tensor* t) {
              t->box = Box{{INT64_MAX, 0}, {1, 1}};
            }),
            "BOX_OUT_OF_RANGE");
  EXPECT_EQ(reason([](Tensor* t) { t->strides = {1}; }), "STRIDES_INVALID");
  EXPECT_EQ(reason([](Tensor* t) { t->strides = {-6, 1}; }), "STRIDES_INVALID");
  EXPECT_EQ(reason([](Tensor* t) {
              t->strides = {INT64_MAX, 1};
            }),
            "STRIDES_INVALID");
  EXPECT_EQ(ErrorReason(CheckTensors({Matrix(memory), Matrix(memory)}, true)),
            "DUPLICATE_NAME");
  Tensor cast = Matrix(memory);
  cast.stored_dtype = v1::DTYPE_F32;
  EXPECT_TRUE(CheckTensors({cast}, false).ok());
  EXPECT_EQ(ErrorReason(CheckTensors({cast}, true)), "DTYPE_MISMATCH");
  cast.stored_dtype = static_cast<v1::DType>(99);
  EXPECT_EQ(ErrorReason(CheckTensors({cast}, false)), "DTYPE_UNKNOWN");
}

TEST(TensorTest, TheWireSaysTheSame) {
  char memory[100];
  Tensor tensor = Matrix(memory);
  tensor.box = Box{{2, 0}, {2, 6}};
  tensor.strides = {8, 1};
  const v1::WantedTensor wanted = ToWantedTensor(tensor);
  EXPECT_EQ(wanted.name(), "w");
  EXPECT_THAT(wanted.shape(), ElementsAre(4, 6));
  EXPECT_THAT(wanted.box().offset(), ElementsAre(2, 0));
  EXPECT_THAT(wanted.box().extent(), ElementsAre(2, 6));
  EXPECT_THAT(wanted.strides(), ElementsAre(8, 1));
  const v1::TensorShard shard = ToTensorShard(tensor, 3, 128);
  EXPECT_EQ(shard.region(), 3);
  EXPECT_EQ(shard.offset_bytes(), 128);
  EXPECT_EQ(shard.parameter().dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(shard.dtype(), v1::DTYPE_UNSPECIFIED);
  // fp32 masters: twice as far apart, and cast by the daemon.
  const int64_t span = SpanBytes(tensor), bytes = PartBytes(tensor);
  tensor.stored_dtype = v1::DTYPE_F32;
  EXPECT_EQ(SpanBytes(tensor), 2 * span);
  EXPECT_EQ(PartBytes(tensor), 2 * bytes);
  EXPECT_EQ(ToTensorShard(tensor, 0, 0).dtype(), v1::DTYPE_F32);
  EXPECT_EQ(ToTensorShard(tensor, 0, 0).parameter().dtype(), v1::DTYPE_BF16);
}

}  // namespace
}  // namespace client
}  // namespace weightsync
