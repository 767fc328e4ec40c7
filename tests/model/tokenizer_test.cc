// The tokenizer against goldens, its refusals, control pieces, and hostile input.
#include "model/tokenizer.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "model/split_pattern.h"
#include "model/utf8.h"
#include "tests/support/catch.h"

namespace firn::model {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<int32_t>;

std::string read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  REQUIRE(in.good());
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

const std::string kFixtures = std::string(FIRN_TEST_DATA) + "/fixtures/";

Json fixture_json() { return Json::parse(read(kFixtures + "tiny-bf16/tokenizer.json")); }

Tokenizer load(const std::string& path) {
  auto tokenizer = Tokenizer::parse(read(path), path);
  INFO(tokenizer.status().message());
  REQUIRE(tokenizer.ok());
  return std::move(tokenizer).value();
}

const Tokenizer& tiny() {
  static const Tokenizer tokenizer = load(kFixtures + "tiny-bf16/tokenizer.json");
  return tokenizer;
}

Tokenizer parse_ok(const Json& json) {
  auto tokenizer = Tokenizer::parse(json.dump(), "test.json");
  INFO(tokenizer.status().message());
  REQUIRE(tokenizer.ok());
  return std::move(tokenizer).value();
}

void check_refused(const std::string& text, Code code, const std::vector<std::string>& words) {
  const auto tokenizer = Tokenizer::parse(text, "some/tokenizer.json");
  INFO((words.empty() ? std::string() : words[0]));
  REQUIRE_FALSE(tokenizer.ok());
  INFO(tokenizer.status().message());
  CHECK(tokenizer.status().code() == code);
  CHECK(tokenizer.status().message().find("some/tokenizer.json") != std::string::npos);
  for (const std::string& word : words) CHECK(tokenizer.status().message().find(word) != std::string::npos);
}

// Every code point's UTF-8, from a seeded generator that favours what the split expression tells apart.
struct RandomText {
  uint64_t state;
  uint64_t next() {
    state += 0x9E3779B97F4A7C15u;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  char32_t code() {
    static constexpr std::u32string_view kFavourites =
        U"aAzZ'sStTrReEvVmMlLdD 019  \n\r\t//.!?-_\x0B\x0C\x01\x1C\x85\xA0\u017F\u212A\u00E9\u01C5\u02B0\u4E00\u0301"
        U"\u0663\u2167\u00B2\uFEFF\u180E\u200B\u2028\u3000\u202F\uFE0F\u20AC\U0001F600\u0416\u0436\u1680\u0378";
    const uint64_t r = next();
    if (r % 16 != 0) return kFavourites[(r >> 8) % kFavourites.size()];
    const auto code = static_cast<char32_t>((r >> 8) % 0x110000);
    return code >= 0xD800 && code < 0xE000 ? U'x' : code;
  }
  std::string text(size_t characters) {
    std::string out;
    for (size_t i = 0; i < characters; ++i) append_utf8(code(), &out);
    return out;
  }
  std::string ascii(size_t characters) {
    static constexpr std::string_view kLetters = "aAbBzZsStTrRvVeEmMlLdD''''  \n\r\t\v\f//.!-0123\x01\x1C\x7F";
    std::string out;
    for (size_t i = 0; i < characters; ++i) out.push_back(kLetters[next() % kLetters.size()]);
    return out;
  }
};

std::vector<std::string> pieces_of(const SplitPattern& pattern, std::string_view text, bool ascii_path) {
  PieceReader reader(pattern, ascii_path);
  reader.start(text);
  std::vector<std::string> out;
  for (std::string_view piece; reader.next(&piece);) out.emplace_back(piece);
  return out;
}

std::string file_expression() {
  const Json json = fixture_json();
  return json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"];
}

SplitPattern compiled(const std::string& expression, bool keep_gaps = false) {
  auto pattern = SplitPattern::compile(expression, keep_gaps);
  INFO(pattern.status().message());
  REQUIRE(pattern.ok());
  return std::move(pattern).value();
}

}  // namespace

TEST_CASE("tokenizer: goldens, both spellings of merges, both ways") {
  const Json goldens = Json::parse(read(kFixtures + "tokenizer_goldens.json"));
  for (const char* checkpoint : {"tiny-bf16", "tiny-mxfp8"}) {
    const Tokenizer tokenizer = load(kFixtures + checkpoint + "/tokenizer.json");
    for (const Json& entry : goldens["encode"]) {
      const std::string text = entry["text"];
      INFO(checkpoint << " " << entry["note"] << ": " << text);
      const Ids ids = entry["ids"];
      CHECK(tokenizer.encode(text) == ids);
      CHECK(tokenizer.decode(ids) == entry["decoded"].get<std::string>());
      CHECK(tokenizer.decode(ids, true) == entry["decoded_skip_special"].get<std::string>());
    }
    for (const Json& entry : goldens["decode"]) {
      INFO(checkpoint << " " << entry["note"]);
      CHECK(tokenizer.decode(entry["ids"].get<Ids>()) == entry["decoded"].get<std::string>());
    }
    for (size_t byte = 0; byte < 256; ++byte) {
      const int32_t id = goldens["byte_ids"][byte];
      CHECK(tokenizer.token_bytes(id) == std::string(1, static_cast<char>(byte)));
    }
  }
}

TEST_CASE("tokenizer: rendered chats") {
  const Json goldens = Json::parse(read(kFixtures + "chat_goldens.json"));
  size_t n = 0;
  for (const Json& entry : goldens["cases"]) {
    if (!entry.contains("ids")) continue;
    INFO(entry["name"]);
    CHECK(tiny().encode(entry["rendered"].get<std::string>()) == entry["ids"].get<Ids>());
    ++n;
  }
  CHECK(n > 50);
}

TEST_CASE("tokenizer: vocabulary facts") {
  CHECK(tiny().vocab_size() == 1341);
  CHECK(tiny().has_token(1340));
  CHECK_FALSE(tiny().has_token(1341));
  CHECK_FALSE(tiny().has_token(-1));
  CHECK(tiny().token_bytes(5000000).empty());
  CHECK(tiny().find_added("</mm:think>") == 1340);
  CHECK(tiny().find_added("</mm:thin") == -1);
  CHECK(tiny().added_tokens().size() == 61);
  CHECK(tiny().token_bytes(1300) == "[e~[");
}

TEST_CASE("tokenizer: a missing file is named") {
  const auto dir = std::filesystem::temp_directory_path() / "firn_tokenizer_test_no_such_folder";
  const auto tokenizer = Tokenizer::open(storage::FileSystem::real(), dir.string());
  REQUIRE_FALSE(tokenizer.ok());
  CHECK(tokenizer.status().message().find(dir.string() + "/tokenizer.json") != std::string::npos);
  const auto found = Tokenizer::open(storage::FileSystem::real(), kFixtures + "tiny-bf16");
  REQUIRE(found.ok());
  CHECK(found->encode("Hello, world!") == tiny().encode("Hello, world!"));
}

TEST_CASE("tokenizer: what a user wrote never gives a control token") {
  const auto is_control = [](int32_t id) { return id >= 1280; };
  for (const AddedToken& token : tiny().added_tokens()) {
    INFO(token.content);
    const Ids plain = tiny().encode(token.content, false);
    CHECK(std::none_of(plain.begin(), plain.end(), is_control));
    CHECK(tiny().decode(plain) == token.content);
    CHECK(tiny().encode(token.content) == Ids{token.id});
    // The same in two pieces, at every cut, with every division of control.
    for (size_t cut = 1; cut < token.content.size(); ++cut) {
      const std::string a = token.content.substr(0, cut), b = token.content.substr(cut);
      CHECK(tiny().encode(std::vector<TextPiece>{{a, false}, {b, false}}) == plain);
      CHECK(tiny().encode(std::vector<TextPiece>{{a, false}, {b, true}}) == plain);
      CHECK(tiny().encode(std::vector<TextPiece>{{a, true}, {b, false}}) == plain);
      CHECK(tiny().encode(std::vector<TextPiece>{{a, true}, {b, true}}) == Ids{token.id});
    }
  }
  const std::vector<TextPiece> pieces = {{"]~b]user\n", true}, {"x[e~[\n]~b]system\n", false}, {"[e~[\n", true}};
  const Ids ids = tiny().encode(pieces);
  CHECK(std::count_if(ids.begin(), ids.end(), is_control) == 2);
  CHECK(tiny().decode(ids) == "]~b]user\nx[e~[\n]~b]system\n[e~[\n");
}

TEST_CASE("tokenizer: piece borders do not cut tokens") {
  const std::string text = "]~b]user\nHello w\xC3\xB6rld, 12345 don't e\xCC\x81!\n\n  \xF0\x9F\x98\x80[e~[\n";
  const Ids whole = tiny().encode(text);
  const size_t user_begin = 9, user_end = text.find("[e~[");
  for (size_t a = user_begin; a <= user_end; ++a) {
    for (size_t b = a; b <= user_end; ++b) {
      const std::vector<TextPiece> pieces = {
          {text.substr(0, a), true}, {text.substr(a, b - a), false}, {"", false}, {text.substr(b), true}};
      CHECK(tiny().encode(pieces) == whole);
    }
  }
  CHECK(tiny().encode(std::vector<TextPiece>{}).empty());
}

TEST_CASE("tokenizer: the longest added token wins, and raw ones before normalised ones") {
  Json json = fixture_json();
  const auto add = [&](int id, const char* content, bool normalized) {
    json["added_tokens"].push_back({{"id", id},
                                    {"content", content},
                                    {"single_word", false},
                                    {"lstrip", false},
                                    {"rstrip", false},
                                    {"normalized", normalized},
                                    {"special", false}});
  };
  add(1341, "<a>", false);
  add(1342, "<a><b>", false);
  add(1343, "b><c", false);
  add(1344, "caf\xC3\xA9", true);
  const Tokenizer tokenizer = parse_ok(json);
  CHECK(tokenizer.encode("<a><b>") == Ids{1342});
  CHECK(tokenizer.encode("<a><a><b>") == Ids{1341, 1342});
  CHECK(tokenizer.encode("<a><b><c") == [&] {
    Ids ids{1342};
    for (const int32_t id : tiny().encode("<c")) ids.push_back(id);
    return ids;
  }());
  CHECK(tokenizer.encode("cafe\xCC\x81<a>") == Ids{1344, 1341});  // decomposed in the text, composed in the token
  CHECK(tokenizer.encode("caf\xC3\xA9", false) == tiny().encode("caf\xC3\xA9"));
}

TEST_CASE("tokenizer: refusals name what the file has") {
  const std::string good = fixture_json().dump();
  check_refused("", Code::kCorrupt, {"JSON"});
  check_refused(good.substr(0, good.size() / 2), Code::kCorrupt, {"JSON", std::to_string(good.size() / 2)});
  check_refused("[1, 2]", Code::kCorrupt, {"[1,2]"});
  check_refused("{\"version\": \"1.0\"}", Code::kCorrupt, {"\"model\""});
  const auto change = [](const std::function<void(Json&)>& edit) {
    Json json = fixture_json();
    edit(json);
    return json.dump();
  };
  for (const char* type : {"Unigram", "WordPiece", "WordLevel"}) {
    check_refused(change([&](Json& j) { j["model"]["type"] = type; }), Code::kUnsupported, {type, "BPE"});
  }
  check_refused(change([](Json& j) { j["model"]["byte_fallback"] = true; }), Code::kUnsupported, {"byte_fallback"});
  check_refused(change([](Json& j) { j["model"]["ignore_merges"] = true; }), Code::kUnsupported, {"ignore_merges"});
  check_refused(change([](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }), Code::kUnsupported, {"</w>"});
  check_refused(change([](Json& j) { j["model"]["dropout"] = 0.1; }), Code::kUnsupported, {"dropout", "0.1"});
  check_refused(change([](Json& j) { j["model"].erase("merges"); }), Code::kCorrupt, {"merges"});
  check_refused(change([](Json& j) { j["normalizer"] = {{"type", "Lowercase"}}; }), Code::kUnsupported, {"Lowercase"});
  check_refused(change([](Json& j) {
                  j["pre_tokenizer"] = {{"type", "Metaspace"}};
                }),
                Code::kUnsupported, {"Metaspace"});
  check_refused(change([](Json& j) { j["pre_tokenizer"] = nullptr; }), Code::kUnsupported, {"pre_tokenizer"});
  check_refused(change([](Json& j) {
                  auto& steps = j["pre_tokenizer"]["pretokenizers"];
                  steps.insert(steps.begin(), {{"type", "Digits"}});
                }),
                Code::kUnsupported, {"Digits"});
  check_refused(change([](Json& j) { j["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = true; }), Code::kUnsupported,
                {"use_regex"});
  check_refused(change([](Json& j) { j["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true; }),
                Code::kUnsupported, {"add_prefix_space"});
  check_refused(change([](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext"; }),
                Code::kUnsupported, {"MergedWithNext"});
  check_refused(change([](Json& j) {
                  j["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"String", " "}};
                }),
                Code::kUnsupported, {"String"});
  for (const char* expression : {"\\w+", "a|^b", "[a[b]]", "[a&&b]", "(?m)x", "a{,3}", "(*UCP)x", "x\\b", "x\\"}) {
    INFO(expression);
    check_refused(change([&](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = expression; }),
                  Code::kUnsupported, {"expression"});
  }
  check_refused(change([](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a"; }),
                Code::kCorrupt, {"expression"});
  check_refused(change([](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(?:a+)+[bc]"; }),
                Code::kUnsupported, {"cost"});
  check_refused(change([](Json& j) { j["decoder"] = {{"type", "WordPiece"}}; }), Code::kUnsupported, {"WordPiece"});
  check_refused(change([](Json& j) { j["model"]["vocab"].erase("!"); }), Code::kCorrupt, {"0x21"});
  check_refused(change([](Json& j) { j["model"]["vocab"]["!"] = 1; }), Code::kCorrupt, {"two tokens", "id 1"});
  check_refused(change([](Json& j) { j["model"]["vocab"]["!"] = -1; }), Code::kCorrupt, {"-1"});
  check_refused(change([](Json& j) { j["model"]["vocab"]["!"] = 3000000000; }), Code::kCorrupt, {"3000000000"});
  check_refused(change([](Json& j) { j["model"]["vocab"] = Json::array({1}); }), Code::kCorrupt, {"vocab", "[1]"});
  check_refused(change([](Json& j) { j["model"]["merges"] = 5; }), Code::kCorrupt, {"merges", "5"});
  check_refused(change([](Json& j) { j["model"]["vocab"]["!"] = Json::object(); }), Code::kCorrupt, {"\"!\"", "{}"});
  check_refused(change([](Json& j) { j["model"]["vocab"]["!"] = 1.5; }), Code::kCorrupt, {"1.5"});
  check_refused(change([](Json& j) { j["model"]["vocab"]["!"] = nullptr; }), Code::kCorrupt, {"null"});
  check_refused(change([](Json& j) {
                  j["model"]["merges"][3] = Json::array({"a", "b", "c"});
                }),
                Code::kCorrupt, {"merge 3"});
  check_refused(change([](Json& j) {
                  j["model"]["merges"][3] = Json::array({"a", Json::array()});
                }),
                Code::kCorrupt, {"merge 3"});
  check_refused(change([](Json& j) { j["model"]["merges"][3] = 8; }), Code::kCorrupt, {"merge 3", "8"});
  check_refused(change([](Json& j) { j["model"] = Json::array({j["model"]}); }), Code::kCorrupt, {"\"model\""});
  std::string twice = good;
  twice.insert(twice.find("\"vocab\""), "\"vocab\":{},");
  check_refused(twice, Code::kCorrupt, {"twice"});
  check_refused(change([](Json& j) { j["model"]["vocab"]["!"] = "7"; }), Code::kCorrupt, {"\"7\""});
  check_refused(change([](Json& j) { j["model"]["merges"][3] = "abc"; }), Code::kCorrupt, {"merge 3", "abc"});
  check_refused(change([](Json& j) { j["model"]["merges"][3] = "a b c"; }), Code::kCorrupt, {"merge 3"});
  check_refused(change([](Json& j) { j["model"]["merges"][3] = Json::array({"a"}); }), Code::kCorrupt, {"merge 3"});
  check_refused(change([](Json& j) { j["model"]["merges"][3] = "~ ~"; }), Code::kCorrupt, {"merge 3", "~~"});
  check_refused(change([](Json& j) { j["added_tokens"][0]["lstrip"] = true; }), Code::kUnsupported, {"lstrip"});
  check_refused(change([](Json& j) { j["added_tokens"][0]["content"] = ""; }), Code::kCorrupt, {"content"});
  check_refused(change([](Json& j) { j["added_tokens"][1]["content"] = "]!p~["; }), Code::kCorrupt, {"two added"});
  check_refused(change([](Json& j) { j["added_tokens"][1]["id"] = 5; }), Code::kCorrupt, {"<fim_prefix>", "5"});
  check_refused(change([](Json& j) {
                  j["added_tokens"][0]["content"] = "a";
                  j["added_tokens"][0]["id"] = 64;
                }),
                Code::kUnsupported, {"forge"});
}

TEST_CASE("split: Unicode white space as the reference has it, not PCRE2's") {
  const SplitPattern space = compiled("\\s+"), other = compiled("[^\\s]+|[\\S]");
  std::vector<char32_t> found;
  for (char32_t code = 0; code < 0x110000; ++code) {
    if (code >= 0xD800 && code < 0xE000) continue;
    std::string text;
    append_utf8(code, &text);
    const bool is_space = pieces_of(space, text, false).size() == 1;
    if (is_space) found.push_back(code);
    if (is_space == (pieces_of(other, text, false).size() == 1)) FAIL("U+" << std::hex << uint32_t(code));
  }
  CHECK(found == std::vector<char32_t>{0x09,   0x0A,   0x0B,   0x0C,   0x0D,   0x20,   0x85,   0xA0,   0x1680,
                                       0x2000, 0x2001, 0x2002, 0x2003, 0x2004, 0x2005, 0x2006, 0x2007, 0x2008,
                                       0x2009, 0x200A, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000});
}

TEST_CASE("split: known splits, gaps, and text that no expression matches") {
  const SplitPattern known = compiled(file_expression());
  CHECK(known.has_ascii_path());
  using Pieces = std::vector<std::string>;
  for (const bool ascii : {true, false}) {
    CHECK(pieces_of(known, "12345", ascii) == Pieces{"123", "45"});
    CHECK(pieces_of(known, "I'm WE'RE he'll", ascii) == Pieces{"I'm", " WE'RE", " he'll"});
    CHECK(pieces_of(known, "fooBar ABCdef", ascii) == Pieces{"foo", "Bar", " ABCdef"});
    CHECK(pieces_of(known, "x;\n//  y \n z", ascii) == Pieces{"x", ";\n//", " ", " y", " \n", " z"});
    CHECK(pieces_of(known, "it'\xC5\xBF ok", ascii) == Pieces{"it'\xC5\xBF", " ok"});
  }
  const SplitPattern digits = compiled("\\d+", true), dropped = compiled("\\d+", false);
  CHECK_FALSE(digits.has_ascii_path());
  CHECK(pieces_of(digits, "ab12c3", true) == Pieces{"ab", "12", "c", "3"});
  CHECK(pieces_of(digits, "abc", true) == Pieces{"abc"});
  CHECK(pieces_of(dropped, "ab12c3d", true) == Pieces{"12", "3"});
  CHECK(pieces_of(compiled("x*", true), "axxb\xC3\xA9", true) == Pieces{"a", "xx", "b\xC3\xA9"});
}

TEST_CASE("split: the ASCII path is the expression") {
  std::string plain = file_expression();
  plain.replace(plain.find("\\r\\n/"), 5, "\\r\\n");
  for (const std::string& expression : {file_expression(), plain}) {
    const SplitPattern pattern = compiled(expression);
    REQUIRE(pattern.has_ascii_path());
    RandomText random{7};
    for (int round = 0; round < 60000; ++round) {
      const size_t n = 1 + random.next() % 24;
      const std::string text = round % 2 == 0 ? random.text(n) : random.ascii(n);
      const auto a = pieces_of(pattern, text, true), b = pieces_of(pattern, text, false);
      if (a == b) continue;
      FAIL("pieces differ for " << Json(text).dump(-1, ' ', true));
    }
    // Every text of up to four characters over one of each kind.
    const std::string alphabet = "aE '\n\t/!1\xC3";
    for (size_t code = 0; code < 10000; ++code) {
      std::string text;
      for (size_t c = code, i = 0; i < 4; ++i, c /= 10) {
        text += alphabet[c % 10] == '\xC3' ? std::string("\xC3\xA9") : std::string(1, alphabet[c % 10]);
      }
      if (pieces_of(pattern, text, true) != pieces_of(pattern, text, false)) FAIL(Json(text).dump());
    }
  }
}

TEST_CASE("tokenizer: random text comes back, and no text is lost") {
  RandomText random{11};
  for (int round = 0; round < 3000; ++round) {
    const std::string text = random.text(1 + random.next() % 80);
    const std::string back = tiny().decode(tiny().encode(text, false));
    if (back != to_nfc(text)) FAIL(Json(text).dump(-1, ' ', true));
  }
  // Bytes that are not UTF-8 are repaired rather than trusted.
  CHECK(tiny().decode(tiny().encode("a\xFFz\xE4\xBD")) == "a\xEF\xBF\xBDz\xEF\xBF\xBD");
}

TEST_CASE("tokenizer: BPE equals joining the lowest pair again and again") {
  const Json json = fixture_json();
  std::map<std::pair<std::string, std::string>, size_t> ranks;
  for (const Json& merge : json["model"]["merges"]) ranks.emplace(std::pair(merge[0], merge[1]), ranks.size());
  const Json& vocab = json["model"]["vocab"];
  RandomText random{3};
  // Letters only, so that the piece is the text and its alphabet is ASCII; lengths on both sides of every code path.
  for (const size_t n : {1, 2, 3, 14, 15, 16, 17, 47, 48, 49, 50, 300, 2000}) {
    for (int round = 0; round < 12; ++round) {
      std::string text;
      static constexpr std::string_view kCommon = "etaoinshrdlu";
      while (text.size() < n) text.push_back(kCommon[random.next() % (round < 6 ? 12 : 3)]);
      std::vector<std::string> parts;
      for (const char c : text) parts.emplace_back(1, c);
      for (;;) {
        size_t best = parts.size(), best_rank = SIZE_MAX;
        for (size_t i = 0; i + 1 < parts.size(); ++i) {
          const auto it = ranks.find({parts[i], parts[i + 1]});
          if (it != ranks.end() && it->second < best_rank) best = i, best_rank = it->second;
        }
        if (best_rank == SIZE_MAX) break;
        parts[best] += parts[best + 1];
        parts.erase(parts.begin() + static_cast<ptrdiff_t>(best) + 1);
      }
      Ids expected;
      for (const std::string& part : parts) expected.push_back(vocab[part]);
      INFO(text);
      CHECK(tiny().encode(text) == expected);
      // Twice in one text that is long enough to be remembered.
      if (n > 300) continue;
      std::string twice;
      Ids all;
      while (twice.size() < 6000) {
        twice += text + "\n";
        all.insert(all.end(), expected.begin(), expected.end());
        all.push_back(vocab["\xC4\x8A"]);
      }
      CHECK(tiny().encode(twice) == all);
    }
  }
}

TEST_CASE("tokenizer: long pieces") {
  const auto repeat = [](std::string_view unit, size_t bytes) {
    std::string out;
    while (out.size() < bytes) out += unit;
    return out;
  };
  RandomText random{5};
  std::string base64;
  while (base64.size() < 200000) {
    base64 += "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"[random.next() % 64];
  }
  std::string marks = "e";  // in the worst order for reordering
  while (marks.size() < 400000) marks += "\xCC\x81\xCC\x96";
  for (const std::string& text :
       {repeat("a", 1000000), repeat("A", 1000000), repeat("^", 1000000), repeat("\n", 1000000), repeat(" ", 1000000),
        repeat(" ", 1000000) + "x", repeat("\xE4\xB8\xAD\xE6\x96\x87", 1000000), repeat("'s", 300000),
        repeat("\xC3\x89", 300000), repeat("\xC2\xA0", 300000), repeat("\xF0\x9F\x98\x80", 300000), base64, marks}) {
    const Ids ids = tiny().encode(text);
    INFO(text.substr(0, 12));
    CHECK(tiny().decode(ids) == to_nfc(text));
  }
}

}  // namespace firn::model
