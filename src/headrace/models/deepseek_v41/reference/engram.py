"""Hashed n-gram memory: from token ids to table rows, and from rows to what is added to the streams.

Loops over positions and Python integers, so that the history rule can be read off. Row numbers use the *compressed* ids
of the token map, in which ids that read the same are one.

Source: specification section 3.9; released `inference/engram.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.models.deepseek_v41.reference.arithmetic import dequantise_rows, linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.models.deepseek_v41.config import Config, Engram
    from headrace.models.deepseek_v41.reference.arithmetic import Weights


def multipliers(layer_id: int, engram: Engram) -> list[int]:
    """Return the N odd hash factors of a layer; factor x compressed id stays below 2^63.

    Drawn by numpy's default generator seeded with 10007 x layer id, as the release does.
    """
    bound = (2**63 - 1) // engram.compressed_vocab_size // 2
    draws = np.random.default_rng(10007 * layer_id).integers(0, bound, size=engram.max_ngram, dtype=np.int64)
    return [2 * int(draw) + 1 for draw in draws]


def primes(engram: Engram) -> list[list[list[int]]]:
    """Return the bucket sizes: one prime per layer, n-gram size (2 ..) and hash head, no prime used twice.

    Every search starts at the same number, and skips primes that are taken: they come out in ascending order.
    """
    used: set[int] = set()

    def next_prime(above: int) -> int:
        number = above + 1
        while number in used or any(number % d == 0 for d in range(2, math.isqrt(number) + 1)):
            number += 1
        used.add(number)
        return number

    table: list[list[list[int]]] = []
    for _ in engram.layer_ids:
        table.append([])
        for _ in range(engram.max_ngram - 1):
            row, last = [], engram.first_prime_above - 1
            for _ in range(engram.num_hashes):
                last = next_prime(last)
                row.append(last)
            table[-1].append(row)
    return table


def history(compressed: Sequence[int], dead: Sequence[bool], position: int, pad: int, depth: int) -> list[int]:
    """Return the compressed ids at position, position - 1, ..., `pad` from the first missing or dead one on.

    Args:
        compressed: compressed id of every position of the sequence.
        dead: whether a position lies inside an image span.
        position: the current token.
        pad: compressed id of the padding token.
        depth: N, how many ids to return.

    Returns:
        N ids, current token first. Once one look-back is blocked all farther ones are: n-grams never bridge a gap.
    """
    ids, blocked = [], False
    for back in range(depth):
        place = position - back
        blocked = blocked or place < 0 or dead[place]
        ids.append(pad if blocked else compressed[place])
    return ids


def row_ids(ids: Sequence[int], factors: Sequence[int], buckets: Sequence[Sequence[int]]) -> list[int]:
    """Return the table rows of the n-grams that end at one token of one layer.

    Args:
        ids: N compressed ids, current token first.
        factors: N hash factors.
        buckets: [N - 1][Z] primes.

    Returns:
        (N - 1) Z row numbers: 2-grams first; each column starts where the buckets of the columns before it end.
    """
    rows, offset, mixed = [], 0, ids[0] * factors[0]
    for back, sizes in enumerate(buckets, start=1):
        mixed ^= ids[back] * factors[back]
        for size in sizes:
            rows.append(mixed % size + offset)
            offset += size
    return rows


def hash_ids(engram: Engram, token_map: Tensor, token_ids: Sequence[int], dead: Sequence[bool]) -> Tensor:
    """Return the table rows of every position and Engram layer.

    Args:
        engram: the model's n-gram settings.
        token_map: [V] integers, token id to compressed id.
        token_ids: ids of the whole sequence.
        dead: whether a position lies inside an image span.

    Returns:
        [T, number of Engram layers, U] int64.
    """
    compressed = [int(token_map[token]) for token in token_ids]
    pad = int(token_map[engram.pad_token_id])
    factors = [multipliers(layer_id, engram) for layer_id in engram.layer_ids]
    buckets = primes(engram)
    rows = []
    for position in range(len(compressed)):
        ids = history(compressed, dead, position, pad, engram.max_ngram)
        rows.append([row_ids(ids, factors[i], buckets[i]) for i in range(len(engram.layer_ids))])
    return torch.tensor(rows, dtype=torch.int64)


def gates(delta: Tensor) -> Tensor:
    """Return sigmoid(sign(delta) x sqrt(max(|delta|, 1e-6))) in float32."""
    return torch.sigmoid(torch.copysign(delta.abs().clamp(min=1e-6).sqrt(), delta))


def inject(weights: Weights, prefix: str, config: Config, x_TMD: Tensor, rows_TU: Tensor, dead_T: Tensor) -> Tensor:
    """Add the gated n-gram value to every stream.

    Args:
        weights: official names to tensors; the table is `{prefix}.embed.weight` and `.scale`.
        prefix: for example `layers.1.engram`.
        config: the model.
        x_TMD: [T, M, D] bfloat16, streams in front of the layer.
        rows_TU: [T, U] int64 table rows.
        dead_T: [T] bool, image positions, whose streams stay as they are.

    Returns:
        [T, M, D] bfloat16.

    Numerics: rows are exact in bfloat16; keys (one per stream) and the value come from one FP8 linear; the gate is
        float32 with one mean square per stream; one rounding at the end.
    """
    table, scale = weights[f"{prefix}.embed.weight"], weights[f"{prefix}.embed.scale"]
    looked_up = dequantise_rows(_rows(table, rows_TU), _rows(scale, rows_TU)).flatten(1)
    projected = linear(weights, f"{prefix}.wkv", looked_up).unflatten(-1, (config.num_streams + 1, config.hidden_size))
    key_TMD, value_TD = projected[:, :-1].float(), projected[:, -1].float()
    x = x_TMD.float()
    inverse_x = torch.rsqrt(x.square().mean(dim=-1) + config.norm_eps)
    inverse_key = torch.rsqrt(key_TMD.square().mean(dim=-1) + config.norm_eps)
    scale_MD = weights[f"{prefix}.q_weight"].float() * weights[f"{prefix}.k_weight"].float()
    dot_TM = (x * scale_MD * key_TMD).sum(dim=-1)
    gate_TM = gates(dot_TM * inverse_x * inverse_key * config.hidden_size**-0.5)
    gate_TM = gate_TM.masked_fill(dead_T[:, None], 0.0)
    return (x + gate_TM[..., None] * value_TD[:, None]).bfloat16()


def _rows(table: Tensor, ids: Tensor) -> Tensor:
    """Gather rows of a table of one-byte numbers, through bytes: indexing is not defined for every such dtype."""
    return table.view(torch.uint8)[ids].view(table.dtype)
