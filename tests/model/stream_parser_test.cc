// The output stream: think tags by mode, tool calls and their types, and that no cut of the stream changes anything.
#include "model/stream_parser.h"

#include <algorithm>
#include <random>
#include <string>
#include <utility>

#include "model/tokenizer.h"
#include "storage/file.h"
#include "tests/support/catch.h"

namespace firn::model {
namespace {

const std::string kNs = "]<]minimax[>[";

struct Output {
  std::string reasoning;
  std::string content;
  std::vector<std::pair<std::string, std::string>> calls;  // name, arguments as JSON
  std::string raw;
  bool ok = true;
  bool in_reasoning = false;
  bool in_block = false;
  bool operator==(const Output&) const = default;
};

bool valid_utf8(const std::string& text) {
  int64_t replaced = 0;
  return sanitize_utf8(text, &replaced) == text && replaced == 0;
}

void absorb(std::vector<StreamEvent> events, Output* out) {
  for (StreamEvent& event : events) {
    if (event.kind == StreamEvent::Kind::kToolCall) {
      CHECK(event.call.id.size() > 20);
      out->calls.emplace_back(event.call.name, event.call.arguments.dump());
      continue;
    }
    CHECK(!event.text.empty());
    CHECK(valid_utf8(event.text));
    (event.kind == StreamEvent::Kind::kReasoning ? out->reasoning : out->content) += event.text;
  }
}

Json tool(const std::string& parameters) {
  auto json = parse_json(R"({"name": "f", "parameters": )" + parameters + "}");
  INFO(parameters);
  REQUIRE(json.ok());
  return std::move(*json);
}

// `cuts(left)` gives the size of the next piece.
template <typename Cuts>
Output parse_cut(Thinking thinking, const std::vector<Json>& tools, const std::string& text, Cuts cuts) {
  StreamParser parser(thinking, tools);
  Output out;
  for (size_t at = 0; at < text.size();) {
    const size_t n = std::min<size_t>(cuts(), text.size() - at);
    absorb(parser.feed(std::string_view(text).substr(at, n)), &out);
    at += n;
  }
  out.in_reasoning = parser.inside_reasoning();
  out.in_block = parser.in_tool_block();
  absorb(parser.finish(), &out);
  CHECK(parser.calls() == static_cast<int64_t>(out.calls.size()));
  out.raw = parser.raw_unfinished();
  out.ok = parser.status().ok();
  return out;
}

// All at once; also in every other cut, with the same result.
Output parse(Thinking thinking, const std::string& text, const std::vector<Json>& tools = {}) {
  const Output whole = parse_cut(thinking, tools, text, [&] { return text.size(); });
  INFO(text);
  for (size_t n : {1, 2, 3, 7, 64}) {
    INFO("cut every " << n);
    CHECK(parse_cut(thinking, tools, text, [&] { return n; }) == whole);
  }
  for (unsigned seed = 0; seed < 4; ++seed) {
    std::mt19937 random(seed);
    CHECK(parse_cut(thinking, tools, text, [&] { return 1 + random() % 20; }) == whole);
  }
  return whole;
}

std::string element(const std::string& key, const std::string& value) {
  return kNs + "<" + key + ">" + value + kNs + "</" + key + ">";
}
std::string invoke(const std::string& name, const std::string& inside) {
  return kNs + "<invoke name=\"" + name + "\">" + inside + kNs + "</invoke>\n";
}
std::string block(const std::string& inside) { return kNs + "<tool_call>\n" + inside + kNs + "</tool_call>"; }

// The arguments of one call to f, as JSON; "" if there was not exactly one call.
std::string arguments(const std::string& inside, const std::string& schema = "{}") {
  const Output out = parse(Thinking::kDisabled, block(invoke("f", inside)), {tool(schema)});
  CHECK(out.content.empty());
  CHECK(out.raw.empty());
  return out.calls.size() == 1 ? out.calls[0].second : "";
}

// The value of argument "v" under a schema.
std::string typed(const std::string& text, const std::string& schema) {
  const std::string all = arguments(element("v", text), R"({"type": "object", "properties": {"v": )" + schema + "}}");
  REQUIRE(all.size() > 7);
  return all.substr(6, all.size() - 7);
}

TEST_CASE("reasoning and content by mode") {
  Output out = parse(Thinking::kEnabled, "why\n</mm:think>\n\nbecause");
  CHECK(out.reasoning == "why\n");
  CHECK(out.content == "because");

  out = parse(Thinking::kEnabled, "<mm:think>why</mm:think>because");
  CHECK(out.reasoning == "why");
  CHECK(out.content == "because");

  out = parse(Thinking::kEnabled, "</mm:think>because");
  CHECK(out.reasoning.empty());
  CHECK(out.content == "because");

  out = parse(Thinking::kEnabled, "only thought");
  CHECK(out.reasoning == "only thought");
  CHECK(out.content.empty());
  CHECK(out.in_reasoning);

  out = parse(Thinking::kAdaptive, "<mm:think>why</mm:think>because");
  CHECK(out.reasoning == "why");
  CHECK(out.content == "because");
  CHECK(!out.in_reasoning);

  for (Thinking thinking : {Thinking::kAdaptive, Thinking::kDisabled}) {
    out = parse(thinking, "</mm:think>because");
    CHECK(out.reasoning.empty());
    CHECK(out.content == "because");
    out = parse(thinking, " \n</mm:think>\nbecause");
    CHECK(out.content == "because");
    out = parse(thinking, "\n plain <b> text </mm:thin ]<] \n");
    CHECK(out.content == "\n plain <b> text </mm:thin ]<] \n");
    CHECK(out.reasoning.empty());
    out = parse(thinking, "");
    CHECK(out.content.empty());
    out = parse(thinking, " \n");
    CHECK(out.content == " \n");
  }
}

TEST_CASE("only the first bare closing tag is dropped; reasoning may open again and nests") {
  Output out = parse(Thinking::kAdaptive, "</mm:think>a</mm:think>b");
  CHECK(out.content == "a</mm:think>b");
  out = parse(Thinking::kAdaptive, "a\n<mm:think>why</mm:think>\nb");
  CHECK(out.reasoning == "why");
  CHECK(out.content == "a\n\nb");
  out = parse(Thinking::kAdaptive, "<mm:think>a<mm:think>b</mm:think>c</mm:think>d");
  CHECK(out.reasoning == "a<mm:think>b</mm:think>c");
  CHECK(out.content == "d");
  out = parse(Thinking::kAdaptive, "x <mm:think>unclosed");
  CHECK(out.content == "x ");
  CHECK(out.in_reasoning);
}

TEST_CASE("parts of tags at the end of the output are given out") {
  CHECK(parse(Thinking::kAdaptive, "a <mm:thi").content == "a <mm:thi");
  CHECK(parse(Thinking::kAdaptive, "<mm:thi").content == "<mm:thi");
  CHECK(parse(Thinking::kEnabled, "a</mm:think").reasoning == "a</mm:think");
  CHECK(parse(Thinking::kAdaptive, "a ]<]mini").content == "a ]<]mini");
  // Behind the whole token it was a tool block: never shown, but kept.
  const Output out = parse(Thinking::kAdaptive, "a\n" + kNs + "<tool_c");
  CHECK(out.content == "a");
  CHECK(out.raw == kNs + "<tool_c");
}

TEST_CASE("broken UTF-8 becomes U+FFFD wherever it is cut") {
  CHECK(parse(Thinking::kAdaptive, "a\xF0\x9F\x98\x80 \xE2\x82 b\xFF").content ==
        "a\xF0\x9F\x98\x80 \xEF\xBF\xBD b\xEF\xBF\xBD");
  CHECK(parse(Thinking::kEnabled, "\xF0\x9F").reasoning == "\xEF\xBF\xBD");
}

TEST_CASE("content, a block of two calls, text after it") {
  const std::string text =
      "<mm:think>Look.</mm:think>\nI check. \n" +
      block(invoke("f", element("city", "Paris") + element("days", element("item", "1") + element("item", "2"))) +
            "\n" + invoke("g", "")) +
      "\nignored " + kNs + "<x> text";
  const Output out = parse(Thinking::kAdaptive, text);
  CHECK(out.reasoning == "Look.");
  CHECK(out.content == "I check.");
  REQUIRE(out.calls.size() == 2);
  CHECK(out.calls[0] == std::make_pair(std::string("f"), std::string(R"({"city": "Paris", "days": [1, 2]})")));
  CHECK(out.calls[1] == std::make_pair(std::string("g"), std::string("{}")));
  CHECK(!out.in_block);
  // A second block counts, and reasoning between the two.
  const Output two = parse(Thinking::kAdaptive, text + "<mm:think>More.</mm:think>lost" + block(invoke("h", "")));
  CHECK(two.calls.size() == 3);
  CHECK(two.reasoning == "Look.More.");
  CHECK(two.content == "I check.");
}

TEST_CASE("spellings of tags that count, and those that do not") {
  const std::string gap = kNs + " \n<tool_call>" + kNs + "\t<invoke name='f' >" + kNs + " <a>1" + kNs + " </a>" + kNs +
                          " </invoke>" + kNs + " </tool_call>";
  Output out = parse(Thinking::kDisabled, gap);
  REQUIRE(out.calls.size() == 1);
  CHECK(out.calls[0] == std::make_pair(std::string("f"), std::string(R"({"a": 1})")));
  out = parse(Thinking::kDisabled,
              kNs + "<tool_call>" + kNs + "<invoke name=f>" + kNs + "</invoke>" + kNs + "</tool_call>");
  REQUIRE(out.calls.size() == 1);
  CHECK(out.calls[0].first == "f");
  const std::string plain =
      "<tool_call><invoke name=\"f\"></invoke></tool_call> " + kNs + " " + kNs + "<invoke name=\"f\">";
  out = parse(Thinking::kDisabled, plain);
  CHECK(out.content == plain);
  CHECK(out.calls.empty());
  // In reasoning nothing opens a block.
  out = parse(Thinking::kEnabled, block(invoke("f", "")));
  CHECK(out.calls.empty());
  CHECK(out.reasoning == block(invoke("f", "")));
}

TEST_CASE("values are the bytes the model wrote") {
  const std::string schema = R"({"properties": {"content": {"type": "string"}, "free": {}}})";
  for (const std::string& value :
       {std::string("</parameter></invoke></tool_call><item></content>"), std::string("&lt;&amp;<![CDATA[x]]>"),
        std::string("\n\nlines\n"), std::string("   "), std::string(), std::string("]<]"), std::string("]<]minimax[>"),
        std::string("<mm:think>x</mm:think>"), std::string("a\0b", 3), std::string("<a>1</a>"), kNs, kNs + kNs + " <",
        kNs + "</x>", std::string("\xE2\x82\xAC]")}) {
    INFO(value);
    Json expected;
    expected.kind = Json::Kind::kString;
    expected.text = value;
    CHECK(arguments(element("content", value), schema) == "{\"content\": " + expected.dump() + "}");
    CHECK(arguments(element("free", value), schema) == "{\"free\": " + expected.dump() + "}");
  }
  // A text argument keeps whole calls, its own name nested included.
  const std::string call = block(invoke("g", element("p", "1") + element("content", "in")));
  Json expected;
  expected.kind = Json::Kind::kString;
  expected.text = call;
  CHECK(arguments(element("content", call), schema) == "{\"content\": " + expected.dump() + "}");
}

TEST_CASE("the declared type wins, and what does not convert stays text") {
  for (const char* text : {"3", "02134", "1e5", "true", "null", "none", "[1]", "{}", " 1 "}) {
    INFO(text);
    CHECK(typed(text, R"({"type": "string"})") == "\"" + std::string(text) + "\"");
  }
  const std::string integer = R"({"type": "integer"})";
  CHECK(typed("5", integer) == "5");
  CHECK(typed("3.0", integer) == "3");
  CHECK(typed("1e3", integer) == "1000");
  CHECK(typed("12.50e1", integer) == "125");
  CHECK(typed("-0.0", integer) == "0");
  CHECK(typed("007", integer) == "7");
  CHECK(typed(" -8\n", integer) == "-8");
  CHECK(typed("9007199254740993", integer) == "9007199254740993");
  CHECK(typed("-123456789012345678901234567890", integer) == "-123456789012345678901234567890");
  for (const char* text : {"abc", "5.5", "1e-3", "", "1e999999", "--1", "0x10", "NaN"}) {
    INFO(text);
    CHECK(typed(text, integer) == "\"" + std::string(text) + "\"");
  }
  const std::string number = R"({"type": "number"})";
  CHECK(typed("1.50", number) == "1.5");
  CHECK(typed("1e5", number) == "100000.0");
  CHECK(typed("7", number) == "7");
  CHECK(typed("NaN", number) == "\"NaN\"");
  CHECK(typed("1e999", number) == "\"1e999\"");
  const std::string boolean = R"({"type": "boolean"})";
  CHECK(typed("true", boolean) == "true");
  CHECK(typed("TRUE", boolean) == "true");
  CHECK(typed("0", boolean) == "false");
  CHECK(typed("yes", boolean) == "\"yes\"");
  CHECK(typed("null", R"({"type": "null"})") == "null");
  CHECK(typed("none", R"({"type": ["integer", "null"]})") == "\"none\"");
  CHECK(typed("NULL", R"({"type": ["integer", "null"]})") == "null");
  CHECK(typed("4", R"({"type": ["string", "integer"]})") == "4");
  CHECK(typed("04a", R"({"type": ["string", "integer"]})") == "\"04a\"");
  CHECK(typed("4", R"({"anyOf": [{"type": "integer"}, {"type": "null"}]})") == "4");
  CHECK(typed("null", R"({"oneOf": [{"type": "integer"}, {"type": "null"}]})") == "null");
  CHECK(typed("null", R"({"enum": ["null", "none"]})") == "\"null\"");
  CHECK(typed("2", R"({"enum": [1, 2, "x"]})") == "2");
  CHECK(typed("1", R"({"enum": ["1", "2"]})") == "\"1\"");
  CHECK(typed("[1, 2]", R"({"type": "array"})") == "[1, 2]");
  CHECK(typed("one", R"({"type": "array"})") == "\"one\"");
  CHECK(typed(R"({"a": 1.0})", R"({"type": "object"})") == R"({"a": 1.0})");
  CHECK(typed("", R"({"type": "array"})") == "[]");
  CHECK(typed("", R"({"type": "object"})") == "{}");
  CHECK(typed("", R"({"type": ["string", "array"]})") == "\"\"");
  CHECK(typed("", "{}") == "\"\"");
}

TEST_CASE("without a schema a scalar converts only if the template would have written it so") {
  CHECK(typed("3", "{}") == "3");
  CHECK(typed("-1.5", "{}") == "-1.5");
  CHECK(typed("true", "{}") == "true");
  for (const char* text : {"02134", "1e5", "null", "none", " 3", "TRUE", "[1]", "{}", "-0", "1.50"}) {
    INFO(text);
    CHECK(typed(text, "{}") == "\"" + std::string(text) + "\"");
  }
}

TEST_CASE("containers by schema and by shape") {
  const std::string two = element("item", "1") + element("item", "2");
  CHECK(typed(two, "{}") == "[1, 2]");
  CHECK(typed(element("item", "1"), "{}") == "[1]");
  CHECK(typed(two, R"({"type": "array", "items": {"type": "string"}})") == R"(["1", "2"])");
  CHECK(typed(two, R"({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]})") == R"(["1", 2])");
  CHECK(typed("\n" + two + " \n", R"({"type": "array"})") == "[1, 2]");
  CHECK(typed(element("item", "a"), R"({"type": "object"})") == R"({"item": "a"})");
  CHECK(typed(two, R"({"type": "object"})") == "[1, 2]");
  CHECK(typed(element("a", element("b", "02")), R"({"type": "object", "additionalProperties": {"type": "object",
        "properties": {"b": {"type": "string"}}}})") == R"({"a": {"b": "02"}})");
  CHECK(typed(element("a", "1") + "text" + element("b", "2"), R"({"type": "object"})") ==
        R"({"a": 1, "b": 2, "$text": "text"})");
  CHECK(typed(element("a", "1"), R"({"type": "integer"})") == R"("]<]minimax[>[<a>1]<]minimax[>[</a>")");
  CHECK(typed(element("item", "") + element("item", "null"),
              R"({"type": "array", "items": {"type": ["integer", "null"]}})") == R"(["", null])");
  CHECK(typed(two, R"({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "number"}}]})") == "[1, 2]");
}

TEST_CASE("references inside the schema") {
  const std::string schema = R"({"properties": {"v": {"$ref": "#/$defs/node"}}, "$defs": {"node": {"type": "object",
    "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/node"}, "loop": {"$ref": "#/$defs/loop"}}},
    "loop": {"$ref": "#/$defs/loop"}}})";
  CHECK(arguments(element("v", element("name", "1") + element("next", element("name", "2") + element("loop", "3"))),
                  schema) == R"({"v": {"name": "1", "next": {"name": "2", "loop": 3}}})");
  CHECK(typed("5", R"({"$ref": "other.json#/x"})") == "5");
}

TEST_CASE("a repeated key is a list only where the schema has one") {
  const std::string twice = element("v", "1") + element("v", "2");
  CHECK(arguments(twice) == R"({"v": 2})");
  CHECK(arguments(twice, R"({"properties": {"v": {"type": "integer"}}})") == R"({"v": 2})");
  CHECK(arguments(twice, R"({"properties": {"v": {"type": "array", "items": {"type": "string"}}}})") ==
        R"({"v": ["1", "2"]})");
  CHECK(arguments(element("v", "1") + element("w", "x") + element("v", "2")) == R"({"v": 2, "w": "x"})");
}

TEST_CASE("structure that is not as it should be") {
  // A wrong key closes nothing and stays text.
  CHECK(arguments(element("a", "x" + kNs + "</b>" + "y")) == "{\"a\": \"x" + kNs + "</b>y\"}");
  CHECK(arguments("\n" + element("a", "1") + "\n") == R"({"a": 1})");
  CHECK(arguments("loose" + element("a", "1")) == R"({"a": 1, "$text": "loose"})");
  CHECK(arguments(R"( {"a": 1.0} )") == R"({"a": 1.0})");
  CHECK(arguments(element("", "e")) == R"({"": "e"})");
  CHECK(arguments(element("two words", "e")) == R"({"two words": "e"})");
  const Output junk = parse(Thinking::kDisabled, block("junk" + kNs + "<what>" + invoke("unknown-name", "") + "junk"));
  REQUIRE(junk.calls.size() == 1);
  CHECK(junk.calls[0].first == "unknown-name");
  CHECK(junk.content.empty());
}

TEST_CASE("an unfinished block gives nothing more; its raw text is kept") {
  const std::string half = kNs + "<invoke name=\"f\">" + element("a", "1") + kNs + "<b>par";
  const std::string text = "Text.\n" + kNs + "<tool_call>\n" + invoke("f", element("a", "1")) + half;
  const Output out = parse(Thinking::kDisabled, text);
  CHECK(out.content == "Text.");
  CHECK(out.calls.size() == 1);
  CHECK(out.raw == half);
  CHECK(out.in_block);
  const Output first = parse(Thinking::kDisabled, kNs + "<tool_call>\n" + half);
  CHECK(first.calls.empty());
  CHECK(first.raw == kNs + "<tool_call>\n" + half);
  const Output closed = parse(Thinking::kDisabled, kNs + "<tool_call>\n" + invoke("f", ""));
  CHECK(closed.calls.size() == 1);
  CHECK(closed.raw.empty());
}

TEST_CASE("nesting up to 128 levels is read, deeper is an error") {
  for (int depth : {128, 129, 5000}) {
    std::string inside;
    for (int i = 0; i < depth; ++i) inside += kNs + "<k>";
    inside += "x";
    for (int i = 0; i < depth; ++i) inside += kNs + "</k>";
    const Output out = parse(Thinking::kDisabled, block(invoke("f", inside)));
    CHECK(out.ok == (depth <= 128));
    CHECK(out.calls.size() == (depth <= 128 ? 1u : 0u));
    if (depth <= 128) CHECK(parse_json(out.calls[0].second).ok());
  }
}

TEST_CASE("long values and long hold-back take linear time") {
  const std::string value(4 << 20, 'x');
  const std::string brackets(1 << 20, ']');
  const std::string text =
      "</mm:think>" + std::string(1 << 20, ' ') + "a" + std::string(1 << 20, '<') +
      block(invoke("f", element("v", value) + element("w", brackets) + element("u", kNs + "<" + value)));
  const Output whole = parse_cut(Thinking::kAdaptive, {}, text, [&] { return text.size(); });
  const Output bytes = parse_cut(Thinking::kAdaptive, {}, text, [] { return size_t{1}; });
  CHECK((whole == bytes));
  REQUIRE(whole.calls.size() == 1);
  CHECK(whole.calls[0].second.size() == 2 * value.size() + brackets.size() + kNs.size() + 1 + 27);
}

TEST_CASE("random mixtures of tags and text: no cut changes the result") {
  const std::vector<std::string> words = {"<mm:think>",
                                          "</mm:think>",
                                          kNs,
                                          "<tool_call>",
                                          "</tool_call>",
                                          kNs + "<tool_call>",
                                          kNs + "</tool_call>",
                                          kNs + "<invoke name=\"f\">",
                                          kNs + "</invoke>",
                                          kNs + "<v>",
                                          kNs + "</v>",
                                          kNs + "<item>",
                                          kNs + "</item>",
                                          kNs + "<s>",
                                          kNs + "</s>",
                                          "text",
                                          "\n",
                                          " ",
                                          "<",
                                          "]",
                                          "]<]",
                                          "7",
                                          "\xF0\x9F\x98\x80",
                                          "\xE2\x82",
                                          "<b>",
                                          "</s>"};
  const std::vector<Json> tools = {
      tool(R"({"properties": {"v": {"type": "array", "items": {"type": "integer"}}, "s": {"type": "string"}}})")};
  std::mt19937 random(20);
  int64_t calls = 0;
  for (int round = 0; round < 1500; ++round) {
    std::string text;
    if (round % 2 == 1) text = kNs + "<tool_call>" + kNs + "<invoke name=\"f\">";
    for (unsigned n = random() % 24; n > 0; --n) text += words[random() % words.size()];
    const auto thinking = static_cast<Thinking>(random() % 3);
    const Output whole = parse_cut(thinking, tools, text, [&] { return text.size(); });
    INFO(text);
    REQUIRE((parse_cut(thinking, tools, text, [] { return size_t{1}; }) == whole));
    REQUIRE((parse_cut(thinking, tools, text, [&] { return 1 + random() % 9; }) == whole));
    calls += static_cast<int64_t>(whole.calls.size());
  }
  CHECK(calls > 20);
}

TEST_CASE("what the template writes for a turn is read back as the same turn") {
  const std::string schema =
      R"({"properties": {"s": {"type": "string"}, "i": {"type": "integer"}, "x": {"type": "number"},
    "b": {"type": "boolean"}, "l": {"type": "array", "items": {"type": "object", "properties": {"t": {"type": "string"},
    "deep": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}}}}, "o": {"type": "object"},
    "e": {"type": "array"}, "big": {"type": "integer"}}})";
  const std::string first = R"({"s": "\n02134 <b>&lt;</b>\n", "i": -3, "x": 1e-05, "b": false, "l": [{"t": "null",)"
                            R"( "deep": [[1, 2.5], []]}, {"t": ""}], "o": {}, "e": [], "big": 12345678901234567890})";
  auto json = parse_json(first);
  REQUIRE(json.ok());
  Message turn;
  turn.role = "assistant";
  turn.reasoning = "Two calls.\n</wrong> <b>";
  turn.content.push_back({Part::Kind::kText, "I look.\n\nNow."});
  turn.tool_calls.push_back({"", "f", *json});
  turn.tool_calls.push_back({"", "g", {}});
  turn.tool_calls.back().arguments.kind = Json::Kind::kObject;
  Conversation conversation;
  conversation.messages.push_back(turn);
  conversation.add_generation_prompt = false;
  auto pieces = render(conversation);
  REQUIRE(pieces.ok());
  std::string text = join(*pieces);
  const size_t begin = text.find("]~b]ai\n") + 7;
  text = text.substr(begin, text.rfind("[e~[") - begin);
  const Output out = parse(Thinking::kAdaptive, text, {tool(schema)});
  CHECK(out.reasoning == *turn.reasoning);
  CHECK(out.content == "I look.\n\nNow.");
  REQUIRE(out.calls.size() == 2);
  CHECK(out.calls[0].second == json->dump());
  CHECK(out.calls[1].second == "{}");
  // With the tag in the prompt instead of the output.
  const Output enabled = parse(Thinking::kEnabled, text.substr(10), {tool(schema)});
  CHECK(enabled.calls == out.calls);
  CHECK(enabled.reasoning == out.reasoning);

  auto tokenizer = Tokenizer::open(storage::FileSystem::real(), std::string(FIRN_TEST_DATA) + "/fixtures/tiny-bf16");
  REQUIRE(tokenizer.ok());
  for (bool added : {true, false}) {  // tags as their own tokens, and spelt by ordinary ones
    StreamParser parser(Thinking::kAdaptive, {tool(schema)});
    Output by_token;
    for (int32_t id : tokenizer->encode(text, added)) absorb(parser.feed(tokenizer->token_bytes(id)), &by_token);
    absorb(parser.finish(), &by_token);
    CHECK((by_token == out));
  }
}

}  // namespace
}  // namespace firn::model
