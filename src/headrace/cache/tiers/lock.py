"""Locks between the processes that share a directory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.cache.tiers.files import Files

_POLL_S = 0.01


@contextmanager
def held(files: Files, path: Path, wait_s: float) -> Iterator[bool]:
    """Hold a lock file while the block runs; gives False where another process has it for longer than `wait_s`.

    The system lets go of it when the process ends, however it ends.

    Raises:
        OSError: the lock file cannot be opened or created.
    """
    descriptor = files.open_or_create(path)
    try:
        until = time.monotonic() + wait_s
        while not (is_mine := files.try_lock(descriptor)) and time.monotonic() < until:
            time.sleep(_POLL_S)
        yield is_mine
    finally:
        files.close(descriptor)
