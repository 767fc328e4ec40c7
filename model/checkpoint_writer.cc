// Shards are dealt to threads whole; each is filled piece by piece through SafetensorsWriter, so memory stays at a few
// MiB a thread. Lock order: none is held while another is taken.
#include "model/checkpoint_writer.h"
#include "runtime/thread_team.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <span>
#include <thread>
#include <utility>

#include "storage/file.h"
#include "storage/safetensors.h"

namespace firn::model {
namespace {

namespace stdfs = std::filesystem;

constexpr int64_t kPieceBytes = int64_t{4} << 20;
constexpr auto kProgressEvery = std::chrono::milliseconds(200);

struct ShardPlan {
  std::vector<size_t> tensors;  // indices into CheckpointPlan::tensors
  std::string file_name;
};

std::vector<ShardPlan> cut(const CheckpointPlan& plan) {
  std::vector<ShardPlan> shards;
  int64_t used = 0;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const int64_t bytes = plan.tensors[i].bytes();
    if (shards.empty() || (used > 0 && used + bytes > plan.shard_bytes)) {
      shards.push_back({});
      used = 0;
    }
    shards.back().tensors.push_back(i);
    used += bytes;
  }
  for (size_t s = 0; s < shards.size(); ++s) {
    shards[s].file_name = fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, shards.size());
  }
  return shards;
}

int allowed_threads(int asked) {
  if (asked > 0) return asked;
  cpu_set_t set;
  CPU_ZERO(&set);
  const int n = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  return std::clamp(n, 1, 16);
}

// Removes the unfinished folder unless told that it was finished.
class PartialFolder {
 public:
  explicit PartialFolder(stdfs::path path) : path_(std::move(path)) {}
  PartialFolder(const PartialFolder&) = delete;
  PartialFolder& operator=(const PartialFolder&) = delete;
  ~PartialFolder() {
    std::error_code ec;
    if (!finished_) stdfs::remove_all(path_, ec);
  }
  const stdfs::path& path() const { return path_; }
  void finished() { finished_ = true; }

 private:
  const stdfs::path path_;
  bool finished_ = false;
};

class Writer {
 public:
  Writer(const CheckpointPlan& plan, const stdfs::path& folder)
      : plan_(plan), folder_(folder), shards_(cut(plan)), last_report_(std::chrono::steady_clock::now()) {
    for (const PlannedTensor& t : plan_.tensors) total_ += t.bytes();
  }

  Status run() {
    const int n = std::min<int>(allowed_threads(plan_.n_threads), static_cast<int>(shards_.size()));
    std::vector<std::thread> threads;
    for (int t = 1; t < n; ++t)
      threads.emplace_back([this] {
        unpin_this_thread();
        work();
      });
    work();
    for (std::thread& t : threads) t.join();
    if (!status_.ok()) return status_;
    if (plan_.progress) plan_.progress(total_, total_);
    return write_index();
  }

 private:
  void work() {
    for (size_t s = next_.fetch_add(1); s < shards_.size(); s = next_.fetch_add(1)) {
      if (stop_.load()) return;
      const Status status = write_shard(shards_[s]);
      if (status.ok()) continue;
      stop_ = true;
      const std::lock_guard<std::mutex> lock(mutex_);
      if (status_.ok()) status_ = status;
      return;
    }
  }

  Status write_shard(const ShardPlan& shard) {
    std::vector<storage::SafetensorsWriter::Declared> declared;
    for (const size_t i : shard.tensors) {
      declared.push_back({plan_.tensors[i].name, plan_.tensors[i].dtype, plan_.tensors[i].shape});
    }
    FIRN_ASSIGN(auto writer, storage::SafetensorsWriter::create((folder_ / shard.file_name).string(),
                                                                std::move(declared), {{"format", "pt"}}));
    std::vector<uint8_t> piece;
    for (const size_t i : shard.tensors) {
      const PlannedTensor& t = plan_.tensors[i];
      const int64_t rows = t.shape.empty() ? 1 : t.shape[0];
      if (rows == 0 || t.bytes() == 0) continue;
      const int64_t row_bytes = t.bytes() / rows;
      const int64_t step = std::clamp<int64_t>(kPieceBytes / row_bytes, 1, rows);
      piece.resize(static_cast<size_t>(step * row_bytes));
      for (int64_t begin = 0; begin < rows; begin += step) {
        if (stop_.load()) return {};
        if (plan_.cancel != nullptr && plan_.cancel->load()) return cancelled("writing the checkpoint was cancelled");
        const int64_t n = std::min(step, rows - begin);
        FIRN_TRY(t.fill(begin, n, piece.data()));
        FIRN_TRY(writer.append(piece.data(), n * row_bytes));
        report(n * row_bytes);
      }
    }
    return writer.finish();
  }

  void report(int64_t bytes) {
    const int64_t done = done_.fetch_add(bytes) + bytes;
    if (!plan_.progress) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (now - last_report_ < kProgressEvery) return;
    last_report_ = now;
    plan_.progress(done, total_);
  }

  Status write_index() {
    nlohmann::json index;
    index["metadata"] = {{"total_size", total_}};
    nlohmann::json& map = index["weight_map"] = nlohmann::json::object();
    for (const ShardPlan& shard : shards_) {
      for (const size_t i : shard.tensors) map[plan_.tensors[i].name] = shard.file_name;
    }
    const std::string text = index.dump(2) + "\n";
    return storage::write_file_atomically((folder_ / "model.safetensors.index.json").string(),
                                          std::as_bytes(std::span(text)));
  }

  const CheckpointPlan& plan_;
  const stdfs::path folder_;
  const std::vector<ShardPlan> shards_;
  int64_t total_ = 0;
  std::atomic<size_t> next_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // guards status_, last_report_ and the calls of progress
  Status status_;
  std::chrono::steady_clock::time_point last_report_;
};

}  // namespace

int64_t PlannedTensor::bytes() const {
  int64_t bytes = static_cast<int64_t>(dtype_bytes(dtype));
  for (const int64_t d : shape) bytes *= d;
  return bytes;
}

std::vector<std::string> companion_files(const std::string& folder) {
  std::vector<std::string> found;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
                           "preprocessor_config.json", "video_preprocessor_config.json", "special_tokens_map.json",
                           "added_tokens.json", "vocab.json", "merges.txt"}) {
    const stdfs::path path = stdfs::path(folder) / name;
    std::error_code ec;
    if (stdfs::is_regular_file(path, ec)) found.push_back(path.string());
  }
  return found;
}

Status write_checkpoint(const CheckpointPlan& plan) {
  std::error_code ec;
  stdfs::path out = stdfs::path(plan.out).lexically_normal();
  if (!out.has_filename()) out = out.parent_path();
  if (out.empty()) return invalid("the folder to write has no name");
  if (stdfs::exists(stdfs::symlink_status(out, ec))) {
    return invalid(fmt::format("{} exists already; choose another name or remove it", out.string()));
  }
  if (out.has_parent_path() && !stdfs::is_directory(out.parent_path(), ec)) {
    return not_found(
        fmt::format("{}: no such folder to put {} into", out.parent_path().string(), out.filename().string()));
  }
  stdfs::path partial_path = out;
  partial_path += ".partial";
  stdfs::remove_all(partial_path, ec);  // what a crashed run left
  if (!stdfs::create_directory(partial_path, ec)) {
    return io_error(fmt::format("{}: cannot be made: {}", partial_path.string(), ec.message()));
  }
  PartialFolder partial(partial_path);
  int64_t needed = 0;
  for (const PlannedTensor& t : plan.tensors) needed += t.bytes();
  const stdfs::space_info space = stdfs::space(partial_path, ec);
  if (!ec && space.available < static_cast<uintmax_t>(needed)) {
    return io_error(
        fmt::format("{}: the checkpoint needs {} bytes of disk, {} are free", out.string(), needed, space.available));
  }
  FIRN_TRY(Writer(plan, partial.path()).run());
  for (const auto& [name, text] : plan.texts) {
    FIRN_TRY(storage::write_file_atomically((partial.path() / name).string(), std::as_bytes(std::span(text))));
  }
  for (const std::string& source : plan.copies) {
    stdfs::copy_file(source, partial.path() / stdfs::path(source).filename(), ec);
    if (ec) return io_error(fmt::format("{}: cannot be copied: {}", source, ec.message()));
  }
  stdfs::rename(partial.path(), out, ec);
  if (ec)
    return io_error(
        fmt::format("{}: cannot be renamed to {}: {}", partial.path().string(), out.string(), ec.message()));
  partial.finished();
  return {};
}

}  // namespace firn::model
