// Threads with a bounded spin.
//
// Pieces of a call are handed out by one counter that also names the call, so a thread that the machine has taken away
// holds up no piece but the one it is in, and one that comes late finds nothing to do and is waited for by nobody.
// Threads that find nothing spin for some microseconds, because the next call of a step usually comes by then, and sleep
// after; so does the caller while others finish. A busy machine gets its cores back. A caller that waits longer for others
// than they save it computes everything itself for a while. Where fewer are wanted than before the others rest; none
// ever ends, because waiting for that would be waiting for the machine. Whoever computes a piece never changes its bits.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define HR_PAUSE() _mm_pause()
#else
#define HR_PAUSE() std::this_thread::yield()
#endif

namespace {

std::atomic<int64_t> num_threads{1};
thread_local bool is_in_task = false;  // a piece that calls again computes all of it itself
const int SPINS = 2000;                // pauses before a thread sleeps: some tens of microseconds
const uint64_t CALL = (uint64_t)1 << 32;  // one call, in `ticket`, whose numbers begin anew after 2 ** 32 calls

int64_t now() {  // nanoseconds
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// Whether others are worth waiting for, from what they saved and cost lately; nanoseconds.
//
// A thread that the machine takes away in the middle of a piece holds the caller up for milliseconds, and calls are often
// shorter. Where that happens more than the others save, the caller goes alone, longer each time it comes to that again.
struct Balance {
  static const int64_t MOST = 4000000, FIRST = 20000000, LONGEST = 640000000;
  int64_t credit = MOST, alone_until = 0, period = FIRST, failed_at = 0;

  bool goes_alone(int64_t at) const { return at < alone_until; }

  void add(int64_t at, int64_t saved, int64_t lost) {
    credit += saved - lost;
    if (credit > MOST) credit = MOST;
    if (credit >= 0) return;
    period = at - failed_at < 2 * period ? 2 * period : FIRST;  // again soon after the last time
    if (period > LONGEST) period = LONGEST;
    failed_at = alone_until = at + period;
    credit = MOST / 2;
  }
};

struct Pool {
  std::mutex use, sleep;
  std::condition_variable wake, finished, rest;
  std::vector<std::thread> threads;
  std::atomic<uint64_t> ticket{0};  // number of the call, and in the low half the pieces that nobody has taken
  std::atomic<int64_t> left{0};    // pieces that are not done
  std::atomic<int> sleepers{0};
  std::atomic<bool> is_waiting{false};
  hr_task task = nullptr;  // of the call; stands while one of its pieces is not done
  void* context = nullptr;
  int64_t pieces = 0;
  Balance balance;  // the caller's

  struct Taken {
    int64_t pieces = 0, shortest = 0;  // nanoseconds: what a piece takes where nobody interrupts
  };

  // Takes pieces of one call until there is none, or until it is over.
  Taken work(uint64_t call) {
    Taken taken;
    is_in_task = true;
    uint64_t seen = ticket.load();
    while (seen / CALL == call && seen % CALL) {
      if (!ticket.compare_exchange_weak(seen, seen - 1)) continue;
      const int64_t started = now();
      task(context, pieces - (int64_t)(seen % CALL));
      const int64_t took = now() - started;
      if (left.fetch_sub(1) == 1 && is_waiting.load()) {
        std::lock_guard<std::mutex> lock(sleep);
        finished.notify_one();
      }
      if (!taken.pieces++ || took < taken.shortest) taken.shortest = took;
      seen = ticket.load();
    }
    is_in_task = false;
    return taken;
  }

  void live(int64_t place) {
    uint64_t done = ticket.load() / CALL;
    const auto is_wanted = [&] { return place < num_threads.load(); };
    const auto is_called = [&] { return ticket.load() / CALL != done || !is_wanted(); };
    for (;;) {
      for (int spin = 0; spin < SPINS && !is_called(); spin++) HR_PAUSE();
      if (!is_called()) {
        std::unique_lock<std::mutex> lock(sleep);
        sleepers.fetch_add(1);
        wake.wait(lock, is_called);
        sleepers.fetch_sub(1);
      }
      if (!is_wanted()) {
        std::unique_lock<std::mutex> lock(sleep);
        rest.wait(lock, is_wanted);
      }
      done = ticket.load() / CALL;
      work(done);
    }
  }

  void resize(int64_t count) {
    {
      std::lock_guard<std::mutex> lock(sleep);
      num_threads.store(count);
    }
    rest.notify_all();
    try {
      while ((int64_t)threads.size() < count - 1) {
        const int64_t place = threads.size() + 1;
        threads.emplace_back([this, place] { live(place); });
      }
    } catch (const std::system_error&) {  // the system gives no more; those that are there do the work
    }
  }

  void run(hr_task what, void* with, int64_t count) {
    const uint64_t call = (ticket.load() / CALL + 1) % CALL;
    task = what;
    context = with;
    pieces = count;
    left.store(count);
    ticket.store(call * CALL + (uint64_t)count);
    if (sleepers.load()) {
      std::lock_guard<std::mutex> lock(sleep);
      wake.notify_all();
    }
    const Taken taken = work(call);
    const int64_t waits = now();
    for (int spin = 0; spin < SPINS && left.load(); spin++) HR_PAUSE();
    if (left.load()) {
      std::unique_lock<std::mutex> lock(sleep);
      is_waiting.store(true);
      finished.wait(lock, [&] { return !left.load(); });
      is_waiting.store(false);
    }
    const int64_t at = now();
    balance.add(at, taken.shortest * (count - taken.pieces), at - waits);
  }
};

// Never destroyed: its threads may sleep while the process ends.
Pool& pool() {
  static Pool* only = new Pool;
  return *only;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t hr_set_threads(int64_t count) {
  if (count == num_threads.load()) return 0;
  Pool& shared = pool();
  std::lock_guard<std::mutex> lock(shared.use);
  shared.resize(count);
  return 0;
}

extern "C" int64_t hr_threads() { return num_threads.load(std::memory_order_relaxed); }

extern "C" void hr_parallel(hr_task task, void* context, int64_t pieces) {
  Pool& shared = pool();
  std::unique_lock<std::mutex> lock(shared.use, std::defer_lock);
  if (!is_in_task) lock.try_lock();
  if (!lock.owns_lock() || num_threads.load() == 1 || pieces <= 1 || shared.balance.goes_alone(now())) {
    for (int64_t piece = 0; piece < pieces; piece++) task(context, piece);
    return;
  }
  shared.run(task, context, pieces);
}
