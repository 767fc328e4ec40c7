// From Oniguruma's notation, as tokenizer.json files use it, to PCRE2's. See split_pattern.h.
#include <fmt/format.h>

#include <cctype>

#include "model/split_pattern.h"

namespace firn::model {
namespace {

// Unicode's White_Space, and everything else, as the inside of a character class.
constexpr std::string_view kSpace =
    "\\x{09}-\\x{0d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";
constexpr std::string_view kNotSpace =
    "\\x{00}-\\x{08}\\x{0e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}"
    "\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}";

class Translator {
 public:
  explicit Translator(std::string_view in) : in_(in) {}

  Result<std::string> run() {
    while (pos_ < in_.size()) {
      const char c = in_[pos_];
      if (c == '\\') {
        FIRN_TRY(escape());
      } else if (in_class_) {
        FIRN_TRY(class_member(c));
      } else {
        FIRN_TRY(outside(c));
      }
    }
    return std::move(out_);
  }

 private:
  Status refuse(std::string_view what) const {
    return unsupported(
        fmt::format("the split expression has {} at byte {}, which firn does not know how to run", what, pos_));
  }

  void copy(size_t n) {
    out_.append(in_, pos_, n);
    pos_ += n;
  }

  bool starts(std::string_view what) const { return in_.substr(pos_).substr(0, what.size()) == what; }

  Status escape() {
    if (pos_ + 1 >= in_.size()) return refuse("a backslash at its end");
    const char c = in_[pos_ + 1];
    if (c == 's' || c == 'S') {
      const std::string_view members = c == 's' ? kSpace : kNotSpace;
      out_ += in_class_ ? std::string(members) : fmt::format("[{}]", members);
      pos_ += 2;
      return {};
    }
    if (c == 'v') {  // a vertical tab there, a class here
      out_ += "\\x{0b}";
      pos_ += 2;
      return {};
    }
    if (c == 'p' || c == 'P') {
      const size_t close = in_.find('}', pos_);
      if (pos_ + 2 >= in_.size() || in_[pos_ + 2] != '{' || close == std::string_view::npos) {
        return refuse("a property without braces");
      }
      copy(close + 1 - pos_);
      return {};
    }
    if (c == 'u' || c == 'x') return code_point(c);
    if (std::string_view("dDrntfae").find(c) != std::string_view::npos || std::ispunct(static_cast<unsigned char>(c))) {
      copy(2);
      return {};
    }
    return refuse(fmt::format("\\{}", std::isprint(static_cast<unsigned char>(c)) ? std::string(1, c) : "?"));
  }

  // \uHHHH, \xHH, \x{H...}
  Status code_point(char kind) {
    size_t begin = pos_ + 2, end = begin;
    const bool braces = kind == 'x' && begin < in_.size() && in_[begin] == '{';
    if (braces) end = ++begin;
    const size_t most = braces ? 6 : kind == 'u' ? 4 : 2;
    while (end < in_.size() && end - begin < most && std::isxdigit(static_cast<unsigned char>(in_[end]))) ++end;
    const size_t digits = end - begin;
    if (digits == 0 || (kind == 'u' && digits != 4) || (braces && (end >= in_.size() || in_[end] != '}'))) {
      return refuse(fmt::format("a broken \\{} escape", kind));
    }
    out_ += fmt::format("\\x{{{}}}", in_.substr(begin, digits));
    pos_ = braces ? end + 1 : end;
    return {};
  }

  Status class_member(char c) {
    if (c == '[') return refuse("a class inside a class");
    if (starts("&&")) return refuse("an intersection of classes");
    if (c == ']') in_class_ = false;
    copy(1);
    return {};
  }

  Status outside(char c) {
    if (c == '[') {
      in_class_ = true;
      copy(starts("[^") ? 2 : 1);
      if (starts("]")) return refuse("an empty class");
      return {};
    }
    if (c == '^' || c == '$') return refuse(fmt::format("the anchor {}", c));
    if (c == '{') return repeat();
    if (c == '(' && starts("(?")) {
      for (const std::string_view group : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"}) {
        if (!starts(group)) continue;
        copy(group.size());
        return {};
      }
      return refuse("a group of an unknown kind");
    }
    if (c == '(' && starts("(*")) return refuse("a control verb");
    copy(1);
    return {};
  }

  Status repeat() {
    const size_t close = in_.find('}', pos_);
    const bool number = pos_ + 1 < in_.size() && std::isdigit(static_cast<unsigned char>(in_[pos_ + 1]));
    if (close == std::string_view::npos || !number) return refuse("a brace that begins no repetition");
    copy(close + 1 - pos_);
    if (starts("+")) return refuse("a repetition of a repetition");
    return {};
  }

  std::string_view in_;
  std::string out_;
  size_t pos_ = 0;
  bool in_class_ = false;
};

}  // namespace

Result<std::string> translate_expression(std::string_view expression) { return Translator(expression).run(); }

}  // namespace firn::model
