"""Decode rows: every running answer gets one, as far as blocks can be found, and rows for its drafts as they fit."""

from headrace.engine.scheduler.entry import Entry, Phase, WaitReason
from headrace.engine.scheduler.plan import DecodeRow, Preemption
from headrace.engine.scheduler.work import Work


def plan_decodes(work: Work) -> None:
    """Plan one row for each request in decode, in order of rank.

    A request at a block border needs a block: from the free ones or the cache, else from the running request that is
    last in rank, which is swapped out. Where that is not possible the request waits with all that it holds, and
    so does every later one that needs a block.

    Drafts get rows only where that costs nobody anything: in blocks that the request has, before the end of its answer,
    and in rows that the budget leaves beside a window and the decode rows of all slots.
    """
    config = work.books.config
    spare = config.max_rows - config.window - config.num_slots
    for request_id in [entry.request_id for entry in work.books.running()]:
        entry = work.books.started[request_id]
        if entry.phase is not Phase.DECODE:
            continue  # in prefill, or swapped out a moment ago
        needed = work.books.config.blocks_for(entry.computed + 1) - entry.blocks
        if needed:
            reason = WaitReason.BLOCKS if work.lacking is not None else _make_room(work, entry, needed)
            if reason is not None:
                work.lacking = work.lacking or entry.rank
                work.wait(entry, reason)
                continue
        spare -= _plan_row(work, work.books.started[request_id], spare)


def _plan_row(work: Work, entry: Entry, spare: int) -> int:
    """Plan a request's rows and return how many drafts are among them; the books count none of those yet."""
    room = min(
        spare,
        entry.request.max_new_tokens - entry.generated - 1,
        entry.blocks * work.books.config.block_tokens - entry.computed - 1,
    )
    drafts = max(0, min(work.drafts.get(entry.request_id, 0), room))
    work.decodes.append(
        DecodeRow(request_id=entry.request_id, slot=entry.held_slot, position=entry.computed, drafts=drafts)
    )
    work.change(entry, computed=entry.computed + 1, generated=entry.generated + 1)
    return drafts


def _make_room(work: Work, entry: Entry, needed: int) -> WaitReason | None:
    """Allocate, with swaps if need be; change nothing and say why if that is not possible."""
    trial = work.books.copy()
    swapped: list[Preemption] = []
    while trial.available < needed:
        victim = trial.running()[-1]
        if victim.rank <= entry.rank:
            return WaitReason.BLOCKS
        moved = trial.swap_out(victim)
        if moved is None:
            return WaitReason.HOST
        swapped.append(
            Preemption(request_id=victim.request_id, slot=victim.held_slot, blocks=moved, for_request=entry.request_id)
        )
    trial.allocate(entry, needed)
    if not trial.everyone_can_end():
        return WaitReason.PROMISE
    work.books = trial
    work.preemptions += swapped
    work.allocate(entry.request_id, needed)
    return None
