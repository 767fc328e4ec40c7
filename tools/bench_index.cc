// firn bench index: the exact choice of 16 blocks by 4 index heads of 128 (bf16), scores included: by the scan of all
// keys, and where the rows are few also in two stages (cpu/index_two_stage.h), in turns, so that the two rows of a
// shape saw the same machine. Index keys rotate over 1.5 GiB where memory allows, and so do their low-bit copies.
//
// Bytes of a call: scan: every index key before the own block, once; two stages: every key's copy once and the keys
// that were then read in full. Limit: memory's read rate. The two-stage rows say their bytes and time over the scan's.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "tools/bench.h"

namespace firn::tools {
namespace {

constexpr int64_t kHeads = 4, kDim = 128, kTopk = 16, kBlock = 128;
// More are scanned whatever is asked for (cpu/index_two_stage.h).
constexpr int64_t kMostTwoStageQueries = 16;

struct RotatingIndex {
  Buffer memory;
  std::vector<std::vector<void*>> tables;
  int64_t blocks = 0;
};

KvLayout m3_layout() {
  KvLayout layout;
  layout.block_tokens = kBlock;
  layout.index_dim = kDim;
  return layout;
}

// Nearly normal numbers, sums of four uniform ones: with numbers of one size a few bits would do better than they do on
// keys of a model.
void fill_normal_bf16(Bf16* data, int64_t n, uint64_t* state) {
  for (int64_t i = 0; i < n; ++i) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    const uint64_t bits = *state ^ *state >> 29;
    const auto sum = static_cast<int32_t>((bits >> 8 & 0x3FFF) + (bits >> 22 & 0x3FFF) + (bits >> 36 & 0x3FFF) +
                                          (bits >> 50 & 0x3FFF));
    data[i] = to_bf16(static_cast<float>(sum - 2 * 0x3FFF) * 0x1p-13f);
  }
}

Result<RotatingIndex> make_index(BenchContext& context, int64_t depth) {
  const KvLayout layout = m3_layout();
  RotatingIndex index;
  index.blocks = (depth + kBlock - 1) / kBlock;
  const int64_t layer_bytes = index.blocks * layout.index_block_bytes();
  const int64_t copy_bytes = index.blocks * layout.index_copy_bytes();
  const int64_t wanted = std::min(kRotateBytes, context.working_set_bytes());
  const int64_t most = std::max<int64_t>(1, context.topology().memory_usable_bytes / 6 / layer_bytes);
  const int64_t layers = std::clamp<int64_t>((wanted + copy_bytes - 1) / copy_bytes, 1, most);
  FIRN_ASSIGN(index.memory, context.arena().allocate(layers * layer_bytes, "bench index: keys"));
  // Keys all differ: equal blocks would be ties, and ties are rescored.
  const int64_t piece = std::min<int64_t>(index.blocks * kBlock, 16384);
  FIRN_ASSIGN(const Buffer keys, context.arena().allocate(piece * kDim * 2, "bench index: new keys"));
  uint64_t seed = 1;
  for (int64_t i = 0; i < layers; ++i) {
    std::vector<void*> table;
    for (int64_t b = 0; b < index.blocks; ++b) {
      table.push_back(index.memory.as<char>() + i * layer_bytes + b * layout.index_block_bytes());
    }
    for (int64_t at = 0; at < index.blocks * kBlock; at += piece) {
      const int64_t n = std::min(piece, index.blocks * kBlock - at);
      fill_normal_bf16(keys.as<Bf16>(), n * kDim, &seed);
      const KvSpan span = {0, n, at, nullptr, table.data(), index.blocks};
      context.ops().index_append({{keys.data(), DType::kBf16, n, kDim, kDim}, {&span, 1}, layout});
    }
    index.tables.push_back(std::move(table));
  }
  return index;
}

struct Measured {
  cpu::IndexPath path;
  std::vector<double> seconds;
  int64_t scored = 0, rescored = 0, copy_bytes = 0, refined = 0, calls = 0;
};

double median_of(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return (v[(v.size() - 1) / 2] + v[v.size() / 2]) / 2;
}

Status bench_one(BenchContext& context, const RotatingIndex& index, int64_t queries) {
  const int64_t depth = index.blocks * kBlock, width = kHeads * kDim;
  if (queries > kBlock) return invalid(fmt::format("bench index: --queries {}: at most {}", queries, kBlock));
  constexpr int64_t kQuerySets = 16;
  FIRN_ASSIGN(const Buffer q, context.arena().allocate(kQuerySets * queries * width * 2, "bench index: queries"));
  FIRN_ASSIGN(const Buffer ids, context.arena().allocate(queries * kHeads * kTopk * 4, "bench index: choices"));
  uint64_t seed = uint64_t{2} << 50;
  fill_normal_bf16(q.as<Bf16>(), kQuerySets * queries * width, &seed);
  const int64_t key_bytes = std::max<int64_t>(1, (index.blocks - 1) * kBlock * kDim * 2);
  const int64_t calls = std::clamp<int64_t>((int64_t{256} << 20) / key_bytes, 1, 64);
  int64_t call = 0;
  const auto run = [&](Measured& m, bool timed) -> Status {
    context.ops().set_index_path(m.path);
    const KernelStats before = context.ops().stats();
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i, ++call) {
      const std::vector<void*>& table = index.tables[static_cast<size_t>(call) % index.tables.size()];
      const KvSpan span = {0, queries, depth - queries, nullptr, table.data(), index.blocks};
      IndexSelectParams p;
      p.q = {q.as<Bf16>() + call % kQuerySets * queries * width, DType::kBf16, queries, width, width};
      p.heads = kHeads;
      p.spans = {&span, 1};
      p.layout = m3_layout();
      p.topk = kTopk;
      p.ids = {ids.data(), DType::kI32, queries, kHeads * kTopk, kHeads * kTopk};
      FIRN_TRY(context.ops().wait(context.ops().index_select(p)));
    }
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    context.ops().set_index_path(cpu::IndexPath::kByRule);
    if (!timed) return {};
    const KernelStats& after = context.ops().stats();
    m.seconds.push_back(spent.count() / static_cast<double>(calls));
    m.scored += after.index_blocks_scored - before.index_blocks_scored;
    m.rescored += after.index_blocks_rescored - before.index_blocks_rescored;
    m.copy_bytes += after.index_copy_bytes - before.index_copy_bytes;
    m.refined += after.index_keys_refined - before.index_keys_refined;
    m.calls += calls;
    return {};
  };
  std::vector<Measured> ways = {{cpu::IndexPath::kScan, {}}};
  if (queries * kHeads <= kMostTwoStageQueries) ways.push_back({cpu::IndexPath::kTwoStage, {}});
  for (int r = -1; r < context.options().runs; ++r) {
    if (interrupted()) return cancelled("bench index interrupted");
    for (Measured& m : ways) FIRN_TRY(run(m, r >= 0));
  }
  FIRN_ASSIGN(const double limit, context.memory_limit());
  for (const Measured& m : ways) {
    BenchRow row;
    row.bench = "index";
    row.time = {median_of(m.seconds), *std::min_element(m.seconds.begin(), m.seconds.end()),
                static_cast<int>(m.seconds.size())};
    row.flops = 2 * queries * width * (index.blocks - 1) * kBlock;
    row.limit = limit;
    row.limit_is_bytes = true;
    row.limit_source = "mem read";
    const auto share = [](int64_t part, int64_t of) {
      return of > 0 ? static_cast<double>(part) / static_cast<double>(of) : 0.0;
    };
    if (m.path == cpu::IndexPath::kScan) {
      row.bytes = key_bytes;
      row.shape =
          fmt::format("depth {} queries {} rescored {:.3f}%", depth, queries, 100 * share(m.rescored, m.scored));
    } else {
      row.bytes = std::max<int64_t>(1, (m.copy_bytes + m.refined * kDim * 2) / m.calls);
      std::vector<double> ratios;
      for (size_t i = 0; i < m.seconds.size(); ++i) ratios.push_back(m.seconds[i] / ways[0].seconds[i]);
      row.shape = fmt::format("depth {} queries {} two stages: bytes x{:.3f} time x{:.2f} keys read {:.3f}%", depth,
                              queries, share(row.bytes, key_bytes), median_of(ratios),
                              100 * share(m.refined, m.calls * (index.blocks - 1) * kBlock));
    }
    context.emit(row);
  }
  return {};
}

}  // namespace

Status bench_index(BenchContext& context) {
  std::vector<int64_t> depths = context.options().depths, queries = context.options().queries;
  if (depths.empty()) depths = {8192, 131072, 1048576};
  if (queries.empty()) queries = {1, 4};
  FIRN_TRY(context.memory_limit().status());
  for (const int64_t depth : depths) {
    if (depth < kBlock) return invalid(fmt::format("bench index: --depth {}: at least {}", depth, kBlock));
    FIRN_ASSIGN(const RotatingIndex index, make_index(context, depth));
    for (const int64_t n : queries) {
      if (interrupted()) return cancelled("bench index interrupted");
      FIRN_TRY(bench_one(context, index, n));
    }
  }
  return {};
}

}  // namespace firn::tools
