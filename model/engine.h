// Engine: a loaded model on its devices, with the memory it may use. Session: one sequence on it.
//
//   FIRN_ASSIGN(auto engine, Engine::open(options));
//   Session session = engine->new_session();
//   FIRN_TRY(session.begin(ids));
//   while (!session.idle()) FIRN_TRY(session.step());   // between steps: show progress, look for Ctrl-C, cancel()
//   session.logits()                                    // of the last token
//
// Threads: an Engine may hold many Sessions, but one thread at a time drives them (the Ops runs one operation at a
// time). Sessions must not outlive their Engine.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cpu/cpu_ops.h"
#include "model/config.h"
#include "model/forward.h"
#include "model/kv.h"
#include "model/shared_weights.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include "runtime/budget.h"
#include "runtime/thread_team.h"

namespace firn::model {

class Engine;

struct EngineOptions {
  std::string model;  // checkpoint folder
  int threads = 1;
  std::vector<int> cpus;    // to pin workers to; empty = no pinning
  int64_t ram_bytes = -1;   // everything the engine may hold in host memory; -1 = no limit
  std::string ram_reason;   // where the limit comes from, for messages
  int64_t wave_tokens = 0;  // most tokens in one prefill wave; 0 = the whole prompt
  bool precise = false;
  DType kv_dtype = DType::kBf16;  // bf16 or f32; --precise makes it f32
  cpu::Isa isa = cpu::Isa::kScalar;
  int load_readers = 4;
  bool load_direct = true;
  std::function<void(int64_t done, int64_t total)> load_progress;
  const std::atomic<bool>* cancel = nullptr;  // looked at while loading
  bool share_weights = false;                 // weights in a named segment that later runs attach to
  SharedWeightsOptions shared;
  // Called when headers and tokenizer are read and before the weights are: an error ends open() with it, so that a
  // request which cannot be served is refused without minutes of reading.
  std::function<Status(const Engine&)> before_load;
};

struct MemoryPlan {
  int64_t weights_bytes = 0;
  int64_t kv_bytes = 0;    // K, V and index keys of the context, whole blocks
  int64_t wave_bytes = 0;  // hidden states and buffers of the largest wave
  int64_t scratch_bytes = 0;
  int64_t total() const { return weights_bytes + kv_bytes + wave_bytes + scratch_bytes; }
};

class Session;

class Engine {
 public:
  // Reads headers, refuses what cannot be loaded or does not fit (before reading weights), loads.
  static Result<std::unique_ptr<Engine>> open(storage::FileSystem& fs, EngineOptions options);
  ~Engine();

  const ModelConfig& config() const { return survey_.config; }
  const Survey& survey() const { return survey_; }
  const EngineOptions& options() const { return options_; }
  const Weights& weights() const { return weights_; }
  Ops& ops() { return *ops_; }
  KvPools& kv_pools() { return *pools_; }
  Budget& budget() { return budget_; }
  DType activation() const { return options_.precise ? DType::kF32 : DType::kBf16; }
  double load_seconds() const { return load_seconds_; }
  const KernelStats& kernel_stats() const { return ops_->stats(); }

  // Null when the folder has no tokenizer.json; tokenizer_status() says why (also when the file is broken).
  const Tokenizer* tokenizer() const { return tokenizer_ ? &*tokenizer_ : nullptr; }
  const Status& tokenizer_status() const { return tokenizer_status_; }

  // What `context` positions, fed in waves of at most `wave` tokens (0: all of the prompt), would take.
  MemoryPlan plan(int64_t prompt_tokens, int64_t context) const;
  // ok, or how many bytes are short and which smaller setting would fit. For one sequence.
  Status check_fits(int64_t prompt_tokens, int64_t context) const;

  Session new_session();
  // "MiniMax-M3 427.0B parameters, MXFP8 + BF16 | cpu/avx512 ... | threads 2 | all 15.9GiB resident ... | missing: ..."
  std::string first_line() const;
  // What this machine or build lacks, in words; empty when nothing.
  const std::vector<std::string>& missing_capabilities() const { return missing_; }
  void add_missing_capability(std::string words) { missing_.push_back(std::move(words)); }

 private:
  friend class Session;
  explicit Engine(EngineOptions options);
  Status load(storage::FileSystem& fs);

  EngineOptions options_;
  Survey survey_;
  Budget budget_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<ThreadTeam> team_;
  std::unique_ptr<cpu::CpuOps> ops_;
  SharedWeights shared_;  // outlives weights_
  Weights weights_;
  std::unique_ptr<KvPools> pools_;
  std::optional<Tokenizer> tokenizer_;
  Status tokenizer_status_;
  double load_seconds_ = 0;
  std::vector<std::string> missing_;
};

class Session {
 public:
  Session(Session&&) = default;

  // Tokens whose K, V and index keys are held.
  const std::vector<int32_t>& tokens() const { return tokens_; }
  int64_t length() const { return static_cast<int64_t>(tokens_.size()); }

  // Starts feeding ids (at least one) after tokens(). Cut into waves by --wave and the prompt's length only.
  Status begin(std::span<const int32_t> ids, Capture capture = {});
  bool idle() const { return pending_.empty(); }
  Status step();
  double progress() const;  // of what begin() was given
  // Stops between steps; waves that were complete stay, the rest is forgotten.
  void cancel();

  // Of the last token fed; empty before the first.
  std::span<const float> logits() const { return logits_; }
  const Captured& captured() const { return captured_; }

  // Forgets tokens >= n; logits() is empty after it until something is fed.
  void truncate(int64_t n);
  // Keeps the longest common prefix with `ids`, but leaves at least one of them to feed; returns its length.
  int64_t reuse_prefix(std::span<const int32_t> ids);
  // A second session with the same tokens, sharing blocks. REQUIRES idle().
  Session fork() const;

 private:
  friend class Engine;
  explicit Session(Engine* engine);
  Status begin_wave();

  Engine* engine_;
  KvCache kv_;
  std::unique_ptr<Forward> forward_;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> pending_;  // given to begin(), not yet committed
  int64_t asked_ = 0;             // tokens given to begin()
  int64_t in_wave_ = 0;           // of pending_, in the running wave
  Capture capture_;
  std::vector<float> logits_;
  Captured captured_;
};

}  // namespace firn::model
