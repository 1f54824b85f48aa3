"""How large the numbers of a random checkpoint are, tensor by tensor, and how their bytes are drawn.

A recipe per name keeps activations near one through any number of layers and makes every choice of the model a real
one: gates differ per token, top-k sets vary, stream mixes differ, scales differ from block to block. Bytes come
straight from a bit generator through tables of normal quantiles, so a hundred gigabytes need no more memory than one
piece.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from headrace.core.spec import TensorSpec

PIECE_ELEMENTS = 2**22

_E2M1_RMS = 2.926  # of uniformly drawn codes
_SCALE_STEPS = (-1, 0, 0, 1)  # exponents added to a block's scale; what they do to the size is taken back
_STEPS_RMS = math.sqrt(sum(4.0**step for step in _SCALE_STEPS) / len(_SCALE_STEPS))

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Mean and spread of a tensor's values."""

    mean: float
    std: float


# (end of the name, mean, standard deviation); the first match wins. Norm means: spec section 7.
_FIXED = (
    ("attn_norm.weight", 0.025, 0.0025),
    ("ffn_norm.weight", 0.2, 0.02),
    ("q_norm.weight", 0.97, 0.1),
    ("kv_norm.weight", 0.4, 0.04),
    ("compressor.norm.weight", 0.6, 0.06),
    ("k_norm.weight", 0.5, 0.05),
    ("norm.weight", 1.0, 0.1),
    ("norm1.weight", 1.0, 0.1),
    ("norm2.weight", 1.0, 0.1),
    ("attn_sink", 0.0, 1.0),
    ("gate.bias", 0.0, 0.15),
    ("gate.bias_vl", 0.0, 0.15),
    ("_base", 0.0, 1.5),
    ("_scale", 1.5, 0.3),
    ("engram.q_weight", 1.0, 0.3),
    ("engram.k_weight", 1.0, 0.3),
    ("markov_head.embed.weight", 0.0, 0.12),
    ("engram.embed.weight", 0.0, 1.0),
    ("embed.weight", 0.0, 0.12),
    ("image_start", 0.0, 0.12),
    ("image_end", 0.0, 0.12),
    ("image_newline", 0.0, 0.12),
    (".bias", 0.0, 0.1),
)
# (end of the name, gain): standard deviation gain / sqrt(inputs); the first match wins
_GAINS = (
    ("attn.wq_b", 3.0),  # attention scores of about 1.5, so that entries matter differently
    ("compressor.wgate", 30.0),  # its input is small (attn_norm), and the pair's weights should differ
    ("ffn.gate", 5.0),  # router logits of about 1
    ("experts.w1", 2.0),
    ("experts.w3", 2.0),
    ("markov_head.head", 4.0),
    ("aligner.w2", 0.2),  # image embeddings as large as token embeddings
)


def recipe_of(name: str, num_inputs: int) -> Recipe:
    """Return how the values of a tensor are spread.

    Args:
        name: official name; a scale goes by the name of its weight.
        num_inputs: width of the input the tensor is multiplied with.
    """
    for ending, mean, std in _FIXED:
        if name.endswith(ending):
            return Recipe(mean, std)
    linear = name.removesuffix(".weight")
    parts = linear.split(".")
    if "experts" in parts or "shared_experts" in parts:
        linear = f"experts.{parts[-1]}"
    gain = next((gain for ending, gain in _GAINS if linear.endswith(ending)), 1.0)
    return Recipe(0.0, gain / math.sqrt(num_inputs))


@cache
def _quantiles(count: int) -> NDArray[np.float64]:
    """`count` equally likely values of the standard normal distribution, ascending."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((index + 0.5) / count) for index in range(count)])


def _to_bfloat16(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _to_e4m3(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Round to the nearest E4M3 code, values being within its range."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    magnitudes = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    nearest = np.abs(np.abs(values)[:, None] - magnitudes).argmin(axis=1)
    return (nearest | np.where(values < 0, 0x80, 0)).astype(np.uint8)


def code_scale(std: float) -> tuple[float, int]:
    """Split a standard deviation into one of E4M3 codes, between 64 and 128, and a power of two."""
    exponent = math.floor(math.log2(std / _STEPS_RMS / 64))
    return std / _STEPS_RMS / 2.0**exponent, exponent


class Draw:
    """Draws the bytes of one tensor; the same seed and name give the same bytes, whatever else is drawn."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest[:16], "little"))

    def raw(self, num_bytes: int) -> Bytes:
        """Return uniformly distributed bytes."""
        words: NDArray[np.uint64] = self._bits.random_raw(-(-num_bytes // 8))
        return words.astype("<u8", copy=False).view(np.uint8)[:num_bytes]

    def pieces(self, spec: TensorSpec, num_inputs: int) -> Iterator[Bytes]:
        """Yield the bytes of a tensor in pieces.

        Args:
            spec: the tensor; a scale is drawn to fit the weight of the same name.
            num_inputs: width of the input the tensor, or the weight of the scale, is multiplied with.
        """
        for start in range(0, spec.num_elements, PIECE_ELEMENTS):
            count = min(PIECE_ELEMENTS, spec.num_elements - start)
            yield self._piece(spec, count, num_inputs)

    def _piece(self, spec: TensorSpec, count: int, num_inputs: int) -> Bytes:
        if spec.dtype == "I8":
            return self.raw(count)
        if spec.dtype == "F8_E8M0":
            return self._scales(spec.name, count, num_inputs)
        recipe = recipe_of(spec.name, num_inputs)
        if spec.dtype == "F8_E4M3":
            return _e4m3_table(code_scale(recipe.std)[0])[self.raw(count)]
        picks = self.raw(2 * count).view("<u2")
        if spec.dtype == "BF16":
            return _bfloat16_table(recipe)[picks].view(np.uint8)
        return (recipe.mean + recipe.std * _quantiles(2**16)[picks]).astype("<f4").view(np.uint8)

    def _scales(self, name: str, count: int, num_inputs: int) -> Bytes:
        weight = name.removesuffix(".scale") + ".weight"
        std = recipe_of(weight, num_inputs).std
        exponent = round(math.log2(std / _STEPS_RMS / _E2M1_RMS)) if ".experts." in name else code_scale(std)[1]
        table = np.array([127 + exponent + step for step in _SCALE_STEPS], dtype=np.uint8)
        return table[self.raw(count) & 3]


@cache
def _e4m3_table(std: float) -> Bytes:
    return _to_e4m3(_quantiles(256) * std)


@cache
def _bfloat16_table(recipe: Recipe) -> NDArray[np.uint16]:
    return _to_bfloat16(recipe.mean + recipe.std * _quantiles(2**16))
