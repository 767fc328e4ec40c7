// What a tokenizer.json says, checked: the steps firn can do, and nothing silently left out.
//
// Contract: parse_tokenizer_json accepts byte-level BPE with a null or NFC normaliser and one split expression;
// anything else is refused by a message that names what the file has. Truncation, padding and the post-processor are
// not applied: prompts are never cut, and the chat template writes the start tokens.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "model/bpe.h"
#include "model/tokenizer.h"
#include "runtime/status.h"

namespace firn::model {

struct TokenizerFile {
  std::string expression;
  bool keep_gaps = false;
  bool nfc = false;
  std::vector<std::string> token_bytes;  // by id; empty: no such token
  std::array<int32_t, 256> byte_ids{};
  std::vector<Merge> merges;              // by rank
  std::vector<AddedToken> added;          // in the file's order
  std::vector<uint8_t> added_normalized;  // beside `added`: matched on normalised text
};

Result<TokenizerFile> parse_tokenizer_json(std::string_view json, const std::string& name);

}  // namespace firn::model
