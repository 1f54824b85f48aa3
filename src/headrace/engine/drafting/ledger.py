"""What drafting gained or lost one request, and what steps take: the books that the guard decides by.

Time is counted in plain steps: what a step without drafts takes for as many requests. A request that drafting never
helped would have one token for each of them, so tokens minus time is what drafting gained (or, below 0, lost) it.
"""

from collections import deque
from dataclasses import dataclass, field

PLAIN_WINDOW, DRAFTED_WINDOW = 5, 9
"""Newest steps of each kind whose median counts; few, so that both are of a machine in the same mood."""
_SURE_STEPS = 3  # drafted steps that are measured before the first guess of the price counts no longer
_FADE = 0.8
_MAX_STRETCH = 3.0  # a step that took more than so many times the price was held up by something else


@dataclass(slots=True)
class Ledger:
    """One request's. `spent` is time in plain steps, `newest` the tokens of its last round (None without any)."""

    spent: float = 0.0
    tokens: int = 0
    newest: int | None = None
    _sum: float = 0.0
    _weight: float = 0.0

    @property
    def surplus(self) -> float:
        """Tokens more than plain steps would have brought in the same time."""
        return self.tokens - self.spent

    def add(self, tokens: int, took: float, *, is_drafted: bool) -> None:
        """Take a step that brought so many tokens and took so many plain steps."""
        self.tokens += tokens
        self.spent += took
        if is_drafted:
            self.newest = tokens
            self._sum = self._sum * _FADE + tokens
            self._weight = self._weight * _FADE + 1

    def add_plain(self, steps: int) -> None:
        """Take so many steps that did not draft."""
        self.tokens += steps
        self.spent += steps

    def expected(self, typical: float) -> float:
        """Return the tokens of its next round: the mean of its newest ones and one of the typical kind."""
        return (self._sum + typical) / (self._weight + 1)


@dataclass
class StepTimes:
    """What steps of one size of batch took, seconds.

    Attributes:
        price: plain steps that a drafted step takes; a guess until some of both were measured.
        plain, drafted: seconds and tokens of the newest steps of each kind.
    """

    price: float
    plain: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PLAIN_WINDOW))
    drafted: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=DRAFTED_WINDOW))

    def __post_init__(self) -> None:
        """Keep the guess."""
        self._guess = self.price

    def add(self, seconds: float, tokens: int, *, is_drafted: bool) -> float:
        """Take a step; return how many plain steps it took (a plain one took one)."""
        (self.drafted if is_drafted else self.plain).append((seconds, tokens))
        plain = _median([one for one, _ in self.plain])
        if plain and self.drafted:
            measured = _median([one / plain for one, _ in self.drafted])
            # of the first few the dearer counts, for what may be lost goes by it; one that slept tells nothing
            is_new = len(self.drafted) < _SURE_STEPS
            self.price = max(self._guess, min(measured, 2 * self._guess)) if is_new else measured
        if not is_drafted:
            return 1.0
        return min(seconds / plain, _MAX_STRETCH * self.price) if plain else self.price

    @property
    def gain(self) -> float | None:
        """Tokens per second of the newest drafted steps over the newest plain ones; None without one of them."""
        drafted, plain = self.rate(is_drafted=True), self.rate(is_drafted=False)
        return drafted / plain if drafted and plain else None

    def rate(self, *, is_drafted: bool) -> float | None:
        """Return tokens per second over the newest steps of a kind; None without any.

        A step that took more than three times the median counts as three times.
        """
        steps = self.drafted if is_drafted else self.plain
        if not steps:
            return None
        limit = _MAX_STRETCH * _median([seconds for seconds, _ in steps])
        total = sum(min(seconds, limit) for seconds, _ in steps)
        return sum(tokens for _, tokens in steps) / total if total > 0 else None


def _median(values: list[float]) -> float:
    """Return the middle value, of an even number the upper one; 0 without any."""
    return sorted(values)[len(values) // 2] if values else 0.0
