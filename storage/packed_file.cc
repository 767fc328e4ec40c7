// Reading packed files: header, directory, embedded files, checks. See packed_file.h for the contract.
#include "storage/packed_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "runtime/thread_team.h"
#include "storage/packed_bytes.h"
#include "storage/text.h"

namespace firn::storage {

namespace packed {

std::string hex(XXH128_hash_t hash) { return fmt::format("{:016x}{:016x}", hash.high64, hash.low64); }

bool parse_hex(std::string_view text, XXH128_hash_t* hash) {
  if (text.size() != 32) return false;
  uint64_t halves[2] = {0, 0};
  for (size_t i = 0; i < 32; ++i) {
    const char c = text[i];
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) return false;
    halves[i / 16] = halves[i / 16] << 4 | static_cast<uint64_t>(c <= '9' ? c - '0' : c - 'a' + 10);
  }
  hash->high64 = halves[0];
  hash->low64 = halves[1];
  return true;
}

std::string encode_header(const Header& header) {
  std::string out(kMagic);
  put<uint32_t>(out, kVersion);
  put<uint32_t>(out, static_cast<uint32_t>(kHeaderBytes));
  put(out, header.file_bytes);
  put(out, header.directory_offset);
  put(out, header.directory_bytes);
  put(out, header.directory_checksum);
  put(out, header.model_hash.low64);
  put(out, header.model_hash.high64);
  put(out, header.identity.low64);
  put(out, header.identity.high64);
  out.resize(static_cast<size_t>(kHeaderChecksumAt), '\0');
  put(out, hash64(out));
  return out;
}

void Hasher::zeros(int64_t bytes) {
  static constexpr char kZeros[4096] = {};
  while (bytes > 0) {
    const int64_t n = std::min<int64_t>(bytes, sizeof(kZeros));
    add(kZeros, static_cast<size_t>(n));
    bytes -= n;
  }
}

XXH128_hash_t content_hash(std::string_view config, const Checkpoint& checkpoint) {
  FIRN_CHECK(checkpoint.tensor_checksums.size() == checkpoint.tensors.size());
  Hasher128 hash;
  hash.text("firn model 1");
  hash.text(config);
  for (size_t i = 0; i < checkpoint.tensors.size(); ++i) {
    const TensorInfo& t = checkpoint.tensors[i];
    hash.tensor(t.name, t.dtype, t.shape);
    hash.number(checkpoint.tensor_checksums[i]);
  }
  return hash.value();
}

}  // namespace packed

namespace {

using packed::AlignedBytes;
using packed::Header;

namespace stdfs = std::filesystem;

constexpr const char* kRemake = "the file is damaged: copy it again or make it anew with firn pack";
constexpr int64_t kPieceBytes = int64_t{4} << 20;
constexpr int64_t kIdentityBytes = 4096;

Status damaged(const std::string& path, const std::string& what) {
  return corrupt(fmt::format("{}: {}; {}", path, what, kRemake));
}

// Takes numbers and texts off the front; after the first that is not there everything reads as zero and ok() is false.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  T take() {
    T value{};
    if (bytes_.size() < sizeof(T)) {
      ok_ = false;
      bytes_ = {};
      return value;
    }
    std::memcpy(&value, bytes_.data(), sizeof(T));
    bytes_.remove_prefix(sizeof(T));
    return value;
  }
  std::string text(size_t bytes) {
    if (bytes_.size() < bytes) {
      ok_ = false;
      bytes_ = {};
      return {};
    }
    std::string out(bytes_.substr(0, bytes));
    bytes_.remove_prefix(bytes);
    return out;
  }
  bool ok() const { return ok_; }
  std::string_view rest() const { return bytes_; }

 private:
  std::string_view bytes_;
  bool ok_ = true;
};

class DirectoryParser {
 public:
  DirectoryParser(std::string_view directory, int64_t data_end, const std::string& path)
      : reader_(directory), data_end_(data_end), path_(path) {}

  Result<Checkpoint> run() {
    out_.path = path_;
    out_.shards.push_back({path_, 0});
    n_extents_ = reader_.take<uint32_t>();
    n_files_ = reader_.take<uint32_t>();
    n_tensors_ = reader_.take<uint32_t>();
    const auto option_bytes = reader_.take<uint32_t>();
    if (option_bytes > UINT16_MAX) return bad(fmt::format("a text of {} bytes", option_bytes));
    out_.experts = reader_.text(option_bytes);
    // The smallest entry of each table: a count beyond what the bytes can hold must not cost memory.
    const size_t least = size_t{n_extents_} * 40 + size_t{n_files_} * 15 + size_t{n_tensors_} * 21;
    if (!reader_.ok() || least > reader_.rest().size()) {
      return bad(fmt::format("{} extents, {} files and {} tensors do not fit into {} bytes", n_extents_, n_files_,
                             n_tensors_, reader_.rest().size()));
    }
    if (n_extents_ == 0) return bad("it names no extents");
    FIRN_TRY(extents());
    FIRN_TRY(files());
    FIRN_TRY(tensors());
    const std::string_view rest = reader_.rest();
    if (!reader_.ok()) return bad("it ends too early");
    if (rest.size() >= static_cast<size_t>(kPackedAlignment) ||
        rest.find_first_not_of('\0') != std::string_view::npos) {
      return bad(fmt::format("{} bytes follow its last entry", rest.size()));
    }
    FIRN_TRY(sort_tensors());
    return std::move(out_);
  }

 private:
  Status bad(const std::string& what) const { return damaged(path_, "its directory is not valid: " + what); }

  // Extents tile the file from the header to the directory, so none overlaps another and no byte is unaccounted for.
  Status extents() {
    int64_t at = packed::kHeaderBytes;
    int64_t tensors = 0;
    for (uint32_t i = 0; i < n_extents_; ++i) {
      Extent e;
      const auto offset = reader_.take<uint64_t>(), bytes = reader_.take<uint64_t>();
      e.checksum = reader_.take<uint64_t>();
      const auto kind = reader_.take<uint32_t>();
      e.layer = reader_.take<int32_t>();
      e.expert = reader_.take<int32_t>();
      counts_.push_back(reader_.take<uint32_t>());
      tensors += counts_.back();
      if (kind > static_cast<uint32_t>(ExtentKind::kOther)) return bad(fmt::format("extent {} is of kind {}", i, kind));
      e.kind = static_cast<ExtentKind>(kind);
      if (offset != static_cast<uint64_t>(at)) {
        return bad(fmt::format("extent {} starts at {}, expected {}", i, offset, at));
      }
      if (bytes == 0 || bytes % kPackedAlignment != 0 || bytes > static_cast<uint64_t>(data_end_ - at)) {
        return bad(fmt::format("extent {} at {} has {} bytes, expected a multiple of {} up to {}", i, offset, bytes,
                               kPackedAlignment, data_end_ - at));
      }
      const bool has_layer = e.kind == ExtentKind::kExpert || e.kind == ExtentKind::kLayer;
      if (has_layer != (e.layer >= 0) || (e.kind == ExtentKind::kExpert) != (e.expert >= 0) || e.layer < -1 ||
          e.expert < -1 || (e.kind == ExtentKind::kFile && counts_.back() != 0)) {
        return bad(fmt::format("extent {} of kind {} with layer {}, expert {} and {} tensors", i, kind, e.layer,
                               e.expert, counts_.back()));
      }
      e.offset = at;
      e.bytes = static_cast<int64_t>(bytes);
      at += e.bytes;
      out_.extents.push_back(std::move(e));
    }
    if (at != data_end_) return bad(fmt::format("its extents end at {}, expected {}", at, data_end_));
    if (tensors != n_tensors_) {
      return bad(fmt::format("its extents hold {} tensors, expected {}", tensors, n_tensors_));
    }
    return {};
  }

  Status files() {
    for (uint32_t i = 0; i < n_files_; ++i) {
      const auto extent = reader_.take<uint32_t>();
      const auto bytes = reader_.take<uint64_t>();
      std::string name = reader_.text(reader_.take<uint16_t>());
      if (!reader_.ok()) return bad("it ends inside a file's entry");
      if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
          name.find('\0') != std::string::npos) {
        return bad(fmt::format("{} is no name for a file", shown(name)));
      }
      if (extent >= n_extents_ || out_.extents[extent].kind != ExtentKind::kFile) {
        return bad(fmt::format("{} lies in extent {}, which holds no file", shown(name), extent));
      }
      const Extent& e = out_.extents[extent];
      if (bytes > static_cast<uint64_t>(std::min(e.bytes, kMaxEmbeddedFileBytes))) {
        return bad(fmt::format("{} has {} bytes in an extent of {}", shown(name), bytes, e.bytes));
      }
      if (!out_.files.emplace(name, EmbeddedFile{e.offset, static_cast<int64_t>(bytes), static_cast<int32_t>(extent)})
               .second) {
        return bad(fmt::format("{} is there twice", shown(name)));
      }
    }
    return {};
  }

  Status tensors() {
    for (size_t e = 0; e < out_.extents.size(); ++e) {
      Extent& extent = out_.extents[e];
      int64_t at = extent.offset;
      const int64_t end = extent.offset + extent.bytes;
      for (uint32_t i = 0; i < counts_[e]; ++i) {
        FIRN_ASSIGN(TensorInfo t, tensor());
        if (t.file_offset < at || t.file_offset > end || t.bytes > end - t.file_offset ||
            (t.file_offset - extent.offset) % kPackedTensorAlignment != 0) {
          return bad(fmt::format("tensor {} takes {} bytes at {}; expected a multiple of {} from {} to {}",
                                 shown(t.name), t.bytes, t.file_offset, kPackedTensorAlignment, at, end));
        }
        at = t.file_offset + t.bytes;
        extent.tensors.push_back(static_cast<int32_t>(out_.tensors.size()));
        out_.tensors.push_back(std::move(t));
      }
    }
    return {};
  }

  Result<TensorInfo> tensor() {
    TensorInfo t;
    const auto offset = reader_.take<uint64_t>();
    out_.tensor_checksums.push_back(reader_.take<uint64_t>());
    const auto dtype = reader_.take<uint8_t>();
    const auto dims = reader_.take<uint8_t>();
    uint64_t bytes = 0;
    const auto name_bytes = reader_.take<uint16_t>();
    if (dtype > static_cast<uint8_t>(DType::kF8E5m2)) return bad(fmt::format("a tensor is of dtype {}", dtype));
    t.dtype = static_cast<DType>(dtype);
    bytes = dtype_bytes(t.dtype);
    for (uint8_t d = 0; d < dims; ++d) {
      const auto extent = reader_.take<uint64_t>();
      if (extent > INT64_MAX || __builtin_mul_overflow(bytes, extent, &bytes) || bytes > INT64_MAX) {
        return bad("a tensor has more than 2^63 bytes");
      }
      t.shape.push_back(static_cast<int64_t>(extent));
    }
    t.name = reader_.text(name_bytes);
    if (!reader_.ok() || t.name.empty()) return bad("it ends inside a tensor's entry, or one has no name");
    if (offset > INT64_MAX) return bad(fmt::format("tensor {} starts at {}", shown(t.name), offset));
    t.file_offset = static_cast<int64_t>(offset);
    t.bytes = static_cast<int64_t>(bytes);
    return t;
  }

  // The table is in disk order, a Checkpoint's by name.
  Status sort_tensors() {
    std::vector<int32_t> order(out_.tensors.size()), place(order.size());
    std::iota(order.begin(), order.end(), 0);
    const auto name = [&](int32_t i) -> const std::string& { return out_.tensors[static_cast<size_t>(i)].name; };
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return name(a) < name(b); });
    std::vector<TensorInfo> tensors;
    std::vector<uint64_t> checksums;
    tensors.reserve(order.size());
    for (size_t i = 0; i < order.size(); ++i) {
      if (i > 0 && tensors.back().name == name(order[i])) {
        return bad(fmt::format("tensor {} is there twice", shown(name(order[i]))));
      }
      place[static_cast<size_t>(order[i])] = static_cast<int32_t>(i);
      checksums.push_back(out_.tensor_checksums[static_cast<size_t>(order[i])]);
      tensors.push_back(std::move(out_.tensors[static_cast<size_t>(order[i])]));
    }
    out_.tensors = std::move(tensors);
    out_.tensor_checksums = std::move(checksums);
    for (Extent& e : out_.extents) {
      for (int32_t& t : e.tensors) t = place[static_cast<size_t>(t)];
    }
    return {};
  }

  Reader reader_;
  const int64_t data_end_;
  const std::string& path_;
  uint32_t n_extents_ = 0, n_files_ = 0, n_tensors_ = 0;
  std::vector<uint32_t> counts_;
  Checkpoint out_;
};

// What stands in the way of calling it a header, with `real_bytes` the file's length.
Result<Header> parse_header(std::string_view page, int64_t real_bytes, const std::string& path) {
  Reader reader(page);
  const std::string magic = reader.text(packed::kMagic.size());
  const auto version = reader.take<uint32_t>(), header_bytes = reader.take<uint32_t>();
  Header h;
  h.file_bytes = reader.take<uint64_t>();
  h.directory_offset = reader.take<uint64_t>();
  h.directory_bytes = reader.take<uint64_t>();
  h.directory_checksum = reader.take<uint64_t>();
  h.model_hash.low64 = reader.take<uint64_t>();
  h.model_hash.high64 = reader.take<uint64_t>();
  h.identity.low64 = reader.take<uint64_t>();
  h.identity.high64 = reader.take<uint64_t>();
  if (!reader.ok() || page.size() != static_cast<size_t>(packed::kHeaderBytes) || magic != packed::kMagic) {
    return damaged(path, "not the header of a packed model file");
  }
  uint64_t stored = 0;
  std::memcpy(&stored, page.data() + packed::kHeaderChecksumAt, sizeof(stored));
  const uint64_t found = packed::hash64(page.substr(0, static_cast<size_t>(packed::kHeaderChecksumAt)));
  if (version != packed::kVersion) {
    return unsupported(
        fmt::format("{}: packed model file of version {}, this firn reads version {}: make it anew with "
                    "firn pack, or use the firn that made it",
                    path, version, packed::kVersion));
  }
  if (stored != found) {
    return damaged(path, fmt::format("header: expected checksum {:016x}, found {:016x}", stored, found));
  }
  if (h.file_bytes != static_cast<uint64_t>(real_bytes)) {
    return damaged(path, fmt::format("expected {} bytes, found {}", h.file_bytes, real_bytes));
  }
  if (header_bytes != packed::kHeaderBytes || h.directory_offset % kPackedAlignment != 0 ||
      h.directory_offset <= static_cast<uint64_t>(packed::kHeaderBytes) || h.directory_offset >= h.file_bytes ||
      h.directory_bytes != h.file_bytes - h.directory_offset || h.directory_bytes % kPackedAlignment != 0 ||
      h.directory_bytes > static_cast<uint64_t>(packed::kMaxDirectoryBytes)) {
    return damaged(path, fmt::format("its header places {} bytes of directory at {} in a file of {}", h.directory_bytes,
                                     h.directory_offset, h.file_bytes));
  }
  return h;
}

Result<Checkpoint> read_packed(const File& file) {
  const std::string& path = file.path();
  FIRN_ASSIGN(const int64_t bytes, file.size());
  if (bytes < packed::kHeaderBytes) {
    return damaged(path, fmt::format("expected at least {} bytes, found {}", packed::kHeaderBytes, bytes));
  }
  std::string page(static_cast<size_t>(packed::kHeaderBytes), '\0');
  FIRN_TRY(file.read_at(0, std::as_writable_bytes(std::span(page))));
  FIRN_ASSIGN(const Header header, parse_header(page, bytes, path));
  std::string directory(static_cast<size_t>(header.directory_bytes), '\0');
  FIRN_TRY(file.read_at(static_cast<int64_t>(header.directory_offset), std::as_writable_bytes(std::span(directory))));
  if (const uint64_t found = packed::hash64(directory); found != header.directory_checksum) {
    return damaged(path, fmt::format("directory (bytes {} to {}): expected checksum {:016x}, found {:016x}",
                                     header.directory_offset, header.file_bytes, header.directory_checksum, found));
  }
  FIRN_ASSIGN(Checkpoint checkpoint,
              parse_packed_directory(directory, static_cast<int64_t>(header.directory_offset), path));
  checkpoint.shards[0].bytes = bytes;
  checkpoint.model_hash = packed::hex(header.model_hash);
  checkpoint.identity = packed::hex(header.identity);
  return checkpoint;
}

Status mismatch(const Checkpoint& checkpoint, const Extent& extent, uint64_t found) {
  std::string what = extent.what();
  if (extent.kind == ExtentKind::kFile) {
    for (const auto& [name, file] : checkpoint.files) {
      if (file.offset == extent.offset) what = name;
    }
  }
  return damaged(checkpoint.path, fmt::format("{} (bytes {} to {}): expected checksum {:016x}, found {:016x}", what,
                                              extent.offset, extent.offset + extent.bytes, extent.checksum, found));
}

// An aligned read, direct where that is possible.
Status read_piece(const File& file, int64_t offset, std::span<std::byte> out) {
  const int64_t alignment = file.direct_alignment();
  if (alignment <= 0 || alignment > kPackedAlignment) return file.read_at(offset, out);
  size_t done = 0;
  while (done < out.size()) {
    FIRN_ASSIGN(const int64_t n, file.read_some_at(offset + static_cast<int64_t>(done), out.subspan(done)));
    // A part of a block or nothing: the end of the file, or of patience; the buffered way decides.
    if (n <= 0 || n % alignment != 0) {
      return file.read_at(offset + static_cast<int64_t>(done), out.subspan(done));
    }
    done += static_cast<size_t>(n);
  }
  return {};
}

// Readers take extents in order; concurrency as in loader.cc: `next_` and `stop_` are shared, the rest is under mutex_.
class Verifier {
 public:
  Verifier(const Checkpoint& checkpoint, const File& file, std::function<void(int64_t, int64_t)> progress,
           const std::atomic<bool>* cancel)
      : checkpoint_(checkpoint), file_(file), progress_(std::move(progress)), cancel_(cancel) {}

  Status run_one(const Extent& extent) {
    const AlignedBytes buffer = packed::aligned_bytes(kPieceBytes);
    return buffer ? check(extent, buffer.get()) : no_memory("no memory to read with");
  }

  Status run(int n_threads) {
    std::vector<std::thread> threads;
    for (int t = 1; t < n_threads; ++t) {
      threads.emplace_back([this] {
        unpin_this_thread();
        work();
      });
    }
    work();
    for (std::thread& t : threads) t.join();
    return first_;
  }

 private:
  void work() {
    const AlignedBytes buffer = packed::aligned_bytes(kPieceBytes);
    for (size_t i = next_.fetch_add(1); i < checkpoint_.extents.size(); i = next_.fetch_add(1)) {
      if (stop_.load()) return;
      const Status status = buffer ? check(checkpoint_.extents[i], buffer.get()) : no_memory("no memory to read with");
      if (status.ok()) continue;
      stop_ = true;
      const std::lock_guard lock(mutex_);
      if (first_.ok() || i < first_at_) {
        first_ = status;
        first_at_ = i;
      }
      return;
    }
  }

  Status check(const Extent& e, std::byte* buffer) {
    packed::Hasher hash;
    for (int64_t at = 0; at < e.bytes; at += kPieceBytes) {
      if (cancel_ != nullptr && cancel_->load()) return cancelled("checking the packed file was cancelled");
      const auto n = static_cast<size_t>(std::min(kPieceBytes, e.bytes - at));
      FIRN_TRY(read_piece(file_, e.offset + at, {buffer, n}));
      hash.add(buffer, n);
      const std::lock_guard lock(mutex_);
      done_ += static_cast<int64_t>(n);
      if (progress_) progress_(done_, checkpoint_.shards[0].bytes);
    }
    return hash.value() == e.checksum ? Status() : mismatch(checkpoint_, e, hash.value());
  }

  const Checkpoint& checkpoint_;
  const File& file_;
  const std::function<void(int64_t, int64_t)> progress_;
  const std::atomic<bool>* const cancel_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // guards what follows and calls of progress_
  Status first_;
  size_t first_at_ = 0;
  int64_t done_ = 0;
};

// `name` out of an open packed file.
Result<std::string> read_embedded(const File& file, const Checkpoint& checkpoint, const std::string& name,
                                  int64_t max_bytes) {
  const auto it = checkpoint.files.find(name);
  if (it == checkpoint.files.end()) return not_found(fmt::format("{}: holds no {}", checkpoint.path, name));
  const Extent& extent = checkpoint.extents[static_cast<size_t>(it->second.extent)];
  if (it->second.bytes > max_bytes) {
    return invalid(
        fmt::format("{}: {} has {} bytes, expected at most {}", checkpoint.path, name, it->second.bytes, max_bytes));
  }
  // A file's extent is its bytes and less than a page of zeros; more would be a way to fill memory.
  if (extent.bytes - it->second.bytes >= 2 * kPackedAlignment) {
    return damaged(checkpoint.path,
                   fmt::format("{} has {} bytes in an extent of {}", name, it->second.bytes, extent.bytes));
  }
  std::string text(static_cast<size_t>(extent.bytes), '\0');
  FIRN_TRY(file.read_at(extent.offset, std::as_writable_bytes(std::span(text))));
  if (const uint64_t found = packed::hash64(text); found != extent.checksum) return mismatch(checkpoint, extent, found);
  text.resize(static_cast<size_t>(it->second.bytes));
  return text;
}

// First and last 4 KiB of what a shard's tensors take.
Status add_ends(FileSystem& fs, const Checkpoint& checkpoint, packed::Hasher128& hash) {
  struct Range {
    int64_t begin = INT64_MAX, end = 0;
  };
  std::vector<Range> ranges(checkpoint.shards.size());
  for (const TensorInfo& t : checkpoint.tensors) {
    Range& r = ranges[static_cast<size_t>(t.shard)];
    r.begin = std::min(r.begin, t.file_offset);
    r.end = std::max(r.end, t.file_offset + t.bytes);
  }
  std::string bytes;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const auto [begin, end] = ranges[i];
    if (begin >= end) continue;
    FIRN_ASSIGN(const auto file, fs.open(checkpoint.shards[i].path, OpenMode::kRead));
    const int64_t n = std::min(kIdentityBytes, end - begin);
    bytes.resize(static_cast<size_t>(n));
    hash.number(end - begin);
    for (const int64_t at : {begin, end - n}) {
      FIRN_TRY(file->read_at(at, std::as_writable_bytes(std::span(bytes))));
      hash.add(bytes.data(), bytes.size());
    }
  }
  return {};
}

}  // namespace

std::string Extent::what() const {
  switch (kind) {
    case ExtentKind::kFile:
      return "a small file";
    case ExtentKind::kExpert:
      return fmt::format("expert {} of layer {}", expert, layer);
    case ExtentKind::kLayer:
      return fmt::format("layer {}", layer);
    case ExtentKind::kGlobal:
      return "embeddings and output head";
    case ExtentKind::kVision:
      return "vision";
    case ExtentKind::kOther:
      break;
  }
  return "further tensors";
}

Result<bool> is_packed_file(FileSystem& fs, const std::string& path) {
  std::error_code ec;
  if (!stdfs::is_regular_file(path, ec)) return false;
  FIRN_ASSIGN(const auto file, fs.open(path, OpenMode::kRead));
  FIRN_ASSIGN(const int64_t bytes, file->size());
  if (bytes < static_cast<int64_t>(packed::kMagic.size())) return false;
  std::string magic(packed::kMagic.size(), '\0');
  FIRN_TRY(file->read_at(0, std::as_writable_bytes(std::span(magic))));
  return magic == packed::kMagic;
}

Result<Checkpoint> parse_packed_directory(std::string_view directory, int64_t data_end, const std::string& path) {
  return DirectoryParser(directory, data_end, path).run();
}

Result<Checkpoint> open_packed_file(FileSystem& fs, const std::string& path) {
  FIRN_ASSIGN(const auto file, fs.open(path, OpenMode::kRead));
  return read_packed(*file);
}

Result<std::string> read_model_file(FileSystem& fs, const std::string& model_path, const std::string& name,
                                    int64_t max_bytes) {
  std::error_code ec;
  if (!stdfs::is_regular_file(model_path, ec)) return read_text_file(fs, model_path + "/" + name, max_bytes);
  FIRN_ASSIGN(const bool is_packed, is_packed_file(fs, model_path));
  if (!is_packed) {
    const std::string folder = stdfs::path(model_path).parent_path().string();
    return read_text_file(fs, folder.empty() ? name : folder + "/" + name, max_bytes);
  }
  FIRN_ASSIGN(const auto file, fs.open(model_path, OpenMode::kRead));
  FIRN_ASSIGN(const Checkpoint checkpoint, read_packed(*file));
  return read_embedded(*file, checkpoint, name, max_bytes);
}

Result<std::string> model_identity(FileSystem& fs, const Checkpoint& checkpoint) {
  if (checkpoint.packed()) return checkpoint.identity;
  packed::Hasher128 hash;
  hash.text("firn identity 1");
  FIRN_ASSIGN(const std::string config, read_model_file(fs, checkpoint.path, "config.json", kMaxEmbeddedFileBytes));
  hash.text(config);
  for (const TensorInfo& t : checkpoint.tensors) hash.tensor(t.name, t.dtype, t.shape);
  FIRN_TRY(add_ends(fs, checkpoint, hash));
  return packed::hex(hash.value());
}

std::string derived_identity(const std::string& identity, std::string_view change) {
  packed::Hasher128 hash;
  hash.text(identity);
  hash.text(change);
  return packed::hex(hash.value());
}

Status check_extent(const Checkpoint& checkpoint, const Extent& extent,
                    const std::function<const std::byte*(int32_t)>& at) {
  packed::Hasher hash;
  int64_t done = extent.offset;
  for (const int32_t i : extent.tensors) {
    const TensorInfo& t = checkpoint.tensors[static_cast<size_t>(i)];
    hash.zeros(t.file_offset - done);
    hash.add(at(i), static_cast<size_t>(t.bytes));
    done = t.file_offset + t.bytes;
  }
  hash.zeros(extent.offset + extent.bytes - done);
  return hash.value() == extent.checksum ? Status() : mismatch(checkpoint, extent, hash.value());
}

Status verify_extent(FileSystem& fs, const Checkpoint& checkpoint, const Extent& extent) {
  FIRN_ASSIGN(const auto file, fs.open(checkpoint.path, OpenMode::kReadDirect));
  return Verifier(checkpoint, *file, {}, nullptr).run_one(extent);
}

Result<VerifyStats> verify_packed(FileSystem& fs, const std::string& path, int n_threads,
                                  const std::function<void(int64_t, int64_t)>& progress,
                                  const std::atomic<bool>* cancel) {
  const auto start = std::chrono::steady_clock::now();
  FIRN_ASSIGN(const bool is_packed, is_packed_file(fs, path));
  if (!is_packed) {
    return invalid(fmt::format("{}: not a packed model file (one that firn pack made)", path));
  }
  FIRN_ASSIGN(const auto file, fs.open(path, OpenMode::kReadDirect));
  FIRN_ASSIGN(const Checkpoint checkpoint, read_packed(*file));
  FIRN_TRY(Verifier(checkpoint, *file, progress, cancel).run(std::max(n_threads, 1)));
  FIRN_ASSIGN(const std::string config, read_embedded(*file, checkpoint, "config.json", kMaxEmbeddedFileBytes));
  if (const std::string found = packed::hex(packed::content_hash(config, checkpoint)); found != checkpoint.model_hash) {
    return damaged(path, fmt::format("model hash: expected {}, found {}", checkpoint.model_hash, found));
  }
  VerifyStats stats;
  stats.bytes = checkpoint.shards[0].bytes;
  if (progress) progress(stats.bytes, stats.bytes);
  stats.extents = static_cast<int64_t>(checkpoint.extents.size());
  stats.experts = std::count_if(checkpoint.extents.begin(), checkpoint.extents.end(),
                                [](const Extent& e) { return e.kind == ExtentKind::kExpert; });
  stats.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return stats;
}

}  // namespace firn::storage
