// The state machine behind stream_parser.h. Tags of a tool block are tool_parser.h's part.
//
// Rules (those the output needs; the start state is the request's):
// - enabled starts inside reasoning. One opening tag there repeats the prefill and is dropped.
// - otherwise the first thing but blanks decides: an opening tag starts reasoning, one bare closing tag is dropped.
// - reasoning may open again later and nests; a stray closing tag in content is shown.
// - newlines between a closing tag and the first content are dropped, blanks before a tool block too.
// - after a tool block only another block or reasoning counts; other text is dropped.
#include "model/stream_parser.h"

#include <algorithm>

#include "model/tool_parser.h"

namespace firn::model {
namespace {

constexpr std::string_view kOpen = "<mm:think>";
constexpr std::string_view kClose = "</mm:think>";
constexpr std::string_view kBlanks = " \t\r\n";

enum class Match : uint8_t { kNo, kPartial, kYes };

Match match(std::string_view text, std::string_view tag) {
  const size_t common = std::min(text.size(), tag.size());
  if (text.substr(0, common) != tag.substr(0, common)) return Match::kNo;
  return common == tag.size() ? Match::kYes : Match::kPartial;
}

bool is_blank(char c) { return kBlanks.find(c) != std::string_view::npos; }

}  // namespace

struct StreamParser::State {
  enum class Mode : uint8_t { kStart, kContent, kReasoning, kBlock, kAfter, kEnded };

  State(Thinking thinking, std::vector<Json> tool_list)
      : mode(thinking == Thinking::kEnabled ? Mode::kReasoning : Mode::kStart),
        depth(thinking == Thinking::kEnabled ? 1 : 0),
        lead(thinking == Thinking::kEnabled),
        tools(std::move(tool_list)),
        block(&tools) {}

  Mode mode;
  int64_t depth;               // opening tags of reasoning not yet closed
  bool lead;                   // enabled, and nothing but blanks so far
  bool content_seen = false;   // content was given out
  bool drop_newlines = false;  // directly behind a closing tag
  bool after_block = false;    // a block was closed: content is over
  std::string blanks;          // content held back: dropped if a tool block follows
  std::string tail;            // bytes of an incomplete UTF-8 character
  std::string text;            // not read yet
  size_t at = 0;               // into text
  int64_t replaced = 0;        // broken UTF-8 parts that became U+FFFD
  int64_t calls = 0;
  std::string unfinished;
  Status status;
  std::vector<StreamEvent> events;
  const std::vector<Json> tools;
  ToolBlockParser block;

  std::string_view rest() const { return std::string_view(text).substr(at); }

  void emit(StreamEvent::Kind kind, std::string_view piece) {
    if (piece.empty()) return;
    if (events.empty() || events.back().kind != kind) {
      events.emplace_back();
      events.back().kind = kind;
    }
    events.back().text += piece;
  }

  void content(std::string_view piece) {
    if (piece.empty()) return;
    emit(StreamEvent::Kind::kContent, blanks);
    emit(StreamEvent::Kind::kContent, piece);
    blanks.clear();
    content_seen = true;
    drop_newlines = false;
  }

  void reasoning(std::string_view piece) {
    emit(StreamEvent::Kind::kReasoning, piece);
    lead = lead && piece.find_first_not_of(kBlanks) == std::string_view::npos;
  }

  // Takes text up to the next of `stops` for `use`; false at the end of the text.
  template <typename Use>
  bool upto(std::string_view stops, const Use& use) {
    const size_t stop = std::min(text.find_first_of(stops, at), text.size());
    use(std::string_view(text).substr(at, stop - at));
    at = stop;
    return at < text.size();
  }

  // Each step reads something and returns true, or returns false because what follows depends on more text.
  bool step_start() {
    while (at < text.size() && is_blank(text[at])) blanks += text[at++];
    if (at == text.size()) return false;
    const Match open = match(rest(), kOpen);
    const Match close = match(rest(), kClose);
    if (open == Match::kPartial || close == Match::kPartial) return false;
    if (open == Match::kNo && close == Match::kNo) {
      mode = Mode::kContent;
      return true;
    }
    blanks.clear();
    at += open == Match::kYes ? kOpen.size() : kClose.size();
    open == Match::kYes ? begin_reasoning() : begin_content();
    return true;
  }

  void begin_reasoning() {
    mode = Mode::kReasoning;
    depth = 1;
  }

  void begin_content() {
    mode = after_block ? Mode::kAfter : Mode::kContent;
    drop_newlines = !content_seen;
  }

  bool step_content() {
    while (drop_newlines && at < text.size() && text[at] == '\n') ++at;
    if (at < text.size()) drop_newlines = false;
    if (!upto("<] \t\r\n", [&](std::string_view piece) { content(piece); })) return false;
    if (is_blank(text[at])) {
      blanks += text[at++];
      return true;
    }
    return step_tag([&](std::string_view piece) { content(piece); });
  }

  bool step_after() {
    auto drop = [](std::string_view) {};
    return upto("<]", drop) && step_tag(drop);
  }

  // At '<' or ']' outside of reasoning and blocks.
  template <typename Use>
  bool step_tag(const Use& use) {
    if (text[at] == '<') {
      const Match open = match(rest(), kOpen);
      if (open == Match::kPartial) return false;
      if (open == Match::kYes) {
        emit(StreamEvent::Kind::kContent, blanks);
        blanks.clear();
        at += kOpen.size();
        begin_reasoning();
        return true;
      }
    } else {
      const ToolTag tag = read_tool_tag(rest());
      if (tag.kind == ToolTag::Kind::kPartial && may_open_block()) return false;
      if (tag.kind == ToolTag::Kind::kTag && tag.body == kToolCallTag) {
        blanks.clear();
        block.open(rest().substr(0, tag.length));
        at += tag.length;
        mode = Mode::kBlock;
        return true;
      }
    }
    use(rest().substr(0, 1));
    ++at;
    return true;
  }

  // Whether the partial tag at `at` can still become the opening tag, so that no longer one is held back.
  bool may_open_block() const {
    const size_t angle = rest().size() > kToolNs.size() ? text.find('<', at + kToolNs.size()) : std::string::npos;
    if (angle == std::string::npos) return true;
    return match(std::string_view(text).substr(angle + 1), kToolCallTag) != Match::kNo;
  }

  bool step_reasoning() {
    if (!upto("<", [&](std::string_view piece) { reasoning(piece); })) return false;
    const Match open = match(rest(), kOpen);
    const Match close = match(rest(), kClose);
    if (open == Match::kPartial || close == Match::kPartial) return false;
    if (close == Match::kYes && depth == 1) {
      depth = 0;
      at += kClose.size();
      begin_content();
      return true;
    }
    if (open == Match::kYes && lead) {
      lead = false;
      at += kOpen.size();
      return true;
    }
    depth += open == Match::kYes ? 1 : close == Match::kYes ? -1 : 0;
    const size_t length = open == Match::kYes ? kOpen.size() : close == Match::kYes ? kClose.size() : 1;
    reasoning(rest().substr(0, length));
    at += length;
    return true;
  }

  bool step_block() {
    std::vector<ToolCall> found;
    at += block.consume(rest(), &found);
    for (ToolCall& call : found) {
      events.push_back({StreamEvent::Kind::kToolCall, "", std::move(call)});
      ++calls;
    }
    if (block.too_deep()) {
      status = invalid("the model's tool call is nested more than 128 levels deep; what follows in it was not read");
      unfinished = block.raw();
      mode = Mode::kEnded;
      return true;
    }
    if (!block.done()) return false;
    after_block = true;
    mode = Mode::kAfter;
    return true;
  }

  bool step() {
    switch (mode) {
      case Mode::kStart:
        return step_start();
      case Mode::kContent:
        return step_content();
      case Mode::kReasoning:
        return step_reasoning();
      case Mode::kBlock:
        return step_block();
      case Mode::kAfter:
        return step_after();
      case Mode::kEnded:
        at = text.size();
        return false;
    }
    return false;
  }

  void run() {
    while (at < text.size() && step()) {
    }
    text.erase(0, at);
    at = 0;
  }

  // What is still held back is no tag any more.
  void finish() {
    text += sanitize_utf8(tail, &replaced);
    tail.clear();
    run();
    if (mode == Mode::kStart) mode = Mode::kContent;
    while (mode != Mode::kBlock && mode != Mode::kEnded && at < text.size()) {
      const std::string_view held = rest();
      if (mode == Mode::kReasoning) {
        reasoning(held.substr(0, 1));
      } else if (mode == Mode::kContent) {
        // A block's opening tag cut off behind its token was not meant to be read.
        if (match(held, kToolNs) == Match::kYes) {
          unfinished = held;
          blanks.clear();
          text.clear();
          at = 0;
          break;
        }
        content(held.substr(0, 1));
      }
      ++at;
      run();
    }
    if (mode == Mode::kBlock) {
      unfinished = block.raw() + std::string(rest());
      if (unfinished.find_first_not_of(kBlanks) == std::string::npos) unfinished.clear();
    }
    emit(StreamEvent::Kind::kContent, blanks);
    blanks.clear();
    text.clear();
    at = 0;
  }
};

StreamParser::StreamParser(Thinking thinking, std::vector<Json> tools)
    : state_(std::make_unique<State>(thinking, std::move(tools))) {}
StreamParser::~StreamParser() = default;
StreamParser::StreamParser(StreamParser&&) noexcept = default;

std::vector<StreamEvent> StreamParser::feed(std::string_view bytes) {
  State& s = *state_;
  s.events.clear();
  s.tail += bytes;
  const size_t whole = utf8_complete_prefix(s.tail);
  s.text += sanitize_utf8(std::string_view(s.tail).substr(0, whole), &s.replaced);
  s.tail.erase(0, whole);
  s.run();
  return std::move(s.events);
}

std::vector<StreamEvent> StreamParser::finish() {
  state_->events.clear();
  state_->finish();
  return std::move(state_->events);
}

bool StreamParser::inside_reasoning() const { return state_->mode == State::Mode::kReasoning; }
bool StreamParser::in_tool_block() const { return state_->mode == State::Mode::kBlock; }
int64_t StreamParser::calls() const { return state_->calls; }
const std::string& StreamParser::raw_unfinished() const { return state_->unfinished; }
const Status& StreamParser::status() const { return state_->status; }

}  // namespace firn::model
