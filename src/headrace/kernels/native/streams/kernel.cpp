#include "../pool.h"
#include "streams.h"

struct StreamsOpen {
  const bf16* x;      // [T, 4, D]
  const float* pre;   // [T, 4] of the half before
  const float* fn;    // [24, 4 D]; null: no coefficients
  const float* base;  // [24]
  const float* scale;  // [3]
  const float* norm;  // [D]
  bf16* u;            // [T, D]
  float* next_pre;    // [T, 4]
  float* post;        // [T, 4]
  float* comb;        // [T, 4, 4]
  int64_t rows, width, iterations;
  double norm_eps, eps;
};

namespace {

// sums of squares and products with 24 rows of fn, for up to TOKENS rows of streams
template <int TOKENS>
static void stream_products(const StreamsOpen& job, int64_t row, float (*c)[24], float* squares) {
  const int64_t span = 4 * job.width;
  const bf16* x = job.x + row * span;
  for (int group = 0; group < 3; group++) {
    v16 sums[TOKENS][8] = {};
    v16 square[TOKENS] = {};
    const float* fn = job.fn + group * 8 * span;
    for (int64_t d = 0; d < span; d += 16) {
      v16 v[TOKENS];
      for (int t = 0; t < TOKENS; t++) v[t] = load_bf16(x + t * span + d);
      if (group == 0)
        for (int t = 0; t < TOKENS; t++) square[t] = fma16(v[t], v[t], square[t]);
      for (int o = 0; o < 8; o++) {
        const v16 w = load16(fn + o * span + d);
        for (int t = 0; t < TOKENS; t++) sums[t][o] = fma16(v[t], w, sums[t][o]);
      }
    }
    for (int t = 0; t < TOKENS; t++) {
      for (int o = 0; o < 8; o++) c[t][8 * group + o] = sum16(sums[t][o]);
      if (group == 0) squares[t] = sum16(square[t]);
    }
  }
}

static void coefficients(const StreamsOpen& job, int64_t row, const float* c, float square) {
  const float factor = 1.0f / root(square / (float)(4 * job.width) + (float)job.norm_eps);
  v16 gates = v16{}, logits;
  for (int i = 0; i < 8; i++) gates[i] = c[i];
  const v16 scale = {job.scale[0], job.scale[0], job.scale[0], job.scale[0],
                     job.scale[1], job.scale[1], job.scale[1], job.scale[1]};
  v16 base = v16{};
  for (int i = 0; i < 8; i++) base[i] = job.base[i];
  gates = sigmoid16(fma16(gates * factor, scale, base));
  for (int i = 0; i < 4; i++) {
    job.next_pre[4 * row + i] = gates[i] + (float)job.eps;
    job.post[4 * row + i] = 2.0f * gates[4 + i];
  }
  logits = fma16(load16(c + 8) * factor, splat(job.scale[2]), load16(job.base + 8));
  store16(job.comb + 16 * row, sinkhorn(logits, job.iterations, (float)job.eps));
}

static void open_row(const StreamsOpen& job, int64_t row) {
  const int64_t width = job.width;
  bf16* u = job.u + row * width;
  collapse_row(job.x + row * 4 * width, job.pre + 4 * row, width, u);
  norm_row(u, job.norm, width, (float)job.norm_eps, u);
}

static void open_rows(const StreamsOpen* job, int64_t low, int64_t high) {
  for (int64_t row = low; row < high;) {
    const int tokens = high - row >= 2 ? 2 : 1;
    if (job->fn) {
      float c[2][24], squares[2];
      if (tokens == 2)
        stream_products<2>(*job, row, c, squares);
      else
        stream_products<1>(*job, row, c, squares);
      for (int t = 0; t < tokens; t++) coefficients(*job, row + t, c[t], squares[t]);
    }
    for (int t = 0; t < tokens; t++) open_row(*job, row + t);
    row += tokens;
  }
}

// x'[j] = bf16(post_j * o + sum_i comb_ij * x_i)
static void expand_row(const bf16* half, const bf16* x, const float* post, const float* comb, bf16* out, int64_t width) {
  for (int64_t d = 0; d < width; d += 16) {
    v16 from[4];
    for (int i = 0; i < 4; i++) from[i] = load_bf16(x + i * width + d);
    const v16 o = load_bf16(half + d);
    for (int j = 0; j < 4; j++) {
      v16 y = from[0] * comb[j];
      for (int i = 1; i < 4; i++) y = fma16(from[i], splat(comb[4 * i + j]), y);
      store_bf16(out + j * width + d, fma16(o, splat(post[j]), y));
    }
  }
}

}  // namespace

HR_EXPORT(hr_streams_open)(const StreamsOpen* job) {
  const int64_t pieces = worth(job->rows * job->width * 96, job->rows);
  parallel(pieces, [&](int64_t piece) {
    open_rows(job, job->rows * piece / pieces, job->rows * (piece + 1) / pieces);
  });
  return 0;
}

struct StreamsFollow {
  StreamsOpen open;  // its streams are written first
  const bf16* half;  // [T, D] output of the half before
  const bf16* x;     // [T, 4, D] streams before it; may be those of `open`
  const float* post;  // [T, 4]
  const float* comb;  // [T, 4, 4]
};

HR_EXPORT(hr_streams_follow)(const StreamsFollow* job) {
  const StreamsOpen& open = job->open;
  const int64_t pieces = worth(open.rows * open.width * 112, open.rows), width = open.width;
  bf16* out = (bf16*)open.x;
  parallel(pieces, [&](int64_t piece) {
    const int64_t end = open.rows * (piece + 1) / pieces;
    for (int64_t row = open.rows * piece / pieces; row < end; row += 2) {
      const int64_t high = row + 2 < end ? row + 2 : end;
      for (int64_t r = row; r < high; r++)
        expand_row(job->half + r * width, job->x + r * 4 * width, job->post + 4 * r, job->comb + 16 * r,
                   out + r * 4 * width, width);
      open_rows(&open, row, high);
    }
  });
  return 0;
}

// x and out may be the same
HR_EXPORT(hr_streams_expand)
(const bf16* half, const bf16* x, const float* post, const float* comb, bf16* out, int64_t rows, int64_t width) {
  const int64_t pieces = worth(rows * width * 16, rows);
  parallel(pieces, [&](int64_t piece) {
    for (int64_t row = rows * piece / pieces; row < rows * (piece + 1) / pieces; row++)
      expand_row(half + row * width, x + row * 4 * width, post + 4 * row, comb + 16 * row, out + row * 4 * width, width);
  });
  return 0;
}
