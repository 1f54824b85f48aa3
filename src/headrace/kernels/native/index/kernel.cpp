#include <algorithm>
#include <atomic>

#include "../product/product.h"
#include "../quantise/fp4.h"
#include "../rows/rotate.h"

struct IndexSegment {
  int64_t offset, count, first;  // rows in the batch, position of the first
  const uint8_t* codes;          // keys [places, I / 2]
  const uint8_t* scales;         // [places, I / 32]
  const int64_t* blocks;         // block of every `per_block` keys; null: key j lies at place j
  int64_t per_block;
  int64_t* picks;  // [count, K], written
  int64_t* pool;   // [count, B] kept blocks: written by the candidate source, read by a reindex layer; or null
};

struct Index {
  bf16* q;              // [T, J, I], rotated in place
  const bf16* weights;  // [T, J]
  const float* cos;
  const float* sin;
  const IndexSegment* segments;
  int64_t num_segments, heads, width, rotated, ratio, top_k;
  int64_t pool_blocks, block_size;  // 0: no pool
  int64_t writes_pool;
  int64_t scored;  // written: scores of visible entries
};

namespace {

static thread_local Scratch index_scratch;
const int64_t HIDDEN = -((int64_t)1 << 62);

struct IndexRoom {
  code_t* codes;        // [J, I] of one row
  float* factors;       // [J, I / 32]
  const code_t** a;     // [J]
  const float** s;      // [J]
  uint8_t* tile;        // 16 keys
  uint8_t* tile_scales;
  int64_t* best;   // packed score and position
  int64_t* peaks;  // one per block
  int64_t capacity;

  static size_t size(const Index& job, int64_t entries) {
    return Carver::room(job.heads * job.width * sizeof(code_t)) + Carver::room(job.heads * job.width / 8) +
           2 * Carver::room(job.heads * 8) + Carver::room(job.width * 8) + Carver::room(job.width / 2) +
           Carver::room((2 * job.top_k + 4096) * 8) +
           Carver::room((job.pool_blocks ? entries / job.block_size + 1 : 0) * 8);
  }
  IndexRoom(const Index& job, int64_t entries, char* start) {
    Carver carve{start};
    codes = carve.take<code_t>(job.heads * job.width);
    factors = carve.take<float>(job.heads * job.width / 32);
    a = carve.take<const code_t*>(job.heads);
    s = carve.take<const float*>(job.heads);
    tile = carve.take<uint8_t>(job.width * 8);
    tile_scales = carve.take<uint8_t>(job.width / 2);
    capacity = 2 * job.top_k + 4096;
    best = carve.take<int64_t>(capacity);
    peaks = carve.take<int64_t>(job.pool_blocks ? entries / job.block_size + 1 : 0);
    for (int64_t h = 0; h < job.heads; h++) a[h] = codes + h * job.width, s[h] = factors + h * (job.width / 32);
  }
};

// rotates one row's queries and rounds them to Q4I
static void prepare_queries(const Index& job, const IndexRoom& room, int64_t row) {
  const int64_t half = job.rotated / 2, width = job.width;
  for (int64_t h = 0; h < job.heads; h++) {
    bf16* q = job.q + (row * job.heads + h) * width;
    rotate_row(q + width - job.rotated, job.cos + row * half, job.sin + row * half, half, 1.0f);
    for (int64_t d = 0; d < width; d += 32) {
      const v16 low = load_bf16(q + d), high = load_bf16(q + d + 16);
      const int exponent = q4i_exponent(low, high);
      const float scale = scale_of(exponent);
      store_codes(room.codes + h * width + d, to_e2m1_grid(low / scale));
      store_codes(room.codes + h * width + d + 16, to_e2m1_grid(high / scale));
      room.factors[h * (width / 32) + d / 32] = scale;
    }
  }
}

static inline int64_t pack(float score, int64_t position) {
  const float plain = score + 0.0f;  // -0 and +0 tie
  const int32_t bits = read<int32_t>(&plain);
  const int32_t ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF);
  return (int64_t)(((uint64_t)(uint32_t)ordered << 32) | (0xFFFFFFFFull - (uint64_t)position));
}
static inline int64_t position_of(int64_t packed) { return (int64_t)(0xFFFFFFFFull - ((uint64_t)packed & 0xFFFFFFFFull)); }

template <int HEADS_AT_ONCE>
static inline void add_heads(const Matrix& keys, const IndexRoom& room, const bf16* weights, int64_t head, v16& total) {
  v16 dots[HEADS_AT_ONCE];
  one_tile<FP4, HEADS_AT_ONCE>(keys, 0, room.a + head, room.s + head, dots);
  for (int h = 0; h < HEADS_AT_ONCE; h++) {
    v16 dot = round_bf16(dots[h]);
    dot = dot < splat(0.0f) ? v16{} : dot;
    total = total + round_bf16(dot * wide(weights[head + h]));
  }
}

// scores of up to 16 keys, bfloat16 values
static v16 score_keys(const Index& job, const IndexSegment& segment, const IndexRoom& room, const bf16* weights,
                      const int64_t* positions, int64_t count) {
  const int64_t words = job.width / 8, groups = job.width / 32;
  int64_t block = -1, moved = 0;
  for (int64_t i = 0; i < 16; i++) {
    const int64_t j = positions[i < count ? i : 0];
    if (segment.blocks && (j < block * segment.per_block || j >= (block + 1) * segment.per_block)) {
      block = j / segment.per_block;
      moved = (segment.blocks[block] - block) * segment.per_block;
    }
    const int64_t place = j + moved;
    const uint8_t* codes = segment.codes + place * (job.width / 2);
    for (int64_t w = 0; w < words; w++) memcpy(room.tile + 64 * w + 4 * i, codes + 4 * w, 4);
    for (int64_t g = 0; g < groups; g++) room.tile_scales[16 * g + i] = segment.scales[place * groups + g];
  }
  const Matrix keys = {room.tile, room.tile_scales, 16, job.width, FP4};
  v16 total = v16{};
  int64_t head = 0;
  for (; head + MOST_ROWS <= job.heads; head += MOST_ROWS) add_heads<MOST_ROWS>(keys, room, weights, head, total);
  for (; head < job.heads; head++) add_heads<1>(keys, room, weights, head, total);
  return round_bf16(total);
}

static inline float score_of(int64_t packed) {
  const int32_t ordered = (int32_t)(packed >> 32), bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF);
  return read<float>(&bits);
}

// the largest of two blocks of eight, at the positions from `first` on
static inline void put_peaks(const IndexRoom& room, int64_t first, v16 x) {
  x = max16(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  x = max16(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  x = max16(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  room.peaks[first / 8] = pack(x[0], first);
  room.peaks[first / 8 + 1] = pack(x[8], first + 8);
}

static inline bool is_number16(v16 x) { return largest_bits16((i16)x & 0x7FFFFFFF) <= 0x7F800000u; }

struct Best {
  int64_t* list;
  int64_t count, wanted, capacity, threshold;
  float floor = -HUGE_VALF;  // score of the threshold
  void add(int64_t packed) {
    if (packed <= threshold) return;
    list[count++] = packed;
    if (count == capacity) cut();
  }
  void cut() {
    if (count <= wanted) return;
    std::nth_element(list, list + wanted - 1, list + count, [](int64_t a, int64_t b) { return a > b; });
    threshold = list[wanted - 1];
    floor = score_of(threshold);
    count = wanted;
  }
};

// positions (or blocks) of the best, ascending, -1 after
static void put_best(Best& best, int64_t* out) {
  best.cut();
  for (int64_t i = 0; i < best.count; i++) out[i] = position_of(best.list[i]);
  std::sort(out, out + best.count);
  for (int64_t i = best.count; i < best.wanted; i++) out[i] = -1;
}

static void keep_blocks(const Index& job, const IndexRoom& room, int64_t visible, int64_t* out) {
  const int64_t newest = (visible - 1) / job.block_size, count = newest + 1;
  for (int64_t b = 0; b < count; b++)
    room.peaks[b] = (room.peaks[b] & ~(int64_t)0xFFFFFFFF) | (int64_t)(0xFFFFFFFFull - (uint64_t)b);
  room.peaks[newest] = ((int64_t)0x7FFFFFFF << 32) | (int64_t)(0xFFFFFFFFull - (uint64_t)newest);
  Best best{room.peaks, count, job.pool_blocks, count + 1, HIDDEN};
  put_best(best, out);
}

static int64_t scan_row(const Index& job, const IndexSegment& segment, const IndexRoom& room, int64_t i, int64_t visible) {
  const bf16* weights = job.weights + (segment.offset + i) * job.heads;
  const bool is_open = job.pool_blocks && visible > job.pool_blocks * job.block_size;
  Best best{room.best, 0, job.top_k, room.capacity, HIDDEN};
  int64_t scored = 0, waiting = 0, positions[16];
  int64_t* pool = segment.pool ? segment.pool + i * job.pool_blocks : nullptr;
  const auto flush = [&]() {
    const v16 scores = score_keys(job, segment, room, weights, positions, waiting);
    const bool has_peaks = is_open && job.writes_pool, is_whole = waiting == 16 && job.block_size == 8;
    // positions only grow, so an equal score never displaces a kept one; NaN goes the long way
    const bool is_poor = !(largest16(scores) > best.floor) && is_number16(scores);
    if (is_poor && (!has_peaks || is_whole)) {
      if (has_peaks) put_peaks(room, positions[0], scores);
      scored += waiting;
      waiting = 0;
      return;
    }
    for (int64_t lane = 0; lane < waiting; lane++) {
      const int64_t packed = pack(scores[lane], positions[lane]);
      best.add(packed);
      if (has_peaks) {
        int64_t& peak = room.peaks[positions[lane] / job.block_size];
        if (positions[lane] % job.block_size == 0 || packed > peak) peak = packed;
      }
    }
    scored += waiting;
    waiting = 0;
  };
  const auto take = [&](int64_t position) {
    positions[waiting++] = position;
    if (waiting == 16) flush();
  };
  if (is_open && !job.writes_pool) {
    for (int64_t b = 0; b < job.pool_blocks && pool[b] >= 0; b++)
      for (int64_t j = pool[b] * job.block_size; j < (pool[b] + 1) * job.block_size && j < visible; j++) take(j);
  } else {
    for (int64_t j = 0; j < visible; j++) take(j);
  }
  if (waiting) flush();
  if (is_open && job.writes_pool) keep_blocks(job, room, visible, pool);
  put_best(best, segment.picks + i * job.top_k);
  return scored;
}

// row `i` of a segment; returns how many scores were computed, -1 where there is no memory left
static int64_t select_row(const Index& job, const IndexSegment& segment, int64_t i) {
  const int64_t visible = (segment.first + i + 1) / job.ratio;
  int64_t* picks = segment.picks + i * job.top_k;
  if (job.writes_pool)
    for (int64_t b = 0; b < job.pool_blocks; b++) segment.pool[i * job.pool_blocks + b] = -1;
  if (visible <= job.top_k) {
    for (int64_t k = 0; k < job.top_k; k++) picks[k] = k < visible ? k : -1;
    return 0;
  }
  char* start = index_scratch.get(IndexRoom::size(job, visible));
  if (!start) return -1;
  const IndexRoom room(job, visible, start);
  prepare_queries(job, room, segment.offset + i);
  return scan_row(job, segment, room, i, visible);
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
        if (found < 0) has_failed = true;
        scored += found;
      }
    });
  }
  job->scored = scored;
  return has_failed ? -1 : 0;
}
