#include "../lanes.h"

// x [T, 4, D] += gate * value; kv [T, 5 D] holds four keys, then the value; weights [4, D] float32
HR_EXPORT(hr_ngram_gate)
(bf16* x, const bf16* kv, const float* q_weight, const float* k_weight, const uint8_t* is_dead, int64_t rows,
 int64_t width, const double* eps) {
  for (int64_t t = 0; t < rows; t++) {
    if (is_dead[t]) continue;
    const bf16* value = kv + (5 * t + 4) * width;
    for (int64_t i = 0; i < 4; i++) {
      bf16* stream = x + (4 * t + i) * width;
      const bf16* key = kv + (5 * t + i) * width;
      const float *qw = q_weight + i * width, *kw = k_weight + i * width;
      v16 squares = v16{}, key_squares = v16{}, dots = v16{};
      for (int64_t d = 0; d < width; d += 16) {
        const v16 a = load_bf16(stream + d), b = load_bf16(key + d);
        squares = fma16(a, a, squares);
        key_squares = fma16(b, b, key_squares);
        dots = fma16(a * load16(qw + d) * load16(kw + d), b, dots);
      }
      const float n = (float)width, e = (float)*eps;
      const float of_x = 1.0f / root(sum16(squares) / n + e), of_key = 1.0f / root(sum16(key_squares) / n + e);
      const float dot = sum16(dots) * of_x * of_key * (1.0f / root(n));
      const float size = __builtin_fabsf(dot) < 1e-6f ? 1e-6f : __builtin_fabsf(dot);
      const v16 gate = splat(sigmoid16(splat(__builtin_copysignf(root(size), dot)))[0]);
      for (int64_t d = 0; d < width; d += 16)
        store_bf16(stream + d, fma16(gate, load_bf16(value + d), load_bf16(stream + d)));
    }
  }
  return 0;
}
