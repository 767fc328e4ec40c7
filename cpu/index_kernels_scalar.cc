// Index kernels for the baseline.
#include "cpu/index_kernels_body.h"

namespace firn::cpu {

const IndexKernels kIndexScalar = kTable;

}  // namespace firn::cpu
