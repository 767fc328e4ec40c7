// UTF-8 and NFC, as the tokenizer needs them.
//
// Contract: none of these functions fails or reads past the text. "Maximal broken part" is Unicode's practice for
// U+FFFD: the longest start of a well-formed sequence, or else one byte. Time is linear in the text, also for long runs
// of combining marks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace firn::model {

struct Utf8Char {
  char32_t code = 0;    // U+FFFD if broken
  uint32_t length = 0;  // bytes taken; of a broken part its length
  bool valid = false;
  bool cut = false;  // broken only because the text ends: more bytes could complete it
};

// The character at `pos` (< bytes.size()).
Utf8Char read_utf8(std::string_view bytes, size_t pos);
void append_utf8(char32_t code, std::string* out);

// Length of the longest prefix that is ASCII.
size_t ascii_prefix(std::string_view bytes);
bool is_valid_utf8(std::string_view bytes);

// The composed normal form. Text that is composed already, or nearly, costs one pass.
std::string to_nfc(std::string_view valid_utf8);

// True for characters that no normalisation changes, reorders or joins to what stands before them, known without a
// table: text may be cut in front of one and normalised in parts. May be false for others of that kind.
bool is_nfc_inert(char32_t code);

}  // namespace firn::model
