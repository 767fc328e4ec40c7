// Writers of the quantised weight formats: from float rows to codes and scales.
//
// Rules (formats.md 3 to 5): MXFP8 scale 2^ceil(log2(amax / 448)) per 32 inputs; NVFP4 tensor scale amax(W) / 2688,
// block scale E4M3(clamp(amax(block) / 6 / tensor scale, 2^-9, 448)) per 16 inputs, 1.0 for a block of zeros; MXFP4
// scale 2^(floor(log2 amax) - 2) per 32 inputs, larger values saturate. Codes are rounded to nearest, ties to even.
// Inputs must be finite; the callers check. What comes out is what runtime/tensor.h describes.
#pragma once

#include <cstdint>

#include "runtime/tensor.h"

namespace firn::model {

// Largest magnitude of n values; NaN or infinity if there is one.
float largest_magnitude(const float* values, int64_t n);

// weight_scale_2 of a matrix whose largest magnitude is amax; 1 for a matrix of zeros.
float nvfp4_tensor_scale(float amax);

// Quantises one row of `cols` inputs (a multiple of the format's group) into data and scales. tensor_scale matters for
// NVFP4 only. kF32 and kBf16 write data alone; data needs no alignment.
void quantise_row(WeightFormat format, const float* row, int64_t cols, float tensor_scale, void* data, void* scales);

}  // namespace firn::model
