"""Blocks in host memory after they had to leave the device, until there is no room for them."""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock


class HostTier:
    """Payloads by key, at most `budget` bytes, the least recently used gone first. Any thread may call it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self.stored = self.hits = self.evicted = 0
        self._lock = Lock()
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    @property
    def count(self) -> int:
        """Blocks kept."""
        return len(self._kept)

    def put(self, key: bytes, payload: bytes) -> bool:
        """Keep a payload; return whether it is kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return True
            if len(payload) > self.budget:
                return False
            while self.nbytes + len(payload) > self.budget:
                _, gone = self._kept.popitem(last=False)
                self.nbytes -= len(gone)
                self.evicted += 1
            self._kept[key] = payload
            self.nbytes += len(payload)
            self.stored += 1
        return True

    def find(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of the keys that are here."""
        with self._lock:
            return {key for key in keys if key in self._kept}

    def get(self, key: bytes) -> bytes | None:
        """Return a payload, None if it is not here (any more)."""
        with self._lock:
            payload = self._kept.get(key)
            if payload is not None:
                self._kept.move_to_end(key)
                self.hits += 1
            return payload

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that keys, those nearer to the root first, were used: the last of them goes first."""
        with self._lock:
            for key in reversed(keys):
                if key in self._kept:
                    self._kept.move_to_end(key)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self.nbytes = 0
