"""Attention against a loop over rows and heads that lists the entries a query may look at, in float64."""

import math

import pytest
import torch
from torch import Tensor

from headrace.kernels import sparse_attention as sa
from headrace.kernels.sparse_attention import SelectedEntries, WindowKeys, attend, attend_block
from tests.kernels.number_formats import is_rounded_once, same_bits

# A weight close to the middle of two bfloat16 numbers may round to the other one than in float64. One weight that does
# moves the value by at most 2**-8 of its share; few do, and a rounding that is left out altogether shows elsewhere.
FLIPPED_WEIGHT = 2.0**-8
FLOAT32_NOISE = 3e-6


class Case:
    """Random queries, window entries and picks of positions `first` to `first + rows` - 1."""

    def __init__(
        self, rows: int, first: int, *, heads: int = 3, width: int = 32, window: int = 8, floor: int = 0
    ) -> None:
        self.first, self.window, self.floor, self.rows = first, window, floor, rows
        self.scale = width**-0.5
        self.low = max(floor, first - window + 1)
        self.q = (torch.randn(rows, heads, width) * 2).bfloat16()
        self.entries = (torch.randn(first + rows - self.low, width) * 2).bfloat16()
        self.store = (torch.randn(40, width) * 2).bfloat16()
        self.sink = torch.randn(heads)

    def pick(self, slots: int) -> Tensor:
        """Return ascending picks with a different number of empty slots in every row."""
        picked = torch.full((self.rows, slots), -1)
        for row in range(self.rows):
            count = row % (slots + 1)
            picked[row, :count] = torch.randperm(40)[:count].sort().values
        return picked

    def selected(self, picked: Tensor | None) -> SelectedEntries | None:
        if picked is None:
            return None
        return SelectedEntries(picked, lambda rows_RK: self.store[rows_RK.clamp_min(0)])

    def run(self, picked: Tensor | None = None, low: int = 0, high: int | None = None, extra: int = 0) -> Tensor:
        """Attend from rows `low` to `high`, giving `extra` entries that no row needs."""
        high = self.rows if high is None else high
        start = self.first + low
        begin = max(self.low, start - self.window + 1 - extra)
        keys = WindowKeys(self.entries[begin - self.low : self.first + high - self.low], begin, self.floor)
        picks = None if picked is None else picked[low:high]
        return attend(
            self.q[low:high], start, keys, self.selected(picks), self.sink, window=self.window, scale=self.scale
        )

    def visible(self, row: int, picked: Tensor | None) -> Tensor:
        """List the entries of one row: window positions from the oldest on, then picks."""
        position = self.first + row
        positions = range(max(self.floor, position - self.window + 1), position + 1)
        window = [self.entries[p - self.low] for p in positions]
        picks = [] if picked is None else [self.store[e] for e in picked[row].tolist() if e >= 0]
        return torch.stack(window + picks) if window + picks else self.entries[:0]

    def check(self, picked: Tensor | None = None, got: Tensor | None = None) -> None:
        got = self.run(picked) if got is None else got
        assert got.dtype == torch.bfloat16
        for row in range(self.rows):
            entries = self.visible(row, picked).double()
            for head in range(self.q.shape[1]):
                want, slack = by_hand(self.q[row, head].double(), entries, float(self.sink[head]), self.scale)
                assert is_rounded_once(got[row, head], want, slack), (row, head)


def by_hand(q: Tensor, entries: Tensor, sink: float, scale: float) -> tuple[Tensor, Tensor]:
    """Return value and slack of one query: softmax with a sink, weights rounded to bfloat16 before the values."""
    scores = entries @ q * scale
    peak = max(scores.tolist(), default=sink)
    weights = [math.exp(score - peak) for score in scores.tolist()]
    total = sum(weights) + math.exp(min(sink - peak, 700.0))
    rounded = torch.tensor(weights, dtype=torch.float64).bfloat16().double()
    value = (rounded[:, None] * entries).sum(0) / total
    size = (rounded[:, None] * entries.abs()).sum(0) / total
    middle = (torch.tensor(weights, dtype=torch.float64) - rounded).abs() * 2**9 / rounded.clamp(min=1e-300)
    flips = (middle - 1).abs() < 0.05  # weights near the middle of two bfloat16 numbers
    may_flip = (rounded[:, None] * entries.abs() * flips[:, None]).sum(0) / total * FLIPPED_WEIGHT
    return value, FLOAT32_NOISE * size + may_flip


# ------------------------------------------------------------------------------------------------------------- window


@pytest.mark.parametrize("window", [1, 2, 8, 16, 70, 128])
@pytest.mark.parametrize("first", [0, 1, 60, 1000003])
def test_a_query_looks_at_the_last_window_of_positions(window: int, first: int) -> None:
    Case(9, first, window=window).check()


@pytest.mark.parametrize(("first", "rows"), [(0, 130), (63, 2), (64, 64), (50, 100), (127, 1), (6, 60)])
def test_tiles_of_positions_leave_no_seam(first: int, rows: int) -> None:
    Case(rows, first, heads=2).check()


@pytest.mark.parametrize(("first", "floor"), [(37, 37), (37, 33), (64, 60), (130, 128), (200, 10)])
def test_nothing_below_the_floor_is_looked_at(first: int, floor: int) -> None:
    # a replayed decoder: its windows begin anew at the floor
    case = Case(12, first, floor=floor)
    case.check()
    if floor > first - 7:
        assert not torch.equal(case.run(), lowered(case).run())


def lowered(case: Case) -> Case:
    """Return the same case with more entries and no floor."""
    other = Case(case.rows, case.first, window=case.window)
    other.q, other.sink = case.q, case.sink
    other.entries[case.low - other.low :] = case.entries
    return other


def test_the_window_excludes_exactly_what_is_outside() -> None:
    # one-hot entries: the value lists which positions were weighed
    case = Case(1, 20, heads=1, width=32, window=8)
    case.q.zero_()
    case.entries = torch.eye(32)[12:21].bfloat16()  # positions 12 to 20
    keys = WindowKeys(case.entries, 12, 0)
    value = attend(case.q, 20, keys, None, torch.tensor([-1e9]), window=8, scale=1.0)
    assert value[0, 0].nonzero().flatten().tolist() == list(range(13, 21))
    assert value[0, 0, 13:21].tolist() == [0.125] * 8


def test_entries_that_no_query_needs_change_nothing() -> None:
    case = Case(9, 200, window=8)
    case.low = 100
    case.entries = torch.randn(109, 32).bfloat16()
    assert same_bits(case.run(extra=50), case.run())
    case.check()


# ----------------------------------------------------------------------------------------------------- global entries


@pytest.mark.parametrize("slots", [1, 3, 8, 17])
@pytest.mark.parametrize(("first", "rows", "floor"), [(0, 9, 0), (59, 12, 0), (1000003, 5, 0), (40, 9, 38)])
def test_picked_entries_join_the_window(slots: int, first: int, rows: int, floor: int) -> None:
    case = Case(rows, first, floor=floor)
    case.check(case.pick(slots))


def test_empty_slots_weigh_nothing_wherever_they_stand() -> None:
    case = Case(5, 30)
    assert torch.equal(case.run(torch.full((5, 4), -1)), case.run())
    picked = torch.tensor([[3, 9, -1, -1]]).repeat(5, 1)
    case.check(picked)
    case.store[0] = 1e30  # what an empty slot reads must have no effect
    before = case.run(picked)
    case.store[0] = -1e30
    assert same_bits(case.run(picked), before)


def test_an_entry_may_be_seen_twice() -> None:
    # a position may appear in the window and as a global entry: both count
    case = Case(1, 12, heads=1)
    case.store[5] = case.entries[-1]
    case.check(torch.tensor([[5]]))


def test_rows_gathered_a_few_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(23, 55)
    picked = case.pick(6)
    whole = case.run(picked)
    for size in (1, 6 * 32 * 4 * 3, 1 << 30):
        monkeypatch.setattr(sa, "_GATHER_BYTES", size)
        assert same_bits(case.run(picked), whole)


# --------------------------------------------------------------------------------------------------------------- sink


@pytest.mark.parametrize("sink", [0.0, 3.5, -40.0, 60.0, -1e30, 1e30, 3e38, float("-inf")])
@pytest.mark.parametrize("slots", [0, 4])
def test_the_sink_takes_weight_and_gives_no_value(sink: float, slots: int) -> None:
    case = Case(9, 5)
    case.sink = torch.tensor([sink, 0.5, -sink if math.isfinite(sink) else 1.0])
    picked = case.pick(slots) if slots else None
    got = case.run(picked)
    assert got.isfinite().all()
    if abs(sink) < 100:
        case.check(picked, got)
    elif sink > 0:
        assert not got[:, 0].any()
    else:  # as if there were none
        case.sink = torch.tensor([-300.0, 0.5, case.sink[2]])
        assert same_bits(case.run(picked)[:, 0], got[:, 0])


@pytest.mark.parametrize("sink", [0.0, 100.0, -100.0, -1e30])
@pytest.mark.parametrize("slots", [0, 3])
def test_a_query_without_any_entry_gives_zeros(sink: float, slots: int) -> None:
    # field report A15; rows 0 and 1 are below the floor, row 2 sees itself
    case = Case(3, 5)
    keys = WindowKeys(case.entries[-3:], 5, 7)
    selected = case.selected(torch.full((3, slots), -1) if slots else None)
    value = attend(case.q, 5, keys, selected, torch.full((3,), sink), window=8, scale=case.scale)
    assert not value[:2].any()
    assert value.isfinite().all()
    if sink < 50:
        assert value[2].any()


@pytest.mark.parametrize("slots", [0, 3])
def test_a_query_without_any_entry_has_a_gradient_of_zero(slots: int) -> None:
    case = Case(3, 5)
    leaves = [leaf.float().requires_grad_() for leaf in (case.q, case.entries[-3:], torch.zeros(3))]
    picked = torch.full((3, slots), -1) if slots else None
    value = attend(
        leaves[0], 5, WindowKeys(leaves[1], 5, 7), case.selected(picked), leaves[2], window=8, scale=case.scale
    )
    value.square().sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    assert gradients[0] is not None
    assert not gradients[0][:2].any()
    assert gradients[0][2].any()


def test_scores_far_apart_do_not_overflow() -> None:
    case = Case(9, 30)
    case.q *= 1000
    case.check()
    case.check(case.pick(4))


def test_weights_are_rounded_before_the_values_and_their_sum_is_not() -> None:
    # two entries, the second of value 1 in a column where the first has 0: the value is bf16(w) / (1 + w + sink)
    steps = torch.arange(1, 400) / 128
    q = torch.zeros(399, 1, 32).bfloat16()
    q[:, 0, 0] = -steps
    entries = torch.zeros(2, 32).bfloat16()
    entries[0, 0], entries[1, 1] = -1.0, 1.0  # scores: steps and 0
    close = 0
    for row in range(399):
        keys = WindowKeys(entries, 10, 0)
        query = torch.cat([torch.zeros_like(q[row : row + 1]), q[row : row + 1]])
        got = attend(query, 10, keys, None, torch.tensor([0.25]), window=2, scale=1.0)[1, 0, 1]
        peak = q[row, 0, 0].float() * -1
        weight, sink = torch.exp(-peak), torch.exp(0.25 - peak)
        want = weight.bfloat16().float() / (1.0 + weight + sink)
        assert abs(float(got) - float(want)) <= 2.0**-8 * float(want)
        close += int(got == want.bfloat16())
        other = (weight / (1.0 + weight + sink)).bfloat16()
        close -= int(got == other)
    assert close > 60  # many rows tell the two apart


# -------------------------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize(("first", "floor"), [(0, 0), (41, 0), (70, 66), (1000003, 0)])
@pytest.mark.parametrize("slots", [0, 5])
def test_any_split_of_the_rows_gives_the_same_bits(first: int, floor: int, slots: int) -> None:
    case = Case(30, first, floor=floor)
    picked = case.pick(slots) if slots else None
    whole = case.run(picked)
    for cut in range(1, 30):
        assert same_bits(torch.cat([case.run(picked, 0, cut), case.run(picked, cut)]), whole), cut
    alone = torch.cat([case.run(picked, row, row + 1) for row in range(30)])
    assert same_bits(alone, whole)


# --------------------------------------------------------------------------------------------------------- draft block


@pytest.mark.parametrize(("rows", "context"), [(1, 0), (5, 0), (5, 20), (3, 128)])
def test_a_draft_block_looks_at_everything(rows: int, context: int) -> None:
    q, entries = (torch.randn(rows, 3, 32) * 2).bfloat16(), (torch.randn(context + rows, 32) * 2).bfloat16()
    sink = torch.randn(3)
    got = attend_block(q, entries, sink, scale=0.3)
    assert got.shape == (rows, 3, 32)
    for row in range(rows):
        for head in range(3):
            want, slack = by_hand(q[row, head].double(), entries.double(), float(sink[head]), 0.3)
            assert is_rounded_once(got[row, head], want, slack)


def test_inputs_are_left_alone() -> None:
    case = Case(9, 60)
    before = case.q.clone(), case.entries.clone(), case.store.clone(), case.sink.clone()
    case.run(case.pick(3))
    attend_block(case.q, case.entries, case.sink, scale=0.3)
    for tensor, kept in zip((case.q, case.entries, case.store, case.sink), before, strict=True):
        assert torch.equal(tensor, kept)
