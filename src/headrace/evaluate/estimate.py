"""Shares, means and paired differences with standard errors over clusters, and what a control has to show.

Answers of one row, or bytes of one document, are not independent: the cluster is the unit, never the token.
Source: training.md section 11.2(c).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.core.errors import InternalError

SURE = 2.0  # standard errors a control must lie off by
NEAR_CHANCE = 0.02  # what a control at chance may be off, where its standard error says less


@dataclass(frozen=True)
class Estimate:
    """A value, its standard error and the number of clusters; None where there is too little to say one."""

    value: float | None
    stderr: float | None
    clusters: int


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Return sum / sum over clusters, with the linearised standard error of a ratio.

    Args:
        numerators: one per cluster; for a paired difference, the difference of the two arms in that cluster.
        denominators: one per cluster, at least 0; clusters with 0 say nothing and are left out.
    """
    if len(numerators) != len(denominators):
        raise InternalError(f"{len(numerators)} numerators were given for {len(denominators)} clusters")
    pairs = [(top, bottom) for top, bottom in zip(numerators, denominators, strict=True) if bottom > 0]
    count, total = len(pairs), math.fsum(bottom for _, bottom in pairs)
    if not count:
        return Estimate(None, None, 0)
    value = math.fsum(top for top, _ in pairs) / total
    if count == 1:
        return Estimate(value, None, 1)
    squares = math.fsum((top - value * bottom) ** 2 for top, bottom in pairs)
    return Estimate(value, math.sqrt(squares * count / (count - 1)) / total, count)


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per cluster."""
    return ratio(values, [1.0] * len(values))


@dataclass(frozen=True)
class Comparison:
    """Two arms on the same clusters.

    `difference` is the first arm minus the second, `relative` the same as a share of the second arm.
    """

    name: str
    unit: str
    difference: float | None
    stderr: float | None
    relative: float | None
    clusters: int


def compare(
    name: str, unit: str, first: Sequence[float], second: Sequence[float], weights: Sequence[float]
) -> Comparison:
    """Compare two arms, cluster by cluster.

    Args:
        name: "ARM minus ARM", with what was measured.
        unit: of the difference.
        first: sums of the first arm, one per cluster.
        second: sums of the second arm, one per cluster.
        weights: what the sums are divided by, one per cluster.
    """
    apart = ratio([a - b for a, b in zip(first, second, strict=True)], weights)
    base = ratio(second, weights).value
    relative = apart.value / base if apart.value is not None and base else None
    return Comparison(name, unit, apart.value, apart.stderr, relative, apart.clusters)


@dataclass(frozen=True)
class Control:
    """An arm that must fail: `must` says how, `has_failed` whether it did (None: too few clusters to say)."""

    name: str
    must: str
    value: float | None
    stderr: float | None
    has_failed: bool | None


def must_differ(comparison: Comparison, direction: Literal["higher", "lower"]) -> Control:
    """Return the control whose first arm, the broken one, must be worse than the second beyond its standard error."""
    found, error = comparison.difference, comparison.stderr
    has_failed = None
    if found is not None and error is not None:
        has_failed = (found if direction == "higher" else -found) > SURE * error
    must = f"{direction} than 0 by more than {SURE:g} standard errors"
    return Control(comparison.name, must, found, error, has_failed)


def must_be_at(name: str, chance: float, found: Estimate) -> Control:
    """Return the control that must be no better than chance."""
    has_failed = None
    if found.value is not None and found.stderr is not None:
        has_failed = found.value - chance <= max(SURE * found.stderr, NEAR_CHANCE)
    return Control(name, f"no better than chance, {chance:g}", found.value, found.stderr, has_failed)
