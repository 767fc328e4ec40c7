// Splits the model's output, as it streams, into reasoning, content and tool calls (openai-surface 4 and 5.1).
//
// Feed text in any cuts: the events joined are the same for one byte at a time and for everything at once. Tags are
// matched on decoded text with hold-back, so a tag spelt by several ordinary tokens is a tag too. The start state comes
// from the thinking mode of the request, never from scanning the prompt.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/chat.h"

namespace firn::model {

struct StreamEvent {
  enum class Kind : uint8_t { kReasoning, kContent, kToolCall };
  Kind kind = Kind::kContent;
  std::string text;  // kReasoning, kContent: the next piece, whole UTF-8 characters
  ToolCall call;     // kToolCall: a complete call, its id random; arguments typed by the tool's schema where it has one
};

class StreamParser {
 public:
  // tools: the `function` objects of the request, for argument types; may be empty.
  StreamParser(Thinking thinking, std::vector<Json> tools);
  ~StreamParser();
  StreamParser(StreamParser&&) noexcept;

  std::vector<StreamEvent> feed(std::string_view bytes);
  // End of output: releases what was held back. An unfinished tool block gives nothing more; its raw text is kept.
  std::vector<StreamEvent> finish();

  bool inside_reasoning() const;
  bool in_tool_block() const;
  int64_t calls() const;
  const std::string& raw_unfinished() const;
  // Not ok once a call was nested more than 128 levels deep: the rest of the output is not read.
  const Status& status() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace firn::model
