"""FIDELITY.md names a status from the fixed list for every mechanism, and misses no kind of layer."""

import re
from pathlib import Path

from tests.architecture.tree import ROOT

TEXT = (ROOT / "FIDELITY.md").read_text(encoding="utf-8")
STATUSES = {"exact", "approximation", "not yet"}
LAYER_ROLES = ("window", "full", "reindex", "reuse")


def rows() -> list[list[str]]:
    """Return the cells of every table row, header and rule rows left out."""
    lines = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| mechanism")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_mechanism_has_a_status_from_the_list() -> None:
    assert rows()
    assert [row for row in rows() if row[1] not in STATUSES] == []


def test_an_approximation_or_a_gap_says_what_differs() -> None:
    assert [row for row in rows() if row[1] != "exact" and len(row[2]) < 20] == []


def test_every_mechanism_names_a_place_that_exists() -> None:
    for row in rows():
        for path in re.findall(r"`((?:src|tests)/[^`]+)`", row[3]):
            assert (ROOT / Path(path)).exists(), f"{row[0]}: {path} is not there"
    assert [row[0] for row in rows() if row[1] != "not yet" and "`" not in row[3]] == []


def test_every_layer_role_is_covered() -> None:
    assert [role for role in LAYER_ROLES if f"`{role}`" not in TEXT] == []
