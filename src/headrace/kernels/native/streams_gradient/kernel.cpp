// Hyper-connections of four float32 streams in training: forward in PyTorch's order, gradients in one pass over a row.
#include "../lanes.h"
#include "../pool.h"

namespace {

const int64_t MIX = 24;  // columns of the coefficients' product

// call(low, high) over rows, on as many threads as the work is worth; no sum crosses rows
template <class Call>
static inline void over_rows(int64_t rows, int64_t cost, const Call& call) {
  const int64_t pieces = worth(rows * cost, rows);
  parallel(pieces, [&](int64_t piece) { call(rows * piece / pieces, rows * (piece + 1) / pieces); });
}

// divide by row sums (steps 1, 3, ...) and column sums (steps 0, 2, ...) in turn; terms one after the other
static inline void sinkhorn_steps(float* a, float* divisors, int64_t rows, int64_t t, int64_t steps, float eps) {
  v16 m[16];
  for (int i = 0; i < 16; i++) m[i] = load16(a + i * rows + t);
  for (int64_t step = 0; step < steps; step++) {
    const int outer = step % 2 ? 4 : 1, inner = step % 2 ? 1 : 4;  // sums over `inner`
    for (int line = 0; line < 4; line++) {
      v16* of = m + line * outer;
      const v16 total = ((of[0] + of[inner]) + of[2 * inner]) + of[3 * inner] + eps;
      store16(divisors + (step * 4 + line) * rows + t, total);
      for (int k = 0; k < 4; k++) of[k * inner] = of[k * inner] / total;
    }
  }
  for (int i = 0; i < 16; i++) store16(a + i * rows + t, m[i]);
}

static inline void sinkhorn_back(float* g, float* a, const float* divisors, int64_t rows, int64_t t, int64_t steps) {
  v16 m[16], d[16];
  for (int i = 0; i < 16; i++) m[i] = load16(a + i * rows + t);
  for (int i = 0; i < 16; i++) d[i] = load16(g + i * rows + t);
  for (int64_t step = steps - 1; step >= 0; step--) {
    const int outer = step % 2 ? 4 : 1, inner = step % 2 ? 1 : 4;
    for (int line = 0; line < 4; line++) {
      v16 *x = m + line * outer, *y = d + line * outer;
      const v16 divisor = load16(divisors + (step * 4 + line) * rows + t), inverse = 1.0f / divisor;
      v16 shared = x[0] * y[0];
      for (int k = 1; k < 4; k++) shared = fma16(x[k * inner], y[k * inner], shared);
      for (int k = 0; k < 4; k++) {
        y[k * inner] = (y[k * inner] - shared) * inverse;
        x[k * inner] = x[k * inner] * divisor;
      }
    }
  }
  for (int i = 0; i < 16; i++) store16(a + i * rows + t, m[i]);
  for (int i = 0; i < 16; i++) store16(g + i * rows + t, d[i]);
}

static void expand_back(const float* g, const float* half, const float* x, const float* post, const float* comb,
                        float* of_half, float* of_x, float* of_post, float* of_comb, int64_t width) {
  v16 sums[20] = {};
  for (int64_t d = 0; d < width; d += 16) {
    v16 from[4];
    for (int j = 0; j < 4; j++) from[j] = load16(g + j * width + d);
    for (int i = 0; i < 4; i++) {
      const v16 v = load16(x + i * width + d);
      for (int j = 0; j < 4; j++) sums[4 * i + j] = fma16(v, from[j], sums[4 * i + j]);
    }
    const v16 o = load16(half + d);
    for (int j = 0; j < 4; j++) sums[16 + j] = fma16(o, from[j], sums[16 + j]);
  }
  for (int i = 0; i < 16; i++) of_comb[i] = sum16(sums[i]);
  for (int j = 0; j < 4; j++) of_post[j] = sum16(sums[16 + j]);
  for (int64_t d = 0; d < width; d += 16) {
    v16 from[4];
    for (int j = 0; j < 4; j++) from[j] = load16(g + j * width + d);
    v16 y = from[0] * splat(post[0]);
    for (int j = 1; j < 4; j++) y = fma16(from[j], splat(post[j]), y);
    store16(of_half + d, y);
    for (int i = 0; i < 4; i++) {
      v16 z = from[0] * splat(comb[4 * i]);
      for (int j = 1; j < 4; j++) z = fma16(from[j], splat(comb[4 * i + j]), z);
      store16(of_x + i * width + d, z);
    }
  }
}

// ROWS rows of: of_x = from + pre of_u + share x + product fn; of_pre = x . of_u
template <int ROWS>
static void open_back(const float* from, float* of_x, const float* x, const float* pre, const float* of_u, const float* share,
                      const float* product, const float* fn, float* of_pre, int64_t width) {
  const int64_t span = 4 * width;
  for (int i = 0; i < 4; i++) {
    v16 dots[ROWS] = {};
    for (int64_t d = 0; d < width; d += 16) {
      const int64_t at = i * width + d;
      v16 y[ROWS];
      for (int r = 0; r < ROWS; r++) {
        const v16 v = load16(x + r * span + at), u = load16(of_u + r * width + d);
        y[r] = fma16(v, splat(share[r]), fma16(u, splat(pre[4 * r + i]), load16(from + r * span + at)));
        dots[r] = fma16(v, u, dots[r]);
      }
      for (int64_t c = 0; c < MIX; c++) {
        const v16 w = load16(fn + c * span + at);
        for (int r = 0; r < ROWS; r++) y[r] = fma16(w, splat(product[r * MIX + c]), y[r]);
      }
      for (int r = 0; r < ROWS; r++) store16(of_x + r * span + at, y[r]);
    }
    for (int r = 0; r < ROWS; r++) of_pre[4 * r + i] = sum16(dots[r]);
  }
}

}  // namespace

// a [4, 4, T] in place, divisors [steps, 4, T]; T a multiple of 16
HR_EXPORT(hr_train_sinkhorn)(float* a, float* divisors, int64_t rows, int64_t steps, const double* eps) {
  over_rows(rows / 16, steps * 512, [&](int64_t low, int64_t high) {
    for (int64_t tile = low; tile < high; tile++) sinkhorn_steps(a, divisors, rows, 16 * tile, steps, (float)*eps);
  });
  return 0;
}

// both in place: back to the matrices that `hr_train_sinkhorn` was given
HR_EXPORT(hr_train_sinkhorn_back)(float* g, float* a, const float* divisors, int64_t rows, int64_t steps) {
  over_rows(rows / 16, steps * 1024, [&](int64_t low, int64_t high) {
    for (int64_t tile = low; tile < high; tile++) sinkhorn_back(g, a, divisors, rows, 16 * tile, steps);
  });
  return 0;
}

// products and sums round apart, one source stream after the other, the half's output first: PyTorch's bits
HR_EXPORT(hr_train_expand)
(const float* half, const float* x, const float* post, const float* comb, float* out, int64_t rows, int64_t width) {
  over_rows(rows, width * 20, [&](int64_t low, int64_t high) {
    for (int64_t row = low; row < high; row++) {
      const float *from = x + row * 4 * width, *c = comb + 16 * row;
      for (int64_t d = 0; d < width; d += 16) {
        v16 v[4];
        for (int i = 0; i < 4; i++) v[i] = load16(from + i * width + d);
        const v16 o = load16(half + row * width + d);
        for (int j = 0; j < 4; j++) {
          v16 y = v[0] * splat(c[j]);
          for (int i = 1; i < 4; i++) y = y + v[i] * splat(c[4 * i + j]);
          store16(out + row * 4 * width + j * width + d, o * splat(post[4 * row + j]) + y);
        }
      }
    }
  });
  return 0;
}

HR_EXPORT(hr_train_expand_back)
(const float* g, const float* half, const float* x, const float* post, const float* comb, float* of_half, float* of_x,
 float* of_post, float* of_comb, int64_t rows, int64_t width) {
  over_rows(rows, width * 40, [&](int64_t low, int64_t high) {
    for (int64_t row = low; row < high; row++)
      expand_back(g + row * 4 * width, half + row * width, x + row * 4 * width, post + 4 * row, comb + 16 * row,
                  of_half + row * width, of_x + row * 4 * width, of_post + 4 * row, of_comb + 16 * row, width);
  });
  return 0;
}

// products and sums round apart, one stream after the other: PyTorch's bits
HR_EXPORT(hr_train_collapse)(const float* x, const float* pre, float* out, int64_t rows, int64_t width) {
  over_rows(rows, width * 4, [&](int64_t low, int64_t high) {
    for (int64_t row = low; row < high; row++)
      for (int64_t d = 0; d < width; d += 16) {
        const float* from = x + row * 4 * width + d;
        v16 y = load16(from) * splat(pre[4 * row]);
        for (int i = 1; i < 4; i++) y = y + load16(from + i * width) * splat(pre[4 * row + i]);
        store16(out + row * width + d, y);
      }
  });
  return 0;
}

// product [T, 24], fn [24, 4 D]; from and of_x may be the same
HR_EXPORT(hr_train_open_back)
(const float* from, float* of_x, const float* x, const float* pre, const float* of_u, const float* share,
 const float* product, const float* fn, float* of_pre, int64_t rows, int64_t width) {
  const int64_t tile = 8, tiles = (rows + tile - 1) / tile;
  over_rows(tiles, tile * width * 120, [&](int64_t low, int64_t high) {
    for (int64_t row = low * tile; row < high * tile && row < rows;) {
      const int64_t s = row * 4 * width, left = rows - row;
      float* to = of_x + s;
      const float *u = of_u + row * width, *p = pre + 4 * row, *c = product + row * MIX;
      if (left >= tile) {
        open_back<tile>(from + s, to, x + s, p, u, share + row, c, fn, of_pre + 4 * row, width);
        row += tile;
      } else {
        open_back<1>(from + s, to, x + s, p, u, share + row, c, fn, of_pre + 4 * row, width);
        row += 1;
      }
    }
  });
  return 0;
}
