// firn bench index: the exact choice of 16 blocks by 4 index heads of 128 (bf16), scores included. Index keys rotate
// over 1.5 GiB where memory allows.
//
// Bytes of a call: every index key before the own block, once; limit: memory's read rate.
#include <fmt/format.h>

#include <algorithm>

#include "tools/bench.h"

namespace firn::tools {
namespace {

constexpr int64_t kHeads = 4, kDim = 128, kTopk = 16, kBlock = 128;

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

Result<RotatingIndex> make_index(BenchContext& context, int64_t depth) {
  const KvLayout layout = m3_layout();
  RotatingIndex index;
  index.blocks = (depth + kBlock - 1) / kBlock;
  const int64_t layer_bytes = index.blocks * layout.index_block_bytes();
  const int64_t wanted = std::min(kRotateBytes, context.working_set_bytes());
  const int64_t layers = std::max<int64_t>(1, (wanted + layer_bytes - 1) / layer_bytes);
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
      fill_random_bf16(keys.as<Bf16>(), n * kDim, seed);
      seed += uint64_t{1} << 32;  // numbers of neighbouring seeds overlap
      const KvSpan span = {0, n, at, nullptr, table.data(), index.blocks};
      context.ops().index_append({{keys.data(), DType::kBf16, n, kDim, kDim}, {&span, 1}, layout});
    }
    index.tables.push_back(std::move(table));
  }
  return index;
}

Status bench_one(BenchContext& context, const RotatingIndex& index, int64_t queries) {
  const int64_t depth = index.blocks * kBlock, width = kHeads * kDim;
  if (queries > kBlock) return invalid(fmt::format("bench index: --queries {}: at most {}", queries, kBlock));
  constexpr int64_t kQuerySets = 16;
  FIRN_ASSIGN(const Buffer q, context.arena().allocate(kQuerySets * queries * width * 2, "bench index: queries"));
  FIRN_ASSIGN(const Buffer ids, context.arena().allocate(queries * kHeads * kTopk * 4, "bench index: choices"));
  fill_random_bf16(q.as<Bf16>(), kQuerySets * queries * width, uint64_t{2} << 50);
  BenchRow row;
  row.bench = "index";
  row.bytes = std::max<int64_t>(1, (index.blocks - 1) * kBlock * kDim * 2);
  row.flops = 2 * queries * width * (index.blocks - 1) * kBlock;
  Status failure;
  const KernelStats before = context.ops().stats();
  const int64_t calls = std::clamp<int64_t>((int64_t{256} << 20) / row.bytes, 1, 64);
  row.time = time_runs(context.options().runs, calls, [&](int64_t i) {
    const std::vector<void*>& table = index.tables[static_cast<size_t>(i) % index.tables.size()];
    const KvSpan span = {0, queries, depth - queries, nullptr, table.data(), index.blocks};
    IndexSelectParams p;
    p.q = {q.as<Bf16>() + i % kQuerySets * queries * width, DType::kBf16, queries, width, width};
    p.heads = kHeads;
    p.spans = {&span, 1};
    p.layout = m3_layout();
    p.topk = kTopk;
    p.ids = {ids.data(), DType::kI32, queries, kHeads * kTopk, kHeads * kTopk};
    const Status status = context.ops().wait(context.ops().index_select(p));
    if (!status.ok()) failure = status;
  });
  FIRN_TRY(failure);
  const KernelStats& after = context.ops().stats();
  const double scored = static_cast<double>(after.index_blocks_scored - before.index_blocks_scored);
  const double rescored = static_cast<double>(after.index_blocks_rescored - before.index_blocks_rescored);
  row.shape =
      fmt::format("depth {} queries {} rescored {:.3f}%", depth, queries, scored > 0 ? 100 * rescored / scored : 0);
  FIRN_ASSIGN(row.limit, context.memory_limit());
  row.limit_is_bytes = true;
  row.limit_source = "mem read";
  context.emit(row);
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
