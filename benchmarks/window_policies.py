"""What a conversation costs when it comes back, and what keeping its windows on disk takes, by policy.

A prompt of 7,000 tokens is read anew; then it comes with 100 new tokens at once, after its window states were
forgotten, and after a restart of the engine, from a directory that keeps no windows, those of every p-th token, or all.
Exact answers, and with resume="replay" in the last two situations. Storage and recomputed rows stand side by side.
Bounds: CPU time to the first token, over that of the prompt with its new tokens read anew, at most 0.06 at once, 0.10
with the states forgotten, 0.15 after a restart (the last two by replay, or exact where windows are kept); all files of
a directory without windows at most 1.03 of its entries' bytes.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.core.shipped import shipped_model
from headrace.engine.core.build import build_core
from headrace.engine.core.core import EngineCore
from headrace.engine.core.events import TokenEvent
from headrace.engine.core.options import EngineOptions
from headrace.engine.result import Result
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.submission import Submission

from ._measure import Figure, Sample, parser, progress, report

AT_ONCE, FORGOTTEN, RESTARTED = 0.06, 0.10, 0.15
MAX_STORED = 1.03
_AT_ONCE_TURNS = 3


@dataclass
class Taken:
    """Samples of one policy: seconds by situation, and what the newest run stored and computed again."""

    seconds: dict[str, list[Sample]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    cached: dict[str, Mapping[str, int]] = field(default_factory=dict)
    stored: dict[str, float] = field(default_factory=dict)


def open_core(folder: Path, cache: Path, threads: int, policy: str, every: int) -> EngineCore:
    """Return an engine over a directory."""
    options: dict[str, Any] = {"window_policy": policy, "checkpoint_every": every, "min_free_disk": 0}
    return build_core(
        folder, EngineOptions(threads=threads, cache_dir=str(cache), drafting="off", **options), None, None
    )


def ask(core: EngineCore, ids: np.ndarray, resume: str = "exact") -> tuple[Sample, Result]:
    """Read a prompt and sample one token."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, seed=1, resume=resume, temperature=0.0)
    wall, cpu = time.perf_counter(), time.process_time()
    core.submit(Submission(request_id="one", prompt_ids=ids, params=params, seed=1, submitted=time.monotonic()))
    result = None
    while not core.is_idle:
        for event in core.step():
            if isinstance(event, TokenEvent) and event.result is not None:
                result = event.result
    took = Sample(time.process_time() - cpu, time.perf_counter() - wall)
    if result is None:
        raise SystemExit("a request gave no result")
    return took, result


def note(taken: Taken, name: str, found: tuple[Sample, Result]) -> None:
    """Keep one measurement."""
    took, result = found
    taken.seconds.setdefault(name, []).append(took)
    taken.rows[name] = result.work.reencoded_rows
    taken.cached[name] = result.usage.cached_tokens_by_tier
    progress(f"{name}: {took.cpu_s:.3f} CPU-s, {result.usage.cached_tokens} cached, {result.cache_reason}")


def disk_bytes(cache: Path) -> float:
    """Return the bytes of all files of a directory."""
    return float(sum(file.stat().st_size for file in cache.iterdir()))


def one_round(folder: Path, threads: int, policy: str, every: int, tokens: tuple[np.ndarray, np.ndarray]) -> Taken:
    """Measure every situation once, in a directory of its own."""
    prompt, new = tokens
    longer, taken = np.concatenate([prompt, new]), Taken()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as place:
        cache = Path(place)
        core = open_core(folder, cache, threads, policy, every)
        other = np.concatenate([[int(longer[0]) ^ 1], longer[1:]])
        note(taken, "anew", ask(core, other))
        ask(core, prompt)
        for turn in range(_AT_ONCE_TURNS):  # short: one alone would say little
            note(taken, "at once", ask(core, np.concatenate([prompt, np.roll(new, -turn)])))
        for turn, (resume, name) in enumerate((("replay", "states forgotten, replay"), ("exact", "states forgotten"))):
            shelf = core.cache.index.shelf
            for shelved in list(shelf._homes):
                shelf.drop(shelved)
            note(taken, name, ask(core, np.concatenate([prompt, np.roll(new, turn + 1)]), resume))
        core.close()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as place:
        cache = Path(place)
        core = open_core(folder, cache, threads, policy, every)
        ask(core, prompt)
        block = core.memory.block_bytes
        core.close()
        blocks = len(prompt) // 128
        taken.stored = {"all": disk_bytes(cache), "entries": float(blocks * block), "blocks": float(blocks)}
        for resume, name in (("replay", "restarted, replay"), ("exact", "restarted")):
            core = open_core(folder, cache, threads, policy, every)
            ask(core, new[:32])  # an engine that has done something
            note(taken, name, ask(core, longer, resume))
            core.close()
    return taken


def figures_of(name: str, rounds: list[Taken]) -> list[Figure]:
    """Turn the rounds of one policy into figures."""
    found = []
    bounds = {
        "at once": AT_ONCE,
        "states forgotten": None if name == "none" else FORGOTTEN,
        "states forgotten, replay": FORGOTTEN,
        "restarted": None if name == "none" else RESTARTED,
        "restarted, replay": RESTARTED,
    }
    cold = [one.seconds["anew"][0].cpu_s for one in rounds]
    found.append(Figure(f"{name}: first token, anew", "CPU-s", cold, "-", cold))
    for situation, bound in bounds.items():
        took = [statistics.median(sample.cpu_s for sample in one.seconds[situation]) for one in rounds]
        shares = [mine / anew for mine, anew in zip(took, cold, strict=True)]
        found.append(Figure(f"{name}: first token, {situation} / anew", "ratio", shares, "same round", bound=bound))
        rows = [float(one.rows[situation]) for one in rounds]
        found.append(Figure(f"{name}: cached tokens encoded again, {situation}", "rows", rows, "-"))
    newest = rounds[-1].stored
    tokens = newest["blocks"] * 128
    found.append(Figure(f"{name}: on disk a token, windows included", "bytes", [newest["all"] / tokens], "-"))
    if name == "none":
        share = newest["all"] / newest["entries"]
        found.append(Figure("all files / entries of the blocks", "ratio", [share], "entries", bound=MAX_STORED))
    return found


def main() -> int:
    """Measure and report."""
    made = parser(__doc__)
    made.add_argument("path", nargs="?", type=Path, help="a checkpoint folder (the shipped model)")
    made.add_argument("--prompt", type=int, default=7000, metavar="N", help="tokens of the conversation (7,000)")
    made.add_argument("--new", type=int, default=100, metavar="N", help="tokens that are new when it comes back (100)")
    made.add_argument("--every", type=int, default=256, metavar="P", help="tokens between periodic windows (256)")
    args = made.parse_args()
    torch.set_num_threads(args.threads)
    folder, policies = args.path or shipped_model(), ("none", "periodic", "full")
    rounds: dict[str, list[Taken]] = {policy: [] for policy in policies}
    for repetition in range(args.repetitions):
        random = np.random.default_rng(repetition)
        tokens = random.integers(300, 3000, args.prompt), random.integers(300, 3000, args.new)
        for policy in policies:
            progress(f"round {repetition}, {policy}")
            rounds[policy].append(one_round(folder, args.threads, policy, args.every, tokens))
    figures = [figure for policy in policies for figure in figures_of(policy, rounds[policy])]
    return report("Window state on disk", args, figures, {"model": folder.name, "every": args.every})


if __name__ == "__main__":
    raise SystemExit(main())
