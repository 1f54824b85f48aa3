// Up to 64 stored index keys on their way to scores, in ascending order of position.
#pragma once
#include "../lanes.h"

struct IndexSegment {
  int64_t offset, count, first;  // rows in the batch, position of the first
  const uint8_t* codes;          // keys [places, I / 2]
  const uint8_t* scales;         // [places, I / 32]
  const int64_t* blocks;         // block of every `per_block` keys; null: key j lies at place j
  int64_t per_block;
  int64_t* picks;  // [count, K], written
  int64_t* pool;   // [count, B] kept blocks: written by the candidate source, read by a reindex layer; or null
};

namespace {

constexpr int64_t KEYS = 64, OCTETS = KEYS / 8;
static const i16 IOTA = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr int64_t KEYS_AHEAD = 256, BLOCKS_AHEAD = 24;

// Eights of keys one behind the other, where they are stored or, if they lie apart, copied.
struct Keys {
  int64_t count;
  bool is_run;         // 64 of them one behind the other
  int32_t* positions;  // [64]
  const uint8_t* codes[OCTETS];
  const uint8_t* scales[OCTETS];
  uint8_t* own_codes;   // [64, I / 2]
  uint8_t* own_scales;  // [64, I / 32]

  static size_t size(int64_t width) {
    return Carver::room(KEYS * 4) + Carver::room(KEYS * width / 2) + Carver::room(KEYS * width / 32);
  }
  void carve(Carver& from, int64_t width) {
    count = 0;
    positions = from.take<int32_t>(KEYS);
    own_codes = from.take<uint8_t>(KEYS * width / 2);
    own_scales = from.take<uint8_t>(KEYS * width / 32);
  }
  const uint8_t* codes_of(int64_t i, int64_t width) const { return codes[i / 8] + i % 8 * (width / 2); }
  const uint8_t* scales_of(int64_t i, int64_t width) const { return scales[i / 8] + i % 8 * (width / 32); }

  // Keys `low` to `high` - 1, at most as many as there is room for, behind those that are there; returns the first that
  // is left out.
  int64_t take(const IndexSegment& segment, int64_t width, int64_t low, int64_t high) {
    while (low < high && count < KEYS) {
      int64_t end = high, moved = 0;
      if (segment.blocks) {
        const int64_t block = low / segment.per_block;
        moved = (segment.blocks[block] - block) * segment.per_block;
        if ((block + 1) * segment.per_block < end) end = (block + 1) * segment.per_block;
      }
      if (end > low + KEYS - count) end = low + KEYS - count;
      is_run = end - low == KEYS;
      if (is_run)
        low = put_run(segment, width, low, low + moved);
      else
        for (; low < end; low += put(segment, width, low, end - low, low + moved)) {}
    }
    return low;
  }

  int64_t put_run(const IndexSegment& segment, int64_t width, int64_t position, int64_t place) {
    const int64_t half = width / 2, groups = width / 32;
    const uint8_t *from = segment.codes + place * half, *factors = segment.scales + place * groups;
    for (int64_t i = 0; i < OCTETS; i++) codes[i] = from + 8 * i * half, scales[i] = factors + 8 * i * groups;
    for (int64_t i = 0; i < KEYS; i += 16) write(positions + i, IOTA + (int32_t)(position + i));
    count = KEYS;
    return position + KEYS;
  }

  // eight keys, or one that is copied
  int64_t put(const IndexSegment& segment, int64_t width, int64_t position, int64_t left, int64_t place) {
    const int64_t half = width / 2, groups = width / 32, octet = count / 8;
    const uint8_t *from = segment.codes + place * half, *factors = segment.scales + place * groups;
    if (count % 8 == 0 && left >= 8) {
      codes[octet] = from, scales[octet] = factors;
      write(positions + count, (e8){} + (int32_t)position + e8{0, 1, 2, 3, 4, 5, 6, 7});
      count += 8;
      return 8;
    }
    codes[octet] = own_codes + 8 * octet * half, scales[octet] = own_scales + 8 * octet * groups;
    memcpy(own_codes + count * half, from, half);
    memcpy(own_scales + count * groups, factors, groups);
    positions[count++] = (int32_t)position;
    return 1;
  }

  // fills the last tile of 16 up with copies of its first key; they are not counted
  void pad(int64_t width) {
    const int64_t half = width / 2, groups = width / 32, first = count / 16 * 16;
    for (int64_t i = count; i % 16; i++) {
      codes[i / 8] = own_codes + i / 8 * 8 * half, scales[i / 8] = own_scales + i / 8 * 8 * groups;
      memcpy(own_codes + i * half, codes_of(first, width), half);
      memcpy(own_scales + i * groups, scales_of(first, width), groups);
      positions[i] = positions[first];
    }
  }

 private:
  typedef int32_t e8 __attribute__((vector_size(32)));
};

// asks for `count` keys from `position` on, which lie one behind the other
static inline void ask_for(const IndexSegment& segment, int64_t width, int64_t position, int64_t count) {
  if (segment.blocks) {
    const int64_t block = position / segment.per_block;
    position += (segment.blocks[block] - block) * segment.per_block;
  }
  const uint8_t* at = segment.codes + position * (width / 2);
  for (int64_t line = 0; line < count * width / 2; line += 64) __builtin_prefetch(at + line);
  __builtin_prefetch(segment.scales + position * (width / 32));
}

}  // namespace
