"""Starts and returns: who gets a slot and blocks, strictly in order of rank."""

from dataclasses import replace

from headrace.engine.scheduler.entry import Entry, Phase, WaitReason
from headrace.engine.scheduler.plan import Admission, SwapIn
from headrace.engine.scheduler.request import Match, Matcher, check_match
from headrace.engine.scheduler.work import Work


def plan_starts(work: Work, match: Matcher) -> None:
    """Bring swapped requests back and start queued ones.

    Order of rank, but among requests of one priority the swapped ones come before the queued ones. The first that does
    not fit keeps all behind it waiting, so a large request is not overtaken for ever. Two exceptions: one that waits
    for a prefix, or for what is being read of one, lets others pass, and while nothing runs at all the first swapped
    request returns even past a queued one that does not fit, because only its end can make room.

    While a running request lacks a block nothing of a later rank starts, and in a step with a swap to host memory
    nothing starts at all.
    """
    books = work.books
    for child in books.forking.values():
        work.wait(child, WaitReason.PARENT)
    if work.preemptions:
        for entry in _candidates(work):
            work.wait(entry, WaitReason.BLOCKS)
        return
    blocked = False
    for entry in _candidates(work):
        if work.lacking is not None and work.lacking < entry.rank:
            work.wait(entry, WaitReason.BLOCKS)
        elif blocked:
            work.wait(entry, WaitReason.TURN)
        else:
            reason = _return(work, entry) if entry.phase is Phase.SWAPPED else _start(work, entry, match)
            if reason is not None:
                work.wait(entry, reason)
                blocked = reason not in {WaitReason.PREFIX, WaitReason.LOADING}
    swapped = [entry for entry in work.books.in_order() if entry.phase is Phase.SWAPPED]
    if swapped and not work.books.running():
        reason = _return(work, swapped[0])
        if reason is not None:
            work.wait(swapped[0], reason)


def _candidates(work: Work) -> list[Entry]:
    waiting = [entry for entry in work.books.live() if entry.phase in {Phase.QUEUED, Phase.SWAPPED}]
    return sorted(waiting, key=lambda entry: (-entry.request.priority, entry.phase is Phase.QUEUED, entry.rank))


def _lacks_slot(work: Work, entry: Entry, phase: Phase) -> WaitReason | None:
    if work.books.free_slots < entry.slots:
        return WaitReason.SLOTS
    if phase is Phase.PREFILL and len(work.books.prefilling()) >= work.books.config.max_partial:
        return WaitReason.PARTIAL
    return None


def _return(work: Work, entry: Entry) -> WaitReason | None:
    phase = entry.was or Phase.DECODE
    reason = _lacks_slot(work, entry, phase)
    if reason is not None:
        return reason
    trial = work.books.copy()
    back = trial.swap_in(entry)
    reason = _lacks_blocks(work, trial.available) or (None if trial.everyone_can_end() else WaitReason.PROMISE)
    if reason is not None:
        return reason
    work.books = trial
    work.swap_ins.append(SwapIn(request_id=entry.request_id, slot=back.held_slot, blocks=entry.host_blocks))
    work.waits.pop(entry.request_id, None)
    if phase is Phase.DECODE:
        work.wait(back, WaitReason.RETURNED)
    return None


def _start(work: Work, entry: Entry, match: Matcher) -> WaitReason | None:
    if _prefix_is_coming(work, entry, entry.waits_for, entry.wait_tokens):
        return WaitReason.PREFIX
    reason = _lacks_slot(work, entry, Phase.PREFILL)
    if reason is not None:
        return reason
    found = Match()
    if entry.request.mode == "replay":
        found = match(entry.request, tuple(one.request_id for one in work.admissions))
        if found.is_loading:
            return WaitReason.LOADING
        check_match(found, entry.request, work.books.config)
    if _prefix_is_coming(work, entry, found.waits_for, found.wait_tokens):
        waiting = replace(entry, waits_for=found.waits_for, wait_tokens=found.wait_tokens)
        work.books.queue[entry.request_id] = waiting
        return WaitReason.PREFIX
    trial = work.books.copy()
    started = trial.start(entry, found)
    reason = _lacks_blocks(work, trial.available) or (None if trial.everyone_can_end() else WaitReason.PROMISE)
    if reason is not None:
        return reason
    work.books = trial
    shared = found.cached_tokens // trial.config.block_tokens
    work.admissions.append(
        Admission(
            request_id=entry.request_id,
            slot=started.held_slot,
            first_row=found.first_row,
            cached_tokens=found.cached_tokens,
            shared_blocks=shared,
        )
    )
    work.allocate(entry.request_id, started.blocks - shared)
    return None


def _lacks_blocks(work: Work, left: int) -> WaitReason | None:
    """Return why a start that leaves `left` blocks obtainable cannot be, if so."""
    if left < 0:
        return WaitReason.BLOCKS
    if left < work.books.config.headroom_blocks * len(work.books.running()):
        return WaitReason.HEADROOM
    return None


def _prefix_is_coming(work: Work, entry: Entry, leader_id: str | None, tokens: int) -> bool:
    """Return whether a request that goes before this one is about to compute the prefix."""
    leader = None if leader_id is None else work.books.started.get(leader_id)
    return (
        leader is not None and leader.rank < entry.rank and leader.computed < min(tokens, leader.request.prompt_tokens)
    )
