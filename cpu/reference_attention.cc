// The oracle's KV cache and attention: softmax over the visible keys of a list of blocks, folded block by block.
//
// A block's triple (m, l, o) is computed in double and rounded to fp32 once, as attention_partial stores it;
// attention() folds the same rounded triples, so both ways give the same bits.
#include <cmath>
#include <limits>

#include "cpu/reference_internal.h"

namespace firn::cpu {
namespace {

// Base address of block b of group g.
void* kv_block(const KvSpan& span, int64_t group, int64_t block) {
  FIRN_CHECK(span.kv != nullptr && block >= 0 && block < span.table_stride, "KV block outside its table");
  void* base = span.kv[group * span.table_stride + block];
  FIRN_CHECK(base != nullptr, "KV block without memory");
  return base;
}

// (m, l, o[head_dim]) of one query head over the first n_keys keys of a block.
void block_triple(const std::vector<double>& q, const void* block, const KvLayout& layout, int64_t n_keys, double scale,
                  float* triple) {
  const int64_t dim = layout.head_dim;
  std::vector<double> s(static_cast<size_t>(n_keys));
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t t = 0; t < n_keys; ++t) {
    double dot = 0;
    for (int64_t i = 0; i < dim; ++i) {
      dot += q[static_cast<size_t>(i)] * load_element(block, layout.dtype, t * dim + i);
    }
    s[static_cast<size_t>(t)] = dot * scale;
    if (!(dot * scale <= largest)) largest = dot * scale;
  }
  const float m = static_cast<float>(largest);
  double l = 0;
  std::vector<double> o(static_cast<size_t>(dim), 0.0);
  for (int64_t t = 0; t < n_keys; ++t) {
    const double weight = std::exp(s[static_cast<size_t>(t)] - static_cast<double>(m));
    l += weight;
    for (int64_t i = 0; i < dim; ++i) {
      o[static_cast<size_t>(i)] += weight * load_element(block, layout.dtype, (layout.block_tokens + t) * dim + i);
    }
  }
  triple[0] = m;
  triple[1] = static_cast<float>(l);
  for (int64_t i = 0; i < dim; ++i) triple[2 + i] = static_cast<float>(o[static_cast<size_t>(i)]);
}

// The running triple that blocks are merged into, in ascending block id.
struct Fold {
  explicit Fold(int64_t dim) : o(static_cast<size_t>(dim), 0.0) {}
  void add(const float* triple) {
    if (triple[1] == 0.0f) return;  // no visible key
    const double m_block = triple[0];
    const double m_new = m_block > m || std::isnan(m_block) ? m_block : m;
    const double keep = std::exp(m - m_new), take = std::exp(m_block - m_new);
    l = l * keep + static_cast<double>(triple[1]) * take;
    for (size_t i = 0; i < o.size(); ++i) o[i] = o[i] * keep + static_cast<double>(triple[2 + i]) * take;
    m = m_new;
  }
  void store(void* row, DType dtype, int64_t offset) const {
    for (size_t i = 0; i < o.size(); ++i) {
      store_element(row, dtype, offset + static_cast<int64_t>(i), l == 0 ? 0.0 : o[i] / l);
    }
  }
  double m = -std::numeric_limits<double>::infinity();
  double l = 0;
  std::vector<double> o;
};

// How many keys of block b a query at position p sees.
int64_t visible_keys(const KvLayout& layout, int64_t block, int64_t position) {
  const int64_t n = position + 1 - block * layout.block_tokens;
  return n < 0 ? 0 : n > layout.block_tokens ? layout.block_tokens : n;
}

std::vector<double> query_of(const ConstMatrixView& q, int64_t row, int64_t head, int64_t dim) {
  std::vector<double> out(static_cast<size_t>(dim));
  for (int64_t i = 0; i < dim; ++i) out[static_cast<size_t>(i)] = load_element(q.row(row), q.dtype, head * dim + i);
  return out;
}

}  // namespace

Ticket ReferenceOps::kv_append(const KvAppendParams& p) {
  check_space(p.k, "kv_append");
  check_space(p.v, "kv_append");
  const KvLayout& layout = p.layout;
  const int64_t dim = layout.head_dim;
  FIRN_CHECK(p.k.cols == layout.groups * dim && p.v.cols == p.k.cols && p.v.rows == p.k.rows,
             "kv_append: shapes differ");
  FIRN_CHECK(p.k.dtype == layout.dtype, "kv_append: keys are not in the cache dtype");
  const auto spans = row_spans(p.spans, p.k.rows);
  const auto positions = row_positions(p.spans, p.k.rows);
  for (int64_t r = 0; r < p.k.rows; ++r) {
    const int64_t position = positions[static_cast<size_t>(r)];
    const int64_t slot = position % layout.block_tokens;
    for (int64_t g = 0; g < layout.groups; ++g) {
      void* block = kv_block(*spans[static_cast<size_t>(r)], g, position / layout.block_tokens);
      for (int64_t i = 0; i < dim; ++i) {
        store_element(block, layout.dtype, slot * dim + i, load_element(p.k.row(r), p.k.dtype, g * dim + i));
        store_element(block, layout.dtype, (layout.block_tokens + slot) * dim + i,
                      load_element(p.v.row(r), p.v.dtype, g * dim + i));
      }
    }
  }
  return done();
}

Ticket ReferenceOps::attention(const AttentionParams& p) {
  check_space(p.q, "attention");
  check_space(p.out, "attention");
  check_space(p.block_ids, "attention");
  const int64_t heads = p.layout.groups * p.heads_per_group, dim = p.layout.head_dim;
  FIRN_CHECK(p.q.cols == heads * dim && p.out.cols == p.q.cols && p.out.rows == p.q.rows, "attention: shapes differ");
  const auto spans = row_spans(p.spans, p.q.rows);
  const auto positions = row_positions(p.spans, p.q.rows);
  std::vector<float> triple(static_cast<size_t>(dim + 2));
  for (int64_t r = 0; r < p.q.rows; ++r) {
    const int64_t position = positions[static_cast<size_t>(r)];
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t group = h / p.heads_per_group;
      const std::vector<double> q = query_of(p.q, r, h, dim);
      Fold fold(dim);
      const int64_t n = p.block_ids.empty() ? position / p.layout.block_tokens + 1 : p.topk;
      for (int64_t j = 0; j < n; ++j) {
        const int64_t block =
            p.block_ids.empty() ? j : static_cast<const int32_t*>(p.block_ids.row(r))[group * p.topk + j];
        if (block < 0) continue;
        block_triple(q, kv_block(*spans[static_cast<size_t>(r)], group, block), p.layout,
                     visible_keys(p.layout, block, position), p.scale, triple.data());
        fold.add(triple.data());
      }
      fold.store(p.out.row(r), p.out.dtype, h * dim);
    }
  }
  return done();
}

Ticket ReferenceOps::attention_partial(const AttentionPartialParams& p) {
  const AttentionParams& base = p.base;
  check_space(base.q, "attention_partial");
  check_space(p.partials, "attention_partial");
  const int64_t heads = base.layout.groups * base.heads_per_group, dim = base.layout.head_dim;
  FIRN_CHECK(p.partials.rows == base.q.rows * heads && p.partials.cols == base.topk * (dim + 2),
             "attention_partial: shapes differ");
  const auto spans = row_spans(base.spans, base.q.rows);
  const auto positions = row_positions(base.spans, base.q.rows);
  for (int64_t r = 0; r < base.q.rows; ++r) {
    const int64_t position = positions[static_cast<size_t>(r)];
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t group = h / base.heads_per_group;
      const std::vector<double> q = query_of(base.q, r, h, dim);
      float* out = static_cast<float*>(p.partials.row(r * heads + h));
      for (int64_t j = 0; j < base.topk; ++j) {
        const int64_t at = group * base.topk + j;
        const int64_t block = static_cast<const int32_t*>(base.block_ids.row(r))[at];
        if (block < 0) continue;
        if (!p.only.empty() && static_cast<const int32_t*>(p.only.row(r))[at] == 0) continue;
        block_triple(q, kv_block(*spans[static_cast<size_t>(r)], group, block), base.layout,
                     visible_keys(base.layout, block, position), base.scale, out + j * (dim + 2));
      }
    }
  }
  return done();
}

Ticket ReferenceOps::attention_merge(const AttentionMergeParams& p) {
  check_space(p.partials, "attention_merge");
  check_space(p.out, "attention_merge");
  const int64_t heads = p.groups * p.heads_per_group, dim = p.head_dim;
  FIRN_CHECK(p.partials.rows == p.out.rows * heads && p.partials.cols == p.topk * (dim + 2),
             "attention_merge: shapes differ");
  for (int64_t r = 0; r < p.out.rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t group = h / p.heads_per_group;
      const float* triples = static_cast<const float*>(p.partials.row(r * heads + h));
      Fold fold(dim);
      for (int64_t j = 0; j < p.topk; ++j) {
        if (static_cast<const int32_t*>(p.block_ids.row(r))[group * p.topk + j] < 0) continue;
        fold.add(triples + j * (dim + 2));
      }
      fold.store(p.out.row(r), p.out.dtype, h * dim);
    }
  }
  return done();
}

}  // namespace firn::cpu
