// Attention kernels of each instruction set: one table a level, plain data only, so that files compiled for a level can
// include this header. Where a CPU has matrix tiles, bf16 keys and values go through cpu/attention_tiles.h instead,
// whose triples are defined there and fold by the same merge().
//
// A block's triple of one query, over its first n_keys keys (all fp32; mul_add rounds once where the level has FMA):
//   s[t] = scale * (sum over dims ascending of q[d] * k[t][d])
//   m = largest s (a NaN is passed over here and comes back through p)
//   p[t] = exp_nonpositive(s[t] - m);  l = sum of p: kLanes partial sums, then a fixed tree
//   o[d] = sum over t ascending of p[t] * v[t][d]
// merge() then folds triples: m' = max, keep = exp(m - m'), take = exp(m_b - m'), l and o scaled and added, products
// rounded apart. Every element is one fixed chain of operations, so its bits do not depend on the other queries of a
// call, on chunks, on threads or on whether triples went through memory; only on the level.
//
// exp_nonpositive: for x <= 0; n = nearest(x / ln 2), polynomial of degree 7 on the rest; within 1.5 ulp of the exact
// value, 0 below -87.33 (the result would be subnormal) and at -inf; NaN stays NaN.
#pragma once

#include <cstdint>

namespace firn::cpu {

inline constexpr int64_t kAttendBatch = 16;  // queries a call of attend takes at most
inline constexpr int64_t kLanesMax = 16;     // of any level: paddings are multiples of it

struct AttendArgs {
  const float* const* q = nullptr;  // n_queries pointers to [dim]
  int64_t n_queries = 0;
  const float* keys = nullptr;    // packed: groups of the level's lanes, [dim][lanes] each
  const float* values = nullptr;  // [n_keys][dim_padded], zeros past dim
  int64_t n_keys = 0;             // visible keys: the same for all queries of a call; > 0
  int64_t dim = 0;
  int64_t dim_padded = 0;  // multiple of kLanesMax
  float scale = 0;
  float* weights = nullptr;    // scratch [n_queries][weights_stride]
  int64_t weights_stride = 0;  // >= n_keys rounded up to kLanesMax
  float* m = nullptr;          // out [n_queries]
  float* l = nullptr;          // out [n_queries]
  float* const* o = nullptr;   // out: n_queries pointers to [dim_padded]
};

struct AttentionKernels {
  // keys [n_keys, dim] of bf16 or f32, rows back to back -> packed; writes n_keys rounded up to the lanes times dim
  // floats.
  void (*pack_keys)(const void* keys, bool bf16, int64_t n_keys, int64_t dim, float* out);
  // rows [n, dim] of bf16 or f32 -> f32 [n, dim_padded] with zeros past dim.
  void (*widen)(const void* rows, bool bf16, int64_t n, int64_t dim, int64_t dim_padded, float* out);
  void (*attend)(const AttendArgs& args);
  // Folds (m_b, l_b, o_b[dim]) into (m, l, o[dim]); the running triple starts as (-inf, 0, 0). l_b == 0: nothing to
  // add.
  void (*merge)(float* m, float* l, float* o, float m_b, float l_b, const float* o_b, int64_t dim);
  // out[i] = o[i] / l (0 when l is 0), rounded to bf16 or f32.
  void (*finish)(float l, const float* o, int64_t dim, void* out, bool bf16);
  float (*exp_nonpositive)(float x);  // for tests
};

extern const AttentionKernels kAttentionScalar;
extern const AttentionKernels kAttentionAvx2;
extern const AttentionKernels kAttentionAvx512;

}  // namespace firn::cpu
