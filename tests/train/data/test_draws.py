"""Random numbers depend on the seed and the path and on nothing else."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InternalError
from headrace.train.data.draws import Draws

SHOW = (
    "from headrace.train.data.draws import Draws; d = Draws(7, 'a', 1); print(d.integers(1000, 5).tolist(), d.raw(1))"
)
FROZEN = "[981, 851, 236, 619, 888]"


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_numbers_are_the_same_in_every_process(hash_seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )  # fmt: skip
    draws = Draws(7, "a", 1)
    assert done.stdout.strip() == f"{draws.integers(1000, 5).tolist()} {draws.raw(1)}"


def test_numbers_stay_the_same_across_versions() -> None:
    assert str(Draws(7, "a", 1).integers(1000, 5).tolist()) == FROZEN


def test_parts_of_a_path_are_kept_apart() -> None:
    streams = [Draws(7, *path).raw(2).tobytes() for path in [(1, 20), (12, 0), ("1", 20), ("1, 20",), (1,), ()]]
    streams.append(Draws(8, 1, 20).raw(2).tobytes())
    assert len(set(streams)) == len(streams)


@given(seed=st.integers(-(2**70), 2**70), limit=st.integers(1, 2**32), count=st.integers(0, 50))
def test_integers_stay_below_the_limit(seed: int, limit: int, count: int) -> None:
    values = Draws(seed, "x").integers(limit, count)
    assert values.shape == (count,)
    assert ((values >= 0) & (values < limit)).all()


def test_integers_are_equally_likely() -> None:
    counts = np.bincount(Draws(0, "u").integers(7, 70_000), minlength=7)
    assert np.abs(counts - 10_000).max() < 500  # five standard deviations


@given(st.integers(1, 200), st.data())
def test_distinct_integers_differ(limit: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, limit))
    values = Draws(1, limit).distinct(limit, count)
    assert len(set(values.tolist())) == count
    assert sorted(Draws(1, limit).permutation(limit).tolist()) == list(range(limit))


def test_between_reaches_both_ends_and_uniform_neither_1() -> None:
    draws = Draws(3)
    assert {draws.between(4, 6) for _ in range(100)} == {4, 5, 6}
    values = draws.uniform(10_000)
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02


@pytest.mark.parametrize("ask", [lambda d: d.integers(0, 1), lambda d: d.distinct(3, 4), lambda d: d.pick([])])
def test_the_impossible_is_refused(ask) -> None:
    with pytest.raises(InternalError):
        ask(Draws(0))
