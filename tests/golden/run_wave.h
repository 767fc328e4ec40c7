// Runs one wave to its end on an engine's own weights and Ops.
#pragma once

#include <cmath>

#include "support/fixtures.h"

namespace firn::test {

struct WaveRun {
  std::unique_ptr<model::Forward> forward;
  const model::Captured& captured() const { return forward->captured(); }
  std::span<const float> logits(int64_t i) const { return forward->logits(i); }
};

inline WaveRun run_wave(model::Engine& engine, model::Wave wave, model::Capture capture = {}) {
  model::ForwardOptions options;
  options.activation = engine.activation();
  options.capture = capture;
  WaveRun run{std::make_unique<model::Forward>(&engine.config(), &engine.weights(), &engine.ops(), options)};
  must(run.forward->begin(std::move(wave)));
  while (!run.forward->finished()) must(run.forward->step());
  return run;
}

// The smallest --kv-ram a checkpoint takes.
inline int64_t least_kv_ram(const std::string& path, bool precise = true) {
  const auto survey = must(model::Survey::open(storage::FileSystem::real(), path));
  const model::ModelConfig& c = survey.config;
  return model::KvCache::least_near_bytes(c, c.kv_layout(precise ? DType::kF32 : DType::kBf16));
}

inline std::vector<int64_t> iota(int64_t n, int64_t from = 0) {
  std::vector<int64_t> v(n);
  for (int64_t i = 0; i < n; ++i) v[i] = from + i;
  return v;
}

inline model::WaveSpan make_span(model::KvCache* kv, std::vector<int32_t> ids, std::vector<int64_t> logits_at) {
  model::WaveSpan span;
  span.kv = kv;
  span.ids = std::move(ids);
  span.logits_at = std::move(logits_at);
  return span;
}

inline model::Wave one_span(model::KvCache* kv, std::vector<int32_t> ids, std::vector<int64_t> logits_at) {
  model::Wave wave;
  wave.spans.push_back(make_span(kv, std::move(ids), std::move(logits_at)));
  return wave;
}

inline int32_t argmax(std::span<const float> v) {
  int32_t best = 0;
  for (size_t i = 1; i < v.size(); ++i) {
    if (v[i] > v[best]) best = static_cast<int32_t>(i);
  }
  return best;
}

// Largest |a - b|; infinite when any of the differences is NaN, so that NaN never passes.
inline double max_abs_diff(std::span<const float> a, std::span<const float> b) {
  FIRN_CHECK(a.size() == b.size(), "lengths differ");
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(d <= worst)) worst = std::isnan(d) ? HUGE_VAL : d;
  }
  return worst;
}

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

}  // namespace firn::test
