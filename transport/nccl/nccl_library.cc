#include "transport/nccl/nccl_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "glog/logging.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace nccl {
namespace {

absl::Status Unusable(absl::string_view reason, absl::string_view message) {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason, message);
}

// What an operator may set: which network and how to find it, how much is
// logged, and what tests need. Nothing that changes who meets whom or who
// computes what.
constexpr const char* kKnownSettings[] = {
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CROSS_NIC",
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_HOSTID",
    "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_IB_RETRY_CNT",
    "NCCL_IB_SL",
    "NCCL_IB_TC",
    "NCCL_IB_TIMEOUT",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_GDR_READ",
    "NCCL_NET_PLUGIN",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_FAMILY",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_TOPO_FILE",
};

}  // namespace

absl::StatusOr<std::unique_ptr<NcclLibrary>> NcclLibrary::Load(
    absl::string_view path) {
  const std::string name = path.empty() ? "libnccl.so.2" : std::string(path);
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return Unusable(
        "NCCL_MISSING",
        absl::StrCat("NCCL cannot be loaded: ", why,
                     "; install libnccl.so.2 where the loader finds it (also "
                     "that of Python's nvidia/nccl/lib), or choose "
                     "--group=tcp"));
  }
  auto library = std::unique_ptr<NcclLibrary>(new NcclLibrary);
  NcclApi& api = library->api_;
  std::vector<std::string> missing;
  const auto find = [&](const char* symbol, auto* function) {
    void* const found = dlsym(handle, symbol);
    if (found == nullptr) missing.push_back(symbol);
    *function = reinterpret_cast<std::decay_t<decltype(*function)>>(found);
  };
  find("ncclGetVersion", &api.GetVersion);
  find("ncclGetUniqueId", &api.GetUniqueId);
  find("ncclCommInitRankConfig", &api.CommInitRankConfig);
  find("ncclCommGetAsyncError", &api.CommGetAsyncError);
  find("ncclCommFinalize", &api.CommFinalize);
  find("ncclCommDestroy", &api.CommDestroy);
  find("ncclCommAbort", &api.CommAbort);
  find("ncclGroupStart", &api.GroupStart);
  find("ncclGroupEnd", &api.GroupEnd);
  find("ncclSend", &api.Send);
  find("ncclRecv", &api.Recv);
  find("ncclBroadcast", &api.Broadcast);
  find("ncclGetErrorString", &api.GetErrorString);
  find("ncclGetLastError", &api.GetLastError);
  Dl_info info;
  if (api.GetVersion != nullptr &&
      dladdr(reinterpret_cast<void*>(api.GetVersion), &info) != 0) {
    library->path_ = info.dli_fname;
  }
  if (!missing.empty()) {
    return Unusable(
        "NCCL_TOO_OLD",
        absl::StrCat(library->path_, " lacks ", absl::StrJoin(missing, ", "),
                     "; this needs ", NcclVersionText(NCCL_VERSION_CODE),
                     " or a newer one"));
  }
  if (api.GetVersion(&library->version_) != ncclSuccess)
    return Unusable("NCCL_TOO_OLD", "ncclGetVersion fails");
  if (library->version_ / 10000 != NCCL_MAJOR) {
    return Unusable("NCCL_TOO_OLD",
                    absl::StrCat(library->path_, " is NCCL ",
                                 NcclVersionText(library->version_),
                                 "; this was built "
                                 "with ",
                                 NcclVersionText(NCCL_VERSION_CODE)));
  }
  LOG(INFO) << "NCCL " << NcclVersionText(library->version_) << " from "
            << library->path_ << ", built with "
            << NcclVersionText(NCCL_VERSION_CODE);
  return library;
}

absl::Status NcclLibrary::Check(ncclResult_t result,
                                absl::string_view call) const {
  if (result == ncclSuccess || result == ncclInProgress)
    return absl::OkStatus();
  const char* last = api_.GetLastError(nullptr);
  return MakeError(absl::StatusCode::kUnavailable, "NCCL_ERROR",
                   absl::StrCat(call, ": ", api_.GetErrorString(result),
                                last != nullptr && *last != '\0' ? ": " : "",
                                last != nullptr ? last : ""));
}

std::string NcclVersionText(int version) {
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".",
                      version % 100);
}

absl::StatusOr<std::string> CheckNcclEnvironment(
    const char* const* environment) {
  std::vector<std::string> settings;
  for (; *environment != nullptr; ++environment) {
    const absl::string_view entry = *environment;
    if (!absl::StartsWith(entry, "NCCL_")) continue;
    const absl::string_view name = entry.substr(0, entry.find('='));
    if (std::find(std::begin(kKnownSettings), std::end(kKnownSettings), name) ==
        std::end(kKnownSettings)) {
      return Unusable(
          "NCCL_SETTING",
          absl::StrCat(name,
                       " is set, in the environment or in a file that NCCL "
                       "reads (/etc/nccl.conf, ~/.nccl.conf), and could change "
                       "who meets whom: unset it, or choose --group=tcp"));
    }
    settings.push_back(std::string(entry));
  }
  std::sort(settings.begin(), settings.end());
  return absl::StrJoin(settings, " ");
}

}  // namespace nccl
}  // namespace transport
}  // namespace weightsync
