// The exact choice of blocks in two stages, for few queries over many blocks: all keys are scored from their low-bit
// copy, and only single keys whose upper end reaches the threshold are read in full.
//
// The threshold T of a query is the places-th largest of exact scores of keys in distinct blocks, so at least `places`
// blocks have a canonical maximum of T or more, and a key whose upper end (cpu/index_copy.h) is below T is in none of
// the chosen maxima. Every thread keeps such a T for the blocks it has passed: where a block's largest approximation
// is above it, the block's most promising key is scored canonically on the spot. Keys whose upper end reached the T of
// their time are kept as candidates; in the end T is taken over all threads, the candidates that still reach it are
// scored canonically, and the blocks are ranked by these scores alone. What is scored beyond need depends on the
// threads, the choice does not.
//
// Some queries are left to the scan of full keys: no bound can be claimed (norms near overflow), fewer blocks than
// places have a score at all, or too many keys lie within the bound for the candidates' memory.
#pragma once

#include "cpu/attention_rows.h"
#include "cpu/index_copy.h"
#include "cpu/index_kernels.h"
#include "cpu/isa.h"
#include "runtime/thread_team.h"

namespace firn::cpu {

const IndexKernels& index_kernels_of(Isa isa);
const IndexCopyKernels& index_copy_kernels_of(Isa isa);

// Whether the copy of such a layout can be scored at all.
bool two_stage_possible(const IndexSelectParams& p, const RowTile& tile);
// Blocks every row of the tile may choose from are [first, last).
struct CommonBlocks {
  int64_t first = 0, last = 0;
};
CommonBlocks common_blocks(const IndexSelectParams& p, const RowTile& tile);
int64_t two_stage_bytes(int64_t queries, int64_t dim, int64_t block_tokens, int64_t topk, int64_t blocks,
                        int n_threads);

struct TwoStageCounts {
  int64_t blocks_scored = 0, copy_bytes = 0, keys_refined = 0;
};

// Writes the lists of the tile's rows and returns true, or leaves them to the caller. REQUIRES two_stage_possible().
bool select_two_stage(const IndexSelectParams& p, const RowTile& tile, Isa isa, ThreadTeam& team, std::byte* scratch,
                      TwoStageCounts* counts);

}  // namespace firn::cpu
