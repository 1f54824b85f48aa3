#include "../lanes.h"
#include "../pool.h"

namespace {

struct SwigluBack {
  const float *gradient, *both, *weights;  // [P, F], [P, 2 F] gate then up, [P] or null
  float *of_both, *of_weights;             // [P, 2 F], [P] or null
  int64_t rows, width;
  double limit;
};

static void swiglu_row(const SwigluBack& job, int64_t row) {
  const int64_t width = job.width;
  const float *g = job.gradient + row * width, *gates = job.both + row * 2 * width, *ups = gates + width;
  float *of_gates = job.of_both + row * 2 * width, *of_ups = of_gates + width;
  const v16 weight = splat(job.weights ? job.weights[row] : 1.0f), most = splat((float)job.limit);
  const bool is_limited = job.limit > 0;
  v16 sum = v16{};
  for (int64_t f = 0; f < width; f += 16) {
    v16 of_hidden = load16(g + f), gate = load16(gates + f), up = load16(ups + f);
    const v16 raw_gate = gate, raw_up = up;
    if (is_limited) {
      gate = gate > most ? most : gate;
      up = up > most ? most : (up < -most ? -most : up);
    }
    const v16 share = sigmoid16(gate), active = gate * share;
    sum = fma16(of_hidden * active, up, sum);
    of_hidden = of_hidden * weight;
    v16 of_up = of_hidden * active, of_gate = fma16(active, 1.0f - share, share) * up * of_hidden;
    if (is_limited) {
      of_gate = raw_gate > most ? v16{} : of_gate;
      of_up = (raw_up > most) | (raw_up < -most) ? v16{} : of_up;
    }
    store16(of_gates + f, of_gate);
    store16(of_ups + f, of_up);
  }
  if (job.weights) job.of_weights[row] = sum16(sum);
}

}  // namespace

HR_EXPORT(hr_train_swiglu_back)(const SwigluBack* job) {
  const int64_t pieces = worth(job->rows * job->width * 40, job->rows);
  parallel(pieces, [&](int64_t piece) {
    for (int64_t row = job->rows * piece / pieces; row < job->rows * (piece + 1) / pieces; row++) swiglu_row(*job, row);
  });
  return 0;
}
