"""Conversations that come back answer as well as those that are read anew: few and short ones here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).resolve().parents[2]
SITUATIONS = ("at once", "forgotten, replay", "forgotten, exact", "restarted, replay", "restarted, exact")


@pytest.mark.parametrize(
    ("count", "questions", "old"),
    [pytest.param(1, 3, 600, id="short"), pytest.param(20, 16, 7000, id="promised", marks=pytest.mark.full)],
)
def test_a_conversation_that_comes_back_answers_as_well_as_one_that_is_read_anew(
    count: int, questions: int, old: int
) -> None:
    sizes = {"--conversations": count, "--questions": questions, "--old": old}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.return_success",
            "--json",
            *(str(part) for pair in sizes.items() for part in pair),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{Path(headrace.__file__).parents[1]}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,  # it exits with 1 where a bound is missed
    )
    found = {figure["name"]: figure["median"] for figure in json.loads(done.stdout)["figures"]}
    assert found[f"right answers of {count * questions}, cold"] >= 90
    assert all(found[f"apart from cold, {name}"] <= 2 for name in SITUATIONS)
    # exact answers are those of a prompt that is read anew, one by one
    assert all(found[f"answers right in one of both, {name}"] == 0 for name in SITUATIONS if "replay" not in name)
