"""Matrices in the layout that kernels read: tiles of 16 output columns, stored bits only moved.

A tile holds 16 rows of the stored matrix [N, K] (rows beyond N are zero). Within it, bytes run along K:

    FP4   [K / 8, 16 rows, 4 bytes]           scales [tiles, K / 32, 16 rows]
    FP8   [K / 4, 4 x (2 x (4 rows, 2 bytes))]  scales [ceil(N / 32), K / 32] as stored
    BF16  [K / 2, 16 rows, 2 values]

The odd order of FP8 is the one in which interleaving two registers of table look-ups gives neighbouring columns. Tiles
and scales lie in an arena where one is given.
"""

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels.native.arena import Arena

TILE = 16
GROUP = 32
FP4, FP8, BF16 = range(3)
_NAMES = ("FP4", "FP8", "BF16")


class CMatrix(ctypes.Structure):
    """What a kernel sees of a matrix."""

    _fields_ = [(name, ctypes.c_int64) for name in ("tiles", "scales", "rows", "width", "kind")]


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, width] in tiles: `tiles` uint8, `scales` uint8 or None."""

    kind: int
    rows: int
    width: int
    tiles: Tensor
    scales: Tensor | None
    seen: CMatrix = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Make what the kernels see of it."""
        scales = 0 if self.scales is None else self.scales.data_ptr()
        object.__setattr__(self, "seen", CMatrix(self.tiles.data_ptr(), scales, self.rows, self.width, self.kind))

    @property
    def address(self) -> int:
        """Where the kernels' view lies."""
        return ctypes.addressof(self.seen)

    @property
    def nbytes(self) -> int:
        """Bytes of tiles and scales."""
        return self.tiles.numel() + (0 if self.scales is None else self.scales.numel())


def _check(width: int, kind: int) -> None:
    if width % GROUP:
        raise InternalError(f"a {_NAMES[kind]} matrix of width {width} was tiled; multiples of {GROUP} are possible")


def _padded(rows_NB: Tensor) -> Tensor:
    missing = -rows_NB.shape[0] % TILE
    if not missing:
        return rows_NB
    return torch.cat([rows_NB, rows_NB.new_zeros((missing, *rows_NB.shape[1:]))])


def _laid_out(tensor: Tensor, arena: Arena | None) -> Tensor:
    return tensor.contiguous() if arena is None else arena.copy(tensor)


def tile_fp4(packed: Tensor, scales: Tensor, arena: Arena | None = None) -> Matrix:
    """Tile an FP4 matrix: packed codes uint8 [N, K / 2], E8M0 bytes [N, K / 32]."""
    rows, width = packed.shape[0], 2 * packed.shape[1]
    _check(width, FP4)
    tiles = _padded(packed).view(-1, TILE, width // 8, 4).transpose(1, 2)
    factors = _padded(scales).view(-1, TILE, width // GROUP).transpose(1, 2)
    return Matrix(FP4, rows, width, _laid_out(tiles, arena), _laid_out(factors, arena))


def tile_fp8(codes: Tensor, scales: Tensor, arena: Arena | None = None) -> Matrix:
    """Tile an FP8 matrix: codes uint8 [N, K], E8M0 bytes of 32 x 32 blocks [ceil(N / 32), K / 32]."""
    rows, width = codes.shape
    _check(width, FP8)
    # [tiles, 4, 4 rows, K / 4, 2, 2 bytes] to [tiles, K / 4, 4, 2, 4 rows, 2 bytes]
    split = _padded(codes).view(-1, 4, 4, width // 4, 2, 2)
    tiles = split.permute(0, 3, 1, 4, 2, 5)
    return Matrix(FP8, rows, width, _laid_out(tiles, arena), _laid_out(scales, arena))


def tile_bf16(values: Tensor, arena: Arena | None = None) -> Matrix:
    """Tile a bfloat16 matrix [N, K]."""
    rows, width = values.shape
    _check(width, BF16)
    raw = _padded(values.contiguous().view(torch.uint8).view(rows, width // 2, 4))
    return Matrix(BF16, rows, width, _laid_out(raw.view(-1, TILE, width // 2, 4).transpose(1, 2), arena), None)


def rows_from(matrix: Matrix, low: int) -> Matrix:
    """Return the rows from `low` on, a multiple of 32, of a matrix; the same memory.

    Raises:
        InternalError: the rows do not begin where a block of scales does.
    """
    if low % GROUP:
        raise InternalError(f"rows from {low} on were taken of a tiled matrix; multiples of {GROUP} are possible")
    scales, step = matrix.scales, GROUP if matrix.kind == FP8 else TILE
    return Matrix(
        matrix.kind,
        matrix.rows - low,
        matrix.width,
        matrix.tiles[low // TILE :],
        None if scales is None else scales[low // step :],
    )


def stored(matrix: Matrix) -> tuple[Tensor, Tensor | None]:
    """Return the bytes as a checkpoint has them: codes (or bfloat16 values) [N, ...] and scales."""
    rows, width = matrix.rows, matrix.width
    if matrix.kind == FP4:
        packed = matrix.tiles.transpose(1, 2).reshape(-1, width // 2)[:rows]
        scales = None if matrix.scales is None else matrix.scales.transpose(1, 2).reshape(-1, width // GROUP)[:rows]
        return packed.contiguous(), scales
    if matrix.kind == FP8:
        return matrix.tiles.permute(0, 2, 4, 1, 3, 5).reshape(-1, width)[:rows].contiguous(), matrix.scales
    raw = matrix.tiles.transpose(1, 2).reshape(-1, 2 * width)[:rows].contiguous()
    return raw.view(torch.bfloat16), None
