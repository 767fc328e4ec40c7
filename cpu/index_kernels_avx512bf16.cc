// Index kernels on matrix tiles (AMX-BF16): 16 keys as they lie in memory times 16 queries.
//
// Keys are the left factor, so nothing of them is repacked; queries are packed once a call, pairs of dims interleaved,
// as the right factor. A product tile holds [16 keys][16 queries], so a maximum over keys is one vector operation a
// row.
#include "cpu/index_kernels.h"

#include "cpu/matrix_tiles.h"

namespace firn::cpu {
namespace {

constexpr int64_t kTileDims = 32;  // bf16 a row of a tile

int64_t packed_query_bytes(int64_t dim, int64_t n_queries) {
  return (n_queries + kTile - 1) / kTile * (dim / kTileDims) * kTileBytes;
}

// [query tile][dim tile][pair of dims][query][2]; queries past n_queries are zero.
void pack_queries(const float* q, int64_t n_queries, int64_t dim, void* out) {
  uint16_t* to = static_cast<uint16_t*>(out);
  for (int64_t first = 0; first < n_queries; first += kTile) {
    for (int64_t d = 0; d < dim; d += 2) {
      for (int64_t i = 0; i < kTile; ++i) {
        for (int64_t e = 0; e < 2; ++e) {
          uint32_t bits = 0;
          if (first + i < n_queries) __builtin_memcpy(&bits, q + (first + i) * dim + d + e, 4);
          *to++ = static_cast<uint16_t>(bits >> 16);
        }
      }
    }
  }
}

inline __m512 raise_by_rows(__m512 largest, const float* c) {
  // A NaN in the first operand of max leaves the second.
  for (int64_t r = 0; r < kTile; ++r) largest = _mm512_max_ps(_mm512_loadu_ps(c + r * kTile), largest);
  return largest;
}

// Tile loads take lines 256 bytes apart, which the hardware does not see as the one stream they are; keys are therefore
// asked for in the order of their addresses, this many ahead (4 KiB at dim 128) and a few lines at a time between the
// tile loads. One core, GB/s where plain reading gives 17.9: nothing asked for 11.3; 16 KiB ahead 11.6, in bursts of
// two KiB 12.2; 4 KiB ahead 13.5.
constexpr int64_t kKeysAhead = 16;

// Keys in the order a thread reads them: this block's, then the next one's.
struct Stream {
  const char* keys;
  const char* next;
  int64_t bytes;  // of a block
};

// Asks for `bytes` bytes at `at` bytes from the start of the block or, past its end, of the next one.
FIRN_INLINE void ask(const Stream& s, int64_t at, int64_t bytes) {
  const char* from = s.keys + at;
  if (at >= s.bytes) {
    if (s.next == nullptr || at >= 2 * s.bytes) return;
    from = s.next + (at - s.bytes);
  }
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(from + i, _MM_HINT_T0);
}

// One tile of queries.
FIRN_AMX inline void maxima_one(const Stream& s, int64_t n_keys, int64_t dim, const char* q, float* c, float* out) {
  const int64_t row_bytes = dim * 2;
  __m512 largest = _mm512_set1_ps(-__builtin_inff());
  for (int64_t t = 0; t < n_keys; t += 2 * kTile) {
    const bool pair = t + kTile < n_keys;
    const char* first = s.keys + t * row_bytes;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < dim / kTileDims; ++d) {
      const int64_t at = (t + kKeysAhead) * row_bytes + d * 2 * kTileBytes;
      ask(s, at, kTileBytes / 2);
      _tile_loadd(6, q + d * kTileBytes, 64);
      ask(s, at + kTileBytes / 2, kTileBytes / 2);
      _tile_loadd(4, first + d * 64, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      ask(s, at + kTileBytes, kTileBytes / 2);
      if (pair) {
        _tile_loadd(5, first + kTile * row_bytes + d * 64, row_bytes);
        _tile_dpbf16ps(1, 5, 6);
      }
      ask(s, at + kTileBytes / 2 * 3, kTileBytes / 2);
    }
    _tile_stored(0, c, 64);
    if (pair) _tile_stored(1, c + 256, 64);
    largest = raise_by_rows(largest, c);
    if (pair) largest = raise_by_rows(largest, c + 256);
  }
  _mm512_storeu_ps(out, largest);
}

// Two tiles of queries.
FIRN_AMX inline void maxima_two(const Stream& s, int64_t n_keys, int64_t dim, const char* q, float* c, float* out) {
  const int64_t row_bytes = dim * 2, q_step = dim / kTileDims * kTileBytes;
  __m512 low = _mm512_set1_ps(-__builtin_inff()), high = low;
  for (int64_t t = 0; t < n_keys; t += 2 * kTile) {
    const bool pair = t + kTile < n_keys;
    const char* first = s.keys + t * row_bytes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < dim / kTileDims; ++d) {
      _tile_loadd(6, q + d * kTileBytes, 64);
      _tile_loadd(7, q + q_step + d * kTileBytes, 64);
      _tile_loadd(4, first + d * 64, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (pair) {
        _tile_loadd(5, first + kTile * row_bytes + d * 64, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, 64);
    _tile_stored(1, c + 256, 64);
    low = raise_by_rows(low, c);
    high = raise_by_rows(high, c + 256);
    if (pair) {
      _tile_stored(2, c + 512, 64);
      _tile_stored(3, c + 768, 64);
      low = raise_by_rows(low, c + 512);
      high = raise_by_rows(high, c + 768);
    }
  }
  _mm512_storeu_ps(out, low);
  _mm512_storeu_ps(out + kTile, high);
}

FIRN_AMX void block_maxima(const BlockMaximaArgs& a) {
  const TileConfig config;
  _tile_loadconfig(&config);
  float* c = static_cast<float*>(a.scratch);
  const int64_t q_step = a.dim / kTileDims * kTileBytes;
  for (int64_t b = 0; b < a.n_blocks; ++b) {
    Stream stream = {static_cast<const char*>(a.blocks[b]),
                     static_cast<const char*>(b + 1 < a.n_blocks ? a.blocks[b + 1] : a.next), a.n_keys * a.dim * 2};
    const char* q = static_cast<const char*>(a.q_tiles);
    float* out = a.out + b * a.out_stride;
    int64_t i = 0;
    for (; i + kTile < a.n_queries; i += 2 * kTile) {
      maxima_two(stream, a.n_keys, a.dim, q + i / kTile * q_step, c, out + i);
      stream.bytes = 0, stream.next = nullptr;  // only the first pass over a block finds it far away
    }
    if (i < a.n_queries) maxima_one(stream, a.n_keys, a.dim, q + i / kTile * q_step, c, out + i);
  }
  _tile_release();
}

}  // namespace

const IndexTileKernels kIndexTiles = {packed_query_bytes, pack_queries, block_maxima, 2};

}  // namespace firn::cpu
