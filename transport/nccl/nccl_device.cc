#include "transport/nccl/nccl_device.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
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

// For a channel of the last update to give back what the sender, whose channel
// has, offers for the next.
constexpr absl::Duration kHandOver = absl::Milliseconds(500);
// How often it is looked whether one has not been used for too long.
constexpr absl::Duration kLookEvery = absl::Seconds(10);

}  // namespace

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
  std::random_device random;
  device->process_ = (static_cast<uint64_t>(random()) << 32) | random();
  LOG(INFO) << "NCCL on " << info->uuid << ": maxCTAs " << options.max_ctas
            << ", CTAPolicy " << options.cta_policy << ", "
            << (settings->empty() ? "no NCCL_* settings" : *settings);
  {
    absl::MutexLock lock(&device->mutex_);
    device->settings_ = *settings;
  }
  device->reaper_ = std::thread([device = device.get()] { device->Reap(); });
  return device;
}

NcclDevice::~NcclDevice() {
  if (reaper_.joinable()) {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    reaper_.join();
  }
  std::vector<Ending> endings;
  {
    absl::MutexLock lock(&mutex_);
    endings.swap(endings_);
    for (Communicator& kept : kept_.TakeAll())
      endings.push_back({std::move(kept), true});
    if (hung_) return;
  }
  // A good end takes the peer, and this process has no time for that.
  for (Ending& ending : endings) ending.healthy = false;
  EndAll(endings);
  absl::MutexLock lock(&mutex_);
  if (hung_ || cudaSetDevice(ordinal_) != cudaSuccess) return;
  for (const Lane& lane : free_) FreeLane(lane);
}

int NcclDevice::communicators() const {
  absl::MutexLock lock(&mutex_);
  return communicators_;
}

int NcclDevice::idle_communicators() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(kept_.size());
}

int64_t NcclDevice::staging_bytes() const {
  absl::MutexLock lock(&mutex_);
  return lanes_ * options_.staging_bytes;
}

int64_t NcclDevice::communicator_bytes() const {
  absl::MutexLock lock(&mutex_);
  return communicator_bytes_;
}

absl::Status NcclDevice::MakeLane(Lane* lane) {
  absl::Status status = CheckCuda(cudaSetDevice(ordinal_), "cudaSetDevice");
  if (status.ok()) {
    status = CheckCuda(cudaMalloc(reinterpret_cast<void**>(&lane->staging),
                                  options_.staging_bytes),
                       "cudaMalloc of a staging buffer");
  }
  // Before what others compute, where the GPU has to choose: it is short.
  int least = 0, greatest = 0;
  cudaDeviceGetStreamPriorityRange(&least, &greatest);
  for (cudaStream_t* stream : {&lane->stream, &lane->copies}) {
    if (!status.ok()) break;
    status = CheckCuda(
        cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, greatest),
        "cudaStreamCreateWithPriority");
  }
  for (cudaEvent_t* event :
       {&lane->moved[0], &lane->moved[1], &lane->copied[0], &lane->copied[1]}) {
    if (!status.ok()) break;
    status = CheckCuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming),
                       "cudaEventCreateWithFlags");
  }
  return status;
}

void NcclDevice::FreeLane(const Lane& lane) {
  for (int half = 0; half < 2; ++half) {
    if (lane.moved[half] != nullptr) cudaEventDestroy(lane.moved[half]);
    if (lane.copied[half] != nullptr) cudaEventDestroy(lane.copied[half]);
  }
  if (lane.stream != nullptr) cudaStreamDestroy(lane.stream);
  if (lane.copies != nullptr) cudaStreamDestroy(lane.copies);
  if (lane.staging != nullptr) cudaFree(lane.staging);
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
  const absl::Status status = MakeLane(&lane);
  if (!status.ok()) {
    FreeLane(lane);
    return status;
  }
  absl::MutexLock lock(&mutex_);
  ++lanes_;
  return lane;
}

void NcclDevice::GiveBack(const Lane& lane) {
  absl::MutexLock lock(&mutex_);
  if (!hung_) free_.push_back(lane);
}

void NcclDevice::Made(const Communicator& made) {
  absl::MutexLock lock(&mutex_);
  ++communicators_;
  communicator_bytes_ += made.memory_bytes;
  in_use_.push_back(made.id);
}

void NcclDevice::NoLongerUsed(const Communicator& communicator) {
  in_use_.erase(std::remove_if(in_use_.begin(), in_use_.end(),
                               [&](const ncclUniqueId& used) {
                                 return communicator.Is(used);
                               }),
                in_use_.end());
}

bool NcclDevice::IsWell(ncclComm_t comm, cudaStream_t stream) const {
  // An error of a GPU that is lost stays.
  if (cudaSetDevice(ordinal_) != cudaSuccess ||
      cudaStreamQuery(stream) != cudaSuccess)
    return false;
  ncclResult_t state = ncclInternalError;
  return library_->api().CommGetAsyncError(comm, &state) == ncclSuccess &&
         state == ncclSuccess;
}

absl::optional<Communicator> NcclDevice::TakeKept(const std::string& peer,
                                                  int rank, cudaStream_t stream,
                                                  const ncclUniqueId* id) {
  while (true) {
    absl::optional<Communicator> taken;
    {
      absl::MutexLock lock(&mutex_);
      const auto settled = [this, id]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return std::none_of(in_use_.begin(), in_use_.end(),
                            [id](const ncclUniqueId& used) {
                              return memcmp(&used, id, sizeof(used)) == 0;
                            });
      };
      if (id != nullptr)
        mutex_.AwaitWithTimeout(absl::Condition(&settled), kHandOver);
      if (hung_) return absl::nullopt;
      taken = kept_.Take(peer, rank, id);
      if (!taken.has_value()) return absl::nullopt;
      in_use_.push_back(taken->id);
    }
    if (IsWell(taken->comm, stream)) return taken;
    Discard(*std::move(taken), /*healthy=*/false);
    if (id != nullptr) return absl::nullopt;
  }
}

void NcclDevice::Keep(Communicator communicator, cudaStream_t stream) {
  if (!IsWell(communicator.comm, stream)) {
    Discard(std::move(communicator), /*healthy=*/false);
    return;
  }
  absl::MutexLock lock(&mutex_);
  NoLongerUsed(communicator);
  VLOG(1) << "a communicator with " << communicator.peer << " is kept";
  for (Communicator& gone : kept_.Put(std::move(communicator), absl::Now()))
    endings_.push_back({std::move(gone), true});
}

void NcclDevice::Discard(Communicator communicator, bool healthy) {
  absl::MutexLock lock(&mutex_);
  NoLongerUsed(communicator);
  endings_.push_back({std::move(communicator), healthy});
}

void NcclDevice::PeerIs(const std::string& peer, int rank, uint64_t process) {
  absl::MutexLock lock(&mutex_);
  for (Communicator& gone : kept_.TakeOfOthers(peer, rank, process))
    endings_.push_back({std::move(gone), false});
}

void NcclDevice::Reap() {
  while (true) {
    std::vector<Ending> endings;
    {
      absl::MutexLock lock(&mutex_);
      const auto any = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !endings_.empty();
      };
      mutex_.AwaitWithTimeout(absl::Condition(&any),
                              std::min(kLookEvery, options_.keep_limit / 4));
      if (stopping_) return;
      endings.swap(endings_);
      for (Communicator& gone : kept_.TakeExpired(absl::Now()))
        endings.push_back({std::move(gone), true});
    }
    EndAll(endings);
  }
}

absl::Duration NcclDevice::EndDeadline(bool healthy) const {
  return options_.abort_deadline +
         (healthy ? options_.finalize_deadline : absl::ZeroDuration());
}

void NcclDevice::EndAll(const std::vector<Ending>& endings) {
  std::vector<Done> begun;
  const absl::Time start = absl::Now();
  for (const Ending& ending : endings)
    begun.push_back(BeginEnd(ending.communicator, ending.healthy));
  for (size_t i = 0; i < endings.size(); ++i) {
    const absl::Time until = start + EndDeadline(endings[i].healthy);
    AwaitEnd(begun[i], endings[i].communicator,
             std::max(absl::ZeroDuration(), until - absl::Now()));
  }
}

bool NcclDevice::End(const Communicator& communicator, bool healthy) {
  return AwaitEnd(BeginEnd(communicator, healthy), communicator,
                  EndDeadline(healthy));
}

NcclDevice::Done NcclDevice::BeginEnd(const Communicator& communicator,
                                      bool healthy) const {
  // On a thread of its own, which is left behind if it hangs.
  const auto done = std::make_shared<absl::Notification>();
  std::thread([comm = communicator.comm, healthy, done, api = library_->api(),
               ordinal = ordinal_, deadline = options_.finalize_deadline] {
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
  return done;
}

bool NcclDevice::AwaitEnd(const Done& done, const Communicator& communicator,
                          absl::Duration deadline) {
  const bool returned = done->WaitForNotificationWithTimeout(deadline);
  bool first = false;
  {
    absl::MutexLock lock(&mutex_);
    --communicators_;
    communicator_bytes_ -= communicator.memory_bytes;
    NoLongerUsed(communicator);
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

absl::Status NcclDevice::CheckSettings() {
  const absl::StatusOr<std::string> settings = CheckNcclEnvironment(environ);
  if (!settings.ok()) return settings.status();
  absl::MutexLock lock(&mutex_);
  if (settings_ == *settings) return absl::OkStatus();
  settings_ = *settings;
  LOG(INFO) << "NCCL on " << uuid_ << ", with its files: " << settings_;
  return absl::OkStatus();
}

}  // namespace nccl
}  // namespace transport
}  // namespace weightsync
