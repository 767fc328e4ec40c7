// Attention on matrix tiles (AMX-BF16), for bf16 keys and values: plain data only, so that the file compiled for it can
// include this header.
//
// A query tile is 16 columns, each a query head of some row; an item is one query tile with one block's first n_keys
// keys. Of each column:
//   s[t] = sum over dims of q[d] * k[t][d], fp32, in the fixed order of the tile unit (dims 32 at a time)
//   x = largest s, m = scale * x
//   p[t] = 2^((s[t] - x) * (scale * log2 e)), relative error below 2^-21;  l = sum of p: even and odd keys apart
//   p is split into two bf16 terms, p = hi + lo within 2^-16 p: with hi alone (what bf16 references do) an output is
//   off by up to 2^-9 of a value, with both it agrees with the oracle as closely as the f32 kernels do
//   o[d] = sum over keys of (hi + lo)[t] * v[t][d], fp32: per 32 keys first hi, then lo
// The unit reads subnormals as zero. A column's bits depend on nothing but its query and the block's visible keys: not
// on the other columns, nor on which items share a call. Folding is attention_kernels.h's merge(), operation for
// operation, so that partials that went through memory in natural order give the same bits.
//
// A tile's triple: m[16], l[16], o[16][dim]; within each 32 dims of o the order is that of order_dims(), because values
// are paired up for the unit by the cheapest shuffle. Columns outside an item's mask are neither read nor written.
//
// REQUIRES: dim a multiple of 32, blocks of a multiple of 16 keys with V right behind K (keys are read 32 at a time, so
// up to 16 rows past the last), scale > 0, AMX-BF16, AVX512-BF16's companions as in Isa::kAmx.
#pragma once

#include <cstdint>

namespace firn::cpu {

inline constexpr int64_t kTileQueries = 16;

struct TileItem {
  const void* keys = nullptr;    // bf16 [block_tokens][dim]
  const void* values = nullptr;  // bf16 [block_tokens][dim]
  const void* q = nullptr;       // what pack_queries wrote
  float* triple = nullptr;       // tile_triple_floats(dim), 64-byte aligned
  uint32_t mask = 0;             // bit c: column c takes part
  int32_t n_keys = 0;            // visible, > 0
};

struct TileAttendArgs {
  const TileItem* items = nullptr;  // items with the same keys follow each other
  int64_t n_items = 0;
  int64_t dim = 0;
  int64_t block_tokens = 0;
  float scale = 0;
  bool fold = true;         // merge into the triples; else overwrite them
  void* scratch = nullptr;  // tile_scratch_bytes(), 64-byte aligned
};

inline int64_t tile_triple_floats(int64_t dim) { return 32 + kTileQueries * dim; }
inline int64_t tile_query_bytes(int64_t dim) { return kTileQueries * dim * 2; }
inline int64_t tile_scratch_bytes(int64_t dim, int64_t block_tokens) {
  const int64_t keys = (block_tokens + 31) / 32 * 32;
  // Values re-paired; four pairs of tiles in flight: scores, weights' terms, outputs, words to transpose, statistics.
  return keys * dim * 2 + 4 * (2 * keys * 64 + 2 * keys * 64 + 2 * dim * 64 + 1024 + 2 * 6 * 64);
}

struct AttentionTiles {
  // n <= 16 queries, bf16, `stride` elements apart, become columns [first, first + n) of a query tile.
  void (*pack_queries)(const void* q, int64_t stride, int64_t first, int64_t n, int64_t dim, void* out);
  void (*attend)(const TileAttendArgs& args);
  // Folds the masked columns of one triple into those of another.
  void (*merge)(float* into, const float* from, uint32_t mask, int64_t dim);
  // One column of a triple's o [dim] in natural order.
  void (*order_dims)(const float* o, int64_t dim, float* out);
};

extern const AttentionTiles kAttentionTiles;

}  // namespace firn::cpu
