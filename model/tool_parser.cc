// The structure of a tool block; types are tool_types.cc's part.
#include "model/tool_parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

namespace firn::model {
namespace {

constexpr size_t kMaxDepth = 128;
constexpr size_t kMaxGap = 64;    // blanks between the token and '<'
constexpr size_t kMaxTag = 2048;  // bytes of a tag's inside; beyond it the text is no tag, so hold-back stays bounded

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// The function's name in `invoke name="f"`, quotes double, single or none; false if it is something else.
bool read_invoke(std::string_view body, std::string* name) {
  auto skip = [&] {
    while (!body.empty() && is_blank(body.front())) body.remove_prefix(1);
  };
  auto take = [&](std::string_view word) {
    if (body.substr(0, word.size()) != word) return false;
    body.remove_prefix(word.size());
    skip();
    return true;
  };
  if (!take("invoke") || !take("name") || !take("=")) return false;
  while (!body.empty() && is_blank(body.back())) body.remove_suffix(1);
  if (body.size() >= 2 && (body.front() == '"' || body.front() == '\'') && body.back() == body.front()) {
    body.remove_prefix(1);
    body.remove_suffix(1);
  }
  *name = body;
  return !body.empty();
}

// Unique over a conversation that may hold calls of other servers, so random rather than counted.
std::string new_call_id() {
  std::random_device random;
  std::string id = "call_";
  for (int i = 0; i < 3; ++i) id += fmt::format("{:08x}", random());
  return id;
}

}  // namespace

ToolTag read_tool_tag(std::string_view text) {
  const ToolTag partial{ToolTag::Kind::kPartial, 0, {}};
  const size_t common = std::min(text.size(), kToolNs.size());
  if (text.substr(0, common) != kToolNs.substr(0, common)) return {};
  if (text.size() <= kToolNs.size()) return partial;
  size_t at = kToolNs.size();
  while (at < text.size() && is_blank(text[at])) ++at;
  if (at - kToolNs.size() > kMaxGap) return {};
  if (at == text.size()) return partial;
  if (text[at] != '<') return {};
  const size_t begin = at + 1;
  const std::string_view inside = text.substr(begin, kMaxTag + 1);
  const size_t end = inside.find('>');
  const std::string_view body = inside.substr(0, end);
  // The token itself holds a '>': a tag that another token interrupts is text.
  if (body.find(kToolNs.substr(0, kToolNs.find('>'))) != std::string_view::npos) return {};
  if (end == std::string_view::npos) return inside.size() > kMaxTag ? ToolTag{} : partial;
  return {ToolTag::Kind::kTag, begin + end + 1, body};
}

void ToolBlockParser::open(std::string_view opening_tag) {
  raw_ = opening_tag;
  open_.clear();
  done_ = false;
}

size_t ToolBlockParser::consume(std::string_view all, std::vector<ToolCall>* calls) {
  size_t at = 0;
  while (at < all.size() && !done_ && !too_deep_) {
    const size_t bracket = std::min(all.find(kToolNs.front(), at), all.size());
    text(all.substr(at, bracket - at));
    at = bracket;
    if (at == all.size()) break;
    const ToolTag found = read_tool_tag(all.substr(at));
    if (found.kind == ToolTag::Kind::kPartial) break;
    if (found.kind == ToolTag::Kind::kNone) {
      text(all.substr(at, 1));
      ++at;
      continue;
    }
    tag(all.substr(at, found.length), found.body, calls);
    at += found.length;
  }
  return at;
}

void ToolBlockParser::text(std::string_view text) {
  if (raw_.empty()) {  // between calls
    while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
  }
  raw_ += text;
  if (!open_.empty()) open_.back().node.text += text;
}

void ToolBlockParser::tag(std::string_view whole, std::string_view body, std::vector<ToolCall>* calls) {
  if (open_.empty()) {
    raw_ += whole;
    done_ = body == "/tool_call";
    if (!done_) begin_call(body);
    return;
  }
  Open& top = open_.back();
  const bool closing = !body.empty() && body.front() == '/';
  const bool own = open_.size() > 1 && body.substr(closing ? 1 : 0) == top.node.key;
  if (top.text_only && own) top.nested += closing ? -1 : 1;
  if (closing && own && (!top.text_only || top.nested < 0)) {
    close_element();
    raw_ += whole;
  } else if (closing && open_.size() == 1 && body == "/invoke") {
    raw_ += whole;
    end_call(calls);
  } else if (closing || top.text_only) {
    text(whole);
  } else {
    raw_ += whole;
    open_element(body);
  }
}

void ToolBlockParser::begin_call(std::string_view body) {
  if (!read_invoke(body, &name_)) return;
  parameters_ = nullptr;
  for (const Json& tool : *tools_) {
    const Json* name = tool.find("name");
    if (name != nullptr && name->text == name_) parameters_ = tool.find("parameters");
  }
  open_.emplace_back();
  open_.back().schema = parameters_;
}

void ToolBlockParser::end_call(std::vector<ToolCall>* calls) {
  ToolCall call;
  call.id = new_call_id();
  call.name = name_;
  call.arguments = typed_arguments(open_.front().node, parameters_, raw_);
  calls->push_back(std::move(call));
  open_.clear();
  raw_.clear();
}

void ToolBlockParser::open_element(std::string_view key) {
  if (open_.size() > kMaxDepth) {
    too_deep_ = true;
    return;
  }
  Open element;
  element.node.key = key;
  element.node.raw_begin = raw_.size();
  element.schema = child_schema(open_.back().schema, parameters_, key);
  element.text_only = is_text_schema(element.schema, parameters_);
  open_.push_back(std::move(element));
}

void ToolBlockParser::close_element() {
  ArgumentNode node = std::move(open_.back().node);
  node.raw_end = raw_.size();
  open_.pop_back();
  open_.back().node.children.push_back(std::move(node));
}

}  // namespace firn::model
