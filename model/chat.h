// MiniMax-M3's chat template, natively (specification 7), and the OpenAI message list it takes.
//
// parse_conversation is strict: what the template would silently drop (late system messages, unknown roles or parts, a
// bad thinking mode) is refused with the message's index; what OpenAI clients send differently (image_url parts,
// arguments as JSON text, explicit nulls) is mapped first. Rendering gives pieces, so that only what the template
// itself wrote can become control tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/tokenizer.h"
#include "runtime/status.h"

namespace firn::model {

enum class Thinking : uint8_t { kAdaptive, kEnabled, kDisabled };
// "adaptive", "enabled" or "disabled".
Result<Thinking> parse_thinking(std::string_view mode);

// A JSON value that keeps key order, the difference of 1 and 1.0, and integers of any size. Members of objects appear
// in first-seen order, a repeated key keeps its place and takes the last value.
struct Json {
  enum class Kind : uint8_t { kNull, kBool, kInteger, kFloat, kString, kArray, kObject };
  Kind kind = Kind::kNull;
  bool boolean = false;
  std::string text;                                   // kString: UTF-8; kInteger: its digits; kFloat: the source text
  double number = 0;                                  // kFloat
  std::vector<Json> items;                            // kArray
  std::vector<std::pair<std::string, Json>> members;  // kObject

  // Declared here and defined elsewhere, because clang 14 cannot derive them while a pair of the type is still
  // incomplete.
  Json();
  Json(const Json& other);
  Json(Json&& other) noexcept;
  Json& operator=(const Json& other);
  Json& operator=(Json&& other) noexcept;
  ~Json();

  const Json* find(std::string_view key) const;  // kObject only; nullptr if absent
  std::string dump() const;                      // as Python's json.dumps(ensure_ascii=False)
};
// Depth is limited to 128; lone surrogates become U+FFFD. Errors give line and column.
Result<Json> parse_json(std::string_view text);

struct ToolCall {
  std::string id, name;
  Json arguments;  // object
};
struct Part {
  enum class Kind : uint8_t { kText, kImage, kVideo };
  Kind kind = Kind::kText;
  std::string text;  // or the media's source
};
struct Message {
  std::string role;  // root, system, developer, user, assistant, tool
  std::vector<Part> content;
  std::optional<std::string> reasoning;
  std::vector<ToolCall> tool_calls;
  std::string tool_call_id;
};
struct Conversation {
  std::vector<Message> messages;
  std::vector<Json> tools;  // each the `function` object
  Thinking thinking = Thinking::kAdaptive;
  std::optional<std::string> model_identity;
  bool add_generation_prompt = true;
  bool has_media() const;
};

// `json`: a message list, or an object {messages, tools, thinking_mode, model_identity, add_generation_prompt}.
Result<Conversation> parse_conversation(const Json& json);

// Pieces in order; joined they are the template's string byte for byte.
Result<std::vector<TextPiece>> render(const Conversation& conversation);
std::string join(const std::vector<TextPiece>& pieces);

}  // namespace firn::model
