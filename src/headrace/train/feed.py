"""The batches of a run in order, each with its place in the schedules; with look-ahead where routes are anticipated.

A batch's size follows from the place alone, so a batch that is fetched early is the one that would come later.
"""

from dataclasses import dataclass
from typing import Any

from headrace.core.errors import UserError
from headrace.train.anticipatory import LookAhead, RouteRecord
from headrace.train.data.packing import Batch
from headrace.train.data.stream import Stream
from headrace.train.recipe import Recipe
from headrace.train.schedule import Position


@dataclass(frozen=True, eq=False)
class Fed:
    """A batch, how far the run is before it, and the tokens of its rows."""

    batch: Batch
    position: Position
    length: int


class _Source:
    """A stream whose rows follow a recipe's schedules; the place is the stream's state and the position."""

    def __init__(self, recipe: Recipe, stream: Stream) -> None:
        self._recipe, self._stream = recipe, stream
        self._position = Position(steps=0, tokens=0)

    def next_batch(self) -> Fed:
        position = self._position
        length = int(self._recipe.sequence_length.at(position))
        shares = self._recipe.phase_at(position.steps, position.tokens).shares
        batch = self._stream.next_batch(position.steps, length, self._recipe.batch.at(position, length), shares)
        self._position = Position(steps=position.steps + 1, tokens=position.tokens + batch.num_tokens)
        return Fed(batch, position, length)

    def state(self) -> dict[str, Any]:
        return {"stream": self._stream.state(), "steps": self._position.steps, "tokens": self._position.tokens}

    def restore(self, state: Any) -> None:
        try:
            self._stream.restore(state["stream"])
            self._position = Position(steps=int(state["steps"]), tokens=int(state["tokens"]))
        except (KeyError, TypeError, ValueError) as problem:
            raise UserError(f"the resume state of the data is damaged: {problem!r}.", param="resume") from problem


class Feed:
    """Owns the place of a run in its data.

    State: the stream, and the queue where there is look-ahead.
    """

    def __init__(self, recipe: Recipe, stream: Stream) -> None:
        """Stand before the first batch.

        Raises:
            UserError: a phase names a kind of row that the mixture does not have.
        """
        for phase in recipe.phases:
            stream.check_shares(phase.shares)
        self._source = _Source(recipe, stream)
        stability = recipe.stability
        self._queue = None if stability is None else LookAhead[Fed](self._source, stability.delta)

    def next(self) -> tuple[Fed, RouteRecord | None]:
        """Return the next batch, and the experts that were chosen for it, if any were."""
        if self._queue is None:
            return self._source.next_batch(), None
        queued = self._queue.advance()
        return queued.batch, queued.routes

    def unrouted(self) -> list[tuple[int, Fed]]:
        """Return the waiting batches without experts, and their places in the queue."""
        return [] if self._queue is None else self._queue.unrouted()

    def store(self, place: int, routes: RouteRecord) -> None:
        """Keep the experts chosen for a waiting batch."""
        if self._queue is not None:
            self._queue.store(place, routes)

    def forget_routes(self) -> None:
        """Drop the experts chosen for waiting batches."""
        if self._queue is not None:
            self._queue.forget_routes()

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs: plain values, and tensors under "routes" where there is look-ahead."""
        return self._source.state() if self._queue is None else self._queue.state()

    def restore(self, state: dict[str, Any], num_experts: int) -> None:
        """Go to a place that `state` described.

        Raises:
            UserError: it is no such place.
        """
        if self._queue is None:
            self._source.restore(state)
            return
        try:
            self._queue.restore(state, num_experts)
        except (KeyError, TypeError) as problem:
            raise UserError(f"the resume state of the queue is damaged: {problem!r}.", param="resume") from problem
