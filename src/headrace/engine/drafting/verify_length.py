"""How many guesses of each request the model runs on: what a step brings against what it takes.

A step with R requests and n guesses among them takes `seconds(R + n)`, its verify rows, and brings R + (sum of the
guesses' survival) tokens; survival is the chance that a guess and all before it are kept. The rate is their quotient.

Whether guess j of a request is judged may depend on the guesses before it and on other requests, never on guess j
itself or a later one of the same request. Otherwise the exact rules (`block_verification`) are exact no longer: judging
a guess only if it promises a long run behind it makes its token more frequent. Both rules here keep to that; taking the
best number of guesses by this step's own survival does not. Greedy and keyed acceptance are exact with any choice.

Source: serving.md section 5.3, training.md section 7.3.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

Seconds = Callable[[int], float]
"""Seconds of a whole step, drafting included, by its verify rows."""


def synchronous_lengths(survival: Sequence[Sequence[float]], seconds: Seconds) -> list[int]:
    """Admit guesses, the likeliest first, and stop at the first that lowers the rate.

    Args:
        survival: per request, of its guesses in order, never rising; may be empty.
        seconds: see `Seconds`.

    Returns:
        Guesses to verify per request.

    Numerics: equal survival goes by place in the block, then by place in the batch.
    """
    lengths = [0] * len(survival)
    if not lengths:
        return lengths
    tokens, rows = float(len(survival)), len(survival)
    rate = tokens / seconds(rows)
    for chance, _, request in _by_survival(survival):
        tokens, rows = tokens + chance, rows + 1
        risen = tokens / seconds(rows)
        if risen < rate:
            break
        rate = risen
        lengths[request] += 1
    return lengths


def best_capacity(survival: Sequence[Sequence[float]], seconds: Seconds) -> tuple[int, float]:
    """Return the number of guesses with the highest rate, of equals the smallest, and that rate.

    No early stop: it may look behind a step of the cost curve. Only for survival that is not of the guesses it decides
    about.
    """
    tokens = float(len(survival))
    best, rate = 0, tokens / seconds(len(survival)) if survival else 0.0
    for count, (chance, _, _) in enumerate(_by_survival(survival), 1):
        tokens += chance
        if tokens / seconds(len(survival) + count) > rate:
            best, rate = count, tokens / seconds(len(survival) + count)
    return best, rate


def admit(survival: Sequence[Sequence[float]], capacity: int) -> list[int]:
    """Return guesses to verify per request: the `capacity` likeliest of all."""
    lengths = [0] * len(survival)
    for _, _, request in _by_survival(survival)[:capacity]:
        lengths[request] += 1
    return lengths


class StaleCapacity:
    """The rule for engines that plan a step before the one ahead of it is known.

    The capacity is the best by what survival was two steps ago, so it is fixed before any of this step's guesses exist;
    the guesses that fill it are this step's likeliest. Owns the survival of the last two steps.
    """

    def __init__(self) -> None:
        self._past: deque[dict[str, tuple[float, ...]]] = deque(maxlen=2)

    def lengths(self, survival: Mapping[str, Sequence[float]], seconds: Seconds) -> dict[str, int]:
        """Return guesses to verify by request; all of them in the first two steps.

        Args:
            survival: by request, of this step's guesses.
            seconds: see `Seconds`.
        """
        curves = list(survival.values())
        capacity = sum(map(len, curves))
        if len(self._past) == 2:
            capacity, _ = best_capacity(_as_of(self._past[0], survival), seconds)
        self._past.append({name: tuple(curve) for name, curve in survival.items()})
        return dict(zip(survival, admit(curves, capacity), strict=True))


def is_drafting_worth(expected: Sequence[Sequence[float]], seconds: Seconds, plain_seconds: float) -> bool:
    """Return whether drafting beats a step without any guess and without the time that guessing takes.

    Args:
        expected: per request, survival of guesses as far as earlier steps tell.
        seconds: see `Seconds`.
        plain_seconds: of a step of the same requests that does not draft.
    """
    return bool(expected) and best_capacity(expected, seconds)[1] > len(expected) / plain_seconds


def _by_survival(survival: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """Return (chance, place, request) of all guesses, the likeliest first."""
    pairs = [(chance, place, request) for request, curve in enumerate(survival) for place, chance in enumerate(curve)]
    return sorted(pairs, key=lambda one: (-one[0], one[1], one[2]))


def _as_of(past: Mapping[str, tuple[float, ...]], now: Mapping[str, Sequence[float]]) -> list[tuple[float, ...]]:
    """Return past curves of the requests of now; a new one has the mean of the others, or else of all past."""
    known = [past[name] for name in now if name in past] or list(past.values())
    places = max(map(len, known), default=0)
    mean = tuple(sum(curve[k] if k < len(curve) else 0.0 for curve in known) / len(known) for k in range(places))
    return [past.get(name, mean) for name in now]
