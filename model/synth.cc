// synth_checkpoint: tables of normal quantiles, looked up with the bits of a counter-based generator.
//
// Codes are drawn straight in the stored format (nothing is quantised), which runs at memory speed. Row r of a tensor
// uses counters from r * words_per_row on, keyed by the seed and the tensor's name, so any piece can be made by any
// thread.
#include "model/synth.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <utility>

#include "storage/file.h"

namespace firn::model {
namespace {

constexpr int kQuantiles = 4096;  // of the 16-bit formats; 12 random bits a value
constexpr int kCodes = 256;       // of the 8- and 4-bit formats; 8 random bits a value

// The output function of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits with good avalanche.
uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint64_t key_of(uint64_t seed, const std::string& name) {
  uint64_t h = mix(seed);
  for (const char c : name) h = mix(h ^ static_cast<uint8_t>(c));
  return h;
}

// Quantile of the standard normal distribution by bisection: called a few thousand times in all.
double normal_quantile(double p) {
  double low = -9, high = 9;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < p ? low : high) = middle;
  }
  return (low + high) / 2;
}

std::vector<float> quantiles(int n) {
  std::vector<float> out(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) out[static_cast<size_t>(i)] = static_cast<float>(normal_quantile((i + 0.5) / n));
  return out;
}

// What a tensor's values look like.
struct Recipe {
  double mean = 0;
  double deviation = 0;
  bool balanced = false;  // pairs of neighbours in a row cancel: rows sum to nothing
};

Recipe recipe(const Slot& slot) {
  const auto over_inputs = [&](double gain) {
    return Recipe{0, gain / std::sqrt(static_cast<double>(slot.shape.back())), false};
  };
  switch (slot.role) {
    case Role::kEmbed:
      return {0, 1.0, false};
    case Role::kLmHead:
      return over_inputs(2.0);
    case Role::kFinalNorm:
    case Role::kInputNorm:
    case Role::kPostNorm:
      return {0, 0.05, false};
    case Role::kQNorm:
    case Role::kKNorm:
    case Role::kIndexQNorm:
    case Role::kIndexKNorm:
      return {0.5, 0.1, false};
    case Role::kQ:
    case Role::kK:
    case Role::kV:
    case Role::kO:
    case Role::kIndexQ:
    case Role::kIndexK:
      return over_inputs(1.0);
    case Role::kRouterGate:
      return over_inputs(1.5);
    case Role::kRouterBias:
      return {0, 0.02, false};
    case Role::kMlpGate:
    case Role::kMlpUp:
    case Role::kExpertGate:
    case Role::kExpertUp:
    case Role::kSharedGate:
    case Role::kSharedUp:
      return over_inputs(1.5);
    case Role::kMlpDown:
    case Role::kExpertDown:
    case Role::kSharedDown: {
      Recipe r = over_inputs(0.5);
      r.balanced = true;
      return r;
    }
    case Role::kVision:
      break;
  }
  FIRN_CHECK(false, "no recipe for this tensor");
}

// Fills rows of `cols` items from a function of (key, counter) -> 64 bits; `per_word` items come from one word.
template <typename Item>
void fill_rows(uint64_t key, int64_t begin, int64_t n, int64_t cols, int per_word, Item&& item) {
  const int64_t words = (cols + per_word - 1) / per_word;
  for (int64_t r = 0; r < n; ++r) {
    uint64_t counter = static_cast<uint64_t>((begin + r) * words);
    for (int64_t c = 0; c < cols; c += per_word, ++counter) {
      uint64_t bits = mix(key ^ mix(counter));
      const int64_t end = std::min<int64_t>(per_word, cols - c);
      const int shift = 64 / per_word;
      for (int64_t i = 0; i < end; ++i, bits >>= shift) item(r, c + i, bits);
    }
  }
}

class Tables {
 public:
  const std::vector<float>& fine() const { return fine_; }

  std::shared_ptr<const std::vector<uint16_t>> bf16(const Recipe& r) {
    auto& table = bf16_[{r.mean, r.deviation}];
    if (!table) {
      auto made = std::make_shared<std::vector<uint16_t>>();
      for (const float q : fine_) made->push_back(to_bf16(static_cast<float>(r.mean + r.deviation * q)).bits);
      table = std::move(made);
    }
    return table;
  }

  // Codes of quantile * spread.
  std::array<uint8_t, kCodes> codes(double spread, uint8_t (*encode)(float)) const {
    std::array<uint8_t, kCodes> out{};
    for (size_t i = 0; i < kCodes; ++i) out[i] = encode(static_cast<float>(spread * coarse_[i]));
    return out;
  }

 private:
  const std::vector<float> fine_ = quantiles(kQuantiles);
  const std::vector<float> coarse_ = quantiles(kCodes);
  std::map<std::pair<double, double>, std::shared_ptr<const std::vector<uint16_t>>> bf16_;
};

using Fill = std::function<Status(int64_t, int64_t, uint8_t*)>;

Fill fill_bf16(uint64_t key, int64_t cols, const Recipe& r, Tables& tables) {
  return [key, cols, balanced = r.balanced, table = tables.bf16(r)](int64_t begin, int64_t n, uint8_t* out) -> Status {
    const uint16_t* const t = table->data();
    fill_rows(key, begin, n, cols, 4, [&](int64_t row, int64_t c, uint64_t bits) {
      uint16_t v = t[bits % kQuantiles];
      uint8_t* const at = out + 2 * (row * cols + c);
      if (balanced && c % 2 == 1) {
        std::memcpy(&v, at - 2, sizeof(v));
        v ^= 0x8000u;
      }
      std::memcpy(at, &v, sizeof(v));
    });
    return {};
  };
}

// Values that bf16 cannot hold: the quantile plus a little of the word's other bits.
Fill fill_f32(uint64_t key, int64_t cols, const Recipe& r, const Tables& tables) {
  return [key, cols, r, quantile = tables.fine()](int64_t begin, int64_t n, uint8_t* out) -> Status {
    fill_rows(key, begin, n, cols, 2, [&](int64_t row, int64_t c, uint64_t bits) {
      const double jitter = static_cast<double>((bits >> 12) & 0xFFFFF) / 0x100000 - 0.5;
      const float v = static_cast<float>(r.mean + r.deviation * (quantile[bits % kQuantiles] + jitter / 1024));
      std::memcpy(out + 4 * (row * cols + c), &v, sizeof(v));
    });
    return {};
  };
}

Fill fill_mxfp8(uint64_t key, int64_t cols, bool balanced, const std::array<uint8_t, kCodes>& table) {
  return [key, cols, balanced, table](int64_t begin, int64_t n, uint8_t* out) -> Status {
    fill_rows(key, begin, n, cols, 8, [&](int64_t row, int64_t c, uint64_t bits) {
      uint8_t* const at = out + row * cols + c;
      *at = balanced && c % 2 == 1 ? static_cast<uint8_t>(at[-1] ^ 0x80u) : table[bits & 0xFFu];
    });
    return {};
  };
}

// Two codes a byte, the first in the low nibble.
Fill fill_fp4(uint64_t key, int64_t cols, bool balanced, const std::array<uint8_t, kCodes>& table) {
  return [key, half = cols / 2, balanced, table](int64_t begin, int64_t n, uint8_t* out) -> Status {
    fill_rows(key, begin, n, half, 4, [&](int64_t row, int64_t c, uint64_t bits) {
      const uint8_t low = table[bits & 0xFFu];
      const uint8_t high = balanced ? static_cast<uint8_t>(low ^ 8u) : table[(bits >> 8) & 0xFFu];
      out[row * half + c] = static_cast<uint8_t>(low | (high << 4));
    });
    return {};
  };
}

// One of eight codes around the usual one, so that no two groups can be exchanged unnoticed.
Fill fill_scales(uint64_t key, int64_t cols, const std::array<uint8_t, 8>& choices) {
  return [key, cols, choices](int64_t begin, int64_t n, uint8_t* out) -> Status {
    fill_rows(key, begin, n, cols, 8,
              [&](int64_t row, int64_t c, uint64_t bits) { out[row * cols + c] = choices[bits & 7u]; });
    return {};
  };
}

Fill fill_scalar(float v) {
  return [v](int64_t, int64_t, uint8_t* out) -> Status {
    std::memcpy(out, &v, sizeof(v));
    return {};
  };
}

std::array<uint8_t, 8> around(uint8_t code, int step) {
  const auto plus = [&](int k) { return static_cast<uint8_t>(code + k * step); };
  return {code, code, code, code, code, plus(-1), plus(-1), plus(1)};
}

// deviation = spread * 2^(byte - 127) with spread in [low, 2 low).
std::pair<double, uint8_t> split_deviation(double deviation, double low) {
  const int exponent = static_cast<int>(std::floor(std::log2(deviation / low)));
  return {deviation / std::exp2(exponent), static_cast<uint8_t>(std::clamp(exponent + 127, 1, 253))};
}

void add_slot(const Slot& slot, WeightFormat format, uint64_t seed, Tables& tables, std::vector<PlannedTensor>& out) {
  std::vector<PlannedTensor> tensors = stored_tensors(slot, format);
  const Recipe r = recipe(slot);
  // A vector is one "row" per value: rows are what pieces are cut by.
  const int64_t cols = slot.shape.size() > 1 ? slot.shape[1] : 1;
  const uint64_t key = key_of(seed, tensors[0].name);
  switch (format) {
    case WeightFormat::kF32:
      tensors[0].fill = fill_f32(key, cols, r, tables);
      break;
    case WeightFormat::kBf16:
      tensors[0].fill = fill_bf16(key, cols, r, tables);
      break;
    case WeightFormat::kMxfp8: {
      const auto [spread, byte] = split_deviation(r.deviation, 48);
      tensors[0].fill = fill_mxfp8(key, cols, r.balanced, tables.codes(spread, float_to_e4m3));
      tensors[1].fill = fill_scales(mix(key), cols / 32, around(byte, 1));
      break;
    }
    case WeightFormat::kMxfp4: {
      const auto [spread, byte] = split_deviation(r.deviation, 1.25);
      tensors[0].fill = fill_fp4(key, cols, r.balanced, tables.codes(spread, float_to_e2m1));
      tensors[1].fill = fill_scales(mix(key), cols / 32, around(byte, 1));
      break;
    }
    case WeightFormat::kNvfp4: {
      // Codes of deviation 2, block scales near 256 (0x78), the rest in the scalar.
      tensors[0].fill = fill_fp4(key, cols, r.balanced, tables.codes(2.0, float_to_e2m1));
      tensors[1].fill = fill_scales(mix(key), cols / 16, around(0x78, 2));
      tensors[2].fill = fill_scalar(static_cast<float>(r.deviation / 512));
      tensors[3].fill = fill_scalar(1.0f);
      break;
    }
  }
  for (PlannedTensor& t : tensors) out.push_back(std::move(t));
}

}  // namespace

Status synth_checkpoint(storage::FileSystem& fs, const SynthOptions& options) {
  namespace stdfs = std::filesystem;
  std::error_code ec;
  const stdfs::path given(options.config);
  const stdfs::path path = stdfs::is_directory(given, ec) ? given / "config.json" : given;
  if (!stdfs::exists(path, ec))
    return not_found(fmt::format("{}: no such file; expected a config.json", path.string()));
  FIRN_ASSIGN(const std::string before, storage::read_text_file(fs, path.string(), int64_t{16} << 20));
  auto edited = edit_config(before, options.layers, options.experts, options.format);
  if (!edited.ok()) return edited.status().with_context(path.string());
  FIRN_ASSIGN(const ModelConfig config, ModelConfig::parse(*edited));

  CheckpointPlan plan;
  plan.out = options.out;
  plan.shard_bytes = options.shard_bytes;
  plan.n_threads = options.n_threads;
  plan.progress = options.progress;
  plan.cancel = options.cancel;
  plan.texts["config.json"] = *edited;
  const stdfs::path folder = path.parent_path();
  plan.copies = companion_files(folder.empty() ? "." : folder.string());
  Tables tables;
  const std::vector<Slot> slots = enumerate_slots(config);
  for (const Slot& slot : slots) {
    if (slot.role == Role::kVision) continue;
    const WeightFormat format = stored_format(slot, options.format);
    const int64_t group = weight_scale_group(format);
    if (group > 0 && slot.shape[1] % group != 0) {
      return unsupported(fmt::format("{}: input width {} is no multiple of {}, which {} needs; choose --format bf16",
                                     slot.stems[0], slot.shape[1], group, weight_format_name(format)));
    }
    add_slot(slot, format, options.seed, tables, plan.tensors);
  }
  return write_checkpoint(plan);
}

}  // namespace firn::model
