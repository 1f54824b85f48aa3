"""Decode at 65,536 and 1,048,576 tokens of context against 4,096, split into index, attention and the rest.

`configs/bench-proportions-2560.json` is the released model with a quarter of its work in every part. Halved are hidden
size, expert width, vocabulary, heads of attention and their width, output groups, heads of the index and their width,
n-gram heads and rotated columns. As released are 40 layers with their ratios, sources and candidate pool, 512 picks,
the window of 128, 6 experts a token, low ranks, streams and Sinkhorn steps. There are 16 routed experts, and n-gram
tables are short: the work of a token knows neither number. The first figures say what share of the released work each
part has, and how the work of a token grows with its context, beside the release.
`configs/bench-proportions.json` (`--config`) has the proportions of weights and index in multiply-adds only: 512 wide
with one index head of 32, so small that passes over keys weigh more than products. No bound holds for it.

The caches hold random valid rows, so that no prompt has to be read. Bounds hold for native kernels.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.cache.sequence_state import SequenceState
from headrace.kernels.native.attention import Attention
from headrace.kernels.native.choice import choose
from headrace.kernels.native.index import Index
from headrace.models.deepseek_v41 import attention, native_attention
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41, Numerics
from headrace.plan.families import read_model
from headrace.plan.ledger.arithmetic import decode_growth
from headrace.plan.work import decode_flops

from ._measure import ROOT, Figure, checkpoint, parser, progress, random_ids, report

CONTEXTS = (4096, 65_536, 1_048_576)
BOUNDS = {65_536: 1.05, 1_048_576: 1.3}
CONFIG = ROOT / "configs" / "bench-proportions-2560.json"
RELEASE = "deepseek-v4.1-flash"
STEPS = 8
FILL = 8192


def filled(model: DeepseekV41, tokens: int, steps: int) -> SequenceState:
    """Return a state to which `steps` more tokens make `tokens`; its entries, keys and window rows are random."""
    state, config, tokens = model.new_state(), model.config, tokens - steps
    generator = torch.Generator().manual_seed(tokens)
    state.reserve(tokens + steps)
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

    def counted(part: str, original: Callable[..., Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                spent[part] += time.process_time() - began

        return call

    places: list[tuple[str, Any, str]] = [
        ("index", attention, "select"),
        ("index", Index, "__call__"),
        ("attention", attention, "attend"),
        ("attention", native_attention, "gather"),
        ("attention", Attention, "__call__"),
    ]
    with ExitStack() as stack:
        for part, owner, name in places:
            original = getattr(owner, name)
            setattr(owner, name, counted(part, original))
            stack.callback(setattr, owner, name, original)
        yield spent


def measure(model: DeepseekV41, states: dict[int, SequenceState], ids: np.ndarray) -> dict[int, dict[str, float]]:
    """Decode the tokens at each context, in turn; CPU-ms of a token by part."""
    found = {tokens: {"index": 0.0, "attention": 0.0, "all": 0.0} for tokens in states}
    for token in ids:
        for tokens, state in states.items():
            with split() as spent:
                began = time.process_time()
                model.forward([Span(state, np.array([token]), 1)])
                found[tokens]["all"] += time.process_time() - began
            for part in spent:
                found[tokens][part] += spent[part]
    return {tokens: {part: 1000 * value / len(ids) for part, value in one.items()} for tokens, one in found.items()}


def proportions(config: Path, low: int, high: int) -> list[Figure]:
    """Return the work of a token in each part as shares of the release's, and its growth beside the release's."""
    ours, theirs = read_model(str(config)), read_model(RELEASE)
    mine, released = decode_flops(ours, high), decode_flops(theirs, high)
    figures = [
        Figure(f"work of {part} at {high:,} tokens", "of the release", [ours_of / theirs_of], "-")
        for part, ours_of, theirs_of in (
            ("weights", mine.weights, released.weights),
            ("attention", mine.attention, released.attention),
            ("index", mine.index, released.index),
        )
    ]
    for name, facts in (("this model", ours), ("the release", theirs)):
        figures.append(
            Figure(f"work at {high:,} / at {low:,}, {name}", "ratio", [decode_growth(facts, low, high)], "-")
        )
    return figures


def times(contexts: list[int], samples: list[dict[int, dict[str, float]]], *, has_bounds: bool) -> list[Figure]:
    """Return CPU-ms by part at each context, and every context's ratio to the shortest."""
    figures = []
    for tokens in contexts:
        for part in ("index", "attention", "rest", "all"):
            values = [
                one[tokens]["all"] - one[tokens]["index"] - one[tokens]["attention"]
                if part == "rest"
                else one[tokens][part]
                for one in samples
            ]
            figures.append(Figure(f"{part}, {tokens:,} tokens of context", "CPU-ms/token", values, "-"))
    low = min(contexts)
    for tokens in contexts:
        if tokens > low:
            ratios = [one[tokens]["all"] / one[low]["all"] for one in samples]
            bound = BOUNDS.get(tokens) if has_bounds else None
            figures.append(Figure(f"a token at {tokens:,} / at {low:,}", "ratio", ratios, "same run", bound=bound))
    return figures


def main() -> int:
    """Measure and report."""
    made = parser(__doc__)
    made.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), metavar="N", help="tokens of context")
    made.add_argument("--config", type=Path, default=CONFIG, metavar="FILE", help=f"what to measure ({CONFIG.name})")
    made.add_argument("--kernels", default="auto", metavar="K", help="as for HEADRACE_KERNELS (auto)")
    args = made.parse_args()
    torch.set_num_threads(args.threads)
    choice, contexts = choose(args.kernels), sorted(args.contexts)
    steps = STEPS * (args.repetitions + 1)
    samples: list[dict[int, dict[str, float]]] = []
    with checkpoint(args.config) as folder:
        model = load_model(folder, LoadOptions(numerics=Numerics(kernels=args.kernels))).model
        states = {tokens: filled(model, tokens, steps) for tokens in contexts}
        ids = random_ids(model, steps).reshape(-1, STEPS)
        for repetition in range(args.repetitions + 1):
            samples.append(measure(model, states, ids[repetition]))
            progress(f"round {repetition}: {samples[-1]}")
    has_bounds = args.config.resolve() == CONFIG and choice.id == "native"
    figures = times(contexts, samples[1:], has_bounds=has_bounds)  # the first round warms up
    if args.config.is_file():
        figures = proportions(args.config, contexts[0], contexts[-1]) + figures
    return report("Decode by context", args, figures, {"config": args.config.name, "kernels": choice.id})


if __name__ == "__main__":
    raise SystemExit(main())
