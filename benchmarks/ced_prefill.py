"""Prefill with and without the decoder on every row, and decode: CPU time and layer-rows on the 6 + 6-layer model.

Bounds: a prompt of 8,192 tokens is read at least 1.7 times as fast by replay as in full; 2,048 tokens take at most 3
CPU-seconds and a decoded token at most 100 CPU-ms on a core that does a bfloat16 matrix product at 200 GFLOP/s (scaled
by the product measured in the same run; vendor code with PyTorch kernels took 17 CPU-s and 352 CPU-ms).
"""

import argparse
import statistics
from pathlib import Path

import numpy as np
import torch

from headrace.cache.sequence_state import SequenceState
from headrace.models.deepseek_v41.batch import Span, Work
from headrace.models.deepseek_v41.load import load_model
from headrace.models.deepseek_v41.model import DeepseekV41

from ._measure import (
    ROOT,
    Figure,
    checkpoint,
    interleaved,
    matrix_product_gflops,
    parser,
    prefill,
    progress,
    random_ids,
    report,
    scaled_bound,
    time_figure,
    timed,
)

LONG, SHORT = 8192, 2048
MIN_RATIO, MAX_PREFILL_S, MAX_DECODE_MS = 1.7, 3.0, 100.0
DECODED = 24
MODES = ("replay", "full")


def prefill_figures(model: DeepseekV41, tokens: int, repetitions: int) -> dict[str, Figure]:
    """Time both modes on one prompt."""
    ids = random_ids(model, tokens)
    samples = interleaved({mode: lambda mode=mode: prefill(model, ids, mode) for mode in MODES}, repetitions)
    return {
        mode: time_figure(f"prefill {tokens:,} tokens, {mode}", samples[mode], "the other mode, same run")
        for mode in MODES
    }


def decode_figure(model: DeepseekV41, context: int, repetitions: int) -> Figure:
    """Time single-token steps, arg max included, after a context."""
    samples = []
    for _ in range(repetitions):
        state = prefill(model, random_ids(model, context), "replay")
        token = step(model, state, 7)  # the first step is not like the others: it grows buffers
        samples.append(timed(lambda state=state, token=token: decode(model, state, token)))
        progress(f"decode at {context:,}: {samples[-1].cpu_s / DECODED * 1e3:.1f} CPU-ms a token")
    name = f"decode at {context:,} tokens"
    return time_figure(name, samples, f"bound; {DECODED} tokens a sample", scale=1e3 / DECODED, unit="CPU-ms/token")


def step(model: DeepseekV41, state: SequenceState, token: int) -> int:
    return int(model.forward([Span(state, np.array([token]), decoder_rows=1)]).logits[-1].argmax())


def decode(model: DeepseekV41, state: SequenceState, token: int) -> None:
    for _ in range(DECODED):
        token = step(model, state, token)


def ratio(slow: Figure, fast: Figure) -> Figure:
    """Return how many times as fast one is, round by round."""
    pairs = list(zip(slow.cpu_s, fast.cpu_s, strict=True))
    name = f"full / replay at {LONG:,} tokens"
    return Figure(name, "x", [a / b for a, b in pairs], "CPU time", bound=MIN_RATIO, is_floor=True)


def work_of(model: DeepseekV41, tokens: int) -> dict[str, str]:
    """Count what both modes compute."""
    counted = {}
    for mode in MODES:
        work = Work()
        prefill(model, random_ids(model, tokens), mode, work)
        counted[f"work of {tokens:,} tokens, {mode}"] = (
            f"{work.layer_rows:,} layer-rows, {work.producer_rows:,} producer rows, "
            f"{work.replayed_rows:,} replayed rows, {work.index_scored:,} index scores"
        )
    return counted


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    with checkpoint(args.source) as folder:
        model = load_model(folder).model
        counted = work_of(model, SHORT)  # also warms up
        speeds = [matrix_product_gflops()]
        short = prefill_figures(model, SHORT, args.repetitions)
        speeds.append(matrix_product_gflops())
        decodes = [decode_figure(model, context, args.repetitions) for context in (16, SHORT)]
        speeds.append(matrix_product_gflops())
        long = prefill_figures(model, LONG, args.repetitions)
        counted |= work_of(model, LONG)
    gflops = statistics.median(speeds)
    for figure in short.values():
        figure.bound = scaled_bound(MAX_PREFILL_S, gflops)
    for figure in decodes:
        figure.bound = scaled_bound(MAX_DECODE_MS, gflops)
    product = Figure("bfloat16 product 2048 x 2048 x 2048", "GFLOP/CPU-s", speeds, "200 when the bounds were written")
    figures = [product, *short.values(), *decodes, *long.values(), ratio(long["full"], long["replay"])]
    return report("Prefill and decode", args, figures, {"model": Path(args.source).name, **counted})


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument(
        "source",
        nargs="?",
        type=Path,
        default=ROOT / "configs" / "bench-6x6.json",
        help="a checkpoint folder, or a configuration to fill with random weights (configs/bench-6x6.json)",
    )
    raise SystemExit(main(options.parse_args()))
