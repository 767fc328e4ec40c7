// CpuOps: KV append, attention, per-block partials and their merge.
//
// Work is cut into tiles of kTileRows consecutive rows times one group; a tile walks the union of its rows' block lists
// in ascending id, packs each block once and lets every row that chose it attend. A [queries x keys] matrix never
// exists: a thread's scratch is the packed block, the weights of kAttendBatch queries and the tile's running triples.
//
// When there are too few tiles for the team (decode), blocks are spread over the threads instead: triples of a bounded
// round of blocks go to scratch, then every (row, head) folds its own in block order. Both ways run the same chains of
// operations (cpu/attention_kernels.h), so which one runs never shows in the bits.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "cpu/attention_kernels.h"
#include "cpu/attention_rows.h"
#include "cpu/cpu_ops.h"
#include "fmt/format.h"

namespace firn::cpu {
namespace {

constexpr int64_t kTileRows = 16;
// Triples of one round of the spread path.
constexpr int64_t kRoundBytes = int64_t{24} << 20;
// m, l and padding in front of a triple's o in scratch.
constexpr int64_t kTripleHead = 16;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

const AttentionKernels& kernels_of(Isa isa) {
  return isa >= Isa::kAvx512 ? kAttentionAvx512 : isa >= Isa::kAvx2 ? kAttentionAvx2 : kAttentionScalar;
}

// One block of a tile's union and the rows that attend to it.
struct Entry {
  int64_t block = 0;
  uint32_t rows = 0;  // bit r: row r of the tile
};

// A call of attention or attention_partial, checked.
class Job {
 public:
  Job(const AttentionParams& p, const ConstMatrixView& only, const char* operation);

  const RowTile& tile(int64_t i) const { return tiles_[static_cast<size_t>(i)]; }
  int64_t n_tiles() const { return static_cast<int64_t>(tiles_.size()); }
  int64_t n_lists() const { return n_tiles() * groups; }  // list = tile * groups + group
  int64_t n_entries(int64_t list) const {
    if (!dense_) return begins_[static_cast<size_t>(list) + 1] - begins_[static_cast<size_t>(list)];
    const RowTile& t = tile(list / groups);
    return (t.position + t.n_rows - 1) / block_tokens + 1;
  }
  Entry entry(int64_t list, int64_t i) const {
    if (!dense_) return entries_[static_cast<size_t>(begins_[static_cast<size_t>(list)] + i)];
    const RowTile& t = tile(list / groups);
    const int64_t hidden = std::max<int64_t>(0, i * block_tokens - t.position);  // rows before the block
    return {i, (~uint32_t{0} >> (32 - t.n_rows)) & (~uint32_t{0} << hidden)};
  }
  // Keys of the block that row r of the tile sees.
  int64_t visible(const RowTile& t, int64_t r, int64_t block) const {
    return std::min(block_tokens, t.position + r + 1 - block * block_tokens);
  }
  // Place of a block in a row's list.
  int64_t place(int64_t row, int64_t group, int64_t block) const {
    const int32_t* ids = static_cast<const int32_t*>(p.block_ids.row(row)) + group * p.topk;
    int64_t j = 0;
    while (ids[j] != block) ++j;
    return j;
  }

  const AttentionParams& p;
  const bool bf16;
  const int64_t groups, per_group, heads, dim, dim_padded, block_tokens, keys_padded;
  const int64_t triple_floats;  // of one triple in scratch

 private:
  void collect(const ConstMatrixView& only);

  const bool dense_;
  std::vector<RowTile> tiles_;
  std::vector<Entry> entries_;
  std::vector<int64_t> begins_;
};

Job::Job(const AttentionParams& params, const ConstMatrixView& only, const char* operation)
    : p(params),
      bf16(p.layout.dtype == DType::kBf16),
      groups(p.layout.groups),
      per_group(p.heads_per_group),
      heads(groups * per_group),
      dim(p.layout.head_dim),
      dim_padded(round_up(dim, kLanesMax)),
      block_tokens(p.layout.block_tokens),
      keys_padded(round_up(block_tokens, kLanesMax)),
      triple_floats(dim_padded + kTripleHead),
      dense_(p.block_ids.empty()) {
  check_layout(p.layout, operation);
  FIRN_CHECK(per_group > 0 && p.q.cols == heads * dim && p.q.dtype == p.layout.dtype,
             fmt::format("{}: query shape or type differs from the layout", operation));
  if (!dense_) {
    FIRN_CHECK(p.topk > 0 && p.block_ids.cols == groups * p.topk && p.block_ids.rows == p.q.rows &&
                   p.block_ids.dtype == DType::kI32,
               fmt::format("{}: block list shape differs", operation));
  }
  tiles_ = cut_rows(p.spans, p.q.rows, kTileRows, 0);
  if (!dense_) collect(only);
}

void Job::collect(const ConstMatrixView& only) {
  begins_.reserve(static_cast<size_t>(n_lists()) + 1);
  begins_.push_back(0);
  for (const RowTile& t : tiles_) {
    for (int64_t g = 0; g < groups; ++g) {
      const size_t first = entries_.size();
      for (int64_t r = 0; r < t.n_rows; ++r) {
        const int32_t* ids = static_cast<const int32_t*>(p.block_ids.row(t.row + r)) + g * p.topk;
        const int32_t* wanted = only.empty() ? nullptr : static_cast<const int32_t*>(only.row(t.row + r)) + g * p.topk;
        const int64_t own = (t.position + r) / block_tokens;
        for (int64_t j = 0; j < p.topk && ids[j] != -1; ++j) {
          FIRN_CHECK(ids[j] >= 0 && ids[j] <= own && (j == 0 || ids[j] > ids[j - 1]),
                     fmt::format("block list of row {} group {}: entry {} is {}; expected ascending ids up to {}",
                                 t.row + r, g, j, ids[j], own));
          if (wanted == nullptr || wanted[j] != 0) entries_.push_back({ids[j], uint32_t{1} << r});
        }
      }
      const auto begin = entries_.begin() + static_cast<std::ptrdiff_t>(first);
      std::sort(begin, entries_.end(), [](const Entry& a, const Entry& b) { return a.block < b.block; });
      size_t out = first;
      for (size_t i = first; i < entries_.size(); ++i) {
        if (out > first && entries_[out - 1].block == entries_[i].block) {
          entries_[out - 1].rows |= entries_[i].rows;
        } else {
          entries_[out++] = entries_[i];
        }
      }
      entries_.resize(out);
      begins_.push_back(static_cast<int64_t>(out));
    }
  }
}

// One thread's scratch.
struct Workspace {
  static int64_t floats(const Job& job) {
    const int64_t queries = kTileRows * job.per_group;
    return job.keys_padded * (job.dim + job.dim_padded) + kAttendBatch * (job.keys_padded + job.dim_padded) +
           queries * (job.dim_padded + job.triple_floats);
  }
  Workspace(const Job& job, float* memory) {
    const int64_t queries = kTileRows * job.per_group;
    const auto take = [&](int64_t n) {
      float* at = memory;
      memory += n;
      return at;
    };
    keys = take(job.keys_padded * job.dim);
    values = take(job.keys_padded * job.dim_padded);
    weights = take(kAttendBatch * job.keys_padded);
    for (float*& row : o) row = take(job.dim_padded);
    q = take(queries * job.dim_padded);
    triples = take(queries * job.triple_floats);
  }
  float *keys, *values, *weights, *q, *triples;
  float* o[kAttendBatch];
  int64_t list = -1;  // whose queries are in q
};

// Brings the queries of a tile and group to f32.
void gather_queries(const Job& job, const AttentionKernels& kernels, int64_t list, Workspace* w) {
  if (w->list == list) return;
  w->list = list;
  const RowTile& t = job.tile(list / job.groups);
  const int64_t group = list % job.groups;
  const int64_t offset = group * job.per_group * job.dim * (job.bf16 ? 2 : 4);
  for (int64_t r = 0; r < t.n_rows; ++r) {
    kernels.widen(static_cast<const char*>(job.p.q.row(t.row + r)) + offset, job.bf16, job.per_group, job.dim,
                  job.dim_padded, w->q + r * job.per_group * job.dim_padded);
  }
}

// Computes the triples of one entry; sink(row of the tile, head of the group, m, l, o) takes each.
template <typename Sink>
void attend_entry(const Job& job, const AttentionKernels& kernels, int64_t list, const Entry& entry, Workspace* w,
                  Sink&& sink) {
  const RowTile& t = job.tile(list / job.groups);
  gather_queries(job, kernels, list, w);
  const char* block = static_cast<const char*>(kv_block_of(*t.span, list % job.groups, entry.block));
  const int64_t last = 31 - std::countl_zero(entry.rows);
  const int64_t n_keys = job.visible(t, last, entry.block);  // no row sees more; nothing beyond is read
  kernels.pack_keys(block, job.bf16, n_keys, job.dim, w->keys);
  const char* values = block + job.block_tokens * job.dim * (job.bf16 ? 2 : 4);
  AttendArgs args;
  if (!job.bf16 && job.dim == job.dim_padded) {
    args.values = reinterpret_cast<const float*>(values);
  } else {
    kernels.widen(values, job.bf16, n_keys, job.dim, job.dim_padded, w->values);
    args.values = w->values;
  }
  const float* q[kAttendBatch];
  float m[kAttendBatch], l[kAttendBatch];
  int64_t rows[kAttendBatch], of_head[kAttendBatch];
  args.q = q;
  args.keys = w->keys;
  args.dim = job.dim;
  args.dim_padded = job.dim_padded;
  args.scale = job.p.scale;
  args.weights = w->weights;
  args.weights_stride = job.keys_padded;
  args.m = m;
  args.l = l;
  args.o = w->o;
  const auto flush = [&] {
    if (args.n_queries == 0) return;
    kernels.attend(args);
    for (int64_t i = 0; i < args.n_queries; ++i) sink(rows[i], of_head[i], m[i], l[i], w->o[i]);
    args.n_queries = 0;
  };
  for (int64_t r = 0; r <= last; ++r) {
    if ((entry.rows >> r & 1u) == 0) continue;
    const int64_t visible = job.visible(t, r, entry.block);
    if (visible != args.n_keys) flush();
    args.n_keys = visible;
    for (int64_t h = 0; h < job.per_group; ++h) {
      rows[args.n_queries] = r;
      of_head[args.n_queries] = h;
      q[args.n_queries++] = w->q + (r * job.per_group + h) * job.dim_padded;
      if (args.n_queries == kAttendBatch) flush();
    }
  }
  flush();
}

void clear_triple(float* triple, int64_t dim_padded) {
  triple[0] = kMinusInfinity;
  triple[1] = 0;
  std::memset(triple + kTripleHead, 0, static_cast<size_t>(dim_padded) * sizeof(float));
}

void store_output(const AttentionKernels& kernels, const MatrixView& out, int64_t row, int64_t head, int64_t dim,
                  float l, const float* o) {
  char* to = static_cast<char*>(out.row(row)) + head * dim * static_cast<int64_t>(dtype_bytes(out.dtype));
  kernels.finish(l, o, dim, to, out.dtype == DType::kBf16);
}

// Enough tiles for every thread: a tile folds as it goes.
void attend_tile(const Job& job, const AttentionKernels& kernels, int64_t list, Workspace* w) {
  const RowTile& t = job.tile(list / job.groups);
  const int64_t queries = t.n_rows * job.per_group;
  for (int64_t i = 0; i < queries; ++i) clear_triple(w->triples + i * job.triple_floats, job.dim_padded);
  const int64_t n = job.n_entries(list);
  for (int64_t i = 0; i < n; ++i) {
    attend_entry(job, kernels, list, job.entry(list, i), w,
                 [&](int64_t r, int64_t h, float m, float l, const float* o) {
                   float* triple = w->triples + (r * job.per_group + h) * job.triple_floats;
                   kernels.merge(triple, triple + 1, triple + kTripleHead, m, l, o, job.dim_padded);
                 });
  }
  for (int64_t i = 0; i < queries; ++i) {
    const float* triple = w->triples + i * job.triple_floats;
    store_output(kernels, job.p.out, t.row + i / job.per_group, list % job.groups * job.per_group + i % job.per_group,
                 job.dim, triple[1], triple + kTripleHead);
  }
}

// One entry of a round and where its triples begin.
struct Spread {
  int64_t list = 0;
  Entry entry;
  int64_t first_triple = 0;
};

// Entries of the round, from entry `*index` of list `*list` on; advances both.
std::vector<Spread> next_round(const Job& job, int64_t* list, int64_t* index, int64_t max_triples) {
  std::vector<Spread> round;
  int64_t used = 0;
  for (; *list < job.n_lists(); ++*list, *index = 0) {
    const int64_t n = job.n_entries(*list);
    for (; *index < n; ++*index) {
      const Entry e = job.entry(*list, *index);
      const int64_t triples = std::popcount(e.rows) * job.per_group;
      if (!round.empty() && used + triples > max_triples) return round;
      round.push_back({*list, e, used});
      used += triples;
    }
  }
  return round;
}

int64_t round_triples(const Job& job) {
  return std::max(kRoundBytes / (job.triple_floats * 4), kTileRows * job.per_group);
}

}  // namespace

std::vector<RowTile> cut_rows(std::span<const KvSpan> spans, int64_t rows, int64_t tile_rows, int64_t align) {
  std::vector<RowTile> tiles;
  int64_t covered = 0;
  for (const KvSpan& s : spans) {
    FIRN_CHECK(s.n_rows >= 0 && s.row_begin == covered && s.pos_begin >= 0,
               "spans must cover the rows of a call once each, in order");
    covered += s.n_rows;
    for (int64_t r = 0; r < s.n_rows;) {
      int64_t n = std::min(tile_rows, s.n_rows - r);
      const int64_t position = s.pos_begin + r;
      if (align > 0) n = std::min(n, align - position % align);
      tiles.push_back({&s, s.row_begin + r, n, position});
      r += n;
    }
  }
  FIRN_CHECK(covered == rows, fmt::format("spans cover {} rows of {}", covered, rows));
  return tiles;
}

void check_layout(const KvLayout& layout, const char* operation) {
  FIRN_CHECK((layout.dtype == DType::kBf16 || layout.dtype == DType::kF32) && layout.block_tokens > 0 &&
                 layout.groups >= 0 && layout.head_dim >= 0 && layout.index_dim >= 0,
             fmt::format("{}: cache layout not usable", operation));
}

int64_t attention_scratch_bytes(const Ops::Limits& limits, int n_threads) {
  constexpr int64_t kBlockTokens = 128;
  const int64_t dim = round_up(std::max<int64_t>(limits.head_dim, 1), kLanesMax);
  const int64_t heads = std::max<int64_t>(limits.heads, 1), triple = dim + kTripleHead;
  // All heads may be one group.
  const int64_t thread_floats =
      2 * kBlockTokens * dim + kAttendBatch * (kBlockTokens + dim) + kTileRows * heads * (dim + triple);
  // The spread path serves fewer than two tiles a thread.
  const int64_t rows = std::min(limits.rows, 2 * kTileRows * n_threads);
  return n_threads * thread_floats * 4 + rows * heads * triple * 4 +
         std::max(kRoundBytes, kTileRows * heads * triple * 4) + 2 * 4096;
}

Ticket CpuOps::kv_append(const KvAppendParams& p) {
  if (failed()) return done();
  const KvLayout& layout = p.layout;
  check_layout(layout, "kv_append");
  const int64_t dim = layout.head_dim;
  FIRN_CHECK(p.k.cols == layout.groups * dim && p.v.cols == p.k.cols && p.v.rows == p.k.rows &&
                 p.k.dtype == layout.dtype && p.v.dtype == DType::kF32,
             "kv_append: shapes or types differ");
  const bool bf16 = layout.dtype == DType::kBf16;
  const int64_t row_bytes = dim * (bf16 ? 2 : 4);
  const std::vector<RowTile> tiles = cut_rows(p.spans, p.k.rows, 32, layout.block_tokens);
  team_->parallel_for(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const RowTile& t = tiles[static_cast<size_t>(i)];
      const int64_t slot = t.position % layout.block_tokens;
      for (int64_t g = 0; g < layout.groups; ++g) {
        char* block = static_cast<char*>(kv_block_of(*t.span, g, t.position / layout.block_tokens));
        for (int64_t r = 0; r < t.n_rows; ++r) {
          char* key = block + (slot + r) * row_bytes;
          char* value = key + layout.block_tokens * row_bytes;
          std::memcpy(key, static_cast<const char*>(p.k.row(t.row + r)) + g * row_bytes,
                      static_cast<size_t>(row_bytes));
          const float* v = static_cast<const float*>(p.v.row(t.row + r)) + g * dim;
          if (bf16) {
            for (int64_t d = 0; d < dim; ++d) reinterpret_cast<Bf16*>(value)[d] = to_bf16(v[d]);
          } else {
            std::memcpy(value, v, static_cast<size_t>(row_bytes));
          }
        }
      }
    }
  });
  return done();
}

Ticket CpuOps::attention(const AttentionParams& p) {
  if (failed() || p.q.rows == 0) return done();
  const Job job(p, {}, "attention");
  FIRN_CHECK(
      p.out.rows == p.q.rows && p.out.cols == p.q.cols && (p.out.dtype == DType::kBf16 || p.out.dtype == DType::kF32),
      "attention: output shape or type differs");
  const AttentionKernels& kernels = kernels_of(isa_);
  const int n_threads = team_->size();
  auto* memory = reinterpret_cast<float*>(scratch(kPacked, n_threads * Workspace::floats(job) * 4));
  if (memory == nullptr) return done();
  std::vector<Workspace> workspaces;
  for (int i = 0; i < n_threads; ++i) workspaces.emplace_back(job, memory + i * Workspace::floats(job));

  if (n_threads == 1 || job.n_lists() >= 2 * n_threads) {
    team_->parallel_for(job.n_lists(), 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; ++i) {
        attend_tile(job, kernels, i, &workspaces[static_cast<size_t>(thread)]);
      }
    });
    return done();
  }

  const int64_t n_queries = p.q.rows * job.heads, max_triples = round_triples(job);
  auto* running = reinterpret_cast<float*>(scratch(kPartials, (n_queries + max_triples) * job.triple_floats * 4));
  if (running == nullptr) return done();
  float* triples = running + n_queries * job.triple_floats;
  for (int64_t i = 0; i < n_queries; ++i) clear_triple(running + i * job.triple_floats, job.dim_padded);
  int64_t next_list = 0, next_entry = 0;
  std::vector<size_t> first(static_cast<size_t>(job.n_lists()) + 1);
  for (;;) {
    const std::vector<Spread> round = next_round(job, &next_list, &next_entry, max_triples);
    if (round.empty()) break;
    team_->parallel_for(static_cast<int64_t>(round.size()), 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; ++i) {
        const Spread& s = round[static_cast<size_t>(i)];
        attend_entry(job, kernels, s.list, s.entry, &workspaces[static_cast<size_t>(thread)],
                     [&](int64_t r, int64_t h, float m, float l, const float* o) {
                       const int64_t before = std::popcount(s.entry.rows & ((uint32_t{1} << r) - 1u));
                       float* to = triples + (s.first_triple + before * job.per_group + h) * job.triple_floats;
                       to[0] = m;
                       to[1] = l;
                       std::memcpy(to + kTripleHead, o, static_cast<size_t>(job.dim_padded) * sizeof(float));
                     });
      }
    });
    size_t at = 0;
    for (int64_t list = 0; list <= job.n_lists(); ++list) {
      while (at < round.size() && round[at].list < list) ++at;
      first[static_cast<size_t>(list)] = at;
    }
    team_->parallel_for(n_queries, 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / job.heads, head = i % job.heads;
        int64_t tile = 0;
        while (row >= job.tile(tile).row + job.tile(tile).n_rows) ++tile;
        const int64_t r = row - job.tile(tile).row;
        const size_t list = static_cast<size_t>(tile * job.groups + head / job.per_group);
        float* to = running + i * job.triple_floats;
        for (size_t e = first[list]; e < first[list + 1]; ++e) {
          const Spread& s = round[e];
          if ((s.entry.rows >> r & 1u) == 0) continue;
          const int64_t before = std::popcount(s.entry.rows & ((uint32_t{1} << r) - 1u));
          const int64_t at_triple = s.first_triple + before * job.per_group + head % job.per_group;
          const float* from = triples + at_triple * job.triple_floats;
          kernels.merge(to, to + 1, to + kTripleHead, from[0], from[1], from + kTripleHead, job.dim_padded);
        }
      }
    });
  }
  for (int64_t i = 0; i < n_queries; ++i) {
    const float* from = running + i * job.triple_floats;
    store_output(kernels, p.out, i / job.heads, i % job.heads, job.dim, from[1], from + kTripleHead);
  }
  return done();
}

Ticket CpuOps::attention_partial(const AttentionPartialParams& p) {
  if (failed() || p.base.q.rows == 0) return done();
  FIRN_CHECK(!p.base.block_ids.empty(), "attention_partial needs block lists");
  FIRN_CHECK(p.only.empty() || (p.only.rows == p.base.block_ids.rows && p.only.cols == p.base.block_ids.cols &&
                                p.only.dtype == DType::kI32),
             "attention_partial: the choice of entries differs in shape from the block lists");
  const Job job(p.base, p.only, "attention_partial");
  FIRN_CHECK(p.partials.rows == p.base.q.rows * job.heads && p.partials.cols == p.base.topk * (job.dim + 2) &&
                 p.partials.dtype == DType::kF32,
             "attention_partial: output shape differs");
  const AttentionKernels& kernels = kernels_of(isa_);
  const int n_threads = team_->size();
  auto* memory = reinterpret_cast<float*>(scratch(kPacked, n_threads * Workspace::floats(job) * 4));
  if (memory == nullptr) return done();
  std::vector<Workspace> workspaces;
  for (int i = 0; i < n_threads; ++i) workspaces.emplace_back(job, memory + i * Workspace::floats(job));
  int64_t list = 0, index = 0;
  const std::vector<Spread> all = next_round(job, &list, &index, std::numeric_limits<int64_t>::max());
  team_->parallel_for(static_cast<int64_t>(all.size()), 4, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) {
      const Spread& s = all[static_cast<size_t>(i)];
      const RowTile& t = job.tile(s.list / job.groups);
      const int64_t group = s.list % job.groups;
      attend_entry(job, kernels, s.list, s.entry, &workspaces[static_cast<size_t>(thread)],
                   [&](int64_t r, int64_t h, float m, float l, const float* o) {
                     const int64_t row = t.row + r, head = group * job.per_group + h;
                     float* to = static_cast<float*>(p.partials.row(row * job.heads + head)) +
                                 job.place(row, group, s.entry.block) * (job.dim + 2);
                     to[0] = m;
                     to[1] = l;
                     std::memcpy(to + 2, o, static_cast<size_t>(job.dim) * sizeof(float));
                   });
    }
  });
  return done();
}

Ticket CpuOps::attention_merge(const AttentionMergeParams& p) {
  if (failed() || p.out.rows == 0) return done();
  const int64_t heads = p.groups * p.heads_per_group, dim = p.head_dim, dim_padded = round_up(dim, kLanesMax);
  FIRN_CHECK(p.partials.rows == p.out.rows * heads && p.partials.cols == p.topk * (dim + 2) &&
                 p.partials.dtype == DType::kF32 && p.out.cols == heads * dim && p.block_ids.rows == p.out.rows &&
                 p.block_ids.cols == p.groups * p.topk,
             "attention_merge: shapes differ");
  const AttentionKernels& kernels = kernels_of(isa_);
  const int64_t triple_floats = dim_padded + kTripleHead;
  auto* memory = reinterpret_cast<float*>(scratch(kPartials, team_->size() * triple_floats * 4));
  if (memory == nullptr) return done();
  team_->parallel_for(p.out.rows * heads, 8, [&](int64_t begin, int64_t end, int thread) {
    float* running = memory + thread * triple_floats;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / heads, head = i % heads, group = head / p.heads_per_group;
      const int32_t* ids = static_cast<const int32_t*>(p.block_ids.row(row)) + group * p.topk;
      clear_triple(running, dim_padded);
      for (int64_t j = 0; j < p.topk && ids[j] >= 0; ++j) {
        const float* from = static_cast<const float*>(p.partials.row(i)) + j * (dim + 2);
        kernels.merge(running, running + 1, running + kTripleHead, from[0], from[1], from + 2, dim);
      }
      store_output(kernels, p.out, row, head, dim, running[1], running + kTripleHead);
    }
  });
  return done();
}

}  // namespace firn::cpu
