"""The engine: tokens/s of 8 streams against one, and the time to the first token behind a cached prefix.

Runs the engine's core in this process (so that CPU time is all of it) on headrace-nano, or on a checkpoint folder.
Bounds: eight streams decode at least 2.3 times the tokens/s of one; behind a shared prefix of 7,000 tokens, the time to
the first token is at most 1.5 (suffix + 2 W) / N of that of the same prompt read anew; an engine under load stays
within 1.05 of the bytes of its plan; counting what each step did for whom takes at most 2 % of a step.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace import LLM
from headrace.core.shipped import shipped_model
from headrace.engine.core.account import Accountant
from headrace.engine.core.build import build_core
from headrace.engine.core.core import EngineCore
from headrace.engine.core.options import EngineOptions
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.submission import Submission

from ._measure import Figure, Sample, parser, progress, report, time_figure

STREAMS = 8
MIN_SPEEDUP = 2.3
MAX_SHARE = 1.5
MAX_MEMORY = 1.05
MAX_TRACE = 0.02
LOAD = 24
STEPS = 40
PROMPT = 300


class Engine:
    """A core without a prefix cache or with one, and requests of random tokens for it."""

    def __init__(self, folder: Path, threads: int, *, has_cache: bool, trace_file: str | None = None) -> None:
        options = EngineOptions(
            threads=threads, num_slots=STREAMS, has_prefix_cache=has_cache, trace_steps=STEPS, trace_file=trace_file
        )
        self.core: EngineCore = build_core(folder, options, None, None)
        self._count = 0

    def submit(self, ids: np.ndarray, max_tokens: int) -> None:
        """Ask for a greedy answer of `max_tokens` tokens."""
        self._count += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
        self.core.submit(
            Submission(request_id=f"{self._count}", prompt_ids=ids, params=params, seed=1, submitted=time.monotonic())
        )

    def run(self, until_tokens: int = 0) -> Sample:
        """Step until all is done, or until no prompt is being read any more."""
        wall, cpu = time.perf_counter(), time.process_time()
        while not self.core.is_idle:
            self.core.step()
            if until_tokens and self.core.counts["decode"] == until_tokens:
                break
        return Sample(time.process_time() - cpu, time.perf_counter() - wall)


def ids(core: EngineCore, count: int, seed: int) -> np.ndarray:
    """Return ordinary token ids."""
    size = core.model.config.vocab_size
    return np.random.default_rng(seed).integers(size // 8, size - size // 8, count)


def streams(folder: Path, args_threads: int, repetitions: int) -> list[Figure]:
    """Decode one stream and eight, in turn; tokens per CPU-second."""
    engine = Engine(folder, args_threads, has_cache=False)
    took: dict[int, list[Sample]] = {1: [], STREAMS: []}
    for repetition in range(repetitions):
        for count, samples in took.items():
            for stream in range(count):
                engine.submit(ids(engine.core, PROMPT, stream + 1), STEPS)
            engine.run(until_tokens=count)
            samples.append(engine.run())
            progress(f"{count} streams, round {repetition}: {samples[-1].cpu_s:.2f} CPU-s")
    rates = {count: [count * (STEPS - 1) / one.cpu_s for one in samples] for count, samples in took.items()}
    ratios = [many / one for one, many in zip(rates[1], rates[STREAMS], strict=True)]
    return [
        Figure("1 stream", "tokens/CPU-s", rates[1], "-", [one.cpu_s for one in took[1]]),
        Figure(f"{STREAMS} streams", "tokens/CPU-s", rates[STREAMS], "-", [one.cpu_s for one in took[STREAMS]]),
        Figure(f"{STREAMS} streams / 1 stream", "ratio", ratios, "same run", bound=MIN_SPEEDUP, is_floor=True),
    ]


def first_token(folder: Path, threads: int, repetitions: int, prefix: int, suffix: int) -> list[Figure]:
    """Read a prompt anew, and one that shares its first tokens with it."""
    engine = Engine(folder, threads, has_cache=True)
    shared, total = ids(engine.core, prefix, 1), prefix + suffix
    cold: list[Sample] = []
    warm: list[Sample] = []
    for repetition in range(repetitions):
        engine.core.clear_cache()
        for place, samples in enumerate((cold, warm)):
            own = ids(engine.core, suffix, 10 + 2 * repetition + place)
            own[0] = 1 + place  # nothing more in common
            engine.submit(np.concatenate([shared, own]), 1)
            samples.append(engine.run())
        progress(f"cold {cold[-1].cpu_s:.2f}, warm {warm[-1].cpu_s:.3f} CPU-s")
    window = engine.core.model.config.window
    shares = [b.cpu_s / a.cpu_s * total / (suffix + 2 * window) for a, b in zip(cold, warm, strict=True)]
    title = f"{prefix:,} + {suffix} tokens"
    return [
        time_figure(f"first token, anew, {title}", cold, "-"),
        time_figure(f"first token, cached prefix, {title}", warm, "the row above"),
        Figure(f"cached / anew, in units of (suffix + 2 W) / N, {title}", "ratio", shares, "1", bound=MAX_SHARE),
    ]


def tracing(folder: Path, threads: int, repetitions: int) -> list[Figure]:
    """Decode eight streams and count the time that goes into the trace, its JSON lines included."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as place:
        engine = Engine(folder, threads, has_cache=False, trace_file=str(Path(place) / "trace.jsonl"))
        shares = []
        for _ in range(repetitions):
            for stream in range(STREAMS):
                engine.submit(ids(engine.core, PROMPT, stream + 1), STEPS)
            engine.run(until_tokens=STREAMS)
            with counted(Accountant, "count") as counting, counted(EngineCore, "_note") as noting:
                took = engine.run()
            shares.append((counting[0] + noting[0]) / took.cpu_s)
    return [Figure(f"trace of {STREAMS} streams / their steps", "ratio", shares, "same run", bound=MAX_TRACE)]


@contextmanager
def counted(owner: type, name: str) -> Iterator[list[float]]:
    """Count the CPU seconds of a method while this is open."""
    spent, kept = [0.0], getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return kept(*args, **kwargs)
        finally:
            spent[0] += time.process_time() - began

    setattr(owner, name, call)
    try:
        yield spent
    finally:
        setattr(owner, name, kept)


def memory(folder: Path, threads: int) -> list[Figure]:
    """Load an engine in a process of its own with long and short prompts; its peak against its plan."""
    with LLM(folder, threads=threads, num_slots=STREAMS) as llm:
        lengths = np.random.default_rng(0).integers(500, 4000, LOAD)
        size = llm.config.vocab_size
        prompts = [np.random.default_rng(int(n)).integers(size // 8, size - size // 8, n).tolist() for n in lengths]
        llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True, logprobs=False))
        status = llm.status()
    planned, peak = float(status["planned_bytes"]), float(status["peak_bytes"])
    return [
        Figure("planned memory", "bytes", [planned], "-"),
        Figure(f"peak memory of {LOAD} prompts / plan", "ratio", [peak / planned], "the plan", bound=MAX_MEMORY),
    ]


def main() -> int:
    """Measure and report."""
    made = parser(__doc__)
    made.add_argument("path", nargs="?", type=Path, help="a checkpoint folder (the shipped model)")
    made.add_argument("--prefix", type=int, default=7000, metavar="N", help="tokens that prompts share (7,000)")
    made.add_argument(
        "--suffix", type=int, nargs="+", default=[50, 200], metavar="N", help="tokens after them (50 200)"
    )
    args = made.parse_args()
    torch.set_num_threads(args.threads)
    folder = args.path or shipped_model()
    figures = streams(folder, args.threads, args.repetitions)
    for suffix in args.suffix:
        figures += first_token(folder, args.threads, args.repetitions, args.prefix, suffix)
    figures += tracing(folder, args.threads, args.repetitions)
    figures += memory(folder, args.threads)
    return report("The engine", args, figures, {"model": folder.name})


if __name__ == "__main__":
    raise SystemExit(main())
