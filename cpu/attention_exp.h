// exp_nonpositive of attention_kernels.h over the lanes of simd_lanes.h. Internal linkage throughout.
#pragma once

#include "cpu/simd_lanes.h"

namespace firn::cpu {
namespace {

inline Lanes exp_lanes(Lanes x) {
  // Adding and taking away 1.5 * 2^23 rounds to the nearest integer.
  const Lanes shift = lanes_set(12582912.0f);
  const Lanes n = sub(add(mul(x, lanes_set(1.44269504f)), shift), shift);
  // ln 2 in two parts; the first has 15 bits, so n * part is exact.
  Lanes r = mul_add(n, lanes_set(-0.693145751953125f), x);
  r = mul_add(n, lanes_set(-1.42860682030941723212e-6f), r);
  Lanes p = lanes_set(1.0f / 5040);
  p = mul_add(p, r, lanes_set(1.0f / 720));
  p = mul_add(p, r, lanes_set(1.0f / 120));
  p = mul_add(p, r, lanes_set(1.0f / 24));
  p = mul_add(p, r, lanes_set(1.0f / 6));
  p = mul_add(p, r, lanes_set(0.5f));
  p = mul_add(mul(p, r), r, r);  // exp(r) - 1
  p = add(p, lanes_set(1.0f));
  // Below the limit n would leave the exponent's range; the clamp keeps the conversion defined, the last line decides.
  const Lanes limit = lanes_set(-87.33f);
  const Lanes exponent = raise(lanes_set(-126.0f), n);
  return zero_below(x, limit, mul(p, power_of_two(exponent)));
}

}  // namespace
}  // namespace firn::cpu
