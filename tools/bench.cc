// Timing, rows, limits and rotating weights of the benches.
#include "tools/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>

namespace firn::tools {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

uint64_t mix(uint64_t v) {  // splitmix64
  v += 0x9E3779B97F4A7C15u;
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9u;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBu;
  return v ^ (v >> 31);
}

// Random bytes, the bits outside `keep` replaced by those of `set`; both are patterns of eight bytes.
void fill(ThreadTeam& team, void* data, int64_t bytes, uint64_t keep, uint64_t set, uint64_t seed) {
  auto* const to = static_cast<uint8_t*>(data);
  team.parallel_stretches(bytes, int64_t{1} << 20, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i += 8) {
      const uint64_t word = (mix(seed + static_cast<uint64_t>(i)) & keep) | set;
      std::memcpy(to + i, &word, static_cast<size_t>(std::min<int64_t>(8, end - i)));
    }
  });
}

constexpr uint64_t bytes_of(uint8_t b) { return 0x0101010101010101u * b; }
constexpr uint64_t words_of(uint16_t w) { return 0x0001000100010001u * w; }

}  // namespace

Timing time_runs(int runs, int64_t calls, const std::function<void(int64_t)>& body) {
  std::vector<double> seconds;
  int64_t call = 0;
  for (int run = -1; run < runs; ++run) {
    if (interrupted()) break;
    const double start = now();
    for (int64_t i = 0; i < calls; ++i) body(call++);
    if (run >= 0) seconds.push_back((now() - start) / static_cast<double>(calls));
  }
  if (seconds.empty()) return {};
  std::sort(seconds.begin(), seconds.end());
  const size_t n = seconds.size();
  return {(seconds[(n - 1) / 2] + seconds[n / 2]) / 2, seconds.front(), static_cast<int>(n)};
}

Result<std::unique_ptr<BenchContext>> BenchContext::create(const BenchOptions& options, const Globals& globals,
                                                           std::function<void(const std::string&)> line) {
  FIRN_ASSIGN(const cpu::Isa isa, cpu::choose_isa());
  FIRN_ASSIGN(Topology topology, Topology::detect());
  const int threads = options.threads > 0 ? options.threads : topology.default_threads;
  FIRN_ASSIGN(auto team, ThreadTeam::create(threads, topology.cpus_for(threads)));
  std::unique_ptr<BenchContext> context(
      new BenchContext(options, globals, std::move(line), std::move(topology), std::move(team)));
  FIRN_ASSIGN(context->ops_, cpu::CpuOps::create(context->team_.get(), &context->arena_, isa));
  return context;
}

BenchContext::BenchContext(const BenchOptions& options, const Globals& globals,
                           std::function<void(const std::string&)> line, Topology topology,
                           std::unique_ptr<ThreadTeam> team)
    : options_(options),
      globals_(globals),
      line_(std::move(line)),
      topology_(std::move(topology)),
      budget_("memory for benches", topology_.memory_usable_bytes / 10 * 9),
      arena_(&budget_),
      team_(std::move(team)) {}

void BenchContext::emit(const BenchRow& row) {
  if (row.time.runs == 0) return;  // interrupted
  ++rows_;
  const double gb_s = static_cast<double>(row.bytes) / row.time.median * 1e-9;
  const double gflop_s = static_cast<double>(row.flops) / row.time.median * 1e-9;
  const double ratio = row.ratio > 0   ? row.ratio
                       : row.limit > 0 ? (row.limit_is_bytes ? gb_s : gflop_s) / row.limit
                                       : 0;
  const int threads = row.threads > 0 ? row.threads : team_->size();
  if (globals_.json) {
    nlohmann::ordered_json json = {{"bench", row.bench},
                                   {"shape", row.shape},
                                   {"isa", ops_->name()},
                                   {"threads", threads},
                                   {"seconds_median", row.time.median},
                                   {"seconds_min", row.time.min},
                                   {"runs", row.time.runs},
                                   {"bytes", row.bytes},
                                   {"flops", row.flops},
                                   {"gb_s", gb_s},
                                   {"gflop_s", gflop_s},
                                   {"limit", nullptr},
                                   {"ratio", nullptr},
                                   {"limit_source", nullptr}};
    if (row.limit > 0 || row.ratio > 0) {
      if (row.limit > 0) json["limit"] = row.limit;
      json["ratio"] = ratio;
      json["limit_source"] = row.limit_source;
    }
    line_(json.dump());
    return;
  }
  if (rows_ == 1) {
    line_(fmt::format("{:<9} {:<34} {:>3} {:>11} {:>9} {:>10} {:>6}  {}", "bench", "shape", "thr", "median ms", "GB/s",
                      "GFLOP/s", "ratio", "limit"));
  }
  line_(fmt::format(
      "{:<9} {:<34} {:>3} {:>11.3f} {:>9.1f} {:>10.1f} {:>6}  {}", row.bench, row.shape, threads, row.time.median * 1e3,
      gb_s, gflop_s, row.limit > 0 || row.ratio > 0 ? fmt::format("{:.3f}", ratio) : "-",
      row.ratio > 0 ? row.limit_source
      : row.limit > 0
          ? fmt::format("{:.1f} {} {}", row.limit, row.limit_is_bytes ? "GB/s" : "GFLOP/s", row.limit_source)
          : ""));
}

Result<double> BenchContext::memory_limit() {
  if (!memory_limit_) {
    FIRN_ASSIGN(memory_limit_, measure_memory_read(*this));
  }
  return *memory_limit_;
}

Result<double> BenchContext::gemm_limit() {
  if (!gemm_limit_) {
    FIRN_ASSIGN(gemm_limit_, measure_best_gemm(*this));
  }
  return *gemm_limit_;
}

Status BenchContext::set_lower_limit(BenchRow& row) {
  FIRN_ASSIGN(row.limit, memory_limit());
  row.limit_is_bytes = true;
  row.limit_source = "mem read";
  const double intensity = static_cast<double>(row.flops) / static_cast<double>(std::max<int64_t>(1, row.bytes));
  if (intensity < 4) return {};  // no CPU multiplies that slowly: the products need not be measured
  FIRN_ASSIGN(const double gemm, gemm_limit());
  if (gemm >= intensity * row.limit) return {};
  row.limit = gemm;
  row.limit_is_bytes = false;
  row.limit_source = "gemm best";
  return {};
}

int64_t BenchContext::working_set_bytes() const {
  const int64_t caches = topology_.l3_bytes * std::max(1, topology_.l3_caches);
  const int64_t wanted = std::max<int64_t>(int64_t{1} << 30, 4 * caches + (int64_t{64} << 20));
  return std::min(wanted, topology_.memory_usable_bytes / 10 * 6) / 4096 * 4096;
}

void fill_random_weights(ThreadTeam& team, WeightFormat format, void* data, int64_t bytes, void* scales,
                         int64_t scale_bytes, uint64_t seed) {
  switch (format) {
    case WeightFormat::kF32:
      fill(team, data, bytes, 0x807FFFFF807FFFFFu, 0x3C0000003C000000u, seed);  // +-[2^-7, 2^-6)
      break;
    case WeightFormat::kBf16:
      fill(team, data, bytes, words_of(0x80FF), words_of(0x3C00), seed);  // +-[2^-7, 2^-5)
      break;
    case WeightFormat::kMxfp8:
      fill(team, data, bytes, bytes_of(0xBF), 0, seed);  // +-[0, 2)
      fill(team, scales, scale_bytes, bytes_of(1), bytes_of(120), seed + 1);
      break;
    case WeightFormat::kNvfp4:
      fill(team, data, bytes, bytes_of(0xFF), 0, seed);
      fill(team, scales, scale_bytes, bytes_of(7), bytes_of(0x10), seed + 1);
      break;
    case WeightFormat::kMxfp4:
      fill(team, data, bytes, bytes_of(0xFF), 0, seed);
      fill(team, scales, scale_bytes, bytes_of(1), bytes_of(120), seed + 1);
      break;
  }
}

void fill_random_bf16(Bf16* data, int64_t n, uint64_t seed) {
  for (int64_t i = 0; i < n; ++i) {
    data[i].bits = static_cast<uint16_t>((mix(seed + static_cast<uint64_t>(i)) & 0x80FF) | 0x3F00);  // +-[0.5, 2)
  }
}

Result<WeightFormat> parse_weight_format(const std::string& name) {
  constexpr std::pair<const char*, WeightFormat> kNames[] = {{"mxfp8", WeightFormat::kMxfp8},
                                                             {"nvfp4", WeightFormat::kNvfp4},
                                                             {"bf16", WeightFormat::kBf16},
                                                             {"mxfp4", WeightFormat::kMxfp4},
                                                             {"f32", WeightFormat::kF32}};
  for (const auto& [known, format] : kNames) {
    if (name == known) return format;
  }
  return invalid(fmt::format("--format {}: expected mxfp8, nvfp4, bf16, mxfp4 or f32", name));
}

Result<RotatingWeights> RotatingWeights::create(BenchContext& context, WeightFormat format) {
  RotatingWeights weights;
  weights.format_ = format;
  // Largest matrix: lm_head. Behind it everything wraps.
  const int64_t largest = weight_data_bytes(format, 200064, 6144);
  const int64_t data_bytes = std::max(kRotateBytes, largest);
  const int64_t scale_bytes = std::max<int64_t>(8, weight_scale_bytes(format, data_bytes / 64 + 1, 128));
  FIRN_ASSIGN(weights.data_, context.arena().allocate(data_bytes, "weights to rotate over"));
  FIRN_ASSIGN(weights.scales_, context.arena().allocate(scale_bytes, "scales to rotate over"));
  fill_random_weights(context.team(), format, weights.data_.data(), data_bytes, weights.scales_.data(), scale_bytes, 7);
  return weights;
}

WeightView RotatingWeights::next(int64_t rows, int64_t cols) {
  WeightView w;
  w.format = format_;
  w.rows = rows;
  w.cols = cols;
  const int64_t data_bytes = weight_data_bytes(format_, rows, cols),
                scale_bytes = weight_scale_bytes(format_, rows, cols);
  if (data_at_ + data_bytes > data_.bytes()) data_at_ = 0;
  if (scales_at_ + scale_bytes > scales_.bytes()) scales_at_ = 0;
  w.data = data_.as<std::byte>() + data_at_;
  w.scales = scale_bytes == 0 ? nullptr : scales_.as<std::byte>() + scales_at_;
  data_at_ += data_bytes;
  scales_at_ += scale_bytes;
  return w;
}

}  // namespace firn::tools
