#include "transport/host/host_memory.h"

#include <cstring>
#include <utility>

#include "transport/error.h"

namespace weightsync {
namespace transport {

absl::StatusOr<std::unique_ptr<Segment>> HostMemory::Allocate(
    int64_t bytes, const AllocateOptions& options) {
  if (!options.device_uuid.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "WRONG_MEMORY_KIND",
                     "there are no GPUs here");
  }
  Arena::CreateOptions create;
  create.name = options.name;
  create.generation_slots = options.generation_slots;
  create.others_read_only = options.others_read_only;
  create.warm_up_threads = options_.warm_up_threads;
  create.huge_pages = options_.huge_pages;
  create.keep_free_bytes = options_.keep_free_bytes;
  absl::StatusOr<std::unique_ptr<Arena>> arena = Arena::Create(bytes, create);
  if (!arena.ok()) return arena.status();
  return std::unique_ptr<Segment>(*std::move(arena));
}

absl::StatusOr<MemoryTicket> HostMemory::Export(const Segment& segment,
                                                const ExportOptions& options) {
  if (segment.kind() != MemoryKind::kHost) {
    return MakeError(absl::StatusCode::kInvalidArgument, "WRONG_MEMORY_KIND",
                     "this segment is not host memory");
  }
  if (fds_ == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "NO_FD_SOCKET",
                     "this process has no fd socket to export through");
  }
  absl::StatusOr<UniqueFd> fd =
      static_cast<const Arena&>(segment).Share(options.read_only);
  if (!fd.ok()) return fd.status();
  FdServer::Recipient recipient;
  recipient.pid = options.pid;
  recipient.uid = options.uid;
  absl::StatusOr<std::string> token =
      fds_->Offer(*std::move(fd), recipient, options.ttl);
  if (!token.ok()) return token.status();
  MemoryTicket ticket;
  ticket.kind = MemoryKind::kHost;
  ticket.bytes = segment.bytes();
  ticket.read_only = options.read_only;
  ticket.address = fds_->path();
  ticket.token = *std::move(token);
  return ticket;
}

void HostMemory::Withdraw(const MemoryTicket& ticket) {
  if (fds_ != nullptr && ticket.kind == MemoryKind::kHost) {
    fds_->Withdraw(ticket.token);
  }
}

absl::StatusOr<std::unique_ptr<Segment>> HostMemory::Import(
    const MemoryTicket& ticket, absl::Duration timeout) {
  if (ticket.kind != MemoryKind::kHost) {
    return MakeError(absl::StatusCode::kInvalidArgument, "WRONG_MEMORY_KIND",
                     "this ticket is not for host memory");
  }
  absl::StatusOr<UniqueFd> fd = RedeemFd(ticket.address, ticket.token, timeout);
  if (!fd.ok()) return fd.status();
  Arena::ImportOptions options;
  options.read_only = ticket.read_only;
  options.min_bytes = ticket.bytes;
  absl::StatusOr<std::unique_ptr<Arena>> arena =
      Arena::Import(*std::move(fd), options);
  if (!arena.ok()) return arena.status();
  return std::unique_ptr<Segment>(*std::move(arena));
}

absl::Status HostMemory::Copy(absl::Span<const CopyTask> tasks,
                              const CopyOptions& options, Digest* digest) {
  return pool_->Copy(tasks, options, digest);
}

absl::Status HostMemory::Pack(const PackRequest& request, PackResult* result) {
  return pool_->Pack(request, result);
}

absl::Status HostMemory::Read(const char* from, absl::Span<char> to) {
  std::memcpy(to.data(), from, to.size());
  return absl::OkStatus();
}

absl::Status HostMemory::Write(absl::Span<const char> from, char* to) {
  std::memcpy(to, from.data(), from.size());
  return absl::OkStatus();
}

}  // namespace transport
}  // namespace weightsync
