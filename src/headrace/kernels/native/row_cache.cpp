// Finds rows in a set-associative cache, and puts rows in: what memory/row_cache.py does, in one pass.
#include <cstdint>
#include <cstring>
#include <vector>

#define HR_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

const int64_t WAYS = 16;

int64_t set_of(int64_t key, int64_t num_sets) {
  return static_cast<int64_t>(((static_cast<uint64_t>(key) * 0x9E3779B97F4A7C15ull) >> 32) % static_cast<uint64_t>(num_sets));
}

// The way of a key in its set, -1 where it is not kept. Keys are stored plus one; 0 is a free place.
int64_t way_of(const int64_t* kept, int64_t key) {
  for (int64_t way = 0; way < WAYS; ++way)
    if (kept[way] == key + 1) return way;
  return -1;
}

// CLOCK: the first way from the hand on that was not used; those it passes are not spared again.
int64_t evict(uint8_t* used, uint8_t* hand) {
  for (int64_t passed = 0; passed < WAYS; ++passed) {
    const int64_t way = (*hand + passed) % WAYS;
    if (!used[way]) {
      *hand = static_cast<uint8_t>((way + 1) % WAYS);
      return way;
    }
    used[way] = 0;
  }
  const int64_t way = *hand;
  *hand = static_cast<uint8_t>((way + 1) % WAYS);
  return way;
}

}  // namespace

// keys [count] int64; kept [num_sets, 16] int64; used [num_sets, 16] bytes; places [count] int64, written.
HR_EXPORT int64_t hr_row_cache_find(
    int64_t keys_at, int64_t count, int64_t kept_at, int64_t used_at, int64_t num_sets, int64_t places_at) {
  const int64_t* keys = reinterpret_cast<const int64_t*>(keys_at);
  const int64_t* kept = reinterpret_cast<const int64_t*>(kept_at);
  uint8_t* used = reinterpret_cast<uint8_t*>(used_at);
  int64_t* places = reinterpret_cast<int64_t*>(places_at);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = set_of(keys[i], num_sets) * WAYS;
    const int64_t way = way_of(kept + first, keys[i]);
    places[i] = way < 0 ? -1 : first + way;
    if (way >= 0) used[first + way] = 1;
  }
  return 0;
}

// keys [count] int64, none twice; codes [count, code_bytes] and scales [count, scale_bytes]; then the cache's arrays.
// A row counts as kept if it was so before the call; a set takes the first 16 of its new rows.
HR_EXPORT int64_t hr_row_cache_add(
    int64_t keys_at, int64_t count, int64_t codes_at, int64_t code_bytes, int64_t scales_at, int64_t scale_bytes,
    int64_t kept_at, int64_t used_at, int64_t hands_at, int64_t num_sets, int64_t kept_codes, int64_t kept_scales) {
  const int64_t* keys = reinterpret_cast<const int64_t*>(keys_at);
  int64_t* kept = reinterpret_cast<int64_t*>(kept_at);
  uint8_t* used = reinterpret_cast<uint8_t*>(used_at);
  uint8_t* hands = reinterpret_cast<uint8_t*>(hands_at);
  const char* codes = reinterpret_cast<const char*>(codes_at);
  const char* scales = reinterpret_cast<const char*>(scales_at);
  char* code_places = reinterpret_cast<char*>(kept_codes);
  char* scale_places = reinterpret_cast<char*>(kept_scales);
  std::vector<int64_t> fresh;
  fresh.reserve(count);
  for (int64_t i = 0; i < count; ++i)
    if (way_of(kept + set_of(keys[i], num_sets) * WAYS, keys[i]) < 0) fresh.push_back(i);
  std::vector<uint8_t> taken(num_sets);
  for (const int64_t i : fresh) {
    const int64_t set = set_of(keys[i], num_sets);
    if (taken[set] == WAYS) continue;
    ++taken[set];
    const int64_t place = set * WAYS + evict(used + set * WAYS, hands + set);
    kept[place] = keys[i] + 1;
    used[place] = 0;
    std::memcpy(code_places + place * code_bytes, codes + i * code_bytes, code_bytes);
    std::memcpy(scale_places + place * scale_bytes, scales + i * scale_bytes, scale_bytes);
  }
  return 0;
}
