"""Threads while kernels run: theirs, and PyTorch's beside them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headrace.kernels.native.library import Library


@contextmanager
def kernel_threads(library: Library | None, *, is_whole: bool) -> Iterator[None]:
    """Let kernels use as many threads as PyTorch is told to; no bit depends on it.

    Where kernels do every operation (`is_whole`), PyTorch itself takes one thread meanwhile: what is left to it is
    small, and its threads spin between two such steps. On a busy machine that made a step ten times slower.
    """
    if library is None:
        yield
        return
    count = torch.get_num_threads()
    library.use_threads(count)
    if not is_whole or count == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
