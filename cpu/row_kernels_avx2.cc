// Row kernels for AVX2 and FMA.
#include "cpu/simd_avx2.h"
// After the lanes, over which the kernels are written:
#include "cpu/row_kernels_impl.h"

namespace firn::cpu {

const RowKernels& row_kernels_avx2() { return kRowKernels; }

}  // namespace firn::cpu
