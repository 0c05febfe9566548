#include "transport/nccl/nccl_channel.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "transport/cuda/cuda_error.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace nccl {
namespace {

using cuda::CheckCuda;

// Of two ranks, with few channels: more has another reason.
constexpr int64_t kMaxCommunicatorBytes = int64_t{512} << 20;

// What the sender tells the receiver. Read by processes of other builds: only a
// new magic changes it.
struct Offer {
  char magic[8];
  int32_t nccl_version;
  int32_t staging_kib;  // both ends cut at multiples of its half
  char device_uuid[48];
  uint64_t process;  // the sender's
  // Of a communicator that the sender has kept: what was completed on it.
  // Otherwise one is to be made.
  uint32_t kept;
  uint32_t reserved;
  uint64_t operations, bytes;
  ncclUniqueId id;
};
constexpr char kMagic[8] = {'W', 'S', 'N', 'C', 'C', '0', '0', '2'};
static_assert(sizeof(ncclUniqueId) == 128, "part of the format");
static_assert(sizeof(Offer) == 224, "part of the format");

struct Answer {
  char magic[8];     // the offer's
  uint64_t process;  // the receiver's
  uint32_t agreed;
  uint32_t reserved;
};
static_assert(sizeof(Answer) == 24, "part of the format");

template <typename T>
std::string AsBytes(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

// At most as many bytes as fit into half a staging buffer, in parts one after
// another; neighbours in memory are one part.
template <typename Byte>
struct Piece {
  std::vector<absl::Span<Byte>> parts;
  int64_t bytes = 0;
};

// Both ends cut at the same bytes.
template <typename Byte>
std::vector<Piece<Byte>> Cut(absl::Span<const absl::Span<Byte>> parts,
                             int64_t most) {
  std::vector<Piece<Byte>> pieces;
  for (absl::Span<Byte> part : parts) {
    while (!part.empty()) {
      if (pieces.empty() || pieces.back().bytes == most) pieces.emplace_back();
      Piece<Byte>& piece = pieces.back();
      const absl::Span<Byte> head =
          part.subspan(0, static_cast<size_t>(most - piece.bytes));
      part.remove_prefix(head.size());
      piece.bytes += static_cast<int64_t>(head.size());
      if (!piece.parts.empty() &&
          piece.parts.back().data() + piece.parts.back().size() ==
              head.data()) {
        piece.parts.back() = absl::Span<Byte>(
            piece.parts.back().data(), piece.parts.back().size() + head.size());
      } else {
        piece.parts.push_back(head);
      }
    }
  }
  return pieces;
}

// Longer and longer, with what is waited for.
void Pause(absl::Duration waited) {
  if (waited < absl::Microseconds(100)) {
    std::this_thread::yield();
  } else {
    absl::SleepFor(std::min(waited / 20, absl::Microseconds(500)));
  }
}

}  // namespace

// Bytes go through the two halves of the lane's staging buffer in turn: while
// NCCL moves a piece, the next (or the last) is copied.
class NcclChannel final : public tcp::PayloadChannel {
 public:
  static absl::StatusOr<std::unique_ptr<PayloadChannel>> Make(
      NcclDevice* device, const std::string& peer) {
    const absl::StatusOr<NcclDevice::Lane> lane = device->TakeLane();
    if (!lane.ok()) return lane.status();
    return std::unique_ptr<PayloadChannel>(
        new NcclChannel(device, *lane, peer));
  }
  ~NcclChannel() override {
    if (connected_ && finished_ && has_communicator()) {
      device_->Keep(std::move(communicator_), lane_.stream);
    } else if (connected_) {
      // After an error there is none any more.
      Stop(/*healthy=*/true);
    } else {
      // One that was offered and not used.
      Refused();
    }
    // One that does not come to rest is of no use to anybody.
    if (AtRest()) device_->GiveBack(lane_);
  }

  absl::StatusOr<std::string> Offer() override {
    const absl::Status settings = device_->CheckSettings();
    if (!settings.ok()) return settings;
    nccl::Offer offer = {};
    memcpy(offer.magic, kMagic, sizeof(kMagic));
    offer.nccl_version = device_->library().version();
    offer.staging_kib =
        static_cast<int32_t>(device_->options_.staging_bytes >> 10);
    strncpy(offer.device_uuid, device_->device_uuid().c_str(),
            sizeof(offer.device_uuid) - 1);
    offer.process = device_->process();
    if (!offered_) TakeKept(/*rank=*/0, nullptr);
    offered_ = true;
    if (has_communicator()) {
      offer.kept = 1;
      offer.operations = communicator_.operations;
      offer.bytes = communicator_.bytes;
    } else {
      // Not before it is needed: each makes NCCL listen for its ranks.
      const absl::Status status = device_->library().Check(
          api().GetUniqueId(&communicator_.id), "ncclGetUniqueId");
      if (!status.ok()) return status;
      const absl::Status settings = device_->CheckSettings();
      if (!settings.ok()) return settings;
      communicator_.rank = 0;
    }
    offer.id = communicator_.id;
    return AsBytes(offer);
  }

  absl::StatusOr<Acceptance> Accept(absl::string_view bytes) override {
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
    if (std::string(offer.device_uuid,
                    strnlen(offer.device_uuid, sizeof(offer.device_uuid))) ==
        device_->device_uuid()) {
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
    device_->PeerIs(peer_, /*rank=*/1, offer.process);
    Acceptance acceptance;
    if (offer.kept != 0) {
      TakeKept(/*rank=*/1, &offer.id);
      acceptance.agreed = has_communicator() &&
                          communicator_.operations == offer.operations &&
                          communicator_.bytes == offer.bytes;
      if (!acceptance.agreed) Refused();
    } else {
      communicator_.id = offer.id;
      communicator_.rank = 1;
      communicator_.peer_process = offer.process;
    }
    nccl::Answer answer = {};
    memcpy(answer.magic, kMagic, sizeof(kMagic));
    answer.process = device_->process();
    answer.agreed = acceptance.agreed;
    acceptance.answer = AsBytes(answer);
    return acceptance;
  }

  absl::StatusOr<bool> Answered(absl::string_view bytes) override {
    nccl::Answer answer;
    if (bytes.size() != sizeof(answer) ||
        memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0) {
      return MakeError(absl::StatusCode::kInvalidArgument, "NOT_A_PEER",
                       "what was sent as an answer of NCCL is none (another "
                       "release of weightsync?)");
    }
    memcpy(&answer, bytes.data(), sizeof(answer));
    device_->PeerIs(peer_, /*rank=*/0, answer.process);
    communicator_.peer_process = answer.process;
    if (answer.agreed == 0) Refused();
    return answer.agreed != 0;
  }

  absl::Status Connect(absl::Duration timeout,
                       const Stopped& stopped) override {
    if (has_communicator()) {
      // It has been.
      connected_ = true;
      return absl::OkStatus();
    }
    absl::Status status = Use();
    if (!status.ok()) return status;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.minCTAs = 1;
    config.maxCTAs = device_->options_.max_ctas;
    config.CTAPolicy = device_->options_.cta_policy;
    connected_ = true;
    communicator_.peer = peer_;
    const int64_t free_before = FreeBytes();
    const absl::Time start = absl::Now();
    status = device_->library().Check(
        api().CommInitRankConfig(&communicator_.comm, 2, communicator_.id,
                                 communicator_.rank, &config),
        "ncclCommInitRankConfig");
    // For who receives this is the first call that reads files.
    if (status.ok()) status = device_->CheckSettings();
    if (status.ok()) {
      status = WaitFor(timeout, stopped, "ncclCommInitRankConfig",
                       [] { return cudaSuccess; });
    }
    if (status.ok()) status = MoveFirst(start + timeout, stopped);
    if (has_communicator()) {
      // NCCL does not say what it takes: this is a guess, and no wild one. Of
      // the whole GPU: what others take and free meanwhile counts as well.
      communicator_.memory_bytes =
          std::min(std::max<int64_t>(0, free_before - FreeBytes()),
                   kMaxCommunicatorBytes);
      device_->Made(communicator_);
    }
    if (!status.ok()) {
      Stop(/*healthy=*/false);
      return status;
    }
    LOG(INFO) << "a communicator of NCCL "
              << (communicator_.rank == 0 ? "to " : "from ") << peer_
              << " was made in " << absl::FormatDuration(absl::Now() - start)
              << "; there are " << device_->communicators();
    return status;
  }

  absl::Status Send(absl::Span<const absl::Span<const char>> parts,
                    absl::Duration timeout, const Stopped& stopped) override {
    absl::Status status = Begin();
    if (!status.ok()) return status;
    status = SendPieces(Cut(parts, device_->half_bytes()), timeout, stopped);
    return End(status, timeout);
  }

  absl::Status Receive(absl::Span<const absl::Span<char>> parts,
                       absl::Duration timeout,
                       const Stopped& stopped) override {
    absl::Status status = Begin();
    if (!status.ok()) return status;
    status = ReceivePieces(Cut(parts, device_->half_bytes()), timeout, stopped);
    return End(status, timeout);
  }

  void Finish() override { finished_ = true; }

 private:
  NcclChannel(NcclDevice* device, const NcclDevice::Lane& lane,
              const std::string& peer)
      : device_(device), lane_(lane), peer_(peer) {
    communicator_.peer = peer;
  }

  const NcclApi& api() const { return device_->library().api(); }
  bool has_communicator() const { return communicator_.comm != nullptr; }
  char* half(size_t piece) const {
    return lane_.staging +
           static_cast<int64_t>(piece % 2) * device_->half_bytes();
  }

  absl::Status Use() {
    return CheckCuda(cudaSetDevice(device_->ordinal_), "cudaSetDevice");
  }

  static int64_t FreeBytes() {
    size_t free = 0, total = 0;
    // 0 where it cannot be told.
    return cudaMemGetInfo(&free, &total) == cudaSuccess
               ? static_cast<int64_t>(free)
               : 0;
  }

  void TakeKept(int rank, const ncclUniqueId* id) {
    absl::optional<Communicator> kept =
        device_->TakeKept(peer_, rank, lane_.stream, id);
    if (kept.has_value()) communicator_ = *std::move(kept);
  }
  // With the first operation between two ranks NCCL allocates and opens memory
  // and connects them, which may wait for all that runs on the GPU: so it is
  // here, and not in the middle of an update, where kernels of other edges wait
  // for their peers.
  absl::Status MoveFirst(absl::Time until, const Stopped& stopped) {
    const bool sends = communicator_.rank == 0;
    absl::Status status;
    if (sends) {
      status = CheckCuda(cudaMemsetAsync(half(0), 0, 1, lane_.stream),
                         "cudaMemsetAsync");
    }
    if (!status.ok()) return status;
    const char* const what = sends ? "ncclSend" : "ncclRecv";
    const ncclResult_t result =
        sends ? api().Send(half(0), 1, ncclUint8, 1, communicator_.comm,
                           lane_.stream)
              : api().Recv(half(0), 1, ncclUint8, 0, communicator_.comm,
                           lane_.stream);
    status = Issued(result, 0, what, until - absl::Now(), stopped);
    return status.ok() ? AwaitMoved(0, 1, what, until - absl::Now(), stopped)
                       : status;
  }

  // Whether nothing is under way in the lane any more: an operation that was
  // aborted may take a moment.
  bool AtRest() {
    if (!Use().ok()) return false;
    const absl::Time start = absl::Now();
    for (const cudaStream_t stream : {lane_.stream, lane_.copies}) {
      cudaError_t state;
      while ((state = cudaStreamQuery(stream)) == cudaErrorNotReady) {
        const absl::Duration waited = absl::Now() - start;
        if (waited > device_->options_.abort_deadline) return false;
        Pause(waited);
      }
      if (state != cudaSuccess) return false;
    }
    return true;
  }

  // What was to be used again is not.
  void Refused() {
    if (has_communicator())
      device_->Discard(std::move(communicator_), /*healthy=*/true);
    communicator_ = Communicator();
    communicator_.peer = peer_;
  }

  absl::Status Begin() {
    if (!connected_ || !has_communicator())
      return absl::FailedPreconditionError("the channel is not connected");
    return Use();
  }
  // Of a Send or Receive, also after an error: what was begun with somebody's
  // memory has ended then.
  absl::Status End(absl::Status status, absl::Duration timeout) {
    const absl::Status copied =
        AwaitCopies(timeout, [this] { return cudaStreamQuery(lane_.copies); });
    if (!copied.ok()) status = copied;
    if (!status.ok()) Stop(/*healthy=*/false);
    return status;
  }

  absl::Status SendPieces(const std::vector<Piece<const char>>& pieces,
                          absl::Duration timeout, const Stopped& stopped) {
    absl::Status status;
    for (size_t n = 0; n < pieces.size(); ++n) {
      // The piece before the last has left its half.
      if (n >= 2)
        status = AwaitMoved(n - 2, pieces[n - 2].bytes, "ncclSend", timeout,
                            stopped);
      int64_t at = 0;
      for (const absl::Span<const char> part : pieces[n].parts) {
        if (!status.ok()) return status;
        status =
            CheckCuda(cudaMemcpyAsync(half(n) + at, part.data(), part.size(),
                                      cudaMemcpyDefault, lane_.copies),
                      "cudaMemcpyAsync");
        at += static_cast<int64_t>(part.size());
      }
      if (status.ok()) {
        status = CheckCuda(cudaEventRecord(lane_.copied[n % 2], lane_.copies),
                           "cudaEventRecord");
      }
      if (status.ok()) {
        status =
            CheckCuda(cudaStreamWaitEvent(lane_.stream, lane_.copied[n % 2], 0),
                      "cudaStreamWaitEvent");
      }
      if (!status.ok()) return status;
      status = Issued(
          api().Send(half(n), pieces[n].bytes, ncclUint8,
                     1 - communicator_.rank, communicator_.comm, lane_.stream),
          n, "ncclSend", timeout, stopped);
      if (!status.ok()) return status;
    }
    for (size_t n = pieces.size() >= 2 ? pieces.size() - 2 : 0;
         status.ok() && n < pieces.size(); ++n)
      status = AwaitMoved(n, pieces[n].bytes, "ncclSend", timeout, stopped);
    return status;
  }

  // Only what has come whole is copied to where it belongs: after an error of
  // NCCL contents are undefined, and nobody's memory may be touched by what
  // goes on meanwhile.
  absl::Status ReceivePieces(const std::vector<Piece<char>>& pieces,
                             absl::Duration timeout, const Stopped& stopped) {
    const auto begin = [&](size_t n) {
      return Issued(
          api().Recv(half(n), pieces[n].bytes, ncclUint8,
                     1 - communicator_.rank, communicator_.comm, lane_.stream),
          n, "ncclRecv", timeout, stopped);
    };
    absl::Status status = pieces.empty() ? absl::OkStatus() : begin(0);
    for (size_t n = 0; status.ok() && n < pieces.size(); ++n) {
      if (n + 1 < pieces.size()) {
        // The last piece has left the half of the next.
        if (n >= 1) {
          status = AwaitCopies(timeout, [this, n] {
            return cudaEventQuery(lane_.copied[(n - 1) % 2]);
          });
        }
        if (status.ok()) status = begin(n + 1);
      }
      if (status.ok())
        status = AwaitMoved(n, pieces[n].bytes, "ncclRecv", timeout, stopped);
      int64_t at = 0;
      for (const absl::Span<char> part : pieces[n].parts) {
        if (!status.ok()) return status;
        status =
            CheckCuda(cudaMemcpyAsync(part.data(), half(n) + at, part.size(),
                                      cudaMemcpyDefault, lane_.copies),
                      "cudaMemcpyAsync");
        at += static_cast<int64_t>(part.size());
      }
      if (status.ok()) {
        status = CheckCuda(cudaEventRecord(lane_.copied[n % 2], lane_.copies),
                           "cudaEventRecord");
      }
    }
    return status;
  }

  // After an operation of NCCL on piece `n`: notes its end. A communicator that
  // does not block says that it is in progress until it has launched it, and an
  // event that came before that would say nothing.
  absl::Status Issued(ncclResult_t result, size_t n, const char* what,
                      absl::Duration timeout, const Stopped& stopped) {
    absl::Status status = device_->library().Check(result, what);
    if (status.ok())
      status = WaitFor(timeout, stopped, what, [] { return cudaSuccess; });
    if (!status.ok()) return status;
    return CheckCuda(cudaEventRecord(lane_.moved[n % 2], lane_.stream),
                     "cudaEventRecord");
  }

  absl::Status AwaitMoved(size_t n, int64_t bytes, const char* what,
                          absl::Duration timeout, const Stopped& stopped) {
    const absl::Status status = WaitFor(timeout, stopped, what, [this, n] {
      return cudaEventQuery(lane_.moved[n % 2]);
    });
    if (!status.ok()) return status;
    ++communicator_.operations;
    communicator_.bytes += static_cast<uint64_t>(bytes);
    return status;
  }

  // Of bytes that go to, or come from, somebody's memory: no way out but their
  // end, whatever becomes of the edge meanwhile. Where there is none, nobody
  // knows when they come, and only the end of the process says that they do
  // not.
  template <typename Query>
  absl::Status AwaitCopies(absl::Duration timeout, Query query) {
    const absl::Time start = absl::Now();
    while (true) {
      const cudaError_t done = query();
      if (done != cudaErrorNotReady)
        return CheckCuda(done, "cudaMemcpyAsync of what an edge moves");
      const absl::Duration waited = absl::Now() - start;
      if (waited > timeout) {
        return MakeError(
            absl::StatusCode::kDeadlineExceeded, "DEVICE_STALLED",
            absl::StrCat("a copy of what an edge moves has not ended on ",
                         device_->device_uuid(), " for ",
                         absl::FormatDuration(timeout),
                         "; the process that gave it must be started again"));
      }
      Pause(waited);
    }
  }

  // Until NCCL has nothing in progress and `query` is done. The deadline is one
  // of progress: each call moves at most half a staging buffer.
  template <typename Query>
  absl::Status WaitFor(absl::Duration timeout, const Stopped& stopped,
                       const char* what, Query query) {
    const absl::Time start = absl::Now();
    while (true) {
      ncclResult_t state = ncclSuccess;
      absl::Status status = device_->library().Check(
          api().CommGetAsyncError(communicator_.comm, &state),
          "ncclCommGetAsyncError");
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
      Pause(waited);
    }
  }

  void Stop(bool healthy) {
    if (!has_communicator()) return;
    device_->End(communicator_, healthy);
    communicator_ = Communicator();
  }

  NcclDevice* const device_;
  const NcclDevice::Lane lane_;
  const std::string peer_;
  bool offered_ = false;
  bool connected_ = false;
  bool finished_ = false;
  // One that was kept, or that is to be made with this id and rank.
  Communicator communicator_;
};

absl::StatusOr<std::unique_ptr<tcp::PayloadChannel>> NewNcclChannel(
    NcclDevice* device, const std::string& peer) {
  return NcclChannel::Make(device, peer);
}

absl::StatusOr<std::unique_ptr<tcp::Endpoint>> CreateNcclEndpoint(
    tcp::EndpointOptions options, NcclDevice* device) {
  options.payload = [device](const std::string& peer) {
    return NewNcclChannel(device, peer);
  };
  return tcp::Endpoint::Create(std::move(options));
}

}  // namespace nccl
}  // namespace transport
}  // namespace weightsync
