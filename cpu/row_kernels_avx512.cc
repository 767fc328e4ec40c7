// Row kernels for AVX-512 (F, BW, DQ, VL).
#include "cpu/simd_avx512.h"
// After the lanes, over which the kernels are written:
#include "cpu/row_kernels_impl.h"

namespace firn::cpu {

const RowKernels& row_kernels_avx512() { return kRowKernels; }

}  // namespace firn::cpu
