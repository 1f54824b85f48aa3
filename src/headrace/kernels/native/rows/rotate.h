// Rotation of adjacent pairs; see rows/__init__.py.
#pragma once
#include "../lanes.h"

namespace {

// x[0 .. 2 half - 1] in place; `direction` is 1, or -1 for the inverse
static inline void rotate_row(bf16* x, const float* cos, const float* sin, int64_t half, float direction) {
  for (int64_t i = 0; i < half; i++) {
    const float even = wide(x[2 * i]), odd = wide(x[2 * i + 1]), c = cos[i], s = sin[i] * direction;
    x[2 * i] = narrow(even * c - odd * s);
    x[2 * i + 1] = narrow(even * s + odd * c);
  }
}

}  // namespace
