// Linked with the static cudart: no library path puts a simulator under it.
#include <cuda_runtime_api.h>

int main() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaErrorInvalidValue;
}
