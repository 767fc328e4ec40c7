// Index kernels of each instruction set: one table a level, plain data only.
//
// How far a fast block maximum may lie from the canonical one (runtime/ops.h, IndexSelectParams). Let n = index_dim,
// u = 2^-24, eta = 2^-126, s the exact sum of q_i k_i, A the sum of |q_i k_i|, Q >= |q| and N >= |k| in the Euclidean
// norm; A <= Q N (Cauchy-Schwarz). Write gamma(d) = d u / (1 - d u).
//  1. Fast: fp32 products and sums in any order. A term passes through at most d roundings, each a factor (1 + e),
//     |e| <= u, and an absolute error of at most eta where a result underflows or is flushed to zero; there are at most
//     2 n + n roundings in all and what follows one enlarges its error by at most 1 + gamma(d) < 4/3. Inputs that a
//     matrix unit flushes to zero change the sum by at most eta sum (|q_i| + |k_i|) <= eta sqrt(n) (Q + N). So
//       |fast - s| <= gamma(d) Q N + eta (4 n + sqrt(n) (Q + N)).
//     d = n for the chains of fused multiply-adds (2 n at the baseline, which rounds products too); 2 n for tiles of
//     bf16 pairs, whose order inside the unit is not relied on.
//  2. Canonical: fp64 sums of exact products, then one rounding to fp32:
//       |canonical - s| <= (n 2^-53 / (1 - n 2^-53) + u (1 + n 2^-52)) Q N + 2^-149 <= 2 u Q N + eta.
//  3. A maximum over the same keys moves by no more than the largest of its terms.
// Hence |fast - canonical| <= gamma(d + 8) Q N + eta (4 n + 1 + sqrt(n) (Q + N)); 8 - 2 more roundings cover that the
// bound itself is evaluated in fp64 and its parts were rounded (N upwards, by index_append). The argument needs that
// nothing overflows: partial sums stay below (1 + gamma) Q N, so for Q N >= 2^120 (or NaN) no bound is claimed and the
// block is always rescored. NaN: with Q N finite a score is NaN exactly when its key holds a NaN, in both ways of
// computing, and a NaN never raises a maximum; such keys do not count for N.
#pragma once

#include <cstdint>

namespace firn::cpu {

struct BlockMaximaArgs {
  const void* const* blocks = nullptr;  // n_blocks pointers to keys [n_keys, dim], rows back to back
  int64_t n_blocks = 0;
  const void* next = nullptr;  // the block that will be read after these, or null: a place for prefetches
  int64_t n_keys = 0;          // of each block
  bool bf16 = true;
  int64_t dim = 0;
  const float* q = nullptr;  // [n_queries][dim]
  int64_t n_queries = 0;
  const void* q_tiles = nullptr;  // what pack_queries wrote; unused by levels without it
  void* scratch = nullptr;        // maxima_scratch_bytes(), 64-byte aligned
  float* out = nullptr;           // [n_blocks][out_stride]: the largest score, NaN scores passed over; -inf if none
  int64_t out_stride = 0;         // >= n_queries rounded up to 16
};

inline int64_t maxima_scratch_bytes(int64_t dim, int64_t n_queries) {
  return (64 * dim + 16 * (n_queries + 16) + 4 * 256) * 4;
}

struct IndexKernels {
  void (*block_maxima)(const BlockMaximaArgs& args);
  // Canonical maxima of one block for n_queries queries [n_queries][dim]; scratch holds maxima_scratch_bytes().
  void (*canonical)(const void* keys, bool bf16, int64_t n_keys, int64_t dim, const float* q, int64_t n_queries,
                    void* scratch, float* out);
  // Canonical scores of single keys for one query: out[n_keys].
  void (*scores)(const void* keys, bool bf16, int64_t n_keys, int64_t dim, const float* q, void* scratch, float* out);
  int64_t roundings_per_dim;  // d = roundings_per_dim * n
};

extern const IndexKernels kIndexScalar;
extern const IndexKernels kIndexAvx2;
extern const IndexKernels kIndexAvx512;

// Matrix-tile kernels for bf16 keys: dim a multiple of 32, n_keys a multiple of 16. Needs AMX-BF16 and tile state.
struct IndexTileKernels {
  // Bytes of the packed form of n_queries queries, and its making from f32 values that are exact in bf16.
  int64_t (*packed_query_bytes)(int64_t dim, int64_t n_queries);
  void (*pack_queries)(const float* q, int64_t n_queries, int64_t dim, void* out);
  void (*block_maxima)(const BlockMaximaArgs& args);
  int64_t roundings_per_dim;
};
extern const IndexTileKernels kIndexTiles;

}  // namespace firn::cpu
