"""The snapshots that are kept, within a budget of bytes."""

from dataclasses import dataclass

from headrace.cache.snapshot import Snapshot


@dataclass(eq=False)
class Shelved:
    """A kept snapshot: whether it lies inside a prompt, when it was last used, and how many matches hold it."""

    snapshot: Snapshot
    is_interior: bool
    last_used: int
    pins: int = 0
    is_dropped: bool = False


Home = dict[int, Shelved]
"""Snapshots of one place by their number of tokens."""


class SnapshotShelf:
    """Keeps snapshots in at most `budget` bytes.

    To make room, those inside prompts go first, the least recently used before others; then those at an end. A new one
    from inside a prompt drives out only its like. One that a match holds stays.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._homes: dict[Shelved, Home] = {}

    @property
    def count(self) -> int:
        """Snapshots kept."""
        return len(self._homes)

    def add(self, home: Home, snapshot: Snapshot, now: int, *, is_interior: bool) -> bool:
        """Keep a snapshot at `home` if there can be room for it; say whether it, or its equal, is kept."""
        old = home.get(snapshot.num_tokens)
        if old is not None:
            old.last_used = now
            old.is_interior &= is_interior
            if old.snapshot.lowest <= snapshot.lowest:
                return True
            self.drop(old)
        victims = [
            one
            for one in sorted(self._homes, key=lambda one: (not one.is_interior, one.last_used))
            if one.pins == 0 and (one.is_interior or not is_interior)
        ]
        missing = self.nbytes + snapshot.nbytes - self.budget
        if missing > sum(one.snapshot.nbytes for one in victims):
            return False
        for one in victims:
            if missing <= 0:
                break
            missing -= one.snapshot.nbytes
            self.drop(one)
        shelved = Shelved(snapshot, is_interior, now)
        home[snapshot.num_tokens] = shelved
        self._homes[shelved] = home
        self.nbytes += snapshot.nbytes
        return True

    def move(self, source: Home, target: Home) -> None:
        """Let another place have the snapshots of `source`, but for those it has already."""
        for num_tokens, shelved in list(source.items()):
            if num_tokens in target:
                self.drop(shelved)
            else:
                del source[num_tokens]
                target[num_tokens] = shelved
                self._homes[shelved] = target

    def drop(self, shelved: Shelved) -> None:
        """Let go of a snapshot; its bytes count until no match holds it."""
        del self._homes.pop(shelved)[shelved.snapshot.num_tokens]
        shelved.is_dropped = True
        if shelved.pins == 0:
            self.nbytes -= shelved.snapshot.nbytes

    def pin(self, shelved: Shelved) -> None:
        """Hold a snapshot."""
        shelved.pins += 1

    def unpin(self, shelved: Shelved) -> None:
        """Hold it no longer."""
        shelved.pins -= 1
        if shelved.pins == 0 and shelved.is_dropped:
            self.nbytes -= shelved.snapshot.nbytes
