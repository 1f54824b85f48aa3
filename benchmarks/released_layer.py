"""One layer at released sizes decodes a token: its time against reading its weights once, at 1 and 2 threads.

Width 5120, 64 heads of 512, 6 of 384 experts of 2304, an indexer of 32 heads of 128: once with an entry per token
(ratio 1, as the decoder's source), once with one per two tokens (ratio 2, as the encoder's), each loaded from files of
7.3 GB as the engine does. Vocabulary, n-gram tables and draft module are left out. A step reads some 300 MB, several
times what caches hold, so every step is cold. What it is compared with is a plain sum over as many bytes of the same
weights, with as many threads, in turn. Bound: 1.5 times that; CPU time for one thread, wall time for two.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.native.tiles import Matrix
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.config import from_json
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41, Numerics
from headrace.models.deepseek_v41.synth import write_checkpoint

from ._measure import ROOT, Figure, interleaved, parser, prefill, progress, random_ids, report

SOURCE = ROOT / "configs" / "bench-40x512.json"
RELEASED = {
    "vocab_size": 1024,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "kv_source_layer_ids": [0],
    "index_source_layer_ids": [0],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "num_nextn_predict_layers": 0,
}
CONTEXT = 1280  # tokens: at least 512 entries at both ratios
STEPS = 24
BOUND = 1.5


def layer_config(ratio: int) -> dict[str, Any]:
    """Return the configuration of a model that is one such layer."""
    document = json.loads(SOURCE.read_text(encoding="utf-8"))
    kept = {name: part for name, part in document["text_config"].items() if not name.startswith(("engram_", "dspark_"))}
    pool = {"candidate_source_layer_id": 0 if ratio == 1 else -1, "compress_ratios": [ratio], "dspark_block_size": 0}
    del document["image_token_id"]
    return {**document, "text_config": {**kept, **RELEASED, **pool}, "vision_config": None}


def matrices(model: DeepseekV41) -> tuple[list[Matrix], list[Matrix]]:
    """Return the matrices that every token reads, and all routed experts'."""
    (layer,) = model.parameters.layers
    tiled, head = layer.tiled, model.parameters.tiled_head
    attention, experts, compressor = tiled.attention, tiled.experts, tiled.compressor
    always = [attention.q_a_kv, attention.q_b, *attention.o_a, attention.o_b, attention.index_q_b, head]
    always += [attention.head_weights, compressor.kv, compressor.gate, compressor.index_key]
    always += [experts.router, experts.shared_gate_up, experts.shared_down]
    routed = [matrix for parts in zip(experts.gate, experts.up, experts.down, strict=True) for matrix in parts]
    return [matrix for matrix in always if matrix is not None], routed


class Layer:
    """A loaded layer with a context, and a plain read of as many bytes."""

    def __init__(self, folder: Path) -> None:
        self._model = load_model(folder, LoadOptions(numerics=Numerics(kernels="native"))).model
        (layer,) = self._model.parameters.layers
        always, routed = matrices(self._model)
        per_token = self._model.config.experts_per_token
        mixes = layer.attn_mix.fn.nbytes + layer.ffn_mix.fn.nbytes
        chosen = per_token * sum(matrix.nbytes for matrix in routed) // (len(routed) // 3)
        self.bytes = sum(matrix.nbytes for matrix in always) + mixes + chosen
        self._flat = [matrix.tiles.view(-1).view(torch.int64) for matrix in routed]
        self._seed = 0
        self._state = prefill(self._model, random_ids(self._model, CONTEXT), "full")

    def step(self) -> None:
        """Decode a random token."""
        self._seed += 1
        self._model.forward([Span(self._state, random_ids(self._model, 1, self._seed), 1)])

    def steps(self) -> None:
        """Decode some tokens."""
        for _ in range(STEPS):
            self.step()

    def read(self) -> None:
        """Sum as many bytes as these tokens read, of routed experts one after another."""
        left = STEPS * self.bytes // 8
        while left > 0:
            for part in self._flat:
                left -= self._sum(part[: max(left, 0)])

    @staticmethod
    def _sum(part: Tensor) -> int:
        part.sum()
        return part.numel()


def figures(name: str, layer: Layer, threads: int, rounds: int) -> Iterator[Figure]:
    """Time of a step, the plain read, and their ratio."""
    torch.set_num_threads(threads)
    layer.steps()
    found = interleaved({"steps": layer.steps, "read": layer.read}, rounds)
    title = f"{name}, {threads} threads"

    def seconds(kind: str) -> list[float]:
        return [one.cpu_s if threads == 1 else one.wall_s for one in found[kind]]

    for kind, what in (("steps", "a token"), ("read", "a plain read of as many bytes")):
        samples, clock = found[kind], "CPU-ms" if threads == 1 else "ms wall"
        times = [1e3 * one / STEPS for one in seconds(kind)]
        cpu, wall = [one.cpu_s for one in samples], [one.wall_s for one in samples]
        yield Figure(f"{title}, {what}", clock, times, "the other", cpu, wall)
    speeds = [STEPS * layer.bytes / one / 1e9 for one in seconds("read")]
    yield Figure(f"{title}, plain read", "GB/s", speeds, "none")
    ratios = [a / b for a, b in zip(seconds("steps"), seconds("read"), strict=True)]
    yield Figure(f"{title}, a token / a plain read", "1", ratios, "bytes / bandwidth", bound=BOUND)


def main(args: argparse.Namespace) -> int:
    result: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        for ratio in (1, 2):
            folder = (args.folder or Path(scratch)) / f"layer-{ratio}"
            if not (folder / "config.json").exists():
                progress(f"random weights of a layer of ratio {ratio}")
                write_checkpoint(from_json(layer_config(ratio)), folder, seed=1)
            progress(f"loading a layer of ratio {ratio}")
            layer, name = Layer(folder), f"ratio {ratio}"
            result.append(Figure(f"{name}, weights that a token reads", "bytes", [float(layer.bytes)], "none"))
            for threads in (1, 2):
                result += figures(name, layer, threads, args.repetitions)
            del layer
            if args.folder is None:
                for file in folder.iterdir():
                    file.unlink()
    return report("A layer at released sizes", args, result, {"context": CONTEXT, "tokens of a sample": STEPS})


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("folder", nargs="?", type=Path, help="where the two checkpoints are kept (a temporary folder)")
    raise SystemExit(main(options.parse_args()))
