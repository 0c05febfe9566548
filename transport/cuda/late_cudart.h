// libcudart for programs that may run where there is none: found when it is
// first needed, and not linked.
//
// A library that links //transport/cuda:late_cudart in the place of
// @cuda_config//:cudart has in itself the functions of cudart that are listed
// in late_cudart.cc; each calls the one of the library that was found. They are
// hidden: nobody else in the process gets them.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_LATE_CUDART_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_LATE_CUDART_H_

#include "absl/status/status.h"

namespace weightsync {
namespace transport {
namespace cuda {

// To be OK before anything of cudart is called. Takes the library that the
// process has loaded already (PyTorch's), else the newest that the loader
// finds: what is used of it is the same from CUDA 11 on. FAILED_PRECONDITION
// (CUDA_RUNTIME_MISSING).
absl::Status FindCudart();

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_LATE_CUDART_H_
