// What nvcc packs of a .cu file, for all the architectures that it was asked
// for.
#ifndef WEIGHTSYNC_TESTS_GPU_SIM_FAT_BINARY_H_
#define WEIGHTSYNC_TESTS_GPU_SIM_FAT_BINARY_H_

#include <string>

namespace gpu_sim {

// By its first bytes.
bool IsFatBinary(const unsigned char* data);

// Whether it has code for the simulated devices: a binary of their generation,
// or PTX of at most theirs (not with GPU_SIM_PTX=0: then a generation that was
// left out shows). REQUIRES: IsFatBinary.
bool HasCode(const unsigned char* data);

// Whether it names a kernel so. False as well where it is compressed. REQUIRES:
// IsFatBinary.
bool HasKernel(const unsigned char* data, const std::string& mangled_name);

}  // namespace gpu_sim

#endif  // WEIGHTSYNC_TESTS_GPU_SIM_FAT_BINARY_H_
