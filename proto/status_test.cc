#include "proto/status.h"

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace {

TEST(StatusTest, EveryFormCarriesCodeReasonAndSentence) {
  const absl::Status status =
      ErrorStatus(absl::StatusCode::kNotFound, "ARENA_UNKNOWN",
                  "arena a1 is not of this session; allocate it first");

  const v1::Failure failure = ToFailure(status);
  EXPECT_EQ(failure.code(), 5);
  EXPECT_EQ(failure.reason(), "ARENA_UNKNOWN");
  EXPECT_EQ(FromFailure(failure), status);

  const grpc::Status wire = ToGrpcStatus(status);
  EXPECT_EQ(wire.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(wire.error_message(), status.message());
  EXPECT_EQ(FromGrpcStatus(wire), status);
}

TEST(StatusTest, DetailsAreWhatOtherLanguagesExpect) {
  const grpc::Status wire = ToGrpcStatus(
      ErrorStatus(absl::StatusCode::kAborted, "PEER_LOST", "node b went away"));
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(wire.error_details()));
  EXPECT_EQ(details.code(), 10);
  ASSERT_EQ(details.details_size(), 1);
  EXPECT_EQ(details.details(0).type_url(),
            "type.googleapis.com/google.rpc.ErrorInfo");
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(details.details(0).UnpackTo(&info));
  EXPECT_EQ(info.reason(), "PEER_LOST");
  EXPECT_EQ(info.domain(), "weightsync.dev");
}

TEST(StatusTest, OkStaysOk) {
  EXPECT_TRUE(FromFailure(ToFailure(absl::OkStatus())).ok());
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok());
  EXPECT_EQ(ErrorReason(absl::OkStatus()), "");
}

TEST(StatusTest, WithoutAReasonTheCodeIsTheReason) {
  EXPECT_EQ(ErrorReason(absl::InternalError("x")), "INTERNAL");
  EXPECT_EQ(ErrorReason(FromGrpcStatus(
                grpc::Status(grpc::StatusCode::UNAVAILABLE, "refused"))),
            "UNAVAILABLE");
}

TEST(StatusTest, ForeignDetailsAreNoReason) {
  EXPECT_EQ(ErrorReason(FromGrpcStatus(grpc::Status(
                grpc::StatusCode::INTERNAL, "x", "these are not details"))),
            "INTERNAL");
}

TEST(StatusTest, FailureWithoutACodeIsNotOk) {
  v1::Failure failure;
  failure.set_reason("PEER_LOST");
  EXPECT_EQ(FromFailure(failure).code(), absl::StatusCode::kUnknown);
}

TEST(StatusTest, LongSentencesAreShortenedAndStayValidUtf8) {
  std::string sentence;
  for (int i = 0; i < 5000; ++i) sentence += "\xC3\xA4";  // ä
  const grpc::Status wire = ToGrpcStatus(
      ErrorStatus(absl::StatusCode::kInternal, "TOO_LONG", sentence));
  EXPECT_LT(
      3 * wire.error_message().size() + 4 * wire.error_details().size() / 3,
      8000u);
  EXPECT_EQ(wire.error_message().substr(wire.error_message().size() - 5),
            "\xC3\xA4...");
}

TEST(StatusTest, BytesThatAreNotUtf8AreReplaced) {
  const absl::Status status = ErrorStatus(
      absl::StatusCode::kInternal, "X", "path /tmp/\xFF\xC3 and \xED\xA0\x80");
  EXPECT_EQ(ToFailure(status).message(), "path /tmp/?? and ???");
}

}  // namespace
}  // namespace weightsync
