// ReferenceOps: the scalar oracle. Every operation of Ops written from the specification as plainly as possible, in
// double precision inside an operation, rounded to the view's type at its end. Slow on purpose; every other kernel is
// checked against it. It needs no thread team and depends on no other code of cpu/.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "runtime/ops.h"

namespace firn::cpu {

std::unique_ptr<Ops> make_reference_ops(Arena* arena);

// Dequantises row r of a weight matrix to float, tensor_scale included: the oracle of every weight format.
void reference_dequantise_row(const WeightView& w, int64_t r, float* out);

// The clamped activation of Activation's comment, in double; NaN passes through.
double reference_activation(const Activation& a, double gate, double up);

// M[b] of one query by the canonical definition: key products summed in fp64 in dim order, rounded to fp32, maximum
// over the first n_visible keys of each block.
float canonical_block_max(const void* query, const void* keys, DType dtype, int64_t dim, int64_t n_visible);

// Block choice from canonical scores (scores[b] for b in [0, own]): the rule of IndexSelectParams. Returns ascending
// ids.
std::vector<int32_t> choose_blocks(std::span<const float> scores, int64_t own, int64_t topk, int64_t init_blocks,
                                   int64_t local_blocks);

}  // namespace firn::cpu
