#ifndef WEIGHTSYNC_TRANSPORT_HOST_HOST_MEMORY_H_
#define WEIGHTSYNC_TRANSPORT_HOST_HOST_MEMORY_H_

#include <cstdint>

#include "transport/host/arena.h"
#include "transport/host/copy_pool.h"
#include "transport/host/fd_socket.h"
#include "transport/memory.h"

namespace weightsync {
namespace transport {

// Memory of the host: arenas, the fd socket, CPU threads. Owns none of the
// three parts it is made of.
class HostMemory final : public Memory {
 public:
  struct Options {
    int warm_up_threads = 2;
    bool huge_pages = true;
    int64_t keep_free_bytes = 256 << 20;
  };

  // `pool` outlives this; so does `fds`, which may be null for a process that
  // exports nothing (a worker): Export is then FAILED_PRECONDITION
  // (NO_FD_SOCKET).
  HostMemory(CopyPool* pool, FdServer* fds, const Options& options)
      : pool_(pool), fds_(fds), options_(options) {}

  MemoryKind kind() const override { return MemoryKind::kHost; }
  absl::StatusOr<std::unique_ptr<Segment>> Allocate(
      int64_t bytes, const AllocateOptions& options) override;
  absl::StatusOr<MemoryTicket> Export(const Segment& segment,
                                      const ExportOptions& options) override;
  void Withdraw(const MemoryTicket& ticket) override;
  absl::StatusOr<std::unique_ptr<Segment>> Import(
      const MemoryTicket& ticket, absl::Duration timeout) override;
  absl::Status Copy(absl::Span<const CopyTask> tasks,
                    const CopyOptions& options, Digest* digest) override;
  absl::Status Pack(const PackRequest& request, PackResult* result) override;
  absl::Status Read(const char* from, absl::Span<char> to) override;
  absl::Status Write(absl::Span<const char> from, char* to) override;

 private:
  CopyPool* const pool_;
  FdServer* const fds_;
  const Options options_;
};

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_HOST_HOST_MEMORY_H_
