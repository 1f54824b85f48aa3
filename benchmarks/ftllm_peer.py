"""Against `ftllm` 1.9.0, the packaged CPU engine that reads DeepSeek-V4.1: the same model, prompts and answers in turn.

Ours reads the official FP4 and FP8 checkpoint, theirs its bfloat16 twin with equal values; no n-gram tables, one
thread, every prompt token through the whole decoder on both sides; bounded replay is a figure of its own. Each is an
engine in a process of its own, asked through its interface; theirs is stopped while it waits, because it spins. It
keeps a second core busy too, so wall and CPU time are both compared. Needs an interpreter with `ftllm`
(benchmarks/ftllm.txt), named by `--python` or HEADRACE_FTLLM_PYTHON.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.checkpoint.writer import new_checkpoint
from headrace.core.spec import TensorSpec
from headrace.kernels.block_quant import decode_fp4_weight, decode_fp8_weight
from headrace.models.deepseek_v41.config import Config, from_json, to_json
from headrace.models.deepseek_v41.synth import write_checkpoint
from headrace.models.deepseek_v41.weights import load_weights

from . import _ftllm_worker
from ._measure import ROOT, Figure, parser, progress, report

SOURCE = ROOT / "configs" / "bench-40x512.json"
VARIABLE = "HEADRACE_FTLLM_PYTHON"
PROMPTS = (512, 2048)
CONTEXT, TOKENS = 64, 17
DECODES = 4  # as many answers a round as there are prompts of one length
DECODE_BOUND, PREFILL_BOUND = 8.0, 5.0


def plain_config() -> Config:
    """Return the configuration without n-gram tables, draft module and images."""
    document = json.loads(SOURCE.read_text(encoding="utf-8"))
    text = document["text_config"]
    kept = {name: value for name, value in text.items() if not name.startswith(("engram_", "dspark_"))}
    kept |= {"num_nextn_predict_layers": 0, "compress_ratios": text["compress_ratios"][: text["num_hidden_layers"]]}
    return from_json({**document, "text_config": kept, "vision_config": None})


def write_twin(ours: Path, config: Config, out: Path) -> None:
    """Write the checkpoint with every FP8 and FP4 matrix as bfloat16, which holds their values exactly."""
    stored = load_weights(ours, config).tensors
    names = [name for name in stored if f"{name.removesuffix('.scale')}.weight" not in stored or name[-6:] != ".scale"]

    def value(name: str) -> Tensor:
        tensor, scales = stored[name], stored.get(f"{name.removesuffix('.weight')}.scale")
        if scales is None:
            return tensor
        codes, factors = tensor.view(torch.uint8), scales.view(torch.uint8)
        if codes.shape[1] < 32 * factors.shape[1]:  # two FP4 codes a byte
            return decode_fp4_weight(codes, factors)
        return decode_fp8_weight(codes, factors, config.block)

    def source(spec: TensorSpec) -> Iterable[NDArray[np.uint8]]:
        return [value(spec.name).contiguous().view(-1).view(torch.uint8).numpy()]

    dtypes = {torch.bfloat16: "BF16", torch.float32: "F32"}
    made = {name: value(name) for name in names}
    specs = [TensorSpec(name, tuple(tensor.shape), dtypes[tensor.dtype]) for name, tensor in made.items()]
    document = {name: part for name, part in to_json(config).items() if name != "quantization_config"}
    with new_checkpoint(out) as checkpoint:
        checkpoint.write_tensors(specs, source)
        checkpoint.write_bytes("tokenizer.json", (ours / "tokenizer.json").read_bytes())
        # without a chat template it looks for a tokenizer in a format of its own
        words = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages[0]['content'] }}"}
        checkpoint.write_json("tokenizer_config.json", words)
        checkpoint.write_json("config.json", document)


class Theirs:
    """The other engine, stopped while it is not asked."""

    def __init__(self, python: str, folder: Path, threads: int) -> None:
        environment = {**os.environ, "FASTLLM_SKIP_WARMUP": "1"}
        environment.pop("PYTHONPATH", None)
        command = [python, "-P", _ftllm_worker.__file__, str(folder), str(threads)]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, env=environment, text=True)
        self.version = self._line().strip()
        self._process.send_signal(signal.SIGSTOP)

    def ask(self, ids: list[int], count: int) -> dict[str, Any]:
        """Return ids, and wall and CPU seconds after each."""
        self._process.send_signal(signal.SIGCONT)
        time.sleep(0.1)
        self._process.stdin.write(json.dumps({"ids": ids, "count": count}) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        self._process.send_signal(signal.SIGSTOP)
        return found

    def _line(self) -> str:
        if line := self._process.stdout.readline():
            return str(line)
        raise SystemExit("the other engine ended early; run benchmarks/_ftllm_worker.py by itself to see why")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


class Ours:
    """An engine of ours, asked in one mode."""

    def __init__(self, llm: LLM, pid: int, mode: Literal["full", "replay"]) -> None:
        self._llm, self._pid, self._mode = llm, pid, mode

    def ask(self, ids: list[int], count: int) -> dict[str, Any]:
        """Return ids, and wall and CPU seconds (of the engine's process and this one) after each."""
        found: dict[str, Any] = {"ids": [], "wall": [], "cpu": []}
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, seed=1, mode=self._mode)
        wall, cpu = time.perf_counter(), self._cpu()
        for piece in self._llm.stream([ids], params):
            found["ids"].append(piece.token_id)
            found["wall"].append(time.perf_counter() - wall)
            found["cpu"].append(self._cpu() - cpu)
        return found

    def _cpu(self) -> float:
        # nanoseconds of every thread; /proc/PID/stat counts ticks
        tasks = Path(f"/proc/{self._pid}/task").glob("*/schedstat")
        return time.process_time() + sum(int(one.read_text(encoding="ascii").split()[0]) for one in tasks) / 1e9


def _children() -> set[int]:
    found = [part.read_text(encoding="ascii").split() for part in Path("/proc/self/task").glob("*/children")]
    return {int(child) for children in found for child in children}


def measure(
    engines: Mapping[str, Theirs | Ours], vocab_size: int, rounds: int, prompts: Sequence[int]
) -> dict[str, Any]:
    """Ask everybody the same in turn; return seconds by what, engine and clock, and the ids."""
    random = np.random.default_rng(1)
    found: dict[str, Any] = {"ids": []}
    for _ in range(rounds):
        for tokens in (*[CONTEXT] * DECODES, *prompts):
            ids = random.integers(3, vocab_size - 16, tokens).tolist()
            what = "decode" if tokens == CONTEXT else f"prefill {tokens}"
            answers = {}
            for name, engine in engines.items():
                if what == "decode" and name == "replay":
                    continue
                one = answers[name] = engine.ask(ids, TOKENS if what == "decode" else 1)
                for clock in ("wall", "cpu"):
                    times = one[clock]
                    took = (times[-1] - times[0]) / (len(times) - 1) if what == "decode" else times[0]
                    found.setdefault((what, name, clock), []).append(took)
                progress(f"{what}: {name} {found[what, name, 'wall'][-1]:.4f} s")
            found["ids"].append((answers["full"]["ids"], answers["theirs"]["ids"]))
    return found


def figures(found: dict[str, Any], prompts: Sequence[int]) -> Iterator[Figure]:
    """Times and ratios."""
    for what in ("decode", *(f"prefill {tokens}" for tokens in prompts)):
        sizes = {name: found.get((what, name, "wall")) for name in ("full", "theirs", "replay")}
        scale = 1e3 / (1 if what == "decode" else int(what.split()[1]))
        for name, wall in sizes.items():
            if wall is not None:
                cpu = found[what, name, "cpu"]
                against = "ours, full" if name == "theirs" else "theirs"
                title = f"{what}, {name if name == 'theirs' else f'ours, {name}'}"
                yield Figure(title, "ms a token, wall", [scale * one for one in wall], against, cpu, wall)
        bound = DECODE_BOUND if what == "decode" else PREFILL_BOUND
        for name in ("full", "replay"):
            for clock in ("wall", "cpu") if sizes[name] is not None else ():
                pairs = zip(found[what, "theirs", clock], found[what, name, clock], strict=True)
                kept = bound if name == "full" else None
                title = f"{what}, theirs / ours ({name}), {clock}"
                yield Figure(title, "1", [a / b for a, b in pairs], "times as fast", bound=kept, is_floor=True)


@contextmanager
def both(python: str, threads: int) -> Iterator[tuple[Theirs, LLM, int]]:
    """Give the engines on one model: theirs, ours and the process of ours."""
    config = plain_config()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        folder, twin = Path(scratch) / "ours", Path(scratch) / "twin"
        write_checkpoint(config, folder, seed=1)
        write_twin(folder, config, twin)
        theirs = Theirs(python, twin, threads)
        try:
            shutil.rmtree(twin)
            before = _children()
            with LLM(folder, threads=threads, kernels="native", has_prefix_cache=False, num_slots=1) as ours:
                (pid,) = _children() - before
                yield theirs, ours, pid
        finally:
            theirs.close()


def check_peer(python: str) -> None:
    """Refuse an interpreter without the other engine."""
    asked = [python, "-c", "import importlib.util as u; raise SystemExit(u.find_spec('ftllm') is None)"]
    try:
        is_there = subprocess.run(asked, capture_output=True, check=False).returncode == 0
    except OSError:
        is_there = False
    if not is_there:
        raise SystemExit(f"{python} has no ftllm; one with benchmarks/ftllm.txt is wanted, in --python or {VARIABLE}")


def main(args: argparse.Namespace) -> int:
    check_peer(args.python)
    with both(args.python, args.threads) as (theirs, llm, pid):
        engines = {"theirs": theirs, "full": Ours(llm, pid, "full"), "replay": Ours(llm, pid, "replay")}
        found = measure(engines, llm.config.vocab_size, args.repetitions, args.prompts)
        same = sum(ours[0] == others[0] for ours, others in found["ids"])
        notes = {
            "theirs": f"ftllm {theirs.version}, bfloat16 twin",
            "ours": f"{llm.numerics}, official FP4 and FP8",
            "model": f"{SOURCE.name} without n-gram tables, draft module and images",
            "equal first ids": f"{same} of {len(found['ids'])}; weights are random, and rounding decides",
        }
    return report("Against ftllm on a CPU", args, list(figures(found, args.prompts)), notes)


if __name__ == "__main__":
    options = parser(__doc__)
    default = os.environ.get(VARIABLE, sys.executable)
    options.add_argument("--python", default=default, metavar="FILE", help=f"interpreter with ftllm (${VARIABLE})")
    help_text = f"tokens of the prompts that are read ({' '.join(map(str, PROMPTS))}); none: decode only"
    options.add_argument("--prompts", type=int, nargs="*", default=PROMPTS, metavar="N", help=help_text)
    raise SystemExit(main(options.parse_args()))
