// The attention kernels of attention_kernels.h, written once over simd_lanes.h and compiled in each level's file.
// Internal linkage throughout.
#pragma once

#include "cpu/attention_exp.h"
#include "cpu/attention_kernels.h"

namespace firn::cpu {
namespace {

constexpr float kMinusInf = -__builtin_inff();

float exp_one(float x) {
  float a[kLanes];
  lanes_store(a, exp_lanes(lanes_set(x)));
  return a[0];
}

void pack_keys(const void* keys, bool bf16, int64_t n_keys, int64_t dim, float* out) {
  pack_keys_lanes(keys, bf16, n_keys, dim, out);
}

void widen(const void* rows, bool bf16, int64_t n, int64_t dim, int64_t dim_padded, float* out) {
  const char* row = static_cast<const char*>(rows);
  for (int64_t t = 0; t < n; ++t, row += dim * (bf16 ? 2 : 4), out += dim_padded) {
    int64_t i = 0;
    if (bf16) {
      for (; i + kLanes <= dim; i += kLanes) {
        lanes_store(out + i, lanes_load_bf16(reinterpret_cast<const uint16_t*>(row) + i));
      }
    } else {
      for (; i + kLanes <= dim; i += kLanes) lanes_store(out + i, lanes_load(reinterpret_cast<const float*>(row) + i));
    }
    for (; i < dim_padded; ++i) out[i] = i < dim ? load_float(row, bf16, i) : 0.0f;
  }
}

// Scores in place -> weights; returns m and l.
inline void soften(float* s, int64_t n_keys, float scale, float* m_out, float* l_out) {
  const int64_t vectors = (n_keys + kLanes - 1) / kLanes;
  const int64_t tail = n_keys - (vectors - 1) * kLanes;
  const Lanes scales = lanes_set(scale), lowest = lanes_set(kMinusInf);
  Lanes largest = lowest;
  for (int64_t x = 0; x < vectors; ++x) {
    Lanes v = mul(lanes_load(s + x * kLanes), scales);
    // The lanes past the visible keys hold whatever other keys gave; they are replaced, never computed with.
    if (x + 1 == vectors && tail < kLanes) v = first_lanes(v, tail, lowest);
    lanes_store(s + x * kLanes, v);
    largest = raise(largest, v);
  }
  const float m = largest_of(largest);
  const Lanes shift = lanes_set(m), zero = lanes_set(0);
  Lanes sum = zero;
  for (int64_t x = 0; x < vectors; ++x) {
    Lanes p = exp_lanes(sub(lanes_load(s + x * kLanes), shift));
    if (x + 1 == vectors && tail < kLanes) p = first_lanes(p, tail, zero);
    lanes_store(s + x * kLanes, p);
    sum = add(sum, p);
  }
  *m_out = m;
  *l_out = sum_of(sum);
}

void attend(const AttendArgs& a) {
  float* weights[kAttendBatch];
  for (int64_t q = 0; q < a.n_queries; ++q) weights[q] = a.weights + q * a.weights_stride;
  const int64_t vectors = (a.n_keys + kLanes - 1) / kLanes;
  multiply(a.q, a.n_queries, a.dim, a.keys, vectors, a.dim * kLanes, kLanes, weights);
  for (int64_t q = 0; q < a.n_queries; ++q) soften(weights[q], a.n_keys, a.scale, a.m + q, a.l + q);
  multiply(weights, a.n_queries, a.n_keys, a.values, a.dim_padded / kLanes, kLanes, a.dim_padded, a.o);
}

void merge(float* m, float* l, float* o, float m_b, float l_b, const float* o_b, int64_t dim) {
  if (l_b == 0.0f) return;
  const float m_new = m_b > *m || m_b != m_b ? m_b : *m;
  const float keep = exp_one(*m - m_new), take = exp_one(m_b - m_new);
  *l = *l * keep + l_b * take;
  for (int64_t i = 0; i < dim; ++i) o[i] = o[i] * keep + o_b[i] * take;
  *m = m_new;
}

void finish(float l, const float* o, int64_t dim, void* out, bool bf16) {
  if (!bf16) {
    float* to = static_cast<float*>(out);
    for (int64_t i = 0; i < dim; ++i) to[i] = l == 0.0f ? 0.0f : o[i] / l;
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(out);
  for (int64_t i = 0; i < dim; ++i) {
    const float v = l == 0.0f ? 0.0f : o[i] / l;
    uint32_t u;
    __builtin_memcpy(&u, &v, 4);
    const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    const uint32_t quiet = (u >> 16) | 0x40u;
    to[i] = static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
  }
}

constexpr AttentionKernels kTable = {pack_keys, widen, attend, merge, finish, exp_one};

}  // namespace
}  // namespace firn::cpu
