"""The arena: copies side by side in large chunks, as matrices are laid out for kernels."""

import gc

import pytest
import torch

from headrace.kernels.native.arena import Arena
from headrace.kernels.native.tiles import stored, tile_bf16, tile_fp4, tile_fp8

CHUNK = 64 << 20


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_copy_holds_the_values_of_any_layout_contiguously(dtype: torch.dtype) -> None:
    arena, values = Arena(), torch.arange(5 * 7 * 3).view(5, 7, 3).to(dtype)
    for tensor in (values, values.transpose(0, 2), values[1:4, ::2], values[:0], values[2, 3, 1]):
        copied = arena.copy(tensor)
        assert copied.dtype == dtype
        assert copied.shape == tensor.shape
        assert copied.is_contiguous()
        assert torch.equal(copied, tensor)
        assert copied.data_ptr() % 64 == 0


def test_copies_stand_side_by_side_and_none_covers_another() -> None:
    arena = Arena()
    copies = [arena.copy(torch.full((size,), size % 251, dtype=torch.uint8)) for size in (1, 63, 64, 65, 4096, 100)]
    first = copies[0].data_ptr()
    assert [copied.data_ptr() - first for copied in copies] == [0, 64, 128, 192, 320, 4416]
    assert all(bool((copied == copied.numel() % 251).all()) for copied in copies)


def test_what_does_not_fit_gets_a_chunk_of_its_own_and_the_old_one_stands() -> None:
    arena = Arena()
    small = arena.copy(torch.arange(100))
    large = arena.copy(torch.zeros(CHUNK + 5, dtype=torch.uint8))
    later = arena.copy(torch.arange(7))
    assert large.numel() == CHUNK + 5
    assert torch.equal(small, torch.arange(100))
    assert torch.equal(later, torch.arange(7))


def test_a_chunk_stands_as_long_as_any_copy_in_it() -> None:
    arena = Arena()
    copies = [arena.copy(torch.full((1 << 20,), value, dtype=torch.uint8)) for value in (1, 2)]
    del arena, copies[0]
    gc.collect()
    others = [torch.zeros(CHUNK, dtype=torch.uint8) for _ in range(3)]  # what could take freed memory
    assert bool((copies[0] == 2).all())
    del others


def test_matrices_in_an_arena_are_the_same_matrices() -> None:
    arena, codes = Arena(), torch.randint(0, 127, (40, 64), dtype=torch.uint8)
    fp4_scales, fp8_scales = (torch.randint(100, 130, shape, dtype=torch.uint8) for shape in ((40, 4), (2, 2)))
    values = torch.randn(40, 64).bfloat16()
    pairs = [
        (tile_fp4(codes, fp4_scales), tile_fp4(codes, fp4_scales, arena)),
        (tile_fp8(codes, fp8_scales), tile_fp8(codes, fp8_scales, arena)),
        (tile_bf16(values), tile_bf16(values, arena)),
    ]
    for plain, placed in pairs:
        assert placed.tiles.is_contiguous()
        assert torch.equal(plain.tiles, placed.tiles)
        for a, b in zip(stored(plain), stored(placed), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
