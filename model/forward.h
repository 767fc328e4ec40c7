// Forward: one wave of tokens through the layers, in small steps.
//
//   Forward forward(model, options);
//   FIRN_TRY(forward.begin(wave));            // reserves KV, allocates, checks ids: nothing is computed yet
//   while (!forward.finished()) FIRN_TRY(forward.step());
//   forward.logits(i)                         // fp32, one row a wanted position
//
// Layer-major: all rows of the wave pass layer L before any passes L+1, so a prompt of any length reads every expert
// once. A step is one chunk of kChunkRows rows in a layer's attention, router or dense MLP, or one group of its
// experts: a long prefill can be stopped, watched or interleaved with another Forward's wave between steps. The cut
// into tiles, chunks and products depends on the wave alone, never on budgets, threads or time.
//
// Tiles. An expert's rows are computed tile by tile of kTileRows rows: when all hidden states are in memory the walk
// goes expert by expert through all tiles, so that an expert is read once a wave however small its cache; when they
// stream through disk it goes tile by tile through all experts. The products are the same ones, and every row adds its
// experts in ascending id, so the bits are too.
//
// Sequences take the new tokens (KvCache::commit) when the last step is done; a wave that fails or is dropped leaves
// them as they were. Several Forward objects may share one model and Ops; each is used by one thread at a time, and a
// KvCache is in at most one running wave.
//
// Numerics (design section 7): activation type bf16 (default) or f32 (--precise); products of one linear layer are
// summed in fp32 and stay fp32 until the next norm, activation or residual add rounds them once.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/kv.h"
#include "model/probe.h"
#include "model/weights.h"
#include "runtime/ops.h"

namespace firn::model {

class ExpertStore;
class ExpertWalk;
class HiddenFile;

struct WaveSpan {
  KvCache* kv = nullptr;
  std::vector<int32_t> ids;
  std::vector<int64_t> logits_at;  // ascending offsets into ids
  // Rows that replace the embeddings at some offsets (images): replace_rows holds replace_at.size() rows of H floats.
  std::vector<int64_t> replace_at;
  std::vector<float> replace_rows;
};

// How a wave's residual stream lives on disk between layers (model/hidden_file.h).
struct HiddenPlan {
  HiddenFile* files[2] = {nullptr, nullptr};  // input of layer L is files[L % 2]; null: in memory alone
  bool stream = false;      // only a tile of rows is in memory at a time; else files are copies, to go on from later
  int64_t start_layer = 0;  // > 0: files[start_layer % 2] holds the input of this layer, earlier ones are done
};

struct Wave {
  std::vector<WaveSpan> spans;
  HiddenPlan hidden;
};

// What to record of a wave, for tests, traces and evidence. Rows are rows of the wave (spans back to back).
struct Capture {
  bool hidden = false;   // residual stream after every layer, [layers + 1][rows of logits][H]
  bool routing = false;  // expert ids, weights, logits of every row, MoE layers in order
  bool blocks = false;   // block ids of every row, sparse layers in order
  bool mass = false;     // with blocks: how much attention each chosen block got; computes attention twice
};
struct Captured {
  std::vector<float> hidden;          // [layers + 1][n_logits][H]
  std::vector<float> final_hidden;    // [n_logits][H]
  std::vector<int32_t> expert_ids;    // [moe layers][rows][topk]
  std::vector<float> expert_weights;  // same shape
  std::vector<float> router_logits;   // [moe layers][rows][E]
  std::vector<int32_t> block_ids;     // [sparse layers][rows][groups * topk]
  std::vector<float> block_mass;      // [sparse layers][rows][groups * topk][heads a group]: share of the softmax
};

struct ForwardOptions {
  DType activation = DType::kBf16;  // or kF32
  Capture capture;
  // Ops that compute routed experts, besides the main one (index 0). Weights of an expert must lie in its Ops' space.
  std::vector<Ops*> expert_ops;
  // [moe layer][expert]: 0 = main Ops, i = expert_ops[i - 1]; empty = all on the main Ops.
  std::vector<std::vector<uint8_t>> expert_home;
  // Where experts come from when they are not all in `weights`; null: they are.
  ExpertStore* experts = nullptr;
  // What to fetch on a guess; never changes a result.
  bool prefetch_experts = false, prefetch_kv = false;
  // false: guess only while it pays, as measured (model/probe.h).
  bool always_guess = false;
};

class Forward {
 public:
  static constexpr int64_t kChunkRows = 512;    // rows of a step
  static constexpr int64_t kGroupPairs = 2048;  // (token, expert) pairs of an expert step
  static constexpr int64_t kGuessRows = 8;      // waves of at most so many rows guess from their residual
  static constexpr int64_t kTileRows = 16384;   // a multiple of kChunkRows

  // All referenced objects must outlive the Forward. Memory comes from ops->arena().
  Forward(const ModelConfig* config, const Weights* weights, Ops* ops, ForwardOptions options);
  ~Forward();

  Status begin(Wave wave);
  Status step();
  bool finished() const { return finished_; }
  // Work done so far in [0, 1]: layers x rows.
  double progress() const;
  // Layers that every row has passed; with a HiddenPlan the input of the next one is in its file by then.
  int64_t layers_done() const { return layers_done_; }
  // Gives up the wave: sequences return to what they were before begin(). Safe at any time.
  void abandon();

  int64_t n_logits() const { return static_cast<int64_t>(logit_rows_.size()); }
  std::span<const float> logits(int64_t i) const;  // of the i-th wanted position, spans in order
  const Captured& captured() const { return captured_; }
  // Whether guessing paid in steps of few rows so far.
  const Probe& expert_probe() const { return expert_probe_; }
  const Probe& kv_probe() const { return kv_probe_; }

  // Bytes a wave of `rows` rows with `n_logits` wanted positions takes besides weights, KV and the Ops' own scratch;
  // with `stream`, its hidden states on disk.
  static int64_t wave_bytes(const ModelConfig& config, DType activation, int64_t rows, int64_t n_logits,
                            bool stream = false);
  // The largest shapes of any call, for Ops::scratch_bytes.
  static Ops::Limits limits(const ModelConfig& config, int64_t rows, int64_t context);

 private:
  enum class Stage : uint8_t { kLoad, kEmbed, kAttention, kDenseMlp, kRouter, kExperts, kFinishMoe, kStore, kLogits };
  struct Chunk {
    int64_t row_begin = 0, n_rows = 0;
    struct Piece {
      int64_t span, row_begin, n_rows, offset;  // row_begin relative to the chunk; offset into the span
    };
    std::vector<Piece> pieces;
  };
  // Rows that go through a layer together, with their hidden states in memory: all of the wave, or one tile.
  struct Section {
    int64_t row_begin = 0, n_rows = 0;
    int64_t chunk_begin = 0, chunk_end = 0;
  };
  // Rows of some experts, computed in one step.
  struct ExpertGroup {
    struct Item {
      int32_t expert;
      int64_t pair_begin, n_pairs;  // into pair_rows_
    };
    std::vector<Item> items;
    int64_t pair_begin = 0, n_pairs = 0;
  };

  Status allocate(int64_t rows, int64_t n_logits);
  void release_buffers();
  Status check_ids() const;
  void cut_chunks(int64_t rows);
  void cut_sections();
  const Section& section() const { return sections_[static_cast<size_t>(section_)]; }
  bool last_section() const { return section_ + 1 == static_cast<int64_t>(sections_.size()); }
  Status begin_layer();
  Status end_attention();
  Status load_step();
  Status store_step(int64_t tile);
  Status keep_logit_rows();
  void enter(Stage stage);
  Status next_section();
  void make_expert_groups();
  std::vector<KvSpan> spans_of(const Chunk& chunk, int64_t layer) const;

  Status embed_step(const Chunk& chunk);
  Status attention_step(const Chunk& chunk);
  Status dense_mlp_step(const Chunk& chunk);
  Status router_step(const Chunk& chunk);
  // Attention of a chunk whose chosen blocks may be far: pins them, as many rows at a time as the near cache takes.
  struct Far;
  Status pin_far(const Chunk& chunk, Far* far);
  Status attend(const Chunk& chunk, const AttentionParams& attention, Far* far);
  void guess_blocks(const Chunk& chunk);
  IndexSelectParams choice(const MatrixView& q, std::span<const KvSpan> spans, const KvLayout& layout) const;
  Status capture_mass(const AttentionParams& attention, int64_t rows_after);
  Status experts_step(const ExpertGroup& group);
  Status compute_experts(const ExpertGroup& group, std::span<const int32_t> ids,
                         std::span<const ExpertWeights> weights);
  void guess_experts();
  Status experts_elsewhere(Ops* ops, const std::vector<MlpTask>& tasks, int64_t n_pairs);
  Status finish_moe_step(const Chunk& chunk);
  Status logits_step();
  Status capture_hidden(int64_t at);
  Status advance();

  static int64_t bytes_of(DType dtype, int64_t rows, int64_t cols) {
    return rows * cols * static_cast<int64_t>(dtype_bytes(dtype));
  }
  MatrixView view(const Buffer& buffer, DType dtype, int64_t rows, int64_t cols) const;
  MatrixView hidden(const Chunk& chunk) const;
  Status download(std::byte* dst, const void* src, int64_t bytes);

  const ModelConfig& config_;
  const Weights& weights_;
  Ops* const ops_;
  const ForwardOptions options_;
  const DType act_;

  Wave wave_;
  std::vector<int64_t> span_row_;    // first wave row of each span
  std::vector<int64_t> logit_rows_;  // wave rows whose logits are wanted
  std::vector<Chunk> chunks_;
  std::vector<Section> sections_;
  int64_t rows_ = 0;
  bool running_ = false;
  bool finished_ = false;

  Stage stage_ = Stage::kEmbed;
  int64_t layer_ = 0;
  int64_t layers_done_ = 0;
  Probe expert_probe_, kv_probe_;
  bool guess_experts_ = false, guess_kv_ = false;  // in this wave
  double expert_cost_ = 0, kv_cost_ = 0;           // seconds of this wave lost to waiting and guessing
  int64_t guessed_layer_ = -1;                     // whose experts were asked for on a guess already
  int64_t section_ = 0;
  int64_t next_ = 0;  // chunk of the section, group or tile of the stage

  // Host side of the router's choice in the current layer; rows count from the section's first.
  std::vector<int32_t> expert_ids_;    // [rows][topk]
  std::vector<float> expert_weights_;  // [rows][topk]
  std::vector<int32_t> pair_rows_;     // rows of the section grouped by expert
  std::vector<float> pair_weights_;
  std::vector<ExpertGroup> groups_;
  std::unique_ptr<ExpertWalk> walk_;  // of the current layer and section

  // Device side. Shapes in rows x columns; C = rows of a chunk, P = pairs of an expert group.
  // R = rows of a section.
  Buffer hidden_;                                   // [R, H] f32: the residual stream
  Buffer accumulator_;                              // [R, H] f32: sum of routed experts (MoE models)
  Buffer logit_hidden_;                             // [n_logits, H] f32: final residual of the wanted positions
  Buffer x_;                                        // [max(C, P), H] act
  Buffer q_raw_, k_raw_, v_raw_, iq_raw_, ik_raw_;  // [C, ...] f32
  Buffer q_, k_, iq_, ik_;                          // [C, ...] cache dtype
  Buffer heads_;                                    // [C, heads * head_dim] act
  Buffer block_ids_;                                // [C, index_heads * topk] i32
  Buffer y_;                                        // [max(C, P), H] f32
  Buffer picks_, pick_weights_, router_logits_;     // [C, ...]
  Buffer logits_device_;                            // [n_logits, vocab] f32
  Buffer guess_;                                    // kGuessRows rows: the next layer's norm and router, on a guess
  std::vector<float> logits_;
  Captured captured_;
};

}  // namespace firn::model
