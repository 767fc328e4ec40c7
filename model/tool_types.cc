// Types of tool arguments: from the text the model wrote to JSON, by the tool's schema.
//
// The declared type wins: a string stays a string whatever it looks like, and what does not convert stays the text it
// was. Alternatives (type lists, anyOf, oneOf, allOf, local $ref) are taken together; of their types the first that the
// text fits counts, text last. Without a schema a scalar is converted only if the template would have written that
// value with exactly these characters, so 02134, 1e5 and null stay text.
#include <algorithm>
#include <unordered_map>

#include "model/tool_parser.h"

namespace firn::model {
namespace {

using Kind = Json::Kind;

enum Type : unsigned { kNull = 1, kInteger = 2, kNumber = 4, kBoolean = 8, kObject = 16, kArray = 32, kString = 64 };

constexpr size_t kMaxAlternatives = 64;
constexpr int kMaxReferences = 16;
constexpr int64_t kMaxExponent = 400;  // 1e400 is beyond any double; longer integers must be written out

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

Json string_json(std::string_view text) {
  Json json;
  json.kind = Kind::kString;
  json.text = text;
  return json;
}

Json empty_json(Kind kind) {
  Json json;
  json.kind = kind;
  return json;
}

const Json* object_or_null(const Json* json) { return json != nullptr && json->kind == Kind::kObject ? json : nullptr; }

// "#/$defs/x" inside `root`; nullptr for anything else.
const Json* follow(const std::string& reference, const Json* root) {
  if (root == nullptr || reference.empty() || reference[0] != '#') return nullptr;
  const Json* at = root;
  size_t begin = 1;
  while (begin < reference.size() && at != nullptr) {
    if (reference[begin] != '/') return nullptr;
    const size_t end = std::min(reference.find('/', begin + 1), reference.size());
    std::string step;
    for (size_t i = begin + 1; i < end; ++i) {
      if (reference[i] == '~' && i + 1 < end && (reference[i + 1] == '0' || reference[i + 1] == '1')) {
        step += reference[++i] == '0' ? '~' : '/';
      } else {
        step += reference[i];
      }
    }
    if (at->kind == Kind::kArray) {
      const bool index = !step.empty() && step.size() < 6 && step.find_first_not_of("0123456789") == std::string::npos;
      const size_t i = index ? std::stoul(step) : at->items.size();
      at = i < at->items.size() ? &at->items[i] : nullptr;
    } else {
      at = at->find(step);
    }
    begin = end;
  }
  return object_or_null(at);
}

// The schema and every alternative in it, in order; bounded also for schemas that refer to themselves.
class Alternatives {
 public:
  Alternatives(const Json* schema, const Json* root) : root_(root) { add(schema, 0); }

  const std::vector<const Json*>& list() const { return list_; }

  // The allowed types in the order named; empty if nothing is said.
  std::vector<Type> types() const {
    std::vector<Type> out;
    auto put = [&](Type type) {
      if (std::find(out.begin(), out.end(), type) == out.end()) out.push_back(type);
    };
    for (const Json* schema : list_) {
      const Json* type = schema->find("type");
      if (type != nullptr) {
        add_named(*type, put);
        for (const Json& one : type->items) add_named(one, put);
      } else {
        if (const Json* values = schema->find("enum")) {
          for (const Json& value : values->items) put(type_of(value));
        }
        if (const Json* value = schema->find("const")) put(type_of(*value));
        if (schema->find("properties") != nullptr) put(kObject);
        if (schema->find("items") != nullptr || schema->find("prefixItems") != nullptr) put(kArray);
      }
      const Json* nullable = schema->find("nullable");
      if (nullable != nullptr && nullable->boolean && !out.empty()) put(kNull);
    }
    return out;
  }

  // Whether a value that must be one of a list may be exactly this text.
  bool lists_text(std::string_view text) const {
    auto is = [&](const Json& value) { return value.kind == Kind::kString && value.text == text; };
    for (const Json* schema : list_) {
      const Json* values = schema->find("enum");
      if (values != nullptr && std::any_of(values->items.begin(), values->items.end(), is)) return true;
      const Json* value = schema->find("const");
      if (value != nullptr && is(*value)) return true;
    }
    return false;
  }

  const Json* member(std::string_view key) const {
    for (const Json* schema : list_) {
      const Json* properties = object_or_null(schema->find("properties"));
      const Json* found = properties == nullptr ? nullptr : object_or_null(properties->find(key));
      if (found != nullptr) return found;
    }
    for (const Json* schema : list_) {
      if (const Json* found = object_or_null(schema->find("additionalProperties"))) return found;
    }
    return nullptr;
  }

  const Json* item(size_t index) const {
    for (const Json* schema : list_) {
      for (const char* key : {"prefixItems", "items"}) {
        const Json* items = schema->find(key);
        if (items == nullptr) continue;
        if (items->kind == Kind::kObject) return items;
        if (index < items->items.size()) return object_or_null(&items->items[index]);
      }
    }
    return nullptr;
  }

 private:
  void add(const Json* schema, int references) {
    if (object_or_null(schema) == nullptr || list_.size() >= kMaxAlternatives) return;
    const Json* reference = schema->find("$ref");
    if (reference != nullptr && references < kMaxReferences) add(follow(reference->text, root_), references + 1);
    list_.push_back(schema);
    for (const char* key : {"anyOf", "oneOf", "allOf"}) {
      const Json* branches = schema->find(key);
      if (branches == nullptr) continue;
      for (const Json& branch : branches->items) add(&branch, references + 1);
    }
  }

  static Type type_of(const Json& value) {
    switch (value.kind) {
      case Kind::kNull:
        return kNull;
      case Kind::kBool:
        return kBoolean;
      case Kind::kInteger:
        return kInteger;
      case Kind::kFloat:
        return kNumber;
      case Kind::kString:
        return kString;
      case Kind::kArray:
        return kArray;
      case Kind::kObject:
        return kObject;
    }
    return kString;
  }

  template <typename Put>
  static void add_named(const Json& name, const Put& put) {
    static constexpr std::pair<std::string_view, Type> kNames[] = {
        {"null", kNull},     {"integer", kInteger}, {"number", kNumber}, {"boolean", kBoolean},
        {"object", kObject}, {"array", kArray},     {"string", kString}};
    for (const auto& [text, type] : kNames) {
      if (name.kind == Kind::kString && name.text == text) put(type);
    }
  }

  const Json* root_;
  std::vector<const Json*> list_;
};

bool allows(const std::vector<Type>& types, Type type) {
  return std::find(types.begin(), types.end(), type) != types.end();
}

// Exactly: 5, +05, 5.0, 5e3 and 12345678901234567890 are integers, 5.5 is none.
bool to_integer(std::string_view text, Json* out) {
  std::string_view digits = text;
  const bool negative = !digits.empty() && digits.front() == '-';
  if (!digits.empty() && (digits.front() == '-' || digits.front() == '+')) digits.remove_prefix(1);
  std::string value(digits);
  if (digits.empty() || digits.find_first_not_of("0123456789") != std::string_view::npos) {
    const auto json = parse_json(text);
    if (!json.ok() || json->kind != Kind::kFloat) return false;
    const size_t e = std::min(digits.find_first_of("eE"), digits.size());
    const std::string_view mantissa = digits.substr(0, e);
    const size_t dot = std::min(mantissa.find('.'), mantissa.size());
    const size_t fraction = dot < mantissa.size() ? mantissa.size() - dot - 1 : 0;
    const std::string exponent(e < digits.size() ? digits.substr(e + 1) : "0");
    if (exponent.size() > 5) return false;
    const int64_t shift = std::stol(exponent) - static_cast<int64_t>(fraction);
    value = mantissa;
    value.erase(std::remove(value.begin(), value.end(), '.'), value.end());
    if (shift > kMaxExponent) return false;
    if (shift >= 0) {
      value.append(static_cast<size_t>(shift), '0');
    } else {
      const size_t keep = value.size() - std::min(value.size(), static_cast<size_t>(-shift));
      if (value.find_first_not_of('0', keep) != std::string::npos) return false;
      value.resize(keep);
    }
  }
  value.erase(0, std::min(value.find_first_not_of('0'), value.size()));
  out->kind = Kind::kInteger;
  out->text = value.empty() ? "0" : (negative ? "-" : "") + value;
  return true;
}

bool to_boolean(std::string_view text, Json* out) {
  std::string lower(text);
  for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  const bool yes = lower == "true" || lower == "1";
  if (!yes && lower != "false" && lower != "0") return false;
  out->kind = Kind::kBool;
  out->boolean = yes;
  return true;
}

bool to_kind(std::string_view text, std::initializer_list<Kind> kinds, Json* out) {
  auto json = parse_json(text);
  if (!json.ok() || std::find(kinds.begin(), kinds.end(), json->kind) == kinds.end()) return false;
  *out = std::move(*json);
  return true;
}

Json leaf(const std::string& text, const Alternatives& schema) {
  const std::vector<Type> types = schema.types();
  const std::string_view bare = trimmed(text);
  if (types.empty()) {
    const bool scalar = !text.empty() && std::string_view("-0123456789tf").find(text[0]) != std::string_view::npos;
    Json json;
    if (scalar && to_kind(text, {Kind::kInteger, Kind::kFloat, Kind::kBool}, &json) && json.dump() == text) return json;
    return string_json(text);
  }
  if (allows(types, kString) && (text.empty() || schema.lists_text(text))) return string_json(text);
  if (bare.empty()) {
    for (Type type : types) {
      if (type == kArray) return empty_json(Kind::kArray);
      if (type == kObject) return empty_json(Kind::kObject);
    }
    return string_json(text);
  }
  Json json;
  if (allows(types, kNull) && (bare == "null" || bare == "Null" || bare == "NULL")) return json;
  if (allows(types, kInteger) && to_integer(bare, &json)) return json;
  if (allows(types, kNumber) && to_kind(bare, {Kind::kInteger, Kind::kFloat}, &json)) return json;
  if (allows(types, kBoolean) && to_boolean(bare, &json)) return json;
  if (allows(types, kObject) && to_kind(bare, {Kind::kObject}, &json)) return json;
  if (allows(types, kArray) && to_kind(bare, {Kind::kArray}, &json)) return json;
  return string_json(text);
}

bool all_items(const ArgumentNode& node) {
  return !node.children.empty() && std::all_of(node.children.begin(), node.children.end(),
                                               [](const ArgumentNode& child) { return child.key == "item"; });
}

class Converter {
 public:
  Converter(const Json* root, std::string_view raw) : root_(root), raw_(raw) {}

  Json value(const ArgumentNode& node, const Json* schema) const {
    const Alternatives alternatives(schema, root_);
    if (node.children.empty()) return leaf(node.text, alternatives);
    const std::vector<Type> types = alternatives.types();
    const bool as_array = all_items(node) && trimmed(node.text).empty();
    // Several items under a schema without a property of that name are a list, whatever it says.
    const bool as_object = !as_array || node.children.size() == 1 || alternatives.member("item") != nullptr;
    for (Type type : types) {
      if (type == kArray && as_array) return array(node, alternatives);
      if (type == kObject && as_object) return object(node, alternatives);
    }
    if (!types.empty() && !allows(types, kArray) && !allows(types, kObject)) {
      return string_json(raw_.substr(node.raw_begin, node.raw_end - node.raw_begin));
    }
    return as_array ? array(node, alternatives) : object(node, alternatives);
  }

  Json object(const ArgumentNode& node, const Alternatives& alternatives) const {
    Json out = empty_json(Kind::kObject);
    std::vector<std::vector<const ArgumentNode*>> places;  // per member, its elements
    std::unordered_map<std::string_view, size_t> index;
    for (const ArgumentNode& child : node.children) {
      const auto [at, fresh] = index.try_emplace(child.key, places.size());
      if (fresh) places.emplace_back();
      places[at->second].push_back(&child);
    }
    for (const auto& elements : places) {
      const std::string& key = elements.front()->key;
      out.members.emplace_back(key, repeated(elements, alternatives.member(key)));
    }
    if (!trimmed(node.text).empty()) out.members.emplace_back("$text", string_json(node.text));
    return out;
  }

 private:
  Json array(const ArgumentNode& node, const Alternatives& alternatives) const {
    Json out = empty_json(Kind::kArray);
    for (const ArgumentNode& child : node.children) {
      out.items.push_back(value(child, alternatives.item(out.items.size())));
    }
    return out;
  }

  // A key given several times is a list only where the schema wants one; else the last counts.
  Json repeated(const std::vector<const ArgumentNode*>& elements, const Json* schema) const {
    if (elements.size() == 1) return value(*elements.front(), schema);
    const Alternatives alternatives(schema, root_);
    if (!allows(alternatives.types(), kArray)) return value(*elements.back(), schema);
    Json out = empty_json(Kind::kArray);
    for (const ArgumentNode* element : elements) {
      if (all_items(*element)) {
        Json part = array(*element, alternatives);
        std::move(part.items.begin(), part.items.end(), std::back_inserter(out.items));
      } else {
        out.items.push_back(value(*element, alternatives.item(out.items.size())));
      }
    }
    return out;
  }

  const Json* root_;
  std::string_view raw_;
};

}  // namespace

const Json* child_schema(const Json* schema, const Json* root, std::string_view key) {
  const Alternatives alternatives(schema, root);
  if (key == "item" && allows(alternatives.types(), kArray)) return alternatives.item(0);
  return alternatives.member(key);
}

bool is_text_schema(const Json* schema, const Json* root) {
  const std::vector<Type> types = Alternatives(schema, root).types();
  return allows(types, kString) && !allows(types, kObject) && !allows(types, kArray);
}

Json typed_arguments(const ArgumentNode& invoke, const Json* parameters, std::string_view raw) {
  // Some models write the arguments as one JSON object instead of elements.
  if (invoke.children.empty()) {
    Json json;
    if (to_kind(trimmed(invoke.text), {Kind::kObject}, &json)) return json;
  }
  return Converter(parameters, raw).object(invoke, Alternatives(parameters, parameters));
}

}  // namespace firn::model
