"""The snapshots that are kept, within a budget of bytes and for a limited time."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.cache.snapshot import Snapshot


@dataclass(eq=False)
class Shelved:
    """A kept snapshot.

    Attributes:
        snapshot: its rows.
        is_interior: whether it lies inside a prompt, or another one of the same conversation was taken after it.
        last_used: by the index's own count of insertions and matches; `used_s` is the same on the clock.
        pins: matches that hold it.
    """

    snapshot: Snapshot
    is_interior: bool
    last_used: int
    used_s: float
    pins: int = 0
    is_dropped: bool = False


Home = dict[int, Shelved]
"""Snapshots of one place by their number of tokens."""


class SnapshotShelf:
    """Keeps snapshots in at most `budget` bytes.

    To make room, those inside prompts go first, the least recently used before others; then those at an end. A new one
    from inside a prompt drives out only its like. One that a match holds stays. What nobody used for `ttl_s` seconds
    is let go by `expire`; None keeps it.
    """

    def __init__(self, budget: int, ttl_s: float | None = None) -> None:
        self.budget, self.ttl_s = budget, ttl_s
        self.nbytes = 0
        self.expired = 0
        self._homes: dict[Shelved, Home] = {}  # the least recently used first

    @property
    def count(self) -> int:
        """Snapshots kept."""
        return len(self._homes)

    def add(self, home: Home, snapshot: Snapshot, now: int, *, is_interior: bool) -> bool:
        """Keep a snapshot at `home` if there can be room for it; say whether it, or its equal, is kept."""
        old = home.get(snapshot.num_tokens)
        if old is not None:
            self.use(old, now)
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
        shelved = Shelved(snapshot, is_interior, now, time.monotonic())
        home[snapshot.num_tokens] = shelved
        self._homes[shelved] = home
        self.nbytes += snapshot.nbytes
        return True

    def use(self, shelved: Shelved, now: int) -> None:
        """Note that a snapshot was used."""
        shelved.last_used, shelved.used_s = now, time.monotonic()
        self._homes[shelved] = self._homes.pop(shelved)

    def supersede(self, homes: Iterable[Home], num_tokens: int) -> None:
        """Let earlier snapshots of a conversation go before others: there is one of `num_tokens` tokens now."""
        for home in homes:
            for shelved in home.values():
                shelved.is_interior |= shelved.snapshot.num_tokens < num_tokens

    def expire(self) -> None:
        """Let go of what was not used for too long."""
        if self.ttl_s is None:
            return
        oldest = time.monotonic() - self.ttl_s
        while self._homes:
            shelved = next(iter(self._homes))
            if shelved.used_s > oldest:
                return
            self.expired += 1
            self.drop(shelved)

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
