#include "model/generate.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

namespace firn::model {

namespace {
double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
}  // namespace

const char* finish_name(Finish finish) {
  switch (finish) {
    case Finish::kRunning:
      return "running";
    case Finish::kStop:
      return "stop";
    case Finish::kLength:
      return "length";
    case Finish::kToolCalls:
      return "tool_calls";
    case Finish::kCancelled:
      return "cancelled";
  }
  return "unknown";
}

Generation::Generation(Engine* engine, Session* session, GenerateRequest request)
    : engine_(engine),
      session_(session),
      request_(std::move(request)),
      sampler_(request_.sampling,
               engine->tokenizer() != nullptr
                   ? std::min<int32_t>(engine->tokenizer()->vocab_size(), static_cast<int32_t>(engine->config().vocab))
                   : static_cast<int32_t>(engine->config().vocab)),
      parser_(request_.thinking, request_.tools),
      stops_(request_.stops) {
  const ModelConfig& c = engine->config();
  if (c.eos_id >= 0) end_ids_.push_back(c.eos_id);
  if (const Tokenizer* tokenizer = engine->tokenizer()) {
    // A new turn or document in the middle of an answer is an abnormal end, never text.
    for (const char* marker : {"[e~[", "]~b]", "]~!b["}) {
      if (const int32_t id = tokenizer->find_added(marker); id >= 0) end_ids_.push_back(id);
    }
  }
}

namespace {
// Most positions the request may use, and how many tokens it may generate. Sampling the last token needs no position.
int64_t context_of(const Engine& engine, const GenerateRequest& request) {
  const int64_t limit = engine.config().max_positions;
  return request.context > 0 ? std::min(request.context, limit) : limit;
}
int64_t tokens_allowed(const Engine& engine, const GenerateRequest& request) {
  const int64_t room = context_of(engine, request) - static_cast<int64_t>(request.prompt.size()) + 1;
  return request.max_tokens < 0 ? room : std::min(request.max_tokens, room);
}
}  // namespace

Status Generation::check(const Engine& engine, const GenerateRequest& request) {
  FIRN_TRY(request.sampling.validate());
  for (const std::string& stop : request.stops) {
    if (stop.empty()) return invalid("a stop string is empty: give at least one character");
  }
  if (request.prompt.empty()) return invalid("the prompt is empty: there is nothing to answer");
  if (request.max_tokens == 0 || request.max_tokens < -1) {
    return invalid(fmt::format("max tokens is {}: give 1 or more", request.max_tokens));
  }
  const int64_t n = static_cast<int64_t>(request.prompt.size());
  const int64_t vocab = engine.config().vocab;
  for (int64_t i = 0; i < n; ++i) {
    if (request.prompt[i] < 0 || request.prompt[i] >= vocab) {
      return invalid(
          fmt::format("token id {} at position {}: the vocabulary has ids 0 to {}", request.prompt[i], i, vocab - 1));
    }
  }
  const int64_t limit = engine.config().max_positions;
  const int64_t context = context_of(engine, request);
  if (n > context) {
    return invalid(
        fmt::format("the prompt has {} tokens, the context {} ({}): {} too many. Shorten the prompt{}", n, context,
                    request.context > 0 && request.context <= limit ? "--ctx" : "the model's maximum context length",
                    n - context, request.context > 0 && request.context < limit ? " or raise --ctx" : ""));
  }
  // Without a planned context, plan for the prompt and an answer of the usual length.
  const int64_t answer = tokens_allowed(engine, request) - 1;
  const int64_t planned = request.context > 0 ? context : n + std::min<int64_t>(answer, 4096);
  return engine.check_fits(n, planned);
}

Result<std::unique_ptr<Generation>> Generation::start(Engine* engine, Session* session, GenerateRequest request) {
  FIRN_TRY(check(*engine, request));
  request.max_tokens = tokens_allowed(*engine, request);
  std::unique_ptr<Generation> g(new Generation(engine, session, std::move(request)));
  g->started_ = std::chrono::steady_clock::now();
  g->cached_tokens_ = session->reuse_prefix(g->request_.prompt);
  Capture capture;
  FIRN_TRY(session->begin(std::span<const int32_t>(g->request_.prompt).subspan(g->cached_tokens_), capture));
  return g;
}

bool Generation::is_end(int32_t id) const { return std::find(end_ids_.begin(), end_ids_.end(), id) != end_ids_.end(); }

Status Generation::step() {
  FIRN_CHECK(!finished(), "step() of a finished generation");
  if (session_->idle()) {
    const int32_t last = token_ids_.back();
    Capture capture;
    capture.blocks = capture.mass = request_.capture_blocks;
    FIRN_TRY(session_->begin(std::span<const int32_t>(&last, 1), capture));
  }
  Status status = session_->step();
  if (!status.ok()) {
    end(Finish::kCancelled);
    return status;
  }
  if (!session_->idle()) return {};
  if (request_.capture_blocks && !token_ids_.empty()) {
    attended_.push_back({session_->captured().block_ids, session_->captured().block_mass});
  }
  return sample_next();
}

Status Generation::sample_next() {
  const std::span<const float> logits = session_->logits();
  Result<int32_t> sampled = sampler_.sample(logits);
  if (!sampled.ok()) {
    end(Finish::kCancelled);
    return sampled.status();
  }
  const int32_t id = *sampled;
  logits_xxh3_.push_back(fmt::format("{:016x}", XXH3_64bits(logits.data(), logits.size_bytes())));
  if (request_.keep_logits) kept_logits_.emplace_back(logits.begin(), logits.end());
  if (token_ids_.empty()) {
    first_token_ = std::chrono::steady_clock::now();
    timings_.prefill_s = timings_.first_token_s = seconds_since(started_);
  } else {
    timings_.decode_s = seconds_since(first_token_);
  }
  token_ids_.push_back(id);
  if (!request_.ignore_eos && is_end(id)) {
    end(parser_.calls() > 0 ? Finish::kToolCalls : Finish::kStop);
    return {};
  }
  if (const Tokenizer* tokenizer = engine_->tokenizer()) {
    // Tags of reasoning and tools are text to the parser even when a checkpoint flags them special.
    emit(tokenizer->token_bytes(id));
  }
  if (stops_.stopped()) {
    end(Finish::kStop);
  } else if (static_cast<int64_t>(token_ids_.size()) >= request_.max_tokens) {
    end(Finish::kLength);
  }
  return {};
}

void Generation::emit(std::string_view bytes) {
  if (request_.parse) {
    absorb(parser_.feed(bytes));
    return;
  }
  held_ += bytes;
  const size_t whole = utf8_complete_prefix(held_);
  std::vector<StreamEvent> events(1);
  events[0].text = sanitize_utf8(std::string_view(held_).substr(0, whole), nullptr);
  held_.erase(0, whole);
  absorb(std::move(events));
}

void Generation::absorb(std::vector<StreamEvent> events) {
  for (StreamEvent& event : events) {
    switch (event.kind) {
      case StreamEvent::Kind::kReasoning:
        reasoning_ += event.text;
        break;
      case StreamEvent::Kind::kToolCall:
        tool_calls_.push_back(event.call);
        break;
      case StreamEvent::Kind::kContent:
        if (stops_.stopped()) continue;
        event.text = stops_.feed(event.text);
        text_ += event.text;
        break;
    }
    if (event.kind != StreamEvent::Kind::kToolCall && event.text.empty()) continue;
    events_.push_back(std::move(event));
  }
}

void Generation::end(Finish finish) {
  if (finished()) return;
  if (request_.parse) {
    absorb(parser_.finish());
  } else if (!held_.empty()) {
    std::vector<StreamEvent> events(1);
    events[0].text = sanitize_utf8(held_, nullptr);
    held_.clear();
    absorb(std::move(events));
  }
  if (!stops_.stopped()) {
    StreamEvent rest;
    rest.text = stops_.finish();
    text_ += rest.text;
    if (!rest.text.empty()) events_.push_back(std::move(rest));
  }
  finish_ = stops_.stopped() && finish == Finish::kLength ? Finish::kStop : finish;
}

void Generation::cancel() {
  session_->cancel();
  end(Finish::kCancelled);
}

std::vector<StreamEvent> Generation::take_events() { return std::exchange(events_, {}); }

}  // namespace firn::model
