// ShadowOps: an Ops with a memory space of its own and work that is done late, on top of any other Ops.
//
// It proves that the code above it is honest about the seam, with no device present:
//  - Its arena hands out pages that the process may not touch except while an operation runs: host code that reads or
//    writes them dies at once. Fresh memory is full of NaN. Addresses are never used twice.
//  - Every view must say Space::kDevice and lie inside one live allocation, when the operation is issued and again when
//  it
//    runs; so must the KV blocks that it reaches.
//  - Host arrays are copied at the call. Operations are queued and run on wait(), in order, or some of them earlier, at
//    random. upload() reads, and download() writes, host memory when it runs, not when it is called; until then
//    download()'s destination holds a pattern.
//  - ShadowOps that share a ShadowScheduler complete in an order relative to each other that nobody should rely on.
// A wrong use is a FIRN_CHECK failure. Single-threaded, like Ops itself.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "runtime/ops.h"

namespace firn::test {

class ShadowOps;

// Decides what runs when; deterministic for a seed.
class ShadowScheduler {
 public:
  explicit ShadowScheduler(uint64_t seed) : rng_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(rng_() % static_cast<uint64_t>(n)); }

 private:
  friend class ShadowOps;
  std::mt19937_64 rng_;
  std::vector<ShadowOps*> members_;
};

// The separate space. Memory is reserved once and never reused, so a stale address is always found out.
class ShadowArena final : public Arena {
 public:
  explicit ShadowArena(Budget* budget, int64_t reserve_bytes = int64_t{64} << 30);
  ~ShadowArena() override;
  Space space() const override { return Space::kDevice; }

  // CHECKs that [data, data + bytes) lies inside one live allocation.
  void check_inside(const void* data, int64_t bytes, const std::string& what) const;
  bool owns(const void* p) const { return p >= base_ && p < base_ + reserved_bytes_; }
  // Whether the host may touch this space now.
  void set_open(bool open);

 protected:
  void* raw_allocate(int64_t bytes) override;
  void raw_free(void* data, int64_t bytes) override;

 private:
  mutable std::mutex mutex_;
  char* base_ = nullptr;        // constant after construction
  int64_t reserved_bytes_ = 0;  // constant after construction
  int64_t used_bytes_ = 0;      // under mutex_, like what follows
  bool open_ = false;
  std::map<const char*, int64_t> live_;
};

class ShadowOps final : public Ops {
 public:
  // inner must outlive the object and work on host memory; scheduler may be shared, or null for one of its own.
  ShadowOps(Ops* inner, Budget* budget, std::shared_ptr<ShadowScheduler> scheduler = nullptr, uint64_t seed = 1);
  ~ShadowOps() override;  // queued operations are dropped

  std::string name() const override { return "shadow/" + inner_->name(); }
  Space space() const override { return Space::kDevice; }
  Arena& arena() override { return arena_; }

  Ticket embed(const EmbedParams& p) override;
  Ticket norm(const NormParams& p) override;
  Ticket linear(const LinearParams& p) override;
  Ticket norm_rope(const NormRopeParams& p) override;
  Ticket kv_append(const KvAppendParams& p) override;
  Ticket index_append(const IndexAppendParams& p) override;
  Ticket index_select(const IndexSelectParams& p) override;
  Ticket block_scores(const BlockScoresParams& p) override;
  Ticket attention(const AttentionParams& p) override;
  Ticket attention_partial(const AttentionPartialParams& p) override;
  Ticket attention_merge(const AttentionMergeParams& p) override;
  Ticket add(const AddParams& p) override;
  Ticket router(const RouterParams& p) override;
  Ticket mlp(const MlpParams& p) override;
  Ticket combine(const CombineParams& p) override;
  Ticket finish_ffn(const FinishFfnParams& p) override;
  Ticket upload(void* dst, const void* host_src, int64_t bytes) override;
  Ticket download(void* host_dst, const void* src, int64_t bytes) override;
  Ticket copy(void* dst, const void* src, int64_t bytes) override;
  Ticket zero(void* dst, int64_t bytes) override;
  Status wait(Ticket ticket) override;
  Status recover() override;
  int64_t scratch_bytes(const Limits& limits) const override { return inner_->scratch_bytes(limits); }

  int64_t pending() const { return static_cast<int64_t>(queue_.size()); }
  int64_t ran_early() const { return ran_early_; }  // operations that ran before anybody waited for them

 private:
  struct Range {
    const void* data;
    int64_t bytes;
    std::string what;
  };
  // A queued operation: the memory it names, checked again when it runs, and the call itself.
  struct Work {
    std::vector<Range> ranges;
    std::function<Ticket()> run;
  };
  class Call;

  Ticket push(Work work);
  void run_front();
  void run_some(int64_t at_most);

  Ops* const inner_;
  ShadowArena arena_;
  std::shared_ptr<ShadowScheduler> scheduler_;
  std::deque<Work> queue_;
  uint64_t issued_ = 0, finished_ = 0, failed_at_ = 0;
  int64_t ran_early_ = 0;
  Status failure_;
};

}  // namespace firn::test
