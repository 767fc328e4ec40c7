// The tile kernels of amx_gemm.h: 32 weight rows x 32 input rows in four accumulators.
//
// Port arithmetic on Golden Cove, for 32 x 32 weights: four tile products take 64 cycles with 32 input rows, the tile
// loads for them 32; converting MXFP8 takes 14 vector instructions for 64 weights on two ports, 112 cycles. Done one
// after the other that would be 176, interleaved it is 112; the more input rows, the more of it hides.
#include "cpu/amx_gemm.h"
#include "cpu/matrix_tiles.h"
#include "cpu/weight_units.h"

namespace firn::cpu {
namespace {

// A converted block: kGroup weight tiles by kDims inputs. Two tiles share every load of inputs, and their block stays
// in the first-level cache while all input rows pass. One tile is for up to 16 input rows, when memory decides: half a
// KiB or one in a row is what the hardware's prefetcher needs to run ahead (with 256 bytes it reached two thirds of
// it).
template <class Units, int kGroup>
struct Block {
  static constexpr int64_t kDims = kGroup == 2 ? 256 : 512;
  static constexpr int64_t kRowBytes = kDims * 2 + (kGroup == 2 ? 0 : 64);  // rows 2 KiB apart would share cache sets
  static constexpr int64_t kBytes = kGroup * kTile * kRowBytes;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline __mmask16 first_words(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

// Pair of inputs that stands at place p of 32: as they come, or as fp4_words gives the weights.
inline int64_t pair_at(int64_t p, bool fp4) { return fp4 ? p / 2 % 2 * 8 + p / 4 * 2 + p % 2 : p; }

// [row tile][dim tile][pair of dims][column][2]
void pack_x(const uint16_t* x, int64_t stride, int64_t m, int64_t k, int64_t columns, bool fp4, void* out) {
  char* to = static_cast<char*>(out);
  const __mmask16 mask = first_words(columns);
  for (int64_t first = 0; first < m; first += columns) {
    for (int64_t d = 0; d < k; d += kAmxDims) {
      __m512i r[16];
      for (int64_t i = 0; i < kTile; ++i) {
        r[i] = i < columns && first + i < m ? _mm512_loadu_si512(x + (first + i) * stride + d) : _mm512_setzero_si512();
      }
      transpose_words(r);
      for (int64_t i = 0; i < kTile; ++i, to += columns * 4) {
        _mm512_mask_storeu_epi32(to, mask, r[pair_at(i, fp4)]);
      }
    }
  }
}

// --- Blocks ---

// Rows of one weight tile that become rows of a block. `ahead` is what is asked for as they pass.
struct Rows {
  const uint8_t* data;
  const uint8_t* scales;
  const uint8_t* ahead;  // as far from row to row as data
  char* block;
};

// kUnits units from unit `first` of the row on.
template <class Units, int kUnits>
FIRN_INLINE void convert_units(const Rows& r, int64_t first) {
#pragma GCC unroll 4
  for (int64_t u = first; u < first + kUnits; ++u) {
    __m512i a, b;
    Units::convert(r.data + u * Units::kBytes, r.scales + u * Units::kScales, a, b);
    _mm512_store_si512(r.block + u * 128, a);
    _mm512_store_si512(r.block + u * 128 + 64, b);
    if (Units::kBytes >= 64 || u % 2 == 0) prefetch(r.ahead + u * Units::kBytes);
    if (Units::kBytes > 64) prefetch(r.ahead + u * Units::kBytes + 64);
  }
}

template <class B>
FIRN_INLINE void next_row(Rows& r, int64_t row_bytes, int64_t scale_row_bytes) {
  r.data += row_bytes;
  r.scales += scale_row_bytes;
  r.ahead += row_bytes;
  r.block += B::kRowBytes;
}

// n rows of the last inputs, fewer than a block's.
template <class Units, class B>
void convert_short_rows(Rows r, int64_t n, int64_t dims, int64_t row_bytes, int64_t scale_row_bytes) {
  for (; n > 0; --n) {
    int64_t u = 0;
    for (; u < dims / kUnitDims; ++u) convert_units<Units, 1>(r, u);
    if (dims % kUnitDims != 0) {
      __m512i a;
      Units::convert_half(r.data + u * Units::kBytes, r.scales + u * Units::kScales, a);
      _mm512_store_si512(r.block + u * 128, a);
    }
    next_row<B>(r, row_bytes, scale_row_bytes);
  }
}

// What passes over a block work on in between: rows of the next block.
struct NextRows {
  Rows first, second;  // of a group of two: of the first and of the second half of the steps
  int64_t row_bytes, scale_row_bytes;
};

// kW weight tiles times kX input tiles over one block. In between each step converts kRows rows of the next block,
// which is a group of two, or (kHalves) eight units of one.
constexpr int kHalves = -1;
template <int kW, int kX, int kRows, class Units, class B>
FIRN_AMX FIRN_INLINE void multiply(const char* w, const char* x, int64_t x_step, int64_t columns, int64_t steps,
                                   const NextRows& next) {
  const int64_t x_bytes = columns * 4, x_tile_bytes = columns * 64;
  const auto step = [&]() __attribute__((always_inline, target("amx-tile,amx-bf16"))) {
    _tile_loadd(6, x, x_bytes);
    _tile_loadd(4, w, B::kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if (kX > 1) {
      _tile_loadd(7, x + x_step, x_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kW > 1) {
      _tile_loadd(5, w + kTile * B::kRowBytes, B::kRowBytes);
      _tile_dpbf16ps(2, 5, 6);
      if (kX > 1) _tile_dpbf16ps(3, 5, 7);
    }
    x += x_tile_bytes;
    w += 64;
  };
  Rows rows = next.first;
  if constexpr (kRows == 0) {
    for (int64_t d = 0; d < steps; ++d) step();
  } else if constexpr (kRows == kHalves) {
    for (int64_t row = 0; row < kTile; ++row) {
      for (int64_t part = 0; part < B::kDims / (8 * kUnitDims); ++part) {
        step();
        convert_units<Units, 8>(rows, part * 8);
      }
      next_row<B>(rows, next.row_bytes, next.scale_row_bytes);
    }
  } else {
    for (int half = 0; half < 2; ++half) {
      for (int64_t d = 0; d < B::kDims / kAmxDims / 2; ++d) {
        step();
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
          convert_units<Units, B::kDims / kUnitDims>(rows, 0);
          next_row<B>(rows, next.row_bytes, next.scale_row_bytes);
        }
      }
      rows = next.second;
    }
  }
}

// Accumulators 0..3 are (weight tile, input tile) 00, 01, 10, 11; in memory [input tile][weight tile].
template <int kW, int kX>
FIRN_AMX FIRN_INLINE void load_sums(const float* c, int64_t columns) {
  _tile_loadd(0, c, columns * 4);
  if (kX > 1) _tile_loadd(1, c + 512, columns * 4);
  if (kW > 1) _tile_loadd(2, c + 256, columns * 4);
  if (kW > 1 && kX > 1) _tile_loadd(3, c + 768, columns * 4);
}
template <int kW, int kX>
FIRN_AMX FIRN_INLINE void zero_sums() {
  _tile_zero(0);
  if (kX > 1) _tile_zero(1);
  if (kW > 1) _tile_zero(2);
  if (kW > 1 && kX > 1) _tile_zero(3);
}
template <int kW, int kX>
FIRN_AMX FIRN_INLINE void store_sums(float* c, int64_t columns) {
  _tile_stored(0, c, columns * 4);
  if (kX > 1) _tile_stored(1, c + 512, columns * 4);
  if (kW > 1) _tile_stored(2, c + 256, columns * 4);
  if (kW > 1 && kX > 1) _tile_stored(3, c + 768, columns * 4);
}

// c holds one accumulator [16 outputs][columns]; rows of it are written out.
inline void put(const float* c, int64_t columns, int64_t rows, float factor, float* out, int64_t out_stride) {
  const __m512 by = _mm512_set1_ps(factor);
  const __mmask16 mask = first_words(columns);
  __m512i r[16];
  for (int64_t i = 0; i < kTile; ++i) {
    r[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask, c + i * columns), by));
  }
  transpose_words(r);
  for (int64_t i = 0; i < rows; ++i) _mm512_storeu_si512(out + i * out_stride, r[i]);
}

template <int kW, int kX, int kRows, class Units, class B>
FIRN_AMX void pass(const AmxGemmArgs& a, const char* w, const char* x, int64_t steps, bool first, bool last, float* c,
                   const NextRows& next) {
  const int64_t columns = a.columns, x_step = a.k / kAmxDims * columns * 64;
  const bool keep = a.m <= 2 * kTile;  // up to 32 rows are one pass a block: the sums stay where they are
  // Stores of the block stay before the tile loads, tile stores before what reads the sums.
  __asm__ volatile("" ::: "memory");
  if (first) {
    zero_sums<kW, kX>();
  } else if (!keep) {
    load_sums<kW, kX>(c, columns);
  }
  multiply<kW, kX, kRows, Units, B>(w, x, x_step, columns, steps, next);
  if (last || !keep) store_sums<kW, kX>(c, columns);
  __asm__ volatile("" ::: "memory");
}

template <int kW, int kX, class Units, class B, class... Args>
FIRN_INLINE void pass_with_rows(int rows, Args&&... args) {
  if (rows == 0) return pass<kW, kX, 0, Units, B>(args...);
  if constexpr (B::kBytes == B::kRowBytes * kTile) {
    pass<kW, kX, kHalves, Units, B>(args...);
  } else {
    switch (rows) {
      case 1:
        return pass<kW, kX, 1, Units, B>(args...);
      case 2:
        return pass<kW, kX, 2, Units, B>(args...);
      default:
        return pass<kW, kX, 4, Units, B>(args...);
    }
  }
}

template <class Units, int kGroup>
class Run {
 public:
  explicit Run(const AmxGemmArgs& args)
      : a_(args),
        shape_(args.w[0].rows),
        tiles_(shape_.n / kTile * a_.n_w),
        groups_((tiles_ + kGroup - 1) / kGroup),
        dim_blocks_((a_.k + B::kDims - 1) / B::kDims),
        x_tiles_((a_.m + a_.columns - 1) / a_.columns),
        blocks_(static_cast<char*>(a_.scratch)),
        sums_(reinterpret_cast<float*>(blocks_ + 2 * B::kBytes)) {}

  void all() {
    convert(0);
    for (int64_t i = 0; i < groups_ * dim_blocks_; ++i) block(i);
  }

 private:
  using B = Block<Units, kGroup>;

  // With two matrices their tiles alternate, so that a group of two is the same rows of both.
  int64_t matrix_of(int64_t t) const { return a_.n_w == 2 ? t & 1 : 0; }
  int64_t row_of(int64_t t) const { return (a_.n_w == 2 ? t >> 1 : t) * kTile; }
  int64_t dims_of(int64_t i) const { return least(B::kDims, a_.k - i % dim_blocks_ * B::kDims); }
  int64_t tiles_of(int64_t i) const { return least(kGroup, tiles_ - i / dim_blocks_ * kGroup); }

  const uint8_t* data_of(int64_t t) const {
    if (t < tiles_) return a_.w[matrix_of(t)].rows.data + row_of(t) * shape_.row_bytes;
    const uint8_t* const next = a_.next_data[matrix_of(t - tiles_)];
    return next == nullptr ? nullptr : next + row_of(t - tiles_) * shape_.row_bytes;
  }
  const uint8_t* scales_of(int64_t t) const {
    if (t < tiles_) return a_.w[matrix_of(t)].rows.scales + row_of(t) * shape_.scale_row_bytes;
    const uint8_t* const next = a_.next_scales[matrix_of(t - tiles_)];
    return next == nullptr ? nullptr : next + row_of(t - tiles_) * shape_.scale_row_bytes;
  }

  // Tile j of block i's group. While it is converted the same rows' next block is asked for (the next tile's bytes one
  // after another, 100 to 400 KB ahead, measured worse: they do not last in the second-level cache until their use).
  Rows rows_of(int64_t i, int64_t j) const {
    const int64_t t = i / dim_blocks_ * kGroup + j, b = i % dim_blocks_;
    constexpr int64_t kBytes = B::kDims / kUnitDims * Units::kBytes;
    constexpr int64_t kScales = B::kDims / kUnitDims * Units::kScales;
    Rows r = {data_of(t) + b * kBytes, scales_of(t) + b * kScales, nullptr,
              blocks_ + (i & 1) * B::kBytes + j * kTile * B::kRowBytes};
    const int64_t then = t + kGroup;
    r.ahead = b + 1 < dim_blocks_ ? r.data + kBytes : data_of(then);
    if (r.ahead == nullptr) r.ahead = r.data;  // nothing to ask for
    if (Units::kScales > 0 && b * kScales % 64 == 0 && scales_of(then) != nullptr) {
      // A line of scales serves several blocks.
      const uint8_t* const scales = scales_of(then) + b * kScales;
      for (int64_t o = 0; o < kTile; ++o) prefetch(scales + o * shape_.scale_row_bytes);
    }
    return r;
  }

  void convert(int64_t i) const {
    for (int64_t j = 0; j < tiles_of(i); ++j) {
      Rows r = rows_of(i, j);
      if (dims_of(i) == B::kDims) {
        for (int64_t o = 0; o < kTile; ++o) {
          convert_units<Units, B::kDims / kUnitDims>(r, 0);
          next_row<B>(r, shape_.row_bytes, shape_.scale_row_bytes);
        }
      } else {
        convert_short_rows<Units, B>(r, kTile, dims_of(i), shape_.row_bytes, shape_.scale_row_bytes);
      }
    }
  }

  Rows skip(Rows r, int64_t rows) const {
    r.data += rows * shape_.row_bytes;
    r.scales += rows * shape_.scale_row_bytes;
    r.ahead += rows * shape_.row_bytes;
    r.block += rows * B::kRowBytes;
    return r;
  }

  FIRN_AMX void block(int64_t i) const {
    const int64_t group = i / dim_blocks_, k0 = i % dim_blocks_ * B::kDims, dims = dims_of(i);
    const int64_t n_tiles = tiles_of(i), passes = (x_tiles_ + 1) / 2;
    const bool first = k0 == 0, last = k0 + B::kDims >= a_.k, more = i + 1 < groups_ * dim_blocks_;
    // Full blocks of full groups are converted in between: one tile in one pass, two in the eight steps of up to four.
    const bool between = more && dims == B::kDims && dims_of(i + 1) == B::kDims && tiles_of(i + 1) == kGroup;
    int rows_a_step = 0;
    Rows tiles[2] = {};
    if (between) {
      rows_a_step = passes == 1 ? 4 : passes < 4 ? 2 : 1;
      for (int j = 0; j < kGroup; ++j) tiles[j] = rows_of(i + 1, j);
    }
    const char* const w = blocks_ + (i & 1) * B::kBytes;
    for (int64_t p = 0; p < passes; ++p) {
      const int64_t t = 2 * p;
      const char* const x = static_cast<const char*>(a_.x) + (t * a_.k + k0) * a_.columns * 2;
      float* const c = sums_ + t * 512;
      NextRows next = {{}, {}, shape_.row_bytes, shape_.scale_row_bytes};
      int rows = rows_a_step;
      const int64_t begin = p * 8 * rows, half = 4 * rows;  // rows of the next block this pass begins with
      if (kGroup == 1) {
        next.first = tiles[0];
      } else if (begin >= kGroup * kTile) {
        rows = 0;
      } else if (rows > 0) {
        next.first = skip(tiles[begin / kTile], begin % kTile);
        next.second = skip(tiles[(begin + half) / kTile], (begin + half) % kTile);
      }
      const int64_t steps = dims / kAmxDims;
      if (kGroup == 2 && n_tiles == 2) {
        if (t + 1 < x_tiles_) {
          pass_with_rows<2, 2, Units, B>(rows, a_, w, x, steps, first, last, c, next);
        } else {
          pass_with_rows<2, 1, Units, B>(rows, a_, w, x, steps, first, last, c, next);
        }
      } else if (t + 1 < x_tiles_) {
        pass_with_rows<1, 2, Units, B>(rows, a_, w, x, steps, first, last, c, next);
      } else {
        pass_with_rows<1, 1, Units, B>(rows, a_, w, x, steps, first, last, c, next);
      }
      if (!last) continue;
      for (int64_t u = t; u < least(t + 2, x_tiles_); ++u) {
        for (int64_t j = 0; j < n_tiles; ++j) {
          const int64_t tile = kGroup * group + j;
          const AmxWeights& to = a_.w[matrix_of(tile)];
          put(sums_ + (u * 2 + j) * 256, a_.columns, least(a_.columns, a_.m - u * a_.columns), to.factor,
              to.out + u * a_.columns * a_.out_stride + row_of(tile), a_.out_stride);
        }
      }
    }
    if (more && !between) convert(i + 1);
  }

  const AmxGemmArgs& a_;
  const WeightRows& shape_;
  const int64_t tiles_, groups_, dim_blocks_, x_tiles_;
  char* const blocks_;
  float* const sums_;
};

template <class Units>
void run_by_rows(const AmxGemmArgs& a) {
  if (a.m <= kTile) {
    Run<Units, 1>(a).all();
  } else {
    Run<Units, 2>(a).all();
  }
}

FIRN_AMX void gemm(const AmxGemmArgs& a) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    if (t != 4 && t != 5) config.bytes_per_row[t] = static_cast<uint16_t>(a.columns * 4);
  }
  _tile_loadconfig(&config);
  switch (a.w[0].format) {
    case 1:
      run_by_rows<Bf16Units>(a);
      break;
    case 2:
      run_by_rows<Mxfp8Units>(a);
      break;
    case 3:
      run_by_rows<Nvfp4Units>(a);
      break;
    default:
      run_by_rows<Mxfp4Units>(a);
  }
  _tile_release();
}

}  // namespace

const AmxKernels& amx_kernels() {
  static constexpr AmxKernels kTable = {pack_x, gemm};
  return kTable;
}

}  // namespace firn::cpu
