#include "transport/cuda/agent/device_agent.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "transport/cuda/agent/agent_server.h"
#include "transport/error.h"

extern char** environ;

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr int kAgentFd = 3;
constexpr absl::Duration kEndDeadline = absl::Seconds(3);
// Of a process that was killed, with a context of CUDA.
constexpr absl::Duration kDeathDeadline = absl::Seconds(20);
// How often a call that may be stopped looks.
constexpr absl::Duration kStopEvery = absl::Milliseconds(10);
// What an agent may take beyond what it was given: NCCL's abort.
constexpr absl::Duration kChannelMargin = absl::Seconds(10);

absl::Status Lost(absl::string_view why) {
  return MakeError(absl::StatusCode::kUnavailable, "DEVICE_AGENT_LOST", why);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceAgent>> DeviceAgent::Start(
    Options options) {
  std::unique_ptr<DeviceAgent> agent(new DeviceAgent(std::move(options)));
  const absl::Status status = agent->StartProcess(1);
  if (!status.ok()) return status;
  agent->supervisor_ =
      std::thread([agent = agent.get()] { agent->Supervise(); });
  return agent;
}

absl::StatusOr<std::vector<AgentDevice>> DeviceAgent::ListDevices(
    Options options) {
  DeviceAgent agent(std::move(options));
  const absl::Status status = agent.Spawn(1);
  if (!status.ok()) return status;
  const absl::StatusOr<std::string> answer = agent.Ask(
      1, AgentMessage::kDevices, "", -1, agent.options_.start_deadline);
  if (!answer.ok()) return answer.status();
  AgentReader in(*answer);
  std::vector<AgentDevice> devices;
  const uint64_t count = in.Get<uint64_t>();
  for (uint64_t i = 0; i < count && in.ok(); ++i) {
    AgentDevice device;
    device.uuid = in.GetString();
    device.name = in.GetString();
    device.total_bytes = in.Get<int64_t>();
    device.mig = in.Get<bool>();
    devices.push_back(std::move(device));
  }
  return devices;
}

DeviceAgent::~DeviceAgent() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (supervisor_.joinable()) supervisor_.join();
  EndProcess(Lost("the daemon ends"));
}

void DeviceAgent::EndBy(absl::Time when) {
  absl::MutexLock lock(&mutex_);
  end_by_ = when;
}

uint64_t DeviceAgent::epoch() const {
  absl::MutexLock lock(&mutex_);
  return epoch_;
}

pid_t DeviceAgent::pid() const {
  absl::MutexLock lock(&mutex_);
  return pid_;
}

bool DeviceAgent::Runs(uint64_t epoch) const {
  absl::MutexLock lock(&mutex_);
  return process_epoch_ == epoch && pid_ > 0;
}

absl::Status DeviceAgent::Spawn(uint64_t epoch) {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
    return MakeErrnoError(absl::StatusCode::kResourceExhausted,
                          "DEVICE_AGENT_LOST", "socketpair", errno);
  // Away from the number that it gets in the child: dup2 to itself would leave
  // it to be closed.
  const int child_socket = fcntl(sockets[1], F_DUPFD_CLOEXEC, 64);
  close(sockets[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, child_socket, kAgentFd);
  std::vector<std::string> words = options_.command;
  words.push_back(absl::StrCat("--device_agent=", kAgentFd));
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(&word[0]);
  argv.push_back(nullptr);
  pid_t pid = 0;
  // The daemon takes its signals on one thread and blocks them everywhere.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  const int error =
      posix_spawn(&pid, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  close(child_socket);
  if (error != 0) {
    close(sockets[0]);
    return MakeErrnoError(absl::StatusCode::kUnavailable, "DEVICE_AGENT_LOST",
                          words[0], error);
  }
  {
    absl::MutexLock lock(&mutex_);
    starts_ = epoch;
    process_epoch_ = epoch;
    pid_ = pid;
    socket_ = sockets[0];
    gone_ = false;
    why_ = absl::OkStatus();
  }
  reader_ = std::thread([this, socket = sockets[0]] { Read(socket); });
  return absl::OkStatus();
}

absl::Status DeviceAgent::StartProcess(uint64_t epoch) {
  const absl::Status status = Spawn(epoch);
  if (!status.ok()) return status;
  AgentConfig config = options_.config;
  config.fd_socket = absl::StrCat(options_.fd_socket_prefix, ".", epoch);
  const absl::StatusOr<std::string> answer =
      Ask(epoch, AgentMessage::kConfigure, config.Encode(), -1,
          options_.start_deadline);
  if (!answer.ok()) {
    EndProcess(answer.status());
    return answer.status();
  }
  AgentReader in(*answer);
  const std::string uuid = in.GetString();
  const std::string name = in.GetString();
  if (device_uuid_.empty()) {
    device_uuid_ = uuid;
    device_name_ = name;
  }
  absl::MutexLock lock(&mutex_);
  epoch_ = epoch;
  return absl::OkStatus();
}

void DeviceAgent::Read(int socket) {
  while (true) {
    absl::StatusOr<AgentPacket> packet = ReceivePacket(socket);
    absl::MutexLock lock(&mutex_);
    if (!packet.ok()) {
      gone_ = true;
      if (why_.ok()) why_ = Lost("the device agent has ended");
      epoch_ = 0;
      for (const auto& [id, call] : calls_) {
        call->done = true;
        call->status = why_;
      }
      calls_.clear();
      return;
    }
    const auto at = calls_.find(packet->id);
    if (at == calls_.end()) continue;
    Call* const call = at->second;
    if (packet->type == AgentMessage::kFrames) {
      // Its caller's to look at: who takes long over it must not hold up what
      // others are answered, and the pings least of all.
      call->frames.push_back(*std::move(packet));
      continue;
    }
    AgentReader in(packet->payload);
    call->status = in.GetStatus();
    AgentWriter told;
    told.PutStatus(call->status);
    call->answer = packet->payload.substr(
        std::min(told.bytes().size(), packet->payload.size()));
    call->done = true;
    calls_.erase(at);
  }
}

absl::StatusOr<std::string> DeviceAgent::Ask(
    uint64_t epoch, AgentMessage type, const std::string& payload, int fd,
    absl::Duration deadline, std::function<void(const AgentPacket&)> on_frames,
    const std::function<bool()>& stopped, uint64_t channel, Silence silence) {
  absl::Time until = absl::Now() + deadline;
  Call call;
  uint64_t id, asked;
  int socket;
  {
    absl::MutexLock lock(&mutex_);
    const bool configuring =
        (type == AgentMessage::kConfigure || type == AgentMessage::kDevices) &&
        process_epoch_ == epoch;
    if (socket_ < 0 || gone_ || (epoch_ == 0 && !configuring)) {
      return Lost(absl::StrCat("the agent of ", device_uuid_, " is down",
                               why_.ok() ? "" : ": ", why_.message()));
    }
    if (epoch != 0 && epoch != process_epoch_) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "STALE_EPOCH",
                       absl::StrCat("the agent of ", device_uuid_,
                                    " was started again: this is of epoch ",
                                    epoch, ", and now is ", process_epoch_));
    }
    asked = process_epoch_;
    id = ++next_call_;
    calls_[id] = &call;
    socket = socket_;
  }
  absl::Status sent;
  {
    absl::MutexLock lock(&send_mutex_);
    sent = SendPacket(socket, type, id, payload, fd,
                      std::min(deadline, options_.hang_deadline));
  }
  absl::MutexLock lock(&mutex_);
  if (sent.ok() || absl::IsUnavailable(sent)) {
    const auto done = [&call]() { return call.done; };
    bool told_to_stop = stopped == nullptr;
    while (!told_to_stop && !call.done && absl::Now() < until) {
      if (mutex_.AwaitWithTimeout(absl::Condition(&done), kStopEvery)) break;
      mutex_.Unlock();
      if (stopped()) {
        // It answers all the same, soon; or NCCL does not return.
        told_to_stop = true;
        until = std::min(until, absl::Now() + kChannelMargin);
        absl::MutexLock send_lock(&send_mutex_);
        (void)SendPacket(socket, AgentMessage::kChannelStop, 0,
                         AgentWriter().Put(channel).bytes(), -1,
                         options_.hang_deadline);
      }
      mutex_.Lock();
    }
    const auto told = [&call]() { return call.done || !call.frames.empty(); };
    while (mutex_.AwaitWithDeadline(absl::Condition(&told), until)) {
      if (call.frames.empty()) break;
      const AgentPacket packet = std::move(call.frames.front());
      call.frames.pop_front();
      if (on_frames == nullptr) continue;
      mutex_.Unlock();
      const absl::Time start = absl::Now();
      on_frames(packet);
      until += absl::Now() - start;
      mutex_.Lock();
    }
  }
  if (call.done) {
    if (!call.status.ok()) return call.status;
    return std::move(call.answer);
  }
  calls_.erase(id);
  if (silence == Silence::kIsToldOnly) {
    return MakeError(absl::StatusCode::kDeadlineExceeded, "DEVICE_AGENT_SLOW",
                     absl::StrCat("the agent of ", device_uuid_, " (pid ", pid_,
                                  ") has not answered for ",
                                  absl::FormatDuration(deadline), " yet"));
  }
  const absl::Status hung = MakeError(
      absl::StatusCode::kDeadlineExceeded, "DEVICE_AGENT_HUNG",
      absl::StrCat("the agent of ", device_uuid_, " (pid ", pid_,
                   ") has not answered for ", absl::FormatDuration(deadline),
                   " and is started again"));
  if (process_epoch_ == asked && pid_ > 0 && !gone_) {
    if (why_.ok()) why_ = hung;
    // Its end is noticed by the reader.
    kill(pid_, SIGKILL);
  }
  return hung;
}

void DeviceAgent::AwaitEnd(uint64_t epoch, const absl::Status& status) const {
  const std::string reason = ReasonOf(status);
  if (reason != "DEVICE_AGENT_LOST" && reason != "DEVICE_AGENT_HUNG" &&
      reason != "DEVICE_FAULT" && reason != "DEVICE_STALLED")
    return;
  const absl::Time until = absl::Now() + kDeathDeadline;
  while (Runs(epoch)) {
    if (absl::Now() >= until) {
      LOG(ERROR) << "the device agent of " << device_uuid_
                 << " does not end although it was killed";
      return;
    }
    absl::SleepFor(absl::Milliseconds(2));
  }
}

void DeviceAgent::EndProcess(const absl::Status& why) {
  pid_t pid;
  int socket;
  {
    absl::MutexLock lock(&mutex_);
    pid = pid_;
    socket = socket_;
    epoch_ = 0;
    if (why_.ok()) why_ = why;
  }
  if (pid <= 0) return;
  // It ends when the socket does; if it cannot, it is made to.
  shutdown(socket, SHUT_RDWR);
  if (reader_.joinable()) reader_.join();
  const absl::Time until = absl::Now() + kEndDeadline;
  int status = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (absl::Now() > until) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      break;
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
  // One that was killed could not.
  absl::MutexLock lock(&mutex_);
  const std::string fds =
      absl::StrCat(options_.fd_socket_prefix, ".", process_epoch_);
  unlink(fds.c_str());
  unlink((fds + ".lock").c_str());
  pid_ = 0;
  close(socket_);
  socket_ = -1;
}

void DeviceAgent::Supervise() {
  absl::Duration backoff = options_.backoff;
  // Of the first process, which may be gone by now.
  if (options_.on_change != nullptr) options_.on_change(1, absl::OkStatus());
  while (true) {
    bool gone;
    absl::Status why;
    {
      absl::MutexLock lock(&mutex_);
      const auto look = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return stopping_ || gone_;
      };
      mutex_.AwaitWithTimeout(
          absl::Condition(&look),
          std::min({options_.hang_deadline / 4, absl::Seconds(1),
                    std::max(end_by_ - absl::Now(), kStopEvery)}));
      if (stopping_) return;
      if (absl::Now() >= end_by_ && !gone_ && !calls_.empty()) {
        if (why_.ok()) why_ = Lost("the daemon ends");
        kill(pid_, SIGKILL);
        continue;
      }
      gone = gone_;
      why = why_;
    }
    if (!gone) {
      // Kills it when there is no answer.
      (void)Ask(0, AgentMessage::kPing, "", -1, options_.hang_deadline);
      continue;
    }
    EndProcess(why);
    LOG(WARNING) << device_uuid_ << ": " << why.message();
    if (options_.on_change != nullptr) options_.on_change(0, why);
    {
      absl::MutexLock lock(&mutex_);
      if (end_by_ != absl::InfiniteFuture()) return;
    }
    while (true) {
      uint64_t next;
      {
        absl::MutexLock lock(&mutex_);
        const auto stopping = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
          return stopping_;
        };
        mutex_.AwaitWithTimeout(absl::Condition(&stopping), backoff);
        if (stopping_) return;
        next = starts_ + 1;
      }
      const absl::Status status = StartProcess(next);
      if (status.ok()) {
        backoff = options_.backoff;
        LOG(INFO) << device_uuid_ << ": a new device agent, epoch " << next;
        if (options_.on_change != nullptr)
          options_.on_change(next, absl::OkStatus());
        break;
      }
      LOG(WARNING) << device_uuid_ << ": " << status.message();
      {
        absl::MutexLock lock(&mutex_);
        starts_ = std::max(starts_, next);
      }
      backoff = std::min(2 * backoff, options_.max_backoff);
    }
  }
}

absl::StatusOr<AgentUsage> DeviceAgent::GetUsage(absl::Duration deadline) {
  const absl::StatusOr<std::string> answer =
      Ask(0, AgentMessage::kUsage, "", -1, deadline, nullptr, nullptr, 0,
          Silence::kIsToldOnly);
  if (!answer.ok()) return answer.status();
  return AgentReader(*answer).Get<AgentUsage>();
}

absl::StatusOr<uint64_t> DeviceAgent::Open(uint64_t epoch,
                                           const std::string& handle,
                                           bool writable,
                                           absl::Duration deadline) {
  const absl::StatusOr<std::string> answer =
      Ask(epoch, AgentMessage::kOpen,
          AgentWriter().Put(writable).PutString(handle).bytes(), -1, deadline);
  if (!answer.ok()) return answer.status();
  return AgentReader(*answer).Get<uint64_t>();
}

absl::Status DeviceAgent::Close(uint64_t epoch, uint64_t import,
                                absl::Duration deadline) {
  return Ask(epoch, AgentMessage::kClose, AgentWriter().Put(import).bytes(), -1,
             deadline)
      .status();
}

absl::StatusOr<uint64_t> DeviceAgent::MapHost(uint64_t epoch, int fd,
                                              int64_t offset, int64_t bytes,
                                              absl::Duration deadline) {
  const absl::StatusOr<std::string> answer =
      Ask(epoch, AgentMessage::kMapHost,
          AgentWriter().Put(offset).Put(bytes).bytes(), fd, deadline);
  if (!answer.ok()) return answer.status();
  return AgentReader(*answer).Get<uint64_t>();
}

absl::Status DeviceAgent::UnmapHost(uint64_t epoch, uint64_t host,
                                    absl::Duration deadline) {
  return Ask(epoch, AgentMessage::kUnmapHost, AgentWriter().Put(host).bytes(),
             -1, deadline)
      .status();
}

absl::StatusOr<Digest> DeviceAgent::Pack(
    uint64_t epoch, const AgentPack& pack,
    std::function<void(int64_t, int64_t, absl::Span<const Digest>)> on_frames,
    absl::Duration deadline) {
  const absl::StatusOr<std::string> answer =
      Ask(epoch, AgentMessage::kPack, pack.Encode(), -1, deadline,
          [&on_frames](const AgentPacket& packet) {
            AgentReader in(packet.payload);
            const int64_t first = in.Get<int64_t>();
            const int64_t last = in.Get<int64_t>();
            std::vector<Digest> digests;
            for (int64_t i = first; i < last && in.ok(); ++i)
              digests.push_back(in.Get<Digest>());
            if (in.done() && on_frames != nullptr)
              on_frames(first, last, digests);
          });
  if (!answer.ok()) return answer.status();
  return AgentReader(*answer).Get<Digest>();
}

absl::Status DeviceAgent::Copy(uint64_t epoch,
                               absl::Span<const AgentCopy> copies,
                               absl::Duration deadline) {
  AgentWriter out;
  out.Put(static_cast<uint64_t>(copies.size()));
  for (const AgentCopy& copy : copies) out.Put(copy);
  return Ask(epoch, AgentMessage::kCopy, out.bytes(), -1, deadline).status();
}

absl::StatusOr<Digest> DeviceAgent::DigestOf(uint64_t epoch,
                                             const AgentPack& pack,
                                             absl::Duration deadline) {
  const absl::StatusOr<std::string> answer =
      Ask(epoch, AgentMessage::kDigest, pack.Encode(), -1, deadline);
  if (!answer.ok()) return answer.status();
  return AgentReader(*answer).Get<Digest>();
}

absl::StatusOr<std::vector<Digest>> DeviceAgent::DigestFrames(
    uint64_t epoch, const AgentPack& pack, absl::Duration deadline) {
  const absl::StatusOr<std::string> answer =
      Ask(epoch, AgentMessage::kDigest, pack.Encode(), -1, deadline);
  if (!answer.ok()) return answer.status();
  AgentReader in(*answer);
  std::vector<Digest> digests;
  for (size_t i = 0; i < pack.frames.size(); ++i)
    digests.push_back(in.Get<Digest>());
  if (!in.done()) {
    return MakeError(absl::StatusCode::kInternal, "BAD_JOB",
                     "the device agent has digested other frames");
  }
  return digests;
}

absl::StatusOr<std::string> DeviceAgent::ReadBytes(uint64_t epoch,
                                                   const AgentPlace& from,
                                                   int64_t bytes,
                                                   absl::Duration deadline) {
  const absl::StatusOr<std::string> answer =
      Ask(epoch, AgentMessage::kRead,
          AgentWriter().Put(from).Put(bytes).bytes(), -1, deadline);
  if (!answer.ok()) return answer.status();
  return AgentReader(*answer).GetString();
}

absl::StatusOr<DeviceAgent::StorePart> DeviceAgent::MakeStore(
    uint64_t epoch, int64_t bytes, int generation_slots,
    const std::string& name, absl::Duration deadline) {
  const absl::StatusOr<std::string> answer =
      Ask(epoch, AgentMessage::kMakeStore,
          AgentWriter()
              .Put(bytes)
              .Put(static_cast<int32_t>(generation_slots))
              .PutString(name)
              .bytes(),
          -1, deadline);
  if (!answer.ok()) return answer.status();
  AgentReader in(*answer);
  StorePart part;
  part.id = in.Get<uint64_t>();
  part.control.bytes = in.Get<int64_t>();
  part.control.address = in.GetString();
  part.control.token = in.GetString();
  return part;
}

absl::Status DeviceAgent::FreeStore(uint64_t epoch, uint64_t id,
                                    absl::Duration deadline) {
  return Ask(epoch, AgentMessage::kFreeStore, AgentWriter().Put(id).bytes(), -1,
             deadline)
      .status();
}

absl::StatusOr<uint64_t> DeviceAgent::NewChannel(uint64_t epoch,
                                                 const std::string& peer,
                                                 absl::Duration deadline) {
  const absl::StatusOr<std::string> answer =
      Ask(epoch, AgentMessage::kChannelNew,
          AgentWriter().PutString(peer).bytes(), -1, deadline);
  if (!answer.ok()) return answer.status();
  return AgentReader(*answer).Get<uint64_t>();
}

absl::StatusOr<std::string> DeviceAgent::ChannelOffer(uint64_t epoch,
                                                      uint64_t channel,
                                                      absl::Duration deadline) {
  const absl::StatusOr<std::string> answer =
      Ask(epoch, AgentMessage::kChannelOffer,
          AgentWriter().Put(channel).bytes(), -1, deadline);
  if (!answer.ok()) return answer.status();
  return AgentReader(*answer).GetString();
}

absl::StatusOr<tcp::PayloadChannel::Acceptance> DeviceAgent::ChannelAccept(
    uint64_t epoch, uint64_t channel, const std::string& offer,
    absl::Duration deadline) {
  const absl::StatusOr<std::string> answer =
      Ask(epoch, AgentMessage::kChannelAccept,
          AgentWriter().Put(channel).PutString(offer).bytes(), -1, deadline);
  if (!answer.ok()) return answer.status();
  AgentReader in(*answer);
  tcp::PayloadChannel::Acceptance acceptance;
  acceptance.agreed = in.Get<bool>();
  acceptance.answer = in.GetString();
  return acceptance;
}

absl::StatusOr<bool> DeviceAgent::ChannelAnswered(uint64_t epoch,
                                                  uint64_t channel,
                                                  const std::string& answer,
                                                  absl::Duration deadline) {
  const absl::StatusOr<std::string> heard =
      Ask(epoch, AgentMessage::kChannelAnswered,
          AgentWriter().Put(channel).PutString(answer).bytes(), -1, deadline);
  if (!heard.ok()) return heard.status();
  return AgentReader(*heard).Get<bool>();
}

absl::Status DeviceAgent::ChannelConnect(uint64_t epoch, uint64_t channel,
                                         absl::Duration timeout,
                                         const std::function<bool()>& stopped) {
  return Ask(epoch, AgentMessage::kChannelConnect,
             AgentWriter()
                 .Put(channel)
                 .Put(absl::ToInt64Nanoseconds(timeout))
                 .bytes(),
             -1, timeout + kChannelMargin, nullptr, stopped, channel)
      .status();
}

absl::Status DeviceAgent::ChannelMove(uint64_t epoch, uint64_t channel,
                                      bool send,
                                      absl::Span<const AgentPart> parts,
                                      absl::Duration timeout,
                                      const std::function<bool()>& stopped) {
  AgentWriter out;
  out.Put(channel).Put(absl::ToInt64Nanoseconds(timeout)).Put(send);
  out.Put(static_cast<uint64_t>(parts.size()));
  int64_t bytes = 0;
  for (const AgentPart& part : parts) {
    out.Put(part);
    bytes += part.bytes;
  }
  // It is the agent that looks for progress, piece by piece.
  const int64_t pieces = 1 + 2 * bytes / options_.config.nccl_staging_bytes;
  return Ask(epoch, AgentMessage::kChannelMove, out.bytes(), -1,
             pieces * timeout + kChannelMargin, nullptr, stopped, channel)
      .status();
}

absl::Status DeviceAgent::EndChannel(uint64_t epoch, uint64_t channel,
                                     bool well, absl::Duration deadline) {
  return Ask(epoch, AgentMessage::kChannelEnd,
             AgentWriter().Put(channel).Put(well).bytes(), -1, deadline)
      .status();
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
