// load_weights: what arrives is what was stored; damaged files and scales are refused with the place.
#include <cmath>
#include <filesystem>

#include "cpu/reference.h"
#include "model/weights.h"
#include "support/catch.h"
#include "tests/model/checkpoint_fixture.h"

namespace firn::model {
namespace {

using test::HeldCheckpoint;

std::string fixture(const std::string& name) { return std::string(FIRN_TEST_DATA) + "/fixtures/" + name; }
const std::string kText = "language_model.model.layers.";

// Weights with the budget and arena they live in.
struct Loaded {
  Budget budget{"--ram", -1};
  HostArena arena{&budget};
  Result<Weights> weights = internal("not loaded");

  explicit Loaded(const std::string& path, const LoadOptions& options = {}) {
    const auto survey = Survey::open(storage::FileSystem::real(), path);
    if (survey.ok()) {
      weights = load_weights(storage::FileSystem::real(), *survey, arena, options);
    } else {
      weights = survey.status();
    }
  }
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;
};

std::string refusal(const HeldCheckpoint& held) {
  test::TempFolder folder;
  held.write(folder / "m");
  Loaded loaded(folder / "m");
  if (loaded.weights.ok()) return "";
  CHECK(loaded.budget.used_bytes() == 0);  // nothing stays behind
  return loaded.weights.status().message();
}

void check_bytes(const void* found, const test::HeldTensor& expected) {
  CHECK(std::memcmp(found, expected.bytes.data(), expected.bytes.size()) == 0);
}

TEST_CASE("every text tensor arrives as stored", "[load]") {
  for (const std::string name : {"tiny-bf16", "tiny-mxfp8"}) {
    for (const bool direct : {true, false}) {
      LoadOptions options;
      options.direct = direct;
      options.n_readers = direct ? 3 : 1;
      int64_t last = 0;
      options.progress = [&](int64_t done, int64_t total) {
        CHECK(done >= last);
        CHECK(done <= total);
        last = done;
      };
      Loaded loaded(fixture(name), options);
      INFO(loaded.weights.status().message());
      REQUIRE(loaded.weights.ok());
      const Weights& w = *loaded.weights;
      HeldCheckpoint held = HeldCheckpoint::read(fixture(name));
      check_bytes(w.embed.data, held.at("language_model.model.embed_tokens.weight"));
      check_bytes(w.lm_head.data, held.at("language_model.lm_head.weight"));
      check_bytes(w.final_norm.data, held.at("language_model.model.norm.weight"));
      CHECK(w.final_norm.offset == 1.0f);
      CHECK(w.final_norm.eps == 1e-6f);
      REQUIRE(w.layers.size() == 5);
      const auto matrix = [&](const WeightView& view, const std::string& stem) {
        INFO(stem);
        REQUIRE_FALSE(view.empty());
        check_bytes(view.data, held.at(stem + ".weight"));
        CHECK(reinterpret_cast<uintptr_t>(view.data) % 64 == 0);
        if (view.format == WeightFormat::kMxfp8) {
          check_bytes(view.scales, held.at(stem + ".weight_scale_inv"));
          CHECK(reinterpret_cast<uintptr_t>(view.scales) % 64 == 0);
        }
      };
      int64_t experts = 0;
      for (size_t l = 0; l < 5; ++l) {
        const LayerWeights& layer = w.layers[l];
        const std::string at = kText + std::to_string(l) + ".";
        matrix(layer.q, at + "self_attn.q_proj");
        matrix(layer.k, at + "self_attn.k_proj");
        matrix(layer.v, at + "self_attn.v_proj");
        matrix(layer.o, at + "self_attn.o_proj");
        check_bytes(layer.input_norm.data, held.at(at + "input_layernorm.weight"));
        check_bytes(layer.post_norm.data, held.at(at + "post_attention_layernorm.weight"));
        check_bytes(layer.q_norm.data, held.at(at + "self_attn.q_norm.weight"));
        check_bytes(layer.k_norm.data, held.at(at + "self_attn.k_norm.weight"));
        if (l == 0) {
          matrix(layer.mlp_gate, at + "mlp.gate_proj");
          matrix(layer.mlp_up, at + "mlp.up_proj");
          matrix(layer.mlp_down, at + "mlp.down_proj");
          CHECK(layer.experts.empty());
          CHECK(layer.index_q.empty());
          CHECK(layer.router.empty());
          continue;
        }
        CHECK(layer.mlp_gate.empty());
        matrix(layer.index_q, at + "self_attn.index_q_proj");
        matrix(layer.index_k, at + "self_attn.index_k_proj");
        check_bytes(layer.index_q_norm.data, held.at(at + "self_attn.index_q_norm.weight"));
        check_bytes(layer.index_k_norm.data, held.at(at + "self_attn.index_k_norm.weight"));
        matrix(layer.router, at + "block_sparse_moe.gate");
        CHECK(layer.router.format == WeightFormat::kF32);
        check_bytes(layer.router_bias.data, held.at(at + "block_sparse_moe.e_score_correction_bias"));
        matrix(layer.shared_gate, at + "block_sparse_moe.shared_experts.gate_proj");
        matrix(layer.shared_up, at + "block_sparse_moe.shared_experts.up_proj");
        matrix(layer.shared_down, at + "block_sparse_moe.shared_experts.down_proj");
        REQUIRE(layer.experts.size() == 8);
        for (size_t e = 0; e < 8; ++e) {
          const std::string expert = at + "block_sparse_moe.experts." + std::to_string(e) + ".";
          matrix(layer.experts[e].gate, expert + "w1");
          matrix(layer.experts[e].up, expert + "w3");
          matrix(layer.experts[e].down, expert + "w2");
          experts += layer.experts[e].gate.bytes() + layer.experts[e].up.bytes() + layer.experts[e].down.bytes();
        }
      }
      CHECK(w.experts_bytes == experts);
      CHECK(loaded.budget.used_bytes() == w.bytes);
    }
  }
}

TEST_CASE("a bf16 router bias is widened exactly", "[load]") {
  HeldCheckpoint held = HeldCheckpoint::read(fixture("tiny-bf16"));
  auto& bias = held.at(kText + "2.block_sparse_moe.e_score_correction_bias");
  std::vector<float> expected(8);
  bias.dtype = DType::kBf16;
  bias.bytes.resize(16);
  for (size_t i = 0; i < 8; ++i) {
    const Bf16 v = to_bf16(static_cast<float>(i) * 0.37f - 1.0f);
    expected[i] = to_float(v);
    std::memcpy(bias.bytes.data() + 2 * i, &v.bits, 2);
  }
  test::TempFolder folder;
  held.write(folder / "m");
  Loaded loaded(folder / "m");
  REQUIRE(loaded.weights.ok());
  const auto* found = static_cast<const float*>(loaded.weights->layers[2].router_bias.data);
  for (size_t i = 0; i < 8; ++i) CHECK(found[i] == expected[i]);
}

TEST_CASE("NaN codes are named with tensor and place", "[load]") {
  const HeldCheckpoint held = HeldCheckpoint::read(fixture("tiny-mxfp8"));
  const std::string stem = kText + "3.block_sparse_moe.experts.5.w2";
  for (const uint8_t code : {uint8_t{0}, uint8_t{1}, uint8_t{127}, uint8_t{254}}) {
    HeldCheckpoint changed = held;
    changed.at(stem + ".weight_scale_inv").bytes[7] = code;
    CHECK(refusal(changed).empty());
  }
  HeldCheckpoint changed = held;
  changed.at(stem + ".weight_scale_inv").bytes[2 * 37 + 1] = 255;  // [128, 2]
  std::string message = refusal(changed);
  INFO(message);
  CHECK(message.find(stem + ".weight_scale_inv") != std::string::npos);
  CHECK(message.find("[37, 1]") != std::string::npos);
  for (const uint8_t code : {uint8_t{0x7F}, uint8_t{0xFF}}) {
    changed = held;
    changed.at(stem + ".weight").bytes[64 * 127 + 63] = code;  // the last code of [128, 64]
    message = refusal(changed);
    INFO(message);
    CHECK(message.find(stem + ".weight:") != std::string::npos);
    CHECK(message.find("[127, 63]") != std::string::npos);
  }
}

// Stores expert 3's w1 of layer 2 as NVFP4 in one of the two namings.
HeldCheckpoint with_nvfp4(bool inverse_name, float scalar, uint8_t scale_code) {
  HeldCheckpoint held = HeldCheckpoint::read(fixture("tiny-bf16"));
  held.config["quantization_config"] = {{"quant_method", "compressed-tensors"}};
  const std::string stem = kText + "2.block_sparse_moe.experts.3.w1";
  held.remove(stem + ".weight");
  held.tensors[stem + (inverse_name ? ".weight_packed" : ".weight")] = {
      DType::kU8, {64, 64}, std::vector<uint8_t>(64 * 64, 0x2B)};
  held.tensors[stem + ".weight_scale"] = {DType::kF8E4m3, {64, 8}, std::vector<uint8_t>(64 * 8, scale_code)};
  test::HeldTensor value{DType::kF32, {}, std::vector<uint8_t>(4)};
  std::memcpy(value.bytes.data(), &scalar, 4);
  held.tensors[stem + (inverse_name ? ".weight_global_scale" : ".weight_scale_2")] = value;
  return held;
}

TEST_CASE("the scalar of NVFP4 multiplies in one naming and divides in the other", "[load]") {
  for (const bool inverse : {false, true}) {
    test::TempFolder folder;
    with_nvfp4(inverse, inverse ? 100.0f : 0.01f, 0x40).write(folder / "m");
    Loaded loaded(folder / "m");
    INFO(loaded.weights.status().message());
    REQUIRE(loaded.weights.ok());
    const WeightView& view = loaded.weights->layers[2].experts[3].gate;
    CHECK(view.format == WeightFormat::kNvfp4);
    std::vector<float> row(128);
    cpu::reference_dequantise_row(view, 63, row.data());
    CHECK(row[0] == Approx(-0.03f));
    CHECK(row[127] == Approx(0.02f));
  }
}

TEST_CASE("bad NVFP4 scales are refused", "[load]") {
  const std::string stem = kText + "2.block_sparse_moe.experts.3.w1";
  for (const uint8_t code : {uint8_t{0x7F}, uint8_t{0x80}, uint8_t{0xB8}, uint8_t{0xFF}}) {
    const std::string message = refusal(with_nvfp4(false, 0.01f, code));
    INFO(message);
    CHECK(message.find(stem + ".weight_scale") != std::string::npos);
    CHECK(message.find("[0, 0]") != std::string::npos);
  }
  for (const float scalar : {0.0f, -1.0f, INFINITY, NAN}) {
    const std::string message = refusal(with_nvfp4(false, scalar, 0x40));
    INFO(message);
    CHECK(message.find(stem + ".weight_scale_2") != std::string::npos);
  }
  // The scalar of the other naming: weights would be ten thousand times too large or too small.
  for (const auto& [inverse, scalar] : {std::pair{false, 100.0f}, std::pair{true, 0.01f}}) {
    const std::string message = refusal(with_nvfp4(inverse, scalar, 0x40));
    INFO(message);
    CHECK(message.find("inverse") != std::string::npos);
    CHECK(message.find(stem) != std::string::npos);
  }
}

TEST_CASE("damaged and missing shards are refused with file, expected and found", "[load]") {
  namespace stdfs = std::filesystem;
  const auto copy = [](const test::TempFolder& folder) {
    stdfs::copy(fixture("tiny-mxfp8"), folder / "m");
    for (const auto& entry : stdfs::directory_iterator(folder / "m")) {
      stdfs::permissions(entry.path(), stdfs::perms::owner_all);
    }
    return folder / "m";
  };
  const std::string shard = "model-00002-of-00003.safetensors";
  {
    test::TempFolder folder;
    const std::string m = copy(folder);
    stdfs::remove(m + "/" + shard);
    Loaded loaded(m);
    REQUIRE_FALSE(loaded.weights.ok());
    CHECK(loaded.weights.status().message().find(shard) != std::string::npos);
  }
  const int64_t size = static_cast<int64_t>(stdfs::file_size(fixture("tiny-mxfp8") + "/" + shard));
  uint64_t header = 0;
  std::memcpy(&header, test::get_file(fixture("tiny-mxfp8") + "/" + shard).data(), 8);
  for (const int64_t left :
       {size - 1, size - 5000, int64_t{8} + static_cast<int64_t>(header), int64_t{100}, int64_t{0}}) {
    test::TempFolder folder;
    const std::string m = copy(folder);
    stdfs::resize_file(m + "/" + shard, static_cast<uintmax_t>(left));
    Loaded loaded(m);
    INFO(left << " bytes: " << loaded.weights.status().message());
    REQUIRE_FALSE(loaded.weights.ok());
    CHECK(loaded.weights.status().message().find(shard) != std::string::npos);
  }
  {
    // The file shrinks between the survey and the load.
    test::TempFolder folder;
    const std::string m = copy(folder);
    const auto survey = Survey::open(storage::FileSystem::real(), m);
    REQUIRE(survey.ok());
    stdfs::resize_file(m + "/" + shard, static_cast<uintmax_t>(size - 20000));
    Budget budget("--ram", -1);
    HostArena arena(&budget);
    const auto weights = load_weights(storage::FileSystem::real(), *survey, arena, {});
    REQUIRE_FALSE(weights.ok());
    INFO(weights.status().message());
    CHECK(weights.status().message().find(shard) != std::string::npos);
    CHECK(budget.used_bytes() == 0);
  }
}

TEST_CASE("a budget that is too small is refused with the number that is short", "[load]") {
  const auto survey = Survey::open(storage::FileSystem::real(), fixture("tiny-bf16"));
  REQUIRE(survey.ok());
  Budget budget("--ram", 1'000'000);
  HostArena arena(&budget);
  const auto weights = load_weights(storage::FileSystem::real(), *survey, arena, {});
  REQUIRE_FALSE(weights.ok());
  CHECK(weights.status().code() == Code::kNoMemory);
  CHECK(weights.status().message().find("--ram") != std::string::npos);
  CHECK(budget.used_bytes() == 0);
  CHECK(budget.peak_bytes() <= 1'000'000);
}

TEST_CASE("loading can be cancelled", "[load]") {
  const std::atomic<bool> cancel{true};
  LoadOptions options;
  options.cancel = &cancel;
  Loaded loaded(fixture("tiny-bf16"), options);
  REQUIRE_FALSE(loaded.weights.ok());
  CHECK(loaded.weights.status().code() == Code::kCancelled);
}

TEST_CASE("another architecture is refused before anything is read", "[load]") {
  HeldCheckpoint held = HeldCheckpoint::read(fixture("tiny-bf16"));
  held.config["model_type"] = "qwen3_moe";
  held.config["architectures"] = {"Qwen3MoeForCausalLM"};
  const std::string message = refusal(held);
  CHECK(message.find("qwen3_moe") != std::string::npos);
  CHECK(message.find("MiniMax-M3") != std::string::npos);
}

}  // namespace
}  // namespace firn::model
