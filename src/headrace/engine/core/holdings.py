"""Slots, blocks and host memory: who holds what, and every way in which that changes."""

from collections.abc import Iterable

import torch

from headrace.cache.block_pool import BLOCK_TOKENS, BlockPool
from headrace.cache.block_table import BlockTable
from headrace.cache.handover import fork
from headrace.cache.sequence_state import SequenceState
from headrace.cache.slot_pool import SlotPool
from headrace.cache.state_shape import StateShape
from headrace.cache.swap import discard, swap_in, swap_out
from headrace.core.errors import InternalError
from headrace.engine.core.memory_plan import MemoryPlan
from headrace.engine.core.prefix_cache import PrefixCache
from headrace.engine.core.sequence import Sequence
from headrace.engine.scheduler.plan import Fork, Pool


class Holdings:
    """Owns the pools, and moves sequences into, out of and between them. The scheduler decides, this carries out."""

    def __init__(
        self, shape: StateShape, plan: MemoryPlan, num_slots: int, device: torch.device, *, audited: bool
    ) -> None:
        self.blocks = BlockPool(shape, plan.num_blocks, device, is_poisoned=audited)
        self.slots = SlotPool(shape, num_slots, device)
        if (self.blocks.block_bytes, self.slots.slot_bytes) != (plan.block_bytes, plan.slot_bytes):
            raise InternalError(
                f"a block takes {self.blocks.block_bytes} bytes and a slot {self.slots.slot_bytes}; "
                f"{plan.block_bytes} and {plan.slot_bytes} were planned"
            )

    def pool(self, cache: PrefixCache) -> Pool:
        """Return what the scheduler may count on."""
        return Pool(free=self.blocks.num_free, evictable=cache.index.num_evictable)

    def start(self, sequence: Sequence, cache: PrefixCache) -> None:
        """Give a sequence a slot and the state its match allows."""
        sequence.state = cache.begin(sequence, self.slots.acquire())

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Bring a sequence's table to `num_blocks` blocks."""
        table = _state(sequence).table
        missing = num_blocks - len(table.block_ids)
        if missing > 0:
            table.extend(self.blocks.allocate(missing))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a further answer begin where its prompt was read to the end."""
        child.state = fork(_state(parent), self.slots.acquire())

    def hold(self, child: Sequence, parent: Sequence, plan: Fork) -> None:
        """Let a further answer hold what was planned for it until it ends, though its prompt could not be read."""
        table, shared = BlockTable(self.blocks), _state(parent).table.block_ids[: plan.shared_blocks]
        self.blocks.retain(shared)
        table.extend([*shared, *self.blocks.allocate(plan.own_blocks)])
        child.state = SequenceState.on_slot(self.slots.acquire(), table)

    def swap_out(self, sequence: Sequence, num_blocks: int, cache: PrefixCache) -> None:
        """Move a sequence and `num_blocks` of its blocks to host memory.

        Raises:
            InternalError: it has fewer that nobody else reads.
        """
        state = _state(sequence)
        slot = state.slot
        sequence.swapped = swap_out(state, cache.index.held, num_blocks)
        sequence.state = None
        self.slots.release(slot)
        sequence.preemptions += 1
        if sequence.swapped.num_blocks != num_blocks:
            raise InternalError(
                f"request {sequence.request_id} was to leave with {num_blocks} blocks and had "
                f"{sequence.swapped.num_blocks} of its own"
            )

    def swap_in(self, sequence: Sequence) -> None:
        """Bring a sequence back."""
        if sequence.swapped is None:
            raise InternalError(f"request {sequence.request_id} came back from where it was not")
        sequence.state = swap_in(sequence.swapped, self.slots.acquire(), BlockTable(self.blocks))
        sequence.swapped = None

    def end(self, sequence: Sequence) -> None:
        """Let go of everything a sequence holds, wherever it is."""
        if sequence.state is not None:
            slot = sequence.state.slot
            sequence.state.table.release()
            self.slots.release(slot)
            sequence.state = None
        if sequence.swapped is not None:
            discard(sequence.swapped, self.blocks)
            sequence.swapped = None

    def counts(self, cache: PrefixCache) -> dict[str, int]:
        """Return how much of the pools and of the prefix cache is in use."""
        blocks, slots, index = self.blocks, self.slots, cache.index
        return {
            "num_blocks": blocks.num_blocks,
            "block_bytes": blocks.block_bytes,
            "block_tokens": BLOCK_TOKENS,
            "free_blocks": blocks.num_free,
            "cached_blocks": len(set(index.block_ids)),
            "evictable_blocks": index.num_evictable,
            "evicted_blocks": index.num_evicted,
            "num_slots": slots.num_slots,
            "free_slots": slots.num_free,
            "snapshots": index.shelf.count,
            "snapshot_bytes": index.shelf.nbytes,
        }

    def audit(self, sequences: Iterable[Sequence], cache: PrefixCache) -> None:
        """Check that every block and slot is free or held exactly as the books say.

        Raises:
            InternalError: the first that is not.
        """
        owners = {"prefix index": cache.index.block_ids}
        slots = []
        for sequence in sequences:
            owners[sequence.request_id] = tuple(block for block in sequence.block_ids if block >= 0)
            if sequence.state is not None:
                slots.append(sequence.state.slot.id)
        self.blocks.audit(owners)
        self.slots.audit(slots)


def _state(sequence: Sequence) -> SequenceState:
    if sequence.state is None:
        raise InternalError(f"request {sequence.request_id} has no state on the device")
    return sequence.state
