// A call of attention or attention_partial, checked and cut into work: tiles of consecutive rows, and for each tile and
// group the list of blocks that its rows attend to, in ascending id, with the rows that chose each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/attention_rows.h"
#include "cpu/isa.h"

namespace firn::cpu {

inline constexpr int64_t kTileRowsMost = 128;  // of a tile of rows; few enough that a row's number fits a byte
inline constexpr int64_t kTileRowsLeast = 16;  // unless a span has fewer

// One block of a list and the rows of the tile that attend to it, ascending.
struct Entry {
  int64_t block = 0;
  const uint8_t* rows = nullptr;
  int64_t n_rows = 0;
};

class Job {
 public:
  // Checks shapes and lists. `only` as in AttentionPartialParams. How rows are tiled follows n_threads and never shows
  // in a result.
  Job(const AttentionParams& p, const ConstMatrixView& only, Isa isa, int n_threads, const char* operation);

  const RowTile& tile(int64_t i) const { return tiles_[static_cast<size_t>(i)]; }
  int64_t n_tiles() const { return static_cast<int64_t>(tiles_.size()); }
  int64_t n_lists() const { return n_tiles() * groups; }  // list = tile * groups + group
  const RowTile& tile_of(int64_t list) const { return tile(list / groups); }
  int64_t n_entries(int64_t list) const {
    if (!dense_) return begins_[static_cast<size_t>(list) + 1] - begins_[static_cast<size_t>(list)];
    const RowTile& t = tile_of(list);
    return (t.position + t.n_rows - 1) / block_tokens + 1;
  }
  Entry entry(int64_t list, int64_t i) const;
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
  const bool matrix_tiles;  // cpu/attention_tiles.h serves this call
  const int64_t tile_rows;  // of a tile at most

 private:
  struct Stored {
    int32_t block = 0, n_rows = 0;
    int64_t first_row = 0;  // in rows_
  };
  void collect(const ConstMatrixView& only);

  const bool dense_;
  std::vector<RowTile> tiles_;
  std::vector<Stored> entries_;
  std::vector<uint8_t> rows_;
  std::vector<int64_t> begins_;
};

}  // namespace firn::cpu
