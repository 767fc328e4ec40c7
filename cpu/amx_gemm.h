// Products of many rows on matrix tiles (AMX-BF16): out[m, n] = x[m, k] * w[n, k]^T, fp32 sums.
//
// Weights are the left factor and are read as they lie, row after row: nothing of them is rearranged, which is what a
// general library spends most of its time on when an expert meets 70 tokens. Inputs are packed once a product (pack_x)
// and then shared by all tiles of weights and all threads. Sums of one output run over k in one fixed order whatever m
// and n. REQUIRES: k a multiple of 32, n a multiple of 16, a CPU and kernel with AMX-BF16 (cpu/isa.h).
#pragma once

#include <cstdint>

namespace firn::cpu {

constexpr int64_t kAmxRows = 16;  // input rows of one packed tile
constexpr int64_t kAmxDims = 32;  // inputs of one packed tile

inline int64_t amx_packed_bytes(int64_t m, int64_t k) { return (m + kAmxRows - 1) / kAmxRows * kAmxRows * k * 2; }

struct AmxGemmArgs {
  const void* w = nullptr;  // bf16 [n, k]
  int64_t w_row_bytes = 0;
  int64_t n = 0;
  const void* x = nullptr;  // packed tiles from a row that is a multiple of kAmxRows on
  int64_t m = 0, k = 0;
  float* out = nullptr;  // [m, n]
  int64_t out_stride = 0;
};

struct AmxKernels {
  // Packs rows [0, m) of x (bf16, stride in elements); rows up to the next multiple of kAmxRows become zero.
  void (*pack_x)(const uint16_t* x, int64_t stride, int64_t m, int64_t k, void* out);
  void (*gemm)(const AmxGemmArgs&);
};
const AmxKernels& amx_kernels();

}  // namespace firn::cpu
