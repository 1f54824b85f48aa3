"""Attention against its reference, bit for bit, on every instruction set; rings and stores are the real ones."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.cache.global_store import GlobalStore
from headrace.cache.window_ring import WindowRing
from headrace.kernels.block_quant import decode_q8, encode_q8
from headrace.kernels.native.attention import SEGMENT_FIELDS, Attention, Planes, gather, reference
from headrace.kernels.native.library import load
from headrace.kernels.native.rows import Finished
from headrace.kernels.rope import plain_frequencies, rotate, rotation
from tests.kernels.native.matrices import on_every_instruction_set
from tests.kernels.rows import bits

HEADS, WIDTH, ROTATED, WINDOW, SLOTS, FLOOR = 6, 64, 16, 20, 12, 9
SCALE = WIDTH**-0.5


@dataclass
class Sequence:
    """Rows of one sequence that ends in `count` new ones; `before` are those its ring holds."""

    before: Tensor
    rows: Finished
    picks: Tensor
    store: GlobalStore
    ring: WindowRing
    first: int

    @classmethod
    def random(cls, first: int, count: int) -> "Sequence":
        device = torch.device("cpu")
        codes, scales = encode_q8(torch.randn(first + count, WIDTH).bfloat16())
        values = decode_q8(codes, scales)
        ring = WindowRing(WIDTH, 2 * WINDOW, device)
        ring.restart(FLOOR)
        ring.load_rows(
            max(FLOOR, first - WINDOW),
            codes[max(FLOOR, first - WINDOW) : first],
            scales[max(FLOOR, first - WINDOW) : first],
        )
        store = GlobalStore(WIDTH, 32, 1, device)
        store.append(torch.randn(40, WIDTH).bfloat16(), torch.randn(40, 32).bfloat16())
        picks = torch.full((count, SLOTS), -1)
        for row in range(count):
            some = torch.randperm(40)[: (row * 5) % (SLOTS + 1)].sort().values
            picks[row, : len(some)] = some
        new = Finished(torch.zeros(count, 0), values[first:].clone(), codes[first:].clone(), scales[first:].clone())
        return cls(values, new, picks, store, ring, first)

    def segment(self, offset: int, entries: Tensor, *, is_by_slot: bool) -> list[int]:
        codes, scales = self.ring.stored_bytes
        return [
            *(offset, len(self.picks), self.first, FLOOR, codes.data_ptr(), scales.data_ptr(), self.ring.depth),
            *(self.picks.data_ptr(), SLOTS, entries.data_ptr(), int(is_by_slot)),
        ]

    def wanted(self, q: Tensor, sink: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        turned, out = rotate(q, *turn), []
        entries = self.store.entries(0, 40)
        for row in range(len(self.picks)):
            position = self.first + row
            picked = self.picks[row][self.picks[row] >= 0]
            keys = torch.cat([self.before[max(FLOOR, position - WINDOW + 1) : position + 1], entries[picked]])
            out.append(reference.attend(turned[row], keys, sink, SCALE))
        return rotate(torch.stack(out), *turn, inverse=True)


def planes(store: GlobalStore) -> Planes:
    codes, scales, _, _ = store.stored_rows()
    return Planes(codes.contiguous(), scales.contiguous(), None, 1)


@on_every_instruction_set
@pytest.mark.parametrize("is_by_slot", [False, True])
def test_attention_is_its_reference_and_stores_the_new_rows(instruction_set: str, is_by_slot: bool) -> None:
    library = load(instruction_set)
    sequences = [Sequence.random(30, 1), Sequence.random(11, 45), Sequence.random(9, 3)]
    sizes = [len(one.picks) for one in sequences]
    positions = torch.cat(
        [torch.arange(one.first, one.first + size) for one, size in zip(sequences, sizes, strict=True)]
    )
    turn = rotation(positions, plain_frequencies(ROTATED, 10000.0))
    q, sink = torch.randn(sum(sizes), HEADS, WIDTH).bfloat16(), torch.randn(HEADS)
    q[0, 0] = 0
    entries = [
        gather(
            library, planes(one.store), one.picks.view(-1) if is_by_slot else None, size * SLOTS if is_by_slot else 40
        )
        for one, size in zip(sequences, sizes, strict=True)
    ]
    offsets = [sum(sizes[:place]) for place in range(3)]
    table = np.array(
        [
            one.segment(offset, part, is_by_slot=is_by_slot)
            for one, offset, part in zip(sequences, offsets, entries, strict=True)
        ]
    )
    assert table.shape == (3, len(SEGMENT_FIELDS))
    joined = Finished(
        *(
            torch.cat([getattr(one.rows, name) for one in sequences])
            for name in ("latent_TR", "values_TH", "codes_TH", "scales_TG")
        )
    )
    run = Attention(library, sink, width=WIDTH, rotated=ROTATED, window=WINDOW, scale=SCALE)
    found = run(q.clone().flatten(1), turn, joined, table).view_as(q)
    for one, offset, size in zip(sequences, offsets, sizes, strict=True):
        rows = slice(offset, offset + size)
        wanted = one.wanted(q[rows], sink, (turn[0][rows], turn[1][rows]))
        assert torch.equal(bits(found[rows]), bits(wanted))
        low = max(one.first, one.first + size - one.ring.depth)
        one.ring.stand(FLOOR, one.first + size)
        one.ring.oldest = max(FLOOR, low)
        assert torch.equal(one.ring.read(low, one.first + size), one.before[low : one.first + size])


@on_every_instruction_set
def test_gathered_entries_are_those_of_the_store(instruction_set: str) -> None:
    one = Sequence.random(20, 8)
    picks = one.picks.view(-1)
    found = gather(load(instruction_set), planes(one.store), picks, len(picks))
    assert torch.equal(found[picks >= 0], one.store.gather(picks.view(1, -1))[0][picks >= 0].bfloat16())
    blocks = torch.tensor([1, 0])
    shuffled = planes(one.store)
    moved = Planes(*(torch.cat([part[20:], part[:20]]) for part in (shuffled.codes, shuffled.scales)), blocks, 20)
    assert torch.equal(gather(load(instruction_set), moved, picks, len(picks))[picks >= 0], found[picks >= 0])
