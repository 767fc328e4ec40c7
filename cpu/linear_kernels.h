// Inner kernels of linear layers and gated MLPs, one table an instruction set. Plain data only: the files that
// implement them are compiled with their own instruction sets and share no inline code with the rest.
//
// Lanes. Every dot product is 16 fp32 partial sums: lane i adds the products of inputs i, i + 16, i + 32, ... in that
// order, one (fused where the level has it) multiply-add each; the lanes are then added in a fixed tree (i with i + 8,
// then
// + 4, + 2, + 1) and the sum is multiplied once by out_scale. So an output depends on its own weight row and input row
// alone, bit for bit, whatever else is in the call. dot and dot_many share the rule and give the same bits.
//
// Units. A kernel works on weights divided by kUnit[format], a power of two that keeps every step exact and inside
// fp32's range for every scale byte; callers put kUnit back through out_scale. E4M3's NaN codes are not preserved (they
// read as 480): scales are checked at load, and no writer puts them in weights.
#pragma once

#include <cstdint>

namespace firn::cpu {

inline constexpr int kFormats = 5;  // order of WeightFormat: f32, bf16, mxfp8, nvfp4, mxfp4
inline constexpr float kUnit[kFormats] = {1.0f, 1.0f, 256.0f, 8.0f, 8.0f};
inline constexpr int64_t kXPad = 32;  // inputs are padded with zeros to a multiple of this

// Weight rows [0, n) of a matrix with k inputs. row_bytes and scale_row_bytes are from one row to the next.
struct WeightRows {
  const uint8_t* data;
  const uint8_t* scales;
  int64_t row_bytes;
  int64_t scale_row_bytes;
  int64_t n;
  int64_t k;
  const float* scale_table;  // [256], the value of a scale byte; unused by f32 and bf16
};

// out[m * out_stride + r] = out_scale * sum_c w[r, c] * x[m * x_stride + c]; x rows are padded to kXPad.
struct DotArgs {
  WeightRows w;
  const float* x;
  int64_t x_stride;
  int64_t n_x;  // dot: 1..8; dot_many: any
  float* out;
  int64_t out_stride;
  float out_scale;
};

// Writes w / kUnit as bf16 or f32 to out[r * out_stride + c]; f32 rows are padded with zeros to kXPad.
struct DequantiseArgs {
  WeightRows w;
  void* out;
  int64_t out_stride;  // elements
};

// out[i] = act(gate_scale * gate[i], up_scale * up[i]) by runtime/ops.h Activation.
struct ActivateArgs {
  const float* gate;
  const float* up;
  int64_t n;
  float gate_scale, up_scale;
  float alpha, beta, limit;
  float* out_f32;      // either this,
  uint16_t* out_bf16;  // or this
  bool round_to_bf16;  // with out_f32: store the bf16 value as f32
};

struct LinearKernels {
  const char* name;
  void (*dot[kFormats])(const DotArgs&);
  void (*dot_many)(const DotArgs&);  // f32 weights padded with zeros to kXPad, 64-byte aligned rows
  void (*dequantise_bf16[kFormats])(const DequantiseArgs&);
  void (*dequantise_f32[kFormats])(const DequantiseArgs&);
  void (*activate)(const ActivateArgs&);
  void (*widen)(const uint16_t* bf16, float* out, int64_t n);  // exact
  void (*scale)(float* values, int64_t n, float factor);       // in place
};

const LinearKernels& linear_kernels_scalar();
const LinearKernels& linear_kernels_avx2();
const LinearKernels& linear_kernels_avx512();

}  // namespace firn::cpu
