// libnccl, loaded when it is first needed.
//
// It has 218 MB and is not everywhere: a daemon that moves over TCP starts
// without it, and one that should move over NCCL says by name what is missing.
#ifndef WEIGHTSYNC_TRANSPORT_NCCL_NCCL_LIBRARY_H_
#define WEIGHTSYNC_TRANSPORT_NCCL_NCCL_LIBRARY_H_

#include <nccl.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace transport {
namespace nccl {

// The functions that are used, by their names without the prefix.
struct NcclApi {
  decltype(&ncclGetVersion) GetVersion;
  decltype(&ncclGetUniqueId) GetUniqueId;
  decltype(&ncclCommInitRankConfig) CommInitRankConfig;
  decltype(&ncclCommGetAsyncError) CommGetAsyncError;
  decltype(&ncclCommFinalize) CommFinalize;
  decltype(&ncclCommDestroy) CommDestroy;
  decltype(&ncclCommAbort) CommAbort;
  decltype(&ncclGroupStart) GroupStart;
  decltype(&ncclGroupEnd) GroupEnd;
  decltype(&ncclSend) Send;
  decltype(&ncclRecv) Recv;
  decltype(&ncclBroadcast) Broadcast;
  decltype(&ncclGetErrorString) GetErrorString;
  decltype(&ncclGetLastError) GetLastError;
};

class NcclLibrary {
 public:
  // `path`: a file, or the soname where it is empty ("libnccl.so.2", found as
  // the loader finds libraries). FAILED_PRECONDITION: NCCL_MISSING (with what
  // the loader says), NCCL_TOO_OLD (a function is not in it, or its major
  // version is another than the one this was built with). Never unloaded.
  static absl::StatusOr<std::unique_ptr<NcclLibrary>> Load(
      absl::string_view path = "");

  const NcclApi& api() const { return api_; }
  // As ncclGetVersion has it: 22809 is 2.28.9.
  int version() const { return version_; }
  // The file that was loaded.
  const std::string& path() const { return path_; }

  // OK for ncclSuccess and ncclInProgress; otherwise UNAVAILABLE (NCCL_ERROR)
  // with what NCCL says. `call` is for the message.
  absl::Status Check(ncclResult_t result, absl::string_view call) const;

 private:
  NcclApi api_ = {};
  int version_ = 0;
  std::string path_;
};

// "2.28.9".
std::string NcclVersionText(int version);

// The settings of NCCL in this process's environment, "NAME=value", sorted.
// FAILED_PRECONDITION (NCCL_SETTING) for one that is not known to be harmless:
// NCCL_COMM_ID, for example, makes every group meet at one address, and the
// environment goes before what a program configures.
absl::StatusOr<std::string> CheckNcclEnvironment(
    const char* const* environment);

}  // namespace nccl
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_NCCL_NCCL_LIBRARY_H_
