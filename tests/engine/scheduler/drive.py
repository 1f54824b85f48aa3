"""A small scheduler to drive by hand: blocks of 4 tokens, a window of 3, nothing cached unless said."""

from typing import Any

from headrace.engine.scheduler.config import SchedulerConfig
from headrace.engine.scheduler.plan import Pool, StepPlan
from headrace.engine.scheduler.request import Matcher, Request
from headrace.engine.scheduler.scheduler import Scheduler, nothing_cached

DEFAULTS: dict[str, Any] = {
    "window": 3, "num_blocks": 20, "num_slots": 4, "max_rows": 16, "chunk": 8, "max_waiting": 10, "max_context": 100,
    "block_bytes": 10, "slot_bytes": 7, "host_bytes": 1000, "block_tokens": 4, "max_partial": 2, "headroom_blocks": 0,
}  # fmt: skip


def small(**changes: Any) -> SchedulerConfig:
    """Return the small configuration with some numbers replaced."""
    return SchedulerConfig(**(DEFAULTS | changes))


def ask(name: str, arrival: int, prompt: int, new: int, **changes: Any) -> Request:
    """Return a request."""
    return Request(request_id=name, arrival=arrival, prompt_tokens=prompt, max_new_tokens=new, **changes)


def scheduler(*requests: Request, **changes: Any) -> Scheduler:
    """Return a small scheduler with these requests submitted."""
    made = Scheduler(small(**changes))
    for request in requests:
        made.submit(request)
    return made


def step(driven: Scheduler, now: float = 0.0, *, cached: int = 0, match: Matcher = nothing_cached) -> StepPlan:
    """Plan a step of a core whose blocks are all free but those held and `cached` ones."""
    spare = driven.config.num_blocks - sum(driven.holdings.values())
    return driven.plan(now, Pool(free=spare - cached, evictable=cached), match)


def chunks(plan: StepPlan) -> dict[str, tuple[int, int]]:
    """Return the rows of each prefill chunk."""
    return {chunk.request_id: (chunk.start, chunk.stop) for chunk in plan.prefills}


def decoding(plan: StepPlan) -> list[str]:
    """Return who decodes, in order."""
    return [row.request_id for row in plan.decodes]


def waits(plan: StepPlan) -> dict[str, str]:
    """Return why each waiting request waits."""
    return {name: reason.value for name, reason in plan.waits}


def started(plan: StepPlan) -> list[str]:
    """Return who starts, in order."""
    return [one.request_id for one in plan.admissions]
