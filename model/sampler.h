// Sampling the next token from fp32 logits.
//
// Order of filters: temperature, then top-k, top-p, min-p on the scaled distribution; temperature 0 is greedy (argmax,
// lowest id on ties). The draw uses a counter-based generator: seed and step give the same token on every machine with
// the same logits. Ids without a token are masked. NaN logits are an error, not token 0.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/status.h"

namespace firn::model {

struct SamplingOptions {
  double temperature = 1.0;  // 0 = greedy
  double top_p = 1.0;        // (0, 1]
  int64_t top_k = 0;         // 0 = off
  double min_p = 0.0;        // [0, 1]
  uint64_t seed = 0;
  Status validate() const;
};

class Sampler {
 public:
  Sampler(const SamplingOptions& options, int32_t n_tokens);  // ids >= n_tokens are masked
  Result<int32_t> sample(std::span<const float> logits);

 private:
  SamplingOptions options_;
  int32_t n_tokens_;
  uint64_t step_ = 0;
  std::vector<std::pair<float, int32_t>> scratch_;
};

// Finds stop strings across token borders. feed() returns the text that is safe to show; once `stopped`, nothing more.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stops);
  std::string feed(std::string_view text);
  std::string finish();  // what was held back, when no stop string came
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace firn::model
