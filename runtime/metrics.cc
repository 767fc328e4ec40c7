// The registry: a map whose nodes stay where they are.
#include "runtime/metrics.h"

namespace firn {

Metric& Metrics::value(const std::string& name) {
  std::lock_guard lock(mutex_);
  return values_[name];
}

std::vector<std::pair<std::string, int64_t>> Metrics::snapshot() const {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<std::string, int64_t>> out;
  out.reserve(values_.size());
  for (const auto& [name, metric] : values_) out.emplace_back(name, metric.get());
  return out;
}

}  // namespace firn
