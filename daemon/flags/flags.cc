#include "daemon/flags/flags.h"

#include <gflags/gflags.h>
#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <iterator>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/status.h"

// Who and where.
DEFINE_string(node, "",
              "Name of this node, unique in the cluster: 1 to 63 of "
              "[a-z0-9._-]. Empty: the "
              "host's name in lower case.");
DEFINE_string(
    listen, "127.0.0.1:7670",
    "TCP addresses to serve at, comma-separated or by repeating the flag: "
    "\"host:port\" with a numeric host or localhost; port 0 takes a free one "
    "(see "
    "--ready_file). Empty: none. An address that other machines can reach "
    "needs "
    "--insecure.");
DEFINE_string(
    http_address, "",
    "Address for pages over plain HTTP: /metrics for Prometheus, /healthz for "
    "probes; as one of --listen. Empty: none.");
DEFINE_string(
    unix_socket, "",
    "Path of the unix socket to serve at; descriptors of shared memory are "
    "handed over "
    "at PATH.fd. Empty: /run/weightsync/weightsyncd.sock for root; for others "
    "$XDG_RUNTIME_DIR/weightsync/weightsyncd.sock, or "
    "/tmp/weightsync-UID/weightsyncd.sock where XDG_RUNTIME_DIR is not set. "
    "The "
    "directory is made when it is missing.");
DEFINE_bool(
    insecure, false,
    "Serve, without TLS, at addresses that other machines can reach (--listen, "
    "--data_address, --http_address): whoever reaches the first two can read "
    "and replace weights.");
DEFINE_string(coordinator_address, "",
              "The daemon that coordinates, \"host:port\" or \"unix:PATH\". "
              "Empty: this daemon "
              "coordinates itself.");
DEFINE_string(
    data_address, "127.0.0.1",
    "Address of this machine to which other nodes send weights: a numeric IP. "
    "Needed where --coordinator_address is another machine.");
DEFINE_string(data_port_range, "",
              "Ports for the traffic of --data_address, \"FIRST-LAST\". Empty: "
              "the kernel "
              "chooses.");
DEFINE_string(
    group, "tcp",
    "What the bytes between nodes go over: tcp, or nccl (from GPU to GPU, by a "
    "child process that has the GPU; from and to host memory, or, with "
    "--store=device, memory of the GPUs), or auto: NCCL between nodes that "
    "can, TCP between others, and the log says which "
    "and why. The same on all nodes.");
DEFINE_string(
    memory, "host",
    "Where trainers may have their tensors: host, or cuda (in host memory and "
    "on GPUs of this node, read by CUDA IPC by a child process for each GPU).");
DEFINE_string(
    device_uuid, "",
    "With --memory=cuda, --group=nccl or auto: GPUs, comma-separated, as "
    "nvidia-smi -L names them. NCCL uses the first. Empty: all that this "
    "process sees; --group=nccl then wants that to be one.");
DEFINE_int32(gpu_slots, 3,
             "With --memory=cuda: how many staging slots of --bucket_bytes are "
             "taken on each GPU that is used; 1 to 64.");
DEFINE_string(
    store, "host",
    "Where weights wait to be put in place: host, or device (with "
    "--memory=cuda: in memory of the GPUs, where all who need them there can "
    "reach it; it ends with a GPU's child process).");
DEFINE_int64(device_store_bytes, 0,
             "With --store=device: bytes of each GPU's memory that weights may "
             "take, all models together. 0: what is free when they come.");
DEFINE_int32(nccl_max_ctas, 4,
             "With --group=nccl or auto: how many of the GPU's SMs an "
             "operation may take from those who compute; 1 to 32.");
DEFINE_string(
    nccl_cta_policy, "efficiency",
    "With --group=nccl or auto: how NCCL chooses within --nccl_max_ctas: "
    "efficiency (few SMs, where they suffice), default (what is quickest), or "
    "zero (copy engines, where NCCL can).");
DEFINE_string(
    labels, "",
    "What the topology knows of this node, comma-separated or by repeating the "
    "flag: "
    "zone=a,rack=r7. Nodes with equal labels are neighbours in a chain.");

// What is kept where.
DEFINE_string(
    state_dir, "",
    "Directory of the journal and of this node's identity; made when missing. "
    "Empty: "
    "/var/lib/weightsync for root; for others $XDG_STATE_HOME/weightsync, or "
    "$HOME/.local/state/weightsync where that is not set.");
DEFINE_string(ready_file, "",
              "Written (to a temporary name, then renamed) as soon as this "
              "daemon serves, with its "
              "addresses as JSON; removed when it ends. Empty: none.");
DEFINE_int64(store_budget_bytes, 0,
             "Bytes of shared memory that received and outgoing weights may "
             "take, all models "
             "together. 0: half of the memory that is available at the start.");
DEFINE_int64(bucket_bytes, int64_t{256} << 20,
             "Coordinator: up to how many bytes of tensors are stored, "
             "verified and sent again "
             "as one.");
DEFINE_int32(keep_updates, 2,
             "How many committed updates of a model the store keeps while "
             "there is room; at "
             "least 1.");
DEFINE_int32(stream_slots, 3,
             "Coordinator: through how many slots of a bucket each flow of a "
             "STREAM or IN_PLACE update passes on each of its nodes.");
DEFINE_string(
    on_isolation, "KEEP_SERVING",
    "What replicas of this node do when the coordinator has been away for "
    "--max_staleness: KEEP_SERVING or PAUSE.");
DEFINE_string(checkpoint_root, "",
              "Directory below which checkpoints are written and read "
              "(weightsyncctl save and load, --update=disk); on a file system "
              "that all nodes see, where several take part. Empty: none.");
DEFINE_string(
    update, "network",
    "Coordinator: how updates travel that do not say it themselves: network; "
    "disk (a checkpoint below --checkpoint_root); or network_or_disk: disk for "
    "an update whose groups cannot be made.");
DEFINE_int32(checkpoints_kept, 2,
             "Coordinator: of the checkpoints by which updates of a model came "
             "(--update=disk), how many stay, the newest. 0: all.");
DEFINE_int32(
    copy_threads, 0,
    "Threads that copy host memory. 0: one for each processor, at most 8.");

// How long to wait. Written as 500ms, 15s, 2m.
#define DEFINE_duration(name, value, help) DEFINE_string(name, value, help)
DEFINE_duration(gather_timeout, "60s",
                "Coordinator: from the first rank's publish until all ranks "
                "have been copied out.");
DEFINE_duration(prepare_timeout, "30s",
                "Coordinator: for nodes to reserve memory and join groups.");
DEFINE_duration(progress_timeout, "15s",
                "Coordinator: a receiving node for which nothing moves this "
                "long fails the update "
                "or is left out.");
DEFINE_duration(pause_timeout, "60s", "Coordinator: for a replica to pause.");
DEFINE_duration(
    apply_timeout, "120s",
    "Coordinator: for a worker to copy an update into its live memory.");
DEFINE_duration(resume_timeout, "30s",
                "Coordinator: for a replica to generate again.");
DEFINE_duration(publish_timeout, "120s",
                "How long PublishVersion waits for missing ranks or for the "
                "update before it, at "
                "most.");
DEFINE_duration(checkpoint_timeout, "10m",
                "Coordinator: for the nodes of the trainers to write the "
                "checkpoint of an update that goes by way of disk; reading it "
                "is watched by --progress_timeout from then on.");
DEFINE_duration(
    barrier_timeout, "30s",
    "Coordinator: a replica that is paused and hears of no commit for this "
    "long, because its coordinator is away, serves the old weights again (when "
    "all of its workers are on one node).");
DEFINE_duration(
    peer_timeout, "10s",
    "A node that sends weights here, or takes them from here, and of which "
    "nothing was heard for this long while they move is given up as a "
    "neighbour.");
DEFINE_duration(
    handshake_timeout, "5s",
    "Whoever connects to --data_address and has not said who it is within this "
    "time is sent away.");
DEFINE_duration(operation_timeout, "10m",
                "Coordinator: how long a pause, resume, rollback, release, "
                "removal or verification that somebody asked for waits at "
                "most.");
DEFINE_duration(heartbeat_interval, "1s",
                "How often clients and nodes shall say that they live.");
DEFINE_duration(
    heartbeat_timeout, "5s",
    "A client or node that has said nothing for this long is lost.");
DEFINE_duration(node_reconnect_grace, "5s",
                "Coordinator: how long a node whose stream broke may take to "
                "come back with "
                "all that it holds.");
DEFINE_duration(recovery_timeout, "30s",
                "Coordinator: after a restart, how long a committed update "
                "waits for the nodes "
                "of its replicas.");
DEFINE_duration(max_staleness, "10m",
                "How long replicas serve without a coordinator before "
                "--on_isolation says what becomes of them, and before the "
                "coordinator flags them: STALE_REPLICA.");
DEFINE_duration(
    registration_timeout, "15s",
    "How long the registration of a client waits for the coordinator.");
DEFINE_duration(
    call_timeout, "10s",
    "Deadline of calls that only look, for callers that give none.");
DEFINE_duration(wait_timeout, "10m", "How long WaitVersion waits at most.");
DEFINE_duration(
    device_timeout, "30s",
    "With --memory=cuda, --group=nccl or auto: a child process that has not "
    "done what it was asked for on its GPU for this long is killed and started "
    "again.");
DEFINE_duration(
    shutdown_timeout, "3s",
    "At SIGTERM: how long clients have to read how their streams ended.");

// What is tried again.
DEFINE_int32(apply_attempts, 3,
             "Coordinator: applies of one update to one worker before its "
             "replica is fenced.");
DEFINE_int32(
    max_reconfigurations, 3,
    "Coordinator: rebuilds of one update's groups before it is aborted.");

DECLARE_bool(help);
DECLARE_bool(helpshort);
DECLARE_bool(logtostderr);

namespace weightsync {
namespace daemon {
namespace {

constexpr char kUsage[] =
    "moves model weights from trainers to inference replicas; one per node.\n"
    "\n"
    "  weightsyncd                                          one machine: its "
    "own coordinator\n"
    "  weightsyncd --coordinator_address=HOST:PORT          another node of a "
    "cluster\n"
    "\n"
    "Flags, with their defaults; --helpfull shows those of the libraries too.";

// gflags keeps the last of a repeated flag: joins the values of these with
// commas instead.
constexpr absl::string_view kRepeated[] = {"listen", "labels", "device_uuid"};

std::vector<std::string> JoinRepeated(const std::vector<std::string>& args) {
  std::vector<std::string> out;
  std::vector<std::vector<std::string>> values(std::size(kRepeated));
  for (size_t i = 0; i < args.size(); ++i) {
    bool taken = false;
    for (size_t k = 0; k < std::size(kRepeated) && !taken; ++k) {
      absl::string_view arg = args[i];
      if (!absl::ConsumePrefix(&arg, "--") && !absl::ConsumePrefix(&arg, "-"))
        continue;
      if (!absl::ConsumePrefix(&arg, kRepeated[k])) continue;
      if (arg.empty() && i + 1 < args.size()) {
        values[k].push_back(args[++i]);
        taken = true;
      } else if (absl::ConsumePrefix(&arg, "=")) {
        values[k].push_back(std::string(arg));
        taken = true;
      }
    }
    if (!taken) out.push_back(args[i]);
  }
  // Before whatever is not a flag.
  for (size_t k = 0; k < std::size(kRepeated); ++k) {
    if (values[k].empty()) continue;
    out.insert(out.begin() + 1, absl::StrCat("--", kRepeated[k], "=",
                                             absl::StrJoin(values[k], ",")));
  }
  return out;
}

std::string Environment(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

std::string DefaultNode() {
  char name[HOST_NAME_MAX + 1] = {};
  if (gethostname(name, HOST_NAME_MAX) != 0) return "";
  std::string node = absl::AsciiStrToLower(name);
  for (char& c : node) {
    if (!absl::ascii_isalnum(c) && c != '.' && c != '_' && c != '-') c = '-';
  }
  return node.substr(0, 63);
}

absl::Status FlagError(absl::string_view flag, absl::string_view value,
                       absl::string_view what) {
  return ErrorStatus(absl::StatusCode::kInvalidArgument, "FLAG_INVALID",
                     absl::StrCat("--", flag, "=", value, ": ", what));
}

absl::Status ReadDuration(absl::string_view flag, const std::string& value,
                          absl::Duration* out) {
  if (!absl::ParseDuration(value, out) || *out <= absl::ZeroDuration() ||
      *out == absl::InfiniteDuration()) {
    return FlagError(flag, value,
                     "give a positive time such as 500ms, 15s or 2m");
  }
  return absl::OkStatus();
}

absl::Status ReadDeadlines(Deadlines* out) {
  struct Entry {
    const char* flag;
    const std::string* value;
    absl::Duration* out;
  };
  const Entry entries[] = {
      {"gather_timeout", &FLAGS_gather_timeout, &out->gather},
      {"prepare_timeout", &FLAGS_prepare_timeout, &out->prepare},
      {"progress_timeout", &FLAGS_progress_timeout, &out->progress},
      {"pause_timeout", &FLAGS_pause_timeout, &out->pause},
      {"apply_timeout", &FLAGS_apply_timeout, &out->apply},
      {"resume_timeout", &FLAGS_resume_timeout, &out->resume},
      {"publish_timeout", &FLAGS_publish_timeout, &out->publish},
      {"checkpoint_timeout", &FLAGS_checkpoint_timeout, &out->checkpoint},
      {"barrier_timeout", &FLAGS_barrier_timeout, &out->barrier},
      {"peer_timeout", &FLAGS_peer_timeout, &out->peer},
      {"handshake_timeout", &FLAGS_handshake_timeout, &out->handshake},
      {"operation_timeout", &FLAGS_operation_timeout, &out->operation},
      {"heartbeat_interval", &FLAGS_heartbeat_interval,
       &out->heartbeat_interval},
      {"heartbeat_timeout", &FLAGS_heartbeat_timeout, &out->heartbeat},
      {"node_reconnect_grace", &FLAGS_node_reconnect_grace,
       &out->node_reconnect_grace},
      {"recovery_timeout", &FLAGS_recovery_timeout, &out->recovery},
      {"max_staleness", &FLAGS_max_staleness, &out->max_staleness},
      {"registration_timeout", &FLAGS_registration_timeout, &out->registration},
      {"call_timeout", &FLAGS_call_timeout, &out->call},
      {"wait_timeout", &FLAGS_wait_timeout, &out->wait},
      {"device_timeout", &FLAGS_device_timeout, &out->device},
      {"shutdown_timeout", &FLAGS_shutdown_timeout, &out->shutdown},
  };
  for (const Entry& entry : entries) {
    absl::Status status = ReadDuration(entry.flag, *entry.value, entry.out);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ReadPortRange(Options* options) {
  if (FLAGS_data_port_range.empty()) return absl::OkStatus();
  const std::vector<std::string> ends =
      absl::StrSplit(FLAGS_data_port_range, '-');
  if (ends.size() != 2 ||
      !absl::SimpleAtoi(ends[0], &options->data_port_first) ||
      !absl::SimpleAtoi(ends[1], &options->data_port_last) ||
      options->data_port_first < 1 || options->data_port_last > 65535 ||
      options->data_port_first > options->data_port_last) {
    return FlagError("data_port_range", FLAGS_data_port_range,
                     "give FIRST-LAST, ports from 1 to 65535");
  }
  return absl::OkStatus();
}

absl::Status ReadLabels(Options* options) {
  for (absl::string_view label :
       absl::StrSplit(FLAGS_labels, ',', absl::SkipWhitespace())) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(
        absl::StripAsciiWhitespace(label), absl::MaxSplits('=', 1));
    if (parts.first.empty() || parts.second.empty()) {
      return FlagError("labels", FLAGS_labels, "give KEY=VALUE,KEY=VALUE");
    }
    options->labels[parts.first] = parts.second;
  }
  return absl::OkStatus();
}

}  // namespace

std::string DefaultUnixSocket() {
  if (geteuid() == 0) return "/run/weightsync/weightsyncd.sock";
  const std::string runtime = Environment("XDG_RUNTIME_DIR");
  if (!runtime.empty())
    return absl::StrCat(runtime, "/weightsync/weightsyncd.sock");
  return absl::StrCat("/tmp/weightsync-", geteuid(), "/weightsyncd.sock");
}

std::string DefaultStateDir() {
  if (geteuid() == 0) return "/var/lib/weightsync";
  const std::string state = Environment("XDG_STATE_HOME");
  if (!state.empty()) return absl::StrCat(state, "/weightsync");
  return absl::StrCat(Environment("HOME"), "/.local/state/weightsync");
}

void ParseCommandLine(int* argc, char*** argv) {
  gflags::SetUsageMessage(kUsage);
  gflags::SetVersionString(kSoftwareVersion);
  FLAGS_logtostderr = true;
  // gflags points into what it is given; it lives as long as the process.
  auto* args = new std::vector<std::string>(
      JoinRepeated(std::vector<std::string>(*argv, *argv + *argc)));
  auto* pointers = new std::vector<char*>;
  for (std::string& arg : *args) pointers->push_back(&arg[0]);
  pointers->push_back(nullptr);
  *argc = static_cast<int>(args->size());
  *argv = pointers->data();
  gflags::ParseCommandLineNonHelpFlags(argc, argv, true);
  if (FLAGS_help || FLAGS_helpshort) {
    // Those of this file only, and with success: it was asked for.
    gflags::ShowUsageWithFlagsRestrict("weightsyncd", "daemon/flags/flags.cc");
    exit(0);
  }
  gflags::HandleCommandLineHelpFlags();
  if (*argc > 1) {
    std::cerr << "weightsyncd: takes no arguments but flags, and \""
              << (*argv)[1] << "\" is none; see --help\n";
    exit(1);
  }
}

absl::StatusOr<Options> OptionsFromFlags() {
  Options options;
  options.node = FLAGS_node.empty() ? DefaultNode() : FLAGS_node;
  for (absl::string_view address :
       absl::StrSplit(FLAGS_listen, ',', absl::SkipWhitespace())) {
    options.listen.push_back(std::string(absl::StripAsciiWhitespace(address)));
  }
  options.unix_socket =
      FLAGS_unix_socket.empty() ? DefaultUnixSocket() : FLAGS_unix_socket;
  options.http_address = FLAGS_http_address;
  options.insecure = FLAGS_insecure;
  options.coordinator_address = FLAGS_coordinator_address;
  options.data_address = FLAGS_data_address;
  absl::Status status = ReadPortRange(&options);
  if (!status.ok()) return status;
  if (FLAGS_group != "tcp" && FLAGS_group != "nccl" && FLAGS_group != "auto")
    return FlagError("group", FLAGS_group, "give tcp, nccl or auto");
  options.nccl = FLAGS_group != "tcp";
  options.nccl_optional = FLAGS_group == "auto";
  if (FLAGS_memory != "host" && FLAGS_memory != "cuda")
    return FlagError("memory", FLAGS_memory, "give host or cuda");
  options.cuda_memory = FLAGS_memory == "cuda";
  for (absl::string_view uuid :
       absl::StrSplit(FLAGS_device_uuid, ',', absl::SkipWhitespace())) {
    options.device_uuids.emplace_back(absl::StripAsciiWhitespace(uuid));
  }
  if (FLAGS_gpu_slots < 1 || FLAGS_gpu_slots > 64) {
    return FlagError("gpu_slots", absl::StrCat(FLAGS_gpu_slots),
                     "give 1 to 64");
  }
  options.gpu_slots = FLAGS_gpu_slots;
  if (FLAGS_store != "host" && FLAGS_store != "device")
    return FlagError("store", FLAGS_store, "give host or device");
  options.device_store = FLAGS_store == "device";
  if (options.device_store && !options.cuda_memory) {
    return FlagError("store", FLAGS_store,
                     "it needs --memory=cuda, which gives the daemon its GPUs");
  }
  if (FLAGS_device_store_bytes < 0 ||
      (FLAGS_device_store_bytes > 0 && !options.device_store)) {
    return FlagError("device_store_bytes",
                     absl::StrCat(FLAGS_device_store_bytes),
                     "give a number of bytes, with --store=device, or 0 for "
                     "what the GPU has free");
  }
  options.device_store_bytes = FLAGS_device_store_bytes;
  if (FLAGS_nccl_max_ctas < 1 || FLAGS_nccl_max_ctas > 32) {
    return FlagError("nccl_max_ctas", absl::StrCat(FLAGS_nccl_max_ctas),
                     "give 1 to 32");
  }
  options.nccl_max_ctas = FLAGS_nccl_max_ctas;
  // As nccl.h numbers them: NCCL_CTA_POLICY_*.
  constexpr absl::string_view kPolicies[] = {"default", "efficiency", "zero"};
  const auto policy = std::find(std::begin(kPolicies), std::end(kPolicies),
                                absl::AsciiStrToLower(FLAGS_nccl_cta_policy));
  if (policy == std::end(kPolicies)) {
    return FlagError("nccl_cta_policy", FLAGS_nccl_cta_policy,
                     "give efficiency, default or zero");
  }
  options.nccl_cta_policy = static_cast<int>(policy - std::begin(kPolicies));
  options.state_dir =
      FLAGS_state_dir.empty() ? DefaultStateDir() : FLAGS_state_dir;
  options.ready_file = FLAGS_ready_file;
  if (FLAGS_store_budget_bytes < 0) {
    return FlagError("store_budget_bytes",
                     absl::StrCat(FLAGS_store_budget_bytes),
                     "give a number of bytes, or 0 for half of the memory");
  }
  options.store_budget_bytes = FLAGS_store_budget_bytes;
  options.bucket_bytes = FLAGS_bucket_bytes;
  if (FLAGS_keep_updates < 1) {
    return FlagError("keep_updates", absl::StrCat(FLAGS_keep_updates),
                     "keep at least 1");
  }
  options.keep_updates = FLAGS_keep_updates;
  if (FLAGS_stream_slots < 1 || FLAGS_stream_slots > 64) {
    return FlagError("stream_slots", absl::StrCat(FLAGS_stream_slots),
                     "give 1 to 64");
  }
  options.stream_slots = FLAGS_stream_slots;
  if (FLAGS_on_isolation != "KEEP_SERVING" && FLAGS_on_isolation != "PAUSE") {
    return FlagError("on_isolation", FLAGS_on_isolation,
                     "give KEEP_SERVING or PAUSE");
  }
  options.pause_on_isolation = FLAGS_on_isolation == "PAUSE";
  options.checkpoint_root = FLAGS_checkpoint_root;
  if (FLAGS_update == "network") {
    options.update = Options::Update::kNetwork;
  } else if (FLAGS_update == "disk") {
    options.update = Options::Update::kDisk;
  } else if (FLAGS_update == "network_or_disk") {
    options.update = Options::Update::kNetworkOrDisk;
  } else {
    return FlagError("update", FLAGS_update,
                     "give network, disk or network_or_disk");
  }
  if (FLAGS_checkpoints_kept < 0) {
    return FlagError("checkpoints_kept", absl::StrCat(FLAGS_checkpoints_kept),
                     "give a number, or 0 to keep all");
  }
  options.checkpoints_kept = FLAGS_checkpoints_kept;
  if (FLAGS_copy_threads < 0 || FLAGS_copy_threads > 256) {
    return FlagError("copy_threads", absl::StrCat(FLAGS_copy_threads),
                     "give 0 to 256");
  }
  options.copy_threads = FLAGS_copy_threads;
  if (FLAGS_apply_attempts < 1) {
    return FlagError("apply_attempts", absl::StrCat(FLAGS_apply_attempts),
                     "try at least once");
  }
  options.apply_attempts = FLAGS_apply_attempts;
  if (FLAGS_max_reconfigurations < 0) {
    return FlagError("max_reconfigurations",
                     absl::StrCat(FLAGS_max_reconfigurations),
                     "give 0 or more");
  }
  options.max_reconfigurations = FLAGS_max_reconfigurations;
  status = ReadLabels(&options);
  if (!status.ok()) return status;
  status = ReadDeadlines(&options.deadlines);
  if (!status.ok()) return status;
  if (options.deadlines.heartbeat < 2 * options.deadlines.heartbeat_interval) {
    return FlagError("heartbeat_timeout", FLAGS_heartbeat_timeout,
                     absl::StrCat("give at least twice --heartbeat_interval (",
                                  FLAGS_heartbeat_interval, ")"));
  }
  return options;
}

}  // namespace daemon
}  // namespace weightsync
