// Attention kernels for AVX2 and FMA.
#include "cpu/attention_kernels_body.h"

namespace firn::cpu {

const AttentionKernels kAttentionAvx2 = kTable;

}  // namespace firn::cpu
