// CpuOps: the index branch: keys with their norm bound, exact choice of blocks, canonical scores.
//
// index_select goes in rounds of row tiles whose fast scores fit kScoreBytes. First all full blocks before the rows'
// own are scored, every key read once a tile for all its rows and heads, block ranges spread over the threads. Then
// every (row, head) decides: with [fast - e, fast + e] holding the canonical maximum (cpu/index_kernels.h), a block
// whose lower end beats the (places + 1)-th largest upper end is in, one whose upper end is below the places-th largest
// lower end is out, and only the others are scored canonically, if there are more of them than places left. So the
// choice is that of the canonical scores on every level and for every number of threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/attention_rows.h"
#include "cpu/cpu_ops.h"
#include "cpu/index_kernels.h"
#include "cpu/index_two_stage.h"
#include "fmt/format.h"

namespace firn::cpu {
namespace {

constexpr int64_t kTileRows = 64;
// Blocks scored by one piece of work: 256 KiB of bf16 keys at dim 128.
constexpr int64_t kPieceBlocks = 8;
// Fast scores of one round.
constexpr int64_t kScoreBytes = int64_t{48} << 20;
// Fewer blocks are scanned: with little to choose from, too many keys lie within the copy's bound.
constexpr int64_t kTwoStageBlocks = 256;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

float element(const void* row, DType dtype, int64_t i) {
  return dtype == DType::kF32 ? static_cast<const float*>(row)[i] : to_float(static_cast<const Bf16*>(row)[i]);
}

float norm_bound(const KvSpan& span, const KvLayout& layout, int64_t block) {
  float bound;
  std::memcpy(&bound, static_cast<const char*>(index_block_of(span, block)) + layout.index_norm_offset(), sizeof bound);
  return bound;
}

// Half the width of the interval around a fast score, or infinity where no bound is claimed.
double error_bound(double q_norm, double k_norm, int64_t dim, int64_t roundings) {
  const double product = q_norm * k_norm;
  if (!(product < 0x1p120)) return std::numeric_limits<double>::infinity();
  const double d = static_cast<double>(roundings + 8), n = static_cast<double>(dim);
  return d * 0x1p-24 / (1 - d * 0x1p-24) * product + 0x1p-126 * (4 * n + 1 + std::sqrt(n) * (q_norm + k_norm));
}

// Keeps the n largest of the values offered; smallest() is the n-th largest once n were offered.
class Largest {
 public:
  explicit Largest(int64_t n) : n_(static_cast<size_t>(n)) { heap_.reserve(n_); }
  void offer(double v) {
    if (heap_.size() == n_) {
      if (!(v > heap_.front())) return;
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      heap_.back() = v;
    } else {
      heap_.push_back(v);
    }
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }
  double smallest() const { return heap_.front(); }

 private:
  const size_t n_;
  std::vector<double> heap_;
};

// A tile of the current round and where its data lies in scratch.
struct SelectTile {
  RowTile rows;
  int64_t scored = 0;        // blocks [0, scored) get a fast score
  int64_t padded = 0;        // queries rounded up to 16
  float* q = nullptr;        // [rows * heads][dim]
  double* q_norm = nullptr;  // [rows * heads]
  std::byte* q_tiles = nullptr;
  float* scores = nullptr;  // [rows * heads][scored]
  float* k_norm = nullptr;  // [scored]
  int64_t first_piece = 0;
};

class Selection {
 public:
  Selection(const IndexSelectParams& params, Isa isa)
      : p(params),
        kernels(index_kernels_of(isa)),
        dim(p.layout.index_dim),
        tiles_usable(isa >= Isa::kAmx && p.layout.dtype == DType::kBf16 && dim % 32 == 0 &&
                     p.layout.block_tokens % 16 == 0),
        roundings(dim * (tiles_usable ? kIndexTiles.roundings_per_dim : kernels.roundings_per_dim)) {}

  int64_t own(const RowTile& t, int64_t r) const { return (t.position + r) / p.layout.block_tokens; }
  // Full blocks that some row of the tile may choose.
  int64_t scored_blocks(const RowTile& t) const {
    const int64_t last = own(t, t.n_rows - 1);
    if (last + 1 <= p.topk) return 0;
    return std::max<int64_t>(0, last - std::max<int64_t>(p.local_blocks, 1) + 1);
  }
  int64_t query_bytes(int64_t queries) const {
    return round_up(queries * dim * 4, 64) + round_up(queries * 8, 64) +
           (tiles_usable ? kIndexTiles.packed_query_bytes(dim, queries) : 0);
  }
  int64_t thread_bytes() const {
    const int64_t queries = round_up(kTileRows * p.heads, 16);
    return round_up(maxima_scratch_bytes(dim, queries) + kPieceBlocks * queries * 4, 64);
  }

  void prepare(const SelectTile& t) const;
  void score(const SelectTile& t, int64_t piece, std::byte* scratch) const;
  // Writes the list of one row and head; returns how many blocks had a fast score and how many were rescored.
  std::pair<int64_t, int64_t> decide(const SelectTile& t, int64_t r, int64_t head, std::byte* scratch) const;

  const IndexSelectParams& p;
  const IndexKernels& kernels;
  const int64_t dim;
  const bool tiles_usable;
  const int64_t roundings;
};

void Selection::prepare(const SelectTile& t) const {
  const int64_t queries = t.rows.n_rows * p.heads;
  for (int64_t i = 0; i < queries; ++i) {
    const void* row = p.q.row(t.rows.row + i / p.heads);
    double squares = 0;
    for (int64_t d = 0; d < dim; ++d) {
      const float v = element(row, p.q.dtype, i % p.heads * dim + d);
      t.q[i * dim + d] = v;
      squares += static_cast<double>(v) * v;
    }
    t.q_norm[i] = std::sqrt(squares) * (1 + 0x1p-40);  // upwards of all roundings
  }
  if (tiles_usable) kIndexTiles.pack_queries(t.q, queries, dim, t.q_tiles);
}

void Selection::score(const SelectTile& t, int64_t piece, std::byte* scratch) const {
  const int64_t first = piece * kPieceBlocks, n = std::min(kPieceBlocks, t.scored - first);
  const int64_t queries = t.rows.n_rows * p.heads;
  const void* blocks[kPieceBlocks];
  for (int64_t b = 0; b < n; ++b) {
    blocks[b] = index_block_of(*t.rows.span, first + b);
    t.k_norm[first + b] = norm_bound(*t.rows.span, p.layout, first + b);
  }
  BlockMaximaArgs a;
  a.blocks = blocks;
  a.next = first + n < t.scored ? index_block_of(*t.rows.span, first + n) : nullptr;
  a.n_blocks = n;
  a.n_keys = p.layout.block_tokens;
  a.bf16 = p.layout.dtype == DType::kBf16;
  a.dim = dim;
  a.q = t.q;
  a.n_queries = queries;
  a.q_tiles = t.q_tiles;
  a.out = reinterpret_cast<float*>(scratch);
  a.out_stride = t.padded;
  a.scratch = scratch + kPieceBlocks * t.padded * 4;
  if (tiles_usable) {
    kIndexTiles.block_maxima(a);
  } else {
    kernels.block_maxima(a);
  }
  for (int64_t i = 0; i < queries; ++i) {
    for (int64_t b = 0; b < n; ++b) t.scores[i * t.scored + first + b] = a.out[b * t.padded + i];
  }
}

std::pair<int64_t, int64_t> Selection::decide(const SelectTile& t, int64_t r, int64_t head, std::byte* scratch) const {
  int32_t* out = static_cast<int32_t*>(p.ids.row(t.rows.row + r)) + head * p.topk;
  const int64_t own_block = own(t.rows, r);
  if (own_block + 1 <= p.topk) {
    for (int64_t j = 0; j < p.topk; ++j) out[j] = j <= own_block ? static_cast<int32_t>(j) : -1;
    return {0, 0};
  }
  const int64_t lo = std::min(p.init_blocks, own_block + 1);
  const int64_t hi = std::max(lo, own_block + 1 - p.local_blocks);
  const int64_t places = p.topk - (own_block + 1 - (hi - lo));
  std::vector<int32_t> chosen;
  chosen.reserve(static_cast<size_t>(p.topk));
  int64_t rescored = 0;
  const int64_t query = r * p.heads + head;
  const double q_norm = t.q_norm[query];
  const float* scores = t.scores + query * t.scored;
  // A fast score is of a whole block; of its own one a row sees a part.
  const int64_t fast = std::min({hi, t.scored, own_block});
  if (std::isnan(q_norm)) {
    // Every score is NaN: all maxima rank as -inf and the lower ids win.
    for (int64_t j = 0; j < places; ++j) chosen.push_back(static_cast<int32_t>(lo + j));
  } else if (places > 0) {
    const double infinity = std::numeric_limits<double>::infinity();
    const auto interval = [&](int64_t b, double* lower, double* upper) {
      const double e = b < fast ? error_bound(q_norm, t.k_norm[b], dim, roundings) : infinity;
      *lower = e < infinity ? scores[b] - e : -infinity;
      *upper = e < infinity ? scores[b] + e : infinity;
    };
    Largest lowers(places), uppers(places + 1);
    double lower, upper;
    for (int64_t b = lo; b < hi; ++b) {
      interval(b, &lower, &upper);
      lowers.offer(lower);
      uppers.offer(upper);
    }
    const double enters = uppers.smallest(), leaves = lowers.smallest();
    struct Open {
      float score;
      int32_t block;
    };
    std::vector<Open> open;
    for (int64_t b = lo; b < hi; ++b) {
      interval(b, &lower, &upper);
      if (lower > enters) {
        chosen.push_back(static_cast<int32_t>(b));
      } else if (!(upper < leaves)) {
        open.push_back({0, static_cast<int32_t>(b)});
      }
    }
    const size_t left = static_cast<size_t>(places) - chosen.size();
    FIRN_CHECK(chosen.size() <= static_cast<size_t>(places) && open.size() >= left,
               "index_select: the bounds of the block scores contradict each other");
    if (left > 0 && open.size() > left) {
      for (Open& o : open) {
        const int64_t visible =
            std::min(p.layout.block_tokens, t.rows.position + r + 1 - o.block * p.layout.block_tokens);
        kernels.canonical(index_block_of(*t.rows.span, o.block), p.layout.dtype == DType::kBf16, visible, dim,
                          t.q + query * dim, 1, scratch, &o.score);
      }
      rescored = static_cast<int64_t>(open.size());
      std::sort(open.begin(), open.end(), [](const Open& a, const Open& b) {
        return a.score > b.score || (a.score == b.score && a.block < b.block);
      });
    }
    for (size_t j = 0; j < left; ++j) chosen.push_back(open[j].block);
  }
  for (int64_t b = 0; b < lo; ++b) chosen.push_back(static_cast<int32_t>(b));
  for (int64_t b = hi; b <= own_block; ++b) chosen.push_back(static_cast<int32_t>(b));
  std::sort(chosen.begin(), chosen.end());
  FIRN_CHECK(static_cast<int64_t>(chosen.size()) == p.topk, "index_select: a list of the wrong length");
  std::copy(chosen.begin(), chosen.end(), out);
  return {std::max<int64_t>(0, fast - lo), rescored};
}

// The fixed rule: one row and many blocks. Both ways give the same choice. Measured at 1M random keys on two cores with
// AMX: one row takes 0.52 to 0.55 of the scan's time and 0.27 of its bytes, four rows 1.4 of its time: they share what
// a scan reads but not what is refined.
bool use_two_stages(const IndexSelectParams& p, const RowTile& t, Isa isa, IndexPath path) {
  if (path == IndexPath::kScan || !two_stage_possible(p, t)) return false;
  if (path == IndexPath::kTwoStage) return true;
  if (t.n_rows > 1) return false;
  const CommonBlocks common = common_blocks(p, t);
  return isa >= Isa::kAvx2 && common.last - common.first >= kTwoStageBlocks;
}

}  // namespace

int64_t index_scratch_bytes(const Ops::Limits& limits, int n_threads) {
  // Index dims are no larger than head dims in this family; 4096 covers rounding of a round's parts.
  const int64_t dim = std::max<int64_t>(limits.head_dim, 256), heads = std::max<int64_t>(limits.index_heads, 1);
  const int64_t tile_queries = round_up(kTileRows * heads, 16);
  const int64_t thread = maxima_scratch_bytes(dim, tile_queries) + kPieceBlocks * tile_queries * 4 + 64;
  const int64_t all_scores = (limits.rows * heads + limits.rows) * limits.blocks * 4;
  const int64_t tile_scores = (kTileRows * heads + 1) * limits.blocks * 4;
  const int64_t scan =
      std::min(all_scores, kScoreBytes + tile_scores) + round_up(limits.rows * heads, 16) * (dim * 6 + 16);
  constexpr int64_t kBlockTokens = 128, kPlaces = 256;
  const int64_t two_stage = two_stage_bytes(std::min(limits.rows * heads, kCopyMaxQueries), dim, kBlockTokens,
                                            std::min(limits.blocks, kPlaces), limits.blocks, n_threads);
  return n_threads * thread + std::max(scan, two_stage) + 3 * 4096;
}

Ticket CpuOps::index_append(const IndexAppendParams& p) {
  if (failed()) return done();
  const KvLayout& layout = p.layout;
  check_layout(layout, "index_append");
  FIRN_CHECK(p.keys.cols == layout.index_dim && p.keys.dtype == layout.dtype,
             "index_append: keys differ from the layout");
  const int64_t dim = layout.index_dim, row_bytes = dim * static_cast<int64_t>(dtype_bytes(layout.dtype));
  // A tile lies in one block, and no other tile of the call does: its norm bound has one writer.
  const std::vector<RowTile> tiles = cut_rows(p.spans, p.keys.rows, layout.block_tokens, layout.block_tokens);
  team_->parallel_for(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const RowTile& t = tiles[static_cast<size_t>(i)];
      const int64_t slot = t.position % layout.block_tokens;
      char* block = static_cast<char*>(index_block_of(*t.span, t.position / layout.block_tokens));
      float bound = 0;  // a block's first key starts its bound anew: recycled memory holds another's
      if (slot != 0) std::memcpy(&bound, block + layout.index_norm_offset(), sizeof bound);
      for (int64_t r = 0; r < t.n_rows; ++r) {
        const void* key = p.keys.row(t.row + r);
        double squares = 0;
        for (int64_t d = 0; d < dim; ++d) {
          const double v = element(key, layout.dtype, d);
          squares += v * v;
        }
        std::memcpy(block + (slot + r) * row_bytes, key, static_cast<size_t>(row_bytes));
        write_index_copy(key, layout.dtype == DType::kBf16, dim, block + layout.index_copy_offset(), slot + r);
        // The next float above covers the rounding to float and those of the sum. A NaN key raises nothing: its scores
        // are NaN and never count.
        const float norm =
            std::nextafter(static_cast<float>(std::sqrt(squares)), std::numeric_limits<float>::infinity());
        if (norm > bound) bound = norm;
      }
      std::memcpy(block + layout.index_norm_offset(), &bound, sizeof bound);
    }
  });
  return done();
}

Ticket CpuOps::index_select(const IndexSelectParams& p) {
  if (failed() || p.q.rows == 0) return done();
  check_layout(p.layout, "index_select");
  FIRN_CHECK(p.heads > 0 && p.q.cols == p.heads * p.layout.index_dim && p.q.dtype == p.layout.dtype,
             "index_select: query differs from the layout");
  FIRN_CHECK(p.topk > 0 && p.init_blocks >= 0 && p.local_blocks >= 0 && p.init_blocks + p.local_blocks <= p.topk,
             fmt::format("index_select: {} + {} forced blocks of {}", p.init_blocks, p.local_blocks, p.topk));
  FIRN_CHECK(p.ids.dtype == DType::kI32 && p.ids.rows == p.q.rows && p.ids.cols == p.heads * p.topk,
             "index_select: output shape differs");
  const Selection s(p, isa_);
  std::vector<RowTile> tiles = cut_rows(p.spans, p.q.rows, kTileRows, 0);
  TwoStageCounts two_stage;
  for (RowTile& t : tiles) {
    if (!use_two_stages(p, t, isa_, index_path_)) continue;
    const CommonBlocks common = common_blocks(p, t);
    std::byte* space = scratch(kScores, two_stage_bytes(t.n_rows * p.heads, p.layout.index_dim, p.layout.block_tokens,
                                                        p.topk, common.last - common.first, team_->size()));
    if (space == nullptr) return done();
    if (select_two_stage(p, t, isa_, *team_, space, &two_stage)) t.n_rows = 0;
  }
  std::erase_if(tiles, [](const RowTile& t) { return t.n_rows == 0; });
  stats_.index_blocks_scored += two_stage.blocks_scored;
  stats_.index_copy_bytes += two_stage.copy_bytes;
  stats_.index_keys_refined += two_stage.keys_refined;
  if (tiles.empty()) return done();
  std::byte* threads = scratch(kSelect, team_->size() * s.thread_bytes());
  if (threads == nullptr) return done();
  const auto thread_scratch = [&](int thread) { return threads + thread * s.thread_bytes(); };
  const auto tile_bytes = [&](const SelectTile& t) {
    const int64_t queries = t.rows.n_rows * p.heads;
    return s.query_bytes(queries) + round_up(queries * t.scored * 4, 64) + round_up(t.scored * 4, 64);
  };
  std::atomic<int64_t> scored{0}, rescored{0};
  std::vector<SelectTile> round;
  for (size_t next = 0; next < tiles.size();) {
    round.clear();
    int64_t bytes = 0, pieces = 0, n_rows = 0;
    for (; next < tiles.size(); ++next) {
      SelectTile t;
      t.rows = tiles[next];
      t.scored = s.scored_blocks(t.rows);
      t.padded = round_up(t.rows.n_rows * p.heads, 16);
      // A round is a run of rows; those in between may have been chosen in two stages.
      if (!round.empty() &&
          (bytes + tile_bytes(t) > kScoreBytes || t.rows.row != round.back().rows.row + round.back().rows.n_rows)) {
        break;
      }
      t.first_piece = pieces;
      bytes += tile_bytes(t);
      pieces += (t.scored + kPieceBlocks - 1) / kPieceBlocks;
      n_rows += t.rows.n_rows;
      round.push_back(t);
    }
    std::byte* at = scratch(kScores, bytes);
    if (at == nullptr) return done();
    for (SelectTile& t : round) {
      const int64_t queries = t.rows.n_rows * p.heads;
      t.q = reinterpret_cast<float*>(at);
      t.q_norm = reinterpret_cast<double*>(at + round_up(queries * s.dim * 4, 64));
      t.q_tiles = at + round_up(queries * s.dim * 4, 64) + round_up(queries * 8, 64);
      t.scores = reinterpret_cast<float*>(at + s.query_bytes(queries));
      t.k_norm = t.scores + round_up(queries * t.scored * 4, 64) / 4;
      at += tile_bytes(t);
    }
    const int64_t n_tiles = static_cast<int64_t>(round.size());
    team_->parallel_for(n_tiles, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) s.prepare(round[static_cast<size_t>(i)]);
    });
    team_->parallel_stretches(pieces, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; ++i) {
        const auto after = std::upper_bound(round.begin(), round.end(), i,
                                            [](int64_t piece, const SelectTile& t) { return piece < t.first_piece; });
        const SelectTile& t = *(after - 1);
        s.score(t, i - t.first_piece, thread_scratch(thread));
      }
    });
    const int64_t first_row = round.front().rows.row;
    team_->parallel_for(n_rows * p.heads, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = first_row + i / p.heads;
        const auto after = std::upper_bound(round.begin(), round.end(), row,
                                            [](int64_t at_row, const SelectTile& t) { return at_row < t.rows.row; });
        const SelectTile& t = *(after - 1);
        const auto [fast, slow] = s.decide(t, row - t.rows.row, i % p.heads, thread_scratch(thread));
        scored.fetch_add(fast, std::memory_order_relaxed);
        rescored.fetch_add(slow, std::memory_order_relaxed);
      }
    });
  }
  stats_.index_blocks_scored += scored.load();
  stats_.index_blocks_rescored += rescored.load();
  return done();
}

Ticket CpuOps::block_scores(const BlockScoresParams& p) {
  if (failed() || p.q.rows == 0) return done();
  check_layout(p.layout, "block_scores");
  const int64_t dim = p.layout.index_dim;
  FIRN_CHECK(p.heads > 0 && p.q.cols == p.heads * dim && p.q.dtype == p.layout.dtype && p.scores.rows == p.q.rows &&
                 p.scores.dtype == DType::kF32 && p.scores.cols % p.heads == 0,
             "block_scores: shapes differ");
  const int64_t n_blocks = p.scores.cols / p.heads;
  const IndexKernels& kernels = index_kernels_of(isa_);
  const std::vector<RowTile> rows = cut_rows(p.spans, p.q.rows, 1, 0);
  const int64_t thread_bytes = round_up(maxima_scratch_bytes(dim, p.heads), 64) + round_up(p.heads * (dim + 1) * 4, 64);
  std::byte* threads = scratch(kSelect, team_->size() * thread_bytes);
  if (threads == nullptr) return done();
  const int64_t pieces = (n_blocks + kPieceBlocks - 1) / kPieceBlocks;
  team_->parallel_for(p.q.rows * pieces, 1, [&](int64_t begin, int64_t end, int thread) {
    float* q = reinterpret_cast<float*>(threads + thread * thread_bytes);
    float* out = q + p.heads * dim;
    void* work = threads + thread * thread_bytes + round_up(p.heads * (dim + 1) * 4, 64);
    for (int64_t i = begin; i < end; ++i) {
      const RowTile& t = rows[static_cast<size_t>(i / pieces)];
      for (int64_t d = 0; d < p.heads * dim; ++d) q[d] = element(p.q.row(t.row), p.q.dtype, d);
      const int64_t own = t.position / p.layout.block_tokens;
      const int64_t first = i % pieces * kPieceBlocks, last = std::min(n_blocks, first + kPieceBlocks);
      for (int64_t b = first; b < last; ++b) {
        if (b <= own) {
          const int64_t visible = std::min(p.layout.block_tokens, t.position + 1 - b * p.layout.block_tokens);
          kernels.canonical(index_block_of(*t.span, b), p.layout.dtype == DType::kBf16, visible, dim, q, p.heads, work,
                            out);
        } else {
          std::fill(out, out + p.heads, kMinusInfinity);
        }
        for (int64_t h = 0; h < p.heads; ++h) static_cast<float*>(p.scores.row(t.row))[h * n_blocks + b] = out[h];
      }
    }
  });
  return done();
}

}  // namespace firn::cpu
