// The packed model file: a whole checkpoint in one file, each routed expert one aligned, checksummed extent.
//
// storage/FORMAT.md describes every byte. A packed file presents itself as a Checkpoint (Checkpoint::open knows it by
// its magic), so that whatever reads checkpoints reads it too; small files (config.json, tokenizer.json, ...) lie
// inside, and read_model_file finds them wherever the model is.
//
// Trust: header and directory carry checksums, and every count, offset and length in them is checked against the file's
// real size all the same; an extent is checked by whoever reads it (check_extent, verify_packed). Damage is kCorrupt
// and names file, extent, expected and found.
//
// Writing: OUT.partial is filled extent by extent; OUT.partial.progress says how many are on disk for good (written
// only after those were synced). A run that was cancelled, failed or killed goes on from there when it is started again
// with the same source and options, and gives the same bytes as one that was never stopped. OUT appears whole, by a
// rename. Layout and content depend on the plan alone, not on threads or interruptions.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/status.h"
#include "storage/file.h"
#include "storage/safetensors.h"

namespace firn::storage {

inline constexpr int64_t kPackedAlignment = 4096;      // of extents
inline constexpr int64_t kPackedTensorAlignment = 64;  // of tensors in them
inline constexpr int64_t kMaxEmbeddedFileBytes = int64_t{64} << 20;

// Whether a regular file starts with the magic; false for anything else that is there or not there.
Result<bool> is_packed_file(FileSystem& fs, const std::string& path);

Result<Checkpoint> open_packed_file(FileSystem& fs, const std::string& path);

// Parses a directory that belongs to a file whose extents end at `data_end` (where the directory starts). Fills
// everything but path, shards' bytes, model_hash and identity. This is the fuzzed entry point.
Result<Checkpoint> parse_packed_directory(std::string_view directory, int64_t data_end, const std::string& path);

// A small file of a model: `model_path` is a checkpoint folder, a packed file, or another file of a folder, which then
// stands for it. kNotFound when the model has no such file; an embedded file's checksum is checked.
Result<std::string> read_model_file(FileSystem& fs, const std::string& model_path, const std::string& name,
                                    int64_t max_bytes);

// 32 hex digits that tell models apart without reading their weights: over config.json, every tensor's name, dtype and
// shape, and the first and last 4 KiB of each shard's data. A packed file gives what the folder it was made from gave
// (another value when its experts were converted).
Result<std::string> model_identity(FileSystem& fs, const Checkpoint& checkpoint);

// The identity of what is made from a model by `change`.
std::string derived_identity(const std::string& identity, std::string_view change);

// Checks an extent whose tensors are in memory: at(i) is the first byte of Checkpoint::tensors[i].
Status check_extent(const Checkpoint& checkpoint, const Extent& extent,
                    const std::function<const std::byte*(int32_t)>& at);

// The same for one that is on disk: reads all of it.
Status verify_extent(FileSystem& fs, const Checkpoint& checkpoint, const Extent& extent);

struct VerifyStats {
  int64_t bytes = 0;
  int64_t extents = 0;
  int64_t experts = 0;
  double seconds = 0;
};
// Reads everything and checks it; the error names the first extent that is damaged. `n_threads` readers of 4 MiB each;
// progress(done, total) comes from one thread at a time; `cancel` may be null.
Result<VerifyStats> verify_packed(FileSystem& fs, const std::string& path, int n_threads,
                                  const std::function<void(int64_t, int64_t)>& progress,
                                  const std::atomic<bool>* cancel);

// --- Writing ---------------------------------------------------------------------------------------------------------

// `fill` writes rows [begin, begin + n) of the first dimension (a scalar has one row); it is called from several
// threads at once, each with its own rows, and must give the same bytes for the same rows.
struct PackTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::function<Status(int64_t begin, int64_t n, uint8_t* out)> fill;
};

struct PackExtent {
  ExtentKind kind = ExtentKind::kOther;
  int32_t layer = -1;
  int32_t expert = -1;
  std::vector<PackTensor> tensors;
};

struct PackPlan {
  std::string out;
  std::map<std::string, std::string> files;  // must hold config.json
  std::vector<PackExtent> extents;           // in file order, behind those of the files
  std::string experts = "keep";
  std::string identity;                            // 32 hex digits
  bool overwrite = false;                          // replace OUT when it is there
  int n_threads = 2;                               // extents in the making at once; each takes about 4 MiB
  int64_t record_bytes = int64_t{2} << 30;         // how much is written between two progress records
  std::function<void(int64_t, int64_t)> progress;  // bytes done, bytes in all; from one thread at a time
  const std::atomic<bool>* cancel = nullptr;
};

struct PackStats {
  int64_t bytes = 0;          // of the file
  int64_t resumed_bytes = 0;  // of these, found done by an earlier run
  int64_t extents = 0;
  int64_t experts = 0;
  double seconds = 0;
  std::string model_hash;
};

// Errors: OUT exists and may not be replaced; too little disk; a plan that contradicts itself; OUT.partial is of other
// source or options (kInvalid, says what to do); another process writes it; a fill fails; cancelled.
Result<PackStats> write_packed(FileSystem& fs, const PackPlan& plan);

}  // namespace firn::storage
