// The row kernels, written once over sixteen lanes. Included by row_kernels_{scalar,avx2,avx512}.cc after their
// simd_*.h; everything is in an anonymous namespace, as simd_avx512.h asks.
#pragma once

#include "cpu/row_kernels.h"

namespace firn::cpu {
namespace {

// Calls body(i, count) for pieces of 16 and the tail; count is 16 for whole pieces.
template <typename F>
inline __attribute__((always_inline)) void for_each_piece(int64_t n, F&& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, n - i);
}

template <typename T>
inline __attribute__((always_inline)) F16 load_piece(const T* p, int64_t count) {
  return count == kLanes ? load(p) : load_first(p, count);
}

template <typename T>
inline __attribute__((always_inline)) void store_piece(T* p, F16 v, int64_t count) {
  if (count == kLanes) {
    store(p, v);
  } else {
    store_first(p, v, count);
  }
}

// Calls f with `p` as const float* or const uint16_t*.
template <typename F>
inline __attribute__((always_inline)) void with_type(const void* p, bool bf16, F&& f) {
  if (bf16) {
    f(static_cast<const uint16_t*>(p));
  } else {
    f(static_cast<const float*>(p));
  }
}
template <typename F>
inline __attribute__((always_inline)) void with_type(void* p, bool bf16, F&& f) {
  if (bf16) {
    f(static_cast<uint16_t*>(p));
  } else {
    f(static_cast<float*>(p));
  }
}

float sum_squares(const void* x, bool x_bf16, int64_t n) {
  F16 sum = zero16();
  with_type(x, x_bf16, [&](auto* p) {
    for_each_piece(n, [&](int64_t i, int64_t count) {
      const F16 v = load_piece(p + i, count);
      sum = mul_add(v, v, sum);
    });
  });
  return sum_lanes(sum);
}

void norm_row(const NormRowArgs& a) {
  const F16 scale = broadcast(a.scale), offset = broadcast(a.offset);
  with_type(a.x, a.x_bf16, [&](auto* x) {
    with_type(a.weight, a.weight_bf16, [&](auto* w) {
      with_type(a.out, a.out_bf16, [&](auto* out) {
        for_each_piece(a.n, [&](int64_t i, int64_t count) {
          const F16 gain = add(offset, load_piece(w + i, count));
          store_piece(out + i, mul(mul(load_piece(x + i, count), scale), gain), count);
        });
      });
    });
  });
}

void norm_rope_head(const NormRopeArgs& a) {
  const double mean = static_cast<double>(sum_squares(a.x, false, a.dim)) / static_cast<double>(a.dim);
  const F16 scale = broadcast(static_cast<float>(1.0 / __builtin_sqrt(mean + static_cast<double>(a.eps))));
  const F16 offset = broadcast(a.offset);
  with_type(a.weight, a.weight_bf16, [&](auto* w) {
    with_type(a.out, a.out_bf16, [&](auto* out) {
      const auto normed = [&](int64_t i, int64_t count) {
        const F16 gain = add(offset, load_piece(w + i, count));
        return mul(mul(load_piece(a.x + i, count), scale), gain);
      };
      for_each_piece(a.half, [&](int64_t i, int64_t count) {
        const F16 c = load_piece(a.cos + i, count), s = load_piece(a.sin + i, count);
        const F16 first = normed(i, count), second = normed(i + a.half, count);
        store_piece(out + i, sub(mul(first, c), mul(second, s)), count);
        store_piece(out + i + a.half, add(mul(second, c), mul(first, s)), count);
      });
      const int64_t rest = 2 * a.half;
      for_each_piece(a.dim - rest,
                     [&](int64_t i, int64_t count) { store_piece(out + rest + i, normed(rest + i, count), count); });
    });
  });
}

void convert(void* out, bool out_bf16, const void* in, bool in_bf16, int64_t n) {
  with_type(in, in_bf16, [&](auto* from) {
    with_type(out, out_bf16, [&](auto* to) {
      for_each_piece(n, [&](int64_t i, int64_t count) { store_piece(to + i, load_piece(from + i, count), count); });
    });
  });
}

void add_row(void* h, bool h_bf16, const float* y, int64_t n) {
  with_type(h, h_bf16, [&](auto* p) {
    for_each_piece(n, [&](int64_t i, int64_t count) {
      store_piece(p + i, add(load_piece(p + i, count), load_piece(y + i, count)), count);
    });
  });
}

void scale_add(float* acc, const float* y, float weight, int64_t n) {
  const F16 w = broadcast(weight);
  for_each_piece(n, [&](int64_t i, int64_t count) {
    store_piece(acc + i, mul_add(w, load_piece(y + i, count), load_piece(acc + i, count)), count);
  });
}

void finish(void* h, bool h_bf16, float* acc, const float* shared, float scale, int64_t n) {
  const F16 factor = broadcast(scale);
  with_type(h, h_bf16, [&](auto* p) {
    for_each_piece(n, [&](int64_t i, int64_t count) {
      F16 ffn = shared != nullptr ? load_piece(shared + i, count) : zero16();
      if (acc != nullptr) {
        ffn = mul_add(factor, load_piece(acc + i, count), ffn);
        store_piece(acc + i, zero16(), count);
      }
      store_piece(p + i, add(load_piece(p + i, count), ffn), count);
    });
  });
}

// Each of the Rows x Experts dot products has its own sixteen lanes, so its value does not depend on the tile's shape.
template <int Rows, int Experts, typename X, typename G>
inline __attribute__((always_inline)) void dot_tile(const RouterTileArgs& a, const X* const* x, const G* const* gate) {
  F16 sum[Rows][Experts];
  for (int m = 0; m < Rows; ++m) {
    for (int e = 0; e < Experts; ++e) sum[m][e] = zero16();
  }
  for_each_piece(a.n, [&](int64_t i, int64_t count) {
    F16 w[Experts];
    for (int e = 0; e < Experts; ++e) w[e] = load_piece(gate[e] + i, count);
    for (int m = 0; m < Rows; ++m) {
      const F16 v = load_piece(x[m] + i, count);
      for (int e = 0; e < Experts; ++e) sum[m][e] = mul_add(w[e], v, sum[m][e]);
    }
  });
  for (int m = 0; m < Rows; ++m) {
    for (int e = 0; e < Experts; ++e) a.logits[m * a.logits_stride + e] = sum_lanes(sum[m][e]);
  }
}

template <typename X, typename G>
void router_tile_of(const RouterTileArgs& a) {
  const X* x[kRouterTile];
  const G* gate[kRouterTile];
  for (int64_t m = 0; m < a.rows; ++m) {
    x[m] = reinterpret_cast<const X*>(static_cast<const char*>(a.x) + m * a.x_stride_bytes);
  }
  for (int64_t e = 0; e < a.experts; ++e) {
    gate[e] = reinterpret_cast<const G*>(static_cast<const char*>(a.gate) + e * a.gate_stride_bytes);
  }
  if (a.experts == kRouterTile && a.rows == kRouterTile) return dot_tile<4, 4>(a, x, gate);
  if (a.experts == kRouterTile) {
    RouterTileArgs one = a;
    for (int64_t m = 0; m < a.rows; ++m) {
      one.logits = a.logits + m * a.logits_stride;
      dot_tile<1, 4>(one, x + m, gate);
    }
    return;
  }
  for (int64_t m = 0; m < a.rows; ++m) {
    for (int64_t e = 0; e < a.experts; ++e) {
      RouterTileArgs one = a;
      one.logits = a.logits + m * a.logits_stride + e;
      dot_tile<1, 1>(one, x + m, gate + e);
    }
  }
}

void router_tile(const RouterTileArgs& a) {
  if (a.x_bf16) {
    return a.gate_bf16 ? router_tile_of<uint16_t, uint16_t>(a) : router_tile_of<uint16_t, float>(a);
  }
  return a.gate_bf16 ? router_tile_of<float, uint16_t>(a) : router_tile_of<float, float>(a);
}

constexpr RowKernels kRowKernels = {sum_squares, norm_row,  norm_rope_head, convert,
                                    add_row,     scale_add, finish,         router_tile};

}  // namespace
}  // namespace firn::cpu
