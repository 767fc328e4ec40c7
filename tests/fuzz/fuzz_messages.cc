// Fuzzes what comes from outside as text: JSON, message lists, and the model's output.
//
// Byte 0 picks the thinking mode and how the output is cut; the rest is taken as a message list and as model output.
// Beyond not crashing: JSON that was read writes text that reads back to the same, an accepted conversation renders,
// and two cuts of the output give the same reasoning, content and calls.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "model/chat.h"
#include "model/stream_parser.h"

namespace {

using firn::model::Json;
using firn::model::StreamEvent;

void require(bool condition, const char* what) { FIRN_CHECK(condition, what); }

struct Output {
  std::string reasoning, content, calls, raw;
  bool ok = true;
  bool operator==(const Output&) const = default;
};

Output parse_output(firn::model::Thinking thinking, const std::vector<Json>& tools, std::string_view text, size_t cut) {
  firn::model::StreamParser parser(thinking, tools);
  Output out;
  auto absorb = [&](const std::vector<StreamEvent>& events) {
    for (const StreamEvent& event : events) {
      switch (event.kind) {
        case StreamEvent::Kind::kReasoning:
          out.reasoning += event.text;
          break;
        case StreamEvent::Kind::kContent:
          out.content += event.text;
          break;
        case StreamEvent::Kind::kToolCall:
          out.calls += event.call.name + event.call.arguments.dump() + "\n";
          require(firn::model::parse_json(event.call.arguments.dump()).ok(), "arguments are not JSON");
          break;
      }
    }
  };
  for (size_t at = 0; at < text.size(); at += cut) absorb(parser.feed(text.substr(at, cut)));
  absorb(parser.finish());
  out.raw = parser.raw_unfinished();
  out.ok = parser.status().ok();
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto thinking = static_cast<firn::model::Thinking>(data[0] % 3);
  std::vector<Json> tools;
  if (auto json = firn::model::parse_json(text); json.ok()) {
    const std::string written = json->dump();
    auto again = firn::model::parse_json(written);
    require(again.ok() && again->dump() == written, "JSON does not read back");
    if (auto conversation = firn::model::parse_conversation(*json); conversation.ok()) {
      auto pieces = firn::model::render(*conversation);
      require(pieces.ok(), "an accepted conversation does not render");
      tools = conversation->tools;
      const std::string prompt = join(*pieces);
      require(parse_output(thinking, tools, prompt, prompt.size()) == parse_output(thinking, tools, prompt, 5),
              "a cut of a rendered prompt changes the result");
    }
  }
  if (auto schema = firn::model::parse_json(
          R"({"name": "f", "parameters": {"properties": {"s": {"type": "string"}, "l": {"type": "array"}}}})");
      schema.ok()) {
    tools.push_back(std::move(schema).value());
  }
  const Output whole = parse_output(thinking, tools, text, text.size() + 1);
  require(parse_output(thinking, tools, text, 1) == whole, "one byte at a time changes the result");
  require(parse_output(thinking, tools, text, 1 + data[0] / 3 % 16) == whole, "a cut changes the result");
  return 0;
}
