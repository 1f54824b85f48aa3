"""A machine that others keep busy: decode steps with a spinning process on every core, against the same machine quiet.

Native kernels, 1 and 2 threads, headrace-nano and the 40-layer configuration; also a prefill step of 256 tokens,
which uses every thread all the time. Spinning processes are pinned, stopped in quiet rounds and let go in loaded
ones, in turn. A fair scheduler gives a thread half a core then, so 2 is the least that can be expected; bound: 3, of
medians. The 99th percentile has no bound: a step of two milliseconds that loses its core once waits several for it.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from headrace.core.shipped import shipped_model
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41, Numerics

from ._measure import ROOT, Figure, Sample, checkpoint, parser, progress, random_ids, report, timed

LARGER = ROOT / "configs" / "bench-40x512.json"
CONTEXT, CHUNK = 64, 256
SECONDS = 1.2  # of each round, about
BOUND = 3.0


class Crowd:
    """A spinning process on every core that this one may use; stopped until told to go."""

    def __init__(self) -> None:
        self._all = [self._start(core) for core in sorted(os.sched_getaffinity(0))]
        time.sleep(0.5)
        self.signal(signal.SIGSTOP)

    @staticmethod
    def _start(core: int) -> subprocess.Popen[bytes]:
        spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
        return subprocess.Popen([sys.executable, "-c", spin])

    def signal(self, which: signal.Signals) -> None:
        """Stop all, or let them go on."""
        for process in self._all:
            process.send_signal(which)
        time.sleep(0.1)

    def close(self) -> None:
        """End all."""
        for process in self._all:
            process.kill()
            process.wait()


@contextmanager
def crowd() -> Iterator[Crowd]:
    """Give a crowd that ends."""
    made = Crowd()
    try:
        yield made
    finally:
        made.close()


class Steps:
    """Decode and prefill steps of one model, each on random tokens."""

    def __init__(self, model: DeepseekV41) -> None:
        self._model, self._state, self._seed = model, model.new_state(), 0
        model.forward([Span(self._state, self._ids(CONTEXT), CONTEXT)])

    def decode(self) -> None:
        """One token after all before."""
        self._model.forward([Span(self._state, self._ids(1), 1)])

    def prefill(self) -> None:
        """A chunk of a new prompt."""
        self._model.forward([Span(self._model.new_state(), self._ids(CHUNK), CHUNK)])

    def _ids(self, count: int) -> np.ndarray:
        self._seed += 1
        return random_ids(self._model, count, self._seed)


def machine_busy() -> float:
    """Return the seconds that all cores together were busy since the machine started."""
    ticks = [int(part) for part in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting for disks


def measure(
    steps: Steps, others: Crowd, rounds: int
) -> tuple[dict[tuple[str, str], list[list[Sample]]], dict[str, list[float]]]:
    """Return rounds of samples by step and by how busy the machine was; and by step the cores that others took."""
    found: dict[tuple[str, str], list[list[Sample]]] = {}
    taken: dict[str, list[float]] = {}
    for what, run in (("decode", steps.decode), ("prefill", steps.prefill)):
        timed(run)
        count = max(5, min(150, int(SECONDS / timed(run).wall_s)))
        for _ in range(rounds):
            for state in ("quiet", "loaded"):
                if state == "loaded":
                    others.signal(signal.SIGCONT)
                busy, began, own = machine_busy(), time.perf_counter(), time.process_time()
                found.setdefault((what, state), []).append([timed(run) for _ in range(count)])
                if state == "quiet":
                    busy, own = machine_busy() - busy, time.process_time() - own
                    taken.setdefault(what, []).append(max(0.0, busy - own) / (time.perf_counter() - began))
                others.signal(signal.SIGSTOP)
    return found, taken


def figures(
    name: str, found: dict[tuple[str, str], list[list[Sample]]], taken: dict[str, list[float]]
) -> Iterator[Figure]:
    """Medians by round, their ratio, and the slowest steps."""
    for what in ("decode", "prefill"):
        title = f"{name}, {what}"
        medians = {
            state: [statistics.median(one.wall_s for one in samples) for samples in found[what, state]]
            for state in ("quiet", "loaded")
        }
        for state, times in medians.items():
            cpu = [statistics.median(one.cpu_s for one in samples) for samples in found[what, state]]
            yield Figure(f"{title}, {state}", "ms wall", [1e3 * one for one in times], "the other state", cpu, times)
        ratios = [a / b for a, b in zip(medians["loaded"], medians["quiet"], strict=True)]
        yield Figure(f"{title}, loaded / quiet", "1", ratios, "quiet", bound=BOUND)
        late = [float(np.quantile([one.wall_s for one in samples], 0.99)) for samples in found[what, "loaded"]]
        shares = [a / b for a, b in zip(late, medians["quiet"], strict=True)]
        yield Figure(f"{title}, loaded 99 % / quiet median", "1", shares, "quiet")
        yield Figure(f"{title}, quiet, cores that others took all the same", "1", taken[what], "none")


def main(args: argparse.Namespace) -> int:
    result: list[Figure] = []
    with checkpoint(LARGER) as folder, crowd() as others:
        models: dict[str, Path] = {"nano": Path(shipped_model()), LARGER.stem: folder}
        for name, path in models.items():
            steps = Steps(load_model(path, LoadOptions(numerics=Numerics(kernels="native"))).model)
            for threads in (1, 2):
                progress(f"{name}, {threads} threads")
                torch.set_num_threads(threads)
                result += figures(f"{name}, {threads} threads", *measure(steps, others, args.repetitions))
    return report("Steps on a busy machine", args, result, {"cores": len(os.sched_getaffinity(0))})


if __name__ == "__main__":
    raise SystemExit(main(parser(__doc__).parse_args()))
