// Root-mean-square norm of a row and the mHC coefficients of four streams; see streams/__init__.py.
#pragma once
#include "../lanes.h"

namespace {

// bf16(x * factor * weight), factor from the mean square; x and out may be the same row
static inline void norm_row(const bf16* x, const float* weight, int64_t width, float eps, bf16* out) {
  v16 squares = v16{};
  for (int64_t d = 0; d < width; d += 16) {
    const v16 v = load_bf16(x + d);
    squares = fma16(v, v, squares);
  }
  const v16 factor = splat(1.0f / root(sum16(squares) / (float)width + eps));
  for (int64_t d = 0; d < width; d += 16) store_bf16(out + d, load_bf16(x + d) * factor * load16(weight + d));
}

// bf16(sum_i pre_i * x_i) of one row's four streams [4, width]
static inline void collapse_row(const bf16* x, const float* pre, int64_t width, bf16* out) {
  for (int64_t d = 0; d < width; d += 16) {
    v16 y = load_bf16(x + d) * splat(pre[0]);
    for (int i = 1; i < 4; i++) y = fma16(load_bf16(x + i * width + d), splat(pre[i]), y);
    store_bf16(out + d, y);
  }
}

static inline v16 sum_pairs(v16 x) {  // over each four neighbouring lanes
  x = x + __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return x + __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
}
static inline v16 sum_fours(v16 x) {  // over lanes that are four apart
  x = x + __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  return x + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
}

// lane 4 i + j is row i (source), column j (destination)
static inline v16 sinkhorn(v16 a, int64_t iterations, float eps) {
  v16 peak = max16(a, __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  peak = max16(peak, __builtin_shufflevector(peak, peak, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  a = exp16(a - peak);
  a = a / sum_pairs(a) + eps;
  a = a / (sum_fours(a) + eps);
  for (int64_t step = 1; step < iterations; step++) {
    a = a / (sum_pairs(a) + eps);
    a = a / (sum_fours(a) + eps);
  }
  return a;
}

}  // namespace
