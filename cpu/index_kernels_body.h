// The index kernels of index_kernels.h, written once over simd_lanes.h and compiled in each level's file. Internal
// linkage throughout.
#pragma once

#include "cpu/index_kernels.h"
#include "cpu/simd_lanes.h"

namespace firn::cpu {
namespace {

constexpr float kMinusInf = -__builtin_inff();
// Keys packed at a time: 32 KiB of floats at dim 128, which stays in the first-level cache.
constexpr int64_t kPackKeys = 64;

// Raises largest[q] (kLanes floats each) by the scores of the packed groups [0, kX); of the last one only `tail` lanes.
template <int kQ, int kX>
inline void raise_tile(const float* q, int64_t dim, const float* packed, int64_t tail, float* largest) {
  Lanes sum[kQ][kX];
  for (int i = 0; i < kQ; ++i) {
    for (int x = 0; x < kX; ++x) sum[i][x] = lanes_set(0);
  }
  for (int64_t d = 0; d < dim; ++d) {
    Lanes v[kX];
    for (int x = 0; x < kX; ++x) v[x] = lanes_load(packed + (x * dim + d) * kLanes);
    for (int i = 0; i < kQ; ++i) {
      const Lanes w = lanes_set(q[i * dim + d]);
      for (int x = 0; x < kX; ++x) sum[i][x] = mul_add(w, v[x], sum[i][x]);
    }
  }
  for (int i = 0; i < kQ; ++i) {
    if (tail < kLanes) sum[i][kX - 1] = first_lanes(sum[i][kX - 1], tail, lanes_set(kMinusInf));
    Lanes m = lanes_load(largest + i * kLanes);
    for (int x = 0; x < kX; ++x) m = raise(m, sum[i][x]);
    lanes_store(largest + i * kLanes, m);
  }
}

template <int kQ>
inline void raise_rows(const float* q, int64_t dim, const float* packed, int64_t n_keys, float* largest) {
  const int64_t groups = (n_keys + kLanes - 1) / kLanes, tail = n_keys - (groups - 1) * kLanes;
  int64_t g = 0;
  for (; g + kTileX <= groups; g += kTileX) {
    raise_tile<kQ, kTileX>(q, dim, packed + g * dim * kLanes, g + kTileX == groups ? tail : kLanes, largest);
  }
  for (; g < groups; ++g) {
    raise_tile<kQ, 1>(q, dim, packed + g * dim * kLanes, g + 1 == groups ? tail : kLanes, largest);
  }
}

void block_maxima(const BlockMaximaArgs& a) {
  float* packed = static_cast<float*>(a.scratch);
  float* largest = packed + kPackKeys * a.dim;
  const int64_t row_bytes = a.dim * (a.bf16 ? 2 : 4);
  for (int64_t b = 0; b < a.n_blocks; ++b) {
    const char* keys = static_cast<const char*>(a.blocks[b]);
    for (int64_t i = 0; i < a.n_queries; ++i) lanes_store(largest + i * kLanes, lanes_set(kMinusInf));
    for (int64_t first = 0; first < a.n_keys; first += kPackKeys) {
      const int64_t n = a.n_keys - first < kPackKeys ? a.n_keys - first : kPackKeys;
      pack_keys_lanes(keys + first * row_bytes, a.bf16, n, a.dim, packed);
      int64_t i = 0;
      for (; i + kTileQ <= a.n_queries; i += kTileQ) {
        raise_rows<kTileQ>(a.q + i * a.dim, a.dim, packed, n, largest + i * kLanes);
      }
      for (; i < a.n_queries; ++i) raise_rows<1>(a.q + i * a.dim, a.dim, packed, n, largest + i * kLanes);
    }
    for (int64_t i = 0; i < a.n_queries; ++i) {
      a.out[b * a.out_stride + i] = largest_of(lanes_load(largest + i * kLanes));
    }
  }
}

using Doubles = double __attribute__((vector_size(kLanes * 4)));  // half as many as Lanes
using HalfLanes = float __attribute__((vector_size(kLanes * 2)));

inline Doubles widen_half(const float* p) {
  HalfLanes h;
  __builtin_memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, Doubles);
}

// Canonical scores of up to kLanes packed keys. Products of bf16 or fp32 values are exact in fp64, so product and sum
// apart equal the fused operation.
inline void canonical_lanes(const float* packed, int64_t dim, const float* q, float* out) {
  Doubles low = {}, high = {};
  for (int64_t d = 0; d < dim; ++d, packed += kLanes) {
    const double w = q[d];
    low = low + widen_half(packed) * w;
    high = high + widen_half(packed + kLanes / 2) * w;
  }
  double sums[kLanes];
  __builtin_memcpy(sums, &low, sizeof low);
  __builtin_memcpy(sums + kLanes / 2, &high, sizeof high);
  for (int64_t j = 0; j < kLanes; ++j) out[j] = static_cast<float>(sums[j]);
}

void canonical(const void* keys, bool bf16, int64_t n_keys, int64_t dim, const float* q, int64_t n_queries,
               void* scratch, float* out) {
  float* packed = static_cast<float*>(scratch);
  const int64_t row_bytes = dim * (bf16 ? 2 : 4);
  for (int64_t i = 0; i < n_queries; ++i) out[i] = kMinusInf;
  for (int64_t first = 0; first < n_keys; first += kPackKeys) {
    const int64_t n = n_keys - first < kPackKeys ? n_keys - first : kPackKeys;
    pack_keys_lanes(static_cast<const char*>(keys) + first * row_bytes, bf16, n, dim, packed);
    for (int64_t i = 0; i < n_queries; ++i) {
      for (int64_t g = 0; g < n; g += kLanes) {
        float scores[kLanes];
        canonical_lanes(packed + g * dim, dim, q + i * dim, scores);
        for (int64_t j = 0; j < kLanes && g + j < n; ++j) {
          if (scores[j] > out[i]) out[i] = scores[j];
        }
      }
    }
  }
}

void scores(const void* keys, bool bf16, int64_t n_keys, int64_t dim, const float* q, void* scratch, float* out) {
  float* packed = static_cast<float*>(scratch);
  const int64_t row_bytes = dim * (bf16 ? 2 : 4);
  for (int64_t first = 0; first < n_keys; first += kPackKeys) {
    const int64_t n = n_keys - first < kPackKeys ? n_keys - first : kPackKeys;
    pack_keys_lanes(static_cast<const char*>(keys) + first * row_bytes, bf16, n, dim, packed);
    for (int64_t g = 0; g < n; g += kLanes) {
      float of_lanes[kLanes];
      canonical_lanes(packed + g * dim, dim, q, of_lanes);
      for (int64_t j = 0; j < kLanes && g + j < n; ++j) out[first + g + j] = of_lanes[j];
    }
  }
}

#if defined(__AVX2__) || defined(__AVX512F__)
constexpr int64_t kRoundingsPerDim = 1;
#else
constexpr int64_t kRoundingsPerDim = 2;
#endif

constexpr IndexKernels kTable = {block_maxima, canonical, scores, kRoundingsPerDim};

}  // namespace
}  // namespace firn::cpu
