// What one row of queries is scored with: its codes, the keys on their way, the lists of what is best.
#pragma once
#include "../product/product.h"
#include "../rows/rotate.h"
#include "best.h"
#include "bounds.h"

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

struct IndexRoom {
  code_t* codes;        // [J, I] of one row
  float* factors;       // [J, I / 32]
  const code_t** a;     // [J]
  const float** s;      // [J]
  uint8_t* tile;        // 16 keys
  uint8_t* tile_scales;
  Best best, blocks;
  Keys keys;
#if defined(HR_AVX512)
  Bounds bounds;
  bool has_bounds;
#endif

  static size_t size(const Index& job) {
    size_t bytes = Carver::room(job.heads * job.width * sizeof(code_t)) + Carver::room(job.heads * job.width / 8) +
                   2 * Carver::room(job.heads * 8) + Carver::room(job.width * 8) + Carver::room(job.width / 2) +
                   Best::size(job.top_k) + Best::size(job.pool_blocks) + Keys::size(job.width);
#if defined(HR_AVX512)
    bytes += Bounds::size(job.heads, job.width);
#endif
    return bytes;
  }
  IndexRoom(const Index& job, char* start) {
    Carver carve{start};
    codes = carve.take<code_t>(job.heads * job.width);
    factors = carve.take<float>(job.heads * job.width / 32);
    a = carve.take<const code_t*>(job.heads);
    s = carve.take<const float*>(job.heads);
    tile = carve.take<uint8_t>(job.width * 8);
    tile_scales = carve.take<uint8_t>(job.width / 2);
    best.carve(carve, job.top_k);
    blocks.carve(carve, job.pool_blocks);
    keys.carve(carve, job.width);
    for (int64_t h = 0; h < job.heads; h++) a[h] = codes + h * job.width, s[h] = factors + h * (job.width / 32);
#if defined(HR_AVX512)
    bounds.carve(carve, job.heads, job.width);
#endif
  }
  // scores for the queries of another room, which stays as it is
  void share_queries(const IndexRoom& of) {
    codes = of.codes, factors = of.factors, a = of.a, s = of.s;
#if defined(HR_AVX512)
    has_bounds = of.has_bounds;
    bounds.share_queries(of.bounds);
#endif
  }
};

// rotates one row's queries and rounds them to Q4I
static void prepare_queries(const Index& job, IndexRoom& room, int64_t row) {
  const int64_t half = job.rotated / 2, width = job.width, groups = width / 32;
#if defined(HR_AVX512)
  room.has_bounds = job.heads <= 1024 && job.width <= 32 * MOST_GROUPS;
#endif
  for (int64_t h = 0; h < job.heads; h++) {
    bf16* q = job.q + (row * job.heads + h) * width;
    rotate_row(q + width - job.rotated, job.cos + row * half, job.sin + row * half, half, 1.0f);
    for (int64_t g = 0; g < groups; g++) {
      const v16 low = load_bf16(q + 32 * g), high = load_bf16(q + 32 * g + 16);
      const int exponent = q4i_exponent(low, high);
      const float scale = scale_of(exponent);
      const v16 low_code = to_e2m1_grid(low / scale), high_code = to_e2m1_grid(high / scale);
      store_codes(room.codes + h * width + 32 * g, low_code);
      store_codes(room.codes + h * width + 32 * g + 16, high_code);
      room.factors[h * groups + g] = scale;
#if defined(HR_AVX512)
      if (room.has_bounds) room.has_bounds = room.bounds.put_query(h * groups + g, low_code, high_code, exponent);
#endif
    }
#if defined(HR_AVX512)
    if (room.has_bounds) room.has_bounds = room.bounds.put_weight(h, job.weights[row * job.heads + h]);
#endif
  }
}

}  // namespace
