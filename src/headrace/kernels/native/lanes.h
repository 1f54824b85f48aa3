// Sixteen float32 lanes and the few functions all kernels share; compiled once per instruction set.
//
// Order and rounding are the same everywhere: a multiply-add (`fma16`) rounds once, sums over lanes are a fixed tree, and
// exp and log are polynomials of their own. So the instruction set changes the speed of a kernel and never its bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define HR_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__)
#define HR_AVX2 1
#include <immintrin.h>
#elif defined(__SSE__)
#include <xmmintrin.h>
#endif

#if defined(HR_AVX512)
#define HR_NAME(name) name##_avx512
#elif defined(HR_AVX2)
#define HR_NAME(name) name##_avx2
#else
#define HR_NAME(name) name##_portable
#endif
#define HR_EXPORT(name) extern "C" __attribute__((visibility("default"))) int64_t HR_NAME(name)

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#define __builtin_shufflevector(a, b, ...) __builtin_shuffle(a, b, i16{__VA_ARGS__})  // of sixteen 32-bit lanes
#endif

namespace {

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef uint16_t bf16;

template <class T>
static inline T read(const void* from) {
  T value;
  memcpy(&value, from, sizeof(T));
  return value;
}
template <class T>
static inline void write(void* to, T value) {
  memcpy(to, &value, sizeof(T));
}
static inline v16 splat(float x) { return x - v16{}; }  // minus: adding to zero would lose the sign of -0
static inline v16 load16(const float* from) { return read<v16>(from); }
static inline void store16(float* to, v16 x) { write(to, x); }

// acc + a * b, rounded once
static inline v16 fma16(v16 a, v16 b, v16 acc) {
#if defined(HR_AVX512)
  return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)acc);
#elif defined(HR_AVX2)
  v16 out;
  for (int half = 0; half < 2; half++) {
    const __m256 x = read<__m256>((const char*)&a + 32 * half), y = read<__m256>((const char*)&b + 32 * half);
    write((char*)&out + 32 * half, _mm256_fmadd_ps(x, y, read<__m256>((const char*)&acc + 32 * half)));
  }
  return out;
#else
  v16 out;
  for (int lane = 0; lane < 16; lane++) out[lane] = __builtin_fmaf(a[lane], b[lane], acc[lane]);
  return out;
#endif
}

// lane i with i + 8, then + 4, + 2, + 1
static inline float sum16(v16 x) {
  x = x + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x = x + __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x = x + __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return x[0] + x[1];
}

static inline v16 max16(v16 a, v16 b) { return a > b ? a : b; }
static inline float largest16(v16 x) {
  x = max16(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = max16(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  x = max16(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return x[0] > x[1] ? x[0] : x[1];
}
// the largest bit pattern of 16 non-negative numbers; NaN is larger than any number
static inline uint32_t largest_bits16(i16 x) {
  i16 y = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x = x > y ? x : y;
  y = __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x = x > y ? x : y;
  y = __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  x = x > y ? x : y;
  return (uint32_t)(x[0] > x[1] ? x[0] : x[1]);
}

// The compiler's own conversions between widths go lane by lane.
typedef uint8_t b16 __attribute__((vector_size(16)));
#if defined(HR_AVX512)
static inline u16 widen(h16 x) { return (u16)_mm512_cvtepu16_epi32((__m256i)x); }
static inline u16 widen(b16 x) { return (u16)_mm512_cvtepu8_epi32((__m128i)x); }
static inline h16 halves(u16 x) { return (h16)_mm512_cvtepi32_epi16((__m512i)x); }
static inline b16 bytes(u16 x) { return (b16)_mm512_cvtepi32_epi8((__m512i)x); }
#else
#if defined(HR_AVX2)
static inline u16 widen(h16 x) {
  u16 out;
  for (int half = 0; half < 2; half++)
    write((char*)&out + 32 * half, _mm256_cvtepu16_epi32(read<__m128i>((const char*)&x + 16 * half)));
  return out;
}
static inline u16 widen(b16 x) {
  u16 out;
  for (int half = 0; half < 2; half++)
    write((char*)&out + 32 * half, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)((const char*)&x + 8 * half))));
  return out;
}
#else
static inline u16 widen(h16 x) { return __builtin_convertvector(x, u16); }
static inline u16 widen(b16 x) { return __builtin_convertvector(x, u16); }
#endif
static inline h16 halves(u16 x) { return __builtin_convertvector(x, h16); }
static inline b16 bytes(u16 x) { return __builtin_convertvector(x, b16); }
#endif

static inline v16 from_bf16(h16 x) { return (v16)(widen(x) << 16); }
static inline v16 load_bf16(const bf16* from) { return from_bf16(read<h16>(from)); }
static inline float wide(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  return read<float>(&bits);
}

// round half to even; NaN stays NaN
static inline h16 to_bf16(v16 x) {
  const u16 bits = (u16)x;
  const u16 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const u16 picked = (i16)(x != x) ? (u16{} + 0x7FC0) : rounded;
  return halves(picked);
}
static inline v16 round_bf16(v16 x) { return from_bf16(to_bf16(x)); }
static inline void store_bf16(bf16* to, v16 x) { write(to, to_bf16(x)); }
static inline bf16 narrow(float x) { return to_bf16(splat(x))[0]; }

// exp: Cody-Waite reduction by ln 2 in two parts, polynomial of degree 6; 0 below -87.3, infinity above 88.7
static inline v16 exp16(v16 x) {
  const v16 magic = splat(12582912.0f);
  const v16 clipped = x > splat(89.0f) ? splat(89.0f) : (x < splat(-104.0f) ? splat(-104.0f) : x);
  const v16 n = fma16(clipped, splat(1.44269504088896341f), magic) - magic;
  v16 r = fma16(n, splat(-0.693359375f), clipped);
  r = fma16(n, splat(2.12194440e-4f), r);
  v16 p = splat(1.9875691500e-4f);
  p = fma16(p, r, splat(1.3981999507e-3f));
  p = fma16(p, r, splat(8.3334519073e-3f));
  p = fma16(p, r, splat(4.1665795894e-2f));
  p = fma16(p, r, splat(1.6666665459e-1f));
  p = fma16(p, r, splat(5.0000001201e-1f));
  p = fma16(p, r * r, r) + 1.0f;
  const i16 whole = __builtin_convertvector(n, i16);
  const v16 y = p * (v16)(((whole >> 1) + 127) << 23) * (v16)((whole - (whole >> 1) + 127) << 23);
  const v16 above = x > splat(88.72283f) ? splat(HUGE_VALF) : y;
  const v16 below = x < splat(-87.33654f) ? splat(0.0f) : above;
  return x != x ? x : below;
}
static inline v16 sigmoid16(v16 x) { return 1.0f / (1.0f + exp16(-x)); }

// natural logarithm of a normal positive number
static inline v16 log16(v16 x) {
  i16 bits = (i16)x;
  i16 exponent = (bits >> 23) - 126;
  v16 m = (v16)((bits & 0x007FFFFF) | 0x3F000000);
  const i16 small = m < splat(0.70710678f);
  exponent = exponent + small;
  m = (small ? m + m : m) - 1.0f;
  const v16 z = m * m;
  v16 p = splat(7.0376836292e-2f);
  p = fma16(p, m, splat(-1.1514610310e-1f));
  p = fma16(p, m, splat(1.1676998740e-1f));
  p = fma16(p, m, splat(-1.2420140846e-1f));
  p = fma16(p, m, splat(1.4249322787e-1f));
  p = fma16(p, m, splat(-1.6668057665e-1f));
  p = fma16(p, m, splat(2.0000714765e-1f));
  p = fma16(p, m, splat(-2.4999993993e-1f));
  p = fma16(p, m, splat(3.3333331174e-1f));
  const v16 e = __builtin_convertvector(exponent, v16);
  v16 y = fma16(e, splat(-2.12194440e-4f), m * z * p);
  y = fma16(z, splat(-0.5f), y);
  return fma16(e, splat(0.693359375f), m + y);
}

// log(1 + exp(x)); x itself above 20, exp(x) where 1 + exp(x) is 1
static inline v16 softplus16(v16 x) {
  const v16 e = exp16(x > splat(20.0f) ? splat(20.0f) : x);
  const v16 u = 1.0f + e;
  const i16 is_one = u == splat(1.0f);
  const v16 d = is_one ? splat(1.0f) : u - 1.0f;
  const v16 y = is_one ? e : log16(u) * (e / d);
  return x > splat(20.0f) ? x : (x != x ? x : y);
}

static inline float root(float x) {
#if defined(__SSE__)
  return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
#else
  return __builtin_sqrtf(x);
#endif
}

// 2 ** (byte - 127), exact for bytes 0 to 254
static inline float e8m0(uint8_t byte) {
  const uint32_t bits = byte ? (uint32_t)byte << 23 : 0x00400000u;
  return read<float>(&bits);
}

// While one lives, subnormal float32 numbers count as zero, as the bfloat16 dot instruction has them.
struct FlushSubnormals {
#if defined(__SSE__)
  unsigned before = _mm_getcsr();
  FlushSubnormals() { _mm_setcsr(before | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before); }
#elif defined(__aarch64__)
  uint64_t before;
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" ::"r"(before | (1ull << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(before)); }
#endif
};

// Memory of a thread that grows and is never given back: no allocation per token.
struct Scratch {
  char* data = nullptr;
  size_t size = 0;
  char* get(size_t bytes) {
    if (bytes > size) {
      free(data);
      size = (bytes + bytes / 2 + 4095) & ~(size_t)4095;
      data = (char*)aligned_alloc(64, size);
      if (!data) size = 0;
    }
    return data;
  }
  ~Scratch() { free(data); }
};

// Hands out 64-byte aligned pieces of one scratch; ask for the sum of `room` first.
struct Carver {
  char* at;
  static constexpr size_t room(size_t bytes) { return (bytes + 127) & ~(size_t)63; }
  template <class T>
  T* take(size_t count) {
    T* piece = (T*)at;
    at += room(count * sizeof(T));
    return piece;
  }
};

}  // namespace
