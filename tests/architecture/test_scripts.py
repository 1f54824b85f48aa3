"""The shell scripts are whole, and the README's two commands are the ones that exist."""

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
