// Scratch of the row operations, for CpuOps::scratch_bytes().
#pragma once

#include "runtime/ops.h"

namespace firn::cpu {

int64_t rows_scratch_bytes(const Ops::Limits& limits, int n_threads);

}  // namespace firn::cpu
