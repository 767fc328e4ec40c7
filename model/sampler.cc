// Filters, the draw, and stop strings. See sampler.h.
//
// All three filters keep a prefix of the tokens sorted by falling logit (lowest id first among equals), so the set that
// remains is the shortest of the three prefixes. Sums are in double and in a fixed order.
#include "model/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "model/tokenizer.h"

namespace firn::model {
namespace {

// SplitMix64's output function: a bijection that scatters neighbouring counters.
uint64_t scatter(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Uniform in [0, 1) with 53 bits, a function of its arguments alone.
double uniform(uint64_t seed, uint64_t step) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  const uint64_t stream = scatter(seed + kGolden);
  return static_cast<double>(scatter(stream + (step + 1) * kGolden) >> 11) * 0x1p-53;
}

using Candidate = std::pair<float, int32_t>;

bool before(const Candidate& a, const Candidate& b) {
  return a.first > b.first || (a.first == b.first && a.second < b.second);
}

}  // namespace

Status SamplingOptions::validate() const {
  if (!(temperature >= 0.0) || !std::isfinite(temperature)) {
    return invalid(fmt::format("temperature is {}, expected a number from 0 (greedy) upwards", temperature));
  }
  if (!(top_p > 0.0 && top_p <= 1.0)) {
    return invalid(fmt::format("top_p is {}, expected above 0 and at most 1 (1 turns it off)", top_p));
  }
  if (top_k < 0) return invalid(fmt::format("top_k is {}, expected 0 (off) or a positive count", top_k));
  if (!(min_p >= 0.0 && min_p <= 1.0)) {
    return invalid(fmt::format("min_p is {}, expected 0 (off) to 1", min_p));
  }
  return {};
}

Sampler::Sampler(const SamplingOptions& options, int32_t n_tokens) : options_(options), n_tokens_(n_tokens) {}

Result<int32_t> Sampler::sample(std::span<const float> logits) {
  const size_t n = std::min(logits.size(), static_cast<size_t>(std::max(n_tokens_, 0)));
  if (n == 0) return internal(fmt::format("nothing to sample from: {} logits, {} tokens", logits.size(), n_tokens_));
  size_t best = 0;
  for (size_t i = 0; i < n; ++i) {
    if (!(logits[i] < INFINITY)) {
      return internal(
          fmt::format("the logit of token {} at step {} is {}, expected a number: the model's weights or a "
                      "computation are broken",
                      i, step_, logits[i]));
    }
    if (logits[i] > logits[best]) best = i;
  }
  if (logits[best] == -INFINITY) return internal(fmt::format("every logit at step {} is -inf", step_));
  const uint64_t step = step_++;
  if (options_.temperature == 0.0) return static_cast<int32_t>(best);

  const double top = logits[best];
  const auto weight = [&](float logit) { return std::exp((static_cast<double>(logit) - top) / options_.temperature); };
  const double u = uniform(options_.seed, step);
  const bool cut_k = options_.top_k > 0 && static_cast<size_t>(options_.top_k) < n;

  if (!cut_k && options_.top_p >= 1.0 && options_.min_p <= 0.0) {
    double total = 0.0;
    for (size_t i = 0; i < n; ++i) total += weight(logits[i]);
    const double target = u * total;
    double sum = 0.0;
    for (size_t i = 0; i < n; ++i) {
      sum += weight(logits[i]);
      if (sum > target) return static_cast<int32_t>(i);
    }
    return static_cast<int32_t>(best);  // u * total rounded up to total
  }

  // The best stand at the back: a heap gives them there one by one, without sorting those that are not asked for.
  const auto after = [](const Candidate& a, const Candidate& b) { return before(b, a); };
  const auto ranked = [&](size_t rank) { return scratch_[scratch_.size() - 1 - rank]; };
  scratch_.clear();
  double total = 0.0;
  if (cut_k) {
    for (size_t i = 0; i < n; ++i) scratch_.emplace_back(logits[i], static_cast<int32_t>(i));
    const auto kth = scratch_.begin() + static_cast<ptrdiff_t>(options_.top_k);
    std::nth_element(scratch_.begin(), kth, scratch_.end(), before);
    scratch_.erase(kth, scratch_.end());
    std::sort(scratch_.begin(), scratch_.end(), after);
    for (size_t rank = 0; rank < scratch_.size(); ++rank) total += weight(ranked(rank).first);
  } else {
    // Tokens below the floor hold less than 1 - top_p in all
    // (half of it, against rounding), so top-p cannot reach them; nor does min-p.
    for (size_t i = 0; i < n; ++i) total += weight(logits[i]);
    const double rest = 0.5 * (1.0 - options_.top_p) * total / static_cast<double>(n);
    const double floor = 0.999 * std::max(rest, options_.min_p);
    const double lowest = top + options_.temperature * std::log(floor);
    for (size_t i = 0; i < n; ++i) {
      if (logits[i] >= lowest) scratch_.emplace_back(logits[i], static_cast<int32_t>(i));
    }
    std::make_heap(scratch_.begin(), scratch_.end(), after);
  }

  size_t kept = 0;
  double kept_sum = 0.0;
  while (kept < scratch_.size()) {
    if (!cut_k) std::pop_heap(scratch_.begin(), scratch_.end() - static_cast<ptrdiff_t>(kept), after);
    const double w = weight(ranked(kept).first);
    if (kept > 0 && (w < options_.min_p || (options_.top_p < 1.0 && kept_sum >= options_.top_p * total))) break;
    kept_sum += w;
    ++kept;
  }
  const double target = u * kept_sum;
  double sum = 0.0;
  for (size_t i = 0; i < kept; ++i) {
    sum += weight(ranked(i).first);
    if (sum > target) return ranked(i).second;
  }
  return ranked(0).second;  // u * kept_sum rounded up to kept_sum
}

StopMatcher::StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const std::string& stop : stops_) FIRN_CHECK(!stop.empty(), "an empty stop string must be refused before");
}

std::string StopMatcher::feed(std::string_view text) {
  if (stopped_) return {};
  held_ += text;
  // The stop string that is complete first; of those complete at one place the longest.
  size_t first_end = std::string::npos, first_begin = 0;
  for (const std::string& stop : stops_) {
    const size_t begin = held_.find(stop);
    if (begin == std::string::npos) continue;
    const size_t end = begin + stop.size();
    if (end < first_end || (end == first_end && begin < first_begin)) {
      first_end = end;
      first_begin = begin;
    }
  }
  if (first_end != std::string::npos) {
    stopped_ = true;
    std::string out = held_.substr(0, first_begin);
    held_.clear();
    return out;
  }
  // Held back: what may be the beginning of a stop string, and the bytes of an unfinished character.
  size_t safe = utf8_complete_prefix(held_);
  for (const std::string& stop : stops_) {
    const size_t longest = std::min(stop.size() - 1, held_.size());
    for (size_t n = longest; n > held_.size() - safe; --n) {
      if (held_.compare(held_.size() - n, n, stop, 0, n) != 0) continue;
      safe = held_.size() - n;
      break;
    }
  }
  std::string out = held_.substr(0, safe);
  held_.erase(0, safe);
  return out;
}

std::string StopMatcher::finish() {
  std::string out = std::move(held_);
  held_.clear();
  return out;
}

}  // namespace firn::model
