#include "../lanes.h"
#include "../pool.h"

struct WeightBack {
  const float* gradient;  // [T, N], rows `gradient_step` apart
  const float* x;         // [T, K], rows `x_step` apart
  float* out;             // [N, K]; sums are added to it
  int64_t num_rows, columns, width, gradient_step, x_step;
};

namespace {

#if defined(HR_AVX512)
const int TALL = 12, WIDE = 2;  // a tile: 12 rows of out, 2 * 16 columns, all in registers
#else
const int TALL = 4, WIDE = 1;
#endif
const int64_t SPAN = 16 * WIDE;
const int64_t DEPTH = 256;    // rows summed before the sum is added to a tile
const int64_t BREADTH = 256;  // columns of `x` packed at once

// `from` [depth, step] -> [depth, PANEL], columns that are not there are zero
template <int PANEL>
static inline void pack(const float* from, int64_t step, int64_t depth, int64_t columns, float* to) {
  if (columns >= PANEL) {
    for (int64_t t = 0; t < depth; t++) memcpy(to + t * PANEL, from + t * step, PANEL * sizeof(float));
    return;
  }
  memset(to, 0, depth * PANEL * sizeof(float));
  for (int64_t t = 0; t < depth; t++) memcpy(to + t * PANEL, from + t * step, columns * sizeof(float));
}

static inline void tile_back(const float* g, const float* x, int64_t depth, float* out, int64_t step) {
  v16 sums[TALL][WIDE] = {};
  for (int64_t t = 0; t < depth; t++) {
    v16 v[WIDE];
    for (int j = 0; j < WIDE; j++) v[j] = load16(x + t * SPAN + 16 * j);
    for (int i = 0; i < TALL; i++) {
      const v16 w = splat(g[t * TALL + i]);
      for (int j = 0; j < WIDE; j++) sums[i][j] = fma16(w, v[j], sums[i][j]);
    }
  }
  for (int i = 0; i < TALL; i++)
    for (int j = 0; j < WIDE; j++) {
      float* to = out + i * step + 16 * j;
      store16(to, load16(to) + sums[i][j]);
    }
}

static void edge_back(const float* g, const float* x, int64_t depth, float* out, int64_t step, int64_t tall, int64_t wide) {
  float part[TALL * SPAN] = {};
  for (int64_t i = 0; i < tall; i++) memcpy(part + i * SPAN, out + i * step, wide * sizeof(float));
  tile_back(g, x, depth, part, SPAN);
  for (int64_t i = 0; i < tall; i++) memcpy(out + i * step, part + i * SPAN, wide * sizeof(float));
}

static void panels_back(const WeightBack& job, int64_t low, int64_t high) {  // panels of TALL rows of `out`
  static thread_local Scratch scratch;
  Carver carver{scratch.get(Carver::room(DEPTH * TALL * 4) + Carver::room(DEPTH * (BREADTH + SPAN) * 4))};
  float *g = carver.take<float>(DEPTH * TALL), *x = carver.take<float>(DEPTH * (BREADTH + SPAN));
  for (int64_t first = 0; first < job.num_rows; first += DEPTH) {
    const int64_t depth = job.num_rows - first < DEPTH ? job.num_rows - first : DEPTH;
    for (int64_t column = 0; column < job.width; column += BREADTH) {
      const int64_t stop = column + BREADTH < job.width ? column + BREADTH : job.width;
      for (int64_t k = column; k < stop; k += SPAN)
        pack<SPAN>(job.x + first * job.x_step + k, job.x_step, depth, stop - k, x + (k - column) * DEPTH);
      for (int64_t panel = low; panel < high; panel++) {
        const int64_t row = panel * TALL, tall = job.columns - row < TALL ? job.columns - row : TALL;
        pack<TALL>(job.gradient + first * job.gradient_step + row, job.gradient_step, depth, tall, g);
        for (int64_t k = column; k < stop; k += SPAN) {
          float* out = job.out + row * job.width + k;
          const float* packed = x + (k - column) * DEPTH;
          if (tall == TALL && stop - k >= SPAN)
            tile_back(g, packed, depth, out, job.width);
          else
            edge_back(g, packed, depth, out, job.width, tall, stop - k < SPAN ? stop - k : SPAN);
        }
      }
    }
  }
}

}  // namespace

HR_EXPORT(hr_train_weight_back)(const WeightBack* job) {
  const int64_t panels = (job->columns + TALL - 1) / TALL;
  const int64_t pieces = worth(job->num_rows * job->columns * job->width, panels);
  parallel(pieces, [&](int64_t piece) {
    panels_back(*job, panels * piece / pieces, panels * (piece + 1) / pieces);
  });
  return 0;
}
