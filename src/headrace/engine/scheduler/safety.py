"""Whether everybody who has started can run to the end, one after the other in order of rank.

The rule that keeps the scheduler free of deadlock. Requests that have started are put in order of rank. Each must be
able to get every block it may still ask for from three places: blocks that are obtainable now, blocks that only
requests ahead of it hold (they will have ended), and what it gains by swapping those behind it to host memory, the last
one first, as far as that memory goes. An ending, a swap of the last running request, and an allocation by the first one
keep the rule; everything else (a start, a return, an allocation by another one, a fork) is planned only if the rule
still holds afterwards. So the first in rank never waits for a block, whatever the others do.
"""

from collections.abc import Sequence

from headrace.engine.scheduler.config import SchedulerConfig
from headrace.engine.scheduler.entry import Entry
from headrace.engine.scheduler.holdings import Holdings


def everyone_can_end(
    config: SchedulerConfig, started: Sequence[Entry], holdings: Holdings, available: int, host_free: int
) -> bool:
    """Return whether the rule holds.

    Args:
        config: the budgets.
        started: running and swapped requests, in order of rank.
        holdings: what they hold in the pool.
        available: blocks that are free or can be evicted, reserved ones left out.
        host_free: bytes of host memory not used.
    """
    missing = [entry.missing_blocks(config) for entry in started]
    if available >= sum(missing):
        return True
    released = _released_before(started, holdings)
    gained = _gained_by_swaps(config, started, holdings, host_free)
    return all(available + released[i] + gained[i] >= missing[i] for i in range(len(started)))


def _released_before(started: Sequence[Entry], holdings: Holdings) -> list[int]:
    """Return, per request, the blocks whose holders all come before it, reserved ones included."""
    place = {entry.request_id: index for index, entry in enumerate(started)}
    last = [entry.reserved for entry in started]
    for holders, count in holdings.groups():
        last[max(place[name] for name in holders)] += count
    released, total = [], 0
    for count in last:
        released.append(total)
        total += count
    return released


def _gained_by_swaps(
    config: SchedulerConfig, started: Sequence[Entry], holdings: Holdings, host_free: int
) -> list[int]:
    """Return, per request, the blocks to be had by swapping the running ones behind it, the last one first."""
    gained, total = [0] * len(started), 0
    for index in range(len(started) - 1, -1, -1):
        entry = started[index]
        gained[index] = total
        if not entry.is_running or host_free < config.slot_bytes:
            continue
        host_free -= config.slot_bytes
        moved = min(holdings.private(entry.request_id), host_free // config.block_bytes)
        host_free -= moved * config.block_bytes
        total += moved  # reserved blocks come free too, but are not counted: more moved blocks could crowd them out
    return gained
