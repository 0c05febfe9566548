// The model of a chaos run: some dozens of tensors of uneven shapes, whose
// values follow from a content number. Content is what a publish carries: the
// same version number may be tried with several contents.
//
// Only trainers make content. Workers know shapes, and hash what they find.
#ifndef WEIGHTSYNC_TESTS_CHAOS_MODEL_H_
#define WEIGHTSYNC_TESTS_CHAOS_MODEL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cc/tensor.h"
#include "tests/gpu/gpu_buffer.h"

namespace weightsync {
namespace chaos {

// Tensors of about `bytes` bytes together; the same for the same seed.
std::vector<client::Tensor> Parameters(uint64_t seed, int64_t bytes);

// The part of a parameter that worker `index` of `count` wants: every second
// matrix is split by rows, the others by columns, vectors are not split.
client::Box WorkerBox(const client::Tensor& parameter, int parameter_index,
                      int index, int count);
// Rows of a trainer rank; false: it holds none of this parameter.
bool RankBox(const client::Tensor& parameter, int rank, int world_size,
             client::Box* box);

// All bytes of one parameter.
void Fill(uint64_t seed, int64_t content, int parameter_index,
          std::vector<char>* bytes);
// The bytes of a box, dense.
std::vector<char> Cut(const client::Tensor& parameter, const client::Box& box,
                      const std::vector<char>& whole);

// A hash of tensors one after the other, 16 hexadecimal digits. Not the
// daemon's digest: it knows nothing of words and positions.
class Hasher {
 public:
  void Add(const void* data, int64_t bytes);
  std::string Text() const;

 private:
  uint64_t state_ = 1469598103934665603u;
};

// Tensors one after the other in one allocation of a GPU, and a copy of it
// here.
class OnGpu {
 public:
  // Places `tensors` in memory of that device. The errors of GpuBuffer.
  absl::Status Place(int device, std::vector<client::Tensor>* tensors);

  bool there() const { return buffer_ != nullptr; }
  // Of the copy here, where that tensor's bytes lie.
  char* copy(size_t tensor) { return mirror_.data() + offsets_[tensor]; }
  absl::Status Pull() { return buffer_->Read(mirror_.data()); }
  absl::Status Push() { return buffer_->Write(mirror_.data()); }

 private:
  std::unique_ptr<demo::GpuBuffer> buffer_;
  std::vector<char> mirror_;
  std::vector<int64_t> offsets_;
};

// What a worker of `count` that holds this content hashes, for each index.
std::vector<std::string> ExpectedHashes(
    const std::vector<client::Tensor>& parameters, uint64_t seed,
    int64_t content, int count);

// Live memory of a worker: tensors with storage, filled with a constant. Once
// they are on a GPU the storage is a copy, as old as the last Pull or Push.
struct LiveModel {
  std::vector<client::Tensor> tensors;
  std::vector<std::vector<char>> storage;

  absl::Status MoveToGpu(int device);
  absl::Status Pull();
  absl::Status Push();
  std::string Hash() const;

  OnGpu gpu;
};
LiveModel MakeLive(const std::vector<client::Tensor>& parameters, int index,
                   int count);

}  // namespace chaos
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_CHAOS_MODEL_H_
