// Weights in a shared segment: the first run of a checkpoint loads and checks them as ever and leaves them in memory
// under a name; later runs attach. storage/shared_segment.h has the states, the locks and what counts as memory of
// whom.
//
// A segment is keyed by the checkpoint's identity and by the units load_weights asks for: a run that keeps other
// weights resident uses another one. Whatever stands in the way of sharing (no room, no tmpfs, another user's file) is
// said and the weights are loaded into private memory: sharing never fails a run that would work without.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/weights.h"
#include "storage/shared_segment.h"

namespace firn::model {

struct SharedWeightsOptions {
  std::string folder = storage::kSharedFolder;
  bool verify = true;        // every byte against its checksum before it is used
  double max_wait_s = 1800;  // for another run that loads the same weights
  int64_t room_bytes = -1;   // the most a segment may take; -1: what the file system has free
  std::function<void(int64_t done, int64_t total)> progress;  // as SharedOptions::progress
  std::function<void(const std::string&)> say;                // at once: what is waited for or rebuilt, and why
};

// What came of it. Must outlive the Weights.
struct SharedWeights {
  std::unique_ptr<storage::SharedSegment> segment;  // null: private memory
  std::string place;                                // "shared (attached in 0.4 s)"
  double seconds = 0;                               // attaching with its check, or writing the checksums
  std::vector<std::string> missing;                 // capabilities, in words
};

// What the weights of a checkpoint are: names, types, shapes and places of all tensors, sizes and times of the shards.
uint64_t weights_identity(const Survey& survey);

Result<Weights> load_shared_weights(storage::FileSystem& fs, const Survey& survey, Arena& private_arena,
                                    const LoadOptions& load, const SharedWeightsOptions& options, SharedWeights* out);

// Bytes of shared segments of this checkpoint (any spelling of its path) that are in memory already.
int64_t shared_weights_bytes(const std::string& folder, const std::string& model);

}  // namespace firn::model
