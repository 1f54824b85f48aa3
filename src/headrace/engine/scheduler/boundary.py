"""The step boundary: who ends before anything is planned."""

from headrace.engine.scheduler.entry import EndReason, Entry, Phase
from headrace.engine.scheduler.plan import Ended
from headrace.engine.scheduler.work import Work


def end_requests(work: Work, now: float) -> None:
    """End what was stopped, cancelled, reached its limit or its deadline, whatever its phase.

    A request that ends before its prompt is read takes the further answers to it along.
    """
    books = work.books
    for entry in books.live():
        reason = books.ending.get(entry.request_id) or _own_reason(entry, now)
        if reason is None or books.find(entry.request_id) is None:
            continue
        _end(work, entry.request_id, reason)
        for child in [child for child in books.forking.values() if child.parent == entry.request_id]:
            _end(work, child.request_id, reason)
    books.ending.clear()


def _own_reason(entry: Entry, now: float) -> EndReason | None:
    request = entry.request
    if entry.phase is Phase.DECODE and entry.generated >= request.max_new_tokens:
        return EndReason.LENGTH
    if request.deadline is not None and now >= request.deadline:
        return EndReason.DEADLINE
    return None


def _end(work: Work, request_id: str, reason: EndReason) -> None:
    entry = work.books.end(request_id)
    if entry is None:
        return
    work.ended.append(
        Ended(
            request_id=request_id,
            reason=reason,
            phase=entry.phase,
            slot=entry.slot,
            computed=entry.computed,
            generated=entry.generated,
        )
    )
