// Ops: the operations of MiniMax-M3's forward pass, on whatever device implements them.
//
// cpu/ (fast and the scalar oracle), gpu/ and a test implementation with a separate memory space all implement this one
// interface; model/ calls it and never asks which one it has.
//
// Order and completion. Operations on one Ops object run in the order they were issued, each seeing the results of
// those before it. A call returns a Ticket; on the CPU the work is done by then, on a device it may be done later. Host
// code may read a result (after download()) only when wait() of that operation's ticket, or of any later one, has
// returned ok. A failed operation makes wait() of its ticket and of every later one return the same Status.
//
// Memory. Every view passed in must lie in this object's space(). Host arrays inside parameter structs (std::span and
// pointers marked "host") are read before the call returns; KV tables (KvSpan) hold host arrays of device addresses.
//
// Arithmetic. `act` below is the activation type, kBf16 (default mode) or kF32 (--precise), taken from the views:
//  - kBf16: inputs of products are bf16, sums fp32; which kernel runs may depend on the number of rows by the fixed
//  rule
//    in the implementation's header, so last bits may differ between row counts, never between runs,
//    thread counts or residency.
//  - kF32: every output row depends on its own input row only, bit for bit, whatever other rows are in the call.
// Sums over blocks and experts run in ascending id order. No operation uses float atomics.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "runtime/arena.h"
#include "runtime/tensor.h"

namespace firn {

struct Ticket {
  uint64_t id = 0;  // 0 = nothing to wait for
};

// Rows of one sequence inside a call: rows [row_begin, row_begin + n_rows) of q, k, v ... hold positions pos_begin,
// pos_begin + 1, ... The tables (host arrays) give block base addresses in the Ops' space; entry b covers absolute
// positions [b * block_tokens, (b+1) * block_tokens). They must reach the block of the last row's position.
struct KvSpan {
  int64_t row_begin = 0;
  int64_t n_rows = 0;
  int64_t pos_begin = 0;
  void* const* kv = nullptr;     // [groups][table_stride]: KV block of group g, block b at kv[g * table_stride + b]
  void* const* index = nullptr;  // [n_blocks]: index-key blocks; null for dense layers
  int64_t table_stride = 0;
};

// Layout of a KV block (one layer, one group): K [block_tokens, head_dim], then V [block_tokens, head_dim].
// Layout of an index block (one layer): keys [block_tokens, index_dim]; at index_norm_offset() one float, an upper
// bound of the largest Euclidean norm among the keys appended so far; at index_copy_offset() a copy of the keys in 4
// bits a dim, each key with its scale and a bound of what rounding took from it (cpu/index_copy.h). index_append keeps
// all three; an implementation that has no use for the copy may leave it unwritten, and then nobody may read it.
struct KvLayout {
  DType dtype = DType::kBf16;  // kBf16 or kF32, of K, V and index keys
  int64_t block_tokens = 128;
  int64_t groups = 0;
  int64_t head_dim = 0;
  int64_t index_dim = 0;

  int64_t kv_block_bytes() const { return 2 * block_tokens * head_dim * static_cast<int64_t>(dtype_bytes(dtype)); }
  int64_t index_norm_offset() const { return block_tokens * index_dim * static_cast<int64_t>(dtype_bytes(dtype)); }
  int64_t index_copy_offset() const { return index_norm_offset() + 64; }
  // Sixteen keys together: 64 bytes for every eight dims, 64 more for scales and bounds.
  int64_t index_copy_bytes() const { return (block_tokens + 15) / 16 * ((index_dim + 7) / 8 + 1) * 64; }
  int64_t index_block_bytes() const { return index_copy_offset() + index_copy_bytes(); }
};

// --- Parameter structs, one an operation -----------------------------------------------------------------------------

struct EmbedParams {
  std::span<const int32_t> ids;  // host; each in [0, table.rows)
  WeightView table;              // [vocab, H], kBf16 or kF32
  MatrixView out;                // act [n, H]
};

// out[i] = norm(x[rows[i]]) (or x[i] when rows is empty), one rounding at the end.
struct NormParams {
  ConstMatrixView x;              // act or f32 [*, n]
  std::span<const int32_t> rows;  // host; gathers rows of x
  NormWeight weight;
  MatrixView out;  // act or f32 [n_out, n]
};

// out[j] = x * weights[j]^T for each j; the weights share the input. All outputs f32.
// two_terms: x is f32 in default mode; where products are bf16 it is taken as the sum of two bf16 terms (16 bits of
// significand), so that what a sequence keeps for life is not computed from inputs rounded to 8 bits.
struct LinearParams {
  ConstMatrixView x;  // act [M, K]; f32 with two_terms
  std::span<const WeightView> weights;
  std::span<const MatrixView> outs;  // f32 [M, weights[j].rows]
  bool two_terms = false;
};

// Per-head RMS norm, then RoPE on the first rotary_dim dims (rotate-half pairing i, i + rotary_dim/2); angle = position
// * theta^(-2i/rotary_dim), computed in fp64. One rounding at the end.
struct NormRopePart {
  ConstMatrixView x;  // f32 [M, heads * dim]
  int64_t heads = 0;
  int64_t dim = 0;
  NormWeight weight;  // [dim], shared by the heads
  MatrixView out;     // KvLayout dtype (bf16 or f32) [M, heads * dim]
};
struct NormRopeParams {
  std::span<const NormRopePart> parts;
  std::span<const KvSpan> spans;  // only rows and positions are used
  int64_t rotary_dim = 0;
  double theta = 0;
};

// Writes K and V of each row into its sequence's blocks at the row's position. k is already normed and rotated in the
// cache dtype; v is f32 as projected and is rounded to the cache dtype here.
struct KvAppendParams {
  ConstMatrixView k;  // layout.dtype [M, groups * head_dim]
  ConstMatrixView v;  // f32 [M, groups * head_dim]
  std::span<const KvSpan> spans;
  KvLayout layout;
};

// Writes index keys and raises the blocks' norm bound. A row at the first position of a block starts that block's bound
// anew, so recycled memory needs no clearing.
struct IndexAppendParams {
  ConstMatrixView keys;  // layout.dtype [M, index_dim]
  std::span<const KvSpan> spans;
  KvLayout layout;
};

// MSA block choice (specification 4.3-4.4). For a row at position p with own block B: forced are blocks 0..init-1 and
// B-local+1..B; the rest of the topk places go to the other blocks b < B with the largest M[b], the maximum over the
// block's keys of the canonical score: the products query*key added in fp64 over dims 0..dim-1 in order (bf16 and f32
// products are exact in fp64), rounded once to fp32. Higher first, lower block id on ties. The choice is exact: fast
// scores only decide where their proven error bound allows, the rest is rescored canonically.
struct IndexSelectParams {
  ConstMatrixView q;  // layout.dtype [M, heads * index_dim], normed and rotated
  int64_t heads = 0;
  std::span<const KvSpan> spans;
  KvLayout layout;
  int64_t topk = 0;
  int64_t init_blocks = 0;
  int64_t local_blocks = 1;
  MatrixView ids;  // i32 [M, heads * topk]: per head ascending block ids, -1 beyond the chosen ones
};

// Canonical M[b] for every block b <= own (own block: visible keys only), -inf beyond: for tests, traces and evidence.
struct BlockScoresParams {
  ConstMatrixView q;
  int64_t heads = 0;
  std::span<const KvSpan> spans;
  KvLayout layout;
  MatrixView scores;  // f32 [M, heads * n_blocks], n_blocks = scores.cols / heads
};

// Softmax attention of each query over the keys at positions <= its own inside its block list, or in all blocks up to
// its own when block_ids is empty (dense). Defined as a fold over the blocks in ascending id: each block gives its own
// (max m, sum l = sum exp(s - m), o = sum exp(s - m) v), merged one after another into the running triple, so partial
// results computed apart and merged in block order give the same bits. Query head h uses group h / heads_per_group.
struct AttentionParams {
  ConstMatrixView q;  // layout.dtype [M, groups * heads_per_group * head_dim]
  int64_t heads_per_group = 0;
  std::span<const KvSpan> spans;
  KvLayout layout;
  float scale = 0;
  ConstMatrixView block_ids;  // i32 [M, groups * topk] as IndexSelect gives them, or empty
  int64_t topk = 0;
  MatrixView out;  // act [M, groups * heads_per_group * head_dim]
};

// As Attention, but the per-block triples are left apart: partials f32 [M * groups * heads_per_group, topk * (head_dim
// + 2)], entry j of a row belonging to block_ids entry j: (m, l, o[head_dim]). With `only` (i32, same shape as
// block_ids, non-zero = compute) some entries may be computed now and others by a later call; entries with block id -1
// are never touched.
struct AttentionPartialParams {
  AttentionParams base;  // block_ids not empty; base.out unused
  ConstMatrixView only;  // empty = all
  MatrixView partials;
};
struct AttentionMergeParams {
  ConstMatrixView partials;
  ConstMatrixView block_ids;
  int64_t groups = 0, heads_per_group = 0, head_dim = 0, topk = 0;
  MatrixView out;
};

// h = round(h + y) with one rounding to h's dtype.
struct AddParams {
  MatrixView h;       // act or f32 [M, H]
  ConstMatrixView y;  // f32 [M, H]
};

// Router (specification 3.7): logits = gate x in fp32 (x as stored), s = sigmoid(logits), the topk experts by s + bias
// (ties: lower id); weights = s / sum of chosen s, in fp32. ids are written in ascending expert id.
struct RouterParams {
  ConstMatrixView x;     // act or f32 [M, H]
  WeightView gate;       // f32 (or bf16) [E, H]
  ConstMatrixView bias;  // f32 [1, E]
  int64_t topk = 0;
  MatrixView ids;      // i32 [M, topk]
  MatrixView weights;  // f32 [M, topk]
  MatrixView logits;   // f32 [M, E] or empty
};

// swigluoai constants (specification 3.8): g' = min(g, limit), u' = clamp(u, -limit, limit),
// act = (u' + beta) * g' * sigmoid(alpha * g').
struct Activation {
  float alpha = 1.702f;
  float beta = 1.0f;
  float limit = 7.0f;
};

// One gated MLP over rows [row_begin, row_begin + n_rows) of x and out. Dense MLP and shared expert are a task of their
// own. out = w2 * round_act(act(w1 x, w3 x)).
struct MlpTask {
  int64_t id = 0;   // expert id, or -1
  WeightView gate;  // w1 [I, H]
  WeightView up;    // w3 [I, H]
  WeightView down;  // w2 [H, I]
  int64_t row_begin = 0;
  int64_t n_rows = 0;
};
struct MlpParams {
  ConstMatrixView x;  // act [R, H], grouped by task
  std::span<const MlpTask> tasks;
  Activation activation;
  MatrixView out;  // f32 [R, H]; rows of different experts stay apart until combine
};

// acc[rows[i]] += weights[i] * y[i], i ascending; callers give rows of one token in ascending expert id.
struct CombineParams {
  MatrixView acc;                  // f32 [T, H]
  ConstMatrixView y;               // f32 [R, H]
  std::span<const int32_t> rows;   // host
  std::span<const float> weights;  // host
};

// h = round(h + (scale * acc + shared)); acc, then shared, may be empty. After it acc rows are zero again.
struct FinishFfnParams {
  MatrixView h;
  MatrixView acc;
  ConstMatrixView shared;
  float scale = 1.0f;
};

// --- The interface ---------------------------------------------------------------------------------------------------

class Ops {
 public:
  virtual ~Ops() = default;

  virtual std::string name() const = 0;  // e.g. "cpu/avx512", for the first line and bench rows
  virtual Space space() const = 0;
  virtual Arena& arena() = 0;  // where views for this object are allocated; charged to its budget

  virtual Ticket embed(const EmbedParams& p) = 0;
  virtual Ticket norm(const NormParams& p) = 0;
  virtual Ticket linear(const LinearParams& p) = 0;
  virtual Ticket norm_rope(const NormRopeParams& p) = 0;
  virtual Ticket kv_append(const KvAppendParams& p) = 0;
  virtual Ticket index_append(const IndexAppendParams& p) = 0;
  virtual Ticket index_select(const IndexSelectParams& p) = 0;
  virtual Ticket block_scores(const BlockScoresParams& p) = 0;
  virtual Ticket attention(const AttentionParams& p) = 0;
  virtual Ticket attention_partial(const AttentionPartialParams& p) = 0;
  virtual Ticket attention_merge(const AttentionMergeParams& p) = 0;
  virtual Ticket add(const AddParams& p) = 0;
  virtual Ticket router(const RouterParams& p) = 0;
  virtual Ticket mlp(const MlpParams& p) = 0;
  virtual Ticket combine(const CombineParams& p) = 0;
  virtual Ticket finish_ffn(const FinishFfnParams& p) = 0;

  // Copies between host memory and this space; `dst`/`src` on the host must stay valid until the ticket is waited for.
  virtual Ticket upload(void* dst, const void* host_src, int64_t bytes) = 0;
  virtual Ticket download(void* host_dst, const void* src, int64_t bytes) = 0;
  virtual Ticket copy(void* dst, const void* src, int64_t bytes) = 0;  // inside this space
  virtual Ticket zero(void* dst, int64_t bytes) = 0;

  virtual Status wait(Ticket ticket) = 0;
  // After a failure: forgets it, so that later operations run again, when what failed can be tried again (memory was
  // short). Outputs of the operations since the failure are undefined. Returns the failure when it is final.
  virtual Status recover() = 0;

  // Scratch memory the implementation keeps for itself, in bytes, when no call has more than `rows` rows of a model
  // with these largest sizes; charged to arena() on first use. For plans.
  struct Limits {
    int64_t rows = 0, hidden = 0, intermediate = 0, heads = 0, head_dim = 0, vocab = 0, blocks = 0, index_heads = 0;
  };
  virtual int64_t scratch_bytes(const Limits& limits) const = 0;
};

}  // namespace firn
