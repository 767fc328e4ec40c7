#include <fmt/format.h>

#include <algorithm>

#include "model/engine.h"

namespace firn::model {

Session::Session(Engine* engine) : engine_(engine), kv_(&engine->kv_pools()) {}

Session Engine::new_session() { return Session(this); }

Status Session::begin(std::span<const int32_t> ids, Capture capture) {
  FIRN_CHECK(idle(), "begin() while another feed is running");
  if (ids.empty()) return invalid("nothing to compute: the prompt is empty");
  const int64_t limit = engine_->config().max_positions;
  const int64_t n = static_cast<int64_t>(ids.size());
  if (length() + n > limit) {
    return invalid(fmt::format("{} tokens after {} exceed the model's context of {} by {}: shorten the prompt", n,
                               length(), limit, length() + n - limit));
  }
  if (forward_ == nullptr || capture.hidden != capture_.hidden || capture.routing != capture_.routing ||
      capture.blocks != capture_.blocks || capture.mass != capture_.mass) {
    ForwardOptions options;
    options.activation = engine_->activation();
    options.capture = capture;
    forward_ = std::make_unique<Forward>(&engine_->config(), &engine_->weights(), &engine_->ops(), options);
    capture_ = capture;
  }
  pending_.assign(ids.begin(), ids.end());
  asked_ = n;
  logits_.clear();
  if (Status s = begin_wave(); !s.ok()) {
    pending_.clear();
    return s;
  }
  return {};
}

Status Session::begin_wave() {
  const int64_t left = static_cast<int64_t>(pending_.size());
  const int64_t most = engine_->options().wave_tokens;
  in_wave_ = most > 0 ? std::min(most, left) : left;
  WaveSpan span;
  span.kv = &kv_;
  span.ids.assign(pending_.begin(), pending_.begin() + in_wave_);
  if (in_wave_ == left) span.logits_at = {in_wave_ - 1};
  Wave wave;
  wave.spans.push_back(std::move(span));
  return forward_->begin(std::move(wave));
}

Status Session::step() {
  FIRN_CHECK(!idle(), "step() without begin()");
  Status status = forward_->step();
  if (status.ok() && forward_->finished()) {
    tokens_.insert(tokens_.end(), pending_.begin(), pending_.begin() + in_wave_);
    pending_.erase(pending_.begin(), pending_.begin() + in_wave_);
    if (pending_.empty()) {
      const std::span<const float> row = forward_->logits(0);
      logits_.assign(row.begin(), row.end());
      captured_ = forward_->captured();
    } else {
      status = begin_wave();
    }
  }
  if (!status.ok()) cancel();
  return status;
}

double Session::progress() const {
  if (asked_ == 0) return 1.0;
  const double done = static_cast<double>(asked_ - static_cast<int64_t>(pending_.size()));
  const double running = idle() ? 0 : static_cast<double>(in_wave_) * forward_->progress();
  return (done + running) / static_cast<double>(asked_);
}

void Session::cancel() {
  if (forward_ != nullptr) forward_->abandon();
  pending_.clear();
}

void Session::truncate(int64_t n) {
  cancel();
  FIRN_CHECK(n >= 0 && n <= length(), "truncate beyond the session");
  if (n == length()) return;
  kv_.truncate(n);
  tokens_.resize(n);
  logits_.clear();
}

int64_t Session::reuse_prefix(std::span<const int32_t> ids) {
  const int64_t most = std::min<int64_t>(length(), static_cast<int64_t>(ids.size()) - 1);
  int64_t n = 0;
  while (n < most && tokens_[n] == ids[n]) ++n;
  truncate(n);
  return n;
}

Session Session::fork() const {
  FIRN_CHECK(idle(), "fork() while a feed is running");
  Session other(engine_);
  other.kv_ = kv_.fork();
  other.tokens_ = tokens_;
  other.logits_ = logits_;
  return other;
}

}  // namespace firn::model
