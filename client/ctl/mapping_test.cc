#include "client/ctl/mapping.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "client/ctl/commands.h"
#include "nlohmann/json.hpp"
#include "proto/status.h"

namespace weightsync {
namespace ctl {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;

std::vector<NamedTensor> TensorsOf(const Json& rows) {
  std::vector<NamedTensor> tensors;
  for (const Json& row : rows) {
    tensors.push_back({row[0].get<std::string>(), row[1].get<std::string>(),
                       row[2].get<std::vector<int64_t>>()});
  }
  return tensors;
}

// tests/python/python_names_test.py holds the Python package to the same cases.
TEST(MappingTest, SaysWhatThePythonPackageSays) {
  std::ifstream file("client/ctl/testdata/names_cases.json");
  const Json cases = Json::parse(file);
  ASSERT_GE(cases.size(), 50u);
  for (const Json& one : cases) {
    SCOPED_TRACE(one["name"].get<std::string>());
    const auto rules = ParseNameRules(one["rules"].dump());
    absl::Status status = rules.status();
    if (rules.ok()) {
      const auto mapping = MapNames(TensorsOf(one["trainer"]),
                                    TensorsOf(one["engine"]), *rules);
      status = mapping.status();
      if (mapping.ok()) {
        EXPECT_FALSE(one.contains("error")) << RenderMapping(*mapping);
        if (one.contains("error")) continue;
        EXPECT_EQ(RenderMapping(*mapping), one["text"].get<std::string>());
        EXPECT_EQ(MappingJson(*mapping),
                  one["json"].dump(2, ' ', /*ensure_ascii=*/true) + "\n");
      }
    }
    EXPECT_EQ(ErrorReason(status),
              one.contains("error") ? one["error"].get<std::string>() : "")
        << status;
  }
}

TEST(MappingTest, RulesThatAreNoJson) {
  for (const char* text : {"", "[", "{}", "3", "[{\"drop\": \"a\"}] x"}) {
    EXPECT_EQ(ErrorReason(ParseNameRules(text).status()), "PATTERN_INVALID")
        << text;
  }
}

class NamesCommandTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& text) {
    const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  // A checkpoint of one-byte elements.
  std::string Checkpoint(const std::string& name,
                         const std::vector<std::pair<std::string, int>>& rows) {
    Json header;
    int at = 0;
    for (const auto& row : rows) {
      header[row.first] = {{"dtype", "U8"},
                           {"shape", {row.second}},
                           {"data_offsets", {at, at + row.second}}};
      at += row.second;
    }
    const std::string json = header.dump();
    std::string length(8, '\0');
    for (int i = 0; i < 8; ++i) {
      length[i] = static_cast<char>(json.size() >> (8 * i));
    }
    return Write(name, length + json + std::string(at, 'x'));
  }
  int Names(std::vector<std::string> args) {
    args.insert(args.begin(), "names");
    out_.str("");
    err_.str("");
    Screen screen;
    screen.out = &out_;
    screen.err = &err_;
    return ctl::Run(args, "", screen);
  }

  std::ostringstream out_;
  std::ostringstream err_;
};

TEST_F(NamesCommandTest, FilesOnBothSides) {
  const std::string trainer =
      Checkpoint("t.safetensors", {{"h.0.b", 4}, {"h.0.a", 2}});
  const std::string engine =
      Checkpoint("e.safetensors", {{"l.0.a", 2}, {"l.0.b", 4}});
  const std::string rules =
      Write("rules.json", R"([{"rename": ["^h\\.", "l."]}])");
  EXPECT_EQ(Names({trainer, engine, "--rules", rules}), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), "h.0.b  l.0.b\nh.0.a  l.0.a\n");
  EXPECT_EQ(Names({trainer, engine}), kExitError);
  EXPECT_THAT(out_.str(), HasSubstr("only the engine has: 2\n"));
  EXPECT_EQ(Names({trainer, engine, "--json"}), kExitError);
  EXPECT_EQ(Json::parse(out_.str())["only_trainer"].size(), 2u);

  EXPECT_EQ(Names({trainer}), kExitUsage);
  EXPECT_EQ(Names({trainer, engine + ".gone"}), kExitNotFound);
  EXPECT_EQ(Names({trainer, engine, "--rules", rules + ".gone"}),
            kExitNotFound);
  EXPECT_EQ(Names({trainer, engine, "--rules", trainer}), kExitError);
  EXPECT_THAT(err_.str(), HasSubstr("no JSON list"));
  EXPECT_EQ(Names({rules, engine}), kExitError);
}

}  // namespace
}  // namespace ctl
}  // namespace weightsync
