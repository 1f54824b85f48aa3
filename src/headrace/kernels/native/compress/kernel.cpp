#include "../product/product.h"
#include "../quantise/fp4.h"
#include "../rows/rotate.h"
#include "../streams/streams.h"

struct Compress {
  const float* values;  // [n, H] of ratio 2; null at ratio 1
  const float* gates;
  const bf16* latents;  // [n, H] of ratio 1
  float* history;       // [depth, 2, H] values and gates by position of ratio 2
  int64_t depth;
  int64_t first, count;  // position of the first row, rows
  const float* norm;     // [H]
  const Matrix* key;     // bfloat16 [I, H]
  const float* key_norm;  // [I]
  const float* cos;       // [entries, P / 2]
  const float* sin;
  uint8_t* planes[4];    // value codes, value scales, key codes, key scales
  const int64_t* blocks;  // block of every `per_block` rows; null: row j lies at place j
  int64_t per_block;
  int64_t row, entries, skipped;  // first new row of the store, new rows, of those how many are there already
  int64_t width, key_width, rotated;
  double eps;
};

namespace {

static thread_local Scratch compress_scratch;

// softmax over the two gates of every dimension, weighted sum, rounded once
static void pool_pair(const float* a0, const float* g0, const float* a1, const float* g1, int64_t width, bf16* out) {
  for (int64_t d = 0; d < width; d += 16) {
    const v16 x = load16(g0 + d), y = load16(g1 + d), peak = max16(x, y);
    const v16 e = exp16(x - peak), f = exp16(y - peak), total = e + f;
    store_bf16(out + d, fma16(f / total, load16(a1 + d), e / total * load16(a0 + d)));
  }
}

static void store_entry(const Compress& job, int64_t place, const bf16* entry, const bf16* key) {
  for (int64_t d = 0; d < job.width; d += 16) {
    const v16 x = load_bf16(entry + d);
    const uint8_t byte = q4k_scale(x);
    const float scale = from_e4m3(u16{} + (uint32_t)byte)[0];
    store_e2m1(job.planes[0] + place * (job.width / 2) + d / 2, to_e2m1_grid(x / scale));
    job.planes[1][place * (job.width / 16) + d / 16] = byte;
  }
  for (int64_t d = 0; d < job.key_width; d += 32) {
    const v16 low = load_bf16(key + d), high = load_bf16(key + d + 16);
    const int exponent = q4i_exponent(low, high);
    const float scale = scale_of(exponent);
    uint8_t* codes = job.planes[2] + place * (job.key_width / 2) + d / 2;
    store_e2m1(codes, to_e2m1_grid(low / scale));
    store_e2m1(codes + 8, to_e2m1_grid(high / scale));
    job.planes[3][place * (job.key_width / 32) + d / 32] = (uint8_t)exponent;
  }
}

static void latent_of(const Compress& job, int64_t entry, bf16* out) {
  const int64_t h = job.width;
  if (!job.values) {
    memcpy(out, job.latents + entry * h, h * sizeof(bf16));
    return;
  }
  const int64_t low = 2 * (job.row + entry) - job.first;  // row of the first token, -1 where it came earlier
  const float* held = job.history + ((job.first + low) % job.depth) * 2 * h;
  const float* a0 = low < 0 ? held : job.values + low * h;
  const float* g0 = low < 0 ? held + h : job.gates + low * h;
  pool_pair(a0, g0, job.values + (low + 1) * h, job.gates + (low + 1) * h, h, out);
}

}  // namespace

HR_EXPORT(hr_compress)(const Compress* job) {
  const int64_t h = job->width, half = job->rotated / 2;
  Carver carve{compress_scratch.get(Carver::room(h * 2) + Carver::room(job->key_width * 2) +
                                    Carver::room(h * sizeof(code_t)))};
  if (!carve.at) return -1;
  bf16* latent = carve.take<bf16>(h);
  bf16* key = carve.take<bf16>(job->key_width);
  code_t* plain = carve.take<code_t>(h);
  for (int64_t i = job->skipped; i < job->entries; i++) {
    latent_of(*job, i, latent);
    norm_row(latent, job->norm, h, (float)job->eps, latent);
    plain_row(latent, h, plain);
    const code_t* a[1] = {plain};
    void* out[1] = {key};
    multiply(*job->key, 1, a, nullptr, out, AS_BF16);
    norm_row(key, job->key_norm, job->key_width, (float)job->eps, key);
    const float *cos = job->cos + i * half, *sin = job->sin + i * half;
    rotate_row(latent + h - job->rotated, cos, sin, half, 1.0f);
    rotate_row(key + job->key_width - job->rotated, cos, sin, half, 1.0f);
    const int64_t j = job->row + i;
    store_entry(*job, job->blocks ? job->blocks[j / job->per_block] * job->per_block + j % job->per_block : j, latent, key);
  }
  if (job->values)
    for (int64_t r = job->count > job->depth ? job->count - job->depth : 0; r < job->count; r++) {
      float* to = job->history + ((job->first + r) % job->depth) * 2 * h;
      memcpy(to, job->values + r * h, h * 4);
      memcpy(to + h, job->gates + r * h, h * 4);
    }
  return 0;
}
