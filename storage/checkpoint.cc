// Checkpoint::open: finding the shards of a checkpoint and joining their headers. See safetensors.h for the contract.
//
// Everything is done on sorted lists, so 45,838 tensors over 31 shards cost a few sorts and no more.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "storage/packed_file.h"
#include "storage/safetensors.h"
#include "storage/text.h"

namespace firn::storage {
namespace {

namespace stdfs = std::filesystem;

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
constexpr int64_t kMaxIndexBytes = 256'000'000;

struct Placement {
  std::string tensor;
  std::string shard;
};

// Takes "weight_map" out of an index and skips everything else, whatever its shape.
class IndexSax : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit IndexSax(const std::string& file) : file_(file) {}

  std::vector<Placement> placements;
  bool map_seen = false;
  Status status;

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("a boolean"); }
  bool number_integer(int64_t) override { return value("a number"); }
  bool number_unsigned(uint64_t) override { return value("a number"); }
  bool number_float(double, const std::string&) override { return value("a number"); }
  bool binary(nlohmann::json::binary_t&) override { return value("binary data"); }

  bool string(std::string& text) override {
    if (!in_map_ || depth_ != 2) return value("a text");
    placements.back().shard = text;
    return true;
  }
  bool start_object(size_t) override {
    if (depth_ == 1 && map_next_) {
      map_next_ = false;
      in_map_ = true;
    } else if (!value("an object")) {
      return false;
    }
    ++depth_;
    return true;
  }
  bool start_array(size_t) override {
    if (!value("a list")) return false;
    ++depth_;
    return true;
  }
  bool end_object() override {
    if (--depth_ == 1) in_map_ = false;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(std::string& text) override {
    if (depth_ == 1 && text == "weight_map") {
      if (std::exchange(map_seen, true)) return fail("weight_map is there twice");
      map_next_ = true;
    } else if (in_map_ && depth_ == 2) {
      placements.push_back({text, {}});
    }
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    return fail(fmt::format("not valid JSON near byte {}", position));
  }

 private:
  bool value(const char* found) {
    if (map_next_) return fail(fmt::format("weight_map: expected an object, found {}", found));
    if (in_map_ && depth_ == 2) {
      return fail(
          fmt::format("weight_map: {}: expected the name of a file, found {}", shown(placements.back().tensor), found));
    }
    if (depth_ == 0 && std::string_view(found) != "an object") return fail("expected an object");
    return true;
  }
  bool fail(const std::string& message) {
    status = corrupt(fmt::format("{}: {}", file_, message));
    return false;
  }

  const std::string& file_;
  int64_t depth_ = 0;
  bool map_next_ = false;
  bool in_map_ = false;
};

Result<std::vector<Placement>> parse_index(std::string_view json, const std::string& file) {
  // The JSON library takes a zero byte for the end of the text and would not look at what follows.
  if (const size_t zero = json.find('\0'); zero != std::string_view::npos) {
    return corrupt(fmt::format("{}: not valid JSON near byte {}", file, zero));
  }
  IndexSax sax(file);
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &sax)) {
    return sax.status.ok() ? corrupt(fmt::format("{}: not valid JSON", file)) : sax.status;
  }
  if (!sax.map_seen) return corrupt(fmt::format("{}: has no weight_map", file));
  if (sax.placements.empty()) return corrupt(fmt::format("{}: its weight_map names no tensors", file));
  std::sort(sax.placements.begin(), sax.placements.end(),
            [](const Placement& a, const Placement& b) { return a.tensor < b.tensor; });
  const auto twice = std::adjacent_find(sax.placements.begin(), sax.placements.end(),
                                        [](const Placement& a, const Placement& b) { return a.tensor == b.tensor; });
  if (twice != sax.placements.end()) {
    return corrupt(fmt::format("{}: weight_map names {} twice", file, shown(twice->tensor)));
  }
  return std::move(sax.placements);
}

// A shard must lie in the checkpoint's folder: an index is data from elsewhere and may not reach other files.
bool stays_inside(const std::string& name) {
  if (name.empty() || name.front() == '/' || name.find('\0') != std::string::npos) return false;
  for (const stdfs::path& part : stdfs::path(name)) {
    if (part == "..") return false;
  }
  return true;
}

bool by_name_then_shard(const TensorInfo& a, const TensorInfo& b) {
  const int order = a.name.compare(b.name);
  return order != 0 ? order < 0 : a.shard < b.shard;
}

Result<std::vector<TensorInfo>> read_shards(FileSystem& fs, std::vector<Shard>& shards) {
  std::vector<TensorInfo> all;
  for (size_t i = 0; i < shards.size(); ++i) {
    FIRN_ASSIGN(const auto file, fs.open(shards[i].path, OpenMode::kRead));
    FIRN_ASSIGN(shards[i].bytes, file->size());
    FIRN_ASSIGN(auto tensors, read_safetensors_header(*file));
    for (TensorInfo& tensor : tensors) {
      tensor.shard = static_cast<int32_t>(i);
      all.push_back(std::move(tensor));
    }
  }
  std::sort(all.begin(), all.end(), by_name_then_shard);
  return all;
}

Status in_two_shards(const std::vector<Shard>& shards, const TensorInfo& a, const TensorInfo& b) {
  return corrupt(fmt::format("tensor {} is both in {} and in {}, and no index decides between them", shown(a.name),
                             shards[static_cast<size_t>(a.shard)].path, shards[static_cast<size_t>(b.shard)].path));
}

Result<Checkpoint> open_shards(FileSystem& fs, const std::string& path, std::vector<std::string> files) {
  Checkpoint checkpoint;
  checkpoint.path = path;
  for (std::string& file : files) checkpoint.shards.push_back({std::move(file), 0});
  FIRN_ASSIGN(checkpoint.tensors, read_shards(fs, checkpoint.shards));
  const auto& tensors = checkpoint.tensors;
  for (size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i].name == tensors[i - 1].name) return in_two_shards(checkpoint.shards, tensors[i - 1], tensors[i]);
  }
  return checkpoint;
}

// The error for a tensor that is not where the index places it.
Status misplaced(const std::string& index, const Placement& wanted, const std::vector<Shard>& shards,
                 const TensorInfo* found_elsewhere) {
  const std::string where =
      found_elsewhere == nullptr
          ? std::string("no shard has it")
          : fmt::format("found in {}", shown(shards[static_cast<size_t>(found_elsewhere->shard)].path));
  return corrupt(
      fmt::format("{}: tensor {} should be in {} and is not: {}; index and shards are not of the same release", index,
                  shown(wanted.tensor), shown(wanted.shard), where));
}

Result<Checkpoint> open_index(FileSystem& fs, const std::string& path, const std::string& folder,
                              const std::string& index) {
  FIRN_ASSIGN(const std::string json, read_text_file(fs, index, kMaxIndexBytes));
  FIRN_ASSIGN(const auto placements, parse_index(json, index));

  std::map<std::string, int64_t> counts;  // by shard name
  for (const Placement& placement : placements) ++counts[placement.shard];
  Checkpoint checkpoint;
  checkpoint.path = path;
  std::map<std::string, int32_t> numbers;
  std::string missing;
  int64_t n_missing = 0;
  for (const auto& [name, count] : counts) {
    if (!stays_inside(name)) {
      return corrupt(
          fmt::format("{}: weight_map names the file {}, expected a file inside {}", index, shown(name), folder));
    }
    const std::string file = folder + "/" + name;
    std::error_code ignored;
    if (!stdfs::exists(file, ignored)) {
      if (n_missing++ < 3) missing += fmt::format("{}{} ({} tensors)", missing.empty() ? "" : ", ", shown(file), count);
      continue;
    }
    numbers[name] = static_cast<int32_t>(checkpoint.shards.size());
    checkpoint.shards.push_back({file, 0});
  }
  if (n_missing > 0) {
    return not_found(fmt::format("{}: {} of the {} shards it names are missing: {}{}: finish the download", index,
                                 n_missing, counts.size(), missing, n_missing > 3 ? ", ..." : ""));
  }

  FIRN_ASSIGN(auto all, read_shards(fs, checkpoint.shards));
  auto placement = placements.begin();
  for (auto first = all.begin(); first != all.end() || placement != placements.end();) {
    if (first == all.end() || (placement != placements.end() && placement->tensor < first->name)) {
      return misplaced(index, *placement, checkpoint.shards, nullptr);
    }
    const auto last = std::find_if(first, all.end(), [&](const TensorInfo& t) { return t.name != first->name; });
    auto chosen = first;
    if (placement != placements.end() && placement->tensor == first->name) {
      const int32_t shard = numbers.at(placement->shard);
      chosen = std::find_if(first, last, [&](const TensorInfo& t) { return t.shard == shard; });
      if (chosen == last) return misplaced(index, *placement, checkpoint.shards, &*first);
      ++placement;
    } else if (last - first > 1) {
      return in_two_shards(checkpoint.shards, *first, *(first + 1));
    }
    checkpoint.tensors.push_back(std::move(*chosen));
    first = last;
  }
  return checkpoint;
}

// (3, 31) from "model-00003-of-00031.safetensors".
std::optional<std::pair<int64_t, int64_t>> part_of(const std::string& name) {
  const size_t of = name.rfind("-of-");
  const size_t dot = name.rfind(".safetensors");
  if (of == std::string::npos || dot == std::string::npos || of == 0) return std::nullopt;
  const size_t dash = name.rfind('-', of - 1);
  if (dash == std::string::npos) return std::nullopt;
  const auto number = [&](size_t begin, size_t end) -> std::optional<int64_t> {
    int64_t value = 0;
    const auto [stop, error] = std::from_chars(name.data() + begin, name.data() + end, value);
    if (error != std::errc() || stop != name.data() + end) return std::nullopt;
    return value;
  };
  const auto part = number(dash + 1, of);
  const auto count = number(of + 4, dot);
  if (!part || !count) return std::nullopt;
  return std::pair(*part, *count);
}

// Without an index nothing but the names can tell that a shard is missing.
Status check_parts(const std::string& folder, const std::vector<std::string>& names) {
  std::map<int64_t, int64_t> found;  // count in the name -> files with that count
  for (const std::string& name : names) {
    if (const auto part = part_of(name)) ++found[part->second];
  }
  for (const auto& [count, files] : found) {
    if (files < count) {
      return not_found(
          fmt::format("{}: has {} of {} shards and no {}: finish the download", folder, files, count, kIndexName));
    }
  }
  return {};
}

Result<Checkpoint> open_folder(FileSystem& fs, const std::string& folder) {
  const std::string index = folder + "/" + kIndexName;
  std::error_code error;
  if (stdfs::exists(index, error)) return open_index(fs, folder, folder, index);
  std::vector<std::string> names;
  bool gguf = false;
  auto entry = stdfs::directory_iterator(folder, error);
  for (; !error && entry != stdfs::directory_iterator(); entry.increment(error)) {
    const stdfs::path name = entry->path().filename();
    if (name.extension() == ".safetensors" && name.native().front() != '.') names.push_back(name.string());
    gguf = gguf || name.extension() == ".gguf";
  }
  if (error) return io_error(fmt::format("{}: cannot list the folder: {}", folder, error.message()));
  if (names.empty()) {
    return not_found(fmt::format("{}: expected {} or *.safetensors in this folder, found {}", folder, kIndexName,
                                 gguf ? "only GGUF files, which this version does not read" : "neither"));
  }
  std::sort(names.begin(), names.end());
  FIRN_TRY(check_parts(folder, names));
  for (std::string& name : names) name = folder + "/" + name;
  return open_shards(fs, folder, std::move(names));
}

}  // namespace

const TensorInfo* Checkpoint::find(std::string_view name) const { return find_by_name(tensors, name); }

Result<Checkpoint> Checkpoint::open(FileSystem& fs, const std::string& path) {
  std::error_code error;
  std::string trimmed = path;
  while (trimmed.size() > 1 && trimmed.back() == '/') trimmed.pop_back();
  const stdfs::file_status status = stdfs::status(trimmed, error);
  if (status.type() == stdfs::file_type::not_found) {
    return not_found(fmt::format("{}: no such file or folder", path));
  }
  if (stdfs::is_directory(status)) return open_folder(fs, trimmed);
  if (std::string_view(trimmed).ends_with(kIndexSuffix)) {
    const std::string folder = stdfs::path(trimmed).parent_path().string();
    return open_index(fs, path, folder.empty() ? "." : folder, trimmed);
  }
  FIRN_ASSIGN(const bool packed, is_packed_file(fs, trimmed));
  if (packed) return open_packed_file(fs, trimmed);
  return open_shards(fs, path, {trimmed});
}

}  // namespace firn::storage
