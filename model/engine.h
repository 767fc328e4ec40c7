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
#include "model/expert_store.h"
#include "model/forward.h"
#include "model/hidden_file.h"
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
  // Tiers; < 0: chosen by Engine::choose.
  int64_t expert_ram_bytes = -1;     // slot cache for routed experts
  int64_t kv_ram_bytes = -1;         // near cache for sealed KV blocks of sparse layers
  int64_t kv_disk_bytes = -1;        // most that far KV may take on disk; < 0: no limit
  std::vector<std::string> kv_dirs;  // where far KV goes
  bool kv_compress = false;
  std::string expert_policy = "frequency";
  bool prefetch_experts = true, prefetch_kv = true;
  bool always_guess = false;  // also where it does not pay
  bool io_uring = true;
  bool sessions = false;                  // a session on disk will be opened
  std::vector<std::string> session_dirs;  // further drives for new sessions
  int64_t session_disk_bytes = -1;        // most that a session may take on disk; < 0: no limit
  std::optional<bool> hidden_on_disk;     // for tests: instead of choosing by memory
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

// What lies where, fixed before weights are loaded.
struct Placement {
  int64_t expert_slots = -1;  // of the expert cache; < 0: every expert is resident
  bool kv_limited = false;    // sealed KV of sparse layers goes to disk
  int64_t kv_near_bytes = 0;  // of the near cache
  bool hidden_on_disk = false;
};

struct MemoryPlan {
  int64_t weights_bytes = 0;  // resident ones
  int64_t expert_cache_bytes = 0;
  int64_t kv_bytes = 0;    // K, V and index keys of the context, whole blocks; what of it is in memory
  int64_t wave_bytes = 0;  // hidden states and buffers of the largest wave
  int64_t scratch_bytes = 0;
  int64_t total() const { return weights_bytes + expert_cache_bytes + kv_bytes + wave_bytes + scratch_bytes; }
};

// What the tiers did so far.
struct TierStats {
  bool expert_cache = false, kv_tier = false;
  storage::SlotCacheStats expert, kv;
  int64_t near_blocks = 0, kv_bytes_on_disk = 0, kv_bytes_written = 0;
  storage::IoQueueStats io;
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

  // What `context` positions, fed in waves of at most `wave` tokens (0: all of the prompt), would take under a
  // placement.
  MemoryPlan plan(int64_t prompt_tokens, int64_t context, const Placement& placement) const;
  MemoryPlan plan(int64_t prompt_tokens, int64_t context) const { return plan(prompt_tokens, context, placement_); }
  // ok, or how many bytes are short and which smaller setting would fit. For one sequence. Before the weights are
  // loaded it also chooses the placement for this context, the last call's standing.
  Status check_fits(int64_t prompt_tokens, int64_t context) const;
  const Placement& placement() const { return placement_; }

  Session new_session();
  // Makes or reopens a session in a folder. A prefill that was interrupted waits in it: begin() with the same tokens
  // goes on where it stood. Steps that were not committed are replayed. REQUIRES EngineOptions::sessions.
  Result<Session> open_session(const std::string& dir);
  ExpertStore* experts() { return experts_.get(); }
  KvTier* kv_tier() { return tier_.get(); }
  storage::FileSystem& file_system() { return *fs_; }
  TierStats tier_stats() const;
  // Of the checkpoint's content as far as a sample tells, and of settings that a session's bytes depend on.
  const std::string& identity() const { return identity_; }
  // "MiniMax-M3 427.0B parameters, MXFP8 + BF16 | cpu/avx512 ... | threads 2 | all 15.9GiB resident ... | missing: ..."
  std::string first_line() const;
  // What this machine or build lacks, in words; empty when nothing.
  const std::vector<std::string>& missing_capabilities() const { return missing_; }
  void add_missing_capability(std::string words) { missing_.push_back(std::move(words)); }

 private:
  friend class Session;
  explicit Engine(EngineOptions options);
  Status load(storage::FileSystem& fs);
  Status choose(int64_t prompt_tokens, int64_t context) const;
  Status make_tiers();

  EngineOptions options_;
  Survey survey_;
  Budget budget_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<ThreadTeam> team_;
  std::unique_ptr<cpu::CpuOps> ops_;
  storage::FileSystem* fs_ = nullptr;
  std::string identity_;
  mutable Placement placement_;
  bool placed_ = false;  // placement_ stands
  // In this order: caches end before the queue their reads are in, and after everything that pins.
  std::unique_ptr<storage::IoQueue> queue_;
  std::unique_ptr<ExpertStore> experts_;
  std::unique_ptr<KvTier> tier_;
  SharedWeights shared_;  // outlives weights_
  Weights weights_;
  std::unique_ptr<KvPools> pools_;
  std::optional<Tokenizer> tokenizer_;
  Status tokenizer_status_;
  double load_seconds_ = 0;
  std::vector<std::string> missing_;
};

// A session on disk writes what it computes to a segment log (storage/kv_log.h). What is committed when:
//  - a wave of more than kDurableRows rows: after each layer (layer number, hidden states, KV so far), and at its end;
//  - smaller waves: at each block border; between two, the tokens are journalled and replayed by the next open;
//  - save(): everything.
class Session {
 public:
  static constexpr int64_t kDurableRows = 512;

  Session(Session&&) = default;

  // Tokens whose K, V and index keys are held.
  const std::vector<int32_t>& tokens() const { return tokens_; }
  int64_t length() const { return static_cast<int64_t>(tokens_.size()); }

  // Starts feeding ids (at least one) after tokens(). Cut into waves by --wave and the prompt's length only. Where the
  // same feed was interrupted in a session on disk, goes on behind its last whole layer.
  Status begin(std::span<const int32_t> ids, Capture capture = {});
  bool idle() const { return pending_.empty(); }
  Status step();
  double progress() const;  // of what begin() was given
  // Stops between steps; waves that were complete stay, the rest is forgotten (on disk: kept up to its last layer).
  void cancel();

  // Of the last token fed; empty before the first.
  std::span<const float> logits() const { return logits_; }
  const Captured& captured() const { return captured_; }

  // Forgets tokens >= n; logits() is empty after it until something is fed.
  void truncate(int64_t n);
  // Keeps the longest common prefix with `ids`, but leaves at least one of them to feed; returns its length.
  int64_t reuse_prefix(std::span<const int32_t> ids);
  // A second session with the same tokens, sharing blocks. REQUIRES idle(). It is not on disk.
  Session fork() const;

  // Commits everything. REQUIRES idle() and a session on disk.
  Status save();
  bool on_disk() const { return kv_.log() != nullptr && kv_.log()->durable; }
  // Tokens of an interrupted prefill that begin() may go on with, and how many layers of it are done.
  const std::vector<int32_t>& interrupted() const { return parked_.ids; }
  int64_t interrupted_layers() const { return parked_.layers; }
  const KvCache& kv() const { return kv_; }
  KvCache& kv() { return kv_; }
  int64_t hidden_bytes_written() const { return hidden_bytes_; }
  const Forward* forward() const { return forward_.get(); }  // null before the first begin()

 private:
  friend class Engine;
  explicit Session(Engine* engine);
  Status begin_wave();
  Status after_step(int64_t layers_before);
  Status plan_hidden(Wave* wave);
  Status log_tokens(uint16_t which, std::span<const int32_t> ids, int64_t from);
  Status commit(int64_t wave_layers);
  Status reopen();
  void drop_hidden();

  struct Parked {              // a prefill that was interrupted, as its last commit tells
    std::vector<int32_t> ids;  // all that begin() was given and no wave completed
    int64_t in_wave = 0;
    int64_t layers = 0;
    std::vector<HiddenFile::Tile> tiles;
  };

  Engine* engine_;
  KvCache kv_;
  std::unique_ptr<HiddenFile> hidden_[2];  // outlives forward_
  std::string scratch_dir_;                // of hidden_ when they are not a session's
  std::unique_ptr<Forward> forward_;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> pending_;  // given to begin(), not yet committed
  int64_t asked_ = 0;             // tokens given to begin()
  int64_t in_wave_ = 0;           // of pending_, in the running wave
  Capture capture_;
  std::vector<float> logits_;
  Captured captured_;
  Parked parked_;
  int64_t tokens_logged_ = 0;  // tokens_ before this are in the log
  int64_t hidden_bytes_ = 0;
  int64_t resumed_from_ = 0;  // layer that the running wave went on at; 0: it was begun here
  bool must_commit_ = false;  // the journal cannot tell what was cut back
  bool replaying_ = false;    // what is fed is in the journal already
};

}  // namespace firn::model
