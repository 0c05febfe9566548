#include "tests/gpu/sim/twin.h"

#include <dlfcn.h>

#include <map>

#include "tests/gpu/sim/machine.h"

namespace gpu_sim {
namespace {

std::map<std::string, TwinEntry>& Twins() {
  static auto* const twins = new std::map<std::string, TwinEntry>;
  return *twins;
}

}  // namespace

void RegisterTwin(const TwinEntry& entry) {
  Dl_info info;
  if (dladdr(entry.kernel, &info) == 0 || info.dli_sname == nullptr ||
      info.dli_saddr != entry.kernel) {
    Die("a host twin has no exported name");
  }
  Twins()[info.dli_sname] = entry;
}

const TwinEntry* FindTwin(const std::string& mangled_name) {
  const auto at = Twins().find(mangled_name);
  return at == Twins().end() ? nullptr : &at->second;
}

std::vector<std::string> TwinLibraries() {
  std::vector<std::string> paths;
  const std::string text = Env("GPU_SIM_KERNELS", "");
  for (size_t at = 0; at < text.size();) {
    size_t end = text.find(':', at);
    if (end == std::string::npos) end = text.size();
    if (end > at) paths.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return paths;
}

}  // namespace gpu_sim
