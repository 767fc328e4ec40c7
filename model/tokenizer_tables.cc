// See tokenizer_tables.h.
#include "model/tokenizer_tables.h"

#include <fmt/format.h>

namespace firn::model {
namespace {

using Json = nlohmann::json;

constexpr size_t kShownBytes = 60;

class TableReader : public nlohmann::json_sax<Json> {
 public:
  TokenizerTables tables;
  Status status;

  bool null() override { return scalar(Json()); }
  bool boolean(bool value) override { return scalar(Json(value)); }
  bool number_integer(number_integer_t value) override { return scalar(Json(value)); }
  bool number_float(number_float_t value, const string_t&) override { return scalar(Json(value)); }
  bool binary(binary_t&) override { return scalar(Json()); }

  bool number_unsigned(number_unsigned_t value) override {
    if (table_ != Table::kVocab || value >= static_cast<uint64_t>(kMostTokenIds)) return scalar(Json(value));
    tables.vocab.emplace_back(std::move(spelling_), static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (table_ != Table::kMerges) return scalar(Json(value));
    if (depth_ == 4) {
      if (n_pair_ >= 2) return bad_merge("a list of three or more");
      (n_pair_++ == 0 ? pair_.first : pair_.second) = std::move(value);
      return true;
    }
    const size_t space = value.find(' ');
    if (space == std::string::npos || value.find(' ', space + 1) != std::string::npos) {
      return fail(fmt::format("merge {} is {}, expected two tokens with one space between", tables.merges.size(),
                              shown_json(Json(value))));
    }
    tables.merges.emplace_back(value.substr(0, space), value.substr(space + 1));
    return true;
  }

  bool start_object(std::size_t) override {
    if (table_ != Table::kNone) return scalar(Json::object());
    if (at_table("vocab")) {
      if (tables.has_vocab) return fail("\"vocab\" stands there twice");
      tables.has_vocab = true;
      table_ = Table::kVocab;
    }
    ++depth_;
    return true;
  }

  bool key(string_t& value) override {
    if (table_ == Table::kVocab) {
      spelling_ = std::move(value);
    } else if (depth_ == 1) {
      first_key_ = std::move(value);
    } else if (depth_ == 2) {
      second_key_ = std::move(value);
    }
    return true;
  }

  bool end_object() override { return close(); }

  bool start_array(std::size_t) override {
    if (table_ == Table::kVocab || (table_ == Table::kMerges && depth_ == 4)) return scalar(Json::array());
    if (table_ == Table::kMerges) n_pair_ = 0;
    if (table_ == Table::kNone && at_table("merges")) {
      if (tables.has_merges) return fail("\"merges\" stands there twice");
      tables.has_merges = true;
      table_ = Table::kMerges;
    }
    ++depth_;
    return true;
  }

  bool end_array() override {
    if (table_ == Table::kMerges && depth_ == 4) {
      if (n_pair_ != 2) return bad_merge(fmt::format("a list of {}", n_pair_));
      tables.merges.push_back(std::move(pair_));
      pair_ = {};
    }
    return close();
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return fail(fmt::format("not valid JSON at byte {}", position));
  }

 private:
  enum class Table { kNone, kVocab, kMerges };

  bool fail(std::string message) {
    status = corrupt(std::move(message));
    return false;
  }
  bool bad_merge(const std::string& found) {
    return fail(fmt::format("merge {} is {}, expected \"a b\" or [\"a\", \"b\"]", tables.merges.size(), found));
  }
  bool at_table(std::string_view name) const { return depth_ == 2 && first_key_ == "model" && second_key_ == name; }

  // A value that has no place in a table.
  bool scalar(const Json& value) {
    if (table_ == Table::kNone) return true;
    if (table_ == Table::kMerges) return bad_merge(shown_json(value));
    return fail(fmt::format("the id of token {} is {}, expected a whole number from 0 to {}",
                            shown_json(Json(spelling_)), shown_json(value), kMostTokenIds - 1));
  }

  bool close() {
    if (--depth_ == 2) table_ = Table::kNone;
    return true;
  }

  int depth_ = 0;  // objects and lists that are open; inside a table 3, inside a merge's pair 4
  Table table_ = Table::kNone;
  std::string first_key_, second_key_, spelling_;
  std::pair<std::string, std::string> pair_;
  int n_pair_ = 0;
};

}  // namespace

std::string shown_json(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kShownBytes) text = text.substr(0, kShownBytes) + "...";
  return text;
}

Result<Json> parse_without_tables(std::string_view text) {
  std::string first, second;
  const auto keep = [&](int depth, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::key && depth == 1) first = value.get<std::string>();
    if (event == Json::parse_event_t::key && depth == 2) second = value.get<std::string>();
    const bool vocab = event == Json::parse_event_t::object_start && second == "vocab";
    const bool merges = event == Json::parse_event_t::array_start && second == "merges";
    return !(depth == 2 && first == "model" && (vocab || merges));
  };
  try {
    return Json::parse(text, keep);
  } catch (const Json::parse_error& error) {
    return corrupt(fmt::format("not valid JSON at byte {} of {}: is the file cut short?", error.byte, text.size()));
  }
}

Result<TokenizerTables> read_tokenizer_tables(std::string_view text) {
  TableReader reader;
  const bool read = Json::sax_parse(text, &reader);
  FIRN_TRY(reader.status);
  if (!read) return corrupt("the vocabulary cannot be read");
  return std::move(reader.tables);
}

}  // namespace firn::model
