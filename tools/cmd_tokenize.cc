// `firn tokenize`: the ids of a text, or the text of ids: what the model would see.
//
// For people: one line a token, its id and its bytes made visible, and the count on stderr. With --json one object
// {"ids", "tokens", "count"}, and with --decode also "text". Input bytes that are not UTF-8 are replaced by U+FFFD, and
// said so once.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "model/tokenizer.h"
#include "storage/file.h"
#include "tools/cli.h"

namespace firn::tools {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<int32_t>;

constexpr int64_t kMostBytes = int64_t{1} << 32;

struct Flags {
  std::string model, file, text, decode;
  bool plain = false;
  CLI::Option* file_option = nullptr;
  CLI::Option* text_option = nullptr;
  CLI::Option* decode_option = nullptr;
};

Result<std::string> read_input(const std::string& path) {
  if (path != "-") return storage::read_text_file(storage::FileSystem::real(), path, kMostBytes);
  std::string text;
  char buffer[1 << 16];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, stdin)) > 0;) {
    text.append(buffer, n);
    if (static_cast<int64_t>(text.size()) > kMostBytes) {
      return invalid(fmt::format("standard input: expected at most {} bytes of text", kMostBytes));
    }
  }
  if (std::ferror(stdin)) return io_error("standard input cannot be read");
  return text;
}

// "1,2,3", "1 2 3" or "[1, 2, 3]".
Result<Ids> parse_ids(std::string_view list) {
  std::string text(list);
  if (const size_t open = text.find_first_not_of(" \t\r\n"); open != std::string::npos && text[open] == '[') {
    const size_t close = text.find_last_not_of(" \t\r\n");
    if (text[close] != ']') return invalid("--decode: the list has no ] at its end");
    text = text.substr(open + 1, close - open - 1);
  }
  Ids ids;
  for (size_t pos = 0; pos < text.size();) {
    const size_t begin = text.find_first_not_of(" ,\t\r\n", pos);
    if (begin == std::string::npos) break;
    const size_t end = std::min(text.find_first_of(" ,\t\r\n", begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    const bool digits = item.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || item.size() > 9) {
      return invalid(fmt::format("--decode: expected ids such as 1,2,3 or [1, 2, 3], found {}",
                                 Json(item.substr(0, 40)).dump(-1, ' ', true, Json::error_handler_t::replace)));
    }
    ids.push_back(std::stoi(item));
    pos = end;
  }
  return ids;
}

// A token's bytes on one line: quotes and control characters escaped, bytes that are no whole character as \xHH.
std::string visible(std::string_view bytes) {
  std::string out = "\"";
  for (size_t pos = 0; pos < bytes.size();) {
    const auto byte = static_cast<uint8_t>(bytes[pos]);
    if (byte == '\n') {
      out += "\\n";
    } else if (byte == '"' || byte == '\\') {
      out += fmt::format("\\{}", bytes[pos]);
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else if (byte < 0x80) {
      out += bytes[pos];
    } else {
      size_t length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : 2;
      int64_t replaced = 0;
      if (pos + length <= bytes.size()) model::sanitize_utf8(bytes.substr(pos, length), &replaced);
      const bool whole = byte >= 0xC0 && pos + length <= bytes.size() && replaced == 0;
      if (!whole) length = 1;
      out += whole ? std::string(bytes.substr(pos, length)) : fmt::format("\\x{:02x}", byte);
      pos += length - 1;
    }
    ++pos;
  }
  return out + "\"";
}

int print(const model::Tokenizer& tokenizer, const Ids& ids, const std::string* text, const Globals& globals) {
  std::string out;
  if (globals.json) {
    Json tokens = Json::array();
    for (const int32_t id : ids) tokens.push_back(model::sanitize_utf8(tokenizer.token_bytes(id), nullptr));
    Json json = {{"ids", ids}, {"tokens", std::move(tokens)}, {"count", ids.size()}};
    if (text != nullptr) json["text"] = *text;
    out = json.dump() + "\n";
  } else if (text != nullptr) {
    out = *text + "\n";
  } else {
    for (const int32_t id : ids) out += fmt::format("{:>7} {}\n", id, visible(tokenizer.token_bytes(id)));
  }
  if (std::fwrite(out.data(), 1, out.size(), stdout) != out.size() || std::fflush(stdout) != 0) {
    return report(io_error("standard output: the tokens could not be written"));
  }
  if (!globals.json && !globals.quiet) {
    std::fputs(fmt::format("{} token{}\n", ids.size(), ids.size() == 1 ? "" : "s").c_str(), stderr);
  }
  return 0;
}

int run(const Flags& flags, const Globals& globals) {
  const size_t inputs = flags.file_option->count() + flags.text_option->count() + flags.decode_option->count();
  if (inputs > 1) return usage_error("tokenize takes one of TEXT, --file and --decode");
  auto tokenizer = model::Tokenizer::open(storage::FileSystem::real(), flags.model);
  if (!tokenizer.ok()) return report(tokenizer.status());

  if (flags.decode_option->count() > 0) {
    const auto ids = parse_ids(flags.decode);
    if (!ids.ok()) return usage_error(ids.status().message());
    for (const int32_t id : *ids) {
      if (!tokenizer->has_token(id)) {
        return report(invalid(fmt::format("--decode: {} is no token of {}, whose ids go up to {}", id, flags.model,
                                          tokenizer->vocab_size() - 1)));
      }
    }
    const std::string text = tokenizer->decode(*ids);
    return print(*tokenizer, *ids, &text, globals);
  }

  std::string text = flags.text;
  if (flags.text_option->count() == 0) {
    auto read = read_input(flags.file_option->count() > 0 ? flags.file : "-");
    if (!read.ok()) return report(read.status());
    text = std::move(read).value();
  }
  int64_t replaced = 0;
  text = model::sanitize_utf8(text, &replaced);
  if (replaced > 0) {
    const std::string what = replaced == 1 ? "1 part" : fmt::format("{} parts", replaced);
    std::fputs(
        fmt::format("firn: replaced {} of the text that {} not UTF-8 by U+FFFD\n", what, replaced == 1 ? "is" : "are")
            .c_str(),
        stderr);
  }
  return print(*tokenizer, tokenizer->encode(text, !flags.plain), nullptr, globals);
}

}  // namespace

Runner add_tokenize(CLI::App& app, const Globals& globals) {
  auto flags = std::make_shared<Flags>();
  app.add_option("--model", flags->model, "checkpoint folder")->required();
  flags->text_option = app.add_option("text", flags->text, "the text; standard input if there is none");
  flags->file_option = app.add_option("--file", flags->file, "read the text from a file, or from standard input: -");
  flags->decode_option = app.add_option("--decode", flags->decode, "print the text of ids: 1,2,3 or [1, 2, 3]");
  app.add_flag("--plain", flags->plain,
               "take the spelling of a control token as ordinary text, as in a user's message");
  return [flags, &globals] { return run(*flags, globals); };
}

}  // namespace firn::tools
