// One tile of a product on AVX2: eight output columns at a time, in the order of `dot_group`.
#pragma once

namespace {

static inline __m256 fp4_eight(__m256i words, int nibble) {
  const __m256 sizes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
  const __m256i moved = _mm256_srli_epi32(words, 4 * nibble);  // the table looks at three bits
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(moved, 28), _mm256_set1_epi32((int)0x80000000));
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(sizes, moved), _mm256_castsi256_ps(sign));
}

static inline __m256 e4m3_eight(__m256i codes) {
  const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi32(0x7F));
  const __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
  const __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0.001953125f));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
  const __m256 size = _mm256_blendv_ps(_mm256_castsi256_ps(normal), small, _mm256_castsi256_ps(is_small));
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(0x80)), 24);
  return _mm256_or_ps(size, _mm256_castsi256_ps(sign));
}

template <int ROWS>
static inline void pair_step(const float* const* a, int64_t at, __m256 even, __m256 odd, __m256* sums) {
  for (int r = 0; r < ROWS; r++) {
    sums[r] = _mm256_fmadd_ps(_mm256_broadcast_ss(a[r] + at + 1), odd, sums[r]);
    sums[r] = _mm256_fmadd_ps(_mm256_broadcast_ss(a[r] + at), even, sums[r]);
  }
}

// columns 8 half to 8 half + 7 of one group of 32
template <int KIND, int ROWS>
static inline void half_group(const uint8_t* tile, int half, const float* const* a, int64_t at, __m256* sums) {
  for (int r = 0; r < ROWS; r++) sums[r] = _mm256_setzero_ps();
  if (KIND == FP4) {
    for (int eight = 0; eight < 4; eight++) {
      const __m256i words = _mm256_loadu_si256((const __m256i*)(tile + 64 * eight + 32 * half));
      for (int pair = 0; pair < 4; pair++)
        pair_step<ROWS>(a, at + 8 * eight + 2 * pair, fp4_eight(words, 2 * pair), fp4_eight(words, 2 * pair + 1), sums);
    }
  } else if (KIND == FP8) {
    const __m256i byte = _mm256_set1_epi32(0xFF);
    for (int four = 0; four < 8; four++) {
      const __m256i mixed = _mm256_loadu_si256((const __m256i*)(tile + 64 * four + 32 * half));
      const __m256i sorted = _mm256_permute4x64_epi64(mixed, 0xD8);  // first pair of eight columns, then the second
      for (int pair = 0; pair < 2; pair++) {
        const __m128i part = pair ? _mm256_extracti128_si256(sorted, 1) : _mm256_castsi256_si128(sorted);
        const __m256i codes = _mm256_cvtepu16_epi32(part);
        const __m256 even = e4m3_eight(_mm256_and_si256(codes, byte)), odd = e4m3_eight(_mm256_srli_epi32(codes, 8));
        pair_step<ROWS>(a, at + 4 * four + 2 * pair, even, odd, sums);
      }
    }
  } else {
    for (int pair = 0; pair < 16; pair++) {
      const __m256i words = _mm256_loadu_si256((const __m256i*)(tile + 64 * pair + 32 * half));
      const __m256i high = _mm256_and_si256(words, _mm256_set1_epi32((int)0xFFFF0000));
      const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
      pair_step<ROWS>(a, at + 2 * pair, even, _mm256_castsi256_ps(high), sums);
    }
  }
}

template <int KIND, int ROWS>
static inline void half_tile(const Matrix& w, int64_t tile, int half, const float* const* a, const float* const* scales,
                             v16* out) {
  const int64_t groups = w.width / 32, step = KIND == FP4 ? 256 : KIND == FP8 ? 512 : 1024;
  const uint8_t* at = w.tiles + tile * step * groups;
  const uint8_t* factors = w.scales + (KIND == FP4 ? tile * groups * 16 + 8 * half : (tile / 2) * groups);
  __m256 totals[ROWS], sums[ROWS];
  for (int r = 0; r < ROWS; r++) totals[r] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; g++, at += step) {
    half_group<KIND, ROWS>(at, half, a, 32 * g, sums);
    if (KIND == BF16) {
      for (int r = 0; r < ROWS; r++) totals[r] = _mm256_add_ps(totals[r], sums[r]);
      continue;
    }
    __m256 factor = _mm256_set1_ps(KIND == FP8 ? e8m0(factors[g]) : 0.0f);
    if (KIND == FP4) {
      const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(factors + 16 * g)));
      const __m256i is_zero = _mm256_cmpeq_epi32(bytes, _mm256_setzero_si256());
      const __m256i least = _mm256_and_si256(is_zero, _mm256_set1_epi32(0x00400000));
      factor = _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(bytes, 23), least));
    }
    for (int r = 0; r < ROWS; r++) {
      const __m256 scale = scales ? _mm256_mul_ps(factor, _mm256_set1_ps(scales[r][g])) : factor;
      totals[r] = _mm256_fmadd_ps(sums[r], scale, totals[r]);
    }
  }
  for (int r = 0; r < ROWS; r++) write((char*)&out[r] + 32 * half, totals[r]);
}

template <int KIND, int ROWS>
static inline void one_tile(const Matrix& w, int64_t tile, const float* const* a, const float* const* scales, v16* out) {
  for (int half = 0; half < 2; half++) half_tile<KIND, ROWS>(w, tile, half, a, scales, out);
}

}  // namespace
