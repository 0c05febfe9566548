// The model of the demo: which tensors there are, who holds which part, and
// what is in them. Nothing of weightsync is used here but its words.
//
// The values of a version are computed from (version, parameter, element), so
// that any rank can make its part; workers have no part in that. What travels
// is compared by hashes that each process takes of its own memory.
#ifndef WEIGHTSYNC_TESTS_E2E_DEMO_MODEL_H_
#define WEIGHTSYNC_TESTS_E2E_DEMO_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "client/cc/tensor.h"

namespace weightsync {
namespace demo {

struct Parameter {
  std::string name;
  std::string dtype;  // as safetensors names it
  std::vector<int64_t> shape;
  // In the file, where the values come from one.
  int64_t begin = 0;

  int64_t elements() const;
  int64_t bytes() const;
  int element_bytes() const;
};

struct Model {
  // Empty: values are made up.
  std::string file;
  std::vector<Parameter> parameters;

  int64_t bytes() const;
};

// The catalog of a published model (schedule/models.h knows which), or that of
// a safetensors file where `file` is not empty.
absl::StatusOr<Model> LoadModel(const std::string& name,
                                const std::string& file);

// Rank `rank` of `ranks` holds these rows of dimension 0, as FSDP cuts it: ceil
// division, so that the last parts are short or missing.
absl::optional<client::Box> FsdpBox(const Parameter& parameter, int rank,
                                    int ranks);

// The shards of a rank, by the model's parameters, without memory: those of
// which it holds nothing have no box.
std::vector<client::Tensor> FsdpShards(const Model& model, int rank, int ranks);
// Those that are held.
std::vector<client::Tensor> Held(const std::vector<client::Tensor>& shards);

// The part of tensor-parallel worker `worker` of `workers`, as Megatron cuts
// it: projections that come first by rows, those that come second by columns,
// embeddings by rows, the rest whole.
client::Box TensorParallelBox(const Parameter& parameter, int worker,
                              int workers);

absl::optional<client::Box> Intersect(const client::Box& a,
                                      const client::Box& b);

// `parameter` of a model with `data` as memory for its part `box`.
client::Tensor TensorOf(const Parameter& parameter, const client::Box& box,
                        void* data);

// Where the parts lie when they are put one after another from `base` on,
// aligned to 64 bytes; sets `data` of each unless `base` is null. Returns their
// bytes together.
int64_t PlaceTensors(std::vector<client::Tensor>* tensors, char* base);

// A worker's part of every parameter, in memory of its own that is never given
// back. Ends the program where there is none.
std::vector<client::Tensor> LiveTensors(const Model& model, int worker,
                                        int workers);

// The same tensors at the same places of a buffer on a GPU: what lies at `from`
// lies at `gpu` there.
std::vector<client::Tensor> OnGpu(std::vector<client::Tensor> tensors,
                                  const char* from, char* gpu);

// Writes the values of `version` into dense memory of part `box`, which is
// whole in all but dimension 0. Made-up values are normal with deviation 0.02,
// in bf16. Those of a file are the file's own in version `last_version`, and
// differ a little before that.
absl::Status Fill(const Model& model, int ordinal, const client::Box& box,
                  int64_t version, int64_t last_version, char* data);

// Fill for all shards that have memory.
absl::Status FillAll(const Model& model, int64_t version, int64_t last_version,
                     const std::vector<client::Tensor>& shards);

// A hash of the bytes of `part` in dense memory that holds `box`, in
// hexadecimal. REQUIRES: part lies in box.
std::string HashPart(const Parameter& parameter, const client::Box& box,
                     const char* data, const client::Box& part);

// One line for each parameter: "version worker/workers name part hash", where
// part i is that which FSDP rank i of `parts` holds of the worker's box.
// `tensors` are those of that worker, in the order of the model's parameters.
std::string WorkerHashLines(const Model& model, int64_t version, int worker,
                            int workers, int parts,
                            const std::vector<client::Tensor>& tensors);
// The same lines as the rank that holds `shards` expects them, of its part.
// `shards` are by the model's parameters; those without data are not held.
std::string RankHashLines(const Model& model, int64_t version, int worker,
                          int workers, int rank,
                          const std::vector<client::Tensor>& shards);

// RankHashLines for every worker of replicas of the sizes in `worker_counts`
// ("1,2").
std::string AllRankHashLines(const Model& model, int64_t version,
                             const std::string& worker_counts, int rank,
                             const std::vector<client::Tensor>& shards);

// Damages one bit in the middle of the memory.
void FlipBit(const std::vector<client::Tensor>& tensors);

// Live memory as a safetensors file; the boxes stand in its metadata.
absl::Status DumpSafetensors(const std::string& path, const Model& model,
                             const std::vector<client::Tensor>& tensors);
// One file for each worker: `path`, or path.0, path.1, ... An empty path does
// nothing.
absl::Status DumpAll(const std::string& path, const Model& model,
                     const std::vector<std::vector<client::Tensor>>& live);

}  // namespace demo
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_E2E_DEMO_MODEL_H_
