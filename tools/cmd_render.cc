// `firn render`: the prompt text a message list becomes, and its token ids: what the model would see.
//
// Without --ids nothing of the model is read, since the template is firn's own. Text goes to stdout as it is, without a
// newline added at its end; with --json one object {"prompt", "pieces": [{"text", "control"}], "ids"}.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "model/chat.h"
#include "model/tokenizer.h"
#include "storage/file.h"
#include "tools/cli.h"

namespace firn::tools {
namespace {

using model::Json;

constexpr int64_t kMostBytes = int64_t{1} << 30;

struct Flags {
  std::string model, messages, thinking;
  bool ids = false;
  bool no_generation_prompt = false;
};

Result<std::string> read_input(const std::string& path) {
  if (path != "-") return storage::read_text_file(storage::FileSystem::real(), path, kMostBytes);
  std::string text;
  char buffer[1 << 16];
  for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), stdin)) > 0;) {
    text.append(buffer, n);
    if (static_cast<int64_t>(text.size()) > kMostBytes) {
      return invalid(fmt::format("standard input: expected at most {} bytes of JSON", kMostBytes));
    }
  }
  return text;
}

Result<model::Conversation> read_conversation(const Flags& flags) {
  FIRN_ASSIGN(const std::string text, read_input(flags.messages));
  const std::string name = flags.messages == "-" ? "standard input" : flags.messages;
  auto json = model::parse_json(text);
  if (!json.ok()) return json.status().with_context(name);
  auto conversation = model::parse_conversation(*json);
  if (!conversation.ok()) return conversation.status().with_context(name);
  if (!flags.thinking.empty()) {
    FIRN_ASSIGN(conversation->thinking, model::parse_thinking(flags.thinking));
  }
  if (flags.no_generation_prompt) conversation->add_generation_prompt = false;
  return conversation;
}

Json string_json(std::string text) {
  Json json;
  json.kind = Json::Kind::kString;
  json.text = std::move(text);
  return json;
}

Json ids_json(const std::vector<int32_t>& ids) {
  Json list;
  list.kind = Json::Kind::kArray;
  for (int32_t id : ids) {
    list.items.emplace_back();
    list.items.back().kind = Json::Kind::kInteger;
    list.items.back().text = std::to_string(id);
  }
  return list;
}

Json pieces_json(const std::vector<model::TextPiece>& pieces) {
  Json list;
  list.kind = Json::Kind::kArray;
  for (const model::TextPiece& piece : pieces) {
    Json entry;
    entry.kind = Json::Kind::kObject;
    Json control;
    control.kind = Json::Kind::kBool;
    control.boolean = piece.control;
    entry.members.emplace_back("text", string_json(piece.text));
    entry.members.emplace_back("control", std::move(control));
    list.items.push_back(std::move(entry));
  }
  return list;
}

Status print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    return io_error("standard output: the text could not be written");
  }
  return {};
}

Status render_messages(const Flags& flags, const Globals& globals) {
  FIRN_ASSIGN(const model::Conversation conversation, read_conversation(flags));
  FIRN_ASSIGN(const std::vector<model::TextPiece> pieces, model::render(conversation));
  if (conversation.has_media()) {
    std::fputs("firn: the messages hold an image or video; shown as its placeholder, but this version cannot run it\n",
               stderr);
  }
  std::vector<int32_t> ids;
  if (flags.ids) {
    FIRN_ASSIGN(const model::Tokenizer tokenizer, model::Tokenizer::open(storage::FileSystem::real(), flags.model));
    ids = tokenizer.encode(pieces);
  }
  if (!globals.json) return print(flags.ids ? ids_json(ids).dump() + "\n" : model::join(pieces));
  Json out;
  out.kind = Json::Kind::kObject;
  out.members.emplace_back("prompt", string_json(model::join(pieces)));
  out.members.emplace_back("pieces", pieces_json(pieces));
  if (flags.ids) out.members.emplace_back("ids", ids_json(ids));
  return print(out.dump() + "\n");
}

}  // namespace

Runner add_render(CLI::App& app, const Globals& globals) {
  auto flags = std::make_shared<Flags>();
  app.add_option("--model", flags->model, "checkpoint folder; only --ids reads it (its tokenizer)");
  app.add_option("--messages", flags->messages,
                 "JSON file, or - for stdin: a message list, or an object with messages, tools, thinking_mode, "
                 "model_identity, add_generation_prompt")
      ->required();
  app.add_option("--thinking", flags->thinking, "enabled, disabled or adaptive; the file's mode if not given");
  app.add_flag("--ids", flags->ids, "token ids instead of the text; with --json beside it");
  app.add_flag("--no-generation-prompt", flags->no_generation_prompt, "end after the last turn");
  return [flags, &globals]() -> int {
    if (flags->ids && flags->model.empty())
      return usage_error("--ids needs --model DIR, whose tokenizer gives the ids");
    if (!flags->thinking.empty()) {
      if (auto mode = model::parse_thinking(flags->thinking); !mode.ok()) return usage_error(mode.status().message());
    }
    const Status status = render_messages(*flags, globals);
    return status.ok() ? 0 : report(status);
  };
}

}  // namespace firn::tools
