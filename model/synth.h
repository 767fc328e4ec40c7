// Synthetic and converted checkpoints.
//
// synth_checkpoint makes a text checkpoint of any size from a config: names, dtypes and companions of the releases,
// weights from a seeded counter-based generator (the same bytes whatever the number of threads). Magnitudes keep
// activations of order one over any number of layers: matrices have a standard deviation of about gain / sqrt(inputs),
// down projections have rows that sum to nothing (the activation's mean is not zero, and would otherwise push all
// tokens the same way), routers give logits of about 1.5 so that tokens spread over experts, and index norms let block
// scores differ.
//
// convert_checkpoint rewrites a checkpoint in another format; matrices already stored so keep their bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/checkpoint_writer.h"
#include "model/weights.h"

namespace firn::model {

// kNvfp4 and kMxfp4 name the routed experts' format; every other matrix is MXFP8 then, as in the published mixtures.
enum class CheckpointFormat : uint8_t { kBf16, kMxfp8, kNvfp4, kMxfp4 };
Result<CheckpointFormat> checkpoint_format(std::string_view name);  // "bf16", "mxfp8", "nvfp4", "mxfp4"
const char* checkpoint_format_name(CheckpointFormat format);

struct SynthOptions {
  std::string config;  // config.json, or the folder that holds one; tokenizer files beside it are copied
  std::string out;
  CheckpointFormat format = CheckpointFormat::kBf16;
  uint64_t seed = 1;
  int64_t layers = 0;   // 0: as the config says
  int64_t experts = 0;  // 0: as the config says
  int n_threads = 0;
  int64_t shard_bytes = int64_t{2'000'000'000};
  std::function<void(int64_t, int64_t)> progress;
  const std::atomic<bool>* cancel = nullptr;
};
Status synth_checkpoint(storage::FileSystem& fs, const SynthOptions& options);

Status convert_checkpoint(storage::FileSystem& fs, const std::string& source, const std::string& out,
                          CheckpointFormat format, int64_t shard_bytes = int64_t{2'000'000'000});

// --- What both are made of
// ---------------------------------------------------------------------------------------------

// How a slot is stored in a checkpoint of this format.
WeightFormat stored_format(const Slot& slot, CheckpointFormat format);

// The tensors a slot becomes, in file order, without content: the data first, then scales, scalar, input_scale.
std::vector<PlannedTensor> stored_tensors(const Slot& slot, WeightFormat format);

// The shards of a checkpoint, open for reading, in its order.
using SourceFiles = std::vector<std::unique_ptr<storage::File>>;
Result<SourceFiles> open_shards(storage::FileSystem& fs, const storage::Checkpoint& checkpoint);

// Append a tensor as it is stored (nothing for nullptr), and a matrix as the tensors it becomes in another format. What
// they are given must outlive the tensors.
void add_copy(const SourceFiles& files, const storage::TensorInfo* t, std::vector<PlannedTensor>& out);
Status add_converted(const SourceFiles& files, const FoundSlot& found, WeightFormat target,
                     std::vector<PlannedTensor>& out);

// config.json's text with the number of layers and experts changed (0: kept) and quantization_config set for the
// format.
Result<std::string> edit_config(std::string_view config_json, int64_t layers, int64_t experts, CheckpointFormat format);

}  // namespace firn::model
