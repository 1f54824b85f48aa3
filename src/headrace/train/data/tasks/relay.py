"""A state that has to be carried along: the sum of all digits so far, modulo a number, asked every now and then.

No token holds the answer. With the far digits kept from a layer's view the state can only travel from window to window,
which is what a bounded replay cuts off.
"""

from dataclasses import dataclass

import numpy as np

from headrace.core.errors import UserError
from headrace.train.data.draws import Draws
from headrace.train.data.packing import IGNORE, Answer, Ids, Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class RelayTask:
    """Rows of digits with query tokens between them; the label of a query is the sum of the digits before it.

    Attributes:
        digit_ids: [modulus] id of each digit.
        state_ids: [modulus] id of each answer; may be `digit_ids`.
        query_id: id that asks.
        gap: digits from one query to the next; an answer needs its own gap and the state before it.
        num_tokens: length of a row; as long as there is room where None.
    """

    digit_ids: Ids
    state_ids: Ids
    query_id: int
    gap: int = 8
    num_tokens: int | None = None
    name: str = "relay"

    def __post_init__(self) -> None:
        """Refuse rows without digits.

        Raises:
            UserError: a number is out of range.
        """
        if len(self.digit_ids) < 2 or len(self.digit_ids) != len(self.state_ids) or self.gap < 1:
            raise UserError("a relay needs as many answers as digits, at least 2, and a gap of at least 1 digit")

    def make(self, draws: Draws, room: int) -> Sample | None:
        """Return a row; None where `room` has no place for one query."""
        total = room if self.num_tokens is None else self.num_tokens
        if not self.gap + 1 <= total <= room:
            return None
        modulus = len(self.digit_ids)
        digits = draws.integers(modulus, total)
        queries = np.arange(self.gap, total, self.gap + 1)
        digits[queries] = 0
        states = np.cumsum(digits)[queries] % modulus
        token_ids = self.digit_ids[digits].astype(np.int64)
        token_ids[queries] = self.query_id
        labels = np.full(total, IGNORE, dtype=np.int64)
        labels[queries] = self.state_ids[states]
        answers = tuple(Answer(query, 1, None) for query in queries.tolist())
        return Sample(token_ids=token_ids, labels=labels, kind=self.name, answers=answers)
