// Row kernels for any CPU.
#include "cpu/simd_scalar.h"
// After the lanes, over which the kernels are written:
#include "cpu/row_kernels_impl.h"

namespace firn::cpu {

const RowKernels& row_kernels_scalar() { return kRowKernels; }

}  // namespace firn::cpu
