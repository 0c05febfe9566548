#include "transport/nccl/nccl_channel.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/device.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace nccl {
namespace {

using cuda::CheckCuda;

// What the sender tells the receiver. Read by processes of other builds: only a
// new magic changes it.
struct Offer {
  char magic[8];
  int32_t nccl_version;
  int32_t staging_kib;  // both ends cut at multiples of it
  char device_uuid[48];
  ncclUniqueId id;
};
constexpr char kMagic[8] = {'W', 'S', 'N', 'C', 'C', '0', '0', '1'};
static_assert(sizeof(ncclUniqueId) == 128, "part of the format");

}  // namespace

class NcclChannel final : public tcp::PayloadChannel {
 public:
  explicit NcclChannel(NcclDevice* device, const NcclDevice::Lane& lane)
      : device_(device), lane_(lane) {}
  ~NcclChannel() override {
    // After an error there is none any more.
    Stop(/*healthy=*/true);
    device_->GiveBack(lane_);
  }

  absl::StatusOr<std::string> Offer() override {
    nccl::Offer offer = {};
    memcpy(offer.magic, kMagic, sizeof(kMagic));
    offer.nccl_version = device_->library().version();
    offer.staging_kib =
        static_cast<int32_t>(device_->options_.staging_bytes >> 10);
    strncpy(offer.device_uuid, device_->device_uuid().c_str(),
            sizeof(offer.device_uuid) - 1);
    const absl::Status status =
        device_->library().Check(api().GetUniqueId(&id_), "ncclGetUniqueId");
    if (!status.ok()) return status;
    const absl::Status settings = device_->CheckSettings();
    if (!settings.ok()) return settings;
    offer.id = id_;
    rank_ = 0;
    return std::string(reinterpret_cast<const char*>(&offer), sizeof(offer));
  }

  absl::Status Accept(absl::string_view bytes) override {
    nccl::Offer offer;
    if (bytes.size() != sizeof(offer) ||
        memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0) {
      return MakeError(absl::StatusCode::kInvalidArgument, "NOT_A_PEER",
                       "what was sent as an offer of NCCL is none (another "
                       "release of weightsync?)");
    }
    memcpy(&offer, bytes.data(), sizeof(offer));
    const int own = device_->library().version();
    if (offer.nccl_version != own) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "NCCL_VERSION_MISMATCH",
          absl::StrCat("the sender has NCCL ",
                       NcclVersionText(offer.nccl_version),
                       " and the receiver ", NcclVersionText(own), " (",
                       device_->library().path(),
                       "): install one version on all nodes, or choose "
                       "--group=tcp"));
    }
    if (std::string(offer.device_uuid) == device_->device_uuid()) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "SAME_GPU",
          absl::StrCat("both ends are on ", device_->device_uuid(),
                       ", and NCCL refuses two ranks on one GPU: bytes stay "
                       "there by CUDA IPC"));
    }
    if (offer.staging_kib !=
        static_cast<int32_t>(device_->options_.staging_bytes >> 10)) {
      return MakeError(absl::StatusCode::kFailedPrecondition,
                       "NCCL_OPTIONS_MISMATCH",
                       absl::StrCat("the sender stages ", offer.staging_kib,
                                    " KiB at a time and the receiver ",
                                    device_->options_.staging_bytes >> 10,
                                    ": give all nodes the same"));
    }
    id_ = offer.id;
    rank_ = 1;
    return absl::OkStatus();
  }

  absl::Status Connect(absl::Duration timeout,
                       const Stopped& stopped) override {
    absl::Status status = Use();
    if (!status.ok()) return status;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.minCTAs = 1;
    config.maxCTAs = device_->options_.max_ctas;
    config.CTAPolicy = device_->options_.cta_policy;
    status = device_->library().Check(
        api().CommInitRankConfig(&comm_, 2, id_, rank_, &config),
        "ncclCommInitRankConfig");
    if (comm_ != nullptr) {
      absl::MutexLock lock(&device_->mutex_);
      ++device_->communicators_;
    }
    // For who receives this is the first call that reads files.
    if (status.ok()) status = device_->CheckSettings();
    if (status.ok()) {
      status = WaitFor(timeout, stopped, "ncclCommInitRankConfig",
                       [] { return cudaSuccess; });
    }
    if (!status.ok()) Stop(/*healthy=*/false);
    return status;
  }

  absl::Status Send(absl::Span<const absl::Span<const char>> parts,
                    absl::Duration timeout, const Stopped& stopped) override {
    return InPieces(
        parts,
        [&](const std::vector<absl::Span<const char>>& piece,
            int64_t bytes) -> absl::Status {
          int64_t at = 0;
          for (const absl::Span<const char> part : piece) {
            const absl::Status status = CheckCuda(
                cudaMemcpyAsync(lane_.staging + at, part.data(), part.size(),
                                cudaMemcpyDefault, lane_.stream),
                "cudaMemcpyAsync");
            if (!status.ok()) return status;
            at += static_cast<int64_t>(part.size());
          }
          const absl::Status status = device_->library().Check(
              api().Send(lane_.staging, bytes, ncclUint8, 1 - rank_, comm_,
                         lane_.stream),
              "ncclSend");
          if (!status.ok()) return status;
          return WaitStream(timeout, stopped, "ncclSend");
        });
  }

  absl::Status Receive(absl::Span<const absl::Span<char>> parts,
                       absl::Duration timeout,
                       const Stopped& stopped) override {
    return InPieces(parts,
                    [&](const std::vector<absl::Span<char>>& piece,
                        int64_t bytes) -> absl::Status {
                      absl::Status status = device_->library().Check(
                          api().Recv(lane_.staging, bytes, ncclUint8, 1 - rank_,
                                     comm_, lane_.stream),
                          "ncclRecv");
                      // Only what has come whole is copied to where it belongs:
                      // after an error of NCCL contents are undefined, and
                      // nobody's memory may be touched by what goes on
                      // meanwhile.
                      if (status.ok())
                        status = WaitStream(timeout, stopped, "ncclRecv");
                      int64_t at = 0;
                      for (size_t i = 0; status.ok() && i < piece.size(); ++i) {
                        status = CheckCuda(
                            cudaMemcpyAsync(piece[i].data(), lane_.staging + at,
                                            piece[i].size(), cudaMemcpyDefault,
                                            lane_.stream),
                            "cudaMemcpyAsync");
                        at += static_cast<int64_t>(piece[i].size());
                      }
                      return status.ok() ? AwaitCopies(timeout) : status;
                    });
  }

 private:
  const NcclApi& api() const { return device_->library().api(); }

  absl::Status Use() {
    return CheckCuda(cudaSetDevice(device_->ordinal_), "cudaSetDevice");
  }

  // Cuts the parts into pieces that fit the staging buffer; neighbours in
  // memory become one. Both ends cut at the same bytes.
  template <typename Byte, typename Do>
  absl::Status InPieces(absl::Span<const absl::Span<Byte>> parts, Do piece_do) {
    if (comm_ == nullptr)
      return absl::FailedPreconditionError("the channel is not connected");
    absl::Status status = Use();
    std::vector<absl::Span<Byte>> piece;
    int64_t bytes = 0;
    const auto flush = [&]() -> absl::Status {
      if (bytes == 0) return absl::OkStatus();
      const absl::Status done = piece_do(piece, bytes);
      piece.clear();
      bytes = 0;
      return done;
    };
    for (absl::Span<Byte> part : parts) {
      while (status.ok() && !part.empty()) {
        const int64_t room = device_->options_.staging_bytes - bytes;
        const absl::Span<Byte> head =
            part.subspan(0, static_cast<size_t>(room));
        part.remove_prefix(head.size());
        if (!piece.empty() &&
            piece.back().data() + piece.back().size() == head.data()) {
          piece.back() = absl::Span<Byte>(piece.back().data(),
                                          piece.back().size() + head.size());
        } else {
          piece.push_back(head);
        }
        bytes += static_cast<int64_t>(head.size());
        if (bytes == device_->options_.staging_bytes) status = flush();
      }
    }
    if (status.ok()) status = flush();
    if (!status.ok()) Stop(/*healthy=*/false);
    return status;
  }

  absl::Status WaitStream(absl::Duration timeout, const Stopped& stopped,
                          const char* what) {
    return WaitFor(timeout, stopped, what,
                   [this] { return cudaStreamQuery(lane_.stream); });
  }

  // Of bytes that go to somebody's memory: no way out but their end, whatever
  // becomes of the edge meanwhile. Where there is none, nobody knows when they
  // come, and only the end of the process says that they do not.
  absl::Status AwaitCopies(absl::Duration timeout) {
    const absl::Time start = absl::Now();
    while (true) {
      const cudaError_t done = cudaStreamQuery(lane_.stream);
      if (done != cudaErrorNotReady)
        return CheckCuda(done, "cudaMemcpyAsync of what was received");
      const absl::Duration waited = absl::Now() - start;
      if (waited > timeout) {
        return MakeError(
            absl::StatusCode::kDeadlineExceeded, "DEVICE_STALLED",
            absl::StrCat("a copy of what was received has not ended on ",
                         device_->device_uuid(), " for ",
                         absl::FormatDuration(timeout),
                         "; the process that gave it must be started again"));
      }
      if (waited < absl::Microseconds(100)) {
        std::this_thread::yield();
      } else {
        absl::SleepFor(std::min(waited / 20, absl::Microseconds(500)));
      }
    }
  }

  // Until NCCL has nothing in progress and `query` is done. The deadline is one
  // of progress: each call moves at most a staging buffer.
  template <typename Query>
  absl::Status WaitFor(absl::Duration timeout, const Stopped& stopped,
                       const char* what, Query query) {
    const absl::Time start = absl::Now();
    while (true) {
      ncclResult_t state = ncclSuccess;
      absl::Status status = device_->library().Check(
          api().CommGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
      if (status.ok()) status = device_->library().Check(state, what);
      if (!status.ok()) return status;
      const cudaError_t done = query();
      if (done != cudaSuccess && done != cudaErrorNotReady)
        return CheckCuda(done, what);
      if (done == cudaSuccess && state == ncclSuccess) return absl::OkStatus();
      if (stopped()) {
        return MakeError(absl::StatusCode::kCancelled, "GROUP_CLOSED",
                         absl::StrCat(what, ": the group ends"));
      }
      const absl::Duration waited = absl::Now() - start;
      if (waited > timeout) {
        // Without a reason of its own: it is the edge that is lost.
        return absl::UnavailableError(
            absl::StrCat(what, ": the peer has not come for ",
                         absl::FormatDuration(timeout)));
      }
      if (waited < absl::Microseconds(100)) {
        std::this_thread::yield();
      } else {
        absl::SleepFor(std::min(waited / 20, absl::Microseconds(500)));
      }
    }
  }

  void Stop(bool healthy) {
    if (comm_ == nullptr) return;
    device_->End(comm_, healthy);
    comm_ = nullptr;
  }

  NcclDevice* const device_;
  const NcclDevice::Lane lane_;
  ncclUniqueId id_ = {};
  int rank_ = 0;
  ncclComm_t comm_ = nullptr;
};

absl::StatusOr<std::unique_ptr<NcclDevice>> NcclDevice::Create(
    const NcclOptions& options) {
  const absl::StatusOr<std::string> settings = CheckNcclEnvironment(environ);
  if (!settings.ok()) return settings.status();
  if (options.staging_bytes < 1024 || options.staging_bytes % 1024 != 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SIZE",
                     absl::StrCat("a staging buffer of ", options.staging_bytes,
                                  " bytes; it is whole KiB"));
  }
  std::unique_ptr<NcclDevice> device(new NcclDevice(options));
  absl::StatusOr<std::unique_ptr<NcclLibrary>> library =
      NcclLibrary::Load(options.library);
  if (!library.ok()) return library.status();
  device->library_ = *std::move(library);
  const absl::StatusOr<cuda::DeviceInfo> info =
      cuda::FindDevice(options.device_uuid);
  if (!info.ok()) return info.status();
  device->uuid_ = info->uuid;
  device->ordinal_ = info->ordinal;
  LOG(INFO) << "NCCL on " << info->uuid << ": maxCTAs " << options.max_ctas
            << ", CTAPolicy " << options.cta_policy << ", "
            << (settings->empty() ? "no NCCL_* settings" : *settings);
  absl::MutexLock lock(&device->mutex_);
  device->settings_ = *settings;
  return device;
}

NcclDevice::~NcclDevice() {
  absl::MutexLock lock(&mutex_);
  if (hung_ || cudaSetDevice(ordinal_) != cudaSuccess) return;
  for (const Lane& lane : free_) {
    cudaStreamDestroy(lane.stream);
    cudaFree(lane.staging);
  }
}

int NcclDevice::communicators() const {
  absl::MutexLock lock(&mutex_);
  return communicators_;
}

int64_t NcclDevice::staging_bytes() const {
  absl::MutexLock lock(&mutex_);
  return lanes_ * options_.staging_bytes;
}

absl::StatusOr<NcclDevice::Lane> NcclDevice::TakeLane() {
  {
    absl::MutexLock lock(&mutex_);
    if (hung_) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "NCCL_HUNG",
                       "an end of NCCL in this process never returned; the "
                       "process must be started again");
    }
    if (!free_.empty()) {
      const Lane lane = free_.back();
      free_.pop_back();
      return lane;
    }
  }
  Lane lane;
  absl::Status status = CheckCuda(cudaSetDevice(ordinal_), "cudaSetDevice");
  if (status.ok()) {
    status = CheckCuda(cudaMalloc(reinterpret_cast<void**>(&lane.staging),
                                  options_.staging_bytes),
                       "cudaMalloc of a staging buffer");
  }
  if (status.ok()) {
    // Before what others compute, where the GPU has to choose: it is short.
    int least = 0, greatest = 0;
    cudaDeviceGetStreamPriorityRange(&least, &greatest);
    status = CheckCuda(cudaStreamCreateWithPriority(
                           &lane.stream, cudaStreamNonBlocking, greatest),
                       "cudaStreamCreateWithPriority");
    if (!status.ok()) cudaFree(lane.staging);
  }
  if (!status.ok()) return status;
  absl::MutexLock lock(&mutex_);
  ++lanes_;
  return lane;
}

void NcclDevice::GiveBack(const Lane& lane) {
  absl::MutexLock lock(&mutex_);
  if (!hung_) free_.push_back(lane);
}

absl::StatusOr<std::unique_ptr<tcp::PayloadChannel>> NcclDevice::NewChannel() {
  const absl::StatusOr<Lane> lane = TakeLane();
  if (!lane.ok()) return lane.status();
  return std::unique_ptr<tcp::PayloadChannel>(new NcclChannel(this, *lane));
}

absl::Status NcclDevice::CheckSettings() {
  const absl::StatusOr<std::string> settings = CheckNcclEnvironment(environ);
  if (!settings.ok()) return settings.status();
  absl::MutexLock lock(&mutex_);
  if (settings_ == *settings) return absl::OkStatus();
  settings_ = *settings;
  LOG(INFO) << "NCCL on " << uuid_ << ", with its files: " << settings_;
  return absl::OkStatus();
}

bool NcclDevice::End(ncclComm_t comm, bool healthy) {
  // On a thread of its own, which is left behind if it hangs.
  const auto done = std::make_shared<absl::Notification>();
  std::thread([comm, healthy, done, api = library_->api(), ordinal = ordinal_,
               deadline = options_.finalize_deadline] {
    cudaSetDevice(ordinal);
    ncclResult_t state = ncclInternalError;
    if (healthy) {
      const absl::Time until = absl::Now() + deadline;
      state = api.CommFinalize(comm);
      while (state == ncclInProgress && absl::Now() < until) {
        absl::SleepFor(absl::Milliseconds(1));
        const ncclResult_t asked = api.CommGetAsyncError(comm, &state);
        if (asked != ncclSuccess) state = asked;
      }
      if (state != ncclSuccess) {
        LOG(WARNING) << "a communicator is aborted, because ncclCommFinalize "
                     << (state == ncclInProgress ? "does not end"
                                                 : api.GetErrorString(state));
      }
    }
    const ncclResult_t result =
        state == ncclSuccess ? api.CommDestroy(comm) : api.CommAbort(comm);
    if (result != ncclSuccess && result != ncclInProgress) {
      LOG(WARNING) << (state == ncclSuccess ? "ncclCommDestroy: "
                                            : "ncclCommAbort: ")
                   << api.GetErrorString(result);
    }
    done->Notify();
  }).detach();
  const absl::Duration deadline =
      options_.abort_deadline +
      (healthy ? options_.finalize_deadline : absl::ZeroDuration());
  const bool returned = done->WaitForNotificationWithTimeout(deadline);
  bool first = false;
  {
    absl::MutexLock lock(&mutex_);
    --communicators_;
    if (!returned && !hung_) hung_ = first = true;
  }
  if (first) {
    const absl::Status status = MakeError(
        absl::StatusCode::kDeadlineExceeded, "NCCL_HUNG",
        absl::StrCat("the end of a communicator of NCCL on ", uuid_,
                     " has not returned for ", absl::FormatDuration(deadline)));
    LOG(ERROR) << status.message();
    if (options_.on_hung != nullptr) options_.on_hung(status);
  }
  return returned;
}

absl::StatusOr<std::unique_ptr<tcp::Endpoint>> CreateNcclEndpoint(
    tcp::EndpointOptions options, NcclDevice* device) {
  options.payload = [device] { return device->NewChannel(); };
  return tcp::Endpoint::Create(std::move(options));
}

}  // namespace nccl
}  // namespace transport
}  // namespace weightsync
