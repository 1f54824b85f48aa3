#include "product.h"

struct Product {
  const Matrix* matrix;  // `count` of them, each with columns of x and out of its own
  const bf16* x;
  void* out;
  int64_t rows, x_stride, out_stride;  // strides in elements
  int64_t is_quantised;                // round x to E4M3 with a scale per 32 columns first
  int64_t result;                      // AS_BF16 or AS_FLOAT
  int64_t count, x_step, out_step;     // elements between the columns of one matrix and the next
};

namespace {
static thread_local Scratch product_scratch;
const int64_t ROWS_AT_ONCE = 256;

static int64_t run_product(const Product* job, int64_t group) {
  const Matrix& w = job->matrix[group];
  const int64_t most = job->rows < ROWS_AT_ONCE ? job->rows : ROWS_AT_ONCE;
  const int64_t groups = w.width / 32;
  const size_t needed = Carver::room(most * w.width * sizeof(code_t)) + Carver::room(most * groups * 4) +
                        3 * Carver::room(most * sizeof(void*));
  Carver carve{product_scratch.get(needed)};
  if (!carve.at) return -1;
  code_t* codes = carve.take<code_t>(most * w.width);
  float* scales = carve.take<float>(most * groups);
  const code_t** a = carve.take<const code_t*>(most);
  const float** s = carve.take<const float*>(most);
  void** out = carve.take<void*>(most);
  const int64_t size = job->result == AS_BF16 ? 2 : 4;
  for (int64_t low = 0; low < job->rows; low += most) {
    const int64_t count = job->rows - low < most ? job->rows - low : most;
    for (int64_t r = 0; r < count; r++) {
      const bf16* x = job->x + (low + r) * job->x_stride + group * job->x_step;
      a[r] = codes + r * w.width;
      s[r] = scales + r * groups;
      out[r] = (char*)job->out + ((low + r) * job->out_stride + group * job->out_step) * size;
      if (job->is_quantised)
        quantise_row(x, w.width, codes + r * w.width, scales + r * groups);
      else
        plain_row(x, w.width, codes + r * w.width);
    }
    multiply(w, count, a, job->is_quantised ? s : nullptr, out, (int32_t)job->result);
  }
  return 0;
}

}  // namespace

HR_EXPORT(hr_product)(const Product* job) {
  for (int64_t group = 0; group < job->count; group++)
    if (run_product(job, group)) return -1;
  return 0;
}
