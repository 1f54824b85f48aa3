// E2M1 codes with E8M0 scales per 32 values (Q4I) or E4M3 scales per 16 (Q4K); see index/__init__.py and compress/__init__.py.
#pragma once
#include "quantise.h"

namespace {

static inline float largest_magnitude(v16 x) {
  const uint32_t bits = largest_bits16((i16)x & 0x7FFFFFFF);
  return read<float>(&bits);
}

// half to even on the E2M1 grid, at most 6; NaN stays NaN
static inline v16 to_e2m1_grid(v16 x) {
  x = x > splat(6.0f) ? splat(6.0f) : x;
  x = x < splat(-6.0f) ? splat(-6.0f) : x;
  v16 binade = (v16)((i16)x & 0x7F800000);
  binade = max16(binade, splat(1.0f));
  const v16 magic = binade * (1.5f * 4194304.0f);
  const v16 rounded = (x + magic) - magic;
  return (v16)(((i16)rounded & 0x7FFFFFFF) | ((i16)x & (int32_t)0x80000000));
}

// scale byte of 32 values
static inline int q4i_exponent(v16 low, v16 high) {
  const float a = largest_magnitude(low), b = largest_magnitude(high);
  float amax = a > b || a != a ? a : b;
  if (!(amax < HUGE_VALF)) return 255;
  if (amax < 7.052966104933725e-38f) amax = 7.052966104933725e-38f;  // 6 * 2 ** -126
  amax *= 1.0f / 6.0f;
  return (int)((read<uint32_t>(&amax) + 0x7FFFFF) >> 23);
}

// E4M3 byte of max(amax, 6 * 2 ** -9) / 6, half to even, at most 448
static inline uint8_t q4k_scale(v16 x) {
  float amax = largest_magnitude(x);
  if (amax != amax) return 0x7F;
  if (amax < 0.01171875f) amax = 0.01171875f;
  amax = amax / 6.0f;
  if (amax > 448.0f) amax = 448.0f;
  return (uint8_t)e4m3_bytes(to_e4m3_grid(splat(amax)))[0];
}

// codes of 16 values on the grid, two to a byte, the even one low
static inline void store_e2m1(uint8_t* to, v16 x) {
  const i16 doubled = __builtin_convertvector((v16)((i16)x & 0x7FFFFFFF) * 2.0f, i16);  // 0 1 2 3 4 6 8 12
  const i16 code = doubled < 5 ? doubled : doubled == 6 ? 5 + i16{} : doubled == 8 ? 6 + i16{} : 7 + i16{};
  const i16 all = code | (i16)(((u16)x >> 28) & 8);
  for (int i = 0; i < 8; i++) to[i] = (uint8_t)(all[2 * i] | all[2 * i + 1] << 4);
}

}  // namespace
