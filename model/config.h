// ModelConfig: MiniMax-M3's config.json in typed form.
//
// Accepts the release's layout (text_config, vision_config, sparse_attention_config) and re-saved ones
// (rope_parameters, flat sparse fields); defaults are those of specification 1.6. Contradictions and values that would
// change the mathematics are refused by name (Code::kInvalid or kUnsupported); which layers are sparse and which are
// MoE come from two independent lists.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/ops.h"
#include "runtime/status.h"
#include "storage/file.h"

namespace firn::model {

struct VisionConfig {
  bool present = false;
  int64_t hidden = 0, intermediate = 0, layers = 0, heads = 0, patch_size = 14, channels = 3, temporal_patch = 2,
          merge = 2;
  int64_t projector_hidden = 0;
};

struct ModelConfig {
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab = 0;
  int64_t max_positions = 0;
  int64_t rotary_dim = 0;
  double rope_theta = 5e6;
  float norm_eps = 1e-6f;

  int64_t dense_intermediate = 0;
  int64_t expert_intermediate = 0;
  int64_t shared_intermediate = 0;  // already times n_shared_experts
  int64_t experts = 0;
  int64_t experts_per_token = 0;
  bool routing_bias = true;
  float routed_scale = 2.0f;
  Activation activation;

  std::vector<bool> moe_layer;     // [layers]
  std::vector<bool> sparse_layer;  // [layers]
  int64_t index_heads = 0;
  int64_t index_dim = 0;
  int64_t block_tokens = 128;
  int64_t topk_blocks = 16;
  int64_t init_blocks = 0;
  int64_t local_blocks = 1;

  int32_t bos_id = -1, eos_id = -1;  // from generation_config.json when there is one
  int32_t image_id = -1, video_id = -1;
  double temperature = 1.0, top_p = 0.95;  // generation defaults
  int64_t top_k = 0;
  std::string quant_method;  // "" when the config names none; used for messages only
  VisionConfig vision;

  int64_t heads_per_group() const { return heads / kv_heads; }
  int64_t n_sparse() const;
  int64_t n_moe() const;
  KvLayout kv_layout(DType dtype) const;
  int64_t kv_bytes_per_token(DType dtype) const;     // K and V, all layers
  int64_t index_bytes_per_token(DType dtype) const;  // index keys and their low-bit copy, sparse layers

  // The fuzzed entry point. `generation` is generation_config.json's text or empty.
  static Result<ModelConfig> parse(std::string_view config_json, std::string_view generation_json = {});
  // Reads DIR/config.json and DIR/generation_config.json; `path` may also be a config.json or a
  // packed file.
  static Result<ModelConfig> open(storage::FileSystem& fs, const std::string& path);
};

}  // namespace firn::model
