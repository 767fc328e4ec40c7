// The oracle's index branch: keys with their norm bound, canonical block scores, the choice of blocks.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpu/index_copy.h"
#include "cpu/reference_internal.h"

namespace firn::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

const void* index_block(const KvSpan& span, int64_t block) {
  FIRN_CHECK(span.index != nullptr && block >= 0 && block < span.table_stride, "index block outside its table");
  FIRN_CHECK(span.index[block] != nullptr, "index block without memory");
  return span.index[block];
}

// Canonical M[0..n_blocks) of the query at row `query`; -inf beyond the own block.
std::vector<float> canonical_scores(const void* query, const KvSpan& span, const KvLayout& layout, int64_t position,
                                    int64_t n_blocks) {
  std::vector<float> scores(static_cast<size_t>(n_blocks), kMinusInfinity);
  const int64_t own = position / layout.block_tokens;
  for (int64_t b = 0; b <= own && b < n_blocks; ++b) {
    const int64_t visible = std::min(layout.block_tokens, position + 1 - b * layout.block_tokens);
    scores[static_cast<size_t>(b)] =
        canonical_block_max(query, index_block(span, b), layout.dtype, layout.index_dim, visible);
  }
  return scores;
}

const void* head_of(const ConstMatrixView& q, int64_t row, int64_t head, int64_t dim) {
  return static_cast<const char*>(q.row(row)) + head * dim * static_cast<int64_t>(dtype_bytes(q.dtype));
}

}  // namespace

float canonical_block_max(const void* query, const void* keys, DType dtype, int64_t dim, int64_t n_visible) {
  float largest = kMinusInfinity;  // a NaN score never raises it
  for (int64_t t = 0; t < n_visible; ++t) {
    double sum = 0;
    for (int64_t i = 0; i < dim; ++i) {
      // The product of two bf16 or fp32 values is exact in double, so this equals the fused multiply-add.
      sum += load_element(query, dtype, i) * load_element(keys, dtype, t * dim + i);
    }
    const float score = static_cast<float>(sum);
    if (score > largest) largest = score;
  }
  return largest;
}

std::vector<int32_t> choose_blocks(std::span<const float> scores, int64_t own, int64_t topk, int64_t init_blocks,
                                   int64_t local_blocks) {
  FIRN_CHECK(own >= 0 && own < static_cast<int64_t>(scores.size()), "own block outside the scores");
  FIRN_CHECK(init_blocks + local_blocks <= topk, "more forced blocks than places");
  std::vector<int32_t> chosen, others;
  for (int64_t b = 0; b <= own; ++b) {
    const bool forced = b < init_blocks || b > own - local_blocks;
    (forced ? chosen : others).push_back(static_cast<int32_t>(b));
  }
  const auto score = [&](int32_t b) {
    const float s = scores[static_cast<size_t>(b)];
    return std::isnan(s) ? kMinusInfinity : s;
  };
  std::stable_sort(others.begin(), others.end(), [&](int32_t a, int32_t b) { return score(a) > score(b); });
  const size_t places = static_cast<size_t>(topk) - chosen.size();
  if (others.size() > places) others.resize(places);
  chosen.insert(chosen.end(), others.begin(), others.end());
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

Ticket ReferenceOps::index_append(const IndexAppendParams& p) {
  check_space(p.keys, "index_append");
  const KvLayout& layout = p.layout;
  FIRN_CHECK(p.keys.cols == layout.index_dim && p.keys.dtype == layout.dtype,
             "index_append: keys differ from the layout");
  const auto spans = row_spans(p.spans, p.keys.rows);
  const auto positions = row_positions(p.spans, p.keys.rows);
  for (int64_t r = 0; r < p.keys.rows; ++r) {
    const int64_t position = positions[static_cast<size_t>(r)], slot = position % layout.block_tokens;
    void* block = const_cast<void*>(index_block(*spans[static_cast<size_t>(r)], position / layout.block_tokens));
    double squares = 0;
    for (int64_t i = 0; i < layout.index_dim; ++i) {
      const double v = load_element(p.keys.row(r), p.keys.dtype, i);
      squares += v * v;
      store_element(block, layout.dtype, slot * layout.index_dim + i, v);
    }
    write_index_copy(p.keys.row(r), layout.dtype == DType::kBf16, layout.index_dim,
                     static_cast<char*>(block) + layout.index_copy_offset(), slot);
    // The next float above: an upper bound in spite of the roundings.
    float bound = std::nextafter(static_cast<float>(std::sqrt(squares)), std::numeric_limits<float>::infinity());
    char* at = static_cast<char*>(block) + layout.index_norm_offset();
    float before;
    std::memcpy(&before, at, sizeof before);
    if (slot != 0 && !(bound > before)) bound = before;
    std::memcpy(at, &bound, sizeof bound);
  }
  return done();
}

Ticket ReferenceOps::index_select(const IndexSelectParams& p) {
  check_space(p.q, "index_select");
  check_space(p.ids, "index_select");
  FIRN_CHECK(p.q.cols == p.heads * p.layout.index_dim && p.q.dtype == p.layout.dtype, "index_select: query differs");
  FIRN_CHECK(p.ids.cols == p.heads * p.topk && p.ids.rows == p.q.rows, "index_select: shapes differ");
  const auto spans = row_spans(p.spans, p.q.rows);
  const auto positions = row_positions(p.spans, p.q.rows);
  for (int64_t r = 0; r < p.q.rows; ++r) {
    const int64_t position = positions[static_cast<size_t>(r)], own = position / p.layout.block_tokens;
    for (int64_t h = 0; h < p.heads; ++h) {
      const std::vector<float> scores = canonical_scores(head_of(p.q, r, h, p.layout.index_dim),
                                                         *spans[static_cast<size_t>(r)], p.layout, position, own + 1);
      const auto chosen = choose_blocks(scores, own, p.topk, p.init_blocks, p.local_blocks);
      int32_t* out = static_cast<int32_t*>(p.ids.row(r)) + h * p.topk;
      for (int64_t j = 0; j < p.topk; ++j) {
        out[j] = j < static_cast<int64_t>(chosen.size()) ? chosen[static_cast<size_t>(j)] : -1;
      }
    }
  }
  return done();
}

Ticket ReferenceOps::block_scores(const BlockScoresParams& p) {
  check_space(p.q, "block_scores");
  check_space(p.scores, "block_scores");
  FIRN_CHECK(p.q.cols == p.heads * p.layout.index_dim && p.scores.cols % p.heads == 0, "block_scores: shapes differ");
  const int64_t n_blocks = p.scores.cols / p.heads;
  const auto spans = row_spans(p.spans, p.q.rows);
  const auto positions = row_positions(p.spans, p.q.rows);
  for (int64_t r = 0; r < p.q.rows; ++r) {
    for (int64_t h = 0; h < p.heads; ++h) {
      const std::vector<float> scores =
          canonical_scores(head_of(p.q, r, h, p.layout.index_dim), *spans[static_cast<size_t>(r)], p.layout,
                           positions[static_cast<size_t>(r)], n_blocks);
      std::memcpy(static_cast<float*>(p.scores.row(r)) + h * n_blocks, scores.data(), scores.size() * sizeof(float));
    }
  }
  return done();
}

}  // namespace firn::cpu
