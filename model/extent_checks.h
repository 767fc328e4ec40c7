// The checksums of a packed file's extents while its weights are loaded; does nothing for other checkpoints.
//
// Every tensor the loader reads is told to placed(); place_rest() adds reads for what else lies in the same extents
// (small scalars nobody computes with), so that an extent can be checked from memory. One that holds much else is read
// once more, by itself. Threads: check_read() may run beside nothing but itself in sequence; it starts its own threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "storage/loader.h"
#include "storage/packed_file.h"

namespace firn::model {

class ExtentChecks {
 public:
  explicit ExtentChecks(const storage::Checkpoint& checkpoint) : checkpoint_(checkpoint) {
    if (checkpoint.packed()) places_.resize(checkpoint.tensors.size(), nullptr);
  }

  // `t` is an element of the checkpoint's tensors; its bytes will be at dst.
  void placed(const storage::TensorInfo& t, const void* dst);
  void place_rest(std::vector<storage::LoadRange>* ranges);
  // Checks what was read completely: the extents that end at or before `read_to`, each once, in file order.
  Status check_read(storage::FileSystem& fs, int64_t read_to, int n_threads, const std::atomic<bool>* cancel);

 private:
  Status check(storage::FileSystem& fs, const storage::Extent& extent) const;

  const storage::Checkpoint& checkpoint_;
  std::vector<const std::byte*> places_;     // by tensor; nullptr: not read
  std::vector<const storage::Extent*> due_;  // extents something is read of, in file order
  size_t next_ = 0;                          // in due_
  std::vector<std::vector<std::byte>> scratch_;
};

}  // namespace firn::model
