// Fuzzes the tokenizer: byte 0 says what the rest is.
//
//   even: a tokenizer.json. Whatever is accepted must encode and decode without a crash, with its own added tokens too.
//   odd:  a text for the fixture's tokenizer. Beyond not crashing: every decoding is the repaired, composed text; the
//         ASCII path splits as the expression does; cutting the text into pieces changes nothing; no ordinary text
//         gives an added token.
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "model/split_pattern.h"
#include "model/tokenizer.h"
#include "model/utf8.h"

namespace {

using firn::model::PieceReader;
using firn::model::SplitPattern;
using firn::model::TextPiece;
using firn::model::Tokenizer;

const std::string& fixture() {
  static const std::string json = [] {
    std::ifstream in(std::string(FIRN_TEST_DATA) + "/fixtures/tiny-bf16/tokenizer.json", std::ios::binary);
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
  }();
  return json;
}

// The expression the ASCII path knows, as the fixture's file spells it.
const SplitPattern& pattern() {
  static const SplitPattern known = [] {
    const std::string& json = fixture();
    const size_t begin = json.find("\"Regex\"");
    const size_t open = json.find('"', json.find(':', begin)) + 1;
    std::string expression;
    for (size_t i = open; json[i] != '"'; ++i) {
      if (json[i] == '\\') ++i;
      expression.push_back(json[i]);
    }
    return std::move(SplitPattern::compile(expression, false)).value();
  }();
  return known;
}

void try_file(std::string_view json) {
  const auto tokenizer = Tokenizer::parse(json, "fuzz");
  if (!tokenizer.ok()) {
    FIRN_CHECK(!tokenizer.status().message().empty(), "an error without a message");
    return;
  }
  std::string text = "Hello \xC3\xA9 e\xCC\x81 123\n";
  for (const auto& token : tokenizer->added_tokens()) {
    if (text.size() < 1000) text += token.content + " ";
  }
  for (const bool added : {false, true}) {
    for (const int32_t id : tokenizer->encode(text, added))
      FIRN_CHECK(tokenizer->has_token(id), "an id without a token");
  }
}

void try_text(std::string_view bytes) {
  static const Tokenizer tokenizer = std::move(Tokenizer::parse(fixture(), "fixture")).value();
  FIRN_CHECK(pattern().has_ascii_path(), "the fixture's expression is known");
  const std::string repaired = firn::model::sanitize_utf8(bytes, nullptr);
  FIRN_CHECK(firn::model::is_valid_utf8(repaired), "repaired text is valid");
  const std::string normal = firn::model::to_nfc(repaired);
  FIRN_CHECK(firn::model::to_nfc(normal) == normal, "composing twice changes nothing");

  PieceReader with(pattern(), true), without(pattern(), false);
  with.start(normal);
  without.start(normal);
  std::string_view a, b;
  for (;;) {
    const bool more = with.next(&a);
    FIRN_CHECK(more == without.next(&b) && (!more || (a.data() == b.data() && a.size() == b.size())),
               "the ASCII path splits elsewhere");
    if (!more) break;
  }

  const auto plain = tokenizer.encode(bytes, false);
  FIRN_CHECK(tokenizer.decode(plain) == normal, "decoded text differs");
  for (const int32_t id : plain) FIRN_CHECK(id < 1280, "ordinary text gave an added token");
  FIRN_CHECK(tokenizer.decode(tokenizer.encode(repaired)).size() > 0 || bytes.empty(), "text was lost");
  const size_t cut = bytes.size() / 2;
  const std::vector<TextPiece> pieces = {{std::string(bytes.substr(0, cut)), false},
                                         {std::string(bytes.substr(cut)), false}};
  FIRN_CHECK(tokenizer.encode(pieces) == plain, "a piece border cut a token");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  data[0] % 2 == 0 ? try_file(rest) : try_text(rest);
  return 0;
}
