"""Times every kernel at released sizes; each operation's folder says on what. `headrace kernels --time` prints it.

Bounds are promised elsewhere (`benchmarks/native_kernels.py`); these figures show where a kernel stands on a processor.
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

from headrace.kernels.native.library import Library

_SAMPLES: Final = 5


@dataclass(frozen=True)
class Workload:
    """One measurement: `run` does it once; `nbytes` it has to read, `multiply_adds` it has to do, at the least."""

    name: str
    run: Callable[[], object]
    nbytes: int
    multiply_adds: int


@dataclass(frozen=True)
class Timing:
    """CPU seconds of one run of a workload, median of a few samples."""

    workload: Workload
    cpu_s: float

    @property
    def gigabytes_per_s(self) -> float:
        """What it reads, by its time."""
        return self.workload.nbytes / self.cpu_s / 1e9

    @property
    def gigaflops(self) -> float:
        """What it computes, by its time; a multiply-add counts as two."""
        return 2 * self.workload.multiply_adds / self.cpu_s / 1e9


def workloads(folder: str, library: Library) -> list[Workload]:
    """Return what one operation is timed on."""
    module = importlib.import_module(f"headrace.kernels.native.{folder}.benchmark")
    found: list[Workload] = module.workloads(library)
    return found


def measure(workload: Workload, seconds: float = 0.05) -> Timing:
    """Run a workload for about so many CPU seconds, several times, and return the median time of one run."""
    workload.run()
    count, taken = 1, _time(workload.run, 1)
    while taken < seconds / 4 and count < 1 << 16:
        count *= 4
        taken = _time(workload.run, count)
    count = max(1, round(count * seconds / max(taken, 1e-9)))
    return Timing(workload, median(_time(workload.run, count) / count for _ in range(_SAMPLES)))


def _time(run: Callable[[], object], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        run()
    return time.process_time() - start
