"""Memory of loading: the peak while a checkpoint of about 500 MB is read, against what is resident afterwards.

Bound: the peak is at most the final resident size plus the largest tensor: tensors are read and converted one by one.
The checkpoint is the 6 + 6-layer configuration with four times as many experts; loading runs in a fresh process.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint.catalog import open_catalog
from headrace.models.deepseek_v41.load import LoadOptions, load_model

from ._measure import ROOT, Figure, checkpoint, in_fresh_process, memory, parser, report

MORE_EXPERTS = {"n_routed_experts": 256}


def child(folder: Path, threads: int) -> dict[str, Any]:
    """Load once and say what it took."""
    torch.set_num_threads(threads)
    torch.nn.functional.linear(torch.ones(8, 64).bfloat16(), torch.ones(64, 64).bfloat16())  # loads the libraries
    before = memory("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    loaded = load_model(folder, LoadOptions(has_draft=True))
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


def main(args: argparse.Namespace) -> int:
    with checkpoint(args.source, MORE_EXPERTS) as folder:
        sizes = [entry.nbytes for entry in open_catalog(folder).tensors.values()]
        arguments = (str(folder), "--child", "--threads", str(args.threads))
        runs = [in_fresh_process(__file__, *arguments) for _ in range(args.repetitions)]
    cpu, wall = [run["cpu_s"] for run in runs], [run["wall_s"] for run in runs]
    largest = float(max(sizes))
    figures = [
        Figure("checkpoint", "bytes", [float(sum(sizes))], "the sizes below"),
        Figure("largest tensor", "bytes", [largest], "the excess of the peak"),
        Figure(
            "resident after loading", "bytes", [run["after"] - run["before"] for run in runs], "checkpoint", cpu, wall
        ),
        Figure("peak while loading", "bytes", [run["peak"] - run["before"] for run in runs], "resident after loading"),
        Figure(
            "peak over final", "bytes", [run["peak"] - run["after"] for run in runs], "largest tensor", bound=largest
        ),
        Figure("CPU time of loading", "CPU-s", cpu, "none", cpu, wall),
    ]
    return report("Memory of loading", args, figures, {"model": f"{args.source.name} with {MORE_EXPERTS}"})


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("source", nargs="?", type=Path, default=ROOT / "configs" / "bench-6x6.json")
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.child:
        print(json.dumps(child(chosen.source, chosen.threads)))
    else:
        raise SystemExit(main(chosen))
