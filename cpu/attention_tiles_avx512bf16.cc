// The kernels of attention_tiles.h: four stages of a pipeline over pairs of query tiles.
//
// Softmax takes the vector units longer than both products take the tile unit, and a core can do some of one beside the
// other: while a product runs, 512-bit operations issue at half their rate (measured on a Xeon VM with AMX: 4 products
// 21 ns, 128 multiply-adds 20 ns, both 41 ns; with scalar instructions in their place nothing is lost). A step issues
// the products of two pairs (scores of the newest, outputs of the third newest) in turns of a few tile instructions
// and, between them, vector work that no product of the step waits for: re-pairing of values, folding of the oldest
// pair and the largest scores of the second newest beside the scores, softmax of the latter beside the outputs. What
// goes between two turns is a fixed share of each (handing work out by a running count measured the same).
//
// Keys are the left factor as they lie in memory and queries the right one, packed once, so scores come out as
// [keys][queries] and maxima and sums over keys are vertical. Weights become the left factor of the second product by a
// transposition of 16 x 16 words (pairs of keys); values, paired key by key, are its right factor. The other way round
// (values transposed once a block, weights as they come) takes five times the shuffles a block and saves a sixth of a
// pair's vector work.
#include "cpu/attention_tiles.h"

#include "cpu/attention_exp.h"
#include "cpu/matrix_tiles.h"

namespace firn::cpu {
namespace {

constexpr int64_t kGroupKeys = 32, kLine = 64;

enum Statistic { kLargest, kEven, kOdd, kM, kKeep, kTake, kStatistics };  // 16 floats each

// One or two query tiles with the same keys, on their way through the stages.
struct Slot {
  int64_t n = 0;  // tiles; 0: empty
  const char *keys = nullptr, *values = nullptr;
  int64_t n_keys = 0, groups = 0;  // groups of 32 keys, the last one padded
  const char* q[2] = {};
  float* triple[2] = {};
  uint32_t mask[2] = {};
  // Scratch of the slot.
  float* s[2] = {};        // [keys][16 queries]
  char* p[2] = {};         // [groups][hi, lo][16 queries][32 keys]
  float* o[2] = {};        // [dim / 16][16 queries][16 dims]
  float* words = nullptr;  // [16][16]: the first half of a transposition
  float* stats[2] = {};    // [kStatistics][16]
};

// [dim tile of 32][pair of dims][query][2]
void pack_queries(const void* q, int64_t stride, int64_t first, int64_t n, int64_t dim, void* out) {
  const char* rows = static_cast<const char*>(q);
  char* to = static_cast<char*>(out);
  const __mmask16 columns = static_cast<__mmask16>(((1u << n) - 1u) << first);
  for (int64_t d = 0; d < dim; d += 32, to += kTileBytes) {
    __m512i r[16];
    FIRN_UNROLL
    for (int64_t i = 0; i < kTile; ++i) {
      r[i] = i >= first && i < first + n ? _mm512_loadu_si512(rows + ((i - first) * stride + d) * 2)
                                         : _mm512_setzero_si512();
    }
    transpose_words(r);
    FIRN_UNROLL
    for (int64_t i = 0; i < kTile; ++i) _mm512_mask_storeu_epi32(to + i * kLine, columns, r[i]);
  }
}

// Pairs keys 2i and 2i + 1, i in [begin, end), of 16 pairs or more: per 16 pairs [width / 16][16 pairs][16 dims][2],
// `width` dims of rows of `dim`. Keys from n_keys on are
// zero, so that a weight of zero never meets what memory held before.
FIRN_INLINE void pair_values(const char* values, int64_t n_keys, int64_t begin, int64_t end, int64_t dim, int64_t width,
                             char* out) {
  for (int64_t i = begin; i < end; ++i) {
    const char* from = values + 4 * i * dim;
    char* to = out + i / kTile * kGroupKeys * 2 * width + i % kTile * kLine;
    const __mmask32 first = 2 * i < n_keys ? ~__mmask32{0} : 0, second = 2 * i + 1 < n_keys ? ~__mmask32{0} : 0;
    for (int64_t d = 0; d < width; d += 32) {
      const __m512i even = _mm512_maskz_loadu_epi16(first, from + d * 2);
      const __m512i odd = _mm512_maskz_loadu_epi16(second, from + 2 * dim + d * 2);
      char* tile = to + d / 16 * kTileBytes;
      _mm512_store_si512(tile, _mm512_unpacklo_epi16(even, odd));
      _mm512_store_si512(tile + kTileBytes, _mm512_unpackhi_epi16(even, odd));
    }
  }
}

void order_dims(const float* o, int64_t dim, float* out) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int64_t d = 0; d < dim; d += 32) {
    const __m512 low = _mm512_loadu_ps(o + d), high = _mm512_loadu_ps(o + d + 16);
    _mm512_storeu_ps(out + d, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(out + d + 16, _mm512_permutex2var_ps(low, second, high));
  }
}

// The new m and l of 16 columns, and the factors for o.
FIRN_INLINE void merge_sums(float* triple, __m512 m_b, __m512 l_b, uint32_t mask, float* keep_out, float* take_out) {
  const __m512 m = _mm512_loadu_ps(triple), l = _mm512_loadu_ps(triple + 16);
  const __mmask16 larger = _mm512_cmp_ps_mask(m_b, m, _CMP_GT_OQ) | _mm512_cmp_ps_mask(m_b, m_b, _CMP_UNORD_Q);
  const __m512 m_new = _mm512_mask_blend_ps(larger, m, m_b);
  const __m512 keep = exp_lanes(_mm512_sub_ps(m, m_new)), take = exp_lanes(_mm512_sub_ps(m_b, m_new));
  const __mmask16 columns = static_cast<__mmask16>(mask);
  _mm512_mask_storeu_ps(triple, columns, m_new);
  _mm512_mask_storeu_ps(triple + 16, columns, _mm512_add_ps(_mm512_mul_ps(l, keep), _mm512_mul_ps(l_b, take)));
  _mm512_storeu_ps(keep_out, keep);
  _mm512_storeu_ps(take_out, take);
}

FIRN_INLINE void merge_vector(float* into, const float* from, __m512 keep, __m512 take) {
  const __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(into), keep);
  _mm512_storeu_ps(into, _mm512_add_ps(kept, _mm512_mul_ps(_mm512_loadu_ps(from), take)));
}

void merge(float* into, const float* from, uint32_t mask, int64_t dim) {
  float keep[16], take[16];
  merge_sums(into, _mm512_loadu_ps(from), _mm512_loadu_ps(from + 16), mask, keep, take);
  for (; mask != 0; mask &= mask - 1) {
    const int64_t c = __builtin_ctz(mask);
    const __m512 k = _mm512_set1_ps(keep[c]), t = _mm512_set1_ps(take[c]);
    for (int64_t d = 0; d < dim; d += kTile) {
      merge_vector(into + 32 + c * dim + d, from + 32 + c * dim + d, k, t);
    }
  }
}

void start_softmax(Slot* t, int64_t j) {
  _mm512_store_ps(t->stats[j] + kLargest * kTile, _mm512_set1_ps(-__builtin_inff()));
  _mm512_store_ps(t->stats[j] + kEven * kTile, _mm512_setzero_ps());
  _mm512_store_ps(t->stats[j] + kOdd * kTile, _mm512_setzero_ps());
}

// Over keys [begin, end). A NaN in the first operand of max leaves the second.
FIRN_INLINE void find_largest(Slot* t, int64_t j, int64_t begin, int64_t end) {
  __m512 a = _mm512_load_ps(t->stats[j] + kLargest * kTile), b = a;
  const float* s = t->s[j];
  int64_t i = begin;
  for (; i + 2 <= end; i += 2) {
    a = _mm512_max_ps(_mm512_load_ps(s + i * kTile), a);
    b = _mm512_max_ps(_mm512_load_ps(s + (i + 1) * kTile), b);
  }
  if (i < end) a = _mm512_max_ps(_mm512_load_ps(s + i * kTile), a);
  _mm512_store_ps(t->stats[j] + kLargest * kTile, _mm512_max_ps(a, b));
}

// 2^(d * factor) for d <= 0; NaN stays NaN. Below 2^-126 the result is 2^-126: no output can tell.
FIRN_INLINE __m512 exp2_scaled(__m512 d, __m512 factor, __m512 lowest) {
  const __m512 shift = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23: rounds to the nearest integer
  d = _mm512_max_ps(lowest, d);
  const __m512 t = _mm512_fmadd_ps(d, factor, shift);
  const __m512 r = _mm512_fmsub_ps(d, factor, _mm512_sub_ps(t, shift));
  __m512 p = _mm512_set1_ps(0.00133813025f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.00966636852f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0555038101f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24022349f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693147181f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  // The integer sits in the low bits of t.
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}

FIRN_INLINE void store_transposed(const float* low, const __m512i* high, char* out) {
  __m512i r[16];
  FIRN_UNROLL
  for (int i = 0; i < 8; ++i) r[i] = _mm512_load_si512(low + i * kTile);
  FIRN_UNROLL
  for (int i = 0; i < 8; ++i) r[8 + i] = high[i];
  transpose_words(r);
  FIRN_UNROLL
  for (int i = 0; i < 16; ++i) _mm512_store_si512(out + i * kLine, r[i]);
}

// Weights of 16 keys of one tile; every second call completes the terms of 32 keys.
void soften(const TileAttendArgs& a, Slot* t, int64_t j, int64_t chunk) {
  const float* s = t->s[j] + chunk * kTile * kTile;
  float* stats = t->stats[j];
  const float scaled = a.scale * 1.44269504f;
  const __m512 factor = _mm512_set1_ps(scaled), lowest = _mm512_set1_ps(-126.0f / scaled);
  const __m512 largest = _mm512_load_ps(stats + kLargest * kTile);
  __m512 even = _mm512_load_ps(stats + kEven * kTile), odd = _mm512_load_ps(stats + kOdd * kTile);
  __m512i half = _mm512_set1_epi32(0x8000), top = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  // Hidden from the compiler, which would rather make constants anew, sixteen times, on the port that shuffles.
  __asm__("" : "+v"(half), "+v"(top));
  const int64_t n = t->n_keys - chunk * kTile;
  __m512i hi[8], lo[8];
  FIRN_UNROLL
  for (int64_t i = 0; i < 8; ++i) {
    __m512 p0 = exp2_scaled(_mm512_sub_ps(_mm512_load_ps(s + 2 * i * kTile), largest), factor, lowest);
    __m512 p1 = exp2_scaled(_mm512_sub_ps(_mm512_load_ps(s + (2 * i + 1) * kTile), largest), factor, lowest);
    if (__builtin_expect(2 * i + 1 >= n, 0)) {
      p1 = _mm512_setzero_ps();
      if (2 * i >= n) p0 = _mm512_setzero_ps();
    }
    even = _mm512_add_ps(even, p0);
    odd = _mm512_add_ps(odd, p1);
    const __m512i h0 = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(p0), half), top);
    const __m512i h1 = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(p1), half), top);
    hi[i] = _mm512_or_si512(_mm512_srli_epi32(h0, 16), h1);
    const __m512i r0 = _mm512_castps_si512(_mm512_sub_ps(p0, _mm512_castsi512_ps(h0)));
    const __m512i r1 = _mm512_castps_si512(_mm512_sub_ps(p1, _mm512_castsi512_ps(h1)));
    // The upper half of the second, beside that of the first: (r1 & top) | r0 >> 16.
    lo[i] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(_mm512_add_epi32(r0, half), 16), _mm512_add_epi32(r1, half),
                                      top, 0xF8);
  }
  _mm512_store_ps(stats + kEven * kTile, even);
  _mm512_store_ps(stats + kOdd * kTile, odd);
  if (chunk % 2 == 0) {
    FIRN_UNROLL
    for (int i = 0; i < 8; ++i) _mm512_store_si512(t->words + i * kTile, hi[i]);
    FIRN_UNROLL
    for (int i = 0; i < 8; ++i) _mm512_store_si512(t->words + (8 + i) * kTile, lo[i]);
    return;
  }
  char* out = t->p[j] + chunk / 2 * 2 * kTileBytes;
  store_transposed(t->words, hi, out);
  store_transposed(t->words + 8 * kTile, lo, out + kTileBytes);
}

// m and l of a finished pair, and the factors for its outputs.
void start_fold(const TileAttendArgs& a, Slot* t, int64_t j) {
  float *stats = t->stats[j], *triple = t->triple[j];
  const __m512 m = _mm512_mul_ps(_mm512_load_ps(stats + kLargest * kTile), _mm512_set1_ps(a.scale));
  const __m512 l = _mm512_add_ps(_mm512_load_ps(stats + kEven * kTile), _mm512_load_ps(stats + kOdd * kTile));
  if (a.fold) {
    merge_sums(triple, m, l, t->mask[j], stats + kKeep * kTile, stats + kTake * kTile);
  } else {
    _mm512_mask_storeu_ps(triple, static_cast<__mmask16>(t->mask[j]), m);
    _mm512_mask_storeu_ps(triple + 16, static_cast<__mmask16>(t->mask[j]), l);
  }
}

// Outputs of column c.
FIRN_INLINE void fold_column(const TileAttendArgs& a, Slot* t, int64_t j, int64_t c) {
  if ((t->mask[j] >> c & 1u) == 0) return;
  const float *from = t->o[j] + c * kTile, *stats = t->stats[j];
  float* to = t->triple[j] + 32 + c * a.dim;
  if (a.fold) {
    const __m512 keep = _mm512_set1_ps(stats[kKeep * kTile + c]), take = _mm512_set1_ps(stats[kTake * kTile + c]);
    for (int64_t d = 0; d < a.dim; d += kTile) merge_vector(to + d, from + d * kTile, keep, take);
  } else {
    for (int64_t d = 0; d < a.dim; d += kTile) _mm512_storeu_ps(to + d, _mm512_load_ps(from + d * kTile));
  }
}

// The vector work of a step, cut into as many even parts as there are turns beside it.
struct Work {
  const TileAttendArgs* a;
  Slot *soft, *outputs, *fold;
  char* paired;        // values of the block whose outputs are computed
  int64_t first_pair;  // of these, to pair anew
  bool once;           // no other pair of tiles meets that block: its values are paired as they are used
};

FIRN_INLINE void beside_scores(const Work& w, int64_t turn, int64_t turns) {
  if (w.outputs->n > 0) {
    const int64_t n = w.outputs->groups * kTile - w.first_pair;
    pair_values(w.outputs->values, w.outputs->n_keys, w.first_pair + n * turn / turns,
                w.first_pair + n * (turn + 1) / turns, w.a->dim, w.a->dim, w.paired);
  }
  for (int64_t j = 0; j < w.fold->n; ++j) {
    for (int64_t c = kTile * turn / turns; c < kTile * (turn + 1) / turns; ++c) fold_column(*w.a, w.fold, j, c);
  }
  for (int64_t j = 0; j < w.soft->n; ++j) {
    find_largest(w.soft, j, w.soft->n_keys * turn / turns, w.soft->n_keys * (turn + 1) / turns);
  }
}

FIRN_INLINE void beside_outputs(const Work& w, int64_t turn, int64_t turns) {
  const int64_t chunks = 2 * w.soft->groups, n = w.soft->n * chunks;
  for (int64_t i = n * turn / turns; i < n * (turn + 1) / turns; ++i) {
    soften(*w.a, w.soft, i < chunks ? 0 : 1, i < chunks ? i : i - chunks);
  }
}

// Lines of the next block's keys and values, brought to the second-level cache a few at a time: two ascending streams
// for the hardware's prefetcher to run ahead of. Bursts would fill the buffers that the tile loads need.
struct Ahead {
  const char* at = nullptr;
  int64_t values = 0;  // bytes from keys to values
  int64_t left = 0;    // lines of each
  int64_t lines = 0;   // of each a call
  FIRN_INLINE void some() {
    for (int64_t i = 0; i < lines && left > 0; ++i, --left, at += kLine) {
      _mm_prefetch(at, _MM_HINT_T1);
      _mm_prefetch(at + values, _MM_HINT_T1);
    }
  }
};
constexpr int64_t kAheadATurn = 4;  // calls

// Scores of keys [32 g, 32 g + 32), dims [32 d, 32 d + 32). The barrier keeps stores that the tile loads read before
// them: the compiler does not know what these read.
template <int kN>
FIRN_AMX FIRN_INLINE void score_turn(const Slot& t, int64_t g, int64_t d, int64_t row_bytes, Ahead* ahead) {
  __asm__ volatile("" ::: "memory");
  const char* keys = t.keys + g * kGroupKeys * row_bytes + d * kLine;
  _tile_loadd(6, t.q[0] + d * kTileBytes, 64);
  _tile_loadd(4, keys, row_bytes);
  ahead->some();
  _tile_dpbf16ps(0, 4, 6);
  ahead->some();
  if (kN > 1) {
    _tile_loadd(7, t.q[1] + d * kTileBytes, 64);
    _tile_dpbf16ps(2, 4, 7);
  }
  _tile_loadd(5, keys + kTile * row_bytes, row_bytes);
  ahead->some();
  _tile_dpbf16ps(1, 5, 6);
  if (kN > 1) _tile_dpbf16ps(3, 5, 7);
  ahead->some();
}

// Outputs of dims [32 d, 32 d + 32) over keys [32 g, 32 g + 32).
template <int kN>
FIRN_AMX FIRN_INLINE void output_turn(const Slot& t, const char* paired, int64_t g, int64_t d, int64_t row_bytes,
                                      Ahead* ahead) {
  __asm__ volatile("" ::: "memory");
  const char* values = paired + g * kGroupKeys * row_bytes + d * 2 * kTileBytes;
  _tile_loadd(6, values, 64);
  _tile_loadd(7, values + kTileBytes, 64);
  ahead->some();
  _tile_loadd(4, t.p[0] + 2 * g * kTileBytes, 64);
  _tile_dpbf16ps(0, 4, 6);
  ahead->some();
  _tile_dpbf16ps(1, 4, 7);
  if (kN > 1) {
    _tile_loadd(5, t.p[1] + 2 * g * kTileBytes, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_loadd(4, t.p[0] + (2 * g + 1) * kTileBytes, 64);
  ahead->some();
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  ahead->some();
  if (kN > 1) {
    _tile_loadd(5, t.p[1] + (2 * g + 1) * kTileBytes, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <int kN>
FIRN_AMX FIRN_INLINE void step_scores(const Work& w, const Slot& t, Ahead* ahead) {
  const int64_t row_bytes = w.a->dim * 2, dims = w.a->dim / 32, turns = t.groups * dims;
  for (int64_t g = 0, turn = 0; g < t.groups; ++g) {
    _tile_zero(0);
    _tile_zero(1);
    if (kN > 1) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t d = 0; d < dims; ++d, ++turn) {
      score_turn<kN>(t, g, d, row_bytes, ahead);
      beside_scores(w, turn, turns);
    }
    const int64_t at = g * kGroupKeys * kTile;
    _tile_stored(0, t.s[0] + at, 64);
    _tile_stored(1, t.s[0] + at + kTile * kTile, 64);
    if (kN > 1) {
      _tile_stored(2, t.s[1] + at, 64);
      _tile_stored(3, t.s[1] + at + kTile * kTile, 64);
    }
  }
}

template <int kN>
FIRN_AMX FIRN_INLINE void step_outputs(const Work& w, const Slot& t, Ahead* ahead) {
  const int64_t row_bytes = w.a->dim * 2, dims = w.a->dim / 32, turns = t.groups * dims;
  for (int64_t d = 0, turn = 0; d < dims; ++d) {
    _tile_zero(0);
    _tile_zero(1);
    if (kN > 1) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t g = 0; g < t.groups; ++g, ++turn) {
      output_turn<kN>(t, w.paired, g, d, row_bytes, ahead);
      beside_outputs(w, turn, turns);
    }
    const int64_t at = 2 * d * kTile * kTile;
    _tile_stored(0, t.o[0] + at, 64);
    _tile_stored(1, t.o[0] + at + kTile * kTile, 64);
    if (kN > 1) {
      _tile_stored(2, t.o[1] + at, 64);
      _tile_stored(3, t.o[1] + at + kTile * kTile, 64);
    }
  }
}

// Outputs of one tile that no other shares its block with, 64 dims at a time: values go through a few KiB that stay in
// the first-level cache, and weights are loaded half as often.
FIRN_AMX FIRN_INLINE void step_outputs_once(const Work& w, const Slot& t, Ahead* ahead) {
  const int64_t dim = w.a->dim, turns = t.groups * (dim / 64);
  for (int64_t d = 0, turn = 0; d < dim; d += 64) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t g = 0; g < t.groups; ++g, ++turn) {
      char* paired = w.paired + turn % 2 * 4 * kTileBytes;
      pair_values(t.values + g * kGroupKeys * dim * 2 + d * 2, t.n_keys - g * kGroupKeys, 0, kTile, dim, 64, paired);
      __asm__ volatile("" ::: "memory");
      _tile_loadd(4, t.p[0] + 2 * g * kTileBytes, 64);
      _tile_loadd(5, t.p[0] + (2 * g + 1) * kTileBytes, 64);
      _tile_loadd(6, paired, 64);
      _tile_dpbf16ps(0, 4, 6);
      ahead->some();
      _tile_dpbf16ps(0, 5, 6);
      _tile_loadd(7, paired + kTileBytes, 64);
      ahead->some();
      _tile_dpbf16ps(1, 4, 7);
      ahead->some();
      _tile_dpbf16ps(1, 5, 7);
      ahead->some();
      _tile_loadd(6, paired + 2 * kTileBytes, 64);
      _tile_dpbf16ps(2, 4, 6);
      ahead->some();
      _tile_dpbf16ps(2, 5, 6);
      ahead->some();
      _tile_loadd(7, paired + 3 * kTileBytes, 64);
      _tile_dpbf16ps(3, 4, 7);
      ahead->some();
      _tile_dpbf16ps(3, 5, 7);
      ahead->some();
      beside_outputs(w, turn, turns);
    }
    float* o = t.o[0] + d * kTile;
    _tile_stored(0, o, 64);
    _tile_stored(1, o + kTile * kTile, 64);
    _tile_stored(2, o + 2 * kTile * kTile, 64);
    _tile_stored(3, o + 3 * kTile * kTile, 64);
  }
}

FIRN_AMX void step(const Work& w, const Slot& scores, Ahead* ahead) {
  for (int64_t j = 0; j < w.fold->n; ++j) start_fold(*w.a, w.fold, j);
  for (int64_t j = 0; j < w.soft->n; ++j) start_softmax(w.soft, j);
  if (scores.n > 1) {
    step_scores<2>(w, scores, ahead);
  } else if (scores.n == 1) {
    step_scores<1>(w, scores, ahead);
  } else {
    beside_scores(w, 0, 1);
  }
  if (w.once) {
    step_outputs_once(w, *w.outputs, ahead);
  } else if (w.outputs->n > 1) {
    step_outputs<2>(w, *w.outputs, ahead);
  } else if (w.outputs->n == 1) {
    step_outputs<1>(w, *w.outputs, ahead);
  } else {
    beside_outputs(w, 0, 1);
  }
}

// Takes the next pair of items, or leaves the slot empty.
void fill_slot(const TileAttendArgs& a, int64_t* at, Slot* slot) {
  slot->n = 0;
  if (*at >= a.n_items) return;
  const TileItem* items = a.items + *at;
  slot->n = *at + 1 < a.n_items && items[1].keys == items[0].keys && items[1].n_keys == items[0].n_keys ? 2 : 1;
  slot->keys = static_cast<const char*>(items[0].keys);
  slot->values = static_cast<const char*>(items[0].values);
  slot->n_keys = items[0].n_keys;
  slot->groups = (slot->n_keys + kGroupKeys - 1) / kGroupKeys;
  for (int64_t j = 0; j < slot->n; ++j) {
    slot->q[j] = static_cast<const char*>(items[j].q);
    slot->triple[j] = items[j].triple;
    slot->mask[j] = items[j].mask;
  }
  *at += slot->n;
}

// The block after the one that begins at item `at`, over as many steps as the latter takes.
void look_ahead(const TileAttendArgs& a, int64_t at, Ahead* ahead) {
  const int64_t row_bytes = a.dim * 2;
  int64_t end = at;
  while (end < a.n_items && a.items[end].keys == a.items[at].keys) ++end;
  ahead->left = 0;
  if (end == a.n_items) return;
  ahead->at = static_cast<const char*>(a.items[end].keys);
  ahead->values = a.block_tokens * row_bytes;
  ahead->left = (a.items[end].n_keys * row_bytes + kLine - 1) / kLine;
  const int64_t turns = (end - at + 1) / 2 * 2 * ((a.block_tokens + kGroupKeys - 1) / kGroupKeys) * (a.dim / 32);
  ahead->lines = (ahead->left + kAheadATurn * turns - 1) / (kAheadATurn * turns);
}

FIRN_AMX void attend(const TileAttendArgs& a) {
  const TileConfig config;
  _tile_loadconfig(&config);
  const int64_t keys = (a.block_tokens + kGroupKeys - 1) / kGroupKeys * kGroupKeys;
  char* memory = static_cast<char*>(a.scratch);
  Slot slots[4];
  Work w = {};
  w.a = &a;
  w.paired = memory;
  memory += keys * a.dim * 2;
  for (Slot& slot : slots) {
    for (int j = 0; j < 2; ++j) {
      slot.s[j] = reinterpret_cast<float*>(memory);
      slot.p[j] = memory + keys * 64;
      slot.o[j] = reinterpret_cast<float*>(memory + 2 * keys * 64);
      slot.stats[j] = reinterpret_cast<float*>(memory + 2 * keys * 64 + a.dim * 64);
      memory += 2 * keys * 64 + a.dim * 64 + kStatistics * 64;
    }
    slot.words = reinterpret_cast<float*>(memory);
    memory += 1024;
  }
  Ahead ahead;
  int64_t at = 0, paired_keys = 0;
  const char *scored = nullptr, *paired = nullptr;
  for (uint64_t i = 0;; ++i) {
    Slot* scores = &slots[i % 4];
    w.soft = &slots[(i + 3) % 4];
    w.outputs = &slots[(i + 2) % 4];
    w.fold = &slots[(i + 1) % 4];
    if (at < a.n_items && a.items[at].keys != scored) {
      scored = static_cast<const char*>(a.items[at].keys);
      look_ahead(a, at, &ahead);
    }
    fill_slot(a, &at, scores);
    if (scores->n + w.soft->n + w.outputs->n + w.fold->n == 0) break;
    w.first_pair = w.outputs->groups * kTile;
    w.once = w.outputs->n == 1 && a.dim % 64 == 0 && w.outputs->values != paired &&
             (w.soft->n == 0 || w.soft->values != w.outputs->values);
    if (w.outputs->n > 0 && !w.once) {
      // Of the same block with more or fewer keys visible only the last pairs change.
      if (w.outputs->values != paired) {
        w.first_pair = 0;
      } else if (w.outputs->n_keys != paired_keys) {
        w.first_pair = (w.outputs->n_keys < paired_keys ? w.outputs->n_keys : paired_keys) / kGroupKeys * kTile;
      }
      paired = w.outputs->values;
      paired_keys = w.outputs->n_keys;
    }
    if (w.once) paired = nullptr;
    step(w, *scores, &ahead);
    w.fold->n = 0;
  }
  _tile_release();
}

}  // namespace

const AttentionTiles kAttentionTiles = {pack_queries, attend, merge, order_dims};

}  // namespace firn::cpu
