"""Slots: the fixed-size memories of running sequences, allocated once."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.cache.state_shape import StateShape
from headrace.core.errors import InternalError
from headrace.kernels.block_quant import Q8_GROUP


@dataclass(frozen=True)
class Slot:
    """Buffers of one running sequence.

    `ring_codes` uint8 [layers, 2 W, H] and `ring_scales` uint8 [layers, 2 W, H / 32] of the window rings,
    `draft_codes` and `draft_scales` likewise for draft layers, `pair_rows` float32 [pair sources, W + 1, 2, H].
    """

    id: int
    shape: StateShape
    ring_codes: Tensor
    ring_scales: Tensor
    draft_codes: Tensor
    draft_scales: Tensor
    pair_rows: Tensor

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All buffers, in a fixed order."""
        return (self.ring_codes, self.ring_scales, self.draft_codes, self.draft_scales, self.pair_rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the slot."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    def copy_from(self, parts: Iterable[Tensor]) -> None:
        """Take over the bytes of another slot's buffers."""
        for mine, other in zip(self.parts, parts, strict=True):
            mine.copy_(other)


class SlotPool:
    """`num_slots` slots, one tensor per kind of buffer for all of them."""

    def __init__(self, shape: StateShape, num_slots: int, device: torch.device) -> None:
        self.shape = shape
        self.num_slots = num_slots
        head, depth = shape.head_dim, shape.ring_depth
        layers, drafts, pairs = shape.num_layers, shape.num_draft_layers, len(shape.pair_sources)
        self._buffers = (
            torch.zeros((num_slots, layers, depth, head), dtype=torch.uint8, device=device),
            torch.zeros((num_slots, layers, depth, head // Q8_GROUP), dtype=torch.uint8, device=device),
            torch.zeros((num_slots, drafts, depth, head), dtype=torch.uint8, device=device),
            torch.zeros((num_slots, drafts, depth, head // Q8_GROUP), dtype=torch.uint8, device=device),
            torch.zeros((num_slots, pairs, shape.window + 1, 2, head), dtype=torch.float32, device=device),
        )
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, measured from the buffers."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.nbytes // max(1, self.num_slots)

    @property
    def num_free(self) -> int:
        """Slots that no sequence has."""
        return len(self._free)

    def acquire(self) -> Slot:
        """Take a free slot; what it holds is of no meaning.

        Raises:
            InternalError: none is free.
        """
        if not self._free:
            raise InternalError(f"a slot was asked for and all {self.num_slots} are taken")
        slot_id = self._free.pop()
        return Slot(slot_id, self.shape, *(buffer[slot_id] for buffer in self._buffers))

    def release(self, slot: Slot) -> None:
        """Give a slot back.

        Raises:
            InternalError: it is free already.
        """
        if slot.id in self._free:
            raise InternalError(f"slot {slot.id} was freed twice")
        self._free.append(slot.id)

    def audit(self, owned: Iterable[int]) -> None:
        """Check that every slot is free or owned once.

        Raises:
            InternalError: the first slot that is not.
        """
        named, free = Counter(owned), Counter(self._free)
        for slot_id in sorted({*range(self.num_slots), *named}):
            if named[slot_id] + free[slot_id] != 1 or slot_id >= self.num_slots:
                raise InternalError(f"slot {slot_id} is owned {named[slot_id]} times and free {free[slot_id]} times")
