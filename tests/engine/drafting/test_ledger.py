"""What steps take is learned with caution, and only from steps of the same requests."""

import pytest

from headrace.engine.drafting.ledger import Ledger, StepTimes


def steps(times: StepTimes, *seconds: float, is_drafted: bool = False) -> StepTimes:
    for one in seconds:
        times.add(one, 1, is_drafted=is_drafted)
    return times


def test_the_price_is_a_guess_until_three_drafted_steps_were_measured() -> None:
    times = steps(StepTimes(1.7), 0.020, 0.020)
    assert times.price == 1.7
    prices = [steps(times, 0.028, is_drafted=True).price for _ in range(4)]
    assert prices == [1.7, 1.7, pytest.approx(1.4), pytest.approx(1.4)]


def test_of_two_plain_steps_the_faster_counts() -> None:
    assert steps(steps(StepTimes(1.5), 0.01, 0.02), 0.02, is_drafted=True).price == pytest.approx(2.0)


def test_of_the_first_drafted_steps_the_dearer_counts_and_one_that_slept_does_not() -> None:
    assert steps(steps(StepTimes(1.7), 0.01), 0.025, is_drafted=True).price == pytest.approx(2.5)
    assert steps(steps(StepTimes(1.7), 0.01), 30.0, is_drafted=True).price == pytest.approx(3.4)
    times = steps(StepTimes(1.7), 0.01)
    assert times.add(30.0, 1, is_drafted=True) == pytest.approx(3 * 3.4)


def test_of_other_requests_the_ratio_is_kept_and_not_the_seconds() -> None:
    times = steps(steps(StepTimes(1.7), 0.040), *[0.100] * 5, is_drafted=True)
    times.begin()
    assert times.price == pytest.approx(2.5)
    steps(times, 0.010)
    assert times.price == pytest.approx(2.5)
    assert times.add(0.020, 1, is_drafted=True) == pytest.approx(2.0)
    assert times.price == pytest.approx(2.5)
    few = steps(steps(StepTimes(1.7), 0.010), 0.030, 0.030, is_drafted=True)
    few.begin()
    assert few.price == 1.7


def test_a_machine_that_slows_down_changes_the_price_until_plain_steps_show_it() -> None:
    times = steps(steps(StepTimes(1.7), *[0.01] * 5), *[0.017] * 9, is_drafted=True)
    steps(times, *[0.051] * 9, is_drafted=True)
    assert times.price == pytest.approx(5.1)
    steps(times, *[0.03] * 3)
    assert times.price == pytest.approx(1.7)


def test_rates_are_of_the_newest_steps_and_a_long_one_counts_three_times_the_median() -> None:
    times = StepTimes(1.7)
    assert times.rate(is_drafted=False) is times.rate(is_drafted=True) is times.gain is None
    steps(times, 0.01, 0.01, 0.01, 9.0)
    assert times.rate(is_drafted=False) == pytest.approx(4 / 0.06)
    times.add(0.02, 3, is_drafted=True)
    assert times.gain == pytest.approx(150 / (4 / 0.06))


def test_a_ledger_counts_in_plain_steps() -> None:
    ledger = Ledger()
    ledger.add_plain(10)
    assert (ledger.surplus, ledger.newest, ledger.expected(2.0)) == (0, None, 2.0)
    ledger.add(1, 1.7, is_drafted=True)
    assert (ledger.surplus, ledger.newest) == (pytest.approx(-0.7), 1)
    assert ledger.expected(2.0) == 1.5
    ledger.add(6, 1.7, is_drafted=True)
    assert ledger.surplus == pytest.approx(3.6)
    assert ledger.expected(2.0) == pytest.approx((1 * 0.8 + 6 + 2.0) / 2.8)
