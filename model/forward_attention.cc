// Forward: attention of a chunk, and fetching the far blocks it chose.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <unordered_set>

#include "model/forward.h"

namespace firn::model {

// Blocks that rows of the chunk chose and that are not near.
struct Forward::Far {
  struct Pinned {
    KvCache* kv;
    int64_t group, block;
    storage::SlotCache::Pin pin;
  };
  std::vector<int32_t> ids;  // [rows of the chunk][groups * topk]
  std::vector<Pinned> pins;
  std::unordered_set<storage::SlotKey> held;
  int64_t begin = 0, end = 0;  // rows whose blocks are pinned
};

// Into block_ids_, as many rows as q has.
IndexSelectParams Forward::choice(const MatrixView& q, std::span<const KvSpan> spans, const KvLayout& layout) const {
  IndexSelectParams select;
  select.q = q;
  select.heads = config_.index_heads;
  select.spans = spans;
  select.layout = layout;
  select.topk = config_.topk_blocks;
  select.init_blocks = config_.init_blocks;
  select.local_blocks = config_.local_blocks;
  select.ids = view(block_ids_, DType::kI32, q.rows, config_.index_heads * config_.topk_blocks);
  return select;
}

Status Forward::attention_step(const Chunk& chunk) {
  const ModelConfig& c = config_;
  const LayerWeights& w = weights_.layers[layer_];
  const bool sparse = c.sparse_layer[layer_];
  const KvLayout& layout = wave_.spans[0].kv->layout();
  const int64_t n = chunk.n_rows;
  const int64_t q_width = c.heads * c.head_dim, kv_width = c.kv_heads * c.head_dim;
  const std::vector<KvSpan> spans = spans_of(chunk, layer_);

  const MatrixView h = hidden(chunk);
  const MatrixView x = view(x_, act_, n, c.hidden);
  ops_->norm({h, {}, w.input_norm, x});
  // The same before rounding, for what is cached or decides (y_ is free here).
  const bool two_terms = act_ == DType::kBf16;
  const MatrixView x_full = two_terms ? view(y_, DType::kF32, n, c.hidden) : x;
  if (two_terms) ops_->norm({h, {}, w.input_norm, x_full});

  // The index branch comes first: its choice decides what has to be fetched.
  MatrixView ids;
  std::optional<Far> far;
  if (sparse) {
    const int64_t iq_width = c.index_heads * c.index_dim;
    const WeightView index_weights[] = {w.index_q, w.index_k};
    const MatrixView raw[] = {view(iq_raw_, DType::kF32, n, iq_width), view(ik_raw_, DType::kF32, n, c.index_dim)};
    ops_->linear({x_full, index_weights, raw, two_terms});
    const MatrixView iq = view(iq_, layout.dtype, n, iq_width), ik = view(ik_, layout.dtype, n, c.index_dim);
    const NormRopePart parts[] = {{raw[0], c.index_heads, c.index_dim, w.index_q_norm, iq},
                                  {raw[1], 1, c.index_dim, w.index_k_norm, ik}};
    ops_->norm_rope({parts, spans, c.rotary_dim, c.rope_theta});
    ops_->index_append({ik, spans, layout});
    const IndexSelectParams select = choice(iq, spans, layout);
    ids = select.ids;
    const Ticket chosen = ops_->index_select(select);
    if (wave_.spans[0].kv->may_be_far() && rows_ < KvCache::kManyRows) {
      far.emplace();
      FIRN_TRY(ops_->wait(chosen));
      far->ids.resize(static_cast<size_t>(ids.rows * ids.cols));
      FIRN_TRY(download(reinterpret_cast<std::byte*>(far->ids.data()), ids.data, bytes_of(DType::kI32, n, ids.cols)));
      FIRN_TRY(pin_far(chunk, &*far));  // the disk works during the projections
    }
    if (options_.capture.blocks) {
      FIRN_TRY(ops_->wait(chosen));
      std::vector<int32_t>& all = captured_.block_ids;
      const size_t at = all.size();
      all.resize(at + ids.rows * ids.cols);
      FIRN_TRY(download(reinterpret_cast<std::byte*>(all.data() + at), ids.data, bytes_of(DType::kI32, n, ids.cols)));
    }
  }

  const WeightView qkv[] = {w.q, w.k, w.v};
  const MatrixView raw[] = {view(q_raw_, DType::kF32, n, q_width), view(k_raw_, DType::kF32, n, kv_width),
                            view(v_raw_, DType::kF32, n, kv_width)};
  ops_->linear({x, std::span(qkv).first(1), std::span(raw).first(1)});
  ops_->linear({x_full, std::span(qkv).subspan(1), std::span(raw).subspan(1), two_terms});
  const MatrixView q = view(q_, layout.dtype, n, q_width), k = view(k_, layout.dtype, n, kv_width);
  const NormRopePart parts[] = {{raw[0], c.heads, c.head_dim, w.q_norm, q},
                                {raw[1], c.kv_heads, c.head_dim, w.k_norm, k}};
  ops_->norm_rope({parts, spans, c.rotary_dim, c.rope_theta});
  ops_->kv_append({k, raw[2], spans, layout});

  AttentionParams attention;
  attention.q = q;
  attention.heads_per_group = c.heads_per_group();
  attention.spans = spans;
  attention.layout = layout;
  attention.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.head_dim)));
  attention.block_ids = ids;
  attention.topk = sparse ? c.topk_blocks : 0;
  attention.out = view(heads_, act_, n, q_width);
  FIRN_TRY(attend(chunk, attention, far ? &*far : nullptr));

  const WeightView o[] = {w.o};
  const MatrixView y[] = {view(y_, DType::kF32, n, c.hidden)};
  ops_->linear({attention.out, o, y});
  FIRN_TRY(ops_->wait(ops_->add({h, y[0]})));
  if (guess_kv_) {
    const auto start = std::chrono::steady_clock::now();
    guess_blocks(chunk);
    kv_cost_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  return {};
}

Status Forward::pin_far(const Chunk& chunk, Far* far) {
  const int64_t groups = config_.kv_heads, topk = config_.topk_blocks;
  far->pins.clear();
  far->held.clear();
  far->begin = far->end;
  for (const Chunk::Piece& piece : chunk.pieces) {
    KvCache& kv = *wave_.spans[piece.span].kv;
    for (int64_t row = std::max(piece.row_begin, far->begin); row < piece.row_begin + piece.n_rows; ++row) {
      for (int64_t i = 0; i < groups * topk; ++i) {
        const int32_t block = far->ids[static_cast<size_t>(row * groups * topk + i)];
        const storage::SlotKey key = block < 0 ? 0 : kv.far_key(layer_, i / topk, block);
        if (key == 0 || !far->held.insert(key).second) continue;
        storage::SlotCache& near = kv.tier()->near();
        FIRN_ASSIGN(auto pin, row > far->begin ? near.acquire(key) : near.acquire_waiting(key));
        if (!pin.has_value()) {
          if (row > far->begin) return {};
          return no_memory(fmt::format(
              "--kv-ram is too small: one token may need {} blocks of K and V at once, there is room for {}",
              groups * topk, kv.tier()->near().n_slots()));
        }
        far->pins.push_back({&kv, i / topk, block, std::move(*pin)});
      }
      far->end = row + 1;
    }
  }
  return {};
}

Status Forward::attend(const Chunk& chunk, const AttentionParams& all, Far* far) {
  const bool mass = options_.capture.mass && !all.block_ids.empty();
  if (far == nullptr) {
    const Ticket ticket = ops_->attention(all);
    return mass ? capture_mass(all, 0) : ops_->wait(ticket);
  }
  for (;;) {
    const auto start = std::chrono::steady_clock::now();
    for (Far::Pinned& p : far->pins) FIRN_TRY(p.pin.wait());
    kv_cost_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    for (Far::Pinned& p : far->pins) p.kv->set_near(layer_, p.group, p.block, p.pin.data());
    const int64_t begin = far->begin, n = far->end - far->begin;
    AttentionParams part = all;
    std::vector<KvSpan> spans;
    for (KvSpan span : all.spans) {
      const int64_t first = std::max(span.row_begin, begin), last = std::min(span.row_begin + span.n_rows, begin + n);
      if (first >= last) continue;
      span.pos_begin += first - span.row_begin;
      span.row_begin = first - begin;
      span.n_rows = last - first;
      spans.push_back(span);
    }
    part.spans = spans;
    part.q = all.q.slice_rows(begin, n);
    part.block_ids = all.block_ids.slice_rows(begin, n);
    part.out = all.out.slice_rows(begin, n);
    Status status = ops_->wait(ops_->attention(part));
    if (status.ok() && mass) status = capture_mass(part, chunk.n_rows - far->end);
    for (Far::Pinned& p : far->pins) p.kv->set_near(layer_, p.group, p.block, nullptr);
    FIRN_TRY(status);
    if (far->end == chunk.n_rows) return {};
    FIRN_TRY(pin_far(chunk, far));
  }
}

// The next sparse layer's choice, from the residual as it is now: what it names is fetched while experts compute.
void Forward::guess_blocks(const Chunk& chunk) {
  const ModelConfig& c = config_;
  int64_t layer = layer_ + 1;
  while (layer < c.layers && !c.sparse_layer[layer]) ++layer;
  if (layer >= c.layers || !wave_.spans[0].kv->may_be_far()) return;
  const LayerWeights& w = weights_.layers[layer];
  const KvLayout& layout = wave_.spans[0].kv->layout();
  const int64_t n = chunk.n_rows, iq_width = c.index_heads * c.index_dim;
  const std::vector<KvSpan> spans = spans_of(chunk, layer);
  const MatrixView x = view(x_, act_, n, c.hidden), iq = view(iq_, layout.dtype, n, iq_width);
  ops_->norm({hidden(chunk), {}, w.input_norm, x});
  const WeightView weights[] = {w.index_q};
  const MatrixView raw[] = {view(iq_raw_, DType::kF32, n, iq_width)};
  ops_->linear({x, weights, raw});
  const NormRopePart parts[] = {{raw[0], c.index_heads, c.index_dim, w.index_q_norm, iq}};
  ops_->norm_rope({parts, spans, c.rotary_dim, c.rope_theta});
  const IndexSelectParams select = choice(iq, spans, layout);
  if (!ops_->wait(ops_->index_select(select)).ok()) return;  // only a guess
  std::vector<int32_t> ids(static_cast<size_t>(n * c.index_heads * c.topk_blocks));
  if (!download(reinterpret_cast<std::byte*>(ids.data()), select.ids.data, static_cast<int64_t>(ids.size()) * 4).ok()) {
    return;
  }
  for (const Chunk::Piece& piece : chunk.pieces) {
    KvCache& kv = *wave_.spans[piece.span].kv;
    for (int64_t row = piece.row_begin; row < piece.row_begin + piece.n_rows; ++row) {
      for (int64_t i = 0; i < c.index_heads * c.topk_blocks; ++i) {
        const int32_t block = ids[static_cast<size_t>(row * c.index_heads * c.topk_blocks + i)];
        const storage::SlotKey key = block < 0 ? 0 : kv.far_key(layer, i / c.topk_blocks, block);
        if (key != 0) kv.tier()->near().prefetch(key, storage::Cause::kLookahead);
      }
    }
  }
}

// A block's share of a head's softmax follows from its own maximum and sum (runtime/ops.h: AttentionPartialParams).
Status Forward::capture_mass(const AttentionParams& attention, int64_t rows_after) {
  const int64_t rows = attention.q.rows, heads = config_.heads, per_group = config_.heads_per_group();
  const int64_t topk = config_.topk_blocks, entry = config_.head_dim + 2;
  const int64_t bytes = bytes_of(DType::kF32, rows * heads, topk * entry);
  FIRN_ASSIGN(const Buffer partials, ops_->arena().allocate(bytes, "attention of single blocks"));
  AttentionPartialParams params;
  params.base = attention;
  params.partials = view(partials, DType::kF32, rows * heads, topk * entry);
  ops_->attention_partial(params);
  std::vector<float> host(static_cast<size_t>(rows * heads * topk * entry));
  FIRN_TRY(download(reinterpret_cast<std::byte*>(host.data()), partials.data(), bytes));
  // The chunk's choices were just captured; these rows are not always its last.
  const int32_t* ids =
      captured_.block_ids.data() + captured_.block_ids.size() - (rows + rows_after) * config_.kv_heads * topk;
  std::vector<float> mass(static_cast<size_t>(rows * heads * topk), 0.0f);
  for (int64_t i = 0; i < rows * heads; ++i) {
    const int64_t list = (i / heads * config_.kv_heads + i % heads / per_group) * topk;
    int64_t n = 0;
    while (n < topk && ids[list + n] >= 0) ++n;
    auto partial = [&](int64_t j) { return host.data() + (i * topk + j) * entry; };
    double largest = -HUGE_VAL, total = 0;
    for (int64_t j = 0; j < n; ++j) largest = std::max<double>(largest, partial(j)[0]);
    for (int64_t j = 0; j < n; ++j) total += partial(j)[1] * std::exp(partial(j)[0] - largest);
    for (int64_t j = 0; j < n; ++j) {
      mass[(list + j) * per_group + i % per_group] =
          static_cast<float>(partial(j)[1] * std::exp(partial(j)[0] - largest) / total);
    }
  }
  captured_.block_mass.insert(captured_.block_mass.end(), mass.begin(), mass.end());
  return {};
}

}  // namespace firn::model
