// Linear kernels for AVX-512 F, BW, DQ and VL.
#include "cpu/linear_kernels_avx512_inl.h"

namespace firn::cpu {

const LinearKernels& linear_kernels_avx512() {
  static constexpr LinearKernels kTable = {
      "avx512",
      {dot<F32>, dot<Bf16Weights>, dot<Mxfp8>, dot<Nvfp4>, dot<Mxfp4>},
      dot_many,
      {dequantise_bf16<F32>, dequantise_bf16<Bf16Weights>, dequantise_bf16<Mxfp8>, dequantise_bf16<Nvfp4>,
       dequantise_bf16<Mxfp4>},
      {dequantise_f32<F32>, dequantise_f32<Bf16Weights>, dequantise_f32<Mxfp8>, dequantise_f32<Nvfp4>,
       dequantise_f32<Mxfp4>},
      activate,
      widen,
      scale,
  };
  return kTable;
}

}  // namespace firn::cpu
