"""How many threads PyTorch and native kernels use: more for prefill than for decode, fewer where others need cores.

Results do not depend on it. With a small model a decode step is hundreds of tiny operations, and a second thread that
spins between them costs more than it gives; on a busy machine it can be a hundred times slower.
"""

import os
from dataclasses import dataclass

from headrace.core.errors import UserError

_SMALL_HIDDEN_SIZE = 2048
_MAX_THREADS = 256


@dataclass(frozen=True)
class Threads:
    """Threads for each kind of work."""

    prefill: int
    decode: int


def check_threads(count: int) -> None:
    """Refuse a number of threads that no machine of this kind has.

    Raises:
        UserError: the number is below 1 or above 256.
    """
    if not 1 <= count <= _MAX_THREADS:
        raise UserError(f"{count} threads are not possible; 1 to {_MAX_THREADS} are accepted", param="threads")


def choose_threads(hidden_size: int, wanted: int | None) -> Threads:
    """Return the user's number for both, or a choice from the model's width, the cores and the load."""
    if wanted is not None:
        return Threads(wanted, wanted)
    cores = len(os.sched_getaffinity(0))
    free = max(1, min(cores, round(cores - os.getloadavg()[0])))
    return Threads(free, 1 if hidden_size < _SMALL_HIDDEN_SIZE else free)
