// Choice of experts from router products; see router/__init__.py.
#pragma once
#include "../lanes.h"

namespace {

// sqrt(softplus(z)), in place
static void score_row(float* z, int64_t count) {
  for (int64_t e = 0; e < count; e += 16) {
    v16 x = v16{};
    const int64_t lanes = count - e < 16 ? count - e : 16;
    memcpy(&x, z + e, lanes * 4);
    v16 y = softplus16(x);
    for (int lane = 0; lane < lanes; lane++) z[e + lane] = root(y[lane]);
  }
}

// Picks the highest biased scores, the lower expert of equal ones; NaN is higher than any number. Ascending experts.
static void pick_row(const float* scores, const float* bias, int64_t count, int64_t per_token, int64_t* picked) {
  for (int64_t k = 0; k < per_token; k++) {
    int64_t best = -1;
    float most = 0;
    for (int64_t e = 0; e < count; e++) {
      const float value = scores[e] + bias[e];
      if (best >= 0 && !(value > most || (value != value && most == most))) continue;
      bool is_taken = false;
      for (int64_t i = 0; i < k; i++) is_taken |= picked[i] == e;
      if (!is_taken) best = e, most = value;
    }
    picked[k] = best;
  }
  for (int64_t i = 1; i < per_token; i++)
    for (int64_t j = i; j > 0 && picked[j - 1] > picked[j]; j--) {
      const int64_t other = picked[j];
      picked[j] = picked[j - 1];
      picked[j - 1] = other;
    }
}

static void weigh_row(const float* scores, const int64_t* picked, int64_t per_token, float scale, float* weights) {
  float total = scores[picked[0]];
  for (int64_t k = 1; k < per_token; k++) total += scores[picked[k]];
  for (int64_t k = 0; k < per_token; k++) weights[k] = scores[picked[k]] / (total + 1e-20f) * scale;
}

// products `z` of one row to scores, in place; the experts picked, ascending, and their weights
static void route_row(float* z, const float* bias, int64_t count, int64_t per_token, float scale, int64_t* picked,
                      float* weights) {
  score_row(z, count);
  pick_row(z, bias, count, per_token, picked);
  weigh_row(z, picked, per_token, scale, weights);
}

}  // namespace
