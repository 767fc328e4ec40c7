// The JSON reader and writer behind chat.h: strict RFC 8259 text in, Python's notation out.
//
// Contract: one pass, time linear in the text (n log n in the members of one object), at most kMaxDepth stack frames,
// at most kMaxValues values. Text that is not UTF-8 is refused, never echoed. A leading byte order mark is skipped.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "model/chat.h"
#include "model/utf8.h"

namespace firn::model {
namespace {

constexpr int kMaxDepth = 128;
// A value costs about a hundred bytes, so fifty megabytes of "0,0,0," would become gigabytes without a limit.
constexpr int64_t kMaxValues = int64_t{1} << 23;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// Keeps the place of a key's first member and the value of its last. Sorting bounds the time whatever the keys are.
void drop_repeated_keys(std::vector<std::pair<std::string, Json>>* members) {
  if (members->size() < 2) return;
  std::vector<size_t> order(members->size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const int c = (*members)[a].first.compare((*members)[b].first);
    return c != 0 ? c < 0 : a < b;
  });
  std::vector<bool> repeated(members->size(), false);
  bool any = false;
  for (size_t i = 0; i < order.size();) {
    size_t end = i + 1;
    while (end < order.size() && (*members)[order[end]].first == (*members)[order[i]].first) ++end;
    if (end - i > 1) {
      any = true;
      (*members)[order[i]].second = std::move((*members)[order[end - 1]].second);
      for (size_t k = i + 1; k < end; ++k) repeated[order[k]] = true;
    }
    i = end;
  }
  if (!any) return;
  size_t to = 0;
  for (size_t from = 0; from < members->size(); ++from) {
    if (repeated[from]) continue;
    if (to != from) (*members)[to] = std::move((*members)[from]);
    ++to;
  }
  members->resize(to);
}

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {
    if (text_.substr(0, 3) == "\xEF\xBB\xBF") at_ = 3;
  }

  Result<Json> document() {
    Json value;
    FIRN_TRY(read_value(0, &value));
    skip_blanks();
    if (at_ != text_.size()) return error(at_, fmt::format("expected the end of the text, found {}", found(at_)));
    return value;
  }

 private:
  Status error(size_t at, const std::string& what) const {
    size_t line = 1;
    size_t column = 1;
    for (size_t i = 0; i < std::min(at, text_.size()); ++i) {
      if (text_[i] == '\n') {
        ++line;
        column = 1;
      } else if ((static_cast<uint8_t>(text_[i]) & 0xC0) != 0x80) {
        ++column;
      }
    }
    return invalid(fmt::format("JSON, line {} column {}: {}", line, column, what));
  }

  // What stands at `at`, printable whatever the bytes are.
  std::string found(size_t at) const {
    if (at >= text_.size()) return "the end of the text";
    const auto c = static_cast<uint8_t>(text_[at]);
    if (c < 0x21 || c > 0x7E) return fmt::format("byte 0x{:02x}", c);
    return fmt::format("'{}'", text_[at]);
  }

  void skip_blanks() {
    while (at_ < text_.size() && is_blank(text_[at_])) ++at_;
  }

  bool take(char c) {
    skip_blanks();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  Status literal(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) {
      return error(at_, fmt::format("expected a value, found {}; the words are true, false and null", found(at_)));
    }
    at_ += word.size();
    return {};
  }

  Status read_value(int depth, Json* out) {
    skip_blanks();
    if (++values_ > kMaxValues) return error(at_, fmt::format("more than {} values in one text", kMaxValues));
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    if (c == '{' || c == '[') {
      if (depth >= kMaxDepth) return error(at_, fmt::format("nested more than {} levels deep", kMaxDepth));
      ++at_;
      return c == '{' ? read_object(depth + 1, out) : read_array(depth + 1, out);
    }
    if (c == '"') {
      out->kind = Json::Kind::kString;
      return read_string(&out->text);
    }
    if (c == '-' || is_digit(c)) return read_number(out);
    if (c == 't' || c == 'f') {
      out->kind = Json::Kind::kBool;
      out->boolean = c == 't';
      return literal(c == 't' ? "true" : "false");
    }
    if (c == 'n') return literal("null");
    return error(at_, fmt::format("expected a value, found {}", found(at_)));
  }

  Status read_array(int depth, Json* out) {
    out->kind = Json::Kind::kArray;
    if (take(']')) return {};
    for (;;) {
      out->items.emplace_back();
      FIRN_TRY(read_value(depth, &out->items.back()));
      if (take(',')) continue;
      if (take(']')) return {};
      return error(at_, fmt::format("expected ',' or ']' in an array, found {}", found(at_)));
    }
  }

  Status read_object(int depth, Json* out) {
    out->kind = Json::Kind::kObject;
    if (take('}')) return {};
    for (;;) {
      skip_blanks();
      if (at_ >= text_.size() || text_[at_] != '"') {
        return error(at_, fmt::format("expected a key in double quotes, found {}", found(at_)));
      }
      out->members.emplace_back();
      FIRN_TRY(read_string(&out->members.back().first));
      if (!take(':')) return error(at_, fmt::format("expected ':' after a key, found {}", found(at_)));
      FIRN_TRY(read_value(depth, &out->members.back().second));
      if (take(',')) continue;
      if (take('}')) break;
      return error(at_, fmt::format("expected ',' or '}}' in an object, found {}", found(at_)));
    }
    drop_repeated_keys(&out->members);
    return {};
  }

  Status read_hex(size_t at, uint32_t* out) const {
    *out = 0;
    for (size_t i = at; i < at + 4; ++i) {
      const char c = i < text_.size() ? text_[i] : '\0';
      uint32_t digit = 0;
      if (is_digit(c)) {
        digit = static_cast<uint32_t>(c - '0');
      } else if (c >= 'a' && c <= 'f') {
        digit = static_cast<uint32_t>(c - 'a' + 10);
      } else if (c >= 'A' && c <= 'F') {
        digit = static_cast<uint32_t>(c - 'A' + 10);
      } else {
        return error(i, fmt::format("expected four hexadecimal digits after \\u, found {}", found(i)));
      }
      *out = *out * 16 + digit;
    }
    return {};
  }

  // At the backslash. Surrogate halves without their other half become U+FFFD.
  Status read_escape(std::string* out) {
    const char c = at_ + 1 < text_.size() ? text_[at_ + 1] : '\0';
    if (c == 'u') {
      uint32_t point = 0;
      FIRN_TRY(read_hex(at_ + 2, &point));
      at_ += 6;
      if (point >= 0xD800 && point <= 0xDBFF && text_.substr(at_, 2) == "\\u") {
        uint32_t low = 0;
        FIRN_TRY(read_hex(at_ + 2, &low));
        if (low >= 0xDC00 && low <= 0xDFFF) {
          at_ += 6;
          point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
        }
      }
      append_utf8(point >= 0xD800 && point <= 0xDFFF ? 0xFFFD : point, out);
      return {};
    }
    static constexpr std::string_view kNames = "\"\\/bfnrt";
    static constexpr std::string_view kValues = "\"\\/\b\f\n\r\t";
    const size_t which = c == '\0' ? std::string_view::npos : kNames.find(c);
    if (which == std::string_view::npos) return error(at_, fmt::format("unknown escape, \\ and {}", found(at_ + 1)));
    out->push_back(kValues[which]);
    at_ += 2;
    return {};
  }

  // At the opening quote.
  Status read_string(std::string* out) {
    const size_t open = at_++;
    size_t plain = at_;  // start of the stretch not yet copied
    for (;;) {
      if (at_ >= text_.size()) return error(open, "a string without its closing quote");
      const auto c = static_cast<uint8_t>(text_[at_]);
      if (c == '"' || c == '\\') {
        out->append(text_.substr(plain, at_ - plain));
        if (c == '"') {
          ++at_;
          return {};
        }
        FIRN_TRY(read_escape(out));
        plain = at_;
      } else if (c < 0x20) {
        return error(at_, fmt::format("control character {} inside a string; write it as \\u{:04x}", found(at_), c));
      } else {
        const Utf8Char character = c < 0x80 ? Utf8Char{c, 1, true} : read_utf8(text_, at_);
        if (!character.valid) return error(at_, fmt::format("text that is not UTF-8, found {}", found(at_)));
        at_ += character.length;
      }
    }
  }

  void skip_digits() {
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
  }

  Status read_number(Json* out) {
    const size_t begin = at_;
    if (text_[at_] == '-') ++at_;
    const size_t digits = at_;
    skip_digits();
    if (at_ == digits) return error(begin, fmt::format("expected a digit after '-', found {}", found(at_)));
    if (text_[digits] == '0' && at_ - digits > 1) return error(begin, "a number with a leading zero");
    bool integer = true;
    if (at_ < text_.size() && text_[at_] == '.') {
      integer = false;
      const size_t fraction = ++at_;
      skip_digits();
      if (at_ == fraction) return error(at_, fmt::format("expected a digit after '.', found {}", found(at_)));
    }
    if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      integer = false;
      ++at_;
      if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
      const size_t exponent = at_;
      skip_digits();
      if (at_ == exponent) return error(at_, fmt::format("expected a digit of the exponent, found {}", found(at_)));
    }
    out->text = text_.substr(begin, at_ - begin);
    if (integer) {
      out->kind = Json::Kind::kInteger;
      if (out->text == "-0") out->text = "0";
      return {};
    }
    out->kind = Json::Kind::kFloat;
    const char* end = out->text.data() + out->text.size();
    // from_chars leaves the value alone when it over- or underflows; strtod tells which of the two.
    if (std::from_chars(out->text.data(), end, out->number).ec != std::errc()) {
      out->number = std::strtod(out->text.c_str(), nullptr);
    }
    if (!std::isfinite(out->number)) return error(begin, "a number beyond the range of a double");
    return {};
  }

  std::string_view text_;
  size_t at_ = 0;
  int64_t values_ = 0;
};

// Python's repr of a finite double: the shortest digits that read back, plain for exponents -4 to 15.
std::string float_text(double x) {
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, x, std::chars_format::scientific).ptr;
  const std::string_view text(buffer, static_cast<size_t>(end - buffer));
  const size_t e = text.find('e');
  if (e == std::string_view::npos) return std::string(text);  // not finite; the reader lets none through
  const int exponent = std::atoi(std::string(text.substr(e + 1)).c_str());
  if (exponent < -4 || exponent >= 16) return std::string(text);
  std::string sign;
  std::string digits;
  for (char c : text.substr(0, e)) {
    if (c == '-') sign = "-";
    if (is_digit(c)) digits.push_back(c);
  }
  if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return sign + digits + std::string(whole - digits.size(), '0') + ".0";
  return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

void write_string(const std::string& text, std::string* out) {
  out->push_back('"');
  for (char c : text) {
    switch (c) {
      case '"':
        *out += "\\\"";
        break;
      case '\\':
        *out += "\\\\";
        break;
      case '\n':
        *out += "\\n";
        break;
      case '\r':
        *out += "\\r";
        break;
      case '\t':
        *out += "\\t";
        break;
      case '\b':
        *out += "\\b";
        break;
      case '\f':
        *out += "\\f";
        break;
      default:
        if (static_cast<uint8_t>(c) < 0x20) {
          *out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        } else {
          out->push_back(c);
        }
    }
  }
  out->push_back('"');
}

void write_value(const Json& value, std::string* out) {
  switch (value.kind) {
    case Json::Kind::kNull:
      *out += "null";
      return;
    case Json::Kind::kBool:
      *out += value.boolean ? "true" : "false";
      return;
    case Json::Kind::kInteger:
      *out += value.text;
      return;
    case Json::Kind::kFloat:
      *out += float_text(value.number);
      return;
    case Json::Kind::kString:
      write_string(value.text, out);
      return;
    case Json::Kind::kArray:
      out->push_back('[');
      for (size_t i = 0; i < value.items.size(); ++i) {
        if (i > 0) *out += ", ";
        write_value(value.items[i], out);
      }
      out->push_back(']');
      return;
    case Json::Kind::kObject:
      out->push_back('{');
      for (size_t i = 0; i < value.members.size(); ++i) {
        if (i > 0) *out += ", ";
        write_string(value.members[i].first, out);
        *out += ": ";
        write_value(value.members[i].second, out);
      }
      out->push_back('}');
      return;
  }
}

}  // namespace

Json::Json() = default;
Json::Json(const Json& other) = default;
Json::Json(Json&& other) noexcept = default;
Json& Json::operator=(const Json& other) = default;
Json& Json::operator=(Json&& other) noexcept = default;
Json::~Json() = default;

const Json* Json::find(std::string_view key) const {
  for (const auto& [name, value] : members) {
    if (name == key) return &value;
  }
  return nullptr;
}

std::string Json::dump() const {
  std::string out;
  write_value(*this, &out);
  return out;
}

Result<Json> parse_json(std::string_view text) { return Reader(text).document(); }

}  // namespace firn::model
