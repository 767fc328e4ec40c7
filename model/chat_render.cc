// Writes a Conversation as MiniMax-M3's template does (specification 7.1 to 7.6), byte for byte.
//
// Contract: a piece is control only if the template itself wrote it: turn markers, fixed texts, think and call tags,
// media placeholders. Names, keys, values, tool definitions and everything else that came from outside is not, so a
// marker typed there stays ordinary text. Neighbouring pieces of one sort are one piece.
#include <algorithm>

#include "model/chat.h"

namespace firn::model {
namespace {

constexpr std::string_view kNs = "]<]minimax[>[";
constexpr std::string_view kEnd = "[e~[\n";
constexpr std::string_view kThink = "<mm:think>";
constexpr std::string_view kEndThink = "</mm:think>";
constexpr std::string_view kRootText =
    "Your model version is MiniMax-M3, developed by MiniMax. Knowledge cutoff: January 2026. Founded in early 2022, "
    "MiniMax is a global AI foundation model company committed to advancing the frontiers of AI towards AGI.";
constexpr std::string_view kInstructions =
    "\n\n<thinking_instructions>\nYou have a thinking capability that allows you to reason step by step before "
    "responding. When thinking is enabled, wrap your reasoning in <mm:think></mm:think> tags before your response. "
    "When "
    "thinking is disabled, begin your response directly after the </mm:think> prefix. When thinking is adaptive, "
    "decide "
    "on your own whether to think for the current turn.\n";
constexpr std::string_view kToolsHead =
    "\n\n# Tools\nYou may call one or more tools to assist with the user query.\nHere are the tools available in "
    "JSONSchema format:\n\n<tools>\n";

std::string_view mode_text(Thinking thinking) {
  switch (thinking) {
    case Thinking::kEnabled:
      return "Current thinking mode: enabled. You MUST think step by step before every response, including after "
             "receiving function/tool results.";
    case Thinking::kDisabled:
      return "Current thinking mode: disabled. Do not output any thinking process.";
    case Thinking::kAdaptive:
      break;
  }
  return "Current thinking mode: adaptive. You are encouraged to think for complex decision-making, multi-step "
         "reasoning, or when analyzing function/tool results.";
}

class Writer {
 public:
  std::vector<TextPiece> take() { return std::move(pieces_); }

  void head(const Conversation& conversation, size_t* first_turn) {
    const std::vector<Message>& messages = conversation.messages;
    const Message* root = nullptr;
    const Message* lead = nullptr;
    size_t at = 0;
    if (at < messages.size() && messages[at].role == "root") root = &messages[at++];
    if (at < messages.size() && (messages[at].role == "system" || messages[at].role == "developer")) {
      lead = &messages[at++];
    }
    *first_turn = at;
    ours("]~!b[]~b]system\n");
    if (root != nullptr && !root->content.empty()) {
      content(root->content);
    } else {
      ours(kRootText);
    }
    ours(kInstructions);
    ours(mode_text(conversation.thinking));
    ours("\n</thinking_instructions>");
    ours(kEnd);
    ours("]~b]developer\n");
    if (lead != nullptr && !lead->content.empty()) {
      content(lead->content);
    } else if (conversation.model_identity) {
      theirs(*conversation.model_identity);
    } else {
      ours("You are a helpful assistant.");
    }
    if (!conversation.tools.empty()) tools(conversation.tools);
    ours(kEnd);
  }

  void user(const Message& message) {
    ours("]~b]user\n");
    content(message.content);
    ours(kEnd);
  }

  void assistant(const Message& message) {
    ours("]~b]ai\n");
    if (message.reasoning) {
      thought(*message.reasoning);
      content(message.content);
    } else {
      split(message.content);
    }
    if (!message.tool_calls.empty()) {
      tag("<tool_call>\n");
      for (const ToolCall& call : message.tool_calls) invocation(call.name, call.arguments);
      tag("</tool_call>");
    }
    ours(kEnd);
  }

  // One of a run of results; the run's first opens the turn, its last closes it.
  void result(const Message& message, bool first, bool last) {
    if (first) ours("]~b]tool");
    ours("\n<response>");
    content(message.content);
    ours("</response>");
    if (last) ours(kEnd);
  }

  void prompt(Thinking thinking) {
    ours("]~b]ai\n");
    if (thinking == Thinking::kEnabled) ours(kThink);
    if (thinking == Thinking::kDisabled) ours(kEndThink);
  }

 private:
  void put(std::string_view text, bool control) {
    if (text.empty()) return;
    if (pieces_.empty() || pieces_.back().control != control) pieces_.push_back({std::string(), control});
    pieces_.back().text += text;
  }
  void ours(std::string_view text) { put(text, true); }
  void theirs(std::string_view text) { put(text, false); }
  void tag(std::string_view text) {
    ours(kNs);
    ours(text);
  }

  void content(const std::vector<Part>& parts) {
    for (const Part& part : parts) {
      switch (part.kind) {
        case Part::Kind::kText:
          theirs(part.text);
          break;
        case Part::Kind::kImage:
          ours("]<]image[>[");
          break;
        case Part::Kind::kVideo:
          ours("]<]video[>[");
          break;
      }
    }
  }

  void thought(std::string_view reasoning) {
    if (!reasoning.empty()) ours(kThink);
    theirs(reasoning);
    ours(kEndThink);
  }

  // Content that may hold its reasoning: what precedes the first closing tag, from the last opening tag in it on, is
  // the reasoning; what follows the last closing tag is the content. Works on the joined text, so that a tag may lie
  // across parts. Each byte keeps its mark.
  void split(const std::vector<Part>& parts) {
    Writer joined;
    joined.content(parts);
    const std::vector<TextPiece> pieces = joined.take();
    const std::string text = join(pieces);
    const size_t first = text.find(kEndThink);
    if (first == std::string::npos) {
      ours(kEndThink);
      content(parts);
      return;
    }
    size_t begin = text.substr(0, first).rfind(kThink);
    begin = begin == std::string::npos ? 0 : begin + kThink.size();
    size_t last = text.rfind(kEndThink) + kEndThink.size();
    size_t end = first;
    size_t stop = text.size();
    while (begin < end && text[begin] == '\n') ++begin;
    while (end > begin && text[end - 1] == '\n') --end;
    while (last < stop && text[last] == '\n') ++last;
    while (stop > last && text[stop - 1] == '\n') --stop;
    if (begin < end) ours(kThink);
    range(pieces, begin, end);
    ours(kEndThink);
    range(pieces, last, stop);
  }

  // Bytes [begin, end) of the joined pieces, each byte with its own piece's mark.
  void range(const std::vector<TextPiece>& pieces, size_t begin, size_t end) {
    size_t at = 0;
    for (const TextPiece& piece : pieces) {
      const size_t from = std::max(begin, at);
      const size_t to = std::min(end, at + piece.text.size());
      if (from < to) put(std::string_view(piece.text).substr(from - at, to - from), piece.control);
      at += piece.text.size();
    }
  }

  void tools(const std::vector<Json>& list) {
    ours(kToolsHead);
    for (const Json& tool : list) {
      ours("<tool>");
      theirs(tool.dump());
      ours("</tool>\n");
    }
    ours("</tools>\n\nTo call tools, wrap all invocations in a single ");
    tag("<tool_call>");
    tag("</tool_call>");
    ours(
        " block. Parameter values containing nested objects or arrays are recursively expanded into XML elements. "
        "Example:\n\n");
    tag("<tool_call>\n");
    example("tool-name-1", true);
    example("tool-name-2", false);
    tag("</tool_call>");
  }

  void example(std::string_view name, bool nested) {
    tag("<invoke name=\"");
    ours(name);
    ours("\">");
    auto element = [&](std::string_view key, std::string_view text) {
      tag("<");
      ours(key);
      ours(">");
      ours(text);
      tag("</");
      ours(key);
      ours(">");
    };
    element("param-1", "value-1");
    if (nested) {
      tag("<param-2>");
      tag("<item>");
      element("key-a", "val-a");
      element("key-b", "val-b");
      tag("</item>");
      tag("</param-2>");
    }
    tag("</invoke>\n");
  }

  void invocation(std::string_view name, const Json& arguments) {
    tag("<invoke name=\"");
    theirs(name);
    ours("\">");
    members(arguments);
    tag("</invoke>\n");
  }

  void members(const Json& object) {
    for (const auto& [key, value] : object.members) {
      if (value.kind == Json::Kind::kNull) continue;
      tag("<");
      theirs(key);
      ours(">");
      argument(value);
      tag("</");
      theirs(key);
      ours(">");
    }
  }

  void argument(const Json& json) {
    switch (json.kind) {
      case Json::Kind::kNull:
        return;
      case Json::Kind::kString:
        theirs(json.text);
        return;
      case Json::Kind::kBool:
      case Json::Kind::kInteger:
      case Json::Kind::kFloat:
        theirs(json.dump());
        return;
      case Json::Kind::kObject:
        members(json);
        return;
      case Json::Kind::kArray:
        for (const Json& item : json.items) {
          tag("<item>");
          argument(item);
          tag("</item>");
        }
        return;
    }
  }

  std::vector<TextPiece> pieces_;
};

}  // namespace

Result<std::vector<TextPiece>> render(const Conversation& conversation) {
  Writer writer;
  size_t first = 0;
  writer.head(conversation, &first);
  const std::vector<Message>& messages = conversation.messages;
  for (size_t i = first; i < messages.size(); ++i) {
    const Message& message = messages[i];
    if (message.role == "user") {
      writer.user(message);
    } else if (message.role == "assistant") {
      writer.assistant(message);
    } else if (message.role == "tool") {
      const bool opens = i == first || messages[i - 1].role != "tool";
      const bool closes = i + 1 == messages.size() || messages[i + 1].role != "tool";
      writer.result(message, opens, closes);
    } else {
      return invalid("messages[" + std::to_string(i) + "]: a " + message.role +
                     " message cannot be rendered here; root, system and developer stand at the start of the list");
    }
  }
  if (conversation.add_generation_prompt) writer.prompt(conversation.thinking);
  return writer.take();
}

std::string join(const std::vector<TextPiece>& pieces) {
  std::string text;
  for (const TextPiece& piece : pieces) text += piece.text;
  return text;
}

}  // namespace firn::model
