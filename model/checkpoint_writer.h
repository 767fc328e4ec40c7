// Writing a whole checkpoint folder: shards, index, config and the files that lie beside it.
//
// The folder is built as OUT.partial and renamed to OUT when everything is on disk, so it appears whole or not at all;
// a failure or a cancel removes OUT.partial, a crash leaves it under that name. Shards are cut by bytes alone, so the
// files do not depend on the number of threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "runtime/dtype.h"
#include "runtime/status.h"

namespace firn::model {

// One tensor to be. `fill` writes rows [begin, begin + n) (of the first dimension; a scalar has one row) to `out`; it
// is called from several threads at once, each with its own rows, and must give the same bytes for the same rows.
struct PlannedTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::function<Status(int64_t begin, int64_t n, uint8_t* out)> fill;

  int64_t bytes() const;
};

struct CheckpointPlan {
  std::string out;
  std::vector<PlannedTensor> tensors;
  std::map<std::string, std::string> texts;        // further files: name to content (config.json)
  std::vector<std::string> copies;                 // paths of files to copy into the folder
  int64_t shard_bytes = int64_t{2'000'000'000};    // most tensor bytes in a shard, unless one tensor has more
  int n_threads = 0;                               // 0: all cores allowed to this process, at most 16
  std::function<void(int64_t, int64_t)> progress;  // bytes done, bytes in all; called from one thread at a time
  const std::atomic<bool>* cancel = nullptr;
};

// Errors: OUT exists, the disk is full or fails, a fill fails, cancelled.
Status write_checkpoint(const CheckpointPlan& plan);

// The files of a checkpoint folder that are neither weights nor config.json: tokenizer, template, generation defaults.
std::vector<std::string> companion_files(const std::string& folder);

}  // namespace firn::model
