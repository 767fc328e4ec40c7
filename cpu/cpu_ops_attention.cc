// CpuOps: KV append, attention, per-block partials and their merge.
//
// Work is cut into tiles of consecutive rows times one group (cpu/attention_job.h); a tile walks the union of its rows'
// block lists in ascending id, brings each block near once and lets every row that chose it attend. A [queries x keys]
// matrix never exists: a thread's scratch is a block in the kernels' form, the weights of a few queries and the tile's
// running triples.
//
// When there are too few tiles for the team (decode), blocks are spread over the threads instead: triples of a bounded
// round of blocks go to scratch, then every unit of queries folds its own in block order. Both ways run the same chains
// of operations, so which one runs never shows in the bits.
//
// Kernels, by CPU features, types and shapes alone: matrix tiles (cpu/attention_tiles.h) for bf16 keys on a CPU with
// AMX where dims are a multiple of 32 and blocks of 16 keys; else f32 products of the level (cpu/attention_kernels.h).
// A unit of queries, which triples belong to, is one head for the latter and 16 columns for the former: heads of one
// row, or of several when a group has at most eight.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "cpu/attention_job.h"
#include "cpu/attention_kernels.h"
#include "cpu/attention_tiles.h"
#include "cpu/cpu_ops.h"
#include "fmt/format.h"

namespace firn::cpu {
namespace {

// Triples of one round of the spread path.
constexpr int64_t kRoundBytes = int64_t{24} << 20;
// m, l and padding in front of a head's o in scratch.
constexpr int64_t kTripleHead = 16;
// Items of a call of the tile kernels: its pipeline fills and empties once a call.
constexpr size_t kItemsAtOnce = 1024;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

const AttentionKernels& kernels_of(Isa isa) {
  return isa >= Isa::kAvx512 ? kAttentionAvx512 : isa >= Isa::kAvx2 ? kAttentionAvx2 : kAttentionScalar;
}

// How the queries of one row tile and group form units.
struct Units {
  explicit Units(const Job& job)
      : rows_each(job.matrix_tiles ? std::max<int64_t>(1, kTileQueries / job.per_group) : 1),
        per_row(!job.matrix_tiles ? job.per_group : (job.per_group + kTileQueries - 1) / kTileQueries),
        floats(job.matrix_tiles ? tile_triple_floats(job.dim) : job.dim_padded + kTripleHead) {}
  int64_t of_rows(int64_t n_rows) const {
    return rows_each > 1 ? (n_rows + rows_each - 1) / rows_each : n_rows * per_row;
  }
  // The first unit of a row, and for matrix tiles the row's first column in it.
  int64_t first(int64_t row) const { return rows_each > 1 ? row / rows_each : row * per_row; }

  const int64_t rows_each;  // > 1: rows that share a unit, and then per_row is 1
  const int64_t per_row;
  const int64_t floats;  // of one triple
};

// One unit of a tile meeting one block: some of its columns (matrix tiles) or its head.
struct Meeting {
  int64_t unit = 0;
  uint32_t mask = 0;   // columns; 1 for a head
  int64_t n_keys = 0;  // visible, the same for all of them
};

// One thread's scratch and its walk over entries.
class Walker {
 public:
  static int64_t floats(const Job& job) {
    const Units units(job);
    const int64_t n_units = units.of_rows(job.tile_rows);
    if (job.matrix_tiles) {
      return n_units * (units.floats + tile_query_bytes(job.dim) / 4) +
             tile_scratch_bytes(job.dim, job.block_tokens) / 4;
    }
    return job.keys_padded * (job.dim + job.dim_padded) + kAttendBatch * (job.keys_padded + job.dim_padded) +
           n_units * (job.dim_padded + units.floats);
  }

  Walker(const Job& j, const AttentionKernels& k, float* memory) : job(j), units(j), kernels(k) {
    const auto take = [&](int64_t n) {
      float* at = memory;
      memory += n;
      return at;
    };
    capacity = units.of_rows(job.tile_rows);
    triples = take(capacity * units.floats);
    if (job.matrix_tiles) {
      q_ = take(capacity * tile_query_bytes(job.dim) / 4);
      scratch_ = take(tile_scratch_bytes(job.dim, job.block_tokens) / 4);
      return;
    }
    q_ = take(capacity * job.dim_padded);
    keys_ = take(job.keys_padded * job.dim);
    values_ = take(job.keys_padded * job.dim_padded);
    weights_ = take(kAttendBatch * job.keys_padded);
    for (float*& row : o_) row = take(job.dim_padded);
  }

  void clear(float* triple) const {
    const int64_t head = job.matrix_tiles ? kTileQueries : 1;
    std::fill(triple, triple + head, kMinusInfinity);
    std::memset(triple + head, 0, static_cast<size_t>(units.floats - head) * sizeof(float));
  }

  void merge(float* into, const float* from, uint32_t mask) const {
    if (job.matrix_tiles) {
      kAttentionTiles.merge(into, from, mask, job.dim);
    } else {
      kernels.merge(into, into + 1, into + kTripleHead, from[0], from[1], from + kTripleHead, job.dim_padded);
    }
  }

  // visit(row of the tile, head of the group, m, l, o in natural order) for the columns of `mask` of a unit of `list`.
  template <typename Visit>
  void columns(int64_t list, int64_t unit, uint32_t mask, const float* triple, Visit&& visit) const {
    if (!job.matrix_tiles) {
      visit(unit / units.per_row, unit % units.per_row, triple[0], triple[1], triple + kTripleHead);
      return;
    }
    std::vector<float> o(static_cast<size_t>(job.dim));
    const int64_t n_rows = job.tile_of(list).n_rows;
    for (int64_t c = 0; c < kTileQueries; ++c) {
      int64_t row = unit * units.rows_each + c / job.per_group, head = c % job.per_group;
      if (units.rows_each == 1) {
        row = unit / units.per_row;
        head = unit % units.per_row * kTileQueries + c;
      }
      if (row >= n_rows || head >= job.per_group || (mask >> c & 1u) == 0 ||
          (units.rows_each > 1 && c / job.per_group >= units.rows_each)) {
        continue;
      }
      kAttentionTiles.order_dims(triple + 32 + c * job.dim, job.dim, o.data());
      visit(row, head, triple[c], triple[kTileQueries + c], o.data());
    }
  }

  void store(int64_t list, int64_t unit, const float* triple) const {
    const MatrixView& out = job.p.out;
    const RowTile& t = job.tile_of(list);
    columns(list, unit, ~uint32_t{0}, triple, [&](int64_t row, int64_t head, float, float l, const float* o) {
      char* to = static_cast<char*>(out.row(t.row + row)) +
                 (list % job.groups * job.per_group + head) * job.dim * static_cast<int64_t>(dtype_bytes(out.dtype));
      kernels.finish(l, o, job.dim, to, out.dtype == DType::kBf16);
    });
  }

  // Which units meet the entry's block, in the order of their rows.
  void meetings(int64_t list, const Entry& e, std::vector<Meeting>* out) const {
    const RowTile& t = job.tile_of(list);
    out->clear();
    for (int64_t i = 0; i < e.n_rows; ++i) {
      const int64_t r = e.rows[i], n_keys = job.visible(t, r, e.block), first = units.first(r);
      if (units.rows_each > 1) {
        const uint32_t mask = ((uint32_t{1} << job.per_group) - 1u) << (r % units.rows_each * job.per_group);
        if (!out->empty() && out->back().unit == first && out->back().n_keys == n_keys) {
          out->back().mask |= mask;
        } else {
          out->push_back({first, mask, n_keys});
        }
        continue;
      }
      for (int64_t u = 0; u < units.per_row; ++u) {
        const int64_t left = job.per_group - u * kTileQueries;
        const uint32_t mask = !job.matrix_tiles ? 1u : left >= kTileQueries ? 0xFFFFu : (uint32_t{1} << left) - 1u;
        out->push_back({first + u, mask, n_keys});
      }
    }
  }

  // Brings the queries of a list into units [first_unit, ...) of this thread's scratch.
  void gather(int64_t list, int64_t first_unit) {
    const RowTile& t = job.tile_of(list);
    const int64_t element = job.bf16 ? 2 : 4, offset = list % job.groups * job.per_group * job.dim * element;
    for (int64_t r = 0; r < t.n_rows; ++r) {
      const char* from = static_cast<const char*>(job.p.q.row(t.row + r)) + offset;
      const int64_t unit = first_unit + units.first(r);
      if (!job.matrix_tiles) {
        kernels.widen(from, job.bf16, job.per_group, job.dim, job.dim_padded, q_ + unit * job.dim_padded);
        continue;
      }
      for (int64_t u = 0; u < units.per_row; ++u) {
        const int64_t column = units.rows_each > 1 ? r % units.rows_each * job.per_group : 0;
        const int64_t n = std::min(kTileQueries, job.per_group - u * kTileQueries);
        kAttentionTiles.pack_queries(from + u * kTileQueries * job.dim * element, job.dim, column, n, job.dim,
                                     query(unit + u));
      }
    }
  }

  // Attention of a list's entry; meeting i of meetings() goes to triple `to(i, unit)`: folded in, or written there.
  // Work of the tile kernels gathers until flush(), or until there is enough of it; then q and triples must still be
  // there.
  template <typename To>
  void attend(int64_t list, int64_t first_unit, const Entry& e, bool fold, To&& to) {
    meetings(list, e, &met_);
    const RowTile& t = job.tile_of(list);
    const char* keys = static_cast<const char*>(kv_block_of(*t.span, list % job.groups, e.block));
    const char* values = keys + job.block_tokens * job.dim * (job.bf16 ? 2 : 4);
    if (job.matrix_tiles) {
      if (items_.size() + met_.size() > kItemsAtOnce) flush(fold);
      for (size_t i = 0; i < met_.size(); ++i) {
        const Meeting& m = met_[i];
        items_.push_back(
            {keys, values, query(first_unit + m.unit), to(i, m.unit), m.mask, static_cast<int32_t>(m.n_keys)});
      }
      return;
    }
    attend_heads(first_unit, keys, values, fold, std::forward<To>(to));
  }

  void flush(bool fold) {
    if (items_.empty()) return;
    TileAttendArgs args;
    args.items = items_.data();
    args.n_items = static_cast<int64_t>(items_.size());
    args.dim = job.dim;
    args.block_tokens = job.block_tokens;
    args.scale = job.p.scale;
    args.fold = fold;
    args.scratch = scratch_;
    kAttentionTiles.attend(args);
    items_.clear();
  }

  const Job& job;
  const Units units;
  const AttentionKernels& kernels;
  int64_t capacity = 0;      // units whose queries and triples fit
  float* triples = nullptr;  // [capacity][units.floats]

 private:
  char* query(int64_t unit) const { return reinterpret_cast<char*>(q_) + unit * tile_query_bytes(job.dim); }

  template <typename To>
  void attend_heads(int64_t first_unit, const char* keys, const char* values, bool fold, To&& to) {
    const int64_t n_keys = met_.back().n_keys;  // the last row sees most; nothing beyond is read
    kernels.pack_keys(keys, job.bf16, n_keys, job.dim, keys_);
    AttendArgs args;
    args.values = reinterpret_cast<const float*>(values);
    if (job.bf16 || job.dim != job.dim_padded) {
      kernels.widen(values, job.bf16, n_keys, job.dim, job.dim_padded, values_);
      args.values = values_;
    }
    const float* q[kAttendBatch];
    float m[kAttendBatch], l[kAttendBatch];
    args.q = q;
    args.keys = keys_;
    args.dim = job.dim;
    args.dim_padded = job.dim_padded;
    args.scale = job.p.scale;
    args.weights = weights_;
    args.weights_stride = job.keys_padded;
    args.m = m;
    args.l = l;
    args.o = o_;
    for (size_t first = 0; first < met_.size();) {
      args.n_keys = met_[first].n_keys;
      for (args.n_queries = 0; args.n_queries < kAttendBatch; ++args.n_queries) {
        const size_t i = first + static_cast<size_t>(args.n_queries);
        if (i == met_.size() || met_[i].n_keys != args.n_keys) break;
        q[args.n_queries] = q_ + (first_unit + met_[i].unit) * job.dim_padded;
      }
      kernels.attend(args);
      for (int64_t j = 0; j < args.n_queries; ++j) {
        const size_t i = first + static_cast<size_t>(j);
        float* triple = to(i, met_[i].unit);
        if (fold) {
          kernels.merge(triple, triple + 1, triple + kTripleHead, m[j], l[j], o_[j], job.dim_padded);
        } else {
          triple[0] = m[j];
          triple[1] = l[j];
          std::memcpy(triple + kTripleHead, o_[j], static_cast<size_t>(job.dim_padded) * sizeof(float));
        }
      }
      first += static_cast<size_t>(args.n_queries);
    }
  }

  float *q_ = nullptr, *keys_ = nullptr, *values_ = nullptr, *weights_ = nullptr, *scratch_ = nullptr;
  float* o_[kAttendBatch] = {};
  std::vector<Meeting> met_;
  std::vector<TileItem> items_;
};

// Walks whole lists [begin, end), folding as it goes; as many at once as fit, so that one list's blocks are brought
// near during the one before.
void attend_lists(Walker* w, int64_t begin, int64_t end) {
  const Job& job = w->job;
  for (int64_t list = begin; list < end;) {
    const int64_t first_list = list;
    int64_t unit = 0;
    for (; list < end && unit + w->units.of_rows(job.tile_of(list).n_rows) <= w->capacity; ++list) {
      const int64_t n_units = w->units.of_rows(job.tile_of(list).n_rows), n = job.n_entries(list);
      w->gather(list, unit);
      for (int64_t i = 0; i < n_units; ++i) w->clear(w->triples + (unit + i) * w->units.floats);
      for (int64_t i = 0; i < n; ++i) {
        w->attend(list, unit, job.entry(list, i), true,
                  [&](size_t, int64_t u) { return w->triples + (unit + u) * w->units.floats; });
      }
      unit += n_units;
    }
    w->flush(true);
    unit = 0;
    for (int64_t i = first_list; i < list; ++i) {
      const int64_t n_units = w->units.of_rows(job.tile_of(i).n_rows);
      for (int64_t u = 0; u < n_units; ++u) w->store(i, u, w->triples + (unit + u) * w->units.floats);
      unit += n_units;
    }
  }
}

// One entry of a round and where its triples begin, one a meeting.
struct Spread {
  int64_t list = 0;
  Entry entry;
  int64_t first_triple = 0;
};

// Entries of the round, from entry `*index` of list `*list` on; advances both. Every row of an entry may be a meeting.
std::vector<Spread> next_round(const Job& job, const Units& units, int64_t* list, int64_t* index, int64_t max_triples) {
  std::vector<Spread> round;
  int64_t used = 0;
  for (; *list < job.n_lists(); ++*list, *index = 0) {
    const int64_t n = job.n_entries(*list);
    for (; *index < n; ++*index) {
      const Entry e = job.entry(*list, *index);
      const int64_t triples = e.n_rows * units.per_row;
      if (!round.empty() && used + triples > max_triples) return round;
      round.push_back({*list, e, used});
      used += triples;
    }
  }
  return round;
}

int64_t round_triples(const Job& job, const Units& units) {
  return std::max(kRoundBytes / (units.floats * 4), job.tile_rows * units.per_row);
}

// Entries that a thread takes at once: enough for the next block to be brought near during one, few enough for all
// threads to have work to the end.
int64_t spread_grain(size_t entries, int n_threads) {
  return std::clamp<int64_t>(static_cast<int64_t>(entries) / (4 * n_threads), 1, 16);
}

// Entries [begin, end) of a round, triple by triple into `triples`.
void attend_spread(Walker* w, const std::vector<Spread>& round, int64_t begin, int64_t end, float* triples) {
  int64_t gathered = -1;
  for (int64_t i = begin; i < end; ++i) {
    const Spread& s = round[static_cast<size_t>(i)];
    if (s.list != gathered) {
      w->flush(false);
      w->gather(s.list, 0);
      gathered = s.list;
    }
    w->attend(s.list, 0, s.entry, false, [&](size_t j, int64_t) {
      return triples + (s.first_triple + static_cast<int64_t>(j)) * w->units.floats;
    });
  }
  w->flush(false);
}

}  // namespace

int64_t attention_scratch_bytes(const Ops::Limits& limits, int n_threads) {
  constexpr int64_t kBlockTokens = 128;
  const int64_t dim = round_up(std::max<int64_t>(limits.head_dim, 1), 32);
  const int64_t heads = std::max<int64_t>(limits.heads, 1), triple = dim + kTripleHead;
  // All heads may be one group, or each its own.
  const int64_t f32_floats =
      2 * kBlockTokens * dim + kAttendBatch * (kBlockTokens + dim) + kTileRowsLeast * heads * (dim + triple);
  // Tiles grow only while there are two for every thread, so the larger they are, the more groups share the heads.
  int64_t tile_units = 0;
  for (int64_t rows = kTileRowsLeast; rows <= kTileRowsMost; rows *= 2) {
    const int64_t tiles = limits.rows / rows;
    if (rows > kTileRowsLeast && tiles == 0) break;
    const int64_t groups = rows > kTileRowsLeast ? (2 * n_threads + tiles - 1) / tiles : 1;
    const int64_t per_group = (heads + groups - 1) / groups;
    tile_units = std::max(tile_units, rows * ((per_group + kTileQueries - 1) / kTileQueries));
  }
  const int64_t tile_floats =
      tile_units * (tile_triple_floats(dim) + tile_query_bytes(dim) / 4) + tile_scratch_bytes(dim, kBlockTokens) / 4;
  // The spread path serves fewer than two tiles a thread.
  const int64_t rows = std::min(limits.rows, 2 * kTileRowsMost * n_threads);
  const int64_t row_floats = std::max(heads * triple, 2 * tile_triple_floats(dim) * ((heads + 15) / 16 + 1));
  return n_threads * std::max(f32_floats, tile_floats) * 4 + rows * row_floats * 4 +
         std::max(kRoundBytes, kTileRowsMost * row_floats * 4) + 2 * 4096;
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
  const int n_threads = team_->size();
  const Job job(p, {}, isa_, n_threads, "attention");
  FIRN_CHECK(
      p.out.rows == p.q.rows && p.out.cols == p.q.cols && (p.out.dtype == DType::kBf16 || p.out.dtype == DType::kF32),
      "attention: output shape or type differs");
  auto* memory = reinterpret_cast<float*>(scratch(kPacked, n_threads * Walker::floats(job) * 4));
  if (memory == nullptr) return done();
  std::vector<Walker> walkers;
  for (int i = 0; i < n_threads; ++i) walkers.emplace_back(job, kernels_of(isa_), memory + i * Walker::floats(job));
  const Walker& any = walkers[0];

  if (n_threads == 1 || job.n_lists() >= 2 * n_threads) {
    const int64_t fit = any.capacity / std::max<int64_t>(1, any.units.of_rows(job.tile(0).n_rows));
    const int64_t grain = std::clamp<int64_t>(job.n_lists() / n_threads, 1, std::max<int64_t>(1, fit));
    team_->parallel_for(job.n_lists(), grain, [&](int64_t begin, int64_t end, int thread) {
      attend_lists(&walkers[static_cast<size_t>(thread)], begin, end);
    });
    return done();
  }

  // Units of all lists, one after another.
  std::vector<int64_t> first_unit = {0};
  for (int64_t i = 0; i < job.n_lists(); ++i) {
    first_unit.push_back(first_unit.back() + any.units.of_rows(job.tile_of(i).n_rows));
  }
  const int64_t n_units = first_unit.back(), floats = any.units.floats, max_triples = round_triples(job, any.units);
  auto* running = reinterpret_cast<float*>(scratch(kPartials, (n_units + max_triples) * floats * 4));
  if (running == nullptr) return done();
  float* triples = running + n_units * floats;
  for (int64_t i = 0; i < n_units; ++i) any.clear(running + i * floats);
  int64_t next_list = 0, next_entry = 0;
  std::vector<size_t> first(static_cast<size_t>(job.n_lists()) + 1);
  for (;;) {
    const std::vector<Spread> round = next_round(job, any.units, &next_list, &next_entry, max_triples);
    if (round.empty()) break;
    team_->parallel_for(static_cast<int64_t>(round.size()), spread_grain(round.size(), n_threads),
                        [&](int64_t begin, int64_t end, int thread) {
                          attend_spread(&walkers[static_cast<size_t>(thread)], round, begin, end, triples);
                        });
    size_t at = 0;
    for (int64_t list = 0; list <= job.n_lists(); ++list) {
      while (at < round.size() && round[at].list < list) ++at;
      first[static_cast<size_t>(list)] = at;
    }
    team_->parallel_for(n_units, job.matrix_tiles ? 1 : 4, [&](int64_t begin, int64_t end, int thread) {
      const Walker& w = walkers[static_cast<size_t>(thread)];
      std::vector<Meeting> met;
      for (int64_t i = begin; i < end; ++i) {
        const auto after = std::upper_bound(first_unit.begin(), first_unit.end(), i);
        const int64_t list = after - first_unit.begin() - 1, unit = i - first_unit[static_cast<size_t>(list)];
        for (size_t e = first[static_cast<size_t>(list)]; e < first[static_cast<size_t>(list) + 1]; ++e) {
          const Spread& s = round[e];
          w.meetings(list, s.entry, &met);
          for (size_t j = 0; j < met.size(); ++j) {
            if (met[j].unit != unit) continue;
            w.merge(running + i * floats, triples + (s.first_triple + static_cast<int64_t>(j)) * floats, met[j].mask);
          }
        }
      }
    });
  }
  for (int64_t list = 0; list < job.n_lists(); ++list) {
    for (int64_t i = first_unit[static_cast<size_t>(list)]; i < first_unit[static_cast<size_t>(list) + 1]; ++i) {
      any.store(list, i - first_unit[static_cast<size_t>(list)], running + i * floats);
    }
  }
  return done();
}

Ticket CpuOps::attention_partial(const AttentionPartialParams& p) {
  if (failed() || p.base.q.rows == 0) return done();
  FIRN_CHECK(!p.base.block_ids.empty(), "attention_partial needs block lists");
  FIRN_CHECK(p.only.empty() || (p.only.rows == p.base.block_ids.rows && p.only.cols == p.base.block_ids.cols &&
                                p.only.dtype == DType::kI32),
             "attention_partial: the choice of entries differs in shape from the block lists");
  const int n_threads = team_->size();
  const Job job(p.base, p.only, isa_, n_threads, "attention_partial");
  FIRN_CHECK(p.partials.rows == p.base.q.rows * job.heads && p.partials.cols == p.base.topk * (job.dim + 2) &&
                 p.partials.dtype == DType::kF32,
             "attention_partial: output shape differs");
  auto* memory = reinterpret_cast<float*>(scratch(kPacked, n_threads * Walker::floats(job) * 4));
  if (memory == nullptr) return done();
  std::vector<Walker> walkers;
  for (int i = 0; i < n_threads; ++i) walkers.emplace_back(job, kernels_of(isa_), memory + i * Walker::floats(job));
  int64_t list = 0, index = 0;
  const std::vector<Spread> all = next_round(job, walkers[0].units, &list, &index, std::numeric_limits<int64_t>::max());
  team_->parallel_for(static_cast<int64_t>(all.size()), 4, [&](int64_t begin, int64_t end, int thread) {
    Walker& w = walkers[static_cast<size_t>(thread)];
    std::vector<Meeting> met;
    int64_t gathered = -1;
    for (int64_t i = begin; i < end; ++i) {
      const Spread& s = all[static_cast<size_t>(i)];
      const RowTile& t = job.tile_of(s.list);
      const int64_t group = s.list % job.groups;
      if (s.list != gathered) w.gather(s.list, 0);
      gathered = s.list;
      // A unit's columns that see different numbers of keys are meetings of their own, and touch only their columns.
      w.attend(s.list, 0, s.entry, false, [&](size_t, int64_t u) { return w.triples + u * w.units.floats; });
      w.flush(false);
      w.meetings(s.list, s.entry, &met);
      for (const Meeting& m : met) {
        w.columns(s.list, m.unit, m.mask, w.triples + m.unit * w.units.floats,
                  [&](int64_t r, int64_t h, float largest, float l, const float* o) {
                    const int64_t row = t.row + r, head = group * job.per_group + h;
                    float* to = static_cast<float*>(p.partials.row(row * job.heads + head)) +
                                job.place(row, group, s.entry.block) * (job.dim + 2);
                    to[0] = largest;
                    to[1] = l;
                    std::memcpy(to + 2, o, static_cast<size_t>(job.dim) * sizeof(float));
                  });
      }
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
      running[0] = kMinusInfinity;
      std::memset(running + 1, 0, static_cast<size_t>(triple_floats - 1) * sizeof(float));
      for (int64_t j = 0; j < p.topk && ids[j] >= 0; ++j) {
        const float* from = static_cast<const float*>(p.partials.row(i)) + j * (dim + 2);
        kernels.merge(running, running + 1, running + kTripleHead, from[0], from[1], from + 2, dim);
      }
      char* to = static_cast<char*>(p.out.row(row)) + head * dim * static_cast<int64_t>(dtype_bytes(p.out.dtype));
      kernels.finish(running[1], running + kTripleHead, dim, to, p.out.dtype == DType::kBf16);
    }
  });
  return done();
}

}  // namespace firn::cpu
