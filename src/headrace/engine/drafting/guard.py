"""The guard: measures tokens per second with and without drafting, and drafts only while that is faster.

Costs and confidences are predictions; the guard knows what happened. It keeps one account for every size of batch
(1, 2, 4, 8, ...: a size belongs to the largest that is not above it). In each, one of two ways to step is in use; every
`interval_s` the other one is probed for a few steps, and the faster one is used from then on. Where the one in use
falls behind what the other last showed, they change places at once. Intervals double while probes change nothing, so
probing the slower way costs less and less.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """How the guard measures.

    Attributes:
        window_steps: newest steps of the way in use that count.
        probe_steps: steps of a probe, and the fewest that are compared.
        interval_s: between the end of a probe and the next, at first.
        max_interval_s: what doubling ends at.
        margin: how much faster, as a share, drafting must be to be used: what is measured is not exact, and at equal
            speed the plain step does less.
    """

    window_steps: int = 32
    probe_steps: int = 4
    interval_s: float = 2.0
    max_interval_s: float = 60.0
    margin: float = 0.03


@dataclass(frozen=True)
class GuardReport:
    """Of one size of batch: tokens per second each way (None before it was measured), which is in use, and probes."""

    with_drafts: float | None
    without: float | None
    is_paused: bool
    probes: int
    pauses: int


@dataclass
class _Account:
    """Steps of one size of batch."""

    interval_s: float
    is_drafting: bool = True
    samples: dict[bool, deque[tuple[int, float]]] = field(default_factory=dict)
    next_probe: float | None = None
    probe_left: int = 0
    probes: int = 0
    pauses: int = 0


class Guard:
    """Decides whether steps draft. Owns what was measured; `clock` is the only thing it reads from outside.

    `is_promising` says by batch, once for each account, which way to begin with; the other way is probed all the same.
    """

    def __init__(
        self,
        settings: GuardSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_promising: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._settings = settings or GuardSettings()
        self._clock, self._is_promising = clock, is_promising
        self._accounts: dict[int, _Account] = {}

    def drafts(self, batch: int) -> bool:
        """Return whether the next step of `batch` requests drafts."""
        account = self._account(batch)
        if account.probe_left:
            return not account.is_drafting
        is_due = account.next_probe is not None and self._clock() >= account.next_probe
        if is_due:
            account.probe_left = self._settings.probe_steps
            account.samples[not account.is_drafting].clear()
            account.probes += 1
        return account.is_drafting != is_due

    def add(self, batch: int, *, is_drafted: bool, tokens: int, seconds: float) -> None:
        """Take what a step brought. Leave out steps that did something else too, such as reading prompts.

        Args:
            batch: requests in it.
            is_drafted: as `drafts` said.
            tokens: that it emitted, over all requests.
            seconds: of the whole step, guessing included.
        """
        account, settings = self._account(batch), self._settings
        account.samples[is_drafted].append((tokens, seconds))
        is_probe = account.probe_left > 0 and is_drafted != account.is_drafting
        if is_probe:
            account.probe_left -= 1
        if account.next_probe is None and len(account.samples[account.is_drafting]) >= settings.probe_steps:
            account.next_probe = self._clock()  # nothing is known of the other way yet
        if account.probe_left:
            return
        has_switched = self._compare(account)
        if is_probe or has_switched:
            grown = min(account.interval_s * 2, settings.max_interval_s)
            account.interval_s = settings.interval_s if has_switched else grown
            account.next_probe = self._clock() + account.interval_s

    def report(self) -> dict[int, GuardReport]:
        """Return what is known, by the smallest batch of each account."""
        return {size: _report(account) for size, account in sorted(self._accounts.items())}

    def report_of(self, batch: int) -> GuardReport | None:
        """Return what is known of the account that a batch belongs to; None before it was met."""
        account = self._accounts.get(_size(batch))
        return None if account is None else _report(account)

    def _account(self, batch: int) -> _Account:
        size = _size(batch)
        if size not in self._accounts:
            account = self._accounts[size] = _Account(self._settings.interval_s, self._is_promising(size))
            for way in (True, False):
                account.samples[way] = deque(maxlen=self._settings.window_steps)
        return self._accounts[size]

    def _compare(self, account: _Account) -> bool:
        """Use the faster way from now on; return whether that is another one."""
        if min(map(len, account.samples.values())) < self._settings.probe_steps:
            return False
        drafted, plain = rate(account.samples[True]), rate(account.samples[False])
        if drafted is None or plain is None:
            return False
        is_better = drafted > plain * (1 + self._settings.margin)
        if is_better == account.is_drafting:
            return False
        account.is_drafting = is_better
        account.pauses += not is_better
        return True


def _size(batch: int) -> int:
    return 1 << (batch.bit_length() - 1)


def _report(account: _Account) -> GuardReport:
    return GuardReport(
        rate(account.samples[True]),
        rate(account.samples[False]),
        not account.is_drafting,
        account.probes,
        account.pauses,
    )


def rate(samples: "deque[tuple[int, float]]") -> float | None:
    """Return tokens per second over steps; None without any.

    A step that took more than three times the median counts as three times: the machine was busy with something else.
    """
    if not samples:
        return None
    limit = 3 * statistics.median(seconds for _, seconds in samples)
    total = sum(min(seconds, limit) for _, seconds in samples)
    return sum(tokens for tokens, _ in samples) / total if total > 0 else None
