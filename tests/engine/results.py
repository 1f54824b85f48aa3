"""What has to be equal between two answers to one request, whatever else ran, was cached or was measured."""

from dataclasses import replace

from headrace import LLM
from headrace.engine.result import Result, Timings, Work


def told(result: Result) -> Result:
    """Return a result without what it took: timings, work, and what came from the cache."""
    return replace(
        result,
        timings=Timings(),
        work=Work(),
        cache_reason=None,
        usage=replace(result.usage, cached_tokens=0, cached_tokens_by_tier={}),
        alternatives=tuple(map(told, result.alternatives)),
    )


def working_steps(llm: LLM) -> list[int]:
    """Return the numbers of the kept steps in which anything was computed."""
    return [trace.step for trace in llm.traces() if trace.requests]
