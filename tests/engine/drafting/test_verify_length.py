"""Guesses are verified while they bring more than they cost."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.drafting.cost_table import CostTable
from headrace.engine.drafting.verify_length import (
    StaleCapacity,
    admit,
    best_capacity,
    is_drafting_worth,
    synchronous_lengths,
)

# recorded by hand from the shape of two machines: rows that are almost free, and rows that cost what a step costs
PAYS = CostTable(batches=(1, 8), guesses=(0, 5), verify=((10e-3, 12e-3), (14e-3, 24e-3)), draft=(2e-3, 4e-3))
NEVER_PAYS = CostTable(batches=(1, 8), guesses=(0, 5), verify=((10e-3, 60e-3), (70e-3, 420e-3)), draft=(4e-3, 30e-3))
CURVE = (0.8, 0.6, 0.45, 0.3, 0.2)

curves = st.lists(
    st.lists(st.floats(0, 1), max_size=5).map(lambda values: sorted(values, reverse=True)), min_size=1, max_size=4
)
costs = st.lists(st.floats(0.01, 1), min_size=32, max_size=32).map(lambda steps: list(itertools.accumulate(steps)))


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_drafting_is_chosen_where_it_pays_and_not_where_it_does_not(batch: int) -> None:
    survival = [CURVE] * batch
    for table, pays in ((PAYS, True), (NEVER_PAYS, False)):
        worth = is_drafting_worth(survival, table.step_seconds(batch), table.plain_seconds(batch))
        assert worth is pays
        lengths = synchronous_lengths(survival, table.step_seconds(batch))
        assert (min(lengths) >= 3) is pays
        assert (max(lengths) <= 1) is not pays  # guesses that are there already may be worth a row


def test_drafting_that_hardly_ever_hits_is_not_worth_it_even_where_rows_are_cheap() -> None:
    poor = [(0.05, 0.01, 0.0, 0.0, 0.0)]
    assert not is_drafting_worth(poor, PAYS.step_seconds(1), PAYS.plain_seconds(1))
    assert not is_drafting_worth([], PAYS.step_seconds(1), PAYS.plain_seconds(1))


def test_of_a_batch_the_likeliest_guesses_are_verified() -> None:
    def seconds(rows: int) -> float:
        return 1.0 if rows <= 6 else 10.0

    assert synchronous_lengths([(0.9, 0.8, 0.1), (0.5, 0.4), ()], seconds) == [2, 1, 0]
    assert synchronous_lengths([(0.5, 0.5), (0.5, 0.5)], lambda rows: 1.0 if rows <= 5 else 10.0) == [2, 1]
    assert synchronous_lengths([], seconds) == []


@given(curves, costs)
def test_each_request_keeps_a_beginning_and_the_stop_is_at_the_first_loss(
    survival: list[list[float]], cost: list[float]
) -> None:
    def seconds(rows: int) -> float:
        return cost[rows]

    lengths = synchronous_lengths(survival, seconds)
    batch = len(survival)
    taken = sorted((chance for curve, n in zip(survival, lengths, strict=True) for chance in curve[:n]), reverse=True)
    every = sorted((chance for curve in survival for chance in curve), reverse=True)
    assert taken == every[: len(taken)]
    rates = [(batch + sum(every[:n])) / seconds(batch + n) for n in range(len(every) + 1)]
    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(rates[: len(taken) + 1]))
    assert len(taken) == len(every) or rates[len(taken) + 1] < rates[len(taken)] + 1e-12


@given(curves, costs)
def test_the_best_capacity_is_the_best_of_all(survival: list[list[float]], cost: list[float]) -> None:
    capacity, rate = best_capacity(survival, lambda rows: cost[rows])
    every = sorted((chance for curve in survival for chance in curve), reverse=True)
    rates = [(len(survival) + sum(every[:n])) / cost[len(survival) + n] for n in range(len(every) + 1)]
    assert rate == pytest.approx(max(rates))
    assert rates[capacity] == pytest.approx(max(rates))


def test_the_best_capacity_looks_behind_a_step_of_the_cost_curve_and_the_early_stop_does_not() -> None:
    cost = {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0}
    assert best_capacity([(0.9, 0.9, 0.9)], cost.__getitem__)[0] == 3
    assert synchronous_lengths([(0.9, 0.9, 0.9)], cost.__getitem__) == [0]


@given(curves, st.integers(0, 20))
def test_a_capacity_is_filled_with_beginnings(survival: list[list[float]], capacity: int) -> None:
    lengths = admit(survival, capacity)
    assert sum(lengths) == min(capacity, sum(map(len, survival)))
    cut = [chance for curve, n in zip(survival, lengths, strict=True) for chance in curve[n:]]
    kept = [chance for curve, n in zip(survival, lengths, strict=True) for chance in curve[:n]]
    assert min(kept, default=1) >= max(cut, default=0)


def test_the_stale_rule_uses_what_was_two_steps_ago() -> None:
    def seconds(rows: int) -> float:
        return 1.0 + 0.3 * rows

    high, low = (0.9, 0.9, 0.9), (0.05, 0.0, 0.0)
    rule, seen = StaleCapacity(), []
    for curve in (high, low, low, high, high, high):
        seen.append(rule.lengths({"a": curve}, seconds)["a"])
    assert seen == [3, 3, 3, 0, 0, 3]


def test_the_stale_rule_gives_a_new_request_the_mean_of_the_others() -> None:
    rule = StaleCapacity()
    for _ in range(2):
        rule.lengths({"a": (0.9, 0.9), "gone": (0.1, 0.0)}, lambda rows: 1.0 + 0.2 * rows)
    assert rule.lengths({"a": (0.9, 0.9), "new": (0.9, 0.9)}, lambda rows: 1.0 + 0.2 * rows) == {"a": 2, "new": 2}
    assert rule.lengths({}, lambda rows: 1.0 * rows) == {}
