#include "transport/error.h"

#include <cerrno>

#include "gtest/gtest.h"

namespace weightsync {
namespace transport {
namespace {

TEST(Error, CarriesCodeReasonAndMessage) {
  const absl::Status status =
      MakeError(absl::StatusCode::kNotFound, "TOKEN_UNKNOWN", "no such token");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(status), "TOKEN_UNKNOWN");
  EXPECT_EQ(status.message(), "no such token");
}

TEST(Error, NamesTheSystemsError) {
  const absl::Status status =
      MakeErrnoError(absl::StatusCode::kInternal, "X", "cannot open", ENOENT);
  EXPECT_EQ(status.message(), "cannot open: No such file or directory");
}

TEST(Error, StatusesWithoutAReason) {
  EXPECT_EQ(ReasonOf(absl::OkStatus()), "");
  EXPECT_EQ(ReasonOf(absl::InternalError("plain")), "");
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
