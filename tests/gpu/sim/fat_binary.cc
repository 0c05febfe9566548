#include "tests/gpu/sim/fat_binary.h"

#include <cstdint>
#include <cstring>

#include "tests/gpu/sim/machine.h"

namespace gpu_sim {
namespace {

struct Header {
  uint32_t magic;
  uint16_t version;
  uint16_t header_bytes;
  uint64_t bytes;  // after the header
};

Header HeaderOf(const unsigned char* data) {
  Header header;
  memcpy(&header, data, sizeof(header));
  return header;
}

}  // namespace

bool IsFatBinary(const unsigned char* data) {
  const Header header = HeaderOf(data);
  return header.magic == 0xba55ed50 && header.header_bytes >= sizeof(Header);
}

bool HasCode(const unsigned char* data) {
  const Header header = HeaderOf(data);
  const uint32_t capability =
      static_cast<uint32_t>(EnvNumber("GPU_SIM_CC", 90));
  for (uint64_t at = header.header_bytes;
       at < header.header_bytes + header.bytes;) {
    uint16_t kind;
    uint32_t entry_header, arch;
    uint64_t entry_bytes;
    memcpy(&kind, data + at, 2);
    memcpy(&entry_header, data + at + 4, 4);
    memcpy(&entry_bytes, data + at + 8, 8);
    memcpy(&arch, data + at + 28, 4);
    if (kind == 2 && arch / 10 == capability / 10 && arch <= capability)
      return true;
    if (kind == 1 && arch <= capability && EnvNumber("GPU_SIM_PTX", 1) != 0)
      return true;
    at += entry_header + entry_bytes;
  }
  return false;
}

bool HasKernel(const unsigned char* data, const std::string& mangled_name) {
  const Header header = HeaderOf(data);
  // As the symbols of a binary have it: whole.
  const std::string whole = '\0' + mangled_name + '\0';
  return memmem(data + header.header_bytes, header.bytes, whole.data(),
                whole.size()) != nullptr;
}

}  // namespace gpu_sim
