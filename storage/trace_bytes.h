// Bytes of a trace: numbers in and out of its chunks. Included by trace.cc alone.
#pragma once

#include "storage/trace.h"

#include <fmt/format.h>
#include <xxhash.h>
#include <zstd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>

#include "storage/text.h"

namespace firn::storage {
namespace {

constexpr std::string_view kMagic = "FIRNTRC\n";
constexpr int64_t kPrefaceBytes = 16, kChunkHeaderBytes = 32;
constexpr uint32_t kChunkMark = 0x4B484346;  // "FCHK"
constexpr uint32_t kMaxRaw = 64u << 20;
constexpr int32_t kMaxLayers = 4096, kMaxExperts = 1 << 20, kMaxPicks = 4096, kMaxChoice = 1 << 20, kMaxSpans = 1 << 20;
constexpr int64_t kMaxRows = int64_t{1} << 31;
constexpr uint32_t kMaxText = 1u << 20;
constexpr int32_t kRowsRemembered = 64;  // of a decode step

enum Tag : uint8_t { kBegin = 1, kExperts, kExpertsMargin, kBlocks, kFetch, kPredicted, kLayerTime, kEndStep };
constexpr uint8_t kSameLayer = 0x10, kNextLayer = 0x20, kSameRow = 0x40, kNextRow = 0x80;

template <typename T>
void put_raw(std::string* out, T value) {
  static_assert(std::endian::native == std::endian::little);
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out->append(bytes, sizeof(T));
}

template <typename T>
T get_raw(const char* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

void put_varint(std::string* out, uint64_t value) {
  while (value >= 0x80) {
    out->push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out->push_back(static_cast<char>(value));
}

uint64_t zigzag(int64_t value) { return (static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63); }
int64_t unzigzag(uint64_t value) { return static_cast<int64_t>(value >> 1) ^ -static_cast<int64_t>(value & 1); }

// Differences wrap rather than overflow: damaged or odd times must not be undefined behaviour.
int64_t minus(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}
int64_t plus(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); }

void put_text(std::string* out, std::string_view text) {
  const std::string_view cut = text.substr(0, kMaxText);
  put_varint(out, cut.size());
  out->append(cut);
}

// Reads from one chunk; the first thing that does not fit makes it bad() and everything after reads as 0.
class Cursor {
 public:
  Cursor() = default;
  explicit Cursor(std::string_view bytes) : rest_(bytes) {}
  bool bad() const { return !why_.empty(); }
  const std::string& why() const { return why_; }
  bool empty() const { return rest_.empty(); }
  void fail(std::string why) {
    if (why_.empty()) why_ = std::move(why);
    rest_ = {};
  }
  uint8_t byte() {
    if (rest_.empty()) {
      fail("an event ends early");
      return 0;
    }
    const auto b = static_cast<uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    return b;
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint8_t b = byte();
      if (shift == 63 && b > 1) break;
      value |= static_cast<uint64_t>(b & 0x7F) << shift;
      if (b < 0x80) return value;
    }
    fail("a number of more than 64 bits");
    return 0;
  }
  int64_t signed_varint() { return unzigzag(varint()); }
  // A number in [0, limit).
  int64_t below(int64_t limit, const char* what) {
    const uint64_t value = varint();
    if (bad()) return 0;
    if (limit <= 0 || value >= static_cast<uint64_t>(limit)) {
      fail(fmt::format("{} is {}, expected less than {}", what, value, limit));
      return 0;
    }
    return static_cast<int64_t>(value);
  }
  int64_t amount(const char* what) { return below(std::numeric_limits<int64_t>::max(), what); }
  float f32() {
    if (rest_.size() < 4) {
      fail("an event ends early");
      return 0;
    }
    const auto value = get_raw<float>(rest_.data());
    rest_.remove_prefix(4);
    return value;
  }
  std::string text() {
    const auto n = static_cast<size_t>(below(int64_t{kMaxText} + 1, "the length of a text"));
    if (n > rest_.size()) {
      fail("a text ends early");
      return {};
    }
    std::string out(rest_.substr(0, n));
    rest_.remove_prefix(n);
    return out;
  }
  size_t left() const { return rest_.size(); }

 private:
  std::string_view rest_;
  std::string why_;
};

// Where the choice that a block choice is written relative to is kept.
uint64_t choice_key(TraceStepKind kind, int32_t layer, int32_t row, int32_t group) {
  const uint64_t lane = kind == TraceStepKind::kDecode ? static_cast<uint64_t>(std::min(row, kRowsRemembered)) + 1 : 0;
  return lane << 48 | static_cast<uint64_t>(layer) << 24 | static_cast<uint64_t>(group);
}

Status check_header(const TraceHeader& h) {
  const auto fits = [](int64_t value, int64_t most) { return value >= 0 && value <= most; };
  if (!fits(h.layers, kMaxLayers) || h.sparse_layer.size() != static_cast<size_t>(h.layers) ||
      h.moe_layer.size() != static_cast<size_t>(h.layers)) {
    return invalid(fmt::format("{} layers ({} marked sparse or not, {} MoE or not), expected 0 to {} and as many marks",
                               h.layers, h.sparse_layer.size(), h.moe_layer.size(), kMaxLayers));
  }
  if (!fits(h.experts, kMaxExperts) || !fits(h.experts_per_token, std::min(kMaxPicks, h.experts))) {
    return invalid(fmt::format("{} of {} experts a token, expected at most {} of {}", h.experts_per_token, h.experts,
                               kMaxPicks, kMaxExperts));
  }
  if (!fits(h.groups, 1 << 16) || !fits(h.topk_blocks, 1 << 16) || int64_t{h.groups} * h.topk_blocks > kMaxChoice) {
    return invalid(
        fmt::format("{} groups of {} blocks, expected at most {} together", h.groups, h.topk_blocks, kMaxChoice));
  }
  if (h.block_tokens < 0 || h.expert_bytes < 0 || h.kv_block_bytes < 0) return invalid("a size below 0");
  if (h.blocks_every < 1 || h.experts_every < 1) return invalid("a thinning of rows below 1");
  return {};
}

Result<TraceHeader> decode_header(std::string_view raw) {
  Cursor in(raw);
  TraceHeader h;
  constexpr int64_t kAny = int64_t{1} << 31;
  h.model = in.text();
  h.layers = static_cast<int32_t>(in.below(kMaxLayers + 1, "the number of layers"));
  for (int32_t i = 0; i < h.layers && !in.bad(); ++i) {
    const int64_t marks = in.below(4, "a layer's marks");
    h.sparse_layer.push_back((marks & 1) != 0);
    h.moe_layer.push_back((marks & 2) != 0);
  }
  h.experts = static_cast<int32_t>(in.below(kAny, "experts"));
  h.experts_per_token = static_cast<int32_t>(in.below(kAny, "experts a token"));
  h.groups = static_cast<int32_t>(in.below(kAny, "groups"));
  h.topk_blocks = static_cast<int32_t>(in.below(kAny, "blocks a group"));
  h.block_tokens = static_cast<int32_t>(in.below(kAny, "tokens a block"));
  h.expert_bytes = in.amount("the bytes of an expert");
  h.kv_block_bytes = in.amount("the bytes of a KV block");
  h.options = in.text();
  h.blocks_every = static_cast<int32_t>(in.below(kAny, "the thinning of block choices"));
  h.experts_every = static_cast<int32_t>(in.below(kAny, "the thinning of expert picks"));
  if (!in.bad() && !in.empty()) in.fail(fmt::format("{} bytes too many", in.left()));
  if (in.bad()) return corrupt(in.why());
  if (Status status = check_header(h); !status.ok()) return corrupt(status.message());
  return h;
}

}  // namespace
}  // namespace firn::storage
