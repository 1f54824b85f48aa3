"""A directory of segments to write to, break and open again, with a file layer that fails when told."""

import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from headrace.cache.tiers.disk_tier import DiskTier, Item
from headrace.cache.tiers.files import Files
from headrace.cache.tiers.segment import Kind
from headrace.cache.tiers.store import StoreOptions

NAMESPACE = {"weights": "some", "format": "1"}
PAYLOAD = 1500


class FaultyFiles(Files):
    """Real files; an operation named in `errors` fails with that number, after `grace` calls of it that do not."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.grace: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.free: int | None = None

    def _check(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.errors:
            if self.grace[name] == 0:
                raise OSError(self.errors[name], os.strerror(self.errors[name]))
            self.grace[name] -= 1

    def create(self, path: Path) -> int:
        self._check("create")
        return super().create(path)

    def open_or_create(self, path: Path) -> int:
        self._check("create")
        return super().open_or_create(path)

    def open(self, path: Path, *, is_writable: bool = False) -> int:
        self._check("create" if is_writable else "open")
        return super().open(path, is_writable=is_writable)

    def read(self, descriptor: int, count: int, offset: int) -> bytes:
        self._check("read")
        return super().read(descriptor, count, offset)

    def write(self, descriptor: int, content: bytes, offset: int) -> None:
        try:
            self._check("write")
        except OSError:
            super().write(descriptor, content[: len(content) // 2], offset)  # a disk that fills up takes a part
            raise
        super().write(descriptor, content, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        self._check("truncate")
        super().truncate(descriptor, size)

    def free_bytes(self, folder: Path) -> int:
        return super().free_bytes(folder) if self.free is None else self.free


def key(place: int, chain: str = "a") -> bytes:
    """The key of a block of a chain; place 0 is its root."""
    return hashlib.blake2b(f"{chain} {place}".encode(), digest_size=16).digest()


def payload(place: int, chain: str = "a", size: int = PAYLOAD) -> bytes:
    """What this block must hold, and no other does."""
    return hashlib.shake_256(key(place, chain)).digest(size)


def item(place: int, chain: str = "a", content: bytes | None = None, *, is_approximate: bool = False) -> Item:
    return Item(
        key=key(place, chain),
        parent=key(place - 1, chain),
        kind=Kind.BLOCK,
        is_approximate=is_approximate,
        num_tokens=128 * place,
        tokens=128,
        payload=payload(place, chain) if content is None else content,
    )


@dataclass
class Directory:
    """A directory and who opens it."""

    folder: Path
    files: FaultyFiles = field(default_factory=FaultyFiles)
    max_bytes: int = 1 << 30
    min_free: int = 0
    segment_bytes: int = 20_000
    namespace: dict[str, str] = field(default_factory=lambda: dict(NAMESPACE))

    def open(self) -> DiskTier:
        options = StoreOptions(max_bytes=self.max_bytes, min_free=self.min_free, segment_bytes=self.segment_bytes)
        return DiskTier(self.folder, self.namespace, options, files=self.files)

    def fill(self, count: int, chain: str = "a") -> None:
        """Write a chain of blocks and close."""
        tier = self.open()
        put(tier, range(1, count + 1), chain)
        tier.close()

    @property
    def segments(self) -> list[Path]:
        return sorted(self.folder.glob("*.segment"))

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())


def put(tier: DiskTier, places: range, chain: str = "a") -> None:
    for place in places:
        assert tier.put(item(place, chain))
    assert tier.flush()


def readable(tier: DiskTier, count: int, chain: str = "a", *, is_approximate: bool = False) -> list[int]:
    """Which blocks of a chain come back; each that does is the right one."""
    found = tier.find([key(place, chain) for place in range(1, count + 1)])
    good = []
    for place in range(1, count + 1):
        if key(place, chain) in found:
            content = tier.load(key(place, chain), found[key(place, chain)], is_approximate=is_approximate)
            if content is not None:
                assert content == payload(place, chain)
                good.append(place)
    return good
