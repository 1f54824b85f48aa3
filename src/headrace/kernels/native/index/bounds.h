// Products of FP4 queries and keys as 8-bit integers, and upper bounds of scores from them (AVX-512).
//
// A sum of 32 products of two E2M1 values is a multiple of 1/4 of at most 1152, so float32 arithmetic in any order and
// integer arithmetic give the same number: it is what `one_tile` gives. A score is not above the sum of its unrounded
// terms, each moved up by what two roundings to bfloat16 can add: keys whose bound is not above the lowest score in the
// list are done, and the others' scores are rounded where the vendor rounds.
#pragma once
#include "../product/product.h"
#include "../quantise/fp4.h"
#include "keys.h"

#if defined(HR_AVX512)

namespace {

constexpr float MAGIC = 3145728.0f;              // 1.5 * 2 ** 21: neighbours are 1/4 apart
constexpr float ROUNDINGS = 0.0078125f * 1.0625f;  // two of at most 2 ** -8 each, and the sums' own in float32
constexpr int LOWEST_SCALE = 97, HIGHEST_SCALE = 157;  // 2 ** -30 to 2 ** 30: nothing overflows or is subnormal

constexpr int64_t MOST_GROUPS = 4;                     // of 32 columns

struct Bounds {
  int32_t* q;       // [J, I / 32, 8]: four int8 columns, twice the value; even columns of 8, odd ones, of the next ..
  int32_t* start;   // [J, I / 32]: what a sum starts from
  float* scale;     // [J, I / 32]
  float* minus;     // [J, I / 32]: -MAGIC times scale
  float* weights;   // [J], moved up
  uint8_t* keys;    // [4, I / 32, 8, 64]: twice the value plus 12, laid out as q
  v16* key_scales;  // [4, I / 32]
  v16* dots;        // [J, 4], written
  v16 sums[4];      // written: the bounds

  static size_t size(int64_t heads, int64_t width) {
    const int64_t groups = width / 32;
    return Carver::room(heads * width) + 3 * Carver::room(heads * groups * 4) + Carver::room(heads * 4) +
           Carver::room(groups * 2048) + Carver::room(groups * 256) + Carver::room(heads * 256);
  }
  void carve(Carver& from, int64_t heads, int64_t width) {
    const int64_t groups = width / 32;
    q = from.take<int32_t>(heads * groups * 8);
    start = from.take<int32_t>(heads * groups);
    scale = from.take<float>(heads * groups);
    minus = from.take<float>(heads * groups);
    weights = from.take<float>(heads);
    keys = from.take<uint8_t>(groups * 2048);
    key_scales = from.take<v16>(groups * 4);
    dots = from.take<v16>(heads * 4);
  }

  void share_queries(const Bounds& of) {
    q = of.q, start = of.start, scale = of.scale, minus = of.minus, weights = of.weights;
  }

  // one group of a head's query: values on the grid and the scale byte; false where the byte is out of range
  bool put_query(int64_t place, v16 low, v16 high, int exponent) {
    int8_t doubled[32];
    int32_t total = 0;
    bool is_zero = true;
    for (int i = 0; i < 32; i++) {
      doubled[i] = (int8_t)(2.0f * (i < 16 ? low[i] : high[i - 16]));
      total += doubled[i];
      is_zero = is_zero && !doubled[i];
    }
    int8_t* to = (int8_t*)(q + place * 8);
    for (int eight = 0; eight < 4; eight++)
      for (int i = 0; i < 8; i++) to[8 * eight + 4 * (i & 1) + i / 2] = doubled[8 * eight + i];
    const float magic = MAGIC;
    start[place] = read<int32_t>(&magic) - 12 * total;
    scale[place] = is_zero ? 1.0f : e8m0((uint8_t)exponent);
    minus[place] = -MAGIC * scale[place];
    return exponent != 255 && (is_zero || (exponent >= LOWEST_SCALE && exponent <= HIGHEST_SCALE));
  }
  bool put_weight(int64_t head, bf16 weight) {
    const float w = wide(weight), size = __builtin_fabsf(w);
    weights[head] = w + size * ROUNDINGS;
    return size == 0.0f || (size >= 9.313225746154785e-10f && size <= 1073741824.0f);  // 2 ** -30 and 2 ** 30
  }
};

// lane 4 l + j from 4 j + l
static inline v16 swap_tile(v16 x) {
  return __builtin_shufflevector(x, x, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}

// 16 bytes of each of 16 keys, transposed to words; key 4 j + l, given in lane l of register j, goes to lane 4 l + j
static inline void transpose(const __m512i* x, __m512i* words) {
  const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpacklo_epi32(x[2], x[3]);
  const __m512i c = _mm512_unpackhi_epi32(x[0], x[1]), d = _mm512_unpackhi_epi32(x[2], x[3]);
  words[0] = _mm512_unpacklo_epi64(a, b);
  words[1] = _mm512_unpackhi_epi64(a, b);
  words[2] = _mm512_unpacklo_epi64(c, d);
  words[3] = _mm512_unpackhi_epi64(c, d);
}

// eight codes a word to twice their values plus 12: those of even columns, of odd ones
static inline void decode(__m512i word, __m512i* out) {
  const __m128i codes = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  const __m512i table = _mm512_broadcast_i32x4(codes), nibble = _mm512_set1_epi8(15);
  out[0] = _mm512_shuffle_epi8(table, _mm512_and_si512(word, nibble));
  out[1] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(word, 4), nibble));
}

static inline void put_words(const __m512i* x, uint8_t* to) {
  __m512i words[4], values[2];
  transpose(x, words);
  for (int w = 0; w < 4; w++) {
    decode(words[w], values);
    _mm512_store_si512(to + 128 * w, values[0]);
    _mm512_store_si512(to + 128 * w + 64, values[1]);
  }
}

// Pieces of 16 bytes of four neighbouring keys, one register per piece.
template <int GROUPS>
static inline void split_four(const uint8_t* keys, __m512i* pieces) {
  __m512i x[GROUPS];
  for (int i = 0; i < GROUPS; i++) x[i] = _mm512_loadu_si512(keys + 64 * i);
  if (GROUPS == 1) {
    pieces[0] = x[0];
  } else if (GROUPS == 2) {
    pieces[0] = _mm512_shuffle_i64x2(x[0], x[1], 0x88);
    pieces[1] = _mm512_shuffle_i64x2(x[0], x[1], 0xDD);
  } else {
    const __m512i a = _mm512_shuffle_i64x2(x[0], x[1], 0x44), b = _mm512_shuffle_i64x2(x[0], x[1], 0xEE);
    const __m512i c = _mm512_shuffle_i64x2(x[2], x[3], 0x44), d = _mm512_shuffle_i64x2(x[2], x[3], 0xEE);
    pieces[0] = _mm512_shuffle_i64x2(a, c, 0x88);
    pieces[1] = _mm512_shuffle_i64x2(a, c, 0xDD);
    pieces[2] = _mm512_shuffle_i64x2(b, d, 0x88);
    pieces[3] = _mm512_shuffle_i64x2(b, d, 0xDD);
  }
}

// decodes the tiles
template <int GROUPS>
static inline void unpack(const Bounds& bounds, const Keys& keys) {
  for (int64_t tile = 0; 16 * tile < keys.count; tile++) {
    const uint8_t *a = keys.codes[2 * tile], *b = keys.codes[2 * tile + 1];
    __m512i x[4][GROUPS];
    split_four<GROUPS>(a, x[0]);
    split_four<GROUPS>(a + 64 * GROUPS, x[1]);
    split_four<GROUPS>(b, x[2]);
    split_four<GROUPS>(b + 64 * GROUPS, x[3]);
    for (int g = 0; g < GROUPS; g++) {
      const __m512i pieces[4] = {x[0][g], x[1][g], x[2][g], x[3][g]};
      put_words(pieces, bounds.keys + (tile * GROUPS + g) * 512);
    }
  }
}

// scales of the keys as float32 [4, I / 32, 16]; false where one is out of range
template <int GROUPS>
static inline bool unpack_scales(const Bounds& bounds, const Keys& keys) {
  const __m512i least = _mm512_set1_epi8(LOWEST_SCALE), span = _mm512_set1_epi8(HIGHEST_SCALE - LOWEST_SCALE);
  uint8_t copied[KEYS * GROUPS];
  const int64_t octets = (keys.count + 15) / 16 * 2, total = 8 * GROUPS * octets;
  const uint8_t* bytes = keys.is_run ? keys.scales[0] : copied;
  for (int64_t octet = 0; octet < octets && !keys.is_run; octet++)
    memcpy(copied + 8 * GROUPS * octet, keys.scales[octet], 8 * GROUPS);
  uint64_t outside = 0;
  for (int64_t at = 0; at < total; at += 64) {
    const __mmask64 there = total - at >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << (total - at)) - 1;
    const __m512i x = _mm512_sub_epi8(_mm512_maskz_loadu_epi8(there, bytes + at), least);
    outside |= _mm512_mask_cmpgt_epu8_mask(there, x, span);
  }
  if (outside) return false;
  for (int64_t tile = 0; 16 * tile < keys.count; tile++) {
    const uint8_t* at = bytes + 16 * tile * GROUPS;
    v16* to = bounds.key_scales + tile * GROUPS;
    u16 x;
    if (GROUPS == 1) x = widen(read<b16>(at));
    if (GROUPS == 2) x = widen(read<h16>(at));
    if (GROUPS == 4) x = read<u16>(at);
    x = (u16)swap_tile((v16)x);
    for (int g = 0; g < GROUPS; g++) to[g] = (v16)(((x >> (8 * g)) & 0xFF) << 23);
  }
  return true;
}

template <int GROUPS, int TILES, int HEADS>
static inline void dot_tiles(Bounds& bounds, int64_t tile, int64_t head) {
  v16 totals[TILES][HEADS] = {};
  for (int64_t g = 0; g < GROUPS; g++) {
    __m512i sums[TILES][HEADS];
    for (int h = 0; h < HEADS; h++) {
      const __m512i from = _mm512_set1_epi32(bounds.start[(head + h) * GROUPS + g]);
      for (int t = 0; t < TILES; t++) sums[t][h] = from;
    }
    const uint8_t* keys = bounds.keys + (tile * GROUPS + g) * 512;
    HR_UNROLL(8)
    for (int w = 0; w < 8; w++) {
      __m512i key[TILES];
      for (int t = 0; t < TILES; t++) key[t] = _mm512_load_si512(keys + t * GROUPS * 512 + 64 * w);
      for (int h = 0; h < HEADS; h++) {
        const __m512i q = _mm512_set1_epi32(bounds.q[((head + h) * GROUPS + g) * 8 + w]);
        for (int t = 0; t < TILES; t++) sums[t][h] = _mm512_dpbusd_epi32(sums[t][h], key[t], q);
      }
    }
    for (int h = 0; h < HEADS; h++) {
      const int64_t place = (head + h) * GROUPS + g;
      const v16 scale = splat(bounds.scale[place]), minus = splat(bounds.minus[place]);
      for (int t = 0; t < TILES; t++) {
        const v16 part = fma16((v16)sums[t][h], scale, minus);  // exact
        totals[t][h] = fma16(part, bounds.key_scales[(tile + t) * GROUPS + g], totals[t][h]);
      }
    }
  }
  for (int h = 0; h < HEADS; h++) {
    const v16 weight = splat(bounds.weights[head + h]);
    for (int t = 0; t < TILES; t++) {
      bounds.dots[(head + h) * 4 + tile + t] = totals[t][h];
      bounds.sums[tile + t] = fma16(max16(totals[t][h], v16{}), weight, bounds.sums[tile + t]);
    }
  }
}

// One head of 32 columns: a tile's keys are decoded where they are multiplied.
static inline void dot_narrow(Bounds& bounds, const Keys& keys) {
  __m512i q[8];
  for (int w = 0; w < 8; w++) q[w] = _mm512_set1_epi32(bounds.q[w]);
  const v16 scale = splat(bounds.scale[0]), minus = splat(bounds.minus[0]), weight = splat(bounds.weights[0]);
  for (int64_t tile = 0; 16 * tile < keys.count; tile++) {
    const uint8_t *a = keys.codes[2 * tile], *b = keys.codes[2 * tile + 1];
    const __m512i x[4] = {_mm512_loadu_si512(a), _mm512_loadu_si512(a + 64), _mm512_loadu_si512(b),
                          _mm512_loadu_si512(b + 64)};
    __m512i words[4], values[2], sum = _mm512_set1_epi32(bounds.start[0]);
    transpose(x, words);
    for (int w = 0; w < 4; w++) {
      decode(words[w], values);
      sum = _mm512_dpbusd_epi32(sum, values[0], q[2 * w]);
      sum = _mm512_dpbusd_epi32(sum, values[1], q[2 * w + 1]);
    }
    const v16 dot = fma16((v16)sum, scale, minus) * bounds.key_scales[tile];
    bounds.dots[tile] = dot;
    bounds.sums[tile] = max16(dot, v16{}) * weight;
  }
}

template <int GROUPS>
static bool bounds_of(Bounds& bounds, const Keys& keys, int64_t heads) {
  const int64_t tiles = (keys.count + 15) / 16;
  if (!unpack_scales<GROUPS>(bounds, keys)) return false;
  if (GROUPS == 1 && heads == 1) {
    dot_narrow(bounds, keys);
    return true;
  }
  unpack<GROUPS>(bounds, keys);
  for (int t = 0; t < 4; t++) bounds.sums[t] = v16{};
  for (int64_t tile = 0; tile < tiles; tile += 2) {
    int64_t head = 0;
    if (tile + 1 == tiles) {
      for (; head < heads; head++) dot_tiles<GROUPS, 1, 1>(bounds, tile, head);
      break;
    }
    for (; head + 4 <= heads; head += 4) dot_tiles<GROUPS, 2, 4>(bounds, tile, head);
    for (; head < heads; head++) dot_tiles<GROUPS, 2, 1>(bounds, tile, head);
  }
  return true;
}

// half to even; only for numbers that are not subnormal, as all are that come from dots within the bounds
static inline v16 round_normal(v16 x) { return from_bf16((h16)_mm512_cvtneps_pbh((__m512)x)); }

// scores of a tile whose dots were found, bfloat16 values
static inline v16 score_tile(const Bounds& bounds, const bf16* weights, int64_t heads, int64_t tile) {
  v16 total = v16{};
  for (int64_t h = 0; h < heads; h++) {
    const v16 dot = max16(round_normal(bounds.dots[4 * h + tile]), v16{});
    total = total + round_normal(dot * wide(weights[h]));
  }
  return swap_tile(round_normal(total));
}

// dots and bounds of the keys; false where a scale is out of range, or keys are of another width
static bool find_bounds(Bounds& bounds, const Keys& keys, int64_t heads, int64_t width) {
  switch (width) {
    case 32: return bounds_of<1>(bounds, keys, heads);
    case 64: return bounds_of<2>(bounds, keys, heads);
    case 128: return bounds_of<4>(bounds, keys, heads);
    default: return false;
  }
}

}  // namespace

#endif
