// The tokenizer's pipeline. See tokenizer.h.
//
// encode() first turns the pieces into one list of text runs and added tokens, so that the split expression and BPE see
// each stretch between two added tokens as one text, whoever wrote its parts.
#include "model/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "model/added_tokens.h"
#include "model/bpe.h"
#include "model/split_pattern.h"
#include "model/tokenizer_json.h"
#include "model/utf8.h"
#include "storage/packed_file.h"

namespace firn::model {
namespace {

constexpr int64_t kMostFileBytes = int64_t{1} << 28;
// Below this much text a memory of words costs more to clear than it saves.
constexpr size_t kRememberBytes = 4096;

}  // namespace

struct Tokenizer::Impl {
  TokenizerFile file;
  SplitPattern split;
  Bpe bpe;
  AddedTokenFinder raw, normalized;  // by the text they are looked for in
  std::unordered_map<std::string_view, int32_t> added_ids;
  std::vector<uint8_t> special;  // by id: 1 if flagged special

  Impl(TokenizerFile f, SplitPattern s) : file(std::move(f)), split(std::move(s)), bpe(file.merges, file.byte_ids) {
    file.merges = {};
    special.assign(file.token_bytes.size(), 0);
    for (size_t i = 0; i < file.added.size(); ++i) {
      const AddedToken& token = file.added[i];
      added_ids.emplace(token.content, token.id);
      special[static_cast<size_t>(token.id)] = token.special;
      if (!file.added_normalized[i]) {
        raw.add(token.content, token.id);
      } else {
        normalized.add(file.nfc ? to_nfc(sanitize_utf8(token.content, nullptr)) : token.content, token.id);
      }
    }
  }

  // Collects the text of one run and encodes it when an added token or the end closes it.
  class Encoder {
   public:
    Encoder(const Impl& impl, size_t total_bytes, std::vector<int32_t>* out)
        : impl_(impl), reader_(impl.split), scratch_(total_bytes >= kRememberBytes), out_(out) {}

    void text(std::string_view part) { run_ += part; }

    // Text of the template: added tokens count. Those matched on raw text go first, as in the reference.
    void control(std::string_view part) {
      split(impl_.raw, part, [&](std::string_view rest) {
        if (impl_.normalized.empty()) return text(rest);
        const std::string normal = impl_.file.nfc ? to_nfc(sanitize_utf8(rest, nullptr)) : std::string(rest);
        split(impl_.normalized, normal, [&](std::string_view plain) { text(plain); });
      });
    }

    void close_run() {
      if (run_.empty()) return;
      const size_t ascii = ascii_prefix(run_);
      if (ascii < run_.size()) {
        if (!is_valid_utf8(run_)) run_ = sanitize_utf8(run_, nullptr);
        if (impl_.file.nfc) run_ = to_nfc(run_);
      }
      reader_.start(run_);
      std::string_view piece;
      while (reader_.next(&piece)) impl_.bpe.encode(piece, &scratch_, out_);
      run_.clear();
    }

   private:
    template <typename F>
    void split(const AddedTokenFinder& finder, std::string_view part, const F& rest) {
      size_t done = 0;
      while (done < part.size()) {
        const auto match = finder.find(part, done);
        if (match.length == 0) break;
        if (match.begin > done) rest(part.substr(done, match.begin - done));
        close_run();
        out_->push_back(match.id);
        done = match.begin + match.length;
      }
      if (done < part.size()) rest(part.substr(done));
    }

    const Impl& impl_;
    PieceReader reader_;
    Bpe::Scratch scratch_;
    std::string run_;
    std::vector<int32_t>* out_;
  };
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::parse(std::string_view tokenizer_json, const std::string& name) {
  FIRN_ASSIGN(TokenizerFile file, parse_tokenizer_json(tokenizer_json, name));
  auto split = SplitPattern::compile(file.expression, file.keep_gaps);
  if (!split.ok()) return split.status().with_context(name);
  return Tokenizer(std::make_unique<Impl>(std::move(file), std::move(split).value()));
}

Result<Tokenizer> Tokenizer::open(storage::FileSystem& fs, const std::string& dir) {
  const std::string path = dir + "/tokenizer.json";
  auto json = storage::read_model_file(fs, dir, "tokenizer.json", kMostFileBytes);
  if (!json.ok()) {
    if (json.status().code() != Code::kNotFound) return json.status();
    return not_found(fmt::format("{}; a checkpoint needs this file, copy it from where the checkpoint came from",
                                 json.status().message()));
  }
  return parse(json.value(), path);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool added) const {
  std::vector<int32_t> out;
  out.reserve(text.size() / 3 + 8);
  Impl::Encoder encoder(*impl_, text.size(), &out);
  added ? encoder.control(text) : encoder.text(text);
  encoder.close_run();
  return out;
}

std::vector<int32_t> Tokenizer::encode(std::span<const TextPiece> pieces) const {
  size_t total = 0;
  for (const TextPiece& piece : pieces) total += piece.text.size();
  std::vector<int32_t> out;
  out.reserve(total / 3 + 8);
  Impl::Encoder encoder(*impl_, total, &out);
  // Neighbouring control pieces are one text: the template may write a token in parts. A piece without text parts none.
  std::string control;
  for (const TextPiece& piece : pieces) {
    if (piece.text.empty()) continue;
    if (piece.control) {
      control += piece.text;
      continue;
    }
    encoder.control(control);
    control.clear();
    encoder.text(piece.text);
  }
  encoder.control(control);
  encoder.close_run();
  return out;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  return has_token(id) ? std::string_view(impl_->file.token_bytes[static_cast<size_t>(id)]) : std::string_view();
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (!has_token(id) || (skip_special && impl_->special[static_cast<size_t>(id)])) continue;
    bytes += impl_->file.token_bytes[static_cast<size_t>(id)];
  }
  return is_valid_utf8(bytes) ? bytes : sanitize_utf8(bytes, nullptr);
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(impl_->file.token_bytes.size()); }

bool Tokenizer::has_token(int32_t id) const {
  return id >= 0 && id < vocab_size() && !impl_->file.token_bytes[static_cast<size_t>(id)].empty();
}

int32_t Tokenizer::find_added(std::string_view content) const {
  const auto it = impl_->added_ids.find(content);
  return it == impl_->added_ids.end() ? -1 : it->second;
}

const std::vector<AddedToken>& Tokenizer::added_tokens() const { return impl_->file.added; }

}  // namespace firn::model
