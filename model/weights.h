// Weights by role: one enumeration of the checkpoint's tensors drives loading, `firn inspect` and byte counts.
//
// The format of each matrix is decided by its companions (weight, weight_scale_inv, weight_scale, weight_scale_2,
// weight_packed ...), never from the config alone; layouts firn cannot compute are refused by their name. Names are
// accepted with and without the `language_model.` prefix and in the alternative spellings of specification 2.7 and
// formats.md 2. One gate admits a tensor: name, dtype and shape, expected beside found.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/config.h"
#include "runtime/arena.h"
#include "runtime/tensor.h"
#include "storage/safetensors.h"

namespace firn::model {

// Groups of `firn inspect` and of specification 2.6, in that table's order.
enum class Group : uint8_t {
  kEmbed,
  kLmHead,
  kAttention,
  kLayerNorms,
  kFinalNorm,
  kIndexer,
  kIndexerNorms,
  kDenseMlp,
  kExperts,
  kShared,
  kRouter,
  kRouterBias,
  kVisionBlocks,
  kPatchEmbedding,
  kProjector,
  kPatchMerge,
  kCount,
};
const char* group_name(Group group);

enum class Role : uint8_t {
  kEmbed,
  kLmHead,
  kFinalNorm,
  kInputNorm,
  kPostNorm,
  kQ,
  kK,
  kV,
  kO,
  kQNorm,
  kKNorm,
  kIndexQ,
  kIndexK,
  kIndexQNorm,
  kIndexKNorm,
  kMlpGate,
  kMlpUp,
  kMlpDown,
  kRouterGate,
  kRouterBias,
  kExpertGate,
  kExpertUp,
  kExpertDown,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kVision,
};

// One logical tensor the config calls for.
struct Slot {
  Role role;
  Group group;
  int32_t layer = -1;
  int32_t expert = -1;
  std::vector<std::string> stems;  // accepted full names without the last component, preferred first
  std::string leaf;                // "weight", "bias", or "" when the stem is the whole name
  std::vector<int64_t> shape;      // logical
  bool matrix = false;             // may be quantised
};
std::vector<Slot> enumerate_slots(const ModelConfig& config);

// A slot found in a checkpoint.
struct FoundSlot {
  const Slot* slot = nullptr;
  WeightFormat format = WeightFormat::kBf16;
  const storage::TensorInfo* data = nullptr;
  const storage::TensorInfo* scales = nullptr;
  const storage::TensorInfo* scalar = nullptr;  // weight_scale_2 or weight_global_scale
  bool scalar_inverse = false;                  // divide instead of multiply
  int64_t bytes = 0;                            // data + scales + scalars, as stored
  int64_t parameters = 0;
};

// What a checkpoint holds against what its config calls for; reads nothing but headers.
struct Survey {
  ModelConfig config;
  storage::Checkpoint checkpoint;
  std::vector<Slot> slots;
  std::vector<FoundSlot> found;          // same order as slots; data == nullptr where missing
  std::vector<std::string> missing;      // in words: name and expected shape
  std::vector<std::string> unexpected;   // names nobody asked for (ignorable companions are not listed)
  std::vector<std::string> mismatched;   // in words: name, expected, found
  std::vector<std::string> unsupported;  // layouts refused by name
  std::vector<std::string> ignored;      // input_scale and the like
  bool has_vision = false;               // all vision tensors there
  bool vision_absent = false;            // none there: a text-only checkpoint

  struct GroupTotal {
    int64_t parameters = 0, bytes = 0;
    std::vector<std::string> formats;  // "MXFP8", "BF16"
  };
  std::array<GroupTotal, static_cast<size_t>(Group::kCount)> groups;
  int64_t parameters = 0, bytes = 0;

  // Fails only when files cannot be read or parsed; wrong content is listed in the fields above.
  static Result<Survey> open(storage::FileSystem& fs, const std::string& path);
  // ok, or the first problems in words: what stops a load (missing, mismatched, unsupported, unexpected text tensors).
  Status loadable() const;
};

struct ExpertWeights {
  WeightView gate, up, down;
};

struct LayerWeights {
  NormWeight input_norm, post_norm, q_norm, k_norm, index_q_norm, index_k_norm;
  WeightView q, k, v, o, index_q, index_k;
  WeightView mlp_gate, mlp_up, mlp_down;           // dense layers
  WeightView router;                               // MoE layers; f32 (bf16 accepted)
  ConstMatrixView router_bias;                     // f32 [1, E]
  WeightView shared_gate, shared_up, shared_down;  // empty when there is no shared expert
  std::vector<ExpertWeights> experts;
};

// Loaded text weights. Views point into buffers owned here.
struct Weights {
  WeightView embed, lm_head;
  NormWeight final_norm;
  std::vector<LayerWeights> layers;
  std::vector<Buffer> buffers;
  int64_t bytes = 0;          // resident
  int64_t experts_bytes = 0;  // of these, routed experts
};

struct LoadOptions {
  bool experts = true;  // false: without the routed experts (their views stay empty): an ExpertStore brings them
  int n_readers = 4;
  bool direct = true;
  std::function<void(int64_t, int64_t)> progress;
  const std::atomic<bool>* cancel = nullptr;
  // The arena hands out memory in which an earlier load of the same weights stands already, and which may be read-only:
  // nothing is read, written or checked.
  bool content_is_there = false;
};

// What load_weights asks its arena for, in order: `what` names it in messages. REQUIRES survey.loadable().
struct WeightUnit {
  std::string what;
  int64_t bytes = 0;
};
std::vector<WeightUnit> weight_units(const Survey& survey, const LoadOptions& options);

// Loads every text tensor as stored, in disk order. Scale bytes are checked for NaN codes (the tensor is named).
Result<Weights> load_weights(storage::FileSystem& fs, const Survey& survey, Arena& arena, const LoadOptions& options,
                             double* seconds = nullptr);

}  // namespace firn::model
