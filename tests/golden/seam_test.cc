// The Ops seam: the forward pass on the scalar oracle, on a device-like Ops with its own memory and late completion,
// and with the experts of one layer spread over several of them.
#include "cpu/reference.h"
#include "golden/run_wave.h"
#include "model/place_weights.h"
#include "support/catch.h"
#include "support/shadow_ops.h"

namespace firn::test {
namespace {

struct HostModel {
  explicit HostModel(const std::string& path) : budget("test", -1), arena(&budget) {
    survey = must(model::Survey::open(storage::FileSystem::real(), path));
    must(survey.loadable());
    weights = must(model::load_weights(storage::FileSystem::real(), survey, arena, {}));
    oracle = cpu::make_reference_ops(&arena);
  }
  Budget budget;
  HostArena arena;
  model::Survey survey;
  model::Weights weights;
  std::unique_ptr<Ops> oracle;
};

std::vector<std::vector<float>> run_on(const HostModel& m, Ops* ops, const model::Weights& weights,
                                       model::ForwardOptions options, const std::vector<std::vector<int32_t>>& waves) {
  model::KvPools pools(ops, &ops->arena(), m.survey.config, options.activation);
  std::vector<std::vector<float>> out;
  {
    model::KvCache kv(&pools);
    model::Forward forward(&m.survey.config, &weights, ops, options);
    for (const auto& ids : waves) {
      must(forward.begin(one_span(&kv, ids, {static_cast<int64_t>(ids.size()) - 1})));
      while (!forward.finished()) must(forward.step());
      out.emplace_back(forward.logits(0).begin(), forward.logits(0).end());
    }
    // A fork writes into a copied block; the original must not see it.
    model::KvCache other = kv.fork();
    const std::vector<int32_t> tail = {3, 1, 4, 1, 5};
    for (model::KvCache* target : {&other, &kv}) {
      must(forward.begin(one_span(target, tail, {4})));
      while (!forward.finished()) must(forward.step());
      out.emplace_back(forward.logits(0).begin(), forward.logits(0).end());
    }
    CHECK(same_bits(out[out.size() - 1], out[out.size() - 2]));
  }
  return out;
}

bool equal(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i])) return false;
  }
  return true;
}

TEST_CASE("the forward pass on the scalar oracle meets a golden", "[seam]") {
  const HostModel m(data_path("tiny-mxfp8"));
  const auto golden = must(storage::SafetensorsFile::read(data_path("golden/mxfp8/p300.safetensors")));
  const auto ids = tensor<int32_t>(golden, "input_ids");
  const auto logits = tensor<float>(golden, "logits");
  model::ForwardOptions options;
  options.activation = DType::kF32;
  const auto got = run_on(m, m.oracle.get(), m.weights, options, {ids});
  const size_t vocab = got[0].size();
  CHECK(max_abs_diff(got[0], {logits.data() + logits.size() - vocab, vocab}) <= 2e-3);
}

TEST_CASE("a device-like Ops gives the same bits", "[seam]") {
  HostModel m(data_path("tiny-mxfp8"));
  const auto ids =
      tensor<int32_t>(must(storage::SafetensorsFile::read(data_path("golden/mxfp8/p2176.safetensors"))), "input_ids");
  // On the fast CPU backend underneath, with a prompt beyond the border of sparsity, then decode.
  auto team = must(ThreadTeam::create(2, {}));
  auto fast = must(cpu::CpuOps::create(team.get(), &m.arena, must(cpu::choose_isa())));
  const std::vector<std::vector<int32_t>> waves = {ids, {17}, {5, 6, 7}};
  for (const DType act : {DType::kF32, DType::kBf16}) {
    model::ForwardOptions options;
    options.activation = act;
    const auto want = run_on(m, fast.get(), m.weights, options, waves);
    for (const uint64_t seed : {1, 2, 3}) {
      ShadowOps shadow(fast.get(), &m.budget, nullptr, seed);
      const auto placed = must(model::place_weights(m.weights, shadow, [](auto, int64_t, int64_t) { return true; }));
      CHECK(equal(run_on(m, &shadow, placed, options, waves), want));
      CHECK(shadow.ran_early() > 0);
    }
  }
}

TEST_CASE("experts of a layer on several Ops give the same bits", "[seam]") {
  HostModel m(data_path("tiny-bf16"));
  const auto ids =
      tensor<int32_t>(must(storage::SafetensorsFile::read(data_path("golden/bf16/p300.safetensors"))), "input_ids");
  auto team = must(ThreadTeam::create(1, {}));
  auto fast = must(cpu::CpuOps::create(team.get(), &m.arena, must(cpu::choose_isa())));
  const std::vector<std::vector<int32_t>> waves = {ids, {17}};
  model::ForwardOptions options;
  options.activation = DType::kF32;
  const auto want = run_on(m, fast.get(), m.weights, options, waves);
  for (const uint64_t seed : {1, 2, 3, 4}) {
    auto scheduler = std::make_shared<ShadowScheduler>(seed);
    ShadowOps main(fast.get(), &m.budget, scheduler), second(fast.get(), &m.budget, scheduler);
    // Expert e of every layer: e % 3 == 0 on the main device, 1 on a second device, 2 on the host.
    auto mine = [](int64_t home) {
      return [home](model::WeightClass what, int64_t, int64_t expert) {
        return what == model::WeightClass::kResident ? home == 0 : expert % 3 == home;
      };
    };
    auto placed = must(model::place_weights(m.weights, main, mine(0)));
    const auto elsewhere = must(model::place_weights(m.weights, second, mine(1)));
    model::ForwardOptions spread = options;
    spread.expert_ops = {&second, fast.get()};
    for (size_t l = 0; l < placed.layers.size(); ++l) {
      for (size_t e = 0; e < placed.layers[l].experts.size(); ++e) {
        if (e % 3 == 1) placed.layers[l].experts[e] = elsewhere.layers[l].experts[e];
        if (e % 3 == 2) placed.layers[l].experts[e] = m.weights.layers[l].experts[e];
      }
    }
    for (int64_t moe = 0; moe < m.survey.config.n_moe(); ++moe) {
      std::vector<uint8_t> home;
      for (int64_t e = 0; e < m.survey.config.experts; ++e) home.push_back(static_cast<uint8_t>(e % 3));
      spread.expert_home.push_back(home);
    }
    CHECK(equal(run_on(m, &main, placed, spread, waves), want));
  }
}

}  // namespace
}  // namespace firn::test
