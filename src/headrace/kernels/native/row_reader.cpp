// Threads that read rows of n-gram tables, so that no thread of Python takes part between asking and waiting.
//
// A request is cut into parts, an urgent one's before the others'. A thread tells the system every place of its part
// before it reads the first, so that the disk sees them at once, however few threads there are.
#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#define HR_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

const int64_t ENDED = -1;  // the error of a row that the file ends before

// As row_reader.py lays it out; every field 64 bits. `left` and `errors` are written; `resident` may be 0.
struct Request {
  int64_t ids, count;
  int64_t code_file, code_start, code_bytes, code_out;
  int64_t scale_file, scale_start, scale_bytes, scale_out;
  int64_t resident, errors, part_rows, left;
};

struct Part {
  Request* request;
  int64_t begin, end;
};

struct Reader {
  std::mutex lock;
  std::condition_variable queued, finished;
  std::deque<Part> urgent, later;
  std::vector<std::thread> threads;
  bool is_closed = false;
  pid_t owner = getpid();
};

// Returns 0, an error number or ENDED.
int64_t read_whole(int64_t file, char* out, int64_t size, int64_t place) {
  for (int64_t done = 0; done < size;) {
    const ssize_t got = pread(static_cast<int>(file), out + done, size - done, place + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return ENDED;
    done += got;
  }
  return 0;
}

void announce(int64_t file, int64_t start, int64_t size, const int64_t* ids, int64_t begin, int64_t end) {
#ifdef POSIX_FADV_WILLNEED
  for (int64_t i = begin; i < end; ++i)
    (void)posix_fadvise(static_cast<int>(file), start + ids[i] * size, size, POSIX_FADV_WILLNEED);
#endif
}

void read_part(const Part& part) {
  const Request& asked = *part.request;
  const int64_t* ids = reinterpret_cast<const int64_t*>(asked.ids);
  int64_t* errors = reinterpret_cast<int64_t*>(asked.errors);
  char* codes = reinterpret_cast<char*>(asked.code_out);
  char* scales = reinterpret_cast<char*>(asked.scale_out);
  const char* resident = reinterpret_cast<const char*>(asked.resident);
  announce(asked.code_file, asked.code_start, asked.code_bytes, ids, part.begin, part.end);
  if (!resident) announce(asked.scale_file, asked.scale_start, asked.scale_bytes, ids, part.begin, part.end);
  for (int64_t i = part.begin; i < part.end; ++i) {
    char* out = scales + i * asked.scale_bytes;
    const int64_t place = ids[i] * asked.scale_bytes;
    if (resident)
      std::memcpy(out, resident + place, asked.scale_bytes);
    else
      errors[i] = read_whole(asked.scale_file, out, asked.scale_bytes, asked.scale_start + place);
    const int64_t failed = read_whole(
        asked.code_file, codes + i * asked.code_bytes, asked.code_bytes, asked.code_start + ids[i] * asked.code_bytes);
    if (failed) errors[i] = failed;
  }
}

void work(Reader* reader) {
  std::unique_lock<std::mutex> lock(reader->lock);
  for (;;) {
    reader->queued.wait(lock, [&] { return reader->is_closed || !reader->urgent.empty() || !reader->later.empty(); });
    if (reader->is_closed) return;
    std::deque<Part>& queue = reader->urgent.empty() ? reader->later : reader->urgent;
    const Part part = queue.front();
    queue.pop_front();
    lock.unlock();
    read_part(part);
    lock.lock();
    if (--part.request->left == 0) reader->finished.notify_all();
  }
}

}  // namespace

// Starts `count` threads and returns their address, 0 where the system gives none.
HR_EXPORT int64_t hr_row_reader_open(int64_t count) {
  Reader* reader = new Reader;
  try {
    for (int64_t i = 0; i < count; ++i) reader->threads.emplace_back(work, reader);
  } catch (...) {
    if (reader->threads.empty()) {
      delete reader;
      return 0;
    }
  }
  return reinterpret_cast<int64_t>(reader);
}

// Queues a request. It, and all it points to, stay where they are until it is done or the reader is closed.
HR_EXPORT int64_t hr_row_reader_start(int64_t address, int64_t request_address, int64_t is_urgent) {
  Reader* reader = reinterpret_cast<Reader*>(address);
  Request* request = reinterpret_cast<Request*>(request_address);
  {
    std::lock_guard<std::mutex> lock(reader->lock);
    std::deque<Part>& queue = is_urgent ? reader->urgent : reader->later;
    request->left = 0;
    for (int64_t begin = 0; begin < request->count; begin += request->part_rows, ++request->left)
      queue.push_back({request, begin, std::min(begin + request->part_rows, request->count)});
  }
  if (request->count <= request->part_rows)
    reader->queued.notify_one();
  else
    reader->queued.notify_all();
  return 0;
}

// Waits until every row of a request is read or has failed.
HR_EXPORT int64_t hr_row_reader_wait(int64_t address, int64_t request_address) {
  Reader* reader = reinterpret_cast<Reader*>(address);
  const Request* request = reinterpret_cast<const Request*>(request_address);
  std::unique_lock<std::mutex> lock(reader->lock);
  reader->finished.wait(lock, [&] { return request->left == 0; });
  return 0;
}

// Ends the threads after the parts they are at; what is queued is forgotten. In a forked child there is nobody to end.
HR_EXPORT int64_t hr_row_reader_close(int64_t address) {
  Reader* reader = reinterpret_cast<Reader*>(address);
  if (reader->owner != getpid()) return 0;
  {
    std::lock_guard<std::mutex> lock(reader->lock);
    reader->is_closed = true;
  }
  reader->queued.notify_all();
  for (std::thread& thread : reader->threads) thread.join();
  delete reader;
  return 0;
}
