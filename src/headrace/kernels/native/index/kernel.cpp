#include <atomic>
#include <vector>

#include "found.h"
#include "room.h"

namespace {

static thread_local Scratch index_scratch, rooms_scratch;

static inline v16 add_term(v16 total, v16 dot, bf16 weight) {
  dot = round_bf16(dot);
  dot = dot < splat(0.0f) ? v16{} : dot;
  return total + round_bf16(dot * wide(weight));
}

template <int HEADS_AT_ONCE>
static inline void add_heads(const Matrix& keys, const IndexRoom& room, const bf16* weights, int64_t head, v16& total) {
  v16 dots[HEADS_AT_ONCE];
  one_tile<FP4, HEADS_AT_ONCE>(keys, 0, room.a + head, room.s + head, dots);
  for (int h = 0; h < HEADS_AT_ONCE; h++) total = add_term(total, dots[h], weights[head + h]);
}

// scores of 16 keys from `low` on, bfloat16 values
static v16 score_keys(const Index& job, const IndexRoom& room, const bf16* weights, int64_t low) {
  const int64_t words = job.width / 8, groups = job.width / 32;
  for (int64_t i = 0; i < 16; i++) {
    const uint8_t* codes = room.keys.codes_of(low + i, job.width);
    const uint8_t* scales = room.keys.scales_of(low + i, job.width);
    for (int64_t w = 0; w < words; w++) memcpy(room.tile + 64 * w + 4 * i, codes + 4 * w, 4);
    for (int64_t g = 0; g < groups; g++) room.tile_scales[16 * g + i] = scales[g];
  }
  const Matrix keys = {room.tile, room.tile_scales, 16, job.width, FP4};
  v16 total = v16{};
  int64_t head = 0;
  for (; head + MOST_ROWS <= job.heads; head += MOST_ROWS) add_heads<MOST_ROWS>(keys, room, weights, head, total);
  for (; head < job.heads; head++) add_heads<1>(keys, room, weights, head, total);
  return round_bf16(total);
}

static inline bool is_number16(v16 x) { return largest_bits16((i16)x & 0x7FFFFFFF) <= 0x7F800000u; }

#if defined(HR_AVX512)
// adds what is above its bound; false where the keys must be scored another way
static bool score_above(const Index& job, IndexRoom& room, const bf16* weights, Found& found) {
  Bounds& bounds = room.bounds;
  if (!room.has_bounds || !find_bounds(bounds, room.keys, job.heads, job.width)) return false;
  for (int64_t tile = 0; 16 * tile < room.keys.count; tile++) {
    if (!_mm512_cmp_ps_mask((__m512)bounds.sums[tile], _mm512_set1_ps(found.floor()), _CMP_GT_OQ)) continue;
    found.add(score_tile(bounds, weights, job.heads, tile), room.keys, 16 * tile);
  }
  return true;
}
#endif

// adds the keys that wait
static void score_waiting(const Index& job, IndexRoom& room, const bf16* weights, Found& found) {
  if (room.keys.count % 16) room.keys.pad(job.width);
#if defined(HR_AVX512)
  if (score_above(job, room, weights, found)) return;
#endif
  for (int64_t low = 0; low < room.keys.count; low += 16) {
    const v16 scores = score_keys(job, room, weights, low);
    // NaN goes the long way
    if (largest16(scores) > found.floor() || !is_number16(scores)) found.add(scores, room.keys, low);
  }
}

// Scores keys `low` to `high` - 1, or those of the kept blocks, and returns how many there were.
static int64_t scan(const Index& job, const IndexSegment& segment, IndexRoom& room, const bf16* weights, int64_t low,
                    int64_t high, const int64_t* kept, Found& found) {
  int64_t scored = 0;
  const auto flush = [&]() {
    score_waiting(job, room, weights, found);
    scored += room.keys.count;
    room.keys.count = 0;
  };
  const auto take = [&](int64_t from, int64_t to) {
    while (from < to) {
      if (from + KEYS_AHEAD + KEYS <= to) ask_for(segment, job.width, from + KEYS_AHEAD, KEYS);
      from = room.keys.take(segment, job.width, from, to);
      if (room.keys.count == KEYS) flush();
    }
  };
  if (!kept) take(low, high);
  for (int64_t b = 0; kept && b < job.pool_blocks && kept[b] >= 0; b++) {
    const int64_t ahead = b + BLOCKS_AHEAD < job.pool_blocks ? kept[b + BLOCKS_AHEAD] : -1;
    if (ahead >= 0) ask_for(segment, job.width, ahead * job.block_size, job.block_size);
    const int64_t first = kept[b] * job.block_size, end = first + job.block_size;
    take(first, end < high ? end : high);
  }
  if (room.keys.count) flush();
  return scored;
}

constexpr int64_t PIECE = 16384;  // keys that are worth a thread's while

// The same for all keys below `visible`, by several threads; -1 where there is no memory left.
static int64_t scan_together(const Index& job, const IndexSegment& segment, const IndexRoom& room, const bf16* weights,
                             int64_t visible, int64_t pieces, Found& found) {
  const int64_t step = (visible / pieces / (KEYS * job.block_size) + 1) * KEYS * job.block_size;
  const size_t size = IndexRoom::size(job);
  char* start = rooms_scratch.get(pieces * size);
  if (!start) return -1;
  std::vector<Found> parts(pieces, found);
  std::atomic<int64_t> scored{0};
  parallel(pieces, [&](int64_t piece) {
    IndexRoom own(job, start + piece * size);
    own.share_queries(room);
    Found& part = parts[piece];
    part.best = own.best, part.blocks = own.blocks;
    const int64_t low = piece * step, high = low + step < visible ? low + step : visible;
    if (low < high) scored += scan(job, segment, own, weights, low, high, nullptr, part);
    part.end_block();
  });
  for (const Found& part : parts) found.add(part);
  return scored;
}

// row `i` of a segment; returns how many scores were computed, -1 where there is no memory left
static int64_t select_row(const Index& job, const IndexSegment& segment, int64_t i) {
  const int64_t visible = (segment.first + i + 1) / job.ratio, row = segment.offset + i;
  int64_t *picks = segment.picks + i * job.top_k, *pool = segment.pool ? segment.pool + i * job.pool_blocks : nullptr;
  if (job.writes_pool)
    for (int64_t b = 0; b < job.pool_blocks; b++) pool[b] = -1;
  if (visible <= job.top_k) {
    for (int64_t k = 0; k < job.top_k; k++) picks[k] = k < visible ? k : -1;
    return 0;
  }
  char* start = index_scratch.get(IndexRoom::size(job));
  if (!start) return -1;
  IndexRoom room(job, start);
  prepare_queries(job, room, row);
  const bf16* weights = job.weights + row * job.heads;
  const bool is_open = job.pool_blocks && visible > job.pool_blocks * job.block_size;
  Found found{room.best, room.blocks, 0, (visible - 1) / job.block_size};
  if (is_open && job.writes_pool) found.block_size = job.block_size;
  const int64_t* kept = is_open && !job.writes_pool ? pool : nullptr;
  const int64_t pieces = segment.count > 1 || kept ? 1 : worth(visible * job.heads * job.width, visible / PIECE);
  const int64_t scored = pieces > 1 ? scan_together(job, segment, room, weights, visible, pieces, found)
                                    : scan(job, segment, room, weights, 0, visible, kept, found);
  if (found.block_size) found.end(pool);
  found.best.put(picks);
  return scored;
}

}  // namespace

HR_EXPORT(hr_index)(Index* job) {
  std::atomic<int64_t> scored{0};
  std::atomic<bool> has_failed{false};
  for (int64_t s = 0; s < job->num_segments; s++) {
    const IndexSegment& segment = job->segments[s];
    const int64_t entries = (segment.first + segment.count) / job->ratio;
    const int64_t rows = segment.count, pieces = worth(rows * entries * job->heads * job->width, rows);
    parallel(pieces, [&](int64_t piece) {
      for (int64_t i = rows * piece / pieces; i < rows * (piece + 1) / pieces; i++) {
        const int64_t found = select_row(*job, segment, i);
        if (found < 0)
          has_failed = true;
        else
          scored += found;
      }
    });
  }
  job->scored = scored;
  return has_failed ? -1 : 0;
}
