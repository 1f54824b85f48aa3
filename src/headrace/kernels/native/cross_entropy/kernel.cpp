#include "../lanes.h"
#include "../pool.h"

struct CrossEntropy {
  float* logits;          // [R, V], rows `step` apart; become softmax minus one at the label, times the row's weight
  const int64_t* labels;  // [R]
  const float* weights;   // [R] or null
  float* losses;          // [R]
  uint8_t* correct;       // [R]
  int64_t rows, columns, step, has_gradient;
};

namespace {

static inline v16 tail16(const float* from, int64_t count, float other) {
  v16 x = splat(other);
  memcpy(&x, from, count * sizeof(float));
  return x;
}

static void judge_row(const CrossEntropy& job, int64_t row) {
  float* logits = job.logits + row * job.step;
  const int64_t columns = job.columns, whole = columns / 16 * 16, left = columns - whole;
  v16 peaks = splat(-HUGE_VALF);
  for (int64_t v = 0; v < whole; v += 16) peaks = max16(peaks, load16(logits + v));
  if (left) peaks = max16(peaks, tail16(logits + whole, left, -HUGE_VALF));
  const v16 peak = splat(largest16(peaks));
  v16 sums = v16{};
  for (int64_t v = 0; v < whole; v += 16) sums = sums + exp16(load16(logits + v) - peak);
  if (left) sums = sums + exp16(tail16(logits + whole, left, -HUGE_VALF) - peak);
  const v16 total = splat(sum16(sums));
  const float target = logits[job.labels[row]];
  const float log_total = total[0] != total[0] ? total[0] : peak[0] + log16(total)[0];  // log16 takes no NaN
  job.losses[row] = log_total - target;
  bool is_first = target == peak[0];
  for (int64_t v = 0; is_first && v < job.labels[row]; v++) is_first = logits[v] < target;
  job.correct[row] = is_first;
  if (!job.has_gradient) return;
  const v16 weight = splat(job.weights ? job.weights[row] : 1.0f), shift = splat(log_total);
  for (int64_t v = 0; v < whole; v += 16) store16(logits + v, exp16(load16(logits + v) - shift) * weight);
  if (left) {
    const v16 last = exp16(tail16(logits + whole, left, -HUGE_VALF) - shift) * weight;
    memcpy(logits + whole, &last, left * sizeof(float));
  }
  logits[job.labels[row]] -= weight[0];
}

}  // namespace

HR_EXPORT(hr_train_cross_entropy)(const CrossEntropy* job) {
  const int64_t pieces = worth(job->rows * job->columns * 40, job->rows);
  parallel(pieces, [&](int64_t piece) {
    for (int64_t row = job->rows * piece / pieces; row < job->rows * (piece + 1) / pieces; row++) judge_row(*job, row);
  });
  return 0;
}
