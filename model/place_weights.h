// Copies weights to where another Ops can read them.
#pragma once

#include <functional>

#include "model/weights.h"
#include "runtime/ops.h"

namespace firn::model {

// The parts of a model that may live apart.
enum class WeightClass : uint8_t { kResident, kExpert };

// A second Weights whose views lie in `ops`' space. Matrices for which `take(class, layer, expert)` is false are left
// out (their views are empty); norms and the router bias belong to kResident. Waits for the copies.
Result<Weights> place_weights(const Weights& host, Ops& ops,
                              const std::function<bool(WeightClass, int64_t layer, int64_t expert)>& take);

}  // namespace firn::model
