// `weightsyncctl plan` as people and programs call it: through Run, with no
// daemon anywhere.

#include "client/ctl/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "client/ctl/commands.h"
#include "client/ctl/help.h"
#include "nlohmann/json.hpp"

namespace weightsync {
namespace ctl {
namespace {

using Json = nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class PlanTest : public ::testing::Test {
 protected:
  int Plan(std::vector<std::string> args) {
    args.insert(args.begin(), "plan");
    out_.str("");
    err_.str("");
    Screen screen;
    screen.out = &out_;
    screen.err = &err_;
    // Nobody listens there; a plan that asked somebody would fail.
    return ctl::Run(args, "127.0.0.1:1", screen);
  }

  // The same with what every plan needs.
  int PlanOf(const std::string& subject, std::vector<std::string> more = {}) {
    std::vector<std::string> args = {subject,
                                     "--training_sharding=fsdp",
                                     "--training_gpus=16",
                                     "--inference_replicas",
                                     "8",
                                     "--inference_tp",
                                     "2"};
    args.insert(args.end(), more.begin(), more.end());
    return Plan(args);
  }

  Json PlanJson(std::vector<std::string> args) {
    args.push_back("--json");
    EXPECT_EQ(Plan(args), kExitOk) << err_.str();
    return Json::parse(out_.str(), nullptr, false);
  }

  std::string Write(const std::string& name, const std::string& text) {
    const char* folder = std::getenv("TEST_TMPDIR");
    const std::string path =
        std::string(folder == nullptr ? "/tmp" : folder) + "/" + name;
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }

  std::string Safetensors(const std::string& name, const std::string& header,
                          int64_t data_bytes = 0) {
    std::string text;
    for (int i = 0; i < 8; ++i) {
      text.push_back(static_cast<char>(header.size() >> (8 * i) & 0xff));
    }
    return Write(name, text + header + std::string(data_bytes, '\0'));
  }

  // What is on stderr under --json: one object, and nothing else.
  Json Error() {
    EXPECT_EQ(out_.str(), "");
    const Json error = Json::parse(err_.str(), nullptr, false);
    EXPECT_TRUE(error.is_object()) << err_.str();
    return error;
  }

  std::ostringstream out_;
  std::ostringstream err_;
};

TEST_F(PlanTest, TheGoldenPairedCases) {
  std::ifstream file("schedule/testdata/paired_schedule_cases.json");
  int cases = 0;
  for (const Json& golden : Json::parse(file)) {
    const auto text = [&](const char* key) {
      return golden[key].is_string() ? golden[key].get<std::string>()
                                     : golden[key].dump();
    };
    const Json json = PlanJson(
        {"--model", "qwen2.5-0.5b", "--policy", "PAIRED", "--training_sharding",
         text("training_sharding"), "--training_gpus", text("training_gpus"),
         "--inference_replicas", text("inference_replicas"), "--inference_tp",
         text("inference_tp"), "--base_port", text("base_port")});
    EXPECT_EQ(json["sender_ranks"], golden["sender_ranks"]);
    EXPECT_EQ(json["num_groups"], golden["num_groups"]);
    for (const Json& group : json["groups"]) {
      const std::string sender = group["sender_rank"].dump();
      EXPECT_EQ(group["targets"], golden["targets"][sender]);
      EXPECT_EQ(group["ports"], golden["ports"][sender]);
    }
    ++cases;
  }
  EXPECT_GT(cases, 5);
}

TEST_F(PlanTest, JsonHasTheKeysThatProgramsRead) {
  const Json json = PlanJson(
      {"--model=llama-3.1-8b", "--training_sharding=fsdp", "--training_gpus=8",
       "--inference_replicas=2", "--inference_tp=4", "--link_gbps=400"});
  for (const char* key :
       {"policy", "sender_ranks", "num_groups", "groups", "num_buckets",
        "total_bytes", "wire_bytes", "predicted_seconds", "bound_by",
        "lower_bound_seconds", "staging_bytes_per_node", "plan_digest",
        "plan_seconds"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  for (const char* key : {"transfer", "pause", "total"}) {
    EXPECT_TRUE(json["predicted_seconds"][key].is_number()) << key;
  }
  EXPECT_EQ(json["policy"], "SHARDED");
  EXPECT_GT(json["plan_seconds"], 0);
  // 16 GB over 50 GB/s.
  EXPECT_NEAR(json["lower_bound_seconds"], 16.06 / 50, 0.01);
}

TEST_F(PlanTest, TheTableReadsAloudAndHasABarForEachPhase) {
  ASSERT_EQ(PlanOf("--model=qwen2.5-0.5b"), kExitOk) << err_.str();
  const std::string text = out_.str();
  EXPECT_THAT(text, StartsWith("SHARDED: qwen2.5-0.5b, 16 trainer GPUs (fsdp) "
                               "to 8 replicas x tp 2\n"));
  EXPECT_THAT(text, AllOf(HasSubstr("sent by"), HasSubstr("16 ranks: 0-15"),
                          HasSubstr("988.1 MB"), HasSubstr("bound by")));
  for (const char* phase :
       {"gather", "snapshot", "transfer", "pause", "total"}) {
    EXPECT_THAT(text, HasSubstr(std::string("\n") + phase + " "));
  }
  EXPECT_THAT(text, HasSubstr("########################################\n"));
  EXPECT_THAT(text, HasSubstr("trainer-0000 > inference-0000"));
  EXPECT_THAT(text, HasSubstr("policies weighed: AUTO: SHARDED 0."));
  EXPECT_THAT(text, HasSubstr("\nplan "));
  // Nobody is beside a sender in a described cluster.
  EXPECT_THAT(text, Not(HasSubstr("inside a node")));
}

TEST_F(PlanTest, WhatTakesNoGroupIsALineWhereThereIsAny) {
  v1::PlanResponse response;
  response.set_explanation(
      "AUTO: SHARDED 1 s\ninside a node, over no group: 2 workers beside the "
      "sender by shared memory (a)");
  EXPECT_THAT(RenderPlan("a plan", response),
              HasSubstr("\npolicies weighed: AUTO: SHARDED 1 s\ninside a node, "
                        "over no group: 2 workers beside the sender by shared "
                        "memory (a)\nplan "));
}

TEST_F(PlanTest, AReferenceConfigurationIsAccepted) {
  const std::string config = Write("reference.textproto", R"(
# The names of both reference documents.
model: "qwen2.5-0.5b"
training_sharding: "dp"
training_gpus: 8
inference_replicas: 4
inference_tp: 2
base_port: 29500
weight_chunked_mem_mb: 64
policy: "paired"
)");
  const Json json = PlanJson({"--config", config});
  EXPECT_EQ(json["policy"], "PAIRED");
  EXPECT_EQ(json["bucket_bytes"], 64 << 20);
  EXPECT_EQ(json["groups"][7]["ports"], Json::parse("[29507]"));
  // The command line overrides it, under either name of the bucket size.
  const Json other = PlanJson({"--config", config, "--training_gpus=2",
                               "--bucket_size=1048576", "--policy=broadcast"});
  EXPECT_EQ(other["policy"], "BROADCAST");
  EXPECT_EQ(other["bucket_bytes"], 1 << 20);
  const Json third = PlanJson({"--training_gpus=2", "--config", config});
  EXPECT_EQ(third["sender_ranks"], Json::parse("[0, 1]"));
}

TEST_F(PlanTest, ACatalogFromAFileAndFromAnIndex) {
  const std::string one = Safetensors(
      "one.safetensors",
      R"({"a": {"dtype": "BF16", "shape": [64, 32], "data_offsets": [0, 4096]},
          "__metadata__": {"format": "pt"}})",
      4096);
  Safetensors(
      "two.safetensors",
      R"({"b": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}})", 32);
  const std::string index = Write(
      "model.safetensors.index.json",
      R"({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})");
  ASSERT_EQ(PlanOf("--catalog=" + one, {"--json"}), kExitOk) << err_.str();
  EXPECT_EQ(Json::parse(out_.str())["total_bytes"], 4096);
  ASSERT_EQ(PlanOf("--catalog=" + index, {"--json"}), kExitOk) << err_.str();
  EXPECT_EQ(Json::parse(out_.str())["total_bytes"], 4128);
  EXPECT_EQ(Json::parse(out_.str())["num_tensors"], 2);
}

TEST_F(PlanTest, TheCopiesOfAWorkerOnDemand) {
  ASSERT_EQ(PlanOf("--model=qwen2.5-0.5b", {"--worker=3:1"}), kExitOk);
  EXPECT_THAT(out_.str(), HasSubstr("worker 3:1 on inference-0000: "));
  EXPECT_THAT(out_.str(), HasSubstr("model.layers.23.mlp.down_proj.weight"));
  ASSERT_EQ(PlanOf("--model=qwen2.5-0.5b", {"--worker=3:1", "--json"}),
            kExitOk);
  const Json worker = Json::parse(out_.str())["workers"][0];
  EXPECT_EQ(worker["tp"], 1);
  EXPECT_GT(worker["copies"].size(), 290u);
  EXPECT_TRUE(worker["copies"][0]["from_node"].is_string());
  EXPECT_EQ(PlanOf("--model=qwen2.5-0.5b", {"--worker=8:0"}), kExitError);
  EXPECT_THAT(err_.str(), HasSubstr("INVALID_COUNT: there is no worker 8:0"));
}

TEST_F(PlanTest, BadCatalogsNameTheParameter) {
  const struct {
    const char* header;
    const char* reason;
  } kCases[] = {
      {R"({"w": {"dtype": "BF16", "shape": [2147483649], "data_offsets": [0, 4294967298]}})",
       "DIMENSION_TOO_LARGE"},
      {R"({"w": {"dtype": "F64", "shape": [2147483648, 2147483648], "data_offsets": [0, 8]}})",
       "BYTES_OVERFLOW"},
      {R"({"w": {"dtype": "F7", "shape": [2], "data_offsets": [0, 4]}})",
       "UNKNOWN_DTYPE"},
      {R"({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [2, 6]}})",
       "INVALID_SAFETENSORS"},
      {R"({"w": {"dtype": "BF16", "shape": [1,1,1,1,1,1,1,1,1], "data_offsets": [0, 2]}})",
       "INVALID_PARAMETER"},
  };
  for (const auto& c : kCases) {
    const std::string path = Safetensors("bad.safetensors", c.header);
    EXPECT_EQ(PlanOf("--catalog=" + path), kExitError);
    EXPECT_THAT(err_.str(),
                AllOf(StartsWith(std::string("weightsyncctl: ") + c.reason),
                      HasSubstr("'w'")));
  }
  EXPECT_EQ(PlanOf("--catalog=/nowhere/x.safetensors"), kExitNotFound);
  EXPECT_THAT(err_.str(), HasSubstr("FILE_UNKNOWN"));
}

TEST_F(PlanTest, BadCatalogFilesAreNamed) {
  const std::string w =
      R"({"w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}})";
  const std::string good = Safetensors("good.safetensors", w, 8);
  const std::string folder = good.substr(0, good.rfind('/'));
  const auto index = [&](const std::string& text) {
    return Write("odd.index.json", text);
  };
  const struct {
    std::string path;
    std::vector<std::string> words;
  } kCases[] = {
      {Write("short", "hello"), {"short: ", "shorter than the 8 bytes"}},
      {Write("text", "hello, this is no safetensors"),
       {"text: ", "no safetensors file"}},
      {Safetensors("list.safetensors", "[]"),
       {"list.safetensors: ", "not a JSON object"}},
      {Safetensors("none.safetensors", "{}"),
       {"none.safetensors: ", "no tensor"}},
      {Safetensors("cut.safetensors", w, 7),
       {"cut.safetensors: it is cut short", "8 bytes", "has 7"}},
      {Safetensors("long.safetensors", w, 9),
       {"long.safetensors: it is too long"}},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.path);
    EXPECT_EQ(PlanOf("--catalog=" + c.path), kExitError);
    EXPECT_THAT(err_.str(), StartsWith("weightsyncctl: INVALID_SAFETENSORS: "));
    for (const std::string& word : c.words) {
      EXPECT_THAT(err_.str(), HasSubstr(word));
    }
    EXPECT_EQ(out_.str(), "");
  }
  const struct {
    const char* text;
    const char* words;
  } kIndices[] = {
      {"hello", "odd.index.json: it is not JSON"},
      {R"({"model_type": "llama"})", "odd.index.json: it has no weight_map"},
      {R"({"weight_map": {}})", "odd.index.json: its weight_map is empty"},
      {R"({"weight_map": {"w": 7}})", "odd.index.json: parameter 'w'"},
      {R"({"weight_map": {"w": "../good.safetensors"}})",
       "odd.index.json: parameter 'w'"},
      {R"({"weight_map": {"v": "good.safetensors"}})",
       "good.safetensors: parameter 'w' is not in the index"},
      {R"({"weight_map": {"w": "good.safetensors", "v": "good.safetensors"}})",
       "good.safetensors: parameter 'v' is not in it"},
      {R"({"weight_map": {"w": "cut.safetensors", "v": "good.safetensors"}})",
       "good.safetensors: parameter 'w' is in cut.safetensors, too"},
  };
  for (const auto& c : kIndices) {
    EXPECT_EQ(PlanOf("--catalog=" + index(c.text)), kExitError) << c.text;
    EXPECT_THAT(err_.str(),
                AllOf(HasSubstr("weightsyncctl: "), HasSubstr(c.words)));
  }
  EXPECT_EQ(PlanOf("--catalog=" + index(R"({"weight_map": {"w": "gone"}})")),
            kExitNotFound);
  EXPECT_EQ(PlanOf("--catalog=" + folder), kExitError);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("FILE_UNREADABLE: "),
                                HasSubstr(folder + " is a directory")));
  EXPECT_EQ(Plan({"--config", folder}), kExitError);
  EXPECT_THAT(err_.str(), HasSubstr(folder + " is a directory"));
  EXPECT_EQ(PlanOf("--catalog=" + good), kExitOk) << err_.str();
}

TEST_F(PlanTest, BadOptionsHaveAReasonAndAnExitCode) {
  const struct {
    std::vector<std::string> more;
    const char* reason;
  } kCases[] = {
      {{"--training_sharding=tp"}, "UNKNOWN_SHARDING"},
      {{"--training_gpus=0"}, "INVALID_COUNT"},
      {{"--inference_replicas=-3"}, "INVALID_COUNT"},
      {{"--training_sharding=zero3", "--policy=paired", "--training_gpus=15"},
       "TOO_FEW_TRAINERS"},
      {{"--base_port=65521"}, "PORT_OVERFLOW"},
      {{"--policy=fast"}, "UNKNOWN_POLICY"},
      {{"--link_gbps=-1"}, "INVALID_RATE"},
      {{"--link_gbps=nan"}, "INVALID_RATE"},
      {{"--link_gbps=inf"}, "INVALID_RATE"},
      {{"--link_gbps=1e-300"}, "INVALID_RATE"},
      {{"--link_gbps=1e300"}, "INVALID_RATE"},
      {{"--copy_gbytes_per_second=-2"}, "INVALID_RATE"},
      {{"--bucket_size=16"}, "PLAN_TOO_LARGE"},
      {{"--bucket_size=9223372036854775807"}, "INVALID_BUCKET_BYTES"},
      {{"--weight_chunked_mem_mb=9223372036854775807"}, "INVALID_BUCKET_BYTES"},
      {{"--policy=paired", "--base_port=65535"}, "PORT_OVERFLOW"},
      {{"--base_port=-1"}, "PORT_OVERFLOW"},
      {{"--bucket_size=4"}, "INVALID_BUCKET_BYTES"},
      {{"--model=gpt-5"}, "UNKNOWN_MODEL"},
  };
  for (const auto& c : kCases) {
    EXPECT_EQ(PlanOf("--model=qwen2.5-0.5b", c.more), kExitError) << c.reason;
    EXPECT_THAT(err_.str(),
                StartsWith(std::string("weightsyncctl: ") + c.reason + ": "));
  }
  EXPECT_EQ(Plan({"--training_sharding=dp", "--training_gpus=1",
                  "--inference_replicas=1", "--inference_tp=1"}),
            kExitError);
  EXPECT_THAT(err_.str(), HasSubstr("PLAN_SUBJECT_MISSING"));
  const std::string config = Write("bad.textproto", "training_gpu: 8\n");
  EXPECT_EQ(Plan({"--config", config}), kExitError);
  EXPECT_THAT(err_.str(),
              AllOf(HasSubstr("CONFIG_INVALID"), HasSubstr(".textproto:1:"),
                    HasSubstr("training_gpus")));
  EXPECT_EQ(Plan({"--config", "/nowhere/c"}), kExitNotFound);
}

// Zero means "default" in a message, where it cannot be told from nothing. Who
// writes it means zero.
TEST_F(PlanTest, ZeroIsRefusedByNameWhereverItIsWritten) {
  const std::pair<const char*, const char*> kFields[] = {
      {"bucket_size", "INVALID_BUCKET_BYTES"},
      {"weight_chunked_mem_mb", "INVALID_BUCKET_BYTES"},
      {"base_port", "PORT_OVERFLOW"},
      {"link_gbps", "INVALID_RATE"},
      {"copy_gbytes_per_second", "INVALID_RATE"},
      {"gpus_per_node", "INVALID_COUNT"},
      {"training_pp", "INVALID_COUNT"},
      {"training_tp", "INVALID_COUNT"},
      {"training_ep", "INVALID_COUNT"},
      {"inference_ep", "INVALID_COUNT"},
      {"training_gpus", "INVALID_COUNT"},
      {"inference_replicas", "INVALID_COUNT"},
      {"inference_tp", "INVALID_COUNT"},
  };
  for (const auto& field : kFields) {
    const std::string name = field.first;
    for (const char* value : {"0", "-1"}) {
      SCOPED_TRACE(name + " " + value);
      const auto expect_refused = [&] {
        EXPECT_THAT(err_.str(), StartsWith(std::string("weightsyncctl: ") +
                                           field.second + ": " + name + " "));
      };
      std::vector<std::string> args = {"--model=qwen2.5-0.5b",
                                       "--training_sharding=fsdp",
                                       "--" + name + "=" + value};
      for (const char* needed :
           {"training_gpus", "inference_replicas", "inference_tp"}) {
        if (name != needed) args.push_back(std::string("--") + needed + "=2");
      }
      EXPECT_EQ(Plan(args), kExitError);
      expect_refused();
      std::string config = name + ": " + value + "\n";
      for (const std::string& arg : args) {
        if (arg.compare(2, name.size() + 1, name + "=") == 0) continue;
        const size_t equals = arg.find('=');
        const std::string key = arg.substr(2, equals - 2);
        const std::string text = arg.substr(equals + 1);
        const bool number =
            text.find_first_not_of("0123456789") == std::string::npos;
        config += key + ": " + (number ? text : "\"" + text + "\"") + "\n";
      }
      EXPECT_EQ(Plan({"--config", Write("zero.textproto", config)}),
                kExitError);
      expect_refused();
    }
  }
  // An option stands for what the file says.
  const std::string config = Write("zero.textproto", "bucket_size: 0\n");
  EXPECT_EQ(PlanOf("--model=qwen2.5-0.5b",
                   {"--config", config, "--bucket_size=1048576"}),
            kExitOk)
      << err_.str();
  EXPECT_EQ(PlanOf("--model=qwen2.5-0.5b",
                   {"--config", config, "--weight_chunked_mem_mb=1"}),
            kExitOk)
      << err_.str();
  EXPECT_EQ(PlanOf("--model=qwen2.5-0.5b", {"--policy="}), kExitError);
  EXPECT_THAT(err_.str(), HasSubstr("OPTION_EMPTY: policy is empty"));
}

TEST_F(PlanTest, PortsArePairedsAlone) {
  EXPECT_EQ(
      PlanOf("--model=qwen2.5-0.5b", {"--policy=sharded", "--base_port=65535"}),
      kExitOk)
      << err_.str();
}

TEST_F(PlanTest, AutoSaysWhyAPolicyCannotBeHad) {
  const std::vector<std::string> args = {
      "--model=qwen2.5-0.5b", "--training_sharding=zero3", "--training_gpus=4",
      "--inference_replicas=8", "--inference_tp=1"};
  ASSERT_EQ(Plan(args), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), StartsWith("SHARDED: "));
  EXPECT_THAT(out_.str(), HasSubstr("PAIRED cannot be had (TOO_FEW_TRAINERS): "
                                    "training_gpus is 4; "));
  const Json json = PlanJson(args);
  EXPECT_EQ(json["policies"][1]["reason"], "TOO_FEW_TRAINERS");
}

TEST_F(PlanTest, ErrorsAreJsonUnderJson) {
  const struct {
    std::vector<std::string> args;
    int exit;
    const char* code;
    const char* reason;
  } kCases[] = {
      {{"--training_gpus=2", "--json"},
       kExitError,
       "INVALID_ARGUMENT",
       "PLAN_SUBJECT_MISSING"},
      {{"--json", "--config=/nowhere"},
       kExitNotFound,
       "NOT_FOUND",
       "FILE_UNKNOWN"},
      {{"--json", "--training_gpus=many"},
       kExitUsage,
       "INVALID_ARGUMENT",
       "USAGE"},
      {{"--json", "--gpus=2"}, kExitUsage, "INVALID_ARGUMENT", "USAGE"},
      {{"--gpus=2", "--json"}, kExitUsage, "INVALID_ARGUMENT", "USAGE"},
      {{"--json", "--training_gpus"}, kExitUsage, "INVALID_ARGUMENT", "USAGE"},
      {{"--json", "\xff\xfe"}, kExitUsage, "INVALID_ARGUMENT", "USAGE"},
      {{"--json", "--registered=m", "--timeout=100ms"},
       kExitUnreachable,
       "UNAVAILABLE",
       "DAEMON_UNREACHABLE"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.args.back());
    EXPECT_EQ(Plan(c.args), c.exit);
    const Json error = Error();
    EXPECT_EQ(error["code"], c.code);
    EXPECT_EQ(error["reason"], c.reason);
    EXPECT_FALSE(error["message"].get<std::string>().empty());
  }
  EXPECT_EQ(PlanOf("--model=qwen2.5-0.5b", {"--bucket_size=16", "--json"}),
            kExitError);
  EXPECT_EQ(Error()["code"], "RESOURCE_EXHAUSTED");
}

TEST_F(PlanTest, AWrongCommandLineShowsTheHelp) {
  for (const std::vector<std::string>& args :
       std::vector<std::vector<std::string>>{
           {"qwen2.5-0.5b"},
           {"--training_gpus=many"},
           {"--training_gpus=99999999999"},
           {"--link_gbps=fast"},
           {"--worker=1"},
           {"--config=/dev/null", "--config=/dev/null"},
           {"--model=qwen2.5-0.5b", "--catalog=x.safetensors"},
           {"--registered=m", "--training_gpus=2"},
           {"--registered=m/3"}}) {
    EXPECT_EQ(Plan(args), kExitUsage) << args[0];
    EXPECT_THAT(err_.str(), HasSubstr(CommandHelp("plan")));
  }
  // Not an option of the others.
  Screen screen;
  screen.out = &out_;
  screen.err = &err_;
  EXPECT_EQ(ctl::Run({"status", "--training_gpus=2"}, "127.0.0.1:1", screen),
            kExitUsage);
}

TEST_F(PlanTest, LargeModelsNeedTheirParallelismDescribed) {
  const std::vector<std::string> deepseek = {
      "--model=deepseek-v3", "--training_sharding=fsdp",
      "--training_gpus=256", "--inference_replicas=4",
      "--inference_tp=8",    "--policy=sharded"};
  EXPECT_EQ(Plan(deepseek), kExitError);
  EXPECT_THAT(err_.str(), HasSubstr("PLAN_TOO_LARGE"));
  std::vector<std::string> described = deepseek;
  described.insert(described.end(), {"--training_pp=4", "--training_ep=64"});
  const Json json = PlanJson(described);
  EXPECT_EQ(json["num_tensors"], 45395);
  EXPECT_EQ(json["sender_ranks"].size(), 256u);
}

TEST(RangesTextTest, RunsAreJoined) {
  EXPECT_EQ(RangesText({}), "");
  EXPECT_EQ(RangesText({3}), "3");
  EXPECT_EQ(RangesText({0, 1, 2, 5, 7, 8}), "0-2, 5, 7-8");
}

}  // namespace
}  // namespace ctl
}  // namespace weightsync
