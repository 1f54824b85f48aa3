"""A progress bar on standard error, shown only where someone can see it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WORTH_SHOWING_BYTES = 256 * 2**20


@contextmanager
def byte_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], object] | None]:
    """Show how many bytes are done, on a terminal and for work that takes a while; otherwise give None."""
    if total_bytes < _WORTH_SHOWING_BYTES or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:
        yield bar.update
