#include "../lanes.h"
#include "../pool.h"

struct AttentionBack {
  const float* q;         // [T, Q, H]
  const float* gradient;  // [T, Q, H]
  const float* value;     // [T, Q, H]
  const float* total;     // [T, Q]
  const float* window_weights;  // [T, Q, S]; null: none of the rest of the line is there
  const float* rows;      // [R, H] window entries
  const float* pick_weights;  // [T, Q, K]; null: no picks
  const int64_t* picked;  // [T, K], negative in empty slots
  const float* entries;   // [C, H]
  float* of_q;            // [T, Q, H]
  float* of_weight;       // [T, Q]
  float* of_rows;         // [chunks, chunk + window, H]; row 0 of a chunk is window - 1 before its first query
  float* of_entries;      // [chunks, C, H], zeros before
  int64_t num_queries, num_heads, width, window, span, tile, num_rows, num_slots, num_entries, chunk;
  int64_t first, first_row;  // positions of the first query and of the first window entry
  double scale;
};

namespace {

// what one query's heads hold while slots pass by
template <int VECTORS, int HEADS>
struct Query {
  v16 of_value[HEADS][VECTORS], q[HEADS][VECTORS], of_q[HEADS][VECTORS];
  float of_weight[HEADS];

  void read(const AttentionBack& job, int64_t place) {
    for (int h = 0; h < HEADS; h++) {
      const v16 total = splat(job.total[place + h]);
      v16 sum = v16{};
      for (int n = 0; n < VECTORS; n++) {
        const int64_t at = (place + h) * job.width + 16 * n;
        of_value[h][n] = load16(job.gradient + at) / total;
        q[h][n] = load16(job.q + at);
        of_q[h][n] = v16{};
        sum = fma16(of_value[h][n], load16(job.value + at), sum);
      }
      of_weight[h] = -sum16(sum);
      job.of_weight[place + h] = of_weight[h];
    }
  }

  void slot(const float* raw, int64_t step, const float* entry, float* of_entry, float scale) {
    float weight[HEADS];
    bool is_empty = true;
    for (int h = 0; h < HEADS; h++) {
      weight[h] = raw[h * step];
      is_empty = is_empty && weight[h] == 0.0f;
    }
    if (is_empty) return;
    v16 v[VECTORS], back[VECTORS];
    for (int n = 0; n < VECTORS; n++) {
      v[n] = load16(entry + 16 * n);
      back[n] = load16(of_entry + 16 * n);
    }
    for (int h = 0; h < HEADS; h++) {
      v16 dot = v[0] * of_value[h][0];
      for (int n = 1; n < VECTORS; n++) dot = fma16(v[n], of_value[h][n], dot);
      const v16 of_score = splat((sum16(dot) + of_weight[h]) * weight[h] * scale), w = splat(weight[h]);
      for (int n = 0; n < VECTORS; n++) {
        of_q[h][n] = fma16(of_score, v[n], of_q[h][n]);
        back[n] = fma16(w, of_value[h][n], fma16(of_score, q[h][n], back[n]));
      }
    }
    for (int n = 0; n < VECTORS; n++) store16(of_entry + 16 * n, back[n]);
  }

  void write_back(const AttentionBack& job, int64_t place) const {
    for (int h = 0; h < HEADS; h++)
      for (int n = 0; n < VECTORS; n++) store16(job.of_q + (place + h) * job.width + 16 * n, of_q[h][n]);
  }
};

template <int VECTORS, int HEADS>
static void query_back(const AttentionBack& job, int64_t t, int64_t head, float* of_rows, float* of_entries) {
  const int64_t place = t * job.num_heads + head, position = job.first + t;
  const float scale = (float)job.scale;
  Query<VECTORS, HEADS> query;
  query.read(job, place);
  const int64_t start = position / job.tile * job.tile - job.window;  // position of the query's first slot
  for (int64_t p = position - job.window + 1; p <= position; p++) {
    const int64_t row = p - job.first_row;
    if (row < 0 || row >= job.num_rows) continue;
    float* back = of_rows + (p - position + job.window - 1 + t % job.chunk) * job.width;
    query.slot(job.window_weights + place * job.span + p - start, job.span, job.rows + row * job.width, back, scale);
  }
  if (job.pick_weights)
    for (int64_t k = 0; k < job.num_slots; k++) {
      const int64_t entry = job.picked[t * job.num_slots + k];
      if (entry < 0) continue;
      query.slot(job.pick_weights + place * job.num_slots + k, job.num_slots, job.entries + entry * job.width,
                 of_entries + entry * job.width, scale);
    }
  query.write_back(job, place);
}

template <int VECTORS>
static void chunk_back(const AttentionBack& job, int64_t chunk) {
  float* of_rows = job.of_rows + chunk * (job.chunk + job.window - 1) * job.width;
  float* of_entries = job.of_entries + chunk * job.num_entries * job.width;
  const int64_t low = chunk * job.chunk, left = job.num_queries - low;
  memset(of_rows, 0, (job.chunk + job.window - 1) * job.width * sizeof(float));
  if (job.pick_weights) memset(of_entries, 0, job.num_entries * job.width * sizeof(float));
  for (int64_t t = low; t < low + (left < job.chunk ? left : job.chunk); t++) {
    int64_t head = 0;
    for (; head + 2 <= job.num_heads; head += 2) query_back<VECTORS, 2>(job, t, head, of_rows, of_entries);
    if (head < job.num_heads) query_back<VECTORS, 1>(job, t, head, of_rows, of_entries);
  }
}

}  // namespace

// 1 where the width has no kernel
HR_EXPORT(hr_train_attention_back)(const AttentionBack* job) {
  const int64_t chunks = (job->num_queries + job->chunk - 1) / job->chunk;
  if (job->width != 16 && job->width != 32 && job->width != 64 && job->width != 128) return 1;
  parallel(chunks, [&](int64_t chunk) {
    if (job->width == 16) chunk_back<1>(*job, chunk);
    if (job->width == 32) chunk_back<2>(*job, chunk);
    if (job->width == 64) chunk_back<4>(*job, chunk);
    if (job->width == 128) chunk_back<8>(*job, chunk);
  });
  return 0;
}
