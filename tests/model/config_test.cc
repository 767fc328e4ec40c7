// ModelConfig: what is accepted means the same, what is refused is named.
#include "model/config.h"

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "support/catch.h"
#include "tests/model/checkpoint_fixture.h"

namespace firn::model {
namespace {

using Json = nlohmann::json;
using Edit = std::function<void(Json&)>;

std::string fixture(const std::string& name) { return std::string(FIRN_TEST_DATA) + "/fixtures/" + name; }

Json tiny() { return Json::parse(test::get_file(fixture("tiny-bf16/config.json"))); }

ModelConfig parsed(const Json& json) {
  auto config = ModelConfig::parse(json.dump());
  INFO(config.status().message());
  REQUIRE(config.ok());
  return std::move(config).value();
}

void check_refused(const Json& json, const std::vector<std::string>& words, Code code) {
  const auto config = ModelConfig::parse(json.dump());
  REQUIRE_FALSE(config.ok());
  INFO(config.status().message());
  for (const std::string& word : words) {
    INFO("expected in the message: " << word);
    CHECK(config.status().message().find(word) != std::string::npos);
  }
  CHECK(config.status().code() == code);
}

bool same(const ModelConfig& a, const ModelConfig& b) {
  return a.hidden == b.hidden && a.layers == b.layers && a.heads == b.heads && a.kv_heads == b.kv_heads &&
         a.head_dim == b.head_dim && a.vocab == b.vocab && a.rotary_dim == b.rotary_dim &&
         a.rope_theta == b.rope_theta && a.norm_eps == b.norm_eps && a.dense_intermediate == b.dense_intermediate &&
         a.expert_intermediate == b.expert_intermediate && a.shared_intermediate == b.shared_intermediate &&
         a.experts == b.experts && a.experts_per_token == b.experts_per_token && a.routed_scale == b.routed_scale &&
         a.activation.limit == b.activation.limit && a.moe_layer == b.moe_layer && a.sparse_layer == b.sparse_layer &&
         a.index_heads == b.index_heads && a.index_dim == b.index_dim && a.block_tokens == b.block_tokens &&
         a.topk_blocks == b.topk_blocks && a.init_blocks == b.init_blocks && a.local_blocks == b.local_blocks;
}

TEST_CASE("the tiny checkpoint's config is read as its table says", "[config]") {
  const auto config = ModelConfig::open(storage::FileSystem::real(), fixture("tiny-mxfp8"));
  INFO(config.status().message());
  REQUIRE(config.ok());
  const ModelConfig& c = *config;
  CHECK(c.hidden == 128);
  CHECK(c.layers == 5);
  CHECK(c.heads == 4);
  CHECK(c.kv_heads == 2);
  CHECK(c.head_dim == 64);
  CHECK(c.vocab == 1344);
  CHECK(c.rotary_dim == 32);
  CHECK(c.rope_theta == 5e6);
  CHECK(c.norm_eps == 1e-6f);
  CHECK(c.dense_intermediate == 256);
  CHECK(c.expert_intermediate == 64);
  CHECK(c.shared_intermediate == 64);
  CHECK(c.experts == 8);
  CHECK(c.experts_per_token == 4);
  CHECK(c.routed_scale == 2.0f);
  CHECK(c.activation.alpha == 1.702f);
  CHECK(c.activation.beta == 1.0f);  // absent in this file
  CHECK(c.activation.limit == 7.0f);
  CHECK(c.moe_layer == std::vector<bool>{false, true, true, true, true});
  CHECK(c.sparse_layer == c.moe_layer);
  CHECK(c.index_heads == 2);
  CHECK(c.index_dim == 64);
  CHECK(c.block_tokens == 128);
  CHECK(c.topk_blocks == 16);
  CHECK(c.init_blocks == 0);
  CHECK(c.local_blocks == 1);
  CHECK(c.bos_id == 1299);
  CHECK(c.eos_id == 1300);
  CHECK(c.image_id == 1305);
  CHECK(c.video_id == 1306);
  CHECK(c.top_p == 0.95);
  CHECK(c.quant_method == "mxfp8");
  CHECK(c.vision.present);
  CHECK(c.vision.projector_hidden == 192);
  CHECK(c.kv_bytes_per_token(DType::kBf16) == 5 * 2 * 2 * 64 * 2);
  CHECK(c.index_bytes_per_token(DType::kBf16) == 4 * (64 * 2 + 36));  // keys and their copy
}

TEST_CASE("rotary width: either spelling, both, nested, and re-saved forms mean the same", "[config]") {
  const ModelConfig base = parsed(tiny());
  const std::vector<std::pair<std::string, Edit>> edits = {
      {"rotary_dim only", [](Json& j) { j["text_config"].erase("partial_rotary_factor"); }},
      {"partial_rotary_factor only", [](Json& j) { j["text_config"].erase("rotary_dim"); }},
      {"rope_parameters",
       [](Json& j) {
         Json& t = j["text_config"];
         for (const char* key : {"rotary_dim", "partial_rotary_factor", "rope_theta"}) t.erase(key);
         t["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5000000.0}, {"partial_rotary_factor", 0.5}};
       }},
      {"flat top level",
       [](Json& j) {
         Json flat = j["text_config"];
         flat["model_type"] = "minimax_m3_vl_text";
         j = flat;
       }},
      {"flat sparse fields",
       [](Json& j) {
         Json& t = j["text_config"];
         const Json fields = t["sparse_attention_config"];
         for (const auto& [key, value] : fields.items()) t[key] = value;
         t.erase("sparse_attention_config");
       }},
      {"transformers' own names",
       [](Json& j) {
         Json& t = j["text_config"];
         t.erase("sparse_attention_config");
         t.erase("moe_layer_freq");
         t["index_n_heads"] = 2;
         t["index_head_dim"] = 64;
         t["index_block_size"] = 128;
         t["index_topk_blocks"] = 16;
         t["index_local_blocks"] = 1;
         t["hidden_act"] = "silu";
         t["layer_types"] = {"full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse",
                             "minimax_m3_sparse"};
         t["mlp_layer_types"] = {"dense", "sparse", "sparse", "sparse", "sparse"};
       }},
      {"rope_scaling null", [](Json& j) { j["text_config"]["rope_scaling"] = nullptr; }},
      {"clamp absent", [](Json& j) { j["text_config"].erase("swiglu_limit"); }},
      {"class-default token ids", [](Json& j) { j["text_config"]["bos_token_id"] = 200034; }},
  };
  for (const auto& [name, edit] : edits) {
    Json j = tiny();
    edit(j);
    INFO(name);
    CHECK(same(parsed(j), base));
  }
}

TEST_CASE("sparse attention and experts are chosen by two independent lists", "[config]") {
  Json j = tiny();
  j["text_config"]["sparse_attention_config"]["sparse_attention_freq"] = {1, 1, 0, 1, 1};
  j["text_config"]["sparse_attention_config"]["sparse_disable_index_value"] = {1, 1, 0, 1, 1};
  const ModelConfig c = parsed(j);
  CHECK(c.sparse_layer == std::vector<bool>{true, true, false, true, true});
  CHECK(c.moe_layer == std::vector<bool>{false, true, true, true, true});
  CHECK(c.n_sparse() == 4);
  j["text_config"].erase("moe_layer_freq");
  CHECK(parsed(j).moe_layer == std::vector<bool>{false, false, false, true, true});
}

TEST_CASE("values the release does not have are honoured", "[config]") {
  Json j = tiny();
  j["text_config"]["swiglu_limit"] = 3.5;
  j["text_config"]["use_routing_bias"] = false;
  j["text_config"]["n_shared_experts"] = 0;
  j["text_config"]["sparse_attention_config"]["sparse_init_block"] = 1;
  const ModelConfig c = parsed(j);
  CHECK(c.activation.limit == 3.5f);
  CHECK_FALSE(c.routing_bias);
  CHECK(c.shared_intermediate == 0);
  CHECK(c.init_blocks == 1);
}

TEST_CASE("what would change the mathematics is refused by name", "[config]") {
  struct Case {
    Edit edit;
    std::vector<std::string> words;
  };
  const auto text = [](const char* key, Json value) -> Edit {
    return [key, value](Json& j) { j["text_config"][key] = value; };
  };
  const auto sparse = [](const char* key, Json value) -> Edit {
    return [key, value](Json& j) { j["text_config"]["sparse_attention_config"][key] = value; };
  };
  const Case cases[] = {
      {[](Json& j) { j["model_type"] = "llama"; }, {"llama", "MiniMax-M3"}},
      {[](Json& j) { j["model_type"] = "minimax_m3_mtp"; }, {"minimax_m3_mtp"}},
      {[](Json& j) { j["architectures"] = {"MiniMaxM2ForCausalLM"}; }, {"MiniMaxM2ForCausalLM"}},
      {[](Json& j) {
         j = Json{{"hidden_size", 8}};
       },
       {"architecture"}},
      {text("rope_scaling", {{"rope_type", "yarn"}, {"factor", 4}}), {"rope_scaling", "yarn"}},
      {text("rope_parameters", {{"rope_type", "default"}, {"factor", 4}}), {"rope_parameters.factor"}},
      {text("scoring_func", "softmax"), {"scoring_func", "softmax", "sigmoid"}},
      {text("use_gemma_norm", false), {"use_gemma_norm"}},
      {text("use_qk_norm", false), {"use_qk_norm"}},
      {text("qk_norm_type", "full"), {"qk_norm_type", "full", "per_head"}},
      {text("attention_output_gate", true), {"attention_output_gate"}},
      {text("hidden_act", "gelu"), {"hidden_act", "gelu", "swigluoai"}},
      {text("tie_word_embeddings", true), {"tie_word_embeddings"}},
      {[](Json& j) { j["tie_word_embeddings"] = true; }, {"tie_word_embeddings"}},
      {text("n_shared_experts", 2), {"n_shared_experts", "2"}},
      {text("sliding_window", 4096), {"sliding_window", "4096"}},
      {text("attention_bias", true), {"attention_bias"}},
      {text("n_group", 8), {"n_group"}},
      {sparse("sparse_score_type", "mean"), {"sparse_score_type", "mean", "max"}},
      {sparse("sparse_disable_index_value", {0, 1, 0, 1, 1}), {"sparse_disable_index_value", "layer 2"}},
      {text("layer_types",
            {"full_attention", "sliding_attention", "full_attention", "full_attention", "full_attention"}),
       {"layer_types[1]", "sliding_attention"}},
  };
  for (const Case& c : cases) {
    Json j = tiny();
    c.edit(j);
    check_refused(j, c.words, Code::kUnsupported);
  }
}

TEST_CASE("contradictions and absurd sizes are refused with the numbers", "[config]") {
  struct Case {
    Edit edit;
    std::vector<std::string> words;
  };
  const auto text = [](const char* key, Json value) -> Edit {
    return [key, value](Json& j) { j["text_config"][key] = value; };
  };
  const auto sparse = [](const char* key, Json value) -> Edit {
    return [key, value](Json& j) { j["text_config"]["sparse_attention_config"][key] = value; };
  };
  const Case cases[] = {
      {text("rotary_dim", 64), {"rotary_dim", "64", "partial_rotary_factor", "32"}},
      {[](Json& j) {
         j["text_config"]["rotary_dim"] = 33;
         j["text_config"].erase("partial_rotary_factor");
       },
       {"33", "even"}},
      {[](Json& j) {
         j["text_config"]["rotary_dim"] = 66;
         j["text_config"].erase("partial_rotary_factor");
       },
       {"66", "head_dim 64"}},
      {[](Json& j) {
         j["text_config"].erase("rotary_dim");
         j["text_config"].erase("partial_rotary_factor");
       },
       {"neither", "rotary_dim"}},
      {text("rope_parameters", {{"rope_type", "default"}, {"rope_theta", 10000}}), {"rope_theta", "5000000", "10000"}},
      {text("num_attention_heads", 5), {"num_attention_heads 5", "num_key_value_heads 2"}},
      {text("num_experts_per_tok", 9), {"num_experts_per_tok 9", "num_local_experts 8"}},
      {text("num_experts_per_tok", 0), {"num_experts_per_tok", "found 0"}},
      {text("moe_layer_freq", {0, 1, 1}), {"moe_layer_freq", "5 layers", "3 entries"}},
      {text("moe_layer_freq", 1), {"moe_layer_freq", "list"}},
      {text("mlp_layer_types", {"sparse", "sparse", "sparse", "sparse", "sparse"}),
       {"moe_layer_freq", "mlp_layer_types"}},
      {sparse("sparse_attention_freq", {0, 1, 1, 1, 1, 1}), {"sparse_attention_freq", "6 entries"}},
      {sparse("sparse_disable_index_value", {0, 1}), {"sparse_disable_index_value", "found 2"}},
      {sparse("sparse_topk_blocks", 0), {"sparse_topk_blocks", "found 0"}},
      {sparse("sparse_local_block", 0), {"sparse_local_block", "found 0"}},
      {sparse("sparse_init_block", 16), {"sparse_init_block 16", "sparse_local_block 1", "sparse_topk_blocks 16"}},
      {sparse("sparse_num_index_heads", 4), {"sparse_num_index_heads 4", "num_key_value_heads 2"}},
      {sparse("sparse_index_dim", 16), {"rotary_dim 32", "sparse_index_dim 16"}},
      {text("sparse_topk_blocks", 8), {"sparse_topk_blocks", "16", "8"}},
      {text("swiglu_limit", 0), {"swiglu_limit", "0"}},
      {text("swiglu_limit", -1), {"swiglu_limit", "-1"}},
      {text("hidden_size", 0), {"hidden_size", "found 0"}},
      {text("hidden_size", -128), {"hidden_size", "-128"}},
      {text("hidden_size", "128"), {"hidden_size", "integer"}},
      {text("hidden_size", 128.5), {"hidden_size", "128.5"}},
      {text("hidden_size", uint64_t{18446744073709551615u}), {"hidden_size", "18446744073709551615"}},
      {text("num_hidden_layers", 1000000), {"num_hidden_layers", "1000000"}},
      {text("vocab_size", int64_t{1} << 40), {"vocab_size"}},
      {[](Json& j) {
         for (const char* key : {"hidden_size", "intermediate_size"}) j["text_config"][key] = 16777216;
         j["text_config"]["num_local_experts"] = 65536;
       },
       {"multiply to more than"}},
      {text("num_local_experts", nullptr), {"num_local_experts is missing"}},
      {[](Json& j) { j["text_config"].erase("hidden_size"); }, {"text_config.hidden_size is missing"}},
      {[](Json& j) { j["text_config"].erase("dense_intermediate_size"); }, {"dense_intermediate_size is missing"}},
      {[](Json& j) { j["text_config"].erase("max_position_embeddings"); }, {"max_position_embeddings is missing"}},
      {[](Json& j) { j["text_config"] = 3; }, {"text_config must be an object"}},
      {[](Json& j) { j["vision_config"] = {1}; }, {"vision_config must be an object"}},
      {[](Json& j) { j["vision_config"]["num_attention_heads"] = 3; }, {"160", "3"}},
  };
  for (const Case& c : cases) {
    Json j = tiny();
    c.edit(j);
    check_refused(j, c.words, Code::kInvalid);
  }
}

TEST_CASE("broken JSON of any kind is an error, not a crash", "[config]") {
  const std::string good = tiny().dump();
  CHECK_FALSE(ModelConfig::parse("").ok());
  CHECK_FALSE(ModelConfig::parse("[]").ok());
  CHECK_FALSE(ModelConfig::parse("null").ok());
  for (size_t n = 0; n < good.size(); n += 7) CHECK_FALSE(ModelConfig::parse(good.substr(0, n)).ok());
  const std::string deep(1'000'000, '[');
  CHECK_FALSE(ModelConfig::parse(deep).ok());
  std::string deep_object;
  for (int i = 0; i < 100'000; ++i) deep_object += "{\"a\":";
  CHECK_FALSE(ModelConfig::parse(deep_object).ok());
  // A nested value of any shape under every key is either ignored or refused.
  const Json base = tiny();
  for (const auto& [key, value] : base["text_config"].items()) {
    for (const Json& odd : {Json{{"a", {1, 2}}}, Json::array({Json::array()}), Json("x"), Json(1e300), Json(true)}) {
      Json j = base;
      j["text_config"][key] = odd;
      INFO(key << " = " << odd.dump());
      CHECK_NOTHROW(ModelConfig::parse(j.dump()).ok());
    }
  }
}

TEST_CASE("generation defaults come from their own file", "[config]") {
  const std::string config = tiny().dump();
  const auto with = [&](const char* text) { return ModelConfig::parse(config, text); };
  const auto c = with(R"({"temperature": 0.6, "top_p": 0.9, "top_k": 40, "eos_token_id": [7, 8], "bos_token_id": 3})");
  REQUIRE(c.ok());
  CHECK(c->temperature == 0.6);
  CHECK(c->top_p == 0.9);
  CHECK(c->top_k == 40);
  CHECK(c->eos_id == 7);
  CHECK(c->bos_id == 3);
  CHECK(with(R"({"do_sample": false})")->temperature == 0);
  CHECK_FALSE(with("{").ok());
  CHECK_FALSE(with(R"({"top_p": 2})").ok());
  CHECK_FALSE(with(R"({"eos_token_id": 1344})").ok());  // outside the vocabulary
}

TEST_CASE("image and video tokens matter only beside a vision tower", "[config]") {
  Json json = tiny();
  json["image_token_index"] = 200025;
  json["video_token_index"] = 200026;
  const auto with_tower = ModelConfig::parse(json.dump());
  REQUIRE_FALSE(with_tower.ok());
  CHECK(with_tower.status().message().find("image_token_index 200025 is outside the vocabulary") != std::string::npos);
  json.erase("vision_config");
  const auto text_only = ModelConfig::parse(json.dump());
  INFO(text_only.status().message());
  REQUIRE(text_only.ok());
  CHECK(text_only->image_id == -1);
  CHECK(text_only->video_id == -1);
}

TEST_CASE("opening names the file that is not there", "[config]") {
  test::TempFolder folder;
  const auto none = ModelConfig::open(storage::FileSystem::real(), folder.path());
  REQUIRE_FALSE(none.ok());
  CHECK(none.status().message().find("config.json") != std::string::npos);
  test::put_file(folder / "config.json", tiny().dump());
  test::put_file(folder / "generation_config.json", "");
  CHECK_FALSE(ModelConfig::open(storage::FileSystem::real(), folder.path()).ok());
  std::filesystem::remove(folder / "generation_config.json");
  CHECK(ModelConfig::open(storage::FileSystem::real(), folder.path()).ok());
  CHECK(ModelConfig::open(storage::FileSystem::real(), folder / "config.json").ok());
}

}  // namespace
}  // namespace firn::model
