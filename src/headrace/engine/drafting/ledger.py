"""What drafting gained or lost one request, and what steps take: the books that the guard decides by.

Time is counted in plain steps: what a step without drafts takes for as many requests. A request that drafting never
helped would have one token for each of them, so tokens minus time is what drafting gained (or, below 0, lost) it.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

PLAIN_WINDOW, DRAFTED_WINDOW = 5, 9
"""Newest steps of each kind whose median counts; few, so that both are of a machine in the same mood."""
RATE_WINDOW = 32
"""Newest steps of each kind that are reported as tokens per second."""
_SURE_STEPS = 3  # drafted steps whose median is believed
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


class StepTimes:
    """What steps of one size of batch took.

    Steps of different requests are not compared: how long a step takes depends on how they are sampled and on their
    context. So seconds count while the same requests are in the steps; of earlier ones the ratio is kept.
    """

    def __init__(self, first_price: float) -> None:
        """Begin with a guess of how many plain steps a drafted one takes."""
        self.price = self._first = first_price
        self._seconds: dict[bool, deque[float]] = {
            True: deque(maxlen=DRAFTED_WINDOW),
            False: deque(maxlen=PLAIN_WINDOW),
        }
        self._ratios: deque[float] = deque(maxlen=DRAFTED_WINDOW)
        self._newest: dict[bool, deque[tuple[float, int]]] = {way: deque(maxlen=RATE_WINDOW) for way in (True, False)}

    def begin(self) -> None:
        """Other requests are in the steps from now on."""
        for seconds in self._seconds.values():
            seconds.clear()
        self.price = self._remembered

    def add(self, seconds: float, tokens: int, *, is_drafted: bool) -> float:
        """Take a step; return how many plain steps it took (a plain one took one)."""
        self._seconds[is_drafted].append(seconds)
        self._newest[is_drafted].append((seconds, tokens))
        plain, drafted = _median(self._seconds[False], is_lower=True), self._seconds[True]
        if plain and is_drafted:
            self._ratios.append(seconds / plain)
        if plain and drafted:
            measured, remembered = _median(drafted) / plain, self._remembered
            # of the first few the dearer counts, for what may be lost goes by it; one that slept tells nothing
            is_sure = len(drafted) >= _SURE_STEPS
            self.price = measured if is_sure else max(remembered, min(measured, 2 * remembered))
        if not is_drafted:
            return 1.0
        return min(seconds / plain, _MAX_STRETCH * self.price) if plain else self.price

    @property
    def _remembered(self) -> float:
        return _median(self._ratios) if len(self._ratios) >= _SURE_STEPS else self._first

    @property
    def gain(self) -> float | None:
        """Tokens per second of the newest drafted steps over the newest plain ones; None without one of them."""
        drafted, plain = self.rate(is_drafted=True), self.rate(is_drafted=False)
        return drafted / plain if drafted and plain else None

    def rate(self, *, is_drafted: bool) -> float | None:
        """Return tokens per second over the newest steps of a kind; None without any.

        A step that took more than three times the median counts as three times.
        """
        steps = self._newest[is_drafted]
        limit = _MAX_STRETCH * _median([seconds for seconds, _ in steps])
        total = sum(min(seconds, limit) for seconds, _ in steps)
        return sum(tokens for _, tokens in steps) / total if total > 0 else None


def _median(values: Collection[float], *, is_lower: bool = False) -> float:
    """Return the middle value, of an even number the upper or the lower one; 0 without any."""
    return sorted(values)[(len(values) - is_lower) // 2] if values else 0.0
