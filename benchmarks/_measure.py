"""What every benchmark shares: samples of CPU and wall time, figures with bounds, the manifest, the report."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.cache.sequence_state import SequenceState
from headrace.core.chunk_plan import plan_chunks
from headrace.models.deepseek_v41.batch import Mode, Span, Work
from headrace.models.deepseek_v41.config import load_config
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.models.deepseek_v41.synth import write_checkpoint

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 1024
REFERENCE_GFLOPS = 200.0  # of one core when the bounds were written; bounds of time scale with it


@dataclass(frozen=True)
class Sample:
    """One run: CPU and wall seconds."""

    cpu_s: float
    wall_s: float


@dataclass
class Figure:
    """A measured quantity.

    `samples` are the raw values in `unit`; `cpu_s` and `wall_s` are the seconds of the runs they come from (empty where
    no time belongs to a value). `bound` is what the median must not exceed (or reach, where `is_floor`).
    """

    name: str
    unit: str
    samples: list[float]
    against: str
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    bound: float | None = None
    is_floor: bool = False

    @property
    def median(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples)

    @property
    def passed(self) -> bool | None:
        """Whether the bound holds; None without one."""
        if self.bound is None:
            return None
        return self.median >= self.bound if self.is_floor else self.median <= self.bound


def timed(work: Callable[[], Any]) -> Sample:
    """Run once and return what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Sample(time.process_time() - cpu, time.perf_counter() - wall)


def interleaved(
    variants: Mapping[str, Callable[[], Any]], repetitions: int, *, quiet: bool = False
) -> dict[str, list[Sample]]:
    """Time every variant in turn, `repetitions` times round, so that a slow minute hits all of them alike."""
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    for _ in range(repetitions):
        for name, work in variants.items():
            samples[name].append(timed(work))
            if not quiet:
                progress(f"{name}: {samples[name][-1].cpu_s:.3f} CPU-s")
    return samples


def time_figure(
    name: str, samples: Sequence[Sample], against: str, *, scale: float = 1.0, unit: str = "CPU-s"
) -> Figure:
    """Return a figure of CPU seconds times `scale` (1000 / tokens gives CPU-ms a token)."""
    cpu, wall = [one.cpu_s for one in samples], [one.wall_s for one in samples]
    return Figure(name, unit, [scale * seconds for seconds in cpu], against, cpu, wall)


def matrix_product_gflops(size: int = 2048, products: int = 4) -> float:
    """Return GFLOP per CPU-second of a bfloat16 product: the machine's own speed at this moment."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(size, size, generator=generator).bfloat16() for _ in range(2))
    torch.nn.functional.linear(a, b)
    took = timed(lambda: [torch.nn.functional.linear(a, b) for _ in range(products)])
    return 2.0 * products * size**3 / took.cpu_s / 1e9


def scaled_bound(seconds: float, gflops: float) -> float:
    """Scale a bound of time, written for a core of `REFERENCE_GFLOPS`, to this machine."""
    return seconds * REFERENCE_GFLOPS / gflops


@contextmanager
def checkpoint(source: Path, changes: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Give a checkpoint folder: `source` itself, or random weights of a configuration file in a temporary folder.

    `changes` replaces fields of the configuration's `text_config`.
    """
    if source.is_dir():
        yield source
        return
    document = json.loads(source.read_text(encoding="utf-8"))
    document["text_config"].update(changes or {})
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        changed = Path(folder) / "config.json"
        changed.write_text(json.dumps(document), encoding="utf-8")
        model = Path(folder) / "model"
        progress(f"random weights of {source.name}")
        write_checkpoint(load_config(changed), model, seed=1)
        yield model


def random_ids(model: DeepseekV41, count: int, seed: int = 1) -> np.ndarray:
    """Return ordinary token ids, [count] int64: below the special ones at the end of the vocabulary."""
    return np.random.default_rng(seed).integers(3, model.config.vocab_size - 16, count)


def prefill(model: DeepseekV41, ids: np.ndarray, mode: Mode, work: Work | None = None) -> SequenceState:
    """Read a prompt in chunks, as the engine does, and return the sequence's state."""
    state, window = model.new_state(), model.config.window
    state.reserve(len(ids))
    sizes = plan_chunks(len(ids), CHUNK, window if mode == "replay" else 1)
    low = 0
    for place, size in enumerate(sizes):
        is_last = place == len(sizes) - 1
        decoder_rows = size if mode == "full" else min(window, len(ids)) if is_last else 0
        span = Span(state, ids[low : low + size], decoder_rows, is_replay=mode == "replay" and is_last)
        model.forward([span], work=work)
        low += size
    return state


def memory(field_name: str) -> int:
    """Return a size of this process from the kernel, in bytes: `VmRSS` (resident now) or `VmHWM` (at most so far)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field_name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field_name}; memory is measured on Linux only")


def in_fresh_process(script: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark (`__file__`) as a process of its own and return the JSON document it prints."""
    command = [sys.executable, "-m", f"benchmarks.{Path(script).stem}", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def progress(text: str) -> None:
    """Say on stderr what goes on."""
    print(f"  .. {text}", file=sys.stderr, flush=True)


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "src")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes in src" if changed else "")


def _machine() -> str:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    parts = [
        name for flag, name in (("avx512f", "AVX-512"), ("avx512_bf16", "bf16"), ("amx_tile", "AMX")) if flag in flags
    ]
    kind = " VM" if " hypervisor" in flags else ""
    return f"{os.cpu_count()}-core {platform.machine().replace('_', '-')} {' '.join(parts)}{kind}"


def manifest(threads: int) -> dict[str, Any]:
    """Return what a result depends on besides the code under test."""
    return {
        "commit": _commit(),
        "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "machine": _machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": threads,
        "load_average": round(os.getloadavg()[0], 2),
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark takes."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--json", action="store_true", help="one JSON document on stdout instead of tables")
    made.add_argument("--threads", type=int, default=1, metavar="N", help="PyTorch threads (1)")
    made.add_argument("--repetitions", type=int, default=3, metavar="N", help="times round (3)")
    return made


def report(title: str, args: argparse.Namespace, figures: Sequence[Figure], notes: Mapping[str, Any]) -> int:
    """Print the result and return the exit status: 1 when a bound is missed."""
    facts = manifest(args.threads)
    failed = [figure.name for figure in figures if figure.passed is False]
    if args.json:
        rows = [{**asdict(figure), "median": figure.median, "passed": figure.passed} for figure in figures]
        print(json.dumps({"title": title, "manifest": facts, "figures": rows, "notes": dict(notes), "failed": failed}))
        return 1 if failed else 0
    print(f"# {title}")
    for name, value in {**facts, **notes}.items():
        print(f"{name}: {value}")
    print("\n| figure | median | unit | samples | CPU s | wall s | against | bound |")
    print("|---|---|---|---|---|---|---|---|")
    for figure in figures:
        print(_row(figure))
    print(f"\n{'failed: ' + ', '.join(failed) if failed else 'every bound holds'}")
    return 1 if failed else 0


def _row(figure: Figure) -> str:
    bound = "-"
    if figure.bound is not None:
        sign = ">=" if figure.is_floor else "<="
        bound = f"{sign} {_number(figure.bound)}: {'holds' if figure.passed else 'MISSED'}"
    lists = [
        " ".join(_number(value) for value in values) or "-" for values in (figure.samples, figure.cpu_s, figure.wall_s)
    ]
    cells = [figure.name, _number(figure.median), figure.unit, *lists, figure.against, bound]
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
