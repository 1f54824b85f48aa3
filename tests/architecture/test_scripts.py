"""The shell scripts are whole, and the README's two commands are the ones that exist."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT, name_of

RUN_DIRECTLY = [ROOT / "run.sh", ROOT / "test.sh", ROOT / ".ci" / "run", ROOT / ".ci" / "full"]
SCRIPTS = [*RUN_DIRECTLY, *sorted((ROOT / "scripts").glob("*.sh"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_script_parses(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)


@pytest.mark.parametrize("path", RUN_DIRECTLY, ids=name_of)
def test_script_is_executable(path: Path) -> None:
    assert os.access(path, os.X_OK)


def test_readme_names_both_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "    bash run.sh" in readme
    assert "    bash test.sh" in readme


def test_the_gate_runs_the_readme_test_command() -> None:
    assert "bash test.sh" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_an_old_interpreter_is_refused_with_a_sentence(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": "false", "HEADRACE_VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        ["bash", str(ROOT / "test.sh")], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert "Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize(
    ("given", "called"),
    [
        ([], "serve"),
        (["--port", "8080"], "serve --port 8080"),
        (["a prompt", "--seed", "1"], "generate --prompt a prompt --max-tokens 160 --seed 1"),
    ],
)
def test_run_serves_with_options_and_goes_on_with_a_prompt(tmp_path: Path, given: list[str], called: str) -> None:
    """The environment is one that counts as ready and whose `headrace` says what it was called with."""
    pinned = (ROOT / "pyproject.toml").read_bytes() + (ROOT / "constraints.txt").read_bytes()
    (tmp_path / f"ready-{hashlib.sha256(pinned).hexdigest()[:16]}-plain").touch()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "headrace"
    program.write_text('#!/bin/sh\necho "$*"\n', encoding="utf-8")
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "run.sh"), *given],
        env={**os.environ, "HEADRACE_VENV": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.strip() == called
