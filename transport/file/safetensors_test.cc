#include "transport/file/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Length(uint64_t length) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(length >> (8 * i));
  return bytes;
}

// A file with this header and `data_bytes` bytes behind it.
absl::StatusOr<SafetensorsHeader> Parse(const std::string& json,
                                        int64_t data_bytes) {
  const std::string start = Length(json.size()) + json;
  return ParseSafetensorsHeader(
      start, static_cast<int64_t>(start.size()) + data_bytes);
}

// Why it was refused; "" when it was not.
std::string Refusal(const std::string& json, int64_t data_bytes) {
  const auto header = Parse(json, data_bytes);
  if (header.ok()) return "";
  EXPECT_EQ(ReasonOf(header.status()), "SAFETENSORS_INVALID");
  return std::string(header.status().message());
}

std::string Entry(const std::string& name, const std::string& dtype,
                  const std::string& shape, int64_t begin, int64_t end) {
  return absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":[",
                      shape, "],\"data_offsets\":[", begin, ",", end, "]}");
}

TEST(SafetensorsTest, ReadsTensorsInTheOrderOfTheirBytes) {
  const std::string json = absl::StrCat(
      "{", Entry("b", "F32", "2,3", 8, 32),
      ",\"__metadata__\":{\"format\":"
      "\"pt\"},",
      Entry("a", "BF16", "4", 0, 8), ",", Entry("s", "I64", "", 32, 40), ",",
      Entry("z", "F16", "0,5", 40, 40), "}   ");
  const auto header = Parse(json, 40);
  ASSERT_TRUE(header.ok()) << header.status();
  ASSERT_EQ(header->tensors.size(), 4u);
  EXPECT_EQ(header->tensors[0].name, "a");
  EXPECT_EQ(header->tensors[0].begin, header->data_begin);
  EXPECT_EQ(header->tensors[1].name, "b");
  EXPECT_THAT(header->tensors[1].shape, ElementsAre(2, 3));
  EXPECT_EQ(header->tensors[2].end, header->data_begin + 40);
  EXPECT_EQ(header->metadata.at("format"), "pt");
}

TEST(SafetensorsTest, AFileMayHoldNothing) {
  EXPECT_EQ(Refusal("{}", 0), "");
  EXPECT_EQ(Refusal("{\"__metadata__\":{}}", 0), "");
}

TEST(SafetensorsTest, HostileLengths) {
  EXPECT_FALSE(ParseSafetensorsHeader("", 0).ok());
  EXPECT_FALSE(ParseSafetensorsHeader("1234567", 7).ok());
  const auto refused = [](uint64_t length, int64_t file_bytes) {
    return std::string(ParseSafetensorsHeader(Length(length) + "{}", file_bytes)
                           .status()
                           .message());
  };
  EXPECT_THAT(refused(3, 10), HasSubstr("longer than the file"));
  EXPECT_THAT(refused(3, int64_t{1} << 40), HasSubstr("longer than the file"));
  EXPECT_THAT(refused(UINT64_MAX, 10), HasSubstr("more than 100 MB"));
  EXPECT_THAT(refused(uint64_t{1} << 63, 10), HasSubstr("more than 100 MB"));
  EXPECT_THAT(refused(100000001, 200000000), HasSubstr("more than 100 MB"));
}

TEST(SafetensorsTest, HostileOffsets) {
  const auto two = [](int64_t b1, int64_t e1, int64_t b2, int64_t e2,
                      int64_t bytes) {
    return Refusal(absl::StrCat("{", Entry("a", "U8", "4", b1, e1), ",",
                                Entry("b", "U8", "4", b2, e2), "}"),
                   bytes);
  };
  EXPECT_EQ(two(0, 4, 4, 8, 8), "");
  EXPECT_EQ(two(4, 8, 0, 4, 8), "");
  EXPECT_THAT(two(0, 4, 2, 6, 6), HasSubstr("inside of others"));
  EXPECT_THAT(two(0, 4, 0, 4, 4), HasSubstr("inside of others"));
  EXPECT_THAT(two(0, 4, 5, 9, 9), HasSubstr("after a hole"));
  EXPECT_THAT(two(1, 5, 5, 9, 9), HasSubstr("after a hole"));
  EXPECT_THAT(two(0, 4, 4, 7, 7), HasSubstr("its shape and type make 4"));
  EXPECT_THAT(two(0, 4, 4, 2, 8), HasSubstr("its shape and type make 4"));
  EXPECT_THAT(two(0, 4, 4, 8, 7), HasSubstr("beyond the end"));
  EXPECT_THAT(two(0, 4, 4, 8, 9), HasSubstr("1 bytes behind"));
}

TEST(SafetensorsTest, HostileShapes) {
  const auto shaped = [](const std::string& shape, int64_t end) {
    return Refusal(absl::StrCat("{", Entry("a", "F32", shape, 0, end), "}"),
                   end);
  };
  EXPECT_EQ(shaped("2", 8), "");
  EXPECT_THAT(shaped("9223372036854775807,4", 8), HasSubstr("too large"));
  EXPECT_THAT(shaped("4294967296,4294967296", 0), HasSubstr("too large"));
  EXPECT_THAT(shaped("18446744073709551615", 8), HasSubstr("2^63"));
  EXPECT_THAT(shaped("99999999999999999999", 8), HasSubstr("not whole"));
  EXPECT_THAT(shaped("-2", 8), HasSubstr("negative"));
  EXPECT_THAT(shaped("2.0", 8), HasSubstr("not whole"));
  EXPECT_THAT(shaped("\"2\"", 8), HasSubstr("where none belongs"));
  EXPECT_THAT(shaped("[2]", 8), HasSubstr("where none belongs"));
  EXPECT_THAT(Refusal("{" + Entry("a", "F4", "3", 0, 1) + "}", 1),
              HasSubstr("too large"))
      << "3 elements of 4 bits are no bytes";
}

TEST(SafetensorsTest, HostileJson) {
  const std::string good = Entry("a", "U8", "1", 0, 1);
  EXPECT_EQ(Refusal("{" + good + "}", 1), "");
  EXPECT_THAT(Refusal("", 0), HasSubstr("no JSON"));
  EXPECT_THAT(Refusal("[]", 0), HasSubstr("no JSON"));
  EXPECT_THAT(Refusal(" {}", 0), HasSubstr("no JSON"));
  EXPECT_THAT(Refusal("{" + good, 1), HasSubstr("no JSON"));
  EXPECT_THAT(Refusal("{" + good + "}x", 1), HasSubstr("no JSON"));
  EXPECT_THAT(Refusal("{\"a\xff\":1}", 1), HasSubstr("no JSON"));
  EXPECT_THAT(Refusal(std::string("{}\0", 3), 0), HasSubstr("no JSON"));
  EXPECT_THAT(Refusal("{" + good + "," + good + "}", 1), HasSubstr("twice"));
  EXPECT_THAT(Refusal("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],"
                      "\"data_offsets\":[0,1]}}",
                      1),
              HasSubstr("twice"));
  EXPECT_THAT(Refusal("{\"a\":1}", 1), HasSubstr("where none belongs"));
  EXPECT_THAT(Refusal("{\"a\":[]}", 1), HasSubstr("where none belongs"));
  EXPECT_THAT(Refusal("{\"__metadata__\":{\"k\":1}}", 0),
              HasSubstr("where none belongs"));
  EXPECT_THAT(Refusal("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0),
              HasSubstr("twice"));
  EXPECT_THAT(Refusal("{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1),
              HasSubstr("lacks"));
  EXPECT_THAT(Refusal("{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1),
              HasSubstr("lacks"));
  EXPECT_THAT(Refusal("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],"
                      "\"data_offsets\":[0,1,2]}}",
                      1),
              HasSubstr("lacks"));
  EXPECT_THAT(Refusal("{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,"
                      "1]}}",
                      1),
              HasSubstr("where none belongs"));
  EXPECT_THAT(Refusal("{" + Entry("a", "BF17", "1", 0, 1) + "}", 1),
              HasSubstr("which is none"));
}

TEST(SafetensorsTest, UnknownKeysAreIgnoredButNotForEver) {
  const auto with = [](const std::string& value) {
    return Refusal("{\"a\":{\"extra\":" + value +
                       ",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,"
                       "1]}}",
                   1);
  };
  EXPECT_EQ(with("null"), "");
  EXPECT_EQ(with("{\"shape\":[[1],{\"x\":-2.5}],\"dtype\":true}"), "");
  EXPECT_THAT(with(std::string(1000, '[') + std::string(1000, ']')),
              HasSubstr("too deeply"));
  // Cut off in the middle of a very deep one.
  EXPECT_THAT(with(std::string(1000000, '[')), HasSubstr("too deeply"));
}

TEST(SafetensorsTest, ALongNameIsShortInTheSentence) {
  const std::string name(1000000, 'x');
  EXPECT_LT(Refusal("{" + Entry(name, "U8", "2", 0, 1) + "}", 1).size(), 500u);
}

TEST(SafetensorsTest, WhatItWritesItReads) {
  std::vector<SafetensorsTensor> tensors(2);
  tensors[0] = {"z \"quoted\" \n", "BF16", {2, 3}, 0, 0};
  tensors[1] = {"a", "F32", {}, 0, 0};
  const auto header = MakeSafetensorsHeader(tensors, {{"step", "7"}});
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->size() % 8, 0u);
  const auto read = ParseSafetensorsHeader(
      *header, static_cast<int64_t>(header->size()) + 16);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->tensors[0].name, tensors[0].name);
  EXPECT_EQ(read->tensors[1].begin, read->data_begin + 12);
  EXPECT_EQ(read->metadata.at("step"), "7");
  tensors[1].name = tensors[0].name;
  EXPECT_FALSE(MakeSafetensorsHeader(tensors, {}).ok());
  tensors[1].name = "__metadata__";
  EXPECT_FALSE(MakeSafetensorsHeader(tensors, {}).ok());
  tensors[1].name = "b";
  tensors[1].shape = {INT64_MAX, 2};
  EXPECT_FALSE(MakeSafetensorsHeader(tensors, {}).ok());
}

TEST(SafetensorsTest, ReadsFiles) {
  std::string path = "/tmp/safetensors_test.XXXXXX";
  const int fd = mkstemp(&path[0]);
  ASSERT_GE(fd, 0);
  close(fd);
  const std::string json = "{" + Entry("a", "U8", "5", 0, 5) + "}";
  std::ofstream(path) << Length(json.size()) << json << "12345";
  const auto header = ReadSafetensorsHeader(path);
  EXPECT_TRUE(header.ok()) << header.status();
  // A length beyond the file takes no memory.
  std::ofstream(path) << Length(99999999) << json << "12345";
  EXPECT_EQ(ReasonOf(ReadSafetensorsHeader(path).status()),
            "SAFETENSORS_INVALID");
  std::ofstream(path) << "123";
  EXPECT_EQ(ReasonOf(ReadSafetensorsHeader(path).status()),
            "SAFETENSORS_INVALID");
  std::remove(path.c_str());
  EXPECT_EQ(ReasonOf(ReadSafetensorsHeader(path).status()), "FILE_UNKNOWN");
  EXPECT_EQ(ReasonOf(ReadSafetensorsHeader("/tmp").status()),
            "SAFETENSORS_INVALID");
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
