// Every golden of tests/data/fixtures/golden in --precise mode, against the float32 reference within the tolerances
// that tests/data/README.md measured; and the default mode's agreement with it, against the reference's own bf16 run.
#include <nlohmann/json.hpp>

#include <fstream>

#include "golden/run_wave.h"
#include "support/catch.h"

namespace firn::test {
namespace {

using model::Capture;
using storage::SafetensorsFile;

const char* const kPrompts[] = {"p1",    "p2",    "p127",  "p128",  "p129", "p300", "p2048",
                                "p2049", "p2176", "p2500", "p4500", "chat", "text"};

struct Golden {
  explicit Golden(const std::string& path) : file(must(SafetensorsFile::read(data_path("golden/" + path)))) {}
  SafetensorsFile file;
  template <typename T>
  std::vector<T> get(const std::string& name) const {
    return tensor<T>(file, name);
  }
};

void check_prompt(model::Engine& engine, const std::string& checkpoint, const std::string& prompt) {
  INFO(checkpoint << " " << prompt);
  const bool random = prompt != "chat" && prompt != "text";
  const Golden golden(checkpoint + "/" + prompt + ".safetensors");
  const auto ids = golden.get<int32_t>("input_ids");
  const auto positions = golden.get<int32_t>("positions");
  const int64_t n = static_cast<int64_t>(ids.size()), P = static_cast<int64_t>(positions.size());
  const auto& c = engine.config();
  const int64_t H = c.hidden, M = c.n_moe(), E = c.experts, k = c.experts_per_token, G = c.index_heads,
                K = c.topk_blocks;

  model::KvCache kv(&engine.kv_pools());
  Capture capture;
  capture.hidden = capture.routing = capture.blocks = true;
  const WaveRun run = run_wave(engine, one_span(&kv, ids, iota(n)), capture);
  const model::Captured& got = run.captured();
  REQUIRE(kv.length() == n);

  const auto logits = golden.get<float>("logits"), hidden = golden.get<float>("layer_hidden"),
             final_hidden = golden.get<float>("final_hidden"), router_logits = golden.get<float>("router_logits"),
             expert_weights = golden.get<float>("expert_weights"), router_margin = golden.get<float>("router_margin"),
             block_margin = golden.get<float>("block_margin");
  const auto expert_ids = golden.get<int32_t>("expert_ids"), block_ids = golden.get<int32_t>("block_ids");
  double worst_logits = 0, worst_hidden = 0, worst_final = 0, worst_router = 0, worst_weight = 0;
  int64_t compared_picks = 0, compared_blocks = 0;
  for (int64_t i = 0; i < P; ++i) {
    const int64_t row = positions[i];
    worst_logits =
        std::max(worst_logits, max_abs_diff(run.logits(row), {logits.data() + i * c.vocab, size_t(c.vocab)}));
    for (int64_t l = 0; l <= c.layers; ++l) {
      worst_hidden = std::max(worst_hidden, max_abs_diff({got.hidden.data() + (l * n + row) * H, size_t(H)},
                                                         {hidden.data() + (i * (c.layers + 1) + l) * H, size_t(H)}));
    }
    worst_final = std::max(worst_final, max_abs_diff({got.final_hidden.data() + row * H, size_t(H)},
                                                     {final_hidden.data() + i * H, size_t(H)}));
    for (int64_t m = 0; m < M; ++m) {
      worst_router = std::max(worst_router, max_abs_diff({got.router_logits.data() + (m * n + row) * E, size_t(E)},
                                                         {router_logits.data() + (i * M + m) * E, size_t(E)}));
      if (random || router_margin[i * M + m] >= 3e-4f) {
        ++compared_picks;
        for (int64_t j = 0; j < k; ++j) {  // golden order is by score, ours by id
          const int32_t want = expert_ids[(i * M + m) * k + j];
          const int32_t* mine = got.expert_ids.data() + (m * n + row) * k;
          const int64_t at = std::find(mine, mine + k, want) - mine;
          REQUIRE(at < k);
          const double d = std::abs(got.expert_weights[(m * n + row) * k + at] - expert_weights[(i * M + m) * k + j]);
          if (!(d <= worst_weight)) worst_weight = std::isnan(d) ? HUGE_VAL : d;
        }
      }
      for (int64_t g = 0; g < G; ++g) {
        if (!random && !(block_margin[(i * M + m) * G + g] >= 3e-3f)) continue;
        ++compared_blocks;
        const int32_t* want = block_ids.data() + ((i * M + m) * G + g) * K;
        const int32_t* mine = got.block_ids.data() + ((m * n + row) * G + g) * K;
        REQUIRE(std::vector<int32_t>(mine, mine + K) == std::vector<int32_t>(want, want + K));
      }
    }
  }
  CHECK(worst_logits <= 2e-3);
  CHECK(worst_hidden <= 1e-3);
  CHECK(worst_final <= 1e-3);
  CHECK(worst_router <= 3e-4);
  CHECK(worst_weight <= 2e-4);
  CHECK(compared_picks >= P * M / 2);
  CHECK(compared_blocks >= P * M * G / 2);

  const auto top1 = golden.get<int32_t>("all_top1");
  const auto top1_margin = golden.get<float>("all_top1_margin");
  int64_t wrong_top1 = 0;
  for (int64_t i = 0; i < n; ++i) wrong_top1 += top1_margin[i] > 4e-3f && argmax(run.logits(i)) != top1[i];
  CHECK(wrong_top1 == 0);

  if (random) {  // every position, no exceptions
    const auto expert_bits = golden.get<uint8_t>("all_expert_bits");
    const auto block_bits = golden.get<int64_t>("all_block_bits");
    int64_t wrong_experts = 0, wrong_blocks = 0;
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t m = 0; m < M; ++m) {
        uint8_t bits = 0;
        for (int64_t j = 0; j < k; ++j) bits |= uint8_t(1u << got.expert_ids[(m * n + row) * k + j]);
        wrong_experts += bits != expert_bits[row * M + m];
        for (int64_t g = 0; g < G; ++g) {
          uint64_t chosen = 0;
          for (int64_t j = 0; j < K; ++j) {
            const int32_t b = got.block_ids[((m * n + row) * G + g) * K + j];
            if (b >= 0) chosen |= uint64_t{1} << b;
          }
          wrong_blocks += chosen != static_cast<uint64_t>(block_bits[(row * M + m) * G + g]);
        }
      }
    }
    CHECK(wrong_experts == 0);
    CHECK(wrong_blocks == 0);
  }
}

nlohmann::json read_json(const std::string& path) {
  std::ifstream in(data_path(path));
  return nlohmann::json::parse(in);
}

TEST_CASE("precise mode meets every prompt golden", "[golden]") {
  for (const std::string checkpoint : {"bf16", "mxfp8"}) {
    auto engine = open_model(data_path("tiny-" + checkpoint));
    for (const char* prompt : kPrompts) check_prompt(*engine, checkpoint, prompt);
  }
}

TEST_CASE("every instruction set meets a golden beyond the border of sparsity", "[golden][isa]") {
  for (const std::string isa : {"scalar", "avx2", "avx512", "amx"}) {
    if (std::string(cpu::isa_name(cpu::cpu_features().best)) != isa && !(isa == "scalar")) {
      bool above = false;
      for (cpu::Isa level : {cpu::Isa::kScalar, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAmx}) {
        if (cpu::isa_name(level) == isa) above = level > cpu::cpu_features().best;
      }
      if (above) {
        WARN("skipped, this CPU lacks it: " << isa);
        continue;
      }
    }
    ModelOptions options;
    options.isa = isa;
    auto engine = open_model(data_path("tiny-mxfp8"), options);
    check_prompt(*engine, "mxfp8", "p2176");
  }
}

TEST_CASE("decode on a cache equals the reference's decode", "[golden]") {
  for (const std::string checkpoint : {"bf16", "mxfp8"}) {
    auto engine = open_model(data_path("tiny-" + checkpoint));
    const Golden golden(checkpoint + "/decode.safetensors");
    for (const auto& [name, start] : {std::pair<std::string, int64_t>{"p300", 124}, {"p2500", 2044}}) {
      INFO(checkpoint << " " << name << "." << start);
      const auto ids = Golden(checkpoint + "/" + name + ".safetensors").get<int32_t>("input_ids");
      const auto want = golden.get<float>(name + "." + std::to_string(start));
      const int64_t vocab = engine->config().vocab;
      model::Session session = engine->new_session();
      feed(session, std::span(ids).first(start));
      for (int64_t i = 0; i < 8; ++i) {
        feed(session, std::span(ids).subspan(start + i, 1));
        CHECK(max_abs_diff(session.logits(), {want.data() + i * vocab, size_t(vocab)}) <= 2e-3);
      }
    }
  }
}

TEST_CASE("greedy continuations equal the reference token for token", "[golden]") {
  for (const std::string checkpoint : {"bf16", "mxfp8"}) {
    auto engine = open_model(data_path("tiny-" + checkpoint));
    const auto greedy = read_json("golden/" + checkpoint + "/greedy.json");
    const Golden logits(checkpoint + "/greedy_logits.safetensors");
    for (const auto& [name, entry] : greedy.items()) {
      INFO(checkpoint << " " << name);
      const auto ids = Golden(checkpoint + "/" + name + ".safetensors").get<int32_t>("input_ids");
      const auto want = logits.get<float>(name);
      const auto tokens = entry["tokens"].get<std::vector<int32_t>>();
      const int64_t vocab = engine->config().vocab;
      model::Session session = engine->new_session();
      feed(session, ids);
      std::vector<int32_t> got;
      for (size_t i = 0; i < tokens.size(); ++i) {
        CHECK(max_abs_diff(session.logits(), {want.data() + i * vocab, size_t(vocab)}) <= 2e-3);
        got.push_back(argmax(session.logits()));
        feed(session, std::span(got).last(1));
      }
      CHECK(got == tokens);
    }
  }
}

TEST_CASE("default mode agrees with the float32 reference as well as a good bf16 engine", "[golden]") {
  for (const std::string checkpoint : {"bf16", "mxfp8"}) {
    ModelOptions options;
    options.precise = false;
    auto engine = open_model(data_path("tiny-" + checkpoint), options);
    const Golden golden(checkpoint + "/p2500.safetensors");
    const auto ids = golden.get<int32_t>("input_ids"), top1 = golden.get<int32_t>("all_top1");
    for (const auto& row : read_json("golden/" + checkpoint + "/bf16_run.json")) {
      if (row["router_gate"] != "fp32") continue;
      const int64_t n = row["tokens"];
      model::KvCache kv(&engine->kv_pools());
      const WaveRun run = run_wave(*engine, one_span(&kv, {ids.begin(), ids.begin() + n}, iota(n)));
      int64_t agree = 0;
      for (int64_t i = 0; i < n; ++i) agree += argmax(run.logits(i)) == top1[i];
      const double share = static_cast<double>(agree) / static_cast<double>(n);
      WARN(checkpoint << " default mode, first " << n << " tokens of p2500: top-1 agreement " << share
                      << ", the reference's bf16 run " << row["top1_agreement"]);
      CHECK(share >= row["top1_agreement"].get<double>());
    }
  }
}

}  // namespace
}  // namespace firn::test
