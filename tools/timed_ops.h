// TimedOps: passes every operation on to another Ops and adds up the time spent inside, so that a step's wall time can
// be told apart from its kernels'. Only meaningful over an Ops whose work is done when a call returns (the CPU's).
#pragma once

#include <chrono>
#include <string>
#include <utility>

#include "runtime/ops.h"

namespace firn::tools {

class TimedOps final : public Ops {
 public:
  explicit TimedOps(Ops* inner) : inner_(inner) {}
  double seconds() const { return std::chrono::duration<double>(spent_).count(); }
  void reset() { spent_ = choosing_ = dense_ = {}; }
  // Of these: choosing blocks, and attention to all blocks.
  double choosing_seconds() const { return std::chrono::duration<double>(choosing_).count(); }
  double dense_seconds() const { return std::chrono::duration<double>(dense_).count(); }

  std::string name() const override { return inner_->name(); }
  Space space() const override { return inner_->space(); }
  Arena& arena() override { return inner_->arena(); }
  int64_t scratch_bytes(const Limits& limits) const override { return inner_->scratch_bytes(limits); }

  Ticket embed(const EmbedParams& p) override { return timed(&Ops::embed, p); }
  Ticket norm(const NormParams& p) override { return timed(&Ops::norm, p); }
  Ticket linear(const LinearParams& p) override { return timed(&Ops::linear, p); }
  Ticket norm_rope(const NormRopeParams& p) override { return timed(&Ops::norm_rope, p); }
  Ticket kv_append(const KvAppendParams& p) override { return timed(&Ops::kv_append, p); }
  Ticket index_append(const IndexAppendParams& p) override { return timed(&Ops::index_append, p); }
  Ticket index_select(const IndexSelectParams& p) override {
    const auto before = spent_;
    const Ticket ticket = timed(&Ops::index_select, p);
    choosing_ += spent_ - before;
    return ticket;
  }
  Ticket block_scores(const BlockScoresParams& p) override { return timed(&Ops::block_scores, p); }
  Ticket attention(const AttentionParams& p) override {
    const auto before = spent_;
    const Ticket ticket = timed(&Ops::attention, p);
    if (p.block_ids.empty()) dense_ += spent_ - before;
    return ticket;
  }
  Ticket attention_partial(const AttentionPartialParams& p) override { return timed(&Ops::attention_partial, p); }
  Ticket attention_merge(const AttentionMergeParams& p) override { return timed(&Ops::attention_merge, p); }
  Ticket add(const AddParams& p) override { return timed(&Ops::add, p); }
  Ticket router(const RouterParams& p) override { return timed(&Ops::router, p); }
  Ticket mlp(const MlpParams& p) override { return timed(&Ops::mlp, p); }
  Ticket combine(const CombineParams& p) override { return timed(&Ops::combine, p); }
  Ticket finish_ffn(const FinishFfnParams& p) override { return timed(&Ops::finish_ffn, p); }
  Ticket upload(void* dst, const void* src, int64_t bytes) override { return timed(&Ops::upload, dst, src, bytes); }
  Ticket download(void* dst, const void* src, int64_t bytes) override { return timed(&Ops::download, dst, src, bytes); }
  Ticket copy(void* dst, const void* src, int64_t bytes) override { return timed(&Ops::copy, dst, src, bytes); }
  Ticket zero(void* dst, int64_t bytes) override { return timed(&Ops::zero, dst, bytes); }
  Status wait(Ticket ticket) override { return timed(&Ops::wait, ticket); }
  Status recover() override { return inner_->recover(); }

 private:
  template <typename R, typename... P, typename... A>
  R timed(R (Ops::*method)(P...), A&&... arguments) {
    const auto start = std::chrono::steady_clock::now();
    R result = (inner_->*method)(std::forward<A>(arguments)...);
    spent_ += std::chrono::steady_clock::now() - start;
    return result;
  }
  Ops* const inner_;
  std::chrono::steady_clock::duration spent_{}, choosing_{}, dense_{};
};

}  // namespace firn::tools
