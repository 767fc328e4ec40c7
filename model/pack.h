// pack_checkpoint: a checkpoint as one packed file (storage/packed_file.h), with the routed experts' format changed if
// asked.
//
// An expert's extent holds, in this order, what a slot in memory holds: gate, its scales, up, its scales, down, its
// scales; behind them the scalars (weight_scale_2 and the like). Everything else of a layer is one extent, and so are
// embeddings with head and final norm (several when large), vision, and tensors nobody asked for. Small files of the folder are embedded.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "model/synth.h"
#include "storage/packed_file.h"

namespace firn::model {

struct PackOptions {
  std::string source;  // checkpoint folder or packed file
  std::string out;
  std::optional<CheckpointFormat> experts;  // nothing: as they are
  bool overwrite = false;
  int n_threads = 0;                        // 0: all cores allowed to this process, at most 16
  int64_t record_bytes = int64_t{2} << 30;  // as in storage::PackPlan
  std::function<void(int64_t, int64_t)> progress;
  const std::atomic<bool>* cancel = nullptr;
};

// Errors: as storage::write_packed; the source cannot be loaded; experts that the wanted format cannot hold.
Result<storage::PackStats> pack_checkpoint(storage::FileSystem& fs, const PackOptions& options);

}  // namespace firn::model
