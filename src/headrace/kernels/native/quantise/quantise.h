// Activation quantisation to E4M3 codes with an E8M0 scale per 32 values; see quantise/__init__.py.
#pragma once
#include "../lanes.h"

namespace {

#if defined(HR_AVX512)
typedef bf16 code_t;  // what products take: the code's value, exact in bfloat16
#else
typedef float code_t;
#endif

struct Group {
  v16 low, high;  // code values of 32 columns
  int exponent;   // scale byte
};

// half to even on the E4M3 grid: step 2^-9 below 2^-6, otherwise three mantissa bits
static inline v16 to_e4m3_grid(v16 x) {
  v16 binade = (v16)((i16)x & 0x7F800000);
  binade = max16(binade, splat(0.015625f));
  const v16 magic = binade * (1.5f * 1048576.0f);
  const v16 rounded = (x + magic) - magic;
  return (v16)(((i16)rounded & 0x7FFFFFFF) | ((i16)x & (int32_t)0x80000000));  // a code keeps its sign at zero
}

static inline Group quantise_group(v16 low, v16 high) {
  const i16 a = (i16)low & 0x7FFFFFFF, b = (i16)high & 0x7FFFFFFF;
  uint32_t bits = largest_bits16(a > b ? a : b);
  float amax = read<float>(&bits);
  if (amax < 1e-4f) amax = 1e-4f;
  amax *= 1.0f / 448.0f;
  bits = bits >= 0x7F800000u ? 0x7F800000u : read<uint32_t>(&amax);
  Group group;
  group.exponent = (int)((bits + 0x7FFFFF) >> 23);
  if (group.exponent > 254) {
    group.exponent = 255;  // the scale that is no number
    group.low = group.high = splat(__builtin_nanf(""));
    return group;
  }
  const uint32_t inverse_bits = group.exponent == 254 ? 0x00400000u : (uint32_t)(254 - group.exponent) << 23;
  const v16 inverse = splat(read<float>(&inverse_bits));
  group.low = to_e4m3_grid(low * inverse);
  group.high = to_e4m3_grid(high * inverse);
  return group;
}

static inline float scale_of(int exponent) { return exponent == 255 ? __builtin_nanf("") : e8m0((uint8_t)exponent); }

static inline void store_codes(code_t* to, v16 values) {
#if defined(HR_AVX512)
  store_bf16(to, values);
#else
  store16(to, values);
#endif
}

// One row as products take it: code values and one float32 scale per 32 of them.
static inline void quantise_row(const bf16* x, int64_t width, code_t* codes, float* scales) {
  for (int64_t at = 0; at < width; at += 32) {
    const Group group = quantise_group(load_bf16(x + at), load_bf16(x + at + 16));
    store_codes(codes + at, group.low);
    store_codes(codes + at + 16, group.high);
    scales[at / 32] = scale_of(group.exponent);
  }
}

// E4M3 bytes of values on the grid
static inline u16 e4m3_bytes(v16 x) {
  const u16 bits = (u16)x;
  const u16 sign = (bits >> 24) & 0x80;
  const u16 normal = ((bits & 0x7FFFFFFF) >> 20) - (120u << 3);
  const v16 magnitude = (v16)(bits & 0x7FFFFFFF);
  const u16 small = (u16)__builtin_convertvector(magnitude * 512.0f, i16);
  const u16 code = magnitude < splat(0.015625f) ? small : normal;
  return sign | (magnitude != magnitude ? (u16{} + 0x7F) : code);
}

static inline void store_e4m3(uint8_t* to, v16 values) { write(to, bytes(e4m3_bytes(values))); }

// values of 16 E4M3 bytes; no step goes through a float32 subnormal
static inline v16 from_e4m3(u16 codes) {
  const u16 normal = ((codes & 0x7F) << 20) + (120u << 23);
  const u16 small = (u16)(__builtin_convertvector((i16)(codes & 7), v16) * 0.001953125f);
  return (v16)(((codes & 0x80) << 24) | ((codes & 0x78) == 0 ? small : normal));
}
static inline v16 load_e4m3(const uint8_t* from) { return from_e4m3(widen(read<b16>(from))); }

}  // namespace
