// The low-bit copy of index keys: its layout, its error bound, the kernels that score it.
//
// Keys lie in groups of 16. A group is 64 bytes for every eight dims (a "chunk"; dims past the last are padding), then
// 16 bf16 scales s and 16 bf16 bounds r. Byte 4 i + j of chunk c holds, of the group's key i, dim 8 c + j in the low
// four bits and dim 8 c + 4 + j in the high ones, as u in 0..15 standing for k' = s (u - 7.5); r >= |k - k'|. So a
// vector of bytes is, after one mask or shift, what 8-bit dot-product instructions take, one key a 32-bit lane.
// A key that holds a NaN has r = NaN.
//
// How far a score from the copy may lie from the canonical one (runtime/ops.h, IndexSelectParams). The query is rounded
// to q' = 2 c x, x integers in -127..127, with R >= |q - q'| and Q >= |q|; N >= |k| is the block's norm bound. Then
//     q k - q' k' = q (k - k') + (q - q') k',  |q k - q' k'| <= Q r + R |k'| <= Q r + R (N + r)     (Cauchy-Schwarz).
// q' k' = s c I, where I = 2 sum(u x) - 15 sum(x) is exact in integers, and in fp32 while 15 * 127 * dim < 2^24. With
// u = 2^-24: the two products that make s c I out of fp32 numbers round twice, the sum of approximation and width and
// the width itself three times more, the canonical score lies within 2 u Q N + 2^-149 of q k (cpu/index_kernels.h);
// every one of these is relative to no more than (Q + R) (N + r), so 8 u (Q + R) (N + r) covers them and 2^-20 is twice
// that. Where s c falls below the normal numbers its error of at most 2^-126 is multiplied by |I| < 2^24; 2^-100 covers
// that and the rest that underflows. So
//     canonical <= s c I + (a r + b),  a = (Q + R) (1 + 2^-20),  b = R N + 2^-20 (Q + R) N + 2^-100,
// a and b rounded upwards. As in index_kernels.h nothing is claimed where (Q + R) N is not below 2^120: there every key
// counts as undecided. The upper end of a NaN key is NaN, which passes no comparison: such a key never counts.
#pragma once

#include <cstdint>

namespace firn::cpu {

inline constexpr int64_t kCopyGroup = 16;     // keys
inline constexpr int64_t kCopyMaxDim = 8192;  // 15 * 127 * dim < 2^24
inline constexpr int64_t kCopyMaxQueries = 16;

inline int64_t copy_chunks(int64_t dim) { return (dim + 7) / 8; }
inline int64_t copy_group_bytes(int64_t dim) { return (copy_chunks(dim) + 1) * 64; }

// Writes one key into the copy of its block, at place `slot`.
void write_index_copy(const void* key, bool bf16, int64_t dim, void* copy, int64_t slot);

// A query as the copy's kernels take it: x holds 8 * copy_chunks(dim) values. False where no bound can be claimed.
struct CopyQuery {
  double norm = 0;      // Q
  double residual = 0;  // R
  float c = 0;
  int32_t sum15 = 0;  // 15 sum(x)
  float a = 0;
  bool bounded = false;
};
CopyQuery round_query(const float* q, int64_t dim, int8_t* x);
// b of a block whose norm bound is k_norm, or infinity where none is claimed.
float copy_width(const CopyQuery& query, double k_norm);

struct CopyScanArgs {
  const void* copy = nullptr;   // of one block
  const void* ahead = nullptr;  // memory to be read later, as much as the block's copy; may be null
  int64_t n_groups = 0;
  int64_t chunks = 0;
  int64_t n_queries = 0;      // <= kCopyMaxQueries
  const int8_t* x = nullptr;  // [n_queries][8 * chunks]
  const int32_t* sum15 = nullptr;
  const float *c = nullptr, *a = nullptr, *b = nullptr;
  float* upper = nullptr;  // [n_queries][16 * n_groups]: upper ends, NaN for NaN keys
  // The largest approximation and the largest upper end of each query, NaN passed over.
  float *largest = nullptr, *largest_upper = nullptr;
};

struct IndexCopyKernels {
  void (*scan)(const CopyScanArgs& args);
  // Appends first + i and upper[i] where upper[i] >= threshold; n a multiple of 16, room for n. Returns how many.
  int64_t (*collect)(const float* upper, int64_t n, float threshold, uint32_t first, uint32_t* keys, float* uppers);
};

extern const IndexCopyKernels kIndexCopyScalar;
extern const IndexCopyKernels kIndexCopyAvx2;
extern const IndexCopyKernels kIndexCopyAvx512;
extern const IndexCopyKernels kIndexCopyVnni;  // AVX-512 with VNNI

}  // namespace firn::cpu
