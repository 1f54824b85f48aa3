"""Outputs that operations write again at every step, so that decoding a token allocates nothing for its layers.

The operations of all layers that play one part share a room. What a room hands out holds until an operation that shares
it runs again with as many rows: within a layer for most, never beyond a pass. Outputs of many rows are made anew.
"""

from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

Output = TypeVar("Output")

_MOST_ROWS: Final = 64
_KEPT: Final = 8  # times as many rows are kept in all outputs of one room together


class Room(Generic[Output]):
    """Outputs of one part by their number of rows, kept where these are at most `most_rows`; `make` makes one."""

    def __init__(self, make: Callable[[int], Output], most_rows: int = _MOST_ROWS) -> None:
        self._make, self._most_rows = make, most_rows
        self._outputs: dict[int, Output] = {}

    def of(self, rows: int) -> Output:
        """Return the output for so many rows; its content is what was last written to it."""
        found = self._outputs.get(rows)
        if found is None:
            found = self._make(rows)
            if rows <= self._most_rows:
                if sum(self._outputs) + rows > _KEPT * self._most_rows:
                    self._outputs.clear()
                self._outputs[rows] = found
        return found


class Rooms:
    """The rooms of one model, by the part that their outputs play; with `most_rows` 0 every output is a new one."""

    def __init__(self, most_rows: int = _MOST_ROWS) -> None:
        self._most_rows = most_rows
        self._rooms: dict[Hashable, Room[Any]] = {}
        self._shared: dict[str, Any] = {}

    def tensor(self, part: Hashable, width: int, dtype: torch.dtype) -> Room[Tensor]:
        """Return the room of tensors [rows, width] that play a part."""
        return self.room((part, width, dtype), lambda rows: torch.empty((rows, width), dtype=dtype))

    def room(self, key: Hashable, make: Callable[[int], Output], scale: int = 1) -> Room[Output]:
        """Return the room that has a key, a new one where there is none; it keeps `scale` times as many rows."""
        if key not in self._rooms:
            self._rooms[key] = Room(make, scale * self._most_rows)
        return self._rooms[key]

    def shared(self, name: str, make: Callable[[], Output]) -> Output:
        """Return what the operations of all layers share under a name."""
        if name not in self._shared:
            self._shared[name] = make()
        found: Output = self._shared[name]
        return found
