#include "client/ctl/format.h"

#include <gtest/gtest.h>

namespace weightsync {
namespace ctl {
namespace {

TEST(FormatTest, Bytes) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(999), "999 B");
  EXPECT_EQ(HumanBytes(1000), "1.00 kB");
  EXPECT_EQ(HumanBytes(65536), "65.5 kB");
  EXPECT_EQ(HumanBytes(988065536), "988.1 MB");
  EXPECT_EQ(HumanBytes(999999999), "1.00 GB");
  EXPECT_EQ(HumanBytes(1342052838400), "1.34 TB");
  EXPECT_EQ(HumanBytes(-5), "-5 B");
}

TEST(FormatTest, Durations) {
  EXPECT_EQ(HumanDuration(absl::ZeroDuration()), "0 s");
  EXPECT_EQ(HumanDuration(absl::Microseconds(350)), "350 us");
  EXPECT_EQ(HumanDuration(absl::Microseconds(12345)), "12.3 ms");
  EXPECT_EQ(HumanDuration(absl::Milliseconds(999)), "999 ms");
  EXPECT_EQ(HumanDuration(absl::Milliseconds(1234)), "1.23 s");
  EXPECT_EQ(HumanDuration(absl::Seconds(59.96)), "1 m 00 s");
  EXPECT_EQ(HumanDuration(absl::Seconds(125)), "2 m 05 s");
  EXPECT_EQ(HumanDuration(absl::Minutes(200)), "3 h 20 m");
  EXPECT_EQ(HumanDuration(absl::Hours(99)), "4 d 03 h");
}

TEST(FormatTest, RatesAgesAndNumbers) {
  EXPECT_EQ(HumanRate(1000000000, absl::Milliseconds(500)), "2.00 GB/s");
  EXPECT_EQ(HumanRate(5, absl::ZeroDuration()), "-");
  const absl::Time now = absl::FromUnixSeconds(1000);
  EXPECT_EQ(Ago(now, now - absl::Seconds(5.5)), "5 s ago");
  EXPECT_EQ(Ago(now, now + absl::Seconds(2)), "0 s ago");
  EXPECT_EQ(Ago(now, absl::UnixEpoch()), "-");
  EXPECT_EQ(WithCommas(494032768), "494,032,768");
  EXPECT_EQ(WithCommas(999), "999");
  EXPECT_EQ(WithCommas(-1000), "-1,000");
  EXPECT_EQ(LastPart("models/m/replicas/r"), "r");
}

TEST(FormatTest, TableAlignsNumbersRightAndTrimsLines) {
  Table table({"NAME", "COUNT", "NOTE"});
  table.Add({"a", "5", ""});
  table.Add({"long-name", "12,345", "behind"});
  table.Add({"b", "-"});
  EXPECT_EQ(table.ToString(),
            "NAME        COUNT  NOTE\n"
            "a               5\n"
            "long-name  12,345  behind\n"
            "b               -\n");
}

TEST(FormatTest, CountedThings) {
  EXPECT_EQ(Counted(0, "rank"), "0 ranks");
  EXPECT_EQ(Counted(1, "rank"), "1 rank");
  EXPECT_EQ(Counted(1234, "bucket"), "1,234 buckets");
  EXPECT_EQ(Counted(1, "copy"), "1 copy");
  EXPECT_EQ(Counted(2, "copy"), "2 copies");
}

}  // namespace
}  // namespace ctl
}  // namespace weightsync
