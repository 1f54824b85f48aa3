// Products of rows with FP4, FP8 and bfloat16 matrices in tiles of 16 output columns; see product/__init__.py.
#pragma once
#include "../pool.h"
#include "../quantise/quantise.h"

enum Kind : int32_t { FP4 = 0, FP8 = 1, BF16 = 2 };
enum Result : int32_t { AS_BF16 = 0, AS_FLOAT = 1, AS_ROUNDED_FLOAT = 2 };

struct Matrix {
  const uint8_t* tiles;
  const uint8_t* scales;  // FP4: [tiles, K / 32, 16]; FP8: [ceil(N / 32), K / 32]; null: none
  int64_t rows;           // N, a multiple of 16 in the tiles
  int64_t width;          // K, a multiple of 32
  int64_t kind;
};

#if defined(HR_AVX512)
#define HR_UNROLL_(text) _Pragma(#text)
#define HR_UNROLL(count) HR_UNROLL_(GCC unroll count)
#else
#define HR_UNROLL(count) _Pragma("GCC unroll 1")
#endif

namespace {
#if defined(HR_AVX512)
constexpr int MOST_ROWS = 8;  // rows that share a decoded tile; as many as the registers hold
#else
constexpr int MOST_ROWS = 4;
#endif

static inline int64_t tile_bytes(const Matrix& w) {
  return w.kind == FP4 ? w.width * 8 : w.kind == FP8 ? w.width * 16 : w.width * 32;
}

#if defined(HR_AVX512)
typedef __m512i pair_t;  // two neighbouring columns of 16 rows, bfloat16
// bfloat16 patterns of the 16 codes, twice: an index may carry one bit of its neighbour
alignas(64) static constexpr uint16_t fp4_table[32] = {
    0,      0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80,
    0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0, 0,      0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040,
    0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};
static inline pair_t fp4_pair(__m512i words, int pair) {
  const __m512i codes = _mm512_load_si512(fp4_table);
  // bytes 0 and 2 of a 32-bit lane take the two nibbles of the pair; the table ignores what is above a nibble
  const uint64_t low = 8 * pair, second = 32 + 8 * pair;
  const uint64_t shifts = low | (low + 4) << 16 | second << 32 | (second + 4) << 48;
  const __m512i index = _mm512_multishift_epi64_epi8(_mm512_set1_epi64((long long)shifts), words);
  return _mm512_permutexvar_epi16(index, codes);
}
static inline v16 dot_pair(const bf16* a, pair_t w, v16 acc) {
  return (v16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(read<int>(a)), (__m512bh)w);
}
// bytes of the bfloat16 patterns of the 128 magnitudes; constants, because nothing of this file may run while loading
struct E4m3Bytes {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
  constexpr E4m3Bytes() : low(), high() {
    for (int code = 0; code < 128; code++) {
      const int m = code & 7;
      int bits = ((code >> 3) + 120) << 7 | m << 4;
      if (code < 8) bits = m == 0 ? 0 : m == 1 ? 118 << 7 : m < 4 ? 119 << 7 | (m & 1) << 6 : 120 << 7 | (m & 3) << 5;
      low[code] = (uint8_t)bits;
      high[code] = (uint8_t)(bits >> 8);
    }
  }
};
static constexpr E4m3Bytes e4m3_table;
static inline void fp8_pairs(__m512i codes, pair_t out[2]) {
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_table.low), codes,
                                               _mm512_load_si512(e4m3_table.low + 64));
  __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_table.high), codes,
                                          _mm512_load_si512(e4m3_table.high + 64));
  high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xF8);  // high | (codes & 0x80)
  out[0] = _mm512_unpacklo_epi8(low, high);
  out[1] = _mm512_unpackhi_epi8(low, high);
}
#else
struct pair_t {
  v16 even, odd;
};
static inline v16 fp4_values(u16 codes) {
  // sign, two exponent bits and one mantissa bit, moved to their places; 0 and 1/2 are the subnormals
  return (v16)(((codes & 8) << 28) | ((codes & 7) << 22)) * 8.507059173023462e37f;  // 2 ** 126
}
static inline pair_t fp4_pair(u16 words, int pair) {
  const u16 byte = words >> (8 * pair);
  return {fp4_values(byte), fp4_values(byte >> 4)};
}
static inline v16 dot_pair(const float* a, const pair_t& w, v16 acc) {
  return fma16(splat(a[0]), w.even, fma16(splat(a[1]), w.odd, acc));
}
static inline pair_t fp8_pair(h16 codes) {
  const u16 wide_codes = widen(codes);
  return {from_e4m3(wide_codes & 0xFF), from_e4m3(wide_codes >> 8)};
}
static inline void fp8_pairs(const uint8_t* from, pair_t out[2]) {
  for (int half = 0; half < 2; half++) {
    h16 codes;
    for (int row = 0; row < 4; row++) memcpy((char*)&codes + 8 * row, from + 16 * row + 8 * half, 8);
    out[half] = fp8_pair(codes);
  }
}
#endif

#if defined(HR_AVX2)
}  // namespace
#include "avx2.h"
namespace {
#else
// One group of 32 columns of a tile: rows' sums from zero, column pairs in ascending order, the odd column first.
template <int KIND, int ROWS>
static inline void dot_group(const uint8_t* tile, const code_t* const* a, int64_t at, v16* sums) {
  for (int r = 0; r < ROWS; r++) sums[r] = v16{};
  if (KIND == FP4) {
    HR_UNROLL(4)
    for (int eight = 0; eight < 4; eight++) {
#if defined(HR_AVX512)
      const __m512i words = _mm512_loadu_si512(tile + 64 * eight);
#else
      const u16 words = read<u16>(tile + 64 * eight);
#endif
    HR_UNROLL(4)
      for (int pair = 0; pair < 4; pair++) {
        const pair_t w = fp4_pair(words, pair);
        for (int r = 0; r < ROWS; r++) sums[r] = dot_pair(a[r] + at + 8 * eight + 2 * pair, w, sums[r]);
      }
    }
  } else if (KIND == FP8) {
    HR_UNROLL(8)
    for (int four = 0; four < 8; four++) {
      pair_t w[2];
#if defined(HR_AVX512)
      fp8_pairs(_mm512_loadu_si512(tile + 64 * four), w);
#else
      fp8_pairs(tile + 64 * four, w);
#endif
      for (int pair = 0; pair < 2; pair++)
        for (int r = 0; r < ROWS; r++) sums[r] = dot_pair(a[r] + at + 4 * four + 2 * pair, w[pair], sums[r]);
    }
  } else {
    HR_UNROLL(16)
    for (int pair = 0; pair < 16; pair++) {
#if defined(HR_AVX512)
      const pair_t w = _mm512_loadu_si512(tile + 64 * pair);
#else
      const u16 words = read<u16>(tile + 64 * pair);
      const pair_t w = {(v16)(words << 16), (v16)(words & 0xFFFF0000u)};
#endif
      for (int r = 0; r < ROWS; r++) sums[r] = dot_pair(a[r] + at + 2 * pair, w, sums[r]);
    }
  }
}

constexpr int64_t AHEAD = 8192;  // bytes; memory answers late, and the processor itself does not look beyond a page

template <int KIND, int ROWS>
static inline void one_tile(const Matrix& w, int64_t tile, const code_t* const* a, const float* const* scales, v16* out) {
  const int64_t groups = w.width / 32;
  const int64_t step = KIND == FP4 ? 256 : KIND == FP8 ? 512 : 1024;
  const uint8_t* at = w.tiles + tile * step * groups;
  const uint8_t* factors = w.scales + (KIND == FP4 ? tile * groups * 16 : (tile / 2) * groups);
  for (int r = 0; r < ROWS; r++) out[r] = v16{};
  for (int64_t g = 0; g < groups; g++, at += step) {
    if (ROWS <= 4)  // memory is what few rows wait for
      for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(at + AHEAD + line);
    v16 sums[ROWS];
    dot_group<KIND, ROWS>(at, a, 32 * g, sums);
    if (KIND == FP4) {
      const u16 bytes = widen(read<b16>(factors + 16 * g));
      const v16 factor = (v16)((i16)(bytes == 0) ? (u16{} + 0x00400000u) : bytes << 23);
      for (int r = 0; r < ROWS; r++) out[r] = fma16(sums[r], factor * scales[r][g], out[r]);
    } else if (KIND == FP8) {
      const float factor = e8m0(factors[g]);
      for (int r = 0; r < ROWS; r++) out[r] = fma16(sums[r], splat(scales ? factor * scales[r][g] : factor), out[r]);
    } else {
      for (int r = 0; r < ROWS; r++) out[r] = out[r] + sums[r];
    }
  }
}
#endif

static inline void put(void* const* out, int r, int64_t column, int64_t columns, int32_t result, v16 value) {
  if (columns - column >= 16) {
    if (result == AS_BF16)
      store_bf16((bf16*)out[r] + column, value);
    else
      store16((float*)out[r] + column, result == AS_FLOAT ? value : round_bf16(value));
    return;
  }
  for (int lane = 0; lane < columns - column; lane++) {
    if (result == AS_BF16)
      ((bf16*)out[r])[column + lane] = to_bf16(value)[lane];
    else
      ((float*)out[r])[column + lane] = result == AS_FLOAT ? value[lane] : round_bf16(value)[lane];
  }
}

template <int KIND, int ROWS>
static void some_rows(const Matrix& w, int64_t low, int64_t high, const code_t* const* a, const float* const* scales,
                      void* const* out, int64_t columns, int32_t result) {
  for (int64_t tile = low; tile < high; tile++) {
    v16 values[ROWS];
    one_tile<KIND, ROWS>(w, tile, a, scales, values);
    for (int r = 0; r < ROWS; r++) put(out, r, 16 * tile, columns, result, values[r]);
  }
}

template <int KIND>
static void all_rows(const Matrix& w, int64_t low, int64_t high, int64_t rows, const code_t* const* a,
                     const float* const* scales, void* const* out, int64_t columns, int32_t result) {
  // tiles of one pass stay in cache while all rows use them
  const int64_t many = tile_bytes(w) > 0 && rows > 8 ? (int64_t)(131072 / tile_bytes(w)) + 1 : high - low;
  for (int64_t tile = low; tile < high; tile += many) {
    const int64_t end = tile + many < high ? tile + many : high;
    int64_t r = 0;
    for (; r + MOST_ROWS <= rows; r += MOST_ROWS)
      some_rows<KIND, MOST_ROWS>(w, tile, end, a + r, scales ? scales + r : 0, out + r, columns, result);
    if (MOST_ROWS > 4)
      for (; r + 4 <= rows; r += 4)
        some_rows<KIND, 4>(w, tile, end, a + r, scales ? scales + r : 0, out + r, columns, result);
    for (; r + 2 <= rows; r += 2) some_rows<KIND, 2>(w, tile, end, a + r, scales ? scales + r : 0, out + r, columns, result);
    for (; r < rows; r++) some_rows<KIND, 1>(w, tile, end, a + r, scales ? scales + r : 0, out + r, columns, result);
  }
}

// Rows `a` (codes, or values where `scales` is null) times `w`; out[r] has w.rows columns. Threads share the tiles.
static void multiply(const Matrix& w, int64_t rows, const code_t* const* a, const float* const* scales, void* const* out,
                     int32_t result) {
  const int64_t tiles = (w.rows + 15) / 16, pieces = worth(rows * w.rows * w.width, tiles);
  parallel(pieces, [&](int64_t piece) {
    const int64_t low = tiles * piece / pieces, high = tiles * (piece + 1) / pieces;
    if (w.kind == FP4) return all_rows<FP4>(w, low, high, rows, a, scales, out, w.rows, result);
    FlushSubnormals flush;
    if (w.kind == FP8) return all_rows<FP8>(w, low, high, rows, a, scales, out, w.rows, result);
    all_rows<BF16>(w, low, high, rows, a, scales, out, w.rows, result);
  });
}

// bfloat16 values as products take them without quantisation
static inline void plain_row(const bf16* x, int64_t width, code_t* to) {
#if defined(HR_AVX512)
  memcpy(to, x, width * sizeof(bf16));
#else
  for (int64_t at = 0; at < width; at += 16) store16(to + at, load_bf16(x + at));
#endif
}

}  // namespace
