"""An engine that is killed at any moment: the next one over its directory gives no wrong token."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headrace
from tests.engine.core.serving import alone, answer, core, params, prompt, said

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("rounds", [pytest.param(1, id="1"), pytest.param(20, id="20", marks=pytest.mark.full)])
def test_no_wrong_token_after_a_kill(rounds: int, tmp_path: Path) -> None:
    chance, found = random.Random(5), 0
    source = Path(headrace.__file__).parents[1]
    for _ in range(rounds):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.core.answering_child", str(tmp_path)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}"},
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(chance.uniform(0, 0.5))
        child.kill()
        child.stdout.close()
        child.wait()
        engine = core(cache_dir=str(tmp_path), min_free_disk=0, window_policy="full")
        for seed in range(4):
            ids = [*prompt(260, seed), *prompt(7, 900)]
            result = answer(engine, ids, params(), str(seed))
            assert said(result) == alone(tuple(ids))
            found += result.usage.cached_tokens
        engine.close()
    assert found >= 256 * rounds
