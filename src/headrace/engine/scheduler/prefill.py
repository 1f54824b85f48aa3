"""Prefill chunks: what the decode rows leave of the budget, and the forks at the end of a prompt."""

from headrace.engine.scheduler.chunk import next_chunk
from headrace.engine.scheduler.entry import Entry, Phase, WaitReason
from headrace.engine.scheduler.plan import Fork, PrefillChunk
from headrace.engine.scheduler.work import Work


def plan_prefills(work: Work) -> None:
    """Plan a chunk for each prompt in prefill, in order of rank, those that have gone without for long first."""
    config = work.books.config
    budget = config.max_rows - sum(1 + row.drafts for row in work.decodes)
    if work.decodes and config.prefill_rows is not None:
        budget = min(budget, config.prefill_rows)
    entries = work.books.prefilling()
    entries.sort(key=lambda entry: (entry.skipped < config.patience, entry.rank))
    for entry in entries:
        limit = config.chunk if entry is entries[-1] else min(config.chunk, config.contended_rows)
        request = entry.request
        left = request.prompt_tokens - entry.computed
        tail = min(config.window, request.prompt_tokens) if request.mode == "replay" else 1
        size = next_chunk(left, limit, tail, budget)
        if size == 0:
            work.change(entry, skipped=entry.skipped + 1)
            work.wait(entry, WaitReason.ROWS)
            continue
        if size == left and entry.unforked and not _can_fork(work, entry):
            work.wait(entry, WaitReason.PROMISE)
            continue
        budget -= size
        _plan_chunk(work, entry, size)


def _plan_chunk(work: Work, entry: Entry, size: int) -> None:
    request = entry.request
    stop = entry.computed + size
    is_last = stop == request.prompt_tokens
    work.prefills.append(
        PrefillChunk(
            request_id=entry.request_id,
            slot=entry.held_slot,
            start=entry.computed,
            stop=stop,
            write_from=entry.cached,
            is_last=is_last,
        )
    )
    entry = work.change(entry, computed=stop, skipped=0)
    if is_last:
        entry = work.change(entry, phase=Phase.DECODE, generated=min(1, request.max_new_tokens))
        _plan_forks(work, entry)


def _can_fork(work: Work, entry: Entry) -> bool:
    """Return whether a request ahead keeps what it counts on: shared blocks can no longer be swapped out."""
    trial = work.books.copy()
    trial.fork(entry)
    return trial.everyone_can_end()


def _plan_forks(work: Work, parent: Entry) -> None:
    shared = parent.request.prompt_tokens // work.books.config.block_tokens
    for child in work.books.fork(parent):
        work.waits.pop(child.request_id, None)
        work.forks.append(
            Fork(
                request_id=child.request_id,
                parent=parent.request_id,
                slot=child.held_slot,
                shared_blocks=shared,
                own_blocks=child.blocks - shared,
            )
        )
