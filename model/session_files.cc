#include "model/session_files.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>

namespace firn::model {
namespace {

constexpr int64_t kPool = int64_t{1} << 24;  // random numbers that blocks are cut from
constexpr int64_t kAppendBytes = int64_t{64} << 20;
constexpr float kHotScale = 8.0f;

// Bytes of `dtype` numbers with a normal distribution; blocks are stretches of it from random places.
class RandomBlocks {
 public:
  RandomBlocks(DType dtype, uint64_t seed) : width_(static_cast<int64_t>(dtype_bytes(dtype))), random_(seed) {
    pool_.resize(static_cast<size_t>(kPool * width_));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < kPool; ++i) {
      const float v = normal(random_);
      if (dtype == DType::kF32) {
        std::memcpy(pool_.data() + i * 4, &v, 4);
      } else {
        const Bf16 b = to_bf16(v);
        std::memcpy(pool_.data() + i * 2, &b.bits, 2);
      }
    }
  }
  void fill(std::byte* to, int64_t values) {
    for (int64_t at = 0; at < values;) {
      const int64_t n = std::min<int64_t>(values - at, 1 << 14);
      const auto from = static_cast<int64_t>(random_() % static_cast<uint64_t>(kPool - n));
      std::memcpy(to + at * width_, pool_.data() + from * width_, static_cast<size_t>(n * width_));
      at += n;
    }
  }
  uint64_t next() { return random_(); }

 private:
  const int64_t width_;
  std::mt19937_64 random_;
  std::vector<std::byte> pool_;
};

void scale(std::byte* data, DType dtype, int64_t values, float factor) {
  for (int64_t i = 0; i < values; ++i) {
    if (dtype == DType::kF32) {
      float v;
      std::memcpy(&v, data + i * 4, 4);
      v *= factor;
      std::memcpy(data + i * 4, &v, 4);
    } else {
      Bf16 b;
      std::memcpy(&b.bits, data + i * 2, 2);
      b = to_bf16(to_float(b) * factor);
      std::memcpy(data + i * 2, &b.bits, 2);
    }
  }
}

}  // namespace

Result<std::string> session_identity(storage::FileSystem& fs, const Survey& survey, DType kv_dtype, bool precise) {
  XXH3_state_t* state = XXH3_createState();
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> owner(state, XXH3_freeState);
  XXH3_64bits_reset(state);
  const auto add = [&](const std::string& text) { XXH3_64bits_update(state, text.data(), text.size()); };
  std::vector<std::unique_ptr<storage::File>> files(survey.checkpoint.shards.size());
  int64_t n = 0;
  for (const storage::TensorInfo& t : survey.checkpoint.tensors) {
    add(fmt::format("{} {} {}\n", t.name, dtype_name(t.dtype), t.shape_text()));
    // Content of every 64th tensor: its first bytes.
    if (n++ % 64 != 0 || t.bytes == 0) continue;
    auto& file = files[static_cast<size_t>(t.shard)];
    if (file == nullptr) {
      FIRN_ASSIGN(file, fs.open(survey.checkpoint.shards[static_cast<size_t>(t.shard)].path, storage::OpenMode::kRead));
    }
    std::string head(static_cast<size_t>(std::min<int64_t>(t.bytes, 256)), '\0');
    FIRN_TRY(file->read_at(t.file_offset, std::as_writable_bytes(std::span(head))));
    add(head);
  }
  const ModelConfig& c = survey.config;
  const KvLayout layout = c.kv_layout(precise ? DType::kF32 : kv_dtype);
  return fmt::format("model {:016x}, {} layers, K and V and index keys {}, blocks of {} tokens, {}",
                     XXH3_64bits_digest(state), c.layers, dtype_name(layout.dtype), layout.block_tokens,
                     precise ? "precise" : "default numerics");
}

std::vector<storage::LogEntry> token_entries(uint16_t which, std::span<const int32_t> ids, int64_t from) {
  std::vector<storage::LogEntry> entries;
  const auto n = static_cast<int64_t>(ids.size());
  for (int64_t at = from / kTokensAtOnce * kTokensAtOnce; at < n; at += kTokensAtOnce) {
    const auto part = ids.subspan(static_cast<size_t>(at), static_cast<size_t>(std::min(kTokensAtOnce, n - at)));
    entries.push_back(
        {{storage::BlockKind::kTokens, which, 0, static_cast<uint32_t>(at / kTokensAtOnce)}, std::as_bytes(part)});
  }
  return entries;
}

nlohmann::json session_state(int64_t tokens, int64_t wave_option, const std::string& kernels) {
  return {{"version", 1}, {"tokens", tokens}, {"wave_option", wave_option}, {"kernels", kernels}};
}

SessionInfo session_info(const storage::KvLog& log) {
  SessionInfo info;
  info.identity = log.identity();
  info.stats = log.stats();
  info.dirs = log.dirs();
  info.steps_to_replay = static_cast<int64_t>(log.notes().size());
  const auto state = nlohmann::json::parse(log.state(), nullptr, false);
  if (!state.is_object()) return info;
  info.tokens = state.value("tokens", int64_t{0});
  if (state.contains("prefill") && state["prefill"].is_object()) {
    info.interrupted_tokens = state["prefill"].value("pending", int64_t{0});
    info.interrupted_layers = state["prefill"].value("layers", int64_t{0});
  }
  return info;
}

Status synth_session(storage::FileSystem& fs, const Survey& survey, const std::string& dir, const SynthSession& options,
                     const std::function<void(int64_t, int64_t)>& progress, const std::atomic<bool>* cancel) {
  const ModelConfig& c = survey.config;
  const KvLayout layout = c.kv_layout(options.precise ? DType::kF32 : options.kv_dtype);
  if (options.tokens < 1 || options.tokens > c.max_positions) {
    return invalid(fmt::format("a session of {} tokens: expected 1 to {}", options.tokens, c.max_positions));
  }
  storage::KvLogOptions log_options;
  log_options.more_dirs = options.more_dirs;
  FIRN_ASSIGN(log_options.identity, session_identity(fs, survey, options.kv_dtype, options.precise));
  FIRN_ASSIGN(auto log, storage::KvLog::create(fs, dir, log_options));

  const int64_t blocks = (options.tokens + layout.block_tokens - 1) / layout.block_tokens;
  const int64_t total =
      blocks * (c.layers * layout.groups * layout.kv_block_bytes() + c.n_sparse() * layout.index_norm_offset());
  RandomBlocks random(layout.dtype, options.seed);
  const int64_t kv_values = 2 * layout.block_tokens * layout.head_dim,
                index_values = layout.block_tokens * layout.index_dim;
  const auto hot = static_cast<int64_t>(
      std::lround(options.locality * static_cast<double>(c.topk_blocks - c.local_blocks - c.init_blocks)));
  std::vector<std::vector<std::byte>> memory;
  std::vector<storage::LogEntry> entries;
  int64_t bytes = 0, done = 0;
  const auto flush = [&]() -> Status {
    FIRN_TRY(log->append(entries).status());
    done += bytes;
    entries.clear();
    memory.clear();
    bytes = 0;
    if (progress) progress(done, total);
    if (cancel != nullptr && cancel->load()) return cancelled("making the session was interrupted: remove " + dir);
    return {};
  };
  const auto add = [&](const storage::BlockKey& key, int64_t values) -> std::byte* {
    memory.emplace_back(static_cast<size_t>(values) * dtype_bytes(layout.dtype));
    random.fill(memory.back().data(), values);
    entries.push_back({key, memory.back()});
    bytes += static_cast<int64_t>(memory.back().size());
    return memory.back().data();
  };
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    std::vector<char> is_hot(static_cast<size_t>(blocks), 0);
    for (int64_t i = 0; i < hot && i < blocks; ++i) {
      is_hot[static_cast<size_t>(random.next() % static_cast<uint64_t>(blocks))] = 1;
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const auto key = [&](storage::BlockKind kind, int64_t group) {
        return storage::BlockKey{kind, static_cast<uint16_t>(layer), static_cast<uint16_t>(group),
                                 static_cast<uint32_t>(b)};
      };
      for (int64_t g = 0; g < layout.groups; ++g) add(key(storage::BlockKind::kKv, g), kv_values);
      if (c.sparse_layer[static_cast<size_t>(layer)]) {
        std::byte* keys = add(key(storage::BlockKind::kIndex, 0), index_values);
        if (is_hot[static_cast<size_t>(b)] != 0) scale(keys, layout.dtype, index_values, kHotScale);
      }
      if (bytes >= kAppendBytes) FIRN_TRY(flush());
    }
  }
  std::vector<int32_t> ids(static_cast<size_t>(options.tokens));
  for (int32_t& id : ids) id = static_cast<int32_t>(random.next() % static_cast<uint64_t>(c.vocab));
  entries = token_entries(kSessionTokens, ids, 0);
  FIRN_TRY(flush());
  return log->commit(session_state(options.tokens, 0, "none").dump());
}

}  // namespace firn::model
