// firn bench attention: a layer's attention at M3's shape (4 groups of 16 heads of 128, bf16) over its 16 chosen blocks
// and, as the first layers do, over all blocks. KV rotates over 1.5 GiB where memory allows, so that each call reads
// keys and values that no cache holds.
//
// Lists of neighbouring queries share blocks. On the trained nano checkpoint a query and the next one of its group have
// 0.50 of their 16 blocks in common, and 64 queries choose 131 distinct ones of 1,024 (document of 128K tokens; 0.57
// and 75 of 130 at 16K). "sparse" draws lists with popularity 1 / (rank + 5)^2, ranks anew for every group and call:
// 0.51 and 143 (0.53 and 100 at 16K), a little less sharing than measured. "sparse unshared" draws every query's blocks
// evenly and independently, which bounds what a model without any locality would do.
//
// Bytes of a call: K and V of every block some row attends to, once a group. Limit: memory's read rate, or what oneDNN
// would need for the same FLOP where that is slower.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "tools/bench.h"

namespace firn::tools {
namespace {

constexpr int64_t kGroups = 4, kPerGroup = 16, kDim = 128, kTopk = 16, kBlock = 128;
constexpr int64_t kListSets = 16;

KvLayout m3_layout() {
  KvLayout layout;
  layout.block_tokens = kBlock;
  layout.groups = kGroups;
  layout.head_dim = kDim;
  return layout;
}

// Several layers' KV of one depth; layer i % n() is what call i reads.
struct RotatingKv {
  Buffer memory;
  std::vector<std::vector<void*>> tables;  // [kGroups * blocks] each
  int64_t blocks = 0;
};

Result<RotatingKv> make_kv(BenchContext& context, int64_t depth) {
  const KvLayout layout = m3_layout();
  RotatingKv kv;
  kv.blocks = (depth + kBlock - 1) / kBlock;
  const int64_t layer_bytes = kGroups * kv.blocks * layout.kv_block_bytes();
  const int64_t wanted = std::min(kRotateBytes, context.working_set_bytes());
  const int64_t layers = std::max<int64_t>(1, (wanted + layer_bytes - 1) / layer_bytes);
  FIRN_ASSIGN(kv.memory, context.arena().allocate(layers * layer_bytes, "bench attention: KV"));
  // One piece of random numbers, repeated: the values decide nothing here.
  const int64_t piece = std::min(layer_bytes, int64_t{16} << 20);
  fill_random_bf16(kv.memory.as<Bf16>(), piece / 2, 1);
  for (int64_t at = piece; at < layers * layer_bytes; at += piece) {
    context.ops().copy(kv.memory.as<char>() + at, kv.memory.data(), std::min(piece, layers * layer_bytes - at));
  }
  for (int64_t i = 0; i < layers; ++i) {
    std::vector<void*> table;
    for (int64_t j = 0; j < kGroups * kv.blocks; ++j) {
      table.push_back(kv.memory.as<char>() + i * layer_bytes + j * layout.kv_block_bytes());
    }
    kv.tables.push_back(std::move(table));
  }
  return kv;
}

enum class Lists { kDense, kShared, kUnshared };

// A block below n, by popularity 1 / (rank + 5)^2 over the ranks; the inverse of the integral stands for the sum's.
int64_t draw(std::mt19937_64& rng, const std::vector<int32_t>& of_rank, Lists lists) {
  const auto n = static_cast<double>(of_rank.size());
  const double u = std::uniform_real_distribution<double>(0, 1)(rng);
  const double rank = lists == Lists::kUnshared ? u * n : 5 / (u + (1 - u) * 5 / (n + 5)) - 5;
  return of_rank[std::min(of_rank.size() - 1, static_cast<size_t>(std::max(0.0, rank)))];
}

// Ascending lists for `queries` rows at the end of the context; returns the blocks read, each once a group.
int64_t fill_lists(int64_t queries, int64_t blocks, Lists lists, uint64_t seed, int32_t* ids) {
  std::mt19937_64 rng(seed);
  int64_t read = 0;
  for (int64_t g = 0; g < kGroups; ++g) {
    std::vector<bool> used(static_cast<size_t>(blocks));
    std::vector<int32_t> of_rank(static_cast<size_t>(blocks - 1));
    std::iota(of_rank.begin(), of_rank.end(), 0);
    std::shuffle(of_rank.begin(), of_rank.end(), rng);
    for (int64_t r = 0; r < queries; ++r) {
      const int64_t n = std::min(kTopk, blocks);
      std::vector<int32_t> chosen = {static_cast<int32_t>(blocks - 1)};
      while (static_cast<int64_t>(chosen.size()) < n) {
        const auto b = static_cast<int32_t>(draw(rng, of_rank, lists));
        if (std::find(chosen.begin(), chosen.end(), b) == chosen.end()) chosen.push_back(b);
      }
      std::sort(chosen.begin(), chosen.end());
      chosen.resize(kTopk, -1);
      for (const int32_t b : chosen) {
        if (b < 0 || used[static_cast<size_t>(b)]) continue;
        used[static_cast<size_t>(b)] = true;
        ++read;
      }
      std::copy(chosen.begin(), chosen.end(), ids + (r * kGroups + g) * kTopk);
    }
  }
  return read;
}

Status bench_one(BenchContext& context, const RotatingKv& kv, int64_t queries, Lists lists) {
  const bool sparse = lists != Lists::kDense;
  const int64_t depth = kv.blocks * kBlock, width = kGroups * kPerGroup * kDim;
  if (queries > kBlock) return invalid(fmt::format("bench attention: --queries {}: at most {}", queries, kBlock));
  FIRN_ASSIGN(const Buffer q, context.arena().allocate(queries * width * 2, "bench attention: queries"));
  FIRN_ASSIGN(const Buffer out, context.arena().allocate(queries * width * 2, "bench attention: outputs"));
  FIRN_ASSIGN(const Buffer ids,
              context.arena().allocate(kListSets * queries * kGroups * kTopk * 4, "bench attention: block lists"));
  fill_random_bf16(q.as<Bf16>(), queries * width, uint64_t{2} << 40);
  int64_t read = 0;
  for (int64_t i = 0; i < kListSets; ++i) {
    read += fill_lists(queries, kv.blocks, lists, 100 + static_cast<uint64_t>(i),
                       ids.as<int32_t>() + i * queries * kGroups * kTopk);
  }
  BenchRow row;
  row.bench = "attention";
  row.shape = fmt::format("{} depth {} queries {}",
                          !sparse                   ? "dense"
                          : lists == Lists::kShared ? "sparse"
                                                    : "sparse unshared",
                          depth, queries);
  const int64_t blocks = sparse ? read / kListSets : kGroups * kv.blocks;
  row.bytes = blocks * m3_layout().kv_block_bytes();
  // The rows are the last ones of the last block: about as many keys as whole blocks hold.
  int64_t keys = 0;
  for (int64_t r = 0; r < queries; ++r) {
    const int64_t visible = depth - queries + r + 1;
    keys += sparse ? visible - (kv.blocks - std::min(kTopk, kv.blocks)) * kBlock : visible;
  }
  row.flops = 4 * keys * kGroups * kPerGroup * kDim;
  Status failure;
  const int64_t calls = std::clamp<int64_t>((int64_t{256} << 20) / row.bytes, 1, queries == 1 ? 64 : 4);
  const int runs = row.flops > 100'000'000'000 ? std::min(context.options().runs, 3) : context.options().runs;
  row.time = time_runs(runs, calls, [&](int64_t i) {
    const std::vector<void*>& table = kv.tables[static_cast<size_t>(i) % kv.tables.size()];
    const KvSpan span = {0, queries, depth - queries, table.data(), nullptr, kv.blocks};
    AttentionParams p;
    p.q = {q.data(), DType::kBf16, queries, width, width};
    p.heads_per_group = kPerGroup;
    p.spans = {&span, 1};
    p.layout = m3_layout();
    p.scale = 0.08838835f;
    if (sparse) {
      p.block_ids = {ids.as<int32_t>() + i % kListSets * queries * kGroups * kTopk, DType::kI32, queries,
                     kGroups * kTopk, kGroups * kTopk};
      p.topk = kTopk;
    }
    p.out = {out.data(), DType::kBf16, queries, width, width};
    const Status status = context.ops().wait(context.ops().attention(p));
    if (!status.ok()) failure = status;
  });
  FIRN_TRY(failure);
  FIRN_ASSIGN(const double memory, context.memory_limit());
  FIRN_ASSIGN(const double gemm, context.gemm_limit());
  const double by_flops = gemm * static_cast<double>(row.bytes) / static_cast<double>(row.flops);
  row.limit_is_bytes = true;
  row.limit = std::min(memory, by_flops);
  row.limit_source = memory <= by_flops ? "mem read" : "gemm best / FLOP per byte";
  context.emit(row);
  return {};
}

}  // namespace

Status bench_attention(BenchContext& context) {
  std::vector<int64_t> depths = context.options().depths, queries = context.options().queries;
  if (depths.empty()) depths = {8192, 131072};
  if (queries.empty()) queries = {1, 4, 128};
  FIRN_TRY(context.memory_limit().status());
  FIRN_TRY(context.gemm_limit().status());
  for (const int64_t depth : depths) {
    if (depth < kBlock) return invalid(fmt::format("bench attention: --depth {}: at least {}", depth, kBlock));
    FIRN_ASSIGN(const RotatingKv kv, make_kv(context, depth));
    for (const Lists lists : {Lists::kShared, Lists::kUnshared, Lists::kDense}) {
      for (const int64_t n : queries) {
        if (lists == Lists::kUnshared && n == 1) continue;  // one query shares with none
        if (interrupted()) return cancelled("bench attention interrupted");
        FIRN_TRY(bench_one(context, kv, n, lists));
      }
    }
  }
  return {};
}

}  // namespace firn::tools
