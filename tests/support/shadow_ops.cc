// ShadowOps; the contract is in the header.
//
// How a call becomes Work: Call collects the memory ranges of the views and translates them into the wrapped Ops'
// space; host arrays are moved into a shared "kept" struct that the closure owns.
#include "support/shadow_ops.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "fmt/format.h"

namespace firn::test {
namespace {

constexpr int64_t kPage = 4096;
constexpr int kFreshByte = 0xFF;     // NaN as bf16 and as f32, -1 as i32
constexpr int kDownloadByte = 0xCB;  // what a download's destination holds until it has run

// Spans with tables of their own.
struct KeptSpans {
  std::vector<KvSpan> spans;
  std::vector<std::vector<void*>> tables;
};

// Copies the table entries that the rows of each span may reach, and nothing beyond them.
std::shared_ptr<KeptSpans> keep_spans(std::span<const KvSpan> spans, int64_t block_tokens, int64_t groups, bool kv,
                                      bool index) {
  auto kept = std::make_shared<KeptSpans>();
  kept->spans.assign(spans.begin(), spans.end());
  kept->tables.reserve(2 * spans.size());
  for (KvSpan& span : kept->spans) {
    const int64_t n_blocks = span.n_rows == 0 ? 0 : (span.pos_begin + span.n_rows - 1) / block_tokens + 1;
    if ((kv && span.kv != nullptr) || (index && span.index != nullptr)) {
      FIRN_CHECK(n_blocks <= span.table_stride, "a span's table does not reach its last row");
    }
    if (kv && span.kv != nullptr) {
      std::vector<void*>& table = kept->tables.emplace_back(static_cast<size_t>(groups * n_blocks));
      for (int64_t g = 0; g < groups; ++g) {
        std::copy_n(span.kv + g * span.table_stride, n_blocks, table.begin() + g * n_blocks);
      }
      span.kv = table.data();
    } else {
      span.kv = nullptr;
    }
    if (index && span.index != nullptr) {
      std::vector<void*>& table = kept->tables.emplace_back(span.index, span.index + n_blocks);
      span.index = table.data();
    } else {
      span.index = nullptr;
    }
    span.table_stride = n_blocks;
  }
  return kept;
}

int64_t last_block(const KvSpan& span, int64_t block_tokens) {
  return (span.pos_begin + span.n_rows - 1) / block_tokens;
}

// CHECKs the KV blocks that a call reaches, reading block ids where there are any (so the space must be open).
// rows_only: only the blocks that hold the rows themselves.
void check_kv_blocks(const ShadowArena& arena, const KeptSpans& kept, const KvLayout& layout, bool rows_only,
                     const ConstMatrixView& ids, int64_t topk) {
  for (const KvSpan& span : kept.spans) {
    if (span.n_rows == 0) continue;
    FIRN_CHECK(span.kv != nullptr, "a span without a KV table");
    const auto check = [&](int64_t group, int64_t block) {
      FIRN_CHECK(block < span.table_stride, "a block id beyond the span's table");
      arena.check_inside(span.kv[group * span.table_stride + block], layout.kv_block_bytes(),
                         fmt::format("KV block {} of group {}", block, group));
    };
    for (int64_t g = 0; g < layout.groups; ++g) {
      if (ids.empty()) {
        const int64_t first = rows_only ? span.pos_begin / layout.block_tokens : 0;
        for (int64_t b = first; b <= last_block(span, layout.block_tokens); ++b) check(g, b);
        continue;
      }
      for (int64_t r = span.row_begin; r < span.row_begin + span.n_rows; ++r) {
        const int32_t* row = static_cast<const int32_t*>(ids.row(r)) + g * topk;
        for (int64_t j = 0; j < topk; ++j) {
          if (row[j] >= 0) check(g, row[j]);
        }
      }
    }
  }
}

void check_index_blocks(const ShadowArena& arena, const KeptSpans& kept, const KvLayout& layout, bool rows_only) {
  for (const KvSpan& span : kept.spans) {
    if (span.n_rows == 0) continue;
    FIRN_CHECK(span.index != nullptr, "a span without an index table");
    const int64_t first = rows_only ? span.pos_begin / layout.block_tokens : 0;
    for (int64_t b = first; b <= last_block(span, layout.block_tokens); ++b) {
      arena.check_inside(span.index[b], layout.index_block_bytes(), fmt::format("index block {}", b));
    }
  }
}

}  // namespace

// --- Arena -----------------------------------------------------------------------------------------------------------

ShadowArena::ShadowArena(Budget* budget, int64_t reserve_bytes) : Arena(budget), reserved_bytes_(reserve_bytes) {
  void* base = mmap(nullptr, static_cast<size_t>(reserved_bytes_), PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  FIRN_CHECK(base != MAP_FAILED, "no address space for the shadow arena");
  base_ = static_cast<char*>(base);
}

ShadowArena::~ShadowArena() { munmap(base_, static_cast<size_t>(reserved_bytes_)); }

void ShadowArena::set_open(bool open) {
  const std::lock_guard<std::mutex> lock(mutex_);
  open_ = open;
  if (used_bytes_ == 0) return;
  const int protection = open ? PROT_READ | PROT_WRITE : PROT_NONE;
  FIRN_CHECK(mprotect(base_, static_cast<size_t>(used_bytes_), protection) == 0, "mprotect refused");
}

void* ShadowArena::raw_allocate(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t rounded = (bytes + kPage - 1) / kPage * kPage;
  if (used_bytes_ + rounded > reserved_bytes_) return nullptr;
  char* data = base_ + used_bytes_;
  used_bytes_ += rounded;
  live_[data] = bytes;
  FIRN_CHECK(mprotect(data, static_cast<size_t>(rounded), PROT_READ | PROT_WRITE) == 0, "mprotect refused");
  std::memset(data, kFreshByte, static_cast<size_t>(rounded));
  if (!open_) FIRN_CHECK(mprotect(data, static_cast<size_t>(rounded), PROT_NONE) == 0, "mprotect refused");
  return data;
}

void ShadowArena::raw_free(void* data, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  FIRN_CHECK(live_.erase(static_cast<const char*>(data)) == 1, "freed memory that was not allocated here");
  madvise(data, static_cast<size_t>((bytes + kPage - 1) / kPage * kPage), MADV_DONTNEED);
}

void ShadowArena::check_inside(const void* data, int64_t bytes, const std::string& what) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const char* begin = static_cast<const char*>(data);
  auto it = live_.upper_bound(begin);
  const bool inside = it != live_.begin() && begin + bytes <= std::prev(it)->first + std::prev(it)->second;
  FIRN_CHECK(inside, fmt::format("{}: {} bytes at {} lie in no live allocation of this space", what, bytes, data));
}

// --- Collecting a call -----------------------------------------------------------------------------------------------

class ShadowOps::Call {
 public:
  explicit Call(ShadowOps* ops) : ops_(ops) {}

  void range(const void* data, int64_t bytes, const char* what) {
    if (bytes <= 0) return;
    ops_->arena_.check_inside(data, bytes, what);
    work_.ranges.push_back({data, bytes, what});
  }
  // Each takes the view by reference and turns it into the inner Ops' space.
  template <typename View>
  void view(View& v, const char* what) {
    if (v.empty()) return;
    FIRN_CHECK(v.space == Space::kDevice, std::string(what) + ": the view says host memory");
    FIRN_CHECK(v.stride >= v.cols, std::string(what) + ": the stride is smaller than a row");
    range(v.data, ((v.rows - 1) * v.stride + v.cols) * static_cast<int64_t>(dtype_bytes(v.dtype)), what);
    v.space = ops_->inner_->space();
  }
  void weight(WeightView& w, const char* what) {
    FIRN_CHECK(!w.empty(), std::string(what) + ": the weight is empty");
    FIRN_CHECK(w.space == Space::kDevice, std::string(what) + ": the weight says host memory");
    range(w.data, weight_data_bytes(w.format, w.rows, w.cols), what);
    range(w.scales, weight_scale_bytes(w.format, w.rows, w.cols), what);
    w.space = ops_->inner_->space();
  }
  void norm_weight(const NormWeight& w, const char* what) {
    range(w.data, w.n * static_cast<int64_t>(dtype_bytes(w.dtype)), what);
  }
  Ticket push(std::function<Ticket()> run) {
    work_.run = std::move(run);
    return ops_->push(std::move(work_));
  }

 private:
  ShadowOps* ops_;
  Work work_;
};

// --- Queue -----------------------------------------------------------------------------------------------------------

ShadowOps::ShadowOps(Ops* inner, Budget* budget, std::shared_ptr<ShadowScheduler> scheduler, uint64_t seed)
    : inner_(inner),
      arena_(budget),
      scheduler_(scheduler != nullptr ? std::move(scheduler) : std::make_shared<ShadowScheduler>(seed)) {
  FIRN_CHECK(inner->space() == Space::kHost, "ShadowOps wraps an Ops that works on host memory");
  scheduler_->members_.push_back(this);
}

ShadowOps::~ShadowOps() { std::erase(scheduler_->members_, this); }

Ticket ShadowOps::push(Work work) {
  queue_.push_back(std::move(work));
  const Ticket ticket{++issued_};
  // Now and then a device is quick: a random part of what is queued runs before anybody asks.
  if (scheduler_->below(4) == 0) {
    const uint64_t before = finished_;
    run_some(scheduler_->below(pending() + 1));
    ran_early_ += static_cast<int64_t>(finished_ - before);
  }
  return ticket;
}

void ShadowOps::run_front() {
  Work work = std::move(queue_.front());
  queue_.pop_front();
  ++finished_;
  if (!failure_.ok()) return;
  for (const Range& range : work.ranges) arena_.check_inside(range.data, range.bytes, range.what);
  arena_.set_open(true);
  const Status status = inner_->wait(work.run());
  arena_.set_open(false);
  if (!status.ok()) {
    failure_ = status;
    failed_at_ = finished_;
  }
}

void ShadowOps::run_some(int64_t at_most) {
  for (int64_t i = 0; i < at_most && !queue_.empty(); ++i) run_front();
}

Status ShadowOps::recover() {
  run_some(static_cast<int64_t>(queue_.size()));
  failure_ = Status();
  failed_at_ = 0;
  return inner_->recover();
}

Status ShadowOps::wait(Ticket ticket) {
  FIRN_CHECK(ticket.id <= issued_, "waiting for a ticket that was never issued");
  std::vector<ShadowOps*> order = scheduler_->members_;
  std::shuffle(order.begin(), order.end(), scheduler_->rng_);
  for (ShadowOps* ops : order) {
    if (ops != this) ops->run_some(scheduler_->below(ops->pending() + 1));
  }
  while (finished_ < ticket.id) run_front();
  return !failure_.ok() && ticket.id >= failed_at_ ? failure_ : Status();
}

// --- Operations ------------------------------------------------------------------------------------------------------

Ticket ShadowOps::embed(const EmbedParams& p) {
  Call call(this);
  EmbedParams q = p;
  call.weight(q.table, "embed table");
  call.view(q.out, "embed out");
  auto ids = std::make_shared<std::vector<int32_t>>(p.ids.begin(), p.ids.end());
  return call.push([this, q, ids]() mutable {
    q.ids = *ids;
    return inner_->embed(q);
  });
}

Ticket ShadowOps::norm(const NormParams& p) {
  Call call(this);
  NormParams q = p;
  call.view(q.x, "norm x");
  call.norm_weight(q.weight, "norm weight");
  call.view(q.out, "norm out");
  auto rows = std::make_shared<std::vector<int32_t>>(p.rows.begin(), p.rows.end());
  return call.push([this, q, rows]() mutable {
    q.rows = *rows;
    return inner_->norm(q);
  });
}

Ticket ShadowOps::linear(const LinearParams& p) {
  struct Kept {
    std::vector<WeightView> weights;
    std::vector<MatrixView> outs;
  };
  Call call(this);
  LinearParams q = p;
  auto kept = std::make_shared<Kept>();
  kept->weights.assign(p.weights.begin(), p.weights.end());
  kept->outs.assign(p.outs.begin(), p.outs.end());
  call.view(q.x, "linear x");
  for (WeightView& w : kept->weights) call.weight(w, "linear weight");
  for (MatrixView& out : kept->outs) call.view(out, "linear out");
  return call.push([this, q, kept]() mutable {
    q.weights = kept->weights;
    q.outs = kept->outs;
    return inner_->linear(q);
  });
}

Ticket ShadowOps::norm_rope(const NormRopeParams& p) {
  struct Kept {
    std::vector<NormRopePart> parts;
    std::vector<KvSpan> spans;
  };
  Call call(this);
  NormRopeParams q = p;
  auto kept = std::make_shared<Kept>();
  kept->parts.assign(p.parts.begin(), p.parts.end());
  for (const KvSpan& span : p.spans) kept->spans.push_back({span.row_begin, span.n_rows, span.pos_begin});
  for (NormRopePart& part : kept->parts) {
    call.view(part.x, "norm_rope x");
    call.norm_weight(part.weight, "norm_rope weight");
    call.view(part.out, "norm_rope out");
  }
  return call.push([this, q, kept]() mutable {
    q.parts = kept->parts;
    q.spans = kept->spans;
    return inner_->norm_rope(q);
  });
}

Ticket ShadowOps::kv_append(const KvAppendParams& p) {
  Call call(this);
  KvAppendParams q = p;
  call.view(q.k, "kv_append k");
  call.view(q.v, "kv_append v");
  auto kept = keep_spans(p.spans, p.layout.block_tokens, p.layout.groups, true, false);
  return call.push([this, q, kept]() mutable {
    check_kv_blocks(arena_, *kept, q.layout, true, {}, 0);
    q.spans = kept->spans;
    return inner_->kv_append(q);
  });
}

Ticket ShadowOps::index_append(const IndexAppendParams& p) {
  Call call(this);
  IndexAppendParams q = p;
  call.view(q.keys, "index_append keys");
  auto kept = keep_spans(p.spans, p.layout.block_tokens, p.layout.groups, false, true);
  return call.push([this, q, kept]() mutable {
    check_index_blocks(arena_, *kept, q.layout, true);
    q.spans = kept->spans;
    return inner_->index_append(q);
  });
}

Ticket ShadowOps::index_select(const IndexSelectParams& p) {
  Call call(this);
  IndexSelectParams q = p;
  call.view(q.q, "index_select q");
  call.view(q.ids, "index_select ids");
  auto kept = keep_spans(p.spans, p.layout.block_tokens, p.layout.groups, false, true);
  return call.push([this, q, kept]() mutable {
    check_index_blocks(arena_, *kept, q.layout, false);
    q.spans = kept->spans;
    return inner_->index_select(q);
  });
}

Ticket ShadowOps::block_scores(const BlockScoresParams& p) {
  Call call(this);
  BlockScoresParams q = p;
  call.view(q.q, "block_scores q");
  call.view(q.scores, "block_scores scores");
  auto kept = keep_spans(p.spans, p.layout.block_tokens, p.layout.groups, false, true);
  return call.push([this, q, kept]() mutable {
    check_index_blocks(arena_, *kept, q.layout, false);
    q.spans = kept->spans;
    return inner_->block_scores(q);
  });
}

Ticket ShadowOps::attention(const AttentionParams& p) {
  Call call(this);
  AttentionParams q = p;
  call.view(q.q, "attention q");
  call.view(q.block_ids, "attention block_ids");
  call.view(q.out, "attention out");
  auto kept = keep_spans(p.spans, p.layout.block_tokens, p.layout.groups, true, false);
  return call.push([this, q, kept]() mutable {
    check_kv_blocks(arena_, *kept, q.layout, false, q.block_ids, q.topk);
    q.spans = kept->spans;
    return inner_->attention(q);
  });
}

Ticket ShadowOps::attention_partial(const AttentionPartialParams& p) {
  Call call(this);
  AttentionPartialParams q = p;
  call.view(q.base.q, "attention_partial q");
  call.view(q.base.block_ids, "attention_partial block_ids");
  call.view(q.only, "attention_partial only");
  call.view(q.partials, "attention_partial partials");
  auto kept = keep_spans(p.base.spans, p.base.layout.block_tokens, p.base.layout.groups, true, false);
  return call.push([this, q, kept]() mutable {
    // With `only`, blocks that are left for later need not be there yet: their ids are hidden from the check.
    const ConstMatrixView& ids = q.base.block_ids;
    std::vector<int32_t> reached(static_cast<size_t>(ids.rows * ids.cols));
    for (int64_t r = 0; r < ids.rows; ++r) {
      for (int64_t c = 0; c < ids.cols; ++c) {
        const bool now = q.only.empty() || static_cast<const int32_t*>(q.only.row(r))[c] != 0;
        reached[static_cast<size_t>(r * ids.cols + c)] = now ? static_cast<const int32_t*>(ids.row(r))[c] : -1;
      }
    }
    check_kv_blocks(arena_, *kept, q.base.layout, false, {reached.data(), DType::kI32, ids.rows, ids.cols, ids.cols},
                    q.base.topk);
    q.base.spans = kept->spans;
    return inner_->attention_partial(q);
  });
}

Ticket ShadowOps::attention_merge(const AttentionMergeParams& p) {
  Call call(this);
  AttentionMergeParams q = p;
  call.view(q.partials, "attention_merge partials");
  call.view(q.block_ids, "attention_merge block_ids");
  call.view(q.out, "attention_merge out");
  return call.push([this, q] { return inner_->attention_merge(q); });
}

Ticket ShadowOps::add(const AddParams& p) {
  Call call(this);
  AddParams q = p;
  call.view(q.h, "add h");
  call.view(q.y, "add y");
  return call.push([this, q] { return inner_->add(q); });
}

Ticket ShadowOps::router(const RouterParams& p) {
  Call call(this);
  RouterParams q = p;
  call.view(q.x, "router x");
  call.weight(q.gate, "router gate");
  call.view(q.bias, "router bias");
  call.view(q.ids, "router ids");
  call.view(q.weights, "router weights");
  call.view(q.logits, "router logits");
  return call.push([this, q] { return inner_->router(q); });
}

Ticket ShadowOps::mlp(const MlpParams& p) {
  Call call(this);
  MlpParams q = p;
  auto tasks = std::make_shared<std::vector<MlpTask>>(p.tasks.begin(), p.tasks.end());
  call.view(q.x, "mlp x");
  call.view(q.out, "mlp out");
  for (MlpTask& task : *tasks) {
    call.weight(task.gate, "mlp gate");
    call.weight(task.up, "mlp up");
    call.weight(task.down, "mlp down");
  }
  return call.push([this, q, tasks]() mutable {
    q.tasks = *tasks;
    return inner_->mlp(q);
  });
}

Ticket ShadowOps::combine(const CombineParams& p) {
  struct Kept {
    std::vector<int32_t> rows;
    std::vector<float> weights;
  };
  Call call(this);
  CombineParams q = p;
  call.view(q.acc, "combine acc");
  call.view(q.y, "combine y");
  auto kept = std::make_shared<Kept>();
  kept->rows.assign(p.rows.begin(), p.rows.end());
  kept->weights.assign(p.weights.begin(), p.weights.end());
  return call.push([this, q, kept]() mutable {
    q.rows = kept->rows;
    q.weights = kept->weights;
    return inner_->combine(q);
  });
}

Ticket ShadowOps::finish_ffn(const FinishFfnParams& p) {
  Call call(this);
  FinishFfnParams q = p;
  call.view(q.h, "finish_ffn h");
  call.view(q.acc, "finish_ffn acc");
  call.view(q.shared, "finish_ffn shared");
  return call.push([this, q] { return inner_->finish_ffn(q); });
}

Ticket ShadowOps::upload(void* dst, const void* host_src, int64_t bytes) {
  Call call(this);
  call.range(dst, bytes, "upload");
  FIRN_CHECK(!arena_.owns(host_src), "upload: the source is not host memory");
  return call.push([this, dst, host_src, bytes] { return inner_->upload(dst, host_src, bytes); });
}

Ticket ShadowOps::download(void* host_dst, const void* src, int64_t bytes) {
  Call call(this);
  call.range(src, bytes, "download");
  FIRN_CHECK(!arena_.owns(host_dst), "download: the destination is not host memory");
  if (bytes > 0) std::memset(host_dst, kDownloadByte, static_cast<size_t>(bytes));
  return call.push([this, host_dst, src, bytes] { return inner_->download(host_dst, src, bytes); });
}

Ticket ShadowOps::copy(void* dst, const void* src, int64_t bytes) {
  Call call(this);
  call.range(dst, bytes, "copy");
  call.range(src, bytes, "copy");
  return call.push([this, dst, src, bytes] { return inner_->copy(dst, src, bytes); });
}

Ticket ShadowOps::zero(void* dst, int64_t bytes) {
  Call call(this);
  call.range(dst, bytes, "zero");
  return call.push([this, dst, bytes] { return inner_->zero(dst, bytes); });
}

}  // namespace firn::test
