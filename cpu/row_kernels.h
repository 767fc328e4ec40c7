// Row kernels: what norms, rotary positions, sums and the router do to one row (or a tile of rows), per instruction
// set.
//
// POD only: this header is included by files compiled for AVX2 and AVX-512. Every kernel exists once, in
// row_kernels_impl.h, over 16 fp32 lanes: sums go element i -> lane i mod 16, then the lanes are added as a fixed tree,
// so a result depends on its own row and on nothing else. Addresses may be unaligned. `_bf16` flags say that the array
// beside them holds bf16 instead of f32; values are rounded once, to nearest even, when they are stored.
#pragma once

#include <stdint.h>

namespace firn::cpu {

// out[i] = x[i] * scale * (offset + weight[i])
struct NormRowArgs {
  const void* x;
  const void* weight;
  void* out;
  int64_t n;
  float scale;
  float offset;
  bool x_bf16, weight_bf16, out_bf16;
};

// One head: RMS norm over dim, then the first 2 * half dims rotated by cos/sin[half].
struct NormRopeArgs {
  const float* x;
  const void* weight;
  const float* cos;
  const float* sin;
  void* out;
  int64_t dim;
  int64_t half;
  float offset;
  float eps;
  bool weight_bf16, out_bf16;
};

// logits[m][e] = sum_i gate[e][i] * x[m][i] for m < rows, e < experts, both at most kRouterTile.
struct RouterTileArgs {
  const void* x;     // first row
  const void* gate;  // first expert
  float* logits;     // first entry
  int64_t n;
  int64_t x_stride_bytes, gate_stride_bytes, logits_stride;
  int64_t rows, experts;
  bool x_bf16, gate_bf16;
};
inline constexpr int64_t kRouterTile = 4;

struct RowKernels {
  float (*sum_squares)(const void* x, bool x_bf16, int64_t n);
  void (*norm_row)(const NormRowArgs& args);
  void (*norm_rope_head)(const NormRopeArgs& args);
  void (*convert)(void* out, bool out_bf16, const void* in, bool in_bf16, int64_t n);
  // h = round(h + y)
  void (*add)(void* h, bool h_bf16, const float* y, int64_t n);
  // acc += weight * y
  void (*scale_add)(float* acc, const float* y, float weight, int64_t n);
  // h = round(h + (scale * acc + shared)); acc = 0. acc and shared may be null.
  void (*finish)(void* h, bool h_bf16, float* acc, const float* shared, float scale, int64_t n);
  void (*router_tile)(const RouterTileArgs& args);
};

const RowKernels& row_kernels_scalar();
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();

}  // namespace firn::cpu
