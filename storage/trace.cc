// Encoding of traces. See trace.h for the shape of a file.
//
// An event is a tag byte (kind in the low four bits; how layer and row follow from those of the event before in the
// high four), layer and row where they do not follow, then the kind's fields as varints and raw floats. A block choice
// is written as which of the ids of the same layer, group and row of the step before (of the row before in a prefill)
// it keeps, a bit each, and the gaps of the ids that are new: neighbours in time agree mostly.
#include "storage/trace.h"

#include <fmt/format.h>
#include <xxhash.h>
#include <zstd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>

#include "storage/text.h"

#include "storage/trace_bytes.h"

namespace firn::storage {

const char* stage_name(TraceStage stage) {
  static constexpr const char* kNames[] = {"embed",   "index",   "attention", "dense mlp", "router",
                                           "experts", "combine", "logits",    "wait",      "other"};
  static_assert(std::size(kNames) == static_cast<size_t>(TraceStage::kCount));
  return stage < TraceStage::kCount ? kNames[static_cast<size_t>(stage)] : "?";
}

const char* object_name(TraceObject object) { return object == TraceObject::kExpert ? "expert" : "kv block"; }
const char* step_name(TraceStepKind kind) { return kind == TraceStepKind::kPrefill ? "prefill" : "decode"; }

int64_t TraceStep::rows() const {
  int64_t n = 0;
  for (const TraceSpan& span : spans) n += span.rows;
  return n;
}

TraceStep::Place TraceStep::place(int64_t row) const {
  FIRN_CHECK(row >= 0, fmt::format("row {}", row));
  for (const TraceSpan& span : spans) {
    if (row < span.rows) return {span.sequence, span.first_position + row};
    row -= span.rows;
  }
  check_failed(__FILE__, __LINE__, "row < rows()", "a row beyond its step");
}

std::string trace_preface(uint32_t version) {
  std::string out(kMagic);
  put_raw<uint32_t>(&out, version);
  put_raw<uint32_t>(&out, static_cast<uint32_t>(XXH3_64bits(out.data(), out.size())));
  return out;
}

Result<std::string> trace_chunk(TraceChunk kind, uint32_t number, std::string_view raw, int zstd_level) {
  FIRN_CHECK(raw.size() <= kMaxRaw, fmt::format("a chunk of {} bytes", raw.size()));
  std::string out(static_cast<size_t>(kChunkHeaderBytes) + ZSTD_compressBound(raw.size()), '\0');
  const size_t stored =
      ZSTD_compress(out.data() + kChunkHeaderBytes, out.size() - kChunkHeaderBytes, raw.data(), raw.size(), zstd_level);
  if (ZSTD_isError(stored) != 0) return no_memory(fmt::format("zstd: {}", ZSTD_getErrorName(stored)));
  out.resize(static_cast<size_t>(kChunkHeaderBytes) + stored);
  std::string header;
  put_raw<uint32_t>(&header, kChunkMark);
  put_raw<uint32_t>(&header, static_cast<uint32_t>(kind));
  put_raw<uint32_t>(&header, static_cast<uint32_t>(stored));
  put_raw<uint32_t>(&header, static_cast<uint32_t>(raw.size()));
  put_raw<uint64_t>(&header, XXH3_64bits_withSeed(out.data() + kChunkHeaderBytes, stored, number));
  put_raw<uint64_t>(&header, XXH3_64bits_withSeed(header.data(), header.size(), number));
  std::memcpy(out.data(), header.data(), header.size());
  return out;
}

std::string encode_trace_header(const TraceHeader& h) {
  std::string out;
  put_text(&out, h.model);
  put_varint(&out, static_cast<uint64_t>(h.layers));
  for (int32_t i = 0; i < h.layers; ++i) {
    const auto at = static_cast<size_t>(i);
    put_varint(&out, (h.sparse_layer[at] ? 1u : 0u) | (h.moe_layer[at] ? 2u : 0u));
  }
  for (const int64_t value : {int64_t{h.experts}, int64_t{h.experts_per_token}, int64_t{h.groups},
                              int64_t{h.topk_blocks}, int64_t{h.block_tokens}, h.expert_bytes, h.kv_block_bytes}) {
    put_varint(&out, static_cast<uint64_t>(value));
  }
  put_text(&out, h.options);
  put_varint(&out, static_cast<uint64_t>(h.blocks_every));
  put_varint(&out, static_cast<uint64_t>(h.experts_every));
  return out;
}

// ---- Writer ----

TraceWriter::TraceWriter(FileSystem& fs, std::string path, TraceHeader header, const TraceOptions& options)
    : fs_(fs),
      path_(std::move(path)),
      header_(std::move(header)),
      options_(options),
      start_(std::chrono::steady_clock::now()) {}

Result<std::unique_ptr<TraceWriter>> TraceWriter::create(FileSystem& fs, const std::string& path, TraceHeader header,
                                                         const TraceOptions& options) {
  header.blocks_every = options.blocks_every;
  header.experts_every = options.experts_every;
  FIRN_TRY(check_header(header).with_context(path));
  if (options.chunk_bytes < 1 || options.chunk_bytes > kMaxRaw / 4) {
    return invalid(fmt::format("{}: chunks of {} bytes, expected 1 to {}", path, options.chunk_bytes, kMaxRaw / 4));
  }
  // Only whether it can be: the content stays until there is something to put in its place.
  FIRN_ASSIGN(const auto probe, fs.open(path, OpenMode::kUpdate));
  return std::unique_ptr<TraceWriter>(new TraceWriter(fs, path, std::move(header), options));
}

TraceWriter::~TraceWriter() {
  if (!finished_ && !buffer_.empty()) write_chunk();
}

int64_t TraceWriter::now_us() const {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start_).count();
}

void TraceWriter::put(std::string_view bytes) {
  status_ = file_->write_at(at_, std::as_bytes(std::span(bytes.data(), bytes.size())));
  if (status_.ok()) at_ += static_cast<int64_t>(bytes.size());
}

void TraceWriter::write_chunk() {
  bytes_recorded_ += static_cast<int64_t>(buffer_.size());
  std::string bytes;
  if (status_.ok() && chunks_ == 0) {
    bytes = trace_preface();
    auto head = trace_chunk(TraceChunk::kHeader, chunks_, encode_trace_header(header_), options_.zstd_level);
    if (head.ok()) {
      bytes += *head;
      ++chunks_;
    } else {
      status_ = head.status();
    }
  }
  if (status_.ok() && !buffer_.empty()) {
    auto chunk = trace_chunk(TraceChunk::kEvents, chunks_, buffer_, options_.zstd_level);
    if (chunk.ok()) {
      bytes += *chunk;
      ++chunks_;
    } else {
      status_ = chunk.status();
    }
  }
  buffer_.clear();
  last_layer_ = last_row_ = 0;
  last_us_ = 0;
  last_blocks_.clear();
  if (!status_.ok()) return;
  if (!file_) {
    auto file = fs_.open(path_, OpenMode::kCreate);
    if (!file.ok()) {
      status_ = file.status();
      return;
    }
    file_ = std::move(file).value();
  }
  put(bytes);
}

Status TraceWriter::finish() {
  FIRN_CHECK(!finished_, "a trace is finished twice");
  finished_ = true;
  write_chunk();
  FIRN_TRY(status_);
  std::string raw;
  put_varint(&raw, static_cast<uint64_t>(events_));
  auto end = trace_chunk(TraceChunk::kEnd, chunks_, raw, options_.zstd_level);
  if (!end.ok()) return status_ = end.status();
  put(*end);
  FIRN_TRY(status_);
  return status_ = file_->sync();
}

void TraceWriter::start_event(uint8_t kind, int32_t layer, int32_t row) {
  uint8_t tag = kind;
  const bool same_layer = layer == last_layer_, next_layer = layer == last_layer_ + 1;
  const bool same_row = row == last_row_, next_row = row == last_row_ + 1;
  tag |= same_layer ? kSameLayer : next_layer ? kNextLayer : 0;
  tag |= same_row ? kSameRow : next_row ? kNextRow : 0;
  buffer_.push_back(static_cast<char>(tag));
  if (!same_layer && !next_layer) put_varint(&buffer_, static_cast<uint64_t>(layer + 1));
  if (!same_row && !next_row) put_varint(&buffer_, static_cast<uint64_t>(row));
  last_layer_ = layer;
  last_row_ = row;
}

void TraceWriter::event_done() {
  ++events_;
  if (static_cast<int64_t>(buffer_.size()) >= options_.chunk_bytes) write_chunk();
}

void TraceWriter::begin_step(const TraceStep& step) {
  FIRN_CHECK(!in_step_ && !finished_, "a step begins in a step or after the end");
  FIRN_CHECK(step.kind < TraceStepKind::kCount && step.spans.size() <= kMaxSpans);
  for (const TraceSpan& span : step.spans) FIRN_CHECK(span.sequence >= 0 && span.rows >= 0 && span.first_position >= 0);
  in_step_ = true;
  kind_ = step.kind;
  rows_ = step.rows();
  FIRN_CHECK(rows_ < kMaxRows, fmt::format("a wave of {} rows", rows_));
  if (!status_.ok()) return;
  start_event(kBegin, 0, 0);
  put_varint(&buffer_, static_cast<uint64_t>(step.kind));
  put_varint(&buffer_, zigzag(minus(step.start_us, last_us_)));
  last_us_ = step.start_us;
  put_varint(&buffer_, step.spans.size());
  for (const TraceSpan& span : step.spans) {
    put_varint(&buffer_, static_cast<uint64_t>(span.sequence));
    put_varint(&buffer_, static_cast<uint64_t>(span.rows));
    put_varint(&buffer_, static_cast<uint64_t>(span.first_position));
  }
  event_done();
}

void TraceWriter::begin_step(TraceStepKind kind, int32_t rows, int64_t first_position) {
  begin_step({kind, now_us(), {{0, rows, first_position}}});
}

void TraceWriter::experts(int32_t layer, int32_t row, std::span<const int32_t> ids, std::span<const float> weights,
                          float margin) {
  FIRN_CHECK(in_step_ && layer >= 0 && layer < header_.layers && row >= 0 && row < rows_,
             fmt::format("layer {}, row {} of {}", layer, row, rows_));
  FIRN_CHECK(ids.size() == static_cast<size_t>(header_.experts_per_token) && weights.size() == ids.size());
  if (!status_.ok() || (kind_ == TraceStepKind::kPrefill && row % header_.experts_every != 0)) return;
  const bool known = margin == margin;
  start_event(known ? kExpertsMargin : kExperts, layer, row);
  for (const int32_t id : ids) {
    FIRN_CHECK(id >= 0 && id < header_.experts, fmt::format("expert {}", id));
    put_varint(&buffer_, static_cast<uint64_t>(id));
  }
  for (const float w : weights) put_raw(&buffer_, w);
  if (known) put_raw(&buffer_, margin);
  event_done();
}

void TraceWriter::blocks(int32_t layer, int32_t row, std::span<const int32_t> ids, std::span<const float> margins) {
  const auto groups = static_cast<size_t>(header_.groups), topk = static_cast<size_t>(header_.topk_blocks);
  FIRN_CHECK(in_step_ && layer >= 0 && layer < header_.layers && row >= 0 && row < rows_,
             fmt::format("layer {}, row {} of {}", layer, row, rows_));
  FIRN_CHECK(ids.size() == groups * topk && (margins.empty() || margins.size() == groups));
  if (!status_.ok() || (kind_ == TraceStepKind::kPrefill && row % header_.blocks_every != 0)) return;
  start_event(kBlocks, layer, row);
  // Counts of chosen ids are said only where some group is not full; bit 1: margins follow.
  const auto count = [&](size_t g) {
    const auto* begin = ids.data() + g * topk;
    return static_cast<size_t>(std::find(begin, begin + topk, -1) - begin);
  };
  bool full = true;
  for (size_t g = 0; g < groups; ++g) full = full && count(g) == topk;
  buffer_.push_back(static_cast<char>((full ? 1 : 0) | (margins.empty() ? 0 : 2)));
  std::vector<int32_t> fresh;
  for (size_t g = 0; g < groups; ++g) {
    const std::span<const int32_t> group = ids.subspan(g * topk, topk);
    const size_t n = count(g);
    for (size_t i = 0; i < topk; ++i) {
      FIRN_CHECK(i < n ? group[i] > (i == 0 ? -1 : group[i - 1]) : group[i] == -1, "block ids are not ascending");
    }
    if (!full) put_varint(&buffer_, n);
    std::vector<int32_t>& last = last_blocks_[choice_key(kind_, layer, row, static_cast<int32_t>(g))];
    const size_t mask_at = buffer_.size();
    buffer_.append((last.size() + 7) / 8, '\0');
    fresh.clear();
    size_t at = 0;
    for (size_t i = 0; i < n; ++i) {
      while (at < last.size() && last[at] < group[i]) ++at;
      if (at < last.size() && last[at] == group[i]) {
        char& mask = buffer_[mask_at + at / 8];
        mask = static_cast<char>(static_cast<uint8_t>(mask) | 1u << (at % 8));
      } else {
        fresh.push_back(group[i]);
      }
    }
    int32_t before = -1;
    for (const int32_t id : fresh) {
      put_varint(&buffer_, static_cast<uint64_t>(id - before - 1));
      before = id;
    }
    last.assign(group.begin(), group.begin() + static_cast<int64_t>(n));
  }
  for (const float m : margins) put_raw(&buffer_, m);
  event_done();
}

void TraceWriter::fetch(const TraceFetch& f) {
  FIRN_CHECK(!finished_ && f.what < TraceObject::kCount && f.cause < Cause::kCount && f.outcome < TraceOutcome::kCount);
  FIRN_CHECK(f.layer >= 0 && f.layer < header_.layers && f.sequence >= 0 && f.group >= 0 && f.id >= 0);
  FIRN_CHECK(f.bytes >= 0 && f.service_us >= 0 && f.wait_us >= 0);
  if (!status_.ok()) return;
  start_event(kFetch, f.layer, last_row_);
  buffer_.push_back(static_cast<char>(static_cast<uint8_t>(f.what) | static_cast<uint8_t>(f.outcome) << 1 |
                                      static_cast<uint8_t>(f.cause) << 3));
  if (f.what == TraceObject::kKvBlock) {
    put_varint(&buffer_, static_cast<uint64_t>(f.sequence));
    put_varint(&buffer_, static_cast<uint64_t>(f.group));
  }
  put_varint(&buffer_, static_cast<uint64_t>(f.id));
  put_varint(&buffer_, static_cast<uint64_t>(f.bytes));
  put_varint(&buffer_, zigzag(minus(f.start_us, last_us_)));
  put_varint(&buffer_, static_cast<uint64_t>(f.service_us));
  put_varint(&buffer_, static_cast<uint64_t>(f.wait_us));
  last_us_ = f.start_us;
  event_done();
}

void TraceWriter::predicted(TraceObject what, Cause signal, int32_t layer, int32_t row, int32_t group,
                            std::span<const int32_t> ids) {
  FIRN_CHECK(in_step_ && layer >= 0 && layer < header_.layers && row >= 0 && row < rows_);
  FIRN_CHECK(what < TraceObject::kCount && signal < Cause::kCount && group >= 0 && ids.size() <= kMaxChoice);
  const int32_t every = what == TraceObject::kExpert ? header_.experts_every : header_.blocks_every;
  if (!status_.ok() || (kind_ == TraceStepKind::kPrefill && row % every != 0)) return;
  start_event(kPredicted, layer, row);
  buffer_.push_back(static_cast<char>(static_cast<uint8_t>(what) | static_cast<uint8_t>(signal) << 3));
  put_varint(&buffer_, static_cast<uint64_t>(group));
  put_varint(&buffer_, ids.size());
  int32_t before = 0;
  for (const int32_t id : ids) {
    FIRN_CHECK(id >= 0, "a predicted id below 0");
    put_varint(&buffer_, zigzag(int64_t{id} - before));
    before = id;
  }
  event_done();
}

void TraceWriter::layer_time(int32_t layer, TraceStage stage, int64_t us) {
  FIRN_CHECK(!finished_ && layer >= -1 && layer < header_.layers && stage < TraceStage::kCount && us >= 0);
  if (!status_.ok()) return;
  start_event(kLayerTime, layer, last_row_);
  buffer_.push_back(static_cast<char>(stage));
  put_varint(&buffer_, static_cast<uint64_t>(us));
  event_done();
}

void TraceWriter::end_step(int64_t end_us) {
  FIRN_CHECK(in_step_, "a step ends that has not begun");
  in_step_ = false;
  if (!status_.ok()) return;
  start_event(kEndStep, last_layer_, last_row_);
  put_varint(&buffer_, zigzag(minus(end_us, last_us_)));
  last_us_ = end_us;
  event_done();
}

void TraceWriter::end_step() { end_step(now_us()); }

// ---- Reader ----

// The state that events of a chunk are relative to, as the writer's.
struct TraceReader::Decoder {
  const TraceHeader* header = nullptr;
  std::string raw;
  Cursor in;
  bool in_step = false;
  TraceStepKind kind = TraceStepKind::kDecode;
  int64_t rows = 0;
  int32_t last_layer = 0, last_row = 0;
  int64_t last_us = 0;
  std::unordered_map<uint64_t, std::vector<int32_t>> last_blocks;

  void start_chunk() {
    in = Cursor(raw);
    last_layer = last_row = 0;
    last_us = 0;
    last_blocks.clear();
  }

  int64_t time() { return last_us = plus(last_us, in.signed_varint()); }

  void begin(TraceEvent* e) {
    if (in_step) in.fail("a step begins before the last one ended");
    e->step.kind = static_cast<TraceStepKind>(in.below(static_cast<int64_t>(TraceStepKind::kCount), "a step's kind"));
    e->step.start_us = time();
    const int64_t n = in.below(kMaxSpans + 1, "the number of spans");
    e->step.spans.clear();
    rows = 0;
    for (int64_t i = 0; i < n && !in.bad(); ++i) {
      TraceSpan span;
      span.sequence = static_cast<int32_t>(in.below(kMaxRows, "a sequence"));
      span.rows = static_cast<int32_t>(in.below(kMaxRows - rows, "the rows of a span"));
      span.first_position = in.below(int64_t{1} << 62, "a position");
      rows += span.rows;
      e->step.spans.push_back(span);
    }
    in_step = true;
    kind = e->step.kind;
  }

  void need_row(const TraceEvent& e) {
    if (!in_step) in.fail("a row outside of any step");
    if (e.layer < 0 || e.row < 0 || e.row >= rows) {
      in.fail(fmt::format("row {} of layer {} in a step of {} rows", e.row, e.layer, rows));
    }
  }

  void experts(TraceEvent* e, bool margin) {
    need_row(*e);
    e->ids.clear();
    e->values.clear();
    for (int32_t i = 0; i < header->experts_per_token && !in.bad(); ++i) {
      e->ids.push_back(static_cast<int32_t>(in.below(header->experts, "an expert")));
    }
    for (int32_t i = 0; i < header->experts_per_token && !in.bad(); ++i) e->values.push_back(in.f32());
    e->margin = margin ? in.f32() : std::numeric_limits<float>::quiet_NaN();
  }

  void blocks(TraceEvent* e) {
    need_row(*e);
    const auto topk = static_cast<size_t>(header->topk_blocks);
    const uint8_t flags = in.byte();
    if (flags > 3) in.fail("unknown marks of a block choice");
    e->ids.clear();
    e->values.clear();
    for (int32_t g = 0; g < header->groups && !in.bad(); ++g) {
      const size_t n =
          (flags & 1) != 0 ? topk : static_cast<size_t>(in.below(header->topk_blocks + 1, "the number of blocks"));
      std::vector<int32_t>& last = last_blocks[choice_key(kind, e->layer, e->row, g)];
      std::vector<int32_t> kept, now;
      uint8_t mask = 0;
      for (size_t i = 0; i < last.size() && !in.bad(); ++i) {
        if (i % 8 == 0) mask = in.byte();
        if ((mask >> (i % 8) & 1) != 0) kept.push_back(last[i]);
      }
      if (kept.size() > n) in.fail(fmt::format("{} blocks kept of {}", kept.size(), n));
      int64_t before = -1;
      size_t at = 0;
      for (size_t i = kept.size(); i < n && !in.bad(); ++i) {
        before += 1 + in.below(std::numeric_limits<int32_t>::max() - before - 1, "the gap between blocks");
        while (at < kept.size() && kept[at] < before) now.push_back(kept[at++]);
        if (at < kept.size() && kept[at] == before) in.fail("a block chosen twice");
        now.push_back(static_cast<int32_t>(before));
      }
      while (at < kept.size()) now.push_back(kept[at++]);
      if (in.bad()) return;
      last = now;
      now.resize(topk, -1);
      e->ids.insert(e->ids.end(), now.begin(), now.end());
    }
    for (int32_t g = 0; g < header->groups && !in.bad(); ++g) {
      e->values.push_back((flags & 2) != 0 ? in.f32() : std::numeric_limits<float>::quiet_NaN());
    }
  }

  void fetch(TraceEvent* e) {
    const uint8_t marks = in.byte();
    TraceFetch& f = e->fetch;
    f = {};
    f.what = static_cast<TraceObject>(marks & 1);
    f.outcome = static_cast<TraceOutcome>(marks >> 1 & 3);
    f.cause = static_cast<Cause>(marks >> 3);
    if (f.cause >= Cause::kCount) in.fail(fmt::format("an unknown cause ({})", marks >> 3));
    f.layer = e->layer;
    if (f.layer < 0) in.fail("a fetch without a layer");
    if (f.what == TraceObject::kKvBlock) {
      f.sequence = static_cast<int32_t>(in.below(kMaxRows, "a sequence"));
      f.group = static_cast<int32_t>(in.below(kMaxRows, "a group"));
    }
    f.id = in.amount("an id");
    f.bytes = in.amount("the bytes of a fetch");
    f.start_us = time();
    f.service_us = in.amount("a service time");
    f.wait_us = in.amount("a wait");
  }

  void predicted(TraceEvent* e) {
    need_row(*e);
    const uint8_t marks = in.byte();
    e->what = static_cast<TraceObject>(marks & 7);
    e->signal = static_cast<Cause>(marks >> 3);
    if (e->what >= TraceObject::kCount || e->signal >= Cause::kCount) in.fail("an unknown signal");
    e->group = static_cast<int32_t>(in.below(kMaxRows, "a group"));
    const int64_t n = in.below(kMaxChoice + 1, "the number of predicted ids");
    e->ids.clear();
    int64_t before = 0;
    for (int64_t i = 0; i < n && !in.bad(); ++i) {
      before = plus(before, in.signed_varint());
      if (before < 0 || before >= kMaxRows) {
        in.fail(fmt::format("predicted id {}", before));
        return;
      }
      e->ids.push_back(static_cast<int32_t>(before));
    }
  }

  void event(TraceEvent* e) {
    using Kind = TraceEvent::Kind;
    const uint8_t tag = in.byte();
    if ((tag & 0x30) == 0x30 || (tag & 0xC0) == 0xC0) in.fail("an event's marks contradict each other");
    e->layer = (tag & kSameLayer) != 0   ? last_layer
               : (tag & kNextLayer) != 0 ? last_layer + 1
                                         : static_cast<int32_t>(in.below(header->layers + 1, "a layer")) - 1;
    if ((tag & kNextRow) != 0 && last_row == std::numeric_limits<int32_t>::max()) in.fail("a row too far");
    e->row = in.bad()                ? 0
             : (tag & kSameRow) != 0 ? last_row
             : (tag & kNextRow) != 0 ? last_row + 1
                                     : static_cast<int32_t>(in.below(kMaxRows, "a row"));
    // Layer 0 is what a chunk and a step start from, even where there are no layers.
    if (e->layer >= std::max(header->layers, 1)) in.fail(fmt::format("layer {} of {}", e->layer, header->layers));
    last_layer = e->layer;
    last_row = e->row;
    const uint8_t kind_tag = tag & 0x0F;
    if (kind_tag != kBegin && kind_tag != kEndStep && kind_tag != kLayerTime && e->layer >= header->layers) {
      in.fail(fmt::format("layer {} of {}", e->layer, header->layers));
    }
    if (in.bad()) return;
    switch (kind_tag) {
      case kBegin:
        e->kind = Kind::kBeginStep;
        return begin(e);
      case kExperts:
      case kExpertsMargin:
        e->kind = Kind::kExperts;
        return experts(e, kind_tag == kExpertsMargin);
      case kBlocks:
        e->kind = Kind::kBlocks;
        return blocks(e);
      case kFetch:
        e->kind = Kind::kFetch;
        return fetch(e);
      case kPredicted:
        e->kind = Kind::kPredicted;
        return predicted(e);
      case kLayerTime:
        e->kind = Kind::kLayerTime;
        e->stage = static_cast<TraceStage>(in.below(static_cast<int64_t>(TraceStage::kCount), "a stage"));
        e->us = in.amount("a stage's time");
        return;
      case kEndStep:
        e->kind = Kind::kEndStep;
        if (!in_step) in.fail("a step ends that has not begun");
        in_step = false;
        e->us = time();
        return;
      default:
        in.fail(fmt::format("an event of unknown kind {}", kind_tag));
    }
  }
};

TraceReader::TraceReader(std::unique_ptr<File> file, int64_t bytes)
    : file_(std::move(file)), bytes_(bytes), decoder_(std::make_unique<Decoder>()) {}
TraceReader::~TraceReader() = default;

Status TraceReader::damaged(const std::string& what) const {
  return corrupt(fmt::format("{}: chunk {} at offset {} is damaged: {}; record the trace again, or fetch it again",
                             file_->path(), chunks_, chunk_at_, what));
}

Result<TraceReader::Found> TraceReader::read_chunk(uint32_t* kind, std::string* raw) {
  chunk_at_ = at_;
  const int64_t left = bytes_ - at_;
  const auto cut = [&](const std::string& what) {
    truncated_ = fmt::format("the file ends at byte {}, {} (chunk {} at offset {})", bytes_, what, chunks_, chunk_at_);
    return Found::kEnd;
  };
  if (left == 0) return cut("before the mark of a run that ended well");
  if (left < kChunkHeaderBytes) return cut("in a chunk's header");
  std::string header(static_cast<size_t>(kChunkHeaderBytes), '\0');
  FIRN_TRY(file_->read_at(at_, std::as_writable_bytes(std::span(header))));
  // What a file system leaves where a length came to disk before its bytes did.
  if (header.find_first_not_of('\0') == std::string::npos) return cut("and only zero bytes stand there");
  const auto found_sum = get_raw<uint64_t>(header.data() + 24);
  const uint64_t sum = XXH3_64bits_withSeed(header.data(), 24, chunks_);
  if (sum != found_sum) {
    return damaged(fmt::format("its header's checksum is {:016x}, expected {:016x}", sum, found_sum));
  }
  *kind = get_raw<uint32_t>(header.data() + 4);
  const auto stored = get_raw<uint32_t>(header.data() + 8), raw_bytes = get_raw<uint32_t>(header.data() + 12);
  const auto expected = get_raw<uint64_t>(header.data() + 16);
  if (get_raw<uint32_t>(header.data()) != kChunkMark) return damaged("it has no chunk's mark");
  if (raw_bytes > kMaxRaw || stored > ZSTD_compressBound(kMaxRaw)) {
    return damaged(fmt::format("it claims {} bytes, {} unpacked; expected at most {}", stored, raw_bytes, kMaxRaw));
  }
  if (left - kChunkHeaderBytes < int64_t{stored}) return cut("in a chunk");
  std::string bytes(stored, '\0');
  FIRN_TRY(file_->read_at(at_ + kChunkHeaderBytes, std::as_writable_bytes(std::span(bytes))));
  const uint64_t found = XXH3_64bits_withSeed(bytes.data(), bytes.size(), chunks_);
  if (found != expected) return damaged(fmt::format("its checksum is {:016x}, expected {:016x}", found, expected));
  raw->resize(raw_bytes);
  const size_t n = ZSTD_decompress(raw->data(), raw->size(), bytes.data(), bytes.size());
  if (ZSTD_isError(n) != 0) return damaged(fmt::format("zstd: {}", ZSTD_getErrorName(n)));
  if (n != raw_bytes) return damaged(fmt::format("{} bytes unpacked, expected {}", n, raw_bytes));
  at_ += kChunkHeaderBytes + int64_t{stored};
  return Found::kChunk;
}

Result<std::unique_ptr<TraceReader>> TraceReader::open(FileSystem& fs, const std::string& path) {
  FIRN_ASSIGN(auto file, fs.open(path, OpenMode::kRead));
  FIRN_ASSIGN(const int64_t bytes, file->size());
  std::unique_ptr<TraceReader> reader(new TraceReader(std::move(file), bytes));
  std::string preface(static_cast<size_t>(std::min(bytes, kPrefaceBytes)), '\0');
  FIRN_TRY(reader->file_->read_at(0, std::as_writable_bytes(std::span(preface))));
  const std::string_view magic = std::string_view(preface).substr(0, kMagic.size());
  if (magic != kMagic.substr(0, magic.size())) {
    return invalid(
        fmt::format("{}: not a trace of firn: it starts with {}, expected {}", path, shown(magic), shown(kMagic)));
  }
  if (bytes < kPrefaceBytes) {
    return corrupt(fmt::format("{}: {} bytes, expected at least {}: the run ended before anything was recorded", path,
                               bytes, kPrefaceBytes));
  }
  const auto version = get_raw<uint32_t>(preface.data() + 8);
  if (version != kTraceVersion) {
    return unsupported(fmt::format("{}: a trace of version {}, this firn reads version {}: record it again", path,
                                   version, kTraceVersion));
  }
  if (preface != trace_preface()) return corrupt(fmt::format("{}: its first 16 bytes are damaged", path));
  reader->at_ = kPrefaceBytes;
  uint32_t kind = 0;
  std::string raw;
  FIRN_ASSIGN(const Found found, reader->read_chunk(&kind, &raw));
  if (found == Found::kEnd) {
    return corrupt(fmt::format("{}: {}: the run ended before its description was written", path, reader->truncated_));
  }
  if (kind != static_cast<uint32_t>(TraceChunk::kHeader)) {
    return reader->damaged(fmt::format("its kind is {}, expected the run's description", kind));
  }
  auto header = decode_header(raw);
  if (!header.ok()) return reader->damaged(header.status().message());
  reader->header_ = std::move(header).value();
  reader->decoder_->header = &reader->header_;
  ++reader->chunks_;
  return reader;
}

Result<bool> TraceReader::next(TraceEvent* event) {
  if (ended_) return false;
  while (decoder_->in.empty()) {
    uint32_t kind = 0;
    auto found = read_chunk(&kind, &decoder_->raw);
    if (!found.ok() || *found == Found::kEnd) {
      ended_ = true;
      if (!found.ok()) return found.status();
      return false;
    }
    if (kind == static_cast<uint32_t>(TraceChunk::kEnd)) {
      ended_ = true;
      Cursor in(decoder_->raw);
      const int64_t expected = in.amount("the number of events");
      if (in.bad() || !in.empty()) return damaged("its end mark is not one number");
      if (expected != events_) return damaged(fmt::format("{} events were read, {} recorded", events_, expected));
      if (at_ != bytes_) return damaged(fmt::format("{} bytes stand behind the end mark", bytes_ - at_));
      complete_ = true;
      return false;
    }
    if (kind != static_cast<uint32_t>(TraceChunk::kEvents)) {
      ended_ = true;
      return damaged(fmt::format("its kind is {}, expected events", kind));
    }
    decoder_->start_chunk();
    if (!decoder_->in.empty())
      ++chunks_;
    else {
      ended_ = true;
      return damaged("it holds no events");
    }
  }
  decoder_->event(event);
  if (decoder_->in.bad()) {
    ended_ = true;
    --chunks_;  // it was counted when it was read
    return damaged(fmt::format("event {}: {}", events_, decoder_->in.why()));
  }
  ++events_;
  return true;
}

}  // namespace firn::storage
