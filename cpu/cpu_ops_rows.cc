// CpuOps' row operations: embedding, norms, rotary positions, sums, router, combination of experts.
//
// Work is cut by rows, heads or columns, never by the number of threads, and no sum crosses a piece: a result depends
// on its own row alone. Arithmetic is fp32 with one rounding at the end; angles, the mean of squares' root and the
// router's scores are fp64.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/cpu_ops.h"
#include "cpu/row_kernels.h"
#include "cpu/rows_scratch.h"

namespace firn::cpu {
namespace {

// Elements a piece of work should have, so that handing it out costs little beside it.
constexpr int64_t kPieceElements = 16384;
// Rows whose tables or logits are held at a time.
constexpr int64_t kChunkRows = 1024;

const RowKernels& kernels_for(Isa isa) {
  if (isa >= Isa::kAvx512) return row_kernels_avx512();
  if (isa >= Isa::kAvx2) return row_kernels_avx2();
  return row_kernels_scalar();
}

int64_t rows_per_piece(int64_t cols) { return std::max<int64_t>(1, kPieceElements / std::max<int64_t>(1, cols)); }

bool is_bf16(DType dtype) {
  FIRN_CHECK(dtype == DType::kBf16 || dtype == DType::kF32, "row kernels work on BF16 and F32");
  return dtype == DType::kBf16;
}

float* floats(const MatrixView& m, int64_t r) {
  FIRN_CHECK(m.dtype == DType::kF32, "F32 rows expected");
  return static_cast<float*>(m.row(r));
}

const float* floats(const ConstMatrixView& m, int64_t r) {
  FIRN_CHECK(m.dtype == DType::kF32, "F32 rows expected");
  return static_cast<const float*>(m.row(r));
}

// Finds the span of a row; neighbouring rows mostly share one, so the last answer is tried first.
class SpanFinder {
 public:
  explicit SpanFinder(std::span<const KvSpan> spans) : spans_(spans) {}
  int64_t position(int64_t row) {
    if (!holds(last_, row)) {
      last_ = 0;
      while (last_ < spans_.size() && !holds(last_, row)) ++last_;
      FIRN_CHECK(last_ < spans_.size(), "a row belongs to no span");
    }
    return spans_[last_].pos_begin + (row - spans_[last_].row_begin);
  }

 private:
  bool holds(size_t i, int64_t row) const {
    return i < spans_.size() && row >= spans_[i].row_begin && row < spans_[i].row_begin + spans_[i].n_rows;
  }
  std::span<const KvSpan> spans_;
  size_t last_ = 0;
};

// Chooses the topk experts of one row: falling s + bias, ties to the lower id, written by ascending id. s and choice
// are working space of n_experts each. A NaN logit ranks below every number; when one must be chosen all the same its
// weight is NaN, so that the damage shows. Returns the number of NaN logits.
int64_t choose_experts(const float* logits, const char* bias, int64_t n_experts, int64_t topk, double* s,
                       double* choice, int32_t* ids, float* weights) {
  constexpr double kTaken = -std::numeric_limits<double>::infinity();
  int64_t n_nan = 0;
  for (int64_t e = 0; e < n_experts; ++e) {
    float b;
    std::memcpy(&b, bias + 4 * e, sizeof b);
    s[e] = 1.0 / (1.0 + std::exp(-static_cast<double>(logits[e])));
    choice[e] = s[e] + static_cast<double>(b);
    n_nan += std::isnan(logits[e]) ? 1 : 0;
    if (!(choice[e] > std::numeric_limits<double>::lowest())) choice[e] = std::numeric_limits<double>::lowest();
  }
  for (int64_t k = 0; k < topk; ++k) {
    int64_t best = -1;
    for (int64_t e = 0; e < n_experts; ++e) {
      if (choice[e] != kTaken && (best < 0 || choice[e] > choice[best])) best = e;
    }
    choice[best] = kTaken;
    ids[k] = static_cast<int32_t>(best);
  }
  std::sort(ids, ids + topk);
  double sum = 0;
  for (int64_t k = 0; k < topk; ++k) sum += s[ids[k]];
  for (int64_t k = 0; k < topk; ++k) {
    weights[k] = static_cast<float>(sum == 0 ? 1.0 / static_cast<double>(topk) : s[ids[k]] / sum);
  }
  return n_nan;
}

}  // namespace

int64_t rows_scratch_bytes(const Ops::Limits& limits, int n_threads) {
  constexpr int64_t kExperts = 512;  // limits do not name them; M3 has 128
  const int64_t chunk = std::min(limits.rows, kChunkRows);
  const int64_t rope = (4 + 4 * chunk) * limits.head_dim;
  const int64_t router = kExperts * (16 * n_threads + 4 * chunk);
  return rope + router + 2 * 4096;
}

Ticket CpuOps::embed(const EmbedParams& p) {
  if (failed()) return done();
  const auto& k = kernels_for(isa_);
  const int64_t n = static_cast<int64_t>(p.ids.size()), cols = p.table.cols;
  FIRN_CHECK(p.out.rows == n && p.out.cols == cols, "embed: shapes differ");
  FIRN_CHECK(p.table.format == WeightFormat::kBf16 || p.table.format == WeightFormat::kF32, "embed: BF16 or F32 table");
  const bool table_bf16 = p.table.format == WeightFormat::kBf16, out_bf16 = is_bf16(p.out.dtype);
  const int64_t row_bytes = cols * (table_bf16 ? 2 : 4);
  team_->parallel_for(n, rows_per_piece(cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t id = p.ids[static_cast<size_t>(r)];
      FIRN_CHECK(id >= 0 && id < p.table.rows, "embed: token id outside the table");
      k.convert(p.out.row(r), out_bf16, static_cast<const char*>(p.table.data) + id * row_bytes, table_bf16, cols);
    }
  });
  return done();
}

Ticket CpuOps::norm(const NormParams& p) {
  if (failed()) return done();
  const auto& k = kernels_for(isa_);
  const int64_t cols = p.x.cols, n_out = p.rows.empty() ? p.x.rows : static_cast<int64_t>(p.rows.size());
  FIRN_CHECK(p.out.rows == n_out && p.out.cols == cols && p.weight.n == cols, "norm: shapes differ");
  const bool x_bf16 = is_bf16(p.x.dtype), w_bf16 = is_bf16(p.weight.dtype), out_bf16 = is_bf16(p.out.dtype);
  team_->parallel_for(n_out, rows_per_piece(cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t from = p.rows.empty() ? r : p.rows[static_cast<size_t>(r)];
      FIRN_CHECK(from >= 0 && from < p.x.rows, "norm: gathered row outside x");
      const void* x = p.x.row(from);
      const double mean = static_cast<double>(k.sum_squares(x, x_bf16, cols)) / static_cast<double>(cols);
      const float scale = static_cast<float>(1.0 / std::sqrt(mean + static_cast<double>(p.weight.eps)));
      k.norm_row({x, p.weight.data, p.out.row(r), cols, scale, p.weight.offset, x_bf16, w_bf16, out_bf16});
    }
  });
  return done();
}

Ticket CpuOps::norm_rope(const NormRopeParams& p) {
  if (failed() || p.parts.empty()) return done();
  const auto& k = kernels_for(isa_);
  const int64_t rows = p.parts[0].x.rows, half = p.rotary_dim / 2;
  FIRN_CHECK(p.rotary_dim % 2 == 0, "norm_rope: rotary_dim is odd");
  int64_t heads = 0, cols = 0;
  for (const NormRopePart& part : p.parts) {
    FIRN_CHECK(part.x.rows == rows && part.out.rows == rows && part.x.cols == part.heads * part.dim &&
                   part.out.cols == part.x.cols && part.weight.n == part.dim && p.rotary_dim <= part.dim,
               "norm_rope: shapes differ");
    heads += part.heads;
    cols += part.x.cols;
  }
  // Frequencies, then cos and sin of the rows of a chunk.
  const int64_t chunk = std::min(rows, kChunkRows);
  std::byte* memory = scratch(kRope, half * 8 + chunk * p.rotary_dim * 4);
  if (memory == nullptr) return done();
  auto* frequency = reinterpret_cast<double*>(memory);
  auto* table = reinterpret_cast<float*>(memory + half * 8);
  for (int64_t i = 0; i < half; ++i) {
    frequency[i] = std::pow(p.theta, -2.0 * static_cast<double>(i) / static_cast<double>(p.rotary_dim));
  }
  const int64_t heads_per_piece = std::max<int64_t>(1, kPieceElements / 4 * heads / std::max<int64_t>(1, cols));
  for (int64_t first = 0; first < rows; first += chunk) {
    const int64_t n = std::min(chunk, rows - first);
    team_->parallel_for(n, 16, [&](int64_t begin, int64_t end, int) {
      SpanFinder finder(p.spans);
      for (int64_t r = begin; r < end; ++r) {
        const double position = static_cast<double>(finder.position(first + r));
        float* c = table + r * p.rotary_dim;
        for (int64_t i = 0; i < half; ++i) {
          const double angle = position * frequency[i];
          c[i] = static_cast<float>(std::cos(angle));
          c[half + i] = static_cast<float>(std::sin(angle));
        }
      }
    });
    team_->parallel_for(n * heads, heads_per_piece, [&](int64_t begin, int64_t end, int) {
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t r = unit / heads;
        int64_t h = unit % heads;
        size_t j = 0;
        while (h >= p.parts[j].heads) h -= p.parts[j++].heads;
        const NormRopePart& part = p.parts[j];
        const float* c = table + r * p.rotary_dim;
        char* out = static_cast<char*>(part.out.row(first + r));
        k.norm_rope_head({floats(part.x, first + r) + h * part.dim, part.weight.data, c, c + half,
                          out + h * part.dim * static_cast<int64_t>(dtype_bytes(part.out.dtype)), part.dim, half,
                          part.weight.offset, part.weight.eps, is_bf16(part.weight.dtype), is_bf16(part.out.dtype)});
      }
    });
  }
  return done();
}

Ticket CpuOps::add(const AddParams& p) {
  if (failed()) return done();
  const auto& k = kernels_for(isa_);
  FIRN_CHECK(p.h.rows == p.y.rows && p.h.cols == p.y.cols, "add: shapes differ");
  const bool h_bf16 = is_bf16(p.h.dtype);
  team_->parallel_for(p.h.rows, rows_per_piece(p.h.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) k.add(p.h.row(r), h_bf16, floats(p.y, r), p.h.cols);
  });
  return done();
}

Ticket CpuOps::router(const RouterParams& p) {
  if (failed()) return done();
  const auto& k = kernels_for(isa_);
  const int64_t rows = p.x.rows, n_experts = p.gate.rows, cols = p.x.cols;
  FIRN_CHECK(p.gate.cols == cols && p.bias.cols == n_experts && p.bias.dtype == DType::kF32 && p.topk >= 1 &&
                 p.topk <= n_experts && p.ids.rows == rows && p.ids.cols == p.topk && p.weights.rows == rows &&
                 p.weights.cols == p.topk,
             "router: shapes differ");
  FIRN_CHECK(p.gate.format == WeightFormat::kF32 || p.gate.format == WeightFormat::kBf16, "router: F32 or BF16 gate");
  FIRN_CHECK(p.gate.tensor_scale == 1.0f, "router: a gate has no tensor scale");
  const bool x_bf16 = is_bf16(p.x.dtype), gate_bf16 = p.gate.format == WeightFormat::kBf16;
  const int64_t x_stride = p.x.stride * (x_bf16 ? 2 : 4), gate_stride = cols * (gate_bf16 ? 2 : 4);
  const int64_t chunk = std::min(rows, kChunkRows);
  const int64_t choice_bytes = 2 * n_experts * 8 * team_->size();
  std::byte* memory = scratch(kRouter, choice_bytes + (p.logits.empty() ? chunk * n_experts * 4 : 0));
  if (memory == nullptr) return done();
  // With few rows the experts are spread over the cores; with many the rows are.
  const int64_t row_block = 32, expert_block = rows <= row_block ? kRouterTile : 32;
  const int64_t expert_blocks = (n_experts + expert_block - 1) / expert_block;
  std::atomic<int64_t> n_nan{0};
  for (int64_t first = 0; first < rows; first += chunk) {
    const int64_t n = std::min(chunk, rows - first);
    auto* own_logits = reinterpret_cast<float*>(memory + choice_bytes);
    float* logits = p.logits.empty() ? own_logits : floats(p.logits, first);
    const int64_t logits_stride = p.logits.empty() ? n_experts : p.logits.stride;
    const int64_t row_blocks = (n + row_block - 1) / row_block;
    team_->parallel_for(row_blocks * expert_blocks, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t r0 = piece / expert_blocks * row_block, r1 = std::min(n, r0 + row_block);
        const int64_t e0 = piece % expert_blocks * expert_block, e1 = std::min(n_experts, e0 + expert_block);
        for (int64_t e = e0; e < e1; e += kRouterTile) {
          for (int64_t r = r0; r < r1; r += kRouterTile) {
            k.router_tile({p.x.row(first + r), static_cast<const char*>(p.gate.data) + e * gate_stride,
                           logits + r * logits_stride + e, cols, x_stride, gate_stride, logits_stride,
                           std::min(kRouterTile, r1 - r), std::min(kRouterTile, e1 - e), x_bf16, gate_bf16});
          }
        }
      }
    });
    team_->parallel_for(n, 16, [&](int64_t begin, int64_t end, int thread) {
      double* s = reinterpret_cast<double*>(memory) + thread * 2 * n_experts;
      int64_t found = 0;
      for (int64_t r = begin; r < end; ++r) {
        found +=
            choose_experts(logits + r * logits_stride, static_cast<const char*>(p.bias.data), n_experts, p.topk, s,
                           s + n_experts, static_cast<int32_t*>(p.ids.row(first + r)), floats(p.weights, first + r));
      }
      if (found != 0) n_nan.fetch_add(found, std::memory_order_relaxed);
    });
  }
  stats_.nan_logits += n_nan.load();
  return done();
}

Ticket CpuOps::combine(const CombineParams& p) {
  if (failed()) return done();
  const auto& k = kernels_for(isa_);
  const int64_t n = static_cast<int64_t>(p.rows.size()), cols = p.acc.cols;
  FIRN_CHECK(p.weights.size() == p.rows.size() && p.y.rows >= n && p.y.cols == cols, "combine: shapes differ");
  for (const int32_t row : p.rows) FIRN_CHECK(row >= 0 && row < p.acc.rows, "combine: row outside acc");
  // A piece owns some rows of acc and walks the whole list for them, in order; so each element's sum has one order.
  // With few rows the pieces are stripes of columns instead. At most 64 pieces of rows, so that the walks stay cheap.
  const int64_t tokens = p.acc.rows;
  const int64_t row_grain = tokens < 8 ? tokens : std::max<int64_t>(1, (tokens + 63) / 64);
  const int64_t column_grain = tokens < 8 ? 512 : cols;
  const int64_t stripes = (cols + column_grain - 1) / std::max<int64_t>(1, column_grain);
  const int64_t row_pieces = tokens == 0 ? 0 : (tokens + row_grain - 1) / row_grain;
  team_->parallel_for(row_pieces * stripes, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t r0 = piece / stripes * row_grain, r1 = r0 + row_grain;
      const int64_t c0 = piece % stripes * column_grain, c1 = std::min(cols, c0 + column_grain);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t row = p.rows[static_cast<size_t>(i)];
        if (row < r0 || row >= r1) continue;
        k.scale_add(floats(p.acc, row) + c0, floats(p.y, i) + c0, p.weights[static_cast<size_t>(i)], c1 - c0);
      }
    }
  });
  return done();
}

Ticket CpuOps::finish_ffn(const FinishFfnParams& p) {
  if (failed()) return done();
  const auto& k = kernels_for(isa_);
  const int64_t rows = p.h.rows, cols = p.h.cols;
  const bool has_acc = !p.acc.empty(), has_shared = !p.shared.empty();
  FIRN_CHECK(!has_acc || (p.acc.rows == rows && p.acc.cols == cols), "finish_ffn: acc's shape differs");
  FIRN_CHECK(!has_shared || (p.shared.rows == rows && p.shared.cols == cols), "finish_ffn: shared's shape differs");
  const bool h_bf16 = is_bf16(p.h.dtype);
  team_->parallel_for(rows, rows_per_piece(cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      k.finish(p.h.row(r), h_bf16, has_acc ? floats(p.acc, r) : nullptr, has_shared ? floats(p.shared, r) : nullptr,
               p.scale, cols);
    }
  });
  return done();
}

}  // namespace firn::cpu
