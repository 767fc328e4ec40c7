// Byte-pair encoding by merge rank.
//
// Contract: repeatedly joins the neighbouring pair with the lowest rank, the leftmost of equals, as the reference does;
// a piece that happens to be a token is not short-cut. Near-linear in the piece's length. Immutable once built, so
// const methods are thread-safe; a Scratch belongs to one thread.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace firn::model {

struct Merge {
  int32_t left = -1;
  int32_t right = -1;
  int32_t merged = -1;
};

class Bpe {
 public:
  // Buffers and, if asked for, a memory of short pieces seen: text repeats its words.
  class Scratch {
   public:
    explicit Scratch(bool remember);

   private:
    friend class Bpe;
    static constexpr size_t kSlots = 4096;
    static constexpr size_t kMostBytes = 15;
    static constexpr size_t kMostIds = 4;
    struct Slot {
      std::array<char, kMostBytes> bytes;
      uint8_t length;  // 0: empty
      std::array<int32_t, kMostIds> ids;
      uint8_t n_ids;
    };
    std::vector<Slot> slots_;
    std::vector<int32_t> ids_, next_, previous_;
    std::vector<uint64_t> heap_;
  };

  // merges in rank order; of two merges of one pair the later counts.
  Bpe(std::span<const Merge> merges, const std::array<int32_t, 256>& byte_ids);

  void encode(std::string_view piece, Scratch* scratch, std::vector<int32_t>* out) const;

 private:
  struct Entry {
    uint64_t pair;
    uint32_t rank;
    int32_t merged;
  };
  static constexpr uint64_t kNoPair = ~uint64_t{0};
  static constexpr uint32_t kNoRank = ~uint32_t{0};

  static uint64_t pair_of(int32_t left, int32_t right) {
    return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
  }
  size_t slot_of(uint64_t pair) const { return static_cast<size_t>((pair * 0x9E3779B97F4A7C15u) >> shift_); }
  // nullptr if the two do not merge.
  const Entry* find(int32_t left, int32_t right) const;
  void encode_short(std::string_view piece, std::vector<int32_t>* out) const;
  void encode_long(std::string_view piece, Scratch* scratch, std::vector<int32_t>* out) const;

  std::array<int32_t, 256> byte_ids_;
  std::vector<Entry> table_;  // open addressing, at most half full
  int shift_ = 0;
};

}  // namespace firn::model
