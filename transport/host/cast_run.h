#ifndef WEIGHTSYNC_TRANSPORT_HOST_CAST_RUN_H_
#define WEIGHTSYNC_TRANSPORT_HOST_CAST_RUN_H_

#include <cstdint>

#include "transport/copy.h"

namespace weightsync {
namespace transport {

// Casts `count` elements that follow one another at `src`, in the matrix from
// `element` on, and puts them side by side at `dst`. With AVX2 (and F16C) where
// the CPU has it, by the definition elsewhere: the bits are the same.
// `blocks`: of kBF16ToF8E4M3, with their scales. Owns nothing, so that it may
// run in a SIGBUS guard. REQUIRES: not kNone, not kBF16BlockScale.
void CastRun(CopyCast cast, const CopyBlocks& blocks, void* dst,
             const void* src, int64_t count, int64_t element);

// The scales of one row of blocks, to `scales`. May run in a guard, too.
// REQUIRES: 0 <= block_row < blocks.block_rows().
void ScalesOfBlockRow(const CopyBlocks& blocks, int64_t block_row,
                      float* scales);

namespace cast_internal {
// The path of CPUs without AVX2.
void CastRunScalar(CopyCast cast, const CopyBlocks& blocks, void* dst,
                   const void* src, int64_t count, int64_t element);
}  // namespace cast_internal

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_HOST_CAST_RUN_H_
