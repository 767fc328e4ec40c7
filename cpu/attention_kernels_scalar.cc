// Attention kernels for the baseline.
#include "cpu/attention_kernels_body.h"

namespace firn::cpu {

const AttentionKernels kAttentionScalar = kTable;

}  // namespace firn::cpu
