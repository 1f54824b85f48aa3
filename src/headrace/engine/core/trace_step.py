"""From a plan that was carried out to its trace."""

from headrace.engine.core.step_rows import StepRows
from headrace.engine.core.trace import StepTrace
from headrace.engine.scheduler.plan import StepPlan


def trace_of(
    step: int, times: tuple[float, float], plan: StepPlan, rows: StepRows, blocks: tuple[int, int]
) -> StepTrace:
    """Return the trace of a step.

    Args:
        step: its number.
        times: seconds since the engine's start when it began, and how long it took.
        plan: what was planned.
        rows: what they did, and the n-gram rows read for them.
        blocks: free blocks after it, and blocks of the cache.
    """
    return StepTrace(
        step=step,
        began_s=times[0],
        seconds=times[1],
        rows=plan.rows,
        requests=tuple(rows.steps),
        ngram=rows.reads.layers,
        draft_gain=rows.draft_gain,
        waiting=tuple((name, reason.value) for name, reason in plan.waits),
        preempted=tuple(one.request_id for one in plan.preemptions),
        returned=tuple(one.request_id for one in plan.swap_ins),
        ended=tuple((one.request_id, one.reason.value) for one in plan.ended),
        free_blocks=blocks[0],
        cached_blocks=blocks[1],
    )
