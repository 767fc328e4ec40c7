#include "model/forward.h"

#include "model/expert_store.h"
#include "model/hidden_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

namespace firn::model {

namespace {

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

double seconds_since(std::chrono::steady_clock::time_point t) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - t).count();
}

int64_t guess_bytes(const ModelConfig& c) {
  return 256 + Forward::kGuessRows * (c.hidden + 2 * c.experts_per_token) * int64_t{4};
}

}  // namespace

Forward::Forward(const ModelConfig* config, const Weights* weights, Ops* ops, ForwardOptions options)
    : config_(*config), weights_(*weights), ops_(ops), options_(std::move(options)), act_(options_.activation) {
  FIRN_CHECK(act_ == DType::kBf16 || act_ == DType::kF32, "activations are bf16 or f32");
}

Forward::~Forward() { abandon(); }

int64_t Forward::wave_bytes(const ModelConfig& c, DType act, int64_t rows, int64_t n_logits, bool stream) {
  if (stream) rows = std::min(rows, kTileRows);
  const Sizes s(c, rows);
  int64_t total = bytes_of(DType::kF32, rows + n_logits, c.hidden) - bytes_of(act, rows, c.hidden) +
                  bytes_of(act, rows, c.hidden) + bytes_of(act, s.wide(), c.hidden) +
                  bytes_of(DType::kF32, s.wide(), c.hidden);
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
  return total + guess_bytes(c);
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
  const Section& s = section();
  return view(hidden_, DType::kF32, s.n_rows, config_.hidden).slice_rows(chunk.row_begin - s.row_begin, chunk.n_rows);
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

void Forward::cut_sections() {
  sections_.clear();
  const int64_t each = wave_.hidden.stream ? kTileRows : rows_;
  for (int64_t begin = 0; begin < rows_; begin += each) {
    Section s;
    s.row_begin = begin;
    s.n_rows = std::min(each, rows_ - begin);
    s.chunk_begin = begin / kChunkRows;
    s.chunk_end = (begin + s.n_rows + kChunkRows - 1) / kChunkRows;
    sections_.push_back(s);
  }
}

// `rows`: of the largest section.
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
  FIRN_TRY(need(logit_hidden_, bytes_of(DType::kF32, n_logits, c.hidden), "hidden states of the wanted positions"));
  if (options_.experts != nullptr && options_.prefetch_experts) {
    FIRN_TRY(need(guess_, guess_bytes(c), "guesses"));
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
  FIRN_CHECK(wave_.hidden.files[0] != nullptr || (!wave_.hidden.stream && wave_.hidden.start_layer == 0),
             "hidden states without a file");
  cut_chunks(rows_);
  cut_sections();
  running_ = true;
  Status status = allocate(sections_.front().n_rows, n_logits());
  for (WaveSpan& span : wave_.spans) {
    if (status.ok()) status = span.kv->reserve(static_cast<int64_t>(span.ids.size()));
  }
  if (!status.ok()) {
    // A smaller wave may still fit: what this one had taken must not stand in its way.
    abandon();
    release_buffers();
    return status;
  }
  if (config_.n_moe() > 0) {
    ops_->zero(accumulator_.data(), bytes_of(DType::kF32, sections_.front().n_rows, config_.hidden));
  }
  captured_ = {};
  if (options_.capture.hidden) {
    captured_.hidden.resize((config_.layers + 1) * n_logits() * config_.hidden);
    captured_.final_hidden.resize(n_logits() * config_.hidden);
  }
  layer_ = layers_done_ = wave_.hidden.start_layer;
  section_ = 0;
  const bool few = rows_ <= kGuessRows;
  guess_experts_ = options_.experts != nullptr && options_.prefetch_experts &&
                   (!few || options_.always_guess || expert_probe_.guess());
  guess_kv_ =
      wave_.spans[0].kv->may_be_far() && options_.prefetch_kv && few && (options_.always_guess || kv_probe_.guess());
  expert_cost_ = kv_cost_ = 0;
  enter(layer_ == 0 ? Stage::kEmbed : Stage::kLoad);
  return {};
}

void Forward::enter(Stage stage) {
  stage_ = stage;
  next_ = 0;
}

void Forward::release_buffers() {
  for (Buffer* buffer : {&hidden_,       &accumulator_,   &x_,    &q_raw_, &k_raw_,        &v_raw_,
                         &iq_raw_,       &ik_raw_,        &q_,    &k_,     &iq_,           &ik_,
                         &heads_,        &block_ids_,     &y_,    &picks_, &pick_weights_, &router_logits_,
                         &logit_hidden_, &logits_device_, &guess_}) {
    *buffer = Buffer();
  }
}

void Forward::abandon() {
  walk_.reset();
  if (!running_) return;
  running_ = false;
  for (WaveSpan& span : wave_.spans) span.kv->truncate(span.kv->length());
}

double Forward::progress() const {
  if (finished_) return 1.0;
  if (stage_ == Stage::kLogits) return 1.0;
  const double chunks = static_cast<double>(section().chunk_end - section().chunk_begin);
  const double share = static_cast<double>(next_) / chunks;
  double within = 0;
  switch (stage_) {
    case Stage::kLoad:
    case Stage::kEmbed:
      break;
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
    case Stage::kStore:
      within = 1.0;
      break;
    default:
      within = 0.5;
      break;
  }
  const double rows = static_cast<double>(section().row_begin) + within * static_cast<double>(section().n_rows);
  return (static_cast<double>(layer_) + rows / static_cast<double>(rows_)) / static_cast<double>(config_.layers);
}

std::span<const float> Forward::logits(int64_t i) const {
  FIRN_CHECK(finished_ && i >= 0 && i < n_logits(), "logits asked of an unfinished wave or unwanted position");
  return {logits_.data() + i * config_.vocab, static_cast<size_t>(config_.vocab)};
}

Status Forward::step() {
  FIRN_CHECK(running_ && !finished_, "step() without a running wave");
  Status status;
  const auto chunk = [&]() -> const Chunk& { return chunks_[static_cast<size_t>(section().chunk_begin + next_)]; };
  switch (stage_) {
    case Stage::kLoad:
      status = load_step();
      break;
    case Stage::kEmbed:
      status = embed_step(chunk());
      break;
    case Stage::kAttention:
      status = section_ == 0 && next_ == 0 ? begin_layer() : Status();
      if (status.ok()) status = attention_step(chunk());
      break;
    case Stage::kDenseMlp:
      status = dense_mlp_step(chunk());
      break;
    case Stage::kRouter:
      status = router_step(chunk());
      break;
    case Stage::kExperts:
      status = experts_step(groups_[static_cast<size_t>(next_)]);
      break;
    case Stage::kFinishMoe:
      status = finish_moe_step(chunk());
      break;
    case Stage::kStore:
      status = store_step(next_);
      break;
    case Stage::kLogits:
      status = logits_step();
      break;
  }
  if (status.ok()) status = advance();
  if (!status.ok()) {
    abandon();
    // The wave is lost, the device need not be; where it is, the next operation says so again.
    if (ops_->recover().ok() && status.code() == Code::kNoMemory) release_buffers();
  }
  return status;
}

Status Forward::begin_layer() {
  for (WaveSpan& span : wave_.spans) FIRN_TRY(span.kv->begin_layer(layer_, rows_));
  return {};
}

Status Forward::end_attention() {
  for (WaveSpan& span : wave_.spans) FIRN_TRY(span.kv->end_layer(layer_));
  return {};
}

Status Forward::advance() {
  ++next_;
  const int64_t chunks = section().chunk_end - section().chunk_begin;
  const bool filed = wave_.hidden.files[0] != nullptr;
  const int64_t tiles = (section().n_rows + kTileRows - 1) / kTileRows;
  const auto layer_end = [&]() -> Status {
    if (!filed) return next_section();
    enter(Stage::kStore);
    return {};
  };
  switch (stage_) {
    case Stage::kLoad:
      enter(Stage::kAttention);
      return {};
    case Stage::kEmbed:
      if (next_ < chunks) return {};
      if (options_.capture.hidden) FIRN_TRY(capture_hidden(0));
      enter(Stage::kAttention);
      return {};
    case Stage::kAttention:
      if (next_ < chunks) return {};
      if (last_section()) FIRN_TRY(end_attention());
      enter(config_.moe_layer[layer_] ? Stage::kRouter : Stage::kDenseMlp);
      return {};
    case Stage::kDenseMlp:
      return next_ < chunks ? Status() : layer_end();
    case Stage::kRouter:
      if (next_ < chunks) return {};
      make_expert_groups();
      enter(Stage::kExperts);
      return {};
    case Stage::kExperts:
      if (next_ < static_cast<int64_t>(groups_.size())) return {};
      walk_.reset();
      enter(Stage::kFinishMoe);
      return {};
    case Stage::kFinishMoe:
      return next_ < chunks ? Status() : layer_end();
    case Stage::kStore:
      return next_ < tiles ? Status() : next_section();
    case Stage::kLogits:
      if (rows_ <= kGuessRows) {
        expert_probe_.record(expert_cost_);
        kv_probe_.record(kv_cost_);
      }
      for (WaveSpan& span : wave_.spans) FIRN_TRY(span.kv->commit(static_cast<int64_t>(span.ids.size())));
      running_ = false;
      finished_ = true;
      return {};
  }
  return {};
}

// The layer is done for the rows of this section.
Status Forward::next_section() {
  if (options_.capture.hidden) FIRN_TRY(capture_hidden(layer_ + 1));
  const bool last_layer = layer_ + 1 == config_.layers;
  if (last_layer) FIRN_TRY(keep_logit_rows());
  if (last_section()) {
    section_ = 0;
    ++layer_;
    layers_done_ = layer_;
    guessed_layer_ = -1;
    if (wave_.hidden.files[0] != nullptr) FIRN_TRY(wave_.hidden.files[layer_ % 2]->sync());
  } else {
    ++section_;
  }
  if (last_layer && layer_ == config_.layers) {
    enter(Stage::kLogits);
  } else if (layer_ == 0) {
    enter(Stage::kEmbed);
  } else {
    enter(wave_.hidden.stream ? Stage::kLoad : Stage::kAttention);
  }
  return {};
}

// Residuals of the wanted positions, which outlive their section.
Status Forward::keep_logit_rows() {
  const int64_t H = config_.hidden;
  const Section& s = section();
  Ticket ticket;
  for (size_t i = 0; i < logit_rows_.size(); ++i) {
    const int64_t row = logit_rows_[i] - s.row_begin;
    if (row < 0 || row >= s.n_rows) continue;
    ticket = ops_->copy(logit_hidden_.as<std::byte>() + bytes_of(DType::kF32, static_cast<int64_t>(i), H),
                        hidden_.as<std::byte>() + bytes_of(DType::kF32, row, H), bytes_of(DType::kF32, 1, H));
  }
  return ops_->wait(ticket);
}

Status Forward::load_step() {
  const Section& s = section();
  const HiddenFile& file = *wave_.hidden.files[layer_ % 2];
  std::vector<float> staging;
  for (int64_t row = 0; row < s.n_rows; row += kTileRows) {
    const int64_t n = std::min(kTileRows, s.n_rows - row);
    std::byte* const at = hidden_.as<std::byte>() + bytes_of(DType::kF32, row, config_.hidden);
    if (ops_->space() == Space::kHost) {
      FIRN_TRY(file.read(s.row_begin + row, n, reinterpret_cast<float*>(at)));
      continue;
    }
    staging.resize(static_cast<size_t>(n * config_.hidden));
    FIRN_TRY(file.read(s.row_begin + row, n, staging.data()));
    FIRN_TRY(ops_->wait(ops_->upload(at, staging.data(), bytes_of(DType::kF32, n, config_.hidden))));
  }
  return {};
}

Status Forward::store_step(int64_t tile) {
  const Section& s = section();
  const int64_t row = tile * kTileRows, n = std::min(kTileRows, s.n_rows - row);
  HiddenFile& file = *wave_.hidden.files[(layer_ + 1) % 2];
  const std::byte* const at = hidden_.as<std::byte>() + bytes_of(DType::kF32, row, config_.hidden);
  if (ops_->space() == Space::kHost) return file.write(s.row_begin + row, n, reinterpret_cast<const float*>(at));
  std::vector<float> staging(static_cast<size_t>(n * config_.hidden));
  FIRN_TRY(download(reinterpret_cast<std::byte*>(staging.data()), at, bytes_of(DType::kF32, n, config_.hidden)));
  return file.write(s.row_begin + row, n, staging.data());
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
  const int64_t at = (chunk.row_begin - section().row_begin) * c.experts_per_token, count = n * c.experts_per_token;
  FIRN_TRY(download(reinterpret_cast<std::byte*>(expert_ids_.data() + at), picks_.data(), count * 4));
  FIRN_TRY(download(reinterpret_cast<std::byte*>(expert_weights_.data() + at), pick_weights_.data(), count * 4));
  for (int64_t i = at; i < at + count; ++i) {
    if (expert_ids_[i] < 0 || expert_ids_[i] >= c.experts || !std::isfinite(expert_weights_[i])) {
      return internal(
          fmt::format("router of layer {} gave no usable choice for row {} (expert {}, weight {}): the hidden "
                      "state is not finite; check the checkpoint with `firn inspect`",
                      layer_, section().row_begin + i / c.experts_per_token, expert_ids_[i], expert_weights_[i]));
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

// Groups go through the experts in ascending id, so every row adds its experts in that order whatever the cut. What is
// one product, rows of one expert in one tile and at most kGroupPairs of them, does not depend on the section.
void Forward::make_expert_groups() {
  const int64_t k = config_.experts_per_token, rows = section().n_rows;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const auto segment = [&](int32_t expert, int64_t row) { return expert * tiles + row / kTileRows; };
  std::vector<int64_t> begin(config_.experts * tiles + 1, 0);
  for (int64_t i = 0; i < rows * k; ++i) ++begin[segment(expert_ids_[i], i / k) + 1];
  for (int64_t s = 0; s < config_.experts * tiles; ++s) begin[s + 1] += begin[s];
  pair_rows_.resize(rows * k);
  pair_weights_.resize(rows * k);
  std::vector<int64_t> at(begin.begin(), begin.end() - 1);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = row * k; j < (row + 1) * k; ++j) {
      const int64_t to = at[segment(expert_ids_[j], row)]++;
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
  std::vector<int32_t> used;
  for (int64_t s = 0; s < config_.experts * tiles; ++s) {
    const auto expert = static_cast<int32_t>(s / tiles);
    if (begin[s] < begin[s + 1] && (used.empty() || used.back() != expert)) used.push_back(expert);
    for (int64_t p = begin[s]; p < begin[s + 1];) {
      if (group.n_pairs == kGroupPairs) close();
      // A segment starts in a new group rather than being split, unless it is larger than a whole group.
      const int64_t rest = begin[s + 1] - p;
      if (group.n_pairs > 0 && group.n_pairs + rest > kGroupPairs) close();
      const int64_t n = std::min(rest, kGroupPairs - group.n_pairs);
      if (group.n_pairs == 0) group.pair_begin = p;
      group.items.push_back({expert, p, n});
      group.n_pairs += n;
      p += n;
    }
  }
  close();
  if (options_.experts != nullptr) walk_ = std::make_unique<ExpertWalk>(options_.experts, layer_, std::move(used));
}

Status Forward::experts_step(const ExpertGroup& group) {
  const int64_t n = group.n_pairs, H = config_.hidden;
  const std::span<const int32_t> rows(pair_rows_.data() + group.pair_begin, n);
  const MatrixView x = view(x_, act_, n, H), y = view(y_, DType::kF32, n, H);
  ops_->norm({view(hidden_, DType::kF32, section().n_rows, H), rows, weights_.layers[layer_].post_norm, x});
  std::vector<int32_t> ids;
  for (const ExpertGroup::Item& item : group.items) {
    if (ids.empty() || ids.back() != item.expert) ids.push_back(item.expert);
  }
  if (walk_ == nullptr) {
    std::vector<ExpertWeights> weights;
    for (const int32_t id : ids) weights.push_back(weights_.layers[layer_].experts[id]);
    FIRN_TRY(compute_experts(group, ids, weights));
  } else {
    const bool last_group = next_ + 1 == static_cast<int64_t>(groups_.size());
    const bool keep = !last_group && groups_[static_cast<size_t>(next_ + 1)].items.front().expert == ids.back();
    FIRN_TRY(walk_->ask());  // before any guess
    auto start = std::chrono::steady_clock::now();
    double computing = 0;
    if (guess_experts_ && walk_->all_asked()) guess_experts();
    FIRN_TRY(walk_->each(ids, keep, [&](std::span<const ExpertWalk::Ready> ready) {
      const auto computed_from = std::chrono::steady_clock::now();
      std::vector<int32_t> there;
      std::vector<ExpertWeights> weights;
      for (const ExpertWalk::Ready& r : ready) {
        there.push_back(r.expert);
        weights.push_back(r.weights);
      }
      Status status = compute_experts(group, there, weights);
      computing += seconds_since(computed_from);
      return status;
    }));
    expert_cost_ += seconds_since(start) - computing;
  }
  return ops_->wait(ops_->combine({view(accumulator_, DType::kF32, section().n_rows, H), y, rows,
                                   std::span<const float>(pair_weights_.data() + group.pair_begin, n)}));
}

// What the next MoE layer will want: for few rows what its router says of the residual as it is now, for many the
// experts in order, as nearly all of them will be needed.
void Forward::guess_experts() {
  const ModelConfig& c = config_;
  int64_t layer = layer_ + 1;
  while (layer < c.layers && !c.moe_layer[layer]) ++layer;
  if (layer >= c.layers || guessed_layer_ == layer) return;
  guessed_layer_ = layer;
  const int64_t n = rows_, k = c.experts_per_token;
  if (n * k >= c.experts) {
    for (int64_t e = 0; e < c.experts; ++e) {
      if (options_.experts->cache().contains(options_.experts->key(layer, e))) continue;
      if (!options_.experts->prefetch(layer, e, storage::Cause::kSequential)) break;
    }
    return;
  }
  if (n > kGuessRows || guess_.empty()) return;
  const LayerWeights& w = weights_.layers[layer];
  std::byte* at = guess_.as<std::byte>();
  const auto take = [&](DType dtype, int64_t cols) {
    const MatrixView v{at, dtype, n, cols, cols, ops_->space()};
    at += (bytes_of(dtype, kGuessRows, cols) + 63) / 64 * 64;
    return v;
  };
  const MatrixView x = take(DType::kF32, c.hidden);
  RouterParams router;
  router.x = x;
  router.gate = w.router;
  router.bias = w.router_bias;
  router.topk = k;
  router.ids = take(DType::kI32, k);
  router.weights = take(DType::kF32, k);
  ops_->norm({view(hidden_, DType::kF32, section().n_rows, c.hidden).slice_rows(0, n), {}, w.post_norm, x});
  if (!ops_->wait(ops_->router(router)).ok()) return;  // only a guess: the operation that matters will say so
  std::vector<int32_t> ids(static_cast<size_t>(n * k));
  if (!download(reinterpret_cast<std::byte*>(ids.data()), router.ids.data, n * k * 4).ok()) return;
  for (const int32_t id : ids) {
    if (id >= 0 && id < c.experts) options_.experts->prefetch(layer, id, storage::Cause::kLookahead);
  }
}

// Outputs of some of a group's experts into their rows of y_; waits, since the caller may give the weights' memory
// away.
Status Forward::compute_experts(const ExpertGroup& group, std::span<const int32_t> ids,
                                std::span<const ExpertWeights> weights) {
  const ModelConfig& c = config_;
  const int64_t n = group.n_pairs;
  int64_t moe_layer = 0;
  for (int64_t l = 0; l < layer_; ++l) moe_layer += c.moe_layer[l];
  std::vector<std::vector<MlpTask>> tasks(options_.expert_ops.size() + 1);
  for (const ExpertGroup::Item& item : group.items) {
    const auto found = std::lower_bound(ids.begin(), ids.end(), item.expert);
    if (found == ids.end() || *found != item.expert) continue;
    const ExpertWeights& e = weights[static_cast<size_t>(found - ids.begin())];
    const size_t home = options_.expert_home.empty() ? 0 : options_.expert_home[moe_layer][item.expert];
    tasks[home].push_back({item.expert, e.gate, e.up, e.down, item.pair_begin - group.pair_begin, item.n_pairs});
  }
  Ticket ticket;
  if (!tasks[0].empty()) {
    ticket = ops_->mlp({view(x_, act_, n, c.hidden), tasks[0], c.activation, view(y_, DType::kF32, n, c.hidden)});
  }
  for (size_t home = 1; home < tasks.size(); ++home) {
    if (!tasks[home].empty()) FIRN_TRY(experts_elsewhere(options_.expert_ops[home - 1], tasks[home], n));
  }
  return ops_->wait(ticket);
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
  finish.acc =
      view(accumulator_, DType::kF32, section().n_rows, c.hidden).slice_rows(chunk.row_begin - section().row_begin, n);
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
  const Section& s = section();
  for (size_t i = 0; i < logit_rows_.size(); ++i) {
    const int64_t row = logit_rows_[i] - s.row_begin;
    if (row < 0 || row >= s.n_rows) continue;
    const MatrixView h = view(hidden_, DType::kF32, s.n_rows, H).slice_rows(row, 1);
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
    const MatrixView x = view(x_, act_, n, c.hidden);
    ops_->norm(
        {view(logit_hidden_, DType::kF32, n_logits(), c.hidden).slice_rows(begin, n), {}, weights_.final_norm, x});
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
