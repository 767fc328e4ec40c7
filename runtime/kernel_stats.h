// Counters an Ops implementation may keep; plain values, read between operations.
#pragma once

#include <cstdint>

namespace firn {

struct KernelStats {
  int64_t index_blocks_scored = 0;    // blocks that got a fast score
  int64_t index_blocks_rescored = 0;  // of these, undecided by the bound and rescored canonically
  int64_t index_copy_bytes = 0;       // of the keys' low-bit copy, read by the two-stage choice
  int64_t index_keys_refined = 0;     // keys that the two-stage choice then read in full
  int64_t nan_logits = 0;
};

}  // namespace firn
