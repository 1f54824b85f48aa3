import itertools
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from headrace.core.errors import UserError
from headrace.vision.span import Span, cell_grid, deduce_grid, find_spans, merge_index, span_types

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "deepseek_v41_mini" / "golden.safetensors"
TEXT = np.array([-1])
GRIDS = st.tuples(st.integers(1, 9), st.integers(1, 9))


def prompt(*cell_grids: tuple[int, int]) -> np.ndarray:
    return np.concatenate([TEXT, *[np.concatenate([span_types(grid), TEXT]) for grid in cell_grids]])


def test_golden_span_and_its_grid_are_found() -> None:
    with safe_open(GOLDEN, framework="pt") as file:
        types, patches = file.get_tensor("image.token_types").numpy()[0], file.get_tensor("image.patches")
    assert find_spans(types) == [Span(start=5, cell_grid=(2, 3))]
    assert deduce_grid(len(patches), types, 3) == ((6, 9),)


def test_span_lists_rows_of_cells_each_closed_by_a_newline() -> None:
    assert span_types((2, 3)).tolist() == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3]
    with pytest.raises(UserError, match="0 x 3 cells"):
        span_types((0, 3))


@given(st.lists(st.tuples(GRIDS, st.integers(0, 2)), max_size=4))
def test_spans_are_found_where_they_were_put(images: list[tuple[tuple[int, int], int]]) -> None:
    types, expected = [], []
    for grid, num_text in images:
        types += [-1] * num_text
        expected.append(Span(start=len(types), cell_grid=grid))
        types += span_types(grid).tolist()
    assert find_spans(np.array(types, dtype=np.int64)) == expected


@pytest.mark.parametrize(
    "types",
    [
        [0],
        [1],
        [0, 1, 2],
        [0, 3],
        [0, 2, 3],
        [0, 1, 3],
        [0, 1, 1, 2, 1, 2, 3],
        [0, 1, 2, 1, 1, 2, 3],
        [0, 1, -1, 2, 3],
        [0, 1, 2, 3, 3],
        [-1, 4],
        [0, 0, 1, 2, 3],
        [1, 1, 2, 3],
    ],
)
def test_types_that_are_no_whole_image_are_refused(types: list[int]) -> None:
    with pytest.raises(UserError, match="not a whole image"):
        find_spans(types)


@pytest.mark.parametrize("types", [[[0, 1, 2, 3]], [0.0, 1.0]])
def test_types_that_are_no_list_of_integers_are_refused(types: list) -> None:
    with pytest.raises(UserError, match="token types have shape"):
        find_spans(types)


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), max_size=3))
def test_grids_are_found_exactly_when_only_one_choice_fits(patch_grids: list[tuple[int, int]]) -> None:
    types = prompt(*[cell_grid(grid, 3) for grid in patch_grids])
    num_patches = sum(height * width for height, width in patch_grids)
    options = [
        [grid for grid in itertools.product(range(1, 10), repeat=2) if cell_grid(grid, 3) == cell_grid(one, 3)]
        for one in patch_grids
    ]
    fitting = [grids for grids in itertools.product(*options) if sum(h * w for h, w in grids) == num_patches]
    assert tuple(patch_grids) in fitting
    if len(fitting) == 1:
        assert deduce_grid(num_patches, types, 3) == tuple(patch_grids)
    else:
        with pytest.raises(UserError, match="in several ways"):
            deduce_grid(num_patches, types, 3)


def test_ambiguous_grid_names_two_choices() -> None:
    with pytest.raises(UserError, match=r"20 patches .*cells: 2x2.* \[\(4, 5\)\] or \[\(5, 4\)\]"):
        deduce_grid(20, prompt((2, 2)), 3)


@pytest.mark.parametrize(
    ("num_patches", "grids"), [(55, [(2, 3)]), (27, [(2, 3)]), (1, []), (0, [(1, 1)]), (300, [(2, 3)])]
)
def test_number_of_patches_that_fits_no_grid_is_refused(num_patches: int, grids: list) -> None:
    with pytest.raises(UserError, match=f"{num_patches} patches do not fill"):
        deduce_grid(num_patches, prompt(*grids), 3)


def test_prompt_without_images_has_no_grids() -> None:
    assert deduce_grid(0, [-1, -1], 3) == ()
    assert deduce_grid(0, [], 3) == ()


def test_many_large_images_are_deduced_without_trying_every_combination() -> None:
    # full grids are the most patches the cells can hold, so only one choice fits among 9 ** 20
    assert deduce_grid(20 * 90 * 93, prompt(*[(30, 31)] * 20), 3) == ((90, 93),) * 20


@given(GRIDS, st.integers(1, 4), st.integers(1, 3))
def test_cells_gather_the_patches_a_padded_image_shows(grid: tuple[int, int], downsample: int, channels: int) -> None:
    rows, columns = grid
    features = torch.randn(rows * columns, channels)
    index = merge_index(grid, downsample)
    image = torch.zeros(channels, *[side * downsample for side in cell_grid(grid, downsample)])
    image[:, :rows, :columns] = features.view(rows, columns, channels).permute(2, 0, 1)
    # unfold gives, per cell, channel-major vectors: channel, then row and column inside the cell
    expected = torch.nn.functional.unfold(image[None], downsample, stride=downsample)[0].T
    padded = torch.cat([features, torch.zeros(1, channels)])  # index -1 is the last row: zeros
    assert torch.equal(padded[torch.from_numpy(index)].transpose(1, 2).flatten(1), expected)
