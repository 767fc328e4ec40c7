// Tokenizer: Hugging Face tokenizer.json of byte-level BPE models, both directions.
//
// Pipeline (specification 6.2): added tokens split out of the raw text (longest first), the file's normaliser (null or
// NFC; others refused), the file's split regex run by PCRE2, GPT-2 byte alphabet, BPE by merge rank. Merges may be
// "a b" strings or ["a", "b"] pairs. Nothing is added at either end. Time is near-linear in the length of the text and
// of any single piece; stack use is bounded. Const methods are thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/status.h"
#include "storage/file.h"

namespace firn::model {

// A stretch of text to encode. Added tokens are recognised only where `control` is true: what the template wrote. What
// a user wrote is encoded as ordinary characters even if it spells a control token. Neighbouring pieces are still one
// text for the split regex and BPE: piece borders do not cut tokens.
struct TextPiece {
  std::string text;
  bool control = false;
};

struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool special = false;
};

class Tokenizer {
 public:
  // The fuzzed entry point; `name` is used in messages.
  static Result<Tokenizer> parse(std::string_view tokenizer_json, const std::string& name);
  // DIR/tokenizer.json.
  static Result<Tokenizer> open(storage::FileSystem& fs, const std::string& dir);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Text must be valid UTF-8 (see sanitize_utf8); added tokens recognised everywhere when `added` is true.
  std::vector<int32_t> encode(std::string_view text, bool added = true) const;
  std::vector<int32_t> encode(std::span<const TextPiece> pieces) const;
  // The bytes of one token ("" for ids without a token); added tokens give their content.
  std::string_view token_bytes(int32_t id) const;
  // Bytes of all ids, invalid UTF-8 replaced by U+FFFD, one per maximal broken part. skip_special leaves out added
  // tokens flagged special.
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;

  int32_t vocab_size() const;  // highest id + 1
  bool has_token(int32_t id) const;
  int32_t find_added(std::string_view content) const;  // -1 if there is none
  const std::vector<AddedToken>& added_tokens() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Replaces every maximal invalid part by U+FFFD; *replaced counts them.
std::string sanitize_utf8(std::string_view bytes, int64_t* replaced);
// Length of the longest prefix of `bytes` that ends on a whole UTF-8 character (invalid bytes count as whole).
size_t utf8_complete_prefix(std::string_view bytes);

}  // namespace firn::model
