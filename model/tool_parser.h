// One tool block of the model's output: the calls in it, their arguments typed by the tools' schemas.
//
// Contract: consume() takes text in any cuts and reads only what cannot change any more; a call is given once,
// complete. Only tags directly after the ]<]minimax[>[ token are structure (blanks between the two are accepted), a
// closing tag counts only if it closes the innermost open element, everything else is text and stays byte for byte. An
// argument whose schema is text (and no container) keeps even such tags until its own closing tag. Time is linear.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/chat.h"

namespace firn::model {

inline constexpr std::string_view kToolNs = "]<]minimax[>[";
inline constexpr std::string_view kToolCallTag = "tool_call";

// A tag that may begin at text[0]: kPartial if more text could make it one.
struct ToolTag {
  enum class Kind : uint8_t { kNone, kPartial, kTag };
  Kind kind = Kind::kNone;
  size_t length = 0;      // kTag: bytes from the token to '>'
  std::string_view body;  // kTag: between '<' and '>'
};
ToolTag read_tool_tag(std::string_view text);

// An element: its text and its children; raw_begin and raw_end cut its inside out of the block's raw text.
struct ArgumentNode {
  std::string key;
  std::string text;
  std::vector<ArgumentNode> children;
  size_t raw_begin = 0;
  size_t raw_end = 0;
};

// The typed arguments; `parameters` is the tool's schema or nullptr, `raw` what raw_begin and raw_end point into.
Json typed_arguments(const ArgumentNode& invoke, const Json* parameters, std::string_view raw);

// How an argument's inside is read, decided when it opens.
const Json* child_schema(const Json* schema, const Json* root, std::string_view key);
bool is_text_schema(const Json* schema, const Json* root);

class ToolBlockParser {
 public:
  explicit ToolBlockParser(const std::vector<Json>* tools) : tools_(tools) {}

  // After the opening tag, whose text is kept as raw.
  void open(std::string_view opening_tag);
  // Returns how many bytes of `text` it took; the rest must come again with more behind it. Stops behind the closing
  // tag.
  size_t consume(std::string_view text, std::vector<ToolCall>* calls);
  bool done() const { return done_; }
  bool too_deep() const { return too_deep_; }
  // What was read since the opening tag or the last complete call.
  const std::string& raw() const { return raw_; }

 private:
  struct Open {
    ArgumentNode node;
    const Json* schema = nullptr;
    bool text_only = false;
    int64_t nested = 0;  // text_only: elements of its own name opened inside
  };

  void text(std::string_view text);
  void tag(std::string_view whole, std::string_view body, std::vector<ToolCall>* calls);
  void begin_call(std::string_view body);
  void end_call(std::vector<ToolCall>* calls);
  void open_element(std::string_view key);
  void close_element();

  const std::vector<Json>* tools_;
  const Json* parameters_ = nullptr;
  std::string name_;
  std::vector<Open> open_;  // the call and its open elements; empty between calls
  std::string raw_;
  bool done_ = false;
  bool too_deep_ = false;
};

}  // namespace firn::model
