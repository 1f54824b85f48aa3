"""When a process goes away, on either side, nobody waits for it."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.core.errors import EngineError, UserError
from headrace.engine.process import client
from tests.engine.process.living import PATIENCE_S, children, is_running, read_long, wait_until
from tests.engine.results import told

PROMPTS = [[5, 6, 7], [1, 2] * 40, [9] * 20]
SHORT = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)


def kill(llm: LLM) -> None:
    os.kill(llm.status()["pid"], signal.SIGKILL)


def test_a_killed_engine_fails_its_requests_and_is_started_again_three_times_a_minute(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start, spawn = threading.Event(), client._spawn

    def wait_and_spawn() -> object:
        assert may_start.wait(PATIENCE_S), "requests wait for the next process"
        return spawn()

    monkeypatch.setattr(client, "_RESTART_WINDOW_S", 1e6)  # a slow machine may take more than a minute for this
    with LLM(folder, threads=1) as llm:
        expected = told(llm.generate([PROMPTS[0]], SHORT)[0])
        monkeypatch.setattr(client, "_spawn", wait_and_spawn)
        for _ in range(3):
            readers, old = read_long(llm, PROMPTS), llm.status()["pid"]
            may_start.clear()
            kill(llm)
            for reader in readers:
                outcome = reader.join()
                assert isinstance(outcome, EngineError)
                assert "process ended (exit status -9) and is started again" in outcome.message
            may_start.set()
            assert told(llm.generate([PROMPTS[0]], SHORT)[0]) == expected
            assert llm.status()["pid"] != old
            llm.audit()
        (reader,) = read_long(llm, PROMPTS[:1])
        kill(llm)
        outcome = reader.join()
        assert isinstance(outcome, EngineError)
        assert "and is given up" in outcome.message
        for _ in range(2):
            with pytest.raises(EngineError, match="ended 4 times in a minute and is given up"):
                llm.generate([PROMPTS[0]], SHORT)
            with pytest.raises(EngineError, match="given up"):
                llm.status()


def test_an_engine_that_does_not_come_up_again_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, threads=1) as llm:
        readers = read_long(llm, PROMPTS[:1])
        starts, spawn = [], client._spawn

        def ending() -> object:
            process, connection = spawn()
            process.kill()
            starts.append(process)
            return process, connection

        monkeypatch.setattr(client, "_spawn", ending)
        kill(llm)
        assert isinstance(readers[0].join(), EngineError)
        with pytest.raises(EngineError, match="given up"):
            llm.generate([PROMPTS[0]], SHORT)
        assert len(starts) == 3
        assert all(process.returncode == -9 for process in starts)


FRONT = """
import sys
from headrace import LLM, SamplingParams
from headrace.engine.process import client
client._END_S = 1000  # an engine that does not end by itself is waited for in vain
busy, idle = LLM(sys.argv[1], threads=1), LLM(sys.argv[1], threads=1)
pieces = busy.stream([[1, 2, 3]], SamplingParams(max_tokens=1500, ignore_eos=True))
next(pieces)
print(busy.status()["pid"], idle.status()["pid"], flush=True)
if sys.argv[2] == "stay":
    for piece in pieces:
        pass
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["stay", "leave"])
def test_engines_end_with_their_front_busy_or_idle(folder: Path, end: str) -> None:
    command = [sys.executable, "-c", FRONT, str(folder), end]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        pids = [int(word) for word in front.stdout.readline().split()]
        assert len(pids) == 2
        if end == "stay":
            assert all(map(is_running, pids))
            front.kill()
        front.wait(PATIENCE_S)
        wait_until(lambda: not any(map(is_running, pids)))
        assert front.returncode == (-9 if end == "stay" else 0)


def test_an_engine_that_nobody_holds_any_more_ends(folder: Path) -> None:
    llm = LLM(folder, threads=1)
    process = llm._engine._process
    del llm
    gc.collect()
    wait_until(lambda: process.poll() is not None)
    assert process.returncode == 0  # by itself, not killed


def test_closing_fails_what_runs_and_ends_the_process(folder: Path) -> None:
    llm = LLM(folder, threads=1)
    readers, process = read_long(llm, PROMPTS), llm._engine._process
    llm.close()
    assert process.returncode == 0  # by itself, not killed
    for reader in readers:
        outcome = reader.join()
        assert isinstance(outcome, EngineError)
        assert "closed" in outcome.message
    with pytest.raises(UserError, match="this LLM was closed"):
        llm.generate([1])


# a shell lets what it runs in the background ignore interrupts, and tests may run there
HEARING = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from headrace.cli import main; "
)


def generate(folder: Path) -> "subprocess.Popen[str]":
    options = ["generate", str(folder), "--prompt", "a", "--max-tokens", "1500"]
    command = [sys.executable, "-c", HEARING + "sys.exit(main())", *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, bufsize=1
    )


@pytest.mark.parametrize("moment", ["loading", "talking"])
def test_an_interrupt_of_the_command_leaves_nothing_behind(folder: Path, moment: str) -> None:
    with generate(folder) as front:
        assert front.stdout is not None
        assert front.stderr is not None
        wait_until(lambda: children(front.pid))
        (engine,) = children(front.pid)
        if moment == "talking":
            assert front.stdout.read(1)
        else:
            time.sleep(0.3)
        os.killpg(front.pid, signal.SIGINT)
        front.wait(PATIENCE_S)
        assert front.returncode == 130
        said = front.stderr.read()
        assert said.strip().endswith("headrace: interrupted.")
        assert "Traceback" not in said
        wait_until(lambda: not is_running(engine))
