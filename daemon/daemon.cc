#include "daemon/daemon.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "daemon/http/http_server.h"
#include "daemon/http/metrics.h"
#include "daemon/node/node_journal.h"
#include "daemon/service/admin_service.h"
#include "daemon/service/agent.h"
#include "daemon/service/client_services.h"
#include "daemon/service/coordinator_loop.h"
#include "daemon/service/listen.h"
#include "daemon/service/node_service.h"
#include "daemon/service/process_watcher.h"
#include "daemon/service/validate.h"
#include "glog/logging.h"
#include "grpc/health/v1/health.pb.h"
#include "grpcpp/ext/channelz_service_plugin.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "nlohmann/json.hpp"
#include "proto/status.h"
#include "transport/cuda/agent/agent_channel.h"
#include "transport/cuda/agent/agent_memory.h"
#include "transport/cuda/agent/device_agents.h"
#include "transport/host/copy_pool.h"
#include "transport/host/fd_socket.h"
#include "transport/host/host_memory.h"
#include "transport/host/limits.h"
#include "transport/host/socket_claim.h"
#include "transport/tcp/endpoint.h"

namespace weightsync {
namespace daemon {
namespace {

// Of each end of each edge over NCCL. The same on all nodes of a cluster.
constexpr int64_t kNcclStagingBytes = 16 << 20;
// A connection to the coordinator on which nothing came is asked, and is given
// up when nothing comes for as long again; no sooner than the lease.
constexpr absl::Duration kConnectionPatience = absl::Seconds(5);
constexpr absl::Duration kLongestPatience = absl::Hours(1);
// Of --group=auto, after a communicator that could not be made.
constexpr absl::Duration kNcclRest = absl::Seconds(30);

// Of one message: lists of the parameters of very large models.
constexpr int kMaxMessageBytes = 256 << 20;

// The flags of addresses, for sentences.
constexpr char kListen[] = "listen";
constexpr char kHttpAddress[] = "http_address";
constexpr char kDataAddress[] = "data_address";
constexpr char kClusterFile[] = "/cluster_id";
// The highest term that was followed, with the cluster that it is of.
constexpr char kTermFile[] = "/newest_term";

absl::Status Invalid(absl::string_view reason, absl::string_view message) {
  return ErrorStatus(absl::StatusCode::kInvalidArgument, reason, message);
}

// Of --group=auto.
void SayOverTcp(const absl::Status& why) {
  LOG(INFO) << "bytes go over TCP: " << ErrorReason(why) << ": "
            << why.message();
}

CoordinatorOptions ForCoordinator(const Options& options) {
  const Deadlines& deadlines = options.deadlines;
  CoordinatorOptions coordinator;
  coordinator.coordinator_node = options.node;
  coordinator.software_version = kSoftwareVersion;
  coordinator.gather_timeout = deadlines.gather;
  coordinator.prepare_timeout = deadlines.prepare;
  coordinator.progress_timeout = deadlines.progress;
  coordinator.pause_timeout = deadlines.pause;
  coordinator.apply_timeout = deadlines.apply;
  coordinator.resume_timeout = deadlines.resume;
  coordinator.publish_timeout = deadlines.publish;
  coordinator.barrier_timeout = deadlines.barrier;
  coordinator.operation_timeout = deadlines.operation;
  coordinator.heartbeat_interval = deadlines.heartbeat_interval;
  coordinator.heartbeat_timeout = deadlines.heartbeat;
  coordinator.node_reconnect_grace = deadlines.node_reconnect_grace;
  coordinator.recovery_timeout = deadlines.recovery;
  coordinator.max_staleness = deadlines.max_staleness;
  coordinator.apply_attempts = options.apply_attempts;
  coordinator.max_reconfigurations = options.max_reconfigurations;
  coordinator.bucket_bytes = options.bucket_bytes;
  coordinator.stream_slots = options.stream_slots;
  coordinator.checkpoint_timeout = deadlines.checkpoint;
  coordinator.checkpoints_kept = options.checkpoints_kept;
  switch (options.update) {
    case Options::Update::kNetwork:
      coordinator.transfer_medium = v1::TRANSFER_MEDIUM_NETWORK;
      break;
    case Options::Update::kDisk:
      coordinator.transfer_medium = v1::TRANSFER_MEDIUM_DISK;
      break;
    case Options::Update::kNetworkOrDisk:
      coordinator.transfer_medium = v1::TRANSFER_MEDIUM_NETWORK_OR_DISK;
      break;
  }
  coordinator.random_id = RandomId;
  return coordinator;
}

grpc::ChannelArguments ChannelArguments(absl::Duration heartbeat_timeout) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  // A proxy of the environment is for the web.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  // What was cut off without a word is dialled again, and not only used again
  // when TCP sends its next byte, minutes after the way is there again. Each
  // side beats every second: nothing is pinged where all is well.
  const int patience = static_cast<int>(absl::ToInt64Milliseconds(std::min(
      std::max(kConnectionPatience, heartbeat_timeout), kLongestPatience)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, patience);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, patience);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Daemons of one process (tests) do not share a connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return arguments;
}

class DaemonImpl final : public Daemon {
 public:
  explicit DaemonImpl(Options options) : options_(std::move(options)) {}
  ~DaemonImpl() override { Shutdown(); }

  absl::Status Start();

  const Addresses& addresses() const override { return addresses_; }
  std::string cluster_id() const override {
    return coordinator_ == nullptr ? "" : coordinator_->cluster_id();
  }
  void Shutdown() override;

 private:
  absl::Status CheckOptions();
  absl::Status TakePlaces();
  absl::Status StartTransport();
  absl::Status StartDevices();
  absl::Status StartCoordinator();
  absl::Status StartServer();
  absl::Status StartPages();
  absl::Status WriteReadyFile();
  absl::Status Welcomed(const v1::Welcome& welcome);

  Options options_;
  Addresses addresses_;
  std::vector<HostPort> listen_;
  HostPort http_;
  std::string cluster_id_;
  int64_t newest_term_ = 0;
  bool shut_down_ = false;
  bool ready_written_ = false;

  // Destroyed in the opposite order.
  std::unique_ptr<DirectoryClaim> state_;
  std::unique_ptr<transport::SocketClaim> socket_;
  std::unique_ptr<transport::FdServer> descriptors_;
  std::unique_ptr<transport::CopyPool> copies_;
  std::unique_ptr<transport::HostMemory> memory_;
  // Where there are GPUs: of --memory=cuda the second, of --group=nccl the
  // third.
  std::unique_ptr<transport::cuda::DeviceAgents> device_agents_;
  std::unique_ptr<transport::cuda::AgentMemory> device_memory_;
  std::unique_ptr<transport::cuda::AgentChannels> channels_;
  // The GPU whose memory groups may move, where buckets lie there.
  std::string payload_device_;
  std::unique_ptr<transport::tcp::Endpoint> endpoint_;
  std::unique_ptr<ProcessWatcher> processes_;
  std::unique_ptr<CoordinatorLoop> coordinator_;
  std::unique_ptr<NodeJournal> journal_;
  std::unique_ptr<Agent> agent_;
  CoordinatorAccess access_;
  std::unique_ptr<NodeServiceImpl> node_service_;
  std::unique_ptr<AdminServiceImpl> admin_service_;
  std::unique_ptr<TrainerServiceImpl> trainer_service_;
  std::unique_ptr<ReplicaServiceImpl> replica_service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<HttpServer> pages_;
};

absl::Status DaemonImpl::Start() {
  for (absl::Status (DaemonImpl::*step)() :
       {&DaemonImpl::CheckOptions, &DaemonImpl::TakePlaces,
        &DaemonImpl::StartTransport, &DaemonImpl::StartCoordinator,
        &DaemonImpl::StartServer, &DaemonImpl::StartPages,
        &DaemonImpl::WriteReadyFile}) {
    const absl::Status status = (this->*step)();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status DaemonImpl::CheckOptions() {
  if (!IsName(options_.node)) {
    return Invalid(
        "NODE_NAME_INVALID",
        absl::StrCat(
            "node \"", options_.node,
            "\": a name is 1 to 63 of [a-z0-9._-], beginning with a letter or "
            "digit; give one with --node"));
  }
  std::vector<ListenFlag> places;
  const auto take = [&](const char* flag,
                        const std::string& text) -> absl::Status {
    absl::StatusOr<HostPort> address = ParseHostPort(text, flag);
    if (!address.ok()) return address.status();
    places.push_back({flag, *address});
    return CheckReach(*address, options_.insecure, flag);
  };
  for (const std::string& text : options_.listen) {
    const absl::Status taken = take(kListen, text);
    if (!taken.ok()) return taken;
    listen_.push_back(places.back().address);
  }
  if (!options_.http_address.empty()) {
    const absl::Status taken = take(kHttpAddress, options_.http_address);
    if (!taken.ok()) return taken;
    http_ = places.back().address;
  }
  const absl::Status apart = CheckApart(places);
  if (!apart.ok()) return apart;
  const absl::StatusOr<HostPort> data =
      ParseHost(options_.data_address, kDataAddress);
  if (!data.ok()) return data.status();
  if (data->wildcard) {
    return Invalid(
        "ADDRESS_INVALID",
        absl::StrCat(
            "--data_address=", options_.data_address,
            " is no address that another node could send to; name one of this "
            "machine"));
  }
  const absl::Status reach = CheckReach(*data, options_.insecure, kDataAddress);
  if (!reach.ok()) return reach;
  const absl::Status ours = WhyNotListen(*data, kDataAddress);
  if (!ours.ok()) return ours;
  if (!options_.coordinator_address.empty()) {
    const absl::Status status = CheckDialled(options_.coordinator_address);
    if (!status.ok()) return status;
    // It would join, and every update to or from it would fail.
    if (data->loopback && IsElsewhere(options_.coordinator_address)) {
      return Invalid(
          "ADDRESS_INVALID",
          absl::StrCat("--data_address=", options_.data_address,
                       " cannot be reached from other machines, and "
                       "--coordinator_address=",
                       options_.coordinator_address,
                       " is on one: give the address of this machine by which "
                       "the other nodes reach it"));
    }
  }

  const int64_t available = transport::LookAtMemory().available_bytes();
  if (options_.bucket_bytes < kMinBucketBytes ||
      options_.bucket_bytes > available) {
    return Invalid("BUCKET_BYTES_INVALID",
                   absl::StrCat("bucket_bytes is ", options_.bucket_bytes,
                                "; it must be at least ", kMinBucketBytes,
                                " and at most the memory that is available, ",
                                available, " bytes"));
  }
  const int64_t total = transport::LookAtMemory().total_bytes();
  if (options_.store_budget_bytes > total) {
    return Invalid(
        "STORE_BUDGET_INVALID",
        absl::StrCat("store_budget_bytes is ", options_.store_budget_bytes,
                     "; this machine, or the control group of this process, "
                     "has only ",
                     total, " bytes"));
  }
  if (options_.store_budget_bytes == 0)
    options_.store_budget_bytes = available / 2;
  if (options_.copy_threads == 0) {
    options_.copy_threads =
        std::min(8u, std::max(1u, std::thread::hardware_concurrency()));
  }
  return absl::OkStatus();
}

absl::Status DaemonImpl::TakePlaces() {
  absl::Status status = MakeDirectories(options_.state_dir, 0700);
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<DirectoryClaim>> state =
      DirectoryClaim::Take(options_.state_dir);
  if (!state.ok()) return state.status();
  state_ = *std::move(state);
  absl::StatusOr<std::string> cluster =
      ReadSmallFile(options_.state_dir + kClusterFile);
  if (!cluster.ok()) return cluster.status();
  cluster_id_ = std::string(absl::StripAsciiWhitespace(*cluster));
  absl::StatusOr<std::string> term =
      ReadSmallFile(options_.state_dir + kTermFile);
  if (!term.ok()) return term.status();
  const std::vector<std::string> words =
      absl::StrSplit(absl::StripAsciiWhitespace(*term), ' ');
  if (words.size() == 2 && words[0] == cluster_id_ &&
      !absl::SimpleAtoi(words[1], &newest_term_)) {
    newest_term_ = 0;
  }
  absl::StatusOr<std::unique_ptr<NodeJournal>> journal =
      NodeJournal::Open(options_.state_dir);
  if (!journal.ok()) return journal.status();
  journal_ = *std::move(journal);

  const size_t slash = options_.unix_socket.rfind('/');
  if (slash != std::string::npos && slash > 0) {
    status = MakeDirectories(options_.unix_socket.substr(0, slash), 0755);
    if (!status.ok()) return status;
  }
  absl::StatusOr<std::unique_ptr<transport::SocketClaim>> socket =
      transport::SocketClaim::Take(options_.unix_socket);
  if (!socket.ok()) return socket.status();
  socket_ = *std::move(socket);
  return absl::OkStatus();
}

absl::Status DaemonImpl::StartTransport() {
  absl::StatusOr<std::unique_ptr<transport::FdServer>> descriptors =
      transport::FdServer::Start(options_.unix_socket + ".fd", {});
  if (!descriptors.ok()) return descriptors.status();
  descriptors_ = *std::move(descriptors);
  copies_ = std::make_unique<transport::CopyPool>(options_.copy_threads);
  transport::HostMemory::Options memory;
  memory.warm_up_threads = options_.copy_threads;
  memory_ = std::make_unique<transport::HostMemory>(copies_.get(),
                                                    descriptors_.get(), memory);

  transport::tcp::EndpointOptions endpoint;
  // Where it is not known yet, the first group says it.
  if (!options_.coordinator_address.empty()) endpoint.cluster_id = cluster_id_;
  endpoint.bind_host = options_.data_address;
  endpoint.first_port = options_.data_port_first;
  endpoint.last_port = options_.data_port_last;
  endpoint.handshake_deadline = options_.deadlines.handshake;
  endpoint.faults = options_.faults;
  if (options_.nccl || options_.cuda_memory) {
    const absl::Status status = StartDevices();
    if (!status.ok() && !(options_.nccl_optional && !options_.cuda_memory))
      return status;
    if (!status.ok()) SayOverTcp(status);
  }
  if (channels_ != nullptr) endpoint.payload = channels_->Factory();
  endpoint.payload_device = payload_device_;
  endpoint.payload_optional = options_.nccl_optional;
  absl::StatusOr<std::unique_ptr<transport::tcp::Endpoint>> made =
      transport::tcp::Endpoint::Create(endpoint);
  if (!made.ok()) return made.status();
  endpoint_ = *std::move(made);

  absl::StatusOr<std::unique_ptr<ProcessWatcher>> processes =
      ProcessWatcher::Start();
  if (!processes.ok()) return processes.status();
  processes_ = *std::move(processes);
  return absl::OkStatus();
}

absl::Status DaemonImpl::StartDevices() {
  transport::cuda::DeviceAgents::Options devices;
  transport::cuda::DeviceAgent::Options& agent = devices.agent;
  // It lies beside this program, which so needs no CUDA itself.
  char self[4096];
  const ssize_t size = readlink("/proc/self/exe", self, sizeof(self));
  std::string program(self, size > 0 ? static_cast<size_t>(size) : 0);
  program.resize(program.rfind('/') + 1);
  program += "weightsync_device_agent";
  if (access(program.c_str(), X_OK) != 0) {
    return ErrorStatus(
        absl::StatusCode::kFailedPrecondition, "DEVICE_AGENT_MISSING",
        absl::StrCat("--memory=cuda, --group=nccl and auto need ", program,
                     ", which is built where there are CUDA's nvcc and NCCL's "
                     "headers: put it there, or choose --memory=host and "
                     "--group=tcp"));
  }
  agent.command = {program};
  agent.config.slots = options_.cuda_memory ? options_.gpu_slots : 0;
  agent.config.slot_bytes = options_.bucket_bytes;
  agent.config.nccl_max_ctas = options_.nccl_max_ctas;
  agent.config.nccl_cta_policy = options_.nccl_cta_policy;
  agent.config.nccl_staging_bytes = kNcclStagingBytes;
  agent.fd_socket_prefix = options_.unix_socket + ".gpu";
  agent.start_deadline = options_.deadlines.device;
  devices.device_uuids = options_.device_uuids;
  absl::StatusOr<std::unique_ptr<transport::cuda::DeviceAgents>> agents =
      transport::cuda::DeviceAgents::Create(std::move(devices));
  if (!agents.ok()) return agents.status();
  device_agents_ = *std::move(agents);
  if (options_.cuda_memory) {
    transport::cuda::AgentMemory::Options memory;
    memory.timeout = options_.deadlines.device;
    device_memory_ = std::make_unique<transport::cuda::AgentMemory>(
        memory_.get(), device_agents_.get(), options_.gpu_slots,
        options_.bucket_bytes, memory);
  }
  if (!options_.nccl) return absl::OkStatus();
  std::string uuid =
      options_.device_uuids.empty() ? "" : options_.device_uuids[0];
  if (uuid.empty() && options_.nccl_optional) uuid = device_agents_->first();
  const absl::StatusOr<transport::cuda::DeviceAgent*> nccl =
      device_agents_->Get(uuid);
  if (!nccl.ok() && options_.nccl_optional) {
    SayOverTcp(nccl.status());
    return absl::OkStatus();
  }
  if (!nccl.ok()) return nccl.status();
  LOG(INFO) << "bytes go over NCCL, from " << (*nccl)->device_uuid() << " ("
            << (*nccl)->device_name() << ")";
  channels_ = std::make_unique<transport::cuda::AgentChannels>(
      *nccl, kNcclStagingBytes,
      options_.nccl_optional ? kNcclRest : absl::ZeroDuration(),
      device_memory_.get());
  if (options_.device_store) payload_device_ = (*nccl)->device_uuid();
  return absl::OkStatus();
}

absl::Status DaemonImpl::StartCoordinator() {
  if (options_.coordinator_address.empty()) {
    absl::StatusOr<std::unique_ptr<CoordinatorLoop>> coordinator =
        CoordinatorLoop::Start(ForCoordinator(options_), options_.state_dir,
                               options_.fault_point);
    if (!coordinator.ok()) return coordinator.status();
    coordinator_ = *std::move(coordinator);
    // Whom this node followed before, it is its own now.
    cluster_id_ = coordinator_->cluster_id();
    access_.local = coordinator_.get();
    access_.name = "this daemon";
  } else {
    access_.name = options_.coordinator_address;
    access_.remote = grpc::CreateCustomChannel(
        options_.coordinator_address, grpc::InsecureChannelCredentials(),
        ChannelArguments(options_.deadlines.heartbeat));
  }
  Agent::Parts parts;
  parts.memory = memory_.get();
  if (device_memory_ != nullptr) {
    parts.memory = device_memory_.get();
    parts.devices = device_memory_.get();
  }
  parts.device_agents = device_agents_.get();
  parts.groups = endpoint_.get();
  parts.processes = processes_.get();
  parts.journal = journal_.get();
  parts.coordinator = access_.name;
  parts.cluster_id = cluster_id_;
  if (coordinator_ == nullptr) parts.newest_term = newest_term_;
  parts.welcomed = [this](const v1::Welcome& welcome) {
    return Welcomed(welcome);
  };
  agent_ = std::make_unique<Agent>(options_, std::move(parts));
  return absl::OkStatus();
}

absl::Status DaemonImpl::Welcomed(const v1::Welcome& welcome) {
  endpoint_->RaiseTerm(welcome.term());
  // Another one than before where the coordinator has adopted it.
  endpoint_->SetClusterId(welcome.cluster_id());
  // The journal beside it knows both.
  if (coordinator_ != nullptr) return absl::OkStatus();
  if (welcome.cluster_id() != cluster_id_) {
    const absl::Status status = WriteFileAtomically(
        options_.state_dir + kClusterFile, welcome.cluster_id() + "\n");
    if (!status.ok()) return status;
    cluster_id_ = welcome.cluster_id();
    newest_term_ = 0;
  }
  if (welcome.term() <= newest_term_) return absl::OkStatus();
  // On the disk before it says what it holds: a daemon that is started again
  // must not follow a coordinator that was replaced and still runs, which would
  // resume replicas that its successor has half updated.
  const absl::Status status =
      WriteFileAtomically(options_.state_dir + kTermFile,
                          absl::StrCat(cluster_id_, " ", welcome.term(), "\n"));
  if (status.ok()) newest_term_ = welcome.term();
  return status;
}

absl::Status DaemonImpl::StartServer() {
  node_service_ = std::make_unique<NodeServiceImpl>(
      coordinator_.get(), options_.coordinator_address);
  admin_service_ = std::make_unique<AdminServiceImpl>(access_, options_.node,
                                                      options_.deadlines);
  trainer_service_ = std::make_unique<TrainerServiceImpl>(agent_.get(), access_,
                                                          options_.deadlines);
  replica_service_ = std::make_unique<ReplicaServiceImpl>(agent_.get());

  grpc::EnableDefaultHealthCheckService(true);
  // Linked for reflection, which could not describe the health service
  // otherwise.
  grpc::health::v1::HealthCheckRequest::descriptor();
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::channelz::experimental::InitChannelzService();

  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  // Otherwise a second daemon could take the same port, and get half of the
  // calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Clients may look after their connections as often as they like.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder.RegisterService(trainer_service_.get());
  builder.RegisterService(replica_service_.get());
  builder.RegisterService(admin_service_.get());
  builder.RegisterService(node_service_.get());
  std::vector<int> ports(listen_.size());
  for (size_t i = 0; i < listen_.size(); ++i) {
    builder.AddListeningPort(listen_[i].text(),
                             grpc::InsecureServerCredentials(), &ports[i]);
  }
  builder.AddListeningPort("unix:" + options_.unix_socket,
                           grpc::InsecureServerCredentials());
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    // gRPC logs why, and returns nothing: look again.
    for (const HostPort& address : listen_) {
      const absl::Status status = WhyNotListen(address, kListen);
      if (!status.ok()) return status;
    }
    return ErrorStatus(
        absl::StatusCode::kUnavailable, "LISTEN_FAILED",
        absl::StrCat("cannot listen at ", options_.unix_socket,
                     "; may this process write to its directory?"));
  }
  // Whoever may open it may replace weights: this user alone.
  if (chmod(options_.unix_socket.c_str(), 0600) != 0) {
    return ErrorStatus(
        absl::StatusCode::kUnavailable, "LISTEN_FAILED",
        absl::StrCat("cannot set the mode of ", options_.unix_socket));
  }
  for (size_t i = 0; i < listen_.size(); ++i) {
    HostPort address = listen_[i];
    address.port = ports[i];
    addresses_.listen.push_back(address.text());
  }
  addresses_.unix_socket = options_.unix_socket;
  addresses_.descriptor_socket = descriptors_->path();
  addresses_.data_address = endpoint_->address();

  // The embedded coordinator is reached as any other, without a socket.
  agent_->Start(coordinator_ != nullptr
                    ? server_->InProcessChannel(
                          ChannelArguments(options_.deadlines.heartbeat))
                    : access_.remote);
  return absl::OkStatus();
}

absl::Status DaemonImpl::StartPages() {
  if (options_.http_address.empty()) return absl::OkStatus();
  const absl::Status free = WhyNotListen(http_, kHttpAddress);
  if (!free.ok()) return free;
  // Nobody who looks waits longer than one who calls.
  const absl::Duration patience = options_.deadlines.call;
  auto pages = HttpServer::Start(
      http_.text(), {{"/metrics", kMetricsType,
                      [this, patience]() -> absl::StatusOr<std::string> {
                        auto figures = agent_->AskFigures(patience);
                        if (!figures.ok()) return figures.status();
                        return RenderMetrics(options_.node, kSoftwareVersion,
                                             *figures);
                      }},
                     {"/healthz", "text/plain; charset=utf-8",
                      [this, patience]() -> absl::StatusOr<std::string> {
                        auto figures = agent_->AskFigures(patience);
                        if (!figures.ok()) return figures.status();
                        return std::string("ok\n");
                      }}});
  if (!pages.ok()) return pages.status();
  pages_ = *std::move(pages);
  http_.port = pages_->port();
  addresses_.http = http_.text();
  LOG(INFO) << "pages for Prometheus and probes: http://" << addresses_.http
            << "/metrics, /healthz";
  return absl::OkStatus();
}

absl::Status DaemonImpl::WriteReadyFile() {
  if (options_.ready_file.empty()) return absl::OkStatus();
  nlohmann::json ready = {
      {"node", options_.node},
      {"pid", getpid()},
      {"version", kSoftwareVersion},
      {"listen", addresses_.listen},
      {"unix_socket", addresses_.unix_socket},
      {"descriptor_socket", addresses_.descriptor_socket},
      {"data_address", addresses_.data_address},
      {"http", addresses_.http},
      {"coordinator", coordinator_ != nullptr},
      {"coordinator_address", options_.coordinator_address},
  };
  const absl::Status status =
      WriteFileAtomically(options_.ready_file, ready.dump(2) + "\n");
  ready_written_ = status.ok();
  return status;
}

void DaemonImpl::Shutdown() {
  if (shut_down_) return;
  shut_down_ = true;
  const absl::Time deadline = absl::Now() + options_.deadlines.shutdown;
  if (ready_written_) unlink(options_.ready_file.c_str());
  // What hangs in an agent would hold up whoever waits for it.
  if (device_agents_ != nullptr) device_agents_->EndBy(deadline);
  // It waits for the pages that are being made.
  if (agent_ != nullptr) agent_->EndAsking(deadline);
  pages_ = nullptr;
  if (server_ != nullptr && server_->GetHealthCheckService() != nullptr) {
    server_->GetHealthCheckService()->SetServingStatus(false);
  }
  // First the one who decides: what follows must not look to it like a cluster
  // that falls apart.
  if (coordinator_ != nullptr) coordinator_->Stop();
  if (node_service_ != nullptr) node_service_->Shutdown();
  if (admin_service_ != nullptr) admin_service_->Shutdown();
  if (agent_ != nullptr) agent_->Shutdown();
  if (server_ != nullptr) {
    server_->Shutdown(absl::ToChronoTime(deadline));
    server_->Wait();
  }
  if (agent_ != nullptr) agent_->StopLoops();
  server_ = nullptr;
  replica_service_ = nullptr;
  trainer_service_ = nullptr;
  admin_service_ = nullptr;
  node_service_ = nullptr;
  agent_ = nullptr;
  coordinator_ = nullptr;
  processes_ = nullptr;
  endpoint_ = nullptr;
  channels_ = nullptr;
  device_memory_ = nullptr;
  device_agents_ = nullptr;
  memory_ = nullptr;
  copies_ = nullptr;
  descriptors_ = nullptr;
  socket_ = nullptr;
  state_ = nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(Options options) {
  auto daemon = std::make_unique<DaemonImpl>(std::move(options));
  const absl::Status status = daemon->Start();
  if (!status.ok()) return status;
  return daemon;
}

}  // namespace daemon
}  // namespace weightsync
