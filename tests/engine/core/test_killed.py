"""An engine that is killed at any moment, while it writes: the next one over its directory says nothing wrong."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headrace
from headrace.cache.tiers.incidents import Incident
from tests.engine.core.answering_child import asked
from tests.engine.core.serving import alone, answer, core, params, prompt, said

ROOT = Path(__file__).resolve().parents[3]
HARMLESS = {Incident.TORN_END.value, Incident.UNINDEXED.value}


def answer_and_kill(child: "subprocess.Popen[str]", first: int, delay_s: float) -> int:
    """Let an engine answer for a moment, kill it, and return the number of its last answer."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{first}\n")
    child.stdin.flush()
    pid, last = 0, first
    while not pid or last == first:
        kind, number = child.stdout.readline().split()
        pid = int(number) if kind == "pid" else pid
        last = int(number) + 1 if kind == "answered" else last
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    while (line := child.stdout.readline()) != "ended\n":
        last = int(line.split()[1]) + 1
    return last - 1


@pytest.mark.parametrize("rounds", [pytest.param(2, id="2"), pytest.param(300, id="300", marks=pytest.mark.full)])
def test_no_wrong_token_after_a_kill(rounds: int, tmp_path: Path) -> None:
    chance, found, number = random.Random(5), 0, 0
    source = Path(headrace.__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.engine.core.answering_child", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}"},
    ) as child:
        for _ in range(rounds):
            last = answer_and_kill(child, number, chance.uniform(0, 0.6))
            engine = core(cache_dir=str(tmp_path), min_free_disk=0, window_policy="full")
            for name, ids in {
                "old": [*prompt(260, last % 4), *prompt(7, 900)],
                "first": [*asked(number), 1],
                "newest": [*asked(last), 2],
            }.items():
                result = answer(engine, ids, params(), name)
                assert said(result) == alone(tuple(ids))
                found += result.usage.cached_tokens
            assert engine.cache.tiers is not None
            assert engine.cache.tiers.disk is not None
            assert set(engine.cache.tiers.disk.incidents.counts) <= HARMLESS
            engine.close()
            number = last + 1
        assert child.stdin is not None
        child.stdin.close()
    assert number >= rounds
    assert found >= 256 * rounds
