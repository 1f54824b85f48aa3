"""How each part of a sequence's state is kept and how it goes back to an earlier length."""

from dataclasses import dataclass
from enum import Enum


class Rollback(Enum):
    """What undoing tokens means for a part of the state."""

    APPEND = "append"  # rows are only added: cut to the shorter length
    RING = (
        "ring"  # the newest rows overwrite the oldest: exact for as many tokens as the ring is deeper than the window
    )
    HALF_PAIR = "half pair"  # a token waiting for its partner: restored from the small history kept beside it
    DERIVED = "derived"  # recomputed from the token ids


@dataclass(frozen=True)
class StateSpec:
    """One part of a sequence's state.

    `name` says what it is, `rollback` how it goes back, `bytes_fixed` what it takes whatever the length, and
    `bytes_per_token` what every token adds.
    """

    name: str
    rollback: Rollback
    bytes_fixed: int
    bytes_per_token: float
