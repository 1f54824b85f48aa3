"""Decode at 65,536 tokens of context against 4,096, split into index, attention and the rest.

The model is `configs/bench-proportions.json`: the released plan of 40 layers at width 512, with as many multiply-adds
of the index per key, over those of the layers, as the release has (within 10 %). The caches hold random valid rows, so
that no prompt has to be read. No bound: today's scan is plain PyTorch and unpacks FP4 keys at every step.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.cache.sequence_state import SequenceState
from headrace.models.deepseek_v41 import attention
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.load import load_model
from headrace.models.deepseek_v41.model import DeepseekV41

from ._measure import ROOT, Figure, checkpoint, parser, progress, random_ids, report

CONTEXTS = (4096, 65_536)
STEPS = 8
FILL = 8192


def filled(model: DeepseekV41, tokens: int) -> SequenceState:
    """Return a state of `tokens` tokens whose entries, keys and window rows are random."""
    state, config = model.new_state(), model.config
    generator = torch.Generator().manual_seed(tokens)
    state.reserve(tokens + STEPS + 1)
    for source, store in state.stores.items():
        count = tokens // config.compress_ratios[source]
        for low in range(0, count, FILL):
            rows = min(FILL, count - low)
            entries = torch.randn(rows, config.head_dim, generator=generator).bfloat16()
            store.append(entries, torch.randn(rows, config.index_head_dim, generator=generator).bfloat16())
    for ring in state.rings:
        ring.restart(tokens - config.window)
        ring.store(tokens - config.window, torch.randn(config.window, config.head_dim, generator=generator).bfloat16())
    for pair in state.pairs.values():
        pair.restart(tokens)
    ids = random_ids(model, state.shape.lookback_depth)
    state.commit(tokens, None if model.addressing is None else model.addressing.compress(ids))
    return state


@contextmanager
def split() -> Iterator[dict[str, float]]:
    """Count the CPU seconds of selection and of attention over entries and windows while this is open."""
    spent = {"index": 0.0, "attention": 0.0}
    kept = {"index": attention.select, "attention": attention.attend}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return kept[name](*args, **kwargs)
            finally:
                spent[name] += time.process_time() - began

        return call

    attention.select, attention.attend = counted("index"), counted("attention")  # type: ignore[assignment]
    try:
        yield spent
    finally:
        attention.select, attention.attend = kept["index"], kept["attention"]  # type: ignore[assignment]


def measure(model: DeepseekV41, states: dict[int, SequenceState]) -> dict[int, dict[str, float]]:
    """Decode `STEPS` tokens at each context, in turn; CPU-ms of a token by part."""
    found = {tokens: {"index": 0.0, "attention": 0.0, "all": 0.0} for tokens in states}
    for _ in range(STEPS):
        for tokens, state in states.items():
            with split() as spent:
                began = time.process_time()
                model.forward([Span(state, np.array([5]), 1)])
                found[tokens]["all"] += time.process_time() - began
            for part in spent:
                found[tokens][part] += spent[part]
    return {tokens: {part: 1000 * value / STEPS for part, value in one.items()} for tokens, one in found.items()}


def main() -> int:
    """Measure and report."""
    made = parser(__doc__)
    made.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), metavar="N", help="tokens of context")
    args = made.parse_args()
    torch.set_num_threads(args.threads)
    samples: list[dict[int, dict[str, float]]] = []
    with checkpoint(ROOT / "configs" / "bench-proportions.json") as folder:
        model = load_model(Path(folder)).model
        for repetition in range(args.repetitions):
            samples.append(measure(model, {tokens: filled(model, tokens) for tokens in args.contexts}))
            progress(f"round {repetition}: {samples[-1]}")
    figures = []
    for tokens in args.contexts:
        for part in ("index", "attention", "rest", "all"):
            values = [
                one[tokens]["all"] - one[tokens]["index"] - one[tokens]["attention"]
                if part == "rest"
                else one[tokens][part]
                for one in samples
            ]
            figures.append(Figure(f"{part}, {tokens:,} tokens of context", "CPU-ms/token", values, "-"))
    low, high = min(args.contexts), max(args.contexts)
    ratios = [one[high]["all"] / one[low]["all"] for one in samples]
    figures.append(Figure(f"a token at {high:,} / at {low:,}", "ratio", ratios, "same run"))
    return report("Decode by context", args, figures, {"config": "configs/bench-proportions.json"})


if __name__ == "__main__":
    raise SystemExit(main())
