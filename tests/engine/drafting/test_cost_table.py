"""Measured costs rise, are read between their points, and come back from their file or not at all."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import UserError
from headrace.engine.drafting.cost_table import (
    CostKey,
    CostTable,
    cached_cost_table,
    default_path,
    measure,
    read_cost_table,
    rising,
    write_cost_table,
)

KEY = CostKey(hardware="two cores", model="nano 1", numerics="bfloat16 fp4")
TABLE = CostTable(
    batches=(1, 4),
    guesses=(0, 2, 5),
    verify=((0.010, 0.012, 0.018), (0.020, 0.030, 0.060)),
    draft=(0.002, 0.004),
)


class Machine:
    """A machine whose steps move its clock."""

    def __init__(self) -> None:
        self.now, self.runs = 0.0, 0

    def clock(self) -> float:
        return self.now

    def verify(self, batch: int, guesses: int) -> None:
        self.runs += 1
        slow = 5.0 if self.runs % 11 == 0 else 1.0  # now and then something else runs
        dip = 0.9 if (batch, guesses) == (2, 3) else 1.0  # and one point is measured too low
        self.now += slow * dip * (0.010 + 0.002 * batch * (1 + guesses))

    def draft(self, batch: int) -> None:
        self.now += 0.001 * batch


def test_a_table_is_the_median_of_what_the_clock_says() -> None:
    machine = Machine()
    table = measure(machine.verify, machine.draft, batches=[1, 2, 8], guesses=[0, 1, 3, 5], clock=machine.clock)
    assert machine.runs == 3 * 4 * 6
    assert table.plain_seconds(1) == pytest.approx(0.012)
    assert table.verify_seconds(8, 48) == pytest.approx(0.106)
    assert table.draft_seconds(2) == pytest.approx(0.002)
    for row in (*table.verify, *zip(*table.verify, strict=True)):
        assert list(row) == sorted(row)


def test_between_its_points_a_table_is_linear() -> None:
    assert TABLE.verify_seconds(1, 1) == 0.010
    assert TABLE.verify_seconds(1, 2) == pytest.approx(0.011)
    assert TABLE.verify_seconds(1, 6) == pytest.approx(0.018)
    assert TABLE.verify_seconds(4, 24) == pytest.approx(0.060)
    assert TABLE.verify_seconds(2, 2) == pytest.approx(0.010 + 0.010 / 3)
    assert TABLE.verify_seconds(1, 8) == pytest.approx(0.022)  # beyond the last point along the last piece
    assert TABLE.step_seconds(4)(4) == pytest.approx(0.024)
    assert TABLE.draft_seconds(7) == pytest.approx(0.006)


@given(st.integers(1, 12), st.integers(0, 60))
def test_more_rows_or_requests_never_take_less(batch: int, extra: int) -> None:
    rows = batch + extra
    assert TABLE.verify_seconds(batch, rows) <= TABLE.verify_seconds(batch, rows + 1) + 1e-12


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_values_made_to_rise_are_the_nearest_that_do(values: list[float]) -> None:
    found = rising(values)
    assert len(found) == len(values)
    assert all(low <= high + 1e-9 for low, high in pairwise(found))
    assert sum(found) == pytest.approx(sum(values))
    assert rising(sorted(values)) == pytest.approx(sorted(values))
    # least squares: against every rising pair of neighbours moved together nothing is gained
    other = sorted(values)
    assert sum((a - b) ** 2 for a, b in zip(found, values, strict=True)) <= 1e-6 + sum(
        (a - b) ** 2 for a, b in zip(other, values, strict=True)
    )


# ------------------------------------------------------------------------------------------------------------- files


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "costs.json"
    write_cost_table(path, TABLE, KEY)
    assert read_cost_table(path, KEY) == read_cost_table(path) == TABLE
    assert [one.name for one in path.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize("name", ["hardware", "model", "numerics"])
def test_a_table_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "costs.json"
    write_cost_table(path, TABLE, KEY)
    other = CostKey(**{**KEY.__dict__, name: "another"})
    with pytest.raises(UserError, match=f"{name}.*another"):
        read_cost_table(path, other)


def test_every_byte_that_is_missing_or_different_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_cost_table(path, TABLE, KEY)
    whole = path.read_bytes()
    for place in range(0, len(whole) - 2, 7):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            path.write_bytes(damaged)
            try:
                found = read_cost_table(path)
            except UserError:
                continue
            assert found == TABLE, f"byte {place}"  # white space between values means nothing


@pytest.mark.parametrize(
    "change",
    [
        {"batches": [2, 4]},
        {"batches": [1, 1]},
        {"batches": [1, 4.0]},
        {"guesses": [0, 5, 2]},
        {"guesses": []},
        {"verify": [[0.01, 0.012, 0.018]]},
        {"verify": [[0.01, 0.012], [0.02, 0.03]]},
        {"verify": [[0.01, 0.009, 0.018], [0.02, 0.03, 0.06]]},
        {"verify": [[0.02, 0.03, 0.06], [0.01, 0.012, 0.018]]},
        {"verify": [[-0.01, 0.012, 0.018], [0.02, 0.03, 0.06]]},
        {"verify": [["0.01", 0.012, 0.018], [0.02, 0.03, 0.06]]},
        {"verify": [[True, 2, 3], [4, 5, 6]]},
        {"verify": None},
        {"draft": [0.004, 0.002]},
        {"draft": [0.004]},
        {"draft": [0.004, 1e300]},
    ],
)
def test_numbers_that_are_no_table_are_refused_even_with_a_checksum(tmp_path: Path, change: dict[str, object]) -> None:
    from headrace.engine.drafting.cost_table import _digest

    path = tmp_path / "costs.json"
    write_cost_table(path, TABLE, KEY)
    body = {**json.loads(path.read_text()), **change}
    body.pop("sha256")
    path.write_text(json.dumps({**body, "sha256": _digest(body)}))
    with pytest.raises(UserError, match="no grid of seconds that rise"):
        read_cost_table(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "headrace-cost-table/9"}', "\x00\xff", '{"a": NaN}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"costs\.json"):
        read_cost_table(path)
    with pytest.raises(UserError, match="none"):
        read_cost_table(tmp_path / "none.json")


def test_a_kept_table_is_used_and_a_damaged_one_is_measured_again(tmp_path: Path) -> None:
    path, measured = tmp_path / "costs.json", []

    def fresh() -> CostTable:
        measured.append(1)
        return TABLE

    assert cached_cost_table(path, KEY, fresh) == (TABLE, "no table was kept")
    assert cached_cost_table(path, KEY, fresh) == (TABLE, None)
    path.write_text(path.read_text()[:-40])
    table, why = cached_cost_table(path, KEY, fresh)
    assert table == TABLE
    assert "costs.json" in (why or "")
    assert cached_cost_table(path, KEY, fresh) == (TABLE, None)
    assert len(measured) == 2


def test_a_folder_that_cannot_be_written_costs_only_the_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    table, why = cached_cost_table(tmp_path / "file" / "costs.json", KEY, lambda: TABLE)
    assert table == TABLE
    assert "cannot write" in (why or "")


def test_tables_are_kept_in_the_cache_folder_one_for_each_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path(KEY).parent == tmp_path / "headrace" / "cost-tables"
    assert default_path(KEY) != default_path(CostKey(hardware="two cores", model="nano 2", numerics="bfloat16 fp4"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_path(KEY).is_absolute()
