// UTF-8 decoding and repair, and NFC on top of utf8proc's tables. See utf8.h.
#include "model/utf8.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "model/tokenizer.h"
#include "runtime/status.h"

namespace firn::model {
namespace {

constexpr char32_t kReplacement = 0xFFFD;

struct Range {
  char32_t first, last;
};

// Common stretches of Unicode without combining marks, without characters that NFC replaces, and without characters
// that join the one before. The test checks every code point of them against utf8proc.
constexpr Range kInert[] = {
    {0x0000, 0x02FF}, {0x0388, 0x0482}, {0x048A, 0x0590},   {0x05D0, 0x05EA},   {0x0620, 0x064A}, {0x0660, 0x066F},
    {0x0671, 0x06D5}, {0x0E01, 0x0E37}, {0x1E00, 0x1EFF},   {0x200B, 0x2027},   {0x2030, 0x20CF}, {0x2190, 0x21FF},
    {0x2460, 0x2ADB}, {0x3000, 0x3029}, {0x3030, 0x3098},   {0x309B, 0x30FF},   {0x3130, 0xA66E}, {0xAC00, 0xD7A3},
    {0xFE00, 0xFE0F}, {0xFF00, 0xFFFD}, {0x1F000, 0x1FAFF}, {0x20000, 0x2A6DF},
};

void compose_stretch(std::string_view text, std::vector<utf8proc_int32_t>* codes, std::string* out) {
  codes->clear();
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Char c = read_utf8(text, pos);
    pos += c.length;
    utf8proc_int32_t parts[8];
    int boundary = 0;
    const auto n =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c.code), parts, 8,
                                static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE), &boundary);
    FIRN_CHECK(n > 0 && n <= 8, "a canonical decomposition has 1 to 4 characters");
    codes->insert(codes->end(), parts, parts + n);
  }
  // The library's own reordering takes quadratic time on a long run of marks, so the runs are sorted here.
  const auto mark_class = [](utf8proc_int32_t code) { return utf8proc_get_property(code)->combining_class; };
  for (auto it = codes->begin(); it != codes->end();) {
    if (mark_class(*it) == 0) {
      ++it;
      continue;
    }
    const auto end = std::find_if(it, codes->end(), [&](utf8proc_int32_t code) { return mark_class(code) == 0; });
    const auto by_class = [&](utf8proc_int32_t a, utf8proc_int32_t b) { return mark_class(a) < mark_class(b); };
    if (!std::is_sorted(it, end, by_class)) std::stable_sort(it, end, by_class);
    it = end;
  }
  const auto composed = utf8proc_normalize_utf32(codes->data(), static_cast<utf8proc_ssize_t>(codes->size()),
                                                 static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  FIRN_CHECK(composed >= 0, "composition of valid characters");
  for (utf8proc_ssize_t i = 0; i < composed; ++i) {
    append_utf8(static_cast<char32_t>((*codes)[static_cast<size_t>(i)]), out);
  }
}

}  // namespace

Utf8Char read_utf8(std::string_view bytes, size_t pos) {
  const auto at = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t lead = at(pos);
  if (lead < 0x80) return {lead, 1, true, false};
  uint32_t length = 0;
  uint8_t low = 0x80, high = 0xBF;  // bounds of the second byte
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {kReplacement, 1, false, false};
  }
  char32_t code = lead & (0xFFu >> (length + 1));
  for (uint32_t i = 1; i < length; ++i) {
    if (pos + i >= bytes.size()) return {kReplacement, i, false, true};
    const uint8_t next = at(pos + i);
    if (next < low || next > high) return {kReplacement, i, false, false};
    low = 0x80;
    high = 0xBF;
    code = (code << 6) | (next & 0x3Fu);
  }
  return {code, length, true, false};
}

void append_utf8(char32_t code, std::string* out) {
  const auto put = [&](char32_t byte) { out->push_back(static_cast<char>(static_cast<uint8_t>(byte))); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | (code >> 6));
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | (code >> 12));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | (code >> 18));
    put(0x80 | ((code >> 12) & 0x3F));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

size_t ascii_prefix(std::string_view bytes) {
  size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + i, 8);
    if (word & 0x8080808080808080u) break;
  }
  while (i < bytes.size() && static_cast<uint8_t>(bytes[i]) < 0x80) ++i;
  return i;
}

bool is_valid_utf8(std::string_view bytes) {
  for (size_t pos = ascii_prefix(bytes); pos < bytes.size();) {
    const Utf8Char c = read_utf8(bytes, pos);
    if (!c.valid) return false;
    pos += c.length;
    if (c.length == 1) pos += ascii_prefix(bytes.substr(pos));
  }
  return true;
}

std::string sanitize_utf8(std::string_view bytes, int64_t* replaced) {
  std::string out;
  out.reserve(bytes.size());
  int64_t count = 0;
  for (size_t pos = 0; pos < bytes.size();) {
    const Utf8Char c = read_utf8(bytes, pos);
    if (c.valid) {
      out.append(bytes, pos, c.length);
    } else {
      append_utf8(kReplacement, &out);
      ++count;
    }
    pos += c.length;
  }
  if (replaced != nullptr) *replaced = count;
  return out;
}

size_t utf8_complete_prefix(std::string_view bytes) {
  // An unfinished character is at most three bytes: its lead byte and continuation bytes up to the end.
  for (size_t back = 1; back <= 3 && back <= bytes.size(); ++back) {
    const size_t pos = bytes.size() - back;
    const auto byte = static_cast<uint8_t>(bytes[pos]);
    if ((byte & 0xC0) == 0x80) continue;
    const Utf8Char c = read_utf8(bytes, pos);
    return c.cut && c.length == back ? pos : bytes.size();
  }
  return bytes.size();
}

bool is_nfc_inert(char32_t code) {
  for (const Range& range : kInert) {
    if (code <= range.last) return code >= range.first;
  }
  return false;
}

std::string to_nfc(std::string_view text) {
  std::string out;
  std::vector<utf8proc_int32_t> codes;
  size_t copied = 0;      // text before it stands in `out`
  size_t last_inert = 0;  // start of the last inert character seen (or of the text)
  for (size_t pos = 0; pos < text.size();) {
    const size_t ascii = ascii_prefix(text.substr(pos));
    if (ascii > 0) {
      pos += ascii;
      last_inert = pos - 1;
      continue;
    }
    const Utf8Char c = read_utf8(text, pos);
    if (is_nfc_inert(c.code)) {
      last_inert = pos;
      pos += c.length;
      continue;
    }
    // The stretch that may change: from the character it could join up to the next inert one.
    size_t end = pos + c.length;
    while (end < text.size()) {
      const Utf8Char next = read_utf8(text, end);
      if (is_nfc_inert(next.code)) break;
      end += next.length;
    }
    out.append(text, copied, last_inert - copied);
    compose_stretch(text.substr(last_inert, end - last_inert), &codes, &out);
    copied = end;
    pos = end;
    last_inert = end;
  }
  out.append(text, copied);
  return out;
}

}  // namespace firn::model
