// The JSON reader and writer: what is kept, what is refused and where, size and depth.
#include <chrono>
#include <string>

#include "model/chat.h"
#include "tests/support/catch.h"

namespace firn::model {
namespace {

// What comes out again; the error's text if nothing does.
std::string again(const std::string& text) {
  auto json = parse_json(text);
  return json.ok() ? json->dump() : json.status().message();
}

bool fails_at(const std::string& text, const std::string& place) {
  auto json = parse_json(text);
  INFO(text);
  INFO((json.ok() ? "" : json.status().message()));
  return !json.ok() && json.status().code() == Code::kInvalid &&
         json.status().message().find(place + ":") != std::string::npos;
}

TEST_CASE("key order, repeated keys, spacing") {
  CHECK(again(R"( { "z" : 1 , "a" : [ ] , "m" : { } } )") == R"({"z": 1, "a": [], "m": {}})");
  CHECK(again(R"({"a": 1, "b": 2, "a": 3})") == R"({"a": 3, "b": 2})");
  CHECK(again(R"({"b": 0, "a": 1, "b": 2, "a": 3, "b": [4], "": 5})") == R"({"b": [4], "a": 3, "": 5})");
  CHECK(again("[1,2,[3,[4]],null,true,false]") == "[1, 2, [3, [4]], null, true, false]");
  CHECK(again("\xEF\xBB\xBF[1]") == "[1]");
  CHECK(again("3") == "3");
  auto json = parse_json(R"({"a": {"b": "x"}, "c": 1})");
  REQUIRE(json.ok());
  REQUIRE(json->find("a") != nullptr);
  CHECK(json->find("a")->find("b")->text == "x");
  CHECK(json->find("b") == nullptr);
}

TEST_CASE("numbers keep what they are and print as Python does") {
  CHECK(again("[0, -0, 1, -17, 9007199254740993, 123456789012345678901234567890]") ==
        "[0, 0, 1, -17, 9007199254740993, 123456789012345678901234567890]");
  CHECK(
      again("[1.0, -0.0, 1e2, 1E+2, 1.10, 2.50e-3, 0.1, 1e15, 1e16, 1.5e16, 1e22, 123456789012345680.0]") ==
      "[1.0, -0.0, 100.0, 100.0, 1.1, 0.0025, 0.1, 1000000000000000.0, 1e+16, 1.5e+16, 1e+22, 1.2345678901234568e+17]");
  CHECK(again("[0.0001, 0.00001, 0.00012345, 5e-324, 1e-999, 1.7976931348623157e308, 0.30000000000000004]") ==
        "[0.0001, 1e-05, 0.00012345, 5e-324, 0.0, 1.7976931348623157e+308, 0.30000000000000004]");
  auto json = parse_json("[1, 1.0, 1e5]");
  REQUIRE(json.ok());
  CHECK(json->items[0].kind == Json::Kind::kInteger);
  CHECK(json->items[1].kind == Json::Kind::kFloat);
  CHECK(json->items[2].text == "1e5");
  CHECK(json->items[2].number == 1e5);
}

TEST_CASE("strings: escapes, surrogates, control characters") {
  CHECK(again(R"("\u00e9 \ud83d\ude00 \/ \n \u0001 \" \\ \t\r\b\f \u007f")") ==
        "\"\xC3\xA9 \xF0\x9F\x98\x80 / \\n \\u0001 \\\" \\\\ \\t\\r\\b\\f \x7F\"");
  CHECK(again(R"("\ud83d")") == "\"\xEF\xBF\xBD\"");
  CHECK(again(R"("\ude00\ud83dx")") == "\"\xEF\xBF\xBD\xEF\xBF\xBDx\"");
  CHECK(again(R"("\ud83d\u0041")") == "\"\xEF\xBF\xBD\x41\"");
  CHECK(again(R"("\ud83d\ud83d\ude00")") == "\"\xEF\xBF\xBD\xF0\x9F\x98\x80\"");
  CHECK(again(R"("\u0000")") == R"("\u0000")");
  CHECK(again("\"\xE2\x80\xA8 </script>\"") == "\"\xE2\x80\xA8 </script>\"");
}

TEST_CASE("malformed text is refused with line and column") {
  CHECK(fails_at("", "line 1 column 1"));
  CHECK(fails_at("[1,\n 2,\n  x]", "line 3 column 3"));
  CHECK(fails_at("[\"\xC3\xA9\", x]", "line 1 column 7"));
  CHECK(fails_at("[1] 2", "line 1 column 5"));
  CHECK(fails_at("[1,]", "line 1 column 4"));
  CHECK(fails_at("{\"a\":1,}", "line 1 column 8"));
  CHECK(fails_at("{\"a\" 1}", "line 1 column 6"));
  CHECK(fails_at("{a: 1}", "line 1 column 2"));
  CHECK(fails_at("[1", "line 1 column 3"));
  CHECK(fails_at("[\"ab", "line 1 column 2"));
  CHECK(fails_at("\"\n\"", "line 1 column 2"));
  CHECK(fails_at(std::string("\"a\0\"", 4), "line 1 column 3"));
  CHECK(fails_at("\"\\x\"", "line 1 column 2"));
  CHECK(fails_at("\"\\u12g4\"", "line 1 column 6"));
  CHECK(fails_at("\"\\ud83d\\u12\"", "line 1 column 12"));
  for (const char* text : {"NaN", "Infinity", "-Infinity", "nul", "True", "'a'", "01", "-", "1.", ".5", "1e", "+1",
                           "1.e3", "1e999", "-1e999", "[1 2]", "{\"a\":1 \"b\":2}", "//x\n1", "\\"}) {
    INFO(text);
    CHECK(!parse_json(text).ok());
  }
}

TEST_CASE("bytes that are not UTF-8 are refused and not echoed") {
  for (const char* text : {"\"\xC3\x28\"", "\"\xFF\"", "\"\xED\xA0\x80\"", "\"\xC0\x80\"", "\"\xE2\x82\"",
                           "\"\xF5\x80\x80\x80\"", "\"\xF0\x80\x80\x80\"", "\xC3\x28", "\"\xE2\x82"}) {
    auto json = parse_json(text);
    REQUIRE(!json.ok());
    for (char c : json.status().message()) CHECK((static_cast<uint8_t>(c) >= 0x20 && static_cast<uint8_t>(c) < 0x7F));
  }
}

TEST_CASE("depth 128 is read, deeper is refused, whatever the depth") {
  auto nested = [](size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  CHECK(parse_json(nested(128)).ok());
  CHECK(fails_at(nested(129), "line 1 column 129"));
  CHECK(fails_at(std::string(10'000'000, '['), "line 1 column 129"));
  std::string objects;
  for (int i = 0; i < 200; ++i) objects += "{\"a\":";
  CHECK(!parse_json(objects).ok());
}

TEST_CASE("fifty megabytes: one string, many keys, and more values than are allowed") {
  const std::string text = "[\"" + std::string(50 << 20, 'a') + "\"]";
  auto json = parse_json(text);
  REQUIRE(json.ok());
  CHECK(json->items[0].text.size() == size_t{50} << 20);

  std::string keys = "{";
  const int kKeys = 300'000;
  for (int i = 0; i < kKeys; ++i)
    keys += "\"" + std::string(100, 'k') + std::to_string(i % (kKeys - 1)) + "\":" + std::to_string(i) + ",";
  keys.back() = '}';
  const auto begin = std::chrono::steady_clock::now();
  auto object = parse_json(keys);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  REQUIRE(object.ok());
  CHECK(object->members.size() == static_cast<size_t>(kKeys - 1));
  CHECK(object->members[0].second.text ==
        std::to_string(kKeys - 1));  // the last of the repeated key, in its first place
  CHECK(seconds.count() < 20);       // comparing all pairs would take minutes

  std::string many = "[";
  for (int i = 0; i < (1 << 23) + 10; ++i) many += "0,";
  many.back() = ']';
  CHECK(parse_json(many).status().message().find("values") != std::string::npos);
}

}  // namespace
}  // namespace firn::model
