#include "model/forward.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace firn::model {

namespace {

int64_t bytes_of(DType dtype, int64_t rows, int64_t cols) {
  return rows * cols * static_cast<int64_t>(dtype_bytes(dtype));
}

// Widths of the buffers of one wave.
struct Sizes {
  int64_t chunk, pairs, q, kv, iq, ik;
  explicit Sizes(const ModelConfig& c, int64_t rows)
      : chunk(std::min(rows, Forward::kChunkRows)),
        pairs(c.n_moe() == 0 ? 0 : std::min(rows * c.experts_per_token, Forward::kGroupPairs)),
        q(c.heads * c.head_dim),
        kv(c.kv_heads * c.head_dim),
        iq(c.n_sparse() == 0 ? 0 : c.index_heads * c.index_dim),
        ik(c.n_sparse() == 0 ? 0 : c.index_dim) {}
  int64_t wide() const { return std::max(chunk, pairs); }
};

}  // namespace

Forward::Forward(const ModelConfig* config, const Weights* weights, Ops* ops, ForwardOptions options)
    : config_(*config), weights_(*weights), ops_(ops), options_(std::move(options)), act_(options_.activation) {
  FIRN_CHECK(act_ == DType::kBf16 || act_ == DType::kF32, "activations are bf16 or f32");
}

Forward::~Forward() { abandon(); }

int64_t Forward::wave_bytes(const ModelConfig& c, DType act, int64_t rows, int64_t n_logits) {
  const Sizes s(c, rows);
  int64_t total =
      bytes_of(act, rows, c.hidden) + bytes_of(act, s.wide(), c.hidden) + bytes_of(DType::kF32, s.wide(), c.hidden);
  if (c.n_moe() > 0) {
    total += bytes_of(DType::kF32, rows, c.hidden);
    total += bytes_of(DType::kF32, s.chunk, 2 * c.experts_per_token + c.experts);
    total += rows * c.experts_per_token * 16;  // picks on the host, by row and by expert
  }
  total += bytes_of(DType::kF32, s.chunk, s.q + 2 * s.kv + s.iq + s.ik);
  total += bytes_of(DType::kF32, s.chunk, s.q + s.kv + s.iq + s.ik);  // cache dtype, f32 at most
  total += bytes_of(act, s.chunk, s.q);
  if (c.n_sparse() > 0) total += bytes_of(DType::kI32, s.chunk, c.index_heads * c.topk_blocks);
  total += 2 * bytes_of(DType::kF32, n_logits, c.vocab);
  return total;
}

Ops::Limits Forward::limits(const ModelConfig& c, int64_t rows, int64_t context) {
  const Sizes s(c, rows);
  Ops::Limits l;
  l.rows = s.wide();
  l.hidden = c.hidden;
  l.intermediate = std::max({c.dense_intermediate, c.expert_intermediate, c.shared_intermediate});
  l.heads = c.heads;
  l.head_dim = c.head_dim;
  l.vocab = c.vocab;
  l.blocks = (context + c.block_tokens - 1) / c.block_tokens;
  l.index_heads = c.n_sparse() > 0 ? c.index_heads : 0;
  return l;
}

MatrixView Forward::view(const Buffer& buffer, DType dtype, int64_t rows, int64_t cols) const {
  FIRN_CHECK(bytes_of(dtype, rows, cols) <= buffer.bytes(), "view larger than its buffer");
  return {buffer.data(), dtype, rows, cols, cols, ops_->space()};
}

MatrixView Forward::hidden(const Chunk& chunk) const {
  return view(hidden_, DType::kF32, rows_, config_.hidden).slice_rows(chunk.row_begin, chunk.n_rows);
}

Status Forward::download(std::byte* dst, const void* src, int64_t bytes) {
  return ops_->wait(ops_->download(dst, src, bytes));
}

Status Forward::check_ids() const {
  for (size_t s = 0; s < wave_.spans.size(); ++s) {
    const WaveSpan& span = wave_.spans[s];
    if (span.ids.empty()) return invalid(fmt::format("sequence {} of the wave has no tokens: give at least one", s));
    for (size_t i = 0; i < span.ids.size(); ++i) {
      if (span.ids[i] < 0 || span.ids[i] >= config_.vocab) {
        return invalid(fmt::format("token id {} at position {}: the vocabulary has ids 0 to {}", span.ids[i],
                                   span.kv->length() + static_cast<int64_t>(i), config_.vocab - 1));
      }
    }
    const int64_t n = static_cast<int64_t>(span.ids.size());
    if (span.kv->length() + n > config_.max_positions) {
      return invalid(fmt::format("{} tokens and {} already there exceed the model's {} positions by {}", n,
                                 span.kv->length(), config_.max_positions,
                                 span.kv->length() + n - config_.max_positions));
    }
    for (const int64_t at : span.logits_at) FIRN_CHECK(at >= 0 && at < n, "logits_at outside the span");
    for (const int64_t at : span.replace_at) FIRN_CHECK(at >= 0 && at < n, "replace_at outside the span");
    FIRN_CHECK(span.replace_rows.size() == span.replace_at.size() * static_cast<size_t>(config_.hidden),
               "replace_rows must hold one row of H values for each of replace_at");
  }
  return {};
}

void Forward::cut_chunks(int64_t rows) {
  chunks_.clear();
  size_t s = 0;
  for (int64_t begin = 0; begin < rows; begin += kChunkRows) {
    Chunk chunk;
    chunk.row_begin = begin;
    chunk.n_rows = std::min(kChunkRows, rows - begin);
    for (int64_t row = begin; row < begin + chunk.n_rows;) {
      while (row >= span_row_[s] + static_cast<int64_t>(wave_.spans[s].ids.size())) ++s;
      const int64_t end =
          std::min(begin + chunk.n_rows, span_row_[s] + static_cast<int64_t>(wave_.spans[s].ids.size()));
      chunk.pieces.push_back({static_cast<int64_t>(s), row - begin, end - row, row - span_row_[s]});
      row = end;
    }
    chunks_.push_back(std::move(chunk));
  }
}

Status Forward::allocate(int64_t rows, int64_t n_logits) {
  const ModelConfig& c = config_;
  const Sizes s(c, rows);
  const DType cache = wave_.spans[0].kv->layout().dtype;
  Arena& arena = ops_->arena();
  auto need = [&](Buffer& buffer, int64_t bytes, const char* what) -> Status {
    if (buffer.bytes() >= bytes) return {};
    buffer = Buffer();
    FIRN_ASSIGN(buffer, arena.allocate(bytes, what));
    return {};
  };
  FIRN_TRY(need(hidden_, bytes_of(DType::kF32, rows, c.hidden), "hidden states of the wave"));
  FIRN_TRY(need(x_, bytes_of(act_, s.wide(), c.hidden), "normed activations"));
  FIRN_TRY(need(y_, bytes_of(DType::kF32, s.wide(), c.hidden), "layer outputs"));
  FIRN_TRY(need(q_raw_, bytes_of(DType::kF32, s.chunk, s.q), "queries"));
  FIRN_TRY(need(k_raw_, bytes_of(DType::kF32, s.chunk, s.kv), "keys"));
  FIRN_TRY(need(v_raw_, bytes_of(DType::kF32, s.chunk, s.kv), "values"));
  FIRN_TRY(need(q_, bytes_of(cache, s.chunk, s.q), "queries"));
  FIRN_TRY(need(k_, bytes_of(cache, s.chunk, s.kv), "keys"));
  FIRN_TRY(need(heads_, bytes_of(act_, s.chunk, s.q), "attention outputs"));
  if (c.n_sparse() > 0) {
    FIRN_TRY(need(iq_raw_, bytes_of(DType::kF32, s.chunk, s.iq), "index queries"));
    FIRN_TRY(need(ik_raw_, bytes_of(DType::kF32, s.chunk, s.ik), "index keys"));
    FIRN_TRY(need(iq_, bytes_of(cache, s.chunk, s.iq), "index queries"));
    FIRN_TRY(need(ik_, bytes_of(cache, s.chunk, s.ik), "index keys"));
    FIRN_TRY(need(block_ids_, bytes_of(DType::kI32, s.chunk, c.index_heads * c.topk_blocks), "block choices"));
  }
  if (c.n_moe() > 0) {
    FIRN_TRY(need(accumulator_, bytes_of(DType::kF32, rows, c.hidden), "sums of routed experts"));
    FIRN_TRY(need(picks_, bytes_of(DType::kI32, s.chunk, c.experts_per_token), "expert choices"));
    FIRN_TRY(need(pick_weights_, bytes_of(DType::kF32, s.chunk, c.experts_per_token), "expert weights"));
    FIRN_TRY(need(router_logits_, bytes_of(DType::kF32, s.chunk, c.experts), "router logits"));
    expert_ids_.resize(rows * c.experts_per_token);
    expert_weights_.resize(rows * c.experts_per_token);
  }
  FIRN_TRY(need(logits_device_, bytes_of(DType::kF32, n_logits, c.vocab), "logits"));
  logits_.resize(n_logits * c.vocab);
  return {};
}

Status Forward::begin(Wave wave) {
  abandon();
  wave_ = std::move(wave);
  finished_ = false;
  if (wave_.spans.empty()) return invalid("the wave holds no sequence");
  FIRN_TRY(check_ids());
  span_row_.clear();
  logit_rows_.clear();
  rows_ = 0;
  for (const WaveSpan& span : wave_.spans) {
    span_row_.push_back(rows_);
    for (const int64_t at : span.logits_at) logit_rows_.push_back(rows_ + at);
    rows_ += static_cast<int64_t>(span.ids.size());
  }
  cut_chunks(rows_);
  running_ = true;
  Status status = allocate(rows_, n_logits());
  for (WaveSpan& span : wave_.spans) {
    if (status.ok()) status = span.kv->reserve(static_cast<int64_t>(span.ids.size()));
  }
  if (!status.ok()) {
    // A smaller wave may still fit: what this one had taken must not stand in its way.
    abandon();
    release_buffers();
    return status;
  }
  if (config_.n_moe() > 0) ops_->zero(accumulator_.data(), bytes_of(DType::kF32, rows_, config_.hidden));
  captured_ = {};
  if (options_.capture.hidden) {
    captured_.hidden.resize((config_.layers + 1) * n_logits() * config_.hidden);
    captured_.final_hidden.resize(n_logits() * config_.hidden);
  }
  stage_ = Stage::kEmbed;
  layer_ = 0;
  next_ = 0;
  return {};
}

void Forward::release_buffers() {
  for (Buffer* buffer : {&hidden_, &accumulator_, &x_, &q_raw_, &k_raw_, &v_raw_, &iq_raw_, &ik_raw_, &q_, &k_, &iq_,
                         &ik_, &heads_, &block_ids_, &y_, &picks_, &pick_weights_, &router_logits_, &logits_device_}) {
    *buffer = Buffer();
  }
}

void Forward::abandon() {
  if (!running_) return;
  running_ = false;
  for (WaveSpan& span : wave_.spans) span.kv->truncate(span.kv->length());
}

double Forward::progress() const {
  if (finished_) return 1.0;
  if (stage_ == Stage::kEmbed) return 0.0;
  if (stage_ == Stage::kLogits) return 1.0;
  const double layers = static_cast<double>(config_.layers);
  double within = 0;
  const double share = static_cast<double>(next_) / static_cast<double>(chunks_.size());
  switch (stage_) {
    case Stage::kAttention:
      within = 0.5 * share;
      break;
    case Stage::kDenseMlp:
      within = 0.5 + 0.5 * share;
      break;
    case Stage::kExperts:
      within = 0.5 + 0.45 * static_cast<double>(next_) / static_cast<double>(std::max<size_t>(1, groups_.size()));
      break;
    case Stage::kFinishMoe:
      within = 0.95 + 0.05 * share;
      break;
    default:
      within = 0.5;
      break;
  }
  return (static_cast<double>(layer_) + within) / layers;
}

std::span<const float> Forward::logits(int64_t i) const {
  FIRN_CHECK(finished_ && i >= 0 && i < n_logits(), "logits asked of an unfinished wave or unwanted position");
  return {logits_.data() + i * config_.vocab, static_cast<size_t>(config_.vocab)};
}

Status Forward::step() {
  FIRN_CHECK(running_ && !finished_, "step() without a running wave");
  Status status;
  switch (stage_) {
    case Stage::kEmbed:
      status = embed_step(chunks_[next_]);
      break;
    case Stage::kAttention:
      status = attention_step(chunks_[next_]);
      break;
    case Stage::kDenseMlp:
      status = dense_mlp_step(chunks_[next_]);
      break;
    case Stage::kRouter:
      status = router_step(chunks_[next_]);
      break;
    case Stage::kExperts:
      status = experts_step(groups_[next_]);
      break;
    case Stage::kFinishMoe:
      status = finish_moe_step(chunks_[next_]);
      break;
    case Stage::kLogits:
      status = logits_step();
      break;
  }
  if (!status.ok()) {
    abandon();
    // The wave is lost, the device need not be; where it is, the next operation says so again.
    if (ops_->recover().ok() && status.code() == Code::kNoMemory) release_buffers();
    return status;
  }
  advance();
  if (options_.capture.hidden && next_ == 0 && (stage_ == Stage::kAttention || stage_ == Stage::kLogits)) {
    status = capture_hidden(stage_ == Stage::kLogits ? config_.layers : layer_);
    if (!status.ok()) abandon();
  }
  return status;
}

void Forward::advance() {
  ++next_;
  const int64_t chunks = static_cast<int64_t>(chunks_.size());
  auto enter = [&](Stage stage) {
    stage_ = stage;
    next_ = 0;
  };
  auto next_layer = [&] {
    ++layer_;
    enter(layer_ == config_.layers ? Stage::kLogits : Stage::kAttention);
  };
  switch (stage_) {
    case Stage::kEmbed:
      if (next_ == chunks) enter(Stage::kAttention);
      break;
    case Stage::kAttention:
      if (next_ == chunks) enter(config_.moe_layer[layer_] ? Stage::kRouter : Stage::kDenseMlp);
      break;
    case Stage::kDenseMlp:
      if (next_ == chunks) next_layer();
      break;
    case Stage::kRouter:
      if (next_ == chunks) {
        make_expert_groups();
        enter(Stage::kExperts);
      }
      break;
    case Stage::kExperts:
      if (next_ == static_cast<int64_t>(groups_.size())) enter(Stage::kFinishMoe);
      break;
    case Stage::kFinishMoe:
      if (next_ == chunks) next_layer();
      break;
    case Stage::kLogits:
      for (WaveSpan& span : wave_.spans) span.kv->commit(static_cast<int64_t>(span.ids.size()));
      running_ = false;
      finished_ = true;
      break;
  }
}

std::vector<KvSpan> Forward::spans_of(const Chunk& chunk, int64_t layer) const {
  std::vector<KvSpan> spans;
  for (const Chunk::Piece& piece : chunk.pieces) {
    const KvCache& kv = *wave_.spans[piece.span].kv;
    spans.push_back(kv.span(layer, piece.row_begin, piece.n_rows, kv.length() + piece.offset));
  }
  return spans;
}

Status Forward::embed_step(const Chunk& chunk) {
  std::vector<int32_t> ids;
  for (const Chunk::Piece& piece : chunk.pieces) {
    const auto& from = wave_.spans[piece.span].ids;
    ids.insert(ids.end(), from.begin() + piece.offset, from.begin() + piece.offset + piece.n_rows);
  }
  const MatrixView h = hidden(chunk);
  Ticket ticket = ops_->embed({ids, weights_.embed, h});

  for (const Chunk::Piece& piece : chunk.pieces) {
    const WaveSpan& span = wave_.spans[piece.span];
    for (size_t i = 0; i < span.replace_at.size(); ++i) {
      const int64_t at = span.replace_at[i] - piece.offset;
      if (at < 0 || at >= piece.n_rows) continue;
      const float* from = span.replace_rows.data() + static_cast<int64_t>(i) * config_.hidden;
      ticket = ops_->upload(h.row(piece.row_begin + at), from, bytes_of(DType::kF32, 1, config_.hidden));
    }
  }
  return ops_->wait(ticket);
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
    ids = view(block_ids_, DType::kI32, n, c.index_heads * c.topk_blocks);
    IndexSelectParams select;
    select.q = iq;
    select.heads = c.index_heads;
    select.spans = spans;
    select.layout = layout;
    select.topk = c.topk_blocks;
    select.init_blocks = c.init_blocks;
    select.local_blocks = c.local_blocks;
    select.ids = ids;
    const Ticket chosen = ops_->index_select(select);
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
  ops_->attention(attention);
  if (options_.capture.mass && sparse) FIRN_TRY(capture_mass(attention));

  const WeightView o[] = {w.o};
  const MatrixView y[] = {view(y_, DType::kF32, n, c.hidden)};
  ops_->linear({attention.out, o, y});
  return ops_->wait(ops_->add({h, y[0]}));
}

// A block's share of a head's softmax follows from its own maximum and sum (runtime/ops.h: AttentionPartialParams).
Status Forward::capture_mass(const AttentionParams& attention) {
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
  const int32_t* ids = captured_.block_ids.data() + captured_.block_ids.size() - rows * config_.kv_heads * topk;
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

Status Forward::dense_mlp_step(const Chunk& chunk) {
  const LayerWeights& w = weights_.layers[layer_];
  const MatrixView h = hidden(chunk);
  const MatrixView x = view(x_, act_, chunk.n_rows, config_.hidden);
  const MatrixView y = view(y_, DType::kF32, chunk.n_rows, config_.hidden);
  ops_->norm({h, {}, w.post_norm, x});
  const MlpTask task[] = {{-1, w.mlp_gate, w.mlp_up, w.mlp_down, 0, chunk.n_rows}};
  ops_->mlp({x, task, config_.activation, y});
  return ops_->wait(ops_->add({h, y}));
}

Status Forward::router_step(const Chunk& chunk) {
  const ModelConfig& c = config_;
  const LayerWeights& w = weights_.layers[layer_];
  const int64_t n = chunk.n_rows;
  // The router is an fp32 computation: its input is the norm before rounding (y_ is free here).
  const MatrixView x = view(y_, DType::kF32, n, c.hidden);
  ops_->norm({hidden(chunk), {}, w.post_norm, x});
  RouterParams router;
  router.x = x;
  router.gate = w.router;
  router.bias = w.router_bias;
  router.topk = c.experts_per_token;
  router.ids = view(picks_, DType::kI32, n, c.experts_per_token);
  router.weights = view(pick_weights_, DType::kF32, n, c.experts_per_token);
  if (options_.capture.routing) router.logits = view(router_logits_, DType::kF32, n, c.experts);
  FIRN_TRY(ops_->wait(ops_->router(router)));
  const int64_t at = chunk.row_begin * c.experts_per_token, count = n * c.experts_per_token;
  FIRN_TRY(download(reinterpret_cast<std::byte*>(expert_ids_.data() + at), picks_.data(), count * 4));
  FIRN_TRY(download(reinterpret_cast<std::byte*>(expert_weights_.data() + at), pick_weights_.data(), count * 4));
  for (int64_t i = at; i < at + count; ++i) {
    if (expert_ids_[i] < 0 || expert_ids_[i] >= c.experts || !std::isfinite(expert_weights_[i])) {
      return internal(
          fmt::format("router of layer {} gave no usable choice for row {} (expert {}, weight {}): the hidden "
                      "state is not finite; check the checkpoint with `firn inspect`",
                      layer_, i / c.experts_per_token, expert_ids_[i], expert_weights_[i]));
    }
  }
  if (options_.capture.routing) {
    auto keep = [](auto& all, const auto* from, int64_t k) { all.insert(all.end(), from, from + k); };
    keep(captured_.expert_ids, expert_ids_.data() + at, count);
    keep(captured_.expert_weights, expert_weights_.data() + at, count);
    std::vector<float> rows(n * c.experts);
    FIRN_TRY(download(reinterpret_cast<std::byte*>(rows.data()), router_logits_.data(), n * c.experts * 4));
    keep(captured_.router_logits, rows.data(), n * c.experts);
  }
  return {};
}

// Groups go through the experts in ascending id, so every row adds its experts in that order whatever the cut.
void Forward::make_expert_groups() {
  const int64_t k = config_.experts_per_token;
  std::vector<int64_t> begin(config_.experts + 1, 0);
  for (int64_t i = 0; i < rows_ * k; ++i) ++begin[expert_ids_[i] + 1];
  for (int64_t e = 0; e < config_.experts; ++e) begin[e + 1] += begin[e];
  pair_rows_.resize(rows_ * k);
  pair_weights_.resize(rows_ * k);
  std::vector<int64_t> at(begin.begin(), begin.end() - 1);
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t j = row * k; j < (row + 1) * k; ++j) {
      const int64_t to = at[expert_ids_[j]]++;
      pair_rows_[to] = static_cast<int32_t>(row);
      pair_weights_[to] = expert_weights_[j];
    }
  }
  groups_.clear();
  ExpertGroup group;
  auto close = [&] {
    if (group.n_pairs > 0) groups_.push_back(std::move(group));
    group = ExpertGroup();
  };
  for (int64_t e = 0; e < config_.experts; ++e) {
    for (int64_t p = begin[e]; p < begin[e + 1];) {
      if (group.n_pairs == kGroupPairs) close();
      // An expert starts in a new group rather than being split, unless it is larger than a whole group.
      const int64_t rest = begin[e + 1] - p;
      if (group.n_pairs > 0 && group.n_pairs + rest > kGroupPairs) close();
      const int64_t n = std::min(rest, kGroupPairs - group.n_pairs);
      if (group.n_pairs == 0) group.pair_begin = p;
      group.items.push_back({static_cast<int32_t>(e), p, n});
      group.n_pairs += n;
      p += n;
    }
  }
  close();
}

Status Forward::experts_step(const ExpertGroup& group) {
  const ModelConfig& c = config_;
  const LayerWeights& w = weights_.layers[layer_];
  const int64_t n = group.n_pairs;
  const std::span<const int32_t> rows(pair_rows_.data() + group.pair_begin, n);
  const MatrixView x = view(x_, act_, n, c.hidden), y = view(y_, DType::kF32, n, c.hidden);
  ops_->norm({view(hidden_, DType::kF32, rows_, c.hidden), rows, w.post_norm, x});

  int64_t moe_layer = 0;
  for (int64_t l = 0; l < layer_; ++l) moe_layer += c.moe_layer[l];
  std::vector<std::vector<MlpTask>> tasks(options_.expert_ops.size() + 1);
  for (const ExpertGroup::Item& item : group.items) {
    const ExpertWeights& e = w.experts[item.expert];
    const size_t home = options_.expert_home.empty() ? 0 : options_.expert_home[moe_layer][item.expert];
    tasks[home].push_back({item.expert, e.gate, e.up, e.down, item.pair_begin - group.pair_begin, item.n_pairs});
  }
  if (!tasks[0].empty()) ops_->mlp({x, tasks[0], c.activation, y});
  for (size_t home = 1; home < tasks.size(); ++home) {
    if (!tasks[home].empty()) FIRN_TRY(experts_elsewhere(options_.expert_ops[home - 1], tasks[home], n));
  }
  return ops_->wait(ops_->combine({view(accumulator_, DType::kF32, rows_, c.hidden), y, rows,
                                   std::span<const float>(pair_weights_.data() + group.pair_begin, n)}));
}

// Activations move to where the weights are, outputs come back to their rows of y_.
Status Forward::experts_elsewhere(Ops* other, const std::vector<MlpTask>& tasks, int64_t n_pairs) {
  const int64_t H = config_.hidden;
  const int64_t x_row = bytes_of(act_, 1, H), y_row = bytes_of(DType::kF32, 1, H);
  int64_t total = 0;
  for (const MlpTask& task : tasks) total += task.n_rows;
  FIRN_CHECK(total <= n_pairs, "tasks hold more rows than the group");
  std::vector<std::byte> staging(total * std::max(x_row, y_row));
  FIRN_ASSIGN(Buffer x, other->arena().allocate(total * x_row, "activations of experts"));
  FIRN_ASSIGN(Buffer y, other->arena().allocate(total * y_row, "outputs of experts"));
  std::vector<MlpTask> moved = tasks;
  int64_t at = 0;
  Ticket ticket;
  for (MlpTask& task : moved) {
    const std::byte* from = x_.as<std::byte>() + task.row_begin * x_row;
    ticket = ops_->download(staging.data() + at * x_row, from, task.n_rows * x_row);
    task.row_begin = at;
    at += task.n_rows;
  }
  FIRN_TRY(ops_->wait(ticket));
  FIRN_TRY(other->wait(other->upload(x.data(), staging.data(), total * x_row)));
  other->mlp({{x.data(), act_, total, H, H, other->space()},
              moved,
              config_.activation,
              {y.data(), DType::kF32, total, H, H, other->space()}});
  FIRN_TRY(other->wait(other->download(staging.data(), y.data(), total * y_row)));
  at = 0;
  for (const MlpTask& task : tasks) {
    ticket =
        ops_->upload(y_.as<std::byte>() + task.row_begin * y_row, staging.data() + at * y_row, task.n_rows * y_row);
    at += task.n_rows;
  }
  return ops_->wait(ticket);
}

Status Forward::finish_moe_step(const Chunk& chunk) {
  const ModelConfig& c = config_;
  const LayerWeights& w = weights_.layers[layer_];
  const int64_t n = chunk.n_rows;
  const MatrixView h = hidden(chunk);
  FinishFfnParams finish;
  finish.h = h;
  finish.acc = view(accumulator_, DType::kF32, rows_, c.hidden).slice_rows(chunk.row_begin, n);
  finish.scale = c.routed_scale;
  if (!w.shared_gate.empty()) {
    const MatrixView x = view(x_, act_, n, c.hidden), y = view(y_, DType::kF32, n, c.hidden);
    ops_->norm({h, {}, w.post_norm, x});
    const MlpTask task[] = {{-1, w.shared_gate, w.shared_up, w.shared_down, 0, n}};
    ops_->mlp({x, task, c.activation, y});
    finish.shared = y;
  }
  return ops_->wait(ops_->finish_ffn(finish));
}

Status Forward::capture_hidden(int64_t at) {
  const int64_t H = config_.hidden;
  Ticket ticket;
  for (size_t i = 0; i < logit_rows_.size(); ++i) {
    const MatrixView h = view(hidden_, DType::kF32, rows_, H).slice_rows(logit_rows_[i], 1);
    float* to = captured_.hidden.data() + (at * n_logits() + static_cast<int64_t>(i)) * H;
    ticket = ops_->download(to, h.data, bytes_of(DType::kF32, 1, H));
  }
  return ops_->wait(ticket);
}

Status Forward::logits_step() {
  const ModelConfig& c = config_;
  // At most a chunk of rows at a time goes through x_.
  for (int64_t begin = 0; begin < n_logits(); begin += kChunkRows) {
    const int64_t n = std::min(kChunkRows, n_logits() - begin);
    std::vector<int32_t> rows(logit_rows_.begin() + begin, logit_rows_.begin() + begin + n);
    const MatrixView x = view(x_, act_, n, c.hidden);
    ops_->norm({view(hidden_, DType::kF32, rows_, c.hidden), rows, weights_.final_norm, x});
    if (options_.capture.hidden) {
      std::vector<std::byte> raw(bytes_of(act_, n, c.hidden));
      FIRN_TRY(ops_->wait(ops_->download(raw.data(), x.data, static_cast<int64_t>(raw.size()))));
      for (int64_t i = 0; i < n * c.hidden; ++i) {
        captured_.final_hidden[begin * c.hidden + i] = act_ == DType::kF32
                                                           ? reinterpret_cast<const float*>(raw.data())[i]
                                                           : to_float(reinterpret_cast<const Bf16*>(raw.data())[i]);
      }
    }
    const WeightView head[] = {weights_.lm_head};
    const MatrixView out[] = {view(logits_device_, DType::kF32, n_logits(), c.vocab).slice_rows(begin, n)};
    FIRN_TRY(ops_->wait(ops_->linear({x, head, out})));
  }
  if (n_logits() == 0) return {};
  return download(reinterpret_cast<std::byte*>(logits_.data()), logits_device_.data(),
                  bytes_of(DType::kF32, n_logits(), c.vocab));
}

}  // namespace firn::model
