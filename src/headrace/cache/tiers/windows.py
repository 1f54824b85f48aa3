"""Window state on disk: which rows are written, how they are stored, and what a prompt can begin from.

Entries of blocks do not say what an encoder layer's window holds. Three policies, as for the windows of the previous
generation: write the rows of every token and never encode again; write the rows that one place needs every p tokens and
encode at most p tokens again; write nothing.
Source: deepseek-v4.md section 12.5.
"""

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from headrace.cache.block_pool import BLOCK_TOKENS
from headrace.cache.snapshot import Snapshot
from headrace.cache.tiers.segment import KEY_BYTES, Damaged

PolicyName = Literal["none", "periodic", "full"]
_HEAD = struct.Struct("<QQQIIII")


def window_key(block_key: bytes) -> bytes:
    """Return the key of the window rows that end where a block ends."""
    return hashlib.blake2b(block_key, digest_size=KEY_BYTES, person=b"window rows").digest()


@dataclass(frozen=True)
class Cut:
    """Rows `first` .. `end` - 1 of a snapshot, to be written; `end` is where a block ends."""

    first: int
    end: int


class WindowPolicy(ABC):
    """Decides what is written. Pure: a function of what is held and of what was written before."""

    name: PolicyName

    @abstractmethod
    def due(self, oldest: int, num_tokens: int, written: int, window: int) -> list[Cut]:
        """Return the rows to write of a sequence that holds window rows `oldest` .. `num_tokens` - 1.

        Args:
            oldest: first row that is held.
            num_tokens: tokens of the sequence.
            written: tokens up to which its windows were written before.
            window: W.
        """

    @abstractmethod
    def recomputed(self, num_tokens: int, window: int, layers: int) -> int:
        """Return how many tokens must be encoded again, at most, to go on after `num_tokens` whole-block tokens."""


class NoWindows(WindowPolicy):
    """Write nothing; a window in every layer needs as many tokens again as all layers together look back."""

    name: PolicyName = "none"

    def due(self, oldest: int, num_tokens: int, written: int, window: int) -> list[Cut]:  # noqa: ARG002, D102
        return []

    def recomputed(self, num_tokens: int, window: int, layers: int) -> int:  # noqa: D102
        return min(num_tokens, window * layers)


class PeriodicWindows(WindowPolicy):
    """Write what one place needs, the rows that are held, every `every` tokens."""

    name: PolicyName = "periodic"

    def __init__(self, every: int) -> None:
        self.every = every

    def due(self, oldest: int, num_tokens: int, written: int, window: int) -> list[Cut]:  # noqa: D102
        end = num_tokens - num_tokens % BLOCK_TOKENS
        return [Cut(oldest, end)] if end - written >= self.every and _serves(oldest, end, window) else []

    def recomputed(self, num_tokens: int, window: int, layers: int) -> int:  # noqa: ARG002, D102
        return num_tokens % self.every


class FullWindows(WindowPolicy):
    """Write the rows of every token, block by block."""

    name: PolicyName = "full"

    def due(self, oldest: int, num_tokens: int, written: int, window: int) -> list[Cut]:  # noqa: D102
        ends = range(written - written % BLOCK_TOKENS + BLOCK_TOKENS, num_tokens + 1, BLOCK_TOKENS)
        cuts = [Cut(max(oldest, end - BLOCK_TOKENS), end) for end in ends]
        return [cut for cut in cuts if _serves(cut.first, cut.end, window)]

    def recomputed(self, num_tokens: int, window: int, layers: int) -> int:  # noqa: ARG002, D102
        return 0


def _serves(first: int, end: int, window: int) -> bool:
    """Return whether rows from `first` on are all that a window at `end` has."""
    return first <= max(0, end - window + 1) and first < end


def policy_of(name: PolicyName, every: int) -> WindowPolicy:
    """Return a policy by its name."""
    return {"none": NoWindows(), "periodic": PeriodicWindows(every), "full": FullWindows()}[name]


def pack_rows(snapshot: Snapshot, cut: Cut) -> bytes:
    """Return the bytes of some rows of a snapshot."""
    low, high = cut.first - snapshot.oldest, cut.end - snapshot.oldest
    codes, scales = snapshot.codes[:, low:high].contiguous(), snapshot.scales[:, low:high].contiguous()
    head = _HEAD.pack(
        cut.end,
        cut.first,
        snapshot.encoder_floor,
        snapshot.window,
        codes.shape[0],
        codes.shape[2],
        scales.shape[2],
    )
    return head + codes.numpy().tobytes() + scales.numpy().tobytes()


def unpack_rows(payload: bytes) -> Snapshot:
    """Return rows that `pack_rows` packed, as a snapshot at their end.

    Raises:
        Damaged: the payload is of another form.
    """
    if len(payload) < _HEAD.size:
        raise Damaged("window rows are cut off")
    end, first, floor, window, layers, code_bytes, scale_bytes = _HEAD.unpack_from(payload)
    rows = end - first
    if rows <= 0 or len(payload) != _HEAD.size + layers * rows * (code_bytes + scale_bytes):
        raise Damaged("window rows are of another form")
    body = torch.frombuffer(bytearray(payload[_HEAD.size :]), dtype=torch.uint8)
    codes, scales = body.split([layers * rows * code_bytes, layers * rows * scale_bytes])
    return Snapshot(
        end, first, window, floor, codes.view(layers, rows, code_bytes), scales.view(layers, rows, scale_bytes)
    )


def join_rows(earlier: Snapshot, later: Snapshot) -> Snapshot:
    """Return the rows of two snapshots of one sequence, of which the second begins where the first ends."""
    return Snapshot(
        later.num_tokens,
        earlier.oldest,
        later.window,
        later.encoder_floor,
        torch.cat([earlier.codes, later.codes], 1),
        torch.cat([earlier.scales, later.scales], 1),
    )


def best_window(
    ends: Iterable[int], target: int, window: int, step: int, load: Callable[[int], Snapshot | None]
) -> tuple[Snapshot, int] | None:
    """Return the windows that let a prompt begin latest, at most at `target`, and that row; None if none do.

    Args:
        ends: lengths at which rows are stored, whole blocks that the prompt begins with.
        target: the best first row.
        window: W.
        step: every first row is a multiple of it.
        load: reads the rows that end there; None if they cannot be trusted.
    """
    known = sorted(set(ends))
    ahead = [end for end in known if target <= end <= target + window]
    for end in [*ahead, *reversed([end for end in known if end < target])]:
        row = min(target, end)
        row -= row % step
        if row <= 0:
            return None
        rows = load(end)
        while rows is not None and not rows.covers(row) and rows.oldest in known:
            earlier = load(rows.oldest)
            if earlier is None:
                break
            rows = join_rows(earlier, rows)
        if rows is not None and rows.covers(row):
            return rows, row
    return None
