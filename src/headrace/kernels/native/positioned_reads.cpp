// Reads many short stretches of a file in one call, so that a thread of Python reads a batch without Python in between.
#include <cerrno>
#include <cstdint>

#include <fcntl.h>
#include <unistd.h>

// offsets: [count] int64 places in the file; out: [count, size] bytes. Returns 0, an error number, or -1 where the file
// ends before a stretch does. The system is told all places before the first is read, so that the disk sees them at once.
extern "C" __attribute__((visibility("default"))) int64_t hr_positioned_reads(
    int64_t file, int64_t offsets, int64_t count, int64_t size, int64_t out) {
    const int64_t* places = reinterpret_cast<const int64_t*>(offsets);
    char* target = reinterpret_cast<char*>(out);
#ifdef POSIX_FADV_WILLNEED
    for (int64_t i = 0; i < count; ++i)
        (void)posix_fadvise(static_cast<int>(file), places[i], size, POSIX_FADV_WILLNEED);
#endif
    for (int64_t i = 0; i < count; ++i) {
        int64_t done = 0;
        while (done < size) {
            const ssize_t got = pread(static_cast<int>(file), target + i * size + done, size - done, places[i] + done);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) return errno;
            if (got == 0) return -1;
            done += got;
        }
    }
    return 0;
}
