// Attention kernels for AVX-512 (F, BW, DQ, VL).
#include "cpu/attention_kernels_body.h"

namespace firn::cpu {

const AttentionKernels kAttentionAvx512 = kTable;

}  // namespace firn::cpu
