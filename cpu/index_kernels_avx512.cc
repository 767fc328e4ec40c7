// Index kernels for AVX-512 (F, BW, DQ, VL).
#include "cpu/index_kernels_body.h"

namespace firn::cpu {

const IndexKernels kIndexAvx512 = kTable;

}  // namespace firn::cpu
