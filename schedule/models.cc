#include "schedule/models.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

std::vector<ModelConfig> MakeModels() {
  std::vector<ModelConfig> models;

  ModelConfig qwen25;
  qwen25.name = "qwen2.5-0.5b";
  qwen25.layers = 24;
  qwen25.hidden = 896;
  qwen25.heads = 14;
  qwen25.kv_heads = 2;
  qwen25.head_dim = 64;
  qwen25.ffn = 4864;
  qwen25.vocab = 151936;
  qwen25.tied_embeddings = true;
  qwen25.qkv_bias = true;
  models.push_back(qwen25);

  ModelConfig llama8;
  llama8.name = "llama-3.1-8b";
  llama8.layers = 32;
  llama8.hidden = 4096;
  llama8.heads = 32;
  llama8.kv_heads = 8;
  llama8.head_dim = 128;
  llama8.ffn = 14336;
  llama8.vocab = 128256;
  models.push_back(llama8);

  ModelConfig llama70 = llama8;
  llama70.name = "llama-3.1-70b";
  llama70.layers = 80;
  llama70.hidden = 8192;
  llama70.heads = 64;
  llama70.ffn = 28672;
  models.push_back(llama70);

  ModelConfig qwen3;
  qwen3.name = "qwen3-30b-a3b";
  qwen3.layers = 48;
  qwen3.hidden = 2048;
  qwen3.heads = 32;
  qwen3.kv_heads = 4;
  qwen3.head_dim = 128;
  qwen3.vocab = 151936;
  qwen3.qk_norm = true;
  qwen3.experts = 128;
  qwen3.expert_ffn = 768;
  models.push_back(qwen3);

  ModelConfig deepseek;
  deepseek.name = "deepseek-v3";
  deepseek.layers = 61;
  deepseek.hidden = 7168;
  deepseek.heads = 128;
  deepseek.kv_heads = 128;
  deepseek.head_dim = 128;
  deepseek.ffn = 18432;
  deepseek.vocab = 129280;
  deepseek.experts = 256;
  deepseek.shared_experts = 1;
  deepseek.expert_ffn = 2048;
  deepseek.dense_layers = 3;
  deepseek.score_correction_bias = true;
  deepseek.q_lora = 1536;
  deepseek.kv_lora = 512;
  deepseek.qk_nope = 128;
  deepseek.qk_rope = 64;
  deepseek.v_dim = 128;
  models.push_back(deepseek);
  return models;
}

class Generator {
 public:
  explicit Generator(const ModelConfig& config) : c_(config) {}

  std::vector<Param> Generate() {
    Add("model.embed_tokens.weight", {c_.vocab, c_.hidden});
    for (int layer = 0; layer < c_.layers; ++layer) {
      prefix_ = absl::StrCat("model.layers.", layer, ".");
      if (c_.kv_lora > 0) {
        LatentAttention();
      } else {
        Attention();
      }
      if (c_.experts > 0 && layer >= c_.dense_layers) {
        Experts();
      } else {
        Mlp("mlp.", c_.ffn);
      }
      Add("input_layernorm.weight", {c_.hidden});
      Add("post_attention_layernorm.weight", {c_.hidden});
    }
    prefix_.clear();
    Add("model.norm.weight", {c_.hidden});
    if (!c_.tied_embeddings) Add("lm_head.weight", {c_.vocab, c_.hidden});
    return std::move(params_);
  }

 private:
  void Add(absl::string_view name, Dims shape, DType dtype = DType::kBF16) {
    Param param;
    param.name = absl::StrCat(prefix_, name);
    param.shape = std::move(shape);
    param.dtype = dtype;
    params_.push_back(std::move(param));
  }

  void Attention() {
    const int64_t q = c_.heads * c_.head_dim;
    const int64_t kv = c_.kv_heads * c_.head_dim;
    Add("self_attn.q_proj.weight", {q, c_.hidden});
    if (c_.qkv_bias) Add("self_attn.q_proj.bias", {q});
    Add("self_attn.k_proj.weight", {kv, c_.hidden});
    if (c_.qkv_bias) Add("self_attn.k_proj.bias", {kv});
    Add("self_attn.v_proj.weight", {kv, c_.hidden});
    if (c_.qkv_bias) Add("self_attn.v_proj.bias", {kv});
    Add("self_attn.o_proj.weight", {c_.hidden, q});
    if (c_.qk_norm) {
      Add("self_attn.q_norm.weight", {c_.head_dim});
      Add("self_attn.k_norm.weight", {c_.head_dim});
    }
  }

  void LatentAttention() {
    const int64_t qk = c_.qk_nope + c_.qk_rope;
    Add("self_attn.q_a_proj.weight", {c_.q_lora, c_.hidden});
    Add("self_attn.q_a_layernorm.weight", {c_.q_lora});
    Add("self_attn.q_b_proj.weight", {c_.heads * qk, c_.q_lora});
    Add("self_attn.kv_a_proj_with_mqa.weight",
        {c_.kv_lora + c_.qk_rope, c_.hidden});
    Add("self_attn.kv_a_layernorm.weight", {c_.kv_lora});
    Add("self_attn.kv_b_proj.weight",
        {c_.heads * (c_.qk_nope + c_.v_dim), c_.kv_lora});
    Add("self_attn.o_proj.weight", {c_.hidden, c_.heads * c_.v_dim});
  }

  void Mlp(absl::string_view place, int64_t ffn) {
    Add(absl::StrCat(place, "gate_proj.weight"), {ffn, c_.hidden});
    Add(absl::StrCat(place, "up_proj.weight"), {ffn, c_.hidden});
    Add(absl::StrCat(place, "down_proj.weight"), {c_.hidden, ffn});
  }

  void Experts() {
    Add("mlp.gate.weight", {c_.experts, c_.hidden});
    if (c_.score_correction_bias) {
      Add("mlp.gate.e_score_correction_bias", {c_.experts}, DType::kF32);
    }
    for (int e = 0; e < c_.experts; ++e) {
      Mlp(absl::StrCat("mlp.experts.", e, "."), c_.expert_ffn);
    }
    if (c_.shared_experts > 0) {
      Mlp("mlp.shared_experts.", c_.shared_experts * c_.expert_ffn);
    }
  }

  const ModelConfig& c_;
  std::string prefix_;
  std::vector<Param> params_;
};

}  // namespace

std::vector<std::string> ModelNames() {
  std::vector<std::string> names;
  for (const ModelConfig& model : MakeModels()) names.push_back(model.name);
  return names;
}

absl::StatusOr<ModelConfig> FindModel(absl::string_view name) {
  for (ModelConfig& model : MakeModels()) {
    if (model.name == name) return std::move(model);
  }
  return InvalidPlan(kUnknownModel,
                     absl::StrCat("model '", name, "' is unknown; known are ",
                                  absl::StrJoin(ModelNames(), ", ")));
}

absl::StatusOr<Catalog> ModelCatalog(const ModelConfig& config) {
  return Catalog::Create(Generator(config).Generate());
}

absl::StatusOr<Catalog> ModelCatalog(absl::string_view name) {
  absl::StatusOr<ModelConfig> config = FindModel(name);
  if (!config.ok()) return config.status();
  return ModelCatalog(*config);
}

}  // namespace schedule
}  // namespace weightsync
