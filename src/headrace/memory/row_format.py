"""How a row of an n-gram table is stored, which bytes are no numbers, and its exact bfloat16 values.

A row is `head_dim` E4M3 codes and one E8M0 scale for every 32 of them. Read `memory/table.py` next.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core.errors import CheckpointError, UserError
from headrace.core.formats import BLOCK, E8M0_NAN

NAN_CODE = 0x7F  # with either sign
ZERO_SCALE = 127  # of a row of zeros: any scale but 255 would do
# two neighbouring codes are looked up at once, as one 16-bit index into pairs of bfloat16 bit patterns
_PAIRS = (
    torch.arange(2**16, dtype=torch.int32)
    .to(torch.uint16)
    .view(torch.uint8)
    .view(torch.float8_e4m3fn)
    .to(torch.bfloat16)
    .view(torch.int32)
    .numpy()
)

Bytes = NDArray[np.uint8]
RowIds = NDArray[np.int64]


def dequantise(codes: Bytes, scales: Bytes, out: torch.Tensor) -> None:
    """Write rows as bfloat16.

    Args:
        codes: [n, head_dim] E4M3 bit patterns, contiguous.
        scales: [n, head_dim / 32] E8M0 bit patterns, contiguous.
        out: [n, head_dim] bfloat16, contiguous; written.

    Numerics: code times power-of-two scale, one rounding, exact unless it falls below bfloat16's subnormals.
    """
    values = torch.from_numpy(_PAIRS[codes.view(np.uint16)]).view(torch.bfloat16)
    factors = torch.from_numpy(scales).view(torch.float8_e8m0fnu).to(torch.bfloat16)
    torch.mul(values.view(*scales.shape, BLOCK), factors[..., None], out=out.view(*scales.shape, BLOCK))


def damaged_rows(codes: Bytes, scales: Bytes) -> NDArray[np.int64]:
    """Return the places of rows with a code or a scale that is no number, ascending; usually none."""
    # one pass over the bytes; 0x7F and 0xFF are the only codes that reach 0x7F once the sign is dropped
    bad_codes = (codes & NAN_CODE) == NAN_CODE
    bad_scales = scales == E8M0_NAN
    if not bad_codes.any() and not bad_scales.any():
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(bad_codes.any(axis=1) | bad_scales.any(axis=1))


def damage_error(layer_id: int, row_id: int, scales: Bytes) -> UserError:
    """Return the error about a damaged row.

    Args:
        layer_id: the layer that owns the table.
        row_id: the row.
        scales: [head_dim / 32] its scales, which say what is wrong with it.
    """
    what = "a scale byte of 255 (NaN)" if (scales == E8M0_NAN).any() else "an E4M3 NaN code"
    return UserError(f"n-gram table of layer {layer_id}: row {row_id} holds {what}; the checkpoint is damaged")


def checked_row_ids(row_ids: RowIds, layer_id: int, num_rows: int) -> RowIds:
    """Return row numbers as a flat int64 array.

    Raises:
        UserError: they are not integers, or one is outside the table.
    """
    ids = np.asarray(row_ids)
    if ids.dtype.kind not in "iu" and ids.size:
        raise UserError(f"row numbers for the n-gram table of layer {layer_id} must be integers, not {ids.dtype}")
    flat = ids.reshape(-1)
    bad = (flat < 0) | (flat >= num_rows)
    if bad.any():
        raise UserError(
            f"row {flat[bad][0]} is outside the n-gram table of layer {layer_id}; accepted are 0 to {num_rows - 1}"
        )
    return flat.astype(np.int64, copy=False)


def check_widths(layer_id: int, head_dim: int) -> None:
    """Check the width of a row.

    Raises:
        CheckpointError: it is not made of whole blocks of 32.
    """
    if head_dim == 0 or head_dim % BLOCK:
        raise CheckpointError(
            f"n-gram table of layer {layer_id}: rows are {head_dim} wide; accepted are multiples of {BLOCK}"
        )
