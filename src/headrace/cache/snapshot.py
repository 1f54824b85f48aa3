"""Snapshots: the encoder's window rows at one length, enough to go on from there or from shortly before."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.cache.state_shape import StateShape
from headrace.core.errors import InternalError


@dataclass(frozen=True)
class Snapshot:
    """Encoder window rows `oldest` .. `num_tokens` - 1 of a sequence, in host memory.

    `codes` uint8 [encoder layers, n, H], `scales` uint8 [encoder layers, n, H / 32]; `encoder_floor` is the state's.
    Entries are not in it: they are in blocks. Nor is a half pair: a state resumes at a multiple of every ratio. Nor
    are n-gram ids: they are recomputed from token ids. Nor is the decoder: it is replayed.
    """

    num_tokens: int
    oldest: int
    window: int
    encoder_floor: int
    codes: Tensor
    scales: Tensor

    @classmethod
    def take(cls, state: SequenceState) -> "Snapshot":
        """Copy the encoder's rows of a state between two forward passes."""
        rings = state.encoder_rings
        oldest = max((ring.oldest for ring in rings), default=state.length)
        rows = [ring.stored_rows(oldest, state.length) for ring in rings]
        empty = torch.zeros((0, 0, 0), dtype=torch.uint8)
        codes = torch.stack([codes for codes, _ in rows]).cpu() if rows else empty
        scales = torch.stack([scales for _, scales in rows]).cpu() if rows else empty
        return cls(state.length, oldest, state.shape.window, state.encoder_floor, codes, scales)

    @property
    def nbytes(self) -> int:
        """Bytes of its rows."""
        return self.codes.numel() + self.scales.numel()

    @property
    def lowest(self) -> int:
        """The first position it serves: from here on every row's window is in it."""
        if self.oldest <= self.encoder_floor:
            return self.encoder_floor
        return self.oldest + self.window - 1

    def covers(self, position: int) -> bool:
        """Say whether a sequence can go on exactly at `position`: its tokens before that must be the same."""
        return self.lowest <= position <= self.num_tokens

    def restore(self, state: SequenceState, position: int) -> None:
        """Put the rows before `position` into the encoder's rings of a state that stands there.

        Raises:
            InternalError: the snapshot does not serve that position, or the state does not stand there.
        """
        if not self.covers(position):
            raise InternalError(f"a snapshot for {self.lowest} to {self.num_tokens} tokens was restored at {position}")
        if state.length != position:
            raise InternalError(f"a snapshot was restored at {position} into a state of {state.length} tokens")
        state.encoder_floor = self.encoder_floor
        count = position - self.oldest
        for place, ring in enumerate(state.encoder_rings):
            ring.load_rows(self.oldest, self.codes[place, :count], self.scales[place, :count])


def snapshot_bytes(shape: StateShape) -> int:
    """Return the bytes of a snapshot of a long sequence; none takes more."""
    return shape.decoder_start * shape.ring_depth * (shape.head_dim + shape.head_dim // 32)
