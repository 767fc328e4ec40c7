// Merge table, the scan for short pieces and the heap for long ones. See bpe.h.
#include "model/bpe.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

#include "runtime/status.h"

namespace firn::model {
namespace {
// Up to here rescanning all pairs after each merge is faster than keeping a heap.
constexpr size_t kShortBytes = 48;
}  // namespace

Bpe::Scratch::Scratch(bool remember) : slots_(remember ? kSlots : 0, Slot{}) {}

Bpe::Bpe(std::span<const Merge> merges, const std::array<int32_t, 256>& byte_ids) : byte_ids_(byte_ids) {
  const size_t slots = std::bit_ceil(std::max<size_t>(merges.size() * 2, 16));
  shift_ = 64 - std::countr_zero(slots);
  table_.assign(slots, Entry{kNoPair, 0, 0});
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& merge = merges[rank];
    const uint64_t pair = pair_of(merge.left, merge.right);
    size_t slot = slot_of(pair);
    while (table_[slot].pair != kNoPair && table_[slot].pair != pair) slot = (slot + 1) & (slots - 1);
    table_[slot] = {pair, static_cast<uint32_t>(rank), merge.merged};
  }
}

const Bpe::Entry* Bpe::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  for (size_t slot = slot_of(pair);; slot = (slot + 1) & (table_.size() - 1)) {
    if (table_[slot].pair == pair) return &table_[slot];
    if (table_[slot].pair == kNoPair) return nullptr;
  }
}

void Bpe::encode(std::string_view piece, Scratch* scratch, std::vector<int32_t>* out) const {
  if (piece.size() == 1) {
    out->push_back(byte_ids_[static_cast<uint8_t>(piece[0])]);
    return;
  }
  if (piece.empty()) return;
  if (piece.size() > Scratch::kMostBytes || scratch->slots_.empty()) {
    piece.size() <= kShortBytes ? encode_short(piece, out) : encode_long(piece, scratch, out);
    return;
  }
  Scratch::Slot& slot = scratch->slots_[XXH3_64bits(piece.data(), piece.size()) % Scratch::kSlots];
  if (slot.length == piece.size() && std::memcmp(slot.bytes.data(), piece.data(), piece.size()) == 0) {
    out->insert(out->end(), slot.ids.begin(), slot.ids.begin() + slot.n_ids);
    return;
  }
  const size_t before = out->size();
  encode_short(piece, out);
  const size_t n = out->size() - before;
  if (n > Scratch::kMostIds) return;
  std::memcpy(slot.bytes.data(), piece.data(), piece.size());
  std::copy_n(out->begin() + static_cast<ptrdiff_t>(before), n, slot.ids.begin());
  slot.n_ids = static_cast<uint8_t>(n);
  slot.length = static_cast<uint8_t>(piece.size());
}

void Bpe::encode_short(std::string_view piece, std::vector<int32_t>* out) const {
  std::array<int32_t, kShortBytes> ids;
  std::array<uint32_t, kShortBytes> ranks;  // of the pair that begins here
  std::array<int32_t, kShortBytes> merged;
  size_t n = piece.size();
  const auto look = [&](size_t i) {
    const Entry* entry = i + 1 < n ? find(ids[i], ids[i + 1]) : nullptr;
    ranks[i] = entry ? entry->rank : kNoRank;
    merged[i] = entry ? entry->merged : -1;
  };
  for (size_t i = 0; i < n; ++i) ids[i] = byte_ids_[static_cast<uint8_t>(piece[i])];
  for (size_t i = 0; i < n; ++i) look(i);
  for (;;) {
    size_t best = 0;
    for (size_t i = 1; i < n; ++i) {
      if (ranks[i] < ranks[best]) best = i;
    }
    if (ranks[best] == kNoRank) break;
    ids[best] = merged[best];
    const size_t tail = n - best - 2;
    std::memmove(&ids[best + 1], ids.data() + best + 2, tail * sizeof(int32_t));
    std::memmove(&ranks[best + 1], ranks.data() + best + 2, tail * sizeof(uint32_t));
    std::memmove(&merged[best + 1], merged.data() + best + 2, tail * sizeof(int32_t));
    --n;
    look(best);
    if (best > 0) look(best - 1);
  }
  out->insert(out->end(), ids.begin(), ids.begin() + static_cast<ptrdiff_t>(n));
}

void Bpe::encode_long(std::string_view piece, Scratch* scratch, std::vector<int32_t>* out) const {
  FIRN_CHECK(piece.size() < (size_t{1} << 31), "a piece of text below 2 GiB");
  const auto n = static_cast<int32_t>(piece.size());
  auto& ids = scratch->ids_;
  auto& next = scratch->next_;
  auto& previous = scratch->previous_;
  auto& heap = scratch->heap_;  // rank, then place: the smallest is the lowest rank, leftmost
  ids.resize(piece.size());
  next.resize(piece.size());
  previous.resize(piece.size());
  heap.clear();
  const auto at = [](int32_t i) { return static_cast<size_t>(i); };
  const auto key = [](uint32_t rank, int32_t place) {
    return (static_cast<uint64_t>(rank) << 32) | static_cast<uint32_t>(place);
  };
  for (int32_t i = 0; i < n; ++i) {
    ids[at(i)] = byte_ids_[static_cast<uint8_t>(piece[at(i)])];
    next[at(i)] = i + 1 < n ? i + 1 : -1;
    previous[at(i)] = i - 1;
  }
  for (int32_t i = 0; i + 1 < n; ++i) {
    if (const Entry* entry = find(ids[at(i)], ids[at(i + 1)])) heap.push_back(key(entry->rank, i));
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto offer = [&](int32_t place) {
    if (place < 0 || next[at(place)] < 0) return;
    if (const Entry* entry = find(ids[at(place)], ids[at(next[at(place)])])) {
      heap.push_back(key(entry->rank, place));
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    }
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const uint64_t top = heap.back();
    heap.pop_back();
    const auto place = static_cast<int32_t>(top & 0xFFFFFFFFu);
    // An entry is stale if its symbol was swallowed or its pair has changed; a changed pair has its own entry.
    if (ids[at(place)] < 0 || next[at(place)] < 0) continue;
    const int32_t right = next[at(place)];
    const Entry* entry = find(ids[at(place)], ids[at(right)]);
    if (entry == nullptr || entry->rank != static_cast<uint32_t>(top >> 32)) continue;
    ids[at(place)] = entry->merged;
    ids[at(right)] = -1;
    next[at(place)] = next[at(right)];
    if (next[at(right)] >= 0) previous[at(next[at(right)])] = place;
    offer(place);
    offer(previous[at(place)]);
  }
  for (int32_t i = 0; i >= 0; i = next[at(i)]) out->push_back(ids[at(i)]);
}

}  // namespace firn::model
