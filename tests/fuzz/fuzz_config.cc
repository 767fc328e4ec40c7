// Fuzzes ModelConfig::parse: any bytes give a config or an error, never a crash; a config that is accepted has sizes
// that its users may multiply. The first byte decides whether the rest is one file or two (config and generation
// defaults).
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "model/config.h"
#include "model/weights.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t split = data[0] == 1 ? text.find('\n') : std::string_view::npos;
  const auto config = split == std::string_view::npos
                          ? firn::model::ModelConfig::parse(text)
                          : firn::model::ModelConfig::parse(text.substr(0, split), text.substr(split + 1));
  if (!config.ok()) {
    FIRN_CHECK(!config.status().message().empty());
    return 0;
  }
  FIRN_CHECK(config->heads % config->kv_heads == 0 && config->rotary_dim <= config->head_dim);
  FIRN_CHECK(config->moe_layer.size() == static_cast<size_t>(config->layers));
  FIRN_CHECK(config->sparse_layer.size() == static_cast<size_t>(config->layers));
  FIRN_CHECK(config->kv_bytes_per_token(firn::DType::kF32) > 0);
  // Enumerating a huge accepted model would only cost the fuzzer time.
  if (config->layers * config->experts < 1000 && config->vision.layers < 100) {
    for (const firn::model::Slot& slot : firn::model::enumerate_slots(*config)) {
      for (const int64_t dim : slot.shape) FIRN_CHECK(dim > 0);
    }
  }
  return 0;
}
