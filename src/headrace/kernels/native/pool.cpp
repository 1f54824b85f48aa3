// Threads with a bounded spin.
//
// A call hands out pieces through a counter, so a thread that the machine has taken away holds up no piece but the one
// it is in. Threads that find nothing spin for some microseconds, because the next call of a step usually comes by then,
// and sleep after; a busy machine gets its cores back. Whoever computes a piece never changes its bits.
#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define HR_PAUSE() _mm_pause()
#else
#define HR_PAUSE() std::this_thread::yield()
#endif

namespace {

thread_local bool is_in_task = false;  // a piece that calls again computes all of it itself
const int SPINS = 2000;  // pauses before a thread sleeps: some tens of microseconds

struct Pool {
  std::mutex use, sleep;
  std::condition_variable wake;
  std::vector<std::thread> threads;
  std::atomic<int64_t> round{0};  // one more for every call
  std::atomic<int64_t> next{0}, pieces{0}, done{0}, inside{0};
  std::atomic<bool> is_over{false};
  hr_task task = nullptr;
  void* context = nullptr;

  void work() {
    int64_t finished = 0;
    is_in_task = true;
    for (int64_t piece; (piece = next.fetch_add(1)) < pieces.load(); finished++) task(context, piece);
    is_in_task = false;
    done.fetch_add(finished);
  }

  void live() {
    int64_t seen = round.load();
    for (;;) {
      for (int spin = 0; spin < SPINS && round.load() == seen && !is_over.load(); spin++) HR_PAUSE();
      if (round.load() == seen && !is_over.load()) {
        std::unique_lock<std::mutex> lock(sleep);
        wake.wait(lock, [&] { return round.load() != seen || is_over.load(); });
      }
      if (is_over.load()) return;
      inside.fetch_add(1);
      seen = round.load();
      if (seen % 2 == 0) work();  // odd while a call is set up or over
      inside.fetch_sub(1);
    }
  }

  void resize(int64_t count) {
    if ((int64_t)threads.size() == count - 1) return;
    {
      std::lock_guard<std::mutex> lock(sleep);
      is_over.store(true);
    }
    wake.notify_all();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
    is_over.store(false);
    for (int64_t i = 1; i < count; i++) threads.emplace_back([this] { live(); });
  }

  void run(hr_task what, void* with, int64_t count) {
    while (inside.load()) HR_PAUSE();  // nobody looks at the last call any more
    task = what;
    context = with;
    done.store(0);
    next.store(0);
    pieces.store(count);
    {
      std::lock_guard<std::mutex> lock(sleep);
      round.fetch_add(1);  // even: there is work
    }
    wake.notify_all();
    work();
    for (int spin = 0; done.load() < count; spin++) {
      if (spin < SPINS)
        HR_PAUSE();
      else
        std::this_thread::yield();
    }
    round.fetch_add(1);
  }
};

// Never destroyed: its threads may sleep while the process ends.
Pool& pool() {
  static Pool* only = [] {
    Pool* made = new Pool;
    made->round.store(1);
    return made;
  }();
  return *only;
}
std::atomic<int64_t> num_threads{1};

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t hr_set_threads(int64_t count) {
  if (count == num_threads.load()) return 0;
  Pool& shared = pool();
  std::lock_guard<std::mutex> lock(shared.use);
  num_threads.store(count);
  shared.resize(count);
  return 0;
}

extern "C" int64_t hr_threads() { return num_threads.load(std::memory_order_relaxed); }

extern "C" void hr_parallel(hr_task task, void* context, int64_t pieces) {
  Pool& shared = pool();
  std::unique_lock<std::mutex> lock(shared.use, std::defer_lock);
  if (!is_in_task) lock.try_lock();
  if (!lock.owns_lock() || shared.threads.empty() || pieces <= 1) {
    for (int64_t piece = 0; piece < pieces; piece++) task(context, piece);
    return;
  }
  shared.run(task, context, pieces);
}
