// Run traces: what is recorded comes back bit for bit, and a broken file gives a prefix or a clear error.
#include "storage/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <functional>
#include <random>
#include <set>

#include "storage/faulty_file.h"
#include "support/temp_folder.h"
#include "tests/support/catch.h"

namespace firn::test {
namespace {

using namespace storage;  // NOLINT

TraceHeader header_of(int32_t layers, int32_t experts, int32_t groups, int32_t topk) {
  TraceHeader h;
  h.model = "test";
  h.layers = layers;
  h.sparse_layer.assign(static_cast<size_t>(layers), true);
  h.moe_layer.assign(static_cast<size_t>(layers), true);
  h.experts = experts;
  h.experts_per_token = std::min(experts, 4);
  h.groups = groups;
  h.topk_blocks = topk;
  h.block_tokens = 128;
  h.expert_bytes = 1000;
  h.kv_block_bytes = 500;
  h.options = "--wave 7";
  return h;
}

// An event in words, every float by its bits.
std::string words(const TraceEvent& e) {
  using Kind = TraceEvent::Kind;
  const auto list = [](const std::vector<int32_t>& ids) { return fmt::format("{}", fmt::join(ids, ",")); };
  std::string floats;
  for (const float v : e.values) floats += fmt::format(" {:08x}", std::bit_cast<uint32_t>(v));
  const TraceFetch& f = e.fetch;
  switch (e.kind) {
    case Kind::kBeginStep: {
      std::string out = fmt::format("begin {} {}", step_name(e.step.kind), e.step.start_us);
      for (const TraceSpan& s : e.step.spans) out += fmt::format(" {}:{}@{}", s.sequence, s.rows, s.first_position);
      return out;
    }
    case Kind::kExperts:
      return fmt::format("experts {} {} {}{} {}", e.layer, e.row, list(e.ids), floats,
                         e.margin == e.margin ? fmt::format("{}", e.margin) : "none");
    case Kind::kBlocks:
      return fmt::format("blocks {} {} {}{}", e.layer, e.row, list(e.ids), floats);
    case Kind::kFetch:
      return fmt::format("fetch {} {} {} {} {} {} {} {} {} {} {}", object_name(f.what), static_cast<int>(f.cause),
                         static_cast<int>(f.outcome), f.layer, f.sequence, f.group, f.id, f.bytes, f.start_us,
                         f.service_us, f.wait_us);
    case Kind::kPredicted:
      return fmt::format("predicted {} {} {} {} {} {}", object_name(e.what), static_cast<int>(e.signal), e.layer, e.row,
                         e.group, list(e.ids));
    case Kind::kLayerTime:
      return fmt::format("time {} {} {}", e.layer, stage_name(e.stage), e.us);
    case Kind::kEndStep:
      return fmt::format("end {}", e.us);
  }
  return "?";
}

// Records random events; returns what the reader must say.
std::vector<std::string> record(TraceWriter& w, const TraceHeader& h, const TraceOptions& o, uint64_t seed, int steps,
                                int per_step) {
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int32_t>(random() % static_cast<uint64_t>(n)); };
  std::vector<std::string> want;
  const auto keep = [&](const TraceEvent& e) { want.push_back(words(e)); };
  for (int s = 0; s < steps; ++s) {
    TraceEvent e;
    e.kind = TraceEvent::Kind::kBeginStep;
    e.step.kind = below(2) == 0 ? TraceStepKind::kPrefill : TraceStepKind::kDecode;
    e.step.start_us = below(1 << 30) - 1000;
    for (int i = 0; i <= below(3); ++i) e.step.spans.push_back({below(1 << 20), 1 + below(70), below(1 << 30)});
    w.begin_step(e.step);
    keep(e);
    const TraceStep step = e.step;
    const bool prefill = step.kind == TraceStepKind::kPrefill;
    for (int i = 0; i < per_step; ++i) {
      e = {};
      e.layer = below(h.layers);
      e.row = below(step.rows());
      switch (below(5)) {
        case 0:
          e.kind = TraceEvent::Kind::kExperts;
          for (int k = 0; k < h.experts_per_token; ++k) {
            e.ids.push_back(below(h.experts));
            e.values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
          }
          e.margin = below(2) == 0 ? std::numeric_limits<float>::quiet_NaN() : 0.5f;
          w.experts(e.layer, e.row, e.ids, e.values, e.margin);
          if (!prefill || e.row % o.experts_every == 0) keep(e);
          break;
        case 1:
          e.kind = TraceEvent::Kind::kBlocks;
          for (int g = 0; g < h.groups; ++g) {
            std::set<int32_t> chosen;
            const int n = below(3) == 0 ? below(h.topk_blocks + 1) : h.topk_blocks;
            const int32_t range = below(2) == 0 ? 2 * h.topk_blocks : INT32_MAX;
            while (static_cast<int>(chosen.size()) < n) chosen.insert(below(range));
            e.ids.insert(e.ids.end(), chosen.begin(), chosen.end());
            e.ids.resize(static_cast<size_t>((g + 1) * h.topk_blocks), -1);
            e.values.push_back(below(3) == 0 ? std::numeric_limits<float>::quiet_NaN()
                                             : static_cast<float>(below(1000)) * 1e-3f);
          }
          w.blocks(e.layer, e.row, e.ids, e.values);
          if (!prefill || e.row % o.blocks_every == 0) keep(e);
          break;
        case 2:
          e.kind = TraceEvent::Kind::kFetch;
          e.fetch.what = below(2) == 0 ? TraceObject::kExpert : TraceObject::kKvBlock;
          e.fetch.cause = static_cast<Cause>(below(static_cast<int64_t>(Cause::kCount)));
          e.fetch.outcome = static_cast<TraceOutcome>(below(4));
          e.fetch.layer = e.layer;
          if (e.fetch.what == TraceObject::kKvBlock) {
            e.fetch.sequence = below(9);
            e.fetch.group = below(h.groups);
          }
          e.fetch.id = below(1 << 30);
          e.fetch.bytes = below(1 << 30);
          e.fetch.start_us = below(1 << 30);
          e.fetch.service_us = below(100000);
          e.fetch.wait_us = below(2) * below(1000);
          w.fetch(e.fetch);
          keep(e);
          break;
        case 3:
          e.kind = TraceEvent::Kind::kPredicted;
          e.what = below(2) == 0 ? TraceObject::kExpert : TraceObject::kKvBlock;
          e.signal = static_cast<Cause>(below(static_cast<int64_t>(Cause::kCount)));
          e.group = below(h.groups);
          for (int k = below(20); k > 0; --k) e.ids.push_back(below(INT32_MAX));
          w.predicted(e.what, e.signal, e.layer, e.row, e.group, e.ids);
          if (!prefill || e.row % (e.what == TraceObject::kExpert ? o.experts_every : o.blocks_every) == 0) keep(e);
          break;
        default:
          e.kind = TraceEvent::Kind::kLayerTime;
          e.layer = below(h.layers + 1) - 1;
          e.stage = static_cast<TraceStage>(below(static_cast<int64_t>(TraceStage::kCount)));
          e.us = below(1 << 30);
          w.layer_time(e.layer, e.stage, e.us);
          keep(e);
      }
    }
    e = {};
    e.kind = TraceEvent::Kind::kEndStep;
    e.us = below(1 << 30);
    w.end_step(e.us);
    keep(e);
  }
  return want;
}

struct Read {
  Status status;
  std::vector<std::string> events;
  bool complete = false;
  std::string truncated;
};

Read read_all(const std::string& path) {
  Read out;
  auto reader = TraceReader::open(FileSystem::real(), path);
  if (!reader.ok()) {
    out.status = reader.status();
    return out;
  }
  TraceEvent e;
  for (;;) {
    const auto more = (*reader)->next(&e);
    if (!more.ok()) out.status = more.status();
    if (!more.ok() || !*more) break;
    out.events.push_back(words(e));
  }
  out.complete = (*reader)->complete();
  out.truncated = (*reader)->truncated();
  return out;
}

bool is_prefix(const std::vector<std::string>& part, const std::vector<std::string>& whole) {
  return part.size() <= whole.size() && std::equal(part.begin(), part.end(), whole.begin());
}

std::unique_ptr<TraceWriter> writer(const std::string& path, const TraceHeader& h, const TraceOptions& o) {
  auto made = TraceWriter::create(FileSystem::real(), path, h, o);
  REQUIRE(made.ok());
  return std::move(made).value();
}

TEST_CASE("a trace gives back what was recorded, whatever the chunks and the thinning") {
  TempFolder temp;
  for (const int64_t chunk : {int64_t{1}, int64_t{300}, int64_t{256} << 10}) {
    for (uint64_t seed = 1; seed <= 6; ++seed) {
      CAPTURE(chunk, seed);
      const TraceHeader h = header_of(1 + static_cast<int32_t>(seed % 4), 300, static_cast<int32_t>(seed), 16);
      TraceOptions o;
      o.chunk_bytes = chunk;
      o.blocks_every = seed % 2 == 0 ? 3 : 1;
      o.experts_every = seed % 3 == 0 ? 2 : 1;
      auto w = writer(temp / "t", h, o);
      const auto want = record(*w, h, o, seed, 5, 60);
      REQUIRE(w->finish().ok());
      const Read got = read_all(temp / "t");
      CHECK(got.status.message().empty());
      CHECK(got.events == want);
      CHECK(got.complete);
      const auto reader = TraceReader::open(FileSystem::real(), temp / "t");
      REQUIRE(reader.ok());
      const TraceHeader& back = (*reader)->header();
      CHECK(back.model == h.model);
      CHECK(back.options == h.options);
      CHECK(back.sparse_layer == h.sparse_layer);
      CHECK(back.expert_bytes == h.expert_bytes);
      CHECK(back.blocks_every == o.blocks_every);
      CHECK(back.experts_every == o.experts_every);
    }
  }
}

TEST_CASE("a trace cut at any byte reads to its last whole chunk; no flipped bit goes unseen") {
  TempFolder temp;
  const TraceHeader h = header_of(3, 9, 2, 4);
  TraceOptions o;
  o.chunk_bytes = 200;
  auto w = writer(temp / "t", h, o);
  const auto want = record(*w, h, o, 5, 2, 20);
  REQUIRE(w->finish().ok());
  const std::string whole = get_file(temp / "t");
  size_t most = 0;
  for (size_t n = 0; n < whole.size(); ++n) {
    CAPTURE(n);
    const Read got = read_all(temp.write("cut", whole.substr(0, n)));
    CHECK_FALSE(got.complete);
    CHECK((got.status.ok() ? !got.truncated.empty() : got.status.message().find("cut") != std::string::npos));
    CHECK(is_prefix(got.events, want));
    CHECK(got.events.size() >= most);
    most = std::max(most, got.events.size());
  }
  CHECK(most == want.size());  // only the end mark is missing
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    CAPTURE(bit);
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
    const Read got = read_all(temp.write("flipped", flipped));
    CHECK_FALSE(got.status.ok());
    CHECK(is_prefix(got.events, want));
  }
  CHECK(read_all(temp.write("more", whole + "x")).status.code() == Code::kCorrupt);
  const Read zeros = read_all(temp.write("zeros", whole.substr(0, whole.size() - 41) + std::string(500, '\0')));
  CHECK(zeros.complete == false);
}

TEST_CASE("other files and other versions are refused by name") {
  TempFolder temp;
  const Read text = read_all(temp.write("text", "Dear reader, this is no trace at all."));
  CHECK(text.status.code() == Code::kInvalid);
  CHECK(text.status.message().find("Dear") != std::string::npos);
  const Read newer = read_all(temp.write("newer", trace_preface(7)));
  CHECK(newer.status.code() == Code::kUnsupported);
  CHECK(newer.status.message().find("version 7") != std::string::npos);
  CHECK(read_all(temp.write("none", "")).status.code() == Code::kCorrupt);
  CHECK(read_all(temp / "nowhere").status.code() == Code::kNotFound);
}

TEST_CASE("checksummed nonsense is an error, never undefined behaviour") {
  TempFolder temp;
  const TraceHeader h = header_of(3, 9, 2, 4);
  std::mt19937_64 random(3);
  for (int i = 0; i < 2000; ++i) {
    std::string raw = {'\x51', '\1', '\0', '\1', '\0', '\x7f', '\0'};  // a decode step of many rows
    for (uint64_t n = random() % 60; n > 0; --n) {
      raw.push_back(static_cast<char>(random() % 3 == 0 ? random() : random() % 9 | 0x50));
    }
    const std::string file = trace_preface() + *trace_chunk(TraceChunk::kHeader, 0, encode_trace_header(h)) +
                             *trace_chunk(TraceChunk::kEvents, 1, raw);
    const Read got = read_all(temp.write("t", file));
    CHECK((got.status.ok() || got.status.code() == Code::kCorrupt));
    CHECK(!got.events.empty());
  }
}

TEST_CASE("an old file stays until the first chunk is complete; without finish a prefix is there") {
  TempFolder temp;
  const TraceHeader h = header_of(3, 9, 2, 4);
  const std::string path = temp.write("t", "precious");
  {
    auto w = writer(path, h, {});
    w->begin_step(TraceStepKind::kDecode, 1, 5);
    CHECK(get_file(path) == "precious");
  }
  const Read got = read_all(path);
  CHECK(got.events.size() == 1);
  CHECK_FALSE(got.complete);
  CHECK_FALSE(TraceWriter::create(FileSystem::real(), temp / "no/where", h).ok());
  CHECK_FALSE(TraceWriter::create(FileSystem::real(), temp.path(), h).ok());
}

TEST_CASE("a failing disk is told at the end and leaves a readable prefix") {
  TempFolder temp;
  const TraceHeader h = header_of(3, 9, 2, 4);
  TraceOptions o;
  o.chunk_bytes = 200;
  for (const FaultKind kind : {FaultKind::kNoSpace, FaultKind::kTornWrite, FaultKind::kSyncError}) {
    FaultyFileSystem fs(FileSystem::real(),
                        {{.kind = kind, .first = kind == FaultKind::kSyncError ? 1 : 3, .bytes = 20}});
    auto w = TraceWriter::create(fs, temp / "t", h, o);
    REQUIRE(w.ok());
    const auto want = record(**w, h, o, 9, 4, 40);
    CHECK((*w)->finish().code() == Code::kIo);
    CHECK(fs.hits() == 1);  // nothing is written after it
    const Read got = read_all(temp / "t");
    CHECK(got.status.ok());
    CHECK(is_prefix(got.events, want));
    CHECK(!got.events.empty());
  }
}

// 57 layers, 4 groups of 16 blocks and 4 of 128 experts. With 0 kept it is the worst case: nothing to lean on.
TEST_CASE("a decode row of a large model takes few bytes") {
  TempFolder temp;
  for (const auto& [n_blocks, kept] : {std::pair<int32_t, int>{1024, 13}, {8192, 13}, {8192, 0}}) {
    std::mt19937_64 random(1);
    const TraceHeader h = header_of(57, 128, 4, 16);
    auto w = writer(temp / "t", h, {});
    std::vector<std::set<int32_t>> choice(57 * 4);
    constexpr int kSteps = 100;
    for (int s = 0; s < kSteps; ++s) {
      w->begin_step(TraceStepKind::kDecode, 1, n_blocks * 128LL + s);
      for (int32_t layer = 0; layer < 57; ++layer) {
        std::vector<int32_t> ids;
        std::vector<float> margins;
        for (size_t g = 0; g < 4; ++g) {
          auto& c = choice[static_cast<size_t>(layer) * 4 + g];
          while (static_cast<int>(c.size()) > kept)
            c.erase(std::next(c.begin(), static_cast<int>(random() % c.size())));
          while (c.size() < 16) c.insert(static_cast<int32_t>(random() % static_cast<uint64_t>(n_blocks)));
          ids.insert(ids.end(), c.begin(), c.end());
          margins.push_back(static_cast<float>(random() % 100000) * 1e-4f);
        }
        w->blocks(layer, 0, ids, margins);
        std::set<int32_t> picks;
        while (picks.size() < 4) picks.insert(static_cast<int32_t>(random() % 128));
        std::vector<float> weights;
        for (int i = 0; i < 4; ++i) weights.push_back(static_cast<float>(random() % 100000) * 1e-5f);
        w->experts(layer, 0, std::vector<int32_t>(picks.begin(), picks.end()), weights);
      }
      w->end_step();
    }
    REQUIRE(w->finish().ok());
    const int64_t raw = w->bytes_recorded() / kSteps, stored = w->bytes_written() / kSteps;
    std::printf("trace: a decode row of 57 layers, %d blocks, %d of 16 kept: %lld bytes, %lld in the file\n", n_blocks,
                kept, static_cast<long long>(raw), static_cast<long long>(stored));
    CHECK(raw < (kept > 0 ? 4200 : 9500));
  }
}

}  // namespace
}  // namespace firn::test
