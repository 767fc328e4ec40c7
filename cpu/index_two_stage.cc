#include "cpu/index_two_stage.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

namespace firn::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int64_t kMaxBlockTokens = 1024;
// Candidates one thread keeps of one query. Random keys leave about 2,500 of a million.
constexpr int64_t kCandidates = 8192;
constexpr int64_t kRefineKeys = 64;
// Blocks between this thread's present one and the memory it asks for.
constexpr int64_t kBlocksAhead = 1;
constexpr int64_t kPieceBlocks = 16;

float key_element(const void* row, DType dtype, int64_t i) {
  return dtype == DType::kF32 ? static_cast<const float*>(row)[i] : to_float(static_cast<const Bf16*>(row)[i]);
}

// What one thread knows of one query. heap: the largest exact scores of distinct blocks, smallest in front.
struct Progress {
  float* heap;
  uint32_t* keys;
  float* uppers;
  int64_t n_heap, n_candidates;
  float threshold;
  bool full;
};

class TwoStage {
 public:
  TwoStage(const IndexSelectParams& params, const RowTile& row_tile, Isa isa, int threads, std::byte* scratch);

  bool bounded() const;
  void scan(int64_t begin, int64_t end, int thread);
  bool decide(int64_t query, int thread);

  const CommonBlocks common;
  std::atomic<int64_t> refined{0};

 private:
  struct ThreadSpace {
    float *upper, *largest, *largest_upper, *b;
    std::byte *rows, *work;
    float* scores;
  };
  const char* block(int64_t b) const { return static_cast<const char*>(index_block_of(*tile.span, b)); }
  Progress& progress(int thread, int64_t query) { return all_[thread * queries + query]; }
  void raise(Progress& at, int64_t b, int64_t query, const float* upper);
  static bool compact(Progress& at);
  template <typename F>
  void score_keys(const ThreadSpace& space, int64_t query, const uint32_t* keys, int64_t n, F&& use);

  const IndexSelectParams& p;
  const RowTile& tile;
  const IndexKernels& kernels;
  const IndexCopyKernels& copy_kernels;
  const int64_t dim, queries, places, n_threads, row_bytes;
  const bool bf16;
  float* q_ = nullptr;   // [queries][dim]
  int8_t* x_ = nullptr;  // [queries][8 * chunks]
  float *c_ = nullptr, *a_ = nullptr;
  int32_t* sum15_ = nullptr;
  CopyQuery rounded_[kCopyMaxQueries];
  Progress* all_ = nullptr;  // [threads][queries]
  ThreadSpace* spaces_ = nullptr;
  float* best_ = nullptr;  // [queries][common blocks]
};

// Hands out 64-byte aligned pieces; with a null base it only counts.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <typename T>
  T* take(int64_t n) {
    T* out = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += round_up(n * static_cast<int64_t>(sizeof(T)), 64);
    return out;
  }
  int64_t used() const { return used_; }

 private:
  std::byte* const base_;
  int64_t used_ = 0;
};

int64_t places_of(const IndexSelectParams& p, const CommonBlocks& common, int64_t own) {
  return p.topk - (own + 1 - (std::max(common.first, own + 1 - p.local_blocks) - common.first));
}

TwoStage::TwoStage(const IndexSelectParams& params, const RowTile& row_tile, Isa isa, int threads, std::byte* scratch)
    : common(common_blocks(params, row_tile)),
      p(params),
      tile(row_tile),
      kernels(index_kernels_of(isa)),
      copy_kernels(index_copy_kernels_of(isa)),
      dim(p.layout.index_dim),
      queries(tile.n_rows * p.heads),
      places(places_of(p, common, tile.position / p.layout.block_tokens)),
      n_threads(threads),
      row_bytes(dim * static_cast<int64_t>(dtype_bytes(p.layout.dtype))),
      bf16(p.layout.dtype == DType::kBf16) {
  Carver carve(scratch);
  const int64_t bt = p.layout.block_tokens, n = queries;
  q_ = carve.take<float>(n * dim);
  x_ = carve.take<int8_t>(n * 8 * copy_chunks(dim));
  c_ = carve.take<float>(n);
  a_ = carve.take<float>(n);
  sum15_ = carve.take<int32_t>(n);
  all_ = carve.take<Progress>(n_threads * n);
  spaces_ = carve.take<ThreadSpace>(n_threads);
  best_ = carve.take<float>(n * (common.last - common.first));
  for (int64_t i = 0; i < n_threads * n; ++i) {
    Progress& at = all_[i];
    at = {};
    at.heap = carve.take<float>(p.topk);
    at.keys = carve.take<uint32_t>(kCandidates);
    at.uppers = carve.take<float>(kCandidates);
    at.threshold = kMinusInfinity;
  }
  for (int64_t i = 0; i < n_threads; ++i) {
    ThreadSpace& space = spaces_[i];
    space.upper = carve.take<float>(n * bt);
    space.largest = carve.take<float>(n);
    space.largest_upper = carve.take<float>(n);
    space.b = carve.take<float>(n);
    space.rows = carve.take<std::byte>(kRefineKeys * row_bytes);
    space.work = carve.take<std::byte>(maxima_scratch_bytes(dim, 1));
    space.scores = carve.take<float>(kRefineKeys);
  }
  for (int64_t i = 0; i < n; ++i) {
    const void* row = p.q.row(tile.row + i / p.heads);
    for (int64_t d = 0; d < dim; ++d) q_[i * dim + d] = key_element(row, p.q.dtype, i % p.heads * dim + d);
    rounded_[i] = round_query(q_ + i * dim, dim, x_ + i * 8 * copy_chunks(dim));
    c_[i] = rounded_[i].c;
    a_[i] = rounded_[i].a;
    sum15_[i] = rounded_[i].sum15;
  }
}

bool TwoStage::bounded() const {
  return std::all_of(rounded_, rounded_ + queries, [](const CopyQuery& q) { return q.bounded; });
}

// Scores the key with the largest upper end exactly, and raises the threshold.
void TwoStage::raise(Progress& at, int64_t b, int64_t query, const float* upper) {
  int64_t most = 0;
  float end = kMinusInfinity;
  for (int64_t i = 0; i < p.layout.block_tokens; ++i) {
    if (upper[i] > end) end = upper[i], most = i;
  }
  const char* key = block(b) + most * row_bytes;
  double sum = 0;
  for (int64_t d = 0; d < dim; ++d) {
    sum += static_cast<double>(q_[query * dim + d]) * static_cast<double>(key_element(key, p.layout.dtype, d));
  }
  const auto score = static_cast<float>(sum);
  if (!(score > at.threshold)) return;
  float* const heap = at.heap;
  if (at.n_heap == places) {
    std::pop_heap(heap, heap + places, std::greater<>());
    heap[places - 1] = score;
  } else {
    heap[at.n_heap++] = score;
  }
  std::push_heap(heap, heap + at.n_heap, std::greater<>());
  if (at.n_heap == places) at.threshold = heap[0];
}

bool TwoStage::compact(Progress& at) {
  int64_t kept = 0;
  for (int64_t i = 0; i < at.n_candidates; ++i) {
    if (!(at.uppers[i] >= at.threshold)) continue;
    at.keys[kept] = at.keys[i];
    at.uppers[kept++] = at.uppers[i];
  }
  at.n_candidates = kept;
  return kept <= kCandidates / 2;
}

void TwoStage::scan(int64_t begin, int64_t end, int thread) {
  const ThreadSpace& space = spaces_[thread];
  const KvLayout& layout = p.layout;
  const int64_t bt = layout.block_tokens;
  CopyScanArgs args;
  args.n_groups = bt / kCopyGroup;
  args.chunks = copy_chunks(dim);
  args.n_queries = queries;
  args.x = x_;
  args.sum15 = sum15_;
  args.c = c_;
  args.a = a_;
  args.b = space.b;
  args.upper = space.upper;
  args.largest = space.largest;
  args.largest_upper = space.largest_upper;
  for (int64_t b = begin; b < end; ++b) {
    const char* base = block(b);
    float k_norm;
    std::memcpy(&k_norm, base + layout.index_norm_offset(), sizeof k_norm);
    for (int64_t i = 0; i < queries; ++i) space.b[i] = copy_width(rounded_[i], k_norm);
    args.copy = base + layout.index_copy_offset();
    const char* ahead = b + kBlocksAhead < common.last ? block(b + kBlocksAhead) : nullptr;
    args.ahead = ahead == nullptr ? nullptr : ahead + layout.index_copy_offset();
    if (ahead != nullptr) __builtin_prefetch(ahead + layout.index_norm_offset());
    copy_kernels.scan(args);
    for (int64_t i = 0; i < queries; ++i) {
      Progress& at = progress(thread, i);
      if (at.full) continue;
      const float* upper = space.upper + i * bt;
      const bool bounded = space.b[i] < std::numeric_limits<float>::infinity();
      if (!bounded) {
        std::fill(space.upper + i * bt, space.upper + (i + 1) * bt, std::numeric_limits<float>::infinity());
      } else if (space.largest[i] > at.threshold) {
        raise(at, b, i, upper);
      }
      if (bounded && !(space.largest_upper[i] >= at.threshold)) continue;
      if (at.n_candidates + bt > kCandidates && !compact(at)) {
        at.full = true;
        continue;
      }
      at.n_candidates += copy_kernels.collect(upper, bt, at.threshold, static_cast<uint32_t>(b * bt),
                                              at.keys + at.n_candidates, at.uppers + at.n_candidates);
    }
  }
}

// Canonical scores of single keys, kRefineKeys at a time: use(key, score).
template <typename F>
void TwoStage::score_keys(const ThreadSpace& space, int64_t query, const uint32_t* keys, int64_t n, F&& use) {
  const int64_t bt = p.layout.block_tokens;
  const auto row_of = [&](uint32_t key) { return block(key / bt) + key % bt * row_bytes; };
  const auto ask = [&](int64_t first) {
    for (int64_t i = first; i < std::min(n, first + kRefineKeys); ++i) {
      const char* row = row_of(keys[i]);
      for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(row + at);
    }
  };
  ask(0);
  for (int64_t first = 0; first < n; first += kRefineKeys) {
    const int64_t m = std::min(kRefineKeys, n - first);
    for (int64_t i = 0; i < m; ++i) {
      std::memcpy(space.rows + i * row_bytes, row_of(keys[first + i]), static_cast<size_t>(row_bytes));
    }
    ask(first + kRefineKeys);
    kernels.scores(space.rows, bf16, m, dim, q_ + query * dim, space.work, space.scores);
    for (int64_t i = 0; i < m; ++i) use(keys[first + i], space.scores[i]);
  }
}

bool TwoStage::decide(int64_t query, int thread) {
  const int64_t bt = p.layout.block_tokens, n_blocks = common.last - common.first;
  const int64_t row = query / p.heads, own = (tile.position + row) / bt;
  std::vector<float> tops;
  for (int t = 0; t < n_threads; ++t) {
    const Progress& at = progress(t, query);
    if (at.full) return false;
    tops.insert(tops.end(), at.heap, at.heap + at.n_heap);
  }
  if (static_cast<int64_t>(tops.size()) < places) return false;
  std::nth_element(tops.begin(), tops.begin() + (places - 1), tops.end(), std::greater<>());
  const float threshold = tops[static_cast<size_t>(places - 1)];
  if (!(threshold > kMinusInfinity)) return false;

  float* const best = best_ + query * n_blocks;
  std::fill(best, best + n_blocks, kMinusInfinity);
  int64_t n_refined = 0;
  for (int t = 0; t < n_threads; ++t) {
    Progress& at = progress(t, query);
    at.threshold = std::max(at.threshold, threshold);
    compact(at);
    score_keys(spaces_[thread], query, at.keys, at.n_candidates, [&](uint32_t key, float score) {
      float& of_block = best[key / bt - common.first];
      if (score > of_block) of_block = score;
    });
    n_refined += at.n_candidates;
  }
  refined.fetch_add(n_refined, std::memory_order_relaxed);

  struct Ranked {
    float score;
    int32_t block;
  };
  std::vector<Ranked> ranked;
  for (int64_t b = 0; b < n_blocks; ++b) {
    if (best[b] >= threshold) ranked.push_back({best[b], static_cast<int32_t>(common.first + b)});
  }
  // A later row of the tile may also choose blocks that are an earlier row's own.
  for (int64_t b = common.last; b < own + 1 - p.local_blocks; ++b) {
    Ranked r{0, static_cast<int32_t>(b)};
    kernels.canonical(block(b), bf16, bt, dim, q_ + query * dim, 1, spaces_[thread].work, &r.score);
    if (r.score >= threshold) ranked.push_back(r);
  }
  FIRN_CHECK(static_cast<int64_t>(ranked.size()) >= places,
             "index_select: fewer blocks reach the threshold than set it");
  std::partial_sort(ranked.begin(), ranked.begin() + places, ranked.end(), [](const Ranked& a, const Ranked& b) {
    return a.score > b.score || (a.score == b.score && a.block < b.block);
  });
  int32_t* out = static_cast<int32_t*>(p.ids.row(tile.row + row)) + query % p.heads * p.topk;
  int64_t n = 0;
  for (int64_t b = 0; b < common.first; ++b) out[n++] = static_cast<int32_t>(b);
  for (int64_t j = 0; j < places; ++j) out[n++] = ranked[static_cast<size_t>(j)].block;
  for (int64_t b = own + 1 - p.local_blocks; b <= own; ++b) out[n++] = static_cast<int32_t>(b);
  FIRN_CHECK(n == p.topk, "index_select: a list of the wrong length");
  std::sort(out, out + n);
  return true;
}

}  // namespace

const IndexKernels& index_kernels_of(Isa isa) {
  return isa >= Isa::kAvx512 ? kIndexAvx512 : isa >= Isa::kAvx2 ? kIndexAvx2 : kIndexScalar;
}

const IndexCopyKernels& index_copy_kernels_of(Isa isa) {
  if (isa >= Isa::kAvx512) return cpu_features().avx512_vnni ? kIndexCopyVnni : kIndexCopyAvx512;
  return isa >= Isa::kAvx2 ? kIndexCopyAvx2 : kIndexCopyScalar;
}

CommonBlocks common_blocks(const IndexSelectParams& p, const RowTile& tile) {
  const int64_t own = tile.position / p.layout.block_tokens;
  CommonBlocks common;
  common.first = std::min(p.init_blocks, own + 1);
  common.last = std::max(common.first, own + 1 - p.local_blocks);
  return common;
}

bool two_stage_possible(const IndexSelectParams& p, const RowTile& tile) {
  const CommonBlocks common = common_blocks(p, tile);
  const int64_t own = tile.position / p.layout.block_tokens, places = places_of(p, common, own);
  // With no local block a row's own block competes, of which it sees a part only.
  return p.local_blocks >= 1 && tile.n_rows * p.heads <= kCopyMaxQueries && places > 0 &&
         common.last - common.first > places && p.layout.index_dim <= kCopyMaxDim &&
         p.layout.block_tokens % kCopyGroup == 0 && p.layout.block_tokens <= kMaxBlockTokens &&
         (own + 2) * p.layout.block_tokens < int64_t{1} << 32;
}

int64_t two_stage_bytes(int64_t queries, int64_t dim, int64_t block_tokens, int64_t topk, int64_t blocks,
                        int n_threads) {
  const auto rounded = [](int64_t n, int64_t bytes) { return round_up(n * bytes, 64); };
  const int64_t shared = rounded(queries * dim, 4) + rounded(queries * 8 * copy_chunks(dim), 1) +
                         3 * rounded(queries, 4) + rounded(n_threads * queries, sizeof(Progress)) +
                         rounded(n_threads, 128) + rounded(queries * blocks, 4);
  const int64_t per_query = rounded(topk, 4) + 2 * rounded(kCandidates, 4);
  const int64_t per_thread = rounded(queries * block_tokens, 4) + 3 * rounded(queries, 4) +
                             rounded(kRefineKeys * dim, 4) + rounded(maxima_scratch_bytes(dim, 1), 1) +
                             rounded(kRefineKeys, 4);
  return shared + n_threads * (queries * per_query + per_thread);
}

bool select_two_stage(const IndexSelectParams& p, const RowTile& tile, Isa isa, ThreadTeam& team, std::byte* scratch,
                      TwoStageCounts* counts) {
  TwoStage stage(p, tile, isa, team.size(), scratch);
  if (!stage.bounded()) return false;
  const int64_t n_blocks = stage.common.last - stage.common.first, queries = tile.n_rows * p.heads;
  team.parallel_stretches(n_blocks, kPieceBlocks, [&](int64_t begin, int64_t end, int thread) {
    stage.scan(stage.common.first + begin, stage.common.first + end, thread);
  });
  std::atomic<bool> decided{true};
  team.parallel_for(queries, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) {
      if (!stage.decide(i, thread)) decided.store(false, std::memory_order_relaxed);
    }
  });
  counts->copy_bytes += n_blocks * p.layout.index_copy_bytes();
  counts->keys_refined += stage.refined.load();
  if (decided.load()) counts->blocks_scored += n_blocks * queries;
  return decided.load();
}

}  // namespace firn::cpu
