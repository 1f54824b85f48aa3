import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.cache.window_ring import WindowRing
from headrace.core.errors import InternalError
from headrace.kernels.block_quant import decode_q8, encode_q8, fake_q8

CPU = torch.device("cpu")
WIDTH, DEPTH = 32, 8
ROWS = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
DRAFT = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()


def make() -> WindowRing:
    return WindowRing(WIDTH, DEPTH, CPU)


def stored(rows: Tensor) -> Tensor:
    return decode_q8(*encode_q8(rows))


@pytest.mark.parametrize("step", [1, 3, 7, 8, 9, 16, 30])
def test_the_newest_rows_are_held_whatever_the_pieces(step: int) -> None:
    ring = make()
    for low in range(0, 30, step):
        ring.store(low, ROWS[low : min(low + step, 30)])
    assert (ring.oldest, ring.end) == (22, 30)
    assert torch.equal(ring.read(22, 30), stored(ROWS[22:30]))
    assert torch.equal(ring.read(25, 27), stored(ROWS[25:27]))
    assert ring.read(26, 26).shape == (0, WIDTH)


def test_a_ring_that_is_not_full_starts_at_zero() -> None:
    ring = make()
    ring.store(0, ROWS[:3])
    ring.store(3, ROWS[3:3])
    assert (ring.oldest, ring.end) == (0, 3)
    assert torch.equal(ring.read(0, 3), stored(ROWS[:3]))


@pytest.mark.parametrize(("low", "high"), [(21, 30), (29, 31), (30, 31), (0, 1), (-1, 23)])
def test_rows_that_are_not_held_are_refused(low: int, high: int) -> None:
    ring = make()
    ring.store(0, ROWS[:30])
    with pytest.raises(InternalError, match=rf"window rows {low}..{high - 1} were read, 22..29 are held"):
        ring.read(low, high)


@pytest.mark.parametrize("first", [0, 4, 6])
def test_a_gap_and_an_overlap_are_refused(first: int) -> None:
    ring = make()
    ring.store(0, ROWS[:5])
    with pytest.raises(InternalError, match=f"window row {first} was stored after row 4"):
        ring.store(first, ROWS[:1])
    assert torch.equal(ring.read(0, 5), stored(ROWS[:5]))


def test_rows_taken_back_cannot_be_read() -> None:
    ring = make()
    ring.store(0, ROWS[:12])
    ring.truncate(9)
    assert (ring.oldest, ring.end) == (4, 9)
    assert torch.equal(ring.read(4, 9), stored(ROWS[4:9]))
    with pytest.raises(InternalError):
        ring.read(8, 10)
    ring.truncate(50)
    assert ring.end == 9
    ring.truncate(2)  # below everything that is held: nothing is left
    assert (ring.oldest, ring.end) == (2, 2)
    ring.store(2, ROWS[2:4])
    with pytest.raises(InternalError):
        ring.read(1, 3)


def test_restarting_forgets_everything() -> None:
    ring = make()
    ring.store(0, ROWS[:12])
    ring.restart(50)
    with pytest.raises(InternalError):
        ring.read(49, 50)
    ring.store(50, ROWS[50:53])
    assert (ring.oldest, ring.end) == (50, 53)
    assert torch.equal(ring.read(50, 53), stored(ROWS[50:53]))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=12))
def test_taking_back_and_storing_again_leaves_no_trace(steps: list[tuple[bool, int]]) -> None:
    # drafted rows are taken back at once; what is left equals a ring that never saw them
    ring, plain, lowest = make(), make(), 0
    for is_draft, count in steps:
        end = ring.end
        if is_draft:
            ring.store(end, DRAFT[end : end + count])
            ring.truncate(end)
            lowest = min(max(lowest, end + count - DEPTH), end)
        else:
            ring.store(end, ROWS[end : end + count])
            plain.store(end, ROWS[end : end + count])
    assert ring.end == plain.end
    low = max(lowest, plain.oldest)
    assert ring.oldest == low
    assert torch.equal(ring.read(low, ring.end), plain.read(low, plain.end))


def test_released_rows_take_528_bytes() -> None:
    ring = WindowRing(512, 256, CPU)
    assert ring.row_bytes == 528
    assert ring.nbytes == 256 * 528
    assert ring.nbytes == sum(b.untyped_storage().nbytes() for b in (ring._codes, ring._scales))
    assert ring._codes.dtype == ring._scales.dtype == torch.uint8


def test_rounded_rows_come_back_as_they_went_in() -> None:
    # attention uses a new row before it is stored and afterwards from the ring: both must be the same number
    for size in (1e-6, 0.01, 1.0, 1e4):
        rows = fake_q8((ROWS[:DEPTH].float() * size).bfloat16())
        ring = make()
        ring.store(0, rows)
        assert torch.equal(ring.read(0, DEPTH).view(torch.int16), rows.view(torch.int16))
