"""A writer that is killed at any moment loses what it had not written, and nothing else."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headrace
from headrace.cache.tiers.incidents import Incident
from tests.cache.tiers.faulty import Directory, put, readable

CHILD = "tests.cache.tiers.writing_child"
ROOT = Path(__file__).resolve().parents[3]
# what a kill may leave: a record that is written in part, or written and not in the index
HARMLESS = {Incident.TORN_END.value, Incident.UNINDEXED.value}
ROUNDS = [pytest.param(20, id="20"), pytest.param(300, id="300", marks=pytest.mark.full)]


def write_and_kill(directory: Directory, first: int, delay_s: float) -> int:
    """Run a writer for a moment; return the last block that it told to be written."""
    source = Path(headrace.__file__).parents[1]
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            CHILD,
            str(directory.folder),
            str(first),
            str(directory.max_bytes),
        ],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}"},
    )
    assert child.stdout is not None
    told = [child.stdout.readline()]
    time.sleep(delay_s)
    child.kill()
    told += child.stdout.read().splitlines()
    child.stdout.close()
    child.wait()
    whole = [line for line in told if line.strip()]
    return int(whole[-1])


@pytest.mark.parametrize("rounds", ROUNDS)
def test_nothing_that_was_written_is_lost_and_nothing_wrong_is_read(rounds: int, tmp_path: Path) -> None:
    directory, chance, written = Directory(tmp_path / "cache", segment_bytes=64_000), random.Random(7), 0
    for _ in range(rounds):
        written = max(written, write_and_kill(directory, written + 1, chance.uniform(0, 0.03)))
        tier = directory.open()
        assert set(tier.incidents.counts) <= HARMLESS
        found = readable(tier, written + 200)
        assert found[:written] == list(range(1, written + 1))
        written = len(found)
        assert found == list(range(1, written + 1))
        assert set(tier.incidents.counts) <= HARMLESS
        tier.close()


@pytest.mark.parametrize("rounds", [pytest.param(5, id="5"), pytest.param(100, id="100", marks=pytest.mark.full)])
def test_killed_while_it_makes_room(rounds: int, tmp_path: Path) -> None:
    directory = Directory(tmp_path / "cache", segment_bytes=64_000, max_bytes=1_500_000)
    chance, written = random.Random(11), 0
    for _ in range(rounds):
        written = write_and_kill(directory, written + 1, chance.uniform(0, 0.2))
        tier = directory.open()
        assert set(tier.incidents.counts) <= {*HARMLESS, Incident.MISSING_PAYLOAD.value}
        readable(tier, written + 400)
        put(tier, range(written + 500, written + 520), "b")
        assert readable(tier, written + 520, "b")[-20:] == list(range(written + 500, written + 520))
        tier.close()
        assert directory.nbytes <= directory.max_bytes
