// From an OpenAI message list (JSON) to a Conversation: every check the template itself does not make.
//
// Contract: what the template would drop without a word, or print in Python's notation, is refused with the place
// (messages[3].content[1]); what clients merely spell differently is mapped: image_url and input_* parts, arguments as
// JSON text, explicit nulls, several leading system messages, reasoning under its other names, results in another order
// than the calls. Messages quote at most a few characters of what was sent.
#include <fmt/format.h>

#include <algorithm>

#include "model/chat.h"

namespace firn::model {
namespace {

using Kind = Json::Kind;

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kNull:
      return "null";
    case Kind::kBool:
      return "a boolean";
    case Kind::kInteger:
      return "an integer";
    case Kind::kFloat:
      return "a number";
    case Kind::kString:
      return "a string";
    case Kind::kArray:
      return "an array";
    case Kind::kObject:
      return "an object";
  }
  return "nothing";
}

// A member that is there and not null: clients send explicit nulls for what they leave out.
const Json* given(const Json& object, std::string_view key) {
  const Json* value = object.find(key);
  return value == nullptr || value->kind == Kind::kNull ? nullptr : value;
}

bool is_string(const Json* value) { return value != nullptr && value->kind == Kind::kString; }

// At most 40 bytes of text for a message, cut between characters, without control characters.
std::string quoted(const std::string& text) {
  size_t end = std::min<size_t>(text.size(), 40);
  while (end < text.size() && end > 0 && (static_cast<uint8_t>(text[end]) & 0xC0) == 0x80) --end;
  std::string shown = "'";
  for (char c : text.substr(0, end)) shown.push_back(static_cast<uint8_t>(c) < 0x20 || c == 0x7F ? ' ' : c);
  return shown + (end < text.size() ? "...'" : "'");
}

std::string described(const Json* value) {
  if (value == nullptr) return "nothing";
  return value->kind == Kind::kString ? quoted(value->text) : kind_name(value->kind);
}

Status wrong(const std::string& where, const std::string& expected, const Json* value) {
  return invalid(fmt::format("{}: expected {}, found {}", where, expected, described(value)));
}

// The source of a media part: "image_url": {"url": ...} or "image_url": "..."; empty if the part names none.
std::string media_source(const Json& part, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    const Json* value = given(part, key);
    if (value != nullptr && value->kind == Kind::kObject) value = given(*value, "url");
    if (is_string(value)) return value->text;
  }
  return "";
}

Result<Part> parse_part(const Json& json, bool tool, const std::string& where) {
  if (json.kind == Kind::kString) return Part{Part::Kind::kText, json.text};
  if (json.kind != Kind::kObject) return wrong(where, "a string or a part with a type", &json);
  const Json* type = given(json, "type");
  const std::string name = is_string(type) ? type->text : "";
  if (name == "image" || name == "image_url" || name == "input_image") {
    return Part{Part::Kind::kImage, media_source(json, {"image_url", "image", "url"})};
  }
  if (name == "video" || name == "video_url" || name == "input_video") {
    return Part{Part::Kind::kVideo, media_source(json, {"video_url", "video", "url"})};
  }
  const Json* output = tool ? json.find("output") : nullptr;
  if (output != nullptr) {
    if (output->kind != Kind::kString) return wrong(where + ".output", "a string", output);
    return Part{Part::Kind::kText, output->text};
  }
  if (name == "text" || name == "input_text" || name == "output_text") {
    const Json* text = json.find("text");
    if (!is_string(text)) return wrong(where + ".text", "a string", text);
    return Part{Part::Kind::kText, text->text};
  }
  return wrong(where + ".type", "text, image, image_url, video or video_url", type);
}

// Null, a missing field, "" and [] give no parts; one empty text part is a part.
Result<std::vector<Part>> parse_content(const Json& message, bool tool, const std::string& where) {
  std::vector<Part> parts;
  const Json* content = given(message, "content");
  if (content == nullptr) return parts;
  if (content->kind == Kind::kString) {
    if (!content->text.empty()) parts.push_back({Part::Kind::kText, content->text});
    return parts;
  }
  if (content->kind != Kind::kArray) return wrong(where + ".content", "a string, null or a list of parts", content);
  for (size_t i = 0; i < content->items.size(); ++i) {
    FIRN_ASSIGN(Part part, parse_part(content->items[i], tool, fmt::format("{}.content[{}]", where, i)));
    parts.push_back(std::move(part));
  }
  return parts;
}

// reasoning_content, then reasoning, then the texts of reasoning_details; tags inside content are split when rendering.
Result<std::optional<std::string>> parse_reasoning(const Json& message, const std::string& where) {
  for (const char* key : {"reasoning_content", "reasoning"}) {
    const Json* value = given(message, key);
    if (value == nullptr) continue;
    if (value->kind != Kind::kString) return wrong(fmt::format("{}.{}", where, key), "a string or null", value);
    return std::optional<std::string>(value->text);
  }
  const Json* details = given(message, "reasoning_details");
  if (details == nullptr) return std::optional<std::string>();
  if (details->kind != Kind::kArray) return wrong(where + ".reasoning_details", "a list", details);
  if (details->items.empty()) return std::optional<std::string>();
  std::string joined;
  for (size_t i = 0; i < details->items.size(); ++i) {
    const Json& item = details->items[i];
    const Json* text = item.kind == Kind::kObject ? given(item, "text") : nullptr;
    if (!is_string(text)) return wrong(fmt::format("{}.reasoning_details[{}].text", where, i), "a string", text);
    joined += text->text;
  }
  return std::optional<std::string>(std::move(joined));
}

Result<ToolCall> parse_call(const Json& json, const std::string& where) {
  if (json.kind != Kind::kObject) return wrong(where, "an object", &json);
  // {"function": {...}} or the inner object alone; an empty inner object counts as none, as in the template.
  const Json* function = given(json, "function");
  if (function != nullptr && function->kind != Kind::kObject) return wrong(where + ".function", "an object", function);
  const Json& inner = function != nullptr && !function->members.empty() ? *function : json;
  ToolCall call;
  const Json* name = inner.find("name");
  if (!is_string(name) || name->text.empty()) return wrong(where + ".name", "the function's name", name);
  if (name->text.find_first_of("\"<>") != std::string::npos) {
    return wrong(where + ".name", "a name without quotes and angle brackets", name);
  }
  call.name = name->text;
  if (const Json* id = given(json, "id")) {
    if (id->kind != Kind::kString) return wrong(where + ".id", "a string", id);
    call.id = id->text;
  }
  const Json* arguments = inner.find("arguments");
  if (is_string(arguments) && arguments->text.empty()) {
    call.arguments.kind = Kind::kObject;
    return call;
  }
  if (is_string(arguments)) {
    auto parsed = parse_json(arguments->text);
    if (!parsed.ok()) return parsed.status().with_context(where + ".arguments: expected the JSON text of an object");
    if (parsed->kind != Kind::kObject) return wrong(where + ".arguments", "the JSON text of an object", &*parsed);
    call.arguments = std::move(*parsed);
    return call;
  }
  if (arguments == nullptr || arguments->kind != Kind::kObject) {
    return wrong(where + ".arguments", "an object or its JSON text", arguments);
  }
  call.arguments = *arguments;
  return call;
}

Status parse_calls(const Json& message, const std::string& where, std::vector<ToolCall>* out) {
  const Json* calls = given(message, "tool_calls");
  if (calls == nullptr) return {};
  if (calls->kind != Kind::kArray) return wrong(where + ".tool_calls", "a list", calls);
  for (size_t i = 0; i < calls->items.size(); ++i) {
    FIRN_ASSIGN(ToolCall call, parse_call(calls->items[i], fmt::format("{}.tool_calls[{}]", where, i)));
    out->push_back(std::move(call));
  }
  return {};
}

bool is_lead(const std::string& role) { return role == "system" || role == "developer"; }

Result<Message> parse_message(const Json& json, const std::string& where) {
  if (json.kind != Kind::kObject) return wrong(where, "an object with role and content", &json);
  static constexpr const char* kRoles[] = {"root", "system", "developer", "user", "assistant", "tool"};
  const Json* role = given(json, "role");
  if (!is_string(role) || std::find(std::begin(kRoles), std::end(kRoles), role->text) == std::end(kRoles)) {
    return wrong(where + ".role", "root, system, developer, user, assistant or tool", role);
  }
  Message message;
  message.role = role->text;
  FIRN_ASSIGN(message.content, parse_content(json, message.role == "tool", where));
  if (message.role == "assistant") {
    FIRN_ASSIGN(message.reasoning, parse_reasoning(json, where));
    FIRN_TRY(parse_calls(json, where, &message.tool_calls));
    if (given(json, "function_call") != nullptr) {
      return invalid(where + ".function_call: this older form is not rendered; send it as tool_calls");
    }
  }
  if (message.role == "tool") {
    if (const Json* id = given(json, "tool_call_id")) {
      if (id->kind != Kind::kString) return wrong(where + ".tool_call_id", "a string", id);
      message.tool_call_id = id->text;
    }
  }
  return message;
}

// Where results stand: they are matched to calls by order alone, so results that name their calls are put in the order
// of the calls. Ids are used only where they can decide: every call of the turn has one of its own, every result of the
// run names one. The list is done from the newest turn with calls.
class ResultOrder {
 public:
  explicit ResultOrder(std::vector<Message>* messages) : messages_(messages) {}

  Status run() {
    size_t i = 0;
    while (i < messages_->size()) {
      Message& message = (*messages_)[i];
      if (message.role == "assistant") {
        calls_ = message.tool_calls.empty() ? nullptr : &message.tool_calls;
        usable_ = calls_ != nullptr && ids_differ(*calls_);
        answered_ = 0;
      }
      if (message.role != "tool") {
        ++i;
        continue;
      }
      if (calls_ == nullptr) {
        return invalid(fmt::format(
            "messages[{}]: a tool message needs an assistant message with tool_calls before it, and none without in "
            "between",
            i));
      }
      size_t end = i;
      while (end < messages_->size() && (*messages_)[end].role == "tool") ++end;
      FIRN_TRY(order(i, end));
      i = end;
    }
    return {};
  }

 private:
  static bool ids_differ(const std::vector<ToolCall>& calls) {
    std::vector<std::string> ids;
    for (const ToolCall& call : calls) ids.push_back(call.id);
    std::sort(ids.begin(), ids.end());
    return !ids.front().empty() && std::adjacent_find(ids.begin(), ids.end()) == ids.end();
  }

  Status order(size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) usable_ = usable_ && !(*messages_)[i].tool_call_id.empty();
    if (!usable_) return {};
    std::vector<std::pair<size_t, size_t>> places;  // call, message
    for (size_t i = begin; i < end; ++i) {
      const std::string& id = (*messages_)[i].tool_call_id;
      const auto call = std::find_if(calls_->begin(), calls_->end(), [&](const ToolCall& c) { return c.id == id; });
      if (call == calls_->end()) {
        return invalid(
            fmt::format("messages[{}].tool_call_id: expected the id of a call of the assistant message "
                        "before it, found {}",
                        i, quoted(id)));
      }
      places.emplace_back(static_cast<size_t>(call - calls_->begin()), i);
    }
    std::sort(places.begin(), places.end());
    std::vector<Message> sorted;
    for (const auto& [call, at] : places) {
      if (call < answered_) {
        return invalid(fmt::format("messages[{}].tool_call_id: call {} already has a result", at,
                                   quoted((*messages_)[at].tool_call_id)));
      }
      if (call > answered_) {
        return invalid(
            fmt::format("messages[{}]: the result of call {} is missing before it; results are matched to "
                        "calls by their order, so send one for each call",
                        at, quoted((*calls_)[answered_].id)));
      }
      ++answered_;
      sorted.push_back(std::move((*messages_)[at]));
    }
    std::move(sorted.begin(), sorted.end(), messages_->begin() + static_cast<std::ptrdiff_t>(begin));
    return {};
  }

  std::vector<Message>* messages_;
  const std::vector<ToolCall>* calls_ = nullptr;
  bool usable_ = false;
  size_t answered_ = 0;  // calls of the turn with a result so far
};

Status parse_message_list(const Json& list, std::vector<Message>* out) {
  if (list.kind != Kind::kArray) return wrong("messages", "a list of messages", &list);
  bool leading = true;
  for (size_t i = 0; i < list.items.size(); ++i) {
    const std::string where = fmt::format("messages[{}]", i);
    FIRN_ASSIGN(Message message, parse_message(list.items[i], where));
    const bool lead = is_lead(message.role);
    if ((message.role == "root" && i > 0) || (lead && !leading)) {
      return invalid(
          fmt::format("{}: a {} message must stand at the start of the list (root first, then system or "
                      "developer); the model would never see it here. Move it to the start or send it as user",
                      where, message.role));
    }
    leading = leading && (lead || message.role == "root");
    if (lead && !out->empty()) {
      // Several at the start are one, a blank line between those that say anything.
      std::vector<Part>& first = out->back().content;
      if (is_lead(out->back().role)) {
        if (!first.empty() && !message.content.empty()) first.push_back({Part::Kind::kText, "\n\n"});
        std::move(message.content.begin(), message.content.end(), std::back_inserter(first));
        continue;
      }
    }
    out->push_back(std::move(message));
  }
  return {};
}

Status parse_tools(const Json& tools, std::vector<Json>* out) {
  if (tools.kind != Kind::kArray) return wrong("tools", "a list", &tools);
  for (size_t i = 0; i < tools.items.size(); ++i) {
    const std::string where = fmt::format("tools[{}]", i);
    const Json& tool = tools.items[i];
    if (tool.kind != Kind::kObject) return wrong(where, "an object", &tool);
    const Json* type = given(tool, "type");
    if (type != nullptr && !(is_string(type) && type->text == "function")) {
      return wrong(where + ".type", "'function'", type);
    }
    const Json* function = given(tool, "function");
    if (function == nullptr || function->kind != Kind::kObject) {
      return wrong(where + ".function", "an object with name, description and parameters", function);
    }
    const Json* name = function->find("name");
    if (!is_string(name) || name->text.empty()) return wrong(where + ".function.name", "a name", name);
    if (name->text.find_first_of("\"<>") != std::string::npos) {
      return wrong(where + ".function.name", "a name without quotes and angle brackets", name);
    }
    out->push_back(*function);
  }
  return {};
}

}  // namespace

Result<Thinking> parse_thinking(std::string_view mode) {
  if (mode == "adaptive") return Thinking::kAdaptive;
  if (mode == "enabled") return Thinking::kEnabled;
  if (mode == "disabled") return Thinking::kDisabled;
  return invalid(
      fmt::format("thinking_mode: expected enabled, disabled or adaptive, found {}", quoted(std::string(mode))));
}

bool Conversation::has_media() const {
  for (const Message& message : messages) {
    for (const Part& part : message.content) {
      if (part.kind != Part::Kind::kText) return true;
    }
  }
  return false;
}

Result<Conversation> parse_conversation(const Json& json) {
  Conversation conversation;
  if (json.kind != Kind::kObject) {
    FIRN_TRY(parse_message_list(json, &conversation.messages));
    FIRN_TRY(ResultOrder(&conversation.messages).run());
    return conversation;
  }
  const Json* messages = json.find("messages");
  if (messages == nullptr) return wrong("messages", "a list of messages", nullptr);
  FIRN_TRY(parse_message_list(*messages, &conversation.messages));
  FIRN_TRY(ResultOrder(&conversation.messages).run());
  if (const Json* tools = given(json, "tools")) FIRN_TRY(parse_tools(*tools, &conversation.tools));
  if (const Json* mode = given(json, "thinking_mode")) {
    if (mode->kind != Kind::kString) return wrong("thinking_mode", "enabled, disabled or adaptive", mode);
    FIRN_ASSIGN(conversation.thinking, parse_thinking(mode->text));
  }
  if (const Json* identity = given(json, "model_identity")) {
    if (identity->kind != Kind::kString) return wrong("model_identity", "a string", identity);
    conversation.model_identity = identity->text;
  }
  if (const Json* prompt = given(json, "add_generation_prompt")) {
    if (prompt->kind != Kind::kBool) return wrong("add_generation_prompt", "true or false", prompt);
    conversation.add_generation_prompt = prompt->boolean;
  }
  return conversation;
}

}  // namespace firn::model
