"""Memory of its own goes back to the system; small pieces come from the allocator."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from headrace.core.fresh_memory import fresh_memory

PIECE = 48 << 10


@pytest.mark.parametrize("in_large_pages", [False, True])
@pytest.mark.parametrize("size", [0, 1, 16383, 16384, PIECE + 1])
def test_it_holds_so_many_bytes_that_can_be_written(size: int, in_large_pages: bool) -> None:
    memory = fresh_memory(size, in_large_pages=in_large_pages)
    assert memory.dtype == torch.uint8
    assert memory.shape == (size,)
    memory.fill_(7)
    assert bool((memory == 7).all())


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is read from /proc")
def test_every_other_piece_that_is_let_go_goes_back_to_the_system() -> None:
    pieces = [fresh_memory(PIECE).fill_(index % 251) for index in range(800)]
    whole = resident()
    kept = pieces[::2]
    del pieces
    gc.collect()
    assert whole - resident() > 350 * PIECE
    assert all(bool((piece == 2 * place % 251).all()) for place, piece in enumerate(kept))


def resident() -> int:
    line = next(part for part in Path("/proc/self/status").read_text().splitlines() if part.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
