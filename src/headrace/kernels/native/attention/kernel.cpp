#include <atomic>

#include "../pool.h"
#include "../quantise/quantise.h"
#include "../rows/rotate.h"

struct AttentionSegment {  // rows of one sequence
  int64_t offset, count;   // in the batch
  int64_t first, floor;    // position of the first row, first position that may be looked at
  uint8_t* ring_codes;     // [depth, H]
  uint8_t* ring_scales;    // [depth, H / 32]
  int64_t depth;
  const int64_t* picks;  // [count, slots] ascending, -1 for none; null in a window-only layer
  int64_t slots;
  const bf16* entries;  // [.., H]: entry of a pick, or of a row's slot
  int64_t is_by_slot;
};

struct Attention {
  bf16* q;              // [T, Q, H], rotated in place
  const float* cos;     // [T, P / 2]
  const float* sin;
  const float* sink;    // [Q]
  const bf16* values;   // [T, H] new window entries
  const uint8_t* codes;   // [T, H], stored at the end
  const uint8_t* scales;  // [T, H / 32]
  bf16* out;              // [T, Q, H]
  const AttentionSegment* segments;
  int64_t num_segments, heads, width, rotated, window;
  int64_t is_block;  // rows of a segment see `window` older positions and each other; nothing is stored
  double scale;
};

namespace {

static thread_local Scratch window_scratch, keys_scratch;
constexpr int HEADS = 4;  // heads that share a read of an entry

// lane j takes columns 32 i + 2 j + 1 and 32 i + 2 j, in ascending i
static inline v16 dot_step(const bf16* a, const bf16* b, v16 acc) {
#if defined(HR_AVX512)
  return (v16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b));
#else
  const u16 x = read<u16>(a), y = read<u16>(b);
  acc = fma16((v16)(x & 0xFFFF0000u), (v16)(y & 0xFFFF0000u), acc);
  return fma16((v16)(x << 16), (v16)(y << 16), acc);
#endif
}

template <int N>
static void score(const bf16* q, int64_t width, const bf16* const* keys, int64_t count, float scale, float* scores,
                  int64_t stride) {
  for (int64_t e = 0; e < count; e++) {
    v16 sums[N] = {};
    for (int64_t d = 0; d < width; d += 32)
      for (int h = 0; h < N; h++) sums[h] = dot_step(q + h * width + d, keys[e] + d, sums[h]);
    for (int h = 0; h < N; h++) scores[h * stride + e] = sum16(sums[h]) * scale;
  }
}

// scores to bfloat16 weights; returns the unrounded total with the sink's share
static float weigh(float* scores, int64_t count, int64_t padded, float sink) {
  for (int64_t e = count; e < padded; e++) scores[e] = -HUGE_VALF;
  v16 most = splat(-HUGE_VALF);
  for (int64_t e = 0; e < padded; e += 16) most = max16(most, load16(scores + e));
  float peak = largest16(most);
  if (peak == -HUGE_VALF) peak = sink;
  v16 total = v16{};
  for (int64_t e = 0; e < padded; e += 16) {
    const v16 weight = exp16(load16(scores + e) - peak);
    total = total + weight;
    store16(scores + e, round_bf16(weight));
  }
  return sum16(total) + exp16(splat(sink - peak))[0];
}

template <int N>
static void blend(const float* weights, int64_t stride, const bf16* const* keys, int64_t count, const float* totals,
                  int64_t width, bf16* out) {
  for (int64_t d = 0; d < width; d += 32) {
    v16 low[N] = {}, high[N] = {};
    for (int64_t e = 0; e < count; e++) {
      const v16 a = load_bf16(keys[e] + d), b = load_bf16(keys[e] + d + 16);
      for (int h = 0; h < N; h++) {
        const v16 w = splat(weights[h * stride + e]);
        low[h] = fma16(a, w, low[h]);
        high[h] = fma16(b, w, high[h]);
      }
    }
    for (int h = 0; h < N; h++) {
      store_bf16(out + h * width + d, low[h] / totals[h]);
      store_bf16(out + h * width + d + 16, high[h] / totals[h]);
    }
  }
}

template <int N>
static void some_heads(const Attention& job, int64_t row, int64_t head, const bf16* const* keys, int64_t count,
                       float* scores) {
  const int64_t width = job.width, padded = (count + 15) & ~15;
  const int64_t half = job.rotated / 2, place = (row * job.heads + head) * width;
  const float *cos = job.cos + row * half, *sin = job.sin + row * half;
  for (int h = 0; h < N; h++) rotate_row(job.q + place + (h + 1) * width - job.rotated, cos, sin, half, 1.0f);
  score<N>(job.q + place, width, keys, count, (float)job.scale, scores, padded);
  float totals[N];
  for (int h = 0; h < N; h++) totals[h] = weigh(scores + h * padded, count, padded, job.sink[head + h]);
  blend<N>(scores, padded, keys, count, totals, width, job.out + place);
  for (int h = 0; h < N; h++) rotate_row(job.out + place + (h + 1) * width - job.rotated, cos, sin, half, -1.0f);
}

static void read_ring(const AttentionSegment& segment, int64_t low, int64_t high, int64_t width, bf16* to) {
  for (int64_t p = low; p < high; p++, to += width) {
    const int64_t slot = p % segment.depth;
    const uint8_t* codes = segment.ring_codes + slot * width;
    const uint8_t* scales = segment.ring_scales + slot * (width / 32);
    for (int64_t d = 0; d < width; d += 16) store_bf16(to + d, load_e4m3(codes + d) * scale_of(scales[d / 32]));
  }
}

static void store_ring(const Attention& job, const AttentionSegment& segment) {
  const int64_t width = job.width, skip = segment.count > segment.depth ? segment.count - segment.depth : 0;
  for (int64_t i = skip; i < segment.count; i++) {
    const int64_t slot = (segment.first + i) % segment.depth, row = segment.offset + i;
    memcpy(segment.ring_codes + slot * width, job.codes + row * width, width);
    memcpy(segment.ring_scales + slot * (width / 32), job.scales + row * (width / 32), width / 32);
  }
}

// keys of row `i` of a segment: window positions, then picks, both ascending
static int64_t list_keys(const Attention& job, const AttentionSegment& segment, const bf16* window, int64_t held,
                         int64_t i, const bf16** keys) {
  const int64_t width = job.width, first = segment.first;
  const int64_t before = job.is_block ? first - job.window : first + i - job.window + 1;
  const int64_t last = job.is_block ? first + segment.count - 1 : first + i;
  int64_t count = 0;
  for (int64_t s = before > segment.floor ? before : segment.floor; s <= last; s++)
    keys[count++] = window + (s - (segment.first - held)) * width;
  for (int64_t slot = 0; slot < segment.slots; slot++) {
    const int64_t pick = segment.picks[i * segment.slots + slot];
    if (pick < 0) break;
    keys[count++] = segment.entries + (segment.is_by_slot ? i * segment.slots + slot : pick) * width;
  }
  return count;
}

// units `low` to `high` - 1 of a segment: groups of heads, row by row
static bool attend_units(const Attention& job, const AttentionSegment& segment, const bf16* window, int64_t held,
                         int64_t low, int64_t high) {
  FlushSubnormals flush;
  const int64_t most = job.window + segment.slots + (job.is_block ? segment.count : 0), groups = (job.heads + HEADS - 1) / HEADS;
  Carver carve{keys_scratch.get(Carver::room(most * sizeof(bf16*)) + Carver::room(HEADS * (most + 16) * 4))};
  if (!carve.at) return false;
  const bf16** keys = carve.take<const bf16*>(most);
  float* scores = carve.take<float>(HEADS * (most + 16));
  int64_t count = 0, listed = -1;
  for (int64_t unit = low; unit < high; unit++) {
    const int64_t i = unit / groups, row = segment.offset + i;
    if (i != listed) count = list_keys(job, segment, window, held, i, keys);
    listed = i;
    int64_t head = unit % groups * HEADS;
    const int64_t end = head + HEADS < job.heads ? head + HEADS : job.heads;
    if (end - head == HEADS)
      some_heads<HEADS>(job, row, head, keys, count, scores);
    else
      for (; head < end; head++) some_heads<1>(job, row, head, keys, count, scores);
  }
  return true;
}

static int64_t attend_segment(const Attention& job, const AttentionSegment& segment) {
  const int64_t width = job.width, before = job.is_block ? job.window : job.window - 1;
  const int64_t low = segment.first - before > segment.floor ? segment.first - before : segment.floor;
  const int64_t held = segment.first > low ? segment.first - low : 0;
  bf16* rows = (bf16*)window_scratch.get((held + segment.count) * width * sizeof(bf16));
  if (!rows) return -1;
  if (held) read_ring(segment, low, segment.first, width, rows);
  memcpy(rows + held * width, job.values + segment.offset * width, segment.count * width * sizeof(bf16));
  const int64_t units = segment.count * ((job.heads + HEADS - 1) / HEADS);
  const int64_t pieces = worth(units * HEADS * (job.window + segment.slots) * width * 2, units);
  std::atomic<bool> has_failed{false};
  parallel(pieces, [&](int64_t piece) {
    if (!attend_units(job, segment, rows, held, units * piece / pieces, units * (piece + 1) / pieces)) has_failed = true;
  });
  if (has_failed) return -1;
  if (!job.is_block) store_ring(job, segment);
  return 0;
}

}  // namespace

HR_EXPORT(hr_attend)(const Attention* job) {
  FlushSubnormals flush;
  for (int64_t s = 0; s < job->num_segments; s++)
    if (attend_segment(*job, job->segments[s])) return -1;
  return 0;
}

struct Gather {
  const uint8_t* codes;    // plane [places, H / 2]
  const uint8_t* scales;   // plane [places, H / 16]
  const int64_t* blocks;   // block of every `per_block` entries; null: entry j lies at place j
  const int64_t* picks;    // [count], -1 for none; null: entries 0 to count - 1
  bf16* out;               // [count, H]
  int64_t count, width, per_block;
};

namespace {

constexpr int64_t ROWS_AHEAD = 12;

static inline int64_t place_of(const Gather& job, int64_t i) {
  const int64_t j = job.picks ? job.picks[i] : i;
  if (j < 0 || !job.blocks) return j;
  return job.blocks[j / job.per_block] * job.per_block + j % job.per_block;
}

// A value and its scale have few bits: their product is a bfloat16 number.
static inline void put_entry(const uint8_t* codes, const uint8_t* scales, int64_t width, bf16* to) {
  static constexpr float values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  const v16 table = read<v16>(values);
  const i16 shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
  float factors[16];
  for (int64_t d = 0; d < width; d += 16) {
    if (d % 256 == 0) {
      uint8_t bytes[16] = {};
      memcpy(bytes, scales + d / 16, width - d < 256 ? (width - d) / 16 : 16);
      store16(factors, load_e4m3(bytes));
    }
    const int32_t first = read<int32_t>(codes + d / 2), second = read<int32_t>(codes + d / 2 + 4);
    const i16 words = {first,  first,  first,  first,  first,  first,  first,  first,
                       second, second, second, second, second, second, second, second};
    const i16 index = (words >> shifts) & 15;
    v16 x;
#if defined(HR_AVX512)
    x = (v16)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#else
    for (int lane = 0; lane < 16; lane++) x[lane] = table[index[lane]];
#endif
    write(to + d, halves((u16)(x * factors[d / 16 % 16]) >> 16));
  }
}

}  // namespace

HR_EXPORT(hr_gather)(const Gather* job) {
  const int64_t half = job->width / 2, groups = job->width / 16;
  for (int64_t i = 0; i < job->count; i++) {
    const int64_t ahead = i + ROWS_AHEAD < job->count ? place_of(*job, i + ROWS_AHEAD) : -1;
    if (ahead >= 0) {
      for (int64_t line = 0; line < half; line += 64) __builtin_prefetch(job->codes + ahead * half + line);
      __builtin_prefetch(job->scales + ahead * groups);
    }
    const int64_t place = place_of(*job, i);
    if (place < 0) continue;
    put_entry(job->codes + place * half, job->scales + place * groups, job->width, job->out + i * job->width);
  }
  return 0;
}
