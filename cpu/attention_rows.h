// What the attention and the index operations share: the rows of a call cut into tiles that lie in one span, checked
// access to block tables, and the scratch both need.
//
// Bits never depend on how rows are tiled: every (query, block) result is one fixed chain of operations.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/ops.h"

namespace firn::cpu {

// Consecutive rows of one span, at consecutive positions.
struct RowTile {
  const KvSpan* span = nullptr;
  int64_t row = 0;
  int64_t n_rows = 0;
  int64_t position = 0;  // of the first row
};

// Cuts the spans' rows into tiles of at most tile_rows; with align > 0 also where a position is a multiple of it.
// CHECKs that the spans cover rows [0, rows) once each.
std::vector<RowTile> cut_rows(std::span<const KvSpan> spans, int64_t rows, int64_t tile_rows, int64_t align);

// CHECKs the layout's type and sizes.
void check_layout(const KvLayout& layout, const char* operation);

inline void* kv_block_of(const KvSpan& span, int64_t group, int64_t block) {
  FIRN_CHECK(span.kv != nullptr && block >= 0 && block < span.table_stride, "KV block outside its table");
  void* base = span.kv[group * span.table_stride + block];
  FIRN_CHECK(base != nullptr, "KV block without memory");
  return base;
}

inline void* index_block_of(const KvSpan& span, int64_t block) {
  FIRN_CHECK(span.index != nullptr && block >= 0 && block < span.table_stride, "index block outside its table");
  void* base = span.index[block];
  FIRN_CHECK(base != nullptr, "index block without memory");
  return base;
}

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Upper bounds of the scratch that attention and index operations take for calls within the limits, with blocks of 128
// positions and index_dim no larger than the larger of head_dim and 256.
int64_t attention_scratch_bytes(const Ops::Limits& limits, int n_threads);
int64_t index_scratch_bytes(const Ops::Limits& limits, int n_threads);

}  // namespace firn::cpu
