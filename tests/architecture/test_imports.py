"""Who may import whom: the contracts of pyproject.toml, run here, and shown to fail when they should."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree import PACKAGE, ROOT

LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"]


def lint_imports(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run every contract on the package found in `source`, with `folder` as the working directory."""
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*LINT, str(ROOT / "pyproject.toml")]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_all_import_contracts_are_kept(tmp_path: Path) -> None:
    done = lint_imports(PACKAGE.parent, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("core/errors.py", "import headrace.models", "Layers point downwards only"),
        ("core/errors.py", "def f():\n    import headrace.checkpoint", "Layers point downwards only"),
        ("memory/__init__.py", "import headrace.cache", "Layers point downwards only"),
        ("memory/addressing.py", "import torch", "Row addressing needs no torch"),
        (
            "models/deepseek_v41/reference/__init__.py",
            "import headrace.kernels",
            "The reference shares no code with the cached path",
        ),
    ],
)
def test_a_planted_import_breaks_a_contract(tmp_path: Path, file: str, line: str, contract: str) -> None:
    copy = tmp_path / "src" / "headrace"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    target = copy / file
    target.write_text(target.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = lint_imports(tmp_path / "src", tmp_path)
    assert done.returncode != 0
    assert f"{contract} BROKEN" in " ".join(done.stdout.split())


@pytest.mark.parametrize("module", ["headrace", "headrace.memory.addressing", "headrace.core.errors", "headrace.cli"])
def test_module_imports_where_torch_cannot_be_imported(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
