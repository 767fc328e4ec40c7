// Reading and checking tokenizer.json. See tokenizer_json.h.
#include "model/tokenizer_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "model/tokenizer_tables.h"
#include "model/utf8.h"

namespace firn::model {
namespace {

using Json = nlohmann::json;

constexpr size_t kShownBytes = 60;

const Json* field(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it == object.end() || it->is_null() || it->is_discarded() ? nullptr : &*it;
}

std::string type_of(const Json& step) {
  const Json* type = field(step, "type");
  return type != nullptr && type->is_string() ? type->get<std::string>() : shown_json(step);
}

bool is_true(const Json& object, const char* key) {
  const Json* value = field(object, key);
  return value != nullptr && value->is_boolean() && value->get<bool>();
}

// The byte-level alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards.
struct ByteAlphabet {
  std::array<char32_t, 256> code_of{};
  std::array<int, 512> byte_of{};
  ByteAlphabet() {
    byte_of.fill(-1);
    char32_t next = 256;
    for (size_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      code_of[byte] = printable ? static_cast<char32_t>(byte) : next++;
      byte_of[code_of[byte]] = static_cast<int>(byte);
    }
  }
  // Bytes a token's spelling stands for; a spelling outside the alphabet stands for itself, as in the reference.
  std::string bytes(std::string_view spelling) const {
    std::string out;
    for (size_t pos = 0; pos < spelling.size();) {
      const Utf8Char c = read_utf8(spelling, pos);
      if (!c.valid || c.code >= byte_of.size() || byte_of[c.code] < 0) return std::string(spelling);
      out.push_back(static_cast<char>(static_cast<uint8_t>(byte_of[c.code])));
      pos += c.length;
    }
    return out;
  }
};

class Reader {
 public:
  Reader(const Json& root, const TokenizerTables& tables, const std::string& name)
      : root_(root), tables_(tables), name_(name) {}

  Result<TokenizerFile> run() {
    if (!root_.is_object()) return bad(fmt::format("expected a JSON object, found {}", shown_json(root_)));
    FIRN_TRY(check_model());
    FIRN_TRY(read_normalizer());
    FIRN_TRY(read_pre_tokenizer());
    FIRN_TRY(check_decoder());
    FIRN_TRY(read_vocabulary());
    FIRN_TRY(read_merges());
    FIRN_TRY(read_added());
    return std::move(file_);
  }

 private:
  Status bad(const std::string& what) const { return corrupt(fmt::format("{}: {}", name_, what)); }
  Status refuse(const std::string& what) const {
    return unsupported(fmt::format("{}: {}; firn runs byte-level BPE tokenizers of the MiniMax kind", name_, what));
  }

  Status check_model() {
    model_ = field(root_, "model");
    if (model_ == nullptr || !model_->is_object()) {
      return bad("it has no \"model\" object: is this a tokenizer.json of the Hugging Face tokenizers library?");
    }
    if (const Json* type = field(*model_, "type"); type != nullptr && *type != "BPE") {
      return refuse(fmt::format("the model is of type {}, expected \"BPE\"", shown_json(*type)));
    }
    if (const Json* vocab = field(*model_, "vocab")) {
      return bad(fmt::format("\"vocab\" is {}, expected an object", shown_json(*vocab)));
    }
    if (const Json* merges = field(*model_, "merges")) {
      return bad(fmt::format("\"merges\" is {}, expected a list", shown_json(*merges)));
    }
    if (!tables_.has_vocab || !tables_.has_merges) {
      return bad("\"model\" lacks \"vocab\" or \"merges\", which a BPE model has");
    }
    for (const char* flag : {"byte_fallback", "ignore_merges"}) {
      if (is_true(*model_, flag)) return refuse(fmt::format("the model has \"{}\": true, expected false", flag));
    }
    for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (const Json* value = field(*model_, affix); value != nullptr && *value != "") {
        return refuse(fmt::format("the model has \"{}\": {}, expected none", affix, shown_json(*value)));
      }
    }
    if (const Json* dropout = field(*model_, "dropout"); dropout != nullptr && *dropout != 0.0) {
      return refuse(fmt::format("the model has \"dropout\": {}, expected none", shown_json(*dropout)));
    }
    return {};
  }

  Status read_normalizer() {
    const Json* step = field(root_, "normalizer");
    if (step == nullptr) return {};
    const Json* steps = type_of(*step) == "Sequence" ? field(*step, "normalizers") : nullptr;
    if (steps != nullptr && steps->is_array() && steps->empty()) return {};
    if (steps != nullptr && steps->is_array() && steps->size() == 1) step = &(*steps)[0];
    if (type_of(*step) != "NFC") {
      return refuse(fmt::format("the normalizer is {}, expected null or NFC", shown_json(*step)));
    }
    file_.nfc = true;
    return {};
  }

  Status read_pre_tokenizer() {
    const Json* step = field(root_, "pre_tokenizer");
    if (step == nullptr) return refuse("there is no pre_tokenizer, expected Split and ByteLevel");
    std::vector<const Json*> steps;
    if (type_of(*step) == "Sequence") {
      const Json* list = field(*step, "pretokenizers");
      if (list == nullptr || !list->is_array()) return bad("the pre_tokenizer Sequence has no list \"pretokenizers\"");
      for (const Json& entry : *list) steps.push_back(&entry);
    } else {
      steps.push_back(step);
    }
    if (steps.size() != 2 || type_of(*steps[0]) != "Split" || type_of(*steps[1]) != "ByteLevel") {
      std::string found;
      for (const Json* entry : steps) found += (found.empty() ? "" : ", ") + type_of(*entry).substr(0, kShownBytes);
      return refuse(fmt::format("the pre_tokenizer has the steps [{}], expected [Split, ByteLevel]", found));
    }
    const Json& byte_level = *steps[1];
    const Json* use_regex = field(byte_level, "use_regex");  // absent means true
    if (use_regex == nullptr || *use_regex != false) {
      return refuse("the ByteLevel step splits again (\"use_regex\" is not false)");
    }
    const Json* prefix = field(byte_level, "add_prefix_space");
    if (prefix == nullptr || *prefix != false) {
      return refuse("the ByteLevel step adds a space in front (\"add_prefix_space\" is not false)");
    }
    return read_split(*steps[0]);
  }

  Status read_split(const Json& split) {
    const Json* pattern = field(split, "pattern");
    const Json* regex = pattern == nullptr ? nullptr : field(*pattern, "Regex");
    if (regex == nullptr || !regex->is_string()) {
      return refuse(fmt::format("the Split pattern is {}, expected {{\"Regex\": ...}}",
                                pattern == nullptr ? "absent" : shown_json(*pattern)));
    }
    file_.expression = regex->get<std::string>();
    if (!is_valid_utf8(file_.expression)) return bad("the Split pattern is not valid UTF-8");
    const Json* behavior = field(split, "behavior");
    const bool invert = is_true(split, "invert");
    if (behavior != nullptr && *behavior == "Removed" && invert) return {};
    if (behavior != nullptr && *behavior == "Isolated") {
      file_.keep_gaps = true;
      return {};
    }
    return refuse(fmt::format("the Split step has behavior {} with invert {}, expected Removed with true, or Isolated",
                              behavior == nullptr ? "absent" : shown_json(*behavior), invert));
  }

  Status check_decoder() const {
    const Json* decoder = field(root_, "decoder");
    if (decoder == nullptr || type_of(*decoder) == "ByteLevel") return {};
    return refuse(fmt::format("the decoder is {}, expected ByteLevel", shown_json(*decoder)));
  }

  Status check_id(const Json& id, const std::string& of, int64_t* out) const {
    const bool fits = id.is_number_unsigned() && id.get<uint64_t>() < static_cast<uint64_t>(kMostTokenIds);
    if (!fits) {
      return bad(fmt::format("the id of token {} is {}, expected a whole number from 0 to {}", shown_json(Json(of)),
                             shown_json(id), kMostTokenIds - 1));
    }
    *out = static_cast<int64_t>(id.get<uint64_t>());
    return {};
  }

  void make_room(int64_t id) {
    if (static_cast<size_t>(id) >= file_.token_bytes.size()) file_.token_bytes.resize(static_cast<size_t>(id) + 1);
  }

  Status read_vocabulary() {
    ids_.reserve(tables_.vocab.size());
    file_.token_bytes.resize(tables_.vocab.size());
    for (const auto& [spelling, id] : tables_.vocab) {
      if (spelling.empty()) return bad("\"vocab\" has a token without characters");
      make_room(id);
      std::string& bytes = file_.token_bytes[static_cast<size_t>(id)];
      if (!bytes.empty())
        return bad(fmt::format("two tokens have the id {}; one is {}", id, shown_json(Json(spelling))));
      bytes = alphabet_.bytes(spelling);
      if (!ids_.emplace(spelling, static_cast<int32_t>(id)).second) {
        return bad(fmt::format("\"vocab\" has the token {} twice", shown_json(Json(spelling))));
      }
    }
    std::string spelling;
    for (size_t byte = 0; byte < 256; ++byte) {
      spelling.clear();
      append_utf8(alphabet_.code_of[byte], &spelling);
      const auto it = ids_.find(spelling);
      if (it == ids_.end()) {
        return bad(
            fmt::format("\"vocab\" lacks the token of byte 0x{:02x} ({}), which byte-level BPE needs", byte, spelling));
      }
      file_.byte_ids[byte] = it->second;
    }
    return {};
  }

  Status read_merges() {
    file_.merges.reserve(tables_.merges.size());
    std::string joined;
    for (size_t rank = 0; rank < tables_.merges.size(); ++rank) {
      const auto& [left, right] = tables_.merges[rank];
      joined.assign(left).append(right);
      Merge merge;
      const auto look = [&](const std::string& spelling, int32_t* id) -> Status {
        const auto it = ids_.find(spelling);
        if (it == ids_.end()) {
          return bad(fmt::format("merge {} ({}) needs the token {}, which \"vocab\" lacks", rank,
                                 shown_json(Json(tables_.merges[rank])), shown_json(Json(spelling))));
        }
        *id = it->second;
        return {};
      };
      FIRN_TRY(look(left, &merge.left));
      FIRN_TRY(look(right, &merge.right));
      FIRN_TRY(look(joined, &merge.merged));
      file_.merges.push_back(merge);
    }
    return {};
  }

  Status read_added() {
    const Json* list = field(root_, "added_tokens");
    if (list == nullptr) return {};
    if (!list->is_array()) return bad(fmt::format("\"added_tokens\" is {}, expected a list", shown_json(*list)));
    std::unordered_map<std::string_view, int64_t> seen;
    for (const Json& entry : *list) {
      const Json* content = field(entry, "content");
      const Json* value = field(entry, "id");
      if (content == nullptr || !content->is_string() || content->get_ref<const std::string&>().empty() ||
          value == nullptr) {
        return bad(fmt::format("the added token {} lacks a \"content\" or an \"id\"", shown_json(entry)));
      }
      const std::string& text = content->get_ref<const std::string&>();
      int64_t id = 0;
      FIRN_TRY(check_id(*value, text, &id));
      for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
        if (is_true(entry, flag)) {
          return refuse(fmt::format("the added token {} has \"{}\": true, expected false", shown_json(*content), flag));
        }
      }
      if (!seen.emplace(text, id).second) return bad(fmt::format("two added tokens are {}", shown_json(*content)));
      const auto base = ids_.find(text);
      make_room(id);
      std::string& bytes = file_.token_bytes[static_cast<size_t>(id)];
      if (base != ids_.end() ? base->second != id : !bytes.empty()) {
        return bad(
            fmt::format("the added token {} has the id {}, which disagrees with the token of that id or that text",
                        shown_json(*content), id));
      }
      bytes = text;
      if (is_true(entry, "special")) FIRN_TRY(check_unreachable(static_cast<int32_t>(id), text));
      file_.added.push_back({static_cast<int32_t>(id), text, is_true(entry, "special")});
      file_.added_normalized.push_back(is_true(entry, "normalized"));
    }
    return {};
  }

  // Ordinary text must not be able to give a control token.
  Status check_unreachable(int32_t id, const std::string& text) const {
    const bool byte = std::find(file_.byte_ids.begin(), file_.byte_ids.end(), id) != file_.byte_ids.end();
    const bool merged =
        std::any_of(file_.merges.begin(), file_.merges.end(), [id](const Merge& merge) { return merge.merged == id; });
    if (!byte && !merged) return {};
    return refuse(
        fmt::format("the special token {} (id {}) is also what merging ordinary text gives, so a user's text "
                    "could forge it",
                    shown_json(Json(text)), id));
  }

  const Json& root_;
  const TokenizerTables& tables_;
  const std::string& name_;
  const Json* model_ = nullptr;
  TokenizerFile file_;
  ByteAlphabet alphabet_;
  std::unordered_map<std::string_view, int32_t> ids_;  // by spelling; the keys live in tables_
};

}  // namespace

Result<TokenizerFile> parse_tokenizer_json(std::string_view json, const std::string& name) {
  auto root = parse_without_tables(json);
  if (!root.ok()) return root.status().with_context(name);
  auto tables = read_tokenizer_tables(json);
  if (!tables.ok()) return tables.status().with_context(name);
  return Reader(*root, *tables, name).run();
}

}  // namespace firn::model
