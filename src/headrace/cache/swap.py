"""Swapping: a sequence's state leaves its slot and blocks for host memory, and comes back bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headrace.cache.block_pool import BlockPool
from headrace.cache.block_table import BlockTable
from headrace.cache.sequence_state import SequenceState
from headrace.cache.slot_pool import Slot
from headrace.cache.state_parts import StateMarks
from headrace.core.errors import InternalError

Held = Callable[[int], int]
"""References of the prefix index to a block: they do not keep a swapped sequence's tokens from being forgotten."""


@dataclass(frozen=True)
class Swapped:
    """A state in host memory.

    `parts` are the slot's buffers, `blocks` uint8 [n, block_bytes] those at places `copied` of the table. The other
    blocks, `kept` by place, are read by other sequences anyway: the swapped one keeps its reference to them.
    """

    marks: StateMarks
    write_floor: int
    parts: tuple[Tensor, ...]
    copied: tuple[int, ...]
    blocks: Tensor
    is_sealed: tuple[bool, ...]
    kept: dict[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(part.numel() * part.element_size() for part in self.parts) + self.blocks.numel()

    @property
    def num_blocks(self) -> int:
        """Free blocks that `swap_in` needs."""
        return len(self.copied)


def _alone(table: BlockTable, held: Held | None) -> tuple[int, ...]:
    """Return the places of blocks that no other sequence refers to."""
    pool = table.pool
    return tuple(
        place
        for place, block_id in enumerate(table.block_ids)
        if pool.references(block_id) - (held(block_id) if held is not None else 0) == 1
    )


def swap_bytes(state: SequenceState, held: Held | None = None) -> int:
    """Return the bytes of host memory that `swap_out` would take."""
    return state.slot.nbytes + len(_alone(state.table, held)) * state.table.pool.block_bytes


def swap_out(state: SequenceState, held: Held | None = None, most: int | None = None) -> Swapped:
    """Copy a state to host memory and let its blocks go, but for those that other sequences read.

    The state is of no use after, and its slot can be given back.

    Args:
        state: between two forward passes.
        held: the index's references (`PrefixIndex.held`); blocks that only it shares are copied too and may then be
            evicted. None: every other reference counts as another sequence's. To copy every block, count every
            other reference as held.
        most: blocks to copy at most, where host memory has room for no more; the sequence keeps the others.
    """
    table, pool = state.table, state.table.pool
    copied = _alone(table, held)[:most]
    leaving = [table.block_ids[place] for place in copied]
    swapped = Swapped(
        marks=state.marks,
        write_floor=table.write_floor,
        parts=tuple(part.to("cpu", copy=True) for part in state.slot.parts),
        copied=copied,
        blocks=pool.read_blocks(leaving),
        is_sealed=tuple(pool.is_sealed(block_id) for block_id in leaving),
        kept={place: block_id for place, block_id in enumerate(table.block_ids) if place not in set(copied)},
    )
    pool.retain(swapped.kept.values())
    table.release()
    return swapped


def swap_in(swapped: Swapped, slot: Slot, table: BlockTable) -> SequenceState:
    """Put a swapped state on a slot and on the blocks of an empty table; it goes on as if it had never left.

    Raises:
        InternalError: the table is not empty, or fewer than `swapped.num_blocks` blocks are free.

    State: takes `swapped.num_blocks` blocks from the pool; the references to the others become the table's.
    """
    if table.block_ids:
        raise InternalError("a state was swapped in over a table that has blocks")
    pool = table.pool
    fresh = pool.allocate(swapped.num_blocks)
    pool.write_blocks(fresh, swapped.blocks)
    pool.seal(block_id for block_id, is_sealed in zip(fresh, swapped.is_sealed, strict=True) if is_sealed)
    placed = {**swapped.kept, **dict(zip(swapped.copied, fresh, strict=True))}
    table.extend([placed[place] for place in range(len(placed))])
    table.freeze(swapped.write_floor)
    slot.copy_from(swapped.parts)
    state = SequenceState.on_slot(slot, table)
    state.stand(swapped.marks)
    return state


def discard(swapped: Swapped, pool: BlockPool) -> list[int]:
    """Forget a swapped state that will not come back; return the blocks that became free."""
    return pool.release(swapped.kept.values())
