#include "daemon/coordinator/registry.h"

#include <string>
#include <vector>

#include "daemon/node/layouts.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::HasSubstr;

constexpr char kModel[] = "models/m";

v1::ClaimRank Claim(int rank, int world, const std::string& session) {
  v1::ClaimRank claim;
  claim.set_model(kModel);
  claim.set_rank(rank);
  claim.set_world_size(world);
  claim.set_session(session);
  return claim;
}

v1::Parameter Tensor(const std::string& name, std::vector<int64_t> shape,
                     v1::DType dtype = v1::DTYPE_BF16) {
  v1::Parameter parameter;
  parameter.set_name(name);
  parameter.set_dtype(dtype);
  for (int64_t extent : shape) parameter.add_shape(extent);
  return parameter;
}

// Rows [from, from + count) of "w" [8, 4].
v1::RankShards Rows(int rank, int from, int count) {
  v1::RankShards shards;
  shards.set_model(kModel);
  shards.set_rank(rank);
  shards.set_session("s" + std::to_string(rank));
  *shards.add_parameters() = Tensor("w", {8, 4});
  v1::Box* box = shards.add_shards()->mutable_box();
  box->add_offset(from);
  box->add_offset(0);
  box->add_extent(count);
  box->add_extent(4);
  return shards;
}

v1::RegisterWorker Worker(const std::string& replica, int index, int count,
                          v1::Parameter want = Tensor("w", {8, 4})) {
  v1::RegisterWorker worker;
  worker.set_model(kModel);
  worker.set_replica(replica);
  worker.set_worker_index(index);
  worker.set_worker_count(count);
  worker.set_incarnation("i");
  v1::WantedTensor* tensor = worker.add_tensors();
  tensor->set_name(want.name());
  tensor->set_dtype(want.dtype());
  *tensor->mutable_shape() = want.shape();
  return worker;
}

v1::RegisterReplica Control(const std::string& replica, int count) {
  v1::RegisterReplica control;
  control.set_model(kModel);
  control.set_replica(replica);
  control.set_worker_count(count);
  control.set_incarnation("i");
  return control;
}

class RegistryTest : public ::testing::Test {
 protected:
  void Claims(int world) {
    for (int rank = 0; rank < world; ++rank) {
      EXPECT_TRUE(
          registry_
              .ClaimRank("n", Claim(rank, world, "s" + std::to_string(rank)))
              .ok());
    }
  }
  std::string Shards(const v1::RankShards& shards) {
    fault_ = registry_.RegisterShards(shards, &refusals_);
    return fault_.reason;
  }
  std::string Join(const v1::RegisterWorker& worker) {
    bool is_new;
    fault_ = registry_.JoinWorker("n", worker, true, &is_new);
    return fault_.reason;
  }
  std::string Join(const v1::RegisterReplica& control) {
    bool is_new;
    fault_ = registry_.JoinReplica("n", control, &is_new);
    return fault_.reason;
  }
  void Train() {
    Claims(2);
    ASSERT_EQ(Shards(Rows(0, 0, 4)), "");
    ASSERT_EQ(Shards(Rows(1, 4, 4)), "");
    ASSERT_TRUE(registry_.FindModel(kModel)->Publishable());
  }

  Registry registry_;
  Fault fault_;
  std::vector<Refusal> refusals_;
};

TEST_F(RegistryTest, RanksThatCannotBe) {
  v1::ClaimRank claim = Claim(2, 2, "x");
  EXPECT_EQ(registry_.ClaimRank("n", claim).reason, "RANK_OUT_OF_RANGE");
  claim = Claim(0, 2, "x");
  claim.set_model("models/Bad Name");
  EXPECT_EQ(registry_.ClaimRank("n", claim).reason, "MODEL_NAME_INVALID");
  Claims(2);
  EXPECT_EQ(registry_.ClaimRank("n", Claim(0, 2, "other")).reason,
            "RANK_TAKEN");
  EXPECT_EQ(registry_.ClaimRank("n", Claim(2, 3, "x")).reason,
            "WORLD_SIZE_MISMATCH");
  EXPECT_TRUE(registry_.ClaimRank("n", Claim(0, 2, "s0")).ok());
  EXPECT_EQ(registry_.FindModel(kModel)->Unpublishable().reason,
            "WORLD_INCOMPLETE");
}

TEST_F(RegistryTest, ShardsThatCannotBe) {
  Claims(2);
  v1::RankShards shards = Rows(0, 0, 4);
  shards.set_session("other");
  EXPECT_EQ(Shards(shards), "SESSION_UNKNOWN");
  shards = Rows(0, 0, 4);
  shards.mutable_parameters(0)->set_dtype(v1::DTYPE_UNSPECIFIED);
  EXPECT_EQ(Shards(shards), "DTYPE_UNKNOWN");
  EXPECT_THAT(fault_.message, HasSubstr("w"));
  for (int64_t extent : {int64_t{0}, int64_t{-1}, int64_t{1} << 40}) {
    shards = Rows(0, 0, 4);
    shards.mutable_parameters(0)->set_shape(0, extent);
    EXPECT_EQ(Shards(shards), "SHAPE_INVALID") << extent;
  }
  shards = Rows(0, 0, 4);
  *shards.add_parameters() = shards.parameters(0);
  EXPECT_EQ(Shards(shards), "DUPLICATE_NAME");
  EXPECT_EQ(Shards(Rows(0, 6, 4)), "BOX_OUT_OF_RANGE");
  ASSERT_EQ(Shards(Rows(0, 0, 4)), "");
  shards = Rows(1, 4, 4);
  shards.mutable_parameters(0)->set_dtype(v1::DTYPE_F32);
  EXPECT_EQ(Shards(shards), "CATALOG_MISMATCH");
  EXPECT_THAT(fault_.message, HasSubstr("rank 1"));
  EXPECT_EQ(Shards(Rows(1, 5, 3)), "SHARDS_HOLE");
  EXPECT_EQ(Shards(Rows(1, 3, 5)), "SHARDS_OVERLAP");
  EXPECT_FALSE(registry_.FindModel(kModel)->Publishable());
  EXPECT_EQ(Shards(Rows(1, 4, 4)), "");
  EXPECT_TRUE(registry_.FindModel(kModel)->Publishable());
}

TEST_F(RegistryTest, RanksMayChangeTheirShardsOneAfterTheOther) {
  Train();
  EXPECT_EQ(Shards(Rows(0, 0, 6)), "");
  EXPECT_EQ(registry_.FindModel(kModel)->Unpublishable().reason,
            "SHARDS_OVERLAP");
  EXPECT_EQ(Shards(Rows(1, 6, 2)), "");
  EXPECT_TRUE(registry_.FindModel(kModel)->Publishable());
}

TEST_F(RegistryTest, WhoSaysTheSameAgainChangesNothing) {
  Train();
  EXPECT_EQ(registry_.fits(), 1);
  EXPECT_EQ(Shards(Rows(0, 0, 4)), "");
  EXPECT_EQ(Shards(Rows(1, 4, 4)), "");
  EXPECT_EQ(registry_.fits(), 1);
  EXPECT_TRUE(registry_.FindModel(kModel)->Publishable());
  // Something else is looked at.
  v1::RankShards shards = Rows(1, 4, 4);
  shards.mutable_parameters(0)->set_dtype(v1::DTYPE_F32);
  EXPECT_EQ(Shards(shards), "CATALOG_MISMATCH");
  EXPECT_THAT(fault_.message, HasSubstr("rank 0 says"));
  EXPECT_EQ(Shards(Rows(1, 5, 3)), "");
  EXPECT_EQ(registry_.FindModel(kModel)->Unpublishable().reason, "SHARDS_HOLE");
  // And again: what does not fit together does not do so by being repeated.
  EXPECT_EQ(Shards(Rows(1, 5, 3)), "");
  EXPECT_EQ(registry_.FindModel(kModel)->Unpublishable().reason, "SHARDS_HOLE");
  EXPECT_EQ(registry_.fits(), 2);
}

TEST_F(RegistryTest, WhatARankAloneSaidOfAParameterGoesWithIt) {
  Claims(2);
  v1::RankShards shards = Rows(0, 0, 4);
  *shards.add_parameters() = Tensor("own", {4});
  shards.add_shards()->set_parameter(1);
  ASSERT_EQ(Shards(shards), "");
  v1::RankShards other = Rows(1, 4, 4);
  *other.add_parameters() = Tensor("own", {8});
  other.add_shards()->set_parameter(1);
  EXPECT_EQ(Shards(other), "CATALOG_MISMATCH");
  EXPECT_THAT(fault_.message, HasSubstr("own: rank 1 says"));
  // It may change that itself.
  shards.mutable_parameters(1)->set_shape(0, 8);
  EXPECT_EQ(Shards(shards), "");
  EXPECT_EQ(Shards(other), "");
  shards = Rows(0, 0, 4);
  EXPECT_EQ(Shards(shards), "");
  other.mutable_parameters(1)->set_shape(0, 16);
  EXPECT_EQ(Shards(other), "");
  // With the rank it is gone.
  EXPECT_TRUE(registry_.RemoveRank(kModel, 1, "s1"));
  *shards.add_parameters() = Tensor("own", {2});
  shards.add_shards()->set_parameter(1);
  EXPECT_EQ(Shards(shards), "");
}

TEST_F(RegistryTest, WorkersAreBoundToTheCatalog) {
  Train();
  EXPECT_EQ(Join(Worker("r", 0, 1, Tensor("v", {8, 4}))), "PARAMETER_UNKNOWN");
  EXPECT_THAT(fault_.message, HasSubstr("v: "));
  EXPECT_EQ(Join(Worker("r", 0, 1, Tensor("w", {8, 4}, v1::DTYPE_F32))),
            "DTYPE_MISMATCH");
  EXPECT_EQ(Join(Worker("r", 0, 1, Tensor("w", {4, 8}))), "SHAPE_MISMATCH");
  EXPECT_EQ(Join(Worker("r", 1, 1)), "WORKER_INDEX_INVALID");
  EXPECT_EQ(Join(Worker("R!", 0, 1)), "REPLICA_NAME_INVALID");
  v1::RegisterWorker worker = Worker("r", 0, 1);
  *worker.add_tensors() = worker.tensors(0);
  EXPECT_EQ(Join(worker), "DUPLICATE_NAME");
  EXPECT_EQ(Join(Worker("r", 0, 1)), "");
}

// Casts are the trainer's to ask for; a worker gets what the catalog has.
TEST_F(RegistryTest, WhatAWorkerWouldHaveToConvertIsRefusedInEitherOrder) {
  const std::vector<v1::DType> others = {v1::DTYPE_F32, v1::DTYPE_F16,
                                         v1::DTYPE_F8_E4M3};
  for (size_t i = 0; i < others.size(); ++i) {
    ASSERT_EQ(Join(Worker("early" + std::to_string(i), 0, 1,
                          Tensor("w", {8, 4}, others[i]))),
              "");
  }
  Train();
  ASSERT_EQ(refusals_.size(), others.size());
  for (const Refusal& refusal : refusals_) {
    EXPECT_EQ(refusal.fault.reason, "DTYPE_MISMATCH");
  }
  for (v1::DType wanted : others) {
    SCOPED_TRACE(v1::DType_Name(wanted));
    EXPECT_EQ(Join(Worker("late", 0, 1, Tensor("w", {8, 4}, wanted))),
              "DTYPE_MISMATCH");
    EXPECT_THAT(fault_.message,
                HasSubstr("have the trainers register it in the worker's"));
  }
}

// ---- Casts ----

// Rows of an F8_E4M3 matrix "w" [300, 200], held as `dtype`.
v1::RankShards Blocks(int rank, int from, int count,
                      v1::DType dtype = v1::DTYPE_BF16) {
  v1::RankShards shards = Rows(rank, from, count);
  *shards.mutable_parameters(0) = Tensor("w", {300, 200}, v1::DTYPE_F8_E4M3);
  shards.mutable_parameters(0)->set_component("draft");
  shards.mutable_shards(0)->mutable_box()->set_extent(1, 200);
  shards.mutable_shards(0)->set_dtype(dtype);
  return shards;
}

TEST_F(RegistryTest, FloatMastersChangeNothingOfTheCatalog) {
  Claims(2);
  const auto masters = [](int rank, v1::DType dtype) {
    v1::RankShards shards = Rows(rank, rank * 4, 4);
    shards.mutable_shards(0)->set_dtype(dtype);
    return shards;
  };
  ASSERT_EQ(Shards(masters(0, v1::DTYPE_F32)), "");
  // Another rank may have them cast already.
  ASSERT_EQ(Shards(masters(1, v1::DTYPE_BF16)), "");
  const ModelEntry* model = registry_.FindModel(kModel);
  ASSERT_TRUE(model->Publishable());
  EXPECT_EQ(model->parameters.size(), 1u);
  // Bytes that are sent.
  EXPECT_EQ(model->ranks.at(0).shard_bytes, 4 * 4 * 2);
  EXPECT_EQ(Join(Worker("r", 0, 1)), "");
  EXPECT_EQ(Join(Worker("s", 0, 1, Tensor("w", {8, 4}, v1::DTYPE_F32))),
            "DTYPE_MISMATCH");
  EXPECT_EQ(Join(Control("r", 1)), "");

  // Nodes are told how it is held, where that is otherwise, and compute the
  // layout that they always had.
  v1::DefineLayout define = registry_.LayoutInput(kModel, {"r"}, {}, 1 << 20);
  EXPECT_EQ(define.sources(0).shards(0).dtype(), v1::DTYPE_F32);
  EXPECT_EQ(define.sources(1).shards(0).dtype(), v1::DTYPE_UNSPECIFIED);
  const auto cast = ComputeNodeLayout(define, "n");
  ASSERT_TRUE(cast.ok()) << cast.status();
  define.mutable_sources(0)->mutable_shards(0)->clear_dtype();
  const auto plain = ComputeNodeLayout(define, "n");
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(cast->id, plain->id);
}

TEST_F(RegistryTest, BlockScalesEnterTheCatalogByThemselves) {
  Claims(2);
  ASSERT_EQ(Shards(Blocks(0, 0, 256)), "");
  ASSERT_EQ(Shards(Blocks(1, 256, 44)), "") << fault_.message;
  const ModelEntry* model = registry_.FindModel(kModel);
  ASSERT_TRUE(model->Publishable());
  ASSERT_EQ(model->parameters.size(), 2u);
  EXPECT_EQ(model->parameters[1].name(), "w_scale_inv");
  EXPECT_EQ(model->parameters[1].dtype(), v1::DTYPE_F32);
  EXPECT_EQ(model->parameters[1].component(), "draft");
  EXPECT_THAT(model->parameters[1].shape(), ::testing::ElementsAre(3, 2));
  EXPECT_EQ(model->ranks.at(0).shard_bytes, 256 * 200 + 2 * 2 * 4);

  // Workers want them by name, and all of them.
  v1::RegisterWorker worker =
      Worker("r", 0, 1, Tensor("w", {300, 200}, v1::DTYPE_F8_E4M3));
  ASSERT_EQ(Join(worker), "");
  EXPECT_EQ(Join(Control("r", 1)), "REPLICA_INCOMPLETE");
  EXPECT_THAT(fault_.message, HasSubstr("w_scale_inv"));
  v1::WantedTensor* scales = worker.add_tensors();
  scales->set_name("w_scale_inv");
  scales->set_dtype(v1::DTYPE_F32);
  scales->add_shape(3);
  scales->add_shape(2);
  ASSERT_EQ(Join(worker), "");
  ASSERT_EQ(Join(Control("r", 1)), "");

  // Both sides compute one plan, in which each rank sends the scales of its
  // rows.
  v1::DefineLayout define = registry_.LayoutInput(kModel, {"r"}, {}, 64 << 10);
  const auto here = ComputeNodeLayout(define, "");
  const auto there = ComputeNodeLayout(define, "n");
  ASSERT_TRUE(here.ok()) << here.status();
  ASSERT_TRUE(there.ok());
  EXPECT_EQ(here->id, there->id);
  int64_t elements[2][2] = {};
  for (uint32_t b = 0; b < here->plan.bucket_count(); ++b) {
    for (const schedule::Piece& piece : here->plan.pieces(b)) {
      elements[here->plan.bucket(b).source_rank][piece.ordinal] +=
          piece.box.Volume();
    }
  }
  EXPECT_EQ(elements[0][0], 256 * 200);
  EXPECT_EQ(elements[0][1], 4);
  EXPECT_EQ(elements[1][1], 2);

  // The same ranks with fp8 of their own have none.
  ASSERT_EQ(Shards(Blocks(0, 0, 256, v1::DTYPE_F8_E4M3)), "");
  EXPECT_EQ(model->Unpublishable().reason, "DTYPE_MISMATCH");
  ASSERT_EQ(Shards(Blocks(1, 256, 44, v1::DTYPE_UNSPECIFIED)), "");
  ASSERT_TRUE(model->Publishable());
  EXPECT_EQ(model->parameters.size(), 1u);
}

TEST_F(RegistryTest, CastsThatCannotBe) {
  Claims(2);
  v1::RankShards shards = Rows(0, 0, 4);
  for (const v1::DType held : {v1::DTYPE_F16, v1::DTYPE_F64, v1::DTYPE_I16}) {
    shards.mutable_shards(0)->set_dtype(held);
    EXPECT_EQ(Shards(shards), "DTYPE_MISMATCH");
    EXPECT_THAT(fault_.message, HasSubstr("w: "));
    EXPECT_THAT(fault_.message, HasSubstr(v1::DType_Name(held).substr(6)));
    EXPECT_THAT(fault_.message, HasSubstr("BF16"));
    EXPECT_THAT(fault_.message, HasSubstr("cast it in the trainer"));
    EXPECT_THAT(fault_.message, HasSubstr("rank 0"));
  }
  shards.mutable_shards(0)->set_dtype(static_cast<v1::DType>(77));
  EXPECT_EQ(Shards(shards), "DTYPE_UNKNOWN");
  EXPECT_EQ(Shards(Blocks(0, 0, 100)), "DTYPE_MISMATCH");
  EXPECT_THAT(fault_.message, HasSubstr("cuts through blocks"));
  EXPECT_THAT(fault_.message, HasSubstr("multiples of 128"));
  shards = Blocks(0, 0, 256);
  shards.mutable_parameters(0)->clear_shape();
  shards.mutable_parameters(0)->add_shape(300);
  shards.mutable_shards(0)->clear_box();
  EXPECT_EQ(Shards(shards), "DTYPE_MISMATCH");
  EXPECT_THAT(fault_.message, HasSubstr("only matrices"));

  // One rank's scales are not another's.
  ASSERT_EQ(Shards(Blocks(0, 0, 256)), "");
  EXPECT_EQ(Shards(Blocks(1, 256, 44, v1::DTYPE_F8_E4M3)), "DTYPE_MISMATCH");
  EXPECT_THAT(fault_.message,
              HasSubstr("w: rank 0 holds it as BF16, rank 1 as F8_E4M3"));
  EXPECT_THAT(fault_.message, HasSubstr("register it from one type"));
  // A rank that brings scales beside what they are computed from.
  shards = Blocks(1, 256, 44);
  *shards.add_parameters() = Tensor("w_scale_inv", {3, 2}, v1::DTYPE_F32);
  shards.add_shards()->set_parameter(1);
  EXPECT_EQ(Shards(shards), "DTYPE_MISMATCH");
  EXPECT_THAT(fault_.message, HasSubstr("hold one of them"));
  // A parameter of that name that is something else.
  *shards.mutable_parameters(1) = Tensor("w_scale_inv", {9}, v1::DTYPE_F32);
  EXPECT_EQ(Shards(shards), "DTYPE_MISMATCH");
  EXPECT_THAT(fault_.message, HasSubstr("F32 and shape [3, 2]"));
  EXPECT_FALSE(registry_.FindModel(kModel)->Publishable());
  EXPECT_EQ(Shards(Blocks(1, 256, 44)), "");
  EXPECT_TRUE(registry_.FindModel(kModel)->Publishable());
}

TEST_F(RegistryTest, WorkersThatWereThereFirstAreCheckedWhenTheCatalogIsKnown) {
  ASSERT_EQ(Join(Worker("good", 0, 1)), "");
  ASSERT_EQ(Join(Worker("bad", 0, 1, Tensor("v", {8, 4}))), "");
  Train();
  ASSERT_EQ(refusals_.size(), 1u);
  EXPECT_EQ(refusals_[0].replica, "bad");
  EXPECT_EQ(refusals_[0].worker, 0);
  EXPECT_EQ(refusals_[0].fault.reason, "PARAMETER_UNKNOWN");
}

TEST_F(RegistryTest, AReplicaTakesEverythingOrSaysThatItIsPartial) {
  Train();
  v1::RegisterWorker half = Worker("r", 0, 1);
  v1::Box* box = half.mutable_tensors(0)->mutable_box();
  box->add_offset(0);
  box->add_offset(0);
  box->add_extent(4);
  box->add_extent(4);
  ASSERT_EQ(Join(half), "");
  EXPECT_EQ(Join(Control("r", 1)), "REPLICA_INCOMPLETE");
  EXPECT_THAT(fault_.message, HasSubstr("w"));
  v1::RegisterReplica partial = Control("r", 1);
  partial.set_partial(true);
  EXPECT_EQ(Join(partial), "");
  EXPECT_TRUE(registry_.FindReplica(kModel, "r")->Complete());
  EXPECT_EQ(registry_.StoreBytes(kModel, "n"), 32);
}

TEST_F(RegistryTest, ANodeStoresEachParameterOnce) {
  // No trainer is there yet.
  const auto half = [](int index) {
    v1::RegisterWorker worker = Worker("tp", index, 2);
    v1::Box* box = worker.mutable_tensors(0)->mutable_box();
    box->add_offset(4 * index);
    box->add_offset(0);
    box->add_extent(4);
    box->add_extent(4);
    return worker;
  };
  ASSERT_EQ(Join(half(0)), "");
  EXPECT_EQ(registry_.StoreBytes(kModel, "n"), 32);
  ASSERT_EQ(Join(Worker("r", 0, 1)), "");
  const int64_t whole = registry_.StoreBytes(kModel, "n");
  ASSERT_EQ(Join(half(1)), "");
  ASSERT_EQ(Join(Worker("s", 0, 1)), "");
  EXPECT_EQ(registry_.StoreBytes(kModel, "n"), whole);
  EXPECT_EQ(registry_.StoreBytes(kModel, "elsewhere"), 0);
}

TEST_F(RegistryTest, OneIncarnationAtATime) {
  ASSERT_EQ(Join(Control("r", 2)), "");
  v1::RegisterReplica other = Control("r", 2);
  other.set_incarnation("j");
  EXPECT_EQ(Join(other), "REPLICA_TAKEN");
  v1::RegisterWorker worker = Worker("r", 0, 2);
  worker.set_incarnation("j");
  EXPECT_EQ(Join(worker), "WORKER_TAKEN");
  EXPECT_EQ(Join(Worker("r", 0, 3)), "WORKER_COUNT_INVALID");
  EXPECT_FALSE(registry_.RemoveControl(kModel, "r", "j"));
  EXPECT_TRUE(registry_.RemoveControl(kModel, "r", "i"));
  EXPECT_EQ(Join(other), "");
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
