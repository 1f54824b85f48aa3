"""A sequence's tokens with chained keys: equal keys mean equal results."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.cache.block_pool import BLOCK_TOKENS
from headrace.core.errors import InternalError

_DIGEST_BYTES = 16
Marks = tuple[tuple[int, bytes], ...]
"""What changes the result besides token ids: (place in the block, content), in order of place."""


@dataclass(frozen=True)
class Piece:
    """At most 128 tokens of a chain, those of one block: `token_ids` [n] int64 and what else is in them."""

    token_ids: np.ndarray
    marks: Marks

    def common(self, other: "Piece") -> int:
        """Return how many first tokens two pieces have in common."""
        length = min(len(self.token_ids), len(other.token_ids))
        differs = np.flatnonzero(self.token_ids[:length] != other.token_ids[:length])
        count = int(differs[0]) if len(differs) else length
        places = {place for place, _ in set(self.marks) ^ set(other.marks)}
        return min([count, *places])

    def own(self) -> "Piece":
        """Return the same piece with memory of its own."""
        return Piece(self.token_ids.astype(np.int32), self.marks)

    def cut(self, count: int) -> "Piece":
        """Return the first `count` tokens."""
        return Piece(self.token_ids[:count], tuple(mark for mark in self.marks if mark[0] < count))


class Chain:
    """Tokens of one sequence and the keys of its whole blocks; grows at the end.

    key_0 = H(namespace), key_{i+1} = H(key_i, 128 token ids, marks). The namespace names everything that changes
    results and is not in the tokens (weights, formats, numerics, lineage, a tenant's salt); two namespaces never share
    a key. A mark says what a token id does not: an image's content and grid, at its first token.
    """

    def __init__(self, namespace: Mapping[str, str]) -> None:
        text = "".join(f"{len(part)}:{part}" for item in sorted(namespace.items()) for part in item)
        self._ids = np.zeros(256, dtype=np.int64)
        self._length = 0
        self._marks: dict[int, list[tuple[int, bytes]]] = {}
        self._keys = [hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES, person=b"chain root").digest()]

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._length

    @property
    def token_ids(self) -> np.ndarray:
        """All tokens so far, [N] int64; not to be changed."""
        return self._ids[: self._length]

    @property
    def keys(self) -> list[bytes]:
        """Keys after 0, 1, .. whole blocks; not to be changed."""
        return self._keys

    def append(self, token_ids: np.ndarray, marks: Mapping[int, bytes] | None = None) -> None:
        """Add tokens, [n] int, and what else is in them by position in the sequence.

        Raises:
            InternalError: a mark is not at one of these tokens.
        """
        first, count = self._length, len(token_ids)
        for position in marks or {}:
            if not first <= position < first + count:
                raise InternalError(f"a mark at token {position} came with tokens {first} to {first + count - 1}")
        if first + count > len(self._ids):
            self._ids = np.concatenate([self._ids[:first], np.zeros(first + 2 * count + 256, dtype=np.int64)])
        self._ids[first : first + count] = token_ids
        self._length += count
        for position, content in sorted((marks or {}).items()):
            self._marks.setdefault(position // BLOCK_TOKENS, []).append((position % BLOCK_TOKENS, content))
        while len(self._keys) <= self._length // BLOCK_TOKENS:
            self._keys.append(_next_key(self._keys[-1], self.piece(len(self._keys) - 1)))

    def copy(self) -> "Chain":
        """Return an independent chain of the same tokens."""
        other = Chain({})
        other._ids, other._length, other._keys = self._ids.copy(), self._length, list(self._keys)
        other._marks = {block: list(marks) for block, marks in self._marks.items()}
        return other

    def common(self, other: "Chain") -> int:
        """Return how many first tokens two chains of one namespace have in common."""
        low, high = 0, min(len(self._keys), len(other.keys)) - 1
        if self._keys[0] != other.keys[0]:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if self._keys[middle] == other.keys[middle]:
                low = middle
            else:
                high = middle - 1
        return low * BLOCK_TOKENS + self.piece(low).common(other.piece(low))

    def piece(self, block: int, end: int | None = None) -> Piece:
        """Return the tokens of block number `block`, up to token `end` of the sequence."""
        stop = min((block + 1) * BLOCK_TOKENS, self._length if end is None else end)
        piece = Piece(self._ids[block * BLOCK_TOKENS : stop], tuple(sorted(self._marks.get(block, []))))
        return piece.cut(len(piece.token_ids))


def _next_key(key: bytes, piece: Piece) -> bytes:
    digest = hashlib.blake2b(key, digest_size=_DIGEST_BYTES)
    digest.update(piece.token_ids.astype("<i8").tobytes())
    for place, content in piece.marks:
        digest.update(f"{place}:{len(content)}:".encode())
        digest.update(content)
    return digest.digest()
