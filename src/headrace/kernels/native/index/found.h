// What one row has found: entries, and the blocks that the candidate source keeps.
#pragma once
#include "best.h"
#include "keys.h"

namespace {

static inline i16 most(i16 a, i16 b) { return a > b ? a : b; }

struct Found {
  Best best, blocks;
  int64_t block_size;  // 0: blocks are not kept
  int64_t newest;      // block of the newest visible entry
  int64_t block = -1;  // the one that scores come from
  int32_t peak = LEAST_RANK;  // its largest so far

  // what no score at or below it can change
  float floor() const {
    const int32_t rank = block_size && blocks.floor < best.floor ? blocks.floor : best.floor;
    return rank == LEAST_RANK ? -HUGE_VALF : score_of(rank);
  }
  void end_block() {
    if (block >= 0 && block != newest) blocks.add(peak, block);
    block = -1;
  }
  // scores of keys `low` to `low` + 15; the last tile may have fewer
  void add(v16 scores, const Keys& keys, int64_t low) {
    const int64_t count = keys.count - low < 16 ? keys.count - low : 16;
    const i16 rank = ranks(scores), where = read<i16>(keys.positions + low);
    best.add(rank, where, 0xFFFFu >> (16 - count));
    if (!block_size) return;
    const int64_t first = where[0], last = where[15];
    if (block_size == 8 && count == 16 && first % 8 == 0 && last == first + 15) return add_pair(rank, first / 8);
    for (int64_t lane = 0; lane < count; lane++) {
      const int64_t its = where[lane] / block_size;
      if (its != block) end_block(), block = its, peak = LEAST_RANK;
      if (rank[lane] > peak) peak = rank[lane];
    }
  }
  // all scores of two blocks of eight
  void add_pair(i16 x, int64_t low) {
    end_block();
    if (!bits_of(x > blocks.floor)) return;
    x = most(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = most(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    x = most(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    const uint32_t marks = (low != newest) | (uint32_t)(low + 1 != newest) << 8;
    blocks.add(x, (IOTA >> 3) + (int32_t)low, marks);
  }
  // what was found at later positions
  void add(const Found& others) {
    best.add(others.best);
    blocks.add(others.blocks);
  }
  void end(int64_t* pool) {
    end_block();
    blocks.add(MOST_RANK, newest);
    blocks.put(pool);
  }
};

}  // namespace
