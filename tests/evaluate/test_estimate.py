"""Standard errors over clusters, paired differences, and controls that pass when they should not."""

import numpy as np
import pytest

from headrace.core.errors import InternalError
from headrace.evaluate.estimate import Estimate, compare, mean, must_be_at, must_differ, ratio


def test_a_ratio_weighs_clusters_by_their_size() -> None:
    found = ratio([1.0, 8.0], [1.0, 16.0])
    assert found.value == pytest.approx(9 / 17)
    assert found.clusters == 2


def test_the_error_of_a_mean_is_the_textbook_one() -> None:
    values = np.random.default_rng(0).normal(size=30)
    found = mean(values.tolist())
    assert found.value == pytest.approx(values.mean())
    assert found.stderr == pytest.approx(values.std(ddof=1) / 30**0.5)


def test_the_error_of_a_ratio_is_its_spread_over_many_samples() -> None:
    generator = np.random.default_rng(1)
    found, errors = [], []
    for _ in range(400):
        sizes = generator.integers(5, 40, 50)
        rates = generator.beta(2, 2, 50)  # answers of one row go together
        right = generator.binomial(sizes, rates)
        one = ratio(right.astype(float).tolist(), sizes.astype(float).tolist())
        found.append(one.value)
        errors.append(one.stderr)
    assert np.mean(errors) == pytest.approx(np.std(found), rel=0.1)


def test_too_few_clusters_have_no_error_and_empty_ones_do_not_count() -> None:
    assert ratio([], []) == Estimate(None, None, 0)
    assert ratio([3.0, 0.0], [4.0, 0.0]) == Estimate(0.75, None, 1)
    with pytest.raises(InternalError):
        ratio([1.0], [])


def test_a_paired_difference_is_surer_than_its_arms() -> None:
    generator = np.random.default_rng(2)
    base = generator.normal(5.0, 3.0, 40)
    better = base - 0.1 + generator.normal(0.0, 0.01, 40)
    found = compare("new minus old", "nats", better.tolist(), base.tolist(), [1.0] * 40)
    assert found.difference == pytest.approx(-0.1, abs=0.01)
    assert found.stderr is not None
    assert found.stderr < 0.003 < (mean(base.tolist()).stderr or 0.0)
    assert found.relative == pytest.approx((found.difference or 0) / base.mean())


def test_a_control_that_works_as_well_as_the_real_thing_has_not_failed() -> None:
    same = compare("broken minus real", "nats", [1.0, 2.0, 3.1], [1.1, 2.0, 3.0], [1.0] * 3)
    worse = compare("broken minus real", "nats", [2.0, 3.0, 4.1], [1.1, 2.0, 3.0], [1.0] * 3)
    assert must_differ(same, "higher").has_failed is False
    assert must_differ(worse, "higher").has_failed is True
    assert must_differ(worse, "lower").has_failed is False
    assert must_differ(compare("one", "nats", [2.0], [1.0], [1.0]), "higher").has_failed is None


def test_a_control_above_chance_has_not_failed() -> None:
    assert must_be_at("window only", 0.0625, Estimate(0.07, 0.01, 9)).has_failed is True
    assert must_be_at("window only", 0.0625, Estimate(0.2, 0.01, 9)).has_failed is False
    assert must_be_at("window only", 0.0625, Estimate(0.0625, 0.0, 9)).has_failed is True
    assert must_be_at("window only", 0.0625, Estimate(0.2, None, 1)).has_failed is None
