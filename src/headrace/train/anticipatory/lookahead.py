"""Batches fetched some steps before they are trained on, and the experts chosen for them meanwhile.

The queue is part of a run's state: it is saved as the place in the data before its oldest batch, and filled again from
there.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from headrace.core.errors import UserError
from headrace.train.anticipatory.routes import RouteRecord

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


class BatchSource(Protocol[B_co]):
    """Data in one order, with a place in it that can be saved. Any batch of the run follows from the place alone."""

    def next_batch(self) -> B_co:
        """Return the batch at the place and go on to the next."""

    def state(self) -> Any:
        """Return the place, as plain values."""

    def restore(self, state: Any) -> None:
        """Go to a place."""


@dataclass
class Queued(Generic[B]):
    """A batch, the place in the data before it, and the experts chosen for it so far (None: none yet)."""

    batch: B
    place: Any
    routes: RouteRecord | None = None


class LookAhead(Generic[B]):
    """The next `delta` + 1 batches of a run.

    Invariant: batches come out in the order of the source, whatever is done with routes.
    State: the queue; the place of the source, which is `delta` + 1 batches ahead.
    """

    def __init__(self, source: BatchSource[B], delta: int) -> None:
        """Fill the queue.

        Args:
            source: the data; nobody else may draw from it.
            delta: steps between choosing experts for a batch and training on it; no report gives a value.

        Raises:
            UserError: delta is below 1.
        """
        if delta < 1:
            raise UserError(f"Anticipation of {delta} steps; at least 1 is accepted.", param="delta")
        self._source, self.delta = source, delta
        self._queue: deque[Queued[B]] = deque()
        self._fill()

    def _fill(self) -> None:
        while len(self._queue) <= self.delta:
            place = self._source.state()
            self._queue.append(Queued(self._source.next_batch(), place))

    def unrouted(self) -> list[tuple[int, B]]:
        """Return the queued batches for which no experts are chosen, with their places in the queue, oldest first."""
        return [(index, queued.batch) for index, queued in enumerate(self._queue) if queued.routes is None]

    def store(self, index: int, routes: RouteRecord) -> None:
        """Keep the experts chosen for the batch at a place in the queue."""
        self._queue[index].routes = routes

    def advance(self) -> Queued[B]:
        """Take the oldest batch out and fetch a new one."""
        oldest = self._queue.popleft()
        self._fill()
        return oldest

    def forget_routes(self) -> None:
        """Drop all chosen experts, as when anticipation ends."""
        for queued in self._queue:
            queued.routes = None

    def state(self) -> dict[str, Any]:
        """Return the place before the oldest batch and the experts chosen for the queued ones."""
        return {
            "delta": self.delta,
            "place": self._queue[0].place,
            "routes": [None if queued.routes is None else queued.routes.state() for queued in self._queue],
        }

    def restore(self, state: Mapping[str, Any], num_experts: int) -> None:
        """Go back to a state: the same batches and routes come out as from there the first time.

        Args:
            state: from `state`.
            num_experts: experts of a layer, to check routes against.

        Raises:
            UserError: the state was made with another delta, or holds routes that are none.
        """
        routes = state["routes"]
        if state["delta"] != self.delta or len(routes) != self.delta + 1:
            raise UserError(
                f"The saved queue looks {state['delta']} steps ahead and this run {self.delta}; the same is accepted.",
                param="delta",
            )
        records = [None if saved is None else RouteRecord.from_state(saved, num_experts) for saved in routes]
        self._source.restore(state["place"])
        self._queue.clear()
        self._fill()
        for queued, record in zip(self._queue, records, strict=True):
            queued.routes = record
