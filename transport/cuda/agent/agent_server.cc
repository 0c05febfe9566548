#include "transport/cuda/agent/agent_server.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "transport/cuda/agent/agent_job.h"
#include "transport/cuda/agent/agent_wire.h"
#include "transport/cuda/agent/device_agent.h"
#include "transport/cuda/agent/host_map.h"
#include "transport/cuda/cuda_memory.h"
#include "transport/cuda/segment_control.h"
#include "transport/error.h"
#include "transport/host/host_memory.h"
#include "transport/nccl/nccl_channel.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr absl::Duration kEndDeadline = absl::Seconds(10);
constexpr absl::Duration kCloseDeadline = absl::Seconds(4);
// At a time: each has a thread. More of those that give something back, which
// would be there for as long as the agent is.
constexpr size_t kMaxRequests = 512, kMaxEnds = 2 * kMaxRequests;

class AgentServer {
 public:
  explicit AgentServer(int socket) : socket_(socket), pool_(1) {}

  int Run() {
    struct Worker {
      std::thread thread;
      std::shared_ptr<std::atomic<bool>> done;
    };
    std::list<Worker> workers;
    while (true) {
      absl::StatusOr<AgentPacket> packet = ReceivePacket(socket_);
      if (!packet.ok()) break;
      if (packet->type == AgentMessage::kPing) {
        // From this thread: it says that the process runs, not that the GPU
        // does.
        Answer(packet->id, absl::OkStatus());
        continue;
      }
      if (packet->type == AgentMessage::kChannelStop) {
        // From here, too: it is what ends requests that wait, and needs no
        // thread of those that they have.
        AgentReader in(packet->payload);
        if (const auto channel = FindChannel(in.Get<uint64_t>()))
          channel->stop = true;
        continue;
      }
      if (packet->type == AgentMessage::kConfigure ||
          packet->type == AgentMessage::kDevices) {
        Handle(*std::move(packet));
        continue;
      }
      // A pack may take seconds; what comes after it need not wait.
      // Never is anything waited for here: a ping may be behind it.
      for (auto at = workers.begin(); at != workers.end();) {
        if (!*at->done) {
          ++at;
          continue;
        }
        at->thread.join();
        at = workers.erase(at);
      }
      if (workers.size() >=
          (GivesBack(packet->type) ? kMaxEnds : kMaxRequests)) {
        Answer(packet->id,
               MakeError(absl::StatusCode::kResourceExhausted, "AGENT_BUSY",
                         absl::StrCat("the agent has ", workers.size(),
                                      " requests at work")));
        continue;
      }
      const auto done = std::make_shared<std::atomic<bool>>(false);
      const auto request = std::make_shared<AgentPacket>(*std::move(packet));
      workers.push_back({std::thread([this, request, done] {
                           Handle(std::move(*request));
                           *done = true;
                         }),
                         done});
    }
    {
      absl::MutexLock lock(&channels_mutex_);
      for (const auto& [id, channel] : channels_) channel->stop = true;
    }
    // The daemon is gone, and nobody is left who could kill this.
    std::thread([] {
      absl::SleepFor(kEndDeadline);
      LOG(ERROR) << "the agent does not end by itself";
      _exit(kAgentDeviceLost);
    }).detach();
    for (Worker& worker : workers) worker.thread.join();
    {
      absl::MutexLock lock(&channels_mutex_);
      channels_.clear();
    }
    {
      absl::MutexLock lock(&nccl_mutex_);
      nccl_.reset();
    }
    {
      absl::MutexLock lock(&mutex_);
      imports_.clear();
      hosts_.clear();
      stores_.clear();
    }
    slots_.clear();
    memory_.reset();
    return kAgentEnded;
  }

 private:
  void Answer(uint64_t id, const absl::Status& status,
              const AgentWriter& more = AgentWriter()) {
    AgentWriter out;
    out.PutStatus(status);
    Say(AgentMessage::kDone, id, out.bytes() + more.bytes());
    const std::string reason = ReasonOf(status);
    if (reason == "DEVICE_FAULT" || reason == "DEVICE_STALLED") {
      // Nothing else can be done with this process, and its end is quicker
      // than finding out again for each request.
      LOG(ERROR) << "the agent ends: " << status.message();
      _exit(kAgentDeviceLost);
    }
  }

  void Say(AgentMessage type, uint64_t id, absl::string_view payload) {
    absl::MutexLock lock(&send_mutex_);
    const absl::Status status = SendPacket(socket_, type, id, payload);
    // Its daemon is gone, or hangs: the reading end sees to it.
    if (!status.ok()) LOG(WARNING) << "answering: " << status;
  }

  void Handle(AgentPacket request) {
    AgentReader in(request.payload);
    AgentWriter out;
    absl::Status status;
    if (request.type == AgentMessage::kDevices) {
      Answer(request.id, Devices(&out), out);
      return;
    }
    if (request.type != AgentMessage::kConfigure && memory_ == nullptr) {
      Answer(request.id, BadJob("the agent has no GPU yet"));
      return;
    }
    switch (request.type) {
      case AgentMessage::kConfigure:
        status = Configure(request.payload, &out);
        break;
      case AgentMessage::kUsage:
        // Who asks does not wait for ever, and asks again.
        if (telling_usage_.exchange(true)) {
          status = MakeError(absl::StatusCode::kResourceExhausted, "AGENT_BUSY",
                             "the agent still looks what it uses");
          break;
        }
        status = Usage(&out);
        telling_usage_ = false;
        break;
      case AgentMessage::kOpen: {
        const bool writable = in.Get<bool>();
        status = Open(in.GetString(), writable, &out);
        // What was opened to look at it is closed before its owner, who frees
        // it then, hears that it was refused.
        if (!status.ok() && !memory_->core()->Drain(kCloseDeadline))
          LOG(WARNING) << "what was opened to be looked at is not closed yet";
        break;
      }
      case AgentMessage::kClose: {
        {
          std::shared_ptr<const ImportedAllocation> gone;
          absl::MutexLock lock(&mutex_);
          const auto at = imports_.find(in.Get<uint64_t>());
          if (at == imports_.end()) break;
          gone = std::move(at->second);
          imports_.erase(at);
        }
        // Its owner frees it when it hears that it is closed.
        if (!memory_->core()->Drain(kCloseDeadline)) {
          status =
              MakeError(absl::StatusCode::kDeadlineExceeded, "CLOSE_PENDING",
                        "it is closed when the GPU has done its work");
        }
        break;
      }
      case AgentMessage::kMapHost: {
        const int64_t offset = in.Get<int64_t>();
        const int64_t bytes = in.Get<int64_t>();
        absl::StatusOr<std::shared_ptr<HostMap>> map =
            HostMap::Make(memory_.get(), std::move(request.fd), offset, bytes);
        status = map.status();
        if (!status.ok()) break;
        absl::MutexLock lock(&mutex_);
        out.Put(++next_id_);
        hosts_[next_id_] = *std::move(map);
        break;
      }
      case AgentMessage::kUnmapHost: {
        std::shared_ptr<HostMap> gone;
        absl::MutexLock lock(&mutex_);
        const auto at = hosts_.find(in.Get<uint64_t>());
        if (at == hosts_.end()) break;
        gone = std::move(at->second);
        hosts_.erase(at);
        break;
      }
      case AgentMessage::kPack:
        status = Pack(request.id, request.payload, &out);
        break;
      case AgentMessage::kCopy:
        status = Copy(&in);
        break;
      case AgentMessage::kMakeStore:
        status = MakeStore(&in, &out);
        break;
      case AgentMessage::kFreeStore: {
        // Whoever works on it keeps it until it has done so.
        std::shared_ptr<Segment> gone;
        absl::MutexLock lock(&mutex_);
        const auto at = stores_.find(in.Get<uint64_t>());
        if (at == stores_.end()) break;
        gone = std::move(at->second);
        stores_.erase(at);
        break;
      }
      case AgentMessage::kDigest:
        status = DigestOf(request.payload, &out);
        break;
      case AgentMessage::kRead:
        status = ReadBytes(&in, &out);
        break;
      case AgentMessage::kChannelNew:
        status = NewChannel(in.GetString(), &out);
        break;
      case AgentMessage::kChannelOffer:
      case AgentMessage::kChannelAccept:
      case AgentMessage::kChannelAnswered:
      case AgentMessage::kChannelConnect:
      case AgentMessage::kChannelMove:
        status = UseChannel(request.type, &in, &out);
        break;
      case AgentMessage::kChannelEnd: {
        std::shared_ptr<Channel> gone;
        absl::MutexLock lock(&channels_mutex_);
        const auto at = channels_.find(in.Get<uint64_t>());
        if (at == channels_.end()) break;
        gone = std::move(at->second);
        channels_.erase(at);
        if (in.Get<bool>()) gone->end->Finish();
        break;
      }
      default:
        status = BadJob("a request that is none");
    }
    if (status.ok() && !in.ok()) status = BadJob("a request that is too short");
    Answer(request.id, status, out);
  }

  // Makes no context.
  static absl::Status Devices(AgentWriter* out) {
    const absl::StatusOr<std::vector<DeviceInfo>> devices = ListDevices();
    if (!devices.ok()) return devices.status();
    out->Put(static_cast<uint64_t>(devices->size()));
    for (const DeviceInfo& device : *devices) {
      out->PutString(device.uuid).PutString(device.name);
      out->Put(device.total_bytes).Put(device.mig);
    }
    return absl::OkStatus();
  }

  absl::Status Configure(absl::string_view payload, AgentWriter* out) {
    if (memory_ != nullptr) return BadJob("the agent has a GPU already");
    const absl::StatusOr<AgentConfig> config = AgentConfig::Decode(payload);
    if (!config.ok()) return config.status();
    absl::StatusOr<std::unique_ptr<FdServer>> fds =
        FdServer::Start(config->fd_socket, FdServer::Options());
    if (!fds.ok()) return fds.status();
    fds_ = *std::move(fds);
    host_ =
        std::make_unique<HostMemory>(&pool_, fds_.get(), HostMemory::Options());
    CudaMemory::Options options;
    options.device_uuid = config->device_uuid;
    options.keep_free_bytes = config->keep_free_bytes;
    options.core.stall_deadline = absl::Milliseconds(config->stall_deadline_ms);
    // A pack to the host takes two, and each slot may have one; the rest is for
    // what is short. They are made when they are first wanted.
    options.core.lanes = 2 * std::max(1, config->slots) + 2;
    absl::StatusOr<std::unique_ptr<CudaMemory>> memory =
        CudaMemory::Create(host_.get(), options);
    if (!memory.ok()) return memory.status();
    std::vector<std::unique_ptr<Segment>> slots;
    for (int i = 0; i < config->slots; ++i) {
      AllocateOptions slot;
      slot.name = absl::StrCat("slot ", i, " of ", config->slots);
      absl::StatusOr<std::unique_ptr<Segment>> segment =
          (*memory)->Allocate(config->slot_bytes, slot);
      if (!segment.ok()) return segment.status();
      slots.push_back(*std::move(segment));
    }
    const absl::StatusOr<CudaMemory::Usage> usage = (*memory)->GetUsage();
    if (!usage.ok()) return usage.status();
    slots_segments_bytes_ = usage->segments_bytes;
    memory_ = *std::move(memory);
    slots_ = std::move(slots);
    nccl_options_.library = config->nccl_library;
    nccl_options_.device_uuid = memory_->core()->device().uuid;
    nccl_options_.max_ctas = config->nccl_max_ctas;
    nccl_options_.cta_policy = config->nccl_cta_policy;
    nccl_options_.staging_bytes = config->nccl_staging_bytes;
    nccl_options_.abort_deadline =
        absl::Milliseconds(config->nccl_abort_deadline_ms);
    // What hangs in NCCL ends with the process, and with nothing less.
    nccl_options_.on_hung = [](const absl::Status& status) {
      LOG(ERROR) << "the agent ends: " << status.message();
      _exit(kAgentDeviceLost);
    };
    out->PutString(memory_->core()->device().uuid);
    out->PutString(memory_->core()->device().name);
    return absl::OkStatus();
  }

  absl::Status Usage(AgentWriter* out) {
    const absl::StatusOr<CudaMemory::Usage> usage = memory_->GetUsage();
    if (!usage.ok()) return usage.status();
    AgentUsage told;
    for (const auto& slot : slots_) told.slots_bytes += slot->bytes();
    // Also what is freed and open elsewhere.
    told.store_bytes = usage->segments_bytes - slots_segments_bytes_;
    told.context_bytes = usage->context_bytes;
    told.scratch_bytes = usage->scratch_bytes;
    told.free_bytes = usage->free_bytes;
    told.total_bytes = usage->total_bytes;
    told.imports = memory_->imports()->size();
    {
      absl::MutexLock lock(&nccl_mutex_);
      if (nccl_ != nullptr) {
        told.nccl_bytes = nccl_->staging_bytes() + nccl_->communicator_bytes();
        told.nccl_communicators = nccl_->communicators();
      }
    }
    out->Put(told);
    return absl::OkStatus();
  }

  absl::Status Open(const std::string& handle_bytes, bool writable,
                    AgentWriter* out) {
    const absl::StatusOr<DeviceHandle> handle =
        DeviceHandle::Decode(handle_bytes);
    if (!handle.ok()) return handle.status();
    absl::StatusOr<std::shared_ptr<const ImportedAllocation>> import =
        memory_->imports()->Acquire(*handle, writable);
    if (!import.ok()) return import.status();
    absl::MutexLock lock(&mutex_);
    out->Put(++next_id_);
    imports_[next_id_] = *std::move(import);
    return absl::OkStatus();
  }

  // The address of a place, and what keeps it while it is used.
  absl::StatusOr<char*> Resolve(
      const AgentPlace& place, int64_t bytes,
      std::vector<std::shared_ptr<const void>>* keep) {
    char* base = nullptr;
    int64_t room = 0;
    absl::MutexLock lock(&mutex_);
    if (place.kind == AgentPlace::Kind::kSlot) {
      if (place.id >= slots_.size()) return BadJob("a slot that is not there");
      base = slots_[place.id]->data();
      room = slots_[place.id]->bytes();
    } else if (place.kind == AgentPlace::Kind::kImport) {
      const auto at = imports_.find(place.id);
      if (at == imports_.end())
        return BadJob("an allocation that is not open here");
      base = at->second->data;
      room = at->second->bytes;
      keep->push_back(at->second);
    } else if (place.kind == AgentPlace::Kind::kStore) {
      const auto at = stores_.find(place.id);
      if (at == stores_.end()) return BadJob("a store that is not there");
      base = at->second->data();
      room = at->second->bytes();
      keep->push_back(at->second);
    } else {
      const auto at = hosts_.find(place.id);
      if (at == hosts_.end()) return BadJob("host memory that is not mapped");
      base = at->second->data();
      room = at->second->bytes();
      keep->push_back(at->second);
    }
    if (place.offset < 0 || bytes < 0 || place.offset > room ||
        bytes > room - place.offset) {
      return MakeError(absl::StatusCode::kInvalidArgument, "PAST_ALLOCATION",
                       absl::StrCat(bytes, " bytes at offset ", place.offset,
                                    " do not lie in ", room));
    }
    return base + place.offset;
  }

  absl::Status Pack(uint64_t id, absl::string_view payload, AgentWriter* out) {
    const absl::StatusOr<AgentPack> job = AgentPack::Decode(payload);
    if (!job.ok()) return job.status();
    std::vector<std::shared_ptr<const void>> keep;
    PackRequest request;
    if (job->bucket.kind != AgentPlace::Kind::kSlot &&
        job->bucket.kind != AgentPlace::Kind::kStore)
      return BadJob("a bucket is packed in a slot or in the store");
    const absl::StatusOr<char*> bucket =
        Resolve(job->bucket, job->bucket_bytes, &keep);
    if (!bucket.ok()) return bucket.status();
    char* host = nullptr;
    if (job->to_host) {
      const absl::StatusOr<char*> found =
          Resolve(job->host, job->bucket_bytes, &keep);
      if (!found.ok()) return found.status();
      host = *found;
    }
    std::vector<PackPiece> pieces;
    for (AgentPiece piece : job->pieces) {
      PackPiece placed;
      placed.offset = piece.offset;
      // How far it reaches is checked against the allocation by the pack.
      const absl::StatusOr<char*> source = Resolve(piece.source, 0, &keep);
      if (!source.ok()) return source.status();
      piece.PlaceAt(*source);
      placed.copy = std::move(piece.copy);
      pieces.push_back(std::move(placed));
    }
    request.bucket = *bucket;
    request.bucket_bytes = job->bucket_bytes;
    request.frame_bytes = job->frame_bytes;
    request.pieces = pieces;
    request.on_frames = [&](int64_t first, int64_t last,
                            absl::Span<const Digest> digests) {
      AgentWriter frames;
      frames.Put(first).Put(last);
      for (const Digest& digest : digests) frames.Put(digest);
      Say(AgentMessage::kFrames, id, frames.bytes());
    };
    PackResult result;
    const absl::Status status = memory_->PackTo(request, host, &result);
    if (status.ok()) out->Put(result.bucket);
    return status;
  }

  absl::Status DigestOf(absl::string_view payload, AgentWriter* out) {
    const absl::StatusOr<AgentPack> job = AgentPack::Decode(payload);
    if (!job.ok()) return job.status();
    std::vector<std::shared_ptr<const void>> keep;
    if (!job->frames.empty()) return DigestFrames(*job, out);
    std::vector<CopyTask> tasks;
    for (AgentPiece piece : job->pieces) {
      const absl::StatusOr<char*> source = Resolve(piece.source, 0, &keep);
      if (!source.ok()) return source.status();
      piece.PlaceAt(*source);
      tasks.push_back(std::move(piece.copy));
      tasks.back().dst = nullptr;
    }
    std::vector<Digest> digests(tasks.size());
    const absl::Status status =
        memory_->DigestEach(tasks, CopyOptions(), absl::MakeSpan(digests));
    if (!status.ok()) return status;
    for (const Digest& digest : digests) out->Put(digest);
    return status;
  }

  absl::Status DigestFrames(const AgentPack& job, AgentWriter* out) {
    std::vector<std::shared_ptr<const void>> keep;
    std::vector<PackPiece> pieces;
    for (AgentPiece piece : job.pieces) {
      const absl::StatusOr<char*> source = Resolve(piece.source, 0, &keep);
      if (!source.ok()) return source.status();
      piece.PlaceAt(*source);
      PackPiece placed;
      placed.offset = piece.offset;
      placed.copy = std::move(piece.copy);
      pieces.push_back(std::move(placed));
    }
    FrameDigestRequest request;
    request.pieces = pieces;
    request.frame_bytes = job.frame_bytes;
    request.frames = job.frames;
    const absl::StatusOr<std::vector<Digest>> digests =
        memory_->DigestFrames(request);
    if (!digests.ok()) return digests.status();
    for (const Digest& digest : *digests) out->Put(digest);
    return absl::OkStatus();
  }

  absl::Status ReadBytes(AgentReader* in, AgentWriter* out) {
    const AgentPlace place = in->Get<AgentPlace>();
    const int64_t bytes = in->Get<int64_t>();
    if (bytes < 0 || bytes > DeviceAgent::kMaxReadBytes)
      return BadJob("too much to be read at once");
    std::vector<std::shared_ptr<const void>> keep;
    const absl::StatusOr<char*> from = Resolve(place, bytes, &keep);
    if (!from.ok()) return from.status();
    if (place.kind == AgentPlace::Kind::kHost)
      return BadJob("host memory is read by who has it");
    std::string read(static_cast<size_t>(bytes), '\0');
    const absl::Status status = memory_->Read(
        *from, absl::MakeSpan(&read[0], static_cast<size_t>(bytes)));
    if (status.ok()) out->PutString(read);
    return status;
  }

  absl::Status MakeStore(AgentReader* in, AgentWriter* out) {
    const int64_t bytes = in->Get<int64_t>();
    AllocateOptions options;
    options.generation_slots = in->Get<int32_t>();
    options.name = in->GetString();
    if (!in->ok()) return absl::OkStatus();
    absl::StatusOr<std::unique_ptr<Segment>> segment =
        memory_->Allocate(bytes, options);
    if (!segment.ok()) return segment.status();
    ExportOptions to_daemon;
    to_daemon.pid = getppid();
    const absl::StatusOr<MemoryTicket> ticket =
        memory_->Export(**segment, to_daemon);
    if (!ticket.ok()) return ticket.status();
    absl::MutexLock lock(&mutex_);
    out->Put(++next_id_).Put(static_cast<int64_t>(sizeof(SegmentControl)));
    out->PutString(ticket->address).PutString(ticket->token);
    stores_[next_id_] = *std::move(segment);
    return absl::OkStatus();
  }

  absl::Status Copy(AgentReader* in) {
    const uint64_t count = in->Get<uint64_t>();
    std::vector<CopyTask> tasks;
    std::vector<std::shared_ptr<const void>> keep;
    for (uint64_t i = 0; i < count && in->ok(); ++i) {
      const AgentCopy copy = in->Get<AgentCopy>();
      const absl::StatusOr<char*> from = Resolve(copy.from, copy.bytes, &keep);
      if (!from.ok()) return from.status();
      const absl::StatusOr<char*> to = Resolve(copy.to, copy.bytes, &keep);
      if (!to.ok()) return to.status();
      CopyTask task;
      task.src = *from;
      task.dst = *to;
      task.run_bytes = copy.bytes;
      tasks.push_back(task);
    }
    return in->ok() ? memory_->Copy(tasks, CopyOptions(), nullptr)
                    : absl::OkStatus();
  }

  // One end of an edge. Used by one request at a time; `stop` ends that early.
  struct Channel {
    std::unique_ptr<tcp::PayloadChannel> end;
    std::atomic<bool> stop{false};
  };

  std::shared_ptr<Channel> FindChannel(uint64_t id) {
    absl::MutexLock lock(&channels_mutex_);
    const auto at = channels_.find(id);
    return at == channels_.end() ? nullptr : at->second;
  }

  absl::Status NewChannel(const std::string& peer, AgentWriter* out) {
    nccl::NcclDevice* device;
    {
      // NCCL is loaded when the first group wants it.
      absl::MutexLock lock(&nccl_mutex_);
      if (nccl_ == nullptr) {
        absl::StatusOr<std::unique_ptr<nccl::NcclDevice>> made =
            nccl::NcclDevice::Create(nccl_options_);
        if (!made.ok()) return made.status();
        nccl_ = *std::move(made);
      }
      device = nccl_.get();
    }
    absl::StatusOr<std::unique_ptr<tcp::PayloadChannel>> end =
        nccl::NewNcclChannel(device, peer);
    if (!end.ok()) return end.status();
    auto channel = std::make_shared<Channel>();
    channel->end = *std::move(end);
    uint64_t id;
    {
      absl::MutexLock lock(&mutex_);
      id = ++next_id_;
    }
    out->Put(id);
    absl::MutexLock lock(&channels_mutex_);
    channels_[id] = std::move(channel);
    return absl::OkStatus();
  }

  absl::Status UseChannel(AgentMessage type, AgentReader* in,
                          AgentWriter* out) {
    const std::shared_ptr<Channel> channel = FindChannel(in->Get<uint64_t>());
    if (channel == nullptr) return BadJob("a channel that is not there");
    const auto stopped = [&channel] { return channel->stop.load(); };
    if (type == AgentMessage::kChannelOffer) {
      const absl::StatusOr<std::string> offer = channel->end->Offer();
      if (offer.ok()) out->PutString(*offer);
      return offer.status();
    }
    if (type == AgentMessage::kChannelAccept) {
      const absl::StatusOr<tcp::PayloadChannel::Acceptance> accepted =
          channel->end->Accept(in->GetString());
      if (accepted.ok()) out->Put(accepted->agreed).PutString(accepted->answer);
      return accepted.status();
    }
    if (type == AgentMessage::kChannelAnswered) {
      const absl::StatusOr<bool> agreed =
          channel->end->Answered(in->GetString());
      if (agreed.ok()) out->Put(*agreed);
      return agreed.status();
    }
    const absl::Duration timeout = absl::Nanoseconds(in->Get<int64_t>());
    if (type == AgentMessage::kChannelConnect)
      return channel->end->Connect(timeout, stopped);
    const bool send = in->Get<bool>();
    const uint64_t count = in->Get<uint64_t>();
    std::vector<std::shared_ptr<const void>> keep;
    std::vector<absl::Span<char>> parts;
    std::vector<absl::Span<const char>> read_parts;
    for (uint64_t i = 0; i < count && in->ok(); ++i) {
      const AgentPart part = in->Get<AgentPart>();
      if (part.place.kind != AgentPlace::Kind::kHost &&
          part.place.kind != AgentPlace::Kind::kStore)
        return BadJob("a channel moves host memory and the store's");
      const absl::StatusOr<char*> data = Resolve(part.place, part.bytes, &keep);
      if (!data.ok()) return data.status();
      parts.push_back(absl::MakeSpan(*data, static_cast<size_t>(part.bytes)));
      read_parts.push_back(parts.back());
    }
    return send ? channel->end->Send(read_parts, timeout, stopped)
                : channel->end->Receive(parts, timeout, stopped);
  }

  const int socket_;
  std::atomic<bool> telling_usage_{false};
  CopyPool pool_;
  absl::Mutex send_mutex_;
  std::unique_ptr<FdServer> fds_;
  std::unique_ptr<HostMemory> host_;
  // Set once, before any request but kConfigure is handled.
  std::unique_ptr<CudaMemory> memory_;
  std::vector<std::unique_ptr<Segment>> slots_;
  int64_t slots_segments_bytes_ = 0;  // of slots_, as allocated

  absl::Mutex mutex_;
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::shared_ptr<const ImportedAllocation>> imports_
      ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::shared_ptr<HostMap>> hosts_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::shared_ptr<Segment>> stores_ ABSL_GUARDED_BY(mutex_);
  nccl::NcclOptions nccl_options_;  // set by kConfigure
  // Held while NCCL is loaded, which takes as long as a disk does.
  absl::Mutex nccl_mutex_;
  std::unique_ptr<nccl::NcclDevice> nccl_ ABSL_GUARDED_BY(nccl_mutex_);
  // Never held for long: pings wait behind who takes it.
  absl::Mutex channels_mutex_;
  std::map<uint64_t, std::shared_ptr<Channel>> channels_
      ABSL_GUARDED_BY(channels_mutex_);
};

}  // namespace

int RunDeviceAgent(int socket) {
  signal(SIGPIPE, SIG_IGN);
  // The daemon ends its agents; a terminal's interrupt is for the daemon.
  signal(SIGINT, SIG_IGN);
  // Of this process alone, before its first call of CUDA: a queue of the GPU
  // for each of its streams (transport/nccl/nccl_channel.h says why). The
  // default is 8, and 32 the most.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  return AgentServer(socket).Run();
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
