"""Cases of attention and gather: rings that wrap, few and many keys, draft blocks; every FP4 code with every scale."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.block_quant import decode_q4k, decode_q8, encode_q8
from headrace.kernels.native.attention import SEGMENT_FIELDS, Attention, Planes, gather, reference
from headrace.kernels.native.conformance import Case
from headrace.kernels.native.library import Library
from headrace.kernels.native.rows import Finished
from headrace.kernels.native.samples import Samples
from headrace.kernels.rope import rotate

_WIDTH, _ROTATED, _WINDOW, _SLOTS, _FLOOR, _HELD = 64, 16, 20, 12, 9, 40
_SCALE = _WIDTH**-0.5


def cases() -> list[Case]:
    """Return the cases."""
    return [
        _attention(Samples(70), "a sequence of one row", ((30, 1),), heads=6),
        _attention(Samples(71), "three sequences", ((30, 1), (11, 45), (9, 3)), heads=5),
        _attention(Samples(72), "draft blocks", ((30, 5), (9, 5), (14, 5)), heads=4, is_block=True),
        _every_code(Samples(73)),
        _blocks(Samples(74)),
    ]


@dataclass(frozen=True)
class _Sequence:
    """Rows `first` onwards of one sequence; `values` [first + count, H] are all of its window entries."""

    first: int
    values: Tensor
    codes: Tensor
    scales: Tensor
    picks: Tensor
    entries: Tensor

    def ring(self) -> tuple[Tensor, Tensor]:
        """Return a ring that holds the rows before the first one."""
        rings = torch.zeros((2 * _WINDOW, _WIDTH), dtype=torch.uint8), torch.zeros((2 * _WINDOW, 2), dtype=torch.uint8)
        for position in range(max(_FLOOR, self.first - _WINDOW), self.first):
            for ring, part in zip(rings, (self.codes, self.scales), strict=True):
                ring[position % (2 * _WINDOW)] = part[position]
        return rings


def _sequence(samples: Samples, first: int, count: int, *, is_block: bool) -> _Sequence:
    codes, scales = encode_q8(samples.rows(first + count, _WIDTH))
    picks = torch.full((count, _SLOTS), -1)
    for row in range(0 if is_block else count):
        some = samples.normal(_HELD).argsort()[: (row * 5 + 2) % (_SLOTS + 1)].sort().values
        picks[row, : len(some)] = some
    entries = samples.rows(_HELD, _WIDTH, 2)
    return _Sequence(first, decode_q8(codes, scales).bfloat16(), codes, scales, picks, entries)


def _attention(
    samples: Samples, name: str, shape: tuple[tuple[int, int], ...], *, heads: int, is_block: bool = False
) -> Case:
    sequences = [_sequence(samples, *one, is_block=is_block) for one in shape]
    counts = [count for _, count in shape]
    turns = [samples.turn(first, count, _ROTATED) for first, count in shape]
    turn = torch.cat([cos for cos, _ in turns]), torch.cat([sin for _, sin in turns])
    q, sink = samples.rows(sum(counts), heads * _WIDTH), samples.normal(heads)

    def run(library: Library) -> list[Tensor]:
        rings = [one.ring() for one in sequences]
        offsets = np.cumsum([0, *counts])
        table = np.array(
            [
                (
                    *(offset, count, one.first, _FLOOR, ring[0].data_ptr(), ring[1].data_ptr(), 2 * _WINDOW),
                    *(one.picks.data_ptr(), _SLOTS, one.entries.data_ptr(), 0),
                )
                for one, count, offset, ring in zip(sequences, counts, offsets[:-1], rings, strict=True)
            ]
        )
        if table.shape[1] != len(SEGMENT_FIELDS):
            return []
        new = [torch.cat([getattr(one, part)[one.first :] for one in sequences]) for part in _PARTS]
        numbers: dict[str, Any] = {"width": _WIDTH, "rotated": _ROTATED, "window": _WINDOW, "scale": _SCALE}
        attention = Attention(library, sink, is_block=is_block, **numbers)
        found = attention(q.clone(), turn, Finished(torch.zeros(0), *new), table)
        return [found, *(part for ring in rings for part in ring)]

    def wanted() -> list[Tensor]:
        queries = q.view(-1, heads, _WIDTH).split(counts)
        found = [
            _wanted(one, part, rotation, sink, is_block=is_block)
            for one, part, rotation in zip(sequences, queries, turns, strict=True)
        ]
        rings = [_ring_after(one, is_block=is_block) for one in sequences]
        return [torch.cat(found).flatten(1), *(part for ring in rings for part in ring)]

    return Case(name, run, wanted)


_PARTS = ("values", "codes", "scales")


def _wanted(one: _Sequence, q: Tensor, turn: tuple[Tensor, Tensor], sink: Tensor, *, is_block: bool) -> Tensor:
    turned, out = rotate(q, *turn), []
    for row in range(len(q)):
        position = one.first + row
        low, high = position - _WINDOW + 1, position + 1
        if is_block:
            low, high = one.first - _WINDOW, len(one.values)
        picks = one.picks[row][one.picks[row] >= 0]
        keys = torch.cat([one.values[max(_FLOOR, low) : high], one.entries[picks]])
        out.append(reference.attend(turned[row], keys, sink, _SCALE))
    return rotate(torch.stack(out), *turn, inverse=True)


def _ring_after(one: _Sequence, *, is_block: bool) -> tuple[Tensor, Tensor]:
    rings = one.ring()
    for position in range(one.first, one.first if is_block else len(one.codes)):
        for ring, part in zip(rings, (one.codes, one.scales), strict=True):
            ring[position % (2 * _WINDOW)] = part[position]
    return rings


def _every_code(samples: Samples) -> Case:
    scales = samples.codes(256, 4)
    codes = torch.arange(16, dtype=torch.uint8).repeat(256 * 4).view(256, 64)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()
    planes = Planes(packed, scales, None, 1)
    return Case(
        "gather, every code and scale",
        lambda library: [gather(library, planes, None, 256)],
        lambda: [decode_q4k(packed, scales).bfloat16()],
    )


def _blocks(samples: Samples) -> Case:
    codes = samples.integers(0, 256, 30, 32).to(torch.uint8)
    scales, blocks = samples.codes(30, 4), torch.tensor([2, 0, 1])
    picks = torch.tensor([0, 9, 10, 19, 20, 29, 29])
    planes = Planes(codes, scales, blocks, 10)
    places = blocks[picks // 10] * 10 + picks % 10
    return Case(
        "gather, blocks out of order",
        lambda library: [gather(library, planes, picks, len(picks))],
        lambda: [decode_q4k(codes, scales).bfloat16()[places]],
    )
