// Reading config.json: every key is looked up in the places writers put it, two places that disagree are refused, and
// whatever would change the mathematics is named. Nothing here trusts a size: all are bounded before
// they are used, so that products of them stay inside 64 bits.
#include "model/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "storage/packed_file.h"

namespace firn::model {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxWidth = int64_t{1} << 24;
constexpr int64_t kMaxExperts = 65536;
constexpr int64_t kMaxExpertMatrices = int64_t{1} << 20;  // layers * experts: bounds the tensor enumeration
constexpr int64_t kMaxParameters = int64_t{1} << 56;      // bytes in f32 still fit int64 with room for sums
constexpr int64_t kMaxPositions = int64_t{1} << 32;
constexpr int32_t kReleaseBos = 200019, kReleaseEos = 200020;  // of generation_config.json as released
constexpr int64_t kReleaseDenseLayers = 3;                     // what a missing per-layer list stands for

std::string show(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

// Printing and comparing JSON recurse, so nesting is bounded before parsing; a config needs five levels.
bool nests_deeper_than(std::string_view text, int limit) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\')
        ++i;
      else if (c == '"')
        in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > limit) return true;
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return false;
}

Json parse_json(std::string_view text) {
  return nests_deeper_than(text, 64) ? Json(Json::value_t::discarded) : Json::parse(text, nullptr, false);
}

// A value and the path it was found at, for messages.
struct Found {
  const Json* value = nullptr;
  std::string path;
  explicit operator bool() const { return value != nullptr; }
};

// Looks keys up in several objects at once and keeps the first problem.
class Reader {
 public:
  struct Scope {
    const Json* object;
    std::string path;  // "text_config." or ""
  };

  const Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  // The non-null values of any of `keys` in any of `scopes` must agree; the first found is returned.
  Found find(const std::vector<Scope>& scopes, std::initializer_list<const char*> keys) {
    Found first;
    for (const Scope& scope : scopes) {
      if (scope.object == nullptr || !scope.object->is_object()) continue;
      for (const char* key : keys) {
        const auto it = scope.object->find(key);
        if (it == scope.object->end() || it->is_null()) continue;
        if (!first) {
          first = {&*it, scope.path + key};
        } else if (*first.value != *it) {
          fail(invalid(fmt::format("config.json contradicts itself: {} is {} but {}{} is {}; correct one of them",
                                   first.path, show(*first.value), scope.path, key, show(*it))));
        }
      }
    }
    return first;
  }

  std::optional<int64_t> integer(const Found& found, int64_t low, int64_t high) {
    if (!found) return std::nullopt;
    int64_t v = 0;
    const bool good = found.value->is_number_integer() &&
                      !(found.value->is_number_unsigned() && found.value->get<uint64_t>() > uint64_t{INT64_MAX});
    if (good) v = found.value->get<int64_t>();
    if (!good || v < low || v > high) {
      fail(invalid(fmt::format("config.json: {} must be an integer from {} to {}, found {}", found.path, low, high,
                               show(*found.value))));
      return std::nullopt;
    }
    return v;
  }

  std::optional<double> number(const Found& found, double low, double high) {
    if (!found) return std::nullopt;
    const double v = found.value->is_number() ? found.value->get<double>() : std::nan("");
    if (!(v >= low && v <= high)) {
      fail(invalid(fmt::format("config.json: {} must be a number from {} to {}, found {}", found.path, low, high,
                               show(*found.value))));
      return std::nullopt;
    }
    return v;
  }

  // true/false or 1/0.
  std::optional<bool> boolean(const Found& found) {
    if (!found) return std::nullopt;
    if (found.value->is_boolean()) return found.value->get<bool>();
    if (found.value->is_number_integer() && (*found.value == 0 || *found.value == 1)) return *found.value == 1;
    fail(invalid(fmt::format("config.json: {} must be true or false, found {}", found.path, show(*found.value))));
    return std::nullopt;
  }

  std::optional<std::string> text(const Found& found) {
    if (!found) return std::nullopt;
    if (found.value->is_string()) return found.value->get<std::string>();
    fail(invalid(fmt::format("config.json: {} must be a string, found {}", found.path, show(*found.value))));
    return std::nullopt;
  }

 private:
  Status status_;
};

std::string joined(const std::vector<std::string>& values) {
  std::string out;
  for (const std::string& v : values) out += (out.empty() ? "" : ", ") + v;
  return out;
}

// Which model the file describes; anything but the M3 family is refused with the name found.
Status check_architecture(const Json& root, const Json& text) {
  static const std::vector<std::string> kTypes = {"minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3",
                                                  "minimax_m3_text"};
  std::vector<std::string> names;
  bool known = false;
  const auto look = [&](const Json& object) -> Status {
    if (!object.is_object()) return {};
    if (const auto it = object.find("model_type"); it != object.end() && it->is_string()) {
      const std::string type = it->get<std::string>();
      if (std::find(kTypes.begin(), kTypes.end(), type) == kTypes.end()) {
        return unsupported(
            fmt::format("model_type is \"{}\"; firn runs MiniMax-M3 (expected one of: {})", type, joined(kTypes)));
      }
      known = true;
    }
    if (const auto it = object.find("architectures"); it != object.end() && it->is_array()) {
      for (const Json& name : *it) {
        if (!name.is_string()) continue;
        const std::string arch = name.get<std::string>();
        if (arch.rfind("MiniMaxM3", 0) != 0 || arch.find("MTP") != std::string::npos) {
          return unsupported(
              fmt::format("architectures names \"{}\"; firn runs MiniMax-M3 (expected "
                          "MiniMaxM3SparseForConditionalGeneration or MiniMaxM3SparseForCausalLM)",
                          arch));
        }
        known = true;
      }
    }
    return {};
  };
  FIRN_TRY(look(root));
  if (&text != &root) FIRN_TRY(look(text));
  if (!known) {
    return unsupported(
        "config.json names no architecture: expected model_type \"minimax_m3_vl\" or architectures "
        "[\"MiniMaxM3SparseForConditionalGeneration\"]");
  }
  return {};
}

class Parser {
 public:
  Parser(const Json& root, const Json& text) : root_(root) {
    const bool nested = &text != &root;
    text_ = {{&text, nested ? "text_config." : ""}};
    both_ = text_;
    if (nested) both_.push_back({&root, ""});
    for (const Reader::Scope& scope : both_) {
      for (const char* key : {"sparse_attention_config"}) {
        const auto it = scope.object->find(key);
        if (it == scope.object->end() || it->is_null()) continue;
        if (!it->is_object())
          reader_.fail(invalid(fmt::format("config.json: {}{} must be an object", scope.path, key)));
        sparse_.push_back({&*it, scope.path + key + "."});
      }
      for (const char* key : {"rope_parameters", "rope_scaling"}) {
        const auto it = scope.object->find(key);
        if (it == scope.object->end() || it->is_null()) continue;
        if (!it->is_object())
          reader_.fail(invalid(fmt::format("config.json: {}{} must be an object", scope.path, key)));
        rope_.push_back({&*it, scope.path + key + "."});
      }
    }
    sparse_.insert(sparse_.end(), both_.begin(), both_.end());
  }

  Result<ModelConfig> parse() {
    sizes();
    if (reader_.ok()) refuse_variants();
    if (reader_.ok()) rope();
    if (reader_.ok()) mixture();
    if (reader_.ok()) sparse();
    if (reader_.ok()) per_layer();
    if (reader_.ok()) tokens();
    if (reader_.ok()) vision();
    if (reader_.ok()) check_products();
    if (!reader_.ok()) return reader_.status();
    return std::move(config_);
  }

 private:
  Found in_text(std::initializer_list<const char*> keys) { return reader_.find(text_, keys); }

  int64_t required(const char* key, int64_t low, int64_t high) {
    const Found found = in_text({key});
    if (!found) {
      reader_.fail(invalid(fmt::format("config.json: {}{} is missing; expected an integer from {} to {}", text_[0].path,
                                       key, low, high)));
      return 0;
    }
    return reader_.integer(found, low, high).value_or(0);
  }

  void sizes() {
    config_.hidden = required("hidden_size", 1, kMaxWidth);
    config_.layers = required("num_hidden_layers", 1, kMaxLayers);
    config_.heads = required("num_attention_heads", 1, 65536);
    config_.kv_heads = required("num_key_value_heads", 1, 65536);
    config_.head_dim = required("head_dim", 1, 65536);
    config_.vocab = required("vocab_size", 1, kMaxWidth);
    config_.max_positions = required("max_position_embeddings", 1, kMaxPositions);
    config_.norm_eps = static_cast<float>(reader_.number(in_text({"rms_norm_eps"}), 1e-12, 1.0).value_or(1e-6));
    if (!reader_.ok()) return;
    if (config_.heads % config_.kv_heads != 0) {
      reader_.fail(invalid(fmt::format(
          "config.json: num_attention_heads {} is not a multiple of num_key_value_heads {}; each key head serves the "
          "same number of query heads",
          config_.heads, config_.kv_heads)));
    }
  }

  void expect_bool(const char* key, bool expected, bool default_value, const char* why) {
    const Found found = reader_.find(both_, {key});
    const auto v = reader_.boolean(found);
    if (!reader_.ok()) return;
    if (v.value_or(default_value) != expected) {
      reader_.fail(unsupported(fmt::format("config.json: {} is {}; expected {}: {}", found ? found.path : key,
                                           v.value_or(default_value), expected, why)));
    }
  }

  void expect_text(const char* key, std::initializer_list<const char*> allowed) {
    const Found found = reader_.find(sparse_, {key});
    const auto v = reader_.text(found);
    if (!v || !reader_.ok()) return;
    std::string list;
    for (const char* a : allowed) {
      if (*v == a) return;
      list += fmt::format("{}\"{}\"", list.empty() ? "" : " or ", a);
    }
    reader_.fail(unsupported(fmt::format("config.json: {} is \"{}\"; firn computes only {}", found.path, *v, list)));
  }

  // Keys that are absent in M3 and change the mathematics of related models when set.
  void expect_off(const char* key) {
    const Found found = reader_.find(text_, {key});
    if (!found) return;
    const Json& v = *found.value;
    if ((v.is_boolean() && !v.get<bool>()) || (v.is_number() && v.get<double>() == 0)) return;
    reader_.fail(
        unsupported(fmt::format("config.json: {} is {}; firn's MiniMax-M3 has no such step, so the answers "
                                "would be wrong",
                                found.path, show(v))));
  }

  void refuse_variants() {
    expect_text("scoring_func", {"sigmoid"});
    expect_text("qk_norm_type", {"per_head"});
    expect_text("hidden_act", {"swigluoai", "silu"});
    expect_text("sparse_score_type", {"max"});
    expect_bool("use_gemma_norm", true, true, "norm weights are applied as 1 + w");
    expect_bool("use_qk_norm", true, true, "queries and keys are normalised per head");
    expect_bool("attention_output_gate", false, false, "there is no output gate in the attention");
    expect_bool("norm_topk_prob", true, true, "expert weights are renormalised");
    for (const Reader::Scope& scope : both_) {
      const Found found = reader_.find({scope}, {"tie_word_embeddings"});
      if (reader_.boolean(found).value_or(false)) {
        reader_.fail(unsupported(
            fmt::format("config.json: {} is true; MiniMax-M3 has a separate lm_head, expected false", found.path)));
      }
    }
    for (const char* key : {"attention_bias", "qkv_bias", "mlp_bias", "attn_logit_softcapping",
                            "final_logit_softcapping", "attention_sinks", "use_mrope"}) {
      expect_off(key);
    }
    if (reader_.boolean(reader_.find(text_, {"use_sliding_window"})).value_or(true)) expect_off("sliding_window");
    for (const char* key : {"n_group", "topk_group"}) {
      const Found found = in_text({key});
      if (reader_.integer(found, INT64_MIN, INT64_MAX).value_or(1) > 1) {
        reader_.fail(unsupported(fmt::format("config.json: {} is {}; MiniMax-M3 chooses among all experts at once",
                                             found.path, show(*found.value))));
      }
    }
  }

  void rope() {
    for (const Reader::Scope& scope : rope_) {
      for (const char* key : {"rope_type", "type"}) {
        const Found type = reader_.find({scope}, {key});
        if (!type || *type.value == "default") continue;
        reader_.fail(unsupported(fmt::format("config.json: {} is {}; MiniMax-M3 uses plain RoPE (\"default\")",
                                             type.path, show(*type.value))));
        return;
      }
      for (const auto& [key, value] : scope.object->items()) {
        if (value.is_null() || key == "rope_theta" || key == "partial_rotary_factor") continue;
        if (key == "rope_type" || key == "type") continue;
        reader_.fail(
            unsupported(fmt::format("config.json: {}{} is {}; MiniMax-M3 uses plain RoPE (rope_type "
                                    "\"default\" with rope_theta and partial_rotary_factor only)",
                                    scope.path, key, show(value))));
        return;
      }
    }
    std::vector<Reader::Scope> scopes = text_;
    scopes.insert(scopes.end(), rope_.begin(), rope_.end());
    config_.rope_theta = reader_.number(reader_.find(scopes, {"rope_theta"}), 1.0, 1e18).value_or(5e6);
    const Found dim_at = in_text({"rotary_dim"});
    const Found factor_at = reader_.find(scopes, {"partial_rotary_factor"});
    const auto dim = reader_.integer(dim_at, 1, 65536);
    const auto factor = reader_.number(factor_at, 1e-9, 1.0);
    if (!reader_.ok()) return;
    if (!dim && !factor) {
      reader_.fail(
          invalid("config.json: neither rotary_dim nor partial_rotary_factor is given; firn cannot know how "
                  "many of each head's dimensions are rotated"));
      return;
    }
    const double from_factor = factor ? *factor * static_cast<double>(config_.head_dim) : 0;
    if (factor && std::abs(from_factor - std::round(from_factor)) > 1e-6) {
      reader_.fail(invalid(fmt::format("config.json: {} {} of head_dim {} is {} dimensions, not a whole number",
                                       factor_at.path, *factor, config_.head_dim, from_factor)));
      return;
    }
    const int64_t from_factor_dim = std::llround(from_factor);
    if (dim && factor && *dim != from_factor_dim) {
      reader_.fail(invalid(fmt::format("config.json contradicts itself: {} is {}, but {} {} of head_dim {} is {}",
                                       dim_at.path, *dim, factor_at.path, *factor, config_.head_dim, from_factor_dim)));
      return;
    }
    config_.rotary_dim = dim ? *dim : from_factor_dim;
    if (config_.rotary_dim < 2 || config_.rotary_dim % 2 != 0 || config_.rotary_dim > config_.head_dim) {
      reader_.fail(invalid(fmt::format("config.json: rotary_dim {} must be even and at most head_dim {}",
                                       config_.rotary_dim, config_.head_dim)));
    }
  }

  void mixture() {
    const Found shared_at = in_text({"n_shared_experts"});
    const int64_t shared = reader_.integer(shared_at, INT64_MIN, INT64_MAX).value_or(1);
    if (shared != 0 && shared != 1) {
      reader_.fail(unsupported(fmt::format("config.json: {} is {}; MiniMax-M3 has 1 shared expert (0 is also accepted)",
                                           shared_at.path, shared)));
      return;
    }
    config_.expert_intermediate = reader_.integer(in_text({"intermediate_size"}), 1, kMaxWidth).value_or(0);
    config_.dense_intermediate = reader_.integer(in_text({"dense_intermediate_size"}), 1, kMaxWidth).value_or(0);
    config_.shared_intermediate =
        shared *
        reader_.integer(in_text({"shared_intermediate_size"}), 1, kMaxWidth).value_or(config_.expert_intermediate);
    config_.experts = reader_.integer(in_text({"num_local_experts", "num_experts"}), 1, kMaxExperts).value_or(0);
    config_.experts_per_token = reader_.integer(in_text({"num_experts_per_tok"}), 1, kMaxExperts).value_or(0);
    config_.routing_bias = reader_.boolean(in_text({"use_routing_bias"})).value_or(true);
    config_.routed_scale =
        static_cast<float>(reader_.number(in_text({"routed_scaling_factor"}), 1e-6, 1e6).value_or(2.0));
    config_.activation.alpha = static_cast<float>(reader_.number(in_text({"swiglu_alpha"}), 1e-6, 1e6).value_or(1.702));
    config_.activation.beta = static_cast<float>(reader_.number(in_text({"swiglu_beta"}), -1e6, 1e6).value_or(1.0));
    const Found limit = in_text({"swiglu_limit"});
    config_.activation.limit = static_cast<float>(reader_.number(limit, -1e30, 1e30).value_or(7.0));
    if (reader_.ok() && !(config_.activation.limit > 0)) {
      reader_.fail(
          invalid(fmt::format("config.json: {} is {}; the clamp of the activation must be above 0 (the release "
                              "has 7.0; leave the key out for that)",
                              limit.path, show(*limit.value))));
    }
  }

  void sparse() {
    config_.index_dim = reader_.integer(reader_.find(sparse_, {"sparse_index_dim", "index_head_dim"}), 1, 65536)
                            .value_or(config_.head_dim);
    config_.index_heads = reader_.integer(reader_.find(sparse_, {"sparse_num_index_heads", "index_n_heads"}), 1, 65536)
                              .value_or(config_.kv_heads);
    config_.topk_blocks =
        reader_.integer(reader_.find(sparse_, {"sparse_topk_blocks", "index_topk_blocks"}), 1, 65536).value_or(16);
    config_.block_tokens =
        reader_.integer(reader_.find(sparse_, {"sparse_block_size", "index_block_size"}), 1, 65536).value_or(128);
    config_.init_blocks = reader_.integer(reader_.find(sparse_, {"sparse_init_block"}), 0, 65536).value_or(0);
    config_.local_blocks =
        reader_.integer(reader_.find(sparse_, {"sparse_local_block", "index_local_blocks"}), 1, 65536).value_or(1);
  }

  // A list of 0/1 (or of two words) per layer; missing stands for the release's first layers off, the rest on.
  std::vector<bool> layer_list(const std::vector<Reader::Scope>& scopes, const char* key, const char* words_key,
                               const char* off_word, const char* on_word) {
    const size_t n = static_cast<size_t>(config_.layers);
    std::optional<std::vector<bool>> bits;
    std::string bits_at;
    const auto read = [&](const Found& found, auto&& element) {
      if (!found || !reader_.ok()) return;
      if (!found.value->is_array() || found.value->size() != n) {
        reader_.fail(invalid(fmt::format(
            "config.json: {} must be a list with one entry for each of the {} layers, "
            "found {}",
            found.path, n,
            found.value->is_array() ? fmt::format("{} entries", found.value->size()) : show(*found.value))));
        return;
      }
      std::vector<bool> out(n);
      for (size_t i = 0; i < n; ++i) {
        const std::optional<bool> bit = element((*found.value)[i]);
        if (!bit) {
          reader_.fail(unsupported(fmt::format("config.json: {}[{}] is {}, which firn does not know", found.path, i,
                                               show((*found.value)[i]))));
          return;
        }
        out[i] = *bit;
      }
      if (bits && *bits != out) {
        reader_.fail(invalid(
            fmt::format("config.json contradicts itself: {} and {} name different layers", bits_at, found.path)));
      }
      bits = std::move(out);
      bits_at = found.path;
    };
    read(reader_.find(scopes, {key}), [](const Json& v) -> std::optional<bool> {
      if (v.is_boolean()) return v.get<bool>();
      if (v.is_number_integer() && (v == 0 || v == 1)) return v == 1;
      return std::nullopt;
    });
    read(reader_.find(text_, {words_key}), [&](const Json& v) -> std::optional<bool> {
      if (v == on_word) return true;
      if (v == off_word) return false;
      return std::nullopt;
    });
    if (bits) return *bits;
    std::vector<bool> out(n, true);
    for (size_t i = 0; i < std::min<size_t>(n, kReleaseDenseLayers); ++i) out[i] = false;
    return out;
  }

  void per_layer() {
    config_.moe_layer = layer_list(text_, "moe_layer_freq", "mlp_layer_types", "dense", "sparse");
    config_.sparse_layer =
        layer_list(sparse_, "sparse_attention_freq", "layer_types", "full_attention", "minimax_m3_sparse");
    if (!reader_.boolean(reader_.find(sparse_, {"use_sparse_attention"})).value_or(true)) {
      config_.sparse_layer.assign(config_.sparse_layer.size(), false);
    }
    if (!reader_.ok()) return;
    const Found value_path = reader_.find(sparse_, {"sparse_disable_index_value"});
    if (value_path) check_index_value(value_path);
    if (!reader_.ok()) return;

    if (config_.n_moe() > 0) {
      if (config_.experts == 0 || config_.experts_per_token == 0 || config_.expert_intermediate == 0) {
        reader_.fail(invalid(fmt::format("config.json: {} layers are MoE, but {} is missing", config_.n_moe(),
                                         config_.experts == 0             ? "num_local_experts"
                                         : config_.experts_per_token == 0 ? "num_experts_per_tok"
                                                                          : "intermediate_size")));
        return;
      }
      if (config_.experts_per_token > config_.experts) {
        reader_.fail(invalid(fmt::format("config.json: num_experts_per_tok {} exceeds num_local_experts {}",
                                         config_.experts_per_token, config_.experts)));
      }
    }
    if (config_.n_moe() < config_.layers && config_.dense_intermediate == 0) {
      reader_.fail(
          invalid(fmt::format("config.json: {} layers have a dense MLP, but dense_intermediate_size is missing",
                              config_.layers - config_.n_moe())));
    }
    if (config_.n_sparse() == 0) return;
    if (config_.index_heads != config_.kv_heads) {
      reader_.fail(
          invalid(fmt::format("config.json: sparse_num_index_heads {} must equal num_key_value_heads {}: each "
                              "index head chooses the blocks of its own key head",
                              config_.index_heads, config_.kv_heads)));
    }
    if (config_.init_blocks + config_.local_blocks > config_.topk_blocks) {
      reader_.fail(
          invalid(fmt::format("config.json: sparse_init_block {} + sparse_local_block {} exceed "
                              "sparse_topk_blocks {}; forced blocks take places among those chosen",
                              config_.init_blocks, config_.local_blocks, config_.topk_blocks)));
    }
    if (config_.rotary_dim > config_.index_dim) {
      reader_.fail(invalid(fmt::format("config.json: rotary_dim {} exceeds sparse_index_dim {}", config_.rotary_dim,
                                       config_.index_dim)));
    }
  }

  void check_index_value(const Found& found) {
    const Json& list = *found.value;
    if (list.is_array() && list.size() != config_.sparse_layer.size()) {
      reader_.fail(invalid(fmt::format("config.json: {} must have one entry for each of the {} layers, found {}",
                                       found.path, config_.layers, list.size())));
      return;
    }
    for (size_t i = 0; i < config_.sparse_layer.size(); ++i) {
      if (!config_.sparse_layer[i]) continue;
      const Json& v = list.is_array() ? list[i] : list;
      if (v == 1 || v == true) continue;
      reader_.fail(
          unsupported(fmt::format("config.json: {} is {} on sparse layer {}; firn computes only indexers without "
                                  "a value path (expected 1)",
                                  found.path, show(v), i)));
      return;
    }
  }

  void tokens() {
    const auto id = [&](const Found& found) {
      if (!found) return int32_t{-1};
      const Json& v = found.value->is_array() && !found.value->empty() ? found.value->front() : *found.value;
      return static_cast<int32_t>(reader_.integer({&v, found.path}, 0, INT32_MAX).value_or(-1));
    };
    config_.bos_id = id(reader_.find(text_, {"bos_token_id"}));
    config_.eos_id = id(reader_.find(text_, {"eos_token_id"}));
    // transformers writes its class defaults (200034, 200020) even beside a small vocabulary: those say nothing.
    if (config_.bos_id >= config_.vocab) config_.bos_id = -1;
    if (config_.eos_id >= config_.vocab) config_.eos_id = -1;
    const bool release_vocab = config_.vocab > kReleaseEos;
    if (config_.bos_id < 0 && release_vocab) config_.bos_id = kReleaseBos;
    if (config_.eos_id < 0 && release_vocab) config_.eos_id = kReleaseEos;
    config_.image_id = id(reader_.find(both_, {"image_token_index", "image_token_id"}));
    config_.video_id = id(reader_.find(both_, {"video_token_index", "video_token_id"}));
    if (const auto it = root_.find("quantization_config"); it != root_.end() && it->is_object()) {
      if (const auto method = it->find("quant_method"); method != it->end() && method->is_string()) {
        config_.quant_method = method->get<std::string>();
      }
    }
  }

  void vision() {
    const auto it = root_.find("vision_config");
    if (it == root_.end() || it->is_null()) return;
    if (!it->is_object()) {
      reader_.fail(invalid(fmt::format("config.json: vision_config must be an object, found {}", show(*it))));
      return;
    }
    if (it->empty()) return;
    const std::vector<Reader::Scope> scope = {{&*it, "vision_config."}};
    std::vector<Reader::Scope> merge = scope;
    for (const Reader::Scope& s : {scope[0], Reader::Scope{&root_, ""}}) {
      const auto m = s.object->find("img_token_compression_config");
      if (m != s.object->end() && m->is_object()) merge.push_back({&*m, s.path + "img_token_compression_config."});
    }
    VisionConfig& v = config_.vision;
    const auto want = [&](const char* key, int64_t high) {
      const Found found = reader_.find(scope, {key});
      if (!found) reader_.fail(invalid(fmt::format("config.json: vision_config.{} is missing", key)));
      return reader_.integer(found, 1, high).value_or(0);
    };
    v.hidden = want("hidden_size", 1 << 20);
    v.intermediate = want("intermediate_size", 1 << 20);
    v.layers = want("num_hidden_layers", kMaxLayers);
    v.heads = want("num_attention_heads", 65536);
    v.patch_size = reader_.integer(reader_.find(scope, {"patch_size"}), 1, 4096).value_or(14);
    v.channels = reader_.integer(reader_.find(scope, {"num_channels"}), 1, 64).value_or(3);
    v.temporal_patch = reader_.integer(reader_.find(merge, {"temporal_patch_size"}), 1, 64).value_or(2);
    v.merge = reader_.integer(reader_.find(merge, {"spatial_merge_size"}), 1, 64).value_or(2);
    v.projector_hidden =
        reader_.integer(reader_.find({{&root_, ""}}, {"projector_hidden_size"}), 1, 1 << 20).value_or(config_.hidden);
    v.present = reader_.ok();
    if (v.present && v.hidden % v.heads != 0) {
      reader_.fail(
          invalid(fmt::format("config.json: vision_config.hidden_size {} is not a multiple of its "
                              "num_attention_heads {}",
                              v.hidden, v.heads)));
    }
  }

  // Every single size is bounded above; here their products, in 128 bits.
  void check_products() {
    using Wide = unsigned __int128;
    const auto wide = [](int64_t v) { return static_cast<Wide>(v); };
    const ModelConfig& c = config_;
    const Wide attention = wide(c.hidden) * wide(c.head_dim) * wide(2 * c.heads + 2 * c.kv_heads);
    const Wide indexer = wide(c.hidden) * wide(c.index_dim) * wide(c.index_heads + 1);
    const Wide experts = 3 * wide(c.hidden) * wide(c.expert_intermediate) * wide(c.experts);
    const Wide dense = 3 * wide(c.hidden) * wide(c.dense_intermediate + c.shared_intermediate);
    const Wide total = 2 * wide(c.vocab) * wide(c.hidden) + wide(c.layers) * (attention + indexer + experts + dense);
    if (total > wide(kMaxParameters)) {
      reader_.fail(
          invalid(fmt::format("config.json: its sizes multiply to more than {} parameters; one of hidden_size {}, "
                              "num_hidden_layers {}, num_local_experts {}, intermediate_size {}, head_dim {} "
                              "cannot be right",
                              kMaxParameters, c.hidden, c.layers, c.experts, c.expert_intermediate, c.head_dim)));
      return;
    }
    if (c.layers * c.experts > kMaxExpertMatrices) {
      reader_.fail(
          invalid(fmt::format("config.json: num_hidden_layers {} times num_local_experts {} exceeds the limit of {} "
                              "experts",
                              c.layers, c.experts, kMaxExpertMatrices)));
    }
  }

  const Json& root_;
  Reader reader_;
  ModelConfig config_;
  std::vector<Reader::Scope> text_, both_, sparse_, rope_;
};

// generation_config.json only sets defaults, so its absence is normal but a broken one is an error.
Status apply_generation(std::string_view text, ModelConfig& config) {
  const Json json = parse_json(text);
  if (json.is_discarded() || !json.is_object()) {
    return corrupt("generation_config.json is not a JSON object; restore the file or remove it");
  }
  Reader reader;
  const std::vector<Reader::Scope> scope = {{&json, "generation_config."}};
  const auto id = [&](const char* key, int32_t& out) {
    const Found found = reader.find(scope, {key});
    if (!found) return;
    const Json& v = found.value->is_array() && !found.value->empty() ? found.value->front() : *found.value;
    if (const auto n = reader.integer({&v, found.path}, 0, INT32_MAX)) out = static_cast<int32_t>(*n);
  };
  id("bos_token_id", config.bos_id);
  id("eos_token_id", config.eos_id);
  config.temperature = reader.number(reader.find(scope, {"temperature"}), 0, 1e6).value_or(config.temperature);
  config.top_p = reader.number(reader.find(scope, {"top_p"}), 0, 1).value_or(config.top_p);
  config.top_k = reader.integer(reader.find(scope, {"top_k"}), 0, INT32_MAX).value_or(config.top_k);
  if (!reader.boolean(reader.find(scope, {"do_sample"})).value_or(true)) config.temperature = 0;
  return reader.status();
}

Status check_token_ids(ModelConfig& config) {
  // A text-only cut of the model keeps the lines that name image and video tokens; without a tower nothing meets them.
  if (!config.vision.present && config.image_id >= config.vocab) config.image_id = -1;
  if (!config.vision.present && config.video_id >= config.vocab) config.video_id = -1;
  const std::pair<const char*, int32_t> ids[] = {{"bos_token_id", config.bos_id},
                                                 {"eos_token_id", config.eos_id},
                                                 {"image_token_index", config.image_id},
                                                 {"video_token_index", config.video_id}};
  for (const auto& [name, id] : ids) {
    if (id >= config.vocab) {
      return invalid(fmt::format("{} {} is outside the vocabulary of {} rows", name, id, config.vocab));
    }
  }
  return {};
}

}  // namespace

int64_t ModelConfig::n_sparse() const { return std::count(sparse_layer.begin(), sparse_layer.end(), true); }
int64_t ModelConfig::n_moe() const { return std::count(moe_layer.begin(), moe_layer.end(), true); }

KvLayout ModelConfig::kv_layout(DType dtype) const {
  KvLayout layout;
  layout.dtype = dtype;
  layout.block_tokens = block_tokens;
  layout.groups = kv_heads;
  layout.head_dim = head_dim;
  layout.index_dim = index_dim;
  return layout;
}

int64_t ModelConfig::kv_bytes_per_token(DType dtype) const {
  return layers * 2 * kv_heads * head_dim * static_cast<int64_t>(dtype_bytes(dtype));
}

int64_t ModelConfig::index_bytes_per_token(DType dtype) const {
  const KvLayout layout = kv_layout(dtype);
  return n_sparse() * (index_dim * static_cast<int64_t>(dtype_bytes(dtype)) + layout.index_copy_bytes() / block_tokens);
}

Result<ModelConfig> ModelConfig::parse(std::string_view config_json, std::string_view generation_json) {
  const Json root = parse_json(config_json);
  if (root.is_discarded() || !root.is_object()) {
    return corrupt("config.json is not a JSON object; is the download complete?");
  }
  const auto nested = root.find("text_config");
  const bool has_text = nested != root.end() && !nested->is_null();
  if (has_text && !nested->is_object()) {
    return invalid(fmt::format("config.json: text_config must be an object, found {}", show(*nested)));
  }
  const Json& text = has_text ? *nested : root;
  FIRN_TRY(check_architecture(root, text));
  Parser parser(root, text);
  FIRN_ASSIGN(ModelConfig config, parser.parse());
  if (!generation_json.empty()) FIRN_TRY(apply_generation(generation_json, config));
  FIRN_TRY(check_token_ids(config));
  return config;
}

Result<ModelConfig> ModelConfig::open(storage::FileSystem& fs, const std::string& path) {
  namespace stdfs = std::filesystem;
  std::error_code ec;
  FIRN_ASSIGN(const bool packed, storage::is_packed_file(fs, path));
  if (packed) {
    FIRN_ASSIGN(const std::string text, storage::read_model_file(fs, path, "config.json", kMaxConfigBytes));
    auto defaults = storage::read_model_file(fs, path, "generation_config.json", kMaxConfigBytes);
    if (!defaults.ok() && defaults.status().code() != Code::kNotFound) return defaults.status();
    auto parsed = parse(text, defaults.ok() ? *defaults : std::string());
    return parsed.ok() ? std::move(parsed) : parsed.status().with_context(path);
  }
  const bool is_folder = stdfs::is_directory(path, ec);
  const stdfs::path config_path = is_folder ? stdfs::path(path) / "config.json" : stdfs::path(path);
  if (!stdfs::exists(config_path, ec)) {
    return not_found(fmt::format("{}: no such file; expected a checkpoint folder with config.json, or a config.json",
                                 config_path.string()));
  }
  if (!is_folder && config_path.extension() != ".json") {
    return invalid(
        fmt::format("{}: expected a checkpoint folder or its config.json, found another kind of file", path));
  }
  FIRN_ASSIGN(const std::string config, storage::read_text_file(fs, config_path.string(), kMaxConfigBytes));
  std::string generation;
  const stdfs::path generation_path = config_path.parent_path() / "generation_config.json";
  if (stdfs::exists(generation_path, ec)) {
    FIRN_ASSIGN(generation, storage::read_text_file(fs, generation_path.string(), kMaxConfigBytes));
    if (generation.empty()) return corrupt(fmt::format("{} is empty", generation_path.string()));
  }
  auto parsed = parse(config, generation);
  if (!parsed.ok()) return parsed.status().with_context(is_folder ? path : config_path.parent_path().string());
  return parsed;
}

}  // namespace firn::model
