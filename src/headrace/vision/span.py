"""The tokens an image takes in a prompt: their types, and how patches, cells and tokens belong together.

Numpy only. An image of n x m cells is START, then per row m IMAGE tokens and one NEWLINE, then END; every position
carries the same token id, so only the types tell them apart.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.core.errors import UserError

TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3
"""Token types."""

Grid = tuple[int, int]
"""(rows, columns)."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One image in a prompt: the position of its START token and its cells."""

    start: int
    cell_grid: Grid

    @property
    def num_tokens(self) -> int:
        """Positions from START to END, both included."""
        rows, columns = self.cell_grid
        return rows * (columns + 1) + 2


def span_types(cell_grid: Grid) -> NDArray[np.int64]:
    """Return the token types of an image's span, e.g. (2, 1) gives `[0, 1, 2, 1, 2, 3]`.

    Raises:
        UserError: the grid is empty.
    """
    rows, columns = cell_grid
    if rows < 1 or columns < 1:
        raise UserError(f"an image of {rows} x {columns} cells has no tokens; accepted is at least 1 x 1")
    row = [IMAGE] * columns + [NEWLINE]
    return np.array([START, *row * rows, END], dtype=np.int64)


def find_spans(token_types: ArrayLike) -> list[Span]:
    """Find the image spans in the token types of one sequence.

    Args:
        token_types: [T] integers, -1 for text.

    Raises:
        UserError: the types do not form whole images.
    """
    types = np.asarray(token_types)
    if types.ndim != 1 or (types.size and types.dtype.kind not in "iu"):
        raise UserError(
            f"token types have shape {list(types.shape)} and type {types.dtype}; accepted is a list of integers",
            param="token_types",
        )
    spans, position = [], 0
    while position < len(types):
        if types[position] == TEXT:
            position += 1
            continue
        span = _span_at(types, position)
        spans.append(span)
        position += span.num_tokens
    return spans


def _span_at(types: NDArray[np.integer], start: int) -> Span:
    ends = np.flatnonzero(types[start:] == END)
    newlines = np.flatnonzero(types[start:] == NEWLINE)
    if ends.size and newlines.size:
        columns, body_len = int(newlines[0]) - 1, int(ends[0]) - 1
        if columns >= 1 and body_len >= columns + 1 and body_len % (columns + 1) == 0:
            span = Span(start=start, cell_grid=(body_len // (columns + 1), columns))
            if np.array_equal(types[start : start + span.num_tokens], span_types(span.cell_grid)):
                return span
    raise UserError(
        f"the token types from position {start} on are not a whole image: accepted is {START}, then rows of "
        f"equally many {IMAGE} and one {NEWLINE}, then {END}",
        param="token_types",
    )


def deduce_grid(num_patches: int, token_types: ArrayLike, downsample: int) -> tuple[Grid, ...]:
    """Find the patch grid of every image from the number of all patches and the cells of each span.

    A cell stands for up to `downsample` x `downsample` patches, so a span of 2 x 3 cells and 54 patches can only be
    6 x 9 patches; 2 x 2 cells and 20 patches could be 4 x 5 or 5 x 4 and are refused.

    Args:
        num_patches: patches of all images of the sequence together.
        token_types: [T] integers, -1 for text.
        downsample: patches along each side of a cell.

    Returns:
        (rows, columns) of patches, one per span in order.

    Raises:
        UserError: the types do not form whole images, or no grids or several different ones fit.
    """
    spans = find_spans(token_types)
    # by number of patches so far: at most two different choices of grids, enough to know whether there is one
    choices: dict[int, list[tuple[Grid, ...]]] = {0: [()]}
    for span in spans:
        rows, columns = (range((side - 1) * downsample + 1, side * downsample + 1) for side in span.cell_grid)
        longer: dict[int, list[tuple[Grid, ...]]] = {}
        for count, grids in choices.items():
            for grid in ((height, width) for height in rows for width in columns):
                total = count + grid[0] * grid[1]
                if total <= num_patches:
                    known = longer.setdefault(total, [])
                    known.extend((*before, grid) for before in grids[: 2 - len(known)])
        choices = longer
    fitting = choices.get(num_patches, [])
    cells = ", ".join("x".join(map(str, span.cell_grid)) for span in spans) or "none"
    if not fitting:
        raise UserError(f"{num_patches} patches do not fill the images of the prompt (cells: {cells})", param="patches")
    if len(fitting) > 1:
        raise UserError(
            f"{num_patches} patches fit the images of the prompt (cells: {cells}) in several ways, "
            f"e.g. {list(fitting[0])} or {list(fitting[1])}; give the patches image by image",
            param="patches",
        )
    return fitting[0]


def cell_grid(patch_grid: Grid, downsample: int) -> Grid:
    """Return the (rows, columns) of cells that cover a patch grid."""
    rows, columns = patch_grid
    return -(-rows // downsample), -(-columns // downsample)


def merge_index(patch_grid: Grid, downsample: int) -> NDArray[np.int64]:
    """Return which patches make up each cell.

    Returns:
        [cells, downsample * downsample] indices into the row-major patches; a cell's own order is row-major too; -1
        where the grid is padded at the bottom or right.
    """
    rows, columns = patch_grid
    cell_rows, cell_columns = cell_grid(patch_grid, downsample)
    index = np.full((cell_rows * downsample, cell_columns * downsample), -1, dtype=np.int64)
    index[:rows, :columns] = np.arange(rows * columns).reshape(rows, columns)
    blocks = index.reshape(cell_rows, downsample, cell_columns, downsample).transpose(0, 2, 1, 3)
    return blocks.reshape(cell_rows * cell_columns, downsample * downsample)
