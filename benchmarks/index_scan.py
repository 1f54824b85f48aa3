"""Share of index scan and top-k in a long replayed prefill, and what one score costs. No bound.

Index multiply-adds per key over layer multiply-adds of the default configuration are those of the release, so the share
carries over in kind; on the CPU the scan is bound by passes over scores rather than by multiply-adds.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headrace.models.deepseek_v41 import attention
from headrace.models.deepseek_v41.batch import Mode, Work
from headrace.models.deepseek_v41.load import load_model
from headrace.models.deepseek_v41.model import DeepseekV41

from ._measure import ROOT, Figure, checkpoint, parser, prefill, progress, random_ids, report, timed

CASES: tuple[tuple[Mode, int], ...] = (("replay", 8192), ("replay", 32_768), ("full", 8192))


@contextmanager
def clocked_selection() -> Iterator[list[float]]:
    """Add up the CPU seconds that layers spend in selection: scores, candidate blocks, top-k."""
    spent = [0.0]
    original = attention.select

    def clocked(*args: Any, **kwargs: Any) -> None:
        started = time.process_time()
        original(*args, **kwargs)
        spent[0] += time.process_time() - started

    attention.select = clocked
    try:
        yield spent
    finally:
        attention.select = original


def case_figures(model: DeepseekV41, mode: Mode, tokens: int, repetitions: int) -> list[Figure]:
    ids = random_ids(model, tokens)
    samples, spent, scored = [], [], 0
    for _ in range(repetitions):
        work = Work()
        with clocked_selection() as selection:
            samples.append(timed(lambda work=work: prefill(model, ids, mode, work)))
        spent.append(selection[0])
        scored = work.index_scored
        progress(f"{tokens:,} tokens, {mode}: {spent[-1]:.2f} of {samples[-1].cpu_s:.2f} CPU-s")
    cpu, wall = [one.cpu_s for one in samples], [one.wall_s for one in samples]
    title = f"{tokens:,} tokens, {mode}"
    return [
        Figure(f"prefill, {title}", "CPU-s", cpu, "selection, next row", cpu, wall),
        Figure(f"selection, {title}", "CPU-s", spent, "prefill", cpu, wall),
        Figure(f"share of selection, {title}", "%", [100 * a / b for a, b in zip(spent, cpu, strict=True)], "prefill"),
        Figure(f"per score, {title}", "CPU-ns", [1e9 * one / scored for one in spent], f"{scored:,} visible scores"),
    ]


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    with checkpoint(args.source) as folder:
        model = load_model(folder).model
        prefill(model, random_ids(model, 2048), "full")
        figures = [figure for mode, tokens in CASES for figure in case_figures(model, mode, tokens, args.repetitions)]
    return report("Share of the index scan", args, figures, {"model": Path(args.source).name})


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("source", nargs="?", type=Path, default=ROOT / "configs" / "bench-6x6.json")
    raise SystemExit(main(options.parse_args()))
