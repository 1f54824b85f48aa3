"""How many pool blocks each set of requests holds together."""

from collections.abc import Iterable, Mapping

from headrace.core.errors import InternalError
from headrace.engine.scheduler.request import Holders


class Holdings:
    """Blocks counted by their holders. A block that nobody holds is not in here, whether cached or free."""

    def __init__(self, counts: Mapping[Holders, int] | None = None) -> None:
        self._counts = dict(counts or {})

    def copy(self) -> "Holdings":
        """Return an independent copy."""
        return Holdings(self._counts)

    def groups(self) -> Iterable[tuple[Holders, int]]:
        """Yield holders and the number of blocks that exactly they hold."""
        return self._counts.items()

    @property
    def held(self) -> int:
        """Blocks held by anybody."""
        return sum(self._counts.values())

    def private(self, request_id: str) -> int:
        """Return the blocks that this request alone holds."""
        return self._counts.get(frozenset((request_id,)), 0)

    def add(self, request_id: str, count: int) -> None:
        """Add blocks that this request alone holds."""
        self._put(frozenset((request_id,)), count)

    def share(self, holders: Holders, request_id: str, count: int) -> None:
        """Let a request hold `count` blocks of a group too; the empty group is blocks that nobody holds yet."""
        if holders:
            self._take(holders, count)
        self._put(holders | {request_id}, count)

    def fork(self, parent: str, children: Iterable[str], kept: int) -> None:
        """Let children hold all blocks of the parent but `kept` ones that it alone holds."""
        both = frozenset(children)
        own = frozenset((parent,))
        self._take(own, kept)
        for holders in [holders for holders in self._counts if parent in holders]:
            count = self._counts[holders]
            self._take(holders, count)
            self._put(holders | both, count)
        self._put(own, kept)

    def give_back(self, request_id: str, count: int) -> None:
        """Let go of blocks that this request alone holds."""
        self._take(frozenset((request_id,)), count)

    def drop(self, request_id: str) -> int:
        """Let go of all that a request holds and return the number of blocks that nobody holds now."""
        released = self.private(request_id)
        for holders in [holders for holders in self._counts if request_id in holders]:
            count = self._counts[holders]
            self._take(holders, count)
            if len(holders) > 1:
                self._put(holders - {request_id}, count)
        return released

    def _put(self, holders: Holders, count: int) -> None:
        if count:
            self._counts[holders] = self._counts.get(holders, 0) + count

    def _take(self, holders: Holders, count: int) -> None:
        left = self._counts.get(holders, 0) - count
        if left < 0:
            raise InternalError(f"{count} blocks of {sorted(holders)} were asked for; they hold {left + count}")
        if left:
            self._counts[holders] = left
        else:
            self._counts.pop(holders, None)
