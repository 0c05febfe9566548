#include "daemon/service/validate.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

template <typename Message>
Message Parse(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message))
      << text;
  return message;
}

std::string Shards(const std::string& text) {
  return ErrorReason(CheckShards(Parse<v1::RegisterShardsRequest>(text)));
}

std::string Worker(const std::string& tensor) {
  return ErrorReason(CheckWorker(Parse<v1::RegisterWorker>(
      "model: 'models/m' replica: 'r' incarnation: 'i' worker_count: 1 "
      "tensors { " +
      tensor + " }")));
}

constexpr char kGood[] =
    "regions { size_bytes: 48 } "
    "shards { parameter { name: 'a' dtype: DTYPE_BF16 shape: [4, 6] } }";

TEST(ValidateTest, NamesOfModels) {
  EXPECT_TRUE(CheckModelName("models/qwen2.5-0.5b").ok());
  for (const char* bad :
       {"", "models/", "qwen", "models/A", "models/-a", "models/a/b"}) {
    EXPECT_EQ(ErrorReason(CheckModelName(bad)), "MODEL_NAME_INVALID") << bad;
  }
}

TEST(ValidateTest, ShardsThatFitExactlyAreFine) {
  EXPECT_EQ(Shards(kGood), "");
  EXPECT_EQ(ShardBytes(Parse<v1::RegisterShardsRequest>(kGood)), 48);
  // A scalar, and a part with strides: elements 0, 1, 6 and 7.
  EXPECT_EQ(Shards("regions { size_bytes: 4 } "
                   "shards { parameter { name: 's' dtype: DTYPE_F32 } }"),
            "");
  EXPECT_EQ(
      Shards("regions { size_bytes: 16 } "
             "shards { parameter { name: 'a' dtype: DTYPE_BF16 shape: [4, 6] } "
             "box { offset: [0, 0] extent: [2, 2] } strides: [6, 1] }"),
      "");
}

TEST(ValidateTest, ShardsBeyondTheirRegion) {
  EXPECT_EQ(
      Shards(
          "regions { size_bytes: 47 } "
          "shards { parameter { name: 'a' dtype: DTYPE_BF16 shape: [4, 6] } }"),
      "MEMORY_OUT_OF_RANGE");
  EXPECT_EQ(Shards("regions { size_bytes: 48 } shards { offset_bytes: 1 "
                   "parameter { name: 'a' dtype: DTYPE_BF16 shape: [4, 6] } }"),
            "MEMORY_OUT_OF_RANGE");
  EXPECT_EQ(Shards("regions { size_bytes: 48 } shards { offset_bytes: "
                   "9223372036854775807 "
                   "parameter { name: 'a' dtype: DTYPE_BF16 shape: [4, 6] } }"),
            "MEMORY_OUT_OF_RANGE");
  EXPECT_EQ(Shards("regions { size_bytes: 48 } shards { offset_bytes: -2 "
                   "parameter { name: 'a' dtype: DTYPE_BF16 shape: [4, 6] } }"),
            "MEMORY_OUT_OF_RANGE");
  EXPECT_EQ(
      Shards("regions { size_bytes: 15 } "
             "shards { parameter { name: 'a' dtype: DTYPE_BF16 shape: [4, 6] } "
             "box { offset: [0, 0] extent: [2, 2] } strides: [6, 1] }"),
      "MEMORY_OUT_OF_RANGE");
  EXPECT_EQ(
      Shards("regions { size_bytes: 48 } "
             "shards { parameter { name: 'a' dtype: DTYPE_BF16 shape: [4, 6] } "
             "strides: [6148914691236517205, 1] }"),
      "MEMORY_OUT_OF_RANGE");
  EXPECT_EQ(Shards("regions { size_bytes: 48 } shards { region: 1 "
                   "parameter { name: 'a' dtype: DTYPE_BF16 shape: [4, 6] } }"),
            "MEMORY_OUT_OF_RANGE");
}

TEST(ValidateTest, ShardsThatAreCast) {
  const auto held = [](const std::string& as, int64_t bytes,
                       const std::string& parameter) {
    return absl::StrCat("regions { size_bytes: ", bytes,
                        " } shards { dtype: ", as, " parameter { name: 'a' ",
                        parameter, " } }");
  };
  const std::string bf16 = "dtype: DTYPE_BF16 shape: [4, 6]";
  EXPECT_EQ(Shards(held("DTYPE_BF16", 48, bf16)), "");
  // Of the bytes that lie there; what is sent is half of them.
  const std::string masters = held("DTYPE_F32", 96, bf16);
  EXPECT_EQ(Shards(masters), "");
  EXPECT_EQ(ShardBytes(Parse<v1::RegisterShardsRequest>(masters)), 48);
  EXPECT_EQ(Shards(held("DTYPE_F32", 95, bf16)), "MEMORY_OUT_OF_RANGE");
  EXPECT_EQ(Shards(held("DTYPE_F16", 96, bf16)), "DTYPE_MISMATCH");
  EXPECT_EQ(Shards(held("55", 96, bf16)), "DTYPE_UNKNOWN");
  // With scales of 3 x 2 blocks.
  const std::string fp8 = "dtype: DTYPE_F8_E4M3 shape: [300, 200]";
  const std::string blocks = held("DTYPE_BF16", 120000, fp8);
  EXPECT_EQ(Shards(blocks), "");
  EXPECT_EQ(ShardBytes(Parse<v1::RegisterShardsRequest>(blocks)), 60000 + 24);
  // A rank that has a part of it.
  const auto part = Parse<v1::RegisterShardsRequest>(
      "shards { dtype: DTYPE_BF16 parameter { name: 'a' " + fp8 +
      " } box { offset: [0, 0] extent: [128, 200] } }");
  EXPECT_EQ(ShardBytes(part), 128 * 200 + 8);
  EXPECT_EQ(ModelBytes(part.shards()), 60000 + 24);
  EXPECT_EQ(Shards(held("DTYPE_BF16", 119999, fp8)), "MEMORY_OUT_OF_RANGE");
  EXPECT_EQ(
      Shards(held("DTYPE_BF16", 120000, "dtype: DTYPE_F8_E4M3 shape: [200]")),
      "DTYPE_MISMATCH");
  EXPECT_EQ(Shards("regions { size_bytes: 120000 } shards { dtype: DTYPE_BF16 "
                   "parameter { name: 'a' " +
                   fp8 + " } box { offset: [0, 64] extent: [300, 128] } }"),
            "DTYPE_MISMATCH");
}

TEST(ValidateTest, ShapesAndTypes) {
  const std::string region = "regions { size_bytes: 9223372036854775807 } ";
  EXPECT_EQ(
      Shards(region + "shards { parameter { name: 'a' dtype: 99 shape: 1 } }"),
      "DTYPE_UNKNOWN");
  EXPECT_EQ(Shards(region + "shards { parameter { name: 'a' shape: 1 } }"),
            "DTYPE_UNKNOWN");
  for (const char* shape : {"-1", "0", "2147483649", "[1, 0]",
                            "[2147483648, 2147483648, 2147483648]"}) {
    EXPECT_EQ(
        Shards(region +
               "shards { parameter { name: 'a' dtype: DTYPE_BF16 shape: " +
               shape + " } }"),
        "SHAPE_INVALID")
        << shape;
    EXPECT_EQ(
        Worker(std::string("name: 'a' dtype: DTYPE_BF16 shape: ") + shape),
        "SHAPE_INVALID")
        << shape;
  }
  EXPECT_EQ(Worker("name: 'a' dtype: 77 shape: 1"), "DTYPE_UNKNOWN");
}

TEST(ValidateTest, Boxes) {
  for (const char* box :
       {"offset: [0] extent: [4]", "offset: [0, 0] extent: [4, 7]",
        "offset: [-1, 0] extent: [1, 1]", "offset: [4, 0] extent: [1, 1]",
        "offset: [0, 0] extent: [0, 6]",
        "offset: [1, 1] extent: [9223372036854775807, 1]"}) {
    EXPECT_EQ(
        Shards(
            std::string(
                "regions { size_bytes: 4800 } shards { parameter { name: 'a' "
                "dtype: DTYPE_BF16 shape: [4, 6] } box { ") +
            box + " } }"),
        "BOX_OUT_OF_RANGE")
        << box;
    EXPECT_EQ(
        Worker(std::string("name: 'a' dtype: DTYPE_BF16 shape: [4, 6] box { ") +
               box + " }"),
        "BOX_OUT_OF_RANGE")
        << box;
  }
}

TEST(ValidateTest, NamesThatComeTwice) {
  const std::string again = kGood + std::string(
                                        " shards { parameter { name: 'a' "
                                        "dtype: DTYPE_BF16 shape: [4, 6] } }");
  EXPECT_EQ(Shards(again), "DUPLICATE_NAME");
  const std::string other =
      kGood +
      std::string(
          " shards { parameter { name: 'a' dtype: DTYPE_F16 shape: [4, 6] } }");
  EXPECT_EQ(Shards(other), "CATALOG_MISMATCH");
  EXPECT_EQ(Worker("name: 'a' dtype: DTYPE_BF16 shape: 1 } "
                   "tensors { name: 'a' dtype: DTYPE_BF16 shape: 1"),
            "DUPLICATE_NAME");
}

TEST(ValidateTest, Publishing) {
  v1::PublishVersionRequest request;
  request.set_version(-1);
  EXPECT_EQ(ErrorReason(CheckPublish(request)), "VERSION_INVALID");
  request.set_version(0);
  request.set_request_id(std::string(129, 'x'));
  EXPECT_EQ(ErrorReason(CheckPublish(request)), "REQUEST_ID_INVALID");
}

TEST(ValidateTest, RanksAndWorkers) {
  EXPECT_EQ(ErrorReason(CheckIdentity(Parse<v1::TrainerIdentity>(
                "model: 'models/m' rank: 2 world_size: 2"))),
            "RANK_OUT_OF_RANGE");
  EXPECT_EQ(ErrorReason(CheckIdentity(Parse<v1::TrainerIdentity>(
                "model: 'models/m' world_size: 1 protocol_version: 9"))),
            "PROTOCOL_UNSUPPORTED");
  EXPECT_EQ(
      ErrorReason(CheckWorker(Parse<v1::RegisterWorker>(
          "model: 'models/m' replica: 'r' incarnation: 'i' worker_count: 1 "
          "worker_index: 1"))),
      "WORKER_INDEX_INVALID");
  EXPECT_EQ(ErrorReason(CheckReplica(Parse<v1::RegisterReplica>(
                "model: 'models/m' replica: 'r' worker_count: 1"))),
            "INCARNATION_INVALID");
  EXPECT_EQ(ErrorReason(CheckReplica(Parse<v1::RegisterReplica>(
                "model: 'models/m' replica: 'R' worker_count: 1"))),
            "REPLICA_NAME_INVALID");
  EXPECT_EQ(ErrorReason(CheckReplica(Parse<v1::RegisterReplica>(
                "model: 'models/m' replica: 'r' incarnation: 'i'"))),
            "WORKER_COUNT_INVALID");
}

TEST(ValidateTest, WordsAreCutBetweenCharacters) {
  std::string words(10, 'x');
  Cut(10, &words);
  EXPECT_EQ(words, "xxxxxxxxxx");
  words = "xxxxxx\xc3\xa4zzz";
  Cut(10, &words);
  EXPECT_EQ(words, "xxxxxx...");
  v1::Failure failure;
  failure.set_code(13);
  failure.set_reason("HOOK_FAILED");
  for (int i = 0; i < 100000; ++i)
    failure.mutable_message()->append("\xc3\xa4");
  const v1::Failure cut = CutFailure(failure);
  EXPECT_EQ(cut.code(), 13);
  EXPECT_EQ(cut.reason(), "HOOK_FAILED");
  EXPECT_LE(cut.message().size(), kLongestWords);
  EXPECT_GT(cut.message().size(), kLongestWords - 10);
  EXPECT_EQ(cut.message().substr(cut.message().size() - 5), "\xc3\xa4...");
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
