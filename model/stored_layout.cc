// Names, dtypes and shapes of stored tensors by format, and the config that goes with them.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "model/synth.h"

namespace firn::model {
namespace {

using Json = nlohmann::ordered_json;

// Per-layer lists keep their beginning; a longer model repeats the last entry.
void resize_list(Json& object, const char* key, size_t n) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_array() || it->empty()) return;
  Json list = Json::array();
  for (size_t i = 0; i < n; ++i) list.push_back((*it)[std::min(i, it->size() - 1)]);
  *it = std::move(list);
}

void resize_layers(Json& text, int64_t layers) {
  const auto n = static_cast<size_t>(layers);
  text["num_hidden_layers"] = layers;
  const auto all = [&](Json& object) {
    for (const char* key :
         {"moe_layer_freq", "sparse_attention_freq", "sparse_disable_index_value", "layer_types", "mlp_layer_types"}) {
      resize_list(object, key, n);
    }
  };
  all(text);
  if (const auto it = text.find("sparse_attention_config"); it != text.end() && it->is_object()) all(*it);
}

Json quantization_config(CheckpointFormat format, const ModelConfig& config) {
  Json plain =
      Json::array({"lm_head", "model.embed_tokens", "vision_tower", "multi_modal_projector", "patch_merge_mlp"});
  for (size_t l = 0; l < config.moe_layer.size(); ++l) {
    if (config.moe_layer[l]) plain.push_back(fmt::format("language_model.model.layers.{}.block_sparse_moe.gate", l));
  }
  Json out;
  switch (format) {
    case CheckpointFormat::kBf16:
      break;
    case CheckpointFormat::kMxfp8:
      out["quant_method"] = "mxfp8";
      out["activation_scheme"] = "dynamic";
      out["weight_block_size"] = {1, 32};
      out["ignored_layers"] = plain;
      break;
    case CheckpointFormat::kNvfp4:
      out["quant_method"] = "modelopt";
      out["quant_algo"] = "MIXED_PRECISION";
      out["kv_cache_quant_algo"] = nullptr;
      out["group_size"] = 16;
      out["exclude_modules"] = plain;
      break;
    case CheckpointFormat::kMxfp4:
      out["quant_method"] = "compressed-tensors";
      out["format"] = "mixed-precision";
      out["ignore"] = plain;
      break;
  }
  return out;
}

PlannedTensor planned(std::string name, DType dtype, std::vector<int64_t> shape) {
  return {std::move(name), dtype, std::move(shape), {}};
}

}  // namespace

Result<CheckpointFormat> checkpoint_format(std::string_view name) {
  for (const CheckpointFormat f :
       {CheckpointFormat::kBf16, CheckpointFormat::kMxfp8, CheckpointFormat::kNvfp4, CheckpointFormat::kMxfp4}) {
    if (name == checkpoint_format_name(f)) return f;
  }
  return invalid(fmt::format("format \"{}\" is not known; expected bf16, mxfp8, nvfp4 or mxfp4", name));
}

const char* checkpoint_format_name(CheckpointFormat format) {
  switch (format) {
    case CheckpointFormat::kBf16:
      return "bf16";
    case CheckpointFormat::kMxfp8:
      return "mxfp8";
    case CheckpointFormat::kNvfp4:
      return "nvfp4";
    case CheckpointFormat::kMxfp4:
      return "mxfp4";
  }
  return "unknown";
}

WeightFormat stored_format(const Slot& slot, CheckpointFormat format) {
  if (slot.role == Role::kRouterGate || slot.role == Role::kRouterBias || slot.group == Group::kPatchEmbedding) {
    return WeightFormat::kF32;
  }
  if (!slot.matrix || slot.role == Role::kLmHead || format == CheckpointFormat::kBf16) return WeightFormat::kBf16;
  if (slot.expert >= 0 && format == CheckpointFormat::kNvfp4) return WeightFormat::kNvfp4;
  if (slot.expert >= 0 && format == CheckpointFormat::kMxfp4) return WeightFormat::kMxfp4;
  return WeightFormat::kMxfp8;
}

std::vector<PlannedTensor> stored_tensors(const Slot& slot, WeightFormat format) {
  const std::string& stem = slot.stems[0];
  const std::string name = slot.leaf.empty() ? stem : stem + "." + slot.leaf;
  if (format == WeightFormat::kF32) return {planned(name, DType::kF32, slot.shape)};
  if (format == WeightFormat::kBf16) return {planned(name, DType::kBf16, slot.shape)};
  const int64_t rows = slot.shape[0], cols = slot.shape[1];
  const std::vector<int64_t> scales = {rows, cols / weight_scale_group(format)}, packed = {rows, cols / 2};
  if (format == WeightFormat::kMxfp8) {
    return {planned(stem + ".weight", DType::kF8E4m3, slot.shape),
            planned(stem + ".weight_scale_inv", DType::kU8, scales)};
  }
  if (format == WeightFormat::kMxfp4) {
    return {planned(stem + ".weight_packed", DType::kU8, packed), planned(stem + ".weight_scale", DType::kU8, scales)};
  }
  return {planned(stem + ".weight", DType::kU8, packed), planned(stem + ".weight_scale", DType::kF8E4m3, scales),
          planned(stem + ".weight_scale_2", DType::kF32, {}), planned(stem + ".input_scale", DType::kF32, {})};
}

Result<std::string> edit_config(std::string_view config_json, int64_t layers, int64_t experts,
                                CheckpointFormat format) {
  FIRN_ASSIGN(const ModelConfig before, ModelConfig::parse(config_json));
  if (layers < 0 || layers > 4096 || experts < 0) {
    return invalid(
        fmt::format("{} layers and {} experts: expected 1 to 4096 layers and at least 1 expert", layers, experts));
  }
  Json root = Json::parse(config_json, nullptr, false);
  FIRN_CHECK(root.is_object(), "the config was parsed a moment ago");
  const bool nested = root.contains("text_config") && root["text_config"].is_object();
  Json& text = nested ? root["text_config"] : root;
  if (layers > 0) resize_layers(text, layers);
  if (experts > 0) {
    text["num_local_experts"] = experts;
    if (text.contains("num_experts")) text["num_experts"] = experts;
  }
  root.erase("quantization_config");
  FIRN_ASSIGN(const ModelConfig after, ModelConfig::parse(root.dump()));
  if (format != CheckpointFormat::kBf16) root["quantization_config"] = quantization_config(format, after);
  return root.dump(2) + "\n";
}

}  // namespace firn::model
