// SafetensorsWriter: a temporary file beside the target, filled in order, renamed when complete.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "storage/file.h"
#include "storage/safetensors.h"
#include "storage/text.h"

namespace firn::storage {
namespace {

constexpr size_t kDataAlignment = 8;  // the data begins at a multiple of this: the header is padded with spaces

Result<std::string> quoted(const std::string& text, const std::string& path) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    return invalid(fmt::format("{}: {} is not valid UTF-8 and cannot be written in a header", path, shown(text)));
  }
}

Result<int64_t> declared_bytes(const SafetensorsWriter::Declared& tensor, const std::string& path) {
  auto bytes = static_cast<int64_t>(dtype_bytes(tensor.dtype));
  for (const int64_t dim : tensor.shape) {
    if (dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes)) {
      return invalid(fmt::format("{}: tensor {}: shape [{}] is negative or too large", path, shown(tensor.name),
                                 fmt::join(tensor.shape, ", ")));
    }
  }
  return bytes;
}

struct Header {
  std::string bytes;  // length, JSON and padding
  int64_t data_bytes = 0;
};

Result<Header> make_header(const std::string& path, const std::vector<SafetensorsWriter::Declared>& tensors,
                           const std::map<std::string, std::string>& metadata) {
  std::vector<std::string_view> names{"__metadata__"};
  for (const auto& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end()) {
    return invalid(fmt::format("{}: tensor name {} is used twice or reserved", path, shown(*twice)));
  }
  Header header;
  std::string json = "{";
  const auto separate = [&] {
    if (json.back() != '{') json += ',';
  };
  if (!metadata.empty()) {
    json += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      separate();
      FIRN_ASSIGN(const std::string quoted_key, quoted(key, path));
      FIRN_ASSIGN(const std::string quoted_value, quoted(value, path));
      json += quoted_key + ":" + quoted_value;
    }
    json += '}';
  }
  for (const auto& tensor : tensors) {
    separate();
    FIRN_ASSIGN(const int64_t bytes, declared_bytes(tensor, path));
    FIRN_ASSIGN(const std::string name, quoted(tensor.name, path));
    int64_t end = 0;
    if (__builtin_add_overflow(header.data_bytes, bytes, &end)) {
      return invalid(fmt::format("{}: the tensors together have more than 2^63 bytes", path));
    }
    json += fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", name, dtype_name(tensor.dtype),
                        fmt::join(tensor.shape, ","), header.data_bytes, end);
    header.data_bytes = end;
  }
  json += '}';
  json.append((kDataAlignment - json.size() % kDataAlignment) % kDataAlignment, ' ');
  for (size_t i = 0; i < 8; ++i) header.bytes += static_cast<char>((json.size() >> (8 * i)) & 0xFF);
  header.bytes += json;
  return header;
}

}  // namespace

struct SafetensorsWriter::State {
  std::string path;
  std::string temporary;
  std::unique_ptr<File> file;
  int64_t data_begin = 0;
  int64_t data_bytes = 0;
  int64_t written = 0;
  bool sparse = false;

  ~State() {
    if (!file) return;
    file.reset();
    remove_quietly(temporary);
  }
};

SafetensorsWriter::SafetensorsWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

Result<SafetensorsWriter> SafetensorsWriter::create(const std::string& path, std::vector<Declared> tensors,
                                                    const std::map<std::string, std::string>& metadata, bool sparse,
                                                    FileSystem& fs) {
  FIRN_ASSIGN(const Header header, make_header(path, tensors, metadata));
  auto state = std::make_unique<State>();
  state->path = path;
  state->temporary = temporary_name(path);
  state->data_begin = static_cast<int64_t>(header.bytes.size());
  state->data_bytes = header.data_bytes;
  state->sparse = sparse;
  FIRN_ASSIGN(state->file, fs.open(state->temporary, OpenMode::kCreate));
  FIRN_TRY(state->file->write_at(0, std::as_bytes(std::span(header.bytes))));
  if (sparse) {
    int64_t total = 0;
    if (__builtin_add_overflow(state->data_begin, state->data_bytes, &total)) {
      return invalid(fmt::format("{}: the file would have more than 2^63 bytes", path));
    }
    FIRN_TRY(state->file->resize(total));
  }
  return SafetensorsWriter(std::move(state));
}

Status SafetensorsWriter::append(const void* data, int64_t bytes) {
  if (!state_ || !state_->file) return invalid("append to a safetensors file that is already finished");
  if (bytes < 0 || bytes > state_->data_bytes - state_->written) {
    return invalid(fmt::format("{}: {} bytes are too many: the declared tensors take {} and {} are written",
                               state_->path, bytes, state_->data_bytes, state_->written));
  }
  FIRN_TRY(state_->file->write_at(state_->data_begin + state_->written,
                                  {static_cast<const std::byte*>(data), static_cast<size_t>(bytes)}));
  state_->written += bytes;
  return {};
}

Status SafetensorsWriter::finish() {
  if (!state_ || !state_->file) return invalid("a safetensors file is finished twice");
  const int64_t missing = state_->data_bytes - state_->written;
  if (missing != 0 && !state_->sparse) {
    return invalid(fmt::format("{}: {} bytes are missing: the declared tensors take {} and {} are written",
                               state_->path, missing, state_->data_bytes, state_->written));
  }
  FIRN_TRY(state_->file->sync());
  state_->file.reset();
  return commit_temporary(state_->temporary, state_->path);
}

}  // namespace firn::storage
