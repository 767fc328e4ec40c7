// The safetensors header parser and readers of one file. See safetensors.h for the contract.
//
// The header is untrusted: the JSON is taken event by event (no tree, so nesting costs nothing), everything that is not
// exactly the format is refused, and names are shortened before they enter a message.
#include "storage/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "storage/text.h"

namespace firn::storage {
namespace {

constexpr int64_t kMaxHeaderBytes = 100'000'000;
constexpr int64_t kMaxWholeFileBytes = int64_t{4} << 30;
constexpr size_t kMaxRank = 16;

struct RawTensor {
  std::string name;
  std::optional<std::string> dtype;
  std::optional<std::vector<int64_t>> shape;
  std::optional<std::vector<int64_t>> offsets;
};

// Receives the parser's events. Where we are is one enum, because the format has a fixed depth of three.
class HeaderSax : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderSax(const std::string& file, std::map<std::string, std::string>* metadata) : file_(file), metadata_(metadata) {}

  std::vector<RawTensor> tensors;
  Status status;

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_float(double, const std::string& text) override {
    return unexpected(fmt::format("the number {}", shown(text)));
  }
  bool number_integer(int64_t value) override { return unexpected(fmt::format("the negative number {}", value)); }
  bool binary(nlohmann::json::binary_t&) override { return unexpected("binary data"); }

  bool number_unsigned(uint64_t value) override {
    if (at_ != At::kShape && at_ != At::kOffsets) return unexpected(fmt::format("the number {}", value));
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return unexpected(fmt::format("the number {}, which is too large", value));
    }
    auto& list = at_ == At::kShape ? *tensors.back().shape : *tensors.back().offsets;
    const size_t limit = at_ == At::kShape ? kMaxRank : 2;
    if (list.size() == limit) {
      return fail(fmt::format("tensor {}: {} has more than {} numbers", name(), field(), limit));
    }
    list.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(std::string& text) override {
    if (at_ == At::kMetadataValue) {
      if (metadata_ != nullptr && !metadata_->emplace(key_, text).second) {
        return fail(fmt::format("__metadata__ has the key {} twice", shown(key_)));
      }
      at_ = At::kMetadata;
      return true;
    }
    if (at_ != At::kDtype) return unexpected(fmt::format("the text {}", shown(text)));
    tensors.back().dtype = text;
    at_ = At::kTensor;
    return true;
  }

  bool start_object(size_t) override {
    switch (at_) {
      case At::kBefore:
        at_ = At::kRoot;
        return true;
      case At::kTensorValue:
        at_ = At::kTensor;
        return true;
      case At::kMetadataObject:
        at_ = At::kMetadata;
        return true;
      default:
        return unexpected("an object");
    }
  }

  bool end_object() override {
    at_ = at_ == At::kRoot ? At::kAfter : At::kRoot;
    return true;
  }

  bool start_array(size_t) override {
    if (at_ == At::kShapeValue) {
      tensors.back().shape.emplace();
      at_ = At::kShape;
      return true;
    }
    if (at_ == At::kOffsetsValue) {
      tensors.back().offsets.emplace();
      at_ = At::kOffsets;
      return true;
    }
    return unexpected("a list");
  }

  bool end_array() override {
    at_ = At::kTensor;
    return true;
  }

  bool key(std::string& text) override {
    if (at_ == At::kRoot) {
      if (text == "__metadata__") {
        if (std::exchange(metadata_seen_, true)) return fail("__metadata__ is there twice");
        at_ = At::kMetadataObject;
        return true;
      }
      tensors.push_back({text, {}, {}, {}});
      at_ = At::kTensorValue;
      return true;
    }
    if (at_ == At::kMetadata) {
      key_ = text;
      at_ = At::kMetadataValue;
      return true;
    }
    RawTensor& tensor = tensors.back();
    if (text == "dtype" && !tensor.dtype) {
      at_ = At::kDtype;
    } else if (text == "shape" && !tensor.shape) {
      at_ = At::kShapeValue;
    } else if (text == "data_offsets" && !tensor.offsets) {
      at_ = At::kOffsetsValue;
    } else {
      const bool repeated = text == "dtype" || text == "shape" || text == "data_offsets";
      return fail(fmt::format("tensor {}: {} field {} (a tensor has dtype, shape and data_offsets, once each)", name(),
                              repeated ? "repeated" : "unknown", shown(text)));
    }
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    return fail(fmt::format("not valid JSON near byte {} of the header", position));
  }

 private:
  enum class At : uint8_t {
    kBefore,
    kRoot,
    kAfter,
    kMetadataObject,
    kMetadata,
    kMetadataValue,
    kTensorValue,
    kTensor,
    kDtype,
    kShapeValue,
    kShape,
    kOffsetsValue,
    kOffsets,
  };

  std::string name() const { return tensors.empty() ? std::string("?") : shown(tensors.back().name); }
  const char* field() const { return at_ == At::kShape || at_ == At::kShapeValue ? "shape" : "data_offsets"; }

  std::string expected() const {
    switch (at_) {
      case At::kBefore:
        return "expected an object {...}";
      case At::kMetadataObject:
        return "__metadata__: expected an object";
      case At::kMetadataValue:
        return fmt::format("__metadata__ key {}: expected a text", shown(key_));
      case At::kTensorValue:
        return fmt::format("tensor {}: expected an object", name());
      case At::kDtype:
        return fmt::format("tensor {}: dtype: expected a text", name());
      case At::kShapeValue:
      case At::kOffsetsValue:
        return fmt::format("tensor {}: {}: expected a list of numbers", name(), field());
      default:
        return fmt::format("tensor {}: {}: expected a whole number from 0 to 2^63 - 1", name(), field());
    }
  }

  bool unexpected(const std::string& found) { return fail(fmt::format("{}, found {}", expected(), found)); }

  bool fail(const std::string& message) {
    status = corrupt(fmt::format("{}: safetensors header: {}", file_, message));
    return false;
  }

  const std::string& file_;
  std::map<std::string, std::string>* metadata_;
  At at_ = At::kBefore;
  std::string key_;
  bool metadata_seen_ = false;
};

// dims multiplied up; nullopt when the product leaves int64.
std::optional<int64_t> product(const std::vector<int64_t>& shape, int64_t factor) {
  int64_t total = factor;
  for (const int64_t dim : shape) {
    if (__builtin_mul_overflow(total, dim, &total)) return std::nullopt;
  }
  return total;
}

Result<TensorInfo> checked_tensor(RawTensor&& raw, const std::string& file) {
  const auto fail = [&](const std::string& what) {
    return corrupt(fmt::format("{}: tensor {}: {}", file, shown(raw.name), what));
  };
  if (!raw.dtype) return fail("the header gives no dtype");
  if (!raw.shape) return fail("the header gives no shape");
  if (!raw.offsets || raw.offsets->size() != 2) return fail("the header gives no data_offsets [begin, end]");
  const std::optional<DType> dtype = dtype_from_name(*raw.dtype);
  if (!dtype) {
    return unsupported(
        fmt::format("{}: tensor {}: unknown dtype {}: this version reads F64, F32, F16, BF16, F8_E4M3, "
                    "F8_E5M2, F8_E8M0, I64, I32, I16, I8, U8 and BOOL",
                    file, shown(raw.name), shown(*raw.dtype)));
  }
  const int64_t begin = (*raw.offsets)[0];
  const int64_t end = (*raw.offsets)[1];
  if (begin > end) return fail(fmt::format("data_offsets [{}, {}] run backwards", begin, end));
  TensorInfo tensor;
  tensor.dtype = *dtype;
  tensor.shape = std::move(*raw.shape);
  tensor.file_offset = begin;
  tensor.bytes = end - begin;
  const std::optional<int64_t> bytes = product(tensor.shape, static_cast<int64_t>(dtype_bytes(*dtype)));
  if (!bytes) return fail(fmt::format("shape {} has more than 2^63 bytes", tensor.shape_text()));
  if (*bytes != tensor.bytes) {
    return fail(fmt::format("{} {} takes {} bytes, but data_offsets [{}, {}] give it {}", *raw.dtype,
                            tensor.shape_text(), *bytes, begin, end, tensor.bytes));
  }
  tensor.name = std::move(raw.name);
  return tensor;
}

// The tensors must tile the data exactly.
Status check_layout(const std::vector<TensorInfo>& tensors, int64_t header_bytes, int64_t data_bytes,
                    const std::string& file) {
  std::vector<const TensorInfo*> order;
  order.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return std::pair(a->file_offset, a->bytes) < std::pair(b->file_offset, b->bytes);
  });
  int64_t declared = 0;
  for (const TensorInfo* tensor : order) declared = std::max(declared, tensor->file_offset + tensor->bytes);
  int64_t position = 0;
  const TensorInfo* previous = nullptr;
  for (const TensorInfo* tensor : order) {
    const int64_t end = tensor->file_offset + tensor->bytes;
    if (end > data_bytes) {
      return corrupt(fmt::format(
          "{}: tensor {} ends at byte {} of the data, but only {} are there: expected a file of {} bytes, found {}; it "
          "is truncated, fetch it again",
          file, shown(tensor->name), end, data_bytes,
          static_cast<uint64_t>(declared) + static_cast<uint64_t>(header_bytes) + 8, header_bytes + data_bytes + 8));
    }
    if (tensor->file_offset < position) {
      return corrupt(fmt::format("{}: tensor {} begins at byte {} of the data, inside tensor {}, which ends at {}",
                                 file, shown(tensor->name), tensor->file_offset, previous ? shown(previous->name) : "?",
                                 position));
    }
    if (tensor->file_offset > position) {
      return corrupt(fmt::format("{}: bytes {} to {} of the data, before tensor {}, belong to no tensor", file,
                                 position, tensor->file_offset, shown(tensor->name)));
    }
    position = end;
    previous = tensor;
  }
  if (position != data_bytes) {
    return corrupt(
        fmt::format("{}: the tensors end at byte {} of the data, but {} bytes are there: expected a file of "
                    "{} bytes, found {}",
                    file, position, data_bytes, header_bytes + position + 8, header_bytes + data_bytes + 8));
  }
  return {};
}

Status check_unique(const std::vector<TensorInfo>& tensors, const std::string& file) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return {};
  return corrupt(fmt::format("{}: tensor {} is there twice", file, shown(*twice)));
}

uint64_t little_endian(const std::array<unsigned char, 8>& bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes.size(); ++i) value |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  return value;
}

// N of a file whose first bytes are `first`, checked against its real size.
Result<int64_t> header_length(const std::array<unsigned char, 8>& first, int64_t file_bytes, const std::string& path) {
  const uint64_t n = little_endian(first);
  if (std::string_view(reinterpret_cast<const char*>(first.data()), 8) == "version ") {
    return corrupt(
        fmt::format("{}: not a safetensors file but a Git LFS pointer of {} bytes: fetch the real file (git "
                    "lfs pull)",
                    path, file_bytes));
  }
  if (n > static_cast<uint64_t>(file_bytes - 8)) {
    return corrupt(
        fmt::format("{}: its header should have {} bytes, but only {} follow the length: it is truncated or "
                    "no safetensors file",
                    path, n, file_bytes - 8));
  }
  if (n > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return corrupt(fmt::format("{}: a header of {} bytes, expected at most {}: no safetensors file is like that", path,
                               n, kMaxHeaderBytes));
  }
  return static_cast<int64_t>(n);
}

Status too_short(const std::string& path, int64_t bytes) {
  return corrupt(fmt::format("{}: expected a safetensors file of at least 8 bytes, found {}", path, bytes));
}

}  // namespace

int64_t TensorInfo::elements() const {
  int64_t total = 1;
  for (const int64_t dim : shape) total *= dim;
  return total;
}

std::string TensorInfo::shape_text() const { return fmt::format("[{}]", fmt::join(shape, ", ")); }

Result<std::vector<TensorInfo>> parse_safetensors_header(std::string_view json, int64_t data_bytes,
                                                         const std::string& file_name,
                                                         std::map<std::string, std::string>* metadata) {
  if (json.empty() || json.front() != '{') {
    return corrupt(fmt::format("{}: a safetensors header begins with {{, found {}", file_name,
                               json.empty() ? "nothing" : shown(json.substr(0, 1))));
  }
  // The JSON library takes a zero byte for the end of the text and would not look at what follows.
  if (const size_t zero = json.find('\0'); zero != std::string_view::npos) {
    return corrupt(fmt::format("{}: safetensors header: not valid JSON near byte {} of the header", file_name, zero));
  }
  HeaderSax sax(file_name, metadata);
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &sax)) {
    if (!sax.status.ok()) return sax.status;
    return corrupt(fmt::format("{}: the safetensors header is not valid JSON", file_name));
  }
  std::vector<TensorInfo> tensors;
  tensors.reserve(sax.tensors.size());
  for (RawTensor& raw : sax.tensors) {
    FIRN_ASSIGN(TensorInfo tensor, checked_tensor(std::move(raw), file_name));
    tensors.push_back(std::move(tensor));
  }
  FIRN_TRY(check_unique(tensors, file_name));
  FIRN_TRY(check_layout(tensors, static_cast<int64_t>(json.size()), data_bytes, file_name));
  return tensors;
}

Result<std::vector<TensorInfo>> read_safetensors_header(const File& file) {
  FIRN_ASSIGN(const int64_t file_bytes, file.size());
  if (file_bytes < 8) return too_short(file.path(), file_bytes);
  std::array<unsigned char, 8> first{};
  FIRN_TRY(file.read_at(0, std::as_writable_bytes(std::span(first))));
  FIRN_ASSIGN(const int64_t n, header_length(first, file_bytes, file.path()));
  std::string json(static_cast<size_t>(n), '\0');
  FIRN_TRY(file.read_at(8, std::as_writable_bytes(std::span(json))));
  FIRN_ASSIGN(auto tensors, parse_safetensors_header(json, file_bytes - 8 - n, file.path()));
  for (TensorInfo& tensor : tensors) tensor.file_offset += 8 + n;
  return tensors;
}

Result<SafetensorsFile> SafetensorsFile::read(const std::string& path) {
  SafetensorsFile file;
  FIRN_ASSIGN(file.bytes_, read_text_file(FileSystem::real(), path, kMaxWholeFileBytes));
  const auto file_bytes = static_cast<int64_t>(file.bytes_.size());
  if (file_bytes < 8) return too_short(path, file_bytes);
  std::array<unsigned char, 8> first{};
  std::copy_n(file.bytes_.begin(), 8, first.begin());
  FIRN_ASSIGN(const int64_t n, header_length(first, file_bytes, path));
  const std::string_view json = std::string_view(file.bytes_).substr(8, static_cast<size_t>(n));
  FIRN_ASSIGN(file.tensors_, parse_safetensors_header(json, file_bytes - 8 - n, path, &file.metadata_));
  for (TensorInfo& tensor : file.tensors_) tensor.file_offset += 8 + n;
  std::sort(file.tensors_.begin(), file.tensors_.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  return file;
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const { return find_by_name(tensors_, name); }

const std::byte* SafetensorsFile::data(std::string_view name) const {
  const TensorInfo* tensor = find(name);
  FIRN_CHECK(tensor != nullptr, fmt::format("no tensor {} in this file", shown(name)));
  return reinterpret_cast<const std::byte*>(bytes_.data()) + tensor->file_offset;
}

}  // namespace firn::storage
