// Repair of UTF-8 and NFC, against utf8proc's whole-text function and by hand.
#include "model/utf8.h"

#include <utf8proc.h>

#include <cstdlib>
#include <string>

#include "model/tokenizer.h"
#include "tests/support/catch.h"

namespace firn::model {
namespace {

std::string of(std::u32string_view codes) {
  std::string out;
  for (const char32_t code : codes) append_utf8(code, &out);
  return out;
}

std::string reference_nfc(const std::string& text) {
  utf8proc_uint8_t* mapped = nullptr;
  const auto n =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &mapped, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  REQUIRE(n >= 0);
  std::string out(reinterpret_cast<const char*>(mapped), static_cast<size_t>(n));
  std::free(mapped);
  return out;
}

}  // namespace

TEST_CASE("utf8: every code point there and back") {
  int64_t wrong = 0;
  for (char32_t code = 0; code < 0x110000; ++code) {
    const std::string text = of(std::u32string(1, code));
    const Utf8Char c = read_utf8(text, 0);
    const bool surrogate = code >= 0xD800 && code < 0xE000;
    if (c.valid == surrogate || (c.valid && (c.code != code || c.length != text.size()))) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("utf8: one replacement for each maximal broken part") {
  const std::string r = "\xEF\xBF\xBD";
  const auto check = [&](const std::string& in, const std::string& out, int64_t count) {
    int64_t n = -1;
    CHECK(sanitize_utf8(in, &n) == out);
    CHECK(n == count);
    CHECK(is_valid_utf8(in) == (count == 0));
  };
  check("plain \xC3\xA9", "plain \xC3\xA9", 0);
  check("", "", 0);
  check("\x80", r, 1);
  check("\xC0\x80", r + r, 2);  // never well-formed
  check("\xE4\xBD", r, 1);      // cut
  check("\xE4\xBD\x41", r + "A", 1);
  check("\xE0\x80\x80", r + r + r, 3);          // overlong
  check("\xED\xA0\x80", r + r + r, 3);          // a surrogate
  check("\xF4\x90\x80\x80", r + r + r + r, 4);  // above U+10FFFF
  check("\xF0\x9F\x98\xF0\x9F\x98\x80", r + "\xF0\x9F\x98\x80", 1);
  check(std::string("a\0b", 3), std::string("a\0b", 3), 0);
  check(
      "12345678\xFF"
      "12345678",
      "12345678" + r + "12345678", 1);
}

TEST_CASE("utf8: the whole characters at the front") {
  CHECK(utf8_complete_prefix("") == 0);
  CHECK(utf8_complete_prefix("abc") == 3);
  CHECK(utf8_complete_prefix("a\xC3") == 1);
  CHECK(utf8_complete_prefix("a\xC3\xA9") == 3);
  CHECK(utf8_complete_prefix("a\xE4\xBD") == 1);
  CHECK(utf8_complete_prefix("a\xF0\x9F\x98") == 1);
  CHECK(utf8_complete_prefix("a\xF0\x9F\x98\x80") == 5);
  CHECK(utf8_complete_prefix("a\x80\x80\x80") == 4);  // broken bytes wait for nothing
  CHECK(utf8_complete_prefix("\xE0\x80") == 2);
  CHECK(utf8_complete_prefix("\xF5") == 1);
}

TEST_CASE("nfc: characters called inert are") {
  int64_t wrong = 0;
  for (char32_t code = 0; code < 0x110000; ++code) {
    if (!is_nfc_inert(code)) continue;
    const std::string text = of(std::u32string(1, code));
    const auto* property = utf8proc_get_property(static_cast<utf8proc_int32_t>(code));
    if (property->combining_class != 0 || reference_nfc(text) != text) ++wrong;
    // Nothing in front of it joins with it: neither a letter, nor a syllable, nor itself.
    for (const char32_t front : {U'e', U'\u1100', U'\uAC00', U'\u09C7', U'\u0DD9', U'\u1025', code}) {
      const std::string two = of(std::u32string{front, code});
      if (reference_nfc(two) != two) ++wrong;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("nfc: equals the whole-text function") {
  uint64_t state = 1;
  const auto next = [&] { return (state = state * 6364136223846793005u + 1442695040888963407u) >> 33; };
  static constexpr std::u32string_view kCommon =
      U"aeo\u00E9\u0301\u0308\u0316\u0323\u0345\u1100\u1161\u11A8\uAC00\u0915\u093C\u0958\u212B\u2126\u0374\u4E00\u3099"
      U"\u304B\u09C7\u09BE\u1E9B\u0307\u0344\uFB1D\U0001D15E\U0001F600\u05D0\u05B4 \n";
  for (int round = 0; round < 20000; ++round) {
    std::u32string codes;
    for (size_t i = 0, n = 1 + next() % 16; i < n; ++i) {
      char32_t code = kCommon[next() % kCommon.size()];
      if (next() % 8 == 0) code = static_cast<char32_t>(next() % 0x30000);
      if (code >= 0xD800 && code < 0xE000) code = U'x';
      codes.push_back(code);
    }
    const std::string text = of(codes);
    if (to_nfc(text) != reference_nfc(text)) {
      std::string shown;
      for (const char32_t code : codes) shown += std::to_string(static_cast<uint32_t>(code)) + " ";
      FAIL("code points " << shown);
    }
  }
}

}  // namespace firn::model
