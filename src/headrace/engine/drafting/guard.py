"""The guard: drafts only where that pays, and never lets it lose a request more than a small share of its time.

Costs and confidences are predictions; the guard goes by what happened. It keeps a ledger for every request (what
drafting gained or lost it, `ledger.py`) and for every size of batch what steps took (1, 2, 4, 8, ...: a size belongs to
the largest that is not above it). A step drafts only if both hold:

* The requests can afford that nothing is kept: what they lose by it, with what they lost before, is at most `share` of
  their time so far. So no answer can fall below that, whatever its text. Where the first rounds of other requests
  lately paid, one lost round may come before its share of time, if the answer may become long enough to bear it.
* It promises to pay: by the newest rounds of these requests, or because the newest one did. Otherwise, and for a
  request that is not known yet, a single round is tried once its worst case is `share` of the time that went by without
  drafting; tries that fail double that time, up to eight times.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.engine.drafting.ledger import RATE_WINDOW, Ledger, StepTimes

_FEWEST_PLAIN = 3  # steps of the present requests, before one of theirs drafts; the first is often a slow one

Price = Callable[[int], float]
"""What a drafted step of so many requests takes, in plain steps, before any was measured."""


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """How much may be lost.

    Attributes:
        share: of a request's time, at most, that drafting may have lost it where it is alone in its steps.
        crowd_share: the same where it is not: a round costs more plain steps there, and brings each request no more.
        margin: how much more a round must bring than it takes, as a share, to begin again after a pause: measured
            times are not exact, and at equal speed there shall be no to and fro.
        max_doublings: of the time between tries that fail.
        least_guess: what a drafted step is taken to cost at least, in plain steps, before any was measured.
        refresh_steps: drafted steps after which a plain one shows anew what it takes.
    """

    share: float = 0.02
    crowd_share: float = 0.01
    margin: float = 0.06
    max_doublings: int = 3
    refresh_steps: int = 32
    least_guess: float = 1.5


@dataclass(frozen=True)
class GuardReport:
    """Of one size of batch: tokens per second each way (None before it was measured), which is in use, and probes.

    `probes` are single tries, `pauses` the times that drafting was given up.
    """

    with_drafts: float | None
    without: float | None
    is_paused: bool
    probes: int
    pauses: int


@dataclass
class _Account:
    """One size of batch.

    Attributes:
        times: what steps took.
        names, num_plain: whose steps these are at present, and how many of theirs did not draft.
        idle: plain steps since the last drafted one.
        failures: how many tries in a row brought less than they took.
        opening: what a request's first round lately gained.
        typical: tokens of a round of one request.
        since_plain: drafted steps since the last plain one.
        is_paused, is_try: what the newest step was.
        probes, pauses: as in `GuardReport`.
        gain: newest ratio of tokens per second with drafts to without.
    """

    times: StepTimes
    names: set[str] = field(default_factory=set)
    num_plain: int = 0
    idle: float = 0.0
    failures: int = 0
    opening: float = -0.5
    typical: float = 2.0
    since_plain: int = 0
    is_paused: bool = True
    is_try: bool = False
    gain: float | None = None
    probes: int = 0
    pauses: int = 0


@dataclass(slots=True)
class _Batch:
    """What the ledgers of a step's requests say together: means over them."""

    surplus: float
    spent: float
    expected: float
    newest: float | None
    room: float


class Guard:
    """Decides whether steps draft. Owns the ledgers; reads no clock, and nothing from outside but `price`."""

    def __init__(self, price: Price, settings: GuardSettings | None = None) -> None:
        self._settings = settings or GuardSettings()
        self._price = price
        self._accounts: dict[int, _Account] = {}
        self._ledgers: dict[str, Ledger] = {}
        self._wait = 0.0

    def drafts(self, rooms: Mapping[str, int]) -> bool:
        """Return whether the next step of these requests drafts.

        Args:
            rooms: tokens that each may still write.
        """
        account = self._account(len(rooms))
        if rooms.keys() != account.names:
            account.names = set(rooms)
            account.times.begin()
            account.num_plain = 0
        if account.since_plain >= self._settings.refresh_steps:
            self._wait = 1.0
            return False
        self._wait, is_try = self._plan(account, self._together(rooms, account), len(rooms))
        is_drafting = self._wait <= 0
        account.is_try = is_try and is_drafting
        account.probes += account.is_try
        is_paused = is_try or not is_drafting
        account.pauses += is_paused and not account.is_paused
        account.is_paused = is_paused
        return is_drafting

    @property
    def wait(self) -> float:
        """Steps, as `drafts` last saw it, before which these requests will not draft; they may end sooner."""
        return self._wait

    def add(self, tokens: Mapping[str, int], *, is_drafted: bool, seconds: float | None) -> None:
        """Take what a step brought.

        Args:
            tokens: that each request got.
            is_drafted: as `drafts` said.
            seconds: of the whole step, guessing included; None where it did something else too, such as reading
                prompts.
        """
        if not tokens:
            return
        account, total = self._account(len(tokens)), sum(tokens.values())
        if seconds is not None:
            took = account.times.add(seconds, total, is_drafted=is_drafted)
        else:
            took = account.times.price if is_drafted else 1.0
        if is_drafted:
            self._note_round(account, tokens, took)
        else:
            account.since_plain = 0
        if is_drafted or account.gain is None:
            account.gain = account.times.gain
        account.num_plain += not is_drafted
        account.idle = 0.0 if is_drafted else account.idle + 1
        for name, count in tokens.items():
            self._ledger(name).add(count, took, is_drafted=is_drafted)

    def add_plain(self, names: Collection[str], seconds: Sequence[float]) -> None:
        """Take several steps without drafts that did nothing else, each of which brought each request one token."""
        if not names or not seconds:
            return
        account = self._account(len(names))
        for one in seconds[-RATE_WINDOW:]:
            account.times.add(one, len(names), is_drafted=False)
        account.num_plain += len(seconds)
        account.since_plain = 0
        account.idle += len(seconds)
        for name in names:
            self._ledger(name).add_plain(len(seconds))

    def forget(self, name: str) -> None:
        """Let go of a request."""
        self._ledgers.pop(name, None)
        for account in self._accounts.values():
            if name in account.names:
                account.names = set()  # another may come under the same name

    def report(self) -> dict[int, GuardReport]:
        """Return what is known, by the smallest batch of each account."""
        return {size: _report(account) for size, account in sorted(self._accounts.items())}

    def gain(self, batch: int) -> float | None:
        """Return tokens per second of steps that drafted over those that did not; None before both were measured."""
        account = self._accounts.get(_size(batch))
        return None if account is None else account.gain

    def _plan(self, account: _Account, batch: _Batch, count: int) -> tuple[float, bool]:
        """Return how many plain steps to wait before drafting, 0 or less for none, and whether it will be a try."""
        price = account.times.price
        share = self._settings.share if count == 1 else self._settings.crowd_share
        worst = max(0.0, price - 1)
        is_trusted = account.opening > 0 and worst <= share * (batch.spent + batch.room)
        debt = worst - batch.surplus
        can_afford = debt <= 0 or (is_trusted and debt <= worst)
        affordable = 0.0 if can_afford else debt / share - batch.spent
        if account.num_plain < _FEWEST_PLAIN:
            affordable = max(affordable, 1.0)
        if is_trusted and batch.newest is None:
            return affordable, False
        wanted = price * (1 + self._settings.margin * account.is_paused)
        if batch.newest is not None and max(batch.expected, batch.newest) >= wanted:
            return affordable, False
        return max(affordable, worst * 2**account.failures / share - account.idle), True

    def _note_round(self, account: _Account, tokens: Mapping[str, int], took: float) -> None:
        gained = sum(tokens.values()) / len(tokens) - took
        if gained > 0:
            account.failures = 0
        elif account.is_try:
            account.failures = min(account.failures + 1, self._settings.max_doublings)
        account.is_try = False
        account.since_plain += 1
        for name, count in tokens.items():
            account.typical += 0.05 * (count - account.typical)
            if self._ledger(name).newest is None:
                account.opening += 0.3 / len(tokens) * (count - took - account.opening)

    def _together(self, rooms: Mapping[str, int], account: _Account) -> _Batch:
        ledgers, count = [self._ledger(name) for name in rooms], len(rooms)
        known = [one.newest for one in ledgers if one.newest is not None]
        return _Batch(
            surplus=sum(one.surplus for one in ledgers) / count,
            spent=sum(one.spent for one in ledgers) / count,
            expected=sum(one.expected(account.typical) for one in ledgers) / count,
            newest=sum(known) / len(known) if known else None,
            room=sum(rooms.values()) / count,
        )

    def _ledger(self, name: str) -> Ledger:
        found = self._ledgers.get(name)
        if found is None:
            found = self._ledgers[name] = Ledger()
        return found

    def _account(self, batch: int) -> _Account:
        size = _size(batch)
        if size not in self._accounts:
            self._accounts[size] = _Account(StepTimes(max(self._settings.least_guess, self._price(size))))
        return self._accounts[size]


def _size(batch: int) -> int:
    return 1 << (batch.bit_length() - 1)


def _report(account: _Account) -> GuardReport:
    times = account.times
    return GuardReport(
        times.rate(is_drafted=True),
        times.rate(is_drafted=False),
        account.is_paused,
        account.probes,
        account.pauses,
    )
