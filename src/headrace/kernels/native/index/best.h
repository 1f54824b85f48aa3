// The best of a stream of scores: higher score, then lower position.
#pragma once
#include "../lanes.h"

namespace {

// A bfloat16 score as an integer that orders like it; -0 and +0 tie, NaN is above infinity.
static inline i16 ranks(v16 scores) {
  const i16 bits = (i16)(scores + 0.0f);
  return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 16;
}
constexpr int32_t LEAST_RANK = -32768, MOST_RANK = 32767;  // neither belongs to a score
static inline float score_of(int32_t rank) {
  const int32_t bits = (int32_t)((uint32_t)(rank ^ ((rank >> 31) & 0x7FFF)) << 16);
  return read<float>(&bits);
}

// The bits of the lanes that hold.
static inline uint32_t bits_of(i16 holds) {
#if defined(HR_AVX512)
  return _mm512_movepi32_mask((__m512i)holds);
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < 16; lane++) bits |= (uint32_t)(holds[lane] & 1) << lane;
  return bits;
#endif
}
// The marked lanes one behind the other; writes 16 places.
static inline void put_marked(int32_t* to, i16 x, uint32_t marks) {
#if defined(HR_AVX512)
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32((__mmask16)marks, (__m512i)x));
#else
  for (; marks; marks &= marks - 1) *to++ = x[__builtin_ctz(marks)];
#endif
}

// Ranks with positions, which must come in ascending order and so stay. The list is cut to the `wanted` best when it is
// half as long again; from then on nothing at or below `floor` is added, because an equal score never displaces one.
struct Best {
  int32_t* list;
  int32_t* positions;
  int64_t wanted;
  int64_t count = 0;
  int32_t floor = LEAST_RANK;

  static int64_t places(int64_t wanted) { return wanted + wanted / 2 + 48; }
  static size_t size(int64_t wanted) { return 2 * Carver::room(places(wanted) * 4); }
  void carve(Carver& from, int64_t most) {
    wanted = most;
    list = from.take<int32_t>(places(wanted));
    positions = from.take<int32_t>(places(wanted));
  }

  void add(i16 rank, i16 where, uint32_t marks) {
    marks &= bits_of(rank > floor);
    if (!marks) return;
    put_marked(list + count, rank, marks);
    put_marked(positions + count, where, marks);
    count += __builtin_popcount(marks);
    if (count > wanted + wanted / 2) cut();
  }
  void add(int32_t rank, int64_t where) {
    if (rank > floor) add(i16{} + rank, i16{} + (int32_t)where, 1);
  }
  void add(const Best& others) {
    for (int64_t i = 0; i < others.count; i += 16) {
      const int64_t left = others.count - i;
      add(read<i16>(others.list + i), read<i16>(others.positions + i), left < 16 ? 0xFFFFu >> (16 - left) : 0xFFFFu);
    }
  }
  int64_t num_from(int32_t rank) const {
    i16 total = {};
    for (int64_t i = 0; i < count; i += 16) total = total - (read<i16>(list + i) >= rank);
    int64_t sum = 0;
    for (int lane = 0; lane < 16; lane++) sum += total[lane];
    return sum;
  }
  void cut() {
    if (count <= wanted) return;
    for (int64_t i = count; i < ((count + 15) & ~(int64_t)15); i++) list[i] = LEAST_RANK;
    int32_t low = LEAST_RANK, high = MOST_RANK + 1;  // as many as wanted from low on, fewer from high on
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      (num_from(middle) >= wanted ? low : high) = middle;
    }
    int64_t spare = wanted - num_from(high), kept = 0;  // places for those that tie
    for (int64_t i = 0; i < count; i += 16) {
      const i16 rank = read<i16>(list + i), where = read<i16>(positions + i);
      uint32_t ties = bits_of(rank == low);
      while (__builtin_popcount(ties) > spare) ties &= ~(0x80000000u >> __builtin_clz(ties));
      spare -= __builtin_popcount(ties);
      const uint32_t marks = bits_of(rank > low) | ties;
      put_marked(list + kept, rank, marks);
      put_marked(positions + kept, where, marks);
      kept += __builtin_popcount(marks);
    }
    count = kept;
    floor = low;
  }
  // positions, ascending, -1 after
  void put(int64_t* out) {
    cut();
    for (int64_t i = 0; i < wanted; i++) out[i] = i < count ? positions[i] : -1;
  }
};

}  // namespace
