// Products of one or a few bf16 rows with stored weights, for CPUs with AVX512_BF16 and VBMI: what a decode step is
// made of.
//
// Each weight row is one stream from memory, asked for a fixed distance ahead, converted to bf16 in registers (the FP4
// formats: looked up unscaled, their scales meet the fp32 sums) and multiplied with every input row by VDPBF16PS.
//
// Lanes. An output is 16 fp32 partial sums of one fixed chain over k, added in the fixed tree of linear_kernels.h and
// multiplied once by out_scale: it depends on its own weight row and input row alone, bit for bit. VDPBF16PS reads
// subnormal inputs as zero. Weights are in units of kUnit; E8M0 scales below 2^-109 count as zero in MXFP8.
#pragma once

#include <cstdint>

#include "cpu/linear_kernels.h"

namespace firn::cpu {

struct Bf16DotArgs {
  WeightRows w;
  const uint16_t* x = nullptr;  // bf16 rows; for the FP4 formats what order_fp4 made of them
  int64_t x_stride = 0;
  int64_t n_x = 0;  // 1..8
  float* out = nullptr;
  int64_t out_stride = 0;
  float out_scale = 1;
};

struct Bf16DotKernels {
  void (*dot[kFormats])(const Bf16DotArgs&);  // null for f32
  // The order the FP4 kernels read inputs in; k a multiple of 16, out holds k rounded up to 32, zeros past k.
  void (*order_fp4)(const uint16_t* x, int64_t k, uint16_t* out);
};
const Bf16DotKernels& bf16_dot_kernels();

}  // namespace firn::cpu
