// Index kernels for AVX2 and FMA.
#include "cpu/index_kernels_body.h"

namespace firn::cpu {

const IndexKernels kIndexAvx2 = kTable;

}  // namespace firn::cpu
