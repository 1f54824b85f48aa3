"""Memory of a long prefill: peak resident size and cache bytes for 131,072 tokens on a small six-layer model.

Bound: 6 GB resident, in a process of its own. Replay is always measured; full, where the decoder runs on every row too,
once, if its time, extrapolated from shorter prompts, is below a limit.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from headrace.models.deepseek_v41.batch import Work
from headrace.models.deepseek_v41.load import load_model

from ._measure import (
    ROOT,
    Figure,
    checkpoint,
    in_fresh_process,
    memory,
    parser,
    prefill,
    progress,
    random_ids,
    report,
)

MAX_RESIDENT = 6e9
TOKENS = 131_072
PROBES = (8192, 16_384)


def child(folder: Path, mode: str, tokens: int, threads: int) -> dict[str, Any]:
    """Prefill once and say what it took."""
    torch.set_num_threads(threads)
    model = load_model(folder).model
    loaded = memory("VmRSS")
    work = Work()
    wall, cpu = time.perf_counter(), time.process_time()
    state = prefill(model, random_ids(model, tokens), mode, work)
    return {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "peak": memory("VmHWM"),
        "loaded": loaded,
        "global_bytes": state.global_bytes,
        "fixed_bytes": sum(part.bytes_fixed for part in state.describe()),
        "index_scored": work.index_scored,
        "layer_rows": work.layer_rows,
    }


def run(folder: Path, mode: str, tokens: int, threads: int) -> dict[str, Any]:
    arguments = (str(folder), "--child", mode, "--tokens", str(tokens), "--threads", str(threads))
    result = in_fresh_process(__file__, *arguments)
    progress(f"{tokens:,} tokens, {mode}: {result['cpu_s']:.1f} CPU-s, peak {result['peak'] / 1e6:,.0f} MB")
    return result


def extrapolated(probes: dict[int, float], tokens: int) -> float:
    """Extend a + b n: seconds per token grow with the context, because every token scans all earlier entries."""
    (n1, t1), (n2, t2) = sorted(probes.items())
    slope = max(0.0, (t2 / n2 - t1 / n1) / (n2 - n1))
    return tokens * (t2 / n2 + slope * (tokens - n2))


def figures_of(mode: str, runs: list[dict[str, Any]], tokens: int) -> list[Figure]:
    cpu, wall = [one["cpu_s"] for one in runs], [one["wall_s"] for one in runs]
    stored = [one["global_bytes"] / tokens for one in runs]
    grown = [(one["peak"] - one["loaded"]) / tokens for one in runs]
    title = f"{tokens:,} tokens, {mode}"
    return [
        Figure(f"peak resident, {title}", "bytes", [one["peak"] for one in runs], "bound", cpu, wall, MAX_RESIDENT),
        Figure(f"resident before, {title}", "bytes", [one["loaded"] for one in runs], "the peak"),
        Figure(f"growth over prefill, {title}", "bytes/token", grown, "stored bytes, next row"),
        Figure(f"global KV and index keys, {title}", "bytes/token", stored, "headrace inspect: kv_bytes_per_token"),
        Figure(f"windows, pairs, look-back, {title}", "bytes", [one["fixed_bytes"] for one in runs], "any length"),
        Figure(f"CPU time, {title}", "CPU-s", cpu, "the other mode", cpu, wall),
        Figure(f"index scores, {title}", "scores", [one["index_scored"] for one in runs], "the other mode"),
    ]


def main(args: argparse.Namespace) -> int:
    with checkpoint(args.source) as folder:
        probes = {tokens: run(folder, "full", tokens, args.threads)["cpu_s"] for tokens in PROBES}
        expected = extrapolated(probes, args.tokens)
        runs = [run(folder, "replay", args.tokens, args.threads) for _ in range(args.repetitions)]
        figures = figures_of("replay", runs, args.tokens)
        notes = {"model": Path(args.source).name, "full mode, expected": f"{expected:.0f} CPU-s from {probes}"}
        if expected <= 60 * args.full_minutes:
            figures += figures_of("full", [run(folder, "full", args.tokens, args.threads)], args.tokens)
        else:
            notes["full mode"] = f"left out: more than {args.full_minutes:g} minutes"
    return report("Memory of a long prefill", args, figures, notes)


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("source", nargs="?", type=Path, default=ROOT / "configs" / "bench-long.json")
    options.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"prompt length ({TOKENS:,})")
    options.add_argument("--full-minutes", type=float, default=15, metavar="M", help="limit of the full run (15)")
    options.add_argument("--child", choices=("replay", "full"), help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.child:
        print(json.dumps(child(chosen.source, chosen.child, chosen.tokens, chosen.threads)))
    else:
        raise SystemExit(main(chosen))
