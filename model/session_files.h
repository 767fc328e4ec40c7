// What a session's folder says of itself, and sessions made without a prefill.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "model/weights.h"
#include "storage/kv_log.h"

namespace firn::model {

// One line of words that must match when a session is opened again: the checkpoint as far as names, shapes and a sample
// of its bytes tell, and the settings that the stored bytes depend on.
Result<std::string> session_identity(storage::FileSystem& fs, const Survey& survey, DType kv_dtype, bool precise);

// Token ids lie in the log under BlockKind::kTokens, kTokensAtOnce to an entry; the keys' layer says which: tokens of
// the session, or of a prompt whose prefill is under way.
inline constexpr int64_t kTokensAtOnce = 4096;
inline constexpr uint16_t kSessionTokens = 0, kPromptTokens = 1;
std::vector<storage::LogEntry> token_entries(uint16_t which, std::span<const int32_t> ids, int64_t from);

// The state that every commit of a session stores.
nlohmann::json session_state(int64_t tokens, int64_t wave_option, const std::string& kernels);

struct SessionInfo {
  std::string identity;
  int64_t tokens = 0;
  int64_t interrupted_tokens = 0, interrupted_layers = 0;  // of a prefill under way
  int64_t steps_to_replay = 0;
  storage::KvLogStats stats;
  std::vector<std::string> dirs;
};
SessionInfo session_info(const storage::KvLog& log);

// A session of `tokens` tokens whose K, V and index keys are seeded random numbers, to measure long contexts without
// the prefill. locality in [0, 1]: about this share of the blocks that every token of every head chooses are always the
// same few ones (their index keys are eight times as long as the others').
struct SynthSession {
  int64_t tokens = 0;
  double locality = 0;
  uint64_t seed = 1;
  DType kv_dtype = DType::kBf16;
  bool precise = false;
  std::vector<std::string> more_dirs;
};
Status synth_session(storage::FileSystem& fs, const Survey& survey, const std::string& dir, const SynthSession& options,
                     const std::function<void(int64_t done, int64_t total)>& progress, const std::atomic<bool>* cancel);

}  // namespace firn::model
