// Products on matrix tiles (AMX-BF16) straight from stored weights: out[m, n] = x[m, k] * w[n, k]^T, fp32 sums.
//
// Weights are the left factor: blocks of 16 or 32 rows and a few hundred inputs are turned into bf16 in the first-level
// cache (exactly: a power of two or an E4M3 scale leaves at most eight significant bits) and meet every input row
// there. The next such block is made, and the weights after those are asked for from memory, between the tile
// instructions of the present one, so that a product costs the largest of memory, conversion and multiplication instead
// of their sum. Inputs are packed once a product (pack_x) and shared by all pieces of weights and all threads.
//
// An output is one chain: AMX sums over k ascending, in steps of 32, then one multiplication by `factor`. It does not
// depend on m, n or the other rows. REQUIRES: k a multiple of 32, n a multiple of 16, a CPU and kernel with AMX-BF16,
// AVX512_BF16 and VBMI (cpu/isa.h, Isa::kAmx).
#pragma once

#include <cstdint>

#include "cpu/linear_kernels.h"

namespace firn::cpu {

constexpr int64_t kAmxRows = 16;  // rows of a tile, of weights or of inputs
constexpr int64_t kAmxDims = 32;  // inputs of a tile

// Columns of a packed tile: a product of few rows is packed without padding.
inline int64_t amx_columns(int64_t m) { return m < kAmxRows ? m : kAmxRows; }
inline int64_t amx_packed_bytes(int64_t m, int64_t k) {
  const int64_t columns = amx_columns(m);
  return columns == 0 ? 0 : (m + columns - 1) / columns * columns * k * 2;
}
// Of gemm(), for calls of at most m rows; 64-byte aligned.
inline int64_t amx_scratch_bytes(int64_t m) { return 2 * 16 * 2112 + (m + kAmxRows - 1) / kAmxRows * 2048 + 4096; }

// Weight rows of one matrix; `format` is its number in the order of kUnit, not f32.
struct AmxWeights {
  WeightRows rows;
  int format = 1;
  float factor = 1;
  float* out = nullptr;  // out[i * out_stride + r]
};

struct AmxGemmArgs {
  AmxWeights w[2];  // w[1] has the rows.n of w[0]
  int n_w = 1;
  const void* x = nullptr;  // packed tiles from a row that is a multiple of kAmxRows on
  int64_t columns = 16;     // amx_columns() of the packed product
  int64_t m = 0, k = 0;
  int64_t out_stride = 0;
  void* scratch = nullptr;
  // What the thread reads after this call, or null: the first rows of the next call's matrices.
  const uint8_t* next_data[2] = {nullptr, nullptr};
  const uint8_t* next_scales[2] = {nullptr, nullptr};
};

struct AmxKernels {
  // Packs rows [0, m) of x (bf16, stride in elements) into tiles of `columns` rows; rows up to the next multiple of it
  // become zero. `fp4`: in the order that FP4 weights are read in.
  void (*pack_x)(const uint16_t* x, int64_t stride, int64_t m, int64_t k, int64_t columns, bool fp4, void* out);
  void (*gemm)(const AmxGemmArgs&);
};
const AmxKernels& amx_kernels();

}  // namespace firn::cpu
