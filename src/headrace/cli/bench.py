"""`headrace bench cpu`: decode and prefill on native kernels against the eager path, interleaved, in one run."""

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headrace.cli import bench_worker
from headrace.core.errors import UserError

EAGER_COMMIT = "10939fb"
"""The last version without native kernels; its eager path is what they are measured against."""

ROUNDS = 5
STEPS = 6
PREFILL = 2048
_ROOT = Path(__file__).resolve().parents[3]
_SYNTHETIC = "configs/bench-40x512.json"


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "bench",
        help="measure native kernels against the eager path",
        description="Measure decode and prefill on native kernels against the eager path, interleaved in one run.",
    )
    parser.add_argument("what", choices=("cpu",), help="cpu: the kernels of this processor")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--kernels", default="native", metavar="K", help="what is measured (native)")
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"a second, random model ({_SYNTHETIC})")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="PyTorch threads (1)")


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        UserError: there are no native kernels, or the configuration is refused.
    """
    from headrace.core.shipped import shipped_model
    from headrace.kernels.native.choice import choose
    from headrace.kernels.native.library import load
    from headrace.models.deepseek_v41.config import load_config
    from headrace.models.deepseek_v41.synth import write_checkpoint

    choice = choose(args.kernels)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        source = _eager_source(scratch / "eager")
        models = {"nano": Path(shipped_model())}
        config = args.config or (_ROOT / _SYNTHETIC if (_ROOT / _SYNTHETIC).is_file() else None)
        if config is not None:
            write_checkpoint(load_config(config), scratch / "model", seed=0)
            models[config.stem] = scratch / "model"
        results = {name: _measure(path, source, args) for name, path in models.items()}
    document = {
        "eager": EAGER_COMMIT if source else "the PyTorch path of this version; its history is not here",
        "kernels": choice.id,
        "instruction_set": load().instruction_set if choice.native else None,
        "threads": args.threads,
        "processor": platform.processor() or platform.machine(),
        "load_average": os.getloadavg()[0],
        "unit": "CPU milliseconds, medians",
        "models": results,
    }
    print(json.dumps(document, indent=2) if args.json else _text(document))
    return 0


def _eager_source(folder: Path) -> Path | None:
    """Unpack the eager version's package from the checkout's history; None where there is none."""
    command = ["git", "-C", str(_ROOT), "archive", EAGER_COMMIT, "src/headrace"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


class _Process:
    """A worker of its own on one version of the package."""

    def __init__(self, path: Path, source: Path, kernels: str, threads: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-P", bench_worker.__file__, str(path), kernels, str(threads)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)

    def ask(self, line: str) -> list[tuple[float, float]]:
        if self._process.stdin is None or self._process.stdout is None:
            raise UserError("the benchmark's worker has no pipes")
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise UserError("the benchmark's worker ended early; its last words are above")
        return [(cpu, wall) for cpu, wall in json.loads(answer)]

    def close(self) -> None:
        self._process.communicate()


def _measure(path: Path, source: Path | None, args: argparse.Namespace) -> dict[str, Any]:
    here = Path(__file__).resolve().parents[2]
    eager = _Process(path, source or here, "" if source else "torch", args.threads)
    native = _Process(path, here, args.kernels, args.threads)
    lines = {"decode_1": f"decode 1 {STEPS}", "decode_8": f"decode 8 {STEPS}", "prefill": f"prefill {PREFILL}"}
    try:
        found = {name: _interleave(eager, native, line) for name, line in lines.items()}
    finally:
        eager.close()
        native.close()
    one, eight = found["decode_1"], found["decode_8"]
    found["streams_8_over_1"] = {kind: 8 * one[kind]["cpu_ms"] / eight[kind]["cpu_ms"] for kind in ("eager", "native")}
    return found


def _interleave(eager: _Process, native: _Process, line: str) -> dict[str, Any]:
    samples: dict[str, list[tuple[float, float]]] = {"eager": [], "native": []}
    for _ in range(3 if line.startswith("prefill") else ROUNDS):
        for name, process in (("eager", eager), ("native", native)):
            samples[name] += process.ask(line)
    found: dict[str, Any] = {
        name: {
            "cpu_ms": 1e3 * statistics.median(cpu for cpu, _ in pairs),
            "wall_ms": 1e3 * statistics.median(wall for _, wall in pairs),
            "samples": len(pairs),
        }
        for name, pairs in samples.items()
    }
    found["ratio"] = found["eager"]["cpu_ms"] / found["native"]["cpu_ms"]
    return found


def _text(document: dict[str, Any]) -> str:
    lines = [
        f"eager {document['eager']}; {document['kernels']} on {document['instruction_set']}; {document['unit']}",
        "",
    ]
    for model, found in document["models"].items():
        for name in ("decode_1", "decode_8", "prefill"):
            one = found[name]
            eager, native = one["eager"]["cpu_ms"], one["native"]["cpu_ms"]
            lines.append(f"{model:<16} {name:<9} eager {eager:10.2f}  native {native:10.2f}  ratio {one['ratio']:6.2f}")
        ratio = found["streams_8_over_1"]["native"]
        lines.append(f"{model:<16} 8 streams give {ratio:.2f} times the tokens per second of one")
    return "\n".join(lines)
