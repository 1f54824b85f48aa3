import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from headrace import __version__
from headrace.cli import _COMMANDS, inspect, main
from headrace.core.errors import CheckpointError, InternalError
from tests.golden_mini import FOLDER


def test_the_version_is_printed() -> None:
    command = [sys.executable, "-m", "headrace", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"headrace {__version__}\n")


def test_help_lists_every_command_without_loading_torch() -> None:
    script = "import sys; from headrace.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    for command in ("inspect", "synth", "trace", "generate", "train"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], f"a command is missing; {', '.join(_COMMANDS)} are accepted"),
        (["nosuch"], "invalid choice: 'nosuch'"),
        (["inspect"], "required: PATH"),
        (["inspect", "x", "--nosuch"], "unrecognized arguments: --nosuch"),
        (["inspect", "x", "--js"], "unrecognized arguments: --js"),
        (["synth", "x"], "required: --out"),
        (["synth", "x", "--out", "y", "--seed", "one"], "invalid int value: 'one'"),
        (["inspect", "/no/such/place"], "/no/such/place does not exist"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("headrace: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def raising(problem: BaseException) -> Callable[[object], int]:
    def run(_: object) -> int:
        raise problem

    return run


@pytest.mark.parametrize(
    ("problem", "status", "sentence"),
    [
        (CheckpointError("tensor x is bad."), 2, "headrace: tensor x is bad.\n"),
        (KeyboardInterrupt(), 130, "headrace: interrupted.\n"),
        (MemoryError(), 1, "headrace: there is not enough memory.\n"),
    ],
)
def test_what_ends_a_command_decides_the_exit_status(
    problem: BaseException,
    status: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(inspect, "run", raising(problem))
    assert main(["inspect", "x"]) == status
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize("problem", [InternalError("a rule\nbroke"), RuntimeError("a rule\nbroke"), KeyError("rule")])
def test_anything_else_is_one_sentence_and_exit_1(
    problem: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspect, "run", raising(problem))
    assert main(["inspect", "x"]) == 1
    captured = capsys.readouterr().err
    assert captured.startswith("headrace: ")
    assert type(problem).__name__ in captured
    assert captured.count("\n") == 1
    assert "Traceback" not in captured


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", str(FOLDER), "--json"], ["--version"]])
def test_a_reader_that_goes_away_is_not_an_error(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "headrace", *arguments]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
