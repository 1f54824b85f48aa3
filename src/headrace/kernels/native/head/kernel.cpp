#include "../product/product.h"
#include "../streams/streams.h"

struct Head {
  const bf16* x;       // [T, 4, D]
  const float* pre;    // [T, 4]
  const float* norm;   // [D]
  const Matrix* matrix;  // bfloat16 [V, D]
  float* logits;       // [T, V]
  bf16* collapsed;     // [T, D] before the norm, or null
  int64_t rows, width;
  double eps;
};

namespace {
static thread_local Scratch head_scratch;
const int64_t HEAD_ROWS = 64;

static int64_t head_rows(const Head& job, int64_t low, int64_t count) {
  const int64_t d = job.width;
  Carver carve{head_scratch.get(Carver::room(d * sizeof(bf16)) + Carver::room(count * d * sizeof(code_t)) +
                                2 * Carver::room(count * sizeof(void*)))};
  if (!carve.at) return -1;
  bf16* u = carve.take<bf16>(d);
  code_t* plain = carve.take<code_t>(count * d);
  const code_t** a = carve.take<const code_t*>(count);
  void** out = carve.take<void*>(count);
  for (int64_t r = 0; r < count; r++) {
    const int64_t row = low + r;
    collapse_row(job.x + row * 4 * d, job.pre + 4 * row, d, u);
    if (job.collapsed) memcpy(job.collapsed + row * d, u, d * sizeof(bf16));
    norm_row(u, job.norm, d, (float)job.eps, u);
    plain_row(u, d, plain + r * d);
    a[r] = plain + r * d;
    out[r] = job.logits + row * job.matrix->rows;
  }
  multiply(*job.matrix, count, a, nullptr, out, AS_FLOAT);
  return 0;
}

}  // namespace

HR_EXPORT(hr_head)(const Head* job) {
  for (int64_t low = 0; low < job->rows; low += HEAD_ROWS)
    if (head_rows(*job, low, job->rows - low < HEAD_ROWS ? job->rows - low : HEAD_ROWS)) return -1;
  return 0;
}
