"""Log-probabilities of many tokens, kept small: a few bytes a token instead of Python objects."""

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from headrace.core.errors import InternalError
from headrace.engine.result import TokenLogprob

ENTRY_BYTES = 12
"""Token, log-probability and rank, four bytes each."""
ALTERNATIVE_BYTES = 8


class LogprobTable(Sequence[TokenLogprob]):
    """A list of `TokenLogprob` that grows at the end; every entry has equally many alternatives.

    Values are kept as float32, which is what they come from, so they come out unchanged.
    """

    def __init__(self) -> None:
        self._width: int | None = None
        self._ids, self._ranks, self._top_ids = array("i"), array("i"), array("i")
        self._values, self._top_values = array("f"), array("f")

    def extend(self, entries: Iterable[TokenLogprob]) -> None:
        """Add entries.

        Raises:
            InternalError: one has more or fewer alternatives than those before.
        """
        for entry in entries:
            if self._width is None:
                self._width = len(entry.top)
            if len(entry.top) != self._width:
                raise InternalError(f"{len(entry.top)} alternatives came after {self._width}")
            self._ids.append(entry.token_id)
            self._values.append(entry.logprob)
            self._ranks.append(entry.rank)
            self._top_ids.extend(token_id for token_id, _ in entry.top)
            self._top_values.extend(value for _, value in entry.top)

    def __len__(self) -> int:
        """Entries."""
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, place: slice) -> list[TokenLogprob]: ...
    def __getitem__(self, place: int | slice) -> TokenLogprob | list[TokenLogprob]:
        """Return one entry, or a list of some."""
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        index = place + len(self) if place < 0 else place
        if not 0 <= index < len(self):
            raise IndexError(f"entry {place} of {len(self)}")
        width = self._width or 0
        low, high = index * width, (index + 1) * width
        top = tuple(zip(self._top_ids[low:high], self._top_values[low:high], strict=True))
        return TokenLogprob(token_id=self._ids[index], logprob=self._values[index], rank=self._ranks[index], top=top)

    def __eq__(self, other: object) -> bool:
        """Compare entry by entry with another sequence."""
        return _are_equal(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Show it as the list it stands for."""
        return repr(list(self))


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """The log-probabilities of a prompt's tokens: None for the first, which nothing stands before, then a table."""

    def __init__(self, table: LogprobTable) -> None:
        self._table = table

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return 1 + len(self._table)

    @overload
    def __getitem__(self, place: int) -> TokenLogprob | None: ...
    @overload
    def __getitem__(self, place: slice) -> list[TokenLogprob | None]: ...
    def __getitem__(self, place: int | slice) -> TokenLogprob | list[TokenLogprob | None] | None:
        """Return one entry, or a list of some."""
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        index = place + len(self) if place < 0 else place
        if not 0 <= index < len(self):
            raise IndexError(f"entry {place} of {len(self)}")
        return self._table[index - 1] if index else None

    def __eq__(self, other: object) -> bool:
        """Compare entry by entry with another sequence."""
        return _are_equal(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Show it as the list it stands for."""
        return repr(list(self))


def _are_equal(mine: Sequence[object], other: object) -> bool:
    if not isinstance(other, Sequence) or isinstance(other, str | bytes):
        return NotImplemented
    return len(mine) == len(other) and all(one == its for one, its in zip(mine, other, strict=True))
