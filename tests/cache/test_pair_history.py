import pytest
import torch

from headrace.cache.pair_history import PairHistory
from headrace.core.errors import InternalError

CPU = torch.device("cpu")
WIDTH, DEPTH = 6, 5
VALUES = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(1))
GATES = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(2))


def make() -> PairHistory:
    return PairHistory(WIDTH, DEPTH, CPU)


def holds(history: PairHistory, position: int) -> bool:
    value, gate = history.read(position)
    assert value.shape == gate.shape == (1, WIDTH)
    return torch.equal(value[0], VALUES[position]) and torch.equal(gate[0], GATES[position])


@pytest.mark.parametrize("step", [1, 2, 4, 5, 6, 13])
def test_the_newest_tokens_are_held_whatever_the_pieces(step: int) -> None:
    history = make()
    for low in range(0, 13, step):
        rows = slice(low, min(low + step, 13))
        history.store(low, VALUES[rows], GATES[rows])
    assert (history.oldest, history.end) == (8, 13)
    assert all(holds(history, position) for position in range(8, 13))


@pytest.mark.parametrize("position", [-1, 0, 7, 13, 20])
def test_tokens_that_are_not_held_are_refused(position: int) -> None:
    history = make()
    history.store(0, VALUES[:13], GATES[:13])
    with pytest.raises(InternalError, match=rf"pair row {position} was read, rows 8..12 are held"):
        history.read(position)


@pytest.mark.parametrize("first", [0, 2, 4])
def test_a_gap_and_an_overlap_are_refused(first: int) -> None:
    history = make()
    history.store(0, VALUES[:3], GATES[:3])
    with pytest.raises(InternalError, match=f"pair row {first} was stored after row 2"):
        history.store(first, VALUES[:1], GATES[:1])


def test_no_tokens_change_nothing() -> None:
    history = make()
    history.store(0, VALUES[:3], GATES[:3])
    history.store(3, VALUES[:0], GATES[:0])
    assert history.end == 3
    assert holds(history, 2)


def test_a_window_of_tokens_can_be_taken_back() -> None:
    # depth 5 is for a window of 4: the half pair open 4 tokens ago is still here
    history = make()
    history.store(0, VALUES[:9], GATES[:9])
    history.truncate(5)
    assert holds(history, 4)
    with pytest.raises(InternalError):
        history.read(5)
    history.store(5, GATES[5:7], VALUES[5:7])  # other tokens
    history.truncate(5)
    history.store(5, VALUES[5:8], GATES[5:8])
    assert all(holds(history, position) for position in (4, 5, 6, 7))
    history.truncate(50)
    assert history.end == 8
    history.truncate(0)
    assert (history.oldest, history.end) == (0, 0)


def test_bytes_are_those_of_two_float32_vectors() -> None:
    history = PairHistory(512, 129, CPU)
    assert history.pending_bytes == 2 * 512 * 4
    assert history.nbytes == 129 * 2 * 512 * 4
    assert history._rows.dtype == torch.float32
