// PCRE2 behind SplitPattern, and the pieces of ASCII text of the known expressions. See split_pattern.h.
#include "model/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace firn::model {
namespace {

// The expressions of the model family. They differ in whether a slash may follow the line break after punctuation.
#define FIRN_SPLIT_WORDS                                                                                          \
  R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)" \
  R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)" \
  R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+)"
constexpr std::string_view kKnownSlash = FIRN_SPLIT_WORDS R"([\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kKnownPlain = FIRN_SPLIT_WORDS R"([\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
#undef FIRN_SPLIT_WORDS

enum Kind : uint8_t { kOther, kUpper, kLower, kDigit, kBreak, kBlank, kWide };  // kWide: not ASCII, or not yet known

constexpr std::array<Kind, 256> kKinds = [] {
  std::array<Kind, 256> kinds{};
  for (size_t c = 0; c < 256; ++c) {
    Kind kind = kOther;
    if (c >= 128) {
      kind = kWide;
    } else if (c >= 'A' && c <= 'Z') {
      kind = kUpper;
    } else if (c >= 'a' && c <= 'z') {
      kind = kLower;
    } else if (c >= '0' && c <= '9') {
      kind = kDigit;
    } else if (c == '\r' || c == '\n') {
      kind = kBreak;
    } else if (c == ' ' || (c >= 9 && c <= 13)) {
      kind = kBlank;
    }
    kinds[c] = kind;
  }
  return kinds;
}();

// The piece at `pos` by the known expressions, if it and the character behind it are ASCII; 0 leaves it to PCRE2.
class AsciiPieces {
 public:
  AsciiPieces(std::string_view text, bool slash) : text_(text), slash_(slash) {}

  size_t length_at(size_t pos) const {
    const Kind first = kind(pos);
    if (first == kWide) return 0;
    if (first == kDigit) return digits(pos);
    // The first two alternatives: one character of any kind but break, letter or digit, then letters.
    const bool lead = first == kOther || first == kBlank;
    const size_t word = pos + (lead ? 1 : 0);
    if (word < text_.size()) {
      const Kind k = kind(word);
      if (k == kWide) return 0;
      if (k == kUpper || k == kLower) return letters(pos, word);
    }
    if (first == kOther) return marks(pos, pos);
    if (text_[pos] == ' ' && word < text_.size() && kind(word) == kOther) return marks(pos, word);
    return blanks(pos);
  }

 private:
  Kind kind(size_t pos) const { return kKinds[static_cast<uint8_t>(text_[pos])]; }
  bool wide(size_t pos) const { return pos < text_.size() && kind(pos) == kWide; }
  size_t run(size_t pos, Kind k) const {
    while (pos < text_.size() && kind(pos) == k) ++pos;
    return pos;
  }

  size_t digits(size_t pos) const {
    size_t end = pos + 1;
    while (end < text_.size() && end < pos + 3 && kind(end) == kDigit) ++end;
    return end < pos + 3 && wide(end) ? 0 : end - pos;
  }

  size_t letters(size_t pos, size_t word) const {
    size_t end = run(word, kUpper);
    if (wide(end)) return 0;
    end = run(end, kLower);
    if (wide(end)) return 0;
    if (end + 1 >= text_.size() || text_[end] != '\'') return end - pos;
    if (wide(end + 1)) return 0;  // some letters are equal to ASCII ones but for case
    const auto lower = [&](size_t i) { return static_cast<char>(text_[i] | 0x20); };
    const char a = lower(end + 1);
    if (kind(end + 1) != kUpper && kind(end + 1) != kLower) return end - pos;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return end + 2 - pos;
    if (a != 'r' && a != 'v' && a != 'l') return end - pos;
    if (end + 2 >= text_.size()) return end - pos;
    if (wide(end + 2)) return 0;
    const Kind k = kind(end + 2);
    if ((k == kUpper || k == kLower) && lower(end + 2) == (a == 'l' ? 'l' : 'e')) return end + 3 - pos;
    return end - pos;
  }

  // Punctuation from `first`, then line breaks (and slashes).
  size_t marks(size_t pos, size_t first) const {
    size_t end = run(first, kOther);
    if (wide(end)) return 0;
    while (end < text_.size() && (kind(end) == kBreak || (slash_ && text_[end] == '/'))) ++end;
    return end - pos;
  }

  // White space: to its last line break if it has one; else all but the last, unless the text ends.
  size_t blanks(size_t pos) const {
    size_t end = pos, after_break = pos;
    while (end < text_.size() && (kind(end) == kBreak || kind(end) == kBlank)) {
      if (kind(end++) == kBreak) after_break = end;
    }
    if (wide(end)) return 0;
    if (after_break > pos) return after_break - pos;
    return end < text_.size() && end > pos + 1 ? end - 1 - pos : end - pos;
  }

  std::string_view text_;
  bool slash_;
};

struct FreeCode {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
};
struct FreeData {
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
};
struct FreeContext {
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
};
struct FreeCompile {
  void operator()(pcre2_compile_context* p) const { pcre2_compile_context_free(p); }
};

constexpr uint32_t kHeapLimitKib = uint32_t{1} << 20;
constexpr uint64_t kBaseSteps = 1000000;
constexpr uint64_t kStepsPerByte = 100;

}  // namespace

struct SplitPattern::Impl {
  std::unique_ptr<pcre2_code, FreeCode> code;
  bool keep_gaps = false;
  bool jit = false;
  bool known = false;
  bool slash = false;
};

SplitPattern::SplitPattern(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;
SplitPattern::~SplitPattern() = default;
bool SplitPattern::has_ascii_path() const { return impl_->known; }
bool SplitPattern::has_jit() const { return impl_->jit; }

class SplitMatcher {
 public:
  SplitMatcher() : data_(pcre2_match_data_create(1, nullptr)), context_(pcre2_match_context_create(nullptr)) {
    FIRN_CHECK(data_ && context_, "no memory to match the split expression");
    pcre2_set_heap_limit(context_.get(), kHeapLimitKib);
  }

  void set_limit(size_t text_bytes) {
    const uint64_t steps = std::min<uint64_t>(kBaseSteps + kStepsPerByte * text_bytes, UINT32_MAX);
    pcre2_set_match_limit(context_.get(), static_cast<uint32_t>(steps));
    pcre2_set_depth_limit(context_.get(), static_cast<uint32_t>(steps));
  }

  // PCRE2's result code. Compiled code has 32 KiB of the thread's stack; what needs more goes to the interpreter, whose
  // stack is on the heap.
  int run(const pcre2_code* code, bool jit, std::string_view text, size_t pos) {
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    if (jit) rc = pcre2_jit_match(code, subject, text.size(), pos, PCRE2_NO_UTF_CHECK, data_.get(), context_.get());
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT || rc == PCRE2_ERROR_JIT_BADOPTION) {
      rc = pcre2_match(code, subject, text.size(), pos, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data_.get(), context_.get());
    }
    return rc;
  }

  const PCRE2_SIZE* offsets() const { return pcre2_get_ovector_pointer(data_.get()); }

 private:
  std::unique_ptr<pcre2_match_data, FreeData> data_;
  std::unique_ptr<pcre2_match_context, FreeContext> context_;
};

Result<SplitPattern> SplitPattern::compile(std::string_view expression, bool keep_gaps) {
  FIRN_ASSIGN(const std::string translated, translate_expression(expression));
  auto impl = std::make_unique<Impl>();
  impl->keep_gaps = keep_gaps;
  impl->known = expression == kKnownSlash || expression == kKnownPlain;
  impl->slash = expression == kKnownSlash;
  std::unique_ptr<pcre2_compile_context, FreeCompile> context(pcre2_compile_context_create(nullptr));
  if (!context) return no_memory("no memory to compile the split expression");
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  impl->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                 PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, context.get()));
  if (!impl->code) {
    PCRE2_UCHAR text[256] = {};
    pcre2_get_error_message(error, text, sizeof text);
    return corrupt(fmt::format("the split expression does not compile: {} (at byte {} of {})",
                               reinterpret_cast<const char*>(text), offset, translated));
  }
  impl->jit = pcre2_jit_compile(impl->code.get(), PCRE2_JIT_COMPLETE) == 0;

  // Runs on which a careless expression takes quadratic or exponential time.
  SplitMatcher matcher;
  for (const std::string_view unit : {"a", "A", "1", " ", "\n", "^", "'", "aA", " a", "\xE4\xB8\x80", "\xCC\x81"}) {
    std::string text;
    while (text.size() < 4096) text += unit;
    text += "\x01";
    matcher.set_limit(text.size());
    const int rc = matcher.run(impl->code.get(), impl->jit, text, 0);
    if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) {
      return unsupported(
          fmt::format("the split expression gives up on a run of 4096 bytes (PCRE2 error {}): its cost "
                      "has no bound",
                      rc));
    }
  }
  return SplitPattern(std::move(impl));
}

PieceReader::PieceReader(const SplitPattern& pattern, bool ascii_path)
    : pattern_(pattern), ascii_path_(ascii_path && pattern.impl_->known) {}
PieceReader::~PieceReader() = default;

void PieceReader::start(std::string_view valid_utf8) {
  text_ = valid_utf8;
  pos_ = pending_begin_ = pending_end_ = 0;
  if (matcher_) matcher_->set_limit(text_.size());
}

// The next match that is not empty, from pos_; false if there is none.
bool PieceReader::match(size_t* begin, size_t* end) {
  if (!matcher_) {
    matcher_ = std::make_unique<SplitMatcher>();
    matcher_->set_limit(text_.size());
  }
  for (size_t from = pos_; from < text_.size();) {
    const int rc = matcher_->run(pattern_.impl_->code.get(), pattern_.impl_->jit, text_, from);
    if (rc == PCRE2_ERROR_NOMATCH) return false;
    if (rc < 0) {
      *begin = from;
      *end = text_.size();
      return true;
    }
    const PCRE2_SIZE* offsets = matcher_->offsets();
    *begin = std::max<size_t>(offsets[0], pos_);
    *end = offsets[1];
    if (*end > *begin) return true;
    from = std::max(offsets[1], from) + 1;
    while (from < text_.size() && (static_cast<uint8_t>(text_[from]) & 0xC0) == 0x80) ++from;
  }
  return false;
}

bool PieceReader::next(std::string_view* piece) {
  if (pos_ >= text_.size()) return false;
  size_t begin = pos_, end = pos_;
  if (pending_end_ > pending_begin_) {
    begin = pending_begin_;
    end = pending_end_;
    pending_begin_ = pending_end_ = 0;
  } else if (ascii_path_ && (end = pos_ + AsciiPieces(text_, pattern_.impl_->slash).length_at(pos_)) > pos_) {
    begin = pos_;
  } else if (!match(&begin, &end)) {
    begin = pos_;
    end = text_.size();
    pos_ = end;
    if (!pattern_.impl_->keep_gaps) return false;
    *piece = text_.substr(begin, end - begin);
    return true;
  }
  if (begin > pos_ && pattern_.impl_->keep_gaps) {
    *piece = text_.substr(pos_, begin - pos_);
    pending_begin_ = begin;
    pending_end_ = end;
    pos_ = begin;
    return true;
  }
  *piece = text_.substr(begin, end - begin);
  pos_ = end;
  return true;
}

}  // namespace firn::model
