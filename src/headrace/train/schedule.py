"""Learning rate, sequence length and batch size as functions of how far a run is; pure values.

A position is a number of steps done and a number of tokens seen. Published settings are in `published.py`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import cos, isfinite, pi
from typing import Literal

from headrace.core.errors import UserError

Unit = Literal["steps", "tokens"]


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run is: steps done and tokens seen before the step in question."""

    steps: int
    tokens: int

    def in_unit(self, unit: Unit) -> int:
        """Return the position in steps or tokens."""
        return self.steps if unit == "steps" else self.tokens


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One value until a border; the flat tail of a schedule is one too."""

    value: float
    until: int

    def at(self, place: int, start: int) -> float:  # noqa: ARG002  # every part is asked the same way
        """Return the value."""
        return self.value


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Half a cosine from the first value, at the end of the part before, to the last value at a border."""

    first: float
    last: float
    until: int

    def at(self, place: int, start: int) -> float:
        """Return the value at a place of a part that begins at `start`."""
        share = (place - start) / (self.until - start)
        return self.last + (self.first - self.last) * 0.5 * (1.0 + cos(pi * share))


Part = Constant | Cosine


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """A linear ramp of the first steps: step i, counted from 0, gets (i + 1) / steps of the value."""

    steps: int

    def at(self, step: int) -> float:
        """Return the share of the value that a step gets."""
        return min(1.0, (step + 1) / self.steps) if self.steps else 1.0


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Parts after each other, and a warm-up over the first steps that multiplies them.

    Attributes:
        warmup: the ramp; always counted in steps, as published.
        parts: in order; each ends where the next begins. After the last border its end value holds.
        unit: what the borders count.
    """

    warmup: Warmup
    parts: tuple[Part, ...]
    unit: Unit = "steps"

    def __post_init__(self) -> None:
        """Refuse borders that do not rise and values that are no rates.

        Raises:
            UserError: names the value.
        """
        if self.warmup.steps < 0:
            raise UserError(f"Warm-up of {self.warmup.steps} steps; 0 or more are accepted.", param="warmup")
        if self.unit not in {"steps", "tokens"}:
            raise UserError(f"Schedule unit is {self.unit!r}; steps or tokens is accepted.", param="unit")
        if not self.parts:
            raise UserError("A learning rate needs at least one part.", param="parts")
        _check_rising("Learning rate parts end at", [0, *(part.until for part in self.parts)])
        for part in self.parts:
            for value in (part.value,) if isinstance(part, Constant) else (part.first, part.last):
                if not (isfinite(value) and value >= 0.0):
                    raise UserError(
                        f"Learning rate is {value}; a finite number of at least 0 is accepted.", param="parts"
                    )

    def at(self, position: Position) -> float:
        """Return the rate of the step taken at a position."""
        return self.warmup.at(position.steps) * self.at_place(position.in_unit(self.unit))

    def at_place(self, place: int) -> float:
        """Return the rate at a place in the unit of the borders, without the warm-up."""
        start = 0
        for part in self.parts:
            if place < part.until:
                return part.at(place, start)
            start = part.until
        last = self.parts[-1]
        return last.value if isinstance(last, Constant) else last.last


@dataclass(frozen=True, kw_only=True)
class Staircase:
    """A value that changes at borders and is constant between them: sequence length, bias speed, loss weights.

    Attributes:
        starts: where each value begins; the first is 0.
        values: one per start.
        unit: what the starts count.
    """

    starts: tuple[int, ...]
    values: tuple[float, ...]
    unit: Unit = "steps"

    def __post_init__(self) -> None:
        """Refuse starts that do not rise from 0 or have no value each.

        Raises:
            UserError: names the starts.
        """
        if len(self.starts) != len(self.values) or not self.starts or self.starts[0] != 0:
            raise UserError(
                f"A staircase has starts {list(self.starts)} and {len(self.values)} values; a first start of 0 and one "
                "value per start are accepted.",
                param="starts",
            )
        _check_rising("Staircase values start at", self.starts)

    def at(self, position: Position) -> float:
        """Return the value at a position; a border belongs to the value that begins there."""
        return self.values[bisect_right(self.starts, position.in_unit(self.unit)) - 1]


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """Tokens per step, growing linearly with tokens seen and then constant.

    Attributes:
        first: tokens of the first step.
        last: tokens of a step once the ramp is over.
        until: tokens seen when it is; 0 for a constant batch.
    """

    first: int
    last: int
    until: int

    def __post_init__(self) -> None:
        """Refuse batches that shrink or are empty.

        Raises:
            UserError: names the values.
        """
        if not 0 < self.first <= self.last or self.until < 0:
            raise UserError(
                f"A batch ramp from {self.first} to {self.last} tokens until {self.until}; a growing batch of at least "
                "one token is accepted.",
                param="batch",
            )

    def at(self, position: Position, sequence_length: int) -> int:
        """Return the sequences of the step at a position: whole ones, at least one."""
        tokens = self.last
        if position.tokens < self.until:
            tokens = self.first + (self.last - self.first) * position.tokens // self.until
        return max(1, tokens // sequence_length)


def _check_rising(what: str, borders: Sequence[int]) -> None:
    if any(later <= earlier for earlier, later in pairwise(borders)):
        raise UserError(f"{what} {list(borders)}; rising numbers are accepted.", param="until")
