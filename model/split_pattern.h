// The split of text into the pieces inside which BPE works: the tokenizer file's own expression, run by PCRE2.
//
// The file's expression is written for the Oniguruma library. compile() translates what the two libraries read
// differently (\s and \S are Unicode's White_Space in Oniguruma; PCRE2 adds U+180E) and refuses by name what it cannot
// translate. For the known expressions of the model family ASCII pieces are found by hand-written code instead, which a
// test holds equal to the expression; whatever touches another character goes to PCRE2.
//
// An expression that backtracks without bound is refused by compile(), which tries it on long runs. Should one text
// still exceed the limits, its remainder becomes a single piece: slower and split otherwise, but nothing is lost.
// A SplitPattern is immutable; a PieceReader belongs to one thread. Stack use is bounded for pieces of any length.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "runtime/status.h"

namespace firn::model {

class SplitPattern {
 public:
  // keep_gaps: text between two matches is a piece too (behaviour Isolated); otherwise it is dropped, as the reference
  // does (Removed, inverted).
  static Result<SplitPattern> compile(std::string_view expression, bool keep_gaps);
  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;
  ~SplitPattern();

  bool has_ascii_path() const;
  bool has_jit() const;

 private:
  friend class PieceReader;
  struct Impl;
  explicit SplitPattern(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The expression in PCRE2's notation, or what stands in the way.
Result<std::string> translate_expression(std::string_view expression);

class SplitMatcher;  // PCRE2's state of one thread

class PieceReader {
 public:
  // The pattern must outlive the reader. ascii_path = false runs the expression alone: for tests.
  explicit PieceReader(const SplitPattern& pattern, bool ascii_path = true);
  ~PieceReader();
  PieceReader(const PieceReader&) = delete;
  PieceReader& operator=(const PieceReader&) = delete;

  // `valid_utf8` must stay where it is while next() is called.
  void start(std::string_view valid_utf8);
  bool next(std::string_view* piece);

 private:
  bool match(size_t* begin, size_t* end);

  const SplitPattern& pattern_;
  bool ascii_path_;
  std::string_view text_;
  size_t pos_ = 0;
  size_t pending_begin_ = 0, pending_end_ = 0;  // a match found behind a gap
  std::unique_ptr<SplitMatcher> matcher_;       // made when first needed
};

}  // namespace firn::model
