// CpuOps: the fast CPU implementation of Ops. Work is done when a call returns; tickets are ready at once.
//
// Kernel paths (the fixed rule that runtime/ops.h asks for), by the number of rows of a linear call or of an MLP task:
//  - act f32 (--precise), any rows: dot products over f32 in 16 fixed lanes, reduced in a fixed tree.
//  - act bf16, CPUs with AMX (inputs a multiple of 32, outputs of 16), any rows: matrix tiles straight from stored
//    weights (amx_gemm.h). One row alone would be 5 to 25 % faster by dot products, but then a sequence's bits would
//    depend on what it is batched with.
//  - act bf16, rows <= kFewRows: dot products on stored weights dequantised in registers: bf16 ones where the CPU has
//    fast instructions for them (bf16_dot.h: Zen 4), else the f32 ones.
//  - act bf16, more rows: weight tiles are dequantised once to bf16 (or f32, by gemm_type()) for oneDNN. Here a row's
//    last bits may depend on the number of rows; on every other path they depend on nothing but the path.
//  - f32 with two_terms: up to kFewRows rows as f32; more: bf16 products of both terms in one pass over the weights, or
//    f32 products of the inputs as they are, by gemm_type().
// Attention, norms, router, selection: one path whatever the number of rows.
#pragma once

#include <memory>
#include <string>

#include "cpu/isa.h"
#include "runtime/kernel_stats.h"
#include "runtime/ops.h"
#include "runtime/thread_team.h"

namespace firn::cpu {

inline constexpr int64_t kFewRows = 8;

// How index_select reads keys: by its rule, or one way wherever that is possible, for tests and benches. The choice is
// the same.
enum class IndexPath : uint8_t { kByRule, kScan, kTwoStage };

class CpuOps final : public Ops {
 public:
  // team and arena must outlive the object. `arena` is host memory charged to the user's budget; scratch is taken from
  // it and kept. Fails when isa is not available on this CPU.
  static Result<std::unique_ptr<CpuOps>> create(ThreadTeam* team, Arena* arena, Isa isa);
  ~CpuOps() override;

  std::string name() const override;
  Space space() const override { return Space::kHost; }
  Arena& arena() override { return *arena_; }

  // cpu_ops_linear.cc
  Ticket linear(const LinearParams& p) override;
  Ticket mlp(const MlpParams& p) override;
  // cpu_ops_rows.cc
  Ticket embed(const EmbedParams& p) override;
  Ticket norm(const NormParams& p) override;
  Ticket norm_rope(const NormRopeParams& p) override;
  Ticket add(const AddParams& p) override;
  Ticket router(const RouterParams& p) override;
  Ticket combine(const CombineParams& p) override;
  Ticket finish_ffn(const FinishFfnParams& p) override;
  // cpu_ops_attention.cc
  Ticket kv_append(const KvAppendParams& p) override;
  Ticket attention(const AttentionParams& p) override;
  Ticket attention_partial(const AttentionPartialParams& p) override;
  Ticket attention_merge(const AttentionMergeParams& p) override;
  // cpu_ops_index.cc
  Ticket index_append(const IndexAppendParams& p) override;
  Ticket index_select(const IndexSelectParams& p) override;
  Ticket block_scores(const BlockScoresParams& p) override;
  // cpu_ops.cc
  Ticket upload(void* dst, const void* host_src, int64_t bytes) override;
  Ticket download(void* host_dst, const void* src, int64_t bytes) override;
  Ticket copy(void* dst, const void* src, int64_t bytes) override;
  Ticket zero(void* dst, int64_t bytes) override;
  Status wait(Ticket ticket) override;
  Status recover() override;
  int64_t scratch_bytes(const Limits& limits) const override;

  const KernelStats& stats() const { return stats_; }
  Isa isa() const { return isa_; }
  void set_index_path(IndexPath path) { index_path_ = path; }

 private:
  CpuOps(ThreadTeam* team, Arena* arena, Isa isa);
  // Host scratch number `slot` (each call site its own), grown to at least `bytes` and kept; 64-byte aligned. On
  // refusal by the budget fails the object (wait() then returns the refusal) and returns nullptr: the caller returns at
  // once.
  enum Scratch {
    kGateUp,
    kAct,
    kTiles,
    kRope,
    kPartials,
    kScores,
    kPacked,
    kSelect,
    kXFloat,
    kRouter,
    kTerms,
    kTermSums,
    kScratchCount
  };
  std::byte* scratch(Scratch slot, int64_t bytes);
  Ticket linear_two_terms(const LinearParams& p);
  Ticket done() { return {++last_ticket_}; }
  Ticket fail(Status status);
  void record_failure(const Status& status, uint64_t ticket);
  // After a failure operations do nothing: their inputs may never have been written.
  bool failed() const { return !failure_.ok(); }

  ThreadTeam* const team_;
  Arena* const arena_;
  const Isa isa_;
  uint64_t last_ticket_ = 0;
  Status failure_;
  uint64_t failed_ticket_ = 0;
  KernelStats stats_;
  IndexPath index_path_ = IndexPath::kByRule;
  Buffer scratch_[kScratchCount];
  std::shared_ptr<class GemmCache> gemms_;  // made by the first product; cpu/gemm.h
};

}  // namespace firn::cpu
