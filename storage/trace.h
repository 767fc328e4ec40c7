// Run traces: what a run routed, chose, fetched and waited for, so that caches and prefetch signals can be judged
// later.
//
// The file (little-endian): 16 bytes of preface (magic, version, checksum), then chunks. A chunk is a header of 32
// bytes (kind, lengths, XXH3-64 of the stored bytes and of the header itself, both seeded with the chunk's number) and
// one zstd frame of a few hundred KiB of events. The first chunk is the TraceHeader, the last one says that the run
// ended well. Each chunk decodes by itself but for the step that is open at its start, so a crash costs the last chunk
// only.
//
// Events, in the order of the engine's work:
//   begin_step   a wave starts: prefill or decode, its spans of rows
//     predicted  what a signal would fetch
//     blocks     a row's block choice in a sparse layer       (rows of long prefills may be thinned: TraceOptions)
//     experts    a row's expert picks in an MoE layer
//     fetch      a read of an expert or KV block that was done (also between steps)
//     layer_time how long a stage of a layer took
//   end_step
// Blocks are named by their number in the sequence (position / block_tokens), experts by their id in the layer.
//
// Neither class is thread-safe: one thread records, one thread reads.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/status.h"
#include "storage/file.h"
#include "storage/slot_cache.h"

namespace firn::storage {

constexpr uint32_t kTraceVersion = 1;

// What the run was. layers and the two lists agree in length; counts are >= 0.
struct TraceHeader {
  std::string model;  // its name, for people
  int32_t layers = 0;
  std::vector<bool> sparse_layer, moe_layer;  // [layers]
  int32_t experts = 0, experts_per_token = 0;
  int32_t groups = 0;       // index heads: one choice of blocks each
  int32_t topk_blocks = 0;  // most blocks a group chooses
  int32_t block_tokens = 0;
  int64_t expert_bytes = 0;    // of one routed expert as it is fetched
  int64_t kv_block_bytes = 0;  // K and V of one block, one layer, one group
  std::string options;         // of the run, in words
  // Of prefill rows, every n-th is in the trace. Set by the writer from its options.
  int32_t blocks_every = 1, experts_every = 1;
};

struct TraceOptions {
  // Prefill rows whose number in the wave is a multiple of this keep their block choices (expert picks, predictions of
  // blocks follow blocks). Decode rows are always kept.
  int32_t blocks_every = 1;
  int32_t experts_every = 1;
  int64_t chunk_bytes = int64_t{256} << 10;  // of events before compression; a chunk ends with the event that fills it
  int zstd_level = 3;
};

enum class TraceStepKind : uint8_t { kPrefill, kDecode, kCount };
enum class TraceObject : uint8_t { kExpert, kKvBlock, kCount };
// Where a layer's time went. kWait: for fetches. Embedding and logits have layer -1.
enum class TraceStage : uint8_t {
  kEmbed,
  kIndex,
  kAttention,
  kDenseMlp,
  kRouter,
  kExperts,
  kCombine,
  kLogits,
  kWait,
  kOther,
  kCount
};
const char* stage_name(TraceStage stage);     // "embed", "index", ...
const char* object_name(TraceObject object);  // "expert", "kv block"
const char* step_name(TraceStepKind kind);    // "prefill", "decode"

// Rows of one sequence, at consecutive positions.
struct TraceSpan {
  int32_t sequence = 0;
  int32_t rows = 0;
  int64_t first_position = 0;
  bool operator==(const TraceSpan&) const = default;
};

struct TraceStep {
  TraceStepKind kind = TraceStepKind::kDecode;
  int64_t start_us = 0;
  std::vector<TraceSpan> spans;  // rows of the wave, back to back

  int64_t rows() const;
  // The sequence and position of a row of the wave; row in [0, rows()).
  struct Place {
    int32_t sequence;
    int64_t position;
  };
  Place place(int64_t row) const;
  bool operator==(const TraceStep&) const = default;
};

// What became of a speculative fetch, where the recorder knows it; kUnknown lets the reader of the trace work it out
// from the choices that follow.
enum class TraceOutcome : uint8_t { kUnknown, kUseful, kLate, kWasted, kCount };

struct TraceFetch {
  TraceObject what = TraceObject::kExpert;
  Cause cause = Cause::kDemand;
  TraceOutcome outcome = TraceOutcome::kUnknown;
  int32_t layer = 0;
  int32_t sequence = 0, group = 0;  // of a KV block
  int64_t id = 0;                   // expert or block
  int64_t bytes = 0;
  int64_t start_us = 0;    // since the trace began
  int64_t service_us = 0;  // from the drive's start to the bytes being there
  int64_t wait_us = 0;     // that somebody stood still for it; 0: hidden
  bool operator==(const TraceFetch&) const = default;
};

class TraceWriter {
 public:
  // Looks whether the file can be written, and changes nothing in one that is there until the first chunk is complete.
  // The file system must outlive the writer.
  static Result<std::unique_ptr<TraceWriter>> create(FileSystem& fs, const std::string& path, TraceHeader header,
                                                     const TraceOptions& options = {});
  // Without finish(): what was recorded is written, if it can be, but the end mark is not.
  ~TraceWriter();
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  int64_t now_us() const;  // since create(): the clock of every time in the trace

  // Calls append to a buffer; the one that fills it compresses and writes it (about a millisecond). After an error
  // nothing more is recorded; status() and finish() tell it. Arguments outside the header's ranges are a bug (CHECK).
  void begin_step(const TraceStep& step);
  void begin_step(TraceStepKind kind, int32_t rows, int64_t first_position);  // one sequence, now
  // ids[experts_per_token] in any order, weights[same]; margin: of the last pick to the runner-up, NaN: not known.
  void experts(int32_t layer, int32_t row, std::span<const int32_t> ids, std::span<const float> weights,
               float margin = std::numeric_limits<float>::quiet_NaN());
  // ids[groups * topk_blocks], of each group ascending, then -1; margins[groups]: score of the last chosen block less
  // that of the first not chosen, NaN where there is none. An empty `margins` means all NaN.
  void blocks(int32_t layer, int32_t row, std::span<const int32_t> ids, std::span<const float> margins);
  void fetch(const TraceFetch& fetch);
  // What a signal would fetch for a layer and row (and group; 0 for experts), best first. kLookahead speaks of the
  // choice of that layer in this same step; the other signals of its choice in the sequence's next step.
  void predicted(TraceObject what, Cause signal, int32_t layer, int32_t row, int32_t group,
                 std::span<const int32_t> ids);
  void layer_time(int32_t layer, TraceStage stage, int64_t us);
  void end_step(int64_t end_us);
  void end_step();  // now

  // Writes the rest and the end mark (a step may be open: it stays without an end) and syncs. Once.
  Status finish();
  const Status& status() const { return status_; }
  int64_t bytes_recorded() const { return bytes_recorded_; }  // before compression
  int64_t bytes_written() const { return at_; }

 private:
  TraceWriter(FileSystem& fs, std::string path, TraceHeader header, const TraceOptions& options);
  void start_event(uint8_t kind, int32_t layer, int32_t row);
  void event_done();
  void write_chunk();
  void put(std::string_view bytes);

  FileSystem& fs_;
  const std::string path_;
  TraceHeader header_;
  TraceOptions options_;
  std::chrono::steady_clock::time_point start_;
  std::unique_ptr<File> file_;  // from the first chunk on
  int64_t at_ = 0;              // where the next chunk goes
  uint32_t chunks_ = 0;
  std::string buffer_;
  int64_t bytes_recorded_ = 0, events_ = 0;
  Status status_;
  bool finished_ = false;
  // The open step.
  bool in_step_ = false;
  TraceStepKind kind_ = TraceStepKind::kDecode;
  int64_t rows_ = 0;
  // What the next event is written relative to; forgotten at a chunk's end.
  int32_t last_layer_ = 0, last_row_ = 0;
  int64_t last_us_ = 0;
  std::unordered_map<uint64_t, std::vector<int32_t>> last_blocks_;
};

// One event; only the fields of its kind mean something.
struct TraceEvent {
  enum class Kind : uint8_t { kBeginStep, kExperts, kBlocks, kFetch, kPredicted, kLayerTime, kEndStep };
  Kind kind = Kind::kBeginStep;
  int32_t layer = 0, row = 0;               // all but steps and fetches (those carry their layer)
  TraceStep step;                           // kBeginStep
  std::vector<int32_t> ids;                 // kExperts, kBlocks, kPredicted: as they were recorded
  std::vector<float> values;                // kExperts: weights; kBlocks: margins, one per group
  float margin = 0;                         // kExperts; NaN: not known
  TraceFetch fetch;                         // kFetch
  TraceObject what = TraceObject::kExpert;  // kPredicted
  Cause signal = Cause::kLookahead;         // kPredicted
  int32_t group = 0;                        // kPredicted
  TraceStage stage = TraceStage::kOther;    // kLayerTime
  int64_t us = 0;                           // kLayerTime: duration; kEndStep: when
};

class TraceReader {
 public:
  // kInvalid: not a trace; kUnsupported: of another version; kCorrupt: damaged, or it ends before its first chunk does.
  static Result<std::unique_ptr<TraceReader>> open(FileSystem& fs, const std::string& path);
  ~TraceReader();

  const TraceHeader& header() const { return header_; }
  // The next event; false after the last one. A file that ends inside a chunk ends with the events before it, and
  // truncated() says so. kCorrupt names the file, the chunk and its offset; there is nothing to be had after it.
  Result<bool> next(TraceEvent* event);
  // After next() gave false. complete(): the end mark was there. Else truncated() says in words what is missing.
  bool complete() const { return complete_; }
  const std::string& truncated() const { return truncated_; }
  int64_t events() const { return events_; }  // so far

 private:
  struct Decoder;
  TraceReader(std::unique_ptr<File> file, int64_t bytes);
  enum class Found : uint8_t { kChunk, kEnd };
  Result<Found> read_chunk(uint32_t* kind, std::string* raw);
  Status damaged(const std::string& what) const;

  std::unique_ptr<File> file_;
  const int64_t bytes_;
  int64_t at_ = 0, chunk_at_ = 0;
  uint32_t chunks_ = 0;
  TraceHeader header_;
  std::unique_ptr<Decoder> decoder_;
  bool ended_ = false, complete_ = false;
  std::string truncated_;
  int64_t events_ = 0;
};

// The pieces of a file, for tests that build broken ones.
enum class TraceChunk : uint32_t { kHeader = 1, kEvents = 2, kEnd = 3 };
std::string trace_preface(uint32_t version = kTraceVersion);
Result<std::string> trace_chunk(TraceChunk kind, uint32_t number, std::string_view raw, int zstd_level = 3);
std::string encode_trace_header(const TraceHeader& header);

}  // namespace firn::storage
