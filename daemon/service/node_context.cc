#include "daemon/service/node_context.h"

#include <sys/random.h>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "daemon/service/proto_time.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

// How long a client may take to map what it was offered.
constexpr absl::Duration kTokenTtl = absl::Minutes(10);

}  // namespace

absl::Status ApiStatus(const absl::Status& status) {
  struct Rename {
    absl::string_view from, to;
  };
  constexpr Rename kRenames[] = {
      {"NO_MEMORY_FOR_ARENA", "MEMORY_EXHAUSTED"},
      {"NO_DEVICE_MEMORY", "MEMORY_EXHAUSTED"},
      {"NO_ADDRESS_SPACE", "MEMORY_EXHAUSTED"},
      {"BAD_SIZE", "ARENA_SIZE_INVALID"},
      {"SEGMENT_TOO_SMALL", "MEMORY_OUT_OF_RANGE"},
      {"SEGMENT_UNKNOWN", "MEMORY_UNKNOWN"},
      {"SEGMENT_DENIED", "MEMORY_DENIED"},
      {"BAD_SEGMENT_NAME", "MEMORY_NAME_INVALID"},
  };
  const std::string reason = ErrorReason(status);
  for (const Rename& rename : kRenames) {
    if (reason != rename.from) continue;
    // Asking for less, or for what is there, is the caller's to do:
    // OUT_OF_RANGE says the same.
    const absl::StatusCode code = absl::IsOutOfRange(status)
                                      ? absl::StatusCode::kInvalidArgument
                                      : status.code();
    return ErrorStatus(code, rename.to, status.message());
  }
  return status;
}

ArenaOffers::~ArenaOffers() { TakeBackAll(); }

void ArenaOffers::TakeBackAll() {
  for (const auto& entry : tickets_) memory_->Withdraw(entry.second);
  tickets_.clear();
}

bool ArenaOffers::Has(const std::string& arena_id) const {
  return tickets_.count(arena_id) > 0;
}

bool ArenaOffers::TakeBack(const std::string& arena_id) {
  auto found = tickets_.find(arena_id);
  if (found == tickets_.end()) return false;
  memory_->Withdraw(found->second);
  tickets_.erase(found);
  return true;
}

absl::StatusOr<v1::ArenaOffer> ArenaOffers::Make(
    transport::Memory* memory, const std::string& arena_id,
    const transport::Segment& segment, pid_t pid, bool read_only) {
  transport::ExportOptions options;
  options.read_only = read_only;
  if (pid > 0) options.pid = pid;
  options.ttl = kTokenTtl;
  absl::StatusOr<transport::MemoryTicket> ticket =
      memory->Export(segment, options);
  if (!ticket.ok()) return ApiStatus(ticket.status());
  memory_ = memory;
  tickets_[arena_id] = *ticket;
  v1::ArenaOffer offer;
  offer.set_arena_id(arena_id);
  int64_t data_offset = 0;
  if (segment.file(&data_offset) >= 0) offer.set_data_offset_bytes(data_offset);
  offer.set_size_bytes(offer.data_offset_bytes() + segment.bytes());
  offer.set_device_uuid(segment.device_uuid());
  offer.set_descriptor_socket(ticket->address);
  offer.set_token(ticket->token);
  *offer.mutable_expire_time() = EncodeTime(absl::Now() + kTokenTtl);
  offer.set_read_only(read_only);
  return offer;
}

std::string RandomId() {
  char bytes[16];
  PCHECK(getrandom(bytes, sizeof(bytes), 0) == sizeof(bytes));
  return absl::BytesToHexString(absl::string_view(bytes, sizeof(bytes)));
}

}  // namespace daemon
}  // namespace weightsync
