"""How a state on a slot and blocks is left to others, and begins from what others left: a match, or a fork."""

import numpy as np

from headrace.cache.block_pool import BLOCK_TOKENS
from headrace.cache.block_table import BlockTable
from headrace.cache.chain import Chain
from headrace.cache.prefix_index import PrefixIndex
from headrace.cache.prefix_match import Match
from headrace.cache.sequence_state import SequenceState
from headrace.cache.slot_pool import Slot
from headrace.cache.snapshot import Snapshot
from headrace.core.errors import InternalError


def begin_from(match: Match, state: SequenceState, index: PrefixIndex, compressed: np.ndarray | None) -> None:
    """Let a new state go on at `match.row`; the match is used up.

    Args:
        match: a hit; the references to its whole blocks become the table's.
        state: without tokens, on a slot and an empty table.
        index: which gave the match.
        compressed: compressed ids of the newest tokens before `match.row`, as `SequenceState.resume` takes them.

    Raises:
        InternalError: the match is a miss, the state is not new, or no block is free for the copy of a partial one
            (nothing has changed then).

    State: takes one block from the pool if `match.partial_tokens`.
    """
    table = state.table
    if not match.is_hit or table.block_ids:
        raise InternalError("only a state without blocks begins, and only from a hit")
    copied = [] if match.partial is None else [table.pool.copy(match.partial, match.partial_tokens)]
    table.extend([*match.block_ids, *copied])
    if match.partial is not None:
        table.pool.release([match.partial])
    table.freeze(match.num_tokens)
    state.resume(match.row, compressed)
    if match.shelved is None:
        state.start_encoder(match.row)
    else:
        match.shelved.snapshot.restore(state, match.row)
        index.unpin(match)


def publish(
    state: SequenceState, chain: Chain, index: PrefixIndex, *, has_snapshot: bool = True, is_interior: bool = False
) -> bool:
    """Let later prompts find what a state holds; it goes on as before, but cannot go back below its length.

    For whoever counts blocks by reference alone. The engine's scheduler counts them by who holds them, so
    `engine/core/prefix_cache.py` publishes without sharing equal blocks.

    Args:
        state: between two forward passes, all its tokens committed. An approximate one belongs in a chain of the
            approximate lineage only.
        chain: its tokens (and perhaps more).
        index: where to put it.
        has_snapshot: whether to take a snapshot too.
        is_interior: whether this is inside a prompt.

    Returns:
        Whether a snapshot was kept, or one as good was there.
    """
    table, length = state.table, state.length
    table.seal(length)
    table.freeze(length)
    snapshot = Snapshot.take(state) if has_snapshot else None
    put = index.insert(chain, length, table.block_ids, snapshot, is_interior=is_interior)
    table.share(put.block_ids)
    return put.has_snapshot


def fork(state: SequenceState, slot: Slot) -> SequenceState:
    """Return another sequence with the same tokens, on a slot of its own; both go their own ways from here.

    Whole blocks are sealed and shared; the last block is copied if it is not whole. Further blocks, which the state's
    table has ahead, stay with it.

    Raises:
        InternalError: no block is free for the copy, or the state still encodes tokens that it found in the cache.

    State: takes one block from the pool unless the length is a multiple of 128.
    """
    table, pool, length = state.table, state.table.pool, state.length
    if length < table.write_floor:
        raise InternalError(f"a state at {length} of {table.write_floor} tokens from the cache cannot be forked yet")
    table.seal(length)
    full, rest = divmod(length, BLOCK_TOKENS)
    shared = table.block_ids[:full]
    copied = [pool.copy(table.block_ids[full], rest)] if rest else []
    pool.retain(shared)
    branch = BlockTable(pool)
    branch.extend([*shared, *copied])
    branch.seal(length)
    slot.copy_from(state.slot.parts)
    child = SequenceState.on_slot(slot, branch)
    child.stand(state.marks)
    return child
