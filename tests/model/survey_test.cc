// Survey: formats by companions, names in every spelling, each fault named; totals of the real layout.
#include <chrono>
#include <cstdlib>
#include <functional>

#include "model/synth.h"
#include "model/weights.h"
#include "support/catch.h"
#include "tests/model/checkpoint_fixture.h"

namespace firn::model {
namespace {

using test::HeldCheckpoint;
using test::HeldTensor;

std::string fixture(const std::string& name) { return std::string(FIRN_TEST_DATA) + "/fixtures/" + name; }
const std::string kText = "language_model.model.layers.";

Survey survey_of(const HeldCheckpoint& held) {
  test::TempFolder folder;
  held.write(folder / "m");
  auto survey = Survey::open(storage::FileSystem::real(), folder / "m");
  INFO(survey.status().message());
  REQUIRE(survey.ok());
  return std::move(survey).value();
}

bool any_contains(const std::vector<std::string>& list, const std::string& part) {
  for (const std::string& s : list) {
    if (s.find(part) != std::string::npos) return true;
  }
  return false;
}

WeightFormat format_of(const Survey& survey, Role role, int32_t layer, int32_t expert = -1) {
  for (const FoundSlot& f : survey.found) {
    if (f.slot->role == role && f.slot->layer == layer && f.slot->expert == expert && f.data != nullptr)
      return f.format;
  }
  FAIL("slot not found");
  return WeightFormat::kF32;
}

TEST_CASE("the tiny checkpoints and nano are complete", "[survey]") {
  for (const std::string& path : {fixture("tiny-bf16"), fixture("tiny-mxfp8"), std::string(FIRN_NANO) + "/nano-bf16",
                                  std::string(FIRN_NANO) + "/nano-mxfp8"}) {
    const auto survey = Survey::open(storage::FileSystem::real(), path);
    INFO(path << ": " << survey.status().message());
    REQUIRE(survey.ok());
    INFO(survey->loadable().message());
    CHECK(survey->loadable().ok());
    CHECK(survey->missing.empty());
    CHECK(survey->unexpected.empty());
    CHECK(survey->has_vision);
    int64_t bytes = 0;
    for (const auto& t : survey->checkpoint.tensors) bytes += t.bytes;
    CHECK(survey->bytes == bytes);
  }
  const auto nano = Survey::open(storage::FileSystem::real(), std::string(FIRN_NANO) + "/nano-mxfp8");
  CHECK(nano->parameters == 3'978'472);  // its README
  CHECK(format_of(*nano, Role::kExpertUp, 1, 0) == WeightFormat::kMxfp8);
  CHECK(format_of(*nano, Role::kRouterGate, 1) == WeightFormat::kF32);
}

TEST_CASE("alternative spellings of names mean the same", "[survey]") {
  const HeldCheckpoint held = HeldCheckpoint::read(fixture("tiny-mxfp8"));
  const auto replaced = [](std::string name, const std::string& from, const std::string& to) {
    const size_t at = name.find(from);
    return at == std::string::npos ? name : name.replace(at, from.size(), to);
  };
  using Rename = std::function<std::string(std::string)>;
  const Rename no_prefix = [&](std::string n) { return replaced(n, "language_model.", ""); };
  const Rename inner_prefix = [&](std::string n) {
    return n.find("lm_head") != std::string::npos ? replaced(n, "language_model.", "")
                                                  : replaced(n, "language_model.model.", "model.language_model.");
  };
  const Rename other = [&](std::string n) {
    n = replaced(n, "self_attn.index_", "self_attn.indexer.");
    n = replaced(n, "block_sparse_moe.e_score", "mlp.gate.e_score");
    n = replaced(n, "block_sparse_moe.", "mlp.");
    n = replaced(n, ".w1.", ".gate_proj.");
    n = replaced(n, ".w3.", ".up_proj.");
    return replaced(n, ".w2.", ".down_proj.");
  };
  for (const Rename& rename : {no_prefix, inner_prefix, other}) {
    HeldCheckpoint changed;
    changed.config = held.config;
    for (const auto& [name, t] : held.tensors) changed.tensors[rename(name)] = t;
    const Survey survey = survey_of(changed);
    INFO(survey.loadable().message());
    CHECK(survey.loadable().ok());
    CHECK(survey.unexpected.empty());
    CHECK(survey.parameters == 2'704'032);
  }
}

TEST_CASE("every kind of missing tensor stops the load and is named", "[survey]") {
  const HeldCheckpoint held = HeldCheckpoint::read(fixture("tiny-mxfp8"));
  for (const std::string name : {"2.block_sparse_moe.shared_experts.up_proj.weight", "2.self_attn.index_k_proj.weight",
                                 "3.self_attn.index_k_norm.weight", "1.block_sparse_moe.e_score_correction_bias",
                                 "1.block_sparse_moe.gate.weight", "4.block_sparse_moe.experts.7.w2.weight",
                                 "4.block_sparse_moe.experts.7.w2.weight_scale_inv", "0.mlp.gate_proj.weight",
                                 "0.input_layernorm.weight", "0.self_attn.q_proj.weight_scale_inv"}) {
    HeldCheckpoint changed = held;
    changed.remove(kText + name);
    const Survey survey = survey_of(changed);
    INFO(name);
    CHECK(any_contains(survey.missing, kText + name));
    const Status loadable = survey.loadable();
    REQUIRE_FALSE(loadable.ok());
    INFO(loadable.message());
    CHECK(loadable.message().find(kText + name) != std::string::npos);
  }
  for (const std::string name : {"language_model.lm_head.weight", "language_model.model.norm.weight",
                                 "language_model.model.embed_tokens.weight"}) {
    HeldCheckpoint changed = held;
    changed.remove(name);
    CHECK(any_contains(survey_of(changed).missing, name));
  }
}

TEST_CASE("renamed, extra, orphaned and stacked tensors are named", "[survey]") {
  const HeldCheckpoint held = HeldCheckpoint::read(fixture("tiny-mxfp8"));
  HeldCheckpoint changed = held;
  changed.rename(kText + "2.self_attn.v_proj.weight", kText + "2.self_attn.value_proj.weight");
  Survey survey = survey_of(changed);
  CHECK(any_contains(survey.missing, "2.self_attn.v_proj.weight"));
  CHECK(any_contains(survey.unexpected, "2.self_attn.value_proj.weight"));
  CHECK(any_contains(survey.mismatched, "2.self_attn.v_proj.weight_scale_inv: a scale without its weight"));
  CHECK_FALSE(survey.loadable().ok());

  changed = held;
  changed.tensors[kText + "2.self_attn.index_v_proj.weight"] = {DType::kBf16, {1, 1}, {0, 0}};
  survey = survey_of(changed);
  CHECK(survey.unexpected == std::vector<std::string>{kText + "2.self_attn.index_v_proj.weight"});
  CHECK(survey.loadable().message().find("index_v_proj") != std::string::npos);

  for (const std::string name : {"block_sparse_moe.experts.gate_up_proj", "mlp.experts.gate_up_proj_blocks",
                                 "block_sparse_moe.experts.w1.weight"}) {
    changed = held;
    changed.tensors[kText + "2." + name] = {DType::kBf16, {8, 1, 1}, std::vector<uint8_t>(16)};
    survey = survey_of(changed);
    INFO(name);
    CHECK(any_contains(survey.unsupported, "stacked experts"));
    CHECK(survey.loadable().code() == Code::kUnsupported);
  }
}

TEST_CASE("what is known and not needed does not stop a load", "[survey]") {
  HeldCheckpoint held = HeldCheckpoint::read(fixture("tiny-mxfp8"));
  const HeldTensor one{DType::kF32, {}, {0, 0, 128, 63}};
  held.tensors[kText + "1.block_sparse_moe.experts.0.w1.input_scale"] = one;
  held.tensors[kText + "1.self_attn.k_proj.k_scale"] = one;
  held.tensors[kText + "1.self_attn.v_proj.v_scale"] = one;
  held.tensors["language_model.model.mtp.layers.0.enorm.weight"] = one;
  const Survey survey = survey_of(held);
  CHECK(survey.ignored.size() == 4);
  CHECK(survey.unexpected.empty());
  CHECK(survey.loadable().ok());
}

TEST_CASE("a checkpoint without vision loads, one with part of it does not", "[survey]") {
  HeldCheckpoint held = HeldCheckpoint::read(fixture("tiny-bf16"));
  HeldCheckpoint partly = held;
  partly.remove("multi_modal_projector.linear_1.bias");
  Survey survey = survey_of(partly);
  CHECK_FALSE(survey.has_vision);
  CHECK_FALSE(survey.vision_absent);
  CHECK(survey.missing.size() == 1);
  CHECK(any_contains(survey.missing, "multi_modal_projector.linear_1.bias"));

  for (auto it = held.tensors.begin(); it != held.tensors.end();) {
    it = it->first.rfind("language_model.", 0) == 0 ? std::next(it) : held.tensors.erase(it);
  }
  survey = survey_of(held);
  CHECK(survey.vision_absent);
  CHECK(survey.missing.empty());
  CHECK(survey.loadable().ok());
}

TEST_CASE("wrong types and shapes say what was expected and what was found", "[survey]") {
  const HeldCheckpoint held = HeldCheckpoint::read(fixture("tiny-bf16"));
  struct Case {
    std::string name;
    DType dtype;
    std::vector<int64_t> shape;
    std::vector<std::string> words;
    bool unsupported = false;
  };
  const Case cases[] = {
      {"2.self_attn.q_proj.weight", DType::kBf16, {128, 256}, {"[256, 128]", "[128, 256]"}},
      {"2.self_attn.q_proj.weight", DType::kI32, {256, 128}, {"I32", "BF16"}},
      {"2.self_attn.q_proj.weight", DType::kF16, {256, 128}, {"plain F16"}, true},
      {"2.self_attn.q_proj.weight", DType::kF8E5m2, {256, 128}, {"E5M2"}, true},
      {"2.input_layernorm.weight", DType::kBf16, {127}, {"[128]", "[127]"}},
      {"2.input_layernorm.weight", DType::kF16, {128}, {"plain F16"}, true},
      {"2.block_sparse_moe.gate.weight", DType::kF8E4m3, {8, 128}, {"F8_E4M3", "F32"}},
      {"2.block_sparse_moe.e_score_correction_bias", DType::kF32, {8, 1}, {"[8]", "[8, 1]"}},
  };
  for (const Case& c : cases) {
    HeldCheckpoint changed = held;
    int64_t n = static_cast<int64_t>(dtype_bytes(c.dtype));
    for (const int64_t d : c.shape) n *= d;
    changed.at(kText + c.name) = {c.dtype, c.shape, std::vector<uint8_t>(static_cast<size_t>(n))};
    const Survey survey = survey_of(changed);
    const auto& list = c.unsupported ? survey.unsupported : survey.mismatched;
    INFO(c.name << " " << dtype_name(c.dtype));
    REQUIRE(list.size() == 1);
    for (const std::string& word : c.words) CHECK(list[0].find(word) != std::string::npos);
    CHECK_FALSE(survey.loadable().ok());
  }
}

// One row of formats.md section 2: what lies beside `stem` and what it is taken for.
TEST_CASE("the format of a matrix follows from its companions", "[survey]") {
  const HeldCheckpoint base = HeldCheckpoint::read(fixture("tiny-bf16"));
  const std::string stem = kText + "2.block_sparse_moe.experts.3.w1";  // [64, 128]
  struct Part {
    const char* leaf;
    DType dtype;
    std::vector<int64_t> shape;
  };
  struct Case {
    const char* name;
    std::vector<Part> parts;
    WeightFormat format;
    std::string refusal;  // empty: accepted
    std::string method = "compressed-tensors";
  };
  const std::vector<int64_t> full{64, 128}, half{64, 64}, s32{64, 4}, s16{64, 8};
  const Case cases[] = {
      {"F32", {{"weight", DType::kF32, full}}, WeightFormat::kF32, "", ""},
      {"MXFP8 vendor",
       {{"weight", DType::kF8E4m3, full}, {"weight_scale_inv", DType::kU8, s32}},
       WeightFormat::kMxfp8,
       ""},
      {"MXFP8 ModelOpt",
       {{"weight", DType::kF8E4m3, full}, {"weight_scale", DType::kU8, s32}},
       WeightFormat::kMxfp8,
       ""},
      {"MXFP8 typed scales",
       {{"weight", DType::kF8E4m3, full}, {"weight_scale", DType::kF8E8m0, s32}},
       WeightFormat::kMxfp8,
       ""},
      {"NVFP4 ModelOpt",
       {{"weight", DType::kU8, half}, {"weight_scale", DType::kF8E4m3, s16}, {"weight_scale_2", DType::kF32, {}}},
       WeightFormat::kNvfp4,
       ""},
      {"NVFP4 ModelOpt, scalar of shape [1]",
       {{"weight", DType::kU8, half}, {"weight_scale", DType::kF8E4m3, s16}, {"weight_scale_2", DType::kF32, {1}}},
       WeightFormat::kNvfp4,
       ""},
      {"NVFP4 compressed-tensors",
       {{"weight_packed", DType::kU8, half},
        {"weight_scale", DType::kF8E4m3, s16},
        {"weight_global_scale", DType::kF32, {1}}},
       WeightFormat::kNvfp4,
       ""},
      {"MXFP4 compressed-tensors",
       {{"weight_packed", DType::kU8, half}, {"weight_scale", DType::kU8, s32}},
       WeightFormat::kMxfp4,
       ""},
      {"FP8 tiles",
       {{"weight", DType::kF8E4m3, full}, {"weight_scale_inv", DType::kF32, {1, 1}}},
       WeightFormat::kF32,
       "128x128 tiles"},
      {"FP8 per tensor",
       {{"weight", DType::kF8E4m3, full}, {"weight_scale", DType::kF32, {}}},
       WeightFormat::kF32,
       "scale per tensor"},
      {"FP8 per row",
       {{"weight", DType::kF8E4m3, full}, {"weight_scale", DType::kBf16, {64, 1}}},
       WeightFormat::kF32,
       "scale per row"},
      {"Quark", {{"weight", DType::kU8, half}, {"weight_scale", DType::kU8, s32}}, WeightFormat::kF32, "Quark"},
      {"swizzled",
       {{"weight", DType::kU8, half}, {"weight_scale", DType::kF8E4m3, {128, 8}}, {"weight_scale_2", DType::kF32, {}}},
       WeightFormat::kF32,
       "swizzled"},
      {"integers", {{"weight_packed", DType::kI32, {64, 16}}}, WeightFormat::kF32, "integer-packed"},
      {"no scale", {{"weight", DType::kF8E4m3, full}}, WeightFormat::kF32, "weight_scale_inv"},
      {"packed, no scale", {{"weight", DType::kU8, half}}, WeightFormat::kF32, "packed FP4?"},
      {"no scalar",
       {{"weight", DType::kU8, half}, {"weight_scale", DType::kF8E4m3, s16}},
       WeightFormat::kF32,
       "weight_scale_2"},
      {"no global scale",
       {{"weight_packed", DType::kU8, half}, {"weight_scale", DType::kF8E4m3, s16}},
       WeightFormat::kF32,
       "weight_global_scale"},
      {"scale beside plain",
       {{"weight", DType::kBf16, full}, {"weight_scale", DType::kU8, s32}},
       WeightFormat::kF32,
       "no such tensor"},
      {"scale shape",
       {{"weight", DType::kF8E4m3, full}, {"weight_scale", DType::kU8, {64, 3}}},
       WeightFormat::kF32,
       "[64, 4]"},
      {"both scales",
       {{"weight", DType::kF8E4m3, full}, {"weight_scale", DType::kU8, s32}, {"weight_scale_inv", DType::kU8, s32}},
       WeightFormat::kF32,
       "expected one of them"},
      {"two weights",
       {{"weight", DType::kBf16, full}, {"weight_packed", DType::kU8, half}},
       WeightFormat::kF32,
       "both weight"},
      {"declared otherwise",
       {{"weight_packed", DType::kU8, half}, {"weight_scale", DType::kU8, s32}},
       WeightFormat::kF32,
       "quant_method is \"mxfp8\"",
       "mxfp8"},
  };
  for (const Case& c : cases) {
    HeldCheckpoint held = base;
    held.remove(stem + ".weight");
    for (const Part& part : c.parts) {
      int64_t n = static_cast<int64_t>(dtype_bytes(part.dtype));
      for (const int64_t d : part.shape) n *= d;
      held.tensors[stem + "." + part.leaf] = {part.dtype, part.shape, std::vector<uint8_t>(static_cast<size_t>(n))};
    }
    if (!c.method.empty()) held.config["quantization_config"] = {{"quant_method", c.method}};
    const Survey survey = survey_of(held);
    INFO(c.name << ": " << survey.loadable().message());
    if (c.refusal.empty()) {
      CHECK(survey.loadable().ok());
      CHECK(format_of(survey, Role::kExpertGate, 2, 3) == c.format);
    } else {
      const Status status = survey.loadable();
      REQUIRE_FALSE(status.ok());
      CHECK(status.message().find(c.refusal) != std::string::npos);
      CHECK(status.message().find(c.name == std::string("declared otherwise") ? "config.json" : stem) !=
            std::string::npos);
    }
  }
}

TEST_CASE("a width that no scale group divides is refused", "[survey]") {
  HeldCheckpoint held = HeldCheckpoint::read(fixture("tiny-mxfp8"));
  held.config["text_config"]["shared_intermediate_size"] = 48;  // down_proj then has 48 inputs
  const std::string stem = kText + "2.block_sparse_moe.shared_experts.down_proj";
  held.at(stem + ".weight") = {DType::kF8E4m3, {128, 48}, std::vector<uint8_t>(128 * 48)};
  held.at(stem + ".weight_scale_inv") = {DType::kU8, {128, 2}, std::vector<uint8_t>(256)};
  CHECK(any_contains(survey_of(held).mismatched, "multiple of 32, found 48"));
}

// Specification 2.6 on the release's own layout.
TEST_CASE("the real layout: totals by group, and within seconds", "[survey][layout]") {
  test::TempFolder folder;
  struct Row {
    Group group;
    int64_t parameters, bf16, mxfp8;
  };
  const Row rows[] = {
      {Group::kEmbed, 1'229'193'216, 2'458'386'432, 2'458'386'432},
      {Group::kLmHead, 1'229'193'216, 2'458'386'432, 2'458'386'432},
      {Group::kAttention, 6'417'285'120, 12'834'570'240, 6'617'825'280},
      {Group::kLayerNorms, 752'640, 1'505'280, 1'505'280},
      {Group::kFinalNorm, 6'144, 12'288, 12'288},
      {Group::kIndexer, 224'133'120, 448'266'240, 231'137'280},
      {Group::kIndexerNorms, 14'592, 29'184, 29'184},
      {Group::kDenseMlp, 679'477'248, 1'358'954'496, 700'710'912},
      {Group::kExperts, 413'122'166'784, 826'244'333'568, 426'032'234'496},
      {Group::kShared, 3'227'516'928, 6'455'033'856, 3'328'376'832},
      {Group::kRouter, 44'826'624, 179'306'496, 179'306'496},
      {Group::kRouterBias, 7'296, 29'184, 29'184},
      {Group::kVisionBlocks, 629'680'640, 1'259'361'280, 1'259'361'280},
      {Group::kPatchEmbedding, 1'505'280, 6'021'120, 6'021'120},
      {Group::kProjector, 45'625'344, 91'250'688, 91'250'688},
      {Group::kPatchMerge, 188'755'968, 377'511'936, 377'511'936},
  };
  const std::pair<const char*, size_t> formats[] = {{"bf16", 23'416}, {"mxfp8", 45'838}, {"nvfp4", 89'614}};
  for (const auto& [format, tensors] : formats) {
    const std::string out = folder / format;
    const std::string command = "python3 '" FIRN_SOURCE_DIR "/tests/make_layout.py' --format " + std::string(format) +
                                " --out '" + out + "' >/dev/null";
    REQUIRE(std::system(command.c_str()) == 0);
    const auto start = std::chrono::steady_clock::now();
    const auto survey = Survey::open(storage::FileSystem::real(), out);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    INFO(format << ": " << survey.status().message());
    REQUIRE(survey.ok());
    INFO(survey->loadable().message());
    CHECK(survey->loadable().ok());
    CHECK(survey->checkpoint.tensors.size() == tensors);
    CHECK(survey->parameters == 427'040'140'160);
    CHECK(survey->has_vision);
#if defined(FIRN_ASAN) || defined(FIRN_TSAN)
    CHECK(seconds < 120.0);
#else
    CHECK(seconds < 5.0);
#endif
    const std::string name = format;
    int64_t routed = 0;
    for (const Row& row : rows) {
      const auto& total = survey->groups[static_cast<size_t>(row.group)];
      INFO(group_name(row.group));
      CHECK(total.parameters == row.parameters);
      if (name == "nvfp4" && row.group == Group::kExperts) {
        routed = total.bytes;
      } else {
        CHECK(total.bytes == (name == "bf16" ? row.bf16 : row.mxfp8));
      }
    }
    if (name == "bf16") CHECK(survey->bytes == 854'172'958'720);
    if (name == "mxfp8") CHECK(survey->bytes == 443'742'085'120);
    if (name == "nvfp4") {
      // 9/16 of a byte a parameter and one scalar for each of 57 * 128 * 3 matrices.
      CHECK(routed == 413'122'166'784 / 16 * 9 + 57 * 128 * 3 * 4);
      CHECK(survey->bytes - 57 * 128 * 3 * 4 == 250'091'069'440);
      CHECK(survey->ignored.size() == 57 * 128 * 3);
    }
    CHECK(survey->config.kv_bytes_per_token(DType::kBf16) == 122'880);
    CHECK(survey->config.index_bytes_per_token(DType::kBf16) == 14'592 + 57 * 68);  // keys and their copy
  }
}

}  // namespace
}  // namespace firn::model
