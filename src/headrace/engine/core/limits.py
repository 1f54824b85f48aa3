"""The scheduler's numbers, from the engine's options and its memory plan."""

from headrace.engine.core.memory_plan import MemoryPlan
from headrace.engine.core.options import EngineOptions, chunk_of
from headrace.engine.scheduler.config import SchedulerConfig
from headrace.models.deepseek_v41.architecture import Config


def scheduler_config(options: EngineOptions, plan: MemoryPlan, config: Config, max_context: int) -> SchedulerConfig:
    """Return the scheduler's numbers; the budget defaults to a chunk, a window and all decode rows together."""
    chunk, window = chunk_of(options, config.hidden_size), config.window
    if options.cache_dir is not None and options.window_policy == "full":
        chunk = min(chunk, 2 * window)  # the rings hold as many rows, so that none is gone before it is written
    return SchedulerConfig(
        window=window,
        num_blocks=plan.num_blocks,
        num_slots=options.num_slots,
        max_rows=options.max_rows or max(chunk, window) + window + options.num_slots,
        chunk=chunk,
        max_waiting=options.max_waiting,
        max_context=max_context,
        block_bytes=plan.block_bytes,
        slot_bytes=plan.slot_bytes,
        host_bytes=plan.host,
        headroom_blocks=options.headroom_blocks,
    )
