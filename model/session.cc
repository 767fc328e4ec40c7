#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "model/engine.h"
#include "model/session_files.h"

namespace firn::model {

Session::Session(Engine* engine) : engine_(engine), kv_(&engine->kv_pools()) {}

Session Engine::new_session() { return Session(this); }

namespace {

nlohmann::json tiles_json(const std::vector<HiddenFile::Tile>& tiles) {
  auto list = nlohmann::json::array();
  for (const HiddenFile::Tile& t : tiles) list.push_back({t.row, t.n, fmt::format("{:016x}", t.checksum)});
  return list;
}

}  // namespace

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
    options.experts = engine_->experts();
    options.prefetch_experts = engine_->options().prefetch_experts;
    options.prefetch_kv = engine_->options().prefetch_kv;
    options.always_guess = engine_->options().always_guess;
    forward_ = std::make_unique<Forward>(&engine_->config(), &engine_->weights(), &engine_->ops(), options);
    capture_ = capture;
  }
  pending_.assign(ids.begin(), ids.end());
  asked_ = n;
  logits_.clear();
  if (pending_ != parked_.ids) parked_ = {};
  if (Status s = begin_wave(); !s.ok()) {
    pending_.clear();
    return s;
  }
  return {};
}

Status Session::plan_hidden(Wave* wave) {
  const bool stream = engine_->placement().hidden_on_disk && in_wave_ > Forward::kTileRows;
  const bool durable = on_disk() && in_wave_ > kDurableRows;
  if (!stream && !durable) return {};
  std::string dir = durable ? kv_.log()->log->dir() : scratch_dir_;
  if (dir.empty()) {
    if (engine_->options().kv_dirs.empty()) return invalid("hidden states on disk need a folder: give --kv-dir");
    dir = scratch_dir_ = fmt::format("{}/firn-hidden-{}-{}", engine_->options().kv_dirs.front(), ::getpid(),
                                     static_cast<const void*>(forward_.get()));
    FIRN_TRY(engine_->file_system().make_folder(dir));
  }
  const bool resumed = parked_.layers > 0;
  for (int i = 0; i < 2; ++i) {
    const bool kept = resumed && i == parked_.layers % 2;
    FIRN_ASSIGN(hidden_[i],
                HiddenFile::open(engine_->file_system(), fmt::format("{}/hidden.{}", dir, i), engine_->config().hidden,
                                 kept ? parked_.tiles : std::vector<HiddenFile::Tile>()));
    hidden_[i]->set_durable(durable);
    wave->hidden.files[i] = hidden_[i].get();
  }
  wave->hidden.stream = stream;
  wave->hidden.start_layer = resumed ? parked_.layers : 0;
  return {};
}

Status Session::begin_wave() {
  const int64_t left = static_cast<int64_t>(pending_.size());
  const int64_t most = engine_->options().wave_tokens;
  in_wave_ = most > 0 ? std::min(most, left) : left;
  // What was begun with another cut is begun anew, as the cut decides bits.
  if (parked_.in_wave != in_wave_) parked_ = {};
  WaveSpan span;
  span.kv = &kv_;
  span.ids.assign(pending_.begin(), pending_.begin() + in_wave_);
  if (in_wave_ == left) span.logits_at = {in_wave_ - 1};
  Wave wave;
  wave.spans.push_back(std::move(span));
  FIRN_TRY(plan_hidden(&wave));
  resumed_from_ = wave.hidden.start_layer;
  FIRN_TRY(forward_->begin(std::move(wave)));
  if (resumed_from_ == 0) return {};
  const Status status = kv_.restore_wave(in_wave_, resumed_from_);
  if (status.ok()) return {};
  forward_->abandon();
  if (status.code() != Code::kCorrupt) return status;
  parked_ = {};
  return begin_wave();
}

Status Session::step() {
  FIRN_CHECK(!idle(), "step() without begin()");
  const int64_t layers_before = forward_->layers_done();
  Status status = forward_->step();
  if (status.code() == Code::kCorrupt && resumed_from_ > 0 && layers_before == resumed_from_) {
    // What an earlier process left cannot be gone on from: it is computed again, once.
    forward_->abandon();
    parked_ = {};
    status = begin_wave();
  } else if (status.ok()) {
    status = after_step(layers_before);
  }
  if (!status.ok()) cancel();
  return status;
}

Status Session::after_step(int64_t layers_before) {
  if (!forward_->finished()) {
    const int64_t layers = forward_->layers_done();
    const bool durable = on_disk() && in_wave_ > kDurableRows;
    // Behind the last layer only the logits are left, and the commit of the whole wave.
    if (!durable || layers == layers_before || layers == 0 || layers == engine_->config().layers) return {};
    if (parked_.ids.empty()) FIRN_TRY(log_tokens(kPromptTokens, pending_, 0));
    FIRN_TRY(kv_.log_open_block(layers - 1));
    parked_ = {pending_, in_wave_, layers, hidden_[layers % 2]->tiles()};
    return commit(layers);
  }
  const std::vector<int32_t> fed(pending_.begin(), pending_.begin() + in_wave_);
  tokens_.insert(tokens_.end(), fed.begin(), fed.end());
  pending_.erase(pending_.begin(), pending_.begin() + in_wave_);
  parked_ = {};
  if (on_disk()) {
    const int64_t block = kv_.layout().block_tokens;
    if (must_commit_ || in_wave_ > kDurableRows || length() / block > (length() - in_wave_) / block) {
      FIRN_TRY(kv_.log_open_blocks());
      FIRN_TRY(commit(0));
    } else if (!replaying_) {
      FIRN_TRY(kv_.log()->log->journal({reinterpret_cast<const char*>(fed.data()), fed.size() * sizeof(int32_t)}));
    }
  }
  drop_hidden();  // no commit names them any more
  if (!pending_.empty()) return begin_wave();
  const std::span<const float> row = forward_->logits(0);
  logits_.assign(row.begin(), row.end());
  captured_ = forward_->captured();
  return {};
}

// What cannot be removed now is emptied when the next wave needs it.
void Session::drop_hidden() {
  for (auto& file : hidden_) {
    if (file == nullptr) continue;
    hidden_bytes_ += file->bytes_written();
    const std::string path = file->path();
    file.reset();
    (void)engine_->file_system().remove_file(path);
  }
  if (!scratch_dir_.empty()) (void)engine_->file_system().remove_folder(std::exchange(scratch_dir_, {}));
}

Status Session::log_tokens(uint16_t which, std::span<const int32_t> ids, int64_t from) {
  const auto entries = token_entries(which, ids, from);
  return entries.empty() ? Status() : kv_.log()->log->append(entries).status();
}

Status Session::commit(int64_t wave_layers) {
  FIRN_TRY(log_tokens(kSessionTokens, tokens_, tokens_logged_));
  nlohmann::json state = session_state(length(), engine_->options().wave_tokens, engine_->ops().name());
  if (wave_layers > 0) {
    state["prefill"] = {{"pending", pending_.size()},
                        {"in_wave", in_wave_},
                        {"layers", wave_layers},
                        {"tiles", tiles_json(parked_.tiles)}};
  }
  FIRN_TRY(kv_.log()->log->commit(state.dump()));
  tokens_logged_ = length();
  must_commit_ = replaying_ = false;
  return {};
}

Status Session::save() {
  FIRN_CHECK(idle() && on_disk(), "save() needs an idle session on disk");
  FIRN_TRY(kv_.log_open_blocks());
  return commit(0);
}

Result<Session> Engine::open_session(const std::string& dir) {
  FIRN_CHECK(tier_ != nullptr, "EngineOptions::sessions is not set");
  storage::KvLogOptions log;
  log.identity = identity_;
  log.disk_limit_bytes = options_.session_disk_bytes;
  log.compress = options_.kv_compress;
  log.element_bytes = static_cast<int>(dtype_bytes(options_.kv_dtype));
  std::string base = dir;
  while (base.size() > 1 && base.back() == '/') base.pop_back();
  Session session(this);
  const auto there = fs_->list_folder(base);
  if (!there.ok() && there.status().code() != Code::kNotFound) return there.status();
  const bool fresh = !there.ok() || storage::KvLog::unborn(*fs_, base);
  if (fresh) {
    for (const std::string& more : options_.session_dirs) {
      log.more_dirs.push_back(more + "/" + base.substr(base.find_last_of('/') + 1) + ".part");
    }
    FIRN_ASSIGN(auto made, storage::KvLog::create(*fs_, base, log));
    session.kv_.attach(tier_->add(std::move(made), true));
    FIRN_TRY(session.commit(0));
    return session;
  }
  FIRN_ASSIGN(auto opened, storage::KvLog::open(*fs_, base, log));
  session.kv_.attach(tier_->add(std::move(opened), true));
  FIRN_TRY(session.reopen());
  return session;
}

Status Session::reopen() {
  const std::shared_ptr<KvLogHandle> handle = kv_.log();
  const storage::KvLog& log = *handle->log;
  const auto damaged = [&](const std::string& what) {
    return corrupt(fmt::format("{}: the session's state {}", log.dir(), what));
  };
  if (log.state().empty()) return {};
  const auto state = nlohmann::json::parse(log.state(), nullptr, false);
  if (!state.is_object() || !state.contains("version") || !state.contains("tokens") ||
      !state["tokens"].is_number_integer())
    return damaged("cannot be read");
  if (state["version"] != 1) {
    return unsupported(
        fmt::format("{}: a session of version {}; this firn reads version 1", log.dir(), state["version"].dump()));
  }
  const auto read_ids = [&](uint16_t which, int64_t n) -> Result<std::vector<int32_t>> {
    std::vector<int32_t> ids(static_cast<size_t>(n));
    for (int64_t at = 0; at < n; at += kTokensAtOnce) {
      const storage::BlockKey key{storage::BlockKind::kTokens, which, 0, static_cast<uint32_t>(at / kTokensAtOnce)};
      const auto place = log.find(key);
      const int64_t want = std::min(kTokensAtOnce, n - at);
      if (!place || place->bytes < want * 4 || place->bytes > kTokensAtOnce * 4)
        return damaged("names tokens it does not hold");
      std::vector<int32_t> part(static_cast<size_t>(place->bytes / 4));
      FIRN_TRY(log.read(key, *place, std::as_writable_bytes(std::span(part))));
      std::copy(part.begin(), part.begin() + want, ids.begin() + at);
    }
    return ids;
  };
  FIRN_ASSIGN(tokens_, read_ids(kSessionTokens, state["tokens"].get<int64_t>()));
  tokens_logged_ = length();
  KvCache fresh(&engine_->kv_pools());
  kv_ = std::move(fresh);
  FIRN_TRY(kv_.restore(handle, length()));
  if (state.contains("prefill")) {
    try {
      const auto& p = state["prefill"];
      FIRN_ASSIGN(parked_.ids, read_ids(kPromptTokens, p.at("pending").get<int64_t>()));
      parked_.in_wave = p.at("in_wave").get<int64_t>();
      parked_.layers = p.at("layers").get<int64_t>();
      for (const auto& t : p.at("tiles")) {
        parked_.tiles.push_back(
            {t.at(0).get<int64_t>(), t.at(1).get<int64_t>(), std::stoull(t.at(2).get<std::string>(), nullptr, 16)});
      }
    } catch (const std::exception& e) {
      return damaged(std::string("cannot be read: ") + e.what());
    }
  }
  // Steps behind the last commit, each as it was cut.
  const std::vector<std::string> notes = log.notes();
  for (const std::string& note : notes) {
    std::vector<int32_t> ids(note.size() / sizeof(int32_t));
    std::memcpy(ids.data(), note.data(), ids.size() * sizeof(int32_t));
    if (ids.empty()) return damaged("holds an empty step");
    if (&note == notes.data()) replaying_ = true;
    FIRN_TRY(begin(ids));
    while (!idle()) FIRN_TRY(step());
  }
  replaying_ = false;
  return {};
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
  parked_ = {};  // the log's last commit holds it, for the process that opens it next
}

void Session::truncate(int64_t n) {
  cancel();
  FIRN_CHECK(n >= 0 && n <= length(), "truncate beyond the session");
  if (n == length()) return;
  kv_.truncate(n);
  tokens_.resize(n);
  tokens_logged_ = std::min(tokens_logged_, n);
  must_commit_ = true;  // what is journalled or committed goes on from tokens that are gone
  parked_ = {};
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
