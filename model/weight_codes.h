// What the bytes of stored weights must not be: NaN codes, and scales of a whole matrix that are no positive number.
#pragma once

#include <cstddef>

#include "model/weights.h"

namespace firn::model {

// Look at every weight code, every scale byte; the error names tensor, position and code.
Status check_weight_codes(const FoundSlot& found, const std::byte* data);
Status check_scale_codes(const FoundSlot& found, const std::byte* scales);

// The factor that a stored weight_scale_2 or weight_global_scale stands for.
Result<float> usable_tensor_scale(const FoundSlot& found, float stored);

}  // namespace firn::model
