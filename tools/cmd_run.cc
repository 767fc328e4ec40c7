// `firn run`: answers once, or chats when there is no prompt and stdin is a terminal.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <random>

#include "model/utf8.h"
#include "runtime/units.h"
#include "storage/file.h"
#include "storage/safetensors.h"
#include "tools/answer.h"
#include "tools/chat.h"
#include "tools/engine_options.h"

namespace firn::tools {

namespace {

using storage::FileSystem;

constexpr int64_t kMostTextBytes = int64_t{1} << 30;

struct RunFlags {
  EngineFlags engine;
  std::string prompt, prompt_file, system, messages, tokens, thinking, logits;
  std::vector<std::string> files, stops;
  bool raw = false, greedy = false, ignore_eos = false, evidence = false, stats = false;
  int64_t max_tokens = -1, top_k = -1;
  double temperature = -1, top_p = -1, min_p = 0;
  int64_t seed = -1;
  bool has_prompt = false;
};

std::string base_name(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

Result<std::string> read_document(const std::string& path) {
  FIRN_ASSIGN(const std::string raw, storage::read_text_file(FileSystem::real(), path, kMostTextBytes));
  return clean_text(path, raw);
}

Result<std::string> read_prompt(const RunFlags& flags) {
  if (flags.prompt_file.empty()) return clean_text("--prompt", flags.prompt);
  if (flags.prompt_file != "-") return read_document(flags.prompt_file);
  std::string raw;
  char buffer[65536];
  for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), stdin)) > 0;) {
    raw.append(buffer, n);
    if (interrupted().load()) break;  // what was typed before Ctrl-C comes back first; reading on would wait again
    if (static_cast<int64_t>(raw.size()) > kMostTextBytes) {
      return invalid(fmt::format("standard input: expected at most {} of text", format_size(kMostTextBytes)));
    }
  }
  if (interrupted().load()) return cancelled("interrupted while reading standard input: nothing was computed");
  if (std::ferror(stdin) != 0) return io_error("standard input cannot be read");
  return clean_text("standard input", raw);
}

// One document: its text, a blank line, the question. Several: each under a line with its name.
Result<std::string> with_documents(const RunFlags& flags, const std::string& question) {
  std::string text;
  for (const std::string& path : flags.files) {
    FIRN_ASSIGN(const std::string document, read_document(path));
    if (flags.files.size() > 1) text += base_name(path) + "\n";
    text += document + "\n\n";
  }
  return text + question;
}

Result<std::vector<int32_t>> read_token_ids(const std::string& path) {
  FIRN_ASSIGN(const std::string text, storage::read_text_file(FileSystem::real(), path, kMostTextBytes));
  const auto json = nlohmann::json::parse(text, nullptr, false);
  const nlohmann::json* list = &json;
  if (json.is_object() && json.contains("ids")) list = &json["ids"];
  if (!list->is_array()) return invalid(path + ": expected a JSON list of token ids, or {\"ids\": [...]}");
  std::vector<int32_t> ids;
  for (const auto& item : *list) {
    if (!item.is_number_integer() || item.get<double>() < 0 || item.get<double>() > 2147483647.0) {
      return invalid(fmt::format("{}: entry {} is {}: expected a token id", path, ids.size(), item.dump()));
    }
    ids.push_back(item.get<int32_t>());
  }
  return ids;
}

Result<model::Thinking> thinking_of(const RunFlags& f) {
  if (f.thinking.empty()) return model::Thinking::kAdaptive;
  auto mode = model::parse_thinking(f.thinking);
  return mode.ok() ? mode : mode.status().with_context("--thinking " + f.thinking);
}

int check_flags(const RunFlags& f) {
  if (const int code = check_engine_flags(f.engine); code != 0) return code;
  const int sources = int{!f.messages.empty()} + int{!f.tokens.empty()} + int{f.has_prompt};
  if (sources > 1) return usage_error("give one of --prompt/--prompt-file, --messages and --tokens");
  if (!f.tokens.empty() && (!f.files.empty() || !f.system.empty())) {
    return usage_error("--tokens is the whole prompt: --file and --system do not go with it");
  }
  if (!f.messages.empty() && (!f.files.empty() || !f.system.empty())) {
    return usage_error("--messages holds the whole conversation: put --file and --system text into it");
  }
  if (f.raw && (!f.system.empty() || !f.messages.empty())) {
    return usage_error("--raw uses no chat template: --system and --messages do not go with it");
  }
  if (f.greedy && f.temperature > 0) return usage_error("--greedy and --temperature above 0 contradict each other");
  if (f.max_tokens == 0 || f.max_tokens < -1) return usage_error("--max-tokens: expected 1 or more");
  if (const auto mode = thinking_of(f); !mode.ok()) return usage_error(mode.status().message());
  for (const std::string& stop : f.stops) {
    if (stop.empty()) return usage_error("--stop: an empty string would stop at once");
  }
  return 0;
}

model::SamplingOptions sampling(const RunFlags& f, const model::ModelConfig& c) {
  model::SamplingOptions s;
  s.temperature = f.greedy ? 0.0 : f.temperature >= 0 ? f.temperature : c.temperature;
  s.top_p = f.top_p >= 0 ? f.top_p : c.top_p;
  s.top_k = f.top_k >= 0 ? f.top_k : c.top_k;
  s.min_p = f.min_p;
  s.seed = f.seed >= 0 ? static_cast<uint64_t>(f.seed) : std::random_device{}();
  return s;
}

// What is known to be wrong before a model is loaded, and the conversation if there is one.
struct Prompt {
  model::Conversation conversation;
  bool templated = false;
  std::string raw_text;
  std::vector<int32_t> ids;
};

Result<Prompt> build_prompt(const RunFlags& f) {
  Prompt p;
  FIRN_ASSIGN(p.conversation.thinking, thinking_of(f));
  if (!f.tokens.empty()) {
    FIRN_ASSIGN(p.ids, read_token_ids(f.tokens));
    if (p.ids.empty()) return invalid(f.tokens + ": the list of token ids is empty: there is nothing to answer");
    return p;
  }
  if (!f.messages.empty()) {
    FIRN_ASSIGN(const std::string text, storage::read_text_file(FileSystem::real(), f.messages, kMostTextBytes));
    auto json = model::parse_json(text);
    if (!json.ok()) return json.status().with_context(f.messages);
    auto conversation = model::parse_conversation(*json);
    if (!conversation.ok()) return conversation.status().with_context(f.messages);
    const model::Thinking asked = p.conversation.thinking;
    p.conversation = std::move(conversation).value();
    if (!f.thinking.empty()) p.conversation.thinking = asked;
    p.conversation.add_generation_prompt = true;
    if (p.conversation.has_media()) {
      return unsupported(f.messages + ": holds an image or video: this version reads text only");
    }
    p.templated = true;
    return p;
  }
  FIRN_ASSIGN(const std::string question, read_prompt(f));
  FIRN_ASSIGN(std::string text, with_documents(f, question));
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
    return invalid("the prompt is empty: there is nothing to answer");
  }
  if (f.raw) {
    p.raw_text = std::move(text);
    return p;
  }
  if (!f.system.empty()) {
    model::Message system;
    system.role = "system";
    system.content.push_back({model::Part::Kind::kText, clean_text("--system", f.system)});
    p.conversation.messages.push_back(std::move(system));
  }
  model::Message user;
  user.role = "user";
  user.content.push_back({model::Part::Kind::kText, std::move(text)});
  p.conversation.messages.push_back(std::move(user));
  p.templated = true;
  return p;
}

Status to_ids(const model::Engine& engine, Prompt* p) {
  if (!p->ids.empty()) return {};
  if (engine.tokenizer() == nullptr) {
    return engine.tokenizer_status().with_context("text needs the checkpoint's tokenizer (or give ids with --tokens)");
  }
  if (!p->templated) {
    p->ids = engine.tokenizer()->encode(p->raw_text);
    return {};
  }
  FIRN_ASSIGN(const auto pieces, model::render(p->conversation));
  p->ids = engine.tokenizer()->encode(pieces);
  return {};
}

// Whether a file can appear under `path`, asked before hours of work depend on it.
Status check_writable(const std::string& option, const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return invalid(fmt::format("{} {}: expected a file name, found a folder", option, path));
  }
  const std::string trial = storage::temporary_name(path);
  auto file = FileSystem::real().open(trial, storage::OpenMode::kCreate);
  storage::remove_quietly(trial);
  if (file.ok()) return {};
  const std::string folder = path.find('/') == std::string::npos ? "." : path.substr(0, path.find_last_of('/') + 1);
  if (!std::filesystem::is_directory(folder, error)) {
    return not_found(fmt::format("{} {}: its folder {} does not exist: create it first", option, path, folder));
  }
  return file.status().with_context(fmt::format("{} {}: no file can be made there", option, path));
}

Status write_logits(const std::string& path, const model::Generation& generation, int64_t vocab) {
  const auto& rows = generation.kept_logits();
  FIRN_ASSIGN(auto writer, storage::SafetensorsWriter::create(
                               path, {{"logits", DType::kF32, {static_cast<int64_t>(rows.size()), vocab}}}));
  for (const auto& row : rows) FIRN_TRY(writer.append(row.data(), static_cast<int64_t>(row.size() * sizeof(float))));
  return writer.finish();
}

void print_stats(const model::Engine& engine, const model::Generation& g) {
  const auto& t = g.timings();
  const int64_t computed = g.prompt_tokens() - g.cached_tokens();
  const int64_t n = static_cast<int64_t>(g.token_ids().size());
  std::fprintf(
      stderr, "%s\n",
      fmt::format(
          "prompt {} tokens ({} reused) in {:.2f} s, {:.1f} tok/s | answer {} tokens in {:.2f} s, {:.1f} tok/s | "
          "peak memory {} | {}",
          g.prompt_tokens(), g.cached_tokens(), t.prefill_s,
          t.prefill_s > 0 ? static_cast<double>(computed) / t.prefill_s : 0.0, n, t.decode_s,
          t.decode_s > 0 ? static_cast<double>(n - 1) / t.decode_s : 0.0, format_size(peak_rss_bytes()),
          model::finish_name(g.finish()))
          .c_str());
  for (const std::string& line : tier_lines(engine)) std::fprintf(stderr, "%s\n", line.c_str());
  const KernelStats& k = engine.kernel_stats();
  if (k.index_blocks_scored > 0) {
    std::fprintf(stderr, "%s\n",
                 fmt::format("index: {} blocks scored, {} of them rescored exactly", k.index_blocks_scored,
                             k.index_blocks_rescored)
                     .c_str());
  }
}

// The beginning of a passage on one line.
std::string excerpt(const std::string& text) {
  constexpr size_t kMostBytes = 160;
  std::string out(text, 0, std::min(text.size(), kMostBytes));
  out.resize(model::utf8_complete_prefix(out));
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  }
  return out + (out.size() < text.size() ? " ..." : "");
}

void print_evidence(const model::Engine& engine, const model::Generation& g, const std::vector<Evidence>& evidence) {
  const model::ModelConfig& c = engine.config();
  const int64_t blocks = (g.prompt_tokens() + c.block_tokens - 1) / c.block_tokens;
  if (blocks <= c.topk_blocks) {
    std::fprintf(stderr,
                 "evidence: the prompt has %lld passages of %lld tokens and all of them were read: none stands out\n",
                 static_cast<long long>(blocks), static_cast<long long>(c.block_tokens));
    return;
  }
  std::fputs(evidence.empty() ? "evidence: none (no passage beyond the answer's own was chosen)\n"
                              : "evidence: passages that drew the most attention while answering\n",
             stderr);
  for (const Evidence& e : evidence) {
    std::fprintf(stderr, "  %4.1f %%  tokens %lld to %lld: %s\n", 100 * e.share, static_cast<long long>(e.token_begin),
                 static_cast<long long>(e.token_end), excerpt(e.text).c_str());
  }
}

int run_once(const RunFlags& f, const Globals& globals) {
  auto prompt = build_prompt(f);
  if (prompt.status().code() == Code::kUnsupported) return usage_error(prompt.status().message());
  if (!prompt.ok()) return report(prompt.status());
  if (!f.logits.empty()) {
    if (Status s = check_writable("--logits", f.logits); !s.ok()) return report(s);
  }
  model::GenerateRequest request;
  request.max_tokens = f.max_tokens;
  request.context = f.engine.ctx;
  request.stops = f.stops;
  request.ignore_eos = f.ignore_eos;
  request.parse = prompt->templated;
  request.thinking = prompt->conversation.thinking;
  request.tools = prompt->conversation.tools;
  request.keep_logits = !f.logits.empty();
  request.capture_blocks = f.evidence;
  auto engine = open_engine(f.engine, globals, [&](const model::Engine& opened) -> Status {
    FIRN_TRY(to_ids(opened, &*prompt));
    request.prompt = prompt->ids;
    request.sampling = sampling(f, opened.config());
    return model::Generation::check(opened, request);
  });
  if (!engine.ok()) return report(engine.status());
  auto opened = f.engine.session.empty() ? Result<model::Session>((*engine)->new_session())
                                         : (*engine)->open_session(f.engine.session);
  if (!opened.ok()) return report(opened.status());
  model::Session& session = *opened;
  if (!globals.quiet && !session.interrupted().empty()) {
    std::fprintf(stderr, "firn: %s holds a prompt of %zu tokens that was read as far as layer %lld of %lld\n",
                 f.engine.session.c_str(), session.interrupted().size(),
                 static_cast<long long>(session.interrupted_layers()),
                 static_cast<long long>((*engine)->config().layers));
  }
  auto generation = model::Generation::start(engine->get(), &session, std::move(request));
  if (!generation.ok()) return report(generation.status());

  StreamTo to;
  to.text = !globals.json;
  to.reasoning = !globals.json && isatty(STDERR_FILENO) != 0;
  to.progress = !globals.quiet;
  const Status status = drive(generation->get(), to);
  const model::Generation& g = **generation;
  if (!status.ok() && status.code() != Code::kCancelled) {
    if (!globals.json && !g.text().empty()) std::fputc('\n', stdout);
    return report(status);
  }
  if (!globals.json) std::fputc('\n', stdout);
  // What a prefill had done when it was interrupted is committed already, up to its last layer.
  const bool computed = !g.token_ids().empty();
  if (session.on_disk() && !computed && status.code() == Code::kCancelled && !globals.quiet) {
    std::fprintf(stderr, "firn: %s keeps the layers that were done: the same command goes on behind them\n",
                 f.engine.session.c_str());
  }
  if (session.on_disk() && computed) {
    if (const Status s = session.save(); !s.ok()) return report(s.with_context("--session"));
  }
  if (status.ok() && !f.logits.empty()) {
    if (Status s = write_logits(f.logits, g, (*engine)->config().vocab); !s.ok()) return report(s);
  }
  std::vector<Evidence> evidence;
  if (f.evidence) evidence = find_evidence(**engine, g, prompt->ids, 5);
  if (globals.json) {
    auto j = answer_json(**engine, g, f.raw || !f.tokens.empty(), prompt->ids);
    if (f.evidence) {
      j["evidence"] = nlohmann::ordered_json::array();
      for (const Evidence& e : evidence) {
        j["evidence"].push_back({{"block", e.block},
                                 {"token_begin", e.token_begin},
                                 {"token_end", e.token_end},
                                 {"share", e.share},
                                 {"text", e.text}});
      }
    }
    std::puts(j.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else {
    for (const model::ToolCall& call : g.tool_calls()) {
      std::printf("[tool call] %s(%s)\n", call.name.c_str(), call.arguments.dump().c_str());
    }
    if (f.evidence) print_evidence(**engine, g, evidence);
  }
  if (f.stats) {
    print_stats(**engine, g);
    for (const std::string& line : probe_lines(session)) std::fprintf(stderr, "%s\n", line.c_str());
  }
  return status.ok() ? 0 : report(status);
}

int run_conversation(const RunFlags& f, const Globals& globals) {
  auto engine = open_engine(f.engine, globals);
  if (!engine.ok()) return report(engine.status());
  if ((*engine)->tokenizer() == nullptr) {
    return report((*engine)->tokenizer_status().with_context("a chat needs the checkpoint's tokenizer"));
  }
  ChatOptions options;
  options.request.max_tokens = f.max_tokens;
  options.request.context = f.engine.ctx;
  options.request.sampling = sampling(f, (*engine)->config());
  options.request.stops = f.stops;
  const auto thinking = thinking_of(f);
  options.request.thinking = options.conversation.thinking = *thinking;
  if (!f.system.empty()) {
    model::Message system;
    system.role = "system";
    system.content.push_back({model::Part::Kind::kText, f.system});
    options.conversation.messages.push_back(std::move(system));
  }
  return run_chat(engine->get(), options, globals);
}

}  // namespace

Runner add_run(CLI::App& app, const Globals& globals) {
  auto flags = std::make_shared<RunFlags>();
  RunFlags& f = *flags;
  add_engine_flags(app, &f.engine);
  auto* prompt = app.add_option("--prompt", f.prompt, "the question or message")->option_text("TEXT");
  auto* prompt_file = app.add_option("--prompt-file", f.prompt_file, "read it from a file, or - for standard input")
                          ->option_text("FILE");
  prompt->excludes(prompt_file);
  app.add_option("--file", f.files, "a document to put before the prompt; may be given several times")
      ->option_text("FILE");
  app.add_option("--system", f.system, "system message")->option_text("TEXT");
  app.add_option("--messages", f.messages, "OpenAI message list (JSON file), tools allowed")->option_text("FILE");
  app.add_flag("--raw", f.raw, "no chat template: the prompt as it is");
  app.add_option("--tokens", f.tokens, "token ids (JSON file) as the whole prompt")->option_text("FILE");
  app.add_option("--max-tokens", f.max_tokens, "most tokens of the answer; default: what is left of the context")
      ->option_text("N");
  app.add_option("--temperature", f.temperature, "0 = greedy; default: the checkpoint's")
      ->check(CLI::Range(0.0, 100.0))
      ->option_text("X");
  app.add_option("--top-p", f.top_p, "default: the checkpoint's")->check(CLI::Range(0.0, 1.0))->option_text("X");
  app.add_option("--top-k", f.top_k, "0 = off; filters apply in the order temperature, top-k, top-p, min-p")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->option_text("N");
  app.add_option("--min-p", f.min_p, "0 = off: drop tokens less probable than this share of the best")
      ->check(CLI::Range(0.0, 1.0))
      ->option_text("X");
  app.add_option("--seed", f.seed, "same seed, same answer; default: a new one each time")
      ->check(CLI::NonNegativeNumber)
      ->option_text("N");
  app.add_option("--stop", f.stops, "end the answer before this text; may be given several times")->option_text("TEXT");
  app.add_flag("--greedy", f.greedy, "always the most probable token");
  app.add_flag("--ignore-eos", f.ignore_eos, "go on after the end token, up to --max-tokens");
  app.add_option("--thinking", f.thinking, "enabled, disabled or adaptive")->option_text("MODE");
  app.add_option("--session", f.engine.session, "reopen or create a session in this folder, and save it at the end")
      ->option_text("DIR");
  app.add_flag("--evidence", f.evidence, "show which passages the answer's block choices used");
  app.add_option("--logits", f.logits, "write the fp32 logits of every generated step to a safetensors file")
      ->option_text("FILE");
  app.add_flag("--stats", f.stats, "speed and memory at the end");
  return [flags, prompt, prompt_file, &globals] {
    RunFlags& run = *flags;
    run.has_prompt = prompt->count() > 0 || prompt_file->count() > 0;
    if (const int code = check_flags(run); code != 0) return code;
    const bool asked = run.has_prompt || !run.messages.empty() || !run.tokens.empty();
    if (!asked && isatty(STDIN_FILENO) != 0 && !globals.json) {
      if (!run.engine.session.empty()) {
        return usage_error("--session needs a prompt: chats are not saved in this version");
      }
      if (!run.files.empty())
        return usage_error("--file needs a question: add --prompt, or start the chat and use /file");
      return run_conversation(run, globals);
    }
    if (!asked && run.files.empty()) {
      return usage_error("no prompt: give --prompt, --prompt-file, --messages or --tokens (a chat needs a terminal)");
    }
    return run_once(run, globals);
  };
}

}  // namespace firn::tools
