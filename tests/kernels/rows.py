"""Compares rows computed together with the same rows computed apart, to the last bit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

TOTAL = 65
COUNTS = (1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 64, 65)
FEW = {1: (1, 3, 9), 2: (1,)}  # one row, fewer than a tile, more than a tile: for large widths in the default run
THREADS = {1: COUNTS, 2: (1, 65)}  # a second thread is slow where others use the machine
FULL_THREADS = {1: COUNTS, 2: COUNTS, 3: COUNTS}

Compute = Callable[[slice], Tensor | Sequence[Tensor]]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use `count` threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return seeded normal numbers; large ones come cheap (a few different numbers, shuffled)."""
    count = torch.Size(shape).numel()
    if count < 1 << 20:
        return torch.randn(shape).to(dtype)
    few = torch.randn(1 << 14).to(dtype)
    return few[torch.randint(0, 1 << 14, (count,), dtype=torch.int32)].view(shape)


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers: -0 and +0 differ, NaN equals NaN."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _parts(result: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def differences(
    compute: Compute, counts: Mapping[int, Sequence[int]] = MappingProxyType(THREADS), total: int = TOTAL
) -> list[str]:
    """Say in which pieces rows differ from the same rows of one computation of all `total` rows with one thread.

    Args:
        compute: computes some of the rows; every result has them along its first dimension.
        counts: piece lengths for each number of threads; of each length the first and the last piece are computed, the
            short ones in the middle too.
        total: rows in all.
    """
    with threads(1):
        whole = _parts(compute(slice(0, total)))
    found = []
    for thread_count, lengths in counts.items():
        with threads(thread_count):
            for low, high in sorted({piece for count in lengths for piece in _pieces(count, total)}):
                for place, (part, all_rows) in enumerate(zip(_parts(compute(slice(low, high))), whole, strict=True)):
                    if not torch.equal(bits(part), bits(all_rows[low:high])):
                        found.append(f"result {place}, rows {low}..{high - 1}, {thread_count} threads")
    return found


def _pieces(count: int, total: int) -> set[tuple[int, int]]:
    middle = {(total // 2, total // 2 + count)} if count < 8 else set()
    return {(0, count), (total - count, total)} | middle
