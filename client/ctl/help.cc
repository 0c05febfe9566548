#include "client/ctl/help.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace weightsync {
namespace ctl {
namespace {

struct Command {
  const char* name;
  const char* line;
  const char* text;
};

constexpr Command kCommands[] = {
    {"status", "the cluster at a glance",
     R"(weightsyncctl status [--json]

The cluster, its nodes, models and replicas, and the newest version of each
model with its progress. With --json one object: cluster, nodes, models,
replicas, versions.
)"},
    {"watch", "follow a version as it goes",
     R"(weightsyncctl watch [VERSION] [--json]

Follows a version until it has ended: a progress bar on a terminal, a line for
each step otherwise, an object on a line with --json.

VERSION is models/MODEL/versions/N, or MODEL/N. MODEL alone (or MODEL/latest)
follows the newest version and goes on to the next ones until you stop it or
--timeout has passed; without VERSION that of the only model.

Exit code 5 when the version was aborted.
)"},
    {"models", "what is versioned",
     R"(weightsyncctl models [MODEL] [--json]

All models; or one, with its trainer ranks and parameters.
)"},
    {"versions", "what was published",
     R"(weightsyncctl versions [MODEL | VERSION] [--json]

The versions of all models, or of MODEL, newest first; or one VERSION
(MODEL/N, MODEL/latest) with its phases, ranks, nodes and replicas.
)"},
    {"replicas", "who serves what",
     R"(weightsyncctl replicas [MODEL | REPLICA] [--json]

The replicas of all models, or of MODEL; or one REPLICA (MODEL/NAME, or
models/MODEL/replicas/NAME) with its workers and when it was away.
)"},
    {"nodes", "the daemons",
     R"(weightsyncctl nodes [NODE] [--json]

All nodes, or one with its memory and labels.
)"},
    {"prepare", "make ready for the next update, without moving data",
     R"(weightsyncctl prepare MODEL [--json]

Has groups joined and memory reserved, so that the next update finds all of it
there. Moves no weights; safe to repeat.
)"},
    {"pause", "keep a replica paused",
     R"(weightsyncctl pause REPLICA [--mode abort|drain|keep] [--json]

Keeps the replica paused until `resume`, whatever updates come and go; returns
when its engine has paused.
)"},
    {"resume", "give that up",
     R"(weightsyncctl resume REPLICA [--json]

The engine runs again when nothing else holds it; shows who still does.
)"},
    {"rollback", "go back to an older version and stay there",
     R"(weightsyncctl rollback VERSION [--json]

Installs an older committed VERSION on every replica of its model and holds it:
newer publishes are kept, not applied, until `release`.
)"},
    {"release", "end the hold of a rollback",
     R"(weightsyncctl release MODEL [--json]

Installs the newest committed version and follows new ones again.
)"},
    {"verify", "compare a replica's memory with what the trainers had",
     R"(weightsyncctl verify REPLICA [--json]

Has every worker digest its live memory. Exit code 1 when something differs;
the tensors are named.
)"},
    {"save", "write a version as a checkpoint",
     R"(weightsyncctl save VERSION PATH [--template DIR] [--max_shard_bytes N]
                   [--overwrite] [--json]
weightsyncctl save MODEL N PATH [...]

Writes a committed version as Hugging Face safetensors to directory PATH below
the daemons' --checkpoint_root: model.safetensors; or, above --max_shard_bytes,
several files and model.safetensors.index.json. Then what --template (a
directory below it, too) has beside weights. Complete, or not there at all.

  --template DIR        whose config and tokenizer files are copied
  --max_shard_bytes N   of one file (default 5000000000)
  --overwrite           put in place of a checkpoint that is there, at once;
                        all of it goes, its config and tokenizer files too:
                        --template PATH keeps those. A directory with anything
                        that no checkpoint writes is not replaced, and nothing
                        is saved inside of a checkpoint (CHECKPOINT_PATH_TAKEN)
)"},
    {"load", "publish the weights of a checkpoint",
     R"(weightsyncctl load MODEL PATH [--version N] [--pause_mode abort|drain|keep]
                   [--json]

Reads the safetensors at PATH (a directory or a file below --checkpoint_root)
into the nodes of MODEL's workers and installs them as a new version; returns
when it is served. Needs no trainer.

  --version N       above every one before (default: the next)
  --pause_mode M    what engines do with their requests (default drain)
)"},
    {"drain", "take a node out",
     R"(weightsyncctl drain NODE [--undo] [--json]

Its replicas finish what they do and get no more updates, it takes no new ones,
and its store is no holder any more; --undo takes that back.
)"},
    {"delete", "forget a version or a replica",
     R"(weightsyncctl delete VERSION | REPLICA [--json]

Forgets a version that nobody serves and frees its bytes, or a replica that is
gone. MODEL/3 is a version, MODEL/NAME a replica.
)"},
    {"remove", "take a model (an adapter) out of every engine",
     R"(weightsyncctl remove MODEL [--json]

Every replica of MODEL pauses, drops it and goes on without it; its versions are
forgotten and their bytes freed. The next publish brings it back, with the
number after the highest. Only where all replicas registered it as removable.
)"},
    {"adopt", "go on after the journal was lost",
     R"(weightsyncctl adopt [CLUSTER] [--json]

After JOURNAL_LOST (`status` shows it and ends with 1): this coordinator takes
the word of the nodes for what there is. CLUSTER, when nodes of several came.
)"},
    {"plan", "who would send what to whom, and what it would cost",
     R"(weightsyncctl plan [--config FILE] [--model NAME | --catalog FILE]
                   --training_sharding S --training_gpus T
                   --inference_replicas R --inference_tp P
                   [--policy X] [--bucket_size B] [--base_port P]
                   [--link_gbps G] [--worker R:T] [--json]
weightsyncctl plan --registered MODEL [--policy X] [--json]

Plans an update of a cluster that need not exist; asks no daemon and moves
nothing. With --registered, the plan of a model as it would run now, by the
daemon at --address.

  --config FILE             a weightsync.v1.PlanSpec in text format; options
                            override it
  --model NAME              a model that weightsync knows: qwen2.5-0.5b,
                            llama-3.1-8b, llama-3.1-70b, qwen3-30b-a3b,
                            deepseek-v3
  --catalog FILE            a .safetensors file, or a model's .index.json
  --training_sharding S     dp, fsdp or zero3
  --training_gpus T         trainer ranks
  --inference_replicas R, --inference_tp P
                            engines, and GPUs of each
  --policy X                auto (the default: the cheapest that can be had),
                            paired, broadcast or sharded
  --bucket_size B           bytes (default 256 MiB); or
                            --weight_chunked_mem_mb in MiB
  --base_port P             of the first pair; ports are shown with PAIRED
  --link_gbps G             of each node's link, in Gbit/s (default 100;
                            0.001 to 1000000)
  --copy_gbytes_per_second C
                            of a node's memory (default 10; the same range)
  --gpus_per_node N         on both sides (default 8)
  --training_pp N, --training_tp N, --training_ep N, --inference_ep N
                            pipeline, tensor and expert parallelism
                            (default 1)
  --worker R:T              lists every copy of that worker; may be repeated
)"},
    {"names", "what rules make of a trainer's names",
     R"(weightsyncctl names TRAINER ENGINE [--rules RULES.json] [--json]

Shows old and new name of every tensor of TRAINER, and what is left over or
differs between it and ENGINE. Each is a .safetensors file, a model's
.index.json, models/MODEL (what its trainers registered), or
models/MODEL/replicas/NAME (what its workers take). Exit code 1 when something
is left over or differs.

RULES.json is a list of rules, applied in their order, each to what the one
before it left; patterns are RE2, \1 to \9 are their groups:

  [{"rename": ["^transformer\.h\.", "model.layers."]},
   {"drop": "inv_freq$"},
   {"split": {"pattern": "qkv_proj", "names": ["q_proj", "k_proj", "v_proj"],
              "sizes": [4096, 1024, 1024]}},
   {"split_qkv": {"pattern": "qkv_proj", "heads": 32, "kv_heads": 8,
                  "head_dim": 128, "interleaved": true}},
   {"split_gate_up": "gate_up_proj"},
   {"fuse": {"pattern": "(gate|up)_proj", "parts": ["gate", "up"],
             "name": "gate_up_proj", "sizes": [8, 8]}}]
)"},
    {"help", "this, or help about a command", "weightsyncctl help [COMMAND]\n"},
};

// Letters to be put in, left out or changed to make one of the other.
size_t Differences(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({changed, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string GeneralHelp() {
  std::string out =
      R"(weightsyncctl: look at a weightsync cluster.

usage: weightsyncctl COMMAND [ARGUMENT] [--address ADDRESS] [--timeout TIME]
                     [--json]

)";
  for (const Command& command : kCommands) {
    absl::StrAppend(&out, "  ", command.name,
                    std::string(10 - std::string(command.name).size(), ' '),
                    command.line, "\n");
  }
  absl::StrAppend(&out, R"(
  --address ADDRESS  a daemon, any of the cluster: host:port, unix:/path or
                     /path. Default: $WEIGHTSYNC_ADDRESS, else the daemon of
                     this machine (/run/weightsync/weightsyncd.sock, else
                     127.0.0.1:7670).
  --timeout TIME     give up after it: 500ms, 10s, 2m. Default: 10s; pause,
                     resume, rollback, release, remove and verify: 2m; save and
                     load: 10m; watch: never.
  --json             protobuf JSON, for programs; errors are one object on
                     stderr: {"code", "reason", "message"}

exit codes: 0 ok, 1 error, 2 usage, 3 unreachable, 4 not found, 5 the watched
version was aborted
)");
  return out;
}

const char kHelpHint[] = "`weightsyncctl help` lists what there is.\n";

std::string NoSuchCommand(absl::string_view command) {
  const Command* nearest = nullptr;
  size_t least = 3;  // more differences are another word
  for (const Command& known : kCommands) {
    const size_t differs =
        command.size() > 1 && absl::StartsWith(known.name, command)
            ? 1
            : Differences(known.name, command);
    if (differs < std::min(least, command.size())) {
      least = differs;
      nearest = &known;
    }
  }
  return absl::StrCat(
      "no such command: ", command,
      nearest == nullptr ? ""
                         : absl::StrCat("; did you mean ", nearest->name, "?"));
}

std::string CommandHelp(absl::string_view name) {
  for (const Command& command : kCommands) {
    if (name == command.name) return command.text;
  }
  return "";
}

}  // namespace ctl
}  // namespace weightsync
