// safetensors: reading headers of untrusted files, the shard index of a checkpoint folder, and writing files.
//
// Format: u64 little-endian header length N, N bytes of JSON {"name": {"dtype", "shape", "data_offsets": [begin, end]},
// "__metadata__": {...}}, then the data; offsets count from the end of the header. Every count, product and offset is
// checked for overflow and against the file's real size; overlapping ranges, holes and lengths that contradict dtype
// and shape are errors (Code::kCorrupt) that name file and tensor.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/dtype.h"
#include "runtime/status.h"
#include "storage/file.h"

namespace firn::storage {

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int32_t shard = 0;        // index into Checkpoint::shards
  int64_t file_offset = 0;  // absolute, of the first byte
  int64_t bytes = 0;

  int64_t elements() const;
  std::string shape_text() const;  // "[3072, 6144]"
};

// Parses the JSON header text (without the 8 length bytes); data_bytes is what follows the header in the file. Offsets
// in the result are relative to the start of the data. This is the fuzzed entry point.
Result<std::vector<TensorInfo>> parse_safetensors_header(std::string_view json, int64_t data_bytes,
                                                         const std::string& file_name,
                                                         std::map<std::string, std::string>* metadata = nullptr);

// Header of one file: reads 8 + N bytes only.
Result<std::vector<TensorInfo>> read_safetensors_header(const File& file);

struct Shard {
  std::string path;
  int64_t bytes = 0;
};

// A piece of a packed file (storage/packed_file.h) that is read and checked as a whole. Offset and bytes are multiples
// of 4096; the tensors start at multiples of 64 inside it; everything between them is zero.
enum class ExtentKind : uint8_t {
  kFile = 0,    // a small file of the checkpoint folder
  kExpert = 1,  // one routed expert
  kLayer = 2,   // what else a layer has
  kGlobal = 3,  // embeddings, output head, final norm
  kVision = 4,
  kOther = 5,  // tensors nobody asked for
};
struct Extent {
  ExtentKind kind = ExtentKind::kOther;
  int32_t layer = -1;
  int32_t expert = -1;
  int64_t offset = 0;
  int64_t bytes = 0;
  uint64_t checksum = 0;         // XXH3-64 of all its bytes
  std::vector<int32_t> tensors;  // indices into Checkpoint::tensors, in the order they lie

  std::string what() const;  // "expert 3 of layer 7"
};
struct EmbeddedFile {
  int64_t offset = 0;
  int64_t bytes = 0;
  int32_t extent = 0;  // index into Checkpoint::extents
};

// All tensors of a folder (model.safetensors.index.json + shards, or without an index every *.safetensors in it), of
// one file or of a packed file. Headers only; the files are closed again. Where several shards hold a tensor of the
// same name the index decides; without an index that is an error. Tensors the index does not mention are listed too, so
// that nothing is dropped unseen.
struct Checkpoint {
  std::string path;
  std::vector<Shard> shards;
  std::vector<TensorInfo> tensors;  // sorted by name

  // Of a packed file only; empty otherwise.
  std::vector<Extent> extents;                // in file order, without gaps
  std::map<std::string, EmbeddedFile> files;  // config.json, tokenizer.json, ...; storage::read_model_file reads them
  std::vector<uint64_t> tensor_checksums;     // XXH3-64, in the order of `tensors`
  std::string model_hash;                     // 32 hex digits over config and every tensor's content
  std::string identity;                       // what storage::model_identity gives
  std::string experts;                        // "keep", or the format routed experts were converted to
  bool packed() const { return !extents.empty(); }

  const TensorInfo* find(std::string_view name) const;

  // Errors: a shard the index names is missing; a tensor the index places in a shard is not there (named); a shard
  // holds a tensor twice; a file is shorter than its header says. metadata.total_size is not trusted (the release's is
  // wrong).
  static Result<Checkpoint> open(FileSystem& fs, const std::string& path);
};

// A small file in memory, whole: for tests, goldens and logits files.
class SafetensorsFile {
 public:
  static Result<SafetensorsFile> read(const std::string& path);
  const TensorInfo* find(std::string_view name) const;
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // Pointer to the tensor's first byte (CHECKs that it exists); not necessarily aligned for its type.
  const std::byte* data(std::string_view name) const;

 private:
  std::vector<TensorInfo> tensors_;  // file_offset relative to bytes_
  std::map<std::string, std::string> metadata_;
  std::string bytes_;
};

// Writes one file tensor by tensor, in the order declared. Data may be supplied in pieces (for large tensors) or left
// out altogether (sparse = true: a file of the right length with holes, for header-only copies). The file appears under
// its name only when finish() succeeds.
class SafetensorsWriter {
 public:
  struct Declared {
    std::string name;
    DType dtype;
    std::vector<int64_t> shape;
  };
  static Result<SafetensorsWriter> create(const std::string& path, std::vector<Declared> tensors,
                                          const std::map<std::string, std::string>& metadata = {}, bool sparse = false,
                                          FileSystem& fs = FileSystem::real());
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();  // unfinished: the temporary file is removed

  Status append(const void* data, int64_t bytes);  // the next bytes, in declared order
  Status finish();                                 // CHECKs nothing; says how many bytes are missing or too many

 private:
  struct State;
  explicit SafetensorsWriter(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace firn::storage
