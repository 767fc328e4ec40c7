// Job: checks, tiles of rows, lists of blocks.
#include "cpu/attention_job.h"

#include <array>
#include <numeric>

#include "cpu/attention_kernels.h"
#include "fmt/format.h"

namespace firn::cpu {
namespace {

constexpr std::array<uint8_t, kTileRowsMost> kAllRows = [] {
  std::array<uint8_t, kTileRowsMost> rows{};
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<uint8_t>(i);
  return rows;
}();

// By features, types and shapes alone.
bool tiles_usable(const AttentionParams& p, Isa isa) {
  return isa >= Isa::kAmx && p.layout.dtype == DType::kBf16 && p.layout.head_dim > 0 && p.layout.head_dim % 32 == 0 &&
         p.layout.block_tokens % 16 == 0 && p.scale > 0;
}

// Large tiles bring a block near, and re-pair its values, once for more rows; small ones give every thread work.
int64_t rows_of_tile(const AttentionParams& p, bool matrix_tiles, int n_threads) {
  int64_t rows = kTileRowsLeast;
  if (!matrix_tiles) return rows;
  while (2 * rows <= kTileRowsMost && p.q.rows / (2 * rows) * p.layout.groups >= 2 * n_threads) rows *= 2;
  return rows;
}

}  // namespace

Job::Job(const AttentionParams& params, const ConstMatrixView& only, Isa isa, int n_threads, const char* operation)
    : p(params),
      bf16(p.layout.dtype == DType::kBf16),
      groups(p.layout.groups),
      per_group(p.heads_per_group),
      heads(groups * per_group),
      dim(p.layout.head_dim),
      dim_padded(round_up(dim, kLanesMax)),
      block_tokens(p.layout.block_tokens),
      keys_padded(round_up(block_tokens, kLanesMax)),
      matrix_tiles(tiles_usable(p, isa)),
      tile_rows(rows_of_tile(p, matrix_tiles, n_threads)),
      dense_(p.block_ids.empty()) {
  check_layout(p.layout, operation);
  FIRN_CHECK(per_group > 0 && p.q.cols == heads * dim && p.q.dtype == p.layout.dtype,
             fmt::format("{}: query shape or type differs from the layout", operation));
  if (!dense_) {
    FIRN_CHECK(p.topk > 0 && p.block_ids.cols == groups * p.topk && p.block_ids.rows == p.q.rows &&
                   p.block_ids.dtype == DType::kI32,
               fmt::format("{}: block list shape differs", operation));
  }
  tiles_ = cut_rows(p.spans, p.q.rows, tile_rows, 0);
  if (!dense_) collect(only);
}

Entry Job::entry(int64_t list, int64_t i) const {
  if (!dense_) {
    const Stored& s = entries_[static_cast<size_t>(begins_[static_cast<size_t>(list)] + i)];
    return {s.block, rows_.data() + s.first_row, s.n_rows};
  }
  const RowTile& t = tile_of(list);
  const int64_t hidden = std::max<int64_t>(0, i * block_tokens - t.position);  // rows before the block
  return {i, kAllRows.data() + hidden, t.n_rows - hidden};
}

void Job::collect(const ConstMatrixView& only) {
  struct Pick {
    int32_t block;
    uint8_t row;
  };
  begins_.reserve(static_cast<size_t>(n_lists()) + 1);
  begins_.push_back(0);
  rows_.reserve(static_cast<size_t>(p.q.rows * groups * p.topk));
  std::vector<Pick> picks, sorted;
  std::vector<int32_t> ends;  // of each block's picks
  for (const RowTile& t : tiles_) {
    for (int64_t g = 0; g < groups; ++g) {
      picks.clear();
      for (int64_t r = 0; r < t.n_rows; ++r) {
        const int32_t* ids = static_cast<const int32_t*>(p.block_ids.row(t.row + r)) + g * p.topk;
        const int32_t* wanted = only.empty() ? nullptr : static_cast<const int32_t*>(only.row(t.row + r)) + g * p.topk;
        const int64_t own = (t.position + r) / block_tokens;
        for (int64_t j = 0; j < p.topk && ids[j] != -1; ++j) {
          FIRN_CHECK(ids[j] >= 0 && ids[j] <= own && (j == 0 || ids[j] > ids[j - 1]),
                     fmt::format("block list of row {} group {}: entry {} is {}; expected ascending ids up to {}",
                                 t.row + r, g, j, ids[j], own));
          if (wanted == nullptr || wanted[j] != 0) picks.push_back({ids[j], static_cast<uint8_t>(r)});
        }
      }
      // Stable, so rows stay ascending. Counting is the quicker way unless picks are few among the blocks.
      const int64_t blocks = (t.position + t.n_rows - 1) / block_tokens + 1;
      if (t.n_rows > 1 && blocks <= 8 * static_cast<int64_t>(picks.size())) {
        ends.assign(static_cast<size_t>(blocks), 0);
        for (const Pick& pick : picks) ++ends[static_cast<size_t>(pick.block)];
        std::partial_sum(ends.begin(), ends.end(), ends.begin());
        sorted.resize(picks.size());
        for (size_t i = picks.size(); i-- > 0;)
          sorted[static_cast<size_t>(--ends[static_cast<size_t>(picks[i].block)])] = picks[i];
        picks.swap(sorted);
      } else if (t.n_rows > 1) {
        std::stable_sort(picks.begin(), picks.end(), [](const Pick& a, const Pick& b) { return a.block < b.block; });
      }
      for (const Pick& pick : picks) {
        if (begins_.back() == static_cast<int64_t>(entries_.size()) || entries_.back().block != pick.block) {
          entries_.push_back({pick.block, 0, static_cast<int64_t>(rows_.size())});
        }
        ++entries_.back().n_rows;
        rows_.push_back(pick.row);
      }
      begins_.push_back(static_cast<int64_t>(entries_.size()));
    }
  }
}

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

}  // namespace firn::cpu
