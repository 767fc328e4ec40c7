// The tensors a config calls for, in the order of specification 2.2 and 2.3.
//
// Three spellings of the text prefix and two of the layer parts are accepted. Which layers have an indexer and which
// have experts are independent.
#include <fmt/format.h>

#include <utility>

#include "model/weights.h"

namespace firn::model {
namespace {

// The release's prefix first: it is the one messages show.
constexpr const char* kTextPrefixes[] = {"language_model.model.", "model.", "model.language_model."};
constexpr const char* kHeadStems[] = {"language_model.lm_head", "lm_head"};

class Enumerator {
 public:
  explicit Enumerator(const ModelConfig& config) : c_(config) {}

  std::vector<Slot> run() {
    text(Role::kEmbed, Group::kEmbed, {"embed_tokens"}, {c_.vocab, c_.hidden}, false);
    Slot head{Role::kLmHead, Group::kLmHead,        -1,  -1, {std::begin(kHeadStems), std::end(kHeadStems)},
              "weight",      {c_.vocab, c_.hidden}, true};
    slots_.push_back(std::move(head));
    for (int32_t layer = 0; layer < static_cast<int32_t>(c_.layers); ++layer) one_layer(layer);
    layer_ = -1;
    text(Role::kFinalNorm, Group::kFinalNorm, {"norm"}, {c_.hidden}, false);
    if (c_.vision.present) vision();
    return std::move(slots_);
  }

 private:
  // A tensor of the text model; `paths` are the accepted spellings behind the prefix, preferred first.
  void text(Role role, Group group, const std::vector<std::string>& paths, std::vector<int64_t> shape, bool matrix,
            const char* leaf = "weight", int32_t expert = -1) {
    Slot slot{role, group, layer_, expert, {}, leaf, std::move(shape), matrix};
    slot.stems.reserve(paths.size() * std::size(kTextPrefixes));
    for (const std::string& path : paths) {
      for (const char* prefix : kTextPrefixes) slot.stems.push_back(prefix + path);
    }
    slots_.push_back(std::move(slot));
  }

  void one_layer(int32_t layer) {
    layer_ = layer;
    const std::string at = fmt::format("layers.{}.", layer);
    const std::string attn = at + "self_attn.";
    const int64_t q = c_.heads * c_.head_dim, kv = c_.kv_heads * c_.head_dim;
    text(Role::kInputNorm, Group::kLayerNorms, {at + "input_layernorm"}, {c_.hidden}, false);
    text(Role::kPostNorm, Group::kLayerNorms, {at + "post_attention_layernorm"}, {c_.hidden}, false);
    text(Role::kQ, Group::kAttention, {attn + "q_proj"}, {q, c_.hidden}, true);
    text(Role::kK, Group::kAttention, {attn + "k_proj"}, {kv, c_.hidden}, true);
    text(Role::kV, Group::kAttention, {attn + "v_proj"}, {kv, c_.hidden}, true);
    text(Role::kO, Group::kAttention, {attn + "o_proj"}, {c_.hidden, q}, true);
    text(Role::kQNorm, Group::kLayerNorms, {attn + "q_norm"}, {c_.head_dim}, false);
    text(Role::kKNorm, Group::kLayerNorms, {attn + "k_norm"}, {c_.head_dim}, false);
    if (c_.sparse_layer[static_cast<size_t>(layer)]) indexer(attn);
    if (c_.moe_layer[static_cast<size_t>(layer)]) {
      mixture(at);
    } else {
      text(Role::kMlpGate, Group::kDenseMlp, {at + "mlp.gate_proj"}, {c_.dense_intermediate, c_.hidden}, true);
      text(Role::kMlpUp, Group::kDenseMlp, {at + "mlp.up_proj"}, {c_.dense_intermediate, c_.hidden}, true);
      text(Role::kMlpDown, Group::kDenseMlp, {at + "mlp.down_proj"}, {c_.hidden, c_.dense_intermediate}, true);
    }
  }

  void indexer(const std::string& attn) {
    const auto paths = [&](const char* part) {
      return std::vector<std::string>{attn + "index_" + part, attn + "indexer." + part};
    };
    const int64_t heads = c_.index_heads * c_.index_dim;
    text(Role::kIndexQ, Group::kIndexer, paths("q_proj"), {heads, c_.hidden}, true);
    text(Role::kIndexK, Group::kIndexer, paths("k_proj"), {c_.index_dim, c_.hidden}, true);
    text(Role::kIndexQNorm, Group::kIndexerNorms, paths("q_norm"), {c_.index_dim}, false);
    text(Role::kIndexKNorm, Group::kIndexerNorms, paths("k_norm"), {c_.index_dim}, false);
  }

  void mixture(const std::string& at) {
    const std::string moe = at + "block_sparse_moe.", mlp = at + "mlp.";
    text(Role::kRouterGate, Group::kRouter, {moe + "gate", mlp + "gate"}, {c_.experts, c_.hidden}, false);
    if (c_.routing_bias) {
      text(Role::kRouterBias, Group::kRouterBias,
           {moe + "e_score_correction_bias", mlp + "gate.e_score_correction_bias", mlp + "e_score_correction_bias"},
           {c_.experts}, false, "");
    }
    const int64_t wide = c_.expert_intermediate;
    for (int32_t e = 0; e < static_cast<int32_t>(c_.experts); ++e) {
      const std::string ours = fmt::format("{}experts.{}.", moe, e), other = fmt::format("{}experts.{}.", mlp, e);
      const auto expert = [&](Role role, const char* mixtral, const char* plain, std::vector<int64_t> shape) {
        text(role, Group::kExperts, {ours + mixtral, other + plain, ours + plain, other + mixtral}, std::move(shape),
             true, "weight", e);
      };
      expert(Role::kExpertGate, "w1", "gate_proj", {wide, c_.hidden});
      expert(Role::kExpertUp, "w3", "up_proj", {wide, c_.hidden});
      expert(Role::kExpertDown, "w2", "down_proj", {c_.hidden, wide});
    }
    const int64_t shared = c_.shared_intermediate;
    if (shared == 0) return;
    const auto paths = [&](const char* part) {
      return std::vector<std::string>{moe + "shared_experts." + part, mlp + "shared_experts." + part};
    };
    text(Role::kSharedGate, Group::kShared, paths("gate_proj"), {shared, c_.hidden}, true);
    text(Role::kSharedUp, Group::kShared, paths("up_proj"), {shared, c_.hidden}, true);
    text(Role::kSharedDown, Group::kShared, paths("down_proj"), {c_.hidden, shared}, true);
  }

  void image(Group group, std::vector<std::string> stems, const char* leaf, std::vector<int64_t> shape) {
    std::vector<std::string> all;
    for (const std::string& stem : stems) {
      all.push_back(stem);
      all.push_back("model." + stem);
    }
    slots_.push_back({Role::kVision, group, -1, -1, std::move(all), leaf, std::move(shape), false});
  }

  void image_linear(Group group, std::vector<std::string> stems, int64_t out, int64_t in) {
    image(group, stems, "weight", {out, in});
    image(group, std::move(stems), "bias", {out});
  }

  void image_norm(const std::vector<std::string>& stems, int64_t n) {
    image(Group::kVisionBlocks, stems, "weight", {n});
    image(Group::kVisionBlocks, stems, "bias", {n});
  }

  void vision() {
    const VisionConfig& v = c_.vision;
    const std::string tower = "vision_tower.vision_model.", bare = "vision_tower.";
    image(Group::kPatchEmbedding, {tower + "embeddings.patch_embedding", tower + "embeddings.proj"}, "weight",
          {v.hidden, v.channels, v.temporal_patch, v.patch_size, v.patch_size});
    image_norm({tower + "pre_layrnorm", bare + "pre_layrnorm"}, v.hidden);
    for (int64_t i = 0; i < v.layers; ++i) {
      const auto paths = [&](const std::string& part) {
        return std::vector<std::string>{fmt::format("{}encoder.layers.{}.{}", tower, i, part),
                                        fmt::format("{}layers.{}.{}", tower, i, part),
                                        fmt::format("{}layers.{}.{}", bare, i, part)};
      };
      image_norm(paths("layer_norm1"), v.hidden);
      image_norm(paths("layer_norm2"), v.hidden);
      for (const char* part : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"}) {
        image_linear(Group::kVisionBlocks, paths(part), v.hidden, v.hidden);
      }
      image_linear(Group::kVisionBlocks, paths("mlp.fc1"), v.intermediate, v.hidden);
      image_linear(Group::kVisionBlocks, paths("mlp.fc2"), v.hidden, v.intermediate);
    }
    image_linear(Group::kProjector, {"multi_modal_projector.linear_1"}, v.projector_hidden, v.hidden);
    image_linear(Group::kProjector, {"multi_modal_projector.linear_2"}, c_.hidden, v.projector_hidden);
    image_linear(Group::kPatchMerge, {"patch_merge_mlp.linear_1", "multi_modal_projector.merge_linear_1"},
                 v.projector_hidden, c_.hidden * v.merge * v.merge);
    image_linear(Group::kPatchMerge, {"patch_merge_mlp.linear_2", "multi_modal_projector.merge_linear_2"}, c_.hidden,
                 v.projector_hidden);
  }

  const ModelConfig& c_;
  int32_t layer_ = -1;
  std::vector<Slot> slots_;
};

}  // namespace

const char* group_name(Group group) {
  switch (group) {
    case Group::kEmbed:
      return "embed_tokens";
    case Group::kLmHead:
      return "lm_head";
    case Group::kAttention:
      return "attention";
    case Group::kLayerNorms:
      return "layer_norms";
    case Group::kFinalNorm:
      return "final_norm";
    case Group::kIndexer:
      return "indexer";
    case Group::kIndexerNorms:
      return "indexer_norms";
    case Group::kDenseMlp:
      return "dense_mlp";
    case Group::kExperts:
      return "routed_experts";
    case Group::kShared:
      return "shared_experts";
    case Group::kRouter:
      return "router";
    case Group::kRouterBias:
      return "router_bias";
    case Group::kVisionBlocks:
      return "vision_blocks";
    case Group::kPatchEmbedding:
      return "patch_embedding";
    case Group::kProjector:
      return "multi_modal_projector";
    case Group::kPatchMerge:
      return "patch_merge_mlp";
    case Group::kCount:
      break;
  }
  return "unknown";
}

std::vector<Slot> enumerate_slots(const ModelConfig& config) { return Enumerator(config).run(); }

}  // namespace firn::model
