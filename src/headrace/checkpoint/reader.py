"""Bring tensors from checkpoint files into memory, one at a time, or map their rows.

A tensor is read straight into the buffer it stays in, so loading a checkpoint never holds a byte twice. Mapping a whole
shard would count its pages against the process and turn a truncated file into zeros. Read `catalog.py` before.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.checkpoint.catalog import TensorEntry
from headrace.checkpoint.stream import read_into
from headrace.core.errors import CheckpointError
from headrace.core.formats import FORMATS
from headrace.core.fresh_memory import fresh_memory


def read_tensor(entry: TensorEntry) -> torch.Tensor:
    """Read one tensor into a fresh buffer.

    Returns:
        [*entry.shape] in the torch dtype of its storage format, contiguous, on the CPU. The bytes are the file's.

    Raises:
        CheckpointError: the file cannot be read or ends before the tensor does.
    """
    buffer = fresh_memory(entry.nbytes)
    read_into(entry, buffer.numpy())
    return buffer.view(FORMATS[entry.dtype].torch_dtype).view(entry.shape)


def map_rows(entry: TensorEntry) -> NDArray[np.uint8]:
    """Map a tensor's rows without reading them.

    Returns:
        [rows, bytes per row] uint8, read-only, backed by the file.

    Raises:
        CheckpointError: the tensor has no rows, or the file cannot be mapped.
    """
    if len(entry.shape) != 2 or entry.nbytes == 0:
        raise CheckpointError(
            f"tensor {entry.name} has shape {list(entry.shape)}; only a matrix can be mapped by rows."
        )
    rows = entry.shape[0]
    shape = (rows, entry.nbytes // rows)
    try:
        return np.memmap(entry.file, dtype=np.uint8, mode="r", offset=entry.offset, shape=shape)
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"cannot map tensor {entry.name} of {entry.file}: {problem}.") from None


def tensor_bytes(tensor: torch.Tensor) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of a tensor as a file holds them; a tensor on a device is copied to the CPU first."""
    yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
