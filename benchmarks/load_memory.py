"""Memory of loading: the peak while a checkpoint of about 500 MB is read, against what is resident afterwards.

Bound: the peak is at most the final resident size plus the largest tensor: tensors are read and converted one by one,
for PyTorch and for native kernels; and what is resident is at most a quarter more than the checkpoint. The checkpoint
is the 6 + 6-layer configuration with four times as many experts; loading runs in a fresh process.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint.catalog import open_catalog
from headrace.kernels.native.library import why_absent
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import Numerics

from ._measure import ROOT, Figure, checkpoint, in_fresh_process, memory, parser, report

MORE_EXPERTS = {"n_routed_experts": 256}
MOST = 1.25


def child(folder: Path, threads: int, kernels: str) -> dict[str, Any]:
    """Load once and say what it took."""
    torch.set_num_threads(threads)
    torch.nn.functional.linear(torch.ones(8, 64).bfloat16(), torch.ones(64, 64).bfloat16())  # loads the libraries
    before = memory("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    loaded = load_model(folder, LoadOptions(has_draft=True, numerics=Numerics(kernels=kernels)))
    took = (time.process_time() - cpu, time.perf_counter() - wall)
    layers = len(loaded.model.parameters.layers)
    return {
        "cpu_s": took[0],
        "wall_s": took[1],
        "before": before,
        "after": memory("VmRSS"),
        "peak": memory("VmHWM"),
        "layers": layers,
    }


def figures(kernels: str, runs: list[dict[str, Any]], sizes: list[float]) -> Iterator[Figure]:
    """Sizes and times of loading for one kind of kernels."""
    cpu, wall = [run["cpu_s"] for run in runs], [run["wall_s"] for run in runs]
    final, peak = ([run[when] - run["before"] for run in runs] for when in ("after", "peak"))
    over = [a - b for a, b in zip(peak, final, strict=True)]
    yield Figure(f"{kernels}: resident after loading", "bytes", final, "checkpoint", cpu, wall)
    yield Figure(f"{kernels}: peak while loading", "bytes", peak, "resident after loading")
    yield Figure(f"{kernels}: peak over final", "bytes", over, "largest tensor", bound=max(sizes))
    yield Figure(
        f"{kernels}: resident / checkpoint", "1", [one / sum(sizes) for one in final], "checkpoint", bound=MOST
    )
    yield Figure(f"{kernels}: CPU time of loading", "CPU-s", cpu, "none", cpu, wall)


def main(args: argparse.Namespace) -> int:
    found: list[Figure] = []
    with checkpoint(args.source, MORE_EXPERTS) as folder:
        sizes = [float(entry.nbytes) for entry in open_catalog(folder).tensors.values()]
        found.append(Figure("checkpoint", "bytes", [sum(sizes)], "the sizes below"))
        found.append(Figure("largest tensor", "bytes", [max(sizes)], "the excess of the peak"))
        for kernels in ("torch", *(("native",) if why_absent() is None else ())):
            arguments = (str(folder), "--child", kernels, "--threads", str(args.threads))
            runs = [in_fresh_process(__file__, *arguments) for _ in range(args.repetitions)]
            found += figures(kernels, runs, sizes)
    return report("Memory of loading", args, found, {"model": f"{args.source.name} with {MORE_EXPERTS}"})


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("source", nargs="?", type=Path, default=ROOT / "configs" / "bench-6x6.json")
    options.add_argument("--child", metavar="KERNELS", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.child:
        print(json.dumps(child(chosen.source, chosen.threads, chosen.child)))
    else:
        raise SystemExit(main(chosen))
