// The two large tables of a tokenizer.json, vocab and merges, read without building a JSON tree of them: a tree of
// 200,000 tokens takes longer to build and free than all the rest.
//
// Contract: read_tokenizer_tables takes text that parse_without_tables accepted. It checks the shape of the tables'
// entries and nothing else; messages do not name the file.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/status.h"

namespace firn::model {

struct TokenizerTables {
  std::vector<std::pair<std::string, int64_t>> vocab;       // spelling, id; in the file's order
  std::vector<std::pair<std::string, std::string>> merges;  // in the file's order
  bool has_vocab = false;
  bool has_merges = false;
};

// Ids a file may use: far above any model's, low enough to be a table's size.
inline constexpr int64_t kMostTokenIds = int64_t{1} << 22;

// The document less model.vocab if it is an object and model.merges if it is a list.
Result<nlohmann::json> parse_without_tables(std::string_view text);
Result<TokenizerTables> read_tokenizer_tables(std::string_view text);

// A value as a message shows it: short, one line, printable.
std::string shown_json(const nlohmann::json& value);

}  // namespace firn::model
