// A pool of threads that all kernels share; see pool.cpp.
#pragma once
#include <cstdint>

typedef void (*hr_task)(void* context, int64_t piece);

// Calls task(context, 0 .. pieces - 1), each once, on the pool's threads and this one; returns when all are done.
extern "C" void hr_parallel(hr_task task, void* context, int64_t pieces);
extern "C" int64_t hr_threads();

namespace {

// The same for a callable; in order and on this thread where there is one piece.
template <class Call>
static inline void parallel(int64_t pieces, const Call& call) {
  if (pieces <= 1) {
    if (pieces == 1) call(0);
    return;
  }
  hr_parallel([](void* context, int64_t piece) { (*(const Call*)context)(piece); }, (void*)&call, pieces);
}

// How many pieces work of `cost` multiply-adds is worth, of at most `most`.
static inline int64_t worth(int64_t cost, int64_t most) {
  const int64_t threads = hr_threads();
  if (threads == 1) return 1;
  int64_t pieces = cost / 262144;
  if (pieces > 4 * threads) pieces = 4 * threads;
  if (pieces > most) pieces = most;
  return pieces < 1 ? 1 : pieces;
}

}  // namespace
