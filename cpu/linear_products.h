// Matrix products out = x * w^T of several weights at once, cut into pieces by shape and shared out over a team: what
// linear() and both halves of mlp() are made of. The choice of path is CpuOps' rule (cpu_ops.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/linear_kernels.h"
#include "runtime/ops.h"
#include "runtime/thread_team.h"

namespace firn::cpu {

enum class LinearPath : uint8_t {
  kDot,      // stored weights, up to kFewRows f32 rows
  kDotMany,  // f32 tiles of weights, any rows, the same bits as kDot
  kBf16Dot,  // stored weights, up to kFewRows bf16 rows (bf16_dot.h)
  kTiles,    // stored weights, any bf16 rows, matrix tiles (amx_gemm.h)
  kGemm,     // tiles of weights, oneDNN
};

// One product. Inputs are either f32 rows padded with zeros to kXPad (kDot, kDotMany, kGemm in f32) or bf16 rows (the
// others).
struct Product {
  WeightView w;
  LinearPath path = LinearPath::kDot;
  GemmType type = GemmType::kF32;  // of kGemm
  const float* x_f32 = nullptr;
  const uint16_t* x_bf16 = nullptr;
  int64_t x_stride = 0;
  int64_t rows = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
};

// gate and up of one MLP and its activation; `rows` inputs as in Product. Writes act as f32 (padded with zeros to
// kXPad) or as bf16.
struct GatedProduct {
  Product gate;  // out unused
  WeightView up;
  float* act_f32 = nullptr;
  uint16_t* act_bf16 = nullptr;
  int64_t act_stride = 0;
  bool round_to_bf16 = false;
};

struct LinearContext {
  ThreadTeam* team = nullptr;
  const LinearKernels* kernels = nullptr;
  GemmCache* gemms = nullptr;
  // Scratch of that many bytes, 64-byte aligned; nullptr when refused.
  std::function<std::byte*(int64_t)> scratch;
};

const LinearKernels& linear_kernels(Isa isa);  // the best table of a level on this CPU
int64_t gemm_tile_rows(GemmType type, int64_t k);
int64_t linear_tile_bytes(int64_t n_threads, int64_t max_k);  // an upper bound, for plans
void widen_rows(const LinearContext& context, const ConstMatrixView& x, float* out, int64_t out_stride);

// Both return ok, or why oneDNN or the budget (kNoMemory with an empty message: the budget has said why) refused.
Status run_products(const LinearContext& context, std::span<const Product> products);
Status run_gated(const LinearContext& context, std::span<const GatedProduct> products, const Activation& activation);

}  // namespace firn::cpu
