"""Traces of the cached path for tests: loaded models of every shape the architecture allows, and bitwise comparison."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.kernels.native.choice import wanted_kernels
from headrace.kernels.native.library import available, why_absent
from headrace.models.deepseek_v41.batch import Mode, Span
from headrace.models.deepseek_v41.config import Config, table_rows
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41, Numerics
from headrace.text.token_map import build_token_map
from headrace.text.tokenizer import Tokenizer
from tests.factories import tiny_checkpoint, tiny_config
from tests.golden_mini import FOLDER

# Arguments of `tiny_config`. All have a window of 8 and, with ratio 1, a pool of 12 entries unless they say otherwise,
# so that a prompt of 61 tokens leaves both behind many times.
SHAPES: dict[str, dict[str, Any]] = {
    "three streams": {},
    "five streams, no draft": {"streams": 5, "draft": False, "vision": False},
    "no n-grams, no pool": {"streams": 2, "engram": False, "candidate_source_layer_id": -1},
    "wide window": {"streams": 4, "sliding_window": 72, "index_topk": 9, "candidate_block_size": 8},
    "window of one": {"sliding_window": 1, "vision": False},
    "n-grams and taps on both sides of the cut": {"engram_layer_ids": [2, 4], "dspark_target_layer_ids": [2, 3, 5]},
    "pairs in the decoder": {
        "streams": 1,
        "compress_ratios": [0, 1, 1, 2, 2, 2, 2, 0, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 5],
        "candidate_source_layer_id": -1,
        "engram_layer_ids": [0],
        "engram_num_embeddings": list(table_rows(101, num_layers=1, max_ngram=4, num_hashes=2)),
    },
    "no encoder": {
        "compress_ratios": [1, 1, 1, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [0],
        "index_source_layer_ids": [0, 2, 5],
        "candidate_source_layer_id": 0,
    },
}

FOUR_STREAMS = "four streams"  # the shape that native kernels do whole


@dataclass(frozen=True)
class Synthetic:
    """A random model in both forms: `model` is the cached path; the rest is what the reference takes."""

    config: Config
    model: DeepseekV41
    weights: dict[str, Tensor]
    token_map: Tensor | None

    def ids(self, count: int, seed: int = 0) -> np.ndarray:
        """Return random token ids, some of them in runs that repeat, [count] int64."""
        generator = np.random.default_rng(seed)
        ids = generator.integers(0, self.config.vocab_size, count)
        repeated = generator.random(count) < 0.2
        repeated[0] = False
        return np.where(repeated, np.roll(ids, 1), ids)


KERNELS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(not available(), reason=f"no native kernels: {why_absent()}")),
]
"""Numerics that a whole matrix of tests runs under; nothing is compared across them."""


def golden_model(*, is_fp32_index: bool = False) -> DeepseekV41:
    """Return the golden checkpoint as the cached path runs it, on the kernels that the environment asks for."""
    return _golden_model(is_fp32_index, wanted_kernels(None))


@cache
def _golden_model(is_fp32_index: bool, kernels: str) -> DeepseekV41:
    numerics = Numerics(is_fp32_index=is_fp32_index, kernels=kernels)
    return load_model(FOLDER, LoadOptions(numerics=numerics, has_draft=True, has_vision=True)).model


@cache
def synthetic(shape: str, seed: int = 0, kernels: str = "torch") -> Synthetic:
    """Return a random model of one of `SHAPES` (or `FOUR_STREAMS`); shared between tests, so never changed."""
    config = tiny_config(**({"streams": 4, "o_lora_rank": 32} if shape == FOUR_STREAMS else SHAPES[shape]))
    with tempfile.TemporaryDirectory() as place:
        folder = tiny_checkpoint(Path(place), config, seed)
        has_draft, has_vision = config.draft is not None, config.vision is not None
        options = LoadOptions(numerics=Numerics(kernels=kernels), has_draft=has_draft, has_vision=has_vision)
        model = load_model(folder, options).model
        weights = load_file(folder / "model.safetensors")
        token_map = None
        if config.engram is not None:
            token_map = torch.from_numpy(build_token_map(Tokenizer.from_file(folder / "tokenizer.json"))[0])
    return Synthetic(config, model, weights, token_map)


def whole_span(model: DeepseekV41, ids: np.ndarray, mode: Mode = "full") -> Span:
    """Return one span that reads a whole prompt into a new sequence."""
    rows = len(ids) if mode == "full" else min(model.config.window, len(ids))
    return Span(model.new_state(), ids, rows, is_replay=mode == "replay")


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Say whether two tensors are equal in dtype, shape and every bit (NaN equals the same NaN, 0 is not -0)."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (actual, expected)))


def differing(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names that only one side has, and those whose tensors are not the same bits."""
    names = sorted(set(actual) | set(expected))
    return [n for n in names if n not in actual or n not in expected or not same_bits(actual[n], expected[n])]


def state_bits(model: DeepseekV41, span: Span) -> dict[str, Tensor]:
    """Return everything a sequence remembers that later tokens can see, by name."""
    state = span.state
    parts: dict[str, Tensor] = {"length": torch.tensor([state.length, state.decoder_floor])}
    for layer_id, store in state.stores.items():
        for name, rows in zip(("values", "scales", "keys", "key scales"), store.stored_rows(), strict=True):
            parts[f"store {layer_id} {name}"] = rows
    for layer_id, pair in state.pairs.items():
        if state.length % 2:
            parts[f"pair {layer_id}"] = torch.cat(pair.read(state.length - 1))
    for layer_id, ring in enumerate(state.rings):
        low = max(ring.oldest, state.floor(layer_id), ring.end - model.config.window)
        parts[f"ring {layer_id}"] = ring.read(low, ring.end)
    parts["look-back"] = torch.tensor(state.previous_ids)
    return parts
