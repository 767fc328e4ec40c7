// What the files of the scalar oracle share: element access by type in double precision, and the class.
//
// Contract: load() and store() accept any address alignment; store() rounds once, to nearest even. Nothing here is
// meant to be quick.
#pragma once

#include <cstring>
#include <vector>

#include "cpu/reference.h"
#include "runtime/dtype.h"
#include "runtime/ops.h"

namespace firn::cpu {

// Element i of a row of kF32 or kBf16 values.
inline double load_element(const void* row, DType dtype, int64_t i) {
  if (dtype == DType::kF32) {
    float v;
    std::memcpy(&v, static_cast<const char*>(row) + 4 * i, 4);
    return v;
  }
  FIRN_CHECK(dtype == DType::kBf16, "the oracle reads F32 and BF16 elements only");
  Bf16 v;
  std::memcpy(&v, static_cast<const char*>(row) + 2 * i, 2);
  return to_float(v);
}

// double -> bf16 with one rounding. Going through float may round twice, so the float is made odd first: when the
// conversion to float was inexact, the neighbour towards zero with its last bit set keeps the second rounding honest.
inline Bf16 round_double_to_bf16(double v) {
  float f = static_cast<float>(v);
  const double back = static_cast<double>(f);
  if (back != v && v == v && f - f == 0.0f) {
    uint32_t bits = std::bit_cast<uint32_t>(f);
    const bool away = (back < 0 ? -back : back) > (v < 0 ? -v : v);
    if (away) --bits;
    f = std::bit_cast<float>(bits | 1u);
  }
  return to_bf16(f);
}

inline void store_element(void* row, DType dtype, int64_t i, double value) {
  if (dtype == DType::kF32) {
    const float v = static_cast<float>(value);
    std::memcpy(static_cast<char*>(row) + 4 * i, &v, 4);
    return;
  }
  FIRN_CHECK(dtype == DType::kBf16, "the oracle writes F32 and BF16 elements only");
  const Bf16 v = round_double_to_bf16(value);
  std::memcpy(static_cast<char*>(row) + 2 * i, &v, 2);
}

inline double round_to(DType dtype, double value) {
  return dtype == DType::kF32 ? static_cast<double>(static_cast<float>(value))
                              : static_cast<double>(to_float(round_double_to_bf16(value)));
}

inline std::vector<double> load_row(const ConstMatrixView& m, int64_t r) {
  std::vector<double> out(static_cast<size_t>(m.cols));
  for (int64_t i = 0; i < m.cols; ++i) out[static_cast<size_t>(i)] = load_element(m.row(r), m.dtype, i);
  return out;
}

// position_of[row] of every row of a call, from its spans; CHECKs that the spans cover each row once.
std::vector<int64_t> row_positions(std::span<const KvSpan> spans, int64_t rows);
// The span that holds each row.
std::vector<const KvSpan*> row_spans(std::span<const KvSpan> spans, int64_t rows);

class ReferenceOps final : public Ops {
 public:
  explicit ReferenceOps(Arena* arena) : arena_(arena) {}

  std::string name() const override { return "reference"; }
  Space space() const override { return arena_->space(); }
  Arena& arena() override { return *arena_; }

  // reference_rows.cc
  Ticket embed(const EmbedParams& p) override;
  Ticket norm(const NormParams& p) override;
  Ticket norm_rope(const NormRopeParams& p) override;
  Ticket add(const AddParams& p) override;
  Ticket router(const RouterParams& p) override;
  Ticket combine(const CombineParams& p) override;
  Ticket finish_ffn(const FinishFfnParams& p) override;
  // reference_linear.cc
  Ticket linear(const LinearParams& p) override;
  Ticket mlp(const MlpParams& p) override;
  // reference_attention.cc
  Ticket kv_append(const KvAppendParams& p) override;
  Ticket attention(const AttentionParams& p) override;
  Ticket attention_partial(const AttentionPartialParams& p) override;
  Ticket attention_merge(const AttentionMergeParams& p) override;
  // reference_index.cc
  Ticket index_append(const IndexAppendParams& p) override;
  Ticket index_select(const IndexSelectParams& p) override;
  Ticket block_scores(const BlockScoresParams& p) override;
  // reference_ops.cc
  Ticket upload(void* dst, const void* host_src, int64_t bytes) override;
  Ticket download(void* host_dst, const void* src, int64_t bytes) override;
  Ticket copy(void* dst, const void* src, int64_t bytes) override;
  Ticket zero(void* dst, int64_t bytes) override;
  Status wait(Ticket ticket) override;
  Status recover() override { return {}; }
  int64_t scratch_bytes(const Limits& limits) const override;

 private:
  Ticket done() { return {++last_ticket_}; }
  void check_space(const ConstMatrixView& view, const char* what) const;

  Arena* const arena_;
  uint64_t last_ticket_ = 0;
};

}  // namespace firn::cpu
