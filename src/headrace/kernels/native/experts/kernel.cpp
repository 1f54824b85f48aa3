#include "../product/product.h"
#include "../router/router.h"

struct Experts {
  const bf16* u;            // [T, D]
  bf16* out;                // [T, D]
  const Matrix* router;     // bfloat16 [E, D]
  const float* bias;        // [E]
  const float* image_bias;  // [E], for rows that `is_image` marks; or null
  const uint8_t* is_image;  // [T] or null
  const Matrix* gate;       // E matrices [F, D] each
  const Matrix* up;
  const Matrix* down;            // [D, F]
  const Matrix* shared_gate_up;  // [2 F, D]
  const Matrix* shared_down;     // [D, F]
  int64_t* picked;               // [T, K], written
  int64_t rows, width, hidden, count, per_token;
  double scale, limit;
};

namespace {

const int64_t EXPERT_ROWS = 256;
static thread_local Scratch expert_scratch;

struct ExpertRoom {
  code_t *codes, *plain, *hidden_codes;
  float *scales, *hidden_scales, *scores, *weights, *gate, *up, *part, *sums;
  bf16* hidden;
  const code_t** a;
  const float** s;
  void** to;
  int64_t *slots, *starts;

  static size_t size(const Experts& job, int64_t n) {
    const int64_t d = job.width, f = job.hidden;
    return Carver::room(n * d * sizeof(code_t)) * 2 + Carver::room(n * f * sizeof(code_t)) + Carver::room(n * d / 8) +
           Carver::room(n * f / 8) + Carver::room(n * job.count * 4) + Carver::room(n * job.per_token * 4) +
           2 * Carver::room(n * 2 * f * 4) + 2 * Carver::room(n * d * 4) + Carver::room(n * f * 2) +
           3 * Carver::room(n * 8) + Carver::room(n * job.per_token * 8) + Carver::room((job.count + 1) * 8);
  }
  ExpertRoom(const Experts& job, int64_t n, char* start) {
    Carver carve{start};
    const int64_t d = job.width, f = job.hidden;
    codes = carve.take<code_t>(n * d);
    plain = carve.take<code_t>(n * d);
    hidden_codes = carve.take<code_t>(n * f);
    scales = carve.take<float>(n * d / 32);
    hidden_scales = carve.take<float>(n * f / 32);
    scores = carve.take<float>(n * job.count);
    weights = carve.take<float>(n * job.per_token);
    gate = carve.take<float>(n * 2 * f);
    up = carve.take<float>(n * 2 * f);
    part = carve.take<float>(n * d);
    sums = carve.take<float>(n * d);
    hidden = carve.take<bf16>(n * f);
    a = carve.take<const code_t*>(n);
    s = carve.take<const float*>(n);
    to = carve.take<void*>(n);
    slots = carve.take<int64_t>(n * job.per_token);
    starts = carve.take<int64_t>(job.count + 1);
  }
};

// bf16(silu(min(gate, limit)) * clamp(up) * weight), rounded to Q8 for the down product
static void swiglu_row(const float* gate, const float* up, float weight, float limit, int64_t width, bf16* hidden) {
  for (int64_t f = 0; f < width; f += 16) {
    v16 g = load16(gate + f), u = load16(up + f);
    if (limit > 0) {
      g = g > splat(limit) ? splat(limit) : g;
      u = u > splat(limit) ? splat(limit) : u;
      u = u < splat(-limit) ? splat(-limit) : u;
    }
    store_bf16(hidden + f, g / (1.0f + exp16(-g)) * u * weight);
  }
}

static void route(const Experts& job, const ExpertRoom& room, int64_t low, int64_t n) {
  for (int64_t t = 0; t < n; t++) {
    plain_row(job.u + (low + t) * job.width, job.width, room.plain + t * job.width);
    room.a[t] = room.plain + t * job.width;
    room.to[t] = room.scores + t * job.count;
  }
  multiply(*job.router, n, room.a, nullptr, room.to, AS_FLOAT);
  for (int64_t t = 0; t < n; t++) {
    const bool is_image = job.image_bias && job.is_image && job.is_image[low + t];
    route_row(room.scores + t * job.count, is_image ? job.image_bias : job.bias, job.count, job.per_token,
              (float)job.scale, job.picked + (low + t) * job.per_token, room.weights + t * job.per_token);
  }
}

// rows of one expert: `count` of them, `slots` naming token and place, `weights` by slot or null
static void run_rows(const Experts& job, const ExpertRoom& room, const int64_t* slots, int64_t count, const Matrix& gate,
                     const Matrix* up, const Matrix& down, const float* weights) {
  const int64_t d = job.width, f = job.hidden;
  for (int64_t r = 0; r < count; r++) {
    const int64_t t = slots ? slots[r] / job.per_token : r;
    room.a[r] = room.codes + t * d;
    room.s[r] = room.scales + t * (d / 32);
    room.to[r] = room.gate + r * 2 * f;
  }
  multiply(gate, count, room.a, room.s, room.to, AS_ROUNDED_FLOAT);
  if (up) {
    for (int64_t r = 0; r < count; r++) room.to[r] = room.gate + r * 2 * f + f;
    multiply(*up, count, room.a, room.s, room.to, AS_ROUNDED_FLOAT);
  }
  for (int64_t r = 0; r < count; r++) {
    const float* row = room.gate + r * 2 * f;
    bf16* hidden = room.hidden + r * f;
    swiglu_row(row, row + f, weights ? weights[slots[r]] : 1.0f, (float)job.limit, f, hidden);
    quantise_row(hidden, f, room.hidden_codes + r * f, room.hidden_scales + r * (f / 32));
    room.a[r] = room.hidden_codes + r * f;
    room.s[r] = room.hidden_scales + r * (f / 32);
    room.to[r] = room.part + r * d;
  }
  multiply(down, count, room.a, room.s, room.to, AS_ROUNDED_FLOAT);
}

static void add_row(const float* part, int64_t width, float* sums) {
  for (int64_t d = 0; d < width; d += 16) store16(sums + d, load16(sums + d) + load16(part + d));
}

static void run_experts(const Experts& job, const ExpertRoom& room, int64_t low, int64_t n) {
  const int64_t d = job.width, k = job.per_token;
  for (int64_t t = 0; t < n; t++)
    quantise_row(job.u + (low + t) * d, d, room.codes + t * d, room.scales + t * (d / 32));
  route(job, room, low, n);
  const int64_t* picked = job.picked + low * k;
  memset(room.starts, 0, (job.count + 1) * 8);
  for (int64_t i = 0; i < n * k; i++) room.starts[picked[i] + 1]++;
  for (int64_t e = 0; e < job.count; e++) room.starts[e + 1] += room.starts[e];
  for (int64_t i = 0; i < n * k; i++) room.slots[room.starts[picked[i]]++] = i;
  memset(room.sums, 0, n * d * 4);
  for (int64_t e = 0; e < job.count; e++) {
    const int64_t start = e ? room.starts[e - 1] : 0, count = room.starts[e] - start;
    if (!count) continue;
    const int64_t* slots = room.slots + start;
    run_rows(job, room, slots, count, job.gate[e], job.up + e, job.down[e], room.weights);
    for (int64_t r = 0; r < count; r++) add_row(room.part + r * d, d, room.sums + (slots[r] / k) * d);
  }
  run_rows(job, room, nullptr, n, *job.shared_gate_up, nullptr, *job.shared_down, nullptr);
  for (int64_t t = 0; t < n; t++)
    for (int64_t at = 0; at < d; at += 16)
      store_bf16(job.out + (low + t) * d + at, load16(room.sums + t * d + at) + load16(room.part + t * d + at));
}

}  // namespace

HR_EXPORT(hr_experts)(const Experts* job) {
  const int64_t most = job->rows < EXPERT_ROWS ? job->rows : EXPERT_ROWS;
  char* start = expert_scratch.get(ExpertRoom::size(*job, most));
  if (!start) return -1;
  const ExpertRoom room(*job, most, start);
  for (int64_t low = 0; low < job->rows; low += most)
    run_experts(*job, room, low, job->rows - low < most ? job->rows - low : most);
  return 0;
}
