"""Read the bytes of a tensor from its file, whole or in pieces of bounded size. Does not load torch."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.catalog import TensorEntry
from headrace.core.errors import CheckpointError

PIECE_BYTES = 16 * 2**20
_MAX_READ_BYTES = 2**30  # some kernels read no more than 2 GiB at once

Bytes = NDArray[np.uint8]


def read_into(entry: TensorEntry, buffer: Bytes, start: int = 0) -> None:
    """Fill a buffer with bytes of a tensor, from its byte `start` on.

    Args:
        entry: where the tensor lies.
        buffer: [n] uint8, contiguous, writable; n + `start` at most the tensor's size.
        start: first byte of the tensor to read.

    Raises:
        CheckpointError: the file cannot be read or ends before the tensor does.
    """
    view = buffer.data
    done = 0
    try:
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.offset + start)
            while done < len(view):
                got = file.readinto(view[done : done + _MAX_READ_BYTES])
                if not got:
                    break
                done += got
    except OSError as problem:
        raise CheckpointError(
            f"cannot read tensor {entry.name} of {entry.file}: {problem.strerror or problem}."
        ) from None
    if done < len(view):
        raise CheckpointError(
            f"{entry.file} ended while tensor {entry.name} was read: {len(view) - done} of its {entry.nbytes} bytes "
            "are missing."
        )


def pieces(entry: TensorEntry, piece_bytes: int = PIECE_BYTES) -> Iterator[Bytes]:
    """Yield the bytes of a tensor in pieces of at most `piece_bytes`.

    A piece is valid until the next one is asked for: they share one buffer.

    Raises:
        CheckpointError: the file cannot be read or ends before the tensor does.
    """
    buffer = np.empty(min(piece_bytes, entry.nbytes), dtype=np.uint8)
    for start in range(0, entry.nbytes, piece_bytes):
        piece = buffer[: min(piece_bytes, entry.nbytes - start)]
        read_into(entry, piece, start)
        yield piece
