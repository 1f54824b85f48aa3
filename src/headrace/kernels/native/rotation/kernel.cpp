#include "../lanes.h"
#include "../pool.h"

// x [T, heads, width] -> out, the last 2 * pairs values of every head rotated; cos and sin [T, pairs]
HR_EXPORT(hr_train_rotate)
(const float* x, const float* cos, const float* sin, float* out, int64_t rows, int64_t heads, int64_t width,
 int64_t pairs, int64_t is_inverse) {
  const float sign = is_inverse ? -1.0f : 1.0f;
  const int64_t pieces = worth(rows * heads * width * 2, rows);
  parallel(pieces, [&](int64_t piece) {
    for (int64_t row = rows * piece / pieces; row < rows * (piece + 1) / pieces; row++) {
      const float *c = cos + row * pairs, *s = sin + row * pairs;
      for (int64_t head = row * heads; head < (row + 1) * heads; head++) {
        const float* from = x + head * width;
        float* to = out + head * width;
        const int64_t plain = width - 2 * pairs;
        memcpy(to, from, plain * sizeof(float));
        for (int64_t p = 0; p < pairs; p++) {
          const float even = from[plain + 2 * p], odd = from[plain + 2 * p + 1], turn = sign * s[p];
          to[plain + 2 * p] = even * c[p] - odd * turn;
          to[plain + 2 * p + 1] = even * turn + odd * c[p];
        }
      }
    }
  });
  return 0;
}
