#include "../quantise/quantise.h"
#include "../streams/streams.h"
#include "rotate.h"

struct WindowRows {
  const bf16* y;        // [T, R + H]: query latent, then window entry
  const float* q_norm;  // [R]
  const float* kv_norm;  // [H]
  const float* cos;     // [T, P / 2]
  const float* sin;
  bf16* latent;     // [T, R]
  bf16* values;     // [T, H]
  uint8_t* codes;   // [T, H]
  uint8_t* scales;  // [T, H / 32]
  int64_t rows, latent_width, width, rotated;
  double eps;
};

HR_EXPORT(hr_window_rows)(const WindowRows* job) {
  const int64_t r = job->latent_width, h = job->width, half = job->rotated / 2;
  for (int64_t t = 0; t < job->rows; t++) {
    const bf16* y = job->y + t * (r + h);
    bf16* values = job->values + t * h;
    if (r) norm_row(y, job->q_norm, r, (float)job->eps, job->latent + t * r);
    norm_row(y + r, job->kv_norm, h, (float)job->eps, values);
    rotate_row(values + h - job->rotated, job->cos + t * half, job->sin + t * half, half, 1.0f);
    for (int64_t at = 0; at < h; at += 32) {
      const Group group = quantise_group(load_bf16(values + at), load_bf16(values + at + 16));
      const float scale = scale_of(group.exponent);
      store_e4m3(job->codes + t * h + at, group.low);
      store_e4m3(job->codes + t * h + at + 16, group.high);
      job->scales[t * (h / 32) + at / 32] = (uint8_t)group.exponent;
      store_bf16(values + at, group.low * scale);
      store_bf16(values + at + 16, group.high * scale);
    }
  }
  return 0;
}
