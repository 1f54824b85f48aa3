"""What every drafter can do. The engine's step knows drafters by this interface alone.

Draft layers of a model (DSpark, multi-token prediction) read the backbone's taps of committed positions and keep memory
of their own in the sequence's state; a look-up reads only token ids.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.engine.drafting.choice import Choice
from headrace.engine.drafting.proposal import Proposal


@dataclass(frozen=True, eq=False)
class Committed:
    """Tokens of one sequence that became certain, prompt or answer: T at positions `first` onwards.

    Attributes:
        name: of the sequence.
        first: position of the first of them.
        token_ids: [T] ids.
        taps: [T', n * D] of the newest T' <= T positions, what the backbone gave away there; None where the drafter
            asked for none.
        state: what the model remembers of the sequence; a drafter of the model writes its own memory in it.
    """

    name: str
    first: int
    token_ids: NDArray[np.int64]
    taps: Tensor | None = field(default=None, repr=False)
    state: SequenceState | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Wanted:
    """One sequence that guesses are wanted for.

    Attributes:
        name: of the sequence.
        token_id: its newest token, sampled and not yet in anyone's memory.
        count: guesses at most, at least 1.
        choice: turns the drafter's logits into guesses.
        state: as in `Committed`.
    """

    name: str
    token_id: int
    count: int
    choice: Choice
    state: SequenceState | None = field(default=None, repr=False)


class Drafter(Protocol):
    """Guesses tokens.

    A sequence's memory is what was observed of it, so a preempted sequence that comes back needs nothing, one that
    comes back under another name is observed again, and rejected guesses leave no trace: they are never observed.
    """

    @property
    def name(self) -> str:
        """What metrics and traces call it."""

    @property
    def max_guesses(self) -> int:
        """Guesses per sequence and step, at most."""

    @property
    def wants_taps(self) -> bool:
        """Whether `Committed.taps` must be there."""

    def observe(self, committed: Sequence[Committed]) -> None:
        """Remember tokens that are certain: every position of a sequence once, in order.

        The newest token of a sequence is not among them while it is `Wanted.token_id`; it is observed when it has gone
        through the backbone.

        Raises:
            InternalError: a position is left out or comes twice.
        """

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """Return guesses for every sequence, in order; some may have none. Changes no memory."""

    def forget(self, names: Iterable[str]) -> None:
        """Let go of sequences; unknown ones are forgotten already."""
