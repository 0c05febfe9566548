// The GPUs of the simulated machine, by UUID.
#ifndef WEIGHTSYNC_TESTS_E2E_GPU_UUID_H_
#define WEIGHTSYNC_TESTS_E2E_GPU_UUID_H_

#include <cstdio>
#include <string>

namespace weightsync {
namespace e2e {

// As the simulated machine has them (tests/gpu/sim/machine.cc).
inline std::string UuidOf(int device) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char hex[3];
    snprintf(hex, sizeof(hex), "%02x", (0xa0 + 17 * i + device) & 0xff);
    text += hex;
  }
  return text;
}

}  // namespace e2e
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_E2E_GPU_UUID_H_
