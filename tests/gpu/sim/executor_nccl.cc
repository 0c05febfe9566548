#include "tests/gpu/sim/executor_nccl.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "tests/gpu/sim/machine.h"

namespace gpu_sim {
namespace {

constexpr uint32_t kMagic = 0x4e43434c;

struct Grant {
  uint32_t magic;
  uint32_t zero;
  uint64_t bytes;
};

// One send or receive that is under way.
struct Transfer {
  NcclItem item;
  uint64_t control_done = 0;  // bytes of the grant
  Grant grant = {};
  uint64_t header_done = 0;  // bytes of what the sender says that it sends
  Grant header = {};
  uint64_t done = 0;
};

// Moves some of [*done, bytes); false when the peer is gone.
bool SendSome(int fd, const void* data, uint64_t bytes, uint64_t* done) {
  while (*done < bytes) {
    const ssize_t sent =
        send(fd, static_cast<const char*>(data) + *done,
             std::min<uint64_t>(bytes - *done, 256 << 10), MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    *done += sent;
  }
  return true;
}

bool ReceiveSome(int fd, void* data, uint64_t bytes, uint64_t* done) {
  while (*done < bytes) {
    const ssize_t got = recv(fd, static_cast<char*>(data) + *done,
                             std::min<uint64_t>(bytes - *done, 256 << 10), 0);
    if (got == 0) return false;
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    *done += got;
  }
  return true;
}

}  // namespace

NcclComm::NcclComm(const Options& options)
    : options_(options),
      to_(options.ranks, -1),
      owed_grants_(options.ranks),
      from_(options.ranks, -1) {
  if (!Listen()) {
    Fail(kNcclInvalidUsage);
    return;
  }
  thread_ = std::thread([this] { Meet(); });
}

NcclComm::~NcclComm() {
  aborted_ = true;
  if (thread_.joinable()) thread_.join();
  for (const int fd : to_) {
    if (fd >= 0) close(fd);
  }
  for (const int fd : from_) {
    if (fd >= 0) close(fd);
  }
  if (listener_ >= 0) {
    close(listener_);
    unlink(SocketPath(options_.rank).c_str());
  }
}

std::string NcclComm::SocketPath(int rank) const {
  return Dir() + "/n" + options_.key + "." + std::to_string(rank);
}

void NcclComm::Fail(int error) {
  int expected = async_error_;
  while ((expected == kNcclSuccess || expected == kNcclInProgress) &&
         !async_error_.compare_exchange_weak(expected, error)) {
  }
}

bool NcclComm::Listen() {
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string path = SocketPath(options_.rank);
  if (path.size() >= sizeof(address.sun_path)) Die("GPU_SIM_DIR is too long");
  memcpy(address.sun_path, path.c_str(), path.size());
  if (bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) !=
      0) {
    Finding("NCCL: rank " + std::to_string(options_.rank) +
            " of one communicator was given twice");
    close(listener_);
    listener_ = -1;
    return false;
  }
  return listen(listener_, 64) == 0;
}

void NcclComm::CheckPeer(const Hello& hello) {
  if (hello.ranks != options_.ranks) Fail(kNcclInvalidUsage);
  if (hello.version != options_.version) {
    fprintf(stderr,
            "gpu_sim: Mismatched NCCL version detected: rank %d version %d "
            "rank %d version %d\n",
            options_.rank, options_.version, hello.rank, hello.version);
    Fail(kNcclInvalidUsage);
  }
  if (memcmp(hello.uuid, options_.uuid, sizeof(hello.uuid)) == 0 &&
      std::string(hello.host_id) == options_.host_id) {
    fprintf(stderr,
            "gpu_sim: Duplicate GPU detected : rank %d and rank %d both on one "
            "CUDA device\n",
            options_.rank, hello.rank);
    Fail(kNcclInvalidUsage);
  }
}

void NcclComm::Meet() {
  Hello own = {};
  own.magic = kMagic;
  own.rank = options_.rank;
  own.ranks = options_.ranks;
  own.version = options_.version;
  memcpy(own.uuid, options_.uuid, sizeof(own.uuid));
  memcpy(own.host_id, options_.host_id.data(),
         std::min(options_.host_id.size(), sizeof(own.host_id) - 1));
  int connected = 0, accepted = 0;
  const int peers = options_.ranks - 1;
  while ((connected < peers || accepted < peers) && !aborted_) {
    for (int rank = 0; rank < options_.ranks; ++rank) {
      if (rank == options_.rank || to_[rank] >= 0) continue;
      const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      sockaddr_un address = {};
      address.sun_family = AF_UNIX;
      const std::string path = SocketPath(rank);
      memcpy(address.sun_path, path.c_str(), path.size());
      if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) !=
              0 ||
          send(fd, &own, sizeof(own), MSG_NOSIGNAL) !=
              static_cast<ssize_t>(sizeof(own))) {
        close(fd);
        continue;
      }
      fcntl(fd, F_SETFL, O_NONBLOCK);
      to_[rank] = fd;
      ++connected;
    }
    pollfd ready = {listener_, POLLIN, 0};
    if (poll(&ready, 1, connected < peers ? 2 : 20) <= 0) continue;
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    Hello hello = {};
    if (recv(fd, &hello, sizeof(hello), MSG_WAITALL) !=
            static_cast<ssize_t>(sizeof(hello)) ||
        hello.magic != kMagic || hello.rank < 0 ||
        hello.rank >= options_.ranks || from_[hello.rank] >= 0) {
      close(fd);
      continue;
    }
    fcntl(fd, F_SETFL, O_NONBLOCK);
    from_[hello.rank] = fd;
    ++accepted;
    CheckPeer(hello);
  }
  if (aborted_) return;
  int expected = kNcclInProgress;
  async_error_.compare_exchange_strong(expected, kNcclSuccess);
}

void NcclComm::Hold() {
  while (!aborted_) usleep(2000);
}

void NcclComm::Run(const std::vector<NcclItem>& items) {
  while (async_error_ == kNcclInProgress && !aborted_) usleep(500);
  if (async_error_ != kNcclSuccess) return Hold();
  // Towards each peer the sends are done in order, and so are the receives.
  std::vector<std::vector<Transfer>> sends(options_.ranks),
      receives(options_.ranks);
  size_t left = items.size();
  for (const NcclItem& item : items) {
    Transfer transfer;
    transfer.item = item;
    (item.send ? sends : receives)[item.peer].push_back(transfer);
  }
  // To itself.
  std::vector<Transfer>& own_sends = sends[options_.rank];
  std::vector<Transfer>& own_receives = receives[options_.rank];
  if (own_sends.size() != own_receives.size()) {
    Finding("NCCL: sends and receives of a rank to itself do not match");
    Fail(kNcclInvalidUsage);
    return Hold();
  }
  for (size_t i = 0; i < own_sends.size(); ++i) {
    memmove(reinterpret_cast<void*>(own_receives[i].item.address),
            reinterpret_cast<const void*>(own_sends[i].item.address),
            own_sends[i].item.bytes);
    left -= 2;
  }
  std::vector<size_t> next_send(options_.ranks), next_receive(options_.ranks);
  while (left > 0) {
    if (aborted_) return;
    if (async_error_ != kNcclSuccess) return Hold();
    std::vector<pollfd> polls;
    for (int rank = 0; rank < options_.ranks; ++rank) {
      if (rank == options_.rank) continue;
      if (next_send[rank] < sends[rank].size()) {
        Transfer& t = sends[rank][next_send[rank]];
        bool alive = true;
        if (options_.eager_bytes > 0 && t.item.bytes <= options_.eager_bytes) {
          if (t.control_done == 0) ++owed_grants_[rank];
          t.control_done = sizeof(Grant);
        }
        if (t.control_done < sizeof(Grant)) {
          while ((alive = ReceiveSome(to_[rank], &t.grant, sizeof(Grant),
                                      &t.control_done)) &&
                 t.control_done == sizeof(Grant) && owed_grants_[rank] > 0) {
            --owed_grants_[rank];
            t.control_done = 0;
          }
          if (t.control_done == sizeof(Grant) &&
              t.grant.bytes != t.item.bytes) {
            Finding("NCCL: rank " + std::to_string(options_.rank) + " sends " +
                    std::to_string(t.item.bytes) + " bytes where rank " +
                    std::to_string(rank) + " receives " +
                    std::to_string(t.grant.bytes));
            Fail(kNcclInternalError);
            return Hold();
          }
        }
        if (alive && t.control_done == sizeof(Grant)) {
          t.header.magic = kMagic;
          t.header.bytes = t.item.bytes;
          alive = SendSome(to_[rank], &t.header, sizeof(Grant), &t.header_done);
        }
        if (alive && t.header_done == sizeof(Grant)) {
          alive =
              SendSome(to_[rank], reinterpret_cast<const void*>(t.item.address),
                       t.item.bytes, &t.done);
          if (t.done == t.item.bytes) {
            ++next_send[rank];
            --left;
          }
        }
        if (!alive) {
          Fail(kNcclRemoteError);
          return Hold();
        }
        if (next_send[rank] < sends[rank].size()) {
          const bool granted =
              sends[rank][next_send[rank]].control_done == sizeof(Grant);
          polls.push_back(
              {to_[rank], static_cast<short>(granted ? POLLOUT : POLLIN), 0});
        }
      }
      if (next_receive[rank] < receives[rank].size()) {
        Transfer& t = receives[rank][next_receive[rank]];
        if (t.control_done == 0) {
          t.grant.magic = kMagic;
          t.grant.bytes = t.item.bytes;
        }
        bool alive =
            SendSome(from_[rank], &t.grant, sizeof(Grant), &t.control_done);
        if (alive && t.control_done == sizeof(Grant) &&
            t.header_done < sizeof(Grant)) {
          alive = ReceiveSome(from_[rank], &t.header, sizeof(Grant),
                              &t.header_done);
          if (t.header_done == sizeof(Grant) &&
              t.header.bytes != t.item.bytes) {
            Finding("NCCL: rank " + std::to_string(options_.rank) +
                    " receives " + std::to_string(t.item.bytes) +
                    " bytes where rank " + std::to_string(rank) + " sends " +
                    std::to_string(t.header.bytes));
            Fail(kNcclInternalError);
            return Hold();
          }
        }
        if (alive && t.header_done == sizeof(Grant)) {
          if (t.item.bytes > 0)
            alive = ReceiveSome(from_[rank],
                                reinterpret_cast<void*>(t.item.address),
                                t.item.bytes, &t.done);
          if (t.done == t.item.bytes) {
            ++next_receive[rank];
            --left;
          }
        }
        if (!alive) {
          Fail(kNcclRemoteError);
          return Hold();
        }
        if (next_receive[rank] < receives[rank].size())
          polls.push_back({from_[rank], POLLIN, 0});
      }
    }
    if (left > 0) poll(polls.data(), polls.size(), 10);
  }
}

}  // namespace gpu_sim
