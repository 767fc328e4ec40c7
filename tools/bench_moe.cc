// firn bench moe: from router picks to combined output at M3's expert shape, with fresh random picks each run.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "tools/bench.h"

namespace firn::tools {
namespace {

constexpr int64_t kHidden = 6144, kIntermediate = 3072, kTop = 4;

struct Experts {
  std::vector<Buffer> buffers;
  std::vector<MlpTask> tasks;  // weights only
  int64_t bytes = 0;           // of one
};

// At least 16, and as many as fill the memory that must rotate.
Result<Experts> make_experts(BenchContext& context, WeightFormat format) {
  Experts experts;
  const int64_t data = weight_data_bytes(format, kIntermediate, kHidden);
  const int64_t scales = weight_scale_bytes(format, kIntermediate, kHidden);
  experts.bytes = 3 * (data + scales);
  const int64_t n = std::max<int64_t>(16, (kRotateBytes + experts.bytes - 1) / experts.bytes);
  for (int64_t e = 0; e < n; ++e) {
    FIRN_ASSIGN(Buffer buffer, context.arena().allocate(experts.bytes, "bench moe: experts"));
    auto* at = buffer.as<std::byte>();
    fill_random_weights(context.team(), format, at, 3 * data, at + 3 * data, 3 * scales, static_cast<uint64_t>(e) * 99);
    const auto weight = [&](int64_t i, int64_t rows, int64_t cols) {
      WeightView w;
      w.format = format;
      w.rows = rows;
      w.cols = cols;
      w.data = at + i * data;
      w.scales = scales == 0 ? nullptr : at + 3 * data + i * scales;
      return w;
    };
    MlpTask task;
    task.id = e;
    task.gate = weight(0, kIntermediate, kHidden);
    task.up = weight(1, kIntermediate, kHidden);
    task.down = weight(2, kHidden, kIntermediate);
    experts.tasks.push_back(task);
    experts.buffers.push_back(std::move(buffer));
  }
  return experts;
}

struct Picks {
  std::vector<MlpTask> tasks;
  std::vector<int32_t> rows;  // token of each gathered row, by ascending expert
  std::vector<float> weights;
};

Picks pick(const Experts& experts, int64_t tokens, std::mt19937_64& rng) {
  std::vector<std::vector<int32_t>> of(experts.tasks.size());
  std::vector<int32_t> ids(experts.tasks.size());
  for (size_t e = 0; e < ids.size(); ++e) ids[e] = static_cast<int32_t>(e);
  for (int64_t t = 0; t < tokens; ++t) {
    for (size_t j = 0; j < kTop; ++j) {
      std::swap(ids[j], ids[j + rng() % (ids.size() - j)]);
      of[static_cast<size_t>(ids[j])].push_back(static_cast<int32_t>(t));
    }
  }
  Picks picks;
  for (size_t e = 0; e < of.size(); ++e) {
    if (of[e].empty()) continue;
    MlpTask task = experts.tasks[e];
    task.row_begin = static_cast<int64_t>(picks.rows.size());
    task.n_rows = static_cast<int64_t>(of[e].size());
    picks.tasks.push_back(task);
    picks.rows.insert(picks.rows.end(), of[e].begin(), of[e].end());
  }
  picks.weights.assign(picks.rows.size(), 0.25f);
  return picks;
}

Status bench_tokens(BenchContext& context, const Experts& experts, WeightFormat format, int64_t tokens) {
  const int64_t rows = tokens * kTop;
  FIRN_ASSIGN(const Buffer x, context.arena().allocate(tokens * kHidden * 2, "bench moe: inputs"));
  FIRN_ASSIGN(const Buffer grouped, context.arena().allocate(rows * kHidden * 2, "bench moe: grouped inputs"));
  FIRN_ASSIGN(const Buffer out, context.arena().allocate(rows * kHidden * 4, "bench moe: expert outputs"));
  FIRN_ASSIGN(const Buffer sum, context.arena().allocate(tokens * kHidden * 4, "bench moe: combined output"));
  fill_random_bf16(x.as<Bf16>(), tokens * kHidden, 5);
  std::memset(sum.data(), 0, static_cast<size_t>(sum.bytes()));
  std::mt19937_64 rng(11);
  std::vector<Picks> runs;  // made before the clock starts
  const int64_t calls = tokens <= 8 ? 4 : 1;
  int64_t experts_used = 0;
  for (int64_t i = 0; i < (context.options().runs + 1) * calls; ++i) {
    runs.push_back(pick(experts, tokens, rng));
    experts_used += static_cast<int64_t>(runs.back().tasks.size());
  }
  Status failure;
  BenchRow row;
  row.time = time_runs(context.options().runs, calls, [&](int64_t call) {
    const Picks& picks = runs[static_cast<size_t>(call)];
    context.team().parallel_for(rows, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) {
        std::memcpy(grouped.as<Bf16>() + r * kHidden, x.as<Bf16>() + picks.rows[static_cast<size_t>(r)] * kHidden,
                    kHidden * 2);
      }
    });
    cpu::CpuOps& ops = context.ops();
    MlpParams mlp;
    mlp.x = {grouped.data(), DType::kBf16, rows, kHidden, kHidden};
    mlp.tasks = picks.tasks;
    mlp.out = {out.data(), DType::kF32, rows, kHidden, kHidden};
    ops.mlp(mlp);
    CombineParams combine;
    combine.acc = {sum.data(), DType::kF32, tokens, kHidden, kHidden};
    combine.y = mlp.out;
    combine.rows = picks.rows;
    combine.weights = picks.weights;
    const Status status = ops.wait(ops.combine(combine));
    if (!status.ok()) failure = status;
  });
  if (!failure.ok()) return failure;
  row.bench = "moe";
  row.shape =
      fmt::format("{} tokens {} experts {} top-{}", weight_format_name(format), tokens, experts.tasks.size(), kTop);
  // Different runs pick different numbers of experts; their mean.
  row.bytes = experts_used * experts.bytes / static_cast<int64_t>(runs.size());
  row.flops = rows * 6 * kHidden * kIntermediate;
  FIRN_TRY(context.set_lower_limit(row));
  context.emit(row);
  return {};
}

}  // namespace

Status bench_moe(BenchContext& context) {
  std::vector<std::string> formats = context.options().formats;
  if (formats.empty()) formats = {"mxfp8", "nvfp4", "bf16"};
  std::vector<int64_t> tokens = context.options().tokens;
  if (tokens.empty()) tokens = {1, 4, 32, 512};
  FIRN_TRY(context.memory_limit().status());
  for (const std::string& name : formats) {
    FIRN_ASSIGN(const WeightFormat format, parse_weight_format(name));
    FIRN_ASSIGN(const Experts experts, make_experts(context, format));
    for (const int64_t n : tokens) {
      if (interrupted()) return cancelled("bench moe interrupted");
      FIRN_TRY(bench_tokens(context, experts, format, n));
    }
  }
  return {};
}

}  // namespace firn::tools
