// Generation: a prompt on a session, then tokens until something ends it; text comes out split into reasoning, content
// and tool calls. One step() is one step of prefill or one new token, so the caller can show progress, stream and
// cancel.
//
// The last token sampled is not fed before it is needed, so after a run the session holds the prompt and all answer
// tokens but the last. REQUIRES a Session and Engine that outlive it; one thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/engine.h"
#include "model/sampler.h"
#include "model/stream_parser.h"

namespace firn::model {

struct GenerateRequest {
  std::vector<int32_t> prompt;  // ids of the whole conversation; the session keeps the prefix it already holds
  int64_t max_tokens = -1;      // -1: what is left of the context
  int64_t context = 0;          // most positions; 0 = the model's limit
  SamplingOptions sampling;
  std::vector<std::string> stops;  // matched in content only
  bool ignore_eos = false;
  bool parse = true;  // split reasoning and tool calls; false: everything is content (raw prompts)
  Thinking thinking = Thinking::kAdaptive;
  std::vector<Json> tools;
  bool keep_logits = false;     // hold every step's logits (for --logits)
  bool capture_blocks = false;  // record the generated tokens' block choices and their attention (for --evidence)
};

enum class Finish : uint8_t { kRunning, kStop, kLength, kToolCalls, kCancelled };
const char* finish_name(Finish finish);  // "stop", "length", "tool_calls", "cancelled"

struct GenerateTimings {
  double prefill_s = 0, decode_s = 0, first_token_s = 0;
};

class Generation {
 public:
  // Everything that can be refused before work starts: sampling options, stop strings, token ids, context, memory.
  // Needs no loaded weights.
  static Status check(const Engine& engine, const GenerateRequest& request);
  // check(), then begins.
  static Result<std::unique_ptr<Generation>> start(Engine* engine, Session* session, GenerateRequest request);

  bool finished() const { return finish_ != Finish::kRunning; }
  Status step();
  void cancel();

  bool in_prefill() const { return token_ids_.empty() && !finished(); }
  double prefill_progress() const { return session_->progress(); }

  // What became safe to show since the last call.
  std::vector<StreamEvent> take_events();

  Finish finish() const { return finish_; }
  const std::string& text() const { return text_; }
  const std::string& reasoning() const { return reasoning_; }
  const std::vector<ToolCall>& tool_calls() const { return tool_calls_; }
  const std::vector<int32_t>& token_ids() const { return token_ids_; }
  int64_t prompt_tokens() const { return static_cast<int64_t>(request_.prompt.size()); }
  int64_t cached_tokens() const { return cached_tokens_; }
  const GenerateTimings& timings() const { return timings_; }
  const std::vector<std::string>& logits_xxh3() const { return logits_xxh3_; }
  const std::vector<std::vector<float>>& kept_logits() const { return kept_logits_; }
  // Of each generated token's row that was fed: block choices and the attention they got, as Captured has them.
  struct Attended {
    std::vector<int32_t> blocks;
    std::vector<float> mass;
  };
  const std::vector<Attended>& attended() const { return attended_; }

 private:
  Generation(Engine* engine, Session* session, GenerateRequest request);
  Status sample_next();
  void emit(std::string_view bytes);
  void absorb(std::vector<StreamEvent> events);
  void end(Finish finish);
  bool is_end(int32_t id) const;

  Engine* const engine_;
  Session* const session_;
  GenerateRequest request_;
  Sampler sampler_;
  StreamParser parser_;
  StopMatcher stops_;
  Finish finish_ = Finish::kRunning;
  std::vector<int32_t> end_ids_;
  std::vector<StreamEvent> events_;
  std::string held_;  // bytes of an unfinished UTF-8 character (raw mode)
  std::string text_, reasoning_;
  std::vector<ToolCall> tool_calls_;
  std::vector<int32_t> token_ids_;
  std::vector<std::string> logits_xxh3_;
  std::vector<std::vector<float>> kept_logits_;
  std::vector<Attended> attended_;
  int64_t cached_tokens_ = 0;
  GenerateTimings timings_;
  std::chrono::steady_clock::time_point started_, first_token_;
};

}  // namespace firn::model
