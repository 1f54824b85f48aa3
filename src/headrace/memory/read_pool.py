"""A few threads that read from files: what is urgent first, otherwise in the order of asking.

Compiled threads do it where the package was built with a compiler; they take nothing of the interpreter's time. The
others run jobs in Python.
"""

import heapq
import threading
from collections.abc import Callable

from headrace.core.errors import InternalError
from headrace.kernels.native.row_reader import CLOSED, open_reader

PART_ROWS = 512  # rows a thread reads at once, so that an urgent batch waits for one part at most

Job = Callable[[], None]


class ReadPool:
    """Owns its threads and the queue in front of them. Jobs never raise; they leave their errors with whoever asked.

    `native` are the compiled threads; jobs are for where it is None. A process that ends does not wait for a slow disk.
    """

    def __init__(self, num_workers: int, *, is_native: bool = True) -> None:
        """Start the threads.

        Args:
            num_workers: threads, at least 1.
            is_native: take compiled threads where there are any.
        """
        self.native = open_reader(num_workers, PART_ROWS) if is_native else None
        self._queue: list[tuple[bool, int, Job]] = []
        self._asked = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"ngram-read-{place}", daemon=True)
            for place in range(num_workers if self.native is None else 0)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, job: Job, *, is_urgent: bool) -> None:
        """Queue a job.

        Raises:
            InternalError: the pool was closed.
        """
        with self._changed:
            if self._is_closed:
                raise InternalError(CLOSED)
            self._asked += 1
            heapq.heappush(self._queue, (not is_urgent, self._asked, job))
            self._changed.notify()

    def close(self) -> None:
        """End the threads after the jobs they are at; what is queued is forgotten."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self.native is not None:
            self.native.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                job = heapq.heappop(self._queue)[2]
            job()
