#include "transport/tcp/endpoint.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "transport/error.h"
#include "transport/tcp/tcp_group.h"

namespace weightsync {
namespace transport {
namespace tcp {
namespace {

constexpr size_t kRememberedGroups = 4096;
// After accept ran out of descriptors.
constexpr int64_t kAcceptPauseNanos = 100000000;

// Takes as long for a wrong secret as for a right one.
bool SameSecret(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i)
    difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

std::string EpochText(const Epoch& epoch) {
  return absl::StrCat("(", epoch.term, ",", epoch.counter, ")");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Endpoint>> Endpoint::Create(
    EndpointOptions options) {
  int port = 0;
  absl::StatusOr<Fd> listener =
      Listen(options.bind_host, options.first_port, options.last_port, &port);
  if (!listener.ok()) return listener.status();
  return std::unique_ptr<Endpoint>(
      new Endpoint(std::move(options), *std::move(listener), port));
}

Endpoint::Endpoint(EndpointOptions options, Fd listener, int port)
    : options_(std::move(options)),
      address_(JoinAddress(options_.advertise_host.empty()
                               ? options_.bind_host
                               : options_.advertise_host,
                           port)),
      listener_(std::move(listener)),
      cluster_id_(options_.cluster_id) {
  thread_ = std::thread([this] { Run(); });
}

Endpoint::~Endpoint() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    DCHECK(groups_.empty()) << "a group outlives its endpoint";
  }
  wake_.Wake();
  thread_.join();
}

absl::StatusOr<std::unique_ptr<Group>> Endpoint::NewGroup(
    GroupSpec spec, GroupOptions options) {
  auto invalid = [](absl::string_view what) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_GROUP", what);
  };
  if (spec.members.empty() || spec.self < 0 ||
      spec.self >= static_cast<int>(spec.members.size())) {
    return invalid(absl::StrCat("self is ", spec.self, " of ",
                                spec.members.size(), " members"));
  }
  std::set<std::string> nodes;
  for (const GroupMember& member : spec.members) {
    if (member.node.empty() || !nodes.insert(member.node).second) {
      return invalid(absl::StrCat("node '", member.node,
                                  "' is named twice, or not at all"));
    }
  }
  {
    absl::MutexLock lock(&mutex_);
    if (cluster_id_.empty()) cluster_id_ = spec.cluster_id;
    if (spec.cluster_id != cluster_id_) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "WRONG_CLUSTER",
                       absl::StrCat("the group is of cluster ", spec.cluster_id,
                                    ", this node of ", cluster_id_));
    }
  }
  return std::unique_ptr<Group>(
      std::make_unique<TcpGroup>(this, std::move(spec), std::move(options)));
}

void Endpoint::RaiseTerm(uint64_t term) {
  absl::MutexLock lock(&mutex_);
  term_ = std::max(term_, term);
}

void Endpoint::SetClusterId(const std::string& cluster_id) {
  absl::MutexLock lock(&mutex_);
  cluster_id_ = cluster_id;
}

absl::Status Endpoint::Register(const GroupSpec& spec,
                                StreamAcceptor* acceptor) {
  {
    absl::MutexLock lock(&mutex_);
    const auto newest = newest_.find(spec.group_id);
    if (spec.epoch.term < term_ ||
        (newest != newest_.end() && spec.epoch < newest->second)) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "STALE_EPOCH",
          absl::StrCat("group ", spec.group_id, " of epoch ",
                       EpochText(spec.epoch), " was superseded on this node"));
    }
    Registration registration{spec.secret, spec.members[spec.self - 1].node,
                              spec.members[spec.self].node, acceptor};
    if (!groups_
             .emplace(Key(spec.group_id, spec.epoch), std::move(registration))
             .second) {
      return MakeError(absl::StatusCode::kAlreadyExists, "GROUP_EXISTS",
                       absl::StrCat("group ", spec.group_id, " of epoch ",
                                    EpochText(spec.epoch), " is here already"));
    }
    RememberEpoch(spec.group_id, spec.epoch);
  }
  // Peers that came early may be waiting.
  wake_.Wake();
  return absl::OkStatus();
}

void Endpoint::Unregister(const GroupSpec& spec) {
  absl::MutexLock lock(&mutex_);
  groups_.erase(Key(spec.group_id, spec.epoch));
}

void Endpoint::RememberEpoch(const std::string& group_id, const Epoch& epoch) {
  const auto inserted = newest_.emplace(group_id, epoch);
  if (!inserted.second) {
    inserted.first->second = std::max(inserted.first->second, epoch);
    return;
  }
  newest_order_.push_back(group_id);
  if (newest_order_.size() > kRememberedGroups) {
    newest_.erase(newest_order_.front());
    newest_order_.pop_front();
  }
}

void Endpoint::Run() {
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) break;
    }
    int64_t now = NowNanos();
    std::vector<pollfd> waits;
    waits.push_back({wake_.fd(), POLLIN, 0});
    const bool full =
        pending_.size() >= static_cast<size_t>(options_.max_pending);
    waits.push_back(
        {full || now < accept_again_ ? -1 : listener_.get(), POLLIN, 0});
    int64_t until = now + 1000000000;
    if (now < accept_again_) until = accept_again_;
    for (const auto& pending : pending_) {
      waits.push_back({pending->fd.get(), POLLIN | POLLRDHUP, 0});
      until = std::min(until, pending->deadline);
    }
    poll(waits.data(), waits.size(),
         static_cast<int>(std::max<int64_t>(0, until - now) / 1000000) + 1);
    now = NowNanos();
    if (waits[0].revents != 0) wake_.Drain();
    for (size_t i = 0; i < pending_.size(); ++i) {
      if (Step(pending_[i].get(), waits[i + 2].revents != 0, now))
        pending_[i] = nullptr;
    }
    pending_.erase(std::remove(pending_.begin(), pending_.end(), nullptr),
                   pending_.end());
    if (waits[1].revents != 0) Accept();
  }
  for (const auto& pending : pending_) {
    Refuse(pending.get(),
           MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN",
                     "this node is shutting down"));
  }
  pending_.clear();
}

void Endpoint::Accept() {
  while (pending_.size() < static_cast<size_t>(options_.max_pending)) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr,
                  SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        LOG(ERROR) << "accepting a data connection: "
                   << ErrnoError("accept", errno);
        accept_again_ = NowNanos() + kAcceptPauseNanos;
      }
      return;
    }
    PrepareStream(fd.get());
    auto pending = std::make_unique<Pending>();
    pending->fd = std::move(fd);
    pending->deadline =
        NowNanos() + absl::ToInt64Nanoseconds(options_.handshake_deadline);
    pending_.push_back(std::move(pending));
  }
}

bool Endpoint::Step(Pending* pending, bool readable, int64_t now) {
  if (pending->parked) {
    // A peer says nothing more until it is welcomed: it has closed, or is none.
    if (readable) return true;
    if (Match(pending, now)) return true;
    if (now < pending->deadline) return false;
    Refuse(pending, MakeError(absl::StatusCode::kNotFound, "UNKNOWN_GROUP",
                              absl::StrCat("group ", pending->hello.group_id,
                                           " is not on this node")));
    return true;
  }
  if (readable) {
    bool whole = false;
    if (!ReadHello(pending, &whole)) return true;
    if (whole) {
      if (Match(pending, now)) return true;
      pending->parked = true;
      pending->deadline =
          now + absl::ToInt64Nanoseconds(options_.early_peer_wait);
      return false;
    }
  }
  return now >= pending->deadline;
}

bool Endpoint::ReadHello(Pending* pending, bool* whole) {
  while (true) {
    char buffer[1024];
    const size_t missing = pending->wanted - pending->bytes.size();
    const ssize_t n = recv(pending->fd.get(), buffer,
                           std::min(missing, sizeof(buffer)), MSG_DONTWAIT);
    if (n == 0) return false;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    pending->bytes.append(buffer, static_cast<size_t>(n));
    if (pending->bytes.size() < pending->wanted) continue;
    if (pending->wanted == kEnvelopeHeaderBytes) {
      absl::StatusOr<uint32_t> length =
          DecodeEnvelopeHeader(pending->bytes, /*hello=*/true);
      if (!length.ok()) {
        // Another release is told; who speaks something else altogether gets no
        // answer.
        if (ReasonOf(length.status()) == "PROTOCOL_VERSION")
          Refuse(pending, length.status());
        return false;
      }
      pending->wanted += *length;
      if (*length > 0) continue;
    }
    absl::StatusOr<Hello> hello = DecodeHello(pending->bytes);
    if (!hello.ok()) return false;
    pending->hello = *std::move(hello);
    *whole = true;
    return true;
  }
}

absl::Status Endpoint::CheckEpoch(const Hello& hello) {
  const auto newest = newest_.find(hello.group_id);
  const bool older = newest != newest_.end() && hello.epoch < newest->second;
  if (hello.epoch.term >= term_ && !older) return absl::OkStatus();
  const std::string now =
      older ? EpochText(newest->second) : absl::StrCat("term ", term_);
  return MakeError(absl::StatusCode::kFailedPrecondition, "STALE_EPOCH",
                   absl::StrCat("epoch ", EpochText(hello.epoch),
                                " is over, this node is at ", now));
}

bool Endpoint::Match(Pending* pending, int64_t) {
  const Hello& hello = pending->hello;
  absl::MutexLock lock(&mutex_);
  if (cluster_id_.empty()) return false;
  if (hello.cluster_id != cluster_id_) {
    Refuse(pending,
           MakeError(absl::StatusCode::kFailedPrecondition, "WRONG_CLUSTER",
                     "this node belongs to another cluster"));
    return true;
  }
  if (absl::Status status = CheckEpoch(hello); !status.ok()) {
    Refuse(pending, status);
    return true;
  }
  const auto found = groups_.find(Key(hello.group_id, hello.epoch));
  if (found == groups_.end()) return false;
  const Registration& registration = found->second;
  absl::Status status;
  if (!SameSecret(hello.secret, registration.secret)) {
    status = MakeError(absl::StatusCode::kPermissionDenied, "BAD_SECRET",
                       "the secret is not this group's");
  } else if (hello.from != registration.from || hello.to != registration.to) {
    status = MakeError(
        absl::StatusCode::kFailedPrecondition, "WRONG_PEER",
        absl::StrCat("this is ", registration.to, " and its predecessor is ",
                     registration.from, ", not ", hello.from, "->", hello.to));
  } else {
    status = registration.acceptor->Check(hello);
  }
  if (!status.ok()) {
    Refuse(pending, status);
    return true;
  }
  const std::string welcome = EncodeWelcome(absl::OkStatus());
  // The first bytes on the socket: they fit.
  if (send(pending->fd.get(), welcome.data(), welcome.size(),
           MSG_NOSIGNAL | MSG_DONTWAIT) ==
      static_cast<ssize_t>(welcome.size())) {
    registration.acceptor->Take(std::move(pending->fd), hello);
  }
  return true;
}

void Endpoint::Refuse(Pending* pending, const absl::Status& why) {
  LOG(WARNING) << "data connection from node '" << pending->hello.from
               << "' refused: " << why.message();
  const std::string answer = EncodeWelcome(why);
  (void)!send(pending->fd.get(), answer.data(), answer.size(),
              MSG_NOSIGNAL | MSG_DONTWAIT);
  shutdown(pending->fd.get(), SHUT_WR);
}

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
