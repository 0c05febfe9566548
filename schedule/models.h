// Catalogs of published models, generated from their configurations: sizes to
// plan and test with, without a checkpoint at hand. Names, order of dimensions
// and dtypes are those of the Hugging Face checkpoints.

#ifndef WEIGHTSYNC_SCHEDULE_MODELS_H_
#define WEIGHTSYNC_SCHEDULE_MODELS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "schedule/catalog.h"

namespace weightsync {
namespace schedule {

// A decoder of the Llama family or a relative; zero or false: has none.
struct ModelConfig {
  std::string name;
  int layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t ffn = 0;
  int64_t vocab = 0;
  bool tied_embeddings = false;  // no lm_head of its own
  bool qkv_bias = false;
  bool qk_norm = false;
  // Mixture of experts, from layer `dense_layers` on.
  int experts = 0;
  int shared_experts = 0;
  int64_t expert_ffn = 0;
  int dense_layers = 0;
  bool score_correction_bias = false;  // fp32, one per expert
  // Multi-head latent attention.
  int64_t q_lora = 0;
  int64_t kv_lora = 0;
  int64_t qk_nope = 0;
  int64_t qk_rope = 0;
  int64_t v_dim = 0;
};

// "qwen2.5-0.5b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b",
// "deepseek-v3".
std::vector<std::string> ModelNames();
// UNKNOWN_MODEL lists the known ones.
absl::StatusOr<ModelConfig> FindModel(absl::string_view name);

// bf16 but for the score correction bias. The errors of Catalog::Create.
absl::StatusOr<Catalog> ModelCatalog(const ModelConfig& config);
absl::StatusOr<Catalog> ModelCatalog(absl::string_view name);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_MODELS_H_
